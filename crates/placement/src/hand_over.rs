//! Changing where a journal lives while its guest runs. (Leaving NVM has steps of its own: [`crate::nvm`].)
//!
//! A held log comes to rest first: no home write of its guest's begins until none is under way, for as long as whoever wishes it elsewhere has
//! patience ([`crate::keeper::Keeper::comes_to_rest`]). Then what is made durable by age ends, if it is.
//!
//! It is handed over to its own place on storage in one step, between two passes of the device that serves it: all that
//! is committed goes home and is flushed; the blocks of the transaction that the guest is in the midst of are written to
//! their own places, and flushed; then the superblock on storage says that the log begins with that transaction. From
//! there on the guest's log writes go to storage as they are. Its own superblocks are kept from storage for as long as
//! they say that the log begins earlier: what lies before was never written there, and all of it is home.
//!
//! Failure story: an error, or a kill, before that superblock leaves the log held as it was, with more of it home. A kill
//! right after leaves a held log that owes nothing and a log on storage that is live; whoever finishes the held one
//! sees that it was handed over ([`crate::found`]) and replays the one on storage.

use crate::disk::{DiskCounters, PlacementKind};
use crate::finish::write_home;
use crate::journals::Journals;
use crate::keeper::Steps;
use crate::keepers::keeper_of;
use crate::kept_log::KeptLog;
use crate::log::{Log, Marked};
use crate::numbers;
use crate::opening::{mark_ahead, write_mark_bytes};
use block_route::LogIndex;
use jbd2::SuperblockEdit;
use journal_area::{HeldLog, Holding, Location, Tail, Taking};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use write_log::LoggedFile;

/// What becomes of a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is so from now on.
    Done,
    /// It is so from the next mount on.
    AtNextMount,
    /// The device that serves the log has to hand it over (`Route::hand_over` of crate block-route); then it is.
    HandOver,
}

impl Journals {
    /// Wishes that a log lives elsewhere.
    ///
    /// # Errors
    /// A sentence when that is not possible while its guest runs.
    pub fn change_placement(&self, index: LogIndex, to: PlacementKind) -> io::Result<Change> {
        use PlacementKind::{Copy, Nvm, Remote, Retain, Storage};
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        let log = self.log(index).ok_or_else(|| io::Error::other("the log has gone"))?;
        if to != Storage && log.is_distrusted() {
            return Err(io::Error::other(
                "the journal is not what it seemed (see its disk's fault), and stays on storage until the VM is started anew",
            ));
        }
        // A log that is being opened is still closed, and its keeper is about to have it.
        let _not_while_it_opens = log.state.opening.lock().expect("no panic under this lock");
        // Who takes a held log elsewhere has its table, and does not look at where it is to live.
        let nobody_takes_it = log.state.recovering.try_lock();
        if nobody_takes_it.is_err() && log.is_held_open() && to.is_held() {
            log.want(to);
            self.describe_or_complain();
            return Ok(Change::AtNextMount);
        }
        let change = match (log.placement, to) {
            (Remote, Remote | Storage) if log.keeper.pause(to == Storage) => return Ok(Change::Done),
            // It could not be shipped, and is in its own place already.
            (Remote, Storage) if log.keeper.leaves_nothing_here() => return Ok(Change::Done),
            (from, to) if from == to => Change::Done,
            (Retain, Copy) | (Copy, Retain) => {
                self.replace(&log, to, None);
                Change::Done
            }
            (Nvm | Retain | Copy | Storage, Nvm | Retain | Copy | Storage) => {
                if to == Nvm {
                    self.check_region(&log)?;
                }
                // A device that begins anew closes its logs, and of one that was handed over its guest, if it was suspended, has yet to hear
                // where that begins. What the host writes home of one that was closed lands before it goes.
                let is_in_use = log.is_open() || log.was_handed_over();
                if is_in_use || self.area.has_host_writes_in_flight(log.id) {
                    let is_leaving = to == Storage;
                    log.want(to);
                    // Another worker may go on: it has to know.
                    self.describe_or_complain();
                    return Ok(if is_leaving { Change::HandOver } else { Change::AtNextMount });
                }
                self.replace(&log, to, None);
                Change::Done
            }
            (from, to) => {
                return Err(io::Error::other(format!(
                    "a journal cannot go from {} to {} while its guest runs: say so in the configuration, and start the \
                     VM anew",
                    from.name(),
                    to.name()
                )));
            }
        };
        log.want(to);
        self.describe_or_complain();
        Ok(change)
    }

