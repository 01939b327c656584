//! A cache of mapping entries in constant time: a segmented LRU over a slab, found through a hash table.
//!
//! New entries come in at the recent end of the probationary segment; a hit there moves them to the protected
//! segment, whose overflow falls back to the recent end of the probationary one; the probationary segment's old
//! end is what is evicted (Karedla, Love, Wherry 1994, which DFTL names). With no protected room it is a plain LRU.

use crate::geometry::NONE;

/// An entry's place in the cache; valid until the entry is evicted.
pub type Slot = u32;

#[derive(Clone, Copy)]
struct Entry {
    key: u32,
    previous: u32,
    next: u32,
    protected: bool,
}

#[derive(Clone, Copy)]
struct List {
    recent: u32,
    old: u32,
    len: u32,
}

const EMPTY: List = List { recent: NONE, old: NONE, len: 0 };

/// The cache.
pub struct SegmentedLru {
    entries: Vec<Entry>,
    capacity: u32,
    protected_capacity: u32,
    unused: Vec<Slot>,
    probationary: List,
    protected: List,
    // Open addressing with linear probing, at most half full.
    table: Vec<Slot>,
    mask: u32,
}

impl SegmentedLru {
    /// An empty cache of `capacity` entries, at most `protected_capacity` of them protected.
    pub fn new(capacity: u32, protected_capacity: u32) -> SegmentedLru {
        let capacity = capacity.max(1);
        let table = (u64::from(capacity) * 2).next_power_of_two().min(1 << 31) as usize;
        SegmentedLru {
            entries: Vec::with_capacity(capacity as usize),
            capacity,
            protected_capacity: protected_capacity.min(capacity - 1),
            unused: Vec::new(),
            probationary: EMPTY,
            protected: EMPTY,
            table: vec![NONE; table],
            mask: table as u32 - 1,
        }
    }

