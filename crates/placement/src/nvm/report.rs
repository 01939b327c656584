//! What was done with a region, for `--report`.

use super::NvmDisk;
use nvm_journal::JournalCounters;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Counters of one disk's region.
#[derive(Debug, Default)]
pub(super) struct NvmCounters {
    pub appends_written_home: AtomicU64,
    pub append_bytes_written_home: AtomicU64,
    pub appends_sent_early: AtomicU64,
    pub appends_logged: AtomicU64,
    pub writes_absorbed: AtomicU64,
    pub bytes_absorbed: AtomicU64,
    pub reads_answered: AtomicU64,
    pub checkpoints: AtomicU64,
    pub checkpoints_of_runs: AtomicU64,
    pub checkpoint_bytes: AtomicU64,
    pub blocks_dropped: AtomicU64,
    pub blocks_restored: AtomicU64,
    pub flushes_of_commits: AtomicU64,
    pub flushes_of_checkpoints: AtomicU64,
    pub flushes_of_tails: AtomicU64,
    pub flushes_of_overwrites: AtomicU64,
    pub commit_room_us: AtomicU64,
    pub commit_appends_us: AtomicU64,
    pub commit_flush_us: AtomicU64,
    pub commits_before_flush: AtomicU64,
    pub commits_in_doubt: AtomicU64,
    pub checkpoint_flush_us: AtomicU64,
    /// Of logs that were closed since.
    closed: [AtomicU64; 9],
}

/// A disk's region in a report.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NvmReport {
    /// The file or device.
    pub path: String,
    /// Which part of it.
    pub region: String,
    /// What it survives: `persistent`, `synced` or `emulated`.
    pub durability: &'static str,
    /// Whether another worker could go on with what is open in it, for all that is noted.
    pub can_be_followed: bool,
    /// Bytes stored to it.
    pub bytes_to_nvm: u64,
    /// Of those, contents written as a difference over an old version.
    pub delta_bytes: u64,
    /// Bytes of the blocks that were committed to it: what would have been stored without differences.
    pub bytes_committed: u64,
    /// Blocks committed to it that had no version there.
    pub blocks_first: u64,
    /// Blocks committed whole beside their latest version.
    pub blocks_second: u64,
    /// Blocks committed as a difference over their old version.
    pub blocks_updated: u64,
    /// Appended blocks that went straight home.
    pub appends_written_home: u64,
    /// Bytes of them.
    pub append_bytes_written_home: u64,
    /// Those of them that were sent before their transaction was complete.
    pub appends_sent_early: u64,
    /// Appended blocks that were logged because that took less time, and went home in the background.
    pub appends_logged: u64,
    /// The guest's home writes of blocks that were acknowledged and not written.
    pub writes_absorbed: u64,
    /// Bytes of them.
    pub bytes_absorbed: u64,
    /// Blocks that were read from the region.
    pub reads_answered: u64,
    /// Runs of garbage collection.
    pub garbage_collections: u64,
    /// Checkpoints.
    pub checkpoints: u64,
    /// Those of them that took long runs alone.
    pub checkpoints_of_runs: u64,
    /// Bytes that they wrote home.
    pub checkpoint_bytes: u64,
    /// Blocks let go without being written: the guest no longer needed them.
    pub blocks_dropped: u64,
    /// Blocks held again because their home was overwritten while the guest's log had them.
    pub blocks_restored: u64,
    /// Flushes of the disk for the appends of a transaction that commits, …
    pub flushes_of_commits: u64,
    /// … for blocks of a checkpoint, so that they may leave the region, …
    pub flushes_of_checkpoints: u64,
    /// … for a tail of the guest's log that moves, …
    pub flushes_of_tails: u64,
    /// … and for what the guest overwrote past its journal.
    pub flushes_of_overwrites: u64,
    /// Microseconds that commits waited for room in the region, …
    pub commit_room_us: u64,
    /// … for their appends to be written, once they had room, …
    pub commit_appends_us: u64,
    /// … and for the flush of those.
    pub commit_flush_us: u64,
    /// Transactions that were acknowledged before the flush of their appends.
    pub commits_before_flush: u64,
    /// Those of them whose flush failed: whether they are durable is not known.
    pub commits_in_doubt: u64,
    /// Microseconds that flushes for checkpoints took.
    pub checkpoint_flush_us: u64,
    /// Transactions published.
    pub transactions: u64,
    /// Fences.
    pub fences: u64,
}

fn values(counters: &JournalCounters) -> [u64; 9] {
    [
        counters.bytes_stored,
        counters.delta_bytes,
        counters.bytes_put,
        counters.blocks_first,
        counters.blocks_second,
        counters.blocks_updated,
        counters.collections,
        counters.transactions,
        counters.fences,
    ]
}

impl NvmCounters {
    pub fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }

    /// Adds the microseconds since `began`.
    pub fn add_since(counter: &AtomicU64, began: Instant) {
        Self::add(counter, u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX));
    }

    /// Keeps what a log that is closed has counted.
    pub fn add_journal(&self, counters: &JournalCounters) {
        for (sum, value) in self.closed.iter().zip(values(counters)) {
            Self::add(sum, value);
        }
    }

    pub fn report(&self, disk: &NvmDisk, live: &[JournalCounters]) -> NvmReport {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let live: Vec<_> = live.iter().map(values).collect();
        let sum = |index: usize| load(&self.closed[index]) + live.iter().map(|values| values[index]).sum::<u64>();
        NvmReport {
            path: disk.options.path.display().to_string(),
            region: disk.options.shown_regions(),
            durability: disk.durability().name(),
            can_be_followed: true,
            bytes_to_nvm: sum(0),
            delta_bytes: sum(1),
            bytes_committed: sum(2),
            blocks_first: sum(3),
            blocks_second: sum(4),
            blocks_updated: sum(5),
            appends_written_home: load(&self.appends_written_home),
            append_bytes_written_home: load(&self.append_bytes_written_home),
            appends_sent_early: load(&self.appends_sent_early),
            appends_logged: load(&self.appends_logged),
            writes_absorbed: load(&self.writes_absorbed),
            bytes_absorbed: load(&self.bytes_absorbed),
            reads_answered: load(&self.reads_answered),
            garbage_collections: sum(6),
            checkpoints: load(&self.checkpoints),
            checkpoints_of_runs: load(&self.checkpoints_of_runs),
            checkpoint_bytes: load(&self.checkpoint_bytes),
            blocks_dropped: load(&self.blocks_dropped),
            blocks_restored: load(&self.blocks_restored),
            flushes_of_commits: load(&self.flushes_of_commits),
            flushes_of_checkpoints: load(&self.flushes_of_checkpoints),
            flushes_of_tails: load(&self.flushes_of_tails),
            flushes_of_overwrites: load(&self.flushes_of_overwrites),
            commit_room_us: load(&self.commit_room_us),
            commit_appends_us: load(&self.commit_appends_us),
            commit_flush_us: load(&self.commit_flush_us),
            commits_before_flush: load(&self.commits_before_flush),
            commits_in_doubt: load(&self.commits_in_doubt),
            checkpoint_flush_us: load(&self.checkpoint_flush_us),
            transactions: sum(7),
            fences: sum(8),
        }
    }
}
