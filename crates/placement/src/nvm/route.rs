//! The route of a disk whose journal lives on NVM: requests cut into pieces, completions handed to whom they belong.

use super::captured::Written;
use super::checkpoint::Checkpoint;
use super::commit::Commit;
use super::early::Early;
use super::foreign::{Foreign, give_up_mark};
use super::inflight::InFlight;
use super::leaving::{Leaving, Left};
use super::superblock::Closing;
use super::{NvmDisk, State};
use crate::disk::{DiskCounters, PlacementKind};
use crate::journals::{Journals, TraceKind};
use crate::layout::{DiskLayout, LogRange, Piece};
use crate::log::Log;
use block_route::segments;
use block_route::{
    Buffer, DiskOperation, LogIndex, Operation, Plan, Request, RequestId, RequestKind, Route, Start, Status, Ticket,
};
use guest_memory::{MemorySlice, MemoryTable};
use jbd2::SuperblockEdit;
use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// How often the timer looks whether its disk is still there.
const TIMER_STEP: Duration = Duration::from_secs(1);

/// What an operation with a ticket was for.
#[derive(Clone, Debug)]
pub(super) enum Errand {
    /// A write that no open log covers, and whether it may have changed the layout.
    Plain { rescan: bool },
    /// The guest's write to homes.
    Through {
        request: RequestId,
        blocks: Range<u64>,
        /// Blocks that it made what their latest version is.
        same: Vec<Written>,
        rescan: bool,
        /// It holds its request beside the operation.
        is_held: bool,
    },
    /// The flush of such a write, whose blocks the guest's log has left; covers so many writes.
    LateFlush { request: RequestId, late: Vec<u64>, covered: u64 },
    /// An append of the transaction that is being committed.
    Append,
    /// An append of a transaction that was not complete, and of which generation.
    EarlyAppend(u64),
    /// The flush of its appends.
    CommitFlush(u64),
    /// A run of a checkpoint.
    Checkpoint(Vec<Written>),
    /// Its flush.
    CheckpointFlush(u64),
    /// The guest's flush, and the blocks that are durable at home after it.
    Flush { covered: u64, settled: Vec<Written> },
    /// The superblock of a log that is closed.
    Closed { rescan: bool },
    /// Log blocks of a log that leaves for storage, …
    LeavingLog,
    /// … their flush, …
    LeavingFlush(u64),
    /// … the superblock that says where the log is, …
    LeavingSuperblock,
    /// … its flush, …
    LeavingLastFlush(u64),
    /// … and log blocks that came meanwhile.
    LeavingRest,
}

/// A piece of a request that has to wait; its request is held.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub request: RequestId,
    pub kind: RequestKind,
    pub piece: Piece,
    pub slices: Vec<MemorySlice>,
    /// It may change the layout.
    pub rescan: bool,
}

/// The route of one disk with placement `nvm`.
#[derive(Debug)]
pub struct NvmRoute {
    pub(super) journals: Arc<Journals>,
    pub(super) disk: usize,
    pub(super) nvm: Arc<NvmDisk>,
    layout: Arc<DiskLayout>,
    layout_version: u64,
    pub(super) memory: Option<Arc<MemoryTable>>,
    errands: HashMap<u64, Errand>,
    next_ticket: u64,
    pub(super) in_flight: InFlight,
    /// What waits for a write of ours, a commit, or room.
    pub(super) behind: Vec<Waiting>,
    pub(super) commit: Option<Commit>,
    pub(super) early: Early,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) checkpoint_failed: bool,
    /// What a checkpoint took out of the region is not collected yet.
    pub(super) collection_due: bool,
    /// After which transaction long runs were looked for last.
    pub(super) runs_looked_for: Option<u32>,
    pub(super) closing: Option<Closing>,
    /// Logs into which something was written while they were closed, which no kernel does.
    pub(super) written_closed: HashSet<LogIndex>,
    pub(super) leaving: Option<Leaving>,
    /// What the leaving log has written of itself.
    pub(super) left: Left,
    /// Why the last log that was to leave has not; told to who asks next.
    pub(super) leaving_failed: Option<String>,
    /// Somebody waits until what was committed up to this transaction is home.
    pub(super) emptying: Option<u32>,
    /// Requests of this pass that wrote into the log.
    pub(super) pass_requests: Vec<RequestId>,
    /// Requests that wait until no commit is under way.
    pub(super) held: Vec<RequestId>,
    /// Blocks that the guest has written home as they are in the region: they leave it at the next flush.
    pub(super) settled: Vec<Written>,
}

