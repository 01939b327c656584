//! The journal's superblock as the guest writes it: a log is opened, goes on, or is closed.

use super::captured::Captured;
use super::closing::{Closing, Foreign};
use super::coverage::Flush;
use super::errand::Errand;
use super::foreign::last_written;
use super::inflight::Writer;
use super::log_stream::{LogStream, Tail, TailMove};
use super::mark::{self, Marks};
use super::notes::{Identity, Note, Notes};
use super::report::NvmCounters;
use super::work::Work;
use super::{Region, State};
use crate::foreign::is_brought;
use crate::keeper::{Side, Step, Steps, SuperblockBlock, SuperblockWritten};
use crate::log::Log;
use crate::opening::write_mark_bytes;
use block_route::{RequestId, Status};
use extfs::Allocation;
use jbd2::{Format, Superblock};
use nvm_journal::{ATTACHMENT_BYTES, Journal, Owner};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Fields of a journal superblock that change as its log goes on, and mean nothing to recovery: `s_sequence`, `s_start`,
/// `s_head` and the checksum. Offset and length.
const PASSING_FIELDS: [(usize, usize); 3] = [(0x18, 8), (0x58, 4), (0xfc, 4)];

/// The superblock itself.
fn first_bytes(block: &[u8]) -> io::Result<[u8; ATTACHMENT_BYTES]> {
    block.first_chunk().copied().ok_or_else(|| io::Error::other("the superblock is cut short"))
}

/// How many log blocks are kept of a transaction that is not complete: no more could ever be committed.
pub(super) fn copies_max(journal: &Journal<Region>) -> usize {
    journal.geometry().blocks as usize + 1024
}

/// Whether a region has room for a log.
///
/// # Errors
/// A sentence.
pub(super) fn check_room(medium: &Region, offset: u64, log_blocks: u32, block_bytes: u32) -> Result<(), String> {
    let blocks = nvm_journal::capacity(medium.bytes(), offset, block_bytes).map_err(|error| error.to_string())?;
    // jbd2 lets a transaction fill a third of its log at most.
    if blocks < log_blocks / 2 {
        return Err(format!(
            "the NVM region is too small: it holds {blocks} blocks, and a journal of {log_blocks} blocks needs {}; make it \
             larger, or the journal smaller (mke2fs -J size=, tune2fs)",
            log_blocks / 2
        ));
    }
    Ok(())
}

/// Why a log keeps what its guest is done with: the kernel gives its journal up then, and the next one replays it.
fn lost(block: u64) -> io::Error {
    io::Error::other(format!(
        "a flush of the disk has failed since block {block} was written past the journal, so the journal's version is kept"
    ))
}

/// How a log can be read that a superblock opens. A sentence when it cannot be taken.
fn judge(log: &Log, superblock: &Superblock) -> Result<Format, String> {
    let format = match superblock.format() {
        Ok(format) if format.fast_commit => {
            return Err("it may hold fast commits, which only the guest's own kernel can replay".to_owned());
        }
        Ok(format) => format,
        Err(error) => return Err(error.to_string()),
    };
    let place = &log.place;
    if superblock.block_size != place.block_bytes
        || superblock.maxlen > place.log_blocks
        || !format.contains(superblock.start)
    {
        return Err("its superblock says sizes that it cannot have where it is".to_owned());
    }
    Ok(format)
}

impl Work {
    /// The guest writes the journal's superblock.
    pub(super) fn superblock_written(
        &mut self,
        state: &mut State,
        log: &Log,
        block: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        let (request, block) = (block.request, block.content);
        let open = Superblock::decode(block).ok().filter(|superblock| !superblock.is_empty());
        let State::Held(captured) = state else { return self.open_superblock(log, open, block) };
        if open.as_ref().is_some_and(|open| Self::is_own_in_disguise(captured, open)) {
            return Err(io::Error::other(
                "the guest's journal gets fast commits, or features that are not known, in the midst of transactions that are on NVM, and \
                 that its guest's kernel alone could replay then; its superblock is refused, and the log is as it was",
            ));
        }
        let is_another = open.as_ref().is_some_and(|open| Self::is_another(captured, open));
        match open {
            Some(open) if !is_another => self.goes_on(captured, &open, block, request, steps)?,
            _ if self.closing.is_some() => {
                return Err(io::Error::other("the journal on NVM is being closed already"));
            }
            open => {
                self.try_checkpoints_anew();
                let write = (log.place_of(0)?, block.to_vec());
                if open.is_some() {
                    self.written_over(captured, request, write, Foreign::Superblock);
                } else {
                    let (offset, block) = write;
                    self.closing =
                        Some(Closing { request, offset, block, is_on_its_way: false, foreign: None, left: None });
                    self.close_instead_of_leaving();
                }
                steps.hold(request);
                self.drive(state, steps);
            }
        }
        Ok((SuperblockWritten::GoesOn, false))
    }

