//! What the guest did to each block, and so what may be there after a power cut.

use super::disk::SECTOR;
use super::stream::Committed;
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

    /// Compares what is there, replayed, with the state of transaction `last`.
    pub fn check(&self, last: u32, read: &mut dyn FnMut(u64) -> Vec<u8>) -> Result<u64, String> {
        let mut compared = 0;
        for (number, block) in &self.blocks {
            let is_in = |sequence: u32| !jbd2::sequence::is_after(sequence, last);
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
                    // In use in place as of `last`, or free: nothing that came after a later transaction freed it may be in it.
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
                        if part.iter().any(|byte| *byte != 0) && is_by(true) && !is_by(false) {
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
