//! One log of a VM: where it and its home are, and how far it is.
//!
//! A [`Log`] is exchanged for another one with the same number when its file system grows or its log goes elsewhere; what the two
//! share ([`LogState`]) goes on. So whoever has one for the time of an operation sees one place all along. Who keeps it is beside it
//! (`crate::kept_log`).

use crate::disk::{Disk, PlacementKind};
use crate::mark::MarkKind;
use crate::scan::FoundLogPlace;
use crate::stored::Stored;
use crate::unannounced::Unannounced;
use block_route::LogIndex;
use journal_area::{LogId, Opening};
use recovery::Report;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

/// Whether a guest has a log open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No guest has.
    Closed,
    /// One has.
    Open,
    /// One has, and somebody waits until nothing is owed.
    Emptying,
}

/// Whether a log is what it seems (`crate::distrust`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    Whole,
    /// What the guest did proved that it is not: it is on storage, or on its way there, and stays.
    Lost,
    /// Bringing it there failed, and that was said.
    LostAndStuck,
}

/// A mark as it is on storage.
#[derive(Clone, Debug)]
pub(crate) struct Marked {
    pub opening: Opening,
    pub kind: MarkKind,
    pub bytes: Vec<u8>,
    /// What had been written home before, in bytes.
    pub written: u64,
    /// The number that it says is known to be durable.
    pub is_durable: bool,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    was_opened: bool,
    /// A log that did not begin here goes on in its own place until it is empty.
    is_brought: bool,
    /// The last scan found another file system that lays claim to its blocks.
    is_contested: bool,
    /// Since it was handed over its guest has said that it begins at what storage has of it: from there on that only grows.
    is_past_hand_over: bool,
    trust: Trust,
    /// How often it was seen to owe nothing while somebody waited for that, and how often that failed.
    emptied: u64,
    failed_to_empty: u64,
    /// Where it shall live from the next mount on.
    wanted: PlacementKind,
    /// The last recovery.
    recovery: Option<Report>,
}

/// What goes on when a log is exchanged for another.
#[derive(Debug)]
pub(crate) struct LogState {
    /// Taken for a moment, with nothing else taken under it.
    inner: Mutex<Inner>,
    /// The mark that storage has for as long as it is held here. Taken before the log's lock in the area, never under it.
    pub mark: Mutex<Option<Marked>>,
    /// One recovery at a time: after a reset the disk with the home and the one with the log start at the same moment,
    /// and neither may be read before it is through.
    ///
    /// Who has the journals' `scanning` only tries this, and who has this may wait for that: so it is none of the locks whose order is
    /// watched, for which a trial is as good as waiting.
    pub recovering: std::sync::Mutex<()>,
    /// Its guest is writing its superblock, by which it may be opened: nobody changes meanwhile who keeps it. Taken after the journals'
    /// `scanning` by who wants to change that; a scan that forgets the log only tries it.
    pub opening: Mutex<()>,
    /// What is written into it while it is closed (`crate::unannounced`). Taken with nothing else taken under it.
    pub unannounced: Mutex<Unannounced>,
    /// How many writes of ours into its own place are on their way, for nobody's request and whoever keeps it now.
    pub own_writes: AtomicUsize,
}

impl LogState {
    pub fn new(wanted: PlacementKind) -> Self {
        LogState {
            inner: Mutex::new(Inner {
                phase: Phase::Closed,
                was_opened: false,
                is_brought: false,
                is_contested: false,
                is_past_hand_over: false,
                trust: Trust::Whole,
                emptied: 0,
                failed_to_empty: 0,
                wanted,
                recovery: None,
            }),
            mark: Mutex::default(),
            recovering: std::sync::Mutex::default(),
            opening: Mutex::default(),
            unannounced: Mutex::new(Unannounced::of_nobody()),
            own_writes: AtomicUsize::new(0),
        }
    }
}

