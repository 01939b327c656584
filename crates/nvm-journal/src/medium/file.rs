//! Opening a region: which part of which file, whose it is while it is open, and what it survives.
//!
//! Several disks share one device by fixed regions: part `index` of `count` equal parts. The lock is on the bytes of the
//! region, so that parts of one file are opened apart, and one part never twice.

use super::Durability;
use super::delay::DelayModel;
use super::mapped::{MappedMedium, MappedView, map};
use super::neighbours::{HEAD_BYTES, Head, Neighbour, What, overlapping};
use super::region_choice::{RegionChoice, beginnings};
use super::stores::StoreKind;
use crate::error::Error;
use rustix::fs::{FallocateFlags, FileType, Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const PAGE: u64 = 4096;
/// A process that was killed keeps its locks until the kernel has taken it down. Attempts are counted, and not the time: a machine that stands
/// still does not get on with that either.
const LOCK_ATTEMPTS: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

// From linux/magic.h: file systems whose files are host memory.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// How a region is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The file or devdax device.
    pub path: PathBuf,
    /// Which part of it.
    pub region: RegionChoice,
    /// A file that does not exist, or is empty, is made this large, in bytes.
    pub create_bytes: Option<u64>,
    /// Slower memory than there is.
    pub delay: Option<DelayModel>,
    /// How lines are written back; what the processor has when nothing is said.
    pub stores: Option<StoreKind>,
}

impl OpenOptions {
    /// The whole of an existing file, as fast as it is.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        OpenOptions {
            path: path.into(),
            region: RegionChoice::default(),
            create_bytes: None,
            delay: None,
            stores: None,
        }
    }
}

/// An open device or file that regions are taken from.
#[derive(Debug)]
pub struct MediumFile {
    file: File,
    offset: u64,
    len: u64,
    device_bytes: u64,
    options: OpenOptions,
}

impl MediumFile {
    /// Opens and locks a region.
    ///
    /// # Errors
    /// [`Error::Refused`] when it is in use, too small to hold anything, or neither a file nor a devdax device, and when another region that
    /// the device was cut into reaches into it and owes something.
    pub fn open(options: OpenOptions) -> Result<Self, Error> {
        let opened = Self::open_unlocked(options, true)?;
        opened.lock()?;
        opened.refuse_neighbours()?;
        opened.allocate()?;
        Ok(opened)
    }

    /// Opens a region to look at it, whoever uses it.
    ///
    /// # Errors
    /// As [`MediumFile::open`].
    pub fn look(options: OpenOptions) -> Result<Self, Error> {
        Self::open_unlocked(options, false)
    }

    fn open_unlocked(options: OpenOptions, writable: bool) -> Result<Self, Error> {
        let shown = options.path.display();
        // A pipe in its place is not waited for.
        let mut flags =
            OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | if writable { OFlags::RDWR } else { OFlags::RDONLY };
        // In a place where others can make links, a link leads to where somebody else wants to have a file.
        let is_shared = own_files::is_in_shared_place(&options.path);
        if is_shared {
            flags |= OFlags::NOFOLLOW;
        }
        if writable && options.create_bytes.is_some() && !options.path.exists() {
            flags |= OFlags::CREATE | if is_shared { OFlags::EXCL } else { OFlags::empty() };
        }
        let file = rustix::fs::open(&options.path, flags, Mode::RUSR | Mode::WUSR)
            .map(File::from)
            .map_err(|error| Error::failed(format!("opening the NVM region {shown}"))(error.into()))?;
        let metadata = file.metadata().map_err(Error::failed(format!("examining the NVM region {shown}")))?;
        if metadata.is_file() && is_shared {
            // Whoever it belongs to can change what is committed in it.
            own_files::check_opened(&file, &options.path).map_err(|error| Error::refused(error.to_string()))?;
        }
        let device_bytes = match FileType::from_raw_mode(metadata.mode()) {
            FileType::RegularFile if metadata.len() == 0 && writable => {
                let Some(bytes) = options.create_bytes else {
                    return Err(Error::refused(format!("the NVM region {shown} is an empty file")));
                };
                file.set_len(bytes).map_err(Error::failed(format!("giving {shown} its length")))?;
                bytes
            }
            FileType::RegularFile => metadata.len(),
            FileType::CharacterDevice => devdax_bytes(metadata.rdev()).ok_or_else(|| {
                Error::refused(format!("{shown} is a character device, but not a devdax one: it cannot hold a journal"))
            })?,
            FileType::BlockDevice => {
                return Err(Error::refused(format!(
                    "{shown} is a block device, which cannot be mapped for direct access: put a file system with -o dax \
                     on it and name a file there, or use its devdax device"
                )));
            }
            _ => return Err(Error::refused(format!("{shown} is neither a file nor a devdax device"))),
        };
        let Some((offset, len)) = options.region.place(device_bytes) else {
            return Err(Error::refused(format!(
                "{shown} has {device_bytes} bytes, which is too small for region {} of it",
                options.region
            )));
        };
        Ok(MediumFile { file, offset, len, device_bytes, options })
    }

