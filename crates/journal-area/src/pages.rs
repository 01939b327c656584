//! What is known of guest pages, over all logs of a VM: which are protected, which of those nobody needs any more, and
//! which are hot.

use guest_memory::{MemorySlice, PageId, Protection, VmMemory};
use std::collections::HashSet;
use std::sync::Arc;

/// Released pages are let go together once there are this many of them (or as soon as one of them is written to).
const LOOSE_PAGES_MAX: usize = 1024;
/// Entries of the hot-page table; pages share an entry when their numbers agree modulo this.
const HOT_ENTRIES: usize = 1 << 14;
/// From this score on a page is copied at commit. One fault makes a page hot: a fault costs some ten copies.
const HOT_FROM: u8 = 2;
const HOT_FAULT: u8 = 3;
const HOT_MAX: u8 = 12;

/// A run of fewer neighbouring pages is cheaper copied than protected: a call takes some 20 µs while the guest runs, a copied page 0.4 to 5
/// (docs/results/hot-pages.md).
const LONE_PAGES: usize = 8;

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
    /// These, and those in pages with few neighbours among the pages that are retained with them, as long as copies are allowed
    /// ([`Pages::allow_copies`]). Protecting is a call for each run of neighbouring pages, for which every processor of the guest gives up
    /// what it knows of its page tables: where a run is short, that takes longer than to copy it.
    #[default]
    Lone,
}

/// The pages of one VM.
pub struct Pages {
    memory: Arc<VmMemory>,
    /// One bit a page: protected in the VMM's page tables, retained or loose.
    protected: Vec<u64>,
    /// Protected, but no longer retained: the paper's clean protected buffers.
    loose: Vec<PageId>,
    hot: Vec<u8>,
    rule: HotPages,
    /// So many bytes may be copied for nothing but speed.
    copies_left_bytes: u64,
    /// Pages of rings, which are written by us past the protection and so are never retained.
    excluded: HashSet<PageId>,
    protection_said: bool,
    /// Pages protected since the start.
    pub pages_protected: u64,
    /// Calls to protect since the start.
    pub protect_calls: u64,
    /// Calls to let go since the start.
    pub unprotect_calls: u64,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages").field("loose", &self.loose.len()).finish_non_exhaustive()
    }
}

impl Pages {
    pub fn new(memory: Arc<VmMemory>) -> Self {
        Pages {
            memory,
            protected: Vec::new(),
            loose: Vec::new(),
            hot: vec![0; HOT_ENTRIES],
            rule: HotPages::default(),
            copies_left_bytes: 0,
            excluded: HashSet::new(),
            protection_said: false,
            pages_protected: 0,
            protect_calls: 0,
            unprotect_calls: 0,
        }
    }

    pub fn memory(&self) -> &Arc<VmMemory> {
        &self.memory
    }

    /// Names the pages that must never be retained.
    pub fn set_excluded(&mut self, pages: HashSet<PageId>) {
        self.excluded = pages;
    }

    /// Whether pages of this VM can be protected; the first "no" is said to the log.
    pub fn can_protect(&mut self) -> bool {
        match self.memory.protection() {
            Protection::Available => true,
            Protection::Unavailable(reason) => {
                if !self.protection_said {
                    self.protection_said = true;
                    log::warn!("journal blocks are copied, not protected in the guest's memory: {reason}");
                }
                false
            }
        }
    }

    /// Chooses what is copied from now on.
    pub fn set_rule(&mut self, rule: HotPages) {
        self.rule = rule;
    }

    /// Whether the page of a block should be retained rather than copied.
    pub fn should_retain(&self, block: &MemorySlice) -> bool {
        let page = block.page();
        if self.excluded.contains(&page) || self.memory.is_retained(page) {
            return false;
        }
        match self.rule {
            HotPages::Never => true,
            HotPages::Faulted => !self.is_hot(page),
            HotPages::Foreseen | HotPages::Lone => !self.is_hot(page) && !ends_in_zeros(block),
        }
    }

    /// So many bytes may be copied for nothing but speed, until it is said again.
    pub fn allow_copies(&mut self, bytes: u64) {
        self.copies_left_bytes = bytes;
    }

