//! The keeper of a log that goes to a region of NVM: what the guest does reaches the machines of this directory, and what they want
//! done goes out as steps.
//!
//! [`Work`] is what they share: what is on its way, and for what; which requests wait. The log as it is known, and the region,
//! are [`State`], which others look at, too (reports, recovery). Everything comes from the thread of the disk, which has the log and
//! its homes, but for what a scan or a report asks.
//!
//! Lock order: the work, then the region's state, then (where something is read into guest memory, or somebody brings a log along)
//! the area's.

use super::captured::{Captured, Written};
use super::checkpoint::Checkpoint;
use super::commit::Commit;
use super::cost::AppendCost;
use super::early::Early;
use super::foreign::{Foreign, give_up_mark, last_written};
use super::inflight::{InFlight, Writer};
use super::leaving::{Leaving, Left};
use super::log_stream::{Tail, TailMove};
use super::notes::Note;
use super::report::NvmCounters;
use super::superblock::Closing;
use super::{NvmDisk, State, TakenUp, ToSettle};
use crate::disk::{Disk, DiskCounters};
use crate::distrust;
use crate::keeper::{
    self, BlockContent, Finished, HomeChange, HomePart, HomeRead, HomeVerdict, Keeper, LogBlock, LogRead, LogVerdict,
    OddVerdict, Side, Step, Steps, SuperblockBlock, SuperblockWritten, Task,
};
use crate::keepers::{finish_on_storage, leave};
use crate::log::Log;
use crate::stored::{self, Says};
use crate::watch::Watch;
use block_route::{Buffer, RequestId, RequestKind, Status, segments};
use guest_memory::MemorySlice;
use jbd2::{SUPERBLOCK_BYTES, Superblock, SuperblockEdit};
use journal_area::JournalArea;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

/// What an operation with a number was for.
#[derive(Clone, Debug)]
pub(super) enum Errand {
    /// The guest's write to homes.
    Through {
        request: RequestId,
        blocks: Range<u64>,
        /// Blocks that it made what their latest version is.
        same: Vec<Written>,
        /// It holds its request beside the operation.
        is_held: bool,
    },
    /// The flush of such a write, whose blocks the guest's log has left; with the number of a mark.
    LateFlush { request: RequestId, late: Vec<u64>, mark: u64 },
    /// The flush after which blocks leave that the guest's tail has passed; with the number of a mark, and where the transactions begin
    /// that it has passed.
    TailFlush { request: RequestId, passed: TailMove, mark: u64, before: Vec<Tail> },
    /// An append of the transaction that is being committed.
    Append,
    /// An append of a transaction that was not complete, and of which generation.
    EarlyAppend(u64),
    /// The flush of its appends, and of the mark with this number.
    CommitFlush(u64),
    /// A run of a checkpoint.
    Checkpoint(Vec<Written>),
    /// Its flush, and of the mark with this number.
    CheckpointFlush(u64),
    /// The superblock of a log that is closed.
    Closed,
    /// Log blocks of a log that leaves for storage, in which attempt, …
    LeavingLog(u64),
    /// … their flush, …
    LeavingFlush(u64),
    /// … the superblock that says where the log is, …
    LeavingSuperblock,
    /// … its flush, …
    LeavingLastFlush,
    /// … and log blocks that came meanwhile.
    LeavingRest,
    /// Something that is the disk's from now on.
    PassedOn,
}

impl Errand {
    /// Whether it is a write of ours into the log's own place.
    fn is_own_in_log(&self) -> bool {
        matches!(self, Errand::LeavingLog(_) | Errand::LeavingSuperblock | Errand::LeavingRest)
    }

    /// Whether it put something on storage, in place of making that durable.
    fn wrote(&self) -> bool {
        !matches!(
            self,
            Errand::LateFlush { .. }
                | Errand::TailFlush { .. }
                | Errand::CommitFlush(_)
                | Errand::CheckpointFlush(_)
                | Errand::LeavingFlush(_)
                | Errand::LeavingLastFlush
        )
    }
}

