//! The flash memory itself: pages that are free, live or dead, blocks that wear out, and the chip's rules.
//!
//! Rules are enforced on every operation, in release builds too: a page is programmed once between two erases;
//! pages of a block are programmed in ascending order (pages may be skipped, and then stay unused); only dead or
//! free pages are erased; only live pages are read, and they hold what the FTL says they hold. A breach is a
//! bug in an FTL: it comes back as a [`Halt`] and stops the run. This module must never repair one.

use crate::geometry::{BlockNumber, Geometry, Lpn, NONE, Ppn, Timing};
use crate::large_pages::filled;
use serde::Serialize;

/// Why a run stops before its trace ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Halt {
    /// A page was programmed twice without an erase.
    #[error("a bug in the FTL: page {0} was programmed twice without an erase between")]
    ProgrammedTwice(Ppn),
    /// A page was programmed after a later page of its block.
    #[error("a bug in the FTL: page {0} was programmed after a later page of its block")]
    OutOfOrder(Ppn),
    /// A page was read, copied or invalidated that holds nothing.
    #[error("a bug in the FTL: page {0} holds no live data and was used")]
    NotLive(Ppn),
    /// A page holds another logical page than the one looked for.
    #[error("a bug in the FTL: page {0} holds another page than the one looked for")]
    WrongOwner(Ppn),
    /// A block was erased while it held live data.
    #[error("a bug in the FTL: block {0} was erased while it held live pages")]
    LiveErased(BlockNumber),
    /// Garbage collection found nothing to collect.
    #[error("no free block is left and no block holds garbage: give the device more --extra-blocks")]
    NoSpace,
    /// So many blocks went bad that garbage collection cannot go on.
    #[error("the device is worn out: {0} blocks went bad and no spare block is left")]
    WornOut(u32),
}

/// What an FTL operation returns.
pub type Step<T = ()> = Result<T, Halt>;

/// Why a page is programmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The host wrote it.
    Host,
    /// The FTL wrote mapping information.
    Mapping,
}

/// Sees every flash operation: tests count and check through it. The default, `()`, costs nothing.
pub trait Observer {
    /// A page was programmed with new content.
    #[inline(always)]
    fn programmed(&mut self, _page: Ppn, _owner: u32, _purpose: Purpose) {}
    /// A live page's content was copied.
    #[inline(always)]
    fn copied(&mut self, _from: Ppn, _to: Ppn, _owner: u32) {}
    /// A live page was read for the host or for its mapping.
    #[inline(always)]
    fn was_read(&mut self, _page: Ppn, _purpose: Purpose) {}
    /// A page became dead.
    #[inline(always)]
    fn invalidated(&mut self, _page: Ppn) {}
    /// A block was erased.
    #[inline(always)]
    fn erased(&mut self, _block: BlockNumber) {}
}

impl Observer for () {}

/// In which order a block's pages may be programmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProgramOrder {
    /// Ascending, as the K9K4G08U0M data sheet (and every large-block chip) demands.
    Ascending,
    /// Any, as the small-block chips of the FAST paper's time allowed.
    Any,
}

/// What was done to the flash, and why. Everything here can be counted from outside through an [`Observer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Pages read for the host.
    pub host_reads: u64,
    /// Pages programmed for the host.
    pub host_writes: u64,
    /// Pages of mapping information read.
    pub mapping_reads: u64,
    /// Pages of mapping information programmed.
    pub mapping_writes: u64,
    /// Live pages copied (a read and a program each), by garbage collection, merges and wear levelling.
    pub copies: u64,
    /// Those of them that held mapping information.
    pub mapping_copies: u64,
    /// Spare areas read.
    pub spare_reads: u64,
    /// Blocks erased.
    pub erases: u64,
    /// Those of them that held mapping information.
    pub mapping_erases: u64,
    /// Garbage collection: victims reclaimed, or merges done.
    pub gc_runs: u64,
    /// Mapping pages programmed by garbage collection for pages that it moved (part of `mapping_writes`).
    pub gc_mapping_writes: u64,
    /// The mapping pages read for that (part of `mapping_reads`).
    pub gc_mapping_reads: u64,
    /// Switch merges (FAST).
    pub switch_merges: u64,
    /// Partial merges (FAST).
    pub partial_merges: u64,
    /// Full merges of pages in random log blocks (FAST).
    pub full_merges: u64,
    /// Full merges of the sequential log block (FAST); each erases two blocks.
    pub sequential_full_merges: u64,
    /// Random log blocks erased after their merges (FAST).
    pub log_block_erases: u64,
    /// Mapping lookups answered from the cache.
    pub mapping_hits: u64,
    /// Mapping lookups that were not.
    pub mapping_misses: u64,
    /// Blocks moved by static wear levelling.
    pub wear_moves: u64,
    /// Copies made by static wear levelling (part of `copies`).
    pub wear_copies: u64,
    /// Erases by static wear levelling (part of `erases`).
    pub wear_erases: u64,
}

