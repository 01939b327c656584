//! A histogram of times in constant memory (crate `hdrhistogram`): two decimal digits are kept, and mean and maximum exactly.

/// Values beyond this (a hostile time) are counted as this.
const LARGEST: u64 = 1 << 62;

/// Counts of values.
#[derive(Clone)]
pub struct Histogram {
    counts: hdrhistogram::Histogram<u64>,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        let counts = hdrhistogram::Histogram::new_with_bounds(1, LARGEST, 2).expect("the bounds are in order");
        Histogram { counts, sum: 0, max: 0 }
    }
}

impl Histogram {
    /// Adds a value.
    #[inline]
    pub fn add(&mut self, value: u64) {
        let value = value.min(LARGEST);
        self.counts.saturating_record(value);
        self.sum += u128::from(value);
        self.max = self.max.max(value);
    }

    /// The mean, 0 without values.
    pub fn mean(&self) -> f64 {
        if self.counts.is_empty() { 0.0 } else { self.sum as f64 / self.counts.len() as f64 }
    }

    /// The largest value.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The smallest value that at least this share of all values does not exceed (to the histogram's precision).
    pub fn quantile(&self, share: f64) -> u64 {
        self.counts.value_at_quantile(share).min(self.max)
    }

    /// Points of the cumulative distribution: value and share of values up to it.
    pub fn cumulative(&self) -> Vec<(u64, f64)> {
        let mut seen = 0;
        let count = self.counts.len() as f64;
        let point = |value: hdrhistogram::iterators::IterationValue<u64>| {
            seen += value.count_since_last_iteration();
            (value.value_iterated_to().min(self.max), seen as f64 / count)
        };
        self.counts.iter_recorded().map(point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_close() {
        let mut histogram = Histogram::default();
        for value in 0..100_000u64 {
            histogram.add(value);
        }
        for share in [0.01, 0.5, 0.99, 0.999] {
            let exact = share * 100_000.0;
            let error = (histogram.quantile(share) as f64 - exact).abs() / exact;
            assert!(error < 0.01, "{share}: {}", histogram.quantile(share));
        }
        assert_eq!((histogram.max(), histogram.quantile(1.0)), (99_999, 99_999));
        assert_eq!(histogram.mean(), 49_999.5);
    }

    #[test]
    fn values_keep_two_digits_and_any_value_is_taken() {
        for value in (0..200).chain((0..62).flat_map(|s| [1u64 << s, (1 << s) + 1, (1u64 << s).saturating_sub(1)])) {
            let mut histogram = Histogram::default();
            histogram.add(value);
            histogram.add(LARGEST);
            let found = histogram.quantile(0.5);
            assert!(found >= value && found - value <= value / 100, "{value} {found}");
        }
        let mut histogram = Histogram::default();
        assert_eq!((histogram.mean(), histogram.quantile(0.5)), (0.0, 0));
        histogram.add(u64::MAX);
        assert_eq!(histogram.cumulative().len(), 1);
    }
}
