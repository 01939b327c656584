//! A worker that dies under a log that is made durable by age, and another one goes on: what was durable is so at every instant, what was
//! answered with no age is, too, and what was not answered is answered when it is.
//!
//! The guest is one that waits for its transaction before it begins the next, writes home what it has committed, and asks again for
//! whatever it was not answered. With a kill all that was sent is there, whether anybody heard of it or not, or was never sent.

#[path = "pair.rs"]
mod pair;

use super::*;
use std::collections::HashSet;
use std::sync::Mutex;

/// What the guest has asked for and was not answered.
#[derive(Clone, Debug)]
struct Asked {
    kind: RequestKind,
    offset: u64,
    content: Vec<u8>,
    /// The transaction that it commits.
    commits: Option<u8>,
}

struct Guest {
    rig: Rig,
    within: Option<Duration>,
    random: Random,
    asked: BTreeMap<u32, Asked>,
    /// Of each of these: holds, and operations of its own under way.
    left: HashMap<u32, usize>,
    failed: HashSet<u32>,
    /// Commits that were answered well, and those that failed.
    acknowledged: u8,
    failures: u32,
    /// The same of the other file system, if its disk has two.
    other: (u8, u32),
    deaths: u32,
    /// Storage ends in any order what it was asked for, and a flush covers what had ended when it was asked for, and nothing else. What was
    /// answered is kept here then, and whether it failed.
    is_unordered: bool,
    answered: Vec<(u32, Asked, bool)>,
}

impl Guest {
    fn new(seed: u64, within: Option<Duration>) -> Self {
        Self::of(Rig::new(within), seed, within)
    }

    fn of(mut rig: Rig, seed: u64, within: Option<Duration>) -> Self {
        if within.is_none() {
            rig.gives_up();
        }
        rig.open();
        Guest {
            rig,
            within,
            random: Random::new(seed),
            asked: BTreeMap::new(),
            left: HashMap::new(),
            failed: HashSet::new(),
            acknowledged: 0,
            failures: 0,
            other: (0, 0),
            deaths: 0,
            is_unordered: false,
            answered: Vec::new(),
        }
    }

    /// From now on it is the other file system that is asked for things.
    fn turn(&mut self) {
        self.rig.turn();
        (self.acknowledged, self.failures) = std::mem::replace(&mut self.other, (self.acknowledged, self.failures));
    }

    fn planned(&mut self, plan: Plan) {
        for action in plan.actions {
            match action {
                PlanAction::Disk(operation) => {
                    if let Some(request) = operation.request {
                        *self.left.entry(request.0).or_default() += 1;
                    }
                    if self.is_unordered && operation.operation == Operation::Flush {
                        self.rig.log.mark(&format!("{BOTH}flushes {}", number_of(&operation)));
                    }
                    self.rig.waiting.push(operation);
                }
                PlanAction::Hold(request) => *self.left.entry(request.0).or_default() += 1,
                PlanAction::Release(request, status) => {
                    if status != Status::Ok {
                        self.failed.insert(request.0);
                    }
                    *self.left.get_mut(&request.0).expect("a hold") -= 1;
                }
            }
        }
        self.answer();
    }

    /// Whatever nothing keeps any more is answered.
    fn answer(&mut self) {
        let is_over = |number: &u32| self.left.get(number).is_none_or(|left| *left == 0);
        let over: Vec<u32> = self.asked.keys().copied().filter(is_over).collect();
        for number in over {
            let asked = self.asked.remove(&number).expect("it is there");
            self.left.remove(&number);
            let has_failed = self.failed.remove(&number);
            if let Some(transaction) = asked.commits {
                let turns = !self.rig.has(asked.offset);
                if turns {
                    self.turn();
                }
                if has_failed {
                    self.failures += 1;
                } else {
                    self.acknowledged = self.acknowledged.max(transaction);
                    // One that is only held by now is told of when storage says so.
                    if self.within == Some(Duration::ZERO) && (!self.is_unordered || is_aged(&self.rig)) {
                        self.rig.promise(transaction);
                    }
                }
                if turns {
                    self.turn();
                }
            }
            if self.is_unordered {
                self.answered.push((number, asked, has_failed));
            }
        }
    }

    fn ask(&mut self, asked: Asked) {
        self.ask_as(asked, false);
    }

    /// Asks for something, whether another worker was asked for it before.
    fn ask_as(&mut self, asked: Asked, is_again: bool) {
        let mut plan = Plan::default();
        self.route(asked, is_again, &mut plan);
        self.rig.route.end_of_pass(&mut plan);
        self.planned(plan);
    }

    fn route(&mut self, asked: Asked, is_again: bool, plan: &mut Plan) {
        let mut slices: Vec<MemorySlice> = Vec::new();
        self.rig.next += 1;
        for part in asked.content.chunks(BLOCK as usize) {
            let page = PageId(self.rig.next % PAGES);
            self.rig.next += 1;
            self.rig.memory.simulated_guest_write(page, 0, part);
            slices.push(self.rig.memory.page(page).expect("a page").sub(0, part.len()));
        }
        let id = RequestId(self.rig.next);
        let (kind, offset, len) = (asked.kind, asked.offset, asked.content.len() as u64);
        self.asked.insert(id.0, asked);
        let request = Request { id, kind, offset, len, segments: &slices };
        if is_again {
            self.rig.route.route_again(&request, plan);
        } else {
            self.rig.route.route(&request, plan);
        }
    }

    fn wake(&mut self) {
        let mut plan = Plan::default();
        self.rig.route.woken(&mut plan);
        self.planned(plan);
    }

    fn commit(&mut self) {
        let log = self.rig.transaction();
        let transaction = self.rig.committed;
        let last = log.len() - 1;
        for (index, (position, content)) in log.into_iter().enumerate() {
            let commits = (index == last).then_some(transaction);
            self.ask(Asked { kind: RequestKind::Write, offset: self.rig.log_at[position as usize], content, commits });
        }
    }

    /// A transaction of this block.
    fn commit_of(&mut self, block: u64, content: Vec<u8>) {
        let mut log = Vec::new();
        let transaction = Transaction { blocks: vec![(block, content)], ..Transaction::default() };
        self.rig.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        for (position, content) in log {
            let offset = self.rig.log_at[position as usize];
            self.ask(Asked { kind: RequestKind::Write, offset, content, commits: None });
        }
    }

    fn write_home(&mut self) {
        let block = self.rig.homes[self.random.below(3) as usize];
        let offset = block * BLOCK;
        if self.asked.values().all(|asked| asked.offset != offset) {
            let content = content(self.rig.committed);
            self.ask(Asked { kind: RequestKind::Write, offset, content, commits: None });
        }
    }