impl Counters {
    /// Pages read from flash for any reason.
    pub fn flash_reads(&self) -> u64 {
        self.host_reads + self.mapping_reads + self.copies
    }

    /// Pages programmed for any reason.
    pub fn flash_writes(&self) -> u64 {
        self.host_writes + self.mapping_writes + self.copies
    }

    /// The time of all operations, one after another, in microseconds.
    #[inline]
    pub fn time_us(&self, timing: &Timing) -> u64 {
        self.flash_reads() * timing.read_us
            + self.flash_writes() * timing.write_us
            + self.erases * timing.erase_us
            + self.spare_reads * timing.spare_read_us
    }

    /// The 2010 paper's garbage collection overhead: copies × (read + write) + erases × erase time. Static wear
    /// levelling is not garbage collection and is left out.
    pub fn gc_time_us(&self, timing: &Timing) -> u64 {
        (self.copies - self.wear_copies) * (timing.read_us + timing.write_us)
            + (self.erases - self.wear_erases) * timing.erase_us
    }
}

#[derive(Clone, Copy, Default)]
struct Block {
    // First page that may be programmed next.
    next: u16,
    live: u16,
    erases: u32,
}

/// The flash memory of a device.
pub struct Flash<O = ()> {
    geometry: Geometry,
    page_bits: u32,
    page_mask: u32,
    words_per_block: usize,
    // What each page holds: a logical page number, or a mapping page's number. Stands for content and spare area.
    owner: Vec<u32>,
    live: Vec<u64>,
    // Only with `ProgramOrder::Any`.
    programmed: Vec<u64>,
    order: ProgramOrder,
    blocks: Vec<Block>,
    erase_limit: u32,
    bad_blocks: u32,
    erase_count_max: u32,
    /// What was done so far.
    pub counters: Counters,
    /// Who watches.
    pub observer: O,
}

impl<O: Observer> Flash<O> {
    /// An erased memory. `erase_limit` is how many erases a block survives (0: any number).
    pub fn new(geometry: Geometry, order: ProgramOrder, erase_limit: u32, observer: O) -> Flash<O> {
        let page_bits = geometry.page_bits();
        let blocks = geometry.physical_blocks() as usize;
        let words_per_block = (1usize << page_bits).div_ceil(64);
        let words = blocks * words_per_block;
        Flash {
            geometry,
            page_bits,
            page_mask: (1 << page_bits) - 1,
            words_per_block,
            owner: filled(blocks << page_bits, 0),
            live: filled(words, 0),
            programmed: if order == ProgramOrder::Any { filled(words, 0) } else { Vec::new() },
            order,
            blocks: filled(blocks, Block::default()),
            erase_limit: if erase_limit == 0 { u32::MAX } else { erase_limit },
            bad_blocks: 0,
            erase_count_max: 0,
            counters: Counters::default(),
            observer,
        }
    }

    /// The geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The page of a block.
    #[inline(always)]
    pub fn page(&self, block: BlockNumber, offset: u32) -> Ppn {
        block << self.page_bits | offset
    }

    /// The block of a page.
    #[inline(always)]
    pub fn block_of(&self, page: Ppn) -> BlockNumber {
        page >> self.page_bits
    }

    /// The page's place in its block.
    #[inline(always)]
    pub fn offset_of(&self, page: Ppn) -> u32 {
        page & self.page_mask
    }