    /// # Errors
    /// A sentence when it cannot.
    fn check_region(&self, log: &Log) -> io::Result<()> {
        let name = &log.home.options.name;
        let refuse = |reason: String| {
            Err(io::Error::other(format!("the journal cannot go to nvm while its guest runs: {reason}")))
        };
        let Some(nvm) = self.region(log.home_disk) else {
            return refuse(format!(
                "disk {name} has no region of NVM; give it one in the configuration (placement=nvm=PATH), and start the VM anew"
            ));
        };
        if log.place.is_external {
            return refuse("a journal on a device of its own does not go to NVM".to_owned());
        }
        nvm.check_room(log.place.log_blocks, log.place.block_bytes).or_else(|error| refuse(error.to_string()))
    }

    /// From now on what the guests of a disk commit is durable on storage within this time; nothing: with what goes home, or never.
    ///
    /// # Errors
    /// A sentence where nothing of the disk is held.
    pub fn set_durable_within(&self, disk: usize, within: Option<Duration>) -> io::Result<()> {
        if within.is_some() {
            self.check_can_age(disk, None)?;
        }
        self.disk(disk).set_durable_within(within);
        Ok(())
    }

    /// Whether a disk's journals can be durable by age, now or after a change of placement.
    ///
    /// # Errors
    /// A sentence if they cannot.
    pub fn check_can_age(&self, disk: usize, to: Option<PlacementKind>) -> io::Result<()> {
        let logs = self.logs_at_home(disk);
        if let Some(log) = logs.iter().find(|log| log.place.is_external) {
            return Err(io::Error::other(log.why_external_is_not_aged()));
        }
        let is_held = |log: &Arc<KeptLog>| to.unwrap_or(log.wanted()).is_held() || log.placement.is_held();
        if to.is_some_and(|to| !to.is_held()) || !logs.iter().any(is_held) {
            return Err(io::Error::other(
                "durable-within is for placements retain and copy, and no journal of this disk is held so",
            ));
        }
        Ok(())
    }

    /// A log that was on NVM, or was to be, is on storage from now on; from transaction `from` on, if that is in its midst.
    pub(crate) fn is_on_storage(&self, index: LogIndex, from: Option<u32>) {
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        let Some(log) = self.log(index).filter(|log| log.placement != PlacementKind::Storage) else { return };
        self.replace(&log, PlacementKind::Storage, from);
        if from.is_some() {
            self.say_handed_over(&log);
        }
    }

    /// A log goes on in its own place, from that transaction on, until its guest closes it; then it is as it was wished.
    pub(crate) fn stays_on_storage(&self, index: LogIndex, from: u32) {
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        if let Some(log) = self.log(index) {
            self.replace(&log, PlacementKind::Storage, Some(from));
        }
    }

    fn say_handed_over(&self, log: &Log) {
        log::info!(
            "disk {}: the journal of the file system at byte {} is on storage from now on, as wished",
            log.home.options.name,
            log.place.home_start
        );
    }

    /// Puts a log in the place of itself; the caller holds `scanning`.
    fn replace(&self, log: &KeptLog, placement: PlacementKind, storage_from: Option<u32>) {
        if placement.is_held() {
            // It may have been handed over before.
            self.area.forget_hand_over(log.id);
            let holding = if placement == PlacementKind::Retain { Holding::Retain } else { Holding::Copy };
            self.area.set_holding(log.id, holding);
        }
        self.put(log, placement, storage_from);
        // Changes of homes may have waited for what was about to be done with it.
        log.home.wake.wake();
        let is_held_anew = placement.is_held() && !log.placement.is_held();
        if let Err(error) = self.describe() {
            log::error!("writing down where journals live failed: {error}");
            // Nothing may be held that a later process would not find.
            if is_held_anew && let Some(now) = self.log(log.index) {
                self.put(&now, PlacementKind::Storage, log.storage_from);
            }
        }
    }

    pub(crate) fn put(&self, log: &KeptLog, placement: PlacementKind, storage_from: Option<u32>) {
        if !(placement.is_held() && log.placement.is_held()) {
            log.keeper.leave();
        }
        self.put_left(log, placement, storage_from);
    }

    /// Ends the taking of a log that lies in its own place by now. The caller has its `recovering`, and not `scanning`, which is taken here: the log
    /// is exchanged as it is now, whatever a scan has made of it since it was taken.
    pub(crate) fn put_taken(&self, log: &Arc<KeptLog>, taking: Taking<'_>, storage_from: Option<u32>) {
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        let log = self.log(log.index).unwrap_or_else(|| Arc::clone(log));
        // Before the area has the log locked: the thread of another disk may hold what this takes, and ask the area.
        log.keeper.leave();
        // At one moment: nobody takes the log for a held one that is closed.
        taking.end(|| self.put_left(&log, PlacementKind::Storage, storage_from));
        self.describe_or_complain();
    }

