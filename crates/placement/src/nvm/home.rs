//! The guest's own writes to homes, and its reads of them.
//!
//! A block whose latest version is in the region is not written where the guest writes that very version home: it is
//! absorbed. Where the guest writes something else, past its own journal (ext4 does so with its superblock), that goes
//! through, and the version stays for as long as the guest's log would bring it back.

use super::State;
use super::captured::{Captured, Held, HomeState, Written};
use super::inflight::Writer;
use super::report::NvmCounters;
use super::route::{Errand, NvmRoute, Waiting};
use crate::disk::DiskCounters;
use crate::layout::HomeRange;
use block_route::segments;
use block_route::{Buffer, DiskOperation, Operation, Plan, RequestId, RequestKind, Status};
use std::ops::Range;
use std::sync::Arc;

/// What becomes of one block of a home write.
enum Decision {
    /// Acknowledged, not written.
    Absorb,
    /// Written as the guest gave it; whether that is the latest version.
    Through(bool),
    /// A part of a block whose rest is in the region only: written whole, put together.
    Whole(Vec<u8>),
}

/// The part of a block that a write covers.
struct Covered<'a> {
    block: u64,
    /// Bytes of the block.
    bytes: Range<usize>,
    /// What is written there; nothing when that is zeros.
    given: Option<&'a [u8]>,
    rescan: bool,
}

impl NvmRoute {
    /// A write, discard or zeroing inside the home of an open log.
    pub(super) fn home_write(&mut self, state: &mut State, home: &HomeRange, waiting: Waiting, plan: &mut Plan) {
        let State::Held(captured) = state else {
            self.pass_on(&waiting, plan);
            return;
        };
        let block_bytes = u64::from(home.block_bytes);
        let range = waiting.piece.range();
        let (start, end) = (range.start - home.start, range.end - home.start);
        let blocks = start / block_bytes..end.div_ceil(block_bytes);
        if self.in_flight.overlaps(&blocks, Some(Writer::Host)) {
            plan.hold(waiting.request);
            self.behind.push(waiting);
            return;
        }
        if waiting.kind == RequestKind::Discard {
            self.discard(captured, &waiting, &blocks, start.div_ceil(block_bytes)..end / block_bytes, plan);
            return;
        }
        let mut decisions = Vec::with_capacity((blocks.end - blocks.start) as usize);
        for block in blocks.clone() {
            let first = (block * block_bytes).max(start);
            let last = ((block + 1) * block_bytes).min(end);
            let given = (waiting.kind == RequestKind::Write)
                .then(|| segments::gather(&segments::part(&waiting.slices, first - start, last - first)));
            let bytes = (first - block * block_bytes) as usize..(last - block * block_bytes) as usize;
            let covered = Covered { block, bytes, given: given.as_deref(), rescan: waiting.rescan };
            match self.decide(captured, &covered, plan) {
                Ok(Some(decision)) => decisions.push(decision),
                Ok(None) => {
                    // A commit is in the way, or the region is full: when that is over it is asked again.
                    plan.hold(waiting.request);
                    self.behind.push(waiting);
                    return;
                }
                Err(error) => {
                    log::error!("disk {}: {error}", self.name());
                    plan.fail(waiting.request);
                    return;
                }
            }
        }
        self.write_decided(captured, &waiting, blocks.start, decisions, plan);
    }

