//! One pass: everything the rings have, routed as one batch.

use super::Worker;
use crate::chain::{ChainError, StatusPlace, total_len};
use crate::config_space::{RANGES_MAX, bit};
use crate::counters::add;
use crate::request::{Ask, ID_BYTES, Range, parse};
use crate::ring::RingError;
use crate::tracker::{ChainKind, ChainState};
use block_route::{Request, RequestKind, Route, Status};
use guest_memory::MemorySlice;
use std::os::fd::AsFd;
use std::time::Instant;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

/// Requests of the route in flight at once: beyond, the guest's requests stay in their rings.
const PARTS_MAX: usize = 1024;
/// Operations that wait for the kernel: beyond, the guest's requests stay in their rings.
const WAITING_MAX: usize = 256;
/// Requests taken in one pass.
const PASS_MAX: usize = 256;
/// Bytes of their buffers, after which no more is taken in one pass: each of their pages is looked at, and whoever asks the worker
/// something waits for the end of the pass.
const PASS_BYTES_MAX: u64 = 256 << 20;

impl<R: Route + ?Sized> Worker<R> {
    /// Whether so much is under way that nothing more is taken.
    pub(super) fn congested(&self) -> bool {
        self.tracker.live_parts() + RANGES_MAX as usize > PARTS_MAX || self.engine.waiting() > WAITING_MAX
    }

    /// Takes what the rings have. Returns whether there was anything.
    pub(super) fn pass(&mut self) -> bool {
        if self.active.is_empty() || self.congested() {
            return false;
        }
        let mut taken = 0;
        self.pass_bytes = 0;
        // One look at the clock for all that this pass takes.
        self.pass_began = Instant::now();
        // Before the route hears of a start: it recovers then, and scans, which is nothing for disks that are held.
        if self.debt(self.pass_began).is_some() || !self.may_take() {
            return false;
        }
        let (mut position, mut behind_last) = (0, 0);
        while position < self.active.len() {
            let index = self.active[position];
            let before = taken;
            match self.take_from(index, &mut taken) {
                Ok(()) => {
                    position += 1;
                    behind_last = if taken > before { position } else { behind_last };
                }
                // The ring leaves the list, so that the next one is now at this position.
                Err(error) => self.break_ring(index, &error),
            }
        }
        if taken == 0 {
            return false;
        }
        // What stopped this pass (a throttle, its bounds) is not to stop it before the same rings each time.
        let behind_last = behind_last.min(self.active.len());
        self.active.rotate_left(behind_last);
        self.has_taken = true;
        add(&self.counters.passes, 1);
        self.route.end_of_pass(&mut self.plan);
        self.carry_out();
        true
    }

    fn take_from(&mut self, index: u16, taken: &mut usize) -> Result<(), RingError> {
        let has_enough = |worker: &Self, taken| taken >= PASS_MAX || worker.pass_bytes >= PASS_BYTES_MAX;
        while !has_enough(self, *taken) && !self.congested() && self.debt(self.pass_began).is_none() {
            let ring = &mut self.rings[usize::from(index)];
            let Some(running) = ring.running.as_mut().filter(|_| !ring.broken) else { return Ok(()) };
            let Some((head, again)) = running.pop()? else { return Ok(()) };
            running.hush()?;
            self.mark_used(index);
            if again {
                add(&self.counters.resubmitted_requests, 1);
            }
            *taken += 1;
            self.rings[usize::from(index)].in_flight += 1;
            self.take_request(index, head)?;
        }
        Ok(())
    }

