//! DFTL (Gupta, Kim, Urgaonkar: "DFTL: A Flash Translation Layer Employing Demand-based Selective Caching of
//! Page-level Address Mappings", ASPLOS 2009).
//!
//! Pages are mapped one by one, but the map lives in **translation pages** on flash, found through the **global
//! translation directory** (GTD) in RAM. The **cached mapping table** (CMT) holds single entries in a segmented
//! LRU. A miss evicts one entry (a dirty one costs a read and a write of its translation page) and reads one
//! translation page. Garbage collection of a data block updates cached entries in the CMT (**lazy copying**) and
//! the others grouped by translation page; **batch update** cleans all cached dirty entries of a translation
//! page when one of them is evicted.
//!
//! The simulation keeps one array with the current mapping. That is exact: where the array and a translation
//! page differ, the entry is cached and dirty.

use super::page::{move_block, out_of_space, prefetch_invalidation};
use super::{Ftl, PREFETCH_MAX};
use crate::blocks::{FreeBlocks, Victim, VictimPolicy, VictimQueue};
use crate::cache::{SegmentedLru, Slot};
use crate::flash::{Flash, Observer, Step, is_some};
use crate::geometry::{BlockNumber, Geometry, Lpn, NONE, Ppn};
use crate::large_pages::filled;

/// Bytes of a mapping entry on flash (DFTL: a 2 KB page holds 512 of them).
pub const ENTRY_BYTES: u32 = 4;

/// Parameters of DFTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DftlOptions {
    /// Entries of the cached mapping table. Default 8192, as in the public simulator of DFTL's authors.
    pub cmt_entries: u32,
    /// How many of them the protected segment may hold. Default the same simulator's 6552 of 8192.
    pub cmt_protected: u32,
    /// Whether evicting a dirty entry cleans all dirty entries of its translation page. Default on, as in the paper.
    pub batch_update: bool,
    /// Garbage collection runs while this many blocks or fewer are free. Default 3, the same simulator's threshold.
    pub gc_free_blocks: u32,
    /// How victims are chosen. Default cost-benefit, as in the paper.
    pub victim: VictimPolicy,
}

impl Default for DftlOptions {
    fn default() -> DftlOptions {
        DftlOptions {
            cmt_entries: 8192,
            cmt_protected: 6552,
            batch_update: true,
            gc_free_blocks: 3,
            victim: VictimPolicy::CostBenefit,
        }
    }
}

impl DftlOptions {
    /// The protected share for another cache size.
    pub fn protected_for(cmt_entries: u32) -> u32 {
        (u64::from(cmt_entries) * 6552 / 8192) as u32
    }

    /// Translation pages of a geometry.
    pub fn translation_pages(geometry: &Geometry) -> u32 {
        geometry.logical_pages().div_ceil(geometry.page_bytes / ENTRY_BYTES)
    }

    /// Says what does not fit the geometry.
    pub fn check(&self, geometry: &Geometry) -> Result<(), String> {
        if self.cmt_entries == 0 || self.cmt_entries > 1 << 28 {
            return Err(format!("--cmt-entries {} needs to be from 1 to 2^28", self.cmt_entries));
        }
        if self.cmt_protected >= self.cmt_entries {
            return Err(format!(
                "--cmt-protected {} needs to be less than --cmt-entries {}",
                self.cmt_protected, self.cmt_entries
            ));
        }
        let translation = DftlOptions::translation_pages(geometry).div_ceil(geometry.pages_per_block);
        let need = self.gc_free_blocks.saturating_add(3).saturating_add(translation);
        if self.gc_free_blocks < 2 || geometry.extra_blocks < need {
            return Err(format!(
                "--gc-free-blocks {} needs to be at least 2, and --extra-blocks at least {need} (here {}): \
                 {translation} for translation pages, 3 and those kept free",
                self.gc_free_blocks, geometry.extra_blocks
            ));
        }
        Ok(())
    }
}

/// One stream of writes: the block being filled and the queue of those filled before.
struct Stream {
    active: BlockNumber,
    next: Ppn,
    end: Ppn,
    queue: VictimQueue,
}

impl Stream {
    fn new(geometry: &Geometry, policy: VictimPolicy) -> Stream {
        let queue = VictimQueue::new(policy, geometry.physical_blocks(), geometry.pages_per_block);
        Stream { active: NONE, next: 0, end: 0, queue }
    }

    /// The next page to program.
    #[inline(always)]
    fn advance<O: Observer>(&mut self, flash: &mut Flash<O>, free: &mut FreeBlocks) -> Step<Ppn> {
        if self.next == self.end {
            self.open(flash, free)?;
        }
        self.next += 1;
        Ok(self.next - 1)
    }

