//! Records the traces of the 2010 paper's experiment: five workloads in four journaling modes, each by a real guest
//! whose disk is served by `amberlog run --trace`.
//!
//! `record-traces --out DIR [--workloads A,B] [--modes A,B] [--percent N] [--guests N] [--recordings N] [--dir DIR]`: one guest after another,
//! each on a fresh ext3 image of 4 GB with a journal of 128 MB, as the papers' virtual data disks were. Leaves
//! `DIR/WORKLOAD-MODE.amber`, packed with zstd. `--percent` scales the workloads' sizes. With `--guests`, so many run and are
//! recorded at once, their disks on one modelled drive, and begin together: `DIR/WORKLOAD-MODE-0.amber` and so on. With `--recordings`, all
//! of it is recorded so many times, into `DIR/0`, `DIR/1` and so on, and what was recorded there before is not recorded again.
//!
//! Must never: leave a guest or an image behind; call a trace a mode that the guest's kernel did not mount.
//!
//! Failure story: a guest or a tool that fails ends the program with a sentence and exit code 1; traces that were
//! finished before stay. What one leaves that is killed (images, run directories) the next one removes, or the next run of a lab.

#![forbid(unsafe_code)]

mod workload;

use guest_kit::scratch::{self, Scratch, Use};
use guest_kit::{Guest, GuestSpec, Programs, program};
use guest_tools::options::Options;
use serde_json::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use workload::{Mode, Sizes, Workload};

type Outcome<T> = Result<T, String>;

const LIMIT: Duration = Duration::from_secs(3600);
const ZSTD_LEVEL: &str = "19";

/// What is to be recorded, and where to.
struct Request {
    out: PathBuf,
    images: PathBuf,
    workloads: Vec<Workload>,
    modes: Vec<Mode>,
    sizes: Sizes,
    /// How many at once; `None` for one, whose trace has no number.
    guests: Option<u64>,
    /// How many times; `None` for once, into the directory itself.
    recordings: Option<u64>,
}

/// The 2012 paper's drive, which guests at once share.
const DRIVE: &str = "st336753lw";

fn main() -> ExitCode {
    let request = match request() {
        Ok(request) => request,
        Err(error) => {
            eprintln!("record-traces: {error}");
            return ExitCode::from(2);
        }
    };
    scratch::remove_leftovers(&[&request.images]);
    match record_all(&request) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("record-traces: {error}");
            ExitCode::FAILURE
        }
    }
}

fn request() -> Outcome<Request> {
    let mut words = Options::parse(std::env::args().skip(1))?;
    let request = Request {
        out: PathBuf::from(words.required("out")?),
        images: words.text("dir").map_or_else(std::env::temp_dir, PathBuf::from),
        workloads: choice(&mut words, "workloads", &Workload::ALL, Workload::name)?,
        modes: choice(&mut words, "modes", &Mode::ALL, Mode::name)?,
        sizes: Sizes::of(words.number("percent", 100, 1..=1000)?),
        guests: Some(words.number("guests", 0, 0..=64)?).filter(|guests| *guests > 0),
        recordings: Some(words.number("recordings", 0, 0..=100)?).filter(|recordings| *recordings > 0),
    };
    words.finish()?;
    Ok(request)
}

/// The values that a list of names stands for; all of them when it is not given.
fn choice<T: Copy>(words: &mut Options, option: &str, all: &[T], name: fn(T) -> &'static str) -> Outcome<Vec<T>> {
    let Some(list) = words.text(option) else { return Ok(all.to_vec()) };
    let find = |word: &str| {
        let names: Vec<&str> = all.iter().map(|&value| name(value)).collect();
        let found = all.iter().copied().find(|&value| name(value) == word);
        found.ok_or_else(|| format!("--{option} names '{word}'; there are {}", names.join(", ")))
    };
    list.split(',').map(find).collect()
}

fn record_all(request: &Request) -> Outcome<()> {
    let amberlog = program::workspace_binary("amberlog").map_err(sentence)?;
    eprintln!("preparing what guests boot from");
    let programs = Programs::here().map_err(sentence)?;
    let Some(recordings) = request.recordings else {
        return record_once(&amberlog, &programs, request, &request.out, 0);
    };
    (0..recordings).try_for_each(|number| {
        record_once(&amberlog, &programs, request, &request.out.join(number.to_string()), number)
    })
}

