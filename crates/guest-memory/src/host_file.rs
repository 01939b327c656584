//! A file of the daemon's own in tmpfs, mapped: tables and copied pages that outlive the process.
//!
//! The file is sparse. A page that does not exist yet must be reserved before it is touched: touching a hole when tmpfs
//! is full would end the process with SIGBUS, reserving it is an error that can be handled.

use crate::error::Error;
use crate::map::Mapping;
use crate::slice::{MemorySlice, PageId};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A mapped file of a fixed (sparse) length.
#[derive(Debug)]
pub struct HostFile {
    file: File,
    mapping: Mapping,
    len: u64,
}

impl HostFile {
    /// Makes a file of `len` bytes, none of them allocated, that only its owner can read.
    ///
    /// # Errors
    /// When it exists, or cannot be made or mapped.
    pub fn create(path: &Path, len: u64) -> Result<Self, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|e| Error::system(format!("making {}", path.display()), e))?;
        file.set_len(len).map_err(|e| Error::system(format!("giving {} its length", path.display()), e))?;
        Self::from_file(file, len, path)
    }

    /// Maps a file as it is. No link is followed, and no pipe waited for.
    ///
    /// # Errors
    /// When it cannot be opened or mapped, or is empty.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| Error::system(format!("opening {}", path.display()), e))?;
        Self::from_opened(file, path)
    }

    /// Maps a file that was opened for reading and writing. `shown` is what it is called in errors.
    ///
    /// # Errors
    /// When it cannot be mapped, or is empty.
    pub fn from_opened(file: File, shown: &Path) -> Result<Self, Error> {
        let len =
            file.metadata().map_err(|e| Error::system(format!("reading the size of {}", shown.display()), e))?.len();
        Self::from_file(file, len, shown)
    }

    fn from_file(file: File, len: u64, path: &Path) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::system(
                format!("mapping {}, which is empty", path.display()),
                io::Error::from_raw_os_error(libc::EINVAL),
            ));
        }
        let mapping =
            Mapping::new(&file, len as usize).map_err(|e| Error::system(format!("mapping {}", path.display()), e))?;
        Ok(HostFile { file, mapping, len })
    }

    /// Length in bytes, holes included.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no byte; never so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes sure that a range can be touched.
    ///
    /// # Errors
    /// ENOSPC when tmpfs is full.
    pub fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len);
        if self.is_simulated_full() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        #[cfg(feature = "simulate")]
        if simulated_room::fails_now() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Ok(rustix::fs::fallocate(&self.file, rustix::fs::FallocateFlags::KEEP_SIZE, offset, len)?)
    }

    /// Whether a simulation says that there is no room, not even where it was reserved before. Never so outside of one.
    pub fn is_simulated_full(&self) -> bool {
        #[cfg(feature = "simulate")]
        let is_full = simulated_room::is_full();
        #[cfg(not(feature = "simulate"))]
        let is_full = false;
        is_full
    }

    /// Gives a range back to the host; it reads as zeros and must be reserved again before it is touched.
    ///
    /// # Errors
    /// When the file system cannot punch holes.
    pub fn give_back(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len);
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        // The file's last page goes only as a whole.
        let len = if offset + len == self.len { len.next_multiple_of(crate::PAGE_BYTES as u64) } else { len };
        Ok(rustix::fs::fallocate(&self.file, flags, offset, len)?)
    }

    /// Copies a range out without making room for what is not there, as looking at it in place would: a hole is zeros.
    ///
    /// # Errors
    /// Those of reading, and when the file is shorter than it was.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.check(offset, buffer.len() as u64);
        std::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, offset)
    }

    /// Bytes that the file system of the file has room for; nothing where it does not say.
    pub fn room_bytes(&self) -> Option<u64> {
        #[cfg(feature = "simulate")]
        if let Some(room_bytes) = simulated_room::room_bytes() {
            return Some(room_bytes);
        }
        let room = rustix::fs::fstatvfs(&self.file).ok()?;
        (room.f_blocks > 0).then(|| room.f_bavail.saturating_mul(room.f_frsize))
    }

    /// Bytes that the file really takes.
    pub fn allocated_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.blocks() * 512)
    }

    /// A range of the file, which must have been reserved. The slice must not be used after the file is dropped.
    ///
    /// # Panics
    /// If the range is not inside the file.
    pub fn slice(&self, offset: u64, len: usize) -> MemorySlice {
        self.check(offset, len as u64);
        // SAFETY: inside the mapping (checked); users keep the file for as long as the slice, as they are told above.
        unsafe { MemorySlice::new(self.mapping.at(offset as usize), len, PageId::NONE, 0) }
    }

    /// Reads the word at byte `offset`, a multiple of 4.
    pub fn load_u32(&self, offset: u64) -> u32 {
        self.atomic_u32(offset).load(Ordering::Acquire)
    }

    /// Stores the word at byte `offset`: one step, as seen by a process that opens the file after this one has died.
    pub fn store_u32(&self, offset: u64, value: u32) {
        #[cfg(feature = "simulate")]
        simulated_kill::before_store();
        self.atomic_u32(offset).store(value, Ordering::Release);
    }

    /// Reads the double word at byte `offset`, a multiple of 8.
    pub fn load_u64(&self, offset: u64) -> u64 {
        self.atomic_u64(offset).load(Ordering::Acquire)
    }

    /// Stores the double word at byte `offset` in one step.
    pub fn store_u64(&self, offset: u64, value: u64) {
        #[cfg(feature = "simulate")]
        simulated_kill::before_store();
        self.atomic_u64(offset).store(value, Ordering::Release);
    }

    fn atomic_u32(&self, offset: u64) -> &AtomicU32 {
        self.check(offset, 4);
        assert!(offset.is_multiple_of(4), "word at odd offset {offset}");
        // SAFETY: inside the mapping, aligned, and only ever accessed as an atomic.
        unsafe { AtomicU32::from_ptr(self.mapping.at(offset as usize).cast()) }
    }

    fn atomic_u64(&self, offset: u64) -> &AtomicU64 {
        self.check(offset, 8);
        assert!(offset.is_multiple_of(8), "double word at odd offset {offset}");
        // SAFETY: inside the mapping, aligned, and only ever accessed as an atomic.
        unsafe { AtomicU64::from_ptr(self.mapping.at(offset as usize).cast()) }
    }

    fn check(&self, offset: u64, len: u64) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset}+{len} outside a file of {} bytes",
            self.len
        );
    }
}

