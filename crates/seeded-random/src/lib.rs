//! Random numbers from a seed, the same on every machine and in every release.
//!
//! Recordings, models and published figures name the seeds that they were made with, so the sequence of a seed must never
//! change; that is why no library's generator is used, which may promise less. Not for secrets: who sees a few numbers
//! knows all that follow.
//!
//! ```
//! use seeded_random::Random;
//!
//! let mut random = Random::new(7);
//! let dice: Vec<u64> = (0..5).map(|_| 1 + random.below(6)).collect();
//! assert_eq!(dice, { let mut again = Random::new(7); (0..5).map(|_| 1 + again.below(6)).collect::<Vec<_>>() });
//! ```

#![forbid(unsafe_code)]

/// A generator (SplitMix64; Steele, Lea and Flood 2014); equal seeds give equal sequences.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// Spreads a number's bits over all of it: what makes neighbouring states of the generator look unrelated.
#[inline]
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl Random {
    /// A generator that starts from `seed`.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// A generator for item `number` of the sequence that `seed` names.
    pub fn of(seed: u64, number: u64) -> Self {
        let mut generator = Random(seed ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93));
        generator.bits();
        generator
    }

    /// The next 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit` (0 if that is 0).
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        // The high half of a 128-bit product: no division, and no bias that a test could see.
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from 0 up to but not including 1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Fills a buffer.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            let bytes = self.bits().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        let mut random = Random::new(1_234_567);
        assert_eq!(random.bits(), 6_457_827_717_110_365_317);
        assert_eq!(random.bits(), 3_203_168_211_198_807_973);
    }

    /// What is drawn from the bits is a part of the promise: recordings were made with it.
    #[test]
    fn what_is_drawn_stays_the_same() {
        let mut random = Random::of(42, 3);
        let drawn = [random.below(1000), random.below(1000), random.below(1 << 40)];
        assert_eq!(drawn, [25, 716, 324_653_795_664]);
        assert!((0..1000).all(|_| random.below(10) < 10));
        assert_eq!(random.below(0), 0);
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.unit())));
        let mut bytes = [0; 11];
        Random::new(1_234_567).fill(&mut bytes);
        assert_eq!(bytes[..8], 6_457_827_717_110_365_317u64.to_le_bytes());
        assert_eq!(bytes[8..], 3_203_168_211_198_807_973u64.to_le_bytes()[..3]);
    }
}
