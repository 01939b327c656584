//! The route of a disk that carries logs or their homes.
//!
//! Log writes go to the journal area (or where the disk's placement says), home writes to storage with the area looking
//! on, everything else to storage as it is.

use crate::disk::{DiskCounters, PlacementKind};
use crate::journals::{Journals, Log, TraceKind};
use crate::layout::{DiskLayout, HomeRange, LogRange, Piece};
use crate::remote::Outcome;
use block_route::segments;
use block_route::{
    Buffer, DiskOperation, LogIndex, Operation, Plan, Request, RequestId, RequestKind, Route, Start, Status, Ticket,
};
use guest_memory::{MemorySlice, MemoryTable};
use journal_area::{Content, HomeWrite, LogWrite, Outside, Pressure, Source};
use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Host writes in flight at a time, a disk.
const HOST_WRITES_MAX: usize = 64;

/// What an operation with a ticket was for.
#[derive(Debug)]
enum Errand {
    /// The guest's home write, and whether it may have changed the layout.
    Home(Arc<Log>, usize, bool),
    /// The host's own.
    Host(Arc<Log>, usize),
    /// A log block for which there was no memory, on its way to its own place.
    Stored(Arc<Log>, u32),
    /// A block of a log that is shipped elsewhere at other times, on its way to its own place.
    Remote(Arc<Log>),
    /// A write that nothing of ours covers, and whether it may have changed the layout.
    Plain(bool),
    /// A flush that covers so many writes.
    Flush(u64),
}

/// A piece of a request that has to wait; its request is held.
#[derive(Clone, Debug)]
struct Waiting {
    request: RequestId,
    kind: RequestKind,
    piece: Piece,
    slices: Vec<MemorySlice>,
    /// It may change the layout.
    rescan: bool,
}

/// The route of one disk.
#[derive(Debug)]
pub struct JournalRoute {
    journals: Arc<Journals>,
    disk: usize,
    layout: Arc<DiskLayout>,
    layout_version: u64,
    memory: Option<Arc<MemoryTable>>,
    errands: HashMap<u64, Errand>,
    next_ticket: u64,
    batch: Vec<(LogIndex, LogWrite, RequestId)>,
    /// Home writes that wait for a host write to the same blocks.
    behind_host: Vec<Waiting>,
    host_in_flight: usize,
    host_failed: bool,
    /// Some disk's journals go to a server.
    has_remote: bool,
    pieces: Vec<Piece>,
}

