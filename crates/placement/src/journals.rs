//! All journals of one VM: which logs its disks carry, where each lives, what has to happen when one opens or closes.
//!
//! Rule 4 of ARCHITECTURE.md is kept here: before the first transaction of an opened log can complete, the journal superblock
//! *on storage* says that the log is empty and that an error happened ([`Journals::superblock_written`]); after a host
//! power loss the file system is then checked in full instead of trusting an empty log. A clean close and a recovery
//! take the mark away, after everything that it stood for is on storage.

use crate::description::{AreaDirectory, LogDescription};
use crate::disk::{Disk, DiskCounters, DiskOptions, PlacementKind};
use crate::layout::{DiskLayout, LogRun};
use crate::mark::{self, MarkKind};
use crate::remote::RemoteLog;
use crate::scan::{self, FoundLogPlace};
use crate::stored::{Says, Stored};
use block_route::LogIndex;
use guest_memory::VmMemory;
use jbd2::Superblock;
use journal_area::{Holding, JournalArea, LogId, LogShape, Opening, SuperblockEffect};
use recovery::{Report, Status};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// A disk may be this small a part something else than file systems with held logs (partition tables, an EFI partition)
/// and its guest is still told of no write cache.
const PLAIN_SHARE_MAX: u64 = 16;

/// How long recovery waits for home writes that another device has in flight.
const HOME_WRITES_PATIENCE: Duration = Duration::from_secs(30);

/// What a trace record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceKind {
    /// A write into a log.
    Journal,
    /// Any other write.
    Home,
    /// A read.
    Read,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
}

/// Who is told of every request, for a trace: disk, kind, offset and length in bytes.
pub type Tracer = Box<dyn Fn(usize, TraceKind, u64, u64) + Send + Sync>;

/// A mark as it is on storage.
#[derive(Clone, Debug)]
pub(crate) struct Marked {
    opening: Opening,
    kind: MarkKind,
    pub(crate) bytes: Vec<u8>,
    /// What had been written home before, in bytes.
    written: u64,
}

/// One log and where it and its home are. Where its home ends may change under it; what clones share does not.
#[derive(Clone, Debug)]
pub struct Log {
    /// Its name in the area.
    pub id: LogId,
    /// Where it lives.
    pub placement: PlacementKind,
    pub(crate) index: LogIndex,
    pub(crate) place: FoundLogPlace,
    pub(crate) home_disk: usize,
    pub(crate) journal_disk: usize,
    /// Its way to a journal server, for placement `remote`.
    pub(crate) remote: Option<Arc<RemoteLog>>,
    pub(crate) is_open: Arc<AtomicBool>,
    pub(crate) was_opened: Arc<AtomicBool>,
    /// Somebody waits until it owes nothing.
    pub(crate) is_emptying: Arc<AtomicBool>,
    /// Something was written into it while it was closed, which no kernel does.
    pub(crate) is_foreign: Arc<AtomicBool>,
    /// How often it was seen to owe nothing while somebody waited for that.
    pub(crate) emptied: Arc<AtomicU64>,
    /// How often that failed.
    pub(crate) failed_to_empty: Arc<AtomicU64>,
    /// What the guest did proved that it is not what it seemed: it is on storage, or on its way there, and stays.
    pub(crate) is_distrusted: Arc<AtomicBool>,
    /// Bringing it there failed, and that was said.
    pub(crate) has_failed_to_leave: Arc<AtomicBool>,
    /// Where it shall live from the next mount on.
    pub(crate) wanted: Arc<Mutex<PlacementKind>>,
    /// It was handed over to storage, where it begins with this transaction: superblocks that say less stay away from there.
    pub(crate) storage_from: Option<u32>,
    /// The mark that storage has for as long as it is held here.
    pub(crate) mark: Arc<Mutex<Option<Marked>>>,
    /// The last recovery.
    pub(crate) recovery: Arc<Mutex<Option<Report>>>,
    /// One recovery at a time: after a reset the disk with the home and the one with the log start at the same moment,
    /// and neither may be read before it is through.
    pub(crate) recovering: Arc<Mutex<()>>,
}

impl Log {
    /// Where it and its file system are.
    pub fn place(&self) -> &FoundLogPlace {
        &self.place
    }

    /// Its number within its VM.
    pub fn index(&self) -> LogIndex {
        self.index
    }

    /// The disk with its file system.
    pub fn home_disk(&self) -> usize {
        self.home_disk
    }

    /// The disk with the log itself.
    pub fn journal_disk(&self) -> usize {
        self.journal_disk
    }

    /// Whether a guest has it open.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Whether what the guest did proved that it is not what it seemed.
    pub(crate) fn is_distrusted(&self) -> bool {
        self.is_distrusted.load(Ordering::Acquire)
    }

    pub(crate) fn was_opened(&self) -> bool {
        self.was_opened.load(Ordering::Acquire)
    }

    /// Somebody else than [`Journals`] holds the log, and says whether it is open.
    pub(crate) fn set_open_elsewhere(&self, is_open: bool) {
        if is_open {
            self.set_open();
        } else {
            self.is_open.store(false, Ordering::Release);
        }
    }

