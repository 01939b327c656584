//! The route of a disk that carries logs or their homes.
//!
//! Every disk has this one. Requests are cut into pieces; each piece of a log, and each of a file system whose log wants to know, goes to
//! that log's keeper ([`crate::keeper`]), everything else to storage as it is. Here are the tickets of operations on their way, what waits,
//! the counters, the trace, and what a flush of the guest has to cover. What a keeper decides is its own; the route asks none
//! where its log lives.

mod reading;
mod steps;
#[cfg(test)]
mod tests;
mod waiting;

use crate::disk::{DiskCounters, Failures};
use crate::journals::{Journals, TraceKind};
use crate::keeper::{
    BlockContent, HomePart, HomeVerdict, Leaving, LogBlock, LogVerdict, OddVerdict, Side, Steps, SuperblockBlock, Task,
};
use crate::kept_log::KeptLog;
use crate::layout::{DiskLayout, HomeRange, LogRange, Piece};
use block_route::segments;
use block_route::{
    Buffer, DiskOperation, LogIndex, Operation, Plan, Request, RequestId, RequestKind, Route, Start, Ticket,
};
use guest_memory::{MemorySlice, MemoryTable};
use journal_area::Source;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use waiting::{Waiting, home_change};

/// What an operation with a ticket was for.
#[derive(Debug)]
enum Errand {
    /// The guest's write, discard or zeroing of homes, and whether it may have changed the layout.
    Home(Arc<KeptLog>, usize, bool),
    /// A step of a keeper.
    Keeper(Arc<KeptLog>, Task),
    /// A keeper's flush, that covers so many writes.
    KeeperFlush(Arc<KeptLog>, Task, u64),
    /// A write that nothing of ours covers, and whether it may have changed the layout.
    Plain(bool),
    /// The guest's flush, for this request, that covers so many writes; of these failures it had been told when it began.
    Flush(RequestId, u64, Failures),
}

/// The route of one disk.
#[derive(Debug)]
pub struct DiskRoute {
    journals: Arc<Journals>,
    disk: usize,
    layout: Arc<DiskLayout>,
    layout_version: u64,
    memory: Option<Arc<MemoryTable>>,
    errands: HashMap<u64, Errand>,
    next_ticket: u64,
    /// Changes and reads that have to wait until a keeper says otherwise.
    behind: Vec<Waiting>,
    /// Logs whose keepers were given something in this pass: they hear of its end, even if they are gone by then.
    in_pass: Vec<Arc<KeptLog>>,
    /// Flushes of the guest fail in this pass, for these failures.
    telling: Option<Failures>,
    /// The guest was told of all, and the tables do not say so yet.
    was_told: bool,
    /// Some disk's journals go to a server.
    has_remote: bool,
    /// The request that is being routed was taken before.
    is_again: bool,
    pieces: Vec<Piece>,
}

impl DiskRoute {
    /// The route of the disk with this index.
    pub fn new(journals: Arc<Journals>, disk: usize) -> Self {
        let layout = journals.disk(disk).layout();
        let layout_version = journals.disk(disk).layout_version();
        let has_remote = (0..journals.disks().len()).any(|disk| journals.server(disk).is_some());
        DiskRoute {
            journals,
            disk,
            layout,
            layout_version,
            memory: None,
            errands: HashMap::new(),
            next_ticket: 0,
            behind: Vec::new(),
            in_pass: Vec::new(),
            telling: None,
            was_told: false,
            has_remote,
            is_again: false,
            pieces: Vec::new(),
        }
    }

    fn counters(&self) -> &DiskCounters {
        &self.journals.disk(self.disk).counters
    }

    fn refresh_layout(&mut self) {
        let disk = self.journals.disk(self.disk);
        let version = disk.layout_version();
        if version != self.layout_version {
            self.layout = disk.layout();
            self.layout_version = version;
        }
    }

    fn ticket(&mut self, errand: Errand) -> Ticket {
        let number = self.next_ticket;
        self.next_ticket += 1;
        self.errands.insert(number, errand);
        Ticket(number)
    }

