//! Protection of a VM's pages, and the faults on them, which are answered here.
//!
//! The thread that answers faults takes no ring lock and waits for no I/O that needs the guest: it only calls
//! [`crate::CopyOnWrite::copy_out`], which copies a page and lets it go.

use crate::error::Error;
use crate::map::VmMemory;
use crate::slice::PageId;
use crate::userfault::UserFault;
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

impl VmMemory {
    /// Takes the VMM's own userfaultfd, handed over by the preloaded library: pages can be protected from now on.
    ///
    /// # Errors
    /// A sentence when the kernel lacks write protection of shared memory (before Linux 5.19) or refuses the descriptor.
    pub fn take_userfaultfd(self: &Arc<Self>, descriptor: OwnedFd) -> Result<(), Error> {
        let userfault = UserFault::handshake(descriptor)?;
        if userfault.is_over() {
            // Of what had this process's number, or ran in it, before the VMM did: nothing would be protected, and no call would fail.
            return Err(Error::system(
                "the program that handed over the userfaultfd is not the VMM, and has ended",
                std::io::Error::from_raw_os_error(libc::ESRCH),
            ));
        }
        self.open_channel(userfault)
    }

    /// Goes on with a userfaultfd that an earlier process of ours has used: what is protected stays so. Whoever waits on a fault
    /// asks again as soon as it is known where the VMM has its memory.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn adopt_userfaultfd(self: &Arc<Self>, descriptor: OwnedFd) -> Result<(), Error> {
        self.open_channel(UserFault::adopt(descriptor))
    }

    /// Whether a userfaultfd that an earlier process of ours has used, or was given, is of a program that has ended.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn is_of_ended_program(descriptor: BorrowedFd<'_>) -> std::io::Result<bool> {
        Ok(UserFault::adopt(descriptor.try_clone_to_owned()?).is_over())
    }

    fn open_channel(self: &Arc<Self>, userfault: UserFault) -> Result<(), Error> {
        let userfault = Arc::new(userfault);
        self.channel.open(&userfault)?;
        let vm = Arc::downgrade(self);
        log_context::spawn(std::thread::Builder::new().name("faults".to_owned()), move || {
            answer_faults(&vm, &userfault)
        })
        .map_err(|e| Error::system("starting the thread that answers page faults", e))?;
        Ok(())
    }

    /// Protects `pages` (sorted, without repeats): from the return on, a write by the guest or the VMM waits until
    /// [`crate::CopyOnWrite::copy_out`] has let the page go. All or nothing. Returns the number of calls it took.
    ///
    /// # Errors
    /// When the kernel refuses; none of the pages is then protected by this call.
    pub fn protect(&self, pages: &[PageId]) -> std::io::Result<u64> {
        debug_assert!(pages.windows(2).all(|pair| pair[0] < pair[1]), "pages are sorted and unique");
        match self.channel.apply(pages, true) {
            Ok(calls) => Ok(calls),
            Err(error) => {
                // Undo what was done of it; a page too many let go is harmless, since none of them counts yet.
                let _ = self.channel.apply(pages, false);
                Err(error)
            }
        }
    }

    /// Lets every page of the VMM go, whoever protected it, and nobody waits any more: nobody will be there who answers faults. A process that
    /// was killed may have protected pages of which nobody knows. Nothing may count on any page.
    pub fn let_all_go(&self) {
        self.channel.let_all_go();
    }

    /// Whether the VMM has not said yet where it has its memory, of which pages may be protected.
    pub fn is_untold(&self) -> bool {
        self.channel.is_untold()
    }

    /// Lets `pages` (sorted, without repeats) go and wakes their writers. Returns the number of calls it took.
    pub fn unprotect(&self, pages: &[PageId]) -> u64 {
        match self.channel.apply(pages, false) {
            Ok(calls) => calls,
            Err(error) => {
                log::error!("letting {} guest pages go failed: {error}; the guest may hang on them", pages.len());
                0
            }
        }
    }

    /// These are protected since an earlier process.
    pub fn adopt_protected(&self, pages: &[PageId]) {
        self.channel.note_protected(pages, true);
    }

    /// Number of protect and unprotect calls made so far.
    pub fn protection_calls(&self) -> u64 {
        self.channel.calls.load(Ordering::Relaxed)
    }

    /// The time that these calls took, in nanoseconds: what the guest's processors wait for their own page tables meanwhile is not
    /// in it.
    pub fn protection_ns(&self) -> u64 {
        self.channel.calls_ns.load(Ordering::Relaxed)
    }

    /// Says that pages of this VM must not be protected, for `reason` (a balloon, say, that takes pages away without a
    /// fault): all is copied from now on.
    pub fn refuse_protection(&self, reason: impl Into<String>) {
        self.channel.refuse(reason.into());
    }
}

