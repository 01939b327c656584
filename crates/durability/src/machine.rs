//! The machine: its state, how it begins, what comes in, and in which phase it is.

mod making;
mod superblock;
mod writes;

use crate::blocks::BlockSet;
use crate::compound::Making;
use crate::contract::{
    Age, AnswerId, Committed, FoundCopy, FoundLog, FoundSaid, Freed, OperationId, Past, Place, Status, Step,
    Transaction, Version, View, WriteId,
};
use crate::live::{Copy, Home, Live};
use crate::window::{Held, Window};
use jbd2::{Format, SUPERBLOCK_BYTES, Superblock, sequence};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use writes::{Asked, Flight};

/// A compound is made when what it would take is this part of the log, whatever its age.
const PRESSURE: u64 = 4;
/// Or when it would take so many bytes. What is brought home at a time takes no more, either: both are in memory until they are written.
const BYTES_AT_ONCE_MAX: u64 = 32 << 20;
/// Where durability begins in parts, there is one more of them for each so many, for what is committed meanwhile.
const SPARE_PARTS: u64 = 4;
/// Beyond so many, those of the revoked blocks of which no log on storage has a copy are only known to be freed.
const REVOKED_MAX: usize = 1 << 16;

/// Where we are. A phase is left when all its operations are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// What an earlier machine has written is flushed: nothing is built on what may be lost.
    Follow,
    Idle,
    /// The compound's descriptors and data, its appends, and a superblock that leaves out what is dropped.
    Body,
    BodyFlush,
    Commit,
    CommitFlush,
    /// Copies of the log go home.
    BringHome,
    HomeFlush,
    /// The superblock that leaves them out.
    Tail,
    TailFlush,
    /// The first superblock of a log that was no truth before: only now. With nothing owed there is no compound in front of it.
    Proof,
    ProofFlush,
    Failed,
}

#[derive(Debug)]
enum Purpose {
    Phase,
    PhaseFlush(u64),
    GuestFlush(u64, Vec<AnswerId>),
}

/// Who waits for a transaction to be durable, and where the guest's log begins then.
#[derive(Debug)]
struct Waiting {
    through: u32,
    answer: AnswerId,
    tail: Option<u32>,
    /// Only so that no more is committed than storage takes: an age is kept without it.
    is_slowed: bool,
}

/// See the crate. One for each log.
#[derive(Debug)]
pub struct Durability {
    format: Format,
    /// As it goes to storage, but for start and sequence.
    superblock: Vec<u8>,
    within: Age,
    /// So many blocks are read into memory at a time.
    blocks_at_once: u64,
    /// What was committed can be read for as long as the machine lives, whatever is committed later.
    is_steady: bool,
    /// So many revoked blocks are known one by one.
    revoked_max: usize,
    live: Live,
    /// The superblock on storage says where the log begins.
    is_live: bool,
    /// Storage is a truth: at home and in the log is all that is durable.
    is_proven: bool,
    /// Another machine was here before, and what it had not made durable is not yet: no bitmap is a truth.
    is_following: bool,
    /// The last transaction that the guest's log had passed when this machine began: it goes over no later one for certain, what an
    /// earlier machine was asked.
    passed_at_first: u32,
    /// Meanwhile: newest versions that are durable in the log that was found.
    found: BTreeMap<u64, Held>,
    /// Of what was found, what is to be in the log once more, since that has no room for it beside what is not durable.
    again: BTreeMap<u64, Held>,
    /// Until storage is a truth: so many compounds more may have a part of what is owed.
    parts_left: u32,
    /// What those have that were made, or compounds that have a part of what is logged again.
    in_parts: BTreeMap<u64, Held>,
    /// Versions, by block and transaction, which the guest has asked an earlier machine to write over: what it asks again goes over them.
    gone_over: BTreeMap<u64, u32>,
    open: Window,
    making: Option<Making>,
    /// A compound was given up while it was being written: what of it is on storage, all of it perhaps, has its number.
    has_given_up: bool,
    /// Compounds that the superblock on its way leaves out.
    dropping: usize,
    /// Guest writes that the compound's body flush covers.
    body_covers: u64,
    bringing: Vec<(u64, u32)>,
    bringing_blocks: BlockSet,
    phase: Phase,
    left: usize,
    is_urgent: bool,
    is_emptying: bool,
    closing: Option<(Vec<u8>, AnswerId)>,
    /// The superblock on its way is the guest's last.
    is_closing_written: bool,
    /// Storage's superblock is to be written anew.
    is_touched: bool,
    /// One that was written so is not durable yet.
    is_telling: bool,
    /// Its guest has closed the log, and nothing more is written.
    is_closed: bool,
    /// Who waits until it is, durably, and where the guest's log begins then.
    awaiting_superblock: Vec<(AnswerId, u32)>,
    flights: BTreeMap<WriteId, Flight>,
    held: VecDeque<Asked>,
    waiting: Vec<Waiting>,
    /// Blocks that went straight home, and their versions: durable, and nothing has been written there since.
    settled: BTreeMap<u64, Version>,
    durable: u32,
    guest_tail: u32,
    /// Writes to storage that have ended, whoever's, and how many of them a flush has covered.
    ended: u64,
    flushed: u64,
    /// When the guest first asked for a flush of what is not flushed.
    flush_wanted: Option<Duration>,
    /// How many writes a flush has to have covered for all to be durable that the guest may want to be: rule (f).
    to_cover: u64,
    flush_answers: Vec<AnswerId>,
    is_flushing: bool,
    purposes: BTreeMap<OperationId, Purpose>,
    next_operation: u64,
    last_clock: (u64, u32),
    status: Status,
    /// A commit was to be durable before whoever waits for it is told, and is not.
    falls_short: bool,
}

