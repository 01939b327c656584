//! What the store keeps its segments in: a directory, or a simulation that loses what was not made durable.

use super::staging::ALIGNMENT;
use own_files::OwnDirectory;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// One segment's bytes.
pub trait SegmentFile: Send {
    /// Writes at an offset.
    ///
    /// # Errors
    /// When it cannot be written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Reads exactly; what lies beyond the end is an error.
    ///
    /// # Errors
    /// When it cannot be read.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Makes everything written before durable.
    ///
    /// # Errors
    /// When that failed: then nobody knows what is durable, and the store must not go on.
    fn sync(&mut self) -> io::Result<()>;
    /// Cuts it, durably.
    ///
    /// # Errors
    /// When it cannot be cut.
    fn truncate(&mut self, bytes: u64) -> io::Result<()>;
    /// Its length, in bytes.
    ///
    /// # Errors
    /// When it cannot be examined.
    fn len(&self) -> io::Result<u64>;
    /// Whether it has no byte.
    ///
    /// # Errors
    /// When it cannot be examined.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// Where segments are.
pub trait Medium: Send {
    /// A segment.
    type File: SegmentFile;
    /// What groups begin at multiples of, in bytes: a power of two from 64 to 4096. Where the medium writes less than this it
    /// may read and write again what lies beside it.
    fn block_bytes(&self) -> usize;
    /// Numbers of the segments there are, ascending.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn list(&self) -> io::Result<Vec<u64>>;
    /// Makes a segment with room for `bytes`, all of it reserved: writing into it cannot find the disk full. Its name is
    /// durable on return.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] when there is no room; nothing is left then.
    fn create(&mut self, number: u64, bytes: u64) -> io::Result<Self::File>;
    /// Opens a segment.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&self, number: u64) -> io::Result<Self::File>;
    /// Removes a segment.
    ///
    /// # Errors
    /// When it cannot be removed.
    fn delete(&mut self, number: u64) -> io::Result<()>;
}

/// A directory on a file system.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// Locked for as long as the store is open: two servers on one store would each overwrite the other.
    handle: File,
}

impl Directory {
    /// Opens a directory, made if there is none, and locks it.
    ///
    /// # Errors
    /// When it cannot be made, or another server has it.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Whoever can write to it can put a link in the place of a segment.
        let own = OwnDirectory::open_or_make_allowing(path, 0o055)?;
        let handle = File::from(own.as_fd().try_clone_to_owned()?);
        rustix::fs::flock(&handle, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            if error == rustix::io::Errno::WOULDBLOCK {
                io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    format!("{} is in use by another journal server; stop that first", path.display()),
                )
            } else {
                error.into()
            }
        })?;
        Ok(Directory { path: own.path().to_owned(), handle })
    }

    fn segment(&self, number: u64) -> PathBuf {
        self.path.join(format!("segment-{number:016x}"))
    }
}

impl Medium for Directory {
    type File = Segment;

    fn block_bytes(&self) -> usize {
        ALIGNMENT
    }

    fn list(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("segment-"));
            numbers.extend(number.and_then(|number| u64::from_str_radix(number, 16).ok()));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn create(&mut self, number: u64, bytes: u64) -> io::Result<Segment> {
        let path = self.segment(number);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let made = match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
            // A file system without reservation: a full disk is then found when writing, which ends the store.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => file.sync_all().and_then(|()| self.handle.sync_all()),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = made {
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        // Past the page cache: what is written is read only after a crash. Some file systems cannot.
        let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(&path).ok();
        Ok(Segment { file, direct })
    }

    fn open(&self, number: u64) -> io::Result<Segment> {
        let flags = rustix::fs::OFlags::NOFOLLOW.union(rustix::fs::OFlags::NONBLOCK).bits().cast_signed();
        let path = self.segment(number);
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other(format!("{} is no plain file; remove what is there", path.display())));
        }
        Ok(Segment { file, direct: None })
    }

    fn delete(&mut self, number: u64) -> io::Result<()> {
        std::fs::remove_file(self.segment(number))
    }
}

/// A segment in a directory.
#[derive(Debug)]
pub struct Segment {
    file: File,
    /// The same file, opened for direct I/O.
    direct: Option<File>,
}

impl SegmentFile for Segment {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let is_aligned = |number: usize| number.is_multiple_of(ALIGNMENT);
        let takes_direct = is_aligned(bytes.as_ptr().addr()) && is_aligned(bytes.len()) && is_aligned(offset as usize);
        if let Some(direct) = self.direct.as_ref().filter(|_| takes_direct) {
            match direct.write_all_at(bytes, offset) {
                // A file system that opens a file so, and then asks for more than we give.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.direct = None,
                written => return written,
            }
        }
        self.file.write_all_at(bytes, offset)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)?;
        self.file.sync_all()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}
