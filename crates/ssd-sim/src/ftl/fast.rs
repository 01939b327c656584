//! FAST (Lee, Park, Chung, Lee, Park, Song: "A Log Buffer-based Flash Translation Layer Using Fully-associative
//! Sector Translation", ACM TECS 6(3), 2007).
//!
//! Data blocks are mapped by block. Updates go to log blocks: one sequential (SW) log block, which takes a
//! logical block from its first page on, and R random (RW) log blocks, which take any page and are reclaimed
//! round robin. Terms are the paper's: **switch merge** (a full SW log block becomes the data block), **partial
//! merge** (the rest is copied into the SW log block, which then becomes the data block) and **full merge** (all
//! newest copies of a logical block are gathered in a new block).
//!
//! Identity, checked by tests: erases = switch + partial + full + 2 × full of SW + reclaimed RW log blocks.

use super::page::out_of_space;
use super::{Ftl, PREFETCH_MAX};
use crate::blocks::FreeBlocks;
use crate::flash::{Flash, Observer, Step, is_some};
use crate::geometry::{BlockNumber, Geometry, Lpn, NONE, Ppn};
use crate::large_pages::filled;
use std::collections::VecDeque;

/// What happens to a write of the SW log block's owner that does not continue it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SequentialGap {
    /// The page in flight takes part in the merge: a partial merge when it lies after the last page, a full one otherwise.
    MergeInFlight,
    /// The SW log block is merged, then the page begins a new one at its own offset (as the paper's write algorithm has it).
    MergeThenAppend,
}

/// Parameters of FAST.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct FastOptions {
    /// R, the most random log blocks. Default: extra blocks − 1 (DFTL's evaluation gives FAST its 3 % as log blocks,
    /// one of them sequential). Two blocks are always kept free for merges, so fewer may be in use on a full device.
    pub rw_log_blocks: u32,
    /// What a gap in the sequential stream does.
    pub sw_gap: SequentialGap,
}

impl FastOptions {
    /// The defaults for a geometry.
    pub fn for_geometry(geometry: &Geometry) -> FastOptions {
        FastOptions {
            rw_log_blocks: geometry.extra_blocks.saturating_sub(1).max(1),
            sw_gap: SequentialGap::MergeInFlight,
        }
    }

    /// Says what does not fit the geometry.
    pub fn check(&self, geometry: &Geometry) -> Result<(), String> {
        if geometry.extra_blocks < 4 {
            let extra = geometry.extra_blocks;
            return Err(format!(
                "FAST needs --extra-blocks of at least 4 (here {extra}): two log blocks and two for merges"
            ));
        }
        if self.rw_log_blocks == 0 || self.rw_log_blocks >= geometry.extra_blocks {
            return Err(format!(
                "--rw-log-blocks {} needs to be from 1 to {}, one less than --extra-blocks",
                self.rw_log_blocks,
                geometry.extra_blocks - 1
            ));
        }
        Ok(())
    }
}

/// Blocks that stay free for merges.
const MERGE_BLOCKS: u32 = 2;

/// Page numbers that lie in 64 bytes.
const ENTRIES_PER_CACHE_LINE: usize = 16;

#[derive(Clone, Copy)]
struct SequentialLog {
    block: BlockNumber,
    owner: u32,
    // First and next offset; pages lie at their own offsets.
    start: u32,
    next: u32,
}

/// FAST.
pub struct Fast {
    options: FastOptions,
    pages_per_block: u32,
    data: Vec<BlockNumber>,
    // Where a page's newest copy is when it is in a log block.
    log: Vec<Ppn>,
    sequential: Option<SequentialLog>,
    random: VecDeque<BlockNumber>,
    free: FreeBlocks,
}

impl Fast {
    /// On an erased flash.
    pub fn new(geometry: &Geometry, options: FastOptions, wear_levelling: bool) -> Fast {
        Fast {
            options,
            pages_per_block: geometry.pages_per_block,
            data: filled(geometry.blocks as usize, NONE),
            log: filled(geometry.logical_pages() as usize, NONE),
            sequential: None,
            random: VecDeque::new(),
            free: FreeBlocks::new(geometry.physical_blocks(), wear_levelling),
        }
    }

    #[inline(always)]
    fn split(&self, lpn: Lpn) -> (u32, u32) {
        let pages = self.pages_per_block;
        if pages.is_power_of_two() {
            (lpn >> pages.trailing_zeros(), lpn & (pages - 1))
        } else {
            (lpn / pages, lpn % pages)
        }
    }

