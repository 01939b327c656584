//! Latencies, counted in buckets that grow with the value (crate `hdrhistogram`): two decimal digits are kept.

/// The longest that is told from longer ones, in nanoseconds: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// A histogram of nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram(hdrhistogram::Histogram<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Histogram(hdrhistogram::Histogram::new_with_bounds(1, LONGEST_NS, 2).expect("the bounds are in order"))
    }
}

impl Histogram {
    /// Counts one.
    pub fn add(&mut self, nanoseconds: u64) {
        self.0.saturating_record(nanoseconds);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The value in nanoseconds that `percent` of all do not exceed; 0 when there are none.
    pub fn percentile(&self, percent: f64) -> u64 {
        self.0.value_at_percentile(percent)
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Histogram) {
        self.0.add(&other.0).expect("they have the same bounds");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_have_two_digits() {
        let mut histogram = Histogram::default();
        for value in 1..=100_000u64 {
            histogram.add(value);
        }
        for percent in [1.0, 50.0, 99.0, 99.9] {
            let exact = percent * 1000.0;
            let found = histogram.percentile(percent) as f64;
            assert!((exact..=exact * (1.0 + 1.0 / 100.0) + 1.0).contains(&found), "{percent}: {found}");
        }
        let mut both = Histogram::default();
        assert_eq!(both.percentile(50.0), 0);
        both.add(u64::MAX);
        both.merge(&histogram);
        assert_eq!(both.count(), 100_001);
    }
}
