//! The hooks that a keeper has, through the route of a disk: a keeper of the test's own answers as it is told, and what reaches
//! storage is looked at.

use super::*;
use crate::attached::DiskOptions;
use crate::description::AreaDirectory;
use crate::disk::PlacementKind;
use crate::journals::JournalsOptions;
use crate::keeper::Step;
use crate::keeper::{Finished, HomeChange, Keeper, SuperblockWritten};
use crate::log::Log;
use block_route::Status;
use guest_memory::{HostFile, VmMemory};
use std::collections::VecDeque;
use std::ops::Range;
use std::process::Command;
use std::sync::Mutex;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 4096;

#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Begins(RequestKind, Range<u64>, Range<u64>),
    Ended(usize, bool),
    Done(Task, bool),
    Log(u32),
}

/// What it heard, and what it is to answer.
#[derive(Debug, Default)]
struct Script {
    heard: Mutex<Vec<Heard>>,
    verdicts: Mutex<VecDeque<HomeVerdict>>,
    steps: Mutex<Vec<(Side, Step)>>,
    /// Whether the guest's flushes have to cover what was written.
    needs_flushes: std::sync::atomic::AtomicBool,
    /// Home writes.
    under_way: std::sync::atomic::AtomicUsize,
}

impl Script {
    fn heard(&self) -> Vec<Heard> {
        std::mem::take(&mut *self.heard.lock().expect("a script"))
    }

    fn note(&self, heard: Heard) {
        self.heard.lock().expect("a script").push(heard);
    }

    fn say(&self, side: Side, step: Step) {
        self.steps.lock().expect("a script").push((side, step));
    }

    fn take(&self, steps: &mut Steps) {
        steps.0.append(&mut self.steps.lock().expect("a script"));
    }
}

impl Keeper for Script {
    fn watches_home(&self, _log: &Log) -> bool {
        true
    }

    fn awaits_home_writes(&self, _log: &Log) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    fn superblock(
        &self,
        _log: &Log,
        block: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        steps.push(Side::Journal, Step::Hold(block.request));
        Ok((SuperblockWritten::GoesOn, false))
    }

    fn flush_asked(&self, _log: &Log, request: RequestId, steps: &mut Steps) {
        steps.push(Side::Home, Step::Hold(request));
    }

    fn log_write(&self, _log: &Log, block: LogBlock<'_>) -> LogVerdict {
        self.note(Heard::Log(block.position));
        LogVerdict::Held
    }

    fn odd_log_write(&self, _log: &Log, _kind: RequestKind, _slices: &[MemorySlice]) -> OddVerdict {
        OddVerdict::Refuse
    }

    fn settle_pass(&self, _log: &Log, steps: &mut Steps) {
        self.take(steps);
    }

    fn home_begins(&self, _log: &Log, change: &HomeChange<'_>, _steps: &mut Steps) -> io::Result<HomeVerdict> {
        self.note(Heard::Begins(change.kind, change.range.clone(), change.blocks.clone()));
        let verdict = self.verdicts.lock().expect("a script").pop_front();
        Ok(verdict.unwrap_or(HomeVerdict::Go { operation: 7, replaced: Vec::new() }))
    }

    fn home_ended(&self, _log: &Log, operation: usize, is_ok: bool, steps: &mut Steps) -> bool {
        self.note(Heard::Ended(operation, is_ok));
        self.take(steps);
        !self.needs_flushes.load(Ordering::Relaxed)
    }

    fn done(&self, _log: &Log, task: Task, error: Option<&io::Error>, steps: &mut Steps) {
        self.note(Heard::Done(task, error.is_none()));
        self.take(steps);
    }

    fn woken(&self, _log: &Log, side: Side, steps: &mut Steps) {
        if side == Side::Home {
            self.take(steps);
        }
    }

    fn finish(&self, _log: &Log, _is_vm_gone: bool) -> io::Result<Finished> {
        Ok(Finished::Nothing)
    }
}

