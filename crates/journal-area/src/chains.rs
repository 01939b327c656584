//! Finds log blocks by what they hold: hash chains threaded through a number for each log block that is in one, with a head for
//! every four of them. Both are in pieces (`pieces`) that come and go, and take two bytes in a log of fewer than 65,534 blocks.
//!
//! A table that is made anew when it grows would take up to twice its need, under the area's lock while a guest waits. This one grows
//! and shrinks by one chain at a time (linear hashing): entering splits one, taking out joins two.
//!
//! Must never: panic on, or loop over, anything a guest can bring about. A position is in at most one chain; entering it
//! twice is refused. Keys are hashed by the caller, with a seed of its own, so that a guest cannot aim at one chain.

use crate::pieces::Pieces;

/// Positions a chain, on average, at most. Chains are joined when there are half as many.
const POSITIONS_A_HEAD: usize = 4;
/// There are never fewer chains once there is one.
const HEADS_MIN: u32 = 16;

/// Positions below a fixed number, each in at most one chain. Takes no memory until the first one is entered.
#[derive(Debug)]
pub struct Chains {
    positions: u32,
    /// The first position of each chain that has one.
    first: Pieces,
    /// The position after each that is in a chain; `positions` for the last.
    next: Pieces,
    heads: u32,
    len: usize,
}

impl Chains {
    /// No position yet, of a log of `positions` blocks.
    pub fn new(positions: u32) -> Self {
        let bound = u64::from(positions) + 1;
        let heads_max = (positions / POSITIONS_A_HEAD as u32).saturating_add(HEADS_MIN);
        Chains {
            positions,
            first: Pieces::new(heads_max, bound),
            next: Pieces::new(positions, bound),
            heads: HEADS_MIN,
            len: 0,
        }
    }

    /// The chain of a hash: as many of its lowest bits as there are chains for, or one less.
    fn head(&self, hash: u64) -> u32 {
        let low = 1 << self.heads.ilog2();
        let head = hash as u32 & (2 * low - 1);
        if head < self.heads { head } else { head & (low - 1) }
    }

    fn first(&self, head: u32) -> Option<u32> {
        self.first.get(head).map(|position| position as u32)
    }

    fn after(&self, position: u32) -> Option<u32> {
        self.next.get(position).map(|next| next as u32).filter(|next| *next < self.positions)
    }

    fn chain(&self, head: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(head), |position| self.after(*position))
    }

    /// The position in the chain of `hash` that `is_it` picks.
    pub fn find(&self, hash: u64, is_it: impl FnMut(&u32) -> bool) -> Option<u32> {
        self.chain(self.head(hash)).find(is_it)
    }

    fn push(&mut self, head: u32, position: u32) {
        self.next.set(position, u64::from(self.first(head).unwrap_or(self.positions)));
        self.first.set(head, u64::from(position));
    }

    /// Enters a position under `hash`. False, and nothing is changed, when it is in a chain already or too high. `hash_of` gives the
    /// hash that another one was entered under.
    pub fn insert(&mut self, hash: u64, position: u32, hash_of: impl Fn(u32) -> u64) -> bool {
        if position >= self.positions || self.next.get(position).is_some() {
            return false;
        }
        self.push(self.head(hash), position);
        self.len += 1;
        if self.len > self.heads as usize * POSITIONS_A_HEAD && self.heads < u32::MAX / 2 {
            self.split(hash_of);
        }
        true
    }

    /// Makes one more chain, of those of an older one that belong there.
    fn split(&mut self, hash_of: impl Fn(u32) -> u64) {
        let older = self.heads - (1 << self.heads.ilog2());
        self.heads += 1;
        let mut at = self.first(older);
        self.first.clear(older);
        while let Some(position) = at {
            at = self.after(position);
            self.push(self.head(hash_of(position)), position);
        }
    }

    /// Lets the chain that was made last go back into the one that it came from.
    fn join(&mut self) {
        let youngest = self.heads - 1;
        let older = youngest - (1 << youngest.ilog2());
        self.heads = youngest;
        let Some(first) = self.first(youngest) else { return };
        self.first.clear(youngest);
        let last = std::iter::successors(Some(first), |position| self.after(*position)).last().unwrap_or(first);
        self.next.set(last, u64::from(self.first(older).unwrap_or(self.positions)));
        self.first.set(older, u64::from(first));
    }

    /// Takes a position out. False when it is not in the chain of `hash`.
    pub fn remove(&mut self, hash: u64, position: u32) -> bool {
        let head = self.head(hash);
        let Some(first) = self.first(head) else { return false };
        if first == position {
            match self.after(position) {
                Some(next) => self.first.set(head, u64::from(next)),
                None => self.first.clear(head),
            }
        } else {
            let Some(before) = self.chain(head).find(|before| self.after(*before) == Some(position)) else {
                return false;
            };
            self.next.set(before, u64::from(self.after(position).unwrap_or(self.positions)));
        }
        self.next.clear(position);
        self.len -= 1;
        if self.heads > HEADS_MIN && self.len < self.heads as usize * POSITIONS_A_HEAD / 2 {
            self.join();
        }
        true
    }

    /// All positions, in their order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.next.positions()
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
        self.first.memory_bytes() + self.next.memory_bytes()
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
        assert!(chains.insert(7, 3, |_| 7));
        assert!(chains.memory_bytes() < 5000);
        assert!(!chains.insert(8, 3, |_| 7), "in a chain already");
        assert!(!chains.insert(8, 1000, |_| 7), "not of this log");
        chains.clear();
        assert_eq!((chains.len(), chains.memory_bytes()), (0, 0));
    }

    #[test]
    fn a_log_without_blocks_is_no_harm() {
        let mut chains = Chains::new(0);
        assert!(!chains.insert(1, 0, |_| 1));
        assert!(!chains.remove(1, 0));
        assert_eq!(chains.find(1, |_| true), None);
    }

    fn hash(position: u32) -> u64 {
        u64::from(position).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
    }

    #[test]
    fn chains_stay_short_and_their_memory_goes() {
        let mut chains = Chains::new(32768);
        for position in 0..32768 {
            assert!(chains.insert(hash(position), position, hash));
        }
        let longest = (0..chains.heads).map(|head| chains.chain(head).count()).max();
        assert!(longest < Some(40), "{longest:?}");
        assert!(chains.memory_bytes() < 32768 * 27 / 10, "{} bytes", chains.memory_bytes());
        for position in 0..32768 - 100 {
            assert!(chains.remove(hash(position), position));
            assert!(
                position % 997 != 0
                    || (position + 1..32768)
                        .all(|other| { chains.find(hash(other), |there| *there == other).is_some() })
            );
        }
        assert!(chains.memory_bytes() < 7000, "{} bytes", chains.memory_bytes());
    }

    proptest! {
        #[test]
        fn it_is_a_map(
            positions in prop_oneof![Just(200u32), Just(70_000)],
            steps in proptest::collection::vec((0u32..200, any::<bool>(), any::<u64>()), 0..800),
        ) {
            let mut chains = Chains::new(positions);
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for (position, enters, hash) in steps {
                // Few hashes, so that some chains are long.
                let hash = hash % 23;
                let known = model.clone();
                if enters {
                    let entered = chains.insert(hash, position, |other| known.get(&other).copied().unwrap_or(hash));
                    prop_assert_eq!(entered, !model.contains_key(&position));
                    model.entry(position).or_insert(hash);
                } else {
                    let there = model.get(&position);
                    let hash = there.copied().unwrap_or(hash);
                    prop_assert_eq!(chains.remove(hash, position), there.is_some());
                    model.remove(&position);
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
