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

    /// Of a share of runs, some of which belong together (crashes of one boot): of each such lot how often it happened, and in how many
    /// runs. They are so many measurements as there are lots, and their error is that between lots, never less than if all runs stood
    /// alone.
    pub fn of_shares(lots: &[(f64, f64)]) -> Option<Self> {
        let (happened, runs) = lots.iter().fold((0.0, 0.0), |all, lot| (all.0 + lot.0, all.1 + lot.1));
        if runs <= 0.0 {
            return None;
        }
        let (mean, count) = (happened / runs, lots.len());
        let strays: f64 = lots.iter().map(|(of, all)| (of - mean * all).powi(2)).sum::<f64>() / runs.powi(2);
        let between = if count > 1 { strays * count as f64 / (count - 1) as f64 } else { 0.0 };
        let squared = between.max(mean * (1.0 - mean) / runs);
        let deviation = if count > 1 { (squared * count as f64).sqrt() } else { 0.0 };
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

    /// Wilson's, of a proportion, with as many runs as would stray like this one, and Student's quantile; where nothing strays, with
    /// as many as there are values. `None` for one value.
    pub fn proportion_interval(&self) -> Option<Interval> {
        if self.count < 2 {
            return None;
        }
        let (values, share) = (self.count as f64, self.mean.clamp(0.0, 1.0));
        let (count, quantile) = if self.deviation > 0.0 && share > 0.0 && share < 1.0 {
            (share * (1.0 - share) / self.error_squared(), student(values - 1.0)?)
        } else {
            (values, NORMAL_QUANTILE)
        };
        let square = quantile.powi(2);
        let centre = (share + square / (2.0 * count)) / (1.0 + square / count);
        let half =
            quantile / (1.0 + square / count) * (share * (1.0 - share) / count + square / (4.0 * count * count)).sqrt();
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

/// Between what [`percent_less`] lies, by [`ratio_interval`].
pub fn percent_less_interval(ours: &Summary, other: &Summary) -> Option<Interval> {
    let ratio = ratio_interval(ours, other)?;
    let less = |ratio: f64| 100.0 * (1.0 - ratio);
    Some(Interval { low: less(ratio.high), high: less(ratio.low) })
}

/// Between what the ratio of our mean to the other one lies. The logarithm of the ratio of two means has, to first order, the sum of
/// their squared relative errors as its own; its degrees of freedom are Welch's. `None` where one side has one value, or a mean that
/// is not above 0.
pub fn ratio_interval(ours: &Summary, other: &Summary) -> Option<Interval> {
    if ours.count < 2 || other.count < 2 || ours.mean <= 0.0 || other.mean <= 0.0 {
        return None;
    }
    let parts = [ours, other].map(|side| (side.error_squared() / side.mean.powi(2), (side.count - 1) as f64));
    let squared: f64 = parts.iter().map(|(part, _)| part).sum();
    let ratio = ours.mean / other.mean;
    if squared == 0.0 {
        return Some(Interval { low: ratio, high: ratio });
    }
    let freedom = squared.powi(2) / parts.iter().map(|(part, freedom)| part.powi(2) / freedom).sum::<f64>();
    let half = student(freedom)? * squared.sqrt();
    Some(Interval { low: (ratio.ln() - half).exp(), high: (ratio.ln() + half).exp() })
}

/// By how many points of a percentage one share is less than another, and what that lies between: Newcombe's, from the intervals of both.
/// It needs no share to be above nothing.
pub fn points_less(ours: &Summary, other: &Summary) -> (f64, Option<Interval>) {
    let less = other.mean - ours.mean;
    let interval = ours.proportion_interval().zip(other.proportion_interval()).map(|(own, their)| Interval {
        low: 100.0 * (less - (other.mean - their.low).hypot(own.high - ours.mean)),
        high: 100.0 * (less + (their.high - other.mean).hypot(ours.mean - own.low)),
    });
    (100.0 * less, interval)
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
        let of_ratio = ratio_interval(&ours, &other).unwrap();
        assert!(
            near(of_ratio.low, 0.5 / half.exp(), 2e-3) && near(of_ratio.high, 0.5 * half.exp(), 2e-3),
            "{of_ratio:?}"
        );
        let same = Summary::of(&[10.0, 10.0]).unwrap();
        assert_eq!(ratio_interval(&same, &Summary::of(&[20.0, 20.0]).unwrap()), Some(Interval { low: 0.5, high: 0.5 }));
        assert_eq!(percent_less_interval(&Summary::of(&[9.0]).unwrap(), &other), None);
        let never = Summary { mean: 0.0, deviation: 0.0, count: 3 };
        assert_eq!((percent_less(&ours, &never), percent_less_interval(&ours, &never)), (None, None));
    }

    #[test]
    fn runs_that_belong_together_are_not_many_runs() {
        // All of twelve in one boot of six, as under ordered with records of 32 KiB.
        let boots: Vec<(f64, f64)> = (0..6).map(|boot| (if boot == 4 { 12.0 } else { 0.0 }, 20.0)).collect();
        let summary = Summary::of_shares(&boots).unwrap();
        assert!(near(summary.mean, 0.1, 1e-9) && summary.count == 6);
        let alone = Summary { mean: 0.1, deviation: 0.0, count: 120 }.proportion_interval().unwrap();
        let together = summary.proportion_interval().unwrap();
        assert!(together.high > 0.4 && alone.high < 0.2, "{together:?}");
        // Where boots agree better than chance would have it, chance is what is left.
        let even = Summary::of_shares(&[(10.0, 20.0), (10.0, 20.0)]).unwrap();
        assert!(near(even.error_squared(), 0.25 / 40.0, 1e-9));
        assert!(Summary::of_shares(&[(3.0, 20.0)]).unwrap().proportion_interval().is_none(), "one boot");
        let never = Summary::of_shares(&[(0.0, 20.0); 6]).unwrap().proportion_interval().unwrap();
        assert!(never.low == 0.0 && near(never.high, 0.39, 0.01), "{never:?}");
    }

    #[test]
    fn a_share_is_compared_with_none() {
        let of = |mean: f64, count: usize| Summary { mean, deviation: 0.0, count };
        // Newcombe (1998), method 10: 56/70 and 48/80 are 0.0524 to 0.3339 apart.
        let (less, interval) = points_less(&of(48.0 / 80.0, 80), &of(56.0 / 70.0, 70));
        let interval = interval.unwrap();
        assert!(near(less, 20.0, 1e-9) && near(interval.low, 5.24, 0.01) && near(interval.high, 33.39, 0.01));
        let (less, interval) = points_less(&of(100.0 / 120.0, 120), &of(0.0, 120));
        assert!(near(less, -83.3, 0.1) && interval.unwrap().high < -70.0);
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
