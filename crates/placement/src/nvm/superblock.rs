//! The journal's superblock as the guest writes it: a log is opened, goes on, or is closed.

use super::captured::Captured;
use super::foreign::Foreign;
use super::log_stream::{LogStream, Tail, TailMove};
use super::mark;
use super::route::{Errand, NvmRoute, Waiting};
use super::{Region, State};
use crate::foreign::is_brought;
use crate::keeper::{Steps, SuperblockBlock};
use crate::log::Log;
use crate::opening::write_mark_bytes;
use block_route::{Operation, Plan, Status};
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

/// A log that is being closed: its superblock waits until everything is home.
#[derive(Debug)]
pub(super) struct Closing {
    pub waiting: Waiting,
    /// The write has been given to the disk.
    pub is_on_its_way: bool,
    /// Not a kernel ends it, but somebody who writes over it ([`super::foreign`]).
    pub foreign: Option<Foreign>,
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

/// What a superblock of a log that is not open says.
enum Opening {
    Open(Superblock, Format),
    /// The log stays closed, or is kept on storage: why, if it is worth saying.
    Storage(Option<String>),
}

fn judge(log: &Log, block: &[u8]) -> Opening {
    let Ok(superblock) = Superblock::decode(block) else { return Opening::Storage(None) };
    if superblock.is_empty() {
        return Opening::Storage(None);
    }
    let no = |reason: String| Opening::Storage(Some(reason));
    let format = match superblock.format() {
        Ok(format) if format.fast_commit => {
            return no("it may hold fast commits, which only the guest's own kernel can replay".to_owned());
        }
        Ok(format) => format,
        Err(error) => return no(error.to_string()),
    };
    let place = &log.place;
    if superblock.block_size != place.block_bytes
        || superblock.maxlen > place.log_blocks
        || !format.contains(superblock.start)
    {
        return no("its superblock says sizes that it cannot have where it is".to_owned());
    }
    Opening::Open(superblock, format)
}

impl NvmRoute {
    /// The guest writes the journal's superblock, which is `block` then.
    pub(super) fn superblock_write(
        &mut self,
        state: &mut State,
        log: &Arc<Log>,
        waiting: Waiting,
        block: Vec<u8>,
        plan: &mut Plan,
    ) {
        // What the guest wrote into the log before counts before.
        self.advance(state, plan);
        if self.is_stored(log) {
            // A log on storage wants nothing done.
            let superblock = SuperblockBlock { content: &block, request: waiting.request };
            match self.journals.superblock_written(log, superblock, &mut Steps::default()) {
                Ok(true) => self.pass_on(&waiting, plan),
                // It says that the log begins earlier than what is on storage.
                Ok(false) => {}
                Err(error) => {
                    log::error!("disk {}: {error}", self.name());
                    plan.fail(waiting.request);
                }
            }
            return;
        }
        if let State::Held(captured) = state
            && captured.log.index == log.index
        {
            match Superblock::decode(&block) {
                Ok(superblock) if !superblock.is_empty() => {
                    if Self::is_another(captured, &superblock) {
                        self.written_over(state, waiting, Foreign::Superblock(block), plan);
                    } else if let Err(error) = self.goes_on(captured, &superblock, &block) {
                        log::error!("disk {}: {error}", self.name());
                        plan.fail(waiting.request);
                    }
                }
                _ if self.closing.is_some() => plan.fail(waiting.request),
                _ => {
                    plan.hold(waiting.request);
                    self.closing = Some(Closing { waiting, is_on_its_way: false, foreign: None });
                    self.close_instead_of_leaving();
                    self.drive(state, plan);
                }
            }
            return;
        }
        match self.open(state, log, &block) {
            Ok(true) => {}
            Ok(false) => {
                let is_open = Superblock::decode(&block).is_ok_and(|superblock| !superblock.is_empty());
                if is_open {
                    log.set_open();
                } else {
                    log.set_closed();
                }
                self.pass_on(&waiting, plan);
                if !is_open {
                    self.journals.follow_wish(log);
                }
            }
            Err(error) => {
                log::error!("disk {}: the journal cannot be taken onto NVM: {error}", self.name());
                plan.fail(waiting.request);
            }
        }
    }

    /// The log goes on: its tail may have moved.
    fn goes_on(&mut self, captured: &mut Captured, superblock: &Superblock, block: &[u8]) -> io::Result<()> {
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        captured.shown = None;
        captured.is_read = false;
        let format = superblock.format().map_err(io::Error::other)?;
        let passed = if format == *captured.stream.format() {
            captured.stream.move_tail(tail)
        } else {
            // A kernel may turn features on when it has replayed.
            captured.stream.begin_anew(format, tail);
            TailMove::Anew
        };
        if passed == TailMove::Anew && (self.commit.is_some() || !self.may_commit()) {
            return Err(io::Error::other("the guest began its journal anew while it committed"));
        }
        // What the tail has passed is at home, and leaves the region.
        self.renew_old_mark(captured)?;
        let before = captured.homes.len();
        let in_flight = &self.in_flight;
        captured.tail_moved(passed, &|block| in_flight.touches(block))?;
        super::report::NvmCounters::add(&self.nvm.counters.blocks_dropped, (before - captured.homes.len()) as u64);
        let differs = {
            let known = &captured.owner.attachment;
            (0..ATTACHMENT_BYTES).any(|at| {
                let is_passing = PASSING_FIELDS.iter().any(|(offset, len)| (*offset..offset + len).contains(&at));
                !is_passing && known[at] != block[at]
            })
        };
        if differs {
            captured.owner.attachment.copy_from_slice(&block[..ATTACHMENT_BYTES]);
            captured.journal.set_owner(&captured.owner)?;
        }
        Ok(())
    }