struct Rig {
    _directory: tempfile::TempDir,
    memory: HostFile,
    route: DiskRoute,
    script: Arc<Script>,
    log: Arc<KeptLog>,
    next_request: u32,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let image = directory.path().join("image");
        std::fs::File::create(&image).and_then(|file| file.set_len(BLOCKS * BLOCK)).expect("an image");
        let made =
            Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"]).arg(&image).status();
        assert!(made.expect("e2fsprogs are installed").success());
        let options = DiskOptions {
            name: "disk".to_owned(),
            path: image,
            placement: PlacementKind::Copy,
            honour_flush: false,
            read_only: false,
            nvm: None,
            remote: None,
            durable_within: None,
            write_log: None,
        };
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
        let options = JournalsOptions { disks: vec![options], budget_bytes: 64 << 20, tracer: None };
        let journals = Journals::new(&VmMemory::new(), area.expect("a directory"), options).expect("journals");
        let script = Arc::new(Script::default());
        let known = journals.logs().remove(0);
        let keeper: Arc<dyn Keeper> = Arc::clone(&script) as Arc<dyn Keeper>;
        let log = Arc::new(KeptLog { log: known.log.clone(), keeper });
        log.set_open();
        journals.replace_log(Arc::clone(&log));
        let memory = HostFile::create(&directory.path().join("memory"), 1 << 20).expect("a file");
        memory.reserve(0, 1 << 20).expect("room");
        let route = DiskRoute::new(Arc::clone(&journals), 0);
        Rig { _directory: directory, memory, route, script, log, next_request: 0 }
    }

    fn request(&mut self, kind: RequestKind, offset: u64, len: u64) -> Plan {
        self.next_request += 1;
        let segments = match kind {
            RequestKind::Write => vec![self.memory.slice(0, len as usize)],
            _ => Vec::new(),
        };
        let mut plan = Plan::default();
        let request = Request { id: RequestId(self.next_request), kind, offset, len, segments: &segments };
        self.route.route(&request, &mut plan);
        self.route.end_of_pass(&mut plan);
        plan
    }

    fn end(&mut self, operation: &DiskOperation, result: io::Result<()>) -> Plan {
        let mut plan = Plan::default();
        self.route.disk_done(operation.ticket.expect("a ticket"), result, &mut plan);
        plan
    }

    fn free_block(&self) -> u64 {
        BLOCKS - 10
    }
}

fn operations(plan: &Plan) -> Vec<DiskOperation> {
    let operation = |action: &block_route::PlanAction| match action {
        block_route::PlanAction::Disk(operation) => Some(operation.clone()),
        _ => None,
    };
    plan.actions.iter().filter_map(operation).collect()
}

fn released(plan: &Plan) -> Vec<(u32, Status)> {
    let release = |action: &block_route::PlanAction| match action {
        block_route::PlanAction::Release(request, status) => Some((request.0, *status)),
        _ => None,
    };
    plan.actions.iter().filter_map(release).collect()
}

#[test]
fn every_change_of_the_file_system_is_seen_and_may_have_to_wait() {
    let mut rig = Rig::new();
    let at = rig.free_block() * BLOCK;
    for kind in [RequestKind::Write, RequestKind::Discard, RequestKind::WriteZeroes { unmap: true }] {
        rig.script.verdicts.lock().expect("a script").push_back(HomeVerdict::Wait);
        // From the middle of one block to the middle of another.
        let plan = rig.request(kind, at + 512, BLOCK);
        let asked = || Heard::Begins(kind, at + 512..at + 512 + BLOCK, at / BLOCK..at / BLOCK + 2);
        assert_eq!(rig.script.heard(), [asked()]);
        assert!(operations(&plan).is_empty(), "it waits: {plan:?}");
        // Time passes; the keeper says that it may be asked again.
        rig.script.say(Side::Home, Step::Retry);
        let mut plan = Plan::default();
        rig.route.woken(&mut plan);
        let went = operations(&plan);
        assert_eq!((went.len(), went[0].offset, went[0].len), (1, at + 512, BLOCK));
        assert_eq!(released(&plan), [(rig.next_request, Status::Ok)], "of the hold that it waited with");
        assert_eq!(rig.script.heard(), [asked()]);
        rig.end(&went[0], Err(io::Error::other("a bad sector")));
        assert_eq!(rig.script.heard(), [Heard::Ended(7, false)]);
    }
}

#[test]
fn a_start_anew_waits_for_home_writes_before_it_begins() {
    let rig = Rig::new();
    assert_eq!(rig.route.waits_for_others(Start::Fresh), None);
    rig.script.under_way.store(1, Ordering::Relaxed);
    assert!(rig.route.waits_for_others(Start::Fresh).is_some_and(|what| what.starts_with("home writes of disk disk")));
    assert_eq!(rig.route.waits_for_others(Start::Resumed), None, "who goes on recovers nothing");
    rig.script.under_way.store(0, Ordering::Relaxed);
    assert_eq!(rig.route.waits_for_others(Start::Fresh), None);
}

