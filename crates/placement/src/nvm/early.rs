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
use std::sync::Arc;

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
