//! Durability by age as a disk has it: the real route, keeper and area under recorded guests, over a disk that loses power. What is
//! judged, and how, is as in the module above; the guest's states are worked out beside, from what it sends.
//!
//! The superblocks that the keeper writes past the route, and flushes, are taken for durable when they are seen on the image.
//!
//! In half of the runs there is no memory for what is held now and then: durability ends for a while. In a third of them something else is
//! wished now and then (never, another age, none). What is judged of promises then is what is said to be in force. While nothing is, a power cut
//! has to leave the error mark, with a number that no compound in the log's place has, or a state of the guest all the same (durability is
//! about to end, or storage has just become a truth). And nothing is lost while the host lives: such a run ends somewhere, and is recovered.

use super::bitmaps::Bitmaps;
use super::disk::{Disk, SECTOR};
use super::history::History;
use super::stream::Stream;
use super::{AGES, AsOf, LogIn, LogPlace, WRITE_OUT, check_states, judge_image};
use crate::complete::JudgedLog;
use crate::error::{During, Error, Result};
use crate::explore::{Finding, Outcome, Thoroughness};
use crate::finding::{Step, Stop, finding};
use crate::recording::{Event, Issue, Kind, Recording};
use crate::scenario::Scenario;
use crate::simulation::{SharedWatcher, Simulation, Watcher};
use crate::switches::Switches;
use block_route::{DiskOperation, Operation};
use guest_kit::Acknowledged;
use guest_tools::random::Random;
use jbd2::{Content, LogRead, Plan, SUPERBLOCK_BYTES, Superblock, sequence};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What is not durable in so many more events, while nothing else happens, never is.
const PATIENCE: u64 = 4 * WRITE_OUT;

/// The log is on storage, for the guest's kernel alone: nothing is judged from here on.
const LEFT_TO_GUEST: &str = "the log is left to the guest";

/// The guest ends here.
const ENDED: &str = "the guest ends";

/// The disk, and the states of the guest.
struct Observer {
    disk: Disk,
    place: LogPlace,
    /// Of each operation of the route: its number on the disk.
    numbers: HashMap<u64, u64>,
    stream: Option<Stream>,
    newest: AsOf,
    bitmaps: Bitmaps,
    history: History,
    problem: Option<String>,
    /// The last transaction that was committed.
    last: Option<u32>,
    /// Draws the passes that end without memory: one in so many, if any.
    full: (Random, u64),
    /// Superblocks on their way, and where the log begins from then on: without memory for one its write fails, and the recording
    /// does not go on.
    superblocks: HashMap<u32, Option<u32>>,
    /// Where the log begins, as the guest was told last.
    told_tail: Option<u32>,
}

impl Observer {
    fn read(&self) -> Vec<u8> {
        let mut raw = vec![0; SUPERBLOCK_BYTES];
        self.disk.read(self.place.offset(0).unwrap_or(0), &mut raw);
        raw
    }

    /// The guest writes a block of its log.
    fn log_write(&mut self, position: u32, bytes: &[u8]) -> std::result::Result<(), String> {
        if position == 0 {
            let (said, format) = Superblock::parse(bytes).map_err(|error| error.to_string())?;
            if said.is_empty() {
                (self.stream, self.last) = (None, None);
            } else if self.stream.is_none() {
                let mut base = vec![0; self.newest.base.len()];
                self.disk.read(0, &mut base);
                self.newest = AsOf { base: Arc::new(base), blocks: HashMap::new(), ..std::mem::take(&mut self.newest) };
                self.bitmaps = Bitmaps::default();
                self.history.opened();
                self.stream = Some(Stream::new(format, said.start, said.sequence));
            }
            return Ok(());
        }
        let Some(stream) = &mut self.stream else { return Ok(()) };
        stream.write(position, bytes);
        while let Some(committed) = stream.next() {
            let contents: Vec<(u64, &[u8])> =
                committed.blocks.iter().map(|(block, bytes)| (*block, &bytes[..])).collect();
            let freed = self.bitmaps.freed(&self.newest, &contents).map_err(|error| error.to_string())?;
            self.history.committed(&committed, Some(&freed));
            self.last = Some(committed.sequence);
            for (block, content) in &committed.blocks {
                self.newest.blocks.insert(*block, Arc::clone(content));
            }
        }
        Ok(())
    }
}

