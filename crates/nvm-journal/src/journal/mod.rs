//! The journal in a region: versions of home blocks, committed by transactions.
//!
//! A transaction is [`Journal::put`] and [`Journal::revoke`] for its blocks, then [`Journal::publish`]; until that returns
//! it does not exist for recovery, whatever of it is durable. Two fences make it durable: one for contents, headers and
//! checksums, one for the pointer that moves the end of the checkpoint area over them.
//!
//! Invariants:
//! * The latest version of a block is never stored to. What is overwritten in place is the old version, whose header is
//!   taken away with it, and the latest one is durable since an earlier fence.
//! * A latest version is taken away only when all older ones are durably gone ([`Journal::release`]), or while a revoke
//!   that is later than all of them stands.
//! * `block_of` is a permutation: every journal block belongs to exactly one header.
//!
//! Failure story: when the medium fails, the journal fails every later call with that error; what was published before
//! stays what recovery finds.

mod collect;
mod prepare;
mod release;
mod store;
mod take_up;

pub use prepare::{count_prepared, withdraw_prepared};

use crate::error::Error;
use crate::found::Found;
use crate::layout::{
    GONE, Geometry, HEADER_BYTES, Header, HeaderKind, HeaderState, MAGIC, MAGIC_UNFINISHED, NONE_PREPARED, PAGE_BYTES,
    Pointer, RESERVED_HEADERS, doubled, field,
};
use crate::medium::Medium;
use crate::owner::{self, Owner};
use hashbrown::HashMap;
use std::collections::BTreeMap;

/// What can be left out, for comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalOptions {
    /// Write only what differs, over the old version (section III-D). Without it every version is written whole
    /// (NJS-no-BJ).
    pub byte_level: bool,
    /// Keep a checksum of every block's content.
    pub checksums: bool,
}

impl Default for JournalOptions {
    fn default() -> Self {
        JournalOptions { byte_level: true, checksums: true }
    }
}

/// What the journal has done, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalCounters {
    /// Transactions published.
    pub transactions: u64,
    /// Blocks written that had no version (case 1).
    pub blocks_first: u64,
    /// Blocks written whole beside a latest version (case 2).
    pub blocks_second: u64,
    /// Blocks written as a difference over their old version (case 3).
    pub blocks_updated: u64,
    /// Bytes stored to the medium, in words.
    pub bytes_stored: u64,
    /// Those of them that were contents of updated blocks.
    pub delta_bytes: u64,
    /// Bytes of contents put.
    pub bytes_put: u64,
    /// Runs of garbage collection.
    pub collections: u64,
    /// Headers moved by it.
    pub headers_moved: u64,
    /// Versions released.
    pub versions_released: u64,
    /// Fences.
    pub fences: u64,
}

/// Headers of a block's versions, as indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Versions {
    latest: u32,
    /// The one just before, if it is kept.
    old: Option<u32>,
}

/// The journal. See the module.
#[derive(Debug)]
pub struct Journal<M: Medium> {
    medium: M,
    geometry: Geometry,
    options: JournalOptions,
    epoch: u32,
    /// The paper's hash table: in DRAM only.
    versions: HashMap<u64, Versions>,
    /// Journal block of each header.
    block_of: Vec<u32>,
    /// What the superblock says.
    checkpoint: Pointer,
    sequence_base: u32,
    /// Headers in use: the checkpoint area and then the commit area.
    commit_end: u32,
    /// Blocks of the transaction that is not published, and their headers.
    pending: BTreeMap<u64, u32>,
    /// Its revokes.
    revoked: BTreeMap<u64, u32>,
    /// It is prepared: what the superblock is to say when it is published.
    prepared: Option<Pointer>,
    /// Headers of the checkpoint area that hold nothing.
    invalid: u32,
    /// Revokes whose versions are taken away, but not durably: they stay until the next fence.
    retiring: Vec<u32>,
    has_failed: bool,
    counters: JournalCounters,
}

