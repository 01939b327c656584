//! Words of a table that are not in their own places: with each stands whose it is.
//!
//! Of a log block that is not held a map of two bits says all (`table`). Control blocks are held as long as their transactions are live, so
//! there is hardly a piece of words in which nothing is. Where that is little, its words are listed here, and the piece needs no memory.
//!
//! Each entry is 64 bits and stored at once: the log block, then its word. An entry of zeros is none. An entry does not move, and which log
//! blocks have one is said by the entries alone, so that a reader finds the list right between any two stores. Where each is, by log block,
//! is kept beside the file.
//!
//! Memory for the list may be refused at any time. No entry is stored where there is none.

use guest_memory::HostFile;
use std::io;

const ENTRY_BYTES: u64 = 8;
/// Entries in a page of the file, for which memory is given at once.
pub const ENTRIES_A_PAGE: u32 = 512;
const PAGE_BYTES: u64 = ENTRY_BYTES * ENTRIES_A_PAGE as u64;
/// Entries for which the list beside the file grows at a time.
const ENTRIES_MORE: usize = 64;

/// The list, at its place in the file.
#[derive(Debug)]
pub struct Listed {
    offset: u64,
    pages_max: u32,
    /// Log block and entry, by log block.
    entries: Vec<(u32, u32)>,
    /// A bit for each entry that is one.
    taken: Vec<u64>,
    /// So many pages have memory for sure, from the first on.
    pages: u32,
    /// As many have memory as far as is known.
    pages_counted: u32,
}

impl Listed {
    /// None yet, at `offset` in the file, with room for `pages_max` pages.
    pub fn new(offset: u64, pages_max: u32) -> Self {
        Listed { offset, pages_max, entries: Vec::new(), taken: Vec::new(), pages: 0, pages_counted: 0 }
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
                self.entries.push((position, page * ENTRIES_A_PAGE + index as u32));
            }
            // All zeros is as good as a hole, whether it is one or not.
            self.pages += u32::from(is_used && self.pages == page);
        }
        self.entries.sort_unstable();
        if let Some(pair) = self.entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Ok(Err(format!("it lists two words of log block {}", pair[0].0)));
        }
        for index in 0..self.entries.len() {
            let entry = self.entries[index].1;
            self.take(entry, true);
        }
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
        }
    }

    fn index_of(&self, position: u32) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&position, |(position, _)| *position)
    }

    /// The word of a log block; zero where none is listed.
    pub fn get(&self, file: &HostFile, position: u32) -> u32 {
        self.index_of(position).map_or(0, |index| file.load_u64(self.place(self.entries[index].1)) as u32)
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
        (self.pages as usize * ENTRIES_A_PAGE as usize).saturating_sub(self.entries.len())
    }

    /// An entry that is none and has memory.
    fn first_free(&self) -> Option<u32> {
        let end = self.pages * ENTRIES_A_PAGE;
        let known = self.taken.iter().enumerate().find(|(_, word)| **word != u64::MAX);
        let free = known.map_or(self.taken.len() as u32 * 64, |(index, word)| index as u32 * 64 + word.trailing_ones());
        (free < end).then_some(free)
    }

    /// Lists a word, or another one in its place, in one step. Nothing where there is no memory for it; else whether it is new.
    pub fn set(&mut self, file: &HostFile, position: u32, word: u32) -> Option<bool> {
        let entry = u64::from(position) << 32 | u64::from(word);
        match self.index_of(position) {
            Ok(index) => {
                file.store_u64(self.place(self.entries[index].1), entry);
                Some(false)
            }
            Err(index) => {
                let free = self.first_free()?;
                file.store_u64(self.place(free), entry);
                if self.entries.len() == self.entries.capacity() {
                    self.entries.reserve_exact(ENTRIES_MORE);
                }
                self.entries.insert(index, (position, free));
                self.take(free, true);
                Some(true)
            }
        }
    }

    /// Takes a log block out, in one step. False where it is not listed.
    pub fn remove(&mut self, file: &HostFile, position: u32) -> bool {
        let Ok(index) = self.index_of(position) else { return false };
        let (_, entry) = self.entries.remove(index);
        file.store_u64(self.place(entry), 0);
        self.take(entry, false);
        true
    }

    /// Log blocks whose words are listed, in their order.
    pub fn positions(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().map(|(position, _)| *position)
    }

    /// Pages up to the last one that an entry is in.
    fn pages_used(&self) -> u32 {
        let last = self.taken.iter().rposition(|word| *word != 0);
        last.map_or(0, |index| (index as u32 * 64) / ENTRIES_A_PAGE + 1)
    }

    /// Gives back the memory of pages behind all entries.
    pub fn give_back_unused(&mut self, file: &HostFile) {
        let used = self.pages_used();
        if used < self.pages && self.punch(file, used..self.pages) {
            (self.pages, self.pages_counted) = (used, used);
        }
        if self.entries.capacity() > self.entries.len() + 2 * ENTRIES_MORE {
            self.entries.shrink_to(self.entries.len() + ENTRIES_MORE);
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
        for (_, entry) in std::mem::take(&mut self.entries) {
            file.store_u64(self.place(entry), 0);
        }
        self.taken = Vec::new();
        self.give_back_what_was_left(file);
    }

    /// Bytes of memory that it takes, in the file and beside it.
    pub fn memory_bytes(&self) -> u64 {
        let beside = self.entries.capacity() * size_of::<(u32, u32)>() + self.taken.capacity() * size_of::<u64>();
        u64::from(self.pages_counted) * PAGE_BYTES + beside as u64
    }

    /// Whether any of the file has memory for it.
    pub fn has_room(&self) -> bool {
        self.pages_counted > 0
    }
}
