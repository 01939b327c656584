//! The page-mapped FTL: every page anywhere, the whole map in RAM. The ideal that the others approach.
//!
//! Host writes and garbage collection's copies stream into one active block. When it is full and the free
//! blocks are at or below the threshold, victims are reclaimed until they are above it.

use super::{Ftl, PREFETCH_MAX};
use crate::blocks::{FreeBlocks, VictimPolicy, VictimQueue};
use crate::flash::{Flash, Halt, Observer, Step, is_some};
use crate::geometry::{BlockNumber, Geometry, Lpn, NONE, Ppn};
use crate::large_pages::filled;

/// Parameters of the page-mapped FTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PageOptions {
    /// Garbage collection runs while this many blocks or fewer are free. Default 3, as DFTL's public simulator has it.
    pub gc_free_blocks: u32,
    /// How victims are chosen. Default greedy, the usual choice for the baseline.
    pub victim: VictimPolicy,
}

impl Default for PageOptions {
    fn default() -> PageOptions {
        PageOptions { gc_free_blocks: 3, victim: VictimPolicy::Greedy }
    }
}

impl PageOptions {
    /// Says what does not fit the geometry.
    pub fn check(&self, geometry: &Geometry) -> Result<(), String> {
        let need = self.gc_free_blocks.saturating_add(2);
        if self.gc_free_blocks == 0 || geometry.extra_blocks < need {
            return Err(format!(
                "--gc-free-blocks {} needs to be at least 1 and --extra-blocks at least 2 more (here {})",
                self.gc_free_blocks, geometry.extra_blocks
            ));
        }
        Ok(())
    }
}

/// The page-mapped FTL.
pub struct PageFtl {
    options: PageOptions,
    map: Vec<Ppn>,
    free: FreeBlocks,
    queue: VictimQueue,
    active: BlockNumber,
    next: Ppn,
    end: Ppn,
    pages_per_block: u32,
}

impl PageFtl {
    /// On an erased flash.
    pub fn new(geometry: &Geometry, options: PageOptions, wear_levelling: bool) -> PageFtl {
        PageFtl {
            options,
            map: filled(geometry.logical_pages() as usize, NONE),
            free: FreeBlocks::new(geometry.physical_blocks(), wear_levelling),
            queue: VictimQueue::new(options.victim, geometry.physical_blocks(), geometry.pages_per_block),
            active: NONE,
            next: 0,
            end: 0,
            pages_per_block: geometry.pages_per_block,
        }
    }

