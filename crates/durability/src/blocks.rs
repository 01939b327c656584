//! A set of blocks, as ranges; bounded, and wrong on one side only.

use std::collections::BTreeMap;
use std::ops::Range;

/// Beyond so many ranges, neighbours are taken together: what is in the set stays in it.
const RANGES_MAX: usize = 1 << 16;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockSet {
    /// Start and end; none touches another.
    ranges: BTreeMap<u64, u64>,
}

impl BlockSet {
    /// Puts blocks in.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&from, &to)) = self.ranges.range(..=end).next_back() {
            if to < start {
                break;
            }
            self.ranges.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.ranges.insert(start, end);
        if self.ranges.len() > RANGES_MAX {
            self.coarsen();
        }
    }

    /// Closes every other gap.
    fn coarsen(&mut self) {
        let all: Vec<(u64, u64)> = std::mem::take(&mut self.ranges).into_iter().collect();
        for pair in all.chunks(2) {
            if let (Some(first), Some(last)) = (pair.first(), pair.last()) {
                self.ranges.insert(first.0, last.1);
            }
        }
    }

    /// Whether a block of the range is in the set.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        !range.is_empty() && self.ranges.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start)
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_tools::random::Random;

    #[test]
    fn it_is_a_set() {
        let mut random = Random::new(7);
        for _ in 0..50 {
            let (mut set, mut model) = (BlockSet::default(), [false; 80]);
            for _ in 0..40 {
                let start = random.below(70);
                let end = start + random.below(8);
                set.insert(start..end);
                (start..end).for_each(|block| model[block as usize] = true);
                let from = random.below(70);
                let to = from + random.below(9);
                assert_eq!(set.touches(&(from..to)), (from..to).any(|block| model[block as usize]));
            }
            assert!(set.ranges.iter().zip(set.ranges.iter().skip(1)).all(|(one, next)| one.1 < next.0));
        }
    }

    #[test]
    fn too_many_ranges_become_fewer_and_lose_nothing() {
        let mut set = BlockSet::default();
        for block in 0..3 * RANGES_MAX as u64 {
            set.insert(block * 10..block * 10 + 2);
        }
        assert!(set.ranges.len() <= RANGES_MAX);
        assert!((0..3 * RANGES_MAX as u64).all(|block| set.touches(&(block * 10 + 1..block * 10 + 2))));
    }
}
