//! FAST, slowly: the newest copy of a page is found by looking at every slot.

use super::{Model, Place, Slot, Slow};

pub struct Fast {
    pub flash: Slow,
    data: Vec<Option<usize>>,
    // Block, owner, first offset, next offset.
    sequential: Option<(usize, usize, usize, usize)>,
    random: Vec<usize>,
    most_random: usize,
    in_flight: bool,
    any_order: bool,
}

impl Fast {
    pub fn new(
        logical: usize,
        extra: usize,
        pages: usize,
        most_random: usize,
        in_flight: bool,
        any_order: bool,
    ) -> Fast {
        Fast {
            flash: Slow::new(logical + extra, pages),
            data: vec![None; logical],
            sequential: None,
            random: Vec::new(),
            most_random,
            in_flight,
            any_order,
        }
    }

    fn newest(&self, lbn: usize, offset: usize) -> Option<Place> {
        let lpn = (lbn * self.flash.pages + offset) as u32;
        let mut found = None;
        for block in 0..self.flash.blocks.len() {
            for at in 0..self.flash.pages {
                if self.flash.blocks[block][at] == Slot::Live(lpn) {
                    assert!(found.is_none(), "two live copies");
                    found = Some((block, at));
                }
            }
        }
        found
    }

    fn forget(&mut self, lbn: usize, offset: usize) -> bool {
        let old = self.newest(lbn, offset);
        if let Some(old) = old {
            self.flash.kill(old);
        }
        old.is_some()
    }

    fn host(&mut self, lbn: usize, offset: usize, to: Place) {
        self.flash.put(to, (lbn * self.flash.pages + offset) as u32);
        self.flash.totals.host_writes += 1;
    }

    fn take(&mut self) -> usize {
        while self.flash.free.len() <= 2 && !self.random.is_empty() {
            self.reclaim_oldest();
        }
        self.flash.take()
    }

    /// Newest copies into `to`, except those in `spared`.
    fn gather(&mut self, lbn: usize, offsets: std::ops::Range<usize>, to: usize, spared: Option<usize>) {
        for offset in offsets {
            if let Some(from) = self.newest(lbn, offset)
                && from.0 != to
                && Some(from.0) != spared
            {
                self.flash.copy(from, (to, offset));
            }
        }
    }

    fn replace_data(&mut self, lbn: usize, block: usize) {
        let old = self.data[lbn].replace(block).unwrap();
        self.flash.erase(old);
    }

    fn full_merge_sequential(&mut self, in_flight: Option<usize>) {
        let (block, owner, ..) = self.sequential.take().unwrap();
        self.flash.totals.gc_runs += 1;
        self.flash.totals.sequential_full += 1;
        let to = self.flash.take();
        for offset in 0..self.flash.pages {
            if in_flight == Some(offset) {
                self.forget(owner, offset);
                self.host(owner, offset, (to, offset));
            } else {
                self.gather(owner, offset..offset + 1, to, None);
            }
        }
        self.flash.erase(block);
        self.replace_data(owner, to);
    }

    fn retire(&mut self) {
        let Some((block, owner, start, next)) = self.sequential else { return };
        if start > 0 {
            return self.full_merge_sequential(None);
        }
        self.sequential = None;
        self.flash.totals.gc_runs += 1;
        if next == self.flash.pages {
            self.flash.totals.switch += 1;
        } else {
            self.flash.totals.partial += 1;
            self.gather(owner, next..self.flash.pages, block, None);
        }
        self.replace_data(owner, block);
    }

    fn begin(&mut self, lbn: usize, offset: usize) {
        let block = self.take();
        self.sequential = Some((block, lbn, offset, offset + 1));
        self.forget(lbn, offset);
        self.host(lbn, offset, (block, offset));
    }

    fn reclaim_oldest(&mut self) {
        let victim = self.random.remove(0);
        let spared = |lbn: usize, this: &Fast| this.sequential.filter(|s| s.1 == lbn).map(|s| s.0);
        while let Some(&(block, at)) = self.flash.live_pages(victim).first() {
            let Slot::Live(lpn) = self.flash.blocks[block][at] else { unreachable!() };
            let lbn = lpn as usize / self.flash.pages;
            self.flash.totals.gc_runs += 1;
            self.flash.totals.full += 1;
            let to = self.flash.take();
            self.gather(lbn, 0..self.flash.pages, to, spared(lbn, self));
            self.replace_data(lbn, to);
        }
        self.flash.totals.log_erases += 1;
        self.flash.erase(victim);
    }

    fn log(&mut self, lbn: usize, offset: usize) {
        if offset == 0 {
            self.retire();
            return self.begin(lbn, 0);
        }
        match self.sequential {
            Some((block, owner, start, next)) if owner == lbn => {
                if offset == next {
                    self.forget(lbn, offset);
                    self.host(lbn, offset, (block, offset));
                    self.sequential = Some((block, owner, start, next + 1));
                } else if !self.in_flight {
                    self.retire();
                    self.begin(lbn, offset);
                } else if offset > next {
                    self.sequential = None;
                    self.flash.totals.gc_runs += 1;
                    self.flash.totals.partial += 1;
                    self.gather(lbn, next..offset, block, None);
                    self.forget(lbn, offset);
                    self.host(lbn, offset, (block, offset));
                    self.gather(lbn, offset + 1..self.flash.pages, block, None);
                    self.replace_data(lbn, block);
                } else {
                    self.full_merge_sequential(Some(offset));
                }
            }
            _ => {
                if self.random.last().is_none_or(|&b| self.flash.is_full(b)) {
                    while self.random.len() >= self.most_random {
                        self.reclaim_oldest();
                    }
                    let block = self.take();
                    self.random.push(block);
                }
                let block = *self.random.last().unwrap();
                self.forget(lbn, offset);
                let at = self.flash.next_offset(block);
                self.host(lbn, offset, (block, at));
            }
        }
    }
}

impl Model for Fast {
    fn write(&mut self, lpn: u32) {
        let (lbn, offset) = (lpn as usize / self.flash.pages, lpn as usize % self.flash.pages);
        if self.data[lbn].is_none() {
            let block = self.take();
            self.data[lbn] = Some(block);
        }
        let data = self.data[lbn].unwrap();
        let free = self.flash.blocks[data][offset] == Slot::Free;
        let in_order = self.any_order || offset >= self.flash.next_offset(data);
        let held =
            self.sequential.is_some_and(|(_, owner, start, next)| owner == lbn && offset >= start && offset < next);
        if free && in_order && !held {
            self.forget(lbn, offset);
            self.host(lbn, offset, (data, offset));
        } else {
            self.log(lbn, offset);
        }
    }

    fn read(&mut self, lpn: u32) -> bool {
        let found = self.newest(lpn as usize / self.flash.pages, lpn as usize % self.flash.pages).is_some();
        self.flash.totals.host_reads += u64::from(found);
        found
    }

    fn trim(&mut self, lpn: u32) -> bool {
        self.forget(lpn as usize / self.flash.pages, lpn as usize % self.flash.pages)
    }

    fn flash(&self) -> &Slow {
        &self.flash
    }
    fn flash_mut(&mut self) -> &mut Slow {
        &mut self.flash
    }
}