    /// Opens a log, if it can be taken. False when its writes go to storage.
    fn open(&mut self, state: &mut State, log: &Arc<Log>, block: &[u8]) -> io::Result<bool> {
        let (superblock, format) = match judge(log, block) {
            Opening::Open(superblock, format) => (superblock, format),
            Opening::Storage(reason) => {
                if let Some(reason) = reason {
                    self.kept_on_storage(log, &reason);
                }
                if Superblock::decode(block).is_ok_and(|superblock| superblock.is_empty()) {
                    self.written_closed.remove(&log.index);
                }
                return Ok(false);
            }
        };
        if is_brought(log, &superblock, self.written_closed.contains(&log.index))? {
            return Ok(false);
        }
        let place = &log.place;
        let State::Idle(medium) = state else {
            let reason = match state {
                State::Held(_) => "the region holds another file system's of this disk",
                _ => "the region has failed",
            };
            self.kept_on_storage(log, reason);
            return Ok(false);
        };
        if let Err(reason) = check_room(medium, self.nvm.region_offset, place.log_blocks, place.block_bytes) {
            self.kept_on_storage(log, &reason);
            return Ok(false);
        }
        let mark = mark::first(block)?;
        let owner = Owner {
            file_system: place.file_system_uuid,
            journal: superblock.uuid,
            home_start: place.home_start,
            home_blocks: place.home_blocks,
            mark_checksum: mark::checksum(&mark),
            attachment: *block.first_chunk().ok_or_else(|| io::Error::other("the superblock is cut short"))?,
        };
        let State::Idle(medium) = std::mem::replace(state, State::Failed) else { return Ok(false) };
        let options = self.nvm.journal_options();
        let sequence = superblock.sequence.wrapping_sub(1);
        let journal = Journal::claim(medium, self.nvm.region_offset, place.block_bytes, &owner, sequence, options)?;
        // First the region says whose it is, then storage says that the journal is elsewhere: a crash in between leaves a
        // region that owes nothing.
        if let Err(error) = write_mark_bytes(log, &mark) {
            *state = State::Idle(journal.give_back()?);
            return Err(error);
        }
        let copies_max = journal.geometry().blocks as usize + 1024;
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        log::info!(
            "disk {}: the journal of the file system at byte {} is on NVM from transaction {} on (epoch {}, {} blocks)",
            self.name(),
            place.home_start,
            superblock.sequence,
            journal.epoch(),
            journal.geometry().blocks
        );
        *state = State::Held(Box::new(Captured {
            log: Arc::clone(log),
            stream: LogStream::new(format, tail, copies_max),
            journal,
            owner,
            mark,
            next_mark: None,
            marked: Instant::now(),
            homes: HashMap::new(),
            at_home: HashMap::new(),
            allocation: Allocation::default(),
            shown: None,
            is_read: false,
            has_failed: false,
        }));
        self.settled.clear();
        log.set_open();
        Ok(true)
    }

    fn kept_on_storage(&self, log: &Log, reason: &str) {
        log::warn!(
            "disk {}: the journal of the file system at byte {} is written to its own place on storage: {reason}",
            self.name(),
            log.place.home_start
        );
    }

    /// Takes a log that is being closed one step on.
    pub(super) fn drive_closing(&mut self, state: &mut State, plan: &mut Plan) {
        let Some(closing) = &self.closing else { return };
        let State::Held(captured) = state else { return };
        if closing.is_on_its_way
            || self.leaving.is_some()
            || self.commit.is_some()
            || self.early.is_writing()
            || self.checkpoint.is_some()
        {
            return;
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
            self.begin_checkpoint(captured, plan);
            return;
        }
        let Some(closing) = &mut self.closing else { return };
        let request = closing.waiting.request;
        closing.is_on_its_way = true;
        let waiting = closing.waiting.clone();
        if let Err(error) = released {
            log::error!("disk {}: the journal on NVM cannot be closed: {error}", self.name());
            self.closing = None;
            plan.release(request, Status::IoError);
            return;
        }
        if let Err(error) = self.put_in_place(captured) {
            log::error!("disk {}: writing what lies where the journal was failed: {error}", self.name());
            self.closing = None;
            plan.release(request, Status::IoError);
            return;
        }
        let errand = Errand::Closed { rescan: waiting.rescan };
        self.write_through(&waiting, Operation::Write, errand, plan);
        plan.release(request, Status::Ok);
    }

    /// The superblock of a closed log is on storage.
    pub(super) fn closed(&mut self, state: &mut State, is_ok: bool) {
        let closing = self.closing.take();
        if !is_ok {
            return;
        }
        if let State::Held(captured) = std::mem::replace(state, State::Failed) {
            captured.log.set_closed();
            if let Some(foreign) = closing.and_then(|closing| closing.foreign) {
                // What follows is somebody's, until the log is empty.
                self.written_closed.insert(captured.log.index);
                if matches!(foreign, Foreign::Superblock(_)) {
                    captured.log.set_open();
                }
            }
            self.journals.follow_wish(&captured.log);
            self.nvm.counters.add_journal(&captured.journal.counters());
            // Before the region is nobody's: a mark on storage without a region is refused by every later start.
            if let Err(error) = captured.log.journal.file.sync_data() {
                log::error!("disk {}: flushing the superblock of a closed journal failed: {error}", self.name());
            }
            match captured.journal.give_back() {
                Ok(medium) => *state = State::Idle(medium),
                Err(error) => log::error!("disk {}: giving the NVM region back failed: {error}", self.name()),
            }
        }
    }
}
