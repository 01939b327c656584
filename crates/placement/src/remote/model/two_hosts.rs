//! Two hosts that reach one disk, each with its own way to the journal server: whoever was told that something is committed
//! finds it there in the end, whichever host that was, and somebody can always go on.
//!
//! The hosts are the real code; each reads and writes the disk through a gate at which the test stops it. Exhaustively: one
//! host is stopped before each of its steps on storage, in turn, while the other does all that it does; with the one
//! exception that the two rely on: what a host has checked and is about to write is there before the other has ended
//! its wait. And at random: hosts come, are cut off, die, and images are copied and put back.

mod failed_flushes;

use super::network::{Network, Weather};
use super::standstill::unless_it_stood_still;
use super::world::{BLOCK, PATIENCE as SERVER_PATIENCE, client_options, image, small, start_server};
use crate::disk::Disk as VmDisk;
use crate::remote::lineage::Lineage;
use crate::remote::recover::{Taking, recover_through, unlocked};
use crate::remote::state::{Mode, Outcome};
use crate::remote::tests::Random;
use crate::remote::{BackOff, JournalStorage, MarkFound, RemoteLog, RemoteMark, RemoteOptions, RemoteRecovered};
use crate::scan::FoundLogPlace;
use block_route::{RequestId, Status};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Superblock, SuperblockEdit};
use recovery::Error;
use remote_journal::Server;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Nothing that has to happen takes longer.
const LIMIT: Duration = Duration::from_secs(30);
/// After which a host gives the server up, where nothing else is said.
const TIMEOUT: Duration = Duration::from_millis(150);
/// How long a host waits for what the other has on its way.
const PATIENCE: Duration = Duration::from_millis(40);
/// Blocks of which transactions make versions.
const BLOCKS: std::ops::Range<u64> = 2900..2908;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Read,
    Write,
    Sync,
    Forget,
}

#[derive(Debug, Default)]
struct GateState {
    steps: Vec<Step>,
    /// Before which step it stops.
    stop_before: Option<usize>,
    is_stopped: bool,
    /// Where it is stopped, it is about to write what it has checked.
    is_writing: bool,
    /// The host has died: nothing of it reaches the disk any more.
    is_dead: bool,
    /// The file system of the image has no room.
    is_full: bool,
    /// After which step, if that is a write, a flush fails that somebody else has asked for, and whether that has happened.
    loses: Option<usize>,
    has_lost: bool,
}

/// What is between a host and the disk.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().expect("no panic under this lock")
    }

    fn pass(&self, step: Step) -> io::Result<()> {
        let mut state = self.lock();
        if state.stop_before.is_some_and(|step| state.steps.len() >= step) {
            (state.is_stopped, state.is_writing) = (true, step == Step::Write);
            self.changed.notify_all();
            state = self.changed.wait_while(state, |state| state.stop_before.is_some()).expect("no panic");
            state.is_stopped = false;
        }
        state.steps.push(step);
        if state.is_full && step == Step::Write {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if state.is_dead { Err(io::Error::other("this host is dead")) } else { Ok(()) }
    }

    /// It does something at which nothing can go wrong.
    fn note(&self, step: Step) {
        self.lock().steps.push(step);
    }

    /// Stops the host before the step with this number, counted from now.
    fn stop_before(&self, step: usize) {
        let mut state = self.lock();
        state.steps.clear();
        state.stop_before = Some(step);
    }

    /// Waits until it is stopped; false when it has done what it does without so many steps.
    fn wait_until_stopped(&self, has_ended: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + LIMIT;
        while !self.lock().is_stopped {
            if has_ended() {
                return false;
            }
            assert!(Instant::now() < deadline, "the host neither stops nor ends: {:?}", self.lock().steps);
            std::thread::sleep(Duration::from_micros(500));
        }
        true
    }

    fn go_on(&self) {
        self.lock().stop_before = None;
        self.changed.notify_all();
    }

    /// What is on its way arrives before the other has ended its wait.
    fn end_write(&self) {
        let mut state = self.lock();
        if state.is_stopped && state.is_writing {
            state.stop_before = None;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |state| state.is_writing).expect("no panic"));
        }
    }

    /// Whether what has just been written is lost, and somebody else is told.
    fn loses(&self) -> bool {
        let mut state = self.lock();
        let loses = state.loses.is_some_and(|step| step + 1 == state.steps.len());
        state.has_lost |= loses;
        loses
    }

    fn written(&self) {
        self.lock().is_writing = false;
        self.changed.notify_all();
    }
}

/// The disk as a host reaches it.
struct Gated {
    disk: Arc<VmDisk>,
    gate: Arc<Gate>,
    /// The other's, which goes on while this one waits for it.
    other: Arc<Gate>,
}

impl JournalStorage for Gated {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let passed = self.gate.pass(Step::Write);
        let written = passed.and_then(|()| self.disk.file.write_all_at(bytes, offset));
        if self.gate.loses() {
            self.disk.note_failed_flush();
        }
        self.gate.written();
        written
    }

    fn failed_flushes(&self) -> u64 {
        self.disk.file.failed_flushes()
    }

    fn sync_since(&self, failed: u64) -> io::Result<()> {
        self.gate.pass(Step::Sync)?;
        self.disk.file.sync_since(failed)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.gate.pass(Step::Read)?;
        self.disk.file.read_exact_at(bytes, offset)
    }

    fn forget_cached(&self) {
        self.gate.note(Step::Forget);
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn wait_for_others(&self) {
        self.other.end_write();
        std::thread::sleep(PATIENCE);
    }
}

/// What a block may hold: what somebody was last told is committed, or something newer that nobody was told of.
type Possible = BTreeMap<u64, Vec<Vec<u8>>>;

/// What a transaction's guest waits for, and what it put where.
type Told = (u32, Vec<(u64, Vec<u8>)>);

/// A guest that a host runs, with its log open.
struct Running {
    log: RemoteLog,
    builder: LogBuilder,
    superblock: Vec<u8>,
    /// Since where the log is live, and what it put in its blocks since then.
    tail: (u32, u32),
    owed: BTreeMap<u64, Vec<u8>>,
    requests: u32,
}

struct Host {
    gate: Arc<Gate>,
    network: Network,
    running: Option<Running>,
}

struct Cluster {
    directory: Arc<tempfile::TempDir>,
    path: PathBuf,
    disk: Arc<VmDisk>,
    place: FoundLogPlace,
    remote: Arc<Server>,
    hosts: [Host; 2],
    possible: Possible,
    next_content: u64,
    /// What is tried, for who reads of a failure.
    what: String,
    /// After which a host gives the server up.
    timeout: Duration,
}

fn open_disk(path: &Path) -> Arc<VmDisk> {
    Arc::new(VmDisk::open(super::world::options(path.to_owned())).expect("the image"))
}

fn scanned(path: &Path) -> Vec<FoundLogPlace> {
    crate::scan::scan(&[open_disk(path)]).expect("scanned").logs
}

