//! What a modelled disk is asked.

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads a range.
    Read,
    /// Writes a range.
    Write,
    /// All writes submitted before are on the medium when it completes.
    Flush,
    /// Anything that moves no data: a discard.
    Command,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Given back with its completion.
    pub tag: u64,
    /// What it does.
    pub kind: Kind,
    /// Where on the modelled disk, in bytes.
    pub offset: u64,
    /// How many bytes; 0 for a flush.
    pub len: u64,
}