    /// Locks the region's bytes; the lock goes with the open file.
    fn lock(&self) -> Result<(), Error> {
        let mut attempt = 1;
        loop {
            // SAFETY: all-zero is a valid flock; it is plain numbers.
            let mut lock: libc::flock = unsafe { std::mem::zeroed() };
            lock.l_type = libc::F_WRLCK as libc::c_short;
            lock.l_whence = libc::SEEK_SET as libc::c_short;
            lock.l_start = self.offset as libc::off_t;
            lock.l_len = self.len as libc::off_t;
            // SAFETY: the descriptor is open and the lock a valid structure for the length of the call.
            let result = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
            if result == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) if attempt < LOCK_ATTEMPTS => std::thread::sleep(LOCK_PAUSE),
                Some(libc::EAGAIN | libc::EACCES) => {
                    return Err(Error::refused(format!(
                        "region {} of {} is in use by another amberlog; end that first, or name another region",
                        self.options.region,
                        self.path().display()
                    )));
                }
                _ => return Err(Error::failed(format!("locking {}", self.path().display()))(error)),
            }
            attempt += 1;
        }
    }

    /// Refuses a region into which another one reaches that owes something. While this one is locked none that does can come to owe something,
    /// nor be given back: that takes a lock on bytes of this one.
    fn refuse_neighbours(&self) -> Result<(), Error> {
        // One that owes something may have got its owner between two looks, and what was seen in it is its content: so once more.
        if self.neighbour()?.is_none() {
            return Ok(());
        }
        let Some(neighbour) = self.neighbour()? else { return Ok(()) };
        let (choice, path, Neighbour { begin, end, what }) = (self.options.region, self.path().display(), &neighbour);
        let named = RegionChoice::at(self.device_bytes, (*begin, end - begin));
        let part = named.map_or_else(String::new, |named| format!("{named} "));
        Err(Error::refused(match what {
            What::Owed => {
                let how = named.map_or_else(
                    || ", after giving it the size that it had when it was cut so".to_owned(),
                    |named| format!(" --nvm-region {named}"),
                );
                format!(
                    "region {choice} of {path} overlaps with its region {part}from byte {begin} to {end}, which holds committed blocks of a \
                     file system: name a region that does not (nvm-region=INDEX/COUNT), or recover that one first (amberlog recover --disk \
                     IMAGE --nvm {path}{how}); if its image is lost, fill the 4096 bytes from byte {begin} on with zeros"
                )
            }
            What::Unknown(why) => format!(
                "region {choice} of {path} overlaps with its region {part}that begins at byte {begin}, and whether that holds committed blocks \
                 cannot be told ({why}): name a region that does not (nvm-region=INDEX/COUNT), or fill the 4096 bytes from byte {begin} on with \
                 zeros if nobody needs it"
            ),
        }))
    }

    fn neighbour(&self) -> Result<Option<Neighbour>, Error> {
        let beginnings = beginnings(self.device_bytes);
        let place = (self.offset, self.len);
        let examining = || Error::failed(format!("looking for other regions of {}", self.path().display()));
        let metadata = self.file.metadata().map_err(examining())?;
        if FileType::from_raw_mode(metadata.mode()) == FileType::RegularFile {
            // Not mapped: a hole of a full file system would end the process.
            let head_at = |begin| {
                let mut head: Head = [0; HEAD_BYTES];
                self.file.read_exact_at(&mut head, begin).map(|()| head)
            };
            return overlapping(&beginnings, place, &head_at).map_err(examining());
        }
        // A device can only be mapped.
        let all = OpenOptions { region: RegionChoice::default(), ..OpenOptions::new(self.path()) };
        let device = Self::look(all)?.map_for_reading()?;
        let head_at = |begin: u64| {
            let head = device.bytes().get(begin as usize..).and_then(|rest| rest.first_chunk());
            head.copied().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
        };
        overlapping(&beginnings, place, &head_at).map_err(examining())
    }

    /// Makes sure that every byte can be touched: a store to a hole of a full file system would end the process.
    fn allocate(&self) -> Result<(), Error> {
        let metadata = self.file.metadata().map_err(Error::failed("examining the NVM region"))?;
        if FileType::from_raw_mode(metadata.mode()) != FileType::RegularFile {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), self.offset, self.len) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::NOTSUP) if metadata.blocks() * 512 >= metadata.len() => Ok(()),
            Err(error) => {
                Err(Error::failed(format!("allocating all of the NVM region {}", self.path().display()))(error.into()))
            }
        }
    }

    /// Maps the region and finds out what it survives.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn map(self) -> Result<MappedMedium, Error> {
        self.map_as(true)
    }

    /// Maps the region for reading only.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn map_for_reading(self) -> Result<MappedView, Error> {
        self.map_as(false).map(MappedView)
    }

    fn map_as(self, writable: bool) -> Result<MappedMedium, Error> {
        let failed = |what: &str| Error::failed(format!("{what} the NVM region {}", self.options.path.display()));
        let (base, is_synchronous) =
            map(&self.file, self.offset, self.len as usize, writable).map_err(failed("mapping"))?;
        let durability = durability(&self.file, is_synchronous).map_err(failed("examining"));
        let stores = self.options.stores.unwrap_or_else(StoreKind::detect);
        // Made before the answer is looked at, so that it is unmapped whatever that is.
        let medium = MappedMedium::new(
            (base, self.len as usize),
            self.file,
            durability.as_ref().copied().unwrap_or(Durability::Emulated),
            self.options.delay,
            stores,
        );
        let beginnings = beginnings(self.device_bytes);
        let others = beginnings.range(self.offset + 1..self.offset + self.len).map(|begin| begin - self.offset);
        durability.map(|_| medium.with_other_beginnings(others.collect()))
    }

    /// Where the device or file is.
    pub fn path(&self) -> &Path {
        &self.options.path
    }

    /// First byte of the region in its device.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of the region.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none; never so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the device.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// What a region of this file would survive, found by mapping a page of it.