impl JournalRoute {
    /// The route of the disk with this index.
    pub fn new(journals: Arc<Journals>, disk: usize) -> Self {
        let layout = journals.disk(disk).layout();
        let layout_version = journals.disk(disk).layout_version();
        let has_remote = journals.disks().iter().any(|disk| disk.options.remote.is_some());
        JournalRoute {
            journals,
            disk,
            layout,
            layout_version,
            memory: None,
            errands: HashMap::new(),
            next_ticket: 0,
            batch: Vec::new(),
            behind_host: Vec::new(),
            host_in_flight: 0,
            host_failed: false,
            has_remote,
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
                let waiting = Waiting { request: request.id, kind: request.kind, piece: *piece, slices, rescan };
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
            // What the host writes home of a log that has closed meanwhile must not land on what the guest writes now.
            Piece::Home(home, ..) => {
                self.host_in_flight > 0 || self.journals.log(home.log).is_some_and(|log| log.is_held_open())
            }
            Piece::Log(range, ..) => self
                .journals
                .log(range.log)
                .is_some_and(|log| log.placement != PlacementKind::Storage || range.first_position == 0),
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
        let Some(log) = self.journals.log(range.log) else {
            plan.fail(waiting.request);
            return;
        };
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let aligned = (start - range.start).is_multiple_of(block_bytes) && (end - start).is_multiple_of(block_bytes);
        let to_storage = |route: &mut Self, from: u64, to: u64, plan: &mut Plan| {
            let slices = if waiting.slices.is_empty() {
                Vec::new()
            } else {
                segments::part(&waiting.slices, from - start, to - from)
            };
            route.log_to_storage(&waiting, from, to, slices, plan);
        };
        if waiting.kind != RequestKind::Write || !aligned {
            match (log.is_open() && log.placement != PlacementKind::Storage, waiting.kind) {
                (false, _) => {
                    log.note_foreign(&waiting.slices);
                    to_storage(self, start, end, plan);
                }
                // Advice that cannot be followed is ignored.
                (true, RequestKind::Discard) => {}
                (true, _) if log.is_held_open() => self.foreign_write(&log, range, &waiting, plan),
                (true, _) => {
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
        let mut at = start;
        while at < end {
            let position = range.first_position + ((at - range.start) / block_bytes) as u32;
            let slices = segments::part(&waiting.slices, at - start, block_bytes);
            if commits(&slices, range.block_bytes) > 0 {
                plan.note_commit(waiting.request);
            }
            if position == 0 {
                self.superblock_write(&log, &waiting, at, slices, plan);
            } else if !log.is_open() || log.placement == PlacementKind::Storage {
                log.note_foreign(&slices);
                self.count_commits(&slices, range.block_bytes);
                to_storage(self, at, at + block_bytes, plan);
            } else if let Some(remote) = &log.remote {
                self.count_commits(&slices, range.block_bytes);
                match remote.write(position, segments::gather(&slices).into(), waiting.request) {
                    Outcome::Done => {}
                    Outcome::Held => plan.hold(waiting.request),
                    Outcome::Fail => plan.fail(waiting.request),
                    Outcome::Store => {
                        DiskCounters::add(&self.counters().journal_bytes_to_storage, block_bytes);
                        let ticket = self.ticket(Errand::Remote(Arc::clone(&log)));
                        plan.disk(DiskOperation {
                            request: Some(waiting.request),
                            ticket: Some(ticket),
                            operation: Operation::Write,
                            offset: at,
                            len: block_bytes,
                            buffers: slices.into_iter().map(Buffer::Slice).collect(),
                        });
                    }
                }
            } else if log.placement == PlacementKind::Discard {
                self.count_commits(&slices, range.block_bytes);
            } else {
                let content = match slices.as_slice() {
                    [slice] if slice.is_whole_page() && slice.len() as u64 == block_bytes => Content::Page(*slice),
                    _ => Content::Bytes(segments::gather(&slices)),
                };
                self.batch.push((range.log, LogWrite { position, content }, waiting.request));
            }
            at += block_bytes;
        }
    }

    /// A part of a log goes to its own place on storage.
    fn log_to_storage(&mut self, waiting: &Waiting, from: u64, to: u64, slices: Vec<MemorySlice>, plan: &mut Plan) {
        let operation = match waiting.kind {
            RequestKind::Discard => Operation::Discard,
            RequestKind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
            _ => Operation::Write,
        };
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

    /// A write of parts of blocks, or of zeros, into a held log: no kernel's, but the log's place is part of a disk, and
    /// somebody may be copying an image over it.
    fn foreign_write(&mut self, log: &Arc<Log>, range: &LogRange, waiting: &Waiting, plan: &mut Plan) {
        self.flush_batch(plan);
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
            if !log.is_held_open() {
                // The superblock was in it, and is that of an open log no more.
                let piece = Waiting { piece: Piece::Log(*range, part.start, part.end), ..waiting.clone() };
                self.log_to_storage(&piece, part.start, part.end, slices, plan);
                continue;
            }
            let into = (part.start - begin) as usize..(part.end - begin) as usize;
            let is_stored = self.journals.patched(log, position, into, &slices).and_then(|content| {
                if position != 0 {
                    self.batch.push((
                        range.log,
                        LogWrite { position, content: Content::Bytes(content) },
                        waiting.request,
                    ));
                    return Ok(None);
                }
                let passes = self.journals.superblock_written(log, &content)?;
                Ok(passes.then_some(content))
            });
            match is_stored {
                Ok(None) => {}
                Ok(Some(content)) => {
                    // The whole block: what is there is the mark.
                    DiskCounters::add(&self.counters().journal_bytes_to_storage, block_bytes);
                    let ticket = self.ticket(Errand::Plain(waiting.rescan));
                    plan.disk(DiskOperation {
                        request: Some(waiting.request),
                        ticket: Some(ticket),
                        operation: Operation::Write,
                        offset: begin,
                        len: block_bytes,
                        buffers: vec![Buffer::Bytes(Arc::from(content))],
                    });
                }
                Err(error) => {
                    log::error!("disk {}: {error}", self.journals.disk(self.disk).options.name);
                    plan.fail(waiting.request);
                    return;
                }
            }
        }
        // The next part may be of the same block.
        self.flush_batch(plan);
    }

    fn superblock_write(
        &mut self,
        log: &Arc<Log>,
        waiting: &Waiting,
        at: u64,
        slices: Vec<MemorySlice>,
        plan: &mut Plan,
    ) {
        // What the guest wrote into the log before counts before.
        self.flush_batch(plan);
        let block = segments::gather(&slices);
        match self.journals.superblock_written(log, &block) {
            Ok(true) => self.log_to_storage(waiting, at, at + block.len() as u64, slices, plan),
            Ok(false) => {}
            Err(error) => {
                log::error!("disk {}: {error}", self.journals.disk(self.disk).options.name);
                plan.fail(waiting.request);
            }
        }
    }

    /// A write, discard or zeroing inside the home of an open log.
    fn home_write(&mut self, home: &HomeRange, waiting: Waiting, plan: &mut Plan) {
        let range = waiting.piece.range();
        let Some(log) = self.journals.log(home.log) else {
            // The file system was replaced meanwhile.
            self.log_to_storage(&waiting, range.start, range.end, waiting.slices.clone(), plan);
            return;
        };
        let block_bytes = u64::from(home.block_bytes);
        let into = range.start - home.start;
        let blocks = into / block_bytes..(range.end - home.start).div_ceil(block_bytes);
        let area = &self.journals.area;
        if waiting.kind == RequestKind::Discard {
            let whole = into.div_ceil(block_bytes)..(range.end - home.start) / block_bytes;
            if whole.start < whole.end {
                area.discarded(log.id, whole);
            }
        }
        let payload = segments::blocks(&waiting.slices, into % block_bytes, home.block_bytes);
        let go = loop {
            match area.home_write_begins(log.id, blocks.clone(), &payload) {
                HomeWrite::Go { operation, replaced } => break Some((operation, replaced)),
                HomeWrite::Wait => {
                    plan.hold(waiting.request);
                    self.behind_host.push(waiting);
                    return;
                }
                HomeWrite::Restore(list) => {
                    if let Err(error) = self.journals.restore(&log, &list) {
                        log::error!("disk {}: {error}", self.journals.disk(self.disk).options.name);
                        break None;
                    }
                }
            }
        };
        let Some((operation, replaced)) = go else {
            plan.fail(waiting.request);
            return;
        };
        let len = range.end - range.start;
        if waiting.kind == RequestKind::Write {
            DiskCounters::add(&self.counters().home_bytes_to_storage, len);
        }
        self.trace(waiting.kind, TraceKind::Home, range.start, len);
        let buffers = assemble(&waiting.slices, into % block_bytes, block_bytes, &replaced);
        let disk_operation = match waiting.kind {
            RequestKind::Discard => Operation::Discard,
            RequestKind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
            _ => Operation::Write,
        };
        let ticket = self.ticket(Errand::Home(log, operation, waiting.rescan));
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: Some(ticket),
            operation: disk_operation,
            offset: range.start,
            len,
            buffers,
        });
    }

    fn route_read(&mut self, request: &Request<'_>, plan: &mut Plan) {
        DiskCounters::add(&self.counters().read_bytes, request.len);
        self.trace(request.kind, TraceKind::Read, request.offset, request.len);
        let (start, end) = (request.offset, request.offset + request.len);
        let first = self.layout.logs.partition_point(|range| range.end <= start);
        let touches_log = self.layout.logs.get(first).is_some_and(|range| range.start < end);
        if !touches_log {
            plan.disk(block_route::whole(request));
            return;
        }
        let mut pieces = Vec::new();
        self.layout.cut(start, end, &mut pieces);
        for piece in pieces {
            let range = piece.range();
            let slices = segments::part(request.segments, range.start - start, range.end - range.start);
            let waiting = Waiting { request: request.id, kind: request.kind, piece, slices, rescan: false };
            match piece {
                Piece::Log(log_range, ..) => match self.journals.log(log_range.log) {
                    Some(log) if log.is_held_open() => self.log_read(&log, &log_range, waiting, plan),
                    Some(log) if log.remote.is_some() && log.is_open() => {
                        self.remote_read(&log, &log_range, &waiting, plan);
                    }
                    _ => self.storage_read(&waiting, plan),
                },
                _ => self.storage_read(&waiting, plan),
            }
        }
    }

    fn storage_read(&self, waiting: &Waiting, plan: &mut Plan) {
        let range = waiting.piece.range();
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: None,
            operation: Operation::Read,
            offset: range.start,
            len: range.end - range.start,
            buffers: waiting.slices.iter().copied().map(Buffer::Slice).collect(),
        });
    }