impl Watcher for Observer {
    fn issued(&mut self, recording: &Recording, issue: &Issue) {
        let bytes = match issue.kind {
            Kind::Write => recording.bytes_of(issue),
            Kind::Discard | Kind::WriteZeroes(_) => vec![0; issue.len as usize],
            Kind::Read | Kind::Flush => return,
        };
        let size = self.place.block_bytes as usize;
        for (at, part) in (issue.offset..).step_by(size).zip(bytes.chunks(size)) {
            if at % size as u64 != 0 || part.len() != size {
                continue;
            }
            let block = at / size as u64;
            match self.place.position(block) {
                Some(position) if issue.kind == Kind::Write => {
                    if position == 0 {
                        let said = Superblock::parse(part).ok().map(|(said, _)| said);
                        let tail = said.filter(|said| !said.is_empty()).map(|said| said.sequence);
                        self.superblocks.insert(issue.id, tail);
                    }
                    if let Err(problem) = self.log_write(position, part) {
                        self.problem.get_or_insert(problem);
                    }
                }
                Some(_) => {}
                None if self.stream.is_some() => self.history.wrote(block, part),
                None => {}
            }
        }
    }

    fn request_done(&mut self, id: u32) {
        if let Some(tail) = self.superblocks.remove(&id) {
            self.told_tail = tail;
        }
    }

    fn has_memory(&mut self) -> bool {
        let (random, each) = &mut self.full;
        !self.superblocks.is_empty() || *each == 0 || random.below(*each) != 0
    }

    fn submitted(&mut self, number: u64, operation: &DiskOperation) {
        if operation.operation == Operation::Flush {
            let on_disk = self.disk.flush();
            self.numbers.insert(number, on_disk);
        }
    }

    fn executed(&mut self, number: u64, operation: &DiskOperation, bytes: Option<&[u8]>) {
        if let Some(bytes) = bytes {
            let on_disk = self.disk.write(operation.offset, bytes);
            self.numbers.insert(number, on_disk);
        }
    }

    fn completed(&mut self, number: u64, _operation: &DiskOperation) {
        if let Some(on_disk) = self.numbers.remove(&number) {
            self.disk.end(on_disk);
        }
    }

    fn leaves(&mut self) {}
}

fn age_of(seed: u64) -> u64 {
    AGES[Random::of(seed, 0x6167).below(AGES.len() as u64) as usize]
}

/// What is wished while the guest runs.
struct Wishes {
    random: Random,
    /// Something else in one of so many steps, if ever.
    each: u64,
    age_max: u64,
    /// Since when each commit is durable before its guest is told.
    at_once_since: Option<u64>,
}

impl Wishes {
    fn of_seed(seed: u64, age: u64) -> Self {
        let mut random = Random::of(seed, 0x7769);
        let each = if random.below(3) == 0 { 20 + random.below(300) } else { 0 };
        let age_max = if each > 0 { AGES.into_iter().max().unwrap_or(age) } else { age };
        Wishes { random, each, age_max, at_once_since: None }
    }

    fn change(&mut self) -> Option<Option<Duration>> {
        if self.random.below(self.each) != 0 {
            return None;
        }
        let age = AGES[self.random.below(AGES.len() as u64) as usize];
        Some((self.random.below(5) > 1).then(|| Duration::from_millis(age)))
    }

    fn sees(&mut self, now: u64, in_force: Option<Duration>) {
        let is_at_once = in_force.is_some_and(|within| within.is_zero());
        self.at_once_since = is_at_once.then(|| self.at_once_since.unwrap_or(now));
    }

    /// Whether all that the guest was told is durable: what it was told before is so a while after.
    fn is_at_once(&self, now: u64) -> bool {
        if self.each == 0 { self.age_max == 0 } else { self.at_once_since.is_some_and(|since| since + PATIENCE < now) }
    }
}

