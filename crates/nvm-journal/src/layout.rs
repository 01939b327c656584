//! What a region looks like (the paper's section III-B): superblock, reserved headers, headers, checksums, blocks.
//!
//! ```text
//! 0        superblock: geometry, pointers, who owns the region                     4096 bytes
//! 4096     256 reserved headers: copies of headers that garbage collection moves   4096 bytes
//! 8192     headers, 16 bytes for each journal block                                whole pages
//!          checksums, 4 bytes for each journal block (CRC-32C of its content)      whole pages
//!          journal blocks
//! ```
//!
//! A header is two words. A valid one has both; either word being [`GONE`] makes it invalid, so that a header can be taken
//! away by two stores that become durable in any order, and half a header is never taken for a whole one. A word of zeros
//! is damage: a medium that has lost a line and reads as zeros must not take a committed version away unnoticed. The same
//! goes for checksums: that none is kept is a value of its own.
//!
//! ```text
//! word 0   present 1 | check 15 | home block 48
//! word 1   transaction 32 | present 1 | 0 | kind 2 | journal block 28
//! ```
//!
//! The transaction number says which of several versions of a home block is the latest. The paper keeps a tag for that;
//! a number needs no second store when a version grows old, and orders versions that garbage collection has moved.
//!
//! All words are little-endian. What is read here may be damaged: nothing panics on it.

use crate::error::Error;
use crate::medium::word_of;

/// Bytes of a page; the superblock has one.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of a header.
pub const HEADER_BYTES: u64 = 16;
/// Reserved headers: together as large as a journal block of 4096 bytes.
pub const RESERVED_HEADERS: u32 = 256;
/// Journal blocks that a region can have: 28 bits.
pub const BLOCKS_MAX: u64 = 1 << 28;
/// Home blocks have numbers of 48 bits.
pub const HOME_BLOCKS_MAX: u64 = 1 << 48;
/// The fewest journal blocks with which anything can be done.
pub const BLOCKS_MIN: u64 = 16;

/// "AMBRNJS1".
pub const MAGIC: u64 = u64::from_le_bytes(*b"AMBRNJS1");

/// "AMBRFMT1": formatting was cut off, and nothing is there.
pub const MAGIC_UNFINISHED: u64 = u64::from_le_bytes(*b"AMBRFMT1");

/// Where in the superblock things are, in bytes.
pub(crate) mod field {
    /// The geometry: eight words, the last of them the CRC-32C of the others ([`super::Geometry::words`]).
    pub const MAGIC: u64 = 0x00;
    /// End of the checkpoint area and last committed transaction (`p_checkpoint`).
    pub const CHECKPOINT: u64 = 0x40;
    /// End of the commit area (`p_commit`).
    pub const COMMIT: u64 = 0x48;
    /// What a transaction number is short of the guest's sequence number.
    pub const SEQUENCE_BASE: u64 = 0x50;
    /// End of the commit area and number of a transaction that counts on a condition ([`crate::Journal::prepare`]); of none, and of one that
    /// was published since, where that is not the next one after the checkpoint area's.
    pub const PREPARED: u64 = 0x58;
    /// The first journal block of that condition.
    pub const CONDITION: u64 = 0x60;
    /// Epoch, and which owner record is valid.
    pub const OWNER: u64 = 0x80;
    /// Two owner records of 128 bytes and their attachments of 1024.
    pub const RECORDS: [u64; 2] = [0x100, 0x200];
    pub const ATTACHMENTS: [u64; 2] = [0x800, 0xc00];
}

/// Either word of a header that holds nothing: neither bit that is set in every valid word is set in it.
pub(crate) const GONE: u64 = u64::from_le_bytes(*b"gonegone");

/// What stands where no transaction is prepared. (A medium that has lost this line has lost the checkpoint area's pointer, too.)
pub(crate) const NONE_PREPARED: u64 = 0;

/// Each journal block of a condition begins with the number of the next one, the length of what it has of the condition, the transaction
/// and a checksum: 4 bytes each.
pub(crate) const CONDITION_HEAD_BYTES: usize = 16;

/// The checksum of a journal block of a condition: of all of it but the checksum's own place.
pub(crate) fn condition_checksum(block: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&block[..12]), &block[CONDITION_HEAD_BYTES..])
}

/// Where a checksum would be, if none is kept.
pub(crate) const NO_CHECKSUM: u32 = u32::MAX;

/// What is kept of a content to tell damage by: its CRC-32C, which has no value for [`NO_CHECKSUM`].
pub(crate) fn checksum_of_content(content: &[u8]) -> u32 {
    proper_checksum(crc32c::crc32c(content))
}