impl Cluster {
    fn new() -> Self {
        let directory = Arc::new(tempfile::tempdir_in("/dev/shm").expect("tmpfs"));
        let path = directory.path().join("image");
        std::fs::write(&path, image()).expect("written");
        let place = scanned(&path).remove(0);
        Self::of(directory, path, place, Arc::new(start_server()))
    }

    /// The logs of two file systems on one disk, each as if it were alone there.
    fn two_logs() -> [Self; 2] {
        let directory = Arc::new(tempfile::tempdir_in("/dev/shm").expect("tmpfs"));
        let path = directory.path().join("image");
        let mut disk = vec![0; 8 << 20];
        for (number, start) in [1_usize << 20, 4 << 20].into_iter().enumerate() {
            let file_system = image();
            disk[start..start + file_system.len()].copy_from_slice(&file_system);
            let entry = &mut disk[446 + 16 * number..][..16];
            entry[4] = 0x83;
            entry[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
            entry[12..].copy_from_slice(&((file_system.len() / 512) as u32).to_le_bytes());
        }
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        std::fs::write(&path, disk).expect("written");
        let places: [FoundLogPlace; 2] = scanned(&path).try_into().expect("two logs");
        let remote = Arc::new(start_server());
        places.map(|place| Self::of(Arc::clone(&directory), path.clone(), place, Arc::clone(&remote)))
    }

    fn of(directory: Arc<tempfile::TempDir>, path: PathBuf, place: FoundLogPlace, remote: Arc<Server>) -> Self {
        let disk = open_disk(&path);
        let at = crate::scan::offset_of(&place.runs, place.block_bytes, 0).expect("a place");
        let mut superblock = vec![0; BLOCK];
        disk.file.read_exact_at(&mut superblock, at).expect("read");
        disk.file.write_all_at(&small(superblock), at).expect("written");
        let host = || {
            let network = Network::new();
            network.lead_to(Some(remote.address()));
            Host { gate: Arc::default(), network, running: None }
        };
        let hosts = [host(), host()];
        let mut cluster = Cluster {
            directory,
            path,
            disk,
            place,
            remote,
            hosts,
            possible: BTreeMap::new(),
            next_content: 0,
            what: String::new(),
            timeout: TIMEOUT,
        };
        for block in BLOCKS {
            let content = cluster.block(block);
            cluster.possible.insert(block, vec![content]);
        }
        cluster
    }

    fn block(&self, block: u64) -> Vec<u8> {
        let mut content = vec![0; BLOCK];
        let at = self.place.home_start + block * BLOCK as u64;
        self.disk.file.read_exact_at(&mut content, at).expect("read");
        content
    }

    fn superblock_at(&self) -> u64 {
        crate::scan::offset_of(&self.place.runs, self.place.block_bytes, 0).expect("a place")
    }

    fn superblock(&self) -> Vec<u8> {
        let mut superblock = vec![0; BLOCK];
        self.disk.file.read_exact_at(&mut superblock, self.superblock_at()).expect("read");
        superblock
    }

    fn is_marked(&self) -> bool {
        matches!(RemoteMark::read(&self.superblock()), MarkFound::Live(_))
    }

    fn options(&self, host: usize) -> RemoteOptions {
        client_options(self.hosts[host].network.address, self.timeout)
    }

    /// Whoever recovers does not give the server up, however slow this machine is.
    fn recovery_options(&self, host: usize) -> RemoteOptions {
        client_options(self.hosts[host].network.address, SERVER_PATIENCE)
    }

    fn medium(&self, host: usize) -> Arc<dyn JournalStorage> {
        let (gate, other) = (Arc::clone(&self.hosts[host].gate), Arc::clone(&self.hosts[1 - host].gate));
        Arc::new(Gated { disk: Arc::clone(&self.disk), gate, other })
    }

    /// What `amberlog recover` does on a host.
    fn recover(&self, host: usize) -> Result<Vec<RemoteRecovered>, Error> {
        let medium = self.medium(host);
        let through = |_| Arc::clone(&medium);
        let disks = vec![unlocked(&self.path, false)?];
        recover_through(disks, &self.recovery_options(host), false, (false, Taking::Anybodys), &through)
    }

    /// A guest mounts the file system, of which the log is empty and on storage.
    fn open(&mut self, host: usize) {
        let superblock = self.superblock();
        let (decoded, format) = Superblock::parse(&superblock).expect("a superblock");
        let is_free = matches!(RemoteMark::read(&superblock), MarkFound::None | MarkFound::Stale);
        assert!(decoded.is_empty() && is_free, "it was recovered, or given up");
        // What nobody was told of is there or not: now it is known.
        for block in BLOCKS {
            let content = self.block(block);
            if !self.possible[&block].contains(&content) {
                let version = |content: &[u8]| u64::from_le_bytes(std::array::from_fn(|index| content[512 + index]));
                let expected: Vec<u64> = self.possible[&block].iter().map(|content| version(content)).collect();
                panic!("{}: block {block} has version {}, not of {expected:?}", self.what, version(&content));
            }
            self.possible.insert(block, vec![content]);
        }
        let builder = LogBuilder::new(format, format.first, decoded.sequence + 1);
        let tail = (builder.position, builder.sequence);
        let block = Self::superblock_of(&superblock, tail);
        let log = self.attach(host, &open_disk(&self.path));
        let requests = 0;
        if log.open(&Superblock::decode(&block).expect("a superblock"), &block).is_ok() {
            self.hosts[host].running =
                Some(Running { log, builder, superblock, tail, owed: BTreeMap::new(), requests });
        }
    }

    /// A VM has the disk, and its log is closed. The disk is as another host has it: what one of them finds out of its own, the other
    /// does not.
    fn attach(&self, host: usize, disk: &Arc<VmDisk>) -> RemoteLog {
        let back_off = BackOff { min: Duration::from_millis(2), max: Duration::from_millis(20) };
        let disks = [Arc::clone(disk), Arc::clone(disk)];
        let (options, medium) = (self.options(host), self.medium(host));
        RemoteLog::on_medium(&options, self.place.clone(), disks, medium, back_off, None).expect("a thread")
    }

    fn superblock_of(old: &[u8], (start, sequence): (u32, u32)) -> Vec<u8> {
        let mut block = old.to_vec();
        RemoteMark::remove_from(&mut block);
        SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).errno(0).seal();
        block
    }

    /// Recovers and mounts; false when somebody else was faster, or the server cannot be reached.
    fn start(&mut self, host: usize) -> bool {
        match self.recover(host) {
            Ok(_) => {}
            Err(Error::Failed { .. }) => return false,
            Err(refused) => panic!("{refused}"),
        }
        let is_ours =
            Superblock::decode(&self.superblock()).is_ok_and(|superblock| superblock.is_empty()) && !self.is_marked();
        if is_ours {
            self.open(host);
        }
        is_ours
    }

