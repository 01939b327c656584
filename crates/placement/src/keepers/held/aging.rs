//! Durability by age (`durable-within`) of a log that is held: crate `durability` decides, here it is asked and carried out.
//! This file has its state, and what the machine sees and says; how it begins, meets changes of homes and superblocks, and ends has a file each.
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
mod report;
mod superblock;

pub(super) use self::superblock::AgedSuperblock;

use self::ending::{Cause, Ending};
use self::homes::host_write;
use super::Held;
use super::watched::{self, Watched};
use crate::aged;
use crate::keeper::{Side, Step, Steps, Task};
use crate::log::Log;
use crate::mark;
use crate::opening::{is_alone_in_its_page, written_home};
use block_route::{Buffer, RequestId, Status};
use durability::{AnswerId, Committed, Durability, Freed, OperationId, Place, Transaction, Version, View, WriteId};
use jbd2::{Format, Superblock, sequence};
use journal_area::{Accepted, CommittedVersion, HostWrite, JournalArea, LogId, Opening};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tracing_mutex::stdsync::MutexGuard;

/// Storage's superblock is written anew this often while homes change, so that an older copy of the image is told from the image.
const COUNTED_EVERY: Duration = Duration::from_secs(1);

/// What ended for want of memory is tried again after its age, and not sooner than this.
const RETRIED_AFTER: Duration = Duration::from_secs(1);

/// A log block for which there was no memory: its position, its request, its content.
pub(super) type Unheld = (u32, RequestId, Buffer);

/// What a keeper knows of durability by age, whether it is in force or not.
#[derive(Debug, Default)]
pub(super) struct State {
    aging: Option<Aging>,
    /// It is to begin, and waits until no home write is under way: none begins.
    is_engaging: bool,
    /// Somebody takes the log elsewhere.
    is_leaving: bool,
    /// Its file system has gone from the disk: nothing of ours begins any more.
    is_gone: bool,
    /// The first number that no compound of this opening has.
    next_number: Option<u32>,
    /// Storage does not say yet what it is to say of the log under this process.
    is_unmarked: bool,
    /// Superblocks that close the log, and wait until no home write is under way: none begins.
    closing: Vec<(RequestId, Vec<u8>)>,
    /// Why it cannot be in force.
    why_not: Option<String>,
    /// It has ended for want of memory, and is not tried again before this.
    lacks_memory_until: Option<Duration>,
    /// Storage has failed since the log was opened, under an earlier process.
    is_doubted: bool,
    /// How many flushes of the disk had failed when the log was opened.
    failed_flushes: u64,
    /// What an earlier process has left of it is followed as soon as this one serves the guest.
    following: Option<Box<Aging>>,
    /// A commit that is repeated was to be told of an error, perhaps by an earlier process: it waited for durability, and there is none. The
    /// table says so, too, before storage has the error mark.
    owes_errors: bool,
    /// How often it began.
    stints: u64,
    /// Of those that are over.
    counted: durability::Status,
}

impl State {
    /// Whether nothing may be written home now, by the guest or the host.
    fn keeps_homes(&self) -> bool {
        self.is_engaging || self.is_unmarked || !self.closing.is_empty()
    }
}

/// Durability by age, in force.
#[derive(Debug)]
struct Aging {
    machine: Durability,
    within: Duration,
    /// What an age before no age has left: the last transaction that it allowed not to be durable, and that age, where it is known: an
    /// earlier process may have changed it, and what it left is that age's. Until it is durable, no age is not in
    /// force, and the guest's flushes wait for it.
    owed: Option<(u32, Option<Duration>)>,
    /// When it began.
    since: Duration,
    stint: u64,
    format: Format,
    watched: Watched,
    /// Its bitmaps were not understood already when the machine was asked last.
    was_lost: bool,
    opening: Opening,
    /// The guest's superblock as it wrote it last.
    superblock: Vec<u8>,
    /// When the superblock on storage was written last.
    counted_at: Duration,
    counted_home: u64,
    /// When the compound began that is being written.
    making_since: Option<Duration>,
    /// How many flushes of the disk had failed when it began: one more, whoever's, and what storage has is not known any more.
    failed_flushes: u64,
    /// The first number that no compound has, as the table says it.
    numbered: Option<u32>,
    /// The same, of an earlier process: what it had begun may lie in the log.
    numbered_before: Option<u32>,
    operations: HashMap<OperationId, Pending>,
    /// Changes of homes that wait, and whether the machine has let them go.
    guests: HashMap<(RequestId, u64), (WriteId, bool)>,
    /// Home writes on their way, by their numbers in the area.
    flights: HashMap<usize, WriteId>,
    /// The host's own that wait.
    hosts: HashMap<WriteId, (usize, HostWrite)>,
    answers: HashMap<AnswerId, Asked>,
    /// Until it is proven: who repeats a commit was promised that it is durable ([`State::owes_errors`]).
    owes_errors: bool,
    /// The superblock of this request is taken now.
    ready: Option<RequestId>,
    /// The guest has closed the log, and storage says so.
    is_closed: bool,
    /// It ends, and why.
    ending: Option<Ending>,
    /// Superblocks that are taken when it has ended.
    later: Vec<(RequestId, Vec<u8>)>,
    /// Log blocks that go to their own places when it has ended.
    unheld: Vec<Unheld>,
    /// Commits that are held without being durable, and answered when storage has the error mark: not before, since until then it is taken
    /// for whole without them.
    told_later: Vec<RequestId>,
    next: u64,
}

