//! Protection of guest pages: which addresses of the VMM they have, ranges coalesced, faults answered.
//!
//! The thread that answers faults takes no ring lock and waits for no I/O that needs the guest: it only calls
//! [`CopyOnWrite::copy_out`], which copies a page and lets it go.

use crate::error::Error;
use crate::map::{RamFile, VmMemory};
use crate::slice::{PAGE_BYTES, PageId};
use crate::userfault::UserFault;
use rustix::event::{PollFd, PollFlags, poll};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};

/// Who keeps the content of a retained page when it is about to change: the VM's journal area.
pub trait CopyOnWrite: Send + Sync {
    /// Copies the committed content of `page` out if it is retained, and lets the page go ([`VmMemory::unprotect`]),
    /// retained or not. With true the page may be written. False when there is no memory to copy to: the page is let go when
    /// there is, and must not be written before.
    #[must_use]
    fn copy_out(&self, page: PageId) -> bool;

    /// Tries the pages again for which there was no memory: somebody else may have made room.
    fn try_again(&self) {}

    /// Returns when whoever has asked before whether pages can be protected ([`VmMemory::protection`]) has done what he wanted to do then.
    fn finish(&self) {}
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    first_page: u32,
    page_count: u32,
    user_addr: u64,
    /// No device is told of it any more: the VMM may have unmapped it, or will.
    is_left: bool,
}

impl Window {
    pub(crate) fn pages(&self) -> Range<u32> {
        self.first_page..self.first_page + self.page_count
    }

    fn addresses(&self) -> Range<u64> {
        self.user_addr..self.user_addr + u64::from(self.page_count) * PAGE_BYTES as u64
    }

    fn address_of(&self, page: u32) -> u64 {
        self.user_addr + u64::from(page - self.first_page) * PAGE_BYTES as u64
    }

    /// Whether a page of both has one address.
    fn is_in_step_with(&self, other: &Window) -> bool {
        let origin = |window: &Window| {
            window.user_addr.wrapping_sub(u64::from(window.first_page).wrapping_mul(PAGE_BYTES as u64))
        };
        origin(self) == origin(other)
    }

    /// The part of it that has these pages of its own.
    fn part(&self, pages: Range<u32>) -> Window {
        Window {
            first_page: pages.start,
            page_count: pages.end - pages.start,
            user_addr: self.address_of(pages.start),
            is_left: self.is_left,
        }
    }

    /// The pages of it that are at addresses of another one.
    fn pages_below(&self, other: &Window) -> Range<u32> {
        let (mine, others) = (self.addresses(), other.addresses());
        let (start, end) = (mine.start.max(others.start), mine.end.min(others.end));
        if start >= end {
            return self.first_page..self.first_page;
        }
        let page = |address: u64| self.first_page + ((address - self.user_addr) / PAGE_BYTES as u64) as u32;
        page(start)..page(end)
    }
}

fn overlap(one: &Range<u32>, other: &Range<u32>) -> Range<u32> {
    one.start.max(other.start)..one.end.min(other.end)
}

/// What is kept of windows, in bytes: more than 128 regions need. Beyond it nothing is.
pub(crate) const WINDOWS_BYTES_MAX: usize = 16 << 10;

/// Where the VMM has memory, and what follows from what was heard of it.
#[derive(Debug, Default)]
pub(crate) struct Learned {
    /// Here it is: what is protected has to be so here, too.
    pub(crate) window: Option<Window>,
    /// Pages that are somewhere else now, or nowhere, or where they cannot be protected: they have to be copied out.
    pub(crate) given_up: Vec<Range<u32>>,
}

#[derive(Debug, Default)]
struct Windows {
    /// Sorted by page. No two have an address in common, but for those in which it is the same page's.
    list: Vec<Window>,
    refused: Option<String>,
}