    /// A transaction up to its commit block; whoever waits for that is given.
    fn begin_commit(&mut self, host: usize) -> Option<Told> {
        let (next, disk, place) = (&mut self.next_content, &self.disk, &self.place);
        let running = self.hosts[host].running.as_mut()?;
        let mut blocks = Vec::new();
        for block in BLOCKS.step_by(1 + (*next % 3) as usize) {
            *next += 1;
            let mut content = vec![*next as u8; BLOCK];
            content[512..520].copy_from_slice(&next.to_le_bytes());
            blocks.push((block, content));
        }
        let transaction = Transaction { blocks: blocks.clone(), ..Transaction::default() };
        let mut log = Vec::new();
        running.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        for (block, content) in &blocks {
            self.possible.get_mut(block).expect("a block of ours").push(content.clone());
        }
        let mut held = None;
        for (position, block) in log {
            running.requests += 1;
            match running.log.write(position, block.as_slice().into(), RequestId(running.requests)) {
                Outcome::Done => held = None,
                Outcome::Held => held = Some(running.requests),
                Outcome::Store => {
                    let at = crate::scan::offset_of(&place.runs, place.block_bytes, position).expect("a place");
                    disk.file.write_all_at(&block, at).expect("written");
                    running.log.stored();
                    held = None;
                }
                Outcome::Fail => return None,
            }
        }
        running.log.end_of_pass();
        Some((held.unwrap_or(0), blocks))
    }

    /// Waits until the guest is told; whether it is told that all is well.
    fn end_commit(&mut self, host: usize, waiting: Told) -> bool {
        let (request, blocks) = waiting;
        let Some(running) = self.hosts[host].running.as_mut() else { return false };
        let deadline = Instant::now() + LIMIT;
        let mut told = (request == 0).then_some(Status::Ok);
        while told.is_none() {
            told = running.log.take_done().into_iter().find(|(done, _)| done.0 == request).map(|(_, status)| status);
            assert!(Instant::now() < deadline, "nobody is told: {:?}", running.log.mode());
            std::thread::sleep(Duration::from_micros(200));
        }
        if told != Some(Status::Ok) {
            return false;
        }
        for (block, content) in blocks {
            running.owed.insert(block, content.clone());
            self.possible.insert(block, vec![content]);
        }
        true
    }

    fn commit(&mut self, host: usize) -> bool {
        match self.begin_commit(host) {
            Some(waiting) => self.end_commit(host, waiting),
            None => false,
        }
    }

    /// Everything is written home, and the log's tail moves there.
    fn pass(&mut self, host: usize) -> bool {
        let (disk, home_start) = (Arc::clone(&self.disk), self.place.home_start);
        let Some(running) = self.hosts[host].running.as_mut() else { return false };
        for (block, content) in std::mem::take(&mut running.owed) {
            disk.file.write_all_at(&content, home_start + block * BLOCK as u64).expect("written");
        }
        running.tail = (running.builder.position, running.builder.sequence);
        let block = Self::superblock_of(&running.superblock, running.tail);
        let moved = running.log.superblock(&Superblock::decode(&block).expect("a superblock"), &block).is_ok();
        running.log.end_of_pass();
        moved
    }

    /// The guest unmounts.
    fn close(&mut self, host: usize) -> bool {
        if !self.pass(host) {
            return false;
        }
        let Some(running) = self.hosts[host].running.take() else { return false };
        let block = Self::superblock_of(&running.superblock, (0, running.builder.sequence));
        running.log.close(&block).is_ok()
    }

