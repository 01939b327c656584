//! QEMU's locks: how its block layer says who has an image open and for what (QEMU's docs/system, "disk image file locking").
//!
//! Each permission has a number n. Who uses it has a shared lock on byte 100 + n; who does not let others use it, a shared lock on
//! byte 200 + n. After taking its own, one looks whether anybody else has a lock that contradicts. All locks are open file
//! description locks, shared ones only, so that they contradict nobody who merely looks (`qemu-img info -U`).
//!
//! One byte more is amberlog's own: who works on an image has it, through an open file that nobody else has a descriptor of. So its end
//! says that the last operation has ended, whether its process lives or not.
//!
//! Failure story: a file system without such locks gives none, which is said once at debug level; amberlog's own flock remains.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Bytes of permissions in use, and of those that others may not use (QEMU's block/file-posix.c).
const USED_START: i64 = 100;
const FORBIDDEN_START: i64 = 200;
/// The byte of [`mark_under_way`], beyond QEMU's.
const UNDER_WAY: i64 = 1000;
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

/// Marks an image as being worked on through the open file `worked`: [`await_idle`] of another open file of it waits from now on until
/// `worked` is nobody's. An operation that the kernel has taken has it, too, whatever becomes of the process that asked. False where the
/// file system does not show that to `other`, another open file of the same image.
///
/// # Errors
/// When the file system has no such locks, somebody else has this one, or `worked` cannot be written to.
pub fn mark_under_way(worked: &File, other: &File) -> io::Result<bool> {
    set(worked, libc::F_WRLCK, UNDER_WAY, 1)?;
    is_locked_by_others(other, UNDER_WAY)
}

/// Waits until nothing is under way on an image that somebody else has marked ([`mark_under_way`]). Who only reads the image may lock
/// that byte as well, for as long as he likes, and is not waited for: a shared lock is asked for, which the exclusive one of the mark
/// keeps out and no other shared one does.
///
/// # Errors
/// When the file system has no such locks.
pub fn await_idle(image: &File) -> io::Result<()> {
    let wanted = range(libc::F_RDLCK, UNDER_WAY, 1);
    loop {
        // SAFETY: the descriptor is open and the argument is the structure that F_OFD_SETLKW reads.
        match unsafe { libc::fcntl(image.as_raw_fd(), libc::F_OFD_SETLKW, &raw const wanted) } {
            0 => return set(image, libc::F_UNLCK, UNDER_WAY, 1),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

/// Whether flock of an image is, for whoever else has it open, a lock on all of its bytes, as network file systems have it (flock(2)). There
/// an open file that is marked ([`mark_under_way`]) keeps every other one of the same image from being locked, this process's own too.
pub fn flock_locks_bytes(image: &File) -> bool {
    rustix::fs::fstatfs(image).is_ok_and(|status| is_of_a_network(status.f_type as u64))
}

/// By the number of the file system's kind (linux/magic.h): NFS, SMB and its two successors.
fn is_of_a_network(kind: u64) -> bool {
    matches!(kind & u64::from(u32::MAX), 0x6969 | 0x517b | 0xff53_4d42 | 0xfe53_4d42)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn an_image_is_idle_when_nobody_has_what_was_worked_on() {
        let image = tempfile::NamedTempFile::new().expect("an image");
        let open = || File::options().read(true).write(true).open(image.path()).expect("opened");
        let (worked, locked) = (open(), open());
        assert!(!is_locked_by_others(&locked, UNDER_WAY).expect("asked"));
        assert!(mark_under_way(&worked, &locked).expect("marked"));
        mark_under_way(&open(), &locked).expect_err("somebody has it");
        assert!(QemuLock::Write.try_take(&locked).expect("asked"), "it is no lock of QEMU's");
        // As the kernel has it, which works on.
        let under_way = worked.try_clone().expect("a descriptor");
        drop(worked);
        assert!(is_locked_by_others(&locked, UNDER_WAY).expect("asked"));
        let is_over = Arc::new(AtomicBool::new(false));
        let (begins, begun) = channel();
        let waiting = {
            let (locked, is_over) = (locked.try_clone().expect("a descriptor"), Arc::clone(&is_over));
            std::thread::spawn(move || {
                begins.send(()).expect("somebody listens");
                await_idle(&locked).map(|()| is_over.load(Ordering::SeqCst))
            })
        };
        begun.recv().expect("it begins");
        // Time for one who does not wait.
        std::thread::sleep(Duration::from_millis(20));
        is_over.store(true, Ordering::SeqCst);
        drop(under_way);
        assert!(waiting.join().expect("no panic").expect("idle"), "it did not wait");
        assert!(!is_locked_by_others(&locked, UNDER_WAY).expect("asked"));
        await_idle(&locked).expect("at once");
        assert!(mark_under_way(&open(), &locked).is_ok(), "whoever waited has nothing of it");
        let reader = File::open(image.path()).expect("opened");
        mark_under_way(&reader, &locked).expect_err("it cannot be written to");
    }

    #[test]
    fn where_flock_locks_bytes_is_known() {
        for kind in [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, u64::MAX << 32 | 0xff53_4d42] {
            assert!(is_of_a_network(kind), "{kind:#x}");
        }
        // ext4, XFS, btrfs, tmpfs, GFS2, OCFS2, FUSE.
        for kind in [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x0116_1970, 0x7461_636f, 0x6573_5546] {
            assert!(!is_of_a_network(kind), "{kind:#x}");
        }
        let image = tempfile::NamedTempFile::new().expect("an image");
        assert!(!flock_locks_bytes(image.as_file()));
    }

    /// Whoever may read an image can have a shared lock on any byte of it, and can have waited for that while the image was worked on.
    #[test]
    fn nobody_who_only_reads_an_image_is_waited_for() {
        let image = tempfile::NamedTempFile::new().expect("an image");
        let open = || File::options().read(true).write(true).open(image.path()).expect("opened");
        let (worked, locked) = (open(), open());
        assert!(mark_under_way(&worked, &locked).expect("marked"));
        let reader = File::open(image.path()).expect("opened");
        let reading = {
            let reader = reader.try_clone().expect("a descriptor");
            let wanted = range(libc::F_RDLCK, UNDER_WAY, 1);
            // SAFETY: the descriptor is open and the argument is the structure that F_OFD_SETLKW reads.
            std::thread::spawn(move || unsafe {
                libc::fcntl(reader.as_raw_fd(), libc::F_OFD_SETLKW, &raw const wanted)
            })
        };
        let (is_idle, idle) = channel();
        let waiting = std::thread::spawn(move || is_idle.send(await_idle(&locked).is_ok()));
        idle.recv_timeout(Duration::from_millis(50)).expect_err("something is under way");
        drop(worked);
        assert_eq!(reading.join().expect("no panic"), 0, "the reader has its lock, and keeps it");
        assert!(idle.recv_timeout(Duration::from_secs(30)).expect("it waits for the reader"));
        waiting.join().expect("no panic").expect("somebody listens");
        // It has let go of what it asked for. The reader's lock goes by name: closed, its file is still open in whatever a test beside this
        // one has just forked, until that is another program.
        set(&reader, libc::F_UNLCK, UNDER_WAY, 1).expect("let go");
        assert!(mark_under_way(&open(), &open()).expect("marked"));
    }
}