    /// Whether what the range writes changes the layout.
    fn changes_layout(&self, start: u64, end: u64, request: &Request<'_>) -> bool {
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

    fn route_write(&mut self, request: &Request<'_>, plan: &mut Plan) {
        let (start, end) = (request.offset, request.offset + request.len);
        if self.has_remote && self.journals.disk(self.disk).is_taken() {
            plan.fail(request.id);
            return;
        }
        let rescan = self.changes_layout(start, end, request);
        if self.layout.is_plain() {
            self.plain_write(request, start, end, rescan, plan);
            return;
        }
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.clear();
        self.layout.cut(start, end, &mut pieces);
        // Runs of pieces that go to storage as they are become one operation.
        let mut run: Option<(u64, u64)> = None;
        for piece in &pieces {
            let range = piece.range();
            if self.is_watched(piece) {
                if let Some((from, to)) = run.take() {
                    self.plain_write(request, from, to, rescan, plan);
                }
                let slices = if request.segments.is_empty() {
                    Vec::new()
                } else {
                    segments::part(request.segments, range.start - start, range.end - range.start)
                };
                let (request, kind, is_again) = (request.id, request.kind, self.is_again);
                let waiting = Waiting { request, kind, piece: *piece, slices, rescan, is_again };
                match piece {
                    Piece::Log(log_range, ..) => self.log_write(log_range, waiting, plan),
                    Piece::Home(home, ..) => self.home_write(home, waiting, plan),
                    Piece::Plain(..) => unreachable!("plain pieces are not watched"),
                }
            } else {
                self.count_plain(piece, request);
                run = Some((run.map_or(range.start, |(from, _)| from), range.end));
            }
        }
        if let Some((from, to)) = run {
            self.plain_write(request, from, to, rescan, plan);
        }
        self.pieces = pieces;
    }

    /// Whether a piece needs more than to be passed on.
    fn is_watched(&self, piece: &Piece) -> bool {
        match piece {
            Piece::Plain(..) => false,
            Piece::Home(home, ..) => self.journals.log(home.log).is_some_and(|log| log.keeper.watches_home(&log)),
            Piece::Log(range, ..) => self.journals.log(range.log).is_some_and(|log| {
                // Whoever keeps it, its guest may go on with it without a word.
                let may_go_on = || !log.is_open() && log.may_go_on_unannounced();
                range.first_position == 0 || log.keeper.watches_log() || may_go_on()
            }),
        }
    }

    fn count_plain(&self, piece: &Piece, request: &Request<'_>) {
        let range = piece.range();
        let bytes = range.end - range.start;
        if let Piece::Log(log, ..) = piece {
            if request.kind == RequestKind::Write {
                DiskCounters::add(&self.counters().journal_bytes_received, bytes);
                DiskCounters::add(&self.counters().journal_bytes_to_storage, bytes);
                let slices = segments::part(request.segments, range.start - request.offset, bytes);
                self.count_commits(&slices, log.block_bytes);
            }
            self.trace(request.kind, TraceKind::Journal, range.start, bytes);
        } else {
            if request.kind == RequestKind::Write {
                DiskCounters::add(&self.counters().home_bytes_to_storage, bytes);
            }
            self.trace(request.kind, TraceKind::Home, range.start, bytes);
        }
    }

    /// Counts commit blocks where the area does not.
    fn count_commits(&self, slices: &[MemorySlice], block_bytes: u32) {
        DiskCounters::add(&self.counters().commit_blocks, commits(slices, block_bytes) as u64);
    }

    fn trace(&self, kind: RequestKind, written: TraceKind, offset: u64, len: u64) {
        let kind = match kind {
            RequestKind::Read => TraceKind::Read,
            RequestKind::Write | RequestKind::WriteZeroes { .. } => written,
            RequestKind::Flush => TraceKind::Flush,
            RequestKind::Discard => TraceKind::Discard,
        };
        self.journals.trace(self.disk, kind, offset, len);
    }

    /// Passes a part of a write, discard or zeroing on to storage.
    fn plain_write(&mut self, request: &Request<'_>, start: u64, end: u64, rescan: bool, plan: &mut Plan) {
        if self.layout.is_plain() {
            self.count_plain(&Piece::Plain(start, end), request);
        }
        let mut operation = block_route::whole(request);
        if (start, end) != (request.offset, request.offset + request.len) {
            operation.offset = start;
            operation.len = end - start;
            if !request.segments.is_empty() {
                let slices = segments::part(request.segments, start - request.offset, end - start);
                operation.buffers = slices.into_iter().map(Buffer::Slice).collect();
            }
        }
        operation.ticket = Some(self.ticket(Errand::Plain(rescan)));
        plan.disk(operation);
    }

    /// A write into a log that is not simply stored.
    fn log_write(&mut self, range: &LogRange, waiting: Waiting, plan: &mut Plan) {
        let Some(mut log) = self.journals.log(range.log) else {
            plan.fail(waiting.request);
            return;
        };
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let aligned = (start - range.start).is_multiple_of(block_bytes) && (end - start).is_multiple_of(block_bytes);
        let to_storage = |route: &mut Self, part: Range<u64>, plan: &mut Plan| {
            let slices = match waiting.slices.is_empty() {
                _ if part.is_empty() => return,
                true => Vec::new(),
                false => segments::part(&waiting.slices, part.start - start, part.end - part.start),
            };
            route.log_to_storage(&waiting, part.start, part.end, slices, plan);
        };
        if waiting.kind != RequestKind::Write || !aligned {
            match log.keeper.odd_log_write(&log, waiting.kind, &waiting.slices) {
                OddVerdict::Store => to_storage(self, start..end, plan),
                OddVerdict::Ignore => {}
                OddVerdict::Patch => self.foreign_write(&log, range, &waiting, plan),
                OddVerdict::Refuse => {
                    log::warn!(
                        "disk {}: {:?} of bytes {start}..{end}, inside the open journal, is not a journal write; it is refused",
                        self.journals.disk(self.disk).options.name,
                        waiting.kind
                    );
                    plan.fail(waiting.request);
                }
            }
            return;
        }
        DiskCounters::add(&self.counters().journal_bytes_received, end - start);
        self.trace(waiting.kind, TraceKind::Journal, start, end - start);
        self.note_in_pass(&log);
        let mut at = start;
        // Blocks that go to storage as they are, and together.
        let mut run = start..start;
        while at < end {
            let position = range.first_position + ((at - range.start) / block_bytes) as u32;
            let slices = segments::part(&waiting.slices, at - start, block_bytes);
            if commits(&slices, range.block_bytes) > 0 {
                plan.note_commit(waiting.request);
            }
            if position == 0 {
                log = self.superblock_write(&log, &waiting, at, slices, plan);
                self.note_in_pass(&log);
            } else {
                if !log.keeper.counts_transactions(&log) {
                    self.count_commits(&slices, range.block_bytes);
                }
                if !log.is_open() {
                    match self.journals.goes_on_unannounced(&log, position, &slices) {
                        Ok(false) => {}
                        Ok(true) => {
                            log = self.journals.log(range.log).unwrap_or(log);
                            self.note_in_pass(&log);
                        }
                        Err(error) => {
                            log::error!("disk {}: {error}", self.journals.disk(self.disk).options.name);
                            to_storage(self, std::mem::replace(&mut run, at..at), plan);
                            plan.fail(waiting.request);
                            return;
                        }
                    }
                }
                let content = BlockContent::Guest(&slices);
                let block = LogBlock { position, content, request: waiting.request, is_again: waiting.is_again };
                let verdict = log.keeper.log_write(&log, block);
                if verdict == LogVerdict::Store {
                    if run.end != at {
                        to_storage(self, std::mem::replace(&mut run, at..at), plan);
                    }
                    run.end = at + block_bytes;
                } else {
                    let buffers = || slices.iter().copied().map(Buffer::Slice).collect();
                    self.log_block_given(&log, &waiting, verdict, (at, block_bytes), buffers, plan);
                }
            }
            at += block_bytes;
        }
        to_storage(self, run, plan);
    }

    /// A log's keeper is given something in this pass.
    fn note_in_pass(&mut self, log: &Arc<KeptLog>) {
        if !self.in_pass.iter().any(|known| Arc::ptr_eq(known, log)) {
            self.in_pass.push(Arc::clone(log));
        }
    }

    /// A keeper was given a whole block of its log: what it leaves to storage goes there.
    fn log_block_given(
        &mut self,
        log: &Arc<KeptLog>,
        waiting: &Waiting,
        verdict: LogVerdict,
        (at, len): (u64, u64),
        buffers: impl FnOnce() -> Vec<Buffer>,
        plan: &mut Plan,
    ) {
        let errand = match verdict {
            LogVerdict::Store => Errand::Plain(waiting.rescan),
            LogVerdict::StoreFor(task) => Errand::Keeper(Arc::clone(log), task),
            LogVerdict::Kept => return,
            LogVerdict::Held => return plan.hold(waiting.request),
            LogVerdict::Fail => return plan.fail(waiting.request),
        };
        DiskCounters::add(&self.counters().journal_bytes_to_storage, len);
        let ticket = Some(self.ticket(errand));
        let request = Some(waiting.request);
        plan.disk(DiskOperation { request, ticket, operation: Operation::Write, offset: at, len, buffers: buffers() });
    }

    /// A part of a log goes to its own place on storage.
    fn log_to_storage(&mut self, waiting: &Waiting, from: u64, to: u64, slices: Vec<MemorySlice>, plan: &mut Plan) {
        let operation = operation_of(waiting.kind);
        if operation == Operation::Write {
            DiskCounters::add(&self.counters().journal_bytes_to_storage, to - from);
        }
        let ticket = self.ticket(Errand::Plain(waiting.rescan));
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: Some(ticket),
            operation,
            offset: from,
            len: to - from,
            buffers: slices.into_iter().map(Buffer::Slice).collect(),
        });
    }

    /// A write of parts of blocks, or of zeros, into a log that is kept here: no kernel's, but the log's place is part of a disk,
    /// and somebody may be copying an image over it.
    fn foreign_write(&mut self, log: &Arc<KeptLog>, range: &LogRange, waiting: &Waiting, plan: &mut Plan) {
        self.settle(log, plan);
        let mut log = Arc::clone(log);
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let mut at = start;
        while at < end {
            let index = (at - range.start) / block_bytes;
            let begin = range.start + index * block_bytes;
            let stop = end.min(begin + block_bytes);
            let position = range.first_position + index as u32;
            let slices = if waiting.slices.is_empty() {
                Vec::new()
            } else {
                segments::part(&waiting.slices, at - start, stop - at)
            };
            let part = at..stop;
            at = stop;
            if !log.is_open() {
                // The superblock was in it, and is that of an open log no more.
                let piece = Waiting { piece: Piece::Log(*range, part.start, part.end), ..waiting.clone() };
                self.log_to_storage(&piece, part.start, part.end, slices, plan);
                continue;
            }
            let into = (part.start - begin) as usize..(part.end - begin) as usize;
            let mut steps = Steps::default();
            let is_stored = log.keeper.patched(&log, position, into, &slices).and_then(|content| {
                if position != 0 {
                    let block = BlockContent::Bytes(content.clone());
                    let block =
                        LogBlock { position, content: block, request: waiting.request, is_again: waiting.is_again };
                    return Ok((log.keeper.log_write(&log, block), content));
                }
                let block = SuperblockBlock { content: &content, request: waiting.request };
                let (taken_by, passes) = self.journals.superblock_written(&log, block, &mut steps);
                log = taken_by;
                Ok((if passes? { LogVerdict::Store } else { LogVerdict::Kept }, content))
            });
            self.carry_out(&log, steps, plan);
            match is_stored {
                Ok((verdict, content)) => {
                    // The whole block: what is there is the mark.
                    let buffers = || vec![Buffer::Bytes(Arc::from(content))];
                    self.log_block_given(&log, waiting, verdict, (begin, block_bytes), buffers, plan);
                }
                Err(error) => {
                    log::error!("disk {}: {error}", self.journals.disk(self.disk).options.name);
                    plan.fail(waiting.request);
                    return;
                }
            }
        }
        // The next part may be of the same block.
        self.settle(&log, plan);
    }

    /// Gives the log as it is from now on.
    fn superblock_write(
        &mut self,
        log: &Arc<KeptLog>,
        waiting: &Waiting,
        at: u64,
        slices: Vec<MemorySlice>,
        plan: &mut Plan,
    ) -> Arc<KeptLog> {
        // What the guest wrote into the log before counts before.
        self.settle(log, plan);
        let block = segments::gather(&slices);
        let mut steps = Steps::default();
        let superblock = SuperblockBlock { content: &block, request: waiting.request };
        let (log, is_stored) = self.journals.superblock_written(log, superblock, &mut steps);
        self.carry_out(&log, steps, plan);
        match is_stored {
            Ok(true) => self.log_to_storage(waiting, at, at + block.len() as u64, slices, plan),
            // Its keeper writes it there, or nobody does.
            Ok(false) if waiting.rescan => self.journals.scan_soon(self.disk),
            Ok(false) => {}
            Err(error) => {
                log::error!("disk {}: {error}", self.journals.disk(self.disk).options.name);
                plan.fail(waiting.request);
            }
        }
        log
    }

    /// A write, discard or zeroing inside a file system whose log wants to know.
    fn home_write(&mut self, home: &HomeRange, waiting: Waiting, plan: &mut Plan) {
        let mut rest = Some(waiting);
        while let Some(mut next) = rest.take() {
            rest = self.cut_home(home, &mut next);
            self.home_piece(home, next, plan);
        }
    }

    /// Cuts off, and gives, what the log's keeper wants to be asked about by itself.
    fn cut_home(&self, home: &HomeRange, waiting: &mut Waiting) -> Option<Waiting> {
        let log = self.journals.log(home.log)?;
        let change = home_change(home, waiting, &[]);
        let end = change.blocks.end;
        let cut = log.keeper.home_cut(&log, &change);
        if cut <= change.blocks.start || cut >= end {
            return None;
        }
        waiting.cut(home.start + cut * u64::from(home.block_bytes))
    }

    fn home_piece(&mut self, home: &HomeRange, waiting: Waiting, plan: &mut Plan) {
        let range = waiting.piece.range();
        let Some(log) = self.journals.log(home.log) else {
            // The file system was replaced meanwhile.
            self.log_to_storage(&waiting, range.start, range.end, waiting.slices.clone(), plan);
            return;
        };
        let block_bytes = u64::from(home.block_bytes);
        let into = range.start - home.start;
        let payload = segments::blocks(&waiting.slices, into % block_bytes, home.block_bytes);
        let change = home_change(home, &waiting, &payload);
        let mut steps = Steps::default();
        let (operation, replaced) = match log.keeper.home_begins(&log, &change, &mut steps) {
            Ok(HomeVerdict::Go { operation, replaced }) => (operation, replaced),
            Ok(HomeVerdict::Parts(parts)) => {
                self.carry_out(&log, steps, plan);
                self.trace(waiting.kind, TraceKind::Home, range.start, range.end - range.start);
                for part in parts {
                    self.home_part(&log, home, &waiting, part, plan);
                }
                return;
            }
            Ok(HomeVerdict::Wait) => {
                plan.hold(waiting.request);
                self.behind.push(waiting);
                // Behind it, since they may let it go.
                self.carry_out(&log, steps, plan);
                return;
            }
            Err(error) => {
                log::error!("disk {}: {error}", self.journals.disk(self.disk).options.name);
                plan.fail(waiting.request);
                self.carry_out(&log, steps, plan);
                return;
            }
        };
        let len = range.end - range.start;
        if waiting.kind == RequestKind::Write {
            DiskCounters::add(&self.counters().home_bytes_to_storage, len);
        }
        self.trace(waiting.kind, TraceKind::Home, range.start, len);
        let buffers = assemble(&waiting.slices, into % block_bytes, block_bytes, &replaced);
        let ticket = self.ticket(Errand::Home(Arc::clone(&log), operation, waiting.rescan));
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: Some(ticket),
            operation: operation_of(waiting.kind),
            offset: range.start,
            len,
            buffers,
        });
        self.carry_out(&log, steps, plan);
    }

    /// A part of a change of homes goes to storage by itself.
    fn home_part(&mut self, log: &Arc<KeptLog>, home: &HomeRange, waiting: &Waiting, part: HomePart, plan: &mut Plan) {
        let (offset, len) = (home.start + part.range.start, part.range.end - part.range.start);
        let (operation, buffers) = match part.content {
            Some(content) => (Operation::Write, vec![Buffer::Bytes(Arc::from(content))]),
            None if waiting.slices.is_empty() => (operation_of(waiting.kind), Vec::new()),
            None => {
                let slices = segments::part(&waiting.slices, offset - waiting.piece.range().start, len);
                (operation_of(waiting.kind), slices.into_iter().map(Buffer::Slice).collect())
            }
        };
        if operation == Operation::Write {
            DiskCounters::add(&self.counters().home_bytes_to_storage, len);
        }
        let ticket = Some(self.ticket(Errand::Home(Arc::clone(log), part.operation, waiting.rescan)));
        plan.disk(DiskOperation { request: Some(waiting.request), ticket, operation, offset, len, buffers });
    }

    fn make_durable(&mut self, request: &Request<'_>, plan: &mut Plan) {
        let disk = self.journals.disk(self.disk);
        let (told, failed) = (disk.told(), disk.failures());
        if failed.has_more_than(told) {
            // A flush of ours has failed, and what it was to cover may be lost: storage says that once, to who asked. Or what was durable is not any
            // more. The guest hears it now; so do all its flushes of this pass, of which none was answered before the others.
            self.telling = Some(failed);
            plan.fail(request.id);
            return;
        }
        if std::mem::take(&mut self.was_told) {
            // It has the answers by now: whoever goes on without this process has nothing to tell it.
            self.journals.note_doubts(self.disk, |doubt| doubt.is_untold = false);
            if disk.failures().has_more_than(told) {
                self.journals.note_doubts(self.disk, |doubt| doubt.is_untold = true);
            }
        }
        let to_flush = disk.to_flush();
        if to_flush.is_some() || disk.options.honour_flush {
            self.journals.logs_at_home(self.disk).iter().for_each(|log| log.keeper.flush_begins(log, request.id));
            DiskCounters::add(&disk.counters.flushes_to_storage, 1);
            let ticket = self.ticket(Errand::Flush(request.id, to_flush.unwrap_or(0), told));
            plan.disk(DiskOperation { ticket: Some(ticket), ..block_route::whole(request) });
        }
    }
}