    fn wait_for(&self, host: usize, is_it: impl Fn(Mode) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !is_it(self.mode(host)) {
            assert!(Instant::now() < deadline, "the log stays {:?}", self.mode(host));
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn mode(&self, host: usize) -> Mode {
        self.hosts[host].running.as_ref().map_or(Mode::Closed, |running| running.log.mode())
    }

    /// The host loses power.
    fn kill(&mut self, host: usize) {
        self.hosts[host].gate.lock().is_dead = true;
        self.hosts[host].gate.go_on();
        self.hosts[host].network.reset();
        self.hosts[host].network.lead_to(None);
        self.hosts[host].running = None;
        self.hosts[host].gate = Arc::default();
        self.hosts[host].network = Network::new();
        self.hosts[host].network.lead_to(Some(self.remote.address()));
    }

    fn cut(&self, host: usize) {
        self.hosts[host].network.set(Weather::Swallows);
    }

    fn mend(&self, host: usize) {
        self.hosts[host].network.set(Weather::Good);
        self.hosts[host].network.reset();
    }

    /// Both hosts are gone: what was acknowledged, by whichever, is there; and a third goes on with it.
    fn judge(&mut self) {
        self.judge_the_disk();
        self.wait_for(0, |mode| mode == Mode::Remote);
        assert!(self.commit(0), "{}: nobody can commit on the server", self.what);
    }

    /// The same where somebody else may have the name on the server.
    fn judge_the_disk(&mut self) {
        let what = self.what.clone();
        (0..2).for_each(|host| self.kill(host));
        let mut started = false;
        // Whoever finds a claim that somebody died with does not wait for that one for ever.
        for _ in 0..3 {
            started = started || self.start(0);
        }
        assert!(started, "{what}: nobody can go on");
        assert!(self.commit(0), "{what}: nobody can commit");
    }
}

/// What one host does, while it is stopped on the way.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// It is cut off, with a commit on its way, and falls back.
    FallBack,
    /// Its guest is gone, and it settles.
    Settle,
    Close,
    MoveTail,
    /// It was cut off, and comes back.
    Return,
}

const ACTS: [Act; 5] = [Act::FallBack, Act::Settle, Act::Close, Act::MoveTail, Act::Return];

/// The first host runs, and does this, stopped before one of its steps; the second takes over, in all of its steps. Gives
/// whether it came to that step at all.
fn take_over_in_the_midst(act: Act, step: usize, falls_back: bool) -> bool {
    let mut cluster = Cluster::new();
    cluster.what = format!("{act:?}, stopped before step {step}");
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
    if matches!(act, Act::Return) {
        cluster.cut(0);
        cluster.wait_for(0, |mode| mode == Mode::Storage);
        assert!(cluster.commit(0));
    }
    let gate = Arc::clone(&cluster.hosts[0].gate);
    gate.stop_before(step);
    let mut waiting = None;
    if matches!(act, Act::FallBack) {
        cluster.cut(0);
        waiting = cluster.begin_commit(0);
    }
    if matches!(act, Act::Return) {
        cluster.mend(0);
    }
    let mut first = cluster.hosts[0].running.take().expect("it runs");
    let reached = std::thread::scope(|scope| {
        let block = Cluster::superblock_of(&first.superblock, (first.builder.position, first.builder.sequence));
        let closed = Cluster::superblock_of(&first.superblock, (0, first.builder.sequence));
        if matches!(act, Act::MoveTail | Act::Close) {
            for (block, content) in &std::mem::take(&mut first.owed) {
                cluster.disk.file.write_all_at(content, block * BLOCK as u64).expect("written");
            }
        }
        let log = &first.log;
        let acting = scope.spawn(move || match act {
            Act::FallBack | Act::Return => Ok(()),
            Act::Settle => log.settle(),
            Act::Close => log.close(&closed),
            Act::MoveTail => log.superblock(&Superblock::decode(&block).expect("a superblock"), &block),
        });
        let is_over = || match act {
            // It may be stopped while it has what this asks for.
            Act::FallBack => matches!(log.try_mode(), Some(Mode::Storage | Mode::Failed)),
            Act::Return => matches!(log.try_mode(), Some(Mode::Remote | Mode::Failed)),
            _ => acting.is_finished(),
        };
        let reached = gate.wait_until_stopped(is_over);
        // A disk that does not say that its journal is elsewhere is not taken over: that would be a disk that two mount.
        if reached && cluster.is_marked() && cluster.start(1) {
            // It is told of more, which the first knows nothing of.
            assert!(cluster.commit(1), "{act:?}, step {step}");
            cluster.wait_for(1, |mode| mode == Mode::Remote);
            assert!(cluster.commit(1), "{act:?}, step {step}");
            if falls_back {
                // So that its log is where the first would write.
                cluster.cut(1);
                cluster.wait_for(1, |mode| mode == Mode::Storage);
                assert!(cluster.commit(1), "{act:?}, step {step}");
            }
        }
        gate.go_on();
        let _ = acting.join().expect("no panic");
        reached
    });
    if !matches!(act, Act::Close | Act::Settle) {
        cluster.hosts[0].running = Some(first);
    }
    if let Some(waiting) = waiting {
        cluster.end_commit(0, waiting);
    }
    // Whatever it believes: what it is told is committed from here on counts as well.
    cluster.commit(0);
    cluster.mend(0);
    cluster.commit(0);
    if matches!(cluster.mode(1), Mode::Remote | Mode::Storage) {
        assert!(cluster.commit(1), "{}: the second is disturbed", cluster.what);
    }
    cluster.judge();
    reached
}

#[test]
fn a_host_that_is_overtaken_at_any_step_loses_nothing() {
    for act in ACTS {
        let mut steps = 0;
        while take_over_in_the_midst(act, steps, false) {
            steps += 1;
        }
        // All of them in a long run.
        let every = if std::env::var_os("AMBERLOG_REMOTE_SEEDS").is_some() { 1 } else { 4 };
        (0..steps).step_by(every).for_each(|step| _ = take_over_in_the_midst(act, step, true));
        let least = if matches!(act, Act::Return) { 3 } else { 2 };
        assert!(steps >= least, "{act:?} has {steps} steps on storage");
        println!("{act:?}: {steps} steps");
    }
}

/// The other way: the second host recovers, and is stopped before one of its steps; the first, cut off, falls back meanwhile.
#[test]
fn a_recovery_that_is_overtaken_at_any_step_loses_nothing() {
    let mut step = 0;
    loop {
        let mut cluster = Cluster::new();
        cluster.what = format!("recovery, stopped before step {step}");
        // The first is cut off, and finds that out when the second has come to that step.
        cluster.timeout = Duration::from_secs(5);
        assert!(cluster.start(0));
        cluster.wait_for(0, |mode| mode == Mode::Remote);
        assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
        let gate = Arc::clone(&cluster.hosts[1].gate);
        gate.stop_before(step);
        cluster.cut(0);
        let waiting = cluster.begin_commit(0).expect("it has the log");
        let (medium, options, path) = (cluster.medium(1), cluster.recovery_options(1), cluster.path.clone());
        let recovering = std::thread::spawn(move || {
            let through = |_| Arc::clone(&medium);
            // Where the journal is on storage already, it is not ours to replay while somebody runs the disk.
            let disks = vec![unlocked(&path, false).expect("the image")];
            recover_through(disks, &options, false, (true, Taking::Anybodys), &through)
        });
        let reached = gate.wait_until_stopped(|| recovering.is_finished());
        cluster.hosts[0].network.reset();
        if reached {
            let is_told = cluster.end_commit(0, waiting);
            // It goes on for a while, if it has the disk.
            let goes_on = cluster.commit(0);
            assert_eq!(is_told, goes_on, "step {step}");
        }
        gate.go_on();
        let recovered = recovering.join().expect("no panic");
        if let Err(Error::Refused(reason) | Error::Damaged(reason)) = &recovered {
            panic!("step {step}: {reason}");
        }
        if !reached {
            assert!(recovered.is_ok() && step > 8, "{step} steps: {recovered:?}, {:?}", gate.lock().steps);
            println!("recovery: {step} steps");
            return;
        }
        // One that has the disk is told of more; the other is told of nothing.
        cluster.commit(0);
        cluster.judge();
        step += 1;
    }
}

/// Storage takes longer for a step than the server may be silent: the server has said nothing wrong, and nobody has listened.
#[test]
fn a_server_is_not_given_up_because_storage_is_slow() {
    const TIMEOUT: Duration = Duration::from_millis(300);
    let mut step = 0;
    // A third of what the server may be silent for.
    while unless_it_stood_still(TIMEOUT / 3, || storage_is_slow_at(step, TIMEOUT)) {
        step += 1;
    }
    assert!(step > 3, "{step} steps");
}

/// Whether it came to that step; an error where the log has left the server.
fn storage_is_slow_at(step: usize, timeout: Duration) -> Result<bool, String> {
    let mut cluster = Cluster::new();
    cluster.what = format!("storage is slow at step {step}");
    cluster.timeout = timeout;
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    cluster.cut(0);
    cluster.wait_for(0, |mode| mode == Mode::Storage);
    assert!(cluster.commit(0));
    let gate = Arc::clone(&cluster.hosts[0].gate);
    gate.stop_before(step);
    let log = &cluster.hosts[0].running.as_ref().expect("it runs").log;
    let connects = log.report().connects;
    cluster.mend(0);
    let reached = gate.wait_until_stopped(|| matches!(log.try_mode(), Some(Mode::Remote)));
    if reached {
        std::thread::sleep(3 * timeout);
    }
    gate.go_on();
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    std::thread::sleep(2 * timeout);
    let log = &cluster.hosts[0].running.as_ref().expect("it runs").log;
    let (connects, mode) = (log.report().connects - connects, log.mode());
    assert!(cluster.commit(0), "{}", cluster.what);
    if connects != 1 || mode != Mode::Remote {
        return Err(format!("{}: {connects} connections, and then {mode:?}", cluster.what));
    }
    Ok(reached)
}

/// What a host has read of a disk before the disk is its own may have been written since, by a host that had it: it is read once more, from
/// the device, before it is brought home, and before a page of it is written back.
#[test]
fn a_recovery_goes_by_nothing_that_it_has_read_before_its_claim() {
    let mut cluster = Cluster::new();
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
    cluster.kill(0);
    assert!(cluster.start(1));
    let steps = cluster.hosts[1].gate.lock().steps.clone();
    let writes: Vec<usize> = (0..steps.len()).filter(|number| steps[*number] == Step::Write).collect();
    let forgets: Vec<usize> = (0..steps.len()).filter(|number| steps[*number] == Step::Forget).collect();
    let [at_first, before_claim, after_claim] = forgets[..] else { panic!("{steps:?}") };
    assert!(
        at_first == 0 && before_claim < writes[0] && after_claim > writes[0] && after_claim < writes[1],
        "{steps:?}"
    );
    assert!(steps[writes[0]..after_claim].contains(&Step::Sync), "what is not on storage is not forgotten: {steps:?}");
    assert!(!steps[before_claim..writes[0]].contains(&Step::Sync), "{steps:?}");
    cluster.judge();
}

/// The second host recovers, and is stopped before the server hears each of the things that it says; the first, whose network is well,
/// moves its log's tail meanwhile. That is no older copy, and nothing that is refused.
#[test]
fn a_recovery_beside_a_writer_is_not_refused() {
    for said in 0.. {
        let mut cluster = Cluster::new();
        cluster.what = format!("recovery, stopped before it has said {said}");
        cluster.timeout = Duration::from_secs(5);
        assert!(cluster.start(0));
        cluster.wait_for(0, |mode| mode == Mode::Remote);
        assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
        cluster.hosts[1].network.stop_before(said);
        let (medium, options, path) = (cluster.medium(1), cluster.recovery_options(1), cluster.path.clone());
        let recovering = std::thread::spawn(move || {
            let through = |_| Arc::clone(&medium);
            let disks = vec![unlocked(&path, false).expect("the image")];
            recover_through(disks, &options, false, (true, Taking::Anybodys), &through)
        });
        let deadline = Instant::now() + LIMIT;
        while !cluster.hosts[1].network.is_stopped() && !recovering.is_finished() {
            assert!(Instant::now() < deadline, "{}", cluster.what);
            std::thread::sleep(Duration::from_millis(1));
        }
        let reached = !recovering.is_finished();
        if reached {
            // Until it is fenced off.
            let _ = cluster.pass(0) && cluster.commit(0);
        }
        cluster.hosts[1].network.go_on();
        if let Err(Error::Refused(reason) | Error::Damaged(reason)) = recovering.join().expect("no panic") {
            panic!("{}: {reason}", cluster.what);
        }
        cluster.judge();
        if !reached {
            assert!(said > 4, "it says {said} things");
            return;
        }
    }
}

/// An image that was copied while its journal was on the server, and is put back when the server has gone on: it is refused, or
/// all that was acknowledged is in it. The true one is recovered after that, whatever was done with the copy.
#[test]
fn an_older_image_is_refused_or_recovered_right() {
    for later in 0..4 {
        let mut cluster = Cluster::new();
        cluster.what = format!("{later} tails later");
        assert!(cluster.start(0));
        cluster.wait_for(0, |mode| mode == Mode::Remote);
        assert!(cluster.commit(0));
        let copy = std::fs::read(&cluster.path).expect("read");
        assert!(cluster.commit(0));
        (0..later).for_each(|_| assert!(cluster.pass(0) && cluster.commit(0)));
        cluster.kill(0);
        let truth = std::fs::read(&cluster.path).expect("read");
        std::fs::write(&cluster.path, &copy).expect("written");
        match cluster.recover(1) {
            // The tail has not moved: all that was committed since is in the log.
            Ok(_) if later == 0 => {
                for block in BLOCKS {
                    assert!(cluster.possible[&block].contains(&cluster.block(block)), "block {block} is an older one");
                }
            }
            Err(Error::Refused(reason)) if later > 0 => {
                assert!(reason.contains("older copy") && reason.contains("nothing was changed"), "{reason}");
                assert!(std::fs::read(&cluster.path).expect("read") == copy, "it was changed");
            }
            other => panic!("{later} tails later: {other:?}"),
        }
        std::fs::write(&cluster.path, &truth).expect("written");
        cluster.judge();
    }
}

/// Both logs are on the server, and something was committed in each.
fn two_logs_on_the_server(what: String) -> [Cluster; 2] {
    let mut clusters = Cluster::two_logs();
    for cluster in &mut clusters {
        cluster.what.clone_from(&what);
        // Neither is given up because this machine is slow.
        cluster.timeout = Duration::from_secs(5);
        cluster.open(0);
    }
    for cluster in &mut clusters {
        cluster.wait_for(0, |mode| mode == Mode::Remote);
        assert!(cluster.commit(0), "{what}");
    }
    clusters
}

/// A VM has two logs on its disk, of which one is idle since the disk was copied, and fits the copy. The other one does not, and so the copy
/// is refused; neither is taken from the VM that runs.
#[test]
fn an_older_image_is_refused_before_one_of_its_logs_is_taken() {
    for busy in 0..2 {
        for only_marked in [false, true] {
            let what = format!("log {busy} goes on; only what is marked: {only_marked}");
            let mut clusters = two_logs_on_the_server(what.clone());
            let copy = std::fs::read(&clusters[0].path).expect("read");
            assert!(clusters[busy].commit(0) && clusters[busy].pass(0) && clusters[busy].commit(0), "{what}");
            let path = clusters[0].directory.path().join("copy");
            std::fs::write(&path, &copy).expect("written");
            let disks = vec![unlocked(&path, false).expect("the copy")];
            let taking = (only_marked, Taking::Anybodys);
            match recover_through(disks, &clusters[0].recovery_options(1), false, taking, &|disk| disk) {
                Err(Error::Refused(reason)) => assert!(reason.contains("older copy"), "{what}: {reason}"),
                other => panic!("{what}: {other:?}"),
            }
            assert!(std::fs::read(&path).expect("read") == copy, "{what}: the copy was changed");
            for cluster in &mut clusters {
                assert!(cluster.commit(0) && cluster.mode(0) == Mode::Remote, "{what}: it was fenced off");
            }
            // The true one is brought home, both logs of it.
            clusters.iter_mut().for_each(|cluster| cluster.kill(0));
            assert_eq!(clusters[0].recover(1).expect("they are there").len(), 2, "{what}");
            for cluster in &mut clusters {
                cluster.open(0);
                assert!(cluster.commit(0), "{what}");
            }
        }
    }
}

/// Nobody writes one of two logs any more, and somebody writes the other: a start that may not have that changes nothing.
#[test]
fn a_start_that_may_not_have_one_log_leaves_the_other_on_the_server() {
    let mut clusters = two_logs_on_the_server("a start".to_owned());
    clusters[0].kill(0);
    let (path, before) = (clusters[0].path.clone(), clusters[0].superblock());
    let options = clusters[0].recovery_options(1);
    let start = || {
        let disks = vec![unlocked(&path, false).expect("the image")];
        recover_through(disks, &options, false, (true, Taking::NobodysThere), &|disk| disk)
    };
    let error = start().expect_err("somebody writes to it");
    assert!(error.to_string().contains("is written by a client that is connected"), "{error}");
    assert!(clusters[0].superblock() == before, "it was changed");
    assert!(clusters[1].commit(0), "it was fenced off");
    clusters[1].kill(0);
    assert_eq!(start().expect("they are there").len(), 2);
    for cluster in &mut clusters {
        cluster.open(0);
        assert!(cluster.commit(0));
    }
}

/// Nobody can tell whose the blocks of a file system are: a start is refused where a server has its journal, and goes on where none has.
#[test]
fn a_start_minds_what_is_left_alone_where_a_server_has_it() {
    let mut clusters = two_logs_on_the_server("left alone".to_owned());
    clusters.iter_mut().for_each(|cluster| cluster.kill(0));
    let path = clusters[0].path.clone();
    let options = clusters[0].recovery_options(1);
    let recover = |only_marked| {
        let disks = vec![unlocked(&path, false).expect("the image")];
        recover_through(disks, &options, false, (only_marked, Taking::NobodysThere), &|disk| disk)
    };
    // The second partition is larger than its file system, and DRBD's metadata is at its end.
    let mut image = std::fs::read(&path).expect("read");
    let number = |image: &[u8], at: usize| u32::from_le_bytes(image[at..at + 4].try_into().expect("four bytes"));
    let sectors = number(&image, 462 + 12) + 16;
    image[462 + 12..462 + 16].copy_from_slice(&sectors.to_le_bytes());
    let end = (number(&image, 462 + 8) + sectors) as usize * 512;
    image[end - 4096 + 60..][..4].copy_from_slice(&0x8374_026d_u32.to_be_bytes());
    std::fs::write(&path, &image).expect("written");
    let error = recover(true).expect_err("a server has its journal");
    assert!(error.is_refusal() && error.to_string().contains("is left alone"), "{error}");
    assert!(std::fs::read(&path).expect("read") == image, "it was changed");
    // Its guest gave that up.
    let found = clusters[1].superblock();
    let given_up = Cluster::superblock_of(&found, (0, Superblock::decode(&found).expect("a superblock").sequence));
    clusters[1].disk.file.write_all_at(&given_up, clusters[1].superblock_at()).expect("written");
    assert!(recover(false).expect_err("a person wants all of them").is_refusal());
    assert_eq!(recover(true).expect("it is on no server").len(), 1);
    clusters[0].open(0);
    assert!(clusters[0].commit(0));
}

/// A copy that goes its own way under the name of the one that runs: it does not get the server, and the one that runs does not
/// notice.
#[test]
fn a_copy_does_not_take_the_running_ones_log() {
    let mut cluster = Cluster::new();
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0) && cluster.close(0) && cluster.start(0));
    let mut other = Cluster::new();
    std::fs::copy(&cluster.path, &other.path).expect("copied");
    // Mounted where its journal was on storage, as by a restored backup.
    let block = Cluster::superblock_of(&cluster.superblock(), (0, 99));
    other.disk.file.write_all_at(&block, other.superblock_at()).expect("written");
    for block in BLOCKS {
        let content = other.block(block);
        other.possible.insert(block, vec![content]);
    }
    other.hosts[0].network.lead_to(Some(cluster.remote.address()));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0));
    assert!(other.start(0) && other.commit(0));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(other.mode(0), Mode::Storage);
    assert!(cluster.commit(0) && other.commit(0), "neither notices the other");
    // Once the log is over, the name is anybody's.
    assert!(cluster.close(0));
    other.wait_for(0, |mode| mode == Mode::Remote);
    assert!(other.commit(0));
}

