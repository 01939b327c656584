//! The machine: what comes in, what is to be done, and in which phase it is.

use crate::blocks::BlockSet;
use crate::compound::{Made, Making, Sorted};
use crate::live::{Copy, Home, Live};
use crate::window::{Freed, Held, Transaction, Version, Window};
use jbd2::{Compound, Format, MAGIC, SUPERBLOCK_BYTES, Superblock, SuperblockEdit, sequence};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A compound is made when what it would take is this part of the log, whatever its age.
const PRESSURE: u64 = 4;
/// Or when it would take so many bytes. What is brought home at a time takes no more, either: both are in memory until they are written.
const BYTES_AT_ONCE_MAX: u64 = 32 << 20;
/// Where durability begins in parts, there is one more of them for each so many, for what is committed meanwhile.
const SPARE_PARTS: u64 = 4;
/// Beyond so many, those of the revoked blocks of which no log on storage has a copy are only known to be freed.
const REVOKED_MAX: usize = 1 << 16;

/// How old a committed transaction may be before it is durable. At no age, a commit is answered when it is durable.
pub type Age = Duration;

/// Names an operation of ours until it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId(pub u64);

/// Names a write, discard or zeroing of the guest until it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriteId(pub u64);

/// Names something that somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AnswerId(pub u64);

/// What the guest does to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Writes them.
    Write,
    /// Zeroes them.
    Zeroes,
    /// Has no use for them.
    Discard,
}

/// When a write was asked for: just now, unless this says something else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WhenAsked {
    /// Somebody else had it wait before. The last transaction that was committed when it came: what it carries is no newer than that.
    pub first: Option<u32>,
    /// It was asked of an earlier machine, which is gone, and not answered: what it carries may be older than all that this one found.
    pub is_repeated: bool,
}

/// Where an operation of ours goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This home block, and those after it.
    Home(u64),
    /// This log block, and those after it; never past the log's end.
    Log(u32),
    /// The journal superblock.
    Superblock,
}

/// What is to be done. Operations of one list run in any order, and beside those of earlier ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write this.
    Write {
        /// Its name.
        operation: OperationId,
        /// Where to.
        place: Place,
        /// What.
        bytes: Arc<[u8]>,
    },
    /// Make durable what has ended.
    Flush {
        /// Its name.
        operation: OperationId,
    },
    /// A held write of the guest goes to storage now.
    Go(WriteId),
    /// Whoever waits hears: good, or that there is no durability.
    Answer {
        /// Who.
        answer: AnswerId,
        /// Whether it is good.
        is_good: bool,
    },
    /// There is no durability any more, and why.
    Failed(String),
}

/// What the machine has to know of the rest, while it is called.
pub trait View {
    /// Transactions up to `through` are durable, and these are the newest versions that they brought: from now on what is told of
    /// free blocks is as of them, and the versions are not asked for any more. A call and no step, because what is decided next
    /// depends on it.
    fn made_durable(&mut self, through: u32, blocks: &[(u64, Version)]);

    /// The newest durable versions of these blocks are at home, durably, and nothing else is: what home has tells what is durable. Until
    /// [`View::made_durable`] brings a version again, which may be this one once more: it is at home still then.
    fn at_home(&mut self, blocks: &[u64]);

    /// Whether the block bitmap, as of what is durable, calls this block free. False where that is not certain.
    fn is_free(&mut self, block: u64) -> bool;

    /// A committed version.
    ///
    /// # Errors
    /// When it cannot be read.
    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()>;

    /// What is at a log block on storage.
    ///
    /// # Errors
    /// When it cannot be read.
    fn logged(&mut self, position: u32, into: &mut [u8]) -> io::Result<()>;

    /// Seconds and nanoseconds for a commit block.
    fn wall_clock(&self) -> (u64, u32);

    /// Of these blocks the newest versions that were committed after transaction `after`, and that the guest's log has still. Their
    /// contents can be asked for, whether they have been made durable or not.
    fn committed_after(&mut self, blocks: Range<u64>, after: u32) -> Vec<Committed>;
}

