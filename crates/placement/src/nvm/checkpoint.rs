//! Delayed checkpointing (the paper's section III-E): the latest versions go home in large runs, largest first, and leave
//! the region when they are durable there.
//!
//! What is written home leaves when any flush of the disk has ended that began after that write had: a commit's for its appends, the
//! guest's, or one of the checkpoint's own. Such a flush covers it, whoever asked ([`super::coverage`] tells; a flush that fails covers nothing
//! and ends the checkpoint). The checkpoint asks for one itself
//! only where room is wanted, or nobody else has for a while. More is written meanwhile, so that the disk is not idle. (The paper's
//! file system is "frozen" until all of it is home.)
//! To have room in time long runs begin to go home when the region is half full: they are data, written once. What is changed
//! again and again is scattered, and stays until there is need for its place.

use super::captured::Captured;
use super::checkpoint_state::Checkpoint;
use super::commit_state::Commit;
use super::errand::Errand;
use super::inflight::Writer;
use super::notes::Note;
use super::report::NvmCounters;
use super::versions::{AtHome, Held, HomeState, Written};
use super::work::Work;
use super::{ManyAppends, State};
use crate::keeper::{Side, Steps};
use std::cmp::Reverse;
use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that go home in one piece at most.
const RUN_BYTES: u64 = 256 << 10;
/// Room is wanted where less than one of so many parts of the region is left.
const ROOM_PARTS: u32 = 8;
/// Pieces on their way at a time.
const RUNS_MAX: usize = 16;

/// How often a checkpoint is tried that somebody waits for, before they are told that it fails.
const CHECKPOINT_TRIES: u32 = 3;

impl Work {
    /// Whether somebody waits for a checkpoint that is to be tried once more: its guest unmounts, or commits and there is no room.
    pub(super) fn is_tried_again(&self) -> bool {
        let is_room_wanted = self.commit.as_ref().is_some_and(Commit::waits_for_room);
        self.checkpoints.has_failed
            && self.checkpoints.failures < CHECKPOINT_TRIES
            && (self.closing.is_some() || is_room_wanted)
    }

    /// After which time a checkpoint is to be tried again for who waits for it.
    pub(super) fn next_try_in(&self) -> Option<Duration> {
        self.is_tried_again()
            .then(|| self.nvm.options.checkpoint_patience.saturating_sub(self.checkpoints.failed_at.elapsed()))
    }

    /// Whether no checkpoint will take home what somebody waits for, however often it is tried now.
    pub(super) fn has_checkpoint_failed(&self) -> bool {
        self.checkpoints.has_failed && !self.is_tried_again()
    }

    /// Somebody comes who has not tried yet: what has failed before is no reason to refuse them.
    pub(super) fn try_checkpoints_anew(&mut self) {
        self.checkpoints.has_failed = false;
        self.checkpoints.failures = 0;
    }

    /// Begins a checkpoint of everything that can go home. False when nothing can, or one is going on.
    pub(super) fn begin_checkpoint(&mut self, captured: &mut Captured, steps: &mut Steps) -> bool {
        self.begin_checkpoint_of(captured, 1, steps)
    }

    /// Whether anything may be sent home now that is not on its way.
    fn may_begin(&self) -> bool {
        // Where home is, is what is in doubt with a log that is distrusted.
        let is_home_in_doubt = self.is_distrusted && self.closing.is_none() && self.commit.is_none();
        !self.checkpoints.has_failed && !is_home_in_doubt
    }

    /// The same for runs of at least `run_blocks_min` blocks.
    fn begin_checkpoint_of(&mut self, captured: &mut Captured, run_blocks_min: u64, steps: &mut Steps) -> bool {
        if self.checkpoints.now.is_some() || !self.may_begin() {
            return false;
        }
        let mut blocks: Vec<u64> =
            captured.journal.homes().filter(|block| self.may_go_home(captured, *block)).collect();
        let mut runs = runs_of(captured, &mut blocks);
        runs.retain(|run| run.end - run.start >= run_blocks_min);
        if runs.is_empty() {
            return false;
        }
        self.checkpoint_of(runs, run_blocks_min > 1);
        self.drive_checkpoint(captured, steps);
        true
    }

    fn checkpoint_of(&mut self, runs: Vec<Range<u64>>, is_of_some: bool) {
        NvmCounters::add(&self.nvm.counters.checkpoints, 1);
        self.checkpoints.now = Some(Checkpoint {
            runs,
            writing: 0,
            written: VecDeque::new(),
            waiting_since: Instant::now(),
            flushing: None,
            is_of_some,
            is_urgent: false,
            has_failed: false,
        });
    }

