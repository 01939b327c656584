//! Protection of guest pages: which addresses of the VMM they have, ranges coalesced, faults answered.
//!
//! The thread that answers faults takes no ring lock and waits for no I/O that needs the guest: it only calls
//! [`CopyOnWrite::copy_out`], which copies a page and lets it go.

use crate::error::Error;
use crate::map::{RamFile, VmMemory};
use crate::slice::{PAGE_BYTES, PageId};
use crate::userfault::UserFault;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLock, Weak};

/// Who keeps the content of a retained page when it is about to change: the VM's journal area.
pub trait CopyOnWrite: Send + Sync {
    /// Copies the committed content of `page` out if it is retained, and lets the page go ([`VmMemory::unprotect`]),
    /// retained or not. With true the page may be written. False when there is no memory to copy to: the page is let go when
    /// there is, and must not be written before.
    #[must_use]
    fn copy_out(&self, page: PageId) -> bool;

    /// Tries the pages again for which there was no memory: somebody else may have made room.
    fn try_again(&self) {}
}

/// Whether pages can be protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protection {
    /// They can.
    Available,
    /// They cannot, for this reason: everything has to be copied.
    Unavailable(String),
}

/// A run of pages and where the VMM has it.
#[derive(Clone, Copy, Debug)]
struct Window {
    first_page: u32,
    page_count: u32,
    user_addr: u64,
}

#[derive(Debug, Default)]
struct Windows {
    /// Sorted by page.
    list: Vec<Window>,
    refused: Option<String>,
}

/// The channel to the VMM's page tables.
#[derive(Debug, Default)]
pub(crate) struct ProtectionChannel {
    userfault: OnceLock<Arc<UserFault>>,
    windows: RwLock<Windows>,
    calls: AtomicU64,
    /// Nanoseconds that the calls took.
    calls_ns: AtomicU64,
    #[cfg(feature = "simulate")]
    simulated: OnceLock<std::sync::Mutex<std::collections::BTreeSet<u32>>>,
}

impl ProtectionChannel {
    pub(crate) fn state(&self) -> Protection {
        #[cfg(feature = "simulate")]
        if self.simulated.get().is_some() {
            return match &self.windows.read().expect("no panic under this lock").refused {
                Some(reason) => Protection::Unavailable(reason.clone()),
                None => Protection::Available,
            };
        }
        match &self.windows.read().expect("no panic under this lock").refused {
            Some(reason) => Protection::Unavailable(reason.clone()),
            None if self.userfault.get().is_none() => {
                Protection::Unavailable("the VMM has not handed over a userfaultfd".to_owned())
            }
            None => Protection::Available,
        }
    }

    pub(crate) fn refuse(&self, reason: String) {
        self.windows.write().expect("no panic under this lock").refused.get_or_insert(reason);
    }

    /// The guest's memory has no name by which a later process could find it. Simulations keep it themselves.
    pub(crate) fn refuse_nameless(&self) {
        #[cfg(feature = "simulate")]
        if self.simulated.get().is_some() {
            return;
        }
        self.refuse(
            "the guest's memory is in a file without a name (a memfd), which nobody would find after amberlog and the VMM \
             were killed: use memory-backend-file with mem-path on a tmpfs"
                .to_owned(),
        );
    }

    pub(crate) fn open(&self, vm: &Arc<VmMemory>, userfault: UserFault) -> Result<(), Error> {
        let userfault = Arc::new(userfault);
        {
            let windows = self.windows.read().expect("no panic under this lock");
            for window in &windows.list {
                register(&userfault, window)?;
            }
            if self.userfault.set(Arc::clone(&userfault)).is_err() {
                return Err(Error::system(
                    "the VMM handed over a second userfaultfd",
                    std::io::Error::from_raw_os_error(libc::EEXIST),
                ));
            }
        }
        let vm = Arc::downgrade(vm);
        log_context::spawn(std::thread::Builder::new().name("faults".to_owned()), move || {
            answer_faults(&vm, &userfault)
        })
        .map_err(|e| Error::system("starting the thread that answers page faults", e))?;
        Ok(())
    }