impl Durability {
    /// A log that a guest has just opened on an empty journal: `superblock` is the guest's own, with the format, the number of its
    /// first transaction, and a start that does not matter.
    ///
    /// # Errors
    /// When the journal is not one that can be written here, with a sentence.
    pub fn opened(superblock: &[u8], within: Age) -> Result<Self, String> {
        let raw = superblock.get(..SUPERBLOCK_BYTES).ok_or("a journal superblock is cut off")?.to_vec();
        let (said, format) = Superblock::parse(&raw).map_err(|error| error.to_string())?;
        if format.fast_commit {
            return Err("the journal may hold fast commits, which no compound can stand for".to_owned());
        }
        Ok(Durability {
            format,
            superblock: raw,
            within,
            blocks_at_once: BYTES_AT_ONCE_MAX / u64::from(format.block_size),
            is_steady: false,
            revoked_max: REVOKED_MAX,
            live: Live::empty(format.first, said.sequence),
            is_live: false,
            is_proven: true,
            is_following: false,
            passed_at_first: said.sequence.wrapping_sub(1),
            found: BTreeMap::new(),
            again: BTreeMap::new(),
            parts_left: 0,
            in_parts: BTreeMap::new(),
            gone_over: BTreeMap::new(),
            open: Window::default(),
            making: None,
            has_given_up: false,
            dropping: 0,
            body_covers: 0,
            bringing: Vec::new(),
            bringing_blocks: BlockSet::default(),
            phase: Phase::Idle,
            left: 0,
            is_urgent: false,
            is_emptying: false,
            closing: None,
            is_closing_written: false,
            is_touched: false,
            is_telling: false,
            is_closed: false,
            awaiting_superblock: Vec::new(),
            flights: BTreeMap::new(),
            held: VecDeque::new(),
            waiting: Vec::new(),
            settled: BTreeMap::new(),
            durable: said.sequence.wrapping_sub(1),
            guest_tail: said.sequence,
            ended: 0,
            flushed: 0,
            flush_wanted: None,
            to_cover: 0,
            flush_answers: Vec::new(),
            is_flushing: false,
            purposes: BTreeMap::new(),
            next_operation: 0,
            last_clock: (0, 0),
            status: Status::default(),
            falls_short: false,
        })
    }

    /// The superblock on storage says already that the log begins where ours does.
    #[must_use]
    pub fn on_storage(mut self) -> Self {
        self.is_live = true;
        self
    }