    /// What becomes of one block. Nothing when it has to wait.
    fn decide(
        &mut self,
        captured: &mut Captured,
        covered: &Covered<'_>,
        plan: &mut Plan,
    ) -> Result<Option<Decision>, nvm_journal::Error> {
        let block = covered.block;
        let block_bytes = captured.block_bytes() as usize;
        let is_whole = covered.bytes.len() == block_bytes;
        let whole = covered.given.filter(|_| is_whole);
        let same = if covered.rescan || !self.nvm.options.delayed_checkpoint {
            Decision::Through(true)
        } else {
            Decision::Absorb
        };
        if let Some((held, latest)) = captured.homes.get(&block).zip(captured.journal.latest(block)) {
            if whole == Some(latest) {
                return Ok(Some(same));
            }
            if held.home != HomeState::Same || is_whole {
                return Ok(Some(Decision::Through(false)));
            }
            let mut content = latest.to_vec();
            match covered.given {
                Some(given) => content[covered.bytes.clone()].copy_from_slice(given),
                None => content[covered.bytes.clone()].fill(0),
            }
            return Ok(Some(Decision::Whole(content)));
        }
        let Some(known) = captured.at_home.get(&block).copied() else { return Ok(Some(Decision::Through(false))) };
        if whole.is_some_and(|whole| self.nvm.digest(whole) == known.digest) && !self.in_flight.touches(block) {
            return Ok(Some(same));
        }
        if !self.may_commit() {
            // That log will not be there to bring it back.
            captured.at_home.remove(&block);
            return Ok(Some(Decision::Through(false)));
        }
        // The guest's log still holds what is at home now, and would bring it back: so it has to be held again.
        // (Not beside a transaction, though it may not have begun to be stored: for a moment the region has the next number.)
        if captured.journal.has_pending() || self.commit.is_some() {
            return Ok(None);
        }
        if captured.journal.room() == 0 {
            captured.journal.collect()?;
        }
        if captured.journal.room() == 0 {
            if self.checkpoint.is_some() || self.begin_checkpoint(captured, plan) {
                return Ok(None);
            }
            log::warn!("disk {}: block {block} is overwritten, and the NVM region has no room for it", self.name());
            captured.at_home.remove(&block);
            return Ok(Some(Decision::Through(false)));
        }
        let mut content = vec![0; block_bytes];
        let journals = Arc::clone(&self.journals);
        captured.read_home(journals.disk(self.disk).file.for_reading(), block, &mut content).map_err(|source| {
            nvm_journal::Error::Failed {
                what: format!("reading block {block}, which is about to be overwritten"),
                source,
            }
        })?;
        captured.journal.restore(block, &content).inspect_err(|_| captured.has_failed = true)?;
        captured.at_home.remove(&block);
        captured.homes.insert(block, Held { sequence: known.sequence, home: HomeState::Other, overwrites: 0 });
        NvmCounters::add(&self.nvm.counters.blocks_restored, 1);
        Ok(Some(Decision::Through(false)))
    }

    fn write_decided(
        &mut self,
        captured: &mut Captured,
        waiting: &Waiting,
        first: u64,
        decisions: Vec<Decision>,
        plan: &mut Plan,
    ) {
        let mut run: Option<Range<u64>> = None;
        let mut same = Vec::new();
        for (block, decision) in (first..).zip(decisions) {
            if let Some(held) = captured.homes.get_mut(&block) {
                held.home = match decision {
                    Decision::Absorb | Decision::Through(true) => HomeState::Same,
                    Decision::Through(false) | Decision::Whole(_) => {
                        held.overwrites = held.overwrites.wrapping_add(1);
                        HomeState::Other
                    }
                };
            }
            captured.allocation.changed(block, None);
            if let Decision::Through(is_same) = decision {
                // Of two writes of the guest's that are under way together nobody knows which comes last.
                if is_same && !self.in_flight.touches(block) {
                    same.extend(captured.written(block));
                }
                run = Some(run.map_or(block..block + 1, |run| run.start..block + 1));
                continue;
            }
            if let Some(run) = run.take() {
                self.write_run(captured, waiting, run, std::mem::take(&mut same), plan);
            }
            match decision {
                Decision::Whole(content) => self.write_whole(captured, waiting, block, content, plan),
                _ => {
                    NvmCounters::add(&self.nvm.counters.writes_absorbed, 1);
                    NvmCounters::add(&self.nvm.counters.bytes_absorbed, captured.block_bytes());
                }
            }
        }
        if let Some(run) = run {
            self.write_run(captured, waiting, run, same, plan);
        }
    }

