//! The RAM of one VM: backing files mapped once, and what each device was told of them.

use crate::channel::{CopyOnWrite, Learned, Protection, ProtectionChannel, WINDOWS_BYTES_MAX};
use crate::dirty_log::DirtyLog;
use crate::error::Error;
use crate::region_set::RegionSet;
use crate::slice::{MemorySlice, PAGE_BYTES, PageId};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// `HUGETLBFS_MAGIC` of statfs(2).
const HUGE_PAGES: rustix::fs::FsWord = 0x9584_58f6;

/// How often it is tried to copy everything out, and what is between: blocks are written home meanwhile.
const ROUNDS_TO_END: u32 = 100;
const PAUSE_OF_ROUNDS: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });

/// One region of guest memory as the VMM describes it (vhost-user `VhostUserMemoryRegion` and its descriptor).
#[derive(Debug)]
pub struct RegionDescriptor {
    /// Guest physical address of the first byte.
    pub gpa: u64,
    /// Length in bytes.
    pub size: u64,
    /// Address of the region in the VMM's own address space: what is protected.
    pub user_addr: u64,
    /// The backing file.
    pub file: File,
    /// Where the region begins in the file, in bytes.
    pub file_offset: u64,
}

/// A shared mapping of a whole backing file.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain shared memory; access goes through MemorySlice, which copies.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: &File, len: usize) -> std::io::Result<Self> {
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; no existing memory is touched.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        if ptr == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let ptr = NonNull::new(ptr.cast()).expect("mmap does not return null");
        Ok(Mapping { ptr, len })
    }

    /// The address `offset` bytes into the mapping.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} outside a mapping of {} bytes", self.len);
        // SAFETY: inside (or one past) the mapping.
        unsafe { self.ptr.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; slices of it must be gone by the promise of MemorySlice::new.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// One backing file of guest RAM.
#[derive(Debug)]
pub(crate) struct RamFile {
    identity: (u64, u64),
    file: File,
    mapping: Mapping,
    pub(crate) first_page: u32,
    pub(crate) page_count: u32,
    /// One bit a page: retained, so this process must not write to it before it has been copied out.
    retained: Box<[AtomicU64]>,
    /// One bit a page: it was touched by this process, so that its file has it. A page that nobody has touched is a hole in its file.
    touched: Box<[AtomicU64]>,
}

impl RamFile {
    /// Where the numbers of its pages end.
    fn pages_end(&self) -> u32 {
        self.first_page + self.page_count
    }

    fn is_touched(&self, page: u32) -> bool {
        let index = (page - self.first_page) as usize;
        self.touched[index / 64].load(Ordering::Relaxed) & (1 << (index % 64)) != 0
    }

    /// Touches pages in a way that can fail: an access to a hole that there is no memory for raises SIGBUS.
    fn touch(&self, pages: Range<u32>) -> Result<(), Error> {
        let at = self.mapping.at((pages.start - self.first_page) as usize * PAGE_BYTES);
        let len = (pages.end - pages.start) as usize * PAGE_BYTES;
        loop {
            // SAFETY: whole pages of the mapping, checked by `at`; no content is changed.
            let result = unsafe { libc::madvise(at.cast(), len, libc::MADV_POPULATE_WRITE) };
            let error = std::io::Error::last_os_error();
            match (result, error.raw_os_error()) {
                (0, _) => break,
                (_, Some(libc::EINTR | libc::EAGAIN)) => continue,
                // Before Linux 5.14, where nothing is protected either.
                (_, Some(libc::EINVAL)) => break,
                _ => return Err(Error::NoRoom { page: pages.start }),
            }
        }
        for index in pages.map(|page| (page - self.first_page) as usize) {
            self.touched[index / 64].fetch_or(1 << (index % 64), Ordering::Relaxed);
        }
        Ok(())
    }

    fn word(&self, page: PageId) -> (&AtomicU64, u64) {
        let index = (page.0 - self.first_page) as usize;
        (&self.retained[index / 64], 1 << (index % 64))
    }
}

/// Has words kept for the next worker ([`VmMemory::adopt_windows`]).
pub type KeepWindows = Box<dyn Fn(&str) + Send + Sync>;

/// The RAM of one VM. Shared by all its devices and by the journal area.
#[derive(Default)]
pub struct VmMemory {
    files: RwLock<Vec<Arc<RamFile>>>,
    pub(crate) channel: ProtectionChannel,
    copy_on_write: OnceLock<Arc<dyn CopyOnWrite>>,
    /// Where its files have to be for pages to be retained in them.
    directory: OnceLock<PathBuf>,
    /// Who keeps where the VMM has memory, and what was kept last.
    windows_keeper: OnceLock<KeepWindows>,
    windows_kept: Mutex<String>,
    /// The pages that each device was told of last, by number of its connection.
    told: Mutex<BTreeMap<u64, Vec<Range<u32>>>>,
    /// How long the guest waited for a page that it wrote to while it was protected, as far as it is seen from here.
    pub(crate) fault_latency: latency::Histogram,
}

impl std::fmt::Debug for VmMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmMemory").field("files", &self.files).finish_non_exhaustive()
    }
}

