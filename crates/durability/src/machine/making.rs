//! A compound from its beginning until it is durable, copies of the log on their way home, and the tail that moves behind them.

use super::{Clocked, Durability, PRESSURE, Phase};
use crate::blocks::BlockSet;
use crate::compound::{Made, Making, Sorted};
use crate::contract::{Place, Step, Version, View};
use crate::live::{Home, Live};
use crate::window::Window;
use jbd2::{Compound, MAGIC, Superblock, SuperblockEdit, sequence};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

impl Durability {
    /// Whether what is committed, and in no compound yet, is more than what is to be read at a time.
    pub(super) fn is_pressed(&self) -> bool {
        let blocks = self.open.blocks.len() as u64;
        let most = (u64::from(self.format.log_blocks()) / PRESSURE).min(self.blocks_at_once);
        // Until storage is a truth each part that is left takes so many of them.
        let in_parts = u64::from(self.parts_left) * self.blocks_at_once;
        blocks > most + in_parts || !self.is_proven && !self.has_room_for_parts(blocks)
    }

    /// Whether so many blocks fit into the log in parts, beside those that are there or on their way: otherwise all would be read at once.
    pub(super) fn has_room_for_parts(&self, blocks: u64) -> bool {
        let length = |blocks: u64| Compound::length(&self.format, usize::try_from(blocks).unwrap_or(usize::MAX), 0);
        let parts = blocks / self.blocks_at_once * length(self.blocks_at_once) + length(blocks % self.blocks_at_once);
        let making = self.making.as_ref().map_or(0, |making| u64::from(making.length));
        parts + making <= u64::from(self.live.room(&self.format))
    }

    /// Whether what was committed is durable already.
    pub(super) fn begin_compound(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) -> bool {
        if !self.again.is_empty() && !self.logs_again() {
            // Behind nothing: what goes home for want of room must not be one of the parts.
            self.bring_home(view, steps);
            return false;
        }
        // What is held would land on an append, and may be older.
        let busy = self.closed_to_host();
        let is_busy = |block: u64| busy.touches(&(block..block + 1));
        let has_parts = !self.is_proven && self.parts_left > 0 && self.open.blocks.len() as u64 > self.blocks_at_once;
        let from = if self.again.is_empty() { has_parts.then_some(&self.open.blocks) } else { Some(&self.again) };
        let part = from.map(|blocks| Window::part(blocks, self.blocks_at_once as usize));
        let mut sorted = Sorted::new(part.as_ref().unwrap_or(&self.open), &self.live, &is_busy, view);
        if !self.is_proven || self.is_following {
            // No bitmap is a truth yet.
            sorted.tags.extend(sorted.appends.drain(..).map(|(block, version)| (block, version, self.durable)));
            sorted.tags.sort_unstable();
        }
        if sorted.length(&self.format) > u64::from(self.live.room(&self.format)) {
            if self.live.is_empty() {
                self.fail("what was committed does not fit into the journal's own place", steps);
            } else if !self.is_proven {
                self.forget_parts();
                return self.begin_compound(now, view, steps);
            } else {
                // Once the log has let go of them, a write that waits and carries something older would land on them. So they are
                // in it again before that goes.
                self.log_found_again();
                self.bring_home(view, steps);
            }
            return false;
        }
        let window = match part {
            Some(part) => {
                let from = if self.again.is_empty() { &mut self.open.blocks } else { &mut self.again };
                from.retain(|block, _| !part.blocks.contains_key(block));
                self.parts_left = self.parts_left.saturating_sub(1);
                part
            }
            None => {
                self.is_urgent = false;
                // What comes now is in the first compound behind the superblock.
                self.parts_left = 0;
                std::mem::take(&mut self.open)
            }
        };
        if self.is_following && sorted.is_empty() {
            // All of it is in what was found, which is flushed: no number is used up.
            self.window_done(now, window, sorted, view, steps);
            return true;
        }
        let clocked = Clocked { view, at_least: self.last_clock };
        self.last_clock = clocked.wall_clock();
        let mut clocked = clocked;
        let at_once = if self.is_steady { self.blocks_at_once } else { u64::MAX };
        let made = Making::begin(&self.format, &self.live, window, sorted, at_once, &mut clocked);
        let Made { making, body, appends } = match made {
            Ok(made) => made,
            Err(why) => {
                self.fail(&why, steps);
                return false;
            }
        };
        self.phase = Phase::Body;
        self.status.compound_blocks += making.sorted.tags.len() as u64;
        self.status.append_blocks += making.sorted.appends.len() as u64;
        self.making = Some(making);
        for (block, run) in appends {
            self.write(Place::Home(block), run, steps);
        }
        for (position, run) in body {
            self.write(Place::Log(position), run, steps);
        }
        // Rule (d): what is dropped is durable at home since an earlier flush; where it was is used after the body's flush only.
        self.dropping = self.live.droppable();
        let is_worth_it = self.live.length_of(self.dropping) > self.format.log_blocks() / 8;
        // None of the parts goes before all are there.
        if !is_worth_it || !self.is_proven || !self.in_parts.is_empty() {
            self.dropping = 0;
        }
        if self.is_proven && (!self.is_live || self.dropping > 0 || self.is_touched) {
            self.write_superblock(self.live.tail_after(&self.format, self.dropping), steps);
        }
        false
    }

