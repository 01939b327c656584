//! What the machines of this directory share: what is on its way, and for what; which requests wait; and what each of them knows. They are
//! driven in [`super::drive`].
//!
//! Everything comes from the thread of the disk, which has the log and its homes, but for what a scan or a report asks.

use super::captured::Captured;
use super::checkpoint_state::Checkpoints;
use super::closing::Closing;
use super::commit_state::Commit;
use super::cost::AppendCost;
use super::coverage::{Coverage, Flush};
use super::early_state::Early;
use super::errand::Errand;
use super::inflight::InFlight;
use super::leaving_state::Departure;
use super::report::NvmCounters;
use super::versions::Written;
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
    /// Why it has had none since it was opened last.
    pub(super) why_none: Option<String>,
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
            why_none: None,
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
                *state = medium.map_or(State::Failed, State::Idle);
                notes.remove();
            }
            Err(error) => {
                *state = State::Failed;
                log::error!("disk {}: giving the NVM region back failed: {error}", self.name());
            }
        }
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
}