/// What somebody makes of a copy who uses it without the log on the server: `e2fsck -fy`, or, of one that is whole, any kernel.
fn without_its_log(cluster: &Cluster, image: &[u8]) -> Cluster {
    let mut copy = Cluster::new();
    std::fs::write(&copy.path, image).expect("written");
    copy.place = cluster.place.clone();
    let mut superblock = copy.superblock();
    let (decoded, _) = Superblock::parse(&superblock).expect("a superblock");
    let sequence = if decoded.is_empty() { decoded.sequence } else { decoded.sequence + 1000 };
    // Both leave what they do not know.
    SuperblockEdit::new(&mut superblock).expect("a superblock").start(0).errno(0).sequence(sequence).seal();
    copy.disk.file.write_all_at(&superblock, copy.superblock_at()).expect("written");
    for block in BLOCKS {
        let content = copy.block(block);
        copy.possible.insert(block, vec![content]);
    }
    copy.hosts[0].network.lead_to(Some(cluster.remote.address()));
    copy
}

/// One host goes to the server, and is copied on its way there, and before, and after. Whichever copy runs under its name then:
/// the log that counts stays, and so does all that was acknowledged.
#[test]
fn no_copy_takes_a_log_that_counts() {
    let mut steps = 0;
    let copied = |step: usize, is_cut: bool| unless_it_stood_still(TIMEOUT / 3, || copied_on_its_way(step, is_cut));
    while copied(steps, false) {
        copied(steps, true);
        steps += 1;
    }
    assert!(steps > 3, "going to the server has {steps} steps on storage");
}

