//! Requests cut to what a device driver takes at once.
//!
//! How many requests a trace has depends on how far the recorded disk let its driver merge: virtio-blk takes up to a
//! megabyte or more, Xen's first block driver took 11 pages. Bytes and addresses stay what they were.

use crate::{Names, Notes, Record, Result, Source};

/// A source whose requests are at most so long.
pub struct Split<S> {
    source: S,
    length_max: u64,
    rest: Option<Record>,
}

impl<S: Source> Split<S> {
    /// Cuts requests of `source` into pieces of at most `length_max` bytes (0: of any length).
    pub fn new(source: S, length_max: u64) -> Split<S> {
        Split { source, length_max: if length_max == 0 { u64::MAX } else { length_max }, rest: None }
    }
}

impl<S: Source> Source for Split<S> {
    fn next_record(&mut self) -> Result<Option<Record>> {
        let record = match self.rest.take() {
            Some(record) => record,
            None => match self.source.next_record()? {
                Some(record) => record,
                None => return Ok(None),
            },
        };
        if record.length <= self.length_max {
            return Ok(Some(record));
        }
        // Readers refuse requests that end beyond 64 bits; should one come all the same, it stays whole.
        let Some(address) = record.address.checked_add(self.length_max) else { return Ok(Some(record)) };
        self.rest = Some(Record { address, length: record.length - self.length_max, ..record });
        Ok(Some(Record { length: self.length_max, ..record }))
    }

    fn names(&self) -> &Names {
        self.source.names()
    }

    fn notes(&self) -> Notes {
        self.source.notes()
    }

    fn units(&self) -> u64 {
        self.source.units()
    }

    fn format(&self) -> &'static str {
        self.source.format()
    }
}