    #[cold]
    fn open<O: Observer>(&mut self, flash: &mut Flash<O>, free: &mut FreeBlocks) -> Step {
        if is_some(self.active) {
            self.queue.insert(self.active, flash.live_pages(self.active), flash.counters.flash_writes());
        }
        self.active = free.take().ok_or_else(|| out_of_space(flash))?;
        self.next = flash.page(self.active, 0);
        self.end = self.next + flash.geometry().pages_per_block;
        Ok(())
    }

    #[inline(always)]
    fn kill<O: Observer>(&mut self, flash: &mut Flash<O>, page: Ppn) -> Step {
        flash.invalidate(page)?;
        let block = flash.block_of(page);
        if block != self.active {
            self.queue.page_died(block, flash.live_pages(block), flash.counters.flash_writes());
        }
        Ok(())
    }
}

/// A translation page: where it is, and its cached dirty entries.
#[derive(Clone, Copy)]
struct Directory {
    page: Ppn,
    dirty: Slot,
}

/// What the CMT knows of an entry besides its recency: links of the dirty list of its translation page.
#[derive(Clone, Copy)]
struct Dirt {
    dirty: bool,
    previous: Slot,
    next: Slot,
}

const CLEAN: Dirt = Dirt { dirty: false, previous: NONE, next: NONE };

/// DFTL.
pub struct Dftl {
    options: DftlOptions,
    map: Vec<Ppn>,
    directory: Vec<Directory>,
    cache: SegmentedLru,
    dirt: Vec<Dirt>,
    entries_per_page: u32,
    entry_bits: u32,
    free: FreeBlocks,
    data: Stream,
    translation: Stream,
    // Which blocks hold translation pages.
    is_translation: Vec<bool>,
    // Scratch: pages moved by one collection whose entries are not cached, by translation page.
    moved: Vec<u32>,
}

impl Dftl {
    /// On an erased flash.
    pub fn new(geometry: &Geometry, options: DftlOptions, wear_levelling: bool) -> Dftl {
        let entries_per_page = geometry.page_bytes / ENTRY_BYTES;
        Dftl {
            options,
            map: filled(geometry.logical_pages() as usize, NONE),
            directory: filled(DftlOptions::translation_pages(geometry) as usize, Directory { page: NONE, dirty: NONE }),
            cache: SegmentedLru::new(options.cmt_entries, options.cmt_protected),
            dirt: Vec::new(),
            entries_per_page,
            entry_bits: entries_per_page.trailing_zeros(),
            free: FreeBlocks::new(geometry.physical_blocks(), wear_levelling),
            data: Stream::new(geometry, options.victim),
            translation: Stream::new(geometry, options.victim),
            is_translation: filled(geometry.physical_blocks() as usize, false),
            moved: Vec::new(),
        }
    }

    /// Entries that one translation page holds.
    pub fn entries_per_page(&self) -> u32 {
        self.entries_per_page
    }

    /// Has the page's entry in the CMT.
    #[inline]
    fn lookup<O: Observer>(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<Slot> {
        if let Some(slot) = self.cache.find(lpn) {
            flash.counters.mapping_hits += 1;
            self.cache.touch(slot);
            return Ok(slot);
        }
        flash.counters.mapping_misses += 1;
        if self.cache.is_full() {
            self.evict(flash)?;
        }
        let number = lpn >> self.entry_bits;
        let page = self.directory[number as usize].page;
        // A translation page that was never written maps nothing and costs nothing.
        if is_some(page) {
            flash.read_mapping(page, number)?;
        }
        let slot = self.cache.insert(lpn);
        if slot as usize >= self.dirt.len() {
            self.dirt.resize(slot as usize + 1, CLEAN);
        }
        Ok(slot)
    }

    fn evict<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        let Some(slot) = self.cache.oldest() else { return Ok(()) };
        if self.dirt[slot as usize].dirty {
            let number = self.cache.key(slot) >> self.entry_bits;
            self.rewrite_translation(flash, number)?;
            if self.options.batch_update {
                while is_some(self.directory[number as usize].dirty) {
                    self.clean(number, self.directory[number as usize].dirty);
                }
            } else {
                self.clean(number, slot);
            }
        }
        self.cache.remove(slot);
        Ok(())
    }

    /// Reads a translation page, if there is one, and writes its new version.
    fn rewrite_translation<O: Observer>(&mut self, flash: &mut Flash<O>, number: u32) -> Step {
        let old = self.directory[number as usize].page;
        if is_some(old) {
            flash.read_mapping(old, number)?;
            self.translation.kill(flash, old)?;
        }
        let new = self.next_translation(flash)?;
        flash.write_mapping(new, number)?;
        self.directory[number as usize].page = new;
        Ok(())
    }

