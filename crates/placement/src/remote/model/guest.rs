//! The simulated guest, by jbd2's rules: it waits for what it has to wait for, and flushes when it has to.

use super::life::Life;
use super::world::{BLOCK, Observed, PATIENCE, TIMEOUT, World};
use crate::remote::state::Mode;
use crate::remote::state::Outcome;
use crate::remote::tests::Random;
use crate::remote::{BackOff, MirrorFile, Phase, RemoteLog};
use block_route::{RequestId, Status};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Superblock, SuperblockEdit};
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Nothing that has to happen takes longer.
const LIMIT: Duration = Duration::from_secs(60);
/// Log blocks that are live at most.
const LIVE_MAX: u32 = 90;

struct Logged {
    sequence: u32,
    position: u32,
    blocks: Vec<u64>,
}

/// A write of the guest's that its disk has taken and not ended.
struct InFlight {
    request: u32,
    write: u64,
    /// Of a log block in its own place.
    is_stored: bool,
}

pub struct Guest {
    pub world: Arc<World>,
    pub log: RemoteLog,
    /// Of the worker that serves it.
    pub life: Arc<Life>,
    /// How many workers it has had.
    pub workers: u32,
    /// How its log was found when each of them but the first began.
    pub found: Vec<Option<Mode>>,
    /// A worker that goes on is killed soon, too.
    pub is_killed_often: bool,
    pub random: Random,
    /// Blocks of which transactions make versions.
    blocks: Vec<u64>,
    cache: BTreeMap<u64, Vec<u8>>,
    /// Revoked and not journalled again: these may be written directly.
    data: HashSet<u64>,
    /// Committed, and not written home since.
    owed: HashSet<u64>,
    live: Vec<Logged>,
    builder: LogBuilder,
    in_flight: Vec<InFlight>,
    waiting: HashSet<u32>,
    /// Log blocks that it has written, of which it was told nothing.
    untold: BTreeMap<u32, (u32, Vec<u8>)>,
    next_request: u32,
    next_content: u64,
    /// Writes commit blocks beside what they commit.
    is_async: bool,
    /// Its commits flush the disk.
    has_barriers: bool,
    /// Writes that storage has do not end.
    holds_back: bool,
}

impl Guest {
    /// A guest that has just mounted the file system.
    pub fn new(seed: u64, crash_one_in: u32) -> Self {
        Self::with(seed, crash_one_in, false, TIMEOUT)
    }

    /// The same, whose log does not leave a server that says nothing for a while: for what is done with a log on the server, and would
    /// find it on storage where the machine stands still.
    pub fn patient(seed: u64, crash_one_in: u32) -> Self {
        Self::with_timeout(seed, crash_one_in, PATIENCE)
    }

    /// The same, whose log leaves a server that says nothing for so long.
    pub fn with_timeout(seed: u64, crash_one_in: u32, timeout: Duration) -> Self {
        Self::with(seed, crash_one_in, false, timeout)
    }

    /// As [`Guest::new`], with `journal_async_commit`.
    pub fn with_async_commits(seed: u64, crash_one_in: u32) -> Self {
        Self::with(seed, crash_one_in, true, TIMEOUT)
    }

    fn with(seed: u64, crash_one_in: u32, is_async: bool, timeout: Duration) -> Self {
        let world = World::new(seed, crash_one_in, is_async, timeout);
        let mut random = Random(seed);
        let (superblock, format) = {
            let known = world.known.lock().expect("no panic under this lock");
            Superblock::parse(&known.superblock).expect("a journal")
        };
        let position = format.first + random.below(format.log_blocks());
        let builder = LogBuilder::new(format, position, superblock.sequence + 10);
        let life = Arc::new(Life::default());
        let log = Self::worker(&world, &life, 1, false).expect("a thread");
        log.set_batch_blocks_max([1, 3, 1000][random.below(3) as usize]);
        let mut guest = Guest {
            log,
            life,
            workers: 1,
            found: Vec::new(),
            is_killed_often: false,
            untold: BTreeMap::new(),
            random,
            blocks: (2900..2912).collect(),
            cache: BTreeMap::new(),
            data: HashSet::new(),
            owed: HashSet::new(),
            live: Vec::new(),
            builder,
            in_flight: Vec::new(),
            waiting: HashSet::new(),
            next_request: 0,
            next_content: seed << 20,
            is_async,
            has_barriers: seed % 3 != 1,
            holds_back: false,
            world,
        };
        for block in guest.blocks.clone() {
            let content = guest.world.known.lock().expect("no panic under this lock").disk.last(block);
            guest.cache.insert(block, content);
        }
        guest.open();
        guest
    }

