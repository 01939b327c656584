//! Two file systems on one disk, each with its log, both durable by age: what they have in common is the disk, its flushes, the requests that wait, the
//! process that dies, and nothing else. A flush that one log asks for says nothing of what the other has on its way; one that fails concerns
//! both; whatever else befalls one does not concern the other.
//!
//! Beside the homes that every transaction writes, each has a block that files come and go in: it is journaled, deleted, and used for data. Storage
//! ends in any order what it was asked for, and a flush covers no more than what had ended when it was asked for. What a flush that fails was
//! to cover may be lost, whatever another one says later.

use super::*;

/// Nothing becomes due by itself.
const LONG: Duration = Duration::from_secs(3600);
/// Fewer transactions than fit into a log whose tail does not move.
const TRANSACTIONS_MAX: u8 = 130;

/// What the block is that files come and go in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Nothing,
    /// This transaction has journaled it.
    Journaled(u8),
    /// This one has deleted it.
    Deleted(u8),
    /// It has this version of data since, written past the journal.
    Data {
        since: u8,
        version: u8,
        is_answered: bool,
    },
}

/// What a transaction does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Nothing,
    Journals,
    Deletes,
}

/// What storage fails in the midst of it all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    Nothing,
    /// A write of ours to one of the file systems.
    Write,
    /// A flush, whoever asked for it.
    Flush,
}

struct Pair {
    guest: Guest,
    /// By file system: the block that files come and go in, what it is, and whether the log may be only held by now.
    blocks: [u64; 2],
    uses: [Use; 2],
    may_be_held_only: [bool; 2],
    /// Flushes of the guest's, by their requests, and which data had been answered when each was asked for: since which transaction, and what.
    flushes: HashMap<u32, [Option<(u8, u8)>; 2]>,
    has_failed_flush: bool,
}

impl Pair {
    fn new(seed: u64, within: Duration) -> Self {
        let mut guest = Guest::of(Rig::pair(Some(within)), seed, Some(within));
        let image = std::fs::read(&guest.rig.image).expect("the image");
        let block = |rig: &Rig| blocks_in_use(&rig.part(&image).to_vec(), &rig.log_in_part())[rig.homes.len()];
        let first = block(&guest.rig);
        guest.turn();
        guest.rig.open();
        let blocks = [first, block(&guest.rig)];
        guest.turn();
        guest.is_unordered = true;
        Pair {
            guest,
            blocks,
            uses: [Use::Nothing; 2],
            may_be_held_only: [false; 2],
            flushes: HashMap::new(),
            has_failed_flush: false,
        }
    }

    fn turn_to(&mut self, number: usize) {
        if self.guest.rig.number != number {
            self.guest.turn();
        }
    }

    fn each(&mut self, mut does: impl FnMut(&mut Self)) {
        for number in 0..2 {
            self.turn_to(number);
            does(self);
        }
    }

    fn block(&self) -> u64 {
        self.blocks[self.guest.rig.number]
    }

    /// What its guest has asked of the file system and was not answered.
    fn asked(&self) -> impl Iterator<Item = &Asked> {
        self.guest.asked.values().filter(move |asked| self.guest.rig.has(asked.offset))
    }

    /// Whether no commit of the file system waits.
    fn is_quiet(&self) -> bool {
        self.asked().all(|asked| asked.commits.is_none())
    }

    fn may_commit(&self) -> bool {
        self.is_quiet() && self.guest.rig.committed < TRANSACTIONS_MAX
    }

    /// Whether no write to this block waits, or is under way.
    fn is_idle(&self, block: u64) -> bool {
        let offset = self.guest.rig.start + block * BLOCK;
        self.asked().all(|asked| asked.offset != offset)
    }

