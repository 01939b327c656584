//! Bring a disk to its last committed state: replay a journal, or materialise it for the guest's own replay.
//!
//! Two ways in. [`recover_disk`] takes images or block devices as they are. [`Replay`] and [`materialise`] take any log that
//! can be read and any disk that can be written, so that a live journal held in memory is recovered by the same code.
//!
//! What must always hold:
//! * Nothing is written before the whole log has been followed and judged. A refusal ([`Error::Refused`], [`Error::Damaged`])
//!   means that nothing was changed.
//! * Home blocks first, then a flush; then the file system's superblock, then a flush; only then is the journal marked
//!   empty, then a flush. A crash at any point leaves a disk that the same recovery, or a guest's own kernel, brings to
//!   the same state.
//! * Only blocks of the file system that owns the journal are written, and none of the journal but its superblock.
//! * Memory is bounded by the length of the journal, never by what it says.
//!
//! All file systems of an image:
//!
//! ```
//! use recovery::{Access, Disk, Options, Status, recover_disk};
//! # let directory = tempfile::tempdir()?;
//! # let image = directory.path().join("disk.img");
//! # let mut mke2fs = std::process::Command::new("mke2fs");
//! # assert!(mke2fs.args(["-q", "-t", "ext4", "-b", "4096"]).arg(&image).arg("64M").status()?.success());
//!
//! // Locked, so that nobody writes it meanwhile.
//! let disk = Disk::open(&image, Access::Write)?;
//! for file_system in recover_disk(&disk, None, Options::default())? {
//!     let report = file_system.result?;
//!     println!("{:?}: {} blocks written home", report.status, report.blocks_written);
//!     assert_eq!(report.status, Status::Clean, "it was unmounted in good order");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Outcomes are those of `e2fsck -E journal_only` (e2fsprogs 1.47), which are jbd2's; where e2fsck repairs a damaged
//! journal by throwing it away, this refuses and changes nothing.

#![forbid(unsafe_code)]

mod batch;
mod checked;
mod compare;
mod disk;
mod error;
mod file_log;
mod home;
mod image;
mod materialise;
mod replay;
mod report;
mod superblock;
mod writeback;

pub use disk::{Access, Disk};
pub use error::{Error, Unfinished};
pub use file_log::FileLog;
pub use home::{DiskHome, HomeBounds, HomeWriter, JournalPlace};
pub use image::{FileSystemReport, Located, LogPlace, Options, locate, recover_disk, uuid_text};

pub use materialise::{JournalDisk, materialise};
pub use replay::{LogBounds, Replay, replay};
pub use report::{Report, Status};
