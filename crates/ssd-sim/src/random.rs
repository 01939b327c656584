//! Reproducible randomness: the same seed gives the same run on every machine and in every release.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Random {
    /// A generator for this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound` (which must not be 0); the bias is below 2^-32 for the bounds used here.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from 0 up to but not including 1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A random permutation of the numbers below `count` without a table: a four-round Feistel network over the
/// next even number of bits, walked until it lands below `count`.
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

    #[test]
    fn below_stays_below() {
        let mut random = Random::new(1);
        assert!((0..10_000).all(|_| random.below(7) < 7));
        assert!((0..10_000).all(|_| random.unit() < 1.0));
    }
}
