//! The table: what the journal superblock *on storage* says of its log, and what that means to whoever holds the log.
//!
//! Every reader of these 1,024 bytes asks here. First the superblock by itself ([`Stored::read`]); the first row that fits counts:
//!
//! | row | superblock | `s_start` | `s_errno` | server's mark | memory's mark | says |
//! |---|---|---|---|---|---|---|
//! | 1 | none | | | begins with its magic number | | [`Says::Damaged`] |
//! | 2 | none | | | | | [`Says::NoJournal`] |
//! | 3b | whole | not 0 | | | of durability by age, of this `s_sequence` | [`Says::Aged`] |
//! | 3a | whole | not 0 | | | that of distrust | [`Says::LeftToGuest`] |
//! | 3 | whole | not 0 | | | any other, or none | [`Says::Live`] |
//! | 4 | whole | 0 | not 0 | | whole, of this `s_sequence` | [`Says::Held`], [`Says::Dropped`], [`Says::Nvm`] |
//! | 5 | whole | 0 | | not zeros, and the superblock's checksum is wrong | | [`Says::Damaged`] |
//! | 6 | whole | 0 | 0 | not zeros | | [`Says::Stale`] |
//! | 7 | whole | 0 | not 0 | not zeros, not whole | | [`Says::Damaged`] |
//! | 8 | whole | 0 | not 0 | whole, of another `s_sequence` | | [`Says::Stale`] |
//! | 9 | whole | 0 | not 0 | whole, of this `s_sequence` | | [`Says::Remote`] |
//! | 10 | whole | 0 | 0 | zeros | | [`Says::Empty`] |
//! | 11 | whole | 0 | not 0 | zeros | | [`Says::Error`] |
//!
//! A mark of durability by age in an empty log says nothing: the log beside it was emptied by somebody else, and rows 5 to 11 tell.
//!
//! Why row 4 stands before those of the server: the mark of memory lies where the lineage of a server's logs does
//! ([`crate::remote`]), which is written with every mark of a server. A whole mark of memory is therefore the later one.
//!
//! Storage says of a log in a region of NVM that it is there ([`Says::Nvm`]); an earlier amberlog wrote no mark beside the error (row
//! 11). Either way the region knows the very bytes.
//!
//! Beside all that, [`Stored::is_distrusted`]: the journal was not what it seemed ([`crate::distrust`]), live or not.
//!
//! Then what it means to somebody who holds a log of this journal: [`HeldBooks::judge`] (memory) and `RegionBooks::judge` (`nvm/books.rs`)
//! (a region), each with a table of its own.
//!
//! What this module must never do: take what cannot be read for an empty log.

use crate::mark::{self, MarkKind};
use crate::remote::mark::{MarkPlace, RemoteMark, mark_place};
use jbd2::{Features, Superblock, SuperblockError};
use journal_area::{Opening, Tail};

/// What a journal superblock says of its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    /// There is no journal superblock.
    NoJournal(SuperblockError),
    /// The log is empty, and no error happened: nothing is owed.
    Empty,
    /// The log is in its own place, and begins there.
    Live(Tail),
    /// The log on storage begins there and is good by itself; a later state of it may be held in memory: which opening.
    Aged(Opening, Tail),
    /// The log is held in memory: which opening of it.
    Held(Opening),
    /// The log was dropped (placement `discard`): what was committed is lost.
    Dropped(Opening),
    /// The log is in a region of NVM: which opening of it.
    Nvm(Opening),
    /// The log is in its own place, begins there, and nobody but its guest's own kernel may replay it.
    LeftToGuest(Tail),
    /// The log is on a journal server.
    Remote(RemoteMark),
    /// The log is empty and an error happened: an earlier amberlog's region of NVM has it, or an earlier amberlog held it, or its
    /// guest's kernel gave up.
    Error,
    /// The log was on a server, but the file system was used or repaired since by something that does not know of that.
    Stale,
    /// Something is there that cannot be read: where the live log is is not known.
    Damaged,
}

/// What is live of a log may be somewhere else than in its own place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elsewhere;

/// The journal superblock on storage, and what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its fields, if it is one.
    pub superblock: Option<Superblock>,
    /// What it says of the log.
    pub says: Says,
    /// An earlier run found that the journal is not what it seems.
    pub is_distrusted: bool,
}

impl Stored {
    /// Reads the table of this module.
    pub fn read(raw: &[u8]) -> Self {
        match Superblock::decode(raw) {
            Ok(superblock) => Stored {
                superblock: Some(superblock),
                says: says(raw, &superblock),
                is_distrusted: mark::is_distrusted(raw),
            },
            // Garbage all over is no journal, and the guest is told so by its own kernel; a mark in what was one is
            // another matter.
            Err(error) => {
                let is_torn = mark_place(raw, None) == MarkPlace::Damaged;
                let says = if is_torn { Says::Damaged } else { Says::NoJournal(error) };
                Stored { superblock: None, says, is_distrusted: false }
            }
        }
    }

