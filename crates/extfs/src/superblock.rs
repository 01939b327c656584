//! The ext2/ext3/ext4 superblock.

use crate::bytes::{crc32c, le16, le32, uuid};

/// Byte of a file system where its superblock begins.
pub const SUPERBLOCK_OFFSET: u64 = 1024;
/// Bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 1024;

const MAGIC: u16 = 0xef53;

pub(crate) mod field {
    pub const INODES_COUNT: usize = 0x00;
    pub const BLOCKS_COUNT_LOW: usize = 0x04;
    pub const FIRST_DATA_BLOCK: usize = 0x14;
    pub const LOG_BLOCK_SIZE: usize = 0x18;
    pub const LOG_CLUSTER_SIZE: usize = 0x1c;
    pub const BLOCKS_PER_GROUP: usize = 0x20;
    pub const INODES_PER_GROUP: usize = 0x28;
    pub const MOUNTED_AT: usize = 0x2c;
    pub const WRITTEN_AT: usize = 0x30;
    pub const MOUNT_COUNT: usize = 0x34;
    pub const MAGIC: usize = 0x38;
    pub const STATE: usize = 0x3a;
    pub const REVISION: usize = 0x4c;
    pub const INODE_SIZE: usize = 0x58;
    pub const COMPAT: usize = 0x5c;
    pub const INCOMPAT: usize = 0x60;
    pub const RO_COMPAT: usize = 0x64;
    pub const UUID: usize = 0x68;
    pub const RESERVED_DESCRIPTOR_BLOCKS: usize = 0xce;
    pub const JOURNAL_UUID: usize = 0xd0;
    pub const JOURNAL_INODE: usize = 0xe0;
    pub const JOURNAL_DEVICE: usize = 0xe4;
    pub const DESCRIPTOR_SIZE: usize = 0xfe;
    pub const FIRST_META_GROUP: usize = 0x104;
    pub const BLOCKS_COUNT_HIGH: usize = 0x150;
    pub const ERROR_COUNT: usize = 0x194;
    pub const ERROR_END: usize = 0x200;
    pub const BACKUP_GROUPS: usize = 0x24c;
    pub const CHECKSUM_SEED: usize = 0x270;
    pub const WRITTEN_AT_HIGH: usize = 0x274;
    pub const MOUNTED_AT_HIGH: usize = 0x275;
    pub const CHECKSUM: usize = 0x3fc;
}

/// Bits of `s_feature_compat`.
pub mod compat {
    /// The file system has a journal.
    pub const HAS_JOURNAL: u32 = 0x4;
    /// Backup superblocks are in two named groups only.
    pub const SPARSE_SUPER2: u32 = 0x200;
    /// The journal may hold fast commits.
    pub const FAST_COMMIT: u32 = 0x400;
}

/// Bits of `s_feature_incompat`.
pub mod incompat {
    /// The journal must be replayed.
    pub const NEEDS_RECOVERY: u32 = 0x4;
    /// Not a file system but an external journal.
    pub const JOURNAL_DEVICE: u32 = 0x8;
    /// Group descriptors are spread over the disk.
    pub const META_GROUPS: u32 = 0x10;
    /// Block numbers of 64 bits.
    pub const WIDE: u32 = 0x80;
    /// The checksum seed is in the superblock.
    pub const CHECKSUM_SEED: u32 = 0x2000;
    /// All bits that e2fsprogs 1.47 and Linux 6.x know and that leave the journal where it is looked for: filetype,
    /// needs_recovery, journal_dev, meta_bg, extents, 64bit, mmp, flex_bg, ea_inode, csum_seed, large_dir, inline_data,
    /// encrypt, casefold.
    pub const KNOWN: u32 =
        0x2 | 0x4 | 0x8 | 0x10 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x2000 | 0x4000 | 0x8000 | 0x10000 | 0x20000;
}

/// Bits of `s_feature_ro_compat`.
pub mod ro_compat {
    /// Backup superblocks are in some groups only.
    pub const SPARSE_SUPER: u32 = 0x1;
    /// A bit of a block bitmap stands for a cluster of blocks.
    pub const CLUSTERS: u32 = 0x200;
    /// Metadata carries CRC-32C.
    pub const METADATA_CHECKSUMS: u32 = 0x400;
}

/// Bits of `s_state`.
pub mod state {
    /// Cleanly unmounted.
    pub const VALID: u16 = 0x1;
    /// Errors were found.
    pub const ERROR: u16 = 0x2;
}