    /// Learns where the VMM has a part of a backing file. A second place for the same page ends protection: a write
    /// through the other one would not fault.
    pub(crate) fn learn(&self, file: &RamFile, file_offset: u64, size: u64, user_addr: u64) -> Result<(), Error> {
        let page_bytes = PAGE_BYTES as u64;
        if user_addr % page_bytes != file_offset % page_bytes {
            self.refuse("the VMM maps guest memory out of step with its file's pages".to_owned());
            return Ok(());
        }
        let first = file_offset / page_bytes;
        let last = (file_offset + size).div_ceil(page_bytes);
        let window = Window {
            first_page: file.first_page + first as u32,
            page_count: (last - first) as u32,
            user_addr: user_addr - user_addr % page_bytes,
        };
        let mut windows = self.windows.write().expect("no panic under this lock");
        for known in &windows.list {
            let overlaps = window.first_page < known.first_page + known.page_count
                && known.first_page < window.first_page + window.page_count;
            let same_place = i64::from(window.first_page) * PAGE_BYTES as i64 - window.user_addr as i64
                == i64::from(known.first_page) * PAGE_BYTES as i64 - known.user_addr as i64;
            if overlaps && !same_place {
                windows.refused.get_or_insert("the VMM maps the same guest memory at two addresses".to_owned());
                return Ok(());
            }
            if known.first_page <= window.first_page
                && window.first_page + window.page_count <= known.first_page + known.page_count
            {
                return Ok(());
            }
        }
        if let Some(userfault) = self.userfault.get()
            && let Err(error) = register(userfault, &window)
        {
            log::warn!("{error}; journal blocks of this VM are copied instead of protected");
            windows.refused.get_or_insert(error.to_string());
            return Ok(());
        }
        if let Some(userfault) = self.userfault.get() {
            // A fault that another process had read, or this one before it knew these addresses, is not told again.
            let _ = userfault.wake(window.user_addr, u64::from(window.page_count) * PAGE_BYTES as u64);
        }
        windows.list.push(window);
        windows.list.sort_by_key(|window| window.first_page);
        Ok(())
    }

    fn page_at(&self, user_addr: u64) -> Option<PageId> {
        let windows = self.windows.read().expect("no panic under this lock");
        windows.list.iter().find_map(|window| {
            let into = user_addr.checked_sub(window.user_addr)? / PAGE_BYTES as u64;
            (into < u64::from(window.page_count)).then(|| PageId(window.first_page + into as u32))
        })
    }

    /// Applies `protect` to `pages` (sorted, without repeats) in as few calls as there are runs. Returns that number.
    fn apply(&self, pages: &[PageId], protect: bool) -> std::io::Result<u64> {
        #[cfg(feature = "simulate")]
        if let Some(simulated) = self.simulated.get() {
            let mut simulated = simulated.lock().expect("no panic under this lock");
            for page in pages {
                if protect {
                    simulated.insert(page.0);
                } else {
                    simulated.remove(&page.0);
                }
            }
            return Ok(1);
        }
        let Some(userfault) = self.userfault.get() else {
            return Err(std::io::Error::from_raw_os_error(libc::ENXIO));
        };
        let windows = self.windows.read().expect("no panic under this lock");
        if windows.list.is_empty() && !protect {
            // The VMM has ended before this process heard where it had its memory: nobody is there who could fault. And whoever
            // faults after it was told is answered then.
            return Ok(0);
        }
        let began = std::time::Instant::now();
        let mut calls = 0;
        let mut rest = pages;
        while let Some(first) = rest.first() {
            let window = windows
                .list
                .iter()
                .find(|window| first.0 >= window.first_page && first.0 - window.first_page < window.page_count)
                .ok_or_else(|| std::io::Error::from_raw_os_error(libc::EFAULT))?;
            let end = window.first_page + window.page_count;
            let run = rest
                .iter()
                .enumerate()
                .take_while(|(index, page)| page.0 == first.0 + *index as u32 && page.0 < end)
                .count();
            let start = window.user_addr + u64::from(first.0 - window.first_page) * PAGE_BYTES as u64;
            userfault.write_protect(start, (run * PAGE_BYTES) as u64, protect)?;
            calls += 1;
            rest = &rest[run..];
        }
        self.calls.fetch_add(calls, Ordering::Relaxed);
        self.calls_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(calls)
    }
}

fn register(userfault: &UserFault, window: &Window) -> Result<(), Error> {
    userfault.register(window.user_addr, u64::from(window.page_count) * PAGE_BYTES as u64).map_err(|e| {
        Error::system(
            format!(
                "registering {} pages of the VMM at {:#x} for write protection",
                window.page_count, window.user_addr
            ),
            e,
        )
    })
}

impl VmMemory {
    /// Protects `pages` (sorted, without repeats): from the return on, a write by the guest or the VMM waits until
    /// [`CopyOnWrite::copy_out`] has let the page go. All or nothing. Returns the number of calls it took.
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

/// Answers faults until the VM's memory is dropped.
fn answer_faults(vm: &Weak<VmMemory>, userfault: &UserFault) {
    // A fault that an earlier daemon had read is not told again: wake everybody, so that they fault anew.
    if let Some(vm) = vm.upgrade() {
        let windows = vm.channel.windows.read().expect("no panic under this lock");
        for window in &windows.list {
            let _ = userfault.wake(window.user_addr, u64::from(window.page_count) * PAGE_BYTES as u64);
        }
    }
    let mut addresses = Vec::with_capacity(64);
    loop {
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
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
        if !revents.contains(PollFlags::IN) {
            if revents.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
                return;
            }
            if let Some(handler) = vm.copy_on_write() {
                handler.try_again();
            }
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
                if vm.channel.windows.read().expect("no panic under this lock").list.is_empty() {
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