    /// Has a checkpoint of some blocks that is going on take all the others, too, as one of everything would: but for those that are on
    /// their way, or home and waiting for a flush.
    fn widen_checkpoint(&mut self, captured: &mut Captured, steps: &mut Steps) {
        let is_of_some = |checkpoint: &&Checkpoint| checkpoint.is_of_some && !checkpoint.has_failed;
        let Some(checkpoint) = self.checkpoints.now.as_ref().filter(is_of_some) else { return };
        let known: HashSet<u64> = checkpoint
            .written
            .iter()
            .filter(|(_, written)| captured.is_at_home(written))
            .map(|(_, written)| written.block)
            .collect();
        let is_left = |block: &u64| !known.contains(block) && self.may_go_home(captured, *block);
        let mut blocks: Vec<u64> = captured.journal.homes().filter(is_left).collect();
        let runs = runs_of(captured, &mut blocks);
        if let Some(checkpoint) = &mut self.checkpoints.now {
            (checkpoint.runs, checkpoint.is_of_some) = (runs, false);
        }
        self.drive_checkpoint(captured, steps);
    }

    /// Appends that were logged go home in the background: with the checkpoint that is going on, or as one of their own.
    fn send_soon(&mut self, captured: &mut Captured, steps: &mut Steps) {
        if self.checkpoints.soon.is_empty() {
            return;
        }
        let mut blocks = std::mem::take(&mut self.checkpoints.soon);
        if !self.may_begin() || self.departure.phase.is_some() || self.closing.is_some() {
            // They go with all the rest.
            return;
        }
        blocks.retain(|block| captured.journal.contains(*block));
        let mut runs = runs_of(captured, &mut blocks);
        match &mut self.checkpoints.now {
            Some(checkpoint) if checkpoint.has_failed => return,
            Some(checkpoint) => checkpoint.runs.append(&mut runs),
            None if runs.is_empty() => return,
            None => self.checkpoint_of(runs, true),
        }
        self.drive_checkpoint(captured, steps);
    }

    /// Whether a block's version belongs home now: the guest has put nothing else there, and nothing is on its way.
    fn may_go_home(&self, captured: &Captured, block: u64) -> bool {
        captured.homes.get(&block).is_some_and(|held| held.home != HomeState::Other) && !self.in_flight.touches(block)
    }

