//! Where blocks go home to.

use crate::disk::Disk;
use crate::writeback::Writeback;
use extfs::{FileSystem, Journal, ReadAt};
use std::io;

/// A file system's disk, or the part of a disk that holds it: byte 0 is the file system's first byte.
pub trait HomeWriter: ReadAt {
    /// Writes `data` from byte `offset` on. Offsets and lengths are multiples of the file system's block size.
    ///
    /// # Errors
    /// When not all of it was written.
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Says that what was written in these bytes will not be written again: it may begin its way to storage, while more
    /// is read. A hint: it promises nothing, and what goes wrong is told by the next flush.
    fn begin_writeback(&mut self, _offset: u64, _length: u64) {}

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// When that failed: then nothing is known of what was written since the last flush.
    fn flush(&mut self) -> io::Result<()>;
}

/// A part of a [`Disk`].
#[derive(Debug)]
pub struct DiskHome<'a> {
    disk: &'a Disk,
    offset: u64,
    length: u64,
    writeback: Writeback,
}

impl<'a> DiskHome<'a> {
    /// The `length` bytes of `disk` from `offset` on.
    pub fn new(disk: &'a Disk, offset: u64, length: u64) -> Self {
        DiskHome { disk, offset, length, writeback: disk.writeback() }
    }

    fn check(&self, offset: u64, length: usize) -> io::Result<u64> {
        if offset.checked_add(length as u64).is_none_or(|end| end > self.length) {
            let text = format!("{length} bytes at byte {offset} are outside the file system");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(self.offset + offset)
    }
}

impl ReadAt for DiskHome<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(self.check(offset, buffer.len())?, buffer)
    }

    fn size(&self) -> u64 {
        self.length
    }
}

impl HomeWriter for DiskHome<'_> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write_all_at(self.check(offset, data.len())?, data)
    }

    fn begin_writeback(&mut self, offset: u64, length: u64) {
        if let Some(length) = usize::try_from(length).ok()
            && let Ok(offset) = self.check(offset, length)
        {
            self.writeback.begin(offset, length as u64);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writeback.wait();
        self.disk.flush()
    }
}

/// Which blocks of a file system a replay may write: all of them but its journal's.
#[derive(Clone, Debug)]
pub struct HomeBounds {
    blocks: u64,
    block_size: u32,
    /// Blocks of the journal and of its map: ascending, apart.
    excluded: Vec<(u64, u64)>,
}

impl HomeBounds {
    /// The bounds of a file system: all of its partition or disk. One that was growing when it crashed has blocks in its
    /// journal that are beyond the end that its superblock still tells, and jbd2 and e2fsck replay them.
    pub fn new(file_system: &FileSystem) -> Self {
        let mut excluded: Vec<(u64, u64)> = file_system
            .journal
            .extents(&file_system.superblock)
            .iter()
            .map(|extent| (extent.physical, extent.physical + u64::from(extent.count)))
            .collect();
        if let Journal::Internal { map_blocks, .. } = &file_system.journal {
            excluded.extend(map_blocks.iter().map(|block| (*block, block + 1)));
        }
        let block_size = file_system.superblock.block_size;
        Self::from_parts(file_system.length / u64::from(block_size), block_size, excluded)
    }

    /// The bounds of a file system of `blocks` blocks of `block_size` bytes, `excluded` (first, one past the last) being
    /// those of its journal and of its map.
    pub fn from_parts(blocks: u64, block_size: u32, mut excluded: Vec<(u64, u64)>) -> Self {
        excluded.sort_unstable();
        HomeBounds { blocks, block_size, excluded }
    }

    /// Whether a replay may write block `block`.
    pub fn contains(&self, block: u64) -> bool {
        let after = self.excluded.partition_point(|(first, _)| *first <= block);
        let is_journal = after > 0 && block < self.excluded[after - 1].1;
        block < self.blocks && !is_journal
    }

    /// Whether it may write each of `count` blocks from `first` on.
    pub(crate) fn contains_all(&self, first: u64, count: u64) -> bool {
        let Some(end) = first.checked_add(count) else { return false };
        // What begins before the end, the last of it: none of those before reaches farther, as they are apart.
        let before = self.excluded.partition_point(|(excluded, _)| *excluded < end);
        let is_journal = before > 0 && first < self.excluded[before - 1].1;
        end <= self.blocks && !is_journal
    }

    /// Bytes in a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }
}

/// Where a journal superblock is written when the journal has been emptied.
pub enum JournalPlace<'a> {
    /// In the file system itself, at this byte.
    Home {
        /// Byte of the file system.
        offset: u64,
    },
    /// On another disk.
    Other {
        /// That disk.
        disk: &'a mut dyn HomeWriter,
        /// Byte of it.
        offset: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_and_what_is_beyond_the_end_are_not_home() {
        let bounds = HomeBounds::from_parts(100, 4096, vec![(40, 50), (20, 21)]);
        let outside: Vec<u64> = (0..110).filter(|block| !bounds.contains(*block)).collect();
        let expected: Vec<u64> = [20].into_iter().chain(40..50).chain(100..110).collect();
        assert_eq!(outside, expected);
        assert!(!bounds.contains(u64::MAX));
    }
}
