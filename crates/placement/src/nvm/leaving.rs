//! Leaving the region while the guest runs: its log is handed over to its own place on storage ([`crate::hand_over`] says how that
//! is for logs in memory).
//!
//! What the region holds goes home, at first while the guest goes on committing, then with nothing more committed. When all
//! of it is durable at home, the log blocks of the transaction that the guest is in the midst of go to their own places, and are
//! flushed; then the superblock on storage says that the log begins with that transaction, durably; then the region is
//! given back. Log writes that come meanwhile are answered when they are in their own places.
//!
//! Its guest may close it at any moment of that. Until its superblock is on its way, it is closed in the region. From then on what the guest says
//! waits until the region is given back, and is written after that: it is the last word on the log, and nothing of ours follows it there but log blocks,
//! which nobody asks for any more. Where the superblock or its flush fails, the log is on NVM again, and is closed there. A device that begins anew
//! meets none of this half done: it begins when nothing is under way, and from the superblock to the end of its flush something is.
//!
//! It must never: answer a log write that is nowhere; say on storage that the log is there while the region holds a block
//! that storage lacks; change what the guest sees. What it has written past its journal stays as it wrote it, though a replay of
//! its complete log, which is no more, would have taken that back.
//!
//! Failure story: an error, or a kill, before the superblock on storage has changed leaves the log on NVM, with more of it home.
//! Between that and the giving back, the region holds nothing, and says so to whoever recovers from it. When
//! it is not known whether the superblock has changed, it is made the mark that it was; if that fails too, nothing more is
//! committed.

use super::State;
use super::captured::Captured;
use super::errand::Errand;
use super::leaving_state::{Leaving, Left};
use super::versions::HomeState;
use super::work::Work;
use crate::keeper::{self, Side, Step, Steps};
use crate::opening::write_mark_bytes;
use block_route::Status;
use jbd2::SuperblockEdit;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Log blocks that go to their places in one piece at most.
const RUN_BYTES: usize = 1 << 20;

impl Work {
    /// Takes a log that shall leave one step on. True when it has left.
    pub(super) fn leave(&mut self, state: &mut State, steps: &mut Steps) -> io::Result<keeper::Leaving> {
        if let Some(reason) = self.departure.failure.take() {
            return Err(io::Error::other(reason));
        }
        if let State::Held(captured) = state
            && self.departure.phase.is_none()
            && self.closing.is_none()
        {
            self.departure.phase = Some(Leaving::Gathering);
            self.checkpoints.has_failed = false;
            self.begin_checkpoint(captured, steps);
        }
        self.drive(state, steps);
        if matches!(state, State::Held(_)) || matches!(self.departure.phase, Some(Leaving::Rest(_))) {
            return Ok(keeper::Leaving::UnderWay);
        }
        // It was closed meanwhile, or never came here.
        Ok(keeper::Leaving::HasLeft)
    }

    /// A log that shall leave stays after all, if it has not left yet.
    pub(super) fn stay(&mut self, state: &mut State, steps: &mut Steps) {
        use Leaving::{Draining, Flushing, Gathering, Writing};
        // Why an attempt failed is nothing to who begins the next.
        self.departure.failure = None;
        if matches!(self.departure.phase, Some(Gathering | Draining | Writing(_) | Flushing(..))) {
            self.departure.phase = None;
            self.drive(state, steps);
        }
    }

    fn cannot_leave(&mut self, reason: &str) {
        log::error!("disk {}: the journal stays on NVM: {reason}", self.name());
        self.departure.phase = None;
        self.departure.failure = Some(reason.to_owned());
    }

    /// Whether transactions count that are complete: not while the log is about to be elsewhere.
    pub(super) fn may_commit(&self) -> bool {
        self.stays_in_region() && !self.is_distrusted
    }

    /// Whether what the guest's log would bring back has to be held.
    pub(super) fn stays_in_region(&self) -> bool {
        matches!(self.departure.phase, None | Some(Leaving::Gathering))
    }

    /// The guest closes its log. If nothing of it has been handed over to storage yet, it stays on NVM until then, and lives
    /// where it was wished from the next mount on.
    pub(super) fn close_instead_of_leaving(&mut self) {
        self.departure.failure = None;
        if matches!(self.departure.phase, Some(Leaving::Gathering | Leaving::Draining)) {
            self.departure.phase = None;
        }
    }

