//! The keeper of a held log: what it has, under which lock. What it does with that is in the files beside this one.

use super::aging::state::State;
use super::waiting::Absorbing;
use crate::keeper::{Side, Step, Steps};
use block_route::{RequestId, Status};
use journal_area::{JournalArea, LogId, LogWrite};
use std::sync::Arc;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

/// Host writes in flight at a time, a log.
pub(super) const HOST_WRITES_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Inner {
    /// What the guest wrote into the log in this pass.
    pub(super) batch: Vec<(LogWrite, RequestId)>,
    /// Log blocks for which there was no memory, on their way to their own places.
    pub(super) stored_in_flight: usize,
    pub(super) host_in_flight: usize,
    /// Writes of the guest that may go keep the host from writing where they do: it looks again when one has ended.
    pub(super) is_host_barred: bool,
    /// Storage failed under a host write: none is tried until somebody wakes the disk.
    pub(super) host_failed: bool,
    /// Something was written into the log while it was closed, which no kernel does.
    pub(super) is_foreign: bool,
    /// Another keeps the log: what ends now concerns that one.
    pub(super) is_over: bool,
}

/// Keeps one held log.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) area: Arc<JournalArea>,
    pub(crate) id: LogId,
    inner: Mutex<Inner>,
    /// Durability by age.
    state: Mutex<State>,
    /// What waits for home writes that were answered before they were done.
    absorbing: Mutex<Absorbing>,
}

impl Held {
    pub fn new(area: Arc<JournalArea>, id: LogId) -> Self {
        let inner = Inner { is_foreign: area.is_foreign(id), ..Inner::default() };
        Held { area, id, inner: Mutex::new(inner), state: Mutex::default(), absorbing: Mutex::default() }
    }

    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.inner().is_foreign
    }

    pub(crate) fn set_foreign(&self, is_foreign: bool) {
        // The table says it, too: another worker may go on.
        self.area.set_foreign(self.id, is_foreign);
        self.inner().is_foreign = is_foreign;
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    pub(super) fn absorbing(&self) -> MutexGuard<'_, Absorbing> {
        self.absorbing.lock().expect("no panic under this lock")
    }

    /// A log is opened, or gone.
    pub(super) fn forget_absorbing(&self) {
        *self.absorbing() = Absorbing::default();
    }

    /// The last transaction that was committed when a change that had to wait was asked first.
    pub(super) fn first_asked(&self, key: (RequestId, u64)) -> Option<u32> {
        self.absorbing().asked.get(&key).map(|asked| asked.first)
    }

    /// Who waits would wait for ever.
    pub(super) fn fail_absorbing(&self, steps: &mut Steps) {
        let (superblocks, flushes) = {
            let mut absorbing = self.absorbing();
            (std::mem::take(&mut absorbing.superblocks), std::mem::take(&mut absorbing.flushes))
        };
        for (request, _) in superblocks {
            steps.push(Side::Journal, Step::Release(request, Status::IoError));
        }
        flushes.into_iter().for_each(|request| steps.release(request, Status::IoError));
    }
}
