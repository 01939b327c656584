//! Placement `remote`: a log's writes go to a journal server (crate `remote-journal`), and to storage when there is none.
//!
//! The guest's journal lives in one of two places, and the journal superblock *on storage* says in which: a log there
//! (`s_start` not 0), or a mark with an epoch ([`mark`]). That one sector is the persisted epoch: the server's copy counts
//! exactly while storage carries its mark.
//!
//! * Opened: on storage, as without us; then to the server as soon as it answers.
//! * Closed: the guest's empty log is on storage, flushed, before the server may forget. Where that fails, storage may say that there is no
//!   log: the mark is written once more before anything else is acknowledged.
//! * To the server: everything live is sent and durable there; what is on its way to storage has ended; then the mark.
//! * Back to storage (refusal, time-out, reset, full server, protocol error): everything live is written to its own place
//!   and flushed; then the superblock, which replaces the mark; only then is anybody told of a commit.
//!
//! What must always hold:
//! * A commit block is acknowledged only when the place that counts has it durable, and all before it.
//! * The superblock on storage is written under one lock, by whoever has it, never by a request on its way; and only where it
//!   is as we left it ([`shared_storage`]).
//! * A journal that was taken by somebody else (a higher epoch, or another superblock on storage) is not written to storage
//!   any more, nor is anything else on its disk: the guest's writes fail.
//! * The server is told that a log is over only where storage says that it does not count: never because nobody here has it any more.
//! * Storage says of which log on the server the next one may take the place ([`lineage`]), before the server is asked; of one that
//!   counts it says so only with the mark.
//! * The log on the server begins nowhere but where the mark says, or before; an image that was copied before the mark was
//!   last written is told from the true one by that.
//!
//! A worker that is killed while its guest runs is followed by another one ([`RemoteLog::take_up`]): the copy of the live log lies in
//! a file of the VM's directory ([`mirror`]), and has what neither storage nor the server has. The next worker completes the log on
//! storage from it, as in falling back, and then goes to the server with a new epoch: what the dead one may have had on its way there
//! arrives in a log that storage does not name any more, or is refused. Until the log is complete no commit is acknowledged.
//! First what storage says is made durable: a mark, or a superblock, that was on its way counts from then on, or does not.
//!
//! | storage says | it died | the next worker |
//! |---|---|---|
//! | a log, and its own place has all of it | on storage, or returning | goes on there |
//! | a log, and its own place lacks something | switching, or at the end of falling back | writes superblock, blocks, commit blocks, superblock |
//! | the mark of a server | on the server, or falling back | writes blocks, commit blocks, then the superblock; until then the server's log counts |
//! | no log | while its guest closed the log | the same; the guest closes it once more |
//! | what we never wrote | and somebody else has the disk | refuses, and writes nothing |
//!
//! Failure story: whatever dies, the superblock on storage says where the log is. When both places fail, the guest's
//! journal writes fail, and its kernel stops.

mod at_storage;
mod from_copy;
mod lineage;
pub(crate) mod mark;
mod mark_found;
mod mirror;
#[cfg(test)]
mod model;
mod recover;
pub(crate) mod report;
mod shared_storage;
mod ship;
mod state;
#[cfg(test)]
mod tests;

pub(crate) use from_copy::finish_from_copy;
pub use mark::RemoteMark;
pub use mark_found::MarkFound;
pub(crate) use mirror::{MirrorFile, Phase};
pub use recover::{RemoteRecovered, recover_remote_image, remote_epoch_of_image};
pub use report::RemoteReport;
pub(crate) use state::Outcome;

use crate::disk::{Disk, DiskCounters};
use crate::scan::FoundLogPlace;
use crate::scan::offset_of;
use crate::shared_disk;
use block_route::{RequestId, Status};
use jbd2::{SUPERBLOCK_BYTES, Superblock};
use lineage::{Lineage, Nonce};
use mirror::Mirror;
use remote_journal::ClientOptions;
use report::RemoteCounters;
use shared_storage::Taken;
use state::{Mode, State};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard};

/// How long opening a log waits for the server, so that already the first commit goes there.
const OPEN_PATIENCE: Duration = Duration::from_secs(1);
/// How long a log may take to be completed on storage.
const SETTLE_PATIENCE: Duration = Duration::from_secs(120);