    /// Storage is about to say something else than the mark: nobody writes that any more. Not to be called under the area's
    /// lock.
    pub(crate) fn take_mark(&self) -> Option<Marked> {
        self.mark.lock().expect("no panic under this lock").take()
    }

    pub(crate) fn set_open(&self) {
        self.is_open.store(true, Ordering::Release);
        self.was_opened.store(true, Ordering::Release);
    }

    /// Whether it is open and the area holds it.
    pub fn is_held_open(&self) -> bool {
        self.placement.is_held() && self.is_open()
    }

    /// Where log block `position` has its own place on its disk, in bytes.
    pub fn offset_of(&self, position: u32) -> Option<u64> {
        offset_of(&self.place.runs, self.place.block_bytes, position)
    }

    /// Where home block `block` is on its disk, in bytes.
    pub fn home_offset(&self, block: u64) -> u64 {
        self.place.home_start + block * u64::from(self.place.block_bytes)
    }
}

/// What a recovery of the file system at byte `start` did, for the log.
fn what_was_done(start: u64, report: &Report) -> String {
    match report.status {
        Status::Materialised => format!(
            "the journal of the file system at byte {start} is at its own place on storage, {} blocks, and left to the guest's \
             own kernel to replay",
            report.blocks_written
        ),
        _ => format!(
            "recovered the file system at byte {start}: {} transactions, {} blocks written home",
            report.transactions, report.blocks_written
        ),
    }
}

/// Whether a log's superblock shares no page of the host's cache with anything else: a write to it from here would bring along
/// what the page held of its neighbours, and those are written past the cache.
fn is_alone_in_its_page(log: &Log) -> bool {
    const PAGE: u64 = 4096;
    u64::from(log.place.block_bytes) >= PAGE && log.offset_of(0).is_some_and(|offset| offset.is_multiple_of(PAGE))
}

/// Where log block `position` is, in bytes, given the runs of its log.
pub(crate) fn offset_of(runs: &[LogRun], block_bytes: u32, position: u32) -> Option<u64> {
    let run = runs.iter().find(|run| position >= run.first_position && position - run.first_position < run.count)?;
    Some(run.offset + u64::from(position - run.first_position) * u64::from(block_bytes))
}

/// The journals of one VM.
pub struct Journals {
    /// The area that holds them.
    pub area: Arc<JournalArea>,
    pub(crate) memory: Arc<VmMemory>,
    directory: AreaDirectory,
    disks: Vec<Arc<Disk>>,
    pub(crate) logs: RwLock<Vec<Option<Arc<Log>>>>,
    /// One scan at a time: a scan looks at all disks. Whoever puts a log in the place of another holds it, too.
    pub(crate) scanning: Mutex<u64>,
    scan_soon: Vec<AtomicBool>,
    /// Guest pages that the description knows the files of.
    described_pages: AtomicU32,
    tracer: Option<Tracer>,
}

impl std::fmt::Debug for Journals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journals").field("disks", &self.disks).field("logs", &self.logs).finish_non_exhaustive()
    }
}

/// How a VM's journals are set up.
pub struct JournalsOptions {
    /// The VM's disks, in the order in which they are attached.
    pub disks: Vec<DiskOptions>,
    /// Bound on host memory for tables and copies, in bytes.
    pub budget_bytes: u64,
    /// Who is told of every request.
    pub tracer: Option<Tracer>,
}

impl std::fmt::Debug for JournalsOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalsOptions").field("disks", &self.disks).finish_non_exhaustive()
    }
}

impl Journals {
    /// Sets up the journals of a VM and looks for logs on its disks. `directory` is the VM's own, in tmpfs.
    ///
    /// # Errors
    /// When an image cannot be opened or read. The directory is removed then: nothing is owed yet.
    pub fn new(memory: &Arc<VmMemory>, directory: AreaDirectory, options: JournalsOptions) -> io::Result<Arc<Self>> {
        let mut disks = Vec::new();
        for disk in options.disks {
            let path = disk.path.clone();
            let disk = Disk::open(disk).map_err(|e| {
                directory.remove();
                io::Error::new(e.kind(), format!("opening {}: {e}", path.display()))
            })?;
            disks.push(Arc::new(disk));
        }
        let area = JournalArea::new(memory, options.budget_bytes);
        let waking: Vec<Arc<Disk>> = disks.iter().map(Arc::clone).collect();
        area.set_waker(Box::new(move || waking.iter().for_each(|disk| disk.wake.wake())));
        let journals = Arc::new(Journals {
            area,
            memory: Arc::clone(memory),
            directory,
            scan_soon: disks.iter().map(|_| AtomicBool::new(false)).collect(),
            disks,
            logs: RwLock::default(),
            scanning: Mutex::new(0),
            described_pages: AtomicU32::new(0),
            tracer: options.tracer,
        });
        if let Err(error) = journals.scan_all() {
            journals.directory.remove();
            return Err(error);
        }
        Ok(journals)
    }