    #[inline(always)]
    fn bit(&self, page: Ppn) -> (usize, u64) {
        // One word holds one block of 64 pages: the word number is then the block number.
        let word = if self.page_bits >= 6 { (page >> 6) as usize } else { (page >> self.page_bits) as usize };
        let bit = if self.page_bits >= 6 { page & 63 } else { page & self.page_mask };
        (word, 1 << bit)
    }

    /// Whether the page holds live data.
    #[inline(always)]
    pub fn is_live(&self, page: Ppn) -> bool {
        let (word, mask) = self.bit(page);
        self.live[word] & mask != 0
    }

    /// What the page holds or held.
    #[inline(always)]
    pub fn owner(&self, page: Ppn) -> u32 {
        self.owner[page as usize]
    }

    /// Live pages of a block.
    #[inline(always)]
    pub fn live_pages(&self, block: BlockNumber) -> u32 {
        u32::from(self.blocks[block as usize].live)
    }

    /// The first page of the block that may be programmed; `pages_per_block` when there is none.
    #[inline(always)]
    pub fn next_page(&self, block: BlockNumber) -> u32 {
        u32::from(self.blocks[block as usize].next)
    }

    /// How often the block was erased.
    pub fn erase_count(&self, block: BlockNumber) -> u32 {
        self.blocks[block as usize].erases
    }

    /// The most erased block's count.
    pub fn erase_count_max(&self) -> u32 {
        self.erase_count_max
    }

    /// How many blocks went bad.
    pub fn bad_blocks(&self) -> u32 {
        self.bad_blocks
    }

