//! The machine of durability by age is asked, sees what is committed and at home, and has done what it wants.

use super::super::holder::Held;
use super::super::watched::{self, Watched};
use super::state::{Aging, Asked, Cause, Ending, Pending};
use crate::aged;
use crate::keeper::{Side, Step, Steps, Task};
use crate::log::Log;
use crate::mark;
use crate::opening::written_home;
use block_route::{Buffer, Status};
use durability::{AnswerId, Committed, Durability, OperationId, Place, Version, View, WriteId};
use jbd2::{Superblock, sequence};
use journal_area::{CommittedVersion, HostWrite, JournalArea, LogId, Opening, Source};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What the machine sees.
pub(super) struct Shown<'a> {
    pub(super) log: &'a Log,
    pub(super) area: &'a JournalArea,
    pub(super) id: LogId,
    pub(super) watched: &'a mut Watched,
}

impl View for Shown<'_> {
    fn made_durable(&mut self, through: u32, blocks: &[(u64, Version)]) {
        self.watched.made_durable(self.log, through, blocks);
    }

    fn at_home(&mut self, blocks: &[u64]) {
        self.watched.at_home(blocks);
    }

    fn is_free(&mut self, block: u64) -> bool {
        self.watched.is_free(self.log, block)
    }

    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()> {
        content(self.log, self.area, self.id, version, into)
    }

    fn logged(&mut self, position: u32, into: &mut [u8]) -> io::Result<()> {
        self.log.read_stored(position, into)
    }

    fn wall_clock(&self) -> (u64, u32) {
        aged::wall_clock()
    }

    fn committed_after(&mut self, blocks: Range<u64>, after: u32) -> Vec<Committed> {
        let newest = self.area.newest_versions(self.id, &blocks).into_iter();
        let newest = newest.filter(|(_, transaction, ..)| sequence::is_after(*transaction, after));
        let known = newest.map(|(block, transaction, position, is_gone_over)| {
            let version = watched::version(transaction, position);
            Committed { block, version, transaction, is_gone_over }
        });
        known.collect()
    }
}

/// Reads a committed version, wherever it is.
fn content(log: &Log, area: &JournalArea, id: LogId, version: Version, into: &mut [u8]) -> io::Result<()> {
    let (sequence, position) = watched::parts(version);
    match area.version(id, position, sequence, into) {
        CommittedVersion::Copied => Ok(()),
        CommittedVersion::Home(block) => log.read_home(block, into),
        // Beside compounds nothing is stored so, and what is read there is no block of the guest's log.
        CommittedVersion::Stored { .. } => {
            Err(io::Error::other(format!("log block {position} of transaction {sequence} is in its own place")))
        }
        CommittedVersion::Gone => {
            Err(io::Error::other(format!("log block {position} of transaction {sequence} is not held any more")))
        }
    }
}

/// The content of a committed version, if it is here still.
pub(super) fn copied(log: &Log, area: &JournalArea, id: LogId, version: Version) -> Option<Arc<[u8]>> {
    let mut into = vec![0; log.place.block_bytes as usize];
    content(log, area, id, version, &mut into).ok().map(|()| Arc::from(into))
}

/// A host's write of a committed version sets out.
pub(super) fn host_write(log: &Log, operation: usize, write: HostWrite, steps: &mut Steps) {
    let buffer = match write.source {
        Source::Held(slice) => Buffer::Slice(slice),
        Source::Bytes(bytes) => Buffer::Bytes(bytes),
        Source::Given => unreachable!("the host has nothing given"),
    };
    let (offset, task) = (log.home_offset(write.block), Task::HostWrite(operation));
    steps.push(Side::Home, Step::Write { request: None, offset, content: vec![buffer], task });
}

impl Aging {
    /// Asks the machine, and has done what it wants.
    pub(super) fn call<T>(
        &mut self,
        held: &Held,
        log: &Log,
        steps: &mut Steps,
        call: impl FnOnce(&mut Durability, Duration, &mut dyn View, &mut Vec<durability::Step>) -> T,
    ) -> T {
        let mut said = Vec::new();
        let mut view = Shown { log, area: &held.area, id: held.id, watched: &mut self.watched };
        let (compounds, was_proven) = (self.machine.status().compounds, self.machine.is_proven());
        let result = call(&mut self.machine, log.home.now() - self.since, &mut view, &mut said);
        if self.watched.is_lost() && !std::mem::replace(&mut self.was_lost, true) {
            // No age is in force from here on, and what ended until now was no matter of the guest's flushes.
            log.home.set_dirty();
        }
        self.time_compounds(log, compounds);
        if !was_proven && self.machine.is_proven() {
            // From here on a commit that is answered late is promised to be durable. What waited is.
            self.owes_errors = false;
            held.area.note_doubt(held.id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (false, false));
        }
        // Before any of it is written: who goes on without this process has to know it.
        let numbered = Some(self.next_number());
        if self.numbered != numbered {
            held.area.note_numbered(held.id, numbered);
            self.numbered = numbered;
        }
        self.carry_out(held, log, said, steps);
        result
    }

    /// Counts how long a compound took that is durable since the machine had made so many.
    fn time_compounds(&mut self, log: &Log, before: u64) {
        let is_durable = self.machine.status().compounds > before;
        if is_durable && let Some(since) = self.making_since.take() {
            log.home.note_compound(log.home.now().saturating_sub(since));
        }
        match self.machine.is_making() {
            true if self.making_since.is_none() => self.making_since = Some(log.home.now()),
            true => {}
            false => self.making_since = None,
        }
    }

