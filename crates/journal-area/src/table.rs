//! The persistent half of a control block: a tmpfs file with one word per log block.
//!
//! A process that opens the file after its writer was killed sees every store up to some instant, in program order.
//! So each change is one store of one word, ordered so that the table is right after every one of them: content first,
//! then the word that names it, and a slot is only reused after no word names it.
//!
//! The words are in pieces of one page, of which only those have memory that the live part of the log is in, and the next. What
//! has none is a hole in the file, which reads as zeros: [`Location::None`]. So a piece whose words are all that may become a hole,
//! and a hole may get memory, between any two stores, and nobody who reads the file can tell. No hole is ever looked at in
//! place, let alone stored to: that would take memory unasked, and end the process where there is none.
//!
//! Memory for a piece may be refused at any time: somebody else can fill the tmpfs. So what is to be said of a log block that has no
//! memory of its own is said by two bits of a *map*, which lies behind the words and has its memory for as long as the log is
//! open. It says of a block that has no word that it is in its own place on storage, at home, or gone.
//!
//! What is to be said of most of a log's blocks is that, long before its tail passes them. So a piece with few words that the map cannot
//! say, because something is held there, gives these to a list behind the map (`listed`), and the others to the map, and becomes a hole.
//!
//! A word goes before the list, and the list before the map: what is to be said is stored in the new place first, where it does not count
//! yet or says the same, and then taken out of the old one; what is forgotten is taken out of the place that counts last. So a piece that
//! becomes a hole has said all that is in it elsewhere, and whatever part of it a reader finds as zeros he finds right.

use crate::listed::{ENTRIES_A_PAGE, Listed, PAGES_MAX};
use crate::location::{Location, Past};
use guest_memory::{Error as MemoryError, HostFile};
use std::io;
use std::path::Path;

/// Words a piece: one page of the file.
const PIECE: usize = 1024;
/// Bytes of a piece's words: one page of the file, which its header is, too.
const PIECE_BYTES: u64 = 4 * PIECE as u64;
/// Log blocks that a word of the map speaks of, with two bits each.
const MAPPED_PER_WORD: u32 = 16;
/// A piece with so few words that the map cannot say, at most, needs no memory. Of twice as many it takes some again.
const FEW_HELD: u16 = 128;
/// For so many words of each piece, on average, the list has room.
const LISTED_A_PIECE: u32 = 64;
/// A piece with fewer words than this is one that the log is only coming to, or has nearly passed.
const MOST_USED: u16 = PIECE as u16 / 2;
/// With less room than this in tmpfs, a log takes what it can ever need of it at once, and keeps it until it is closed.
const LITTLE_ROOM_BYTES: u64 = 16 << 20;

const MAGIC: u64 = u64::from_le_bytes(*b"AMBERLG1");
const HEADER_BYTES: u64 = 4096;
const OFFSET_MAGIC: u64 = 0;
const OFFSET_BLOCK_BYTES: u64 = 8;
const OFFSET_LOG_BLOCKS: u64 = 12;
const OFFSET_TAIL: u64 = 16;
const OFFSET_FLAGS: u64 = 24;
const FLAG_MATERIALISE: u64 = 1;
const FLAG_DISTRUSTED: u64 = 2;
const FLAG_TORN: u64 = 4;
const FLAG_MARKED: u64 = 8;
const FLAG_FOREIGN: u64 = 16;
const FLAG_RECOVERING: u64 = 32;
const FLAG_CLOSING: u64 = 64;
const FLAG_READ: u64 = 128;
const OFFSET_HANDED_OVER: u64 = 32;
/// The most blocks that a log can have to be held: slots of the pool, twice as many, have numbers of 29 bits, and a table that
/// is found has to be looked at in bounded time. 256 GiB of blocks of 4 KiB; mke2fs makes logs of at most 40 GiB.
pub const LOG_BLOCKS_MAX: u32 = 1 << 26;
const _: () = assert!(Table::list_pages(LOG_BLOCKS_MAX) <= PAGES_MAX, "a list's entries have numbers");
const OFFSET_OPENING: u64 = 40;
const OFFSET_COUNT_MEANT: u64 = 56;
const OFFSET_COUNT_DONE: u64 = 64;
const OFFSET_NUMBERED: u64 = 72;
const NUMBERED: u64 = 1 << 32;
const OFFSET_DOUBT: u64 = 80;
const DOUBTED: u64 = 1;
const UNTOLD: u64 = 2;
const OWES_ERRORS: u64 = 4;
const HELD_ONLY: u64 = 8;
const FLUSH_FAILED: u64 = 16;
/// Bits that are about one opening of the log, and that a build which does not know them leaves to the next one.
const OF_ONE_OPENING: u64 = OWES_ERRORS | HELD_ONLY | FLUSH_FAILED;
const OFFSET_PASSED_FROM: u64 = 88;
const OFFSET_PASSED_TO: u64 = 96;
const OFFSET_DOUBT_OPENING: u64 = 104;
/// Of what is passed by a tail: all that is there.
const EVERYTHING: u32 = u32::MAX;

/// What a tail has passed, and is to be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// From this log block on, up to the tail.
    From(u32),
    /// Whatever is there: the log begins anew.
    Everything,
}

/// Where the live log begins: the oldest transaction that recovery has to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Log block of the transaction's first block. Never 0 in an open log.
    pub position: u32,
    /// The transaction's sequence number.
    pub sequence: u32,
}

/// Which opening of a log something is about, and how far its disk had got: what is on storage and what is held here belong
/// together if both say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Drawn when the log was opened. All zeros where nobody has drawn one.
    pub number: [u8; 16],
    /// Goes on as long as anything is written to the disk.
    pub count: u64,
}

/// What has to be known of storage that has failed, whoever goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doubt {
    /// In this opening: something that was written to storage may be lost, so nothing is made durable beside what is held any more.
    pub is_doubted: bool,
    /// The guest was not told yet that a flush has failed.
    pub is_untold: bool,
    /// In this opening: a commit was to be durable before it is answered, and fails instead. Its guest may not have been told, and what it
    /// asked for is held all the same.
    pub owes_errors: bool,
    /// In this opening: whoever commits is promised no more than that it is held, so `owes_errors` alone says whether a commit is to fail.
    pub is_held_only: bool,
    /// In this opening: a flush of its disk has failed, whoever asked for it. What was written home before, and is held no more, may be lost, and no
    /// later flush says so.
    pub flush_failed: bool,
}

/// The number of the opening that the table in a file is about; nothing if it is not said.
pub fn opening_number_of(table: &std::fs::File) -> Option<[u8; 16]> {
    let mut number = [0; 16];
    std::os::unix::fs::FileExt::read_exact_at(table, &mut number, OFFSET_OPENING).ok()?;
    (number != [0; 16]).then_some(number)
}

/// Whether the table in a file is that of an open log, which something may be owed of.
pub fn is_open_in(table: &std::fs::File) -> bool {
    let word = |at: u64| {
        let mut bytes = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(table, &mut bytes, at).ok().map(|()| u64::from_ne_bytes(bytes))
    };
    word(OFFSET_MAGIC) == Some(MAGIC) && word(OFFSET_TAIL).and_then(unpack_tail).is_some()
}

fn pack_tail(tail: Option<Tail>) -> u64 {
    tail.map_or(0, |tail| u64::from(tail.position) << 32 | u64::from(tail.sequence))
}

fn unpack_tail(word: u64) -> Option<Tail> {
    let tail = Tail { position: (word >> 32) as u32, sequence: word as u32 };
    (tail.position != 0).then_some(tail)
}

/// The table of one log.
#[derive(Debug)]
pub struct Table {
    file: HostFile,
    block_bytes: u32,
    log_blocks: u32,
    pieces: Vec<Piece>,
    /// Of them those that have memory.
    present: usize,
    /// There was little room: nothing is given back until the log is closed.
    keeps_all: bool,
    /// The map has memory, so that every log block can be spoken of that is not held.
    has_map: bool,
    /// Log blocks of which the map says something.
    mapped: u32,
    /// What is held in pieces without memory.
    listed: Listed,
    /// Pieces in which so little is held that they could do without memory.
    sparse: usize,
    /// There was no room for that on the list.
    is_list_full: bool,
}