    fn put_left(&self, log: &KeptLog, placement: PlacementKind, storage_from: Option<u32>) {
        // One that is held goes on being held by the same, retained or copied.
        let keeper = if placement.is_held() && log.placement.is_held() {
            Arc::clone(&log.keeper)
        } else {
            keeper_of(&self.area, log.id, placement, &log.home, self.region(log.home_disk))
        };
        if storage_from.is_some() {
            log.set_past_hand_over(false);
        }
        let moved = KeptLog { log: Log { placement, storage_from, ..log.log.clone() }, keeper };
        self.replace_log(Arc::new(moved));
    }

    pub(crate) fn describe_or_complain(&self) {
        if let Err(error) = self.describe() {
            log::error!("writing down where journals live failed: {error}");
        }
    }

    /// A log was closed, by its guest or since that is gone: if it was wished elsewhere meanwhile, it goes there with the next mount. False where
    /// that has to wait for home writes of the host's: its keeper says when they have ended ([`crate::keeper::Step::Closed`]).
    pub(crate) fn follow_wish(&self, log: &Log) -> bool {
        if is_as_wished(log) {
            return true;
        }
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        self.log(log.index).is_none_or(|log| self.follow_wish_now(&log))
    }

    /// The same, for who holds `scanning`.
    fn follow_wish_now(&self, log: &KeptLog) -> bool {
        // The thread of another disk may have its keeper open it at this moment.
        let _not_while_it_opens = log.state.opening.lock().expect("no panic under this lock");
        // One that somebody has brought is open again: its keeper goes on until that is closed.
        if !log.is_open() && !is_as_wished(log) {
            // Whoever keeps it next does not keep what the guest writes there behind them (rule 3 of ARCHITECTURE.md).
            if self.area.has_host_writes_in_flight(log.id) {
                return false;
            }
            self.replace(log, log.wanted(), None);
        }
        true
    }

    /// Hands a held, open log over to its own place on storage. False when that has to wait for a write that is under way.
    /// Only the device with the log may call this, between two passes.
    ///
    /// Storage is read, written and flushed under the log's own `recovering`, and `scanning` is taken for the switch alone
    /// ([`Journals::put_taken`]): a disk that does not answer holds up the thread that serves it, and none of the VM's others, which scan, and
    /// describe logs and memory, meanwhile. That nothing happens to this log until then is argued at `Journals::scanning`.
    pub(crate) fn hand_over(&self, index: LogIndex) -> io::Result<bool> {
        let has_gone = || io::Error::other("the log has gone");
        let log = self.log(index).ok_or_else(has_gone)?;
        let Ok(_alone) = log.state.recovering.try_lock() else { return Ok(false) };
        // It may have been recovered, or taken elsewhere, until a moment ago.
        let log = self.log(index).ok_or_else(has_gone)?;
        if !log.is_held_open() {
            // One that is here already may be live: nothing changes.
            if !log.placement.is_held() {
                return Ok(true);
            }
            // Nobody hands it over any more.
            log.keeper.stay(&log, &mut Steps::default());
            // Closed since somebody wished it here: it is here before he is told so.
            return Ok(self.follow_wish(&log));
        }
        let handed_over = self.hand_over_alone(&log);
        if handed_over.is_err() {
            // It is held as it was, and nothing waits for it any more.
            log.keeper.stay(&log, &mut Steps::default());
            log.home.wake.wake();
        }
        handed_over
    }

