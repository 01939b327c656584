//! A number for some of a log's blocks, in memory that is there only where there are any: pieces of [`PIECE`] positions, made
//! with the first number in them, given back with the last. The live part of a log goes round, so they come and go with it.
//!
//! A number takes as few bytes as the largest one needs. Nothing is ever moved: what a guest waits for is at most one piece.

/// Positions a piece: the words of one page of the table.
pub const PIECE: usize = 1024;
/// So that eight bytes can be read wherever a number begins.
const SLACK: usize = 8;

#[derive(Debug)]
struct Piece {
    numbers: Box<[u8]>,
    /// How many there are.
    used: u32,
}

/// Numbers below a bound, for positions below another one.
#[derive(Debug)]
pub struct Pieces {
    positions: u32,
    /// Bytes a number.
    width: usize,
    pieces: Vec<Option<Piece>>,
    present: u64,
}

impl Pieces {
    /// None yet, for `positions` positions: numbers below `bound`.
    pub fn new(positions: u32, bound: u64) -> Self {
        Pieces { positions, width: width(bound), pieces: Vec::new(), present: 0 }
    }

    /// What stands where no number is: all ones, which no number below the bound is.
    fn none(&self) -> u64 {
        u64::MAX >> (64 - 8 * self.width)
    }

    /// The number of a position.
    pub fn get(&self, position: u32) -> Option<u64> {
        let piece = self.pieces.get(position as usize / PIECE)?.as_ref()?;
        let at = position as usize % PIECE * self.width;
        let word = piece.numbers[at..].first_chunk::<8>().map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes));
        let number = word & self.none();
        (number != self.none()).then_some(number)
    }

    /// Says what a position's number is. Positions and numbers beyond the bounds have none.
    pub fn set(&mut self, position: u32, number: u64) {
        let none = self.none();
        if position >= self.positions || number >= none {
            return self.clear(position);
        }
        if self.pieces.is_empty() {
            self.pieces.resize_with((self.positions as usize).div_ceil(PIECE), || None);
        }
        let width = self.width;
        let present = &mut self.present;
        let piece = self.pieces[position as usize / PIECE].get_or_insert_with(|| {
            *present += 1;
            Piece { numbers: vec![u8::MAX; PIECE * width + SLACK].into(), used: 0 }
        });
        if store(&mut piece.numbers, position as usize % PIECE * width, width, number) == none {
            piece.used += 1;
        }
    }

    /// Forgets a position's number.
    pub fn clear(&mut self, position: u32) {
        let (width, none) = (self.width, self.none());
        let Some(place) = self.pieces.get_mut(position as usize / PIECE) else { return };
        let Some(piece) = place else { return };
        if store(&mut piece.numbers, position as usize % PIECE * width, width, none) != none {
            piece.used -= 1;
            if piece.used == 0 {
                *place = None;
                self.present -= 1;
            }
        }
    }

    /// Positions that have a number, in their order.
    pub fn positions(&self) -> impl Iterator<Item = u32> {
        let there = self.pieces.iter().enumerate().filter(|(_, piece)| piece.is_some());
        let all = there.flat_map(|(index, _)| index * PIECE..(index + 1) * PIECE);
        all.map(|position| position as u32).filter(|position| self.get(*position).is_some())
    }

    /// Makes it one for numbers below `bound`, where that is more than it was. What there is stays.
    pub fn widen(&mut self, bound: u64) {
        if width(bound) <= self.width {
            return;
        }
        let mut wider = Pieces::new(self.positions, bound);
        for index in 0..self.pieces.len() {
            for position in index * PIECE..(index + 1) * PIECE {
                if let Some(number) = self.get(position as u32) {
                    wider.set(position as u32, number);
                }
            }
            // One by one, so that there are never two of many.
            self.pieces[index] = None;
        }
        *self = wider;
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        (self.pieces.capacity() * size_of::<Option<Piece>>()) as u64
            + self.present * (PIECE * self.width + SLACK) as u64
    }
}

/// Bytes that numbers below `bound` need, and one that is none of them.
fn width(bound: u64) -> usize {
    match bound {
        0..=0xffff => 2,
        0x1_0000..=0xff_ffff => 3,
        0x100_0000..=0xffff_ffff => 4,
        0x1_0000_0000..=0xffff_ffff_ffff => 6,
        _ => 8,
    }
}

/// Stores a number, and says what was there.
fn store(numbers: &mut [u8], at: usize, width: usize, number: u64) -> u64 {
    let mask = u64::MAX >> (64 - 8 * width);
    let Some(bytes) = numbers[at..].first_chunk_mut::<8>() else { return mask };
    let word = u64::from_le_bytes(*bytes);
    *bytes = (word & !mask | number & mask).to_le_bytes();
    word & mask
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn pieces_come_and_go() {
        let mut pieces = Pieces::new(5000, 1 << 20);
        assert_eq!((pieces.memory_bytes(), pieces.get(7)), (0, None));
        pieces.set(7, 99);
        let one = pieces.memory_bytes();
        pieces.set(1023, 98);
        assert_eq!(pieces.memory_bytes(), one, "in the same piece");
        pieces.set(1024, 97);
        assert_eq!(pieces.memory_bytes(), one + (PIECE * 3 + SLACK) as u64);
        pieces.clear(1024);
        pieces.clear(1024);
        assert_eq!(pieces.memory_bytes(), one);
        pieces.clear(7);
        pieces.clear(1023);
        assert!(pieces.memory_bytes() < 200, "the list of pieces alone");
        pieces.set(5000, 1);
        pieces.set(u32::MAX, 1);
        assert_eq!((pieces.get(5000), pieces.get(u32::MAX)), (None, None), "not of this log");
    }

    proptest! {
        #[test]
        fn it_is_a_map(
            bound in prop_oneof![Just(0xffffu64), Just(0x1_0000), Just(0xff_ffff), Just(0xffff_ffff), Just(0xffff_ffff_ffff), Just(1 << 50)],
            steps in proptest::collection::vec((prop_oneof![0u32..4, 1020u32..1030, 2040u32..2060], any::<Option<u64>>()), 0..200),
            widened in any::<bool>(),
        ) {
            let mut pieces = Pieces::new(2055, bound);
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for (position, number) in steps {
                match number {
                    Some(number) => {
                        // The largest ones often.
                        let number = if number % 3 == 0 { bound - 1 } else { number % bound };
                        pieces.set(position, number);
                        if position < 2055 {
                            model.insert(position, number);
                        }
                    }
                    None => {
                        pieces.clear(position);
                        model.remove(&position);
                    }
                }
            }
            if widened {
                pieces.widen(bound * 300);
            }
            for position in 0..2070 {
                prop_assert_eq!(pieces.get(position), model.get(&position).copied());
            }
            prop_assert!(pieces.positions().eq(model.keys().copied()));
            let there: std::collections::BTreeSet<u32> = model.keys().map(|position| position / PIECE as u32).collect();
            prop_assert_eq!(pieces.present, there.len() as u64);
        }
    }
}
