//! Words of a table that are not in their own places: with each stands whose it is.
//!
//! Of a log block that is not held a map of two bits says all (`table`). Control blocks are held as long as their transactions are live, so
//! there is hardly a piece of words in which nothing is. Where that is little, its words are listed here, and the piece needs no memory.
//!
//! Each entry is 64 bits and stored at once: the log block, then its word. An entry of zeros is none. An entry does not move, and which log
//! blocks have one is said by the entries alone, so that a reader finds the list right between any two stores. Where each is, by piece of the
//! log and block, is kept beside the file: a log's tail passes many pieces at once, and the entries of each are found and go among few.
//!
//! Memory for the list may be refused at any time. No entry is stored where there is none.

use guest_memory::HostFile;
use std::io;

const ENTRY_BYTES: u64 = 8;
/// Entries in a page of the file, for which memory is given at once.
pub const ENTRIES_A_PAGE: u32 = 512;
const PAGE_BYTES: u64 = ENTRY_BYTES * ENTRIES_A_PAGE as u64;
/// Log blocks whose entries are found together: those of a piece of the table's words.
const BLOCKS_A_PIECE: u32 = 1024;
/// Entries for which what is known of a piece grows at a time.
const ENTRIES_MORE: usize = 8;
/// Entries have numbers of so many bits. What is left of 32 says which block of its piece one is about.
const ENTRY_BITS: u32 = 32 - BLOCKS_A_PIECE.ilog2();
/// As many pages as there are numbers of entries for.
pub const PAGES_MAX: u32 = (1 << ENTRY_BITS) / ENTRIES_A_PAGE;

/// The list, at its place in the file.
#[derive(Debug)]
pub struct Listed {
    offset: u64,
    pages_max: u32,
    /// Of each piece of the log which of its blocks has which entry, by block, packed. Up to the last piece that had any.
    pieces: Vec<Vec<u32>>,
    len: usize,
    /// For so many there is room in all pieces.
    capacity: usize,
    /// A bit for each entry that is one.
    taken: Vec<u64>,
    /// All words of `taken` before this one are full.
    full: usize,
    /// So many pages have memory for sure, from the first on.
    pages: u32,
    /// As many have memory as far as is known.
    pages_counted: u32,
}

impl Listed {
    /// None yet, at `offset` in the file, with room for `pages_max` pages, of which there are at most [`PAGES_MAX`].
    pub fn new(offset: u64, pages_max: u32) -> Self {
        let pages_max = pages_max.min(PAGES_MAX);
        Listed {
            offset,
            pages_max,
            pieces: Vec::new(),
            len: 0,
            capacity: 0,
            taken: Vec::new(),
            full: 0,
            pages: 0,
            pages_counted: 0,
        }
    }

    /// Takes in what an earlier process left, without giving memory to what has none. What is wrong with it, as a sentence.
    ///
    /// # Errors
    /// Those of reading the file.
    pub fn read(&mut self, file: &HostFile, log_blocks: u32) -> io::Result<Result<(), String>> {
        let mut bytes = [0; PAGE_BYTES as usize];
        for page in 0..self.pages_max {
            file.read_at(self.offset + u64::from(page) * PAGE_BYTES, &mut bytes)?;
            let mut is_used = false;
            for (index, entry) in bytes.chunks_exact(ENTRY_BYTES as usize).enumerate() {
                let entry = entry.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
                if entry == 0 {
                    continue;
                }
                let (position, word) = ((entry >> 32) as u32, entry as u32);
                if position >= log_blocks || word == 0 {
                    return Ok(Err(format!("it lists a word of log block {position}, which there is not")));
                }
                is_used = true;
                let entry = page * ENTRIES_A_PAGE + index as u32;
                self.piece(position).push(pack(position, entry));
                self.take(entry, true);
                self.len += 1;
            }
            // All zeros is as good as a hole, whether it is one or not.
            self.pages += u32::from(is_used && self.pages == page);
        }
        for (index, piece) in (0..).zip(&mut self.pieces) {
            piece.sort_unstable();
            piece.shrink_to_fit();
            if let Some(pair) = piece.windows(2).find(|pair| block_of(pair[0]) == block_of(pair[1])) {
                let position = index * BLOCKS_A_PIECE + block_of(pair[0]);
                return Ok(Err(format!("it lists two words of log block {position}")));
            }
        }
        self.capacity = self.pieces.iter().map(Vec::capacity).sum();
        self.pages_counted = self.pages_used();
        Ok(Ok(()))
    }