    /// The newest copy of a page.
    #[inline(always)]
    fn newest<O: Observer>(&self, flash: &Flash<O>, lbn: u32, offset: u32) -> Option<Ppn> {
        let in_log = self.log[(lbn * self.pages_per_block + offset) as usize];
        if is_some(in_log) {
            return Some(in_log);
        }
        let data = self.data[lbn as usize];
        let page = flash.page(data, offset);
        (is_some(data) && flash.is_live(page)).then_some(page)
    }

    fn take_for_merge<O: Observer>(&mut self, flash: &Flash<O>) -> Step<BlockNumber> {
        self.free.take().ok_or_else(|| out_of_space(flash))
    }

    /// A block for data or logs, leaving what merges need.
    fn take_block<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step<BlockNumber> {
        while self.free.len() <= MERGE_BLOCKS {
            if self.random.is_empty() {
                break;
            }
            self.reclaim_oldest(flash)?;
        }
        self.free.take().ok_or_else(|| out_of_space(flash))
    }

    fn erase<O: Observer>(&mut self, flash: &mut Flash<O>, block: BlockNumber) -> Step {
        if flash.erase(block)? {
            self.free.put(block, flash.erase_count(block));
        }
        Ok(())
    }

    /// Copies the newest copies of the offsets into the block, log copies forgotten; those in the SW log block
    /// stay where they are unless it is `with_sequential`.
    fn gather<O: Observer>(
        &mut self,
        flash: &mut Flash<O>,
        lbn: u32,
        offsets: std::ops::Range<u32>,
        to: BlockNumber,
        with_sequential: bool,
    ) -> Step {
        let first = lbn * self.pages_per_block;
        let data = self.data[lbn as usize];
        let kept = match self.sequential {
            Some(sequential) if !with_sequential && sequential.owner == lbn => sequential.block,
            _ => NONE,
        };
        for offset in offsets {
            let in_log = &mut self.log[(first + offset) as usize];
            let from = if is_some(*in_log) {
                if flash.block_of(*in_log) == kept {
                    continue;
                }
                std::mem::replace(in_log, NONE)
            } else {
                let page = flash.page(data, offset);
                if !flash.is_live(page) {
                    continue;
                }
                page
            };
            flash.move_page(from, flash.page(to, offset))?;
        }
        Ok(())
    }

    /// The SW log block becomes the data block: its pages are no longer log copies, the old data block is erased.
    fn adopt<O: Observer>(&mut self, flash: &mut Flash<O>, sequential: SequentialLog) -> Step {
        let first = sequential.owner * self.pages_per_block;
        for offset in sequential.start..sequential.next {
            let in_log = &mut self.log[(first + offset) as usize];
            if *in_log == flash.page(sequential.block, offset) {
                *in_log = NONE;
            }
        }
        let old = std::mem::replace(&mut self.data[sequential.owner as usize], sequential.block);
        // A newer copy in an RW log block has made its data page dead already, and trimmed pages are dead.
        self.erase(flash, old)
    }

