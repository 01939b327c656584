//! Committing a transaction (the paper's section III-C): appends straight home, everything else to the region, then the
//! pointer. A few appends are not worth a flush of the disk and go to the region too.
//!
//! With [`super::NvmOptions::pipelined`] the guest is told as soon as the appends are written ([`Work::acknowledge`]); until their flush has ended the
//! transaction stays the one that is being committed, of which nothing counts ([`super::acknowledged`]).

use super::captured::Captured;
use super::commit_state::{Commit, Stage, ascending};
use super::condition::Condition;
use super::errand::Errand;
use super::inflight::Writer;
use super::log_stream::Transaction;
use super::notes::{self, Note};
use super::report::NvmCounters;
use super::versions::{AtHome, Held, HomeState};
use super::work::Work;
use super::{ManyAppends, State};
use crate::disk::DiskCounters;
use crate::keeper::{Side, Steps};
use block_route::Status;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of appends that go home in one piece at most.
const RUN_BYTES: usize = 1 << 20;

impl Work {
    /// Commits what is complete, one transaction after the other, until one has to wait.
    pub(super) fn advance(&mut self, state: &mut State, steps: &mut Steps) {
        let State::Held(captured) = state else { return };
        while self.commit.is_none() && !captured.has_failed && self.may_commit() && !self.is_written_over() {
            // A guest that commits without a pause has no other moment in which nothing is between two states.
            self.renew_notes(captured);
            let Some(transaction) = captured.accept() else { break };
            let commit = self.sort(captured, transaction);
            self.commit = Some(commit);
            self.begin_commit(captured, steps);
        }
        // Nobody is told that a log block is written while a commit block among those written may have to wait.
        let mut waiting = std::mem::take(&mut self.pass_requests);
        if self.has_commit_waiting(captured) || !self.may_commit() {
            for request in &waiting {
                steps.hold(*request);
            }
            self.held.append(&mut waiting);
        } else {
            let status = if captured.has_failed { Status::IoError } else { Status::Ok };
            for request in self.held.drain(..) {
                steps.release(request, status);
            }
            if captured.has_failed {
                waiting.into_iter().for_each(|request| steps.fail(request));
            }
        }
    }

    /// Decides for each block where it goes. In doubt it goes to the region.
    fn sort(&mut self, captured: &mut Captured, transaction: Transaction) -> Commit {
        self.checkpoints.failures = 0;
        let (mut puts, mut appends) = (BTreeMap::new(), BTreeMap::new());
        self.early.keep_only(transaction.sequence);
        for (block, content) in transaction.blocks {
            // What was sent home early is an append still, unless the log says something else of it now.
            let is_append = if self.early.is_sent(block, &content) {
                !captured.journal.contains(block) && self.was_free(captured, block)
            } else {
                self.early.take_back(block);
                self.is_append(captured, block)
            };
            if is_append {
                appends.insert(block, content)
            } else {
                puts.insert(block, content)
            };
        }
        let bytes = appends.len() as u64 * captured.block_bytes();
        let blocks = (puts.len() + appends.len() + transaction.revokes.len()) as u32;
        let are_many = bytes >= self.nvm.options.append_home_bytes_min && bytes > 0;
        // Of one that found no room the next may.
        let is_cheaper = self.is_log_cheaper(bytes);
        self.early.expect(are_many && !is_cheaper);
        // What is home already, or on its way, would be written twice.
        let is_logged =
            are_many && is_cheaper && !self.early.has_sent() && self.has_place_for_appends(captured, blocks);
        let mut logged = Vec::new();
        if is_logged {
            self.cost.logged();
            NvmCounters::add(&self.nvm.counters.appends_logged, appends.len() as u64);
            logged.extend(appends.keys().copied());
        }
        if is_logged || (!are_many && blocks <= captured.journal.room()) {
            puts.append(&mut appends);
        }
        let revokes = ascending(transaction.revokes);
        self.early.retain(|block| appends.contains_key(block));
        let (sequence, stage, since) = (transaction.sequence, Stage::Room, Instant::now());
        Commit {
            sequence,
            puts,
            appends,
            revokes,
            logged,
            stage,
            since,
            went_home: None,
            is_in_doubt: false,
            is_written_over: false,
            is_acknowledged: false,
            absorbed: BTreeSet::new(),
            has_failed: false,
        }
    }