/// What is known of a piece of the words.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    /// It has memory. What has none is all zeros.
    is_present: bool,
    /// Words that are not zero.
    used: u16,
    /// Words that will be stored, and must find memory then.
    promised: u16,
    /// Words that are not zero, and that the map cannot say.
    held: u16,
    /// Its words that are listed.
    listed: u16,
}

impl Piece {
    fn is_sparse(&self) -> bool {
        self.is_present && self.used >= MOST_USED && self.held + self.listed <= FEW_HELD
    }
}

/// What the map says of a log block that is there.
fn map_bits(location: Location) -> Option<u32> {
    match location {
        Location::None => Some(0),
        Location::Storage => Some(1),
        Location::Home => Some(2),
        Location::Gone => Some(3),
        Location::Guest(_) | Location::Block(_) | Location::Small(_) => None,
    }
}

/// Of how many log blocks a word of the map says something.
fn said_in(word: u32) -> u32 {
    ((word | word >> 1) & 0x5555_5555).count_ones()
}

/// Whether a word says what the map cannot.
fn is_of_held(word: u32) -> bool {
    ![0, Location::Home.pack(), Location::Gone.pack(), Location::Storage.pack()].contains(&word)
}

impl Table {
    fn with_file(file: HostFile, block_bytes: u32, log_blocks: u32) -> Self {
        let pieces = vec![Piece::default(); (log_blocks as usize).div_ceil(PIECE)];
        let pages = if file.len() == Self::file_bytes(log_blocks) { Self::list_pages(log_blocks) } else { 0 };
        let listed = Listed::new(Self::list_offset(log_blocks), pages);
        Table {
            file,
            block_bytes,
            log_blocks,
            pieces,
            present: 0,
            keeps_all: false,
            has_map: false,
            mapped: 0,
            listed,
            sparse: 0,
            is_list_full: false,
        }
    }

    /// Length of the file of a log of so many blocks: header, words in whole pages, map, list.
    fn file_bytes(log_blocks: u32) -> u64 {
        Self::list_offset(log_blocks) + u64::from(Self::list_pages(log_blocks)) * PIECE_BYTES
    }

    fn list_offset(log_blocks: u32) -> u64 {
        (Self::map_offset(log_blocks) + Self::map_bytes(log_blocks)).next_multiple_of(PIECE_BYTES)
    }

    /// Pages of the list: for as many words as may be listed of all pieces together.
    const fn list_pages(log_blocks: u32) -> u32 {
        let pages = (log_blocks.div_ceil(PIECE as u32) * LISTED_A_PIECE).div_ceil(ENTRIES_A_PAGE);
        if pages == 0 { 1 } else { pages }
    }

    /// Length of the file as builds before the list made it.
    fn file_bytes_without_list(log_blocks: u32) -> u64 {
        Self::map_offset(log_blocks) + Self::map_bytes(log_blocks)
    }

    fn map_offset(log_blocks: u32) -> u64 {
        HEADER_BYTES + u64::from(log_blocks).div_ceil(PIECE as u64) * PIECE_BYTES
    }

    fn map_bytes(log_blocks: u32) -> u64 {
        u64::from(log_blocks.div_ceil(MAPPED_PER_WORD)) * 4
    }

    /// Length of the file as builds before the map made it.
    fn file_bytes_without_map(log_blocks: u32) -> u64 {
        HEADER_BYTES + u64::from(log_blocks) * 4
    }

    /// Whether the file has a map at all: those of earlier builds have none.
    fn is_with_map(&self) -> bool {
        [Self::file_bytes(self.log_blocks), Self::file_bytes_without_list(self.log_blocks)].contains(&self.file.len())
    }

    /// Makes the table of a log of `log_blocks` blocks of `block_bytes` each, closed and holding nothing.
    ///
    /// # Errors
    /// When the file cannot be made or there is no room for its header.
    pub fn create(path: &Path, block_bytes: u32, log_blocks: u32) -> Result<Self, MemoryError> {
        let file = HostFile::create(path, Self::file_bytes(log_blocks))?;
        file.reserve(0, HEADER_BYTES)
            .map_err(|e| MemoryError::System { what: format!("reserving room for {}", path.display()), source: e })?;
        file.store_u32(OFFSET_BLOCK_BYTES, block_bytes);
        file.store_u32(OFFSET_LOG_BLOCKS, log_blocks);
        file.store_u64(OFFSET_MAGIC, MAGIC);
        Ok(Table::with_file(file, block_bytes, log_blocks))
    }

    #[cfg(test)]
    fn open(path: &Path) -> Result<Self, MemoryError> {
        Self::from_file(HostFile::open(path)?, path)
    }

    /// Takes what an earlier process left. `path` is what it is called in errors.
    ///
    /// # Errors
    /// A sentence when the file is not such a table.
    pub fn from_file(file: HostFile, path: &Path) -> Result<Self, MemoryError> {
        let refuse = |reason: &str| MemoryError::System {
            what: format!("opening the journal table {}", path.display()),
            source: io::Error::new(io::ErrorKind::InvalidData, reason.to_owned()),
        };
        if file.len() < HEADER_BYTES || file.load_u64(OFFSET_MAGIC) != MAGIC {
            return Err(refuse("it does not begin with amberlog's mark"));
        }
        let block_bytes = file.load_u32(OFFSET_BLOCK_BYTES);
        let log_blocks = file.load_u32(OFFSET_LOG_BLOCKS);
        if !(1024..=65536).contains(&block_bytes) || !block_bytes.is_power_of_two() {
            return Err(refuse("its block size is impossible"));
        }
        if log_blocks > LOG_BLOCKS_MAX {
            return Err(refuse("its number of log blocks is impossible"));
        }
        let lengths = [Self::file_bytes, Self::file_bytes_without_list, Self::file_bytes_without_map];
        if !lengths.iter().any(|length| length(log_blocks) == file.len()) {
            return Err(refuse("its length does not fit its number of log blocks"));
        }
        let mut table = Table::with_file(file, block_bytes, log_blocks);
        let mut words = [0; PIECE_BYTES as usize];
        for index in 0..table.pieces.len() {
            let (offset, len) = table.range(index..index + 1);
            let words = &mut words[..len as usize];
            table.file.read_at(offset, words).map_err(|source| MemoryError::System {
                what: format!("reading the journal table {}", path.display()),
                source,
            })?;
            let (mut used, mut held) = (0, 0);
            for word in words.chunks_exact(4) {
                let word = word.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
                used += u16::from(word != 0);
                held += u16::from(is_of_held(word));
            }
            // All zeros is as good as a hole, whether it is one or not.
            table.pieces[index] = Piece { is_present: used > 0, used, held, ..Piece::default() };
            table.present += usize::from(used > 0);
        }
        let listed = table.listed.read(&table.file, log_blocks).map_err(|source| MemoryError::System {
            what: format!("reading the journal table {}", path.display()),
            source,
        })?;
        listed.map_err(|reason| refuse(&reason))?;
        for position in table.listed.positions() {
            table.pieces[position as usize / PIECE].listed += 1;
        }
        table.sparse = table.pieces.iter().filter(|piece| piece.is_sparse()).count();
        if table.is_with_map() {
            table.mapped = table.count_mapped().map_err(|source| MemoryError::System {
                what: format!("reading the journal table {}", path.display()),
                source,
            })?;
            // It got its memory before the log was open, and before it said anything.
            table.has_map = table.tail().is_some() || table.mapped > 0;
        }
        Ok(table)
    }

    /// Log blocks of which the map says something, read without giving it memory.
    fn count_mapped(&self) -> io::Result<u32> {
        let mut bytes = vec![0; Self::map_bytes(self.log_blocks) as usize];
        self.file.read_at(Self::map_offset(self.log_blocks), &mut bytes)?;
        let words = bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        Ok(words.map(said_in).sum())
    }

    /// Makes sure that a block that is not held can be spoken of, whatever becomes of tmpfs until the log is closed. False where there
    /// is no memory for that. Before the log opens, or a process goes on with it.
    pub fn make_map(&mut self) -> bool {
        if !self.has_map && self.is_with_map() {
            let reserved = self.file.reserve(Self::map_offset(self.log_blocks), Self::map_bytes(self.log_blocks));
            self.has_map = reserved.is_ok();
        }
        self.has_map
    }

    /// Whether a block for whose word there is no memory can be said to be in its own place on storage all the same.
    pub fn can_say_stored(&self, position: u32) -> bool {
        position < self.log_blocks && (self.has_map || self.pieces[position as usize / PIECE].is_present)
    }

