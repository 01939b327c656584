//! One recording, run through the real routes, journals and area over a disk that an adversary drives.
//!
//! The guest is the recording: it sends what was sent, when everything that had been done before in the recording is
//! done here too. The disk takes its time within that freedom. Everything follows from the seed.

use crate::complete::JudgedLog;
use crate::error::{During, Error, Result};
use crate::follow::{Deaths, Dying};
use crate::hand_over;
use crate::kills::{self, Looks};
use crate::recording::{Event, Issue, Kind, PAGE_BYTES, Piece, Recording};
use crate::switches::Switches;
use block_route::{
    Buffer, DiskOperation, LogIndex, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Start, Status,
};
use guest_kit::Acknowledged;
use guest_memory::{MemorySlice, MemoryTable, PageId, RegionDescriptor, VmMemory, simulated_room};
use guest_tools::random::Random;
use placement::{
    AreaDirectory, DiskOptions, DiskRoute, HotPages, Journals, JournalsOptions, LogDescription, NvmDisk, PlacementKind,
};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How long a host's own write may take, in recorded events.
const HOST_WRITE_EVENTS_MAX: u64 = 30;
/// What cannot be done in this many steps is never done.
const PATIENCE_STEPS: u32 = 20_000;

/// Why a run stopped.
#[derive(Debug)]
pub enum Stop {
    /// A promise is broken.
    Finding(String),
    /// The explorer itself could not go on.
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Error(error)
    }
}

/// Says that a promise is broken.
pub fn finding<T>(text: impl Into<String>) -> std::result::Result<T, Stop> {
    Err(Stop::Finding(text.into()))
}

/// What a run gives back after every step.
pub type Step = std::result::Result<(), Stop>;

/// Who is told of every step of a simulation.
pub trait Watcher: Send {
    /// The guest sends a request; its route has not seen it yet.
    fn issued(&mut self, recording: &Recording, issue: &Issue);
    /// The guest is told that a request is done.
    fn request_done(&mut self, id: u32);
    /// An operation is given to the disk, under this number.
    fn submitted(&mut self, number: u64, operation: &DiskOperation);
    /// It has reached the disk; `bytes` is what it wrote.
    fn executed(&mut self, number: u64, operation: &DiskOperation, bytes: Option<&[u8]>);
    /// Its route is about to be told.
    fn completed(&mut self, number: u64, operation: &DiskOperation);
    /// A log is wished away from its region.
    fn leaves(&mut self);
    /// The route is about to end a pass. Says whether it finds memory for what it holds.
    fn has_memory(&mut self) -> bool {
        true
    }
}

/// A watcher that others share.
pub type SharedWatcher = Arc<Mutex<dyn Watcher>>;

/// An operation on its way.
pub struct Pending {
    number: u64,
    /// The disk.
    pub disk: usize,
    /// What is to be done.
    pub operation: DiskOperation,
    /// It has reached the disk, but nobody was told.
    pub is_executed: bool,
    execute_at: usize,
    complete_at: usize,
}

impl Pending {
    /// What it would write, as the memory is now: nothing where it writes nothing.
    pub fn bytes(&self) -> Option<Vec<u8>> {
        match self.operation.operation {
            Operation::Write => {
                let mut bytes = Vec::with_capacity(self.operation.len as usize);
                for buffer in &self.operation.buffers {
                    match buffer {
                        Buffer::Slice(slice) => {
                            let at = bytes.len();
                            bytes.resize(at + slice.len(), 0);
                            slice.copy_out(0, &mut bytes[at..]);
                        }
                        Buffer::Bytes(data) => bytes.extend_from_slice(data),
                    }
                }
                Some(bytes)
            }
            // The simulated disk zeroes what is discarded, as a hole in an image file reads.
            Operation::WriteZeroes { .. } | Operation::Discard => Some(vec![0; self.operation.len as usize]),
            Operation::Read | Operation::Flush => None,
        }
    }
}

#[derive(Clone, Copy, Default)]
struct RequestState {
    holds: u32,
    is_issued: bool,
    is_completed: bool,
}

enum Mutation {
    Content(Piece),
    Garbage(u32, u64),
}