    /// So many blocks are read into memory at a time, but for those of one transaction, and so many revoked blocks are known one by one.
    #[must_use]
    pub fn with_at_once(mut self, blocks: u64, revoked: usize) -> Self {
        (self.blocks_at_once, self.revoked_max) = (blocks.max(1), revoked);
        self
    }

    /// What was committed stays, and can be read again: a compound is read and written in parts, however large it is. Otherwise it is read at once,
    /// since a version that is superseded while the compound is made may be had no more.
    #[must_use]
    pub fn with_steady_contents(mut self) -> Self {
        self.is_steady = true;
        self
    }

    /// Until storage is a truth, what is owed may be in several compounds, none of which has more than is read at a time: nobody replays any of them
    /// before the last one is durable, and the superblock behind that, and none of it goes home meanwhile. The last one has whatever was committed by
    /// then. Where they do not fit into the log beside each other, all of it is one compound.
    ///
    /// A commit that an age allows not to be durable is answered meanwhile, for as long as those parts have room for it: there are some more than
    /// what is owed now needs. Beyond that it waits for the last one, which has no more than any compound and one transaction.
    #[must_use]
    pub fn begins_in_parts(mut self) -> Self {
        if !self.is_proven {
            let parts = (self.open.blocks.len() as u64).div_ceil(self.blocks_at_once);
            let spare = parts / SPARE_PARTS;
            self.parts_left = u32::try_from(parts + spare).unwrap_or(0);
        }
        self
    }

    /// The first number that no compound has before storage is a truth.
    pub fn begins_before(&self) -> u32 {
        self.next_number().wrapping_add(self.parts_left).wrapping_add(1)
    }

    /// Whether the superblock on storage says something else than the guest said last, beside where the log begins.
    #[must_use]
    pub fn says_anew(mut self, is_anew: bool) -> Self {
        self.is_touched |= is_anew;
        self
    }

    /// The first compound has this number, if the log's own would be an earlier one: what lies in the log may have those.
    #[must_use]
    pub fn numbered_from(mut self, sequence: u32) -> Self {
        if self.live.is_empty() {
            let number = sequence::latest(self.live.head.1, sequence);
            self.live = Live::empty(self.format.first, number);
        }
        self
    }

    /// A log that was held without durability: `superblock` is the one on storage (its number is not in the place of the log yet),
    /// `owed` all that is committed and not at home, by transaction, the oldest first, `guest_tail` where the guest's
    /// log begins, and `last` its last committed transaction. `past` tells owed blocks that the guest has written past its journal
    /// since. No write of the guest is under way. Storage is a truth when the first
    /// compound is durable, or, with nothing owed, the first superblock; until then its superblock stays as it is.
    ///
    /// # Errors
    /// As [`Durability::opened`].
    pub fn engaged(
        superblock: &[u8],
        within: Age,
        (owed, guest_tail, last): (&[Transaction], u32, u32),
        past: &BTreeMap<u64, Past>,
        now: Duration,
    ) -> Result<Self, String> {
        let mut machine = Self::opened(superblock, within)?;
        machine.is_proven = false;
        machine.guest_tail = guest_tail;
        machine.durable = guest_tail.wrapping_sub(1);
        machine.passed_at_first = machine.durable;
        owed.iter().for_each(|transaction| machine.open.add(transaction, now, 0));
        for (block, held) in &mut machine.open.blocks {
            let past = past.get(block);
            held.is_past = past.is_some();
            held.home = (past == Some(&Past::Written)).then_some(1);
        }
        machine.gone_over = asked_over(owed, past);
        match &mut machine.open.span {
            // Of what came after these all is at home.
            Some((_, through, _)) => *through = sequence::latest(*through, last),
            None => machine.durable = sequence::latest(machine.durable, last),
        }
        machine.is_urgent = !owed.is_empty();
        // Writes that nobody told of may be anywhere.
        (machine.ended, machine.to_cover) = (1, 1);
        Ok(machine)
    }

