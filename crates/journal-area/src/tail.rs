//! The log's superblock and its tail: `LOG_OP_INIT` and `LOG_OP_CLEANUP` as the guest's own writes show them.
//!
//! The superblock may also be somebody else's: an image that is copied over the disk inside the VM brings a log of its own,
//! which is none to be held.

use crate::error::Error;
use crate::jcb::VmJcb;
use crate::location::Location;
use crate::pages::Pages;
use crate::table::{Passed, Tail};
use jbd2::{Format, Superblock, SuperblockError};

/// What a write of the log's superblock means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockEffect {
    /// The log is opened: before the write completes, the superblock on storage must carry the error mark (rule 4 of
    /// ARCHITECTURE.md).
    Opened,
    /// The log goes on; nothing has to reach storage.
    GoesOn,
    /// The log is closed and owes nothing: the write goes to storage as it is, without a mark.
    Closed,
    /// The log that it opens is another one, which somebody else than a kernel has brought: the write goes to storage, and
    /// so does all that follows. The books are as they were: what was written into the log's blocks has to reach their own
    /// places before [`crate::JournalArea::close`].
    Foreign,
    /// This is no superblock of a log that is understood. All as with [`SuperblockEffect::Foreign`].
    NotALog,
}

impl VmJcb {
    /// The guest writes `block` to log block 0.
    pub(crate) fn superblock_written(&mut self, pages: &Pages, block: &[u8]) -> Result<SuperblockEffect, Error> {
        let (superblock, format) = match self.judge(block) {
            Ok(judged) => judged,
            Err(reason) => {
                if self.is_open() {
                    log::warn!(
                        "the guest overwrote its journal's superblock while {} blocks were owed: {reason}",
                        self.owed_blocks()
                    );
                }
                return Ok(SuperblockEffect::NotALog);
            }
        };
        if superblock.is_empty() {
            if self.gives_up_absorbed(None) {
                return Err(Error::NotHome);
            }
            self.close_books(pages);
            return Ok(SuperblockEffect::Closed);
        }
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        let was_open = self.is_open();
        // Fast commits need inode and extent logic, and unknown features nobody knows: such a log is kept block
        // for block (rule 5 of ARCHITECTURE.md).
        let materialise = format.is_none_or(|format| format.fast_commit);
        if !was_open {
            self.open_books(tail).map_err(|_| Error::NoMemory { what: "tables" })?;
            self.table.set_materialise(materialise);
        }
        if was_open && self.is_own_in_disguise(tail, format) {
            return Err(Error::Features);
        }
        if was_open && self.is_other(tail, format, &superblock.uuid) {
            log::warn!(
                "another journal was written over the guest's, which had {} blocks not yet home",
                self.owed_blocks()
            );
            return Ok(SuperblockEffect::Foreign);
        }
        if was_open && self.gives_up_absorbed(Some(tail)) {
            return Err(Error::NotHome);
        }
        if !self.hold_superblock(pages, block) {
            return Err(Error::NoMemory { what: "superblock" });
        }
        // What is known of a log that proved to be none of a kernel's was read as it was, whatever is said of it now.
        if self.contradiction.is_none() {
            self.uuid = Some(superblock.uuid);
            self.format = format;
        }
        if was_open {
            self.tail_moved(pages, tail);
            Ok(SuperblockEffect::GoesOn)
        } else {
            self.table.set_tail(Some(tail));
            Ok(SuperblockEffect::Opened)
        }
    }

    /// Whether `block`, written to log block 0, would be taken for a superblock that is not the open log's, or for none.
    pub(crate) fn is_superblock_foreign(&self, block: &[u8]) -> bool {
        let Ok((superblock, format)) = self.judge(block) else { return true };
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        self.is_open() && !superblock.is_empty() && self.is_other(tail, format, &superblock.uuid)
    }

    /// What the superblock says; no format where its features are not known. A sentence where it is none of this log.
    fn judge(&self, block: &[u8]) -> Result<(Superblock, Option<Format>), String> {
        let superblock = Superblock::decode(block).map_err(|error| error.to_string())?;
        let format = match superblock.format() {
            Ok(format) => Some(format),
            Err(SuperblockError::UnknownFeatures { .. }) => None,
            Err(error) => return Err(error.to_string()),
        };
        if superblock.block_size != self.shape.block_bytes || superblock.maxlen > self.shape.log_blocks {
            return Err(format!(
                "it now has {} blocks of {} bytes, where the file system has room for {} of {}",
                superblock.maxlen, superblock.block_size, self.shape.log_blocks, self.shape.block_bytes
            ));
        }
        if !superblock.is_empty() && format.is_some_and(|format| !format.contains(superblock.start)) {
            return Err(format!("its log begins at block {}, outside the log", superblock.start));
        }
        Ok((superblock, format))
    }

    /// The number of the transaction that begins there, if the log can begin there now: one of those that are live, or the
    /// next.
    fn known(&self, tail: Tail) -> Option<usize> {
        let is_it =
            |entry: &crate::jcb::Transaction| (entry.sequence, entry.first_position) == (tail.sequence, tail.position);
        let next = (tail == self.cursor).then_some(self.transactions.len());
        self.transactions.iter().position(is_it).or(next)
    }

    /// Whether the guest has just replayed the log that it was shown: a kernel begins a new one then, and leaves out one
    /// sequence number, so that nothing that lies in the log is taken for a part of it.
    fn is_replayed(&self, tail: Tail) -> bool {
        self.table.is_read() && tail.sequence == self.cursor.sequence.wrapping_add(1)
    }