    /// What its guest asks for to commit a transaction, which does this with the block that files come and go in.
    fn next_commit(&mut self, does: Does) -> (Vec<Asked>, Asked) {
        let (number, block) = (self.guest.rig.number, self.block());
        let (more, revokes) = match does {
            Does::Nothing => (None, Vec::new()),
            Does::Journals => (Some(block), Vec::new()),
            Does::Deletes => (None, vec![block]),
        };
        let log = self.guest.rig.transaction_of(more, revokes);
        let transaction = self.guest.rig.committed;
        let (now, version) = match does {
            Does::Nothing => (self.uses[number], None),
            Does::Journals => (Use::Journaled(transaction), Some(transaction)),
            Does::Deletes => (Use::Deleted(transaction), Some(0)),
        };
        self.uses[number] = now;
        if let Some(version) = version {
            self.guest.rig.mark(&format!("reuses {block} {transaction} {version}"));
        }
        self.guest.commit_in(log)
    }

    fn commit(&mut self, does: Does) {
        let (body, commit) = self.next_commit(does);
        body.into_iter().chain([commit]).for_each(|asked| self.guest.ask(asked));
        self.hear();
    }

    /// Both commit block by block, and their commit blocks come in one pass.
    fn commit_both(&mut self) {
        let mut last = Vec::new();
        self.each(|pair| {
            let (body, commit) = pair.next_commit(Does::Nothing);
            body.into_iter().for_each(|asked| pair.guest.ask(asked));
            last.push(commit);
        });
        let mut plan = Plan::default();
        last.into_iter().for_each(|asked| self.guest.route(asked, false, &mut plan));
        self.guest.rig.route.end_of_pass(&mut plan);
        self.guest.planned(plan);
        self.hear();
    }

    /// What may come of the block next.
    fn any_use(&mut self) -> Does {
        let may_change = self.is_idle(self.block());
        match (self.uses[self.guest.rig.number], self.guest.random.below(3)) {
            (Use::Journaled(_), 0) if may_change => Does::Deletes,
            (Use::Journaled(_), 1) => Does::Journals,
            (Use::Nothing | Use::Deleted(_), 0) if may_change => Does::Journals,
            (Use::Data { .. }, 0 | 1) if may_change => Does::Journals,
            _ => Does::Nothing,
        }
    }

    /// What is committed, by block.
    fn versions(&self) -> Vec<(u64, u8)> {
        let rig = &self.guest.rig;
        let mut versions: Vec<(u64, u8)> = rig.homes.iter().map(|block| (*block, rig.committed)).collect();
        if let Use::Journaled(version) = self.uses[rig.number] {
            versions.push((self.block(), version));
        }
        versions
    }

    fn write(&mut self, block: u64, version: u8) {
        if self.is_idle(block) {
            let offset = self.guest.rig.start + block * BLOCK;
            self.guest.ask(Asked { kind: RequestKind::Write, offset, content: content(version), commits: None });
            self.hear();
        }
    }

    fn write_home(&mut self) {
        let versions = self.versions();
        let (block, version) = versions[self.guest.random.below(versions.len() as u64) as usize];
        self.write(block, version);
    }

    /// The block that was deleted is used anew.
    fn write_data(&mut self) {
        let number = self.guest.rig.number;
        if let Use::Deleted(since) = self.uses[number]
            && self.is_idle(self.block())
        {
            let version = DIRECT + since % 50;
            self.uses[number] = Use::Data { since, version, is_answered: false };
            self.write(self.block(), version);
        }
    }

    fn flush(&mut self) {
        let data = self.uses.map(|now| match now {
            Use::Data { since, version, is_answered: true } => Some((since, version)),
            _ => None,
        });
        self.guest.flush();
        self.flushes.insert(self.guest.rig.next, data);
        self.hear();
    }

    /// All is home, and the guest's log begins behind it.
    fn move_tail(&mut self) {
        for (block, version) in self.versions() {
            self.write(block, version);
        }
        self.settle();
        self.guest.wake();
        self.settle();
        let (position, sequence) = (self.guest.rig.builder.position, self.guest.rig.builder.sequence);
        self.guest.begin_log(position, sequence);
    }