/// One log and where it and its home are.
#[derive(Clone, Debug)]
pub struct Log {
    /// Its name in the area.
    pub id: LogId,
    /// Where it lives.
    pub placement: PlacementKind,
    pub(crate) index: LogIndex,
    pub(crate) place: FoundLogPlace,
    pub(crate) home_disk: usize,
    pub(crate) journal_disk: usize,
    /// The disk with its file system.
    pub(crate) home: Arc<Disk>,
    /// The disk with the log itself.
    pub(crate) journal: Arc<Disk>,
    /// It was handed over to storage, where it begins with this transaction: superblocks that say less stay away from there. That ends where its
    /// guest closes it, and not before: a device that begins anew closes it, too, under a guest that may have been suspended and goes on.
    pub(crate) storage_from: Option<u32>,
    pub(crate) state: Arc<LogState>,
}

impl Log {
    /// What storage says of it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn stored(&self) -> io::Result<Stored> {
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        self.journal.file.read_exact_at(&mut raw, self.place_of(0)?)?;
        Ok(Stored::read(&raw))
    }

    /// Why one with a device of its own cannot be durable by age.
    pub(crate) fn why_external_is_not_aged(&self) -> String {
        format!(
            "durable-within is not possible for disk {}: the journal of its file system at byte {} is on a device of its own; leave the \
             option out, or give the file system an internal journal",
            self.home.options.name, self.place.home_start
        )
    }

    /// Where it and its file system are.
    pub fn place(&self) -> &FoundLogPlace {
        &self.place
    }

    /// Its number within its VM.
    pub fn index(&self) -> LogIndex {
        self.index
    }

    /// The disk with its file system.
    pub fn home_disk(&self) -> usize {
        self.home_disk
    }

    /// The disk with the log itself.
    pub fn journal_disk(&self) -> usize {
        self.journal_disk
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.state.inner.lock().expect("no panic under this lock")
    }

    /// Whether a guest has it open.
    pub fn is_open(&self) -> bool {
        self.inner().phase != Phase::Closed
    }

    pub(crate) fn was_opened(&self) -> bool {
        self.inner().was_opened
    }

    pub(crate) fn set_open(&self) {
        let mut inner = self.inner();
        if inner.phase == Phase::Closed {
            inner.phase = Phase::Open;
        }
        inner.was_opened = true;
    }

    /// Whether its guest has a log that did not begin here: it goes on in its own place until it is empty.
    pub(crate) fn is_brought(&self) -> bool {
        self.inner().is_brought
    }

    pub(crate) fn set_brought(&self, is_brought: bool) {
        self.inner().is_brought = is_brought;
    }

    /// Whether another file system lays claim to its blocks: it goes on while it is open, and is not opened again.
    pub(crate) fn is_contested(&self) -> bool {
        self.inner().is_contested
    }

    /// Whether it was handed over, and its guest has not closed it since: it may believe that the log begins where storage has nothing of it.
    pub(crate) fn was_handed_over(&self) -> bool {
        self.storage_from.is_some()
    }

    pub(crate) fn is_past_hand_over(&self) -> bool {
        self.inner().is_past_hand_over
    }

    pub(crate) fn set_past_hand_over(&self, is_past: bool) {
        self.inner().is_past_hand_over = is_past;
    }

    pub(crate) fn set_contested(&self, is_contested: bool) {
        self.inner().is_contested = is_contested;
    }

    /// Says whether it was open until now.
    pub(crate) fn set_closed(&self) -> bool {
        std::mem::replace(&mut self.inner().phase, Phase::Closed) != Phase::Closed
    }

    /// Somebody waits until it owes nothing. Gives how often that was seen, and how often it failed, until now.
    pub fn begin_emptying(&self) -> (u64, u64) {
        let mut inner = self.inner();
        if inner.phase == Phase::Open {
            inner.phase = Phase::Emptying;
        }
        (inner.emptied, inner.failed_to_empty)
    }

    pub(crate) fn is_emptying(&self) -> bool {
        self.inner().phase == Phase::Emptying
    }

    /// How often it was seen to owe nothing while somebody waited for that, and how often that failed.
    pub(crate) fn emptied(&self) -> (u64, u64) {
        let inner = self.inner();
        (inner.emptied, inner.failed_to_empty)
    }

    /// It owes nothing at this moment, or it failed to come to that, or nobody waits any more.
    pub(crate) fn end_emptying(&self, is_empty: Option<bool>) {
        let mut inner = self.inner();
        match is_empty {
            Some(true) => inner.emptied += 1,
            Some(false) => inner.failed_to_empty += 1,
            None => {}
        }
        if inner.phase == Phase::Emptying {
            inner.phase = Phase::Open;
        }
    }

    /// Whether what the guest did proved that it is not what it seemed.
    pub fn is_distrusted(&self) -> bool {
        self.inner().trust != Trust::Whole
    }

    /// From now on it is distrusted. Says whether that is news.
    pub(crate) fn distrust(&self) -> bool {
        let mut inner = self.inner();
        let is_news = inner.trust == Trust::Whole;
        if is_news {
            inner.trust = Trust::Lost;
        }
        is_news
    }

    /// A distrusted log could not be brought to storage. Says whether that is news.
    pub(crate) fn failed_to_leave(&self) -> bool {
        std::mem::replace(&mut self.inner().trust, Trust::LostAndStuck) != Trust::LostAndStuck
    }

    /// Whether no age is wished: its guest is told of a commit when that is durable.
    pub(crate) fn is_durable_at_once(&self) -> bool {
        self.home.durable_within().is_some_and(|within| within.is_zero())
    }

    /// Where it shall live from the next mount on.
    pub fn wanted(&self) -> PlacementKind {
        self.inner().wanted
    }

    pub(crate) fn want(&self, placement: PlacementKind) {
        self.inner().wanted = placement;
    }

    /// The last recovery.
    pub(crate) fn recovery(&self) -> Option<Report> {
        self.inner().recovery.clone()
    }

    pub(crate) fn note_recovery(&self, report: Report) {
        self.inner().recovery = Some(report);
    }

    /// Storage is about to say something else than the mark: nobody writes that any more. Not to be called under the area's
    /// lock.
    pub(crate) fn take_mark(&self) -> Option<Marked> {
        self.state.mark.lock().expect("no panic under this lock").take()
    }

    /// Storage says the mark again, or still.
    pub(crate) fn put_mark_back(&self, mark: Option<Marked>) {
        *self.state.mark.lock().expect("no panic under this lock") = mark;
    }

    /// Whether a write of ours into its own place is on its way.
    pub(crate) fn has_own_writes(&self) -> bool {
        self.state.own_writes.load(Ordering::Acquire) > 0
    }

    /// Whether it is open and the area holds it.
    pub fn is_held_open(&self) -> bool {
        self.placement.is_held() && self.is_open()
    }

    /// Where log block `position` has its own place on its disk, in bytes.
    pub fn offset_of(&self, position: u32) -> Option<u64> {
        self.place.offset_of(position)
    }

    /// The same, for who cannot go on without.
    pub(crate) fn place_of(&self, position: u32) -> io::Result<u64> {
        self.offset_of(position)
            .ok_or_else(|| io::Error::other(format!("log block {position} has no place on its disk")))
    }

    /// Where home block `block` is on its disk, in bytes.
    pub fn home_offset(&self, block: u64) -> u64 {
        self.place.home_start + block * u64::from(self.place.block_bytes)
    }

    pub(crate) fn read_home(&self, block: u64, content: &mut [u8]) -> io::Result<()> {
        self.home.file.read_exact_at(content, self.home_offset(block))
    }

    /// Reads the journal's superblock at its own place.
    pub(crate) fn stored_superblock(&self) -> io::Result<[u8; jbd2::SUPERBLOCK_BYTES]> {
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        self.read_stored(0, &mut raw)?;
        Ok(raw)
    }

    /// Reads a log block at its own place.
    pub(crate) fn read_stored(&self, position: u32, content: &mut [u8]) -> io::Result<()> {
        self.journal.file.read_exact_at(content, self.place_of(position)?)
    }
}