impl NvmRoute {
    /// The route of the disk with this index.
    ///
    /// # Panics
    /// When the disk has no region.
    pub fn new(journals: Arc<Journals>, disk: usize) -> Self {
        let nvm = journals.disk(disk).options.nvm.clone().expect("a disk with placement nvm has a region");
        NvmRoute {
            layout: journals.disk(disk).layout(),
            layout_version: journals.disk(disk).layout_version(),
            journals,
            disk,
            nvm,
            memory: None,
            errands: HashMap::new(),
            next_ticket: 0,
            in_flight: InFlight::default(),
            behind: Vec::new(),
            commit: None,
            early: Early::default(),
            checkpoint: None,
            checkpoint_failed: false,
            collection_due: false,
            runs_looked_for: None,
            closing: None,
            written_closed: HashSet::new(),
            leaving: None,
            left: Left::default(),
            leaving_failed: None,
            emptying: None,
            pass_requests: Vec::new(),
            held: Vec::new(),
            settled: Vec::new(),
        }
    }

    /// Has everything go home at the options' interval, for as long as the disk is there.
    ///
    /// # Errors
    /// When there can be no thread for it.
    pub fn start_timer(&self) -> io::Result<()> {
        let journals = Arc::downgrade(&self.journals);
        let (disk, interval) = (self.disk, self.nvm.options.checkpoint_interval);
        log_context::spawn(std::thread::Builder::new().name("nvm timer".to_owned()), move || {
            let mut waited = Duration::ZERO;
            loop {
                let step = TIMER_STEP.min(interval - waited.min(interval)).max(Duration::from_millis(10));
                std::thread::sleep(step);
                waited += step;
                let Some(journals) = journals.upgrade() else { return };
                if waited >= interval {
                    waited = Duration::ZERO;
                    let disk = journals.disk(disk);
                    disk.options.nvm.as_ref().inspect(|nvm| nvm.request_checkpoint());
                    disk.wake.wake();
                }
            }
        })?;
        Ok(())
    }

    pub(super) fn counters(&self) -> &DiskCounters {
        &self.journals.disk(self.disk).counters
    }

    pub(super) fn name(&self) -> &str {
        &self.journals.disk(self.disk).options.name
    }

    pub(super) fn ticket(&mut self, errand: Errand) -> Ticket {
        let number = self.next_ticket;
        self.next_ticket += 1;
        self.errands.insert(number, errand);
        Ticket(number)
    }

    fn trace(&self, kind: RequestKind, written: TraceKind, range: &Range<u64>) {
        let kind = match kind {
            RequestKind::Read => TraceKind::Read,
            RequestKind::Write | RequestKind::WriteZeroes { .. } => written,
            RequestKind::Flush => TraceKind::Flush,
            RequestKind::Discard => TraceKind::Discard,
        };
        self.journals.trace(self.disk, kind, range.start, range.end - range.start);
    }

    /// Takes note of what a scan has found, by whichever disk's route.
    fn refresh_layout(&mut self, state: &mut State, plan: &mut Plan) {
        let disk = self.journals.disk(self.disk);
        if disk.layout_version() == self.layout_version {
            return;
        }
        self.layout = disk.layout();
        self.layout_version = disk.layout_version();
        let State::Held(captured) = state else { return };
        match self.journals.log(captured.log.index) {
            Some(log) => captured.log = log,
            None => self.file_system_is_gone(state, plan),
        }
    }

