//! Reproducible randomness: the same seed gives the same run on every machine and in every release.

use seeded_random::mix;

pub use seeded_random::Random;

/// A random permutation of the numbers below `count` without a table: a four-round Feistel network over the
/// next even number of bits, walked until it lands below `count`.
///
/// # Examples
/// ```
/// use ssd_sim::random::Permutation;
///
/// let permutation = Permutation::new(10, 7);
/// let mut places: Vec<u64> = (0..10).map(|index| permutation.at(index)).collect();
/// places.sort_unstable();
/// assert!(places.into_iter().eq(0..10));
/// ```
#[derive(Clone, Debug)]
pub struct Permutation {
    count: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Permutation {
    /// A permutation of `0..count`.
    pub fn new(count: u64, seed: u64) -> Permutation {
        let bits = (64 - count.max(2).saturating_sub(1).leading_zeros()).max(2);
        let mut random = Random::new(seed);
        Permutation { count, half_bits: bits.div_ceil(2), keys: std::array::from_fn(|_| random.bits()) }
    }

    /// Where `index` goes.
    pub fn at(&self, index: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & mask);
            for key in self.keys {
                (left, right) = (right, left ^ (mix(right ^ key) & mask));
            }
            value = left << self.half_bits | right;
            if value < self.count {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_meets_each_number_once() {
        for count in [1u64, 2, 3, 64, 100, 1000, 4097] {
            let permutation = Permutation::new(count, 7);
            let mut seen = vec![false; count as usize];
            for index in 0..count {
                assert!(!std::mem::replace(&mut seen[permutation.at(index) as usize], true), "{count}");
            }
        }
        let moved = (0..1000).filter(|&i| Permutation::new(1000, 1).at(i) != i).count();
        assert!(moved > 950);
    }
}
