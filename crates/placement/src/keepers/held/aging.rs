//! Durability by age (`durable-within`) of a log that is held: crate `durability` decides, here it is asked and carried out.
//! This file has what happens while it is in force. What is known of it (`state`), how the machine is asked (`machine`), how it begins, meets
//! changes of homes and superblocks, and ends has a file each.
//!
//! While it is in force, the journal's own place on storage has a live log of compounds, and its superblock says so, with the mark of
//! durability by age ([`crate::mark::MarkKind::Aged`]) in the place of the error mark: a power cut leaves a file system that the
//! guest's kernel or e2fsck recovers by themselves. Every change of homes, the guest's and the host's, asks the machine first; a
//! superblock of the guest that moves the tail or closes the log is held until the machine agrees, and taken then
//! ([`Step::Superblock`]).
//!
//! It begins with the log (storage is a truth then), or under a running guest: when no home write is under way, and the error mark stays
//! until the first compound is durable. It ends with the log, at the operator's wish, before somebody takes the log elsewhere, or when
//! it fails: then every operation of ours ends first, the error mark goes to storage, and only then anything goes on, as with
//! `never`.
//!
//! A log block for which there is no memory would go to its own place, which is where compounds are: it waits until the error mark is
//! durable there, and nothing begins beside blocks that are stored so.
//!
//! What it must never do: let a home write pass the machine; let anything go between the end of durability and the error mark; have
//! compounds and log blocks of the guest in one place; use a compound's number twice in one opening of a log.
//!
//! Failure story: where the error mark cannot be written either, every change of homes, every superblock and every log block without
//! memory fails, and the mark is tried again with each.

mod beginning;
mod ending;
mod homes;
mod machine;
mod report;
pub(super) mod state;
mod superblock;

use self::machine::copied;
use self::state::{Aging, Asked, Cause, Ending, Unheld};
use super::holder::Held;
use super::watched;
use crate::keeper::{Side, Step, Steps};
use crate::log::Log;
use crate::opening::written_home;
use block_route::{Buffer, RequestId};
use durability::{Freed, OperationId, Transaction, Version};
use journal_area::Accepted;
use std::io;
use std::time::Duration;

/// Storage's superblock is written anew this often while homes change, so that an older copy of the image is told from the image.
const COUNTED_EVERY: Duration = Duration::from_secs(1);

impl Held {
    /// Whether steps of the machine are under way.
    pub(super) fn has_operations(&self) -> bool {
        self.state().aging.as_ref().is_some_and(|aging| !aging.operations.is_empty())
    }

    /// There is no memory for a log block. Given back if it may go to its own place.
    pub(super) fn aged_stored(&self, log: &Log, unheld: Unheld, steps: &mut Steps) -> Option<Buffer> {
        let mut state = self.state();
        let Some(aging) = &mut state.aging else { return Some(unheld.2) };
        steps.push(Side::Journal, Step::Hold(unheld.1));
        aging.unheld.push(unheld);
        self.lacks_memory(log, aging, steps);
        self.end_if_drained(log, &mut state, steps);
        None
    }

