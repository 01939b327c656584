//! Versions of blocks: what the home of a block holds of which the region has one, and by what a version that was written home is known
//! when that is durable.

/// What a block's home holds, as the guest sees it, while a version of it is in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HomeState {
    /// The guest has not written it home since that version was committed.
    Behind,
    /// The guest has written that very version home, and it was absorbed: what is at home on storage is older.
    Same,
    /// The guest has written something else there since, and that is on storage.
    Other,
}

/// A block with a version in the region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// The guest's transaction that the version is of.
    pub sequence: u32,
    pub home: HomeState,
    /// The same as it is noted for the next worker.
    pub noted: HomeState,
    /// How often the guest has sent something else home since.
    pub overwrites: u32,
    /// The number of the end of the last of those writes; nothing while one is on its way.
    pub overwritten: Option<u64>,
    /// The number of the end of the last one that has ended, whatever is on its way.
    pub last_overwritten: Option<u64>,
}

/// A version that was written home, by the guest or by us. It may leave the region when that is durable, unless the guest has
/// sent something else there since, even if what it wrote last is this version again: that may have been absorbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub block: u64,
    version: u32,
    overwrites: u32,
}

impl Written {
    /// A version as it is written home now.
    pub fn of(block: u64, version: u32, held: &Held) -> Self {
        Written { block, version, overwrites: held.overwrites }
    }
}

/// A block whose last committed version is at home, by our own hand, while the guest's log still holds it.
#[derive(Clone, Copy, Debug)]
pub(super) struct AtHome {
    pub sequence: u32,
    /// Nothing where an earlier worker brought it there: what is at home has to be read.
    pub digest: Option<[u64; 2]>,
}
