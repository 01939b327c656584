//! The block-number half of the paper's tuple: which file system block each log block is a version of.

use crate::pieces::Pieces;

/// One entry a log block that is a known version: 3 bytes, 4 on file systems of 2^24 blocks (64 GiB of blocks of 4 KiB) or more, 6 on
/// those of 2^32 or more.
#[derive(Debug)]
pub struct Homes(Pieces);

impl Homes {
    /// Entries for `log_blocks` log blocks of a file system with `home_blocks` blocks, none known.
    pub fn new(log_blocks: u32, home_blocks: u64) -> Self {
        Homes(Pieces::new(log_blocks, home_blocks.max(1 << 16)))
    }

    /// The file system has `home_blocks` blocks now. What is known stays known.
    pub fn resize(&mut self, home_blocks: u64) {
        self.0.widen(home_blocks);
    }

    /// The home block of log block `position`, if it is a known version of one.
    pub fn get(&self, position: u32) -> Option<u64> {
        self.0.get(position)
    }

    /// Says that log block `position` is a version of `home`, which must be below the number the list was made for.
    pub fn set(&mut self, position: u32, home: u64) {
        self.0.set(position, home);
    }

    /// Forgets what log block `position` is.
    pub fn clear(&mut self, position: u32) {
        self.0.clear(position);
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        self.0.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_system_becomes_a_large_one() {
        let mut homes = Homes::new(16, 1 << 20);
        homes.set(3, 77);
        homes.resize(1 << 40);
        assert_eq!((homes.get(3), homes.get(4)), (Some(77), None));
        homes.set(4, u64::from(u32::MAX));
        assert_eq!(homes.get(4), Some(u64::from(u32::MAX)));
    }

    #[test]
    fn small_and_large_file_systems() {
        for blocks in [100, 0xffff, 1 << 16, 1 << 20, (1 << 24) - 1, 1 << 24, (1 << 32) - 1, 1 << 32, 1u64 << 40] {
            let mut homes = Homes::new(16, blocks);
            assert_eq!(homes.get(3), None);
            homes.set(3, blocks - 1);
            assert_eq!(homes.get(3), Some(blocks - 1));
            homes.clear(3);
            assert_eq!(homes.get(3), None);
        }
    }
}