/// How a change of storage is carried out.
fn operation_of(kind: RequestKind) -> Operation {
    match kind {
        RequestKind::Discard => Operation::Discard,
        RequestKind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
        _ => Operation::Write,
    }
}

/// The buffers of a home write in which some blocks are taken from elsewhere.
fn assemble(slices: &[MemorySlice], lead: u64, block_bytes: u64, replaced: &[(usize, Source)]) -> Vec<Buffer> {
    if replaced.is_empty() {
        return slices.iter().copied().map(Buffer::Slice).collect();
    }
    let total: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
    let mut buffers = Vec::new();
    let mut at = 0;
    for (index, source) in replaced {
        // Only blocks that are covered whole are replaced, so the block begins inside the write.
        let block_at = *index as u64 * block_bytes - lead;
        buffers.extend(segments::part(slices, at, block_at - at).into_iter().map(Buffer::Slice));
        buffers.push(match source {
            Source::Held(slice) => Buffer::Slice(*slice),
            Source::Bytes(bytes) => Buffer::Bytes(Arc::clone(bytes)),
            Source::Given => continue,
        });
        at = block_at + block_bytes;
    }
    buffers.extend(segments::part(slices, at, total - at).into_iter().map(Buffer::Slice));
    buffers
}

impl Route for DiskRoute {
    fn waits_for_others(&self, start: Start) -> Option<String> {
        // Who goes on recovers nothing.
        if start == Start::Fresh { self.journals.awaited_home_writes(self.disk) } else { None }
    }

    fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> io::Result<()> {
        self.memory = Some(Arc::clone(memory));
        match start {
            Start::Fresh => {
                // No request is left of an earlier start, and no operation.
                self.errands.clear();
                self.behind.clear();
                self.in_pass.clear();
                for log in self.journals.logs_at_home(self.disk) {
                    log.state.own_writes.store(0, Ordering::Release);
                }
                self.journals.look_again_if_changed(self.disk)?;
                // Whoever wrote these logs is gone: what was committed goes home before the next reader comes.
                self.journals.recover_disk(self.disk)?;
                self.journals.replay_aged(self.disk)?;
                self.journals.scan(self.disk)?;
                self.journals.disk(self.disk).set_started();
                // What was lost before was another guest's.
                let disk = self.journals.disk(self.disk);
                disk.tell_failures(disk.failures());
                self.was_told = true;
            }
            Start::Resumed => self.journals.check_resumed(self.disk)?,
        }
        self.refresh_layout();
        Ok(())
    }

    fn route_again(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.is_again = true;
        self.route(request, plan);
        self.is_again = false;
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.refresh_layout();
        match request.kind {
            RequestKind::Read => self.route_read(request, plan),
            RequestKind::Flush => {
                DiskCounters::add(&self.counters().flushes, 1);
                self.trace(request.kind, TraceKind::Flush, 0, 0);
                let logs = self.journals.logs_at_home(self.disk);
                self.tell(logs, plan, |log, steps| log.keeper.flush_asked(log, request.id, steps));
                self.make_durable(request, plan);
            }
            RequestKind::Write | RequestKind::Discard | RequestKind::WriteZeroes { .. } => {
                self.route_write(request, plan);
            }
        }
    }