    /// A worker that begins with the copy that has this number, or goes on with it.
    fn worker(world: &Arc<World>, life: &Arc<Life>, number: u32, goes_on: bool) -> io::Result<RemoteLog> {
        let back_off = BackOff { min: Duration::from_millis(2), max: Duration::from_millis(20) };
        let medium = Arc::new(Observed { world: Arc::downgrade(world), life: Arc::clone(life) });
        let options = world.guest_options();
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(world.copy_path(number));
        let file = file.expect("a file");
        // What one finds out of its disk, the next does not hear.
        let disk = world.open_disk();
        let disks = || [Arc::clone(&disk), Arc::clone(&disk)];
        let make = if goes_on { MirrorFile::take_up } else { MirrorFile::make };
        let mirror = Arc::new(make(file, &world.place).expect("a copy"));
        if goes_on && mirror.says().phase != Phase::Closed {
            RemoteLog::take_up_on_medium(&options, world.place.clone(), disks(), medium, back_off, mirror)
        } else {
            RemoteLog::on_medium(&options, world.place.clone(), disks(), medium, back_off, Some(mirror))
        }
    }

    /// The worker is dead. What it has said so far, to the server and in its copy, is all that it has said: who goes on with a copy
    /// that is older than what it sent would not know its own log.
    fn bury(&self) {
        self.life.kill();
        self.log.stop_as_killed();
    }

