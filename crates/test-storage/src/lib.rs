//! Storage for tests and benches: one image file behind FUSE, whose writes and flushes fail on demand, whose reads and writes are not
//! answered on demand, and whose flushes take as long as a medium would.
//!
//! Everything else goes straight to the backing file, so that what a program did to the image can be judged there. Must
//! never be what a product path depends on; needs /dev/fuse and the right to mount (root, or fusermount3).
//!
//! Failure story: where FUSE is not to be had, [`TestStorage::new`] says so in a sentence and the caller leaves out what it
//! wanted to test or measure, aloud. Dropping it unmounts; the backing file stays. What a process leaves mounted that is killed,
//! [`remove_dead_mounts`] takes away.

#![forbid(unsafe_code)]

mod dead;

pub use dead::remove_dead_mounts;

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request,
    WriteFlags,
};
use rustix::mount::UnmountFlags;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

const NAME: &str = "image";
const IMAGE: INodeNo = INodeNo(2);
/// Threads that answer the kernel: a flush that waits must not keep reads from being answered.
const THREADS: usize = 4;
/// A flush that takes its time looks so often whether that is still wanted.
const LOOK: Duration = Duration::from_millis(10);

/// What was at an offset before it was written to.
#[derive(Debug)]
struct Before {
    /// Which write it was, of all that were remembered.
    number: u64,
    offset: u64,
    bytes: Vec<u8>,
}

/// What a loss of power would take back.
#[derive(Debug, Default)]
struct Unflushed {
    /// Of each write that no flush has made durable, in order.
    before: Vec<Before>,
    /// Writes that were remembered so far.
    count: u64,
    /// The power is gone: no flush makes anything durable any more, not one that is on its way either.
    is_cut: bool,
}

#[derive(Debug, Default)]
struct Controls {
    flush_us: AtomicU64,
    fail_writes: AtomicBool,
    fail_flushes: AtomicBool,
    /// So many of the next flushes fail, …
    flushes_to_fail: AtomicU64,
    /// … and with the first of them all writes from then on.
    is_writing_to_fail: AtomicBool,
    writes: AtomicU64,
    bytes: AtomicU64,
    flushes: AtomicU64,
    failures: AtomicU64,
    /// Nothing while it is not asked for.
    unflushed: Mutex<Option<Unflushed>>,
    silence: Mutex<Silence>,
    /// All that was asked for, in order; nothing while nobody wants to know.
    asked: Mutex<Option<Vec<Asked>>>,
}

impl Controls {
    fn note(&self, asked: Asked) {
        if let Some(all) = &mut *self.asked.lock().expect("no panic under this lock") {
            all.push(asked);
        }
    }
}

/// What a program asked of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To write so many bytes there.
    Write {
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        bytes: u64,
    },
    /// To flush.
    Flush,
}

/// Reads and writes that are not answered for now.
#[derive(Debug, Default)]
struct Silence {
    /// Of those to come.
    wanted: u64,
    held: Vec<Held>,
    wanted_reads: u64,
    held_reads: Vec<HeldRead>,
}

/// A read that nobody was answered.
#[derive(Debug)]
struct HeldRead {
    offset: u64,
    size: u32,
    reply: ReplyData,
}

/// A write that nobody was answered.
#[derive(Debug)]
struct Held {
    offset: u64,
    data: Vec<u8>,
    reply: ReplyWrite,
}

/// A mounted image.
#[derive(Debug)]
pub struct TestStorage {
    controls: Arc<Controls>,
    backing: File,
    // Unmounted before the directory it is mounted on is removed.
    session: Option<BackgroundSession>,
    mounted_at: tempfile::TempDir,
}