/// Which server, and what the journal is called there.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// The server.
    pub client: ClientOptions,
    /// The name; of a file system that does not begin the disk, with `@` and where it does, in bytes.
    pub name: String,
}

impl RemoteOptions {
    /// What the journal of the file system at this byte is called.
    pub fn name_of(&self, home_start: u64) -> String {
        if home_start == 0 { self.name.clone() } else { format!("{}@{home_start}", self.name) }
    }
}

/// What a log's own place is on. For tests there is one that loses what was not flushed.
pub(crate) trait JournalStorage: Send + Sync {
    /// Writes at a byte.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// How many flushes of it have failed, whoever asked for them. To be asked before what [`JournalStorage::sync_since`] has to cover
    /// is written.
    fn failed_flushes(&self) -> u64;
    /// Makes durable what was written since so many flushes had failed: who writes and flushes the same disk, another log's thread or its
    /// guest, may be told in our place that something is lost ([`write_log::LoggedFile::sync_since`]).
    fn sync_since(&self, failed: u64) -> io::Result<()>;
    /// Reads what is there, whoever wrote it.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Forgets what this host has in its page cache of what another one may have written since.
    fn forget_cached(&self);
    /// How long another host's write may be on its way; nothing where there is none.
    fn patience(&self) -> Duration;
    /// Waits for so long.
    fn wait_for_others(&self) {
        std::thread::sleep(self.patience());
    }
}

impl JournalStorage for Disk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn failed_flushes(&self) -> u64 {
        self.file.failed_flushes()
    }

    fn sync_since(&self, failed: u64) -> io::Result<()> {
        self.file.sync_since(failed)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        shared_storage::read_at(self, offset, bytes)
    }

    fn forget_cached(&self) {
        shared_storage::forget_cached(self);
    }

    fn patience(&self) -> Duration {
        if shared_disk::may_be_shared(self.file.for_reading()) { shared_storage::PATIENCE } else { Duration::ZERO }
    }
}

/// What is known of the superblock on storage, by whoever may write it.
#[derive(Debug, Default)]
struct OnStorage {
    /// What it is if nobody else has written it: as we left it, or, where a write failed, as it was before.
    may_be: Vec<Vec<u8>>,
    /// What it says beside no mark; beside a mark, what it said before, without the logs.
    lineage: Lineage,
    /// What the log is called on the server that counts, or is about to: the lineage names it when it counts no more.
    own: Nonce,
}

impl OnStorage {
    /// The log on the server does not count any more, or never has: the next one may take its place.
    fn counts_no_more(&mut self) {
        if self.own != Nonce::default() {
            self.lineage.held = std::mem::take(&mut self.own);
        }
    }
}

/// How long after a failure the next attempt comes; each time after twice as long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackOff {
    pub min: Duration,
    pub max: Duration,
}

impl Default for BackOff {
    fn default() -> Self {
        BackOff { min: Duration::from_millis(200), max: Duration::from_secs(30) }
    }
}

