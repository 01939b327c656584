//! One request of a trace.

use serde::Serialize;

/// What a request did. Text formats that know no journal read every write as [`Kind::Home`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Kind {
    /// A read.
    Read = 0,
    /// A write to a block's home: file data or metadata, anything that is not the journal.
    Home = 1,
    /// A write into the journal's extents.
    Journal = 2,
    /// A flush of the device's cache; address and length are 0.
    Flush = 3,
    /// A discard (trim).
    Discard = 4,
    /// A write of zeroes without data.
    WriteZeroes = 5,
}

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Kind; 6] = [Kind::Read, Kind::Home, Kind::Journal, Kind::Flush, Kind::Discard, Kind::WriteZeroes];

    /// The kind with this number, if there is one.
    pub fn from_number(number: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(number)).copied()
    }

    /// Whether this kind programs flash: home and journal writes, and zeroes written.
    pub fn is_write(self) -> bool {
        matches!(self, Kind::Home | Kind::Journal | Kind::WriteZeroes)
    }

    /// The name used in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Home => "home",
            Kind::Journal => "journal",
            Kind::Flush => "flush",
            Kind::Discard => "discard",
            Kind::WriteZeroes => "write-zeroes",
        }
    }
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// When it was issued, in nanoseconds since the trace began.
    pub time_ns: u64,
    /// First byte on the disk.
    pub address: u64,
    /// Bytes; 0 for a flush.
    pub length: u64,
    /// The VM's number in [`crate::Names`].
    pub vm: u16,
    /// The disk's number in [`crate::Names`] (numbers are unique over all VMs).
    pub disk: u16,
    /// What was done.
    pub kind: Kind,
}

impl Record {
    /// The byte after the last one, or `None` where that does not fit 64 bits.
    pub fn end(&self) -> Option<u64> {
        self.address.checked_add(self.length)
    }
}