/// Why something is not a superblock, or not one that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// Nothing like one.
    #[error("there is no ext2, ext3 or ext4 superblock")]
    Magic,
    /// Numbers that no file system has.
    #[error("the superblock's {what} is {value}, which no ext2, ext3 or ext4 file system has")]
    Geometry {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Features that are not known.
    #[error("the file system has features that are not known (incompat {0:#x})")]
    UnknownFeatures(u32),
    /// The checksum does not match.
    #[error("the superblock's checksum is {stored:#010x} but should be {computed:#010x}")]
    Checksum {
        /// As stored.
        stored: u32,
        /// As it should be.
        computed: u32,
    },
}

/// The fields of a superblock that matter from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// `s_inodes_count`.
    pub inodes_count: u32,
    /// Blocks of the file system, or of the journal device; 64 bits.
    pub blocks_count: u64,
    /// `s_first_data_block`: 1 with 1 KB blocks, 0 otherwise.
    pub first_data_block: u32,
    /// Bytes in a block.
    pub block_size: u32,
    /// Blocks that one bit of a block bitmap stands for: 1 without `bigalloc`.
    pub cluster_blocks: u32,
    /// `s_blocks_per_group`.
    pub blocks_per_group: u32,
    /// `s_reserved_gdt_blocks`: blocks kept free behind the group descriptors.
    pub reserved_descriptor_blocks: u16,
    /// `s_inodes_per_group`.
    pub inodes_per_group: u32,
    /// Bytes in an inode.
    pub inode_size: u16,
    /// Bytes in a group descriptor.
    pub descriptor_size: u16,
    /// First group descriptor block that is not where it was without meta groups.
    pub first_meta_group: u32,
    /// `s_mtime`: when it was last mounted, in seconds of its guest's; 40 bits.
    pub mounted_at: u64,
    /// `s_wtime`: when this superblock was written last, the same.
    pub written_at: u64,
    /// `s_mnt_count`: mounts since it was checked.
    pub mount_count: u16,
    /// `s_state`; see [`state`].
    pub state: u16,
    /// `s_feature_compat`; see [`compat`].
    pub compat: u32,
    /// `s_feature_incompat`; see [`incompat`].
    pub incompat: u32,
    /// `s_feature_ro_compat`; see [`ro_compat`].
    pub ro_compat: u32,
    /// `s_uuid`.
    pub uuid: [u8; 16],
    /// `s_journal_inum`: inode of an internal journal, or 0.
    pub journal_inode: u32,
    /// `s_journal_uuid`: UUID of an external journal, or zeros.
    pub journal_uuid: [u8; 16],
    /// `s_journal_dev`: device number of an external journal, in the guest. A hint only.
    pub journal_device: u32,
    /// `s_backup_bgs`.
    pub backup_groups: [u32; 2],
    /// Seed of all metadata checksums.
    pub checksum_seed: u32,
    /// `s_checksum`, as stored.
    pub checksum: u32,
    /// What it should be.
    pub checksum_computed: u32,
}

