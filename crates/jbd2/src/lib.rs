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
//!
//! What a replay would write, of a journal in memory in which a block was committed twice:
//!
//! ```
//! use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
//! use jbd2::{Checksum, Content, LogRead, Plan, Superblock};
//!
//! struct Memory(Vec<Vec<u8>>);
//!
//! impl LogRead for Memory {
//!     type Error = std::convert::Infallible;
//!
//!     fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Self::Error> {
//!         buffer.copy_from_slice(&self.0[position as usize]);
//!         Ok(Content::Present)
//!     }
//! }
//!
//! let raw = SuperblockBuilder { start: 1, sequence: 7, ..Default::default() }.checksum(Checksum::V3).build();
//! let (superblock, format) = Superblock::parse(&raw)?;
//! let mut log = Memory(vec![vec![0; 4096]; 1024]);
//! let mut builder = LogBuilder::new(format, 1, 7);
//! for fill in [1, 2] {
//!     let transaction = Transaction { blocks: vec![(5000, vec![fill; 4096])], ..Default::default() };
//!     builder.transaction(&transaction, &mut |position, block| log.0[position as usize].copy_from_slice(block));
//! }
//!
//! let plan = Plan::new(&mut log, &superblock, &format, &|home| home < 10_000)?;
//! assert_eq!(plan.summary().transactions, 2);
//! let block = plan.blocks().next().expect("one home block");
//! let mut content = vec![0; 4096];
//! log.read(block.newest().position, &mut content)?;
//! assert!(block.newest().restore(plan.format(), &mut content), "its checksum is right");
//! assert_eq!((block.home(), content[0]), (5000, 2));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod build;
mod bytes;
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
pub use superblock::{ERRNO_EIO, Features, SUPERBLOCK_BYTES, Superblock, SuperblockEdit, SuperblockError};
