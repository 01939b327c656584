//! Contents that were written home to blocks for which no committed version asks, for who judges whether homes are where the
//! books have them.
//!
//! One such write says nothing. A guest may write any content anywhere, and a kernel in `data=journal` mode writes a page home to which
//! somebody has appended meanwhile: the block then has what the next transaction will say, and the text that many files begin with.
//! So a content is a stray only if it is nothing like the version that the block is owed, and until a transaction says that it belongs
//! there; each stray counts once; and what goes home as it should makes up for old ones.
//!
//! It must never: keep a content. A stray is eight bytes of hashes and a block number.

use std::hash::BuildHasher;

/// Bytes of each of the two pieces of a block that stand for its content.
const PIECE_BYTES: usize = 64;
/// Strays that are remembered: the newest in each slot.
const SLOTS: usize = 4096;
/// Strays for which memory is taken at a time. Most logs never have one, and few have many.
const SLOTS_MORE: usize = 32;
/// So many contents at the wrong place are no coincidence.
const MISPLACED_MIN: u32 = 3;
/// So many versions that are written home where they belong make up for one that was not: homes that are elsewhere are more than a
/// few in a log's whole life.
const PLACED_FOR_ONE: u32 = 4096;

/// What stands for the content of a block: a hash of its beginning and one of its middle. 0 is a piece that says nothing, such as zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    first: u32,
    middle: u32,
}

impl Mark {
    /// Of a block of so many bytes, pieces of which `copy` gives.
    pub fn of(hasher: &impl BuildHasher, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Self {
        let hash = |at: usize| {
            let mut piece = [0; PIECE_BYTES];
            copy(at, &mut piece);
            let says_something = piece.iter().any(|byte| *byte != piece[0]);
            if says_something { (hasher.hash_one(piece) as u32).max(1) } else { 0 }
        };
        if bytes < 4 * PIECE_BYTES {
            return Mark::default();
        }
        Mark { first: hash(0), middle: hash(bytes / 2) }
    }

    /// Whether it says nothing.
    pub fn is_blank(self) -> bool {
        self == Mark::default()
    }

    /// Whether one of two contents may be the other with something added or changed.
    pub fn is_like(self, other: Self) -> bool {
        (self.first != 0 && self.first == other.first) || (self.middle != 0 && self.middle == other.middle)
    }

    fn slot(self) -> usize {
        (self.first ^ self.middle.rotate_left(16)) as usize % SLOTS
    }
}

/// Strays of one log, and how many of them were missed where they belong.
#[derive(Debug, Default)]
pub struct Strays {
    /// Mark and block of each slot that has one, by slot.
    taken: Vec<(Mark, u32)>,
    misplaced: u32,
    placed: u32,
}

impl Strays {
    /// A content was written home to `block`, for which the log has no reason; `owed` is the mark of the version that it is owed.
    pub fn written(&mut self, block: u64, mark: Mark, owed: Option<Mark>) {
        if mark.is_blank() || owed.is_some_and(|owed| owed == mark || owed.is_like(mark)) {
            return;
        }
        let stray = (mark, block as u32);
        match self.find(mark) {
            Ok(index) => self.taken[index] = stray,
            Err(index) => {
                if self.taken.len() == self.taken.capacity() {
                    self.taken.reserve_exact(SLOTS_MORE);
                }
                self.taken.insert(index, stray);
            }
        }
    }

    /// Where the stray is that has a mark's slot, or would be.
    fn find(&self, mark: Mark) -> Result<usize, usize> {
        self.taken.binary_search_by_key(&mark.slot(), |(other, _)| other.slot())
    }

