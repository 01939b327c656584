//! QEMU's locks: how its block layer says who has an image open and for what (QEMU's docs/system, "disk image file locking").
//!
//! Each permission has a number n. Who uses it has a shared lock on byte 100 + n; who does not let others use it, a shared lock on
//! byte 200 + n. After taking its own, one looks whether anybody else has a lock that contradicts. All locks are open file
//! description locks, shared ones only, so that they contradict nobody who merely looks (`qemu-img info -U`).
//!
//! Failure story: a file system without such locks gives none, which is said once at debug level; amberlog's own flock remains.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Bytes of permissions in use, and of those that others may not use (QEMU's block/file-posix.c).
const USED_START: i64 = 100;
const FORBIDDEN_START: i64 = 200;
/// Numbers of QEMU's permissions.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const WRITE_UNCHANGED: i64 = 2;
const RESIZE: i64 = 3;

/// What an image is used for, as QEMU knows it. The locks go with the last descriptor of the open file; [`QemuLock::release`]
/// makes that be at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuLock {
    /// Reading, while nobody writes.
    Read,
    /// Reading and writing, while nobody else writes, and only who says so (`-U`, `force-share=on`) reads.
    Write,
}

impl QemuLock {
    fn used(self) -> &'static [i64] {
        match self {
            QemuLock::Read => &[CONSISTENT_READ],
            QemuLock::Write => &[CONSISTENT_READ, WRITE, WRITE_UNCHANGED, RESIZE],
        }
    }

    const FORBIDDEN: &'static [i64] = &[WRITE, RESIZE];

    /// Takes the locks on an open image. False when a QEMU has it in a way that contradicts; then none is held. A file opened for
    /// reading is enough for either.
    ///
    /// # Errors
    /// When the file system has no such locks, or the kernel no memory for them.
    pub fn try_take(self, image: &File) -> io::Result<bool> {
        let used = self.used().iter().map(|number| USED_START + number);
        let forbidden = Self::FORBIDDEN.iter().map(|number| FORBIDDEN_START + number);
        for byte in used.chain(forbidden) {
            match set(image, libc::F_RDLCK, byte, 1) {
                Ok(()) => {}
                // Somebody has an exclusive lock, which QEMU does not take.
                Err(error) if is_conflict(&error) => {
                    Self::release(image)?;
                    return Ok(false);
                }
                Err(error) => {
                    let _ = Self::release(image);
                    return Err(error);
                }
            }
        }
        // What we use may be forbidden to us, and what we forbid may be used.
        let contradicts_used = self.used().iter().map(|number| FORBIDDEN_START + number);
        let contradicts_forbidden = Self::FORBIDDEN.iter().map(|number| USED_START + number);
        for byte in contradicts_used.chain(contradicts_forbidden) {
            if is_locked_by_others(image, byte)? {
                Self::release(image)?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives the locks back.
    ///
    /// # Errors
    /// When the file system has no such locks.
    pub fn release(image: &File) -> io::Result<()> {
        set(image, libc::F_UNLCK, USED_START, FORBIDDEN_START + 100 - USED_START)
    }
}

fn is_conflict(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

fn range(kind: i32, start: i64, bytes: i64) -> libc::flock {
    // SAFETY: all-zero is a valid struct flock.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start;
    range.l_len = bytes;
    range
}

fn set(image: &File, kind: i32, start: i64, bytes: i64) -> io::Result<()> {
    let range = range(kind, start, bytes);
    // SAFETY: the descriptor is open and the argument is the structure that F_OFD_SETLK reads.
    match unsafe { libc::fcntl(image.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether another open file has any lock there.
fn is_locked_by_others(image: &File, byte: i64) -> io::Result<bool> {
    let mut range = range(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open and the argument is the structure that F_OFD_GETLK reads and writes.
    match unsafe { libc::fcntl(image.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) } {
        0 => Ok(i32::from(range.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}
