//! Which writes home are durable, by the flushes of the disk.
//!
//! Each write, the guest's or ours, gets a number when it ends. A flush covers the writes that had ended when it began, whoever asked for
//! it. One that fails covers nothing, and the others that are under way then cover nothing either: what it should have made durable no
//! later flush tells of.
//!
//! What it must never do: call a write durable that ended when its flush had begun.

use block_route::RequestId;
use std::collections::HashMap;

/// A flush that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flush {
    /// The keeper's own, by the number of its operation.
    Ours(u64),
    /// The guest's.
    Guest(RequestId),
    /// One that the keeper waits for.
    AtOnce,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    /// How many writes have ended, …
    ended: u64,
    /// … how many of them had when each flush began, …
    under_way: HashMap<Flush, u64>,
    /// … and how many are durable.
    durable: u64,
}

impl Coverage {
    /// Of a log that another process has served: all that it wrote is one write here, which is not durable.
    pub fn taken_up() -> Self {
        Coverage { ended: 1, ..Coverage::default() }
    }

    /// A write has ended, well or not. Gives its number.
    pub fn write_ended(&mut self) -> u64 {
        self.ended += 1;
        self.ended
    }

    /// The number of the last write that is durable, with all before it.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    pub fn begins(&mut self, flush: Flush) {
        self.under_way.insert(flush, self.ended);
    }

    pub fn ends(&mut self, flush: Flush, is_ok: bool) {
        let covered = self.under_way.remove(&flush).filter(|_| is_ok);
        self.durable = self.durable.max(covered.unwrap_or(0));
    }

    /// One has failed, whosever.
    pub fn flush_failed(&mut self) {
        self.under_way.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Flush = Flush::Guest(RequestId(7));

    #[test]
    fn a_flush_covers_what_had_ended_when_it_began() {
        let mut coverage = Coverage::default();
        let first = coverage.write_ended();
        coverage.begins(Flush::Ours(0));
        let second = coverage.write_ended();
        coverage.begins(GUEST);
        coverage.ends(GUEST, true);
        assert_eq!(coverage.durable(), second);
        coverage.ends(Flush::Ours(0), true);
        assert_eq!(coverage.durable(), second, "an earlier one that ends later takes nothing back");
        coverage.ends(Flush::Ours(0), true);
        assert!(first < second);
    }

    #[test]
    fn none_that_is_under_way_covers_anything_when_one_has_failed() {
        let mut coverage = Coverage::taken_up();
        coverage.begins(Flush::AtOnce);
        coverage.begins(GUEST);
        coverage.ends(GUEST, false);
        coverage.flush_failed();
        coverage.ends(Flush::AtOnce, true);
        assert_eq!(coverage.durable(), 0);
        coverage.begins(Flush::AtOnce);
        coverage.ends(Flush::AtOnce, true);
        assert_eq!(coverage.durable(), 1);
    }
}