#[cfg(feature = "simulate")]
impl VmMemory {
    /// For tests and simulations without a VMM: pages count as protected in a set, and
    /// [`VmMemory::simulated_guest_write`] faults on them as a guest would.
    ///
    /// # Panics
    /// If it was called before.
    pub fn simulate_protection(&self) {
        assert!(self.channel.simulated.set(std::sync::Mutex::default()).is_ok(), "simulated once");
    }

    /// Whether a simulated guest write to `page` would fault.
    pub fn simulated_is_protected(&self, page: PageId) -> bool {
        self.channel.simulated.get().is_some_and(|set| set.lock().expect("no panic under this lock").contains(&page.0))
    }

    /// Writes as the guest would: a protected page is copied out by the journal area first.
    ///
    /// # Panics
    /// If the page is still protected after the journal area has answered the fault, or is not of this VM.
    pub fn simulated_guest_write(&self, page: PageId, offset: usize, bytes: &[u8]) {
        assert!(self.simulated_guest_tries(page, offset, bytes), "page {page:?} was not let go");
    }

    /// Tries again, as the thread that answers faults does now and then, the pages for which there was no memory.
    ///
    /// # Panics
    /// If there is no journal area.
    pub fn simulated_try_again(&self) {
        self.copy_on_write().expect("a journal area").try_again();
    }

    /// The same, where there may be no memory to copy the page to: false, with nothing written, when the guest has to wait.
    ///
    /// # Panics
    /// If the page is still protected after the journal area has let it go, or is not of this VM.
    pub fn simulated_guest_tries(&self, page: PageId, offset: usize, bytes: &[u8]) -> bool {
        if self.simulated_is_protected(page) {
            if !self.copy_on_write().expect("a journal area").copy_out(page) {
                return false;
            }
            assert!(!self.simulated_is_protected(page), "page {page:?} was not let go");
        }
        self.page(page).expect("a page of this VM").copy_in(offset, bytes);
        true
    }
}

/// So often whoever waits for memory is thought of again, at least.
const TRIED_EVERY: std::time::Duration = std::time::Duration::from_millis(200);

