//! How much of the host's memory the logs of a VM may take together.
//!
//! No log's lock is needed to know what all take: each says it when its lock is let go (`logs`). So what is asked for here may be a
//! moment old for logs that others are busy with. None of the bounds is hard: above it blocks are written home, which takes far longer.

use crate::area::{AreaMemory, JournalArea, LogId, Pressure};
use crate::jcb::VmJcb;
use crate::logs::{Cell, Logs};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

/// So much a VM's logs copy at most of what they could retain (see [`crate::HotPages::Lone`]): a commit of many small files, not a log full.
/// Each that copies at the same time may be beyond it by what it copies in one pass.
const COPIES_BYTES_MAX: u64 = 32 << 20;

#[derive(Debug)]
pub(crate) struct Budget {
    /// The VM's own bound.
    pub bytes: u64,
    lent: Mutex<Lent>,
}

#[derive(Debug, Default)]
pub(crate) struct Lent {
    /// What others have of the budget who keep a log in memory.
    pub reserved_bytes: u64,
    /// What the host leaves this VM at the moment, if that is bounded. It refuses nothing: blocks go home earlier.
    pub room_bytes: Option<u64>,
}

impl Budget {
    pub fn new(bytes: u64) -> Self {
        Budget { bytes, lent: Mutex::default() }
    }

    /// For a moment: nothing is taken under it.
    pub fn lent(&self) -> MutexGuard<'_, Lent> {
        self.lent.lock().expect("no panic under this lock")
    }

    pub fn held_bytes(&self, logs: &Logs) -> u64 {
        logs.sum(Cell::memory_bytes) + self.lent().reserved_bytes
    }

    /// Whether blocks have to go home to make room: the VM's own bound is passed, or what the host leaves it. What was kept though nothing is
    /// in it goes first. Who asks has no log's lock.
    pub fn is_over(&self, logs: &Logs) -> bool {
        let most = self.most_bytes();
        self.held_bytes(logs) > most && (!give_back_spares(logs) || self.held_bytes(logs) > most)
    }

    fn most_bytes(&self) -> u64 {
        self.lent().room_bytes.map_or(self.bytes, |room| room.min(self.bytes))
    }

    /// How much may be copied for nothing but speed: half of what is left at most, so that what has to be copied finds room.
    pub fn copies_left(&self, logs: &Logs) -> u64 {
        let spares = logs.sum(Cell::spare_bytes);
        // Each log says what it takes and what of it is spare one after the other.
        let most = self.most_bytes().saturating_sub(self.held_bytes(logs).saturating_sub(spares));
        let copied = logs.sum(Cell::used_bytes);
        (most / 2).min(COPIES_BYTES_MAX.saturating_sub(copied))
    }

    /// Takes so many bytes for somebody else; says whether they were there.
    pub fn reserve(&self, logs: &Logs, bytes: u64) -> bool {
        if logs.sum(Cell::memory_bytes) + self.lent().reserved_bytes + bytes > self.bytes {
            give_back_spares(logs);
        }
        let held_bytes = logs.sum(Cell::memory_bytes);
        let mut lent = self.lent();
        // Not what the host leaves it at the moment: a log that finds no room here stays on storage for long.
        let is_there = held_bytes + lent.reserved_bytes + bytes <= self.bytes;
        if is_there {
            lent.reserved_bytes += bytes;
        }
        is_there
    }
}

/// Has the logs give back what they keep for later, but for those that somebody is busy with. Says whether there was any.
fn give_back_spares(logs: &Logs) -> bool {
    let mut is_any = false;
    for cell in logs.all().iter().filter(|cell| cell.spare_bytes() > 0) {
        is_any |= cell.try_lock().is_some_and(|mut jcb| jcb.pool.give_back_spares());
    }
    is_any
}

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
