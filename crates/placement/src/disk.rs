//! One disk of a VM, as its route and its VM's journals share it.

use crate::layout::DiskLayout;
use crate::shared_disk::{self, Direct};
use image_file::Stamp;
use image_moments::Changes;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tracing_mutex::stdsync::{Mutex, RwLock};
use write_log::{LoggedFile, WriteLog};

/// Where a journal lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementKind {
    /// Held in guest memory, protected, copied on write.
    Retain,
    /// Copied to host memory at once.
    Copy,
    /// Written to its own place on storage.
    Storage,
    /// Dropped: no crash safety.
    Discard,
    /// On persistent memory.
    Nvm,
    /// On a journal server.
    Remote,
}

impl PlacementKind {
    /// Its name in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            PlacementKind::Retain => "retain",
            PlacementKind::Copy => "copy",
            PlacementKind::Storage => "storage",
            PlacementKind::Discard => "discard",
            PlacementKind::Nvm => "nvm",
            PlacementKind::Remote => "remote",
        }
    }

    /// Which one has this name: those, too, that an option names together with a place.
    pub fn named(name: &str) -> Option<Self> {
        use PlacementKind::{Copy, Discard, Nvm, Remote, Retain, Storage};
        [Retain, Copy, Storage, Discard, Nvm, Remote].into_iter().find(|kind| kind.name() == name)
    }

    /// Whether the area holds the log.
    pub fn is_held(self) -> bool {
        matches!(self, PlacementKind::Retain | PlacementKind::Copy)
    }
}

impl std::str::FromStr for PlacementKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [PlacementKind::Retain, PlacementKind::Copy, PlacementKind::Storage, PlacementKind::Discard]
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| {
                format!(
                    "there is no placement '{name}'; it is one of retain, copy, storage, discard, nvm=PATH, \
                     remote=HOST:PORT/NAME"
                )
            })
    }
}

/// How a disk is attached, but for where its journals go beside it.
#[derive(Clone, Debug)]
pub struct DiskSettings {
    /// Its name in reports and in `for=`.
    pub name: String,
    /// The image or block device.
    pub path: PathBuf,
    /// Where the journals of its file systems live.
    pub placement: PlacementKind,
    /// Flushes reach storage even where nothing that survives depends on them.
    pub honour_flush: bool,
    /// The guest must not write to it.
    pub read_only: bool,
    /// How old what its guests committed may be before it is durable on storage, for placements that hold it; nothing: however old.
    pub durable_within: Option<Duration>,
    /// Where everything that is sent to the image is written down.
    pub write_log: Option<Arc<WriteLog>>,
}

/// What flushes of a disk's guest have to tell it of, as so many of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failures {
    /// Flushes that have failed, whoever asked for them.
    flushes: u64,
    /// Ends of durability by age by a fault, where its guest had been told of commits as durable.
    broken_promises: u64,
}

impl Failures {
    /// Whether there is one that these are not.
    pub(crate) fn has_more_than(self, told: Failures) -> bool {
        self.flushes > told.flushes || self.broken_promises > told.broken_promises
    }
}

/// Sentences that are kept of what is wrong with a disk.
const FAULTS_MAX: usize = 4;

/// What a disk has done, in bytes and requests.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "the names are the report's and say it all")]
pub struct DiskCounters {
    pub journal_bytes_received: AtomicU64,
    pub journal_bytes_to_storage: AtomicU64,
    pub home_bytes_to_storage: AtomicU64,
    pub read_bytes: AtomicU64,
    pub flushes: AtomicU64,
    pub flushes_to_storage: AtomicU64,
    /// What counting on in the marks of held journals wrote.
    pub mark_bytes_to_storage: AtomicU64,
    /// Commit blocks seen, for placements in which nothing is held.
    pub commit_blocks: AtomicU64,
}

