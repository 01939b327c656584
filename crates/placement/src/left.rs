//! What an earlier worker has written down, as the next one takes it up ([`crate::resume`]).

use crate::description::{LogDescription, WishDescription};
use crate::disk::PlacementKind;
use crate::kept_log::KeptLog;
use journal_area::Opening;
use std::sync::Arc;

/// What an earlier worker has written down, as far as nobody has taken it up.
#[derive(Debug, Default)]
pub(crate) struct Left {
    pub logs: Vec<LogDescription>,
    pub wishes: Vec<WishDescription>,
}

/// What an earlier worker was told of a log.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub placement: PlacementKind,
    pub is_distrusted: bool,
    pub storage_from: Option<u32>,
    /// See [`LeftCopy`].
    pub copy: Option<String>,
    /// See [`crate::unannounced`].
    pub may_go_on_unannounced: bool,
}

/// A log that was made durable by age, and that storage is to call one that is only held.
#[derive(Debug)]
pub(crate) struct ToMark {
    pub log: Arc<KeptLog>,
    pub superblock: Vec<u8>,
    /// The first number that no compound has.
    pub number: u32,
    pub opening: Opening,
}