    fn flush(&mut self) {
        self.ask(Asked { kind: RequestKind::Flush, offset: 0, content: Vec::new(), commits: None });
    }

    /// One operation of storage ends.
    fn one(&mut self) {
        if self.rig.waiting.is_empty() {
            return;
        }
        let index = if self.is_unordered {
            self.random.below(self.rig.waiting.len() as u64) as usize
        } else if self.rig.waiting[0].operation == Operation::Flush {
            0
        } else {
            let flush = self.rig.waiting.iter().position(|other| other.operation == Operation::Flush);
            self.random.below(flush.unwrap_or(self.rig.waiting.len()) as u64) as usize
        };
        let operation = self.rig.waiting.remove(index);
        self.end(operation);
    }

    fn end(&mut self, operation: DiskOperation) {
        let has_failed = !self.carry_out(&operation);
        let mut plan = Plan::default();
        if let Some(ticket) = operation.ticket {
            let result = if has_failed { Err(std::io::Error::other("storage failed")) } else { Ok(()) };
            self.rig.route.disk_done(ticket, result, &mut plan);
        }
        if let Some(request) = operation.request {
            *self.left.get_mut(&request.0).expect("it is under way") -= 1;
            if has_failed {
                self.failed.insert(request.0);
            }
        }
        self.planned(plan);
    }

    fn carry_out(&mut self, operation: &DiskOperation) -> bool {
        match operation.operation {
            Operation::Flush if self.is_unordered => {
                let name =
                    if self.rig.fails { "flush fails".to_owned() } else { format!("flushed {}", number_of(operation)) };
                self.rig.log.mark(&format!("{BOTH}{name}"));
                return !self.rig.fails;
            }
            Operation::Write | Operation::Flush if self.rig.fails => return false,
            Operation::Write => {
                let mut bytes = Vec::new();
                for buffer in &operation.buffers {
                    let at = bytes.len();
                    bytes.resize(at + buffer.len(), 0);
                    match buffer {
                        Buffer::Slice(slice) => slice.copy_out(0, &mut bytes[at..]),
                        Buffer::Bytes(given) => bytes[at..].copy_from_slice(given),
                    }
                }
                self.rig.file.write_all_at(&bytes, operation.offset).expect("written");
                self.rig.log.written(operation.offset, &bytes);
            }
            Operation::Flush => {
                let flush = self.rig.log.flush_begins();
                self.rig.log.flush_ended(&flush, true);
            }
            Operation::Read | Operation::Discard | Operation::WriteZeroes { .. } => {}
        }
        true
    }

    /// The worker is killed, and another one comes to the point where it serves the guest.
    fn die(&mut self) -> std::io::Result<()> {
        self.deaths += 1;
        for operation in std::mem::take(&mut self.rig.waiting) {
            // Whether it was sent. (A flush that was may not have been waited for.)
            if operation.operation == Operation::Write && self.random.below(2) == 0 {
                self.carry_out(&operation);
            }
        }
        self.rig.follow(self.within)
    }

    /// The guest asks again, in any order; some time the worker is woken.
    fn ask_again(&mut self) {
        self.left.clear();
        self.failed.clear();
        let mut asked: Vec<Asked> = std::mem::take(&mut self.asked).into_values().collect();
        if self.random.below(2) == 0 {
            self.wake();
        }
        if self.random.below(4) == 0 {
            (0..self.random.below(12)).for_each(|_| self.one());
        }
        while !asked.is_empty() {
            let which = self.random.below(asked.len() as u64) as usize;
            let asked = asked.remove(which);
            self.ask_as(asked, true);
            if self.random.below(4) == 0 {
                self.one();
            }
        }
        self.wake();
    }

    fn settle(&mut self) {
        while !self.rig.waiting.is_empty() {
            self.one();
        }
    }

    fn step(&mut self) {
        let is_quiet = self.asked.values().all(|asked| asked.commits.is_none());
        match self.random.below(20) {
            0..3 if is_quiet && self.rig.committed < 190 => self.commit(),
            3..5 if is_quiet && self.rig.committed > 0 => self.write_home(),
            5 => self.flush(),
            6 => {
                self.rig.clock.fetch_add(self.random.below(900), Ordering::AcqRel);
                self.wake();
            }
            7 if is_quiet && self.asked.is_empty() && self.random.below(4) == 0 => self.move_tail(),
            8 if is_quiet && self.asked.is_empty() && self.random.below(4) == 0 => self.mount_again(),
            _ => self.one(),
        }
    }

    /// All is home, and the guest's log begins behind it.
    fn move_tail(&mut self) {
        if self.rig.committed > 0 {
            self.bring_home();
            self.begin_log(self.rig.builder.position, self.rig.builder.sequence);
        }
    }

    fn bring_home(&mut self) {
        for block in self.rig.homes {
            let (offset, content) = (block * BLOCK, content(self.rig.committed));
            self.ask(Asked { kind: RequestKind::Write, offset, content, commits: None });
        }
        self.settle();
        self.wake();
        self.settle();
    }

    fn begin_log(&mut self, start: u32, sequence: u32) {
        let mut block = self.rig.superblock.clone();
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        self.ask(Asked { kind: RequestKind::Write, offset: self.rig.log_at[0], content: block, commits: None });
    }

    /// The guest's journal has stopped, and it mounts again without a reset: it reads its log, brings all of it home, and begins a new one
    /// behind, leaving out a number. Its worker may die at each point.
    fn mount_again(&mut self) {
        if self.rig.committed == 0 {
            return;
        }
        let content = vec![0; BLOCK as usize];
        self.ask(Asked { kind: RequestKind::Read, offset: self.rig.log_at[0], content, commits: None });
        self.settle();
        self.may_die();
        self.bring_home();
        self.flush();
        self.settle();
        self.may_die();
        let (format, sequence) = (self.rig.builder.format, self.rig.builder.sequence.wrapping_add(1));
        self.rig.builder = LogBuilder::new(format, format.first, sequence);
        self.begin_log(format.first, sequence);
        (0..self.random.below(6)).for_each(|_| self.one());
        self.may_die();
        // A kernel commits nothing before its new log begins.
        self.settle();
        self.wake();
        self.settle();
    }

    fn may_die(&mut self) {
        if self.random.below(3) == 0 {
            self.die().expect("another one goes on");
            self.ask_again();
            self.settle();
        }
    }
}

/// The number of a flush, of which somebody hears.
fn number_of(flush: &DiskOperation) -> u64 {
    flush.ticket.expect("somebody hears of it").0
}

