//! Placement `nvm`: NJS (crate `nvm-journal`) below an unmodified ext3 or ext4.
//!
//! The paper changes ext4 and jbd2; here the guest stays as it is. Its log writes are read as they come ([`log_stream`]).
//! When a transaction is complete, each block that the committed block bitmap calls free goes straight home ([`early`]: many
//! of them as soon as they are in the log), every other one to the region, and then the transaction counts ([`commit`]). The guest's own home write of a block whose latest
//! version is in the region is acknowledged and not written, reads of it are answered from there ([`home`]), and blocks go
//! home late, in large runs ([`checkpoint`]).
//!
//! What must always hold:
//! * A commit block is acknowledged when the transaction is durable: its versions in the region, its appends at home. (With
//!   [`NvmOptions::pipelined`] the last one's appends may not be flushed yet: [`acknowledged`].)
//! * While a version is in the region, the journal superblock on storage carries the error mark, and the region says whose
//!   it is, so that neither is used without the other unnoticed.
//! * A log leaves the region for storage only when storage has all that the region would have given ([`leaving`]).
//! * A version leaves the region only when the same content is durable at home, when the guest's log no longer holds it
//!   and what is at home is what a complete journal would leave there, or when the guest revoked or discarded it.
//! * What is not understood is not guessed: external journals, fast commits, unknown features, a file system for which the disk has no
//!   region left and a region that is too small have their log written to its own place (`storage`), loudly.
//!
//! Failure story: when the region or an append fails, the guest's log write fails, and its kernel aborts its journal; what
//! was committed stays what recovery finds.
//!
//! The keeper of such a log is in [`keeper`]: one a log, with a region of its own. Its machines are methods of what they share ([`work`]), a
//! file each, and [`drive`] takes them on; what each of them knows is in a file of its own below that.

mod acknowledged;
pub(crate) mod books;
mod captured;
mod checkpoint;
mod checkpoint_state;
mod closing;
mod commit;
mod commit_state;
mod condition;
mod cost;
mod coverage;
mod digest;
mod distrusted;
mod drive;
mod early;
mod early_state;
mod errand;
mod foreign;
mod home;
mod inflight;
mod keeper;
mod leaving;
mod leaving_state;
pub(crate) mod log_stream;
mod mark;
mod marking;
mod notes;
mod recover;
mod report;
mod superblock;
mod take_up;
mod versions;
mod view;
mod work;

pub use condition::Condition;
pub(crate) use keeper::InRegion;
#[cfg(test)]
pub(crate) use mark::checksum as mark_checksum;
pub use mark::is_mark;
pub use recover::{NvmFinished, recover_image};
pub use report::NvmReport;
pub(crate) use take_up::forget_notes;

use captured::Captured;
use digest::Digests;
use notes::Notes;
use nvm_journal::medium::{DelayModel, Durability, Medium, MediumFile, OpenOptions, RegionChoice};
use nvm_journal::{Found, JournalOptions};
use own_files::OwnDirectory;
use recovery::{Disk as Image, Error, Report};
use report::NvmCounters;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tracing_mutex::stdsync::{Mutex, MutexGuard};
use write_log::LoggedFile;

/// A region, whichever memory it is in.
pub type Region = Box<dyn Medium>;

/// What becomes of appends that are too many to be logged without a thought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManyAppends {
    /// They go home, and their transaction's commit waits until they are durable there (as in the paper).
    Home,
    /// They are logged where that takes less time, by what was measured lately, and the region has room; then they go home in the
    /// background. Else as above.
    ByCost,
    /// They are logged wherever the region has room: for simulations, in which time means nothing.
    Logged,
}

