//! All journals of one VM: which logs its disks carry, where each lives, what has to happen when one opens or closes.
//!
//! Rule 4 of ARCHITECTURE.md is kept by what is called from here: before the first transaction of an opened log can complete, the
//! journal superblock *on storage* says that the log is empty and that an error happened ([`crate::opening`]); after a host
//! power loss the file system is then checked in full instead of trusting an empty log. A clean close and a recovery
//! take the mark away, after everything that it stood for is on storage.

use crate::aged;
use crate::attached::{DiskOptions, Places};
use crate::description::{AreaDirectory, LogDescription, PIECES_DESCRIBED_MAX, WishDescription};
use crate::disk::{Disk, DiskCounters, PlacementKind};
use crate::keeper::ToSettle;
use crate::keeper::{Finished, Keeper, Side, Step, Steps, SuperblockBlock, SuperblockWritten};
use crate::keepers::{Shipped, keeper_of};
use crate::kept_log::KeptLog;
use crate::layout::DiskLayout;
use crate::left::{Left, ToMark};
use crate::left_copy::LeftCopy;
use crate::left_to_guest;
use crate::log::{Log, LogState};
use crate::nvm::NvmDisk;
use crate::opening;
use crate::remote::RemoteLog;
use crate::remote::RemoteOptions;
use crate::scan::{self, FoundLogPlace, LeftAlone};
use crate::stored::{Says, Stored};
use block_route::LogIndex;
use guest_memory::VmMemory;
use jbd2::Superblock;
use journal_area::{Doubt, Holding, JournalArea, LogShape};
use recovery::{Report, Status};
use remote_journal::message::NAME_BYTES_MAX;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use tracing_mutex::stdsync::{Mutex, RwLock};

/// A disk may be this small a part something else than file systems with held logs (partition tables, an EFI partition)
/// and its guest is still told of no write cache.
const PLAIN_SHARE_MAX: u64 = 16;

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

/// The logs that are there, by their indices. An index is not used again, since a request can be under way that names a log which was
/// forgotten; and a guest can have as many forgotten as it likes.
#[derive(Debug, Default)]
struct Logs {
    there: BTreeMap<usize, Arc<KeptLog>>,
    next: usize,
}

/// A step that another disk's thread has passed on, and whose log it concerns.
pub(crate) type PassedOn = (Arc<KeptLog>, Side, Step);