impl TestStorage {
    /// Shows the file `backing` as [`TestStorage::image`]. It must not grow or shrink meanwhile.
    ///
    /// # Errors
    /// When the file cannot be opened for writing, or FUSE is not to be had here.
    pub fn new(backing: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(backing)?;
        let controls = Arc::new(Controls::default());
        // What is left mounted says whose it was: a test's thread has its name.
        let thread = std::thread::current();
        let whose: String =
            thread.name().unwrap_or("").chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).take(100).collect();
        let mounted_at = tempfile::Builder::new().prefix(&format!("{}{whose}-", dead::DIRECTORY)).tempdir()?;
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName(dead::name())];
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let backing = file.try_clone()?;
        let image = Image { file, controls: Arc::clone(&controls) };
        let session = fuser::spawn_mount(image, mounted_at.path(), &config)
            .map_err(|e| io::Error::new(e.kind(), format!("FUSE is not to be had here: {e}")))?;
        Ok(TestStorage { controls, backing, session: Some(session), mounted_at })
    }

    /// Whether FUSE is to be had here.
    ///
    /// # Errors
    /// A sentence when it is not.
    pub fn probe() -> io::Result<()> {
        let backing = tempfile::NamedTempFile::new()?;
        Self::new(backing.path()).map(drop)
    }

    /// The image as programs see it.
    pub fn image(&self) -> PathBuf {
        self.mounted_at.path().join(NAME)
    }

    /// How long every flush takes from now on, in µs, at least; one that is under way, too.
    pub fn set_flush_us(&self, flush_us: u64) {
        self.controls.flush_us.store(flush_us, Ordering::SeqCst);
    }

    /// Whether writes fail with EIO from now on. What fails is not written.
    pub fn set_fail_writes(&self, fail: bool) {
        self.controls.fail_writes.store(fail, Ordering::SeqCst);
    }

    /// Whether flushes fail with EIO from now on.
    pub fn set_fail_flushes(&self, fail: bool) {
        self.controls.fail_flushes.store(fail, Ordering::SeqCst);
    }

    /// The next flush fails with EIO; where `with_writes`, so does every write and every flush after it, until
    /// [`TestStorage::set_fail_writes`] and [`TestStorage::set_fail_flushes`] say otherwise.
    pub fn fail_next_flush(&self, with_writes: bool) {
        self.controls.is_writing_to_fail.store(with_writes, Ordering::SeqCst);
        self.controls.flushes_to_fail.store(1, Ordering::SeqCst);
    }

    /// Holds the next so many writes: they are carried out and answered with [`TestStorage::release_writes`], and not before. Those that
    /// come after them are not held, as on storage that has more than one path.
    pub fn hold_writes(&self, count: u64) {
        self.controls.silence.lock().expect("no panic under this lock").wanted = count;
    }

    /// Writes that are held.
    pub fn held_writes(&self) -> usize {
        self.controls.silence.lock().expect("no panic under this lock").held.len()
    }

    /// Carries out what is held, and holds nothing more.
    pub fn release_writes(&self) {
        let held = {
            let mut silence = self.controls.silence.lock().expect("no panic under this lock");
            silence.wanted = 0;
            std::mem::take(&mut silence.held)
        };
        for Held { offset, data, reply } in held {
            match self.backing.write_all_at(&data, offset) {
                Ok(()) => reply.written(data.len() as u32),
                Err(error) => reply.error(error.into()),
            }
        }
    }

    /// Holds the next so many reads: they are carried out and answered with [`TestStorage::release_reads`], and not before.
    pub fn hold_reads(&self, count: u64) {
        self.controls.silence.lock().expect("no panic under this lock").wanted_reads = count;
    }

    /// Reads that are held.
    pub fn held_reads(&self) -> usize {
        self.controls.silence.lock().expect("no panic under this lock").held_reads.len()
    }

    /// Carries out the reads that are held, and holds no more.
    pub fn release_reads(&self) {
        let held = {
            let mut silence = self.controls.silence.lock().expect("no panic under this lock");
            silence.wanted_reads = 0;
            std::mem::take(&mut silence.held_reads)
        };
        held.into_iter().for_each(|HeldRead { offset, size, reply }| answer_read(&self.backing, offset, size, reply));
    }

    /// From now on remembers what a loss of power would take back.
    pub fn remember_unflushed(&self) {
        *self.controls.unflushed.lock().expect("no panic under this lock") = Some(Unflushed::default());
    }

    /// The moment at which the power goes, where what is remembered is to be lost: a flush that has not ended by now makes nothing durable. To be called
    /// just before everybody who uses the image is killed, because such a flush fails when its time is over, which nobody is to see;
    /// [`TestStorage::lose_power`] is what comes then.
    pub fn cut_power(&self) {
        if let Some(unflushed) = &mut *self.controls.unflushed.lock().expect("no panic under this lock") {
            unflushed.is_cut = true;
        }
    }

    /// Loses power: every write that no flush has made durable is taken back, in the backing file. To be called when nobody writes.
    ///
    /// # Errors
    /// When the backing file cannot be written.
    pub fn lose_power(&self) -> io::Result<()> {
        let mut unflushed = self.controls.unflushed.lock().expect("no panic under this lock");
        for Before { offset, bytes, .. } in unflushed.take().unwrap_or_default().before.into_iter().rev() {
            self.backing.write_all_at(&bytes, offset)?;
        }
        Ok(())
    }

    /// From now on notes what is asked for.
    pub fn note_requests(&self) {
        *self.controls.asked.lock().expect("no panic under this lock") = Some(Vec::new());
    }

    /// Writes and flushes that were asked for since [`TestStorage::note_requests`], in order, failed ones too.
    pub fn requests(&self) -> Vec<Asked> {
        self.controls.asked.lock().expect("no panic under this lock").clone().unwrap_or_default()
    }

    /// Writes that were asked for so far.
    pub fn writes(&self) -> u64 {
        self.controls.writes.load(Ordering::SeqCst)
    }

    /// Bytes that were written so far.
    pub fn bytes_written(&self) -> u64 {
        self.controls.bytes.load(Ordering::SeqCst)
    }

    /// Flushes that were asked for so far.
    pub fn flushes(&self) -> u64 {
        self.controls.flushes.load(Ordering::SeqCst)
    }

    /// Writes and flushes that were failed so far.
    pub fn failures(&self) -> u64 {
        self.controls.failures.load(Ordering::SeqCst)
    }
}

