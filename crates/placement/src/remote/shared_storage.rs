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
use crate::shared_disk::Direct;
use std::io;
use std::num::NonZero;
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
    let into = (offset % ALIGNMENT as u64) as usize;
    let needed = into + bytes.len();
    let direct = match &disk.direct {
        Direct::Open(direct) => direct,
        Direct::NotNeeded => return disk.file.read_exact_at(bytes, offset),
        Direct::Impossible(why, said) => {
            said.call_once(|| {
                log::warn!(
                    "{}: another host may have this disk open, and it cannot be read past the page cache ({why}): what is cached is \
                     dropped before each look at the journal superblock, which shows another host's write only where the file system \
                     does that; where two hosts reach the disk, put it where O_DIRECT works",
                    disk.options.name
                );
            });
            forget(disk, offset - into as u64, NonZero::new(needed.next_multiple_of(ALIGNMENT) as u64));
            return disk.file.read_exact_at(bytes, offset);
        }
    };
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
    if !matches!(disk.direct, Direct::NotNeeded) {
        forget(disk, 0, None);
    }
}

fn forget(disk: &Disk, offset: u64, len: Option<NonZero<u64>>) {
    // What was written here, and is not on storage yet, stays.
    let _ = rustix::fs::fadvise(disk.file.for_reading(), offset, len, rustix::fs::Advice::DontNeed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{DiskSettings, PlacementKind};
    use std::io::ErrorKind;
    use std::sync::Once;

    /// Whoever believes that his disk is read past the cache is told that it is not.
    #[test]
    fn a_disk_that_is_read_through_the_cache_all_the_same_says_so() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        std::fs::write(&path, [7; 8192]).expect("written");
        let mut disk = Disk::open(DiskSettings {
            name: "disk".to_owned(),
            path,
            placement: PlacementKind::Remote,
            honour_flush: true,
            read_only: false,
            durable_within: None,
            write_log: None,
        })
        .expect("opened");
        disk.direct = Direct::Impossible(ErrorKind::InvalidInput.into(), Once::new());
        let mut bytes = [0; 1024];
        read_at(&disk, 1024, &mut bytes).expect("read");
        assert_eq!(bytes, [7; 1024]);
        assert!(matches!(&disk.direct, Direct::Impossible(_, said) if said.is_completed()), "it is said");
        disk.direct = Direct::NotNeeded;
        read_at(&disk, 1024, &mut [0; 1024]).expect("read");
    }
}
