//! What is sent to an image, written down so that any tool can replay any prefix of it, and of what no flush covers any part:
//! option `log-writes=FILE` of a disk, for experiments.
//!
//! The format is that of Linux's dm-log-writes: a sector with magic, version, number of entries and bytes of a sector; then for
//! each entry a sector with place, length and flags, and its data. Writes are in the order in which they ended. A flush
//! stands behind what had ended when it began, and in front of what ended while it was under way: a power cut may lose that.
//! Every write to an image goes through [`LoggedFile`], or through a disk engine that tells its [`WriteLog`].
//!
//! Must never: put a write in front of a flush that does not cover it; write over a file that is no such log.
//!
//! Failure story: when the log cannot be written, or what a failed write left is not known, the log ends there, with a sentence;
//! the disk goes on.

#![forbid(unsafe_code)]

mod file;
mod log_file;
mod read;

pub use file::LoggedFile;
#[cfg(feature = "simulate")]
pub use file::simulated_flushes;
pub use log_file::{Pending, WriteLog};
pub use read::{Entry, EntryKind, entries};

/// Bytes of a sector of the log.
pub const SECTOR_BYTES: u64 = 512;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLAG_FLUSH: u64 = 1 << 0;
const FLAG_DISCARD: u64 = 1 << 2;
const FLAG_MARK: u64 = 1 << 3;
