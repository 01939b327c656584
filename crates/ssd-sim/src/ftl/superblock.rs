//! Superblock FTL (Kang, Jo, Kim, Lee: "A Superblock-based Flash Translation Layer for NAND Flash Memory",
//! EMSOFT 2006).
//!
//! N adjacent logical blocks form a **superblock**, which owns up to N data blocks (D-blocks) and M update blocks
//! (U-blocks). A page lies anywhere in its superblock's blocks; writes stream into its current block. Page maps
//! are kept in spare areas in two levels below the superblock's own directory (a page table, PT, of 8 entries and
//! a page middle directory, PMD, of 8 PTs): a page write stores its updated PT and PMD with itself, at no extra
//! program, and a lookup that misses the PT cache costs two spare reads.
//!
//! A full U-block counts as a D-block while the superblock has fewer than N of them, so a superblock's U-blocks
//! are its blocks beyond N. Garbage collection, in this order: (1) blocks without live pages are erased; (2) at
//! M U-blocks the superblock itself is collected, and when the free pool is down to its threshold, the least
//! recently written superblock that could do with a block less; (3) inside it the block with the fewest live
//! pages is copied out and erased. With hot-cold separation the copies go to a block of their own, so that what
//! survives collection does not mix with what is being written.

use super::page::{move_block, out_of_space};
use super::{Ftl, PREFETCH_MAX};
use crate::blocks::{FreeBlocks, Victim, VictimPolicy};
use crate::cache::SegmentedLru;
use crate::flash::{Flash, Observer, Step, is_some};
use crate::geometry::{BlockNumber, Geometry, Lpn, NONE, Ppn};
use crate::large_pages::filled;

/// Entries of a page table: one PT covers 8 pages.
pub const PAGES_PER_PT: u32 = 8;

/// Parameters of the Superblock FTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct SuperblockOptions {
    /// N, logical blocks per superblock. Default 8, the size the paper settles on.
    pub superblock_blocks: u32,
    /// M, the most U-blocks of one superblock; the pool (extra blocks) bounds them all together. Default 4, our choice
    /// (the paper gives no single value): the best for small footprints that does no harm to skewed large ones.
    pub update_blocks: u32,
    /// Blocks that stay free for copying. Default 3, as for the other FTLs.
    pub gc_free_blocks: u32,
    /// Page tables held in RAM. Default 2048: 64 KB of entries, the RAM of DFTL's default cache.
    pub pt_cache_entries: u32,
    /// Whether garbage collection's copies get a block of their own.
    pub hot_cold: bool,
    /// How the block is chosen inside a superblock. Default greedy: the paper takes the fewest live pages.
    pub victim: VictimPolicy,
}

impl Default for SuperblockOptions {
    fn default() -> SuperblockOptions {
        SuperblockOptions {
            superblock_blocks: 8,
            update_blocks: 4,
            gc_free_blocks: 3,
            pt_cache_entries: 2048,
            hot_cold: true,
            victim: VictimPolicy::Greedy,
        }
    }
}

