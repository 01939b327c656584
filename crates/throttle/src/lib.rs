//! Bounds on operations and bytes a second, with bursts, of one disk or of several together.
//!
//! A token bucket: it fills at the bounded rate up to the burst, and each operation takes its share. An operation that finds
//! anything in it is let through whole and may leave a debt, which the ones behind it wait for; so nothing has to be cut, and over
//! any time no more passes than the rate, the burst and one operation. Pure: the time is an argument.
//!
//! Must never: let a disk wait longer than its debt. Failure story: a clock that goes back fills nothing; one that jumps forward
//! fills no more than the burst.

#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most a second, and at once: beyond any disk, and far from where numbers end.
pub const RATE_MAX: u64 = 1 << 50;

/// A bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// So many a second, from 1 to [`RATE_MAX`].
    pub per_second: u64,
    /// So many at once, after a time without any: from 1 to [`RATE_MAX`]. A tenth of a second's is the usual.
    pub burst: u64,
}

/// What is bounded; nothing where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Reads, writes, discards and zeroings.
    pub operations: Option<Bound>,
    /// Bytes read and written.
    pub bytes: Option<Bound>,
}

impl Limits {
    /// Whether nothing is bounded.
    pub fn is_empty(&self) -> bool {
        *self == Limits::default()
    }
}

/// Billionths, so that no rate loses anything to rounding.
const UNIT: i128 = 1_000_000_000;

/// A bucket.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    bound: Bound,
    /// What is in it, in billionths; less than nothing: the debt.
    level: i128,
    filled: Instant,
}

impl Bucket {
    fn new(bound: Bound, now: Instant) -> Self {
        let within = |number: u64| number.clamp(1, RATE_MAX);
        let bound = Bound { per_second: within(bound.per_second), burst: within(bound.burst) };
        Bucket { bound, level: i128::from(bound.burst) * UNIT, filled: now }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled);
        self.filled = self.filled.max(now);
        // At most 2^50 times 2^94: no overflow before the sun is out.
        let came = i128::from(self.bound.per_second).saturating_mul(passed.as_nanos().min(1 << 70) as i128);
        self.level = self.level.saturating_add(came).min(i128::from(self.bound.burst) * UNIT);
    }

    /// How long until the debt is paid; none if there is none.
    fn wait(&self) -> Option<Duration> {
        let debt = u128::try_from(-self.level).ok().filter(|_| self.level < 0)?;
        let nanoseconds = debt.div_ceil(u128::from(self.bound.per_second));
        Some(Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
    }
}

#[derive(Debug)]
struct Buckets {
    operations: Option<Bucket>,
    bytes: Option<Bucket>,
}

/// What one disk, or several that share it, may do.
#[derive(Clone, Debug)]
pub struct Throttle(Arc<Mutex<Buckets>>);

impl Throttle {
    /// One that begins with full buckets.
    pub fn new(limits: Limits, now: Instant) -> Self {
        let bucket = |bound: Option<Bound>| bound.map(|bound| Bucket::new(bound, now));
        Throttle(Arc::new(Mutex::new(Buckets { operations: bucket(limits.operations), bytes: bucket(limits.bytes) })))
    }

