//! Page-mapped, slowly.

use super::{Model, Place, Slow};
use std::collections::HashMap;

pub struct Page {
    pub flash: Slow,
    map: HashMap<u32, Place>,
    active: Option<usize>,
    threshold: usize,
    cost_benefit: bool,
}

impl Page {
    pub fn new(blocks: usize, pages: usize, threshold: usize, cost_benefit: bool) -> Page {
        Page { flash: Slow::new(blocks, pages), map: HashMap::new(), active: None, threshold, cost_benefit }
    }

    fn active_full(&self) -> bool {
        self.active.is_none_or(|b| self.flash.is_full(b))
    }

    fn open(&mut self) {
        if let Some(block) = self.active {
            self.flash.note_change(block);
        }
        self.active = Some(self.flash.take());
    }

    fn next(&mut self) -> Place {
        if self.active_full() {
            self.open();
        }
        let block = self.active.unwrap();
        (block, self.flash.next_offset(block))
    }
}

impl Model for Page {
    fn write(&mut self, lpn: u32) {
        if self.active_full() {
            while self.flash.free.len() <= self.threshold {
                let free = &self.flash.free;
                let closed: Vec<usize> =
                    (0..self.flash.blocks.len()).filter(|b| !free.contains(b) && Some(*b) != self.active).collect();
                let victim = self.flash.victim(&closed, self.cost_benefit).expect("garbage");
                self.flash.totals.gc_runs += 1;
                for from in self.flash.live_pages(victim) {
                    let to = self.next();
                    let owner = self.flash.copy(from, to);
                    self.map.insert(owner, to);
                }
                self.flash.erase(victim);
            }
            if self.active_full() {
                self.open();
            }
        }
        if let Some(old) = self.map.remove(&lpn) {
            self.flash.kill(old);
        }
        let to = self.next();
        self.flash.put(to, lpn);
        self.flash.totals.host_writes += 1;
        self.map.insert(lpn, to);
    }

    fn read(&mut self, lpn: u32) -> bool {
        let mapped = self.map.contains_key(&lpn);
        self.flash.totals.host_reads += u64::from(mapped);
        mapped
    }

    fn trim(&mut self, lpn: u32) -> bool {
        let old = self.map.remove(&lpn);
        if let Some(old) = old {
            self.flash.kill(old);
        }
        old.is_some()
    }

    fn flash(&self) -> &Slow {
        &self.flash
    }
    fn flash_mut(&mut self) -> &mut Slow {
        &mut self.flash
    }
}
