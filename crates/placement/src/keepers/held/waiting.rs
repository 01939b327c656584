//! What waits for home writes that were answered before they were done (`absorbing`, which decides): superblocks, flushes and changes of
//! homes of the guest.

use crate::log::Log;
use block_route::RequestId;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// When none of the host's writes has succeeded for so long after one has failed, storage is taken for broken.
const BROKEN_AFTER: Duration = Duration::from_secs(10);

/// Up to where transactions are given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Bar {
    /// The guest has not moved its tail yet.
    #[default]
    None,
    /// Those before this one.
    Before(u32),
    /// All: it closes.
    All,
}

/// A change of homes that waits.
#[derive(Clone, Debug)]
pub(super) struct AskedFor {
    /// The last transaction that was committed when it was asked for first.
    pub(super) first: u32,
    /// Every block that it touches.
    pub(super) blocks: Range<u64>,
    /// It was asked for before, of another process, and nobody knows when.
    pub(super) is_again: bool,
}

/// What waits for absorbed blocks to be home.
#[derive(Debug, Default)]
pub(super) struct Absorbing {
    /// Superblocks of the guest, held.
    pub(super) superblocks: VecDeque<(RequestId, Vec<u8>)>,
    /// Flushes of the guest, held.
    pub(super) flushes: Vec<RequestId>,
    /// Blocks that the guest is about to change.
    pub(super) wanted: Vec<Range<u64>>,
    pub(super) bar: Bar,
    /// Changes of homes that wait, for whatever reason.
    pub(super) asked: HashMap<(RequestId, u64), AskedFor>,
    /// When it is looked again.
    pub(super) due: Duration,
    /// Since when the host's writes fail.
    pub(super) fails_since: Option<Duration>,
}

impl Absorbing {
    pub(super) fn is_broken(&self, log: &Log) -> bool {
        self.fails_since.is_some_and(|since| log.home.now().saturating_sub(since) >= BROKEN_AFTER)
    }
}