impl<M: Medium> Journal<M> {
    /// Takes a region for an owner: formats it if it never was, or was for other blocks. `sequence` is the guest's
    /// transaction before the first one that will be published.
    ///
    /// # Errors
    /// [`Error::Refused`] when the region has an owner already, is too small or damaged, or holds something else.
    pub fn claim(
        mut medium: M,
        region_offset: u64,
        block_bytes: u32,
        owner: &Owner,
        sequence: u32,
        options: JournalOptions,
    ) -> Result<Self, Error> {
        let (geometry, is_formatted) = claimable(medium.bytes(), region_offset, block_bytes)?;
        if !is_formatted {
            format(&mut medium, &geometry)?;
        }
        reset(&mut medium, &geometry, sequence)?;
        let word = owner::write(&mut medium, owner)?;
        Ok(Journal {
            geometry,
            options,
            epoch: word.epoch,
            versions: HashMap::new(),
            block_of: (0..geometry.blocks).collect(),
            checkpoint: Pointer::default(),
            sequence_base: sequence,
            commit_end: 0,
            pending: BTreeMap::new(),
            revoked: BTreeMap::new(),
            prepared: None,
            invalid: 0,
            retiring: Vec::new(),
            has_failed: false,
            counters: JournalCounters::default(),
            medium,
        })
    }

    /// Gives the region back: nobody's blocks are in it from here on. No medium where that has failed behind it.
    ///
    /// # Errors
    /// When the medium fails before.
    pub fn give_back(mut self) -> Result<Option<M>, Error> {
        self.check_works()?;
        let works = owner::clear(&mut self.medium)?;
        Ok(works.then_some(self.medium))
    }

    /// The medium as it is, owner and all.
    pub fn into_medium(self) -> M {
        self.medium
    }

    /// The medium.
    pub fn medium(&self) -> &M {
        &self.medium
    }

    /// The medium, for who simulates it.
    #[cfg(feature = "simulate")]
    pub fn medium_mut(&mut self) -> &mut M {
        &mut self.medium
    }

    /// Sizes and places.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How often the region has had an owner.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What was done.
    pub fn counters(&self) -> JournalCounters {
        self.counters
    }

    /// The guest's transaction that was published last.
    pub fn sequence(&self) -> u32 {
        self.sequence_base.wrapping_add(self.checkpoint.transaction)
    }

