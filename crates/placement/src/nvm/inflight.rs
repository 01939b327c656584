//! Writes to home blocks that are on their way, so that no two of different writers meet on one block.

use std::ops::Range;

/// Whose write it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    /// The guest's own, as it gave it.
    Guest,
    /// Ours: an append, a checkpoint, or a guest's write that was put together with what is in the region.
    Host,
}

/// All of a disk.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    writes: Vec<(u64, Range<u64>, Writer)>,
}

impl InFlight {
    pub fn begin(&mut self, id: u64, blocks: Range<u64>, writer: Writer) {
        self.writes.push((id, blocks, writer));
    }

    pub fn end(&mut self, id: u64) {
        self.writes.retain(|(other, ..)| *other != id);
    }

    /// Whether a write of `writer`, or of anyone, touches one of `blocks`.
    pub fn overlaps(&self, blocks: &Range<u64>, writer: Option<Writer>) -> bool {
        self.writes.iter().any(|(_, range, of)| {
            range.start < blocks.end && blocks.start < range.end && writer.is_none_or(|writer| writer == *of)
        })
    }

    pub fn touches(&self, block: u64) -> bool {
        self.overlaps(&(block..block + 1), None)
    }

    /// Which blocks each of them writes to.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<u64>> {
        self.writes.iter().map(|(_, range, _)| range)
    }

    /// Whether any write of `writer` is on its way.
    pub fn has_any_of(&self, writer: Writer) -> bool {
        self.writes.iter().any(|(.., of)| *of == writer)
    }

    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }
}
