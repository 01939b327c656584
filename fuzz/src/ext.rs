//! A disk as a guest could write it: partition tables, superblocks, groups, and the map of the journal.
//!
//! Input: the size of the disk in blocks of 1024 bytes (four bytes, little-endian, at most 2^24 are taken), then pieces of
//! content: four bytes for the block that it is written to, two for its length, and as many bytes. All else is zero.
//!
//! What is checked: no panic, no read beyond the end, and maps that stay inside their file system and name nothing twice.

use extfs::{ReadAt, discover, group, partitions};
use recovery::HomeBounds;
use std::collections::BTreeMap;
use std::io;

const BLOCK: u64 = 1024;
/// Reads of one run. A map of a million pieces is within bounds, but too slow to fuzz.
const READS_MAX: usize = 20_000;

struct Disk {
    size: u64,
    blocks: BTreeMap<u64, [u8; BLOCK as usize]>,
    reads: std::cell::Cell<usize>,
}

impl Disk {
    fn parse(data: &[u8]) -> Option<Disk> {
        let (size, mut rest) = data.split_first_chunk::<4>()?;
        let blocks = u64::from(u32::from_le_bytes(*size) % (1 << 24));
        let mut disk = Disk { size: blocks * BLOCK, blocks: BTreeMap::new(), reads: std::cell::Cell::new(0) };
        while let Some((head, after)) = rest.split_first_chunk::<6>() {
            let block = u64::from(u32::from_le_bytes([head[0], head[1], head[2], head[3]]));
            let length = usize::from(u16::from_le_bytes([head[4], head[5]])).min(after.len());
            let (content, later) = after.split_at(length);
            for (block, piece) in (block..).zip(content.chunks(BLOCK as usize)) {
                disk.blocks.entry(block).or_insert([0; BLOCK as usize])[..piece.len()].copy_from_slice(piece);
            }
            rest = later;
        }
        Some(disk)
    }
}

impl ReadAt for Disk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        assert!(end.is_some_and(|end| end <= self.size), "a read beyond the end, at byte {offset}");
        self.reads.set(self.reads.get() + 1);
        if self.reads.get() > READS_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut at = offset;
        let mut rest = buffer;
        while !rest.is_empty() {
            let inside = (at % BLOCK) as usize;
            let count = (BLOCK as usize - inside).min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            match self.blocks.get(&(at / BLOCK)) {
                Some(block) => now.copy_from_slice(&block[inside..inside + count]),
                None => now.fill(0),
            }
            at += count as u64;
            rest = later;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.size
    }
}

/// Runs one input. Says whether it held a journal whose map is understood.
pub fn run(data: &[u8]) -> bool {
    let Some(disk) = Disk::parse(data) else { return false };
    let Ok(found) = partitions(&disk) else { return false };
    for partition in &found {
        assert!(partition.length > 0 && partition.offset + partition.length <= disk.size, "{partition:?}");
    }
    let Ok(found) = discover(&disk) else { return false };
    let mut understood = false;
    for file_system in &found {
        let superblock = &file_system.superblock;
        assert!(file_system.offset + file_system.length <= disk.size);
        let extents = file_system.journal.extents(superblock);
        understood |= !extents.is_empty();
        let mut position = 0;
        let mut ranges = Vec::new();
        for extent in &extents {
            assert_eq!(extent.log, position, "the map has no hole");
            position += extent.count;
            let end = extent.physical + u64::from(extent.count);
            assert!(extent.count > 0 && end <= superblock.blocks_count, "{extent:?}");
            ranges.push((extent.physical, end));
        }
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "the map names a block twice");
        let bounds = HomeBounds::new(file_system);
        assert!(ranges.iter().all(|(first, end)| !bounds.contains(*first) && !bounds.contains(end - 1)));
        if superblock.check().is_ok() && !superblock.is_journal_device() && superblock.bytes() <= file_system.length {
            let window = extfs::Window::new(&disk, file_system.offset, file_system.length);
            let _ = group(&window, superblock, (superblock.groups_count() - 1).min(u64::from(u32::MAX)) as u32);
        }
    }
    understood
}