    /// The guest goes on with another sequence number: the next transaction published is the one after `sequence`.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn set_sequence(&mut self, sequence: u32) -> Result<(), Error> {
        self.check_works()?;
        self.sequence_base = sequence.wrapping_sub(self.checkpoint.transaction);
        self.store(field::SEQUENCE_BASE, doubled(self.sequence_base));
        self.medium.write_back(field::SEQUENCE_BASE, 8);
        self.fence()
    }

    /// Replaces what is written down of the owner, as a whole: durable on return.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn set_owner(&mut self, owner: &Owner) -> Result<(), Error> {
        self.check_works()?;
        self.epoch = owner::write(&mut self.medium, owner).inspect_err(|_| self.has_failed = true)?.epoch;
        Ok(())
    }

    /// Headers that a transaction can still take.
    pub fn room(&self) -> u32 {
        self.geometry.blocks - self.commit_end
    }

    /// Headers of the checkpoint area that garbage collection would make free.
    pub fn reclaimable(&self) -> u32 {
        self.invalid + self.retiring.len() as u32
    }

    /// Home blocks that have a version.
    pub fn len(&self) -> usize {
        self.versions.len()
    }

    /// Whether no home block has a version.
    pub fn is_empty(&self) -> bool {
        self.versions.is_empty()
    }

    /// Home blocks that have a version, in no order.
    pub fn homes(&self) -> impl Iterator<Item = u64> {
        self.versions.keys().copied()
    }

    /// Whether a home block has a committed version.
    pub fn contains(&self, home: u64) -> bool {
        self.versions.contains_key(&home)
    }

    /// The transaction number of a home block's latest committed version: tells later versions from earlier ones.
    pub fn version_of(&self, home: u64) -> Option<u32> {
        let header = self.header(self.versions.get(&home)?.latest)?;
        Some(header.transaction)
    }

    /// The latest committed content of a home block.
    pub fn latest(&self, home: u64) -> Option<&[u8]> {
        let versions = self.versions.get(&home)?;
        Some(self.block_bytes(self.block_of[versions.latest as usize]))
    }

    /// Whether the area is filled to the paper's three fourths.
    pub fn is_filled(&self) -> bool {
        u64::from(self.commit_end) * 4 >= u64::from(self.geometry.blocks) * 3
    }

    /// Headers that hold something.
    pub fn used(&self) -> u32 {
        self.commit_end.saturating_sub(self.reclaimable())
    }

    /// Whether a transaction is begun and not published.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty() || !self.revoked.is_empty() || self.is_prepared()
    }

    fn block_bytes(&self, block: u32) -> &[u8] {
        let at = self.geometry.block(block) as usize;
        &self.medium.bytes()[at..at + self.geometry.block_bytes as usize]
    }

    fn header(&self, index: u32) -> Option<Header> {
        match Header::read(self.medium.bytes(), self.geometry.header(index), &self.geometry) {
            HeaderState::Valid(header) => Some(header),
            HeaderState::Invalid | HeaderState::Damaged => None,
        }
    }

    fn check_works(&self) -> Result<(), Error> {
        if self.has_failed {
            return Err(Error::Failed {
                what: "storing to the NVM region".to_owned(),
                source: std::io::Error::other("an earlier write to it failed"),
            });
        }
        Ok(())
    }

    /// Nothing comes to a transaction that is prepared.
    fn check_open(&self) -> Result<(), Error> {
        if self.is_prepared() {
            return Err(Error::Failed {
                what: "adding to a prepared transaction in the NVM region".to_owned(),
                source: std::io::Error::from(std::io::ErrorKind::ResourceBusy),
            });
        }
        Ok(())
    }

    /// What the superblock says when the transaction that is begun is published.
    fn next_pointer(&self) -> Pointer {
        Pointer { end: self.commit_end, transaction: self.checkpoint.transaction.wrapping_add(1) }
    }

    fn fence(&mut self) -> Result<(), Error> {
        self.counters.fences += 1;
        if let Err(source) = self.medium.fence() {
            self.has_failed = true;
            return Err(Error::Failed { what: "making the NVM region durable".to_owned(), source });
        }
        // What the revokes stood for is durably gone.
        for index in std::mem::take(&mut self.retiring) {
            self.invalidate(index);
        }
        Ok(())
    }

    /// Begins the next transaction with a home block's new content. Putting a block twice keeps the later content.
    ///
    /// # Errors
    /// When there is no room left ([`Journal::room`]), or the medium has failed.
    ///
    /// # Panics
    /// When `content` is not a block.
    pub fn put(&mut self, home: u64, content: &[u8]) -> Result<(), Error> {
        self.check_works()?;
        self.check_open()?;
        assert_eq!(content.len(), self.geometry.block_bytes as usize, "a block's content is a block");
        self.counters.bytes_put += content.len() as u64;
        if let Some(index) = self.pending.get(&home) {
            let block = self.block_of[*index as usize];
            self.write_whole(block, content);
            return Ok(());
        }
        let index = self.take_header()?;
        match self.versions.get(&home).copied() {
            None => {
                self.counters.blocks_first += 1;
                self.write_whole(self.block_of[index as usize], content);
            }
            Some(Versions { old: None, .. }) => {
                self.counters.blocks_second += 1;
                self.write_whole(self.block_of[index as usize], content);
            }
            Some(Versions { latest, old: Some(old) }) => {
                // The old version leaves the checkpoint area, and the free block takes its place there: only the blocks
                // that the headers name are exchanged. Nothing of it counts any more, since the latest is later.
                self.counters.blocks_updated += 1;
                self.invalidate(old);
                self.block_of.swap(index as usize, old as usize);
                self.versions.insert(home, Versions { latest, old: None });
                self.write_difference(self.block_of[index as usize], content);
            }
        }
        self.write_header(index, HeaderKind::Version, home);
        self.pending.insert(home, index);
        Ok(())
    }

    /// Adds to the next transaction that no version of a home block counts any more: neither older ones nor one put by
    /// it.
    ///
    /// # Errors
    /// As [`Journal::put`].
    pub fn revoke(&mut self, home: u64) -> Result<(), Error> {
        self.check_works()?;
        self.check_open()?;
        if self.revoked.contains_key(&home) {
            return Ok(());
        }
        if let Some(index) = self.pending.remove(&home) {
            // Its header says so instead.
            self.write_header(index, HeaderKind::Revoke, home);
            self.revoked.insert(home, index);
        } else if self.versions.contains_key(&home) {
            let index = self.take_header()?;
            self.write_header(index, HeaderKind::Revoke, home);
            self.revoked.insert(home, index);
        }
        Ok(())
    }

    fn take_header(&mut self) -> Result<u32, Error> {
        if self.commit_end >= self.geometry.blocks {
            return Err(Error::Failed {
                what: "writing to the NVM region".to_owned(),
                source: std::io::Error::from(std::io::ErrorKind::StorageFull),
            });
        }
        self.commit_end += 1;
        Ok(self.commit_end - 1)
    }

    /// Commits the transaction: durable on return.
    ///
    /// # Errors
    /// When the medium fails: it is not known then whether the transaction is durable.
    pub fn publish(&mut self) -> Result<(), Error> {
        self.check_works()?;
        let next = self.next_pointer();
        // All of one that is prepared is durable.
        if self.prepared.take().is_none() {
            self.store(field::COMMIT, next.encode());
            self.medium.write_back(field::COMMIT, 8);
            if self.has_pending() {
                // Contents, headers, checksums, and the headers that were taken away.
                self.fence()?;
            }
        }
        self.store(field::CHECKPOINT, next.encode());
        self.medium.write_back(field::CHECKPOINT, 8);
        self.fence()?;
        self.checkpoint = next;
        self.counters.transactions += 1;
        for (home, index) in std::mem::take(&mut self.pending) {
            let before = self.versions.insert(home, Versions { latest: index, old: None });
            match before {
                Some(before) if self.options.byte_level => {
                    self.versions.insert(home, Versions { latest: index, old: Some(before.latest) });
                }
                Some(before) => self.invalidate(before.latest),
                None => {}
            }
        }
        for (home, index) in std::mem::take(&mut self.revoked) {
            if let Some(Versions { latest, old }) = self.versions.remove(&home) {
                // In any order: the revoke is later than both, and stays until they are durably gone.
                self.invalidate(latest);
                old.into_iter().for_each(|old| self.invalidate(old));
                self.counters.versions_released += 1;
            }
            self.retiring.push(index);
        }
        Ok(())
    }

    /// Forgets the transaction that was begun, and is not prepared.
    pub fn abandon(&mut self) {
        debug_assert!(!self.is_prepared(), "a prepared transaction is withdrawn");
        self.pending.clear();
        self.revoked.clear();
        self.commit_end = self.checkpoint.end;
    }

    /// What must hold between calls, for tests.
    ///
    /// # Errors
    /// A sentence about what does not.
    pub fn check(&self) -> Result<(), String> {
        let mut seen = vec![false; self.block_of.len()];
        for block in &self.block_of {
            if std::mem::replace(&mut seen[*block as usize], true) {
                return Err(format!("journal block {block} belongs to two headers"));
            }
        }
        let mut valid = self.retiring.len() as u32;
        for (home, versions) in &self.versions {
            for index in [Some(versions.latest), versions.old].into_iter().flatten() {
                valid += 1;
                let Some(header) = self.header(index) else {
                    return Err(format!("header {index} of block {home} is not valid"));
                };
                let expected = (HeaderKind::Version, *home, self.block_of[index as usize]);
                if (header.kind, header.home, header.block) != expected || index >= self.checkpoint.end {
                    return Err(format!("header {index} is {header:?}, and should be {expected:?}"));
                }
            }
        }
        if valid + self.invalid != self.checkpoint.end {
            return Err(format!(
                "{valid} valid and {} invalid headers in a checkpoint area of {}",
                self.invalid, self.checkpoint.end
            ));
        }
        match Found::read(self.medium.bytes()) {
            Ok(Some(found))
                if !found.latest.keys().eq(self.versions.keys().collect::<std::collections::BTreeSet<_>>()) =>
            {
                Err("the region holds other blocks than the table says".to_owned())
            }
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("the region is not one".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The geometry that a region has, or would be given, for an owner with blocks of `block_bytes`, and whether it has it.
fn claimable(region: &[u8], region_offset: u64, block_bytes: u32) -> Result<(Geometry, bool), Error> {
    let known = Found::read(region)?;
    if let Some(found) = &known {
        if found.owner.is_some() {
            return Err(Error::refused(
                "the NVM region holds committed blocks of a file system: recover that first (amberlog recover --disk IMAGE \
                 --nvm PATH)",
            ));
        }
        let geometry = found.geometry;
        let wanted = (block_bytes, region_offset, region.len() as u64);
        if (geometry.block_bytes, geometry.region_offset, geometry.region_bytes) == wanted {
            return Ok((geometry, true));
        }
    } else {
        let first = &region[..region.len().min(PAGE_BYTES as usize)];
        let is_unfinished = first.first_chunk().is_some_and(|word| u64::from_le_bytes(*word) == MAGIC_UNFINISHED);
        if !is_unfinished && first.iter().any(|byte| *byte != 0) {
            return Err(Error::refused(
                "the NVM region holds something that is not amberlog's: name another one, or fill its first 4096 bytes \
                 with zeros if nobody needs it",
            ));
        }
    }
    Ok((Geometry::fill(region_offset, region.len() as u64, block_bytes, random_identity())?, false))
}

/// Whether a region can be claimed for blocks of `block_bytes`, and how many it will hold. Changes nothing.
///
/// # Errors
/// [`Error::Refused`] as [`Journal::claim`].
pub fn capacity(region: &[u8], region_offset: u64, block_bytes: u32) -> Result<u32, Error> {
    claimable(region, region_offset, block_bytes).map(|(geometry, _)| geometry.blocks)
}

/// Makes a region nobody's, whatever it holds: everything in it is at home, durably, or not wanted.
///
/// # Errors
/// [`Error::Refused`] when it is no region, otherwise when the medium fails.
pub fn forget<M: Medium>(medium: &mut M) -> Result<(), Error> {
    match Geometry::read(medium.bytes())? {
        Some(geometry) => geometry.check_fits(medium.bytes()).and_then(|()| owner::clear(medium)).map(drop),
        None => Err(Error::refused("there is no NVM region of amberlog's there")),
    }
}

/// A random number from the kernel; never the same twice in practice.
fn random_identity() -> u128 {
    use std::hash::{BuildHasher, RandomState};
    u128::from(RandomState::new().hash_one(0)) << 64 | u128::from(RandomState::new().hash_one(1))
}

/// Writes the superblock's geometry, the magic number last.
fn format<M: Medium>(medium: &mut M, geometry: &Geometry) -> Result<(), Error> {
    let failed = || Error::failed("formatting the NVM region");
    // One that has another geometry is none from here on.
    medium.store_word(field::MAGIC, MAGIC_UNFINISHED);
    medium.write_back(field::MAGIC, 8);
    medium.fence().map_err(failed())?;
    for (index, word) in geometry.words().into_iter().enumerate().skip(1) {
        medium.store_word(index as u64 * 8, word);
    }
    medium.store_word(field::OWNER, owner::OwnerWord::default().encode());
    medium.write_back(0, 256);
    medium.fence().map_err(failed())?;
    medium.store_word(field::MAGIC, MAGIC);
    medium.write_back(field::MAGIC, 8);
    medium.fence().map_err(failed())
}

/// Empties a region that is nobody's.
fn reset<M: Medium>(medium: &mut M, geometry: &Geometry, sequence: u32) -> Result<(), Error> {
    for index in 0..RESERVED_HEADERS {
        for word in 0..2 {
            medium.store_word(geometry.reserved(index) + word * 8, GONE);
        }
    }
    medium.write_back(geometry.reserved(0), u64::from(RESERVED_HEADERS) * HEADER_BYTES);
    medium.store_word(field::CHECKPOINT, Pointer::default().encode());
    medium.store_word(field::COMMIT, Pointer::default().encode());
    medium.store_word(field::SEQUENCE_BASE, doubled(sequence));
    medium.store_word(field::PREPARED, NONE_PREPARED);
    medium.write_back(field::CHECKPOINT, field::PREPARED + 8 - field::CHECKPOINT);
    medium.fence().map_err(Error::failed("emptying the NVM region"))
}
