//! What lies between the guest and its disks: requests, their holds, and storage that works when it is told to.

use super::death::Sent;
use super::{BLOCK, Committing, Guest};
use block_route::{Buffer, DiskOperation, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Status};
use guest_memory::MemorySlice;
use placement::PlacementKind;
use std::os::unix::fs::FileExt;

/// An operation on its way.
pub(super) struct Pending {
    pub(super) number: u64,
    pub(super) operation: DiskOperation,
    pub(super) bytes: Vec<u8>,
    pub(super) covered: u64,
}

/// Whether a request was sent before.
pub(super) enum Turn {
    First,
    Again,
}

impl Guest {
    /// Sends a request; what it writes may be on the ideal disk from now on.
    pub(super) fn send(&mut self, kind: RequestKind, offset: u64, slice: Option<MemorySlice>) -> u32 {
        self.send_for(Turn::First, kind, offset, slice)
    }

    /// The same, or one that was sent before and not answered.
    pub(super) fn send_for(&mut self, turn: Turn, kind: RequestKind, offset: u64, slice: Option<MemorySlice>) -> u32 {
        self.next_request += 1;
        let request = self.next_request;
        self.tell(|| {
            let position = self.log_at.iter().position(|at| *at == offset);
            format!("guest: {request} {kind:?} of block {}, in the log {position:?}", offset / BLOCK as u64)
        });
        self.holds.insert(request, 0);
        if kind == RequestKind::Flush {
            self.flushes.insert(request, self.ideal.now());
        }
        let segments: Vec<MemorySlice> = slice.into_iter().collect();
        let len = segments.iter().map(|slice| slice.len() as u64).sum();
        self.sent.insert(request, Sent { kind, offset, segments: segments.clone() });
        let mut plan = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        let asked = Request { id: RequestId(request), kind, offset, len, segments: &segments };
        match turn {
            Turn::First => self.route.route(&asked, &mut plan),
            Turn::Again => self.route.route_again(&asked, &mut plan),
        }
        self.route.end_of_pass(&mut plan);
        self.carry_out(plan);
        self.check();
        request
    }

    /// Sends a write of a home block, or of a part of it.
    pub(super) fn send_home(&mut self, block: u64, from: usize, bytes: &[u8]) -> u32 {
        let offset = block * BLOCK as u64 + from as u64;
        let slice = self.page(bytes);
        // The name of the request that comes next.
        self.ideal.write(u64::from(self.next_request + 1), offset, bytes);
        self.cache.get_mut(&block).expect("known")[from..from + bytes.len()].copy_from_slice(bytes);
        self.sent_home.entry(block).or_default().push(self.cache[&block].clone());
        self.clean.insert(block);
        let request = self.send(RequestKind::Write, offset, Some(slice));
        if self.holds.contains_key(&request) {
            self.busy.insert(block, request);
        }
        request
    }

