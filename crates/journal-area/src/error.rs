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
    /// A log of which blocks were let go gets features with which only its guest's own kernel could replay it.
    #[error(
        "the guest's journal gets fast commits, or features that are not known, in the midst of transactions that its guest's kernel \
         alone could replay then, and that are not whole any more; its superblock is refused, and the log is as it was"
    )]
    Features,
    /// The guest was told that blocks are home that are not, and its log is about to forget them.
    #[error(
        "the guest's journal is done with blocks that it was told are home, and that are not yet: this is a fault of amberlog's; its \
         superblock is refused, and the log is as it was"
    )]
    NotHome,
}
