//! Control blocks: descriptors, revokes and commits, and what can be known of any block from its first bytes.
//!
//! None of these ever panics on what a block says; what is asked of them is only that the block is `block_size` bytes.

use crate::bytes::be32;
use crate::checksum::crc32c;
use crate::format::{Checksum, Format};

/// The first four bytes of every control block.
pub const MAGIC: u32 = 0xc03b_3998;
/// Bytes of the header that every control block begins with.
pub const HEADER_BYTES: usize = 12;

pub(crate) const FLAG_ESCAPE: u16 = 1;
const FLAG_SAME_UUID: u16 = 2;
const FLAG_DELETED: u16 = 4;
const FLAG_LAST_TAG: u16 = 8;
const UUID_BYTES: usize = 16;
/// Bytes of a revoke block before its records: the header and `r_count`.
pub(crate) const REVOKE_HEADER_BYTES: usize = 16;

/// What a control block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Says where the data blocks that follow it belong.
    Descriptor,
    /// Ends a transaction.
    Commit,
    /// A superblock without features.
    SuperblockV1,
    /// A superblock.
    SuperblockV2,
    /// Says which blocks must not be replayed.
    Revoke,
    /// Something else.
    Unknown(u32),
}

impl Kind {
    /// The number on disk (`h_blocktype`).
    pub fn number(self) -> u32 {
        match self {
            Kind::Descriptor => 1,
            Kind::Commit => 2,
            Kind::SuperblockV1 => 3,
            Kind::SuperblockV2 => 4,
            Kind::Revoke => 5,
            Kind::Unknown(number) => number,
        }
    }

    fn from_number(number: u32) -> Self {
        match number {
            1 => Kind::Descriptor,
            2 => Kind::Commit,
            3 => Kind::SuperblockV1,
            4 => Kind::SuperblockV2,
            5 => Kind::Revoke,
            other => Kind::Unknown(other),
        }
    }
}

/// What a control block says of itself in its first 12 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// The transaction that it belongs to.
    pub sequence: u32,
}

/// The header of a block that begins with the journal's magic number; nothing for any other block, or for fewer than 12
/// bytes. Touches no more than 12 bytes.
pub fn peek(block: &[u8]) -> Option<Header> {
    let head = block.first_chunk::<HEADER_BYTES>()?;
    (be32(head, 0) == MAGIC).then(|| Header { kind: Kind::from_number(be32(head, 4)), sequence: be32(head, 8) })
}

/// Whether a data block must be escaped in the journal: it begins as a control block does.
pub fn is_escaped_content(data: &[u8]) -> bool {
    data.first_chunk::<4>().is_some_and(|head| u32::from_be_bytes(*head) == MAGIC)
}

/// One entry of a descriptor: where the next data block of the log belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The file system block.
    pub block: u64,
    /// The data block's first four bytes were the magic number, and were replaced by zeros in the log.
    pub escaped: bool,
    /// A flag that no version of jbd2 heeds.
    pub deleted: bool,
    /// The data block's checksum: 32 bits of kind 3, 16 of kind 2, meaningless otherwise.
    pub checksum: u32,
}

/// A descriptor block.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor<'a> {
    format: &'a Format,
    block: &'a [u8],
}

impl<'a> Descriptor<'a> {
    /// Takes `block` as a descriptor.
    ///
    /// # Panics
    /// If it is not `format.block_size` bytes.
    pub fn new(format: &'a Format, block: &'a [u8]) -> Self {
        assert_eq!(block.len(), format.block_size as usize);
        Descriptor { format, block }
    }

    /// The whole block.
    pub fn block(&self) -> &'a [u8] {
        self.block
    }

    /// Whether its checksum matches; always, in a journal without checksums of kind 2 or 3.
    pub fn checksum_ok(&self) -> bool {
        tail_checksum_ok(self.format, self.block)
    }

    /// Its tags, in the order of the data blocks that follow it in the log. At most as many as fit into a block.
    pub fn tags(&self) -> Tags<'a> {
        Tags::new(self.format, self.block)
    }
}

/// The tags of one descriptor.
#[derive(Clone, Debug)]
pub struct Tags<'a> {
    format: &'a Format,
    block: &'a [u8],
    offset: usize,
    ended: bool,
}

