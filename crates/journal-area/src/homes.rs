//! The block-number half of the paper's tuple: which file system block each log block is a version of.

/// One entry a log block: 4 bytes, 2 more on file systems of 2^32 blocks or more.
#[derive(Debug, Default)]
pub struct Homes {
    low: Vec<u32>,
    high: Vec<u16>,
}

impl Homes {
    /// Entries for `log_blocks` log blocks of a file system with `home_blocks` blocks, none known.
    pub fn new(log_blocks: u32, home_blocks: u64) -> Self {
        Homes {
            low: vec![u32::MAX; log_blocks as usize],
            high: if home_blocks > u64::from(u32::MAX) { vec![u16::MAX; log_blocks as usize] } else { Vec::new() },
        }
    }

    /// The file system has `home_blocks` blocks now. What is known stays known.
    pub fn resize(&mut self, home_blocks: u64) {
        if self.high.is_empty() && home_blocks > u64::from(u32::MAX) {
            self.high = self.low.iter().map(|low| if *low == u32::MAX { u16::MAX } else { 0 }).collect();
        }
    }

    /// The home block of log block `position`, if it is a known version of one.
    pub fn get(&self, position: u32) -> Option<u64> {
        let index = position as usize;
        let low = self.low[index];
        match self.high.get(index) {
            None => (low != u32::MAX).then_some(u64::from(low)),
            Some(&u16::MAX) => None,
            Some(high) => Some(u64::from(*high) << 32 | u64::from(low)),
        }
    }

    /// Says that log block `position` is a version of `home`, which must be below the number the list was made for.
    pub fn set(&mut self, position: u32, home: u64) {
        let index = position as usize;
        self.low[index] = home as u32;
        if let Some(high) = self.high.get_mut(index) {
            *high = (home >> 32) as u16;
        }
    }

    /// Forgets what log block `position` is.
    pub fn clear(&mut self, position: u32) {
        let index = position as usize;
        self.low[index] = u32::MAX;
        if let Some(high) = self.high.get_mut(index) {
            *high = u16::MAX;
        }
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        self.low.len() as u64 * 4 + self.high.len() as u64 * 2
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
        for blocks in [1 << 20, 1u64 << 40] {
            let mut homes = Homes::new(16, blocks);
            assert_eq!(homes.get(3), None);
            homes.set(3, blocks - 1);
            assert_eq!(homes.get(3), Some(blocks - 1));
            homes.clear(3);
            assert_eq!(homes.get(3), None);
        }
    }
}
