//! `durable-within` at the level of a disk's route: a power cut at any moment, those of a recovery and of the end of durability among them,
//! leaves the blocks of a transaction all as of one transaction, no older than what was durable.
//!
//! Everything that is sent to the image is written down as `log-writes=` does, by the test for what the route plans and by the disk itself
//! for the rest; the log is cut everywhere.

#[path = "aged/absorbed.rs"]
mod absorbed;
#[path = "aged/ages.rs"]
mod ages;
#[path = "aged/followed.rs"]
mod followed;
#[path = "aged/gone.rs"]
mod gone;
#[path = "aged/large.rs"]
mod large;
#[path = "aged/leaving.rs"]
mod leaving;
#[path = "aged/loud.rs"]
mod loud;
#[path = "aged/operator.rs"]
mod operator;
#[path = "aged/placed.rs"]
mod placed;
#[path = "aged/retained.rs"]
mod retained;
#[path = "aged/room.rs"]
mod room;
#[path = "aged/unflushed.rs"]
mod unflushed;

use block_route::{
    Buffer, DiskOperation, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Start, Status,
};
use guest_memory::{MemorySlice, PageId, RegionDescriptor, VmMemory, simulated_room};
use guest_tools::random::Random;
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Content, LogRead, SUPERBLOCK_BYTES, Superblock};
use journal_area::{Doubt, LogWrite};
use placement::{
    AreaDirectory, Change, Description, DiskOptions, DiskRoute, HotPages, Journals, JournalsOptions, PlacementKind,
};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use write_log::{EntryKind, WriteLog, entries};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 3072;
const PAGES: u32 = 2048;
const SECTOR: usize = 512;
/// Where the first of two partitions begins.
const FIRST: u64 = 1 << 20;
/// Blocks that every transaction writes: in use, so no appends, and with nothing in them.
type Homes = [u64; 3];

/// Blocks that are in use, and have nothing in them.
fn blocks_in_use(image: &Vec<u8>, journal: &[u64]) -> Vec<u64> {
    let mut allocation = extfs::Allocation::default();
    let is_one = |block: &u64| {
        let content = &image[(block * BLOCK) as usize..][..BLOCK as usize];
        !journal.contains(&(block * BLOCK))
            && content.iter().all(|byte| *byte == 0)
            && !allocation.is_free(image, *block).expect("bitmaps")
    };
    (0..BLOCKS).filter(is_one).collect()
}

fn homes(image: &Vec<u8>, journal: &[u64]) -> Homes {
    let found = blocks_in_use(image, journal);
    std::array::from_fn(|index| *found.get(index).expect("an inode table has unused blocks"))
}

/// A file system of the disk, as its guest has it. A rig has one, and may have another beside it.
struct Part {
    number: usize,
    start: u64,
    homes: Homes,
    log_at: Vec<u64>,
    superblock: Vec<u8>,
    builder: LogBuilder,
    committed: u8,
}

/// Makes a file system of so many bytes in an image, with a log of so many MiB. It takes nothing away from what is beside it.
fn make_file_system(image: &Path, start: u64, bytes: u64, log_mib: u64, is_alone: bool) {
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J"])
        .arg(format!("size={log_mib}"))
        .arg("-E")
        .arg(format!("offset={start}{}", if is_alone { "" } else { ",nodiscard" }))
        .arg(image)
        .arg(format!("{}k", bytes / 1024))
        .output();
    assert!(made.expect("e2fsprogs are installed").status.success());
}

/// What its guest has of a file system that was found on the disk.
fn part(number: usize, image: &[u8], found: &extfs::FileSystem, bytes: u64) -> Part {
    let start = found.offset;
    let image = image[start as usize..][..bytes as usize].to_vec();
    let extents = found.journal.extents(&found.superblock);
    let log_at: Vec<u64> = extents
        .iter()
        .flat_map(|extent| (0..u64::from(extent.count)).map(|index| (extent.physical + index) * BLOCK))
        .collect();
    let homes = homes(&image, &log_at);
    let superblock = image[log_at[0] as usize..][..BLOCK as usize].to_vec();
    let log_at = log_at.into_iter().map(|at| start + at).collect();
    let (parsed, format) = Superblock::parse(&superblock).expect("a journal");
    let builder = LogBuilder::new(format, parsed.first, parsed.sequence + 1);
    Part { number, start, homes, log_at, superblock, builder, committed: 0 }
}

struct Rig {
    directory: tempfile::TempDir,
    image: PathBuf,
    file: File,
    log: Arc<WriteLog>,
    memory: Arc<VmMemory>,
    journals: Arc<Journals>,
    route: DiskRoute,
    clock: Arc<AtomicU64>,
    next: u32,
    /// Which of the disk's file systems is asked for things.
    number: usize,
    /// Where the file system begins.
    start: u64,
    homes: Homes,
    log_at: Vec<u64>,
    superblock: Vec<u8>,
    builder: LogBuilder,
    /// Bytes of each file system.
    bytes: u64,
    /// The other one, if the disk has two.
    other: Option<Part>,
    waiting: Vec<DiskOperation>,
    /// The last transaction, and the last that has to be there.
    committed: u8,
    told: Vec<(RequestId, Status)>,
    /// Holds on requests that were not taken off.
    held: usize,
    /// Storage fails what is written from now on.
    fails: bool,
}

impl Rig {
    fn new(within: Option<Duration>) -> Self {
        Self::at(0, within)
    }

    /// The file system is in a partition that begins at this byte of the disk, if that is not 0.
    fn at(start: u64, within: Option<Duration>) -> Self {
        Self::with_log(start, within, 4)
    }

    /// And its log has so many MiB.
    fn with_log(start: u64, within: Option<Duration>, log_mib: u64) -> Self {
        Self::with_placement(start, within, log_mib, PlacementKind::Copy)
    }

    fn with_placement(start: u64, within: Option<Duration>, log_mib: u64, placement: PlacementKind) -> Self {
        Self::with_parts(&[start], within, log_mib, placement)
    }

    /// The disk has two file systems, in two partitions.
    fn pair(within: Option<Duration>) -> Self {
        Self::with_parts(&[FIRST, FIRST + BLOCKS * BLOCK], within, 4, PlacementKind::Copy)
    }

    fn with_parts(starts: &[u64], within: Option<Duration>, log_mib: u64, placement: PlacementKind) -> Self {
        let bytes = (BLOCKS + (log_mib - 4) * 512) * BLOCK;
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let image = directory.path().join("image");
        let file = File::options().create_new(true).read(true).write(true).open(&image).expect("made");
        file.set_len(starts[starts.len() - 1] + bytes).expect("a length");
        starts.iter().for_each(|start| make_file_system(&image, *start, bytes, log_mib, starts.len() == 1));
        if starts[0] > 0 {
            let entry = |start: &u64| {
                let [first, sectors] = [*start, bytes].map(|bytes| (bytes / SECTOR as u64) as u32);
                [&[0, 0, 0, 0, 0x83, 0, 0, 0][..], &first.to_le_bytes(), &sectors.to_le_bytes()].concat()
            };
            let table: Vec<u8> = starts.iter().flat_map(entry).collect();
            file.write_all_at(&table, 446).and_then(|()| file.write_all_at(&[0x55, 0xaa], 510)).expect("written");
        }
        std::fs::copy(&image, directory.path().join("before")).expect("copied");
        let content = std::fs::read(&image).expect("the image");
        let found = extfs::discover(&content).expect("readable");
        assert_eq!(found.iter().map(|found| found.offset).collect::<Vec<_>>(), starts);
        let mut parts = found.iter().enumerate().map(|(number, found)| part(number, &content, found, bytes));
        let first = parts.next().expect("a file system");
        let Part { number, start, homes, log_at, superblock, builder, committed } = first;
        let other = parts.next();
        let memory = VmMemory::new();
        let area =
            AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry")).expect("made");
        let log = Arc::new(WriteLog::create(&directory.path().join("log")).expect("a log"));
        let options = DiskOptions {
            name: "disk".to_owned(),
            path: image.clone(),
            placement,
            honour_flush: false,
            read_only: false,
            nvm: None,
            remote: None,
            durable_within: within,
            write_log: Some(Arc::clone(&log)),
        };
        let options = JournalsOptions { disks: vec![options], budget_bytes: 64 << 20, tracer: None };
        let journals = Journals::new(&memory, area, options).expect("journals");
        journals.area.set_hot_pages(HotPages::Foreseen);
        let clock = Arc::new(AtomicU64::new(0));
        journals.disk(0).simulate_clock(Arc::clone(&clock));
        let ram = File::options().create_new(true).read(true).write(true).open(journals.directory().path().join("ram"));
        let ram = ram.expect("made");
        ram.set_len(u64::from(PAGES) * BLOCK).expect("a length");
        let region = RegionDescriptor {
            gpa: 0,
            size: u64::from(PAGES) * BLOCK,
            user_addr: 0x7000_0000,
            file: ram,
            file_offset: 0,
        };
        memory.simulate_protection();
        let table = Arc::new(memory.map(vec![region]).expect("mapped"));
        let mut route = DiskRoute::new(Arc::clone(&journals), 0);
        route.started(Start::Fresh, &table).expect("started");
        Rig {
            image,
            file,
            log,
            memory,
            journals,
            route,
            clock,
            next: 0,
            number,
            start,
            homes,
            log_at,
            superblock,
            builder,
            bytes,
            other,
            waiting: Vec::new(),
            committed,
            told: Vec::new(),
            held: 0,
            fails: false,
            directory,
        }
    }

    /// From now on it is the other file system that is asked for things.
    fn turn(&mut self) {
        let other = self.other.as_mut().expect("the disk has two");
        std::mem::swap(&mut self.number, &mut other.number);
        std::mem::swap(&mut self.start, &mut other.start);
        std::mem::swap(&mut self.homes, &mut other.homes);
        std::mem::swap(&mut self.log_at, &mut other.log_at);
        std::mem::swap(&mut self.superblock, &mut other.superblock);
        std::mem::swap(&mut self.builder, &mut other.builder);
        std::mem::swap(&mut self.committed, &mut other.committed);
    }