/// The newest committed version of a block, as the guest's log has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The home block.
    pub block: u64,
    /// Its content.
    pub version: Version,
    /// The transaction.
    pub transaction: u32,
    /// It is written down that the guest has asked to write over it.
    pub is_gone_over: bool,
}

/// The newest copy of a block that an earlier machine has left in the log on storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundCopy {
    /// The home block.
    pub block: u64,
    /// The number of its compound.
    pub compound: u32,
    /// The log block.
    pub position: u32,
    /// Its first four bytes were replaced by zeros.
    pub escaped: bool,
    /// What the guest's own log says of the block.
    pub said: FoundSaid,
}

/// What the guest's own log says of a block that has a copy on storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundSaid {
    /// Its newest version is of this transaction, and is this very copy.
    Same(u32),
    /// Its newest version is of this transaction, and is at home: nothing newer than the copy.
    AtHome(u32),
    /// Its newest version is another one, which is not durable.
    Newer,
    /// It has none. All of it may have gone home; or the guest has freed the block, in a transaction that is not durable, and what is
    /// durable needs the copy.
    Nothing,
}

/// The log of compounds that an earlier machine has left on storage, as a replay finds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundLog {
    /// The log block that it begins with, and the number of its first compound.
    pub tail: (u32, u32),
    /// Log blocks of each of its compounds, in its order.
    pub lengths: Vec<u32>,
    /// Of each block the copy that a replay would bring home.
    pub copies: Vec<FoundCopy>,
    /// Seconds and nanoseconds in its last commit block.
    pub last_clock: (u64, u32),
}

/// Figures for reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// When the oldest transaction was committed that is not durable.
    pub oldest: Option<Duration>,
    /// Compounds that are durable.
    pub compounds: u64,
    /// Blocks that went into them.
    pub compound_blocks: u64,
    /// Appends that we wrote home.
    pub append_blocks: u64,
    /// Copies that we brought home to make room.
    pub blocks_brought_home: u64,
    /// Writes of the guest that had to wait.
    pub writes_held: u64,
    /// Discards of the guest that had to wait.
    pub discards_held: u64,
}

/// Why a write waits.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wait {
    /// For what is being made durable.
    Making,
    /// For a compound that has not begun.
    Open,
    /// For the log to be empty.
    Empty,
    /// For one before it, or one of ours.
    Before,
    /// For these, which are newer than what it carries, to be in the log on storage: rule (h).
    Newer(Vec<Committed>),
}

#[derive(Clone, Debug)]
struct Asked {
    id: WriteId,
    /// Blocks that it touches, and those that it covers whole.
    touched: Range<u64>,
    whole: Range<u64>,
    kind: Kind,
    /// The last transaction that was committed when it came: what it carries is no newer.
    as_of: u32,
    /// It was asked of an earlier machine, when this was the last transaction at the latest.
    again: Option<u32>,
}

/// Over which version a write of the guest goes: most are its home write.
#[derive(Clone, Copy, Debug)]
enum Mark {
    /// The copy of this compound, and of this transaction.
    Live(u32, u32),
    /// One of this transaction, which is not durable.
    Open(Version, u32),
}

impl Mark {
    fn transaction(&self) -> u32 {
        match self {
            Mark::Live(_, transaction) | Mark::Open(_, transaction) => *transaction,
        }
    }
}

#[derive(Debug)]
struct Flight {
    asked: Asked,
    marks: BTreeMap<u64, Mark>,
    /// Blocks that another write, which goes over another version, was on its way to at the same time: either may land last.
    doubted: BTreeSet<u64>,
    /// Blocks to which it is known to carry the newest committed version. Everything else goes past the guest's journal.
    carried: BTreeSet<u64>,
    /// What was settled of its blocks when it began, for as long as no other write to them has begun.
    was_settled: Vec<(u64, Version)>,
}

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

