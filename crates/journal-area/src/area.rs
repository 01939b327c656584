//! The journal area of one VM: its control blocks (the paper's `JCB_list`) and the operations of its section 4.1.
//!
//! One lock. Data-path threads take it once a pass for what was committed, and for every home write, its completion, and
//! every read of a log block; the thread that answers faults once a fault. Nothing under it needs the guest, and there is no I/O
//! under it but the reads of [`JournalArea::show`], for a guest that mounts. What takes time has a begin and an end
//! ([`crate::Taking`]).

use crate::commit::{Accepted, LogWrite, Outcome};
use crate::error::Error;
use crate::home::{HomeWrite, HostWrite, Over};
use crate::inflight::Writer;
use crate::jcb::{Counters, Holding, LogShape, VmJcb};
use crate::location::{Location, Past};
use crate::log::HeldLog;
use crate::pages::{HotPages, Pages};
use crate::pool::Pool;
use crate::shown::Outside;
use crate::table::{Doubt, Opening, Table, Tail};
use crate::tail::SuperblockEffect;
use crate::taking::Taking;
use guest_memory::{CopyOnWrite, HostFile, MemorySlice, PageId, VmMemory};
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// So much a VM's logs copy at most of what they could retain (see [`HotPages::Lone`]): a commit of many small files, not a log full.
const COPIES_BYTES_MAX: u64 = 32 << 20;

/// Names a log within its VM's area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogId(pub usize);

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

#[derive(Debug)]
struct Inner {
    pages: Pages,
    /// Those that are there, by their numbers. A number is not used again, since whoever names a log that was forgotten must not find another;
    /// and a guest can have as many forgotten as it likes, which take nothing and are not walked over.
    logs: BTreeMap<usize, (VmJcb, Files)>,
    /// The next one's number.
    next_log: usize,
    /// Retained pages somebody wants to write to, and there was no memory to copy them to.
    starved: Vec<PageId>,
    /// The VM's own bound.
    budget_bytes: u64,
    /// Of it, what others have who keep a log in memory.
    reserved_bytes: u64,
    /// What the host leaves this VM at the moment, if that is bounded. It refuses nothing: blocks go home earlier.
    room_bytes: Option<u64>,
}

#[derive(Debug)]
struct Files {
    name: String,
    table: PathBuf,
    pool: PathBuf,
    /// The log was forgotten while home writes were in flight, which may read from its pool: it goes with the last one.
    is_leaving: bool,
}

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
    inner: Mutex<Inner>,
    waker: OnceLock<Waker>,
    /// Some log's books were proven wrong, and nobody has taken the log away yet.
    has_contradiction: AtomicBool,
}

impl std::fmt::Debug for JournalArea {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalArea").finish_non_exhaustive()
    }
}

impl Inner {
    /// A log. Nothing once it was forgotten: a guest can replace a file system while others of its requests are being
    /// routed to the log or have not ended.
    fn log(&mut self, id: LogId) -> Option<(&mut Pages, &mut VmJcb)> {
        let (jcb, _) = self.logs.get_mut(&id.0).filter(|(_, files)| !files.is_leaving)?;
        Some((&mut self.pages, jcb))
    }

    /// The same, but also one that is only there for its home writes in flight.
    fn log_in_flight(&mut self, id: LogId) -> Option<(&mut Pages, &mut VmJcb)> {
        let (jcb, _) = self.logs.get_mut(&id.0)?;
        Some((&mut self.pages, jcb))
    }

    fn add(&mut self, jcb: VmJcb, files: Files) -> LogId {
        let id = LogId(self.next_log);
        self.next_log += 1;
        self.logs.insert(id.0, (jcb, files));
        id
    }

    /// Lets go of a forgotten log whose last home write has ended.
    fn drop_if_left(&mut self, id: LogId) {
        if self.logs.get(&id.0).is_some_and(|(jcb, files)| files.is_leaving && jcb.in_flight.is_empty()) {
            self.logs.remove(&id.0);
        }
    }

    fn logs(&mut self) -> impl Iterator<Item = &mut VmJcb> {
        self.logs.values_mut().map(|(jcb, _)| jcb)
    }

    fn copy_out(&mut self, page: PageId) -> bool {
        let owner = self.logs.iter().find_map(|(number, (jcb, _))| {
            let position = jcb.position_of_page(page)?;
            Some((LogId(*number), position))
        });
        match owner {
            Some((id, position)) => {
                let copied = self.log_in_flight(id).is_some_and(|(pages, jcb)| {
                    pages.heat(page);
                    jcb.copy_page_out(pages, position, page)
                });
                if !copied {
                    // The page's content is nowhere else: whoever wants to write to it waits.
                    if !self.starved.contains(&page) {
                        log::error!(
                            "no memory to copy a protected page to; its writer waits until blocks are written home"
                        );
                        self.starved.push(page);
                    }
                    return false;
                }
            }
            // Protected and not needed: with it go all the others (the paper's figure 3).
            None => self.pages.let_loose_go(),
        }
        self.pages.let_go(page);
        true
    }

    /// Memory may have become free: answers those who wait for some.
    fn feed_starved(&mut self) {
        for page in std::mem::take(&mut self.starved) {
            self.copy_out(page);
        }
    }

    fn memory_bytes(&mut self) -> u64 {
        self.logs().map(|jcb| jcb.area_bytes() + jcb.pool.memory_bytes()).sum()
    }