/// How a disk uses a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmOptions {
    /// The file or devdax device.
    pub path: PathBuf,
    /// Which part of it.
    pub region: RegionChoice,
    /// Other parts of it, for more file systems of the disk: a region is one journal's.
    pub more_regions: Vec<RegionChoice>,
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
    /// What becomes of those.
    pub many_appends: ManyAppends,
    /// A transaction is acknowledged when its appends are written and not flushed yet, all earlier ones being durable ([`acknowledged`]): a loss
    /// of power may cost the last one.
    pub pipelined: bool,
    /// Appends that are sent home before their transaction is complete are gathered to so many bytes.
    pub early_batch_bytes: u64,
    /// Everything goes home after this time at the latest.
    pub checkpoint_interval: Duration,
    /// How old the mark on storage may be when blocks leave the region that the guest wrote home itself (0: there is a flush each
    /// time, even where the mark cannot be written anew).
    pub mark_age: Duration,
    /// From when the region is filled so far on, in percent, …
    pub early_fill_percent: u32,
    /// … runs of at least so many bytes go home (0: nothing does before three fourths, as in the paper).
    pub early_run_bytes: u64,
    /// Where a checkpoint flushes the disk itself, for want of room, it waits for so many parts of a full region to be at home …
    pub checkpoint_slices: u32,
    /// … but each of at least so many bytes: each costs a flush, and that a disk with an arm a turn of its platter.
    pub checkpoint_slice_bytes_min: u64,
    /// How long what a checkpoint wrote waits for somebody else's flush where nobody needs the room.
    pub checkpoint_patience: Duration,
}

