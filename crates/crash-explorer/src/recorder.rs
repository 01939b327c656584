//! A route that writes down what goes through it.

use crate::recording::{Contents, Event, Issue, Kind, PAGE_BYTES, Piece, RecordedDisk, Recording};
use block_route::{Plan, PlanAction, Request, RequestKind, Route, Start, Ticket};
use guest_memory::{MemorySlice, MemoryTable, PageId};
use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

struct State {
    recording: Recording,
    contents: Contents,
    next: u32,
    ended: bool,
}

/// Where the routes of all disks, and whoever hears acknowledgements, write to.
#[derive(Clone)]
pub struct Recorder(Arc<Mutex<State>>);

impl Recorder {
    /// For a guest with this many pages of memory.
    pub fn new(scenario: &str, memory_pages: u32) -> Self {
        let recording = Recording::new(scenario, memory_pages);
        Recorder(Arc::new(Mutex::new(State { recording, contents: Contents::default(), next: 0, ended: false })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Adds a disk as it is now.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn add_disk(&self, image: &Path) -> io::Result<usize> {
        let file = std::fs::File::open(image)?;
        let size_bytes = file.metadata()?.len();
        let state = &mut *self.lock();
        let mut base = Vec::new();
        let mut block = [0; PAGE_BYTES];
        for number in 0..size_bytes / PAGE_BYTES as u64 {
            file.read_exact_at(&mut block, number * PAGE_BYTES as u64)?;
            if block != [0; PAGE_BYTES] {
                base.push((number as u32, state.contents.intern(&block)));
            }
        }
        state.recording.disks.push(RecordedDisk { size_bytes, base });
        Ok(state.recording.disks.len() - 1)
    }

    /// Ring pages are known.
    pub fn ring_pages(&self, pages: &[PageId]) {
        let known = &mut self.lock().recording.ring_pages;
        known.extend(pages.iter().map(|page| page.0));
        known.sort_unstable();
        known.dedup();
    }

    /// Work up to `number` on `stream` was acknowledged.
    pub fn acknowledged(&self, stream: &str, number: u64) {
        let state = &mut *self.lock();
        if state.ended {
            return;
        }
        let streams = &mut state.recording.streams;
        let index = streams.iter().position(|known| known == stream).unwrap_or_else(|| {
            streams.push(stream.to_owned());
            streams.len() - 1
        });
        state.recording.events.push(Event::Acknowledged(index as u8, number));
    }

    /// Ends recording: what comes after this is not written down.
    pub fn end(&self) {
        self.lock().ended = true;
    }

    /// What was recorded.
    pub fn take(&self) -> Recording {
        let state = &mut *self.lock();
        state.ended = true;
        let mut recording = std::mem::replace(&mut state.recording, Recording::new("", 0));
        recording.set_contents(std::mem::take(&mut state.contents));
        recording
    }
}

/// The route of one disk, written down.
pub struct RecordingRoute<R> {
    inner: R,
    disk: u8,
    recorder: Recorder,
    tickets: HashMap<u64, u32>,
}

impl<R: Route> RecordingRoute<R> {
    /// Writes down what goes through `inner`, the route of the disk with this index, which must not use tickets.
    pub fn new(inner: R, disk: usize, recorder: Recorder) -> Self {
        RecordingRoute { inner, disk: disk as u8, recorder, tickets: HashMap::new() }
    }
}

fn pieces(slice: &MemorySlice, contents: Option<&mut Contents>) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = 0;
    let mut contents = contents;
    while at < slice.len() {
        let offset = (slice.page_offset() + at) % PAGE_BYTES;
        let len = (PAGE_BYTES - offset).min(slice.len() - at);
        let part = slice.sub(at, len);
        let content = contents.as_deref_mut().map(|contents| {
            let mut bytes = vec![0; len];
            part.copy_out(0, &mut bytes);
            contents.intern(&bytes)
        });
        pieces.push(Piece { page: part.page().0, offset: offset as u16, len: len as u16, content });
        at += len;
    }
    pieces
}

impl<R: Route> Route for RecordingRoute<R> {
    fn waits_for_others(&self, start: Start) -> Option<String> {
        self.inner.waits_for_others(start)
    }

    fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> io::Result<()> {
        self.inner.started(start, memory)
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        let kind = match request.kind {
            RequestKind::Read => Kind::Read,
            RequestKind::Write => Kind::Write,
            RequestKind::Flush => Kind::Flush,
            RequestKind::Discard => Kind::Discard,
            RequestKind::WriteZeroes { unmap } => Kind::WriteZeroes(unmap),
        };
        let id = {
            let state = &mut *self.recorder.lock();
            let id = state.next;
            if !state.ended {
                state.next += 1;
                let mut segments = Vec::new();
                for slice in request.segments {
                    let contents = (kind == Kind::Write).then_some(&mut state.contents);
                    segments.push(pieces(slice, contents));
                }
                let (offset, len) = (request.offset, request.len);
                let issue = Issue { disk: self.disk, id, kind, offset, len, segments };
                state.recording.events.push(Event::Issue(issue));
            }
            id
        };
        let before = plan.actions.len();
        self.inner.route(request, plan);
        for action in &mut plan.actions[before..] {
            if let PlanAction::Disk(operation) = action {
                operation.ticket = Some(Ticket(u64::from(id)));
                self.tickets.insert(u64::from(id), id);
            }
        }
    }

    fn end_of_pass(&mut self, plan: &mut Plan) {
        self.inner.end_of_pass(plan);
        let state = &mut *self.recorder.lock();
        if !state.ended && matches!(state.recording.events.last(), Some(Event::Issue(_))) {
            state.recording.events.push(Event::EndOfPass(self.disk));
        }
    }

    fn disk_done(&mut self, ticket: Ticket, _result: io::Result<()>, _plan: &mut Plan) {
        if let Some(id) = self.tickets.remove(&ticket.0) {
            let state = &mut *self.recorder.lock();
            if !state.ended {
                state.recording.events.push(Event::Done(id));
            }
        }
    }

    fn wake_descriptor(&self) -> Option<RawFd> {
        self.inner.wake_descriptor()
    }

    fn woken(&mut self, plan: &mut Plan) {
        self.inner.woken(plan);
    }

    fn stopped(&mut self) {
        self.inner.stopped();
    }
}
