//! Finds log blocks by what they hold, in memory that is fixed by the log's length: hash chains threaded through one word
//! a log block (4 bytes), with a head for every four of them (1 byte each).
//!
//! A table that grows would take up to twice its need, and would be rebuilt under the area's lock while a guest waits.
//!
//! Must never: panic on, or loop over, anything a guest can bring about. A position is in at most one chain; entering it
//! twice is refused. Keys are hashed by the caller, with a seed of its own, so that a guest cannot aim at one chain.

/// Ends a chain.
const END: u32 = u32::MAX;
/// The word of a position that is in no chain.
const ABSENT: u32 = u32::MAX - 1;
/// Positions a chain, when every position is in one.
const POSITIONS_A_HEAD: usize = 4;

/// Positions below a fixed number, each in at most one chain. Takes no memory until the first one is entered.
#[derive(Debug)]
pub struct Chains {
    positions: u32,
    heads: Vec<u32>,
    next: Vec<u32>,
    len: usize,
}

impl Chains {
    /// No position yet, of a log of `positions` blocks.
    pub fn new(positions: u32) -> Self {
        Chains { positions, heads: Vec::new(), next: Vec::new(), len: 0 }
    }

    fn head(&self, hash: u64) -> usize {
        // The low half of the hash, scaled: below the number of heads.
        (((hash & u64::from(u32::MAX)) * self.heads.len() as u64) >> 32) as usize
    }

    fn chain(&self, head: u32) -> impl Iterator<Item = u32> {
        let mut at = head;
        std::iter::from_fn(move || {
            let position = (at != END).then_some(at)?;
            at = self.next[position as usize];
            Some(position)
        })
    }

    /// The position in the chain of `hash` that `is_it` picks.
    pub fn find(&self, hash: u64, is_it: impl FnMut(&u32) -> bool) -> Option<u32> {
        let head = *self.heads.get(self.head(hash))?;
        self.chain(head).find(is_it)
    }

    /// Enters a position under `hash`. False, and nothing is changed, when it is in a chain already or too high.
    pub fn insert(&mut self, hash: u64, position: u32) -> bool {
        if position >= self.positions {
            return false;
        }
        if self.next.is_empty() {
            self.next = vec![ABSENT; self.positions as usize];
            self.heads = vec![END; (self.positions as usize).div_ceil(POSITIONS_A_HEAD)];
        }
        if self.next[position as usize] != ABSENT {
            return false;
        }
        let head = self.head(hash);
        self.next[position as usize] = self.heads[head];
        self.heads[head] = position;
        self.len += 1;
        true
    }

    /// Takes a position out. False when it is not in the chain of `hash`.
    pub fn remove(&mut self, hash: u64, position: u32) -> bool {
        let head = self.head(hash);
        let Some(first) = self.heads.get(head).copied() else { return false };
        if first == position {
            self.heads[head] = self.next[position as usize];
        } else {
            let Some(before) = self.chain(first).find(|before| self.next[*before as usize] == position) else {
                return false;
            };
            self.next[before as usize] = self.next[position as usize];
        }
        self.next[position as usize] = ABSENT;
        self.len -= 1;
        true
    }

    /// All positions, in no order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let entered = |(position, next): (usize, &u32)| (*next != ABSENT).then_some(position as u32);
        self.next.iter().enumerate().filter_map(entered)
    }

    /// How many positions are entered.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Takes every position out and gives the memory back.
    pub fn clear(&mut self) {
        *self = Chains::new(self.positions);
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        ((self.heads.capacity() + self.next.capacity()) * size_of::<u32>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn empty_chains_take_nothing() {
        let mut chains = Chains::new(1000);
        assert_eq!(chains.memory_bytes(), 0);
        assert_eq!(chains.find(7, |_| true), None);
        assert!(!chains.remove(7, 3));
        assert!(chains.insert(7, 3));
        assert_eq!(chains.memory_bytes(), 5 * 1000);
        assert!(!chains.insert(8, 3), "in a chain already");
        assert!(!chains.insert(8, 1000), "not of this log");
        chains.clear();
        assert_eq!((chains.len(), chains.memory_bytes()), (0, 0));
    }

    #[test]
    fn a_log_without_blocks_is_no_harm() {
        let mut chains = Chains::new(0);
        assert!(!chains.insert(1, 0));
        assert!(!chains.remove(1, 0));
        assert_eq!(chains.find(1, |_| true), None);
    }

    proptest! {
        #[test]
        fn it_is_a_map(steps in proptest::collection::vec((0u32..64, any::<bool>(), any::<u64>()), 0..400)) {
            let mut chains = Chains::new(64);
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for (position, enters, hash) in steps {
                // Few hashes, so that chains are long.
                let hash = (hash % 5) << 29;
                if enters {
                    prop_assert_eq!(chains.insert(hash, position), !model.contains_key(&position));
                    model.entry(position).or_insert(hash);
                } else {
                    let there = model.get(&position) == Some(&hash);
                    prop_assert_eq!(chains.remove(hash, position), there);
                    if there {
                        model.remove(&position);
                    }
                }
                prop_assert_eq!(chains.len(), model.len());
                prop_assert!(chains.iter().eq(model.keys().copied()));
                for (position, hash) in &model {
                    prop_assert_eq!(chains.find(*hash, |other| other == position), Some(*position));
                }
            }
        }
    }
}
