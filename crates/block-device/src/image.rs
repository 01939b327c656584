//! The file or block device behind a disk: opened, locked, measured, probed for direct I/O.

use crate::error::Error;
use image_file::{OtherFormat, QemuLock};
use image_moments::{Changes, Source};
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, OFlags, StatxFlags};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use write_log::WriteLog;

/// The unit of virtio-blk, in bytes.
pub const SECTOR_BYTES: u64 = 512;
/// What a file's physical block is taken to be, in bytes: a hint for the guest's mkfs.
const FILE_PHYSICAL_BLOCK_BYTES: u32 = 4096;
/// An alignment beyond this is not believed, in bytes.
const ALIGNMENT_BYTES_MAX: usize = 64 << 10;
/// A lock may be there for a moment only: udev looks at a block device, or the kernel is still taking the io_uring of a
/// killed process down.
const LOCK_ATTEMPTS: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// How the host's page cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Around it (O_DIRECT) where the image allows, through it otherwise.
    #[default]
    Auto,
    /// Around it, or refuse the image.
    Direct,
    /// Through it.
    Buffered,
}

/// How to open an image.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageOptions {
    /// Never write; several readers may share the image.
    pub read_only: bool,
    /// Whether to go around the page cache.
    pub cache: CacheMode,
    /// It is a raw disk, whatever it looks like: not to be asked.
    pub is_raw: bool,
    /// The time of its last change says something ([`image_file::Seal`]), and stays as it is until something is written.
    pub keep_time: bool,
}

/// What an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A regular file, sparse or not.
    File,
    /// A block device.
    BlockDevice,
}

/// What direct I/O demands. Both are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlignment {
    /// Alignment of buffers in memory, in bytes.
    pub memory_bytes: usize,
    /// Alignment of offsets and lengths in the image, in bytes.
    pub offset_bytes: usize,
}

/// A raw disk image, open and locked.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    file: LockedFile,
    /// What operations go to, where that is marked: nobody else has a descriptor of this open file.
    worked: Option<File>,
    /// Through the page cache: for what is behind the last whole block of a file where direct I/O takes only whole ones.
    tail: Option<File>,
    kind: ImageKind,
    read_only: bool,
    direct: Option<DirectAlignment>,
    /// Asking it for anything waits for the answer, whatever the kernel is told.
    waits: bool,
    logical_block_bytes: u32,
    physical_block_bytes: u32,
    discard: bool,
    size_bytes: AtomicU64,
    write_log: Option<Arc<WriteLog>>,
    changes: OnceLock<Arc<Changes>>,
    second: OnceLock<Second>,
}

/// Another open file of the image. The kernel tells each open file once that write-back has failed: what it told one whose process died before it
/// could say so, it tells the other one.
#[derive(Debug)]
struct Second {
    file: File,
    /// A process before this one may have been told what it could not say: with the first flush this one is asked, too.
    is_asked: AtomicBool,
    /// A flush has failed, and whoever asked for it is told: the process that follows is not to hear it from this one.
    has_failed: AtomicBool,
}

impl Image {
    /// Opens, locks and measures the image at `path`.
    ///
    /// # Errors
    /// [`Error::ImageInUse`] when another process has it; [`Error::OtherFormat`] when it is no raw disk; [`Error::Image`] when it is missing, neither a file nor a block
    /// device, not permitted, or cannot do direct I/O that was demanded.
    pub fn open(path: &Path, options: ImageOptions) -> Result<Self, Error> {
        let (file, kind) = open_file(path, options)?;
        lock(&file, path, options.read_only)?;
        Self::locked(LockedFile { file, is_ours: true.into(), is_locked: true }, kind, path, options)
    }