    /// Whether this byte of the disk is in the file system.
    fn has(&self, offset: u64) -> bool {
        (self.start..self.start + self.bytes).contains(&offset)
    }

    /// The file system, of an image of the disk.
    fn part<'a>(&self, image: &'a [u8]) -> &'a [u8] {
        &image[self.start as usize..][..self.bytes as usize]
    }

    /// Where its log lies, in bytes from its begin.
    fn log_in_part(&self) -> Vec<u64> {
        self.log_at.iter().map(|at| at - self.start).collect()
    }

    /// The worker is dead, with nothing under way: another one goes on.
    fn follow(&mut self, within: Option<Duration>) -> std::io::Result<()> {
        let directory = self.journals.directory();
        let lock = directory.lock_file().try_clone().expect("a descriptor");
        let (path, registry) = (directory.path().to_owned(), self.directory.path().join("registry"));
        let (directory, description): (AreaDirectory, Description) =
            AreaDirectory::adopt(&path, &registry, lock).expect("it is there");
        let options = DiskOptions {
            name: "disk".to_owned(),
            path: self.image.clone(),
            placement: PlacementKind::Copy,
            honour_flush: false,
            read_only: false,
            nvm: None,
            remote: None,
            durable_within: within,
            write_log: Some(Arc::clone(&self.log)),
        };
        let options = JournalsOptions { disks: vec![options], budget_bytes: 64 << 20, tracer: None };
        let memory = VmMemory::new();
        memory.simulate_protection();
        let journals = Journals::resume(&memory, directory, &description, options)?;
        journals.disk(0).simulate_clock(Arc::clone(&self.clock));
        journals.go_on()?;
        let ram = File::options().read(true).write(true).open(path.join("ram")).expect("it is there");
        let region = RegionDescriptor {
            gpa: 0,
            size: u64::from(PAGES) * BLOCK,
            user_addr: 0x7000_0000,
            file: ram,
            file_offset: 0,
        };
        let table = Arc::new(memory.map(vec![region]).expect("mapped"));
        let mut route = DiskRoute::new(Arc::clone(&journals), 0);
        route.started(Start::Resumed, &table).expect("it goes on");
        let memory = std::mem::replace(&mut self.memory, memory);
        let journals = std::mem::replace(&mut self.journals, journals);
        // Nothing of a process that was killed is dropped in good order.
        std::mem::forget((memory, journals, std::mem::replace(&mut self.route, route)));
        Ok(())
    }

    fn plan(&mut self, plan: Plan) {
        for action in plan.actions {
            match action {
                PlanAction::Disk(operation) => self.waiting.push(operation),
                PlanAction::Release(request, status) => {
                    self.told.push((request, status));
                    self.held -= 1;
                }
                PlanAction::Hold(_) => self.held += 1,
            }
        }
    }

    fn request(&mut self, kind: RequestKind, offset: u64, content: &[u8]) {
        self.next += 1;
        let mut slices: Vec<MemorySlice> = Vec::new();
        for part in content.chunks(BLOCK as usize) {
            let page = PageId(self.next % PAGES);
            self.next += 1;
            self.memory.simulated_guest_write(page, 0, part);
            slices.push(self.memory.page(page).expect("a page").sub(0, part.len()));
        }
        let (id, mut plan) = (RequestId(self.next), Plan::default());
        self.route.route(&Request { id, kind, offset, len: content.len() as u64, segments: &slices }, &mut plan);
        self.route.end_of_pass(&mut plan);
        self.plan(plan);
    }

    /// The guest flushes: how many flushes storage sees for that.
    fn flushes(&mut self) -> usize {
        assert!(self.waiting.is_empty());
        self.request(RequestKind::Flush, 0, &[]);
        let flushes = self.waiting.iter().filter(|operation| operation.operation == Operation::Flush).count();
        self.settle();
        flushes
    }

    /// Storage does what it was told, until nothing is left.
    fn settle(&mut self) {
        while !self.waiting.is_empty() {
            self.settle_one();
        }
    }

    /// Storage has a write.
    fn write_down(&self, operation: &DiskOperation) {
        let mut bytes = Vec::new();
        for buffer in &operation.buffers {
            match buffer {
                Buffer::Slice(slice) => {
                    let at = bytes.len();
                    bytes.resize(at + slice.len(), 0);
                    slice.copy_out(0, &mut bytes[at..]);
                }
                Buffer::Bytes(more) => bytes.extend_from_slice(more),
            }
        }
        self.file.write_all_at(&bytes, operation.offset).expect("written");
        self.log.written(operation.offset, &bytes);
    }

    fn settle_one(&mut self) {
        let operation = self.waiting.remove(0);
        match operation.operation {
            Operation::Write if self.fails => {}
            Operation::Write => self.write_down(&operation),
            Operation::Flush => {
                let flush = self.log.flush_begins();
                self.log.flush_ended(&flush, true);
            }
            Operation::Read | Operation::Discard | Operation::WriteZeroes { .. } => {}
        }
        let mut plan = Plan::default();
        if let Some(ticket) = operation.ticket {
            let has_failed = self.fails && operation.operation == Operation::Write;
            let result = if has_failed { Err(std::io::Error::other("storage failed")) } else { Ok(()) };
            self.route.disk_done(ticket, result, &mut plan);
        }
        self.plan(plan);
    }

    fn superblock(&mut self, start: u32, sequence: u32) {
        self.superblock_begins(start, sequence);
        self.settle();
    }

    fn superblock_begins(&mut self, start: u32, sequence: u32) {
        let mut block = self.superblock.clone();
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        self.request(RequestKind::Write, self.log_at[0], &block);
    }

    fn within_s(&self) -> Option<u64> {
        self.journals.report("vm").disks[0].durability.as_ref().and_then(|durability| durability.within_s)
    }

    /// The guest's log begins so many blocks before its end.
    fn begin_before_the_end(&mut self, blocks: u32) {
        let (_, format) = Superblock::parse(&self.superblock).expect("a journal");
        self.begin_at(format.last - blocks);
    }

    fn begin_at(&mut self, position: u32) {
        let (parsed, format) = Superblock::parse(&self.superblock).expect("a journal");
        self.builder = LogBuilder::new(format, position, parsed.sequence + 1);
    }

    fn open(&mut self) {
        self.superblock(self.builder.position, self.builder.sequence);
    }

    /// A transaction that writes all homes.
    fn commit(&mut self) {
        self.commit_with(|_| true);
    }

    /// The same, with memory for some of its blocks.
    fn commit_with(&mut self, is_room: impl Fn(&[u8]) -> bool) {
        let log = self.transaction();
        self.write_log(&log, is_room);
    }

    /// The next transaction, in its log blocks.
    fn transaction(&mut self) -> Vec<(u32, Vec<u8>)> {
        self.transaction_with([])
    }

    /// The same, with more blocks.
    fn transaction_with(&mut self, more: impl IntoIterator<Item = u64>) -> Vec<(u32, Vec<u8>)> {
        self.transaction_of(more, Vec::new())
    }

    /// And with blocks that it revokes.
    fn transaction_of(&mut self, more: impl IntoIterator<Item = u64>, revokes: Vec<u64>) -> Vec<(u32, Vec<u8>)> {
        self.committed += 1;
        let blocks = self.homes.into_iter().chain(more).map(|block| (block, content(self.committed))).collect();
        let mut log = Vec::new();
        let transaction = Transaction { blocks, revokes, ..Transaction::default() };
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        log
    }

    fn request_log(&mut self, log: &[(u32, Vec<u8>)]) {
        for (position, block) in log {
            self.request(RequestKind::Write, self.log_at[*position as usize], block);
        }
    }

    fn write_log(&mut self, log: &[(u32, Vec<u8>)], is_room: impl Fn(&[u8]) -> bool) {
        for (position, block) in log {
            simulated_room::set_full(!is_room(block));
            self.request_log(&[(*position, block.clone())]);
            simulated_room::set_full(false);
        }
    }

    fn write_home(&mut self, block: u64, version: u8) {
        self.request(RequestKind::Write, self.start + block * BLOCK, &content(version));
    }

    fn pass(&mut self, milliseconds: u64) {
        self.wake(milliseconds);
        self.settle();
    }

    /// Time passes, and storage has done nothing meanwhile.
    fn wake(&mut self, milliseconds: u64) {
        self.clock.fetch_add(milliseconds, Ordering::AcqRel);
        let mut plan = Plan::default();
        self.route.woken(&mut plan);
        self.plan(plan);
    }

    fn compounds(&self) -> u64 {
        self.journals.report("vm").disks[0].durability.as_ref().map_or(0, |durability| durability.compounds)
    }

    /// A name for this place in the log of writes, which is about the file system.
    fn mark(&self, name: &str) {
        self.log.mark(&if self.number == 0 { name.to_owned() } else { format!("{OTHER}{name}") });
    }

    /// The name that this one is to the file system, if it is about that.
    fn own_name<'a>(&self, name: &'a str) -> Option<&'a str> {
        if let Some(name) = name.strip_prefix(BOTH) {
            return Some(name);
        }
        match name.strip_prefix(OTHER) {
            Some(name) => (self.number == 1).then_some(name),
            None => (self.number == 0).then_some(name),
        }
    }

    /// A name for this place in the log of writes: from here on at least this transaction is there, after a power cut.
    fn promise(&self, transaction: u8) {
        self.mark(&format!("promise {transaction} 0"));
    }

    /// The same, and in the first home at least this version, which was written past the journal.
    fn promise_direct(&self, transaction: u8, version: u8) {
        self.mark(&format!("promise {transaction} {version}"));
    }

    /// From here on the first home may have this, written past the journal.
    fn writes_directly(&self, version: u8) {
        self.mark(&format!("direct {version}"));
    }

    /// From here on storage may have an error mark.
    fn gives_up(&self) {
        self.mark("gives up");
    }

    /// From here on it may not any more.
    fn holds(&self) {
        self.mark("holds");
    }

    /// Cuts the log of writes everywhere, a few times each. Gives how many cuts were judged.
    fn judge(mut self) -> u64 {
        let judged = self.judged();
        if self.other.is_none() {
            return judged;
        }
        self.turn();
        judged + self.judged()
    }

    /// The same, where it concerns the file system.
    fn judged(&self) -> u64 {
        let before = std::fs::read(self.directory.path().join("before")).expect("the image");
        let mut durable = self.part(&before).to_vec();
        let log = File::open(self.directory.path().join("log")).expect("the log");
        let (log_at, mut unflushed) = (self.log_in_part(), Unflushed::default());
        let mut random = Random::new(7);
        let mut reused: Option<Reused> = None;
        let (mut promise, mut may_give_up, mut judged) = (Promise::default(), false, 0);
        for (index, entry) in entries(&log).enumerate() {
            let entry = entry.expect("an entry");
            match entry.kind {
                EntryKind::Write(_) if !self.has(entry.offset) => continue,
                EntryKind::Write(data) => unflushed.written(index, entry.offset - self.start, &data),
                EntryKind::Flush => unflushed.flushed(index, &mut durable),
                EntryKind::Mark(name) => {
                    let Some(name) = self.own_name(&name) else { continue };
                    let numbers: Vec<u64> = name.split(' ').filter_map(|word| word.parse().ok()).collect();
                    match (name.split(' ').next().unwrap_or_default(), &numbers[..]) {
                        ("gives", []) => may_give_up = true,
                        ("holds", []) => may_give_up = false,
                        ("recovery", []) => {}
                        ("promise", [transaction, 0]) => promise = (*transaction as u8).into(),
                        ("promise", [transaction, direct]) => {
                            (promise.transaction, promise.direct_min) = (*transaction as u8, *direct as u8);
                        }
                        ("direct", [direct]) => promise.direct_max = *direct as u8,
                        ("reuses", [block, transaction, version]) => {
                            let reused = reused.get_or_insert_with(|| Reused { block: *block, ..Reused::default() });
                            let version = (*version > 0).then_some(*version as u8);
                            reused.as_of.insert(*transaction as u8, version);
                        }
                        ("data", [transaction, version]) => {
                            let reused = reused.as_mut().expect("it was deleted");
                            reused.data.insert(*transaction as u8, *version as u8);
                        }
                        ("flushes", [number]) => {
                            unflushed.begun.insert(*number, index);
                            continue;
                        }
                        ("flushed", [number]) => unflushed.ended(*number, &mut durable),
                        ("flush", []) => unflushed.may_be_lost(),
                        ("unjudged", []) => break,
                        _ => unreachable!("{name}"),
                    }
                }
                EntryKind::Discard(_) => unreachable!("nothing is discarded"),
            }
            for keep in [0, 100, 50, 20, 80] {
                judged += 1;
                let cut = Image { bytes: &durable, kept: unflushed.kept(keep, &mut random) };
                let places = (&log_at[..], &self.homes, reused.as_ref());
                let problem = state_beside(&cut, places, promise, may_give_up).err();
                let problem = problem.or_else(|| taken_for_next(&cut, &log_at));
                assert!(
                    problem.is_none(),
                    "file system {}, entry {index}, {keep} percent kept, {promise:?}, {reused:?}: {problem:?}",
                    self.number
                );
            }
        }
        judged
    }
}

