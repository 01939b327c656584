//! What can go wrong in a journal area, as sentences.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The tmpfs files could not be used.
    #[error(transparent)]
    Memory(#[from] guest_memory::Error),
    /// A table that an earlier process left contradicts itself.
    #[error("the journal table is damaged: log block {position} {what}")]
    Table {
        /// Log block.
        position: u32,
        /// What is wrong with it.
        what: String,
    },
    /// There is no memory left to hold a block.
    #[error("there is no memory left to hold the journal's {what}; free room in tmpfs or raise the memory budget")]
    NoMemory {
        /// What was to be held.
        what: &'static str,
    },
}