    /// Passes a run of blocks on as the guest gave it.
    fn write_run(
        &mut self,
        captured: &Captured,
        waiting: &Waiting,
        blocks: Range<u64>,
        same: Vec<Written>,
        plan: &mut Plan,
    ) {
        let range = waiting.piece.range();
        let from = captured.log.home_offset(blocks.start).max(range.start);
        let to = captured.log.home_offset(blocks.end).min(range.end);
        let buffers = if waiting.slices.is_empty() {
            Vec::new()
        } else {
            let slices = segments::part(&waiting.slices, from - range.start, to - from);
            slices.into_iter().map(Buffer::Slice).collect()
        };
        let operation = match waiting.kind {
            RequestKind::Discard => Operation::Discard,
            RequestKind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
            _ => Operation::Write,
        };
        if operation == Operation::Write {
            DiskCounters::add(&self.counters().home_bytes_to_storage, to - from);
        }
        let is_held = blocks.clone().any(|block| captured.homes.contains_key(&block));
        blocks.clone().for_each(|block| self.early.take_back(block));
        let errand =
            Errand::Through { request: waiting.request, blocks: blocks.clone(), same, rescan: waiting.rescan, is_held };
        self.submit(waiting, errand, (blocks, Writer::Guest), is_held, (operation, from, to - from, buffers), plan);
    }

    /// Writes a block that was put together.
    fn write_whole(&mut self, captured: &Captured, waiting: &Waiting, block: u64, content: Vec<u8>, plan: &mut Plan) {
        let len = content.len() as u64;
        DiskCounters::add(&self.counters().home_bytes_to_storage, len);
        let blocks = block..block + 1;
        let errand = Errand::Through {
            request: waiting.request,
            blocks: blocks.clone(),
            same: Vec::new(),
            rescan: waiting.rescan,
            is_held: true,
        };
        let write = (Operation::Write, captured.log.home_offset(block), len, vec![Buffer::Bytes(Arc::from(content))]);
        self.submit(waiting, errand, (blocks, Writer::Host), true, write, plan);
    }