/// Files that all have one text: writes of some were under way when they were deleted, and then when a worker died; others with that text are
/// deleted without a word. The one that follows sees those writes for the first time.
#[test]
fn what_the_worker_before_was_asked_for_says_nothing_of_where_homes_are() {
    let text = |n: u64| -> Vec<u8> { (0..BLOCK).map(|at| (at * (n + 3) / 5) as u8).collect() };
    for within in [Some(Duration::from_secs(3)), None] {
        for is_again in [true, false] {
            let mut guest = Guest::new(7, within);
            let delete_files = |guest: &mut Guest, from: u64| {
                let becomes_durable = |guest: &mut Guest| {
                    for _ in 0..3 {
                        guest.settle();
                        guest.rig.clock.fetch_add(4000, Ordering::AcqRel);
                        guest.wake();
                    }
                    guest.settle();
                };
                (0..6).for_each(|n| guest.commit_of(from + n, text(n)));
                becomes_durable(guest);
                guest.begin_log(guest.rig.builder.position, guest.rig.builder.sequence);
                becomes_durable(guest);
                assert!(guest.asked.is_empty(), "its tail has moved");
            };
            delete_files(&mut guest, 2000);
            guest.die().expect("another one goes on");
            guest.ask_again();
            guest.settle();
            // Something is live.
            guest.commit_of(2050, vec![1; BLOCK as usize]);
            guest.settle();
            for n in 0..6 {
                let (offset, content) = ((2000 + n) * BLOCK, text(n));
                guest.ask_as(Asked { kind: RequestKind::Write, offset, content, commits: None }, is_again);
            }
            guest.settle();
            delete_files(&mut guest, 2100);
            let fault = guest.rig.journals.disk(0).fault();
            assert_eq!(fault.is_none(), is_again, "{within:?}, again: {is_again}: {fault:?}");
        }
    }
}

/// A death every so many steps, on average.
fn storm(seed: u64, within: Duration, each: u64) -> u64 {
    let mut guest = Guest::new(seed, Some(within));
    for _ in 0..700 {
        if guest.random.below(each) == 0 {
            guest.die().expect("another one goes on");
            guest.ask_again();
            if guest.random.below(3) == 0 {
                guest.settle();
                // What was not durable is so first of all, whatever its age.
                guest.rig.promise(guest.rig.committed);
            }
        }
        guest.step();
    }
    for _ in 0..5 {
        guest.settle();
        guest.rig.clock.fetch_add(5000, Ordering::AcqRel);
        guest.wake();
    }
    guest.settle();
    assert!(guest.asked.is_empty(), "everything is answered: {:?}", guest.asked.values());
    assert_eq!((guest.failures, guest.acknowledged), (0, guest.rig.committed));
    assert!(guest.deaths > 3 && guest.rig.committed > 10, "{} deaths, {}", guest.deaths, guest.rig.committed);
    guest.rig.promise(guest.rig.committed);
    assert!(is_aged(&guest.rig), "it is still durable by age");
    // Where compounds have had numbers of the guest's next transactions, a recovery has the error mark for as long as it takes.
    guest.rig.gives_up();
    expect_recovered(&guest.rig);
    guest.rig.holds();
    guest.rig.promise(guest.rig.committed);
    guest.rig.judge()
}

/// `AMBERLOG_ROUNDS` asks for more.
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn with_no_age_a_worker_that_dies_is_followed() {
    let judged: u64 =
        (0..number("AMBERLOG_ROUNDS", 8)).map(|seed| storm(seed, Duration::ZERO, 12 + seed % 8 * 6)).sum();
    assert!(judged > 2000, "{judged}");
}

#[test]
fn what_was_durable_stays_so_under_the_next_worker() {
    let judged: u64 = (1000..1000 + number("AMBERLOG_ROUNDS", 6)).map(|seed| storm(seed, AGE, 12 + seed % 8 * 6)).sum();
    assert!(judged > 1000, "{judged}");
}

/// A commit that nobody was answered, and that is held in full: who asks for it again is answered when it is durable.
#[test]
fn a_commit_that_is_asked_for_again_waits() {
    let mut guest = Guest::new(1, Some(Duration::ZERO));
    guest.commit();
    guest.settle();
    assert_eq!(guest.acknowledged, 1);
    guest.commit();
    for _ in 0..3 {
        guest.die().expect("another one goes on");
        assert!(is_aged(&guest.rig), "nothing is said on storage");
        guest.ask_again();
        if guest.acknowledged == 2 {
            // Durable already.
            break;
        }
    }
    guest.settle();
    assert_eq!((guest.acknowledged, guest.failures), (2, 0));
    guest.rig.promise(2);
    assert_eq!(guest.rig.within_s(), Some(0));
    assert!(guest.rig.judge() > 20);
}

/// Where it cannot become durable, it fails: under the worker that sees storage fail, and under the next one.
#[test]
fn with_no_age_a_commit_fails_that_cannot_become_durable() {
    for (dies_again, settles_first, says_it) in
        [(false, false, true), (false, true, true), (true, true, true), (true, true, false)]
    {
        let mut guest = Guest::new(2, Some(Duration::ZERO));
        guest.commit();
        guest.settle();
        guest.commit();
        guest.die().expect("another one goes on");
        guest.rig.gives_up();
        guest.rig.fails = true;
        let again: Vec<Asked> = guest.asked.values().cloned().collect();
        guest.wake();
        if settles_first {
            // It has seen storage fail, and its guest was told nothing.
            guest.settle();
        }
        if !says_it {
            // It was killed when it had written down that storage failed and nothing else, or is of a build that says no more.
            let id = guest.rig.journals.logs()[0].id;
            let only_failed = Doubt { is_doubted: true, ..Doubt::default() };
            guest.rig.journals.area.note_doubt(id, |doubt| *doubt = only_failed);
            assert!(guest.rig.journals.area.adopted(id).expect("it is open").doubt.is_doubted);
        }
        if dies_again {
            guest.rig.fails = false;
            guest.die().expect("another one goes on");
        }
        guest.asked.clear();
        guest.left.clear();
        again.into_iter().for_each(|asked| guest.ask(asked));
        guest.wake();
        guest.settle();
        assert_eq!(
            (guest.acknowledged, guest.failures),
            (1, 1),
            "dies again: {dies_again}, settles first: {settles_first}, says it: {says_it}"
        );
        assert!(guest.asked.is_empty() && guest.rig.within_s().is_none());
        guest.rig.judge();
    }
}