/// Begins of names in the log of writes that are about the second file system, and about both.
const OTHER: &str = "other ";
const BOTH: &str = "both ";

/// By sector, what was written there, each with its place in the log of writes.
type Versions = BTreeMap<u64, Vec<(usize, Arc<[u8]>)>>;

/// What was written, and is not durable.
#[derive(Default)]
struct Unflushed {
    sectors: Versions,
    /// The same of what a flush that has failed may have lost: no other one says anything of it.
    lost: Versions,
    /// Where flushes began, by their numbers.
    begun: HashMap<u64, usize>,
}

impl Unflushed {
    fn written(&mut self, index: usize, offset: u64, data: &[u8]) {
        for (at, part) in (offset / SECTOR as u64..).zip(data.chunks(SECTOR)) {
            self.sectors.entry(at).or_default().push((index, Arc::from(part)));
        }
    }

    /// What was written before this place is durable.
    fn flushed(&mut self, before: usize, durable: &mut [u8]) {
        let Unflushed { sectors, lost, .. } = self;
        sectors.retain(|sector, all| {
            let covered = all.partition_point(|(index, _)| *index < before);
            if let Some((_, last)) = all[..covered].last() {
                let at = *sector as usize * SECTOR;
                durable[at..at + SECTOR].copy_from_slice(last);
                lost.remove(sector);
            }
            all.drain(..covered);
            !all.is_empty()
        });
    }

    /// A flush has ended, and well.
    fn ended(&mut self, number: u64, durable: &mut [u8]) {
        let before = self.begun.remove(&number).expect("it has begun");
        self.flushed(before, durable);
    }

    /// A flush has failed.
    fn may_be_lost(&mut self) {
        for (sector, mut all) in std::mem::take(&mut self.sectors) {
            self.lost.entry(sector).or_default().append(&mut all);
        }
    }

    /// What a power cut leaves of it, where it keeps so many percent.
    fn kept(&self, keep: u64, random: &mut Random) -> HashMap<usize, Arc<[u8]>> {
        let mut kept = HashMap::new();
        for (sector, all) in self.lost.iter().chain(&self.sectors) {
            let which = random.below(all.len() as u64) as usize;
            if random.below(100) < keep {
                let (_, part) = &all[if keep == 100 { all.len() - 1 } else { which }];
                kept.insert(*sector as usize, Arc::clone(part));
            }
        }
        kept
    }
}

/// A block beside the homes that is journaled, deleted and used for data, as files come and go.
#[derive(Debug, Default)]
struct Reused {
    block: u64,
    /// The version that is journaled from a transaction on; nothing where that one deletes it.
    as_of: BTreeMap<u8, Option<u8>>,
    /// The data that has to be there since, by the transaction that has deleted it.
    data: BTreeMap<u8, u8>,
}

impl Reused {
    /// Whether this may be there as of a transaction.
    fn is_good(&self, transaction: u8, found: &[u8]) -> bool {
        match self.as_of.range(..=transaction).next_back() {
            None => true,
            Some((_, Some(version))) => found == content(*version),
            Some((since, None)) => self.data.get(since).is_none_or(|version| found == content(*version)),
        }
    }
}

fn content(version: u8) -> Vec<u8> {
    (0..BLOCK).map(|index| (index as u8).wrapping_mul(3).wrapping_add(version)).collect()
}

/// An image, and sectors of it that are something else.
struct Image<'a> {
    bytes: &'a [u8],
    kept: HashMap<usize, Arc<[u8]>>,
}

impl Image<'_> {
    fn of(bytes: &[u8]) -> Image<'_> {
        Image { bytes, kept: HashMap::new() }
    }

    /// From the begin of a sector on.
    fn read(&self, offset: u64, buffer: &mut [u8]) {
        for (sector, part) in (offset as usize / SECTOR..).zip(buffer.chunks_mut(SECTOR)) {
            match self.kept.get(&sector) {
                Some(kept) => part.copy_from_slice(kept),
                None => part.copy_from_slice(&self.bytes[sector * SECTOR..(sector + 1) * SECTOR]),
            }
        }
    }
}

struct Stored<'a>(&'a Image<'a>, &'a [u64]);

impl LogRead for Stored<'_> {
    type Error = std::convert::Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Self::Error> {
        self.0.read(self.1[position as usize], buffer);
        Ok(Content::Present)
    }
}

/// What has to be there.
#[derive(Clone, Copy, Debug, Default)]
struct Promise {
    /// At least this transaction.
    transaction: u8,
    /// In the first home something written past the journal, from this version on; 0 if nothing was.
    direct_min: u8,
    direct_max: u8,
}

impl From<u8> for Promise {
    fn from(transaction: u8) -> Self {
        Promise { transaction, ..Promise::default() }
    }
}

/// What whoever replays the log of the next kernel may take for a transaction of its: that kernel writes over an empty log with an error mark
/// from the log's first block on, with numbers from the mark's on.
fn taken_for_next(image: &Image<'_>, log_at: &[u64]) -> Option<String> {
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    image.read(log_at[0], &mut raw);
    let said = Superblock::decode(&raw).ok().filter(|said| said.is_empty() && said.errno != 0)?;
    let mut head = [0; SECTOR];
    log_at[1..].iter().find_map(|at| {
        image.read(*at, &mut head);
        let number = jbd2::peek(&head)?.sequence;
        let is_later = jbd2::sequence::is_at_or_after(number, said.sequence);
        is_later.then(|| format!("a block of transaction {number} lies beside the mark, which says {}", said.sequence))
    })
}

/// What a kernel makes of it: the transaction of which all homes are.
fn state(
    image: &Image<'_>,
    (log_at, homes): (&[u64], &Homes),
    promise: impl Into<Promise>,
    may_give_up: bool,
) -> Result<u8, String> {
    state_beside(image, (log_at, homes, None), promise.into(), may_give_up)
}