    /// The file system was replaced while its log was open: what it had committed must never land on the new one.
    fn file_system_is_gone(&mut self, state: &mut State, plan: &mut Plan) {
        let State::Held(captured) = std::mem::replace(state, State::Failed) else { return };
        log::warn!(
            "disk {}: the file system at byte {} was replaced while {} blocks of it were on NVM only",
            self.name(),
            captured.log.place.home_start,
            captured.journal.len()
        );
        if let Err(error) = self
            .put_in_place(&captured)
            .and_then(|()| give_up_mark(&captured))
            .and_then(|()| self.bring_seen_home(&captured))
        {
            log::error!(
                "disk {}: writing where the file system was failed: {error}; what the guest wrote there is lost",
                self.name()
            );
        }
        self.nvm.counters.add_journal(&captured.journal.counters());
        match captured.journal.give_back() {
            Ok(medium) => *state = State::Idle(medium),
            Err(error) => log::error!("disk {}: giving the NVM region back failed: {error}", self.name()),
        }
        self.forget_work(plan);
    }

    /// Another guest begins; no request and no write of ours is under way.
    fn forget_earlier_start(&mut self) {
        self.commit = None;
        self.early.begin_anew();
        self.checkpoint = None;
        self.closing = None;
        self.leaving = None;
        self.leaving_failed = None;
        self.emptying = None;
        self.in_flight = InFlight::default();
        self.errands.clear();
        self.behind.clear();
        self.held.clear();
        self.pass_requests.clear();
        self.settled.clear();
    }

    /// Nothing that is under way counts any more; who waits for it is told that it failed.
    fn forget_work(&mut self, plan: &mut Plan) {
        self.commit = None;
        self.early.forget();
        self.checkpoint = None;
        self.leaving = None;
        self.emptying = None;
        let closing = self.closing.take().filter(|closing| !closing.is_on_its_way);
        for request in self.held.drain(..).chain(closing.map(|closing| closing.waiting.request)) {
            plan.release(request, Status::IoError);
        }
    }

    /// Whether what the range writes changes the layout.
    fn changes_layout(&self, request: &Request<'_>) -> bool {
        let (start, end) = (request.offset, request.offset + request.len);
        self.layout.watches.iter().any(|watch| {
            let range = watch.range();
            if range.start >= end || start >= range.end {
                return false;
            }
            if range.start < start || range.end > end || request.segments.is_empty() {
                return true;
            }
            let slices = segments::part(request.segments, range.start - request.offset, watch.len as u64);
            watch.is_changed_by(&segments::gather(&slices))
        })
    }

    /// The log that is, or would be, on NVM, or has left it.
    fn log_of(&self, range: &LogRange) -> Option<Arc<Log>> {
        self.journals.log(range.log).filter(|log| log.placement == PlacementKind::Nvm || self.is_stored(log))
    }

    pub(super) fn is_captured(state: &State, log: LogIndex) -> bool {
        matches!(state, State::Held(captured) if captured.log.index == log)
    }

    fn route_write(&mut self, state: &mut State, request: &Request<'_>, plan: &mut Plan) {
        let rescan = self.changes_layout(request);
        let mut pieces = Vec::new();
        self.layout.cut(request.offset, request.offset + request.len, &mut pieces);
        for piece in pieces {
            let range = piece.range();
            let slices = if request.segments.is_empty() {
                Vec::new()
            } else {
                segments::part(request.segments, range.start - request.offset, range.end - range.start)
            };
            let is_log = matches!(piece, Piece::Log(..));
            self.trace(request.kind, if is_log { TraceKind::Journal } else { TraceKind::Home }, &range);
            let waiting = Waiting { request: request.id, kind: request.kind, piece, slices, rescan };
            match piece {
                Piece::Log(log_range, ..) => match self.log_of(&log_range) {
                    Some(log) => self.log_write(state, &log, &log_range, waiting, plan),
                    None => self.pass_on(&waiting, plan),
                },
                Piece::Home(home, ..) if Self::is_captured(state, home.log) => {
                    self.home_write(state, &home, waiting, plan);
                }
                Piece::Home(..) | Piece::Plain(..) => self.pass_on(&waiting, plan),
            }
        }
    }