    pub(super) fn carry_out(&mut self, plan: Plan) {
        if self.has_died() {
            return;
        }
        self.note_own_flushes();
        // What the region went through before storage was told anything.
        for region in std::mem::take(&mut *self.images.lock().expect("no panic under this lock")) {
            self.judge(&region);
        }
        for action in plan.actions {
            self.tell(|| told(&action));
            match action {
                PlanAction::Disk(operation) => {
                    if let Some(request) = operation.request {
                        *self.holds.get_mut(&request.0).expect("a live request") += 1;
                    }
                    self.next_operation += 1;
                    let number = self.next_operation;
                    let bytes = bytes_of(&operation);
                    if operation.operation == Operation::Write {
                        self.ours.write(number, operation.offset, &bytes);
                    }
                    self.pending.push(Pending { number, operation, bytes, covered: self.ours.now() });
                }
                PlanAction::Hold(request) => *self.holds.get_mut(&request.0).expect("a live request") += 1,
                PlanAction::Release(request, status) => {
                    assert!(
                        status == Status::Ok || self.has_broken || self.has_failed_one,
                        "request {} fails for nothing",
                        request.0
                    );
                    if status != Status::Ok {
                        self.failed.insert(request.0);
                    }
                    *self.holds.get_mut(&request.0).expect("a live request") -= 1;
                }
            }
        }
        let done: Vec<u32> = self.holds.iter().filter(|(_, holds)| **holds == 0).map(|(id, _)| *id).collect();
        for request in done {
            self.holds.remove(&request);
            self.sent.remove(&request);
            let covered = self.flushes.remove(&request);
            // What failed may have happened or not, and stays so.
            if self.failed.contains(&request) {
                self.ideal.lost(u64::from(request));
            } else {
                self.ideal.ended(u64::from(request));
                if let Some(covered) = covered {
                    self.ideal.flushed(covered);
                }
            }
            self.busy.retain(|_, by| *by != request);
        }
        let is_committed = self
            .committing
            .as_ref()
            .is_some_and(|committing| committing.requests.iter().all(|request| !self.holds.contains_key(request)));
        if is_committed
            && self.is_leaving
            && let Some(committing) = &mut self.committing
            && !committing.is_flushing
            && !committing.requests.iter().any(|request| self.failed.contains(request))
        {
            // A commit block on storage counts when it is flushed.
            committing.is_flushing = true;
            committing.requests = vec![self.next_request + 1];
            self.send(RequestKind::Flush, 0, None);
            return;
        }
        // One that nobody could flush may count or not.
        let is_known = |committing: &Committing| {
            !committing.is_flushing || !committing.requests.iter().any(|request| self.failed.contains(request))
        };
        if is_committed
            && self.committing.as_ref().is_some_and(is_known)
            && let Some(committing) = self.committing.take()
            && !committing.requests.iter().any(|request| self.failed.contains(request))
        {
            self.committed = committing.logged.sequence;
            if self.is_pipelined() {
                self.ideal_then = self.ideal.clone();
                self.sent_before_last = self.sent_home.clone();
                self.before_last = self.replayed(&self.superblocks[0], self.committed.wrapping_sub(1));
            }
            for (block, becomes) in committing.becomes {
                self.used_as.insert(block, becomes);
            }
            for block in &committing.logged.blocks {
                self.sent_home.remove(block);
            }
            self.live.push(committing.logged);
            if self.is_pipelined() && self.random.below(4) == 0 {
                // Its appends may not be flushed yet.
                self.recover();
            }
        }
    }

    /// Whether a write to this byte is on its way.
    pub(super) fn is_on_its_way(&self, offset: u64) -> bool {
        self.pending.iter().any(|pending| {
            pending.operation.operation == Operation::Write
                && (pending.operation.offset..pending.operation.offset + pending.operation.len).contains(&offset)
        })
    }

    fn is_to_fail(&mut self, operation: &DiskOperation) -> bool {
        // Once the log has left, what fails of it are the guest's own writes.
        if operation.request.is_some() || self.journals.logs()[0].placement == PlacementKind::Storage {
            return false;
        }
        let is_now = self.fails_after == Some(0);
        self.has_failed_one |= is_now;
        self.fails_after = self.fails_after.and_then(|after| after.checked_sub(1));
        is_now
    }