/// Where the trace of one guest of a recording is kept.
fn kept_in(out: &Path, workload: Workload, mode: Mode, number: Option<usize>) -> PathBuf {
    let number = number.map(|number| format!("-{number}")).unwrap_or_default();
    out.join(format!("{}-{}{number}.amber", workload.name(), mode.name()))
}

/// What a directory's traces are of.
const MANIFEST: &str = "recorded.txt";

/// Every workload in every mode, once. A directory whose traces were recorded otherwise is left alone.
fn record_once(amberlog: &Path, programs: &Programs, request: &Request, out: &Path, recording: u64) -> Outcome<()> {
    std::fs::create_dir_all(out).map_err(|e| format!("cannot make {}: {e}", out.display()))?;
    let count = request.guests.unwrap_or(1);
    if request.recordings.is_some() {
        let platform = guest_kit::Platform::native().map_err(sentence)?;
        let now = format!(
            "{} % of the sizes, {count} guests at once, {}, programs {}",
            request.sizes.percent,
            platform.describe(),
            programs.digest()
        );
        be_of(out, &now)?;
    }
    for &workload in &request.workloads {
        let number = |guest: usize| request.guests.map(|_| guest);
        let kept = |mode: Mode| {
            (0..usize::try_from(count).expect("at most 64"))
                .map(move |guest| kept_in(out, workload, mode, number(guest)))
        };
        let is_to_do = |mode: &Mode| request.recordings.is_none() || !kept(*mode).all(|trace| trace.is_file());
        let modes: Vec<Mode> = request.modes.iter().copied().filter(is_to_do).collect();
        if modes.is_empty() {
            continue;
        }
        let directory = Scratch::new_in(&request.images, Use::Recording).map_err(sentence)?;
        let fresh = directory.path().join("fresh.img");
        workload.make_image(&request.sizes, &fresh, directory.path())?;
        for mode in modes {
            programs.refuse_changed().map_err(sentence)?;
            let started = Instant::now();
            let path = |what: &str, number: u64| directory.path().join(format!("{what}-{number}"));
            for number in 0..count {
                guest_kit::image::copy_image(&fresh, &path("disk", number)).map_err(sentence)?;
            }
            let disks: Vec<(PathBuf, PathBuf)> = (0..count).map(|n| (path("disk", n), path("trace", n))).collect();
            record(amberlog, workload, mode, request, &disks, directory.path(), recording)?;
            for ((_, trace), kept) in disks.iter().zip(kept(mode)) {
                pack(amberlog, trace, &kept)?;
                let bytes = std::fs::metadata(&kept).map_or(0, |metadata| metadata.len());
                println!("{}: {bytes} bytes, recorded in {:.0} s", kept.display(), started.elapsed().as_secs_f64());
            }
        }
    }
    Ok(())
}

/// An error where a directory has traces of something else; one that has none says from now on what its traces are of.
fn be_of(out: &Path, now: &str) -> Outcome<()> {
    let path = out.join(MANIFEST);
    match std::fs::read_to_string(&path) {
        Ok(before) if before.trim() != now => Err(format!(
            "{} has traces of {}, and these would be of {now}: give another --out, or remove it",
            out.display(),
            before.trim(),
        )),
        Ok(_) => Ok(()),
        Err(_) => {
            std::fs::write(&path, format!("{now}\n")).map_err(|e| format!("cannot write {}: {e}", path.display()))
        }
    }
}

