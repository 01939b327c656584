//! What was done with a log on a server, for reports.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(crate) struct RemoteCounters {
    pub connects: AtomicU64,
    pub returns: AtomicU64,
    pub fall_backs: AtomicU64,
    pub marks: AtomicU64,
    pub batches: AtomicU64,
    pub blocks: AtomicU64,
    pub block_bytes: AtomicU64,
    pub wire_bytes: AtomicU64,
}

/// What was done with the logs of a disk on a server.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "the names are the report's and say it all")]
pub struct RemoteReport {
    pub is_remote_now: bool,
    pub connects: u64,
    pub returns: u64,
    pub fall_backs: u64,
    pub marks: u64,
    pub batches: u64,
    pub blocks: u64,
    pub block_bytes: u64,
    pub wire_bytes: u64,
}

impl RemoteCounters {
    pub fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }

    pub fn report(&self, is_remote_now: bool) -> RemoteReport {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RemoteReport {
            is_remote_now,
            connects: load(&self.connects),
            returns: load(&self.returns),
            fall_backs: load(&self.fall_backs),
            marks: load(&self.marks),
            batches: load(&self.batches),
            blocks: load(&self.blocks),
            block_bytes: load(&self.block_bytes),
            wire_bytes: load(&self.wire_bytes),
        }
    }
}

impl RemoteReport {
    /// Sums two logs'.
    pub fn add(&mut self, other: &RemoteReport) {
        self.is_remote_now |= other.is_remote_now;
        self.connects += other.connects;
        self.returns += other.returns;
        self.fall_backs += other.fall_backs;
        self.marks += other.marks;
        self.batches += other.batches;
        self.blocks += other.blocks;
        self.block_bytes += other.block_bytes;
        self.wire_bytes += other.wire_bytes;
    }
}
