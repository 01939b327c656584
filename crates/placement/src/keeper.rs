//! Who keeps a log: the contract between a disk's route and the place where a log lives.
//!
//! The route ([`crate::DiskRoute`]) cuts requests into pieces, traces and counts them, keeps tickets and waiting lists, accounts
//! for flushes, and tells the [`Keeper`] of each piece's log what the guest does. A keeper decides. It never does I/O on the way of
//! data: what it wants done it says in [`Steps`], and it is told when that is done. (What is rare and simple, a superblock that opens or
//! closes a log, a block that has to be read back, it reads and writes itself, as the marks of ARCHITECTURE.md are.)
//!
//! A keeper may have homes as well as the log ([`Keeper::shows_homes`], [`HomeVerdict::Parts`]): one that has the newest versions of
//! blocks in a region of NVM absorbs what the guest writes home, and answers reads of it.
//!
//! # Which thread calls
//!
//! A log and its home may be on two disks with two threads. What concerns the log ([`Keeper::superblock`], [`Keeper::log_write`],
//! [`Keeper::patched`], [`Keeper::log_read`], [`Keeper::end_of_pass`]) comes from the thread of the disk with the log; what concerns homes
//! ([`Keeper::home_begins`], [`Keeper::home_ended`], [`Keeper::drive`]) from that of the disk with the file system. So a keeper
//! locks what both use. A step names its [`Side`]; on whichever thread it was said, it is carried out by the disk of that side, and
//! [`Keeper::done`] is called there.
//!
//! # Hooks for durability by age
//!
//! A keeper that makes transactions durable on storage while it holds them has what it needs here; a keeper that does not
//! leaves the defaults:
//!
//! * *A home write may have to wait* (write-ahead rule: no version goes home before what commits it is durable).
//!   [`Keeper::home_begins`] answers [`HomeVerdict::Wait`]; the request is held, and asked about again after [`Step::Retry`].
//! * *Any block of the file system, journaled or not* (reuse rule: a block that a transaction freed is not written before that
//!   transaction is durable). While [`Keeper::watches_home`] says so, `home_begins` hears of every write, discard and zeroing inside
//!   the file system, with its range, before it begins, and [`Keeper::home_ended`] when it has ended, and how.
//! * *Flushes of its own* ([`Step::Flush`]). A flush covers every operation whose end the route has heard of before the step is
//!   carried out, the guest's data writes among them: a flush that is said in, or after, `home_ended` covers that write.
//! * *The guest's flushes and superblocks*. [`Keeper::flush_asked`] hears of a flush of the disk with the file system, and
//!   [`Keeper::superblock`] of a tail that moves and a log that closes; both may keep the request from completing
//!   ([`Step::Hold`], on side `Home` for a flush, on side `Journal` for a superblock).
//! * *Writes of its own* ([`Step::Write`]) into the log's place (side `Journal`) and to homes (side `Home`), and their ends
//!   ([`Keeper::done`] with the [`Task`] of the step). Writes of one batch of steps run in any order: what must be ordered is said
//!   after the end of what it must follow.
//! * *Time* ([`Keeper::due_in`]). Once it has come, [`Keeper::woken`] is called on the disk of the home. It may come late by as long as
//!   the VM's tick (`Journals::tick`); a keeper compares with the clock itself ([`crate::Disk::now`]).
//! * *A transaction was accepted* (`journal_area::Accepted`: its sequence, where it lies, tags, revokes), before the
//!   guest's commit is acknowledged: `journal_area::Outcome::accepted` of the batch, for a log that asked for it
//!   (`JournalArea::tell_accepted`). The held keeper hears of it in `end_of_pass`. To acknowledge the commit only when it is durable
//!   (`N = 0`), say [`Step::Hold`] for the request there, and [`Step::Release`] when it is.
//!
//! What a keeper must never do: wait for the guest, or for another step of its own; complete a commit that its place does not
//! have; let an older version of a block land on a newer one.
//!
//! Failure story: a step that failed comes back with `is_ok` false. What the guest is told then is the keeper's to say.

