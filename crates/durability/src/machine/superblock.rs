//! The journal superblock on storage: who waits for it to move or to close the log, and what it says.

use super::{Durability, Phase, Waiting};
use crate::contract::{AnswerId, Place, Step, View};
use crate::window::Held;
use jbd2::{SUPERBLOCK_BYTES, SuperblockEdit, sequence};
use std::sync::Arc;
use std::time::Duration;

impl Durability {
    /// The guest moves its log's tail: it begins with transaction `tail` from the answer on.
    pub fn tail_moves(
        &mut self,
        now: Duration,
        tail: u32,
        answer: AnswerId,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) {
        // A kernel that has replayed its log leaves numbers out.
        let last = self.last();
        let through = tail.wrapping_sub(1);
        let through = if sequence::is_after(through, last) { last } else { through };
        let is_failed = self.phase == Phase::Failed;
        let passes = !is_failed && self.pass_over(now, tail);
        if is_failed || !(passes || sequence::is_after(through, self.durable)) {
            if is_failed || !self.awaits_superblock(answer, tail) {
                self.tail_is(tail);
                steps.push(Step::Answer { answer, is_good: true });
            }
            if self.is_touched && !is_failed {
                self.drive(now, view, steps);
            }
            return;
        }
        // What the guest forgets must be durable: a version that its log gives up is nowhere else.
        self.waiting.push(Waiting { through, answer, tail: Some(tail), is_slowed: false });
        self.is_urgent |= !self.open.is_empty();
        self.drive(now, view, steps);
    }

    /// With no age its guest is told of a superblock when all that it says is durable.
    pub(super) fn awaits_superblock(&mut self, answer: AnswerId, tail: u32) -> bool {
        let waits = (self.is_touched || self.is_telling) && self.within.is_zero();
        if waits {
            self.awaiting_superblock.push((answer, tail));
        }
        waits
    }

    /// A superblock that was written is durable.
    pub(super) fn superblock_done(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        self.is_telling = false;
        for (answer, tail) in std::mem::take(&mut self.awaiting_superblock) {
            if self.is_touched {
                self.awaiting_superblock.push((answer, tail));
            } else {
                // What has become durable meanwhile may be a copy that this tail passes.
                self.tail_moves(now, tail, answer, view, steps);
            }
        }
    }

    /// The guest's log begins here. What it has not any more is not brought back: rule (e).
    pub(super) fn tail_is(&mut self, tail: u32) {
        self.guest_tail = sequence::latest(self.guest_tail, tail);
        let is_durable = |held: &Held| !sequence::is_after(held.sequence, self.durable);
        self.open.blocks.retain(|_, held| !(is_durable(held) && sequence::is_after(tail, held.sequence)));
    }

    /// The guest closes its log with this superblock: answered when storage needs no log and says so.
    pub fn closes(
        &mut self,
        now: Duration,
        superblock: &[u8],
        answer: AnswerId,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) {
        if self.phase == Phase::Failed {
            steps.push(Step::Answer { answer, is_good: false });
            return;
        }
        self.closing = Some((superblock.to_vec(), answer));
        self.drive(now, view, steps);
    }

    /// The superblock goes to storage with these fields from now on, and soon if they say something new (an error of the guest's, say); where
    /// the log begins, and its number, are ours.
    pub fn set_superblock(&mut self, superblock: &[u8]) {
        // What closes the log is the last that is written of it.
        if let Some(raw) = superblock.get(..SUPERBLOCK_BYTES).filter(|_| !self.is_ended()) {
            self.is_touched |= but_for_the_log(raw) != but_for_the_log(&self.superblock);
            self.superblock = raw.to_vec();
        }
    }

    /// The superblock on storage is written anew, soon: what whoever runs this adds to it has changed.
    pub fn touch(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        if !self.is_ended() {
            self.is_touched = true;
            self.drive(now, view, steps);
        }
    }

    /// Whether the superblock that closes the log is on its way to storage, or there: another one behind it would say that there is a log.
    pub(super) fn is_ended(&self) -> bool {
        self.is_closing_written || self.is_closed
    }

    /// Where the log on storage begins, and the number of the next compound.
    pub fn log_on_storage(&self) -> ((u32, u32), u32) {
        (self.live.tail, self.live.head.1)
    }

    pub(super) fn write_superblock(&mut self, (start, sequence): (u32, u32), steps: &mut Vec<Step>) {
        self.is_telling |= std::mem::take(&mut self.is_touched);
        let mut raw = self.superblock.clone();
        match SuperblockEdit::new(&mut raw) {
            Ok(mut edit) => edit.start(start).sequence(sequence).seal(),
            Err(error) => return self.fail(&error.to_string(), steps),
        }
        self.write(Place::Superblock, Arc::from(raw), steps);
    }
}

/// What a superblock says beside where its log begins.
fn but_for_the_log(superblock: &[u8]) -> Option<Vec<u8>> {
    let mut raw = superblock.to_vec();
    SuperblockEdit::new(&mut raw).ok()?.start(0).sequence(0).seal();
    Some(raw)
}