    /// A write into a log's own place.
    fn log_write(&mut self, state: &mut State, log: &Arc<Log>, range: &LogRange, waiting: Waiting, plan: &mut Plan) {
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let aligned = (start - range.start).is_multiple_of(block_bytes) && (end - start).is_multiple_of(block_bytes);
        if waiting.kind != RequestKind::Write || !aligned {
            match (Self::is_captured(state, log.index), waiting.kind) {
                (false, _) => {
                    self.note_foreign(log, &waiting.slices);
                    self.pass_on(&waiting, plan);
                }
                // Advice that cannot be followed is ignored.
                (true, RequestKind::Discard) => {}
                (true, _) => self.odd_log_write(state, log, range, &waiting, plan),
            }
            return;
        }
        DiskCounters::add(&self.counters().journal_bytes_received, end - start);
        let mut at = start;
        while at < end {
            let position = range.first_position + ((at - range.start) / block_bytes) as u32;
            // The superblock by itself, all that follows together.
            let stop = if position == 0 { at + block_bytes } else { end };
            let part = Waiting {
                piece: Piece::Log(*range, at, stop),
                slices: segments::part(&waiting.slices, at - start, stop - at),
                ..waiting
            };
            at = stop;
            if position == 0 {
                let block = segments::gather(&part.slices);
                self.superblock_write(state, log, part, block, plan);
            } else if Self::is_captured(state, log.index) {
                let blocks = (stop - part.piece.range().start) / block_bytes;
                let content = |index| segments::gather(&segments::part(&part.slices, index * block_bytes, block_bytes));
                let contents = (0..blocks).map(content).collect();
                self.stage(state, position, contents, &part, plan);
            } else {
                self.note_foreign(log, &part.slices);
                self.count_commits(&part.slices, range.block_bytes);
                self.pass_on(&part, plan);
            }
        }
    }

    /// Copies log blocks until their transaction is complete.
    pub(super) fn stage(
        &mut self,
        state: &mut State,
        first: u32,
        contents: Vec<Vec<u8>>,
        part: &Waiting,
        plan: &mut Plan,
    ) {
        let State::Held(captured) = state else { return };
        if self.closing.as_ref().is_some_and(|closing| closing.is_on_its_way) {
            // Its place is a part of the disk again.
            return self.pass_on(part, plan);
        }
        captured.shown = None;
        captured.is_read = false;
        let over = (first..).zip(&contents).find(|(position, _)| captured.stream.is_live(*position));
        let over = over.map(|(position, _)| position).filter(|_| self.closing.is_none());
        for (position, block) in (first..).zip(contents) {
            if captured.has_failed || captured.stream.write(position, Arc::from(block)).is_err() {
                if !captured.has_failed {
                    log::error!("disk {}: a transaction is larger than the NVM region; make it larger", self.name());
                }
                plan.fail(part.request);
                return;
            }
        }
        match over {
            Some(position) => self.written_over(state, part.clone(), Foreign::Live(position), plan),
            None => self.pass_requests.push(part.request),
        }
    }

    /// Counts commit blocks of a log that goes to storage.
    fn count_commits(&self, slices: &[MemorySlice], block_bytes: u32) {
        let is_commit = |block: &&MemorySlice| {
            let mut head = [0; jbd2::HEADER_BYTES];
            block.copy_out(0, &mut head);
            jbd2::peek(&head).is_some_and(|header| header.kind == jbd2::Kind::Commit)
        };
        let commits = segments::blocks(slices, 0, block_bytes).iter().flatten().filter(is_commit).count();
        DiskCounters::add(&self.counters().commit_blocks, commits as u64);
    }

    /// Passes a piece on to storage as it is.
    pub(super) fn pass_on(&mut self, waiting: &Waiting, plan: &mut Plan) {
        let operation = match waiting.kind {
            RequestKind::Discard => Operation::Discard,
            RequestKind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
            _ => Operation::Write,
        };
        self.write_through(waiting, operation, Errand::Plain { rescan: waiting.rescan }, plan);
    }

