//! How much the machine reads into memory at a time, and how much waits beside it, is bounded whatever the guest does.

use durability::{
    AnswerId, Committed, Durability, FoundCopy, FoundLog, FoundSaid, Freed, Kind, OperationId, Place, Step,
    Transaction, Version, View, WhenAsked, WriteId,
};
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, sequence};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::time::Duration;

const NOW: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_secs(1000);
/// Blocks that are read into memory at a time.
const AT_ONCE: u64 = 4;

struct Shown<'a> {
    is_free: bool,
    fill: u8,
    lost: &'a BTreeSet<Version>,
    durable: &'a mut BTreeMap<u64, Version>,
}

impl View for Shown<'_> {
    fn made_durable(&mut self, _: u32, blocks: &[(u64, Version)]) {
        self.durable.extend(blocks.iter().copied());
    }
    fn at_home(&mut self, _: &[u64]) {}
    fn is_free(&mut self, _: u64) -> bool {
        self.is_free
    }
    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()> {
        if self.lost.contains(&version) {
            return Err(io::Error::other(format!("{version:?} is not held any more")));
        }
        into.fill(self.fill);
        Ok(())
    }
    fn logged(&mut self, _: u32, into: &mut [u8]) -> io::Result<()> {
        into.fill(1);
        Ok(())
    }
    fn wall_clock(&self) -> (u64, u32) {
        (0, 0)
    }
    fn committed_after(&mut self, _: Range<u64>, _: u32) -> Vec<Committed> {
        Vec::new()
    }
}

struct Rig {
    machine: Durability,
    under_way: Vec<OperationId>,
    gone: Vec<WriteId>,
    /// Home writes of the last steps, and writes of log blocks.
    homes: usize,
    logged: usize,
    /// Superblocks that were written.
    superblocks: usize,
    /// The newest durable version of each block.
    durable: BTreeMap<u64, Version>,
    /// Who was told what.
    told: Vec<(u64, bool)>,
    sequence: u32,
    is_free: bool,
    /// What every version has.
    fill: u8,
    /// Versions that nobody holds any more.
    lost: BTreeSet<Version>,
}

impl Rig {
    fn new() -> Self {
        let superblock = SuperblockBuilder { maxlen: 200, start: 1, sequence: 2, ..SuperblockBuilder::default() }
            .checksum(Checksum::V3)
            .build();
        let machine = Durability::opened(&superblock, LONG).expect("a log").on_storage().with_at_once(AT_ONCE, 8);
        Rig {
            machine,
            under_way: Vec::new(),
            gone: Vec::new(),
            homes: 0,
            logged: 0,
            superblocks: 0,
            durable: BTreeMap::new(),
            told: Vec::new(),
            sequence: 1,
            is_free: false,
            fill: 1,
            lost: BTreeSet::new(),
        }
    }

    /// The same where what was committed stays.
    fn steady() -> Self {
        let rig = Rig::new();
        Rig { machine: rig.machine.with_steady_contents(), ..rig }
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut Durability, &mut Shown<'_>, &mut Vec<Step>) -> T) -> T {
        let mut steps = Vec::new();
        let Rig { is_free, fill, lost, durable, .. } = self;
        let mut shown = Shown { is_free: *is_free, fill: *fill, lost, durable };
        let result = call(&mut self.machine, &mut shown, &mut steps);
        (self.homes, self.logged) = (0, 0);
        for step in steps {
            match step {
                Step::Write { operation, place, bytes } => {
                    self.under_way.push(operation);
                    match place {
                        Place::Home(_) => self.homes += bytes.len() / 4096,
                        Place::Log(_) => self.logged += bytes.len() / 4096,
                        Place::Superblock => self.superblocks += 1,
                    }
                }
                Step::Flush { operation } => self.under_way.push(operation),
                Step::Go(id) => self.gone.push(id),
                Step::Answer { answer, is_good } => self.told.push((answer.0, is_good)),
                Step::Failed(why) => panic!("{why}"),
            }
        }
        result
    }