/// A checksum as it is kept: never the value that stands for none.
pub(crate) fn proper_checksum(checksum: u32) -> u32 {
    match checksum {
        NO_CHECKSUM => 0,
        checksum => checksum,
    }
}

const VERSION: u64 = 2;

/// Sizes and places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a journal block, which is a block of the file system: a power of two from 512 to 65536.
    pub block_bytes: u32,
    /// Number of journal blocks, and of headers.
    pub blocks: u32,
    /// First byte of the region in its device.
    pub region_offset: u64,
    /// Bytes of the region.
    pub region_bytes: u64,
    /// Random, made when the region was formatted.
    pub identity: u128,
}

impl Geometry {
    /// Fills a region with as many blocks as there is room for.
    ///
    /// # Errors
    /// [`Error::Refused`] when there is room for fewer than [`BLOCKS_MIN`].
    pub fn fill(region_offset: u64, region_bytes: u64, block_bytes: u32, identity: u128) -> Result<Self, Error> {
        if !block_bytes.is_power_of_two() || !(512..=65536).contains(&block_bytes) {
            return Err(Error::refused(format!(
                "a file system with blocks of {block_bytes} bytes cannot use a region"
            )));
        }
        let each = HEADER_BYTES + 4 + u64::from(block_bytes);
        // Headers and checksums take whole pages each.
        let blocks = (region_bytes.saturating_sub(4 * PAGE_BYTES) / each).min(BLOCKS_MAX);
        if blocks < BLOCKS_MIN {
            return Err(Error::refused(format!(
                "the NVM region of {region_bytes} bytes is too small: it holds {blocks} blocks of {block_bytes} bytes"
            )));
        }
        Ok(Geometry { block_bytes, blocks: blocks as u32, region_offset, region_bytes, identity })
    }

    /// Where reserved header `index` is.
    pub fn reserved(&self, index: u32) -> u64 {
        PAGE_BYTES + u64::from(index) * HEADER_BYTES
    }

    /// Where header `index` is.
    pub fn header(&self, index: u32) -> u64 {
        2 * PAGE_BYTES + u64::from(index) * HEADER_BYTES
    }

    fn checksums(&self) -> u64 {
        2 * PAGE_BYTES + (u64::from(self.blocks) * HEADER_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Where the checksum of journal block `block` is.
    pub fn checksum(&self, block: u32) -> u64 {
        self.checksums() + u64::from(block) * 4
    }

    /// Where journal block `block` is.
    pub fn block(&self, block: u32) -> u64 {
        let first = self.checksums() + (u64::from(self.blocks) * 4).next_multiple_of(PAGE_BYTES);
        first + u64::from(block) * u64::from(self.block_bytes)
    }

    pub(crate) fn end(&self) -> u64 {
        self.block(self.blocks)
    }

    /// The superblock's geometry as words, the magic number first.
    pub(crate) fn words(&self) -> [u64; 8] {
        let mut words = [
            MAGIC,
            VERSION | u64::from(self.block_bytes) << 32,
            u64::from(self.blocks),
            self.region_offset,
            self.region_bytes,
            self.identity as u64,
            (self.identity >> 64) as u64,
            0,
        ];
        words[7] = u64::from(checksum_of_words(&words[..7]));
        words
    }

    /// Reads the geometry of a region. Nothing where there is none. It may have been longer ([`Geometry::check_fits`]).
    ///
    /// # Errors
    /// [`Error::Refused`] when there is one that is damaged or not known.
    pub fn read(region: &[u8]) -> Result<Option<Self>, Error> {
        if (region.len() as u64) < 2 * PAGE_BYTES || word_of(region, field::MAGIC) != MAGIC {
            return Ok(None);
        }
        Self::decode(region).map(Some)
    }

    /// Reads the geometry that a superblock says.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is damaged or not known.
    pub(crate) fn decode(superblock: &[u8]) -> Result<Self, Error> {
        let words = words_in(superblock);
        if !are_whole(&words) {
            return Err(Error::refused("the superblock of the NVM region is damaged: its checksum does not match"));
        }
        let version = words[1] & 0xffff_ffff;
        if version != VERSION {
            return Err(Error::refused(format!(
                "the NVM region has format {version}, and this amberlog knows {VERSION}: use the one that made it"
            )));
        }
        let geometry = Geometry {
            block_bytes: (words[1] >> 32) as u32,
            blocks: u32::try_from(words[2]).unwrap_or(u32::MAX),
            region_offset: words[3],
            region_bytes: words[4],
            identity: u128::from(words[5]) | u128::from(words[6]) << 64,
        };
        let is_possible = geometry.block_bytes.is_power_of_two()
            && (512..=65536).contains(&geometry.block_bytes)
            && (BLOCKS_MIN..=BLOCKS_MAX).contains(&words[2])
            && geometry.end() <= geometry.region_bytes;
        if !is_possible {
            return Err(Error::refused("the superblock of the NVM region says sizes that cannot be"));
        }
        Ok(geometry)
    }

    /// How long the region of a superblock is, if that can be told.
    pub(crate) fn len_in(superblock: &[u8]) -> Option<u64> {
        let words = words_in(superblock);
        are_whole(&words).then_some(words[4])
    }

    /// Whether all of a region is there. Of one that is free nothing is missed.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is not.
    pub fn check_fits(&self, region: &[u8]) -> Result<(), Error> {
        if self.region_bytes <= region.len() as u64 {
            return Ok(());
        }
        Err(Error::refused(format!(
            "the NVM region had {} bytes when it was made, and has {} now: give it its size back, or name it as it was cut then \
             (nvm-region=INDEX/COUNT, recover --nvm-region)",
            self.region_bytes,
            region.len()
        )))
    }
}

/// The words of a superblock's geometry.
fn words_in(superblock: &[u8]) -> [u64; 8] {
    std::array::from_fn(|index| word_of(superblock, index as u64 * 8))
}

fn are_whole(words: &[u64; 8]) -> bool {
    words[7] == u64::from(checksum_of_words(&words[..7]))
}

fn checksum_of_words(words: &[u64]) -> u32 {
    words.iter().fold(0, |checksum, word| crc32c::crc32c_append(checksum, &word.to_le_bytes()))
}

/// What a header stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderKind {
    /// A version of a home block.
    Version,
    /// No version of the home block that is older counts.
    Revoke,
}

/// A valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it stands for.
    pub kind: HeaderKind,
    /// The block of the file system.
    pub home: u64,
    /// The transaction that it belongs to.
    pub transaction: u32,
    /// The journal block with the content.
    pub block: u32,
}