    /// The superblock of a log that no region has; `open` is what it says, unless that is that the log is empty.
    fn open_superblock(
        &mut self,
        log: &Log,
        open: Option<Superblock>,
        block: &[u8],
    ) -> io::Result<(SuperblockWritten, bool)> {
        match open {
            None => {
                if Superblock::decode(block).is_ok() {
                    self.area.set_foreign(log.id, false);
                }
                Ok((SuperblockWritten::Closed, true))
            }
            // It is in its own place until it is next empty.
            Some(_) if log.is_open() => Ok((SuperblockWritten::GoesOn, true)),
            Some(open) => {
                let is_taken = self.open(log, &open, block).map_err(|error| {
                    io::Error::new(error.kind(), format!("the journal cannot be taken onto NVM: {error}"))
                })?;
                // Whoever says so may be one that goes on after a suspend, and moves its tail first: what it commits is looked at still.
                let is_brought = !is_taken && log.is_brought();
                Ok((if is_brought { SuperblockWritten::Brought } else { SuperblockWritten::Opened }, !is_taken))
            }
        }
    }

    /// The log goes on: its tail may have moved.
    fn goes_on(
        &mut self,
        captured: &mut Captured,
        superblock: &Superblock,
        block: &[u8],
        request: RequestId,
        steps: &mut Steps,
    ) -> io::Result<()> {
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        let format = superblock.format().map_err(io::Error::other)?;
        let is_in_log = format == *captured.stream.format() && captured.stream.can_begin(tail);
        let leaves = if is_in_log { TailMove::Passed(tail.sequence) } else { TailMove::Anew };
        // Who begins it anew says so once more to the next worker, which has to know until then that it may have been replayed.
        if is_in_log {
            captured.goes_on_unread();
        }
        // A kernel whose superblock failed says the same again, with its error in it.
        if let Some(block) = captured.doubtful_passed_by(leaves) {
            return Err(lost(block));
        }
        self.refuse_tail_behind_lost(captured, leaves)?;
        let before = captured.stream.before(tail);
        let passed = if format == *captured.stream.format() {
            captured.stream.move_tail(tail)
        } else {
            // A kernel may turn features on when it has replayed.
            captured.stream.begin_anew(format, tail);
            TailMove::Anew
        };
        if passed == TailMove::Anew && (self.commit.is_some() || !self.may_commit()) {
            captured.notes.give_up("its guest began it anew while it committed");
            return Err(io::Error::other("the guest began its journal anew while it committed"));
        }
        // What the tail has passed is at home, and leaves the region.
        let in_flight = &self.in_flight;
        let is_some_passed = !captured.passed_by(passed, &|block| in_flight.touches(block)).is_empty();
        let is_volatile = self.passes_volatile(captured, passed);
        let mut is_mended = false;
        if passed == TailMove::Anew {
            // Where that fails, what is known here is not what its guest goes on with.
            let is_durable = self.renew_old_mark(captured).and_then(|()| match is_volatile {
                true => self.make_overwrites_durable(captured),
                false => Ok(()),
            });
            if let Err(error) = is_durable {
                captured.notes.give_up("storage has failed while its guest began it anew");
                return Err(error);
            }
            captured.notes.note(&Note::Anew(Box::new(first_bytes(block)?), tail));
            self.pass(captured, passed)?;
            is_mended = captured.begins_anew();
        } else if is_volatile
            || is_some_passed && self.is_mark_old(captured)
            || self.tail_relies_on_acknowledged(captured, passed)
        {
            // Not before what the guest wrote past its journal is durable: until then the region's version may be all there is. And not before the next mark is durable; and until they have left, the guest is not told that its tail has moved: recovery
            // would bring them back.
            let mark = self.begin_old_mark(captured)?;
            steps.hold(request);
            self.flush_for(Errand::TailFlush { request, passed, mark, before }, steps);
        } else {
            self.pass(captured, passed)?;
        }
        let differs = {
            let known = &captured.owner.attachment;
            (0..ATTACHMENT_BYTES).any(|at| {
                let is_passing = PASSING_FIELDS.iter().any(|(offset, len)| (*offset..offset + len).contains(&at));
                !is_passing && known[at] != block[at]
            })
        };
        if differs {
            captured.superblock_is(block)?;
        }
        if is_mended {
            let state = captured.state(self.home.failed_flushes() > self.home.told_failures());
            captured.notes.renew(&state);
        }
        Ok(())
    }

