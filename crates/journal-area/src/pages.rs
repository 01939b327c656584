//! What is known of guest pages, over all logs of a VM: which are protected, which of those nobody needs any more, which
//! somebody waits for, and which are hot.
//!
//! Each log has a lock of its own, so several use this at a time, and a guest may bring one page into two journals at once. All that has
//! to be one step is under one mutex (`books`), which is taken under at most one log's lock, and under which nothing else of the area is:
//!
//! * A page is *claimed*: found to be neither excluded nor retained, and marked as retained ([`Pages::retain`]). So it is in one log.
//! * A page is *let go*: found not to be retained, unprotected, and nobody waits for it any more ([`Pages::let_loose_go`],
//!   [`Pages::let_go`]). The unprotecting call is under the mutex, too.
//! * Somebody *waits for it*: found to be retained, and noted ([`Pages::starve`]). So whoever releases it later lets it go, and no fault is lost.
//!
//! Protecting, which takes longest, is not under the mutex: other logs protect, and faults are answered, beside it. That is right because
//! a page's protection changes in two places only, and never in both at a time:
//!
//! 1. Who protects has claimed the page before. From the claim until the page is released it counts as retained, so nobody else claims it, and so
//!    there are no two calls to protect it.
//! 2. Who unprotects holds the mutex from finding it not retained until the call has returned. A call that began before the claim has
//!    ended when the claim is made; after the claim none begins.
//! 3. Only the log that claimed it releases it, under its own lock, which it holds from the claim until its table names the page (or until
//!    it was given up because the kernel refused).
//! 4. What a claim finds protected already stays so for the same reason, and needs no call.
//!
//! So when [`Pages::retain`] returns, each page that it did not refuse is protected, and stays so until its log releases it. A fault in between
//! finds the page retained and in no log's table yet: whoever answers it waits for the log's lock (`faults`).

use guest_memory::{MemorySlice, PageId, Protection, VmMemory};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

/// Released pages are let go together once there are this many of them (or as soon as one of them is written to).
const LOOSE_PAGES_MAX: usize = 1024;
/// Entries of the hot-page table; pages share an entry when their numbers agree modulo this.
const HOT_ENTRIES: usize = 1 << 14;
/// From this score on a page is copied at commit. One fault makes a page hot: a fault costs some ten copies.
const HOT_FROM: u8 = 2;
const HOT_FAULT: u8 = 3;
const HOT_MAX: u8 = 12;

/// So many pages about one that was written to are copied out with it.
const AROUND_PAGES: u32 = 64;

/// So many bytes of zeros at a block's end are taken for what is behind the end of a file.
const ZERO_BYTES: usize = 8;

/// Which blocks are copied when they are committed, though they could stay in the guest's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HotPages {
    /// None.
    Never,
    /// Those in pages that were written to, not long ago, while they were retained.
    Faulted,
    /// These, and those that end in zeros, as the last block of a file does: before a guest writes such a block home it clears what is
    /// behind the file's end once more (Linux: `ext4_bio_write_folio`, before that `block_write_full_page`). A file has one such
    /// block, so of a tree of small files it is every second or third one. Tables of inodes that are not full end so too, and are
    /// written to again anyway.
    Foreseen,
    /// These, and those with few neighbours among the blocks that are committed with them, as long as copies are allowed
    /// (`lone`). And with a page that is written to while it is retained, what is retained in the pages around it is copied.
    #[default]
    Lone,
}

/// The pages of one VM.
pub struct Pages {
    memory: Arc<VmMemory>,
    /// Scores. They only choose what is cheaper, so that it does not matter when one is counted late.
    hot: Box<[AtomicU8]>,
    protection_said: AtomicBool,
    books: Mutex<Books>,
}

/// What changes in steps: see the module.
#[derive(Default)]
struct Books {
    /// One bit a page: protected in the VMM's page tables, retained or loose.
    protected: Vec<u64>,
    /// Protected, but no longer retained: the paper's clean protected buffers. Some may be retained again, or not be protected any more.
    loose: Vec<PageId>,
    /// Somebody wants to write to them, and there was no memory to copy them to. Those that are not retained any more are let go the next time
    /// somebody looks.
    starved: Vec<PageId>,
    /// Pages of rings, which are written by us past the protection and so are never retained.
    excluded: HashSet<PageId>,
    rule: HotPages,
}

impl Books {
    fn is_protected(&self, page: PageId) -> bool {
        self.protected.get(page.0 as usize / 64).is_some_and(|word| word & (1 << (page.0 % 64)) != 0)
    }

