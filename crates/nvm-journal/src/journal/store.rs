//! Storing contents, checksums and headers; the difference between two versions of a block (the paper's section III-D).

use super::Journal;
use crate::difference::ChecksumChange;
use crate::layout::{GONE, Header, HeaderKind, NO_CHECKSUM, checksum_of_content, proper_checksum};
use crate::medium::{LINE_BYTES, Medium, WORD_BYTES, word_of};

const LINE: usize = LINE_BYTES as usize;
/// What is compared in one go before its lines are.
const STRETCH: usize = 8 * LINE;

impl<M: Medium> Journal<M> {
    pub(super) fn store(&mut self, offset: u64, word: u64) {
        self.counters.bytes_stored += WORD_BYTES;
        self.medium.store_word(offset, word);
    }

    /// Writes a block that nothing refers to.
    pub(super) fn write_whole(&mut self, block: u32, content: &[u8]) {
        self.counters.bytes_stored += content.len() as u64;
        self.medium.stream(self.geometry.block(block), content);
        self.write_checksum(block, content);
    }

    /// Makes a block that nothing refers to hold `content`, storing only the words that differ.
    pub(super) fn write_difference(&mut self, block: u32, content: &[u8]) {
        let start = self.geometry.block(block);
        let before = self.counters.bytes_stored;
        let lines = content.len() / LINE;
        let mut change = ChecksumChange::default();
        for (stretch_index, stretch) in content.chunks(STRETCH).enumerate() {
            let at = start as usize + stretch_index * STRETCH;
            if &self.medium.bytes()[at..at + stretch.len()] == stretch {
                continue;
            }
            for (index, line) in stretch.chunks_exact(LINE).enumerate() {
                let at = at + index * LINE;
                let known: [u8; LINE] = *self.medium.bytes()[at..].first_chunk().expect("a block is inside the region");
                if known == line {
                    continue;
                }
                change.add(&known, line, lines - 1 - (stretch_index * STRETCH / LINE + index));
                self.write_line(at as u64, &known, line);
            }
        }
        self.counters.delta_bytes += self.counters.bytes_stored - before;
        if self.options.checksums {
            // What the table has belongs to the old version, unless that was put without one.
            let known = Some(self.checksum_of(block)).filter(|known| *known != NO_CHECKSUM && *known != 0);
            let checksum = known.and_then(|known| change.apply(known)).map(proper_checksum);
            self.store_checksum(block, checksum.unwrap_or_else(|| checksum_of_content(content)));
        } else {
            self.store_checksum(block, NO_CHECKSUM);
        }
    }

    /// Stores the words in which a line differs from what is there.
    fn write_line(&mut self, at: u64, known: &[u8], line: &[u8]) {
        let mut differs = 0u8;
        for word in 0..8 {
            let is_same = word_of(known, word * 8) == word_of(line, word * 8);
            differs |= u8::from(!is_same) << word;
        }
        if differs == u8::MAX {
            self.counters.bytes_stored += LINE_BYTES;
            self.medium.stream(at, line);
            return;
        }
        for word in (0..8).filter(|word| differs & 1 << word != 0) {
            self.store(at + word * 8, word_of(line, word * 8));
        }
        self.medium.write_back(at, LINE_BYTES);
    }

    fn write_checksum(&mut self, block: u32, content: &[u8]) {
        self.store_checksum(block, if self.options.checksums { checksum_of_content(content) } else { NO_CHECKSUM });
    }

    /// What the table has for a journal block.
    fn checksum_of(&self, block: u32) -> u32 {
        let at = self.geometry.checksum(block);
        (self.medium.word(at & !7) >> ((at & 4) * 8)) as u32
    }

    fn store_checksum(&mut self, block: u32, checksum: u32) {
        let at = self.geometry.checksum(block);
        let checksum = u64::from(checksum);
        // A word has the checksums of two blocks; the neighbour's stays as it is.
        let shift = (at & 4) * 8;
        let known = self.medium.word(at & !7);
        let word = known & !(0xffff_ffff << shift) | checksum << shift;
        if word == known {
            return;
        }
        self.store(at & !7, word);
        self.medium.write_back(at & !7, WORD_BYTES);
    }

    /// Writes a header of the commit area.
    pub(super) fn write_header(&mut self, index: u32, kind: HeaderKind, home: u64) {
        let header = Header {
            kind,
            home,
            transaction: self.checkpoint.transaction.wrapping_add(1),
            block: self.block_of[index as usize],
        };
        self.store_header(self.geometry.header(index), &header);
    }

    pub(super) fn store_header(&mut self, at: u64, header: &Header) {
        let [first, second] = header.encode();
        self.store(at, first);
        self.store(at + 8, second);
        self.medium.write_back(at, 16);
    }

    /// Takes a header of the checkpoint area away: durably so at the next fence.
    pub(super) fn invalidate(&mut self, index: u32) {
        let at = self.geometry.header(index);
        self.store(at, GONE);
        self.store(at + 8, GONE);
        self.medium.write_back(at, 16);
        self.invalid += 1;
    }
}
