//! Latencies, counted in buckets that grow with the value: at most 1/32 wide of what they hold.

/// A histogram of nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
}

const SUB_BUCKETS: u64 = 32;

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: vec![0; 64 * SUB_BUCKETS as usize], count: 0 }
    }
}

impl Histogram {
    /// Counts one.
    pub fn add(&mut self, nanoseconds: u64) {
        self.buckets[Self::bucket(nanoseconds)] += 1;
        self.count += 1;
    }

    fn bucket(value: u64) -> usize {
        if value < SUB_BUCKETS {
            return value as usize;
        }
        let exponent = u64::from(value.ilog2());
        let shift = exponent - u64::from(SUB_BUCKETS.ilog2());
        ((shift + 1) * SUB_BUCKETS + (value >> shift) - SUB_BUCKETS) as usize
    }

    fn upper_edge(bucket: usize) -> u64 {
        let bucket = bucket as u64;
        if bucket < SUB_BUCKETS {
            return bucket;
        }
        let shift = bucket / SUB_BUCKETS - 1;
        ((bucket % SUB_BUCKETS + SUB_BUCKETS + 1) << shift) - 1
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The value in nanoseconds that `percent` of all do not exceed; 0 when there are none.
    pub fn percentile(&self, percent: f64) -> u64 {
        let wanted = (self.count as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted && *count > 0 {
                return Self::upper_edge(bucket);
            }
        }
        0
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_thirty_second() {
        let mut histogram = Histogram::default();
        for value in 1..=100_000u64 {
            histogram.add(value);
        }
        for percent in [1.0, 50.0, 99.0, 99.9] {
            let exact = percent * 1000.0;
            let found = histogram.percentile(percent) as f64;
            assert!((exact..=exact * (1.0 + 1.0 / 32.0) + 1.0).contains(&found), "{percent}: {found}");
        }
        assert_eq!(Histogram::default().percentile(50.0), 0);
    }

    #[test]
    fn edges_and_buckets_agree() {
        for value in [0, 1, 31, 32, 33, 63, 64, 1000, 123_456_789, u64::MAX / 2] {
            let bucket = Histogram::bucket(value);
            assert!(Histogram::upper_edge(bucket) >= value);
            assert!(bucket == 0 || Histogram::upper_edge(bucket - 1) < value);
        }
    }
}
