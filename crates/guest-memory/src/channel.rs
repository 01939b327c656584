//! The channel to the VMM's page tables: which addresses of the VMM pages have, which are protected, ranges coalesced. It knows numbers of
//! pages, and nothing of the memory that they are of.

use crate::error::Error;
use crate::slice::{PAGE_BYTES, PageId};
use crate::userfault::UserFault;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

/// Who keeps the content of a retained page when it is about to change: the VM's journal area.
pub trait CopyOnWrite: Send + Sync {
    /// Copies the committed content of `page` out if it is retained, and lets the page go ([`crate::VmMemory::unprotect`]),
    /// retained or not. With true the page may be written. False when there is no memory to copy to: the page is let go when
    /// there is, and must not be written before.
    #[must_use]
    fn copy_out(&self, page: PageId) -> bool;

    /// Tries the pages again for which there was no memory: somebody else may have made room.
    fn try_again(&self) {}

    /// Returns when whoever has asked before whether pages can be protected ([`crate::VmMemory::protection`]) has done what he wanted to do then.
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
    pub(crate) userfault: OnceLock<Arc<UserFault>>,
    windows: RwLock<Windows>,
    /// The VMM has said where it has memory, whatever became of that.
    pub(crate) is_told: AtomicBool,
    /// Or an earlier process knew it, and that is so still.
    is_adopted: AtomicBool,
    /// One bit a page.
    protected: Mutex<Vec<u64>>,
    pub(crate) calls: AtomicU64,
    /// Nanoseconds that the calls took.
    pub(crate) calls_ns: AtomicU64,
    #[cfg(feature = "simulate")]
    pub(crate) simulated: OnceLock<std::sync::Mutex<std::collections::BTreeSet<u32>>>,
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

    /// From now on pages are protected through this descriptor. Who calls has faults answered.
    pub(crate) fn open(&self, userfault: &Arc<UserFault>) -> Result<(), Error> {
        let is_told = self.is_told.load(Ordering::Acquire);
        let mut windows = self.windows.write().expect("no panic under this lock");
        let mut failed = None;
        let known = windows.list.len();
        windows.list.retain(|window| {
            let registered = register(userfault, window);
            let stays = registered.is_ok() || is_told;
            // Where an earlier process knew it nothing is mapped any more.
            failed = failed.take().or(registered.err().filter(|_| is_told));
            stays
        });
        failed.map_or(Ok(()), Err)?;
        self.is_adopted.store(known > 0 && windows.list.len() == known, Ordering::Release);
        if self.userfault.set(Arc::clone(userfault)).is_err() {
            return Err(Error::system(
                "the VMM handed over a second userfaultfd",
                std::io::Error::from_raw_os_error(libc::EEXIST),
            ));
        }
        Ok(())
    }

    /// Learns where the VMM has a part of a backing file, whose pages begin with this number: for the first time, or again. It may have unmapped what was known to be at
    /// these addresses, or these pages themselves, and mapped them anew, without protection.
    ///
    /// Whoever calls does what follows from it before the VMM is answered.
    pub(crate) fn learn(&self, file_first_page: u32, file_offset: u64, size: u64, user_addr: u64) -> Learned {
        self.is_told.store(true, Ordering::Release);
        let page_bytes = PAGE_BYTES as u64;
        let first = file_offset / page_bytes;
        let last = (file_offset + size).div_ceil(page_bytes);
        let window = Window {
            first_page: file_first_page + first as u32,
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

    pub(crate) fn let_all_go(&self) {
        let Some(userfault) = self.userfault.get() else { return };
        for window in &self.windows.read().expect("no panic under this lock").list {
            let bytes = u64::from(window.page_count) * PAGE_BYTES as u64;
            // Some kernels leave what is protected so when it is not registered any more.
            let _ = userfault.write_protect(window.user_addr, bytes, false);
            userfault.unregister(window.user_addr, bytes);
        }
        self.protected.lock().expect("no panic under this lock").clear();
    }

    pub(crate) fn is_untold(&self) -> bool {
        let is_known = self.is_told.load(Ordering::Acquire) || self.is_adopted.load(Ordering::Acquire);
        self.userfault.get().is_some() && !is_known
    }

    /// A fault that an earlier daemon had read is not told again: wakes everybody, so that they fault anew.
    pub(crate) fn wake_all(&self, userfault: &UserFault) {
        let windows = self.windows.read().expect("no panic under this lock");
        for window in &windows.list {
            let _ = userfault.wake(window.user_addr, u64::from(window.page_count) * PAGE_BYTES as u64);
        }
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

    pub(crate) fn note_protected(&self, pages: &[PageId], protect: bool) {
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

    pub(crate) fn page_at(&self, user_addr: u64) -> Option<PageId> {
        let windows = self.windows.read().expect("no panic under this lock");
        let window = windows.list.iter().find(|window| window.addresses().contains(&user_addr))?;
        Some(PageId(window.first_page + ((user_addr - window.user_addr) / PAGE_BYTES as u64) as u32))
    }

    /// Applies `protect` to `pages` (sorted, without repeats), wherever the VMM has them, in as few calls as there are runs. Returns that
    /// number.
    pub(crate) fn apply(&self, pages: &[PageId], protect: bool) -> std::io::Result<u64> {
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
