//! Images and block devices, opened so that nobody else writes them meanwhile.
//!
//! An image is locked twice: `flock`, which amberlog itself uses, and the locks by which QEMU knows who has an image
//! (`image-file`). A block device is opened exclusively, which fails while it is mounted.

use crate::error::Error;
use crate::writeback::Writeback;
use extfs::ReadAt;
use image_file::{OtherFormat, QemuLock};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const HINT_BYTES: u64 = 1 << 20;
/// How long a lock that somebody has is asked for before that is believed. A process that was killed keeps its locks
/// until the kernel has taken its memory and its io_uring down, which goes on in the background after its death. Attempts are
/// counted, and not the time: on a machine that stands still the kernel does not get on with that either.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// What a disk is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Looking at it, whoever else writes it: no lock is taken.
    Look,
    /// Reading only; others may read as well.
    Read,
    /// Writing.
    Write,
}

/// An open image or block device. It stays locked until this is dropped.
#[derive(Debug)]
pub struct Disk {
    file: Arc<File>,
    path: PathBuf,
    size: u64,
}

impl Disk {
    /// Opens and locks an image or block device.
    ///
    /// # Errors
    /// A sentence: it cannot be opened, is in use, or is neither.
    ///
    /// # Examples
    /// ```
    /// use recovery::{Access, Disk};
    /// use std::time::Duration;
    /// # let directory = tempfile::tempdir()?;
    /// # let image = directory.path().join("disk.img");
    /// # std::fs::write(&image, [0u8; 4096])?;
    ///
    /// let disk = Disk::open(&image, Access::Write)?;
    /// let refused = Disk::open_within(&image, Access::Read, Duration::ZERO).expect_err("somebody writes it");
    /// assert!(refused.is_in_use());
    /// // Who only looks asks nobody.
    /// assert!(Disk::open(&image, Access::Look).is_ok());
    ///
    /// drop(disk);
    /// assert!(Disk::open(&image, Access::Read).is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(path: &Path, access: Access) -> Result<Disk, Error> {
        Self::open_within(path, access, LOCK_PATIENCE)
    }

    /// The same, with more or less patience: for somebody who knows that whoever had the image is dead or dying.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open_within(path: &Path, access: Access, patience: Duration) -> Result<Disk, Error> {
        let mut pauses_left = patience.as_millis() / LOCK_PAUSE.as_millis();
        let mut has_waited = || {
            let may_wait = pauses_left > 0;
            if may_wait {
                pauses_left -= 1;
                std::thread::sleep(LOCK_PAUSE);
            }
            may_wait
        };
        let shown = path.display();
        let kind_of = |looked: rustix::io::Result<rustix::fs::Stat>| match looked {
            Ok(status) => match FileType::from_raw_mode(status.st_mode) {
                kind @ (FileType::RegularFile | FileType::BlockDevice) => Ok(kind),
                _ => Err(Error::refused(format!("{shown} is neither an image file nor a block device"))),
            },
            Err(error) => Err(Error::failed(format!("opening {shown}"))(error.into())),
        };
        let kind = kind_of(rustix::fs::stat(path))?;
        // Whoever may exchange it can do so after that look: what was opened is looked at again, without waiting for it.
        let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        flags |= if access == Access::Write { OFlags::RDWR } else { OFlags::RDONLY };
        if kind == FileType::BlockDevice && access == Access::Write {
            flags |= OFlags::EXCL;
        }
        let file = loop {
            match rustix::fs::open(path, flags, Mode::empty()) {
                Ok(descriptor) => break File::from(descriptor),
                // A file server that has a lease on it gives that back in a moment, for which an opening that does not wait has to ask again.
                Err(Errno::BUSY | Errno::AGAIN) if has_waited() => {}
                Err(Errno::BUSY | Errno::AGAIN) => return Err(in_use(path)),
                Err(error) => return Err(Error::failed(format!("opening {shown}"))(error.into())),
            }
        };
        if kind_of(rustix::fs::fstat(&file))? != kind {
            return Err(Error::failed(format!("opening {shown}"))(io::Error::other(
                "it was exchanged for another file",
            )));
        }
        let flags = rustix::fs::fcntl_getfl(&file).map_err(io::Error::from);
        let flags = flags.map_err(Error::failed(format!("opening {shown}")))?;
        // Requests are never told to come again.
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)
            .map_err(|error| Error::failed(format!("opening {shown}"))(error.into()))?;
        if kind == FileType::RegularFile && access != Access::Look {
            while !try_lock(&file, access, path)? {
                if !has_waited() {
                    return Err(in_use(path));
                }
            }
        }
        let size = (&file).seek(SeekFrom::End(0)).map_err(Error::failed(format!("finding the size of {shown}")))?;
        Ok(Disk { file: Arc::new(file), path: path.to_owned(), size })
    }

    /// Refuses an image that is known to be something else than a raw disk.
    ///
    /// # Errors
    /// A refusal that says what it is and what to do; a failure when it cannot be read.
    pub fn require_raw(&self) -> Result<(), Error> {
        match image_file::probe(&self.file) {
            Ok(None) => Ok(()),
            Ok(Some(format)) => Err(Error::refused(OtherFormat { path: self.path.clone(), format }.to_string())),
            Err(error) => Err(Error::failed(format!("reading the first bytes of {}", self.path.display()))(error)),
        }
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are the same file or device.
    pub fn is_same(&self, other: &Disk) -> bool {
        match (rustix::fs::fstat(&self.file), rustix::fs::fstat(&other.file)) {
            (Ok(a), Ok(b)) => {
                (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) || (a.st_rdev != 0 && a.st_rdev == b.st_rdev)
            }
            _ => false,
        }
    }

    /// The open file. It stays locked for as long as the disk is open.
    pub fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn write_all_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    /// Makes what was written durable.
    pub(crate) fn flush(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }

    /// What begins the writeback of this disk's page cache.
    pub(crate) fn writeback(&self) -> Writeback {
        Writeback::new(Arc::clone(&self.file))
    }

    /// Says that a range will be read soon. Only a hint, so its failure does not matter.
    pub(crate) fn will_read(&self, offset: u64, length: u64) {
        // The kernel cuts one large hint short, but not many small ones.
        for piece in (0..length).step_by(HINT_BYTES as usize) {
            let bytes = std::num::NonZeroU64::new(HINT_BYTES.min(length - piece));
            let _ = rustix::fs::fadvise(&self.file, offset + piece, bytes, rustix::fs::Advice::WillNeed);
        }
    }
}

