//! An image as everybody but the disk engine writes it.

use crate::WriteLog;
use image_moments::Changes;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

/// An open image, the log of what is written to it, if there is one, and who wants to know of writes before they are done.
///
/// It does not give away a file that could be written past the log unseen: [`LoggedFile::for_reading`] says what it is for.
#[derive(Clone, Debug)]
pub struct LoggedFile {
    file: Arc<File>,
    log: Option<Arc<WriteLog>>,
    changes: Arc<OnceLock<Arc<Changes>>>,
}

impl LoggedFile {
    /// A file, and where writes to it are logged.
    pub fn new(file: File, log: Option<Arc<WriteLog>>) -> Self {
        LoggedFile { file: Arc::new(file), log, changes: Arc::default() }
    }

    /// The same open file, whose writes nobody logs.
    ///
    /// # Errors
    /// When the kernel has no descriptor left.
    pub fn unlogged(file: &File) -> io::Result<Self> {
        Ok(Self::new(file.try_clone()?, None))
    }

    /// The file, to be read, asked and locked.
    pub fn for_reading(&self) -> &File {
        &self.file
    }

    /// From now on writes are said to these, if nobody was named before.
    pub fn tell(&self, changes: &Arc<Changes>) {
        self.changes.get_or_init(|| Arc::clone(changes));
    }

    /// Reads all of a buffer.
    ///
    /// # Errors
    /// As [`FileExt::read_exact_at`].
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    /// Writes all of a buffer.
    ///
    /// # Errors
    /// As [`FileExt::write_all_at`].
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let changes = self.changes.get();
        if let Some(changes) = changes {
            changes.begins(offset, bytes.len() as u64);
        }
        let written = self.file.write_all_at(bytes, offset);
        if let Some(changes) = changes {
            changes.ended(offset, bytes.len() as u64);
        }
        if let Some(log) = &self.log {
            match &written {
                Ok(()) => log.written(offset, bytes),
                Err(error) => log.end(&format!("a write at byte {offset} failed ({error})")),
            }
        }
        written
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// As [`File::sync_data`].
    pub fn sync_data(&self) -> io::Result<()> {
        let flush = self.log.as_ref().map(|log| log.flush_begins());
        let flushed = self.file.sync_data();
        if let (Some(log), Some(flush)) = (&self.log, &flush) {
            log.flush_ended(flush, flushed.is_ok());
        }
        flushed
    }
}