    fn with<T>(&self, work: impl FnOnce(&mut Buckets) -> T) -> T {
        // A thread that panicked has left numbers that are numbers.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether an operation may pass: at once if none, else how long it has to wait.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        self.with(|buckets| {
            let mut all = [&mut buckets.operations, &mut buckets.bytes];
            let waits = all.iter_mut().filter_map(|bucket| {
                let bucket = bucket.as_mut()?;
                bucket.fill(now);
                bucket.wait()
            });
            waits.max()
        })
    }

    /// An operation on so many bytes has passed.
    pub fn take(&self, bytes: u64) {
        self.with(|buckets| {
            for (bucket, amount) in [(&mut buckets.operations, 1), (&mut buckets.bytes, bytes)] {
                if let Some(bucket) = bucket {
                    bucket.level = bucket.level.saturating_sub(i128::from(amount) * UNIT);
                }
            }
        });
    }

    /// Other bounds from now on; a debt stays.
    pub fn change(&self, limits: Limits, now: Instant) {
        self.with(|buckets| {
            for (bucket, bound) in [(&mut buckets.operations, limits.operations), (&mut buckets.bytes, limits.bytes)] {
                *bucket = bound.map(|bound| {
                    let mut new = Bucket::new(bound, now);
                    if let Some(mut old) = *bucket {
                        old.fill(now);
                        new.level = new.level.min(old.level);
                    }
                    new
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn operations(per_second: u64, burst: u64) -> Limits {
        Limits { operations: Some(Bound { per_second, burst }), bytes: None }
    }

    /// Somebody who always wants more: how many operations of so many bytes pass in a time.
    fn greedy(throttle: &Throttle, start: Instant, time: Duration, bytes: u64) -> u64 {
        let (mut now, mut passed) = (start, 0);
        while now < start + time {
            match throttle.wait(now) {
                None => {
                    throttle.take(bytes);
                    passed += 1;
                }
                Some(wait) => {
                    assert!(!wait.is_zero());
                    now += wait;
                }
            }
        }
        passed
    }

    #[test]
    fn no_more_passes_than_the_rate_the_burst_and_one() {
        let start = Instant::now();
        for (per_second, burst) in [(1, 1), (100, 10), (7, 1000), (1_000_000, 3)] {
            let throttle = Throttle::new(operations(per_second, burst), start);
            let passed = greedy(&throttle, start, MS(2000), 4096);
            let most = 2 * per_second + burst;
            assert!(passed <= most + 1 && passed + 1 >= most, "{per_second}, {burst}: {passed}");
        }
        let bytes = Limits { operations: None, bytes: Some(Bound { per_second: 1 << 20, burst: 1 << 16 }) };
        let passed = greedy(&Throttle::new(bytes, start), start, MS(1000), 4096);
        assert!((256 + 16..=256 + 17).contains(&passed), "{passed}");
    }

    #[test]
    fn what_is_large_passes_whole_and_is_paid_for() {
        let start = Instant::now();
        let throttle =
            Throttle::new(Limits { operations: None, bytes: Some(Bound { per_second: 1000, burst: 1 }) }, start);
        assert_eq!(throttle.wait(start), None);
        throttle.take(5001);
        assert_eq!(throttle.wait(start), Some(MS(5000)));
        assert_eq!(throttle.wait(start + MS(4999)), Some(MS(1)));
        assert_eq!(throttle.wait(start + MS(5000)), None);
        // A clock that goes back pays nothing.
        assert_eq!(throttle.wait(start), None);
        throttle.take(1000);
        assert_eq!(throttle.wait(start), Some(MS(1000)));
    }

    #[test]
    fn both_bounds_hold_and_the_slower_one_says_how_long() {
        let start = Instant::now();
        let bound = |per_second| Some(Bound { per_second, burst: 1 });
        let throttle = Throttle::new(Limits { operations: bound(10), bytes: bound(1000) }, start);
        throttle.take(101);
        assert_eq!(throttle.wait(start), Some(MS(100)), "bytes");
        let throttle = Throttle::new(Limits { operations: bound(10), bytes: bound(1000) }, start);
        (0..3).for_each(|_| throttle.take(1));
        assert_eq!(throttle.wait(start), Some(MS(200)), "operations");
    }

    #[test]
    fn those_who_share_it_get_no_more_together() {
        let start = Instant::now();
        let throttle = Throttle::new(operations(100, 1), start);
        let other = throttle.clone();
        let both = greedy(&throttle, start, MS(1000), 1) + greedy(&other, start + MS(1000), MS(1000), 1);
        assert!((200..=202).contains(&both), "{both}");
    }

    #[test]
    fn other_bounds_leave_the_debt_and_no_bound_lets_all_pass() {
        let start = Instant::now();
        let throttle = Throttle::new(operations(10, 1), start);
        (0..11).for_each(|_| throttle.take(0));
        throttle.change(operations(100, 50), start);
        assert_eq!(throttle.wait(start), Some(MS(100)));
        throttle.change(Limits::default(), start);
        assert_eq!(throttle.wait(start), None);
        assert!(Limits::default().is_empty() && !operations(1, 1).is_empty());
    }

    #[test]
    fn numbers_that_cannot_be_are_brought_within_bounds() {
        let start = Instant::now();
        for (per_second, burst) in [(0, 0), (u64::MAX, u64::MAX)] {
            let throttle = Throttle::new(operations(per_second, burst), start);
            throttle.take(u64::MAX);
            throttle.wait(start + Duration::from_secs(u64::from(u32::MAX)));
        }
    }
}
