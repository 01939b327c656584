//! Moments of an image that is written on: a copy of it that is made meanwhile (crate-level type [`Moment`]), and which blocks were
//! written since earlier ones ([`Record`]). Whoever writes to the image says so before and after ([`Changes`]).
//!
//! A copy keeps what it has not got yet before it is written over: copy before write, as QEMU's backup jobs do. A record has a number
//! for each block, of the *epoch* in which it was written last; each moment ends an epoch. It outlives its process in a file in memory.
//!
//! Must never: let a write pass before what it overwrites is kept, unless the copy has failed and says so; take a block for unchanged
//! that was written, also by a write that a moment met under way: it is noted before it begins and again when it has ended.
//!
//! Failure story: a copy that cannot be written fails, and the guest goes on; a record that cannot be written is worth nothing from
//! then on, and says so to every later process.

#![forbid(unsafe_code)]

mod changes;
mod moment;
mod overlay;
mod record;
mod source;

pub use changes::Changes;
pub use moment::{Moment, Target};
pub use overlay::{Base, Overlay};
pub use record::Record;
pub use source::{Source, read_past_cache};

/// Bytes of a block: what is kept, and noted, at once. A cluster of qcow2's default size.
pub const BLOCK_BYTES: u64 = 64 << 10;

/// The blocks that a range of bytes touches.
fn blocks(offset: u64, len: u64) -> std::ops::Range<u64> {
    if len == 0 {
        return 0..0;
    }
    offset / BLOCK_BYTES..offset.saturating_add(len).div_ceil(BLOCK_BYTES)
}

/// A set of blocks.
#[derive(Clone, Debug, Default)]
pub struct BlockSet {
    words: Vec<u64>,
}

impl BlockSet {
    /// An empty one, for blocks below `count`.
    pub fn new(count: u64) -> Self {
        BlockSet { words: vec![0; usize::try_from(count.div_ceil(64)).unwrap_or(usize::MAX)] }
    }

    /// Puts a block in. Says whether it was not there. One beyond the set's end never is.
    pub fn insert(&mut self, block: u64) -> bool {
        let Some(word) = usize::try_from(block / 64).ok().and_then(|at| self.words.get_mut(at)) else { return false };
        let bit = 1 << (block % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Has all blocks of a range in it where one of them is: what is in the range is read whole, or not at all.
    pub fn keep_together(&mut self, offset: u64, len: u64) {
        if blocks(offset, len).any(|block| self.contains(block)) {
            for block in blocks(offset, len) {
                self.insert(block);
            }
        }
    }

    /// Whether a block is in it.
    pub fn contains(&self, block: u64) -> bool {
        let word = usize::try_from(block / 64).ok().and_then(|at| self.words.get(at));
        word.is_some_and(|word| word & 1 << (block % 64) != 0)
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }
}
