//! What the operations of a log in a region are for, by which their ends are known.

use super::log_stream::{Tail, TailMove};
use super::versions::Written;
use block_route::RequestId;
use std::ops::Range;

/// What an operation with a number was for.
#[derive(Clone, Debug)]
pub(super) enum Errand {
    /// The guest's write to homes.
    Through {
        request: RequestId,
        blocks: Range<u64>,
        /// Blocks that it made what their latest version is.
        same: Vec<Written>,
        /// It holds its request beside the operation.
        is_held: bool,
    },
    /// The flush of such a write, whose blocks the guest's log has left; with the number of a mark.
    LateFlush { request: RequestId, late: Vec<u64>, mark: u64 },
    /// The flush after which blocks leave that the guest's tail has passed; with the number of a mark, and where the transactions begin
    /// that it has passed.
    TailFlush { request: RequestId, passed: TailMove, mark: u64, before: Vec<Tail> },
    /// An append of the transaction that is being committed.
    Append,
    /// An append of a transaction that was not complete, and of which generation.
    EarlyAppend(u64),
    /// The flush of its appends, and of the mark with this number.
    CommitFlush(u64),
    /// A run of a checkpoint.
    Checkpoint(Vec<Written>),
    /// Its flush, and of the mark with this number.
    CheckpointFlush(u64),
    /// The superblock of a log that is closed.
    Closed,
    /// Log blocks of a log that leaves for storage, in which attempt, …
    LeavingLog(u64),
    /// … their flush, …
    LeavingFlush(u64),
    /// … the superblock that says where the log is, …
    LeavingSuperblock,
    /// … its flush, …
    LeavingLastFlush,
    /// … and log blocks that came meanwhile.
    LeavingRest,
    /// Something that is the disk's from now on.
    PassedOn,
}

impl Errand {
    /// Whether it is a write of ours into the log's own place.
    pub fn is_own_in_log(&self) -> bool {
        matches!(self, Errand::LeavingLog(_) | Errand::LeavingSuperblock | Errand::LeavingRest)
    }

    /// Whether it put something on storage, in place of making that durable.
    pub fn wrote(&self) -> bool {
        !matches!(
            self,
            Errand::LateFlush { .. }
                | Errand::TailFlush { .. }
                | Errand::CommitFlush(_)
                | Errand::CheckpointFlush(_)
                | Errand::LeavingFlush(_)
                | Errand::LeavingLastFlush
        )
    }
}
