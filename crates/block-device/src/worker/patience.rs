//! Requests that cannot be begun because memory of theirs must not be written to yet.
//!
//! A page that a request is to be read into, or a page of a ring, can hold a committed block that is nowhere else, left over from
//! what the guest had in it before; it is copied out first. When there is no memory to copy it to (the tmpfs of the memory area is
//! full), the request waits: writing would lose the block, and failing would be an I/O error on a disk that has none. It does not
//! wait in vain: the journal area has blocks written home, with requests of the host's own, and lets the page go after that.
//!
//! So does one with a page that nobody has touched yet, while there is no memory for it: touching it would raise SIGBUS.
//!
//! Nothing that has been begun waits here: what goes wrong later is an I/O error, or ends the ring.

use super::Worker;
use block_route::Route;
use std::time::{Duration, Instant};

/// How often they are tried.
const INTERVAL: Duration = Duration::from_millis(20);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Patient {
    /// Ring, its epoch and the head of the chain: walked anew each time.
    chains: Vec<(u16, u32, u16)>,
    /// Some ring waits for a page of its own.
    rings: bool,
    tried: Option<Instant>,
}

impl<R: Route + ?Sized> Worker<R> {
    /// Whether anybody waits for room.
    pub(super) fn has_patient(&self) -> bool {
        !self.patient.chains.is_empty() || self.patient.rings
    }

    /// Whether a request that was taken does.
    pub(super) fn has_patient_chains(&self) -> bool {
        !self.patient.chains.is_empty()
    }

    /// A chain that was taken from its ring waits.
    pub(super) fn wait_for_room(&mut self, index: u16, epoch: u32, head: u16, reason: &guest_memory::Error) {
        if !self.has_patient()
            && let Some(count) = self.log_limit.next()
        {
            log::error!("disk {}: a request waits: {reason} ({count} such messages so far)", self.name);
        }
        self.patient.chains.push((index, epoch, head));
    }

    /// Asks for the pages of all rings.
    pub(super) fn prepare_rings(&mut self) {
        self.patient.rings = false;
        for ring in &mut self.rings {
            ring.is_in_the_way = ring.running.as_ref().is_some_and(|running| running.prepare_writes().is_err());
            self.patient.rings |= ring.is_in_the_way;
        }
    }

    /// Tries again what waits, now and then. Returns whether something was begun.
    pub(super) fn try_patient_again(&mut self) -> bool {
        if !self.has_patient() || self.patient.tried.is_some_and(|tried| tried.elapsed() < INTERVAL) {
            return false;
        }
        self.patient.tried = Some(Instant::now());
        if self.patient.rings {
            self.prepare_rings();
            self.refresh_lists();
        }
        let waiting = std::mem::take(&mut self.patient.chains);
        let count = waiting.len();
        for (index, epoch, head) in waiting {
            let ring = &self.rings[usize::from(index)];
            // A ring that was stopped or ended meanwhile leaves it marked in the in-flight region, like any other.
            if ring.running.is_none() || ring.epoch != epoch || ring.broken {
                continue;
            }
            if let Err(error) = self.take_request(index, head) {
                self.break_ring(index, &error);
            }
        }
        let begun = self.patient.chains.len() < count;
        if begun {
            self.route.end_of_pass(&mut self.plan);
            self.carry_out();
        }
        begun
    }
}