    fn submit(
        &mut self,
        waiting: &Waiting,
        errand: Errand,
        (blocks, writer): (Range<u64>, Writer),
        is_held: bool,
        (operation, offset, len, buffers): (Operation, u64, u64, Vec<Buffer>),
        plan: &mut Plan,
    ) {
        let ticket = self.ticket(errand);
        self.in_flight.begin(ticket.0, blocks, writer);
        if is_held {
            plan.hold(waiting.request);
        }
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: Some(ticket),
            operation,
            offset,
            len,
            buffers,
        });
    }

    /// The guest no longer cares for what is in `whole`; `blocks` are all that the range touches.
    fn discard(
        &mut self,
        captured: &mut Captured,
        waiting: &Waiting,
        blocks: &Range<u64>,
        whole: Range<u64>,
        plan: &mut Plan,
    ) {
        let gone: Vec<u64> = captured.homes.keys().copied().filter(|block| whole.contains(block)).collect();
        NvmCounters::add(&self.nvm.counters.blocks_dropped, gone.len() as u64);
        captured.at_home.retain(|block, _| !whole.contains(block));
        captured.allocation.forget();
        if let Err(error) = captured.release(&gone) {
            log::error!("disk {}: {error}", self.name());
            plan.fail(waiting.request);
            return;
        }
        self.write_run(captured, waiting, blocks.clone(), Vec::new(), plan);
    }

    /// A write to homes has ended. What it has overwritten and the guest's log has left is let go, once that is durable.
    pub(super) fn through_done(
        &mut self,
        captured: &Captured,
        (request, blocks, is_held): (RequestId, Range<u64>, bool),
        same: Vec<Written>,
        is_ok: bool,
        plan: &mut Plan,
    ) {
        if is_ok {
            self.settled.extend(same);
        }
        if !is_held {
            return;
        }
        let is_late = |block: &u64| {
            captured
                .homes
                .get(block)
                .is_some_and(|held| held.home == HomeState::Other && captured.is_past(held.sequence))
                && !self.in_flight.touches(*block)
        };
        let late: Vec<u64> = if is_ok { blocks.filter(is_late).collect() } else { Vec::new() };
        if late.is_empty() {
            plan.release(request, Status::Ok);
        } else {
            let covered = self.journals.disk(self.disk).to_flush().unwrap_or(0);
            self.flush_for(Errand::LateFlush { request, late, covered }, None, plan);
        }
    }

    /// What overwrote these blocks is durable.
    pub(super) fn late_flushed(
        &mut self,
        captured: &mut Captured,
        request: RequestId,
        late: Vec<u64>,
        is_ok: bool,
        plan: &mut Plan,
    ) {
        let is_late = |block: &u64| {
            captured
                .homes
                .get(block)
                .is_some_and(|held| held.home == HomeState::Other && captured.is_past(held.sequence))
        };
        let gone: Vec<u64> = late.into_iter().filter(|block| is_late(block)).collect();
        let is_ok = is_ok && captured.release(&gone).is_ok();
        NvmCounters::add(&self.nvm.counters.blocks_dropped, gone.len() as u64);
        plan.release(request, if is_ok { Status::Ok } else { Status::IoError });
    }

    /// A read inside the home of an open log: from the region what is there, the rest from storage.
    pub(super) fn home_read(&mut self, state: &mut State, home: &HomeRange, waiting: Waiting, plan: &mut Plan) {
        let State::Held(captured) = state else {
            self.storage_read(&waiting, waiting.piece.range(), plan);
            return;
        };
        let block_bytes = u64::from(home.block_bytes);
        let range = waiting.piece.range();
        let blocks = (range.start - home.start) / block_bytes..(range.end - home.start).div_ceil(block_bytes);
        let is_on_storage = |block: u64| captured.visible(block).is_none();
        if blocks
            .clone()
            .any(|block| is_on_storage(block) && self.in_flight.overlaps(&(block..block + 1), Some(Writer::Host)))
        {
            plan.hold(waiting.request);
            self.behind.push(waiting);
            return;
        }
        let mut run: Option<Range<u64>> = None;
        for block in blocks {
            let start = home.start + block * block_bytes;
            let part = start.max(range.start)..(start + block_bytes).min(range.end);
            match captured.visible(block) {
                Some(content) => {
                    if let Some(run) = run.take() {
                        self.storage_read(&waiting, run, plan);
                    }
                    NvmCounters::add(&self.nvm.counters.reads_answered, 1);
                    self.answer(
                        &waiting,
                        &part,
                        &content[(part.start - start) as usize..(part.end - start) as usize],
                        plan,
                    );
                }
                None => run = Some(run.map_or(part.clone(), |run| run.start..part.end)),
            }
        }
        if let Some(run) = run {
            self.storage_read(&waiting, run, plan);
        }
    }

    /// Has storage fill a part of a read.
    pub(super) fn storage_read(&self, waiting: &Waiting, part: Range<u64>, plan: &mut Plan) {
        let slices = segments::part(&waiting.slices, part.start - waiting.piece.range().start, part.end - part.start);
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: None,
            operation: Operation::Read,
            offset: part.start,
            len: part.end - part.start,
            buffers: slices.into_iter().map(Buffer::Slice).collect(),
        });
    }

    /// Copies bytes of ours into a part of a read's guest memory.
    pub(super) fn answer(&self, waiting: &Waiting, part: &Range<u64>, bytes: &[u8], plan: &mut Plan) {
        let slices = segments::part(&waiting.slices, part.start - waiting.piece.range().start, part.end - part.start);
        let mut at = 0;
        for slice in &slices {
            if let Some(memory) = &self.memory
                && let Err(error) = memory.prepare_write(slice)
            {
                log::error!("disk {}: a read fails: {error}", self.name());
                return plan.fail(waiting.request);
            }
            slice.copy_in(0, &bytes[at..at + slice.len()]);
            at += slice.len();
        }
    }
}