    /// Where the log begins in its own place; nothing if it is empty there.
    ///
    /// # Errors
    /// Where it may be elsewhere, or where nothing can be said.
    pub fn live_from(&self) -> Result<Option<Tail>, Elsewhere> {
        match (self.says, self.superblock) {
            (Says::Live(tail) | Says::LeftToGuest(tail) | Says::Aged(_, tail), _) => Ok(Some(tail)),
            (Says::Empty, _) => Ok(None),
            // The error number tells: whoever used it since has cleared that.
            (Says::Stale, Some(superblock)) if superblock.errno == 0 => Ok(None),
            _ => Err(Elsewhere),
        }
    }
}

fn says(raw: &[u8], superblock: &Superblock) -> Says {
    if !superblock.is_empty() {
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        return match mark::of_this_sequence(raw, superblock) {
            Some((MarkKind::Aged, opening)) => Says::Aged(opening, tail),
            _ if mark::is_distrusted(raw) => Says::LeftToGuest(tail),
            _ => Says::Live(tail),
        };
    }
    let has_error = superblock.errno != 0;
    if has_error {
        match mark::of_this_sequence(raw, superblock) {
            Some((MarkKind::Held, opening)) => return Says::Held(opening),
            Some((MarkKind::Dropped, opening)) => return Says::Dropped(opening),
            Some((MarkKind::Nvm, opening)) => return Says::Nvm(opening),
            // Its log is empty, which ours never is: it was used since.
            Some((MarkKind::Aged, _)) | None => {}
        }
    }
    let mark = mark_place(raw, Some(superblock));
    let has_checksum = superblock.features.has(Features::CSUM_V2 | Features::CSUM_V3);
    match mark {
        MarkPlace::Zeros if has_error => Says::Error,
        MarkPlace::Zeros => Says::Empty,
        _ if has_checksum && superblock.checksum != superblock.checksum_computed => Says::Damaged,
        // Marks come with an error number; it takes a mount or an fsck to clear that.
        _ if !has_error => Says::Stale,
        MarkPlace::Damaged => Says::Damaged,
        MarkPlace::OtherSequence => Says::Stale,
        MarkPlace::Whole(mark) => Says::Remote(mark),
    }
}

/// What is known of a log that is held in memory, to be compared with storage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldBooks<'a> {
    /// Its superblock, as the guest wrote it last.
    pub superblock: Superblock,
    /// The same in bytes.
    pub raw: &'a [u8],
    /// The openings that storage may have: the one that was meant, and the one before. Nothing in tables of an earlier amberlog.
    pub openings: Option<[Opening; 2]>,
    /// Where it was handed over to storage, if it was.
    pub handed_over: Option<Tail>,
    /// It has to be written to its own place, for the guest's own kernel.
    pub is_materialise: bool,
    /// The superblock that a recovery of it leaves. Nothing where that is not to be found out: it cannot be read, or storage is not empty.
    pub emptied: Option<&'a [u8]>,
    /// Its guest was closing it, and storage may say so already: the number of the first transaction that it had not let go.
    pub closing_from: Option<u32>,
    /// Blocks of the log.
    pub log_blocks: u32,
}

/// What storage means to a log that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is as it was when the log was opened: what is held belongs onto this disk.
    Marked,
    /// It is what a recovery of the held log leaves, to the byte: one was cut off after its last write, and there is nothing left to do. Or what its
    /// guest leaves, which was closing it.
    /// What e2fsck and other kernels empty keeps the mark in its padding, and was used without us: the held log must never land on that
    /// (rule 3 of ARCHITECTURE.md), and is not given up without a word either.
    Emptied,
    /// It is live and good by itself, beside the held log, which is later: that goes onto it by way of another compound
    /// ([`crate::aged`]).
    Aged(Opening, Tail),
    /// It is live, and begins where the held log ends: that was being handed over to storage, where all of it is.
    HandedOver,
    /// Nothing: there is nothing held, since its guest was not told that it is open.
    NotOpened,
}

/// Why what is held does not belong onto a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    NoJournal(SuperblockError),
    OtherJournal,
    OlderCopy,
    OtherOpening,
    UsedSince,
}

