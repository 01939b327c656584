//! The journal superblock: read, judged, and changed in place.
//!
//! [`Superblock::decode`] only reads; [`Superblock::format`] judges and refuses what this crate does not know.
//! [`SuperblockEdit`] changes single fields of a raw superblock and never loses what it does not know.

use crate::bytes::{be32, put_be32};
use crate::checksum::crc32c;
use crate::control::{Header, Kind, MAGIC, peek};
use crate::format::{Checksum, Format};

/// `s_errno` of an input or output error: EIO, negative as jbd2 stores it.
pub const ERRNO_EIO: i32 = -5;

/// Bytes of a journal superblock, whatever the block size (`journal_superblock_t`).
pub const SUPERBLOCK_BYTES: usize = 1024;

pub(crate) mod field {
    pub const BLOCK_SIZE: usize = 0x0c;
    pub const MAXLEN: usize = 0x10;
    pub const FIRST: usize = 0x14;
    pub const SEQUENCE: usize = 0x18;
    pub const START: usize = 0x1c;
    pub const ERRNO: usize = 0x20;
    pub const COMPAT: usize = 0x24;
    pub const INCOMPAT: usize = 0x28;
    pub const RO_COMPAT: usize = 0x2c;
    pub const UUID: usize = 0x30;
    pub const NR_USERS: usize = 0x40;
    pub const CHECKSUM_TYPE: usize = 0x50;
    pub const NUM_FC_BLOCKS: usize = 0x54;
    pub const HEAD: usize = 0x58;
    pub const CHECKSUM: usize = 0xfc;
    pub const USERS: usize = 0x100;
}

/// `s_checksum_type` of journals with checksums of kind 2 or 3: CRC-32C.
pub(crate) const CHECKSUM_TYPE_CRC32C: u8 = 4;
const DEFAULT_FAST_COMMIT_BLOCKS: u32 = 256;

/// The feature bits of a journal. All zero for a version 1 superblock, whatever its bytes say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// `s_feature_compat`.
    pub compat: u32,
    /// `s_feature_incompat`.
    pub incompat: u32,
    /// `s_feature_ro_compat`.
    pub ro_compat: u32,
}

impl Features {
    /// compat: one checksum per transaction.
    pub const COMPAT_CHECKSUM: u32 = 0x1;
    /// incompat: revoke blocks.
    pub const REVOKE: u32 = 0x1;
    /// incompat: 64-bit block numbers.
    pub const WIDE: u32 = 0x2;
    /// incompat: commit blocks are not ordered after the blocks they commit.
    pub const ASYNC_COMMIT: u32 = 0x4;
    /// incompat: checksums of kind 2.
    pub const CSUM_V2: u32 = 0x8;
    /// incompat: checksums of kind 3.
    pub const CSUM_V3: u32 = 0x10;
    /// incompat: a fast-commit area.
    pub const FAST_COMMIT: u32 = 0x20;
    /// All incompat bits that are known.
    pub const KNOWN_INCOMPAT: u32 = 0x3f;

    /// Whether incompat bit(s) `bits` are set.
    pub fn has(&self, bits: u32) -> bool {
        self.incompat & bits != 0
    }
}