fn lock(observer: &Mutex<Observer>) -> MutexGuard<'_, Observer> {
    observer.lock().expect("no panic under this lock")
}

/// What the keeper has written past the route: a superblock, flushed.
fn take_superblock(observer: &mut Observer, simulation: &Simulation<'_>) -> Result<()> {
    let at = observer.place.offset(0).unwrap_or(0);
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    simulation.images[0].read_exact_at(&mut raw, at).during("reading an image")?;
    // What the route writes there is seen when it has ended.
    let is_on_its_way = simulation.pending.iter().any(|pending| {
        let operation = &pending.operation;
        operation.operation == Operation::Write && operation.offset <= at && at < operation.offset + operation.len
    });
    if !is_on_its_way && raw != observer.read() {
        let number = observer.disk.write(at, &raw);
        observer.disk.end(number);
        observer.disk.settle(at, raw.len() as u64);
    }
    Ok(())
}

/// Whether a block that is left in the log's place has a number that is to be given after it, from `next` on: whoever replays what is
/// written there would take it for what comes next.
fn check_numbers(place: &LogPlace, next: u32, mut read: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>) -> Step {
    let mut head = [0; SECTOR as usize];
    for position in 1.. {
        let Some(at) = place.offset(position) else { return Ok(()) };
        read(at, &mut head).during("reading the log's place")?;
        if let Some(header) = jbd2::peek(&head).filter(|header| sequence::is_at_or_after(header.sequence, next)) {
            return finding(format!(
                "log block {position} on storage is of transaction {}, and the next kernel is told to go on with {next}",
                header.sequence
            ));
        }
    }
    Ok(())
}

/// The log in its own place on an image.
struct OnImage<'a>(&'a File, &'a LogPlace);

impl LogRead for OnImage<'_> {
    type Error = std::io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::io::Result<Content> {
        let at = self.1.offset(position).ok_or(std::io::ErrorKind::NotFound)?;
        self.0.read_exact_at(buffer, at)?;
        Ok(Content::Present)
    }
}

/// The guest ends here, and the host lives: nothing that it committed is lost.
fn recover(observer: &Mutex<Observer>, simulation: &mut Simulation<'_>) -> Step {
    simulation.drain()?;
    simulation.journals.recover_all().during("recovering")?;
    let mut observer = lock(observer);
    let Some(last) = observer.last else { return Ok(()) };
    let size = observer.place.block_bytes;
    // Recovery says in the ext4 superblock that there is nothing to replay.
    observer.history.forget(1024 / size);
    let image = &simulation.images[0];
    // Where not even descriptors were held, the log is on storage by now, and the guest's kernel replays it.
    let mut replayed: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut log = OnImage(image, &observer.place);
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    image.read_exact_at(&mut raw, observer.place.offset(0).unwrap_or(0)).during("reading an image")?;
    let (superblock, format) = Superblock::parse(&raw).map_err(|error| Error::Other(error.to_string()))?;
    if superblock.errno != 0 {
        return finding("recovery leaves an error mark on storage");
    }
    if superblock.is_empty() {
        check_numbers(&observer.place, superblock.sequence, |at, into| image.read_exact_at(into, at))?;
    } else {
        let plan = Plan::new(&mut log, &superblock, &format, &|_| true);
        let plan = match plan {
            Ok(plan) => plan,
            Err(error) => return finding(format!("the log on storage cannot be replayed: {error}")),
        };
        for block in plan.blocks() {
            let mut content = vec![0; size as usize];
            log.read(block.newest().position, &mut content).during("reading the log on storage")?;
            if !block.newest().restore(&format, &mut content) {
                return finding(format!("the copy of block {} in the log on storage is damaged", block.home()));
            }
            replayed.insert(block.home(), content);
        }
    }
    let mut failed = None;
    let mut read = |block: u64| {
        if let Some(content) = replayed.get(&block) {
            return content.clone();
        }
        let mut content = vec![0; size as usize];
        if let Err(error) = image.read_exact_at(&mut content, block * size) {
            failed = Some(error);
        }
        content
    };
    let state = check_states(&observer.history, &[last], (&observer.newest.base, size), &mut read);
    if let Some(error) = failed {
        return Err(Stop::Error(Error::Other(format!("reading an image: {error}"))));
    }
    match state {
        Ok(()) => Ok(()),
        Err(why) => finding(format!("recovery, with the host alive, leaves no state of the guest: {why}")),
    }
}

