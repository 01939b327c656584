//! Means, deviations, and intervals of 95 %: Student's for means and their ratios, Wilson's for proportions.
//!
//! It must never give an interval where there is nothing to make one of: of one value there is none.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

/// The quantile of a two-sided interval of 95 %.
const QUANTILE: f64 = 0.975;
/// The same of the normal distribution.
const NORMAL_QUANTILE: f64 = 1.959_963_984_540_054;

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

/// An estimate, and what it lies between with a confidence of 95 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Interval {
    /// Whether a value lies in it.
    pub fn has(self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// Student's factor for so many degrees of freedom.
fn student(freedom: f64) -> Option<f64> {
    StudentsT::new(0.0, 1.0, freedom).ok().map(|distribution| distribution.inverse_cdf(QUANTILE))
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

    /// The square of the mean's standard error.
    fn error_squared(&self) -> f64 {
        self.deviation.powi(2) / self.count as f64
    }

    /// Of the mean; `None` for one value.
    pub fn interval(&self) -> Option<Interval> {
        if self.count < 2 {
            return None;
        }
        let half = student((self.count - 1) as f64)? * self.error_squared().sqrt();
        Some(Interval { low: self.mean - half, high: self.mean + half })
    }

    /// Wilson's, of a proportion whose values are 0 or 1; `None` for one value.
    pub fn proportion_interval(&self) -> Option<Interval> {
        if self.count < 2 {
            return None;
        }
        let (count, share) = (self.count as f64, self.mean.clamp(0.0, 1.0));
        let square = NORMAL_QUANTILE.powi(2);
        let centre = (share + square / (2.0 * count)) / (1.0 + square / count);
        let half = NORMAL_QUANTILE / (1.0 + square / count)
            * (share * (1.0 - share) / count + square / (4.0 * count * count)).sqrt();
        // What was never seen, or always, is in it to the digit.
        let low = if share == 0.0 { 0.0 } else { (centre - half).max(0.0) };
        let high = if share == 1.0 { 1.0 } else { (centre + half).min(1.0) };
        Some(Interval { low, high })
    }
}

/// By how many per cent `ours` is less than `other`; `None` where `other` is nothing.
pub fn percent_less(ours: &Summary, other: &Summary) -> Option<f64> {
    (other.mean > 0.0 && ours.mean.is_finite()).then(|| 100.0 * (1.0 - ours.mean / other.mean))
}

/// Between what [`percent_less`] lies. The logarithm of the ratio of two means has, to first order, the sum of their squared
/// relative errors as its own; its degrees of freedom are Welch's. `None` where one side has one value, or a mean that is
/// not above 0.
pub fn percent_less_interval(ours: &Summary, other: &Summary) -> Option<Interval> {
    if ours.count < 2 || other.count < 2 || ours.mean <= 0.0 || other.mean <= 0.0 {
        return None;
    }
    let parts = [ours, other].map(|side| (side.error_squared() / side.mean.powi(2), (side.count - 1) as f64));
    let squared: f64 = parts.iter().map(|(part, _)| part).sum();
    let ratio = ours.mean / other.mean;
    if squared == 0.0 {
        let less = 100.0 * (1.0 - ratio);
        return Some(Interval { low: less, high: less });
    }
    let freedom = squared.powi(2) / parts.iter().map(|(part, freedom)| part.powi(2) / freedom).sum::<f64>();
    let half = student(freedom)? * squared.sqrt();
    let less = |logarithm: f64| 100.0 * (1.0 - logarithm.exp());
    Some(Interval { low: less(ratio.ln() + half), high: less(ratio.ln() - half) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, by: f64) -> bool {
        (a - b).abs() < by
    }

    #[test]
    fn it_is_the_samples_deviation() {
        let summary = Summary::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).unwrap();
        assert!((summary.mean - 5.0).abs() < 1e-12);
        assert!((summary.deviation - 2.138_089_935).abs() < 1e-6);
        assert_eq!(Summary::of(&[]), None);
        assert!(Summary::of(&[3.0]).unwrap().deviation.abs() < 1e-12);
    }

    #[test]
    fn a_means_interval_is_students() {
        // By hand: mean 3, deviation 1.5811, t(4) = 2.7764, 2.7764 * 1.5811 / sqrt(5) = 1.9632.
        let interval = Summary::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap().interval().unwrap();
        assert!(near(interval.low, 1.0368, 1e-3) && near(interval.high, 4.9632, 1e-3), "{interval:?}");
        assert_eq!(Summary::of(&[1.0]).unwrap().interval(), None);
    }

    #[test]
    fn a_ratios_interval_is_welchs() {
        let [ours, other] = [[9.0, 10.0, 11.0], [19.0, 20.0, 21.0]].map(|values| Summary::of(&values).unwrap());
        let less = percent_less(&ours, &other).unwrap();
        let interval = percent_less_interval(&ours, &other).unwrap();
        assert!(near(less, 50.0, 1e-9) && interval.has(less) && interval.low < 45.0 && interval.high > 54.0);
        // By hand: errors 1/sqrt(3) of 10 and 20, squared and relative 0.003333 and 0.000833; freedom 2.9412 with Welch; t = 3.2106.
        let half = 3.2106 * 0.004_166_7_f64.sqrt();
        assert!(near(interval.low, 100.0 * (1.0 - 0.5 * half.exp()), 0.2), "{interval:?}");
        assert_eq!(percent_less_interval(&Summary::of(&[9.0]).unwrap(), &other), None);
        let never = Summary { mean: 0.0, deviation: 0.0, count: 3 };
        assert_eq!((percent_less(&ours, &never), percent_less_interval(&ours, &never)), (None, None));
    }

    #[test]
    fn a_proportions_interval_is_wilsons_and_stays_between_none_and_all() {
        let of = |mean: f64, count: usize| Summary { mean, deviation: 0.0, count }.proportion_interval().unwrap();
        // R's prop.test(10, 100, correct = FALSE).
        assert!(near(of(0.1, 100).low, 0.0552, 1e-3) && near(of(0.1, 100).high, 0.1744, 1e-3));
        assert!(of(0.0, 120).low == 0.0 && near(of(0.0, 120).high, 0.0310, 1e-3));
        assert!(of(1.0, 120).high == 1.0 && of(1.0, 120).low > 0.96);
    }
}