/// Why a journal superblock is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// Fewer bytes than a superblock has.
    #[error("the journal superblock is cut short: {0} bytes of 1024")]
    Short(usize),
    /// Not a journal superblock.
    #[error("the journal superblock does not begin with the journal's magic number")]
    Magic,
    /// A journal block, but of another kind.
    #[error("the journal superblock has block type {0}, which is neither version 1 (3) nor version 2 (4)")]
    Kind(u32),
    /// An impossible block size.
    #[error("the journal superblock gives a block size of {0} bytes, which no ext3 or ext4 journal has")]
    BlockSize(u32),
    /// First block and length contradict each other.
    #[error("the journal superblock puts the log's first block at {first} in a journal of {maxlen} blocks")]
    Bounds {
        /// `s_first`.
        first: u32,
        /// `s_maxlen`.
        maxlen: u32,
    },
    /// Feature bits that are not known.
    #[error("the journal has features that are not known (incompat {incompat:#x}, ro_compat {ro_compat:#x})")]
    UnknownFeatures {
        /// The unknown incompat bits.
        incompat: u32,
        /// The unknown ro_compat bits: all of them.
        ro_compat: u32,
    },
    /// More than one kind of checksum.
    #[error(
        "the journal superblock claims more than one kind of checksum (compat {compat:#x}, incompat {incompat:#x})"
    )]
    ChecksumKinds {
        /// `s_feature_compat`.
        compat: u32,
        /// `s_feature_incompat`.
        incompat: u32,
    },
    /// A checksum algorithm that is not known.
    #[error("the journal superblock names checksum algorithm {0}; only 4 (CRC-32C) is known")]
    ChecksumType(u8),
    /// The superblock's own checksum does not match.
    #[error("the journal superblock's checksum is {stored:#010x} but should be {computed:#010x}")]
    Checksum {
        /// As stored.
        stored: u32,
        /// As it should be.
        computed: u32,
    },
    /// A fast-commit area that leaves no room for the log.
    #[error("the journal superblock reserves {blocks} of {maxlen} blocks for fast commits, which leaves no log")]
    FastCommitArea {
        /// Blocks reserved.
        blocks: u32,
        /// `s_maxlen`.
        maxlen: u32,
    },
}

fn computed_checksum(raw: &[u8]) -> u32 {
    let crc = crc32c(!0, &raw[..field::CHECKSUM]);
    crc32c(crc32c(crc, &[0; 4]), &raw[field::CHECKSUM + 4..SUPERBLOCK_BYTES])
}

/// The fields of a journal superblock, as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// 1 or 2.
    pub version: u8,
    /// `s_blocksize`, bytes.
    pub block_size: u32,
    /// `s_maxlen`, blocks.
    pub maxlen: u32,
    /// `s_first`: first block of the log.
    pub first: u32,
    /// `s_sequence`: sequence number of the first transaction in the log.
    pub sequence: u32,
    /// `s_start`: block where the first transaction begins; 0 when the log is empty.
    pub start: u32,
    /// `s_errno`: an error that the file system must be told of at the next mount; 0 when there is none.
    pub errno: i32,
    /// Feature bits; none in version 1.
    pub features: Features,
    /// `s_uuid`; zero in version 1.
    pub uuid: [u8; 16],
    /// `s_nr_users`: file systems that use an external journal.
    pub nr_users: u32,
    /// `s_users[0]`: UUID of the first of them.
    pub first_user: [u8; 16],
    /// `s_checksum_type`.
    pub checksum_type: u8,
    /// `s_num_fc_blks`, as stored (0 means 256 when there is a fast-commit area).
    pub num_fc_blocks: u32,
    /// `s_head`: where a clean unmount left the log's head (Linux 6.3 and newer); 0 when not recorded.
    pub head: u32,
    /// `s_checksum`, as stored.
    pub checksum: u32,
    /// What `s_checksum` should be, if the journal has checksums of kind 2 or 3.
    pub checksum_computed: u32,
}