impl VmMemory {
    /// A VM whose memory is not known yet.
    pub fn new() -> Arc<Self> {
        Arc::new(VmMemory::default())
    }

    /// Who copies a retained page out before it changes: set once, by the VM's journal area.
    ///
    /// # Panics
    /// If it was set before.
    pub fn set_copy_on_write(&self, handler: Arc<dyn CopyOnWrite>) {
        assert!(self.copy_on_write.set(handler).is_ok(), "a VM has one journal area");
    }

    /// How long faults on protected pages took to answer, from when they were read.
    pub fn fault_latency(&self) -> latency::Snapshot {
        self.fault_latency.snapshot()
    }

    pub(crate) fn copy_on_write(&self) -> Option<&Arc<dyn CopyOnWrite>> {
        self.copy_on_write.get()
    }

    /// Pages are only retained in memory whose file is in `directory`: for a VM whose VMM is started by others, and started
    /// again whatever happens here.
    pub fn keep_to_directory(&self, directory: &Path) {
        let directory = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
        // Said once, before a VMM comes.
        let _ = self.directory.set(directory);
    }

    /// Has it kept where the VMM has memory, whenever that is another place: a process that goes on has to know it before it is told. Once.
    pub fn keep_windows(&self, keeper: KeepWindows) {
        let _ = self.windows_keeper.set(keeper);
    }

    /// Where the VMM has memory, as an earlier process had it kept: faults can be answered before any device is told. The files are there
    /// ([`VmMemory::adopt_file`]). What is not understood is left.
    pub fn adopt_windows(&self, words: &str) {
        let pages = self.files.read().expect("no panic under this lock").iter().map(|file| file.pages_end()).max();
        self.channel.adopt_windows(words, pages.unwrap_or_default());
        words.clone_into(&mut self.windows_kept.lock().expect("no panic under this lock"));
    }

    fn note_windows(&self) {
        let Some(keeper) = self.windows_keeper.get() else { return };
        let mut kept = self.windows_kept.lock().expect("no panic under this lock");
        let words = Some(self.channel.windows_in_words()).filter(|words| words.len() <= WINDOWS_BYTES_MAX);
        let words = words.unwrap_or_default();
        if *kept != words {
            keeper(&words);
            *kept = words;
        }
    }