    /// One operation of storage ends, whichever. A flush of another kernel fails where none of this kernel's own is under way beside it:
    /// that one would be told, and its kernel would go no further.
    pub fn end_one(&mut self) {
        let is_alone = self.flushes.keys().all(|request| self.strangers.contains(request));
        let may_end = |pending: &Pending| {
            is_alone || !pending.operation.request.is_some_and(|request| self.strangers.contains(&request.0))
        };
        let ready: Vec<usize> = (0..self.pending.len()).filter(|index| may_end(&self.pending[*index])).collect();
        if ready.is_empty() {
            return;
        }
        let index = ready[self.random.below(ready.len() as u64) as usize];
        let Pending { number, operation, bytes, covered } = self.pending.swap_remove(index);
        self.tell(|| format!("storage ends {:?} of block {}", operation.operation, operation.offset / BLOCK as u64));
        let is_lost = match operation.operation {
            Operation::Write => self.has_broken,
            Operation::Flush => self.has_broken && self.are_flushes_broken,
            _ => false,
        } || self.is_to_fail(&operation);
        let is_strangers = operation.request.is_some_and(|request| self.strangers.contains(&request.0));
        if is_strangers {
            self.has_failed_one = true;
            self.ours.flush_failed();
            self.ideal.flush_failed();
        }
        let is_lost = is_lost || is_strangers;
        match operation.operation {
            Operation::Write if is_lost => self.ours.lost(number),
            Operation::Flush if is_lost => {}
            Operation::Write => {
                self.file.write_all_at(&bytes, operation.offset).expect("written");
                self.ours.ended(number);
            }
            Operation::Flush => self.ours.flushed(covered),
            Operation::Read => {
                let mut at = operation.offset;
                for buffer in &operation.buffers {
                    let Buffer::Slice(slice) = buffer else { panic!("reads fill guest memory") };
                    let mut content = vec![0; slice.len()];
                    self.file.read_exact_at(&mut content, at).expect("read");
                    slice.copy_in(0, &content);
                    at += slice.len() as u64;
                }
            }
            other => panic!("{other:?} was not asked for"),
        }
        let mut plan = Plan::default();
        if let Some(request) = operation.request {
            plan.release(request, if is_lost { Status::IoError } else { Status::Ok });
        }
        let mut more = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        if let Some(ticket) = operation.ticket {
            let result = if is_lost { Err(std::io::Error::other("the disk is broken")) } else { Ok(()) };
            self.route.disk_done(ticket, result, &mut more);
        }
        // Holds first: the request must not end between.
        more.actions.append(&mut plan.actions);
        self.carry_out(more);
        self.check();
        if is_strangers {
            // What ended while that flush was under way may be lost, too: the next one hears of it as well, and it is theirs again.
            self.stranger_flushes();
        }
    }

    pub(super) fn wait_for(&mut self, request: u32) {
        for _ in 0..10_000 {
            if !self.holds.contains_key(&request) {
                return;
            }
            assert!(!self.pending.is_empty(), "request {request} waits, and storage has nothing to do");
            self.end_one();
        }
        panic!("request {request} does not end");
    }

    /// Some of what is on its way ends.
    pub fn storage_works(&mut self) {
        for _ in 0..self.random.below(6) {
            self.end_one();
        }
    }

    /// From now on every write fails, those that are on their way as well, and flushes too or not. The guest begins no
    /// transaction any more.
    pub fn storage_breaks(&mut self) {
        self.has_broken = true;
        self.are_flushes_broken = self.random.below(2) == 0;
    }

    /// All of it.
    pub fn settle(&mut self) {
        while !self.pending.is_empty() {
            self.end_one();
        }
        assert!(self.holds.is_empty(), "requests wait for nothing: {:?}", self.holds);
    }
}

/// An action in words.
fn told(action: &PlanAction) -> String {
    match action {
        PlanAction::Disk(DiskOperation { operation, offset, len, request, .. }) => {
            let (first, count) = (offset / BLOCK as u64, len / BLOCK as u64);
            format!("  {operation:?} of {count} blocks from {first}, for {request:?}")
        }
        other => format!("  {other:?}"),
    }
}

fn bytes_of(operation: &DiskOperation) -> Vec<u8> {
    let mut bytes = Vec::new();
    if operation.operation == Operation::Write {
        for buffer in &operation.buffers {
            match buffer {
                Buffer::Slice(slice) => {
                    let at = bytes.len();
                    bytes.resize(at + slice.len(), 0);
                    slice.copy_out(0, &mut bytes[at..]);
                }
                Buffer::Bytes(more) => bytes.extend_from_slice(more),
            }
        }
    }
    bytes
}