/// What the threads of one log share.
struct Shared {
    name: String,
    client: ClientOptions,
    place: FoundLogPlace,
    /// With the journal, and with the rest of the file system.
    disk: Arc<Disk>,
    home: Arc<Disk>,
    medium: Arc<dyn JournalStorage>,
    /// How many flushes of that had failed before anything was read from it here.
    failed_flushes: u64,
    back_off: BackOff,
    /// Held by whoever writes the superblock on storage, or completes the log there. Taken before `state`.
    storage: Mutex<OnStorage>,
    state: Mutex<State>,
    /// What the next worker has to know; nothing where none can go on.
    mirror: Option<Arc<MirrorFile>>,
    /// The journal is not what it seemed ([`crate::distrust`]): every superblock that goes to storage says so.
    is_distrusted: AtomicBool,
    /// Nobody here has it any more.
    is_shut_down: AtomicBool,
    /// Something changed, for who waits.
    changed: Condvar,
    /// Something changed, for the thread that ships.
    work: tokio::sync::Notify,
    counters: RemoteCounters,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::Acquire)
    }

    fn on_storage(&self) -> MutexGuard<'_, OnStorage> {
        self.storage.lock().expect("no panic under this lock")
    }

    fn read_superblock(&self) -> io::Result<Vec<u8>> {
        let offset = offset_of(&self.place.runs, self.place.block_bytes, 0)
            .ok_or_else(|| io::Error::other("the log has no superblock on its disk"))?;
        let mut superblock = vec![0; SUPERBLOCK_BYTES];
        self.medium.read_at(offset, &mut superblock)?;
        Ok(superblock)
    }

    /// Makes durable what storage said when it was found: that may be in a cache, and something else on the medium, of which the opposite
    /// would be right.
    fn settle_found(&self) -> io::Result<()> {
        self.medium.sync_since(self.failed_flushes)
    }

    /// Whether storage is as we left it: to be asked before anything is written to a journal there.
    fn check(&self, storage: &OnStorage) -> io::Result<()> {
        if storage.may_be.contains(&self.read_superblock()?) { Ok(()) } else { Err(Taken::error()) }
    }

    fn write_superblock(&self, storage: &mut OnStorage, block: &[u8]) -> io::Result<()> {
        let mut block = block.to_vec();
        // What is no journal superblock is the guest's to write there.
        if self.is_distrusted.load(Ordering::Acquire)
            && let Ok(distrusted) = crate::mark::distrusted(&block)
        {
            block[..SUPERBLOCK_BYTES].copy_from_slice(&distrusted);
        }
        storage.may_be.push(block[..SUPERBLOCK_BYTES].to_vec());
        // Another worker may find it there.
        self.mirror.iter().for_each(|mirror| mirror.storage_may_be(&storage.may_be));
        self.write_block(0, &block)?;
        // It may not be durable; then the one before may come back.
        let old = storage.may_be.len().saturating_sub(2);
        storage.may_be.drain(..old);
        Ok(())
    }

    /// The same; on return it is durable.
    fn write_durably(&self, storage: &mut OnStorage, block: &[u8]) -> io::Result<()> {
        let failed_flushes = self.medium.failed_flushes();
        self.write_superblock(storage, block)?;
        self.medium.sync_since(failed_flushes)
    }

    /// The guest has closed its log, and what says so is not known to be durable: the log goes on, with what storage said before. What is
    /// acknowledged from now on would be lost beside a superblock that says that there is none, and nobody would ask the server.
    fn stay_open(&self, storage: &mut OnStorage, (lineage, own): (Lineage, Nonce)) {
        (storage.lineage, storage.own) = (lineage, own);
        let (mode, epoch, nonce, superblock) = {
            let state = self.lock();
            (state.mode, state.epoch, state.nonce, state.mirror.superblock())
        };
        let said = match (mode, superblock) {
            (Mode::Remote, Some(block)) => self.write_mark(storage, &block, epoch, nonce),
            (Mode::Storage | Mode::Returning | Mode::Switching, Some(block)) => self.check(storage).and_then(|()| {
                let mut block = block.to_vec();
                storage.lineage.write_into(&mut block);
                self.write_durably(storage, &block)
            }),
            // What is being completed on storage has its superblock written at the end, before anybody is told of a commit.
            _ => return,
        };
        if let Err(error) = said {
            log::error!(
                "{}: the journal could be neither closed on storage nor opened there again: {error}; the guest's journal writes fail",
                self.name
            );
            self.give_up(Taken::is(&error));
        }
    }

    /// Marks the log on storage as the server's, from the tail on that `block` says. On return that is durable.
    fn write_mark(&self, storage: &mut OnStorage, block: &[u8], epoch: u64, nonce: Nonce) -> io::Result<()> {
        self.check(storage)?;
        let mark = RemoteMark { epoch, nonce };
        let mut bytes = mark.write_into(block)?;
        mark.write_acknowledged(&mut bytes, self.lock().acknowledged);
        storage.own = nonce;
        storage.lineage = Lineage {
            held: Nonce::default(),
            tried: Nonce::default(),
            count: storage.lineage.count + 1,
            ..storage.lineage
        };
        storage.lineage.write_into(&mut bytes);
        let failed_flushes = self.medium.failed_flushes();
        self.write_superblock(storage, &bytes)?;
        self.medium.sync_since(failed_flushes)?;
        RemoteCounters::add(&self.counters.marks, 1);
        Ok(())
    }

    /// Somebody else has the journal, or storage failed: its writes fail from now on. Where somebody else has it, nothing is
    /// written to the disk at all, as far as this host can see to that.
    fn give_up(&self, is_taken: bool) {
        if is_taken {
            self.home.set_taken();
            self.disk.set_taken();
        }
        self.lock().fail(is_taken);
        self.changed.notify_all();
        self.disk.wake.wake();
    }

    /// Of a log that nobody here has open: where storage says that it is on a server, another host has the disk, and nothing is written to
    /// it here any more. A guest may put an image on its disk that has a mark: of that one it is known here.
    fn leave_to_another(&self, storage: &OnStorage, found: &[u8]) -> io::Result<()> {
        if !is_on_a_server(found) || storage.may_be.iter().any(|may_be| may_be == found) {
            return Ok(());
        }
        log::error!(
            "{}: the journal superblock on storage says that the journal is on a server, and that was not this host: somebody else \
             has the disk, so nothing is written to it here any more; when the other has ended, start this VM anew",
            self.name
        );
        self.give_up(true);
        Err(Taken::error())
    }

    /// Says what comes of an error while the guest writes a superblock.
    fn unless_taken<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            if Taken::is(error) {
                self.give_up(true);
            }
        })
    }

    fn tell(&self) {
        self.changed.notify_all();
        self.work.notify_one();
    }

    fn write_block(&self, position: u32, content: &[u8]) -> io::Result<()> {
        let offset = offset_of(&self.place.runs, self.place.block_bytes, position)
            .ok_or_else(|| io::Error::other(format!("log block {position} has no place on its disk")))?;
        self.medium.write_at(offset, content)?;
        DiskCounters::add(&self.disk.counters.journal_bytes_to_storage, content.len() as u64);
        Ok(())
    }
}