    /// Maps a file of guest memory before a device names it, so that its pages have the numbers that they had in an earlier process:
    /// the files have to come in the order of those. Gives the number of its first page.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn adopt_file(&self, file: File) -> Result<u32, Error> {
        Ok(self.ram_file(file)?.first_page)
    }

    /// Whether a file is one of the guest's memory.
    pub fn has_file(&self, file: &File) -> bool {
        let Ok(metadata) = file.metadata() else { return false };
        let identity = (metadata.dev(), metadata.ino());
        self.files.read().expect("no panic under this lock").iter().any(|known| known.identity == identity)
    }

    /// Whether pages can be protected, and if not, why not.
    pub fn protection(&self) -> Protection {
        self.channel.state()
    }

    fn ram_file(&self, file: File) -> Result<Arc<RamFile>, Error> {
        let metadata = file.metadata().map_err(|e| Error::system("reading the size of a guest memory file", e))?;
        let identity = (metadata.dev(), metadata.ino());
        let mut files = self.files.write().expect("no panic under this lock");
        if let Some(known) = files.iter().find(|known| known.identity == identity) {
            return Ok(Arc::clone(known));
        }
        if metadata.nlink() == 0 {
            // A memfd, or a file that QEMU made in a directory and removed: it dies with its last process, and a page that
            // was retained in it would be lost with amberlog and the VMM (rule 1 of ARCHITECTURE.md).
            self.channel.refuse_nameless();
        }
        if rustix::fs::fstatfs(&file).is_ok_and(|status| status.f_type == HUGE_PAGES) {
            self.channel
                .refuse("the guest's memory is in huge pages, of which no part can be protected by itself".to_owned());
        }
        if let Some(directory) = self.directory.get() {
            let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
            if !link.starts_with(directory) {
                self.channel.refuse(format!(
                    "the guest's memory is in {}, which the next VMM may write over before anything is recovered: give it \
                     a file in {}, as 'amberlog arguments' says",
                    link.display(),
                    directory.display()
                ));
            }
        }
        let len = metadata.len() as usize / PAGE_BYTES * PAGE_BYTES;
        let first_page = files.last().map_or(0, |last| last.first_page + last.page_count);
        let page_count = u32::try_from(len / PAGE_BYTES)
            .ok()
            .filter(|count| first_page.checked_add(*count).is_some_and(|end| end < PageId::LIMIT))
            .ok_or_else(|| {
                Error::system("numbering the guest's pages", std::io::Error::from_raw_os_error(libc::EFBIG))
            })?;
        let mapping =
            Mapping::new(&file, len).map_err(|e| Error::system(format!("mapping {len} bytes of guest memory"), e))?;
        let words = (page_count as usize).div_ceil(64);
        let ram_file = Arc::new(RamFile {
            identity,
            file,
            mapping,
            first_page,
            page_count,
            retained: (0..words).map(|_| AtomicU64::new(0)).collect(),
            touched: (0..words).map(|_| AtomicU64::new(0)).collect(),
        });
        files.push(Arc::clone(&ram_file));
        Ok(ram_file)
    }

    /// Maps what a device was told of the memory. Files that another device already named are not mapped again.
    ///
    /// # Errors
    /// A region that is not inside its file, or overlaps another in the guest's address space, is refused.
    pub fn map(self: &Arc<Self>, descriptors: Vec<RegionDescriptor>) -> Result<MemoryTable, Error> {
        let mut regions = Vec::with_capacity(descriptors.len());
        for descriptor in descriptors {
            let RegionDescriptor { gpa, size, user_addr, file, file_offset } = descriptor;
            let refuse = |reason: &str| Error::Region { gpa, size, file_offset, reason: reason.to_owned() };
            if size == 0 || gpa.checked_add(size).is_none() || user_addr.checked_add(size).is_none() {
                return Err(refuse("its length is zero or wraps around the address space"));
            }
            let ram_file = self.ram_file(file)?;
            let end = file_offset.checked_add(size).ok_or_else(|| refuse("its end wraps around"))?;
            if end > ram_file.mapping.len as u64 {
                return Err(refuse("it ends beyond its file"));
            }
            if file_offset % PAGE_BYTES as u64 != gpa % PAGE_BYTES as u64 {
                return Err(refuse("its pages are not aligned with its file's pages"));
            }
            let learned = self.channel.learn(ram_file.first_page, file_offset, size, user_addr);
            self.settle(learned);
            regions.push(Region { gpa, size, user_addr, file_offset, ram_file });
        }
        self.note_windows();
        regions.sort_by_key(|region| region.gpa);
        if let Some(pair) = regions.windows(2).find(|pair| pair[0].gpa + pair[0].size > pair[1].gpa) {
            return Err(Error::Region {
                gpa: pair[1].gpa,
                size: pair[1].size,
                file_offset: pair[1].file_offset,
                reason: format!("it overlaps the region at {:#x}", pair[0].gpa),
            });
        }
        let mut mapped = Vec::with_capacity(regions.len());
        for region in &regions {
            // SAFETY: the range lies inside the mapping of `ram_file` (checked above), which the table keeps alive.
            let raw = unsafe {
                MmapRegion::build_raw(
                    region.host(),
                    region.size as usize,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_NORESERVE,
                )
            }
            .map_err(|e| Error::Region {
                gpa: region.gpa,
                size: region.size,
                file_offset: region.file_offset,
                reason: e.to_string(),
            })?;
            mapped.push(GuestRegionMmap::new(raw, GuestAddress(region.gpa)).ok_or_else(|| Error::Region {
                gpa: region.gpa,
                size: region.size,
                file_offset: region.file_offset,
                reason: "it wraps around the address space".to_owned(),
            })?);
        }
        let guest_memory = GuestMemoryMmap::from_regions(mapped)
            .map_err(|e| Error::system("describing the guest's memory", std::io::Error::other(e.to_string())))?;
        Ok(MemoryTable { vm: Arc::clone(self), regions, guest_memory })
    }

    /// Does what follows from where the VMM has its memory, before it is told that this is known: what is protected is protected there,
    /// too, and what cannot be is copied out.
    fn settle(&self, learned: Learned) {
        let Learned { window, mut given_up } = learned;
        if let Some(window) = window {
            let held = self.channel.protected_among(&window.pages());
            if let Err(error) = self.channel.protect_in(&window, &held) {
                self.channel.refuse(format!("guest memory that the VMM has mapped anew cannot be protected: {error}"));
                given_up.push(window.pages());
            }
        }
        for pages in given_up {
            self.copy_all_out(&pages);
        }
    }

    /// Has everything copied out that is retained in these pages. What there is no memory for stays where it is: in its file.
    fn copy_all_out(&self, pages: &Range<u32>) {
        let Some(area) = self.copy_on_write() else { return };
        let held = self.channel.protected_among(pages);
        let left = held.iter().filter(|page| !area.copy_out(**page)).count();
        if !held.is_empty() {
            log::info!(
                "{} pages of guest memory that goes, or moves, were let go, and {left} have to wait",
                held.len()
            );
        }
    }

    /// Says that pages of this VM must not be protected any more, for `reason`, and has everything copied out that is: a device comes that
    /// writes past the page tables. False when there is no memory to copy all of it to; it stays so that nothing more is protected.
    #[must_use]
    pub fn end_protection(&self, reason: impl Into<String>) -> bool {
        self.channel.refuse(reason.into());
        let Some(area) = self.copy_on_write() else { return true };
        let all = 0..self.page_count();
        // Whoever saw before that pages can be protected has done so then.
        area.finish();
        for _ in 0..ROUNDS_TO_END {
            area.try_again();
            self.copy_all_out(&all);
            if self.channel.protected_among(&all).is_empty() {
                return true;
            }
            std::thread::sleep(PAUSE_OF_ROUNDS);
        }
        false
    }

    pub(crate) fn file_of(&self, page: PageId) -> Option<Arc<RamFile>> {
        self.with_file(page, Arc::clone)
    }

    /// The same for a moment: the data-path threads of all disks ask for pages, and do not count references to one file against each other.
    fn with_file<T>(&self, page: PageId, act: impl FnOnce(&Arc<RamFile>) -> T) -> Option<T> {
        let files = self.files.read().expect("no panic under this lock");
        files.iter().find(|file| page.0 >= file.first_page && page.0 - file.first_page < file.page_count).map(act)
    }

    /// The whole guest page `page`, if the VM has it.
    pub fn page(&self, page: PageId) -> Option<MemorySlice> {
        self.with_file(page, |file| {
            let offset = (page.0 - file.first_page) as usize * PAGE_BYTES;
            // SAFETY: the page lies inside the file's mapping; files are never unmapped before the VM's memory is dropped.
            unsafe { MemorySlice::new(file.mapping.at(offset), PAGE_BYTES, page, 0) }
        })
    }

    /// The backing files, as paths, and the number of the first page of each.
    pub fn files(&self) -> Vec<(std::path::PathBuf, u32)> {
        let files = self.files.read().expect("no panic under this lock");
        files
            .iter()
            .map(|file| {
                let link = format!("/proc/self/fd/{}", file.file.as_raw_fd());
                (std::fs::read_link(link).unwrap_or_default(), file.first_page)
            })
            .collect()
    }

    /// Number of pages of all backing files.
    pub fn page_count(&self) -> u32 {
        self.files.read().expect("no panic under this lock").iter().map(|file| file.page_count).sum()
    }

    /// Says that `page` is retained (or no longer): [`MemoryTable::prepare_write`] then asks the journal area first.
    pub fn set_retained(&self, page: PageId, retained: bool) {
        self.change_retained(page, retained);
    }

    /// Says that `page` is retained, if it is not yet: false where it is.
    pub fn try_retain(&self, page: PageId) -> bool {
        !self.change_retained(page, true)
    }

    /// Gives whether it was before.
    fn change_retained(&self, page: PageId, retained: bool) -> bool {
        let change = |file: &Arc<RamFile>| {
            let (word, bit) = file.word(page);
            let before =
                if retained { word.fetch_or(bit, Ordering::SeqCst) } else { word.fetch_and(!bit, Ordering::SeqCst) };
            before & bit != 0
        };
        self.with_file(page, change).unwrap_or_default()
    }

    /// Whether `page` is retained.
    pub fn is_retained(&self, page: PageId) -> bool {
        let is_retained = |file: &Arc<RamFile>| {
            let (word, bit) = file.word(page);
            word.load(Ordering::SeqCst) & bit != 0
        };
        self.with_file(page, is_retained).unwrap_or_default()
    }

    /// Gives every page but the retained ones back to the host, for a VM whose process is gone. Returns the bytes given back.
    ///
    /// # Errors
    /// When the file system of the backing file refuses to punch holes.
    pub fn give_back_all_but_retained(&self) -> Result<u64, Error> {
        let files: Vec<_> = self.files.read().expect("no panic under this lock").iter().map(Arc::clone).collect();
        let mut given_back = 0;
        for file in files {
            let retained =
                |index: u32| file.retained[index as usize / 64].load(Ordering::SeqCst) & (1 << (index % 64)) != 0;
            let before = file.file.metadata().map_or(0, |m| m.blocks() * 512);
            let mut index = 0;
            while index < file.page_count {
                if retained(index) {
                    index += 1;
                    continue;
                }
                let start = index;
                while index < file.page_count && !retained(index) {
                    index += 1;
                }
                rustix::fs::fallocate(
                    &file.file,
                    rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
                    u64::from(start) * PAGE_BYTES as u64,
                    u64::from(index - start) * PAGE_BYTES as u64,
                )
                .map_err(|e| Error::system("giving guest memory back to the host", e))?;
            }
            let after = file.file.metadata().map_or(0, |m| m.blocks() * 512);
            given_back += before.saturating_sub(after);
        }
        Ok(given_back)
    }
}