    /// A read inside an open, held log, block by block.
    fn log_read(&mut self, log: &Arc<Log>, range: &LogRange, waiting: Waiting, plan: &mut Plan) {
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let mut block = vec![0; block_bytes as usize];
        let mut at = start;
        while at < end {
            let index = (at - range.start) / block_bytes;
            let position = range.first_position + index as u32;
            let into = (at - range.start) % block_bytes;
            let stop = end.min(range.start + (index + 1) * block_bytes);
            let slices = segments::part(&waiting.slices, at - start, stop - at);
            let piece = Piece::Log(*range, at, stop);
            let part = Waiting { request: waiting.request, kind: waiting.kind, piece, slices, rescan: false };
            at = stop;
            // Whoever reads it may be a kernel about to mount, with blocks of the file system in its cache already: it has
            // to replay the log itself.
            let mut outside = OnDisks { journals: &self.journals, log };
            match self.journals.area.show(log.id, position, &mut block, &mut outside) {
                Ok(true) => self.answer(&part, &block[into as usize..], plan),
                Ok(false) => self.storage_read(&part, plan),
                Err(error) => {
                    log::error!(
                        "disk {}: reading log block {position} failed: {error}",
                        self.journals.disk(self.disk).options.name
                    );
                    plan.fail(part.request);
                }
            }
        }
    }