    pub(super) fn carry_out(&mut self, held: &Held, log: &Log, said: Vec<durability::Step>, steps: &mut Steps) {
        use durability::Step as Do;
        for step in said {
            match step {
                Do::Write { operation, place, bytes } => match self.write(held, log, operation, place, bytes, steps) {
                    Ok(()) => {}
                    Err(error) => {
                        log::error!("disk {}: {error}", log.home.options.name);
                        self.operations.remove(&operation);
                        self.call(held, log, steps, |machine, now, view, said| {
                            machine.operation_done(now, operation, false, view, said);
                        });
                    }
                },
                Do::Flush { operation } => {
                    self.operations.insert(operation, Pending { parts: 1, is_good: true, opening: None });
                    steps.push(Side::Home, Step::Flush { task: self.task(operation) });
                }
                Do::Go(id) => self.go(log, id, steps),
                Do::Answer { answer, is_good } => self.answered(answer, is_good, steps),
                Do::Failed(why) => {
                    self.takes_back(held, log);
                    self.fault(held, why);
                }
            }
        }
    }

    /// Operations of one that is over mean nothing to the next.
    fn task(&self, operation: OperationId) -> Task {
        Task::Own(self.stint << 48 | operation.0)
    }

    fn write(
        &mut self,
        held: &Held,
        log: &Log,
        operation: OperationId,
        place: Place,
        bytes: Arc<[u8]>,
        steps: &mut Steps,
    ) -> io::Result<()> {
        let mut opening = None;
        let parts: Vec<(Side, u64, Buffer)> = match place {
            Place::Home(block) => vec![(Side::Home, log.home_offset(block), Buffer::Bytes(bytes))],
            Place::Log(position) => aged::parts(&log.place, position, &bytes)?
                .into_iter()
                .map(|(offset, part)| (Side::Journal, offset, Buffer::Bytes(Arc::from(part))))
                .collect(),
            Place::Superblock => {
                let said = Superblock::decode(&bytes).map_err(io::Error::other)?;
                let content = if said.is_empty() {
                    // Who goes on without this process finds an empty log, and one that is open here.
                    held.area.note_closing(held.id, true);
                    bytes
                } else {
                    let next = Opening { count: self.opening.count + 1, ..self.opening };
                    // The area knows both until storage says the later one.
                    held.area.note_opening(held.id, &next, false);
                    opening = Some(next);
                    self.counted_at = log.home.now();
                    self.counted_home = written_home(log);
                    Arc::from(mark::aged(&bytes, &next, (said.start, said.sequence))?)
                };
                vec![(Side::Journal, log.place_of(0)?, Buffer::Bytes(content))]
            }
        };
        self.operations.insert(operation, Pending { parts: parts.len(), is_good: true, opening });
        let task = self.task(operation);
        for (side, offset, buffer) in parts {
            steps.push(side, Step::Write { request: None, offset, content: vec![buffer], task });
        }
        Ok(())
    }

    /// A write that waited may go.
    pub(super) fn go(&mut self, log: &Log, id: WriteId, steps: &mut Steps) {
        if self.hosts.contains_key(&id) {
            // What goes at the end goes behind the error mark.
            if self.ending.is_none()
                && let Some((operation, write)) = self.hosts.remove(&id)
            {
                self.machine.write_carries(id, [write.block]);
                self.flights.insert(operation, id);
                host_write(log, operation, write, steps);
            }
            return;
        }
        if let Some((_, is_let_go)) = self.guests.values_mut().find(|(waiting, _)| *waiting == id) {
            *is_let_go = true;
            steps.push(Side::Home, Step::Retry);
        }
    }

    fn answered(&mut self, answer: AnswerId, is_good: bool, steps: &mut Steps) {
        let is_held = |is_repeated| self.ending.is_some() && self.promises_held(is_repeated);
        let (is_held, is_held_again) = (is_held(false), is_held(true));
        match self.answers.remove(&answer) {
            Some(Asked::Commit(requests)) if !is_good && is_held => self.told_later.extend(requests),
            Some(Asked::CommitAgain(requests)) if !is_good && is_held_again => self.told_later.extend(requests),
            Some(Asked::Commit(requests) | Asked::CommitAgain(requests)) => {
                let status = if is_good { Status::Ok } else { Status::IoError };
                requests.into_iter().for_each(|request| steps.push(Side::Journal, Step::Release(request, status)));
            }
            Some(Asked::Superblock { request, content, closes }) if is_good => {
                self.ready = Some(request);
                self.is_closed = closes;
                steps.push(Side::Journal, Step::Superblock(request, content));
            }
            Some(Asked::Superblock { request, content, .. }) => self.later.push((request, content)),
            Some(Asked::Nobody) | None => {}
        }
    }

    /// It is about to end, and not by the guest's doing. With no age its guest was told of commits as durable, which they are not from the end on: its
    /// next flush fails, as behind a flush that has failed, of which it is told anyway.
    fn takes_back(&mut self, held: &Held, log: &Log) {
        if self.ending.is_some() || self.promises_held(false) || log.home.failed_flushes() != self.failed_flushes {
            return;
        }
        // First of all: who goes on without this process has to tell what this one has not come to.
        held.area.note_doubt(held.id, |doubt| (doubt.is_doubted, doubt.is_untold) = (true, true));
        log.home.note_broken_promise();
    }

    /// It ends until the log is opened anew.
    pub(super) fn fault(&mut self, held: &Held, why: String) {
        if self.ending.is_none() {
            // First of all: who goes on without this process must not begin it again.
            held.area.note_doubt(held.id, |doubt| doubt.is_doubted = true);
            self.ending = Some(Ending { why, cause: Cause::Fault });
        }
    }
}
