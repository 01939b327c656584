//! The guest's journal superblock: held until the machine agrees, and, where it closes the log, behind the clearing away of compounds
//! whose numbers the guest's next transactions will have.

use super::super::holder::Held;
use super::state::{AgedSuperblock, Asked, Cause, Ending};
use crate::keeper::{Side, Step, Steps, SuperblockBlock};
use crate::log::Log;
use crate::numbers;
use crate::opening::is_alone_in_its_page;
use jbd2::{Superblock, sequence};
use std::io;

impl Held {
    /// The guest writes the superblock of an open log.
    pub(in crate::keepers::held) fn aged_superblock(
        &self,
        log: &Log,
        block: &SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> AgedSuperblock {
        let mut state = self.state();
        let Some(aging) = &mut state.aging else { return AgedSuperblock::Taken { is_on_storage: false } };
        let (request, content) = (block.request, block.content.to_vec());
        if aging.ready == Some(request) {
            aging.ready = None;
            let is_on_storage = aging.is_closed;
            if !is_on_storage && self.area.is_superblock_foreign(self.id, &content) {
                // While it waited, its guest has written over the log that it was about.
                let why = "the guest wrote over its journal while a superblock of it was made durable".to_owned();
                aging.fault(self, why);
                aging.later.push((request, content));
                steps.push(Side::Journal, Step::Hold(request));
                self.give_up(log, aging, steps);
                self.end_if_drained(log, &mut state, steps);
                return AgedSuperblock::Held;
            }
            aging.superblock = content;
            if is_on_storage && let Some(mut aging) = self.over(&mut state) {
                aging.take_waiting().fail(steps);
                self.end_unsent(aging.hosts.into_values());
            }
            self.end_if_drained(log, &mut state, steps);
            return AgedSuperblock::Taken { is_on_storage };
        }
        steps.push(Side::Journal, Step::Hold(request));
        let judged = Superblock::parse(&content).ok();
        let is_log = judged.filter(|(_, format)| *format == aging.format).map(|(said, _)| said).filter(|said| {
            let tail = self.area.tail(self.id);
            said.is_empty() || tail.is_some_and(|tail| !sequence::is_after(tail.sequence, said.sequence))
        });
        // Where the area is about to end the log, what is made durable beside it has to have ended before.
        let is_log = is_log.filter(|_| !self.area.is_superblock_foreign(self.id, &content));
        match is_log {
            _ if aging.ending.is_some() => aging.later.push((request, content)),
            Some(said) if numbers::may_meet(said.sequence, Some(aging.next_number())) && said.is_empty() => {
                let why = "its guest closes it, and it began more often than its guest has committed".to_owned();
                aging.ending = Some(Ending { why, cause: Cause::Numbers });
                aging.later.push((request, content));
                self.give_up(log, aging, steps);
            }
            Some(said) if said.is_empty() => {
                let answer = aging.ask(Asked::Superblock { request, content: content.clone(), closes: true });
                aging.call(self, log, steps, |machine, now, view, said| {
                    machine.closes(now, &content, answer, view, said);
                });
            }
            Some(said) => {
                aging.machine.set_superblock(&content);
                let answer = aging.ask(Asked::Superblock { request, content, closes: false });
                aging.call(self, log, steps, |machine, now, view, steps| {
                    machine.tail_moves(now, said.sequence, answer, view, steps);
                });
            }
            None => {
                let why = "the guest wrote something else in the place of its journal's superblock".to_owned();
                aging.fault(self, why);
                aging.later.push((request, content));
                self.give_up(log, aging, steps);
            }
        }
        self.end_if_drained(log, &mut state, steps);
        AgedSuperblock::Held
    }

    /// The area has no log any more, and storage is on its way to be what the guest says. Whoever comes to this with a machine that goes on has a fault,
    /// and nobody can wait for it to end: what it has under way may land on what the guest writes there.
    pub(in crate::keepers::held) fn aged_has_no_log(&self, log: &Log, steps: &mut Steps) {
        let mut state = self.state();
        let Some(mut aging) = self.over(&mut state) else { return };
        log.home.note_fault(
            "a journal was closed that was still made durable, which is a fault of amberlog's: run e2fsck -f on its file system",
        );
        aging.take_waiting().fail(steps);
        self.end_unsent(aging.hosts.into_values());
        // What waited for the machine waits for nothing.
        steps.push(Side::Home, Step::Retry);
    }

    /// If this superblock closes the log, and compounds have had numbers that are to be the guest's: which these are.
    pub(super) fn to_clear(&self, log: &Log, block: &[u8], numbered: Option<u32>) -> Option<(u32, Option<u32>)> {
        let said = Superblock::decode(block).ok()?;
        if !said.is_empty() || !numbers::may_meet(said.sequence, numbered) {
            return None;
        }
        // Whatever is written there, what the guest has committed has earlier numbers.
        let next = self.area.next_sequence(self.id).filter(|_| log.is_open())?;
        Some((sequence::latest(said.sequence, next), numbered))
    }

    /// Whether this superblock has to wait: what is to be cleared away shares pages with homes that are on their way past the cache.
    pub(in crate::keepers::held) fn clears_later(
        &self,
        log: &Log,
        block: &SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> bool {
        let mut state = self.state();
        let is_free = is_alone_in_its_page(log) || !self.area.has_home_writes_in_flight(self.id);
        if is_free || self.to_clear(log, block.content, state.next_number).is_none() {
            return false;
        }
        state.closing.push((block.request, block.content.to_vec()));
        steps.push(Side::Journal, Step::Hold(block.request));
        true
    }

    /// The guest writes this superblock. If that closes the log, no compound stays that has a number which is to be the guest's.
    pub(in crate::keepers::held) fn clear_numbers(&self, log: &Log, block: &[u8]) -> io::Result<()> {
        let numbered = self.state().next_number;
        let Some(which) = self.to_clear(log, block, numbered) else { return Ok(()) };
        let Some(held) = self.area.log_now(self.id) else { return Ok(()) };
        numbers::wipe(&held, &log.place, &log.journal.file, which)
    }
}