/// The same where it fails for want of memory, and the worker dies when storage has the error mark, and before its guest is told: who goes on finds
/// a commit that is held, as any other.
#[test]
fn with_no_age_a_commit_fails_for_want_of_memory_whoever_answers() {
    for deaths in 1..=2 {
        let mut guest = Guest::new(3, Some(Duration::ZERO));
        guest.commit();
        guest.settle();
        guest.commit();
        let again: Vec<Asked> = guest.asked.values().cloned().collect();
        assert_eq!(again.len(), 1, "it waits until it is durable");
        guest.rig.gives_up();
        let (position, content) = guest.rig.transaction().remove(0);
        let offset = guest.rig.log_at[position as usize];
        simulated_room::set_full(true);
        guest.ask(Asked { kind: RequestKind::Write, offset, content, commits: None });
        simulated_room::set_full(false);
        guest.settle();
        assert!(said(&guest.rig).errno != 0 && guest.asked.is_empty());
        // It was not told.
        (guest.acknowledged, guest.failures) = (1, 0);
        for _ in 0..deaths {
            guest.die().expect("another one goes on");
        }
        guest.left.clear();
        again.into_iter().for_each(|asked| guest.ask_as(asked, true));
        guest.wake();
        guest.settle();
        assert_eq!((guest.acknowledged, guest.failures), (1, 1), "{deaths} deaths");
        // That is over when its guest mounts anew.
        let number = guest.rig.builder.sequence;
        for start in [0, guest.rig.builder.format.first] {
            guest.begin_log(start, number);
            guest.settle();
        }
        let doubt = guest.rig.journals.area.adopted(guest.rig.journals.logs()[0].id).expect("it is open").doubt;
        assert_eq!(doubt, Doubt::default());
    }
}

/// A commit that came when durability had ended was promised no more than that it is held, and nothing else was left to be durable: asked again it
/// is answered well.
#[test]
fn a_commit_that_is_only_held_does_not_fail_when_it_is_asked_for_again() {
    let mut guest = Guest::new(4, Some(Duration::ZERO));
    guest.commit();
    guest.settle();
    guest.rig.gives_up();
    let log = guest.rig.transaction();
    let asked = |rig: &Rig, (position, content): &(u32, Vec<u8>), commits| {
        let (kind, offset, content) = (RequestKind::Write, rig.log_at[*position as usize], content.clone());
        Asked { kind, offset, content, commits }
    };
    let (last, body) = log.split_last().expect("a commit block");
    for (index, block) in body.iter().enumerate() {
        simulated_room::set_full(index == 1);
        let asked = asked(&guest.rig, block, None);
        guest.ask(asked);
        simulated_room::set_full(false);
    }
    guest.settle();
    assert!(said(&guest.rig).errno != 0, "it has ended");
    let commit = asked(&guest.rig, last, Some(2));
    guest.ask(commit.clone());
    guest.settle();
    assert_eq!((guest.acknowledged, guest.failures), (2, 0));
    guest.die().expect("another one goes on");
    guest.acknowledged = 1;
    guest.ask_as(commit, true);
    guest.wake();
    guest.settle();
    assert_eq!((guest.acknowledged, guest.failures), (2, 0));
}

impl Guest {
    /// What the guest asks for to commit its next transaction: the body, and the commit block.
    fn next_commit(&mut self) -> (Vec<Asked>, Asked) {
        let log = self.rig.transaction();
        self.commit_in(log)
    }

    /// The same of the last transaction, in its log blocks.
    fn commit_in(&self, log: Vec<(u32, Vec<u8>)>) -> (Vec<Asked>, Asked) {
        let asked = |(position, content): (u32, Vec<u8>)| {
            let (kind, offset) = (RequestKind::Write, self.rig.log_at[position as usize]);
            Asked { kind, offset, content, commits: None }
        };
        let mut body: Vec<Asked> = log.into_iter().map(asked).collect();
        let commit = body.pop().expect("a commit block");
        (body, Asked { commits: Some(self.rig.committed), ..commit })
    }

    fn set_age(&mut self, within: Option<Duration>) {
        self.within = within;
        self.rig.journals.set_durable_within(0, within).expect("possible");
        self.wake();
    }

    /// There is no memory for the first block of the next transaction behind its descriptor. Gives those after that.
    fn lacks_memory(&mut self) -> Vec<Asked> {
        let (mut rest, commit) = self.next_commit();
        self.ask(rest.remove(0));
        simulated_room::set_full(true);
        self.ask(rest.remove(0));
        simulated_room::set_full(false);
        rest.push(commit);
        rest
    }

    fn doubt(&self) -> Doubt {
        self.rig.journals.area.adopted(self.rig.journals.logs()[0].id).expect("it is open").doubt
    }

    /// Another worker goes on, and is asked for this commit again; it was answered or not. Whether it is answered well.
    fn is_good_again(&mut self, commit: &Asked) -> bool {
        self.die().expect("another one goes on");
        self.asked.clear();
        self.left.clear();
        (self.acknowledged, self.failures) = (0, 0);
        self.ask_as(commit.clone(), true);
        for _ in 0..3 {
            self.settle();
            self.wake();
        }
        assert!(self.asked.is_empty(), "it is answered");
        self.failures == 0
    }
}

/// No age is wished, and not in force before storage is a truth: where there is no memory for that or storage fails, nobody was promised more
/// than that his commit is held, and none fails; under this worker, nor under the next one, wherever this one dies.
#[test]
fn a_commit_does_not_fail_where_no_age_was_never_in_force() {
    let mut ends = 0;
    for (waits, fails, settles) in (0..8).map(|bits| (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0)) {
        for steps in 0.. {
            let mut guest = Guest::new(6, None);
            let (body, mut commit) = guest.next_commit();
            body.into_iter().for_each(|asked| guest.ask(asked));
            guest.ask(commit.clone());
            guest.settle();
            assert_eq!(guest.acknowledged, 1, "it is held");
            guest.set_age(Some(Duration::ZERO));
            (0..steps).for_each(|_| guest.one());
            if guest.rig.within_s().is_some() {
                break;
            }
            ends += 1;
            if waits {
                let body;
                (body, commit) = guest.next_commit();
                body.into_iter().for_each(|asked| guest.ask(asked));
                guest.ask(commit.clone());
            }
            if fails {
                guest.rig.fails = true;
                guest.one();
                guest.rig.fails = false;
            } else {
                guest.lacks_memory();
            }
            if settles {
                guest.settle();
                let last = if waits { 2 } else { 1 };
                assert_eq!((guest.acknowledged, guest.failures, said(&guest.rig).errno != 0), (last, 0, true));
            }
            let what = format!("after {steps} steps, waits: {waits}, storage fails: {fails}, settles: {settles}");
            assert!(!guest.doubt().owes_errors, "{what}");
            assert!(guest.is_good_again(&commit), "{what}");
        }
    }
    assert!(ends > 8 * 3, "{ends} ends");
}