impl<'a> Tags<'a> {
    pub(crate) fn new(format: &'a Format, block: &'a [u8]) -> Self {
        Tags { format, block, offset: HEADER_BYTES, ended: false }
    }

    /// Byte where the next tag begins, if there is one.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }
}

impl Iterator for Tags<'_> {
    type Item = Tag;

    fn next(&mut self) -> Option<Tag> {
        let end = self.offset + self.format.tag_bytes();
        if self.ended || end > self.block.len() - self.format.tail_bytes() {
            return None;
        }
        let raw = &self.block[self.offset..end];
        // blk32 | csum16 | flags16 | hi32; kind 3: blk32 | flags32 | hi32 | csum32. The flags in use are the same bits.
        let flags = u16::from_be_bytes([raw[6], raw[7]]);
        let high = if self.format.wide { u64::from(be32(raw, 8)) << 32 } else { 0 };
        let checksum = match self.format.checksum {
            Checksum::V3 => be32(raw, 12),
            Checksum::V2 => u32::from(u16::from_be_bytes([raw[4], raw[5]])),
            Checksum::None | Checksum::V1 => 0,
        };
        self.offset = end + if flags & FLAG_SAME_UUID == 0 { UUID_BYTES } else { 0 };
        self.ended = flags & FLAG_LAST_TAG != 0;
        Some(Tag {
            block: high | u64::from(be32(raw, 0)),
            escaped: flags & FLAG_ESCAPE != 0,
            deleted: flags & FLAG_DELETED != 0,
            checksum,
        })
    }
}

/// Whether a data block, as it is in the log (still escaped), has the checksum that its tag says. Always, in a journal
/// without checksums of kind 2 or 3.
pub fn data_checksum_ok(format: &Format, sequence: u32, tag_checksum: u32, data: &[u8]) -> bool {
    match format.checksum {
        Checksum::None | Checksum::V1 => true,
        Checksum::V2 => data_checksum(format, sequence, data) & 0xffff == tag_checksum,
        Checksum::V3 => data_checksum(format, sequence, data) == tag_checksum,
    }
}

/// The checksum that the tag of a data block has, in a journal with checksums of kind 2 or 3 (kind 2 keeps the lower half);
/// 0 in others. `data` is the block as it is in the log.
pub fn tag_checksum(format: &Format, sequence: u32, data: &[u8]) -> u32 {
    if format.has_block_checksums() { data_checksum(format, sequence, data) } else { 0 }
}

pub(crate) fn data_checksum(format: &Format, sequence: u32, data: &[u8]) -> u32 {
    crc32c(crc32c(format.seed, &sequence.to_be_bytes()), data)
}

fn tail_checksum_ok(format: &Format, block: &[u8]) -> bool {
    if !format.has_block_checksums() {
        return true;
    }
    let field = block.len() - 4;
    be32(block, field) == format.control_checksum(block, field)
}

/// A revoke block's count is larger than the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a revoke block claims {bytes} bytes of records, more than a block holds")]
pub struct RevokeCountError {
    /// `r_count`.
    pub bytes: u32,
}

/// A revoke block.
#[derive(Clone, Copy, Debug)]
pub struct Revoke<'a> {
    format: &'a Format,
    block: &'a [u8],
}

impl<'a> Revoke<'a> {
    /// Takes `block` as a revoke block.
    ///
    /// # Panics
    /// If it is not `format.block_size` bytes.
    pub fn new(format: &'a Format, block: &'a [u8]) -> Self {
        assert_eq!(block.len(), format.block_size as usize);
        Revoke { format, block }
    }

    /// The whole block.
    pub fn block(&self) -> &'a [u8] {
        self.block
    }

    /// Whether its checksum matches; always, in a journal without checksums of kind 2 or 3.
    pub fn checksum_ok(&self) -> bool {
        tail_checksum_ok(self.format, self.block)
    }

    /// The blocks that it revokes.
    ///
    /// # Errors
    /// When its count is larger than the block.
    pub fn records(&self) -> Result<Records<'a>, RevokeCountError> {
        let bytes = be32(self.block, HEADER_BYTES);
        let end = bytes as usize;
        if end > self.block.len() - self.format.tail_bytes() {
            return Err(RevokeCountError { bytes });
        }
        // A count smaller than the header means no records.
        let records = self.block.get(REVOKE_HEADER_BYTES..end).unwrap_or_default();
        Ok(Records { chunks: records.chunks_exact(self.format.record_bytes()) })
    }
}