    /// A transaction of so many blocks from `first` on; its answer has its number.
    fn commit(&mut self, first: u64, blocks: u64) -> u64 {
        self.commit_with(first..first + blocks, Vec::new())
    }

    fn commit_with(&mut self, blocks: Range<u64>, revokes: Vec<u64>) -> u64 {
        self.sequence += 1;
        let sequence = self.sequence;
        let blocks = blocks.map(|block| (block, Version(u64::from(sequence) << 32 | block))).collect();
        let freed = Freed::Blocks(Vec::new());
        let transaction = Transaction { sequence, blocks, revokes, freed };
        self.call(|machine, view, steps| {
            machine.committed(NOW, &transaction, AnswerId(u64::from(sequence)), view, steps);
        });
        u64::from(sequence)
    }

    fn end_one(&mut self) {
        let operation = self.under_way.remove(0);
        self.call(|machine, view, steps| machine.operation_done(NOW, operation, true, view, steps));
    }

    fn settle(&mut self) {
        while !self.under_way.is_empty() {
            self.end_one();
        }
    }

    fn is_told(&self, answer: u64) -> Option<bool> {
        self.told.iter().find(|(told, _)| *told == answer).map(|(_, is_good)| *is_good)
    }
}

/// Who commits faster than storage takes it is answered later: a compound is no more than what is read at a time, and one transaction.
#[test]
fn a_guest_that_outruns_storage_waits_for_it() {
    let mut rig = Rig::new();
    let first = rig.commit(10, AT_ONCE + 1);
    assert_eq!(rig.is_told(first), Some(true), "nothing is being made durable yet");
    assert!(rig.machine.is_making(), "it is too much to wait for its age");
    let small = rig.commit(10, 1);
    assert_eq!(rig.is_told(small), Some(true));
    let large = rig.commit(20, AT_ONCE + 1);
    assert_eq!(rig.is_told(large), None, "it waits");
    rig.settle();
    assert_eq!(rig.is_told(large), Some(true));
    assert_eq!(rig.machine.durable(), rig.sequence);
}

/// Commits of as many blocks as are read at a time, each made durable, until the log has no room for one more.
fn fill(rig: &mut Rig) {
    let mut first = 1000;
    while rig.machine.status().compounds < 33 {
        rig.commit(first, AT_ONCE);
        rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
        rig.settle();
        first += AT_ONCE;
    }
    assert_eq!(rig.machine.status().blocks_brought_home, 0, "there was room until now");
}

/// A commit that is to be durable, and does not fit.
fn overflow(rig: &mut Rig) {
    let small = rig.commit(10, AT_ONCE);
    assert_eq!(rig.is_told(small), Some(true));
    rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
    assert!(!rig.machine.is_making(), "there is no room");
}

/// The second of two waits until it is durable, and what is made durable with it is no more than what is read at a time, and one transaction.
fn second_waits(rig: &mut Rig, what: &str) {
    let (before, last) = (rig.machine.status().compound_blocks, AT_ONCE + 3);
    let large = rig.commit(20, last);
    assert_eq!(rig.is_told(large), None, "{what}: it waits");
    while !rig.machine.is_making() && !rig.under_way.is_empty() {
        assert_eq!(rig.is_told(large), None, "{what}: it waits");
        rig.end_one();
    }
    let taken = rig.machine.status().compound_blocks - before;
    assert!(taken > 0 && taken <= AT_ONCE + last, "{what}: {taken} blocks");
    rig.settle();
    assert_eq!(rig.is_told(large), Some(true), "{what}");
    assert_eq!(rig.machine.durable(), rig.sequence, "{what}");
}

