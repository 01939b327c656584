//! How long a guest that is moved to another host stands still, with its disk on amberlog and, in the same run and in turns, on QEMU's own
//! virtio-blk. What amberlog adds to QEMU's own time is the figure.
//!
//! A guest keeps committing small records to ext4 (data=journal), each acknowledged over its serial port when it is durable. The time from the last
//! acknowledgement of the QEMU that it leaves to the first one of the QEMU that it comes to is measured here, on the host: a guest's own
//! clock stands still while it is moved. Two hosts are two daemons, each in a mount namespace with a /dev/shm of its own; both QEMUs
//! have the guest's memory in a file in a tmpfs. Then the guest is moved some more, with the worker that serves it killed while it is.
//!
//! The guests are emulated, unless `AMBERLOG_MIGRATION_KVM` is set: a paravirtual KVM does not carry a guest over by itself.

use crate::figure::{Basis, Figure, Limit};
use crate::options::Options;
use crate::pause::LIMIT;
use crate::{Outcome, sentence};
use guest_kit::evidence::{Order, RecordLayout};
use guest_kit::image::ExtRecipe;
use guest_kit::{Accelerator, AtEnd, Cache, Drive, Guest, GuestSpec, Signal, program};
use guest_tools::random::Random;
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STREAM: &str = "moved";
/// QEMU 7.2 damages guests that it moves, with disks of its own, too.
const QEMU_MIN: (u32, u32) = (10, 0);
const MEMORY_MIB: u32 = 192;
/// What a move may add to QEMU's own time, in ms.
const ADDED_MAX_MS: f64 = 300.0;
const UNMEASURED: &str = "a move to another host: what amberlog adds to QEMU's own time";

/// A daemon, and the namespace that it is in.
struct Host {
    daemon: Child,
    namespace: Child,
    run: PathBuf,
}