fn is_on_a_server(superblock: &[u8]) -> bool {
    matches!(RemoteMark::read(superblock), MarkFound::Live(_) | MarkFound::Damaged)
}

/// One log that is shipped to a server.
pub(crate) struct RemoteLog {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for RemoteLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteLog").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

impl RemoteLog {
    /// Takes care of a log; it is closed. Where there is a file for its copy, another worker can go on with it.
    pub fn new(
        options: &RemoteOptions,
        place: FoundLogPlace,
        home: Arc<Disk>,
        journal: Arc<Disk>,
        mirror: Option<Arc<MirrorFile>>,
    ) -> io::Result<Self> {
        let medium = Arc::clone(&journal);
        Self::on_medium(options, place, [home, journal], medium, BackOff::default(), mirror)
    }

    pub(crate) fn on_medium(
        options: &RemoteOptions,
        place: FoundLogPlace,
        disks: [Arc<Disk>; 2],
        medium: Arc<dyn JournalStorage>,
        back_off: BackOff,
        mirror: Option<Arc<MirrorFile>>,
    ) -> io::Result<Self> {
        let shared = Self::shared(options, place, disks, medium, back_off, mirror);
        // What somebody wished before another worker died.
        let (is_paused, is_distrusted) = shared
            .mirror
            .as_ref()
            .map(|mirror| mirror.says())
            .map_or((false, false), |said| (said.is_paused, said.is_distrusted));
        shared.is_distrusted.store(is_distrusted, Ordering::Release);
        {
            let mut state = shared.lock();
            *state = State::new(Mirror::new(shared.mirror.clone()));
            state.is_paused = is_paused;
        }
        Self::begin(shared)
    }

    /// Goes on with a log that a worker which has died had open, as its copy has it: from [`RemoteLog::go_on`] on. Until then storage is
    /// only read.
    ///
    /// # Errors
    /// When somebody else has it, when storage has failed before, when the copy lacks something, or cannot be read.
    pub fn take_up(
        options: &RemoteOptions,
        place: FoundLogPlace,
        home: Arc<Disk>,
        journal: Arc<Disk>,
        mirror: Arc<MirrorFile>,
    ) -> io::Result<Self> {
        let medium = Arc::clone(&journal);
        Self::take_up_on_medium(options, place, [home, journal], medium, BackOff::default(), mirror)
    }

