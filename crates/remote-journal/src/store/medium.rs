//! What the store keeps its segments in: a directory (`directory`), a stream (crate's `jetstream`), or a simulation that loses
//! what was not made durable (`simulated`).

use std::io;
/// One segment's bytes.
pub trait SegmentFile: Send {
    /// Writes at an offset.
    ///
    /// # Errors
    /// When it cannot be written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Reads exactly; what lies beyond the end is an error.
    ///
    /// # Errors
    /// When it cannot be read.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Makes everything written before durable.
    ///
    /// # Errors
    /// When that failed: then nobody knows what is durable, and the store must not go on.
    fn sync(&mut self) -> io::Result<()>;
    /// Cuts it, durably.
    ///
    /// # Errors
    /// When it cannot be cut.
    fn truncate(&mut self, bytes: u64) -> io::Result<()>;
    /// Its length, in bytes.
    ///
    /// # Errors
    /// When it cannot be examined.
    fn len(&self) -> io::Result<u64>;
    /// Whether it has no byte.
    ///
    /// # Errors
    /// When it cannot be examined.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// Where segments are.
pub trait Medium: Send {
    /// A segment.
    type File: SegmentFile;
    /// What groups begin at multiples of, in bytes: a power of two from 64 to 4096. Where the medium writes less than this it
    /// may read and write again what lies beside it.
    fn block_bytes(&self) -> usize;
    /// Numbers of the segments there are, ascending.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn list(&self) -> io::Result<Vec<u64>>;
    /// Makes a segment with room for `bytes`, all of it reserved: writing into it cannot find the disk full. It is listed, and
    /// outlives a loss of power, only once it is published.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] when there is no room; nothing is left then.
    fn create(&mut self, number: u64, bytes: u64) -> io::Result<Self::File>;
    /// Gives the segment that was created last its name, durably.
    ///
    /// # Errors
    /// When it cannot be named.
    fn publish(&mut self, number: u64) -> io::Result<()>;
    /// Opens a segment.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&self, number: u64) -> io::Result<Self::File>;
    /// Removes a segment. What it took may become a reserve.
    ///
    /// # Errors
    /// When it cannot be removed.
    fn delete(&mut self, number: u64) -> io::Result<()>;
    /// Keeps room for two segments of `bytes`, for [`Medium::create_from_reserve`].
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] when there is no room; those that were there are there.
    fn reserve(&mut self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }
    /// Bytes of the reserves there are.
    fn reserved_bytes(&self) -> u64 {
        0
    }
    /// Makes a segment of a reserve of at least `least` bytes, and gives its length; otherwise like [`Medium::create`].
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] when there is none.
    fn create_from_reserve(&mut self, number: u64, least: u64) -> io::Result<(Self::File, u64)> {
        Ok((self.create(number, least)?, least))
    }
    /// Whether what is missing at the end of a segment, or a last segment that is missing, shows without end marks.
    fn proves_its_end(&self) -> bool {
        false
    }
    /// What lies where the two end marks should: nothing where a mark is not there, no bytes where it cannot be read.
    ///
    /// # Errors
    /// When the medium is out of reach.
    fn read_end_marks(&self) -> io::Result<[Option<Vec<u8>>; 2]> {
        Ok([None, None])
    }
    /// Writes both end marks; that they are durable is not waited for.
    ///
    /// # Errors
    /// When they cannot be written.
    fn write_end_mark(&mut self, _mark: &[u8]) -> io::Result<()> {
        Ok(())
    }
    /// Makes the end marks durable.
    ///
    /// # Errors
    /// When that failed.
    fn sync_end_mark(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Looks whether the segment that was published last would be found again when the store is opened.
    ///
    /// # Errors
    /// When it would not be.
    fn check(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a read failed because of what is on the disk there, and not because the medium is out of reach.
pub(super) fn is_media_error(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let bad = [Errno::IO, Errno::REMOTEIO, Errno::NODATA, Errno::BADMSG, Errno::UCLEAN, Errno::ILSEQ];
    error.raw_os_error().is_some_and(|number| bad.iter().any(|errno| errno.raw_os_error() == number))
}