#[test]
fn a_flush_of_a_keeper_follows_the_writes_that_ended_before() {
    let mut rig = Rig::new();
    let at = rig.free_block() * BLOCK;
    let write = operations(&rig.request(RequestKind::Write, at, BLOCK)).remove(0);
    rig.script.say(Side::Home, Step::Flush { task: Task::Own(1) });
    let plan = rig.end(&write, Ok(()));
    let flush = operations(&plan).remove(0);
    assert_eq!((flush.operation, flush.request), (Operation::Flush, None));
    assert_eq!(rig.script.heard().pop(), Some(Heard::Ended(7, true)), "the keeper knew of the write before it flushed");
    // Then it writes into the log's place, and then homes; the commit waits all the while.
    let place = rig.log.place_of(3).expect("a place");
    let content = vec![Buffer::Bytes(Arc::from(vec![1; BLOCK as usize]))];
    rig.script.say(
        Side::Journal,
        Step::Write { request: None, offset: place, content: content.clone(), task: Task::Stored(3) },
    );
    let written = operations(&rig.end(&flush, Ok(()))).remove(0);
    assert_eq!((written.operation, written.offset), (Operation::Write, place));
    assert_eq!(rig.script.heard(), [Heard::Done(Task::Own(1), true)]);
    rig.script.say(Side::Home, Step::Write { request: None, offset: at, content, task: Task::HostWrite(4) });
    let home = operations(&rig.end(&written, Ok(()))).remove(0);
    assert_eq!((home.operation, home.offset), (Operation::Write, at));
    rig.end(&home, Err(io::Error::other("a bad sector")));
    assert_eq!(rig.script.heard(), [Heard::Done(Task::Stored(3), true), Heard::Done(Task::HostWrite(4), false)]);
}

#[test]
fn a_commit_waits_until_its_keeper_releases_it() {
    let mut rig = Rig::new();
    let at = rig.log.place_of(5).expect("a place");
    let plan = rig.request(RequestKind::Write, at, BLOCK);
    assert!(operations(&plan).is_empty() && released(&plan).is_empty(), "{plan:?}");
    assert!(matches!(plan.actions[..], [block_route::PlanAction::Hold(RequestId(1))]));
    assert_eq!(rig.script.heard(), [Heard::Log(5)]);
    rig.script.say(Side::Journal, Step::Release(RequestId(1), Status::Ok));
    let mut plan = Plan::default();
    rig.route.woken(&mut plan);
    assert_eq!(released(&plan), [(1, Status::Ok)]);
}

#[test]
fn a_pass_ends_for_a_log_that_has_gone_meanwhile() {
    let mut rig = Rig::new();
    let at = rig.log.place_of(5).expect("a place");
    let segments = [rig.memory.slice(0, BLOCK as usize)];
    let request = Request { id: RequestId(1), kind: RequestKind::Write, offset: at, len: BLOCK, segments: &segments };
    let mut plan = Plan::default();
    rig.route.route(&request, &mut plan);
    // Another disk's thread finds that the file system was replaced.
    rig.route.journals.remove_log(rig.log.index);
    rig.script.say(Side::Journal, Step::Release(RequestId(1), Status::IoError));
    rig.route.end_of_pass(&mut plan);
    assert_eq!(released(&plan), [(1, Status::IoError)], "its keeper has what was written, and says what becomes of it");
}

#[test]
fn flushes_and_superblocks_of_the_guest_may_have_to_wait() {
    let mut rig = Rig::new();
    let plan = rig.request(RequestKind::Flush, 0, 0);
    let is_held = |plan: &Plan, id: u32| {
        plan.actions
            .iter()
            .any(|action| matches!(action, block_route::PlanAction::Hold(RequestId(held)) if *held == id))
    };
    assert!(is_held(&plan, 1), "beside the disk's own flush: {plan:?}");
    let at = rig.log.place_of(0).expect("a place");
    let plan = rig.request(RequestKind::Write, at, BLOCK);
    assert!(operations(&plan).is_empty() && is_held(&plan, 2), "{plan:?}");
    rig.script.say(Side::Home, Step::Release(RequestId(1), Status::Ok));
    rig.script.say(Side::Journal, Step::Release(RequestId(2), Status::IoError));
    let mut plan = Plan::default();
    rig.route.woken(&mut plan);
    assert_eq!(released(&plan), [(1, Status::Ok), (2, Status::IoError)]);
}

/// A disk with a cache that is not durable, and the guest's view of it. A flush that fails loses what it was to bring to the medium, and
/// says so to nobody else.
#[derive(Default)]
struct Cached {
    cache: Vec<u64>,
    /// Writes that are lost and that the guest was not told of.
    lost: Vec<u64>,
}

impl Cached {
    fn flushed(&mut self, covered: &[u64], is_ok: bool) {
        // What another one has brought there, or lost, before is not this one's.
        let (now, rest): (Vec<u64>, Vec<u64>) = self.cache.iter().partition(|write| covered.contains(write));
        self.cache = rest;
        if !is_ok {
            self.lost.extend(now);
        }
    }
}