    /// A log that another machine had before, which is gone: `superblock` is the guest's own, and `found` what is on storage, with
    /// nothing of it under way any more. `owed` are committed versions, by transaction, the oldest first: at least those that a replay
    /// of `found` would not bring home, each with the newest of its block. `guest_tail` is where the guest's log begins, and `last` its
    /// last committed transaction. `past` tells of these versions what the guest has done at home, as far as
    /// the earlier machine had it written down.
    ///
    /// Storage stays a truth. Who was told nothing of a commit is told nothing before the first compound of this machine is durable: it
    /// brings what `found` has to the guest's last transaction. Until then no write of the guest sets out. What is repeated
    /// ([`WhenAsked`]) counts as older than all that is committed: it may have been asked of the earlier machine long ago. But not where
    /// `past` knows that the guest has asked to write over what is newest.
    ///
    /// # Errors
    /// As [`Durability::opened`], and when what was found is none of it.
    pub fn followed(
        superblock: &[u8],
        within: Age,
        found: &FoundLog,
        (owed, guest_tail, last): (&[Transaction], u32, u32),
        past: &BTreeMap<u64, Past>,
        now: Duration,
    ) -> Result<Self, String> {
        let mut machine = Self::opened(superblock, within)?;
        let format = machine.format;
        let used: u64 = found.lengths.iter().map(|length| u64::from(*length)).sum();
        if !format.contains(found.tail.0) || used >= u64::from(format.log_blocks()) {
            return Err("the log on storage is longer than its place".to_owned());
        }
        machine.live = Live::found(&format, found.tail, &found.lengths);
        (machine.is_live, machine.is_following) = (true, true);
        (machine.guest_tail, machine.durable) = (guest_tail, guest_tail.wrapping_sub(1));
        machine.passed_at_first = machine.durable;
        machine.last_clock = found.last_clock;
        let same = |copy: &FoundCopy| matches!(copy.said, FoundSaid::Same(_)).then_some(copy.block);
        let same: BTreeSet<u64> = found.copies.iter().filter_map(same).collect();
        machine.gone_over = asked_over(owed, past);
        for transaction in owed {
            let (there, blocks) = transaction.blocks.iter().partition(|(block, _)| same.contains(block));
            let there: Vec<(u64, Version)> = there;
            let sequence = transaction.sequence;
            let held = |version| Held { version, sequence, home: None, is_past: true };
            machine.found.extend(there.into_iter().map(|(block, version)| (block, held(version))));
            machine.open.add(&Transaction { blocks, ..transaction.clone() }, now, 0);
        }
        // What of the found is superseded, freed or revoked by what is not durable is not known.
        let rest = Transaction { sequence: last, blocks: Vec::new(), revokes: Vec::new(), freed: Freed::Unknown };
        machine.open.add(&rest, now, 0);
        // What was written before may be anywhere.
        (machine.ended, machine.to_cover) = (1, 1);
        machine.open.ended = machine.ended;
        for FoundCopy { block, compound, position, escaped, said } in &found.copies {
            // What the guest's log does not have is left to nobody's replay but ours.
            let forgotten = guest_tail.wrapping_sub(1);
            let transaction = match said {
                FoundSaid::Same(transaction) | FoundSaid::AtHome(transaction) => *transaction,
                FoundSaid::Newer | FoundSaid::Nothing => forgotten,
            };
            // Of what is not seen to be at home nobody knows what is there: rule (g).
            let is_past = !matches!(said, FoundSaid::AtHome(_));
            let (compound, position, escaped) = (*compound, *position, *escaped);
            let copy = Copy { compound, position, escaped, transaction, home: Home::Owed, is_past };
            if !machine.live.put(*block, copy) {
                return Err(format!("the copy of block {block} is in no compound of the log on storage"));
            }
            match said {
                FoundSaid::AtHome(transaction) => {
                    machine.live.written(*block, compound, machine.ended);
                    if sequence::is_after(guest_tail, *transaction) {
                        // What the guest has written since must not be replayed over: rule (g).
                        machine.open.revoked.insert(*block);
                    }
                }
                FoundSaid::Nothing => {
                    // With the first compound it is needed no more, and need not be brought home.
                    machine.open.revoked.insert(*block);
                }
                FoundSaid::Same(_) if machine.found.contains_key(block) => {
                    if past.get(block) == Some(&Past::Written) {
                        machine.live.written(*block, compound, machine.ended);
                    }
                }
                FoundSaid::Newer if machine.open.blocks.contains_key(block) => {}
                FoundSaid::Same(_) | FoundSaid::Newer => {
                    return Err(format!("the newest version of block {block} is not at home, and not owed"));
                }
            }
        }
        // Nor whether the guest has written past its journal what is owed, where nobody has written that down.
        let ended = machine.ended;
        for (block, held) in machine.open.blocks.iter_mut().chain(&mut machine.found) {
            held.is_past = true;
            held.home = (past.get(block) == Some(&Past::Written)).then_some(ended);
        }
        machine.is_urgent = true;
        machine.phase = Phase::Follow;
        Ok(machine)
    }

