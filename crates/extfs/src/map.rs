//! What a journal's map begins with, and what can be wrong with it.

use std::io;

/// What can keep a map from being read: a failing disk, or something that is not understood.
#[derive(Debug)]
pub(crate) enum Failure {
    Read(io::Error),
    NotUnderstood(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Read(error)
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Failure::NotUnderstood(reason)
    }
}

/// The parts of an inode that a map begins with.
#[derive(Debug)]
pub(crate) struct MapRoot {
    /// `i_block`.
    pub(crate) root: [u8; 60],
    /// Seed of the checksums of the map's blocks.
    pub(crate) checksum_seed: u32,
    /// Blocks of the journal.
    pub(crate) blocks: u32,
}