/// What is known of a log beside its content.
#[derive(Debug)]
pub(super) struct Work {
    /// The disk with the log and its homes.
    pub(super) home: Arc<Disk>,
    pub(super) area: Arc<JournalArea>,
    pub(super) nvm: Arc<NvmDisk>,
    /// Which of the disk's regions it has.
    pub(super) slot: Option<usize>,
    errands: HashMap<u64, Errand>,
    next_errand: u64,
    pub(super) in_flight: InFlight,
    pub(super) commit: Option<Commit>,
    pub(super) early: Early,
    pub(super) cost: AppendCost,
    /// Appends that were logged, and are to go home in the background.
    pub(super) soon: Vec<u64>,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) checkpoint_failed: bool,
    /// How many have failed, one after the other, …
    pub(super) checkpoints_failed: u32,
    /// … and when the last one did.
    pub(super) checkpoint_failed_at: Instant,
    /// When everything was last sent home because of the options' interval.
    pub(super) checkpointed: Instant,
    /// How often everything was asked to go home when that was looked at last.
    pub(super) checkpoints_asked: u64,
    /// What a checkpoint took out of the region is not collected yet.
    pub(super) collection_due: bool,
    /// After which transaction long runs were looked for last.
    pub(super) runs_looked_for: Option<u32>,
    pub(super) closing: Option<Closing>,
    pub(super) leaving: Option<Leaving>,
    /// What the leaving log has written of itself.
    pub(super) left: Left,
    /// Why the last attempt to leave has failed; told to who asks next.
    pub(super) leaving_failed: Option<String>,
    /// Looks for what proves that the journal is not what it seems.
    pub(super) watch: Watch,
    /// That was found, and the log goes to its own place as it is.
    pub(super) is_distrusted: bool,
    /// Somebody waits until what was committed up to this transaction is home.
    pub(super) emptying: Option<u32>,
    /// Requests of this pass that wrote into the log.
    pub(super) pass_requests: Vec<RequestId>,
    /// Requests that wait until no commit is under way.
    pub(super) held: Vec<RequestId>,
    /// Blocks that the guest has written home as they are in the region: they leave it at the next flush.
    pub(super) settled: Vec<Written>,
    /// The same of flushes that are under way, with the number of a mark that they make durable.
    flushing: HashMap<RequestId, (Vec<Written>, u64)>,
    /// Somebody was told to wait until [`Step::Retry`].
    pub(super) is_waited_for: bool,
    /// How many writes to homes have ended, the guest's and ours, …
    pub(super) ended: u64,
    /// … how many of them had when each flush began that is under way: ours, …
    pub(super) own_flushes: HashMap<u64, u64>,
    /// … and the guest's; …
    guest_flushes: HashMap<RequestId, u64>,
    /// … and how many are durable.
    pub(super) durable: u64,
    /// How many flushes of the disk have failed, as far as what is here knows of it.
    pub(super) failed_flushes: u64,
}

impl Work {
    fn new(home: Arc<Disk>, area: Arc<JournalArea>, nvm: Arc<NvmDisk>) -> Self {
        Work {
            home,
            area,
            checkpoints_asked: nvm.checkpoints_asked(),
            nvm,
            slot: None,
            errands: HashMap::new(),
            next_errand: 0,
            in_flight: InFlight::default(),
            commit: None,
            early: Early::default(),
            cost: AppendCost::default(),
            soon: Vec::new(),
            checkpoint: None,
            checkpoint_failed: false,
            checkpoints_failed: 0,
            checkpoint_failed_at: Instant::now(),
            checkpointed: Instant::now(),
            collection_due: false,
            runs_looked_for: None,
            closing: None,
            leaving: None,
            left: Left::default(),
            leaving_failed: None,
            watch: Watch::default(),
            is_distrusted: false,
            emptying: None,
            pass_requests: Vec::new(),
            held: Vec::new(),
            settled: Vec::new(),
            flushing: HashMap::new(),
            is_waited_for: false,
            ended: 0,
            own_flushes: HashMap::new(),
            guest_flushes: HashMap::new(),
            durable: 0,
            failed_flushes: 0,
        }
    }

    pub(super) fn counters(&self) -> &DiskCounters {
        &self.home.counters
    }

    pub(super) fn name(&self) -> &str {
        &self.home.options.name
    }

    /// A number for an operation, by which its end is known.
    pub(super) fn number(&mut self, errand: Errand) -> u64 {
        let number = self.next_errand;
        self.next_errand += 1;
        self.errands.insert(number, errand);
        number
    }