    fn held_bytes(&mut self) -> u64 {
        self.memory_bytes() + self.reserved_bytes
    }

    /// Whether blocks have to go home to make room: the VM's own bound is passed, or what the host leaves it.
    /// What was kept though nothing is in it goes first.
    fn is_over(&mut self) -> bool {
        let most = self.most_bytes();
        self.held_bytes() > most && (!self.give_back_spares() || self.held_bytes() > most)
    }

    /// Gives back what is kept for later. Says whether there was any.
    fn give_back_spares(&mut self) -> bool {
        let mut is_any = false;
        for jcb in self.logs() {
            is_any |= jcb.pool.give_back_spares();
        }
        is_any
    }

    fn most_bytes(&self) -> u64 {
        self.room_bytes.map_or(self.budget_bytes, |room| room.min(self.budget_bytes))
    }

    /// How much may be copied for nothing but speed: half of what is left at most, so that what has to be copied finds room.
    fn allow_copies(&mut self) {
        let spares: u64 = self.logs().map(|jcb| jcb.pool.spare_bytes()).sum();
        let most = self.most_bytes().saturating_sub(self.held_bytes() - spares);
        let copied: u64 = self.logs().map(|jcb| jcb.pool.used_bytes()).sum();
        self.pages.allow_copies((most / 2).min(COPIES_BYTES_MAX.saturating_sub(copied)));
    }
}

impl JournalArea {
    /// The area of the VM with this memory, which copies pages out through it from now on. `budget_bytes` bounds tables
    /// and copies; above it the largest log's oldest owed blocks are written home.
    pub fn new(memory: &Arc<VmMemory>, budget_bytes: u64) -> Arc<Self> {
        let inner = Inner {
            pages: Pages::new(Arc::clone(memory)),
            logs: BTreeMap::new(),
            next_log: 0,
            starved: Vec::new(),
            budget_bytes,
            reserved_bytes: 0,
            room_bytes: None,
        };
        let area = Arc::new(JournalArea {
            inner: Mutex::new(inner),
            waker: OnceLock::new(),
            has_contradiction: AtomicBool::new(false),
        });
        memory.set_copy_on_write(Arc::new(AreaCopyOnWrite(Arc::downgrade(&area))));
        area
    }

    /// Chooses which blocks are copied from now on though they could stay in the guest's pages (for experiments).
    pub fn set_hot_pages(&self, rule: HotPages) {
        self.lock().pages.set_rule(rule);
    }

