//! What the tests with real guests share: a bench with images and a place for the area, `amberlog run` on it, and the
//! judgement of what is left.

use guest_kit::evidence::{self, Order, RecordLayout};
use guest_kit::image::FileSystem;
use guest_kit::{Accelerator, AtEnd, Guest, GuestSpec, Platform, Reported, judge};
use serde_json::Value;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

/// For a test whose image is behind FUSE, to its end: the next one there has the same device and inode number, and what this one's VM
/// is owed is found by these.
pub fn alone_behind_fuse() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // Another one's failure is its own.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For whatever has to happen: generous, because the machine may be doing many other things.
pub const LIMIT: Duration = Duration::from_secs(180);

/// The guest's own kernel has just mounted: it had nothing to replay. "recovery complete" is also what it says when it has
/// removed inodes that were deleted while they were open (`needs_recovery` in ext4's super.c), which a replay leaves to it.
pub const NOTHING_TO_REPLAY: &str = "if dmesg | grep -i 'recover'; then
        dmesg | grep -iE 'orphan|cleaned up' || fail 'the kernel had something to replay'
    fi";

/// The program under test, with the shim beside it.
pub fn amberlog() -> PathBuf {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_amberlog"));
    let shim = program.with_file_name("libamberlog_vmm_shim.so");
    assert!(shim.is_file(), "{} is not there: run 'cargo build -p vmm-shim' first", shim.display());
    program
}

/// Runs `amberlog` to its end.
pub fn amberlog_with<W: AsRef<std::ffi::OsStr>>(words: impl IntoIterator<Item = W>) -> Output {
    Command::new(amberlog()).args(words).stdin(Stdio::null()).output().expect("amberlog can be started")
}

/// What a program wrote.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What guests run on here, and beside it emulation, if that is something else: what holds under one holds under the other.
/// Every test runs under the first; some of each kind under all.
pub fn accelerators() -> Vec<Accelerator> {
    let native = Platform::native().expect("there is a way to run guests").accelerator;
    if native == Accelerator::Tcg { vec![native] } else { vec![native, Accelerator::Tcg] }
}

/// Directories of one test, removed at its end.
pub struct Bench {
    images: TempDir,
    area: TempDir,
}

impl Bench {
    pub fn new() -> Self {
        let directory = |parent: &Path| {
            tempfile::Builder::new().prefix("amberlog-test-").tempdir_in(parent).expect("a directory can be made")
        };
        Self { images: directory(&std::env::temp_dir()), area: directory(Path::new("/dev/shm")) }
    }

    /// A file beside the images.
    pub fn path(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// `--shm`.
    pub fn area(&self) -> &Path {
        self.area.path()
    }

    /// `amberlog run` with these words, an area and a report, up to `--`.
    pub fn words<W: Into<OsString>>(&self, words: impl IntoIterator<Item = W>) -> Vec<OsString> {
        let mut all: Vec<OsString> = vec![amberlog().into(), "run".into(), "--shm".into(), self.area().into()];
        all.extend(["--report".into(), self.path("report.json").into()]);
        all.extend(words.into_iter().map(Into::into));
        all
    }

    /// A guest below `amberlog run` with these words, which stays when its script is through.
    pub fn spec<W: Into<OsString>>(
        &self,
        name: &str,
        script: impl Into<String>,
        words: impl IntoIterator<Item = W>,
    ) -> GuestSpec {
        let mut spec = GuestSpec::new(name, script).wrapper(self.words(words));
        spec.at_end = AtEnd::Stay;
        // An emulated timer on a busy host is too slow for the kernel's test of it.
        spec.kernel_arguments = "no_timer_check".to_owned();
        spec
    }

    /// What the last run wrote.
    pub fn report(&self) -> Report {
        let path = self.path("report.json");
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("amberlog wrote no report: {error}"));
        let report = Report(serde_json::from_slice(&bytes).expect("the report is JSON"));
        assert_eq!(report.0["schema"], 1);
        report
    }

    /// Whether nothing is left in the area's directory.
    #[track_caller]
    pub fn assert_area_is_empty(&self) {
        let left: Vec<_> = std::fs::read_dir(self.area()).expect("it is there").flatten().map(|e| e.path()).collect();
        assert!(left.is_empty(), "left in the area: {left:?}");
    }

    /// `amberlog recover --area` on everything here; gives its JSON.
    #[track_caller]
    pub fn recover_area(&self) -> Value {
        let output = amberlog_with(["recover".as_ref(), "--json".as_ref(), "--area".as_ref(), self.area().as_os_str()]);
        assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("it prints JSON")
    }
}

/// `--disk` with this image.
pub fn disk(image: &Path) -> [OsString; 2] {
    ["--disk".into(), image.into()]
}

/// `--disk` with this image, whose single pages are protected, too: by itself a guest's are copied that have no neighbours.
pub fn protected_disk(image: &Path) -> [OsString; 2] {
    disk_with(image, PROTECTED)
}

/// The option for that.
pub const PROTECTED: &str = ",hot-pages=foreseen";

/// `--disk` with this image and options: ",placement=copy".
pub fn disk_with(image: &Path, options: &str) -> [OsString; 2] {
    let mut value = OsString::from(image);
    value.push(options);
    ["--disk".into(), value]
}

/// `--report`, read.
pub struct Report(pub Value);