    /// Whether the superblock that says this is not that of the open log.
    fn is_other(&self, tail: Tail, format: Option<Format>, uuid: &[u8; 16]) -> bool {
        // Kept block for block, a log is not read, so not known.
        if self.table.is_materialise() || self.contradiction.is_some() {
            return false;
        }
        // Positions and sequence numbers of what is held mean something in the layout they were written in only. A kernel
        // may turn features on when it has replayed.
        let is_replayed = self.is_replayed(tail) || self.transactions.is_empty() && tail == self.cursor;
        // No kernel changes it. Another journal's numbers may be the same.
        if self.uuid.is_some_and(|known| known != *uuid) {
            return true;
        }
        let layout = |format: Format| (format.block_size, format.first, format.last, format.length);
        if format.map(layout) != self.format.map(layout) {
            // Nor does a kernel make an open log longer or shorter.
            return true;
        }
        !is_replayed && (format != self.format || self.known(tail).is_none())
            || format.is_none_or(|format| format.fast_commit)
    }

    /// Whether the superblock that says this is that of the open log, and has features with which only its guest's kernel could replay
    /// it, from its own place: where blocks would be missing that were let go.
    fn is_own_in_disguise(&self, tail: Tail, format: Option<Format>) -> bool {
        let is_read_here = format.is_some_and(|format| !format.fast_commit);
        if is_read_here || self.table.is_materialise() || self.contradiction.is_some() {
            return false;
        }
        let Some(known) = self.format.filter(|_| self.known(tail).is_some()) else { return false };
        let is_let_go = |position| matches!(self.location(position), Location::Home | Location::Gone);
        let mut position = tail.position;
        while position != self.cursor.position {
            if is_let_go(position) {
                return true;
            }
            position = known.next(position);
        }
        false
    }

    /// Whether a log that begins there, or is empty, would forget a version that its guest was told is home, and that is not. Whoever absorbs sees to it
    /// that no guest's superblock comes to this. Where homes are in doubt, what is absorbed is kept whatever the guest says.
    fn gives_up_absorbed(&self, tail: Option<Tail>) -> bool {
        if self.contradiction.is_some() || self.absorbed.is_empty() {
            return false;
        }
        match tail {
            Some(tail) if self.known(tail).is_some() => self.has_absorbed_before(tail.sequence),
            _ => true,
        }
    }

    /// The guest says where its log begins now.
    fn tail_moved(&mut self, pages: &Pages, tail: Tail) {
        if self.table.is_materialise() {
            // Not read, so not known where it ends: all is kept until the log is closed.
            self.table.set_tail(Some(tail));
            return;
        }
        let count = match self.known(tail) {
            Some(count) => count,
            None if self.contradicts_new_beginning(tail) => return self.table.set_tail(Some(tail)),
            None => return self.begin_anew(pages, tail),
        };
        if self.contradicts_passing(pages, count) {
            return self.table.set_tail(Some(tail));
        }
        self.drop_transactions(pages, count);
    }

    /// The guest has replayed the log: nothing that was in it counts any more.
    fn begin_anew(&mut self, pages: &Pages, tail: Tail) {
        self.table.pass(Passed::Everything, tail);
        self.forget_versions(1..self.shape.log_blocks);
        for position in 1..self.shape.log_blocks {
            if self.location(position) != Location::None {
                self.clear_position(pages, position);
            }
        }
        self.table.set_forgotten();
        self.transactions.clear();
        self.set_torn(false);
        self.cursor = tail;
        self.partial = crate::jcb::Partial::default();
        self.give_back_unused();
    }

    /// Transactions from the `index`-th on do not count any more: the guest has written over one of them.
    pub(crate) fn rewind(&mut self, index: usize) {
        let (Some(format), Some(first)) = (self.format, self.transactions.get(index).copied()) else { return };
        let end = self.cursor.position;
        let from = |position: u32| Some(position).filter(|position| *position != end);
        let next = |position: &u32| from(format.next(*position));
        let positions = std::iter::successors(from(first.first_position), next);
        self.forget_versions(positions.take(format.log_blocks() as usize));
        self.transactions.truncate(index);
        self.set_torn(true);
        self.cursor = Tail { position: first.first_position, sequence: first.sequence };
        self.partial = crate::jcb::Partial::default();
    }

    /// Drops the oldest `count` transactions from the live log.
    pub(crate) fn drop_transactions(&mut self, pages: &Pages, count: usize) {
        let Some(format) = self.format else { return };
        if count == 0 {
            return;
        }
        let end = self.transactions.get(count).map_or(self.cursor, |transaction| Tail {
            position: transaction.first_position,
            sequence: transaction.sequence,
        });
        let Some(start) = self.transactions.front().map(|transaction| transaction.first_position) else { return };
        // First the table says that the log begins later; then what lies before may go.
        self.table.pass(Passed::From(start), end);
        let next = |position: &u32| Some(format.next(*position)).filter(|position| *position != end.position);
        // All at once, since nobody knows here what each is a version of.
        self.forget_versions(std::iter::successors(Some(start), next));
        let mut position = start;
        loop {
            self.clear_position(pages, position);
            position = format.next(position);
            if position == end.position {
                break;
            }
        }
        self.table.set_forgotten();
        self.transactions.drain(..count);
        self.give_back_unused();
    }
}
