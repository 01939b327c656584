//! What a disk carries, as far as routing needs it: where logs lie, which parts are homes of which log, and which writes
//! may change that.

use block_route::LogIndex;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A run of log blocks that lie together on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogRun {
    /// Where it begins on the disk, in bytes.
    pub offset: u64,
    /// Log block of its first block.
    pub first_position: u32,
    /// Number of blocks.
    pub count: u32,
}

/// A part of a disk where log blocks lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRange {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// Whose log.
    pub log: LogIndex,
    /// Log block at `start`.
    pub first_position: u32,
    /// Bytes in a block.
    pub block_bytes: u32,
}

/// A part of a disk that is the home of a log: a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeRange {
    /// First byte: block 0 of the file system.
    pub start: u64,
    /// One past the last byte of its last block.
    pub end: u64,
    /// Whose home.
    pub log: LogIndex,
    /// Bytes in a block.
    pub block_bytes: u32,
}

/// A part of a disk where a write may change the layout, with what was there at the last scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    /// First byte.
    pub start: u64,
    /// What decides the layout, in the order of [`Watch::fields`].
    pub content: Vec<u8>,
    /// Parts of it that do not matter are left out: offset from `start` and length, in bytes.
    pub fields: &'static [(usize, usize)],
    /// Length of the watched part in bytes.
    pub len: usize,
}

/// Fields of an ext superblock (offset from byte 1024 of the file system) that say what the file system and its journal
/// are: sizes (0x00..0x0C without the free counts, 0x14..0x2C), magic, revision, features, UUID, journal UUID, inode,
/// device and the copy of the journal inode's map, 64-bit size. (kernel doc ext4/super)
pub const SUPERBLOCK_FIELDS: &[(usize, usize)] = &[
    (0x00, 8),
    (0x14, 0x18),
    (0x38, 2),
    (0x4C, 4),
    (0x54, 6),
    (0x5C, 0x1C),
    (0xCE, 2),
    (0xD0, 0x18),
    (0xFC, 0x0C),
    (0x10C, 0x48),
    (0x154, 4),
];

/// The boot signature and the GPT header, as far as they say whether there is a partition table and which.
pub const PARTITION_FIELDS: &[(usize, usize)] = &[(446, 66), (512, 92)];

/// The entries of a table in a chain of logical partitions, and its signature.
pub const TABLE_FIELDS: &[(usize, usize)] = &[(446, 66)];

/// The GPT header of a disk with sectors of 4096 bytes, by itself.
pub const GPT_FIELDS: &[(usize, usize)] = &[(0, 92)];

impl Watch {
    /// Watches `content.len()` bytes from `start`.
    pub fn new(start: u64, content: &[u8], fields: &'static [(usize, usize)]) -> Self {
        Watch { start, content: Self::pick(content, fields), fields, len: content.len() }
    }

    fn pick(content: &[u8], fields: &[(usize, usize)]) -> Vec<u8> {
        let mut picked = Vec::new();
        for (offset, len) in fields {
            if let Some(field) = content.get(*offset..offset + len) {
                picked.extend_from_slice(field);
            }
        }
        picked
    }

    /// The watched bytes.
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + self.len as u64
    }

    /// Whether `content`, all of the watched part, says something else than at the last scan.
    pub fn is_changed_by(&self, content: &[u8]) -> bool {
        Self::pick(content, self.fields) != self.content
    }
}

/// What routing needs to know of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskLayout {
    /// Sorted by `start`, not overlapping.
    pub logs: Vec<LogRange>,
    /// Sorted by `start`, not overlapping.
    pub homes: Vec<HomeRange>,
    /// Where a write asks for a new scan.
    pub watches: Vec<Watch>,
}

/// One piece of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Log blocks.
    Log(LogRange, u64, u64),
    /// A part of a file system with a log.
    Home(HomeRange, u64, u64),
    /// Anything else.
    Plain(u64, u64),
}

