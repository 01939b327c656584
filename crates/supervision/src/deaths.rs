//! How often a worker may die before it is not started again by itself.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many deaths …
pub const DEATHS_MAX: usize = 3;
/// … in so long are too many.
pub const WITHIN: Duration = Duration::from_secs(10);

/// What to do after a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Start another worker.
    Restart,
    /// It dies again and again: hold the VM as it is, and say so.
    Hold,
}

/// The deaths of one VM's workers.
#[derive(Clone, Debug)]
pub struct Deaths {
    recent: VecDeque<Instant>,
    total: u64,
    most: usize,
}

impl Default for Deaths {
    fn default() -> Self {
        Self::at_most(DEATHS_MAX)
    }
}

impl Deaths {
    /// None so far; `most` of them in [`WITHIN`] are too many.
    pub fn at_most(most: usize) -> Self {
        Deaths { recent: VecDeque::new(), total: 0, most }
    }

    /// A worker has died. Says what to do.
    pub fn died(&mut self, now: Instant) -> Next {
        self.total += 1;
        self.recent.push_back(now);
        while self.recent.front().is_some_and(|earliest| now.saturating_duration_since(*earliest) >= WITHIN) {
            self.recent.pop_front();
        }
        if self.recent.len() >= self.most { Next::Hold } else { Next::Restart }
    }

    /// Somebody wants it tried again.
    pub fn forgive(&mut self) {
        self.recent.clear();
    }

    /// How many there were.
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_in_ten_seconds_are_too_many() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut deaths = Deaths::default();
        for seconds in [0, 5, 10, 15, 20] {
            assert_eq!(deaths.died(at(seconds)), Next::Restart, "{seconds}");
        }
        assert_eq!(deaths.died(at(21)), Next::Hold);
        assert_eq!(deaths.total(), 6);
        deaths.forgive();
        assert_eq!(deaths.died(at(22)), Next::Restart);
        assert_eq!(deaths.total(), 7);
    }
}
