//! How long things took: a histogram of fixed buckets, for metrics.
//!
//! Bucket `i` counts what took at most `2^i` microseconds and more than the bucket before; the last one counts everything beyond
//! ([`BUCKETS`]). A factor of two is coarse, and enough to tell a drive's flush from a page's copy; in return recording is two loads
//! and two stores, without a lock or an allocation.
//!
//! Must never: be written by two threads at once (counts would be lost, nothing else). Failure story: a reader that looks while
//! one is recorded may see it counted and not summed yet.

#![forbid(unsafe_code)]

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bounded buckets: up to 2^24 us, 16.8 s. One more counts the rest.
pub const BOUNDED: usize = 25;
/// All of them.
pub const BUCKETS: usize = BOUNDED + 1;

/// Written by one thread, read by anybody.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

/// A histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// How many there were in each bucket; buckets at the end that are empty are left out.
    pub buckets: Vec<u64>,
    /// Their sum, in nanoseconds.
    pub sum_ns: u64,
}

/// The bucket of a time.
fn bucket(time: Duration) -> usize {
    let us = time.as_nanos().div_ceil(1000).clamp(1, 1 << BOUNDED) as u64;
    us.next_power_of_two().trailing_zeros() as usize
}

/// The most that bucket `index` counts, in seconds; none for the last.
pub fn bound_seconds(index: usize) -> Option<f64> {
    (index < BOUNDED).then(|| (1u64 << index) as f64 / 1e6)
}

impl Histogram {
    /// One thing took so long.
    pub fn record(&self, time: Duration) {
        let add = |to: &AtomicU64, value: u64| {
            to.store(to.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
        };
        add(&self.counts[bucket(time)], 1);
        add(&self.sum_ns, time.as_nanos().min(u128::from(u64::MAX)) as u64);
    }

    /// Reads it.
    pub fn snapshot(&self) -> Snapshot {
        let mut buckets: Vec<u64> = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let used = buckets.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        buckets.truncate(used);
        Snapshot { buckets, sum_ns: self.sum_ns.load(Ordering::Relaxed) }
    }
}

impl Snapshot {
    /// How many there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The time, in seconds, that a `share` of them (0 to 1) took at most: read off a line through the bucket it falls into. None
    /// where nothing was counted; the last bound for what is beyond all bounds.
    pub fn quantile_seconds(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let rank = share.clamp(0.0, 1.0) * count as f64;
        let mut below = 0.0;
        for (index, here) in self.buckets.iter().enumerate().filter(|(_, here)| **here > 0) {
            let here = *here as f64;
            if below + here >= rank {
                let Some(most) = bound_seconds(index) else { return bound_seconds(BOUNDED - 1) };
                let least = index.checked_sub(1).and_then(bound_seconds).unwrap_or_default();
                return Some(least + (most - least) * ((rank - below) / here));
            }
            below += here;
        }
        None
    }

    /// What was counted since `earlier`. A histogram that was begun anew meanwhile is given whole.
    #[must_use]
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let of = |index: usize| earlier.buckets.get(index).copied().unwrap_or_default();
        let is_newer = earlier.buckets.len() <= self.buckets.len()
            && self.buckets.iter().enumerate().all(|(index, count)| *count >= of(index));
        if !is_newer {
            return self.clone();
        }
        let buckets = self.buckets.iter().enumerate().map(|(index, count)| count - of(index)).collect();
        Snapshot { buckets, sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    #[test]
    fn every_time_has_its_bucket() {
        for (time, expected) in [
            (Duration::ZERO, 0),
            (US(1), 0),
            (Duration::from_nanos(1001), 1),
            (US(2), 1),
            (US(3), 2),
            (US(4), 2),
            (US(1 << 24), 24),
            (US((1 << 24) + 1), 25),
            (Duration::MAX, 25),
        ] {
            assert_eq!(bucket(time), expected, "{time:?}");
        }
        assert_eq!((bound_seconds(0), bound_seconds(10), bound_seconds(25)), (Some(1e-6), Some(1.024e-3), None));
    }

    #[test]
    fn what_was_recorded_is_read_and_told_apart_from_earlier() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot(), Snapshot::default());
        assert_eq!(histogram.snapshot().quantile_seconds(0.5), None);
        for _ in 0..3 {
            histogram.record(US(4));
        }
        let earlier = histogram.snapshot();
        histogram.record(US(100));
        let now = histogram.snapshot();
        assert_eq!((now.count(), now.sum_ns, now.buckets.len()), (4, 112_000, 8));
        let half = now.quantile_seconds(0.5).expect("something was counted");
        assert!(half > 2e-6 && half <= 4e-6, "{half}");
        let most = now.quantile_seconds(1.0).expect("something was counted");
        assert!((most - 128e-6).abs() < 1e-9, "{most}");
        let since = now.since(&earlier);
        assert_eq!((since.count(), since.sum_ns), (1, 100_000));
        assert_eq!(earlier.since(&now), earlier, "begun anew");
        histogram.record(Duration::MAX);
        assert_eq!(histogram.snapshot().quantile_seconds(1.0), bound_seconds(BOUNDED - 1));
    }
}