    /// Merges the SW log block away: switch when it is whole, partial when it begins at 0, full otherwise.
    fn retire_sequential<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        let Some(sequential) = self.sequential else { return Ok(()) };
        flash.counters.gc_runs += 1;
        if sequential.start > 0 {
            return self.full_merge_sequential(flash, sequential, None);
        }
        self.sequential = None;
        if sequential.next == self.pages_per_block {
            flash.counters.switch_merges += 1;
        } else {
            flash.counters.partial_merges += 1;
            self.gather(flash, sequential.owner, sequential.next..self.pages_per_block, sequential.block, true)?;
        }
        self.adopt(flash, sequential)
    }

    /// All newest pages of the SW log block's owner go to a new block, with the page in flight if there is one.
    fn full_merge_sequential<O: Observer>(
        &mut self,
        flash: &mut Flash<O>,
        sequential: SequentialLog,
        in_flight: Option<u32>,
    ) -> Step {
        flash.counters.sequential_full_merges += 1;
        let to = self.take_for_merge(flash)?;
        let owner = sequential.owner;
        self.sequential = None;
        if let Some(offset) = in_flight {
            self.forget(flash, owner, offset)?;
            self.gather(flash, owner, 0..offset, to, true)?;
            flash.write_host(flash.page(to, offset), owner * self.pages_per_block + offset)?;
            self.gather(flash, owner, offset + 1..self.pages_per_block, to, true)?;
        } else {
            self.gather(flash, owner, 0..self.pages_per_block, to, true)?;
        }
        let old = std::mem::replace(&mut self.data[owner as usize], to);
        self.erase(flash, sequential.block)?;
        self.erase(flash, old)
    }

    /// The page in flight lies after the SW log block's last page: it takes its place in the partial merge.
    fn partial_merge_in_flight<O: Observer>(
        &mut self,
        flash: &mut Flash<O>,
        sequential: SequentialLog,
        offset: u32,
    ) -> Step {
        flash.counters.partial_merges += 1;
        self.sequential = None;
        let (owner, block) = (sequential.owner, sequential.block);
        self.forget(flash, owner, offset)?;
        self.gather(flash, owner, sequential.next..offset, block, true)?;
        flash.write_host(flash.page(block, offset), owner * self.pages_per_block + offset)?;
        self.gather(flash, owner, offset + 1..self.pages_per_block, block, true)?;
        self.adopt(flash, sequential)
    }

    /// The newest copy of a page dies.
    fn forget<O: Observer>(&mut self, flash: &mut Flash<O>, lbn: u32, offset: u32) -> Step<bool> {
        let Some(old) = self.newest(flash, lbn, offset) else { return Ok(false) };
        self.log[(lbn * self.pages_per_block + offset) as usize] = NONE;
        flash.invalidate(old)?;
        Ok(true)
    }

    /// The oldest RW log block: one full merge for each logical block that is live in it, then its erase.
    fn reclaim_oldest<O: Observer>(&mut self, flash: &mut Flash<O>) -> Step {
        let Some(victim) = self.random.pop_front() else { return Err(out_of_space(flash)) };
        while let Some(page) = flash.first_live(victim) {
            let (lbn, _) = self.split(flash.owner(page));
            if let Some(next) = flash.next_live(page) {
                self.look_ahead(flash, flash.owner(next));
            }
            flash.counters.gc_runs += 1;
            flash.counters.full_merges += 1;
            let to = self.take_for_merge(flash)?;
            self.gather(flash, lbn, 0..self.pages_per_block, to, false)?;
            let old = std::mem::replace(&mut self.data[lbn as usize], to);
            self.erase(flash, old)?;
        }
        flash.counters.log_block_erases += 1;
        self.erase(flash, victim)
    }

    /// Looks at what a full merge of this page's logical block will look at, and nothing else: while another merge goes
    /// on, the cache misses of this one overlap.
    fn look_ahead<O: Observer>(&self, flash: &Flash<O>, lpn: Lpn) {
        let (lbn, _) = self.split(lpn);
        let first = (lbn * self.pages_per_block) as usize;
        let data = self.data[lbn as usize];
        if !is_some(data) {
            return;
        }
        for offset in (0..self.pages_per_block).step_by(ENTRIES_PER_CACHE_LINE) {
            std::hint::black_box(self.log[first + offset as usize]);
            flash.prefetch_content(flash.page(data, offset));
        }
    }

    fn append_random<O: Observer>(&mut self, flash: &mut Flash<O>, lbn: u32, offset: u32) -> Step {
        let is_full = |block: &BlockNumber| flash.next_page(*block) >= self.pages_per_block;
        if self.random.back().is_none_or(is_full) {
            while self.random.len() as u32 >= self.options.rw_log_blocks {
                self.reclaim_oldest(flash)?;
            }
            let block = self.take_block(flash)?;
            self.random.push_back(block);
        }
        let Some(&block) = self.random.back() else { return Err(out_of_space(flash)) };
        // Reclaiming may have moved the page.
        self.forget(flash, lbn, offset)?;
        let page = flash.page(block, flash.next_page(block));
        let lpn = lbn * self.pages_per_block + offset;
        flash.write_host(page, lpn)?;
        self.log[lpn as usize] = page;
        Ok(())
    }

    fn append_sequential<O: Observer>(&mut self, flash: &mut Flash<O>, lbn: u32, offset: u32) -> Step {
        self.forget(flash, lbn, offset)?;
        let Some(sequential) = &mut self.sequential else { return Err(out_of_space(flash)) };
        let page = flash.page(sequential.block, offset);
        sequential.next = offset + 1;
        let lpn = lbn * self.pages_per_block + offset;
        flash.write_host(page, lpn)?;
        self.log[lpn as usize] = page;
        Ok(())
    }

    fn begin_sequential<O: Observer>(&mut self, flash: &mut Flash<O>, lbn: u32, offset: u32) -> Step {
        let block = self.take_block(flash)?;
        self.sequential = Some(SequentialLog { block, owner: lbn, start: offset, next: offset });
        self.append_sequential(flash, lbn, offset)
    }

    fn write_to_log<O: Observer>(&mut self, flash: &mut Flash<O>, lbn: u32, offset: u32) -> Step {
        if offset == 0 {
            self.retire_sequential(flash)?;
            return self.begin_sequential(flash, lbn, 0);
        }
        match self.sequential {
            Some(sequential) if sequential.owner == lbn => {
                if offset == sequential.next {
                    return self.append_sequential(flash, lbn, offset);
                }
                match self.options.sw_gap {
                    SequentialGap::MergeInFlight => {
                        flash.counters.gc_runs += 1;
                        if offset > sequential.next {
                            self.partial_merge_in_flight(flash, sequential, offset)
                        } else {
                            self.full_merge_sequential(flash, sequential, Some(offset))
                        }
                    }
                    SequentialGap::MergeThenAppend => {
                        self.retire_sequential(flash)?;
                        self.begin_sequential(flash, lbn, offset)
                    }
                }
            }
            _ => self.append_random(flash, lbn, offset),
        }
    }
}

