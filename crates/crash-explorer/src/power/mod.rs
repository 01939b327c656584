//! Durability by age (crate `durability`) under recorded guests, over a disk that loses power: after each step, what a kernel or
//! e2fsck would make of storage alone is compared with the states of the guest.
//!
//! The clock is the recording's: an event is a millisecond. An acknowledgement of the guest's user space that is older than the
//! age and one write-out must have survived.
//!
//! What is tested here is the machine with real logs, bitmaps and orders of requests, driven as a placement drives it. The placement
//! itself, with its area and its route, is tested in [`route`].

mod bitmaps;
mod disk;
mod history;
pub mod route;
mod stream;

use crate::error::{During, Error, Result};
use crate::explore::{Finding, Outcome, Thoroughness};
use crate::finding::{Step, Stop, finding};
use crate::recording::{Event, Issue, Kind, PAGE_BYTES, Recording};
use crate::scenario::Scenario;
use crate::scratch::scratch;
use crate::switches::Switches;
use bitmaps::Bitmaps;
use disk::{Cut, Disk};
use durability::{AnswerId, Committed, Durability, Freed, Place, Transaction, Version, View, WhenAsked, WriteId};
use extfs::{Allocation, FreedBlocks, JournalExtent, ReadAt};
use guest_kit::image::FileSystem;
use guest_kit::{Acknowledged, Reported, judge};
use guest_tools::random::Random;
use history::History;
use jbd2::{Content, LogRead, Plan, SUPERBLOCK_BYTES, Superblock, sequence};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use stream::Stream;

/// An operation takes so many events at most.
const LATENCY_MAX: u64 = 12;
/// What is older than its age and this is durable.
const WRITE_OUT: u64 = 40 * LATENCY_MAX;
/// What is not done in this many operations is never done.
const PATIENCE: u32 = 100_000;
/// Ages, in events.
const AGES: [u64; 5] = [0, 40, 300, 1500, 6000];

/// Blocks of the file system as of some transaction: what was journaled, over the disk as it was when the log was opened.
#[derive(Default)]
struct AsOf {
    base: Arc<Vec<u8>>,
    blocks: HashMap<u64, Arc<[u8]>>,
    block_bytes: u64,
}

impl ReadAt for AsOf {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let into = (at % self.block_bytes) as usize;
            let count = (buffer.len() - done).min(self.block_bytes as usize - into);
            let part = &mut buffer[done..done + count];
            match self.blocks.get(&(at / self.block_bytes)) {
                Some(content) => part.copy_from_slice(&content[into..into + count]),
                None => {
                    let from = self.base.get(at as usize..at as usize + count);
                    part.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
                }
            }
            done += count;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.base.len() as u64
    }
}

/// Compares what a power cut leaves, replayed, with the guest's states as of some transactions, of which it has to be one. The disk was
/// `base` when the log was opened.
fn check_states(
    history: &History,
    candidates: &[u32],
    (base, block_bytes): (&Arc<Vec<u8>>, u64),
    read: &mut dyn FnMut(u64) -> Vec<u8>,
) -> std::result::Result<(), String> {
    let mut faults = Vec::new();
    for last in candidates {
        // Seldom asked for.
        let mut as_of: Option<(AsOf, Bitmaps)> = None;
        let mut is_free = |block: u64| {
            let (as_of, bitmaps) = as_of.get_or_insert_with(|| {
                let blocks = history.versions(*last).map(|(block, content)| (block, Arc::clone(content))).collect();
                (AsOf { base: Arc::clone(base), blocks, block_bytes }, Bitmaps::default())
            });
            bitmaps.is_free(as_of, block).unwrap_or(false)
        };
        match history.check(*last, read, &mut is_free) {
            Ok(_) => return Ok(()),
            Err(fault) => faults.push(fault),
        }
    }
    Err(faults.join("; nor: "))
}

/// What the machine is shown.
struct Shown<'a> {
    durable: &'a mut AsOf,
    allocation: &'a mut Allocation,
    versions: &'a mut HashMap<Version, (u64, Arc<[u8]>)>,
    logged: &'a BTreeMap<u64, Newest>,
    disk: &'a Disk,
    place: &'a LogPlace,
    now: u64,
}