    fn place(&self, entry: u32) -> u64 {
        self.offset + u64::from(entry) * ENTRY_BYTES
    }

    fn take(&mut self, entry: u32, is_taken: bool) {
        let (index, bit) = (entry as usize / 64, 1 << (entry % 64));
        if index >= self.taken.len() {
            self.taken.resize(index + 1, 0);
        }
        if is_taken {
            self.taken[index] |= bit;
        } else {
            self.taken[index] &= !bit;
            self.full = self.full.min(index);
        }
    }

    /// What is known of the piece that a log block is in.
    fn piece(&mut self, position: u32) -> &mut Vec<u32> {
        let index = (position / BLOCKS_A_PIECE) as usize;
        if index >= self.pieces.len() {
            self.pieces.reserve_exact(index + 1 - self.pieces.len());
            self.pieces.resize_with(index + 1, Vec::new);
        }
        &mut self.pieces[index]
    }

    /// Where in its piece a log block is, or would be.
    fn index_of(&self, position: u32) -> Result<usize, usize> {
        let Some(piece) = self.pieces.get((position / BLOCKS_A_PIECE) as usize) else { return Err(0) };
        piece.binary_search_by_key(&(position % BLOCKS_A_PIECE), |known| block_of(*known))
    }

    /// The entry of a log block.
    fn entry(&self, position: u32) -> Option<u32> {
        let index = self.index_of(position).ok()?;
        Some(entry_of(self.pieces[(position / BLOCKS_A_PIECE) as usize][index]))
    }

    /// The word of a log block; zero where none is listed.
    pub fn get(&self, file: &HostFile, position: u32) -> u32 {
        self.entry(position).map_or(0, |entry| file.load_u64(self.place(entry)) as u32)
    }

    /// Makes sure that so many more can be listed. False where there is no room.
    pub fn make_room(&mut self, file: &HostFile, count: usize) -> bool {
        while self.free() < count {
            let place = self.place(self.pages * ENTRIES_A_PAGE);
            if self.pages == self.pages_max || file.reserve(place, PAGE_BYTES).is_err() {
                return false;
            }
            self.pages += 1;
            self.pages_counted = self.pages_counted.max(self.pages);
        }
        true
    }

    /// How many more there is memory for, at least.
    fn free(&self) -> usize {
        (self.pages as usize * ENTRIES_A_PAGE as usize).saturating_sub(self.len)
    }

    /// An entry that is none and has memory.
    fn first_free(&mut self) -> Option<u32> {
        let end = self.pages * ENTRIES_A_PAGE;
        let full = self.taken.iter().skip(self.full).take_while(|word| **word == u64::MAX).count();
        self.full += full;
        let free = self.full as u32 * 64 + self.taken.get(self.full).map_or(0, |word| word.trailing_ones());
        (free < end).then_some(free)
    }

    /// Lists a word, or another one in its place, in one step. Nothing where there is no memory for it; else whether it is new.
    pub fn set(&mut self, file: &HostFile, position: u32, word: u32) -> Option<bool> {
        let said = u64::from(position) << 32 | u64::from(word);
        if let Some(entry) = self.entry(position) {
            file.store_u64(self.place(entry), said);
            return Some(false);
        }
        let entry = self.first_free()?;
        file.store_u64(self.place(entry), said);
        let piece = self.piece(position);
        let before = piece.capacity();
        if piece.len() == before {
            piece.reserve_exact(ENTRIES_MORE);
        }
        let known = pack(position, entry);
        let index = piece.partition_point(|other| *other < known);
        piece.insert(index, known);
        let after = piece.capacity();
        self.capacity += after - before;
        self.len += 1;
        self.take(entry, true);
        Some(true)
    }