/// The same while no compound is made, since the log has to be emptied first: whatever of that is done.
#[test]
fn a_guest_that_outruns_storage_waits_while_the_log_is_emptied() {
    let mut done = 0;
    loop {
        let mut rig = Rig::new();
        fill(&mut rig);
        overflow(&mut rig);
        for _ in 0..done {
            rig.end_one();
        }
        if rig.machine.is_making() {
            break;
        }
        second_waits(&mut rig, &format!("{done} operations are over"));
        done += 1;
    }
    assert!(done >= 4, "home, a flush, the superblock, and another flush");
}

/// And while nothing goes home, since writes of the guest are on their way to all of it.
#[test]
fn a_guest_that_outruns_storage_waits_for_its_own_home_writes() {
    let mut rig = Rig::new();
    fill(&mut rig);
    rig.call(|machine, view, steps| {
        let (blocks, when) = (1000..2000, WhenAsked::default());
        assert!(machine.write_begins(NOW, WriteId(1), Kind::Write, blocks.clone(), blocks, when, view, steps));
    });
    overflow(&mut rig);
    assert!(rig.under_way.is_empty(), "all is busy");
    let large = rig.commit(20, AT_ONCE + 3);
    assert_eq!(rig.is_told(large), None, "it waits");
    rig.call(|machine, view, steps| machine.write_ended(NOW, WriteId(1), true, view, steps));
    rig.settle();
    assert_eq!(rig.is_told(large), Some(true));
}

/// Who waits for that is told, too, when there is no durability any more.
#[test]
fn who_waits_while_the_log_is_emptied_is_no_worse_off_when_durability_ends() {
    let mut rig = Rig::new();
    fill(&mut rig);
    overflow(&mut rig);
    let large = rig.commit(20, AT_ONCE + 3);
    assert_eq!(rig.is_told(large), None, "it waits");
    rig.call(|machine, _, steps| machine.give_up(steps));
    assert_eq!(rig.is_told(large), Some(true), "an age promised it no more than that it is held");
    assert!(rig.machine.falls_short(), "it is not durable");
}

/// Whoever drives the machine has to know whether a commit that is repeated later was to be durable and is not.
#[test]
fn a_machine_that_is_given_up_knows_whether_it_falls_short() {
    let mut rig = Rig::new();
    rig.commit(10, 1);
    rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
    rig.settle();
    rig.call(|machine, _, steps| machine.give_up(steps));
    assert!(!rig.machine.falls_short(), "all is durable");
    let late = rig.commit(10, 1);
    assert_eq!(rig.is_told(late), Some(false));
    assert!(rig.machine.falls_short());
}

#[test]
fn who_was_slowed_down_is_no_worse_off_when_durability_ends() {
    let mut rig = Rig::new();
    rig.commit(10, AT_ONCE + 1);
    let large = rig.commit(20, AT_ONCE + 1);
    assert_eq!(rig.is_told(large), None, "it waits");
    rig.call(|machine, _, steps| machine.give_up(steps));
    assert_eq!(rig.is_told(large), Some(true), "an age promised it no more than that it is held");
}

/// A log of many copies goes home in parts, and all of it does.
#[test]
fn a_log_goes_home_in_parts() {
    let mut rig = Rig::new();
    for part in 0..6 {
        rig.commit(10 + part * 10, AT_ONCE);
        rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
        rig.settle();
    }
    let superblock = SuperblockBuilder { maxlen: 200, start: 0, sequence: 9, ..SuperblockBuilder::default() }
        .checksum(Checksum::V3)
        .build();
    rig.call(|machine, view, steps| machine.closes(NOW, &superblock, AnswerId(1000), view, steps));
    let (mut brought, mut parts) = (rig.homes, 1);
    while !rig.under_way.is_empty() {
        assert!(rig.homes as u64 <= AT_ONCE, "{} at a time", rig.homes);
        rig.end_one();
        brought += rig.homes;
        parts += usize::from(rig.homes > 0);
    }
    assert_eq!((brought as u64, rig.is_told(1000)), (6 * AT_ONCE, Some(true)));
    assert!(parts >= 6, "{parts} parts");
}