/// Whether it came to that step. `is_cut`: there it is cut off, and comes back later. An error where it has left the server once more, which
/// nobody has made it do: then its name may be a copy's.
fn copied_on_its_way(step: usize, is_cut: bool) -> Result<bool, String> {
    let mut cluster = Cluster::new();
    cluster.what = format!("copied before step {step}, cut off there: {is_cut}");
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0));
    let read = |cluster: &Cluster| std::fs::read(&cluster.path).expect("read");
    let mut copies = vec![read(&cluster)];
    cluster.cut(0);
    cluster.wait_for(0, |mode| mode == Mode::Storage);
    assert!(cluster.commit(0));
    let gate = Arc::clone(&cluster.hosts[0].gate);
    gate.stop_before(step);
    cluster.mend(0);
    let log = &cluster.hosts[0].running.as_ref().expect("it runs").log;
    let reached = gate.wait_until_stopped(|| matches!(log.try_mode(), Some(Mode::Remote)));
    copies.push(read(&cluster));
    if is_cut {
        cluster.cut(0);
    }
    gate.go_on();
    if is_cut {
        std::thread::sleep(cluster.timeout);
        cluster.wait_for(0, |mode| mode == Mode::Storage);
        copies.push(read(&cluster));
        cluster.mend(0);
    }
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    let fall_backs = |cluster: &Cluster| cluster.hosts[0].running.as_ref().expect("it runs").log.report().fall_backs;
    let before = fall_backs(&cluster);
    let was_away = cluster.mode(0) != Mode::Remote;
    let has_left = |cluster: &Cluster| was_away || cluster.mode(0) != Mode::Remote || fall_backs(cluster) != before;
    assert!(cluster.commit(0));
    copies.push(read(&cluster));
    assert!(cluster.pass(0) && cluster.commit(0));
    copies.push(read(&cluster));
    let beside = Lineage::read(&cluster.superblock()).expect("it has one");
    let is_alone = cluster.is_marked() && beside.logs().is_empty();
    let mut left = has_left(&cluster);
    assert!(is_alone || left, "{}: {beside:?} beside a mark", cluster.what);
    for (number, image) in copies.iter().enumerate() {
        if left {
            break;
        }
        let mut copy = without_its_log(&cluster, image);
        copy.open(0);
        assert!(copy.commit(0));
        // Some attempts.
        std::thread::sleep(Duration::from_millis(100));
        let is_kept_out = copy.mode(0) == Mode::Storage;
        assert!(cluster.commit(0), "{}, copy {number}", cluster.what);
        left = has_left(&cluster);
        assert!(is_kept_out || left, "{}: copy {number} has the server", cluster.what);
    }
    if left {
        // What was acknowledged is there all the same.
        cluster.judge_the_disk();
        return Err(format!("{}: it has left the server", cluster.what));
    }
    cluster.judge();
    Ok(reached)
}