    /// Whether what leaves the region with the tail was overwritten by the guest, and that is not durable.
    fn passes_volatile(&self, captured: &Captured, passed: TailMove) -> bool {
        let passing = captured.passed_by(passed, &|block| self.in_flight.touches(block));
        passing.into_iter().any(|block| captured.is_last_overwritten_since(block, self.coverage.durable()))
    }

    /// A flush at once, where somebody mounts or unmounts.
    fn make_overwrites_durable(&mut self, captured: &mut Captured) -> io::Result<()> {
        self.coverage.begins(Flush::AtOnce);
        if let Err(error) = captured.log.home.file.sync_data() {
            self.flush_failed(captured);
            return Err(error);
        }
        self.coverage.ends(Flush::AtOnce, true);
        Ok(())
    }

    /// The guest's tail has passed what leaves the region.
    fn pass(&mut self, captured: &mut Captured, passed: TailMove) -> Result<(), nvm_journal::Error> {
        let before = captured.homes.len();
        if let TailMove::Passed(_) = passed {
            captured.notes.note(&Note::Tail(captured.stream.tail()));
        }
        let in_flight = &self.in_flight;
        captured.tail_moved(passed, &|block| in_flight.touches(block))?;
        NvmCounters::add(&self.nvm.counters.blocks_dropped, (before - captured.homes.len()) as u64);
        Ok(())
    }

    /// The same, once the mark with this number is durable.
    pub(super) fn tail_flushed(
        &mut self,
        captured: &mut Captured,
        request: RequestId,
        (passed, mark, before): (TailMove, u64, Vec<Tail>),
        is_ok: bool,
        steps: &mut Steps,
    ) {
        let outcome = match is_ok {
            true => self
                .end_mark(captured, mark)
                .and_then(|()| captured.doubtful_passed_by(passed).map_or(Ok(()), |block| Err(lost(block))))
                .and_then(|()| self.refuse_tail_behind_lost(captured, passed))
                .and_then(|()| {
                    let is_early = self.tail_relies_on_acknowledged(captured, passed);
                    if !is_early && !self.passes_volatile(captured, passed) {
                        return self.pass(captured, passed).map_err(io::Error::other).map(|()| true);
                    }
                    // A write has ended beside it.
                    let mark = self.begin_old_mark(captured)?;
                    self.flush_for(Errand::TailFlush { request, passed, mark, before: before.clone() }, steps);
                    Ok(false)
                }),
            false => Err(io::Error::other("flushing the disk failed, so the journal's tail cannot move")),
        };
        if let Err(error) = &outcome {
            log::error!("disk {}: {error}", self.name());
            // Its kernel is told so, and the log begins where it did.
            if let TailMove::Passed(tail) = passed {
                captured.stream.tail_stays(tail, before);
            }
        }
        match outcome {
            Ok(true) => steps.release(request, Status::Ok),
            Ok(false) => {}
            Err(_) => steps.release(request, Status::IoError),
        }
    }