    /// What the map says of a log block: nothing, in its place, at home or gone, as kinds of words.
    fn mapped(&self, position: u32) -> Location {
        if self.mapped == 0 {
            return Location::None;
        }
        let (at, shift) = self.map_word(position);
        match self.file.load_u32(at) >> shift & 3 {
            1 => Location::Storage,
            2 => Location::Home,
            3 => Location::Gone,
            _ => Location::None,
        }
    }

    fn store_mapped(&mut self, position: u32, location: Location) {
        // What is held has to be named.
        let bits = map_bits(location);
        let bits = bits.unwrap_or_else(|| panic!("log block {position} has no room in its table for {location:?}"));
        let old = self.mapped(position);
        if old == location {
            return;
        }
        assert!(self.has_map, "log block {position} has no room in its table");
        let (at, shift) = self.map_word(position);
        let word = self.file.load_u32(at) & !(3 << shift) | bits << shift;
        self.mapped += u32::from(location != Location::None);
        self.mapped -= u32::from(old != Location::None);
        self.file.store_u32(at, word);
    }

    /// The word of the map that speaks of a log block, and its lowest bit there.
    fn map_word(&self, position: u32) -> (u64, u32) {
        let at = Self::map_offset(self.log_blocks) + u64::from(position / MAPPED_PER_WORD) * 4;
        (at, position % MAPPED_PER_WORD * 2)
    }

    /// Where the words of some pieces are in the file: offset and bytes.
    fn range(&self, pieces: std::ops::Range<usize>) -> (u64, u64) {
        let words = (Self::map_offset(self.log_blocks).min(self.file.len()) - HEADER_BYTES) / 4;
        let [first, end] = [pieces.start, pieces.end].map(|index| ((index * PIECE) as u64).min(words));
        (HEADER_BYTES + first * 4, (end - first) * 4)
    }

    /// Bytes in a log block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Number of log blocks, the superblock (position 0) included.
    pub fn log_blocks(&self) -> u32 {
        self.log_blocks
    }

    /// Makes sure that the word of `position` can be stored, and those of the next piece, too, if there is memory for it: when that
    /// runs short, the log has gone on for a while before it has to do without. False when the word itself has no memory.
    pub fn make_room(&mut self, position: u32) -> bool {
        let index = position as usize / PIECE;
        let next = if index + 1 < self.pieces.len() { index + 1 } else { 0 };
        if position >= self.log_blocks {
            return false;
        }
        if self.pieces[index].is_present && self.pieces[next].is_present {
            return true;
        }
        if !self.keeps_all && self.file.room_bytes().is_some_and(|room| room < LITTLE_ROOM_BYTES) {
            // Whoever takes the rest may leave nothing for the log's next piece.
            self.keep_all();
        }
        let has_room = self.reserve(index);
        _ = self.reserve(next);
        has_room
    }

    /// Gives every word memory, until the log is closed, if there is any.
    fn keep_all(&mut self) {
        let (offset, bytes) = self.range(0..self.pieces.len());
        if self.file.reserve(offset, bytes).is_ok() {
            self.keeps_all = true;
            self.present = self.pieces.len();
            self.pieces.iter_mut().for_each(|piece| piece.is_present = true);
            self.sparse = self.pieces.iter().filter(|piece| piece.is_sparse()).count();
        }
    }

