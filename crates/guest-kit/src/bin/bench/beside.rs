//! What a guest's requests to its other disks wait for while something is done with one disk's journal.
//!
//! A real daemon (`amberlog serve`) and a guest with three disks: one that something is done with, one whose file system has a journal of
//! its own in the same area, and one without a file system. To the last two, and where it can be to the first, requests go at a steady
//! rate (`guest-tools steady`), and each one's time begins when it was due: so it counts what waits behind a slow one, and a pause has the
//! weight of all who would have asked in it. What is done is done in a window, with a moment before and one behind it; between
//! these there are windows in which nothing is done, and only those of one run are held against each other.
//!
//! Nothing but the programs that serve the disks is of the build that is measured, if `AMBERLOG_BINARY_DIR` names another one.

use crate::figure::{Basis, Figure, Limit, median};
use crate::machine::Machine;
use crate::options::Options;
use crate::pause::LIMIT;
use crate::{Outcome, sentence};
use guest_kit::image::ExtRecipe;
use guest_kit::{AtEnd, Guest, GuestSpec, Signal, program};
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a window is open before something is done in it, and after that.
const BEFORE: Duration = Duration::from_millis(100);
const BEHIND: Duration = Duration::from_millis(300);
/// How long a window is open in which nothing is done, beside those two.
const NOTHING: Duration = Duration::from_millis(300);
/// How long a daemon may take to bring home what is owed.
const END: Duration = Duration::from_secs(60);
const MEMORY_MIB: u32 = 768;
/// What the longest wait of a window may be.
const WAIT_MAX_MS: f64 = 200.0;
/// The windows in which nothing is done.
const QUIET: &str = "quiet";
/// The name that a daemon gives the first disk.
pub(super) const DISK: &str = "disk0";

/// A stream of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stream {
    word: &'static str,
    what: &'static str,
    /// It goes to a disk that nothing is done with.
    is_beside: bool,
}

/// To the disk that something is done with.
pub(super) const OWN: Stream = Stream { word: "own", what: "durable writes on the same disk", is_beside: false };
/// To the one with another held journal.
pub(super) const HELD: Stream =
    Stream { word: "held", what: "durable writes on another disk with a held journal", is_beside: true };
/// To the one without any.
pub(super) const PLAIN: Stream =
    Stream { word: "plain", what: "direct reads and writes on a disk without a journal", is_beside: true };

