//! A log that is being closed: the state of [`super::superblock`], which closes it, and of [`super::foreign`], where somebody writes over it.

use block_route::RequestId;

/// A log that is being closed: its superblock waits until everything is home.
#[derive(Debug)]
pub(super) struct Closing {
    pub request: RequestId,
    /// What it writes, and where: a byte of the disk.
    pub offset: u64,
    pub block: Vec<u8>,
    /// The write has been given to the disk.
    pub is_on_its_way: bool,
    /// Not a kernel ends it, but somebody who writes over it ([`super::foreign`]).
    pub foreign: Option<Foreign>,
    /// Where somebody writes over a live block: the superblock as it was written last, by the guest or by whoever that is. The rest of the log
    /// is in its own place then, as on any disk.
    pub left: Option<Vec<u8>>,
}

/// What was written over an open log.
#[derive(Debug)]
pub(super) enum Foreign {
    /// A superblock that begins another log.
    Superblock,
    /// A block of a transaction that is in the log.
    Live(u32),
}