    /// Whether the guest has to flush a disk of `size_bytes`: it need not where the file systems with held logs are, as of
    /// now, practically all of it. What is written elsewhere, or while a log is closed, is then flushed write by write;
    /// so this only decides what is fast, not what is safe.
    pub fn needs_flushes(&self, index: usize, size_bytes: u64) -> bool {
        let disk = &self.disks[index];
        let layout = disk.layout();
        let logs = layout.homes.iter().map(|home| home.log).chain(layout.logs.iter().map(|range| range.log));
        let all_held = logs.filter_map(|log| self.log(log)).all(|log| log.placement.is_held());
        disk.options.honour_flush
            || layout.is_plain()
            || !all_held
            || layout.plain_bytes(size_bytes) > size_bytes / PLAIN_SHARE_MAX
    }

    /// The disk with this index.
    pub fn disk(&self, index: usize) -> &Disk {
        &self.disks[index]
    }

    /// All disks.
    pub fn disks(&self) -> &[Arc<Disk>] {
        &self.disks
    }

    /// The log with this index, if it still is one.
    pub fn log(&self, index: LogIndex) -> Option<Arc<Log>> {
        self.logs.read().expect("no panic under this lock").get(index.0).cloned().flatten()
    }

    /// All logs there are.
    pub fn logs(&self) -> Vec<Arc<Log>> {
        self.logs.read().expect("no panic under this lock").iter().flatten().cloned().collect()
    }

    pub(crate) fn logs_at_home(&self, disk: usize) -> Vec<Arc<Log>> {
        self.logs().into_iter().filter(|log| log.home_disk == disk).collect()
    }

    /// Logs on a disk that are shipped to a server.
    pub(crate) fn remote_logs_on(&self, disk: usize) -> Vec<Arc<RemoteLog>> {
        self.logs().into_iter().filter(|log| log.journal_disk == disk).filter_map(|log| log.remote.clone()).collect()
    }

    pub(crate) fn trace(&self, disk: usize, kind: TraceKind, offset: u64, len: u64) {
        if let Some(tracer) = &self.tracer {
            tracer(disk, kind, offset, len);
        }
    }

    /// The guest writes a log's superblock. Says whether the write goes to storage as it is.
    pub(crate) fn superblock_written(&self, log: &Log, block: &[u8]) -> io::Result<bool> {
        if let Some(remote) = &log.remote {
            return self.remote_superblock_written(log, remote, block);
        }
        let effect = match log.placement {
            PlacementKind::Storage | PlacementKind::Nvm | PlacementKind::Remote => {
                match Superblock::decode(block).ok().filter(|superblock| !superblock.is_empty()) {
                    Some(open) => {
                        log.set_open();
                        let is_earlier = |from| jbd2::sequence::is_after(from, open.sequence);
                        return Ok(!log.storage_from.is_some_and(is_earlier));
                    }
                    None => {
                        log.is_open.store(false, Ordering::Release);
                        self.follow_wish(log);
                        return Ok(true);
                    }
                }
            }
            PlacementKind::Discard => match Superblock::decode(block) {
                Ok(superblock) if superblock.is_empty() => SuperblockEffect::Closed,
                Ok(_) if log.is_open() => SuperblockEffect::GoesOn,
                Ok(_) => SuperblockEffect::Opened,
                Err(_) => SuperblockEffect::NotALog,
            },
            PlacementKind::Retain | PlacementKind::Copy => {
                if !log.is_open() && self.is_foreign_log(log, block)? {
                    return Ok(true);
                }
                self.held_superblock_written(log, block)?
            }
        };
        match effect {
            SuperblockEffect::Opened => {
                if let Err(error) = self.write_mark(log, block) {
                    if log.placement.is_held() {
                        // Nothing is owed yet: the log is as if it had not been opened.
                        self.area.close(log.id);
                    }
                    return Err(io::Error::new(
                        error.kind(),
                        format!("marking the journal on storage failed, so it cannot be held: {error}"),
                    ));
                }
                log.set_open();
                log::info!(
                    "disk {}: the journal of the file system at byte {} is {} from transaction {} on",
                    self.disks[log.home_disk].options.name,
                    log.place.home_start,
                    if log.placement.is_held() { "held" } else { "dropped" },
                    Superblock::decode(block).map_or(0, |superblock| superblock.sequence),
                );
                Ok(false)
            }
            SuperblockEffect::GoesOn => Ok(false),
            SuperblockEffect::Closed | SuperblockEffect::Foreign | SuperblockEffect::NotALog => {
                log.take_mark();
                if log.is_open.swap(false, Ordering::AcqRel) {
                    // The guest believes that what it wrote home before is durable, and the superblock that goes to
                    // storage now says that no log is needed any more: so it has to be.
                    self.disks[log.home_disk].file.sync_data()?;
                    self.disks[log.home_disk].set_dirty();
                    self.disks[log.journal_disk].set_dirty();
                    self.follow_wish(log);
                }
                if effect == SuperblockEffect::NotALog {
                    self.scan_soon(log.journal_disk);
                    self.disks[log.journal_disk].wake.wake();
                }
                Ok(true)
            }
        }
    }

