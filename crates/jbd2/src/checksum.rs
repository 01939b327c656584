//! The two checksums of journals.

/// CRC-32C as the kernel's `crc32c(seed, …)`: no inversion at the start, none at the end.
pub fn crc32c(seed: u32, data: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, data)
}

const POLYNOMIAL: u32 = 0x04c1_1db7;

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0u32; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u32) << 24;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000_0000 != 0 { crc << 1 ^ POLYNOMIAL } else { crc << 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before << 8 ^ tables[0][(before >> 24) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

static TABLES: [[u32; 256]; 8] = tables();

/// CRC-32, most significant bit first, as the kernel's `crc32_be(seed, …)`: no inversion at either end.
/// Used by the first kind of journal checksum (compat bit 0x1) only.
pub fn crc32_be(seed: u32, data: &[u8]) -> u32 {
    let mut crc = seed;
    let mut words = data.chunks_exact(8);
    for word in &mut words {
        let high = crc ^ u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
        crc = TABLES[7][(high >> 24) as usize]
            ^ TABLES[6][(high >> 16 & 0xff) as usize]
            ^ TABLES[5][(high >> 8 & 0xff) as usize]
            ^ TABLES[4][(high & 0xff) as usize]
            ^ TABLES[3][word[4] as usize]
            ^ TABLES[2][word[5] as usize]
            ^ TABLES[1][word[6] as usize]
            ^ TABLES[0][word[7] as usize];
    }
    for byte in words.remainder() {
        crc = crc << 8 ^ TABLES[0][(crc >> 24 ^ u32::from(*byte)) as usize];
    }
    crc
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