impl ReadAt for Disk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn size(&self) -> u64 {
        self.size
    }
}

fn in_use(path: &Path) -> Error {
    Error::Failed {
        what: format!("locking {}", path.display()),
        source: io::Error::new(
            io::ErrorKind::ResourceBusy,
            "it is in use; shut down the virtual machine or unmount the file system that uses it first",
        ),
    }
}

/// Whether the image could be locked; false when somebody else has it.
fn try_lock(file: &File, access: Access, path: &Path) -> Result<bool, Error> {
    let operation = match access {
        Access::Look | Access::Read => FlockOperation::NonBlockingLockShared,
        Access::Write => FlockOperation::NonBlockingLockExclusive,
    };
    let lock = if access == Access::Write { QemuLock::Write } else { QemuLock::Read };
    let locked = rustix::fs::flock(file, operation)
        .and_then(|()| lock.try_take(file).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)));
    match locked {
        Ok(is_locked) => Ok(is_locked),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        // File systems without locks (some network ones): there is nothing to ask.
        Err(Errno::NOTSUP | Errno::NOLCK | Errno::NOSYS) => {
            log::warn!("{} cannot be locked on its file system; make sure that nothing else uses it", path.display());
            Ok(true)
        }
        Err(error) => Err(Error::failed(format!("locking {}", path.display()))(error.into())),
    }
}