/// The block numbers in one revoke block.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    chunks: std::slice::ChunksExact<'a, u8>,
}

impl Iterator for Records<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let raw = self.chunks.next()?;
        Some(raw.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.chunks.size_hint()
    }
}

impl ExactSizeIterator for Records<'_> {}

/// A commit block.
#[derive(Clone, Copy, Debug)]
pub struct Commit<'a> {
    format: &'a Format,
    block: &'a [u8],
}

pub(crate) mod commit_field {
    pub const CHECKSUM_TYPE: usize = 0x0c;
    pub const CHECKSUM_SIZE: usize = 0x0d;
    pub const CHECKSUM: usize = 0x10;
    pub const SECONDS: usize = 0x30;
    pub const NANOSECONDS: usize = 0x38;
    /// `h_chksum_type` of checksums of kind 1.
    pub const TYPE_CRC32: u8 = 1;
    /// `h_chksum_size` of checksums of kind 1.
    pub const SIZE_CRC32: u8 = 4;
}

impl<'a> Commit<'a> {
    /// Takes `block` as a commit block.
    ///
    /// # Panics
    /// If it is not `format.block_size` bytes.
    pub fn new(format: &'a Format, block: &'a [u8]) -> Self {
        assert_eq!(block.len(), format.block_size as usize);
        Commit { format, block }
    }

