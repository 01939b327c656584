//! Times of single operations, and the percentiles of them that a load tells.

use std::fmt::Write;
use std::time::{Duration, Instant};

/// The percentiles that are told, in per cent.
const PERCENTILES: [usize; 3] = [50, 95, 99];

/// How long each of many operations took, in whole µs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    times_us: Vec<u64>,
}

impl Latencies {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs an operation and keeps how long it took, whether it failed or not.
    pub fn time<T>(&mut self, operation: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let outcome = operation();
        self.add(started.elapsed());
        outcome
    }

    /// Adds one.
    pub fn add(&mut self, time: Duration) {
        self.times_us.push(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Adds those of another thread.
    pub fn merge(&mut self, other: Self) {
        self.times_us.extend(other.times_us);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.times_us.len()
    }

    /// `NAME_p50_us=.. NAME_p95_us=.. NAME_p99_us=.. NAME_max_us=..`, each with a space before it; nothing of no operations.
    /// A percentile is the least time that so many per cent of all do not exceed (nearest rank).
    pub fn words(&self, name: &str) -> String {
        let mut sorted = self.times_us.clone();
        sorted.sort_unstable();
        let mut words = String::new();
        let Some(last) = sorted.last() else { return words };
        for percent in PERCENTILES {
            let rank = (sorted.len() * percent).div_ceil(100).max(1);
            let _ = write!(words, " {name}_p{percent}_us={}", sorted[rank - 1]);
        }
        let _ = write!(words, " {name}_max_us={last}");
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut latencies = Latencies::new();
        assert_eq!(latencies.words("x"), "");
        (1..=100).rev().for_each(|time| latencies.add(Duration::from_micros(time)));
        assert_eq!(latencies.words("x"), " x_p50_us=50 x_p95_us=95 x_p99_us=99 x_max_us=100");
        let mut one = Latencies::new();
        assert_eq!(one.time(|| 7), 7);
        latencies.merge(one);
        assert_eq!(latencies.count(), 101);
        let mut few = Latencies::new();
        for time in [10, 20, 30] {
            few.add(Duration::from_micros(time));
        }
        assert_eq!(few.words("fsync"), " fsync_p50_us=20 fsync_p95_us=30 fsync_p99_us=30 fsync_max_us=30");
    }
}