    /// Writes bytes to the disk, for nobody. Gives the operation's number.
    pub(super) fn write(&mut self, side: Side, offset: u64, bytes: Vec<u8>, errand: Errand, steps: &mut Steps) -> u64 {
        let number = self.number(errand);
        let content = vec![Buffer::Bytes(Arc::from(bytes))];
        steps.push(side, Step::Write { request: None, offset, content, task: Task::Own(number) });
        number
    }

    /// Writes a block of the log to its place, for the request that brought it.
    pub(super) fn write_for(
        &mut self,
        request: RequestId,
        (offset, block): (u64, Vec<u8>),
        errand: Errand,
        steps: &mut Steps,
    ) {
        let task = Task::Own(self.number(errand));
        let content = vec![Buffer::Bytes(Arc::from(block))];
        steps.push(Side::Journal, Step::Write { request: Some(request), offset, content, task });
    }

    /// Flushes the disk.
    pub(super) fn flush_for(&mut self, errand: Errand, steps: &mut Steps) {
        let counters = &self.nvm.counters;
        match errand {
            Errand::CommitFlush(_) => NvmCounters::add(&counters.flushes_of_commits, 1),
            Errand::CheckpointFlush(_) => NvmCounters::add(&counters.flushes_of_checkpoints, 1),
            Errand::TailFlush { .. } => NvmCounters::add(&counters.flushes_of_tails, 1),
            Errand::LateFlush { .. } => NvmCounters::add(&counters.flushes_of_overwrites, 1),
            _ => {}
        }
        let number = self.number(errand);
        self.own_flushes.insert(number, self.ended);
        steps.push(Side::Home, Step::Flush { task: Task::Own(number) });
    }

    /// Whether a superblock of the guest's waits for a flush, with what its tail has passed.
    pub(super) fn is_tail_on_its_way(&self) -> bool {
        self.errands.values().any(|errand| matches!(errand, Errand::TailFlush { .. }))
    }

    /// Takes note of what a scan has found.
    fn refresh(&self, state: &mut State, log: &Log) {
        let State::Held(captured) = state else { return };
        let (known, now) = (&captured.log.place, &log.place);
        if (known.home_blocks, known.file_system_uuid) != (now.home_blocks, now.file_system_uuid) {
            captured.log = Arc::new(log.clone());
        }
    }

    /// Writes what the next worker has to know anew, where that has become long; not in the midst of what is not noted yet.
    fn renew_notes(&self, state: &mut State) {
        let State::Held(captured) = state else { return };
        let is_between = self.commit.is_some()
            || self.closing.is_some()
            || self.leaving.is_some()
            || self.is_tail_on_its_way()
            || captured.journal.has_pending();
        if captured.notes.are_long() && !is_between {
            let state = captured.state(self.home.failed_flushes() > self.home.told_failures());
            captured.notes.renew(&state);
        }
    }

    /// The region is nobody's any more.
    pub(super) fn give_back(&mut self, captured: Captured, state: &mut State) {
        self.slot = None;
        self.nvm.counters.add_journal(&captured.journal.counters());
        let mut notes = captured.notes;
        match captured.journal.give_back() {
            Ok(medium) => {
                *state = State::Idle(medium);
                notes.remove();
            }
            Err(error) => {
                *state = State::Failed;
                log::error!("disk {}: giving the NVM region back failed: {error}", self.name());
            }
        }
    }

    /// The file system was replaced while its log was open: what it had committed must never land on the new one.
    fn file_system_is_gone(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = std::mem::replace(state, State::Failed) else { return };
        log::warn!(
            "disk {}: the file system at byte {} was replaced while {} blocks of it were on NVM only",
            self.name(),
            captured.log.place.home_start,
            captured.journal.len()
        );
        let put = self.put_in_place(&captured).and_then(|()| self.put_foreign_in_place(&captured));
        if put.is_ok() {
            // What they wrote is where everybody finds it.
            let foreign = self.closing.take_if(|closing| closing.foreign.is_some() && !closing.is_on_its_way);
            let waiting = self.held.drain(..).chain(foreign.map(|closing| closing.request));
            waiting.for_each(|request| steps.release(request, Status::Ok));
        }
        if let Err(error) = put.and_then(|()| give_up_mark(&captured)).and_then(|()| self.bring_seen_home(&captured)) {
            log::error!(
                "disk {}: writing where the file system was failed: {error}; what the guest wrote there is lost",
                self.name()
            );
        }
        self.give_back(*captured, state);
        self.forget_work(steps);
    }

