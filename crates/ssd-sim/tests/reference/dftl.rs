//! DFTL, slowly: translation pages hold their entries, and a mapping is only known through the cache.

use super::{Model, Place, Slow};
use std::collections::{BTreeMap, HashMap};

#[derive(Clone)]
struct Entry {
    lpn: u32,
    place: Option<Place>,
    dirty: bool,
}

pub struct Dftl {
    pub flash: Slow,
    // Content of each translation page on flash, and where it is.
    translation: HashMap<u32, (Place, HashMap<u32, Place>)>,
    // Most recent first.
    probationary: Vec<Entry>,
    protected: Vec<Entry>,
    capacity: usize,
    protected_capacity: usize,
    batch: bool,
    cost_benefit: bool,
    threshold: usize,
    entries_per_page: u32,
    data_active: Option<usize>,
    translation_active: Option<usize>,
    translation_blocks: Vec<usize>,
}

impl Dftl {
    #[allow(clippy::too_many_arguments)] // A test says them once.
    pub fn new(
        blocks: usize,
        pages: usize,
        entries_per_page: u32,
        capacity: usize,
        protected_capacity: usize,
        batch: bool,
        threshold: usize,
        cost_benefit: bool,
    ) -> Dftl {
        Dftl {
            flash: Slow::new(blocks, pages),
            translation: HashMap::new(),
            probationary: Vec::new(),
            protected: Vec::new(),
            capacity,
            protected_capacity,
            batch,
            cost_benefit,
            threshold,
            entries_per_page,
            data_active: None,
            translation_active: None,
            translation_blocks: Vec::new(),
        }
    }

    fn next(&mut self, translation: bool) -> Place {
        let active = if translation { self.translation_active } else { self.data_active };
        let block = match active {
            Some(block) if !self.flash.is_full(block) => block,
            full => {
                if let Some(block) = full {
                    self.flash.note_change(block);
                }
                let block = self.flash.take();
                if translation {
                    self.translation_active = Some(block);
                    self.translation_blocks.push(block);
                } else {
                    self.data_active = Some(block);
                }
                block
            }
        };
        (block, self.flash.next_offset(block))
    }

    /// Rewrites a translation page with these changes.
    fn rewrite(&mut self, number: u32, changes: &[(u32, Option<Place>)]) {
        let mut content = HashMap::new();
        if let Some((old, entries)) = self.translation.remove(&number) {
            self.flash.totals.mapping_reads += 1;
            self.flash.kill(old);
            content = entries;
        }
        for &(lpn, place) in changes {
            match place {
                Some(place) => content.insert(lpn, place),
                None => content.remove(&lpn),
            };
        }
        let to = self.next(true);
        self.flash.put(to, number);
        self.flash.totals.mapping_writes += 1;
        self.translation.insert(number, (to, content));
    }

    fn cached(&mut self, lpn: u32) -> Option<&mut Entry> {
        self.probationary.iter_mut().chain(self.protected.iter_mut()).find(|e| e.lpn == lpn)
    }

    fn lookup(&mut self, lpn: u32) {
        let found = self.probationary.iter().position(|e| e.lpn == lpn).map(|at| self.probationary.remove(at));
        let found =
            found.or_else(|| self.protected.iter().position(|e| e.lpn == lpn).map(|at| self.protected.remove(at)));
        if let Some(entry) = found {
            self.flash.totals.hits += 1;
            if self.protected_capacity == 0 {
                self.probationary.insert(0, entry);
            } else {
                self.protected.insert(0, entry);
                if self.protected.len() > self.protected_capacity {
                    let demoted = self.protected.pop().unwrap();
                    self.probationary.insert(0, demoted);
                }
            }
            return;
        }
        self.flash.totals.misses += 1;
        if self.probationary.len() + self.protected.len() == self.capacity {
            let victim = self.probationary.last().or(self.protected.last()).unwrap().clone();
            if victim.dirty {
                let number = victim.lpn / self.entries_per_page;
                let mut changes = Vec::new();
                let (batch, per_page) = (self.batch, self.entries_per_page);
                for entry in self.probationary.iter_mut().chain(self.protected.iter_mut()) {
                    if entry.dirty && (entry.lpn == victim.lpn || batch && entry.lpn / per_page == number) {
                        changes.push((entry.lpn, entry.place));
                        entry.dirty = false;
                    }
                }
                self.rewrite(number, &changes);
            }
            self.probationary.pop().or_else(|| self.protected.pop());
        }
        let number = lpn / self.entries_per_page;
        let mut place = None;
        if let Some((_, content)) = self.translation.get(&number) {
            self.flash.totals.mapping_reads += 1;
            place = content.get(&lpn).copied();
        }
        self.probationary.insert(0, Entry { lpn, place, dirty: false });
    }

