//! Maps of direct and indirect blocks (ext2, ext3).

use crate::bytes::le32;
use crate::journal::{PIECES_MAX, Runs, in_bounds};
use crate::map::{Failure, MapRoot};
use crate::read::ReadAt;
use crate::superblock::Superblock;
use std::collections::HashSet;

const DIRECT: usize = 12;

/// Reads a block map: its runs in log order, and the indirect blocks.
pub(crate) fn read<R: ReadAt>(disk: &R, superblock: &Superblock, root: &MapRoot) -> Result<(Runs, Vec<u64>), Failure> {
    let mut map = Map { disk, superblock, runs: Runs::new(root.blocks), seen: HashSet::new() };
    map.pointers(&root.root[..DIRECT * 4], 0)?;
    for depth in 1..=3 {
        if !map.runs.is_complete() {
            let offset = (DIRECT + depth as usize - 1) * 4;
            map.pointers(&root.root[offset..offset + 4], depth)?;
        }
    }
    Ok((map.runs, map.seen.into_iter().collect()))
}

struct Map<'a, R> {
    disk: &'a R,
    superblock: &'a Superblock,
    runs: Runs,
    seen: HashSet<u64>,
}

impl<R: ReadAt> Map<'_, R> {
    /// Follows block numbers: of the journal's own blocks if `depth` is 0, of indirect blocks otherwise.
    fn pointers(&mut self, raw: &[u8], depth: u32) -> Result<(), Failure> {
        for pointer in raw.chunks_exact(4) {
            if self.runs.is_complete() {
                break;
            }
            let block = u64::from(le32(pointer, 0));
            if depth == 0 {
                self.runs.add(self.runs.next(), block, 1, self.superblock)?;
                continue;
            }
            in_bounds(block, 1, self.superblock)?;
            if !self.seen.insert(block) {
                return Err(format!("the journal's map names block {block} twice").into());
            }
            if self.seen.len() > PIECES_MAX {
                return Err(format!("the journal's map has more than {PIECES_MAX} blocks").into());
            }
            let size = self.superblock.block_size;
            let mut indirect = vec![0; size as usize];
            self.disk.read_at(block * u64::from(size), &mut indirect)?;
            self.pointers(&indirect, depth - 1)?;
        }
        Ok(())
    }
}