    /// Takes a log that leaves as far as it gets.
    pub(super) fn drive_leaving(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = state else { return };
        if captured.has_failed && self.departure.phase.is_some() {
            self.cannot_leave("the region has failed");
            return;
        }
        if matches!(self.departure.phase, Some(Leaving::Gathering)) && self.checkpoints.now.is_none() {
            self.departure.phase = Some(Leaving::Draining);
        }
        if !matches!(self.departure.phase, Some(Leaving::Draining))
            || self.commit.is_some()
            || self.early.is_writing()
            || self.checkpoints.now.is_some()
        {
            return;
        }
        if captured.homes.values().any(|held| held.home != HomeState::Other) {
            if !self.begin_checkpoint(captured, steps) && self.checkpoints.has_failed {
                self.cannot_leave("writing its blocks home failed");
            }
            return;
        }
        if captured.homes.keys().any(|block| self.in_flight.touches(*block)) {
            return;
        }
        if captured.log.has_own_writes() {
            // Of an attempt that was given up: it would not be known which block lands last.
            return;
        }
        self.departure.left = Left { attempt: self.departure.left.attempt + 1, ..Left::default() };
        if captured.homes.keys().any(|block| captured.is_doubtful(*block)) {
            self.cannot_leave("a flush of the disk has failed since the guest wrote past its journal");
            return;
        }
        let writes = self.write_open_end(captured, &Errand::LeavingLog(self.departure.left.attempt), steps);
        self.departure.phase = Some(Leaving::Writing(writes));
        self.open_end_written(captured, steps);
    }

    /// Sends the log blocks that are not committed, and were not sent before, to their own places. Gives the number of writes.
    fn write_open_end(&mut self, captured: &Captured, errand: &Errand, steps: &mut Steps) -> usize {
        let mut blocks: Vec<(u64, u32, &Arc<[u8]>)> = captured
            .stream
            .copies()
            .filter(|(position, _)| !self.departure.left.positions.contains(position))
            .filter_map(|(position, block)| Some((captured.log.offset_of(position)?, position, block)))
            .collect();
        blocks.sort_unstable_by_key(|(offset, ..)| *offset);
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (offset, position, block) in blocks {
            self.departure.left.positions.insert(position);
            match runs.last_mut() {
                Some((first, run)) if *first + run.len() as u64 == offset && run.len() < RUN_BYTES => {
                    run.extend_from_slice(block);
                }
                _ => runs.push((offset, block.to_vec())),
            }
        }
        let count = runs.len();
        for (offset, run) in runs {
            captured.log.state.own_writes.fetch_add(1, Ordering::AcqRel);
            self.write(Side::Journal, offset, run, errand.clone(), steps);
        }
        count
    }

    /// A log block is in its place.
    pub(super) fn leaving_log_done(&mut self, state: &mut State, attempt: u64, is_ok: bool, steps: &mut Steps) {
        if attempt != self.departure.left.attempt {
            return;
        }
        self.departure.left.has_failed |= !is_ok;
        if let (Some(Leaving::Writing(left)), State::Held(captured)) = (&mut self.departure.phase, state) {
            *left -= 1;
            self.open_end_written(captured, steps);
        }
    }

    fn open_end_written(&mut self, captured: &mut Captured, steps: &mut Steps) {
        if !matches!(self.departure.phase, Some(Leaving::Writing(0))) {
            return;
        }
        if self.departure.left.has_failed {
            self.cannot_leave("writing log blocks to their places failed");
            return;
        }
        let is_still = |block: &&u64| !self.in_flight.touches(**block);
        let written = captured.homes.keys().filter(is_still).filter_map(|block| captured.written(*block)).collect();
        // An image of before does not have what the guest wrote there.
        let mark = match self.begin_old_mark(captured) {
            Ok(mark) => mark,
            Err(error) => {
                return self.cannot_leave(&format!("writing the mark of the NVM region anew failed: {error}"));
            }
        };
        self.departure.phase = Some(Leaving::Flushing(written, mark));
        self.flush_for(Errand::LeavingFlush(self.departure.left.attempt), steps);
    }

    /// The log blocks are durable, and what the guest wrote past its journal: nothing more is owed.
    fn leaving_flushed(&mut self, captured: &mut Captured, is_ok: bool, steps: &mut Steps) {
        let Some(Leaving::Flushing(written, mark)) = &mut self.departure.phase else { return };
        let (written, mark) = (std::mem::take(written), *mark);
        if !is_ok || self.departure.left.is_in_doubt {
            self.cannot_leave("flushing the disk failed");
            return;
        }
        if let Err(error) = self.end_mark(captured, mark) {
            self.cannot_leave(&error.to_string());
            return;
        }
        let gone: Vec<u64> = written
            .iter()
            .filter(|written| captured.written(written.block) == Some(**written))
            .map(|written| written.block)
            // What the guest has put back meanwhile was absorbed: only the region has it.
            .filter(|block| captured.homes.get(block).is_some_and(|held| held.home == HomeState::Other))
            .collect();
        if let Err(error) = captured.release(&gone) {
            self.cannot_leave(&error.to_string());
            return;
        }
        if !captured.journal.is_empty() {
            // Written to again meanwhile.
            self.departure.phase = Some(Leaving::Draining);
            return;
        }
        let mut block = captured.owner.attachment.to_vec();
        let cursor = captured.stream.cursor();
        let edited = SuperblockEdit::new(&mut block).map(|mut edit| {
            edit.start(cursor.position).sequence(cursor.sequence).seal();
        });
        match (edited, captured.log.offset_of(0)) {
            (Ok(()), Some(offset)) => {
                self.departure.phase = Some(Leaving::Superblock);
                captured.log.state.own_writes.fetch_add(1, Ordering::AcqRel);
                self.write(Side::Journal, offset, block, Errand::LeavingSuperblock, steps);
            }
            _ => self.cannot_leave("its superblock is not one"),
        }
    }

