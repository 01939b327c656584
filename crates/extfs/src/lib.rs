//! What must be known of ext2, ext3 and ext4 from outside a guest: partitions, superblocks, where the journal is, and how
//! files lie.
//!
//! Everything is read through [`ReadAt`]; nothing is ever written here. What is read was written by a guest, which may be
//! hostile: nothing here panics on it, walks further than a fixed bound, or keeps more than a bounded number of pieces.
//!
//! When something is not understood, the answer is [`Journal::NotUnderstood`] with a sentence, never a guess: whoever asks
//! then leaves that journal alone. Only a failing read is an error.
//!
//! Where the journals on a disk are:
//!
//! ```
//! use extfs::{Journal, discover};
//! # let directory = tempfile::tempdir()?;
//! # let image = directory.path().join("disk.img");
//! # let mut mke2fs = std::process::Command::new("mke2fs");
//! # assert!(mke2fs.args(["-q", "-t", "ext4", "-b", "4096"]).arg(&image).arg("64M").status()?.success());
//!
//! // Anything that is `ReadAt` will do; this is bytes in memory.
//! let disk = std::fs::read(&image)?;
//! for file_system in discover(&disk)? {
//!     let block_bytes = u64::from(file_system.superblock.block_size);
//!     match &file_system.journal {
//!         Journal::Internal { inode, blocks, extents, .. } => {
//!             assert_eq!(*inode, 8);
//!             let at = file_system.offset + extents[0].physical * block_bytes;
//!             println!("{blocks} blocks in {} pieces, the first at byte {at}", extents.len());
//!         }
//!         Journal::External { uuid } => println!("on another disk: {uuid:02x?}"),
//!         Journal::NotUnderstood { reason, .. } => println!("left alone: {reason}"),
//!         Journal::None | Journal::JournalDevice { .. } => {}
//!     }
//! }
//! # assert_eq!(discover(&disk)?.len(), 1);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Facts: kernel `Documentation/filesystems/ext4`, e2fsprogs 1.47 `lib/ext2fs`, UEFI specification 2.10 chapter 5.

#![forbid(unsafe_code)]

mod allocation;
mod bytes;
mod discover;
mod edit;
mod extents;
mod freed;
mod gpt;
mod group;
mod indirect;
mod inode;
mod journal;
mod layout;
mod map;
mod partition;
mod read;
mod stacked;
mod superblock;
mod table;

pub use allocation::Allocation;
pub use discover::{FileSystem, discover, file_system};
pub use edit::SuperblockEdit;
pub use freed::FreedBlocks;
pub use group::{Group, group, group_flag};
pub use journal::{Journal, JournalExtent, is_inside};
pub use layout::{LayoutScore, layout_score};
pub use partition::Partition;
pub use read::{ReadAt, Window};
pub use superblock::{
    SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock, SuperblockError, compat, incompat, ro_compat, state,
};
pub use table::{has_gpt, logical_tables, partitions};