    fn flush_after(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.make_durable(request, plan);
    }

    fn end_of_pass(&mut self, plan: &mut Plan) {
        self.journals.describe_new_memory();
        let logs = std::mem::take(&mut self.in_pass);
        self.tell(logs, plan, |log, steps| log.keeper.end_of_pass(log, steps));
        if let Some(failed) = self.telling.take() {
            self.journals.disk(self.disk).tell_failures(failed);
            self.was_told = true;
        }
        self.take_away_distrusted();
    }

    fn disk_done(&mut self, ticket: Ticket, result: io::Result<()>, plan: &mut Plan) {
        let Some(errand) = self.errands.remove(&ticket.0) else { return };
        let is_ok = result.is_ok();
        match errand {
            Errand::Home(log, operation, rescan) => {
                let mut steps = Steps::default();
                if !log.keeper.home_ended(&log, operation, is_ok, &mut steps) {
                    self.journals.disk(self.disk).set_dirty();
                }
                self.carry_out(&log, steps, plan);
                self.scan_if(rescan);
            }
            Errand::Keeper(log, task) => {
                let mut steps = Steps::default();
                log.keeper.done(&log, task, result.as_ref().err(), &mut steps);
                self.carry_out(&log, steps, plan);
                self.take_away_distrusted();
                if log.journal_disk != self.disk && self.journals.area.has_contradiction() {
                    // The device with the log may have waited for this one.
                    log.journal.wake.wake();
                }
                self.scan_if(false);
            }
            Errand::KeeperFlush(log, task, covered) => {
                if is_ok {
                    self.journals.disk(self.disk).set_flushed(covered);
                } else {
                    self.flush_failed();
                }
                let mut steps = Steps::default();
                log.keeper.done(&log, task, result.as_ref().err(), &mut steps);
                self.carry_out(&log, steps, plan);
            }
            Errand::Plain(rescan) => {
                self.journals.disk(self.disk).set_dirty();
                self.scan_if(rescan);
            }
            Errand::Flush(request, covered, told) => {
                if is_ok {
                    self.journals.disk(self.disk).set_flushed(covered);
                } else {
                    self.flush_failed();
                }
                // Its own failure, or that of one that went beside it. What ended since it began may be lost by that, too, so the next
                // one hears of it as well.
                let has_failed = self.journals.disk(self.disk).failures().has_more_than(told);
                if has_failed {
                    plan.fail(request);
                }
                let is_ok = is_ok && !has_failed;
                let logs = self.journals.logs_at_home(self.disk);
                self.tell(logs, plan, |log, steps| log.keeper.flush_ended(log, request, is_ok, steps));
            }
        }
    }