    /// The whole block.
    pub fn block(&self) -> &'a [u8] {
        self.block
    }

    /// Whether its own checksum matches; always, in a journal without checksums of kind 2 or 3.
    pub fn checksum_ok(&self) -> bool {
        !self.format.has_block_checksums()
            || be32(self.block, commit_field::CHECKSUM)
                == self.format.control_checksum(self.block, commit_field::CHECKSUM)
    }

    /// Whether the checksum of kind 1 over the transaction is `computed`, or there is none. A journal with that feature
    /// may hold commits without one.
    pub fn transaction_checksum_ok(&self, computed: u32) -> bool {
        let stored = be32(self.block, commit_field::CHECKSUM);
        let kind = (self.block[commit_field::CHECKSUM_TYPE], self.block[commit_field::CHECKSUM_SIZE]);
        match kind {
            (commit_field::TYPE_CRC32, commit_field::SIZE_CRC32) => stored == computed,
            (0, 0) => stored == 0,
            _ => false,
        }
    }

    /// When it was written: seconds since 1970, as stored.
    pub fn seconds(&self) -> u64 {
        let field = commit_field::SECONDS;
        u64::from(be32(self.block, field)) << 32 | u64::from(be32(self.block, field + 4))
    }

    /// When it was written: nanoseconds within the second, as stored.
    pub fn nanoseconds(&self) -> u32 {
        be32(self.block, commit_field::NANOSECONDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{self, SuperblockBuilder, TagSpec};
    use crate::superblock::{Features, Superblock};

    fn formats() -> Vec<Format> {
        let mut formats = Vec::new();
        for checksum in [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3] {
            for wide in [false, true] {
                for block_size in [1024, 4096, 65536] {
                    let incompat = Features::REVOKE | if wide { Features::WIDE } else { 0 };
                    let features = Features { compat: 0, incompat, ro_compat: 0 };
                    let raw = SuperblockBuilder { block_size, features, uuid: [3; 16], ..SuperblockBuilder::default() }
                        .checksum(checksum)
                        .build();
                    formats.push(Superblock::parse(&raw).expect("valid").1);
                }
            }
        }
        formats
    }

    #[test]
    fn a_peek_needs_only_the_header() {
        let mut block = [0u8; 12];
        assert_eq!(peek(&block), None);
        block[..4].copy_from_slice(&MAGIC.to_be_bytes());
        block[7] = 5;
        block[11] = 9;
        assert_eq!(peek(&block), Some(Header { kind: Kind::Revoke, sequence: 9 }));
        assert_eq!(peek(&block[..11]), None);
        block[7] = 77;
        assert_eq!(peek(&block), Some(Header { kind: Kind::Unknown(77), sequence: 9 }));
    }

    #[test]
    fn tags_come_back_in_every_layout() {
        for format in formats() {
            let high = if format.wide { 0x12_3456_0000_0000 } else { 0 };
            let data = vec![0x5a; format.block_size as usize];
            let tags: Vec<TagSpec<'_>> = (0..40)
                .map(|number| TagSpec {
                    block: high | (number * 1000 + 5),
                    data: &data,
                    escaped: number % 3 == 0,
                    with_uuid: number == 0 || number == 17,
                })
                .collect();
            let block = build::descriptor(&format, 77, &tags);
            let descriptor = Descriptor::new(&format, &block);
            assert!(descriptor.checksum_ok());
            let back: Vec<Tag> = descriptor.tags().collect();
            assert_eq!(back.len(), tags.len(), "{format:?}");
            for (tag, spec) in back.iter().zip(&tags) {
                assert_eq!((tag.block, tag.escaped, tag.deleted), (spec.block, spec.escaped, false));
                assert!(data_checksum_ok(&format, 77, tag.checksum, &data));
                let other = data_checksum_ok(&format, 78, tag.checksum, &data);
                assert_eq!(other, !format.has_block_checksums(), "the sequence number is part of the checksum");
            }
            let mut damaged = block.clone();
            damaged[20] ^= 1;
            assert_eq!(Descriptor::new(&format, &damaged).checksum_ok(), !format.has_block_checksums());
        }
    }

    #[test]
    fn a_full_descriptor_has_as_many_tags_as_fit() {
        for format in formats() {
            let block = vec![0u8; format.block_size as usize];
            let per_tag = format.tag_bytes() + 16;
            let room = block.len() - 12 - format.tail_bytes();
            // Without LAST_TAG and SAME_UUID; a tag fits even if the UUID after it does not.
            let expected = room / per_tag + usize::from(room % per_tag >= format.tag_bytes());
            assert_eq!(Descriptor::new(&format, &block).tags().count(), expected);
        }
    }

    #[test]
    fn revokes_come_back() {
        for format in formats() {
            let high = if format.wide { 0xff_0000_0000 } else { 0 };
            let blocks: Vec<u64> = (0..30).map(|number| high | (number * 7)).collect();
            let mut block = build::revoke(&format, 5, &blocks);
            let revoke = Revoke::new(&format, &block);
            assert!(revoke.checksum_ok());
            assert_eq!(revoke.records().expect("a good count").collect::<Vec<_>>(), blocks);
            let limit = format.block_size - format.tail_bytes() as u32;
            block[12..16].copy_from_slice(&limit.to_be_bytes());
            assert!(Revoke::new(&format, &block).records().is_ok());
            block[12..16].copy_from_slice(&(limit + 1).to_be_bytes());
            assert!(Revoke::new(&format, &block).records().is_err());
            block[12..16].copy_from_slice(&3u32.to_be_bytes());
            assert_eq!(Revoke::new(&format, &block).records().expect("none").count(), 0);
        }
    }

    #[test]
    fn commits_come_back() {
        for format in formats() {
            let mut block = build::commit(&format, 5, 0x1_0000_0002, 3, Some(0xabcd));
            let commit = Commit::new(&format, &block);
            assert_eq!((commit.seconds(), commit.nanoseconds()), (0x1_0000_0002, 3));
            assert!(commit.checksum_ok());
            if format.checksum == Checksum::V1 {
                assert!(commit.transaction_checksum_ok(0xabcd));
                assert!(!commit.transaction_checksum_ok(0xabce));
            }
            block[0x31] ^= 1;
            assert_eq!(Commit::new(&format, &block).checksum_ok(), !format.has_block_checksums());
        }
    }

    #[test]
    fn a_commit_without_transaction_checksum_passes() {
        let format = Format { checksum: Checksum::V1, ..formats()[0] };
        let block = build::commit(&format, 5, 1, 0, None);
        assert!(Commit::new(&format, &block).transaction_checksum_ok(123));
    }
}