/// Answers faults until the VM's memory is dropped.
fn answer_faults(vm: &Weak<VmMemory>, userfault: &UserFault) {
    if let Some(vm) = vm.upgrade() {
        vm.channel.wake_all(userfault);
    }
    let mut addresses = Vec::with_capacity(64);
    let mut tried = std::time::Instant::now();
    loop {
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: TRIED_EVERY.as_nanos() as i64 };
        let mut poll_list = [PollFd::new(userfault, PollFlags::IN)];
        let ready = poll(&mut poll_list, Some(&timeout));
        let revents = poll_list[0].revents();
        let Some(vm) = vm.upgrade() else { return };
        if let Err(error) = ready
            && error != rustix::io::Errno::INTR
        {
            log::error!("waiting for page faults failed: {error}");
            return;
        }
        let has_faults = revents.contains(PollFlags::IN);
        if !has_faults && revents.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            return;
        }
        // Also where others fault all the time.
        if !has_faults || tried.elapsed() >= TRIED_EVERY {
            if let Some(handler) = vm.copy_on_write() {
                handler.try_again();
            }
            tried = std::time::Instant::now();
        }
        if !has_faults {
            continue;
        }
        addresses.clear();
        if let Err(error) = userfault.read_faults(&mut addresses) {
            // ESRCH: the VMM is gone, and with it everybody who could fault.
            log::debug!("reading page faults ended: {error}");
            return;
        }
        // Those behind the first one wait for it as well.
        let began = std::time::Instant::now();
        for address in &addresses {
            let Some(page) = vm.channel.page_at(*address) else {
                if !vm.channel.is_told.load(Ordering::Acquire) {
                    // Not told yet: when it is, whoever waits is woken and asks again.
                    continue;
                }
                log::error!("a page fault at {address:#x} is outside every known region");
                continue;
            };
            match vm.copy_on_write() {
                // Whoever there was no memory for waits, and is woken with the page.
                Some(handler) => drop(handler.copy_out(page)),
                None => {
                    vm.unprotect(&[page]);
                }
            }
            vm.fault_latency.record(began.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::{CopyOnWrite, Protection};
    use crate::map::{RegionDescriptor, Told};
    use crate::slice::PAGE_BYTES;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicBool;
    use std::sync::{Mutex, OnceLock};
    use std::time::Duration;

    const PAGES: u64 = 16;
    const BYTES: u64 = PAGES * PAGE_BYTES as u64;

    /// What a journal area does.
    #[derive(Default)]
    struct Area {
        memory: OnceLock<Weak<VmMemory>>,
        kept: Mutex<Vec<(u32, u8)>>,
        is_full: AtomicBool,
        waiting: Mutex<Vec<PageId>>,
    }

    impl CopyOnWrite for Area {
        fn copy_out(&self, page: PageId) -> bool {
            let memory = self.memory.get().and_then(Weak::upgrade).expect("it lives");
            if memory.is_retained(page) {
                if self.is_full.load(Ordering::SeqCst) {
                    self.waiting.lock().expect("no panic").push(page);
                    return false;
                }
                let mut byte = [0];
                memory.page(page).expect("it is of this VM").copy_out(0, &mut byte);
                self.kept.lock().expect("no panic").push((page.0, byte[0]));
                memory.set_retained(page, false);
            }
            memory.unprotect(&[page]);
            true
        }

        fn try_again(&self) {
            let waiting = std::mem::take(&mut *self.waiting.lock().expect("no panic"));
            for page in waiting {
                let _ = self.copy_out(page);
            }
        }
    }

    struct Bench {
        memory: Arc<VmMemory>,
        area: Arc<Area>,
        directory: tempfile::TempDir,
    }

    impl Bench {
        fn new() -> Self {
            let memory = VmMemory::new();
            let area = Arc::new(Area::default());
            area.memory.set(Arc::downgrade(&memory)).expect("once");
            memory.set_copy_on_write(Arc::<Area>::clone(&area));
            // SAFETY: a system call without pointers.
            let made = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
            assert!(made >= 0, "{}", std::io::Error::last_os_error());
            // SAFETY: the descriptor is nobody else's.
            memory.take_userfaultfd(unsafe { OwnedFd::from_raw_fd(made as i32) }).expect("a kernel that can");
            Bench { memory, area, directory: tempfile::tempdir_in("/dev/shm").expect("a directory") }
        }

        /// A file of guest memory, each page of which has its own content.
        fn file(&self, name: &str, first: u8) -> File {
            let path = self.directory.path().join(name);
            let file = File::options().read(true).write(true).create_new(true).open(path).expect("a file");
            for page in 0..PAGES {
                file.write_all_at(&[first + page as u8; PAGE_BYTES], page * PAGE_BYTES as u64).expect("written");
            }
            file
        }

        fn retain(&self, pages: &[u32]) {
            let pages: Vec<PageId> = pages.iter().map(|page| PageId(*page)).collect();
            pages.iter().for_each(|page| self.memory.set_retained(*page, true));
            self.memory.protect(&pages).expect("protected");
        }

        /// What was copied out since this was asked before.
        fn kept(&self) -> Vec<(u32, u8)> {
            let mut kept = std::mem::take(&mut *self.area.kept.lock().expect("no panic"));
            kept.sort_unstable();
            kept
        }
    }

    /// The VMM's mapping of a file: at an address of the kernel's choice, or over what is at this one.
    fn mapped(file: &File, at: Option<u64>) -> u64 {
        let flags = libc::MAP_SHARED | at.map_or(0, |_| libc::MAP_FIXED);
        let at = std::ptr::with_exposed_provenance_mut(at.unwrap_or_default() as usize);
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: an address of the kernel's choice, or one of a mapping of ours to which nobody has a reference.
        let at = unsafe { libc::mmap(at, BYTES as usize, rights, flags, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED);
        at.expose_provenance() as u64
    }

    fn write(at: u64, page: u64) {
        let at = std::ptr::with_exposed_provenance_mut::<u8>((at + page * PAGE_BYTES as u64) as usize);
        // SAFETY: inside a mapping of ours.
        unsafe { at.write_volatile(255) };
    }

    fn region(file: &File, gpa: u64, user_addr: u64) -> RegionDescriptor {
        let file = file.try_clone().expect("a descriptor");
        RegionDescriptor { gpa, size: BYTES, user_addr, file, file_offset: 0 }
    }

    #[test]
    fn other_memory_at_the_same_address_takes_the_older_ones_place() {
        let bench = Bench::new();
        let (first, second) = (bench.file("first", 100), bench.file("second", 200));
        let at = mapped(&first, None);
        bench.memory.map(vec![region(&first, 0, at)]).expect("mapped");
        bench.retain(&[3, 4, 9]);
        // Unplugged, and another one plugged in, while no device was told.
        mapped(&second, Some(at));
        bench.memory.map(vec![region(&second, 0, at)]).expect("mapped");
        assert_eq!(bench.kept(), [(3, 103), (4, 104), (9, 109)]);
        assert_eq!(bench.memory.protection(), Protection::Available);
        let page = PAGES as u32 + 3;
        bench.retain(&[page]);
        write(at, 3);
        assert_eq!(bench.kept(), [(page, 203)], "the page that is there now");
        write(at, 9);
        assert_eq!(bench.kept(), []);
    }

    /// Only a part of the older one goes.
    #[test]
    fn what_is_not_covered_stays_protected() {
        let bench = Bench::new();
        let (first, second) = (bench.file("first", 100), bench.file("second", 200));
        let at = mapped(&first, None);
        bench.memory.map(vec![region(&first, 0, at)]).expect("mapped");
        bench.retain(&[3, 8, 15]);
        let page_bytes = PAGE_BYTES as u64;
        let middle = at + 5 * page_bytes;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let place = std::ptr::with_exposed_provenance_mut(middle as usize);
        // SAFETY: inside a mapping of ours to which nobody has a reference.
        let result = unsafe { libc::mmap(place, 5 * PAGE_BYTES, rights, flags, second.as_raw_fd(), 0) };
        assert_ne!(result, libc::MAP_FAILED);
        let part = RegionDescriptor { size: 5 * page_bytes, ..region(&second, BYTES, middle) };
        bench.memory.map(vec![part]).expect("mapped");
        assert_eq!(bench.kept(), [(8, 108)]);
        bench.retain(&[PAGES as u32 + 3]);
        for page in [3, 8, 15] {
            write(at, page);
        }
        assert_eq!(bench.kept(), [(3, 103), (15, 115), (PAGES as u32 + 3, 203)]);
    }

    #[test]
    fn the_same_memory_at_its_address_once_more_is_protected_as_it_was() {
        let bench = Bench::new();
        let file = bench.file("file", 100);
        let at = mapped(&file, None);
        let region = || vec![region(&file, 0, at)];
        bench.memory.map(region()).expect("mapped");
        bench.retain(&[3]);
        mapped(&file, Some(at));
        bench.memory.map(region()).expect("mapped");
        assert_eq!(bench.kept(), []);
        write(at, 3);
        assert_eq!(bench.kept(), [(3, 103)]);
        bench.retain(&[5]);
        write(at, 5);
        assert_eq!(bench.kept(), [(5, 105)]);
    }

    #[test]
    fn memory_at_a_second_address_is_copied_out_and_what_there_is_no_room_for_is_protected_at_both() {
        for through_the_second in [false, true] {
            let bench = Bench::new();
            let file = bench.file("file", 100);
            let (first, second) = (mapped(&file, None), mapped(&file, None));
            bench.memory.map(vec![region(&file, 0, first)]).expect("mapped");
            bench.retain(&[3, 4]);
            bench.area.is_full.store(true, Ordering::SeqCst);
            bench.memory.map(vec![region(&file, BYTES, second)]).expect("mapped");
            assert!(matches!(bench.memory.protection(), Protection::Unavailable(_)));
            assert_eq!(bench.kept(), []);
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| write(if through_the_second { second } else { first }, 3));
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(!writer.is_finished(), "it is nowhere else");
                bench.area.is_full.store(false, Ordering::SeqCst);
            });
            assert!(bench.kept().contains(&(3, 103)));
        }
    }

    /// What an earlier process has protected is known, though nobody retains it any more.
    #[test]
    fn what_an_earlier_process_protected_is_protected_where_it_comes_again() {
        let bench = Bench::new();
        let file = bench.file("file", 100);
        let at = mapped(&file, None);
        bench.memory.map(vec![region(&file, 0, at)]).expect("mapped");
        bench.memory.adopt_protected(&[PageId(3)]);
        bench.memory.set_retained(PageId(3), true);
        mapped(&file, Some(at));
        bench.memory.map(vec![region(&file, 0, at)]).expect("mapped");
        write(at, 3);
        assert_eq!(bench.kept(), [(3, 103)]);
    }

    /// Unplugged while devices were told, and plugged in again somewhere else: its pages can be retained as ever.
    #[test]
    fn what_no_device_is_told_of_any_more_is_copied_out_and_may_come_again() {
        let bench = Bench::new();
        let (ram, plugged) = (bench.file("ram", 100), bench.file("plugged", 200));
        let (at, other) = (mapped(&ram, None), mapped(&plugged, None));
        let devices = [(); 2].map(|()| Told::of(&bench.memory));
        let with = |other: u64| bench.memory.map(vec![region(&ram, 0, at), region(&plugged, BYTES, other)]);
        let without = || bench.memory.map(vec![region(&ram, 0, at)]).expect("mapped");
        for device in &devices {
            device.goes_by(&with(other).expect("mapped"));
        }
        let page = PAGES as u32 + 7;
        bench.retain(&[3, page]);
        devices[0].goes_by(&without());
        assert_eq!(bench.kept(), [], "the other one goes by it still");
        // A connection that ends says nothing.
        drop(Told::of(&bench.memory));
        devices[1].goes_by(&without());
        assert_eq!(bench.kept(), [(page, 207)], "and of what stays, nothing");
        let moved = mapped(&plugged, None);
        for device in &devices {
            device.goes_by(&with(moved).expect("mapped"));
        }
        assert_eq!(bench.memory.protection(), Protection::Available);
        bench.retain(&[page]);
        write(moved, 7);
        assert_eq!(bench.kept(), [(page, 207)]);
    }

    /// The VMM's process may have run another program first, or have the number of one that has ended.
    #[test]
    fn a_userfaultfd_of_a_program_that_has_ended_is_not_taken() {
        // SAFETY: the child makes system calls alone.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                let made = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
                libc::dup2(made as i32, 1000);
                loop {
                    libc::pause();
                }
            }
        }
        let of_child = || {
            // SAFETY: system calls without pointers.
            unsafe {
                let process = libc::syscall(libc::SYS_pidfd_open, child, 0);
                let got = libc::syscall(libc::SYS_pidfd_getfd, process, 1000, 0);
                libc::close(process as i32);
                (got >= 0).then(|| OwnedFd::from_raw_fd(got as i32))
            }
        };
        let userfault = loop {
            match of_child() {
                Some(userfault) => break userfault,
                None => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        };
        // SAFETY: a child of ours, and nobody wants to know how it ended.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        let memory = VmMemory::new();
        memory.take_userfaultfd(userfault).expect_err("of a program that has ended");
        assert!(matches!(memory.protection(), Protection::Unavailable(_)));
    }

    #[test]
    fn nothing_is_protected_any_more_when_protection_ends() {
        let bench = Bench::new();
        let ram = bench.file("ram", 100);
        let at = mapped(&ram, None);
        bench.memory.map(vec![region(&ram, 0, at)]).expect("mapped");
        bench.retain(&[3, 9]);
        bench.area.is_full.store(true, Ordering::SeqCst);
        assert!(!bench.memory.end_protection("no room"), "a page is nowhere else");
        assert!(matches!(bench.memory.protection(), Protection::Unavailable(_)));
        assert_eq!(bench.kept(), []);
        bench.area.is_full.store(false, Ordering::SeqCst);
        assert!(bench.memory.end_protection("room"));
        assert_eq!(bench.kept(), [(3, 103), (9, 109)]);
        write(at, 3);
        write(at, 9);
        assert_eq!(bench.kept(), []);
    }

    /// The disk through which it was known where the VMM has its memory is unplugged, or does not come: whoever writes is answered all the same.
    #[test]
    fn a_process_that_goes_on_answers_before_it_is_told_where_memory_is() {
        let first = VmMemory::new();
        let (told, hears) = std::sync::mpsc::channel();
        first.keep_windows(Box::new(move |words| told.send(words.to_owned()).expect("it is heard")));
        let bench = Bench::new();
        let ram = bench.file("ram", 100);
        let at = mapped(&ram, None);
        first.map(vec![region(&ram, 0, at)]).expect("mapped");
        first.map(vec![region(&ram, 0, at)]).expect("mapped");
        let words = hears.try_recv().expect("it is kept");
        assert!(hears.try_recv().is_err(), "once is enough");
        // What somebody else may have kept is taken up as far as it can be.
        for nonsense in ["", "0", "0 0 1000", "0 1 1001", "4294967295 9 1000", "0 17 1000", &"0 1 1000\n".repeat(9999)]
        {
            bench.memory.adopt_windows(nonsense);
        }
        assert_eq!(bench.memory.channel.windows_in_words(), "");
        let adopted = bench.memory.adopt_file(ram.try_clone().expect("a descriptor"));
        assert_eq!(adopted.expect("mapped"), 0);
        bench.memory.adopt_windows(&words);
        let userfault = Arc::clone(bench.memory.channel.userfault.get().expect("there is one"));
        userfault.register(at, BYTES).expect("an earlier process has");
        assert!(bench.memory.is_untold());
        bench.retain(&[3]);
        let (over, is_over) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            write(at, 3);
            let _ = over.send(());
        });
        is_over.recv_timeout(Duration::from_secs(20)).expect("the guest waits");
        assert_eq!(bench.kept(), [(3, 103)]);
        // Told at last, of what it knows.
        bench.memory.map(vec![region(&ram, 0, at)]).expect("mapped");
        assert_eq!(bench.memory.channel.windows_in_words(), words);
    }

    /// A process that was killed protected them, and this one has nowhere written down which.
    #[test]
    fn nobody_waits_for_a_page_when_all_were_let_go() {
        let bench = Bench::new();
        let ram = bench.file("ram", 100);
        let at = mapped(&ram, None);
        assert!(bench.memory.is_untold());
        bench.memory.map(vec![region(&ram, 0, at)]).expect("mapped");
        assert!(!bench.memory.is_untold());
        bench.retain(&[3, 9]);
        bench.memory.channel.note_protected(&[PageId(3)], false);
        // Nobody answers any more.
        bench.area.is_full.store(true, Ordering::SeqCst);
        bench.memory.let_all_go();
        // In a thread of its own: a page that is not let go has it wait for ever.
        let (over, is_over) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            [3, 9].into_iter().for_each(|page| write(at, page));
            let _ = over.send(());
        });
        is_over.recv_timeout(Duration::from_secs(20)).expect("the guest waits");
        assert_eq!(bench.memory.channel.protected_among(&(0..PAGES as u32)), []);
    }

    #[test]
    fn a_connection_that_ends_leaves_everything_as_it_is() {
        let bench = Bench::new();
        let ram = bench.file("ram", 100);
        let at = mapped(&ram, None);
        let device = Told::of(&bench.memory);
        device.goes_by(&bench.memory.map(vec![region(&ram, 0, at)]).expect("mapped"));
        bench.retain(&[3]);
        drop(device);
        // The next one is told piece by piece.
        let half = || RegionDescriptor { size: BYTES / 2, ..region(&ram, 0, at) };
        let device = Told::of(&bench.memory);
        device.goes_by(&bench.memory.map(vec![half()]).expect("mapped"));
        assert_eq!(bench.kept(), []);
        write(at, 3);
        assert_eq!(bench.kept(), [(3, 103)]);
    }
}
