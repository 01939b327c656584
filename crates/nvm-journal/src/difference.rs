//! The checksum of a block that differs from a known one in a few lines, without reading the rest.
//!
//! A CRC is linear: of two contents of one length, the checksums differ by the CRC (begun at zero) of what the contents
//! differ by. A line's share of that is its own CRC times x to the power of the bits that follow it, modulo the
//! polynomial.
//!
//! Must never be used on a checksum that is not known to be the old content's: what it gives is then wrong, and recovery
//! refuses the block. That is also what makes it safe against a medium that changed the old content behind our back: the
//! new checksum does not match such a block either.

use crate::medium::LINE_BYTES;

/// Castagnoli's polynomial, lowest power in the highest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;
const LINE: usize = LINE_BYTES as usize;
/// Lines of the largest block, 64 KiB.
const LINES_MAX: usize = (64 << 10) / LINE;
/// Beyond so many lines the whole block is as quickly read.
const LINES_CHANGED_MAX: u32 = 8;

/// The product of two polynomials, modulo the polynomial.
const fn multiply(mut a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 1 << 31;
    while bit != 0 {
        if b & bit != 0 {
            product ^= a;
        }
        bit >>= 1;
        a = (a >> 1) ^ (POLYNOMIAL & (a & 1).wrapping_neg());
    }
    product
}

/// x to the power of the bits in 0, 1, 2 … lines.
static POWERS: [u32; LINES_MAX] = {
    let mut line = 1 << 31;
    let mut count = 0;
    while count < LINE * 8 {
        line = multiply(line, 1 << 30);
        count += 1;
    }
    let mut powers = [1 << 31; LINES_MAX];
    let mut index = 1;
    while index < LINES_MAX {
        powers[index] = multiply(powers[index - 1], line);
        index += 1;
    }
    powers
};

/// By what the checksum of a block changes, line by line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChecksumChange {
    change: u32,
    lines: u32,
}

impl ChecksumChange {
    /// A line was `known`, and is `line`; so many lines of the block follow.
    pub fn add(&mut self, known: &[u8], line: &[u8], lines_after: usize) {
        self.lines += 1;
        if self.lines > LINES_CHANGED_MAX {
            return;
        }
        let mut differs = [0; LINE];
        for (differs, (known, line)) in differs.iter_mut().zip(known.iter().zip(line)) {
            *differs = known ^ line;
        }
        // The crate inverts a checksum when it begins and when it ends; a CRC begun at zero does neither.
        let share = !crc32c::crc32c_append(u32::MAX, &differs);
        self.change ^= multiply(share, POWERS[lines_after]);
    }

    /// The new content's checksum from the old content's; nothing if the whole is to be read.
    pub fn apply(self, checksum: u32) -> Option<u32> {
        (self.lines <= LINES_CHANGED_MAX).then_some(checksum ^ self.change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_the_checksum_of_the_whole(
            lines in prop::sample::select(vec![8usize, 64, 1024]),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
            seed in any::<u8>(),
        ) {
            let old: Vec<u8> = (0..lines * LINE).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect();
            let mut new = old.clone();
            for (at, value) in changes {
                let at = at.index(new.len());
                new[at] ^= value;
            }
            let mut change = ChecksumChange::default();
            let mut changed = 0;
            for (index, (known, line)) in old.chunks(LINE).zip(new.chunks(LINE)).enumerate() {
                if known != line {
                    changed += 1;
                    change.add(known, line, lines - 1 - index);
                }
            }
            let expected = (changed <= LINES_CHANGED_MAX).then(|| crc32c::crc32c(&new));
            prop_assert_eq!(change.apply(crc32c::crc32c(&old)), expected);
        }
    }
}
