//! Which blocks of a file system are free, as its block bitmaps say.
//!
//! Whoever asks shows a file system as of its last committed transaction, and says when a block of it has changed. The
//! answer is only ever wrong on one side: a block that is in use is never called free, and where something is not
//! understood nothing is.
//!
//! A group whose bitmap was never written (`BLOCK_UNINIT`) has nothing in it but what is at fixed places: bitmaps and
//! inode tables of any group, and, taken generously, a superblock and the group descriptors with all their reserve at the
//! group's beginning. With `bigalloc` a bit is a cluster, and a cluster that is in use is in use as a whole.

use crate::group::{Group, group, group_flag};
use crate::read::ReadAt;
use crate::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock, incompat};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;

/// Bitmaps that are remembered; beyond, all are forgotten.
const BITMAPS_MAX: usize = 1024;
/// In a file system with more groups, nothing in a group without a bitmap is called free.
const GROUPS_MAX: u64 = 1 << 16;

/// What was read of a file system's bitmaps.
///
/// # Examples
/// A file system of 64 blocks of 1 KiB, made by hand, of which blocks 1 to 6 are in use:
/// ```
/// use extfs::Allocation;
///
/// let mut disk = vec![0; 64 * 1024];
/// let mut put = |at: usize, number: u32| disk[at..at + 4].copy_from_slice(&number.to_le_bytes());
/// let (superblock, descriptor) = (1024, 2048);
/// put(superblock + 0x04, 64); // blocks
/// put(superblock + 0x14, 1); // the first of them
/// put(superblock + 0x20, 8192); // blocks in a group
/// put(superblock + 0x28, 16); // inodes in a group
/// put(superblock + 0x38, 0xef53); // the magic number
/// put(descriptor, 3); // the group's block bitmap
/// put(descriptor + 4, 4); // its inode bitmap
/// put(descriptor + 8, 5); // its inode table
/// put(3 * 1024, 0b11_1111);
///
/// let mut allocation = Allocation::default();
/// assert!(!allocation.is_free(&disk, 6)?);
/// assert!(allocation.is_free(&disk, 7)?);
/// assert!(!allocation.is_free(&disk, 64)?, "there is no such block");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Allocation {
    superblock: Option<Superblock>,
    groups: HashMap<u32, Option<Group>>,
    /// Blocks that group descriptors were read from.
    descriptor_blocks: HashSet<u64>,
    bitmaps: HashMap<u64, Box<[u8]>>,
    /// Bitmaps and inode tables of all groups, ascending; nothing until they are asked for.
    fixed: Option<Vec<Range<u64>>>,
}

/// A file system that writes down which of its blocks were read.
struct Noting<'a, R> {
    inner: &'a R,
    block_size: u64,
    blocks: RefCell<HashSet<u64>>,
}

impl<R: ReadAt> ReadAt for Noting<'_, R> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let last = (offset + buffer.len() as u64).saturating_sub(1) / self.block_size;
        self.blocks.borrow_mut().extend(offset / self.block_size..=last);
        self.inner.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }
}