/// What stays can be read again: a compound of any size is read and written in parts, and the commit block when all of them are there.
#[test]
fn a_compound_of_what_stays_is_read_in_parts() {
    for blocks in [1, AT_ONCE, 30] {
        let mut rig = Rig::steady();
        let (mut logged, mut parts) = (0, 0);
        let mut count = |rig: &Rig| {
            assert!(rig.logged as u64 <= AT_ONCE, "{} of {blocks} at a time", rig.logged);
            logged += rig.logged as u64;
            parts += u64::from(rig.logged > 0);
        };
        rig.commit(10, blocks);
        count(&rig);
        rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
        count(&rig);
        while !rig.under_way.is_empty() {
            assert!(rig.machine.durable() < rig.sequence, "{blocks} blocks");
            rig.end_one();
            count(&rig);
        }
        // A descriptor, the place of the commit block, and that.
        assert_eq!((logged, rig.machine.durable(), rig.is_told(0)), (blocks + 3, rig.sequence, Some(true)));
        assert_eq!(parts, (blocks + 2).div_ceil(AT_ONCE) + 1, "{blocks} blocks");
        assert_eq!(rig.machine.status().compound_blocks, blocks);
    }
}

/// A log that was held without durability, which owes so many blocks.
fn begins_in_parts(blocks: u64) -> Rig {
    let superblock =
        SuperblockBuilder { maxlen: 200, start: 0, sequence: 2, errno: -5, ..SuperblockBuilder::default() }
            .checksum(Checksum::V3)
            .build();
    let owed = Transaction {
        sequence: 9,
        blocks: (10..10 + blocks).map(|block| (block, Version(block))).collect(),
        revokes: Vec::new(),
        freed: Freed::Blocks(Vec::new()),
    };
    let machine = Durability::engaged(&superblock, LONG, (&[owed][..], 9, 9), &BTreeMap::new(), NOW).expect("a log");
    let machine = machine.with_at_once(AT_ONCE, 8).begins_in_parts();
    let mut rig = Rig { machine, sequence: 9, ..Rig::new() };
    rig.call(|machine, view, steps| machine.timer(NOW, view, steps));
    rig
}

/// What is owed where durability begins is in several compounds, none of which counts before the last one is durable, and what is committed
/// meanwhile is in that.
#[test]
fn durability_begins_in_parts() {
    let mut rig = begins_in_parts(30);
    let (first, before) = (rig.machine.next_number(), rig.machine.begins_before());
    assert!(rig.machine.is_making() && rig.logged as u64 == AT_ONCE + 2, "{} log blocks", rig.logged);
    let waits = rig.call(|machine, view, steps| {
        let (blocks, when) = (10..11, WhenAsked::default());
        !machine.write_begins(NOW, WriteId(1), Kind::Write, blocks.clone(), blocks, when, view, steps)
    });
    assert!(waits);
    let mut commit = 0;
    while !rig.machine.is_proven() {
        assert_eq!((rig.machine.durable(), rig.superblocks), (8, 0), "nothing of it counts");
        assert!(rig.gone.is_empty());
        rig.end_one();
        assert!(rig.logged as u64 <= AT_ONCE + 2, "{} log blocks", rig.logged);
        if rig.machine.status().compounds == 2 && commit == 0 {
            // One that is in a compound already, one that is to come, and another one.
            commit = rig.commit_with(10..11, vec![39, 11]);
        }
        if rig.superblocks > 0 {
            break;
        }
    }
    assert!(commit > 0);
    while !rig.machine.is_proven() {
        rig.end_one();
    }
    assert_eq!(rig.machine.durable(), rig.sequence);
    assert_eq!((rig.machine.status().compounds, &rig.gone[..]), (8, &[WriteId(1)][..]));
    assert!(!sequence::is_after(rig.machine.next_number(), before), "{first} is the first");
    let durable: Vec<u64> = rig.durable.keys().copied().collect();
    assert_eq!(durable, (10..39).filter(|block| *block != 11).collect::<Vec<_>>());
    assert_eq!(rig.durable[&10], Version(commit << 32 | 10), "its newest version");
    assert_eq!(rig.durable[&12], Version(12));
}

