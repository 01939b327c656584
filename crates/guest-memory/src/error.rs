//! What can go wrong with guest memory, as sentences.

use std::io;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The VMM described a memory region that cannot be used.
    #[error(
        "the VMM's memory region at guest address {gpa:#x} ({size:#x} bytes, file offset {file_offset:#x}) cannot be used: {reason}"
    )]
    Region {
        /// Guest physical address of the region.
        gpa: u64,
        /// Length of the region in bytes.
        size: u64,
        /// Where it begins in its backing file, in bytes.
        file_offset: u64,
        /// Why not.
        reason: String,
    },
    /// The guest named memory that it does not have.
    #[error("guest address {gpa:#x} with {len} bytes is outside the guest's memory")]
    OutOfRange {
        /// Guest physical address.
        gpa: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A page holds committed content, and there is no memory to copy that to before the page is written.
    #[error(
        "guest page {page} holds a committed block, and there is no memory to copy it to: make room in the tmpfs of the memory area"
    )]
    Retained {
        /// The page's number within its VM.
        page: u32,
    },
    /// Nobody has touched a page yet, and there is no memory for it.
    #[error("there is no memory for guest page {page}: make room in the tmpfs that the guest's memory is in")]
    NoRoom {
        /// The page's number within its VM.
        page: u32,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Error::System { what: what.into(), source: source.into() }
    }
}