impl Allocation {
    /// Whether `block` is free in the file system that `disk` shows. False where that is not certain.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub fn is_free<R: ReadAt>(&mut self, disk: &R, block: u64) -> io::Result<bool> {
        if self.superblock.is_none() {
            let mut raw = [0; SUPERBLOCK_BYTES];
            disk.read_at(SUPERBLOCK_OFFSET, &mut raw)?;
            self.superblock = Superblock::parse(&raw).ok().filter(|superblock| superblock.check().is_ok());
        }
        let Some(superblock) = self.superblock.clone() else { return Ok(false) };
        let first = u64::from(superblock.first_data_block);
        if superblock.is_journal_device() || block < first || block >= superblock.blocks_count {
            return Ok(false);
        }
        let per_group = u64::from(superblock.blocks_per_group);
        let index = (block - first) / per_group;
        let into = (block - first) % per_group;
        let Ok(index) = u32::try_from(index) else { return Ok(false) };
        let Some(group) = self.group(disk, &superblock, index)? else { return Ok(false) };
        if group.flags & group_flag::BLOCK_UNINIT != 0 {
            let descriptors = superblock.groups_count() * u64::from(superblock.descriptor_size);
            let head = 2
                + descriptors.div_ceil(u64::from(superblock.block_size))
                + u64::from(superblock.reserved_descriptor_blocks);
            if into < head || superblock.incompat & incompat::META_GROUPS != 0 {
                return Ok(false);
            }
            return Ok(!self.is_fixed(disk, &superblock, block)?);
        }
        let bit = into / u64::from(superblock.cluster_blocks);
        let bitmap = match self.bitmaps.get(&group.block_bitmap) {
            Some(bitmap) => bitmap,
            None => {
                let mut bitmap = vec![0; superblock.block_size as usize];
                disk.read_at(group.block_bitmap * u64::from(superblock.block_size), &mut bitmap)?;
                if self.bitmaps.len() >= BITMAPS_MAX {
                    self.bitmaps.clear();
                }
                self.bitmaps.entry(group.block_bitmap).or_insert(bitmap.into_boxed_slice())
            }
        };
        Ok(bitmap.get((bit / 8) as usize).is_some_and(|byte| byte & 1 << (bit % 8) == 0))
    }

    fn group<R: ReadAt>(&mut self, disk: &R, superblock: &Superblock, index: u32) -> io::Result<Option<Group>> {
        if let Some(known) = self.groups.get(&index) {
            return Ok(*known);
        }
        let noting = Noting { inner: disk, block_size: superblock.block_size.into(), blocks: RefCell::default() };
        let found = group(&noting, superblock, index)?;
        self.descriptor_blocks.extend(noting.blocks.into_inner());
        self.groups.insert(index, found);
        Ok(found)
    }

    /// Whether a block holds a bitmap or a part of an inode table, of whichever group.
    fn is_fixed<R: ReadAt>(&mut self, disk: &R, superblock: &Superblock, block: u64) -> io::Result<bool> {
        if self.fixed.is_none() {
            let mut fixed = Vec::new();
            let table_bytes = u64::from(superblock.inodes_per_group) * u64::from(superblock.inode_size);
            let table_blocks = table_bytes.div_ceil(u64::from(superblock.block_size));
            let groups = superblock.groups_count();
            if groups > GROUPS_MAX {
                fixed.push(0..u64::MAX);
            }
            for index in 0..groups.min(GROUPS_MAX) as u32 {
                match group(disk, superblock, index)? {
                    Some(group) => {
                        fixed.push(group.block_bitmap..group.block_bitmap + 1);
                        fixed.push(group.inode_bitmap..group.inode_bitmap + 1);
                        fixed.push(group.inode_table..group.inode_table + table_blocks);
                    }
                    None => fixed.push(0..u64::MAX),
                }
            }
            fixed.sort_unstable_by_key(|range| range.start);
            self.fixed = Some(fixed);
        }
        let fixed = self.fixed.as_deref().unwrap_or_default();
        let after = fixed.partition_point(|range| range.start <= block);
        // Ranges of a damaged file system may overlap: the one before need not be the one that reaches furthest.
        let is_whole = fixed.first().is_some_and(|range| range.end == u64::MAX);
        let reach = fixed[..after].iter().rev().take(4).any(|range| block < range.end);
        Ok(is_whole || reach)
    }

    /// A block of the file system has other content now; `content` where all of it is known.
    pub fn changed(&mut self, block: u64, content: Option<&[u8]>) {
        let superblock_block = self.superblock.as_ref().map(|known| SUPERBLOCK_OFFSET / u64::from(known.block_size));
        if superblock_block == Some(block) {
            let parsed = content.and_then(|content| {
                let at = SUPERBLOCK_OFFSET as usize % content.len().max(1);
                Superblock::parse(content.get(at..)?).ok()
            });
            let known = self.superblock.as_ref();
            let same_shape = parsed.as_ref().zip(known).is_some_and(|(new, old)| {
                (new.blocks_count, new.blocks_per_group, new.inodes_per_group, new.incompat, new.ro_compat)
                    == (old.blocks_count, old.blocks_per_group, old.inodes_per_group, old.incompat, old.ro_compat)
            });
            if !same_shape {
                *self = Self::default();
                return;
            }
        }
        if self.descriptor_blocks.contains(&block) {
            self.descriptor_blocks.clear();
            self.groups.clear();
        }
        match (self.bitmaps.get_mut(&block), content) {
            (Some(bitmap), Some(content)) if bitmap.len() == content.len() => bitmap.copy_from_slice(content),
            (Some(_), _) => {
                self.bitmaps.remove(&block);
            }
            (None, _) => {}
        }
    }

    /// Nothing that was read is known any more.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}