/// Runs the workload in guests whose disks' requests are recorded, from before the mount to after the unmount. Several share a
/// drive, wait for each other, and begin together.
fn record(
    amberlog: &Path,
    workload: Workload,
    mode: Mode,
    request: &Request,
    disks: &[(PathBuf, PathBuf)],
    directory: &Path,
    recording: u64,
) -> Outcome<()> {
    let wait = if request.guests.is_some() { "exec 5</dev/ttyS1\nmark ready\nread -r go <&5" } else { "" };
    let script = |guest: u64| {
        format!(
            "set -e
         {wait}
         mount -t ext3 -o data={data}{more} /dev/vda /mnt
         dmesg | grep -q 'with {kernels_word} data mode' || fail 'the kernel did not mount with data={data}'
         {load}
         sync
         umount /mnt",
            data = mode.data(),
            more = workload.more_mount_options(),
            kernels_word = mode.kernels_word(),
            // Guests at once, and recordings, do not all draw the same places and files.
            load = workload.script(&request.sizes, 1 + recording * 1009 + guest),
        )
    };
    let report = |guest: u64| directory.join(format!("report-{guest}.json"));
    let spec = |guest: u64, image: &Path, trace: &Path, model: &str| {
        let mut disk: OsString = image.into();
        disk.push(format!(",placement={}{model}", mode.placement()));
        let words: [OsString; 8] = [
            amberlog.into(),
            "run".into(),
            "--disk".into(),
            disk,
            "--trace".into(),
            trace.into(),
            "--report".into(),
            report(guest).into(),
        ];
        GuestSpec::new(format!("{} {}", workload.name(), mode.name()), script(guest)).wrapper(words)
    };
    if request.guests.is_none() {
        let (image, trace) = &disks[0];
        Guest::run(spec(0, image, trace, ""), LIMIT).map_err(sentence)?;
        return be_in_force(&report(0), mode);
    }
    let socket = directory.join("drive");
    let drive = disk_model::Server::start(disk_model::ServerOptions {
        profile: DRIVE.parse()?,
        seed: 1,
        time_scale: 1.0,
        socket: Some(socket.clone()),
    })
    .map_err(sentence)?;
    let model = format!(",model={}", socket.display());
    // Each trace's time begins with its own amberlog: they are started together.
    let started: Result<Vec<Guest>, _> =
        (0..).zip(disks).map(|(guest, (image, trace))| Guest::launch(spec(guest, image, trace, &model))).collect();
    let mut guests = started.map_err(sentence)?;
    for guest in &mut guests {
        guest.wait_mark("ready", LIMIT).map_err(sentence)?;
    }
    guests.iter().try_for_each(|guest| guest.tell("go")).map_err(sentence)?;
    for guest in &mut guests {
        let code = guest.wait_exit_code(LIMIT).map_err(sentence)?;
        if code != 0 {
            return Err(sentence(guest.failure(&format!("its script ended with {code}"))));
        }
        guest.wait_end(LIMIT).map_err(sentence)?;
    }
    drop(drive);
    (0..).zip(disks).try_for_each(|(guest, _)| be_in_force(&report(guest), mode))
}

/// An error where amberlog says of the disk that it was not served as its mode's name says.
fn be_in_force(report: &Path, mode: Mode) -> Outcome<()> {
    let text = std::fs::read_to_string(report).map_err(|e| format!("cannot read {}: {e}", report.display()))?;
    let value: Value = serde_json::from_str(&text).map_err(sentence)?;
    let disk = &value["disks"][0];
    if disk["journal"]["kind"] != "internal" {
        return Err(format!("amberlog found no journal on the disk of a guest in mode {}", mode.name()));
    }
    let said = [&disk["fault"], &disk["placement_reason"]].into_iter().find_map(Value::as_str);
    said.map_or(Ok(()), |reason| Err(format!("amberlog says of the disk of a guest in mode {}: {reason}", mode.name())))
}

/// The trace in large frames, packed as well as zstd can.
fn pack(amberlog: &Path, trace: &Path, to: &Path) -> Outcome<()> {
    let mut command = Command::new(amberlog);
    command.args(["trace", "convert", "--zstd", ZSTD_LEVEL, "-o"]).arg(to).arg(trace);
    program::run(&mut command, &[0]).map(drop).map_err(sentence)
}

fn sentence(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recording that went on after an edit had traces of two versions of the guests' tools.
    #[test]
    fn traces_of_other_programs_are_not_added_to() {
        let directory = tempfile::tempdir().unwrap();
        be_of(directory.path(), "100 % of the sizes, programs 1").unwrap();
        be_of(directory.path(), "100 % of the sizes, programs 1").unwrap();
        let told = be_of(directory.path(), "100 % of the sizes, programs 2").unwrap_err();
        assert!(told.contains("programs 1, and these would be of 100 % of the sizes, programs 2"), "{told}");
        assert!(be_of(directory.path(), "100 % of the sizes, programs 1").is_ok(), "it stays what it was");
    }
}