impl Superblock {
    /// Reads the fields, of any journal superblock that begins like one.
    ///
    /// # Errors
    /// Only when it is not a journal superblock at all.
    pub fn decode(raw: &[u8]) -> Result<Self, SuperblockError> {
        if raw.len() < SUPERBLOCK_BYTES {
            return Err(SuperblockError::Short(raw.len()));
        }
        let version = match peek(raw) {
            Some(Header { kind: Kind::SuperblockV1, .. }) => 1,
            Some(Header { kind: Kind::SuperblockV2, .. }) => 2,
            Some(header) => return Err(SuperblockError::Kind(header.kind.number())),
            None => return Err(SuperblockError::Magic),
        };
        let uuid = |offset: usize| -> [u8; 16] { std::array::from_fn(|index| raw[offset + index]) };
        let mut superblock = Superblock {
            version,
            block_size: be32(raw, field::BLOCK_SIZE),
            maxlen: be32(raw, field::MAXLEN),
            first: be32(raw, field::FIRST),
            sequence: be32(raw, field::SEQUENCE),
            start: be32(raw, field::START),
            errno: be32(raw, field::ERRNO) as i32,
            features: Features::default(),
            uuid: [0; 16],
            nr_users: 0,
            first_user: [0; 16],
            checksum_type: 0,
            num_fc_blocks: 0,
            head: 0,
            checksum: 0,
            checksum_computed: 0,
        };
        if version == 2 {
            superblock.features = Features {
                compat: be32(raw, field::COMPAT),
                incompat: be32(raw, field::INCOMPAT),
                ro_compat: be32(raw, field::RO_COMPAT),
            };
            superblock.uuid = uuid(field::UUID);
            superblock.nr_users = be32(raw, field::NR_USERS);
            superblock.first_user = uuid(field::USERS);
            superblock.checksum_type = raw[field::CHECKSUM_TYPE];
            superblock.num_fc_blocks = be32(raw, field::NUM_FC_BLOCKS);
            superblock.head = be32(raw, field::HEAD);
            superblock.checksum = be32(raw, field::CHECKSUM);
            superblock.checksum_computed = computed_checksum(raw);
        }
        Ok(superblock)
    }

    /// Reads a superblock and judges it: what this returns can be replayed.
    ///
    /// # Errors
    /// A sentence that says what is wrong or not known.
    pub fn parse(raw: &[u8]) -> Result<(Self, Format), SuperblockError> {
        let superblock = Self::decode(raw)?;
        let format = superblock.format()?;
        Ok((superblock, format))
    }

    /// Judges the superblock and works out the layout of the journal.
    ///
    /// The rules are those of `journal_get_superblock` (Linux 6.x) and `e2fsck_journal_load`; where e2fsck repairs, this
    /// refuses.
    ///
    /// # Errors
    /// A sentence that says what is wrong or not known.
    pub fn format(&self) -> Result<Format, SuperblockError> {
        let features = self.features;
        let unknown = features.incompat & !Features::KNOWN_INCOMPAT;
        if unknown != 0 || features.ro_compat != 0 {
            return Err(SuperblockError::UnknownFeatures { incompat: unknown, ro_compat: features.ro_compat });
        }
        let checksum = self.checksum_kind()?;
        if matches!(checksum, Checksum::V2 | Checksum::V3) {
            if self.checksum_type != CHECKSUM_TYPE_CRC32C {
                return Err(SuperblockError::ChecksumType(self.checksum_type));
            }
            if self.checksum != self.checksum_computed {
                return Err(SuperblockError::Checksum { stored: self.checksum, computed: self.checksum_computed });
            }
        }
        if !(1024..=65536).contains(&self.block_size) || !self.block_size.is_power_of_two() {
            return Err(SuperblockError::BlockSize(self.block_size));
        }
        if self.first == 0 || self.first >= self.maxlen {
            return Err(SuperblockError::Bounds { first: self.first, maxlen: self.maxlen });
        }
        let mut last = self.maxlen;
        if features.has(Features::FAST_COMMIT) {
            let blocks = if self.num_fc_blocks == 0 { DEFAULT_FAST_COMMIT_BLOCKS } else { self.num_fc_blocks };
            last = self.maxlen.saturating_sub(blocks);
            if last <= self.first {
                return Err(SuperblockError::FastCommitArea { blocks, maxlen: self.maxlen });
            }
        }
        Ok(Format {
            block_size: self.block_size,
            checksum,
            seed: crc32c(!0, &self.uuid),
            wide: features.has(Features::WIDE),
            async_commit: features.has(Features::ASYNC_COMMIT),
            first: self.first,
            last,
            length: self.maxlen,
            fast_commit: features.has(Features::FAST_COMMIT),
        })
    }

    fn checksum_kind(&self) -> Result<Checksum, SuperblockError> {
        let Features { compat, incompat, .. } = self.features;
        let v1 = compat & Features::COMPAT_CHECKSUM != 0;
        let v2 = incompat & Features::CSUM_V2 != 0;
        let v3 = incompat & Features::CSUM_V3 != 0;
        match (v1, v2, v3) {
            (false, false, false) => Ok(Checksum::None),
            (true, false, false) => Ok(Checksum::V1),
            (false, true, false) => Ok(Checksum::V2),
            (false, false, true) => Ok(Checksum::V3),
            _ => Err(SuperblockError::ChecksumKinds { compat, incompat }),
        }
    }