    /// Another guest begins; no request and no operation of ours is under way.
    fn begin_anew(&mut self) {
        let slot = self.slot;
        let (home, area, nvm) = (Arc::clone(&self.home), Arc::clone(&self.area), Arc::clone(&self.nvm));
        let mut early = std::mem::take(&mut self.early);
        early.begin_anew();
        // Numbers are not used again.
        let next_errand = self.next_errand;
        *self = Work { slot, early, next_errand, ..Work::new(home, area, nvm) };
    }

    /// What is under way is of an earlier opening: its blocks' versions and its marks were numbered as those of this one will be, so
    /// its end says nothing of them.
    pub(super) fn forget_earlier_openings(&mut self) {
        self.settled.clear();
        self.flushing.clear();
        self.leaving_failed = None;
        for errand in self.errands.values_mut() {
            match errand {
                Errand::Through { same, blocks, .. } => {
                    same.clear();
                    blocks.end = blocks.start;
                }
                Errand::LateFlush { late, mark, .. } => {
                    late.clear();
                    *mark = 0;
                }
                Errand::TailFlush { request, .. } => {
                    *errand = Errand::LateFlush { request: *request, late: Vec::new(), mark: 0 };
                }
                _ => {}
            }
        }
    }

    /// Nothing that is under way counts any more; who waits for it is told that it failed.
    fn forget_work(&mut self, steps: &mut Steps) {
        self.commit = None;
        self.early.forget();
        self.checkpoint = None;
        self.soon.clear();
        self.leaving = None;
        self.is_distrusted = false;
        self.watch.forget();
        self.emptying = None;
        self.settled.clear();
        self.flushing.clear();
        let closing = self.closing.take().filter(|closing| !closing.is_on_its_way);
        for request in self.held.drain(..).chain(closing.map(|closing| closing.request)) {
            steps.release(request, Status::IoError);
        }
        self.ask_again(steps);
    }

    /// Whoever was told to wait asks again.
    pub(super) fn ask_again(&mut self, steps: &mut Steps) {
        if std::mem::take(&mut self.is_waited_for) {
            steps.push(Side::Home, Step::Retry);
        }
    }

    /// Takes everything that waits one step on.
    pub(super) fn drive(&mut self, state: &mut State, steps: &mut Steps) {
        if let State::Held(captured) = state {
            self.begin_commit(captured, steps);
            self.drive_checkpoint(captured, steps);
        }
        // First: if it does not leave after all, what waited for it goes on.
        self.drive_leaving(state, steps);
        self.advance(state, steps);
        self.drive_space(state, steps);
        self.drive_closing(state, steps);
        self.drive_distrusted(state, steps);
    }

    /// Copies a log block until its transaction is complete.
    fn log_write(&mut self, state: &mut State, log: &Log, block: LogBlock<'_>) -> LogVerdict {
        let State::Held(captured) = state else {
            if let BlockContent::Guest(slices) = block.content {
                self.note_foreign(log, slices);
            }
            return LogVerdict::Store;
        };
        if self.closing.as_ref().is_some_and(|closing| closing.is_on_its_way) {
            // Its place is a part of the disk again.
            return LogVerdict::Store;
        }
        let content = match block.content {
            BlockContent::Guest(slices) => segments::gather(slices),
            BlockContent::Bytes(bytes) => bytes,
        };
        captured.goes_on_unread();
        if captured.is_sent_again(block.position, &content, block.is_again) {
            self.pass_requests.push(block.request);
            return LogVerdict::Kept;
        }
        let is_over = self.closing.is_none() && captured.stream.is_live(block.position);
        let over = log.offset_of(block.position).filter(|_| is_over).map(|offset| (offset, content.clone()));
        let content: Arc<[u8]> = Arc::from(content);
        self.watch.log_write(block.position, &content);
        if captured.has_failed || captured.stream.write(block.position, Arc::clone(&content)).is_err() {
            if !captured.has_failed {
                log::error!("disk {}: a transaction is larger than the NVM region; make it larger", self.name());
            }
            return LogVerdict::Fail;
        }
        captured.notes.note(&Note::LogBlock(block.position, content));
        match over {
            Some(over) => {
                self.written_over(captured, block.request, over, Foreign::Live(block.position));
                LogVerdict::Held
            }
            None => {
                self.pass_requests.push(block.request);
                LogVerdict::Kept
            }
        }
    }