    fn set_protected(&mut self, page: PageId, is_protected: bool) {
        let (index, bit) = (page.0 as usize / 64, 1 << (page.0 % 64));
        if index >= self.protected.len() {
            self.protected.resize(index + 1, 0);
        }
        if is_protected {
            self.protected[index] |= bit;
        } else {
            self.protected[index] &= !bit;
        }
    }
}

/// What became of pages that were to be retained.
#[derive(Debug, Default)]
pub struct Retained {
    /// These are not: rings have them by now, or another log has, or the kernel has refused.
    pub refused: HashSet<PageId>,
    /// Calls that it took to protect the others.
    pub calls: u64,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages").finish_non_exhaustive()
    }
}

impl Pages {
    pub fn new(memory: Arc<VmMemory>) -> Self {
        Pages {
            memory,
            hot: (0..HOT_ENTRIES).map(|_| AtomicU8::new(0)).collect(),
            protection_said: AtomicBool::new(false),
            books: Mutex::default(),
        }
    }

    pub fn memory(&self) -> &Arc<VmMemory> {
        &self.memory
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no panic under the pages' lock")
    }

    /// Names the pages that must never be retained. Those that are already have to be copied out by whoever calls; one that is being
    /// retained at this moment is among them, as it is marked already.
    pub fn set_excluded(&self, pages: HashSet<PageId>) {
        self.books().excluded = pages;
    }

    /// Whether pages of this VM can be protected; the first "no" is said to the log.
    pub fn can_protect(&self) -> bool {
        match self.memory.protection() {
            Protection::Available => true,
            Protection::Unavailable(reason) => {
                if !self.protection_said.swap(true, Ordering::Relaxed) {
                    log::warn!("journal blocks are copied, not protected in the guest's memory: {reason}");
                }
                false
            }
        }
    }

    /// Chooses what is copied from now on.
    pub fn set_rule(&self, rule: HotPages) {
        self.books().rule = rule;
    }

    pub fn rule(&self) -> HotPages {
        self.books().rule
    }

    /// Whether the page of a block is worth retaining rather than copying, as far as can be said before it is tried.
    pub fn should_retain(&self, block: &MemorySlice, rule: HotPages) -> bool {
        let page = block.page();
        if self.memory.is_retained(page) {
            return false;
        }
        match rule {
            HotPages::Never => true,
            HotPages::Faulted => !self.is_hot(page),
            HotPages::Foreseen | HotPages::Lone => !self.is_hot(page) && !ends_in_zeros(block),
        }
    }

    fn score(&self, page: PageId) -> &AtomicU8 {
        &self.hot[page.0 as usize % HOT_ENTRIES]
    }

    fn is_hot(&self, page: PageId) -> bool {
        self.score(page).load(Ordering::Relaxed) >= HOT_FROM
    }

    /// The page was written to while it was retained: copying it at commit would have been cheaper.
    pub fn heat(&self, page: PageId) {
        let score = self.score(page);
        score.store(score.load(Ordering::Relaxed).saturating_add(HOT_FAULT).min(HOT_MAX), Ordering::Relaxed);
    }

    /// Whether pages are copied out with one that was written to. Not while somebody waits for memory.
    pub fn copies_around(&self) -> bool {
        let books = self.books();
        books.rule == HotPages::Lone && books.starved.is_empty()
    }

    /// These.
    pub fn around(page: PageId) -> impl Iterator<Item = PageId> {
        let first = page.0 / AROUND_PAGES * AROUND_PAGES;
        (first..first + AROUND_PAGES).filter(move |neighbour| *neighbour != page.0).map(PageId)
    }