/// What one device is told of the memory over one connection. Memory that no device is told of any more goes: what is retained in it is
/// copied out. A connection that ends says nothing of the memory.
#[derive(Debug)]
pub struct Told {
    vm: Arc<VmMemory>,
    number: u64,
}

impl Told {
    /// For a device whose VMM has connected.
    pub fn of(vm: &Arc<VmMemory>) -> Self {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
        Told { vm: Arc::clone(vm), number: CONNECTIONS.fetch_add(1, Ordering::Relaxed) }
    }

    /// This is what the device goes by from now on. Before the VMM hears so, what is retained in memory that has gone by that is copied
    /// out: it may be unmapped then, and its file removed.
    pub fn goes_by(&self, table: &MemoryTable) {
        let now: Vec<_> = table.regions.iter().map(Region::pages).collect();
        let gone = {
            let mut told = self.vm.told.lock().expect("no panic under this lock");
            let before = told.insert(self.number, now).unwrap_or_default();
            told.values()
                .flatten()
                .fold(before, |left, pages| left.iter().flat_map(|one| without(one, pages)).collect())
        };
        for pages in gone {
            self.vm.channel.leave(&pages);
            self.vm.copy_all_out(&pages);
        }
        self.vm.note_windows();
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.vm.told.lock().expect("no panic under this lock").remove(&self.number);
    }
}