    /// The guest writes the superblock of a log that is shipped to a server. Says whether the write goes to storage as it
    /// is.
    fn remote_superblock_written(&self, log: &Log, remote: &RemoteLog, block: &[u8]) -> io::Result<bool> {
        match Superblock::decode(block) {
            Ok(superblock) if !superblock.is_empty() && log.is_open() => {
                remote.superblock(&superblock, block).map(|()| false)
            }
            Ok(superblock) if !superblock.is_empty() => {
                remote.open(&superblock, block)?;
                log.set_open();
                Ok(false)
            }
            other => {
                let was_open = log.is_open();
                if was_open {
                    // What was written home is durable before the superblock says that no log is needed any more.
                    self.disks[log.home_disk].file.sync_data()?;
                    remote.close(block)?;
                    log.is_open.store(false, Ordering::Release);
                    self.disks[log.home_disk].set_dirty();
                    self.disks[log.journal_disk].set_dirty();
                }
                if other.is_err() {
                    self.scan_soon(log.journal_disk);
                    self.disks[log.journal_disk].wake.wake();
                }
                Ok(!was_open)
            }
        }
    }

    /// Puts the error mark on storage: an empty log that an error happened to, and which opening of it this is.
    fn write_mark(&self, log: &Log, block: &[u8]) -> io::Result<()> {
        let mut current = log.mark.lock().expect("no panic under this lock");
        *current = None;
        let kind = if log.placement == PlacementKind::Discard { MarkKind::Dropped } else { MarkKind::Held };
        let opening = Opening { number: remote_journal::random(), count: 0 };
        let marked = self.write_opening(log, block, kind, opening)?;
        let disk = &self.disks[log.journal_disk];
        DiskCounters::add(&disk.counters.journal_bytes_to_storage, marked.bytes.len() as u64);
        disk.file.sync_data()?;
        *current = Some(marked);
        Ok(())
    }

    /// The area says it first, then storage: a kill between the two leaves an area that knows both.
    fn write_opening(&self, log: &Log, block: &[u8], kind: MarkKind, opening: Opening) -> io::Result<Marked> {
        let written = self.written_home(log);
        let bytes = mark::marked(block, kind, &opening)?;
        self.area.note_opening(log.id, &opening, false);
        self.write_superblock_bytes(log, &bytes)?;
        self.area.note_opening(log.id, &opening, true);
        Ok(Marked { opening, kind, bytes, written })
    }

    fn written_home(&self, log: &Log) -> u64 {
        self.disks[log.home_disk].counters.home_bytes_to_storage.load(Ordering::Acquire)
    }

    /// Counts on in the marks of logs whose disks were written to since the last time, so that an older copy of an image is
    /// told from the image: what goes home is not held any more. To be called every now and then while a guest runs.
    pub fn note_progress(&self) {
        for log in self.logs() {
            let mut current = log.mark.lock().expect("no panic under this lock");
            // Under the lock: whoever closes the log, hands it over or recovers it takes the mark away first.
            let Some(marked) = &*current else { continue };
            let is_quiet = !log.is_held_open() || marked.written == self.written_home(&log);
            if is_quiet || !is_alone_in_its_page(&log) {
                continue;
            }
            let next = Opening { count: marked.opening.count + 1, ..marked.opening };
            let outcome = self.is_on_storage_still(&log, marked).and_then(|is_there| match is_there {
                true => self.write_opening(&log, &marked.bytes, marked.kind, next).map(Some),
                false => Ok(None),
            });
            match outcome {
                Ok(next) => {
                    let bytes = next.as_ref().map_or(0, |next| next.bytes.len() as u64);
                    DiskCounters::add(&self.disks[log.journal_disk].counters.mark_bytes_to_storage, bytes);
                    *current = next;
                }
                // What could not be written is tried again the next time: the area knows both.
                Err(error) => log::debug!("counting on in a mark: {error}"),
            }
        }
    }

    fn is_on_storage_still(&self, log: &Log, marked: &Marked) -> io::Result<bool> {
        let Some(offset) = log.offset_of(0) else { return Ok(false) };
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        self.disks[log.journal_disk].file.read_exact_at(&mut raw, offset)?;
        Ok(raw[..] == marked.bytes[..])
    }

    pub(crate) fn write_mark_bytes(&self, log: &Log, mark: &[u8]) -> io::Result<()> {
        self.write_superblock_bytes(log, mark)?;
        let disk = &self.disks[log.journal_disk];
        DiskCounters::add(&disk.counters.journal_bytes_to_storage, mark.len() as u64);
        disk.file.sync_data()
    }

    fn write_superblock_bytes(&self, log: &Log, mark: &[u8]) -> io::Result<()> {
        let offset = log.offset_of(0).ok_or_else(|| io::Error::other("the log has no superblock on its disk"))?;
        // Only the superblock itself: the rest of its block is not ours to change.
        self.disks[log.journal_disk].file.write_all_at(mark, offset)
    }

    /// Reads home blocks that are about to be overwritten and gives them back to the area.
    pub(crate) fn restore(&self, log: &Log, blocks: &[u64]) -> io::Result<()> {
        let mut content = vec![0; log.place.block_bytes as usize];
        for block in blocks {
            self.read_home(log, *block, &mut content)?;
            self.area.restore(log.id, *block, &content).map_err(io::Error::other)?;
        }
        Ok(())
    }