    /// A transaction of the guest is committed. `answer` is told when the guest may know.
    pub fn committed(
        &mut self,
        now: Duration,
        transaction: &Transaction,
        answer: AnswerId,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) {
        if self.phase == Phase::Failed {
            self.falls_short |= self.is_proven;
            steps.push(Step::Answer { answer, is_good: false });
            return;
        }
        self.open.add(transaction, now, self.ended);
        if self.open.revoked.len() > self.revoked_max {
            self.generalize_revoked();
        }
        let through = transaction.sequence;
        let is_late = self.within.is_zero() || transaction.freed == Freed::Unknown;
        let is_pressed = !is_late && self.is_pressed();
        if is_late {
            self.waiting.push(Waiting { through, answer, tail: None, is_slowed: false });
            self.is_urgent = true;
        } else if !is_pressed {
            steps.push(Step::Answer { answer, is_good: true });
        }
        self.drive(now, view, steps);
        if is_pressed {
            self.slow_down(through, answer, steps);
        }
    }

    /// The window that this transaction went into was pressed. If no compound has taken it at once, for whatever reason (one is being made,
    /// the log is emptied, or waits to be), nothing else keeps the next from having all that is committed until then.
    fn slow_down(&mut self, through: u32, answer: AnswerId, steps: &mut Vec<Step>) {
        if self.phase != Phase::Failed && self.is_pressed() {
            self.waiting.push(Waiting { through, answer, tail: None, is_slowed: true });
            self.is_urgent = true;
        } else {
            // It is in a compound, or an age promises it no more than that it is held.
            steps.push(Step::Answer { answer, is_good: true });
        }
    }

    /// Of a revoked block of which storage's log has no copy, nor will have one of what is being made durable, nothing else matters than
    /// that it is freed: rule (b). Nor is it logged again: that would be a copy.
    fn generalize_revoked(&mut self) {
        self.supersede_again();
        let making = self.making.as_ref().map(|making| &making.window.blocks);
        let has_copy =
            |block: &u64| self.live.get(*block).is_some() || making.is_some_and(|blocks| blocks.contains_key(block));
        let (kept, freed): (BTreeSet<u64>, BTreeSet<u64>) =
            std::mem::take(&mut self.open.revoked).into_iter().partition(has_copy);
        self.open.revoked = kept;
        for block in freed {
            self.settled.remove(&block);
            self.open.freed.insert(block..block + 1);
        }
    }

    /// The last transaction that is committed.
    pub fn last(&self) -> u32 {
        let span = self.open.span.or_else(|| self.making.as_ref().and_then(|making| making.window.span));
        span.map_or(self.durable, |(_, last, _)| last)
    }

    /// The guest asks for a flush, or has no write cache and a write of its has ended.
    pub fn flush_asked(&mut self, now: Duration, answer: AnswerId, view: &mut dyn View, steps: &mut Vec<Step>) {
        if self.flushed >= self.to_cover || !(self.within.is_zero() || self.phase == Phase::Failed) {
            if self.flushed != self.ended {
                self.flush_wanted.get_or_insert(now);
            }
            steps.push(Step::Answer { answer, is_good: true });
        } else {
            self.flush_answers.push(answer);
        }
        self.drive(now, view, steps);
    }

