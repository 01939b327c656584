//! What the machines of this directory share: what is on its way, and for what; which requests wait. They are one after the other in
//! [`Work::drive`], and hear of ends in [`Work::errand_done`].
//!
//! Everything comes from the thread of the disk, which has the log and its homes, but for what a scan or a report asks.

use super::captured::{Captured, Written};
use super::checkpoint::Checkpoints;
use super::commit::Commit;
use super::cost::AppendCost;
use super::coverage::{Coverage, Flush};
use super::early::Early;
use super::errand::Errand;
use super::foreign::give_up_mark;
use super::inflight::InFlight;
use super::leaving::Departure;
use super::report::NvmCounters;
use super::superblock::Closing;
use super::{NvmDisk, State};
use crate::disk::{Disk, DiskCounters};
use crate::keeper::{Side, Step, Steps, Task};
use crate::log::Log;
use crate::watch::Watch;
use block_route::{Buffer, RequestId, Status};
use journal_area::JournalArea;
use std::collections::HashMap;
use std::sync::Arc;

/// What is known of a log beside its content.
#[derive(Debug)]
pub(super) struct Work {
    /// The disk with the log and its homes.
    pub(super) home: Arc<Disk>,
    pub(super) area: Arc<JournalArea>,
    pub(super) nvm: Arc<NvmDisk>,
    /// Which of the disk's regions it has.
    pub(super) slot: Option<usize>,
    pub(super) errands: HashMap<u64, Errand>,
    pub(super) next_errand: u64,
    pub(super) in_flight: InFlight,
    pub(super) commit: Option<Commit>,
    pub(super) early: Early,
    pub(super) cost: AppendCost,
    pub(super) checkpoints: Checkpoints,
    pub(super) closing: Option<Closing>,
    pub(super) departure: Departure,
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
    pub(super) flushing: HashMap<RequestId, (Vec<Written>, u64)>,
    /// Somebody was told to wait until [`Step::Retry`].
    pub(super) is_waited_for: bool,
    /// Which writes to homes are durable.
    pub(super) coverage: Coverage,
    /// How many flushes of the disk have failed, as far as what is here knows of it.
    pub(super) failed_flushes: u64,
}

impl Work {
    pub(super) fn new(home: Arc<Disk>, area: Arc<JournalArea>, nvm: Arc<NvmDisk>) -> Self {
        Work {
            home,
            area,
            checkpoints: Checkpoints::new(nvm.checkpoints_asked()),
            nvm,
            slot: None,
            errands: HashMap::new(),
            next_errand: 0,
            in_flight: InFlight::default(),
            commit: None,
            early: Early::default(),
            cost: AppendCost::default(),
            closing: None,
            departure: Departure::default(),
            watch: Watch::default(),
            is_distrusted: false,
            emptying: None,
            pass_requests: Vec::new(),
            held: Vec::new(),
            settled: Vec::new(),
            flushing: HashMap::new(),
            is_waited_for: false,
            coverage: Coverage::default(),
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
        self.coverage.begins(Flush::Ours(number));
        steps.push(Side::Home, Step::Flush { task: Task::Own(number) });
    }

    /// Whether a superblock of the guest's waits for a flush, with what its tail has passed.
    pub(super) fn is_tail_on_its_way(&self) -> bool {
        self.errands.values().any(|errand| matches!(errand, Errand::TailFlush { .. }))
    }

    /// Takes note of what a scan has found.
    pub(super) fn refresh(&self, state: &mut State, log: &Log) {
        let State::Held(captured) = state else { return };
        let (known, now) = (&captured.log.place, &log.place);
        if (known.home_blocks, known.file_system_uuid) != (now.home_blocks, now.file_system_uuid) {
            captured.log = Arc::new(log.clone());
        }
    }

    /// Writes what the next worker has to know anew, where that has become long; not in the midst of what is not noted yet.
    pub(super) fn renew_notes(&self, captured: &mut Captured) {
        let is_between = self.commit.is_some()
            || self.closing.is_some()
            || self.departure.phase.is_some()
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
    pub(super) fn file_system_is_gone(&mut self, state: &mut State, steps: &mut Steps) {
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
    pub(super) fn begin_anew(&mut self) {
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
        self.departure.failure = None;
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
    pub(super) fn forget_work(&mut self, steps: &mut Steps) {
        self.commit = None;
        self.early.forget();
        self.checkpoints.forget();
        self.departure.phase = None;
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

    pub(super) fn errand_done(
        &mut self,
        state: &mut State,
        number: u64,
        errand: Errand,
        is_ok: bool,
        steps: &mut Steps,
    ) {
        if errand.wrote() {
            self.in_flight.end(number);
            // A guest's flush asks for what the guest has written. Ours are flushed by whoever needs them on the disk.
            if !matches!(errand, Errand::Append | Errand::EarlyAppend(_) | Errand::Checkpoint(_)) {
                self.home.set_dirty();
            }
        }
        self.coverage.ends(Flush::Ours(number), is_ok);
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
}
