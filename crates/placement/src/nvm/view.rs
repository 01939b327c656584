//! A file system as of its last committed transaction: what is in the region, and elsewhere what is at home.

use extfs::ReadAt;
use nvm_journal::Journal;
use std::io;
use write_log::LoggedFile;

/// See the module.
pub(super) struct CommittedView<'a> {
    pub journal: &'a Journal<super::Region>,
    pub home: &'a LoggedFile,
    /// Where the file system begins on its disk, in bytes.
    pub start: u64,
    /// Bytes of it.
    pub len: u64,
    pub block_bytes: u64,
}

impl ReadAt for CommittedView<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > self.len) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("byte {offset} is outside the file system"),
            ));
        }
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let into = (at % self.block_bytes) as usize;
            let count = (buffer.len() - done).min(self.block_bytes as usize - into);
            let part = &mut buffer[done..done + count];
            match self.journal.latest(at / self.block_bytes) {
                Some(content) => part.copy_from_slice(&content[into..into + count]),
                None => self.home.read_exact_at(part, self.start + at)?,
            }
            done += count;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.len
    }
}
