//! What is written into a log since it was closed under its guest ([`crate::going_on`]): pure.

use jbd2::Format;
use std::collections::BTreeMap;

/// A transaction has at most a quarter of a log's blocks.
pub(crate) const PART_MAX: u32 = 4;

/// What was written into a log since it was closed.
#[derive(Debug, Default)]
pub(crate) struct Unannounced {
    /// The number of the transaction that its kernel would write next, and the log's shape. Nothing inside: it is not known, or
    /// somebody else has written there, or the guest has closed the log itself.
    pub next: Option<Option<(u32, Format)>>,
    /// Which blocks, and whether each is a control block of that transaction.
    pub written: BTreeMap<u32, bool>,
    /// What an earlier worker has seen written is not known.
    pub is_taken_up: bool,
}

/// What was written before a commit block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    /// Its transaction, which begins there.
    Transaction(u32),
    /// The end of a transaction, whose beginning is not there.
    Part,
    /// Something else.
    Other,
}

impl Unannounced {
    /// Nobody goes on with the log without a word.
    pub(crate) fn of_nobody() -> Self {
        Unannounced { next: Some(None), ..Self::default() }
    }

    /// What was written before the commit block that comes at `commit`.
    pub(crate) fn before(&self, commit: u32, format: &Format) -> Before {
        let log_blocks = format.last - format.first;
        let distance = |position: u32| (commit + log_blocks - position) % log_blocks;
        let is_near = |position: u32| {
            (format.first..format.last).contains(&position) && distance(position) <= log_blocks / PART_MAX
        };
        if !is_near(commit) || !self.written.keys().all(|position| is_near(*position)) {
            return Before::Other;
        }
        // The farthest control block is the first of all.
        let controls = self.written.iter().filter(|(_, is_control)| **is_control).map(|(position, _)| *position);
        let first = controls.chain([commit]).max_by_key(|position| distance(*position)).unwrap_or(commit);
        let is_whole = self.written.keys().all(|position| distance(*position) <= distance(first));
        if is_whole { Before::Transaction(first) } else { Before::Part }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jbd2::Superblock;

    fn format() -> Format {
        let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
        for (at, word) in [(0, 0xc03b_3998_u32), (4, 4), (12, 4096), (16, 1024), (20, 1), (24, 7)] {
            raw[at..at + 4].copy_from_slice(&word.to_be_bytes());
        }
        Superblock::parse(&raw).expect("a superblock").1
    }

    #[test]
    fn a_transaction_is_found_whole_or_not_at_all() {
        let before = |written: &[(u32, bool)], commit: u32| {
            let written = written.iter().copied().collect();
            Unannounced { written, ..Unannounced::default() }.before(commit, &format())
        };
        assert_eq!(before(&[(20, true), (21, false), (22, false)], 23), Before::Transaction(20));
        assert_eq!(before(&[], 23), Before::Transaction(23), "an empty transaction is its commit block");
        assert_eq!(before(&[(20, true), (21, true), (22, false)], 23), Before::Transaction(20), "revokes come first");
        let around = [(1021, true), (1022, false), (1023, false), (1, false)];
        assert_eq!(before(&around, 2), Before::Transaction(1021), "around the end");
        assert_eq!(before(&[(21, false)], 23), Before::Part, "nothing names what it holds");
        assert_eq!(before(&[(19, false), (20, true)], 23), Before::Part, "nor this");
        assert_eq!(before(&[(20, true), (30, false)], 23), Before::Other, "behind it comes nothing yet");
        assert_eq!(before(&[(20, true)], 800), Before::Other, "larger than a transaction can be");
    }
}