    fn make_room(&mut self) {
        while self.flash.free.len() <= self.threshold {
            let is_active = |b: &usize| Some(*b) == self.data_active || Some(*b) == self.translation_active;
            let closed: Vec<usize> =
                (0..self.flash.blocks.len()).filter(|b| !self.flash.free.contains(b) && !is_active(b)).collect();
            let (mapping, data): (Vec<usize>, Vec<usize>) =
                closed.into_iter().partition(|b| self.translation_blocks.contains(b));
            let data = self.flash.victim(&data, self.cost_benefit);
            let mapping = self.flash.victim(&mapping, self.cost_benefit);
            self.flash.totals.gc_runs += 1;
            match (data, mapping) {
                (None, None) => panic!("no garbage"),
                (Some(data), None) => self.reclaim_data(data),
                (None, Some(mapping)) => self.reclaim_translation(mapping),
                (Some(data), Some(mapping)) => {
                    if self.flash.free.len() < 2 || self.flash.better(mapping, data, self.cost_benefit) {
                        self.reclaim_translation(mapping);
                    } else {
                        self.reclaim_data(data);
                    }
                }
            }
        }
    }

    fn reclaim_translation(&mut self, victim: usize) {
        for from in self.flash.live_pages(victim) {
            let to = self.next(true);
            let number = self.flash.copy(from, to);
            self.translation.get_mut(&number).unwrap().0 = to;
        }
        self.translation_blocks.retain(|&b| b != victim);
        self.flash.erase(victim);
    }

    fn reclaim_data(&mut self, victim: usize) {
        let mut moved: BTreeMap<u32, Vec<(u32, Option<Place>)>> = BTreeMap::new();
        for from in self.flash.live_pages(victim) {
            let to = self.next(false);
            let lpn = self.flash.copy(from, to);
            let number = lpn / self.entries_per_page;
            match self.cached(lpn) {
                Some(entry) => {
                    entry.place = Some(to);
                    entry.dirty = true;
                }
                None => moved.entry(number).or_default().push((lpn, Some(to))),
            }
        }
        for (number, changes) in moved {
            self.rewrite(number, &changes);
        }
        self.flash.erase(victim);
    }
}

impl Model for Dftl {
    fn write(&mut self, lpn: u32) {
        self.make_room();
        self.lookup(lpn);
        if let Some(old) = self.cached(lpn).unwrap().place {
            self.flash.kill(old);
        }
        let to = self.next(false);
        self.flash.put(to, lpn);
        self.flash.totals.host_writes += 1;
        let entry = self.cached(lpn).unwrap();
        entry.place = Some(to);
        entry.dirty = true;
    }

    fn read(&mut self, lpn: u32) -> bool {
        self.make_room();
        self.lookup(lpn);
        let mapped = self.cached(lpn).unwrap().place.is_some();
        self.flash.totals.host_reads += u64::from(mapped);
        mapped
    }

    fn trim(&mut self, lpn: u32) -> bool {
        self.make_room();
        self.lookup(lpn);
        let entry = self.cached(lpn).unwrap();
        let old = entry.place.take();
        entry.dirty |= old.is_some();
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