    /// What becomes of a worker that is to go on with a copy of what the one of now has left. It is killed.
    pub fn try_to_follow(&mut self, change: impl FnOnce(&MirrorFile)) -> io::Result<()> {
        self.bury();
        let number = u32::MAX;
        let path = self.world.copy_path(number);
        std::fs::copy(self.world.copy_path(self.workers), &path)?;
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path)?;
        change(&MirrorFile::take_up(file, &self.world.place)?);
        Self::worker(&self.world, &Arc::new(Life::default()), number, true).map(drop)
    }

    /// Asks something of the worker. Nothing where that has died.
    fn ask<T>(&mut self, what: impl Fn(&RemoteLog) -> T) -> Option<T> {
        if self.life.is_dead() {
            return None;
        }
        // Where its other thread died with a lock, this one fails: that is what a guest sees of it.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| what(&self.log))).ok()
    }

    /// The worker is killed, if it is not dead, and another one goes on: it has what the other left in files, and asks for whatever was
    /// not answered once more.
    pub fn follow(&mut self) {
        match self.random.below(4) {
            0 => self.world.network.reset(),
            1 => self.world.crash(),
            _ => {}
        }
        loop {
            self.bury();
            let number = self.workers + 1;
            std::fs::copy(self.world.copy_path(self.workers), self.world.copy_path(number)).expect("copied");
            // Nor does it say good-bye.
            self.life = Arc::new(Life::default());
            let next = Self::worker(&self.world, &self.life, number, true).expect("it goes on");
            std::mem::forget(std::mem::replace(&mut self.log, next));
            self.workers = number;
            let is_open = self.log.was_taken_up();
            self.found.push(is_open.then(|| self.log.mode()));
            // What the kernel had on its way arrives, and nobody hears of it.
            for done in std::mem::take(&mut self.in_flight) {
                self.world.known.lock().expect("no panic under this lock").disk.ended(done.write);
                if !done.is_stored {
                    self.waiting.remove(&done.request);
                }
            }
            if self.is_killed_often && self.random.below(2) == 0 {
                let steps = 1 + u64::from(self.random.below(40));
                self.life.kill_after(steps);
            }
            if self.ask(|log| log.go_on()).is_some() {
                break;
            }
        }
        let workers = self.workers;
        for (request, (position, block)) in self.untold.clone() {
            self.give_block(request, position, &block);
            if self.workers != workers {
                // The next one was given all of them.
                return;
            }
        }
    }

    /// Another worker comes, and does this before it serves the guest.
    pub fn follow_and<T>(&mut self, what: impl FnOnce(&RemoteLog) -> T) -> T {
        self.bury();
        let number = self.workers + 1;
        std::fs::copy(self.world.copy_path(self.workers), self.world.copy_path(number)).expect("copied");
        self.life = Arc::new(Life::default());
        let next = Self::worker(&self.world, &self.life, number, true).expect("it goes on");
        std::mem::forget(std::mem::replace(&mut self.log, next));
        self.workers = number;
        what(&self.log)
    }

    /// The worker that serves now is not killed any more.
    pub fn stop_kills(&mut self) {
        self.life.kill_after(0);
        self.is_killed_often = false;
        self.follow_if_dead();
    }

    /// The guest ends. A worker that has died does nothing about it.
    pub fn end(mut self) {
        self.stop_kills();
    }

    /// The guest ends, and its worker does nothing about it.
    pub fn end_with_worker(self) {
        self.life.kill();
        std::mem::forget(self.log);
    }

    /// The worker is killed now.
    pub fn kill_worker(&mut self) {
        self.life.kill();
        self.follow();
    }

    /// Lets the worker that has died, if it has, be followed.
    pub fn follow_if_dead(&mut self) {
        if self.life.is_dead() {
            self.follow();
        }
    }

    fn give_block(&mut self, request: u32, position: u32, block: &[u8]) {
        self.untold.insert(request, (position, block.to_vec()));
        let content: Arc<[u8]> = block.into();
        match self.ask(|log| log.write(position, Arc::clone(&content), RequestId(request))) {
            // Whoever goes on asks for it, too.
            None => self.follow(),
            Some(Outcome::Done) => {
                self.untold.remove(&request);
                self.waiting.remove(&request);
            }
            Some(Outcome::Held) => {
                self.waiting.insert(request);
            }
            Some(Outcome::Store) => {
                let place = &self.world.place;
                let offset = crate::scan::offset_of(&place.runs, place.block_bytes, position).expect("a place");
                let write = self.world.known.lock().expect("no panic under this lock").disk.write(offset, block);
                self.in_flight.push(InFlight { request, write, is_stored: true });
                self.waiting.insert(request);
            }
            Some(Outcome::Fail) => panic!("log block {position} fails"),
        }
    }

    fn end_pass(&mut self) {
        if self.ask(|log| log.end_of_pass()).is_none() {
            self.follow();
        }
    }

    /// The guest writes its superblock; the one that goes on does not know whether the other has told it.
    pub fn give_superblock(&mut self, block: &[u8]) {
        let superblock = Superblock::decode(block).expect("a superblock");
        loop {
            let told = self.ask(|log| match (superblock.is_empty(), log.mode()) {
                // It is merged into what storage says, or is the same.
                (true, Mode::Closed) => log.superblock_of_closed(block).map(drop),
                (true, _) => log.close(block),
                (false, Mode::Closed) => log.open(&superblock, block),
                (false, _) => log.superblock(&superblock, block),
            });
            match told {
                Some(outcome) => return outcome.expect("written"),
                None => self.follow(),
            }
        }
    }

    fn superblock(&self, start: u32, sequence: u32) -> Vec<u8> {
        let mut block = self.world.known.lock().expect("no panic under this lock").superblock.clone();
        SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        block
    }

    /// What the guest would say of its log, with features that it has not had.
    pub fn superblock_with(&self, incompat: u32) -> Vec<u8> {
        let mut block = self.world.known.lock().expect("no panic under this lock").superblock.clone();
        let known = u32::from_be_bytes(block[0x28..0x2c].try_into().expect("four bytes"));
        block[0x28..0x2c].copy_from_slice(&(known | incompat).to_be_bytes());
        SuperblockEdit::new(&mut block).expect("a superblock").seal();
        block
    }

    /// Opens the log, which is empty.
    fn open(&mut self) {
        let block = self.superblock(self.builder.position, self.builder.sequence);
        {
            let mut known = self.world.known.lock().expect("no panic under this lock");
            known.superblock = block.clone();
            known.committed = self.builder.sequence.wrapping_sub(1);
            known.begun = known.committed;
        }
        self.give_superblock(&block);
    }

    /// Everything goes home, and the log is over; then it is opened again, further on.
    pub fn close_and_open(&mut self) {
        self.close();
        self.world.crash();
        self.open_again();
    }

    /// Everything goes home, and the log is over. Gives the superblock that says so.
    pub fn close(&mut self) -> Vec<u8> {
        self.pass(usize::MAX);
        let block = self.superblock(0, self.builder.sequence);
        self.give_superblock(&block);
        block
    }

    /// The log is opened again. As jbd2 does: the next mount skips a number.
    pub fn open_again(&mut self) {
        self.builder = LogBuilder::new(self.builder.format, self.builder.position, self.builder.sequence + 1);
        self.open();
    }

    fn content(&mut self) -> Vec<u8> {
        self.next_content += 1;
        let mut content = vec![self.next_content as u8; BLOCK];
        content[512..520].copy_from_slice(&self.next_content.to_le_bytes());
        if self.random.below(4) == 0 {
            content[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        }
        content
    }

    pub fn flush(&mut self) {
        self.world.known.lock().expect("no panic under this lock").disk.flush();
    }

    /// A home block is written, or data past the journal.
    fn write_home(&mut self, block: u64) {
        self.next_request += 1;
        let content = self.cache[&block].clone();
        let write =
            self.world.known.lock().expect("no panic under this lock").disk.write(block * BLOCK as u64, &content);
        self.in_flight.push(InFlight { request: self.next_request, write, is_stored: false });
        self.waiting.insert(self.next_request);
        self.owed.remove(&block);
    }

    /// One write that storage has ends, whichever.
    pub fn end_one(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let index = self.random.below(self.in_flight.len() as u32) as usize;
        let done = self.in_flight.swap_remove(index);
        self.world.known.lock().expect("no panic under this lock").disk.ended(done.write);
        if done.is_stored {
            if self.ask(|log| log.stored()).is_none() {
                return self.follow();
            }
            self.untold.remove(&done.request);
        }
        self.waiting.remove(&done.request);
    }

    fn hear(&mut self) {
        let Some(done) = self.ask(|log| log.take_done()) else { return self.follow() };
        for (request, status) in done {
            assert_eq!(status, Status::Ok, "request {request:?} fails");
            assert!(self.waiting.remove(&request.0), "request {request:?} ends twice");
            self.untold.remove(&request.0);
        }
    }

    /// Waits for everything that is on its way.
    fn wait(&mut self) {
        let deadline = Instant::now() + LIMIT;
        while !self.waiting.is_empty() {
            self.end_one();
            self.hear();
            assert!(!self.world.has_failed.load(Ordering::SeqCst), "the other thread's judgement, above");
            assert!(Instant::now() < deadline, "{:?} waits for nothing", self.waiting);
            if self.in_flight.is_empty() && !self.waiting.is_empty() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn write_log(&mut self, position: u32, block: Vec<u8>) {
        self.next_request += 1;
        let request = self.next_request;
        {
            // Another thread may judge at any moment: a transaction has begun to count when its commit block is in the complete log.
            let mut known = self.world.known.lock().expect("no panic under this lock");
            if let Some(header) = jbd2::peek(&block).filter(|header| header.kind == jbd2::Kind::Commit) {
                known.begun = header.sequence;
            }
            known.log.insert(position, block.clone());
        }
        self.give_block(request, position, &block);
        if self.random.below(3) == 0 {
            self.end_pass();
        }
        if self.random.below(4) == 0 && !self.holds_back {
            self.end_one();
        }
    }

    /// A transaction that puts some blocks and revokes others, up to its commit block; [`Guest::end_commit`] does the rest.
    pub fn begin_commit(&mut self) {
        let tail = self.live.first().map_or(self.builder.position, |logged| logged.position);
        if self.builder.format.distance(tail, self.builder.position) > LIVE_MAX {
            self.pass(usize::MAX);
        }
        let (mut puts, mut revokes) = (Vec::new(), Vec::new());
        for block in self.blocks.clone() {
            match self.random.below(8) {
                0..3 => puts.push(block),
                3 if !self.data.contains(&block) => revokes.push(block),
                _ => {}
            }
        }
        if puts.is_empty() {
            puts.push(self.blocks[0]);
            revokes.retain(|block| *block != puts[0]);
        }
        let (position, sequence) = (self.builder.position, self.builder.sequence);
        let mut blocks = Vec::new();
        let mut known = Vec::new();
        for block in &puts {
            let content = self.content();
            self.cache.insert(*block, content.clone());
            blocks.push((*block, content.clone()));
            known.push((*block, Some(content)));
            self.data.remove(block);
            // Not to be written home before it is committed.
            self.owed.remove(block);
        }
        known.extend(revokes.iter().map(|block| (*block, None)));
        {
            let mut of_world = self.world.known.lock().expect("no panic under this lock");
            for (block, content) in known {
                of_world.versions.entry(block).or_default().push((sequence, content));
            }
        }
        let transaction = Transaction { blocks, revokes, ..Transaction::default() };
        let mut log = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        self.live.push(Logged { sequence, position, blocks: puts });
        self.data.extend(&transaction.revokes);
        self.owed.retain(|block| !transaction.revokes.contains(block));
        let (at, commit) = log.pop().expect("a commit block");
        for (position, block) in log {
            self.write_log(position, block);
        }
        self.end_pass();
        // As jbd2 does: the commit block is written when everything before it has ended, between two flushes.
        if !self.is_async && !self.holds_back {
            self.wait();
            self.flush_for_commit();
        }
        self.write_log(at, commit);
        self.end_pass();
    }

    /// A block of the live log is written once more, and storage does not end that: until [`Guest::go_on`] the log cannot be
    /// the server's alone.
    pub fn hang(&mut self) {
        self.holds_back = true;
        let position = self.live.last().expect("a transaction").position;
        let block = self.world.known.lock().expect("no panic under this lock").log[&position].clone();
        self.write_log(position, block);
        self.end_pass();
    }

    pub fn go_on(&mut self) {
        self.holds_back = false;
        self.wait();
    }

    /// Listens for a while; if the guest is told meanwhile that its last transaction is committed, it is.
    pub fn listen(&mut self) {
        let commit = self.next_request;
        for _ in 0..60 {
            self.hear();
            std::thread::sleep(Duration::from_millis(1));
        }
        if !self.waiting.contains(&commit) {
            let last = self.live.last().expect("a transaction").sequence;
            self.world.known.lock().expect("no panic under this lock").committed = last;
        }
    }

    /// A guest without barriers leaves the durability of a commit to whoever it was given to: to storage it can not.
    fn flush_for_commit(&mut self) {
        let is_remote_now = self.ask(|log| log.report().is_remote_now).unwrap_or(false);
        if self.has_barriers || !is_remote_now {
            self.flush();
        }
    }

    /// The guest is told that its transaction is committed.
    pub fn end_commit(&mut self) {
        self.wait();
        self.flush_for_commit();
        let Some(last) = self.live.last() else { return };
        self.owed.extend(&last.blocks);
        self.world.known.lock().expect("no panic under this lock").committed = last.sequence;
    }

    pub fn commit(&mut self) {
        self.begin_commit();
        self.end_commit();
    }

    /// Some block that was committed is written home, or some data.
    pub fn write_some_home(&mut self) {
        let block = self.blocks[self.random.below(self.blocks.len() as u32) as usize];
        if self.owed.contains(&block) {
            self.write_home(block);
        } else if self.data.contains(&block) {
            let content = self.content();
            self.cache.insert(block, content);
            self.write_home(block);
            self.wait();
        }
    }

    /// The log's tail passes so many transactions, which were written home.
    pub fn pass(&mut self, count: usize) {
        self.wait();
        let count = count.min(self.live.len());
        for block in self.live[..count].iter().flat_map(|logged| logged.blocks.clone()).collect::<Vec<_>>() {
            if self.owed.contains(&block) {
                self.write_home(block);
            }
        }
        self.wait();
        self.flush();
        self.live.drain(..count);
        let next = self.live.first().map(|logged| (logged.position, logged.sequence));
        let (start, sequence) = next.unwrap_or((self.builder.position, self.builder.sequence));
        let block = self.superblock(start, sequence);
        self.give_superblock(&block);
        self.end_pass();
        // It comes with a flush, before and after.
        self.flush();
        self.world.known.lock().expect("no panic under this lock").superblock = block;
    }

    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Reads the live log back.
    pub fn read_log(&mut self) {
        // Not under that lock: whoever writes to storage may hold the log's.
        let log = self.world.known.lock().expect("no panic under this lock").log.clone();
        for (position, content) in &log {
            let from = self.live.first().map_or(self.builder.position, |logged| logged.position);
            let format = self.builder.format;
            if format.distance(from, *position) < format.distance(from, self.builder.position) {
                let Some(read) = self.ask(|log| log.read(*position)) else { return self.follow() };
                let read = read.expect("read").expect("the live log is here");
                assert!(read[..] == content[..], "log block {position}");
            }
        }
    }

    /// Waits until the server has everything, and storage still counts.
    pub fn wait_until_switching(&mut self) {
        self.wait_for_mode(|mode| mode == Mode::Switching);
    }

    /// Waits until the log has left the server. It may be on storage already: on a busy machine this thread sees nothing in
    /// between.
    pub fn wait_until_falling_back(&mut self) {
        self.wait_for_mode(|mode| mode != Mode::Remote);
    }

    fn wait_for_mode(&mut self, is_it: impl Fn(Mode) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !self.ask(|log| log.mode()).is_some_and(&is_it) {
            self.hear();
            assert!(Instant::now() < deadline, "the log stays {:?}", self.log.mode());
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Waits, and ends nothing, until the log is complete on storage.
    pub fn wait_until_storage_has_it(&mut self) {
        let deadline = Instant::now() + LIMIT;
        while !self.ask(|log| log.is_on_storage()).unwrap_or(false) {
            self.hear();
            assert!(!self.world.has_failed.load(Ordering::SeqCst), "the other thread's judgement, above");
            assert!(Instant::now() < deadline, "the log does not come home");
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Waits until the log is on the server, or on storage.
    pub fn wait_until_remote(&mut self, is_remote: bool) {
        let deadline = Instant::now() + LIMIT;
        let is_there = |log: &RemoteLog| log.report().is_remote_now == is_remote && (is_remote || log.is_on_storage());
        while !self.ask(is_there).unwrap_or(false) {
            self.end_one();
            self.hear();
            assert!(!self.world.has_failed.load(Ordering::SeqCst), "the other thread's judgement, above");
            assert!(
                Instant::now() < deadline,
                "the log does not go {}: {:?}, worker {} is dead: {}, {:?}",
                if is_remote { "out" } else { "home" },
                self.log.mode(),
                self.workers,
                self.life.is_dead(),
                self.log.report()
            );
            std::thread::sleep(Duration::from_micros(500));
        }
    }
}
