//! What data-path threads do with a log: see `area` for its lock. What may let pages go, or make memory free, ends with no log's lock held, since
//! whoever waits for a page is answered then, and the page may be of another log.

use crate::area::JournalArea;
use crate::batch::{Accepted, LogWrite, Outcome};
use crate::error::Error;
use crate::home::{HomeWrite, HostWrite, Over};
use crate::logs::LogId;
use crate::shown::Outside;
use crate::tail::SuperblockEffect;
use guest_memory::MemorySlice;
use std::io;
use std::ops::Range;

impl JournalArea {
    /// The guest writes its log's superblock.
    ///
    /// # Errors
    /// When there is no memory to hold it: a log that it opens is not to be held then, and has to be closed here ([`JournalArea::close`]).
    /// In an open one that can only be where another process goes on, with features or an error that the superblock did not say before.
    pub fn superblock_written(&self, id: LogId, block: &[u8]) -> Result<SuperblockEffect, Error> {
        let effect = self.with(id, |jcb| {
            let effect = jcb.superblock_written(&self.pages, block);
            jcb.note_memory();
            self.look_for_contradiction(jcb);
            effect
        });
        self.let_go();
        effect.unwrap_or(Ok(SuperblockEffect::NotALog))
    }

    /// Whether the open log would end if its guest wrote this superblock, because it is another log's or none: whoever keeps something
    /// beside the log has to end that first.
    pub fn is_superblock_foreign(&self, id: LogId, block: &[u8]) -> bool {
        self.with(id, |jcb| jcb.is_superblock_foreign(block)).unwrap_or(true)
    }

    /// `LOG_OP_MPROTECT`: holds a batch of log writes of one pass and accepts the transactions it completes. On return
    /// every retained page is protected, so the requests may complete.
    pub fn hold(&self, id: LogId, writes: &[LogWrite]) -> Outcome {
        let copies_left = self.budget.copies_left(&self.logs);
        let outcome = self.with(id, |jcb| {
            let outcome = jcb.hold(&self.pages, writes, copies_left);
            self.look_for_contradiction(jcb);
            outcome
        });
        self.pages.let_many_loose_go();
        if self.budget.is_over(&self.logs) {
            self.wake();
        }
        outcome.unwrap_or_else(|| Outcome { no_memory: (0..writes.len()).collect(), ..Outcome::default() })
    }

    /// A log block for which there was no memory has reached its own place on storage. Gives the transactions that it completed,
    /// for who asked for them.
    pub fn stored(&self, id: LogId, position: u32) -> Vec<Accepted> {
        let accepted = self.with(id, |jcb| {
            jcb.stored(&self.pages, position);
            self.look_for_contradiction(jcb);
            std::mem::take(&mut jcb.accepted)
        });
        accepted.unwrap_or_default()
    }

    /// Copies a log block into `buffer` as the guest has to find it, so that it can replay the log itself; see
    /// `shown`. False when the log is not open: it is as storage has it.
    ///
    /// # Errors
    /// Those of `outside`.
    pub fn show(&self, id: LogId, position: u32, buffer: &mut [u8], outside: &mut dyn Outside) -> io::Result<bool> {
        let is_shown = self.with(id, |jcb| {
            if !jcb.is_open() {
                return Ok(false);
            }
            jcb.show(&self.pages, position, buffer, outside).map(|()| true)
        });
        is_shown.unwrap_or(Ok(false))
    }

    /// A guest's home write begins; see [`HomeWrite`].
    pub fn home_write_begins(
        &self,
        id: LogId,
        blocks: Range<u64>,
        payload: &[Option<MemorySlice>],
        over: &Over<'_>,
    ) -> HomeWrite {
        let begun = self.with(id, |jcb| jcb.home_write_begins(&self.pages, blocks, payload, over));
        // No operation has this number, so its end is nobody's.
        begun.unwrap_or_else(|| HomeWrite::Go { operation: usize::MAX, replaced: Vec::new(), carried: Vec::new() })
    }

    /// The guest has asked just now to write `blocks`, over the committed versions of those that it covers whole, and waits: whoever
    /// goes on after a death knows it when it is asked again.
    pub fn home_write_asked(&self, id: LogId, blocks: &Range<u64>, whole: &Range<u64>) {
        self.with(id, |jcb| {
            jcb.past_asked(blocks, whole);
        });
    }

