//! What the log on storage holds: compounds from its tail to its head, and of each block the newest copy.

use jbd2::{Format, sequence};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// Where the newest durable version of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// In the log only.
    Owed,
    /// The guest, or we, have written it home since it is in the log; so many writes had ended then.
    Written(u64),
    /// And a flush has covered that.
    Settled,
}

/// The newest copy of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    /// The compound that it is in.
    pub compound: u32,
    pub position: u32,
    pub escaped: bool,
    /// The guest's transaction.
    pub transaction: u32,
    pub home: Home,
    /// The guest has, or may have, something else at home than this copy: it wrote past its journal.
    pub is_past: bool,
}

/// A compound on storage.
#[derive(Debug)]
struct Logged {
    sequence: u32,
    length: u32,
    /// The blocks whose newest copy is here.
    newest: BTreeSet<u64>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Live {
    /// Where the log begins on storage, and with which number: durable.
    pub tail: (u32, u32),
    /// Where the next compound goes, and its number.
    pub head: (u32, u32),
    compounds: VecDeque<Logged>,
    blocks: BTreeMap<u64, Copy>,
    /// What a flush may settle.
    unflushed: BTreeSet<u64>,
}

impl Live {
    /// What an earlier machine has left on storage: where the log begins, and its compounds, with their lengths.
    pub fn found(format: &Format, tail: (u32, u32), lengths: &[u32]) -> Self {
        let mut live = Live::empty(tail.0, tail.1);
        for length in lengths {
            live.add(format, *length, &[], &[]);
        }
        live
    }

    /// A block's newest copy, of those that were found. False where there is no such compound.
    pub fn put(&mut self, block: u64, copy: Copy) -> bool {
        let Some(compound) = self.compounds.iter_mut().find(|compound| compound.sequence == copy.compound) else {
            return false;
        };
        compound.newest.insert(block);
        self.blocks.insert(block, copy);
        true
    }

    pub fn empty(position: u32, sequence: u32) -> Self {
        let (tail, head) = ((position, sequence), (position, sequence));
        Live { tail, head, compounds: VecDeque::new(), blocks: BTreeMap::new(), unflushed: BTreeSet::new() }
    }

    /// Log blocks that a compound may have: what is between head and tail, but one.
    pub fn room(&self, format: &Format) -> u32 {
        let used: u32 = self.compounds.iter().map(|compound| compound.length).sum();
        format.log_blocks() - used - 1
    }

    pub fn is_empty(&self) -> bool {
        self.compounds.is_empty()
    }

    pub fn get(&self, block: u64) -> Option<&Copy> {
        self.blocks.get(&block)
    }

    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &Copy)> {
        self.blocks.range(range).map(|(block, copy)| (*block, copy))
    }

    /// A compound is durable: `tags` with position, whether escaped, and the guest's transaction; and `revokes`.
    pub fn add(&mut self, format: &Format, length: u32, tags: &[(u64, u32, bool, u32)], revokes: &[u64]) {
        let sequence = self.head.1;
        self.head = (format.advance(self.head.0, length), sequence.wrapping_add(1));
        for block in revokes {
            self.forget(*block);
        }
        for (block, position, escaped, transaction) in tags {
            self.forget(*block);
            let copy = Copy {
                compound: sequence,
                position: *position,
                escaped: *escaped,
                transaction: *transaction,
                home: Home::Owed,
                is_past: false,
            };
            self.blocks.insert(*block, copy);
        }
        let newest = tags.iter().map(|tag| tag.0).collect();
        self.compounds.push_back(Logged { sequence, length, newest });
    }

    /// Superseded or revoked by what is in a later compound.
    fn forget(&mut self, block: u64) {
        if let Some(copy) = self.blocks.remove(&block)
            && let Some(compound) = self.compounds.iter_mut().find(|compound| compound.sequence == copy.compound)
        {
            compound.newest.remove(&block);
        }
    }

    /// The guest writes these blocks: until that has ended only the log has them for certain. Gives their copies.
    pub fn depart(&mut self, range: Range<u64>) -> impl Iterator<Item = (u64, Copy)> {
        self.blocks.range_mut(range).map(|(block, copy)| {
            copy.home = Home::Owed;
            (*block, *copy)
        })
    }

