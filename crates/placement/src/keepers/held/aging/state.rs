//! What is known of durability by age: whether and why it is in force, and, where it is, its machine and who waits for it. Nothing here
//! asks the machine (`machine.rs` does) or knows who keeps the log.

use super::super::watched::Watched;
use crate::log::Log;
use crate::opening::is_alone_in_its_page;
use block_route::{Buffer, RequestId};
use durability::{AnswerId, Durability, OperationId, WriteId};
use jbd2::{Format, sequence};
use journal_area::{HostWrite, Opening};
use std::collections::HashMap;
use std::time::Duration;

/// What ended for want of memory is tried again after its age, and not sooner than this.
const RETRIED_AFTER: Duration = Duration::from_secs(1);

/// A log block for which there was no memory: its position, its request, its content.
pub(crate) type Unheld = (u32, RequestId, Buffer);

/// What a keeper knows of durability by age, whether it is in force or not.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(super) aging: Option<Aging>,
    /// It is to begin, and waits until no home write is under way: none begins.
    pub(super) is_engaging: bool,
    /// Somebody takes the log elsewhere.
    pub(super) is_leaving: bool,
    /// It is to be handed over, and waits until no home write of the guest's is under way: none begins, but for those that have to be home before.
    pub(super) is_coming_to_rest: bool,
    /// Its file system has gone from the disk: nothing of ours begins any more.
    pub(super) is_gone: bool,
    /// The first number that no compound of this opening has.
    pub(super) next_number: Option<u32>,
    /// Storage does not say yet what it is to say of the log under this process.
    pub(super) is_unmarked: bool,
    /// Superblocks that close the log, and wait until no home write is under way: none begins.
    pub(super) closing: Vec<(RequestId, Vec<u8>)>,
    /// Why it cannot be in force.
    pub(super) why_not: Option<String>,
    /// It has ended for want of memory, and is not tried again before this.
    pub(super) lacks_memory_until: Option<Duration>,
    /// Storage has failed since the log was opened, under an earlier process.
    pub(super) is_doubted: bool,
    /// How many flushes of the disk had failed when the log was opened.
    pub(super) failed_flushes: u64,
    /// What an earlier process has left of it is followed as soon as this one serves the guest.
    pub(super) following: Option<Box<Aging>>,
    /// A commit that is repeated was to be told of an error, perhaps by an earlier process: it waited for durability, and there is none. The
    /// table says so, too, before storage has the error mark.
    pub(super) owes_errors: bool,
    /// How often it began.
    pub(super) stints: u64,
    /// Of those that are over.
    pub(super) counted: durability::Status,
}

impl State {
    /// Whether nothing may be written home now, by the guest or the host.
    pub(super) fn keeps_homes(&self) -> bool {
        self.is_engaging || self.is_unmarked || !self.closing.is_empty()
    }
}

/// Durability by age, in force.
#[derive(Debug)]
pub(super) struct Aging {
    pub(super) machine: Durability,
    pub(super) within: Duration,
    /// What an age before no age has left: the last transaction that it allowed not to be durable, and that age, where it is known: an
    /// earlier process may have changed it, and what it left is that age's. Until it is durable, no age is not in
    /// force, and the guest's flushes wait for it.
    pub(super) owed: Option<(u32, Option<Duration>)>,
    /// When it began.
    pub(super) since: Duration,
    pub(super) stint: u64,
    pub(super) format: Format,
    pub(super) watched: Watched,
    /// Its bitmaps were not understood already when the machine was asked last.
    pub(super) was_lost: bool,
    pub(super) opening: Opening,
    /// The guest's superblock as it wrote it last.
    pub(super) superblock: Vec<u8>,
    /// When the superblock on storage was written last.
    pub(super) counted_at: Duration,
    pub(super) counted_home: u64,
    /// When the compound began that is being written.
    pub(super) making_since: Option<Duration>,
    /// How many flushes of the disk had failed when it began: one more, whoever's, and what storage has is not known any more.
    pub(super) failed_flushes: u64,
    /// The first number that no compound has, as the table says it.
    pub(super) numbered: Option<u32>,
    /// The same, of an earlier process: what it had begun may lie in the log.
    pub(super) numbered_before: Option<u32>,
    pub(super) operations: HashMap<OperationId, Pending>,
    /// Changes of homes that wait, and whether the machine has let them go.
    pub(super) guests: HashMap<(RequestId, u64), (WriteId, bool)>,
    /// Home writes on their way, by their numbers in the area.
    pub(super) flights: HashMap<usize, WriteId>,
    /// The host's own that wait.
    pub(super) hosts: HashMap<WriteId, (usize, HostWrite)>,
    pub(super) answers: HashMap<AnswerId, Asked>,
    /// Until it is proven: who repeats a commit was promised that it is durable ([`State::owes_errors`]).
    pub(super) owes_errors: bool,
    /// The superblock of this request is taken now.
    pub(super) ready: Option<RequestId>,
    /// The guest has closed the log, and storage says so.
    pub(super) is_closed: bool,
    /// It ends, and why.
    pub(super) ending: Option<Ending>,
    /// Superblocks that are taken when it has ended.
    pub(super) later: Vec<(RequestId, Vec<u8>)>,
    /// Log blocks that go to their own places when it has ended.
    pub(super) unheld: Vec<Unheld>,
    /// Commits that are held without being durable, and answered when storage has the error mark: not before, since until then it is taken
    /// for whole without them.
    pub(super) told_later: Vec<RequestId>,
    pub(super) next: u64,
}

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) parts: usize,
    pub(super) is_good: bool,
    /// It writes the superblock, with this opening.
    pub(super) opening: Option<Opening>,
}

