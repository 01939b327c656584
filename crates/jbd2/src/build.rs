//! Journals made from nothing: for tests here and elsewhere, for benchmarks, and for whoever needs a journal superblock.
//!
//! Blocks are laid out as jbd2 lays them out. Nothing here reads or writes anything but memory.

use crate::bytes::put_be32;
use crate::checksum::crc32_be;
use crate::control::{HEADER_BYTES, Kind, MAGIC, REVOKE_HEADER_BYTES, commit_field, is_escaped_content, tag_checksum};
use crate::format::{Checksum, Format};
use crate::superblock::{CHECKSUM_TYPE_CRC32C, Features, SUPERBLOCK_BYTES, SuperblockEdit, field};

/// A journal superblock to be made. Field by field as in [`crate::Superblock`].
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "documented in Superblock")]
pub struct SuperblockBuilder {
    pub version: u8,
    pub block_size: u32,
    pub maxlen: u32,
    pub first: u32,
    pub sequence: u32,
    pub start: u32,
    pub errno: i32,
    pub features: Features,
    pub uuid: [u8; 16],
    pub nr_users: u32,
    pub users: Vec<[u8; 16]>,
    pub num_fc_blocks: u32,
    pub head: u32,
}

impl Default for SuperblockBuilder {
    /// An empty version 2 journal of 1024 blocks of 4096 bytes with 32-bit block numbers and no checksums.
    fn default() -> Self {
        SuperblockBuilder {
            version: 2,
            block_size: 4096,
            maxlen: 1024,
            first: 1,
            sequence: 1,
            start: 0,
            errno: 0,
            features: Features::default(),
            uuid: [0; 16],
            nr_users: 1,
            users: Vec::new(),
            num_fc_blocks: 0,
            head: 0,
        }
    }
}

impl SuperblockBuilder {
    /// Sets the feature bits that belong to a kind of checksum.
    #[must_use]
    pub fn checksum(mut self, checksum: Checksum) -> Self {
        self.features.compat &= !Features::COMPAT_CHECKSUM;
        self.features.incompat &= !(Features::CSUM_V2 | Features::CSUM_V3);
        match checksum {
            Checksum::None => {}
            Checksum::V1 => self.features.compat |= Features::COMPAT_CHECKSUM,
            Checksum::V2 => self.features.incompat |= Features::CSUM_V2,
            Checksum::V3 => self.features.incompat |= Features::CSUM_V3,
        }
        self
    }

    /// The superblock, as one block of the journal (at least 1024 bytes), its checksum set.
    pub fn build(&self) -> Vec<u8> {
        let mut raw = vec![0; (self.block_size as usize).max(SUPERBLOCK_BYTES)];
        let kind = if self.version == 1 { Kind::SuperblockV1 } else { Kind::SuperblockV2 };
        put_header(&mut raw, kind, 0);
        put_be32(&mut raw, field::BLOCK_SIZE, self.block_size);
        put_be32(&mut raw, field::MAXLEN, self.maxlen);
        put_be32(&mut raw, field::FIRST, self.first);
        put_be32(&mut raw, field::SEQUENCE, self.sequence);
        put_be32(&mut raw, field::START, self.start);
        put_be32(&mut raw, field::ERRNO, self.errno as u32);
        if self.version != 1 {
            put_be32(&mut raw, field::COMPAT, self.features.compat);
            put_be32(&mut raw, field::INCOMPAT, self.features.incompat);
            put_be32(&mut raw, field::RO_COMPAT, self.features.ro_compat);
            raw[field::UUID..field::UUID + 16].copy_from_slice(&self.uuid);
            put_be32(&mut raw, field::NR_USERS, self.nr_users);
            put_be32(&mut raw, field::NUM_FC_BLOCKS, self.num_fc_blocks);
            put_be32(&mut raw, field::HEAD, self.head);
            if self.features.has(Features::CSUM_V2 | Features::CSUM_V3) {
                raw[field::CHECKSUM_TYPE] = CHECKSUM_TYPE_CRC32C;
            }
            let users = raw[field::USERS..SUPERBLOCK_BYTES].chunks_exact_mut(16);
            for (place, user) in users.zip(&self.users) {
                place.copy_from_slice(user);
            }
        }
        SuperblockEdit::new(&mut raw).expect("a superblock was just made").seal();
        raw
    }
}

fn put_header(block: &mut [u8], kind: Kind, sequence: u32) {
    put_be32(block, 0, MAGIC);
    put_be32(block, 4, kind.number());
    put_be32(block, 8, sequence);
}

fn seal_tail(format: &Format, block: &mut [u8]) {
    if format.has_block_checksums() {
        let tail = block.len() - 4;
        let checksum = format.control_checksum(block, tail);
        put_be32(block, tail, checksum);
    }
}

