//! Block group descriptors.

use crate::bytes::{le16, le32};
use crate::read::ReadAt;
use crate::superblock::{Superblock, compat, incompat, ro_compat};
use std::io;

/// Where a block group's metadata is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Block of the block bitmap.
    pub block_bitmap: u64,
    /// Block of the inode bitmap.
    pub inode_bitmap: u64,
    /// First block of the inode table.
    pub inode_table: u64,
    /// `bg_flags`.
    pub flags: u16,
}

/// Bits of `bg_flags`.
pub mod group_flag {
    /// The block bitmap was never written: only what is at fixed places is in use.
    pub const BLOCK_UNINIT: u16 = 0x2;
}

/// Reads the descriptor of group `index` of the file system that `disk` holds. Nothing when there is no such group, or its
/// metadata is said to be outside the file system. Its checksum is not looked at: that changes with every allocation, and
/// at home may be older than the journal.
///
/// # Errors
/// When the disk cannot be read.
pub fn group<R: ReadAt>(disk: &R, superblock: &Superblock, index: u32) -> io::Result<Option<Group>> {
    if u64::from(index) >= superblock.groups_count() {
        return Ok(None);
    }
    let size = u32::from(superblock.descriptor_size);
    let per_block = superblock.block_size / size;
    let Some(block) = descriptor_block(superblock, index / per_block, per_block) else { return Ok(None) };
    let offset = block * u64::from(superblock.block_size) + u64::from(index % per_block * size);
    let mut raw = vec![0; size as usize];
    disk.read_at(offset, &mut raw)?;
    let group = Group {
        block_bitmap: block_bitmap(superblock, &raw),
        inode_bitmap: block_number(superblock, &raw, 0x04, 0x24),
        inode_table: block_number(superblock, &raw, 0x08, 0x28),
        flags: le16(&raw, 0x12),
    };
    let is_inside = |block: u64| (u64::from(superblock.first_data_block)..superblock.blocks_count).contains(&block);
    let all_inside = [group.block_bitmap, group.inode_bitmap, group.inode_table].into_iter().all(is_inside);
    Ok(all_inside.then_some(group))
}

/// Where the block bitmap is, as a raw descriptor says.
pub(crate) fn block_bitmap(superblock: &Superblock, raw: &[u8]) -> u64 {
    block_number(superblock, raw, 0x00, 0x20)
}

fn block_number(superblock: &Superblock, raw: &[u8], low: usize, high: usize) -> u64 {
    let has_high = superblock.incompat & incompat::WIDE != 0 && superblock.descriptor_size >= 64;
    let high = if has_high { u64::from(le32(raw, high)) << 32 } else { 0 };
    high | u64::from(le32(raw, low))
}

/// The block that holds the `number`-th block's worth of descriptors (`descriptor_loc` of ext4).
pub(crate) fn descriptor_block(superblock: &Superblock, number: u32, per_block: u32) -> Option<u64> {
    let superblock_block = u64::from(superblock.block_size == 1024);
    let block = if superblock.incompat & incompat::META_GROUPS == 0 || number < superblock.first_meta_group {
        superblock_block + 1 + u64::from(number)
    } else {
        let group = u64::from(number) * u64::from(per_block);
        let first = u64::from(superblock.first_data_block) + group * u64::from(superblock.blocks_per_group);
        let mut before = u64::from(has_superblock(superblock, group));
        if superblock.block_size == 1024 && number == 0 && superblock.first_data_block == 0 {
            before += 1;
        }
        first + before
    };
    (block < superblock.blocks_count).then_some(block)
}

fn has_superblock(superblock: &Superblock, group: u64) -> bool {
    if group == 0 {
        return true;
    }
    if superblock.compat & compat::SPARSE_SUPER2 != 0 {
        return superblock.backup_groups.iter().any(|backup| u64::from(*backup) == group);
    }
    if group == 1 || superblock.ro_compat & ro_compat::SPARSE_SUPER == 0 {
        return true;
    }
    let is_power_of = |base: u64| {
        let mut power = base;
        while power < group {
            power *= base;
        }
        power == group
    };
    is_power_of(3) || is_power_of(5) || is_power_of(7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_backups() {
        let mut raw = vec![0; 1024];
        raw[0x38] = 0x53;
        raw[0x39] = 0xef;
        raw[4] = 1;
        raw[0x64] = 1;
        let superblock = Superblock::parse(&raw).expect("a superblock");
        let with: Vec<u64> = (0..130).filter(|group| has_superblock(&superblock, *group)).collect();
        assert_eq!(with, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125]);
    }
}