/// Whoever was killed has its files open a little longer, and a mount that is in use cannot be undone.
const UNMOUNT_PATIENCE: Duration = Duration::from_secs(10);

impl Drop for TestStorage {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        self.release_writes();
        self.release_reads();
        let begun = Instant::now();
        let unmounted = loop {
            match rustix::mount::unmount(self.mounted_at.path(), UnmountFlags::empty()) {
                Err(rustix::io::Errno::BUSY) if begun.elapsed() < UNMOUNT_PATIENCE => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                outcome => break outcome,
            }
        };
        if unmounted == Err(rustix::io::Errno::BUSY) {
            // Somebody of this process has the image open for good: it goes with the process, and leaves nothing mounted.
            if let Err(error) = rustix::mount::unmount(self.mounted_at.path(), UnmountFlags::DETACH) {
                eprintln!("unmounting {} failed: {error}", self.mounted_at.path().display());
            }
            return std::mem::forget(session);
        }
        // Without privilege only fusermount3 may, which the session calls.
        let ended = if unmounted.is_ok() { session.join() } else { session.umount_and_join() };
        if let Err(error) = ended {
            eprintln!("unmounting {} failed: {error}", self.mounted_at.path().display());
        }
    }
}

fn answer_read(file: &File, offset: u64, size: u32, reply: ReplyData) {
    let mut data = vec![0; size as usize];
    let mut done = 0;
    while done < data.len() {
        match file.read_at(&mut data[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) => return reply.error(error.into()),
        }
    }
    reply.data(&data[..done]);
}

struct Image {
    file: File,
    controls: Arc<Controls>,
}

