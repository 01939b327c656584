//! Slow, obvious models of the FTLs: they scan where the real ones index, and keep whole copies where the real
//! ones keep counts. They share no code with the crate.

#![allow(dead_code)] // Each test binary uses some of it.

pub mod dftl;
pub mod fast;
pub mod page;
pub mod superblock;

use std::collections::VecDeque;

/// Where a page is: block and offset.
pub type Place = (usize, usize);

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Slot {
    Free,
    Live(u32),
    Dead,
}

#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Totals {
    pub host_reads: u64,
    pub host_writes: u64,
    pub mapping_reads: u64,
    pub mapping_writes: u64,
    pub copies: u64,
    pub spare_reads: u64,
    pub erases: u64,
    pub gc_runs: u64,
    pub switch: u64,
    pub partial: u64,
    pub full: u64,
    pub sequential_full: u64,
    pub log_erases: u64,
    pub hits: u64,
    pub misses: u64,
}

/// Flash as a table of slots.
pub struct Slow {
    pub pages: usize,
    pub blocks: Vec<Vec<Slot>>,
    pub erases: Vec<u32>,
    pub free: VecDeque<usize>,
    // Dynamic wear levelling: the least erased free block is used first.
    pub levelling: bool,
    pub totals: Totals,
    // For victim choice: when (in order, and in page programs) a block's live count last changed.
    pub changed: Vec<(u64, u64)>,
    clock: u64,
}

impl Slow {
    pub fn new(blocks: usize, pages: usize) -> Slow {
        Slow {
            pages,
            blocks: vec![vec![Slot::Free; pages]; blocks],
            erases: vec![0; blocks],
            free: (0..blocks).collect(),
            levelling: false,
            totals: Totals::default(),
            changed: vec![(0, 0); blocks],
            clock: 0,
        }
    }

    /// The next free block.
    pub fn take(&mut self) -> usize {
        let mut at = 0;
        if self.levelling {
            for (index, &block) in self.free.iter().enumerate() {
                let best = self.free[at];
                if (self.erases[block], block) < (self.erases[best], best) {
                    at = index;
                }
            }
        }
        self.free.remove(at).expect("a free block")
    }

    pub fn programs(&self) -> u64 {
        self.totals.host_writes + self.totals.mapping_writes + self.totals.copies
    }

    pub fn live(&self, block: usize) -> usize {
        self.blocks[block].iter().filter(|s| matches!(s, Slot::Live(_))).count()
    }

    pub fn note_change(&mut self, block: usize) {
        self.clock += 1;
        self.changed[block] = (self.clock, self.programs());
    }

    pub fn next_offset(&self, block: usize) -> usize {
        self.blocks[block].iter().rposition(|s| *s != Slot::Free).map_or(0, |p| p + 1)
    }

    pub fn is_full(&self, block: usize) -> bool {
        self.next_offset(block) == self.pages
    }

    pub fn put(&mut self, (block, offset): Place, owner: u32) {
        assert_eq!(self.blocks[block][offset], Slot::Free);
        self.blocks[block][offset] = Slot::Live(owner);
    }

    pub fn kill(&mut self, (block, offset): Place) {
        assert!(matches!(self.blocks[block][offset], Slot::Live(_)));
        self.blocks[block][offset] = Slot::Dead;
        self.note_change(block);
    }

    pub fn copy(&mut self, from: Place, to: Place) -> u32 {
        let Slot::Live(owner) = self.blocks[from.0][from.1] else { panic!("copy of nothing") };
        self.blocks[from.0][from.1] = Slot::Dead;
        self.put(to, owner);
        self.totals.copies += 1;
        owner
    }

    pub fn erase(&mut self, block: usize) {
        assert_eq!(self.live(block), 0, "live pages erased");
        self.blocks[block].fill(Slot::Free);
        self.erases[block] += 1;
        self.totals.erases += 1;
        self.free.push_back(block);
    }

    pub fn live_pages(&self, block: usize) -> Vec<Place> {
        (0..self.pages).filter(|&o| matches!(self.blocks[block][o], Slot::Live(_))).map(|o| (block, o)).collect()
    }

    /// The best of these blocks to reclaim, with its worth for comparing kinds; blocks without garbage do not count.
    pub fn victim(&self, candidates: &[usize], cost_benefit: bool) -> Option<usize> {
        let mut best: Option<usize> = None;
        let mut order: Vec<usize> = candidates.iter().copied().filter(|&b| self.live(b) < self.pages).collect();
        order.sort_by_key(|&b| (self.live(b), self.changed[b].0));
        for block in order {
            if best.is_none_or(|b| self.better(block, b, cost_benefit)) {
                best = Some(block);
            }
        }
        best
    }

    /// Whether `a` is strictly the better victim.
    pub fn better(&self, a: usize, b: usize, cost_benefit: bool) -> bool {
        let (live_a, live_b) = (self.live(a) as u128, self.live(b) as u128);
        if !cost_benefit {
            return live_a < live_b;
        }
        if live_a == 0 || live_b == 0 {
            return live_a == 0 && live_b != 0;
        }
        let age = |x: usize| u128::from(self.programs() - self.changed[x].1);
        let pages = self.pages as u128;
        age(a) * (pages - live_a) * live_b > age(b) * (pages - live_b) * live_a
    }
}

/// What every slow model can do.
pub trait Model {
    fn write(&mut self, lpn: u32);
    fn read(&mut self, lpn: u32) -> bool;
    fn trim(&mut self, lpn: u32) -> bool;
    fn flash(&self) -> &Slow;
    fn flash_mut(&mut self) -> &mut Slow;
}