/// A flush failed where no age was promised: that promises nobody more later.
#[test]
fn a_commit_that_is_held_beside_failed_storage_is_good_whatever_is_wished_later() {
    let mut guest = Guest::new(8, None);
    let (body, commit) = guest.next_commit();
    body.into_iter().for_each(|asked| guest.ask(asked));
    guest.rig.journals.disk(0).note_failed_flush();
    guest.set_age(Some(Duration::ZERO));
    guest.ask(commit.clone());
    guest.settle();
    assert_eq!((guest.acknowledged, guest.rig.within_s()), (1, None));
    assert!(guest.doubt().is_doubted);
    for _ in 0..2 {
        assert!(guest.is_good_again(&commit));
    }
}

/// A worker has written down that commits are only held from now on, and is killed before storage says so; or it is killed when storage says that no age
/// is in force, and before it has seen that. Who follows promises that what it is asked for is durable, and so it fails where storage fails, though that
/// one is killed before it has come to say so.
#[test]
fn who_follows_promises_what_is_in_force() {
    for (begins, owed_errors) in [(false, false), (false, true), (true, false)] {
        let what = format!("begins: {begins}, owed errors: {owed_errors}");
        let mut guest = Guest::new(11, if begins { None } else { Some(Duration::ZERO) });
        guest.commit();
        guest.settle();
        guest.rig.gives_up();
        if begins {
            guest.set_age(Some(Duration::ZERO));
            while !is_aged(&guest.rig) {
                guest.one();
            }
            assert!(guest.rig.within_s().is_none() && guest.doubt().is_held_only);
        } else {
            let id = guest.rig.journals.logs()[0].id;
            let area = &guest.rig.journals.area;
            area.note_doubt(id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (owed_errors, true));
        }
        guest.die().expect("another one goes on");
        assert!(is_aged(&guest.rig), "{what}");
        assert_eq!(guest.doubt(), Doubt::default(), "{what}");
        (guest.asked, guest.left, guest.acknowledged, guest.failures) = Default::default();
        guest.wake();
        let (body, commit) = guest.next_commit();
        body.into_iter().for_each(|asked| guest.ask(asked));
        guest.ask(commit.clone());
        guest.rig.journals.disk(0).note_failed_flush();
        assert_eq!((guest.acknowledged, guest.failures), (0, 0), "{what}: it waits");
        assert!(!guest.is_good_again(&commit), "{what}");
    }
}

/// A worker is killed when storage says that a log is held, and before it has written down that commits are promised no more.
#[test]
fn a_log_that_was_opened_without_is_only_held() {
    let mut guest = Guest::new(12, None);
    let id = guest.rig.journals.logs()[0].id;
    assert!(guest.doubt().is_held_only);
    guest.rig.journals.area.note_doubt(id, |doubt| doubt.is_held_only = false);
    guest.die().expect("another one goes on");
    let (body, commit) = guest.next_commit();
    body.into_iter().for_each(|asked| guest.ask(asked));
    guest.ask(commit.clone());
    guest.settle();
    assert_eq!(guest.acknowledged, 1, "it is held");
    guest.rig.journals.disk(0).note_failed_flush();
    guest.set_age(Some(Duration::ZERO));
    for _ in 0..2 {
        assert!(guest.is_good_again(&commit));
    }
}

/// A commit that was to be durable is to fail when it is asked for again, for as long as no age is wished, and until all is durable.
#[test]
fn errors_are_owed_no_longer_than_the_promise_holds() {
    for change in [None, Some(AGE), Some(Duration::ZERO)] {
        for is_followed in [false, true] {
            let mut guest = Guest::new(9, Some(Duration::ZERO));
            guest.commit();
            guest.settle();
            guest.rig.gives_up();
            let (body, commit) = guest.next_commit();
            body.into_iter().for_each(|asked| guest.ask(asked));
            guest.ask(commit.clone());
            let rest = guest.lacks_memory();
            guest.settle();
            assert!(said(&guest.rig).errno != 0 && guest.doubt().owes_errors);
            if is_followed {
                guest.die().expect("another one goes on");
                (guest.asked, guest.left) = Default::default();
                assert!(guest.doubt().owes_errors);
            }
            if change == Some(Duration::ZERO) {
                // All of it goes home, and its log goes on without blocks in their own places.
                rest.into_iter().for_each(|asked| guest.ask(asked));
                guest.bring_home();
                guest.begin_log(guest.rig.builder.position, guest.rig.builder.sequence);
                for _ in 0..4 {
                    guest.settle();
                    guest.rig.clock.fetch_add(5000, Ordering::AcqRel);
                    guest.wake();
                }
                guest.settle();
                assert_eq!(guest.rig.within_s(), Some(0), "it is in force again");
            } else {
                guest.set_age(change);
            }
            assert!(!guest.doubt().owes_errors, "{change:?}, followed: {is_followed}");
            if change != Some(Duration::ZERO) {
                guest.set_age(Some(Duration::ZERO));
                assert!(guest.is_good_again(&commit), "{change:?}, followed: {is_followed}");
            }
        }
    }
}

/// Errors are owed when durability begins again: who repeats a commit that was promised to be durable is told of one, if that ends before it is; who
/// commits beside that was promised no more than that it is held.
#[test]
fn a_promise_that_was_broken_stays_so_while_durability_begins_again() {
    for is_repeated in [false, true] {
        let mut guest = Guest::new(10, Some(Duration::ZERO));
        guest.commit();
        guest.settle();
        guest.rig.gives_up();
        let (body, commit) = guest.next_commit();
        body.into_iter().for_each(|asked| guest.ask(asked));
        guest.ask(commit.clone());
        let id = guest.rig.journals.logs()[0].id;
        guest.rig.journals.area.note_doubt(id, |doubt| doubt.owes_errors = true);
        guest.rig.journals.set_durable_within(0, None).expect("possible");
        // It ends for a wish that no worker has seen when the next one begins with no age: the table says what is owed.
        guest.wake();
        guest.settle();
        guest.rig.journals.area.note_doubt(id, |doubt| doubt.owes_errors = true);
        guest.die().expect("another one goes on");
        (guest.asked, guest.left, guest.acknowledged, guest.failures) = Default::default();
        guest.wake();
        assert!(!guest.rig.waiting.is_empty() && guest.rig.within_s().is_none(), "it begins");
        let asked = if is_repeated {
            commit.clone()
        } else {
            let (body, next) = guest.next_commit();
            body.into_iter().for_each(|asked| guest.ask(asked));
            next
        };
        guest.ask_as(asked, is_repeated);
        assert_eq!((guest.acknowledged, guest.failures), (0, 0), "it waits");
        guest.lacks_memory();
        guest.settle();
        let expected = if is_repeated { (0, 1) } else { (3, 0) };
        assert_eq!((guest.acknowledged, guest.failures), expected);
        assert!(guest.doubt().owes_errors);
        assert!(!guest.is_good_again(&commit));
    }
}

