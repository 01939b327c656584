//! Delayed checkpointing (the paper's section III-E): the latest versions go home in large runs, largest first, and leave
//! the region when they are durable there.
//!
//! They leave it slice by slice, each behind a flush of its own, while the next is being written: a commit that waits for
//! room waits for a slice, and the disk is not idle meanwhile. (The paper's file system is "frozen" until all of it is home.)
//! For the same reason long runs begin to go home when the region is half full: they are data, written once. What is changed
//! again and again is scattered, and stays until there is need for its place.

use super::State;
use super::captured::{AtHome, Captured, Held, HomeState, Written};
use super::inflight::Writer;
use super::keeper::{Errand, Work};
use super::notes::Note;
use super::report::NvmCounters;
use crate::keeper::{Side, Steps};
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Bytes that go home in one piece at most.
const RUN_BYTES: u64 = 256 << 10;
/// Pieces on their way at a time.
const RUNS_MAX: usize = 16;

/// A checkpoint that is going on.
#[derive(Debug)]
pub(super) struct Checkpoint {
    /// What is left, the largest run last.
    runs: Vec<Range<u64>>,
    writing: usize,
    /// Blocks that are at home, and which version of them.
    written: Vec<Written>,
    /// Those that a flush is under way for; more is written meanwhile, which it need not cover.
    flushing: Option<Vec<Written>>,
    has_failed: bool,
}

impl Checkpoint {
    /// Nothing goes home that is not on its way.
    pub fn end_soon(&mut self) {
        self.runs.clear();
    }

    /// What it has written may not be on storage, and no later flush says so.
    pub fn flush_failed(&mut self) {
        self.has_failed = true;
    }
}

impl Work {
    /// Begins a checkpoint of everything that can go home. False when nothing can, or one is going on.
    pub(super) fn begin_checkpoint(&mut self, captured: &mut Captured, steps: &mut Steps) -> bool {
        self.begin_checkpoint_of(captured, 1, steps)
    }

    /// The same for runs of at least `run_blocks_min` blocks.
    fn begin_checkpoint_of(&mut self, captured: &mut Captured, run_blocks_min: u64, steps: &mut Steps) -> bool {
        if self.checkpoint.is_some() || self.checkpoint_failed {
            return false;
        }
        if self.is_distrusted && self.closing.is_none() && self.commit.is_none() {
            // Where home is, is what is in doubt.
            return false;
        }
        let mut blocks: Vec<u64> =
            captured.journal.homes().filter(|block| self.may_go_home(captured, *block)).collect();
        if blocks.is_empty() {
            return false;
        }
        blocks.sort_unstable();
        let mut runs: Vec<Range<u64>> = Vec::new();
        let longest = (RUN_BYTES / captured.block_bytes()).max(1);
        for block in blocks {
            match runs.last_mut() {
                Some(run) if run.end == block && run.end - run.start < longest => run.end += 1,
                _ => runs.push(block..block + 1),
            }
        }
        runs.retain(|run| run.end - run.start >= run_blocks_min);
        if runs.is_empty() {
            return false;
        }
        // Taken from the end: the largest first, equal ones from the disk's beginning on.
        runs.sort_by_key(|run| (run.end - run.start, Reverse(run.start)));
        NvmCounters::add(&self.nvm.counters.checkpoints, 1);
        self.checkpoint = Some(Checkpoint { runs, writing: 0, written: Vec::new(), flushing: None, has_failed: false });
        self.drive_checkpoint(captured, steps);
        true
    }

    /// Whether a block's version belongs home now: the guest has put nothing else there, and nothing is on its way.
    fn may_go_home(&self, captured: &Captured, block: u64) -> bool {
        captured.homes.get(&block).is_some_and(|held| held.home != HomeState::Other) && !self.in_flight.touches(block)
    }

