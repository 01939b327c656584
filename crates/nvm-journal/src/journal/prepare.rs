//! A transaction that is complete in the region and counts only on a condition, which whoever recovers looks at.
//!
//! It lies in the commit area, as one that is not published; what says so are two words of the superblock. The condition's bytes are in
//! journal blocks of headers that are free: nothing else takes them until the transaction is published or withdrawn.
//!
//! It must never: say that a transaction is prepared before all of it, and its condition, are durable; have what a later one with the same
//! number says taken for it (so it is published, or withdrawn durably, before anything else is stored).
//!
//! Failure story: a condition that is damaged refuses the whole region, as a damaged header does.

use super::Journal;
use crate::error::Error;
use crate::found::Found;
use crate::layout::{CONDITION_HEAD_BYTES, Geometry, NONE_PREPARED, Pointer, condition_checksum, doubled, field};
use crate::medium::Medium;

/// How many journal blocks a condition takes.
fn blocks_of(len: usize, geometry: &Geometry) -> u32 {
    len.div_ceil(geometry.block_bytes as usize - CONDITION_HEAD_BYTES).max(1) as u32
}

impl<M: Medium> Journal<M> {
    /// Whether the region has room for the condition of the transaction that is begun.
    pub fn can_prepare(&self, condition_bytes: usize) -> bool {
        blocks_of(condition_bytes, &self.geometry) <= self.room()
    }

    /// Whether the transaction that is begun is prepared.
    pub fn is_prepared(&self) -> bool {
        self.prepared.is_some()
    }

    /// Prepares the transaction that is begun: durable on return, it counts for recovery where that finds its condition true. What follows
    /// is [`Journal::publish`] or [`Journal::withdraw`].
    ///
    /// # Errors
    /// When there is no room for the condition, or the medium fails: it is not known then whether the transaction is prepared.
    pub fn prepare(&mut self, condition: &[u8]) -> Result<(), Error> {
        self.check_works()?;
        if self.is_prepared() || !self.can_prepare(condition.len()) {
            return Err(Error::Failed {
                what: "preparing a transaction in the NVM region".to_owned(),
                source: std::io::Error::from(std::io::ErrorKind::ResourceBusy),
            });
        }
        let next = self.next_pointer();
        let count = blocks_of(condition.len(), &self.geometry);
        let blocks: Vec<u32> = (0..count).map(|index| self.block_of[(self.commit_end + index) as usize]).collect();
        let each = self.geometry.block_bytes as usize - CONDITION_HEAD_BYTES;
        for (index, block) in blocks.iter().enumerate() {
            let payload = &condition[(index * each).min(condition.len())..((index + 1) * each).min(condition.len())];
            let following = blocks.get(index + 1).copied().unwrap_or(u32::MAX);
            let mut content = vec![0; self.geometry.block_bytes as usize];
            content[..4].copy_from_slice(&following.to_le_bytes());
            content[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
            content[8..12].copy_from_slice(&next.transaction.to_le_bytes());
            content[CONDITION_HEAD_BYTES..][..payload.len()].copy_from_slice(payload);
            let checksum = condition_checksum(&content);
            content[12..16].copy_from_slice(&checksum.to_le_bytes());
            self.counters.bytes_stored += content.len() as u64;
            self.medium.stream(self.geometry.block(*block), &content);
        }
        self.store(field::COMMIT, next.encode());
        self.store(field::CONDITION, doubled(blocks[0]));
        self.medium.write_back(field::COMMIT, field::CONDITION + 8 - field::COMMIT);
        // Contents, headers, checksums, the headers that were taken away, and the condition.
        self.fence()?;
        self.store(field::PREPARED, next.encode());
        self.medium.write_back(field::PREPARED, 8);
        self.fence()?;
        self.prepared = Some(next);
        Ok(())
    }

    /// Forgets the transaction that is prepared: durably so on return.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn withdraw(&mut self) -> Result<(), Error> {
        self.check_works()?;
        if self.prepared.is_none() {
            return Ok(());
        }
        self.store(field::PREPARED, NONE_PREPARED);
        self.medium.write_back(field::PREPARED, 8);
        self.fence()?;
        self.prepared = None;
        self.abandon();
        Ok(())
    }
}

/// Has the prepared transaction of a region count, whose condition is true: durable on return.
///
/// # Errors
/// [`Error::Refused`] when there is none, otherwise when the medium fails.
pub fn count_prepared<M: Medium>(medium: &mut M) -> Result<(), Error> {
    let pointer = prepared_in(medium)?;
    medium.store_word(field::CHECKPOINT, pointer.encode());
    medium.write_back(field::CHECKPOINT, 8);
    medium.fence().map_err(Error::failed("committing the last transaction in the NVM region"))
}

/// Forgets the prepared transaction of a region, whose condition is not true: durable on return.
///
/// # Errors
/// [`Error::Refused`] when there is none, otherwise when the medium fails.
pub fn withdraw_prepared<M: Medium>(medium: &mut M) -> Result<(), Error> {
    prepared_in(medium)?;
    medium.store_word(field::PREPARED, NONE_PREPARED);
    medium.write_back(field::PREPARED, 8);
    medium.fence().map_err(Error::failed("giving up the last transaction in the NVM region"))
}

fn prepared_in<M: Medium>(medium: &M) -> Result<Pointer, Error> {
    let found = Found::read(medium.bytes())?;
    let prepared = found.and_then(|found| found.prepared);
    prepared
        .map(|prepared| prepared.pointer)
        .ok_or_else(|| Error::refused("the NVM region has no prepared transaction"))
}