    fn wake_descriptor(&self) -> Option<RawFd> {
        Some(self.journals.disk(self.disk).wake.descriptor())
    }

    fn hand_over(&mut self, index: LogIndex, plan: &mut Plan) -> io::Result<bool> {
        let log = self.journals.log(index).ok_or_else(|| io::Error::other("the log has gone"))?;
        let mut steps = Steps::default();
        let leaving = log.keeper.leave_for_storage(&log, &mut steps);
        self.carry_out(&log, steps, plan);
        match leaving? {
            Leaving::AtOnce => self.journals.hand_over(index),
            Leaving::UnderWay => Ok(false),
            Leaving::HasLeft => {
                self.journals.is_on_storage(index, None);
                Ok(true)
            }
        }
    }

    fn give_up_hand_over(&mut self, index: LogIndex, plan: &mut Plan) {
        let logs = self.journals.log(index).into_iter().collect();
        self.tell(logs, plan, |log, steps| log.keeper.stay(log, steps));
    }

    fn stopped(&mut self) {
        self.journals.logs_at_home(self.disk).iter().for_each(|log| log.keeper.end_soon(log));
    }

    fn woken(&mut self, plan: &mut Plan) {
        self.take_away_distrusted();
        for (log, side, step) in self.journals.take_passed_on(self.disk) {
            self.carry_out(&log, Steps(vec![(side, step)]), plan);
        }
        // A log may have been brought elsewhere, by the thread of another disk.
        self.retry_waiting(plan);
        let logs = self.journals.logs_lying_on(self.disk);
        self.tell(logs, plan, |log, steps| log.keeper.woken(log, Side::Journal, steps));
        let logs = self.journals.logs_at_home(self.disk);
        self.tell(logs, plan, |log, steps| log.keeper.woken(log, Side::Home, steps));
    }
}