/// See the module.
pub struct Simulation<'r> {
    /// What is run.
    pub recording: &'r Recording,
    switches: Switches,
    random: Random,
    /// The images' and the area's directory.
    pub directory: tempfile::TempDir,
    /// The guest's memory.
    pub memory: Arc<VmMemory>,
    table: Arc<MemoryTable>,
    /// What is tested.
    pub journals: Arc<Journals>,
    routes: Vec<DiskRoute>,
    watcher: Option<SharedWatcher>,
    operations: u64,
    /// The disks.
    pub images: Vec<File>,
    /// The logs and what the judge knows of them.
    pub logs: Vec<JudgedLog>,
    /// What is on its way.
    pub pending: Vec<Pending>,
    /// What had been acknowledged.
    pub acknowledged: BTreeMap<String, Acknowledged>,
    requests: Vec<RequestState>,
    done_at: Vec<usize>,
    plans: Vec<(Plan, Vec<u32>)>,
    wakes: Vec<u64>,
    mutations: BTreeMap<usize, Vec<Mutation>>,
    clock: usize,
    /// The same for the journals: an event is a millisecond.
    milliseconds: Arc<AtomicU64>,
    seed: u64,
    /// Steps in which stores were looked at.
    steps: u64,
    /// Kills in the middle of a step that were checked.
    pub looks: u64,
    /// From which event on logs are handed over to storage, if at all.
    hand_over_at: Option<usize>,
    budget_bytes: u64,
    /// When the worker is killed, and another goes on.
    pub(crate) deaths: Deaths,
    /// Something happened since it was last taken.
    pub has_moved: bool,
}

/// Where area and images of simulations lie: memory, if there is some.
pub fn scratch() -> Result<tempfile::TempDir> {
    let shared = std::path::Path::new("/dev/shm");
    let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("crash-explorer-").tempdir_in(parent).during("making a directory")
}

impl<'r> Simulation<'r> {
    /// Everything as it was before the guest sent its first request.
    ///
    /// # Errors
    /// When files cannot be made.
    pub fn new(recording: &'r Recording, seed: u64, switches: Switches) -> Result<Self> {
        Self::with(recording, seed, switches, (None, None), None)
    }

