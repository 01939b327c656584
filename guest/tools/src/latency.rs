//! Times of single operations, and the percentiles of them that a load tells.

use std::fmt::Write;
use std::time::{Duration, Instant};

/// The percentiles that are told, in per mille, and what each is called.
const PERCENTILES: [(usize, &str); 4] = [(500, "p50"), (950, "p95"), (990, "p99"), (999, "p999")];
/// Where the whole distribution is told, in per mille.
const DISTRIBUTION: [usize; 16] = [10, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900, 950, 980, 990, 995, 999];

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

    /// `NAME_p50_us=.. NAME_p95_us=.. NAME_p99_us=.. NAME_p999_us=.. NAME_max_us=.. NAME_distribution_us=1:..,5:..,…,99.9:..`, each with
    /// a space before it; nothing of no operations. A percentile is the least time that so many per cent of all do not
    /// exceed (nearest rank); p999 is 99.9 per cent.
    pub fn words(&self, name: &str) -> String {
        let mut sorted = self.times_us.clone();
        sorted.sort_unstable();
        let mut words = String::new();
        let Some(last) = sorted.last() else { return words };
        let at = |mille: usize| sorted[(sorted.len() * mille).div_ceil(1000).max(1) - 1];
        for (mille, called) in PERCENTILES {
            let _ = write!(words, " {name}_{called}_us={}", at(mille));
        }
        let _ = write!(words, " {name}_max_us={last} {name}_distribution_us=");
        for (index, mille) in DISTRIBUTION.into_iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(words, "{comma}{}:{}", mille as f64 / 10.0, at(mille));
        }
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
        let words = latencies.words("x");
        let beginning =
            " x_p50_us=50 x_p95_us=95 x_p99_us=99 x_p999_us=100 x_max_us=100 x_distribution_us=1:1,5:5,10:10,";
        assert!(words.starts_with(beginning) && words.ends_with(",99:99,99.5:100,99.9:100"), "{words}");
        let mut one = Latencies::new();
        assert_eq!(one.time(|| 7), 7);
        latencies.merge(one);
        assert_eq!(latencies.count(), 101);
        let mut few = Latencies::new();
        for time in [10, 20, 30] {
            few.add(Duration::from_micros(time));
        }
        let words = few.words("fsync");
        assert!(
            words.starts_with(" fsync_p50_us=20 fsync_p95_us=30 fsync_p99_us=30 fsync_p999_us=30 fsync_max_us=30 "),
            "{words}"
        );
    }
}
