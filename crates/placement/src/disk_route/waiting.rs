//! Pieces of requests, as they are asked about, and wait.

use crate::keeper::HomeChange;
use crate::layout::{HomeRange, Piece};
use block_route::{RequestId, RequestKind, segments};
use guest_memory::MemorySlice;

/// A piece of a request that has to wait; its request is held.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub request: RequestId,
    pub kind: RequestKind,
    pub piece: Piece,
    pub slices: Vec<MemorySlice>,
    /// It may change the layout.
    pub rescan: bool,
    /// It was asked before, of another process or before the device was stopped.
    pub is_again: bool,
}

impl Waiting {
    /// Cuts off what is from byte `at` of the disk on; nothing where that is not inside a piece of homes.
    pub fn cut(&mut self, at: u64) -> Option<Waiting> {
        let Piece::Home(home, start, end) = self.piece else { return None };
        if at <= start || at >= end {
            return None;
        }
        let mut rest = self.clone();
        rest.piece = Piece::Home(home, at, end);
        self.piece = Piece::Home(home, start, at);
        if !self.slices.is_empty() {
            rest.slices = segments::part(&self.slices, at - start, end - at);
            self.slices = segments::part(&self.slices, 0, at - start);
        }
        Some(rest)
    }
}

/// What a keeper is asked about it.
pub(super) fn home_change<'a>(
    home: &HomeRange,
    waiting: &'a Waiting,
    payload: &'a [Option<MemorySlice>],
) -> HomeChange<'a> {
    let block_bytes = u64::from(home.block_bytes);
    let range = waiting.piece.range();
    let range = range.start - home.start..range.end - home.start;
    HomeChange {
        request: waiting.request,
        kind: waiting.kind,
        blocks: range.start / block_bytes..range.end.div_ceil(block_bytes),
        whole: range.start.div_ceil(block_bytes)..range.end / block_bytes,
        range,
        payload,
        slices: &waiting.slices,
        is_watched: waiting.rescan,
        is_again: waiting.is_again,
    }
}