/// What is left of pages without others.
fn without(pages: &Range<u32>, others: &Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
    let before = pages.start..pages.end.min(others.start.max(pages.start));
    let behind = pages.start.max(others.end.min(pages.end))..pages.end;
    // Others that are none, or elsewhere, take nothing away.
    let parts = if others.is_empty() { [pages.clone(), 0..0] } else { [before, behind] };
    parts.into_iter().filter(|part| !part.is_empty())
}

#[derive(Debug)]
struct Region {
    gpa: u64,
    size: u64,
    user_addr: u64,
    file_offset: u64,
    ram_file: Arc<RamFile>,
}

impl Region {
    fn host(&self) -> *mut u8 {
        self.ram_file.mapping.at(self.file_offset as usize)
    }

    fn pages(&self) -> Range<u32> {
        let page = |at: u64| self.ram_file.first_page + at as u32;
        let page_bytes = PAGE_BYTES as u64;
        page(self.file_offset / page_bytes)..page((self.file_offset + self.size).div_ceil(page_bytes))
    }

    /// Whether both are the same memory at the same guest address.
    fn is_same(&self, other: &Region) -> bool {
        (self.gpa, self.size, self.file_offset) == (other.gpa, other.size, other.file_offset)
            && Arc::ptr_eq(&self.ram_file, &other.ram_file)
    }
}

