//! Which regions of a memory table a request lies in, so that it is known what becomes of it when the table changes.

/// Regions of one [`crate::MemoryTable`], by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionSet(u128);

impl RegionSet {
    /// This number stands for itself and all above it: a VMM has far fewer regions, and one too many only costs a failed
    /// request.
    const LAST: usize = 127;

    pub(crate) fn insert(&mut self, region: usize) {
        self.0 |= 1 << region.min(Self::LAST);
    }

    /// Whether no region is in it.
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// The same regions where each has the number that `number` says; nothing when one of them has none.
    pub(crate) fn renumbered(&self, number: impl Fn(usize) -> Option<usize>) -> Option<RegionSet> {
        let mut renumbered = RegionSet::default();
        let mut left = self.0;
        while left != 0 {
            let region = left.trailing_zeros() as usize;
            left &= left - 1;
            // What stands for several cannot be followed.
            renumbered.insert(number(region).filter(|_| region < Self::LAST)?);
        }
        Some(renumbered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_followed_and_lost() {
        let mut set = RegionSet::default();
        assert!(set.is_empty());
        assert_eq!(set.renumbered(|_| None), Some(set), "nothing is nowhere");
        set.insert(0);
        set.insert(5);
        let mut moved = RegionSet::default();
        moved.insert(1);
        moved.insert(6);
        assert_eq!(set.renumbered(|region| Some(region + 1)), Some(moved));
        assert_eq!(set.renumbered(|region| (region == 0).then_some(0)), None);
        set.insert(4000);
        assert_eq!(set.renumbered(Some), None, "which of the many it is cannot be told");
    }
}
