//! The two checksums of journals.

use crc::{CRC_32_MPEG_2, Crc, Table};

/// CRC-32C as the kernel's `crc32c(seed, …)`: no inversion at the start, none at the end.
pub fn crc32c(seed: u32, data: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, data)
}

/// Sixteen bytes a step.
static CRC_32_BE: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_MPEG_2);

/// CRC-32, most significant bit first, as the kernel's `crc32_be(seed, …)`: no inversion at either end.
/// Used by the first kind of journal checksum (compat bit 0x1) only.
pub fn crc32_be(seed: u32, data: &[u8]) -> u32 {
    let mut digest = CRC_32_BE.digest_with_initial(seed);
    digest.update(data);
    digest.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // The check values of CRC-32C and CRC-32/MPEG-2 over "123456789".
        assert_eq!(!crc32c(!0, b"123456789"), 0xe306_9283);
        assert_eq!(crc32_be(!0, b"123456789"), 0x0376_e6e7);
    }

    /// Bit by bit, from any seed: what a library makes of another initial value is its own affair otherwise.
    #[test]
    fn every_seed_is_the_kernel_s() {
        for seed in [0, 1, !0, 0x8000_0000, 0x1234_5678] {
            for data in [&b""[..], b"a", b"123456789", &[0; 40], &[0xff; 33]] {
                let slow = data.iter().fold(seed, |crc, byte| {
                    (0..8).fold(crc ^ (u32::from(*byte) << 24), |crc, _| (crc << 1) ^ ((crc >> 31) * 0x04c1_1db7))
                });
                assert_eq!(crc32_be(seed, data), slow, "{seed:#x}, {data:?}");
            }
        }
    }

    #[test]
    fn pieces_add_up() {
        let data: Vec<u8> = (0..4099u32).map(|n| (n * 7 + 3) as u8).collect();
        for cut in [0, 1, 8, 13, 4096] {
            let (a, b) = data.split_at(cut);
            assert_eq!(crc32_be(crc32_be(!0, a), b), crc32_be(!0, &data));
            assert_eq!(crc32c(crc32c(!0, a), b), crc32c(!0, &data));
        }
    }
}
