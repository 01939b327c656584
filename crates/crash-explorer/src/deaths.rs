//! When the worker of a simulation is killed, as it follows from the seed (`follow` has what happens then).

use guest_tools::random::Random;

/// Kills in one run, at most.
const DEATHS_MAX: u64 = 4;

/// When workers are killed.
#[derive(Debug, Default)]
pub(crate) struct Deaths {
    /// From which recorded event on, the last one first.
    pub(crate) at: Vec<usize>,
    /// The next one comes before this store.
    pub(crate) stores: Option<u64>,
    /// Workers that went on.
    pub(crate) followed: u64,
}

impl Deaths {
    /// What follows from the seed, for so many recorded events.
    pub(crate) fn of_seed(seed: u64, events: usize) -> Self {
        let mut random = Random::of(seed, 5);
        let count = 1 + random.below(DEATHS_MAX);
        let mut at: Vec<usize> = (0..count).map(|_| random.below(events.max(1) as u64) as usize).collect();
        at.sort_unstable_by(|a, b| b.cmp(a));
        Deaths { at, ..Deaths::default() }
    }
}
