//! Home writes on their way to storage: what each would release, and which overlap.
//!
//! Rule 3 of ARCHITECTURE.md (an older version never lands on a newer one) is kept here for the time in which a write is
//! neither issued nor done: two writes that overlap in flight may land in either order, so neither releases anything,
//! and the host never writes a block home while a guest's write to it is in flight, nor lets one start while its own is.

use std::collections::HashSet;

/// A version that the write carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Home block.
    pub block: u64,
    /// Its newest committed version when the write began.
    pub position: u32,
    /// The transaction of that version: a log block can be used anew while a write is in flight.
    pub sequence: u32,
    /// Where its content was: a page that was copied out meanwhile may have changed under the write.
    pub location: crate::location::Location,
}

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The guest's own home write.
    Guest,
    /// The host, writing owed blocks home.
    Host,
}

/// One write in flight.
#[derive(Debug)]
pub struct HomeOperation {
    /// First home block it touches, and one past the last.
    pub blocks: std::ops::Range<u64>,
    /// Who writes.
    pub writer: Writer,
    /// Another write in flight overlaps it.
    pub tainted: bool,
    /// What it carries.
    pub candidates: Vec<Candidate>,
    /// Block slots it reads from.
    pub pinned: Vec<u32>,
    /// Versions over which it goes past the guest's journal: home block, log block, transaction.
    pub past: Vec<(u64, u32, u32)>,
}

/// All writes in flight to one file system.
#[derive(Debug, Default)]
pub struct InFlight {
    operations: Vec<Option<HomeOperation>>,
    free: Vec<usize>,
}

impl InFlight {
    /// Adds a write. Overlapping ones taint each other. Returns the number to take it out with.
    pub fn begin(&mut self, mut operation: HomeOperation) -> usize {
        for other in self.operations.iter_mut().flatten() {
            if other.blocks.start < operation.blocks.end && operation.blocks.start < other.blocks.end {
                other.tainted = true;
                operation.tainted = true;
            }
        }
        match self.free.pop() {
            Some(index) => {
                self.operations[index] = Some(operation);
                index
            }
            None => {
                self.operations.push(Some(operation));
                self.operations.len() - 1
            }
        }
    }

    /// Takes a write out.
    pub fn end(&mut self, number: usize) -> Option<HomeOperation> {
        let operation = self.operations.get_mut(number)?.take()?;
        self.free.push(number);
        Some(operation)
    }

    /// Whether a write by `writer` (anybody's for nothing) to any of `blocks` is in flight.
    pub fn overlaps(&self, blocks: &std::ops::Range<u64>, writer: Option<Writer>) -> bool {
        self.operations.iter().flatten().any(|other| {
            writer.is_none_or(|writer| other.writer == writer)
                && other.blocks.start < blocks.end
                && blocks.start < other.blocks.end
        })
    }

    /// The log blocks of all versions that are carried.
    pub fn positions(&self) -> HashSet<u32> {
        let candidates = self.operations.iter().flatten().flat_map(|operation| &operation.candidates);
        candidates.map(|candidate| candidate.position).collect()
    }

    /// Whether the host writes anything.
    pub fn has_host_writes(&self) -> bool {
        self.operations.iter().flatten().any(|operation| operation.writer == Writer::Host)
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.operations.len() == self.free.len()
    }
}