    /// Opens a log, if it can be taken. False when its writes go to storage.
    fn open(&mut self, log: &Log, superblock: &Superblock, block: &[u8]) -> io::Result<bool> {
        let format = match judge(log, superblock) {
            Ok(format) => format,
            Err(reason) => {
                self.kept_on_storage(log, reason);
                return Ok(false);
            }
        };
        if is_brought(log, superblock, self.area.is_foreign(log.id))? {
            log.set_brought(true);
            return Ok(false);
        }
        if self.slot.is_some() {
            // Its guest has gone, and bringing home what it left has failed: that comes first.
            return Err(io::Error::other(
                "the NVM region holds what an earlier guest left, which could not be brought home",
            ));
        }
        let place = &log.place;
        let slot = match self.nvm.free_slot(place.log_blocks, place.block_bytes) {
            Ok(slot) => slot,
            Err(reason) => {
                self.kept_on_storage(log, reason);
                return Ok(false);
            }
        };
        let region_offset = self.nvm.slots[slot].offset;
        let nvm = Arc::clone(&self.nvm);
        let mut state = nvm.lock(slot);
        let mark = mark::first(block)?;
        let owner = Owner {
            file_system: place.file_system_uuid,
            journal: superblock.uuid,
            home_start: place.home_start,
            home_blocks: place.home_blocks,
            mark_checksum: mark::checksum(&mark),
            is_left: false,
            attachment: first_bytes(block)?,
        };
        let State::Idle(medium) = std::mem::replace(&mut *state, State::Failed) else { return Ok(false) };
        let options = self.nvm.journal_options();
        let sequence = superblock.sequence.wrapping_sub(1);
        let journal = Journal::claim(medium, region_offset, place.block_bytes, &owner, sequence, options)?;
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        let begun = Note::Begun { superblock: Box::new(owner.attachment), tail, cursor: tail, committed_at: (0, 0) };
        let identity = Identity {
            journal: superblock.uuid,
            home_start: place.home_start,
            number: mark::number(&mark).ok_or_else(|| io::Error::other("a mark of the region has no number"))?,
        };
        let mut notes = Notes::begin(nvm.directory(), identity, &[begun]);
        // First the region says whose it is, then storage says that the journal is elsewhere: a crash in between leaves a
        // region that owes nothing.
        let mut before = [0; jbd2::SUPERBLOCK_BYTES];
        let written = log
            .place_of(0)
            .and_then(|offset| log.journal.file.read_exact_at(&mut before, offset))
            .and_then(|()| write_mark_bytes(log, &mark));
        if let Err(error) = written {
            notes.remove();
            // A mark without a region is refused by every later start, and it may be there. Where it stays, the region stays
            // as well, owes nothing, and is finished by the next start.
            if write_mark_bytes(log, &before).is_ok() {
                *state = journal.give_back()?.map_or(State::Failed, State::Idle);
            }
            return Err(error);
        }
        let copies_max = copies_max(&journal);
        log::info!(
            "disk {}: the journal of the file system at byte {} is on NVM from transaction {} on (epoch {}, {} blocks)",
            self.name(),
            place.home_start,
            superblock.sequence,
            journal.epoch(),
            journal.geometry().blocks
        );
        *state = State::Held(Box::new(Captured {
            all_but_own: log.place.all_but_own(),
            log: Arc::new(log.clone()),
            stream: LogStream::new(format, tail, copies_max).remember_last(),
            journal,
            owner,
            marks: Marks::new(mark),
            homes: HashMap::new(),
            at_home: HashMap::new(),
            allocation: Allocation::default(),
            shown: None,
            is_read: false,
            doubtful: Vec::new(),
            has_failed: false,
            notes,
            resent: HashMap::new(),
        }));
        (self.slot, self.why_none) = (Some(slot), None);
        if !log.is_distrusted() {
            self.watch.opened(place, superblock);
        }
        self.forget_earlier_openings();
        self.failed_flushes = self.home.failed_flushes();
        self.checkpoints.all_began_at = Instant::now();
        Ok(true)
    }

    fn kept_on_storage(&mut self, log: &Log, reason: String) {
        log::warn!(
            "disk {}: the journal of the file system at byte {} is written to its own place on storage: {reason}",
            self.name(),
            log.place.home_start
        );
        self.why_none = Some(reason);
    }