use crate::durability_report::DurabilityReport;
use crate::log::Log;
use crate::remote::report::RemoteReport;
use block_route::{Buffer, RequestId, RequestKind, Status};
use guest_memory::MemorySlice;
use journal_area::{Doubt, NotHome, Opening, Source};
use recovery::Report;
use std::io;
use std::ops::Range;
use std::time::Duration;

/// What has come of a log whose worker has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakenUp {
    /// No region has it: it is as storage says.
    AsStored,
    /// It is open, in its region.
    Open,
    /// It is in its own place, begins with this transaction, and is not what it seemed.
    Left(u32),
}

/// What is to be done to storage, and then to a region, before the guest is served.
pub(crate) type ToSettle = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// One of the two disks that concern a log; they may be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The disk with the file system.
    Home,
    /// The disk with the log.
    Journal,
}

/// What a keeper wanted something done for; given back when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// A committed version goes home: the area's number of the operation.
    HostWrite(usize),
    /// A log block for which there was no memory goes to its own place.
    Stored(u32),
    /// A block of a log that is shipped elsewhere at other times goes to its own place.
    Shipped,
    /// Something of the keeper's own, under its own number.
    Own(u64),
}

/// What a keeper wants done.
#[derive(Debug)]
pub(crate) enum Step {
    /// Writes bytes at a byte of the disk, for a request or for nobody.
    Write { request: Option<RequestId>, offset: u64, content: Vec<Buffer>, task: Task },
    /// Makes durable whatever has ended before.
    Flush { task: Task },
    /// Keeps a request from completing.
    Hold(RequestId),
    /// Takes one hold off a request.
    Release(RequestId, Status),
    /// Asks again about what waits.
    Retry,
    /// The log has ended, and nothing of it is on its way home any more: if it was wished elsewhere meanwhile, and none was brought in its
    /// place, it lives there from the next mount on.
    Closed,
    /// Storage says durably that the log is there from this transaction on: its own place has it from now on.
    OnStorage { from: u32 },
    /// Takes the superblock of a request that is held, with one hold: its time has come.
    Superblock(RequestId, Vec<u8>),
}

/// What a keeper wants done, in the order in which it said so.
#[derive(Debug, Default)]
pub(crate) struct Steps(pub Vec<(Side, Step)>);

impl Steps {
    pub fn push(&mut self, side: Side, step: Step) {
        self.0.push((side, step));
    }

    /// Keeps a request of the disk with the home from completing.
    pub fn hold(&mut self, request: RequestId) {
        self.push(Side::Home, Step::Hold(request));
    }

    /// Takes one hold off a request of the disk with the home.
    pub fn release(&mut self, request: RequestId, status: Status) {
        self.push(Side::Home, Step::Release(request, status));
    }

    /// Fails a request of the disk with the log that has no hold yet.
    pub fn fail(&mut self, request: RequestId) {
        self.push(Side::Journal, Step::Hold(request));
        self.push(Side::Journal, Step::Release(request, Status::IoError));
    }
}

/// What became of the superblock that a guest wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SuperblockWritten {
    /// It opened the log.
    Opened,
    /// The log goes on; its tail may have moved.
    GoesOn,
    /// The log is empty from now on.
    Closed,
    /// It is no log any more.
    NoLog,
    /// Somebody brings a log along that no kernel began through here: it stays on storage, and is not open here.
    Brought,
}

/// The superblock of a log, as its guest writes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SuperblockBlock<'a> {
    pub content: &'a [u8],
    pub request: RequestId,
}

/// What becomes of a block that a guest wrote into its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogVerdict {
    /// It goes to its own place on storage.
    Store,
    /// The same, and the keeper wants to hear of it.
    StoreFor(Task),
    /// The keeper has it.
    Kept,
    /// The keeper has it, and releases the request later.
    Held,
    /// The request fails.
    Fail,
}

