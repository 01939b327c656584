//! A log on storage, read in large pieces.

use crate::disk::Disk;
use extfs::{FileSystem, JournalExtent, ReadAt};
use jbd2::{Content, LogRead};
use std::io;

/// The log of a journal on a [`Disk`].
#[derive(Debug)]
pub struct FileLog<'a> {
    disk: &'a Disk,
    /// Byte of the disk where the file system (or journal device) begins.
    offset: u64,
    block_size: u64,
    extents: Vec<JournalExtent>,
}

impl<'a> FileLog<'a> {
    /// The log of `file_system`, which is on `disk` and has an internal journal or is a journal device.
    pub fn new(disk: &'a Disk, file_system: &FileSystem) -> Self {
        FileLog {
            disk,
            offset: file_system.offset,
            block_size: file_system.superblock.block_size.into(),
            extents: file_system.journal.extents(&file_system.superblock),
        }
    }

    /// Byte of the disk where log block `position` is, and how many blocks follow without a gap, itself included.
    fn place(&self, position: u32) -> io::Result<(u64, u32)> {
        let after = self.extents.partition_point(|extent| extent.log <= position);
        let found = after.checked_sub(1).map(|index| self.extents[index]);
        match found {
            Some(extent) if position - extent.log < extent.count => {
                let inside = position - extent.log;
                let block = extent.physical + u64::from(inside);
                Ok((self.offset + block * self.block_size, extent.count - inside))
            }
            _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the journal's map ends before it")),
        }
    }
}

impl LogRead for FileLog<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        let (offset, _) = self.place(position)?;
        self.disk.read_at(offset, buffer)?;
        Ok(Content::Present)
    }

    fn read_run(
        &mut self,
        position: u32,
        block_size: usize,
        buffer: &mut [u8],
        contents: &mut [Content],
    ) -> io::Result<()> {
        let mut position = position;
        let mut rest = buffer;
        while !rest.is_empty() {
            let (offset, together) = self.place(position)?;
            let bytes = (together as usize).saturating_mul(block_size).min(rest.len());
            let (now, later) = rest.split_at_mut(bytes);
            self.disk.read_at(offset, now)?;
            position += (bytes / block_size) as u32;
            rest = later;
        }
        contents.fill(Content::Present);
        Ok(())
    }

    fn will_read(&mut self, mut position: u32, mut count: u32) {
        while count > 0 {
            let Ok((offset, together)) = self.place(position) else { return };
            let now = together.min(count);
            self.disk.will_read(offset, u64::from(now) * self.block_size);
            position += now;
            count -= now;
        }
    }
}