/// What is promised of a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InForce {
    Yes,
    /// The error mark may be there. Whether there is no memory for blocks of the guest's log, so that these are in their own places.
    No {
        lacks_memory: bool,
    },
}

/// Whether a superblock on storage has the mark of a log of compounds (`placement/src/mark.rs`).
fn has_mark_of_age(raw: &[u8], superblock: &Superblock) -> bool {
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| raw[at + index]));
    raw[0x80..].starts_with(b"AMBHELD1") && word(0x88) == 4 && word(0xa4) == superblock.sequence
}

/// What a power cut leaves. It may be as of one of these transactions, if any is known.
fn look(
    observer: &Observer,
    random: &mut Random,
    candidates: &[u32],
    in_force: InForce,
    judged: Option<(&Scenario, &BTreeMap<String, Acknowledged>)>,
) -> Step {
    let cut = observer.disk.cut(random);
    let mut raw = [0; SUPERBLOCK_BYTES];
    cut.read(observer.place.offset(0).unwrap_or(0), &mut raw);
    let (superblock, format) = match Superblock::parse(&raw) {
        Ok(parsed) => parsed,
        Err(error) => return finding(format!("the journal superblock on storage is damaged: {error}")),
    };
    match in_force {
        InForce::Yes if superblock.errno != 0 => return finding("there is an error mark on storage"),
        InForce::No { .. } if superblock.errno != 0 && !superblock.is_empty() => {
            return finding("there is an error mark on storage, in a log that is not empty");
        }
        // It says a number behind those of all that lies in the log's place; but where it shares a page with something else, it is not written
        // anew for the guest's own blocks.
        InForce::No { lacks_memory: true } if superblock.errno != 0 && observer.place.block_bytes < 4096 => {
            return Ok(());
        }
        InForce::No { .. } if superblock.errno != 0 => {
            return check_numbers(&observer.place, superblock.sequence, |at, into| {
                cut.read(at, into);
                Ok(())
            });
        }
        InForce::No { lacks_memory } if candidates.is_empty() && observer.stream.is_some() => {
            // Where not even descriptors were held, the guest's own log is on storage, and its flushes reach it.
            if lacks_memory && !superblock.is_empty() && !has_mark_of_age(&raw, &superblock) {
                return Ok(());
            }
            return finding("what is committed is only held, and there is no error mark on storage");
        }
        InForce::Yes | InForce::No { .. } => {}
    }
    let size = observer.place.block_bytes;
    let mut replayed: HashMap<u64, Vec<u8>> = HashMap::new();
    if !superblock.is_empty() {
        let mut log = LogIn(&cut, &observer.place);
        let plan = match Plan::new(&mut log, &superblock, &format, &|_| true) {
            Ok(plan) => plan,
            Err(error) => return finding(format!("the log on storage cannot be replayed: {error}")),
        };
        if plan.summary().is_damaged() {
            return finding(format!("the log on storage is damaged: {:?}", plan.summary()));
        }
        for block in plan.blocks() {
            let mut content = vec![0; size as usize];
            cut.read(observer.place.offset(block.newest().position).unwrap_or(0), &mut content);
            if !block.newest().restore(&format, &mut content) {
                return finding(format!("the log's copy of block {} is damaged", block.home()));
            }
            replayed.insert(block.home(), content);
        }
    }
    if !candidates.is_empty() {
        let base = (&observer.newest.base, size);
        let state = check_states(&observer.history, candidates, base, &mut |block| match replayed.get(&block) {
            Some(content) => content.clone(),
            None => {
                let mut content = vec![0; size as usize];
                cut.read(block * size, &mut content);
                content
            }
        });
        if let Err(why) = state {
            return finding(format!("what a power cut leaves is no state of the guest: {why}"));
        }
    }
    match judged {
        Some((scenario, promised)) => judge_image(&cut, scenario, promised),
        None => Ok(()),
    }
}