    /// Whether the log holds nothing.
    pub fn is_empty(&self) -> bool {
        self.start == 0
    }
}

/// Changes fields of a raw journal superblock in place. Call [`SuperblockEdit::seal`] last.
///
/// # Examples
/// What a replay does at its end: the log is empty, and goes on with a later transaction.
/// ```
/// use jbd2::build::SuperblockBuilder;
/// use jbd2::{Checksum, Superblock, SuperblockEdit, SuperblockError};
///
/// let mut raw = SuperblockBuilder { start: 12, sequence: 7, ..Default::default() }.checksum(Checksum::V3).build();
/// SuperblockEdit::new(&mut raw)?.start(0).sequence(9).seal();
/// let (superblock, _) = Superblock::parse(&raw)?;
/// assert!(superblock.is_empty());
/// assert_eq!(superblock.sequence, 9);
///
/// // What was changed and not sealed is taken for damage.
/// SuperblockEdit::new(&mut raw)?.errno(-5);
/// assert!(matches!(Superblock::parse(&raw), Err(SuperblockError::Checksum { .. })));
/// # Ok::<(), SuperblockError>(())
/// ```
#[derive(Debug)]
pub struct SuperblockEdit<'a> {
    raw: &'a mut [u8],
}

impl<'a> SuperblockEdit<'a> {
    /// Begins to change `raw`, which must be a journal superblock.
    ///
    /// # Errors
    /// When it is not one.
    pub fn new(raw: &'a mut [u8]) -> Result<Self, SuperblockError> {
        Superblock::decode(raw)?;
        Ok(SuperblockEdit { raw })
    }

    /// Sets `s_start`; 0 says that the log is empty.
    pub fn start(&mut self, start: u32) -> &mut Self {
        put_be32(self.raw, field::START, start);
        self
    }

    /// Sets `s_sequence`.
    pub fn sequence(&mut self, sequence: u32) -> &mut Self {
        put_be32(self.raw, field::SEQUENCE, sequence);
        self
    }

    /// Sets `s_errno`.
    pub fn errno(&mut self, errno: i32) -> &mut Self {
        put_be32(self.raw, field::ERRNO, errno as u32);
        self
    }

