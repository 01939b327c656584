//! A disk as a crash would leave it and as a recovery changes it, without touching the file below.

use extfs::ReadAt;
use recovery::HomeWriter;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What a recovery did, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Wrote these bytes at this offset.
    Write(u64, Vec<u8>),
    /// Made all before durable.
    Flush,
}

/// A part of an image from byte `start` on, with changes kept in memory.
#[derive(Debug)]
pub struct Overlay<'a> {
    file: &'a File,
    start: u64,
    len: u64,
    block_bytes: u64,
    blocks: BTreeMap<u64, Vec<u8>>,
    changes: Vec<Change>,
}

impl<'a> Overlay<'a> {
    /// Nothing changed yet.
    pub fn new(file: &'a File, start: u64, len: u64, block_bytes: u32) -> Self {
        let block_bytes = u64::from(block_bytes);
        Overlay { file, start, len, block_bytes, blocks: BTreeMap::new(), changes: Vec::new() }
    }

    /// The blocks that were written, by number.
    pub fn blocks(&self) -> &BTreeMap<u64, Vec<u8>> {
        &self.blocks
    }

    /// All that was done, in order.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// Changes the disk without it counting as a change: what had landed when the crash came.
    pub fn land(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut at = 0;
        while at < data.len() {
            let (block, into) = ((offset + at as u64) / self.block_bytes, (offset + at as u64) % self.block_bytes);
            let len = ((self.block_bytes - into) as usize).min(data.len() - at);
            let mut content = self.block(block)?;
            content[into as usize..into as usize + len].copy_from_slice(&data[at..at + len]);
            self.blocks.insert(block, content);
            at += len;
        }
        Ok(())
    }

    /// A block as it is now.
    pub fn block(&self, block: u64) -> io::Result<Vec<u8>> {
        if let Some(content) = self.blocks.get(&block) {
            return Ok(content.clone());
        }
        let mut content = vec![0; self.block_bytes as usize];
        self.file.read_exact_at(&mut content, self.start + block * self.block_bytes)?;
        Ok(content)
    }
}

impl ReadAt for Overlay<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > self.len) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a read at byte {offset} is outside")));
        }
        let mut at = 0;
        while at < buffer.len() {
            let (block, into) = ((offset + at as u64) / self.block_bytes, (offset + at as u64) % self.block_bytes);
            let len = ((self.block_bytes - into) as usize).min(buffer.len() - at);
            buffer[at..at + len].copy_from_slice(&self.block(block)?[into as usize..into as usize + len]);
            at += len;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.len
    }
}

impl HomeWriter for Overlay<'_> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset.checked_add(data.len() as u64).is_none_or(|end| end > self.len) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a write at byte {offset} is outside")));
        }
        self.changes.push(Change::Write(offset, data.to_vec()));
        self.land(offset, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.changes.push(Change::Flush);
        Ok(())
    }
}