/// An earlier amberlog's mark stands beside a lineage that names the same log.
#[test]
fn a_copy_of_an_earlier_amberlogs_disk_does_not_take_its_log() {
    let mut cluster = Cluster::new();
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0));
    cluster.kill(0);
    let mut superblock = cluster.superblock();
    let MarkFound::Live(mark) = RemoteMark::read(&superblock) else { panic!("it has a mark") };
    let lineage = Lineage::read(&superblock).expect("it has one");
    Lineage { held: mark.nonce, ..lineage }.write_into(&mut superblock);
    cluster.disk.file.write_all_at(&superblock, cluster.superblock_at()).expect("written");
    let mut copy = without_its_log(&cluster, &std::fs::read(&cluster.path).expect("read"));
    copy.open(0);
    assert!(copy.commit(0));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(copy.mode(0), Mode::Storage);
    // Once the true one's log is over its name is anybody's, and a copy that goes on asking may have it: then the true one stays on storage.
    drop(copy);
    // The true one is brought home, and goes on.
    cluster.judge();
}

/// A log is let go of, the network and the server being well, while its thread waits for storage: what it does then ends nothing that
/// counts. Gives whether it came to that step.
fn dropped_at(act: Act, step: usize) -> bool {
    let mut cluster = Cluster::new();
    cluster.what = format!("{act:?}, dropped before step {step}");
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
    if matches!(act, Act::Return) {
        cluster.cut(0);
        cluster.wait_for(0, |mode| mode == Mode::Storage);
        assert!(cluster.commit(0));
    }
    let gate = Arc::clone(&cluster.hosts[0].gate);
    let connects = cluster.hosts[0].running.as_ref().expect("it runs").log.report().connects;
    gate.stop_before(step);
    match act {
        Act::Return => cluster.mend(0),
        _ => cluster.hosts[0].network.reset(),
    }
    let first = cluster.hosts[0].running.take().expect("it runs");
    // It falls back, and returns: over another connection. Nothing here waits for the lock, with which it may be stopped.
    let is_over = || {
        let has_returned =
            matches!(act, Act::Return) || first.log.shared.counters.connects.load(Ordering::Relaxed) > connects;
        has_returned && matches!(first.log.try_mode(), Some(Mode::Remote))
    };
    let reached = gate.wait_until_stopped(is_over);
    let was_marked = cluster.is_marked();
    let thread = Arc::downgrade(&first.log.shared);
    drop(first);
    let steps = gate.lock().steps.len();
    gate.go_on();
    let deadline = Instant::now() + LIMIT;
    while thread.strong_count() > 0 {
        assert!(Instant::now() < deadline, "{}: its thread goes on", cluster.what);
        std::thread::sleep(Duration::from_millis(1));
    }
    // What it had begun, and no more.
    let syncs = gate.lock().steps[steps..].iter().filter(|step| **step == Step::Sync).count();
    assert!(syncs <= 2, "{}: it flushed {syncs} times more", cluster.what);
    // Somebody else goes on with the disk: all that was acknowledged is there.
    assert!(cluster.start(1), "{}", cluster.what);
    assert!(cluster.commit(1));
    // Only where it was about to count nobody else may be let in, for as long as anybody waits.
    let may_be_kept_out = !was_marked && matches!(act, Act::Return);
    let deadline = Instant::now() + if may_be_kept_out { Duration::from_millis(500) } else { LIMIT };
    while cluster.mode(1) != Mode::Remote && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    if cluster.mode(1) != Mode::Remote {
        // It was about to count: its disk cannot name it, and needs nothing of it.
        assert!(may_be_kept_out, "{}: nobody can go to the server", cluster.what);
        let options = client_options(cluster.remote.address(), LIMIT);
        let mut client = remote_journal::BlockingClient::connect(&options.client).expect("connects");
        client.delete(&options.name, true).expect("deleted");
    }
    cluster.judge();
    reached
}

#[test]
fn who_lets_go_of_a_log_ends_nothing_that_counts() {
    // All of them in a long run.
    let is_long = std::env::var_os("AMBERLOG_REMOTE_SEEDS").is_some();
    for (act, every) in [(Act::Return, 1), (Act::FallBack, if is_long { 1 } else { 4 })] {
        let mut steps = 0;
        while dropped_at(act, steps) {
            steps += every;
        }
        assert!(steps > 3, "{act:?} has {steps} steps on storage");
    }
}

/// A journal that is on storage is anybody's who mounts the disk. Whoever had it does not replay its own over that when its guest
/// is gone.
#[test]
fn a_host_that_settles_looks_whether_storage_is_its_own() {
    let mut cluster = Cluster::new();
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    cluster.cut(0);
    cluster.wait_for(0, |mode| mode == Mode::Storage);
    assert!(cluster.commit(0));
    assert!(cluster.start(1) && cluster.commit(1));
    let first = cluster.hosts[0].running.take().expect("it ran");
    assert!(first.log.settle().is_err());
    assert_eq!(first.log.mode(), Mode::Failed);
    cluster.judge();
}

/// A VM that runs already has the disk attached when the host that has its journal dies. Its guest's kernel, or e2fsck, finds an error
/// number beside an empty log and clears it: that must not give the log on the server up.
#[test]
fn a_guest_that_had_the_disk_already_does_not_clear_anothers_mark() {
    let mut cluster = Cluster::new();
    let disk = open_disk(&cluster.path);
    let second = cluster.attach(1, &disk);
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
    cluster.kill(0);
    let marked = cluster.superblock();
    let decoded = Superblock::decode(&marked).expect("a superblock");
    assert!(cluster.is_marked() && decoded.errno != 0);
    // Both keep the padding, or, of a superblock that was read before, have none.
    for was_read_before in [false, true] {
        let mut cleared = marked.clone();
        SuperblockEdit::new(&mut cleared).expect("a superblock").errno(0).seal();
        if was_read_before {
            cleared[0x7c..0xf4].fill(0);
            SuperblockEdit::new(&mut cleared).expect("a superblock").seal();
        }
        assert!(second.superblock_of_closed(&cleared).is_err(), "it was read before: {was_read_before}");
        assert!(cluster.superblock() == marked, "the mark was changed");
    }
    assert!(disk.is_taken(), "what it writes home would come over the log");
    drop(second);
    // One that has replayed nothing, and opens the log at once.
    let disk = open_disk(&cluster.path);
    let third = cluster.attach(1, &disk);
    let opened = Cluster::superblock_of(&marked, (1, decoded.sequence + 1));
    let open = |log: &RemoteLog| log.open(&Superblock::decode(&opened).expect("a superblock"), &opened);
    assert!(open(&third).is_err() && cluster.superblock() == marked, "the mark was changed");
    assert!(disk.is_taken(), "it goes on writing to another's disk");
    drop(third);
    // A guest that puts such an image on its own disk does with it what it likes.
    let own = Cluster::new();
    let disk = open_disk(&own.path);
    let log = own.attach(0, &disk);
    for block in [&marked, &Cluster::superblock_of(&marked, (0, decoded.sequence))] {
        if !log.superblock_of_closed(block).expect("it is its own") {
            own.disk.file.write_all_at(block, own.superblock_at()).expect("written");
        }
        assert!(!own.is_marked() || open(&log).is_err(), "its log is on no server of its");
    }
    assert!(!own.is_marked() && !disk.is_taken());
    cluster.judge();
}