impl Superblock {
    /// Reads a superblock. Numbers in it can then be used without overflow; [`Superblock::check`] says whether it is
    /// understood.
    ///
    /// # Errors
    /// When it is no superblock, or its block size and counts cannot be.
    pub fn parse(raw: &[u8]) -> Result<Self, SuperblockError> {
        if raw.len() < SUPERBLOCK_BYTES || le16(raw, field::MAGIC) != MAGIC {
            return Err(SuperblockError::Magic);
        }
        let log_block_size = le32(raw, field::LOG_BLOCK_SIZE);
        if log_block_size > 6 {
            return Err(SuperblockError::Geometry { what: "block size exponent", value: log_block_size.into() });
        }
        let has_clusters = le32(raw, field::RO_COMPAT) & ro_compat::CLUSTERS != 0;
        let log_clusters =
            if has_clusters { le32(raw, field::LOG_CLUSTER_SIZE).wrapping_sub(log_block_size) } else { 0 };
        if log_clusters > 20 {
            return Err(SuperblockError::Geometry { what: "cluster size exponent", value: log_clusters.into() });
        }
        let incompat = le32(raw, field::INCOMPAT);
        let is_old = le32(raw, field::REVISION) == 0;
        let wide = incompat & incompat::WIDE != 0;
        let id = uuid(raw, field::UUID);
        let checksum_seed =
            if incompat & incompat::CHECKSUM_SEED != 0 { le32(raw, field::CHECKSUM_SEED) } else { crc32c(!0, &id) };
        let high = if wide { u64::from(le32(raw, field::BLOCKS_COUNT_HIGH)) << 32 } else { 0 };
        let seconds = |low: usize, high: usize| u64::from(le32(raw, low)) | u64::from(raw[high]) << 32;
        let superblock = Superblock {
            inodes_count: le32(raw, field::INODES_COUNT),
            blocks_count: high | u64::from(le32(raw, field::BLOCKS_COUNT_LOW)),
            first_data_block: le32(raw, field::FIRST_DATA_BLOCK),
            block_size: 1024 << log_block_size,
            cluster_blocks: 1 << log_clusters,
            blocks_per_group: le32(raw, field::BLOCKS_PER_GROUP),
            reserved_descriptor_blocks: le16(raw, field::RESERVED_DESCRIPTOR_BLOCKS),
            inodes_per_group: le32(raw, field::INODES_PER_GROUP),
            inode_size: if is_old { 128 } else { le16(raw, field::INODE_SIZE) },
            descriptor_size: if wide { le16(raw, field::DESCRIPTOR_SIZE) } else { 32 },
            first_meta_group: le32(raw, field::FIRST_META_GROUP),
            mounted_at: seconds(field::MOUNTED_AT, field::MOUNTED_AT_HIGH),
            written_at: seconds(field::WRITTEN_AT, field::WRITTEN_AT_HIGH),
            mount_count: le16(raw, field::MOUNT_COUNT),
            state: le16(raw, field::STATE),
            compat: le32(raw, field::COMPAT),
            incompat,
            ro_compat: le32(raw, field::RO_COMPAT),
            uuid: id,
            journal_inode: le32(raw, field::JOURNAL_INODE),
            journal_uuid: uuid(raw, field::JOURNAL_UUID),
            journal_device: le32(raw, field::JOURNAL_DEVICE),
            backup_groups: [le32(raw, field::BACKUP_GROUPS), le32(raw, field::BACKUP_GROUPS + 4)],
            checksum_seed,
            checksum: le32(raw, field::CHECKSUM),
            checksum_computed: crc32c(!0, &raw[..field::CHECKSUM]),
        };
        // 48 bits is what extents can name; a file has at most 2^63 bytes.
        let bytes = u128::from(superblock.blocks_count) * u128::from(superblock.block_size);
        if superblock.blocks_count == 0 || superblock.blocks_count > 1 << 48 || bytes > i64::MAX as u128 {
            return Err(SuperblockError::Geometry { what: "number of blocks", value: superblock.blocks_count });
        }
        Ok(superblock)
    }

    /// Whether all of it is understood.
    ///
    /// # Errors
    /// A sentence that says what is not.
    pub fn check(&self) -> Result<(), SuperblockError> {
        let unknown = self.incompat & !incompat::KNOWN;
        if unknown != 0 {
            return Err(SuperblockError::UnknownFeatures(unknown));
        }
        if self.has_metadata_checksums() && self.checksum != self.checksum_computed {
            return Err(SuperblockError::Checksum { stored: self.checksum, computed: self.checksum_computed });
        }
        if self.is_journal_device() {
            return Ok(());
        }
        let wrong = |what, value| Err(SuperblockError::Geometry { what, value });
        let bits = self.block_size * 8;
        if !(1..=bits).contains(&self.inodes_per_group) {
            return wrong("number of inodes per group", self.inodes_per_group.into());
        }
        // With bigalloc a group has more blocks than its bitmap has bits.
        if self.blocks_per_group == 0 {
            return wrong("number of blocks per group", 0);
        }
        if !self.inode_size.is_power_of_two() || !(128..=self.block_size).contains(&self.inode_size.into()) {
            return wrong("inode size", self.inode_size.into());
        }
        let smallest = if self.incompat & incompat::WIDE != 0 { 64 } else { 32 };
        if !self.descriptor_size.is_power_of_two() || !(smallest..=1024).contains(&self.descriptor_size) {
            return wrong("group descriptor size", self.descriptor_size.into());
        }
        if self.first_data_block > 1 || u64::from(self.first_data_block) >= self.blocks_count {
            return wrong("first data block", self.first_data_block.into());
        }
        Ok(())
    }

    /// Bytes of the file system.
    pub fn bytes(&self) -> u64 {
        self.blocks_count * u64::from(self.block_size)
    }

    /// Whether the journal must be replayed before the file system is used.
    pub fn needs_recovery(&self) -> bool {
        self.incompat & incompat::NEEDS_RECOVERY != 0
    }

    /// Whether this is an external journal, not a file system.
    pub fn is_journal_device(&self) -> bool {
        self.incompat & incompat::JOURNAL_DEVICE != 0
    }

    /// Whether metadata carries CRC-32C.
    pub fn has_metadata_checksums(&self) -> bool {
        self.ro_compat & ro_compat::METADATA_CHECKSUMS != 0
    }

    /// Number of block groups.
    pub fn groups_count(&self) -> u64 {
        self.blocks_count.saturating_sub(self.first_data_block.into()).div_ceil(self.blocks_per_group.max(1).into())
    }
}