impl<O: Observer> Ftl<O> for Fast {
    #[inline]
    fn write(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step {
        let (lbn, offset) = self.split(lpn);
        if !is_some(self.data[lbn as usize]) {
            self.data[lbn as usize] = self.take_block(flash)?;
        }
        let data = self.data[lbn as usize];
        // A slot whose page is in the SW log block is not free, even if a full merge left it open in between.
        let in_sequential = self.sequential.is_some_and(|s| s.owner == lbn && (s.start..s.next).contains(&offset));
        if flash.can_program(data, offset) && !in_sequential {
            self.forget(flash, lbn, offset)?;
            return flash.write_host(flash.page(data, offset), lpn);
        }
        self.write_to_log(flash, lbn, offset)
    }

    #[inline]
    fn read(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        let (lbn, offset) = self.split(lpn);
        match self.newest(flash, lbn, offset) {
            Some(page) => flash.read_host(page, lpn).map(|()| true),
            None => Ok(false),
        }
    }

    fn trim(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool> {
        let (lbn, offset) = self.split(lpn);
        self.forget(flash, lbn, offset)
    }

    fn mapped(&self, flash: &Flash<O>, lpn: Lpn) -> Option<Ppn> {
        let (lbn, offset) = self.split(lpn);
        self.newest(flash, lbn, offset)
    }

    fn relocate(&mut self, flash: &mut Flash<O>, block: BlockNumber) -> Step<bool> {
        let Some(page) = flash.first_live(block) else { return Ok(false) };
        let (lbn, _) = self.split(flash.owner(page));
        // Only data blocks are ever cold; log blocks move on by themselves.
        if self.data[lbn as usize] != block || self.free.len() <= MERGE_BLOCKS {
            return Ok(false);
        }
        let Some(to) = self.free.take_for_cold() else { return Ok(false) };
        for offset in 0..self.pages_per_block {
            let from = flash.page(block, offset);
            if flash.is_live(from) {
                flash.move_page(from, flash.page(to, offset))?;
            }
        }
        self.data[lbn as usize] = to;
        self.erase(flash, block)?;
        Ok(true)
    }

    fn prefetch(&self, flash: &Flash<O>, lpns: &[Lpn]) {
        let mut pages = [NONE; PREFETCH_MAX];
        for (page, &lpn) in pages.iter_mut().zip(lpns) {
            let (lbn, offset) = self.split(lpn);
            let data = self.data[lbn as usize];
            *page = match self.log[lpn as usize] {
                NONE if is_some(data) => flash.page(data, offset),
                in_log => in_log,
            };
        }
        pages.iter().for_each(|&page| flash.prefetch(page));
    }

    fn memory_bytes(&self) -> u64 {
        (self.data.len() + self.log.len() + self.random.capacity()) as u64 * 4 + self.free.memory_bytes()
    }
}