impl Piece {
    /// First byte and one past the last.
    pub fn range(&self) -> Range<u64> {
        match self {
            Piece::Log(_, start, end) | Piece::Home(_, start, end) | Piece::Plain(start, end) => *start..*end,
        }
    }
}

impl DiskLayout {
    /// Cuts a range of the disk into pieces, in order.
    pub fn cut(&self, start: u64, end: u64, pieces: &mut Vec<Piece>) {
        let mut at = start;
        while at < end {
            let log_index = self.logs.partition_point(|range| range.end <= at);
            let mut stop = end;
            if let Some(range) = self.logs.get(log_index) {
                if range.start <= at {
                    let stop = end.min(range.end);
                    pieces.push(Piece::Log(*range, at, stop));
                    at = stop;
                    continue;
                }
                stop = stop.min(range.start);
            }
            let home_index = self.homes.partition_point(|range| range.end <= at);
            match self.homes.get(home_index) {
                Some(range) if range.start <= at => {
                    stop = stop.min(range.end);
                    pieces.push(Piece::Home(*range, at, stop));
                }
                Some(range) => {
                    stop = stop.min(range.start);
                    pieces.push(Piece::Plain(at, stop));
                }
                None => pieces.push(Piece::Plain(at, stop)),
            }
            at = stop;
        }
    }

    /// Bytes of a disk of `size_bytes` that are neither log nor home.
    pub fn plain_bytes(&self, size_bytes: u64) -> u64 {
        let mut pieces = Vec::new();
        self.cut(0, size_bytes, &mut pieces);
        let plain = |piece: &Piece| matches!(piece, Piece::Plain(..)).then(|| piece.range().end - piece.range().start);
        pieces.iter().filter_map(plain).sum()
    }

    /// Whether nothing on the disk concerns us but, perhaps, what it may become.
    pub fn is_plain(&self) -> bool {
        self.logs.is_empty() && self.homes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> DiskLayout {
        let log = LogIndex(0);
        DiskLayout {
            logs: vec![
                LogRange { start: 8192, end: 16384, log, first_position: 0, block_bytes: 4096 },
                LogRange { start: 20480, end: 24576, log, first_position: 2, block_bytes: 4096 },
            ],
            homes: vec![HomeRange { start: 4096, end: 40960, log, block_bytes: 4096 }],
            watches: Vec::new(),
        }
    }

    #[test]
    fn pieces_cover_the_range_in_order() {
        let mut pieces = Vec::new();
        layout().cut(0, 65536, &mut pieces);
        let mut at = 0;
        for piece in &pieces {
            assert_eq!(piece.range().start, at);
            at = piece.range().end;
        }
        assert_eq!(at, 65536);
        let kinds: String = pieces
            .iter()
            .map(|piece| match piece {
                Piece::Log(..) => 'L',
                Piece::Home(..) => 'H',
                Piece::Plain(..) => 'P',
            })
            .collect();
        assert_eq!(kinds, "PHLHLHP");
        assert_eq!(layout().plain_bytes(65536), 4096 + 65536 - 40960);
    }

    #[test]
    fn a_piece_may_begin_inside_a_log_range() {
        let mut pieces = Vec::new();
        layout().cut(12288, 20480, &mut pieces);
        assert_eq!(pieces.len(), 2);
        assert!(matches!(pieces[0], Piece::Log(range, 12288, 16384) if range.first_position == 0));
        assert!(matches!(pieces[1], Piece::Home(_, 16384, 20480)));
    }

    #[test]
    fn only_what_matters_is_watched() {
        let mut superblock = vec![0u8; 1024];
        let watch = Watch::new(1024, &superblock, SUPERBLOCK_FIELDS);
        superblock[0x0C] = 1; // free blocks
        superblock[0x34] = 1; // mount count
        assert!(!watch.is_changed_by(&superblock));
        superblock[0x60] = 4; // needs_recovery
        assert!(watch.is_changed_by(&superblock));
    }
}