    /// Who is told when blocks should be written home; set once.
    pub fn set_waker(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under the area's lock")
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker();
        }
    }

    /// `LOG_OP_INIT`: makes the control block of a log, closed, with its two files in `directory`. `own_blocks` are the
    /// blocks of the file system that the log itself takes: a tag that names one of them is not a version of anything.
    ///
    /// # Errors
    /// When the files cannot be made.
    pub fn make_log(
        &self,
        directory: &Path,
        name: &str,
        shape: LogShape,
        holding: Holding,
        own_blocks: Vec<Range<u64>>,
    ) -> Result<LogId, Error> {
        let files = Files {
            name: name.to_owned(),
            table: directory.join(format!("{name}.table")),
            pool: directory.join(format!("{name}.pool")),
            is_leaving: false,
        };
        let table = Table::create(&files.table, shape.block_bytes, shape.log_blocks)?;
        let pool = Pool::create(&files.pool, shape.block_bytes, shape.log_blocks)?;
        let mut inner = self.lock();
        Ok(inner.add(VmJcb::new(shape, holding, own_blocks, table, pool), files))
    }

    /// The same of a log whose files an earlier process left in `directory`: goes on with it as it is. The guest's memory has to be
    /// mapped as it was, and nothing of the guest may run that could fault or ask before this returns.
    ///
    /// # Errors
    /// When the files are not there, or contradict themselves: nothing was changed.
    pub fn adopt_log(
        &self,
        directory: &Path,
        name: &str,
        shape: LogShape,
        holding: Holding,
        own_blocks: Vec<Range<u64>>,
    ) -> Result<LogId, Error> {
        let files = Files {
            name: name.to_owned(),
            table: directory.join(format!("{name}.table")),
            pool: directory.join(format!("{name}.pool")),
            is_leaving: false,
        };
        let (table, pool) = (HostFile::open(&files.table)?, HostFile::open(&files.pool)?);
        let mut inner = self.lock();
        let found = ((table, files.table.as_path()), (pool, files.pool.as_path()));
        let jcb = VmJcb::rebuild(&mut inner.pages, shape, holding, own_blocks, found.0, found.1)?;
        self.look_for_contradiction(&jcb);
        Ok(inner.add(jcb, files))
    }

    /// What the table of a log that was adopted says of it.
    pub fn adopted(&self, id: LogId) -> Option<Adopted> {
        let mut inner = self.lock();
        let (_, jcb) = inner.log(id)?;
        Some(Adopted {
            is_open: jcb.is_open(),
            is_empty: !jcb.is_open()
                || (1..jcb.shape.log_blocks).all(|position| jcb.location(position) == Location::None),
            openings: jcb.table.opening(),
            is_marked: jcb.table.is_marked(),
            handed_over: jcb.table.handed_over(),
            is_closing: jcb.table.is_closing(),
            is_recovering: jcb.table.is_recovering(),
            is_distrusted: jcb.table.is_distrusted(),
            numbered: jcb.table.numbered(),
            doubt: jcb.table.doubt(),
        })
    }

    /// Its guest has said what the log is since it was recovered.
    pub fn forget_recovering(&self, id: LogId) {
        if let Some((_, jcb)) = self.lock().log(id)
            && !jcb.is_open()
            && jcb.table.is_recovering()
        {
            jcb.table.set_recovering(false);
        }
    }

    /// Whether anything committed is in pages of the guest, and nowhere else.
    pub fn retains_pages(&self) -> bool {
        self.lock().logs().any(|jcb| jcb.retains_pages())
    }

    /// A log that was to be handed over, or was once, is all here.
    pub fn forget_hand_over(&self, id: LogId) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.table.set_handed_over(None);
        }
    }

    /// Storage is about to say that a log is empty, because its guest closes it, and all of it is home; or that was given up.
    pub fn note_closing(&self, id: LogId, is_closing: bool) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.table.set_closing(is_closing);
        }
    }

    /// Whether something was written into a log while it was closed, which no kernel does.
    pub fn is_foreign(&self, id: LogId) -> bool {
        self.lock().log(id).is_some_and(|(_, jcb)| jcb.table.is_foreign())
    }

    /// Says so, or that it is empty again.
    pub fn set_foreign(&self, id: LogId, is_foreign: bool) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.table.set_foreign(is_foreign);
        }
    }

    /// `LOG_OP_CLEANUP`: forgets a log and removes its files. What it owed is lost unless it was recovered before.
    /// Whoever still names it finds a log that is closed and holds nothing.
    pub fn forget_log(&self, id: LogId) {
        let mut inner = self.lock();
        let Inner { pages, logs, .. } = &mut *inner;
        let Some((jcb, files)) = logs.get_mut(&id.0) else { return };
        jcb.close_books(pages);
        files.is_leaving = true;
        for path in [&files.table, &files.pool] {
            if let Err(error) = std::fs::remove_file(path) {
                log::warn!("removing {} failed: {error}", path.display());
            }
        }
        pages.let_loose_go();
        inner.drop_if_left(id);
        inner.feed_starved();
    }

    /// Storage is about to say that this opening of a log is elsewhere, or has said so.
    pub fn note_opening(&self, id: LogId, opening: &Opening, is_done: bool) {
        let mut inner = self.lock();
        if let Some((_, jcb)) = inner.log(id) {
            if is_done {
                jcb.table.set_opening_done(opening);
            } else {
                jcb.table.set_opening_meant(opening);
            }
        }
    }

    /// What is made durable beside a log has numbers below this one, from now on; nothing: none is, in a log that is just opened.
    pub fn note_numbered(&self, id: LogId, next: Option<u32>) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.table.set_numbered(next);
        }
    }

    /// Changes what whoever goes on has to know of storage that has failed.
    pub fn note_doubt(&self, id: LogId, change: impl FnOnce(&mut Doubt)) {
        if let Some((_, jcb)) = self.lock().log(id) {
            let mut doubt = jcb.table.doubt();
            change(&mut doubt);
            if doubt != jcb.table.doubt() {
                jcb.table.set_doubt(doubt);
            }
        }
    }

    /// What storage has said of this opening is durable: its guest may be told that the log is open.
    pub fn note_marked(&self, id: LogId) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.table.set_marked();
        }
    }

    /// Closes a log: it could not be opened, or is none any more. What it owes is dropped.
    pub fn close(&self, id: LogId) {
        let mut inner = self.lock();
        if let Some((pages, jcb)) = inner.log(id) {
            jcb.close_books(pages);
        }
    }

    /// The file system of a log has another size now.
    pub fn resize_home(&self, id: LogId, home_blocks: u64) {
        let mut inner = self.lock();
        if let Some((_, jcb)) = inner.log(id) {
            jcb.resize_home(home_blocks);
        }
    }

    /// The guest writes its log's superblock.
    ///
    /// # Errors
    /// When there is no memory to hold it: a log that it opens is not to be held then, and has to be closed here ([`JournalArea::close`]).
    /// In an open one that can only be where another process goes on, with features or an error that the superblock did not say before.
    pub fn superblock_written(&self, id: LogId, block: &[u8]) -> Result<SuperblockEffect, Error> {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return Ok(SuperblockEffect::NotALog) };
        let effect = jcb.superblock_written(pages, block);
        jcb.note_memory();
        self.look_for_contradiction(jcb);
        if inner.pages.has_many_loose() {
            inner.pages.let_loose_go();
        }
        inner.feed_starved();
        effect
    }

    /// Whether the open log would end if its guest wrote this superblock, because it is another log's or none: whoever keeps something
    /// beside the log has to end that first.
    pub fn is_superblock_foreign(&self, id: LogId, block: &[u8]) -> bool {
        self.lock().log(id).is_none_or(|(_, jcb)| jcb.is_superblock_foreign(block))
    }

    /// `LOG_OP_MPROTECT`: holds a batch of log writes of one pass and accepts the transactions it completes. On return
    /// every retained page is protected, so the requests may complete.
    pub fn hold(&self, id: LogId, writes: &[LogWrite]) -> Outcome {
        let mut inner = self.lock();
        inner.allow_copies();
        let Some((pages, jcb)) = inner.log(id) else {
            return Outcome { no_memory: (0..writes.len()).collect(), ..Outcome::default() };
        };
        let outcome = jcb.hold(pages, writes);
        self.look_for_contradiction(jcb);
        if inner.pages.has_many_loose() {
            inner.pages.let_loose_go();
        }
        let over = inner.is_over();
        drop(inner);
        if over {
            self.wake();
        }
        outcome
    }

    /// A log block for which there was no memory has reached its own place on storage. Gives the transactions that it completed,
    /// for who asked for them.
    pub fn stored(&self, id: LogId, position: u32) -> Vec<Accepted> {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return Vec::new() };
        jcb.stored(pages, position);
        self.look_for_contradiction(jcb);
        std::mem::take(&mut jcb.accepted)
    }

    /// From now on, or no longer, every transaction that is accepted is told one by one ([`Outcome::accepted`]). Their blocks can
    /// be read with [`JournalArea::look`] for as long as they are held.
    pub fn tell_accepted(&self, id: LogId, is_wanted: bool) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.tells_accepted = is_wanted;
            jcb.accepted.clear();
        }
    }

    /// The disk itself proves the books of an open log wrong: homes are not where they were.
    pub fn contradict(&self, id: LogId, why: String) {
        if let Some((_, jcb)) = self.lock().log(id)
            && jcb.is_open()
        {
            jcb.distrust(why);
            self.look_for_contradiction(jcb);
        }
    }

    fn look_for_contradiction(&self, jcb: &VmJcb) {
        if jcb.contradiction.is_some() {
            self.has_contradiction.store(true, Ordering::Release);
        }
    }

    /// Whether some log's books may have been proven wrong; asked in every pass.
    pub fn has_contradiction(&self) -> bool {
        self.has_contradiction.load(Ordering::Acquire)
    }

    /// What proved the books of a log wrong, and it is still here: it has to be taken away ([`JournalArea::take_distrusted`]).
    pub fn contradiction(&self, id: LogId) -> Option<String> {
        self.lock().log(id).and_then(|(_, jcb)| jcb.contradiction.clone())
    }

    /// Begins to take a log away whose books were proven wrong, block for block, to its own place. Nothing while a home write of
    /// the host's is in flight, which must not land after what the guest writes there past us from then on.
    pub fn take_distrusted(&self, id: LogId) -> Option<Taking<'_>> {
        self.begin_taking(id, |jcb| {
            jcb.contradiction.is_some()
                && jcb.absorbed.is_empty()
                && !jcb.in_flight.overlaps(&(0..u64::MAX), Some(Writer::Host))
        })
    }

    fn begin_taking(&self, id: LogId, may_begin: impl FnOnce(&VmJcb) -> bool) -> Option<Taking<'_>> {
        let mut inner = self.lock();
        let (_, jcb) = inner.log(id)?;
        if jcb.is_taken || !may_begin(jcb) {
            return None;
        }
        jcb.is_taken = true;
        Some(Taking::new(self, id, jcb.cursor))
    }

    pub(crate) fn give_up_taking(&self, id: LogId) {
        if let Some((_, jcb)) = self.lock().log_in_flight(id) {
            jcb.is_taken = false;
            if jcb.is_open() {
                jcb.table.set_recovering(false);
            }
        }
    }

    pub(crate) fn end_taking(&self, id: LogId, switch: impl FnOnce()) {
        let mut inner = self.lock();
        switch();
        let Some((pages, jcb)) = inner.log_in_flight(id) else { return };
        jcb.is_taken = false;
        jcb.close_books(pages);
        inner.pages.let_loose_go();
        inner.feed_starved();
    }

    /// Whether some log's books are proven wrong still: others were taken away, or closed by their guests.
    pub fn look_for_contradictions(&self) {
        let mut inner = self.lock();
        let is_left = inner.logs().any(|jcb| jcb.contradiction.is_some());
        self.has_contradiction.store(is_left, Ordering::Release);
    }

    /// Whether the log is open.
    pub fn is_open(&self, id: LogId) -> bool {
        self.lock().log(id).is_some_and(|(_, jcb)| jcb.is_open())
    }

    /// Copies a log block into `buffer` as the guest has to find it, so that it can replay the log itself; see
    /// `shown`. False when the log is not open: it is as storage has it.
    ///
    /// # Errors
    /// Those of `outside`.
    pub fn show(&self, id: LogId, position: u32, buffer: &mut [u8], outside: &mut dyn Outside) -> io::Result<bool> {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id).filter(|(_, jcb)| jcb.is_open()) else { return Ok(false) };
        jcb.show(pages, position, buffer, outside)?;
        Ok(true)
    }

    /// A guest's home write begins; see [`HomeWrite`].
    pub fn home_write_begins(
        &self,
        id: LogId,
        blocks: Range<u64>,
        payload: &[Option<MemorySlice>],
        over: &Over<'_>,
    ) -> HomeWrite {
        let mut inner = self.lock();
        match inner.log(id) {
            Some((pages, jcb)) => jcb.home_write_begins(pages, blocks, payload, over),
            // No operation has this number, so its end is nobody's.
            None => HomeWrite::Go { operation: usize::MAX, replaced: Vec::new(), carried: Vec::new() },
        }
    }

    /// The guest has asked just now to write `blocks`, over the committed versions of those that it covers whole, and waits: whoever
    /// goes on after a death knows it when it is asked again.
    pub fn home_write_asked(&self, id: LogId, blocks: &Range<u64>, whole: &Range<u64>) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.past_asked(blocks, whole);
        }
    }

    /// A home write has ended; with `ok` it reached storage.
    pub fn home_write_ended(&self, id: LogId, operation: usize, ok: bool) {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log_in_flight(id) else { return };
        jcb.home_write_ended(pages, operation, ok);
        inner.drop_if_left(id);
        inner.feed_starved();
        if inner.pages.has_many_loose() {
            inner.pages.let_loose_go();
        }
    }

    /// The committed version of `block`, which `content` is, has to be in its own place in the log on storage, because there is no memory
    /// to hold it. Gives its log block and transaction, and makes `content` what the log has there. Nothing where none is only at home.
    pub fn place_of_version(&self, id: LogId, block: u64, content: &mut [u8]) -> Option<(u32, u32)> {
        self.lock().log(id).and_then(|(_, jcb)| jcb.place_of_version(block, content))
    }

    /// It has been written there.
    pub fn restored_in_place(&self, id: LogId, block: u64, place: (u32, u32)) {
        if let Some((pages, jcb)) = self.lock().log(id) {
            jcb.restored_in_place(pages, block, place);
        }
    }

    /// Holds the committed version of `block` again, which `content` is: its home block is about to be overwritten.
    ///
    /// # Errors
    /// When there is no memory for it: it has to be in the log's own place on storage before the write goes on
    /// ([`JournalArea::place_of_version`]).
    pub fn restore(&self, id: LogId, block: u64, content: &[u8]) -> Result<(), Error> {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return Ok(()) };
        if jcb.restore(pages, block, content) { Ok(()) } else { Err(Error::NoMemory { what: "restored block" }) }
    }

    /// The guest discarded `blocks`.
    pub fn discarded(&self, id: LogId, blocks: Range<u64>) {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return };
        jcb.discarded(pages, blocks);
        inner.feed_starved();
    }

    /// Up to `count` of the oldest owed blocks that the host may write home now; each has to be ended like a guest's.
    pub fn host_writes(&self, id: LogId, count: usize, copied_only: bool) -> Vec<(usize, HostWrite)> {
        self.host_writes_where(id, count, copied_only, &|_| true)
    }

    /// The same of those home blocks that `may_be` lets be written.
    pub fn host_writes_where(
        &self,
        id: LogId,
        count: usize,
        copied_only: bool,
        may_be: &dyn Fn(u64) -> bool,
    ) -> Vec<(usize, HostWrite)> {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return Vec::new() };
        jcb.host_writes(pages, count, copied_only, may_be)
    }

    /// Takes a guest's home write in, which then is not to be sent to storage, and may be answered: each of `blocks` is
    /// given just as it is held as its newest version, of a transaction not before `tail`. At most `most` blocks of a log are absorbed at a
    /// time. False where it cannot be, and nothing is changed.
    ///
    /// From then on homes have to be shown ([`JournalArea::read_absorbed`]), the tail must not pass them
    /// ([`JournalArea::has_absorbed_before`]), and the host has to write them home ([`JournalArea::absorbed_writes`]).
    pub fn absorb(
        &self,
        id: LogId,
        blocks: &Range<u64>,
        payload: &[Option<MemorySlice>],
        tail: Option<u32>,
        most: usize,
    ) -> bool {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return false };
        let is_absorbed = jcb.absorb(pages, blocks, payload, tail, most);
        // Pages were let go.
        if inner.pages.has_many_loose() {
            inner.pages.let_loose_go();
        }
        inner.feed_starved();
        let over = inner.is_over();
        drop(inner);
        if over {
            self.wake();
        }
        is_absorbed
    }

    /// A guest's home write of `blocks` that storage has already, durably: each is given just as it is held as its newest version, and
    /// `at_home` says for each which transaction and log block its home has. They count as written home; nothing has to be sent.
    /// False where one of them is anything else, and nothing is changed.
    pub fn is_home_already(
        &self,
        id: LogId,
        blocks: &Range<u64>,
        payload: &[Option<MemorySlice>],
        at_home: &[(u32, u32)],
    ) -> bool {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return false };
        let is_home = jcb.is_home_already(pages, blocks, payload, at_home);
        if inner.pages.has_many_loose() {
            inner.pages.let_loose_go();
        }
        inner.feed_starved();
        is_home
    }

    /// What is absorbed of a log: home block, transaction and log block of each version.
    pub fn absorbed_versions(&self, id: LogId) -> Vec<(u64, u32, u32)> {
        self.lock().log(id).map_or_else(Vec::new, |(_, jcb)| jcb.absorbed_versions())
    }

    /// Storage has these absorbed versions at home, durably: they count as written home, and nothing has to be sent. Those that are
    /// not absorbed any more, or not the newest, are left as they are. Returns how many were let go.
    pub fn absorbed_are_home(&self, id: LogId, versions: &[(u64, u32, u32)]) -> u64 {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return 0 };
        let released = jcb.absorbed_are_home(pages, versions);
        if inner.pages.has_many_loose() {
            inner.pages.let_loose_go();
        }
        inner.feed_starved();
        released
    }

    /// How many blocks of a log are absorbed.
    pub fn absorbed(&self, id: LogId) -> usize {
        self.lock().log(id).map_or(0, |(_, jcb)| jcb.absorbed.len())
    }

    /// Whether one of these blocks is.
    pub fn has_absorbed(&self, id: LogId, blocks: &Range<u64>) -> bool {
        self.lock().log(id).is_some_and(|(_, jcb)| jcb.has_absorbed(blocks))
    }

    /// Whether one is of a transaction before this one, with which the log shall begin.
    pub fn has_absorbed_before(&self, id: LogId, tail: u32) -> bool {
        self.lock().log(id).is_some_and(|(_, jcb)| jcb.has_absorbed_before(tail))
    }

    /// Copies out what an absorbed block is for its guest; false where it is as storage has it.
    pub fn read_absorbed(&self, id: LogId, block: u64, buffer: &mut [u8]) -> bool {
        self.lock().log(id).is_some_and(|(pages, jcb)| jcb.read_absorbed(pages, block, buffer))
    }

    /// Up to `count` absorbed blocks that are wanted, by block and transaction, and that the host has to write home now; each has to be
    /// ended like a guest's.
    pub fn absorbed_writes(
        &self,
        id: LogId,
        count: usize,
        is_wanted: &dyn Fn(u64, u32) -> bool,
    ) -> Vec<(usize, HostWrite)> {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return Vec::new() };
        jcb.absorbed_writes(pages, count, is_wanted)
    }

    /// Takes so many bytes of the budget for somebody else who keeps a log in memory; says whether they were there.
    pub fn reserve(&self, bytes: u64) -> bool {
        let mut inner = self.lock();
        // Not what the host leaves it at the moment: a log that finds no room here stays on storage for long.
        let is_there = inner.held_bytes() + bytes <= inner.budget_bytes
            || inner.give_back_spares() && inner.held_bytes() + bytes <= inner.budget_bytes;
        if is_there {
            inner.reserved_bytes += bytes;
        }
        is_there
    }

    /// The same for what is in memory already, and was taken of another process's budget: as far as there is any. Gives how much.
    pub fn reserve_again(&self, bytes: u64) -> u64 {
        let mut inner = self.lock();
        let taken = bytes.min(inner.budget_bytes - inner.reserved_bytes);
        inner.reserved_bytes += taken;
        taken
    }

    /// A retained page of a log that somebody waits to write to, since there is no memory to copy it to: its log block, and what is in it.
    pub fn starved(&self, id: LogId) -> Option<(u32, PageId, Vec<u8>)> {
        let mut inner = self.lock();
        inner.feed_starved();
        let starved = inner.starved.clone();
        let (pages, jcb) = inner.log(id).filter(|(_, jcb)| !jcb.is_taken)?;
        starved.into_iter().find_map(|page| {
            let position = jcb.position_of_page(page)?;
            let mut content = vec![0; jcb.shape.block_bytes as usize];
            jcb.read_held(pages, position, &mut content).then_some((position, page, content))
        })
    }

    /// That has been written to its own place in the log on storage: if the log has just this there still, the page is let go. Says whether
    /// it is.
    pub fn starved_is_stored(&self, id: LogId, (position, page, content): &(u32, PageId, Vec<u8>)) -> bool {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return false };
        let mut held = vec![0; content.len()];
        let is_there = !jcb.is_taken
            && jcb.location(*position) == Location::Guest(*page)
            && jcb.read_held(pages, *position, &mut held)
            && held == *content;
        if is_there {
            jcb.set_location(pages, *position, Location::Storage);
        }
        inner.feed_starved();
        is_there
    }

    /// Gives back what was reserved.
    pub fn release(&self, bytes: u64) {
        let mut inner = self.lock();
        inner.reserved_bytes = inner.reserved_bytes.saturating_sub(bytes);
    }

    /// What the host leaves this VM from now on; nothing: as much as its own budget. Above it the host writes copied blocks home, as
    /// above the budget. Nothing is refused for it, so a guest is never told of an error.
    pub fn set_room(&self, room_bytes: Option<u64>) {
        let over = {
            let mut inner = self.lock();
            inner.room_bytes = room_bytes;
            inner.is_over()
        };
        if over {
            self.wake();
        }
    }

    /// A second has passed: what was copied to, and nothing was in for some time, goes back to the host bit by bit.
    pub fn rest(&self) {
        self.lock().logs().for_each(|jcb| jcb.pool.rest());
    }

    /// What the host leaves this VM, if that is bounded at the moment.
    pub fn room_bytes(&self) -> Option<u64> {
        self.lock().room_bytes
    }

    /// What it takes of the host's memory.
    pub fn memory(&self) -> AreaMemory {
        let mut inner = self.lock();
        let copied_bytes = inner.logs().map(|jcb| jcb.pool.memory_bytes()).sum();
        AreaMemory { held_bytes: inner.held_bytes(), copied_bytes }
    }

    /// The log that has to give memory back, and what of it. If somebody waits to write to a retained page, the log that the
    /// page belongs to: with nothing copied, only a write home of the page itself lets it go. If tables and copies take more
    /// than the budget, or than the host leaves the VM ([`JournalArea::set_room`]), the largest log of those that have something to write home.
    pub fn under_pressure(&self) -> Option<(LogId, Pressure)> {
        let mut inner = self.lock();
        inner.feed_starved();
        if let Some(page) = inner.starved.first().copied() {
            let is_owner = |(jcb, files): &(VmJcb, Files)| !files.is_leaving && jcb.position_of_page(page).is_some();
            if let Some((owner, _)) = inner.logs.iter().find(|(_, log)| is_owner(log)) {
                return Some((LogId(*owner), Pressure::Pages));
            }
        }
        if !inner.is_over() {
            return None;
        }
        let largest = inner
            .logs
            .iter()
            .filter(|(_, (_, files))| !files.is_leaving)
            .filter_map(|(number, (jcb, _))| {
                // Only its guest can do anything about the others.
                let can_write = !jcb.is_torn && jcb.contradiction.is_none() && !jcb.table.is_materialise();
                can_write.then_some((jcb.pool.used_bytes(), *number))
            })
            .max()?;
        (largest.0 > 0).then_some((LogId(largest.1), Pressure::Copies))
    }

    /// Whether the host is writing blocks of a log home.
    pub fn has_host_writes_in_flight(&self, id: LogId) -> bool {
        self.lock().log_in_flight(id).is_some_and(|(_, jcb)| jcb.in_flight.has_host_writes())
    }

    /// Whether a home write, the guest's or the host's, is on its way to storage.
    pub fn has_home_writes_in_flight(&self, id: LogId) -> bool {
        self.lock().log_in_flight(id).is_some_and(|(_, jcb)| !jcb.in_flight.is_empty())
    }

    /// `LOG_OP_QUERY`: what a log owes.
    pub fn owed(&self, id: LogId) -> Owed {
        let mut inner = self.lock();
        let Some((_, jcb)) = inner.log(id) else { return Owed::default() };
        // What is kept block for block is not for us to write home.
        let blocks = if jcb.contradiction.is_some() { 0 } else { jcb.owed_blocks() };
        Owed {
            is_open: jcb.is_open(),
            blocks,
            bytes: blocks * u64::from(jcb.shape.block_bytes),
            stored_blocks: jcb.stored_versions,
            writable: if jcb.contradiction.is_some() { 0 } else { jcb.writable_blocks() },
            materialise: jcb.table.is_materialise(),
        }
    }

    /// Whether the guest has written something past the journal of an open log over which a replay would write an older version: there,
    /// or perhaps, where an earlier worker died meanwhile.
    pub fn is_written_past(&self, id: LogId) -> bool {
        let is_any = |jcb: &VmJcb| jcb.is_open() && jcb.written_past().iter().any(|(_, past)| past.is_some());
        self.lock().log(id).is_some_and(|(_, jcb)| is_any(jcb))
    }

    /// Whether there is such a block of which nobody knows what is newer, it or the journal's version.
    pub fn is_past_unknown(&self, id: LogId) -> bool {
        self.lock().log(id).is_some_and(|(_, jcb)| {
            jcb.is_open() && jcb.written_past().iter().any(|(_, past)| *past == Some(Past::Begun))
        })
    }

    /// Why the home blocks of an open log are not all that its guest has committed, though the host has nothing left to write there.
    pub fn why_not_home(&self, id: LogId) -> Option<NotHome> {
        let mut inner = self.lock();
        let (pages, jcb) = inner.log(id).filter(|(_, jcb)| jcb.is_open())?;
        if jcb.table.is_materialise() || jcb.contradiction.is_some() {
            Some(NotHome::Uninterpreted)
        } else if jcb.is_torn {
            Some(NotHome::Torn)
        } else {
            let stored = Some(jcb.stored_or_unread(pages)).filter(|blocks| *blocks > 0).map(NotHome::Stored);
            stored.or_else(|| {
                Some(jcb.versions_unknown().len() as u64).filter(|blocks| *blocks > 0).map(NotHome::Unknown)
            })
        }
    }

    /// Begins to bring an open log home whose guest is gone (the paper's `LOG_OP_RECOVER`). Nothing while a home write is in
    /// flight, or where it is being taken already.
    pub fn take_for_recovery(&self, id: LogId) -> Option<Taking<'_>> {
        let taking = self.begin_taking(id, |jcb| jcb.in_flight.is_empty())?;
        if let Some((_, jcb)) = self.lock().log(id)
            && jcb.is_open()
        {
            jcb.table.set_recovering(true);
        }
        Some(taking)
    }

    /// Begins to hand an open log over to somebody who keeps it elsewhere from now on: what is owed goes home, and the
    /// transaction that the guest is in the midst of goes on there ([`Taking::cursor`]). Nothing, for now or for good, while a
    /// home write is in flight or one is absorbed, or where the log is not open or is kept block for block.
    pub fn take_for_hand_over(&self, id: LogId) -> Option<Taking<'_>> {
        self.begin_taking(id, |jcb| {
            // What is absorbed the guest's tail may pass there as soon as it likes.
            jcb.is_open() && !jcb.table.is_materialise() && jcb.in_flight.is_empty() && jcb.absorbed.is_empty()
        })
    }

    /// The log as it is from moment to moment: for who reads it block by block, with I/O of his own between.
    pub fn log_now(&self, id: LogId) -> HeldLog<'_> {
        HeldLog::taken(self, id)
    }

    /// From now on a log's blocks are held so.
    pub fn set_holding(&self, id: LogId, holding: Holding) {
        if let Some((_, jcb)) = self.lock().log(id) {
            jcb.holding = holding;
        }
    }

    /// Lets somebody read the live log as recovery would, without changing anything.
    ///
    /// # Panics
    /// If the log was forgotten.
    pub fn look<T>(&self, id: LogId, look: impl FnOnce(&mut HeldLog<'_>) -> T) -> T {
        let mut inner = self.lock();
        let (pages, jcb) = inner.log(id).expect("a log is looked at before it is forgotten");
        look(&mut HeldLog::live(jcb, pages))
    }

    /// Names the guest pages that must never be retained: those of rings.
    pub fn set_excluded_pages(&self, excluded: HashSet<PageId>) {
        let mut inner = self.lock();
        let retained: Vec<PageId> =
            excluded.iter().copied().filter(|page| inner.pages.memory().is_retained(*page)).collect();
        inner.pages.set_excluded(excluded);
        for page in retained {
            inner.copy_out(page);
        }
    }

    /// Copies a committed version out as it belongs home, or says where it is. `sequence` is its transaction's.
    pub fn version(&self, id: LogId, position: u32, sequence: u32, buffer: &mut [u8]) -> CommittedVersion {
        let mut inner = self.lock();
        let Some((pages, jcb)) = inner.log(id) else { return CommittedVersion::Gone };
        if !jcb.is_newest(position) || jcb.sequence_of(position) != Some(sequence) {
            return CommittedVersion::Gone;
        }
        match jcb.location(position) {
            Location::Home => jcb.home_of(pages, position).map_or(CommittedVersion::Gone, CommittedVersion::Home),
            Location::Storage => CommittedVersion::Stored { is_escaped: jcb.is_escaped(position) },
            _ if jcb.read_version(pages, position, buffer) => CommittedVersion::Copied,
            _ => CommittedVersion::Gone,
        }
    }

    /// The number of the next transaction of an open log.
    pub fn next_sequence(&self, id: LogId) -> Option<u32> {
        self.lock().log(id).filter(|(_, jcb)| jcb.is_open()).map(|(_, jcb)| jcb.cursor.sequence)
    }

    /// The newest committed versions that are not at home: transaction, home block, log block; by transaction, the oldest first.
    pub fn versions_owed(&self, id: LogId) -> Vec<(u32, u64, u32)> {
        let mut inner = self.lock();
        let Some((_, jcb)) = inner.log(id) else { return Vec::new() };
        jcb.versions_owed()
    }

    /// Of [`JournalArea::versions_owed`] the home blocks that the guest has written past its journal since, or may have; nothing where no
    /// more is known.
    pub fn written_past(&self, id: LogId) -> Vec<(u64, Option<Past>)> {
        let mut inner = self.lock();
        inner.log(id).map(|(_, jcb)| jcb.written_past()).unwrap_or_default()
    }

    /// Those of which [`NotHome::Unknown`] speaks: home block, and content as it belongs there. Nothing where that is more than `bytes_max`, or
    /// the books do not say what is committed. What a recovery would write home at this moment is these, beside what is at home.
    pub fn versions_unknown(&self, id: LogId, bytes_max: u64) -> Option<Vec<(u64, Vec<u8>)>> {
        let mut inner = self.lock();
        let (pages, jcb) = inner.log(id)?;
        let unknown = jcb.versions_unknown();
        let is_too_much = unknown.len() as u64 * u64::from(jcb.shape.block_bytes) > bytes_max;
        if is_too_much || jcb.contradiction.is_some() || jcb.is_torn || jcb.table.is_materialise() {
            return None;
        }
        let content = |(block, position)| {
            let mut content = vec![0; jcb.shape.block_bytes as usize];
            jcb.read_version(pages, position, &mut content).then_some((block, content))
        };
        unknown.into_iter().map(content).collect()
    }

    /// The newest committed versions that are at home, likewise.
    pub fn versions_at_home(&self, id: LogId) -> Vec<(u32, u64, u32)> {
        let mut inner = self.lock();
        let Some((_, jcb)) = inner.log(id) else { return Vec::new() };
        jcb.versions_at_home()
    }

    /// The newest committed versions of these blocks, wherever they are: home block, transaction, log block, and whether it is written down
    /// that the guest has asked to write over it.
    pub fn newest_versions(&self, id: LogId, blocks: &Range<u64>) -> Vec<(u64, u32, u32, bool)> {
        let mut inner = self.lock();
        inner.log(id).map(|(_, jcb)| jcb.newest_versions(blocks)).unwrap_or_default()
    }

    /// The name that a log's files have, without the ending.
    pub fn name_of(&self, id: LogId) -> String {
        let inner = self.lock();
        inner.logs.get(&id.0).map(|(_, files)| files.name.clone()).unwrap_or_default()
    }

    /// The counters of a log.
    pub fn counters(&self, id: LogId) -> Counters {
        self.lock().log(id).map(|(_, jcb)| jcb.counters_now()).unwrap_or_default()
    }

    /// How many logs there are, with those that only wait for their last home writes to end: each is walked over for what the area does as a
    /// whole.
    pub fn log_count(&self) -> usize {
        self.lock().logs.len()
    }

    /// Checks the invariants of every log; what is wrong, as a sentence. Costs time.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check(&self) -> Result<(), String> {
        let mut inner = self.lock();
        inner.logs().try_for_each(|jcb| jcb.check())
    }

    /// Where the live log of `id` begins.
    pub fn tail(&self, id: LogId) -> Option<Tail> {
        self.lock().log(id).and_then(|(_, jcb)| jcb.table.tail())
    }
}

/// The fault side of the area. It does not keep the area alive, so that memory and area do not keep each other.
struct AreaCopyOnWrite(std::sync::Weak<JournalArea>);

impl CopyOnWrite for AreaCopyOnWrite {
    fn copy_out(&self, page: PageId) -> bool {
        // Without an area nothing is held.
        let Some(area) = self.0.upgrade() else { return true };
        let is_free = area.lock().copy_out(page);
        if !is_free {
            area.wake();
        }
        is_free
    }

    fn try_again(&self) {
        let Some(area) = self.0.upgrade() else { return };
        let mut inner = area.lock();
        inner.feed_starved();
        if !inner.starved.is_empty() {
            drop(inner);
            area.wake();
        }
    }
}