impl Report {
    pub fn disk(&self, index: usize) -> &Value {
        let disk = &self.0["disks"][index];
        assert!(disk.is_object(), "the report has no disk {index}: {}", self.0);
        disk
    }

    #[track_caller]
    pub fn counter(&self, disk: usize, name: &str) -> u64 {
        self.disk(disk)["counters"][name].as_u64().unwrap_or_else(|| panic!("the report has no counter {name}"))
    }

    pub fn status(&self, disk: usize) -> &str {
        self.disk(disk)["recovery"]["status"].as_str().expect("a recovery has a status")
    }

    #[track_caller]
    pub fn recovered(&self, disk: usize, name: &str) -> u64 {
        self.disk(disk)["recovery"][name].as_u64().unwrap_or_else(|| panic!("a recovery has a {name}"))
    }
}

/// The contract's exit code for a VMM that ended with this signal.
pub const KILLED: i32 = 128 + 9;

/// Kills QEMU and waits for amberlog's end; gives all that the guest has reported.
#[track_caller]
pub fn kill(guest: &mut Guest) -> Reported {
    guest.kill_qemu().unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_ends_with(guest, status, KILLED);
    guest.final_report()
}

/// amberlog ended by itself, with this code, and complained of nothing.
#[track_caller]
pub fn assert_ends_with(guest: &Guest, status: ExitStatus, code: i32) {
    let stderr = guest.stderr();
    assert_eq!(status.code(), Some(code), "signal {:?}\n{stderr}", status.signal());
    assert!(!stderr.contains("ERROR") && !stderr.contains("panicked"), "{stderr}");
}

/// A journal that is on storage is left there for its guest's kernel; replays it, as the next mount or check would.
#[track_caller]
pub fn replay_left(image: &Path) {
    assert_ne!(journal_superblock(image).start, 0, "{}: the journal was not left", image.display());
    judge::replay_with_e2fsck(&FileSystem::whole(image)).unwrap();
}

/// Whole, and nothing to replay.
#[track_caller]
pub fn assert_consistent(file_system: &FileSystem) {
    let verdict = judge::check(file_system).unwrap();
    assert!(verdict.is_consistent(), "{}: {verdict:?}", file_system.image.display());
}

/// Whole to the last free total, as after a clean unmount.
#[track_caller]
pub fn assert_clean(file_system: &FileSystem) {
    let verdict = judge::check(file_system).unwrap();
    assert!(verdict.is_clean(), "{}: {verdict:?}", file_system.image.display());
}

/// Records of a stream, appended.
pub fn appended(seed: u64) -> RecordLayout {
    RecordLayout { seed, ..RecordLayout::default() }
}

/// Records of a stream, each in one of a few places, over older ones.
pub fn overwritten(seed: u64) -> RecordLayout {
    RecordLayout { order: Order::Overwrite { slots: 30 }, files: 2, ..appended(seed) }
}

/// The guest's command that writes them; `more` is "--count 50" or "--forever".
pub fn record_writer(directory: &str, stream: &str, layout: &RecordLayout, more: &str) -> String {
    format!("guest-tools records --directory {directory} --stream {stream} {} {more}", layout.to_options())
}

/// Every acknowledged record of a stream is there and whole; gives how many there are.
#[track_caller]
pub fn assert_records(
    file_system: &FileSystem,
    directory: &str,
    stream: &str,
    layout: &RecordLayout,
    reported: &Reported,
) -> u64 {
    let acknowledged = reported.acknowledged.get(stream).copied().unwrap_or_default();
    assert!(acknowledged.count > 0, "nothing was acknowledged on {stream}: {reported:?}");
    assert_eq!(acknowledged.out_of_order, 0, "{stream}");
    let verdict = evidence::records(file_system, directory, layout, acknowledged).unwrap();
    assert!(verdict.is_good(), "{stream}, {} acknowledged: {verdict:?}", acknowledged.count);
    acknowledged.count
}

/// The journal superblock on storage of the first file system of an image, of an internal journal.
pub fn journal_superblock(image: &Path) -> jbd2::Superblock {
    jbd2::Superblock::decode(&journal_superblock_bytes(image)).expect("it is a journal superblock")
}

/// The same, as it is.
pub fn journal_superblock_bytes(image: &Path) -> Vec<u8> {
    let bytes = std::fs::read(image).expect("the image can be read");
    let file_systems = extfs::discover(&bytes).expect("the image can be looked at");
    let file_system = file_systems.first().expect("there is a file system");
    let extfs::Journal::Internal { extents, .. } = &file_system.journal else {
        panic!("its journal is not internal: {:?}", file_system.journal)
    };
    let at = file_system.offset + extents[0].physical * u64::from(file_system.superblock.block_size);
    let at = usize::try_from(at).expect("an image in memory");
    bytes[at..at + 1024].to_vec()
}

/// How many rounds a loop makes: `AMBERLOG_ROUNDS`, or a few.
pub fn rounds(default: u64) -> u64 {
    std::env::var("AMBERLOG_ROUNDS").ok().map_or(default, |text| text.parse().expect("AMBERLOG_ROUNDS is a number"))
}

/// The seed of a test's choices: `AMBERLOG_SEED`, or a fixed one.
pub fn seed() -> u64 {
    std::env::var("AMBERLOG_SEED").ok().map_or(1, |text| text.parse().expect("AMBERLOG_SEED is a number"))
}