/// What the guest runs: it does what the host says, a line at a time, and says when it is done.
const SCRIPT: &str = r#"
    # Every line on the console would hold up a guest of one processor.
    echo 1 >/proc/sys/kernel/printk
    # Nothing goes home by itself: what is committed is owed until something is done with it.
    echo 90 >/proc/sys/vm/dirty_ratio
    echo 80 >/proc/sys/vm/dirty_background_ratio
    echo 0 >/proc/sys/vm/dirty_writeback_centisecs
    driver=$(readlink -f /sys/block/vda/device)
    driver=${driver##*/}
    up() { mount -t ext4 -o data=journal,errors=continue /dev/vda /mnt; }
    # A flush of another file commits all that was written, and writes nothing of it home.
    fill() {
        dd if=/dev/urandom of=/mnt/load bs=1M count=FILL_MIB conv=notrunc 2>/dev/null &&
            dd if=/dev/zero of=/mnt/last bs=4k count=1 conv=notrunc,fsync 2>/dev/null
    }
    own() {
        guest-tools steady --file /mnt/own --stream own --window /tmp/window --interval-us INTERVAL --durable &
        own=$!
    }
    stop() { kill $own; wait $own 2>/dev/null; umount /mnt; }
    # The ioctl EXT4_IOC_SHUTDOWN, with nothing written: the journal stays open, and owes what it owes. Unmounting before the disk has gone would
    # write the superblock past the journal.
    give_up() {
        perl -e 'open(my $f, "<", "/mnt/load") or die; my $n = pack("L", 2); ioctl($f, 0x8004587d, $n) or die $!' &&
            let_go && umount /mnt
    }
    # The disk goes and comes for the guest alone: its device begins anew, as after a reset.
    let_go() { echo $driver >/sys/bus/virtio/drivers/virtio_blk/unbind; }
    take_back() { echo $driver >/sys/bus/virtio/drivers/virtio_blk/bind && [ -b /dev/vda ]; }
    window() { echo $1 >/tmp/next && mv /tmp/next /tmp/window; }

    up || fail mount
    fill || fail fill
    umount /mnt || fail umount
    mkdir -p /tmp/held
    mount -t ext4 -o data=journal /dev/vdb /tmp/held || fail 'mount the other disk'
    window none
    guest-tools steady --file /tmp/held/stream --stream held --window /tmp/window --interval-us INTERVAL --durable &
    guest-tools steady --file /dev/vdc --file-mib 16 --stream plain --window /tmp/window --interval-us INTERVAL &
    exec 5</dev/ttyS1
    mark ready
    while read -r number words <&5; do
        eval "$words" || fail "$words"
        mark did $number
    done
    fail 'nobody says what to do'
"#;

struct Daemon {
    process: Child,
    /// Of its VM.
    name: &'static str,
    run: PathBuf,
    log: PathBuf,
}

impl Daemon {
    fn start(name: &'static str, directory: &Path, area: &Path, images: &[PathBuf; 3]) -> Outcome<Self> {
        let of = |ending: &str| directory.join(format!("{name}{ending}"));
        let (config, run, log) = (of(".toml"), of("-run"), of(".log"));
        let text = format!("shm = {area:?}\nrun = {run:?}\n[[vm]]\nname = {name:?}\ndisks = {images:?}\n");
        std::fs::write(&config, text).map_err(sentence)?;
        let mut command = program::command("setpriv").map_err(sentence)?;
        // It does not outlive a bench that is killed.
        command
            .args(["--pdeathsig", "TERM", "--"])
            .arg(program::workspace_binary("amberlog").map_err(sentence)?)
            .args(["serve".as_ref(), "--config".as_ref(), config.as_os_str()])
            .env("AMBERLOG_LOG", "info")
            .env("AMBERLOG_LOG_FORMAT", "text")
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).map_err(sentence)?);
        Ok(Self { process: program::spawn(command).map_err(sentence)?, name, run, log })
    }

    fn ask(&self, words: &[&str]) -> Outcome<Vec<u8>> {
        let amberlog = program::workspace_binary("amberlog").map_err(sentence)?;
        let output = Command::new(amberlog).args(words).arg("--run").arg(&self.run).output().map_err(sentence)?;
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(format!("amberlog {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim())),
        }
    }

    fn spec(&self, script: String) -> Outcome<GuestSpec> {
        let deadline = Instant::now() + LIMIT;
        let memory = MEMORY_MIB.to_string();
        let needed = loop {
            match self.ask(&["arguments", self.name, "--memory", &memory, "--json"]) {
                Ok(said) => break serde_json::from_slice::<Value>(&said).map_err(sentence)?,
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        let word = |value: &Value| value.as_str().map(OsString::from);
        let mut spec = GuestSpec::new(self.name, script);
        spec.qemu_arguments = needed["arguments"].as_array().into_iter().flatten().filter_map(word).collect();
        let environment = needed["environment"].as_object().into_iter().flatten();
        spec.environment = environment.filter_map(|(name, value)| Some((name.into(), word(value)?))).collect();
        spec.programs.push("perl");
        (spec.memory_mib, spec.at_end) = (MEMORY_MIB, AtEnd::Stay);
        Ok(spec)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.process), Signal::TERM);
        if !program::has_ended_within(self.process.id(), END) {
            let _ = self.process.kill();
        }
        let _ = self.process.wait();
    }
}

/// What a stream took in one window.
struct Window {
    kind: &'static str,
    stream: Stream,
    /// In their order.
    times_us: Vec<u64>,
}

/// A guest and the daemon that serves it.
pub(super) struct Rig {
    // The guest goes before who serves it, and that before what is held.
    guest: Guest,
    daemon: Daemon,
    _area: tempfile::TempDir,
    /// How much the first disk's journal owes after `fill`.
    pub(super) owed_mib: u32,
    interval_us: u64,
    served_by: String,
    /// What the guest was told to do, counted.
    told: u64,
    windows: Vec<Window>,
}

