//! An image as everybody but the disk engine writes it.

use crate::WriteLog;
use image_moments::Changes;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// An open image, the log of what is written to it, if there is one, and who wants to know of writes before they are done.
///
/// It does not give away a file that could be written past the log unseen: [`LoggedFile::for_reading`] says what it is for.
#[derive(Clone, Debug)]
pub struct LoggedFile {
    file: Arc<File>,
    log: Option<Arc<WriteLog>>,
    changes: Arc<OnceLock<Arc<Changes>>>,
    failed_flushes: Arc<AtomicU64>,
    on_failed_flush: Arc<OnceLock<Hook>>,
}

/// What is done about a flush that has failed, at once.
struct Hook(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

impl LoggedFile {
    /// A file, and where writes to it are logged.
    pub fn new(file: File, log: Option<Arc<WriteLog>>) -> Self {
        let (changes, failed_flushes, on_failed_flush) = (Arc::default(), Arc::default(), Arc::default());
        LoggedFile { file: Arc::new(file), log, changes, failed_flushes, on_failed_flush }
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
        if flushed.is_err() {
            self.note_failed_flush();
        }
        flushed
    }

    /// Making the same image durable by way of another descriptor has failed.
    pub fn note_failed_flush(&self) {
        self.failed_flushes.fetch_add(1, Ordering::AcqRel);
        if let Some(Hook(hook)) = self.on_failed_flush.get() {
            hook();
        }
    }

    /// Has this done whenever making it durable has failed and was counted, before whoever asked for that hears of it. Said once.
    pub fn on_failed_flush(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.on_failed_flush.get_or_init(|| Hook(Box::new(hook)));
    }

    /// How often making it durable has failed. Whoever wrote before such a moment cannot know what is on storage, and no later flush
    /// says so again.
    pub fn failed_flushes(&self) -> u64 {
        self.failed_flushes.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_that_failed_is_counted_for_all_who_have_the_file() {
        let (_end, pipe) = std::io::pipe().expect("a pipe");
        let file = LoggedFile::new(File::from(std::os::fd::OwnedFd::from(pipe)), None);
        let other = file.clone();
        assert_eq!(other.failed_flushes(), 0);
        let (counted, seen) = (other.clone(), Arc::new(AtomicU64::new(0)));
        let told = Arc::clone(&seen);
        file.on_failed_flush(move || told.store(counted.failed_flushes(), Ordering::Release));
        // A pipe has nothing that could be made durable.
        assert!(file.sync_data().is_err());
        assert_eq!((other.failed_flushes(), seen.load(Ordering::Acquire)), (1, 1));
    }

    /// Whoever has the file says what he writes before he does.
    #[test]
    fn who_wants_to_know_of_writes_is_told_before() -> io::Result<()> {
        use image_moments::{BLOCK_BYTES, Moment, Record, Target};
        let image = tempfile::tempdir()?;
        let open = |name: &str| {
            File::options().create(true).truncate(false).read(true).write(true).open(image.path().join(name))
        };
        let (source, target, size) = (open("image")?, open("copy")?, 4 * BLOCK_BYTES);
        source.write_all_at(&vec![1; usize::try_from(size).expect("it is small")], 0)?;
        target.set_len(size)?;
        let file = LoggedFile::new(source.try_clone()?, None);
        let other = file.clone();
        let changes = Arc::new(Changes::new(Record::new()?));
        file.tell(&changes);
        let (record, epoch) = (changes.record(), changes.record().next_epoch().expect("there are more"));
        let moment = Arc::new(Moment::new(source, size, None, Target::Whole(target.try_clone()?)));
        let copied =
            changes.keep_while(&moment, || other.write_all_at(&[2; 512], BLOCK_BYTES).and_then(|()| moment.copy()));
        copied.expect("it is the only copy")?;
        let mut first = [0];
        target.read_exact_at(&mut first, BLOCK_BYTES)?;
        assert_eq!(first, [1], "it was kept before it was written over");
        assert!(record.since(epoch, size).expect("all of it is known").contains(1));
        Ok(())
    }
}