    fn settle(&mut self) {
        self.guest.settle();
        self.hear();
    }

    /// So much time passes, and storage does what comes of it.
    fn pass(&mut self, milliseconds: u64) {
        self.guest.rig.clock.fetch_add(milliseconds, Ordering::AcqRel);
        self.guest.wake();
        self.settle();
    }

    /// Whatever the age: what is in force has made durable all that was committed.
    fn becomes_durable(&mut self) {
        self.pass(1500);
        self.each(|pair| {
            let rig = &pair.guest.rig;
            if pair.is_quiet() && !pair.may_be_held_only[rig.number] {
                rig.promise(rig.committed);
            }
        });
    }

    fn die(&mut self) {
        self.guest.die().expect("another one goes on");
        // Whoever asks again is answered for another request.
        self.flushes.clear();
        self.guest.ask_again();
        self.hear();
    }

    /// What its guest was answered since: with no age a flush says that data is there.
    fn hear(&mut self) {
        let was = self.guest.rig.number;
        for (request, asked, has_failed) in std::mem::take(&mut self.guest.answered) {
            let flushed = self.flushes.remove(&request).unwrap_or_default();
            for (number, flushed) in flushed.into_iter().enumerate() {
                self.turn_to(number);
                let offset = self.guest.rig.start + self.block() * BLOCK;
                if let Use::Data { is_answered, .. } = &mut self.uses[number]
                    && asked.offset == offset
                {
                    *is_answered |= !has_failed;
                }
                if let Some((since, version)) = flushed
                    && !has_failed
                    && self.guest.within == Some(Duration::ZERO)
                    && !self.may_be_held_only[number]
                {
                    self.guest.rig.mark(&format!("data {since} {version}"));
                }
            }
        }
        self.turn_to(was);
    }

    /// Such operations end, and those that come of them.
    fn end_where(&mut self, is_meant: impl Fn(&Rig, &DiskOperation) -> bool) {
        let next = |rig: &Rig| rig.waiting.iter().position(|operation| is_meant(rig, operation));
        while let Some(index) = next(&self.guest.rig) {
            let operation = self.guest.rig.waiting.remove(index);
            self.guest.end(operation);
        }
        self.hear();
    }

    /// Writes to the file system end.
    fn end_writes(&mut self) {
        self.end_where(|rig, operation| operation.operation == Operation::Write && rig.has(operation.offset));
    }

    /// Storage fails something that is under way, if that is: a write of ours to the file system, or a flush.
    fn fail(&mut self, fails: Fails) -> bool {
        let rig = &self.guest.rig;
        let is_meant = |operation: &DiskOperation| match fails {
            Fails::Nothing => false,
            Fails::Write => {
                operation.operation == Operation::Write && operation.request.is_none() && rig.has(operation.offset)
            }
            Fails::Flush => operation.operation == Operation::Flush,
        };
        let Some(index) = rig.waiting.iter().position(is_meant) else { return false };
        self.has_failed_flush |= fails == Fails::Flush;
        let was = self.guest.rig.number;
        self.each(|pair| {
            let number = pair.guest.rig.number;
            if fails == Fails::Flush || number == was {
                pair.may_be_held_only[number] = true;
                pair.guest.rig.gives_up();
            }
        });
        self.turn_to(was);
        let operation = self.guest.rig.waiting.remove(index);
        self.guest.rig.fails = true;
        self.guest.end(operation);
        self.guest.rig.fails = false;
        self.hear();
        true
    }

