//! A run of bytes that belongs to a guest or to the daemon, named by pointer and by page.

use std::ptr;

/// Size of a guest page in bytes: the unit of protection.
pub const PAGE_BYTES: usize = 4096;

/// The number of a guest page within its VM: consecutive inside a backing file, unique over all of a VM's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// Memory that is the daemon's own and belongs to no guest page.
    pub const NONE: PageId = PageId(u32::MAX);
    /// One above the highest number a guest page can have (29 bits: 2 TiB of RAM), so that a page and a kind fit into
    /// the 32-bit location of a tuple.
    pub const LIMIT: u32 = 1 << 29;
}

/// A run of bytes in guest RAM, or in memory of the daemon's own that outlives the request using it.
///
/// The memory is shared with a running guest: its content may change at any time, so it is only ever copied in or out
/// and never borrowed. Validity of the pointer is promised at construction ([`MemorySlice::new`]).
#[derive(Clone, Copy, Debug)]
pub struct MemorySlice {
    ptr: *mut u8,
    len: usize,
    page: PageId,
    page_offset: u16,
}

// SAFETY: a slice is only an address; all access copies through raw pointers and tolerates concurrent change.
unsafe impl Send for MemorySlice {}
// SAFETY: as above.
unsafe impl Sync for MemorySlice {}

impl MemorySlice {
    /// Names `len` bytes at `ptr`; `page` is the guest page of the first byte, which lies `page_offset` bytes into it.
    ///
    /// # Safety
    /// `ptr..ptr + len` must be mapped readable and writable, and stay so for as long as the slice or a copy of it is used.
    pub unsafe fn new(ptr: *mut u8, len: usize, page: PageId, page_offset: usize) -> Self {
        debug_assert!(page_offset < PAGE_BYTES);
        MemorySlice { ptr, len, page, page_offset: page_offset as u16 }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it names no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The guest page of the first byte, [`PageId::NONE`] for the daemon's own memory.
    pub fn page(&self) -> PageId {
        self.page
    }

    /// How far the first byte lies into its page.
    pub fn page_offset(&self) -> usize {
        self.page_offset as usize
    }

    /// Whether the slice is exactly one whole guest page.
    pub fn is_whole_page(&self) -> bool {
        self.page != PageId::NONE && self.page_offset == 0 && self.len == PAGE_BYTES
    }

    /// The guest pages the slice touches, first and one past the last; empty for the daemon's own memory.
    pub fn pages(&self) -> std::ops::Range<u32> {
        if self.page == PageId::NONE || self.len == 0 {
            return 0..0;
        }
        let count = (self.page_offset() + self.len).div_ceil(PAGE_BYTES) as u32;
        self.page.0..self.page.0 + count
    }

    /// The address, for an I/O vector handed to the kernel.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// The part of the slice that starts `offset` bytes into it and is `len` bytes long.
    ///
    /// # Panics
    /// If the part is not inside the slice.
    pub fn sub(&self, offset: usize, len: usize) -> MemorySlice {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "part {offset}+{len} outside a slice of {} bytes",
            self.len
        );
        let into = self.page_offset() + offset;
        let page =
            if self.page == PageId::NONE { PageId::NONE } else { PageId(self.page.0 + (into / PAGE_BYTES) as u32) };
        MemorySlice {
            // SAFETY: offset <= len was checked, so the address stays inside (or one past) the mapping.
            ptr: unsafe { self.ptr.add(offset) },
            len,
            page,
            page_offset: (into % PAGE_BYTES) as u16,
        }
    }

    /// Copies `buffer.len()` bytes out, from `offset` on.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    pub fn copy_out(&self, offset: usize, buffer: &mut [u8]) {
        let part = self.sub(offset, buffer.len());
        // SAFETY: `part` is mapped (promise of `new`) and cannot overlap an exclusive borrow of the daemon's own memory.
        unsafe { ptr::copy_nonoverlapping(part.ptr, buffer.as_mut_ptr(), buffer.len()) }
    }

    /// Copies `buffer` in, from `offset` on. For guest pages [`crate::MemoryTable::prepare_write`] must have been called.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    pub fn copy_in(&self, offset: usize, buffer: &[u8]) {
        let part = self.sub(offset, buffer.len());
        // SAFETY: `part` is mapped (promise of `new`) and cannot overlap a borrow of the daemon's own memory.
        unsafe { ptr::copy_nonoverlapping(buffer.as_ptr(), part.ptr, buffer.len()) }
    }

    /// Fills the slice with zeros. For guest pages [`crate::MemoryTable::prepare_write`] must have been called.
    pub fn fill_zero(&self) {
        // SAFETY: the slice is mapped (promise of `new`).
        unsafe { ptr::write_bytes(self.ptr, 0, self.len) }
    }
}