/// What the guest has at home of a block that has a committed version which is not seen there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Past {
    /// Something newer that it wrote past its journal.
    Written,
    /// That, or what the block had before, or a part of both. It had asked to write something newer, past its journal, or this very
    /// version; and who was not answered asks again.
    Begun,
    /// That, or what the block had before: nobody knows.
    Perhaps,
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

    /// The guest writes, discards or zeroes `touched` blocks, of which it covers `whole` ones wholly. True when that may go to
    /// storage now; otherwise [`Step::Go`] says so later. Not for blocks of the log.
    #[expect(clippy::too_many_arguments, reason = "a request has so many parts")]
    pub fn write_begins(
        &mut self,
        now: Duration,
        id: WriteId,
        kind: Kind,
        touched: Range<u64>,
        whole: Range<u64>,
        when: WhenAsked,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) -> bool {
        let last = self.last();
        let as_of = when.first.filter(|first| sequence::is_after(last, *first)).unwrap_or(last);
        let again = when.is_repeated.then_some(as_of);
        let as_of = if when.is_repeated { self.passed_at_first } else { as_of };
        let asked = Asked { id, touched, whole, kind, as_of, again };
        if let Some(wait) = self.wait_of(&asked, self.held.len(), view) {
            self.wish(wait, now);
            *(if kind == Kind::Discard { &mut self.status.discards_held } else { &mut self.status.writes_held }) += 1;
            self.held.push_back(asked);
            self.drive(now, view, steps);
            return false;
        }
        self.depart(asked);
        true
    }

    /// Whether a write of whole blocks, not begun, would have to wait for a compound and for nothing else. Whoever holds the very same
    /// content may answer it instead of beginning it, and write it home himself later.
    pub fn waits_for_compound(&self, blocks: Range<u64>, view: &mut dyn View) -> bool {
        if self.within.is_zero() || self.is_under_way(&blocks) {
            return false;
        }
        let (touched, whole, kind, as_of) = (blocks.clone(), blocks, Kind::Write, self.last());
        let asked = Asked { id: WriteId(0), touched, whole, kind, as_of, again: None };
        matches!(self.wait_of(&asked, self.held.len(), view), Some(Wait::Open | Wait::Making))
    }

    /// Blocks to which a write may go and has not ended, or waits to. The host begins to write nothing there: its write would wait for a
    /// compound, which may wait for room in the log, and that for this write; which, if it has not been sent yet, would wait for the host's. Of two
    /// that overlap and wait, the first may go while the host's, behind both, waits for the second.
    pub fn closed_to_host(&self) -> BlockSet {
        let mut blocks = self.under_way_to();
        self.held.iter().for_each(|asked| blocks.insert(asked.touched.clone()));
        blocks
    }

    /// Blocks to which a write may go and has not ended.
    fn under_way_to(&self) -> BlockSet {
        let mut blocks = BlockSet::default();
        self.flights.values().for_each(|flight| blocks.insert(flight.asked.touched.clone()));
        blocks
    }

    fn is_under_way(&self, blocks: &Range<u64>) -> bool {
        self.flights.values().any(|flight| {
            let touched = &flight.asked.touched;
            touched.start < blocks.end && blocks.start < touched.end
        })
    }

    /// The version that is at home, durably, and the newest of all that this machine knows of: who writes just that there once more need
    /// not be sent to storage. Nothing where that is not certain, or something is under way there.
    pub fn settled(&self, block: u64) -> Option<Version> {
        let is_there = |asked: &Asked| asked.touched.contains(&block);
        let version = self.settled.get(&block).copied()?;
        let is_newer = |window: &Window| window.blocks.contains_key(&block) || window.frees(&(block..block + 1));
        let is_busy = self.phase == Phase::Failed
            || self.flights.values().any(|flight| is_there(&flight.asked))
            || self.held.iter().any(is_there)
            || is_newer(&self.open)
            || self.making.as_ref().is_some_and(|making| is_newer(&making.window))
            || self.live.get(block).is_some();
        (!is_busy).then_some(version)
    }

    /// What [`Durability::settled`] would say of each block of a write, if it were not for this write, which may go and has not been sent
    /// yet: one that waited for its compound may carry just what that compound's appends have brought home. Nothing where that is not
    /// certain of all of them.
    pub fn settled_but_for(&self, id: WriteId) -> Option<Vec<Version>> {
        let flight = self.flights.get(&id)?;
        let Asked { touched, whole, kind, .. } = &flight.asked;
        let overlaps = |asked: &Asked| asked.touched.start < touched.end && touched.start < asked.touched.end;
        let is_newer = |window: &Window| window.holds(touched) || window.frees(touched);
        let is_busy = self.phase == Phase::Failed
            || self.flights.iter().any(|(other, flight)| *other != id && overlaps(&flight.asked))
            || self.held.iter().any(overlaps)
            || is_newer(&self.open)
            || self.making.as_ref().is_some_and(|making| is_newer(&making.window))
            || self.live.within(touched.clone()).next().is_some();
        let is_all = *kind == Kind::Write
            && touched == whole
            && touched.clone().eq(flight.was_settled.iter().map(|(block, _)| *block));
        (is_all && !is_busy).then(|| flight.was_settled.iter().map(|(_, version)| *version).collect())
    }

    /// The blocks of a write over whose newest committed version it goes, or will when it has waited: it was asked when there was that
    /// version already. What of them it does not carry is newer.
    #[must_use]
    pub fn goes_over(&self, id: WriteId, view: &mut dyn View) -> Vec<u64> {
        let held = || self.held.iter().find(|asked| asked.id == id);
        let Some(asked) = self.flights.get(&id).map(|flight| &flight.asked).or_else(held) else { return Vec::new() };
        let making = self.making.as_ref().map(|making| &making.window);
        let windows = [Some(&self.open), making].into_iter().flatten();
        let held = windows.flat_map(|window| window.blocks.range(asked.whole.clone()));
        let held = held.map(|(block, held)| (*block, held.sequence));
        let live = self.live.within(asked.whole.clone()).map(|(block, copy)| (block, copy.transaction));
        // What our log has no copy of any more, the guest's may have.
        let given_up = view.committed_after(asked.whole.clone(), self.guest_tail.wrapping_sub(1));
        let given_up = given_up.into_iter().map(|newest| (newest.block, newest.transaction));
        let mut newest: BTreeMap<u64, u32> = BTreeMap::new();
        for (block, transaction) in held.chain(live).chain(given_up) {
            let known = newest.entry(block).or_insert(transaction);
            *known = sequence::latest(*known, transaction);
        }
        newest.retain(|block, transaction| self.is_over(asked, *block, *transaction));
        newest.into_keys().collect()
    }

    /// Whether a write was asked when there was this version of the block, or after that.
    fn is_over(&self, asked: &Asked, block: u64, transaction: u32) -> bool {
        let is_known = asked.again.is_some() && self.gone_over.get(&block) == Some(&transaction);
        is_known || !sequence::is_after(transaction, asked.as_of)
    }

    /// A write that may go sets out, and these blocks of it are seen to carry just the newest committed version: rule (g). For the rest of
    /// them, and where nobody says so, the guest writes past its journal.
    pub fn write_carries(&mut self, id: WriteId, blocks: impl IntoIterator<Item = u64>) {
        if let Some(flight) = self.flights.get_mut(&id)
            && !flight.marks.is_empty()
        {
            flight.carried.extend(blocks);
        }
    }

    /// It was not sent: of each block its home has, durably, just what it carries ([`Durability::settled_but_for`]).
    pub fn write_unneeded(&mut self, now: Duration, id: WriteId, view: &mut dyn View, steps: &mut Vec<Step>) {
        if let Some(flight) = self.flights.remove(&id) {
            self.settled.extend(flight.was_settled);
        }
        self.drive(now, view, steps);
    }

    /// It has ended. Gives whether the guest's next flush has to cover it: rule (f).
    pub fn write_ended(
        &mut self,
        now: Duration,
        id: WriteId,
        is_good: bool,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) -> bool {
        self.ended += 1;
        let Some(flight) = self.flights.remove(&id) else {
            self.to_cover = self.ended;
            return true;
        };
        let touched = flight.asked.touched.clone();
        // Whatever of it is at home, a replay writes over it for as long as the copies are in the log: until a flush has covered it, by
        // rule (d). What the guest's own log would not write over has waited for an empty log, by rule (e).
        // What a compound on its way revokes stays only until then.
        let is_leaving = |window: &Window| window.revoked.range(touched.clone()).next().is_some();
        let is_replayed = is_good
            && self.phase != Phase::Failed
            && !touched.is_empty()
            && !is_leaving(&self.open)
            && !self.making.as_ref().is_some_and(|making| is_leaving(&making.window))
            && self.live.within(touched.clone()).count() as u64 == touched.end - touched.start;
        if !is_replayed {
            self.to_cover = self.ended;
        }
        // Rule (g), of one that may carry less than the copy, too.
        let others: Vec<u64> =
            self.live.within(touched).map(|(block, _)| block).filter(|block| !flight.carried.contains(block)).collect();
        others.into_iter().for_each(|block| self.live.past(block));
        // What is at home is known when nothing else is on its way there: that one, or this, may land last.
        let is_known = |block: &u64| {
            let is_there = |other: &Flight| other.asked.touched.contains(block);
            is_good && !flight.doubted.contains(block) && !self.flights.values().any(is_there)
        };
        let known: Vec<(u64, Mark)> = flight.marks.into_iter().filter(|(block, _)| is_known(block)).collect();
        for (block, mark) in known {
            self.mark_written(block, mark, !flight.carried.contains(&block));
        }
        self.drive(now, view, steps);
        !is_replayed
    }

    /// A write over this version has ended.
    fn mark_written(&mut self, block: u64, mark: Mark, is_past: bool) {
        match mark {
            Mark::Live(compound, _) if self.live.get(block).is_some_and(|copy| copy.compound == compound) => {
                self.live.written(block, compound, self.ended);
            }
            Mark::Live(..) => {}
            Mark::Open(version, transaction) => {
                let making = self.making.as_mut().map(|making| &mut making.window);
                let windows = [Some(&mut self.open), making].into_iter().flatten();
                let found =
                    windows.filter_map(|window| window.blocks.get_mut(&block)).find(|held| held.version == version);
                if let Some(held) = found {
                    held.home = Some(self.ended);
                    held.is_past |= is_past;
                } else if is_past && self.live.get(block).is_some_and(|copy| copy.transaction == transaction) {
                    // Durable meanwhile. What was written is not to be written over by us.
                    let compound = self.live.get(block).map_or(0, |copy| copy.compound);
                    self.live.written(block, compound, self.ended);
                    self.live.past(block);
                }
            }
        }
    }

    /// Rule (g): what the guest has written past its journal, or may have, is not replayed over once its tail has passed the copy. Gives
    /// whether there is such a copy, which a compound is to revoke, or to supersede, before anybody is told of the tail.
    fn pass_over(&mut self, now: Duration, tail: u32) -> bool {
        let flights = &self.flights;
        let is_under_way = |block: u64| flights.values().any(|flight| flight.asked.touched.contains(&block));
        let passed = self.live.passed(tail, |block, copy| copy.is_past || is_under_way(block));
        let holds = |window: &Window, block: &u64| window.blocks.contains_key(block) || window.revoked.contains(block);
        let making = self.making.as_ref().map(|making| &making.window);
        let is_left = |block: &u64| !holds(&self.open, block) && !making.is_some_and(|making| holds(making, block));
        let revoked: Vec<u64> = passed.iter().copied().filter(is_left).collect();
        if !revoked.is_empty() {
            let (last, ended) = (self.last(), self.ended);
            self.open.revoke(&revoked, last, now, ended);
        }
        self.is_urgent |= !passed.is_empty() && !self.open.is_empty();
        !passed.is_empty()
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
    fn awaits_superblock(&mut self, answer: AnswerId, tail: u32) -> bool {
        let waits = (self.is_touched || self.is_telling) && self.within.is_zero();
        if waits {
            self.awaiting_superblock.push((answer, tail));
        }
        waits
    }

    /// A superblock that was written is durable.
    fn superblock_done(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
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
    fn tail_is(&mut self, tail: u32) {
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
    fn is_ended(&self) -> bool {
        self.is_closing_written || self.is_closed
    }

    /// Where the log on storage begins, and the number of the next compound.
    pub fn log_on_storage(&self) -> ((u32, u32), u32) {
        (self.live.tail, self.live.head.1)
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

    /// Why a write has to wait; `before` held ones came before it.
    fn wait_of(&self, asked: &Asked, before: usize, view: &mut dyn View) -> Option<Wait> {
        let Asked { touched, whole, kind, .. } = asked;
        if self.phase == Phase::Failed {
            return None;
        }
        let overlaps = |other: &Asked| other.touched.start < touched.end && touched.start < other.touched.end;
        if self.bringing_blocks.touches(touched) || self.held.iter().take(before).any(overlaps) {
            return Some(Wait::Before);
        }
        // What of one range goes over which copies is known once, however often the guest discards it at a time.
        if *kind != Kind::Write && self.is_under_way(touched) {
            return Some(Wait::Before);
        }
        // What is about to be only at home must not be torn there.
        let is_dropping = |compound: u32| compound.wrapping_sub(self.live.tail.1) < self.dropping as u32;
        if self.dropping > 0 && self.live.within(touched.clone()).any(|(_, copy)| is_dropping(copy.compound)) {
            return Some(Wait::Before);
        }
        // Rules (a) and (b), for what is being made durable and for what is not yet.
        if let Some(Making { window, .. }) = &self.making
            && (window.holds(touched) || window.frees(touched))
        {
            return Some(Wait::Making);
        }
        // And for what nobody replays yet, and may have to be put together anew.
        if self.open.frees(touched) || self.in_parts.range(touched.clone()).next().is_some() {
            return Some(Wait::Open);
        }
        for block in self.open.blocks.range(touched.clone()).map(|(block, _)| *block) {
            // What no durable transaction knows of may be written: nobody would find it.
            let is_append = *kind == Kind::Write
                && whole.contains(&block)
                && self.is_proven
                && self.live.get(block).is_none()
                && view.is_free(block);
            if !is_append {
                return Some(Wait::Open);
            }
        }
        if *kind != Kind::Discard {
            // Rule (e), and a part of a block of which the rest is only in the log.
            let is_lost =
                |(block, transaction)| sequence::is_after(self.guest_tail, transaction) || !whole.contains(&block);
            if self.live.within(touched.clone()).any(|(block, copy)| is_lost((block, copy.transaction))) {
                return Some(Wait::Empty);
            }
        }
        let newer = self.left_behind(asked, view);
        (!newer.is_empty()).then_some(Wait::Newer(newer))
    }

    /// Rule (h): newer versions than what a write carries that the guest's log would bring back after it, and ours would not.
    fn left_behind(&self, asked: &Asked, view: &mut dyn View) -> Vec<Committed> {
        if !sequence::is_after(self.last(), asked.as_of) {
            return Vec::new();
        }
        let after = sequence::latest(asked.as_of, self.guest_tail.wrapping_sub(1));
        let mut newer = view.committed_after(asked.touched.clone(), after);
        newer.retain(|Committed { block, transaction, is_gone_over, .. }| {
            // It was asked of an earlier machine, when there was that version.
            let is_known = *is_gone_over && asked.again.is_some_and(|last| !sequence::is_after(*transaction, last));
            let is_left = self.live.get(*block).is_none() && !self.open.blocks.contains_key(block);
            is_left && !is_known && !self.is_over(asked, *block, *transaction)
        });
        newer
    }

    fn wish(&mut self, wait: Wait, now: Duration) {
        match wait {
            Wait::Open => self.is_urgent = true,
            Wait::Empty => self.is_emptying = true,
            Wait::Making | Wait::Before => {}
            Wait::Newer(mut newer) => {
                // What this machine has not been told of yet comes by itself.
                let last = self.last();
                newer.retain(|newest| !sequence::is_after(newest.transaction, last));
                if !newer.is_empty() {
                    self.open.log_again(&newer, last, now);
                    self.is_urgent = true;
                }
            }
        }
    }

    /// A write goes to storage.
    fn depart(&mut self, asked: Asked) {
        for flight in self.flights.values_mut() {
            flight.was_settled.retain(|(block, _)| !asked.touched.contains(block));
        }
        let was_settled: Vec<_> =
            self.settled.range(asked.touched.clone()).map(|(block, version)| (*block, *version)).collect();
        for (block, _) in &was_settled {
            self.settled.remove(block);
        }
        let mut marks = BTreeMap::new();
        if self.phase != Phase::Failed {
            // One that had to wait may carry less than what is durable now: then the newest version is in the log only.
            let live: Vec<(u64, Copy)> = self.live.depart(asked.touched.clone()).collect();
            let live = live.into_iter().filter(|(block, _)| asked.whole.contains(block));
            let live = live.filter(|(block, copy)| self.is_over(&asked, *block, copy.transaction));
            marks.extend(live.map(|(block, copy)| (block, Mark::Live(copy.compound, copy.transaction))));
            let open = self.open.blocks.range(asked.whole.clone());
            let open = open.filter(|(block, held)| self.is_over(&asked, **block, held.sequence));
            marks.extend(open.map(|(block, held)| (*block, Mark::Open(held.version, held.sequence))));
            // Whatever was there of them is written over.
            self.open.blocks.range_mut(asked.touched.clone()).for_each(|(_, held)| held.home = None);
        }
        let mut doubted = BTreeSet::new();
        for flight in self.flights.values_mut() {
            let is_other = |block: &u64, one: &Mark, marks: &BTreeMap<u64, Mark>| {
                marks.get(block).map(Mark::transaction) != Some(one.transaction())
            };
            let ours = marks.iter().filter(|(block, _)| flight.asked.touched.contains(block));
            doubted.extend(ours.filter(|(block, one)| is_other(block, one, &flight.marks)).map(|(block, _)| *block));
            let theirs = flight.marks.range(asked.touched.clone());
            let theirs = theirs.filter(|(block, one)| is_other(block, one, &marks)).map(|(block, _)| *block);
            flight.doubted.extend(theirs);
        }
        self.flights.insert(asked.id, Flight { asked, marks, doubted, carried: BTreeSet::new(), was_settled });
    }

    /// Lets go of what need not wait any more.
    fn release(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        let mut index = 0;
        while let Some(asked) = self.held.get(index) {
            match self.wait_of(asked, index, view) {
                Some(wait) => {
                    self.wish(wait, now);
                    index += 1;
                }
                None => {
                    if let Some(asked) = self.held.remove(index) {
                        steps.push(Step::Go(asked.id));
                        self.depart(asked);
                    }
                }
            }
        }
    }

    fn let_go(&mut self, steps: &mut Vec<Step>) {
        // A tail that moves, and who is only slowed down, is told that all is well.
        let is_promised = |waiting: &Waiting| waiting.tail.is_none() && !waiting.is_slowed;
        // Nobody may have asked again yet.
        let may_be_promised = self.is_following && sequence::is_after(self.last(), self.durable);
        self.falls_short |= self.is_proven && (may_be_promised || self.waiting.iter().any(is_promised));
        for asked in std::mem::take(&mut self.held) {
            steps.push(Step::Go(asked.id));
            self.depart(asked);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            // A tail that moves claims nothing that is on storage: there is the error mark.
            let is_good = waiting.tail.is_some() || waiting.is_slowed;
            steps.push(Step::Answer { answer: waiting.answer, is_good });
        }
        for (answer, _) in std::mem::take(&mut self.awaiting_superblock) {
            steps.push(Step::Answer { answer, is_good: true });
        }
        for answer in std::mem::take(&mut self.flush_answers) {
            steps.push(Step::Answer { answer, is_good: false });
        }
        if let Some((_, answer)) = self.closing.take() {
            steps.push(Step::Answer { answer, is_good: false });
        }
        self.has_given_up |= self.making.take().is_some();
        self.open = Window::default();
        (self.in_parts, self.again) = (BTreeMap::new(), BTreeMap::new());
        self.flush_wanted = None;
    }

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

    fn write_superblock(&mut self, (start, sequence): (u32, u32), steps: &mut Vec<Step>) {
        self.is_telling |= std::mem::take(&mut self.is_touched);
        let mut raw = self.superblock.clone();
        match SuperblockEdit::new(&mut raw) {
            Ok(mut edit) => edit.start(start).sequence(sequence).seal(),
            Err(error) => return self.fail(&error.to_string(), steps),
        }
        self.write(Place::Superblock, Arc::from(raw), steps);
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

    /// Whether what is committed, and in no compound yet, is more than what is to be read at a time.
    fn is_pressed(&self) -> bool {
        let blocks = self.open.blocks.len() as u64;
        let most = (u64::from(self.format.log_blocks()) / PRESSURE).min(self.blocks_at_once);
        // Until storage is a truth each part that is left takes so many of them.
        let in_parts = u64::from(self.parts_left) * self.blocks_at_once;
        blocks > most + in_parts || !self.is_proven && !self.has_room_for_parts(blocks)
    }

    /// Whether so many blocks fit into the log in parts, beside those that are there or on their way: otherwise all would be read at once.
    fn has_room_for_parts(&self, blocks: u64) -> bool {
        let length = |blocks: u64| Compound::length(&self.format, usize::try_from(blocks).unwrap_or(usize::MAX), 0);
        let parts = blocks / self.blocks_at_once * length(self.blocks_at_once) + length(blocks % self.blocks_at_once);
        let making = self.making.as_ref().map_or(0, |making| u64::from(making.length));
        parts + making <= u64::from(self.live.room(&self.format))
    }

    /// Whether what was committed is durable already.
    fn begin_compound(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) -> bool {
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
    fn log_found_again(&mut self) {
        let is_one = !self.in_parts.is_empty();
        let all = std::mem::take(&mut self.found).into_iter().chain(std::mem::take(&mut self.again));
        self.again = all.chain(std::mem::take(&mut self.in_parts)).collect();
        self.supersede_again();
        if is_one || self.again.len() + self.open.blocks.len() <= self.blocks_at_once as usize {
            self.open.blocks.append(&mut self.again);
        }
    }

    /// What is committed or revoked since need not be logged again, and there may be no version of it any more.
    fn supersede_again(&mut self) {
        let Window { blocks, revoked, .. } = &self.open;
        self.again.retain(|block, _| !blocks.contains_key(block) && !revoked.contains(block));
    }

    /// Whether the log is as empty as it has to be for what is to be logged again. What is left of that, if it is little, comes with the rest.
    fn logs_again(&mut self) -> bool {
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
    fn forget_parts(&mut self) {
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
    fn bring_home(&mut self, view: &mut dyn View, steps: &mut Vec<Step>) {
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
    fn phase_done(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
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
    fn drop_compounds(&mut self, view: &mut dyn View) {
        let at_home = self.live.drop_compounds(&self.format, std::mem::take(&mut self.dropping));
        view.at_home(&at_home);
    }

    /// The body is durable: the commit block makes it count.
    fn write_commit(&mut self, steps: &mut Vec<Step>) {
        let Some(making) = &self.making else { return };
        assert!(self.body_covers >= making.window.ended, "rule (c): ordered data is not flushed");
        let (at, commit) = (making.commit_at, Arc::clone(&making.commit));
        self.phase = Phase::Commit;
        self.write(Place::Log(at), commit, steps);
    }

    /// A compound is durable.
    fn compound_done(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        self.phase = Phase::Idle;
        let Some(making) = self.making.take() else { return };
        self.add_to_live(&making);
        let Making { window, sorted, .. } = making;
        self.window_done(now, window, sorted, view, steps);
    }

    /// The log on storage has it.
    fn add_to_live(&mut self, making: &Making) {
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
    fn window_done(
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
    fn move_tail(&mut self, steps: &mut Vec<Step>) {
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

/// What a superblock says beside where its log begins.
fn but_for_the_log(superblock: &[u8]) -> Option<Vec<u8>> {
    let mut raw = superblock.to_vec();
    SuperblockEdit::new(&mut raw).ok()?.start(0).sequence(0).seal();
    Some(raw)
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