impl Why {
    /// The sentence that an operator reads.
    pub fn sentence(self) -> String {
        match self {
            Why::NoJournal(error) => return error.to_string(),
            Why::OtherJournal => "it has another journal than the one that is held (the UUIDs differ)",
            Why::OlderCopy => {
                "it is an older copy of what was served (restored, or copied while its VM ran): blocks that went home \
                 since then are neither in it nor held"
            }
            Why::OtherOpening => {
                "its journal was opened another time than the one that is held (it is an older or a newer copy)"
            }
            Why::UsedSince => "its journal has been used since (it does not carry amberlog's mark)",
        }
        .to_owned()
    }
}

impl HeldBooks<'_> {
    /// What storage means to the held log. The first row that fits counts:
    ///
    /// | row | storage | verdict |
    /// |---|---|---|
    /// | 1 | no journal superblock | refused |
    /// | 2 | another UUID | refused |
    /// | 3 | held, dropped, or an error; the books know openings; the mark is not one of them | refused: an older copy if the number is ours |
    /// | 3a | live, with the mark of durability by age; the books know its opening | aged; an older copy if only the number is ours |
    /// | 4 | an error without a mark; the books know openings; it is not the guest's own | refused |
    /// | 5 | empty log, with the mark's error number or the guest's own, and not on a server | marked |
    /// | 6 | the held superblock itself, of a log to be materialised | marked: it was cut off at its last step |
    /// | 7 | to the byte what a recovery of the held log leaves, whatever is said of distrust | emptied |
    /// | 7a | empty without an error, at most a log's length past the held tail, without the mark of this opening anywhere; the guest was closing it | emptied |
    /// | 8 | live from where the log was handed over | handed over |
    /// | 9 | anything else | refused: used since |
    ///
    /// # Errors
    /// Why what is held does not belong there.
    pub fn judge(&self, raw: &[u8]) -> Result<Verdict, Why> {
        let stored = Stored::read(raw);
        let superblock = match (stored.superblock, Superblock::decode(raw)) {
            (Some(superblock), _) | (None, Ok(superblock)) => superblock,
            (None, Err(error)) => return Err(Why::NoJournal(error)),
        };
        if superblock.uuid != self.superblock.uuid {
            return Err(Why::OtherJournal);
        }
        if let (Some(openings), Says::Aged(opening, tail)) = (self.openings, stored.says) {
            return match opening {
                _ if openings.contains(&opening) => Ok(Verdict::Aged(opening, tail)),
                _ if opening.number == openings[0].number => Err(Why::OlderCopy),
                _ => Err(Why::OtherOpening),
            };
        }
        let is_empty_with_error = superblock.is_empty() && superblock.errno != 0;
        if let (Some(openings), true) = (self.openings, is_empty_with_error) {
            match stored.says {
                Says::Held(opening) if openings.contains(&opening) => {}
                Says::Held(opening) if opening.number == openings[0].number => return Err(Why::OlderCopy),
                // An error of the guest's own, before the mark was written.
                Says::Error | Says::Stale | Says::Damaged if self.superblock.errno == superblock.errno => {}
                _ => return Err(Why::OtherOpening),
            }
        }
        let is_guests_own = self.superblock.errno != 0 && superblock.errno == self.superblock.errno;
        let is_on_server = matches!(stored.says, Says::Remote(_));
        let is_marked =
            superblock.is_empty() && !is_on_server && (superblock.errno == jbd2::ERRNO_EIO || is_guests_own);
        // Materialising that was cut off at its last step left the held superblock itself.
        let is_materialised = self.is_materialise && self.raw.get(..raw.len()) == Some(raw);
        if is_marked || is_materialised {
            return Ok(Verdict::Marked);
        }
        let is_emptied = self.emptied.and_then(|emptied| emptied.get(..raw.len())).is_some_and(|emptied| {
            // A log that is not what it seemed is remembered as one after that ([`crate::distrust`]).
            raw == emptied || mark::distrusted(emptied).is_ok_and(|emptied| raw == emptied)
        });
        // The guest's own superblock: it knows nothing of our mark, which everybody else keeps.
        let is_closed = self.closing_from.is_some_and(|from| {
            let is_ours = |number: [u8; 16]| self.openings.is_some_and(|openings| openings[0].number == number);
            stored.says == Says::Empty
                && jbd2::sequence::is_at_or_after(superblock.sequence, from)
                && superblock.sequence.wrapping_sub(from) <= self.log_blocks
                && !mark::lying_in(raw).is_some_and(|(_, opening, _)| is_ours(opening.number))
        });
        match stored.says {
            _ if is_emptied || is_closed => Ok(Verdict::Emptied),
            Says::Live(tail) | Says::LeftToGuest(tail) if self.handed_over == Some(tail) => Ok(Verdict::HandedOver),
            _ => Err(Why::UsedSince),
        }
    }
}

#[cfg(test)]
mod tests;
