//! A home that holds a recovery to its rules, in every build: what is written lies within the file system that is recovered, and outside
//! its journal; and what says that all is home comes behind a flush of it.
//!
//! What the log says cannot bring anybody here: the plan counts what lies outside, and leaves it out. So either is a fault of our own. A block outside
//! is an error, since a guest's log may yet be what showed the fault: the journal stays as it is, and nobody else's recovery ends with this one. An order
//! of steps depends on nothing that a guest says: to assert it is enough.

use crate::home::{HomeBounds, HomeWriter};
use extfs::ReadAt;
use std::io;

pub(crate) struct CheckedHome<'h, H> {
    home: &'h mut H,
    bounds: &'h HomeBounds,
    /// Something was written that no flush covers.
    is_dirty: bool,
}

impl<'h, H: HomeWriter> CheckedHome<'h, H> {
    pub(crate) fn new(home: &'h mut H, bounds: &'h HomeBounds) -> Self {
        CheckedHome { home, bounds, is_dirty: false }
    }

    /// `what` is about to be written, which says that all the rest is home.
    ///
    /// # Panics
    /// Where something is not flushed yet.
    pub(crate) fn expect_flushed(&self, what: &str) {
        assert!(!self.is_dirty, "{what} is written before what it tells of is flushed");
    }

    /// Writes the journal's superblock, which lies in the file system and outside its bounds.
    pub(crate) fn write_journal(&mut self, offset: u64, raw: &[u8]) -> io::Result<()> {
        self.is_dirty = true;
        self.home.write_at(offset, raw)
    }
}

impl<H: HomeWriter> ReadAt for CheckedHome<'_, H> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.home.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.home.size()
    }
}

impl<H: HomeWriter> HomeWriter for CheckedHome<'_, H> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let block_size = u64::from(self.bounds.block_size());
        let first = offset / block_size;
        let count = (data.len() as u64).div_ceil(block_size);
        if !offset.is_multiple_of(block_size) || !self.bounds.contains_all(first, count) {
            return Err(io::Error::other(format!(
                "{count} blocks from block {first} on are outside the file system, or its journal's own: this is a fault of amberlog's, \
                 and they were not written"
            )));
        }
        self.is_dirty = true;
        self.home.write_at(offset, data)
    }

    fn begin_writeback(&mut self, offset: u64, length: u64) {
        self.home.begin_writeback(offset, length);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.home.flush()?;
        self.is_dirty = false;
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A disk that takes anything.
    pub(crate) struct Anything;

    impl ReadAt for Anything {
        fn read_at(&self, _offset: u64, _buffer: &mut [u8]) -> io::Result<()> {
            Ok(())
        }

        fn size(&self) -> u64 {
            u64::MAX
        }
    }

    impl HomeWriter for Anything {
        fn write_at(&mut self, _offset: u64, _data: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nothing_is_written_outside_or_into_the_journal() {
        let bounds = HomeBounds::from_parts(100, 1024, vec![(40, 50), (20, 21)]);
        let mut anything = Anything;
        let mut home = CheckedHome::new(&mut anything, &bounds);
        for (first, count, may) in [
            (0, 20, true),
            (19, 2, false),
            (20, 1, false),
            (21, 19, true),
            (21, 20, false),
            (49, 1, false),
            (50, 50, true),
            (50, 51, false),
            (100, 1, false),
            (u64::MAX / 1024, 2, false),
        ] {
            let written = home.write_at(first * 1024, &vec![0; count * 1024]);
            assert_eq!(written.is_ok(), may, "{count} blocks from {first} on: {written:?}");
        }
        assert!(home.write_at(512, &[0; 1024]).is_err(), "it is no block");
    }

    #[test]
    fn what_is_flushed_may_be_told_of() {
        let bounds = HomeBounds::from_parts(100, 1024, Vec::new());
        let mut anything = Anything;
        let mut home = CheckedHome::new(&mut anything, &bounds);
        home.expect_flushed("nothing was written, and the journal's superblock");
        home.write_at(0, &[0; 1024]).expect("written");
        home.flush().expect("flushed");
        home.expect_flushed("the journal's superblock");
    }

    #[test]
    #[should_panic(expected = "the journal's superblock is written before what it tells of is flushed")]
    fn what_is_not_flushed_is_not_told_of() {
        let bounds = HomeBounds::from_parts(100, 1024, Vec::new());
        let mut anything = Anything;
        let mut home = CheckedHome::new(&mut anything, &bounds);
        home.write_at(0, &[0; 1024]).expect("written");
        home.expect_flushed("the journal's superblock");
    }
}