    /// What was found, and the log has no room for beside what is not durable, is to be logged once more when the log is empty. It is durable, and at
    /// home then, so that any part of it may be in a compound by itself: whoever replays that changes nothing. What is not durable comes last. Where
    /// that does not fit behind the parts, all of it is one compound.
    pub(super) fn log_found_again(&mut self) {
        let is_one = !self.in_parts.is_empty();
        let all = std::mem::take(&mut self.found).into_iter().chain(std::mem::take(&mut self.again));
        self.again = all.chain(std::mem::take(&mut self.in_parts)).collect();
        self.supersede_again();
        if is_one || self.again.len() + self.open.blocks.len() <= self.blocks_at_once as usize {
            self.open.blocks.append(&mut self.again);
        }
    }

    /// What is committed or revoked since need not be logged again, and there may be no version of it any more.
    pub(super) fn supersede_again(&mut self) {
        let Window { blocks, revoked, .. } = &self.open;
        self.again.retain(|block, _| !blocks.contains_key(block) && !revoked.contains(block));
    }

    /// Whether the log is as empty as it has to be for what is to be logged again. What is left of that, if it is little, comes with the rest.
    pub(super) fn logs_again(&mut self) -> bool {
        if self.in_parts.is_empty() && !self.live.is_empty() {
            return false;
        }
        self.supersede_again();
        if self.again.len() + self.open.blocks.len() <= self.blocks_at_once as usize {
            self.open.blocks.append(&mut self.again);
        }
        true
    }

    /// Compounds that have parts of what is owed count for nothing, and that is owed as before.
    pub(super) fn forget_parts(&mut self) {
        for (block, mut held) in std::mem::take(&mut self.in_parts) {
            if let Some(copy) = self.live.get(block) {
                // What was on its way there before it was committed.
                held.is_past |= copy.is_past;
            }
            if !self.open.revoked.contains(&block) {
                self.open.blocks.entry(block).or_insert(held);
            }
        }
        self.live = Live::empty(self.live.head.0, self.live.head.1);
        self.parts_left = 0;
    }

    /// Copies in the log go home, as far as the guest has not written them since; the oldest compounds' first, if they are many.
    pub(super) fn bring_home(&mut self, view: &mut dyn View, steps: &mut Vec<Step>) {
        let busy = self.under_way_to();
        let block_bytes = self.format.block_size as usize;
        let mut owed: Vec<(u64, u32, u32, bool)> = self
            .live
            .within(0..u64::MAX)
            .filter(|(block, copy)| copy.home == Home::Owed && !busy.touches(&(*block..*block + 1)))
            .map(|(block, copy)| (block, copy.compound, copy.position, copy.escaped))
            .collect();
        if owed.len() as u64 > self.blocks_at_once {
            let first = self.live.tail.1;
            owed.sort_by_key(|(_, compound, ..)| compound.wrapping_sub(first));
            owed.truncate(self.blocks_at_once as usize);
            owed.sort_unstable();
        }
        for (block, compound, position, escaped) in owed {
            let mut content = vec![0; block_bytes];
            if let Err(error) = view.logged(position, &mut content) {
                return self.fail(&format!("log block {position} cannot be read: {error}"), steps);
            }
            if escaped {
                content[..4].copy_from_slice(&MAGIC.to_be_bytes());
            }
            self.bringing.push((block, compound));
            self.bringing_blocks.insert(block..block + 1);
            self.write(Place::Home(block), Arc::from(content), steps);
        }
        self.status.blocks_brought_home += self.bringing.len() as u64;
        if self.left > 0 {
            self.phase = Phase::BringHome;
        } else if self.live.within(0..u64::MAX).all(|(_, copy)| copy.home != Home::Owed) {
            self.phase = Phase::HomeFlush;
            self.flush(steps);
        }
        // Otherwise writes of the guest are on their way to the rest, and it goes on when they have ended.
    }