impl DiskCounters {
    pub(crate) fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// An eventfd.
#[derive(Debug)]
pub(crate) struct Wake(std::os::fd::OwnedFd);

impl Wake {
    fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Wake(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn wake(&self) {
        // It can only fail when the counter is full, and then the other side is awake.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// What time it is, for what is due: the host's clock, or that of a simulation.
#[derive(Debug)]
struct Clock {
    began: Instant,
    simulated: OnceLock<Arc<AtomicU64>>,
}

impl Default for Clock {
    fn default() -> Self {
        Clock { began: Instant::now(), simulated: OnceLock::new() }
    }
}

/// One disk of a VM.
#[derive(Debug)]
pub struct Disk {
    /// How it is attached.
    pub options: DiskSettings,
    /// What it has done.
    pub counters: DiskCounters,
    /// For what is rare and may block: scans, marks, restored blocks. The data path has the disk engine.
    pub(crate) file: LoggedFile,
    /// The same past the page cache, where another host may write it.
    pub(crate) direct: Direct,
    /// What the image looked like before anything was read of it, until a guest begins; nothing of one that is somebody else's still.
    as_opened: Mutex<Option<Stamp>>,
    /// Another host has it: nothing is written to it from here any more.
    is_taken: AtomicBool,
    pub(crate) wake: Wake,
    layout: RwLock<Arc<DiskLayout>>,
    layout_version: AtomicU64,
    /// Writes that have ended and that no open, held log covers.
    written: AtomicU64,
    /// How many of them a flush has brought to storage.
    flushed: AtomicU64,
    /// Of how many failed flushes its guest was told.
    told_failures: AtomicU64,
    /// How often durability by age ended by a fault, where its guest had been told of commits as durable, and of how many of these it was told.
    broken_promises: AtomicU64,
    told_promises: AtomicU64,
    /// How old what its guests committed may be, as it was said last.
    durable_within: Mutex<Option<Duration>>,
    clock: Clock,
    /// How long its compound transactions took to be durable. Two logs' threads may note one at once.
    compound_times: Mutex<latency::Histogram>,
    /// Why nothing of it is held: no journal was found.
    unheld: Mutex<Option<String>>,
    /// A driver has started from the beginning in this process: what its journals hold is known here.
    was_started: AtomicBool,
    is_in_use: AtomicBool,
    /// What is wrong, in sentences.
    faults: Mutex<Vec<String>>,
}

impl Disk {
    /// Opens the image a second time, beside the disk engine.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(options: DiskSettings) -> std::io::Result<Self> {
        let file = image_file::open(&options.path, !options.read_only)?;
        let direct = shared_disk::open_direct(&file, &options.path);
        let as_opened = Mutex::new(Some(Stamp::of(&file)?));
        let file = LoggedFile::new(file, options.write_log.clone());
        Ok(Disk {
            as_opened,
            durable_within: Mutex::new(options.durable_within),
            clock: Clock::default(),
            compound_times: Mutex::default(),
            options,
            counters: DiskCounters::default(),
            file,
            direct,
            is_taken: AtomicBool::new(false),
            wake: Wake::new()?,
            layout: RwLock::default(),
            layout_version: AtomicU64::new(0),
            written: AtomicU64::new(1),
            flushed: AtomicU64::new(0),
            told_failures: AtomicU64::new(0),
            broken_promises: AtomicU64::new(0),
            told_promises: AtomicU64::new(0),
            unheld: Mutex::default(),
            was_started: AtomicBool::new(false),
            is_in_use: AtomicBool::new(false),
            faults: Mutex::default(),
        })
    }

    /// The same of an image that somebody has locked to bring home what was left for it: the very file that is locked, or none.
    ///
    /// # Errors
    /// When it cannot be opened, or another file has its name by now.
    pub(crate) fn open_locked(image: &recovery::Disk, read_only: bool) -> Result<Self, recovery::Error> {
        let path = image.path();
        let failed = |source| recovery::Error::Failed { what: format!("opening {}", path.display()), source };
        let settings = DiskSettings {
            name: path.display().to_string(),
            path: path.to_owned(),
            placement: PlacementKind::Storage,
            honour_flush: true,
            read_only,
            durable_within: None,
            write_log: None,
        };
        let disk = Disk::open(settings).map_err(failed)?;
        let identity = |file: &File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino(), metadata.rdev()));
        let (locked, opened) = (identity(image.file()), identity(disk.file.for_reading()));
        if locked.map_err(failed)? == opened.map_err(failed)? {
            return Ok(disk);
        }
        let sentence = "it was exchanged for another file while it was opened; nothing was changed: try again";
        Err(failed(std::io::Error::other(sentence)))
    }

