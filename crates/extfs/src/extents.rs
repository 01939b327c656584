//! Maps that are extent trees (ext4).

use crate::bytes::{crc32c, le16, le32};
use crate::journal::{PIECES_MAX, Runs, in_bounds};
use crate::map::{Failure, MapRoot};
use crate::read::ReadAt;
use crate::superblock::Superblock;
use std::collections::HashSet;

const MAGIC: u16 = 0xf30a;
const HEADER_BYTES: usize = 12;
const ENTRY_BYTES: usize = 12;
/// `EXT4_MAX_EXTENT_DEPTH`.
const DEPTH_MAX: u16 = 5;
/// Longer extents are allocated but not written, which a journal never is.
const EXTENT_BLOCKS_MAX: u16 = 32768;

/// Reads an extent tree: its runs in log order, and the blocks of the tree.
pub(crate) fn read<R: ReadAt>(disk: &R, superblock: &Superblock, root: &MapRoot) -> Result<(Runs, Vec<u64>), Failure> {
    let depth = le16(&root.root, 6);
    if depth > DEPTH_MAX {
        return Err(
            format!("the journal's extent tree is {depth} levels deep; {DEPTH_MAX} is the most there can be").into()
        );
    }
    let mut tree = Tree { disk, superblock, root, runs: Runs::new(root.blocks), seen: HashSet::new() };
    tree.node(&root.root, depth)?;
    Ok((tree.runs, tree.seen.into_iter().collect()))
}

struct Tree<'a, R> {
    disk: &'a R,
    superblock: &'a Superblock,
    root: &'a MapRoot,
    runs: Runs,
    seen: HashSet<u64>,
}

impl<R: ReadAt> Tree<'_, R> {
    /// Reads a node that is `depth` levels above the leaves. Recursion is bounded by `DEPTH_MAX`.
    fn node(&mut self, raw: &[u8], depth: u16) -> Result<(), Failure> {
        let entries = usize::from(le16(raw, 2));
        let room = (raw.len() - HEADER_BYTES) / ENTRY_BYTES;
        if le16(raw, 0) != MAGIC || le16(raw, 6) != depth || entries > room || entries > le16(raw, 4).into() {
            return Err(
                format!("a node of the journal's extent tree, {depth} levels above its leaves, is damaged").into()
            );
        }
        for entry in raw[HEADER_BYTES..].chunks_exact(ENTRY_BYTES).take(entries) {
            if self.runs.is_complete() {
                break;
            }
            if depth == 0 { self.leaf_entry(entry)? } else { self.index_entry(entry, depth - 1)? }
        }
        Ok(())
    }

    fn leaf_entry(&mut self, entry: &[u8]) -> Result<(), Failure> {
        let (log, length) = (le32(entry, 0), le16(entry, 4));
        if length == 0 || length > EXTENT_BLOCKS_MAX {
            return Err(format!("the journal's extent at log block {log} is empty or not written").into());
        }
        let physical = u64::from(le16(entry, 6)) << 32 | u64::from(le32(entry, 8));
        Ok(self.runs.add(log, physical, length.into(), self.superblock)?)
    }

    fn index_entry(&mut self, entry: &[u8], depth: u16) -> Result<(), Failure> {
        let block = u64::from(le16(entry, 8)) << 32 | u64::from(le32(entry, 4));
        in_bounds(block, 1, self.superblock)?;
        if !self.seen.insert(block) {
            return Err(format!("the journal's extent tree names block {block} twice").into());
        }
        if self.seen.len() > PIECES_MAX {
            return Err(format!("the journal's extent tree has more than {PIECES_MAX} blocks").into());
        }
        let size = self.superblock.block_size;
        let mut raw = vec![0; size as usize];
        self.disk.read_at(block * u64::from(size), &mut raw)?;
        self.check_checksum(&raw, block)?;
        self.node(&raw, depth)
    }

    /// The checksum follows the last entry that there is room for.
    fn check_checksum(&self, raw: &[u8], block: u64) -> Result<(), Failure> {
        let tail = HEADER_BYTES + ENTRY_BYTES * usize::from(le16(raw, 4));
        if !self.superblock.has_metadata_checksums() {
            return Ok(());
        }
        let matches = raw.len() >= tail + 4 && crc32c(self.root.checksum_seed, &raw[..tail]) == le32(raw, tail);
        if !matches {
            return Err(
                format!("the checksum of block {block}, part of the journal's extent tree, does not match").into()
            );
        }
        Ok(())
    }
}