    /// Whether a transaction is complete that the guest was not told of: the one that is being committed, or the one behind it.
    fn has_commit_waiting(&self, captured: &mut Captured) -> bool {
        match &self.commit {
            None => false,
            Some(commit) if commit.is_lost() => false,
            Some(commit) => !commit.is_acknowledged || captured.is_next_complete(),
        }
    }

    /// Whether so many bytes of appends take less time in the region.
    fn is_log_cheaper(&self, bytes: u64) -> bool {
        match self.nvm.options.many_appends {
            ManyAppends::Home => false,
            ManyAppends::ByCost => self.cost.is_log_cheaper(bytes),
            ManyAppends::Logged => true,
        }
    }

    /// Whether the region is large enough for so many blocks, and for the next as many beside them. Where it is full of what is on its
    /// way home the commit waits for that: going home as well would have the disk flush twice.
    fn has_place_for_appends(&self, captured: &Captured, blocks: u32) -> bool {
        u64::from(blocks) * 2 <= u64::from(captured.journal.geometry().blocks)
    }

    /// Whether a block that a transaction writes is an append: free before it, and nothing else is going on with it. False in
    /// doubt.
    pub(super) fn is_append(&self, captured: &mut Captured, block: u64) -> bool {
        !self.nvm.options.log_everything
            && !captured.journal.contains(block)
            && !self.in_flight.touches(block)
            && self.was_free(captured, block)
    }

    fn was_free(&self, captured: &mut Captured, block: u64) -> bool {
        captured.was_free(&self.home.file, block)
    }

    /// How many more headers the region needs for the commit that waits for room; 0 when none does.
    pub(super) fn room_missing(&self, captured: &Captured) -> u32 {
        let waiting = self.commit.as_ref().filter(|commit| commit.stage == Stage::Room);
        waiting.map_or(0, |commit| commit.needed(captured).saturating_sub(captured.journal.room()))
    }

    /// Begins the commit that is there, if the region has room for it.
    pub(super) fn begin_commit(&mut self, captured: &mut Captured, steps: &mut Steps) {
        let Some(commit) = &self.commit else { return };
        if commit.stage != Stage::Room {
            return;
        }
        let needed = commit.needed(captured);
        let journal = &mut captured.journal;
        if journal.room() < needed && journal.reclaimable() > 0 && journal.collect().is_err() {
            captured.has_failed = true;
        }
        if captured.journal.room() < needed && !captured.has_failed {
            let is_hopeless = needed > captured.journal.geometry().blocks
                || (self.checkpoints.now.is_none()
                    && !self.begin_checkpoint(captured, steps)
                    && self.in_flight.is_empty()
                    && !self.is_tried_again());
            if !is_hopeless {
                // Whose flush makes the room may have been waiting for a reason.
                self.drive_checkpoint(captured, steps);
                return;
            }
            if let Some(commit) = &mut self.commit
                && commit.send_logged_home()
            {
                return self.begin_commit(captured, steps);
            }
            log::error!(
                "disk {}: transaction {} has {needed} blocks, and the NVM region has room for {}; make it larger",
                self.name(),
                commit_sequence(&self.commit),
                captured.journal.room()
            );
            captured.has_failed = true;
        }
        let Some(mut commit) = self.commit.take() else { return };
        if captured.has_failed {
            return;
        }
        // The disk works while the region is written.
        let rest = commit.appends.iter().filter(|(block, _)| !self.early.contains(**block));
        let rest: Vec<_> = rest.map(|(block, content)| (*block, Arc::clone(content))).collect();
        let left = self.write_appends(captured, &rest, &Errand::Append, steps) + self.early.writing;
        commit.enter(Stage::Appends(left), &self.nvm.counters);
        commit.went_home = (!commit.appends.is_empty()).then_some(commit.since);
        commit.has_failed = self.early.has_failed;
        let began = Instant::now();
        let stored = store(captured, &commit);
        self.cost.stored(commit.puts.len() as u64 * captured.block_bytes(), began.elapsed());
        if let Err(error) = stored {
            log::error!("disk {}: {error}", self.name());
            captured.has_failed = true;
            commit.has_failed = true;
        }
        let has_appends = !commit.appends.is_empty();
        self.commit = Some(commit);
        if left == 0 {
            if has_appends { self.appends_written(captured, steps) } else { self.end_commit(captured) }
        }
    }