/// A bitmap that is durable in the log, and older at home: what is in use by it is no append under the next worker either.
#[test]
fn what_is_free_is_told_by_what_is_durable() {
    let mut guest = Guest::new(5, Some(AGE));
    let mut image = std::fs::read(&guest.rig.image).expect("the image");
    let mut allocation = extfs::Allocation::default();
    let free =
        (0..BLOCKS).rev().find(|block| allocation.is_free(&image, *block).expect("bitmaps")).expect("a free block");
    let superblock = extfs::discover(&image).expect("readable").remove(0).superblock;
    let bitmap = extfs::group(&image, &superblock, 0).expect("readable").expect("a group").block_bitmap;
    image[bitmap as usize * BLOCK as usize + free as usize / 8] |= 1 << (free % 8);
    let used = image[(bitmap * BLOCK) as usize..][..BLOCK as usize].to_vec();
    guest.commit_of(bitmap, used);
    guest.settle();
    guest.rig.clock.fetch_add(AGE.as_millis() as u64, Ordering::AcqRel);
    guest.wake();
    guest.settle();
    assert_eq!(guest.rig.compounds(), 1);
    guest.die().expect("another one goes on");
    guest.ask_again();
    guest.settle();
    guest.commit_of(free, content(9));
    guest.settle();
    guest.ask(Asked { kind: RequestKind::Write, offset: free * BLOCK, content: content(9), commits: None });
    let is_home = |operation: &DiskOperation| operation.offset == free * BLOCK;
    assert!(!guest.rig.waiting.iter().any(is_home), "its transaction is not durable");
    guest.rig.clock.fetch_add(AGE.as_millis() as u64, Ordering::AcqRel);
    guest.wake();
    guest.settle();
    assert_eq!((guest.rig.compounds(), guest.asked.len()), (1, 0), "by this worker");
    let mut stored = vec![0; BLOCK as usize];
    guest.rig.file.read_exact_at(&mut stored, free * BLOCK).expect("read");
    assert_eq!(stored, content(9));
}

/// What is not as the held log says is not followed, and with no age nobody goes on.
#[test]
fn with_no_age_nobody_goes_on_where_storage_is_not_what_it_was() {
    let mut guest = Guest::new(3, Some(Duration::ZERO));
    for _ in 0..2 {
        guest.commit();
        guest.settle();
    }
    let before: Vec<u8> = std::fs::read(&guest.rig.image).expect("the image");
    let compound = (1..guest.rig.log_at.len())
        .map(|position| guest.rig.log_at[position])
        .find(|at| before[*at as usize..][..4] == jbd2::MAGIC.to_be_bytes())
        .expect("a compound");
    // The first one is gone, and the second with it.
    guest.rig.file.write_all_at(&[0; BLOCK as usize], compound).expect("written");
    let error = guest.die().expect_err("nobody goes on").to_string();
    assert!(error.contains("durable-within=0"), "{error}");
    guest.within = Some(AGE);
    guest.die().expect("with an age another one goes on, and begins anew");
    assert!(!is_aged(&guest.rig));
}

/// A kernel that mounts again without a reset replays its log and begins another behind it; who has died meanwhile changes nothing for it.
#[test]
fn a_guest_that_mounts_again_is_followed() {
    for within in [AGE, Duration::ZERO] {
        for seed in 0..24 {
            let mut guest = Guest::new(seed, Some(within));
            for _ in 0..3 {
                guest.commit();
                guest.settle();
                guest.mount_again();
                guest.settle();
                assert!(is_aged(&guest.rig), "seed {seed}: {:?}", said(&guest.rig));
            }
            guest.commit();
            guest.settle();
            guest.rig.clock.fetch_add(5000, Ordering::AcqRel);
            guest.wake();
            guest.settle();
            assert!(guest.asked.is_empty() && guest.failed.is_empty(), "seed {seed}");
            guest.rig.promise(guest.rig.committed);
            guest.rig.judge();
        }
    }
}

/// Another log is written over the guest's: what was made durable beside it ends first, and whoever goes on then finds nothing that
/// contradicts itself.
#[test]
fn what_is_durable_ends_before_a_log_that_is_written_over() {
    for within in [AGE, Duration::ZERO] {
        for steps in 0..16 {
            let mut guest = Guest::new(steps, Some(within));
            for _ in 0..3 {
                guest.commit();
                guest.settle();
            }
            let (position, sequence) = (guest.rig.builder.position, guest.rig.builder.sequence);
            guest.begin_log(position, sequence.wrapping_add(1000));
            (0..steps).for_each(|_| guest.one());
            guest.die().unwrap_or_else(|error| panic!("{steps} steps: {error}"));
            guest.ask_again();
            guest.settle();
            guest.wake();
            guest.settle();
            assert!(guest.asked.is_empty() && guest.failed.is_empty(), "{steps} steps");
            assert_eq!(
                said(&guest.rig).sequence,
                sequence.wrapping_add(1000),
                "{steps} steps: storage has what was written"
            );
            guest.die().unwrap_or_else(|error| panic!("{steps} steps, and again: {error}"));
        }
    }
}

/// The guest closes its log, and the worker dies at each step of that: the guest, which was not answered, closes it once more.
#[test]
fn one_that_is_being_closed_is_closed_under_the_next_worker() {
    for within in [AGE, Duration::ZERO] {
        for steps in 0..14 {
            let mut guest = Guest::new(steps, Some(within));
            for _ in 0..3 {
                guest.commit();
                guest.settle();
            }
            guest.move_tail();
            guest.settle();
            guest.wake();
            guest.settle();
            assert!(guest.asked.is_empty(), "{:?}", guest.asked);
            let mut block = guest.rig.superblock.clone();
            let sequence = guest.rig.builder.sequence;
            jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(0).sequence(sequence).seal();
            let offset = guest.rig.log_at[0];
            guest.ask(Asked { kind: RequestKind::Write, offset, content: block, commits: None });
            (0..steps).for_each(|_| guest.one());
            guest.die().unwrap_or_else(|error| panic!("{steps} steps: {error}"));
            guest.ask_again();
            guest.settle();
            guest.wake();
            guest.settle();
            assert!(guest.asked.is_empty() && guest.failed.is_empty(), "{steps} steps");
            assert!(said(&guest.rig).is_empty(), "{steps} steps");
            guest.rig.promise(guest.rig.committed);
            guest.rig.judge();
        }
    }
}