/// A data block to be named in a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct TagSpec<'a> {
    /// The file system block.
    pub block: u64,
    /// The data block as it goes into the log, escaped if it has to be.
    pub data: &'a [u8],
    /// Whether it was escaped.
    pub escaped: bool,
    /// Whether a UUID follows the tag: jbd2 puts one after the first tag of each descriptor.
    pub with_uuid: bool,
}

/// How many tags fit into one descriptor, the first with a UUID.
pub fn tags_per_descriptor(format: &Format) -> usize {
    let room = format.block_size as usize - HEADER_BYTES - format.tail_bytes() - 16;
    room / format.tag_bytes()
}

/// How many records fit into one revoke block.
pub fn records_per_revoke(format: &Format) -> usize {
    (format.block_size as usize - REVOKE_HEADER_BYTES - format.tail_bytes()) / format.record_bytes()
}

/// A data block to be named in a descriptor, of which only the checksum is at hand.
#[derive(Clone, Copy, Debug)]
pub struct TagChecksum {
    /// The file system block.
    pub block: u64,
    /// The data block's checksum ([`crate::tag_checksum`]).
    pub checksum: u32,
    /// Whether it was escaped.
    pub escaped: bool,
    /// Whether a UUID follows the tag.
    pub with_uuid: bool,
}