    /// Somebody waits until all that is committed and written is durable.
    pub fn flush_now(&mut self, now: Duration, answer: AnswerId, view: &mut dyn View, steps: &mut Vec<Step>) {
        let last = self.open.span.or_else(|| self.making.as_ref().and_then(|making| making.window.span));
        match last {
            _ if self.phase == Phase::Failed => {
                self.falls_short |= self.is_proven;
                steps.push(Step::Answer { answer, is_good: false });
            }
            Some((_, through, _)) => {
                self.is_urgent |= !self.open.is_empty();
                self.waiting.push(Waiting { through, answer, tail: None, is_slowed: false });
            }
            None => self.flush_answers.push(answer),
        }
        self.drive(now, view, steps);
    }

    /// The number after the last compound that was begun, whatever became of it.
    pub fn next_number(&self) -> u32 {
        self.live.head.1.wrapping_add(u32::from(self.making.is_some() || self.has_given_up))
    }

    /// Another age from now on.
    pub fn set_within(&mut self, now: Duration, within: Age, view: &mut dyn View, steps: &mut Vec<Step>) {
        self.within = within;
        self.is_urgent |= within.is_zero() && !self.open.is_empty();
        self.drive(now, view, steps);
    }

    /// Time has passed.
    pub fn timer(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        self.drive(now, view, steps);
    }

    /// When [`Durability::timer`] is to be called at the latest.
    pub fn deadline(&self) -> Option<Duration> {
        let oldest = self.open.span.filter(|_| self.phase == Phase::Idle).map(|(_, _, since)| since);
        let flush = self.flush_wanted.filter(|_| !self.is_flushing);
        [oldest, flush].into_iter().flatten().min().map(|since| since + self.within)
    }

    /// An operation of ours is done.
    pub fn operation_done(
        &mut self,
        now: Duration,
        operation: OperationId,
        is_good: bool,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) {
        let Some(purpose) = self.purposes.remove(&operation) else { return };
        if let Purpose::GuestFlush(covered, answers) = purpose {
            self.is_flushing = false;
            for answer in answers {
                steps.push(Step::Answer { answer, is_good });
            }
            if is_good {
                self.flush_covered(covered);
            } else {
                self.fail("a flush of the disk failed", steps);
            }
        } else if !is_good {
            self.fail("storage failed under a compound transaction", steps);
        } else if self.phase != Phase::Failed {
            match purpose {
                Purpose::PhaseFlush(covered) => {
                    self.flush_covered(covered);
                    self.body_covers = covered;
                }
                _ => self.ended += 1,
            }
            self.left -= 1;
            if self.left == 0 {
                self.phase_done(now, view, steps);
            }
        }
        self.drive(now, view, steps);
    }

    /// Gives durability up: nothing is held back any more, and whoever waits for this machine is answered or may go. Who asks it later is
    /// answered at once.
    pub fn give_up(&mut self, steps: &mut Vec<Step>) {
        self.phase = Phase::Failed;
        self.let_go(steps);
    }

    /// Whether it was given up, or has failed, while somebody waited for a commit to be durable, or may have waited for it since an earlier
    /// machine, or was told since that nothing is durable: who repeats a commit then, since he was not answered, was promised that it is. Not
    /// before storage is a truth: until then whoever commits is promised no more than that it is held.
    pub fn falls_short(&self) -> bool {
        self.falls_short
    }

    /// Figures.
    pub fn status(&self) -> Status {
        let making = self.making.as_ref().and_then(|making| making.window.span);
        Status { oldest: making.or(self.open.span).map(|(_, _, since)| since), ..self.status }
    }

    /// The last transaction of what is being made durable, if something is.
    pub fn under_way(&self) -> Option<u32> {
        self.making.as_ref().and_then(|making| making.window.span).map(|(_, last, _)| last)
    }

    /// Whether a compound is being written.
    pub fn is_making(&self) -> bool {
        self.making.is_some()
    }

    /// Whether storage is a truth: what is promised holds.
    pub fn is_proven(&self) -> bool {
        self.is_proven
    }

    /// The last transaction that is durable.
    pub fn durable(&self) -> u32 {
        self.durable
    }

    // Waiting.