    fn step(&mut self) {
        let number = self.guest.random.below(2) as usize;
        self.turn_to(number);
        match self.guest.random.below(24) {
            0..3 if self.may_commit() => {
                let does = self.any_use();
                self.commit(does);
            }
            3 => {
                let mut may_commit = true;
                self.each(|pair| may_commit &= pair.may_commit());
                if may_commit {
                    self.commit_both();
                }
            }
            4..6 if self.is_quiet() && self.guest.rig.committed > 0 => self.write_home(),
            6..8 if self.is_quiet() => self.write_data(),
            8 => self.flush(),
            9 => {
                let milliseconds = self.guest.random.below(900);
                self.guest.rig.clock.fetch_add(milliseconds, Ordering::AcqRel);
                self.guest.wake();
            }
            10 if self.asked().next().is_none()
                && self.guest.rig.committed > 0
                && !self.may_be_held_only[number]
                && self.guest.random.below(4) == 0 =>
            {
                self.move_tail();
            }
            11 if self.guest.random.below(6) == 0 => self.becomes_durable(),
            _ => self.guest.one(),
        }
        self.hear();
    }

    /// Everybody is answered. What is in force keeps its promise, and all is there when it was recovered. Gives how many cuts were judged.
    fn finish(mut self) -> u64 {
        for _ in 0..5 {
            self.pass(5000);
        }
        assert!(self.guest.asked.is_empty(), "everything is answered: {:?}", self.guest.asked.values());
        self.each(|pair| {
            let Guest { rig, acknowledged, failures, .. } = &pair.guest;
            if !pair.may_be_held_only[rig.number] {
                assert_eq!((*failures, *acknowledged), (0, rig.committed), "file system {}", rig.number);
                assert!(is_aged(rig), "file system {} is durable by age still: {:?}", rig.number, said(rig));
                rig.promise(rig.committed);
            }
            rig.gives_up();
        });
        if self.has_failed_flush {
            // What homes had before that may be lost, and whoever recovers it says so.
            self.guest.rig.log.mark(&format!("{BOTH}unjudged"));
        }
        self.guest.rig.journals.recover_all().expect("recovered");
        let image = std::fs::read(&self.guest.rig.image).expect("the image");
        self.each(|pair| {
            let rig = &pair.guest.rig;
            let (part, log_at) = (rig.part(&image), rig.log_in_part());
            let found = state(&Image::of(part), (&log_at, &rig.homes), rig.committed, false);
            assert_eq!(found, Ok(rig.committed), "file system {}", rig.number);
            let version = match pair.uses[rig.number] {
                Use::Journaled(version) | Use::Data { version, is_answered: true, .. } => Some(version),
                _ => None,
            };
            let found = &part[(pair.block() * BLOCK) as usize..][..BLOCK as usize];
            assert!(version.is_none_or(|version| found == content(version)), "file system {}: {version:?}", rig.number);
            rig.holds();
            rig.promise(rig.committed);
        });
        self.guest.rig.judge()
    }
}

/// What happened in some lives.
#[derive(Debug, Default)]
struct Seen {
    judged: u64,
    deaths: u32,
    failures: u32,
    /// The fewest transactions that a file system had.
    fewest: Option<u8>,
}

/// Anything in any order, a death now and then, and a failure of storage in the midst of it.
fn live(seed: u64, within: Duration, fails: Fails, seen: &mut Seen) {
    let mut pair = Pair::new(seed, within);
    let fails_from = 100 + pair.guest.random.below(150);
    let mut has_failed = false;
    for step in 0..350 {
        if pair.guest.random.below(50) == 0 {
            pair.die();
        }
        if step >= fails_from && !has_failed {
            let number = pair.guest.random.below(2) as usize;
            pair.turn_to(number);
            has_failed = pair.fail(fails);
            // Before anybody else is told of anything.
            if has_failed && pair.guest.random.below(2) == 0 {
                pair.die();
            }
        }
        pair.step();
    }
    seen.deaths += pair.guest.deaths;
    seen.failures += u32::from(has_failed);
    pair.each(|pair| {
        let committed = pair.guest.rig.committed;
        seen.fewest = Some(seen.fewest.map_or(committed, |fewest| fewest.min(committed)));
    });
    seen.judged += pair.finish();
}

