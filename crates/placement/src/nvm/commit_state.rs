//! A transaction that is being committed, and how far that is: the state of [`super::commit`].

use super::captured::Captured;
use super::report::NvmCounters;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// What a commit waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Room in the region: a checkpoint is making some.
    Room,
    /// So many appends that are on their way home.
    Appends(usize),
    /// The flush that makes them durable.
    Flush,
    /// Nothing any more: the guest was told that it is committed, and its appends may not be on storage.
    Lost,
}

/// A transaction that is being committed.
#[derive(Debug)]
pub(super) struct Commit {
    pub sequence: u32,
    /// What goes to the region, and home, by home block.
    pub puts: BTreeMap<u64, Arc<[u8]>>,
    pub appends: BTreeMap<u64, Arc<[u8]>>,
    /// Ascending: a guest can have as many as its log has room for, and each of its home writes asks for some.
    pub revokes: Vec<u64>,
    /// Of the puts, appends that go home in the background once they count.
    pub logged: Vec<u64>,
    pub stage: Stage,
    /// When that began.
    pub since: Instant,
    /// When its appends began to go home, if it has any.
    pub went_home: Option<Instant>,
    /// A flush has failed since something of it went home: that may not be on storage, and no later flush says so.
    pub is_in_doubt: bool,
    /// The guest has written to one of its appends since: what is at home is not, or will not be, what it counts on.
    pub is_written_over: bool,
    /// The guest was told that it is committed: the region has it, on the condition that its appends are at home.
    pub is_acknowledged: bool,
    /// What the guest has written home since as the transaction has it, so that it was not written.
    pub absorbed: BTreeSet<u64>,
    pub has_failed: bool,
}

impl Commit {
    /// Whether the guest was told that it is committed, and its appends will never be known to be durable.
    pub fn is_lost(&self) -> bool {
        self.stage == Stage::Lost
    }

    /// Whether it says anything of a block.
    pub fn has(&self, block: u64) -> bool {
        self.puts.contains_key(&block)
            || self.appends.contains_key(&block)
            || self.revokes.binary_search(&block).is_ok()
    }

    /// Whether it puts one of these blocks into the region.
    pub fn has_put_in(&self, blocks: &Range<u64>) -> bool {
        self.puts.range(blocks.clone()).next().is_some()
    }

    /// What it has for a block.
    pub fn content(&self, block: u64) -> Option<&[u8]> {
        self.puts.get(&block).or_else(|| self.appends.get(&block)).map(|content| &content[..])
    }

    /// The guest has written home what it has for a block. Whether that is to be known of what it puts into the region, and was not.
    pub fn absorb(&mut self, block: u64) -> bool {
        self.absorbed.insert(block) && self.puts.contains_key(&block)
    }

    /// Whether it has anything that was absorbed.
    pub fn has_absorbed(&self) -> bool {
        !self.absorbed.is_empty()
    }

    /// What was absorbed of it.
    pub fn absorbed(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.absorbed.iter().filter_map(|block| Some((*block, self.content(*block)?)))
    }

    /// What has to be at home for it to count.
    pub fn appends(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.appends.iter().map(|(block, content)| (*block, &content[..]))
    }

    /// Whether the region has no room for it yet.
    pub fn waits_for_room(&self) -> bool {
        self.stage == Stage::Room
    }

    /// Goes on to the next stage.
    pub fn enter(&mut self, stage: Stage, counters: &NvmCounters) {
        let waited = match self.stage {
            Stage::Room => &counters.commit_room_us,
            Stage::Appends(_) => &counters.commit_appends_us,
            Stage::Flush => &counters.commit_flush_us,
            Stage::Lost => return,
        };
        // Nobody waits for what goes on behind the answer.
        if !self.is_acknowledged {
            NvmCounters::add_since(waited, self.since);
        }
        (self.stage, self.since) = (stage, Instant::now());
    }

    /// Where the region cannot make room, appends that were to be logged go home after all. False when there are none. (They are appends
    /// still: no other transaction has counted since they were found to be.)
    pub fn send_logged_home(&mut self) -> bool {
        let logged = std::mem::take(&mut self.logged);
        let contents = logged.iter().filter_map(|block| self.puts.remove_entry(block));
        self.appends.extend(contents);
        !logged.is_empty()
    }

    /// How many headers of the region it takes.
    pub fn needed(&self, captured: &Captured) -> u32 {
        let revokes = self.revokes.iter().filter(|block| captured.journal.contains(**block)).count();
        (self.puts.len() + revokes) as u32
    }

    /// The guest writes to blocks, or discards them.
    pub fn guest_writes(&mut self, blocks: &Range<u64>) {
        self.is_written_over |= self.appends.range(blocks.clone()).next().is_some();
    }

    /// A flush of the disk has failed.
    pub fn flush_failed(&mut self) {
        self.is_in_doubt = true;
    }
}

/// Blocks in their order, each once.
pub(super) fn ascending(mut blocks: Vec<u64>) -> Vec<u64> {
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit_of(puts: Range<u64>, revokes: Vec<u64>) -> Commit {
        let content = |byte: u8| -> Arc<[u8]> { Arc::from([byte; 8]) };
        Commit {
            sequence: 7,
            puts: puts.map(|block| (block, content(block as u8))).collect(),
            appends: BTreeMap::new(),
            revokes: ascending(revokes),
            logged: Vec::new(),
            stage: Stage::Room,
            since: Instant::now(),
            went_home: None,
            is_in_doubt: false,
            is_written_over: false,
            is_acknowledged: false,
            absorbed: BTreeSet::new(),
            has_failed: false,
        }
    }

    /// A guest's log can have millions of revokes, and each block that it writes home is looked for among them.
    #[test]
    fn revokes_are_found_in_whatever_order_they_come_however_many_they_are() {
        let count = 2_000_000u64;
        // Each number twice, mixed by a multiplier that is odd.
        let mixed = (0..2 * count).map(|index| 2 * (index.wrapping_mul(1_000_003) % count));
        let commit = commit_of(0..0, mixed.collect());
        assert_eq!(commit.revokes.len() as u64, count, "each counts once");
        let found = (0..2 * count).filter(|block| commit.has(*block)).count() as u64;
        assert_eq!(found, count);
        assert!(commit.has(2 * count - 2) && !commit.has(1));
    }

    #[test]
    fn what_the_region_has_no_room_for_goes_home_and_nothing_else_does() {
        let content = |byte: u8| -> Arc<[u8]> { Arc::from([byte; 8]) };
        let mut commit = commit_of(1..5, Vec::new());
        commit.logged = vec![2, 4];
        assert!(commit.send_logged_home());
        assert_eq!(commit.puts.keys().copied().collect::<Vec<_>>(), [1, 3]);
        assert_eq!(commit.appends.into_iter().collect::<Vec<_>>(), [(2, content(2)), (4, content(4))]);
        assert!(commit.logged.is_empty(), "they do not go home once more when they are there");
        commit.appends = BTreeMap::new();
        assert!(!commit.send_logged_home(), "nobody tries it for ever");
    }
}
