//! Where bytes come from.

use std::io;

/// A disk, or a part of one.
pub trait ReadAt {
    /// Fills `buffer` from byte `offset` on.
    ///
    /// # Errors
    /// When that fails, or the range is not wholly inside.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Its size in bytes.
    fn size(&self) -> u64;
}

impl<R: ReadAt + ?Sized> ReadAt for &R {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        (**self).size()
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let range = usize::try_from(offset).ok().and_then(|from| self.get(from..)?.get(..buffer.len()));
        let Some(bytes) = range else { return Err(beyond(offset, buffer.len())) };
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn size(&self) -> u64 {
        self.len() as u64
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.len() as u64
    }
}

fn beyond(offset: u64, length: usize) -> io::Error {
    let text = format!("{length} bytes at byte {offset} are beyond the end");
    io::Error::new(io::ErrorKind::UnexpectedEof, text)
}

/// A part of a disk: a partition.
#[derive(Clone, Copy, Debug)]
pub struct Window<R> {
    inner: R,
    offset: u64,
    length: u64,
}

impl<R: ReadAt> Window<R> {
    /// The `length` bytes from `offset` on. What lies beyond the end of `inner` fails when it is read.
    pub fn new(inner: R, offset: u64, length: u64) -> Self {
        Window { inner, offset, length }
    }
}

impl<R: ReadAt> ReadAt for Window<R> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.length) {
            return Err(beyond(offset, buffer.len()));
        }
        self.inner.read_at(self.offset + offset, buffer)
    }

    fn size(&self) -> u64 {
        self.length
    }
}
