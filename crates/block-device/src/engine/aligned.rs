//! Memory of the daemon's own, aligned for direct I/O.

use guest_memory::{MemorySlice, PageId};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// A buffer of zeros at an alignment. Freed when dropped: not before the kernel is done with it.
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the buffer is owned memory; nothing of it is tied to a thread.
unsafe impl Send for AlignedBuffer {}

impl AlignedBuffer {
    /// `len` bytes (more than none) at `alignment` (a power of two).
    pub(crate) fn new(len: usize, alignment: usize) -> Self {
        assert!(len > 0);
        let layout = Layout::from_size_align(len, alignment).expect("a power of two and a length that fits");
        // SAFETY: the layout has a size above zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        AlignedBuffer { ptr, layout }
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The buffer as a slice that is copied in and out; not to be used after the buffer is dropped.
    pub(crate) fn slice(&self) -> MemorySlice {
        // SAFETY: the whole allocation; the callers in this module drop the buffer after the slice.
        unsafe { MemorySlice::new(self.as_ptr(), self.len(), PageId::NONE, 0) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}
