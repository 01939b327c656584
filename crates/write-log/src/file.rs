//! An image as everybody but the disk engine writes it.

use crate::WriteLog;
use image_moments::Changes;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// An open image, the log of what is written to it, if there is one, and who wants to know of writes before they are done.
///
/// It does not give away a file that could be written past the log unseen: [`LoggedFile::for_reading`] says what it is for.
#[derive(Clone, Debug)]
pub struct LoggedFile {
    file: Arc<File>,
    log: Option<Arc<WriteLog>>,
    changes: Arc<OnceLock<Arc<Changes>>>,
    failed_flushes: Arc<AtomicU64>,
    /// Whoever makes it durable.
    flushing: Arc<Mutex<()>>,
    on_failed_flush: Arc<OnceLock<Hook>>,
    past_cache: Arc<OnceLock<PastCache>>,
    has_written: Arc<AtomicBool>,
    before_write: Arc<OnceLock<BeforeWrite>>,
}

struct BeforeWrite(Box<dyn Fn() -> bool + Send + Sync>);

impl std::fmt::Debug for BeforeWrite {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("BeforeWrite")
    }
}

/// The same image past the page cache.
#[derive(Debug)]
struct PastCache {
    file: File,
    /// What offsets and lengths are multiples of.
    unit_bytes: usize,
    /// It is a device: what is read there goes past the cache, too ([`image_moments::Source`] says why).
    is_read: bool,
}

/// Bytes of a page of the cache, and an alignment of memory that every device takes.
const PAGE_BYTES: usize = 4096;