    /// Sends home what the disk has room for.
    pub(super) fn drive_checkpoint(&mut self, captured: &mut Captured, steps: &mut Steps) {
        loop {
            let Some(checkpoint) = &mut self.checkpoint else { return };
            if checkpoint.writing >= RUNS_MAX || checkpoint.has_failed {
                break;
            }
            let Some(run) = checkpoint.runs.pop() else { break };
            let mut block = run.start;
            while block < run.end {
                let first = block;
                let mut content = Vec::new();
                let mut versions = Vec::new();
                while block < run.end && self.may_go_home(captured, block) {
                    let Some((latest, written)) = captured.journal.latest(block).zip(captured.written(block)) else {
                        break;
                    };
                    content.extend_from_slice(latest);
                    versions.push(written);
                    block += 1;
                }
                if versions.is_empty() {
                    block += 1;
                } else {
                    self.send_home(captured, first, content, versions, steps);
                }
            }
        }
        let slice = u64::from(captured.journal.geometry().blocks / self.nvm.options.checkpoint_slices.max(1));
        let slice = slice.max(self.nvm.options.checkpoint_slice_bytes_min / captured.block_bytes()) as usize;
        let Some(checkpoint) = &mut self.checkpoint else { return };
        if checkpoint.flushing.is_some() {
            return;
        }
        if checkpoint.writing == 0 && (checkpoint.has_failed || checkpoint.written.is_empty()) {
            self.checkpoint_failed |= checkpoint.has_failed;
            self.checkpoint = None;
            return;
        }
        let is_slice = checkpoint.writing == 0 || checkpoint.written.len() >= slice;
        if checkpoint.has_failed || !is_slice {
            return;
        }
        checkpoint.flushing = Some(std::mem::take(&mut checkpoint.written));
        let mark = self.begin_mark(captured).unwrap_or_else(|error| {
            // What is in the region stays there.
            log::error!("disk {}: writing the mark of the NVM region anew failed: {error}", self.name());
            if let Some(checkpoint) = &mut self.checkpoint {
                checkpoint.has_failed = true;
            }
            0
        });
        self.flush_for(Errand::CheckpointFlush(mark), steps);
    }