impl View for Shown<'_> {
    fn made_durable(&mut self, _through: u32, blocks: &[(u64, Version)]) {
        for (block, version) in blocks {
            if let Some((_, content)) = self.versions.remove(version) {
                self.allocation.changed(*block, Some(&content));
                self.durable.blocks.insert(*block, content);
            }
        }
    }

    fn at_home(&mut self, blocks: &[u64]) {
        for block in blocks {
            let Some(content) = self.durable.blocks.get(block) else { continue };
            let mut home = vec![0; content.len()];
            self.disk.read(block * content.len() as u64, &mut home);
            assert!(home[..] == content[..], "block {block} is not at home");
        }
    }

    fn is_free(&mut self, block: u64) -> bool {
        self.allocation.is_free(self.durable, block).unwrap_or(false)
    }

    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()> {
        let held = self.versions.get(&version).map(|(_, content)| content);
        let logged = || self.logged.values().find(|newest| newest.version == version).map(|newest| &newest.content);
        into.copy_from_slice(held.or_else(logged).ok_or(io::ErrorKind::NotFound)?);
        Ok(())
    }

    fn logged(&mut self, position: u32, into: &mut [u8]) -> io::Result<()> {
        self.disk.read(self.place.offset(position).ok_or(io::ErrorKind::NotFound)?, into);
        Ok(())
    }

    fn wall_clock(&self) -> (u64, u32) {
        (1_700_000_000 + self.now / 1000, (self.now % 1000) as u32)
    }

    fn committed_after(&mut self, blocks: Range<u64>, after: u32) -> Vec<Committed> {
        let later = self.logged.range(blocks).filter(|(_, newest)| sequence::is_after(newest.transaction, after));
        let of = |(block, newest): (&u64, &Newest)| Committed {
            block: *block,
            version: newest.version,
            transaction: newest.transaction,
            is_gone_over: false,
        };
        later.map(of).collect()
    }
}

/// The newest version of a block that the guest's log has, or has had: the machine asks for none before the tail.
struct Newest {
    transaction: u32,
    version: Version,
    content: Arc<[u8]>,
}

/// Where a log is.
struct LogPlace {
    extents: Vec<JournalExtent>,
    block_bytes: u64,
}

impl LogPlace {
    fn offset(&self, position: u32) -> Option<u64> {
        let extent = self.extents.iter().find(|extent| (extent.log..extent.log + extent.count).contains(&position))?;
        Some((extent.physical + u64::from(position - extent.log)) * self.block_bytes)
    }

    fn position(&self, block: u64) -> Option<u32> {
        let extent =
            self.extents.iter().find(|at| (at.physical..at.physical + u64::from(at.count)).contains(&block))?;
        Some(extent.log + (block - extent.physical) as u32)
    }
}

enum OnDisk {
    Machine(durability::OperationId),
    /// A write of the guest that the machine knows, and its request.
    Guest(WriteId, u32),
    /// One that it does not know.
    Plain(u32),
}

/// A held write.
struct Held {
    offset: u64,
    bytes: Vec<u8>,
    request: u32,
}

struct World<'r> {
    recording: &'r Recording,
    random: Random,
    disk: Disk,
    place: LogPlace,
    machine: Option<Durability>,
    stream: Option<Stream>,
    newest: AsOf,
    durable: AsOf,
    allocation: Allocation,
    freed: FreedBlocks,
    /// The same for the judge.
    bitmaps: Bitmaps,
    history: History,
    versions: HashMap<Version, (u64, Arc<[u8]>)>,
    /// By block.
    logged: BTreeMap<u64, Newest>,
    on_disk: BTreeMap<u64, (OnDisk, u64)>,
    held: HashMap<WriteId, Held>,
    answers: HashMap<AnswerId, Option<u32>>,
    holds: HashMap<u32, u32>,
    now: u64,
    age: u64,
    next: u64,
    last: u32,
    closing: BTreeSet<AnswerId>,
    acknowledged: Vec<(u64, String, u64)>,
    unknown_frees: u64,
}