#[derive(Debug)]
pub(super) enum Asked {
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

/// What ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
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
pub(super) struct Ending {
    pub(super) why: String,
    pub(super) cause: Cause,
}

/// What becomes of a superblock that the guest writes.
pub(crate) enum AgedSuperblock {
    /// It is held, and taken later.
    Held,
    /// It is the area's to judge now; storage may have it already.
    Taken { is_on_storage: bool },
}

impl Aging {
    pub(super) fn new(
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
    pub(super) fn is_quiet(&self, log: &Log) -> bool {
        // Where the superblock shares its page with homes, the mark would bring along what the page held before they were written.
        self.operations.is_empty() && (self.flights.is_empty() || is_alone_in_its_page(log))
    }

    pub(super) fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The first number that no compound has. It never goes back: what has a number may be on storage, whatever became of it.
    pub(super) fn next_number(&self) -> u32 {
        let known = [self.numbered_before, self.numbered].into_iter().flatten();
        known.fold(self.machine.next_number(), sequence::latest)
    }

    /// From now on with this age.
    pub(super) fn change_age(&mut self, within: Duration) {
        let (before, last) = (self.allows(), self.machine.last());
        self.within = within;
        let is_owed = within.is_zero() && sequence::is_after(last, self.machine.durable());
        self.owed = is_owed.then_some((last, before));
    }

    /// Whether something is not durable that no age would not have allowed.
    pub(super) fn owes(&self) -> bool {
        self.owed.is_some_and(|(last, _)| sequence::is_after(last, self.machine.durable()))
    }

    /// The age that is in force, where that is known.
    pub(super) fn allows(&self) -> Option<Duration> {
        match self.owed {
            Some((_, before)) if self.owes() => before,
            _ => Some(self.within),
        }
    }

    /// Whether a commit is answered when it is durable, whatever its transaction.
    pub(super) fn answers_late(&self) -> bool {
        self.within.is_zero() || self.watched.is_lost()
    }

    pub(super) fn ask(&mut self, asked: Asked) -> AnswerId {
        let answer = AnswerId(self.id());
        self.answers.insert(answer, asked);
        answer
    }

    /// Whether a commit that is not durable when durability ends is held from now on as it would be without, whatever ends it. Who was
    /// promised more than that, and waits for it, is not told that it is so: with no age, once that is in force, which it is not before
    /// storage is a truth; or before this began, where the commit is one that is repeated.
    pub(super) fn promises_held(&self, is_repeated: bool) -> bool {
        let is_promised = self.machine.is_proven() || is_repeated && self.owes_errors;
        let is_wished = self.ending.as_ref().is_some_and(|ending| ending.cause == Cause::Wish);
        is_wished || !self.answers_late() || !is_promised
    }
}

/// When what ended for want of memory is tried again.
pub(super) fn retried_at(log: &Log) -> Duration {
    log.home.now() + log.home.durable_within().unwrap_or_default().max(RETRIED_AFTER)
}
