//! What the guest did to each block, and so what may be there after a power cut.

use super::disk::SECTOR;
use super::stream::Committed;
use jbd2::sequence;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// When something happened: counts transactions and writes alike.
type Moment = u64;

#[derive(Clone)]
enum What {
    Journaled(Arc<[u8]>),
    /// Revoked or freed.
    Gone,
}

#[derive(Default)]
struct Block {
    /// Transactions, in order.
    journaled: Vec<(u32, Moment, What)>,
    /// Writes of the guest, when they came.
    written: Vec<(Moment, Arc<[u8]>)>,
}

/// See the module.
#[derive(Default)]
pub struct History {
    blocks: HashMap<u64, Block>,
    frees: BTreeMap<u32, Vec<Range<u64>>>,
    now: Moment,
}

impl History {
    /// The log is opened anew: all that was before is at home.
    pub fn opened(&mut self) {
        *self = History::default();
    }

    pub fn committed(&mut self, transaction: &Committed, freed: Option<&[Range<u64>]>) {
        self.now += 1;
        let (sequence, now) = (transaction.sequence, self.now);
        let mut note = |block: u64, what: What| {
            self.blocks.entry(block).or_default().journaled.push((sequence, now, what));
        };
        for (block, content) in &transaction.blocks {
            note(*block, What::Journaled(Arc::clone(content)));
        }
        transaction.revokes.iter().for_each(|block| note(*block, What::Gone));
        for range in freed.unwrap_or_default() {
            range
                .clone()
                .filter(|block| !transaction.revokes.contains(block))
                .for_each(|block| note(block, What::Gone));
        }
        self.frees.insert(sequence, freed.unwrap_or_default().to_vec());
    }

    /// The guest asks for a write of a whole block.
    pub fn wrote(&mut self, block: u64, content: &[u8]) {
        self.now += 1;
        self.blocks.entry(block).or_default().written.push((self.now, Arc::from(content)));
    }

    /// This block is compared no more.
    pub fn forget(&mut self, block: u64) {
        self.blocks.remove(&block);
    }

    /// What was journaled until transaction `last`: each block with its newest version.
    pub fn versions(&self, last: u32) -> impl Iterator<Item = (u64, &Arc<[u8]>)> {
        self.blocks.iter().filter_map(move |(number, block)| {
            let until = block.journaled.partition_point(|(sequence, ..)| !sequence::is_after(*sequence, last));
            let newest = block.journaled[..until].iter().rev().find_map(|(_, _, what)| match what {
                What::Journaled(content) => Some(content),
                What::Gone => None,
            });
            newest.map(|content| (*number, content))
        })
    }

    /// Compares what is there, replayed, with the state of transaction `last`, as of which `is_free` says what is free.
    pub fn check(
        &self,
        last: u32,
        read: &mut dyn FnMut(u64) -> Vec<u8>,
        is_free: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64, String> {
        let mut compared = 0;
        for (number, block) in &self.blocks {
            let is_in = |sequence: u32| !sequence::is_after(sequence, last);
            let until = block.journaled.partition_point(|(sequence, ..)| is_in(*sequence));
            let later = block.journaled.get(until).map_or(Moment::MAX, |(_, moment, _)| *moment);
            match block.journaled[..until].last() {
                Some((sequence, since, What::Journaled(content))) => {
                    compared += 1;
                    let found = read(*number);
                    // Beside it may be what the guest wrote home since, and before it journaled the block anew; ext4's superblock
                    // is such a one.
                    let is_written = |at: usize, part: &[u8]| {
                        let may_be = block.written.iter().filter(|(moment, _)| (*since..later).contains(moment));
                        may_be.into_iter().any(|(_, bytes)| bytes[at..at + SECTOR as usize] == *part)
                    };
                    for (index, part) in found.chunks(SECTOR as usize).enumerate() {
                        let at = index * SECTOR as usize;
                        if content[at..at + SECTOR as usize] != *part && !is_written(at, part) {
                            return Err(format!(
                                "block {number} is not as of transaction {last}: byte {at} on is not that of its version of {sequence}"
                            ));
                        }
                    }
                }
                _ if later != Moment::MAX => {
                    // In use in place as of `last`: nothing that came after a later transaction freed it may be in it. Of one that is free
                    // nobody reads, and an append goes there before anybody knows of it.
                    let Some((free, since, _)) =
                        block.journaled[until..].iter().find(|(_, _, what)| matches!(what, What::Gone))
                    else {
                        continue;
                    };
                    let found = read(*number);
                    for (index, part) in found.chunks(SECTOR as usize).enumerate() {
                        let at = index * SECTOR as usize;
                        let is_by = |after: bool| {
                            block.written.iter().any(|(moment, bytes)| {
                                (moment > since) == after && bytes[at..at + SECTOR as usize] == *part
                            })
                        };
                        let is_later = part.iter().any(|byte| *byte != 0) && is_by(true) && !is_by(false);
                        if is_later && !is_free(*number) {
                            return Err(format!(
                                "block {number} has what was written after transaction {free} freed it, as of {last}"
                            ));
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(compared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 1024;

    fn of(byte: u8) -> Arc<[u8]> {
        Arc::from(vec![byte; BLOCK])
    }

    fn transaction(sequence: u32, blocks: &[(u64, u8)]) -> Committed {
        let blocks = blocks.iter().map(|(block, byte)| (*block, of(*byte))).collect();
        Committed { sequence, blocks, revokes: Vec::new() }
    }

    /// Whether `byte` all over block 7 is good as of transaction `last`, as of which it is free or not.
    fn is_good(history: &History, last: u32, byte: u8, is_free: bool) -> bool {
        history.check(last, &mut |_| of(byte).to_vec(), &mut |_| is_free).is_ok()
    }

    #[test]
    fn what_is_in_use_has_nothing_that_came_after_it_was_freed() {
        let mut history = History::default();
        history.committed(&transaction(10, &[(7, 1)]), None);
        history.committed(&transaction(11, &[]), Some(std::slice::from_ref(&(7..8))));
        history.committed(&transaction(12, &[(7, 2)]), None);
        history.wrote(7, &of(2));
        for (last, good) in [(9, vec![0, 1, 3]), (10, vec![1]), (12, vec![2])] {
            let found: Vec<u8> = (0..4).filter(|byte| is_good(&history, last, *byte, false)).collect();
            assert_eq!(found, good, "as of {last}");
        }
        assert!(is_good(&history, 9, 2, true), "free as of 9: an append may be there");
        assert!(!is_good(&history, 12, 1, true), "what is journaled has to be there");
    }

    #[test]
    fn versions_are_the_newest_until_a_transaction() {
        let mut history = History::default();
        history.committed(&transaction(10, &[(7, 1), (8, 5)]), None);
        history.committed(&transaction(12, &[(7, 2)]), None);
        let versions = |last: u32| {
            let mut found: Vec<(u64, u8)> =
                history.versions(last).map(|(block, content)| (block, content[0])).collect();
            found.sort_unstable();
            found
        };
        assert_eq!(versions(9), []);
        assert_eq!(versions(11), [(7, 1), (8, 5)]);
        assert_eq!(versions(12), [(7, 2), (8, 5)]);
    }
}