impl Rig {
    /// Starts both. The first disk is not mounted. `name` is that of the VM and of its files in `directory`.
    pub(super) fn start(name: &'static str, options: &Options, machine: &Machine, directory: &Path) -> Outcome<Self> {
        let [image_mib, journal_mib, other_mib, other_journal_mib, owed_mib] =
            if options.quick { [128, 32, 64, 16, 3] } else { [768, 128, 256, 64, 48] };
        let images = ["own", "held", "plain"].map(|disk| directory.join(format!("{name}-{disk}.img")));
        let [own, held, plain] = &images;
        ExtRecipe::ext4(image_mib, journal_mib).make(own).map_err(sentence)?;
        ExtRecipe::ext4(other_mib, other_journal_mib).make(held).map_err(sentence)?;
        std::fs::File::create(plain).and_then(|file| file.set_len(32 << 20)).map_err(sentence)?;
        let area = tempfile::Builder::new().prefix("bench-").tempdir_in("/dev/shm").map_err(sentence)?;
        let served_by = served_by()?;
        let daemon = Daemon::start(name, directory, area.path(), &images)?;
        // An emulated processor would do nothing else.
        let interval_us = if machine.is_emulated() { 20_000 } else { 5000 };
        let script = SCRIPT.replace("FILL_MIB", &owed_mib.to_string()).replace("INTERVAL", &interval_us.to_string());
        let mut guest = Guest::start(daemon.spec(script)?).map_err(sentence)?;
        guest.wait_mark("ready", LIMIT).map_err(sentence)?;
        let windows = Vec::new();
        let mut rig = Self { guest, daemon, _area: area, owed_mib, interval_us, served_by, told: 0, windows };
        for stream in [HELD, PLAIN] {
            rig.await_ready(stream, 1)?;
        }
        Ok(rig)
    }

    /// Waits until a stream has begun so often.
    pub(super) fn await_ready(&mut self, stream: Stream, count: usize) -> Outcome<()> {
        let ready = format!("steady-ready {}", stream.word);
        self.guest
            .await_report("a stream of requests did not begin", LIMIT, |reported| {
                (reported.marks.iter().filter(|mark| **mark == ready).count() >= count).then_some(())
            })
            .map_err(sentence)
    }

    /// Has the guest do this, and waits until it is done.
    pub(super) fn does(&mut self, words: &str) -> Outcome<()> {
        self.told += 1;
        self.guest.tell(&format!("{} {words}", self.told)).map_err(sentence)?;
        self.guest.wait_mark(&format!("did {}", self.told), LIMIT).map_err(sentence)
    }

    /// Asks the daemon of the VM: `placement` of it, say, with what comes behind its name.
    pub(super) fn ask(&self, what: &str, more: &[&str]) -> Outcome<Vec<u8>> {
        self.daemon.ask(&[&[what, self.daemon.name], more].concat())
    }

    /// Bytes that have gone home on the first disk so far.
    pub(super) fn home_bytes(&self) -> Outcome<u64> {
        let status: Value = serde_json::from_slice(&self.ask("status", &["--json"])?).map_err(sentence)?;
        let bytes = status["disks"][0]["counters"]["home_bytes_to_storage"].as_u64();
        bytes.ok_or_else(|| format!("the daemon does not say what went home: {status}"))
    }

    /// What the daemon's log says behind these words, line by line.
    pub(super) fn said(&self, words: &str) -> Outcome<Vec<String>> {
        let log = std::fs::read(&self.daemon.log).map_err(sentence)?;
        let behind = |line: &str| Some(line.split_once(words)?.1.to_owned());
        Ok(String::from_utf8_lossy(&log).lines().filter_map(behind).collect())
    }

    /// Does something while the times of these streams are taken. Gives how long it took, in ms.
    pub(super) fn window(
        &mut self,
        kind: &'static str,
        streams: &[Stream],
        what: impl FnOnce(&mut Self) -> Outcome<()>,
    ) -> Outcome<f64> {
        let name = format!("{kind}-{}", self.told);
        self.does(&format!("window {name}"))?;
        std::thread::sleep(BEFORE);
        let begun = Instant::now();
        what(self)?;
        let took_ms = begun.elapsed().as_secs_f64() * 1e3;
        std::thread::sleep(BEHIND);
        self.does("window none")?;
        for stream in streams {
            let times_us = self.times(*stream, &name)?;
            if times_us.is_empty() {
                return Err(format!("{} were not asked for in a window of {took_ms:.0} ms and more", stream.what));
            }
            self.windows.push(Window { kind, stream: *stream, times_us });
        }
        Ok(took_ms)
    }

