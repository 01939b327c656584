//! Replay: which transactions count, and what has to be written where.
//!
//! [`walk()`] is jbd2's scan pass, outcome for outcome. [`Plan`] adds the revoke pass and what the replay pass would leave
//! at each home block. Neither writes anything; who holds the disk does that from the plan, in any order.

mod fast_commit;
mod log;
mod plan;
mod walk;

#[cfg(test)]
mod tests;

pub use log::{Content, LogRead, ReplayError};
pub use plan::{Blocks, CopyInLog, Plan, PlannedBlock, Summary};
pub use walk::{End, NoVisitor, Place, Verdict, Visitor, Walk, walk};
