//! A ring and its chains, laid open for the fuzz target `chain`: the very code that serves a guest, without a device
//! around it. Only there for tests and with the feature `fuzzing`, which nothing else turns on.

use crate::chain::Chain;
use crate::config_space::SEGMENTS_MAX;
use crate::request::{Limits, Range, parse};
use crate::ring::{Ring, RingAddresses, RunningRing, Whose};
use block_route::RequestKind;
use guest_memory::{MemorySlice, MemoryTable};
use std::sync::Arc;

pub use crate::request::Ask;

/// The most descriptors that one chain can have.
pub const DESCRIPTORS_MAX: usize = SEGMENTS_MAX as usize + 2;

/// A ring as a VMM would set it up, and the disk that it asks.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Descriptors in the ring.
    pub size: u16,
    /// Where the descriptor table, the available ring and the used ring are, as addresses of the VMM.
    pub addresses: [u64; 3],
    /// Where the available ring is taken up.
    pub base: u16,
    /// VIRTIO_RING_F_EVENT_IDX.
    pub event_index: bool,
    /// VIRTIO_RING_F_INDIRECT_DESC.
    pub indirect: bool,
    /// The disk, in bytes.
    pub disk_bytes: u64,
    /// It cannot be written.
    pub read_only: bool,
}

/// What was found at a head of the ring.
#[derive(Debug)]
pub struct Taken {
    /// The head.
    pub head: u16,
    /// What it asks, if it is a chain with a status byte. A device must not go on with the ring otherwise.
    pub asked: Option<Asked>,
}

/// A request.
#[derive(Debug)]
pub struct Asked {
    /// Where its status goes.
    pub status: MemorySlice,
    /// What is to be done.
    pub ask: Ask,
    /// Its ranges (discards and the like): kind, offset and length in bytes.
    pub ranges: Vec<(RequestKind, u64, u64)>,
    /// What is left to be read by the device.
    pub readable: Vec<MemorySlice>,
    /// What is left to be written by the device.
    pub writable: Vec<MemorySlice>,
}

/// A started ring.
#[derive(Debug)]
pub struct Probe {
    ring: RunningRing,
    indirect: bool,
    limits: Limits,
    chain: Chain,
    ranges: Vec<Range>,
}

impl Probe {
    /// Starts a ring; nothing if it cannot be one.
    pub fn new(table: &Arc<MemoryTable>, setup: &Setup) -> Option<Self> {
        let [descriptors, available, used] = setup.addresses;
        let addresses = RingAddresses { descriptors, available, used, used_log: None };
        let ring = Ring { size: setup.size, addresses, base: setup.base, ..Ring::default() };
        let ring = RunningRing::new(0, &ring, table, setup.event_index, None, Whose::Known).ok()?;
        let is_writable = !setup.read_only;
        let limits = Limits {
            size_bytes: setup.disk_bytes,
            read_only: setup.read_only,
            discard: is_writable,
            write_zeroes: is_writable,
        };
        Some(Probe { ring, indirect: setup.indirect, limits, chain: Chain::default(), ranges: Vec::new() })
    }

    /// Takes the next request, as a pass of the worker does. Nothing when there is none, or the ring is broken.
    pub fn take(&mut self) -> Option<Taken> {
        let (head, _) = self.ring.pop().ok()??;
        self.ring.hush().ok()?;
        let Ok(status) = self.chain.walk(&self.ring.table, &self.ring.descriptors, head, self.indirect) else {
            return Some(Taken { head, asked: None });
        };
        let ask = parse(&mut self.chain, self.limits, &mut self.ranges);
        let asked = Asked {
            status: status.byte,
            ask,
            ranges: self.ranges.iter().map(|range| (range.kind, range.offset, range.len)).collect(),
            readable: self.chain.readable.clone(),
            writable: self.chain.writable.clone(),
        };
        Some(Taken { head, asked: Some(asked) })
    }

    /// Answers a request. False when the ring is broken.
    pub fn answer(&mut self, head: u16, written: u32) -> bool {
        self.ring.push_used(head, written).is_ok()
    }

    /// What a worker does between passes. Whether there is more to take; nothing when the ring is broken.
    pub fn pause(&mut self) -> Option<bool> {
        self.ring.wants_interrupt().ok()?;
        self.ring.listen().ok()
    }
}

#[cfg(test)]
mod tests;
