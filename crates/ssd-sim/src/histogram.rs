//! A histogram of times in constant memory, exact to 1.6 %.

/// Each power of two is divided into this many buckets.
const PARTS_BITS: u32 = 6;
const BUCKETS: usize = (64 - PARTS_BITS as usize + 1) << PARTS_BITS;

/// Counts of values.
#[derive(Clone)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: vec![0; BUCKETS], count: 0, sum: 0, max: 0 }
    }
}

impl Histogram {
    fn bucket(value: u64) -> usize {
        let high = 64 - value.leading_zeros();
        let shift = high.saturating_sub(PARTS_BITS + 1);
        ((shift as usize) << PARTS_BITS) + (value >> shift) as usize
    }

    /// The largest value that falls into the bucket.
    fn upper(bucket: usize) -> u64 {
        let parts = 1usize << PARTS_BITS;
        let shift = (bucket >> PARTS_BITS).saturating_sub(1);
        let value = (bucket - (shift << PARTS_BITS)) as u64;
        debug_assert!(shift == 0 || value >= parts as u64);
        ((value + 1) << shift) - 1
    }

    /// Adds a value.
    #[inline]
    pub fn add(&mut self, value: u64) {
        // Values beyond 2^62 (a hostile time) share the last bucket.
        let value = value.min(1 << 62);
        self.buckets[Histogram::bucket(value)] += 1;
        self.count += 1;
        self.sum += u128::from(value);
        self.max = self.max.max(value);
    }

    /// The mean, 0 without values.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The largest value.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The smallest value that at least this share of all values does not exceed (to the histogram's precision).
    pub fn quantile(&self, share: f64) -> u64 {
        let wanted = ((share * self.count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Histogram::upper(bucket).min(self.max);
            }
        }
        self.max
    }

    /// Points of the cumulative distribution: value and share of values up to it.
    pub fn cumulative(&self) -> Vec<(u64, f64)> {
        let mut seen = 0;
        let mut points = Vec::new();
        for (bucket, &count) in self.buckets.iter().enumerate() {
            if count > 0 {
                seen += count;
                points.push((Histogram::upper(bucket).min(self.max), seen as f64 / self.count as f64));
            }
        }
        points
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
            assert!(error < 0.017, "{share}: {}", histogram.quantile(share));
        }
        assert_eq!((histogram.max(), histogram.quantile(1.0)), (99_999, 99_999));
        assert_eq!(histogram.mean(), 49_999.5);
    }

    #[test]
    fn every_value_has_a_bucket_that_holds_it() {
        for value in (0..200).chain((0..62).flat_map(|s| [1u64 << s, (1 << s) + 1, (1u64 << s).saturating_sub(1)])) {
            let upper = Histogram::upper(Histogram::bucket(value));
            assert!(upper >= value && upper - value <= value >> PARTS_BITS, "{value} {upper}");
        }
        let mut histogram = Histogram::default();
        assert_eq!((histogram.mean(), histogram.quantile(0.5)), (0.0, 0));
        histogram.add(u64::MAX);
        assert_eq!(histogram.cumulative().len(), 1);
    }
}