    /// The same of an image that somebody else has now, and that will be this one's ([`Image::try_lock`]): until then nothing of it may be
    /// written, or relied on. Whether it is a raw disk, whoever has it knows.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn open_unlocked(path: &Path, options: ImageOptions) -> Result<Self, Error> {
        let (file, kind) = open_file(path, options)?;
        let file = LockedFile { file, is_ours: true.into(), is_locked: false };
        Self::locked(file, kind, path, ImageOptions { is_raw: true, ..options })
    }

    /// The same of one that another process has opened so, or given up since.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn adopt_unlocked(file: File, path: &Path, options: ImageOptions) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Image { path: path.to_owned(), reason };
        let metadata = file.metadata().map_err(|e| refuse(e.to_string()))?;
        let kind = if metadata.file_type().is_file() { ImageKind::File } else { ImageKind::BlockDevice };
        Self::locked(
            LockedFile { file, is_ours: false.into(), is_locked: false },
            kind,
            path,
            ImageOptions { is_raw: true, ..options },
        )
    }

    /// Takes the locks of an image that was opened without, or given up. False when somebody else has it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn try_lock(&self) -> Result<bool, Error> {
        try_lock(&self.file.file, &self.path, self.read_only)
    }

    /// Gives the image up: it is anybody's from now on, whoever has a descriptor of this open file.
    pub fn unlock(&self) {
        unlock(&self.file.file);
    }

    /// The same of an image that another process has opened and locked so, and that goes on with it: `file` is its descriptor.
    /// Dropping it leaves the locks to whoever else has that descriptor, until [`Image::own_locks`].
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn adopt(file: File, path: &Path, options: ImageOptions) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Image { path: path.to_owned(), reason };
        let metadata = file.metadata().map_err(|e| refuse(e.to_string()))?;
        let kind = if metadata.file_type().is_file() { ImageKind::File } else { ImageKind::BlockDevice };
        // The same locks of the same open file: this says that they are there.
        lock(&file, path, options.read_only)?;
        Self::locked(
            LockedFile { file, is_ours: false.into(), is_locked: true },
            kind,
            path,
            ImageOptions { is_raw: true, ..options },
        )
    }

    /// From now on the locks go when this is dropped: nobody goes on with the image.
    pub fn own_locks(&self) {
        self.file.is_ours.store(true, Ordering::Relaxed);
    }

    /// From now on dropping this leaves the locks to whoever else has its descriptor, as of one that was adopted.
    pub fn leave_locks(&self) {
        self.file.is_ours.store(false, Ordering::Relaxed);
    }

    fn locked(file: LockedFile, kind: ImageKind, path: &Path, options: ImageOptions) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Image { path: path.to_owned(), reason };
        if !options.is_raw {
            let format = image_file::probe(&file.file).map_err(|e| refuse(format!("it cannot be read: {e}")))?;
            if let Some(format) = format {
                return Err(OtherFormat { path: path.to_owned(), format }.into());
            }
        }

        let (logical_block_bytes, physical_block_bytes) = match kind {
            ImageKind::File => (SECTOR_BYTES as u32, FILE_PHYSICAL_BLOCK_BYTES),
            ImageKind::BlockDevice => {
                let logical = rustix::fs::ioctl_blksszget(&file.file)
                    .map_err(|e| refuse(format!("its block size cannot be read: {e}")))?;
                (logical, rustix::fs::ioctl_blkpbszget(&file.file).unwrap_or(logical).max(logical))
            }
        };
        let sane = |bytes: u32| bytes.is_power_of_two() && (512..=ALIGNMENT_BYTES_MAX as u32).contains(&bytes);
        if !sane(logical_block_bytes) || !sane(physical_block_bytes) {
            return Err(refuse(format!(
                "its block size of {logical_block_bytes}/{physical_block_bytes} bytes is unusable"
            )));
        }
        let direct = match options.cache {
            CacheMode::Buffered => None,
            CacheMode::Auto | CacheMode::Direct => probe_direct(&file.file),
        };
        if direct.is_none() && options.cache == CacheMode::Direct {
            return Err(refuse("its file system does not do direct I/O; allow it to be cached".to_owned()));
        }
        // Who is not to lock it yet must not keep itself from that.
        let may_mark = file.is_locked || !image_file::flock_locks_bytes(&file.file);
        let worked =
            (!options.read_only && may_mark).then(|| open_worked(&file.file, path, direct.is_some())).flatten();
        // Not when it is needed: whoever works on it may not open anything by then.
        let has_tail =
            kind == ImageKind::File && direct.is_some_and(|direct| direct.offset_bytes as u64 > SECTOR_BYTES);
        let tail = has_tail.then(|| reopen(&file.file, !options.read_only, 0)).transpose();
        let tail = tail.map_err(|e| refuse(format!("it cannot be opened once more: {e}")))?;
        let is_locked = file.is_locked;
        let waits = waits_when_asked(&file.file);
        let image = Image {
            path: path.to_owned(),
            file,
            worked,
            tail,
            kind,
            read_only: options.read_only,
            direct,
            waits,
            logical_block_bytes,
            physical_block_bytes,
            discard: false,
            size_bytes: AtomicU64::new(0),
            write_log: None,
            changes: OnceLock::new(),
            second: OnceLock::new(),
        };
        let size_bytes = image.measure()?;
        // Whose image is somebody else's leaves it alone: whoever has that may be sealing it. What turns out not to be possible is said then.
        let discard = !options.read_only
            && if is_locked {
                probe_discard(&image.file.file, kind, size_bytes, options.keep_time)
            } else {
                kind == ImageKind::File
            };
        Ok(Image { discard, ..image })
    }

    /// Has everything written down that a disk engine sends to it.
    #[must_use]
    pub fn with_write_log(self, write_log: Option<Arc<WriteLog>>) -> Self {
        Image { write_log, ..self }
    }

    /// Where everything that is sent to it is written down, if it is.
    pub(crate) fn write_log(&self) -> Option<&WriteLog> {
        self.write_log.as_deref()
    }

    /// From now on whatever a disk engine writes to it is said to these, if nobody was named before. Gives who was.
    pub fn tell(&self, changes: Arc<Changes>) -> &Arc<Changes> {
        self.changes.get_or_init(|| changes)
    }

    /// Who is told of writes.
    pub fn changes(&self) -> Option<&Arc<Changes>> {
        self.changes.get()
    }

    /// Reads the size again: of the file now, rounded down to whole blocks. Returns it, in bytes.
    ///
    /// # Errors
    /// When the size cannot be read.
    pub fn measure(&self) -> Result<u64, Error> {
        let refuse = |reason: String| Error::Image { path: self.path.clone(), reason };
        let real = match self.kind {
            ImageKind::File => {
                self.file.file.metadata().map_err(|e| refuse(format!("its size cannot be read: {e}")))?.len()
            }
            ImageKind::BlockDevice => rustix::fs::seek(&self.file.file, rustix::fs::SeekFrom::End(0))
                .map_err(|e| refuse(format!("its size cannot be read: {e}")))?,
        };
        let size_bytes = real - real % u64::from(self.logical_block_bytes);
        if size_bytes != real {
            log::warn!(
                "the last {} bytes of {} are no whole block of {} bytes; the guest does not see them",
                real - size_bytes,
                self.path.display(),
                self.logical_block_bytes
            );
        }
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
        Ok(size_bytes)
    }

    /// Whether guests only read it.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file that has the locks. It is O_DIRECT where [`Image::direct`] says so.
    pub fn file(&self) -> &File {
        &self.file.file
    }

    /// The open file that the disk engine uses. It is O_DIRECT where [`Image::direct`] says so.
    pub(crate) fn worked(&self) -> &File {
        self.worked.as_ref().unwrap_or(&self.file.file)
    }

    /// Through the page cache, for what is behind the last whole block of a file.
    pub(crate) fn tail(&self) -> Option<&File> {
        self.tail.as_ref()
    }

    /// Whether [`await_idle`](image_file::await_idle) of [`Image::file`] waits for the end of whatever the disk engine has asked the kernel
    /// for, also after the death of this process. Otherwise the pipe alone says that ([`DeviceConfig::under_way`](crate::DeviceConfig)).
    pub fn tells_its_end(&self) -> bool {
        self.worked.is_some()
    }

    /// Has another open file of the image ([`Image::reopen_buffered`]), which outlives this process as the first one does. `follows` says that
    /// another process had both before, and has died: what the kernel told that one last it may have told nobody.
    pub fn set_second(&self, file: File, follows: bool) {
        let second = Second { file, is_asked: AtomicBool::new(follows), has_failed: AtomicBool::new(false) };
        let _ = self.second.set(second);
    }

    /// A flush is about to begin.
    pub(crate) fn flush_begins(&self) {
        if let Some(second) = self.second.get()
            && second.has_failed.swap(false, Ordering::AcqRel)
            && let Err(error) = second.file.sync_data()
        {
            log::debug!("{}: the second open file was told, too: {error}", self.path.display());
        }
    }

    /// A flush has ended. The error of the kernel's, or the one that it had told the process before.
    pub(crate) fn flush_ended(&self, error: i32) -> i32 {
        let Some(second) = self.second.get() else { return error };
        if error > 0 {
            // Not before it is written down who is to hear of it.
            second.has_failed.store(true, Ordering::Release);
            return error;
        }
        if !second.is_asked.swap(false, Ordering::AcqRel) {
            return error;
        }
        match second.file.sync_data() {
            Ok(()) => error,
            Err(told) => {
                log::warn!(
                    "{}: a flush had failed under the process that served it before, which died before it could say so: {told}",
                    self.path.display()
                );
                told.raw_os_error().unwrap_or(libc::EIO)
            }
        }
    }

    /// The same file opened anew, through the page cache and at no lock of its own: for readers of few, unaligned bytes.
    ///
    /// # Errors
    /// When the kernel refuses (no /proc, no permission).
    pub fn reopen_buffered(&self) -> std::io::Result<File> {
        reopen(&self.file.file, !self.read_only, 0)
    }

    /// The same past the page cache, for who writes beside the disk engine; nothing where that goes through it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn reopen_direct(&self) -> std::io::Result<Option<(File, DirectAlignment)>> {
        let Some(alignment) = self.direct else { return Ok(None) };
        Ok(Some((reopen(&self.file.file, !self.read_only, libc::O_DIRECT)?, alignment)))
    }

    /// The same for who copies it while it is written on.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn reopen_for_copy(&self) -> std::io::Result<Source> {
        match self.direct.filter(|_| self.kind == ImageKind::BlockDevice) {
            Some(_) => Ok(Source::past_cache(reopen(&self.file.file, false, libc::O_DIRECT)?)),
            None => Ok(self.reopen_buffered()?.into()),
        }
    }

    /// File or block device.
    pub fn kind(&self) -> ImageKind {
        self.kind
    }

    /// Whether it is never written.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// What direct I/O demands; none when the page cache is used.
    pub fn direct(&self) -> Option<DirectAlignment> {
        self.direct
    }

    /// Whether a read or write of it has the thread that asks wait, unless the kernel is told to have one of its own wait.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// The smallest unit that storage takes, in bytes.
    pub fn logical_block_bytes(&self) -> u32 {
        self.logical_block_bytes
    }

    /// The unit in which storage is efficient, in bytes.
    pub fn physical_block_bytes(&self) -> u32 {
        self.physical_block_bytes
    }

    /// Whether ranges can be given back to the storage.
    pub fn discard(&self) -> bool {
        self.discard
    }

    /// The size of the disk in bytes, as it was last measured: a multiple of the logical block.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }
}