    /// Takes a log block out, in one step. False where it is not listed.
    pub fn remove(&mut self, file: &HostFile, position: u32) -> bool {
        let Ok(index) = self.index_of(position) else { return false };
        let piece = self.piece(position);
        let before = piece.capacity();
        let entry = entry_of(piece.remove(index));
        if piece.capacity() > piece.len() + 2 * ENTRIES_MORE || piece.is_empty() {
            piece.shrink_to(piece.len().next_multiple_of(ENTRIES_MORE));
        }
        let after = piece.capacity();
        self.capacity -= before - after;
        self.len -= 1;
        file.store_u64(self.place(entry), 0);
        self.take(entry, false);
        true
    }

    /// Log blocks whose words are listed, in their order.
    pub fn positions(&self) -> impl Iterator<Item = u32> {
        let pieces = (0..).zip(&self.pieces);
        pieces.flat_map(|(index, piece)| piece.iter().map(move |known| index * BLOCKS_A_PIECE + block_of(*known)))
    }

    /// Pages up to the last one that an entry is in.
    fn pages_used(&self) -> u32 {
        let last = self.taken.iter().rposition(|word| *word != 0);
        last.map_or(0, |index| (index as u32 * 64) / ENTRIES_A_PAGE + 1)
    }

    /// Gives back the memory of pages behind all entries.
    pub fn give_back_unused(&mut self, file: &HostFile) {
        let (used, end) = (self.pages_used(), self.pages.max(self.pages_counted));
        if used < end && self.punch(file, used..end) {
            (self.pages, self.pages_counted) = (self.pages.min(used), used);
        }
        if self.len == 0 {
            (self.pieces, self.capacity, self.taken, self.full) = (Vec::new(), 0, Vec::new(), 0);
        }
    }

    /// Another process has left the file: the same, whatever it made room for.
    pub fn give_back_what_was_left(&mut self, file: &HostFile) {
        let used = self.pages_used();
        if self.punch(file, used..self.pages_max) {
            (self.pages, self.pages_counted) = (self.pages.min(used), used);
        }
    }

    fn punch(&self, file: &HostFile, pages: std::ops::Range<u32>) -> bool {
        let bytes = u64::from(pages.end - pages.start) * PAGE_BYTES;
        bytes == 0 || file.give_back(self.place(pages.start * ENTRIES_A_PAGE), bytes).is_ok()
    }

    /// Takes all out, and gives the memory back, whoever made room for it.
    pub fn clear(&mut self, file: &HostFile) {
        for known in std::mem::take(&mut self.pieces).into_iter().flatten() {
            file.store_u64(self.place(entry_of(known)), 0);
        }
        (self.len, self.capacity, self.taken, self.full) = (0, 0, Vec::new(), 0);
        self.give_back_what_was_left(file);
    }

    /// Bytes of memory that it takes, in the file and beside it.
    pub fn memory_bytes(&self) -> u64 {
        let beside = self.capacity * size_of::<u32>()
            + self.pieces.capacity() * size_of::<Vec<u32>>()
            + self.taken.capacity() * size_of::<u64>();
        u64::from(self.pages_counted) * PAGE_BYTES + beside as u64
    }

    /// Whether any of the file has memory for it.
    pub fn has_room(&self) -> bool {
        self.pages_counted > 0
    }
}

/// Which block of its piece has which entry.
fn pack(position: u32, entry: u32) -> u32 {
    debug_assert!(entry < 1 << ENTRY_BITS);
    (position % BLOCKS_A_PIECE) << ENTRY_BITS | entry
}

fn block_of(known: u32) -> u32 {
    known >> ENTRY_BITS
}