    /// Computes the checksum anew, if this journal's superblock has one.
    pub fn seal(&mut self) {
        let raw = &mut *self.raw;
        let is_v2 = matches!(peek(raw), Some(Header { kind: Kind::SuperblockV2, .. }));
        let checksums = Features::CSUM_V2 | Features::CSUM_V3;
        if is_v2 && be32(raw, field::INCOMPAT) & checksums != 0 {
            let checksum = computed_checksum(raw);
            put_be32(raw, field::CHECKSUM, checksum);
        }
        debug_assert_eq!(be32(raw, 0), MAGIC);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::SuperblockBuilder;

    fn sample() -> SuperblockBuilder {
        SuperblockBuilder { maxlen: 1024, sequence: 7, start: 12, ..SuperblockBuilder::default() }
    }

    #[test]
    fn fields_come_back() {
        let raw = SuperblockBuilder {
            errno: -5,
            uuid: [9; 16],
            nr_users: 1,
            first: 2,
            head: 77,
            features: Features { compat: 0, incompat: Features::REVOKE | Features::WIDE, ro_compat: 0 },
            ..sample()
        }
        .checksum(Checksum::V3)
        .build();
        let (superblock, format) = Superblock::parse(&raw).expect("valid");
        assert_eq!(superblock.errno, -5);
        assert_eq!(superblock.uuid, [9; 16]);
        assert_eq!((superblock.first, superblock.head, superblock.sequence, superblock.start), (2, 77, 7, 12));
        assert_eq!(format.checksum, Checksum::V3);
        assert!(format.wide && !format.async_commit);
        assert_eq!((format.first, format.last, format.length), (2, 1024, 1024));
        assert_eq!(format.seed, crc32c(!0, &[9; 16]));
    }

    #[test]
    fn version_1_has_no_features() {
        let mut raw = SuperblockBuilder { version: 1, ..sample() }.build();
        raw[field::INCOMPAT..field::INCOMPAT + 4].fill(0xff);
        let (superblock, format) = Superblock::parse(&raw).expect("valid");
        assert_eq!(superblock.features, Features::default());
        assert_eq!(format.tag_bytes(), 8);
    }

    #[test]
    fn what_is_wrong_is_refused() {
        let refuse = |builder: SuperblockBuilder| Superblock::parse(&builder.build()).expect_err("refused");
        let features = |compat, incompat, ro_compat| Features { compat, incompat, ro_compat };
        assert_eq!(Superblock::parse(&[0; 100]), Err(SuperblockError::Short(100)));
        assert_eq!(Superblock::parse(&[0; 1024]), Err(SuperblockError::Magic));
        assert_eq!(
            refuse(SuperblockBuilder { features: features(0, 0x41, 0), ..sample() }),
            SuperblockError::UnknownFeatures { incompat: 0x40, ro_compat: 0 }
        );
        assert_eq!(
            refuse(SuperblockBuilder { features: features(0, 0, 1), ..sample() }),
            SuperblockError::UnknownFeatures { incompat: 0, ro_compat: 1 }
        );
        for (compat, incompat) in [(1, 8), (1, 16), (0, 24)] {
            assert_eq!(
                refuse(SuperblockBuilder { features: features(compat, incompat, 0), ..sample() }),
                SuperblockError::ChecksumKinds { compat, incompat }
            );
        }
        assert_eq!(refuse(SuperblockBuilder { block_size: 3000, ..sample() }), SuperblockError::BlockSize(3000));
        for first in [0, 1024, 4000] {
            assert_eq!(
                refuse(SuperblockBuilder { first, ..sample() }),
                SuperblockError::Bounds { first, maxlen: 1024 }
            );
        }
        assert_eq!(
            refuse(SuperblockBuilder { features: features(0, 0x20, 0), num_fc_blocks: 1023, ..sample() }),
            SuperblockError::FastCommitArea { blocks: 1023, maxlen: 1024 }
        );
        let mut raw = sample().checksum(Checksum::V3).build();
        raw[field::CHECKSUM_TYPE] = 1;
        assert_eq!(Superblock::parse(&raw), Err(SuperblockError::ChecksumType(1)));
        let mut raw = sample().checksum(Checksum::V2).build();
        raw[500] ^= 1;
        assert!(matches!(Superblock::parse(&raw), Err(SuperblockError::Checksum { .. })));
        raw[7] = 1;
        assert_eq!(Superblock::parse(&raw), Err(SuperblockError::Kind(1)));
    }

    #[test]
    fn the_fast_commit_area_shortens_the_log() {
        let features = Features { compat: 0, incompat: Features::FAST_COMMIT, ro_compat: 0 };
        let parse = |num_fc_blocks| {
            Superblock::parse(&SuperblockBuilder { features, num_fc_blocks, ..sample() }.build()).expect("valid").1
        };
        assert_eq!(parse(16).last, 1008);
        assert_eq!(parse(0).last, 768);
        assert_eq!(parse(0).length, 1024);
    }

    #[test]
    fn an_edit_keeps_the_rest() {
        for checksum in [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3] {
            let mut raw = sample().checksum(checksum).build();
            raw[0x60] = 0xaa; // a field of the future
            SuperblockEdit::new(&mut raw).expect("a superblock").start(0).sequence(99).errno(-22).seal();
            let (superblock, _) = Superblock::parse(&raw).expect("still valid");
            assert_eq!((superblock.start, superblock.sequence, superblock.errno), (0, 99, -22));
            assert_eq!(raw[0x60], 0xaa);
            if matches!(checksum, Checksum::None | Checksum::V1) {
                assert_eq!(superblock.checksum, 0);
            }
        }
    }
}