/// Who commits while durability begins in parts is told that it is held, as an age allows, and does not wait for all of them; and the last part has no
/// more than is read at a time and one transaction, however much is committed meanwhile. With no age it is told when it is durable.
#[test]
fn an_age_answers_commits_while_durability_begins_in_parts() {
    for (owed, each, within) in [(40, 1, LONG), (40, 3, LONG), (41, 2, LONG), (43, 6, LONG), (4, 1, LONG), (40, 1, NOW)]
    {
        let mut rig = begins_in_parts(owed);
        rig.call(|machine, view, steps| machine.set_within(NOW, within, view, steps));
        let (before, mut told, mut last, mut waits) = (rig.machine.begins_before(), 0, Vec::new(), 0);
        let mut blocks = rig.machine.status().compound_blocks;
        while !rig.machine.is_proven() {
            if waits == 0 {
                // The guest waits for each before it commits the next.
                last.push(rig.commit(100 + 10 * last.len() as u64, each));
                match rig.is_told(last[last.len() - 1]) {
                    Some(is_good) => told += u32::from(is_good),
                    None => waits = last[last.len() - 1],
                }
            }
            rig.end_one();
            let now = rig.machine.status().compound_blocks;
            assert!(now - blocks <= AT_ONCE + each, "{owed}, {each}: {} blocks at a time", now - blocks);
            blocks = now;
            assert!(waits == 0 || rig.is_told(waits).is_none() || rig.machine.is_proven(), "{owed}, {each}");
        }
        assert_eq!(told > 0, !within.is_zero(), "{owed}, {each}: it need not wait");
        if each == 1 && !within.is_zero() {
            assert!(u64::from(told) >= AT_ONCE, "{owed}: {told} are answered");
        }
        assert!(!sequence::is_after(rig.machine.next_number(), before), "{owed}, {each}");
        rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
        while !rig.under_way.is_empty() {
            rig.end_one();
            let now = rig.machine.status().compound_blocks;
            assert!(now - blocks <= AT_ONCE + each, "{owed}, {each}: {} blocks at a time", now - blocks);
            blocks = now;
        }
        assert!(last.iter().all(|commit| rig.is_told(*commit) == Some(true)), "{owed}, {each}");
        assert_eq!((rig.machine.durable(), rig.durable.len() as u64), (rig.sequence, owed + last.len() as u64 * each));
    }
}

/// Several of them take more of the log than one: where it has no room for that, it is one.
#[test]
fn durability_begins_at_once_where_there_is_no_room_for_parts() {
    for blocks in [120, 190] {
        let mut rig = begins_in_parts(blocks);
        let before = rig.machine.begins_before();
        let mut most = rig.logged;
        while !rig.machine.is_proven() {
            rig.end_one();
            most = most.max(rig.logged);
        }
        let is_one = most as u64 == blocks + 2;
        assert_eq!(is_one, blocks == 190, "{blocks} blocks: {most} log blocks at a time");
        assert!(!sequence::is_after(rig.machine.next_number(), before), "{blocks} blocks");
        assert_eq!((rig.machine.durable(), rig.durable.len() as u64), (9, blocks));
        // All of it goes home again from where it is.
        rig.settle();
        let superblock = SuperblockBuilder { maxlen: 200, start: 0, sequence: 10, ..SuperblockBuilder::default() }
            .checksum(Checksum::V3)
            .build();
        rig.call(|machine, view, steps| machine.closes(NOW, &superblock, AnswerId(1000), view, steps));
        rig.settle();
        assert_eq!(rig.machine.status().blocks_brought_home, blocks);
        assert_eq!(rig.is_told(1000), Some(true));
    }
}

