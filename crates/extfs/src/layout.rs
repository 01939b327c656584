//! How files lie on the disk: the layout score of Smith and Seltzer ("File System Aging", SIGMETRICS 1997), by which the
//! papers say how old a file system is.
//!
//! A block of a file is laid out well if it directly follows, on the disk, the block before it in the file. The score is the
//! share of such blocks among all that have a block before them: 1 where every file is in one piece, 0 where no two blocks
//! touch. Only regular files count that a user made; the blocks of maps are no blocks of the file, and what follows a hole has
//! no block before it.

use crate::bytes::{le16, le32};
use crate::group::group;
use crate::read::ReadAt;
use crate::superblock::Superblock;
use std::io;

const EXTENT_MAGIC: u16 = 0xf30a;
const EXTENT_HEADER_BYTES: usize = 12;
const EXTENT_BYTES: usize = 12;
const EXTENT_DEPTH_MAX: u16 = 5;
/// Lengths above it mean as much less, allocated and not written.
const EXTENT_WRITTEN_MAX: u16 = 32768;
const FLAG_EXTENTS: u32 = 0x80000;
const FLAG_INLINE_DATA: u32 = 0x1000_0000;
const MODE_KIND: u16 = 0xf000;
const MODE_REGULAR: u16 = 0x8000;
const DIRECT: usize = 12;

/// What was found in a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayoutScore {
    /// Regular files with at least one block.
    pub files: u64,
    /// Their blocks.
    pub blocks: u64,
    /// Blocks that have a block before them in their file.
    pub pairs: u64,
    /// Of those, blocks that directly follow it on the disk.
    pub adjacent: u64,
}

impl LayoutScore {
    /// From 0 to 1; nothing where no file has two blocks.
    pub fn score(&self) -> Option<f64> {
        (self.pairs > 0).then(|| self.adjacent as f64 / self.pairs as f64)
    }
}

/// Reads the maps of all regular files of the file system that `disk` holds.
///
/// # Errors
/// When the disk cannot be read, or a map is damaged or has clusters (`bigalloc`), which have no such score.
pub fn layout_score<R: ReadAt>(disk: &R, superblock: &Superblock) -> io::Result<LayoutScore> {
    if superblock.cluster_blocks != 1 {
        return Err(damaged("the file system allocates clusters, which have no layout score".to_owned()));
    }
    // Every block can be in one map only, so a walk that reads more goes in circles.
    let mut walk = Walk { disk, superblock, maps_left: superblock.blocks_count, blocks_left: superblock.blocks_count };
    let mut score = LayoutScore::default();
    let inode_bytes = u32::from(superblock.inode_size);
    let per_block = superblock.block_size / inode_bytes;
    let mut block = vec![0; superblock.block_size as usize];
    for index in 0..u32::try_from(superblock.groups_count()).unwrap_or(u32::MAX) {
        let Some(group) = group(disk, superblock, index)? else {
            return Err(damaged(format!("the descriptor of block group {index} is damaged")));
        };
        for first in (0..superblock.inodes_per_group).step_by(per_block as usize) {
            let place = group.inode_table + u64::from(first / per_block);
            disk.read_at(place.saturating_mul(superblock.block_size.into()), &mut block)?;
            let numbers = u64::from(index) * u64::from(superblock.inodes_per_group) + u64::from(first) + 1..;
            for (inode, number) in block.chunks_exact(inode_bytes as usize).zip(numbers) {
                // Inodes below the eleventh are the file system's own, the journal's among them.
                if number > 10 && le16(inode, 0x1a) != 0 && le16(inode, 0) & MODE_KIND == MODE_REGULAR {
                    let file = walk.file(inode).map_err(|error| in_inode(&error, number))?;
                    score.files += u64::from(file.blocks > 0);
                    score.blocks += file.blocks;
                    score.pairs += file.pairs;
                    score.adjacent += file.adjacent;
                }
            }
        }
    }
    Ok(score)
}

fn damaged(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn in_inode(error: &io::Error, number: u64) -> io::Error {
    io::Error::new(error.kind(), format!("inode {number}: {error}"))
}

/// One file's blocks, as far as they have been seen.
#[derive(Default)]
struct File {
    blocks: u64,
    pairs: u64,
    adjacent: u64,
    /// Of the block behind the last that was seen: its place in the file, and where it would lie well.
    next: Option<(u64, u64)>,
}

impl File {
    fn add(&mut self, logical: u64, physical: u64, count: u64) {
        if let Some((follows, expected)) = self.next
            && follows == logical
        {
            self.pairs += 1;
            self.adjacent += u64::from(expected == physical);
        }
        self.blocks += count;
        self.pairs += count - 1;
        self.adjacent += count - 1;
        self.next = Some((logical + count, physical + count));
    }
}

struct Walk<'a, R> {
    disk: &'a R,
    superblock: &'a Superblock,
    maps_left: u64,
    blocks_left: u64,
}