#[derive(Debug)]
struct Pending {
    parts: usize,
    is_good: bool,
    /// It writes the superblock, with this opening.
    opening: Option<Opening>,
}

#[derive(Debug)]
enum Asked {
    Commit(Vec<RequestId>),
    /// Of an earlier process, which did not answer.
    CommitAgain(Vec<RequestId>),
    Superblock {
        request: RequestId,
        content: Vec<u8>,
        closes: bool,
    },
    Nobody,
}

/// What the machine sees.
struct Shown<'a> {
    log: &'a Log,
    area: &'a JournalArea,
    id: LogId,
    watched: &'a mut Watched,
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

fn copied(log: &Log, area: &JournalArea, id: LogId, version: Version) -> Option<Arc<[u8]>> {
    let mut into = vec![0; log.place.block_bytes as usize];
    content(log, area, id, version, &mut into).ok().map(|()| Arc::from(into))
}

impl Aging {
    fn new(
        log: &Log,
        machine: Durability,
        within: Duration,
        (format, opening): (Format, Opening),
        superblock: &[u8],
    ) -> Self {
        Aging {
            machine,
            within,
            owed: None,
            since: log.home.now(),
            stint: 0,
            format,
            watched: Watched::default(),
            was_lost: false,
            opening,
            superblock: superblock.to_vec(),
            counted_at: log.home.now(),
            counted_home: 0,
            making_since: None,
            failed_flushes: log.home.failed_flushes(),
            numbered: None,
            numbered_before: None,
            operations: HashMap::new(),
            guests: HashMap::new(),
            flights: HashMap::new(),
            hosts: HashMap::new(),
            answers: HashMap::new(),
            owes_errors: false,
            ready: None,
            is_closed: false,
            ending: None,
            later: Vec::new(),
            unheld: Vec::new(),
            told_later: Vec::new(),
            next: 0,
        }
    }

    /// Whether nothing is under way that the error mark would have to be written beside.
    fn is_quiet(&self, log: &Log) -> bool {
        // Where the superblock shares its page with homes, the mark would bring along what the page held before they were written.
        self.operations.is_empty() && (self.flights.is_empty() || is_alone_in_its_page(log))
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The first number that no compound has. It never goes back: what has a number may be on storage, whatever became of it.
    fn next_number(&self) -> u32 {
        let known = [self.numbered_before, self.numbered].into_iter().flatten();
        known.fold(self.machine.next_number(), sequence::latest)
    }

    /// From now on with this age.
    fn change_age(&mut self, within: Duration) {
        let (before, last) = (self.allows(), self.machine.last());
        self.within = within;
        let is_owed = within.is_zero() && sequence::is_after(last, self.machine.durable());
        self.owed = is_owed.then_some((last, before));
    }

    /// Whether something is not durable that no age would not have allowed.
    fn owes(&self) -> bool {
        self.owed.is_some_and(|(last, _)| sequence::is_after(last, self.machine.durable()))
    }

    /// The age that is in force, where that is known.
    fn allows(&self) -> Option<Duration> {
        match self.owed {
            Some((_, before)) if self.owes() => before,
            _ => Some(self.within),
        }
    }

    /// Whether a commit is answered when it is durable, whatever its transaction.
    fn answers_late(&self) -> bool {
        self.within.is_zero() || self.watched.is_lost()
    }

    fn ask(&mut self, asked: Asked) -> AnswerId {
        let answer = AnswerId(self.id());
        self.answers.insert(answer, asked);
        answer
    }

    /// Asks the machine, and has done what it wants.
    fn call<T>(
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

    fn carry_out(&mut self, held: &Held, log: &Log, said: Vec<durability::Step>, steps: &mut Steps) {
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
                Do::Failed(why) => self.fault(held, why),
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
    fn go(&mut self, log: &Log, id: WriteId, steps: &mut Steps) {
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
}

impl Held {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Whether the log is made durable by age.
    pub(super) fn is_aging(&self) -> bool {
        self.state().aging.is_some()
    }

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

fn retried_at(log: &Log) -> Duration {
    log.home.now() + log.home.durable_within().unwrap_or_default().max(RETRIED_AFTER)
}

fn say_why_not(log: &Log, state: &mut State, why: String) {
    let sentence = format!("its journal is only held, and not made durable by age: {why}");
    log::warn!("disk {}: {sentence}", log.home.options.name);
    log.home.note_fault(&sentence);
    state.why_not = Some(sentence);
}