/// It has to be what it was: its checksum is in a descriptor that is written.
#[test]
#[should_panic(expected = "the committed version of block 13 is another one than it was")]
fn what_does_not_stay_is_not_taken_for_it() {
    let mut rig = Rig::steady();
    rig.commit(10, 30);
    rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
    rig.fill = 2;
    rig.settle();
}

/// Of every discard under way it is known over which copies it goes: not of many over the same.
#[test]
fn discards_of_one_range_go_one_after_the_other() {
    let mut rig = Rig::new();
    let asked = |rig: &mut Rig, id: u64| {
        rig.call(|machine, view, steps| {
            let (kind, when) = (Kind::Discard, WhenAsked::default());
            machine.write_begins(NOW, WriteId(id), kind, 0..150, 0..150, when, view, steps)
        })
    };
    assert!(asked(&mut rig, 1));
    assert!(!asked(&mut rig, 2) && !asked(&mut rig, 3));
    for id in 1..=3 {
        assert_eq!(rig.gone.len() as u64, id - 1);
        rig.call(|machine, view, steps| machine.write_ended(NOW, WriteId(id), true, view, steps));
    }
    assert_eq!(rig.gone, [WriteId(2), WriteId(3)]);
}

/// More revoked blocks than are known one by one are freed all the same: rule (b). And what was durably at home of them counts no more.
#[test]
fn revoked_blocks_that_are_known_together_are_freed() {
    let mut rig = Rig::new();
    rig.is_free = true;
    rig.commit(20, 2);
    rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
    rig.settle();
    assert!(rig.machine.settled(20).is_some(), "it is an append");
    rig.is_free = false;
    rig.commit_with(50..51, (20..40).collect());
    let asked = |rig: &mut Rig, block: u64| {
        rig.call(|machine, view, steps| {
            let (blocks, when) = (block..block + 1, WhenAsked::default());
            machine.write_begins(NOW, WriteId(block), Kind::Write, blocks.clone(), blocks, when, view, steps)
        })
    };
    assert!(!asked(&mut rig, 30), "it was freed, and that is not durable");
    assert!(asked(&mut rig, 41));
    rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
    rig.settle();
    assert_eq!((&rig.gone[..], rig.machine.settled(20)), (&[WriteId(30)][..], None));
}

/// What the machine of an engaged log would be: given up before storage is a truth, and after it.
#[test]
fn only_a_promise_that_was_broken_falls_short() {
    let superblock = || {
        SuperblockBuilder { maxlen: 200, start: 1, sequence: 2, ..SuperblockBuilder::default() }
            .checksum(Checksum::V3)
            .build()
    };
    let gives_up = |rig: &mut Rig| {
        rig.call(|machine, _, steps| machine.give_up(steps));
        rig.machine.falls_short()
    };
    let at_age = |within| {
        let mut rig = Rig::new();
        rig.call(|machine, view, steps| machine.set_within(NOW, within, view, steps));
        rig
    };
    // Held is all that an age promises, and all that nobody waits for.
    let mut rig = at_age(LONG);
    rig.commit(10, 1);
    assert!(!gives_up(&mut rig), "nobody waits");
    let mut rig = at_age(LONG);
    rig.commit(10, AT_ONCE + 1);
    let slowed = rig.commit(20, AT_ONCE + 1);
    let waits = rig.is_told(slowed).is_none();
    assert!(waits && !gives_up(&mut rig), "it is only slowed down");
    let mut rig = at_age(LONG);
    rig.commit(10, 1);
    rig.call(|machine, view, steps| machine.tail_moves(NOW, 3, AnswerId(900), view, steps));
    assert!(rig.is_told(900).is_none() && !gives_up(&mut rig), "a tail moves");
    // What is allowed by the age before is no promise of no age.
    let mut rig = at_age(LONG);
    rig.commit(10, 1);
    rig.call(|machine, view, steps| machine.set_within(NOW, Duration::ZERO, view, steps));
    assert!(!rig.under_way.is_empty() && !gives_up(&mut rig), "nobody was promised that it is durable");
    let mut rig = at_age(Duration::ZERO);
    rig.commit(10, 1);
    assert!(gives_up(&mut rig), "it was");
    let mut rig = at_age(Duration::ZERO);
    assert!(!gives_up(&mut rig), "nothing was committed");
    rig.commit(10, 1);
    assert!(rig.machine.falls_short(), "it is told that it is not durable");
    // Nothing is promised before storage is a truth.
    let blocks = vec![(10, Version(1))];
    let owed = [Transaction { sequence: 2, blocks, revokes: Vec::new(), freed: Freed::Unknown }];
    let engaged = Durability::engaged(&superblock(), Duration::ZERO, (&owed, 2, 2), &BTreeMap::new(), NOW);
    let mut rig = Rig { machine: engaged.expect("a log"), sequence: 2, ..Rig::new() };
    let beside = rig.commit(20, 1);
    assert!(rig.is_told(beside).is_none() && !gives_up(&mut rig), "it is not in force");
    assert!(!rig.machine.is_proven());
    // Whoever asks again later may have been promised it by a machine before.
    let found = FoundLog { tail: (1, 2), ..FoundLog::default() };
    let followed = Durability::followed(&superblock(), Duration::ZERO, &found, (&owed, 2, 2), &BTreeMap::new(), NOW);
    let mut rig = Rig { machine: followed.expect("a log"), sequence: 2, ..Rig::new() };
    assert!(gives_up(&mut rig));
}

