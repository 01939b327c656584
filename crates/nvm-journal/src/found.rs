//! A region as a crash left it (the paper's section III-F): which versions are the last committed ones.
//!
//! Only the checkpoint area counts, and the reserved headers, which stand in for headers that garbage collection was
//! moving. What is in the commit area never happened. Of several versions of a home block the one of the latest transaction
//! is the one; where that is a revoke, there is none.
//!
//! Reading changes nothing, and nothing here panics on what a region says.

use crate::error::Error;
use crate::layout::{
    CONDITION_HEAD_BYTES, Geometry, Header, HeaderKind, HeaderState, NO_CHECKSUM, NONE_PREPARED, Pointer,
    RESERVED_HEADERS, checksum_of_content, condition_checksum, field, is_later, undoubled,
};
use crate::medium::word_of;
use crate::owner::{self, Owner};
use std::collections::BTreeMap;

/// A transaction that counts on a condition ([`crate::Journal::prepare`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// End of the checkpoint area with it, and its number.
    pub pointer: Pointer,
    /// The condition.
    pub condition: Vec<u8>,
}

/// What is in a region.
#[derive(Clone, Debug)]
pub struct Found {
    /// Sizes and places.
    pub geometry: Geometry,
    /// How often the region has had an owner.
    pub epoch: u32,
    /// Whose it is; nothing when it is free.
    pub owner: Option<Owner>,
    /// End of the checkpoint area, and the last committed transaction.
    pub checkpoint: Pointer,
    /// End of the commit area.
    pub commit: Pointer,
    /// The transaction after that one, where it counts on a condition. Nothing else here knows of it.
    pub prepared: Option<Prepared>,
    /// Sequence number of the guest's transaction that was committed last.
    pub sequence: u32,
    /// The latest version of each home block: its header.
    pub latest: BTreeMap<u64, Header>,
    /// Valid headers in the checkpoint area that are not the latest of their block.
    pub old: u32,
    /// Revokes that still stand.
    pub revokes: u32,
    /// Headers in the checkpoint area that hold nothing.
    pub invalid: u32,
    /// Reserved headers that are in use: garbage collection was cut off.
    pub reserved: u32,
}

impl Found {
    /// Reads a region; nothing where none was ever made.
    ///
    /// # Errors
    /// [`Error::Refused`] with a sentence when it is damaged, or was longer and has an owner.
    pub fn read(region: &[u8]) -> Result<Option<Self>, Error> {
        Self::read_to(region, false)
    }

    /// The same with the prepared transaction, whose condition is true.
    ///
    /// # Errors
    /// As [`Found::read`].
    pub fn with_prepared(region: &[u8]) -> Result<Option<Self>, Error> {
        Self::read_to(region, true)
    }

    fn read_to(region: &[u8], counts_prepared: bool) -> Result<Option<Self>, Error> {
        let Some(geometry) = Geometry::read(region)? else { return Ok(None) };
        let (word, owner) = owner::read(region)?;
        let mut found = Found {
            geometry,
            epoch: word.epoch,
            owner,
            checkpoint: Pointer::default(),
            commit: Pointer::default(),
            prepared: None,
            sequence: 0,
            latest: BTreeMap::new(),
            old: 0,
            revokes: 0,
            invalid: 0,
            reserved: 0,
        };
        if found.owner.is_none() {
            return Ok(Some(found));
        }
        geometry.check_fits(region)?;
        found.checkpoint = Pointer::decode(word_of(region, field::CHECKPOINT))?;
        found.commit = Pointer::decode(word_of(region, field::COMMIT))?;
        let base = undoubled(word_of(region, field::SEQUENCE_BASE))
            .ok_or_else(|| Error::refused("the NVM region is damaged: its sequence number does not match its check"))?;
        found.prepared = prepared(region, &geometry, found.checkpoint)?;
        if counts_prepared && let Some(prepared) = found.prepared.take() {
            found.checkpoint = prepared.pointer;
        }
        found.sequence = base.wrapping_add(found.checkpoint.transaction);
        if found.checkpoint.end > geometry.blocks {
            return Err(Error::refused(format!(
                "the NVM region is damaged: its checkpoint area ends at header {}, and it has {}",
                found.checkpoint.end, geometry.blocks
            )));
        }
        for index in 0..found.checkpoint.end {
            match Header::read(region, geometry.header(index), &geometry) {
                HeaderState::Invalid => found.invalid += 1,
                HeaderState::Damaged => return Err(damaged("header", index)),
                HeaderState::Valid(header) => found.add(header, ("header", index))?,
            }
        }
        for index in 0..RESERVED_HEADERS {
            match Header::read(region, geometry.reserved(index), &geometry) {
                HeaderState::Invalid => {}
                HeaderState::Damaged => return Err(damaged("reserved header", index)),
                HeaderState::Valid(header) => {
                    found.reserved += 1;
                    found.add(header, ("reserved header", index))?;
                }
            }
        }
        found.revokes = found.latest.values().filter(|header| header.kind == HeaderKind::Revoke).count() as u32;
        found.latest.retain(|_, header| header.kind == HeaderKind::Version);
        Ok(Some(found))
    }