    pub(crate) fn take_up_on_medium(
        options: &RemoteOptions,
        place: FoundLogPlace,
        disks: [Arc<Disk>; 2],
        medium: Arc<dyn JournalStorage>,
        back_off: BackOff,
        mirror: Arc<MirrorFile>,
    ) -> io::Result<Self> {
        Self::begin(Self::shared_of_left(options, place, disks, medium, back_off, mirror)?)
    }

    /// What an earlier process has left of a log that its guest had open; nothing was begun.
    fn shared_of_left(
        options: &RemoteOptions,
        place: FoundLogPlace,
        disks: [Arc<Disk>; 2],
        medium: Arc<dyn JournalStorage>,
        back_off: BackOff,
        mirror: Arc<MirrorFile>,
    ) -> io::Result<Arc<Shared>> {
        let shared = Self::shared(options, place, disks, medium, back_off, Some(Arc::clone(&mirror)));
        let said = mirror.says();
        let refuse = |why: &str| Err(io::Error::other(why.to_owned()));
        match said.phase {
            Phase::Open => {}
            Phase::Closed => return refuse("nobody has the journal open"),
            Phase::Failed => return refuse("the journal was taken by somebody else, or storage failed"),
            Phase::Lost => {
                return refuse("what was live of the journal was only in the memory of the process that died");
            }
        }
        let found = shared.read_superblock()?;
        if !said.may_be.contains(&found) {
            return Err(Taken::error());
        }
        let mut lineage = Lineage::read(&found).unwrap_or_default();
        let (marked, storage_counts) = match RemoteMark::read(&found) {
            MarkFound::Live(mark) => {
                (lineage.held, lineage.tried) = (mark.nonce, Nonce::default());
                ((mark.epoch, mark.nonce), false)
            }
            // Where it says that the log is empty, its guest was closing it.
            _ => {
                if said.named != Nonce::default() {
                    lineage.held = said.named;
                }
                (Default::default(), Superblock::decode(&found).is_ok_and(|superblock| !superblock.is_empty()))
            }
        };
        let superblock = Superblock::decode(&said.superblock).map_err(io::Error::other)?;
        *shared.on_storage() = OnStorage { may_be: said.may_be, lineage, own: Nonce::default() };
        shared.is_distrusted.store(said.is_distrusted, Ordering::Release);
        {
            let mut state = shared.lock();
            let mirror = Mirror::take_up(mirror)?;
            *state = State::take_up(mirror, &superblock, storage_counts, said.is_stored, marked);
            state.is_paused = said.is_paused;
        }
        Ok(shared)
    }

    fn shared(
        options: &RemoteOptions,
        place: FoundLogPlace,
        [home, disk]: [Arc<Disk>; 2],
        medium: Arc<dyn JournalStorage>,
        back_off: BackOff,
        mirror: Option<Arc<MirrorFile>>,
    ) -> Arc<Shared> {
        Arc::new(Shared {
            name: options.name_of(place.home_start),
            client: options.client.clone(),
            place,
            disk,
            home,
            failed_flushes: medium.failed_flushes(),
            medium,
            back_off,
            storage: Mutex::default(),
            state: Mutex::new(State::new(Mirror::default())),
            mirror,
            is_distrusted: AtomicBool::new(false),
            is_shut_down: AtomicBool::new(false),
            changed: Condvar::new(),
            work: tokio::sync::Notify::new(),
            counters: RemoteCounters::default(),
        })
    }

    fn begin(shared: Arc<Shared>) -> io::Result<Self> {
        let of_thread = Arc::clone(&shared);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("remote".to_owned());
        log_context::spawn(thread, move || runtime.block_on(ship::run(&of_thread)))?;
        Ok(RemoteLog { shared })
    }