    pub(super) fn take_request(&mut self, index: u16, head: u16) -> Result<(), RingError> {
        let ring = &self.rings[usize::from(index)];
        let running = ring.running.as_ref().expect("the chain was taken from it");
        let indirect = self.features & bit(VIRTIO_RING_F_INDIRECT_DESC) != 0;
        let epoch = ring.epoch;
        let status_place = match self.chain.walk(&running.table, &running.descriptors, head, indirect) {
            Ok(status_place) => status_place,
            Err(error) => {
                // Nobody can be told how it ended, and given back it would read as done: the ring ends here.
                self.rings[usize::from(index)].in_flight -= 1;
                return Err(RingError::Chain(head, error));
            }
        };
        // The pages that are used for this request, asked for before anything is done for it: here it can wait.
        let (table, chain) = (&running.table, &self.chain);
        self.pass_bytes += total_len(&chain.readable) + total_len(&chain.writable);
        let prepared =
            chain.writable.iter().chain([&status_place.byte]).try_for_each(|slice| table.prepare_write(slice));
        let prepared = prepared.and_then(|()| chain.readable.iter().try_for_each(|slice| table.prepare_read(slice)));
        if let Err(reason) = prepared {
            self.wait_for_room(index, epoch, head, &reason);
            return Ok(());
        }
        if let Some(address) = self.chain.unreachable {
            self.unreachable(index, head, address);
        }
        let limits = self.limits();
        let ask = parse(&mut self.chain, limits, &mut self.ranges);
        let ask = if self.refused { Ask::Finish(Status::IoError) } else { ask };
        match ask {
            Ask::Finish(status) => self.answer((index, epoch), head, &status_place.byte, status, 0, &[]),
            Ask::Identity => {
                let (status, written) = match self.write_identity(index) {
                    Some(written) => (Status::Ok, written),
                    None => (Status::IoError, 0),
                };
                let buffers = std::mem::take(&mut self.chain.writable);
                self.answer((index, epoch), head, &status_place.byte, status, written, &buffers);
                self.chain.writable = buffers;
            }
            Ask::Read { offset, len } => {
                add(&self.counters.read_requests, 1);
                add(&self.counters.read_bytes, len);
                self.route_one((index, epoch), head, status_place, Range { kind: RequestKind::Read, offset, len });
            }
            Ask::Write { offset, len } => {
                add(&self.counters.write_requests, 1);
                add(&self.counters.write_bytes, len);
                self.route_one((index, epoch), head, status_place, Range { kind: RequestKind::Write, offset, len });
            }
            Ask::Flush => {
                add(&self.counters.flush_requests, 1);
                let flush = Range { kind: RequestKind::Flush, offset: 0, len: 0 };
                self.route_one((index, epoch), head, status_place, flush);
            }
            Ask::Ranges => self.route_ranges((index, epoch), head, status_place),
        }
        Ok(())
    }

    /// Without a negotiated flush the disk has no write cache: what changes it is durable before it is answered.
    fn write_through(&self) -> bool {
        self.features & bit(VIRTIO_BLK_F_FLUSH) == 0
    }

    fn route_one(&mut self, ring: (u16, u32), head: u16, status_place: StatusPlace, range: Range) {
        let Range { kind, offset, len } = range;
        // A flush is nothing that a disk is worn or kept busy by alone, and whoever waits for it waits for what is bounded.
        if let Some(throttle) = self.throttle.as_ref().filter(|_| kind != RequestKind::Flush) {
            throttle.take(len);
        }
        let flush_after = kind == RequestKind::Write && self.write_through();
        let readback_len = if kind == RequestKind::Read { len as u32 } else { 0 };
        let chain_kind = match kind {
            RequestKind::Read => ChainKind::Read,
            RequestKind::Write => ChainKind::Write,
            RequestKind::Flush => ChainKind::Flush,
            RequestKind::Discard | RequestKind::WriteZeroes { .. } => ChainKind::Discard,
        };
        let places = (status_place, self.chain.regions);
        let since = (chain_kind, self.pass_began);
        let is_again = self.is_again(ring.0, head);
        let chain = self.tracker.add_chain(ring, head, places, readback_len, flush_after, since);
        if self.gate.is_some() && kind == RequestKind::Read {
            self.tracker.note_written(chain, &self.chain.writable);
        }
        let id = self.tracker.add_part(chain);
        let segments: &[MemorySlice] = match kind {
            RequestKind::Read => &self.chain.writable,
            RequestKind::Write => &self.chain.readable,
            _ => &[],
        };
        let request = Request { id, kind, offset, len, segments };
        if is_again {
            self.route.route_again(&request, &mut self.plan);
        } else {
            self.route.route(&request, &mut self.plan);
        }
    }