/// The server is lost, and storage takes nothing just then: what the guest was told is in this process alone. Once storage is well
/// again, whoever ends the VM brings it there.
#[test]
fn a_log_that_storage_did_not_take_is_completed_when_it_does() {
    let mut cluster = Cluster::new();
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
    cluster.hosts[0].gate.lock().is_full = true;
    cluster.cut(0);
    assert!(!cluster.commit(0), "nobody has it");
    assert_eq!(cluster.mode(0), Mode::Failed);
    let first = cluster.hosts[0].running.take().expect("it runs");
    assert!(first.log.settle().is_err() && cluster.is_marked(), "storage takes nothing yet");
    cluster.hosts[0].gate.lock().is_full = false;
    first.log.settle().expect("storage is well");
    assert!(first.log.mode() == Mode::Closed && !cluster.is_marked(), "it is on the server still");
    assert!(!Superblock::decode(&cluster.superblock()).expect("a superblock").is_empty());
    drop(first);
    // All that was acknowledged is in what storage has.
    cluster.judge();

    // Of a disk that somebody else has meanwhile nothing is written.
    let mut cluster = Cluster::new();
    assert!(cluster.start(0));
    cluster.wait_for(0, |mode| mode == Mode::Remote);
    assert!(cluster.commit(0));
    cluster.hosts[0].gate.lock().is_full = true;
    cluster.cut(0);
    assert!(!cluster.commit(0));
    let first = cluster.hosts[0].running.take().expect("it runs");
    assert!(cluster.start(1) && cluster.commit(1));
    cluster.hosts[0].gate.lock().is_full = false;
    assert!(first.log.settle().is_err());
    drop(first);
    cluster.judge();
}

/// Storage takes neither the superblock with which a guest closes its log nor the one that says that it is open: nothing is acknowledged
/// from then on, and what was is on the server, or is brought to storage when that is well again.
#[test]
fn a_log_that_can_neither_be_closed_nor_stay_open_fails() {
    for is_settled in [false, true] {
        let mut cluster = Cluster::new();
        cluster.what = format!("settled: {is_settled}");
        assert!(cluster.start(0));
        cluster.wait_for(0, |mode| mode == Mode::Remote);
        assert!(cluster.commit(0) && cluster.pass(0) && cluster.commit(0));
        cluster.hosts[0].gate.lock().is_full = true;
        let running = cluster.hosts[0].running.as_ref().expect("it runs");
        let closed = Cluster::superblock_of(&running.superblock, (0, running.builder.sequence));
        assert!(running.log.close(&closed).is_err(), "storage takes nothing");
        assert_eq!(running.log.mode(), Mode::Failed);
        assert!(!cluster.commit(0), "nobody could find it");
        cluster.hosts[0].gate.lock().is_full = false;
        if is_settled {
            let first = cluster.hosts[0].running.take().expect("it runs");
            first.log.settle().expect("storage is well");
            assert!(!cluster.is_marked(), "it is on the server still");
        }
        cluster.judge();
    }
}

/// Hosts come, are cut off and die, and images are copied and put back.
fn walk(seed: u64) -> [u64; 4] {
    let mut random = Random(seed);
    let mut cluster = Cluster::new();
    cluster.what = format!("seed {seed}");
    let mut cut = [false; 2];
    let mut copy: Option<Vec<u8>> = None;
    let [mut commits, mut starts, mut refused, mut lost] = [0; 4];
    for _ in 0..40 {
        let host = random.below(2) as usize;
        match random.below(20) {
            0..7 => commits += u64::from(cluster.commit(host)),
            7..9 => _ = cluster.pass(host),
            9 => _ = cluster.close(host),
            10..12 => {
                if !std::mem::replace(&mut cut[host], true) {
                    cluster.cut(host);
                }
            }
            12..14 => {
                if std::mem::take(&mut cut[host]) {
                    cluster.mend(host);
                }
            }
            14 => {
                cluster.kill(host);
                cut[host] = false;
                lost += 1;
            }
            15 => copy = Some(std::fs::read(&cluster.path).expect("read")),
            16 => {
                // Put back while nobody runs, by mistake or for good reason.
                let Some(copy) = &copy else { continue };
                (0..2).for_each(|host| cluster.kill(host));
                cut = [false; 2];
                let truth = std::fs::read(&cluster.path).expect("read");
                std::fs::write(&cluster.path, copy).expect("written");
                if cluster.is_marked() {
                    match cluster.recover(host) {
                        Ok(_) => {
                            for block in BLOCKS {
                                let is_there = cluster.possible[&block].contains(&cluster.block(block));
                                assert!(is_there, "seed {seed}: block {block} of a copy is an older one");
                            }
                        }
                        Err(Error::Refused(_) | Error::Damaged(_)) => {
                            refused += 1;
                            assert!(
                                &std::fs::read(&cluster.path).expect("read") == copy,
                                "seed {seed}: it was changed"
                            );
                        }
                        Err(failed) => panic!("seed {seed}: {failed}"),
                    }
                }
                std::fs::write(&cluster.path, &truth).expect("written");
            }
            _ => {
                let other_runs = cluster.hosts[1 - host].running.is_some();
                let is_own = cluster.hosts[host].running.is_some() && cluster.mode(host) != Mode::Failed;
                if is_own || cut[host] || (other_runs && !cluster.is_marked()) {
                    continue;
                }
                cluster.kill(host);
                // The other may fall back at this very moment: then its log is on storage, and not ours to mount.
                if other_runs || cluster.is_marked() {
                    let medium = cluster.medium(host);
                    let through = |_| Arc::clone(&medium);
                    let taking = (true, Taking::Anybodys);
                    let disks = vec![unlocked(&cluster.path, false).expect("the image")];
                    match recover_through(disks, &cluster.recovery_options(host), false, taking, &through) {
                        Ok(recovered) if !recovered.is_empty() => {
                            cluster.open(host);
                            starts += 1;
                        }
                        Ok(_) | Err(Error::Failed { .. }) => {}
                        Err(refused) => panic!("seed {seed}: {refused}"),
                    }
                } else {
                    starts += u64::from(cluster.start(host));
                }
            }
        }
    }
    cluster.judge();
    [commits, starts, refused, lost]
}

#[test]
fn whatever_two_hosts_do_nothing_acknowledged_is_lost() {
    let seeds = std::env::var("AMBERLOG_REMOTE_SEEDS").ok().map_or(10, |text| text.parse().expect("a number"));
    let mut sums = [0; 4];
    for seed in 0..seeds {
        let outcome = std::panic::catch_unwind(|| walk(seed));
        let counts = outcome.unwrap_or_else(|problem| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(problem)
        });
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let [commits, starts, refused, lost] = sums;
    assert!(commits > seeds * 3 && starts > seeds, "{sums:?}");
    println!("{seeds} seeds: {commits} commits, {starts} starts, {refused} older images refused, {lost} hosts lost");
}
