//! Records the traces of the 2010 paper's experiment: five workloads in four journaling modes, each by a real guest
//! whose disk is served by `amberlog run --trace`.
//!
//! `record-traces --out DIR [--workloads A,B] [--modes A,B] [--percent N] [--dir DIR]`: one guest after another, each on
//! a fresh ext3 image of 4 GB with a journal of 128 MB, as the papers' virtual data disks were. Leaves
//! `DIR/WORKLOAD-MODE.amber`, packed with zstd. `--percent` scales the workloads' sizes.
//!
//! Must never: leave a guest or an image behind; call a trace a mode that the guest's kernel did not mount.
//!
//! Failure story: a guest or a tool that fails ends the program with a sentence and exit code 1; traces that were
//! finished before stay.

#![forbid(unsafe_code)]

mod workload;

use guest_kit::{Guest, GuestSpec, program};
use guest_tools::options::Options;
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
}

fn main() -> ExitCode {
    let request = match request() {
        Ok(request) => request,
        Err(error) => {
            eprintln!("record-traces: {error}");
            return ExitCode::from(2);
        }
    };
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
    guest_kit::assets::Assets::get().map_err(sentence)?;
    std::fs::create_dir_all(&request.out).map_err(|e| format!("cannot make {}: {e}", request.out.display()))?;
    for &workload in &request.workloads {
        let directory = tempfile::Builder::new()
            .prefix("record-traces-")
            .tempdir_in(&request.images)
            .map_err(|e| format!("cannot make a directory in {}: {e}", request.images.display()))?;
        let fresh = directory.path().join("fresh.img");
        workload.make_image(&request.sizes, &fresh, directory.path())?;
        for &mode in &request.modes {
            let started = Instant::now();
            let image = directory.path().join("disk.img");
            guest_kit::image::copy_image(&fresh, &image).map_err(sentence)?;
            let trace = directory.path().join("recorded.amber");
            record(&amberlog, workload, mode, &request.sizes, &image, &trace)?;
            let kept = request.out.join(format!("{}-{}.amber", workload.name(), mode.name()));
            pack(&amberlog, &trace, &kept)?;
            let bytes = std::fs::metadata(&kept).map_or(0, |metadata| metadata.len());
            println!("{}: {bytes} bytes, recorded in {:.0} s", kept.display(), started.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

/// Runs the workload in a guest whose disk's requests are recorded, from before the mount to after the unmount.
fn record(amberlog: &Path, workload: Workload, mode: Mode, sizes: &Sizes, image: &Path, trace: &Path) -> Outcome<()> {
    let script = format!(
        "set -e
         mount -t ext3 -o data={data}{more} /dev/vda /mnt
         dmesg | grep -q 'with {kernels_word} data mode' || fail 'the kernel did not mount with data={data}'
         {load}
         sync
         umount /mnt",
        data = mode.data(),
        more = workload.more_mount_options(),
        kernels_word = mode.kernels_word(),
        load = workload.script(sizes),
    );
    let mut disk: OsString = image.into();
    disk.push(format!(",placement={}", mode.placement()));
    let words: [OsString; 6] = [amberlog.into(), "run".into(), "--disk".into(), disk, "--trace".into(), trace.into()];
    let spec = GuestSpec::new(format!("{} {}", workload.name(), mode.name()), script).wrapper(words);
    Guest::run(spec, LIMIT).map(drop).map_err(sentence)
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