/// The same, where files come and go beside the homes.
fn state_beside(
    image: &Image<'_>,
    (log_at, homes, reused): (&[u64], &Homes, Option<&Reused>),
    promise: Promise,
    may_give_up: bool,
) -> Result<u8, String> {
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    image.read(log_at[0], &mut raw);
    let (superblock, format) = Superblock::parse(&raw).map_err(|error| error.to_string())?;
    if superblock.errno != 0 {
        // A full check has to be made, and a kernel says so.
        return if may_give_up { Ok(0) } else { Err("there is an error mark".to_owned()) };
    }
    let mut copies = HashMap::new();
    if !superblock.is_empty() {
        let plan = jbd2::Plan::new(&mut Stored(image, log_at), &superblock, &format, &|_| true);
        let plan = plan.map_err(|error| error.to_string())?;
        for block in plan.blocks() {
            let mut content = vec![0; BLOCK as usize];
            let Ok(_) = Stored(image, log_at).read(block.newest().position, &mut content);
            if !block.newest().restore(&format, &mut content) {
                return Err(format!("the copy of block {} is damaged", block.home()));
            }
            copies.insert(block.home(), content);
        }
    }
    let mut replayed = |home: u64| {
        copies.remove(&home).unwrap_or_else(|| {
            let mut content = vec![0; BLOCK as usize];
            image.read(home * BLOCK, &mut content);
            content
        })
    };
    let found = homes.map(&mut replayed);
    let versions = found.each_ref().map(|found| {
        (*found == content(found[0])).then_some(found[0]).or(found.iter().all(|byte| *byte == 0).then_some(0))
    });
    let [first, Some(second), Some(third)] = versions else { return Err(format!("homes are as of {versions:?}")) };
    let Promise { transaction, direct_min, direct_max } = promise;
    // What is written past the journal belongs to what was promised before it.
    let may_be_direct = second == transaction && direct_max > 0;
    let is_first_good = match first {
        Some(first) if first == second => !may_be_direct || direct_min == 0,
        Some(first) => may_be_direct && (direct_min.max(DIRECT)..=direct_max).contains(&first),
        // It may be torn over what was there, until it is durable.
        None => may_be_direct && direct_min == 0,
    };
    if second != third || !is_first_good {
        Err(format!("homes are as of {versions:?}"))
    } else if second < transaction {
        Err(format!("it is as of {second}"))
    } else if let Some(reused) = reused
        && let found = replayed(reused.block)
        && !reused.is_good(second, &found)
    {
        Err(format!("it is as of {second}, and block {} begins with {:?}", reused.block, &found[..4]))
    } else {
        Ok(second)
    }
}

/// The first version that is written past the journal.
const DIRECT: u8 = 200;

const AGE: Duration = Duration::from_millis(1000);

#[test]
fn a_log_becomes_durable_and_is_closed() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    for round in 0..4 {
        rig.commit();
        rig.commit();
        rig.settle();
        assert_eq!(rig.compounds(), round, "it is not due yet");
        rig.pass(1500);
        assert_eq!(rig.compounds(), round + 1);
        rig.promise(rig.committed);
    }
    // Checkpoint: what the tail passes is durable, and home.
    rig.commit();
    let last = rig.committed;
    rig.homes.into_iter().for_each(|block| rig.write_home(block, last));
    rig.settle();
    let tail = (rig.builder.position, rig.builder.sequence);
    rig.superblock(tail.0, tail.1);
    rig.promise(last);
    rig.superblock(0, tail.1);
    assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok));
    let image = std::fs::read(&rig.image).expect("the image");
    assert_eq!(state(&Image::of(&image), (&rig.log_at, &rig.homes), last, false), Ok(last));
    let report = |report: placement::VmReport| report.disks[0].durability.clone().expect("its placement holds");
    let closed = report(rig.journals.report("vm"));
    assert!(closed.compounds > 0 && closed.within_s.is_none(), "its log is closed, and nothing in force: {closed:?}");
    let last = report(rig.journals.last_report("vm"));
    assert_eq!((last.compounds, last.within_s), (closed.compounds, Some(AGE.as_secs())));
    assert!(rig.judge() > 100);
}

#[test]
fn a_home_write_waits_for_what_it_belongs_to() {
    let mut rig = Rig::new(Some(Duration::from_secs(3600)));
    rig.open();
    for _ in 0..3 {
        rig.commit();
        let last = rig.committed;
        // One home of three, and not just what is held, which would be absorbed: without its compound a cut would leave another state.
        rig.write_home(rig.homes[0], DIRECT);
        rig.settle();
        rig.promise(last);
    }
    assert!(rig.compounds() >= 2);
    assert!(rig.judge() > 100);
}

#[test]
fn with_no_age_a_commit_is_answered_when_it_is_durable() {
    let mut rig = Rig::new(Some(Duration::ZERO));
    rig.open();
    for _ in 0..5 {
        rig.commit();
        let (before, told) = (rig.compounds(), rig.told.len());
        rig.settle();
        assert!(rig.compounds() > before && rig.told.len() > told, "its commit block is answered");
        rig.promise(rig.committed);
    }
    assert!(rig.judge() > 100);
}

#[test]
fn with_no_age_a_flush_covers_what_no_replay_brings_back_and_nothing_else() {
    let mut rig = Rig::new(Some(Duration::ZERO));
    rig.open();
    rig.commit();
    rig.settle();
    rig.flushes();
    let homes = rig.homes;
    rig.write_homes();
    rig.settle();
    assert_eq!(rig.flushes(), 0, "a replay brings it back");
    rig.promise(rig.committed);
    rig.write_home(homes[0], DIRECT);
    rig.settle();
    assert_eq!(rig.flushes(), 0, "a replay writes over it");
    rig.write_home(BLOCKS - 1, DIRECT);
    rig.settle();
    assert_eq!(rig.flushes(), 1, "it is nowhere else");
    assert!(rig.judge() > 20);
}

#[test]
fn a_recovery_beside_compounds_can_be_cut_anywhere() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    rig.commit();
    rig.settle();
    rig.pass(1500);
    rig.promise(rig.committed);
    // Held only: the recovery makes it durable, and then writes it home.
    rig.commit();
    rig.commit();
    rig.settle();
    rig.journals.recover_all().expect("recovered");
    rig.promise(rig.committed);
    assert!(rig.judge() > 50);
}

/// The same where compounds have had numbers that the guest's next transactions will have, whether it has committed anything since or not.
#[test]
fn nor_does_one_need_the_error_mark_where_compounds_have_outrun_their_guest() {
    for is_owed in [false, true] {
        let mut rig = Rig::new(None);
        outrun(&mut rig, true);
        rig.holds();
        // Some of the compounds have numbers before the guest's next, some behind.
        for _ in 0..7 {
            rig.commit();
            rig.settle();
            rig.pass(1500);
        }
        rig.promise(rig.committed);
        if is_owed {
            rig.commit();
        } else {
            rig.write_homes();
        }
        rig.settle();
        let next = rig.builder.sequence;
        assert!(is_aged(&rig) && numbers_from(&rig, next).len() > 1);
        assert!(numbers_from(&rig, 1).iter().any(|number| *number < next));
        rig.journals.recover_all().expect("recovered");
        rig.promise(rig.committed);
        // One with the next number a guest writes over; behind that it is met.
        assert_eq!(numbers_from(&rig, next + 1), [0; 0]);
        assert!(rig.judge() > 40, "owed: {is_owed}");
    }
}

#[test]
fn it_ends_and_begins_under_a_running_guest() {
    let mut rig = Rig::new(None);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    assert_eq!(rig.compounds(), 0);
    for _ in 0..2 {
        rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        rig.pass(0);
        assert!(rig.compounds() > 0, "what is owed becomes durable at once");
        for _ in 0..2 {
            rig.commit();
            rig.settle();
            rig.pass(1500);
        }
        let mut raw = vec![0; SUPERBLOCK_BYTES];
        rig.file.read_exact_at(&mut raw, rig.log_at[0]).expect("read");
        let said = Superblock::decode(&raw).expect("a superblock");
        assert!(said.errno == 0 && !said.is_empty(), "{said:?}");
        rig.journals.set_durable_within(0, None).expect("possible");
        rig.pass(0);
        rig.file.read_exact_at(&mut raw, rig.log_at[0]).expect("read");
        let said = Superblock::decode(&raw).expect("a superblock");
        assert!(said.errno != 0 && said.is_empty(), "{said:?}");
        rig.commit();
        let last = rig.committed;
        rig.write_home(rig.homes[0], last);
        rig.settle();
    }
    rig.journals.recover_all().expect("recovered");
    rig.promise(rig.committed);
    assert!(rig.judge() > 100);
}

/// What storage says of the log.
fn said(rig: &Rig) -> Superblock {
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    rig.file.read_exact_at(&mut raw, rig.log_at[0]).expect("read");
    Superblock::decode(&raw).expect("a superblock")
}

fn is_aged(rig: &Rig) -> bool {
    let said = said(rig);
    said.errno == 0 && !said.is_empty()
}

/// While durability ends, as wished, storage is taken for whole without what is only held: nobody is told of a commit before it has the error mark.
#[test]
fn a_commit_is_answered_when_storage_says_that_it_is_only_held() {
    for within in [Duration::ZERO, AGE] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        if within.is_zero() {
            // Its compound is on its way.
            rig.commit();
        } else {
            rig.clock.fetch_add(AGE.as_millis() as u64, Ordering::AcqRel);
            let mut plan = Plan::default();
            rig.route.woken(&mut plan);
            rig.plan(plan);
        }
        assert!(!rig.waiting.is_empty(), "{within:?}: a compound is under way");
        let told = rig.told.len();
        rig.journals.set_durable_within(0, None).expect("possible");
        let mut plan = Plan::default();
        rig.route.woken(&mut plan);
        rig.plan(plan);
        rig.commit();
        assert!(is_aged(&rig), "{within:?}: nothing has ended yet");
        loop {
            let later = &rig.told[told..];
            assert!(!is_aged(&rig) || later.is_empty(), "{within:?}: {later:?} are told too early");
            if rig.waiting.is_empty() {
                break;
            }
            rig.settle_one();
        }
        let later = &rig.told[told..];
        assert!(!later.is_empty() && later.iter().all(|(_, status)| *status == Status::Ok), "{within:?}: {later:?}");
        assert!(!is_aged(&rig) && rig.held == 0, "{within:?}");
    }
}