    /// What windows are held against in which something is done.
    pub(super) fn quiet(&mut self, streams: &[Stream]) -> Outcome<()> {
        let nothing = |_: &mut Self| {
            std::thread::sleep(NOTHING);
            Ok(())
        };
        self.window(QUIET, streams, nothing).map(drop)
    }

    /// What a stream took in the window of this name.
    fn times(&mut self, stream: Stream, window: &str) -> Outcome<Vec<u64>> {
        let told = format!("steady {} {window} ", stream.word);
        let problem = format!("what {} took was not told", stream.what);
        let is_told = |mark: &String| mark.strip_prefix(told.as_str())?.parse::<usize>().ok();
        let count = self.guest.await_report(&problem, LIMIT, |reported| reported.marks.iter().find_map(is_told));
        let count = count.map_err(sentence)?;
        let times = times_told(&self.guest.reported().marks, &format!("steady-times {} {window} ", stream.word));
        if times.len() != count {
            return Err(format!("{problem} whole: {} of {count} times", times.len()));
        }
        Ok(times)
    }

    fn times_of(&self, kind: &str, stream: Stream) -> Times {
        let of = |window: &&Window| window.kind == kind && window.stream == stream;
        Times::of(self.windows.iter().filter(of).map(|window| window.times_us.as_slice()))
    }

    /// Prints what these streams took in windows of this kind, and how many times as much as where nothing was done. `what` says what was
    /// done. Gives a figure for each.
    pub(super) fn tell(&self, kind: &str, what: &str, streams: &[Stream], machine: &Machine) -> Vec<Figure> {
        let mut figures = Vec::new();
        for stream in streams {
            let (times, usual) = (self.times_of(kind, *stream), self.times_of(QUIET, *stream));
            let beside = |per_cent| {
                let now = percentile_ms(&times.requests_us, per_cent);
                (now, now / percentile_ms(&usual.requests_us, per_cent))
            };
            let said = |(ms, factor): (f64, f64)| format!("{ms:.2} ms ({factor:.2} times)");
            let requests = times.requests_us.len();
            let (p99_ms, p99_factor) = beside(99);
            println!("    {what}: {}", stream.what);
            println!(
                "        p50 {}, p99 {}, the longest {}; n = {requests} requests",
                said(beside(50)),
                said((p99_ms, p99_factor)),
                said(beside(100))
            );
            let (longest, usual_longest) = (times.longest(), usual.longest());
            println!("        the longest of each window: {longest}; with nothing done {usual_longest}");
            let note = format!(
                "the longest of each window: {longest}; p99 of {requests} requests {p99_ms:.2} ms, \
                 {p99_factor:.2} times that with nothing done; {}",
                machine.guests_run_on()
            );
            let name = format!("{what}: longest wait of {}, p99", stream.what);
            let measured = percentile_ms(&times.longest_us, 99);
            let figure = Figure::new(name, measured, "ms", Limit::AtMost(WAIT_MAX_MS), Basis::Time).note(note);
            // How long the disk itself waits is a matter of how much it is owed.
            figures.push(if stream.is_beside { figure } else { figure.not_judged() });
        }
        figures
    }

    /// For `--json`.
    pub(super) fn detail(&self) -> Value {
        let mut known: Vec<(&str, Stream)> = Vec::new();
        for window in &self.windows {
            if !known.contains(&(window.kind, window.stream)) {
                known.push((window.kind, window.stream));
            }
        }
        let of = |(kind, stream): &(&str, Stream)| {
            let times = self.times_of(kind, *stream);
            let at = |per_cent| percentile_ms(&times.requests_us, per_cent);
            json!({
                "kind": kind, "stream": stream.word, "requests": times.requests_us.len(), "p50_ms": at(50),
                "p99_ms": at(99), "longest_ms": at(100), "longest_of_windows_us": times.longest_us,
            })
        };
        json!({
            "served_by": self.served_by, "owed_mib": self.owed_mib, "interval_us": self.interval_us,
            "streams": known.iter().map(of).collect::<Vec<_>>(),
        })
    }

