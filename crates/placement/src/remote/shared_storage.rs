//! The superblock on storage as somebody else may write it: another host, on a disk that both reach.
//!
//! The server decides who has a journal, but who is cut off from it does not hear that. So whoever writes the superblock, or
//! completes the log, first reads what is there. What must always hold:
//! * Nothing is written to a journal whose superblock is not as we left it.
//! * It is read from the device, not from this host's page cache.
//! * Between reading and writing another host may write. Where one could be, each of the two that want the journal, the one that
//!   falls back and the one that recovers, writes the superblock, waits until what the other may have had on its way is
//!   there, and reads again before it goes on: one of them then finds the other's. (Fischer's mutual exclusion.)
//!
//! What remains: a write that takes longer than that wait from the check before it until it is on storage.

use crate::disk::Disk;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// How long after its own write a host waits for another's.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// Direct reads begin and end at multiples of this.
const ALIGNMENT: usize = 4096;

/// Somebody else has written the superblock.
#[derive(Debug, thiserror::Error)]
#[error("the journal superblock on storage is not as this host left it: somebody else has the disk")]
pub(crate) struct Taken;

impl Taken {
    pub fn error() -> io::Error {
        io::Error::other(Taken)
    }

    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Taken>())
    }
}

/// Reads what is on the device.
pub(crate) fn read_at(disk: &Disk, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let Some(direct) = &disk.direct else { return disk.file.read_exact_at(bytes, offset) };
    let into = (offset % ALIGNMENT as u64) as usize;
    let needed = into + bytes.len();
    let mut buffer = vec![0; needed.next_multiple_of(ALIGNMENT) + ALIGNMENT];
    let skip = buffer.as_ptr().align_offset(ALIGNMENT);
    let window = &mut buffer[skip..][..needed.next_multiple_of(ALIGNMENT)];
    let got = direct.read_at(window, offset - into as u64)?;
    if got < needed {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.copy_from_slice(&window[into..needed]);
    Ok(())
}

/// Forgets what this host has of a disk in its page cache, where another host may have written it since.
pub(crate) fn forget_cached(disk: &Disk) {
    if disk.direct.is_some() {
        // Only what was written here would stay, and nothing was.
        let _ = rustix::fs::fadvise(disk.file.for_reading(), 0, None, rustix::fs::Advice::DontNeed);
    }
}