    /// A read inside an open log that may be on a server: what is live is here, the rest is as storage has it.
    fn remote_read(&self, log: &Log, range: &LogRange, waiting: &Waiting, plan: &mut Plan) {
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let mut at = start;
        while at < end {
            let index = (at - range.start) / block_bytes;
            let into = (at - range.start) % block_bytes;
            let stop = end.min(range.start + (index + 1) * block_bytes);
            let slices = segments::part(&waiting.slices, at - start, stop - at);
            let piece = Piece::Log(*range, at, stop);
            let part = Waiting { request: waiting.request, kind: waiting.kind, piece, slices, rescan: false };
            at = stop;
            match log.remote.as_ref().and_then(|remote| remote.read(range.first_position + index as u32)) {
                Some(block) => self.answer(&part, &block[into as usize..], plan),
                None => self.storage_read(&part, plan),
            }
        }
    }

    /// Copies bytes of ours into a read's guest memory.
    fn answer(&self, waiting: &Waiting, bytes: &[u8], plan: &mut Plan) {
        let mut at = 0;
        for slice in &waiting.slices {
            if let Some(memory) = &self.memory
                && let Err(error) = memory.prepare_write(slice)
            {
                log::error!("disk {}: a read fails: {error}", self.journals.disk(self.disk).options.name);
                return plan.fail(waiting.request);
            }
            slice.copy_in(0, &bytes[at..at + slice.len()]);
            at += slice.len();
        }
    }

    fn make_durable(&mut self, request: &Request<'_>, plan: &mut Plan) {
        let disk = self.journals.disk(self.disk);
        let to_flush = disk.to_flush();
        if to_flush.is_some() || disk.options.honour_flush {
            DiskCounters::add(&disk.counters.flushes_to_storage, 1);
            let ticket = self.ticket(Errand::Flush(to_flush.unwrap_or(0)));
            plan.disk(DiskOperation { ticket: Some(ticket), ..block_route::whole(request) });
        }
    }

