//! Durability by age (`durable-within`) of a log that is held: crate `durability` decides, here it is asked and carried out.
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

use super::Held;
use super::watched::{self, Watched};
use crate::aged;
use crate::followed;
use crate::keeper::{HomeChange, HomeVerdict, Side, Step, Steps, SuperblockBlock, Task};
use crate::log::Log;
use crate::mark;
use crate::numbers;
use crate::opening::{is_alone_in_its_page, mark_again, mark_behind, write_aged, written_home};
use crate::report::DurabilityReport;
use block_route::{Buffer, RequestId, RequestKind, Status};
use durability::{
    AnswerId, BlockSet, Committed, Durability, FoundSaid, Freed, Kind, OperationId, Past, Place, Transaction, Version,
    View, WhenAsked, WriteId,
};
use jbd2::{Format, Superblock, sequence};
use journal_area::{
    Accepted, CommittedVersion, Doubt, HomeWrite, HostWrite, JournalArea, Location, LogId, Opening, Over, Source,
};
use std::collections::{BTreeMap, HashMap, HashSet};
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

/// What ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// It was wished, or somebody takes the log elsewhere.
    Wish,
    /// For now: there is no memory for the log.
    Memory,
    /// Its guest closes the log, and compounds have had numbers that its next transactions will have.
    Numbers,
    /// Until the log is opened anew.
    Fault,
}

#[derive(Debug)]
struct Ending {
    why: String,
    cause: Cause,
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

/// Who waits for durability by age where there is none any more: every request of the guest that is held for it is among these.
#[derive(Debug, Default)]
pub(super) struct Waited {
    /// Commits that an age promises no more than that they are held.
    held: Vec<RequestId>,
    /// Commits that were to be durable, and log blocks without memory.
    refused: Vec<RequestId>,
    /// Superblocks, each with what it says.
    superblocks: Vec<(RequestId, Vec<u8>)>,
}

impl Waited {
    /// The log has gone from its disk. Commits that are held are in the log's place if `is_there`; superblocks go there as they are.
    pub fn go(self, is_there: bool, steps: &mut Steps) {
        let held = if is_there { Status::Ok } else { Status::IoError };
        let commits = self.held.into_iter().map(|request| (request, held));
        for (request, status) in commits.chain(self.refused.into_iter().map(|request| (request, Status::IoError))) {
            steps.push(Side::Journal, Step::Release(request, status));
        }
        for (request, content) in self.superblocks {
            steps.push(Side::Journal, Step::Superblock(request, content));
        }
    }

