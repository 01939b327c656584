//! Requests in flight: which chain each belongs to, and what it still waits for.
//!
//! One virtio request (a *chain*) becomes one or more requests of the route (*parts*): a discard of several ranges is
//! several parts, a write on a disk without a write cache is a write and then a flush. The chain completes with its last
//! part, each part with its last hold, both with the first error there was.

use crate::chain::StatusPlace;
use block_route::{RequestId, Status};
use guest_memory::{MemorySlice, RegionSet};
use std::time::Instant;

/// What a chain asks for, as far as it matters to how long it may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChainKind {
    Read,
    Write,
    Flush,
    Discard,
}

/// A virtio request that has not been answered yet.
#[derive(Debug)]
pub(crate) struct ChainState {
    pub(crate) ring: u16,
    pub(crate) head: u16,
    /// Which start of the ring it came from: answers to an earlier one go nowhere.
    pub(crate) ring_epoch: u32,
    pub(crate) status_place: StatusPlace,
    /// The regions of guest memory it is in; nothing when some of them were taken away while it was in flight.
    pub(crate) regions: Option<RegionSet>,
    /// Bytes of data in the device-writable part, for the used ring's length.
    pub(crate) readback_len: u32,
    /// A flush has to follow before it may complete.
    pub(crate) flush_after: bool,
    pub(crate) kind: ChainKind,
    /// It has a commit block of a journal.
    pub(crate) is_commit: bool,
    /// When it was taken from its ring.
    pub(crate) taken: Instant,
    /// What of the guest's memory it may have written when it is done, beside its status; empty where no VMM can ask for that.
    pub(crate) written: Vec<MemorySlice>,
    parts_left: u32,
    status: Status,
}

#[derive(Debug)]
struct Part {
    chain: u32,
    holds: u32,
    status: Status,
    live: bool,
}

/// What became of a part when something was taken off it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// Its chain waits for other parts.
    Part,
    /// It was its chain's last.
    Chain(u32),
}

/// All requests in flight of one device.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    chains: Vec<Option<ChainState>>,
    free_chains: Vec<u32>,
    parts: Vec<Part>,
    free_parts: Vec<u32>,
    live_parts: usize,
    /// Parts to look at when the plan has been carried out: those routed in this pass, those that lost a hold.
    touched: Vec<u32>,
}

impl Tracker {
    /// Parts in flight.
    pub(crate) fn live_parts(&self) -> usize {
        self.live_parts
    }

    /// Chains in flight.
    pub(crate) fn live_chains(&self) -> usize {
        self.chains.len() - self.free_chains.len()
    }

    /// Chains in flight of a ring, of whichever start of it, whose buffers may be read or written yet. (Others have a status byte alone, which
    /// is written to the start that they came from.)
    pub(crate) fn transfers_of(&self, ring: u16) -> usize {
        let is_transfer = |kind| matches!(kind, ChainKind::Read | ChainKind::Write);
        self.chains.iter().flatten().filter(|chain| chain.ring == ring && is_transfer(chain.kind)).count()
    }

    pub(crate) fn add_chain(
        &mut self,
        (ring, ring_epoch): (u16, u32),
        head: u16,
        (status_place, regions): (StatusPlace, RegionSet),
        readback_len: u32,
        flush_after: bool,
        (kind, taken): (ChainKind, Instant),
    ) -> u32 {
        let state = ChainState {
            ring,
            head,
            ring_epoch,
            status_place,
            regions: Some(regions),
            readback_len,
            flush_after,
            kind,
            is_commit: false,
            taken,
            written: Vec::new(),
            parts_left: 0,
            status: Status::Ok,
        };
        if let Some(index) = self.free_chains.pop() {
            self.chains[index as usize] = Some(state);
            index
        } else {
            self.chains.push(Some(state));
            (self.chains.len() - 1) as u32
        }
    }

    /// What a chain writes of the guest's memory.
    pub(crate) fn note_written(&mut self, chain: u32, slices: &[MemorySlice]) {
        self.chains[chain as usize].as_mut().expect("the chain is in flight").written.extend_from_slice(slices);
    }

    /// The table of guest memory changes: says of every chain in flight where its regions are now, if they still are.
    pub(crate) fn carry_over(&mut self, carried: impl Fn(RegionSet) -> Option<RegionSet>) {
        for chain in self.chains.iter_mut().flatten() {
            chain.regions = chain.regions.and_then(&carried);
        }
    }

    /// One more request of the route for a chain.
    pub(crate) fn add_part(&mut self, chain: u32) -> RequestId {
        self.chains[chain as usize].as_mut().expect("the chain is in flight").parts_left += 1;
        let part = Part { chain, holds: 0, status: Status::Ok, live: true };
        self.live_parts += 1;
        let index = if let Some(index) = self.free_parts.pop() {
            self.parts[index as usize] = part;
            index
        } else {
            self.parts.push(part);
            (self.parts.len() - 1) as u32
        };
        self.touched.push(index);
        RequestId(index)
    }

    fn live(&mut self, request: RequestId) -> Option<&mut Part> {
        let part = self.parts.get_mut(request.0 as usize).filter(|part| part.live);
        if part.is_none() {
            log::error!("the route named request {} which is not in flight", request.0);
            debug_assert!(false, "the route named a request that is not in flight");
        }
        part
    }

