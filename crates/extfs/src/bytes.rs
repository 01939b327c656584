//! Little-endian numbers out of bytes, and the two CRCs.

pub(crate) fn le16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

pub(crate) fn le32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]])
}

pub(crate) fn le64(bytes: &[u8], offset: usize) -> u64 {
    u64::from(le32(bytes, offset + 4)) << 32 | u64::from(le32(bytes, offset))
}

pub(crate) fn uuid(bytes: &[u8], offset: usize) -> [u8; 16] {
    std::array::from_fn(|index| bytes[offset + index])
}

/// CRC-32C as ext4 uses it: no inversion at either end.
pub(crate) fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}

/// The CRC-32 of GPT (and zlib).
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    const CRC_32: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
    CRC_32.checksum(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(!crc32c(!0, b"123456789"), 0xe306_9283);
        assert_eq!(le64(&[1, 0, 0, 0, 2, 0, 0, 0], 0), 0x2_0000_0001);
        assert_eq!(le16(&[1, 2], 0), 0x201);
    }
}