    /// Whether anything in the region is not at home, or may not be.
    pub fn owes(&self) -> bool {
        !self.latest.is_empty() || self.prepared.is_some()
    }

    fn add(&mut self, header: Header, (what, index): (&str, u32)) -> Result<(), Error> {
        if is_later(header.transaction, self.checkpoint.transaction) {
            return Err(Error::refused(format!(
                "the NVM region is damaged: {what} {index} is of transaction {}, later than the last one, {}",
                header.transaction, self.checkpoint.transaction
            )));
        }
        match self.latest.get_mut(&header.home) {
            None => {
                self.latest.insert(header.home, header);
            }
            // A header that garbage collection was moving is there twice.
            Some(known) if *known == header => {}
            Some(known) if known.transaction == header.transaction => {
                return Err(Error::refused(format!(
                    "the NVM region is damaged: {what} {index} and another one are both version {} of block {}",
                    header.transaction, header.home
                )));
            }
            Some(known) => {
                if is_later(header.transaction, known.transaction) {
                    *known = header;
                }
                self.old += 1;
            }
        }
        Ok(())
    }

    /// The content of a version that is in [`Found::latest`].
    pub fn content<'a>(&self, region: &'a [u8], header: &Header) -> &'a [u8] {
        let at = self.geometry.block(header.block) as usize;
        &region[at..at + self.geometry.block_bytes as usize]
    }

    /// Whether a version's content is what it was when it was committed, as far as a checksum was kept.
    pub fn is_whole(&self, region: &[u8], header: &Header) -> bool {
        let stored = stored_checksum(region, &self.geometry, header.block);
        stored == NO_CHECKSUM || stored == checksum_of_content(self.content(region, header))
    }

    /// Verifies the content of every latest version.
    ///
    /// # Errors
    /// [`Error::Refused`] that names the first home block whose content is damaged.
    pub fn verify(&self, region: &[u8]) -> Result<(), Error> {
        match self.latest.values().find(|header| !self.is_whole(region, header)) {
            None => Ok(()),
            Some(header) => Err(Error::refused(format!(
                "the NVM region is damaged: the content of journal block {}, the version of transaction {} of file system \
                 block {}, does not match its checksum",
                header.block, header.transaction, header.home
            ))),
        }
    }
}

/// The transaction that is prepared after the last one that counts.
fn prepared(region: &[u8], geometry: &Geometry, checkpoint: Pointer) -> Result<Option<Prepared>, Error> {
    let word = word_of(region, field::PREPARED);
    if word == NONE_PREPARED {
        return Ok(None);
    }
    let condition = undoubled(word_of(region, field::CONDITION));
    let pointer = match (Pointer::decode(word), &condition) {
        // Who prepares writes both. Nobody has: an amberlog that knows of neither has claimed the region, around what lay there.
        (Err(_), None) => return Ok(None),
        (pointer, _) => pointer?,
    };
    if pointer.transaction != checkpoint.transaction.wrapping_add(1) {
        // It was published since.
        return Ok(None);
    }
    let damaged = || Error::refused("the NVM region is damaged: what its prepared transaction counts on is not whole");
    if pointer.end > geometry.blocks || pointer.end < checkpoint.end {
        return Err(damaged());
    }
    let mut next = condition.ok_or_else(damaged)?;
    let mut condition = Vec::new();
    for _ in 0..geometry.blocks {
        if next >= geometry.blocks {
            return if next == u32::MAX { Ok(Some(Prepared { pointer, condition })) } else { Err(damaged()) };
        }
        let block = &region[geometry.block(next) as usize..][..geometry.block_bytes as usize];
        let field = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        let payload = &block[CONDITION_HEAD_BYTES..];
        let payload = payload.get(..field(4) as usize).ok_or_else(damaged)?;
        if field(8) != pointer.transaction || field(12) != condition_checksum(block) {
            return Err(damaged());
        }
        condition.extend_from_slice(payload);
        next = field(0);
    }
    Err(damaged())
}

fn damaged(what: &str, index: u32) -> Error {
    Error::refused(format!("the NVM region is damaged: {what} {index} does not match its check"))
}

/// The checksum that is stored for a journal block; [`NO_CHECKSUM`] when none is.
pub(crate) fn stored_checksum(region: &[u8], geometry: &Geometry, block: u32) -> u32 {
    let at = geometry.checksum(block);
    let word = word_of(region, at & !7);
    (word >> ((at & 4) * 8)) as u32
}