    /// Its guest has closed the log: no kernel waits for anything of it then.
    fn fail(self, steps: &mut Steps) {
        let superblocks = self.superblocks.into_iter().map(|(request, _)| request);
        for request in self.held.into_iter().chain(self.refused).chain(superblocks) {
            steps.push(Side::Journal, Step::Release(request, Status::IoError));
        }
    }
}

/// What becomes of a superblock that the guest writes.
pub(super) enum AgedSuperblock {
    /// It is held, and taken later.
    Held,
    /// It is the area's to judge now; storage may have it already.
    Taken { is_on_storage: bool },
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

/// Why the log of this superblock cannot be made durable by age.
fn hindrance(log: &Log, superblock: &[u8]) -> Option<String> {
    if log.place.is_external {
        return Some("its journal is on a device of its own".to_owned());
    }
    Durability::opened(superblock, Duration::ZERO).err()
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

    /// It ends until the log is opened anew.
    fn fault(&mut self, held: &Held, why: String) {
        if self.ending.is_none() {
            // First of all: who goes on without this process must not begin it again.
            held.area.note_doubt(held.id, |doubt| doubt.is_doubted = true);
            self.ending = Some(Ending { why, cause: Cause::Fault });
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

    /// Whether a commit that is not durable when durability ends is held from now on as it would be without, whatever ends it. Who was
    /// promised more than that, and waits for it, is not told that it is so: with no age, once that is in force, which it is not before
    /// storage is a truth; or before this began, where the commit is one that is repeated.
    fn promises_held(&self, is_repeated: bool) -> bool {
        let is_promised = self.machine.is_proven() || is_repeated && self.owes_errors;
        let is_wished = self.ending.as_ref().is_some_and(|ending| ending.cause == Cause::Wish);
        is_wished || !self.answers_late() || !is_promised
    }

    /// There is no durability any more, nor an end of it that anybody could wait for. Gives everybody who waits, for the machine or for that end.
    fn take_waiting(&mut self) -> Waited {
        let (is_held, is_held_again) = (self.promises_held(false), self.promises_held(true));
        let mut waited = Waited { held: std::mem::take(&mut self.told_later), ..Waited::default() };
        let mut said = Vec::new();
        self.machine.give_up(&mut said);
        let is_good = |answer| said.contains(&durability::Step::Answer { answer, is_good: true });
        let mut asked: Vec<(AnswerId, Asked)> = self.answers.drain().collect();
        asked.sort_unstable_by_key(|(answer, _)| *answer);
        for (answer, asked) in asked {
            match asked {
                Asked::Commit(requests) if is_held || is_good(answer) => waited.held.extend(requests),
                Asked::CommitAgain(requests) if is_held_again || is_good(answer) => waited.held.extend(requests),
                Asked::Commit(requests) | Asked::CommitAgain(requests) => waited.refused.extend(requests),
                Asked::Superblock { request, content, .. } => waited.superblocks.push((request, content)),
                Asked::Nobody => {}
            }
        }
        waited.superblocks.append(&mut self.later);
        waited.refused.extend(self.unheld.drain(..).map(|(_, request, _)| request));
        waited
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

    /// A guest opens the log, and it is to be durable by age: storage says so when this returns. False where it is to be held without.
    pub(super) fn begin_aging(&self, log: &Log, block: &[u8]) -> io::Result<bool> {
        self.forget_absorbing();
        let mut state = self.state();
        let (stints, counted) = (state.stints + 1, state.counted);
        *state = State { stints, counted, failed_flushes: log.home.failed_flushes(), ..State::default() };
        self.area.tell_accepted(self.id, false);
        self.area.note_numbered(self.id, None);
        self.area.note_doubt(self.id, |doubt| *doubt = Doubt { is_untold: doubt.is_untold, ..Doubt::default() });
        let Some(within) = log.home.durable_within() else { return Ok(false) };
        if let Some(why) = hindrance(log, block) {
            say_why_not(log, &mut state, why);
            return Ok(false);
        }
        let (said, format) = Superblock::parse(block).map_err(io::Error::other)?;
        let machine = Durability::opened(block, within).map_err(io::Error::other)?.on_storage();
        let opening = write_aged(log, &self.area, block, (format.first, said.sequence))?;
        let mut aging = Aging::new(log, machine, within, (format, opening), block);
        (aging.stint, aging.counted_home) = (stints, written_home(log));
        state.aging = Some(aging);
        self.area.tell_accepted(self.id, true);
        Ok(true)
    }

    /// The guest writes the superblock of an open log.
    pub(super) fn aged_superblock(&self, log: &Log, block: &SuperblockBlock<'_>, steps: &mut Steps) -> AgedSuperblock {
        let mut state = self.state();
        let Some(aging) = &mut state.aging else { return AgedSuperblock::Taken { is_on_storage: false } };
        let (request, content) = (block.request, block.content.to_vec());
        if aging.ready == Some(request) {
            aging.ready = None;
            let is_on_storage = aging.is_closed;
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

    /// Whether a write of whole blocks would have to wait for a compound, and for nothing else.
    pub(super) fn aged_waits_for_compound(&self, log: &Log, blocks: &Range<u64>, steps: &mut Steps) -> bool {
        let mut state = self.state();
        if state.is_engaging || state.is_leaving {
            return false;
        }
        let Some(aging) = state.aging.as_mut().filter(|aging| aging.ending.is_none()) else { return false };
        aging.call(self, log, steps, |machine, _, view, _| machine.waits_for_compound(blocks.clone(), view))
    }

    /// Of each of these blocks the transaction and the log block of the version that its home has, durably; nothing where that is not known
    /// of all.
    pub(super) fn aged_settled(&self, blocks: &Range<u64>) -> Option<Vec<(u32, u32)>> {
        let state = self.state();
        if state.is_engaging || state.is_leaving {
            return None;
        }
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none())?;
        blocks.clone().map(|block| aging.machine.settled(block).map(watched::parts)).collect()
    }

    /// Which of these versions, by home block, transaction and log block, their homes have, durably.
    pub(super) fn aged_settled_of(&self, mut versions: Vec<(u64, u32, u32)>) -> Vec<(u64, u32, u32)> {
        let state = self.state();
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none());
        let Some(aging) = aging.filter(|_| !state.is_engaging && !state.is_leaving) else { return Vec::new() };
        versions.retain(|(block, sequence, position)| {
            aging.machine.settled(*block).map(watched::parts) == Some((*sequence, *position))
        });
        versions
    }

    /// Where a write of whole blocks, not asked about yet, is cut: the blocks before have what they get at home, or all have not.
    pub(super) fn aged_cut(&self, key: (RequestId, u64), blocks: &Range<u64>) -> u64 {
        let state = self.state();
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none() && !aging.guests.contains_key(&key));
        let Some(aging) = aging.filter(|_| !state.is_engaging && !state.is_leaving) else { return blocks.end };
        let mut kinds = blocks.clone().map(|block| aging.machine.settled(block).is_some());
        let first = kinds.next();
        let run = kinds.take_while(|kind| Some(*kind) == first).count() as u64;
        (blocks.start + 1 + run).min(blocks.end)
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

    /// Whether a commit that is repeated is to be told of an error. Where no age is not wished any more, a commit that is held is good, and stays so
    /// whatever is wished later.
    fn owes_errors(&self, log: &Log, state: &mut State) -> bool {
        if !log.is_durable_at_once() {
            let aging_owes = state.aging.as_mut().is_some_and(|aging| std::mem::take(&mut aging.owes_errors));
            if std::mem::take(&mut state.owes_errors) || aging_owes {
                self.area.note_doubt(self.id, |doubt| doubt.owes_errors = false);
            }
        }
        state.owes_errors
    }

    /// The guest is about to change homes.
    pub(super) fn aged_home_begins(
        &self,
        log: &Log,
        change: &HomeChange<'_>,
        steps: &mut Steps,
    ) -> io::Result<HomeVerdict> {
        let mut state = self.state();
        if state.keeps_homes() && log.is_open() {
            return Ok(HomeVerdict::Wait);
        }
        if let Some(aging) = &mut state.aging
            && aging.ending.is_some()
        {
            if !aging.is_quiet(log) {
                return Ok(HomeVerdict::Wait);
            }
            self.end(log, &mut state, steps)?;
        }
        if state.aging.is_none() {
            // Whoever hands the log over on another thread has the area first, and then this.
            drop(state);
            return self.home_begins_unaged(log, change);
        }
        let Some(aging) = &mut state.aging else { return Ok(HomeVerdict::Wait) };
        let key = (change.request, change.range.start);
        let first_asked = self.first_asked(key);
        let when = WhenAsked { first: first_asked, is_repeated: change.is_again };
        let id = match aging.guests.get(&key) {
            Some((_, false)) => return Ok(HomeVerdict::Wait),
            Some((id, true)) => {
                let id = *id;
                // What it carries may have gone home as an append while it waited for just that compound.
                if !change.is_watched
                    && let Some(at_home) = aging.machine.settled_but_for(id)
                    && let at_home = at_home.into_iter().map(watched::parts).collect::<Vec<_>>()
                    && self.area.is_home_already(self.id, &change.blocks, change.payload, &at_home)
                {
                    aging.guests.remove(&key);
                    aging.call(self, log, steps, |machine, now, view, said| {
                        machine.write_unneeded(now, id, view, said);
                    });
                    self.end_if_drained(log, &mut state, steps);
                    return Ok(HomeVerdict::Parts(Vec::new()));
                }
                id
            }
            None => {
                let id = WriteId(aging.id());
                let kind = match change.kind {
                    RequestKind::Discard => Kind::Discard,
                    RequestKind::WriteZeroes { .. } => Kind::Zeroes,
                    _ => Kind::Write,
                };
                let whole = change.whole.start..change.whole.end.max(change.whole.start);
                aging.guests.insert(key, (id, false));
                let may_go = aging.call(self, log, steps, |machine, now, view, said| {
                    machine.write_begins(now, id, kind, change.blocks.clone(), whole, when, view, said)
                });
                if !may_go {
                    self.end_if_drained(log, &mut state, steps);
                    return Ok(HomeVerdict::Wait);
                }
                aging.guests.insert(key, (id, true));
                id
            }
        };
        let over = aging.call(self, log, steps, |machine, _, view, _| machine.goes_over(id, view));
        let durable = Some(aging.machine.durable());
        let over = Over::Blocks { blocks: &over, durable, has_waited: change.is_again || first_asked.is_some() };
        let verdict = match self.home_begins_in_area(log, change, &over, false) {
            Ok(None) => {
                // Its place is not its own while compounds are there.
                aging.guests.remove(&key);
                aging.call(self, log, steps, |machine, now, view, said| {
                    machine.write_ended(now, id, false, view, said);
                });
                self.lacks_memory(log, aging, steps);
                self.end_if_drained(log, &mut state, steps);
                return if state.aging.is_none() {
                    self.home_begins_unaged(log, change)
                } else {
                    Ok(HomeVerdict::Wait)
                };
            }
            Ok(Some((verdict, carried))) => {
                aging.machine.write_carries(id, carried);
                Ok(verdict)
            }
            Err(error) => Err(error),
        };
        match &verdict {
            Ok(HomeVerdict::Go { operation, .. }) => {
                aging.guests.remove(&key);
                aging.flights.insert(*operation, id);
            }
            // The area has it ask again, for its own reasons; it never cuts a change into parts.
            Ok(HomeVerdict::Wait | HomeVerdict::Parts(_)) => {}
            Err(_) => {
                aging.guests.remove(&key);
                aging.call(self, log, steps, |machine, now, view, said| {
                    machine.write_ended(now, id, false, view, said);
                });
            }
        }
        self.end_if_drained(log, &mut state, steps);
        verdict
    }

    fn home_begins_unaged(&self, log: &Log, change: &HomeChange<'_>) -> io::Result<HomeVerdict> {
        let first_asked = self.first_asked((change.request, change.range.start));
        let has_waited = first_asked.is_some();
        let asked = Over::AsOf { whole: change.whole.clone(), first_asked, has_waited };
        let over = if change.is_again { Over::Unknown } else { asked };
        Ok(self.home_begins_in_area(log, change, &over, true)?.map_or(HomeVerdict::Wait, |(verdict, _)| verdict))
    }

    /// With the blocks to which it is seen to bring the newest committed version. Nothing where there is no memory to hold what is about to
    /// be overwritten, and its own place in the log is not its own.
    fn home_begins_in_area(
        &self,
        log: &Log,
        change: &HomeChange<'_>,
        over: &Over<'_>,
        may_store: bool,
    ) -> io::Result<Option<(HomeVerdict, Vec<u64>)>> {
        if change.kind == RequestKind::Discard && change.whole.start < change.whole.end {
            self.area.discarded(self.id, change.whole.clone());
        }
        loop {
            match self.area.home_write_begins(self.id, change.blocks.clone(), change.payload, over) {
                HomeWrite::Go { operation, replaced, carried } => {
                    return Ok(Some((HomeVerdict::Go { operation, replaced }, carried)));
                }
                HomeWrite::Wait => return Ok(Some((HomeVerdict::Wait, Vec::new()))),
                // About to be overwritten: read, and given back to the area.
                HomeWrite::Restore(blocks) => {
                    let mut content = vec![0; log.place.block_bytes as usize];
                    for block in blocks {
                        log.read_home(block, &mut content)?;
                        if self.area.restore(self.id, block, &content).is_ok() {
                            continue;
                        }
                        if !may_store {
                            return Ok(None);
                        }
                        self.restore_in_place(log, block, &mut content)?;
                    }
                }
            }
        }
    }

    /// What is about to be overwritten at home goes to its own place in the log, since there is no memory to hold it.
    fn restore_in_place(&self, log: &Log, block: u64, content: &mut [u8]) -> io::Result<()> {
        let Some(place) = self.area.place_of_version(self.id, block, content) else { return Ok(()) };
        self.store_now(log, place.0, content)?;
        self.area.restored_in_place(self.id, block, place);
        Ok(())
    }

    /// Somebody waits to write to a page of the guest's that is held, there is no memory to copy it to, and the host cannot write it home: it
    /// is of a transaction that is not read to its end, say, as blocks of it are in their own places. So it goes to its own place, too.
    pub(super) fn store_starved(&self, log: &Log, steps: &mut Steps) {
        let mut state = self.state();
        if let Some(aging) = &mut state.aging {
            self.lacks_memory(log, aging, steps);
            self.end_if_drained(log, &mut state, steps);
        }
        if state.aging.is_some() || state.is_engaging || state.is_leaving {
            return;
        }
        while let Some(starved) = self.area.starved(self.id) {
            if let Err(error) = self.store_now(log, starved.0, &starved.2) {
                log::error!("disk {}: writing a journal block to its own place failed: {error}", log.home.options.name);
                return;
            }
            if !self.area.starved_is_stored(self.id, &starved) {
                return;
            }
        }
    }

    /// There is no memory for what is to be held, so that it has to go where compounds are: they end.
    fn lacks_memory(&self, log: &Log, aging: &mut Aging, steps: &mut Steps) {
        if aging.ending.is_none() {
            let why = "there is no memory for its blocks".to_owned();
            aging.ending = Some(Ending { why, cause: Cause::Memory });
            self.give_up(log, aging, steps);
        }
    }

    /// A home write, the guest's or the host's, has ended. Says whether no flush of the guest's has to cover it.
    pub(super) fn aged_home_ended(&self, log: &Log, operation: usize, is_ok: bool, steps: &mut Steps) -> bool {
        let mut state = self.state();
        let mut is_covered = true;
        if let Some(aging) = &mut state.aging {
            let is_spared = aging.flights.remove(&operation).is_some_and(|id| {
                !aging
                    .call(self, log, steps, |machine, now, view, said| machine.write_ended(now, id, is_ok, view, said))
            });
            // With no age the guest is told when it is durable, and that is the route's to see to, but for what a replay brings back.
            let is_aged = !aging.within.is_zero();
            is_covered = is_aged || (is_spared && aging.ending.is_none());
            if is_aged {
                let answer = aging.ask(Asked::Nobody);
                aging.call(self, log, steps, |machine, now, view, said| machine.flush_asked(now, answer, view, said));
            }
        }
        if !state.closing.is_empty() && !self.area.has_home_writes_in_flight(self.id) {
            let closing = std::mem::take(&mut state.closing);
            closing
                .into_iter()
                .for_each(|(request, block)| steps.push(Side::Journal, Step::Superblock(request, block)));
            steps.push(Side::Home, Step::Retry);
        }
        self.end_if_drained(log, &mut state, steps);
        drop(state);
        self.try_engage(log, steps);
        is_covered
    }

    /// Blocks to which the guest may write just now, by what the machine says, or waits to, whether or not it does yet: the host does not begin to
    /// ([`Durability::closed_to_host`]).
    pub(super) fn aged_under_way(&self) -> BlockSet {
        self.state().aging.as_ref().map_or_else(BlockSet::default, |aging| aging.machine.closed_to_host())
    }

    /// The host is about to write these home.
    pub(super) fn aged_host_writes(&self, log: &Log, writes: Vec<(usize, HostWrite)>, steps: &mut Steps) {
        let mut state = self.state();
        if state.is_gone {
            return self.end_unsent(writes);
        }
        for (operation, write) in writes {
            let Some(aging) = &mut state.aging else {
                host_write(log, operation, write, steps);
                continue;
            };
            let (id, blocks) = (WriteId(aging.id()), write.block..write.block + 1);
            debug_assert!(!aging.machine.closed_to_host().touches(&blocks), "the host writes beside the guest");
            // The machine may let it go at once.
            aging.hosts.insert(id, (operation, write));
            let may_go = aging.call(self, log, steps, |machine, now, view, said| {
                machine.write_begins(now, id, Kind::Write, blocks.clone(), blocks, WhenAsked::default(), view, said)
            });
            if may_go {
                aging.go(log, id, steps);
            }
        }
        self.end_if_drained(log, &mut state, steps);
    }

    /// Whether the host may write anything home now.
    pub(super) fn may_write_home(&self) -> bool {
        let state = self.state();
        !state.keeps_homes() && state.aging.as_ref().is_none_or(|aging| aging.ending.is_none())
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

    fn give_up(&self, log: &Log, aging: &mut Aging, steps: &mut Steps) {
        let mut said = Vec::new();
        aging.machine.give_up(&mut said);
        aging.carry_out(self, log, said, steps);
    }

    fn end_if_drained(&self, log: &Log, state: &mut State, steps: &mut Steps) {
        let is_drained = state.aging.as_ref().is_some_and(|aging| {
            // One that closes is over when its superblock is taken.
            aging.ending.is_some() && aging.is_quiet(log) && aging.ready.is_none() && !aging.is_closed
        });
        if is_drained && let Err(error) = self.end(log, state, steps) {
            log::error!("disk {}: {error}", log.home.options.name);
            // Who waits for that would wait for ever.
            if let Some(aging) = &mut state.aging {
                fail_waiting(std::mem::take(&mut aging.unheld), std::mem::take(&mut aging.later), steps);
                fail_told(std::mem::take(&mut aging.told_later), steps);
            }
            self.fail_absorbing(steps);
            // So would a home write that waits: it is asked for again, tries to end this once more, and fails if that does.
            steps.push(Side::Home, Step::Retry);
        }
    }

    /// Storage gets the error mark; what waited goes on as without durability.
    fn end(&self, log: &Log, state: &mut State, steps: &mut Steps) -> io::Result<()> {
        let Some(aging) = &mut state.aging else { return Ok(()) };
        let Some(ending) = &aging.ending else { return Ok(()) };
        // Whoever repeats a commit that waited was not answered. What was owed before is not owed any more where all became durable since.
        let owed_before = aging.owes_errors && aging.within.is_zero();
        let owes_errors =
            ending.cause != Cause::Wish && (owed_before || aging.answers_late() && aging.machine.falls_short());
        // Before the mark: who goes on without this process finds a commit that is held, as any other, from then on.
        self.area.note_doubt(self.id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (owes_errors, true));
        let next = Opening { count: aging.opening.count + 1, ..aging.opening };
        // What kernels write once the held log is lost is to have numbers that no compound has.
        let number = aging.next_number();
        mark_again(log, &self.area, (&aging.superblock, number), next).map_err(|error| {
            let sentence = format!(
                "the journal is not made durable any more ({}), and marking it failed: {error}; nothing is written to its file \
                 system before that is done",
                ending.why
            );
            log.home.note_fault(&sentence);
            io::Error::new(error.kind(), sentence)
        })?;
        match ending.cause {
            Cause::Numbers => {
                let sentence = format!("its journal is only held for now: {}", ending.why);
                log::info!("disk {}: {sentence}", log.home.options.name);
                // Not again before it is closed.
                state.why_not = Some(sentence);
                state.lacks_memory_until = Some(retried_at(log));
            }
            Cause::Wish => {
                log::info!("disk {}: its journal is only held from now on, as wished", log.home.options.name)
            }
            Cause::Memory => {
                let sentence = format!(
                    "its journal is not made durable within {} s for now, and only held: {}",
                    aging.within.as_secs(),
                    ending.why
                );
                log::warn!("disk {}: {sentence}", log.home.options.name);
                state.why_not = Some(sentence);
                state.lacks_memory_until = Some(retried_at(log));
            }
            Cause::Fault => {
                let sentence = format!(
                    "its journal is not made durable within {} s any more, and only held: {}",
                    aging.within.as_secs(),
                    ending.why
                );
                log::error!("disk {}: {sentence}", log.home.options.name);
                log.home.note_fault(&sentence);
                state.why_not = Some(sentence);
            }
        }
        // One that was to be closed is not, or not so.
        self.area.note_closing(self.id, false);
        state.owes_errors = owes_errors;
        let Some(mut aging) = self.over(state) else { return Ok(()) };
        self.send_hosts(log, std::mem::take(&mut aging.hosts), steps);
        for request in aging.told_later {
            steps.push(Side::Journal, Step::Release(request, Status::Ok));
        }
        for (request, content) in aging.later {
            steps.push(Side::Journal, Step::Superblock(request, content));
        }
        for (position, request, buffer) in aging.unheld {
            self.store(log, position, request, buffer, steps);
            steps.push(Side::Journal, Step::Release(request, Status::Ok));
        }
        steps.push(Side::Home, Step::Retry);
        // Flushes waited for that, too.
        log.home.wake.wake();
        Ok(())
    }

    /// Writes of the host that waited go, but for those to where home is only by books that have been proven wrong meanwhile. Where the guest
    /// was told that they are home, it has said itself where that is.
    fn send_hosts(&self, log: &Log, hosts: HashMap<WriteId, (usize, HostWrite)>, steps: &mut Steps) {
        let is_in_doubt = self.area.contradiction(self.id).is_some();
        let may_go = |block: u64| !is_in_doubt || self.area.has_absorbed(self.id, &(block..block + 1));
        let (sent, unsent): (HashMap<_, _>, HashMap<_, _>) =
            hosts.into_iter().partition(|(_, (_, write))| may_go(write.block));
        for (operation, write) in sent.into_values() {
            host_write(log, operation, write, steps);
        }
        self.end_unsent(unsent.into_values());
    }

    /// Writes of the host that waited are not sent any more: nobody waits for them to end, a recovery least of all. What they were to bring
    /// home stays owed.
    fn end_unsent(&self, hosts: impl IntoIterator<Item = (usize, HostWrite)>) {
        for (operation, _) in hosts {
            self.inner().host_in_flight -= 1;
            self.area.home_write_ended(self.id, operation, false);
        }
    }

    /// It is over. Whoever calls this sees to the writes of the host that waited.
    fn over(&self, state: &mut State) -> Option<Aging> {
        let aging = state.aging.take()?;
        self.area.tell_accepted(self.id, false);
        state.next_number = Some(aging.next_number());
        state.counted = sum(&state.counted, &aging.machine.status());
        Some(aging)
    }

    /// Begins under a running guest, if that is wished and no home write is under way.
    pub(super) fn try_engage(&self, log: &Log, steps: &mut Steps) {
        let is_busy = {
            let inner = self.inner();
            inner.stored_in_flight > 0 || inner.host_in_flight > 0
        };
        let mut state = self.state();
        if state.lacks_memory_until.is_some_and(|until| log.home.now() >= until) && log.is_open() {
            // Nothing is tried beside blocks in their own places, for which changes of homes would wait.
            if self.has_stored_blocks() {
                state.lacks_memory_until = Some(retried_at(log));
            } else {
                (state.lacks_memory_until, state.why_not) = (None, None);
            }
        }
        let wished = log.home.durable_within().filter(|_| {
            log.is_open()
                && state.aging.is_none()
                && !state.is_leaving
                && !state.is_gone
                && !state.is_unmarked
                && state.why_not.is_none()
                && !log.is_distrusted()
        });
        let Some(within) = wished else {
            if std::mem::take(&mut state.is_engaging) {
                steps.push(Side::Home, Step::Retry);
            }
            return;
        };
        if state.is_doubted || log.home.failed_flushes() != state.failed_flushes {
            // Homes that the log let go of may be lost: storage is no truth, and is not said to be one.
            say_why_not(log, &mut state, "storage has failed since it was mounted".to_owned());
            state.is_engaging = false;
            steps.push(Side::Home, Step::Retry);
            return;
        }
        if is_busy || self.area.has_home_writes_in_flight(self.id) {
            state.is_engaging = true;
            return;
        }
        if self.has_stored_blocks() {
            let why = "blocks of it are in their own places for want of memory";
            state.why_not = Some(format!("its journal is only held for now, and not made durable by age: {why}"));
            state.lacks_memory_until = Some(retried_at(log));
        } else if let Err(why) = self.engage(log, within, &mut state) {
            say_why_not(log, &mut state, why);
        }
        state.is_engaging = false;
        if let Some(aging) = &mut state.aging {
            aging.call(self, log, steps, |machine, now, view, said| machine.timer(now, view, said));
        }
        steps.push(Side::Home, Step::Retry);
    }

    /// Whether blocks of the guest's log are in their own places on storage, of transactions that are not committed yet, too.
    fn has_stored_blocks(&self) -> bool {
        let is_any = |held: &mut journal_area::HeldLog<'_>| {
            (1..held.log_blocks()).any(|at| held.location(at) == Location::Storage)
        };
        self.area.look(self.id, is_any).unwrap_or(false)
    }

    fn engage(&self, log: &Log, within: Duration, state: &mut State) -> Result<(), String> {
        let mut superblock = vec![0; log.place.block_bytes as usize];
        if !self.area.look(self.id, |held| held.read_held(0, &mut superblock)).unwrap_or(false) {
            return Err("its superblock is not held".to_owned());
        }
        if let Some(why) = hindrance(log, &superblock) {
            return Err(why);
        }
        let (_, format) = Superblock::parse(&superblock).map_err(|error| error.to_string())?;
        // Such books name no version, as if all were home.
        if let Some(why) = self.area.contradiction(self.id) {
            return Err(format!("its books are wrong: {why}"));
        }
        let tail = self.area.tail(self.id).ok_or("it has no tail")?;
        // Compounds of this opening may have numbers beyond those of the guest's transactions, where it began more than once.
        let next = self.area.next_sequence(self.id).ok_or("it is not open")?;
        let owed = self.all_owed();
        let watched = self.watched_owing(log, &versions_of(&owed))?;
        let last = next.wrapping_sub(1);
        let past = self.written_past();
        let machine = Durability::engaged(&superblock, within, (&owed, tail.sequence, last), &past, Duration::ZERO)?
            .numbered_from(sequence::latest(next, state.next_number.unwrap_or(next)))
            .begins_in_parts();
        // The first compounds lie beside the error mark until all of them are durable.
        let number = machine.begins_before();
        let marked =
            mark_behind(log, &self.area, number).map_err(|error| format!("marking it anew failed: {error}"))?;
        let opening = marked.ok_or("its mark on storage is not known")?;
        let mut aging = Aging::new(log, machine, within, (format, opening), &superblock);
        state.stints += 1;
        (aging.stint, aging.watched, aging.owes_errors) = (state.stints, watched, state.owes_errors);
        state.aging = Some(aging);
        self.area.tell_accepted(self.id, true);
        log::info!(
            "disk {}: its journal is made durable within {} s from now on",
            log.home.options.name,
            within.as_secs()
        );
        Ok(())
    }

    /// Of what is committed and not at home, what the guest has written past its journal, or may have.
    fn written_past(&self) -> BTreeMap<u64, Past> {
        let known = |past| match past {
            Some(journal_area::Past::Written) => Past::Written,
            Some(journal_area::Past::Begun) => Past::Begun,
            None => Past::Perhaps,
        };
        self.area.written_past(self.id).into_iter().map(|(block, past)| (block, known(past))).collect()
    }

    /// What is committed and not at home, by transaction.
    fn all_owed(&self) -> Vec<Transaction> {
        let mut owed: Vec<Transaction> = Vec::new();
        for (sequence, block, position) in self.area.versions_owed(self.id) {
            let version = watched::version(sequence, position);
            match owed.last_mut() {
                Some(last) if last.sequence == sequence => last.blocks.push((block, version)),
                _ => owed.push(Transaction {
                    sequence,
                    blocks: vec![(block, version)],
                    revokes: Vec::new(),
                    freed: Freed::Unknown,
                }),
            }
        }
        owed
    }

    fn watched_owing(&self, log: &Log, owed: &HashMap<u64, Version>) -> Result<Watched, String> {
        let content = |version| copied(log, &self.area, self.id, version);
        Watched::owing(log, owed, &content).map_err(|error| error.to_string())
    }

    /// An earlier process has left the log open and made durable by age, and it stays so: what was durable stays durable at every
    /// instant, and what was not becomes so first of all. Nothing is changed on storage. False where it is not wished any more.
    pub(super) fn aged_follows(
        &self,
        log: &Log,
        opening: Opening,
        raw: &[u8],
        numbered: Option<u32>,
    ) -> Result<bool, String> {
        let Some(within) = log.home.durable_within() else { return Ok(false) };
        let mut state = self.state();
        if log.home.failed_flushes() != state.failed_flushes || state.is_doubted {
            return Err("storage has failed since it was mounted".to_owned());
        }
        if self.has_stored_blocks() {
            return Err("blocks of it are in their own places for want of memory".to_owned());
        }
        // Such books name no version, as if all were home.
        if let Some(why) = self.area.contradiction(self.id) {
            return Err(format!("its books are wrong: {why}"));
        }
        let mut superblock = vec![0; log.place.block_bytes as usize];
        if !self.area.look(self.id, |held| held.read_held(0, &mut superblock)).unwrap_or(false) {
            return Err("its superblock is not held".to_owned());
        }
        if let Some(why) = hindrance(log, &superblock) {
            return Err(why);
        }
        let (_, format) = Superblock::parse(&superblock).map_err(|error| error.to_string())?;
        let tail = self.area.tail(self.id).ok_or("it has no tail")?;
        let last = self.area.next_sequence(self.id).ok_or("it is not open")?.wrapping_sub(1);
        let owed = self.all_owed();
        let versions = versions_of(&owed);
        // All of them can be read.
        let mut watched = self.watched_owing(log, &versions)?;
        let by_block = |block: u64| {
            let version = *versions.get(&block)?;
            Some((watched::parts(version).0, copied(log, &self.area, self.id, version)?))
        };
        let found = followed::found(log, &self.area, raw, &format, &by_block, numbered)?;
        let same: HashSet<u64> =
            found.copies.iter().filter(|copy| matches!(copy.said, FoundSaid::Same(_))).map(|copy| copy.block).collect();
        let durable: Vec<(u64, Version)> = versions.into_iter().filter(|(block, _)| same.contains(block)).collect();
        let (past, owed) = (self.written_past(), (&owed[..], tail.sequence, last));
        let on_storage = Superblock::decode(raw).map_err(|error| error.to_string())?;
        let told = mark::aged(&superblock, &opening, (on_storage.start, on_storage.sequence));
        // What its guest said last, an error of its own, say, may have been answered and not written.
        let is_told = told.is_ok_and(|told| told[..] == raw[..]);
        let machine =
            Durability::followed(&superblock, within, &found, owed, &past, Duration::ZERO)?.says_anew(!is_told);
        watched.made_durable(log, tail.sequence.wrapping_sub(1), &durable);
        let mut aging = Aging::new(log, machine, within, (format, opening), &superblock);
        state.stints += 1;
        (aging.stint, aging.watched, aging.numbered_before) = (state.stints, watched, numbered);
        if within.is_zero() && sequence::is_after(last, aging.machine.durable()) {
            // An age may have allowed it: who asks for a flush again was not answered for its sake.
            aging.owed = Some((last, None));
        }
        (state.following, state.is_unmarked) = (Some(Box::new(aging)), true);
        Ok(true)
    }

    /// This process serves the guest from now on.
    pub(super) fn aged_go_on(&self, log: &Log) {
        let mut state = self.state();
        let Some(mut aging) = state.following.take() else { return };
        (aging.since, aging.counted_at) = (log.home.now(), log.home.now());
        log::info!(
            "disk {}: its journal is made durable within {} s as before, beginning with what was not durable yet",
            log.home.options.name,
            aging.within.as_secs()
        );
        // Before anybody is promised anything: that process may have written down what was to be when it had ended, or has not seen that it is in
        // force. It is from here on, and what it owed is durable with the first compound, or fails as what this one was asked for.
        state.owes_errors = false;
        self.area.note_doubt(self.id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (false, false));
        (state.aging, state.is_unmarked) = (Some(*aging), false);
        self.area.tell_accepted(self.id, true);
        log.home.wake.wake();
    }

    /// Somebody is about to take the log elsewhere.
    pub(super) fn aged_may_be_taken(&self, log: &Log) -> bool {
        let mut state = self.state();
        state.is_leaving = true;
        if state.aging.is_some() || state.is_unmarked {
            log.home.wake.wake();
            return false;
        }
        // Superblocks that wait are taken when the last home write has ended: nobody else would answer them.
        !state.is_engaging && state.closing.is_empty()
    }

    /// If this superblock closes the log, and compounds have had numbers that are to be the guest's: which these are.
    fn to_clear(&self, log: &Log, block: &[u8], numbered: Option<u32>) -> Option<(u32, Option<u32>)> {
        let said = Superblock::decode(block).ok()?;
        if !said.is_empty() || !numbers::may_meet(said.sequence, numbered) {
            return None;
        }
        // Whatever is written there, what the guest has committed has earlier numbers.
        let next = self.area.next_sequence(self.id).filter(|_| log.is_open())?;
        Some((sequence::latest(said.sequence, next), numbered))
    }

    /// Whether this superblock has to wait: what is to be cleared away shares pages with homes that are on their way past the cache.
    pub(super) fn clears_later(&self, log: &Log, block: &SuperblockBlock<'_>, steps: &mut Steps) -> bool {
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
    pub(super) fn clear_numbers(&self, log: &Log, block: &[u8]) -> io::Result<()> {
        let numbered = self.state().next_number;
        let Some(which) = self.to_clear(log, block, numbered) else { return Ok(()) };
        let Some(held) = self.area.log_now(self.id) else { return Ok(()) };
        numbers::wipe(&held, &log.place, &log.journal.file, which)
    }

    /// An earlier process has used the numbers below this one.
    pub(super) fn aged_numbers_from(&self, sequence: u32) {
        self.state().next_number = Some(sequence);
    }

    /// Storage does not say yet, or does say, what it is to say of the log under this process.
    pub(super) fn aged_awaits_mark(&self, is_unmarked: bool) {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_unmarked, is_unmarked) && !is_unmarked {
            drop(state);
            self.aged_is_held_only();
        }
    }

    /// A log was opened, and is held without durability by age; or it was, and storage says so, by an earlier process, which may not have come to
    /// write it down.
    pub(super) fn aged_is_held_only(&self) {
        let owes_errors = self.state().owes_errors;
        self.area.note_doubt(self.id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (owes_errors, true));
    }

    /// An earlier process has left it open.
    pub(super) fn aged_goes_on_doubted(&self, log: &Log, doubt: Doubt) {
        let mut state = self.state();
        (state.is_doubted, state.failed_flushes) = (doubt.is_doubted, log.home.failed_flushes());
        // A commit that waited when storage failed is not durable, and was to be told so, if that process had not come to say which do.
        // So was one that waited when durability ended for another reason: it is held, and nothing else tells it from one that was answered.
        state.owes_errors = doubt.owes_errors || doubt.is_doubted && !doubt.is_held_only;
        // Where nobody wants that any more, a commit that is held is good.
        self.owes_errors(log, &mut state);
    }

    /// It stays here after all.
    pub(super) fn aged_stays(&self, log: &Log) {
        self.state().is_leaving = false;
        log.home.wake.wake();
    }

    /// The log is gone, or its guest: nothing of ours is under way any more.
    pub(super) fn forget_aging(&self) {
        self.forget_aging_as(false);
    }

    /// The log is about to be somebody else's: nothing of ours is under way any more, and nothing begins.
    pub(super) fn leave_aging(&self) {
        self.forget_aging_as(true);
    }

    fn forget_aging_as(&self, is_leaving: bool) {
        self.forget_absorbing();
        let mut state = self.state();
        if let Some(aging) = self.over(&mut state) {
            self.end_unsent(aging.hosts.into_values());
        }
        let (stints, counted) = (state.stints, state.counted);
        *state = State { stints, counted, is_leaving, ..State::default() };
    }

    /// The same before a recovery, which may fail: until one has not, nothing goes home beside the compounds on storage, which would be
    /// replayed over it.
    pub(super) fn forget_aging_for_recovery(&self) {
        let is_aged = {
            let state = self.state();
            state.aging.is_some() || state.following.is_some() || state.is_unmarked
        };
        self.forget_aging();
        self.state().is_unmarked = is_aged;
    }

    /// Its file system has gone from the disk: nothing of ours begins any more. Gives who waits for durability, which does not come: nobody else
    /// knows of them. Nothing where something is on its way, and nothing has happened then. Both under one lock: the thread of its disk may begin
    /// something at any moment. (The area is asked before, since whoever takes the log elsewhere has its lock first: what the host begins there
    /// meanwhile is not sent.)
    pub(super) fn aged_is_gone(&self) -> Option<Waited> {
        let is_host_writing = self.area.has_host_writes_in_flight(self.id);
        let mut state = self.state();
        let has_operations = state.aging.as_ref().is_some_and(|aging| !aging.operations.is_empty());
        let has_host_writes = self.inner().host_in_flight > 0 || is_host_writing;
        if has_operations || has_host_writes {
            return None;
        }
        let mut waited = self.over(&mut state).map(|mut aging| aging.take_waiting()).unwrap_or_default();
        waited.superblocks.append(&mut state.closing);
        *state = State { stints: state.stints, counted: state.counted, is_gone: true, ..State::default() };
        Some(waited)
    }

    /// Whether its file system has gone from the disk.
    pub(super) fn is_gone(&self) -> bool {
        self.state().is_gone
    }

    pub(super) fn aged_report(&self, log: &Log) -> DurabilityReport {
        let block_bytes = u64::from(log.place.block_bytes);
        let state = self.state();
        let aging = state.aging.as_ref();
        let now = aging.map(|aging| aging.machine.status()).unwrap_or_default();
        let all = sum(&state.counted, &now);
        let age = |aging: &Aging, oldest: Duration| (log.home.now() - aging.since).saturating_sub(oldest).as_secs_f64();
        let is_lost = aging.is_some_and(|aging| aging.watched.is_lost());
        // While it ends, or has not begun wholly, nothing is promised.
        let in_force = aging.filter(|aging| aging.machine.is_proven() && aging.ending.is_none());
        let is_to_begin = in_force.is_none() && !state.is_leaving && log.home.durable_within().is_some();
        DurabilityReport {
            within_s: in_force
                .and_then(|aging| if is_lost { Some(0) } else { aging.allows().map(|age| age.as_secs()) }),
            oldest_undurable_s: aging.zip(now.oldest).map(|(aging, oldest)| age(aging, oldest)),
            compounds: all.compounds,
            compound_blocks: all.compound_blocks,
            append_bytes_home: all.append_blocks * block_bytes,
            bytes_brought_home: all.blocks_brought_home * block_bytes,
            writes_held: all.writes_held,
            discards_held: all.discards_held,
            through: aging.map(|aging| (aging.machine.durable(), aging.machine.under_way())),
            within: in_force.and_then(Aging::allows),
            reason: match &state.why_not {
                None if is_lost => {
                    Some("its bitmaps are not understood, so every commit is durable at once".to_owned())
                }
                None if is_to_begin => Some("not yet: what is held becomes durable first".to_owned()),
                why => why.clone(),
            },
        }
    }
}

/// Each block of these with its newest version.
fn versions_of(owed: &[Transaction]) -> HashMap<u64, Version> {
    owed.iter().flat_map(|transaction| transaction.blocks.iter().copied()).collect()
}

fn retried_at(log: &Log) -> Duration {
    log.home.now() + log.home.durable_within().unwrap_or_default().max(RETRIED_AFTER)
}

/// Commits that waited to be told that they are held fail.
fn fail_told(told_later: Vec<RequestId>, steps: &mut Steps) {
    told_later.into_iter().for_each(|request| steps.push(Side::Journal, Step::Release(request, Status::IoError)));
}

/// What waited for the end fails.
fn fail_waiting(unheld: Vec<Unheld>, later: Vec<(RequestId, Vec<u8>)>, steps: &mut Steps) {
    let requests = unheld.into_iter().map(|(_, request, _)| request);
    for request in requests.chain(later.into_iter().map(|(request, _)| request)) {
        steps.push(Side::Journal, Step::Release(request, Status::IoError));
    }
}

fn say_why_not(log: &Log, state: &mut State, why: String) {
    let sentence = format!("its journal is only held, and not made durable by age: {why}");
    log::warn!("disk {}: {sentence}", log.home.options.name);
    log.home.note_fault(&sentence);
    state.why_not = Some(sentence);
}

fn sum(one: &durability::Status, other: &durability::Status) -> durability::Status {
    durability::Status {
        oldest: None,
        compounds: one.compounds + other.compounds,
        compound_blocks: one.compound_blocks + other.compound_blocks,
        append_blocks: one.append_blocks + other.append_blocks,
        blocks_brought_home: one.blocks_brought_home + other.blocks_brought_home,
        writes_held: one.writes_held + other.writes_held,
        discards_held: one.discards_held + other.discards_held,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::AreaDirectory;
    use crate::disk::{DiskOptions, PlacementKind};
    use crate::journals::{Journals, JournalsOptions};
    use guest_memory::VmMemory;

    /// Commits wait for the machine, with nothing under way, as they do where the log is full, and the guest writes home what would make
    /// room. With no age they were to be durable, and with one they were slowed down.
    #[test]
    fn a_commit_that_waits_for_room_is_answered_as_its_log_goes() {
        for (within, is_held) in [(Duration::ZERO, false), (Duration::from_secs(3600), true)] {
            let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
            let image = directory.path().join("image");
            std::fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("an image");
            let make = |mut command: std::process::Command| command.arg(&image).status().expect("e2fsprogs");
            let mut mke2fs = std::process::Command::new("mke2fs");
            mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"]);
            assert!(make(mke2fs).success());
            let disk = DiskOptions {
                name: "disk".to_owned(),
                path: image,
                placement: PlacementKind::Copy,
                honour_flush: false,
                read_only: false,
                nvm: None,
                remote: None,
                durable_within: Some(within),
                write_log: None,
            };
            let options = JournalsOptions { disks: vec![disk], budget_bytes: 64 << 20, tracer: None };
            let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
            let journals = Journals::new(&VmMemory::new(), area.expect("a directory"), options).expect("journals");
            let log = journals.logs().remove(0);
            let held = Held::new(Arc::clone(&journals.area), log.id);
            let mut block = vec![0; log.place.block_bytes as usize];
            log.read_stored(0, &mut block).expect("read");
            assert!(held.begin_aging(&log, &block).expect("it begins"));
            let mut steps = Steps::default();
            {
                let mut state = held.state();
                let aging = state.aging.as_mut().expect("it is in force");
                let machine = Durability::opened(&block, within).expect("a log").on_storage();
                aging.machine = machine;
                let first = aging.machine.last().wrapping_add(1);
                // The second one waits for what is made of the first.
                for sequence in [first, first.wrapping_add(1)] {
                    let blocks = Vec::new();
                    let transaction =
                        Transaction { sequence, blocks, revokes: Vec::new(), freed: Freed::Blocks(vec![]) };
                    let answer = aging.ask(Asked::Commit(vec![RequestId(sequence)]));
                    let mut said = Vec::new();
                    let mut view = Shown { log: &log, area: &held.area, id: held.id, watched: &mut aging.watched };
                    aging.machine.committed(Duration::ZERO, &transaction, answer, &mut view, &mut said);
                }
                assert_eq!(aging.answers.len(), 2);
                assert!(aging.operations.is_empty(), "nothing of it is sent");
            }
            held.aged_is_gone().expect("nothing is on its way").go(true, &mut steps);
            let status = if is_held { Status::Ok } else { Status::IoError };
            let answered = |step: &(Side, Step)| matches!(step.1, Step::Release(_, told) if told == status);
            assert_eq!(steps.0.iter().filter(|step| answered(step)).count(), 2, "{within:?}: {:?}", steps.0);
        }
    }
}
