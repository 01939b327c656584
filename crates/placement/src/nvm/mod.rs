//! Placement `nvm`: NJS (crate `nvm-journal`) below an unmodified ext3 or ext4.
//!
//! The paper changes ext4 and jbd2; here the guest stays as it is. Its log writes are read as they come ([`log_stream`]).
//! When a transaction is complete, each block that the committed block bitmap calls free goes straight home ([`early`]: many
//! of them as soon as they are in the log), every other one to the region, and then the transaction counts ([`commit`]). The guest's own home write of a block whose latest
//! version is in the region is acknowledged and not written, reads of it are answered from there ([`home`]), and blocks go
//! home late, in large runs ([`checkpoint`]).
//!
//! What must always hold:
//! * A commit block is acknowledged when the transaction is durable: its versions in the region, its appends at home.
//! * While a version is in the region, the journal superblock on storage carries the error mark, and the region says whose
//!   it is, so that neither is used without the other unnoticed.
//! * A log leaves the region for storage only when storage has all that the region would have given ([`leaving`]).
//! * A version leaves the region only when the same content is durable at home, when the guest's log no longer holds it
//!   and what is at home is what a complete journal would leave there, or when the guest revoked or discarded it.
//! * What is not understood is not guessed: external journals, fast commits, unknown features, a second file system on the
//!   disk and a region that is too small have their log written to its own place (`storage`), loudly.
//!
//! Failure story: when the region or an append fails, the guest's log write fails, and its kernel aborts its journal; what
//! was committed stays what recovery finds.

mod captured;
mod checkpoint;
mod commit;
mod early;
mod foreign;
mod home;
mod inflight;
mod leaving;
pub(crate) mod log_stream;
mod mark;
mod recover;
mod report;
mod route;
mod superblock;
mod view;

#[cfg(test)]
pub(crate) use mark::checksum as mark_checksum;
pub use mark::is_mark;
pub(crate) use mark::{Standing, standing};
pub use recover::{NvmFinished, recover_image};
pub use report::NvmReport;
pub use route::NvmRoute;

use crate::disk::PlacementKind;
use crate::journals::Journals;
use block_route::LogIndex;
use captured::Captured;
use nvm_journal::medium::{DelayModel, Durability, Medium, MediumFile, OpenOptions, RegionChoice};
use nvm_journal::{Found, JournalOptions};
use recovery::{Disk as Image, Error, Report};
use report::NvmCounters;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use write_log::LoggedFile;

/// A region, whichever memory it is in.
pub(crate) type Region = Box<dyn Medium>;

/// How a disk uses a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmOptions {
    /// The file or devdax device.
    pub path: PathBuf,
    /// Which part of it.
    pub region: RegionChoice,
    /// A file that does not exist is made this large, in bytes.
    pub create_bytes: u64,
    /// Slower memory than there is.
    pub delay: Option<DelayModel>,
    /// Write only what differs from the old version (off: NJS-no-BJ).
    pub byte_level: bool,
    /// Absorb the guest's home writes (off: NJS-no-DC).
    pub delayed_checkpoint: bool,
    /// Appended blocks go to the region as well (NJS-all-journal).
    pub log_everything: bool,
    /// Appends go straight home when a transaction has at least so many bytes of them. Fewer go to the region, which is over
    /// long before a disk has flushed what it was given (0: always home, as in the paper).
    pub append_home_bytes_min: u64,
    /// Appends that are sent home before their transaction is complete are gathered to so many bytes.
    pub early_batch_bytes: u64,
    /// Everything goes home after this time at the latest.
    pub checkpoint_interval: Duration,
    /// From when the region is filled so far on, in percent, …
    pub early_fill_percent: u32,
    /// … runs of at least so many bytes go home (0: nothing does before three fourths, as in the paper).
    pub early_run_bytes: u64,
    /// A checkpoint lets go of its blocks in slices, so many of a full region …
    pub checkpoint_slices: u32,
    /// … but each of at least so many bytes: each costs a flush, and that a disk with an arm a turn of its platter.
    pub checkpoint_slice_bytes_min: u64,
}

