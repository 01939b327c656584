//! Appends that go home before their transaction is complete.
//!
//! A guest's commit block comes when all of its log is written, and waits for the appends: a disk that is given them only then
//! has idled while the log came. An append was free before its transaction, so that nothing refers to it if the transaction
//! never counts, and what is written there early harms nobody. Whether it *is* one is decided when it is seen, with all
//! earlier transactions committed, and once more when its own is complete.
//!
//! It must never: send a block home that a committed transaction uses; let a commit count whose early appends are not durable.
//!
//! Failure story: an early write that fails fails the transaction that it belongs to; if that never comes, nothing was lost.

use super::ManyAppends;
use super::State;
use super::captured::Captured;
use super::errand::Errand;
use super::report::NvmCounters;
use super::work::Work;
use crate::keeper::Steps;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What went home early of the transaction that is being written into the log, or committed.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// Its sequence number.
    sequence: Option<u32>,
    /// Writes of an earlier generation are of no transaction that can still count.
    generation: u64,
    /// Seen, and not sent.
    gathered: BTreeMap<u64, Arc<[u8]>>,
    /// Sent, with what.
    sent: BTreeMap<u64, Arc<[u8]>>,
    /// Writes under way, of this generation and of all.
    writing: usize,
    writing_all: usize,
    has_failed: bool,
    /// The transaction before had enough appends to be sent home: this one probably has, too.
    is_expected: bool,
}

impl Early {
    /// Nothing that was sent is of a transaction that can still count.
    pub fn forget(&mut self) {
        let (writing_all, is_expected) = (self.writing_all, self.is_expected);
        *self = Early { generation: self.generation + 1, writing_all, is_expected, ..Early::default() };
    }

    /// Whether the next transaction can be expected to have many appends.
    pub fn expect(&mut self, many: bool) {
        self.is_expected = many;
    }

    /// Another guest begins; nothing is under way.
    pub fn begin_anew(&mut self) {
        self.forget();
        self.writing_all = 0;
    }

    /// What was sent for another transaction than `sequence` does not count.
    pub fn keep_only(&mut self, sequence: u32) {
        if self.sequence != Some(sequence) {
            self.forget();
            self.sequence = Some(sequence);
        }
        self.gathered.clear();
    }

    /// Whether exactly this went home.
    pub fn is_sent(&self, block: u64, content: &Arc<[u8]>) -> bool {
        self.sent.get(&block).is_some_and(|sent| Arc::ptr_eq(sent, content) || sent == content)
    }

    /// Whether any of it went home.
    pub fn has_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    pub fn contains(&self, block: u64) -> bool {
        self.sent.contains_key(&block)
    }

    /// What was sent of a block is not, or will not be, what is at its home.
    pub fn take_back(&mut self, block: u64) {
        self.gathered.remove(&block);
        self.sent.remove(&block);
    }

    /// Forgets blocks that are no appends of the transaction after all.
    pub fn retain(&mut self, is_append: impl Fn(&u64) -> bool) {
        self.sent.retain(|block, _| is_append(block));
    }

    /// Writes that the transaction waits for.
    pub fn writing(&self) -> usize {
        self.writing
    }

    /// Whether any early write is under way, whosever.
    pub fn is_writing(&self) -> bool {
        self.writing_all > 0
    }

    pub fn has_failed(&self) -> bool {
        self.has_failed
    }
}

impl Work {
    /// Looks through the log blocks that have come, and sends home what is an append, once it is enough to be sent home at
    /// commit.
    pub(super) fn look_ahead(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = state else { return };
        if self.commit.is_some()
            || self.closing.is_some()
            || self.departure.phase.is_some()
            || captured.has_failed
            // Where their homes are is what is in doubt.
            || self.is_distrusted
            || self.nvm.options.log_everything
            || (self.nvm.options.many_appends != ManyAppends::Home && !self.early.is_expected)
        {
            return;
        }
        let sequence = captured.stream.cursor().sequence;
        if self.early.sequence != Some(sequence) {
            self.early.forget();
            self.early.sequence = Some(sequence);
        }
        for (block, content) in captured.ahead() {
            // Of a block that is in it twice nothing goes early: which is the last is not known.
            let is_known = self.early.contains(block) || self.early.gathered.contains_key(&block);
            if !is_known && self.is_append(captured, block) {
                self.early.gathered.insert(block, content);
            }
        }
        let bytes = (self.early.gathered.len() + self.early.sent.len()) as u64 * captured.block_bytes();
        let gathered = self.early.gathered.len() as u64 * captured.block_bytes();
        let is_enough = self.early.is_expected || bytes >= self.nvm.options.append_home_bytes_min;
        if gathered == 0 || gathered < self.nvm.options.early_batch_bytes || !is_enough {
            return;
        }
        let appends = std::mem::take(&mut self.early.gathered);
        NvmCounters::add(&self.nvm.counters.appends_sent_early, appends.len() as u64);
        let list: Vec<_> = appends.iter().map(|(block, content)| (*block, Arc::clone(content))).collect();
        let errand = Errand::EarlyAppend(self.early.generation);
        let writes = self.write_appends(captured, &list, &errand, steps);
        self.early.sent.extend(appends);
        self.early.writing += writes;
        self.early.writing_all += writes;
    }

    /// An early append is home.
    pub(super) fn early_append_done(
        &mut self,
        captured: Option<&mut Captured>,
        generation: u64,
        is_ok: bool,
        steps: &mut Steps,
    ) {
        self.early.writing_all -= 1;
        if generation != self.early.generation {
            return;
        }
        self.early.writing -= 1;
        self.early.has_failed |= !is_ok;
        if let Some(captured) = captured {
            self.append_done(captured, is_ok, steps);
        }
    }
}
