//! Guest memory in named files of a tmpfs, as amberlog wants it, shared with the device.

use crate::Result;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{ByteValued, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// The memory of a made-up guest. Clones share it.
#[derive(Clone, Debug)]
pub struct GuestRam {
    memory: GuestMemoryMmap,
    next_free: Arc<AtomicU64>,
    /// Removes the files.
    _names: Arc<Vec<tempfile::TempPath>>,
}

impl GuestRam {
    /// One region of `bytes` bytes at guest address 0.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(bytes: u64) -> Result<Self> {
        Self::with_regions(&[(0, bytes)])
    }

    /// Regions at the given guest addresses and of the given lengths, each a memory file of its own.
    ///
    /// # Errors
    /// When they overlap or there is no memory.
    pub fn with_regions(regions: &[(u64, u64)]) -> Result<Self> {
        Self::in_directory(Path::new("/dev/shm"), regions)
    }

    /// The same, with the memory files in this directory.
    ///
    /// # Errors
    /// As above.
    pub fn in_directory(directory: &Path, regions: &[(u64, u64)]) -> Result<Self> {
        let mut ranges = Vec::new();
        let mut names = Vec::new();
        for (address, bytes) in regions {
            let (file, name) = tempfile::Builder::new().prefix("guest-ram-").tempfile_in(directory)?.into_parts();
            file.set_len(*bytes)?;
            names.push(name);
            ranges.push((GuestAddress(*address), usize::try_from(*bytes)?, Some(FileOffset::new(file, 0))));
        }
        let memory = GuestMemoryMmap::from_ranges_with_files(&ranges)?;
        // The first page is left alone, as in a real machine, so that address 0 means "not set".
        let first_free = regions.first().map_or(0, |first| first.0) + 4096;
        Ok(GuestRam { memory, next_free: Arc::new(AtomicU64::new(first_free)), _names: Arc::new(names) })
    }

    /// What a device is told of it.
    ///
    /// # Errors
    /// Never for memory made by this module.
    pub fn regions(&self) -> Result<Vec<VhostUserMemoryRegionInfo>> {
        Ok(self
            .memory
            .iter()
            .map(VhostUserMemoryRegionInfo::from_guest_region)
            .collect::<std::result::Result<_, _>>()?)
    }

    /// Takes `bytes` bytes at `alignment` that nobody else was given. Returns the guest address.
    ///
    /// # Panics
    /// When the first region is used up.
    pub fn take(&self, bytes: u64, alignment: u64) -> u64 {
        let taken = |free: u64| Some(free.next_multiple_of(alignment) + bytes);
        let free = self.next_free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).expect("always taken");
        let address = free.next_multiple_of(alignment);
        let end = GuestAddress(address + bytes.max(1) - 1);
        assert!(self.memory.address_in_range(end), "the guest's memory is used up; make it larger");
        address
    }

    /// The address of `gpa` in this process, which the device takes for the VMM's.
    ///
    /// # Panics
    /// When it is outside.
    pub fn user_address(&self, gpa: u64) -> u64 {
        self.memory.get_host_address(GuestAddress(gpa)).expect("inside guest memory") as u64
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// When they are outside.
    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(gpa)).expect("inside guest memory");
    }

    /// Reads bytes.
    ///
    /// # Panics
    /// When they are outside.
    pub fn read(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(gpa)).expect("inside guest memory");
        bytes
    }

    /// Writes a plain value.
    ///
    /// # Panics
    /// When it is outside.
    pub fn put<T: ByteValued>(&self, gpa: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(gpa)).expect("inside guest memory");
    }

    /// Reads a plain value.
    ///
    /// # Panics
    /// When it is outside.
    pub fn get<T: ByteValued>(&self, gpa: u64) -> T {
        self.memory.read_obj(GuestAddress(gpa)).expect("inside guest memory")
    }

    /// The memory itself.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }
}