impl NvmOptions {
    /// The paper's (128 MB, byte-level updates, delayed checkpoints every five minutes), but for small appends, which go to
    /// the region.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        NvmOptions {
            path: path.into(),
            region: RegionChoice::default(),
            more_regions: Vec::new(),
            create_bytes: 128 << 20,
            delay: None,
            byte_level: true,
            delayed_checkpoint: true,
            log_everything: false,
            append_home_bytes_min: 1 << 20,
            many_appends: ManyAppends::Home,
            pipelined: false,
            early_batch_bytes: 256 << 10,
            checkpoint_interval: Duration::from_secs(300),
            mark_age: Duration::from_secs(1),
            early_fill_percent: 50,
            early_run_bytes: 64 << 10,
            checkpoint_slices: 4,
            checkpoint_slice_bytes_min: 1 << 20,
            checkpoint_patience: Duration::from_secs(1),
        }
    }

    /// Its regions, as they are given.
    fn shown_regions(&self) -> String {
        let indices: Vec<String> =
            [self.region].iter().chain(&self.more_regions).map(|choice| choice.index.to_string()).collect();
        format!("{}/{}", indices.join("+"), self.region.count)
    }

    fn open_options(&self, region: RegionChoice) -> OpenOptions {
        OpenOptions {
            path: self.path.clone(),
            region,
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

/// A region that a log of the disk can have.
struct Slot {
    /// Where it begins in its file, in bytes.
    offset: u64,
    state: Mutex<State>,
}

/// Whether a region is no log's that is to be recovered.
fn is_free(medium: &Region) -> bool {
    Found::read(medium.bytes()).is_ok_and(|found| found.is_none_or(|found| found.owner.is_none()))
}

/// One disk's regions: each is one log's.
pub struct NvmDisk {
    /// How they are used.
    pub options: NvmOptions,
    durability: Durability,
    slots: Vec<Slot>,
    counters: NvmCounters,
    /// How often everything was asked to go home.
    checkpoints_asked: AtomicU64,
    /// What is at home is known by these.
    digests: Digests,
    /// The VM's directory in tmpfs, where the next worker finds what it has to know.
    directory: Mutex<Option<Arc<OwnDirectory>>>,
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
    /// Opens and locks a disk's regions, and says what they survive.
    ///
    /// # Errors
    /// [`Error::Refused`] when one is in use, damaged or no region.
    pub fn open(options: NvmOptions) -> Result<Self, Error> {
        let (region_offset, medium) = Self::open_region(&options, options.region)?;
        let more = options.more_regions.iter().map(|choice| Self::open_region(&options, *choice));
        let more: Vec<(u64, Region)> = more.collect::<Result<_, _>>()?;
        let mut disk = Self::with_medium(options, region_offset, medium)?;
        for (offset, medium) in more {
            disk.add_region(offset, medium)?;
        }
        Ok(disk)
    }

    fn open_region(options: &NvmOptions, choice: RegionChoice) -> Result<(u64, Region), Error> {
        let file = MediumFile::open(options.open_options(choice)).map_err(region_error(&options.path))?;
        let region_offset = file.offset();
        let medium = file.map().map_err(region_error(&options.path))?;
        log::info!(
            "{}, region {choice}: {} MiB, {} ({}), stores by {}",
            options.path.display(),
            medium.len() >> 20,
            medium.durability().name(),
            medium.durability().sentence(),
            medium.store_kind().name()
        );
        Ok((region_offset, Box::new(medium)))
    }

    /// One more region, for one more log.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is damaged.
    pub fn add_region(&mut self, region_offset: u64, medium: Region) -> Result<(), Error> {
        Found::read(medium.bytes()).map_err(region_error(&self.options.path))?;
        self.slots.push(Slot { offset: region_offset, state: Mutex::new(State::Idle(medium)) });
        Ok(())
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
            slots: vec![Slot { offset: region_offset, state: Mutex::new(State::Idle(medium)) }],
            counters: NvmCounters::default(),
            checkpoints_asked: AtomicU64::new(0),
            digests: Digests::new(),
            directory: Mutex::default(),
        })
    }

    /// What the next worker has to know is noted in this directory, the VM's, from now on.
    pub(crate) fn note_in(&self, directory: OwnDirectory) {
        *self.directory.lock().expect("no panic under this lock") = Some(Arc::new(directory));
    }

    fn directory(&self) -> Option<Arc<OwnDirectory>> {
        self.directory.lock().expect("no panic under this lock").clone()
    }

    /// What the region survives.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Whether what is in it is there after a loss of the host's power, as far as its memory or storage keeps that.
    pub fn survives_the_host(&self) -> bool {
        self.durability != Durability::Emulated
    }

    fn lock(&self, slot: usize) -> MutexGuard<'_, State> {
        self.slots[slot].state.lock().expect("no panic under this lock")
    }

    fn states(&self) -> impl Iterator<Item = MutexGuard<'_, State>> {
        (0..self.slots.len()).map(|slot| self.lock(slot))
    }

    /// A region that is nobody's and has room for such a log.
    ///
    /// # Errors
    /// A sentence when there is none.
    fn free_slot(&self, log_blocks: u32, block_bytes: u32) -> Result<usize, String> {
        let mut why = "every region of the disk has failed".to_owned();
        for (index, slot) in self.slots.iter().enumerate() {
            match &*self.lock(index) {
                State::Idle(medium) if !is_free(medium) => {
                    why = "a region of the disk holds what an earlier guest left, which could not be brought home"
                        .to_owned();
                }
                State::Idle(medium) => match superblock::check_room(medium, slot.offset, log_blocks, block_bytes) {
                    Ok(()) => return Ok(index),
                    Err(reason) => why = reason,
                },
                State::Held(_) => {
                    why = "every region of the disk has another file system's; give it one for each (nvm-region=0+1/2 and so \
                           on, and a larger nvm-size)"
                        .to_owned();
                }
                State::Failed => {}
            }
        }
        Err(why)
    }

    fn journal_options(&self) -> JournalOptions {
        JournalOptions { byte_level: self.options.byte_level, ..JournalOptions::default() }
    }

    /// Brings home what an earlier process left in its regions for this image. What was done is in `brought`, also where a later one failed.
    ///
    /// # Errors
    /// [`Error::Refused`] when a region holds blocks of something else, or is damaged: nothing was changed, for none of them.
    pub fn finish_earlier(&self, image: &Image, brought: &mut Vec<NvmFinished>) -> Result<(), Error> {
        recover::recover_regions(self.states(), &self.options.path, &recover::unlogged(image)?, brought)
    }

    /// Whether the region has room for a log of `log_blocks` blocks of `block_bytes`.
    ///
    /// # Errors
    /// [`Error::Refused`] with a sentence when it has not.
    pub fn check_room(&self, log_blocks: u32, block_bytes: u32) -> Result<(), Error> {
        for (index, slot) in self.slots.iter().enumerate() {
            let State::Idle(medium) = &*self.lock(index) else { continue };
            superblock::check_room(medium, slot.offset, log_blocks, block_bytes)
                .map_err(|reason| Error::Refused(format!("{}: {reason}", self.options.path.display())))?;
        }
        Ok(())
    }

    /// Brings home what a region holds for a log whose guest is gone: the one that it has, or whichever is nobody's. Nothing when
    /// that holds nothing.
    ///
    /// # Errors
    /// When writing fails: the region is as it was, and this can be called again.
    fn recover(&self, slot: Option<usize>, home: &LoggedFile) -> Result<Option<Report>, Error> {
        let path = &self.options.path;
        let Some(slot) = slot else {
            let idle: Vec<_> = self.states().filter(|state| matches!(**state, State::Idle(_))).collect();
            let mut brought = Vec::new();
            recover::recover_idle(idle, path, home, &mut brought)?;
            return Ok(brought.pop().map(|finished| finished.recovery));
        };
        let mut notes = None::<Notes>;
        let mut state = self.lock(slot);
        match std::mem::replace(&mut *state, State::Failed) {
            State::Held(captured) => {
                self.counters.add_journal(&captured.journal.counters());
                notes = Some(captured.notes);
                *state = State::Idle(captured.journal.into_medium());
            }
            other => *state = other,
        }
        let State::Idle(medium) = &mut *state else { return Ok(None) };
        let finished = recover::recover_medium(medium, path, home)?;
        // Until then a worker that dies is followed by one that recovers as well.
        notes.iter_mut().for_each(Notes::remove);
        Ok(finished.map(|finished| finished.recovery))
    }

    /// Has everything in the regions go home soon.
    pub fn request_checkpoint(&self) {
        self.checkpoints_asked.fetch_add(1, Ordering::AcqRel);
    }

    /// How often that was asked for.
    fn checkpoints_asked(&self) -> u64 {
        self.checkpoints_asked.load(Ordering::Acquire)
    }

    /// What a block's content is known by once it is at home: 128 bits under keys that no guest knows.
    fn digest(&self, content: &[u8]) -> [u64; 2] {
        self.digests.of(content)
    }

    /// What was done with the region, for a report.
    pub fn report(&self) -> NvmReport {
        let live = |state: MutexGuard<'_, State>| match &*state {
            State::Held(captured) => Some(captured.journal.counters()),
            State::Idle(_) | State::Failed => None,
        };
        let live: Vec<_> = self.states().filter_map(live).collect();
        let is_noted = |state: MutexGuard<'_, State>| match &*state {
            State::Held(captured) => captured.notes.are_there(),
            State::Idle(_) | State::Failed => true,
        };
        let can_be_followed = self.states().all(is_noted);
        NvmReport { can_be_followed, ..self.counters.report(self, &live) }
    }

    /// What must hold between requests, for tests.
    ///
    /// # Errors
    /// A sentence about what does not.
    pub fn check(&self) -> Result<(), String> {
        self.states().try_for_each(|state| match &*state {
            State::Held(captured) => captured.check(),
            State::Idle(_) | State::Failed => Ok(()),
        })
    }

    /// Looks at the first region's bytes, for simulations that crash it.
    pub fn look_at_region<T>(&self, look: impl FnOnce(&dyn Medium) -> T) -> Option<T> {
        match &*self.lock(0) {
            State::Idle(medium) => Some(look(medium)),
            State::Held(captured) => Some(look(captured.journal.medium())),
            State::Failed => None,
        }
    }
}