impl NvmOptions {
    /// The paper's (128 MB, byte-level updates, delayed checkpoints every five minutes), but for small appends, which go to
    /// the region.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        NvmOptions {
            path: path.into(),
            region: RegionChoice::default(),
            create_bytes: 128 << 20,
            delay: None,
            byte_level: true,
            delayed_checkpoint: true,
            log_everything: false,
            append_home_bytes_min: 1 << 20,
            early_batch_bytes: 256 << 10,
            checkpoint_interval: Duration::from_secs(300),
            early_fill_percent: 50,
            early_run_bytes: 64 << 10,
            checkpoint_slices: 4,
            checkpoint_slice_bytes_min: 1 << 20,
        }
    }

    fn open_options(&self) -> OpenOptions {
        OpenOptions {
            path: self.path.clone(),
            region: self.region,
            create_bytes: Some(self.create_bytes),
            delay: self.delay,
            stores: None,
        }
    }
}

/// Who has the region.
enum State {
    /// No log is open. The region may still hold blocks of one that is to be recovered.
    Idle(Region),
    /// A log is open.
    Held(Box<Captured>),
    /// The region failed while it was claimed or given back.
    Failed,
}

impl Journals {
    /// Whether every disk's region has room for the logs that are on the disk now.
    ///
    /// # Errors
    /// [`Error::Refused`] with a sentence when one has not.
    pub fn check_nvm_room(&self) -> Result<(), Error> {
        for log in self.logs() {
            if let (PlacementKind::Nvm, Some(nvm)) = (log.placement, &self.disk(log.home_disk).options.nvm) {
                nvm.check_room(log.place.log_blocks, log.place.block_bytes)?;
            }
        }
        Ok(())
    }
}

/// One disk's region.
pub struct NvmDisk {
    /// How it is used.
    pub options: NvmOptions,
    durability: Durability,
    region_offset: u64,
    state: Mutex<State>,
    counters: NvmCounters,
    checkpoint_due: AtomicBool,
    /// Two keys for what is known to be at home.
    keys: [RandomState; 2],
}

impl std::fmt::Debug for NvmDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmDisk").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Turns an error of the region into one of recovery: a refusal stays one.
pub(crate) fn region_error(path: &std::path::Path) -> impl FnOnce(nvm_journal::Error) -> Error + '_ {
    move |error| match error {
        nvm_journal::Error::Refused(reason) => Error::Refused(format!("{}: {reason}", path.display())),
        nvm_journal::Error::Failed { what, source } => {
            Error::Failed { what: format!("{}: {what}", path.display()), source }
        }
    }
}

impl NvmDisk {
    /// Opens and locks a disk's region, and says what it survives.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is in use, damaged or no region.
    pub fn open(options: NvmOptions) -> Result<Self, Error> {
        let file = MediumFile::open(options.open_options()).map_err(region_error(&options.path))?;
        let region_offset = file.offset();
        let medium = file.map().map_err(region_error(&options.path))?;
        log::info!(
            "{}, region {}: {} MiB, {} ({}), stores by {}",
            options.path.display(),
            options.region,
            medium.len() >> 20,
            medium.durability().name(),
            medium.durability().sentence(),
            medium.store_kind().name()
        );
        Self::with_medium(options, region_offset, Box::new(medium))
    }

    /// The same with a medium of the caller's, for simulations.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is damaged.
    pub fn with_medium(options: NvmOptions, region_offset: u64, medium: Region) -> Result<Self, Error> {
        Found::read(medium.bytes()).map_err(region_error(&options.path))?;
        Ok(NvmDisk {
            durability: medium.durability(),
            options,
            region_offset,
            state: Mutex::new(State::Idle(medium)),
            counters: NvmCounters::default(),
            checkpoint_due: AtomicBool::new(false),
            keys: [RandomState::new(), RandomState::new()],
        })
    }

