//! How much of the host's memory the logs of a VM may take together.
//!
//! No log's lock is needed to know what all take: each says it when its lock is let go (`logs`). So what is asked for here may be a
//! moment old for logs that others are busy with. None of the bounds is hard: above it blocks are written home, which takes far longer.

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
