//! A store in a directory: a file each for segments, reserves, and end marks.
//!
//! `segment-NUMBER`; `new-NUMBER`, one that has no name yet, removed when the store is opened; `reserve-0` and `reserve-1`;
//! `end-0` and `end-1`. What must never happen: a file that the store did not make, or does not understand, is changed.

use super::end_mark::END_MARK_BYTES;
use super::medium::{Medium, SegmentFile, is_media_error};
use super::staging::ALIGNMENT;
use own_files::OwnDirectory;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Which file it is, whatever it is called.
type Identity = (u64, u64);

fn identity(file: &File) -> io::Result<Identity> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

/// A directory on a file system.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// Locked for as long as the store is open: two servers on one store would each overwrite the other.
    handle: File,
    /// The segment that has no name yet, and what its file is called until then.
    unnamed: Option<(u64, PathBuf, Identity)>,
    /// The segment that was named last.
    named: Option<(PathBuf, Identity)>,
    /// Bytes that reserves should have.
    reserve_bytes: u64,
    end_marks: Option<[File; 2]>,
    /// Whether their names are durable.
    are_marks_named: bool,
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
        Ok(Directory {
            path: own.path().to_owned(),
            handle,
            unnamed: None,
            named: None,
            reserve_bytes: 0,
            end_marks: None,
            are_marks_named: false,
        })
    }

    fn segment(&self, number: u64) -> PathBuf {
        self.path.join(format!("segment-{number:016x}"))
    }

    fn reserves(&self) -> [PathBuf; 2] {
        [0, 1].map(|index| self.path.join(format!("reserve-{index}")))
    }

    fn end_mark_paths(&self) -> [PathBuf; 2] {
        [0, 1].map(|index| self.path.join(format!("end-{index}")))
    }

    /// Makes a file with room for `bytes`, or makes it longer.
    fn allocate(&self, path: &Path, bytes: u64) -> io::Result<File> {
        let is_new = !path.exists();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let made = match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
            // A file system without reservation: a full disk is then found when writing, which ends the store.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => file.sync_all(),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = made {
            if is_new {
                let _ = std::fs::remove_file(path);
            }
            return Err(error);
        }
        Ok(file)
    }

    /// Past the page cache: what is written is read only after a crash. Some file systems cannot.
    fn writable(&mut self, number: u64, path: PathBuf, file: File) -> io::Result<Segment> {
        let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(&path).ok();
        self.unnamed = Some((number, path, identity(&file)?));
        Ok(Segment { file, direct })
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
        let path = self.path.join(format!("new-{number:016x}"));
        // Left by a server that died before it was named: nobody was told of anything in it.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = self.allocate(&path, bytes)?;
        self.writable(number, path, file)
    }

    fn publish(&mut self, number: u64) -> io::Result<()> {
        let Some((_, from, identity)) = self.unnamed.take().filter(|(unnamed, ..)| *unnamed == number) else {
            return Err(io::Error::other(format!("segment {number:016x} was not made")));
        };
        let to = self.segment(number);
        // Never over another: what lies there is not ours.
        rustix::fs::renameat_with(rustix::fs::CWD, &from, rustix::fs::CWD, &to, rustix::fs::RenameFlags::NOREPLACE)
            .or_else(|error| match error {
                rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS if !to.exists() => rustix::fs::rename(&from, &to),
                error => Err(error),
            })?;
        self.handle.sync_all()?;
        self.named = Some((to, identity));
        Ok(())
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
        let path = self.segment(number);
        let bytes_of = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let bytes = std::fs::metadata(&path)?.len();
        // One that is shorter than wished is kept, too: on a disk that is full somebody else gets what is let go, and there would be none.
        let wanting = self.reserves().into_iter().map(|reserve| (bytes_of(&reserve), reserve)).min();
        let wanting = wanting.filter(|(has, _)| *has < self.reserve_bytes.min(bytes));
        if let Some((_, reserve)) = wanting {
            std::fs::rename(&path, &reserve)?;
            if bytes > self.reserve_bytes {
                OpenOptions::new().write(true).open(&reserve)?.set_len(self.reserve_bytes)?;
            }
            return Ok(());
        }
        std::fs::remove_file(path)
    }

    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        self.reserve_bytes = bytes;
        for path in self.reserves() {
            if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() >= bytes) {
                continue;
            }
            self.allocate(&path, bytes)?;
        }
        Ok(())
    }

    fn reserved_bytes(&self) -> u64 {
        let bytes = |path: PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        self.reserves().into_iter().map(bytes).sum()
    }

    fn create_from_reserve(&mut self, number: u64, least: u64) -> io::Result<(Segment, u64)> {
        for path in self.reserves() {
            let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
            let bytes = file.metadata()?.len();
            if bytes >= least {
                return Ok((self.writable(number, path, file)?, bytes));
            }
        }
        Err(io::ErrorKind::StorageFull.into())
    }

    fn read_end_marks(&self) -> io::Result<[Option<Vec<u8>>; 2]> {
        let mut marks = [None, None];
        for (mark, path) in marks.iter_mut().zip(self.end_mark_paths()) {
            let mut bytes = vec![0; END_MARK_BYTES];
            let read = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, 0));
            *mark = match read {
                Ok(()) => Some(bytes),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof || is_media_error(&error) => {
                    Some(Vec::new())
                }
                Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
            };
        }
        Ok(marks)
    }

    fn write_end_mark(&mut self, mark: &[u8]) -> io::Result<()> {
        if self.end_marks.is_none() {
            let [a, b] = self.end_mark_paths();
            let open = |path: &Path| {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
            };
            self.end_marks = Some([open(&a)?, open(&b)?]);
            self.are_marks_named = false;
        }
        self.end_marks.iter().flatten().try_for_each(|file| file.write_all_at(mark, 0))
    }

    fn sync_end_mark(&mut self) -> io::Result<()> {
        let mut is_gone = false;
        for file in self.end_marks.iter().flatten() {
            file.sync_data()?;
            is_gone |= file.metadata()?.nlink() == 0;
        }
        if !std::mem::replace(&mut self.are_marks_named, true) {
            self.handle.sync_all()?;
        }
        if is_gone {
            // Somebody removed one: the next mark is written to new files.
            self.end_marks = None;
        }
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        let Some((path, identity)) = &self.named else { return Ok(()) };
        let found = std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
        if found.as_ref().is_ok_and(|found| found == identity) {
            return Ok(());
        }
        let reason = format!("{} was moved, removed or replaced by something else than this server", path.display());
        Err(io::Error::new(io::ErrorKind::NotFound, reason))
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
