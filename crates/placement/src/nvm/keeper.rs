//! The keeper of a log that goes to a region of NVM: what the guest does reaches the machines of this directory, and what they want
//! done goes out as steps.
//!
//! [`Work`] is what they share. The log as it is known, and the region, are [`State`], which others look at, too (reports, recovery).
//!
//! Lock order: the work, then the region's state, then (where something is read into guest memory, or somebody brings a log along)
//! the area's.

use super::captured::Captured;
use super::checkpoint_state::Checkpoint;
use super::closing::Foreign;
use super::coverage::Flush;
use super::errand::Errand;
use super::foreign::last_written;
use super::inflight::Writer;
use super::notes::Note;
use super::work::Work;
use super::{NvmDisk, State};
use crate::disk::Disk;
use crate::keeper::{
    self, BlockContent, Finished, HomeChange, HomePart, HomeRead, HomeVerdict, Keeper, LogBlock, LogRead, LogVerdict,
    OddVerdict, Side, Steps, SuperblockBlock, SuperblockWritten, TakenUp, Task, ToSettle,
};
use crate::keepers::{finish_on_storage, leave};
use crate::left_to_guest;
use crate::log::Log;
use crate::stored::Says;
use block_route::{RequestId, RequestKind, segments};
use guest_memory::MemorySlice;
use jbd2::{SUPERBLOCK_BYTES, Superblock, SuperblockEdit};
use journal_area::JournalArea;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

impl Work {
    /// Copies a log block until its transaction is complete.
    fn log_write(&mut self, state: &mut State, log: &Log, block: LogBlock<'_>) -> LogVerdict {
        let State::Held(captured) = state else {
            if let BlockContent::Guest(slices) = block.content {
                self.note_foreign(log, slices);
            }
            return LogVerdict::Store;
        };
        if self.closing.as_ref().is_some_and(|closing| closing.is_on_its_way) {
            // Its place is a part of the disk again.
            return LogVerdict::Store;
        }
        let content = match block.content {
            BlockContent::Guest(slices) => segments::gather(slices),
            BlockContent::Bytes(bytes) => bytes,
        };
        captured.goes_on_unread();
        if captured.is_sent_again(block.position, &content, block.is_again) {
            self.pass_requests.push(block.request);
            return LogVerdict::Kept;
        }
        let is_over = self.closing.is_none() && captured.stream.is_live(block.position);
        let over = log.offset_of(block.position).filter(|_| is_over).map(|offset| (offset, content.clone()));
        let content: Arc<[u8]> = Arc::from(content);
        self.watch.log_write(block.position, &content);
        if captured.has_failed || captured.stream.write(block.position, Arc::clone(&content)).is_err() {
            if !captured.has_failed {
                log::error!("disk {}: a transaction is larger than the NVM region; make it larger", self.name());
            }
            return LogVerdict::Fail;
        }
        captured.notes.note(&Note::LogBlock(block.position, content));
        self.departure.log_block_came(block.position);
        match over {
            Some(over) => {
                self.written_over(captured, block.request, over, Foreign::Live(block.position));
                LogVerdict::Held
            }
            None => {
                self.pass_requests.push(block.request);
                LogVerdict::Kept
            }
        }
    }

    /// A read of a log block: whoever mounts replays what it finds there ([`Captured::show`]).
    fn log_read(&mut self, state: &mut State, position: u32, buffer: &mut [u8]) -> io::Result<LogRead> {
        let State::Held(captured) = state else { return Ok(LogRead::Stored) };
        if position != 0 {
            buffer.copy_from_slice(&captured.shown_block(&self.home.file, position)?);
            return Ok(LogRead::Copied);
        }
        // Who only looks is not to cost the guest what it was told of, and who mounts is not to begin without it.
        self.make_lost_durable(captured)?;
        if self.commit.is_some() {
            self.is_waited_for = true;
            return Ok(LogRead::Wait);
        }
        captured.show().map_err(io::Error::other)?;
        buffer.fill(0);
        buffer[..captured.owner.attachment.len()].copy_from_slice(&captured.owner.attachment);
        let tail = captured.shown_tail();
        if let Ok(mut edit) = SuperblockEdit::new(buffer) {
            edit.start(tail.position).sequence(tail.sequence).seal();
        }
        Ok(LogRead::Copied)
    }