/// The same, and the mark fails: nobody is told that what he committed is held, since storage is taken for whole without it.
#[test]
fn a_commit_fails_where_storage_cannot_say_that_it_is_only_held() {
    for within in [Duration::ZERO, AGE] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        rig.promise(rig.committed);
        rig.commit();
        if !within.is_zero() {
            rig.wake(AGE.as_millis() as u64);
        }
        assert!(!rig.waiting.is_empty(), "{within:?}: a compound is under way");
        let told = rig.told.len();
        // The mark goes to storage by this descriptor, and nothing else does.
        let read_only = File::open(&rig.image).expect("opened");
        rig.journals.disk(0).share_with_engine(read_only, SECTOR);
        rig.journals.set_durable_within(0, None).expect("possible");
        rig.wake(0);
        rig.commit();
        rig.settle();
        let expected = if within.is_zero() { 2 } else { 1 };
        assert_eq!(
            rig.told[told..].iter().map(|(_, status)| *status).collect::<Vec<_>>(),
            vec![Status::IoError; expected]
        );
        assert!(is_aged(&rig), "{within:?}: storage says what it said");
        let fault = rig.journals.disk(0).fault().expect("it is said");
        assert!(fault.contains("marking it failed"), "{fault}");
        // Nor is anything else done beside that, however often it is asked for.
        for _ in 0..2 {
            let told = rig.told.len();
            rig.commit();
            rig.write_home(rig.homes[0], rig.committed);
            rig.settle();
            assert!(
                rig.told[told..].iter().all(|(_, status)| *status == Status::IoError),
                "{within:?}: {:?}",
                &rig.told[told..]
            );
        }
        assert_eq!((rig.held, is_aged(&rig)), (0, true), "{within:?}");
    }
}

/// What its guest has written home where a replay of the compounds would bring it back, and counts on with no age since its flush was
/// answered, is on storage before the mark is, which gives the compounds up.
#[test]
fn homes_are_durable_before_compounds_are_given_up() {
    let mut rig = Rig::new(Some(Duration::ZERO));
    rig.open();
    rig.commit();
    rig.settle();
    let last = rig.committed;
    rig.write_homes();
    rig.settle();
    assert_eq!(rig.flushes(), 0, "a replay brings it back");
    rig.holds();
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.pass(0);
    assert!(!is_aged(&rig));
    let Rig { directory, log_at, homes, .. } = &rig;
    let log = File::open(directory.path().join("log")).expect("the log");
    let (mut unflushed, mut marks) = (Vec::new(), 0);
    for entry in entries(&log) {
        let entry = entry.expect("an entry");
        match entry.kind {
            EntryKind::Write(data) if entry.offset == log_at[0] => {
                let is_mark = Superblock::decode(&data).expect("a superblock").errno != 0;
                assert!(!is_mark || unflushed.is_empty(), "homes {unflushed:?} may be lost, with what compounds have");
                marks += u32::from(is_mark);
            }
            EntryKind::Write(_) if homes.iter().any(|home| home * BLOCK == entry.offset) => {
                unflushed.push(entry.offset)
            }
            EntryKind::Flush => unflushed.clear(),
            _ => {}
        }
    }
    assert!(marks > 0, "it has ended");
    let image = std::fs::read(&rig.image).expect("the image");
    homes.iter().for_each(|home| assert_eq!(image[(home * BLOCK) as usize..][..BLOCK as usize], content(last)));
}

/// An error that the guest's kernel notes in its journal's superblock is on storage, too: whoever mounts the file system after a loss of power
/// is told of it.
#[test]
fn an_error_of_the_guests_own_reaches_storage() {
    for within in [Duration::ZERO, Duration::from_secs(3600)] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        let told = rig.told.len();
        let mut block = rig.superblock.clone();
        let begin = Superblock::decode(&rig.superblock).expect("a superblock");
        let mut edit = jbd2::SuperblockEdit::new(&mut block).expect("a superblock");
        edit.start(begin.first).sequence(begin.sequence + 1).errno(-30).seal();
        rig.request(RequestKind::Write, rig.log_at[0], &block);
        if within.is_zero() {
            assert!(rig.told.len() == told && rig.held > 0, "it is not durable yet");
        }
        rig.settle();
        assert_eq!((said(&rig).errno, said(&rig).is_empty()), (-30, false), "{within:?}");
        assert!(rig.told[told..].iter().all(|(_, status)| *status == Status::Ok) && rig.held == 0, "{within:?}");
        expect_recovered(&rig);
    }
}

/// Nor is it lost where the worker dies that has answered it.
#[test]
fn an_error_of_the_guests_own_outlives_the_worker_that_answered() {
    for within in [Duration::ZERO, Duration::from_secs(3600)] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        let mut block = rig.superblock.clone();
        let begin = Superblock::decode(&rig.superblock).expect("a superblock");
        let mut edit = jbd2::SuperblockEdit::new(&mut block).expect("a superblock");
        edit.start(begin.first).sequence(begin.sequence + 1).errno(-30).seal();
        rig.request(RequestKind::Write, rig.log_at[0], &block);
        // What was to be written is not.
        rig.waiting.clear();
        assert_eq!(said(&rig).errno, 0);
        rig.follow(Some(within)).expect("another worker goes on");
        if within.is_zero() {
            // It was not answered, so it is asked again.
            rig.held = 0;
            rig.request(RequestKind::Write, rig.log_at[0], &block);
        }
        rig.pass(1);
        rig.settle();
        assert_eq!((said(&rig).errno, said(&rig).is_empty()), (-30, false), "{within:?}");
        assert_eq!(rig.held, 0, "{within:?}");
        // Once: the next one finds it there.
        rig.follow(Some(within)).expect("another worker goes on");
        rig.wake(1);
        rig.settle_one();
        assert!(rig.waiting.is_empty(), "{within:?}: {:?}", rig.waiting);
        expect_recovered(&rig);
    }
}

/// Every home is as of the last transaction.
fn expect_recovered(rig: &Rig) {
    rig.journals.recover_all().expect("recovered");
    let image = std::fs::read(&rig.image).expect("the image");
    let (part, log_at) = (rig.part(&image), rig.log_in_part());
    assert_eq!(state(&Image::of(part), (&log_at, &rig.homes), rig.committed, false), Ok(rig.committed));
}

/// Without memory for it a log block goes to its own place, which is where compounds are: durability by age ends before that, and
/// begins again when the log is held in full. `compounds` are live in the log, the last still on its way if `is_under_way`.
fn without_memory(compounds: u8, is_under_way: bool, begins_again: bool) {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    for index in 0..compounds {
        rig.commit();
        rig.settle();
        if index + 1 == compounds && is_under_way {
            rig.clock.fetch_add(1500, Ordering::AcqRel);
            let mut plan = Plan::default();
            rig.route.woken(&mut plan);
            rig.plan(plan);
        } else {
            rig.pass(1500);
            rig.promise(rig.committed);
        }
    }
    rig.gives_up();
    for _ in 0..3 {
        // With descriptors and commit blocks in their own places, too, the log is not read before recovery.
        rig.commit_with(|block| begins_again && jbd2::peek(block).is_some());
    }
    rig.settle();
    assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok), "the guest is told of no error");
    assert!(said(&rig).errno != 0, "the error mark is on storage");
    let reason = rig.journals.report("vm").disks[0].durability.as_ref().and_then(|report| report.reason.clone());
    assert!(reason.expect("a reason").contains("no memory"), "and why is said");
    if begins_again {
        // While blocks of it are in their own places nothing begins.
        rig.pass(5000);
        rig.pass(5000);
        assert!(!is_aged(&rig));
        // The guest's tail passes them.
        let last = rig.committed;
        rig.homes.into_iter().for_each(|block| rig.write_home(block, last));
        rig.settle();
        let tail = (rig.builder.position, rig.builder.sequence);
        rig.superblock(tail.0, tail.1);
        rig.commit();
        rig.settle();
        rig.pass(5000);
        rig.commit();
        rig.settle();
        rig.pass(5000);
        assert!(is_aged(&rig));
        rig.promise(rig.committed);
    }
    expect_recovered(&rig);
    rig.promise(rig.committed);
    assert!(rig.judge() > 50);
}

#[test]
fn it_ends_before_a_block_without_memory_goes_to_its_place() {
    without_memory(0, false, false);
    without_memory(1, true, false);
    without_memory(3, false, false);
}

#[test]
fn it_begins_again_when_no_block_is_in_its_own_place() {
    without_memory(2, true, true);
}

#[test]
fn it_does_not_begin_beside_blocks_in_their_own_places() {
    let mut rig = Rig::new(None);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.commit_with(|block| jbd2::peek(block).is_some());
    rig.settle();
    rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
    rig.pass(5000);
    rig.pass(5000);
    assert_eq!((rig.compounds(), is_aged(&rig)), (0, false));
    expect_recovered(&rig);
    rig.promise(rig.committed);
    assert!(rig.judge() > 50);
}

/// The same beside those of a transaction that is under way: nobody owes them yet, and compounds would go over them.
#[test]
fn nor_beside_those_of_a_transaction_under_way() {
    for is_room in [false, true] {
        let mut rig = Rig::new(None);
        rig.gives_up();
        // The second one lies on both sides of the log's end, and so where the first compound would go.
        rig.begin_before_the_end(7);
        rig.open();
        rig.commit();
        rig.settle();
        let log = rig.transaction();
        let (commit, body) = log.split_last().expect("a commit block");
        assert!(body.iter().any(|(position, _)| *position == 1), "it lies at the begin");
        rig.write_log(body, |_| is_room);
        rig.settle();
        rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        rig.pass(5000);
        rig.pass(5000);
        assert_eq!((rig.compounds() > 0, is_aged(&rig)), (is_room, is_room));
        if is_room {
            rig.promise(rig.committed - 1);
        }
        rig.write_log(std::slice::from_ref(commit), |_| true);
        rig.settle();
        rig.pass(5000);
        expect_recovered(&rig);
        rig.promise(rig.committed);
        assert!(rig.judge() > 40);
    }
}