    fn route_ranges(&mut self, ring: (u16, u32), head: u16, status_place: StatusPlace) {
        let flush_after = self.write_through();
        if let Some(throttle) = &self.throttle {
            // Storage may have no way to zero but to write zeros, and nobody knows before it does. What is let go is never written.
            let zeroed = self.ranges.iter().filter(|range| range.kind != RequestKind::Discard);
            throttle.take(zeroed.map(|range| range.len).sum());
        }
        let places = (status_place, self.chain.regions);
        let since = (ChainKind::Discard, self.pass_began);
        let chain = self.tracker.add_chain(ring, head, places, 0, flush_after, since);
        if let Some(range) = self.ranges.first() {
            let discard = range.kind == RequestKind::Discard;
            add(if discard { &self.counters.discard_requests } else { &self.counters.write_zeroes_requests }, 1);
        }
        let is_again = self.is_again(ring.0, head);
        for range in &self.ranges {
            let id = self.tracker.add_part(chain);
            let Range { kind, offset, len } = *range;
            let request = Request { id, kind, offset, len, segments: &[] };
            if is_again {
                self.route.route_again(&request, &mut self.plan);
            } else {
                self.route.route(&request, &mut self.plan);
            }
        }
    }

    /// Whether a request was taken before.
    fn is_again(&self, index: u16, head: u16) -> bool {
        self.rings[usize::from(index)].running.as_ref().is_some_and(|running| running.is_again(head))
    }

    /// A flush on behalf of a chain whose writes are done.
    pub(super) fn route_flush_after(&mut self, chain: u32) {
        let id = self.tracker.add_part(chain);
        let flush = Request { id, kind: RequestKind::Flush, offset: 0, len: 0, segments: &[] };
        self.route.flush_after(&flush, &mut self.plan);
    }

    /// Writes the serial number into the chain's writable segments. Returns the bytes written; nothing when they must not be.
    fn write_identity(&mut self, index: u16) -> Option<u32> {
        let Some(running) = &self.rings[usize::from(index)].running else { return Some(0) };
        let mut done = 0;
        for slice in &self.chain.writable {
            let part = slice.sub(0, slice.len().min(ID_BYTES - done));
            running.table.prepare_write(&part).ok()?;
            part.copy_in(0, &self.identity[done..done + part.len()]);
            done += part.len();
            if done == ID_BYTES {
                break;
            }
        }
        debug_assert!(done as u64 <= total_len(&self.chain.writable));
        Some(done as u32)
    }

    /// Answers a chain: status byte, used ring.
    pub(super) fn answer(
        &mut self,
        (index, epoch): (u16, u32),
        head: u16,
        status_byte: &MemorySlice,
        status: Status,
        readback_len: u32,
        buffers: &[MemorySlice],
    ) {
        let (code, written) = match status {
            Status::Ok => (VIRTIO_BLK_S_OK, readback_len),
            Status::IoError => {
                add(&self.counters.failed_requests, 1);
                (VIRTIO_BLK_S_IOERR, 0)
            }
            Status::Unsupported => {
                add(&self.counters.unsupported_requests, 1);
                (VIRTIO_BLK_S_UNSUPP, 0)
            }
        };
        let ring = &mut self.rings[usize::from(index)];
        // An answer that comes after its ring was stopped (storage hung) stays marked in the in-flight region.
        let Some(running) = ring.running.as_mut().filter(|_| ring.epoch == epoch) else { return };
        ring.in_flight -= 1;
        // The request has waited for these pages before. If they hold something committed again, the guest has put it there
        // while it waited for an answer.
        let prepared = running
            .table
            .prepare_write(status_byte)
            .and_then(|()| if ring.is_in_the_way { running.prepare_writes() } else { Ok(()) });
        let is_prepared = prepared.map_err(|error| RingError::NoRoom(head, error)).map(|()| {
            status_byte.copy_in(0, &[code as u8]);
        });
        // Before anybody can see that it is done.
        self.mark_written(index, status_byte, buffers);
        let running = self.rings[usize::from(index)].running.as_mut();
        let pushed = is_prepared
            .and_then(|()| running.map_or(Ok(()), |running| running.push_used(head, written.saturating_add(1))));
        self.mark_used(index);
        if let Err(error) = pushed {
            self.break_ring(index, &error);
        }
    }

