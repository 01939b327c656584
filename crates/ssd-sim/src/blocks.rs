//! Free blocks and victims: who is programmed next, who is erased next, both in constant time.

use crate::geometry::{BlockNumber, NONE};
use crate::large_pages::filled;
use std::collections::{BTreeSet, VecDeque};

/// Blocks that are erased and good.
pub enum FreeBlocks {
    /// Handed out in the order in which they were freed (no wear levelling).
    Queue(VecDeque<BlockNumber>),
    /// Least erased first (dynamic wear levelling); equal ones by number.
    LeastWorn(BTreeSet<(u32, BlockNumber)>),
}

impl FreeBlocks {
    /// All blocks of a fresh device, in the order of their numbers.
    pub fn new(blocks: u32, wear_levelling: bool) -> FreeBlocks {
        if wear_levelling {
            FreeBlocks::LeastWorn((0..blocks).map(|b| (0, b)).collect())
        } else {
            FreeBlocks::Queue((0..blocks).collect())
        }
    }

    /// How many there are.
    #[inline]
    pub fn len(&self) -> u32 {
        match self {
            FreeBlocks::Queue(queue) => queue.len() as u32,
            FreeBlocks::LeastWorn(set) => set.len() as u32,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next one to use.
    #[inline]
    pub fn take(&mut self) -> Option<BlockNumber> {
        match self {
            FreeBlocks::Queue(queue) => queue.pop_front(),
            FreeBlocks::LeastWorn(set) => set.pop_first().map(|(_, block)| block),
        }
    }

    /// The one to put cold data into: the most worn, where wear is levelled.
    pub fn take_for_cold(&mut self) -> Option<BlockNumber> {
        match self {
            FreeBlocks::Queue(queue) => queue.pop_front(),
            FreeBlocks::LeastWorn(set) => set.pop_last().map(|(_, block)| block),
        }
    }

    /// A block was erased.
    #[inline]
    pub fn put(&mut self, block: BlockNumber, erases: u32) {
        match self {
            FreeBlocks::Queue(queue) => queue.push_back(block),
            FreeBlocks::LeastWorn(set) => {
                set.insert((erases, block));
            }
        }
    }

    /// Bytes of memory used.
    pub fn memory_bytes(&self) -> u64 {
        match self {
            FreeBlocks::Queue(queue) => queue.capacity() as u64 * 4,
            // A B-tree's nodes are at least half full.
            FreeBlocks::LeastWorn(set) => set.len() as u64 * 16,
        }
    }
}

/// How the block to reclaim is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VictimPolicy {
    /// The block with the fewest live pages; of equal ones, that whose count changed longest ago.
    Greedy,
    /// The block with the largest age·(1−u)/2u (Kawaguchi 1995, used by DFTL): u is the live share, the age is
    /// counted in page programs since the block's live count last changed.
    CostBenefit,
}

/// Blocks that may be reclaimed, in one list per number of live pages, each ordered by the time of the last
/// change. Greedy takes the head of the first list; cost-benefit compares the heads, since within a list the
/// head is the oldest: both are exact.
pub struct VictimQueue {
    policy: VictimPolicy,
    pages_per_block: u32,
    heads: Vec<u32>,
    tails: Vec<u32>,
    // Previous and next block of each, by number.
    links: Vec<[u32; 2]>,
    // When each block's live count last changed; only for cost-benefit.
    changed: Vec<u64>,
    // No list below this one holds a block.
    first: usize,
    len: u32,
}

/// A block that could be reclaimed, and how good that would be.
#[derive(Clone, Copy, Debug)]
pub struct Victim {
    /// The block.
    pub block: BlockNumber,
    /// Its live pages.
    pub live: u32,
    /// Page programs since its live count last changed; only looked at by cost-benefit.
    pub age: u64,
}

impl Victim {
    /// Whether this one is strictly better to reclaim than the other.
    pub fn is_better(&self, other: &Victim, policy: VictimPolicy, pages_per_block: u32) -> bool {
        match policy {
            VictimPolicy::Greedy => self.live < other.live,
            // Cross-multiplied age·(1−u)/2u; an empty block is worth any other.
            VictimPolicy::CostBenefit => {
                if self.live == 0 || other.live == 0 {
                    return self.live == 0 && other.live != 0;
                }
                let worth = |x: &Victim, y: &Victim| {
                    u128::from(x.age) * u128::from(pages_per_block - x.live) * u128::from(y.live)
                };
                worth(self, other) > worth(other, self)
            }
        }
    }
}

impl VictimQueue {
    /// An empty queue for this many blocks.
    pub fn new(policy: VictimPolicy, blocks: u32, pages_per_block: u32) -> VictimQueue {
        let lists = pages_per_block as usize + 1;
        VictimQueue {
            policy,
            pages_per_block,
            heads: vec![NONE; lists],
            tails: vec![NONE; lists],
            links: filled(blocks as usize, [NONE; 2]),
            changed: if policy == VictimPolicy::CostBenefit { filled(blocks as usize, 0) } else { Vec::new() },
            first: lists,
            len: 0,
        }
    }

    /// How many blocks could be reclaimed.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a block that is full. `now` counts page programs.
    #[inline]
    pub fn insert(&mut self, block: BlockNumber, live: u32, now: u64) {
        self.link(block, live, now);
        self.len += 1;
    }