fn lives(first: u64, within: Duration) {
    let mut seen = Seen::default();
    for seed in first..first + number("AMBERLOG_ROUNDS", 6) {
        let fails = [Fails::Nothing, Fails::Write, Fails::Flush][seed as usize % 3];
        live(seed, within, fails, &mut seen);
    }
    println!("{within:?}: {seen:?}");
    let has_committed = seen.fewest.is_some_and(|fewest| fewest > 2);
    assert!(seen.judged > 1000 && seen.deaths > 3 && seen.failures > 1 && has_committed, "{seen:?}");
}

#[test]
fn two_logs_of_a_disk_with_no_age_keep_what_each_has_promised() {
    lives(0, Duration::ZERO);
}

#[test]
fn two_logs_of_a_disk_with_an_age_keep_what_each_has_promised() {
    lives(1000, AGE);
}

/// Both have written the bodies of their compounds, and each has asked for a flush: the one that ends covers what one of them has written, and only
/// that one goes on.
#[test]
fn a_flush_that_ends_is_that_of_the_log_that_asked_for_it() {
    for first in 0..2 {
        let mut pair = Pair::new(1, Duration::ZERO);
        pair.commit_both();
        assert_eq!(pair.guest.asked.len(), 2, "of two commits in one pass none is answered before it is durable");
        for number in [first, 1 - first] {
            pair.turn_to(number);
            pair.end_writes();
        }
        let is_flush = |operation: &DiskOperation| operation.operation == Operation::Flush;
        assert!(pair.guest.rig.waiting.len() == 2 && pair.guest.rig.waiting.iter().all(is_flush), "one each");
        pair.turn_to(first);
        let flush = pair.guest.rig.waiting.remove(0);
        pair.guest.end(flush);
        let rig = &pair.guest.rig;
        let written: Vec<u64> =
            rig.waiting.iter().filter(|operation| !is_flush(operation)).map(|operation| operation.offset).collect();
        assert!(written.len() == 1 && rig.has(written[0]), "its commit block, and no other: {written:?}");
        pair.end_writes();
        pair.settle();
        assert!(pair.guest.asked.is_empty(), "both are answered");
        assert!(pair.finish() > 20);
    }
}

/// Time passes for both.
#[test]
fn what_is_due_becomes_durable_in_both_logs() {
    let mut pair = Pair::new(2, AGE);
    for round in 1..4 {
        pair.commit_both();
        pair.settle();
        pair.becomes_durable();
        assert_eq!(pair.guest.rig.compounds(), 2 * round, "one each");
    }
    assert!(pair.finish() > 40);
}

/// A block that one transaction has deleted, and that is not durable, is used for data in both file systems, and that waits. In one it may go when that
/// is durable, and what waits is asked about again: nothing goes in the other.
#[test]
fn what_waits_for_one_log_is_not_let_go_for_the_other() {
    for first in 0..2 {
        let mut pair = Pair::new(3, LONG);
        pair.each(|pair| pair.commit(Does::Journals));
        pair.pass(LONG.as_millis() as u64);
        pair.each(|pair| {
            pair.guest.rig.promise(pair.guest.rig.committed);
            pair.commit(Does::Deletes);
            pair.write_data();
        });
        pair.turn_to(first);
        assert!(pair.asked().next().is_some(), "it waits");
        pair.end_where(|rig, operation| operation.operation == Operation::Flush || rig.has(operation.offset));
        assert!(pair.asked().next().is_none(), "it is there");
        pair.turn_to(1 - first);
        let offset = pair.guest.rig.start + pair.block() * BLOCK;
        assert!(pair.asked().any(|asked| asked.offset == offset), "the other one waits still");
        let is_sent = |operation: &DiskOperation| operation.offset == offset;
        assert!(!pair.guest.rig.waiting.iter().any(is_sent), "and is not sent");
        assert!(pair.finish() > 20);
    }
}