    /// Writes a piece to its place, on `errand`.
    pub(super) fn write_through(&mut self, waiting: &Waiting, operation: Operation, errand: Errand, plan: &mut Plan) {
        let range = waiting.piece.range();
        let len = range.end - range.start;
        if operation == Operation::Write {
            let counters = self.counters();
            let counter = match waiting.piece {
                Piece::Log(..) => &counters.journal_bytes_to_storage,
                _ => &counters.home_bytes_to_storage,
            };
            DiskCounters::add(counter, len);
        }
        let ticket = self.ticket(errand);
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: Some(ticket),
            operation,
            offset: range.start,
            len,
            buffers: waiting.slices.iter().copied().map(Buffer::Slice).collect(),
        });
    }

    /// Flushes the disk, on `errand`.
    pub(super) fn flush_for(&mut self, errand: Errand, request: Option<RequestId>, plan: &mut Plan) {
        DiskCounters::add(&self.counters().flushes_to_storage, 1);
        let ticket = self.ticket(errand);
        plan.disk(DiskOperation {
            request,
            ticket: Some(ticket),
            operation: Operation::Flush,
            offset: 0,
            len: 0,
            buffers: Vec::new(),
        });
    }

    fn route_read(&mut self, state: &mut State, request: &Request<'_>, plan: &mut Plan) {
        DiskCounters::add(&self.counters().read_bytes, request.len);
        self.trace(request.kind, TraceKind::Read, &(request.offset..request.offset + request.len));
        if !matches!(state, State::Held(_)) {
            plan.disk(block_route::whole(request));
            return;
        }
        let mut pieces = Vec::new();
        self.layout.cut(request.offset, request.offset + request.len, &mut pieces);
        for piece in pieces {
            let range = piece.range();
            let slices = segments::part(request.segments, range.start - request.offset, range.end - range.start);
            let waiting = Waiting { request: request.id, kind: request.kind, piece, slices, rescan: false };
            self.read_piece(state, waiting, plan);
        }
    }

    fn read_piece(&mut self, state: &mut State, waiting: Waiting, plan: &mut Plan) {
        match waiting.piece {
            Piece::Home(home, ..) if Self::is_captured(state, home.log) => self.home_read(state, &home, waiting, plan),
            Piece::Log(range, ..) if Self::is_captured(state, range.log) => {
                self.log_read(state, &range, waiting, plan);
            }
            _ => self.storage_read(&waiting, waiting.piece.range(), plan),
        }
    }

    /// A read inside an open log: whoever mounts replays what it finds there ([`Captured::show`]).
    fn log_read(&mut self, state: &mut State, range: &LogRange, waiting: Waiting, plan: &mut Plan) {
        let State::Held(captured) = state else { return };
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        if range.first_position == 0 && start < range.start + block_bytes && self.commit.is_some() {
            plan.hold(waiting.request);
            self.behind.push(waiting);
            return;
        }
        let mut at = start;
        while at < end {
            let index = (at - range.start) / block_bytes;
            let begin = range.start + index * block_bytes;
            let part = at..end.min(begin + block_bytes);
            let position = range.first_position + index as u32;
            at = part.end;
            let bytes = (part.start - begin) as usize..(part.end - begin) as usize;
            let block = if position == 0 {
                captured.show().map_err(io::Error::other).map(|()| {
                    let mut block = vec![0; block_bytes as usize];
                    block[..captured.owner.attachment.len()].copy_from_slice(&captured.owner.attachment);
                    let tail = captured.shown_tail();
                    if let Ok(mut edit) = SuperblockEdit::new(&mut block) {
                        edit.start(tail.position).sequence(tail.sequence).seal();
                    }
                    block
                })
            } else {
                captured.shown_block(self.journals.disk(self.disk).file.for_reading(), position)
            };
            match block {
                Ok(block) => self.answer(&waiting, &part, &block[bytes], plan),
                Err(error) => {
                    log::error!("disk {}: reading log block {position} failed: {error}", self.name());
                    plan.fail(waiting.request);
                    return;
                }
            }
        }
    }

    fn route_flush(&mut self, request: &Request<'_>, plan: &mut Plan) {
        DiskCounters::add(&self.counters().flushes, 1);
        self.trace(request.kind, TraceKind::Flush, &(0..0));
        let disk = self.journals.disk(self.disk);
        let to_flush = disk.to_flush();
        if to_flush.is_some() || disk.options.honour_flush {
            let settled = std::mem::take(&mut self.settled);
            let errand = Errand::Flush { covered: to_flush.unwrap_or(0), settled };
            self.flush_for(errand, Some(request.id), plan);
        }
    }

    /// Takes everything that waits one step on.
    pub(super) fn drive(&mut self, state: &mut State, plan: &mut Plan) {
        if let State::Held(captured) = state {
            self.begin_commit(captured, plan);
            self.drive_checkpoint(captured, plan);
        }
        // First: if it does not leave after all, what waited for it goes on.
        self.drive_leaving(state, plan);
        self.advance(state, plan);
        self.drive_space(state, plan);
        self.drive_closing(state, plan);
        for waiting in std::mem::take(&mut self.behind) {
            let request = waiting.request;
            // It takes holds of its own, so the one it waited with can go after.
            match (waiting.kind, waiting.piece) {
                (RequestKind::Read, _) => self.read_piece(state, waiting, plan),
                (_, Piece::Home(home, ..)) => self.home_write(state, &home, waiting, plan),
                _ => self.pass_on(&waiting, plan),
            }
            plan.release(request, Status::Ok);
        }
    }

    fn scan(&mut self) {
        if let Err(error) = self.journals.scan(self.disk) {
            log::error!("looking for journals on disk {} failed: {error}", self.name());
        }
    }

    fn errand_done(&mut self, state: &mut State, ticket: Ticket, errand: Errand, is_ok: bool, plan: &mut Plan) {
        let disk = Arc::clone(&self.journals);
        let disk = disk.disk(self.disk);
        let wrote = !matches!(
            errand,
            Errand::LateFlush { .. }
                | Errand::CommitFlush(_)
                | Errand::CheckpointFlush(_)
                | Errand::LeavingFlush(_)
                | Errand::LeavingLastFlush(_)
                | Errand::Flush { .. }
        );
        if wrote {
            self.in_flight.end(ticket.0);
        }
        // A guest's flush asks for what the guest has written. Ours are flushed by whoever needs them on the disk.
        let is_ours = matches!(errand, Errand::Append | Errand::EarlyAppend(_) | Errand::Checkpoint(_));
        if wrote && !is_ours {
            disk.set_dirty();
        }
        if let Errand::LeavingFlush(covered) | Errand::LeavingLastFlush(covered) = &errand
            && is_ok
        {
            disk.set_flushed(*covered);
        }
        match &errand {
            Errand::LeavingLog => return self.leaving_log_done(state, is_ok, plan),
            Errand::LeavingFlush(_) => return self.leaving_flush_done(state, false, is_ok, plan),
            Errand::LeavingSuperblock => return self.leaving_superblock_written(state, is_ok, plan),
            Errand::LeavingLastFlush(_) => return self.leaving_flush_done(state, true, is_ok, plan),
            Errand::LeavingRest => return self.leaving_rest_done(is_ok, plan),
            _ => {}
        }
        let captured = match state {
            State::Held(captured) => Some(captured),
            State::Idle(_) | State::Failed => None,
        };
        match (errand, captured) {
            (Errand::Closed { .. }, _) => self.closed(state, is_ok),
            (Errand::Through { request, blocks, same, is_held, .. }, Some(captured)) => {
                self.through_done(captured, (request, blocks, is_held), same, is_ok, plan);
            }
            (Errand::Through { request, is_held: true, .. } | Errand::LateFlush { request, .. }, None) => {
                plan.release(request, if is_ok { Status::Ok } else { Status::IoError });
            }
            (Errand::LateFlush { request, late, covered }, Some(captured)) => {
                if is_ok {
                    disk.set_flushed(covered);
                }
                self.late_flushed(captured, request, late, is_ok, plan);
            }
            (Errand::Append, Some(captured)) => self.append_done(captured, is_ok, plan),
            (Errand::EarlyAppend(generation), captured) => {
                self.early_append_done(captured.map(|captured| &mut **captured), generation, is_ok, plan);
            }
            (Errand::CommitFlush(covered), captured) => {
                if is_ok {
                    disk.set_flushed(covered);
                }
                if let Some(captured) = captured {
                    self.commit_flushed(captured, is_ok);
                }
            }
            (Errand::Checkpoint(versions), Some(captured)) => self.run_done(captured, versions, is_ok, plan),
            (Errand::CheckpointFlush(covered), captured) => {
                if is_ok {
                    disk.set_flushed(covered);
                }
                if let Some(captured) = captured {
                    self.checkpoint_flushed(captured, is_ok, plan);
                }
            }
            (Errand::Flush { covered, settled }, captured) => {
                if is_ok {
                    disk.set_flushed(covered);
                    if let Some(captured) = captured.filter(|_| !settled.is_empty()) {
                        match self.renew_old_mark(captured) {
                            Ok(()) => self.release_home(captured, &settled),
                            // They stay there.
                            Err(error) => log::error!("disk {}: {error}", self.name()),
                        }
                    }
                }
            }
            (Errand::Plain { .. } | Errand::Through { .. } | Errand::Append | Errand::Checkpoint(_), _) => {}
            // See above.
            (
                Errand::LeavingLog
                | Errand::LeavingFlush(_)
                | Errand::LeavingSuperblock
                | Errand::LeavingLastFlush(_)
                | Errand::LeavingRest,
                _,
            ) => {}
        }
    }
}