    /// All operations of a phase are done.
    pub(super) fn phase_done(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        match self.phase {
            Phase::Follow => self.phase = Phase::Idle,
            Phase::Body if self.making.as_ref().is_some_and(|making| !making.is_given()) => {
                let part = self.making.as_mut().map(|making| making.next_part(&self.format, self.blocks_at_once, view));
                match part.unwrap_or_else(|| Ok(Vec::new())) {
                    Ok(body) => body.into_iter().for_each(|(at, run)| self.write(Place::Log(at), run, steps)),
                    Err(why) => self.fail(&why, steps),
                }
            }
            Phase::Body => {
                self.phase = Phase::BodyFlush;
                self.flush(steps);
            }
            Phase::BodyFlush => {
                if self.is_proven {
                    self.is_live = true;
                    self.drop_compounds(view);
                }
                self.write_commit(steps);
                self.superblock_done(now, view, steps);
            }
            Phase::Commit => {
                self.phase = Phase::CommitFlush;
                self.flush(steps);
            }
            // There are more parts.
            Phase::CommitFlush if self.making.as_ref().is_some_and(|making| making.window.is_empty()) => {
                self.phase = Phase::Idle;
                if let Some(making) = self.making.take() {
                    self.add_to_live(&making);
                    self.in_parts.extend(making.window.blocks);
                }
            }
            Phase::CommitFlush if self.is_proven => self.compound_done(now, view, steps),
            Phase::CommitFlush => {
                self.phase = Phase::Proof;
                self.write_superblock(self.live.tail, steps);
            }
            Phase::Proof => {
                self.phase = Phase::ProofFlush;
                self.flush(steps);
            }
            Phase::ProofFlush => {
                (self.is_proven, self.is_live) = (true, true);
                self.compound_done(now, view, steps);
                self.superblock_done(now, view, steps);
            }
            Phase::BringHome => {
                for (block, compound) in std::mem::take(&mut self.bringing) {
                    self.live.written(block, compound, self.ended);
                }
                self.bringing_blocks = BlockSet::default();
                self.phase = Phase::HomeFlush;
                self.flush(steps);
            }
            Phase::HomeFlush => self.move_tail(steps),
            Phase::Tail => {
                self.phase = Phase::TailFlush;
                self.flush(steps);
            }
            Phase::TailFlush => {
                self.drop_compounds(view);
                self.is_live = true;
                self.phase = Phase::Idle;
                self.is_emptying &= !self.live.is_empty();
                // A guest may begin to close while a superblock of ours is on its way.
                let is_closed = std::mem::take(&mut self.is_closing_written);
                if let Some((_, answer)) = self.closing.take_if(|_| is_closed) {
                    self.is_live = false;
                    self.is_closed = true;
                    steps.push(Step::Answer { answer, is_good: true });
                }
                self.superblock_done(now, view, steps);
            }
            Phase::Idle | Phase::Failed => {}
        }
    }

    /// A superblock that leaves compounds out is durable.
    pub(super) fn drop_compounds(&mut self, view: &mut dyn View) {
        let at_home = self.live.drop_compounds(&self.format, std::mem::take(&mut self.dropping));
        view.at_home(&at_home);
    }

    /// The body is durable: the commit block makes it count.
    pub(super) fn write_commit(&mut self, steps: &mut Vec<Step>) {
        let Some(making) = &self.making else { return };
        assert!(self.body_covers >= making.window.ended, "rule (c): ordered data is not flushed");
        let (at, commit) = (making.commit_at, Arc::clone(&making.commit));
        self.phase = Phase::Commit;
        self.write(Place::Log(at), commit, steps);
    }