/// What one device was told of the guest's memory.
#[derive(Debug)]
pub struct MemoryTable {
    vm: Arc<VmMemory>,
    regions: Vec<Region>,
    guest_memory: GuestMemoryMmap,
}

impl MemoryTable {
    /// The same memory as rust-vmm's ring code wants it. It shares the mappings of this table and must not outlive it.
    /// Writing through it bypasses the protection: ring pages are never retained ([`VmMemory`]'s area refuses them), all
    /// else goes through [`MemoryTable::prepare_write`].
    pub fn guest_memory(&self) -> &GuestMemoryMmap {
        &self.guest_memory
    }

    /// The VM this table is of.
    pub fn vm(&self) -> &Arc<VmMemory> {
        &self.vm
    }

    fn region_of(&self, gpa: u64) -> Option<(usize, &Region)> {
        let index = self.regions.partition_point(|region| region.gpa <= gpa).checked_sub(1)?;
        let region = &self.regions[index];
        (gpa - region.gpa < region.size).then_some((index, region))
    }

    /// Appends the slices that make up `len` bytes of guest memory from `gpa` on; more than one where regions meet.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when any byte is outside the guest's memory; `slices` is then as it was.
    pub fn slices(&self, gpa: u64, len: usize, slices: &mut Vec<MemorySlice>) -> Result<(), Error> {
        self.slices_in(gpa, len, slices, &mut RegionSet::default())
    }

    /// The same, and adds the regions that they lie in to `regions`.
    ///
    /// # Errors
    /// As above.
    pub fn slices_in(
        &self,
        gpa: u64,
        len: usize,
        slices: &mut Vec<MemorySlice>,
        regions: &mut RegionSet,
    ) -> Result<(), Error> {
        let before = slices.len();
        let mut at = gpa;
        let mut left = len as u64;
        while left > 0 {
            let Some((index, region)) = self.region_of(at) else {
                slices.truncate(before);
                return Err(Error::OutOfRange { gpa, len: len as u64 });
            };
            regions.insert(index);
            let into = at - region.gpa;
            let count = left.min(region.size - into);
            let file_at = region.file_offset + into;
            let page = PageId(region.ram_file.first_page + (file_at / PAGE_BYTES as u64) as u32);
            // SAFETY: inside the region, which lies inside the mapping that this table keeps alive; users of the slice
            // (requests in flight) hold the table.
            slices.push(unsafe {
                MemorySlice::new(
                    region.host().add(into as usize),
                    count as usize,
                    page,
                    (file_at % PAGE_BYTES as u64) as usize,
                )
            });
            left -= count;
            // A region may end at the top of the address space; `left` is zero then.
            at = at.wrapping_add(count);
        }
        Ok(())
    }

    /// The one byte of guest memory at `gpa`, if there is one.
    pub fn byte(&self, gpa: u64) -> Option<MemorySlice> {
        let mut slices = Vec::with_capacity(1);
        self.slices(gpa, 1, &mut slices).ok()?;
        slices.pop()
    }

