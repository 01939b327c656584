//! Calls of the VMM that take memory away or put other memory in its place without a page fault: a balloon, virtio-mem and free page
//! reporting punch holes into the file of the guest's memory.
//!
//! amberlog retains committed journal blocks in write-protected pages of that file, and hears of a change by the page fault alone. So
//! before such a call each page of its range that is protected is faulted in for writing, as a guest's write would: amberlog copies it
//! out and lets it go, and the call goes on. If amberlog is dead the call waits for the next one, as such a write does.
//!
//! Which pages are protected is what the kernel says (`/proc/self/pagemap`): no page is made that is not there, and nothing is asked of
//! amberlog where it holds nothing. Where a file is mapped is read from `/proc/self/maps`, again when the VMM has mapped something else since.
//!
//! Must never: let the call be made when a protected page of its range could not be faulted in (it fails then, and VMMs go on without
//! it), do more than the call itself in a process that has no userfaultfd to hand over.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{fs::File, io};

/// "pte is uffd-wp write-protected", of a page that is there, swapped out, or not there: `Documentation/admin-guide/mm/pagemap.rst`.
const WRITE_PROTECTED: u64 = 1 << 57;
/// Words of pagemap that are read at once.
const PAGES_AT_ONCE: u64 = 4096;
/// `include/uapi/asm-generic/mman-common.h` (Linux 6.13).
const MADV_GUARD_INSTALL: libc::c_int = 102;

/// A part of a file that the VMM can write to through its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    file_offset: u64,
    device: u64,
    inode: u64,
}

/// What is read of this process. Opened before `main`: a VMM may give its rights up, and a child has other memory.
#[derive(Debug)]
struct Sources {
    maps: File,
    pagemap: File,
    page_bytes: u64,
    /// As of the number of changes before they were read.
    mappings: Mutex<(u64, Vec<Mapping>)>,
}

/// Nothing, as long as no userfaultfd was handed over.
static SOURCES: OnceLock<Sources> = OnceLock::new();
/// What the VMM has mapped, unmapped or moved so far.
static CHANGES: AtomicU64 = AtomicU64::new(1);

/// Begins to watch over what is taken away. To be called before a userfaultfd is handed over: false when it cannot be watched.
pub(crate) fn begin() -> bool {
    let open = || -> io::Result<Sources> {
        let sources = Sources {
            maps: File::open("/proc/self/maps")?,
            pagemap: File::open("/proc/self/pagemap")?,
            // SAFETY: a system call without pointers.
            page_bytes: u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_err(io::Error::other)?,
            mappings: Mutex::default(),
        };
        // The stack has a page for certain.
        let here = (&raw const sources).addr() as u64;
        sources.protected_runs(here, here + 1)?;
        sources.read_mappings()?;
        Ok(sources)
    };
    open().is_ok_and(|sources| SOURCES.set(sources).is_ok())
}

