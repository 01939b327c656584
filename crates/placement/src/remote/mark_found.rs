//! What storage says of a journal server: a column of the table in [`crate::stored`].

use super::mark::RemoteMark;
use crate::stored::{Says, Stored};

/// What a journal superblock on storage says of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkFound {
    /// Nothing: what is on storage is all there is.
    None,
    /// The live log is on a server.
    Live(RemoteMark),
    /// It was, but the file system was used or repaired since by something that does not know of it.
    Stale,
    /// Something is there that cannot be read: where the live log is is not known.
    Damaged,
}

impl RemoteMark {
    /// What a superblock from storage says of a server: a column of the table in `stored`.
    pub fn read(block: &[u8]) -> MarkFound {
        match Stored::read(block).says {
            Says::Remote(mark) => MarkFound::Live(mark),
            Says::Stale => MarkFound::Stale,
            Says::Damaged => MarkFound::Damaged,
            _ => MarkFound::None,
        }
    }
}