    /// The same regions in `next`, the table that takes this one's place; nothing when one of them is not there any more, or
    /// is other memory.
    pub fn carried_over(&self, regions: RegionSet, next: &MemoryTable) -> Option<RegionSet> {
        regions.renumbered(|index| {
            let region = self.regions.get(index)?;
            next.regions.iter().position(|other| other.is_same(region))
        })
    }

    /// The guest physical address that the VMM maps at `user_addr` (vhost-user gives ring addresses so).
    pub fn user_to_guest(&self, user_addr: u64) -> Option<u64> {
        self.regions
            .iter()
            .find(|region| user_addr >= region.user_addr && user_addr - region.user_addr < region.size)
            .map(|region| region.gpa + (user_addr - region.user_addr))
    }

    /// Must be called before this process writes to guest memory (read data, status bytes, and what the kernel writes
    /// for it): a retained page in the way is copied out first.
    ///
    /// # Errors
    /// [`Error::Retained`] when there is no memory to copy one to. Nothing may be written then: what is committed is there and
    /// nowhere else. The page is let go as soon as there is room, so whoever can wait asks again. [`Error::NoRoom`] when there is no
    /// memory for a page that nobody has touched yet.
    pub fn prepare_write(&self, slice: &MemorySlice) -> Result<(), Error> {
        for page in slice.pages() {
            let page = PageId(page);
            let is_free = !self.vm.is_retained(page) || self.vm.copy_on_write().is_some_and(|area| area.copy_out(page));
            if !is_free {
                return Err(Error::Retained { page: page.0 });
            }
        }
        self.prepare_read(slice)
    }

    /// Marks the pages of a slice in a VMM's log, wherever in the guest's memory they are: to be called when they have been written.
    /// False when the log has no bit for one of them. What is not a guest's needs no mark.
    #[must_use]
    pub fn mark_written(&self, slice: &MemorySlice, log: &DirtyLog) -> bool {
        let pages = slice.pages();
        if pages.is_empty() {
            return true;
        }
        let mut is_known = false;
        let mut is_marked = true;
        for region in &self.regions {
            let file = &region.ram_file;
            if pages.start < file.first_page || pages.start - file.first_page >= file.page_count {
                continue;
            }
            let from = u64::from(pages.start - file.first_page) * PAGE_BYTES as u64 + slice.page_offset() as u64;
            let to = from + slice.len() as u64;
            let (first, end) = (from.max(region.file_offset), to.min(region.file_offset + region.size));
            if first < end {
                is_known = true;
                is_marked &= log.mark(region.gpa + (first - region.file_offset), end - first);
            }
        }
        is_known && is_marked
    }