    /// A compound is durable.
    pub(super) fn compound_done(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        self.phase = Phase::Idle;
        let Some(making) = self.making.take() else { return };
        self.add_to_live(&making);
        let Making { window, sorted, .. } = making;
        self.window_done(now, window, sorted, view, steps);
    }

    /// The log on storage has it.
    pub(super) fn add_to_live(&mut self, making: &Making) {
        let Making { window, sorted, tags, length, .. } = making;
        let compound = self.live.head.1;
        self.live.add(&self.format, *length, tags, &sorted.revokes);
        self.status.compounds += 1;
        for (block, ..) in &sorted.tags {
            let Some(held) = window.blocks.get(block).filter(|held| held.is_past) else { continue };
            self.live.past(*block);
            // It is not written over by us. What is under way to it says so when it has ended.
            if let Some(ended) = held.home {
                self.live.written(*block, compound, ended);
            }
        }
    }

    /// What was committed is durable.
    pub(super) fn window_done(
        &mut self,
        now: Duration,
        window: Window,
        sorted: Sorted,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) {
        let Some((_, through, _)) = window.span else { return };
        (self.durable, self.is_following) = (through, false);
        self.found = BTreeMap::new();
        let mut blocks: Vec<(u64, Version)> =
            sorted.tags.iter().map(|(block, version, _)| (*block, *version)).collect();
        // What the log has now, or what was freed, is another version, or none.
        for (block, ..) in &sorted.tags {
            self.settled.remove(block);
        }
        for block in window.revoked.iter() {
            self.settled.remove(block);
        }
        for (block, version) in &sorted.appends {
            self.settled.insert(*block, *version);
        }
        // No more than a guest's log can hold: what is not known is written once more.
        while self.settled.len() as u64 > u64::from(self.format.log_blocks()) {
            self.settled.pop_first();
        }
        blocks.extend(sorted.appends);
        blocks.extend(sorted.at_home);
        // What compounds before this one have, and this one says nothing of, is durable with it.
        let is_said = |block: &u64| window.blocks.contains_key(block) || window.revoked.contains(block);
        let in_parts = std::mem::take(&mut self.in_parts).into_iter().filter(|(block, _)| !is_said(block));
        blocks.extend(in_parts.map(|(block, held)| (block, held.version)));
        view.made_durable(through, &blocks);
        let mut still = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            if sequence::is_after(waiting.through, through) {
                self.is_urgent = true;
                still.push(waiting);
                continue;
            }
            // What has become durable may be a copy that this tail passes.
            if waiting.tail.is_some_and(|tail| self.pass_over(now, tail)) {
                still.push(waiting);
                continue;
            }
            if let Some(tail) = waiting.tail {
                if self.awaits_superblock(waiting.answer, tail) {
                    continue;
                }
                self.tail_is(tail);
            }
            steps.push(Step::Answer { answer: waiting.answer, is_good: true });
        }
        self.waiting = still;
        self.is_urgent &= !self.open.is_empty();
    }

    /// What is home is durable: the log begins behind it.
    pub(super) fn move_tail(&mut self, steps: &mut Vec<Step>) {
        self.dropping = self.live.droppable();
        let is_all = self.dropping == self.live.compounds();
        if self.dropping == 0 && !is_all {
            // The guest has begun to write the rest: it goes on when that has ended.
            self.phase = Phase::Idle;
            return;
        }
        self.phase = Phase::Tail;
        match &self.closing {
            Some((superblock, _)) if is_all && self.open.is_empty() => {
                let next = self.live.head.1;
                let mut raw = superblock.clone();
                let number = Superblock::decode(&raw).map_or(next, |said| sequence::latest(said.sequence, next));
                match SuperblockEdit::new(&mut raw) {
                    Ok(mut edit) => edit.start(0).sequence(number).seal(),
                    Err(error) => return self.fail(&error.to_string(), steps),
                }
                self.is_closing_written = true;
                self.is_touched = false;
                self.write(Place::Superblock, Arc::from(raw), steps);
            }
            _ => self.write_superblock(self.live.tail_after(&self.format, self.dropping), steps),
        }
    }
}