    /// The same of one that is held and open; the caller has its `recovering`.
    fn hand_over_alone(&self, log: &Arc<KeptLog>) -> io::Result<bool> {
        if self.area.owed(log.id).materialise {
            return Err(io::Error::other(
                "the journal has features that only the guest's own kernel can replay; it cannot be handed over while it is open",
            ));
        }
        // Before what is made durable by age ends: that is in force for as long as the log cannot be taken.
        if !log.keeper.comes_to_rest(log) {
            return Ok(false);
        }
        // What was made durable in the log's place is not the guest's log.
        if !log.keeper.may_be_taken(log) {
            return Ok(false);
        }
        // A block that is on its way to its own place could be read there before it has arrived.
        if log.keeper.has_stored_in_flight() {
            return Ok(false);
        }
        if let Some(number) = self.area.next_sequence(log.id) {
            // Blocks of the transaction that has this number are about to lie in their own places beside the mark.
            mark_ahead(log, &self.area, number)?;
        }
        let Some(taking) = self.area.take_for_hand_over(log.id) else { return Ok(false) };
        if self.area.is_past_unknown(log.id) {
            // A block of which nobody knows whether its version here is the newer one: as on any disk both stay, one at home, one in the log.
            self.put_in_place(log, taking)?;
            self.say_handed_over(log);
            log.end_emptying(None);
            return Ok(true);
        }
        // Nobody counts on in it while storage is about to say something else.
        let marked = log.take_mark();
        let bytes = match self.bring_to_storage(log, &taking, marked.as_ref()) {
            Ok(bytes) => bytes,
            Err(error) => {
                // It is held as it was.
                drop(taking);
                log.put_mark_back(marked);
                return Err(error);
            }
        };
        let from = taking.cursor().sequence;
        self.put_taken(log, taking, Some(from));
        // Changes of homes may have waited.
        log.home.wake.wake();
        DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, bytes);
        log.home.set_dirty();
        log.journal.set_dirty();
        self.say_handed_over(log);
        log.end_emptying(None);
        Ok(true)
    }

    /// Writes home what a log owes, and the transaction that its guest is in the midst of to its own place; then storage says that
    /// the log begins with that. Gives what was written there, in bytes.
    fn bring_to_storage(&self, log: &Log, taking: &Taking<'_>, marked: Option<&Marked>) -> io::Result<u64> {
        let (home, journal) = (&log.home.file, &log.journal.file);
        let (held, cursor) = (&taking.log(), taking.cursor());
        let failed_flushes = journal.failed_flushes();
        let report = write_home(held, &log.place, home, journal).map_err(io::Error::other)?;
        DiskCounters::add(&log.home.counters.home_bytes_to_storage, report.bytes_written);
        // In front of the guest's own blocks, of which some have such a number.
        numbers::wipe(held, &log.place, journal, (cursor.sequence, held.numbered()))?;
        let bytes = self.write_open_end(log, held, cursor, journal)?;
        journal.sync_since(failed_flushes)?;
        held.note_hand_over(Some(cursor));
        let written = write_superblock(log, held, cursor, journal).and_then(|()| journal.sync_since(failed_flushes));
        if let Err(error) = written {
            // Whether it arrived is not known. What is committed from now on is held here again, so nobody may take
            // storage's word for it: without the note, a log that is live there is refused.
            held.note_hand_over(None);
            self.mark_again(log, marked);
            return Err(error);
        }
        Ok(bytes + u64::from(log.place.block_bytes))
    }

    fn mark_again(&self, log: &Log, marked: Option<&Marked>) {
        if let Some(marked) = marked
            && let Err(error) = write_mark_bytes(log, &marked.bytes)
        {
            log::error!("marking the journal as held again failed: {error}");
        }
    }

    /// Writes the blocks of the transaction that is not committed to their own places. Gives their bytes.
    fn write_open_end(&self, log: &Log, held: &HeldLog<'_>, cursor: Tail, journal: &LoggedFile) -> io::Result<u64> {
        let tail = held.tail().map_or(cursor.position, |tail| tail.position);
        let is_committed = |position: u32| {
            if tail <= cursor.position {
                (tail..cursor.position).contains(&position)
            } else {
                position >= tail || position < cursor.position
            }
        };
        let mut block = vec![0; log.place.block_bytes as usize];
        let mut bytes = 0;
        for position in (1..held.log_blocks()).filter(|position| !is_committed(*position)) {
            if held.read_held(position, &mut block) {
                journal.write_all_at(&block, log.place_of(position)?)?;
                bytes += block.len() as u64;
            }
        }
        // What durability by age left where the next transaction will begin may have its number.
        if held.location(cursor.position) == Location::None {
            block.fill(0);
            journal.write_all_at(&block, log.place_of(cursor.position)?)?;
            bytes += block.len() as u64;
        }
        Ok(bytes)
    }
}

/// Whether a log lives where it was wished, from its next mount on at the latest.
fn is_as_wished(log: &Log) -> bool {
    log.wanted() == log.placement && log.storage_from.is_none()
}

/// Says on storage that the log begins at `cursor`.
fn write_superblock(log: &Log, held: &HeldLog<'_>, cursor: Tail, journal: &LoggedFile) -> io::Result<()> {
    let mut block = vec![0; log.place.block_bytes as usize];
    if !held.read_held(0, &mut block) {
        return Err(io::Error::other("the held journal has no superblock"));
    }
    SuperblockEdit::new(&mut block).map_err(io::Error::other)?.start(cursor.position).sequence(cursor.sequence).seal();
    // Only the superblock itself, in one sector or two that are written at once: the rest of its block is not ours.
    journal.write_all_at(&block[..jbd2::SUPERBLOCK_BYTES], log.place_of(0)?)
}