    /// A flush of the disk has failed, whosever.
    pub(super) fn leaving_flush_failed(&mut self) {
        self.departure.left.is_in_doubt |= self.departure.phase.is_some();
    }

    /// The superblock that says where the log is has arrived, or not.
    fn leaving_superblock_done(&mut self, captured: &mut Captured, is_ok: bool, steps: &mut Steps) {
        if is_ok {
            self.departure.phase = Some(Leaving::LastFlush);
            self.flush_for(Errand::LeavingLastFlush, steps);
        } else {
            self.mark_again(captured);
        }
    }

    /// Whether storage says that the log is there is not known. It must not while anything is committed to the region.
    fn mark_again(&mut self, captured: &mut Captured) {
        self.restore_mark(captured);
        self.cannot_leave("writing its superblock failed");
    }

    /// The same, whatever it was written for.
    pub(super) fn restore_mark(&mut self, captured: &mut Captured) {
        match write_mark_bytes(&captured.log, captured.marks.durable()) {
            // Storage has the last one that the region was told of.
            Ok(()) => captured.marks.forget_next(),
            Err(error) => {
                log::error!("disk {}: marking the journal as being on NVM again failed: {error}", self.name());
                captured.has_failed = true;
            }
        }
    }

    /// A flush of a leaving log has ended: that of an attempt, or the last.
    pub(super) fn leaving_flush_done(
        &mut self,
        state: &mut State,
        attempt: Option<u64>,
        is_ok: bool,
        steps: &mut Steps,
    ) {
        let State::Held(captured) = state else { return };
        match (attempt, is_ok) {
            (Some(attempt), _) if attempt != self.departure.left.attempt => {}
            (Some(_), _) => self.leaving_flushed(captured, is_ok, steps),
            (None, false) => self.mark_again(captured),
            (None, true) if self.departure.left.is_in_doubt => self.mark_again(captured),
            // What it holds would be lost with it, and by then only the guest could say what that was.
            (None, true) if !captured.journal.is_empty() => {
                self.restore_mark(captured);
                self.cannot_leave("its region still holds blocks, which is a fault of amberlog's");
            }
            (None, true) => self.left_region(state, steps),
        }
    }

    pub(super) fn leaving_superblock_written(&mut self, state: &mut State, is_ok: bool, steps: &mut Steps) {
        if let State::Held(captured) = state {
            self.leaving_superblock_done(captured, is_ok, steps);
        }
    }

    /// Storage says, durably, that the log is there.
    fn left_region(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = std::mem::replace(state, State::Failed) else { return };
        steps.push(Side::Home, Step::OnStorage { from: captured.stream.cursor().sequence });
        self.departure.left.has_failed = false;
        let writes = self.write_open_end(&captured, &Errand::LeavingRest, steps);
        self.departure.phase = Some(Leaving::Rest(writes));
        self.early.forget();
        self.settled.clear();
        let log = Arc::clone(&captured.log);
        self.give_back(*captured, state);
        // A guest that closes its log meanwhile closes one that is on storage.
        if let Some(closing) = self.closing.take() {
            self.write_for(closing.request, (closing.offset, closing.block), Errand::PassedOn, steps);
            steps.release(closing.request, Status::Ok);
            // What somebody else has written over it is a part of the disk, and the log is as that says.
            if closing.foreign.is_none() {
                log.set_closed();
                steps.push(Side::Home, Step::Closed);
            }
        }
        self.end_rest(steps);
    }

    /// What came while the log left is in its place.
    pub(super) fn leaving_rest_done(&mut self, is_ok: bool, steps: &mut Steps) {
        self.departure.left.has_failed |= !is_ok;
        if let Some(Leaving::Rest(left)) = &mut self.departure.phase {
            *left -= 1;
            self.end_rest(steps);
        }
    }

    fn end_rest(&mut self, steps: &mut Steps) {
        if matches!(self.departure.phase, Some(Leaving::Rest(0))) {
            let status = if self.departure.left.has_failed { Status::IoError } else { Status::Ok };
            self.held.drain(..).for_each(|request| steps.release(request, status));
            self.departure.phase = None;
        }
    }
}