    pub(crate) fn read_home(&self, log: &Log, block: u64, content: &mut [u8]) -> io::Result<()> {
        self.disks[log.home_disk].file.read_exact_at(content, log.home_offset(block))
    }

    pub(crate) fn scan_soon(&self, disk: usize) {
        self.scan_soon[disk].store(true, Ordering::Release);
    }

    pub(crate) fn take_scan_soon(&self, disk: usize) -> bool {
        self.scan_soon[disk].swap(false, Ordering::AcqRel)
    }

    /// Looks for logs anew after something on `disk` has changed.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub fn scan(&self, disk: usize) -> io::Result<()> {
        log::debug!("looking for journals on disk {}", self.disks[disk].options.name);
        // An external journal and its file system are on two disks, so all are looked at.
        self.scan_all()
    }

    fn scan_all(&self) -> io::Result<()> {
        let mut count = self.scanning.lock().expect("no panic under this lock");
        let found = scan::scan(&self.disks)?;
        let mut layouts: Vec<DiskLayout> = found.layouts;
        let known = self.logs();
        let mut kept = Vec::new();
        for place in found.logs {
            if self.disks[place.home_disk].options.read_only {
                // Nothing may ever be written home to it, not even by a later recovery: others may be reading the image,
                // and its journal may be a device of this guest, which writes there what it likes.
                if !place.is_external {
                    self.refuse_marked(&place)?;
                }
                continue;
            }
            let log = match known.iter().find(|log| log.place.is_same_log(&place)) {
                Some(log) if log.place == place => Arc::clone(log),
                Some(log) => self.move_log(log, place),
                None => {
                    let log = self.new_log(place, *count)?;
                    *count += 1;
                    log
                }
            };
            scan::add_to_layouts(&mut layouts, &log.place, log.index);
            kept.push(log);
        }
        for log in known {
            if !kept.iter().any(|other| other.index == log.index) {
                if log.is_open() && scan::is_still_there(&self.disks, &log.place)? {
                    scan::add_to_layouts(&mut layouts, &log.place, log.index);
                    scan::watch_superblock(&self.disks, &mut layouts, &log.place)?;
                    continue;
                }
                if self.area.has_host_writes_in_flight(log.id) {
                    // They must not land on what the guest writes in the place of the file system: it goes when they end.
                    scan::add_to_layouts(&mut layouts, &log.place, log.index);
                    self.scan_soon(log.home_disk);
                    continue;
                }
                if log.is_held_open() {
                    log::warn!(
                        "disk {}: the file system at byte {} was replaced while its journal owed {} blocks",
                        self.disks[log.home_disk].options.name,
                        log.place.home_start,
                        self.area.log_op_query(log.id).blocks
                    );
                }
                let Ok(_alone) = log.recovering.try_lock() else {
                    // Another device recovers it, and waits for home writes that this thread has to see the end of: it
                    // goes with the next scan.
                    scan::add_to_layouts(&mut layouts, &log.place, log.index);
                    continue;
                };
                if log.is_held_open()
                    && let Err(error) = self.spill(&log, |_, _| true)
                {
                    log::error!("writing where a journal was failed: {error}; what the guest wrote there is lost");
                }
                log.take_mark();
                log.is_open.store(false, Ordering::Release);
                self.logs.write().expect("no panic under this lock")[log.index.0] = None;
                self.area.log_op_cleanup(log.id);
                if log.remote.is_some() {
                    self.area.release(log.place.log_bytes());
                }
                // Flushes were not passed on while it was open; from now on somebody may depend on them.
                for disk in [log.home_disk, log.journal_disk] {
                    self.disks[disk].set_dirty();
                }
            }
        }
        self.note_unheld(&found.not_understood);
        self.describe()?;
        for (disk, layout) in self.disks.iter().zip(layouts) {
            if *disk.layout() != layout {
                disk.set_layout(layout);
            }
        }
        Ok(())
    }

    /// Notes, and says when the VM is prepared, on which disks no journal was found.
    fn note_unheld(&self, not_understood: &[(usize, String)]) {
        let logs = self.logs();
        for (index, disk) in self.disks.iter().enumerate() {
            let reason = if logs.iter().any(|log| log.home_disk == index) {
                None
            } else if let Some(log) = logs.iter().find(|log| log.journal_disk == index) {
                Some(format!("it is the journal of disk {}", self.disks[log.home_disk].options.name))
            } else if disk.options.read_only {
                Some("the guest can only read it".to_owned())
            } else if let Some((_, reason)) = not_understood.iter().find(|(of, _)| *of == index) {
                Some(format!("its journal is not understood: {reason}"))
            } else {
                let content = image_file::content(disk.file.for_reading()).unwrap_or("something that cannot be read");
                Some(format!("no journal of an ext3 or ext4 file system was found on it; it begins with {content}"))
            };
            let is_said = disk.set_unheld(reason.clone());
            if let Some(reason) = reason.filter(|_| is_said) {
                // A guest can change its disk as often as it likes: said once, when it is attached.
                let level = if disk.was_started() { log::Level::Debug } else { log::Level::Info };
                log::log!(level, "disk {}: nothing of it is held: {reason}", disk.options.name);
            }
        }
    }

    /// The same log, whose file system has another size or UUID now: it may be mounted, and goes on.
    fn move_log(&self, log: &Log, place: FoundLogPlace) -> Arc<Log> {
        log::info!(
            "disk {}: the file system at byte {} can have {} blocks now, it could have {}",
            self.disks[log.home_disk].options.name,
            place.home_start,
            place.home_blocks,
            log.place.home_blocks
        );
        self.area.resize_home(log.id, place.home_blocks);
        let moved = Arc::new(Log { place, ..log.clone() });
        self.logs.write().expect("no panic under this lock")[log.index.0] = Some(Arc::clone(&moved));
        moved
    }

    fn new_log(&self, place: FoundLogPlace, number: u64) -> io::Result<Arc<Log>> {
        let placement = match self.disks[place.home_disk].options.placement {
            // Two devices have two threads; a journal on NVM is taken by the one with the homes.
            PlacementKind::Nvm if place.is_external => PlacementKind::Storage,
            placement => placement,
        };
        self.refuse_marked(&place)?;
        let remote = match &self.disks[place.home_disk].options.remote {
            Some(_) if placement == PlacementKind::Remote && !self.area.reserve(place.log_bytes()) => {
                log::warn!(
                    "disk {}: a copy of the journal's {} MiB does not fit into the memory budget (--memory-budget); it stays \
                     in its own place on storage",
                    self.disks[place.home_disk].options.name,
                    place.log_bytes() >> 20
                );
                None
            }
            Some(options) if placement == PlacementKind::Remote => {
                let disk_of = |index: usize| Arc::clone(&self.disks[index]);
                let (home, journal) = (disk_of(place.home_disk), disk_of(place.journal_disk));
                Some(Arc::new(RemoteLog::new(options, place.clone(), home, journal)?))
            }
            _ => None,
        };
        let shape =
            LogShape { block_bytes: place.block_bytes, log_blocks: place.log_blocks, home_blocks: place.home_blocks };
        let holding = if placement == PlacementKind::Retain { Holding::Retain } else { Holding::Copy };
        let id = self
            .area
            .log_op_init(self.directory.path(), &format!("log-{number}"), shape, holding, place.own_blocks.clone())
            .map_err(io::Error::other)?;
        let mut logs = self.logs.write().expect("no panic under this lock");
        let log = Arc::new(Log {
            id,
            placement,
            remote,
            index: LogIndex(logs.len()),
            home_disk: place.home_disk,
            journal_disk: place.journal_disk,
            place,
            is_open: Arc::default(),
            was_opened: Arc::default(),
            is_emptying: Arc::default(),
            is_foreign: Arc::default(),
            emptied: Arc::default(),
            failed_to_empty: Arc::default(),
            is_distrusted: Arc::default(),
            has_failed_to_leave: Arc::default(),
            wanted: Arc::new(Mutex::new(placement)),
            storage_from: None,
            mark: Arc::default(),
            recovery: Arc::default(),
            recovering: Arc::default(),
        });
        logs.push(Some(Arc::clone(&log)));
        log::info!(
            "disk {}: found the {} journal of the file system at byte {} ({} blocks of {} bytes), placement {}",
            self.disks[log.home_disk].options.name,
            if log.place.is_external { "external" } else { "internal" },
            log.place.home_start,
            log.place.log_blocks,
            log.place.block_bytes,
            placement.name()
        );
        Ok(log)
    }

    /// A log whose live part is on a journal server is not to be taken for an empty one.
    fn refuse_marked(&self, place: &FoundLogPlace) -> io::Result<()> {
        let Some(offset) = offset_of(&place.runs, place.block_bytes, 0) else { return Ok(()) };
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        self.disks[place.journal_disk].file.read_exact_at(&mut raw, offset)?;
        let path = self.disks[place.home_disk].options.path.display();
        match Stored::read(&raw).says {
            Says::Remote(mark) => Err(io::Error::other(format!(
                "the journal of {path} is on a journal server (epoch {}): run 'amberlog recover --disk IMAGE --remote \
                 HOST:PORT/NAME' first, or give the disk placement=remote=HOST:PORT/NAME",
                mark.epoch
            ))),
            Says::Damaged => Err(io::Error::other(format!(
                "the journal superblock of {path} has a damaged mark of a journal server: its live log may be there, and \
                 whether cannot be told; run e2fsck -fy to give the log up"
            ))),
            Says::Stale => {
                log::warn!(
                    "{path}: its journal was on a journal server, but the file system was used or repaired since by \
                     something that does not know of that; what the server has is stale"
                );
                Ok(())
            }
            // What was held was looked for before. The guest's kernel will say that an error happened, and has to look at the
            // whole file system.
            Says::Held(_) | Says::Dropped(_) => {
                log::warn!(
                    "{path}: the journal of the file system at byte {} carries amberlog's mark, and nothing holds its \
                     transactions any more: the host has lost power or was started anew, or placement=discard dropped them; \
                     what was committed last is lost, and the guest should check the whole file system (e2fsck -f) before it \
                     uses it",
                    place.home_start
                );
                Ok(())
            }
            Says::NoJournal(_) | Says::Empty | Says::Live(_) | Says::Error => Ok(()),
        }
    }

    /// Writes down, beside the tables, what a later process needs to finish a recovery.
    pub(crate) fn describe(&self) -> io::Result<()> {
        let pages = self.memory.page_count();
        let logs = self
            .logs()
            .iter()
            .filter(|log| log.placement.is_held())
            .map(|log| {
                let path = |disk: usize| self.disks[disk].options.path.clone();
                let (home, journal) = (path(log.home_disk), path(log.journal_disk));
                LogDescription::new(self.area.name_of(log.id), home, journal, log.place.clone())
            })
            .collect();
        self.directory.describe(&self.memory.files(), logs)?;
        self.described_pages.store(pages, Ordering::Release);
        Ok(())
    }

    /// To be called before pages are retained: the guest may have been given more memory since the last description, and
    /// a later process has to find the pages.
    pub(crate) fn describe_new_memory(&self) {
        if self.memory.page_count() == self.described_pages.load(Ordering::Acquire) {
            return;
        }
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        if let Err(error) = self.describe() {
            self.memory.refuse_protection(format!("the guest's memory files cannot be written down: {error}"));
        }
    }

    /// A driver goes on that did not begin in this process: after a live migration to here, a restored snapshot, or the end
    /// of the amberlog that served it. What its journal holds is then not here, and what it commits next could not be
    /// recovered (rule 1 of ARCHITECTURE.md).
    pub(crate) fn check_resumed(&self, disk: usize) -> io::Result<()> {
        let is_on_storage = |log: &Log| matches!(log.placement, PlacementKind::Storage | PlacementKind::Discard);
        let mut logs = self.logs().into_iter().filter(|log| log.home_disk == disk || log.journal_disk == disk);
        if self.disks[disk].was_started() || logs.all(|log| is_on_storage(&log)) {
            return Ok(());
        }
        Err(io::Error::other(
            "its guest was started under another amberlog, and what its journal holds is not here: reset the VM; before \
             a migration or a snapshot of a running guest, start it with placement=storage",
        ))
    }

    /// Finishes every open log that has its home or itself on this disk: whoever wrote it is gone.
    ///
    /// # Errors
    /// When what is owed cannot be written: the logs that failed are as they were.
    pub fn recover_disk(&self, disk: usize) -> io::Result<()> {
        for log in self.logs() {
            if log.home_disk == disk || log.journal_disk == disk {
                self.recover_log(&log, false)?;
            }
        }
        Ok(())
    }

    /// Finishes every open log of a VM whose process is gone, those on storage too: no kernel comes to replay them.
    ///
    /// # Errors
    /// The first failure; the other logs are still tried.
    pub fn recover_all(&self) -> io::Result<()> {
        let mut result = Ok(());
        for log in self.logs() {
            if let Err(error) = self.recover_log(&log, true) {
                log::error!(
                    "recovering the file system at byte {} of disk {} failed: {error}",
                    log.place.home_start,
                    self.disks[log.home_disk].options.name
                );
                result = result.and(Err(error));
            }
        }
        result
    }

    fn recover_log(&self, log: &Log, is_vm_gone: bool) -> io::Result<()> {
        let _alone = log.recovering.lock().expect("no panic under this lock");
        // It may have been handed over while this waited.
        let Some(log) = self.log(log.index) else { return Ok(()) };
        let log = &*log;
        log.take_mark();
        let journal = &self.disks[log.journal_disk].file;
        let home = &self.disks[log.home_disk].file;
        if log.placement == PlacementKind::Nvm
            && let Some(nvm) = &self.disks[log.home_disk].options.nvm
            && let Some(report) = nvm.recover(log.index, home).map_err(io::Error::other)?
        {
            log.is_open.store(false, Ordering::Release);
            self.recovered(log, report);
            if is_vm_gone && self.is_live_on_storage(log)? {
                // It was about to leave the region, which owed nothing any more.
                let report = crate::finish::finish_stored(&log.place, home, journal).map_err(io::Error::other)?;
                self.recovered(log, report);
            }
            return Ok(());
        }
        if let Some(remote) = &log.remote {
            // Storage has the whole log then, for the guest's next kernel or for us.
            remote.settle()?;
        }
        if log.is_distrusted() && !log.placement.is_held() {
            self.leave_to_guest(log, is_vm_gone);
            return Ok(());
        }
        if !log.is_open() {
            if is_vm_gone && self.is_mounted_with_empty_log(log)? {
                // Mounted, and died before its first commit: nothing to replay, but the flag says so.
                let report = crate::finish::finish_stored(&log.place, home, journal).map_err(io::Error::other)?;
                self.recovered(log, report);
            }
            return Ok(());
        }
        if !log.placement.is_held() {
            log.is_open.store(false, Ordering::Release);
            if matches!(log.placement, PlacementKind::Storage | PlacementKind::Nvm | PlacementKind::Remote)
                && is_vm_gone
            {
                let report = crate::finish::finish_stored(&log.place, home, journal).map_err(io::Error::other)?;
                self.recovered(log, report);
            }
            if log.placement == PlacementKind::Discard {
                // Never silent: the mark on storage stays as well, until e2fsck has looked.
                let note = "the journal was dropped (placement discard), and the file system was in use: run e2fsck";
                log::warn!("disk {}: {note}", self.disks[log.home_disk].options.name);
                *log.recovery.lock().expect("no panic under this lock") =
                    Some(Report::of(Status::Damaged).with_note(note));
            }
            return Ok(());
        }
        self.wait_for_home_writes(log)?;
        if let Some(why) = self.area.contradiction(log.id) {
            self.say_distrusted(log, &why);
        }
        let owed = self.area.log_op_query(log.id);
        let mut report = self
            .area
            .log_op_recover(log.id, |held| crate::finish::finish(held, &log.place, home, journal))
            .map_err(io::Error::other)?;
        if !owed.materialise && report.blocks_written != owed.blocks + owed.stored_blocks {
            // The pair to what was counted when the blocks were retained. What was written is what the log itself says, which
            // recovery trusts more than the books; one of the two is wrong all the same.
            let sentence = format!(
                "recovery wrote {} blocks of the file system at byte {} where {} were owed: run e2fsck -f",
                report.blocks_written,
                log.place.home_start,
                owed.blocks + owed.stored_blocks
            );
            log::error!("disk {}: {sentence}", self.disks[log.home_disk].options.name);
            self.disks[log.home_disk].note_fault(&sentence);
            report.status = Status::Damaged;
            report.notes.push(sentence);
        }
        log.is_open.store(false, Ordering::Release);
        if log.is_distrusted() {
            // It stays on storage for the guest's next kernel, too.
            let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
            self.put(log, PlacementKind::Storage, None);
        }
        self.recovered(log, report);
        Ok(())
    }

    /// Whether a file system says that it needs recovery while its journal on storage is empty and without an error.
    fn is_mounted_with_empty_log(&self, log: &Log) -> io::Result<bool> {
        let mut raw = [0; extfs::SUPERBLOCK_BYTES];
        let home = &self.disks[log.home_disk].file;
        home.read_exact_at(&mut raw, log.place.home_start + extfs::SUPERBLOCK_OFFSET)?;
        if !extfs::Superblock::parse(&raw).is_ok_and(|superblock| superblock.needs_recovery()) {
            return Ok(false);
        }
        Ok(matches!(self.stored(log)?.live_from(), Ok(None)))
    }

    /// Whether the log in its own place on storage has something to replay, as far as its superblock says.
    fn is_live_on_storage(&self, log: &Log) -> io::Result<bool> {
        Ok(matches!(self.stored(log)?.says, Says::Live(_)))
    }

    /// What the journal superblock on storage says of a log.
    pub(crate) fn stored(&self, log: &Log) -> io::Result<Stored> {
        let offset = log.offset_of(0).ok_or_else(|| io::Error::other("the log has no superblock on its disk"))?;
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        self.disks[log.journal_disk].file.read_exact_at(&mut raw, offset)?;
        Ok(Stored::read(&raw))
    }

    /// The device with the log may start anew while another with its home still works; what it has on its way has to
    /// land before recovery writes to the same blocks (rule 3 of ARCHITECTURE.md).
    fn wait_for_home_writes(&self, log: &Log) -> io::Result<()> {
        let deadline = Instant::now() + HOME_WRITES_PATIENCE;
        while self.area.has_home_writes_in_flight(log.id) {
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "home writes of disk {} have not ended in {} s; recovery cannot begin before they have",
                        self.disks[log.home_disk].options.name,
                        HOME_WRITES_PATIENCE.as_secs()
                    ),
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn recovered(&self, log: &Log, report: Report) {
        self.disks[log.home_disk].set_dirty();
        DiskCounters::add(&self.disks[log.home_disk].counters.home_bytes_to_storage, report.bytes_written);
        log::info!(
            "disk {}: {} in {:.3} s",
            self.disks[log.home_disk].options.name,
            what_was_done(log.place.home_start, &report),
            report.seconds
        );
        let mut last = log.recovery.lock().expect("no panic under this lock");
        *last = Some(report);
    }

    /// Gives all guest memory but the retained pages back to the host; for a VM whose process is gone.
    pub fn give_back_memory(&self) {
        match self.memory.give_back_all_but_retained() {
            Ok(bytes) if bytes < 1 << 20 => {}
            Ok(bytes) => log::info!("gave {} MiB of the guest's memory back to the host", bytes >> 20),
            Err(error) => log::warn!("{error}"),
        }
    }

    /// The last recovery of each log on a disk.
    pub fn recoveries(&self, disk: usize) -> Vec<Report> {
        self.logs_at_home(disk)
            .iter()
            .filter_map(|log| log.recovery.lock().expect("no panic under this lock").clone())
            .collect()
    }

    /// The VM's directory in tmpfs.
    pub fn directory(&self) -> &AreaDirectory {
        &self.directory
    }
}