impl Windows {
    /// Makes room for a window at its addresses: what was known to be there is not any more. A page that is elsewhere, too, can be
    /// written to at both places, unless the older one is left. Gives the pages that are to be copied out, and windows that are gone.
    fn make_room(&mut self, window: &Window) -> (Vec<Range<u32>>, Vec<Window>) {
        let mut given_up = Vec::new();
        let mut gone = Vec::new();
        let mut list = Vec::with_capacity(self.list.len() + 2);
        for known in std::mem::take(&mut self.list) {
            if known.is_in_step_with(window) {
                list.push(known);
                continue;
            }
            let below = known.pages_below(window);
            let elsewhere = overlap(&known.pages(), &window.pages());
            let parts = if below.is_empty() {
                vec![known.pages()]
            } else {
                vec![known.first_page..below.start, below.end..known.pages().end]
            };
            for part in parts.into_iter().filter(|part| !part.is_empty()) {
                if overlap(&part, &elsewhere).is_empty() {
                    list.push(known.part(part));
                } else if known.is_left {
                    gone.push(known.part(part));
                } else {
                    let reason = "the VMM maps the same guest memory at two addresses".to_owned();
                    self.refused.get_or_insert(reason);
                    list.push(known.part(part));
                }
            }
            given_up.extend([below, elsewhere].into_iter().filter(|pages| !pages.is_empty()));
        }
        self.list = list;
        (given_up, gone)
    }

    fn push(&mut self, window: Window) {
        self.list.push(window);
        self.list.sort_by_key(|window| window.first_page);
    }
}

/// The channel to the VMM's page tables.
#[derive(Debug, Default)]
pub(crate) struct ProtectionChannel {
    userfault: OnceLock<Arc<UserFault>>,
    windows: RwLock<Windows>,
    /// The VMM has said where it has memory, whatever became of that.
    is_told: AtomicBool,
    /// Or an earlier process knew it, and that is so still.
    is_adopted: AtomicBool,
    /// One bit a page.
    protected: Mutex<Vec<u64>>,
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
            let is_told = self.is_told.load(Ordering::Acquire);
            let mut windows = self.windows.write().expect("no panic under this lock");
            let mut failed = None;
            let known = windows.list.len();
            windows.list.retain(|window| {
                let registered = register(&userfault, window);
                let stays = registered.is_ok() || is_told;
                // Where an earlier process knew it nothing is mapped any more.
                failed = failed.take().or(registered.err().filter(|_| is_told));
                stays
            });
            failed.map_or(Ok(()), Err)?;
            self.is_adopted.store(known > 0 && windows.list.len() == known, Ordering::Release);
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

    /// Learns where the VMM has a part of a backing file: for the first time, or again. It may have unmapped what was known to be at
    /// these addresses, or these pages themselves, and mapped them anew, without protection.
    ///
    /// Whoever calls does what follows from it before the VMM is answered.
    pub(crate) fn learn(&self, file: &RamFile, file_offset: u64, size: u64, user_addr: u64) -> Learned {
        self.is_told.store(true, Ordering::Release);
        let page_bytes = PAGE_BYTES as u64;
        let first = file_offset / page_bytes;
        let last = (file_offset + size).div_ceil(page_bytes);
        let window = Window {
            first_page: file.first_page + first as u32,
            page_count: (last - first) as u32,
            user_addr: user_addr - user_addr % page_bytes,
            is_left: false,
        };
        if user_addr % page_bytes != file_offset % page_bytes {
            self.refuse("the VMM maps guest memory out of step with its file's pages".to_owned());
            return Learned { window: None, given_up: vec![window.pages()] };
        }
        let mut windows = self.windows.write().expect("no panic under this lock");
        let (mut given_up, gone) = windows.make_room(&window);
        if let Some(userfault) = self.userfault.get() {
            for window in gone {
                userfault.unregister(window.user_addr, u64::from(window.page_count) * PAGE_BYTES as u64);
            }
        }
        let mut is_known = false;
        for known in windows.list.iter_mut().filter(|known| known.is_in_step_with(&window)) {
            let shared = overlap(&known.pages(), &window.pages());
            known.is_left &= shared.is_empty();
            is_known |= shared == window.pages();
        }
        if let Some(userfault) = self.userfault.get()
            && let Err(error) = register(userfault, &window)
            // Of a VMM that is gone nothing is to be learned.
            && !userfault.is_over()
        {
            log::warn!("{error}; journal blocks of this VM are copied instead of protected");
            windows.refused.get_or_insert(error.to_string());
            given_up.push(window.pages());
            return Learned { window: None, given_up };
        }
        if !is_known {
            windows.push(window);
        }
        if let Some(userfault) = self.userfault.get() {
            // A fault that another process had read, or this one before it knew these addresses, is not told again.
            let _ = userfault.wake(window.user_addr, u64::from(window.page_count) * PAGE_BYTES as u64);
        }
        Learned { window: Some(window), given_up }
    }

