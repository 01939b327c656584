//! Which blocks are free, and which ones a transaction frees, read from the bitmaps by whoever judges: amberlog reads them with `extfs`, and
//! nothing of that is taken for granted here.

use extfs::ReadAt;
use std::io;
use std::ops::Range;

const SUPERBLOCK_AT: u64 = 1024;
/// `EXT4_FEATURE_INCOMPAT_META_BG`, `EXT4_FEATURE_INCOMPAT_64BIT`, `EXT4_FEATURE_RO_COMPAT_BIGALLOC`.
const META_GROUPS: u64 = 0x10;
const WIDE: u64 = 0x80;
const CLUSTERS: u64 = 0x200;

/// Those of a file system that has all of its disk, and stays as large as it is.
#[derive(Default)]
pub struct Bitmaps {
    known: Option<Known>,
}

struct Known {
    block_bytes: u64,
    /// The first block of the first group, …
    first: u64,
    /// … and the block behind the last one.
    end: u64,
    blocks_per_group: u64,
    /// Blocks that a bit stands for.
    blocks_per_bit: u64,
    /// The bitmap of each group.
    bitmaps: Vec<u64>,
}

fn le16(raw: &[u8], at: usize) -> u64 {
    u64::from(u16::from_le_bytes([raw[at], raw[at + 1]]))
}

fn le32(raw: &[u8], at: usize) -> u64 {
    u64::from(u32::from_le_bytes(std::array::from_fn(|index| raw[at + index])))
}

fn is_set(bitmap: &[u8], bit: u64) -> bool {
    bitmap[(bit / 8) as usize] & 1 << (bit % 8) != 0
}

impl Known {
    fn read<R: ReadAt>(disk: &R) -> io::Result<Self> {
        let mut raw = [0; 1024];
        disk.read_at(SUPERBLOCK_AT, &mut raw)?;
        let (incompat, ro_compat) = (le32(&raw, 0x60), le32(&raw, 0x64));
        if incompat & META_GROUPS != 0 {
            return Err(io::Error::other("the judge does not know where meta_bg has its descriptors"));
        }
        let (block_shift, cluster_shift) = (le32(&raw, 0x18), le32(&raw, 0x1c));
        let block_bytes = 1024u64 << block_shift;
        let blocks_per_bit = if ro_compat & CLUSTERS != 0 { 1u64 << (cluster_shift - block_shift) } else { 1 };
        let (end, first, blocks_per_group) = (le32(&raw, 0x04), le32(&raw, 0x14), le32(&raw, 0x20));
        let descriptor_bytes = if incompat & WIDE != 0 { le16(&raw, 0xfe) } else { 32 };
        // Behind the block with the superblock.
        let descriptors = (SUPERBLOCK_AT / block_bytes + 1) * block_bytes;
        let mut bitmaps = Vec::new();
        for group in 0..(end - first).div_ceil(blocks_per_group) {
            let mut raw = vec![0; descriptor_bytes as usize];
            disk.read_at(descriptors + group * descriptor_bytes, &mut raw)?;
            let high = if descriptor_bytes >= 64 { le32(&raw, 0x20) << 32 } else { 0 };
            bitmaps.push(high | le32(&raw, 0));
        }
        Ok(Known { block_bytes, first, end, blocks_per_group, blocks_per_bit, bitmaps })
    }
}

impl Bitmaps {
    fn known<R: ReadAt>(&mut self, disk: &R) -> io::Result<&Known> {
        if self.known.is_none() {
            self.known = Some(Known::read(disk)?);
        }
        self.known.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The blocks that a transaction with these home blocks and contents frees, in the file system that `disk` shows as of before it.
    pub fn freed<R: ReadAt>(&mut self, disk: &R, blocks: &[(u64, &[u8])]) -> io::Result<Vec<Range<u64>>> {
        let known = self.known(disk)?;
        let mut freed = Vec::new();
        for (block, after) in blocks {
            let Some(group) = known.bitmaps.iter().position(|bitmap| bitmap == block) else { continue };
            let mut before = vec![0; after.len()];
            disk.read_at(block * known.block_bytes, &mut before)?;
            for bit in 0..known.blocks_per_group / known.blocks_per_bit {
                if is_set(&before, bit) && !is_set(after, bit) {
                    let start = known.first + group as u64 * known.blocks_per_group + bit * known.blocks_per_bit;
                    freed.push(start..(start + known.blocks_per_bit).min(known.end));
                }
            }
        }
        Ok(freed)
    }

    /// Whether a block is free in the file system that `disk` shows.
    pub fn is_free<R: ReadAt>(&mut self, disk: &R, block: u64) -> io::Result<bool> {
        let known = self.known(disk)?;
        if !(known.first..known.end).contains(&block) {
            return Ok(false);
        }
        let into = block - known.first;
        let bitmap = known.bitmaps[(into / known.blocks_per_group) as usize];
        let bit = into % known.blocks_per_group / known.blocks_per_bit;
        let mut byte = [0];
        disk.read_at(bitmap * known.block_bytes + bit / 8, &mut byte)?;
        Ok(!is_set(&byte, bit % 8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 4096;

    /// 38 blocks in clusters of four: a group of eight clusters, and one of a cluster and a half, which is full.
    fn image() -> Vec<u8> {
        let mut image = vec![0; 38 * BLOCK];
        for (at, value) in [(0x04, 38u32), (0x18, 2), (0x1c, 4), (0x20, 32), (0x64, 0x200)] {
            image[1024 + at..1024 + at + 4].copy_from_slice(&value.to_le_bytes());
        }
        for (group, bitmap) in [2u32, 3].into_iter().enumerate() {
            let at = BLOCK + 32 * group;
            image[at..at + 4].copy_from_slice(&bitmap.to_le_bytes());
        }
        (image[2 * BLOCK], image[3 * BLOCK]) = (0b0000_1111, 0b1111_1111);
        image
    }

    #[test]
    fn a_bit_is_a_cluster() {
        let (image, mut bitmaps) = (image(), Bitmaps::default());
        let bitmap = |byte: u8| {
            let mut bitmap = vec![0; BLOCK];
            bitmap[0] = byte;
            bitmap
        };
        let (first, second) = (bitmap(0b0001_1101), bitmap(0b1111_1100));
        let freed = bitmaps.freed(&image, &[(3, &second), (7, &first), (2, &first)]).expect("memory");
        assert_eq!(freed, [32..36, 36..38, 4..8], "what was set and is not; block 7 is no bitmap");
        let free: Vec<u64> = (0..50).filter(|block| bitmaps.is_free(&image, *block).expect("memory")).collect();
        assert_eq!(free, (16..32).collect::<Vec<_>>());
    }
}