    fn fail(&mut self, why: &str, steps: &mut Vec<Step>) {
        if self.phase != Phase::Failed {
            self.phase = Phase::Failed;
            steps.push(Step::Failed(why.to_owned()));
        }
        self.let_go(steps);
    }

    // Doing.

    fn write(&mut self, place: Place, bytes: Arc<[u8]>, steps: &mut Vec<Step>) {
        let operation = self.operation(Purpose::Phase);
        self.left += 1;
        steps.push(Step::Write { operation, place, bytes });
    }

    fn flush(&mut self, steps: &mut Vec<Step>) {
        let operation = self.operation(Purpose::PhaseFlush(self.ended));
        self.left += 1;
        steps.push(Step::Flush { operation });
    }

    fn operation(&mut self, purpose: Purpose) -> OperationId {
        let operation = OperationId(self.next_operation);
        self.next_operation += 1;
        self.purposes.insert(operation, purpose);
        operation
    }

    fn flush_covered(&mut self, covered: u64) {
        self.flushed = self.flushed.max(covered);
        self.live.flushed(covered);
        if self.flushed == self.ended {
            self.flush_wanted = None;
        }
    }

    /// Does what is to be done, as far as nothing is under way.
    fn drive(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        self.release(now, view, steps);
        if self.phase == Phase::Follow && self.left == 0 {
            self.flush(steps);
        }
        if self.phase == Phase::Idle {
            let is_due = self.open.span.is_some_and(|(_, _, since)| {
                self.is_urgent || self.closing.is_some() || now >= since + self.within || self.is_pressed()
            });
            if is_due {
                if self.begin_compound(now, view, steps) {
                    // Nothing had to be written for that to be durable: whoever waited for it goes on.
                    return self.drive(now, view, steps);
                }
            } else if self.is_emptying || self.closing.is_some() {
                self.bring_home(view, steps);
            } else if !self.is_proven {
                // Nothing waits to be durable: what is home is all there is, when it is flushed. What an earlier opening left where the
                // log begins may have the number that it begins with.
                self.phase = Phase::Commit;
                let nothing = Arc::from(vec![0; self.format.block_size as usize]);
                self.write(Place::Log(self.live.head.0), nothing, steps);
            } else if self.is_touched {
                self.phase = Phase::Tail;
                self.write_superblock(self.live.tail, steps);
            }
        }
        let is_flush_due = self.flush_wanted.is_some_and(|since| now >= since + self.within);
        if !self.is_flushing && (is_flush_due || !self.flush_answers.is_empty()) {
            self.is_flushing = true;
            if is_flush_due {
                self.flush_wanted = None;
            }
            let answers = std::mem::take(&mut self.flush_answers);
            let operation = self.operation(Purpose::GuestFlush(self.ended, answers));
            steps.push(Step::Flush { operation });
        }
    }
}

/// Over which versions the guest has asked to write.
fn asked_over(owed: &[Transaction], past: &BTreeMap<u64, Past>) -> BTreeMap<u64, u32> {
    let all =
        owed.iter().flat_map(|transaction| transaction.blocks.iter().map(|(block, _)| (*block, transaction.sequence)));
    all.filter(|(block, _)| matches!(past.get(block), Some(Past::Written | Past::Begun))).collect()
}

/// Commit blocks are never older than those before them.
struct Clocked<'a> {
    view: &'a mut dyn View,
    at_least: (u64, u32),
}

impl View for Clocked<'_> {
    fn made_durable(&mut self, through: u32, blocks: &[(u64, Version)]) {
        self.view.made_durable(through, blocks);
    }

    fn at_home(&mut self, blocks: &[u64]) {
        self.view.at_home(blocks);
    }

    fn is_free(&mut self, block: u64) -> bool {
        self.view.is_free(block)
    }

    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()> {
        self.view.content(version, into)
    }

    fn logged(&mut self, position: u32, into: &mut [u8]) -> io::Result<()> {
        self.view.logged(position, into)
    }

    fn wall_clock(&self) -> (u64, u32) {
        self.view.wall_clock().max(self.at_least)
    }

    fn committed_after(&mut self, blocks: Range<u64>, after: u32) -> Vec<Committed> {
        self.view.committed_after(blocks, after)
    }
}