    /// Takes a log that is being closed one step on.
    pub(super) fn drive_closing(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = state else { return };
        if self.has_lost() && self.closing.as_ref().is_some_and(|closing| closing.foreign.is_some()) {
            if captured.log.has_own_writes()
                || self.departure.phase.is_some()
                || self.early.is_writing()
                || self.checkpoints.now.is_some()
                || self.in_flight.has_any_of(Writer::Host)
            {
                return;
            }
            // Once it counts, what the guest has written home of it goes home as that of every other.
            if let Err(error) = self.make_lost_durable(captured) {
                log::error!("disk {}: {error}", self.name());
                if let Err(error) = self.withdraw_lost(captured) {
                    log::error!("disk {}: {error}", self.name());
                }
            }
        }
        if self.has_lost()
            && let Some(closing) = self.closing.take_if(|closing| !closing.is_on_its_way)
        {
            log::error!("disk {}: the journal on NVM cannot be closed: its last transaction may be lost", self.name());
            steps.release(closing.request, Status::IoError);
            return;
        }
        let Some(closing) = &self.closing else { return };
        if closing.is_on_its_way
            || captured.log.has_own_writes()
            || self.departure.phase.is_some()
            || self.commit.is_some()
            || self.early.is_writing()
            || self.checkpoints.now.is_some()
        {
            return;
        }
        if closing.foreign.is_none()
            && let Some(block) = captured.doubtful_passed_by(TailMove::Anew)
        {
            log::error!("disk {}: the journal on NVM cannot be closed: {}", self.name(), lost(block));
            steps.release(closing.request, Status::IoError);
            self.closing = None;
            return;
        }
        let request = closing.request;
        let stays_in_place = matches!(closing.foreign, Some(Foreign::Live(_))) && closing.left.is_none();
        if closing.foreign.is_none()
            && self.passes_volatile(captured, TailMove::Anew)
            && let Err(error) = self.make_overwrites_durable(captured)
        {
            log::error!("disk {}: the journal on NVM cannot be closed: {error}", self.name());
            steps.release(request, Status::IoError);
            self.closing = None;
            return;
        }
        if stays_in_place {
            let log = Arc::clone(&captured.log);
            let failed_flushes = log.journal.file.failed_flushes();
            let put = last_written(captured, &log, 0).and_then(|left| {
                self.put_live_in_place(captured)?;
                // Its superblock follows, and says so.
                log.journal.file.sync_since(failed_flushes)?;
                Ok(left)
            });
            match put {
                Ok(left) => self.closing.iter_mut().for_each(|closing| closing.left = Some(left.clone())),
                Err(error) => {
                    log::error!("disk {}: writing a journal to its own place failed: {error}", self.name());
                    self.closing = None;
                    steps.release(request, Status::IoError);
                    return;
                }
            }
        }
        // The guest says that its log is empty: what it has not written home it does not need there.
        captured.stream.forget_live();
        let tail = captured.stream.tail().sequence;
        let in_flight = &self.in_flight;
        let released = captured.tail_moved(TailMove::Passed(tail), &|block| in_flight.touches(block));
        if released.is_ok() && !captured.journal.is_empty() {
            if captured.journal.homes().all(|block| self.in_flight.touches(block)) {
                // Goes on when those writes have ended.
                return;
            }
            if !self.begin_checkpoint(captured, steps) && self.has_checkpoint_failed() {
                log::error!(
                    "disk {}: the journal on NVM cannot be closed: writing its blocks home failed",
                    self.name()
                );
                self.closing = None;
                steps.release(request, Status::IoError);
            }
            return;
        }
        let Some(closing) = &mut self.closing else { return };
        let request = closing.request;
        closing.is_on_its_way = true;
        let write = (closing.offset, closing.block.clone());
        if let Err(error) = released {
            log::error!("disk {}: the journal on NVM cannot be closed: {error}", self.name());
            self.closing = None;
            steps.release(request, Status::IoError);
            return;
        }
        if let Err(error) = self.put_in_place(captured) {
            log::error!("disk {}: writing what lies where the journal was failed: {error}", self.name());
            self.closing = None;
            steps.release(request, Status::IoError);
            return;
        }
        self.write_for(request, write, Errand::Closed, steps);
        steps.release(request, Status::Ok);
    }

    /// The superblock of a closed log is on storage.
    pub(super) fn closed(&mut self, state: &mut State, is_ok: bool, steps: &mut Steps) {
        let foreign = self.closing.take().and_then(|closing| closing.foreign);
        let State::Held(captured) = state else { return };
        // Before the region is nobody's: a mark on storage without a region is refused by every later start.
        let is_durable = is_ok && self.make_end_durable(captured);
        // What somebody else has brought is theirs, durable or not.
        if !is_ok || (!is_durable && foreign.is_none()) {
            // Storage may say by now that the log is empty, and its guest goes on in the region.
            return self.restore_mark(captured);
        }
        if let State::Held(captured) = std::mem::replace(state, State::Failed) {
            let log = Arc::clone(&captured.log);
            if foreign.is_some() {
                // What follows is somebody's, until the log is empty.
                self.area.set_foreign(log.id, true);
            }
            // The one that was brought is open, in its own place, and was never closed for who looks from another thread.
            if matches!(foreign, Some(Foreign::Superblock)) {
                log.end_emptying(None);
            } else {
                log.set_closed();
            }
            self.give_back(*captured, state);
            steps.push(Side::Home, Step::Closed);
        }
    }

    /// Says whether the superblock of a closed log is durable.
    fn make_end_durable(&mut self, captured: &mut Captured) -> bool {
        let flushed = captured.log.journal.file.sync_data();
        if let Err(error) = &flushed {
            log::error!("disk {}: flushing the superblock of a closed journal failed: {error}", self.name());
            self.flush_failed(captured);
        }
        flushed.is_ok()
    }
}