    /// How often each block was erased.
    pub fn erase_counts(&self) -> impl Iterator<Item = u32> + '_ {
        self.blocks.iter().map(|b| b.erases)
    }

    /// Whether this page of the block could be programmed now.
    #[inline]
    pub fn can_program(&self, block: BlockNumber, offset: u32) -> bool {
        match self.order {
            ProgramOrder::Ascending => offset >= self.next_page(block),
            ProgramOrder::Any => {
                let (word, mask) = self.bit(self.page(block, offset));
                self.programmed[word] & mask == 0
            }
        }
    }

    /// Live pages of a block as one word of 64 pages: word `index` of `words_per_block`.
    #[inline(always)]
    pub fn live_word(&self, block: BlockNumber, index: usize) -> u64 {
        self.live[block as usize * self.words_per_block + index]
    }

    /// Words of live bits per block.
    #[inline(always)]
    pub fn words_per_block(&self) -> usize {
        self.words_per_block
    }

    #[inline(always)]
    fn program(&mut self, page: Ppn, owner: u32) -> Step {
        let offset = self.offset_of(page);
        let (word, mask) = self.bit(page);
        let block = &mut self.blocks[(page >> self.page_bits) as usize];
        if self.order == ProgramOrder::Ascending {
            if offset < u32::from(block.next) {
                return Err(if self.live[word] & mask != 0 {
                    Halt::ProgrammedTwice(page)
                } else {
                    Halt::OutOfOrder(page)
                });
            }
            block.next = offset as u16 + 1;
        } else {
            if self.programmed[word] & mask != 0 {
                return Err(Halt::ProgrammedTwice(page));
            }
            self.programmed[word] |= mask;
            block.next = block.next.max(offset as u16 + 1);
        }
        block.live += 1;
        self.live[word] |= mask;
        self.owner[page as usize] = owner;
        Ok(())
    }

    /// Programs a page with what the host wrote.
    #[inline(always)]
    pub fn write_host(&mut self, page: Ppn, lpn: Lpn) -> Step {
        self.program(page, lpn)?;
        self.counters.host_writes += 1;
        self.observer.programmed(page, lpn, Purpose::Host);
        Ok(())
    }

    /// Programs a page with mapping information.
    #[inline]
    pub fn write_mapping(&mut self, page: Ppn, number: u32) -> Step {
        self.program(page, number)?;
        self.counters.mapping_writes += 1;
        self.observer.programmed(page, number, Purpose::Mapping);
        Ok(())
    }

    /// Reads a page for the host; it must hold `lpn`.
    #[inline(always)]
    pub fn read_host(&mut self, page: Ppn, lpn: Lpn) -> Step {
        self.check(page, lpn)?;
        self.counters.host_reads += 1;
        self.observer.was_read(page, Purpose::Host);
        Ok(())
    }

    /// Reads a page of mapping information; it must hold mapping page `number`.
    #[inline]
    pub fn read_mapping(&mut self, page: Ppn, number: u32) -> Step {
        self.check(page, number)?;
        self.counters.mapping_reads += 1;
        self.observer.was_read(page, Purpose::Mapping);
        Ok(())
    }

    #[inline(always)]
    fn check(&self, page: Ppn, owner: u32) -> Step {
        if !self.is_live(page) {
            return Err(Halt::NotLive(page));
        }
        if self.owner[page as usize] != owner {
            return Err(Halt::WrongOwner(page));
        }
        Ok(())
    }

    /// Copies a live page to a free one and marks the old copy dead. Returns what it holds.
    #[inline(always)]
    pub fn move_page(&mut self, from: Ppn, to: Ppn) -> Step<u32> {
        let owner = self.owner[from as usize];
        self.kill(from)?;
        self.program(to, owner)?;
        self.counters.copies += 1;
        self.observer.copied(from, to, owner);
        self.observer.invalidated(from);
        Ok(owner)
    }

    #[inline(always)]
    fn kill(&mut self, page: Ppn) -> Step {
        let (word, mask) = self.bit(page);
        if self.live[word] & mask == 0 {
            return Err(Halt::NotLive(page));
        }
        self.live[word] &= !mask;
        self.blocks[(page >> self.page_bits) as usize].live -= 1;
        Ok(())
    }

    /// Marks a live page dead.
    #[inline(always)]
    pub fn invalidate(&mut self, page: Ppn) -> Step {
        self.kill(page)?;
        self.observer.invalidated(page);
        Ok(())
    }

    /// Erases a block without live pages. `false` when it went bad by that and must not be used again.
    #[inline]
    pub fn erase(&mut self, number: BlockNumber) -> Step<bool> {
        let block = &mut self.blocks[number as usize];
        if block.live != 0 {
            return Err(Halt::LiveErased(number));
        }
        block.next = 0;
        block.erases += 1;
        let erases = block.erases;
        self.erase_count_max = self.erase_count_max.max(erases);
        if self.order == ProgramOrder::Any {
            let first = number as usize * self.words_per_block;
            self.programmed[first..first + self.words_per_block].fill(0);
        }
        self.counters.erases += 1;
        self.observer.erased(number);
        let good = erases < self.erase_limit;
        self.bad_blocks += u32::from(!good);
        Ok(good)
    }

    /// The first live page of the block, if any.
    #[inline]
    pub fn first_live(&self, block: BlockNumber) -> Option<Ppn> {
        (0..self.words_per_block).find_map(|index| {
            let word = self.live_word(block, index);
            (word != 0).then(|| self.page(block, index as u32 * 64 + word.trailing_zeros()))
        })
    }

    /// The first live page of the block that lies behind this one, if any.
    #[inline]
    pub fn next_live(&self, page: Ppn) -> Option<Ppn> {
        let (block, after) = (self.block_of(page), self.offset_of(page) + 1);
        (after as usize / 64..self.words_per_block).find_map(|index| {
            let mut word = self.live_word(block, index);
            if index == after as usize / 64 {
                word &= u64::MAX << (after % 64);
            }
            (word != 0).then(|| self.page(block, index as u32 * 64 + word.trailing_zeros()))
        })
    }

    /// Looks at what an operation on this page will look at first, and nothing else.
    #[inline(always)]
    pub fn prefetch(&self, page: Ppn) {
        if is_some(page) {
            let (word, _) = self.bit(page);
            std::hint::black_box(self.live[word]);
            std::hint::black_box(self.blocks[(page >> self.page_bits) as usize].live);
        }
    }

    /// The same for an operation that also reads the page.
    #[inline(always)]
    pub fn prefetch_content(&self, page: Ppn) {
        self.prefetch(page);
        if is_some(page) {
            std::hint::black_box(self.owner[page as usize]);
        }
    }

    /// Forgets what was counted (wear stays): the end of preconditioning or warm-up.
    pub fn reset_counters(&mut self) {
        self.counters = Counters::default();
    }

    /// Bytes of memory this model uses.
    pub fn memory_bytes(&self) -> u64 {
        (self.owner.len() * 4 + (self.live.len() + self.programmed.len()) * 8 + self.blocks.len() * size_of::<Block>())
            as u64
    }
}

