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
use super::captured::Captured;
use super::closing::{Closing, Foreign};
use super::commit_state::Commit;
use super::log_stream::Tail;
use super::mark::is_mark;
use super::versions::HomeState;
use super::work::Work;
use crate::disk::DiskCounters;
use crate::foreign::is_something;
use crate::keeper::Steps;
use crate::log::Log;
use crate::mark::given_up;
use crate::opening::write_mark_bytes;
use block_route::{RequestId, Status};
use guest_memory::MemorySlice;
use jbd2::{Superblock, SuperblockEdit, SuperblockError};
use std::io;

impl Work {
    /// Something is written into a log that the region does not have.
    pub(super) fn note_foreign(&mut self, log: &Log, slices: &[MemorySlice]) {
        // mke2fs does so, too, with zeros.
        if !log.is_open() && !self.area.is_foreign(log.id) && is_something(slices) {
            self.area.set_foreign(log.id, true);
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

    /// Whether a superblock is that of the open log, with live transactions in it, and has features with which only its guest's own kernel
    /// could replay them: from its own place, where they are not.
    pub(super) fn is_own_in_disguise(captured: &Captured, superblock: &Superblock) -> bool {
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        let is_read_here = match superblock.format() {
            Ok(format) => !format.fast_commit,
            Err(error) => !matches!(error, SuperblockError::UnknownFeatures { .. }),
        };
        !is_read_here
            && superblock.uuid == captured.owner.journal
            && captured.stream.can_begin(tail)
            && tail != captured.stream.cursor()
    }

    /// Whether what comes into the open log is no transaction of its kernel's any more.
    pub(super) fn is_written_over(&self) -> bool {
        self.closing.as_ref().is_some_and(|closing| closing.foreign.is_some())
    }

    /// The file system was replaced while its log was open: what it had committed must never land on the new one.
    pub(super) fn file_system_is_gone(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = std::mem::replace(state, State::Failed) else { return };
        log::warn!(
            "disk {}: the file system at byte {} was replaced while {} blocks of it were on NVM only",
            self.name(),
            captured.log.place.home_start,
            captured.journal.len()
        );
        let put = self.put_in_place(&captured).and_then(|()| self.put_foreign_in_place(&captured));
        if put.is_ok() {
            // What they wrote is where everybody finds it.
            let foreign = self.closing.take_if(|closing| closing.foreign.is_some() && !closing.is_on_its_way);
            let waiting = self.held.drain(..).chain(foreign.map(|closing| closing.request));
            waiting.for_each(|request| steps.release(request, Status::Ok));
        }
        // The guest may have flushed it, and the region is nobody's in a moment.
        let seen = self.bring_seen_home(&captured).and_then(|()| captured.log.home.file.sync_data());
        if let Err(error) = put.and_then(|()| give_up_mark(&captured)).and(seen) {
            log::error!(
                "disk {}: writing where the file system was failed: {error}; what the guest wrote there is lost",
                self.name()
            );
        }
        self.give_back(*captured, state);
        self.forget_work(steps);
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
        // So is what it has written home of a transaction that does not count yet, and later than any of these: that is in the commit alone, which goes.
        for (block, content) in self.acknowledged().into_iter().flat_map(Commit::absorbed) {
            captured.log.home.file.write_all_at(content, captured.log.home_offset(block))?;
            captured.log.home.set_dirty();
        }
        Ok(())
    }

    /// The open log is written over, by `block` at byte `offset` of the disk: it ends, and then that is carried out. The
    /// caller holds the request.
    pub(super) fn written_over(
        &mut self,
        captured: &Captured,
        request: RequestId,
        (offset, block): (u64, Vec<u8>),
        foreign: Foreign,
    ) {
        let owed = captured.journal.len();
        let what = match &foreign {
            Foreign::Superblock => "another journal was written over the guest's".to_owned(),
            Foreign::Live(position) => format!("log block {position} of the guest's open journal was written over"),
        };
        log::warn!("disk {}: {what}, which had {owed} blocks on NVM; it is closed", self.name());
        let foreign = Some(foreign);
        self.closing = Some(Closing { request, offset, block, is_on_its_way: false, foreign, left: None });
        self.close_instead_of_leaving();
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
        match &self.closing {
            Some(Closing { foreign: Some(Foreign::Live(_)), left: Some(superblock), .. }) => {
                log.journal.file.write_all_at(superblock, log.place_of(0)?)?;
                bytes += superblock.len() as u64;
            }
            Some(Closing { foreign: Some(Foreign::Live(_)), .. }) => give_up_mark(captured)?,
            _ => {}
        }
        if bytes > 0 {
            log.journal.set_dirty();
            DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, bytes);
        }
        Ok(())
    }

    /// The same of what is written over it at this moment.
    pub(super) fn put_foreign_in_place(&self, captured: &Captured) -> io::Result<()> {
        match &self.closing {
            Some(Closing { foreign: Some(_), is_on_its_way: false, offset, block, .. }) => {
                captured.log.journal.file.write_all_at(block, *offset)
            }
            _ => Ok(()),
        }
    }
}

/// The region will not have the log any more: storage says so, and still that an error happened to it.
pub(super) fn give_up_mark(captured: &Captured) -> io::Result<()> {
    let log = &captured.log;
    if is_mark(&log.stored_superblock()?, captured.owner.mark_checksum) {
        write_mark_bytes(log, &given_up(captured.marks.durable())?)?;
    }
    Ok(())
}

/// A log block as it was written last, as far as that is known.
pub(super) fn last_written(captured: &Captured, log: &Log, position: u32) -> io::Result<Vec<u8>> {
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
