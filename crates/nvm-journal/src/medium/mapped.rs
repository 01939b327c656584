//! A region of a file, mapped: DAX, an ordinary file, or tmpfs.

use super::delay::DelayModel;
use super::stores::StoreKind;
use super::{Durability, LINE_BYTES, Medium};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// A mapped region. The file stays open, and its lock held, for as long as this lives.
#[derive(Debug)]
pub struct MappedMedium {
    base: NonNull<u8>,
    len: usize,
    file: File,
    durability: Durability,
    stores: StoreKind,
    delay: Option<DelayModel>,
    other_beginnings: Vec<u64>,
    /// Bytes whose writing back was begun since the last fence.
    in_flight_bytes: u64,
    /// Something was stored that no fence has covered.
    is_dirty: bool,
    has_failed: bool,
}

// SAFETY: the mapping is owned by this value alone; nothing of it is tied to a thread.
unsafe impl Send for MappedMedium {}

/// Maps `len` bytes of `file` from `offset` on; with MAP_SYNC where that is possible, and says whether it was.
pub(super) fn map(file: &File, offset: u64, len: usize, writable: bool) -> io::Result<(NonNull<u8>, bool)> {
    let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    let attempt = |flags: MapFlags| {
        // SAFETY: the kernel chooses an address that nothing else uses; the file stays open beside the mapping.
        unsafe { mmap(std::ptr::null_mut(), len, protection, flags, file.as_fd(), offset) }
    };
    let (pointer, is_synchronous) = match attempt(MapFlags::SHARED_VALIDATE | MapFlags::SYNC) {
        Ok(pointer) => (pointer, true),
        // EOPNOTSUPP: no DAX here. EINVAL: a kernel that does not know MAP_SHARED_VALIDATE.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => (attempt(MapFlags::SHARED)?, false),
        Err(error) => return Err(error.into()),
    };
    let base = NonNull::new(pointer.cast::<u8>()).ok_or_else(|| io::Error::other("the kernel mapped nothing"))?;
    Ok((base, is_synchronous))
}

/// A region that can only be looked at.
#[derive(Debug)]
pub struct MappedView(pub(super) MappedMedium);

impl MappedView {
    /// All of it. Whoever uses the region may change it meanwhile.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// What it survives.
    pub fn durability(&self) -> Durability {
        self.0.durability
    }
}

impl MappedMedium {
    /// Takes a mapping made by [`map`].
    pub(super) fn new(
        (base, len): (NonNull<u8>, usize),
        file: File,
        durability: Durability,
        delay: Option<DelayModel>,
        stores: StoreKind,
    ) -> Self {
        MappedMedium {
            base,
            len,
            file,
            durability,
            stores,
            delay,
            other_beginnings: Vec::new(),
            in_flight_bytes: 0,
            is_dirty: false,
            has_failed: false,
        }
    }

    /// Regions of its device, cut in another way, could begin there ([`Medium::other_beginnings`]).
    pub(super) fn with_other_beginnings(mut self, other_beginnings: Vec<u64>) -> Self {
        self.other_beginnings = other_beginnings;
        self
    }

    /// How lines are written back.
    pub fn store_kind(&self) -> StoreKind {
        self.stores
    }

    /// Whether only the operating system can make stores durable.
    fn needs_sync(&self) -> bool {
        match self.durability {
            Durability::Emulated => false,
            Durability::Synced => true,
            // Without an instruction that writes lines back, the kernel has to do it.
            Durability::Persistent => self.stores == StoreKind::Portable,
        }
    }

    /// The address of a range that is inside.
    fn at(&self, offset: u64, len: u64) -> *mut u8 {
        let end = offset.checked_add(len).expect("an offset inside the region");
        assert!(end <= self.len as u64, "bytes {offset}..{end} are outside the region of {} bytes", self.len);
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }
}

impl Medium for MappedMedium {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is as long and stays while `self` does. This process writes to it only through `&mut self`;
        // other processes are kept out by the lock on the region.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    fn store_word(&mut self, offset: u64, value: u64) {
        assert!(offset.is_multiple_of(8), "a word at byte {offset} is not aligned");
        self.is_dirty = true;
        let word = self.at(offset, 8);
        #[expect(clippy::cast_ptr_alignment, reason = "the mapping is aligned to a page and the offset to a word")]
        // SAFETY: aligned, inside the mapping, and only touched through `self`.
        let word = unsafe { AtomicU64::from_ptr(word.cast::<u64>()) };
        word.store(value.to_le(), Ordering::Relaxed);
    }

    fn write_back(&mut self, offset: u64, len: u64) {
        let first = offset / LINE_BYTES * LINE_BYTES;
        let end = (offset + len).next_multiple_of(LINE_BYTES);
        self.in_flight_bytes += end - first;
        if self.durability != Durability::Persistent || self.needs_sync() {
            // In the page cache and in tmpfs a line in the processor's cache is as good as one in memory.
            return;
        }
        let mut line = first;
        while line < end {
            let address = self.at(line, LINE_BYTES);
            // SAFETY: inside the mapping.
            unsafe { self.stores.write_back(address) };
            line += LINE_BYTES;
        }
    }

    fn stream(&mut self, offset: u64, bytes: &[u8]) {
        assert!(
            offset.is_multiple_of(LINE_BYTES) && (bytes.len() as u64).is_multiple_of(LINE_BYTES),
            "{} bytes at byte {offset} are not whole lines",
            bytes.len()
        );
        self.is_dirty = true;
        self.in_flight_bytes += bytes.len() as u64;
        let to = self.at(offset, bytes.len() as u64);
        // SAFETY: whole aligned lines inside the mapping, which nothing else borrows.
        unsafe { self.stores.stream(to, bytes) };
    }

    fn fence(&mut self) -> io::Result<()> {
        if self.has_failed {
            return Err(io::Error::other("an earlier write to it failed, so nothing more is stored there"));
        }
        self.stores.fence();
        if self.needs_sync()
            && self.is_dirty
            && let Err(error) = rustix::fs::fdatasync(&self.file)
        {
            self.has_failed = true;
            return Err(error.into());
        }
        if let Some(delay) = &self.delay
            && self.in_flight_bytes > 0
        {
            delay.spend(self.in_flight_bytes);
        }
        self.in_flight_bytes = 0;
        self.is_dirty = false;
        Ok(())
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    fn other_beginnings(&self) -> &[u64] {
        &self.other_beginnings
    }
}

impl Drop for MappedMedium {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; nothing borrows it any more.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            log::warn!("unmapping the NVM region failed: {error}");
        }
    }
}