impl DiskRoute {
    /// Takes logs away whose books were proven wrong, if this device may. What has to wait is tried again after the next pass,
    /// or when a home write has ended.
    fn take_away_distrusted(&mut self) {
        if self.journals.area.has_contradiction() {
            self.journals.distrust_on(self.disk);
        }
    }

    fn flush_failed(&self) {
        self.journals.disk(self.disk).note_failed_flush();
        self.journals.logs_at_home(self.disk).iter().for_each(|log| log.keeper.flush_failed(log));
    }

    fn scan_if(&mut self, rescan: bool) {
        if self.journals.take_scan_soon(self.disk) || rescan {
            self.scan();
        }
    }

    fn scan(&mut self) {
        if let Err(error) = self.journals.scan(self.disk) {
            log::error!("looking for journals on disk {} failed: {error}", self.journals.disk(self.disk).options.name);
        }
        self.refresh_layout();
    }
}

/// How many of these blocks say that they are commit blocks.
fn commits(slices: &[MemorySlice], block_bytes: u32) -> usize {
    let is_commit = |block: &&MemorySlice| {
        let mut head = [0; jbd2::HEADER_BYTES];
        block.copy_out(0, &mut head);
        jbd2::peek(&head).is_some_and(|header| header.kind == jbd2::Kind::Commit)
    };
    segments::blocks(slices, 0, block_bytes).iter().flatten().filter(is_commit).count()
}
