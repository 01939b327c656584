//! Which blocks are cheaper copied than retained, though nothing is known of their pages: those that are alone.
//!
//! A block has neighbours where the next page has the next block of the file system, as it is with a long file that is written from its
//! beginning. Then one call protects many pages, and the file is seldom written again before it is home. A block without any is part of a small
//! file, a directory or a table, or of a database: its page needs a call of its own, for which every processor of the guest gives up what it
//! knows of its page tables, and it is likely to be written to again, which is a fault.
//!
//! All of this is a guess from what the guest has written by then. A wrong one costs time or host memory, never a block.

use guest_memory::{PAGE_BYTES, PageId};
use jbd2::{Descriptor, Format, Kind};

/// A run of fewer neighbours is copied: a call takes some 20 µs while the guest runs, a copied page 0.4 to 5 (docs/results/hot-pages.md).
const LONE_PAGES: usize = 8;

/// What the last descriptor said of the log blocks behind it. A descriptor is written before what it describes, but not always in the same
/// request.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    first_position: u32,
    home_blocks: Vec<u64>,
}

impl Ahead {
    /// A control block was written.
    pub(crate) fn see(&mut self, format: &Format, position: u32, block: &[u8]) {
        if jbd2::peek(block).is_some_and(|header| header.kind == Kind::Descriptor) {
            self.first_position = format.next(position);
            self.home_blocks.clear();
            self.home_blocks.extend(Descriptor::new(format, block).tags().map(|tag| tag.block));
        }
    }

    /// Where the block at a log position belongs, if that is known.
    pub(crate) fn home_block(&self, format: Option<&Format>, position: u32) -> Option<u64> {
        let index = format.map_or(0, |format| format.distance(self.first_position, position));
        self.home_blocks.get(index as usize).copied()
    }
}

/// A block that can be retained.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Of the write in its batch.
    pub index: usize,
    pub page: PageId,
    /// Where it belongs, if that is known.
    pub home_block: Option<u64>,
}

impl Candidate {
    /// A guest's kernel may hand out its pages downwards.
    fn is_followed_by(&self, next: &Self) -> bool {
        let is_next_block = match (self.home_block, next.home_block) {
            (Some(one), Some(other)) => one.abs_diff(other) == 1,
            _ => true,
        };
        self.page.0 + 1 == next.page.0 && is_next_block
    }
}

/// Takes out of `retained` what is cheaper copied, as far as copies are allowed: `copies_left` bytes.
pub(crate) fn take_lone(retained: &mut Vec<Candidate>, mut copies_left: u64) -> Vec<Candidate> {
    retained.sort_unstable_by_key(|candidate| candidate.page);
    let mut lone = Vec::new();
    let mut kept = Vec::with_capacity(retained.len());
    for run in retained.chunk_by(Candidate::is_followed_by) {
        let bytes = (run.len() * PAGE_BYTES) as u64;
        if run.len() < LONE_PAGES && bytes <= copies_left {
            copies_left -= bytes;
            lone.extend_from_slice(run);
        } else {
            kept.extend_from_slice(run);
        }
    }
    *retained = kept;
    lone
}