    fn next_translation<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step<Ppn> {
        let page = self.translation.advance(flash, &mut self.free)?;
        self.is_translation[flash.block_of(page) as usize] = true;
        Ok(page)
    }

    #[inline]
    fn soil(&mut self, number: u32, slot: Slot) {
        if self.dirt[slot as usize].dirty {
            return;
        }
        let next = std::mem::replace(&mut self.directory[number as usize].dirty, slot);
        self.dirt[slot as usize] = Dirt { dirty: true, previous: NONE, next };
        if is_some(next) {
            self.dirt[next as usize].previous = slot;
        }
    }

    fn clean(&mut self, number: u32, slot: Slot) {
        let Dirt { previous, next, .. } = std::mem::replace(&mut self.dirt[slot as usize], CLEAN);
        if is_some(previous) {
            self.dirt[previous as usize].next = next;
        } else {
            self.directory[number as usize].dirty = next;
        }
        if is_some(next) {
            self.dirt[next as usize].previous = previous;
        }
    }

    /// Above the threshold an operation can always finish: it opens at most one block of each kind.
    #[inline(always)]
    fn make_room<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        while self.free.len() <= self.options.gc_free_blocks {
            self.collect(flash)?;
        }
        Ok(())
    }

    #[cold]
    fn collect<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        let now = flash.counters.flash_writes();
        let data = self.data.queue.best(now);
        let translation = self.translation.queue.best(now);
        let (victim, is_translation): (Victim, bool) = match (data, translation) {
            (None, None) => return Err(out_of_space(flash)),
            (Some(data), None) => (data, false),
            (None, Some(translation)) => (translation, true),
            // A data victim may open a block of each kind before it frees one: with a single free block left
            // only a translation victim is safe.
            (Some(_), Some(translation)) if self.free.len() < 2 => (translation, true),
            (Some(data), Some(translation)) if self.data.queue.is_better(&translation, &data) => (translation, true),
            (Some(data), Some(_)) => (data, false),
        };
        flash.counters.gc_runs += 1;
        if is_translation {
            self.reclaim_translation(flash, victim.block)
        } else {
            let before = flash.counters;
            self.reclaim_data(flash, victim.block)?;
            flash.counters.gc_mapping_reads += flash.counters.mapping_reads - before.mapping_reads;
            flash.counters.gc_mapping_writes += flash.counters.mapping_writes - before.mapping_writes;
            Ok(())
        }
    }

    fn reclaim_translation<O: Observer>(&mut self, flash: &mut Flash<O>, victim: BlockNumber) -> Step {
        self.translation.queue.remove(victim, flash.live_pages(victim));
        for index in 0..flash.words_per_block() {
            let mut word = flash.live_word(victim, index);
            while word != 0 {
                let from = flash.page(victim, index as u32 * 64 + word.trailing_zeros());
                word &= word - 1;
                let to = self.next_translation(flash)?;
                let number = flash.move_page(from, to)?;
                flash.counters.mapping_copies += 1;
                self.directory[number as usize].page = to;
            }
        }
        self.is_translation[victim as usize] = false;
        flash.counters.mapping_erases += 1;
        self.erase(flash, victim)
    }

    fn reclaim_data<O: Observer>(&mut self, flash: &mut Flash<O>, victim: BlockNumber) -> Step {
        self.data.queue.remove(victim, flash.live_pages(victim));
        self.moved.clear();
        for index in 0..flash.words_per_block() {
            let mut word = flash.live_word(victim, index);
            while word != 0 {
                let from = flash.page(victim, index as u32 * 64 + word.trailing_zeros());
                word &= word - 1;
                let to = self.data.advance(flash, &mut self.free)?;
                let lpn = flash.move_page(from, to)?;
                self.note_move(lpn, to);
            }
        }
        self.rewrite_moved(flash)?;
        self.erase(flash, victim)
    }

    #[inline]
    fn note_move(&mut self, lpn: Lpn, to: Ppn) {
        self.map[lpn as usize] = to;
        let number = lpn >> self.entry_bits;
        match self.cache.find(lpn) {
            // Lazy copying: the cached entry is updated and becomes dirty; its recency stays.
            Some(slot) => self.soil(number, slot),
            None => self.moved.push(number),
        }
    }

    /// The translation pages of moved pages that are not cached are rewritten.
    fn rewrite_moved<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        // One read and one write per translation page, in the order of their numbers.
        let mut moved = std::mem::take(&mut self.moved);
        moved.sort_unstable();
        moved.dedup();
        // On a large device every one of them is a few cache misses: looked at together first, they overlap.
        for numbers in moved.chunks(PREFETCH_MAX) {
            let mut pages = [NONE; PREFETCH_MAX];
            for (page, &number) in pages.iter_mut().zip(numbers) {
                *page = self.directory[number as usize].page;
            }
            pages.iter().for_each(|&page| flash.prefetch_content(page));
            prefetch_invalidation(flash, &self.translation.queue, &pages);
        }
        for &number in &moved {
            self.rewrite_translation(flash, number)?;
        }
        self.moved = moved;
        Ok(())
    }

    fn erase<O: Observer>(&mut self, flash: &mut Flash<O>, block: BlockNumber) -> Step {
        if flash.erase(block)? {
            self.free.put(block, flash.erase_count(block));
        }
        Ok(())
    }
}

