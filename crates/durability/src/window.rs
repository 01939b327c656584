//! Transactions that are committed and not durable.

use crate::blocks::BlockSet;
use crate::contract::{Committed, Freed, Transaction, Version};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

/// A version that is not durable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub version: Version,
    pub sequence: u32,
    /// The guest has written this very version home, or something else past its journal, with so many writes ended by then.
    pub home: Option<u64>,
    /// It is, or may be, something else that the guest has written.
    pub is_past: bool,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    pub blocks: BTreeMap<u64, Held>,
    /// Revoked and not journaled again.
    pub revoked: BTreeSet<u64>,
    /// Freed, at some time within it.
    pub freed: BlockSet,
    /// The first and the last transaction, and when the first was committed.
    pub span: Option<(u32, u32, Duration)>,
    /// Guest writes that had ended when the last one was committed: its ordered data is among them.
    pub ended: u64,
}

impl Window {
    /// One more transaction.
    pub fn add(&mut self, transaction: &Transaction, now: Duration, ended: u64) {
        let sequence = transaction.sequence;
        for (block, version) in &transaction.blocks {
            self.revoked.remove(block);
            self.blocks.insert(*block, Held { version: *version, sequence, home: None, is_past: false });
        }
        for block in &transaction.revokes {
            self.blocks.remove(block);
            self.revoked.insert(*block);
        }
        match &transaction.freed {
            Freed::Blocks(ranges) => ranges.iter().for_each(|range| self.freed.insert(range.clone())),
            Freed::Unknown => self.freed.insert(0..u64::MAX),
        }
        self.span = match self.span {
            Some((first, _, since)) => Some((first, sequence, since)),
            None => Some((sequence, sequence, now)),
        };
        self.ended = ended;
    }

    /// Rule (g): copies of these blocks are to be replayed no more, whatever the guest commits. `last` is the last transaction that is
    /// committed, and `ended` counts the guest's writes that have ended: what they have at home is durable before that.
    pub fn revoke(&mut self, blocks: &[u64], last: u32, now: Duration, ended: u64) {
        self.revoked.extend(blocks);
        self.span.get_or_insert((last, last, now));
        self.ended = ended;
    }

    /// Rule (h): these are durable, and our log has no copies any more: it gets them once more.
    pub fn log_again(&mut self, newer: &[Committed], last: u32, now: Duration) {
        for Committed { block, version, transaction, .. } in newer {
            let held = Held { version: *version, sequence: *transaction, home: None, is_past: false };
            self.blocks.insert(*block, held);
        }
        self.span.get_or_insert((last, last, now));
    }

    /// The first so many blocks, without anything else that is said of them: a window that ends with no transaction.
    pub fn part(all: &BTreeMap<u64, Held>, blocks: usize) -> Window {
        let blocks = all.iter().take(blocks).map(|(block, held)| (*block, *held)).collect();
        Window { blocks, ..Window::default() }
    }

    /// Whether there is no transaction.
    pub fn is_empty(&self) -> bool {
        self.span.is_none()
    }

    /// Rule (b): whether a block of the range was freed or revoked.
    pub fn frees(&self, range: &Range<u64>) -> bool {
        self.freed.touches(range) || self.revoked.range(range.clone()).next().is_some()
    }

    /// Rule (a): whether a block of the range has a version here.
    pub fn holds(&self, range: &Range<u64>) -> bool {
        self.blocks.range(range.clone()).next().is_some()
    }
}