/// Where the worker dies that the guest has asked to write past its journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dies {
    /// When the write was answered.
    After,
    /// While it is under way: storage has it, or not.
    Amid { is_sent: bool },
    /// While it waits for what it is written over to be durable.
    Before,
}

/// The next worker empties the log before the guest's tail has passed what that has of the block: the copy does not go home over what the
/// guest wrote, which it goes on counting on.
#[test]
fn who_follows_brings_no_copy_home_over_what_was_written_past_the_journal() {
    for within in [AGE, Duration::ZERO] {
        for dies in [Dies::After, Dies::Amid { is_sent: true }, Dies::Amid { is_sent: false }, Dies::Before] {
            for times in 1..3 {
                let case = format!("{within:?}, {dies:?}, {times} times");
                let mut rig = Rig::new(Some(within));
                rig.open();
                rig.commit();
                if dies != Dies::Before {
                    rig.settle();
                    rig.pass(1500);
                    rig.promise(rig.committed);
                }
                rig.writes_directly(DIRECT);
                let (last, [first, second, third]) = (rig.committed, rig.homes);
                rig.write_home(first, DIRECT);
                match dies {
                    Dies::After => rig.settle(),
                    Dies::Amid { is_sent } => {
                        assert_eq!(rig.waiting.len(), 1, "{case}");
                        if is_sent {
                            rig.file.write_all_at(&content(DIRECT), first * BLOCK).expect("written");
                            rig.log.written(first * BLOCK, &content(DIRECT));
                        }
                    }
                    Dies::Before => {
                        let is_home = |operation: &DiskOperation| operation.offset == first * BLOCK;
                        assert!(!rig.waiting.iter().any(is_home), "{case}");
                    }
                }
                for _ in 0..times {
                    rig.waiting.clear();
                    rig.follow(Some(within)).expect("another one goes on");
                    if dies != Dies::After {
                        rig.write_home(first, DIRECT);
                    }
                }
                rig.pass(0);
                rig.pass(1500);
                rig.write_home(second, last);
                rig.write_home(third, last);
                rig.settle();
                rig.flushes();
                rig.superblock(0, rig.builder.sequence);
                rig.pass(0);
                rig.promise_direct(last, DIRECT);
                let mut block = content(0);
                rig.file.read_exact_at(&mut block, first * BLOCK).expect("read");
                assert_eq!(block[0], DIRECT, "{case}");
                // What is not durable yet when the write comes is promised at no certain moment.
                assert!(dies == Dies::Before || rig.judge() > 20, "{case}");
            }
        }
    }
}

/// A write of the guest that the host's is in the way of: a version is committed meanwhile that has just what it carries. The worker dies
/// before that version is durable.
#[test]
fn what_came_before_a_version_and_is_the_same_does_not_make_it_durable() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    rig.commit();
    rig.settle();
    rig.pass(1500);
    rig.promise(1);
    let at = rig.homes[0] * BLOCK;
    rig.journals.logs()[0].begin_emptying();
    let mut plan = Plan::default();
    rig.route.woken(&mut plan);
    rig.plan(plan);
    let is_there = |operation: &DiskOperation| operation.offset == at;
    let ours = rig.waiting.iter().filter(|operation| is_there(operation)).count();
    rig.write_home(rig.homes[0], 2);
    assert_eq!((ours, rig.waiting.iter().filter(|operation| is_there(operation)).count()), (1, 1), "it waits");
    let log = rig.transaction();
    rig.request_log(&log);
    for whose in ["the host's", "the guest's"] {
        let found = rig.waiting.iter().position(is_there).unwrap_or_else(|| panic!("{whose} is under way"));
        rig.waiting.swap(0, found);
        rig.settle_one();
    }
    rig.waiting.clear();
    rig.follow(Some(AGE)).expect("another one goes on");
    rig.pass(0);
    rig.pass(1500);
    rig.promise(2);
    assert!(rig.judge() > 20);
}

/// The log of compounds has dropped it, since it was at home; the guest's own log has it still.
#[test]
fn who_follows_knows_what_was_written_past_a_version_without_a_copy() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    let [first, _, third] = rig.homes;
    let other = third + 1;
    // More transactions than there are going to be compounds.
    (0..3).for_each(|_| rig.commit_of(&[(other, content(1))]));
    rig.settle();
    rig.pass(1500);
    rig.write_home(other, 1);
    rig.settle();
    let tail = (rig.builder.position, rig.builder.sequence);
    rig.commit();
    rig.settle();
    rig.pass(1500);
    rig.promise(1);
    rig.write_homes();
    rig.settle();
    rig.superblock(tail.0, tail.1);
    // Its own log would not bring it back, so the other log is emptied before.
    rig.write_home(other, 5);
    rig.settle();
    let mut block = content(0);
    rig.file.read_exact_at(&mut block, other * BLOCK).expect("read");
    assert_eq!(block[0], 5);
    rig.writes_directly(DIRECT);
    rig.write_home(first, DIRECT);
    rig.settle();
    rig.follow(Some(AGE)).expect("another one goes on");
    rig.pass(0);
    rig.pass(1500);
    rig.flushes();
    rig.superblock(0, rig.builder.sequence);
    rig.pass(0);
    rig.promise_direct(1, DIRECT);
    rig.file.read_exact_at(&mut block, first * BLOCK).expect("read");
    assert_eq!(block[0], DIRECT);
    assert!(rig.judge() > 20);
}

/// What becomes of durability while the guest asks to write past its journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Begins,
    Ends,
}

/// The guest asks to write past its journal while durability begins or ends, and waits; the worker dies any number of steps later, and
/// perhaps the next one, too. Whoever goes on writes nothing that the journal has over it, though the log on storage is emptied before
/// the guest's tail has passed that.
#[test]
fn who_follows_knows_what_waited_while_durability_began_or_ended() {
    for change in [Change::Begins, Change::Ends] {
        for deaths in 1..3 {
            for steps in 0..10 {
                for seed in 0..3 {
                    waits_while(change, deaths, steps, seed);
                }
            }
        }
    }
}

