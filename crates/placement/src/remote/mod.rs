//! Placement `remote`: a log's writes go to a journal server (crate `remote-journal`), and to storage when there is none.
//!
//! The guest's journal lives in one of two places, and the journal superblock *on storage* says in which: a log there
//! (`s_start` not 0), or a mark with an epoch ([`mark`]). That one sector is the persisted epoch: the server's copy counts
//! exactly while storage carries its mark.
//!
//! * Opened: on storage, as without us; then to the server as soon as it answers.
//! * Closed: the guest's empty log is on storage, flushed, before the server may forget.
//! * To the server: everything live is sent and durable there; what is on its way to storage has ended; then the mark.
//! * Back to storage (refusal, time-out, reset, full server, protocol error): everything live is written to its own place
//!   and flushed; then the superblock, which replaces the mark; only then is anybody told of a commit.
//!
//! What must always hold:
//! * A commit block is acknowledged only when the place that counts has it durable, and all before it.
//! * The superblock on storage is written under one lock, by whoever has it, never by a request on its way.
//! * A journal that was taken by somebody else (a higher epoch) is not written to storage any more: its writes fail.
//!
//! Failure story: whatever dies, the superblock on storage says where the log is. When both places fail, the guest's
//! journal writes fail, and its kernel stops.

mod mark;
#[cfg(test)]
mod model;
mod recover;
mod report;
mod ship;
mod state;
#[cfg(test)]
mod tests;

pub use mark::{MarkFound, RemoteMark};
pub use recover::{RemoteRecovered, recover_remote_image, remote_epoch_of_image};
pub use report::RemoteReport;
pub(crate) use state::Outcome;

use crate::disk::{Disk, DiskCounters};
use crate::journals::offset_of;
use crate::scan::FoundLogPlace;
use block_route::{RequestId, Status};
use jbd2::Superblock;
use remote_journal::ClientOptions;
use report::RemoteCounters;
use state::{Mode, State};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

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
    /// Makes durable what was written before.
    fn sync(&self) -> io::Result<()>;
}

impl JournalStorage for Disk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
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
    disk: Arc<Disk>,
    medium: Arc<dyn JournalStorage>,
    back_off: BackOff,
    /// Held by whoever writes the superblock on storage, or completes the log there. Taken before `state`.
    storage: Mutex<()>,
    state: Mutex<State>,
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
    /// Takes care of a log; it is closed.
    pub fn new(options: &RemoteOptions, place: FoundLogPlace, disk: Arc<Disk>) -> io::Result<Self> {
        let medium = Arc::clone(&disk);
        Self::on_medium(options, place, disk, medium, BackOff::default())
    }

    pub(crate) fn on_medium(
        options: &RemoteOptions,
        place: FoundLogPlace,
        disk: Arc<Disk>,
        medium: Arc<dyn JournalStorage>,
        back_off: BackOff,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            name: options.name_of(place.home_start),
            client: options.client.clone(),
            place,
            disk,
            medium,
            back_off,
            storage: Mutex::default(),
            state: Mutex::new(State::new()),
            changed: Condvar::new(),
            work: tokio::sync::Notify::new(),
            counters: RemoteCounters::default(),
        });
        let of_thread = Arc::clone(&shared);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("remote".to_owned()).spawn(move || runtime.block_on(ship::run(&of_thread)))?;
        Ok(RemoteLog { shared })
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
    pub fn read(&self, position: u32) -> Option<Arc<[u8]>> {
        self.shared.lock().mirror.get(&position).cloned()
    }

    /// The guest opens its log. On return storage has the superblock.
    pub fn open(&self, superblock: &Superblock, block: &[u8]) -> io::Result<()> {
        let shared = &self.shared;
        {
            let _storage = shared.storage.lock().expect("no panic under this lock");
            let mut content = block.to_vec();
            RemoteMark::remove_from(&mut content);
            shared.write_block(0, &content)?;
            shared.medium.sync()?;
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
        let _storage = shared.storage.lock().expect("no panic under this lock");
        let mut state = shared.lock();
        if state.mode == Mode::Failed {
            return Err(io::Error::other("the journal was taken by somebody else, or storage failed"));
        }
        if state.superblock(superblock, block.as_slice().into()) {
            drop(state);
            shared.write_block(0, &block)?;
            // The flush that the guest sends with it has to reach storage.
            shared.disk.set_dirty();
        }
        Ok(())
    }

    /// The guest closes its log, or writes something else over its superblock: nothing in it is needed any more, and what
    /// goes to storage from now on is the guest's. On return that block is durable on storage.
    ///
    /// # Errors
    /// When it cannot be written: the log is open as before.
    pub fn close(&self, block: &[u8]) -> io::Result<()> {
        let shared = &self.shared;
        let mut block = block.to_vec();
        RemoteMark::remove_from(&mut block);
        {
            let _storage = shared.storage.lock().expect("no panic under this lock");
            // The server forgets when it hears of this; until then storage may still say that it has the log.
            if shared.lock().mode == Mode::Failed {
                return Err(io::Error::other("the journal was taken by somebody else, or storage failed"));
            }
            shared.write_block(0, &block)?;
            shared.medium.sync()?;
            shared.lock().close();
        }
        shared.tell();
        shared.disk.wake.wake();
        Ok(())
    }

    /// The guest is gone: its log is completed on storage, for the next kernel or for us to replay. The server is told
    /// that its copy is not needed.
    ///
    /// # Errors
    /// When that fails: storage then still says that the server has the log, or somebody else has taken it.
    pub fn settle(&self) -> io::Result<()> {
        let shared = &self.shared;
        let mut state = shared.lock();
        if state.mode == Mode::Closed {
            return Ok(());
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
        self.shared.lock().is_paused = is_paused;
        self.shared.tell();
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

    /// What was done with it.
    pub fn report(&self) -> RemoteReport {
        self.shared.counters.report(self.shared.lock().mode == Mode::Remote)
    }
}

impl Drop for RemoteLog {
    fn drop(&mut self) {
        self.shared.lock().is_shut_down = true;
        self.shared.work.notify_one();
    }
}