///
/// # Errors
/// When it cannot be mapped or examined.
pub fn probe(file: &File) -> io::Result<Durability> {
    let (base, is_synchronous) = map(file, 0, PAGE as usize, false)?;
    // SAFETY: mapped just now, and nothing refers to it.
    unsafe { rustix::mm::munmap(base.as_ptr().cast(), PAGE as usize)? };
    durability(file, is_synchronous)
}

fn durability(file: &File, is_synchronous: bool) -> io::Result<Durability> {
    if is_synchronous {
        return Ok(Durability::Persistent);
    }
    let kind = rustix::fs::fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok(if [TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC].contains(&kind) {
        Durability::Emulated
    } else {
        Durability::Synced
    })
}

/// Size of a devdax device in bytes; nothing when the device is none.
fn devdax_bytes(device: u64) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let of_device = PathBuf::from(format!("/sys/dev/char/{major}:{minor}"));
    let subsystem = std::fs::read_link(of_device.join("subsystem")).ok()?;
    if subsystem.file_name()? != "dax" {
        return None;
    }
    std::fs::read_to_string(of_device.join("size")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::Medium;

    fn options(path: &Path, bytes: u64) -> OpenOptions {
        OpenOptions { create_bytes: Some(bytes), ..OpenOptions::new(path) }
    }

    #[test]
    fn a_file_in_tmpfs_is_emulated_and_one_on_a_disk_is_synced() {
        let memory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = memory.path().join("region");
        let medium = MediumFile::open(options(&path, 1 << 20)).expect("made").map().expect("mapped");
        assert_eq!(medium.durability(), Durability::Emulated);
        assert_eq!(medium.len(), 1 << 20);
        let disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
        let path = disk.path().join("region");
        let file = MediumFile::open(options(&path, 1 << 20)).expect("made");
        let durability = probe(file.file()).expect("mapped");
        let mut medium = file.map().expect("mapped");
        assert_eq!(medium.durability(), durability);
        // What was fenced is in the file, for whoever reads it past the mapping.
        medium.store_word(4096, 0x1122_3344_5566_7788);
        medium.write_back(4096, 8);
        medium.stream(8192, &[7; 128]);
        medium.fence().expect("fenced");
        drop(medium);
        let bytes = std::fs::read(&path).expect("read");
        assert_eq!(&bytes[4096..4104], &0x1122_3344_5566_7788_u64.to_le_bytes());
        assert_eq!(&bytes[8192..8192 + 128], &[7; 128]);
    }

    #[test]
    fn one_region_has_one_user_and_others_of_the_file_have_theirs() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("region");
        let half = |index| OpenOptions { region: RegionChoice { index, count: 2 }, ..options(&path, 8 << 20) };
        let first = MediumFile::open(half(0)).expect("free");
        let error = MediumFile::open(half(0)).expect_err("in use");
        assert!(error.is_refusal() && error.to_string().contains("in use"), "{error}");
        let whole = MediumFile::open(options(&path, 8 << 20)).expect_err("half of it is in use");
        assert!(whole.is_refusal());
        MediumFile::open(half(1)).expect("the other half is free");
        MediumFile::look(half(0)).expect("looking is free");
        drop(first);
        MediumFile::open(half(0)).expect("free again");
    }

    #[test]
    fn what_cannot_be_mapped_is_refused() {
        for path in ["/dev/null", "/dev/shm"] {
            assert!(MediumFile::look(OpenOptions::new(path)).is_err_and(|error| error.is_refusal()), "{path}");
        }
        let missing = MediumFile::open(OpenOptions::new("/dev/shm/no-such-region"));
        assert!(missing.is_err_and(|error| !error.is_refusal()));
    }
}
