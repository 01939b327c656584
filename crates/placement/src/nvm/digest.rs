//! What a block that is at home is known by: 128 bits under keys that no guest knows.
//!
//! Every block that goes home, and every block that the guest writes home, is taken through this on the disk's one thread: it has to
//! be fast. So the block is compressed by NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC", CRYPTO 1999) with words of 64
//! bits, twice under keys shifted by a pair (the paper's Toeplitz construction): two blocks of one length that differ, chosen without
//! knowledge of the keys, are the same to it with probability 2^-128. What is left, 32 bytes for each 4 KiB, goes through the keyed
//! hashes of the standard library. Nobody outside ever sees a digest.
//!
//! What another process has to work out again ([`Tree`]) has no standard library's hash in it, whose next version may be another: what is left of the
//! blocks is compressed once more, until that is 32 bytes. Its keys follow from two words that are written down with it.

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
    /// What the words follow from.
    key: [u64; 2],
}

/// Words that follow from a key: two sequences of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), one from each half of it.
fn words_of(key: [u64; 2]) -> Vec<u64> {
    let mixed = |mut word: u64| {
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    };
    let step = 0x9e37_79b9_7f4a_7c15u64;
    let word = |index: u64| {
        let by = step.wrapping_mul(index + 1);
        mixed(key[0].wrapping_add(by)) ^ mixed(mixed(key[1]).wrapping_add(by)).rotate_left(32)
    };
    (0..WORDS as u64).map(word).collect()
}

impl Digests {
    /// New keys.
    pub fn new() -> Self {
        let random = RandomState::new();
        Self::keyed([0, 1].map(|half: u64| random.hash_one(half)))
    }

    /// The same keys for [`Digests::tree`] as those with this key.
    pub fn keyed(key: [u64; 2]) -> Self {
        Digests { outer: [RandomState::new(), RandomState::new()], words: words_of(key), key }
    }

    /// What the keys of a tree follow from.
    pub fn key(&self) -> [u64; 2] {
        self.key
    }

    /// Begins a digest of many blocks.
    pub fn tree(&self) -> Tree<'_> {
        Tree { digests: self, left: Vec::new(), bytes: 0 }
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

/// A digest of blocks, one behind the other, that another process can work out as well.
pub(super) struct Tree<'a> {
    digests: &'a Digests,
    /// What is left of each chunk.
    left: Vec<u8>,
    /// How many bytes there were.
    bytes: u64,
}

impl Tree<'_> {
    /// Adds a block: whole pairs.
    pub fn add(&mut self, content: &[u8]) {
        self.bytes += content.len() as u64;
        for chunk in content.chunks(CHUNK_BYTES) {
            let sums = self.digests.compressed(chunk);
            sums.iter().for_each(|sum| self.left.extend_from_slice(&sum.to_le_bytes()));
        }
    }

    /// The digest.
    pub fn end(mut self) -> [u8; 32] {
        self.left.extend_from_slice(&u128::from(self.bytes).to_le_bytes());
        loop {
            let left = std::mem::take(&mut self.left);
            self.add(&left);
            if let [digest] = self.left.as_chunks::<32>().0 {
                return *digest;
            }
        }
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
