//! Which block was written when, in epochs.

use crate::{BLOCK_BYTES, BlockSet, blocks};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// Blocks in a piece of the table: 256 MiB of the image.
const PIECE_BLOCKS: u64 = 4096;
/// Bytes in front of the table.
const HEADER_BYTES: u64 = 4096;
/// Of the first word of the header: a record, and whether it is worth nothing any more.
const WHOLE: &[u8; 8] = b"amberlc1";
const BROKEN: &[u8; 8] = b"amberlc0";

type Piece = Arc<[AtomicU16]>;

/// See the module. Its file has a header and then two bytes for each block, little-endian.
#[derive(Debug)]
pub struct Record {
    file: File,
    now: AtomicU16,
    is_broken: AtomicBool,
    /// Words reach the file one after the other, and memory after the file.
    writing: Mutex<()>,
    pieces: RwLock<Vec<Option<Piece>>>,
}

impl Record {
    /// A new one, in its first epoch.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn new() -> io::Result<Self> {
        let file = File::from(memfd_create("changes", MemfdFlags::CLOEXEC)?);
        file.write_all_at(WHOLE, 0)?;
        Ok(Self::of(file, 1, Vec::new()))
    }

    /// Goes on with one that another process began, in the epoch that it was in.
    ///
    /// # Errors
    /// When it is no record, or is worth nothing any more.
    pub fn adopt(descriptor: OwnedFd, now: u16) -> io::Result<Self> {
        let file = File::from(descriptor);
        let mut head = [0; 8];
        file.read_exact_at(&mut head, 0)?;
        if &head != WHOLE {
            return Err(io::Error::other("the record of what was written is not whole"));
        }
        let count = file.metadata()?.len().saturating_sub(HEADER_BYTES).div_ceil(2 * PIECE_BLOCKS);
        let mut pieces = Vec::new();
        let mut bytes = vec![0; 2 * PIECE_BLOCKS as usize];
        for piece in 0..count {
            let at = HEADER_BYTES + piece * 2 * PIECE_BLOCKS;
            bytes.fill(0);
            let mut filled = 0;
            while filled < bytes.len() {
                match file.read_at(&mut bytes[filled..], at + filled as u64)? {
                    0 => break,
                    more => filled += more,
                }
            }
            let words = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
            pieces.push(bytes.iter().any(|byte| *byte != 0).then(|| words.map(AtomicU16::new).collect()));
        }
        Ok(Self::of(file, now, pieces))
    }

    fn of(file: File, now: u16, pieces: Vec<Option<Piece>>) -> Self {
        Record {
            file,
            now: AtomicU16::new(now),
            is_broken: AtomicBool::new(false),
            writing: Mutex::default(),
            pieces: RwLock::new(pieces),
        }
    }

    /// What another process goes on with, together with [`Record::epoch`].
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The epoch that is going on.
    pub fn epoch(&self) -> u16 {
        self.now.load(Ordering::SeqCst)
    }

    /// Begins the next epoch, and gives it. Nothing when there are no numbers left: a new record is to be begun.
    pub fn next_epoch(&self) -> Option<u16> {
        self.now
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| now.checked_add(1))
            .ok()
            .map(|before| before + 1)
    }

    fn piece(&self, number: usize) -> Piece {
        if let Some(Some(piece)) = self.pieces.read().expect("no panic under this lock").get(number) {
            return Arc::clone(piece);
        }
        let mut pieces = self.pieces.write().expect("no panic under this lock");
        if pieces.len() <= number {
            pieces.resize(number + 1, None);
        }
        let new = || (0..PIECE_BLOCKS).map(|_| AtomicU16::new(0)).collect();
        Arc::clone(pieces[number].get_or_insert_with(new))
    }

    /// A range is written in this epoch.
    pub(crate) fn note(&self, offset: u64, len: u64) {
        let now = self.epoch();
        for block in blocks(offset, len) {
            let piece = self.piece((block / PIECE_BLOCKS) as usize);
            // Two that write at once may be in two epochs: the later one counts. Nobody passes before the file has it.
            let word = &piece[(block % PIECE_BLOCKS) as usize];
            if word.load(Ordering::SeqCst) >= now {
                continue;
            }
            let _one = self.writing.lock().expect("no panic under this lock");
            if word.load(Ordering::SeqCst) >= now {
                continue;
            }
            if let Err(error) = self.file.write_all_at(&now.to_le_bytes(), HEADER_BYTES + 2 * block) {
                self.is_broken.store(true, Ordering::SeqCst);
                log::warn!(
                    "what is written to an image cannot be noted any more ({error}): the next snapshot has to be a whole one"
                );
                // A page that is there: this does not need memory.
                if let Err(error) = self.file.write_all_at(BROKEN, 0) {
                    log::error!("a record that is worth nothing cannot be called so: {error}");
                }
            }
            // Last: whoever sees it passes without a look at the file, which says it by now, or that it says nothing.
            word.store(now, Ordering::SeqCst);
        }
    }

    /// Whether it says nothing any more.
    pub fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::SeqCst)
    }

    /// The blocks of an image of so many bytes that were written in this epoch or later. Nothing when that is not known.
    pub fn since(&self, epoch: u16, size_bytes: u64) -> Option<BlockSet> {
        let count = size_bytes.div_ceil(BLOCK_BYTES);
        let mut set = BlockSet::new(count);
        for (number, piece) in self.pieces.read().expect("no panic under this lock").iter().enumerate() {
            for (index, written) in piece.iter().flat_map(|piece| piece.iter()).enumerate() {
                let block = number as u64 * PIECE_BLOCKS + index as u64;
                if block < count && written.load(Ordering::SeqCst) >= epoch {
                    set.insert(block);
                }
            }
        }
        (!self.is_broken()).then_some(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn all(set: &BlockSet, count: u64) -> Vec<u64> {
        (0..count).filter(|block| set.contains(*block)).collect()
    }

    #[test]
    fn each_epoch_has_what_was_written_in_it_or_later() {
        const COUNT: u64 = 10_000;
        let size = COUNT * BLOCK_BYTES;
        let mut record = Record::new().expect("a record");
        record.note(BLOCK_BYTES - 1, 2);
        record.note(9_000 * BLOCK_BYTES, 1);
        record.note(7, 0);
        let second = record.next_epoch().expect("an epoch");
        record.note(9_000 * BLOCK_BYTES, BLOCK_BYTES + 1);
        let third = record.next_epoch().expect("an epoch");
        record.note(5 * BLOCK_BYTES, 1);
        for _ in 0..2 {
            assert_eq!(all(&record.since(1, size).expect("known"), COUNT), [0, 1, 5, 9_000, 9_001]);
            assert_eq!(all(&record.since(second, size).expect("known"), COUNT), [5, 9_000, 9_001]);
            assert_eq!(all(&record.since(third, size).expect("known"), COUNT), [5]);
            assert!(record.since(third + 1, size).expect("known").is_empty());
            // Another process sees the same, and so does one after that.
            let descriptor = record.descriptor().try_clone_to_owned().expect("a descriptor");
            record = Record::adopt(descriptor, record.epoch()).expect("adopted");
            assert_eq!(record.epoch(), third);
        }
    }

    #[test]
    fn a_record_that_cannot_be_written_is_worth_nothing_to_anybody() {
        let record = Record::new().expect("a record");
        record.note(0, 1);
        assert!(record.since(1, BLOCK_BYTES).is_some());
        let whole = record.file.try_clone().expect("a descriptor");
        let unwritable = File::open("/dev/null").expect("opened to be read only");
        let full = Record { file: unwritable, ..Record::new().expect("a record") };
        full.note(0, 1);
        assert!(full.since(1, BLOCK_BYTES).is_none());
        whole.write_all_at(BROKEN, 0).expect("written");
        assert!(Record::adopt(whole.into(), 1).is_err());
        assert!(Record::adopt(tempfile::tempfile().expect("a file").into(), 1).is_err());
    }

    thread_local! {
        /// The record that this thread notes something in, and what its word said whenever a line was logged of that.
        static NOTED: RefCell<(Option<Arc<Record>>, Vec<u16>)> = const { RefCell::new((None, Vec::new())) };
    }

    struct Lines;

    impl log::Log for Lines {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, _: &log::Record<'_>) {
            NOTED.with_borrow_mut(|(record, seen)| {
                seen.extend(record.as_ref().map(|record| record.piece(0)[7].load(Ordering::SeqCst)));
            });
        }

        fn flush(&self) {}
    }

    /// Another thread that finds a block noted writes it at once: by then the file has it, or says that it says nothing.
    #[test]
    fn nobody_passes_before_a_record_that_cannot_be_written_says_so() {
        log::set_logger(&Lines).expect("the only one");
        log::set_max_level(log::LevelFilter::Warn);
        let unwritable = File::open("/dev/null").expect("opened to be read only");
        let record = Arc::new(Record { file: unwritable, ..Record::new().expect("a record") });
        NOTED.with_borrow_mut(|(noted, _)| *noted = Some(Arc::clone(&record)));
        record.note(7 * BLOCK_BYTES, 1);
        // Once before the file is marked, and once because that failed, too.
        assert_eq!(NOTED.with_borrow(|(_, seen)| seen.clone()), [0, 0]);
        assert_eq!(record.piece(0)[7].load(Ordering::SeqCst), record.epoch(), "noted all the same: it is broken");
        assert!(record.is_broken());
    }

    #[test]
    fn numbers_come_to_an_end() {
        let record = Record::new().expect("a record");
        record.now.store(u16::MAX, Ordering::SeqCst);
        assert_eq!(record.next_epoch(), None);
        assert_eq!(record.epoch(), u16::MAX);
    }
}