/// What is promised is said when it holds, with nothing owed, too, and not before.
#[test]
fn it_is_in_force_when_storage_says_so() {
    for is_owed in [false, true] {
        let mut rig = Rig::new(None);
        rig.gives_up();
        rig.open();
        rig.commit();
        rig.settle();
        let last = rig.committed;
        if !is_owed {
            rig.homes.into_iter().for_each(|block| rig.write_home(block, last));
            rig.settle();
        }
        rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        let mut plan = Plan::default();
        rig.route.woken(&mut plan);
        rig.plan(plan);
        let mut operations = 0;
        while !rig.waiting.is_empty() {
            assert_eq!(rig.within_s(), None, "what is under way may be lost");
            let reason =
                rig.journals.report("vm").disks[0].durability.as_ref().and_then(|report| report.reason.clone());
            assert!(reason.expect("a reason").contains("not yet"));
            operations += 1;
            rig.settle_one();
        }
        assert!(operations > 2, "{operations} operations");
        assert!(is_aged(&rig), "nothing is committed after that");
        assert_eq!((rig.within_s(), rig.compounds()), (Some(1), u64::from(is_owed)));
        rig.holds();
        rig.promise(last);
        rig.commit();
        rig.settle();
        rig.pass(1500);
        rig.promise(rig.committed);
        assert!(rig.judge() > 40);
    }
}

/// What the guest's log does not have any more, and the guest writes past it (as ext4 its superblock), must not be overwritten by
/// an older copy that a compound has.
#[test]
fn what_is_written_past_the_journal_stays() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    for version in DIRECT..DIRECT + 3 {
        rig.commit();
        rig.settle();
        rig.pass(1500);
        let last = rig.committed;
        rig.promise(last);
        rig.homes.into_iter().for_each(|block| rig.write_home(block, last));
        rig.settle();
        let tail = (rig.builder.position, rig.builder.sequence);
        rig.superblock(tail.0, tail.1);
        rig.writes_directly(version);
        rig.write_home(rig.homes[0], version);
        rig.settle();
        rig.pass(1500);
        rig.pass(1500);
        rig.promise_direct(last, version);
    }
    assert!(rig.judge() > 100);
}

/// The guest writes past its journal while its log still has a copy of the block, as ext4 its superblock when it notes an error and goes
/// on: until its tail passes that copy, a replay brings the copy back with any journal. From then on no replay may.
#[test]
fn what_is_written_past_a_copy_stays_when_the_tail_has_passed_it() {
    for (within, waits) in [(AGE, 0), (AGE, 2), (Duration::ZERO, 0)] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        rig.promise(rig.committed);
        rig.writes_directly(DIRECT);
        passes_what_it_wrote_over(&mut rig);
        (0..waits).for_each(|_| rig.pass(1500));
        assert!(rig.judge() > 20, "{within:?}, waits {waits}");
    }
}

/// The first home gets something else than the newest transaction has, and all that is passed by the guest's tail.
fn passes_what_it_wrote_over(rig: &mut Rig) {
    let last = rig.committed;
    let [first, second, third] = rig.homes;
    rig.write_home(first, DIRECT);
    rig.write_home(second, last);
    rig.write_home(third, last);
    rig.settle();
    rig.flushes();
    let tail = (rig.builder.position, rig.builder.sequence);
    rig.superblock(tail.0, tail.1);
    rig.pass(0);
    rig.promise_direct(last, DIRECT);
    rig.pass(1500);
}

/// It was written before durability began, which makes a compound of what the journal has: that is not written over it, nor replayed when
/// the tail has passed it.
#[test]
fn what_was_written_past_the_journal_before_durability_began_stays() {
    [false, true].into_iter().for_each(stays_when_durability_begins);
}

/// The guest's tail passes it, or the guest closes its log, which is emptied for that.
fn stays_when_durability_begins(closes: bool) {
    let mut rig = Rig::new(None);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    let last = rig.committed;
    let [first, second, third] = rig.homes;
    // For when storage is a truth.
    rig.promise(last);
    rig.writes_directly(DIRECT);
    rig.write_home(first, DIRECT);
    rig.settle();
    rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
    rig.pass(0);
    assert!(rig.compounds() > 0, "what is owed becomes durable at once");
    rig.write_home(second, last);
    rig.write_home(third, last);
    rig.settle();
    let tail = (rig.builder.position, rig.builder.sequence);
    // Compounds have had numbers of their own.
    let (start, sequence) = if closes { (0, tail.1 + 8) } else { tail };
    rig.superblock(start, sequence);
    rig.pass(0);
    rig.promise_direct(last, DIRECT);
    rig.pass(1500);
    assert!(rig.judge() > 20);
}

/// A guest's tail passes what newer transactions have, home or not: it is told so when that is durable.
#[test]
fn a_tail_waits_until_what_it_passes_is_durable() {
    let mut rig = Rig::new(Some(Duration::from_secs(3600)));
    rig.open();
    for _ in 0..3 {
        rig.commit();
        let tail = (rig.builder.position, rig.builder.sequence);
        let passed = rig.committed;
        rig.commit();
        rig.settle();
        let (before, told) = (rig.compounds(), rig.told.len());
        rig.superblock(tail.0, tail.1);
        assert!(rig.told.len() > told && rig.told.iter().all(|(_, status)| *status == Status::Ok));
        assert!(rig.compounds() > before, "what the tail has passed is durable");
        rig.promise(passed);
    }
    assert!(rig.judge() > 50);
}

/// A guest moves its log's tail, and while that waits for what it passes it writes over what is in front of it: the superblock
/// that waited is none of the log's any more, when it may go.
#[test]
fn a_guest_that_writes_over_the_log_while_its_tail_waits_ends_it() {
    let mut rig = Rig::new(Some(Duration::from_secs(3600)));
    rig.open();
    let first = rig.builder.position;
    rig.commit();
    let tail = (rig.builder.position, rig.builder.sequence);
    rig.commit();
    rig.settle();
    rig.superblock_begins(tail.0, tail.1);
    assert!(rig.held > 0 && !rig.waiting.is_empty(), "it waits");
    rig.request_log(&[(first, vec![0x5a; BLOCK as usize])]);
    rig.settle();
    assert!(rig.held == 0 && rig.waiting.is_empty(), "nobody waits for ever");
    let said = said(&rig);
    assert_eq!((said.start, said.sequence), tail, "the disk is as its guest left it");
    let fault = rig.journals.report("vm").disks[0].fault.clone();
    let why = "the guest wrote over its journal while a superblock of it was made durable";
    assert!(fault.as_ref().is_some_and(|fault| fault.contains(why)), "it has ended in good order: {fault:?}");
    let compounds = rig.compounds();
    rig.pass(7_200_000);
    assert_eq!(rig.compounds(), compounds, "nothing is made durable beside that");
}

/// Numbers of blocks in the log's own place that are the guest's next, or later.
fn numbers_from(rig: &Rig, next: u32) -> Vec<u32> {
    numbers_in((&rig.file, &rig.log_at), next)
}

fn numbers_in((file, log_at): (&File, &[u64]), next: u32) -> Vec<u32> {
    let mut head = [0; jbd2::HEADER_BYTES];
    let of = |at: &u64| {
        file.read_exact_at(&mut head, *at).expect("read");
        jbd2::peek(&head).map(|header| header.sequence).filter(|number| *number >= next)
    };
    log_at[1..].iter().filter_map(of).collect()
}

/// Durability by age begins more often than the guest commits. Gives the guest's next number, which compounds have had.
fn outrun(rig: &mut Rig, is_aged: bool) -> u32 {
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    for _ in 0..4 {
        rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        rig.pass(0);
        rig.journals.set_durable_within(0, None).expect("possible");
        rig.pass(0);
    }
    if is_aged {
        rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        rig.pass(0);
    }
    let next = rig.builder.sequence;
    assert!(numbers_from(rig, next + 2).len() >= 2, "they have outrun its guest");
    next
}

/// A page at the edge of the log has homes, too, where the file system does not begin at a page: what is written there through the host's
/// cache would bring older ones along.
#[test]
fn nothing_is_cleared_away_beside_home_writes_in_the_same_pages() {
    for (start, is_aged, waits) in
        [(0, false, false), (0, true, false), (63 * 512, false, true), (63 * 512, true, true)]
    {
        let mut rig = Rig::at(start, None);
        let next = outrun(&mut rig, is_aged);
        if is_aged {
            // Another age is wished when the guest has begun to close it.
            rig.journals.set_durable_within(0, None).expect("possible");
            rig.pass(0);
        }
        let [first, second, third] = rig.homes;
        let last = rig.committed;
        rig.write_home(first, last);
        rig.write_home(second, last);
        rig.settle();
        rig.write_home(third, last);
        assert_eq!(rig.waiting.len(), 1, "it is under way");
        let told = rig.told.len();
        rig.superblock_begins(0, next);
        assert_eq!(!numbers_from(&rig, next).is_empty(), waits, "{start}");
        // None begins meanwhile.
        rig.write_home(first, last);
        if is_aged {
            rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        }
        assert_eq!(rig.waiting.iter().filter(|operation| operation.operation == Operation::Write).count() > 1, !waits);
        rig.settle();
        rig.pass(0);
        assert_eq!(numbers_from(&rig, next), [0; 0], "{start}");
        assert_eq!(rig.held, 0);
        assert!(rig.told[told..].iter().all(|(_, status)| *status == Status::Ok), "{:?}", rig.told);
        let mut raw = vec![0; SUPERBLOCK_BYTES];
        rig.file.read_exact_at(&mut raw, rig.log_at[0]).expect("read");
        let said = Superblock::decode(&raw).expect("a superblock");
        assert!(said.is_empty() && said.errno == 0 && said.sequence == next, "{said:?}");
    }
}

