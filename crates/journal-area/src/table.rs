//! The persistent half of a control block: a tmpfs file with one word per log block.
//!
//! A process that opens the file after its writer was killed sees every store up to some instant, in program order.
//! So each change is one store of one word, ordered so that the table is right after every one of them: content first,
//! then the word that names it, and a slot is only reused after no word names it.

use crate::location::Location;
use guest_memory::{Error as MemoryError, HostFile};
use std::io;
use std::path::Path;

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
const OFFSET_HANDED_OVER: u64 = 32;
/// The most blocks that a log can have to be held: slots of the pool, twice as many, have numbers of 29 bits, and a table that
/// is found has to be looked at in bounded time. 256 GiB of blocks of 4 KiB; mke2fs makes logs of at most 40 GiB.
pub const LOG_BLOCKS_MAX: u32 = 1 << 26;
const OFFSET_OPENING: u64 = 40;
const OFFSET_COUNT_MEANT: u64 = 56;
const OFFSET_COUNT_DONE: u64 = 64;
const OFFSET_NUMBERED: u64 = 72;
const NUMBERED: u64 = 1 << 32;
const OFFSET_DOUBT: u64 = 80;
const DOUBTED: u64 = 1;
const UNTOLD: u64 = 2;

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
}

impl Table {
    /// Makes the table of a log of `log_blocks` blocks of `block_bytes` each, closed and holding nothing.
    ///
    /// # Errors
    /// When the file cannot be made or there is no room for its header.
    pub fn create(path: &Path, block_bytes: u32, log_blocks: u32) -> Result<Self, MemoryError> {
        let file = HostFile::create(path, HEADER_BYTES + u64::from(log_blocks) * 4)?;
        file.reserve(0, HEADER_BYTES)
            .map_err(|e| MemoryError::System { what: format!("reserving room for {}", path.display()), source: e })?;
        file.store_u32(OFFSET_BLOCK_BYTES, block_bytes);
        file.store_u32(OFFSET_LOG_BLOCKS, log_blocks);
        file.store_u64(OFFSET_MAGIC, MAGIC);
        Ok(Table { file, block_bytes, log_blocks })
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
        if file.len() != HEADER_BYTES + u64::from(log_blocks) * 4 {
            return Err(refuse("its length does not fit its number of log blocks"));
        }
        Ok(Table { file, block_bytes, log_blocks })
    }

    /// Bytes in a log block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Number of log blocks, the superblock (position 0) included.
    pub fn log_blocks(&self) -> u32 {
        self.log_blocks
    }

    /// Makes sure that every word can be stored.
    ///
    /// # Errors
    /// ENOSPC when tmpfs is full.
    pub fn reserve(&self) -> io::Result<()> {
        self.file.reserve(HEADER_BYTES, u64::from(self.log_blocks) * 4)
    }

    /// Forgets every word and gives their memory back. The log must be closed.
    pub fn clear(&self) {
        debug_assert!(self.tail().is_none());
        // An older kernel or another file system may not punch holes: the words are zeroed one by one then.
        if self.file.give_back(HEADER_BYTES, u64::from(self.log_blocks) * 4).is_err() && self.reserve().is_ok() {
            for position in 0..self.log_blocks {
                self.store(position, Location::None);
            }
        }
    }

    /// Where the content of log block `position` is; nothing for a damaged word.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn load(&self, position: u32) -> Option<Location> {
        Location::unpack(self.file.load_u32(self.word(position)))
    }

    /// Stores where the content of log block `position` is. [`Table::reserve`] must have succeeded.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn store(&self, position: u32, location: Location) {
        self.file.store_u32(self.word(position), location.pack());
    }

    /// Says, in one step, that the guest was told that this block is at home, which it is not yet. The next [`Table::store`] of it says
    /// something else.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn store_absorbed(&self, position: u32, slot: u32) {
        self.file.store_u32(self.word(position), Location::pack_absorbed(slot));
    }

    /// Whether that was said last.
    ///
    /// # Panics
    /// If the log has no such block.
    pub fn is_absorbed(&self, position: u32) -> bool {
        Location::is_absorbed(self.file.load_u32(self.word(position)))
    }

    fn word(&self, position: u32) -> u64 {
        assert!(position < self.log_blocks, "log block {position} of {}", self.log_blocks);
        HEADER_BYTES + u64::from(position) * 4
    }

    /// Where the live log begins; nothing when it is closed.
    pub fn tail(&self) -> Option<Tail> {
        unpack_tail(self.file.load_u64(OFFSET_TAIL))
    }

    /// Moves the beginning of the live log, or closes it, in one step.
    pub fn set_tail(&self, tail: Option<Tail>) {
        self.file.store_u64(OFFSET_TAIL, pack_tail(tail));
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
        let word = self.file.load_u64(OFFSET_DOUBT);
        Doubt { is_doubted: word & DOUBTED != 0, is_untold: word & UNTOLD != 0 }
    }

    /// Says so, before anything else is done about it.
    pub fn set_doubt(&self, doubt: Doubt) {
        let bit = |is_so: bool, bit: u64| if is_so { bit } else { 0 };
        self.file.store_u64(OFFSET_DOUBT, bit(doubt.is_doubted, DOUBTED) | bit(doubt.is_untold, UNTOLD));
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

    /// Bytes of memory that the table takes: all its words while the log is open.
    pub fn memory_bytes(&self) -> u64 {
        HEADER_BYTES + if self.tail().is_some() { u64::from(self.log_blocks) * 4 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::PageId;

    #[test]
    fn an_opened_table_says_what_was_stored() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("table");
        {
            let table = Table::create(&path, 4096, 1024).expect("a new table");
            assert_eq!(table.tail(), None);
            table.reserve().expect("room");
            table.store(7, Location::Guest(PageId(99)));
            table.set_tail(Some(Tail { position: 1, sequence: u32::MAX }));
        }
        let table = Table::open(&path).expect("the same table");
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
        for (is_doubted, is_untold) in [(true, false), (true, true), (false, true), (false, false)] {
            table.set_doubt(Doubt { is_doubted, is_untold });
            assert_eq!(table.doubt(), Doubt { is_doubted, is_untold });
        }
        table.set_tail(None);
        table.clear();
        assert_eq!(table.load(7), Some(Location::None));
    }

    #[test]
    fn a_file_that_is_no_table_is_refused() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("table");
        std::fs::write(&path, vec![0u8; 8192]).expect("a file");
        assert!(Table::open(&path).is_err());
    }
}