impl<R: ReadAt> Walk<'_, R> {
    fn file(&mut self, inode: &[u8]) -> io::Result<File> {
        let mut file = File::default();
        let flags = le32(inode, 0x20);
        let root = &inode[0x28..0x28 + 60];
        if flags & FLAG_INLINE_DATA != 0 {
            return Ok(file);
        }
        if flags & FLAG_EXTENTS != 0 {
            self.extents(root, EXTENT_DEPTH_MAX, &mut file)?;
            return Ok(file);
        }
        let pointers_per_block = u64::from(self.superblock.block_size / 4);
        let mut logical = 0;
        self.pointers(&root[..DIRECT * 4], 0, &mut logical, &mut file)?;
        for depth in 1..=3u32 {
            let at = (DIRECT + depth as usize - 1) * 4;
            // What a map above reaches, whether or not it is there.
            let mut from = DIRECT as u64 + (1..depth).map(|depth| pointers_per_block.pow(depth)).sum::<u64>();
            self.pointers(&root[at..at + 4], depth, &mut from, &mut file)?;
        }
        Ok(file)
    }

    /// Follows block numbers that reach blocks of the file from `logical` on: directly if `depth` is 0.
    fn pointers(&mut self, raw: &[u8], depth: u32, logical: &mut u64, file: &mut File) -> io::Result<()> {
        let reach = u64::from(self.superblock.block_size / 4).pow(depth);
        for pointer in raw.chunks_exact(4) {
            let block = u64::from(le32(pointer, 0));
            if block == 0 {
                *logical += reach;
            } else if depth == 0 {
                self.data(*logical, block, 1, file)?;
                *logical += 1;
            } else {
                let map = self.map(block)?;
                self.pointers(&map, depth - 1, logical, file)?;
            }
        }
        Ok(())
    }

    /// Reads a node of an extent tree that is at most `depth_max` levels above the leaves.
    fn extents(&mut self, raw: &[u8], depth_max: u16, file: &mut File) -> io::Result<()> {
        let (entries, depth) = (usize::from(le16(raw, 2)), le16(raw, 6));
        let room = (raw.len() - EXTENT_HEADER_BYTES) / EXTENT_BYTES;
        if le16(raw, 0) != EXTENT_MAGIC || entries > room || depth > depth_max {
            return Err(damaged("a node of its extent tree is damaged".to_owned()));
        }
        for entry in raw[EXTENT_HEADER_BYTES..].chunks_exact(EXTENT_BYTES).take(entries) {
            if depth == 0 {
                let length = le16(entry, 4);
                let length = if length > EXTENT_WRITTEN_MAX { length - EXTENT_WRITTEN_MAX } else { length };
                let physical = u64::from(le16(entry, 6)) << 32 | u64::from(le32(entry, 8));
                if length == 0 {
                    return Err(damaged("an extent is empty".to_owned()));
                }
                self.data(le32(entry, 0).into(), physical, length.into(), file)?;
            } else {
                let block = u64::from(le16(entry, 8)) << 32 | u64::from(le32(entry, 4));
                let map = self.map(block)?;
                self.extents(&map, depth - 1, file)?;
            }
        }
        Ok(())
    }

    fn data(&mut self, logical: u64, physical: u64, count: u64, file: &mut File) -> io::Result<()> {
        if physical.checked_add(count).is_none_or(|end| end > self.superblock.blocks_count) {
            return Err(damaged(format!("block {physical} of its map is outside the file system")));
        }
        self.blocks_left = self.blocks_left.checked_sub(count).ok_or_else(too_many)?;
        file.add(logical, physical, count);
        Ok(())
    }

    fn map(&mut self, block: u64) -> io::Result<Vec<u8>> {
        self.maps_left = self.maps_left.checked_sub(1).ok_or_else(too_many)?;
        let size = self.superblock.block_size;
        let mut raw = vec![0; size as usize];
        self.disk.read_at(block.saturating_mul(size.into()), &mut raw)?;
        Ok(raw)
    }
}

fn too_many() -> io::Error {
    damaged("maps name more blocks than the file system has".to_owned())
}