/// A descriptor block.
///
/// # Panics
/// If the tags do not fit.
pub fn descriptor(format: &Format, sequence: u32, tags: &[TagSpec<'_>]) -> Vec<u8> {
    let tags: Vec<TagChecksum> = tags
        .iter()
        .map(|tag| TagChecksum {
            block: tag.block,
            checksum: tag_checksum(format, sequence, tag.data),
            escaped: tag.escaped,
            with_uuid: tag.with_uuid,
        })
        .collect();
    descriptor_of(format, sequence, &tags)
}

/// The same of tags whose checksums are known.
///
/// # Panics
/// If the tags do not fit.
pub fn descriptor_of(format: &Format, sequence: u32, tags: &[TagChecksum]) -> Vec<u8> {
    let mut block = vec![0; format.block_size as usize];
    put_header(&mut block, Kind::Descriptor, sequence);
    let end = block.len() - format.tail_bytes();
    let mut offset = HEADER_BYTES;
    for (index, tag) in tags.iter().enumerate() {
        let raw = &mut block[offset..end][..format.tag_bytes()];
        let mut flags = 0u16;
        flags |= u16::from(tag.escaped);
        flags |= if tag.with_uuid { 0 } else { 2 };
        flags |= if index + 1 == tags.len() { 8 } else { 0 };
        put_be32(raw, 0, tag.block as u32);
        raw[6..8].copy_from_slice(&flags.to_be_bytes());
        if format.wide {
            put_be32(raw, 8, (tag.block >> 32) as u32);
        }
        match format.checksum {
            Checksum::None | Checksum::V1 => {}
            Checksum::V2 => raw[4..6].copy_from_slice(&(tag.checksum as u16).to_be_bytes()),
            Checksum::V3 => put_be32(raw, 12, tag.checksum),
        }
        offset += format.tag_bytes() + if tag.with_uuid { 16 } else { 0 };
    }
    seal_tail(format, &mut block);
    block
}

/// A revoke block.
///
/// # Panics
/// If the records do not fit.
pub fn revoke(format: &Format, sequence: u32, blocks: &[u64]) -> Vec<u8> {
    let mut block = vec![0; format.block_size as usize];
    put_header(&mut block, Kind::Revoke, sequence);
    let mut offset = REVOKE_HEADER_BYTES;
    for number in blocks {
        if format.wide {
            block[offset..offset + 8].copy_from_slice(&number.to_be_bytes());
        } else {
            put_be32(&mut block, offset, *number as u32);
        }
        offset += format.record_bytes();
    }
    assert!(offset <= block.len() - format.tail_bytes(), "{} records do not fit into a revoke block", blocks.len());
    put_be32(&mut block, HEADER_BYTES, offset as u32);
    seal_tail(format, &mut block);
    block
}

/// A commit block, written at `seconds` and `nanoseconds`. `transaction_checksum` is what a journal with checksums of
/// kind 1 says of the whole transaction; other journals ignore it.
pub fn commit(
    format: &Format,
    sequence: u32,
    seconds: u64,
    nanoseconds: u32,
    transaction_checksum: Option<u32>,
) -> Vec<u8> {
    let mut block = vec![0; format.block_size as usize];
    put_header(&mut block, Kind::Commit, sequence);
    block[commit_field::SECONDS..commit_field::SECONDS + 8].copy_from_slice(&seconds.to_be_bytes());
    put_be32(&mut block, commit_field::NANOSECONDS, nanoseconds);
    if let (Checksum::V1, Some(checksum)) = (format.checksum, transaction_checksum) {
        block[commit_field::CHECKSUM_TYPE] = commit_field::TYPE_CRC32;
        block[commit_field::CHECKSUM_SIZE] = commit_field::SIZE_CRC32;
        put_be32(&mut block, commit_field::CHECKSUM, checksum);
    }
    if format.has_block_checksums() {
        let checksum = format.control_checksum(&block, commit_field::CHECKSUM);
        put_be32(&mut block, commit_field::CHECKSUM, checksum);
    }
    block
}

/// One transaction to be written.
#[derive(Clone, Debug, Default)]
pub struct Transaction {
    /// File system blocks and what they shall hold, unescaped.
    pub blocks: Vec<(u64, Vec<u8>)>,
    /// File system blocks that are revoked.
    pub revokes: Vec<u64>,
    /// Commit time, seconds since 1970.
    pub seconds: u64,
}

/// Writes transactions into a log, as jbd2 does: revokes first, then descriptors with their data blocks, then the commit.
#[derive(Clone, Debug)]
pub struct LogBuilder {
    /// Layout of the journal.
    pub format: Format,
    /// Log block that is written next.
    pub position: u32,
    /// Sequence number of the transaction that is written next.
    pub sequence: u32,
    /// Leave the checksum of kind 1 out of commit blocks.
    pub omit_transaction_checksum: bool,
    /// At most this many tags in a descriptor, to get many small ones. 0: as many as fit.
    pub tags_max: usize,
}

impl LogBuilder {
    /// Begins at log block `position` with transaction `sequence`.
    pub fn new(format: Format, position: u32, sequence: u32) -> Self {
        LogBuilder { format, position, sequence, omit_transaction_checksum: false, tags_max: 0 }
    }

    fn tags_per_descriptor(&self) -> usize {
        let fit = tags_per_descriptor(&self.format);
        if self.tags_max == 0 { fit } else { fit.min(self.tags_max) }
    }

    /// How many log blocks a transaction takes, its commit included.
    pub fn blocks_needed(&self, transaction: &Transaction) -> usize {
        transaction.revokes.len().div_ceil(records_per_revoke(&self.format))
            + transaction.blocks.len().div_ceil(self.tags_per_descriptor())
            + transaction.blocks.len()
            + 1
    }

    /// Writes one transaction through `sink`, which gets each log block and its content, in order.
    pub fn transaction(&mut self, transaction: &Transaction, sink: &mut dyn FnMut(u32, &[u8])) {
        let sum = self.body(transaction, sink);
        let checksum = (!self.omit_transaction_checksum).then_some(sum);
        let block = commit(&self.format, self.sequence, transaction.seconds, 0, checksum);
        self.put(&block, sink);
        self.sequence = self.sequence.wrapping_add(1);
    }

    /// Writes one transaction but its commit block: what a crash leaves. Returns the checksum of kind 1.
    pub fn body(&mut self, transaction: &Transaction, sink: &mut dyn FnMut(u32, &[u8])) -> u32 {
        for records in transaction.revokes.chunks(records_per_revoke(&self.format)) {
            let block = revoke(&self.format, self.sequence, records);
            self.put(&block, sink);
        }
        let mut sum = !0;
        for blocks in transaction.blocks.chunks(self.tags_per_descriptor()) {
            let in_log: Vec<(bool, Vec<u8>)> = blocks.iter().map(|(_, data)| escape(data)).collect();
            let tags: Vec<TagSpec<'_>> = blocks
                .iter()
                .zip(&in_log)
                .enumerate()
                .map(|(index, ((block, _), (escaped, data)))| TagSpec {
                    block: *block,
                    data,
                    escaped: *escaped,
                    with_uuid: index == 0,
                })
                .collect();
            let block = descriptor(&self.format, self.sequence, &tags);
            sum = crc32_be(sum, &block);
            self.put(&block, sink);
            for (_, data) in &in_log {
                sum = crc32_be(sum, data);
                self.put(data, sink);
            }
        }
        sum
    }

    fn put(&mut self, block: &[u8], sink: &mut dyn FnMut(u32, &[u8])) {
        sink(self.position, block);
        self.position = self.format.next(self.position);
    }
}

/// A data block as it goes into the log, and whether it had to be escaped.
pub fn escape(data: &[u8]) -> (bool, Vec<u8>) {
    let mut data = data.to_vec();
    let escaped = is_escaped_content(&data);
    if escaped {
        data[..4].fill(0);
    }
    (escaped, data)
}