    /// Stops as a process that is killed does: nothing more is sent, and its copy stays as it is. On return its thread is gone.
    #[cfg(test)]
    fn stop_as_killed(&self) {
        self.shared.is_shut_down.store(true, Ordering::Release);
        let deadline = std::time::Instant::now() + SETTLE_PATIENCE;
        while Arc::strong_count(&self.shared) > 1 {
            self.shared.work.notify_one();
            assert!(std::time::Instant::now() < deadline, "the thread of a worker that is dead does not end");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Nothing can keep this process from serving the guest any more: what was taken up is completed on storage, where that lacks
    /// something.
    ///
    /// # Errors
    /// When storage fails.
    pub fn go_on(&self) -> io::Result<()> {
        let shared = &self.shared;
        if !shared.lock().may_not_begin {
            return Ok(());
        }
        shared.settle_found()?;
        shared.lock().may_not_begin = false;
        shared.tell();
        Ok(())
    }

    /// Whether it is one that was taken up.
    pub fn was_taken_up(&self) -> bool {
        self.shared.lock().may_not_begin
    }

    /// Whether it is not what it seemed.
    pub fn is_distrusted(&self) -> bool {
        self.shared.is_distrusted.load(Ordering::Acquire)
    }

    /// The guest's superblock of a log that is open.
    pub fn superblock_now(&self) -> Option<Superblock> {
        Superblock::decode(&self.shared.lock().mirror.superblock()?).ok()
    }

    /// The live blocks of a log, in its order, as far as they can be read.
    pub fn for_each_live(&self, superblock: &Superblock, mut with: impl FnMut(u32, Arc<[u8]>)) {
        let state = self.shared.lock();
        let to_end = state.mirror.within(superblock.start..u32::MAX);
        for position in to_end.chain(state.mirror.within(0..superblock.start)) {
            let Ok(Some(content)) = state.mirror.get(position) else { return };
            with(position, content);
        }
    }

    /// Has the mark on storage written anew so often.
    #[cfg(test)]
    fn set_mark_age(&self, age: Duration) {
        self.shared.lock().mark_age = age;
    }

    /// Has what is written in one pass go in several batches.
    #[cfg(test)]
    fn set_batch_blocks_max(&self, blocks: usize) {
        self.shared.lock().batch_bytes_max = blocks * self.shared.place.block_bytes as usize;
    }

    /// The guest writes a log block other than the superblock.
    pub fn write(&self, position: u32, content: Arc<[u8]>, request: RequestId) -> Outcome {
        self.shared.lock().write(position, content, request)
    }

    /// A pass is over: what was written in it goes to the server.
    pub fn end_of_pass(&self) {
        if self.shared.lock().form_batches() {
            self.shared.work.notify_one();
        }
    }

    /// A write to the log's own place has ended.
    pub fn stored(&self) {
        let mut state = self.shared.lock();
        state.stored_in_flight -= 1;
        if state.stored_in_flight == 0 {
            drop(state);
            self.shared.work.notify_one();
        }
    }

    /// Requests that wait no longer.
    pub fn take_done(&self) -> Vec<(RequestId, Status)> {
        self.shared.lock().take_done()
    }

    /// A log block that is live, for whoever reads it.
    ///
    /// # Errors
    /// When the copy cannot be read.
    pub fn read(&self, position: u32) -> io::Result<Option<Arc<[u8]>>> {
        self.shared.lock().mirror.get(position)
    }

    /// The guest opens its log. On return storage has the superblock.
    pub fn open(&self, superblock: &Superblock, block: &[u8]) -> io::Result<()> {
        let shared = &self.shared;
        {
            let mut storage = shared.on_storage();
            let found = shared.read_superblock()?;
            // What an earlier run left there was brought home before the guest began.
            shared.leave_to_another(&storage, &found)?;
            if shared.disk.is_taken() || is_on_a_server(&found) {
                return Err(Taken::error());
            }
            *storage = OnStorage { lineage: Lineage::of_opened(&found), may_be: vec![found], own: Nonce::default() };
            let mut content = block.to_vec();
            RemoteMark::remove_from(&mut content);
            storage.lineage.write_into(&mut content);
            let failed_flushes = shared.medium.failed_flushes();
            shared.write_superblock(&mut storage, &content)?;
            shared.medium.sync_since(failed_flushes)?;
            shared.lock().open(superblock, content.into());
        }
        shared.tell();
        let state = shared.lock();
        if state.is_local_only {
            log::warn!(
                "{}: this journal has fast commits or features that are not known; it stays in its own place on storage",
                shared.name
            );
            return Ok(());
        }
        let is_undecided =
            |state: &mut State| state.mode != Mode::Remote && !state.has_failed_to_connect && !state.is_paused;
        drop(shared.changed.wait_timeout_while(state, OPEN_PATIENCE, is_undecided));
        Ok(())
    }

    /// The guest writes the superblock of its open log.
    pub fn superblock(&self, superblock: &Superblock, block: &[u8]) -> io::Result<()> {
        let shared = &self.shared;
        // The guest's kernel may have read one, and keeps what it does not know.
        let mut block = block.to_vec();
        RemoteMark::remove_from(&mut block);
        let mut storage = shared.on_storage();
        let (mode, epoch, nonce, storage_counts) = {
            let state = shared.lock();
            (state.mode, state.epoch, state.nonce, state.storage_counts())
        };
        match mode {
            Mode::Failed => {
                return Err(io::Error::other("the journal was taken by somebody else, or storage failed"));
            }
            // Before the server may let go of what the tail has passed. Where a copy of the image was made before, what the
            // guest wrote home for that is missing, and its mark says so.
            Mode::Remote => shared.unless_taken(shared.write_mark(&mut storage, &block, epoch, nonce))?,
            _ if storage_counts => shared.unless_taken(shared.check(&storage))?,
            _ => {}
        }
        storage.lineage.write_into(&mut block);
        let (is_stored, is_local_only) = {
            let mut state = shared.lock();
            (state.superblock(superblock, block.as_slice().into()), state.is_local_only)
        };
        if is_stored {
            shared.write_superblock(&mut storage, &block)?;
            // The flush that the guest sends with it has to reach storage.
            shared.disk.set_dirty();
        }
        if is_local_only {
            shared.tell();
        }
        Ok(())
    }

    /// The guest closes its log, or writes something else over its superblock: nothing in it is needed any more, and what
    /// goes to storage from now on is the guest's. On return that block is durable on storage.
    ///
    /// # Errors
    /// When it cannot be written: the log is open as before, and storage says so once more; or, where it does not take that either, the
    /// guest's journal writes fail from now on.
    pub fn close(&self, block: &[u8]) -> io::Result<()> {
        let shared = &self.shared;
        let mut block = block.to_vec();
        RemoteMark::remove_from(&mut block);
        {
            let mut storage = shared.on_storage();
            let before = (storage.lineage, storage.own);
            // The server forgets when it hears of this; until then storage may still say that it has the log.
            if shared.lock().mode == Mode::Failed {
                return Err(io::Error::other("the journal was taken by somebody else, or storage failed"));
            }
            shared.unless_taken(shared.check(&storage))?;
            storage.counts_no_more();
            storage.lineage.write_into(&mut block);
            if let Err(error) = shared.write_durably(&mut storage, &block) {
                shared.stay_open(&mut storage, before);
                return Err(error);
            }
            shared.lock().close();
        }
        shared.tell();
        shared.disk.wake.wake();
        Ok(())
    }

    /// A log that nobody has open is empty once more, which its guest says: a worker that was killed may have closed it, and not have
    /// told. What storage says of the logs on a server stays. False where the guest's own block says the same.
    ///
    /// # Errors
    /// When it cannot be read or written, or when another host has the journal on a server: a kernel or e2fsck that finds its mark would
    /// clear that, and give its log up.
    pub fn superblock_of_closed(&self, block: &[u8]) -> io::Result<bool> {
        let shared = &self.shared;
        let mut storage = shared.on_storage();
        let found = shared.read_superblock()?;
        shared.leave_to_another(&storage, &found)?;
        let Some(lineage) = Lineage::read(&found).filter(|lineage| Lineage::read(block) != Some(*lineage)) else {
            storage.may_be = std::iter::once(found).chain(block.get(..SUPERBLOCK_BYTES).map(<[u8]>::to_vec)).collect();
            return Ok(false);
        };
        let mut block = block.to_vec();
        lineage.write_into(&mut block);
        storage.may_be = vec![found];
        shared.write_superblock(&mut storage, &block)?;
        Ok(true)
    }

    /// The guest is gone: its log is completed on storage, for the next kernel or for us to replay. The server is told
    /// that its copy is not needed.
    ///
    /// # Errors
    /// When that fails: storage then still says that the server has the log, or somebody else has taken it.
    pub fn settle(&self) -> io::Result<()> {
        // Its guest may have gone before this process began to serve it.
        self.go_on()?;
        let shared = &self.shared;
        let mut state = shared.lock();
        if state.mode == Mode::Closed {
            return Ok(());
        }
        if state.mode == Mode::Failed
            && state.has_storage_failed
            && ![&shared.home, &shared.disk].iter().any(|disk| disk.is_taken())
        {
            // Its server may be lost: then what is live of it is here and nowhere else.
            log::info!("{}: storage failed before; completing the journal there is tried once more", shared.name);
            state.complete_again();
        }
        state.wants_settling = true;
        shared.work.notify_one();
        let unsettled = |state: &mut State| !matches!(state.mode, Mode::Closed | Mode::Failed);
        let (mut state, _) =
            shared.changed.wait_timeout_while(state, SETTLE_PATIENCE, unsettled).expect("no panic under this lock");
        state.wants_settling = false;
        if state.mode == Mode::Closed {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the log {} could not be completed on storage; recover it with 'amberlog recover --remote {}/{}', where the \
             journal superblock on storage still says that it is there",
            shared.name, shared.client.address, shared.name
        )))
    }