/// Opens an image; nothing is locked.
fn open_file(path: &Path, options: ImageOptions) -> Result<(File, ImageKind), Error> {
    let refuse = |reason: String| Error::Image { path: path.to_owned(), reason };
    let metadata = std::fs::metadata(path).map_err(|e| refuse(explain_open(&e)))?;
    let kind = if metadata.file_type().is_file() {
        ImageKind::File
    } else if metadata.file_type().is_block_device() {
        ImageKind::BlockDevice
    } else {
        return Err(refuse("it is neither a regular file nor a block device".to_owned()));
    };
    // On a block device O_EXCL means: not mounted, not part of a RAID, not opened so by somebody else.
    let exclusive = kind == ImageKind::BlockDevice && !options.read_only;
    let mut attempt = 1;
    let file = loop {
        let opened = OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(libc::O_CLOEXEC | if exclusive { libc::O_EXCL } else { 0 })
            .open(path);
        match opened {
            Ok(file) => break file,
            Err(error) if error.raw_os_error() != Some(libc::EBUSY) => return Err(refuse(explain_open(&error))),
            Err(_) if attempt == LOCK_ATTEMPTS => return Err(Error::ImageInUse { path: path.to_owned() }),
            Err(_) => std::thread::sleep(LOCK_PAUSE),
        }
        attempt += 1;
    };
    Ok((file, kind))
}