/// What a header's two words say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderState {
    /// Nothing, or half of something.
    Invalid,
    /// A header.
    Valid(Header),
    /// Two halves that do not belong together: the region is damaged.
    Damaged,
}

impl Header {
    const PRESENT: u64 = 1 << 63;
    const HOME_MASK: u64 = HOME_BLOCKS_MAX - 1;

    /// Its two words.
    pub fn encode(&self) -> [u64; 2] {
        let kind = match self.kind {
            HeaderKind::Version => 1,
            HeaderKind::Revoke => 2,
        };
        let second = u64::from(self.transaction) << 32 | 1 << 31 | kind << 28 | u64::from(self.block);
        [Self::PRESENT | Self::check(self.home, second) << 48 | self.home & Self::HOME_MASK, second]
    }

    fn check(home: u64, second: u64) -> u64 {
        u64::from(checksum_of_words(&[home & Self::HOME_MASK, second])) & 0x7fff
    }

    /// Reads two words.
    pub fn decode([first, second]: [u64; 2], geometry: &Geometry) -> HeaderState {
        if first == GONE || second == GONE {
            return HeaderState::Invalid;
        }
        let home = first & Self::HOME_MASK;
        let block = second as u32 & (BLOCKS_MAX as u32 - 1);
        let kind = match second >> 28 & 3 {
            1 => HeaderKind::Version,
            2 => HeaderKind::Revoke,
            _ => return HeaderState::Damaged,
        };
        let is_whole = first & Self::PRESENT != 0
            && second & 1 << 31 != 0
            && first >> 48 & 0x7fff == Self::check(home, second)
            && block < geometry.blocks;
        if !is_whole {
            return HeaderState::Damaged;
        }
        HeaderState::Valid(Header { kind, home, transaction: (second >> 32) as u32, block })
    }

    /// Reads the header at byte `offset` of a region.
    pub fn read(region: &[u8], offset: u64, geometry: &Geometry) -> HeaderState {
        Self::decode([word_of(region, offset), word_of(region, offset + 8)], geometry)
    }
}

/// A pointer of the superblock: where an area ends, and the transaction that is in it up to there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pointer {
    /// Number of headers before the area's end: 28 bits.
    pub end: u32,
    /// The last transaction.
    pub transaction: u32,
}

impl Pointer {
    /// Its word: `check 4 | transaction 32 | end 28`. The check is in the word itself, which changes as a whole.
    pub fn encode(&self) -> u64 {
        let bits = u64::from(self.transaction) << 28 | u64::from(self.end) & (BLOCKS_MAX - 1);
        bits | Self::check(bits) << 60
    }

