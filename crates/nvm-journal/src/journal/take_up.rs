//! Going on with a region in another process, while the owner of its blocks lives: the process before was killed at any store.
//!
//! Its stores are all there, in the order in which it made them. Which of them outlive a loss of power is not known any more: what was not
//! fenced, or was written back and not fenced, may be lost. So the whole region is written back and fenced before anything is built
//! on it. (An update by difference would otherwise leave out words that only the processor's cache has.)
//!
//! Headers say the rest: which version of a block is the latest, which is kept beside it to be written over, and which revokes
//! stand. What had begun and was not published never happened. A garbage collection that was cut off has left headers twice at
//! most, since each was stored at its new place before it was taken from the old one.
//!
//! It must never: count what [`Found`] does not count; take a header away that stands for the latest version of its block. A region whose
//! medium failed the process before is not to be gone on with: what it was told to make durable then may be lost, and it says so only once.
//!
//! Failure story: a region that says what no process can have left is refused, and nothing of it was changed.

use super::{Journal, JournalCounters, JournalOptions, Versions};
use crate::error::Error;
use crate::found::Found;
use crate::layout::{GONE, HEADER_BYTES, Header, HeaderKind, HeaderState, RESERVED_HEADERS, field, is_later};
use crate::medium::Medium;
use hashbrown::HashMap;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Headers of the checkpoint area that count, and those that do not.
#[derive(Default)]
struct Sorted {
    versions: HashMap<u64, Versions>,
    /// Revokes that stand until what is older is durably gone.
    retiring: Vec<u32>,
    /// What is older than what counts.
    superseded: Vec<u32>,
    /// What holds nothing: of some of them only one word says so.
    invalid: Vec<u32>,
    /// Journal blocks of all that counts.
    blocks: Vec<(u32, u32)>,
}

impl<M: Medium> Journal<M> {
    /// Goes on with a region that has an owner. Nothing where it has none.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is no region, or damaged; otherwise when the medium fails.
    pub fn take_up(mut medium: M, options: JournalOptions) -> Result<Option<Self>, Error> {
        let Some(found) = Found::read(medium.bytes())? else {
            return Err(Error::refused("there is no NVM region of amberlog's there"));
        };
        if found.owner.is_none() {
            return Ok(None);
        }
        if found.prepared.is_some() {
            // Whoever goes on knows whether it counts, and says so first.
            return Err(Error::refused("the NVM region has a prepared transaction, which nobody has decided about"));
        }
        let geometry = found.geometry;
        let sorted = Sorted::of(&medium, &found, options)?;
        // A medium that nobody has stored to in this process would take a fence for done.
        let pointer = medium.word(field::CHECKPOINT);
        medium.store_word(field::CHECKPOINT, pointer);
        medium.write_back(0, geometry.end());
        medium.fence().map_err(Error::failed("making durable what is in the NVM region"))?;
        let mut journal = Journal {
            options,
            epoch: found.epoch,
            block_of: sorted.block_of(geometry.blocks)?,
            versions: sorted.versions,
            checkpoint: found.checkpoint,
            sequence_base: found.sequence.wrapping_sub(found.checkpoint.transaction),
            commit_end: found.checkpoint.end,
            pending: BTreeMap::new(),
            revoked: BTreeMap::new(),
            prepared: None,
            invalid: 0,
            retiring: sorted.retiring,
            has_failed: false,
            counters: JournalCounters::default(),
            geometry,
            medium,
        };
        for index in sorted.superseded {
            journal.invalidate(index);
        }
        // Half of one, and half of a header that is stored there later, would be a damaged one.
        for index in sorted.invalid {
            journal.invalidate(index);
        }
        // Each of them is in the checkpoint area, durably.
        for index in 0..RESERVED_HEADERS {
            let at = journal.geometry.reserved(index);
            journal.store(at, GONE);
            journal.store(at + 8, GONE);
        }
        journal.medium.write_back(journal.geometry.reserved(0), u64::from(RESERVED_HEADERS) * HEADER_BYTES);
        journal.fence()?;
        Ok(Some(journal))
    }
}