/// Whoever asked for a flush that fails: the guest hears of it before a flush of its own is answered well.
#[test]
fn no_flush_is_answered_well_over_what_another_one_has_lost() {
    for seed in 0..12 {
        let mut random = seeded_random::Random::new(seed);
        let mut rig = Rig::new();
        rig.script.needs_flushes.store(true, Ordering::Relaxed);
        let at = rig.free_block() * BLOCK;
        let mut storage = Cached::default();
        // What is under way: the operation, and what it is to bring to the medium.
        let mut waiting: Vec<(DiskOperation, Vec<u64>)> = Vec::new();
        // The guest's flushes, and what had ended when they began.
        let mut flushes: HashMap<u32, Vec<u64>> = HashMap::new();
        let (mut ended, mut writes, mut failures, mut errors) = (Vec::new(), 0, 0, 0);
        for _ in 0..1500 {
            let plan = match random.below(8) {
                0 | 1 => {
                    let write = operations(&rig.request(RequestKind::Write, at, BLOCK)).remove(0);
                    writes += 1;
                    waiting.push((write, vec![writes]));
                    Plan::default()
                }
                2 => {
                    let plan = rig.request(RequestKind::Flush, 0, 0);
                    flushes.insert(rig.next_request, ended.clone());
                    // The keeper has nothing to add.
                    rig.script.say(Side::Home, Step::Release(RequestId(rig.next_request), Status::Ok));
                    plan
                }
                3 => {
                    rig.script.say(Side::Home, Step::Flush { task: Task::Own(1) });
                    let mut plan = Plan::default();
                    rig.route.woken(&mut plan);
                    plan
                }
                _ if waiting.is_empty() => Plan::default(),
                _ => {
                    let (operation, what) = waiting.remove(random.below(waiting.len() as u64) as usize);
                    if operation.operation == Operation::Write {
                        storage.cache.extend(&what);
                        ended.extend(&what);
                        rig.end(&operation, Ok(()))
                    } else {
                        let is_ok = random.below(3) > 0;
                        storage.flushed(&what, is_ok);
                        failures += u32::from(!is_ok);
                        let result = if is_ok { Ok(()) } else { Err(io::Error::other("a bad sector")) };
                        let plan = rig.end(&operation, result);
                        if let Some(RequestId(request)) = operation.request
                            && let Some(began_with) = flushes.remove(&request)
                        {
                            let is_told = !is_ok
                                || released(&plan).iter().any(|(id, status)| *id == request && *status != Status::Ok);
                            errors += u32::from(is_told);
                            answered(&mut storage, &began_with, is_told, seed);
                        }
                        plan
                    }
                }
            };
            for operation in operations(&plan) {
                let covers = storage.cache.clone();
                waiting.push((operation, covers));
            }
            // Flushes that never went to storage.
            let asked =
                |request: &u32| waiting.iter().any(|(operation, _)| operation.request == Some(RequestId(*request)));
            let at_once: Vec<u32> = flushes.keys().copied().filter(|request| !asked(request)).collect();
            for request in at_once {
                let is_told = released(&plan).contains(&(request, Status::IoError));
                errors += u32::from(is_told);
                let began_with = flushes.remove(&request).expect("it was asked");
                answered(&mut storage, &began_with, is_told, seed);
            }
        }
        assert!(failures > 50 && errors > 50, "seed {seed}: {failures} failures, {errors} errors");
    }
}

fn answered(storage: &mut Cached, began_with: &[u64], is_told: bool, seed: u64) {
    if is_told {
        storage.lost.retain(|write| !began_with.contains(write));
    } else {
        let lost = storage.lost.iter().find(|write| began_with.contains(write));
        assert!(lost.is_none(), "seed {seed}: write {lost:?} is lost, and the guest was told that it is durable");
    }
}

/// The same where the flush is one of ours that no disk engine carries out.
#[test]
fn a_flush_of_the_journals_own_that_failed_is_told_once() {
    let mut rig = Rig::new();
    rig.route.journals.disk(0).note_failed_flush();
    let plan = rig.request(RequestKind::Flush, 0, 0);
    assert_eq!((operations(&plan).len(), released(&plan)), (0, vec![(1, Status::IoError)]));
    let plan = rig.request(RequestKind::Flush, 0, 0);
    assert_eq!(released(&plan), [], "that was told");
    // Of several in one pass none was answered before the others.
    rig.route.journals.disk(0).note_failed_flush();
    let mut plan = Plan::default();
    for id in [3, 4] {
        let request = Request { id: RequestId(id), kind: RequestKind::Flush, offset: 0, len: 0, segments: &[] };
        rig.route.route(&request, &mut plan);
    }
    rig.route.end_of_pass(&mut plan);
    assert_eq!(released(&plan), [(3, Status::IoError), (4, Status::IoError)]);
}
