//! Guest RAM: map it, protect pages of it, copy on write, give it back.
//!
//! This is the only crate that knows userfaultfd, and the only one that turns guest addresses into pointers.
//!
//! * [`VmMemory`] is the RAM of one VM: its backing files, each mapped once, its pages numbered by [`PageId`], and the
//!   protection of pages against the guest.
//! * [`MemoryTable`] is what one device was told of it (vhost-user `SET_MEM_TABLE`): guest physical addresses to pages.
//! * [`MemorySlice`] is a run of bytes in it.
//!
//! What it must never do: let this process write to a page that is retained without copying it out first
//! ([`MemoryTable::prepare_write`]), report a page as protected that the guest can write to, or hand out a pointer
//! beyond a backing file.
//!
//! Failure story: when the VMM dies, the backing files keep the content and every protection call succeeds without
//! effect, because nobody is left to write. When the protection channel is missing or is refused by the kernel,
//! [`VmMemory::protection`] says so and callers copy instead. When this process dies, the VMM's own descriptor of the
//! userfaultfd keeps the pages protected and their writers waiting.

mod channel;
mod dirty_log;
mod error;
mod handover;
mod host_file;
mod map;
mod protect;
mod region_set;
mod slice;
mod userfault;

#[cfg(feature = "simulate")]
pub use channel::simulated_delay;
pub use channel::{CopyOnWrite, Protection};
pub use dirty_log::DirtyLog;
pub use error::Error;
pub use handover::{BeforeDevice, HandoverSocket, KeepHandedOver, SHIM_SOCKET_VARIABLE, Terms, Welcome};
pub use host_file::HostFile;
#[cfg(feature = "simulate")]
pub use host_file::{simulated_kill, simulated_room};
pub use map::{MemoryTable, RegionDescriptor, Told, VmMemory};
pub use region_set::RegionSet;
pub use slice::{MemorySlice, PAGE_BYTES, PageId};