impl Sorted {
    fn of<M: Medium>(medium: &M, found: &Found, options: JournalOptions) -> Result<Self, Error> {
        let geometry = &found.geometry;
        let mut sorted = Sorted::default();
        let mut headers: BTreeMap<u64, Vec<(u32, Header)>> = BTreeMap::new();
        for index in 0..found.checkpoint.end {
            match Header::read(medium.bytes(), geometry.header(index), geometry) {
                HeaderState::Valid(header) => headers.entry(header.home).or_default().push((index, header)),
                HeaderState::Invalid => sorted.invalid.push(index),
                HeaderState::Damaged => return Err(damaged(index)),
            }
        }
        for index in 0..RESERVED_HEADERS {
            let state = Header::read(medium.bytes(), geometry.reserved(index), geometry);
            if let HeaderState::Valid(header) = state
                && !headers.get(&header.home).is_some_and(|known| known.iter().any(|(_, other)| *other == header))
            {
                return Err(Error::refused(format!(
                    "the NVM region is damaged: reserved header {index} is nowhere else, though no power was lost"
                )));
            }
        }
        for (home, mut known) in headers {
            // The latest first; of one that was being moved, the one at its new place.
            known.sort_by(|(index, header), (other_index, other)| {
                let later = is_later(header.transaction, other.transaction);
                let earlier = is_later(other.transaction, header.transaction);
                match (later, earlier) {
                    (true, _) => Ordering::Less,
                    (_, true) => Ordering::Greater,
                    _ => index.cmp(other_index),
                }
            });
            sorted.add(home, &known, options);
        }
        Ok(sorted)
    }

    /// All headers of a home block, the latest first.
    fn add(&mut self, home: u64, headers: &[(u32, Header)], options: JournalOptions) {
        let mut is_revoked = false;
        let mut before: Option<u32> = None;
        for (index, header) in headers {
            let is_copy = before == Some(header.transaction);
            before = Some(header.transaction);
            let counts = !is_copy
                && match (header.kind, self.versions.get_mut(&home)) {
                    (HeaderKind::Revoke, _) => {
                        is_revoked = true;
                        self.retiring.push(*index);
                        true
                    }
                    (HeaderKind::Version, _) if is_revoked => false,
                    (HeaderKind::Version, None) => {
                        self.versions.insert(home, Versions { latest: *index, old: None });
                        true
                    }
                    (HeaderKind::Version, Some(versions)) if options.byte_level && versions.old.is_none() => {
                        versions.old = Some(*index);
                        true
                    }
                    (HeaderKind::Version, Some(_)) => false,
                };
            if counts { self.blocks.push((*index, header.block)) } else { self.superseded.push(*index) }
        }
    }

    /// The journal block of each header: its own, if it counts, and any of the others if not.
    fn block_of(&self, blocks: u32) -> Result<Vec<u32>, Error> {
        let mut block_of = vec![u32::MAX; blocks as usize];
        let mut is_taken = vec![false; blocks as usize];
        for (index, block) in &self.blocks {
            if std::mem::replace(&mut is_taken[*block as usize], true) {
                return Err(Error::refused(format!(
                    "the NVM region is damaged: journal block {block} is that of two headers"
                )));
            }
            block_of[*index as usize] = *block;
        }
        let mut free = (0..blocks).filter(|block| !is_taken[*block as usize]);
        for block in block_of.iter_mut().filter(|block| **block == u32::MAX) {
            // There are as many blocks as headers.
            *block = free.next().ok_or_else(|| Error::refused("the NVM region has fewer blocks than headers"))?;
        }
        Ok(block_of)
    }
}

fn damaged(index: u32) -> Error {
    Error::refused(format!("the NVM region is damaged: header {index} does not match its check"))
}