impl Sources {
    fn read_mappings(&self) -> io::Result<Vec<Mapping>> {
        let mut text = Vec::new();
        let mut part = vec![0; 1 << 16];
        loop {
            match self.maps.read_at(&mut part, text.len() as u64) {
                Ok(0) => break,
                Ok(count) => text.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(String::from_utf8_lossy(&text).lines().filter_map(mapping_of).collect())
    }

    /// Where the process has parts of files mapped shared and for writing.
    fn mappings(&self) -> io::Result<Vec<Mapping>> {
        let mut known = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        let changes = CHANGES.load(Ordering::SeqCst);
        if known.0 != changes {
            *known = (changes, self.read_mappings()?);
        }
        Ok(known.1.clone())
    }

    /// The runs of pages in a range of addresses that are protected, as addresses.
    fn protected_runs(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut page = start / self.page_bytes;
        let last = end.div_ceil(self.page_bytes);
        let mut words = vec![0; (last - page).min(PAGES_AT_ONCE) as usize * 8];
        while page < last {
            let count = (last - page).min(PAGES_AT_ONCE);
            let words = &mut words[..count as usize * 8];
            self.pagemap.read_exact_at(words, page * 8)?;
            for (at, word) in (page..).zip(words.as_chunks::<8>().0) {
                if u64::from_ne_bytes(*word) & WRITE_PROTECTED == 0 {
                    continue;
                }
                let at = at * self.page_bytes;
                match runs.last_mut() {
                    Some(run) if run.1 == at => run.1 += self.page_bytes,
                    _ => runs.push((at, at + self.page_bytes)),
                }
            }
            page += count;
        }
        Ok(runs)
    }

    /// Has the protected pages of a range of addresses copied out.
    fn give_up(&self, start: u64, end: u64) -> io::Result<()> {
        for (start, end) in self.protected_runs(start, end)? {
            populate(start, end - start)?;
        }
        Ok(())
    }

    /// The same of a range of a file, wherever it is mapped.
    fn give_up_file(&self, descriptor: libc::c_int, from: u64, to: u64) -> io::Result<()> {
        // SAFETY: an all-zero stat is valid, and lives across the call; the descriptor is what the VMM gave to the call that follows.
        let status = unsafe {
            let mut status: libc::stat = std::mem::zeroed();
            if libc::fstat(descriptor, &raw mut status) != 0 {
                // Nor will the call itself do anything.
                return Ok(());
            }
            status
        };
        let is_of_it = |mapping: &Mapping| (mapping.device, mapping.inode) == (status.st_dev, status.st_ino);
        for mapping in self.mappings()?.into_iter().filter(is_of_it) {
            let first = from.max(mapping.file_offset);
            let last = to.min(mapping.file_offset + (mapping.end - mapping.start));
            if first < last {
                let address = |at: u64| mapping.start + (at - mapping.file_offset);
                self.give_up(address(first), address(last))?;
            }
        }
        Ok(())
    }

    /// The same of a range of addresses, in which something else may be mapped or nothing.
    fn give_up_range(&self, start: u64, len: u64) -> io::Result<()> {
        let end = start.saturating_add(len);
        for mapping in self.mappings()? {
            let (first, last) = (start.max(mapping.start), end.min(mapping.end));
            if first < last {
                self.give_up(first, last)?;
            }
        }
        Ok(())
    }
}

/// Of a line of `/proc/PID/maps`: `7f12a000-7f12b000 rw-s 00001000 00:1a 1234 /dev/shm/ram`.
fn mapping_of(line: &str) -> Option<Mapping> {
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let file_offset = hexadecimal(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let inode = words.next()?.parse().ok().filter(|inode| *inode != 0)?;
    let device = libc::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    // A page is protected in a shared mapping only. One that cannot be written to cannot be faulted in so.
    let counts = rights.get(1) == Some(&b'w') && rights.get(3) == Some(&b's');
    counts.then_some(Mapping { start: hexadecimal(start)?, end: hexadecimal(end)?, file_offset, device, inode })
}

/// Writes to pages without changing them: whoever answers their faults is waited for.
fn populate(start: u64, len: u64) -> io::Result<()> {
    loop {
        // SAFETY: no content is changed; where nothing is mapped any more, the kernel says so.
        let result = unsafe { system_call(libc::SYS_madvise, [start, len, libc::MADV_POPULATE_WRITE as u64, 0, 0, 0]) };
        let error = io::Error::last_os_error();
        match (result, error.raw_os_error()) {
            (0, _) => return Ok(()),
            (_, Some(libc::EINTR | libc::EAGAIN)) => {}
            // Unmapped in this moment, and with it what was protected there.
            (_, Some(libc::ENOMEM)) if !is_mapped(start, len) => return Ok(()),
            _ => return Err(error),
        }
    }
}

fn is_mapped(start: u64, len: u64) -> bool {
    // SAFETY: the call changes nothing, and tells of a hole in the range by ENOMEM.
    unsafe { system_call(libc::SYS_msync, [start, len, libc::MS_ASYNC as u64, 0, 0, 0]) == 0 }
}

/// A system call past the C library, whose functions of these names are the ones below. `errno` says why it failed.
///
/// # Safety
/// Those of the call.
unsafe fn system_call(number: libc::c_long, words: [u64; 6]) -> libc::c_long {
    // SAFETY: promise of the caller.
    unsafe { libc::syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]) }
}

/// Does what has to be done before a call; then whether the call may be made. `errno` says why not, and is else as it was.
fn may_go_on(before: impl FnOnce(&Sources) -> io::Result<()>) -> bool {
    let Some(sources) = SOURCES.get() else { return true };
    // SAFETY: the C library gives a pointer to this thread's own `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let earlier = unsafe { *errno };
    let result = before(sources);
    let code = result.as_ref().err().map_or(earlier, |error| error.raw_os_error().unwrap_or(libc::EIO));
    // SAFETY: as above.
    unsafe { *errno = code };
    result.is_ok()
}

/// In place of the C library's: see the module. `fallocate64` is the same on machines with 64 bits.
///
/// # Safety
/// Any arguments are allowed, as for the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fallocate(
    descriptor: libc::c_int,
    mode: libc::c_int,
    offset: libc::off_t,
    len: libc::off_t,
) -> libc::c_int {
    let takes_away = mode & !libc::FALLOC_FL_KEEP_SIZE != 0;
    if takes_away
        && let (Ok(from), Ok(len)) = (u64::try_from(offset), u64::try_from(len))
        && !may_go_on(|sources| sources.give_up_file(descriptor, from, from.saturating_add(len)))
    {
        return -1;
    }
    // SAFETY: the system call of this name, with its arguments.
    unsafe {
        system_call(libc::SYS_fallocate, [descriptor as u64, mode as u64, offset as u64, len as u64, 0, 0])
            as libc::c_int
    }
}