    /// Must be called before this process reads guest memory that its guest may never have touched.
    ///
    /// # Errors
    /// [`Error::NoRoom`] when there is no memory for a page that nobody has touched yet: reading it would be the end of this process.
    pub fn prepare_read(&self, slice: &MemorySlice) -> Result<(), Error> {
        let pages = slice.pages();
        let Some(file) = self.vm.file_of(PageId(pages.start)).filter(|_| !pages.is_empty()) else { return Ok(()) };
        let mut page = pages.start;
        while page < pages.end {
            let start = page;
            while page < pages.end && !file.is_touched(page) {
                page += 1;
            }
            if start < page {
                file.touch(start..page)?;
            } else {
                page += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why_not(memory: &Arc<VmMemory>, file: File) -> String {
        let size = 2 * PAGE_BYTES as u64;
        file.set_len(size).expect("room");
        memory.map(vec![RegionDescriptor { gpa: 0, size, user_addr: 1 << 40, file, file_offset: 0 }]).expect("mapped");
        match memory.protection() {
            Protection::Unavailable(reason) => reason,
            Protection::Available => panic!("there is no userfaultfd"),
        }
    }

    #[test]
    fn nothing_is_retained_in_memory_that_nobody_could_find_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let inside = directory.path().join("vm");
        std::fs::create_dir(&inside).expect("a directory");
        let named = |path: PathBuf| File::options().read(true).write(true).create_new(true).open(path).expect("a file");
        let nameless = tempfile::tempfile().expect("a file");
        assert!(why_not(&VmMemory::new(), nameless).contains("without a name"));
        let reason = why_not(&VmMemory::new(), named(directory.path().join("a")));
        assert!(reason.contains("handed over"), "its file is no reason: {reason}");
        let memory = VmMemory::new();
        memory.keep_to_directory(&inside);
        assert!(why_not(&memory, named(directory.path().join("b"))).contains("may write over"));
        let memory = VmMemory::new();
        memory.keep_to_directory(&inside);
        let reason = why_not(&memory, named(inside.join("c")));
        assert!(reason.contains("handed over"), "its file is no reason: {reason}");
    }

    /// The VMM takes memory away and puts other memory in its place: what was told of the one does not hold for the other.
    #[test]
    fn other_memory_at_the_same_address_is_not_the_same() {
        let memory = VmMemory::new();
        let size = 4 * PAGE_BYTES as u64;
        let region = |gpa: u64, file: &File| RegionDescriptor {
            gpa,
            size,
            user_addr: (1 << 40) + gpa,
            file: file.try_clone().expect("a descriptor"),
            file_offset: 0,
        };
        let files = [(); 3].map(|()| tempfile::tempfile().expect("a file"));
        files.iter().for_each(|file| file.set_len(size).expect("room"));
        let [first, second, other] = &files;
        let before = memory.map(vec![region(0, first), region(1 << 30, second)]).expect("mapped");
        let mut told = RegionSet::default();
        before.slices_in(1 << 30, PAGE_BYTES, &mut Vec::new(), &mut told).expect("inside");
        let same = memory.map(vec![region(1 << 20, other), region(1 << 30, second)]).expect("mapped");
        assert!(before.carried_over(told, &same).is_some());
        let replaced = memory.map(vec![region(0, first), region(1 << 30, other)]).expect("mapped");
        assert!(before.carried_over(told, &replaced).is_none(), "other memory, equally large");
        let gone = memory.map(vec![region(0, first)]).expect("mapped");
        assert!(before.carried_over(told, &gone).is_none());
    }

    /// Where the guest has a page, and everywhere else where it has it: not where the page's file has it.
    #[test]
    fn a_page_is_marked_at_each_of_its_addresses() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let marks = File::from(rustix::fs::memfd_create("log", flags).expect("made"));
        marks.set_len(4096).expect("its length");
        rustix::fs::fcntl_add_seals(&marks, rustix::fs::SealFlags::SHRINK).expect("sealed");
        let log = DirtyLog::open(marks.try_clone().expect("a descriptor"), 4096, 0).expect("opened");
        let files = [(); 2].map(|()| tempfile::tempfile().expect("a file"));
        files.iter().for_each(|file| file.set_len(8 * PAGE_BYTES as u64).expect("room"));
        let page = PAGE_BYTES as u64;
        let region = |gpa: u64, pages: u64, file: &File, from: u64| RegionDescriptor {
            gpa: gpa * page,
            size: pages * page,
            user_addr: (1 << 40) + gpa * page,
            file: file.try_clone().expect("a descriptor"),
            file_offset: from * page,
        };
        // The first file is seen twice, the second in part.
        let [first, second] = &files;
        let all = vec![region(16, 8, first, 0), region(64, 4, first, 2), region(128, 4, second, 4)];
        let table = VmMemory::new().map(all).expect("mapped");
        let marked = |gpa: u64, len: usize| {
            let mut slices = Vec::new();
            table.slices(gpa, len, &mut slices).expect("inside");
            let is_marked = slices.iter().fold(true, |all, slice| all & table.mark_written(slice, &log));
            let mut bytes = vec![0; 4096];
            std::os::unix::fs::FileExt::read_exact_at(&marks, &mut bytes, 0).expect("read");
            std::os::unix::fs::FileExt::write_all_at(&marks, &vec![0; 4096], 0).expect("written");
            let pages: Vec<usize> = (0..4096 * 8).filter(|page| bytes[page / 8] & (1 << (page % 8)) != 0).collect();
            (is_marked, pages)
        };
        assert_eq!(marked(16 * page + 4095, 1), (true, vec![16]));
        assert_eq!(marked(17 * page + 4095, 2), (true, vec![17, 18, 64]));
        assert_eq!(marked(64 * page, 3 * PAGE_BYTES), (true, vec![18, 19, 20, 64, 65, 66]));
        assert_eq!(marked(130 * page + 10, 100), (true, vec![130]));
    }
}
