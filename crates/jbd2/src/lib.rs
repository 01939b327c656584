//! The ext3/ext4 journal's on-disk format: parse, build, replay.
//!
//! Everything in a journal is big-endian. Facts are those of Linux 6.x `fs/jbd2` and e2fsprogs 1.47 `e2fsck/recovery.c`,
//! whose outcomes [`walk`] and [`Plan`] reproduce.
//!
//! This crate never does I/O, never starts a thread, never panics on what a journal says, and never keeps more than a
//! fixed number of bytes per log block. What it is given was written by a guest, which may be hostile.
//!
//! When a journal is not understood, nothing is guessed: [`Superblock::format`] and [`Plan::new`] return an error that is
//! a sentence, before anything could have been written.

#![forbid(unsafe_code)]

pub mod build;
mod checksum;
mod compound;
mod control;
mod edit;
mod format;
pub mod inspect;
mod replay;
pub mod sequence;
mod superblock;

pub use checksum::{crc32_be, crc32c};
pub use compound::{Compound, CompoundBlock, CompoundError, Part};
pub use control::{
    Commit, Descriptor, HEADER_BYTES, Header, Kind, MAGIC, Records, Revoke, RevokeCountError, Tag, Tags,
    data_checksum_ok, is_escaped_content, peek, tag_checksum,
};
pub use edit::{DescriptorEdit, remove_transaction_checksum};
pub use format::{Checksum, Format};
pub use replay::{
    Blocks, Content, CopyInLog, End, LogRead, NoVisitor, Place, Plan, PlannedBlock, ReplayError, Summary, Verdict,
    Visitor, Walk, walk,
};
pub use superblock::{Features, SUPERBLOCK_BYTES, Superblock, SuperblockEdit, SuperblockError};