/// What becomes of a write of parts of blocks, of zeros, or of a discard inside the log's place: no kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OddVerdict {
    /// It goes to storage as it is.
    Store,
    /// Advice that cannot be followed is ignored.
    Ignore,
    /// The keeper makes whole blocks of it ([`Keeper::patched`]).
    Patch,
    /// It fails.
    Refuse,
}

/// Content of a log block.
#[derive(Debug)]
pub(crate) enum BlockContent<'a> {
    /// Of the guest's memory.
    Guest(&'a [MemorySlice]),
    /// Made here.
    Bytes(Vec<u8>),
}

/// One whole block that a guest writes into its log, not the superblock.
#[derive(Debug)]
pub(crate) struct LogBlock<'a> {
    pub position: u32,
    pub content: BlockContent<'a>,
    pub request: RequestId,
    /// It was taken before, and not answered ([`block_route::Route::route_again`]).
    pub is_again: bool,
}

/// A write, discard or zeroing inside the file system of a log.
#[derive(Debug)]
pub(crate) struct HomeChange<'a> {
    pub kind: RequestKind,
    /// Whose it is: who waits asks again with the same request and range.
    pub request: RequestId,
    /// In bytes from the begin of the file system.
    pub range: Range<u64>,
    /// Every block that it touches.
    pub blocks: Range<u64>,
    /// The blocks that it covers whole.
    pub whole: Range<u64>,
    /// For each of `blocks` its content, if it is covered whole and lies together; empty for what carries none.
    pub payload: &'a [Option<MemorySlice>],
    /// All that it carries.
    pub slices: &'a [MemorySlice],
    /// It may change the layout: storage has to have it.
    pub is_watched: bool,
    /// It was asked before, of another process or before the device was stopped, and not answered: what there was for it to bring when it
    /// was asked first is not known now. A kernel lets its tail pass a version of a file that was deleted while a write of it is under way.
    pub is_again: bool,
}

/// A part of a change of homes that goes to storage by itself.
#[derive(Debug)]
pub(crate) struct HomePart {
    /// In bytes from the begin of the file system.
    pub range: Range<u64>,
    /// What is written there in place of what the guest gave.
    pub content: Option<Vec<u8>>,
    /// The keeper hears of its end under this number.
    pub operation: usize,
}

/// Whether a write, discard or zeroing of homes may go.
#[derive(Debug)]
pub(crate) enum HomeVerdict {
    /// It goes; the keeper hears of its end under this number. For each block that does not go out as it was given: its index
    /// within the write, and its source.
    Go { operation: usize, replaced: Vec<(usize, Source)> },
    /// Only these parts of it go; the keeper has the rest.
    Parts(Vec<HomePart>),
    /// It waits until the keeper says [`Step::Retry`].
    Wait,
}

/// How a read of a log block is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogRead {
    /// As storage has it.
    Stored,
    /// With what was copied into the buffer.
    Copied,
    /// When the keeper says [`Step::Retry`].
    Wait,
}

/// How a read of homes is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HomeRead {
    /// Storage has these parts, in bytes from the begin of the file system; the rest was given.
    Stored(Vec<Range<u64>>),
    /// It waits until the keeper says [`Step::Retry`]. Nothing was given.
    Wait,
}

/// How a log that its guest has open gets to its own place on storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// In one step, if it is held (`Journals::hand_over`).
    AtOnce,
    /// It is on its way: to be asked again.
    UnderWay,
    /// The keeper has nothing of it.
    HasLeft,
}

/// What is to be said of a log whose guest is gone.
#[derive(Debug)]
pub(crate) enum Finished {
    /// There was nothing to do.
    Nothing,
    /// It was brought to its last committed state, in one step or several.
    Recovered(Vec<Report>),
    /// It was left as it is, and that is to be said.
    Left(Report),
}