    /// The guest, or we, have written a block home, and it is the copy of compound `compound` that was the newest when that
    /// write began.
    pub fn written(&mut self, block: u64, compound: u32, ended: u64) {
        if let Some(copy) = self.blocks.get_mut(&block)
            && copy.compound == compound
        {
            copy.home = Home::Written(ended);
            self.unflushed.insert(block);
        }
    }

    /// What the guest has at home is, or may be, something else than the newest copy.
    pub fn past(&mut self, block: u64) {
        if let Some(copy) = self.blocks.get_mut(&block) {
            copy.is_past = true;
        }
    }

    /// Rule (g): copies of transactions before `tail` over which `is_past` says that the guest has written something else.
    pub fn passed(&self, tail: u32, is_past: impl Fn(u64, &Copy) -> bool) -> Vec<u64> {
        let is_passed = |copy: &Copy| sequence::is_after(tail, copy.transaction);
        let found = self.blocks.iter().filter(|(block, copy)| is_passed(copy) && is_past(**block, copy));
        found.map(|(block, _)| *block).collect()
    }

    /// A flush has covered so many writes.
    pub fn flushed(&mut self, covered: u64) {
        let blocks = &mut self.blocks;
        self.unflushed.retain(|block| match blocks.get_mut(block) {
            Some(copy) if matches!(copy.home, Home::Written(ended) if ended <= covered) => {
                copy.home = Home::Settled;
                false
            }
            Some(Copy { home: Home::Written(_), .. }) => true,
            _ => false,
        });
    }

    /// Rule (d): how many compounds the tail may move over: all that they alone hold is durable at home.
    pub fn droppable(&self) -> usize {
        let is_settled = |block: &u64| self.blocks.get(block).is_some_and(|copy| copy.home == Home::Settled);
        self.compounds.iter().take_while(|compound| compound.newest.iter().all(is_settled)).count()
    }

    /// Where the log would begin without its first `count` compounds.
    pub fn tail_after(&self, format: &Format, count: usize) -> (u32, u32) {
        let length: u32 = self.compounds.iter().take(count).map(|compound| compound.length).sum();
        (format.advance(self.tail.0, length), self.tail.1.wrapping_add(count as u32))
    }

    /// Log blocks of the first `count` compounds.
    pub fn length_of(&self, count: usize) -> u32 {
        self.compounds.iter().take(count).map(|compound| compound.length).sum()
    }

    /// The superblock that leaves them out is durable. Gives the blocks of which home has just what their copies had.
    pub fn drop_compounds(&mut self, format: &Format, count: usize) -> Vec<u64> {
        self.tail = self.tail_after(format, count);
        let mut at_home = Vec::new();
        for compound in self.compounds.drain(..count) {
            for block in compound.newest {
                let copy = self.blocks.remove(&block);
                assert!(
                    copy.is_some_and(|copy| copy.home == Home::Settled),
                    "rule (d): block {block} is only in the log"
                );
                if copy.is_some_and(|copy| !copy.is_past) {
                    at_home.push(block);
                }
            }
        }
        at_home
    }

    pub fn compounds(&self) -> usize {
        self.compounds.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its guest writes the same blocks home as often as it likes.
    #[test]
    fn what_waits_for_a_flush_is_as_much_as_the_log_has() {
        let format = Format {
            block_size: 4096,
            checksum: jbd2::Checksum::None,
            seed: 0,
            wide: true,
            async_commit: false,
            first: 1,
            last: 1024,
            length: 1024,
            fast_commit: false,
        };
        let mut live = Live::empty(1, 5);
        let tags: Vec<(u64, u32, bool, u32)> = (0..8).map(|block| (block, 2 + block as u32, false, 3)).collect();
        live.add(&format, 10, &tags, &[]);
        for ended in 1..1000 {
            for block in 0..8 {
                live.written(block, 5, ended);
            }
            live.flushed(ended - 1);
            assert!(live.unflushed.len() <= tags.len());
        }
        assert_eq!(live.droppable(), 0, "each was written once more since");
        live.flushed(999);
        assert_eq!((live.droppable(), live.unflushed.len()), (1, 0));
    }
}
