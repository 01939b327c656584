//! Superblock FTL, slowly.

use super::{Model, Place, Slow};
use std::collections::HashMap;

#[derive(Default, Clone)]
struct Superblock {
    blocks: Vec<usize>,
    current: Option<usize>,
    cold: Option<usize>,
    live: usize,
    // When a page of it was last written or trimmed.
    touched: u64,
}

pub struct SuperblockModel {
    pub flash: Slow,
    map: HashMap<u32, Place>,
    superblocks: Vec<Superblock>,
    pages_per_superblock: u32,
    allowed: usize,
    reserve: usize,
    hot_cold: bool,
    cost_benefit: bool,
    // Page tables in RAM, most recent first.
    tables: Vec<u32>,
    table_capacity: usize,
    clock: u64,
    // Superblocks leave the order of recency while they have nothing to win, and come back with their next write.
    listed: Vec<usize>,
}

impl SuperblockModel {
    #[allow(clippy::too_many_arguments)] // A test says them once.
    pub fn new(
        logical: usize,
        extra: usize,
        pages: usize,
        n: usize,
        m: usize,
        reserve: usize,
        tables: usize,
        hot_cold: bool,
        cost_benefit: bool,
    ) -> SuperblockModel {
        SuperblockModel {
            flash: Slow::new(logical + extra, pages),
            map: HashMap::new(),
            superblocks: vec![Superblock::default(); logical.div_ceil(n)],
            pages_per_superblock: (n * pages) as u32,
            allowed: n + m,
            reserve,
            hot_cold,
            cost_benefit,
            tables: Vec::new(),
            table_capacity: tables,
            clock: 0,
            listed: Vec::new(),
        }
    }

    fn lookup(&mut self, lpn: u32) {
        let table = lpn / 8;
        if let Some(at) = self.tables.iter().position(|&t| t == table) {
            self.tables.remove(at);
            self.flash.totals.hits += 1;
        } else {
            self.flash.totals.misses += 1;
            if !self.superblocks[(lpn / self.pages_per_superblock) as usize].blocks.is_empty() {
                self.flash.totals.spare_reads += 2;
            }
            if self.tables.len() == self.table_capacity {
                self.tables.pop();
            }
        }
        self.tables.insert(0, table);
    }

    fn could_lose_a_block(&self, s: usize) -> bool {
        let needed = self.superblocks[s].live.div_ceil(self.flash.pages);
        self.superblocks[s].blocks.len() > needed
    }

    fn touch(&mut self, s: usize) {
        self.listed.retain(|&l| l != s);
        if self.could_lose_a_block(s) {
            self.listed.push(s);
        }
    }

    fn with_room(&self, block: Option<usize>) -> Option<usize> {
        block.filter(|&b| !self.flash.is_full(b))
    }

    fn drop_block(&mut self, s: usize, block: usize) {
        let superblock = &mut self.superblocks[s];
        superblock.blocks.retain(|&b| b != block);
        for open in [&mut superblock.current, &mut superblock.cold] {
            if *open == Some(block) {
                *open = None;
            }
        }
        self.flash.erase(block);
    }

    fn add_block(&mut self, s: usize) -> usize {
        let block = self.flash.take();
        self.superblocks[s].blocks.push(block);
        self.flash.note_change(block);
        block
    }

    fn collect(&mut self, s: usize) {
        let Superblock { blocks, current, cold, .. } = self.superblocks[s].clone();
        let open: Vec<usize> = [current, cold].into_iter().flatten().filter(|&b| !self.flash.is_full(b)).collect();
        let closed: Vec<usize> = blocks.into_iter().filter(|b| !open.contains(b)).collect();
        let room: usize = open.iter().map(|&b| self.flash.pages - self.flash.next_offset(b)).sum();
        let garbage: usize = closed.iter().map(|&b| self.flash.pages - self.flash.live(b)).sum();
        let mut best: Option<usize> = None;
        for &block in closed.iter().filter(|&&b| self.flash.live(b) < self.flash.pages) {
            if best.is_none_or(|b| self.flash.better(block, b, self.cost_benefit)) {
                best = Some(block);
            }
        }
        if (best.is_none() || garbage + room < self.flash.pages) && (current.is_some() || cold.is_some()) {
            self.superblocks[s].current = None;
            self.superblocks[s].cold = None;
            return;
        }
        let victim = best.expect("garbage");
        self.flash.totals.gc_runs += 1;
        let superblock = &mut self.superblocks[s];
        for open in [&mut superblock.current, &mut superblock.cold] {
            if *open == Some(victim) {
                *open = None;
            }
        }
        for from in self.flash.live_pages(victim) {
            let superblock = &self.superblocks[s];
            let to = if let Some(cold) = self.with_room(superblock.cold) {
                cold
            } else if self.hot_cold && superblock.blocks.len() <= self.allowed && self.flash.free.len() > self.reserve {
                let block = self.add_block(s);
                self.superblocks[s].cold = Some(block);
                block
            } else if let Some(current) = self.with_room(superblock.current) {
                current
            } else {
                let block = self.add_block(s);
                self.superblocks[s].current = Some(block);
                block
            };
            let to = (to, self.flash.next_offset(to));
            let lpn = self.flash.copy(from, to);
            self.map.insert(lpn, to);
        }
        self.drop_block(s, victim);
    }

    fn open(&mut self, s: usize) {
        self.superblocks[s].current = None;
        for block in self.superblocks[s].blocks.clone() {
            let is_open = self.with_room(self.superblocks[s].cold) == Some(block);
            if self.flash.live(block) == 0 && !is_open {
                self.flash.totals.gc_runs += 1;
                self.drop_block(s, block);
            }
        }
        while self.with_room(self.superblocks[s].current).is_none() {
            if self.superblocks[s].blocks.len() >= self.allowed {
                self.collect(s);
            } else if self.flash.free.len() > self.reserve {
                let block = self.add_block(s);
                self.superblocks[s].current = Some(block);
            } else {
                let victim = *self.listed.first().expect("a superblock that could lose a block");
                self.collect(victim);
                if !self.could_lose_a_block(victim) {
                    self.listed.retain(|&l| l != victim);
                }
            }
        }
    }
}

impl Model for SuperblockModel {
    fn write(&mut self, lpn: u32) {
        let s = (lpn / self.pages_per_superblock) as usize;
        self.lookup(lpn);
        if self.with_room(self.superblocks[s].current).is_none() {
            self.open(s);
        }
        match self.map.get(&lpn) {
            Some(&old) => self.flash.kill(old),
            None => self.superblocks[s].live += 1,
        }
        let block = self.superblocks[s].current.unwrap();
        let to = (block, self.flash.next_offset(block));
        self.flash.put(to, lpn);
        self.flash.totals.host_writes += 1;
        self.map.insert(lpn, to);
        self.touch(s);
    }

    fn read(&mut self, lpn: u32) -> bool {
        self.lookup(lpn);
        let mapped = self.map.contains_key(&lpn);
        self.flash.totals.host_reads += u64::from(mapped);
        mapped
    }

    fn trim(&mut self, lpn: u32) -> bool {
        self.lookup(lpn);
        let Some(old) = self.map.remove(&lpn) else { return false };
        self.flash.kill(old);
        let s = (lpn / self.pages_per_superblock) as usize;
        self.superblocks[s].live -= 1;
        self.touch(s);
        true
    }

    fn flash(&self) -> &Slow {
        &self.flash
    }
    fn flash_mut(&mut self) -> &mut Slow {
        &mut self.flash
    }
}