    /// Sends home what the disk has room for.
    pub(super) fn drive_checkpoint(&mut self, captured: &mut Captured, steps: &mut Steps) {
        loop {
            let Some(checkpoint) = &mut self.checkpoints.now else { return };
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
        let Some(checkpoint) = &self.checkpoints.now else { return };
        if checkpoint.flushing.is_some() {
            return;
        }
        if checkpoint.writing == 0 && (checkpoint.has_failed || (checkpoint.is_through() && !checkpoint.has_written()))
        {
            if checkpoint.has_failed {
                self.checkpoints.has_failed = true;
                self.checkpoints.failures += 1;
                self.checkpoints.failed_at = Instant::now();
            } else {
                self.checkpoints.failures = 0;
            }
            self.checkpoints.now = None;
            return;
        }
        if checkpoint.has_failed || !checkpoint.has_written() || !self.is_flush_due(captured, checkpoint) {
            return;
        }
        if let Some(checkpoint) = &mut self.checkpoints.now {
            checkpoint.flushing = Some(Instant::now());
        }
        let mark = self.begin_mark(captured).unwrap_or_else(|error| {
            // What is in the region stays there.
            log::error!("disk {}: writing the mark of the NVM region anew failed: {error}", self.name());
            if let Some(checkpoint) = &mut self.checkpoints.now {
                checkpoint.has_failed = true;
            }
            0
        });
        self.flush_for(Errand::CheckpointFlush(mark), steps);
    }

    /// Whether a checkpoint needs a flush of its own now. Each has a disk with an arm empty its cache, so that it is put off for as long
    /// as nobody needs what it frees: another one that comes meanwhile serves as well.
    fn is_flush_due(&self, captured: &Captured, checkpoint: &Checkpoint) -> bool {
        let options = &self.nvm.options;
        let blocks = captured.journal.geometry().blocks;
        let missing = self.room_missing(captured);
        // Who logs appends needs room for the next ones.
        let parts = if options.many_appends == ManyAppends::Home { ROOM_PARTS } else { 2 };
        let is_room_wanted = missing > 0 || captured.journal.room() < blocks / parts;
        if checkpoint.is_through() {
            let is_waited_for = checkpoint.is_urgent
                || self.closing.is_some()
                || self.departure.phase.is_some()
                || self.is_distrusted
                || captured.log.is_emptying();
            return is_room_wanted
                || is_waited_for
                || checkpoint.waiting_since.elapsed() >= options.checkpoint_patience;
        }
        let slice = u64::from(blocks / options.checkpoint_slices.max(1));
        let slice = slice.max(options.checkpoint_slice_bytes_min / captured.block_bytes());
        is_room_wanted && checkpoint.written.len() as u64 >= slice.max(u64::from(missing))
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
        if let Some(checkpoint) = &mut self.checkpoints.now {
            checkpoint.writing += 1;
        }
    }

    /// A run is home.
    pub(super) fn run_done(&mut self, captured: &mut Captured, versions: Vec<Written>, is_ok: bool, steps: &mut Steps) {
        if !is_ok {
            log::error!("disk {}: a checkpoint of the NVM region failed; its blocks stay there", self.name());
        }
        let ended = self.coverage.write_ended();
        if let Some(checkpoint) = &mut self.checkpoints.now {
            checkpoint.writing -= 1;
            if is_ok {
                if checkpoint.written.is_empty() {
                    checkpoint.waiting_since = Instant::now();
                }
                checkpoint.written.extend(versions.into_iter().map(|written| (ended, written)));
            } else {
                checkpoint.has_failed = true;
            }
        }
        self.drive_checkpoint(captured, steps);
    }

    /// A flush of the checkpoint's own has ended.
    pub(super) fn checkpoint_flushed(&mut self, captured: &mut Captured, mark: u64, is_ok: bool, steps: &mut Steps) {
        let Some(checkpoint) = &mut self.checkpoints.now else { return };
        let Some(since) = checkpoint.flushing.take() else { return };
        NvmCounters::add_since(&self.nvm.counters.checkpoint_flush_us, since);
        if !is_ok || checkpoint.has_failed {
            checkpoint.has_failed = true;
        } else if let Err(error) = self.end_mark(captured, mark) {
            log::error!("disk {}: {error}", self.name());
            captured.has_failed = true;
        } else {
            self.release_durable(captured);
        }
        self.drive_checkpoint(captured, steps);
    }

    /// A flush of the disk has ended, and well, whoever's it was, and the region was told of the mark that went with it: what a
    /// checkpoint had written home when it began leaves the region.
    pub(super) fn release_durable(&mut self, captured: &mut Captured) {
        let durable = self.coverage.durable();
        let Some(checkpoint) = self.checkpoints.now.as_mut().filter(|checkpoint| !checkpoint.has_failed) else {
            return;
        };
        let covered = checkpoint.written.partition_point(|(ended, _)| *ended <= durable);
        if covered == 0 {
            return;
        }
        let covered: Vec<Written> = checkpoint.written.drain(..covered).map(|(_, written)| written).collect();
        checkpoint.waiting_since = Instant::now();
        self.release_home(captured, &covered);
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
            // (Of a block that a transaction has which counts soon, that would be noted behind it.)
            if !captured.is_past(held.sequence)
                && !self.is_acknowledged(*block)
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
        self.checkpoints.is_collection_due = true;
        self.collect_when_due(captured);
    }

    /// Makes room of what a checkpoint took out of the region: at once, or when the transaction that is being committed is
    /// through, whose headers must stay where they are.
    fn collect_when_due(&mut self, captured: &mut Captured) {
        if self.checkpoints.is_collection_due && !captured.journal.has_pending() {
            self.collect(captured);
        }
    }

    /// Collects garbage; no transaction may be under way.
    fn collect(&mut self, captured: &mut Captured) {
        self.checkpoints.is_collection_due = false;
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
        self.send_soon(captured, steps);
        if captured.journal.is_filled() {
            self.begin_checkpoint(captured, steps);
            self.widen_checkpoint(captured, steps);
        }
        let is_time = self.checkpoints.all_began_at.elapsed() >= self.nvm.options.checkpoint_interval;
        if self.checkpoints.now.is_none() && (is_time || self.nvm.checkpoints_asked() != self.checkpoints.asked) {
            self.checkpoints.all_began_at = Instant::now();
            self.checkpoints.asked = self.nvm.checkpoints_asked();
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
        if self.has_lost() {
            log.end_emptying(Some(false));
            self.emptying = None;
            return;
        }
        if self.checkpoints.now.is_some() || self.has_acknowledged() {
            return;
        }
        let last = *self.emptying.get_or_insert(captured.journal.sequence());
        let is_owed = |held: &Held| held.home != HomeState::Other && !jbd2::sequence::is_after(held.sequence, last);
        if captured.homes.values().any(is_owed) {
            if self.begin_checkpoint(captured, steps) || !self.checkpoints.has_failed {
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
            || self.checkpoints.now.is_some()
            || self.checkpoints.runs_looked_for == Some(sequence)
            || u64::from(captured.journal.used()) * 100 < u64::from(captured.journal.geometry().blocks) * percent
        {
            return;
        }
        self.checkpoints.runs_looked_for = Some(sequence);
        let blocks = (run_bytes / captured.block_bytes()).max(1);
        if self.begin_checkpoint_of(captured, blocks, steps) {
            NvmCounters::add(&self.nvm.counters.checkpoints_of_runs, 1);
        }
    }
}

/// Blocks as runs that go home in one piece each; taken from the end: the largest first, equal ones from the disk's beginning on.
fn runs_of(captured: &Captured, blocks: &mut [u64]) -> Vec<Range<u64>> {
    blocks.sort_unstable();
    let mut runs: Vec<Range<u64>> = Vec::new();
    let longest = (RUN_BYTES / captured.block_bytes()).max(1);
    for block in blocks {
        match runs.last_mut() {
            Some(run) if run.end == *block && run.end - run.start < longest => run.end += 1,
            _ => runs.push(*block..*block + 1),
        }
    }
    runs.sort_by_key(|run| (run.end - run.start, Reverse(run.start)));
    runs
}
