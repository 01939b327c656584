//! What a block that is at home is known by: 128 bits under keys that no guest knows.
//!
//! Every block that goes home, and every block that the guest writes home, is taken through this on the disk's one thread: it has to
//! be fast. So the block is compressed by NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC", CRYPTO 1999) with words of 64
//! bits, twice under keys shifted by a pair (the paper's Toeplitz construction): two blocks of one length that differ, chosen without
//! knowledge of the keys, are the same to it with probability 2^-128. What is left, 32 bytes for each 4 KiB, goes through the keyed
//! hashes of the standard library. Nobody outside ever sees a digest.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Bytes that NH takes at a time.
const CHUNK_BYTES: usize = 4096;
/// Bytes of a pair of words.
const PAIR_BYTES: usize = 16;
/// Words of its key: one for each of a chunk, and a pair for the second pass.
const WORDS: usize = CHUNK_BYTES / 8 + 2;

/// Keys of a process's own.
pub(super) struct Digests {
    outer: [RandomState; 2],
    words: Vec<u64>,
}

impl Digests {
    /// New keys.
    pub fn new() -> Self {
        let random = RandomState::new();
        let words = (0..WORDS).map(|index| random.hash_one(index)).collect();
        Digests { outer: [RandomState::new(), RandomState::new()], words }
    }

    /// The digest of a block's content.
    pub fn of(&self, content: &[u8]) -> [u64; 2] {
        let mut outer = self.outer.each_ref().map(BuildHasher::build_hasher);
        for chunk in content.chunks(CHUNK_BYTES) {
            let (pairs, rest) = chunk.split_at(chunk.len() / PAIR_BYTES * PAIR_BYTES);
            let [first, second] = self.compressed(pairs);
            for hasher in &mut outer {
                hasher.write_u128(first);
                hasher.write_u128(second);
                hasher.write(rest);
            }
        }
        outer.map(|hasher| hasher.finish())
    }

    /// NH of whole pairs, under both keys.
    fn compressed(&self, pairs: &[u8]) -> [u128; 2] {
        let word = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().expect("a pair has two words"));
        let mut sums = [0u128; 2];
        for (pair, keys) in pairs.chunks_exact(PAIR_BYTES).zip(self.words.windows(4).step_by(2)) {
            let (low, high) = (word(pair), word(&pair[8..]));
            let product = |key: &[u64]| u128::from(low.wrapping_add(key[0])) * u128::from(high.wrapping_add(key[1]));
            sums[0] = sums[0].wrapping_add(product(&keys[..2]));
            sums[1] = sums[1].wrapping_add(product(&keys[2..]));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nh_is_the_sum_of_products_of_words_with_their_keys() {
        let mut digests = Digests::new();
        digests.words = (1..=WORDS as u64).map(|word| word << 60 | word).collect();
        let bytes: Vec<u8> = (0..64u32).map(|byte| (byte * 37 + 11) as u8).collect();
        let words: Vec<u64> =
            bytes.chunks(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes"))).collect();
        for (pass, sum) in digests.compressed(&bytes).into_iter().enumerate() {
            let mut expected = 0u128;
            for pair in 0..4 {
                let key = |which: usize| digests.words[2 * pair + which + 2 * pass];
                let low = words[2 * pair].wrapping_add(key(0));
                let high = words[2 * pair + 1].wrapping_add(key(1));
                expected = expected.wrapping_add(u128::from(low) * u128::from(high));
            }
            assert_eq!(sum, expected, "pass {pass}");
        }
    }

    #[test]
    fn each_bit_of_a_block_counts_wherever_it_is() {
        let digests = Digests::new();
        for bytes in [1024, 4096, 16384, 16384 + 24] {
            let mut block = vec![0u8; bytes];
            let (zeros, mut seen) = (digests.of(&block), std::collections::HashSet::new());
            for at in (0..bytes).step_by(7).chain(bytes - 20..bytes) {
                block[at] ^= 1 << (at % 8);
                assert_ne!(digests.of(&block), zeros, "byte {at} of {bytes}");
                seen.insert(digests.of(&block));
                block[at] ^= 1 << (at % 8);
            }
            assert!(seen.len() > bytes / 8, "different blocks have the same digest");
            assert_eq!(digests.of(&block), zeros);
            assert_ne!(Digests::new().of(&block), zeros, "the keys are another process's");
        }
    }

    #[test]
    fn halves_that_change_places_are_another_block() {
        let digests = Digests::new();
        let block: Vec<u8> = (0..8192u32).map(|at| (at % 251) as u8).collect();
        for bytes in [8, 16, 32, 4096] {
            let mut turned = block.clone();
            let (first, second) = turned.split_at_mut(bytes);
            first.swap_with_slice(&mut second[..bytes]);
            assert!(turned == block || digests.of(&turned) != digests.of(&block), "{bytes}");
        }
    }
}