impl Image {
    fn attributes(&self, inode: INodeNo) -> io::Result<FileAttr> {
        let metadata = self.file.metadata()?;
        let is_image = inode == IMAGE;
        Ok(FileAttr {
            ino: inode,
            size: if is_image { metadata.len() } else { 0 },
            blocks: if is_image { metadata.blocks() } else { 0 },
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_image { FileType::RegularFile } else { FileType::Directory },
            perm: if is_image { 0o600 } else { 0o700 },
            nlink: 1,
            uid: metadata.uid(),
            gid: metadata.gid(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn fails(&self, switch: &AtomicBool) -> bool {
        let fails = switch.load(Ordering::SeqCst);
        if fails {
            self.controls.failures.fetch_add(1, Ordering::SeqCst);
        }
        fails
    }
}

impl Filesystem for Image {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent != INodeNo::ROOT || name != NAME {
            return reply.error(Errno::ENOENT);
        }
        match self.attributes(IMAGE) {
            Ok(attributes) => reply.entry(&Duration::ZERO, &attributes, Generation(0)),
            Err(error) => reply.error(error.into()),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Ok(attributes) => reply.attr(&Duration::ZERO, &attributes),
            Err(error) => reply.error(error.into()),
        }
    }

    fn open(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Nothing is kept in the page cache above us: what is asked is what happens. Nor does a write wait for another one.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        {
            let mut silence = self.controls.silence.lock().expect("no panic under this lock");
            if silence.wanted_reads > 0 {
                silence.wanted_reads -= 1;
                silence.held_reads.push(HeldRead { offset, size, reply });
                return;
            }
        }
        answer_read(&self.file, offset, size, reply);
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.controls.writes.fetch_add(1, Ordering::SeqCst);
        self.controls.note(Asked::Write { offset, bytes: data.len() as u64 });
        if self.fails(&self.controls.fail_writes) {
            return reply.error(Errno::EIO);
        }
        {
            let mut silence = self.controls.silence.lock().expect("no panic under this lock");
            if silence.wanted > 0 {
                silence.wanted -= 1;
                silence.held.push(Held { offset, data: data.to_vec(), reply });
                return;
            }
        }
        // Only who remembers has to be alone: writes of several threads go on side by side otherwise, as on a drive.
        let unflushed = self.controls.unflushed.lock().expect("no panic under this lock");
        let mut unflushed = Some(unflushed).filter(|unflushed| unflushed.is_some());
        if let Some(unflushed) = unflushed.as_deref_mut().and_then(Option::as_mut) {
            let mut bytes = vec![0; data.len()];
            match self.file.read_exact_at(&mut bytes, offset) {
                Ok(()) => unflushed.before.push(Before { number: unflushed.count, offset, bytes }),
                Err(error) => return reply.error(error.into()),
            }
            unflushed.count += 1;
        }
        let written = self.file.write_all_at(data, offset);
        drop(unflushed);
        match written {
            Ok(()) => {
                self.controls.bytes.fetch_add(data.len() as u64, Ordering::SeqCst);
                reply.written(data.len() as u32);
            }
            Err(error) => reply.error(error.into()),
        }
    }

    fn fsync(&self, _request: &Request, _inode: INodeNo, _handle: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.controls.flushes.fetch_add(1, Ordering::SeqCst);
        self.controls.note(Asked::Flush);
        let (controls, order) = (&self.controls, Ordering::SeqCst);
        let is_next = controls.flushes_to_fail.fetch_update(order, order, |left| left.checked_sub(1)).is_ok();
        if is_next && controls.is_writing_to_fail.swap(false, order) {
            controls.fail_writes.store(true, order);
            controls.fail_flushes.store(true, order);
        }
        if is_next {
            controls.failures.fetch_add(1, order);
            return reply.error(Errno::EIO);
        }
        if self.fails(&self.controls.fail_flushes) {
            return reply.error(Errno::EIO);
        }
        // What is written while a flush is on its way is not covered by it, and what is covered is durable when it has ended, and not before.
        let unflushed = || self.controls.unflushed.lock().expect("no panic under this lock");
        let covered = unflushed().as_ref().map_or(0, |unflushed| unflushed.count);
        let flushed = self.file.sync_data();
        let begun = Instant::now();
        loop {
            let wanted = Duration::from_micros(self.controls.flush_us.load(Ordering::SeqCst));
            let left = wanted.saturating_sub(begun.elapsed());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(LOOK));
        }
        if let Some(unflushed) = &mut *unflushed() {
            if unflushed.is_cut {
                return reply.error(Errno::EIO);
            }
            unflushed.before.retain(|before| before.number >= covered);
        }
        match flushed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_passes_through_counts_and_fails_on_demand() {
        let directory = tempfile::tempdir().expect("a directory");
        let backing = directory.path().join("backing");
        std::fs::write(&backing, vec![7; 8192]).expect("a backing file");
        let storage = match TestStorage::new(&backing) {
            Ok(storage) => storage,
            Err(error) => return eprintln!("left out: {error}"),
        };
        let file = File::options().read(true).write(true).open(storage.image()).expect("the image");
        assert_eq!(file.metadata().expect("its attributes").len(), 8192);
        let mut block = vec![0; 4096];
        file.read_exact_at(&mut block, 4096).expect("a read");
        assert_eq!(block, vec![7; 4096]);
        storage.note_requests();
        file.write_all_at(&[9; 512], 512).expect("a write");
        file.sync_data().expect("a flush");
        assert_eq!(storage.requests(), [Asked::Write { offset: 512, bytes: 512 }, Asked::Flush]);
        assert_eq!(std::fs::read(&backing).expect("the backing file")[512..1024], [9; 512]);
        assert_eq!((storage.writes(), storage.flushes(), storage.failures()), (1, 1, 0));

        storage.hold_writes(1);
        std::thread::scope(|threads| {
            let held = threads.spawn(|| file.write_all_at(&[8; 512], 2048));
            while storage.held_writes() == 0 {
                std::thread::yield_now();
            }
            file.write_all_at(&[6; 512], 2048).expect("the next one is not held");
            assert!(!held.is_finished());
            storage.release_writes();
            held.join().expect("no panic").expect("a write");
        });
        assert_eq!(std::fs::read(&backing).expect("the backing file")[2048..2560], [8; 512], "it lands last");

        storage.set_fail_writes(true);
        storage.set_fail_flushes(true);
        let raw = |result: io::Result<()>| result.expect_err("fails").raw_os_error();
        assert_eq!(raw(file.write_all_at(&[1; 512], 512)), Some(5));
        assert_eq!(raw(file.sync_data()), Some(5));
        assert_eq!(storage.failures(), 2);
        storage.set_fail_writes(false);
        storage.set_fail_flushes(false);
        file.write_all_at(&[2; 512], 0).expect("a write");
        storage.remember_unflushed();
        file.write_all_at(&[3; 512], 1024).expect("a write");
        file.sync_data().expect("a flush");
        file.write_all_at(&[4; 512], 1024).expect("a write");
        file.write_all_at(&[5; 1024], 0).expect("a write");
        storage.lose_power().expect("written");
        assert_eq!(std::fs::read(&backing).expect("the backing file")[1024..1536], [3; 512]);
        assert_eq!(std::fs::read(&backing).expect("the backing file")[..1024], [[2; 512], [9; 512]].concat());
    }

    /// Writes were durable when a flush began, so that a power cut in its midst lost nothing, and one that came after it was called durable by another
    /// flush that began before it.
    #[test]
    fn a_flush_makes_durable_what_was_written_before_it_and_when_it_ends() {
        let directory = tempfile::tempdir().expect("a directory");
        let backing = directory.path().join("backing");
        std::fs::write(&backing, vec![7; 8192]).expect("a backing file");
        let storage = match TestStorage::new(&backing) {
            Ok(storage) => storage,
            Err(error) => return eprintln!("left out: {error}"),
        };
        let [file, other] =
            [0, 1].map(|_| File::options().read(true).write(true).open(storage.image()).expect("the image"));
        let begun = |flushes: u64| {
            while storage.flushes() < flushes {
                std::thread::yield_now();
            }
            // It counts what it covers just behind that.
            std::thread::sleep(Duration::from_millis(50));
        };
        let left = |storage: &TestStorage| {
            storage.lose_power().expect("written");
            let all = std::fs::read(&backing).expect("the backing file");
            [0, 1024, 2048].map(|at| all[at])
        };
        storage.remember_unflushed();
        storage.set_flush_us(400_000);
        std::thread::scope(|threads| {
            file.write_all_at(&[1; 512], 0).expect("a write");
            let flushes = [&file, &other].map(|file| threads.spawn(|| file.sync_data()));
            begun(2);
            file.write_all_at(&[2; 512], 1024).expect("a write");
            flushes.into_iter().for_each(|flush| flush.join().expect("no panic").expect("a flush"));
        });
        assert_eq!(left(&storage), [1, 7, 7], "two flushes at once cover no more than each of them");
        storage.remember_unflushed();
        std::thread::scope(|threads| {
            file.write_all_at(&[3; 512], 2048).expect("a write");
            let flush = threads.spawn(|| file.sync_data());
            begun(3);
            storage.cut_power();
            assert!(flush.join().expect("no panic").is_err());
        });
        assert_eq!(left(&storage), [1, 7, 7], "it was on its way when the power went");
    }
}
