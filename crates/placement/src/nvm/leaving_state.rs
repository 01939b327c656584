//! How far a log is that leaves its region: the state of [`super::leaving`].

use super::versions::Written;
use std::collections::HashSet;

/// How far a log is that leaves its region.
#[derive(Debug)]
pub(super) enum Leaving {
    /// The guest commits still; what is in the region goes home.
    Gathering,
    /// Nothing is committed any more, and the rest goes home.
    Draining,
    /// So many writes of log blocks are on their way to their places.
    Writing(usize),
    /// They are being made durable, and so is what the guest wrote past its journal onto these blocks, and the mark with this number.
    Flushing(Vec<Written>, u64),
    /// The superblock is on its way, …
    Superblock,
    /// … and made durable.
    LastFlush,
    /// The log is on storage; so many writes of what came meanwhile are on their way there.
    Rest(usize),
}

/// The log blocks that a leaving log had to write are on their way, or were written.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Those whose latest copies are in their places.
    pub positions: HashSet<u32>,
    /// Which attempt it is: the flush of one that was given up says nothing of what the next one has written.
    pub attempt: u64,
    /// A flush has failed since: they may not be on storage, and no later flush says so.
    pub is_in_doubt: bool,
    pub has_failed: bool,
}

/// A log's way from its region to its own place.
#[derive(Debug, Default)]
pub(super) struct Departure {
    /// How far it is, if it is under way.
    pub phase: Option<Leaving>,
    /// What the leaving log has written of itself.
    pub left: Left,
    /// Why the last attempt has failed; told to who asks next.
    pub failure: Option<String>,
}

impl Departure {
    /// Whether storage says, or may say by now, that the log is there.
    pub fn is_superblock_on_its_way(&self) -> bool {
        matches!(self.phase, Some(Leaving::Superblock | Leaving::LastFlush | Leaving::Rest(_)))
    }

    /// A log block came, perhaps once more: what was written of it is not the latest.
    pub fn log_block_came(&mut self, position: u32) {
        self.left.positions.remove(&position);
    }
}