fn entry_of(known: u32) -> u32 {
    known & ((1 << ENTRY_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    const PAGES: u32 = 6;
    const LOG_BLOCKS: u32 = 20_000;

    fn allocated_bytes(path: &Path) -> u64 {
        std::fs::metadata(path).expect("the file").blocks() * 512
    }

    fn file_in(directory: &tempfile::TempDir) -> (std::path::PathBuf, HostFile) {
        let path = directory.path().join("list");
        let file = HostFile::create(&path, PAGE_BYTES * (1 + u64::from(PAGES))).expect("a file");
        (path, file)
    }

    fn read(file: &HostFile) -> Listed {
        let mut listed = Listed::new(PAGE_BYTES, PAGES);
        listed.read(file, LOG_BLOCKS).expect("read").expect("a good list");
        listed
    }

    #[derive(Clone, Debug)]
    enum Step {
        Set(u32, u32),
        /// The log's tail passes all of these.
        Remove(std::ops::Range<u32>),
        GiveBack,
        AnotherProcess {
            gives_back: bool,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let position = || prop_oneof![0..8u32, 1020..1030u32, 5000..5100u32, 0..LOG_BLOCKS];
        let step = prop_oneof![
            12 => (position(), 1..u32::MAX).prop_map(|(position, word)| Step::Set(position, word)),
            4 => (position(), 1..700u32).prop_map(|(first, count)| Step::Remove(first..(first + count).min(LOG_BLOCKS))),
            1 => Just(Step::GiveBack),
            1 => any::<bool>().prop_map(|gives_back| Step::AnotherProcess { gives_back }),
        ];
        proptest::collection::vec(step, 1..300)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn it_is_a_map_that_outlives_its_process(steps in steps()) {
            let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
            let (path, file) = file_in(&directory);
            let mut listed = Listed::new(PAGE_BYTES, PAGES);
            let mut model: BTreeMap<u32, u32> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Set(position, word) => {
                        let is_new = !model.contains_key(&position);
                        prop_assert!(!is_new || listed.make_room(&file, 1));
                        prop_assert_eq!(listed.set(&file, position, word), Some(is_new));
                        model.insert(position, word);
                    }
                    Step::Remove(positions) => {
                        for position in positions {
                            prop_assert_eq!(listed.remove(&file, position), model.remove(&position).is_some());
                        }
                    }
                    Step::GiveBack => listed.give_back_unused(&file),
                    Step::AnotherProcess { gives_back } => {
                        listed = read(&file);
                        if gives_back {
                            listed.give_back_what_was_left(&file);
                        }
                    }
                }
                prop_assert!(listed.positions().eq(model.keys().copied()));
                prop_assert!(model.iter().all(|(position, word)| listed.get(&file, *position) == *word));
                prop_assert_eq!(listed.len, model.len());
                prop_assert_eq!(listed.capacity, listed.pieces.iter().map(Vec::capacity).sum::<usize>());
                let taken: u32 = listed.taken.iter().map(|word| word.count_ones()).sum();
                prop_assert_eq!(taken as usize, model.len());
                prop_assert!(listed.taken.iter().take(listed.full).all(|word| *word == u64::MAX));
            }
            for position in model.into_keys() {
                prop_assert!(listed.remove(&file, position));
            }
            listed.give_back_what_was_left(&file);
            prop_assert_eq!(allocated_bytes(&path), 0);
        }
    }

    /// Whoever goes on with a list, whose first pages are empty and whose last one is not, gives that back, too, when it is empty.
    #[test]
    fn pages_that_another_process_used_are_given_back_with_their_last_entry() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let (path, file) = file_in(&directory);
        let mut listed = Listed::new(PAGE_BYTES, PAGES);
        let all = 4 * ENTRIES_A_PAGE;
        assert!(listed.make_room(&file, all as usize));
        (0..all).for_each(|position| assert_eq!(listed.set(&file, position, 7), Some(true)));
        (0..all - 1).for_each(|position| assert!(listed.remove(&file, position)));
        listed.give_back_unused(&file);
        assert_eq!(allocated_bytes(&path), 4 * PAGE_BYTES, "there is one in the last of them");
        let mut next = read(&file);
        assert_eq!(next.memory_bytes() / PAGE_BYTES, 4);
        assert!(next.remove(&file, all - 1));
        next.give_back_unused(&file);
        assert_eq!((allocated_bytes(&path), next.memory_bytes()), (0, 0));
    }
}
