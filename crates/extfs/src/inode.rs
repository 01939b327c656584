//! The journal's inode.

use crate::bytes::{crc32c, le16, le32};
use crate::extents;
use crate::group::group;
use crate::indirect;
use crate::journal::{Journal, refuse_overlaps};
use crate::map::{Failure, MapRoot};
use crate::read::ReadAt;
use crate::superblock::Superblock;
use std::io;

const FLAG_EXTENTS: u32 = 0x80000;
const FLAG_ENCRYPTED: u32 = 0x800;
const FLAG_INLINE_DATA: u32 = 0x1000_0000;
const MODE_KIND: u16 = 0xf000;
const MODE_REGULAR: u16 = 0x8000;
/// Both the kernel and e2fsck refuse smaller journals (`JBD2_MIN_JOURNAL_BLOCKS`).
const JOURNAL_BLOCKS_MIN: u64 = 1024;

/// Finds the blocks of an internal journal.
pub(crate) fn internal_journal<R: ReadAt>(disk: &R, superblock: &Superblock) -> io::Result<Journal> {
    match read_map(disk, superblock) {
        Ok(journal) => Ok(journal),
        Err(Failure::NotUnderstood(reason)) => Ok(Journal::NotUnderstood { reason, behind: None }),
        Err(Failure::Read(error)) => Err(error),
    }
}

fn read_map<R: ReadAt>(disk: &R, superblock: &Superblock) -> Result<Journal, Failure> {
    let number = superblock.journal_inode;
    let raw = read_inode(disk, superblock, number)?;
    check_checksum(&raw, superblock, number)?;
    let flags = le32(&raw, 0x20);
    if le16(&raw, 0x1a) == 0 || le16(&raw, 0) & MODE_KIND != MODE_REGULAR {
        return Err(format!("inode {number}, the journal's, is not a regular file in use").into());
    }
    if flags & (FLAG_ENCRYPTED | FLAG_INLINE_DATA) != 0 {
        return Err(format!("inode {number}, the journal's, is encrypted or inline").into());
    }
    let size = u64::from(le32(&raw, 0x6c)) << 32 | u64::from(le32(&raw, 4));
    let blocks = size / u64::from(superblock.block_size);
    if blocks < JOURNAL_BLOCKS_MIN {
        return Err(
            format!("the journal has {blocks} blocks, fewer than the least possible {JOURNAL_BLOCKS_MIN}").into()
        );
    }
    let too_large = || format!("the journal has {blocks} blocks, more than its file system or than can be");
    let blocks = u32::try_from(blocks).ok().filter(|blocks| u64::from(*blocks) < superblock.blocks_count);
    let blocks = blocks.ok_or_else(too_large)?;
    let seed = crc32c(superblock.checksum_seed, &number.to_le_bytes());
    let checksum_seed = crc32c(seed, &raw[0x64..0x68]);
    let root = MapRoot { root: std::array::from_fn(|index| raw[0x28 + index]), checksum_seed, blocks };
    let (runs, mut map_blocks) = if flags & FLAG_EXTENTS != 0 {
        extents::read(disk, superblock, &root)?
    } else {
        indirect::read(disk, superblock, &root)?
    };
    if !runs.is_complete() {
        return Err(format!("the journal's map ends at log block {} of {blocks}", runs.next()).into());
    }
    refuse_overlaps(&runs.extents, &map_blocks)?;
    map_blocks.sort_unstable();
    Ok(Journal::Internal { inode: number, blocks, extents: runs.extents, map_blocks })
}

fn read_inode<R: ReadAt>(disk: &R, superblock: &Superblock, number: u32) -> Result<Vec<u8>, Failure> {
    if number == 0 || number > superblock.inodes_count {
        return Err(format!("the journal's inode {number} is none of the {} inodes", superblock.inodes_count).into());
    }
    let index = number - 1;
    let group_number = index / superblock.inodes_per_group;
    let Some(group) = group(disk, superblock, group_number)? else {
        return Err(format!("block group {group_number}, which holds the journal's inode, is damaged").into());
    };
    let size = u64::from(superblock.inode_size);
    let offset =
        group.inode_table * u64::from(superblock.block_size) + u64::from(index % superblock.inodes_per_group) * size;
    if offset + size > superblock.bytes() {
        return Err(format!("the inode table of block group {group_number} is outside the file system").into());
    }
    let mut raw = vec![0; size as usize];
    disk.read_at(offset, &mut raw)?;
    Ok(raw)
}

fn check_checksum(raw: &[u8], superblock: &Superblock, number: u32) -> Result<(), Failure> {
    if !superblock.has_metadata_checksums() {
        return Ok(());
    }
    const LOW: usize = 0x7c;
    const HIGH: usize = 0x82;
    let has_high = raw.len() > 128 && le16(raw, 0x80) >= 4;
    let mut stored = u32::from(le16(raw, LOW));
    let mut copy = raw.to_vec();
    copy[LOW..LOW + 2].fill(0);
    if has_high {
        stored |= u32::from(le16(raw, HIGH)) << 16;
        copy[HIGH..HIGH + 2].fill(0);
    }
    let seed = crc32c(superblock.checksum_seed, &number.to_le_bytes());
    let mut computed = crc32c(crc32c(seed, &raw[0x64..0x68]), &copy);
    if !has_high {
        computed &= 0xffff;
    }
    if stored != computed {
        return Err(format!(
            "inode {number}, the journal's, has checksum {stored:#010x} but should have {computed:#010x}"
        )
        .into());
    }
    Ok(())
}
