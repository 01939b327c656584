//! Where a log is read from, and what can keep it from being replayed.

/// What a log position holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The block was read.
    Present,
    /// The block was a data block whose content is already known to be in its home block; its bytes are not available.
    /// Such a copy takes part in ordering (it may be the newest version) but is neither verified nor written.
    AtHome,
}

/// A log that can be read: an image, or the memory where a live log is held.
pub trait LogRead {
    /// What can go wrong.
    type Error: std::error::Error + 'static;

    /// Reads log block `position` (below `Format::length`) into `buffer`, one block long.
    ///
    /// # Errors
    /// When the block cannot be read: recovery then stops, and nothing is forgotten.
    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Self::Error>;

    /// Reads the log blocks from `position` on into `buffer`, a whole number of blocks long, none of them beyond the
    /// journal's end. `contents` has one entry a block. A log on storage overrides this with one large read.
    ///
    /// # Errors
    /// As [`LogRead::read`].
    fn read_run(
        &mut self,
        position: u32,
        block_size: usize,
        buffer: &mut [u8],
        contents: &mut [Content],
    ) -> Result<(), Self::Error> {
        for (offset, (block, content)) in (0..).zip(buffer.chunks_exact_mut(block_size).zip(contents)) {
            *content = self.read(position + offset, block)?;
        }
        Ok(())
    }

    /// Says that the `count` log blocks from `position` on (none beyond the journal's end) will be read soon. A hint.
    fn will_read(&mut self, _position: u32, _count: u32) {}
}

/// Why a log cannot be replayed. Nothing has been written when one of these is returned.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError<E: std::error::Error + 'static> {
    /// The log could not be read.
    #[error("log block {position} cannot be read: {source}")]
    Read {
        /// The log block.
        position: u32,
        /// Why.
        source: E,
    },
    /// The superblock or a descriptor points past the log's end.
    #[error("the log continues at block {position}, outside the journal: its superblock or a descriptor is damaged")]
    OutsideLog {
        /// Where the log would continue.
        position: u64,
    },
    /// A control block of a transaction that was committed has a bad checksum (jbd2: EFSBADCRC).
    #[error(
        "a descriptor or revoke block of committed transaction {sequence} has a bad checksum (its commit is log block {position})"
    )]
    Checksum {
        /// The transaction.
        sequence: u32,
        /// Its commit block.
        position: u32,
    },
    /// A revoke block of a committed transaction claims more records than fit (jbd2: EINVAL).
    #[error("log block {position}, transaction {sequence}: {source}")]
    RevokeCount {
        /// The revoke block.
        position: u32,
        /// Its transaction.
        sequence: u32,
        /// What it claims.
        source: crate::RevokeCountError,
    },
    /// The log overlaps itself, or has no end.
    #[error("the log goes round on itself in transaction {sequence}: its descriptors are damaged")]
    Endless {
        /// The transaction that it goes round in.
        sequence: u32,
    },
    /// Whoever holds a log in memory no longer has one of its control blocks.
    #[error("log block {position} is a control block, but whoever holds the log has let go of it")]
    NotHeld {
        /// The log block.
        position: u32,
    },
}