impl SuperblockOptions {
    /// Says what does not fit the geometry.
    pub fn check(&self, geometry: &Geometry) -> Result<(), String> {
        if self.superblock_blocks == 0 || self.superblock_blocks > 1024 || self.update_blocks > 1024 {
            return Err("--superblock-blocks needs to be from 1 to 1024, --update-blocks from 1 to 1024".into());
        }
        if self.update_blocks == 0 {
            return Err("--update-blocks needs to be at least 1".into());
        }
        if self.pt_cache_entries == 0 || self.pt_cache_entries > 1 << 28 {
            return Err("--pt-cache-entries needs to be from 1 to 2^28".into());
        }
        let need = self.gc_free_blocks.saturating_add(2);
        if self.gc_free_blocks < 2 || geometry.extra_blocks < need {
            return Err(format!(
                "--gc-free-blocks {} needs to be at least 2 and --extra-blocks at least 2 more (here {})",
                self.gc_free_blocks, geometry.extra_blocks
            ));
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Superblock {
    // The block being written, and the one that copies go to.
    current: BlockNumber,
    cold: BlockNumber,
    // Its blocks, oldest first.
    first: BlockNumber,
    last: BlockNumber,
    count: u32,
    live: u32,
    // Recency among the superblocks that could do with a block less.
    older: u32,
    newer: u32,
    listed: bool,
}

/// Superblock FTL.
pub struct SuperblockFtl {
    options: SuperblockOptions,
    pages_per_block: u32,
    pages_per_superblock: u32,
    map: Vec<Ppn>,
    superblocks: Vec<Superblock>,
    // Next block of the same superblock, by block.
    next_block: Vec<BlockNumber>,
    oldest: u32,
    newest: u32,
    free: FreeBlocks,
    tables: SegmentedLru,
    // When a page of each block last died, in page programs; only for cost-benefit.
    changed: Vec<u64>,
}

impl SuperblockFtl {
    /// On an erased flash.
    pub fn new(geometry: &Geometry, options: SuperblockOptions, wear_levelling: bool) -> SuperblockFtl {
        let empty = Superblock {
            current: NONE,
            cold: NONE,
            first: NONE,
            last: NONE,
            count: 0,
            live: 0,
            older: NONE,
            newer: NONE,
            listed: false,
        };
        SuperblockFtl {
            options,
            pages_per_block: geometry.pages_per_block,
            pages_per_superblock: geometry.pages_per_block * options.superblock_blocks,
            map: filled(geometry.logical_pages() as usize, NONE),
            superblocks: filled(geometry.blocks.div_ceil(options.superblock_blocks) as usize, empty),
            next_block: filled(geometry.physical_blocks() as usize, NONE),
            oldest: NONE,
            newest: NONE,
            free: FreeBlocks::new(geometry.physical_blocks(), wear_levelling),
            tables: SegmentedLru::new(options.pt_cache_entries, 0),
            changed: match options.victim {
                VictimPolicy::Greedy => Vec::new(),
                VictimPolicy::CostBenefit => filled(geometry.physical_blocks() as usize, 0),
            },
        }
    }

    #[inline(always)]
    fn superblock_of(&self, lpn: Lpn) -> u32 {
        let pages = self.pages_per_superblock;
        if pages.is_power_of_two() { lpn >> pages.trailing_zeros() } else { lpn / pages }
    }

    /// The page table of a page is needed: found in RAM, or read from two spare areas (PMD, then PT).
    #[inline]
    fn lookup<O: Observer>(&mut self, flash: &mut Flash<O>, lpn: Lpn) {
        let table = lpn / PAGES_PER_PT;
        if let Some(slot) = self.tables.find(table) {
            flash.counters.mapping_hits += 1;
            self.tables.touch(slot);
            return;
        }
        flash.counters.mapping_misses += 1;
        // A superblock without a block has no page tables yet.
        if self.superblocks[self.superblock_of(lpn) as usize].count > 0 {
            flash.counters.spare_reads += 2;
        }
        if self.tables.is_full()
            && let Some(slot) = self.tables.oldest()
        {
            self.tables.remove(slot);
        }
        self.tables.insert(table);
    }

    /// Whether the superblock's pages would fit into one block less.
    fn is_reclaimable(&self, number: u32) -> bool {
        let superblock = &self.superblocks[number as usize];
        superblock.count * self.pages_per_block - superblock.live >= self.pages_per_block
    }

    /// A page of the superblock was written: it is the most recent of those that are reclaimable, or none of them.
    #[inline]
    fn refresh(&mut self, number: u32) {
        let reclaimable = self.is_reclaimable(number);
        if reclaimable && self.newest == number {
            return;
        }
        self.unlist(number);
        if reclaimable {
            let older = std::mem::replace(&mut self.newest, number);
            match older {
                NONE => self.oldest = number,
                older => self.superblocks[older as usize].newer = number,
            }
            let superblock = &mut self.superblocks[number as usize];
            (superblock.older, superblock.newer, superblock.listed) = (older, NONE, true);
        }
    }

    /// The superblock was collected: its recency stays, unless there is nothing more to win in it.
    fn settle(&mut self, number: u32) {
        if !self.is_reclaimable(number) {
            self.unlist(number);
        }
    }

    fn unlist(&mut self, number: u32) {
        let Superblock { older, newer, listed, .. } = self.superblocks[number as usize];
        if !listed {
            return;
        }
        match older {
            NONE => self.oldest = newer,
            older => self.superblocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.superblocks[newer as usize].older = older,
        }
        self.superblocks[number as usize].listed = false;
    }

    #[inline(always)]
    fn kill<O: Observer>(&mut self, flash: &mut Flash<O>, page: Ppn) -> Step {
        flash.invalidate(page)?;
        if self.options.victim == VictimPolicy::CostBenefit {
            self.changed[flash.block_of(page) as usize] = flash.counters.flash_writes();
        }
        Ok(())
    }

    fn has_room<O: Observer>(&self, flash: &Flash<O>, block: BlockNumber) -> bool {
        is_some(block) && flash.next_page(block) < self.pages_per_block
    }

    fn add_block<O: Observer>(&mut self, flash: &Flash<O>, number: u32) -> Step<BlockNumber> {
        let block = self.free.take().ok_or_else(|| out_of_space(flash))?;
        self.adopt_block(flash, number, block);
        Ok(block)
    }

    /// Adds an erased block to a superblock.
    fn adopt_block<O: Observer>(&mut self, flash: &Flash<O>, number: u32, block: BlockNumber) {
        let superblock = &mut self.superblocks[number as usize];
        self.next_block[block as usize] = NONE;
        if self.options.victim == VictimPolicy::CostBenefit {
            self.changed[block as usize] = flash.counters.flash_writes();
        }
        match superblock.last {
            NONE => superblock.first = block,
            last => self.next_block[last as usize] = block,
        }
        superblock.last = block;
        superblock.count += 1;
    }

    fn drop_block<O: Observer>(&mut self, flash: &mut Flash<O>, number: u32, block: BlockNumber) -> Step {
        let superblock = &mut self.superblocks[number as usize];
        let mut before = NONE;
        let mut at = superblock.first;
        while at != block {
            before = at;
            at = self.next_block[at as usize];
        }
        let after = self.next_block[block as usize];
        match before {
            NONE => superblock.first = after,
            before => self.next_block[before as usize] = after,
        }
        if superblock.last == block {
            superblock.last = before;
        }
        superblock.count -= 1;
        if superblock.current == block {
            superblock.current = NONE;
        }
        if superblock.cold == block {
            superblock.cold = NONE;
        }
        if flash.erase(block)? {
            self.free.put(block, flash.erase_count(block));
        }
        Ok(())
    }

    /// Gives the superblock a block with room to write into.
    #[cold]
    fn open_update_block<O: Observer>(&mut self, flash: &mut Flash<O>, number: u32) -> Step {
        let allowed = self.options.superblock_blocks + self.options.update_blocks;
        self.superblocks[number as usize].current = NONE;
        self.erase_dead(flash, number)?;
        loop {
            if self.has_room(flash, self.superblocks[number as usize].current) {
                return Ok(());
            }
            if self.superblocks[number as usize].count >= allowed {
                self.collect(flash, number)?;
            } else if self.free.len() > self.options.gc_free_blocks {
                let block = self.add_block(flash, number)?;
                self.superblocks[number as usize].current = block;
                return Ok(());
            } else {
                let victim = self.oldest;
                if !is_some(victim) {
                    return Err(out_of_space(flash));
                }
                self.collect(flash, victim)?;
                self.settle(victim);
            }
        }
    }

    /// Erases the superblock's blocks without live pages that are not being written.
    fn erase_dead<O: Observer>(&mut self, flash: &mut Flash<O>, number: u32) -> Step {
        let mut block = self.superblocks[number as usize].first;
        while is_some(block) {
            let next = self.next_block[block as usize];
            let Superblock { current, cold, .. } = self.superblocks[number as usize];
            let is_open = (block == current || block == cold) && flash.next_page(block) < self.pages_per_block;
            if flash.live_pages(block) == 0 && !is_open {
                flash.counters.gc_runs += 1;
                self.drop_block(flash, number, block)?;
            }
            block = next;
        }
        Ok(())
    }

    /// One collection inside the superblock: the best of its closed blocks (of equal ones the oldest) is copied out
    /// and erased.
    fn collect<O: Observer>(&mut self, flash: &mut Flash<O>, number: u32) -> Step {
        let Superblock { current, cold, first, .. } = self.superblocks[number as usize];
        let mut room = 0;
        for open in [current, cold] {
            if is_some(open) {
                room += self.pages_per_block - flash.next_page(open);
            }
        }
        let mut garbage = 0;
        let mut best: Option<Victim> = None;
        let mut block = first;
        while is_some(block) {
            let live = flash.live_pages(block);
            let open = block == current || block == cold;
            if !open || flash.next_page(block) == self.pages_per_block {
                garbage += self.pages_per_block - live;
                let age = match self.options.victim {
                    VictimPolicy::Greedy => 0,
                    VictimPolicy::CostBenefit => flash.counters.flash_writes() - self.changed[block as usize],
                };
                let victim = Victim { block, live, age };
                let better = best.is_none_or(|b| victim.is_better(&b, self.options.victim, self.pages_per_block));
                if live < self.pages_per_block && better {
                    best = Some(victim);
                }
            }
            block = self.next_block[block as usize];
        }
        if best.is_none() || garbage + room < self.pages_per_block {
            // What could be won lies in the blocks being written: they are closed, and looked at the next time round.
            let superblock = &mut self.superblocks[number as usize];
            if is_some(superblock.current) || is_some(superblock.cold) {
                (superblock.current, superblock.cold) = (NONE, NONE);
                return Ok(());
            }
        }
        let best = best.ok_or_else(|| out_of_space(flash))?;
        flash.counters.gc_runs += 1;
        self.empty_block(flash, number, best.block)
    }

    /// Copies a block's live pages to the superblock's other blocks and erases it.
    fn empty_block<O: Observer>(&mut self, flash: &mut Flash<O>, number: u32, victim: BlockNumber) -> Step {
        {
            let superblock = &mut self.superblocks[number as usize];
            if superblock.current == victim {
                superblock.current = NONE;
            }
            if superblock.cold == victim {
                superblock.cold = NONE;
            }
        }
        let allowed = self.options.superblock_blocks + self.options.update_blocks;
        for index in 0..flash.words_per_block() {
            let mut word = flash.live_word(victim, index);
            while word != 0 {
                let from = flash.page(victim, index as u32 * 64 + word.trailing_zeros());
                word &= word - 1;
                let Superblock { current, cold, count, .. } = self.superblocks[number as usize];
                let to = if self.has_room(flash, cold) {
                    cold
                } else if self.options.hot_cold && count <= allowed && self.free.len() > self.options.gc_free_blocks {
                    let block = self.add_block(flash, number)?;
                    self.superblocks[number as usize].cold = block;
                    block
                } else if self.has_room(flash, current) {
                    current
                } else {
                    let block = self.add_block(flash, number)?;
                    self.superblocks[number as usize].current = block;
                    block
                };
                let to = flash.page(to, flash.next_page(to));
                let lpn = flash.move_page(from, to)?;
                self.map[lpn as usize] = to;
            }
        }
        self.drop_block(flash, number, victim)
    }
}

impl<O: Observer> Ftl<O> for SuperblockFtl {
    #[inline]
    fn write(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step {
        let number = self.superblock_of(lpn);
        self.lookup(flash, lpn);
        if !self.has_room(flash, self.superblocks[number as usize].current) {
            self.open_update_block(flash, number)?;
        }
        let old = self.map[lpn as usize];
        if is_some(old) {
            self.kill(flash, old)?;
        } else {
            self.superblocks[number as usize].live += 1;
        }
        let current = self.superblocks[number as usize].current;
        let page = flash.page(current, flash.next_page(current));
        flash.write_host(page, lpn)?;
        self.map[lpn as usize] = page;
        self.refresh(number);
        Ok(())
    }

    #[inline]
    fn read(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        self.lookup(flash, lpn);
        let page = self.map[lpn as usize];
        if !is_some(page) {
            return Ok(false);
        }
        flash.read_host(page, lpn)?;
        Ok(true)
    }

    fn trim(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        self.lookup(flash, lpn);
        let old = std::mem::replace(&mut self.map[lpn as usize], NONE);
        if !is_some(old) {
            return Ok(false);
        }
        self.kill(flash, old)?;
        let number = self.superblock_of(lpn);
        self.superblocks[number as usize].live -= 1;
        self.refresh(number);
        Ok(true)
    }

    fn mapped(&self, _flash: &Flash<O>, lpn: Lpn) -> Option<Ppn> {
        Some(self.map[lpn as usize]).filter(|&page| is_some(page))
    }

    fn relocate(&mut self, flash: &mut Flash<O>, block: BlockNumber) -> Step<bool> {
        let Some(page) = flash.first_live(block) else { return Ok(false) };
        let number = self.superblock_of(flash.owner(page));
        if self.free.len() < 2 {
            return Ok(false);
        }
        // Also a block that is being written: that of a cold superblock may stay so for ever.
        let Some(to) = self.free.take_for_cold() else { return Ok(false) };
        self.adopt_block(flash, number, to);
        let map = &mut self.map;
        move_block(flash, block, to, |lpn, page| map[lpn as usize] = page)?;
        self.drop_block(flash, number, block)?;
        self.settle(number);
        Ok(true)
    }

    fn prefetch(&self, flash: &Flash<O>, lpns: &[Lpn]) {
        let mut pages = [NONE; PREFETCH_MAX];
        let mut chains = [NONE; PREFETCH_MAX];
        for ((page, chain), &lpn) in pages.iter_mut().zip(&mut chains).zip(lpns) {
            *page = self.map[lpn as usize];
            *chain = self.superblocks[self.superblock_of(lpn) as usize].current;
        }
        // A superblock that will need another block has all of its blocks looked at, in the order of their list.
        for ((chain, &page), &lpn) in chains.iter_mut().zip(&pages).zip(lpns) {
            flash.prefetch(page);
            let has_room = is_some(*chain) && flash.next_page(*chain) + 1 < self.pages_per_block;
            *chain = if has_room { NONE } else { self.superblocks[self.superblock_of(lpn) as usize].first };
        }
        while chains.iter().any(|&block| is_some(block)) {
            for block in chains.iter_mut().filter(|block| is_some(**block)) {
                std::hint::black_box(flash.live_pages(*block));
                *block = self.next_block[*block as usize];
            }
        }
    }

    fn memory_bytes(&self) -> u64 {
        (self.map.len() * 4
            + self.next_block.len() * 4
            + self.changed.len() * 8
            + self.superblocks.len() * size_of::<Superblock>()) as u64
            + self.free.memory_bytes()
            + self.tables.memory_bytes()
    }
}
