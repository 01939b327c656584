//! Somebody else than a kernel writes where an open log is that the region has: an image is copied over the disk inside the VM
//! ([`crate::foreign`] says what that means for any log, and looks after logs that are closed).
//!
//! No kernel writes to a block of a transaction that is in its log before it has moved the log's tail, nor a superblock that begins
//! the log elsewhere than at a transaction of it, unless it has read the log before and replayed it. So either proves that the
//! log is being replaced. It is closed then: what the guest sees at home and only the region has goes home; what it had
//! not written home is gone with its log, as on any disk; what was written over the log's blocks reaches their places; and the log
//! that is brought stays on storage until it is empty.
//!
//! It must never: bring a version of the old log onto the new file system; take a block that was written there for one that is
//! not.
//!
//! Failure story: where the superblock of the log is not replaced, storage goes on to say that an error happened to an empty log
//! (rule 4 of ARCHITECTURE.md), and no longer that a region has it. What cannot be written to its place fails the guest's write.

use super::State;
use super::captured::{Captured, HomeState};
use super::log_stream::Tail;
use super::mark::is_mark;
use super::route::{NvmRoute, Waiting};
use super::superblock::Closing;
use crate::disk::DiskCounters;
use crate::foreign::is_something;
use crate::layout::LogRange;
use crate::log::Log;
use crate::mark::given_up;
use crate::opening::write_mark_bytes;
use block_route::{Plan, RequestKind, segments};
use guest_memory::MemorySlice;
use jbd2::{Superblock, SuperblockEdit};
use std::io;
use std::sync::Arc;

/// What was written over an open log.
#[derive(Debug)]
pub(super) enum Foreign {
    /// A superblock that begins another log: its whole block.
    Superblock(Vec<u8>),
    /// A block of a transaction that is in the log.
    Live(u32),
}

impl NvmRoute {
    /// Something is written into a log that the region does not have.
    pub(super) fn note_foreign(&mut self, log: &Log, slices: &[MemorySlice]) {
        // mke2fs does so, too, with zeros.
        if !log.is_open() && !self.written_closed.contains(&log.index) && is_something(slices) {
            self.written_closed.insert(log.index);
        }
    }

    /// Whether a superblock is not that of the open log.
    pub(super) fn is_another(captured: &Captured, superblock: &Superblock) -> bool {
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        let cursor = captured.stream.cursor();
        let Ok(format) = superblock.format() else { return true };
        if format.fast_commit
            || !format.contains(superblock.start)
            || superblock.block_size != captured.log.place.block_bytes
            || superblock.maxlen > captured.log.place.log_blocks
            || superblock.uuid != captured.owner.journal
        {
            return true;
        }
        // A kernel that has replayed leaves out one sequence number.
        let is_replayed = captured.is_read && tail.sequence == cursor.sequence.wrapping_add(1);
        let is_empty = captured.stream.tail() == cursor && tail == cursor;
        !is_replayed && !is_empty && (format != *captured.stream.format() || !captured.stream.can_begin(tail))
    }

    /// Whether what comes into the open log is no transaction of its kernel's any more.
    pub(super) fn is_written_over(&self) -> bool {
        self.closing.as_ref().is_some_and(|closing| closing.foreign.is_some())
    }

    /// The file system is gone in the midst of everything: what the guest saw at home is a part of the disk.
    pub(super) fn bring_seen_home(&self, captured: &Captured) -> io::Result<()> {
        let seen = captured.homes.iter().filter(|(_, held)| held.home == HomeState::Same);
        for (block, _) in seen {
            if let Some(content) = captured.journal.latest(*block) {
                captured.log.home.file.write_all_at(content, captured.log.home_offset(*block))?;
                captured.log.home.set_dirty();
            }
        }
        Ok(())
    }

    /// The open log is written over: it ends, and then the write that did so is carried out.
    pub(super) fn written_over(&mut self, state: &mut State, waiting: Waiting, foreign: Foreign, plan: &mut Plan) {
        let State::Held(captured) = state else { return };
        if self.closing.is_some() {
            return plan.fail(waiting.request);
        }
        let owed = captured.journal.len();
        let what = match &foreign {
            Foreign::Superblock(_) => "another journal was written over the guest's".to_owned(),
            Foreign::Live(position) => format!("log block {position} of the guest's open journal was written over"),
        };
        log::warn!("disk {}: {what}, which had {owed} blocks on NVM; it is closed", self.name());
        plan.hold(waiting.request);
        self.closing = Some(Closing { waiting, is_on_its_way: false, foreign: Some(foreign) });
        self.close_instead_of_leaving();
        self.drive(state, plan);
    }