impl Drop for Host {
    fn drop(&mut self) {
        for child in [&mut self.daemon, &mut self.namespace] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Host {
    fn start(directory: &Path, name: &str, image: &Path) -> Outcome<Self> {
        // Neither outlives a bench that is killed.
        let mut namespace = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "unshare"])
            .args(["--mount", "--propagation", "private", "sh", "-c"])
            .arg("mount -t tmpfs tmpfs /dev/shm && mkdir -m 700 /dev/shm/area && echo ready && exec sleep 10000")
            .stdout(Stdio::piped())
            .spawn()
            .map_err(sentence)?;
        let mut line = String::new();
        if let Some(stdout) = namespace.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(sentence)?;
        }
        let (config, run) = (directory.join(format!("{name}.toml")), directory.join(format!("run-{name}")));
        let text = format!(
            "shm = \"/dev/shm/area\"\nrun = {run:?}\n[migration]\nexperimental = true\n[[vm]]\nname = \"v\"\ndisks = [\"{}\"]\n",
            image.display()
        );
        std::fs::write(&config, text).map_err(sentence)?;
        let log = std::fs::File::create(directory.join(format!("{name}.log"))).map_err(sentence)?;
        let daemon = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "nsenter"])
            .args(inside(&namespace))
            .arg(program::workspace_binary("amberlog").map_err(sentence)?)
            .args(["serve".as_ref(), "--config".as_ref(), config.as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let daemon = match daemon {
            Ok(daemon) if line == "ready\n" => daemon,
            other => {
                if let Ok(mut daemon) = other {
                    let _ = daemon.kill();
                    let _ = daemon.wait();
                }
                let _ = namespace.kill();
                let _ = namespace.wait();
                return Err("two hosts cannot be made of namespaces here".to_owned());
            }
        };
        Ok(Host { daemon, namespace, run })
    }

    fn ask(&self, words: &[&str]) -> Outcome<Value> {
        let program = program::workspace_binary("amberlog").map_err(sentence)?;
        let output = Command::new(program).args(words).arg("--run").arg(&self.run).output().map_err(sentence)?;
        match output.status.success() {
            true => serde_json::from_slice(&output.stdout).map_err(sentence),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    fn wait_state(&self, state: &str) -> Outcome<Value> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let entry = self.ask(&["status", "--json", "v"]);
            match entry {
                Ok(entry) if entry["state"] == state => return Ok(entry),
                _ if Instant::now() > deadline => return Err(format!("the VM is not {state}: {entry:?}")),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}

fn inside(namespace: &Child) -> [String; 3] {
    ["-t".to_owned(), namespace.id().to_string(), "-m".to_owned()]
}

/// Who has the guest's disk.
enum Side {
    Amberlog([Host; 2]),
    /// QEMU itself: image and the directory for the guest's memory.
    Qemu(PathBuf, PathBuf),
}

impl Side {
    fn spec(&self, at: usize, number: usize, incoming: Option<&str>) -> Outcome<GuestSpec> {
        let layout =
            RecordLayout { seed: 9, order: Order::Overwrite { slots: 30 }, files: 2, ..RecordLayout::default() };
        let script = format!(
            "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
            guest-tools records --directory /mnt/records --stream {STREAM} {} --forever",
            layout.to_options()
        );
        let mut spec = GuestSpec::new("v", script);
        (spec.memory_mib, spec.at_end, spec.accelerator) = (MEMORY_MIB, AtEnd::Stay, Some(accelerator()));
        spec.kernel_arguments = "no_timer_check".to_owned();
        match self {
            Side::Amberlog(hosts) => {
                let host = &hosts[at];
                host.wait_state("waiting")?;
                let memory = MEMORY_MIB.to_string();
                let needed = host.ask(&["arguments", "v", "--memory", &memory, "--reconnect", "--json"])?;
                let word = |value: &Value| value.as_str().map(OsString::from);
                spec.qemu_arguments = needed["arguments"].as_array().into_iter().flatten().filter_map(word).collect();
                let environment = needed["environment"].as_object().into_iter().flatten();
                spec.environment = environment.filter_map(|(name, value)| Some((name.into(), word(value)?))).collect();
                spec = spec.wrapper(std::iter::once("nsenter".to_owned()).chain(inside(&host.namespace)));
            }
            Side::Qemu(image, memory) => {
                spec = spec.drives(vec![Drive::new(image, Cache::None)]);
                let file = memory.join(format!("ram-{number}"));
                let object =
                    format!("memory-backend-file,id=ram,size={MEMORY_MIB}M,share=on,mem-path={}", file.display());
                spec.qemu_arguments =
                    ["-object", &object, "-machine", "memory-backend=ram"].map(OsString::from).to_vec();
            }
        }
        if let Some(uri) = incoming {
            spec.qemu_arguments.extend(["-incoming".into(), uri.into()]);
        }
        Ok(spec)
    }
}

fn accelerator() -> Accelerator {
    if std::env::var_os("AMBERLOG_MIGRATION_KVM").is_some() { Accelerator::Kvm } else { Accelerator::Tcg }
}

/// What one move took, in ms.
#[derive(Clone, Copy)]
struct Move {
    /// From the last acknowledgement before to the first one after it.
    still_ms: f64,
    /// What QEMU says of itself.
    downtime_ms: f64,
}

#[derive(Default)]
struct Moves {
    done: Vec<Move>,
    /// With a worker killed meanwhile: those that came through, and those after which the guest went on where it was.
    through: Vec<Move>,
    stayed: u64,
    missed: u64,
}

impl Moves {
    fn all(moves: &[Move], of: fn(&Move) -> f64) -> Vec<f64> {
        let mut all: Vec<f64> = moves.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all
    }
}

fn at(sorted: &[f64], share: f64) -> f64 {
    sorted.get(((sorted.len().max(1) - 1) as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// Waits until a guest has acknowledged so many more.
fn more(guest: &mut Guest, count: u64) -> Outcome<()> {
    let last = guest.acknowledged(STREAM).last.unwrap_or(0);
    guest.wait_acknowledged(STREAM, last + count, LIMIT).map_err(sentence)
}

/// Moves a guest so often, and then some times more with its worker killed while it is moved.
fn round(
    side: &Side,
    directory: &Path,
    hops: usize,
    deaths: usize,
    random: &mut Random,
    moves: &mut Moves,
) -> Outcome<()> {
    let (mut here, mut number) = (0, 0);
    let mut guest = Guest::start(side.spec(here, number, None)?).map_err(sentence)?;
    guest.wait_acknowledged(STREAM, 50, LIMIT).map_err(sentence)?;
    for hop in 0..hops + deaths {
        number += 1;
        let path = directory.join(format!("move-{number}"));
        let _ = std::fs::remove_file(&path);
        let uri = format!("unix:{}", path.display());
        let mut next = Guest::launch(side.spec(1 - here, number, Some(&uri))?).map_err(sentence)?;
        // It answers when it listens.
        next.qmp().map_err(sentence)?;
        more(&mut guest, 20)?;
        let set = json!({"max-bandwidth": 1_u64 << 31, "downtime-limit": 300});
        guest.qmp().and_then(|qmp| qmp.execute("migrate-set-parameters", set)).map_err(sentence)?;
        let begun = Instant::now();
        guest.qmp().and_then(|qmp| qmp.execute("migrate", json!({"uri": uri}))).map_err(sentence)?;
        let mut victim = match side {
            Side::Amberlog(hosts) if hop >= hops => {
                let entry = hosts[here].ask(&["status", "--json", "v"])?;
                let pid = entry["worker_pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
                pid.map(|pid| (pid, Duration::from_millis(random.below(300))))
            }
            _ => None,
        };
        let (mut told, mut last) = (guest.acknowledged(STREAM).count, Instant::now());
        let mut asked = Instant::now();
        let first = loop {
            // A glance takes some microseconds.
            let now = Instant::now();
            let count = guest.acknowledged(STREAM).count;
            if count != told {
                (told, last) = (count, now);
            }
            if next.acknowledged(STREAM).count > 0 {
                break Some(now);
            }
            if let Some((pid, _)) = victim.filter(|(_, after)| begun.elapsed() >= *after) {
                let _ = kill_process(pid, Signal::KILL);
                victim = None;
            }
            if asked.elapsed() > Duration::from_millis(500) {
                asked = now;
                let status = guest.qmp().and_then(|qmp| qmp.execute("query-migrate", Value::Null)).map_err(sentence)?;
                if status["status"] == "failed" {
                    break None;
                }
                if begun.elapsed() > LIMIT {
                    return Err(format!("a guest that is moved does not go on: {status}"));
                }
            }
            std::thread::sleep(Duration::from_micros(500));
        };
        let Some(first) = first else {
            // It goes on where it is.
            if hop < hops {
                return Err("QEMU could not move the guest".to_owned());
            }
            next.forgive();
            drop(next);
            guest.qmp().and_then(|qmp| qmp.cont()).map_err(sentence)?;
            more(&mut guest, 20)?;
            moves.stayed += 1;
            continue;
        };
        let status = guest.qmp().and_then(|qmp| qmp.execute("query-migrate", Value::Null)).map_err(sentence)?;
        let one = Move {
            still_ms: first.saturating_duration_since(last).as_secs_f64() * 1e3,
            downtime_ms: status["downtime"].as_f64().unwrap_or(f64::NAN),
        };
        match hop < hops {
            true => moves.done.push(one),
            // It was through before the worker's time had come.
            false if victim.is_some() => moves.missed += 1,
            false => moves.through.push(one),
        }
        let _ = guest.qmp().map(|qmp| qmp.quit());
        guest.forgive();
        guest.wait_end(LIMIT).map_err(sentence)?;
        (guest, here) = (next, 1 - here);
        if let Side::Qemu(_, memory) = side {
            let _ = std::fs::remove_file(memory.join(format!("ram-{}", number - 1)));
        }
        more(&mut guest, 20)?;
    }
    guest.kill_qemu().map_err(sentence)?;
    guest.forgive();
    guest.wait_end(LIMIT).map_err(sentence)?;
    Ok(())
}

/// Moves guests, in turns, and says how long they stood still.
pub fn measure(options: &Options, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let limit = Limit::AtMost(ADDED_MAX_MS);
    let missing = |why: String| Ok((vec![Figure::missing(UNMEASURED, "ms", limit, why)], Value::Null));
    if !rustix::process::geteuid().is_root() {
        return missing("only root can make two hosts of namespaces".to_owned());
    }
    let version = program::qemu_version().map_err(sentence)?;
    if version.is_none_or(|version| version < QEMU_MIN) {
        return missing(format!("QEMU {version:?} damages guests that it moves; 10.0 and newer do not"));
    }
    let (hops, deaths) = if options.quick { (2, 1) } else { (10, 3) };
    let mut random = Random::of(9, 1);
    let (mut ours, mut own) = (Moves::default(), Moves::default());
    for number in 0..options.rounds {
        for is_ours in [number % 2 == 1, number % 2 == 0] {
            let image = directory.join("migration.img");
            let _ = std::fs::remove_file(&image);
            let file_system = ExtRecipe::ext4(256, 16).make(&image).map_err(sentence)?;
            let memory = tempfile::Builder::new().prefix("bench-").tempdir_in("/dev/shm").map_err(sentence)?;
            let (side, moves) = if is_ours {
                let hosts = [Host::start(directory, "one", &image)?, Host::start(directory, "two", &image)?];
                (Side::Amberlog(hosts), &mut ours)
            } else {
                (Side::Qemu(image.clone(), memory.path().to_owned()), &mut own)
            };
            round(&side, directory, hops, if is_ours { deaths } else { 0 }, &mut random, moves)?;
            if let Side::Amberlog(hosts) = &side {
                for host in hosts {
                    host.wait_state("waiting")?;
                }
            }
            drop(side);
            guest_kit::judge::replay_with_e2fsck(&file_system).map_err(sentence)?;
            let verdict = guest_kit::judge::check(&file_system).map_err(sentence)?;
            if !verdict.is_consistent() {
                return Err(format!("what a moved guest left is not consistent: {verdict:?}"));
            }
        }
    }
    let version = version.map_or_else(String::new, |(major, minor)| format!("QEMU {major}.{minor}"));
    let guests =
        format!("{version}, guests {}", if accelerator() == Accelerator::Kvm { "under KVM" } else { "emulated" });
    println!("\nguests moved to another host and back ({guests}), in ms");
    let show = |what: &str, moves: &[Move]| {
        let (still, downtime) = (Moves::all(moves, |one| one.still_ms), Moves::all(moves, |one| one.downtime_ms));
        println!(
            "    {what}, n = {}: stood still p50 {:.0}, p99 {:.0}, at most {:.0}; downtime as QEMU says p50 {:.0}, p99 {:.0}, at most {:.0}",
            moves.len(),
            at(&still, 0.5),
            at(&still, 0.99),
            at(&still, 1.0),
            at(&downtime, 0.5),
            at(&downtime, 0.99),
            at(&downtime, 1.0)
        );
        still
    };
    let with_amberlog = show("amberlog (retain)", &ours.done);
    let with_qemu = show("QEMU's own virtio-blk, cache=none", &own.done);
    show("amberlog, its worker killed meanwhile", &ours.through);
    println!(
        "    {} more moves were through before the kill; {} were given up by QEMU after it, and the guest went on where it was",
        ours.missed, ours.stayed
    );
    let figures = [("p50", 0.5), ("p99", 0.99), ("at most", 1.0)].map(|(name, share)| {
        let (one, other) = (at(&with_amberlog, share), at(&with_qemu, share));
        let note = format!(
            "n = {} and {}; {one:.0} ms, with QEMU's own disk {other:.0} ms; {guests}",
            with_amberlog.len(),
            with_qemu.len()
        );
        Figure::new(format!("{UNMEASURED}, {name}"), one - other, "ms", limit, Basis::Time).note(note)
    });
    let times = |moves: &[Move]| moves.iter().map(|one| [one.still_ms, one.downtime_ms]).collect::<Vec<_>>();
    let detail = json!({
        "still_and_downtime_ms": {"amberlog": times(&ours.done), "qemu": times(&own.done), "amberlog_worker_killed": times(&ours.through)},
        "stayed_after_a_kill": ours.stayed, "through_before_the_kill": ours.missed, "guests": guests,
    });
    Ok((figures.to_vec(), detail))
}