    /// Gives the log writes of this pass to the area, all at once for each log.
    fn flush_batch(&mut self, plan: &mut Plan) {
        while let Some((index, ..)) = self.batch.first() {
            let index = *index;
            let (of_log, rest): (Vec<_>, Vec<_>) =
                std::mem::take(&mut self.batch).into_iter().partition(|(log, ..)| *log == index);
            self.batch = rest;
            let (writes, requests): (Vec<LogWrite>, Vec<RequestId>) =
                of_log.into_iter().map(|(_, write, request)| (write, request)).unzip();
            let Some(log) = self.journals.log(index) else {
                requests.into_iter().for_each(|request| plan.fail(request));
                continue;
            };
            self.journals.describe_new_memory();
            let outcome = self.journals.area.log_op_mprotect(log.id, &writes);
            for failed in outcome.no_memory {
                let write = &writes[failed];
                let buffer = match &write.content {
                    Content::Page(slice) => Buffer::Slice(*slice),
                    Content::Bytes(bytes) => Buffer::Bytes(Arc::from(bytes.as_slice())),
                };
                let Some(offset) = log.offset_of(write.position) else {
                    plan.fail(requests[failed]);
                    continue;
                };
                DiskCounters::add(&self.counters().journal_bytes_to_storage, buffer.len() as u64);
                let ticket = self.ticket(Errand::Stored(Arc::clone(&log), write.position));
                plan.disk(DiskOperation {
                    request: Some(requests[failed]),
                    ticket: Some(ticket),
                    operation: Operation::Write,
                    offset,
                    len: buffer.len() as u64,
                    buffers: vec![buffer],
                });
            }
        }
    }

    /// Writes owed blocks home where memory is short or somebody waits until all is home.
    fn drive_host_writes(&mut self, plan: &mut Plan) {
        for log in self.journals.logs_at_home(self.disk) {
            if !log.is_held_open() || self.host_failed {
                continue;
            }
            let emptying = log.is_emptying.load(Ordering::Acquire);
            let pressure = self.journals.area.under_pressure().filter(|(id, _)| *id == log.id).map(|(_, what)| what);
            if !emptying && pressure.is_none() {
                continue;
            }
            if emptying && self.journals.area.log_op_query(log.id).writable == 0 {
                log.is_emptying.store(false, Ordering::Release);
                log.emptied.fetch_add(1, Ordering::AcqRel);
                continue;
            }
            let room = HOST_WRITES_MAX.saturating_sub(self.host_in_flight);
            let copied_only = !emptying && pressure == Some(Pressure::Copies);
            let writes = self.journals.area.host_writes(log.id, room, copied_only);
            for (operation, write) in writes {
                let buffer = match write.source {
                    Source::Held(slice) => Buffer::Slice(slice),
                    Source::Bytes(bytes) => Buffer::Bytes(bytes),
                    Source::Given => unreachable!("the host has nothing given"),
                };
                let len = buffer.len() as u64;
                DiskCounters::add(&self.counters().home_bytes_to_storage, len);
                self.journals.trace(self.disk, TraceKind::Home, log.home_offset(write.block), len);
                let ticket = self.ticket(Errand::Host(Arc::clone(&log), operation));
                self.host_in_flight += 1;
                plan.disk(DiskOperation {
                    request: None,
                    ticket: Some(ticket),
                    operation: Operation::Write,
                    offset: log.home_offset(write.block),
                    len,
                    buffers: vec![buffer],
                });
            }
        }
    }

    /// Tries again what waited for a host write.
    fn retry_behind_host(&mut self, plan: &mut Plan) {
        for waiting in std::mem::take(&mut self.behind_host) {
            let request = waiting.request;
            let Piece::Home(home, ..) = waiting.piece else { continue };
            // It takes holds of its own, so the one it waited with can go after.
            self.home_write(&home, waiting, plan);
            plan.release(request, Status::Ok);
        }
    }
}

/// Blocks that are not held.
struct OnDisks<'a> {
    journals: &'a Journals,
    log: &'a Log,
}

