//! The journal area of one VM: its control blocks (the paper's `JCB_list`), and what concerns a log as a whole. How they come and go is in
//! `lifetime`, what data-path threads call in `operations`, what is asked in `questions`, what is written into tables for who follows in
//! `notes`.
//!
//! Each log has a lock of its own (`logs`, which has the lock order). Data-path threads take it once a pass for what was committed, and for every
//! home write, its completion, and every read of a log block; the thread that answers faults takes it where the log has the page (`faults`). Nothing under it needs the guest, and
//! there is no I/O under it but the reads of [`JournalArea::show`], for a guest that mounts. What takes time has a begin and an end
//! ([`crate::Taking`]).

use crate::budget::Budget;
use crate::jcb::{Holding, VmJcb};
use crate::log::HeldLog;
use crate::logs::{Cell, Locked, LogId, Logs};
use crate::pages::{HotPages, Pages};
use crate::table::{Doubt, Opening, Tail};
use guest_memory::VmMemory;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What a log owes (`LOG_OP_QUERY`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owed {
    /// Whether the log is open.
    pub is_open: bool,
    /// Blocks still to be written home.
    pub blocks: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// Newest versions that are at their own place in the log on storage, for want of memory: recovery writes these home, too.
    pub stored_blocks: u64,
    /// Of those the ones that the host may write home: what the guest has written something else over is not among them.
    pub writable: u64,
    /// Whether it has to be materialised instead.
    pub materialise: bool,
}

/// What stands between an open log and its home blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotHome {
    /// The log is kept block for block, as it has features that only a kernel can replay, or is not what it seemed.
    Uninterpreted,
    /// A process that died left a transaction of which not everything is known.
    Torn,
    /// So many versions, or blocks that describe some, are at their own place in the log on storage, for want of memory.
    Stored(u64),
    /// Of so many versions nobody knows whether the guest has written something else over their home blocks: the process that knew has died,
    /// or an older write was under way when they were committed. The host writes none of these home, the guest does.
    Unknown(u64),
}

/// Where a committed version is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommittedVersion {
    /// It was held, and was copied out.
    Copied,
    /// In this home block.
    Home(u64),
    /// At its own place in the log on storage, for want of memory.
    Stored {
        /// There its first word is zero, and has to be put back.
        is_escaped: bool,
    },
    /// It is not the newest of its block any more, or nothing is known of it.
    Gone,
}

/// What a log has to give back under [`JournalArea::under_pressure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    /// Copied blocks: there are too many of them.
    Copies,
    /// Retained pages, too: somebody waits to write to one, and there is no memory to copy it to.
    Pages,
}

/// What an area takes of the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AreaMemory {
    /// All of it: tables, copied blocks, and what others have reserved who keep a log in memory.
    pub held_bytes: u64,
    /// The copied blocks: what becomes less when blocks go home.
    pub copied_bytes: u64,
}

/// Called when the area wants blocks written home: memory is short.
pub type Waker = Box<dyn Fn() + Send + Sync>;

/// What a table says of its log to a process that goes on with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Whether a guest has it open.
    pub is_open: bool,
    /// Nothing but its superblock was written since it was opened, or all of that is passed.
    pub is_empty: bool,
    /// Which opening of it that is, as storage may say it by now. Nothing if none was drawn.
    pub openings: Option<[Opening; 2]>,
    /// Storage says so durably: before, the guest was told nothing.
    pub is_marked: bool,
    /// Where it goes on outside, as soon as the outside says so itself.
    pub handed_over: Option<Tail>,
    /// It was being closed, and storage was about to say that it is empty.
    pub is_closing: bool,
    /// It was being recovered.
    pub is_recovering: bool,
    /// Its books were proven wrong: nobody here replays it.
    pub is_distrusted: bool,
    /// The first number that nothing has which was made durable beside it, if anything was.
    pub numbered: Option<u32>,
    /// What of storage has failed.
    pub doubt: Doubt,
}

/// The journal area of one VM.
pub struct JournalArea {
    pub(crate) pages: Pages,
    pub(crate) logs: Logs,
    pub(crate) budget: Budget,
    waker: OnceLock<Waker>,
    /// How often a log's books were found proven wrong, under its lock.
    proofs: AtomicU64,
    /// After so many of them there was no such log any more.
    proofs_settled: AtomicU64,
}

impl std::fmt::Debug for JournalArea {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalArea").finish_non_exhaustive()
    }
}

impl JournalArea {
    /// One without logs, that nobody asks to copy pages out yet ([`JournalArea::new`]).
    pub(crate) fn without_logs(memory: &Arc<VmMemory>, budget_bytes: u64) -> Self {
        JournalArea {
            pages: Pages::new(Arc::clone(memory)),
            logs: Logs::default(),
            budget: Budget::new(budget_bytes),
            waker: OnceLock::new(),
            proofs: AtomicU64::new(0),
            proofs_settled: AtomicU64::new(0),
        }
    }

