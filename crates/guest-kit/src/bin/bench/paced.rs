//! A journal server's segments on a disk of a known speed: this machine's own, slowed to that of a SATA SSD. The storage of
//! many test machines is another machine's memory, faster than any network and than the processors that are to fill it.

use remote_journal::store::{Directory, Medium, SegmentFile};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes a second that a SATA SSD writes.
pub const BYTES_PER_SECOND: f64 = 500e6;

/// When the disk has done what it was given.
#[derive(Clone, Debug)]
pub struct Pace(Arc<Mutex<Instant>>);

impl Pace {
    pub fn new() -> Self {
        Pace(Arc::new(Mutex::new(Instant::now())))
    }

    /// Waits as long as a write takes that began then.
    fn wait(&self, began: Instant, bytes: usize) {
        let mut free_at = self.0.lock().expect("no panic under this lock");
        *free_at = (*free_at).max(began) + Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND);
        let until = *free_at;
        drop(free_at);
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// A directory at that pace.
pub struct Paced {
    pub directory: Directory,
    pub pace: Pace,
}

/// One of its segments.
pub struct PacedFile<F> {
    file: F,
    pace: Pace,
}

impl Medium for Paced {
    type File = PacedFile<<Directory as Medium>::File>;

    fn block_bytes(&self) -> usize {
        self.directory.block_bytes()
    }

    fn list(&self) -> io::Result<Vec<u64>> {
        self.directory.list()
    }

    fn create(&mut self, number: u64, bytes: u64) -> io::Result<Self::File> {
        Ok(PacedFile { file: self.directory.create(number, bytes)?, pace: self.pace.clone() })
    }

    fn publish(&mut self, number: u64) -> io::Result<()> {
        self.directory.publish(number)
    }

    fn open(&self, number: u64) -> io::Result<Self::File> {
        Ok(PacedFile { file: self.directory.open(number)?, pace: self.pace.clone() })
    }

    fn delete(&mut self, number: u64) -> io::Result<()> {
        self.directory.delete(number)
    }

    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        self.directory.reserve(bytes)
    }

    fn reserved_bytes(&self) -> u64 {
        self.directory.reserved_bytes()
    }

    fn create_from_reserve(&mut self, number: u64, least: u64) -> io::Result<(Self::File, u64)> {
        let (file, bytes) = self.directory.create_from_reserve(number, least)?;
        Ok((PacedFile { file, pace: self.pace.clone() }, bytes))
    }

    fn read_end_marks(&self) -> io::Result<[Option<Vec<u8>>; 2]> {
        self.directory.read_end_marks()
    }

    fn write_end_mark(&mut self, mark: &[u8]) -> io::Result<()> {
        self.directory.write_end_mark(mark)
    }

    fn sync_end_mark(&mut self) -> io::Result<()> {
        self.directory.sync_end_mark()
    }

    fn check(&self) -> io::Result<()> {
        self.directory.check()
    }
}

impl<F: SegmentFile> SegmentFile for PacedFile<F> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let began = Instant::now();
        self.file.write_at(offset, bytes)?;
        self.pace.wait(began, bytes.len());
        Ok(())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, buffer)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        self.file.truncate(bytes)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
}