    /// Whether an entry must be evicted before another can be inserted.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.probationary.len + self.protected.len == self.capacity
    }

    #[inline(always)]
    fn home(&self, key: u32) -> u32 {
        (key.wrapping_mul(0x9e37_79b1) >> 7) & self.mask
    }

    /// The entry's slot, without making it more recent.
    #[inline]
    pub fn find(&self, key: u32) -> Option<Slot> {
        let mut at = self.home(key);
        loop {
            let slot = self.table[at as usize];
            if slot == NONE {
                return None;
            }
            if self.entries[slot as usize].key == key {
                return Some(slot);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// The key in a slot.
    #[inline]
    pub fn key(&self, slot: Slot) -> u32 {
        self.entries[slot as usize].key
    }

    /// A hit: makes the entry the most recent of the protected segment.
    #[inline]
    pub fn touch(&mut self, slot: Slot) {
        self.unlink(slot);
        if self.protected_capacity == 0 {
            self.link(slot, false);
            return;
        }
        self.link(slot, true);
        if self.protected.len > self.protected_capacity {
            let demoted = self.protected.old;
            self.unlink(demoted);
            self.link(demoted, false);
        }
    }

    /// The next entry to evict; `None` when the cache is empty.
    #[inline]
    pub fn oldest(&self) -> Option<Slot> {
        [self.probationary.old, self.protected.old].into_iter().find(|&slot| slot != NONE)
    }

    /// Takes an entry out.
    pub fn remove(&mut self, slot: Slot) {
        self.unlink(slot);
        self.unused.push(slot);
        let mut hole = self.home(self.entries[slot as usize].key);
        while self.table[hole as usize] != slot {
            hole = (hole + 1) & self.mask;
        }
        // Backward shift: entries that were pushed past the hole move into it.
        let mut at = hole;
        loop {
            at = (at + 1) & self.mask;
            let moved = self.table[at as usize];
            if moved == NONE {
                break;
            }
            let home = self.home(self.entries[moved as usize].key);
            if at.wrapping_sub(home) & self.mask >= at.wrapping_sub(hole) & self.mask {
                self.table[hole as usize] = moved;
                hole = at;
            }
        }
        self.table[hole as usize] = NONE;
    }

    /// Adds an entry that is not there as the most recent probationary one. There must be room.
    pub fn insert(&mut self, key: u32) -> Slot {
        debug_assert!(!self.is_full() && self.find(key).is_none());
        let entry = Entry { key, previous: NONE, next: NONE, protected: false };
        let slot = match self.unused.pop() {
            Some(slot) => {
                self.entries[slot as usize] = entry;
                slot
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.link(slot, false);
        let mut at = self.home(key);
        while self.table[at as usize] != NONE {
            at = (at + 1) & self.mask;
        }
        self.table[at as usize] = slot;
        slot
    }

    #[inline]
    fn link(&mut self, slot: Slot, protected: bool) {
        let list = if protected { &mut self.protected } else { &mut self.probationary };
        let recent = std::mem::replace(&mut list.recent, slot);
        if recent == NONE {
            list.old = slot;
        }
        list.len += 1;
        let entry = &mut self.entries[slot as usize];
        (entry.previous, entry.next, entry.protected) = (NONE, recent, protected);
        if recent != NONE {
            self.entries[recent as usize].previous = slot;
        }
    }

    #[inline]
    fn unlink(&mut self, slot: Slot) {
        let Entry { previous, next, protected, .. } = self.entries[slot as usize];
        if previous != NONE {
            self.entries[previous as usize].next = next;
        }
        if next != NONE {
            self.entries[next as usize].previous = previous;
        }
        let list = if protected { &mut self.protected } else { &mut self.probationary };
        if previous == NONE {
            list.recent = next;
        }
        if next == NONE {
            list.old = previous;
        }
        list.len -= 1;
    }

    /// Bytes of memory used.
    pub fn memory_bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<Entry>() + (self.unused.capacity() + self.table.len()) * 4) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same, said slowly: two lists, most recent first.
    struct Slow {
        capacity: usize,
        protected_capacity: usize,
        probationary: Vec<u32>,
        protected: Vec<u32>,
    }

    impl Slow {
        fn access(&mut self, key: u32) -> (bool, Option<u32>) {
            if let Some(at) = self.probationary.iter().position(|&k| k == key) {
                self.probationary.remove(at);
            } else if let Some(at) = self.protected.iter().position(|&k| k == key) {
                self.protected.remove(at);
            } else {
                let mut evicted = None;
                if self.probationary.len() + self.protected.len() == self.capacity {
                    evicted = self.probationary.pop().or_else(|| self.protected.pop());
                }
                self.probationary.insert(0, key);
                return (false, evicted);
            }
            if self.protected_capacity == 0 {
                self.probationary.insert(0, key);
            } else {
                self.protected.insert(0, key);
                if self.protected.len() > self.protected_capacity {
                    let demoted = self.protected.pop().unwrap();
                    self.probationary.insert(0, demoted);
                }
            }
            (true, None)
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_slow_one(
            capacity in 1u32..12, share in 0u32..12, keys in prop::collection::vec(0u32..24, 0..400)
        ) {
            let protected = share.min(capacity - 1);
            let mut fast = SegmentedLru::new(capacity, protected);
            let mut slow = Slow {
                capacity: capacity as usize, protected_capacity: protected as usize, probationary: vec![], protected: vec![],
            };
            for key in keys {
                let key = key.wrapping_mul(0x0100_0000); // long probe sequences
                let (hit, evicted) = slow.access(key);
                match fast.find(key) {
                    Some(slot) => {
                        prop_assert!(hit);
                        fast.touch(slot);
                    }
                    None => {
                        prop_assert!(!hit);
                        let mut out = None;
                        if fast.is_full() {
                            let slot = fast.oldest().unwrap();
                            out = Some(fast.key(slot));
                            fast.remove(slot);
                        }
                        prop_assert_eq!(out, evicted);
                        fast.insert(key);
                    }
                }
            }
        }
    }
}