    /// What the region survives.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    fn journal_options(&self) -> JournalOptions {
        JournalOptions { byte_level: self.options.byte_level, ..JournalOptions::default() }
    }

    /// Brings home what an earlier process left in the region for this image. Nothing when it left nothing.
    ///
    /// # Errors
    /// [`Error::Refused`] when the region holds blocks of something else, or is damaged.
    pub fn finish_earlier(&self, image: &Image) -> Result<Option<NvmFinished>, Error> {
        match &mut *self.lock() {
            State::Idle(medium) => {
                let home = recover::unlogged(image)?;
                match recover::recover_medium(medium, &self.options.path, &home)? {
                    None => recover::refuse_without_region(&self.options.path, &home),
                    finished => Ok(finished),
                }
            }
            State::Held(_) | State::Failed => Ok(None),
        }
    }

    /// Whether the region has room for a log of `log_blocks` blocks of `block_bytes`.
    ///
    /// # Errors
    /// [`Error::Refused`] with a sentence when it has not.
    pub fn check_room(&self, log_blocks: u32, block_bytes: u32) -> Result<(), Error> {
        let State::Idle(medium) = &*self.lock() else { return Ok(()) };
        superblock::check_room(medium, self.region_offset, log_blocks, block_bytes)
            .map_err(|reason| Error::Refused(format!("{}: {reason}", self.options.path.display())))
    }

    /// Brings home what the region holds for a log whose guest is gone. Nothing when it holds none of this log's.
    ///
    /// # Errors
    /// When writing fails: the region is as it was, and this can be called again.
    pub(crate) fn recover(&self, log: LogIndex, home: &LoggedFile) -> Result<Option<Report>, Error> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Failed) {
            State::Held(captured) if captured.log.index == log => {
                self.counters.add_journal(&captured.journal.counters());
                *state = State::Idle(captured.journal.into_medium());
            }
            other => *state = other,
        }
        let State::Idle(medium) = &mut *state else { return Ok(None) };
        let finished = recover::recover_medium(medium, &self.options.path, home)?;
        Ok(finished.map(|finished| finished.recovery))
    }

    /// How many blocks the region holds of a log that is open; nothing when it does not hold that log.
    pub(crate) fn blocks_of(&self, log: LogIndex) -> Option<u64> {
        match &*self.lock() {
            State::Held(captured) if captured.log.index == log => Some(captured.journal.len() as u64),
            _ => None,
        }
    }

    /// Has everything in the region go home soon.
    pub fn request_checkpoint(&self) {
        self.checkpoint_due.store(true, Ordering::Release);
    }

    /// Whether that was asked for since it was last taken.
    fn take_checkpoint_due(&self) -> bool {
        self.checkpoint_due.swap(false, Ordering::AcqRel)
    }

    /// What a block's content is known by once it is at home: 128 bits under keys that no guest knows.
    fn digest(&self, content: &[u8]) -> [u64; 2] {
        [self.keys[0].hash_one(content), self.keys[1].hash_one(content)]
    }

    /// What was done with the region, for a report.
    pub fn report(&self) -> NvmReport {
        let state = self.lock();
        let live = match &*state {
            State::Held(captured) => Some(captured.journal.counters()),
            State::Idle(_) | State::Failed => None,
        };
        self.counters.report(self, live)
    }

    /// What must hold between requests, for tests.
    ///
    /// # Errors
    /// A sentence about what does not.
    pub fn check(&self) -> Result<(), String> {
        match &*self.lock() {
            State::Held(captured) => captured.check(),
            State::Idle(_) | State::Failed => Ok(()),
        }
    }

    /// Looks at the region's bytes, for simulations that crash it.
    pub fn look_at_region<T>(&self, look: impl FnOnce(&dyn Medium) -> T) -> Option<T> {
        match &*self.lock() {
            State::Idle(medium) => Some(look(medium)),
            State::Held(captured) => Some(look(captured.journal.medium())),
            State::Failed => None,
        }
    }
}
