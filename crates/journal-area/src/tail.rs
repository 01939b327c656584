//! The log's superblock and its tail: `LOG_OP_INIT` and `LOG_OP_CLEANUP` as the guest's own writes show them.

use crate::error::Error;
use crate::jcb::VmJcb;
use crate::location::Location;
use crate::pages::Pages;
use crate::table::Tail;
use jbd2::{Format, Superblock, SuperblockEdit, SuperblockError};

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
    /// This is no superblock of a log that is understood: the write goes to storage, and so does all that follows.
    NotALog,
}

impl VmJcb {
    /// The guest writes `block` to log block 0.
    pub(crate) fn superblock_written(&mut self, pages: &mut Pages, block: &[u8]) -> Result<SuperblockEffect, Error> {
        let (superblock, format) = match self.judge(block) {
            Ok(judged) => judged,
            Err(reason) => {
                if self.is_open() {
                    log::warn!(
                        "the guest overwrote its journal's superblock while {} blocks were owed: {reason}",
                        self.owed_blocks()
                    );
                }
                self.close_books(pages);
                return Ok(SuperblockEffect::NotALog);
            }
        };
        if superblock.is_empty() {
            self.close_books(pages);
            return Ok(SuperblockEffect::Closed);
        }
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        let was_open = self.is_open();
        if was_open && !self.table.is_materialise() && format != self.format {
            // Positions and sequence numbers of what is held mean something in the layout they were written in only.
            return Err(Error::Layout);
        }
        if !was_open {
            self.open_books(tail).map_err(|_| Error::NoMemory { what: "tables" })?;
            // Fast commits need inode and extent logic, and unknown features nobody knows: such a log is kept block
            // for block (rule 5 of ARCHITECTURE.md).
            self.table.set_materialise(format.is_none_or(|format| format.fast_commit));
        }
        self.format = format;
        self.hold_superblock(pages, block)?;
        if was_open {
            self.tail_moved(pages, tail);
            Ok(SuperblockEffect::GoesOn)
        } else {
            self.table.set_tail(Some(tail));
            Ok(SuperblockEffect::Opened)
        }
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

    fn hold_superblock(&mut self, pages: &mut Pages, block: &[u8]) -> Result<(), Error> {
        let slot = self.pool.insert_block(block).ok_or(Error::NoMemory { what: "superblock" })?;
        self.set_location(pages, 0, Location::Block(slot));
        Ok(())
    }

    /// The guest says where its log begins now.
    fn tail_moved(&mut self, pages: &mut Pages, tail: Tail) {
        if self.table.is_materialise() {
            // Not read, so not known where it ends: all is kept until the log is closed.
            self.table.set_tail(Some(tail));
            return;
        }
        let ours = self.table.tail().unwrap_or(tail);
        if tail == ours || jbd2::sequence::is_after(ours.sequence, tail.sequence) {
            // What the guest still has in its log is home already, by our own count.
            return;
        }
        let known = self
            .transactions
            .iter()
            .position(|entry| entry.sequence == tail.sequence && entry.first_position == tail.position);
        let count = match known {
            Some(count) => count,
            None if tail == self.cursor => self.transactions.len(),
            None if self.contradicts_new_beginning(tail) => return self.table.set_tail(Some(tail)),
            None => return self.begin_anew(pages, tail),
        };
        if self.contradicts_passing(pages, count) {
            return self.table.set_tail(Some(tail));
        }
        self.drop_transactions(pages, count);
    }

    /// The log begins at a place where no transaction of ours begins: as for jbd2, nothing before it exists. A kernel that
    /// has replayed the log goes on so.
    fn begin_anew(&mut self, pages: &mut Pages, tail: Tail) {
        self.table.set_tail(Some(tail));
        for position in 1..self.shape.log_blocks {
            if self.location(position) != Location::None || self.home_of(position).is_some() {
                self.clear_position(pages, position);
            }
        }
        self.transactions.clear();
        self.cursor = tail;
        self.partial = crate::jcb::Partial::default();
    }

    /// Drops the oldest `count` transactions from the live log.
    pub(crate) fn drop_transactions(&mut self, pages: &mut Pages, count: usize) {
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
        self.table.set_tail(Some(end));
        let mut position = start;
        loop {
            self.clear_position(pages, position);
            position = format.next(position);
            if position == end.position {
                break;
            }
        }
        self.transactions.drain(..count);
    }

    /// What a kernel that mounts now must see: an empty log that goes on where this one is. For us, too, the log begins
    /// there from now on. Nothing when blocks are still owed.
    pub(crate) fn emptied_superblock(&mut self, pages: &mut Pages) -> Option<Vec<u8>> {
        let mut block = vec![0; self.shape.block_bytes as usize];
        if self.owed_blocks() > 0
            || self.has_stored_versions()
            || self.table.is_materialise()
            || !self.read_held(pages, 0, &mut block)
        {
            return None;
        }
        self.drop_transactions(pages, self.transactions.len());
        SuperblockEdit::new(&mut block).ok()?.start(0).sequence(self.cursor.sequence).seal();
        Some(block)
    }
}