    /// A home write has ended; with `ok` it reached storage. Gives blocks to which it may have brought something else than the version
    /// that it was to bring: the page with that was let go meanwhile, and the guest may have changed it.
    pub fn home_write_ended(&self, id: LogId, operation: usize, ok: bool) -> Vec<u64> {
        let Some(cell) = self.logs.cell(id) else { return Vec::new() };
        let (changed, has_left) =
            self.locked(&cell, |jcb| (jcb.home_write_ended(&self.pages, operation, ok), jcb.has_left()));
        if has_left {
            self.logs.remove(id);
        }
        self.let_go();
        changed
    }

    /// The committed version of `block`, which `content` is, has to be in its own place in the log on storage, because there is no memory
    /// to hold it. Gives its log block and transaction, and makes `content` what the log has there. Nothing where none is only at home.
    pub fn place_of_version(&self, id: LogId, block: u64, content: &mut [u8]) -> Option<(u32, u32)> {
        self.with(id, |jcb| jcb.place_of_version(block, content)).flatten()
    }

    /// It has been written there.
    pub fn restored_in_place(&self, id: LogId, block: u64, place: (u32, u32)) {
        self.with(id, |jcb| {
            jcb.restored_in_place(&self.pages, block, place);
        });
    }

    /// Holds the committed version of `block` again, which `content` is: its home block is about to be overwritten.
    ///
    /// # Errors
    /// When there is no memory for it: it has to be in the log's own place on storage before the write goes on
    /// ([`JournalArea::place_of_version`]).
    pub fn restore(&self, id: LogId, block: u64, content: &[u8]) -> Result<(), Error> {
        let is_held = self.with(id, |jcb| jcb.restore(&self.pages, block, content)).unwrap_or(true);
        if is_held { Ok(()) } else { Err(Error::NoMemory { what: "restored block" }) }
    }

    /// The guest discarded `blocks`.
    pub fn discarded(&self, id: LogId, blocks: Range<u64>) {
        self.with(id, |jcb| jcb.discarded(&self.pages, blocks));
        self.feed_starved();
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
        self.with(id, |jcb| jcb.host_writes(&self.pages, count, copied_only, may_be)).unwrap_or_default()
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
        let is_absorbed = self.with(id, |jcb| jcb.absorb(&self.pages, blocks, payload, tail, most)).unwrap_or_default();
        // Pages were let go.
        self.let_go();
        if self.budget.is_over(&self.logs) {
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
        let is_home =
            self.with(id, |jcb| jcb.is_home_already(&self.pages, blocks, payload, at_home)).unwrap_or_default();
        self.let_go();
        is_home
    }

    /// What is absorbed of a log: home block, transaction and log block of each version.
    pub fn absorbed_versions(&self, id: LogId) -> Vec<(u64, u32, u32)> {
        self.with(id, |jcb| jcb.absorbed_versions()).unwrap_or_default()
    }

    /// Storage has these absorbed versions at home, durably: they count as written home, and nothing has to be sent. Those that are
    /// not absorbed any more, or not the newest, are left as they are. Returns how many were let go.
    pub fn absorbed_are_home(&self, id: LogId, versions: &[(u64, u32, u32)]) -> u64 {
        let released = self.with(id, |jcb| jcb.absorbed_are_home(&self.pages, versions)).unwrap_or_default();
        self.let_go();
        released
    }

    /// How many blocks of a log are absorbed.
    pub fn absorbed(&self, id: LogId) -> usize {
        self.with(id, |jcb| jcb.absorbed.len()).unwrap_or_default()
    }

    /// Whether one of these blocks is.
    pub fn has_absorbed(&self, id: LogId, blocks: &Range<u64>) -> bool {
        self.with(id, |jcb| jcb.has_absorbed(blocks)).unwrap_or_default()
    }

    /// Whether one is of a transaction before this one, with which the log shall begin.
    pub fn has_absorbed_before(&self, id: LogId, tail: u32) -> bool {
        self.with(id, |jcb| jcb.has_absorbed_before(tail)).unwrap_or_default()
    }

    /// Copies out what an absorbed block is for its guest; false where it is as storage has it.
    pub fn read_absorbed(&self, id: LogId, block: u64, buffer: &mut [u8]) -> bool {
        self.with(id, |jcb| jcb.read_absorbed(&self.pages, block, buffer)).unwrap_or_default()
    }

    /// Up to `count` absorbed blocks that are wanted, by block and transaction, and that the host has to write home now; each has to be
    /// ended like a guest's.
    pub fn absorbed_writes(
        &self,
        id: LogId,
        count: usize,
        is_wanted: &dyn Fn(u64, u32) -> bool,
    ) -> Vec<(usize, HostWrite)> {
        self.with(id, |jcb| jcb.absorbed_writes(&self.pages, count, is_wanted)).unwrap_or_default()
    }
}