/// A machine that follows one which has left so many blocks in the log on storage, beside others that are at home; so many more are not durable, and there is
/// no room for them.
fn follows(found: u64, more: u64) -> Rig {
    let superblock = SuperblockBuilder { maxlen: 200, start: 1, sequence: 2, ..SuperblockBuilder::default() }
        .checksum(Checksum::V3)
        .build();
    let blocks = |range: Range<u64>| range.map(|block| (block, Version(block))).collect();
    let none = |sequence, blocks| Transaction { sequence, blocks, revokes: Vec::new(), freed: Freed::Unknown };
    let owed = [none(9, blocks(10..10 + found)), none(10, blocks(1000..1000 + more))];
    let half = found as u32 / 2;
    let copy = |index: u32| FoundCopy {
        block: 10 + u64::from(index),
        compound: 2 + index / half,
        position: 2 + index + 2 * (index / half),
        escaped: false,
        said: FoundSaid::Same(9),
    };
    let lengths = vec![half + 2, half + 2, 170 - 2 * (half + 2)];
    let copies = (0..found as u32).map(copy).collect();
    let left = FoundLog { tail: (1, 2), lengths, copies, last_clock: (0, 0) };
    let machine = Durability::followed(&superblock, LONG, &left, (&owed, 9, 10), &BTreeMap::new(), NOW).expect("a log");
    let mut rig = Rig { machine: machine.with_at_once(AT_ONCE, 8), sequence: 10, ..Rig::new() };
    rig.call(|machine, view, steps| machine.timer(NOW, view, steps));
    rig
}

/// Where there is no room beside what was found, that goes home and is logged once more, a part at a time, and what is not durable behind it. Where there is
/// no room for so many compounds either, it is one.
#[test]
fn what_was_found_is_logged_again_in_parts() {
    for found in [2 * AT_ONCE, 100, 120] {
        logs_again(found, &[]);
    }
}

/// Nor is any of that logged again which is revoked meanwhile, with more blocks than are known one by one: whoever revoked it holds no version of it.
#[test]
fn what_is_revoked_with_many_is_not_logged_again() {
    for found in [2 * AT_ONCE, 100, 120] {
        logs_again(found, &(2000..2020).collect::<Vec<u64>>());
    }
}