impl PastCache {
    /// Whether a write shares a page with something else, and can be done without it.
    fn takes(&self, offset: u64, len: usize) -> bool {
        let is_multiple = |of: usize| offset.is_multiple_of(of as u64) && len.is_multiple_of(of);
        !is_multiple(PAGE_BYTES) && is_multiple(self.unit_bytes)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut buffer = vec![0; bytes.len() + PAGE_BYTES];
        let skip = buffer.as_ptr().align_offset(PAGE_BYTES);
        let aligned = &mut buffer[skip..][..bytes.len()];
        aligned.copy_from_slice(bytes);
        self.file.write_all_at(aligned, offset)
    }
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
        LoggedFile {
            file: Arc::new(file),
            log,
            changes: Arc::default(),
            failed_flushes: Arc::default(),
            flushing: Arc::default(),
            on_failed_flush: Arc::default(),
            past_cache: Arc::default(),
            has_written: Arc::default(),
            before_write: Arc::default(),
        }
    }

    /// For simulations: asked before each write whether it goes well; otherwise it fails, and writes nothing. Said once.
    pub fn simulate_writes(&self, goes_well: impl Fn() -> bool + Send + Sync + 'static) {
        self.before_write.get_or_init(|| BeforeWrite(Box::new(goes_well)));
    }

    /// Somebody writes the same image past the page cache, through `file` or another one, in multiples of so many bytes. A write of ours
    /// that shares a page with something else goes the same way from now on: through the cache it would bring along what the page held
    /// of its neighbours, over what was written to them meanwhile. Said once.
    pub fn share_with(&self, file: File, unit_bytes: usize) {
        use std::os::unix::fs::FileTypeExt;
        let is_read = file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
        self.past_cache.get_or_init(|| PastCache { file, unit_bytes, is_read });
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
        match self.past_cache.get().filter(|past| past.is_read) {
            Some(past) => image_moments::read_past_cache(&past.file, buffer, offset),
            None => self.file.read_exact_at(buffer, offset),
        }
    }

    /// Whether a write of so many bytes there, which shares a page of the cache with something else, is done without the cache.
    pub fn goes_past_cache(&self, offset: u64, len: usize) -> bool {
        self.past_cache.get().is_some_and(|past| past.takes(offset, len))
    }

    /// Writes all of a buffer.
    ///
    /// # Errors
    /// As [`FileExt::write_all_at`].
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.has_written.store(true, Ordering::Relaxed);
        if self.before_write.get().is_some_and(|BeforeWrite(goes_well)| !goes_well()) {
            return Err(io::Error::other("a simulated failure"));
        }
        let changes = self.changes.get();
        if let Some(changes) = changes {
            changes.begins(offset, bytes.len() as u64);
        }
        let written = match self.past_cache.get().filter(|past| past.takes(offset, bytes.len())) {
            Some(past) => past.write_all_at(bytes, offset),
            None => self.file.write_all_at(bytes, offset),
        };
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

    /// Whether anything was written through it, or tried to be.
    pub fn has_written(&self) -> bool {
        self.has_written.load(Ordering::Relaxed)
    }

    /// Somebody else has written to these bytes, or may have: whoever is told of changes is told that.
    pub fn note_changed(&self, range: std::ops::Range<u64>) {
        if let Some(changes) = self.changes.get() {
            changes.begins(range.start, range.end - range.start);
            changes.ended(range.start, range.end - range.start);
        }
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// As [`File::sync_data`], and where another flush has failed meanwhile.
    pub fn sync_data(&self) -> io::Result<()> {
        self.sync_since(self.failed_flushes())
    }

    /// The same, for who has written since so many flushes had failed. The kernel tells an open file once that write-back has failed, and takes
    /// what it could not write for written then: of two that flush, whoever is told second is told that all is well. So one that ends well says
    /// so only if none has failed since, whoever's; and none ends beside another one, whose error it would not know of yet.
    ///
    /// # Errors
    /// As [`File::sync_data`], and where another flush has failed since.
    pub fn sync_since(&self, failed: u64) -> io::Result<()> {
        #[cfg(feature = "simulate")]
        simulated_flushes::die_if_wished();
        let flushed = {
            let _one_at_a_time = self.flushing.lock().expect("no panic under this lock");
            let flush = self.log.as_ref().map(|log| log.flush_begins());
            let flushed = self.flush();
            if let (Some(log), Some(flush)) = (&self.log, &flush) {
                if flushed.is_ok() { log.flush_ended(flush, true) } else { log.flush_failed(flush) }
            }
            if flushed.is_err() {
                // Before the next one begins.
                self.failed_flushes.fetch_add(1, Ordering::AcqRel);
            }
            flushed
        };
        match flushed {
            Ok(()) if self.failed_flushes() == failed => Ok(()),
            Ok(()) => Err(io::Error::other(
                "a flush of the same image has failed just before this one, and what this one was to cover may be lost",
            )),
            Err(error) => {
                self.flush_has_failed();
                Err(error)
            }
        }
    }

    fn flush(&self) -> io::Result<()> {
        #[cfg(feature = "simulate")]
        if simulated_flushes::fails_now() {
            return Err(io::Error::other("storage failed"));
        }
        self.file.sync_data()
    }

    /// Making the same image durable by way of another descriptor has failed.
    pub fn note_failed_flush(&self) {
        self.failed_flushes.fetch_add(1, Ordering::AcqRel);
        self.flush_has_failed();
    }

    /// It is counted.
    fn flush_has_failed(&self) {
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

/// For simulations: storage that fails flushes, and processes that die before one.
#[cfg(feature = "simulate")]
pub mod simulated_flushes {
    use std::cell::Cell;

    thread_local! {
        static FAILING: Cell<u64> = const { Cell::new(0) };
        static LAST: Cell<u64> = const { Cell::new(0) };
    }

    /// This thread dies, unwinding without a word, where it is about to flush for this time from now on: 1 is the next one. Never with 0.
    pub fn die_before(flush: u64) {
        LAST.set(flush);
    }

    pub(super) fn die_if_wished() {
        let left = LAST.get();
        LAST.set(left.saturating_sub(1));
        if left == 1 {
            std::panic::resume_unwind(Box::new("killed before a flush"));
        }
    }

    /// So many flushes of this thread fail from now on.
    pub fn fail(flushes: u64) {
        FAILING.set(flushes);
    }

    pub(super) fn fails_now() -> bool {
        let left = FAILING.get();
        FAILING.set(left.saturating_sub(1));
        left > 0
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

    /// The kernel has told another flush of an error of write-back: one that covers what was written before that does not end well, also if it
    /// begins when that one is over, and it does not begin before.
    #[test]
    fn no_flush_ends_well_over_what_another_one_has_lost() {
        let file = LoggedFile::new(tempfile::tempfile().expect("a file"), None);
        let before = file.failed_flushes();
        file.write_all_at(b"it", 0).expect("written");
        file.note_failed_flush();
        assert!(file.sync_since(before).is_err(), "nobody else is told any more");
        assert!(file.sync_data().is_ok(), "for who has written nothing since");
        let other = file.flushing.lock().expect("it is not held");
        let (file, before) = (file.clone(), file.failed_flushes());
        let flush = std::thread::spawn({
            let file = file.clone();
            move || file.sync_since(before)
        });
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!flush.is_finished(), "another one is under way");
        // Which fails.
        file.note_failed_flush();
        drop(other);
        assert!(flush.join().expect("it has ended").is_err());
    }

    /// Whether a page of the cache has what is at an offset.
    fn is_cached(file: &File, offset: u64) -> bool {
        let mut byte = [0];
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        rustix::io::preadv2(file, &mut [io::IoSliceMut::new(&mut byte)], offset, flags).is_ok()
    }

    /// A page that is brought into the cache and written back has what its neighbours were.
    #[test]
    fn what_shares_a_page_goes_past_the_cache_where_others_do() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("image");
        std::fs::write(&path, vec![1; 1 << 20])?;
        let open = |flags: rustix::fs::OFlags| {
            let flags = flags | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
            rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).map(File::from)
        };
        let file = open(rustix::fs::OFlags::empty())?;
        file.sync_all()?;
        let Ok(direct) = open(rustix::fs::OFlags::DIRECT) else { return Ok(()) };
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        let ours = LoggedFile::new(file.try_clone()?, None);
        ours.clone().share_with(direct, 512);
        ours.write_all_at(&[2; 1024], 8192 + 1024)?;
        assert!(!is_cached(&file, 8192), "the page of its neighbours is in the cache");
        ours.write_all_at(&[3; 8192], 65_536)?;
        assert!(is_cached(&file, 65_536), "whole pages need not go that way");
        ours.write_all_at(&[4; 100], 131_072)?;
        let mut there = vec![0; 1 << 20];
        file.read_exact_at(&mut there, 0)?;
        let expected =
            [(8192 + 1023, 1), (8192 + 1024, 2), (8192 + 2047, 2), (8192 + 2048, 1), (65_536, 3), (131_072, 4)];
        for (at, byte) in expected {
            assert_eq!(there[at], byte, "byte {at}");
        }
        Ok(())
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