    /// Chooses which blocks are copied from now on though they could stay in the guest's pages (for experiments).
    pub fn set_hot_pages(&self, rule: HotPages) {
        self.pages.set_rule(rule);
    }

    /// Who is told when blocks should be written home; set once.
    pub fn set_waker(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker();
        }
    }

    /// Does something with a log, under its lock. Nothing once it was forgotten: a guest can replace a file system while others of its requests
    /// are being routed to the log or have not ended.
    pub(crate) fn with<T>(&self, id: LogId, act: impl FnOnce(&mut VmJcb) -> T) -> Option<T> {
        let cell = self.logs.cell(id)?;
        self.locked(&cell, |jcb| (!cell.is_leaving()).then(|| act(jcb)))
    }

    pub(crate) fn locked<T>(&self, cell: &Cell, act: impl FnOnce(&mut Locked<'_>) -> T) -> T {
        cell.locked(&self.pages, act)
    }

    /// The same, but also with one that is only there for its home writes in flight.
    pub(crate) fn with_in_flight<T>(&self, id: LogId, act: impl FnOnce(&mut VmJcb) -> T) -> Option<T> {
        Some(self.locked(&*self.logs.cell(id)?, |jcb| act(jcb)))
    }

    /// Closes a log: it could not be opened, or is none any more. What it owes is dropped.
    pub fn close(&self, id: LogId) {
        self.with(id, |jcb| jcb.close_books(&self.pages));
    }

    /// The file system of a log has another size now.
    pub fn resize_home(&self, id: LogId, home_blocks: u64) {
        self.with(id, |jcb| jcb.resize_home(home_blocks));
    }

    /// From now on a log's blocks are held so.
    pub fn set_holding(&self, id: LogId, holding: Holding) {
        self.with(id, |jcb| jcb.holding = holding);
    }

    /// How many logs there are, with those that only wait for their last home writes to end: each is walked over for what the area does as a
    /// whole.
    pub fn log_count(&self) -> usize {
        self.logs.len()
    }

    /// The name that a log's files have, without the ending.
    pub fn name_of(&self, id: LogId) -> String {
        self.logs.cell(id).map(|cell| cell.files.name.clone()).unwrap_or_default()
    }

    /// Checks the invariants of every log; what is wrong, as a sentence. Costs time.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check(&self) -> Result<(), String> {
        self.logs.all().iter().try_for_each(|cell| cell.lock().check(&self.pages))
    }

    /// From now on, or no longer, every transaction that is accepted is told one by one ([`crate::Outcome::accepted`]). Their blocks can
    /// be read with [`JournalArea::look`] for as long as they are held.
    pub fn tell_accepted(&self, id: LogId, is_wanted: bool) {
        self.with(id, |jcb| {
            jcb.tells_accepted = is_wanted;
            jcb.accepted.clear();
        });
    }

    /// The disk itself proves the books of an open log wrong: homes are not where they were.
    pub fn contradict(&self, id: LogId, why: String) {
        self.with(id, |jcb| {
            if jcb.is_open() {
                jcb.distrust(why);
                self.look_for_contradiction(jcb);
            }
        });
    }

    /// Under the log's lock: see [`JournalArea::look_for_contradictions`].
    pub(crate) fn look_for_contradiction(&self, jcb: &VmJcb) {
        if jcb.contradiction.is_some() {
            self.proofs.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether some log's books may have been proven wrong; asked in every pass.
    pub fn has_contradiction(&self) -> bool {
        self.proofs.load(Ordering::SeqCst) != self.proofs_settled.load(Ordering::SeqCst)
    }

    /// What proved the books of a log wrong, and it is still here: it has to be taken away ([`JournalArea::take_distrusted`]).
    pub fn contradiction(&self, id: LogId) -> Option<String> {
        self.with(id, |jcb| jcb.contradiction.clone()).flatten()
    }

    /// Whether some log's books are proven wrong still: others were taken away, or closed by their guests.
    pub fn look_for_contradictions(&self) {
        // Never said before it is looked: others ask meanwhile. What is proven during the look counts on.
        let proofs = self.proofs.load(Ordering::SeqCst);
        if self.logs.find(|_, jcb| jcb.contradiction.as_ref().map(|_| ())).is_none() {
            self.proofs_settled.fetch_max(proofs, Ordering::SeqCst);
        }
    }

    /// The log as it is from moment to moment: for who reads it block by block, with I/O of his own between. Nothing if it was forgotten;
    /// one that is forgotten while it is read holds nothing from then on. A guest has the thread of another disk forget it when it likes.
    pub fn log_now(&self, id: LogId) -> Option<HeldLog<'_>> {
        Some(HeldLog::taken(&self.pages, self.logs.cell(id)?))
    }

    /// Lets somebody read the live log as recovery would, without changing anything. Nothing if it was forgotten.
    pub fn look<T>(&self, id: LogId, look: impl FnOnce(&mut HeldLog<'_>) -> T) -> Option<T> {
        self.with_in_flight(id, |jcb| look(&mut HeldLog::live(jcb, &self.pages)))
    }
}