struct LogIn<'c, 'd>(&'c Cut<'d>, &'c LogPlace);

impl LogRead for LogIn<'_, '_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::result::Result<Content, Infallible> {
        match self.1.offset(position) {
            Some(offset) => self.0.read(offset, buffer),
            None => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

impl<'r> World<'r> {
    fn new(recording: &'r Recording, seed: u64, age: u64) -> Result<Self> {
        let mut base = vec![0; recording.disks[0].size_bytes as usize];
        for (block, content) in &recording.disks[0].base {
            let at = *block as usize * PAGE_BYTES;
            base[at..at + PAGE_BYTES].copy_from_slice(recording.content(*content));
        }
        let found = extfs::discover(&base).map_err(|error| Error::Other(error.to_string()))?;
        let file_system = found.first().ok_or_else(|| Error::Other("no file system was recorded".to_owned()))?;
        let extents = file_system.journal.extents(&file_system.superblock);
        let place = LogPlace { extents, block_bytes: file_system.superblock.block_size.into() };
        Ok(World {
            recording,
            random: Random::of(seed, 0x706f),
            disk: Disk::new(base),
            place,
            machine: None,
            stream: None,
            newest: AsOf::default(),
            durable: AsOf::default(),
            allocation: Allocation::default(),
            freed: FreedBlocks::default(),
            bitmaps: Bitmaps::default(),
            history: History::default(),
            versions: HashMap::new(),
            logged: BTreeMap::new(),
            on_disk: BTreeMap::new(),
            held: HashMap::new(),
            answers: HashMap::new(),
            holds: HashMap::new(),
            now: 0,
            age,
            next: 0,
            last: 0,
            closing: BTreeSet::new(),
            acknowledged: Vec::new(),
            unknown_frees: 0,
        })
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn send(&mut self, number: u64, what: OnDisk) {
        let due = self.now + 1 + self.random.below(LATENCY_MAX);
        self.on_disk.insert(number, (what, due));
    }

    fn with_machine<T>(
        &mut self,
        call: impl FnOnce(&mut Durability, Duration, &mut dyn View, &mut Vec<durability::Step>) -> T,
    ) -> std::result::Result<Option<T>, Stop> {
        let Some(mut machine) = self.machine.take() else { return Ok(None) };
        let mut steps = Vec::new();
        let mut view = Shown {
            durable: &mut self.durable,
            allocation: &mut self.allocation,
            versions: &mut self.versions,
            logged: &self.logged,
            disk: &self.disk,
            place: &self.place,
            now: self.now,
        };
        let result = call(&mut machine, Duration::from_millis(self.now), &mut view, &mut steps);
        self.machine = Some(machine);
        for step in steps {
            self.carry_out(step)?;
        }
        Ok(Some(result))
    }

    fn carry_out(&mut self, step: durability::Step) -> Step {
        use durability::Step as Do;
        match step {
            Do::Write { operation, place, bytes } => {
                let block_bytes = self.place.block_bytes as usize;
                let number = match place {
                    Place::Home(block) => self.disk.write(block * self.place.block_bytes, &bytes),
                    Place::Superblock => self.disk.write(self.place.offset(0).unwrap_or(0), &bytes),
                    // A log lies in pieces.
                    Place::Log(first) => {
                        let parts: Vec<(u32, &[u8])> = (first..).zip(bytes.chunks(block_bytes)).collect();
                        let mut number = 0;
                        for (index, (position, part)) in parts.iter().enumerate() {
                            let Some(offset) = self.place.offset(*position) else {
                                return finding(format!("a compound goes to log block {position}, which is none"));
                            };
                            number = self.disk.write(offset, part);
                            if index + 1 < parts.len() {
                                // The last part is the operation; the others end before it.
                                self.disk.end(number);
                            }
                        }
                        number
                    }
                };
                self.send(number, OnDisk::Machine(operation));
            }
            Do::Flush { operation } => {
                let number = self.disk.flush();
                self.send(number, OnDisk::Machine(operation));
            }
            Do::Go(id) => {
                if let Some(held) = self.held.remove(&id) {
                    let number = self.disk.write(held.offset, &held.bytes);
                    self.send(number, OnDisk::Guest(id, held.request));
                }
            }
            Do::Answer { answer, is_good } => {
                if !is_good {
                    return finding("the guest is told that there is no durability");
                }
                if self.closing.remove(&answer) {
                    self.machine = None;
                    self.stream = None;
                }
                if let Some(Some(request)) = self.answers.remove(&answer) {
                    self.release(request);
                }
            }
            Do::Failed(why) => return finding(format!("the machine gave up: {why}")),
        }
        Ok(())
    }

    fn ask(&mut self, request: Option<u32>) -> AnswerId {
        let answer = AnswerId(self.id());
        self.answers.insert(answer, request);
        if let Some(request) = request {
            *self.holds.entry(request).or_default() += 1;
        }
        answer
    }

    fn release(&mut self, request: u32) {
        if let Some(holds) = self.holds.get_mut(&request) {
            *holds -= 1;
        }
    }

    // The guest's requests.

    fn issue(&mut self, issue: &Issue) -> Step {
        self.holds.insert(issue.id, 0);
        match issue.kind {
            Kind::Read => Ok(()),
            Kind::Flush if self.machine.is_some() => {
                let answer = self.ask(Some(issue.id));
                self.with_machine(|machine, now, view, steps| machine.flush_asked(now, answer, view, steps))?;
                Ok(())
            }
            Kind::Flush => {
                *self.holds.entry(issue.id).or_default() += 1;
                let number = self.disk.flush();
                self.send(number, OnDisk::Plain(issue.id));
                Ok(())
            }
            Kind::Write | Kind::Discard | Kind::WriteZeroes(_) => {
                let bytes = match issue.kind {
                    Kind::Write => self.recording.bytes_of(issue),
                    _ => vec![0; issue.len as usize],
                };
                self.write(issue, &bytes)
            }
        }
    }

    /// Cuts a write along the log's blocks.
    fn write(&mut self, issue: &Issue, bytes: &[u8]) -> Step {
        let block_bytes = self.place.block_bytes;
        let end = issue.offset + issue.len;
        let mut at = issue.offset;
        while at < end {
            let block = at / block_bytes;
            if let Some(position) = self.place.position(block) {
                let to = end.min((block + 1) * block_bytes);
                let part = bytes[(at - issue.offset) as usize..(to - issue.offset) as usize].to_vec();
                self.log_write(issue, position, at, &part)?;
                at = to;
                continue;
            }
            let mut to = end.min((block + 1) * block_bytes);
            while to < end && self.place.position(to / block_bytes).is_none() {
                to = end.min((to / block_bytes + 1) * block_bytes);
            }
            let part = bytes[(at - issue.offset) as usize..(to - issue.offset) as usize].to_vec();
            self.home_write(issue, at, part)?;
            at = to;
        }
        Ok(())
    }

    fn home_write(&mut self, issue: &Issue, offset: u64, bytes: Vec<u8>) -> Step {
        let (size, len) = (self.place.block_bytes, bytes.len() as u64);
        *self.holds.entry(issue.id).or_default() += 1;
        if self.machine.is_none() {
            let number = self.disk.write(offset, &bytes);
            self.send(number, OnDisk::Plain(issue.id));
            return Ok(());
        }
        let touched = offset / size..(offset + len).div_ceil(size);
        let whole = offset.div_ceil(size)..((offset + len) / size).max(offset.div_ceil(size));
        let kind = match issue.kind {
            Kind::Discard => durability::Kind::Discard,
            Kind::WriteZeroes(_) => durability::Kind::Zeroes,
            _ => durability::Kind::Write,
        };
        for block in whole.clone() {
            let from = (block * size - offset) as usize;
            self.history.wrote(block, &bytes[from..from + size as usize]);
        }
        let id = WriteId(self.id());
        // Before the machine hears of it: it may let go of it at once.
        self.held.insert(id, Held { offset, bytes, request: issue.id });
        let may_go = self.with_machine(|machine, now, view, steps| {
            machine.write_begins(now, id, kind, touched, whole, WhenAsked::default(), view, steps)
        })?;
        if may_go == Some(true) { self.carry_out(durability::Step::Go(id)) } else { Ok(()) }
    }

    fn log_write(&mut self, issue: &Issue, position: u32, offset: u64, bytes: &[u8]) -> Step {
        if issue.kind != Kind::Write || bytes.len() as u64 != self.place.block_bytes {
            if self.machine.is_none() {
                *self.holds.entry(issue.id).or_default() += 1;
                let number = self.disk.write(offset, bytes);
                self.send(number, OnDisk::Plain(issue.id));
                return Ok(());
            }
            return Err(Error::Other("a recording has a part of a log block".to_owned()).into());
        }
        if position == 0 {
            return self.superblock_write(issue, offset, bytes);
        }
        let Some(stream) = &mut self.stream else {
            *self.holds.entry(issue.id).or_default() += 1;
            let number = self.disk.write(offset, bytes);
            self.send(number, OnDisk::Plain(issue.id));
            return Ok(());
        };
        stream.write(position, bytes);
        while let Some(committed) = self.stream.as_mut().and_then(Stream::next) {
            self.committed(&committed, issue.id)?;
        }
        Ok(())
    }

    fn superblock_write(&mut self, issue: &Issue, offset: u64, bytes: &[u8]) -> Step {
        let other = |error: jbd2::SuperblockError| Stop::Error(Error::Other(error.to_string()));
        let (said, format) = Superblock::parse(bytes).map_err(other)?;
        if self.machine.is_some() {
            let answer = self.ask(Some(issue.id));
            if said.is_empty() {
                self.closing.insert(answer);
                let raw = bytes[..SUPERBLOCK_BYTES].to_vec();
                self.with_machine(|machine, now, view, steps| machine.closes(now, &raw, answer, view, steps))?;
            } else {
                let tail = said.sequence;
                if self.stream.as_ref().is_some_and(|stream| stream.is_before(tail)) {
                    return Err(Error::Other("the recorded log's tail is before its head".to_owned()).into());
                }
                self.with_machine(|machine, now, view, steps| machine.tail_moves(now, tail, answer, view, steps))?;
            }
            return Ok(());
        }
        if said.is_empty() {
            *self.holds.entry(issue.id).or_default() += 1;
            let number = self.disk.write(offset, bytes);
            self.send(number, OnDisk::Plain(issue.id));
            return Ok(());
        }
        // Whatever was written before the log is opened is what its first transaction begins with.
        let mut base = vec![0; self.recording.disks[0].size_bytes as usize];
        self.disk.read(0, &mut base);
        let base = Arc::new(base);
        let as_of = || AsOf { base: Arc::clone(&base), blocks: HashMap::new(), block_bytes: self.place.block_bytes };
        (self.newest, self.durable) = (as_of(), as_of());
        (self.allocation, self.freed) = (Allocation::default(), FreedBlocks::default());
        self.bitmaps = Bitmaps::default();
        self.history.opened();
        self.versions.clear();
        self.logged.clear();
        self.stream = Some(Stream::new(format, said.start, said.sequence));
        self.last = said.sequence.wrapping_sub(1);
        let machine = Durability::opened(&bytes[..SUPERBLOCK_BYTES], Duration::from_millis(self.age));
        self.machine = Some(machine.map_err(|why| Stop::Error(Error::Other(why)))?);
        Ok(())
    }

    fn committed(&mut self, committed: &stream::Committed, request: u32) -> Step {
        let contents: Vec<(u64, &[u8])> = committed.blocks.iter().map(|(block, bytes)| (*block, &bytes[..])).collect();
        let freed = self.freed.of(&self.newest, &contents).during("reading bitmaps")?;
        self.unknown_frees += u64::from(freed.is_none());
        let really = self.bitmaps.freed(&self.newest, &contents).during("reading bitmaps")?;
        let is_told = |block: &u64| freed.as_ref().is_none_or(|told| told.iter().any(|range| range.contains(block)));
        if let Some(block) = really.iter().cloned().flatten().find(|block| !is_told(block)) {
            return finding(format!(
                "transaction {} frees block {block}, and the machine is not told of it",
                committed.sequence
            ));
        }
        self.history.committed(committed, Some(&really));
        let mut blocks = Vec::new();
        for (block, content) in &committed.blocks {
            let version = Version(self.id());
            self.versions.insert(version, (*block, Arc::clone(content)));
            let newest = Newest { transaction: committed.sequence, version, content: Arc::clone(content) };
            self.logged.insert(*block, newest);
            self.newest.blocks.insert(*block, Arc::clone(content));
            blocks.push((*block, version));
        }
        for block in &committed.revokes {
            self.logged.remove(block);
        }
        self.last = committed.sequence;
        let transaction = Transaction {
            sequence: committed.sequence,
            blocks,
            revokes: committed.revokes.clone(),
            freed: freed.map_or(Freed::Unknown, Freed::Blocks),
        };
        let answer = self.ask(Some(request));
        self.with_machine(|machine, now, view, steps| machine.committed(now, &transaction, answer, view, steps))?;
        Ok(())
    }

    // Time.

    fn end_one(&mut self, number: u64) -> Step {
        let Some((what, _)) = self.on_disk.remove(&number) else { return Ok(()) };
        self.disk.end(number);
        match what {
            OnDisk::Machine(operation) => {
                self.with_machine(|machine, now, view, steps| {
                    machine.operation_done(now, operation, true, view, steps);
                })?;
            }
            OnDisk::Guest(id, request) => {
                self.with_machine(|machine, now, view, steps| machine.write_ended(now, id, true, view, steps))?;
                self.release(request);
            }
            OnDisk::Plain(request) => self.release(request),
        }
        Ok(())
    }

    fn pass_time(&mut self) -> Step {
        let due: Vec<u64> =
            self.on_disk.iter().filter(|(_, (_, due))| *due <= self.now).map(|(number, _)| *number).collect();
        for number in due {
            self.end_one(number)?;
        }
        let now = Duration::from_millis(self.now);
        if self.machine.as_ref().and_then(Durability::deadline).is_some_and(|deadline| deadline <= now) {
            self.with_machine(|machine, now, view, steps| machine.timer(now, view, steps))?;
        }
        Ok(())
    }

    /// The guest goes on only when this request is done.
    fn force(&mut self, request: u32, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        for _ in 0..PATIENCE {
            if self.holds.get(&request).is_none_or(|holds| *holds == 0) {
                return Ok(());
            }
            let count = self.on_disk.len() as u64;
            let Some(number) = self.on_disk.keys().nth(self.random.below(count) as usize).copied() else { break };
            self.end_one(number)?;
            look(self)?;
        }
        finding(format!("request {request} is never done"))
    }

    // Judging.

    /// Replays a power cut. Gives the home blocks that the log brings, and the last transaction of the guest that it may be.
    fn look(&mut self, judged: Option<&Scenario>) -> Step {
        let cut = self.disk.cut(&mut self.random);
        let mut raw = [0; SUPERBLOCK_BYTES];
        cut.read(self.place.offset(0).unwrap_or(0), &mut raw);
        let (superblock, format) = match Superblock::parse(&raw) {
            Ok(parsed) => parsed,
            Err(error) => return finding(format!("the journal superblock on storage is damaged: {error}")),
        };
        let mut replayed: HashMap<u64, Vec<u8>> = HashMap::new();
        if !superblock.is_empty() {
            let mut log = LogIn(&cut, &self.place);
            let plan = match Plan::new(&mut log, &superblock, &format, &|_| true) {
                Ok(plan) => plan,
                Err(error) => return finding(format!("the log on storage cannot be replayed: {error}")),
            };
            if plan.summary().is_damaged() {
                return finding(format!("the log on storage is damaged: {:?}", plan.summary()));
            }
            for block in plan.blocks() {
                let mut content = vec![0; self.place.block_bytes as usize];
                let Ok(_) = log.read(block.newest().position, &mut content);
                if !block.newest().restore(&format, &mut content) {
                    return finding(format!("the log's copy of block {} is damaged", block.home()));
                }
                replayed.insert(block.home(), content);
            }
        }
        if let Some(machine) = &self.machine {
            let candidates: Vec<u32> = [Some(machine.durable()), machine.under_way()].into_iter().flatten().collect();
            let base = (&self.newest.base, self.place.block_bytes);
            let state = check_states(&self.history, &candidates, base, &mut |block| match replayed.get(&block) {
                Some(content) => content.clone(),
                None => {
                    let mut content = vec![0; self.place.block_bytes as usize];
                    cut.read(block * self.place.block_bytes, &mut content);
                    content
                }
            });
            if let Err(why) = state {
                return finding(format!("what a power cut leaves is no state of the guest: {why}"));
            }
        }
        match judged {
            Some(scenario) => judge_image(&cut, scenario, &self.promised()),
            None => Ok(()),
        }
    }

    /// What the guest's user space was told long enough ago.
    fn promised(&self) -> BTreeMap<String, Acknowledged> {
        let mut promised: BTreeMap<String, Acknowledged> = BTreeMap::new();
        for (at, stream, number) in &self.acknowledged {
            if self.age == 0 || at + self.age + WRITE_OUT < self.now {
                let entry = promised.entry(stream.clone()).or_default();
                entry.count += 1;
                entry.last = Some(*number);
            }
        }
        promised
    }
}

/// e2fsck replays, e2fsck looks, and the guest's records are read.
fn judge_image(cut: &Cut<'_>, scenario: &Scenario, acknowledged: &BTreeMap<String, Acknowledged>) -> Step {
    let directory = scratch()?;
    let image = directory.path().join("image");
    std::fs::write(&image, cut.image()).during("writing an image")?;
    let file_system = FileSystem::whole(image);
    judge::replay_with_e2fsck(&file_system).map_err(Error::from)?;
    let verdict = judge::check(&file_system).map_err(Error::from)?;
    if let Some(problem) = verdict.problems.first() {
        return finding(format!("e2fsck on what a power cut leaves: {problem}"));
    }
    let reported = Reported { acknowledged: acknowledged.clone(), ..Reported::default() };
    match scenario.check_after_power_cut(&file_system, &reported)?.first() {
        Some(fault) => finding(format!("acknowledged work is lost: {fault}")),
        None => Ok(()),
    }
}

/// One run. The journal is on the disk of its file system.
///
/// # Errors
/// When it could not be made; a broken promise is in the outcome.
pub fn run(recording: &Recording, seed: u64, switches: Switches, how: Thoroughness) -> Result<Outcome> {
    let scenario = Scenario::named(&recording.scenario)?;
    let age = AGES[Random::of(seed, 0x6167).below(AGES.len() as u64) as usize];
    let mut world = World::new(recording, seed, age)?;
    let mut outcome = Outcome::default();
    let mut choice = Random::of(seed, 0x6c6f);
    let mut visited = 0;
    let mut look = |world: &mut World<'_>| -> Step {
        visited += 1;
        if choice.below(how.points_each) != 0 || visited > how.until {
            return Ok(());
        }
        outcome.points += 1;
        let is_judged = how.judgements_each != 0 && choice.below(how.judgements_each) == 0;
        outcome.judgements += u64::from(is_judged);
        world.look(is_judged.then_some(&scenario))
    };
    let ended = (|| -> Step {
        for (index, event) in recording.events.iter().enumerate() {
            world.now = index as u64;
            world.pass_time()?;
            match event {
                Event::Issue(issue) if issue.disk == 0 => world.issue(issue)?,
                Event::Issue(_) | Event::EndOfPass(_) => {}
                Event::Done(id) => world.force(*id, &mut look)?,
                Event::Acknowledged(stream, number) => {
                    let name = recording.streams[usize::from(*stream)].clone();
                    world.acknowledged.push((index as u64, name, *number));
                }
            }
            look(&mut world)?;
        }
        Ok(())
    })();
    let event = world.now as usize;
    if world.unknown_frees > 0 {
        return Err(Error::Other("a real guest's bitmaps were not understood".to_owned()));
    }
    match ended {
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