    /// The page went home as it was committed: retaining it would have been cheaper.
    pub fn cool(&self, page: PageId) {
        let score = self.score(page);
        score.store(score.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
    }

    /// Retains pages (any order, without repeats) for the log whose lock is held, but for those that cannot be. The others are protected on
    /// return, and no write to them goes unnoticed from then on.
    pub fn retain(&self, wanted: &[PageId]) -> Retained {
        let mut retained = Retained::default();
        if wanted.is_empty() {
            return retained;
        }
        let mut claimed: Vec<PageId> = Vec::with_capacity(wanted.len());
        let mut fresh: Vec<PageId> = Vec::with_capacity(wanted.len());
        {
            let books = self.books();
            for page in wanted {
                if books.excluded.contains(page) || !self.memory.try_retain(*page) {
                    retained.refused.insert(*page);
                    continue;
                }
                claimed.push(*page);
                if !books.is_protected(*page) {
                    fresh.push(*page);
                }
            }
        }
        fresh.sort_unstable();
        // Not under the mutex; see the module for why that is right.
        match self.memory.protect(&fresh) {
            Ok(calls) => {
                let mut books = self.books();
                fresh.iter().for_each(|page| books.set_protected(*page, true));
                retained.calls = calls;
            }
            Err(error) => {
                log::error!("protecting {} guest pages failed: {error}; they are copied instead", fresh.len());
                let mut books = self.books();
                for page in claimed {
                    self.memory.set_retained(page, false);
                    // Those that were protected before are loose again.
                    if books.is_protected(page) {
                        books.loose.push(page);
                    }
                    retained.refused.insert(page);
                }
            }
        }
        retained
    }

    /// These are retained, and protected, since an earlier process. False, and nothing is changed, where one of them is retained by another
    /// log.
    pub fn adopt(&self, pages: &[PageId]) -> bool {
        let mut books = self.books();
        if pages.iter().any(|page| self.memory.is_retained(*page)) {
            return false;
        }
        for page in pages {
            self.memory.set_retained(*page, true);
            books.set_protected(*page, true);
        }
        self.memory.adopt_protected(pages);
        true
    }

    /// A retained page is no longer needed by its log, whose lock is held: it stays protected until it is let go. `loose` is to be given to
    /// [`Pages::add_loose`] by and by; only how soon a page is let go that nobody writes to depends on it.
    ///
    /// Not under the mutex. Whoever finds the page retained a moment before, under it, and notes that somebody waits, is seen by whoever looks for
    /// those afterwards, under it: he is told when memory may have become free.
    pub fn release(&self, page: PageId, loose: &mut Vec<PageId>) {
        self.memory.set_retained(page, false);
        loose.push(page);
    }

    /// Pages that were released.
    pub fn add_loose(&self, pages: Vec<PageId>) {
        if !pages.is_empty() {
            self.books().loose.extend_from_slice(&pages);
        }
    }

    /// Lets loose pages go if there are enough of them to be worth a call.
    pub fn let_many_loose_go(&self) {
        let mut books = self.books();
        if books.loose.len() >= LOOSE_PAGES_MAX {
            self.let_all_loose_go(&mut books);
        }
    }

    /// Unprotects every page that is protected and not retained, in as few calls as possible (the paper's batch
    /// unprotection, figure 3).
    pub fn let_loose_go(&self) {
        self.let_all_loose_go(&mut self.books());
    }

    fn let_all_loose_go(&self, books: &mut Books) {
        let mut pages = std::mem::take(&mut books.loose);
        pages.sort_unstable();
        pages.dedup();
        pages.retain(|page| {
            let retained = self.memory.is_retained(*page);
            books.is_protected(*page) && !retained
        });
        if !pages.is_empty() {
            self.memory.unprotect(&pages);
            pages.iter().for_each(|page| books.set_protected(*page, false));
        }
        pages.clear();
        books.loose = pages;
    }

    /// Unprotects one page at once and wakes who waits for it, unless it is retained: false then. With it go those of `around` that are protected
    /// and not retained, and with `all_loose` all others of that kind.
    pub fn let_go(&self, page: PageId, around: &[PageId], all_loose: bool) -> bool {
        let mut books = self.books();
        if self.memory.is_retained(page) {
            return false;
        }
        if all_loose {
            self.let_all_loose_go(&mut books);
        }
        let is_free = |other: &PageId| books.is_protected(*other) && !self.memory.is_retained(*other);
        let mut pages: Vec<PageId> = around.iter().copied().filter(is_free).chain([page]).collect();
        pages.sort_unstable();
        pages.dedup();
        self.memory.unprotect(&pages);
        pages.iter().for_each(|page| books.set_protected(*page, false));
        books.starved.retain(|starved| pages.binary_search(starved).is_err());
        true
    }

    /// Somebody waits to write to a retained page, and there is no memory to copy it to. False where it is not retained any more.
    pub fn starve(&self, page: PageId) -> bool {
        let mut books = self.books();
        if !self.memory.is_retained(page) {
            return false;
        }
        let is_new = !books.starved.contains(&page);
        if is_new {
            books.starved.push(page);
        }
        drop(books);
        if is_new {
            log::error!("no memory to copy a protected page to; its writer waits until blocks are written home");
        }
        true
    }

    /// The pages that somebody waits for, the oldest first.
    pub fn starved(&self) -> Vec<PageId> {
        self.books().starved.clone()
    }

    /// Whether a page is retained and known to be protected: for tests.
    pub fn is_kept(&self, page: PageId) -> bool {
        self.books().is_protected(page) && self.memory.is_retained(page)
    }
}

fn ends_in_zeros(block: &MemorySlice) -> bool {
    let mut end = [0; ZERO_BYTES];
    block.copy_out(block.len() - ZERO_BYTES, &mut end);
    end == [0; ZERO_BYTES]
}