    /// Ends the guest, and then who serves it.
    pub(super) fn end(mut self) -> Outcome<()> {
        self.guest.kill_qemu().map_err(sentence)?;
        self.guest.wait_end(LIMIT).map(drop).map_err(sentence)
    }
}

/// Which program serves, as it says itself.
fn served_by() -> Outcome<String> {
    let amberlog = program::workspace_binary("amberlog").map_err(sentence)?;
    let output = program::run(Command::new(amberlog).arg("--version"), &[0]).map_err(sentence)?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let is_other = std::env::var_os("AMBERLOG_BINARY_DIR").is_some();
    let served_by = if is_other { format!("{version}, of AMBERLOG_BINARY_DIR") } else { version };
    println!("\nserved by {served_by}");
    Ok(served_by)
}

/// The times of one window, which come in lines that begin so.
fn times_told(marks: &[String], beginning: &str) -> Vec<u64> {
    let lines = marks.iter().filter_map(|mark| mark.strip_prefix(beginning));
    lines.flat_map(|line| line.split(',').filter_map(|time| time.parse().ok())).collect()
}

/// What a stream took in all windows of a kind, sorted.
struct Times {
    requests_us: Vec<u64>,
    /// The longest one of each window.
    longest_us: Vec<u64>,
}

impl Times {
    fn of<'a>(windows: impl Iterator<Item = &'a [u64]>) -> Self {
        let mut times = Times { requests_us: Vec::new(), longest_us: Vec::new() };
        for window in windows {
            times.requests_us.extend(window);
            times.longest_us.extend(window.iter().max());
        }
        times.requests_us.sort_unstable();
        times.longest_us.sort_unstable();
        times
    }

    fn longest(&self) -> String {
        let ms: Vec<f64> = self.longest_us.iter().map(|us| *us as f64 / 1e3).collect();
        spread(&ms)
    }
}

/// How values lie, in ms: the middle one, the least and the greatest, and how many there are.
pub(super) fn spread(values_ms: &[f64]) -> String {
    let least = values_ms.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values_ms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let middle = median(values_ms);
    format!("p50 {middle:.1} ms, {least:.1} to {greatest:.1}, n = {}", values_ms.len())
}

/// The least of some sorted times that so many in a hundred do not exceed (nearest rank), in ms.
fn percentile_ms(sorted_us: &[u64], per_cent: usize) -> f64 {
    let rank = (sorted_us.len() * per_cent).div_ceil(100).max(1);
    sorted_us.get(rank - 1).map_or(f64::NAN, |us| *us as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_of_their_own_window_and_stream() {
        let marks = [
            "steady-times held recovery-1 500,700",
            "steady-times plain recovery-1 100",
            "steady-times held recovery-1 90000",
            "steady held recovery-1 3",
            "steady-times held recovery-12 1",
        ];
        let marks = marks.map(str::to_owned);
        assert_eq!(times_told(&marks, "steady-times held recovery-1 "), [500, 700, 90_000]);
        assert!(times_told(&marks, "steady-times held quiet-1 ").is_empty());
    }

    /// A pause is one request in a hundred of all, and the longest of its own window.
    #[test]
    fn what_is_longest_is_counted_window_by_window() {
        let usual: Vec<u64> = (1..=100).map(|number| number * 10).collect();
        let mut paused = usual.clone();
        paused[50] = 90_000;
        let times = Times::of([usual.as_slice(), paused.as_slice()].into_iter());
        assert_eq!(times.longest_us, [1000, 90_000]);
        assert_eq!(times.requests_us.len(), 200);
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        near(percentile_ms(&times.requests_us, 50), 0.5);
        near(percentile_ms(&times.requests_us, 99), 1.0);
        near(percentile_ms(&times.requests_us, 100), 90.0);
        near(percentile_ms(&times.longest_us, 99), 90.0);
        assert!(percentile_ms(&[], 99).is_nan());
        assert_eq!(times.longest(), "p50 45.5 ms, 1.0 to 90.0, n = 2");
    }
}