    /// Answers a request that has been done, or failed.
    pub(super) fn answer_chain(&mut self, state: &ChainState, status: Status) {
        let ring = (state.ring, state.ring_epoch);
        if state.regions.is_some() {
            return self.answer(ring, state.head, &state.status_place.byte, status, state.readback_len, &state.written);
        }
        // Memory of it was taken away meanwhile: what was read went to where the guest does not look any more, and so
        // would the status.
        let address = state.status_place.address;
        let running = self.rings[usize::from(state.ring)].running.as_ref();
        match running.and_then(|running| running.table.byte(address)) {
            Some(byte) => self.answer(ring, state.head, &byte, Status::IoError, 0, &state.written),
            None => {
                let ring = &mut self.rings[usize::from(state.ring)];
                if ring.running.is_some() && ring.epoch == state.ring_epoch {
                    ring.in_flight -= 1;
                    self.break_ring(state.ring, &RingError::Chain(state.head, ChainError::Status(address)));
                }
            }
        }
    }

    /// A request names memory that nobody was told of; it is failed.
    fn unreachable(&mut self, index: u16, head: u16, address: u64) {
        let what =
            format!("request {head} of queue {index} is failed: a buffer at guest address {address:#x} lies outside");
        self.malformed(&format!("{what} the guest memory that the VMM has handed over"));
        self.memory_is_missing(address);
    }

    /// The guest uses memory that the VMM has not handed over. Said once: it goes on for as long as the guest does.
    pub(super) fn memory_is_missing(&mut self, address: u64) {
        if std::mem::replace(&mut self.missed_memory, true) {
            return;
        }
        let sentence = format!(
            "the guest uses memory (at guest address {address:#x}) that the VMM has not handed over, and its requests with \
             buffers there fail: memory that is plugged in while a VM runs has to be a memory-backend-file or \
             memory-backend-memfd with share=on, because no other process can reach a memory-backend-ram"
        );
        log::error!("disk {}: {sentence}", self.name);
        self.observer.fault(&sentence);
    }

    pub(super) fn malformed(&mut self, what: &str) {
        add(&self.counters.malformed_chains, 1);
        if let Some(count) = self.log_limit.next() {
            log::warn!("disk {}: {what} ({count} so far)", self.name);
        }
    }

    /// Interrupts the guest for what was answered since the last time, once a ring.
    pub(super) fn interrupt_guests(&mut self) {
        for position in 0..self.running.len() {
            let index = self.running[position];
            self.interrupt_guest(index);
        }
    }

    pub(super) fn interrupt_guest(&mut self, index: u16) {
        let ring = &mut self.rings[usize::from(index)];
        let Some(running) = &mut ring.running else { return };
        match running.wants_interrupt() {
            Ok(true) => {
                if let Some(call) = &ring.call {
                    add(&self.counters.interrupts, 1);
                    if let Err(error) = rustix::io::write(call.as_fd(), &1u64.to_ne_bytes()) {
                        log::debug!("disk {}: interrupting the guest failed: {error}", self.name);
                    }
                }
            }
            Ok(false) => {}
            Err(error) => self.break_ring(index, &error),
        }
    }
}