impl Outside for OnDisks<'_> {
    fn home(&mut self, block: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.journals.read_home(self.log, block, buffer)
    }

    fn stored(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<()> {
        self.journals.read_stored(self.log, position, buffer)
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

impl Route for JournalRoute {
    fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> io::Result<()> {
        self.memory = Some(Arc::clone(memory));
        match start {
            Start::Fresh => {
                // Whoever wrote these logs is gone: what was committed goes home before the next reader comes.
                self.journals.recover_disk(self.disk)?;
                self.journals.scan(self.disk)?;
                self.journals.disk(self.disk).set_started();
            }
            Start::Resumed => self.journals.check_resumed(self.disk)?,
        }
        self.host_failed = false;
        self.refresh_layout();
        Ok(())
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.refresh_layout();
        match request.kind {
            RequestKind::Read => self.route_read(request, plan),
            RequestKind::Flush => {
                DiskCounters::add(&self.counters().flushes, 1);
                self.trace(request.kind, TraceKind::Flush, 0, 0);
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
        self.flush_batch(plan);
        self.take_away_distrusted();
        if self.has_remote {
            self.journals.remote_logs_on(self.disk).iter().for_each(|remote| remote.end_of_pass());
        }
    }

    fn disk_done(&mut self, ticket: Ticket, result: io::Result<()>, plan: &mut Plan) {
        let Some(errand) = self.errands.remove(&ticket.0) else { return };
        match errand {
            Errand::Home(log, operation, rescan) => {
                self.journals.area.home_write_ended(log.id, operation, result.is_ok());
                // It may have been taken away since this write began.
                if !log.is_held_open() || log.is_distrusted() {
                    self.journals.disk(self.disk).set_dirty();
                }
                if log.is_emptying.load(Ordering::Acquire) {
                    // What was in the way of a host write may have been this.
                    self.drive_host_writes(plan);
                }
                if self.journals.take_scan_soon(self.disk) || rescan {
                    self.scan();
                }
            }
            Errand::Host(log, operation) => {
                self.host_in_flight -= 1;
                self.journals.area.home_write_ended(log.id, operation, result.is_ok());
                if let Err(error) = result {
                    log::error!("writing owed blocks home failed: {error}; they stay owed");
                    self.host_failed = true;
                    if log.is_emptying.swap(false, Ordering::AcqRel) {
                        log.failed_to_empty.fetch_add(1, Ordering::AcqRel);
                    }
                }
                self.retry_behind_host(plan);
                self.drive_host_writes(plan);
                if self.journals.area.has_contradiction() {
                    // The device with the log may have waited for this one.
                    self.journals.disk(log.journal_disk).wake.wake();
                }
                if self.journals.take_scan_soon(self.disk) {
                    self.scan();
                }
            }
            Errand::Stored(log, position) => {
                if result.is_ok() {
                    self.journals.area.stored(log.id, position);
                }
                self.take_away_distrusted();
            }
            Errand::Remote(log) => {
                self.journals.disk(self.disk).set_dirty();
                if let Some(remote) = &log.remote {
                    remote.stored();
                }
            }
            Errand::Plain(rescan) => {
                self.journals.disk(self.disk).set_dirty();
                if self.journals.take_scan_soon(self.disk) || rescan {
                    self.scan();
                }
            }
            Errand::Flush(covered) => {
                if result.is_ok() {
                    self.journals.disk(self.disk).set_flushed(covered);
                }
            }
        }
    }

    fn wake_descriptor(&self) -> Option<RawFd> {
        Some(self.journals.disk(self.disk).wake.descriptor())
    }

    fn hand_over(&mut self, log: LogIndex, _plan: &mut Plan) -> io::Result<bool> {
        // A block that is on its way to its own place could be read there before it has arrived.
        if self.errands.values().any(|errand| matches!(errand, Errand::Stored(..))) {
            return Ok(false);
        }
        debug_assert!(self.batch.is_empty(), "between two passes nothing waits to be held");
        self.journals.hand_over(log)
    }

    fn woken(&mut self, plan: &mut Plan) {
        self.host_failed = false;
        self.take_away_distrusted();
        if self.has_remote {
            for remote in self.journals.remote_logs_on(self.disk) {
                for (request, status) in remote.take_done() {
                    plan.release(request, status);
                }
            }
        }
        self.drive_host_writes(plan);
    }
}

impl JournalRoute {
    /// Takes logs away whose books were proven wrong, if this device may. What has to wait is tried again after the next pass,
    /// or when a home write has ended.
    fn take_away_distrusted(&mut self) {
        // A block on its way to its own place would be read there before it has arrived.
        let has_stored = || self.errands.values().any(|errand| matches!(errand, Errand::Stored(..)));
        if self.journals.area.has_contradiction() && !has_stored() {
            self.journals.distrust_on(self.disk);
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
