//! What an area takes of its budget, for its logs and for others, and which log has to give memory back.

use crate::area::{AreaMemory, JournalArea, Pressure};
use crate::jcb::VmJcb;
use crate::logs::{Cell, LogId};

impl JournalArea {
    /// A second has passed: what was copied to for this log, and nothing was in for some time, goes back to the host bit by bit.
    pub fn rest(&self, id: LogId) {
        self.with_in_flight(id, |jcb| jcb.pool.rest());
    }

    /// Takes so many bytes of the budget for somebody else who keeps a log in memory; says whether they were there.
    pub fn reserve(&self, bytes: u64) -> bool {
        let is_there = self.budget.reserve(&self.logs, bytes);
        // A log that has grown meanwhile may have asked before this counted.
        if is_there && self.budget.is_over(&self.logs) {
            self.wake();
        }
        is_there
    }

    /// The same for what is in memory already, and was taken of another process's budget: as far as there is any. Gives how much.
    pub fn reserve_again(&self, bytes: u64) -> u64 {
        let mut lent = self.budget.lent();
        let taken = bytes.min(self.budget.bytes - lent.reserved_bytes);
        lent.reserved_bytes += taken;
        taken
    }

    /// Gives back what was reserved.
    pub fn release(&self, bytes: u64) {
        let mut lent = self.budget.lent();
        lent.reserved_bytes = lent.reserved_bytes.saturating_sub(bytes);
    }

    /// What the host leaves this VM from now on; nothing: as much as its own budget. Above it the host writes copied blocks home, as
    /// above the budget. Nothing is refused for it, so a guest is never told of an error.
    pub fn set_room(&self, room_bytes: Option<u64>) {
        self.budget.lent().room_bytes = room_bytes;
        if self.budget.is_over(&self.logs) {
            self.wake();
        }
    }

    /// What the host leaves this VM, if that is bounded at the moment.
    pub fn room_bytes(&self) -> Option<u64> {
        self.budget.lent().room_bytes
    }

    /// What it takes of the host's memory.
    pub fn memory(&self) -> AreaMemory {
        AreaMemory { held_bytes: self.budget.held_bytes(&self.logs), copied_bytes: self.logs.sum(Cell::pool_bytes) }
    }

    /// What this log has to give back: as [`JournalArea::under_pressure`] says of one, but for pages, which each log gives back that somebody
    /// waits to write to one of. One whose disk does not answer keeps no others waiting.
    pub fn pressure_on(&self, id: LogId) -> Option<Pressure> {
        match self.under_pressure() {
            Some((one, pressure)) if one == id => Some(pressure),
            Some((_, Pressure::Pages)) => {
                let starved = self.pages.starved();
                let has_one = |jcb: &mut VmJcb| starved.iter().any(|page| jcb.position_of_page(*page).is_some());
                self.with(id, has_one).unwrap_or(false).then_some(Pressure::Pages)
            }
            _ => None,
        }
    }

    /// The log that has to give memory back, and what of it. If somebody waits to write to a retained page, the log that the
    /// page belongs to: with nothing copied, only a write home of the page itself lets it go. If tables and copies take more
    /// than the budget, or than the host leaves the VM ([`JournalArea::set_room`]), the largest log of those that have something to write home.
    pub fn under_pressure(&self) -> Option<(LogId, Pressure)> {
        self.feed_starved();
        if let Some(page) = self.pages.starved().first().copied() {
            let is_owner = |cell: &Cell, jcb: &VmJcb| !cell.is_leaving() && jcb.position_of_page(page).is_some();
            if let Some(owner) = self.logs.find(|cell, jcb| is_owner(cell, jcb).then_some(cell.id)) {
                return Some((owner, Pressure::Pages));
            }
        }
        if !self.budget.is_over(&self.logs) {
            return None;
        }
        let logs = self.logs.all();
        let largest = logs
            .iter()
            .filter(|cell| !cell.is_leaving() && cell.is_writable())
            .map(|cell| (cell.used_bytes(), cell.id))
            .max()?;
        (largest.0 > 0).then_some((largest.1, Pressure::Copies))
    }
}