    /// A write into an open log that is not of whole blocks, or of zeros: the blocks as they are then.
    pub(super) fn odd_log_write(
        &mut self,
        state: &mut State,
        log: &Arc<Log>,
        range: &LogRange,
        waiting: &Waiting,
        plan: &mut Plan,
    ) {
        let block_bytes = u64::from(range.block_bytes);
        let written = waiting.piece.range();
        let (first, end) =
            ((written.start - range.start) / block_bytes, (written.end - range.start).div_ceil(block_bytes));
        let mut contents = Vec::new();
        for index in first..end {
            let position = range.first_position + index as u32;
            let State::Held(captured) = state else { return };
            let begin = range.start + index * block_bytes;
            let part = begin.max(written.start)..(begin + block_bytes).min(written.end);
            let mut content = match last_written(captured, log, position) {
                Ok(content) => content,
                Err(error) => {
                    log::error!("disk {}: reading log block {position} failed: {error}", self.name());
                    return plan.fail(waiting.request);
                }
            };
            let inside = (part.start - begin) as usize..(part.end - begin) as usize;
            if waiting.kind == RequestKind::Write {
                let slices = segments::part(&waiting.slices, part.start - written.start, part.end - part.start);
                content[inside].copy_from_slice(&segments::gather(&slices));
            } else {
                content[inside].fill(0);
            }
            contents.push(content);
        }
        if range.first_position == 0 && first == 0 {
            let superblock = contents.remove(0);
            self.superblock_write(state, log, waiting.clone(), superblock, plan);
            if contents.is_empty() {
                return;
            }
            if !Self::is_captured(state, log.index) {
                // The whole write has been passed on.
                return;
            }
            return self.stage(state, 1, contents, waiting, plan);
        }
        self.stage(state, range.first_position + first as u32, contents, waiting, plan);
    }

    /// A log ends: what lies in its blocks and is of no transaction reaches their places, which are a part of the disk again, and so
    /// does the superblock that was written over its own.
    pub(super) fn put_in_place(&self, captured: &Captured) -> io::Result<()> {
        let log = &captured.log;
        let mut bytes = 0;
        for (position, block) in captured.stream.copies() {
            if let Some(offset) = log.offset_of(position) {
                log.journal.file.write_all_at(block, offset)?;
                bytes += block.len() as u64;
            }
        }
        match self.closing.as_ref().and_then(|closing| closing.foreign.as_ref()) {
            Some(Foreign::Superblock(block)) => {
                log.journal.file.write_all_at(block, log.place_of(0)?)?;
                bytes += block.len() as u64;
            }
            Some(Foreign::Live(_)) => give_up_mark(captured)?,
            None => {}
        }
        if bytes > 0 {
            log.journal.set_dirty();
            DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, bytes);
        }
        Ok(())
    }
}

/// The region will not have the log any more: storage says so, and still that an error happened to it.
pub(super) fn give_up_mark(captured: &Captured) -> io::Result<()> {
    let log = &captured.log;
    if is_mark(&log.stored_superblock()?, captured.owner.mark_checksum) {
        write_mark_bytes(log, &given_up(&captured.mark)?)?;
    }
    Ok(())
}

/// A log block as it was written last, as far as that is known.
fn last_written(captured: &Captured, log: &Log, position: u32) -> io::Result<Vec<u8>> {
    let mut content = vec![0; log.place.block_bytes as usize];
    if position == 0 {
        log.read_stored(0, &mut content)?;
        content[..captured.owner.attachment.len()].copy_from_slice(&captured.owner.attachment);
        let tail = captured.stream.tail();
        SuperblockEdit::new(&mut content)
            .map_err(io::Error::other)?
            .start(tail.position)
            .sequence(tail.sequence)
            .seal();
    } else if let Some(copy) = captured.stream.read(position) {
        content.copy_from_slice(copy);
    } else {
        log.read_stored(position, &mut content)?;
    }
    Ok(content)
}
