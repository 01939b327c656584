//! The fault side of an area: a page is about to change, because its guest or its VMM writes to it, or because this process is to.
//!
//! Whether a page is needed at all is known without any log's lock (`pages`). Only where it is, its log is looked for, among those first
//! that nobody is busy with: so a fault waits for the log that has the page, and hardly ever for another one.
//!
//! Between two looks a page may go from one log to another, or be retained anew: what was seen counts for nothing until the page is let go,
//! which is refused as long as it is retained. So each look begins with that, and each that was in vain is followed by another.
//!
//! With a page that is written to goes what its log retains in the pages about it, if the rule of hot pages allows (`pages`): a guess that more
//! faults would follow.
//!
//! What must never be: a page let go that some log has; a fault that nobody answers any more. One for which there is no memory, or whose
//! page is not found though it is retained, is noted with the page being retained, in one step, and is tried again whenever memory may have become free, and
//! five times a second.

use crate::area::JournalArea;
use crate::jcb::VmJcb;
use crate::location::Location;
use crate::logs::LogId;
use crate::pages::Pages;
use guest_memory::{CopyOnWrite, PageId};
use std::collections::HashSet;

/// So often a page is looked for that is retained, and not found: each time it has gone to a log that was looked at already.
const LOOKS_MAX: u32 = 16;

impl JournalArea {
    /// Copies a page out if it is retained, and lets it go. False where there is no memory for it: whoever waits is noted. Nobody may have a log's
    /// lock who calls.
    pub(crate) fn copy_out(&self, page: PageId) -> bool {
        let (mut was_needed, mut is_noted, mut around) = (false, false, Vec::new());
        for _ in 0..LOOKS_MAX {
            // Protected and not needed: with it go all the others (the paper's figure 3).
            if self.pages.let_go(page, &around, !was_needed) {
                return true;
            }
            let copies_left = if self.pages.copies_around() { self.budget.copies_left(&self.logs) } else { 0 };
            let copied = self.logs.find(|_, jcb| {
                let position = jcb.position_of_page(page)?;
                self.pages.heat(page);
                let is_copied = jcb.copy_page_out(&self.pages, position, page);
                if is_copied {
                    jcb.counters.cow_faults += 1;
                    jcb.copy_out_around(&self.pages, page, copies_left, &mut around);
                }
                Some(is_copied)
            });
            match copied {
                Some(true) => was_needed = true,
                // The page's content is nowhere else: whoever wants to write to it waits.
                Some(false) if self.pages.starve(page) => {
                    // Memory that has become free before that was noted is looked for once more. Whoever frees some from here on finds the note.
                    if is_noted {
                        return false;
                    }
                    is_noted = true;
                }
                Some(false) | None => {}
            }
        }
        loop {
            if self.pages.starve(page) {
                return false;
            }
            if self.pages.let_go(page, &around, false) {
                return true;
            }
        }
    }

    /// Memory may have become free: answers those who wait for some. Nobody may have a log's lock who calls.
    pub(crate) fn feed_starved(&self) {
        for page in self.pages.starved() {
            self.copy_out(page);
        }
    }

    /// Pages may have been released, and memory have become free. Nobody may have a log's lock who calls.
    pub(crate) fn let_go(&self) {
        self.pages.let_many_loose_go();
        self.feed_starved();
    }

    /// Names the guest pages that must never be retained: those of rings.
    pub fn set_excluded_pages(&self, excluded: HashSet<PageId>) {
        let retained = |page: &PageId| self.pages.memory().is_retained(*page);
        // What is being retained at this moment is marked as retained by now, or will be refused.
        let pages: Vec<PageId> = excluded.iter().copied().collect();
        self.pages.set_excluded(excluded);
        for page in pages.into_iter().filter(retained) {
            self.copy_out(page);
        }
    }

    /// A retained page of a log that somebody waits to write to, since there is no memory to copy it to: its log block, and what is in it.
    pub fn starved(&self, id: LogId) -> Option<(u32, PageId, Vec<u8>)> {
        self.feed_starved();
        let starved = self.pages.starved();
        self.with(id, |jcb| {
            if jcb.is_taken {
                return None;
            }
            starved.into_iter().find_map(|page| {
                let position = jcb.position_of_page(page)?;
                let mut content = vec![0; jcb.shape.block_bytes as usize];
                jcb.read_held(&self.pages, position, &mut content).then_some((position, page, content))
            })
        })
        .flatten()
    }

    /// That has been written to its own place in the log on storage: if the log has just this there still, the page is let go. Says whether
    /// it is.
    pub fn starved_is_stored(&self, id: LogId, (position, page, content): &(u32, PageId, Vec<u8>)) -> bool {
        let is_there = self.with(id, |jcb| {
            let mut held = vec![0; content.len()];
            let is_there = !jcb.is_taken
                && jcb.location(*position) == Location::Guest(*page)
                && jcb.read_held(&self.pages, *position, &mut held)
                && held == *content;
            if is_there {
                jcb.set_location(&self.pages, *position, Location::Storage);
            }
            is_there
        });
        self.feed_starved();
        is_there.unwrap_or_default()
    }
}

impl VmJcb {
    /// Copies out what this log retains in the neighbours of a page that was written to, as far as copies are allowed, and adds these pages to
    /// `around`: whoever writes to one often writes to the next ones, and a fault takes longer than all of these copies.
    fn copy_out_around(&mut self, pages: &Pages, page: PageId, copies_left: u64, around: &mut Vec<PageId>) {
        let most = around.len() + copies_left as usize / guest_memory::PAGE_BYTES;
        // What memory there is belongs to those who cannot do without.
        if around.len() == most || !self.pool.has_room() {
            return;
        }
        // A write that is under way releases what it carries, if that stays where it is.
        let carried = self.in_flight.positions();
        for neighbour in Pages::around(page) {
            if around.len() == most {
                return;
            }
            let Some(position) = self.position_of_page(neighbour) else { continue };
            if carried.contains(&position) {
                continue;
            }
            if !self.copy_page_out(pages, position, neighbour) {
                return;
            }
            around.push(neighbour);
        }
    }
}

/// It does not keep the area alive, so that memory and area do not keep each other.
pub(crate) struct AreaCopyOnWrite(pub std::sync::Weak<JournalArea>);

impl CopyOnWrite for AreaCopyOnWrite {
    fn copy_out(&self, page: PageId) -> bool {
        // Without an area nothing is held.
        let Some(area) = self.0.upgrade() else { return true };
        let is_free = area.copy_out(page);
        if !is_free {
            area.wake();
        }
        is_free
    }

    fn try_again(&self) {
        let Some(area) = self.0.upgrade() else { return };
        area.feed_starved();
        if !area.pages.starved().is_empty() {
            area.wake();
        }
    }

    fn finish(&self) {
        let Some(area) = self.0.upgrade() else { return };
        // Whoever is about to protect pages has a log's lock since before he asked whether that can be.
        area.logs.all().iter().for_each(|cell| drop(cell.lock()));
    }
}

#[cfg(test)]
mod tests;