    /// The request has a commit block.
    pub(crate) fn note_commit(&mut self, request: RequestId) {
        if let Some(chain) = self.parts.get(request.0 as usize).filter(|part| part.live).map(|part| part.chain)
            && let Some(state) = &mut self.chains[chain as usize]
        {
            state.is_commit = true;
        }
    }

    /// One more thing the request waits for.
    pub(crate) fn hold(&mut self, request: RequestId) {
        if let Some(part) = self.live(request) {
            part.holds += 1;
        }
    }

    /// One thing less.
    pub(crate) fn release(&mut self, request: RequestId, status: Status) {
        let Some(part) = self.live(request) else { return };
        if part.holds == 0 {
            log::error!("the route released request {} which had no hold", request.0);
            debug_assert!(false, "a release without a hold");
            return;
        }
        part.holds -= 1;
        if part.status == Status::Ok {
            part.status = status;
        }
        if part.holds == 0 {
            self.touched.push(request.0);
        }
    }

    /// Takes one part that waits for nothing any more; the caller goes on until there is none. To be called when a whole
    /// plan has been carried out.
    pub(crate) fn settle_one(&mut self) -> Option<Settled> {
        while let Some(index) = self.touched.pop() {
            let part = &mut self.parts[index as usize];
            if !part.live || part.holds > 0 {
                continue;
            }
            part.live = false;
            let (chain, status) = (part.chain, part.status);
            self.live_parts -= 1;
            self.free_parts.push(index);
            let state = self.chains[chain as usize].as_mut().expect("the chain of a live part is in flight");
            if state.status == Status::Ok {
                state.status = status;
            }
            state.parts_left -= 1;
            return Some(if state.parts_left == 0 { Settled::Chain(chain) } else { Settled::Part });
        }
        None
    }

    /// Whether a chain whose last part has settled needs a flush now; asked once.
    pub(crate) fn take_flush_after(&mut self, chain: u32) -> bool {
        let state = self.chains[chain as usize].as_mut().expect("the chain is in flight");
        state.status == Status::Ok && std::mem::take(&mut state.flush_after)
    }

    /// Takes a chain out, with how it ended.
    pub(crate) fn finish(&mut self, chain: u32) -> (ChainState, Status) {
        let state = self.chains[chain as usize].take().expect("the chain is in flight");
        debug_assert_eq!(state.parts_left, 0);
        self.free_chains.push(chain);
        let status = state.status;
        (state, status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::{MemorySlice, PageId};

    fn chain(tracker: &mut Tracker, flush_after: bool) -> u32 {
        // SAFETY: an empty slice is never accessed.
        let byte = unsafe { MemorySlice::new(std::ptr::dangling_mut(), 0, PageId::NONE, 0) };
        let place = StatusPlace { byte, address: 0 };
        tracker.add_chain((0, 0), 0, (place, RegionSet::default()), 0, flush_after, (ChainKind::Write, Instant::now()))
    }

    #[test]
    fn memory_that_was_taken_away_does_not_come_back() {
        let mut tracker = Tracker::default();
        let chain = chain(&mut tracker, false);
        tracker.add_part(chain);
        tracker.carry_over(|_| None);
        tracker.carry_over(Some);
        assert_eq!(tracker.settle_one(), Some(Settled::Chain(chain)));
        assert_eq!(tracker.finish(chain).0.regions, None);
    }

    #[test]
    fn what_waits_for_nothing_settles_at_once() {
        let mut tracker = Tracker::default();
        let chain = chain(&mut tracker, false);
        tracker.add_part(chain);
        assert_eq!(tracker.settle_one(), Some(Settled::Chain(chain)));
        assert_eq!(tracker.settle_one(), None);
        assert_eq!(tracker.finish(chain).1, Status::Ok);
        assert_eq!((tracker.live_parts(), tracker.live_chains()), (0, 0));
    }

    #[test]
    fn the_first_error_is_the_answer() {
        let mut tracker = Tracker::default();
        let chain = chain(&mut tracker, false);
        let (one, two) = (tracker.add_part(chain), tracker.add_part(chain));
        tracker.hold(one);
        tracker.hold(one);
        tracker.hold(two);
        assert_eq!(tracker.settle_one(), None);
        tracker.release(one, Status::Unsupported);
        tracker.release(one, Status::IoError);
        assert_eq!(tracker.settle_one(), Some(Settled::Part));
        tracker.release(two, Status::Ok);
        assert_eq!(tracker.settle_one(), Some(Settled::Chain(chain)));
        assert!(!tracker.take_flush_after(chain));
        assert_eq!(tracker.finish(chain).1, Status::Unsupported);
    }

    #[test]
    fn a_release_before_a_later_hold_of_the_same_plan_does_not_complete() {
        let mut tracker = Tracker::default();
        let chain = chain(&mut tracker, true);
        let part = tracker.add_part(chain);
        tracker.hold(part);
        tracker.release(part, Status::Ok);
        tracker.hold(part);
        assert_eq!(tracker.settle_one(), None);
        tracker.release(part, Status::Ok);
        assert_eq!(tracker.settle_one(), Some(Settled::Chain(chain)));
        assert!(tracker.take_flush_after(chain));
        assert!(!tracker.take_flush_after(chain), "once");
    }
}