/// Whether a page number is one.
#[inline(always)]
pub(crate) fn is_some(page: u32) -> bool {
    page != NONE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flash(order: ProgramOrder, limit: u32) -> Flash {
        Flash::new(Geometry { blocks: 4, pages_per_block: 6, page_bytes: 2048, extra_blocks: 2 }, order, limit, ())
    }

    #[test]
    fn a_page_is_programmed_once_and_in_order() {
        let mut flash = flash(ProgramOrder::Ascending, 0);
        let page = |block: u32, offset: u32| block << 3 | offset;
        assert_eq!(flash.write_host(page(1, 2), 7), Ok(()));
        assert_eq!(flash.write_host(page(1, 2), 7), Err(Halt::ProgrammedTwice(page(1, 2))));
        assert_eq!(flash.write_host(page(1, 1), 7), Err(Halt::OutOfOrder(page(1, 1))));
        assert_eq!(flash.write_host(page(1, 5), 8), Ok(()));
        assert_eq!((flash.next_page(1), flash.live_pages(1)), (6, 2));
        assert_eq!(flash.erase(1), Err(Halt::LiveErased(1)));
        flash.invalidate(page(1, 2)).unwrap();
        assert_eq!(flash.invalidate(page(1, 2)), Err(Halt::NotLive(page(1, 2))));
        assert_eq!(flash.read_host(page(1, 2), 7), Err(Halt::NotLive(page(1, 2))));
        assert_eq!(flash.read_host(page(1, 5), 7), Err(Halt::WrongOwner(page(1, 5))));
        assert_eq!(flash.move_page(page(1, 5), page(2, 0)), Ok(8));
        assert_eq!(flash.erase(1), Ok(true));
        assert_eq!(flash.write_host(page(1, 0), 1), Ok(()));
        assert_eq!((flash.counters.flash_writes(), flash.counters.flash_reads(), flash.counters.erases), (4, 1, 1));
    }

    #[test]
    fn small_block_chips_take_pages_in_any_order_but_once() {
        let mut flash = flash(ProgramOrder::Any, 0);
        flash.write_host(5, 1).unwrap();
        flash.write_host(1, 2).unwrap();
        assert_eq!(flash.write_host(1, 2), Err(Halt::ProgrammedTwice(1)));
        assert!(flash.can_program(0, 0) && !flash.can_program(0, 5));
        flash.invalidate(5).unwrap();
        flash.invalidate(1).unwrap();
        assert!(!flash.can_program(0, 5));
        flash.erase(0).unwrap();
        assert!(flash.can_program(0, 5));
    }

    #[test]
    fn live_pages_are_found_one_after_another() {
        for pages_per_block in [6, 64, 100, 128] {
            let geometry = Geometry { blocks: 4, pages_per_block, page_bytes: 2048, extra_blocks: 2 };
            let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
            let offsets: Vec<u32> = (0..pages_per_block).filter(|o| o % 5 == 3 || o % 64 == 63).collect();
            offsets.iter().for_each(|&o| flash.write_host(flash.page(2, o), 1).unwrap());
            let live: Vec<u32> = std::iter::successors(flash.first_live(2), |&page| flash.next_live(page)).collect();
            assert_eq!(live, offsets.iter().map(|&o| flash.page(2, o)).collect::<Vec<_>>());
            assert_eq!(flash.first_live(1), None);
        }
    }

    #[test]
    fn a_block_goes_bad_at_its_limit() {
        let mut flash = flash(ProgramOrder::Ascending, 2);
        assert_eq!(flash.erase(0), Ok(true));
        assert_eq!(flash.erase(0), Ok(false));
        assert_eq!((flash.bad_blocks(), flash.erase_count_max()), (1, 2));
    }

    #[test]
    fn gc_time_is_the_papers() {
        let counters = Counters { copies: 10, erases: 3, host_writes: 5, ..Counters::default() };
        let timing = Timing::default();
        assert_eq!(counters.gc_time_us(&timing), 10 * (88 + 263) + 3 * 2000);
        assert_eq!(counters.time_us(&timing), 10 * 88 + 15 * 263 + 3 * 2000);
    }
}