fn waits_while(change: Change, deaths: u32, steps: u32, seed: u64) {
    let case = format!("{change:?}, {deaths} deaths, {steps} steps, seed {seed}");
    let mut guest = Guest::new(seed, (change == Change::Ends).then_some(AGE));
    guest.rig.gives_up();
    guest.commit();
    guest.settle();
    guest.rig.clock.fetch_add(1500, Ordering::AcqRel);
    guest.wake();
    guest.settle();
    guest.rig.promise(guest.rig.committed);
    let second_at = (guest.rig.builder.position, guest.rig.builder.sequence);
    let (last, [first, second, third]) = (guest.rig.committed, guest.rig.homes);
    // Its tail can pass the other homes, and not this one.
    guest.commit_of(first, content(last));
    guest.settle();
    let write = |block: u64, version: u8| Asked {
        kind: RequestKind::Write,
        offset: block * BLOCK,
        content: content(version),
        commits: None,
    };
    guest.within = match change {
        // Beside a home write that is under way it does not begin.
        Change::Begins => {
            guest.ask(write(third, last));
            Some(AGE)
        }
        // Beside what makes a compound it does not end.
        Change::Ends => {
            guest.rig.clock.fetch_add(1500, Ordering::AcqRel);
            None
        }
    };
    guest.wake();
    guest.rig.journals.set_durable_within(0, guest.within).expect("possible");
    guest.wake();
    guest.rig.writes_directly(DIRECT);
    guest.ask(write(first, DIRECT));
    let is_sent =
        guest.rig.waiting.iter().any(|operation| operation.offset == first * BLOCK && operation.request.is_some());
    assert!(!is_sent, "{case}: it waits");
    (0..steps).for_each(|_| guest.one());
    for _ in 0..deaths {
        guest.die().unwrap_or_else(|error| panic!("{case}: {error}"));
        guest.ask_again();
    }
    guest.settle();
    guest.wake();
    guest.settle();
    assert!(guest.asked.is_empty() && guest.failed.is_empty(), "{case}: {:?}", guest.asked);
    guest.rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
    for _ in 0..2 {
        guest.wake();
        guest.settle();
        guest.rig.clock.fetch_add(1500, Ordering::AcqRel);
    }
    assert!(is_aged(&guest.rig), "{case}");
    for block in [second, third] {
        guest.ask(write(block, last));
    }
    guest.settle();
    guest.flush();
    guest.settle();
    guest.begin_log(second_at.0, second_at.1);
    guest.settle();
    assert!(guest.asked.is_empty(), "{case}: {:?}", guest.asked);
    // What the guest's log does not have any more waits until the one on storage is empty.
    guest.ask(write(second, last));
    guest.settle();
    let mut block = content(0);
    guest.rig.file.read_exact_at(&mut block, first * BLOCK).expect("read");
    assert_eq!(block[0], DIRECT, "{case}: what the guest wrote is written over");
    guest.flush();
    guest.settle();
    guest.rig.superblock(0, guest.rig.builder.sequence + 16);
    guest.rig.pass(0);
    guest.rig.promise_direct(last, DIRECT);
    guest.rig.file.read_exact_at(&mut block, first * BLOCK).expect("read");
    assert_eq!(block[0], DIRECT, "{case}");
    assert!(guest.rig.judge() > 20, "{case}");
}

/// Writes that were seen, and the files and the image as they were before one of them.
type Left = (usize, Vec<(PathBuf, Vec<u8>)>, Vec<u8>);

/// A worker is killed before any write of the recovery that it does when its guest is reset: another one goes on, whatever the age.
#[test]
fn a_worker_that_dies_amid_a_recovery_is_followed() {
    for within in [Duration::ZERO, AGE] {
        let mut writes = 0;
        for killed in 0.. {
            let mut rig = Rig::new(Some(within));
            rig.gives_up();
            rig.open();
            for _ in 0..2 {
                rig.commit();
                rig.settle();
                rig.pass(2 * AGE.as_millis() as u64);
            }
            assert!(rig.compounds() > 0);
            rig.write_homes();
            rig.commit();
            rig.settle();
            let last = rig.committed;
            let (parts, registry) = (rig.directory.path().to_owned(), rig.directory.path().join("registry"));
            let left: Arc<Mutex<Left>> = Arc::default();
            let (seen, image) = (Arc::clone(&left), rig.image.clone());
            rig.journals.disk(0).simulate_writes(move || {
                let mut seen = seen.lock().expect("no panic");
                if seen.0 == killed {
                    for part in ["vms", "registry"] {
                        files(&parts.join(part), &mut seen.1);
                    }
                    seen.2 = std::fs::read(&image).expect("the image");
                }
                seen.0 += 1;
                true
            });
            rig.journals.recover_disk(0).expect("recovered");
            let (count, tables, image) = std::mem::take(&mut *left.lock().expect("no panic"));
            if count <= killed {
                writes = count;
                break;
            }
            for (path, bytes) in &tables {
                let file = File::options().create(true).truncate(false).write(true).open(path).expect("opened");
                file.set_len(bytes.len() as u64).and_then(|()| file.write_all_at(bytes, 0)).expect("written");
            }
            rig.file.write_all_at(&image, 0).expect("written");
            (rig.waiting, rig.held) = (Vec::new(), 0);
            let what = format!("killed before write {killed}, within {within:?}");
            rig.follow(Some(within)).unwrap_or_else(|error| panic!("{what}: {error}"));
            rig.settle();
            rig.journals.recover_all().unwrap_or_else(|error| panic!("{what}: {error}"));
            let bytes = std::fs::read(&rig.image).expect("the image");
            assert_eq!(state(&Image::of(&bytes), (&rig.log_at, &rig.homes), last, false), Ok(last), "{what}");
            assert!(registry.exists());
        }
        assert!(writes > 6, "{writes} writes");
    }
}

/// The host begins to write nothing where a write of the guest's may go: that one would wait for the host's, the host's for what is not
/// durable, and that, in a full log, for the guest's.
#[test]
fn the_host_does_not_get_in_front_of_a_write_that_may_go() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    rig.commit();
    rig.settle();
    rig.pass(1500);
    let [_, first, second] = rig.homes;
    assert_eq!(second, first + 1, "the guest can write both at once");
    rig.journals.logs()[0].begin_emptying();
    rig.wake(0);
    let at = |block: u64| move |operation: &DiskOperation| operation.offset == block * BLOCK;
    let ours = rig.waiting.iter().position(at(first)).expect("the host writes it");
    rig.waiting.swap(0, ours);
    let kept = rig.waiting.remove(0);
    rig.settle();
    rig.waiting.push(kept);
    rig.request(RequestKind::Write, first * BLOCK, &[content(77), content(77)].concat());
    assert_eq!(rig.waiting.len(), 1, "the guest's write waits for the host's");
    let log = rig.transaction();
    rig.request_log(&log);
    rig.wake(0);
    rig.settle_one();
    let guests = rig.waiting.iter().find(|operation| at(first)(operation)).expect("it goes when the host's has ended");
    assert_eq!(guests.len, 2 * BLOCK);
    rig.settle();
}