    /// One page of a queued block died: it had `live + 1` live pages.
    #[inline]
    pub fn page_died(&mut self, block: BlockNumber, live: u32, now: u64) {
        self.unlink(block, live + 1);
        self.link(block, live, now);
    }

    /// Takes a block out.
    #[inline]
    pub fn remove(&mut self, block: BlockNumber, live: u32) {
        self.unlink(block, live);
        self.len -= 1;
    }

    #[inline]
    fn link(&mut self, block: BlockNumber, live: u32, now: u64) {
        let list = live as usize;
        let tail = self.tails[list];
        self.links[block as usize] = [tail, NONE];
        if tail == NONE {
            self.heads[list] = block;
            self.first = self.first.min(list);
        } else {
            self.links[tail as usize][1] = block;
        }
        self.tails[list] = block;
        if self.policy == VictimPolicy::CostBenefit {
            self.changed[block as usize] = now;
        }
    }

    #[inline]
    fn unlink(&mut self, block: BlockNumber, live: u32) {
        let [previous, next] = self.links[block as usize];
        if previous == NONE {
            self.heads[live as usize] = next;
        } else {
            self.links[previous as usize][1] = next;
        }
        if next == NONE {
            self.tails[live as usize] = previous;
        } else {
            self.links[next as usize][0] = previous;
        }
    }

    /// The best block to reclaim, left in the queue; `None` when none holds garbage.
    pub fn best(&mut self, now: u64) -> Option<Victim> {
        let full = self.pages_per_block as usize;
        while self.first < full && self.heads[self.first] == NONE {
            self.first += 1;
        }
        let mut best: Option<Victim> = None;
        for list in self.first..full {
            let block = self.heads[list];
            if block == NONE {
                continue;
            }
            let age = match self.policy {
                VictimPolicy::Greedy => 0,
                VictimPolicy::CostBenefit => now - self.changed[block as usize],
            };
            let victim = Victim { block, live: list as u32, age };
            if best.is_none_or(|b| self.is_better(&victim, &b)) {
                best = Some(victim);
            }
            if self.policy == VictimPolicy::Greedy || list == 0 {
                break;
            }
        }
        best
    }

    /// Whether `a` is strictly better to reclaim than `b`, by this queue's policy.
    pub fn is_better(&self, a: &Victim, b: &Victim) -> bool {
        a.is_better(b, self.policy, self.pages_per_block)
    }

    /// Looks at what [`VictimQueue::page_died`] will look at first for this block, and nothing else. Returns its neighbours,
    /// which it will look at next.
    #[inline(always)]
    pub fn prefetch(&self, block: BlockNumber) -> [BlockNumber; 2] {
        if let Some(changed) = self.changed.get(block as usize) {
            std::hint::black_box(*changed);
        }
        self.links[block as usize]
    }

    /// Bytes of memory used.
    pub fn memory_bytes(&self) -> u64 {
        (self.links.len() * 8 + self.changed.len() * 8) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_fewest_live_and_of_equals_the_longest_unchanged() {
        let mut queue = VictimQueue::new(VictimPolicy::Greedy, 8, 4);
        for block in 0..4 {
            queue.insert(block, 4, 0);
        }
        assert!(queue.best(0).is_none());
        for (block, live) in [(2, 3), (1, 3), (2, 2), (3, 3), (3, 2)] {
            queue.page_died(block, live, 0);
        }
        assert_eq!(queue.best(0).unwrap().block, 2);
        queue.remove(2, 2);
        assert_eq!(queue.best(0).unwrap().block, 3);
        queue.remove(3, 2);
        assert_eq!(queue.best(0).unwrap().block, 1);
        assert_eq!(queue.len(), 2);
    }

    #[test]
    fn cost_benefit_prefers_the_old_unless_it_is_too_full() {
        let mut queue = VictimQueue::new(VictimPolicy::CostBenefit, 8, 4);
        queue.insert(0, 3, 0); // age 100: 100 * 1/3
        queue.insert(1, 2, 60); // age 40: 40 * 2/2
        assert_eq!(queue.best(100).unwrap().block, 1);
        queue.insert(2, 3, 100);
        assert_eq!(queue.best(1000).unwrap().block, 1);
        queue.remove(1, 2);
        queue.insert(1, 2, 999);
        assert_eq!(queue.best(1000).unwrap().block, 0);
        queue.insert(3, 0, 1000);
        assert_eq!(queue.best(1000).unwrap().block, 3);
    }

    #[test]
    fn the_least_worn_block_is_used_first() {
        let mut free = FreeBlocks::new(3, true);
        assert_eq!(free.take(), Some(0));
        free.put(0, 1);
        assert_eq!((free.take(), free.take(), free.take(), free.take()), (Some(1), Some(2), Some(0), None));
        (0..3).for_each(|b| free.put(b, b + 5));
        assert_eq!((free.take_for_cold(), free.take()), (Some(2), Some(0)));
        let mut free = FreeBlocks::new(2, false);
        assert_eq!(free.take(), Some(0));
        free.put(0, 9);
        assert_eq!((free.take(), free.take(), free.len()), (Some(1), Some(0), 0));
    }
}
