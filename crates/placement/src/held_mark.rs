//! What storage says of a log that is in memory: a column of the table in [`crate::stored`].

use crate::mark::MarkKind;
use crate::stored::{Says, Stored};
use journal_area::Opening;

/// What a journal superblock on storage says of a log that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldMark {
    /// Nothing: what is on storage is all there is.
    None,
    /// An empty log, and an error: an earlier amberlog's mark, or something else.
    Plain,
    /// Ours.
    Ours(MarkKind, Opening),
    /// A log that is on storage, and that nobody but its guest's own kernel may replay: the books were proven wrong.
    LeftToGuest,
}

impl HeldMark {
    /// What a superblock from storage says of memory: a column of the table in `stored`.
    pub fn read(block: &[u8]) -> HeldMark {
        let stored = Stored::read(block);
        match (stored.says, stored.superblock) {
            (Says::Held(opening), _) => HeldMark::Ours(MarkKind::Held, opening),
            (Says::Aged(opening, _), _) => HeldMark::Ours(MarkKind::Aged, opening),
            (Says::Dropped(opening), _) => HeldMark::Ours(MarkKind::Dropped, opening),
            (Says::Nvm(opening), _) => HeldMark::Ours(MarkKind::Nvm, opening),
            (Says::LeftToGuest(_), _) => HeldMark::LeftToGuest,
            (_, Some(superblock)) if superblock.is_empty() && superblock.errno != 0 => HeldMark::Plain,
            _ => HeldMark::None,
        }
    }
}
