//! A set of log blocks: a bit for each, in memory that is there only where there are any. The live part of a log goes round, and pieces of
//! the set come and go with it.

/// Words a piece.
const WORDS: usize = 16;
/// Log blocks a piece.
const PIECE: usize = 64 * WORDS;

/// Log blocks below a fixed number.
#[derive(Debug)]
pub struct Positions {
    positions: u32,
    pieces: Vec<Option<Box<[u64; WORDS]>>>,
    present: usize,
    len: usize,
}

impl Positions {
    /// None yet, of a log of `positions` blocks. Takes no memory until there is one.
    pub fn new(positions: u32) -> Self {
        Positions { positions, pieces: Vec::new(), present: 0, len: 0 }
    }

    /// Whether it is one of them.
    pub fn contains(&self, position: u32) -> bool {
        let (index, word, bit) = place(position);
        self.pieces.get(index).and_then(Option::as_ref).is_some_and(|piece| piece[word] & bit != 0)
    }

    /// Adds one. What is not of this log is not added.
    pub fn insert(&mut self, position: u32) {
        if position >= self.positions {
            return;
        }
        if self.pieces.is_empty() {
            self.pieces.resize_with((self.positions as usize).div_ceil(PIECE), || None);
        }
        let (index, word, bit) = place(position);
        let present = &mut self.present;
        let piece = self.pieces[index].get_or_insert_with(|| {
            *present += 1;
            Box::new([0; WORDS])
        });
        self.len += usize::from(piece[word] & bit == 0);
        piece[word] |= bit;
    }

    /// Takes one out. False when it is none of them.
    pub fn remove(&mut self, position: u32) -> bool {
        let (index, word, bit) = place(position);
        let Some(Some(piece)) = self.pieces.get_mut(index) else { return false };
        if piece[word] & bit == 0 {
            return false;
        }
        piece[word] &= !bit;
        self.len -= 1;
        if piece.iter().all(|word| *word == 0) {
            self.pieces[index] = None;
            self.present -= 1;
        }
        true
    }

    /// All of them, in their order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.iter_at_or_after(0, None)
    }

    /// Those that are not before one, which is found at once, and not in another set, which is left out by whole words.
    fn iter_at_or_after<'a>(&'a self, first: u32, but: Option<&'a Positions>) -> impl Iterator<Item = u32> + 'a {
        let (first_index, first_word, bit) = place(first);
        let there = self.pieces.iter().enumerate().skip(first_index);
        let words = there.filter_map(|(index, piece)| Some((index * WORDS..).zip(piece.as_ref()?.iter().copied())));
        let first_word = first_index * WORDS + first_word;
        let words = words.flatten().skip_while(move |(index, _)| *index < first_word);
        words.flat_map(move |(index, word)| {
            let word = if index == first_word { word & !(bit - 1) } else { word };
            let word = word & !but.map_or(0, |but| but.word(index));
            let rest = |word: &u64| Some(word & (word - 1)).filter(|rest| *rest != 0);
            let ones = std::iter::successors(Some(word).filter(|word| *word != 0), rest);
            ones.map(move |word| index as u32 * 64 + word.trailing_zeros())
        })
    }

    /// Those that are not in another set, from one on, and those before it after them: in the order of a log that begins there.
    pub fn iter_from<'a>(&'a self, first: u32, but: &'a Positions) -> impl Iterator<Item = u32> + 'a {
        let before = self.iter_at_or_after(0, Some(but));
        self.iter_at_or_after(first, Some(but)).chain(before.take_while(move |position| *position < first))
    }

    /// How many are in another set, too.
    pub fn count_common(&self, other: &Positions) -> usize {
        let there = self.pieces.iter().enumerate().filter_map(|(index, piece)| Some((index, piece.as_ref()?)));
        let words = there.flat_map(|(index, piece)| (index * WORDS..).zip(piece.iter()));
        words.map(|(index, word)| (word & other.word(index)).count_ones() as usize).sum()
    }

    /// The word of 64 of them.
    fn word(&self, index: usize) -> u64 {
        self.pieces.get(index / WORDS).and_then(Option::as_ref).map_or(0, |piece| piece[index % WORDS])
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes all out and gives the memory back.
    pub fn clear(&mut self) {
        *self = Positions::new(self.positions);
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        (self.pieces.capacity() * size_of::<Option<Box<[u64; WORDS]>>>() + self.present * size_of::<[u64; WORDS]>())
            as u64
    }
}

fn place(position: u32) -> (usize, usize, u64) {
    let position = position as usize;
    (position / PIECE, position % PIECE / 64, 1 << (position % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(steps in proptest::collection::vec((prop_oneof![0u32..4, 1020u32..1030, 2040u32..2060], any::<bool>()), 0..200)) {
            let mut set = Positions::new(2055);
            let mut model: BTreeSet<u32> = BTreeSet::new();
            for (position, enters) in steps {
                if enters {
                    set.insert(position);
                    if position < 2055 {
                        model.insert(position);
                    }
                } else {
                    prop_assert_eq!(set.remove(position), model.remove(&position));
                }
                prop_assert_eq!(set.len(), model.len());
            }
            prop_assert!(set.iter().eq(model.iter().copied()));
            prop_assert!((0..2070).all(|position| set.contains(position) == model.contains(&position)));
            let mut but = Positions::new(2055);
            model.iter().filter(|position| *position % 3 == 0).chain(&[5, 2000]).for_each(|position| but.insert(*position));
            let others = model.iter().copied().filter(|position| !but.contains(*position));
            let others: BTreeSet<u32> = others.collect();
            prop_assert_eq!(set.count_common(&but), model.len() - others.len());
            for first in [0, 1, 63, 64, 1023, 1024, 1025, 2047, 2048, 2054, 5000] {
                prop_assert!(set.iter_from(first, &but).eq(others.range(first..).chain(others.range(..first)).copied()));
            }
            let there: BTreeSet<u32> = model.iter().map(|position| position / PIECE as u32).collect();
            prop_assert_eq!(set.present, there.len());
            set.clear();
            prop_assert_eq!((set.memory_bytes(), set.iter().next()), (0, None));
        }
    }
}