    /// Sends appends home, in ascending order, neighbours together. Returns the number of writes.
    pub(super) fn write_appends(
        &mut self,
        captured: &Captured,
        appends: &[(u64, Arc<[u8]>)],
        errand: &Errand,
        steps: &mut Steps,
    ) -> usize {
        let block_bytes = captured.block_bytes();
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (block, content) in appends {
            match runs.last_mut() {
                Some((first, run)) if *first + run.len() as u64 / block_bytes == *block && run.len() < RUN_BYTES => {
                    run.extend_from_slice(content);
                }
                _ => runs.push((*block, content.to_vec())),
            }
        }
        let count = runs.len();
        for (first, run) in runs {
            let len = run.len() as u64;
            let blocks = first..first + len / block_bytes;
            let counters = &self.nvm.counters;
            NvmCounters::add(&counters.appends_written_home, blocks.end - blocks.start);
            NvmCounters::add(&counters.append_bytes_written_home, len);
            let offset = captured.log.home_offset(first);
            let number = self.write(Side::Home, offset, run, errand.clone(), steps);
            self.in_flight.begin(number, blocks, Writer::Host);
        }
        count
    }

    /// An append is home.
    pub(super) fn append_done(&mut self, captured: &mut Captured, is_ok: bool, steps: &mut Steps) {
        let Some(commit) = &mut self.commit else { return };
        commit.has_failed |= !is_ok;
        let Stage::Appends(left) = &mut commit.stage else { return };
        *left -= 1;
        if *left == 0 {
            self.appends_written(captured, steps);
        }
    }

    /// All appends are home: now durably so.
    fn appends_written(&mut self, captured: &mut Captured, steps: &mut Steps) {
        let Some(commit) = &mut self.commit else { return };
        if commit.has_failed {
            self.end_commit(captured);
            return;
        }
        commit.enter(Stage::Flush, &self.nvm.counters);
        // What went home may lie where something was freed that an older copy of the region still refers to.
        match self.begin_mark(captured) {
            Ok(mark) => {
                self.acknowledge(captured);
                if self.commit.as_ref().is_some_and(|commit| commit.has_failed) {
                    return self.end_commit(captured);
                }
                self.flush_for(Errand::CommitFlush(mark), steps);
            }
            Err(error) => {
                log::error!("disk {}: writing the mark of the NVM region anew failed: {error}", self.name());
                if let Some(commit) = &mut self.commit {
                    commit.has_failed = true;
                }
                self.end_commit(captured);
            }
        }
    }

    /// The appends are written, and the guest need not wait for their flush: the region has the transaction, and counts it for whoever recovers
    /// where they are at home.
    fn acknowledge(&mut self, captured: &mut Captured) {
        let Some(commit) = self.commit.as_mut().filter(|_| self.nvm.options.pipelined) else { return };
        // What the guest writes there now is noted when it ends, behind what is noted of the transaction: as if it were newer.
        let is_met = self.in_flight.ranges().any(|blocks| commit.has_put_in(blocks));
        if is_met || commit.is_written_over || commit.is_acknowledged || commit.is_in_doubt || captured.has_failed {
            return;
        }
        let condition = Condition::of(&self.nvm.digests, captured.block_bytes(), commit.appends.iter()).encode();
        if !captured.journal.can_prepare(condition.len()) {
            return;
        }
        captured.notes.note(&noted(captured, commit));
        match captured.journal.prepare(&condition) {
            Ok(()) => {
                NvmCounters::add(&self.nvm.counters.commits_before_flush, 1);
                NvmCounters::add_since(&self.nvm.counters.commit_flush_us, commit.since);
                commit.is_acknowledged = true;
            }
            Err(error) => {
                log::error!("disk {}: {error}", self.home.options.name);
                captured.has_failed = true;
                commit.has_failed = true;
            }
        }
    }

    /// The appends are durable, and so is the mark with this number, unless a flush has failed meanwhile.
    pub(super) fn commit_flushed(&mut self, captured: &mut Captured, mark: u64, is_ok: bool, steps: &mut Steps) {
        let Some(commit) = &self.commit else { return };
        if is_ok && commit.is_in_doubt {
            return self.append_again(captured, steps);
        }
        let is_told = is_ok && self.end_mark(captured, mark).is_ok();
        if let Some(commit) = &mut self.commit {
            commit.has_failed |= !is_told;
            self.end_commit(captured);
        }
        if is_told {
            self.release_durable(captured);
        }
    }