impl Route for NvmRoute {
    fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> io::Result<()> {
        self.memory = Some(Arc::clone(memory));
        self.checkpoint_failed = false;
        match start {
            Start::Fresh => {
                // Whoever wrote these logs is gone: what was committed goes home before the next reader comes.
                self.forget_earlier_start();
                self.journals.recover_disk(self.disk)?;
                self.journals.scan(self.disk)?;
                self.journals.disk(self.disk).set_started();
            }
            Start::Resumed => self.journals.check_resumed(self.disk)?,
        }
        let nvm = Arc::clone(&self.nvm);
        self.refresh_layout(&mut nvm.lock(), &mut Plan::default());
        Ok(())
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        let nvm = Arc::clone(&self.nvm);
        let mut state = nvm.lock();
        self.refresh_layout(&mut state, plan);
        match request.kind {
            RequestKind::Read => self.route_read(&mut state, request, plan),
            RequestKind::Flush => self.route_flush(request, plan),
            RequestKind::Write | RequestKind::Discard | RequestKind::WriteZeroes { .. } => {
                self.route_write(&mut state, request, plan);
            }
        }
    }

    fn end_of_pass(&mut self, plan: &mut Plan) {
        let nvm = Arc::clone(&self.nvm);
        let mut state = nvm.lock();
        self.advance(&mut state, plan);
        self.look_ahead(&mut state, plan);
        self.drive_space(&mut state, plan);
    }