/// When one part of what was found is there once more, a guest revokes these blocks and some of that.
fn logs_again(found: u64, revoked_too: &[u64]) {
    const MORE: u64 = 30;
    // One that was logged again by then, and one that is to be, where there are parts of so many.
    const REVOKED: [u64; 2] = [11, 60];
    let mut rig = follows(found, MORE);
    let waits = rig.call(|machine, view, steps| {
        let (blocks, when) = (10..11, WhenAsked::default());
        !machine.write_begins(NOW, WriteId(1), Kind::Write, blocks.clone(), blocks, when, view, steps)
    });
    assert!(waits);
    let (mut most, mut at_once, mut is_amid_parts) = (0, 0, false);
    while rig.machine.durable() < 10 {
        assert!(!rig.under_way.is_empty(), "{found}: it hangs");
        assert!(rig.gone.is_empty() && rig.durable.is_empty(), "{found}: nothing of it is told");
        rig.end_one();
        assert!(rig.homes as u64 <= AT_ONCE, "{found}: {} at a time", rig.homes);
        if rig.logged as u64 >= MORE {
            most = rig.logged as u64;
        } else {
            at_once = at_once.max(rig.logged as u64);
        }
        if rig.machine.status().compounds == 1 && rig.machine.durable() < 10 && !is_amid_parts {
            is_amid_parts = true;
            // Which of these is read from here on is not there.
            rig.lost.extend(REVOKED.map(Version));
            // And one that has a newer version.
            rig.commit_with(12..13, REVOKED.iter().chain(revoked_too).copied().collect());
        }
    }
    rig.settle();
    rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(0), view, steps));
    rig.settle();
    assert!(at_once <= AT_ONCE + 2, "{found}: {at_once} log blocks at a time");
    let is_one = most > MORE + 6;
    assert_eq!((is_one, is_amid_parts), (found == 120, true), "{found}: {most} log blocks");
    assert_eq!(&rig.gone[..], &[WriteId(1)][..]);
    assert_eq!(rig.machine.durable(), rig.sequence);
    let durable: Vec<u64> = rig.durable.keys().copied().collect();
    let expected = (10..10 + found).chain(1000..1000 + MORE);
    let expected: Vec<u64> = expected.filter(|block| !REVOKED.contains(block)).collect();
    assert_eq!(durable, expected, "{found}");
}

/// Two writes of the guest wait that overlap, and the second for more. Were the host's to begin there as well, it would wait for the second, whose compound has
/// no room before the first has ended; and that one is sent when the host's has ended.
#[test]
fn the_host_begins_nothing_where_writes_wait() {
    let mut rig = Rig::new();
    let asks = |rig: &mut Rig, id: u64, blocks: Range<u64>| {
        rig.call(|machine, view, steps| {
            let when = WhenAsked::default();
            machine.write_begins(NOW, WriteId(id), Kind::Write, blocks.clone(), blocks, when, view, steps)
        })
    };
    let large = rig.commit(1000, 120);
    assert!(rig.machine.is_making());
    assert!(!asks(&mut rig, 1, 1119..1120) && !asks(&mut rig, 2, 1119..1121));
    let has_host = !rig.machine.closed_to_host().touches(&(1119..1120));
    if has_host {
        assert!(!asks(&mut rig, 3, 1119..1120));
    }
    let next = rig.commit(1120, 100);
    assert!(rig.is_told(large).is_some() && rig.is_told(next).is_none());
    let mut sent = 0;
    while rig.is_told(next).is_none() {
        // The host's comes first where it has begun.
        let order = if has_host { &[3, 1, 2][..] } else { &[1, 2] };
        match order.get(sent).filter(|id| rig.gone.contains(&WriteId(**id))) {
            Some(id) => {
                let id = WriteId(*id);
                rig.call(|machine, view, steps| machine.write_ended(NOW, id, true, view, steps));
                sent += 1;
            }
            None if rig.under_way.is_empty() => panic!("it hangs: {:?} may go", rig.gone),
            None => rig.end_one(),
        }
    }
    rig.settle();
    assert_eq!(rig.machine.durable(), rig.sequence);
}