    /// Where the VMM has memory, for a process that goes on with it before any device is told: a line for each window, its first page, their
    /// number, the address.
    pub(crate) fn windows_in_words(&self) -> String {
        let windows = self.windows.read().expect("no panic under this lock");
        let line = |window: &Window| format!("{} {} {:x}\n", window.first_page, window.page_count, window.user_addr);
        windows.list.iter().map(line).collect()
    }

    /// Takes up what an earlier process knew ([`ProtectionChannel::windows_in_words`]), of the `pages` that there are. Nothing of it if it is not
    /// understood.
    pub(crate) fn adopt_windows(&self, words: &str, pages: u32) {
        let understood = |line: &str| {
            let mut words = line.split(' ');
            let mut next = || words.next();
            let (first_page, page_count) = (next()?.parse::<u32>().ok()?, next()?.parse::<u32>().ok()?);
            let user_addr = u64::from_str_radix(next()?, 16).ok()?;
            // What no device is told of yet makes room for what it is told of.
            let is_left = true;
            let bytes = u64::from(page_count) * PAGE_BYTES as u64;
            let is_possible = page_count > 0
                && first_page.checked_add(page_count)? <= pages
                && user_addr % PAGE_BYTES as u64 == 0
                && user_addr.checked_add(bytes).is_some();
            is_possible.then_some(Window { first_page, page_count, user_addr, is_left })
        };
        if words.len() > WINDOWS_BYTES_MAX {
            return;
        }
        let Some(list) = words.lines().map(understood).collect::<Option<Vec<_>>>() else { return };
        let mut windows = self.windows.write().expect("no panic under this lock");
        for window in list {
            let is_free = windows.list.iter().all(|known| {
                known.is_in_step_with(&window)
                    || known.pages_below(&window).is_empty() && overlap(&known.pages(), &window.pages()).is_empty()
            });
            if is_free {
                windows.push(window);
            }
        }
    }

    /// No device is told of these pages any more.
    pub(crate) fn leave(&self, pages: &Range<u32>) {
        let mut windows = self.windows.write().expect("no panic under this lock");
        for window in &mut windows.list {
            window.is_left |= pages.start <= window.first_page && window.pages().end <= pages.end;
        }
    }

    /// Protects pages (sorted) of one window that are protected elsewhere, or were. One too many costs a fault.
    pub(crate) fn protect_in(&self, window: &Window, pages: &[PageId]) -> std::io::Result<()> {
        let Some(userfault) = self.userfault.get() else { return Ok(()) };
        for run in runs(pages) {
            userfault.write_protect(window.address_of(run[0].0), (run.len() * PAGE_BYTES) as u64, true)?;
        }
        Ok(())
    }

    fn let_all_go(&self) {
        let Some(userfault) = self.userfault.get() else { return };
        for window in &self.windows.read().expect("no panic under this lock").list {
            let bytes = u64::from(window.page_count) * PAGE_BYTES as u64;
            // Some kernels leave what is protected so when it is not registered any more.
            let _ = userfault.write_protect(window.user_addr, bytes, false);
            userfault.unregister(window.user_addr, bytes);
        }
        self.protected.lock().expect("no panic under this lock").clear();
    }

