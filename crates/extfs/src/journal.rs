//! Where a file system's journal is.

use crate::superblock::Superblock;

/// A run of journal blocks that are next to each other on the file system's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalExtent {
    /// First block, counted in the journal.
    pub log: u32,
    /// First block, counted in the file system (for a journal device: in the device).
    pub physical: u64,
    /// Number of blocks.
    pub count: u32,
}

/// The journal of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Journal {
    /// There is none: an ext2 file system.
    None,
    /// Inside the file system. The journal superblock is log block 0.
    Internal {
        /// The journal's inode.
        inode: u32,
        /// Blocks in the journal; `extents` cover exactly these.
        blocks: u32,
        /// Where they are, in log order.
        extents: Vec<JournalExtent>,
        /// Blocks that hold the map itself (extent tree nodes, indirect blocks), ascending.
        map_blocks: Vec<u64>,
    },
    /// On another disk.
    External {
        /// UUID of the journal device.
        uuid: [u8; 16],
    },
    /// This is itself a journal device. Log blocks are its own blocks.
    JournalDevice {
        /// Block of the journal superblock: 2 with blocks of 1 KB, 1 otherwise.
        superblock_block: u32,
    },
    /// There is one, but it must be left alone.
    NotUnderstood {
        /// Why, as a sentence without its full stop.
        reason: String,
        /// What the file system would have, if it were alone on its disk: nothing may be written by it. Nothing where that is not known.
        behind: Option<Box<Journal>>,
    },
}

impl Journal {
    /// Where the journal's blocks are on the file system's own disk; nothing when they are elsewhere or not known. For a
    /// journal device that is the whole device.
    pub fn extents(&self, superblock: &Superblock) -> Vec<JournalExtent> {
        match self {
            Journal::Internal { extents, .. } => extents.clone(),
            Journal::JournalDevice { .. } => {
                let count = u32::try_from(superblock.blocks_count).unwrap_or(u32::MAX);
                vec![JournalExtent { log: 0, physical: 0, count }]
            }
            Journal::None | Journal::External { .. } | Journal::NotUnderstood { .. } => Vec::new(),
        }
    }

    /// Of how many runs and blocks of its own its map is, as far as it is known.
    pub(crate) fn pieces(&self) -> usize {
        match self {
            Journal::Internal { extents, map_blocks, .. } => extents.len() + map_blocks.len(),
            Journal::NotUnderstood { behind: Some(journal), .. } => journal.pieces(),
            Journal::None
            | Journal::External { .. }
            | Journal::JournalDevice { .. }
            | Journal::NotUnderstood { .. } => 0,
        }
    }

    /// Log block of the journal superblock.
    pub fn superblock_position(&self) -> u32 {
        match self {
            Journal::JournalDevice { superblock_block } => *superblock_block,
            _ => 0,
        }
    }
}

/// Whether block `block` of the file system is one of `extents` (any order).
pub fn is_inside(extents: &[JournalExtent], block: u64) -> bool {
    extents.iter().any(|extent| (extent.physical..extent.physical + u64::from(extent.count)).contains(&block))
}

/// A map has at most this many runs and this many blocks of its own. A journal of 40 GB in runs of 40 KB stays below.
pub(crate) const PIECES_MAX: usize = 1 << 20;

/// Collects runs in log order and joins those that touch.
#[derive(Debug)]
pub(crate) struct Runs {
    pub(crate) extents: Vec<JournalExtent>,
    blocks: u32,
}

impl Runs {
    pub(crate) fn new(blocks: u32) -> Self {
        Runs { extents: Vec::new(), blocks }
    }

    /// Log block that the next run must begin with.
    pub(crate) fn next(&self) -> u32 {
        self.extents.last().map_or(0, |last| last.log + last.count)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.next() >= self.blocks
    }

    /// Adds a run, cut off at the journal's end.
    pub(crate) fn add(&mut self, log: u32, physical: u64, count: u32, superblock: &Superblock) -> Result<(), String> {
        if log >= self.blocks {
            return Ok(());
        }
        if log != self.next() {
            return Err(format!("the journal's map has a hole or goes back at log block {}", self.next()));
        }
        let count = count.min(self.blocks - log);
        in_bounds(physical, count, superblock)?;
        if let Some(last) = self.extents.last_mut()
            && last.physical + u64::from(last.count) == physical
        {
            last.count += count;
            return Ok(());
        }
        if self.extents.len() == PIECES_MAX {
            return Err(format!("the journal is in more than {PIECES_MAX} pieces"));
        }
        self.extents.push(JournalExtent { log, physical, count });
        Ok(())
    }
}

pub(crate) fn in_bounds(physical: u64, count: u32, superblock: &Superblock) -> Result<(), String> {
    let end = physical.checked_add(count.into());
    // The superblock's own block is not a block of the journal, whatever the map says.
    let first = u64::from(superblock.first_data_block) + 1;
    if count == 0 || physical < first || end.is_none_or(|end| end > superblock.blocks_count) {
        return Err(format!("the journal's map names {count} blocks from block {physical}, outside the file system"));
    }
    Ok(())
}

/// Refuses a map that names a block twice.
pub(crate) fn refuse_overlaps(extents: &[JournalExtent], map_blocks: &[u64]) -> Result<(), String> {
    let mut ranges: Vec<(u64, u64)> =
        extents.iter().map(|extent| (extent.physical, extent.physical + u64::from(extent.count))).collect();
    ranges.extend(map_blocks.iter().map(|block| (*block, block + 1)));
    ranges.sort_unstable();
    match ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(format!("the journal's map names block {} twice", pair[1].0)),
        None => Ok(()),
    }
}