/// It begins more often than the guest commits: what has the numbers of the guest's next transactions is gone before those can come.
#[test]
fn no_compound_stays_that_has_a_number_of_the_guests_next_transactions() {
    for (end, is_aged) in [
        ("closed", false),
        ("closed", true),
        ("recovered", false),
        ("recovered", true),
        ("handed over", false),
        ("handed over", true),
        ("distrusted", false),
        ("distrusted", true),
        ("distrusted, and dies", false),
        ("distrusted, and dies", true),
    ] {
        let mut rig = Rig::new(None);
        if end.starts_with("distrusted") {
            // What is held, and written there, is elsewhere.
            rig.begin_before_the_end(300);
        }
        let next = outrun(&mut rig, is_aged);
        let mut last = rig.committed;
        match end {
            "closed" => {
                rig.homes.into_iter().for_each(|block| rig.write_home(block, last));
                rig.settle();
                rig.superblock(0, next);
            }
            "recovered" => rig.journals.recover_all().expect("recovered"),
            "distrusted" => {
                // No file system has such a block.
                let log = rig.transaction_with(Some(u64::from(u32::MAX) - 1));
                rig.write_log(&log, |_| true);
                rig.settle();
                // Durability by age ends first.
                (0..4).for_each(|_| rig.pass(0));
                assert!(
                    rig.journals.disk(0).fault().iter().any(|fault| fault.contains("not what it seemed")),
                    "{is_aged}"
                );
                last = rig.committed;
            }
            "distrusted, and dies" => {
                // Before anybody hears of it.
                let log = rig.transaction_with(Some(u64::from(u32::MAX) - 1));
                let held = |(position, block)| LogWrite { position, content: journal_area::Content::Bytes(block) };
                let writes: Vec<LogWrite> = log.into_iter().map(held).collect();
                rig.journals.area.hold(rig.journals.logs()[0].id, &writes);
                rig.journals.recover_all().expect("brought to its place");
                last = rig.committed;
            }
            _ => {
                // In the midst of a transaction, of which one block may have no memory.
                let log = rig.transaction();
                let (commit, body) = log.split_last().expect("a commit block");
                let first = body[0].1.clone();
                rig.write_log(body, |block| is_aged || block != first);
                rig.settle();
                rig.journals
                    .change_placement(rig.journals.logs()[0].index(), PlacementKind::Storage)
                    .expect("possible");
                for _ in 0..9 {
                    let mut plan = Plan::default();
                    let is_done = rig.route.hand_over(rig.journals.logs()[0].index(), &mut plan).expect("handed over");
                    rig.plan(plan);
                    if is_done {
                        break;
                    }
                    rig.pass(0);
                }
                assert!(said(&rig).errno == 0 && !said(&rig).is_empty());
                rig.write_log(std::slice::from_ref(commit), |_| true);
                rig.settle();
                // As without us, it counts on it when it has flushed.
                rig.request(RequestKind::Flush, 0, &[]);
                rig.settle();
                last = rig.committed;
            }
        }
        assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok), "{end}: {:?}", rig.told);
        // The guest's own has the next number.
        let left = numbers_from(&rig, next + u32::from(last > 1));
        assert!(left.is_empty(), "{end}, durable by age: {is_aged}: {left:?}");
        let image = std::fs::read(&rig.image).expect("the image");
        assert_eq!(state(&Image::of(&image), (&rig.log_at, &rig.homes), last, false), Ok(last), "{end}");
        rig.promise(last);
        assert!(rig.judge() > 40);
    }
}

/// The first number that no compound has, as the table of the log says it to who follows.
fn numbered(rig: &Rig) -> u32 {
    let books = rig.journals.area.adopted(rig.journals.logs()[0].id).expect("it has a table");
    books.numbered.expect("there were compounds")
}

/// One that is given up while it is written, after any of its steps, has had its number: the table knows it, who begins again takes a
/// later one, and nothing of it stays when the guest closes its log.
#[test]
fn a_compound_that_is_given_up_has_had_its_number() {
    let mut is_whole = false;
    for steps in 0..20 {
        let mut rig = Rig::new(None);
        let next = outrun(&mut rig, false);
        rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        rig.wake(0);
        assert!(!rig.waiting.is_empty(), "a compound is under way");
        for _ in 0..steps {
            if rig.waiting.is_empty() {
                is_whole = true;
                break;
            }
            rig.settle_one();
        }
        let begun = numbered(&rig);
        rig.journals.set_durable_within(0, None).expect("possible");
        rig.pass(0);
        assert!(!is_aged(&rig));
        assert_eq!(numbered(&rig), begun, "after {steps} steps");
        assert_eq!(numbers_from(&rig, begun), [0; 0], "after {steps} steps");
        // Once more: what was given up is not taken for this one.
        rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
        rig.pass(0);
        assert!(is_aged(&rig) && numbered(&rig) == begun + 1, "after {steps} steps");
        rig.journals.set_durable_within(0, None).expect("possible");
        rig.pass(0);
        rig.write_homes();
        rig.settle();
        rig.superblock(0, next);
        assert_eq!(numbers_from(&rig, next), [0; 0], "after {steps} steps");
        assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok));
        assert!(rig.judge() > 40);
    }
    assert!(is_whole, "all of a compound is made in so many steps");
}

/// The compound of a recovery has the number that the guest's log would go on with behind the next transaction: a guest that was suspended writes
/// that one, and must not meet it.
#[test]
fn a_recovery_leaves_no_compound_that_a_suspended_guest_would_meet() {
    let mut rig = Rig::new(None);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
    rig.pass(0);
    let next = rig.builder.sequence;
    assert_eq!(numbered(&rig), next + 1, "the compound has the number that its guest gives next");
    expect_recovered(&rig);
    assert_eq!(numbers_from(&rig, next + 1), [0; 0]);
    rig.promise(rig.committed);
    assert!(rig.judge() > 40);
}

/// A log whose place has had compounds is opened again, held without them or in its own place: what lies there still is of transactions before
/// those that its guest writes, and the mark says so, too.
#[test]
fn a_log_that_has_had_compounds_is_opened_again_without() {
    for is_stored in [false, true] {
        let mut rig = Rig::new(None);
        let next = outrun(&mut rig, true);
        rig.write_homes();
        rig.settle();
        rig.superblock(0, next);
        assert!(said(&rig).is_empty() && said(&rig).errno == 0);
        assert_eq!(numbers_from(&rig, next), [0; 0], "it is closed");
        rig.promise(rig.committed);
        rig.journals.set_durable_within(0, None).expect("possible");
        if is_stored {
            let index = rig.journals.logs()[0].index();
            assert_eq!(rig.journals.change_placement(index, PlacementKind::Storage).expect("possible"), Change::Done);
        }
        let (parsed, format) = Superblock::parse(&rig.superblock).expect("a journal");
        rig.builder = LogBuilder::new(format, parsed.first, next + 1);
        rig.open();
        assert_eq!(said(&rig).errno != 0, !is_stored, "its own place has it, or it is held");
        // As every kernel does.
        let log = rig.transaction();
        let (commit, body) = log.split_last().expect("a commit block");
        for part in [body, std::slice::from_ref(commit)] {
            rig.request_log(part);
            rig.settle();
            rig.request(RequestKind::Flush, 0, &[]);
            rig.settle();
        }
        assert_eq!(numbers_from(&rig, next + 2), [0; 0]);
        assert_eq!(numbers_from(&rig, next + 1).is_empty(), !is_stored, "it is its guest's own");
        if is_stored {
            rig.promise(rig.committed);
        }
        assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok));
        assert!(rig.judge() > 40);
    }
}

/// The same where another process finishes what was left.
#[test]
fn no_compound_stays_where_somebody_else_finishes() {
    for is_aged in [false, true] {
        let mut rig = Rig::new(None);
        let next = outrun(&mut rig, is_aged);
        let area = rig.journals.directory().path().to_owned();
        let Rig { directory, image, file, journals, route, log_at, homes, committed, .. } = rig;
        drop((route, journals));
        let found = AreaDirectory::take_over(&area, &directory.path().join("registry")).expect("nobody has it");
        let finished = placement::finish_directory(&found, std::slice::from_ref(&image))
            .and_then(placement::Finish::into_result)
            .expect("finished");
        assert_eq!(finished.len(), 1);
        assert_eq!(numbers_in((&file, &log_at), next), [0; 0], "durable by age: {is_aged}");
        let bytes = std::fs::read(&image).expect("the image");
        assert_eq!(state(&Image::of(&bytes), (&log_at, &homes), committed, false), Ok(committed));
    }
}

/// A flush that somebody else asked for has failed: what it was to cover may be lost, so no compound may vouch for it, and nothing begins
/// beside that.
#[test]
fn a_flush_of_anybody_that_failed_ends_it() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    rig.commit();
    rig.settle();
    rig.pass(1500);
    rig.promise(rig.committed);
    let before = rig.compounds();
    // Ordered data, or a home that was written back: nobody knows which.
    let first = rig.committed;
    rig.homes.into_iter().for_each(|block| rig.write_home(block, first));
    rig.settle();
    rig.commit();
    rig.settle();
    rig.gives_up();
    rig.journals.disk(0).note_failed_flush();
    rig.pass(1500);
    assert_eq!((rig.compounds(), rig.within_s(), is_aged(&rig)), (before, None, false));
    let durability = rig.journals.report("vm").disks[0].durability.clone().expect("the log is open");
    assert!(durability.reason.expect("a reason").contains("only held"));
    // Not again under this mount either, whatever is wished.
    for within in [None, Some(AGE)] {
        rig.journals.set_durable_within(0, within).expect("possible");
        rig.pass(5000);
        assert!(!is_aged(&rig));
    }
    let told = rig.told.len();
    rig.request(RequestKind::Flush, 0, &[]);
    assert!(matches!(rig.told[told..], [(_, Status::IoError)]), "and its guest is told");
    expect_recovered(&rig);
}

/// The same where it was not in force when the flush failed.
#[test]
fn it_does_not_begin_where_a_flush_has_failed() {
    let mut rig = Rig::new(None);
    rig.open();
    rig.commit();
    rig.settle();
    rig.journals.disk(0).note_failed_flush();
    rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
    rig.pass(5000);
    rig.pass(5000);
    assert_eq!((rig.compounds(), is_aged(&rig)), (0, false));
    expect_recovered(&rig);
}