    /// Changes what is known of a piece.
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Piece)) {
        let piece = &mut self.pieces[index];
        let before = *piece;
        change(piece);
        self.sparse += usize::from(piece.is_sparse());
        self.sparse -= usize::from(before.is_sparse());
        self.present += usize::from(piece.is_present);
        self.present -= usize::from(before.is_present);
    }

    /// Makes sure that something can be held at `position`, once, whose piece may have given its memory back: then it is listed, as long as
    /// that has few. False where there is no memory.
    pub fn make_room_for_one(&mut self, position: u32) -> bool {
        let Some(piece) = self.pieces.get(position as usize / PIECE).filter(|_| position < self.log_blocks) else {
            return false;
        };
        let is_listed = !piece.is_present
            && piece.listed < 2 * FEW_HELD
            && self.has_map
            && !self.keeps_all
            && self.listed.make_room(&self.file, 1);
        is_listed || self.make_room(position)
    }

    fn reserve(&mut self, index: usize) -> bool {
        if !self.pieces[index].is_present {
            let (offset, bytes) = self.range(index..index + 1);
            if self.file.reserve(offset, bytes).is_err() {
                return false;
            }
            self.change(index, |piece| piece.is_present = true);
        }
        true
    }

    /// The word of `position`, which has room, will be stored: its room stays.
    pub fn promise(&mut self, position: u32) {
        let piece = &mut self.pieces[position as usize / PIECE];
        piece.promised = piece.promised.saturating_add(1);
    }

    /// It is about to be.
    pub fn keep_promise(&mut self, position: u32) {
        let piece = &mut self.pieces[position as usize / PIECE];
        piece.promised = piece.promised.saturating_sub(1);
    }

    /// Gives back the memory of words that say nothing, but not of those around `position`, where the log goes on.
    pub fn give_back_unused(&mut self, position: u32) {
        if self.keeps_all {
            return;
        }
        let here = position as usize / PIECE;
        let next = if here + 1 < self.pieces.len() { here + 1 } else { 0 };
        let is_unused = |(index, piece): (usize, &Piece)| {
            piece.is_present && piece.used == 0 && piece.promised == 0 && index != here && index != next
        };
        let mut at = 0;
        while at < self.pieces.len() {
            let unused = self.pieces.iter().enumerate().skip(at).take_while(|entry| is_unused(*entry)).count();
            if unused > 0 {
                self.punch(at..at + unused);
            }
            at += unused + 1;
        }
        self.listed.give_back_unused(&self.file);
        self.is_list_full = false;
    }

    /// Gives the memory of one piece back in which little is held, if there is one, but not of those around `position`, where the log goes on:
    /// the map and the list say what it says. Quick where there is none; who calls again has it done with the next one.
    pub fn give_back_sparse(&mut self, position: u32) {
        if self.sparse == 0 || self.keeps_all || self.is_list_full || !self.has_map {
            return;
        }
        let here = position as usize / PIECE;
        let next = if here + 1 < self.pieces.len() { here + 1 } else { 0 };
        let around = self.pieces.iter().enumerate().skip(here).take(1).chain(Some((next, &self.pieces[next])));
        let kept = around.filter(|(index, piece)| piece.is_sparse() && (*index == here || next != here)).count();
        if self.sparse <= kept {
            return;
        }
        let may_go = |(index, piece): &(usize, &Piece)| {
            piece.is_sparse() && piece.promised == 0 && *index != here && *index != next
        };
        let Some((index, piece)) = self.pieces.iter().enumerate().find(may_go) else { return };
        if !self.listed.make_room(&self.file, usize::from(piece.held)) {
            self.is_list_full = true;
            return;
        }
        self.say_elsewhere(index);
        self.punch(index..index + 1);
        if self.pieces[index].is_present {
            // It cannot be given back, and says all itself.
            self.is_list_full = true;
            return;
        }
        self.change(index, |piece| (piece.used, piece.held) = (0, 0));
    }

    /// Has the map and the list say what the words of a piece say, which count before them.
    fn say_elsewhere(&mut self, index: usize) {
        let end = ((index + 1) * PIECE).min(self.log_blocks as usize) as u32;
        for first in (index as u32 * PIECE as u32..end).step_by(MAPPED_PER_WORD as usize) {
            let (at, _) = self.map_word(first);
            let before = self.file.load_u32(at);
            let mut word = before;
            for position in first..end.min(first + MAPPED_PER_WORD) {
                let said = self.file.load_u32(self.word(position));
                let bits = match Location::unpack(said).filter(|_| !is_of_held(said)) {
                    Some(Location::None) => continue,
                    Some(location) => map_bits(location),
                    None => {
                        if self.listed.set(&self.file, position, said) == Some(true) {
                            self.change(index, |piece| piece.listed += 1);
                        }
                        None
                    }
                };
                let (_, shift) = self.map_word(position);
                word = word & !(3 << shift) | bits.unwrap_or(0) << shift;
            }
            if word != before {
                self.mapped += said_in(word);
                self.mapped -= said_in(before);
                self.file.store_u32(at, word);
            }
            // An earlier process may have died when the word said more already than the list.
            for position in first..end.min(first + MAPPED_PER_WORD) {
                let said = self.file.load_u32(self.word(position));
                if said != 0 && !is_of_held(said) {
                    self.unlist(position);
                }
            }
        }
    }

    /// Gives the memory of pieces back whose words are all zeros, or said elsewhere.
    fn punch(&mut self, pieces: std::ops::Range<usize>) {
        // What cannot be given back is still there.
        let (offset, bytes) = self.range(pieces.clone());
        if self.file.give_back(offset, bytes).is_ok() {
            for index in pieces {
                self.change(index, |piece| piece.is_present = false);
            }
        }
    }

    /// Another process has left the file: gives back what it made room for and did not use. Not where the file has no map: there
    /// everything is kept, and made, since nothing else can speak of a block when tmpfs is full.
    pub fn give_back_what_was_left(&mut self) {
        if !self.is_with_map() {
            return self.keep_all();
        }
        let mut at = 0;
        while at < self.pieces.len() {
            let unused = self.pieces[at..].iter().take_while(|piece| !piece.is_present).count();
            if unused > 0 {
                self.punch(at..at + unused);
            }
            at += unused + 1;
        }
        self.listed.give_back_what_was_left(&self.file);
    }

    /// Whether any word has memory, or the map, or the list.
    pub fn has_room(&self) -> bool {
        self.present > 0 || self.has_map || self.listed.has_room()
    }

    /// Forgets every word and gives their memory back. The log must be closed.
    pub fn clear(&mut self) {
        assert!(self.tail().is_none(), "the words of a log that is open are forgotten");
        for index in (0..self.pieces.len()).filter(|index| self.pieces[*index].used > 0).collect::<Vec<_>>() {
            for position in index * PIECE..((index + 1) * PIECE).min(self.log_blocks as usize) {
                self.store(position as u32, Location::None);
            }
        }
        self.keeps_all = false;
        self.is_list_full = false;
        self.listed.clear(&self.file);
        (0..self.pieces.len()).for_each(|index| self.change(index, |piece| piece.listed = 0));
        // What an older process left, too, of which it is not known.
        self.punch(0..self.pieces.len());
        self.pieces.iter_mut().for_each(|piece| piece.promised = 0);
        self.clear_map();
    }

    fn clear_map(&mut self) {
        if !self.is_with_map() {
            return;
        }
        if self.mapped > 0 {
            for index in 0..self.log_blocks.div_ceil(MAPPED_PER_WORD) {
                self.file.store_u32(self.map_word(index * MAPPED_PER_WORD).0, 0);
            }
            self.mapped = 0;
        }
        // What cannot be given back is zeros, and is there still. Behind it is the list, and nothing else in its last page.
        let (offset, end) =
            (Self::map_offset(self.log_blocks), Self::list_offset(self.log_blocks).min(self.file.len()));
        self.has_map &= self.file.give_back(offset, end - offset).is_err();
    }

    /// Where the content of log block `position` is; nothing for a damaged word.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn load(&self, position: u32) -> Option<Location> {
        match self.word_of(position) {
            0 => Some(self.mapped(position)),
            word => Location::unpack(word),
        }
    }

    /// The word of a log block, wherever it is; zero where it has none.
    fn word_of(&self, position: u32) -> u32 {
        let at = self.word(position);
        let piece = self.pieces[position as usize / PIECE];
        match if piece.is_present { self.file.load_u32(at) } else { 0 } {
            0 if piece.listed > 0 => self.listed.get(&self.file, position),
            word => word,
        }
    }

    /// Stores where the content of log block `position` is. [`Table::make_room`] must have succeeded, unless the block is not held, or was held
    /// already: then [`Table::can_say_stored`] is enough.
    ///
    /// # Panics
    /// If the log has no such block, or that has no memory.
    pub fn store(&mut self, position: u32, location: Location) {
        self.assert_is_of_log(position);
        if location == Location::None {
            // What counts most goes last.
            self.store_mapped(position, location);
            self.unlist(position);
            self.store_word(position, 0);
        } else if self.pieces[position as usize / PIECE].is_present || location.is_held() {
            self.say(position, location.pack());
        } else {
            self.store_mapped(position, location);
            self.unlist(position);
        }
    }

    /// Has a word say what is to be said of a log block, in one step: in its own place, or on the list where that is a hole.
    fn say(&mut self, position: u32, word: u32) {
        let index = position as usize / PIECE;
        if self.pieces[index].is_present {
            self.store_word(position, word);
            self.unlist(position);
        } else {
            let set = self.listed.set(&self.file, position, word);
            assert!(set.is_some(), "log block {position} has no room in its table");
            self.change(index, |piece| piece.listed += u16::from(set == Some(true)));
        }
        self.store_mapped(position, Location::None);
    }

    /// Takes a word off the list, if it is there.
    fn unlist(&mut self, position: u32) {
        let index = position as usize / PIECE;
        if self.pieces[index].listed > 0 && self.listed.remove(&self.file, position) {
            self.change(index, |piece| piece.listed -= 1);
            self.is_list_full = false;
        }
    }

    fn store_word(&mut self, position: u32, word: u32) {
        let at = self.word(position);
        let index = position as usize / PIECE;
        if !self.pieces[index].is_present {
            // A hole would take memory, or end the process where there is none.
            assert!(word == 0, "log block {position} has no room in its table");
            return;
        }
        let old = self.file.load_u32(at);
        self.change(index, |piece| {
            piece.used = (piece.used + u16::from(word != 0)).saturating_sub(u16::from(old != 0));
            piece.held = (piece.held + u16::from(is_of_held(word))).saturating_sub(u16::from(is_of_held(old)));
        });
        self.file.store_u32(at, word);
    }

    /// Says, in one step, that the guest was told that this block is at home, which it is not yet. The next [`Table::store`] of it says
    /// something else.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn store_absorbed(&mut self, position: u32, slot: u32) {
        self.assert_is_of_log(position);
        self.say(position, Location::pack_absorbed(slot));
    }

    /// Says, in one step, where a block is that has memory for its word, or is held already, and what the guest has done at its home past its journal.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn store_past(&mut self, position: u32, location: Location, past: Option<Past>) {
        match past.and_then(|past| location.pack_past(past)) {
            Some(word) => {
                self.assert_is_of_log(position);
                self.say(position, word);
            }
            None => self.store(position, location),
        }
    }

    /// What was said last of the guest's writes past its journal.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn past(&self, position: u32) -> Option<Past> {
        Location::past(self.word_of(position))
    }

    /// Whether [`Table::store_absorbed`] was what was said last.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn is_absorbed(&self, position: u32) -> bool {
        Location::is_absorbed(self.word_of(position))
    }

    fn word(&self, position: u32) -> u64 {
        self.assert_is_of_log(position);
        HEADER_BYTES + u64::from(position) * 4
    }

    fn assert_is_of_log(&self, position: u32) {
        assert!(position < self.log_blocks, "log block {position} of {}", self.log_blocks);
    }

    /// Where the live log begins; nothing when it is closed.
    pub fn tail(&self) -> Option<Tail> {
        unpack_tail(self.file.load_u64(OFFSET_TAIL))
    }

    /// Moves the beginning of the live log, or closes it, in one step.
    pub fn set_tail(&self, tail: Option<Tail>) {
        self.file.store_u64(OFFSET_TAIL, pack_tail(tail));
    }

    /// Moves the beginning of an open log past what is to be forgotten then ([`Table::set_forgotten`]). Who is killed before all of that is
    /// forgotten leaves word of it: what is left over would be taken for a part of what the guest writes there next.
    pub fn pass(&self, passed: Passed, tail: Tail) {
        let position = match passed {
            Passed::From(position) => position,
            Passed::Everything => EVERYTHING,
        };
        // Counts for this very tail, and so from the moment on at which that is said. What was said of an earlier one that was not reached
        // must not be taken for it.
        self.file.store_u64(OFFSET_PASSED_TO, 0);
        self.file.store_u64(OFFSET_PASSED_FROM, u64::from(position));
        self.file.store_u64(OFFSET_PASSED_TO, pack_tail(Some(tail)));
        self.set_tail(Some(tail));
    }

    /// Nothing is left of what the tail has passed.
    pub fn set_forgotten(&self) {
        self.file.store_u64(OFFSET_PASSED_TO, 0);
    }

    /// What the tail has passed and an earlier process may not have forgotten.
    pub fn passed(&self) -> Option<Passed> {
        let to = unpack_tail(self.file.load_u64(OFFSET_PASSED_TO))?;
        let from = u32::try_from(self.file.load_u64(OFFSET_PASSED_FROM)).unwrap_or(0);
        (self.tail() == Some(to) && from != 0).then_some(if from == EVERYTHING {
            Passed::Everything
        } else {
            Passed::From(from)
        })
    }

    /// Where the log goes on outside, if it was about to be handed over.
    pub fn handed_over(&self) -> Option<Tail> {
        unpack_tail(self.file.load_u64(OFFSET_HANDED_OVER))
    }

    /// Says where the log goes on outside as soon as the outside says so itself; or that it is all here.
    pub fn set_handed_over(&self, tail: Option<Tail>) {
        self.file.store_u64(OFFSET_HANDED_OVER, pack_tail(tail));
    }

    /// Which opening of the log this is, as storage may say it by now: with the second count, or already with the first.
    /// Nothing if an earlier amberlog made the table.
    pub fn opening(&self) -> Option<[Opening; 2]> {
        let words = [self.file.load_u64(OFFSET_OPENING), self.file.load_u64(OFFSET_OPENING + 8)];
        let mut number = [0; 16];
        number[..8].copy_from_slice(&words[0].to_le_bytes());
        number[8..].copy_from_slice(&words[1].to_le_bytes());
        let counted = |offset| Opening { number, count: self.file.load_u64(offset) };
        (number != [0; 16]).then(|| [counted(OFFSET_COUNT_MEANT), counted(OFFSET_COUNT_DONE)])
    }

    /// Says what storage is about to say.
    pub fn set_opening_meant(&self, opening: &Opening) {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| opening.number[at + index]));
        self.file.store_u64(OFFSET_COUNT_MEANT, opening.count);
        self.file.store_u64(OFFSET_OPENING, word(0));
        self.file.store_u64(OFFSET_OPENING + 8, word(8));
    }

    /// Says that storage has said it.
    pub fn set_opening_done(&self, opening: &Opening) {
        self.file.store_u64(OFFSET_COUNT_DONE, opening.count);
    }

    /// The first number that nothing has which was made durable beside this opening; nothing if nothing was, or an earlier amberlog made
    /// the table.
    pub fn numbered(&self) -> Option<u32> {
        let word = self.file.load_u64(OFFSET_NUMBERED);
        (word & NUMBERED != 0).then_some(word as u32)
    }

    /// Says so, before anything with an earlier number is written.
    pub fn set_numbered(&self, next: Option<u32>) {
        self.file.store_u64(OFFSET_NUMBERED, next.map_or(0, |next| NUMBERED | u64::from(next)));
    }

    /// What has failed; nothing if an earlier amberlog made the table.
    pub fn doubt(&self) -> Doubt {
        let mut word = self.file.load_u64(OFFSET_DOUBT);
        // An earlier build opens a log anew, and leaves bits that it does not know. One that said nothing of an opening cleared them.
        let about = self.file.load_u64(OFFSET_DOUBT_OPENING);
        if about != 0 && about != self.opening_word() {
            word &= !OF_ONE_OPENING;
        }
        let is = |bit: u64| word & bit != 0;
        Doubt {
            is_doubted: is(DOUBTED),
            is_untold: is(UNTOLD),
            owes_errors: is(OWES_ERRORS),
            is_held_only: is(HELD_ONLY),
            flush_failed: is(FLUSH_FAILED),
        }
    }

    /// Says so, before anything else is done about it.
    pub fn set_doubt(&self, doubt: Doubt) {
        let bit = |is_so: bool, bit: u64| if is_so { bit } else { 0 };
        let Doubt { is_doubted, is_untold, owes_errors, is_held_only, flush_failed } = doubt;
        let word = bit(is_doubted, DOUBTED)
            | bit(is_untold, UNTOLD)
            | bit(owes_errors, OWES_ERRORS)
            | bit(is_held_only, HELD_ONLY)
            | bit(flush_failed, FLUSH_FAILED);
        let about = self.opening_word();
        if self.file.load_u64(OFFSET_DOUBT_OPENING) != about {
            // What is left of another opening must not be taken for this one's between two stores.
            self.file.store_u64(OFFSET_DOUBT, word & !OF_ONE_OPENING);
            self.file.store_u64(OFFSET_DOUBT_OPENING, about);
        }
        self.file.store_u64(OFFSET_DOUBT, word);
    }

    /// Enough of the number of this opening to tell it from others.
    fn opening_word(&self) -> u64 {
        self.file.load_u64(OFFSET_OPENING)
    }

    /// Says that storage says so durably.
    pub fn set_marked(&self) {
        self.set_flag(FLAG_MARKED, true);
    }

    /// Whether storage says durably that the log that is open now is here: before, its guest was told nothing.
    pub fn is_marked(&self) -> bool {
        self.flags() & FLAG_MARKED != 0
    }

    fn flags(&self) -> u64 {
        self.file.load_u64(OFFSET_FLAGS)
    }

    fn set_flag(&self, flag: u64, is_set: bool) {
        let flags = self.flags();
        let changed = if is_set { flags | flag } else { flags & !flag };
        if changed != flags {
            self.file.store_u64(OFFSET_FLAGS, changed);
        }
    }

    /// Whether somebody has written over the live log.
    pub fn is_torn(&self) -> bool {
        self.flags() & FLAG_TORN != 0
    }

    /// Says so, or that the log is whole again.
    pub fn set_torn(&self, is_torn: bool) {
        self.set_flag(FLAG_TORN, is_torn);
    }

    /// Whether the guest has read the log's superblock, and written nothing into the log since: a kernel may be replaying it.
    pub fn is_read(&self) -> bool {
        self.flags() & FLAG_READ != 0
    }

    /// Says so, before it is read; or that it is written into again.
    pub fn set_read(&self, is_read: bool) {
        self.set_flag(FLAG_READ, is_read);
    }

    /// Whether the open log is being recovered: storage may say already that no log is needed.
    pub fn is_recovering(&self) -> bool {
        self.flags() & FLAG_RECOVERING != 0
    }

    /// Says so, or that it was given up.
    pub fn set_recovering(&self, is_recovering: bool) {
        self.set_flag(FLAG_RECOVERING, is_recovering);
    }

    /// Whether storage is about to say, or says, that the log is empty, because its guest closes it.
    pub fn is_closing(&self) -> bool {
        self.flags() & FLAG_CLOSING != 0
    }

    /// Says so, or that it is not.
    pub fn set_closing(&self, is_closing: bool) {
        self.set_flag(FLAG_CLOSING, is_closing);
    }

    /// Whether something was written into the log while it was closed, which no kernel does.
    pub fn is_foreign(&self) -> bool {
        self.flags() & FLAG_FOREIGN != 0
    }

    /// Says so, or that it is empty again.
    pub fn set_foreign(&self, is_foreign: bool) {
        self.set_flag(FLAG_FOREIGN, is_foreign);
    }

    /// Whether the log is kept block for block, because something in it is not understood.
    pub fn is_materialise(&self) -> bool {
        self.flags() & FLAG_MATERIALISE != 0
    }

    /// Says whether the log that is about to be opened is kept block for block. It is whole, and storage does not say yet that
    /// it is here.
    pub fn set_materialise(&self, materialise: bool) {
        self.file.store_u64(OFFSET_FLAGS, if materialise { FLAG_MATERIALISE } else { 0 });
    }

    /// Whether the books were proven wrong while the log was open ([`Table::set_distrusted`]).
    pub fn is_distrusted(&self) -> bool {
        self.flags() & FLAG_DISTRUSTED != 0
    }

    /// Says, in one step, that the books were proven wrong: from here on the log is kept block for block, and nobody who
    /// finds it replays it. The next log that is opened begins with [`Table::set_materialise`].
    pub fn set_distrusted(&self) {
        self.file.store_u64(OFFSET_FLAGS, FLAG_MATERIALISE | FLAG_DISTRUSTED);
    }

    /// Checks what is known of the pieces; what is wrong, as a sentence. Costs time: for tests.
    pub fn check(&self) -> Result<(), String> {
        let mut words = [0; PIECE_BYTES as usize];
        for (index, piece) in self.pieces.iter().enumerate() {
            let (offset, len) = self.range(index..index + 1);
            self.file.read_at(offset, &mut words[..len as usize]).map_err(|error| error.to_string())?;
            let words = words[..len as usize].chunks_exact(4);
            let words = words.map(|word| word.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes)));
            let used = words.clone().filter(|word| *word != 0).count();
            let held = words.filter(|word| is_of_held(*word)).count();
            let listed = self.listed.positions().filter(|position| *position as usize / PIECE == index).count();
            let is_right = [piece.used, piece.held, piece.listed].map(usize::from) == [used, held, listed];
            if !is_right || used > 0 && !piece.is_present {
                let there = format!("{used} words, {held} of them of what is held, and {listed} on the list");
                return Err(format!("piece {index} of the table is said to be {piece:?}, and has {there}"));
            }
        }
        if self.sparse != self.pieces.iter().filter(|piece| piece.is_sparse()).count() {
            return Err(format!("{} pieces of the table are said to have little that is held", self.sparse));
        }
        if let Some(position) =
            self.listed.positions().find(|position| !is_of_held(self.listed.get(&self.file, *position)))
        {
            return Err(format!("log block {position} is on the list, and not held"));
        }
        let present = self.pieces.iter().filter(|piece| piece.is_present).count();
        if present != self.present {
            return Err(format!("{present} pieces of the table, not {}", self.present));
        }
        let mapped = if self.is_with_map() { self.count_mapped().map_err(|error| error.to_string())? } else { 0 };
        if mapped != self.mapped || mapped > 0 && !self.has_map {
            return Err(format!("the table's map says something of {mapped} log blocks, not of {}", self.mapped));
        }
        if self.tail().is_some() && self.is_with_map() && !self.has_map {
            return Err("the log is open, and its table's map has no memory".to_owned());
        }
        Ok(())
    }

    /// Bytes of memory that the table takes: its header, the pieces that have memory, the map, and the list.
    pub fn memory_bytes(&self) -> u64 {
        let map = if self.has_map { Self::map_bytes(self.log_blocks).next_multiple_of(PIECE_BYTES) } else { 0 };
        HEADER_BYTES
            + self.present as u64 * PIECE_BYTES
            + map
            + self.listed.memory_bytes()
            + (self.pieces.capacity() * size_of::<Piece>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::{PageId, simulated_kill};
    use proptest::prelude::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    #[test]
    fn an_opened_table_says_what_was_stored() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("table");
        {
            let mut table = Table::create(&path, 4096, 1024).expect("a new table");
            assert_eq!(table.tail(), None);
            assert!(table.make_room(7));
            table.store(7, Location::Guest(PageId(99)));
            table.set_tail(Some(Tail { position: 1, sequence: u32::MAX }));
        }
        let mut table = Table::open(&path).expect("the same table");
        assert_eq!(table.log_blocks(), 1024);
        assert_eq!(table.load(7), Some(Location::Guest(PageId(99))));
        assert_eq!(table.load(8), Some(Location::None));
        assert_eq!(table.tail(), Some(Tail { position: 1, sequence: u32::MAX }));
        assert_eq!(table.numbered(), None);
        for number in [0, 7, u32::MAX] {
            table.set_numbered(Some(number));
            assert_eq!(table.numbered(), Some(number));
        }
        table.set_numbered(None);
        assert_eq!(table.numbered(), None);
        assert_eq!(table.doubt(), Doubt::default());
        for bits in (0..32u8).rev() {
            let [is_doubted, is_untold, owes_errors, is_held_only, flush_failed] =
                [1, 2, 4, 8, 16].map(|bit| bits & bit != 0);
            let doubt = Doubt { is_doubted, is_untold, owes_errors, is_held_only, flush_failed };
            table.set_doubt(doubt);
            assert_eq!(table.doubt(), doubt);
        }
        table.set_tail(None);
        table.clear();
        assert_eq!(table.load(7), Some(Location::None));
    }

    #[test]
    #[should_panic(expected = "the words of a log that is open are forgotten")]
    fn an_open_log_keeps_its_words() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut table = Table::create(&directory.path().join("table"), 4096, 1024).expect("a new table");
        table.set_tail(Some(Tail { position: 1, sequence: 1 }));
        table.clear();
    }

    /// An earlier build opens the log anew, and knows nothing of these bits, nor of what they are about.
    #[test]
    fn what_one_opening_owes_is_not_owed_by_the_next() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let table = Table::create(&directory.path().join("table"), 4096, 1024).expect("a new table");
        let all =
            Doubt { is_doubted: true, is_untold: true, owes_errors: true, is_held_only: true, flush_failed: true };
        let opened = |number| table.set_opening_meant(&Opening { number: [number; 16], count: 0 });
        opened(1);
        table.set_doubt(all);
        table.set_opening_meant(&Opening { number: [1; 16], count: 7 });
        assert_eq!(table.doubt(), all, "it goes on");
        opened(2);
        let left = Doubt { owes_errors: false, is_held_only: false, flush_failed: false, ..all };
        assert_eq!(table.doubt(), left, "whose number is another one");
        // What the earlier opening owed does not come back with the first word about this one.
        table.set_doubt(left);
        assert_eq!((table.doubt(), table.file.load_u64(OFFSET_DOUBT)), (left, DOUBTED | UNTOLD));
        table.set_doubt(all);
        assert_eq!(table.doubt(), all);
        // A build that knew the third bit alone.
        table.file.store_u64(OFFSET_DOUBT_OPENING, 0);
        opened(3);
        table.file.store_u64(OFFSET_DOUBT, DOUBTED | OWES_ERRORS);
        assert!(table.doubt().owes_errors);
    }

    /// Bytes of the file that have memory, past the header.
    fn allocated(table: &Table) -> u64 {
        table.file.allocated_bytes() - HEADER_BYTES
    }

    #[test]
    fn pieces_come_and_go_with_what_is_in_them() {
        // Nowhere else do files have just the memory that they were given.
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        let mut table = Table::create(&path, 4096, 5000).expect("a new table");
        assert_eq!(allocated(&table), 0);
        table.set_tail(Some(Tail { position: 1000, sequence: 1 }));
        assert!(table.make_room(1023));
        assert_eq!(allocated(&table), 2 * PIECE_BYTES, "its own piece, and the next");
        table.store(1023, Location::Gone);
        assert!(table.make_room(1024));
        table.store(1024, Location::Home);
        assert_eq!((table.load(4999), allocated(&table)), (Some(Location::None), 3 * PIECE_BYTES));
        // The last piece is followed by the first.
        assert!(table.make_room(4999));
        assert_eq!(allocated(&table), 4 * PIECE_BYTES);
        table.give_back_unused(4999);
        assert_eq!(allocated(&table), 3 * PIECE_BYTES, "those in use, and where the log goes on");
        table.store(1023, Location::None);
        table.give_back_unused(1024);
        assert_eq!(allocated(&table), PIECE_BYTES, "what is in use alone");
        assert_eq!(table.load(1024), Some(Location::Home));
        table.store(4999, Location::None);
        // What was promised finds its room.
        assert!(table.make_room(4500));
        table.promise(4500);
        table.give_back_unused(1024);
        table.keep_promise(4500);
        table.store(4500, Location::Storage);
        let mut again = Table::open(&path).expect("the same table");
        again.give_back_what_was_left();
        assert_eq!(allocated(&again), 2 * PIECE_BYTES);
        for position in 0..5000 {
            let expected = match position {
                1024 => Location::Home,
                4500 => Location::Storage,
                _ => Location::None,
            };
            assert_eq!(again.load(position), Some(expected));
        }
        again.set_tail(None);
        again.clear();
        assert_eq!((allocated(&again), again.has_room()), (0, false));
    }

    #[test]
    fn looking_at_a_table_takes_no_memory() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        drop(Table::create(&path, 4096, 50_000).expect("a new table"));
        let mut table = Table::open(&path).expect("the same table");
        for position in 0..50_000 {
            assert_eq!((table.load(position), table.is_absorbed(position)), (Some(Location::None), false));
            table.store(position, Location::None);
        }
        assert_eq!(allocated(&table), 0);
    }

    #[test]
    #[should_panic(expected = "has no room in its table")]
    fn a_word_without_memory_is_not_stored() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut table = Table::create(&directory.path().join("table"), 4096, 5000).expect("a new table");
        table.store(3000, Location::Home);
    }

    #[test]
    fn a_full_tmpfs_is_said() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut table = Table::create(&directory.path().join("table"), 4096, 5000).expect("a new table");
        assert!(table.make_room(100));
        guest_memory::simulated_room::set_full(true);
        let room = [100, 2047, 2048].map(|position| table.make_room(position));
        guest_memory::simulated_room::set_full(false);
        assert_eq!(room, [true, true, false], "the next piece was made in time");
        assert!(!table.make_room(5000), "not of this log");
    }

    #[test]
    fn what_has_no_room_is_spoken_of_all_the_same() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        let mut table = Table::create(&path, 4096, 5000).expect("a new table");
        assert!(!table.can_say_stored(3000), "a closed log takes no memory");
        assert!(table.make_map() && table.make_room(0));
        table.set_tail(Some(Tail { position: 1, sequence: 1 }));
        let before = allocated(&table);
        for (position, location) in
            [(3000, Location::Storage), (3001, Location::Gone), (3002, Location::Home), (3003, Location::Storage)]
        {
            table.store(position, location);
            assert_eq!(table.load(position), Some(location));
        }
        table.store(3003, Location::None);
        assert_eq!(allocated(&table), before);
        table.check().expect("as it is said to be");
        // With room it has a word of its own, and that counts.
        assert!(table.make_room(3000));
        table.store(3000, Location::Block(7));
        table.check().expect("as it is said to be");
        let mut again = Table::open(&path).expect("the same table");
        for position in 0..5000 {
            let expected = match position {
                3000 => Location::Block(7),
                3001 => Location::Gone,
                3002 => Location::Home,
                _ => Location::None,
            };
            assert_eq!((again.load(position), table.load(position)), (Some(expected), Some(expected)));
        }
        again.check().expect("as it was left");
        again.set_tail(None);
        again.clear();
        assert_eq!((allocated(&again), again.load(3001)), (0, Some(Location::None)));
        assert!(!again.can_say_stored(5000), "not of this log");
    }

    fn held(table: &Table, path: &Path) -> Vec<(Option<Location>, bool, Option<Past>)> {
        let again = Table::open(path).expect("the same table");
        again.check().expect("as it is said to be");
        let all = |table: &Table| -> Vec<_> {
            (0..table.log_blocks())
                .map(|position| (table.load(position), table.is_absorbed(position), table.past(position)))
                .collect()
        };
        assert_eq!(all(&again), all(table));
        all(table)
    }

    #[test]
    fn a_piece_in_which_little_is_held_needs_no_memory() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        let mut table = Table::create(&path, 4096, 5000).expect("a new table");
        assert!(table.make_map());
        table.set_tail(Some(Tail { position: 1, sequence: 1 }));
        let opened = allocated(&table);
        for position in 0..3000 {
            assert!(table.make_room(position));
            table.store(position, Location::Block(position));
        }
        for position in (0..2048).filter(|position| position % 32 != 0) {
            table.store(position, [Location::Home, Location::Gone, Location::Storage][position as usize % 3]);
        }
        let before = held(&table, &path);
        let full = allocated(&table);
        // The log goes on in the second piece, and the third is full.
        table.give_back_sparse(1500);
        table.give_back_sparse(1500);
        assert_eq!(allocated(&table), full, "one less for the piece, and one more for the list");
        assert!(held(&table, &path) == before);
        table.give_back_sparse(2500);
        assert_eq!(allocated(&table), full - PIECE_BYTES);
        assert!(held(&table, &path) == before);
        table.check().expect("as it is said to be");
        // What is held there can become something else, in one step, whatever there is room for.
        guest_memory::simulated_room::set_full(true);
        table.store(32, Location::Guest(PageId(7)));
        table.store_past(64, Location::Block(64), Some(Past::Begun));
        table.store_absorbed(96, 96);
        table.store(128, Location::Home);
        assert!(table.make_room_for_one(1) && !table.make_room(1));
        table.store(1, Location::Block(9000));
        table.store(1600, Location::None);
        guest_memory::simulated_room::set_full(false);
        let now = held(&table, &path);
        assert_eq!(now[32], (Some(Location::Guest(PageId(7))), false, None));
        assert_eq!(now[64], (Some(Location::Block(64)), false, Some(Past::Begun)));
        assert_eq!(now[96], (Some(Location::Block(96)), true, None));
        assert_eq!((now[1].0, now[128].0), (Some(Location::Block(9000)), Some(Location::Home)));
        let changed = [1, 32, 64, 96, 128, 1600];
        assert!((0..5000).all(|position| changed.contains(&position) || now[position] == before[position]));
        // When there is much of it the piece has memory again.
        for position in 1..=2 * u32::from(FEW_HELD) {
            assert!(table.make_room_for_one(position));
            table.store(position, Location::Block(position));
        }
        assert!(table.pieces[0].is_present);
        table.check().expect("as it is said to be");
        for position in (0..5000).rev() {
            table.store(position, Location::None);
        }
        table.give_back_unused(4000);
        assert_eq!(allocated(&table), opened + PIECE_BYTES, "the list goes, too, but not where the log goes on");
        table.store(7, Location::Home);
        assert!(table.make_room_for_one(7));
        table.store(7, Location::Block(7));
        table.set_tail(None);
        table.clear();
        assert_eq!((allocated(&table), table.has_room()), (0, false));
        table.check().expect("as it is said to be");
    }

    /// Tables of builds before the list are as long as they were, and keep memory for what is held.
    #[test]
    fn a_table_without_a_list_keeps_its_pieces() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        drop(Table::create(&path, 4096, 5000).expect("a new table"));
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        file.set_len(Table::file_bytes_without_list(5000)).expect("as it was");
        let mut table = Table::open(&path).expect("an earlier build's table");
        assert!(table.make_map());
        table.set_tail(Some(Tail { position: 1, sequence: 1 }));
        for position in 0..1024 {
            assert!(table.make_room(position));
            table.store(position, if position == 5 { Location::Block(5) } else { Location::Home });
        }
        table.give_back_sparse(3000);
        assert!(table.pieces[0].is_present);
        assert_eq!(held(&table, &path)[5].0, Some(Location::Block(5)));
        table.store(5, Location::Gone);
        table.give_back_sparse(3000);
        // Nothing is left that the map cannot say.
        assert!(!table.pieces[0].is_present || table.is_list_full);
        assert_eq!(held(&table, &path)[5].0, Some(Location::Gone));
        table.set_tail(None);
        table.clear();
        assert_eq!(allocated(&table), 0);
    }

    #[test]
    fn a_list_that_contradicts_itself_is_refused() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("table");
        drop(Table::create(&path, 4096, 5000).expect("a new table"));
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        let held = Location::Block(1).pack();
        let entry = |position: u64, word: u32| position << 32 | u64::from(word);
        for entries in [[entry(5000, held), 0], [entry(7, 0), 0], [entry(7, held), entry(7, held)], [1, 0]] {
            for (index, entry) in entries.iter().enumerate() {
                let at = Table::list_offset(5000) + 8 * index as u64;
                std::os::unix::fs::FileExt::write_all_at(&file, &entry.to_ne_bytes(), at).expect("written");
            }
            assert_eq!(Table::open(&path).is_ok(), entries[0] == 1, "{entries:x?}");
        }
    }

    /// Of a log block: where it is, whether it is absorbed, what was written past it.
    type Saying = (Option<Location>, bool, Option<Past>);

    /// What is said of each log block, and what else may be said of one of them at this moment.
    #[derive(Debug, Default)]
    struct Said {
        all: Vec<Saying>,
        next: Option<(usize, Saying)>,
        looks: usize,
    }

    const CRASH_BLOCKS: u32 = 2500;

    fn crash_steps() -> impl Strategy<Value = Vec<(u8, u32, u32)>> {
        let position = prop_oneof![0..20u32, 1000..1060u32, 2040..2070u32, 0..CRASH_BLOCKS];
        proptest::collection::vec((0u8..16, position, 0..CRASH_BLOCKS), 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// A process that opens the file of one that was killed between any two stores finds each log block as it was or as it was to be,
        /// and goes on from there.
        #[test]
        fn every_prefix_of_stores_is_right(steps in crash_steps(), sparse in any::<bool>()) {
            let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
            let path = directory.path().join("table");
            let mut table = Table::create(&path, 4096, CRASH_BLOCKS).expect("a new table");
            assert!(table.make_map());
            table.set_tail(Some(Tail { position: 1, sequence: 1 }));
            let mut all = vec![(Some(Location::None), false, None); CRASH_BLOCKS as usize];
            for position in 0..2300 {
                let location = match position % 41 {
                    0 => Location::Block(position),
                    1..20 => Location::Home,
                    20 => Location::Storage,
                    _ if sparse => Location::Gone,
                    _ => Location::Block(position),
                };
                assert!(table.make_room(position));
                table.store(position, location);
                all[position as usize].0 = Some(location);
            }
            let said = Rc::new(RefCell::new(Said { all, ..Said::default() }));
            let look = {
                let (said, path) = (Rc::clone(&said), path.clone());
                move || {
                    let mut said = said.borrow_mut();
                    said.looks += 1;
                    let found = Table::open(&path).expect("a good table");
                    for position in 0..CRASH_BLOCKS {
                        let now = (found.load(position), found.is_absorbed(position), found.past(position));
                        let is_next = said.next == Some((position as usize, now));
                        assert!(is_next || now == said.all[position as usize], "log block {position} is {now:?}");
                    }
                }
            };
            simulated_kill::set_look(Some(Box::new(look.clone())));
            for (what, position, other) in steps {
                let is_held = table.load(position).is_some_and(Location::is_held);
                let new = match what {
                    0 => (Some(Location::Home), false, None),
                    1 | 2 => (Some(Location::Gone), false, None),
                    3 => (Some(Location::Storage), false, None),
                    4 => (Some(Location::None), false, None),
                    5 | 6 => (Some(Location::Block(5000 + position)), false, None),
                    7 => (Some(Location::Guest(PageId(position))), false, Some(Past::Begun)),
                    8 => (Some(Location::Guest(PageId(position))), false, Some(Past::Written)),
                    9 => (Some(Location::Block(5000 + position)), true, None),
                    10 | 11 => {
                        table.give_back_sparse(other);
                        continue;
                    }
                    12 => {
                        table.give_back_unused(other);
                        continue;
                    }
                    13 => {
                        // Another process goes on.
                        simulated_kill::set_look(None);
                        table = Table::open(&path).expect("the same table");
                        table.give_back_what_was_left();
                        simulated_kill::set_look(Some(Box::new(look.clone())));
                        continue;
                    }
                    _ => {
                        assert!(table.make_room(position));
                        continue;
                    }
                };
                let location = new.0.expect("a location");
                if location.is_held() && !is_held {
                    assert!(if what == 6 { table.make_room(position) } else { table.make_room_for_one(position) });
                }
                said.borrow_mut().next = Some((position as usize, new));
                match (new.1, new.2) {
                    (true, _) => table.store_absorbed(position, 5000 + position),
                    (_, Some(past)) => table.store_past(position, location, Some(past)),
                    _ => table.store(position, location),
                }
                let mut said = said.borrow_mut();
                said.all[position as usize] = new;
                said.next = None;
                drop(said);
                look();
                prop_assert_eq!(table.check(), Ok(()));
            }
            simulated_kill::set_look(None);
            table.set_tail(None);
            table.clear();
            prop_assert_eq!(allocated(&table), 0);
        }
    }

    /// The same for one that is killed while a piece is given to map and list, and where each of those that go on does that as well.
    #[test]
    fn a_process_goes_on_where_one_died_that_gave_a_piece_back() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        let mut table = Table::create(&path, 4096, 4000).expect("a new table");
        assert!(table.make_map());
        table.set_tail(Some(Tail { position: 1, sequence: 1 }));
        for position in 0..2100 {
            assert!(table.make_room(position));
            table.store(position, if position % 100 == 0 { Location::Block(position) } else { Location::Home });
        }
        let expected = held(&table, &path);
        let dead: Rc<RefCell<Vec<Vec<u8>>>> = Rc::default();
        let look = {
            let (dead, path) = (Rc::clone(&dead), path.clone());
            move || dead.borrow_mut().push(std::fs::read(&path).expect("read"))
        };
        simulated_kill::set_look(Some(Box::new(look)));
        table.give_back_sparse(2100);
        // And then some of it goes home.
        table.store(500, Location::Home);
        simulated_kill::set_look(None);
        assert!(!table.pieces[0].is_present);
        let dead = dead.take();
        assert!(dead.len() > 64 + 11, "{} stores", dead.len());
        for (index, bytes) in dead.iter().enumerate() {
            let path = directory.path().join(format!("dead-{index}"));
            std::fs::write(&path, bytes).expect("written");
            let mut next = Table::open(&path).expect("a good table");
            next.give_back_what_was_left();
            // While it was said twice.
            next.store(700, Location::Gone);
            next.store(900, Location::Storage);
            next.store(901, Location::None);
            next.give_back_sparse(2100);
            next.store(800, Location::Home);
            let now = held(&next, &path);
            let new = [(700, Location::Gone), (900, Location::Storage), (901, Location::None), (800, Location::Home)];
            for (position, was) in expected.iter().enumerate() {
                let other = new.iter().find(|(changed, _)| *changed == position).map(|(_, location)| Some(*location));
                let may_be_home = position == 500 && now[position].0 == Some(Location::Home);
                assert!(
                    now[position].0 == other.unwrap_or(was.0) || may_be_home,
                    "log block {position} after store {index}"
                );
            }
            next.check().expect("as it is said to be");
        }
    }

    /// What was said last counts, whichever of its places a dead process had come to.
    #[test]
    fn an_older_word_on_the_list_does_not_come_back() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        let mut table = Table::create(&path, 4096, 4000).expect("a new table");
        assert!(table.make_map());
        table.set_tail(Some(Tail { position: 1, sequence: 1 }));
        let location = |position: u32| if position == 500 { Location::Block(500) } else { Location::Home };
        for position in 0..1024 {
            assert!(table.make_room(position));
            table.store(position, location(position));
        }
        table.promise(700);
        table.give_back_sparse(2100);
        assert!(table.pieces[0].is_present, "a word of it will be stored");
        table.keep_promise(700);
        table.give_back_sparse(2100);
        assert!(!table.pieces[0].is_present && table.make_room(500));
        let dead: Rc<RefCell<Vec<Vec<u8>>>> = Rc::default();
        let look = {
            let (dead, path) = (Rc::clone(&dead), path.clone());
            move || dead.borrow_mut().push(std::fs::read(&path).expect("read"))
        };
        simulated_kill::set_look(Some(Box::new(look)));
        table.store(500, Location::Gone);
        simulated_kill::set_look(None);
        let dead = dead.take();
        assert_eq!(dead.len(), 2, "the word, and then the list");
        for (index, bytes) in dead.iter().enumerate() {
            let path = directory.path().join(format!("dead-{index}"));
            std::fs::write(&path, bytes).expect("written");
            let mut next = Table::open(&path).expect("a good table");
            assert!(next.make_room(0));
            (0..1024).filter(|position| *position != 500).for_each(|position| next.store(position, Location::Home));
            next.give_back_sparse(2100);
            assert!(!next.pieces[0].is_present);
            let expected = if index == 0 { Location::Block(500) } else { Location::Gone };
            assert_eq!(held(&next, &path)[500].0, Some(expected));
        }
    }

    /// Tables of earlier builds have no map. Whoever goes on with one gives all of its words memory.
    #[test]
    fn a_table_without_a_map_is_whole_in_memory() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("table");
        drop(Table::create(&path, 4096, 5000).expect("a new table"));
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        file.set_len(Table::file_bytes_without_map(5000)).expect("as it was");
        let mut table = Table::open(&path).expect("an earlier build's table");
        table.give_back_what_was_left();
        assert!(!table.make_map() && table.can_say_stored(4999));
        assert_eq!(allocated(&table), 5 * PIECE_BYTES);
        table.store(4999, Location::Storage);
        assert_eq!(Table::open(&path).expect("the same table").load(4999), Some(Location::Storage));
        table.check().expect("as it is said to be");
        table.clear();
        assert_eq!(allocated(&table), 0);
    }

    #[test]
    fn a_file_that_is_no_table_is_refused() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("table");
        std::fs::write(&path, vec![0u8; 8192]).expect("a file");
        assert!(Table::open(&path).is_err());
    }
}
