//! What all models answer.

/// A request is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's.
    pub tag: u64,
    /// When, in ns.
    pub at_ns: u64,
}

/// What a model did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Transfers from or to the medium (fewer than reads and writes where the cache joins or absorbs them).
    pub transfers: u64,
    /// Seek and rotation, in ns.
    pub positioning_ns: u64,
    /// Seek, rotation and transfer, in ns.
    pub busy_ns: u64,
    /// Time in which a flush was waited for, in ns.
    pub flushing_ns: u64,
    /// Requests under way at once, at most.
    pub queue_max: u64,
}