/// See [`fallocate`].
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fallocate64(
    descriptor: libc::c_int,
    mode: libc::c_int,
    offset: libc::off_t,
    len: libc::off_t,
) -> libc::c_int {
    // SAFETY: the same function.
    unsafe { fallocate(descriptor, mode, offset, len) }
}

/// In place of the C library's. What MADV_DONTNEED takes away of a shared mapping is there again at the next touch, and
/// protected as before.
///
/// # Safety
/// Those of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut libc::c_void, len: libc::size_t, advice: libc::c_int) -> libc::c_int {
    let takes_away = matches!(advice, libc::MADV_REMOVE | MADV_GUARD_INSTALL);
    if takes_away && !may_go_on(|sources| sources.give_up_range(address.addr() as u64, len as u64)) {
        return -1;
    }
    // SAFETY: the system call of this name, with its arguments.
    unsafe {
        system_call(libc::SYS_madvise, [address.addr() as u64, len as u64, advice as u64, 0, 0, 0]) as libc::c_int
    }
}

/// In place of the C library's: what is mapped over a page takes its protection away.
///
/// # Safety
/// Those of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut libc::c_void,
    len: libc::size_t,
    rights: libc::c_int,
    flags: libc::c_int,
    descriptor: libc::c_int,
    offset: libc::off_t,
) -> *mut libc::c_void {
    let replaces = flags & libc::MAP_FIXED != 0;
    if replaces && !may_go_on(|sources| sources.give_up_range(address.addr() as u64, len as u64)) {
        return libc::MAP_FAILED;
    }
    // SAFETY: the system call of this name, with its arguments.
    let result = unsafe {
        let words = [address.addr() as u64, len as u64, rights as u64, flags as u64, descriptor as u64, offset as u64];
        system_call(libc::SYS_mmap, words)
    };
    if replaces || descriptor >= 0 {
        CHANGES.fetch_add(1, Ordering::SeqCst);
    }
    // What the kernel gives is an address, or -1, which is MAP_FAILED.
    std::ptr::with_exposed_provenance_mut(result as usize)
}

/// See [`mmap`].
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut libc::c_void,
    len: libc::size_t,
    rights: libc::c_int,
    flags: libc::c_int,
    descriptor: libc::c_int,
    offset: libc::off_t,
) -> *mut libc::c_void {
    // SAFETY: the same function.
    unsafe { mmap(address, len, rights, flags, descriptor, offset) }
}

/// In place of the C library's. The pages stay in their file, and nobody can write to them here.
///
/// # Safety
/// Those of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut libc::c_void, len: libc::size_t) -> libc::c_int {
    // SAFETY: the system call of this name, with its arguments.
    let result =
        unsafe { system_call(libc::SYS_munmap, [address.addr() as u64, len as u64, 0, 0, 0, 0]) as libc::c_int };
    CHANGES.fetch_add(1, Ordering::SeqCst);
    result
}