/// Where durability by age has ended because storage failed, nobody who goes on begins it anew under this mount; and where what it is
/// owed is brought home, nothing counts on the compounds.
#[test]
fn storage_that_has_failed_is_no_truth_for_a_recovery() {
    for is_heard in [true, false] {
        let mut rig = Rig::new(Some(AGE));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        rig.promise(rig.committed);
        rig.commit();
        rig.settle();
        rig.gives_up();
        let log = rig.journals.logs()[0].id;
        let doubt = |rig: &Rig| rig.journals.area.adopted(log).expect("it has a table").doubt;
        assert_eq!(doubt(&rig), Doubt::default());
        if is_heard {
            rig.fails = true;
            rig.pass(1500);
            rig.fails = false;
            assert!(!is_aged(&rig));
        } else {
            rig.journals.disk(0).note_failed_flush();
            assert!(is_aged(&rig));
        }
        let (is_doubted, owes_errors, [is_untold, flush_failed]) = (true, false, [!is_heard; 2]);
        let expected = Doubt { is_doubted, is_untold, owes_errors, is_held_only: is_heard, flush_failed };
        assert_eq!(doubt(&rig), expected);
        rig.log.mark("recovery");
        expect_recovered(&rig);
        let log = File::open(rig.directory.path().join("log")).expect("the log");
        let mut recovery = entries(&log)
            .map(|entry| entry.expect("an entry"))
            .skip_while(|entry| !matches!(&entry.kind, EntryKind::Mark(name) if name == "recovery"));
        let first = recovery.find_map(|entry| match entry.kind {
            EntryKind::Write(data) => Some((entry.offset, data)),
            _ => None,
        });
        let (at, data) = first.expect("something is written");
        let is_marked = || at == rig.log_at[0] && Superblock::decode(&data).expect("a superblock").errno != 0;
        assert!(is_heard || is_marked(), "the error mark comes before anything else");
        rig.promise(rig.committed);
        assert!(rig.judge() > 40);
    }
}

/// Every file of a directory, and of those below.
fn files(directory: &Path, into: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        let kind = std::fs::symlink_metadata(&path).expect("it is there").file_type();
        if kind.is_dir() {
            files(&path, into);
        } else if kind.is_file() {
            into.push((path.clone(), std::fs::read(&path).expect("read")));
        }
    }
}

/// A recovery beside compounds is killed between any two of its writes, or in the midst of one: the next brings the same. (With a
/// kill what was written is there, flushed or not. Tables are closed behind the last write.)
#[test]
fn a_recovery_beside_compounds_can_be_killed_anywhere() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    rig.commit();
    rig.settle();
    rig.pass(1500);
    rig.commit();
    let last = rig.committed;
    // Some of what is held is newer than what is durable, some is at home.
    rig.settle();
    rig.pass(1500);
    rig.write_home(rig.homes[2], last);
    rig.settle();
    rig.commit();
    rig.settle();
    let mut left = Vec::new();
    for part in ["vms", "registry"] {
        files(&rig.directory.path().join(part), &mut left);
    }
    let before = std::fs::read(&rig.image).expect("the image");
    let next = rig.builder.sequence;
    rig.log.mark("recovery");
    rig.journals.recover_all().expect("recovered");
    let area = rig.journals.directory().path().to_owned();
    let Rig { directory, image, journals, route, homes, log_at, committed, .. } = rig;
    drop((route, journals));
    let log = File::open(directory.path().join("log")).expect("the log");
    let kinds = entries(&log).map(|entry| entry.expect("an entry"));
    let recovery: Vec<(u64, Vec<u8>)> = kinds
        .skip_while(|entry| !matches!(&entry.kind, EntryKind::Mark(name) if name == "recovery"))
        .filter_map(|entry| match entry.kind {
            EntryKind::Write(data) => Some((entry.offset, data.to_vec())),
            _ => None,
        })
        .collect();
    assert!(recovery.len() > 6, "{} writes", recovery.len());
    for killed in 0..=recovery.len() {
        for half in [false, true] {
            let mut bytes = before.clone();
            for (offset, data) in &recovery[..killed] {
                bytes[*offset as usize..][..data.len()].copy_from_slice(data);
            }
            if half {
                let Some((offset, data)) = recovery.get(killed) else { continue };
                // The superblock goes in one sector that counts.
                let len = (data.len() / 2).next_multiple_of(SECTOR);
                bytes[*offset as usize..][..len].copy_from_slice(&data[..len]);
            }
            // The same files, as they were.
            let write = |path: &Path, bytes: &[u8]| {
                std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
                let file = File::options().create(true).truncate(false).write(true).open(path).expect("opened");
                file.set_len(bytes.len() as u64).expect("a length");
                file.write_all_at(bytes, 0).expect("written");
            };
            left.iter().for_each(|(path, bytes)| write(path, bytes));
            write(&image, &bytes);
            let what = format!("killed after {killed} writes of {}, half of one more: {half}", recovery.len());
            let registry = directory.path().join("registry");
            let found = AreaDirectory::take_over(&area, &registry).unwrap_or_else(|error| panic!("{what}: {error}"));
            let finished = placement::finish_directory(&found, std::slice::from_ref(&image))
                .and_then(placement::Finish::into_result);
            finished.unwrap_or_else(|error| panic!("{what}: {error}"));
            let bytes = std::fs::read(&image).expect("the image");
            let raw = &bytes[log_at[0] as usize..][..SUPERBLOCK_BYTES];
            let said = Superblock::decode(raw).expect("a superblock");
            assert!(said.is_empty() && said.errno == 0, "{what}: {said:?}");
            assert_eq!(state(&Image::of(&bytes), (&log_at, &homes), committed, false), Ok(committed), "{what}");
            let file = File::open(&image).expect("opened");
            assert_eq!(numbers_in((&file, &log_at), next + 1), [0; 0], "{what}: a suspended guest would meet it");
        }
    }
}

/// Another user who has what came after the compounds of an image keeps others from it, as one who has a log without compounds does: a file
/// system made good by these alone would be older than what he has, and he would write that over it.
#[test]
fn another_user_who_has_what_came_later_keeps_an_image_from_being_used() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: a second user can only be played by root");
        return;
    }
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    rig.commit();
    assert_eq!(rig.within_s(), Some(AGE.as_secs()));
    let sentence = |rig: &Rig| placement::held_by_another(&rig.image).expect("looked");
    assert_eq!(sentence(&rig), None, "nobody else has it");
    let theirs = tempfile::Builder::new().prefix("amberlog-").tempdir_in("/dev/shm").expect("tmpfs");
    let (by_image, area) = (theirs.path().join("by-image"), theirs.path().join("vm-1-0"));
    [&by_image, &area].into_iter().for_each(|path| std::fs::create_dir(path).expect("made"));
    let is = std::fs::metadata(&rig.image).expect("it is there");
    let entry = serde_json::json!({"schema": 1, "area": area}).to_string();
    std::fs::write(by_image.join(format!("file-{:x}-{:x}", is.dev(), is.ino())), entry).expect("written");
    [theirs.path(), &area].into_iter().for_each(|path| {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).expect("given");
    });
    assert_eq!(sentence(&rig), None, "a word alone is not believed");
    std::fs::copy(rig.journals.directory().path().join("log-0.table"), area.join("log-0.table")).expect("copied");
    let found = sentence(&rig).expect("he has it");
    assert!(found.contains("User 65534"), "{found}");
}

/// A compound that is cleared away is there or not, whatever of that a power cut leaves: half a block of it is nothing that any kernel
/// understands, where blocks have checksums.
#[test]
fn a_power_cut_tears_no_compound_that_is_cleared_away() {
    let mut rig = Rig::new(None);
    rig.superblock[0x28..0x2c].copy_from_slice(&0x10u32.to_be_bytes());
    rig.superblock[0x50] = 4;
    jbd2::SuperblockEdit::new(&mut rig.superblock).expect("a superblock").seal();
    let (parsed, format) = Superblock::parse(&rig.superblock).expect("a journal");
    rig.builder = LogBuilder::new(format, parsed.first, parsed.sequence + 1);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
    rig.pass(0);
    assert!(is_aged(&rig));
    let next = rig.builder.sequence;
    let before = std::fs::read(&rig.image).expect("the image");
    rig.log.mark("recovery");
    expect_recovered(&rig);
    assert_eq!(numbers_from(&rig, next + 1), [0; 0]);
    let Rig { directory, log_at, homes, committed, .. } = &rig;
    let log = File::open(directory.path().join("log")).expect("the log");
    let mut bytes = before;
    let (mut cuts, mut is_recovery) = (0, false);
    for entry in entries(&log) {
        let entry = entry.expect("an entry");
        is_recovery |= matches!(&entry.kind, EntryKind::Mark(name) if name == "recovery");
        let EntryKind::Write(data) = entry.kind else { continue };
        if !is_recovery {
            continue;
        }
        let is_clearing = log_at[1..].contains(&entry.offset) && data.iter().all(|byte| *byte == 0);
        for (at, part) in (entry.offset as usize..).step_by(SECTOR).zip(data.chunks(SECTOR)) {
            // Of what is cleared away each sector alone, too, whichever comes first.
            if is_clearing {
                let mut torn = bytes.clone();
                torn[at..at + part.len()].copy_from_slice(part);
                assert_eq!(state(&Image::of(&torn), (log_at, homes), *committed, false), Ok(*committed), "byte {at}");
                cuts += 1;
            }
        }
        bytes[entry.offset as usize..][..data.len()].copy_from_slice(&data);
        // Nobody who finds the journal empty looks for more, wherever we are killed.
        let is_empty = Superblock::decode(&bytes[log_at[0] as usize..][..SUPERBLOCK_BYTES])
            .is_ok_and(|said| said.is_empty() && said.errno == 0);
        let has_later = |at: &u64| {
            jbd2::peek(&bytes[*at as usize..][..jbd2::HEADER_BYTES]).is_some_and(|header| header.sequence > next)
        };
        assert!(!is_empty || !log_at[1..].iter().any(has_later), "a suspended guest would meet it");
    }
    assert!(cuts > 0, "something is cleared away");
}