    /// A read of a log block: whoever mounts replays what it finds there ([`Captured::show`]).
    fn log_read(&mut self, state: &mut State, position: u32, buffer: &mut [u8]) -> io::Result<LogRead> {
        let State::Held(captured) = state else { return Ok(LogRead::Stored) };
        if position != 0 {
            buffer.copy_from_slice(&captured.shown_block(&self.home.file, position)?);
            return Ok(LogRead::Copied);
        }
        if self.commit.is_some() {
            self.is_waited_for = true;
            return Ok(LogRead::Wait);
        }
        captured.show().map_err(io::Error::other)?;
        buffer.fill(0);
        buffer[..captured.owner.attachment.len()].copy_from_slice(&captured.owner.attachment);
        let tail = captured.shown_tail();
        if let Ok(mut edit) = SuperblockEdit::new(buffer) {
            edit.start(tail.position).sequence(tail.sequence).seal();
        }
        Ok(LogRead::Copied)
    }

    fn errand_done(&mut self, state: &mut State, number: u64, errand: Errand, is_ok: bool, steps: &mut Steps) {
        if errand.wrote() {
            self.in_flight.end(number);
            // A guest's flush asks for what the guest has written. Ours are flushed by whoever needs them on the disk.
            if !matches!(errand, Errand::Append | Errand::EarlyAppend(_) | Errand::Checkpoint(_)) {
                self.home.set_dirty();
            }
        }
        if let Some(covered) = self.own_flushes.remove(&number).filter(|_| is_ok) {
            self.durable = self.durable.max(covered);
        }
        match &errand {
            Errand::LeavingLog(attempt) => return self.leaving_log_done(state, *attempt, is_ok, steps),
            Errand::LeavingFlush(attempt) => return self.leaving_flush_done(state, Some(*attempt), is_ok, steps),
            Errand::LeavingSuperblock => return self.leaving_superblock_written(state, is_ok, steps),
            Errand::LeavingLastFlush => return self.leaving_flush_done(state, None, is_ok, steps),
            Errand::LeavingRest => return self.leaving_rest_done(is_ok, steps),
            Errand::Closed => return self.closed(state, is_ok, steps),
            _ => {}
        }
        let captured = match state {
            State::Held(captured) => Some(&mut **captured),
            State::Idle(_) | State::Failed => None,
        };
        let status = if is_ok { Status::Ok } else { Status::IoError };
        match (errand, captured) {
            (Errand::Through { request, blocks, same, is_held }, Some(captured)) => {
                self.through_done(captured, (request, blocks, is_held), same, is_ok, steps);
            }
            (
                Errand::Through { request, is_held: true, .. }
                | Errand::LateFlush { request, .. }
                | Errand::TailFlush { request, .. },
                None,
            ) => steps.release(request, status),
            (Errand::LateFlush { request, late, mark }, Some(captured)) => {
                self.late_flushed(captured, request, (late, mark), is_ok, steps);
            }
            (Errand::TailFlush { request, passed, mark, before }, Some(captured)) => {
                self.tail_flushed(captured, request, (passed, mark, before), is_ok, steps);
            }
            (Errand::Append, Some(captured)) => self.append_done(captured, is_ok, steps),
            (Errand::EarlyAppend(generation), captured) => {
                self.early_append_done(captured, generation, is_ok, steps);
            }
            (Errand::CommitFlush(mark), Some(captured)) => self.commit_flushed(captured, mark, is_ok, steps),
            (Errand::Checkpoint(versions), Some(captured)) => self.run_done(captured, versions, is_ok, steps),
            (Errand::CheckpointFlush(mark), Some(captured)) => {
                self.checkpoint_flushed(captured, mark, is_ok, steps);
            }
            _ => {}
        }
    }