    /// Whether another file has the image's name by now. One that has gone is no other one.
    pub fn is_replaced(&self) -> bool {
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino(), metadata.rdev());
        let named = std::fs::metadata(&self.options.path).map(identity);
        named.is_ok_and(|named| self.file.for_reading().metadata().map(identity).is_ok_and(|opened| opened != named))
    }

    /// The disk engine writes past the page cache: what amberlog itself writes into a page with others goes the same way from now on.
    pub fn share_with_engine(&self, file: File, unit_bytes: usize) {
        self.file.share_with(file, unit_bytes);
    }

    /// What has become of the image since it was opened, if somebody has written to it: a backup was copied over it, say. What is known of
    /// its journals is of another disk then. Asked when the first guest begins: from then on it is the guest who writes.
    pub(crate) fn became(&self) -> std::io::Result<Option<String>> {
        let Some(opened) = self.as_opened.lock().expect("no panic under this lock").clone() else { return Ok(None) };
        Ok(opened.became(&Stamp::of(self.file.for_reading())?))
    }

    /// Nothing of the image was looked at, for it is somebody else's still; or its guest has begun. That it is written to is no news.
    pub(crate) fn set_awaited(&self) {
        *self.as_opened.lock().expect("no panic under this lock") = None;
    }

    /// From now on whatever amberlog itself writes to the image is said to these.
    pub fn tell(&self, changes: &Arc<Changes>) {
        self.file.tell(changes);
    }

    /// A compound transaction is durable, which took so long.
    pub(crate) fn note_compound(&self, took: Duration) {
        self.compound_times.lock().expect("no panic under this lock").record(took);
    }

    /// How long its compound transactions took to be durable (`durable-within`), from the first thing that was written of each.
    pub fn compound_times(&self) -> latency::Snapshot {
        self.compound_times.lock().expect("no panic under this lock").snapshot()
    }

    /// Keeps a sentence that says what is wrong, for reports. The log has it already. A guest can cause any number of them: the
    /// first few stay.
    pub fn note_fault(&self, sentence: &str) {
        let mut faults = self.faults.lock().expect("no panic under this lock");
        if faults.len() < FAULTS_MAX && !faults.iter().any(|known| known == sentence) {
            faults.push(sentence.to_owned());
        }
    }

    /// What is wrong, if anything is.
    pub fn fault(&self) -> Option<String> {
        let faults = self.faults.lock().expect("no panic under this lock");
        (!faults.is_empty()).then(|| faults.join("; "))
    }

    /// How old what its guests committed may be before it is durable on storage; nothing: however old.
    pub fn durable_within(&self) -> Option<Duration> {
        *self.durable_within.lock().expect("no panic under this lock")
    }

    /// The time since it was opened.
    pub(crate) fn now(&self) -> Duration {
        match self.clock.simulated.get() {
            Some(milliseconds) => Duration::from_millis(milliseconds.load(Ordering::Acquire)),
            None => self.clock.began.elapsed(),
        }
    }

    /// For simulations: time is what is here, in milliseconds. Before anything is done with the disk.
    pub fn simulate_clock(&self, milliseconds: Arc<AtomicU64>) {
        // Said once; a second one would turn time back.
        let _ = self.clock.simulated.set(milliseconds);
    }

    /// For simulations: asked before each write that is not sent by whoever runs the disk whether it goes well.
    pub fn simulate_writes(&self, goes_well: impl Fn() -> bool + Send + Sync + 'static) {
        self.file.simulate_writes(goes_well);
    }

    pub(crate) fn set_durable_within(&self, within: Option<Duration>) {
        *self.durable_within.lock().expect("no panic under this lock") = within;
        self.wake.wake();
    }

    /// Why nothing of it is held, if that is so.
    pub(crate) fn unheld(&self) -> Option<String> {
        self.unheld.lock().expect("no panic under this lock").clone()
    }

    /// Notes why nothing of it is held. Gives whether that was not known before.
    pub(crate) fn set_unheld(&self, reason: Option<String>) -> bool {
        let mut unheld = self.unheld.lock().expect("no panic under this lock");
        let is_news = *unheld != reason;
        *unheld = reason;
        is_news
    }

    /// Something was written that no open, held log covers: the next flush has to reach storage. To be said when the
    /// write has ended: a flush that begins before need not cover it.
    pub(crate) fn set_dirty(&self) {
        self.written.fetch_add(1, Ordering::AcqRel);
    }