    /// Another flush has failed since the appends began to go home, and this one says nothing of them: they go once more.
    fn append_again(&mut self, captured: &mut Captured, steps: &mut Steps) {
        let Some(mut commit) = self.commit.take() else { return };
        let appends: Vec<_> = commit.appends.iter().map(|(block, content)| (*block, Arc::clone(content))).collect();
        // Where something else is on its way, it would not be known which comes last; and what has come since stays.
        let is_met = commit.is_written_over || appends.iter().any(|(block, _)| self.in_flight.touches(*block));
        if is_met {
            commit.has_failed = true;
            self.commit = Some(commit);
            return self.end_commit(captured);
        }
        commit.is_in_doubt = false;
        let left = self.write_appends(captured, &appends, &Errand::Append, steps);
        commit.enter(Stage::Appends(left), &self.nvm.counters);
        self.commit = Some(commit);
    }

    /// What was acknowledged is durable, whatever was known of that before.
    pub(super) fn end_acknowledged(&mut self, captured: &mut Captured) {
        if let Some(commit) = &mut self.commit {
            commit.has_failed = false;
        }
        self.end_commit(captured);
    }

    /// Moves the pointer over the transaction, or gives it up.
    fn end_commit(&mut self, captured: &mut Captured) {
        let Some(mut commit) = self.commit.take() else { return };
        // Counts what the last stage took.
        commit.enter(commit.stage, &self.nvm.counters);
        if let Some(began) = commit.went_home.filter(|_| !commit.has_failed) {
            self.cost.went_home(began.elapsed());
        }
        self.early.forget();
        if !commit.has_failed && !commit.is_acknowledged {
            captured.notes.note(&noted(captured, &commit));
        }
        let mut is_published = !commit.has_failed;
        if is_published && let Err(error) = captured.journal.publish() {
            log::error!("disk {}: {error}", self.name());
            captured.has_failed = true;
            is_published = false;
        }
        if commit.is_acknowledged && !is_published {
            // Of one that could not be made durable after all.
            let is_said = commit.is_lost();
            captured.has_failed = true;
            commit.stage = Stage::Lost;
            self.commit = Some(commit);
            if !is_said {
                self.say_lost();
            }
            return;
        }
        if !commit.is_acknowledged && (!is_published || captured.has_failed) {
            log::error!(
                "disk {}: transaction {} is not committed; the guest's journal is given up",
                self.name(),
                commit.sequence
            );
            captured.journal.abandon();
            captured.has_failed = true;
            return;
        }
        DiskCounters::add(&self.counters().commit_blocks, 1);
        for block in &commit.revokes {
            captured.homes.remove(block);
            captured.at_home.remove(block);
        }
        for (block, content) in &commit.puts {
            let home = if commit.absorbed.contains(block) { HomeState::Same } else { HomeState::Behind };
            captured.homes.insert(
                *block,
                Held {
                    sequence: commit.sequence,
                    home,
                    noted: home,
                    overwrites: 0,
                    overwritten: None,
                    last_overwritten: None,
                },
            );
            captured.at_home.remove(block);
            captured.allocation.changed(*block, Some(content));
        }
        self.checkpoints.soon.append(&mut commit.logged);
        for (block, content) in &commit.appends {
            // What the guest has written over is something else.
            let digest = (!commit.is_written_over).then(|| self.nvm.digest(content));
            let known = AtHome { sequence: commit.sequence, digest };
            captured.at_home.insert(*block, known);
            captured.allocation.changed(*block, Some(content));
        }
    }
}

/// What the next worker has to know of a transaction once it is published.
fn noted(captured: &Captured, commit: &Commit) -> Note {
    Note::Committed(notes::Committed {
        sequence: commit.sequence,
        next: captured.stream.cursor().position,
        committed_at: captured.stream.committed_at(),
        puts: commit.puts.keys().copied().collect(),
        appends: commit.appends.keys().copied().collect(),
        revokes: commit.revokes.clone(),
    })
}

fn commit_sequence(commit: &Option<Commit>) -> u32 {
    commit.as_ref().map_or(0, |commit| commit.sequence)
}

/// Stores what goes to the region; nothing of it counts yet.
fn store(captured: &mut Captured, commit: &Commit) -> Result<(), nvm_journal::Error> {
    for (block, content) in &commit.puts {
        captured.journal.put(*block, content)?;
    }
    for block in &commit.revokes {
        captured.journal.revoke(*block)?;
    }
    Ok(())
}