/// In place of the C library's: what is moved is protected no more.
///
/// # Safety
/// Those of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    address: *mut libc::c_void,
    old_len: libc::size_t,
    new_len: libc::size_t,
    flags: libc::c_int,
    new_address: *mut libc::c_void,
) -> *mut libc::c_void {
    let before = |sources: &Sources| {
        // Of no length: the same pages once more, at another address.
        let len = if old_len == 0 { new_len } else { old_len };
        sources.give_up_range(address.addr() as u64, len as u64)?;
        if flags & libc::MREMAP_FIXED != 0 {
            sources.give_up_range(new_address.addr() as u64, new_len as u64)?;
        }
        Ok(())
    };
    if !may_go_on(before) {
        return libc::MAP_FAILED;
    }
    // SAFETY: the system call of this name, with its arguments. Without MREMAP_FIXED the kernel does not look at the last one.
    let result = unsafe {
        let (from, to) = (address.addr() as u64, new_address.addr() as u64);
        system_call(libc::SYS_mremap, [from, old_len as u64, new_len as u64, flags as u64, to, 0])
    };
    CHANGES.fetch_add(1, Ordering::SeqCst);
    std::ptr::with_exposed_provenance_mut(result as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::{CopyOnWrite, PAGE_BYTES, PageId, Protection, RegionDescriptor, VmMemory};
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::fs::MetadataExt;
    use std::ptr::null_mut;
    use std::sync::{Arc, Weak};

    const PAGES: usize = 64;
    /// Nobody has touched it: there is no page in the file.
    const UNTOUCHED: u32 = 40;

    /// What a journal area does with a page that is retained.
    #[derive(Default)]
    struct Area {
        memory: OnceLock<Weak<VmMemory>>,
        kept: Mutex<Vec<(u32, u8)>>,
    }

    impl CopyOnWrite for Area {
        fn copy_out(&self, page: PageId) -> bool {
            let memory = self.memory.get().and_then(Weak::upgrade).expect("it lives");
            let mut bytes = vec![0; PAGE_BYTES];
            memory.page(page).expect("it is of this VM").copy_out(0, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
            self.kept.lock().expect("no panic").push((page.0, bytes[0]));
            memory.unprotect(&[page]);
            true
        }
    }

    /// A VMM with a part of its memory, and an amberlog, in one process.
    struct Bench {
        memory: Arc<VmMemory>,
        area: Arc<Area>,
        file: File,
        at: *mut libc::c_void,
        _directory: tempfile::TempDir,
    }

    fn content(page: u32) -> u8 {
        page as u8 + 100
    }

    fn map_anywhere(file: &File) -> *mut libc::c_void {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: at an address of the kernel's choice.
        let at = unsafe { libc::mmap(null_mut(), PAGES * PAGE_BYTES, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED);
        at
    }

    impl Bench {
        fn new(protected: &[u32]) -> Self {
            assert!(begin() || SOURCES.get().is_some(), "what is taken away can be seen");
            let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(directory.path().join("ram"))
                .expect("a file");
            file.set_len((PAGES * PAGE_BYTES) as u64).expect("room");
            for page in (0..PAGES as u32).filter(|page| *page != UNTOUCHED) {
                file.write_all_at(&[content(page); PAGE_BYTES], u64::from(page) * PAGE_BYTES as u64).expect("written");
            }
            let at = map_anywhere(&file);
            let memory = VmMemory::new();
            let area = Arc::new(Area::default());
            area.memory.set(Arc::downgrade(&memory)).expect("once");
            memory.set_copy_on_write(Arc::<Area>::clone(&area));
            // SAFETY: a system call; the descriptor is nobody else's.
            let userfault = unsafe { OwnedFd::from_raw_fd(crate::make_userfault().expect("the right to make one")) };
            memory.take_userfaultfd(userfault).expect("a kernel that can");
            let region = RegionDescriptor {
                gpa: 0,
                size: (PAGES * PAGE_BYTES) as u64,
                user_addr: at.addr() as u64,
                file: file.try_clone().expect("a descriptor"),
                file_offset: 0,
            };
            memory.map(vec![region]).expect("mapped");
            assert_eq!(memory.protection(), Protection::Available);
            let pages: Vec<PageId> = protected.iter().map(|page| PageId(*page)).collect();
            memory.protect(&pages).expect("protected");
            Bench { memory, area, file, at, _directory: directory }
        }

        fn address(&self, page: u32) -> *mut libc::c_void {
            self.at.wrapping_byte_add(page as usize * PAGE_BYTES)
        }

        fn write(&self, page: u32) {
            // SAFETY: inside the mapping, of which nobody else has a reference.
            unsafe { self.address(page).cast::<u8>().write_volatile(1) };
        }

        fn kept(&self) -> Vec<(u32, u8)> {
            let mut kept = self.area.kept.lock().expect("no panic").clone();
            kept.sort_unstable();
            kept
        }
    }

    type Call = fn(&Bench, u32, usize) -> bool;

    /// Every call that takes pages away.
    const CALLS: [(&str, Call); 7] = [
        ("fallocate", |bench, page, pages| {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (from, len) = (page as usize * PAGE_BYTES, pages * PAGE_BYTES);
            // SAFETY: nobody has a reference to the pages.
            unsafe { libc::fallocate(bench.file.as_raw_fd(), mode, from as i64, len as i64) == 0 }
        }),
        ("fallocate64 of a part of the first and of the last page", |bench, page, pages| {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (from, len) = (page as usize * PAGE_BYTES + 100, pages * PAGE_BYTES - 200);
            // SAFETY: as above.
            unsafe { libc::fallocate64(bench.file.as_raw_fd(), mode, from as i64, len as i64) == 0 }
        }),
        ("fallocate through another descriptor", |bench, page, pages| {
            let other = bench.file.try_clone().expect("a descriptor");
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (from, len) = (page as usize * PAGE_BYTES, pages * PAGE_BYTES);
            // SAFETY: as above.
            unsafe { libc::fallocate(other.as_raw_fd(), mode, from as i64, len as i64) == 0 }
        }),
        ("MADV_REMOVE", |bench, page, pages| {
            // SAFETY: as above.
            unsafe { libc::madvise(bench.address(page), pages * PAGE_BYTES, libc::MADV_REMOVE) == 0 }
        }),
        ("mmap over it", |bench, page, pages| {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let (len, from) = (pages * PAGE_BYTES, page as usize * PAGE_BYTES);
            // SAFETY: as above.
            unsafe {
                libc::mmap(bench.address(page), len, rights, flags, bench.file.as_raw_fd(), from as i64)
                    != libc::MAP_FAILED
            }
        }),
        ("mremap", |bench, page, pages| {
            let len = pages * PAGE_BYTES;
            // SAFETY: as above.
            unsafe { libc::mremap(bench.address(page), len, len, libc::MREMAP_MAYMOVE) != libc::MAP_FAILED }
        }),
        ("mremap of the same pages to a second place", |bench, page, pages| {
            let len = pages * PAGE_BYTES;
            // SAFETY: as above.
            unsafe { libc::mremap(bench.address(page), 0, len, libc::MREMAP_MAYMOVE) != libc::MAP_FAILED }
        }),
    ];

    #[test]
    fn what_is_taken_away_is_copied_out_first_and_nothing_else() {
        for (name, call) in CALLS {
            let bench = Bench::new(&[3, 4, 10, 11, 20, 21]);
            assert!(call(&bench, 4, 17), "{name}: {}", io::Error::last_os_error());
            let expected: Vec<_> = [4, 10, 11, 20].map(|page| (page, content(page))).into();
            assert_eq!(bench.kept(), expected, "{name}");
            // The others are as they were.
            bench.write(21);
            assert_eq!(bench.kept().last(), Some(&(21, content(21))), "{name}");
            // SAFETY: everything that is left of the mapping.
            unsafe { libc::munmap(bench.at, PAGES * PAGE_BYTES) };
        }
    }

    /// A mapping that came after others had been read is looked for, too, and pages that are not there are not made.
    #[test]
    fn a_mapping_that_comes_later_is_known_and_nothing_is_allocated() {
        let early = Bench::new(&[5]);
        assert!(CALLS[0].1(&early, 5, 1));
        let late = Bench::new(&[5, 6]);
        late.file.set_len(1 << 40).expect("as large as it likes");
        let before = late.file.metadata().expect("it is there").blocks();
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: nobody has a reference to the pages.
        let result = unsafe { libc::fallocate(late.file.as_raw_fd(), mode, 6 * PAGE_BYTES as i64, 1 << 39) };
        assert_eq!(result, 0);
        assert_eq!((early.kept(), late.kept()), (vec![(5, content(5))], vec![(6, content(6))]));
        let left = late.file.metadata().expect("it is there").blocks();
        assert_eq!(before - left, (PAGES as u64 - 6 - 1) * PAGE_BYTES as u64 / 512);
        // A hole that no file system punches: what is done before takes no page, and makes none.
        let whole = Bench::new(&[]);
        let blocks = || whole.file.metadata().expect("it is there").blocks();
        let before = blocks();
        // SAFETY: as above.
        let result = unsafe { libc::fallocate(whole.file.as_raw_fd(), libc::FALLOC_FL_PUNCH_HOLE, 0, 1 << 39) };
        assert_eq!((result, blocks()), (-1, before));
    }

    /// What makes room, or gives advice that changes nothing, waits for nobody.
    #[test]
    fn calls_that_take_nothing_away_cost_no_page() {
        let bench = Bench::new(&[3, UNTOUCHED]);
        // SAFETY: nobody has a reference to the pages.
        let results = unsafe {
            [
                libc::fallocate(bench.file.as_raw_fd(), 0, 0, (PAGES * PAGE_BYTES) as i64),
                libc::fallocate(bench.file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, (2 * PAGES * PAGE_BYTES) as i64),
                libc::madvise(bench.at, PAGES * PAGE_BYTES, libc::MADV_DONTNEED),
                libc::madvise(bench.at, PAGES * PAGE_BYTES, libc::MADV_WILLNEED),
            ]
        };
        assert_eq!((results, bench.kept()), ([0; 4], Vec::new()));
        // MADV_DONTNEED has taken the page tables, and not the protection.
        bench.write(3);
        bench.write(UNTOUCHED);
        assert_eq!(bench.kept(), [(3, content(3)), (UNTOUCHED, 0)]);
    }

    #[test]
    fn errors_are_those_of_the_calls() {
        let bench = Bench::new(&[3]);
        // SAFETY: calls that fail.
        unsafe {
            assert_eq!(libc::fallocate(-1, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
            assert_eq!(libc::fallocate(bench.file.as_raw_fd(), 0, -1, 4096), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            assert_eq!(libc::madvise(bench.at.wrapping_byte_add(1), 4096, libc::MADV_REMOVE), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            assert_eq!(libc::mmap(null_mut(), 0, libc::PROT_READ, libc::MAP_PRIVATE, -1, 0), libc::MAP_FAILED);
            assert_eq!(libc::munmap(bench.at.wrapping_byte_add(1), 1), -1);
            *libc::__errno_location() = 77;
            assert_eq!(libc::madvise(bench.at, PAGE_BYTES, libc::MADV_REMOVE), 0);
        }
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(77));
        assert!(Arc::strong_count(&bench.memory) > 0);
    }

    #[test]
    fn a_line_of_maps_is_a_mapping_or_it_is_not() {
        let mapping =
            mapping_of("7f12a000-7f12c000 rw-s 00003000 00:1a 1234                    /dev/shm/with (deleted) space");
        let expected = Mapping { start: 0x7f12_a000, end: 0x7f12_c000, file_offset: 0x3000, device: 0x1a, inode: 1234 };
        assert_eq!(mapping, Some(expected));
        for line in [
            "7f12a000-7f12c000 rw-p 00003000 00:1a 1234 /private",
            "7f12a000-7f12c000 r--s 00003000 00:1a 1234 /read-only",
            "7f12a000-7f12c000 rw-s 00000000 00:00 0 ",
            "7f12a000 rw-s",
            "",
        ] {
            assert_eq!(mapping_of(line), None, "{line}");
        }
    }
}