/// A file whose locks go when it is dropped, at once: an io_uring that had it registered keeps it open for a while.
#[derive(Debug)]
struct LockedFile {
    file: File,
    /// Locks belong to the open file, which other processes may have, too: who goes on with an image and fails leaves them alone.
    is_ours: AtomicBool,
    /// They were there when it was opened.
    is_locked: bool,
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        if !self.is_ours.load(Ordering::Relaxed) {
            return;
        }
        unlock(&self.file);
    }
}

/// Has an image be nobody's whose descriptor this is, whoever else has that: the locks are the open file's.
pub fn unlock(file: &File) {
    if let Err(error) = rustix::fs::flock(file, FlockOperation::NonBlockingUnlock) {
        log::debug!("unlocking an image failed: {error}");
    }
    if let Err(error) = QemuLock::release(file) {
        log::debug!("unlocking an image failed: {error}");
    }
}

fn reopen(file: &File, is_writable: bool, flags: i32) -> std::io::Result<File> {
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(is_writable).custom_flags(flags).open(name)
}

/// Opens an image once more, for operations alone, and marks that. Nothing where that cannot be.
fn open_worked(file: &File, path: &Path, is_direct: bool) -> Option<File> {
    let flags = if is_direct { libc::O_DIRECT } else { 0 };
    let worked = reopen(file, true, flags);
    let marked = worked.and_then(|worked| Ok(image_file::mark_under_way(&worked, file)?.then_some(worked)));
    marked.unwrap_or_else(|error| {
        log::debug!("who follows a worker that died waits longer for {}: {error}", path.display());
        None
    })
}