    /// The guest's flush begins: what it wrote home as the region has it leaves the region when it has ended, and what a checkpoint
    /// wrote. It reaches the disk because something was written there, which the guest may refer to in what it commits next: so the
    /// next mark goes with it though nothing leaves the region.
    fn flush_begins(&mut self, captured: &mut Captured, request: RequestId) {
        self.coverage.begins(Flush::Guest(request));
        let has_written = self.checkpoints.now.as_ref().is_some_and(Checkpoint::has_written);
        let is_mark_due = self.is_mark_old(captured) && !captured.has_failed;
        if self.settled.is_empty() && !has_written && !is_mark_due {
            return;
        }
        let settled = std::mem::take(&mut self.settled);
        match self.begin_old_mark(captured) {
            Ok(mark) => {
                self.flushing.insert(request, (settled, mark));
            }
            // They stay there.
            Err(error) => log::error!("disk {}: {error}", self.name()),
        }
    }

    /// A flush of the disk has failed, whosever: what was written until now may not be on storage, and no later flush says so.
    /// Whoever waits for one to make that durable has to write it again, or to keep it.
    pub(super) fn flush_failed(&mut self, captured: &mut Captured) {
        self.failed_flushes = self.home.failed_flushes();
        captured.flush_failed(self.coverage.durable());
        // Whether those that are under way cover what this one should have is not known.
        self.coverage.flush_failed();
        // They stay in the region until a checkpoint brings them home again.
        self.settled.clear();
        self.flushing.clear();
        for errand in self.errands.values_mut() {
            if let Errand::Through { same, .. } = errand {
                same.clear();
            }
        }
        match &mut self.commit {
            Some(commit) => commit.flush_failed(),
            None => self.early.forget(),
        }
        if let Some(checkpoint) = &mut self.checkpoints.now {
            checkpoint.flush_failed();
        }
        self.leaving_flush_failed();
    }

