//! One recording, run through the real routes, journals and area over a disk that an adversary drives.
//!
//! The guest is the recording: it sends what was sent, when everything that had been done before in the recording is
//! done here too. The disk takes its time within that freedom. Everything follows from the seed. Here is what a simulation has and is asked;
//! how it runs is in `run`.

use crate::complete::JudgedLog;
use crate::deaths::Deaths;
use crate::error::{During, Error, Result};
use crate::finding::{Step, finding};
use crate::recording::{Event, Issue, PAGE_BYTES, Piece, Recording};
use crate::scratch::scratch;
use crate::switches::Switches;
use block_route::{Buffer, DiskOperation, LogIndex, Operation, Plan, Route, Start};
use guest_kit::Acknowledged;
use guest_memory::{MemoryTable, PageId, RegionDescriptor, VmMemory};
use guest_tools::random::Random;
use placement::{
    AreaDirectory, DiskOptions, DiskRoute, HotPages, Journals, JournalsOptions, LogDescription, NvmDisk, PlacementKind,
};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

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
    pub(crate) number: u64,
    /// The disk.
    pub disk: usize,
    /// What is to be done.
    pub operation: DiskOperation,
    /// It has reached the disk, but nobody was told.
    pub is_executed: bool,
    pub(crate) execute_at: usize,
    pub(crate) complete_at: usize,
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
pub(crate) struct RequestState {
    pub(crate) holds: u32,
    pub(crate) is_issued: bool,
    pub(crate) is_completed: bool,
}

/// What the guest does to a page between its uses.
pub(crate) enum Mutation {
    Content(Piece),
    Garbage(u32, u64),
}

/// See the module.
pub struct Simulation<'r> {
    /// What is run.
    pub recording: &'r Recording,
    pub(crate) switches: Switches,
    pub(crate) random: Random,
    /// The images' and the area's directory.
    pub directory: tempfile::TempDir,
    /// The guest's memory.
    pub memory: Arc<VmMemory>,
    pub(crate) table: Arc<MemoryTable>,
    /// What is tested.
    pub journals: Arc<Journals>,
    pub(crate) routes: Vec<DiskRoute>,
    pub(crate) watcher: Option<SharedWatcher>,
    pub(crate) operations: u64,
    /// The disks.
    pub images: Vec<File>,
    /// The logs and what the judge knows of them.
    pub logs: Vec<JudgedLog>,
    /// What is on its way.
    pub pending: Vec<Pending>,
    /// What had been acknowledged.
    pub acknowledged: BTreeMap<String, Acknowledged>,
    pub(crate) requests: Vec<RequestState>,
    pub(crate) done_at: Vec<usize>,
    pub(crate) plans: Vec<(Plan, Vec<u32>)>,
    pub(crate) wakes: Vec<u64>,
    pub(crate) mutations: BTreeMap<usize, Vec<Mutation>>,
    pub(crate) clock: usize,
    /// The same for the journals: an event is a millisecond.
    pub(crate) milliseconds: Arc<AtomicU64>,
    pub(crate) seed: u64,
    /// Steps in which stores were looked at.
    pub(crate) steps: u64,
    /// Kills in the middle of a step that were checked.
    pub looks: u64,
    /// From which event on logs are handed over to storage, if at all.
    pub(crate) hand_over_at: Option<usize>,
    pub(crate) budget_bytes: u64,
    /// How often its guest was reset as a log was to be handed over: a run ends with that.
    pub(crate) resets: u64,
    /// When the worker is killed, and another goes on.
    pub(crate) deaths: Deaths,
    /// Something happened since it was last taken.
    pub has_moved: bool,
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
            resets: 0,
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

    /// Whether a log lives on storage by now.
    pub fn is_stored(&self, judged: &JudgedLog) -> bool {
        let log = self.journals.log(judged.log.index());
        log.is_some_and(|log| log.placement == PlacementKind::Storage)
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

    /// Index of the recorded event that is happening.
    pub fn clock(&self) -> usize {
        self.clock
    }

    /// Which home blocks of a disk are on their way, for a judge that samples.
    pub fn in_flight_writes(&self) -> impl Iterator<Item = &Pending> {
        self.pending.iter().filter(|pending| !pending.is_executed)
    }
}

/// The watcher, to tell it something.
pub(crate) fn watch(watcher: &SharedWatcher) -> MutexGuard<'_, dyn Watcher + 'static> {
    watcher.lock().expect("no panic under this lock")
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
