//! Mean and standard deviation.

use serde::{Deserialize, Serialize};

/// A sample's summary.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Its mean.
    pub mean: f64,
    /// Its standard deviation (of a sample: n − 1); 0 for one value.
    pub deviation: f64,
    /// How many values.
    pub count: usize,
}

impl Summary {
    /// Of these values; `None` of none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len();
        if count == 0 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        Some(Summary { mean, deviation, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_samples_deviation() {
        let summary = Summary::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).unwrap();
        assert!((summary.mean - 5.0).abs() < 1e-12);
        assert!((summary.deviation - 2.138_089_935).abs() < 1e-6);
        assert_eq!(Summary::of(&[]), None);
        assert!(Summary::of(&[3.0]).unwrap().deviation.abs() < 1e-12);
    }
}
