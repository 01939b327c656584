//! A guest with a file system of a few blocks: a counter, a bitmap and a table are journaled, and so is some data; other data is
//! written in place, ordered before the transaction that refers to it. It keeps the rules of jbd2 and ext4.

use std::collections::BTreeSet;

pub const BLOCK: usize = 1024;
pub const COUNTER: u64 = 0;
pub const BITMAP: u64 = 1;
pub const TABLE: u64 = 2;
/// Journaled like any other, and also written directly at times, as ext4 does with its superblock.
pub const DIRECT: u64 = 3;
pub const DATA: u64 = 4;
pub const DATA_BLOCKS: u64 = 44;
pub const HOME_BLOCKS: u64 = DATA + DATA_BLOCKS;

/// What a data block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Free,
    /// Journaled, with this stamp.
    Journaled(u32),
    /// Written in place: whose it is, and what was written at least when that was so.
    InPlace(u32, u32),
}

/// The file system as of a transaction.
#[derive(Clone, Debug)]
pub struct State {
    pub uses: Vec<Use>,
    pub direct: u32,
}

impl State {
    pub fn new() -> Self {
        State { uses: vec![Use::Free; DATA_BLOCKS as usize], direct: 0 }
    }

    pub fn bitmap(&self) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        (0..DATA).for_each(|block_number| set(&mut block, block_number));
        for (index, what) in self.uses.iter().enumerate() {
            if *what != Use::Free {
                set(&mut block, DATA + index as u64);
            }
        }
        block
    }

    fn table(&self) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        for (index, what) in self.uses.iter().enumerate() {
            let (kind, value) = match what {
                Use::Free => (0, 0),
                Use::Journaled(stamp) => (1u32, *stamp),
                Use::InPlace(owner, _) => (2, *owner),
            };
            block[index * 8..index * 8 + 4].copy_from_slice(&kind.to_le_bytes());
            block[index * 8 + 4..index * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        block
    }

    /// What a journaled block holds as of transaction `sequence`.
    pub fn content(&self, block: u64, sequence: u32) -> Vec<u8> {
        match block {
            COUNTER => pattern(COUNTER, sequence, 0),
            BITMAP => self.bitmap(),
            TABLE => self.table(),
            DIRECT => pattern(DIRECT, self.direct, 0),
            _ => match self.uses[(block - DATA) as usize] {
                Use::Journaled(stamp) => pattern(block, stamp, 0),
                other => panic!("block {block} is {other:?}, and not journaled"),
            },
        }
    }
}

fn set(bitmap: &mut [u8], block: u64) {
    bitmap[block as usize / 8] |= 1 << (block % 8);
}

pub fn is_set(bitmap: &[u8], block: u64) -> bool {
    bitmap[block as usize / 8] & 1 << (block % 8) != 0
}

/// A content of which every sector tells whose it is; some begin as a log block does.
pub fn pattern(block: u64, stamp: u32, owner: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BLOCK);
    for sector in 0..BLOCK / 512 {
        let mut part = vec![stamp as u8; 512];
        if stamp % 5 == 1 && sector == 0 {
            part[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        }
        part[8..12].copy_from_slice(&stamp.to_le_bytes());
        part[12..20].copy_from_slice(&block.to_le_bytes());
        part[20..24].copy_from_slice(&owner.to_le_bytes());
        part[24] = sector as u8;
        bytes.extend_from_slice(&part);
    }
    bytes
}

/// Stamp, block and owner that a sector tells.
pub fn told(sector: &[u8]) -> (u32, u64, u32) {
    let number = |at: usize| u32::from_le_bytes(sector[at..at + 4].try_into().unwrap());
    (number(8), u64::from_le_bytes(sector[12..20].try_into().unwrap()), number(20))
}

/// A transaction as the guest knows it.
#[derive(Clone, Debug)]
pub struct Committed {
    pub sequence: u32,
    /// Log blocks that it takes in the guest's log.
    pub length: u32,
    /// Blocks whose newest version is here and that are not home yet.
    pub owed: BTreeSet<u64>,
    /// What it freed.
    pub freed: BTreeSet<u64>,
    pub journaled: BTreeSet<u64>,
    pub state: State,
    /// When the guest was told.
    pub told_at: Option<u64>,
}

/// What the guest is in the midst of.
#[derive(Clone, Debug, Default)]
pub struct Running {
    pub journaled: BTreeSet<u64>,
    pub revokes: BTreeSet<u64>,
    pub freed: BTreeSet<u64>,
    /// In-place writes that have to end before it may commit.
    pub ordered: BTreeSet<u64>,
}