    /// Reads a word.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is damaged.
    pub fn decode(word: u64) -> Result<Self, Error> {
        let bits = word & ((1 << 60) - 1);
        if word >> 60 != Self::check(bits) {
            return Err(Error::refused(
                "the NVM region is damaged: a pointer of its superblock does not match its check",
            ));
        }
        Ok(Pointer { end: (bits & (BLOCKS_MAX - 1)) as u32, transaction: (bits >> 28) as u32 })
    }

    /// All nibbles together; never right for a word of zeros.
    fn check(bits: u64) -> u64 {
        (0..15).fold(0xa, |check, nibble| check ^ bits >> (nibble * 4) & 0xf)
    }
}

/// Half a word, and the same again inverted.
pub(crate) fn doubled(value: u32) -> u64 {
    u64::from(value) | u64::from(!value) << 32
}

/// Reads what [`doubled`] made; nothing when it is damaged.
pub(crate) fn undoubled(word: u64) -> Option<u32> {
    (word as u32 == !(word >> 32) as u32).then_some(word as u32)
}

/// Whether transaction `a` is later than `b`. Numbers go round; those that are compared are less than half a round apart.
pub fn is_later(a: u32, b: u32) -> bool {
    a != b && a.wrapping_sub(b) < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry::fill(0, 1 << 20, 4096, 7).expect("room")
    }

    #[test]
    fn parts_are_apart_and_inside() {
        for bytes in [100_000, 1 << 20, 128 << 20] {
            for block_bytes in [512, 1024, 4096, 65536] {
                let Ok(geometry) = Geometry::fill(0, bytes, block_bytes, 1) else { continue };
                assert!(geometry.reserved(RESERVED_HEADERS) <= geometry.header(0));
                assert!(geometry.header(geometry.blocks) <= geometry.checksum(0));
                assert!(geometry.checksum(geometry.blocks) <= geometry.block(0));
                assert!(geometry.end() <= bytes);
                assert!(geometry.block(0).is_multiple_of(PAGE_BYTES));
            }
        }
        assert!(Geometry::fill(0, 40_000, 4096, 1).is_err_and(|error| error.is_refusal()));
    }

    #[test]
    fn headers_come_back_and_halves_are_invalid() {
        let geometry = geometry();
        for kind in [HeaderKind::Version, HeaderKind::Revoke] {
            for (home, transaction, block) in [(0, 0, 0), (HOME_BLOCKS_MAX - 1, u32::MAX, geometry.blocks - 1)] {
                let header = Header { kind, home, transaction, block };
                let [first, second] = header.encode();
                assert_eq!(Header::decode([first, second], &geometry), HeaderState::Valid(header));
                assert_eq!(Header::decode([GONE, second], &geometry), HeaderState::Invalid);
                assert_eq!(Header::decode([first, GONE], &geometry), HeaderState::Invalid);
                for zeroed in [[0, second], [first, 0], [0, 0]] {
                    assert_eq!(Header::decode(zeroed, &geometry), HeaderState::Damaged);
                }
                for bit in 0..64 {
                    for damaged in [[first ^ 1 << bit, second], [first, second ^ 1 << bit]] {
                        assert_ne!(Header::decode(damaged, &geometry), HeaderState::Valid(header));
                    }
                }
            }
        }
        let beyond = Header { kind: HeaderKind::Version, home: 1, transaction: 1, block: geometry.blocks };
        assert_eq!(Header::decode(beyond.encode(), &geometry), HeaderState::Damaged);
    }

    #[test]
    fn a_superblock_comes_back_and_damage_is_seen() {
        let geometry = geometry();
        let mut region = vec![0; 1 << 20];
        assert!(matches!(Geometry::read(&region), Ok(None)));
        for (index, word) in geometry.words().iter().enumerate() {
            region[index * 8..index * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        assert_eq!(Geometry::read(&region).expect("whole"), Some(geometry));
        assert!(geometry.check_fits(&region).is_ok());
        assert!(geometry.check_fits(&region[..1 << 19]).is_err_and(|error| error.is_refusal()), "cut off");
        for byte in 8..64 {
            region[byte] ^= 0x10;
            assert!(Geometry::read(&region).is_err_and(|error| error.is_refusal()), "byte {byte}");
            region[byte] ^= 0x10;
        }
    }

    #[test]
    fn transaction_numbers_go_round() {
        assert!(is_later(1, 0) && is_later(0, u32::MAX) && !is_later(5, 5) && !is_later(0, 1));
    }
}