/// Keeps one log. See the module.
pub(crate) trait Keeper: std::fmt::Debug + Send + Sync {
    /// Whether it needs to know of what is written to homes now.
    fn watches_home(&self, _log: &Log) -> bool {
        false
    }

    /// Whether it needs to know of log blocks other than the superblock.
    fn watches_log(&self) -> bool {
        true
    }

    /// Whether the books that it keeps count transactions; otherwise the route counts commit blocks.
    fn counts_transactions(&self, _log: &Log) -> bool {
        false
    }

    /// Whether what its guest was told is durable does not depend on the guest's flushes.
    fn needs_no_flushes(&self) -> bool {
        false
    }

    /// Whether another process could go on with it: nothing of it is here.
    fn leaves_nothing_here(&self) -> bool {
        false
    }

    /// Goes on with what a worker that died has left of the log in a region of NVM, while its guest runs. `raw` is the journal superblock
    /// on storage, of which nothing is changed; what is to be done to storage is given back.
    ///
    /// # Errors
    /// When what was left does not agree with itself or with storage.
    fn take_up(&self, _log: &Log, _raw: &[u8; jbd2::SUPERBLOCK_BYTES]) -> io::Result<(TakenUp, Option<ToSettle>)> {
        Ok((TakenUp::AsStored, None))
    }

