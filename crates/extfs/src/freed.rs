//! Which blocks a transaction frees, as its block bitmaps tell: bits that were set before it and are not after it.
//!
//! Wrong on one side only: a block that was freed is always among those told; more may be. Where something is not understood, it
//! is said that nothing can be told.

use crate::group::{descriptor_block, group};
use crate::read::ReadAt;
use crate::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock};
use std::collections::HashMap;
use std::io;
use std::ops::Range;

/// In a file system with more groups, nothing is told.
const GROUPS_MAX: u64 = 1 << 16;
/// With more of them, all of a group is told.
const RANGES_OF_GROUP_MAX: usize = 1024;

/// Where a file system's bitmaps are.
#[derive(Debug, Default)]
pub struct FreedBlocks {
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    superblock: Superblock,
    /// The group of each bitmap.
    bitmaps: HashMap<u64, u32>,
    /// The first of the groups that a block has descriptors of.
    descriptors: HashMap<u64, u32>,
}

impl FreedBlocks {
    /// Whether the content of a block can matter to [`FreedBlocks::of`] or to [`crate::Allocation`]; nothing where nothing can be told.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub fn is_watched<R: ReadAt>(&mut self, disk: &R, block: u64) -> io::Result<Option<bool>> {
        if self.known.is_none() {
            self.known = Known::read(disk)?;
        }
        Ok(self.known.as_ref().map(|known| {
            let superblock = SUPERBLOCK_OFFSET / u64::from(known.superblock.block_size);
            block == superblock || known.bitmaps.contains_key(&block) || known.descriptors.contains_key(&block)
        }))
    }

    /// Whether it is known where bitmaps are. After a transaction that moved some it is not, until the next question.
    pub fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// The blocks that a transaction with these home blocks and contents frees in the file system that `disk` shows as of before it;
    /// nothing where that cannot be told. To be called for every transaction, in order.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub fn of<R: ReadAt>(&mut self, disk: &R, blocks: &[(u64, &[u8])]) -> io::Result<Option<Vec<Range<u64>>>> {
        if self.known.is_none() {
            self.known = Known::read(disk)?;
        }
        let Some(known) = &self.known else { return Ok(None) };
        let mut freed = Vec::new();
        let mut is_stale = false;
        for (block, content) in blocks {
            is_stale |= known.is_moved_by(*block, content);
            let Some(group) = known.bitmaps.get(block) else { continue };
            let mut before = vec![0; known.superblock.block_size as usize];
            disk.read_at(block * u64::from(known.superblock.block_size), &mut before)?;
            known.cleared(*group, &before, content, &mut freed);
        }
        if is_stale {
            self.known = None;
        }
        Ok(Some(freed))
    }
}

impl Known {
    fn read<R: ReadAt>(disk: &R) -> io::Result<Option<Self>> {
        let mut raw = [0; SUPERBLOCK_BYTES];
        disk.read_at(SUPERBLOCK_OFFSET, &mut raw)?;
        let Some(superblock) = Superblock::parse(&raw).ok().filter(|superblock| superblock.check().is_ok()) else {
            return Ok(None);
        };
        if superblock.is_journal_device() || superblock.groups_count() > GROUPS_MAX {
            return Ok(None);
        }
        let per_block = superblock.block_size / u32::from(superblock.descriptor_size);
        let (mut bitmaps, mut descriptors) = (HashMap::new(), HashMap::new());
        for index in 0..superblock.groups_count() as u32 {
            // A group without a place for its bitmap: a damaged file system.
            let Some(found) = group(disk, &superblock, index)? else { return Ok(None) };
            bitmaps.insert(found.block_bitmap, index);
            if index % per_block == 0 {
                let Some(block) = descriptor_block(&superblock, index / per_block, per_block) else { return Ok(None) };
                descriptors.insert(block, index);
            }
        }
        Ok(Some(Known { superblock, bitmaps, descriptors }))
    }

    /// Whether bitmaps may be elsewhere when `block` has this content.
    fn is_moved_by(&self, block: u64, content: &[u8]) -> bool {
        let superblock = &self.superblock;
        let size = u64::from(superblock.block_size);
        if block == SUPERBLOCK_OFFSET / size {
            let at = (SUPERBLOCK_OFFSET % size) as usize;
            let shape = |superblock: &Superblock| {
                (superblock.blocks_count, superblock.blocks_per_group, superblock.incompat, superblock.ro_compat)
            };
            let new = content.get(at..).and_then(|raw| Superblock::parse(raw).ok());
            return new.is_none_or(|new| shape(&new) != shape(superblock));
        }
        let Some(first) = self.descriptors.get(&block) else { return false };
        let bytes = usize::from(superblock.descriptor_size);
        let groups = content.chunks_exact(bytes).zip(*first..superblock.groups_count() as u32);
        groups.into_iter().any(|(raw, index)| {
            let bitmap = crate::group::block_bitmap(superblock, raw);
            self.bitmaps.get(&bitmap) != Some(&index)
        })
    }

    fn cleared(&self, group: u32, before: &[u8], after: &[u8], freed: &mut Vec<Range<u64>>) {
        let superblock = &self.superblock;
        let first = u64::from(superblock.first_data_block) + u64::from(group) * u64::from(superblock.blocks_per_group);
        let cluster = u64::from(superblock.cluster_blocks);
        let end = superblock.blocks_count.min(first + u64::from(superblock.blocks_per_group));
        let before_it = freed.len();
        for (index, (old, new)) in before.iter().zip(after).enumerate() {
            let cleared = old & !new;
            if cleared == 0 {
                continue;
            }
            for bit in (0..8).filter(|bit| cleared & 1 << bit != 0) {
                let start = first + (index as u64 * 8 + bit) * cluster;
                let range = start..(start + cluster).min(end);
                match freed.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ if range.start < end => freed.push(range),
                    _ => {}
                }
            }
            if freed.len() - before_it > RANGES_OF_GROUP_MAX {
                freed.truncate(before_it);
                freed.push(first..end);
                return;
            }
        }
    }
}