    /// Has the log complete on storage, and keeps it there until it is wished back to the server.
    pub fn pause(&self, is_paused: bool) {
        self.shared.mirror.iter().for_each(|mirror| mirror.say(|said| said.is_paused = is_paused));
        self.shared.lock().is_paused = is_paused;
        self.shared.tell();
    }

    /// Whether it was paused, and storage has the whole log since, or no guest has it open.
    ///
    /// # Errors
    /// When neither comes to be any more.
    pub fn is_paused(&self) -> io::Result<bool> {
        let state = self.shared.lock();
        match state.mode {
            Mode::Failed => Err(io::Error::other("the journal was taken by somebody else, or storage failed")),
            Mode::Storage | Mode::Closed => Ok(state.is_paused),
            Mode::Returning | Mode::Switching | Mode::Remote | Mode::FallingBack => Ok(false),
        }
    }

    /// The journal is not what it seemed: storage says so from now on, whichever place has it, and its own place is to have it.
    ///
    /// # Errors
    /// When that cannot be written now: the next superblock that goes to storage says it.
    pub fn distrust(&self) -> io::Result<()> {
        let said = self.say_distrusted();
        self.pause(true);
        said
    }

    /// Whoever finds the log after a kill, in whichever place its superblock on storage says, replays nothing of it.
    fn say_distrusted(&self) -> io::Result<()> {
        let shared = &self.shared;
        shared.is_distrusted.store(true, Ordering::Release);
        shared.mirror.iter().for_each(|mirror| mirror.say(|said| said.is_distrusted = true));
        let mut storage = shared.on_storage();
        shared.check(&storage)?;
        let block = shared.read_superblock()?;
        let failed_flushes = shared.medium.failed_flushes();
        shared.write_superblock(&mut storage, &block)?;
        shared.medium.sync_since(failed_flushes)
    }

    /// Whether storage has all of it, and nobody is about to change that.
    #[cfg(test)]
    pub(crate) fn is_on_storage(&self) -> bool {
        self.shared.lock().mode == Mode::Storage
    }

    /// Where its writes go.
    #[cfg(test)]
    pub(crate) fn mode(&self) -> Mode {
        self.shared.lock().mode
    }

    /// The same; nothing while it is being changed.
    #[cfg(test)]
    fn try_mode(&self) -> Option<Mode> {
        self.shared.state.try_lock().ok().map(|state| state.mode)
    }

    /// What was done with it.
    pub fn report(&self) -> RemoteReport {
        self.shared.counters.report(self.shared.lock().mode == Mode::Remote)
    }
}

/// Whoever lets go of a log says nothing of it: storage says where it is, and the server keeps what it has. The thread writes no
/// more than what it has begun.
impl Drop for RemoteLog {
    fn drop(&mut self) {
        // Not under a lock: storage may hang with that, and whoever ends a VM does not wait for it here.
        self.shared.is_shut_down.store(true, Ordering::Release);
        self.shared.work.notify_one();
    }
}