    fn flush_ended(&mut self, captured: &mut Captured, request: RequestId, is_ok: bool) {
        self.coverage.ends(Flush::Guest(request), is_ok);
        let Some((settled, mark)) = self.flushing.remove(&request).filter(|_| is_ok) else { return };
        match self.end_mark(captured, mark) {
            Ok(()) => {
                self.release_home(captured, &settled);
                self.release_durable(captured);
            }
            Err(error) => log::error!("disk {}: {error}", self.name()),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct InRegion {
    nvm: Arc<NvmDisk>,
    work: Mutex<Work>,
}

impl InRegion {
    /// The keeper of a log whose disk, with the log and its homes, has regions.
    pub fn new(home: &Arc<Disk>, area: &Arc<JournalArea>, nvm: &Arc<NvmDisk>) -> Self {
        let work = Work::new(Arc::clone(home), Arc::clone(area), Arc::clone(nvm));
        InRegion { nvm: Arc::clone(nvm), work: Mutex::new(work) }
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().expect("no panic under this lock")
    }

    /// The guest is gone: what the region has for the log goes home, unless nothing is in it any more, and the region is given back.
    fn give_region_back(&self, log: &Log) -> io::Result<Option<recovery::Report>> {
        let mut work = self.work();
        work.begin_anew();
        let recovered = self.nvm.recover(work.slot, &log.home.file).map_err(io::Error::other)?;
        work.slot = None;
        Ok(recovered)
    }

    /// Looks at the work and the region that it has, if it has one.
    fn with<T>(&self, look: impl FnOnce(&mut Work, &mut State) -> T) -> T {
        let mut work = self.work();
        match work.slot {
            Some(slot) => {
                let mut state = self.nvm.lock(slot);
                if let State::Held(captured) = &mut *state
                    && work.home.failed_flushes() > work.failed_flushes
                {
                    // One that nobody's request asked for, another file system's on the same disk, say.
                    work.flush_failed(captured);
                }
                let looked = look(&mut work, &mut state);
                if let State::Held(captured) = &mut *state
                    && captured.has_failed
                    && !captured.notes.is_failure_noted
                {
                    captured.notes.note(&Note::Failed);
                    captured.notes.is_failure_noted = true;
                }
                looked
            }
            None => look(&mut work, &mut State::Failed),
        }
    }

    fn is_captured(&self) -> bool {
        self.with(|_, state| matches!(state, State::Held(_)))
    }

    /// Something has ended: everything that waits goes on.
    fn ended(&self, number: u64, is_ok: bool, steps: &mut Steps) {
        self.with(|work, state| {
            let Some(errand) = work.errands.remove(&number) else { return };
            work.errand_done(state, number, errand, is_ok, steps);
            work.drive(state, steps);
            work.ask_again(steps);
        });
    }
}

impl Keeper for InRegion {
    fn watches_home(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn counts_transactions(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        self.with(|work, state| {
            work.refresh(state, log);
            let written = work.superblock_written(state, log, block, steps)?;
            let why = Superblock::decode(block.content).ok().and_then(|superblock| work.watch.tail_moves(&superblock));
            work.distrust(state, log, why, steps);
            Ok(written)
        })
    }

    fn log_write(&self, log: &Log, block: LogBlock<'_>) -> LogVerdict {
        self.with(|work, state| work.log_write(state, log, block))
    }

    fn odd_log_write(&self, log: &Log, kind: RequestKind, slices: &[MemorySlice]) -> OddVerdict {
        self.with(|work, state| {
            let is_over = work.closing.as_ref().is_some_and(|closing| closing.is_on_its_way);
            match (state, kind) {
                (State::Held(_), _) if is_over => OddVerdict::Store,
                (State::Held(_), RequestKind::Discard) => OddVerdict::Ignore,
                (State::Held(_), _) => OddVerdict::Patch,
                _ => {
                    work.note_foreign(log, slices);
                    OddVerdict::Store
                }
            }
        })
    }

    fn patched(&self, log: &Log, position: u32, part: Range<usize>, slices: &[MemorySlice]) -> io::Result<Vec<u8>> {
        let mut content = self.with(|_, state| match state {
            State::Held(captured) => last_written(captured, log, position),
            State::Idle(_) | State::Failed => {
                let mut content = vec![0; log.place.block_bytes as usize];
                log.read_stored(position, &mut content).map(|()| content)
            }
        })?;
        if slices.is_empty() {
            content[part].fill(0);
        } else {
            content[part].copy_from_slice(&segments::gather(slices));
        }
        Ok(content)
    }

    fn doubt(&self, log: &Log, why: String, steps: &mut Steps) {
        self.with(|work, state| work.distrust(state, log, Some(why), steps));
    }

    fn doubt_at_the_end(&self, log: &Log, why: String) {
        left_to_guest::say(&self.work().area, log, &why);
    }

    fn is_written_past(&self, log: &Log) -> io::Result<bool> {
        Ok(!log.is_distrusted() && self.with(|_, state| matches!(state, State::Held(held) if held.is_written_past())))
    }

    fn puts_in_place(&self, log: &Log) -> io::Result<bool> {
        log.take_mark();
        self.with(|work, state| work.leave_in_place(state))?;
        self.give_region_back(log)?;
        Ok(true)
    }

    fn settle_pass(&self, log: &Log, steps: &mut Steps) {
        self.with(|work, state| {
            work.refresh(state, log);
            let why = work.watch.settle(&log.place);
            work.distrust(state, log, why, steps);
            work.advance(state, steps);
            if work.closing.is_some() {
                // It may have begun with a block of this pass.
                work.drive(state, steps);
            }
        });
    }

    fn end_of_pass(&self, log: &Log, steps: &mut Steps) {
        self.settle_pass(log, steps);
        self.with(|work, state| {
            work.look_ahead(state, steps);
            work.drive_space(state, steps);
            if let State::Held(captured) = state {
                work.renew_notes(captured);
            }
            work.ask_again(steps);
        });
    }

    fn shows_log(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn log_read(&self, _log: &Log, position: u32, buffer: &mut [u8]) -> io::Result<LogRead> {
        self.with(|work, state| work.log_read(state, position, buffer))
    }

    fn shows_homes(&self, _log: &Log) -> bool {
        self.is_captured()
    }

    fn home_read(&self, _log: &Log, range: Range<u64>, answer: &mut dyn FnMut(Range<u64>, &[u8])) -> HomeRead {
        self.with(|work, state| match state {
            State::Held(captured) => work.home_read(captured, range, answer),
            State::Idle(_) | State::Failed => HomeRead::Stored(vec![range]),
        })
    }

    fn home_begins(&self, log: &Log, change: &HomeChange<'_>, steps: &mut Steps) -> io::Result<HomeVerdict> {
        self.with(|work, state| {
            work.refresh(state, log);
            match state {
                State::Held(captured) => {
                    work.watch.home_asked(change);
                    let verdict = work.home_write(captured, change, steps);
                    work.watch.home_answered(change, matches!(verdict, Ok(HomeVerdict::Wait)));
                    verdict
                }
                State::Idle(_) | State::Failed => {
                    let part = HomePart { range: change.range.clone(), content: None, operation: usize::MAX };
                    Ok(HomeVerdict::Parts(vec![part]))
                }
            }
        })
    }

    fn home_ended(&self, _log: &Log, operation: usize, is_ok: bool, steps: &mut Steps) -> bool {
        self.ended(operation as u64, is_ok, steps);
        false
    }

    fn flush_begins(&self, _log: &Log, request: RequestId) {
        self.with(|work, state| {
            if let State::Held(captured) = state {
                work.flush_begins(captured, request);
            }
        });
    }

    fn flush_ended(&self, _log: &Log, request: RequestId, is_ok: bool, steps: &mut Steps) {
        self.with(|work, state| {
            if let State::Held(captured) = state {
                work.flush_ended(captured, request, is_ok);
                work.drive(state, steps);
                work.ask_again(steps);
            }
        });
    }

    fn flush_failed(&self, _log: &Log) {
        self.with(|work, state| {
            if let State::Held(captured) = state {
                work.flush_failed(captured);
            }
        });
    }

    fn done(&self, log: &Log, task: Task, error: Option<&io::Error>, steps: &mut Steps) {
        if let Task::Own(number) = task {
            if self.work().errands.get(&number).is_some_and(Errand::is_own_in_log) {
                log.state.own_writes.fetch_sub(1, Ordering::AcqRel);
            }
            self.ended(number, error.is_none(), steps);
        }
    }

    fn woken(&self, _log: &Log, side: Side, steps: &mut Steps) {
        if side == Side::Home {
            self.with(|work, state| {
                work.checkpoints.has_failed = false;
                work.drive(state, steps);
                work.ask_again(steps);
            });
        }
    }

    fn due_in(&self, _log: &Log) -> Option<Duration> {
        let work = self.work();
        work.slot?;
        match &work.checkpoints.now {
            // One that goes on is followed by the next when it has ended.
            Some(checkpoint) => checkpoint.flush_due_in(self.nvm.options.checkpoint_patience),
            None => {
                let next = self.nvm.options.checkpoint_interval.saturating_sub(work.checkpoints.all_began_at.elapsed());
                Some(work.next_try_in().map_or(next, |again| again.min(next)))
            }
        }
    }

    fn has_own_in_flight(&self) -> bool {
        self.with(|work, _| work.in_flight.has_any_of(Writer::Host))
    }

    fn end_soon(&self, _log: &Log) {
        self.with(|work, _| {
            if let Some(checkpoint) = &mut work.checkpoints.now {
                checkpoint.end_soon();
            }
        });
    }

    fn leave_for_storage(&self, _log: &Log, steps: &mut Steps) -> io::Result<keeper::Leaving> {
        self.with(|work, state| work.leave(state, steps))
    }

    fn stay(&self, _log: &Log, steps: &mut Steps) {
        self.with(|work, state| {
            work.stay(state, steps);
            work.ask_again(steps);
        });
    }

    fn take_up(&self, log: &Log, raw: &[u8; SUPERBLOCK_BYTES]) -> io::Result<(TakenUp, Option<ToSettle>)> {
        self.work().take_up(log, raw)
    }

    fn why_on_storage(&self, log: &Log) -> Option<String> {
        let work = self.work();
        let is_captured = work.slot.is_some_and(|slot| matches!(*self.nvm.lock(slot), State::Held(_)));
        if is_captured || !log.is_open() {
            return None;
        }
        let reason = work.why_none.as_deref().unwrap_or("it was there when this worker came");
        Some(format!(
            "the journal of the file system at byte {} is written to its own place on storage, until its file system is next unmounted: {reason}",
            log.place.home_start
        ))
    }

    fn blocks_owed(&self, _log: &Log) -> Option<u64> {
        self.with(|_, state| match state {
            State::Held(captured) => Some(captured.journal.len() as u64),
            State::Idle(_) | State::Failed => None,
        })
    }

    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
        if log.is_distrusted() {
            self.with(|work, state| work.leave_to_guest(state))?;
        }
        let Some(report) = self.give_region_back(log)? else { return finish_on_storage(log, is_vm_gone) };
        log.set_closed();
        let mut reports = vec![report];
        if is_vm_gone && matches!(log.stored()?.says, Says::Live(_) | Says::LeftToGuest(_)) {
            // It was about to leave the region, which owed nothing any more.
            reports.push(leave(log)?);
        }
        Ok(Finished::Recovered(reports))
    }

    fn forget(&self, log: &Log, steps: &mut Steps) -> bool {
        self.with(|work, state| {
            if work.in_flight.has_any_of(Writer::Host) || log.has_own_writes() {
                return false;
            }
            work.file_system_is_gone(state, steps);
            true
        })
    }
}