    /// The guest writes the log's superblock, with this request. Says what that was, and whether it goes to storage as it is; the
    /// request may be held beside.
    ///
    /// # Errors
    /// When it cannot be taken: the write fails, and the log is as it was.
    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)>;

    /// The guest writes a log block.
    fn log_write(&self, log: &Log, block: LogBlock<'_>) -> LogVerdict;

    /// Somebody writes parts of log blocks, or zeros, or discards some.
    fn odd_log_write(&self, log: &Log, kind: RequestKind, slices: &[MemorySlice]) -> OddVerdict;

    /// A block of the log after a write of its bytes `part`; without `slices` those become zeros.
    ///
    /// # Errors
    /// When it cannot be read.
    fn patched(&self, _log: &Log, position: u32, _part: Range<usize>, _slices: &[MemorySlice]) -> io::Result<Vec<u8>> {
        Err(io::Error::other(format!("log block {position} cannot be changed in parts")))
    }

    /// What was written into the log until now counts before what comes next.
    fn settle_pass(&self, _log: &Log, _steps: &mut Steps) {}

    /// A pass of the disk with the log, in which something was written into it, is over: requests complete when the steps have been
    /// carried out.
    fn end_of_pass(&self, log: &Log, steps: &mut Steps) {
        self.settle_pass(log, steps);
    }

    /// Whether reads of the log have to be asked about ([`Keeper::log_read`]).
    fn shows_log(&self, _log: &Log) -> bool {
        false
    }

    /// Copies a log block into `buffer` as its guest has to find it.
    ///
    /// # Errors
    /// When what is at home or on storage cannot be read.
    fn log_read(&self, _log: &Log, _position: u32, _buffer: &mut [u8]) -> io::Result<LogRead> {
        Ok(LogRead::Stored)
    }

    /// Whether homes may be here instead of on storage, so that reads of them have to be asked about ([`Keeper::home_read`]).
    fn shows_homes(&self, _log: &Log) -> bool {
        false
    }

    /// The guest reads homes, this range in bytes from the begin of the file system. What the keeper has it gives to `answer`.
    fn home_read(&self, _log: &Log, range: Range<u64>, _answer: &mut dyn FnMut(Range<u64>, &[u8])) -> HomeRead {
        HomeRead::Stored(vec![range])
    }

    /// Up to which block a change of homes is asked about at once; what comes after is asked about as a change of its own. After its first
    /// block, and at most its end.
    fn home_cut(&self, _log: &Log, change: &HomeChange<'_>) -> u64 {
        change.blocks.end
    }

    /// The guest is about to change homes. The steps come before what the verdict lets go.
    ///
    /// # Errors
    /// When what is there has to be kept, and cannot be read: the request fails.
    fn home_begins(&self, _log: &Log, _change: &HomeChange<'_>, _steps: &mut Steps) -> io::Result<HomeVerdict> {
        Ok(HomeVerdict::Go { operation: usize::MAX, replaced: Vec::new() })
    }

    /// What `home_begins` let go has ended. Says whether its durability is the log's matter, so that no flush has to cover it.
    fn home_ended(&self, _log: &Log, _operation: usize, _is_ok: bool, _steps: &mut Steps) -> bool {
        false
    }

    /// The guest flushes the disk with the file system. What it waits for beside the disk's own flush is held.
    fn flush_asked(&self, _log: &Log, _request: RequestId, _steps: &mut Steps) {}

    /// A flush of the disk with the file system begins, for this request of the guest.
    fn flush_begins(&self, _log: &Log, _request: RequestId) {}

    /// It has ended.
    fn flush_ended(&self, _log: &Log, _request: RequestId, _is_ok: bool, _steps: &mut Steps) {}

    /// A step is done; `error` says how it failed, if it did.
    fn done(&self, _log: &Log, _task: Task, _error: Option<&io::Error>, _steps: &mut Steps) {}

    /// Work of its own on the disk with the home: memory is short, or somebody waits until nothing is owed.
    fn drive(&self, _log: &Log, _steps: &mut Steps) {}

    /// Somebody woke the disk, or its time has come.
    fn woken(&self, _log: &Log, _side: Side, _steps: &mut Steps) {}

    /// In how long it is to be woken.
    fn due_in(&self, _log: &Log) -> Option<Duration> {
        None
    }

    /// A flush of the disk with the home has failed: what was written before may not be on storage, and no later flush says so.
    fn flush_failed(&self, _log: &Log) {}

    /// The disk has something else where the file system was, while the log is open: nothing goes home any more, and the log goes to its own
    /// place as it is ([`crate::distrust`]).
    fn doubt(&self, _log: &Log, _why: String, _steps: &mut Steps) {}

    /// The same of one whose guest is gone, before it is finished: where its homes were is something else by now.
    fn doubt_at_the_end(&self, _log: &Log, _why: String) {}

    /// Whether its recovery would wait for home writes that are under way.
    fn awaits_home_writes(&self, _log: &Log) -> bool {
        false
    }

    /// Its device is started anew. Whether its guest has written past the journal what a replay would write over; what has to end before
    /// the log can be put into its own place has ended then.
    ///
    /// # Errors
    /// When that does not end.
    fn is_written_past(&self, _log: &Log) -> io::Result<bool> {
        Ok(false)
    }

    /// Puts such a log into its own place as it is, durably. False where that is for the area to do.
    ///
    /// # Errors
    /// When storage fails: the log is where it was.
    fn puts_in_place(&self, _log: &Log) -> io::Result<bool> {
        Ok(false)
    }

    /// No more goes home by itself than is on its way: the disk with the home stops, or the file system is going.
    fn end_soon(&self, _log: &Log) {}

    /// The log, open, shall be in its own place on storage: one step towards that. The disk with the log asks.
    ///
    /// # Errors
    /// Why it did not get there: it is kept as it was.
    fn leave_for_storage(&self, _log: &Log, _steps: &mut Steps) -> io::Result<Leaving> {
        Ok(Leaving::AtOnce)
    }

    /// Who wished the log on storage does not wait any longer.
    fn stay(&self, _log: &Log, _steps: &mut Steps) {}

    /// Whether steps of its own are under way that somebody who reads the log's place has to wait for.
    fn has_stored_in_flight(&self) -> bool {
        false
    }

    /// Whether it writes into the log's place or to homes, for nobody's request.
    fn has_own_in_flight(&self) -> bool {
        false
    }

    /// How many blocks an open log owes; nothing where nothing is held.
    fn blocks_owed(&self, _log: &Log) -> Option<u64> {
        None
    }

    /// Why its home blocks are not what is committed though the host owes none; nothing where nothing is held.
    fn why_not_home(&self, _log: &Log) -> Option<NotHome> {
        None
    }

    /// Where what an open log has committed is, if that is nowhere on this host: the end of a sentence about the journal.
    fn lives_elsewhere(&self, _log: &Log) -> Option<&'static str> {
        None
    }

    /// Its guest is gone, and its VM too if `is_vm_gone`: what is owed is brought home. Nothing of either writes any more.
    ///
    /// # Errors
    /// When that fails: the log is as it was.
    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished>;

    /// Somebody wishes it on storage for now, or back. False when it knows no such thing.
    fn pause(&self, _is_paused: bool) -> bool {
        false
    }

    /// Whether storage has all of it since it was paused.
    ///
    /// # Errors
    /// When that cannot come to be.
    fn is_paused(&self) -> io::Result<bool> {
        Ok(false)
    }

    /// Somebody hands the log over to storage, and asks until it is quiet: from the first time on changes of homes wait, until it was handed over or
    /// [`Keeper::stay`]. Says whether none of the guest's is under way. What else [`Keeper::may_be_taken`] ends has not ended until then.
    fn comes_to_rest(&self, _log: &Log) -> bool {
        true
    }

    /// Somebody is about to take the log elsewhere. Says whether storage has nothing live of it that is not the guest's own writing;
    /// otherwise that comes to be soon, and who takes it has to ask again.
    fn may_be_taken(&self, _log: &Log) -> bool {
        true
    }

    /// What an earlier process wrote into the log's place for nobody's request had numbers below this one.
    fn numbers_from(&self, _sequence: u32) {}

    /// An earlier process has left it, and storage does not say yet what it is to say under this one (or does now): until then nothing
    /// of its own begins.
    fn awaits_mark(&self, _is_unmarked: bool) {}

    /// An earlier process has left it open, and storage says that it is held, and nothing more.
    fn goes_on_held_only(&self) {}

    /// An earlier process has left it open, and this is what its table says of storage that has failed since it was opened.
    fn goes_on_doubted(&self, _log: &Log, _doubt: Doubt) {}

    /// An earlier process has left it open, made durable by age in this opening: storage's superblock is `raw`, and no compound has number
    /// `numbered` or one behind it. True where it stays so, from [`Keeper::go_on`] on; false where that is not wished any more.
    ///
    /// # Errors
    /// Why it cannot be, with nothing changed.
    fn follows(&self, _log: &Log, _opening: Opening, _raw: &[u8], _numbered: Option<u32>) -> Result<bool, String> {
        Ok(false)
    }

    /// An earlier process has left it open. Says whether all that counts of it is here, beside what the area has and storage says.
    fn was_taken_up(&self, _log: &Log) -> bool {
        false
    }

    /// Nothing keeps this process from serving the guest any more: what was taken up may change storage.
    ///
    /// # Errors
    /// When storage fails: another process can go on.
    fn go_on(&self, _log: &Log) -> io::Result<()> {
        Ok(())
    }

    /// The name of the file, in the VM's directory, with what the next process has to know of it.
    fn copy_name(&self) -> Option<&str> {
        None
    }

    /// How what it holds becomes durable, for reports.
    fn durability(&self, _log: &Log) -> Option<DurabilityReport> {
        None
    }

    /// Another keeps the log from now on.
    fn leave(&self) {}

    /// Its log has gone from the disk. False where something is on its way there by itself, which must not land on what the guest
    /// writes in its place: nothing has happened then.
    fn forget(&self, _log: &Log, _steps: &mut Steps) -> bool {
        true
    }

    /// Why the log, which is open, is in its own place on storage though that is not its placement; for reports.
    fn why_on_storage(&self, _log: &Log) -> Option<String> {
        None
    }

    /// What was done with a server, for reports.
    fn remote_report(&self) -> Option<RemoteReport> {
        None
    }
}