    /// Takes out of `retained` (indices of blocks, and their pages) what is cheaper copied, as far as copies are allowed.
    pub fn take_lone(&mut self, retained: &mut Vec<(usize, PageId)>) -> Vec<(usize, PageId)> {
        if self.rule != HotPages::Lone {
            return Vec::new();
        }
        let page_bytes = guest_memory::PAGE_BYTES as u64;
        retained.sort_unstable_by_key(|(_, page)| *page);
        let mut lone = Vec::new();
        let mut kept = Vec::with_capacity(retained.len());
        for run in retained.chunk_by(|one, next| one.1.0 + 1 == next.1.0) {
            let bytes = run.len() as u64 * page_bytes;
            if run.len() < LONE_PAGES && bytes <= self.copies_left_bytes {
                self.copies_left_bytes -= bytes;
                lone.extend_from_slice(run);
            } else {
                kept.extend_from_slice(run);
            }
        }
        *retained = kept;
        lone
    }

    fn is_hot(&self, page: PageId) -> bool {
        self.hot[page.0 as usize % HOT_ENTRIES] >= HOT_FROM
    }

    /// The page was written to while it was retained: copying it at commit would have been cheaper.
    pub fn heat(&mut self, page: PageId) {
        let score = &mut self.hot[page.0 as usize % HOT_ENTRIES];
        *score = score.saturating_add(HOT_FAULT).min(HOT_MAX);
    }

    /// The page went home as it was committed: retaining it would have been cheaper.
    pub fn cool(&mut self, page: PageId) {
        let score = &mut self.hot[page.0 as usize % HOT_ENTRIES];
        *score = score.saturating_sub(1);
    }

    fn protected_word(&mut self, page: PageId) -> (&mut u64, u64) {
        let index = page.0 as usize / 64;
        if index >= self.protected.len() {
            self.protected.resize(index + 1, 0);
        }
        (&mut self.protected[index], 1 << (page.0 % 64))
    }

    /// Retains pages (any order, without repeats): all or none. They are protected on return, and no write to them goes
    /// unnoticed from then on.
    pub fn retain(&mut self, pages: &[PageId]) -> bool {
        let mut fresh: Vec<PageId> = Vec::with_capacity(pages.len());
        for page in pages {
            self.memory.set_retained(*page, true);
            let (word, bit) = self.protected_word(*page);
            if *word & bit == 0 {
                fresh.push(*page);
            }
        }
        fresh.sort_unstable();
        match self.memory.protect(&fresh) {
            Ok(calls) => {
                for page in &fresh {
                    let (word, bit) = self.protected_word(*page);
                    *word |= bit;
                }
                self.pages_protected += pages.len() as u64;
                self.protect_calls += calls;
                true
            }
            Err(error) => {
                log::error!("protecting {} guest pages failed: {error}; they are copied instead", fresh.len());
                for page in pages {
                    self.memory.set_retained(*page, false);
                    // Those that were protected before are loose again.
                    let (word, bit) = self.protected_word(*page);
                    if *word & bit != 0 {
                        self.loose.push(*page);
                    }
                }
                false
            }
        }
    }

    /// These are retained, and protected, since an earlier process.
    pub fn adopt(&mut self, pages: &[PageId]) {
        for page in pages {
            self.memory.set_retained(*page, true);
            let (word, bit) = self.protected_word(*page);
            *word |= bit;
        }
        self.memory.adopt_protected(pages);
    }

    /// A retained page is no longer needed: it stays protected until [`Pages::let_loose_go`].
    pub fn release(&mut self, page: PageId) {
        self.memory.set_retained(page, false);
        self.loose.push(page);
    }

    /// Whether enough pages are loose to be worth a call.
    pub fn has_many_loose(&self) -> bool {
        self.loose.len() >= LOOSE_PAGES_MAX
    }

    /// Unprotects every page that is protected and not retained, in as few calls as possible (the paper's batch
    /// unprotection, figure 3).
    pub fn let_loose_go(&mut self) {
        let mut pages = std::mem::take(&mut self.loose);
        pages.sort_unstable();
        pages.dedup();
        pages.retain(|page| {
            let retained = self.memory.is_retained(*page);
            let (word, bit) = self.protected_word(*page);
            *word & bit != 0 && !retained
        });
        if !pages.is_empty() {
            self.unprotect_calls += self.memory.unprotect(&pages);
            for page in &pages {
                let (word, bit) = self.protected_word(*page);
                *word &= !bit;
            }
        }
        pages.clear();
        self.loose = pages;
    }

    /// Unprotects one page at once and wakes who waits for it.
    pub fn let_go(&mut self, page: PageId) {
        let (word, bit) = self.protected_word(page);
        *word &= !bit;
        self.unprotect_calls += self.memory.unprotect(&[page]);
    }
}

fn ends_in_zeros(block: &MemorySlice) -> bool {
    let mut end = [0; ZERO_BYTES];
    block.copy_out(block.len() - ZERO_BYTES, &mut end);
    end == [0; ZERO_BYTES]
}