    /// The active block is full: closes it and opens another.
    #[cold]
    fn open_block<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        if is_some(self.active) {
            self.queue.insert(self.active, flash.live_pages(self.active), flash.counters.flash_writes());
        }
        self.active = self.free.take().ok_or_else(|| out_of_space(flash))?;
        self.next = flash.page(self.active, 0);
        self.end = self.next + self.pages_per_block;
        Ok(())
    }

    #[cold]
    fn make_room<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        while self.free.len() <= self.options.gc_free_blocks {
            let victim = self.queue.best(flash.counters.flash_writes());
            let victim = victim.ok_or_else(|| out_of_space(flash))?;
            flash.counters.gc_runs += 1;
            self.reclaim(flash, victim.block)?;
        }
        if self.next == self.end { self.open_block(flash) } else { Ok(()) }
    }

    fn reclaim<O: Observer>(&mut self, flash: &mut Flash<O>, victim: BlockNumber) -> Step {
        self.queue.remove(victim, flash.live_pages(victim));
        for index in 0..flash.words_per_block() {
            let mut word = flash.live_word(victim, index);
            while word != 0 {
                let from = flash.page(victim, index as u32 * 64 + word.trailing_zeros());
                word &= word - 1;
                if self.next == self.end {
                    self.open_block(flash)?;
                }
                let lpn = flash.move_page(from, self.next)?;
                self.map[lpn as usize] = self.next;
                self.next += 1;
            }
        }
        if flash.erase(victim)? {
            self.free.put(victim, flash.erase_count(victim));
        }
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

/// Why there is no free block: worn out, or never enough.
pub(crate) fn out_of_space<O: Observer>(flash: &Flash<O>) -> Halt {
    match flash.bad_blocks() {
        0 => Halt::NoSpace,
        bad => Halt::WornOut(bad),
    }
}

/// Looks at what invalidating these pages will look at.
pub(crate) fn prefetch_invalidation<O: Observer>(flash: &Flash<O>, queue: &VictimQueue, pages: &[Ppn; PREFETCH_MAX]) {
    let mut neighbours = [[NONE; 2]; PREFETCH_MAX];
    for (neighbours, &page) in neighbours.iter_mut().zip(pages) {
        if is_some(page) {
            flash.prefetch(page);
            *neighbours = queue.prefetch(flash.block_of(page));
        }
    }
    for &block in neighbours.as_flattened() {
        if is_some(block) {
            std::hint::black_box(queue.prefetch(block));
        }
    }
}

/// Copies a block's live pages to the beginning of an erased one and tells where each went.
pub(crate) fn move_block<O: Observer>(
    flash: &mut Flash<O>,
    from: BlockNumber,
    to: BlockNumber,
    mut moved: impl FnMut(u32, Ppn),
) -> Step {
    for index in 0..flash.words_per_block() {
        let mut word = flash.live_word(from, index);
        while word != 0 {
            let page = flash.page(from, index as u32 * 64 + word.trailing_zeros());
            word &= word - 1;
            let new = flash.page(to, flash.next_page(to));
            let owner = flash.move_page(page, new)?;
            moved(owner, new);
        }
    }
    Ok(())
}

impl<O: Observer> Ftl<O> for PageFtl {
    #[inline]
    fn write(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step {
        if self.next == self.end {
            self.make_room(flash)?;
        }
        // Only now: making room may have moved the page.
        let old = self.map[lpn as usize];
        if is_some(old) {
            self.kill(flash, old)?;
        }
        flash.write_host(self.next, lpn)?;
        self.map[lpn as usize] = self.next;
        self.next += 1;
        Ok(())
    }

    #[inline]
    fn read(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        let page = self.map[lpn as usize];
        if !is_some(page) {
            return Ok(false);
        }
        flash.read_host(page, lpn)?;
        Ok(true)
    }

    fn trim(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        let old = std::mem::replace(&mut self.map[lpn as usize], NONE);
        if !is_some(old) {
            return Ok(false);
        }
        self.kill(flash, old)?;
        Ok(true)
    }

    fn mapped(&self, _flash: &Flash<O>, lpn: Lpn) -> Option<Ppn> {
        Some(self.map[lpn as usize]).filter(|&page| is_some(page))
    }

    fn relocate(&mut self, flash: &mut Flash<O>, block: BlockNumber) -> Step<bool> {
        // A block that is neither active nor empty is in the queue.
        if block == self.active || flash.live_pages(block) == 0 || self.free.len() < 2 {
            return Ok(false);
        }
        let Some(to) = self.free.take_for_cold() else { return Ok(false) };
        self.queue.remove(block, flash.live_pages(block));
        let map = &mut self.map;
        move_block(flash, block, to, |lpn, page| map[lpn as usize] = page)?;
        self.queue.insert(to, flash.live_pages(to), flash.counters.flash_writes());
        if flash.erase(block)? {
            self.free.put(block, flash.erase_count(block));
        }
        Ok(true)
    }

    fn prefetch(&self, flash: &Flash<O>, lpns: &[Lpn]) {
        let mut pages = [NONE; PREFETCH_MAX];
        for (page, &lpn) in pages.iter_mut().zip(lpns) {
            *page = self.map[lpn as usize];
        }
        prefetch_invalidation(flash, &self.queue, &pages);
    }

    fn memory_bytes(&self) -> u64 {
        self.map.len() as u64 * 4 + self.free.memory_bytes() + self.queue.memory_bytes()
    }
}