    /// The last transaction that is durable, while durability by age is in force; nothing within that with no age, which is to say that
    /// nobody may count on what an age allowed.
    pub(super) fn aged_durable(&self) -> Option<Option<u32>> {
        let state = self.state();
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none())?;
        Some((!aging.within.is_zero()).then(|| aging.machine.durable()))
    }

    /// Whether no age is wished, and something is not durable yet that an age had allowed; also while durability ends, until storage says so.
    pub(super) fn aged_owes(&self) -> bool {
        self.state().aging.as_ref().is_some_and(Aging::owes)
    }

    /// Whether durability by age has an end under way.
    pub(super) fn aged_is_ending(&self) -> bool {
        self.state().aging.as_ref().is_some_and(|aging| aging.ending.is_some())
    }

    /// Whether the machine has agreed that this superblock is taken.
    pub(super) fn aged_is_ready(&self, request: RequestId) -> bool {
        self.state().aging.as_ref().is_some_and(|aging| aging.ready == Some(request))
    }

    /// The area has accepted transactions, written with these requests.
    pub(super) fn aged_committed(&self, log: &Log, accepted: Vec<Accepted>, requests: &[RequestId], steps: &mut Steps) {
        let mut state = self.state();
        let Some(aging) = &mut state.aging else { return };
        for accepted in accepted {
            let blocks: Vec<(u64, Version)> = accepted
                .tags
                .iter()
                .map(|(position, block)| (*block, watched::version(accepted.sequence, *position)))
                .collect();
            let mut read = |version| copied(log, &self.area, self.id, version);
            let making = aging.machine.under_way();
            let freed = aging.watched.committed(log, &blocks, making, &mut read).unwrap_or_else(|error| {
                log::error!(
                    "disk {}: reading bitmaps failed: {error}; until the file system at byte {} is next mounted, every commit is durable \
                     before its guest is told of it (as with durable-within=0), and nothing is an append",
                    log.home.options.name,
                    log.place.home_start
                );
                Freed::Unknown
            });
            let transaction = Transaction { sequence: accepted.sequence, blocks, revokes: accepted.revokes, freed };
            let mut requests = requests.to_vec();
            requests.sort_unstable_by_key(|request| request.0);
            requests.dedup();
            requests.iter().for_each(|request| steps.push(Side::Journal, Step::Hold(*request)));
            let answer = aging.ask(Asked::Commit(requests));
            aging.call(self, log, steps, |machine, now, view, said| {
                machine.committed(now, &transaction, answer, view, said);
            });
        }
        self.end_if_drained(log, &mut state, steps);
    }

    /// These requests write once more what transactions have that count already: the guest was not answered, by an earlier process, and
    /// what it asks for may not be durable.
    pub(super) fn aged_repeated(&self, log: &Log, mut requests: Vec<RequestId>, steps: &mut Steps) {
        let mut state = self.state();
        requests.sort_unstable_by_key(|request| request.0);
        requests.dedup();
        let owes_errors = self.owes_errors(log, &mut state);
        match &mut state.aging {
            Some(aging) if aging.answers_late() => {
                for request in &requests {
                    steps.push(Side::Journal, Step::Hold(*request));
                }
                let answer = aging.ask(Asked::CommitAgain(requests));
                aging.call(self, log, steps, |machine, now, view, said| machine.flush_now(now, answer, view, said));
            }
            None if owes_errors => requests.into_iter().for_each(|request| steps.fail(request)),
            _ => {}
        }
        self.end_if_drained(log, &mut state, steps);
    }

    /// A step of the machine is done.
    pub(super) fn aged_done(&self, log: &Log, number: u64, error: Option<&io::Error>, steps: &mut Steps) {
        let mut state = self.state();
        let Some(aging) = state.aging.as_mut().filter(|aging| aging.stint == number >> 48) else { return };
        let operation = OperationId(number & ((1 << 48) - 1));
        let Some(pending) = aging.operations.get_mut(&operation) else { return };
        if let Some(error) = error {
            log::error!("disk {}: making the journal durable failed: {error}", log.home.options.name);
            pending.is_good = false;
        }
        if log.home.failed_flushes() != aging.failed_flushes {
            // Of what was written before it, the guest's ordered data and its homes among that, nobody knows what was lost.
            pending.is_good = false;
        }
        pending.parts -= 1;
        if pending.parts > 0 {
            return;
        }
        let Some(pending) = aging.operations.remove(&operation) else { return };
        if let Some(opening) = pending.opening.filter(|_| pending.is_good) {
            self.area.note_opening(self.id, &opening, true);
            aging.opening = opening;
        }
        aging.call(self, log, steps, |machine, now, view, said| {
            machine.operation_done(now, operation, pending.is_good, view, said);
        });
        self.end_if_drained(log, &mut state, steps);
    }

    /// The disk was woken: what is wished may be something else, or time has come.
    pub(super) fn aged_woken(&self, log: &Log, steps: &mut Steps) {
        let mut state = self.state();
        self.owes_errors(log, &mut state);
        let wished = log.home.durable_within().filter(|_| !state.is_leaving);
        if let Some(aging) = &mut state.aging
            && aging.ending.is_none()
        {
            match wished {
                None => {
                    let why = "as wished".to_owned();
                    aging.ending = Some(Ending { why, cause: Cause::Wish });
                    self.give_up(log, aging, steps);
                }
                Some(within) => {
                    if within != aging.within {
                        if within.is_zero() {
                            // What ended until now was no matter of the guest's flushes.
                            log.home.set_dirty();
                        }
                        aging.change_age(within);
                        aging.call(self, log, steps, |machine, now, view, said| {
                            machine.set_within(now, within, view, said);
                        });
                    }
                    let is_time = log.home.now() - aging.counted_at >= COUNTED_EVERY;
                    if is_time {
                        aging.counted_at = log.home.now();
                    }
                    if is_time && aging.counted_home != written_home(log) {
                        aging.call(self, log, steps, |machine, now, view, said| machine.touch(now, view, said));
                    }
                    aging.call(self, log, steps, |machine, now, view, said| machine.timer(now, view, said));
                }
            }
        }
        self.end_if_drained(log, &mut state, steps);
        drop(state);
        self.try_engage(log, steps);
    }

    pub(super) fn aged_due_in(&self, log: &Log) -> Option<Duration> {
        let state = self.state();
        if let Some(until) = state.lacks_memory_until.filter(|_| log.is_open()) {
            return Some(until.saturating_sub(log.home.now()));
        }
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none())?;
        // Whether homes have changed is seen then.
        let count = aging.counted_at + COUNTED_EVERY;
        let at = aging.machine.deadline().map_or(count, |deadline| count.min(aging.since + deadline));
        Some(at.saturating_sub(log.home.now()))
    }
}