impl<O: Observer> Ftl<O> for Dftl {
    #[inline]
    fn write(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step {
        self.make_room(flash)?;
        let slot = self.lookup(flash, lpn)?;
        let old = self.map[lpn as usize];
        if is_some(old) {
            self.data.kill(flash, old)?;
        }
        let new = self.data.advance(flash, &mut self.free)?;
        flash.write_host(new, lpn)?;
        self.map[lpn as usize] = new;
        self.soil(lpn >> self.entry_bits, slot);
        Ok(())
    }

    #[inline]
    fn read(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        self.make_room(flash)?;
        self.lookup(flash, lpn)?;
        let page = self.map[lpn as usize];
        if !is_some(page) {
            return Ok(false);
        }
        flash.read_host(page, lpn)?;
        Ok(true)
    }

    fn trim(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        self.make_room(flash)?;
        let slot = self.lookup(flash, lpn)?;
        let old = std::mem::replace(&mut self.map[lpn as usize], NONE);
        if !is_some(old) {
            return Ok(false);
        }
        self.data.kill(flash, old)?;
        self.soil(lpn >> self.entry_bits, slot);
        Ok(true)
    }

    fn mapped(&self, _flash: &Flash<O>, lpn: Lpn) -> Option<Ppn> {
        Some(self.map[lpn as usize]).filter(|&page| is_some(page))
    }

    fn relocate(&mut self, flash: &mut Flash<O>, block: BlockNumber) -> Step<bool> {
        let is_active = block == self.data.active || block == self.translation.active;
        if is_active || flash.live_pages(block) == 0 || self.free.len() < 4 {
            return Ok(false);
        }
        let Some(to) = self.free.take_for_cold() else { return Ok(false) };
        let before = flash.counters.copies;
        if self.is_translation[block as usize] {
            self.translation.queue.remove(block, flash.live_pages(block));
            let directory = &mut self.directory;
            move_block(flash, block, to, |number, page| directory[number as usize].page = page)?;
            flash.counters.mapping_copies += flash.counters.copies - before;
            flash.counters.mapping_erases += 1;
            self.is_translation[block as usize] = false;
            self.is_translation[to as usize] = true;
            self.translation.queue.insert(to, flash.live_pages(to), flash.counters.flash_writes());
        } else {
            self.data.queue.remove(block, flash.live_pages(block));
            self.moved.clear();
            let mut lpns = Vec::new();
            move_block(flash, block, to, |lpn, page| lpns.push((lpn, page)))?;
            self.data.queue.insert(to, flash.live_pages(to), flash.counters.flash_writes());
            for (lpn, page) in lpns {
                self.note_move(lpn, page);
            }
            self.rewrite_moved(flash)?;
        }
        self.erase(flash, block)?;
        Ok(true)
    }

    fn prefetch(&self, flash: &Flash<O>, lpns: &[Lpn]) {
        let mut pages = [NONE; PREFETCH_MAX];
        let mut translation = [NONE; PREFETCH_MAX];
        for ((page, translation), &lpn) in pages.iter_mut().zip(&mut translation).zip(lpns) {
            *page = self.map[lpn as usize];
            *translation = self.directory[(lpn >> self.entry_bits) as usize].page;
        }
        // Most of them are misses, which read their translation pages.
        translation.iter().for_each(|&page| flash.prefetch_content(page));
        prefetch_invalidation(flash, &self.data.queue, &pages);
    }

    fn memory_bytes(&self) -> u64 {
        (self.map.len() * 4 + self.directory.len() * size_of::<Directory>() + self.dirt.capacity() * size_of::<Dirt>())
            as u64
            + self.is_translation.len() as u64
            + self.free.memory_bytes()
            + self.cache.memory_bytes()
            + self.data.queue.memory_bytes()
            + self.translation.queue.memory_bytes()
    }
}