/// The journals of one VM.
pub struct Journals {
    /// The area that holds them.
    pub area: Arc<JournalArea>,
    pub(crate) memory: Arc<VmMemory>,
    directory: AreaDirectory,
    disks: Vec<Arc<Disk>>,
    /// Each disk's regions of NVM, and its journal server, if it has one.
    places: Vec<Places>,
    /// Steps of keepers that each disk's thread is to carry out.
    passed_on: Vec<Mutex<Vec<PassedOn>>>,
    logs: RwLock<Logs>,
    /// One scan at a time: a scan looks at all disks. Whoever puts a log in the place of another holds it, too.
    ///
    /// A scan reads storage under it. While guests run, nobody writes a log to storage under it: a disk that does not answer would hold up the threads
    /// of all others. Who does that (a hand-over, a log that is distrusted, a recovery) has that log's `recovering`, and takes this for the switch,
    /// in that order; who has this only tries `recovering`. What counts on the log until the switch, and why it may:
    ///
    /// * It stays open: its guest closes it in the thread that hands it over, and otherwise a recovery does, which has `recovering`.
    /// * It is not forgotten: a scan that does not find it tries `recovering`, and leaves it to the next scan.
    /// * Nobody else changes who holds it, or the note of a hand-over in its table: [`Journals::change_placement`] tries `recovering`.
    /// * A scan may find that its file system has grown, and exchanges the log for one that says so. Who has taken it goes by what it was then, as one
    ///   would that began just before the scan; who switches asks for the log as it is by now ([`Journals::put_taken`]).
    /// * A scan may read homes in the midst of being written, as it may while the guest writes them: a log that is open and was not found is kept
    ///   where it is.
    /// * Descriptions say that it is held, and which files of memory there are. So it is until the switch: what it has in the guest's pages stays there
    ///   as long as it is taken, and a process that follows sees in the table and on storage how far it has come (`crate::found`, `crate::resume`).
    pub(crate) scanning: Mutex<u64>,
    scan_soon: Vec<AtomicBool>,
    /// Guest pages that the description knows the files of.
    described_pages: AtomicU32,
    tracer: Option<Tracer>,
    /// Memory may be gone soon: a journal that is found from now on is not held there.
    is_memory_doubtful: AtomicBool,
    /// What an earlier worker has left of them, while another one takes it up ([`Journals::resume`]).
    pub(crate) left: Mutex<Left>,
    /// What storage is to say of logs that were taken up so, as soon as nothing can go wrong any more.
    pub(crate) to_mark: Mutex<Vec<ToMark>>,
    /// Where something may have been written into the places of logs to take them up, superblocks aside: on which disk, in bytes.
    pub(crate) written_to_go_on: Mutex<Vec<(usize, Range<u64>)>>,
    /// Logs that are not there any more, and are described still.
    forgotten: Mutex<Vec<journal_area::LogId>>,
    /// The same of logs that were in a region of NVM.
    pub(crate) to_settle: Mutex<Vec<ToSettle>>,
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
        let journals = Self::set_up(memory, directory, options)?;
        if let Err(error) = journals.scan_all().and_then(|()| journals.check_durable_within()) {
            journals.directory.remove();
            return Err(error);
        }
        Ok(journals)
    }

    /// The same for a VM whose images are somebody else's by now: nothing is looked for on them before [`Journals::arrive`] or
    /// [`Journals::look_again`].
    ///
    /// # Errors
    /// When an image cannot be opened, or the directory not written.
    pub fn awaiting(
        memory: &Arc<VmMemory>,
        directory: AreaDirectory,
        options: JournalsOptions,
    ) -> io::Result<Arc<Self>> {
        let journals = Self::set_up(memory, directory, options)?;
        journals.disks().iter().for_each(|disk| disk.set_awaited());
        journals.describe()?;
        Ok(journals)
    }

    pub(crate) fn set_up(
        memory: &Arc<VmMemory>,
        directory: AreaDirectory,
        options: JournalsOptions,
    ) -> io::Result<Arc<Self>> {
        let (mut disks, mut places) = (Vec::new(), Vec::new());
        for disk in options.disks {
            let path = disk.path.clone();
            let (settings, places_of) = disk.parts();
            places.push(places_of);
            let disk = Disk::open(settings).map_err(|e| {
                // Of a VM that is there already, it is kept.
                if !directory.is_adopted() {
                    directory.remove();
                }
                io::Error::new(e.kind(), format!("opening {}: {e}", path.display()))
            })?;
            disks.push(Arc::new(disk));
        }
        for nvm in places.iter().filter_map(|places| places.nvm.as_ref()) {
            nvm.note_in(directory.directory_again().map_err(io::Error::other)?);
        }
        directory.name_disks(disks.iter().map(|disk| disk.options.name.clone()).collect());
        let area = JournalArea::new(memory, options.budget_bytes);
        let waking: Vec<Arc<Disk>> = disks.iter().map(Arc::clone).collect();
        area.set_waker(Box::new(move || waking.iter().for_each(|disk| disk.wake.wake())));
        let journals = Arc::new(Journals {
            area,
            memory: Arc::clone(memory),
            directory,
            scan_soon: disks.iter().map(|_| AtomicBool::new(false)).collect(),
            passed_on: disks.iter().map(|_| Mutex::default()).collect(),
            disks,
            places,
            logs: RwLock::default(),
            scanning: Mutex::new(0),
            described_pages: AtomicU32::new(0),
            tracer: options.tracer,
            is_memory_doubtful: AtomicBool::new(false),
            left: Mutex::default(),
            to_mark: Mutex::default(),
            written_to_go_on: Mutex::default(),
            forgotten: Mutex::default(),
            to_settle: Mutex::default(),
        });
        for (index, disk) in journals.disks.iter().enumerate() {
            let journals = Arc::downgrade(&journals);
            disk.file.on_failed_flush(move || {
                if let Some(journals) = journals.upgrade() {
                    journals.note_doubts(index, |doubt| {
                        (doubt.is_doubted, doubt.is_untold, doubt.flush_failed) = (true, true, true);
                    });
                }
            });
        }
        Ok(journals)
    }

    /// Changes what the tables of the logs of a disk say of storage that has failed: another process may have to go on from them.
    pub(crate) fn note_doubts(&self, disk: usize, change: impl Fn(&mut Doubt)) {
        for log in self.logs_at_home(disk) {
            self.area.note_doubt(log.id, &change);
        }
    }

    /// What durability by age left before a loss of power is replayed: a guest's kernel that did so would be taken for somebody who
    /// brings a log, which then stays on storage. For a disk whose guest begins; what was held is recovered.
    pub(crate) fn replay_aged(&self, disk: usize) -> io::Result<()> {
        for log in self.logs_at_home(disk) {
            if !log.is_open() && matches!(log.stored()?.says, Says::Aged(..)) {
                let report = crate::finish::finish_stored(&log.place, &log.home.file, &log.journal.file);
                let report = report.map_err(io::Error::other)?;
                let path = log.home.options.path.display();
                log::info!("{path}: {}, after a loss of power", what_was_done(log.place.home_start, &report));
            }
        }
        Ok(())
    }

    /// What was asked for and cannot be is refused at the beginning; what a guest brings later is not made durable by age, and that is
    /// said.
    pub(crate) fn check_durable_within(&self) -> io::Result<()> {
        let logs = self.logs();
        let external = logs.iter().find(|log| log.place.is_external && log.home.durable_within().is_some());
        external.map_or(Ok(()), |log| Err(io::Error::other(log.why_external_is_not_aged())))
    }

    /// In how long a keeper of a file system on this disk is to be woken. This, [`Journals::wake_due`] and [`Journals::tick`] may wait for that
    /// disk, and for where its journals are: each disk has somebody of its own who calls them, so that one that does not answer holds
    /// up no other's clock.
    pub fn due_in(&self, disk: usize) -> Option<Duration> {
        self.logs_of_home(disk).filter_map(|log| log.keeper.due_in(&log)).min()
    }

    /// Wakes keepers of file systems on this disk whose time has come.
    pub fn wake_due(&self, disk: usize) {
        for log in self.logs_of_home(disk) {
            if log.keeper.due_in(&log).is_some_and(|left| left.is_zero()) {
                log.home.wake.wake();
            }
        }
    }

    fn logs_of_home(&self, disk: usize) -> impl Iterator<Item = Arc<KeptLog>> {
        self.logs().into_iter().filter(move |log| log.home_disk == disk)
    }

    /// Whether the guest has to flush a disk of `size_bytes`: it need not where the file systems with held logs are, as of
    /// now, practically all of it. What is written elsewhere, or while a log is closed, is then flushed write by write;
    /// so this only decides what is fast, not what is safe.
    pub fn needs_flushes(&self, index: usize, size_bytes: u64) -> bool {
        let disk = &self.disks[index];
        let layout = disk.layout();
        let logs = layout.homes.iter().map(|home| home.log).chain(layout.logs.iter().map(|range| range.log));
        let all_held = logs.filter_map(|log| self.log(log)).all(|log| log.keeper.needs_no_flushes());
        disk.options.honour_flush
            || layout.is_plain()
            || !all_held
            || layout.plain_bytes(size_bytes) > size_bytes / PLAIN_SHARE_MAX
    }

    /// The disk with this index.
    pub fn disk(&self, index: usize) -> &Disk {
        &self.disks[index]
    }

    /// A disk's regions of NVM, if it has some.
    pub fn region(&self, disk: usize) -> Option<&Arc<NvmDisk>> {
        self.places[disk].nvm.as_ref()
    }

    /// A disk's journal server, if it has one.
    pub(crate) fn server(&self, disk: usize) -> Option<&RemoteOptions> {
        self.places[disk].remote.as_ref()
    }

    /// All disks.
    pub fn disks(&self) -> &[Arc<Disk>] {
        &self.disks
    }

    /// The log with this index, if it still is one.
    pub fn log(&self, index: LogIndex) -> Option<Arc<KeptLog>> {
        self.logs.read().expect("no panic under this lock").there.get(&index.0).cloned()
    }

    /// All logs there are.
    pub fn logs(&self) -> Vec<Arc<KeptLog>> {
        self.logs.read().expect("no panic under this lock").there.values().cloned().collect()
    }

    /// From now on this is the log with its index.
    pub(crate) fn replace_log(&self, log: Arc<KeptLog>) {
        self.logs.write().expect("no panic under this lock").there.insert(log.index.0, log);
    }

    /// From now on there is none with this index.
    pub(crate) fn remove_log(&self, index: LogIndex) {
        self.logs.write().expect("no panic under this lock").there.remove(&index.0);
    }

    pub(crate) fn logs_at_home(&self, disk: usize) -> Vec<Arc<KeptLog>> {
        self.logs().into_iter().filter(|log| log.home_disk == disk).collect()
    }

    /// Logs that lie on a disk.
    pub(crate) fn logs_lying_on(&self, disk: usize) -> Vec<Arc<KeptLog>> {
        self.logs().into_iter().filter(|log| log.journal_disk == disk).collect()
    }

    pub(crate) fn trace(&self, disk: usize, kind: TraceKind, offset: u64, len: u64) {
        if let Some(tracer) = &self.tracer {
            tracer(disk, kind, offset, len);
        }
    }

    /// The guest writes a log's superblock. Gives the log as it is from now on, whose keeper wants the steps, and says whether the
    /// write goes to storage as it is.
    pub(crate) fn superblock_written(
        &self,
        log: &Arc<KeptLog>,
        superblock: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> (Arc<KeptLog>, io::Result<bool>) {
        let opening = log.state.opening.lock().expect("no panic under this lock");
        // It may have gone elsewhere until a moment ago.
        let current = self.log(log.index).unwrap_or_else(|| Arc::clone(log));
        if !current.is_open() {
            current.note_announcing();
        }
        let might_go_on = current.may_go_on_unannounced();
        let taken = self.give_superblock(&current, superblock, steps);
        drop(opening);
        if might_go_on && !current.may_go_on_unannounced() {
            // What is written down says so still. Once after a reset.
            let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
            if let Err(error) = self.describe() {
                log::debug!("writing down that a journal was announced: {error}");
            }
        }
        let taken = taken.map(|(what, passes)| {
            if matches!(what, SuperblockWritten::Closed | SuperblockWritten::NoLog) {
                self.follow_wish(&current);
            }
            passes
        });
        (current, taken)
    }

    fn give_superblock(
        &self,
        log: &KeptLog,
        superblock: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        let block = superblock.content;
        let (what, passes) = log.keeper.superblock(log, superblock, steps)?;
        match what {
            SuperblockWritten::Opened => {
                log.set_open();
                log.is_announced();
                self.area.forget_recovering(log.id);
                if !passes {
                    log.set_brought(false);
                    log::info!(
                        "disk {}: the journal of the file system at byte {} is open from transaction {} on, placement {}",
                        log.home.options.name,
                        log.place.home_start,
                        Superblock::decode(block).map_or(0, |superblock| superblock.sequence),
                        log.placement.name()
                    );
                }
            }
            SuperblockWritten::GoesOn => {}
            SuperblockWritten::Brought => log.set_brought(true),
            SuperblockWritten::Closed | SuperblockWritten::NoLog => {
                log.set_closed();
                log.set_brought(false);
                log.is_announced();
                self.area.forget_recovering(log.id);
                if what == SuperblockWritten::NoLog {
                    self.scan_soon(log.journal_disk);
                    log.journal.wake.wake();
                }
            }
        }
        Ok((what, passes))
    }

    /// Of the file systems on this disk, counts on in the marks of logs whose disks were written to since the last time, wakes keepers whose
    /// time has come, and lets memory go that was kept for copies. To be called every second or so while a guest runs.
    pub fn tick(&self, disk: usize) {
        for log in self.logs_of_home(disk) {
            self.area.rest(log.id);
            opening::count_on(&log, &self.area);
        }
        self.wake_due(disk);
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

    pub(crate) fn scan_all(&self) -> io::Result<()> {
        let mut count = self.scanning.lock().expect("no panic under this lock");
        let found = scan::scan(&self.disks)?;
        let mut layouts: Vec<DiskLayout> = found.layouts;
        let known = self.logs();
        let go_on = self.left_alone_that_go_on(&known, &found.left_alone);
        let is_among = |places: &[FoundLogPlace], log: &Log| places.iter().any(|place| log.place.is_same_log(place));
        let logs = self.without_hidden(&known, &go_on, found.logs)?;
        for left in &found.left_alone {
            // One that is marked is somewhere else, whoever it is of.
            let goes_on = go_on.iter().any(|place| place.shares_blocks_with(&left.place));
            if !goes_on && !self.disks[left.place.home_disk].is_in_use() {
                self.refuse_marked(&left.place)?;
            }
        }
        let mut not_understood = found.not_understood;
        let mut kept = Vec::new();
        for place in logs.into_iter().chain(go_on.iter().cloned()) {
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
                    if let Some(reason) = self.why_not_described(&place)? {
                        not_understood.push((place.home_disk, reason));
                        continue;
                    }
                    let Some(log) = self.new_log(place, *count)? else { continue };
                    *count += 1;
                    log
                }
            };
            log.set_contested(is_among(&go_on, &log));
            scan::add_to_layouts(&mut layouts, &log.place, log.index);
            kept.push(log);
        }
        for place in self.left_without_entry()? {
            if let Some(log) = self.new_log(place, *count)? {
                *count += 1;
                scan::add_to_layouts(&mut layouts, &log.place, log.index);
                scan::watch_superblock(&self.disks, &mut layouts, &log.place)?;
            }
        }
        for log in known {
            if !kept.iter().any(|other| other.index == log.index) {
                if log.is_open() && scan::is_still_there(&self.disks, &log.place)? {
                    scan::add_to_layouts(&mut layouts, &log.place, log.index);
                    scan::watch_superblock(&self.disks, &mut layouts, &log.place)?;
                    continue;
                }
                if self.area.has_host_writes_in_flight(log.id) || log.has_own_writes() || log.keeper.has_own_in_flight()
                {
                    self.keep_until_its_writes_end(&log, &mut layouts);
                    continue;
                }
                let Ok(_alone) = log.state.recovering.try_lock() else {
                    // Another device recovers it, and waits for home writes that this thread has to see the end of: it
                    // goes with the next scan.
                    scan::add_to_layouts(&mut layouts, &log.place, log.index);
                    continue;
                };
                if !self.forget_log(&log) {
                    // The thread of its disk was faster.
                    self.keep_until_its_writes_end(&log, &mut layouts);
                }
            }
        }
        self.note_unheld(&not_understood);
        self.describe()?;
        let forgotten = std::mem::take(&mut *self.forgotten.lock().expect("no panic under this lock"));
        forgotten.into_iter().for_each(|id| self.area.forget_log(id));
        for (disk, layout) in self.disks.iter().zip(layouts) {
            if *disk.layout() != layout {
                disk.set_layout(layout);
            }
        }
        Ok(())
    }

    /// Why a log that was found is left alone, though it is understood; nothing where it is not. Where its pieces are is written down with
    /// those of all the others, in a description that whoever comes next has to be able to read. What an earlier worker has left is
    /// described already.
    fn why_not_described(&self, place: &FoundLogPlace) -> io::Result<Option<String>> {
        let pieces: usize = self.logs().iter().map(|log| log.place.pieces_described()).sum();
        if pieces + place.pieces_described() <= PIECES_DESCRIBED_MAX
            || self.was_left(place)
            || self.was_left_in_region(place)?
        {
            return Ok(None);
        }
        let disk = &self.disks[place.home_disk];
        if !disk.is_in_use() {
            // One that is marked is somewhere else.
            self.refuse_marked(place)?;
        }
        let reason = format!(
            "it and the other journals of its VM are in more than {PIECES_DESCRIBED_MAX} pieces together, so that where they are cannot be \
             written down"
        );
        // A guest can change its disk as often as it likes.
        let level = if disk.was_started() { log::Level::Debug } else { log::Level::Warn };
        log::log!(
            level,
            "disk {}: the journal of the file system at byte {} is left alone: {reason}",
            disk.options.name,
            place.home_start
        );
        Ok(Some(reason))
    }

    /// Those of the logs found that no open log lies over. One that is open, and was not found, and is where it was, may be one whose kernel
    /// has given it up and left it so: another file system was made in its place since, at another offset. Or it is mounted, and what was found
    /// lies in a file of its. Until it is closed, all that is written there goes to storage: the open log is left to its guest, and what lies below it is
    /// not held.
    fn without_hidden(
        &self,
        known: &[Arc<KeptLog>],
        go_on: &[FoundLogPlace],
        found: Vec<FoundLogPlace>,
    ) -> io::Result<Vec<FoundLogPlace>> {
        let mut hiding = Vec::new();
        for log in known.iter().filter(|log| log.is_open()) {
            let is_found = found.iter().chain(go_on).any(|place| log.place.is_same_log(place));
            if !is_found && scan::is_still_there(&self.disks, &log.place)? {
                hiding.push(log);
            }
        }
        let is_writable = |place: &FoundLogPlace| !self.disks[place.home_disk].options.read_only;
        let hides = |log: &Log, place: &FoundLogPlace| is_writable(place) && log.place.shares_blocks_with(place);
        for log in &hiding {
            let Some(hidden) = found.iter().find(|place| hides(log, place)) else { continue };
            if log.is_distrusted() {
                continue;
            }
            let why = format!(
                "it is open, and the disk has another file system in its place, at byte {} of disk {}",
                hidden.home_start, self.disks[hidden.home_disk].options.name
            );
            let mut steps = Steps::default();
            log.keeper.doubt(log, why, &mut steps);
            self.pass_on(log, steps);
        }
        Ok(found.into_iter().filter(|place| !hiding.iter().any(|log| hides(log, place))).collect())
    }

    fn pass_on(&self, log: &Arc<KeptLog>, steps: Steps) {
        for (side, step) in steps.0 {
            let disk = if side == Side::Home { log.home_disk } else { log.journal_disk };
            self.pass_on_to(disk, (Arc::clone(log), side, step));
        }
    }

    /// Has a disk's thread carry out a step.
    pub(crate) fn pass_on_to(&self, disk: usize, step: PassedOn) {
        self.passed_on[disk].lock().expect("no panic under this lock").push(step);
        self.disk(disk).wake.wake();
    }

    /// Steps that this disk's thread is to carry out.
    pub(crate) fn take_passed_on(&self, disk: usize) -> Vec<PassedOn> {
        std::mem::take(&mut *self.passed_on[disk].lock().expect("no panic under this lock"))
    }

    /// Of logs that are left alone, those that go on until their guests close them: somebody has one open, or may go on with it without a word or
    /// where it was handed over to, or an earlier worker had. No two of them share a block.
    fn left_alone_that_go_on(&self, known: &[Arc<KeptLog>], left_alone: &[LeftAlone]) -> Vec<FoundLogPlace> {
        let is_known = |place: &FoundLogPlace| {
            let may_go_on = |log: &&Arc<KeptLog>| log.is_open() || log.may_go_on_unannounced() || log.was_handed_over();
            known.iter().filter(may_go_on).any(|log| log.place.is_same_log(place))
        };
        let places = || left_alone.iter().map(|left| &left.place);
        let held = places().filter(|place| self.was_left_held(place));
        let left = places().filter(|place| self.was_left(place));
        let mut go_on: Vec<FoundLogPlace> = Vec::new();
        for place in places().filter(|place| is_known(place)).chain(held).chain(left) {
            if !go_on.iter().any(|other| other.shares_blocks_with(place)) {
                go_on.push(place.clone());
            }
        }
        go_on
    }

    /// A log is not there any more. False if its keeper has something to do with it still, or another disk's thread is amid a write of
    /// its superblock, which reads the log and writes into its place.
    pub(crate) fn forget_log(&self, log: &Arc<KeptLog>) -> bool {
        let Ok(_nobody_writes_its_superblock) = log.state.opening.try_lock() else { return false };
        let mut steps = Steps::default();
        if !log.keeper.forget(log, &mut steps) {
            return false;
        }
        self.pass_on(log, steps);
        if let Some(Err(error)) = log.keeper.copy_name().map(|name| self.directory.directory().remove(name)) {
            log::warn!("{error}");
        }
        log.take_mark();
        log.set_closed();
        self.remove_log(log.index);
        // Its files stay as long as anything says that they are there.
        self.forgotten.lock().expect("no panic under this lock").push(log.id);
        // Flushes were not passed on while it was open; from now on somebody may depend on them.
        log.home.set_dirty();
        log.journal.set_dirty();
        true
    }

    /// The first guest of a disk is about to begin. If somebody has written to the image since it was looked at (locks keep nobody from
    /// copying a backup over it), what is known of its journals is of another disk: they are looked for as at the beginning.
    ///
    /// # Errors
    /// When what is there now cannot be served so.
    pub(crate) fn look_again_if_changed(&self, disk: usize) -> io::Result<()> {
        let Some(what) = self.disks[disk].became()? else { return Ok(()) };
        let options = &self.disks[disk].options;
        log::warn!("disk {}: {} {what}: it is looked at anew", options.name, options.path.display());
        // The next incremental snapshot of it has all of it.
        let file = &self.disks[disk].file;
        file.note_changed(0..scan::DiskReader::new(file.for_reading())?.size);
        {
            let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
            let of_it = |log: &Arc<KeptLog>| (log.home_disk == disk || log.journal_disk == disk) && !log.is_open();
            for log in self.logs().into_iter().filter(of_it) {
                let is_idle = self.forget_log(&log);
                log::debug!("log {:?} is forgotten: {is_idle}", log.index);
            }
        }
        self.scan_all()?;
        self.check_durable_within()
    }

    /// Its file system is gone, and something goes home or into the log by itself. That must not land on what the guest writes in the
    /// place of the file system: it goes when they end.
    fn keep_until_its_writes_end(&self, log: &Arc<KeptLog>, layouts: &mut [DiskLayout]) {
        log.keeper.end_soon(log);
        scan::add_to_layouts(layouts, &log.place, log.index);
        self.scan_soon(log.home_disk);
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
    fn move_log(&self, log: &KeptLog, place: FoundLogPlace) -> Arc<KeptLog> {
        log::info!(
            "disk {}: the file system at byte {} can have {} blocks now, it could have {}",
            self.disks[log.home_disk].options.name,
            place.home_start,
            place.home_blocks,
            log.place.home_blocks
        );
        self.area.resize_home(log.id, place.home_blocks);
        let moved = Arc::new(KeptLog { log: Log { place, ..log.log.clone() }, keeper: Arc::clone(&log.keeper) });
        self.replace_log(Arc::clone(&moved));
        moved
    }

    /// Whether memory may be gone soon, as where a host runs on its battery: journals that are found from now on, of guests that come or
    /// file systems that are made, are not held there then. Those that are known stay where they are until somebody moves them.
    pub fn doubt_memory(&self, is_doubtful: bool) {
        self.is_memory_doubtful.store(is_doubtful, Ordering::Relaxed);
    }

    fn new_log(&self, place: FoundLogPlace, number: u64) -> io::Result<Option<Arc<KeptLog>>> {
        let placement = match self.disks[place.home_disk].options.placement {
            // Two devices have two threads; a journal on NVM is taken by the one with the homes.
            PlacementKind::Nvm if place.is_external => PlacementKind::Storage,
            placement => placement,
        };
        let (left, wish) = self.take_left(&place)?;
        let copy = self.take_left_copy(&place, placement, wish.as_ref())?;
        let is_in_region = left.is_none() && self.was_left_in_region(&place)?;
        // Its guest may have it open, and part of it may be on a server.
        let is_taken_up = is_in_region || copy.as_ref().is_some_and(LeftCopy::is_open);
        if left.is_none()
            && !is_taken_up
            && let Err(error) = self.refuse_marked(&place)
        {
            if wish.is_some() || !self.disks[place.home_disk].is_in_use() {
                return Err(error);
            }
            // Its guest has put that there. The rest of its disks is to be served on, and this as it is.
            log::error!("{error}; it is served as it is meanwhile");
            return Ok(None);
        }
        let is_elsewhere = placement.is_held() && left.is_none() && self.is_memory_doubtful.load(Ordering::Relaxed);
        let configured = if is_elsewhere { PlacementKind::Storage } else { placement };
        // What an earlier worker held is held, whatever was configured: it was wished so since.
        let placement = match (&left, &wish) {
            (Some(_), Some(wish)) if wish.placement.is_held() => wish.placement,
            (Some(_), _) if !configured.is_held() => PlacementKind::Copy,
            _ if is_in_region => PlacementKind::Nvm,
            _ => configured,
        };
        // Not where nothing is ever written home, nor where another worker goes on.
        let is_news = placement != PlacementKind::Discard && left.is_none() && !is_taken_up;
        let is_distrusted = is_news && self.was_distrusted(&place)?;
        let placement = if is_distrusted { PlacementKind::Storage } else { placement };
        let shape =
            LogShape { block_bytes: place.block_bytes, log_blocks: place.log_blocks, home_blocks: place.home_blocks };
        let holding = if placement == PlacementKind::Retain { Holding::Retain } else { Holding::Copy };
        let (home, journal) = (Arc::clone(&self.disks[place.home_disk]), Arc::clone(&self.disks[place.journal_disk]));
        let shipped = match placement {
            // One that an earlier worker had in its own place is there still, perhaps open.
            PlacementKind::Remote if wish.is_none() || copy.is_some() => {
                self.shipped(&place, &home, &journal, number, copy)?
            }
            _ => None,
        };
        let (path, own_blocks) = (self.directory.path(), place.own_blocks.clone());
        let id = match &left {
            Some(left) => self.area.adopt_log(path, &left.name, shape, holding, own_blocks),
            None => self.area.make_log(path, &format!("log-{number}"), shape, holding, own_blocks),
        }
        .map_err(io::Error::other)?;
        let state = Arc::new(LogState::new(
            wish.as_ref().map_or(if is_distrusted { placement } else { configured }, |wish| wish.placement),
        ));
        let keeper =
            shipped.unwrap_or_else(|| keeper_of(&self.area, id, placement, &home, self.region(place.home_disk)));
        let mut logs = self.logs.write().expect("no panic under this lock");
        let storage_from =
            wish.as_ref().and_then(|wish| wish.storage_from).filter(|_| placement == PlacementKind::Storage);
        let log = Log {
            id,
            placement,
            index: LogIndex(logs.next),
            home_disk: place.home_disk,
            journal_disk: place.journal_disk,
            home,
            journal,
            place,
            storage_from,
            state,
        };
        let log = Arc::new(KeptLog { log, keeper });
        if wish.as_ref().is_some_and(|wish| wish.may_go_on_unannounced) {
            log.was_closed_under_the_guest_of_another();
        }
        if is_distrusted || wish.is_some_and(|wish| wish.is_distrusted) {
            log.distrust();
        }
        logs.next += 1;
        logs.there.insert(log.index.0, Arc::clone(&log));
        log::info!(
            "disk {}: found the {} journal of the file system at byte {} ({} blocks of {} bytes), placement {}",
            self.disks[log.home_disk].options.name,
            if log.place.is_external { "external" } else { "internal" },
            log.place.home_start,
            log.place.log_blocks,
            log.place.block_bytes,
            placement.name()
        );
        Ok(Some(log))
    }

    /// Who ships a log to its server. Nothing where there is no server, or no memory for a copy of the log.
    fn shipped(
        &self,
        place: &FoundLogPlace,
        home: &Arc<Disk>,
        journal: &Arc<Disk>,
        number: u64,
        copy: Option<LeftCopy>,
    ) -> io::Result<Option<Arc<dyn Keeper>>> {
        let Some(options) = self.server(place.home_disk) else {
            LeftCopy::refuse_if_open(copy.as_ref(), "has no server")?;
            return Ok(None);
        };
        let is_taken_up = copy.as_ref().is_some_and(LeftCopy::is_open);
        let name = options.name_of(place.home_start);
        if name.len() > NAME_BYTES_MAX {
            // A server would not understand what it is asked, and be taken for one that is too old.
            log::warn!(
                "disk {}: the journal of the file system at byte {} would be called {name}, which is longer than {NAME_BYTES_MAX} bytes: \
                 give the disk a shorter name on its server; the journal stays in its own place on storage",
                home.options.name,
                place.home_start
            );
            return Ok(None);
        }
        let reserved = match is_taken_up {
            // It is there, whatever else has grown since.
            true => Some(self.area.reserve_again(place.log_bytes())),
            false => self.area.reserve(place.log_bytes()).then_some(place.log_bytes()),
        };
        let Some(reserved) = reserved else {
            log::warn!(
                "disk {}: a copy of the journal's {} MiB does not fit into the memory budget (--memory-budget); it stays \
                 in its own place on storage",
                home.options.name,
                place.log_bytes() >> 20
            );
            return Ok(None);
        };
        let (place, home, journal) = (place.clone(), Arc::clone(home), Arc::clone(journal));
        let copy = match copy.map_or_else(|| LeftCopy::make(&self.directory, &place, number), Ok) {
            Ok(copy) => copy,
            Err(error) => {
                self.area.release(reserved);
                let name = &home.options.name;
                log::warn!(
                    "disk {name}: a copy of the journal cannot be kept: {error}; it stays in its own place on storage"
                );
                return Ok(None);
            }
        };
        let remote = if copy.is_open() {
            RemoteLog::take_up(options, place, home, journal, copy.file)?
        } else {
            RemoteLog::new(options, place, home, journal, Some(copy.file))?
        };
        Ok(Some(Arc::new(Shipped::new(remote, (Arc::clone(&self.area), reserved), copy.name))))
    }

    /// A log whose live part is on a journal server or in a region of NVM is not to be taken for an empty one.
    fn refuse_marked(&self, place: &FoundLogPlace) -> io::Result<()> {
        let Some(offset) = place.offset_of(0) else { return Ok(()) };
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        self.disks[place.journal_disk].file.read_exact_at(&mut raw, offset)?;
        let path = self.disks[place.home_disk].options.path.display();
        match Stored::read(&raw).says {
            Says::Remote(mark) => Err(io::Error::other(format!(
                "the journal of {path} is on a journal server (epoch {}): run 'amberlog recover --disk IMAGE --remote \
                 HOST:PORT/NAME' first, or give the disk placement=remote=HOST:PORT/NAME",
                mark.epoch
            ))),
            // While a guest runs, it is one that the guest itself has put there: its kernel will say that an error happened.
            Says::Nvm(_) if self.disks[place.home_disk].was_started() => Ok(()),
            // Nothing is ever written to it, and a region cannot be given to it: what is on it can be looked at.
            Says::Nvm(_) if self.disks[place.home_disk].options.read_only => {
                log::warn!("{path}: its journal is in a region of NVM, so what was committed last is not on it");
                Ok(())
            }
            Says::Nvm(_) => Err(io::Error::other(format!(
                "the journal of {path} is in a region of NVM: give the disk placement=nvm=PATH with the region that it was used \
                 with, or, if that is gone, run e2fsck -fy on the file system at byte {} to give the journal up",
                place.home_start
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
                self.warn_of_lost(place);
                Ok(())
            }
            // That of durability by age is good by itself.
            Says::Aged(..) | Says::NoJournal(_) | Says::Empty | Says::Live(_) | Says::LeftToGuest(_) | Says::Error => {
                Ok(())
            }
        }
    }

    /// Storage says that a log is held, and it is not.
    pub(crate) fn warn_of_lost(&self, place: &FoundLogPlace) {
        log::warn!(
            "{}: the journal of the file system at byte {} carries amberlog's mark, and nothing holds its \
             transactions any more: the host has lost power or was started anew, or placement=discard dropped them; \
             what was committed last is lost, and the guest should check the whole file system (e2fsck -f) before it \
             uses it",
            self.disks[place.home_disk].options.path.display(),
            place.home_start
        );
    }

    /// A disk is about to come, with the next worker: from now on whoever uses its image asks this VM's directory.
    ///
    /// # Errors
    /// When that cannot be written down.
    pub fn expect_image(&self, image: &Path) -> io::Result<()> {
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        self.directory.register(image).map_err(io::Error::other)?;
        self.describe()
    }

    /// The disks that were to come do not: whoever uses their images need not ask this VM's directory any more.
    ///
    /// # Errors
    /// When that cannot be written down.
    pub fn expect_no_more(&self) -> io::Result<()> {
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        let served: Vec<&Path> = self.disks.iter().map(|disk| disk.options.path.as_path()).collect();
        self.directory.keep_images(&served);
        self.describe()
    }

    /// A disk is about to go, and nobody uses it any more: brings home what it is owed, and has it say for itself what is to be known of
    /// its journals. Its own thread calls this, where it has one: its clock goes on, and nothing is to begin by that meanwhile.
    ///
    /// # Errors
    /// When storage fails, or something is held still: it cannot go. Of kind `WouldBlock` when something of it is under way at this
    /// moment: nothing was done then.
    pub fn leave_disk(&self, disk: usize) -> io::Result<()> {
        let is_its = |log: &Arc<KeptLog>| log.home_disk == disk || log.journal_disk == disk;
        let is_busy = self.logs().into_iter().filter(is_its).any(|log| log.keeper.has_stored_in_flight());
        if is_busy || self.awaited_home_writes(disk).is_some() {
            let sentence = format!("disk {}: something of it is under way still", self.disks[disk].options.name);
            return Err(io::Error::new(io::ErrorKind::WouldBlock, sentence));
        }
        self.recover_disk(disk)?;
        for log in self.logs().into_iter().filter(is_its) {
            if log.is_distrusted() {
                left_to_guest::remember(&log.place, &log.journal.file)?;
            }
            if log.is_held_open() || self.area.owed(log.id).blocks > 0 {
                return Err(io::Error::other(format!(
                    "disk {}: something of it is held still",
                    self.disks[disk].options.name
                )));
            }
        }
        self.disks[disk].file.sync_data()
    }

    /// Writes down, beside the tables, what a later process needs to finish a recovery.
    pub(crate) fn describe(&self) -> io::Result<()> {
        let pages = self.memory.page_count();
        let known = self.logs();
        let mut logs: Vec<LogDescription> = known
            .iter()
            .filter(|log| log.placement.is_held() || self.area.is_open(log.id))
            .map(|log| {
                let path = |disk: usize| self.disks[disk].options.path.clone();
                let (home, journal) = (path(log.home_disk), path(log.journal_disk));
                LogDescription::new(self.area.name_of(log.id), home, journal, log.place.clone())
            })
            .collect();
        // What an earlier worker has left and nobody has taken up is owed still.
        logs.extend(self.left.lock().expect("no panic under this lock").logs.iter().cloned());
        let wishes = known
            .iter()
            .map(|log| WishDescription {
                place: log.place.clone(),
                placement: log.wanted().name().to_owned(),
                is_distrusted: log.is_distrusted(),
                storage_from: log.storage_from.filter(|_| log.placement == PlacementKind::Storage),
                copy: Some(log.keeper.copy_name().unwrap_or_default().to_owned()),
                may_go_on_unannounced: !log.is_open() && log.may_go_on_unannounced(),
            })
            .collect();
        self.directory.describe(&self.memory.files(), logs, wishes)?;
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
        let is_on_storage = |log: &KeptLog| log.keeper.leaves_nothing_here() || log.placement == PlacementKind::Discard;
        let mut logs = self.logs().into_iter().filter(|log| log.home_disk == disk || log.journal_disk == disk);
        if self.disks[disk].was_started() || logs.all(|log| is_on_storage(&log)) {
            return Ok(());
        }
        Err(io::Error::other(
            "its guest was started under another amberlog, and what its journal holds is not here: reset the VM. No \
             guest is moved here while it runs, whatever its placement: shut it down instead",
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

    /// What has to end before [`Journals::recover_disk`], which waits for it otherwise: home writes, perhaps of another disk.
    pub(crate) fn awaited_home_writes(&self, disk: usize) -> Option<String> {
        let is_its = |log: &Log| log.home_disk == disk || log.journal_disk == disk;
        let awaited = self.logs().into_iter().find(|log| is_its(log) && log.keeper.awaits_home_writes(log))?;
        Some(format!(
            "home writes of disk {}, before which its journal cannot be recovered,",
            awaited.home.options.name
        ))
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

    fn recover_log(&self, log: &KeptLog, is_vm_gone: bool) -> io::Result<()> {
        let _alone = log.state.recovering.lock().expect("no panic under this lock");
        // It may have been handed over while this waited.
        let Some(log) = self.log(log.index) else { return Ok(()) };
        if !is_vm_gone && self.leave_in_place(&log)? {
            return Ok(());
        }
        let log = &*log;
        log.take_mark();
        let was_open = log.is_open();
        if was_open
            && !log.is_distrusted()
            && let Some(why) = scan::why_not_replayed(&log.place, &log.home.file, &log.journal.file)?
        {
            log.keeper.doubt_at_the_end(log, why.to_owned());
        }
        let finished = log.keeper.finish(log, is_vm_gone)?;
        let is_recovered = was_open && matches!(finished, Finished::Recovered(_));
        if is_recovered {
            log.was_closed_under_its_guest();
            if !is_vm_gone {
                // The next worker has to know it, however soon it comes.
                let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
                if let Err(error) = self.describe() {
                    log::error!("writing down where journals live failed: {error}");
                }
            }
        }
        if log.is_distrusted() && log.placement.is_held() {
            // It stays on storage for the guest's next kernel, too.
            let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
            self.put(log, PlacementKind::Storage, None);
            if is_vm_gone {
                left_to_guest::remember_or_complain(log);
            }
        } else if is_recovered && !is_vm_gone && !log.is_distrusted() {
            // As where its guest closes it: whoever has wished it elsewhere meanwhile counts on that.
            self.follow_wish(log);
        }
        match finished {
            Finished::Nothing => {}
            Finished::Recovered(reports) => reports.into_iter().for_each(|report| self.recovered(log, report)),
            Finished::Left(report) => log.note_recovery(report),
        }
        Ok(())
    }

    /// A device is started anew, and nobody knows whose kernel comes. A replay writes over what its guest has written past the journal since:
    /// a new kernel does that itself, as on any disk, and one that goes on after a suspend must not find that it was done. A log that has such
    /// blocks is put into its own place as it is, open: that is right for both. False where there is none.
    fn leave_in_place(&self, log: &Arc<KeptLog>) -> io::Result<bool> {
        if !log.keeper.is_written_past(log)? {
            return Ok(false);
        }
        if log.keeper.puts_in_place(log)? {
            {
                let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
                let now = self.log(log.index).unwrap_or_else(|| Arc::clone(log));
                self.put(&now, PlacementKind::Storage, None);
                self.describe_or_complain();
            }
            log.home.set_dirty();
            log.journal.set_dirty();
        } else {
            let Some(taking) = self.area.take_for_hand_over(log.id) else { return Ok(false) };
            aged::give_compounds_up(&taking.log(), &log.place, &log.home.file, &log.journal.file)
                .map_err(io::Error::other)?;
            self.put_in_place(log, taking)?;
        }
        log::info!(
            "disk {}: the journal of the file system at byte {} is in its own place on storage, for whichever kernel comes: its guest has \
             written past it",
            log.home.options.name,
            log.place.home_start
        );
        Ok(true)
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
        log.note_recovery(report);
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
        self.logs_at_home(disk).iter().filter_map(|log| log.recovery()).collect()
    }

    /// The VM's directory in tmpfs.
    pub fn directory(&self) -> &AreaDirectory {
        &self.directory
    }
}