/// One run. The journal is on the disk of its file system.
///
/// # Errors
/// When it could not be made; a broken promise is in the outcome.
pub fn run(recording: &Recording, seed: u64, switches: Switches, how: Thoroughness) -> Result<Outcome> {
    // What is handed over is not durable by age any more.
    let mut switches = switches.without(Switches::HAND_OVER);
    let mut choice_of_memory = Random::of(seed, 0x6d65);
    let full_each = if choice_of_memory.below(2) == 0 { 0 } else { 4 + choice_of_memory.below(60) };
    let mut wishes = Wishes::of_seed(seed, age_of(seed));
    if full_each > 0 || wishes.each > 0 {
        // Where not even descriptors are held, the log ends up on storage, which the judge of kills does not follow.
        switches = switches.without(Switches::KILLS);
    }
    let scenario = Scenario::named(&recording.scenario)?;
    let age = age_of(seed);
    let world = super::World::new(recording, seed, age)?;
    let mut base = vec![0; recording.disks[0].size_bytes as usize];
    world.disk.read(0, &mut base);
    let block_bytes = world.place.block_bytes;
    let observer = Arc::new(Mutex::new(Observer {
        disk: Disk::new(base.clone()),
        place: world.place,
        numbers: HashMap::new(),
        stream: None,
        newest: AsOf { base: Arc::new(base), blocks: HashMap::new(), block_bytes },
        bitmaps: Bitmaps::default(),
        history: History::default(),
        problem: None,
        last: None,
        full: (Random::of(seed, 0x6675), full_each),
        superblocks: HashMap::new(),
        told_tail: None,
    }));
    let shared: SharedWatcher = observer.clone();
    let mut simulation = Simulation::with(recording, seed, switches, (None, Some(age)), Some(shared))?;
    simulation.logs.iter_mut().for_each(JudgedLog::set_aged);
    let told: Vec<(u64, &str, u64)> = (0..)
        .zip(&recording.events)
        .filter_map(|(at, event)| match event {
            Event::Acknowledged(stream, number) => {
                Some((at, recording.streams[usize::from(*stream)].as_str(), *number))
            }
            _ => None,
        })
        .collect();
    let promised = |now: u64, is_at_once: bool, age_max: u64| {
        let mut promised: BTreeMap<String, Acknowledged> = BTreeMap::new();
        let old = told.iter().filter(|(at, ..)| if is_at_once { *at < now } else { at + age_max + PATIENCE < now });
        for (_, stream, number) in old {
            let entry = promised.entry((*stream).to_owned()).or_default();
            entry.count += 1;
            entry.last = Some(*number);
        }
        promised
    };
    let mut outcome = Outcome::default();
    let (mut random, mut choice) = (Random::of(seed, 0x706f), Random::of(seed, 0x6c6f));
    let (mut visited, mut compounds, mut is_over) = (0, 0, false);
    // The compound that was made last: given up, it may be durable all the same.
    let mut made_last = None;
    let lacks_memory = full_each != 0;
    let may_end = lacks_memory || wishes.each > 0;
    // Where the guest ends, in events: not always at the end.
    let ends_at = match may_end {
        true => choice_of_memory.below(recording.events.len() as u64 * 5 / 4) as usize,
        false => usize::MAX,
    };
    let ended = simulation.run(&mut |simulation| -> Step {
        if simulation.clock() >= ends_at {
            return Err(Stop::Finding(ENDED.to_owned()));
        }
        let mut observer = lock(&observer);
        take_superblock(&mut observer, simulation)?;
        if let Some(problem) = observer.problem.take() {
            return Err(Stop::Error(Error::Other(problem)));
        }
        visited += 1;
        let now = simulation.clock() as u64;
        if may_end {
            let durability = simulation.journals.report("vm").disks[0].durability.clone().unwrap_or_default();
            made_last = durability.through.and_then(|(_, under_way)| under_way).or(made_last);
            wishes.sees(now, durability.within);
        }
        if wishes.each > 0
            && let Some(within) = wishes.change()
        {
            simulation.journals.set_durable_within(0, within).during("wishing another age")?;
        }
        if choice.below(how.points_each) != 0 || visited > how.until {
            return Ok(());
        }
        outcome.points += 1;
        let is_judged = how.judgements_each != 0 && choice.below(how.judgements_each) == 0;
        outcome.judgements += u64::from(is_judged);
        let report = simulation.journals.report("vm");
        let disk = &report.disks[0];
        if let Some(fault) = &disk.fault {
            // Of a transaction whose descriptor was not held the books know nothing, and what is written home for it looks odd. The log
            // goes to storage then, for the guest's kernel.
            if lacks_memory && fault.contains("is not what it seemed") {
                return Err(Stop::Finding(LEFT_TO_GUEST.to_owned()));
            }
            return finding(format!("the disk has a fault: {fault}"));
        }
        let durability = disk.durability.as_ref();
        // Where not even descriptors were held, the log ends up on storage; and the mark is there until a closed log's superblock is.
        let is_in_force = durability.is_some_and(|durability| durability.within_s.is_some());
        let is_held_only = durability.is_some() && !is_in_force;
        let through = durability.and_then(|durability| durability.through);
        if may_end && !is_in_force && (is_held_only || is_over || disk.placement_effective == "storage") {
            outcome.endings += u64::from(!std::mem::replace(&mut is_over, true));
            if disk.placement_effective == "storage" {
                return Ok(());
            }
            outcome.unpromised += 1;
            let candidates: Vec<u32> = through.map_or_else(Vec::new, |(durable, _)| {
                let later = made_last.filter(|last| sequence::is_after(*last, durable));
                [Some(durable), later].into_iter().flatten().collect()
            });
            return look(&observer, &mut random, &candidates, InForce::No { lacks_memory }, None);
        }
        outcome.promised += u64::from(is_in_force);
        outcome.begins += u64::from(std::mem::replace(&mut is_over, false));
        compounds = durability.map_or(compounds, |durability| durability.compounds);
        if let (Some((durable, _)), Some(tail)) = (through, observer.told_tail) {
            let passed = tail.wrapping_sub(1);
            if observer.last.is_some_and(|last| !sequence::is_after(passed, last))
                && sequence::is_after(passed, durable)
            {
                return finding(format!("the guest's log begins with {tail}, and durable is {durable}"));
            }
        }
        let promised = promised(now, wishes.is_at_once(now), wishes.age_max);
        let judged = is_judged.then_some((&scenario, &promised));
        let candidates: Vec<u32> = through
            .map_or_else(Vec::new, |(durable, under_way)| [Some(durable), under_way].into_iter().flatten().collect());
        look(&observer, &mut random, &candidates, InForce::Yes, judged)
    });
    let event = simulation.clock();
    let ended = match ended {
        Err(Stop::Finding(what)) if what == ENDED => recover(&observer, &mut simulation),
        Err(Stop::Finding(what)) if what == LEFT_TO_GUEST => Ok(()),
        Ok(()) if may_end => recover(&observer, &mut simulation),
        other => other,
    };
    match ended {
        Ok(()) if compounds == 0 && age < 1000 && !may_end => {
            return Err(Error::Other("nothing was made durable, so nothing was tested".to_owned()));
        }
        Ok(()) => {}
        Err(Stop::Error(error)) => return Err(error),
        Err(Stop::Finding(what)) => {
            outcome.finding = Some(Finding {
                scenario: recording.scenario.clone(),
                seed,
                switches,
                point: visited,
                event,
                judgements_each: how.judgements_each,
                what: format!("{what} (durable within {age} events)"),
            });
        }
    }
    Ok(outcome)
}
