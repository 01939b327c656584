//! What a partition table says of one partition.

/// A partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Its number, as in `/dev/vda5`.
    pub number: u32,
    /// Where it begins, bytes.
    pub offset: u64,
    /// Its bytes, cut off at the end of the disk.
    pub length: u64,
}

impl Partition {
    /// A partition of `sectors` sectors from `start` on, if any of it is on the disk.
    pub(crate) fn new(number: u32, start: u64, sectors: u64, sector_bytes: u64, disk: u64) -> Option<Partition> {
        let offset = start.checked_mul(sector_bytes)?;
        let length = sectors.checked_mul(sector_bytes)?.min(disk.checked_sub(offset)?);
        (start > 0 && length > 0).then_some(Partition { number, offset, length })
    }

    pub(crate) fn overlaps(&self, other: &Partition) -> bool {
        self.offset < other.offset + other.length && other.offset < self.offset + self.length
    }
}