/// For simulations: a tmpfs that is full.
#[cfg(feature = "simulate")]
pub mod simulated_room {
    use std::cell::Cell;
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, Ordering};

    static FULL_FOR_ALL: AtomicBool = AtomicBool::new(false);

    thread_local! {
        static FULL: Cell<bool> = const { Cell::new(false) };
        static FAILING: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
        static ASKED: Cell<u64> = const { Cell::new(0) };
        static ROOM_BYTES: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// From now on this thread is told that the file system has room for so much, or what it really has.
    pub fn set_room_bytes(room_bytes: Option<u64>) {
        ROOM_BYTES.set(room_bytes);
    }

    pub(super) fn room_bytes() -> Option<u64> {
        ROOM_BYTES.get()
    }

    /// Of the reservations of this thread from now on, counted from 0, these fail, as with a real tmpfs that somebody else fills: what was
    /// reserved before stays.
    pub fn fail_reservations(which: Range<u64>) {
        FAILING.set((which.start, which.end));
        ASKED.set(0);
    }

    /// How many reservations this thread has asked for since.
    pub fn reservations() -> u64 {
        ASKED.get()
    }

    pub(super) fn fails_now() -> bool {
        let (number, (start, end)) = (ASKED.get(), FAILING.get());
        ASKED.set(number + 1);
        (start..end).contains(&number)
    }

    /// From now on this thread finds no room in a [`HostFile`](super::HostFile), or does again.
    pub fn set_full(full: bool) {
        FULL.set(full);
    }

    /// The same for all threads of this process.
    pub fn set_full_for_all(full: bool) {
        FULL_FOR_ALL.store(full, Ordering::SeqCst);
    }

    pub(super) fn is_full() -> bool {
        FULL.get() || FULL_FOR_ALL.load(Ordering::SeqCst)
    }
}

/// For simulations: a look at the files of a process as they would be if it were killed before its next store.
#[cfg(feature = "simulate")]
pub mod simulated_kill {
    use std::cell::RefCell;

    thread_local! {
        static LOOK: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
    }

    /// Has `look` called before every word that this thread stores into a [`HostFile`](super::HostFile), or nobody.
    /// `look` itself is not called for what it stores. Gives back who was called before.
    pub fn set_look(look: Option<Box<dyn FnMut()>>) -> Option<Box<dyn FnMut()>> {
        LOOK.with(|place| place.replace(look))
    }

    pub(super) fn before_store() {
        if let Some(mut look) = LOOK.with(RefCell::take) {
            look();
            LOOK.with(|place| place.replace(Some(look)));
        }
    }
}