/// `FUSE_SUPER_MAGIC` of statfs(2). io_uring takes such a file for one that may be asked without waiting (it has a `poll`), and it is not:
/// each write waits for the file system's answer, with whatever else the thread has to do behind it (seen with Linux 6.18).
const FUSE: u64 = 0x6573_5546;

fn waits_when_asked(file: &File) -> bool {
    match rustix::fs::fstatfs(file) {
        Ok(status) => status.f_type as u64 == FUSE,
        // Some of that family do not answer the question.
        Err(error) => error == rustix::io::Errno::NOSYS,
    }
}

fn explain_open(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "there is no such file; check the path".to_owned(),
        std::io::ErrorKind::PermissionDenied => {
            "permission denied; run as a user that may read and write it".to_owned()
        }
        _ => error.to_string(),
    }
}

fn lock(file: &File, path: &Path, read_only: bool) -> Result<(), Error> {
    for attempt in 1.. {
        if try_lock(file, path, read_only)? {
            return Ok(());
        }
        if attempt == LOCK_ATTEMPTS {
            break;
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    Err(Error::ImageInUse { path: path.to_owned() })
}

/// Whether the image could be locked; false when somebody else has it.
fn try_lock(file: &File, path: &Path, read_only: bool) -> Result<bool, Error> {
    let operation =
        if read_only { FlockOperation::NonBlockingLockShared } else { FlockOperation::NonBlockingLockExclusive };
    match rustix::fs::flock(file, operation) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
        Err(error) => {
            return Err(Error::Image { path: path.to_owned(), reason: format!("it cannot be locked: {error}") });
        }
    }
    // So that a QEMU that opens the image by itself is refused as well, and we are while one has it.
    let lock = if read_only { QemuLock::Read } else { QemuLock::Write };
    match lock.try_take(file) {
        Ok(true) => Ok(true),
        Ok(false) => {
            // A file that stays open would keep others from it.
            if let Err(error) = rustix::fs::flock(file, FlockOperation::NonBlockingUnlock) {
                log::debug!("unlocking {} failed: {error}", path.display());
            }
            Ok(false)
        }
        Err(error) => {
            // Some network file systems have no such locks; flock has succeeded, which is what our own kind looks at.
            log::debug!("{} takes no lock that QEMU would see: {error}", path.display());
            Ok(true)
        }
    }
}

/// Turns O_DIRECT on and sees what it demands; leaves it off where it does not work.
fn probe_direct(file: &File) -> Option<DirectAlignment> {
    let flags = rustix::fs::fcntl_getfl(file).ok()?;
    rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT).ok()?;
    let told = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|statx| statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|statx| (statx.stx_dio_mem_align as usize, statx.stx_dio_offset_align as usize));
    let candidates = match told {
        // The kernel says that there is no direct I/O here.
        Some((0, _) | (_, 0)) => Vec::new(),
        Some((memory_bytes, offset_bytes)) => vec![DirectAlignment { memory_bytes, offset_bytes }],
        // Before Linux 6.1, and on file systems that do not tell.
        None => [512, 4096].map(|bytes| DirectAlignment { memory_bytes: bytes, offset_bytes: bytes }).to_vec(),
    };
    for candidate in candidates {
        let DirectAlignment { memory_bytes, offset_bytes } = candidate;
        let sane = |bytes: usize| bytes.is_power_of_two() && bytes <= ALIGNMENT_BYTES_MAX;
        if sane(memory_bytes) && sane(offset_bytes) && direct_read_works(file, candidate) {
            return Some(DirectAlignment { memory_bytes, offset_bytes: offset_bytes.max(SECTOR_BYTES as usize) });
        }
    }
    if let Err(error) = rustix::fs::fcntl_setfl(file, flags) {
        log::warn!("turning direct I/O off again failed: {error}");
    }
    None
}