    /// The guest's flush begins: what it wrote home as the region has it leaves the region when it has ended, and what a checkpoint
    /// wrote. It reaches the disk because something was written there, which the guest may refer to in what it commits next: so the
    /// next mark goes with it though nothing leaves the region.
    fn flush_begins(&mut self, captured: &mut Captured, request: RequestId) {
        self.guest_flushes.insert(request, self.ended);
        let has_written = self.checkpoint.as_ref().is_some_and(Checkpoint::has_written);
        let is_mark_due = self.is_mark_old(captured) && !captured.has_failed;
        if self.settled.is_empty() && !has_written && !is_mark_due {
            return;
        }
        let settled = std::mem::take(&mut self.settled);
        match self.begin_old_mark(captured) {
            Ok(mark) => {
                self.flushing.insert(request, (settled, mark));
            }
            // They stay there.
            Err(error) => log::error!("disk {}: {error}", self.name()),
        }
    }

    /// A flush of the disk has failed, whosever: what was written until now may not be on storage, and no later flush says so.
    /// Whoever waits for one to make that durable has to write it again, or to keep it.
    pub(super) fn flush_failed(&mut self, captured: &mut Captured) {
        self.failed_flushes = self.home.failed_flushes();
        captured.flush_failed(self.durable);
        // Whether those that are under way cover what this one should have is not known.
        self.own_flushes.clear();
        self.guest_flushes.clear();
        // They stay in the region until a checkpoint brings them home again.
        self.settled.clear();
        self.flushing.clear();
        for errand in self.errands.values_mut() {
            if let Errand::Through { same, .. } = errand {
                same.clear();
            }
        }
        match &mut self.commit {
            Some(commit) => commit.flush_failed(),
            None => self.early.forget(),
        }
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.flush_failed();
        }
        self.leaving_flush_failed();
    }

    fn flush_ended(&mut self, captured: &mut Captured, request: RequestId, is_ok: bool) {
        if let Some(covered) = self.guest_flushes.remove(&request).filter(|_| is_ok) {
            self.durable = self.durable.max(covered);
        }
        let Some((settled, mark)) = self.flushing.remove(&request).filter(|_| is_ok) else { return };
        match self.end_mark(captured, mark) {
            Ok(()) => {
                self.release_home(captured, &settled);
                self.release_durable(captured);
            }
            Err(error) => log::error!("disk {}: {error}", self.name()),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct InRegion {
    nvm: Arc<NvmDisk>,
    work: Mutex<Work>,
}

impl InRegion {
    /// The keeper of a log whose disk, with the log and its homes, has regions.
    pub fn new(home: &Arc<Disk>, area: &Arc<JournalArea>, nvm: &Arc<NvmDisk>) -> Self {
        let work = Work::new(Arc::clone(home), Arc::clone(area), Arc::clone(nvm));
        InRegion { nvm: Arc::clone(nvm), work: Mutex::new(work) }
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().expect("no panic under this lock")
    }

    /// The guest is gone: what the region has for the log goes home, unless nothing is in it any more, and the region is given back.
    fn give_region_back(&self, log: &Log) -> io::Result<Option<recovery::Report>> {
        let mut work = self.work();
        work.begin_anew();
        let recovered = self.nvm.recover(work.slot, &log.home.file).map_err(io::Error::other)?;
        work.slot = None;
        Ok(recovered)
    }

    /// Looks at the work and the region that it has, if it has one.
    fn with<T>(&self, look: impl FnOnce(&mut Work, &mut State) -> T) -> T {
        let mut work = self.work();
        match work.slot {
            Some(slot) => {
                let mut state = self.nvm.lock(slot);
                if let State::Held(captured) = &mut *state
                    && work.home.failed_flushes() > work.failed_flushes
                {
                    // One that nobody's request asked for, another file system's on the same disk, say.
                    work.flush_failed(captured);
                }
                let looked = look(&mut work, &mut state);
                if let State::Held(captured) = &mut *state
                    && captured.has_failed
                    && !captured.notes.is_failure_noted
                {
                    captured.notes.note(&Note::Failed);
                    captured.notes.is_failure_noted = true;
                }
                looked
            }
            None => look(&mut work, &mut State::Failed),
        }
    }

    fn is_captured(&self) -> bool {
        self.with(|_, state| matches!(state, State::Held(_)))
    }

    /// Something has ended: everything that waits goes on.
    fn ended(&self, number: u64, is_ok: bool, steps: &mut Steps) {
        self.with(|work, state| {
            let Some(errand) = work.errands.remove(&number) else { return };
            work.errand_done(state, number, errand, is_ok, steps);
            work.drive(state, steps);
            work.ask_again(steps);
        });
    }
}

impl Keeper for InRegion {
    fn watches_home(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn counts_transactions(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        self.with(|work, state| {
            work.refresh(state, log);
            let written = work.superblock_written(state, log, block, steps)?;
            let why = Superblock::decode(block.content).ok().and_then(|superblock| work.watch.tail_moves(&superblock));
            work.distrust(state, log, why, steps);
            Ok(written)
        })
    }

    fn log_write(&self, log: &Log, block: LogBlock<'_>) -> LogVerdict {
        self.with(|work, state| work.log_write(state, log, block))
    }

    fn odd_log_write(&self, log: &Log, kind: RequestKind, slices: &[MemorySlice]) -> OddVerdict {
        self.with(|work, state| {
            let is_over = work.closing.as_ref().is_some_and(|closing| closing.is_on_its_way);
            match (state, kind) {
                (State::Held(_), _) if is_over => OddVerdict::Store,
                (State::Held(_), RequestKind::Discard) => OddVerdict::Ignore,
                (State::Held(_), _) => OddVerdict::Patch,
                _ => {
                    work.note_foreign(log, slices);
                    OddVerdict::Store
                }
            }
        })
    }

    fn patched(&self, log: &Log, position: u32, part: Range<usize>, slices: &[MemorySlice]) -> io::Result<Vec<u8>> {
        let mut content = self.with(|_, state| match state {
            State::Held(captured) => last_written(captured, log, position),
            State::Idle(_) | State::Failed => {
                let mut content = vec![0; log.place.block_bytes as usize];
                log.read_stored(position, &mut content).map(|()| content)
            }
        })?;
        if slices.is_empty() {
            content[part].fill(0);
        } else {
            content[part].copy_from_slice(&segments::gather(slices));
        }
        Ok(content)
    }

    fn doubt(&self, log: &Log, why: String, steps: &mut Steps) {
        self.with(|work, state| work.distrust(state, log, Some(why), steps));
    }

    fn doubt_at_the_end(&self, log: &Log, why: String) {
        distrust::say(&self.work().area, log, &why);
    }

    fn is_written_past(&self, log: &Log) -> io::Result<bool> {
        Ok(!log.is_distrusted() && self.with(|_, state| matches!(state, State::Held(held) if held.is_written_past())))
    }

    fn puts_in_place(&self, log: &Log) -> io::Result<bool> {
        log.take_mark();
        self.with(|work, state| work.leave_in_place(state))?;
        self.give_region_back(log)?;
        Ok(true)
    }

    fn settle_pass(&self, log: &Log, steps: &mut Steps) {
        self.with(|work, state| {
            work.refresh(state, log);
            let why = work.watch.settle(&log.place);
            work.distrust(state, log, why, steps);
            work.advance(state, steps);
            if work.closing.is_some() {
                // It may have begun with a block of this pass.
                work.drive(state, steps);
            }
        });
    }

    fn end_of_pass(&self, log: &Log, steps: &mut Steps) {
        self.settle_pass(log, steps);
        self.with(|work, state| {
            work.look_ahead(state, steps);
            work.drive_space(state, steps);
            work.renew_notes(state);
            work.ask_again(steps);
        });
    }

    fn shows_log(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn log_read(&self, _log: &Log, position: u32, buffer: &mut [u8]) -> io::Result<LogRead> {
        self.with(|work, state| work.log_read(state, position, buffer))
    }

    fn shows_homes(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn home_read(&self, _log: &Log, range: Range<u64>, answer: &mut dyn FnMut(Range<u64>, &[u8])) -> HomeRead {
        self.with(|work, state| match state {
            State::Held(captured) => work.home_read(captured, range, answer),
            State::Idle(_) | State::Failed => HomeRead::Stored(vec![range]),
        })
    }

    fn home_begins(&self, log: &Log, change: &HomeChange<'_>, steps: &mut Steps) -> io::Result<HomeVerdict> {
        self.with(|work, state| {
            work.refresh(state, log);
            match state {
                State::Held(captured) => {
                    work.watch.home_asked(change);
                    let verdict = work.home_write(captured, change, steps);
                    work.watch.home_answered(change, matches!(verdict, Ok(HomeVerdict::Wait)));
                    verdict
                }
                State::Idle(_) | State::Failed => {
                    let part = HomePart { range: change.range.clone(), content: None, operation: usize::MAX };
                    Ok(HomeVerdict::Parts(vec![part]))
                }
            }
        })
    }

    fn home_ended(&self, _log: &Log, operation: usize, is_ok: bool, steps: &mut Steps) -> bool {
        self.ended(operation as u64, is_ok, steps);
        false
    }

    fn flush_begins(&self, _log: &Log, request: RequestId) {
        self.with(|work, state| {
            if let State::Held(captured) = state {
                work.flush_begins(captured, request);
            }
        });
    }

    fn flush_ended(&self, _log: &Log, request: RequestId, is_ok: bool, steps: &mut Steps) {
        self.with(|work, state| {
            if let State::Held(captured) = state {
                work.flush_ended(captured, request, is_ok);
                work.drive(state, steps);
                work.ask_again(steps);
            }
        });
    }

    fn flush_failed(&self, _log: &Log) {
        self.with(|work, state| {
            if let State::Held(captured) = state {
                work.flush_failed(captured);
            }
        });
    }

    fn done(&self, log: &Log, task: Task, error: Option<&io::Error>, steps: &mut Steps) {
        if let Task::Own(number) = task {
            if self.work().errands.get(&number).is_some_and(Errand::is_own_in_log) {
                log.state.own_writes.fetch_sub(1, Ordering::AcqRel);
            }
            self.ended(number, error.is_none(), steps);
        }
    }

    fn woken(&self, _log: &Log, side: Side, steps: &mut Steps) {
        if side == Side::Home {
            self.with(|work, state| {
                work.checkpoint_failed = false;
                work.drive(state, steps);
                work.ask_again(steps);
            });
        }
    }

    fn due_in(&self, _log: &Log) -> Option<Duration> {
        let work = self.work();
        work.slot?;
        match &work.checkpoint {
            // One that goes on is followed by the next when it has ended.
            Some(checkpoint) => checkpoint.flush_due_in(self.nvm.options.checkpoint_patience),
            None => {
                let next = self.nvm.options.checkpoint_interval.saturating_sub(work.checkpointed.elapsed());
                Some(work.next_try_in().map_or(next, |again| again.min(next)))
            }
        }
    }

    fn has_own_in_flight(&self) -> bool {
        self.with(|work, _| work.in_flight.has_any_of(Writer::Host))
    }

    fn end_soon(&self, _log: &Log) {
        self.with(|work, _| {
            if let Some(checkpoint) = &mut work.checkpoint {
                checkpoint.end_soon();
            }
        });
    }

    fn leave_for_storage(&self, _log: &Log, steps: &mut Steps) -> io::Result<keeper::Leaving> {
        self.with(|work, state| work.leave(state, steps))
    }

    fn stay(&self, _log: &Log, steps: &mut Steps) {
        self.with(|work, state| {
            work.stay(state, steps);
            work.ask_again(steps);
        });
    }

    fn take_up(&self, log: &Log, raw: &[u8; SUPERBLOCK_BYTES]) -> io::Result<(TakenUp, Option<ToSettle>)> {
        self.work().take_up(log, raw)
    }

    fn blocks_owed(&self, _log: &Log) -> Option<u64> {
        self.with(|_, state| match state {
            State::Held(captured) => Some(captured.journal.len() as u64),
            State::Idle(_) | State::Failed => None,
        })
    }

    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
        if log.is_distrusted() {
            self.with(|work, state| work.leave_to_guest(state))?;
        }
        let Some(report) = self.give_region_back(log)? else { return finish_on_storage(log, is_vm_gone) };
        log.set_closed();
        let mut reports = vec![report];
        if is_vm_gone && matches!(stored::of(log)?.says, Says::Live(_) | Says::LeftToGuest(_)) {
            // It was about to leave the region, which owed nothing any more.
            reports.push(leave(log)?);
        }
        Ok(Finished::Recovered(reports))
    }

    fn forget(&self, log: &Log, steps: &mut Steps) -> bool {
        self.with(|work, state| {
            if work.in_flight.has_any_of(Writer::Host) || log.has_own_writes() {
                return false;
            }
            work.file_system_is_gone(state, steps);
            true
        })
    }
}