    fn send_home(
        &mut self,
        captured: &Captured,
        first: u64,
        content: Vec<u8>,
        versions: Vec<Written>,
        steps: &mut Steps,
    ) {
        let len = content.len() as u64;
        NvmCounters::add(&self.nvm.counters.checkpoint_bytes, len);
        let blocks = first..first + versions.len() as u64;
        let offset = captured.log.home_offset(first);
        let number = self.write(Side::Home, offset, content, Errand::Checkpoint(versions), steps);
        self.in_flight.begin(number, blocks, Writer::Host);
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.writing += 1;
        }
    }

    /// A run is home.
    pub(super) fn run_done(&mut self, captured: &mut Captured, versions: Vec<Written>, is_ok: bool, steps: &mut Steps) {
        if !is_ok {
            log::error!("disk {}: a checkpoint of the NVM region failed; its blocks stay there", self.name());
        }
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.writing -= 1;
            if is_ok {
                checkpoint.written.extend(versions);
            } else {
                checkpoint.has_failed = true;
            }
        }
        self.drive_checkpoint(captured, steps);
    }

    /// What a checkpoint wrote is durable, and so is the mark with this number: it leaves the region.
    pub(super) fn checkpoint_flushed(&mut self, captured: &mut Captured, mark: u64, is_ok: bool, steps: &mut Steps) {
        let Some(checkpoint) = &mut self.checkpoint else { return };
        let Some(flushed) = checkpoint.flushing.take() else { return };
        if !is_ok || checkpoint.has_failed {
            checkpoint.has_failed = true;
        } else if let Err(error) = self.end_mark(captured, mark) {
            log::error!("disk {}: {error}", self.name());
            captured.has_failed = true;
        } else {
            self.release_home(captured, &flushed);
        }
        self.drive_checkpoint(captured, steps);
    }

    /// Takes blocks out of the region whose versions, these, are durable at home.
    pub(super) fn release_home(&mut self, captured: &mut Captured, written: &[Written]) {
        let (mut gone, mut at_home) = (Vec::new(), Vec::new());
        for written in written {
            let block = &written.block;
            let Some(held) = captured.homes.get(block).copied() else { continue };
            // Committed again meanwhile, or overwritten: what is at home is not what the region has.
            if !captured.is_at_home(written) {
                continue;
            }
            if !captured.is_past(held.sequence)
                && let Some(content) = captured.journal.latest(*block)
            {
                let known = AtHome { sequence: held.sequence, digest: Some(self.nvm.digest(content)) };
                captured.at_home.insert(*block, known);
                at_home.push((*block, held.sequence));
            }
            gone.push(*block);
        }
        if !at_home.is_empty() {
            captured.notes.note(&Note::AtHome(at_home));
        }
        if let Err(error) = captured.release(&gone) {
            log::error!("disk {}: {error}", self.name());
            captured.has_failed = true;
            return;
        }
        self.collection_due = true;
        self.collect_when_due(captured);
    }

    /// Makes room of what a checkpoint took out of the region: at once, or when the transaction that is being committed is
    /// through, whose headers must stay where they are.
    fn collect_when_due(&mut self, captured: &mut Captured) {
        if self.collection_due && !captured.journal.has_pending() {
            self.collect(captured);
        }
    }

    /// Collects garbage; no transaction may be under way.
    fn collect(&mut self, captured: &mut Captured) {
        self.collection_due = false;
        match captured.journal.collect() {
            Ok(free) => {
                log::debug!("disk {}: garbage collection of the NVM region made {free} blocks free", self.name())
            }
            Err(error) => {
                log::error!("disk {}: {error}", self.name());
                captured.has_failed = true;
            }
        }
    }

    /// Keeps the region from filling up (section III-E: garbage collection at three fourths, then a checkpoint), and has
    /// everything go home when that is asked for.
    pub(super) fn drive_space(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = state else { return };
        self.collect_when_due(captured);
        if captured.journal.is_filled() && !captured.journal.has_pending() {
            // Not for a few headers at a time.
            let blocks = captured.journal.geometry().blocks;
            if captured.journal.reclaimable() >= blocks / 32 {
                self.collect(captured);
            }
        }
        if captured.journal.is_filled() {
            self.begin_checkpoint(captured, steps);
        }
        let is_time = self.checkpointed.elapsed() >= self.nvm.options.checkpoint_interval;
        if self.checkpoint.is_none() && (is_time || self.nvm.checkpoints_asked() != self.checkpoints_asked) {
            self.checkpointed = Instant::now();
            self.checkpoints_asked = self.nvm.checkpoints_asked();
            self.begin_checkpoint(captured, steps);
        }
        self.drive_emptying(captured, steps);
        self.send_long_runs(captured, steps);
    }

    /// Somebody waits until all that is committed by now is home: before a backup of the image.
    fn drive_emptying(&mut self, captured: &mut Captured, steps: &mut Steps) {
        let log = Arc::clone(&captured.log);
        if !log.is_emptying() {
            self.emptying = None;
            return;
        }
        if self.checkpoint.is_some() {
            return;
        }
        let last = *self.emptying.get_or_insert(captured.journal.sequence());
        let is_owed = |held: &Held| held.home != HomeState::Other && !jbd2::sequence::is_after(held.sequence, last);
        if captured.homes.values().any(is_owed) {
            if self.begin_checkpoint(captured, steps) || !self.checkpoint_failed {
                return;
            }
            log.end_emptying(Some(false));
        } else {
            log.end_emptying(Some(true));
        }
        self.emptying = None;
    }

    /// Long runs go home from half full on; looked for once after each transaction.
    fn send_long_runs(&mut self, captured: &mut Captured, steps: &mut Steps) {
        let sequence = captured.journal.sequence();
        let (run_bytes, percent) = (self.nvm.options.early_run_bytes, u64::from(self.nvm.options.early_fill_percent));
        if run_bytes == 0
            || self.checkpoint.is_some()
            || self.runs_looked_for == Some(sequence)
            || u64::from(captured.journal.used()) * 100 < u64::from(captured.journal.geometry().blocks) * percent
        {
            return;
        }
        self.runs_looked_for = Some(sequence);
        let blocks = (run_bytes / captured.block_bytes()).max(1);
        if self.begin_checkpoint_of(captured, blocks, steps) {
            NvmCounters::add(&self.nvm.counters.checkpoints_of_runs, 1);
        }
    }
}
