//! Synthetic page writes and reads in the shapes the FTL papers use, for tests, benchmarks and trying things out.

use crate::random::{Permutation, Random};

/// A shape of page addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// From the first page to the last, again and again.
    Sequential,
    /// Every page equally likely.
    Random,
    /// This share of the accesses goes to this share of the pages.
    HotCold {
        /// Share of accesses that are hot, 0 to 1.
        accesses: f64,
        /// Share of pages that are hot, 0 to 1.
        pages: f64,
    },
    /// Zipf-distributed popularity with this exponent (not 1), the popular pages scattered over the device.
    Zipf {
        /// The exponent.
        exponent: f64,
    },
}

/// A stream of page numbers.
///
/// # Examples
/// Four accesses of five go to one page of five:
/// ```
/// use ssd_sim::workload::{Shape, Workload};
///
/// let mut workload = Workload::new(Shape::HotCold { accesses: 0.8, pages: 0.2 }, 1000, 1);
/// let hot = (0..10_000).filter(|_| workload.next_page() < 200).count();
/// assert!((7500..8500).contains(&hot), "{hot}");
/// ```
#[derive(Clone, Debug)]
pub struct Workload {
    shape: Shape,
    pages: u64,
    next: u64,
    random: Random,
    scatter: Permutation,
}

impl Workload {
    /// Page numbers below `pages`.
    pub fn new(shape: Shape, pages: u32, seed: u64) -> Workload {
        let pages = u64::from(pages.max(1));
        Workload { shape, pages, next: 0, random: Random::new(seed), scatter: Permutation::new(pages, seed ^ 0x5ca7) }
    }

    /// The next page.
    #[inline]
    pub fn next_page(&mut self) -> u32 {
        let page = match self.shape {
            Shape::Sequential => {
                let page = self.next;
                self.next = if page + 1 == self.pages { 0 } else { page + 1 };
                page
            }
            Shape::Random => self.random.below(self.pages),
            Shape::HotCold { accesses, pages } => {
                let hot = ((self.pages as f64 * pages) as u64).clamp(1, self.pages);
                if self.random.unit() < accesses || hot == self.pages {
                    self.random.below(hot)
                } else {
                    hot + self.random.below(self.pages - hot)
                }
            }
            Shape::Zipf { exponent } => {
                // Inverse of the continuous approximation of the distribution function.
                let power = 1.0 - exponent;
                let end = (self.pages as f64 + 1.0).powf(power);
                let rank = (1.0 + self.random.unit() * (end - 1.0)).powf(1.0 / power) as u64;
                self.scatter.at(rank.saturating_sub(1).min(self.pages - 1))
            }
        };
        page as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(shape: Shape) -> Vec<u32> {
        let mut workload = Workload::new(shape, 1000, 1);
        let mut counts = vec![0; 1000];
        for _ in 0..100_000 {
            counts[workload.next_page() as usize] += 1;
        }
        counts
    }

    #[test]
    fn shapes_are_what_they_say() {
        assert!(counts(Shape::Sequential).iter().all(|&c| c == 100));
        assert!(counts(Shape::Random).iter().all(|&c| (40..200).contains(&c)));
        let hot: u32 = counts(Shape::HotCold { accesses: 0.8, pages: 0.2 })[..200].iter().sum();
        assert!((79_000..81_000).contains(&hot), "{hot}");
        let mut zipf = counts(Shape::Zipf { exponent: 0.99 });
        zipf.sort_unstable_by(|a, b| b.cmp(a));
        let top: u32 = zipf[..100].iter().sum();
        assert!((60_000..80_000).contains(&top), "{top}");
    }
}
