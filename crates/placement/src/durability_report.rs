//! Durability by age in reports.

use serde::Serialize;

/// Durability by age (`durable-within`), summed over the file systems of a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DurabilityReport {
    /// How old what is committed may be, in seconds, of the file system with the least promise; nothing where one is not made durable by
    /// age, or not yet.
    pub within_s: Option<u64>,
    /// The age of the oldest transaction that is not durable.
    pub oldest_undurable_s: Option<f64>,
    /// Compound transactions that are durable.
    pub compounds: u64,
    /// Blocks that they had.
    pub compound_blocks: u64,
    /// Bytes of appends that were written home in front of one.
    pub append_bytes_home: u64,
    /// Bytes that were brought home to make room in the log.
    pub bytes_brought_home: u64,
    /// Writes of the guest and of the host that had to wait for one.
    pub writes_held: u64,
    /// The same of discards.
    pub discards_held: u64,
    /// The last transaction that is durable, and the last one of what is being made durable: of the first file system, for simulations.
    #[serde(skip)]
    pub through: Option<(u32, Option<u32>)>,
    /// What is in force, for simulations.
    #[serde(skip)]
    pub within: Option<std::time::Duration>,
    /// A journal of the disk is open and held at this moment: there is something to promise.
    #[serde(skip)]
    pub is_held: bool,
    /// It has begun with a journal of the disk, and has not ended: storage has no error mark, or is about to have none.
    #[serde(skip)]
    pub has_begun: bool,
    /// Why it is not as it was asked for, if it is not.
    pub reason: Option<String>,
}

impl DurabilityReport {
    pub(crate) fn add(&mut self, other: &DurabilityReport, is_first: bool) {
        self.add_counts(other);
        self.within_s = match (is_first, self.within_s) {
            (true, _) => other.within_s,
            (false, within) => within.zip(other.within_s).map(|(one, other)| one.max(other)),
        };
        let ages = [self.oldest_undurable_s, other.oldest_undurable_s];
        self.oldest_undurable_s = ages.into_iter().flatten().reduce(f64::max);
        self.through = self.through.or(other.through);
        self.within = self.within.or(other.within);
        self.is_held |= other.is_held;
        self.has_begun |= other.has_begun;
        self.reason = self.reason.take().or_else(|| other.reason.clone());
    }

    /// What was done for a journal that is closed.
    pub(crate) fn add_counts(&mut self, other: &DurabilityReport) {
        self.compounds += other.compounds;
        self.compound_blocks += other.compound_blocks;
        self.append_bytes_home += other.append_bytes_home;
        self.bytes_brought_home += other.bytes_brought_home;
        self.writes_held += other.writes_held;
        self.discards_held += other.discards_held;
    }
}