    /// Forgets the stray that has a mark's slot, if it is one of these. Says whether it was.
    fn forget(&mut self, mark: Mark, is_it: impl Fn(&(Mark, u32)) -> bool) -> bool {
        let Some(index) = self.find(mark).ok().filter(|index| is_it(&self.taken[*index])) else { return false };
        self.taken.remove(index);
        if self.taken.capacity() > self.taken.len() + 2 * SLOTS_MORE {
            self.taken.shrink_to(self.taken.len() + SLOTS_MORE);
        }
        true
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// A transaction says that this belongs to `block`: if it was written there before, it was no stray.
    pub fn committed(&mut self, block: u64, mark: Mark) {
        self.forget(mark, |stray| *stray == (mark, block as u32));
    }

    /// A committed version is written home where it belongs.
    pub fn placed(&mut self) {
        self.placed += 1;
        if self.placed == PLACED_FOR_ONE {
            self.placed = 0;
            self.misplaced = self.misplaced.saturating_sub(1);
        }
    }

    /// The guest is done with a committed version that was never written home. If its content is a stray, that one is used up.
    pub fn passed_unwritten(&mut self, mark: Mark) {
        if mark.is_blank() {
            return;
        }
        self.misplaced += u32::from(self.forget(mark, |(stray, _)| *stray == mark));
    }

    /// How many were written elsewhere, if that proves that homes are not where they were thought to be.
    pub fn proof(&self) -> Option<u32> {
        (self.misplaced >= MISPLACED_MIN).then_some(self.misplaced)
    }

    /// Bytes of memory they take.
    pub fn memory_bytes(&self) -> u64 {
        (self.taken.capacity() * size_of::<(Mark, u32)>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::RandomState;

    fn text(seed: u8, bytes: usize) -> Vec<u8> {
        let mut block = vec![0; 4096];
        for (at, byte) in block[..bytes].iter_mut().enumerate() {
            *byte = (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed;
        }
        block
    }

    fn mark(hasher: &RandomState, block: &[u8]) -> Mark {
        Mark::of(hasher, block.len(), |at, piece| piece.copy_from_slice(&block[at..at + piece.len()]))
    }

    /// What a full-size postmark did under Linux 6.12: files that all begin with one text, appended to while they are written home, and
    /// deleted without a word.
    #[test]
    fn appends_that_race_with_a_write_home_are_no_strays() {
        let hasher = RandomState::new();
        let mut strays = Strays::default();
        for block in 0..100u64 {
            let (owed, given) = (text(0, 200 + block as usize), text(0, 3000));
            strays.written(block, mark(&hasher, &given), Some(mark(&hasher, &owed)));
            strays.passed_unwritten(mark(&hasher, &text(0, 4000)));
        }
        assert_eq!(strays.proof(), None);
        assert!(strays.is_empty());
    }

    #[test]
    fn what_is_committed_there_afterwards_is_no_stray() {
        let hasher = RandomState::new();
        let mut strays = Strays::default();
        for block in 0..10u64 {
            let given = mark(&hasher, &text(block as u8 + 1, 4096));
            strays.written(block, given, Some(mark(&hasher, &text(99, 4096))));
            strays.committed(block + 1, given);
            strays.committed(block, given);
            strays.passed_unwritten(given);
        }
        assert_eq!(strays.proof(), None);
    }

    #[test]
    fn one_stray_counts_once_and_three_are_proof() {
        let hasher = RandomState::new();
        let mut strays = Strays::default();
        let marks: Vec<Mark> = (1..4u8).map(|seed| mark(&hasher, &text(seed, 4096))).collect();
        for (block, one) in marks.iter().enumerate() {
            assert_eq!(strays.proof(), None);
            strays.written(block as u64, *one, None);
            for _ in 0..10 {
                strays.passed_unwritten(*one);
            }
        }
        // Three of them can meet in a slot; the hasher is drawn by lot.
        let slots: std::collections::HashSet<usize> = marks.iter().map(|one| one.slot()).collect();
        assert_eq!(strays.misplaced, 3, "each is passed before the next one is written, in {} slots", slots.len());
        assert_eq!(strays.proof(), Some(3));
        (0..PLACED_FOR_ONE).for_each(|_| strays.placed());
        assert_eq!(strays.proof(), None, "what goes where it belongs makes up for it");
    }

    /// The newest counts in each slot; memory is for what there is.
    #[test]
    fn strays_are_bounded_and_take_memory_as_there_are_any() {
        let mut strays = Strays::default();
        let of = |number: u32| Mark { first: number, middle: 0 };
        assert_eq!(strays.memory_bytes(), 0);
        strays.written(7, of(1), None);
        assert_eq!(strays.memory_bytes(), 12 * SLOTS_MORE as u64);
        for number in 1..3 * SLOTS as u32 {
            strays.written(u64::from(number), of(number), None);
        }
        assert_eq!(strays.taken.len(), SLOTS);
        assert_eq!(strays.memory_bytes(), 12 * SLOTS as u64);
        // Those that were written first are forgotten.
        strays.passed_unwritten(of(1));
        assert_eq!(strays.misplaced, 0);
        strays.committed(3, of(2 * SLOTS as u32 + 4));
        assert_eq!(strays.taken.len(), SLOTS, "it belongs elsewhere");
        for number in 2 * SLOTS as u32..3 * SLOTS as u32 {
            strays.passed_unwritten(of(number));
            strays.passed_unwritten(of(number));
        }
        assert_eq!((strays.misplaced, strays.is_empty()), (SLOTS as u32, true));
        assert!(strays.memory_bytes() <= 3 * 12 * SLOTS_MORE as u64);
    }

    #[test]
    fn zeros_say_nothing() {
        let hasher = RandomState::new();
        let mut strays = Strays::default();
        strays.written(1, mark(&hasher, &[0; 4096]), None);
        assert!(strays.is_empty());
        assert!(!mark(&hasher, &[0; 4096]).is_like(mark(&hasher, &[0; 4096])));
    }
}
