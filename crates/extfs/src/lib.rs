//! What must be known of ext2, ext3 and ext4 from outside a guest: partitions, superblocks, where the journal is, and how
//! files lie.
//!
//! Everything is read through [`ReadAt`]; nothing is ever written here. What is read was written by a guest, which may be
//! hostile: nothing here panics on it, walks further than a fixed bound, or keeps more than a bounded number of pieces.
//!
//! When something is not understood, the answer is [`Journal::NotUnderstood`] with a sentence, never a guess: whoever asks
//! then leaves that journal alone. Only a failing read is an error.
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
mod partition;
mod read;
mod stacked;
mod superblock;

pub use allocation::Allocation;
pub use discover::{FileSystem, discover, file_system};
pub use edit::SuperblockEdit;
pub use freed::FreedBlocks;
pub use group::{Group, group, group_flag};
pub use journal::{Journal, JournalExtent, is_inside};
pub use layout::{LayoutScore, layout_score};
pub use partition::{Partition, partitions};
pub use read::{ReadAt, Window};
pub use superblock::{
    SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock, SuperblockError, compat, incompat, ro_compat, state,
};