    fn disk_done(&mut self, ticket: Ticket, result: io::Result<()>, plan: &mut Plan) {
        let Some(errand) = self.errands.remove(&ticket.0) else { return };
        let rescan = match &errand {
            Errand::Plain { rescan } | Errand::Through { rescan, .. } | Errand::Closed { rescan } => {
                *rescan | self.journals.take_scan_soon(self.disk)
            }
            _ => false,
        };
        let nvm = Arc::clone(&self.nvm);
        {
            let mut state = nvm.lock();
            self.errand_done(&mut state, ticket, errand, result.is_ok(), plan);
        }
        if rescan {
            self.scan();
        }
        let mut state = nvm.lock();
        self.refresh_layout(&mut state, plan);
        self.drive(&mut state, plan);
    }

    fn hand_over(&mut self, log: LogIndex, plan: &mut Plan) -> io::Result<bool> {
        self.leave(log, plan)
    }

    fn give_up_hand_over(&mut self, _log: LogIndex, plan: &mut Plan) {
        self.stay(plan);
    }

    fn stopped(&mut self) {
        // What is on its way ends before the next start; no more follows.
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.end_soon();
        }
    }

    fn wake_descriptor(&self) -> Option<RawFd> {
        Some(self.journals.disk(self.disk).wake.descriptor())
    }

    fn woken(&mut self, plan: &mut Plan) {
        self.checkpoint_failed = false;
        let nvm = Arc::clone(&self.nvm);
        self.drive(&mut nvm.lock(), plan);
    }
}