    fn is_untold(&self) -> bool {
        let is_known = self.is_told.load(Ordering::Acquire) || self.is_adopted.load(Ordering::Acquire);
        self.userfault.get().is_some() && !is_known
    }

    /// Those of these pages that are protected, sorted.
    pub(crate) fn protected_among(&self, pages: &Range<u32>) -> Vec<PageId> {
        let protected = self.protected.lock().expect("no panic under this lock");
        let mut found = Vec::new();
        for index in pages.start / 64..pages.end.div_ceil(64) {
            let mut left = protected.get(index as usize).copied().unwrap_or_default();
            while left != 0 {
                let page = index * 64 + left.trailing_zeros();
                left &= left - 1;
                if pages.contains(&page) {
                    found.push(PageId(page));
                }
            }
        }
        found
    }

    fn note_protected(&self, pages: &[PageId], protect: bool) {
        let mut protected = self.protected.lock().expect("no panic under this lock");
        for page in pages {
            let (word, bit) = (page.0 as usize / 64, 1 << (page.0 % 64));
            if word >= protected.len() {
                protected.resize(word + 1, 0);
            }
            if protect {
                protected[word] |= bit;
            } else {
                protected[word] &= !bit;
            }
        }
    }

    fn page_at(&self, user_addr: u64) -> Option<PageId> {
        let windows = self.windows.read().expect("no panic under this lock");
        let window = windows.list.iter().find(|window| window.addresses().contains(&user_addr))?;
        Some(PageId(window.first_page + ((user_addr - window.user_addr) / PAGE_BYTES as u64) as u32))
    }

    /// Applies `protect` to `pages` (sorted, without repeats), wherever the VMM has them, in as few calls as there are runs. Returns that
    /// number.
    fn apply(&self, pages: &[PageId], protect: bool) -> std::io::Result<u64> {
        self.note_protected(pages, protect);
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
        let is_somewhere = |page: &PageId| windows.list.iter().any(|window| window.pages().contains(&page.0));
        if protect && !pages.iter().all(is_somewhere) {
            return Err(std::io::Error::from_raw_os_error(libc::EFAULT));
        }
        #[cfg(feature = "simulate")]
        simulated_delay::wait();
        let began = std::time::Instant::now();
        let mut calls = 0;
        for window in &windows.list {
            let at = |page: u32| pages.partition_point(|other| other.0 < page);
            for run in runs(&pages[at(window.first_page)..at(window.pages().end)]) {
                let start = window.address_of(run[0].0);
                match userfault.write_protect(start, (run.len() * PAGE_BYTES) as u64, protect) {
                    // The VMM has unmapped it, so nobody waits there.
                    Err(error) if !protect && error.raw_os_error() == Some(libc::ENOENT) => {}
                    result => result?,
                }
                calls += 1;
            }
        }
        self.calls.fetch_add(calls, Ordering::Relaxed);
        self.calls_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(calls)
    }
}

/// The runs of pages (sorted, without repeats) that follow one another.
fn runs(pages: &[PageId]) -> impl Iterator<Item = &[PageId]> {
    pages.chunk_by(|one, next| one.0 + 1 == next.0)
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

/// For simulations: calls to protect pages, and to let them go, that take longer, so that what happens meanwhile does happen.
#[cfg(feature = "simulate")]
pub mod simulated_delay {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    static MICROSECONDS: AtomicU64 = AtomicU64::new(0);

    /// From now on every call of this process takes so much longer, at least.
    pub fn set(delay: Duration) {
        MICROSECONDS.store(delay.as_micros() as u64, Ordering::Relaxed);
    }

    pub(super) fn wait() {
        let delay = MICROSECONDS.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
    }
}

/// So often whoever waits for memory is thought of again, at least.
const TRIED_EVERY: std::time::Duration = std::time::Duration::from_millis(200);

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
    use crate::map::{RegionDescriptor, Told};
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::fs::FileExt;
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