fn direct_read_works(file: &File, alignment: DirectAlignment) -> bool {
    let DirectAlignment { memory_bytes, offset_bytes } = alignment;
    let mut buffer = vec![0u8; offset_bytes + memory_bytes];
    let skip = buffer.as_ptr().align_offset(memory_bytes);
    buffer.get_mut(skip..skip + offset_bytes).is_some_and(|part| rustix::io::pread(file, part, 0).is_ok())
}

/// Whether a hole can be punched: tried beyond the end of a file, where there is nothing to lose.
fn probe_discard(file: &File, kind: ImageKind, size_bytes: u64, keep_time: bool) -> bool {
    match kind {
        ImageKind::File => {
            let beyond = size_bytes.next_multiple_of(1 << 20);
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let changed = file.metadata().and_then(|metadata| metadata.modified());
            // Whoever may not set the time back does not try: what turns out not to be possible is said then.
            if keep_time && !changed.as_ref().is_ok_and(|changed| file.set_modified(*changed).is_ok()) {
                return true;
            }
            let can = rustix::fs::fallocate(file, mode, beyond, 4096).is_ok();
            // Some file systems take that for a change, which it is not.
            if keep_time
                && let Ok(changed) = changed
                && let Err(error) = file.set_modified(changed)
            {
                log::debug!("the time of an image's last change cannot be set: {error}");
            }
            can
        }
        ImageKind::BlockDevice => {
            use std::os::unix::fs::MetadataExt;
            let Ok(metadata) = file.metadata() else { return false };
            let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
            // A partition has no queue of its own: its disk's is one level up. A hole is punched in a block device by
            // zeroing that unmaps, so that both must be there.
            ["queue", "../queue"].iter().any(|queue| {
                ["discard_max_bytes", "write_zeroes_max_bytes"].iter().all(|limit| {
                    std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{queue}/{limit}"))
                        .is_ok_and(|text| text.trim() != "0")
                })
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image_file(len: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.as_file().set_len(len).expect("its length");
        file
    }

    /// A loop device over a file system that is too small: what is written to it fails when it is written back.
    #[derive(Default)]
    struct TooSmall {
        place: Option<tempfile::TempDir>,
        device: Option<String>,
    }

    fn run(program: &str, arguments: &[&str]) -> Option<String> {
        let output = std::process::Command::new(program).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    impl TooSmall {
        /// Nothing where nobody may make one.
        fn new() -> Option<Self> {
            let place = tempfile::tempdir().expect("a directory");
            let at = place.path().to_str()?.to_owned();
            run("mount", &["-t", "tmpfs", "-o", "size=1m", "tmpfs", &at])?;
            let mut small = TooSmall { place: Some(place), device: None };
            let file = format!("{at}/file");
            File::create(&file).and_then(|file| file.set_len(8 << 20)).expect("made");
            small.device = Some(run("losetup", &["--find", "--show", &file])?);
            Some(small)
        }

        fn image(&self) -> Image {
            let path = Path::new(self.device.as_deref().expect("it has one"));
            let options = ImageOptions { cache: CacheMode::Buffered, is_raw: true, ..ImageOptions::default() };
            Image::open(path, options).expect("opens")
        }
    }

    impl Drop for TooSmall {
        fn drop(&mut self) {
            self.device.iter().for_each(|device| drop(run("losetup", &["--detach", device])));
            let at = self.place.iter().filter_map(|place| place.path().to_str());
            at.for_each(|at| drop(run("umount", &["--lazy", at])));
        }
    }

    /// The first process dies with what the kernel has told it, before it could say so, or soon after. The next one asks the second open file, too.
    #[test]
    fn what_the_kernel_told_a_process_that_died_is_told_to_the_next_one() {
        let Some(small) = TooSmall::new() else {
            eprintln!("not tried: nobody may mount, or make loop devices, here");
            return;
        };
        for is_said in [false, true] {
            let first = small.image();
            first.set_second(first.reopen_buffered().expect("opened"), false);
            let of = |file: &File| file.try_clone().expect("a descriptor");
            let (one, other) = (of(first.file()), of(&first.second.get().expect("it has one").file));
            std::os::unix::fs::FileExt::write_all_at(first.file(), &vec![1; 4 << 20], 0).expect("in the page cache");
            let flush = |image: &Image| {
                image.flush_begins();
                let error =
                    image.file().sync_data().err().map_or(0, |error| error.raw_os_error().expect("the kernel's"));
                image.flush_ended(error)
            };
            assert_eq!(flush(&first), libc::EIO, "it is too small");
            if is_said {
                assert_eq!(flush(&first), 0, "it is said once");
            }
            drop(first);
            let path = Path::new(small.device.as_deref().expect("it has one"));
            let options = ImageOptions { cache: CacheMode::Buffered, is_raw: true, ..ImageOptions::default() };
            let next = Image::adopt(one, path, options).expect("it goes on");
            next.set_second(other, true);
            assert_eq!(flush(&next), if is_said { 0 } else { libc::EIO });
            assert_eq!(flush(&next), 0, "once");
        }
    }

    #[test]
    fn the_last_partial_sector_is_not_seen() {
        let file = image_file((1 << 20) + 100);
        let image = Image::open(file.path(), ImageOptions::default()).expect("opens");
        assert_eq!(image.size_bytes(), 1 << 20);
        file.as_file().set_len(2 << 20).expect("grows");
        assert_eq!(image.measure().expect("measures"), 2 << 20);
    }

    /// QEMU has it, which knows nothing of flock: what waits for it must not keep others from it meanwhile.
    #[test]
    fn an_image_that_could_not_be_locked_is_nobodys() {
        let file = image_file(1 << 20);
        let qemus = file.reopen().expect("opened");
        assert!(QemuLock::Write.try_take(&qemus).expect("locked"));
        let image = Image::open_unlocked(file.path(), ImageOptions::default()).expect("opens");
        assert!(!image.try_lock().expect("asked"), "QEMU has it");
        let third = file.reopen().expect("opened");
        rustix::fs::flock(&third, FlockOperation::NonBlockingLockExclusive).expect("nobody's");
        drop((qemus, third));
        assert!(image.try_lock().expect("asked"), "nobody has it");
    }

    #[test]
    fn who_goes_on_with_an_image_and_fails_leaves_its_locks() {
        let file = image_file(1 << 20);
        let first = Image::open(file.path(), ImageOptions::default()).expect("opens");
        let kept = first.file().try_clone().expect("a descriptor");
        // The worker that had it is killed: nothing of it is dropped, but closed.
        std::mem::forget(first);
        for is_at_its_end in [false, true] {
            let descriptor = kept.try_clone().expect("a descriptor");
            let image = Image::adopt(descriptor, file.path(), ImageOptions::default()).expect("taken");
            Image::open(file.path(), ImageOptions::default()).expect_err("is locked");
            if is_at_its_end {
                image.own_locks();
            }
            drop(image);
            assert_eq!(Image::open(file.path(), ImageOptions::default()).is_ok(), is_at_its_end);
        }
    }

    #[test]
    fn a_second_writer_is_refused_with_a_sentence() {
        let file = image_file(1 << 20);
        let first = Image::open(file.path(), ImageOptions::default()).expect("opens");
        let error = Image::open(file.path(), ImageOptions::default()).expect_err("is locked");
        assert!(matches!(error, Error::ImageInUse { .. }), "{error}");
        assert!(error.to_string().contains("in use by another process"));
        let reader = ImageOptions { read_only: true, ..ImageOptions::default() };
        Image::open(file.path(), reader).expect_err("a reader beside a writer is refused, too");
        drop(first);
        let _one = Image::open(file.path(), reader).expect("opens");
        let _two = Image::open(file.path(), reader).expect("readers share");
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let missing = Image::open(Path::new("/nonexistent/disk.img"), ImageOptions::default());
        assert!(missing.expect_err("is missing").to_string().contains("no such file"));
        let directory = tempfile::tempdir().expect("a directory");
        let error = Image::open(directory.path(), ImageOptions::default()).expect_err("is a directory");
        assert!(error.to_string().contains("neither a regular file nor a block device"), "{error}");
    }

    #[test]
    fn buffered_is_never_direct() {
        let file = image_file(1 << 20);
        let options = ImageOptions { cache: CacheMode::Buffered, ..ImageOptions::default() };
        let image = Image::open(file.path(), options).expect("opens");
        assert!(image.direct().is_none());
        let flags = rustix::fs::fcntl_getfl(image.file()).expect("flags");
        assert!(!flags.contains(OFlags::DIRECT));
    }
}