    /// What a flush that begins now will have covered when it has ended; nothing when all of it is on storage already.
    pub(crate) fn to_flush(&self) -> Option<u64> {
        let written = self.written.load(Ordering::Acquire);
        (written != self.flushed.load(Ordering::Acquire)).then_some(written)
    }

    /// A flush has ended, and well.
    pub(crate) fn set_flushed(&self, covered: u64) {
        self.flushed.fetch_max(covered, Ordering::AcqRel);
    }

    /// A flush by the disk engine has failed, the guest's or one of ours. What had been written may be lost, and no later flush says so.
    /// (For simulations, too.)
    pub fn note_failed_flush(&self) {
        self.file.note_failed_flush();
    }

    /// How many flushes have failed, whoever asked for them.
    pub(crate) fn failed_flushes(&self) -> u64 {
        self.file.failed_flushes()
    }

    /// Of how many failed flushes the guest was told.
    pub(crate) fn told_failures(&self) -> u64 {
        self.told_failures.load(Ordering::Acquire)
    }

    /// Durability by age has ended by a fault, and not by a flush that failed: its guest was told of commits as durable, and they are not any more.
    pub(crate) fn note_broken_promise(&self) {
        self.broken_promises.fetch_add(1, Ordering::AcqRel);
    }

    /// What its guest's flushes have to tell of.
    pub(crate) fn failures(&self) -> Failures {
        Failures { flushes: self.failed_flushes(), broken_promises: self.broken_promises.load(Ordering::Acquire) }
    }

    /// What they have told of.
    pub(crate) fn told(&self) -> Failures {
        Failures { flushes: self.told_failures(), broken_promises: self.told_promises.load(Ordering::Acquire) }
    }

    /// A flush of the guest is answered with an error, for these.
    pub(crate) fn tell_failures(&self, failures: Failures) {
        self.told_failures.fetch_max(failures.flushes, Ordering::AcqRel);
        self.told_promises.fetch_max(failures.broken_promises, Ordering::AcqRel);
    }

    /// Another host has it: from now on its guest's writes fail, here and for good.
    pub(crate) fn set_taken(&self) {
        self.is_taken.store(true, Ordering::Release);
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Acquire)
    }

    /// A driver starts from the beginning.
    pub(crate) fn set_started(&self) {
        self.set_awaited();
        self.was_started.store(true, Ordering::Release);
    }

    /// Whether one did, so that a driver that goes on goes on with what is known here.
    pub(crate) fn was_started(&self) -> bool {
        self.was_started.load(Ordering::Acquire)
    }

    /// A guest has it, though this process has seen no driver of its yet.
    pub(crate) fn set_in_use(&self) {
        self.is_in_use.store(true, Ordering::Release);
    }

    /// Whether a guest has it: what turns up on it now, that guest has put there.
    pub(crate) fn is_in_use(&self) -> bool {
        self.is_in_use.load(Ordering::Acquire) || self.was_started()
    }

    /// What it carries, as of the last scan.
    pub fn layout(&self) -> Arc<DiskLayout> {
        Arc::clone(&self.layout.read().expect("no panic under this lock"))
    }

    pub(crate) fn layout_version(&self) -> u64 {
        self.layout_version.load(Ordering::Acquire)
    }

    pub(crate) fn set_layout(&self, layout: DiskLayout) {
        *self.layout.write().expect("no panic under this lock") = Arc::new(layout);
        self.layout_version.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use recovery::Access;

    /// Whoever can write in its directory can put another file there at any moment, of which nobody has the lock.
    #[test]
    fn only_the_file_that_is_locked_is_opened_beside_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let [path, other] = ["image", "other"].map(|name| directory.path().join(name));
        [&path, &other].into_iter().for_each(|path| std::fs::write(path, [0; 4096]).expect("written"));
        let locked = recovery::Disk::open(&path, Access::Write).expect("nobody has it");
        Disk::open_locked(&locked, false).expect("it is that file");
        std::fs::rename(&other, &path).expect("exchanged");
        let error = Disk::open_locked(&locked, false).expect_err("it is another one");
        assert!(!error.is_refusal() && error.to_string().contains("exchanged for another file"), "{error}");
    }
}