/// A flush of one log fails, which concerns whatever the other has written: from then on no compound of either counts, and with no age none
/// is answered well that waits for one. The same where the worker dies before the other one has heard of it.
#[test]
fn a_flush_that_fails_for_one_log_ends_what_both_promise() {
    for within in [Duration::ZERO, AGE] {
        for (number, dies) in [(0, false), (1, false), (0, true), (1, true)] {
            let case = format!("{within:?}, a flush of file system {number}, dies: {dies}");
            let mut pair = Pair::new(4, within);
            pair.commit_both();
            pair.settle();
            pair.becomes_durable();
            pair.turn_to(number);
            pair.commit(Does::Nothing);
            pair.guest.rig.clock.fetch_add(1500, Ordering::AcqRel);
            // What the other one has written by then, and what is on its way to it.
            pair.turn_to(1 - number);
            pair.versions().into_iter().for_each(|(block, version)| pair.write(block, version));
            pair.end_writes();
            pair.guest.wake();
            pair.turn_to(number);
            pair.end_writes();
            let is_flush = |operation: &&DiskOperation| operation.operation == Operation::Flush;
            assert_eq!(pair.guest.rig.waiting.iter().filter(is_flush).count(), 1, "{case}: it has asked for one");
            assert!(pair.fail(Fails::Flush));
            if dies {
                pair.die();
            } else {
                pair.turn_to(1 - number);
                assert!(is_aged(&pair.guest.rig), "{case}: it has not heard of it");
                pair.commit(Does::Nothing);
                pair.settle();
                pair.pass(1500);
                let expected = u32::from(within.is_zero());
                assert_eq!(pair.guest.failures, expected, "{case}: a commit that was to be durable");
            }
            pair.each(|pair| assert!(!is_aged(&pair.guest.rig), "{case}: storage says that it is only held"));
            pair.settle();
            pair.finish();
        }
    }
}

/// A write of one log fails: that is the end of what this one promises, and the other goes on.
#[test]
fn a_write_that_fails_for_one_log_is_nothing_to_the_other() {
    for number in 0..2 {
        for dies in [false, true] {
            let mut pair = Pair::new(5, Duration::ZERO);
            pair.commit_both();
            pair.turn_to(number);
            assert!(pair.fail(Fails::Write), "a compound is under way");
            if dies {
                pair.die();
            }
            pair.settle();
            pair.pass(0);
            assert_eq!((pair.guest.failures, is_aged(&pair.guest.rig)), (1, false), "it is only held");
            pair.turn_to(1 - number);
            for _ in 0..3 {
                pair.commit(Does::Nothing);
                pair.settle();
            }
            assert_eq!((pair.guest.failures, pair.guest.acknowledged), (0, 4));
            assert!(is_aged(&pair.guest.rig), "it is durable by age still");
            assert!(pair.finish() > 40);
        }
    }
}

/// What an age had allowed of either is durable before a flush is answered that comes when no age is wished.
#[test]
fn a_flush_waits_for_what_an_age_had_allowed_of_both() {
    for first in 0..2 {
        let mut pair = Pair::new(6, LONG);
        pair.commit_both();
        pair.settle();
        pair.guest.set_age(Some(Duration::ZERO));
        pair.flush();
        pair.turn_to(first);
        pair.end_where(|rig, operation| operation.operation == Operation::Flush || rig.has(operation.offset));
        assert_eq!(pair.guest.rig.compounds(), 1, "one of them is durable");
        let is_flush = |asked: &Asked| asked.kind == RequestKind::Flush;
        assert!(pair.guest.asked.values().any(is_flush), "the flush waits for the other");
        pair.settle();
        assert!(pair.guest.asked.is_empty(), "it is answered");
        assert_eq!(pair.guest.rig.compounds(), 2);
        pair.each(|pair| pair.guest.rig.promise(pair.guest.rig.committed));
        assert!(pair.finish() > 10);
    }
}