    /// The same with the first disk's journal on NVM, or with what it holds durable within so many events; and somebody who watches.
    ///
    /// # Errors
    /// When files cannot be made.
    pub fn with(
        recording: &'r Recording,
        seed: u64,
        switches: Switches,
        (nvm, within): (Option<Arc<NvmDisk>>, Option<u64>),
        watcher: Option<SharedWatcher>,
    ) -> Result<Self> {
        let mut random = Random::of(seed, 1);
        let has_region = nvm.is_some();
        let directory = scratch()?;
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"))
            .map_err(|e| Error::Other(e.to_string()))?;
        let ram_path = area.path().join("ram");
        let ram_bytes = u64::from(recording.memory_pages) * PAGE_BYTES as u64;
        let ram = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&ram_path)
            .during("making the guest's memory")?;
        ram.set_len(ram_bytes).during("making the guest's memory")?;
        let memory = VmMemory::new();
        let region = RegionDescriptor { gpa: 0, size: ram_bytes, user_addr: 1 << 40, file: ram, file_offset: 0 };
        let table = Arc::new(memory.map(vec![region]).map_err(|e| Error::Other(e.to_string()))?);
        memory.simulate_protection();
        let placement = if switches.has(Switches::COPY) { PlacementKind::Copy } else { PlacementKind::Retain };
        let budget_bytes = match (switches.has(Switches::PRESSURE), random.below(3)) {
            (false, _) => u64::MAX,
            (true, 0) => 0,
            (true, 1) => 200 << 10,
            (true, _) => 600 << 10,
        };
        let mut paths: Vec<PathBuf> = Vec::new();
        let mut images = Vec::new();
        let mut disks = Vec::new();
        for index in 0..recording.disks.len() {
            let path = directory.path().join(format!("disk{index}"));
            recording.write_base(index, &path)?;
            images.push(File::options().read(true).write(true).open(&path).during("opening an image")?);
            disks.push(DiskOptions {
                name: format!("disk{index}"),
                path: path.clone(),
                placement: if nvm.is_some() { PlacementKind::Nvm } else { placement },
                honour_flush: false,
                read_only: false,
                nvm: nvm.clone(),
                remote: None,
                durable_within: within.map(Duration::from_millis),
                write_log: None,
            });
            paths.push(path);
        }
        let options = JournalsOptions { disks, budget_bytes, tracer: None };
        let journals = Journals::new(&memory, area, options).during("setting up the journals")?;
        let milliseconds = Arc::new(AtomicU64::new(0));
        set_up(&journals, recording, seed, &milliseconds);
        let mut routes: Vec<DiskRoute> =
            (0..images.len()).map(|disk| DiskRoute::new(Arc::clone(&journals), disk)).collect();
        for route in &mut routes {
            route.started(Start::Fresh, &table).during("starting a route")?;
        }
        let logs = judged_logs(&journals)?;
        let plans: Vec<(Plan, Vec<u32>)> = images.iter().map(|_| (Plan::default(), Vec::new())).collect();
        let mut simulation = Simulation {
            recording,
            switches,
            random,
            directory,
            memory,
            table,
            journals,
            routes,
            watcher,
            operations: 0,
            images,
            logs,
            pending: Vec::new(),
            acknowledged: BTreeMap::new(),
            requests: Vec::new(),
            done_at: Vec::new(),
            wakes: vec![0; plans.len()],
            plans,
            mutations: BTreeMap::new(),
            clock: 0,
            milliseconds,
            seed,
            steps: 0,
            looks: 0,
            hand_over_at: None,
            budget_bytes,
            deaths: Deaths::default(),
            has_moved: false,
        };
        if switches.has(Switches::HAND_OVER) {
            let mut random = Random::of(seed, 3);
            let events = recording.events.len();
            // A log takes its time to go: not in the last quarter.
            let at = random.below(events.max(1) as u64) as usize;
            simulation.hand_over_at = Some(at.min(events / 4 * 3));
        }
        // Who watches, and a region, know of no other process.
        if switches.has(Switches::FOLLOW) && simulation.watcher.is_none() && !has_region {
            simulation.deaths = Deaths::of_seed(seed, recording.events.len());
        }
        simulation.look_ahead();
        Ok(simulation)
    }

    /// The images.
    pub(crate) fn image_paths(&self) -> Vec<PathBuf> {
        self.journals.disks().iter().map(|disk| disk.options.path.clone()).collect()
    }

    pub(crate) fn random_below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    /// The disks as they are served.
    pub(crate) fn journals_options(&self) -> JournalsOptions {
        let of_disk = |disk: &Arc<placement::Disk>| DiskOptions {
            name: disk.options.name.clone(),
            path: disk.options.path.clone(),
            placement: disk.options.placement,
            honour_flush: disk.options.honour_flush,
            read_only: false,
            nvm: None,
            remote: None,
            durable_within: disk.options.durable_within,
            write_log: None,
        };
        let disks = self.journals.disks().iter().map(of_disk).collect();
        JournalsOptions { disks, budget_bytes: self.budget_bytes, tracer: None }
    }

    pub(crate) fn set_up_journals(&self, journals: &Journals) {
        set_up(journals, self.recording, self.seed, &self.milliseconds);
    }

    /// Another process serves the guest from here on.
    pub(crate) fn take_over(
        &mut self,
        memory: Arc<VmMemory>,
        table: Arc<MemoryTable>,
        journals: Arc<Journals>,
        routes: Vec<DiskRoute>,
    ) -> Step {
        self.wakes = vec![0; routes.len()];
        (self.memory, self.table, self.journals, self.routes) = (memory, table, journals, routes);
        for judged in &mut self.logs {
            let is_it = |log: &Arc<placement::KeptLog>| log.place().is_same_log(judged.log.place());
            let Some(now) = self.journals.logs().into_iter().find(is_it) else {
                return finding("the next worker has not found the log that the one before had");
            };
            let name = self.journals.area.name_of(now.id);
            judged.is_now(now, name);
        }
        Ok(())
    }

    pub(crate) fn plans_mut(&mut self) -> impl Iterator<Item = &mut (Plan, Vec<u32>)> {
        self.plans.iter_mut()
    }

    pub(crate) fn is_unanswered(&self, id: u32) -> bool {
        let state = self.requests[id as usize];
        state.is_issued && !state.is_completed
    }

    /// What another process held a request for is over.
    pub(crate) fn forget_holds(&mut self, id: u32) {
        self.requests[id as usize].holds = 0;
    }

    /// When each request will be done at the latest, and when pages change between their uses.
    fn look_ahead(&mut self) {
        let events = &self.recording.events;
        let count = events.iter().filter(|event| matches!(event, Event::Issue(_))).count();
        self.requests = vec![RequestState::default(); count];
        self.done_at = vec![events.len(); count];
        for (index, event) in events.iter().enumerate() {
            if let Event::Done(id) = event {
                self.done_at[*id as usize] = index;
            }
        }
        // Of each page: until when it is in use, at the latest.
        let mut in_use: HashMap<u32, usize> = HashMap::new();
        for (index, event) in events.iter().enumerate() {
            let Event::Issue(issue) = event else { continue };
            for piece in issue.segments.iter().flatten() {
                let free = in_use.get(&piece.page).copied();
                if let Some(free) = free.filter(|free| *free + 1 < index) {
                    let window = (index - free - 1) as u64;
                    if self.switches.has(Switches::GARBAGE) && self.random.below(8) == 0 {
                        let at = free + 1 + self.random.below(window) as usize;
                        let garbage = Mutation::Garbage(piece.page, self.random.bits());
                        self.mutations.entry(at).or_default().push(garbage);
                    }
                    if self.switches.has(Switches::EARLY) && piece.content.is_some() && self.random.below(2) == 0 {
                        // Often at once, so that it is between a completion and what follows from it.
                        let at = match self.random.below(3) {
                            0 => free + 1,
                            _ => free + 1 + self.random.below(window) as usize,
                        };
                        self.mutations.entry(at).or_default().push(Mutation::Content(*piece));
                    }
                }
                let until = self.done_at[issue.id as usize].max(free.unwrap_or(0));
                in_use.insert(piece.page, until);
            }
        }
    }

    /// Runs to the end. `look` is called after every step in which something moved.
    ///
    /// # Errors
    /// What `look` finds, or what breaks on the way.
    pub fn run(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        let recording = self.recording;
        for (index, event) in recording.events.iter().enumerate() {
            self.clock = index;
            self.milliseconds.store(index as u64, Ordering::Release);
            (0..self.journals.disks().len()).for_each(|disk| self.journals.wake_due(disk));
            for mutation in self.mutations.remove(&index).unwrap_or_default() {
                self.mutate(&mutation)?;
            }
            self.due(look)?;
            self.wake(false)?;
            self.looked(look)?;
            self.hand_over(look)?;
            self.dies_if_due()?;
            self.looked(look)?;
            match event {
                Event::Issue(issue) => {
                    self.issue(issue)?;
                    self.looked(look)?;
                    if self.switches.has(Switches::PASSES) && self.random.below(4) == 0 {
                        self.end_pass(usize::from(issue.disk))?;
                    }
                }
                Event::EndOfPass(disk) => {
                    let goes_on = matches!(recording.events.get(index + 1),
                        Some(Event::Issue(next)) if next.disk == *disk);
                    let merge = goes_on && self.switches.has(Switches::PASSES) && self.random.below(3) == 0;
                    if !merge {
                        self.end_pass(usize::from(*disk))?;
                    }
                }
                Event::Done(id) => self.force(*id, look)?,
                Event::Acknowledged(stream, number) => {
                    let entry = self.acknowledged.entry(recording.streams[usize::from(*stream)].clone()).or_default();
                    entry.count += 1;
                    entry.last = Some(*number);
                }
            }
            self.looked(look)?;
        }
        Ok(())
    }

    fn looked(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        if std::mem::take(&mut self.has_moved) { look(self) } else { Ok(()) }
    }

    fn mutate(&mut self, mutation: &Mutation) -> Step {
        self.has_moved = true;
        let looks = self.begin_looks();
        match mutation {
            Mutation::Content(piece) => self.put(piece),
            Mutation::Garbage(page, seed) => {
                let mut bytes = [0; PAGE_BYTES];
                Random::new(*seed).fill(&mut bytes);
                self.memory.simulated_guest_write(PageId(*page), 0, &bytes);
            }
        }
        self.end_looks(looks, None)
    }

    /// Looks at the stores of the step that begins now, if kills are among the adversary's liberties.
    fn begin_looks(&mut self) -> Option<Looks> {
        if !self.switches.has(Switches::KILLS) {
            return None;
        }
        self.steps += 1;
        Some(Looks::begin(self, self.seed ^ self.steps.rotate_left(20)))
    }

    fn end_looks(&mut self, looks: Option<Looks>, issue: Option<&Issue>) -> Step {
        let Some(looks) = looks.map(Looks::end) else { return Ok(()) };
        self.looks += looks.len() as u64;
        kills::check(self, &looks, issue)
    }

    /// The same, of a step in which only amberlog does something: it may die in it.
    fn begin_step(&mut self) -> (Option<Dying>, Option<Looks>) {
        let dying = self.begin_dying();
        let looks = if dying.is_none() { self.begin_looks() } else { None };
        (dying, looks)
    }

    /// Says whether it died: another process has gone on, and what the step made is nothing any more.
    fn end_step(
        &mut self,
        (dying, looks): (Option<Dying>, Option<Looks>),
        issue: Option<&Issue>,
    ) -> std::result::Result<bool, Stop> {
        self.end_looks(looks, issue)?;
        self.end_dying(dying)
    }

    /// The guest puts into its page what the recording says, if it is not there.
    fn put(&self, piece: &Piece) {
        let Some(content) = piece.content.map(|id| self.recording.content(id)) else { return };
        let Some(page) = self.memory.page(PageId(piece.page)) else { return };
        let mut now = vec![0; content.len()];
        page.copy_out(usize::from(piece.offset), &mut now);
        if now[..] != content[..] {
            self.memory.simulated_guest_write(PageId(piece.page), usize::from(piece.offset), content);
        }
    }

    fn issue(&mut self, issue: &Issue) -> Step {
        let looks = self.begin_looks();
        for piece in issue.segments.iter().flatten() {
            self.put(piece);
        }
        self.end_looks(looks, None)?;
        self.ask(issue, false)
    }

    /// The same of a request that is in the guest's memory.
    pub(crate) fn issue_again(&mut self, issue: &Issue) -> Step {
        self.ask(issue, true)
    }

    fn ask(&mut self, issue: &Issue, is_again: bool) -> Step {
        let mut slices: Vec<MemorySlice> = Vec::new();
        for segment in &issue.segments {
            let Some(first) = segment.first() else { continue };
            let gpa = u64::from(first.page) * PAGE_BYTES as u64 + u64::from(first.offset);
            let len: usize = segment.iter().map(|piece| usize::from(piece.len)).sum();
            self.table.slices(gpa, len, &mut slices).map_err(|e| Error::Other(e.to_string()))?;
        }
        let kind = match issue.kind {
            Kind::Read => RequestKind::Read,
            Kind::Write => RequestKind::Write,
            Kind::Flush => RequestKind::Flush,
            Kind::Discard => RequestKind::Discard,
            Kind::WriteZeroes(unmap) => RequestKind::WriteZeroes { unmap },
        };
        let request =
            Request { id: RequestId(issue.id), kind, offset: issue.offset, len: issue.len, segments: &slices };
        let disk = usize::from(issue.disk);
        self.plans[disk].1.push(issue.id);
        self.requests[issue.id as usize].is_issued = true;
        if let Some(watcher) = &self.watcher {
            watch(watcher).issued(self.recording, issue);
        }
        let looks = self.begin_step();
        let (plan, _) = &mut self.plans[disk];
        if is_again {
            self.routes[disk].route_again(&request, plan);
        } else {
            self.routes[disk].route(&request, plan);
        }
        if self.end_step(looks, Some(issue))? {
            return Ok(());
        }
        for log in &mut self.logs {
            log.issued(self.recording, issue);
        }
        self.has_moved = true;
        Ok(())
    }

    pub(crate) fn end_pass(&mut self, disk: usize) -> Step {
        let (mut plan, requests) = std::mem::take(&mut self.plans[disk]);
        if requests.is_empty() {
            return Ok(());
        }
        let looks = self.begin_step();
        simulated_room::set_full(self.watcher.as_ref().is_some_and(|watcher| !watch(watcher).has_memory()));
        self.routes[disk].end_of_pass(&mut plan);
        simulated_room::set_full(false);
        if self.end_step(looks, None)? {
            return Ok(());
        }
        for log in &mut self.logs {
            if log.description.place.journal_disk == disk {
                log.end_of_pass();
            }
        }
        self.carry_out(disk, plan)?;
        for id in requests {
            if self.requests[id as usize].holds == 0 && !self.requests[id as usize].is_completed {
                self.request_done(id);
            }
        }
        self.has_moved = true;
        Ok(())
    }

    fn request_done(&mut self, id: u32) {
        self.requests[id as usize].is_completed = true;
        self.logs.iter_mut().for_each(|log| log.request_done(id));
        if let Some(watcher) = &self.watcher {
            watch(watcher).request_done(id);
        }
    }

    fn carry_out(&mut self, disk: usize, plan: Plan) -> Step {
        for action in plan.actions {
            match action {
                PlanAction::Disk(operation) => {
                    if let Some(request) = operation.request {
                        self.requests[request.0 as usize].holds += 1;
                    }
                    if operation.operation == Operation::Read {
                        let looks = self.begin_looks();
                        for buffer in &operation.buffers {
                            if let Buffer::Slice(slice) = buffer {
                                self.table.prepare_write(slice).expect("there is room for copies");
                            }
                        }
                        self.end_looks(looks, None)?;
                    }
                    let latest = match operation.request {
                        Some(request) => self.done_at[request.0 as usize],
                        None => self.clock + 1 + self.random.below(HOST_WRITE_EVENTS_MAX) as usize,
                    };
                    let (mut execute_at, mut complete_at) = (self.clock, self.clock);
                    if self.switches.has(Switches::DELAY) {
                        let left = latest.saturating_sub(self.clock) as u64 + 1;
                        execute_at += self.random.below(left) as usize;
                        complete_at = execute_at + self.random.below(left) as usize;
                    }
                    let number = self.operations;
                    self.operations += 1;
                    if let Some(watcher) = &self.watcher {
                        watch(watcher).submitted(number, &operation);
                    }
                    self.pending.push(Pending { number, disk, operation, is_executed: false, execute_at, complete_at });
                }
                PlanAction::Hold(request) => self.requests[request.0 as usize].holds += 1,
                PlanAction::Release(request, status) => self.release(request, status)?,
            }
        }
        Ok(())
    }

    fn release(&mut self, request: RequestId, status: Status) -> Step {
        let state = &mut self.requests[request.0 as usize];
        if status != Status::Ok {
            return finding(format!("request {} of the guest failed: {status:?}", request.0));
        }
        if state.holds == 0 {
            return finding(format!("request {} is released more often than it was held", request.0));
        }
        state.holds -= 1;
        if state.holds == 0 {
            self.request_done(request.0);
        }
        Ok(())
    }

    /// Does what is due by now, in any order.
    fn due(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        loop {
            let due: Vec<usize> = (0..self.pending.len())
                .filter(|index| {
                    let pending = &self.pending[*index];
                    // A device's thread hears of no completion in the middle of a pass.
                    let in_pass = !self.plans[pending.disk].1.is_empty();
                    let at = if pending.is_executed { pending.complete_at } else { pending.execute_at };
                    at <= self.clock && !(pending.is_executed && in_pass)
                })
                .collect();
            if due.is_empty() {
                return Ok(());
            }
            let index = due[self.random.below(due.len() as u64) as usize];
            self.advance(index, look)?;
        }
    }

    /// Takes one operation one step on.
    fn advance(&mut self, index: usize, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        if self.pending[index].is_executed {
            let pending = self.pending.swap_remove(index);
            if let Some(watcher) = &self.watcher {
                watch(watcher).completed(pending.number, &pending.operation);
            }
            let mut plan = Plan::default();
            let looks = self.begin_step();
            if let Some(ticket) = pending.operation.ticket {
                self.routes[pending.disk].disk_done(ticket, Ok(()), &mut plan);
            }
            if self.end_step(looks, None)? {
                return self.looked(look);
            }
            self.carry_out(pending.disk, plan)?;
            if let Some(request) = pending.operation.request {
                self.release(request, Status::Ok)?;
            }
        } else {
            self.execute(index)?;
        }
        self.has_moved = true;
        self.looked(look)
    }

    pub(crate) fn execute(&mut self, index: usize) -> Step {
        self.pending[index].is_executed = true;
        let pending = &self.pending[index];
        let image = &self.images[pending.disk];
        let bytes = pending.bytes();
        if let Some(watcher) = &self.watcher {
            watch(watcher).executed(pending.number, &pending.operation, bytes.as_deref());
        }
        if let Some(bytes) = bytes {
            image.write_all_at(&bytes, pending.operation.offset).during("writing an image")?;
        } else if pending.operation.operation == Operation::Read {
            let mut bytes = vec![0; pending.operation.len as usize];
            image.read_exact_at(&mut bytes, pending.operation.offset).during("reading an image")?;
            let mut at = 0;
            for buffer in &pending.operation.buffers {
                let Buffer::Slice(slice) = buffer else { continue };
                slice.copy_in(0, &bytes[at..at + slice.len()]);
                at += slice.len();
            }
        }
        Ok(())
    }

    /// Lets routes that were woken do their work; sometimes a little later.
    fn wake(&mut self, now: bool) -> Step {
        for disk in 0..self.routes.len() {
            let is_late = !now && self.switches.has(Switches::DELAY) && self.random.below(3) != 0;
            if is_late || !self.plans[disk].1.is_empty() {
                continue;
            }
            let Some(descriptor) = self.routes[disk].wake_descriptor() else { continue };
            // How often it was written to: it is never read empty here, so more than before means a new wake.
            let count = event_count(descriptor);
            if count > self.wakes[disk] {
                self.wakes[disk] = count;
                let mut plan = Plan::default();
                let looks = self.begin_step();
                self.routes[disk].woken(&mut plan);
                if self.end_step(looks, None)? {
                    return Ok(());
                }
                self.carry_out(disk, plan)?;
                self.has_moved = true;
            }
        }
        Ok(())
    }

    /// The guest has seen that a request is done, so it has to be.
    fn force(&mut self, id: u32, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        for disk in 0..self.plans.len() {
            self.end_pass(disk)?;
        }
        let mut steps = 0;
        while !self.requests[id as usize].is_completed {
            steps += 1;
            if steps > PATIENCE_STEPS || !self.requests[id as usize].is_issued {
                return finding(format!("request {id} of the guest is never completed"));
            }
            let own = self.pending.iter().position(|pending| pending.operation.request == Some(RequestId(id)));
            match own {
                Some(index) => self.advance(index, look)?,
                None => {
                    self.wake(true)?;
                    self.looked(look)?;
                    let host = self.pending.iter().position(|pending| pending.operation.request.is_none());
                    if let Some(index) = host.or_else(|| (!self.pending.is_empty()).then_some(0)) {
                        self.advance(index, look)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Everything on its way arrives, as when a device is stopped.
    ///
    /// # Errors
    /// When something is never done.
    pub fn drain(&mut self) -> Step {
        let mut steps = 0;
        for disk in 0..self.plans.len() {
            self.end_pass(disk)?;
        }
        while !self.pending.is_empty() {
            steps += 1;
            if steps > PATIENCE_STEPS {
                return finding("the disk is never idle");
            }
            let index = self.random.below(self.pending.len() as u64) as usize;
            self.advance(index, &mut |_| Ok(()))?;
        }
        Ok(())
    }

    /// Asks the routes whether their books are right.
    ///
    /// # Errors
    /// When they are not.
    pub fn check_routes(&self) -> Step {
        for disk in 0..self.journals.disks().len() {
            if let Some(Err(fault)) = self.journals.region(disk).map(|nvm| nvm.check()) {
                return finding(format!("the books of the region are wrong: {fault}"));
            }
        }
        Ok(())
    }

    /// Whether a device is in the midst of a pass.
    pub fn is_in_pass(&self, disk: usize) -> bool {
        !self.plans[disk].1.is_empty()
    }

    /// Has a device hand a log over.
    ///
    /// # Errors
    /// Those of the route.
    pub fn hand_over_on(&mut self, disk: usize, log: LogIndex) -> std::io::Result<bool> {
        self.routes[disk].hand_over(log, &mut Plan::default())
    }

    /// Hands the logs over from a moment on that follows from the seed.
    fn hand_over(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        if self.hand_over_at.is_none_or(|at| self.clock < at) {
            return Ok(());
        }
        self.has_moved |= hand_over::attempt(self)?;
        self.leave_region()?;
        self.looked(look)
    }

    /// Has a log that is on NVM leave it, a step further.
    fn leave_region(&mut self) -> Step {
        for index in 0..self.logs.len() {
            let number = self.logs[index].log.index();
            let Some(log) = self.journals.log(number) else { continue };
            let disk = log.journal_disk();
            if log.placement != PlacementKind::Nvm || !log.is_open() || self.is_in_pass(disk) {
                continue;
            }
            self.journals.change_placement(number, PlacementKind::Storage).during("asking for a hand-over")?;
            if let Some(watcher) = &self.watcher {
                watch(watcher).leaves();
            }
            let mut plan = Plan::default();
            let left = self.routes[disk].hand_over(number, &mut plan);
            self.carry_out(disk, plan)?;
            self.has_moved = true;
            if let Err(error) = left {
                return finding(format!("a log cannot leave its region: {error}"));
            }
        }
        Ok(())
    }

    /// Index of the recorded event that is happening.
    pub fn clock(&self) -> usize {
        self.clock
    }

    /// Which home blocks of a disk are on their way, for a judge that samples.
    pub fn in_flight_writes(&self) -> impl Iterator<Item = &Pending> {
        self.pending.iter().filter(|pending| !pending.is_executed)
    }
}

fn watch(watcher: &SharedWatcher) -> MutexGuard<'_, dyn Watcher + 'static> {
    watcher.lock().expect("no panic under this lock")
}

/// The counter of an eventfd, as the kernel shows it.
fn event_count(descriptor: RawFd) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
    count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
}

/// What no options say.
fn set_up(journals: &Journals, recording: &Recording, seed: u64, milliseconds: &Arc<AtomicU64>) {
    journals.disks().iter().for_each(|disk| disk.simulate_clock(Arc::clone(milliseconds)));
    let rules = [HotPages::Never, HotPages::Faulted, HotPages::Foreseen, HotPages::Lone];
    journals.area.set_hot_pages(rules[(seed % 4) as usize]);
    journals.area.set_excluded_pages(recording.ring_pages.iter().map(|page| PageId(*page)).collect());
}

/// The logs that amberlog has found, for the judge.
fn judged_logs(journals: &Arc<Journals>) -> Result<Vec<JudgedLog>> {
    let description = journals.directory().description().map_err(|e| Error::Other(e.to_string()))?;
    let description = description.ok_or_else(|| Error::Other("the area has no description".to_owned()))?;
    let mut logs = Vec::new();
    for log in journals.logs() {
        let name = journals.area.name_of(log.id);
        let of_log = match description.logs.iter().find(|known| known.name == name) {
            Some(of_log) => of_log.clone(),
            None if log.placement == PlacementKind::Nvm => {
                let image = journals.disk(0).options.path.clone();
                let place = log.place().clone();
                LogDescription::new(name, image.clone(), image, place)
            }
            None => return Err(Error::Other(format!("the log {name} is not described"))),
        };
        logs.push(JudgedLog::new(log, of_log));
    }
    if logs.is_empty() {
        return Err(Error::Other("no journal was found on the recorded disks".to_owned()));
    }
    Ok(logs)
}
