//! What a journal's blocks look like and where its log runs: everything that its superblock fixes.

use crate::checksum::crc32c;

/// Which checksums a journal carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// None.
    None,
    /// One CRC-32 per transaction, in the commit block (compat bit 0x1).
    V1,
    /// CRC-32C of every control block, and 16 bits of it per data block (incompat bit 0x8).
    V2,
    /// CRC-32C of every control block and every data block (incompat bit 0x10).
    V3,
}

/// Layout of a journal's blocks and bounds of its log. Small, `Copy`, and right once made: it only comes from
/// [`crate::Superblock::format`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Bytes in a block of the journal, which is a block of the file system.
    pub block_size: u32,
    /// Which checksums there are.
    pub checksum: Checksum,
    /// Seed of every checksum of kinds 2 and 3: CRC-32C of the journal's UUID.
    pub seed: u32,
    /// Block numbers have 64 bits.
    pub wide: bool,
    /// A commit block may be on storage before the blocks it commits (incompat bit 0x4).
    pub async_commit: bool,
    /// The first block of the log.
    pub first: u32,
    /// The block after the last one of the log: the journal's length, less the fast-commit area.
    pub last: u32,
    /// Number of blocks of the journal, its superblock and its fast-commit area included.
    pub length: u32,
    /// The journal may hold fast commits (incompat bit 0x20), from block `last + 1` on.
    pub fast_commit: bool,
}

impl Format {
    /// The log block after `position`.
    pub fn next(&self, position: u32) -> u32 {
        self.advance(position, 1)
    }

    /// The log block `count` blocks after `position`. `count` may be up to the length of the log.
    pub fn advance(&self, position: u32, count: u32) -> u32 {
        let to = u64::from(position) + u64::from(count);
        let to = if to >= u64::from(self.last) { to - u64::from(self.log_blocks()) } else { to };
        to as u32
    }

    /// The log block before `position`.
    pub fn previous(&self, position: u32) -> u32 {
        if position <= self.first { self.last - 1 } else { position - 1 }
    }

    /// How many blocks after `from` the log block `to` is.
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from {
            return to - from;
        }
        // The last log blocks of a journal that does not begin at 0 have numbers above the log's length.
        (u64::from(to) + u64::from(self.log_blocks())).saturating_sub(u64::from(from)) as u32
    }

    /// Number of blocks that the log runs over.
    pub fn log_blocks(&self) -> u32 {
        self.last - self.first
    }

    /// Whether `position` is a block of the log.
    pub fn contains(&self, position: u32) -> bool {
        (self.first..self.last).contains(&position)
    }

    /// Whether control blocks end in a checksum, and data blocks have one in their tag.
    pub fn has_block_checksums(&self) -> bool {
        matches!(self.checksum, Checksum::V2 | Checksum::V3)
    }

    /// Bytes of one descriptor tag, without the UUID that may follow it.
    pub fn tag_bytes(&self) -> usize {
        match (self.checksum, self.wide) {
            (Checksum::V3, _) => 16,
            (Checksum::V2, true) => 14,
            (Checksum::V2, false) => 10,
            (_, true) => 12,
            (_, false) => 8,
        }
    }

    /// Bytes of one revoke record.
    pub fn record_bytes(&self) -> usize {
        if self.wide { 8 } else { 4 }
    }

    /// Bytes at the end of descriptor and revoke blocks that are their checksum.
    pub fn tail_bytes(&self) -> usize {
        if self.has_block_checksums() { 4 } else { 0 }
    }

    /// Checksum of a control block whose checksum field, at byte `field`, is taken as zero.
    pub(crate) fn control_checksum(&self, block: &[u8], field: usize) -> u32 {
        let crc = crc32c(self.seed, &block[..field]);
        crc32c(crc32c(crc, &[0; 4]), &block[field + 4..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(first: u32, last: u32) -> Format {
        Format {
            block_size: 4096,
            checksum: Checksum::None,
            seed: 0,
            wide: false,
            async_commit: false,
            first,
            last,
            length: last,
            fast_commit: false,
        }
    }

    #[test]
    fn the_log_wraps() {
        let format = format(2, 1030);
        assert_eq!(format.next(1028), 1029);
        assert_eq!(format.next(1029), 2);
        assert_eq!(format.advance(1000, 30), 2);
        assert_eq!(format.advance(1000, 1028), 1000);
        assert_eq!(format.distance(1000, 2), 30);
        assert_eq!(format.distance(2, 1000), 998);
        assert_eq!(format.distance(7, 7), 0);
        assert!((2..1030).all(|position| format.previous(format.next(position)) == position));
        assert_eq!(format.distance(1029, 2), 1, "from the last block of the log to the first");
        assert!(!format.contains(1) && format.contains(2) && format.contains(1029) && !format.contains(1030));
    }

    #[test]
    fn the_log_wraps_at_the_largest_length() {
        let format = format(1, u32::MAX);
        assert_eq!(format.next(u32::MAX - 1), 1);
        assert_eq!(format.advance(u32::MAX - 1, u32::MAX - 1), u32::MAX - 1);
        assert_eq!(format.distance(u32::MAX - 1, 1), 1);
    }

    #[test]
    fn tag_sizes() {
        for (checksum, wide, bytes) in [
            (Checksum::None, false, 8),
            (Checksum::V1, true, 12),
            (Checksum::V2, false, 10),
            (Checksum::V2, true, 14),
            (Checksum::V3, false, 16),
            (Checksum::V3, true, 16),
        ] {
            assert_eq!(Format { checksum, wide, ..format(1, 1024) }.tag_bytes(), bytes);
        }
    }
}
