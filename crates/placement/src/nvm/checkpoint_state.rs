//! Checkpoints of a log, the one that is going on and what became of the last ones: the state of [`super::checkpoint`].

use super::versions::Written;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A checkpoint that is going on.
#[derive(Debug)]
pub(super) struct Checkpoint {
    /// What is left, the largest run last.
    pub runs: Vec<Range<u64>>,
    pub writing: usize,
    /// Blocks that are at home, and which version of them; each with the number of the end of its write, ascending.
    pub written: VecDeque<(u64, Written)>,
    /// Since when the first of them waits for a flush.
    pub waiting_since: Instant,
    /// Since when a flush of its own is under way.
    pub flushing: Option<Instant>,
    /// There may be more that can go home.
    pub is_of_some: bool,
    /// Somebody waits for its end.
    pub is_urgent: bool,
    pub has_failed: bool,
}

impl Checkpoint {
    /// Nothing goes home that is not on its way.
    pub fn end_soon(&mut self) {
        self.runs.clear();
        self.is_urgent = true;
    }

    /// Whether something that it wrote home waits for a flush.
    pub fn has_written(&self) -> bool {
        !self.written.is_empty()
    }

    /// All of it is at home, durably or not.
    pub fn is_through(&self) -> bool {
        self.runs.is_empty() && self.writing == 0
    }

    /// After which time it flushes the disk itself, if nobody else does.
    pub fn flush_due_in(&self, patience: Duration) -> Option<Duration> {
        let is_waiting = self.is_through() && self.has_written() && self.flushing.is_none();
        is_waiting.then(|| patience.saturating_sub(self.waiting_since.elapsed()))
    }

    /// What it has written may not be on storage, and no later flush says so.
    pub fn flush_failed(&mut self) {
        self.has_failed = true;
    }
}

/// Checkpoints of a log: the one that is going on, what became of the last ones, and what is to go home with the next.
#[derive(Debug)]
pub(super) struct Checkpoints {
    /// The one that is going on.
    pub now: Option<Checkpoint>,
    /// The last one has failed, …
    pub has_failed: bool,
    /// … so many have, one after the other, …
    pub failures: u32,
    /// … and the last one then.
    pub failed_at: Instant,
    /// When everything was last sent home because of the options' interval.
    pub all_began_at: Instant,
    /// How often everything was asked to go home when that was looked at last.
    pub asked: u64,
    /// What one took out of the region is not collected yet.
    pub is_collection_due: bool,
    /// After which transaction long runs were looked for last.
    pub runs_looked_for: Option<u32>,
    /// Appends that were logged, and are to go home in the background.
    pub soon: Vec<u64>,
}

impl Checkpoints {
    /// None yet, of a disk that was asked so often to send everything home.
    pub fn new(asked: u64) -> Self {
        Checkpoints {
            now: None,
            has_failed: false,
            failures: 0,
            failed_at: Instant::now(),
            all_began_at: Instant::now(),
            asked,
            is_collection_due: false,
            runs_looked_for: None,
            soon: Vec::new(),
        }
    }

    /// Nothing goes home any more.
    pub fn forget(&mut self) {
        self.now = None;
        self.soon.clear();
    }
}
