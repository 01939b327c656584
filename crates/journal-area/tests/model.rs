//! The area against a complete journal: a simulated guest commits, revokes, writes home, scribbles and moves its tail; at
//! every step, what recovery makes of the held log is compared with what the same replay makes of every block the guest
//! ever wrote into its log. This is rule 2 of the design, and with it rules 1 and 3.

use guest_memory::{HostFile, MemorySlice, PAGE_BYTES, PageId, RegionDescriptor, VmMemory};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Content as LogContent, Features, LogRead, Plan, Superblock};
use journal_area::{
    Content, FoundLog, Holding, HomeWrite, JournalArea, LogId, LogShape, LogWrite, Source, SuperblockEffect,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::Arc;

const BLOCK: usize = PAGE_BYTES;
const LOG_BLOCKS: u32 = 96;
const HOME_BLOCKS: u64 = 64;
const PAGES: u32 = 96;

type Disk = BTreeMap<u64, Vec<u8>>;

/// A complete journal: the judge's view.
struct CompleteLog<'a>(&'a HashMap<u32, Vec<u8>>);

impl LogRead for CompleteLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<LogContent, Infallible> {
        match self.0.get(&position) {
            Some(block) => buffer.copy_from_slice(block),
            None => buffer.fill(0),
        }
        Ok(LogContent::Present)
    }
}

fn replay<L: LogRead>(log: &mut L, disk: &mut Disk) -> u64 {
    let mut block = vec![0; BLOCK];
    log.read(0, &mut block).expect("a superblock");
    let (superblock, format) = Superblock::parse(&block).expect("a good superblock");
    if superblock.is_empty() {
        return 0;
    }
    let plan = Plan::new(log, &superblock, &format, &|block| block < HOME_BLOCKS).expect("a replay");
    let mut written = 0;
    for planned in plan.blocks() {
        for copy in planned.copies() {
            if log.read(copy.position, &mut block).expect("a block") == LogContent::AtHome {
                break;
            }
            if copy.restore(&format, &mut block) {
                disk.insert(planned.home(), block.clone());
                written += 1;
                break;
            }
        }
    }
    written
}

struct InFlight {
    operation: usize,
    first: u64,
    content: Vec<Vec<u8>>,
    /// What is taken from elsewhere, by index: storage may read it as late as the write's end.
    replaced: Vec<(usize, Source)>,
}

struct Guest {
    memory: Arc<VmMemory>,
    area: Arc<JournalArea>,
    log: LogId,
    superblock: SuperblockBuilder,
    builder: LogBuilder,
    /// The log as a disk would have it.
    complete: HashMap<u32, Vec<u8>>,
    disk: Disk,
    /// Page that caches each block.
    cache: HashMap<u64, PageId>,
    next_page: u32,
    /// Live transactions: sequence, first position, blocks.
    live: Vec<(u32, u32, Vec<u64>)>,
    in_flight: Vec<InFlight>,
    serial: u32,
    open: bool,
    directory: tempfile::TempDir,
}

impl Guest {
    fn new(checksum: Checksum, holding: Holding) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let ram = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(directory.path().join("ram"))
            .expect("a file");
        ram.set_len(u64::from(PAGES) * BLOCK as u64).expect("a length");
        let memory = VmMemory::new();
        memory
            .map(vec![RegionDescriptor {
                gpa: 0,
                size: u64::from(PAGES) * BLOCK as u64,
                user_addr: 0x7000_0000,
                file: ram,
                file_offset: 0,
            }])
            .expect("mapped");
        memory.simulate_protection();
        let area = JournalArea::new(&memory, u64::MAX);
        let shape = LogShape { block_bytes: BLOCK as u32, log_blocks: LOG_BLOCKS, home_blocks: HOME_BLOCKS };
        let log = area.log_op_init(directory.path(), "log", shape, holding, Vec::new()).expect("a log");
        let superblock = SuperblockBuilder {
            maxlen: LOG_BLOCKS,
            uuid: [7; 16],
            features: Features { compat: 0, incompat: Features::REVOKE | Features::WIDE, ro_compat: 0 },
            sequence: u32::MAX - 5,
            ..SuperblockBuilder::default()
        }
        .checksum(checksum);
        let (_, format) = Superblock::parse(&superblock.build()).expect("valid");
        let builder = LogBuilder::new(format, 1, u32::MAX - 5);
        let disk = (0..HOME_BLOCKS).map(|block| (block, vec![block as u8; BLOCK])).collect();
        Guest {
            memory,
            area,
            log,
            superblock,
            builder,
            complete: HashMap::new(),
            disk,
            cache: HashMap::new(),
            next_page: 0,
            live: Vec::new(),
            in_flight: Vec::new(),
            serial: 0,
            open: false,
            directory,
        }
    }

    fn page_slice(&self, page: PageId) -> MemorySlice {
        self.memory.page(page).expect("a page")
    }

    fn content(&self, page: PageId) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        self.page_slice(page).copy_out(0, &mut bytes);
        bytes
    }

    /// The guest changes a block in its cache.
    fn modify(&mut self, block: u64, fresh_page: bool, escaped: bool) {
        self.serial += 1;
        let page = match self.cache.get(&block) {
            Some(page) if !fresh_page => *page,
            _ => {
                let page = PageId(self.next_page % PAGES);
                self.next_page += 1;
                self.cache.retain(|_, used| *used != page);
                self.cache.insert(block, page);
                page
            }
        };
        let mut bytes = vec![self.serial as u8; BLOCK];
        bytes[4..8].copy_from_slice(&self.serial.to_le_bytes());
        if escaped {
            bytes[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        }
        self.memory.simulated_guest_write(page, 0, &bytes);
    }

    fn write_superblock(&mut self, start: u32, sequence: u32) -> SuperblockEffect {
        let block = SuperblockBuilder { start, sequence, ..self.superblock.clone() }.build();
        self.complete.insert(0, block.clone());
        self.area.superblock_written(self.log, &block).expect("held")
    }

    fn free_blocks(&self) -> u32 {
        let tail = self.live.first().map_or(self.builder.position, |(_, position, _)| *position);
        let used = self.builder.format.distance(tail, self.builder.position);
        self.builder.format.log_blocks() - used
    }

    /// Commits blocks; with `crash_before_commit` only the body reaches the log and the guest dies: returns false.
    fn commit(&mut self, blocks: &[u64], revokes: &[u64], split: usize, crash_before_commit: bool) -> bool {
        let mut unique = blocks.to_vec();
        unique.sort_unstable();
        unique.dedup();
        let revokes: Vec<u64> = revokes.iter().copied().filter(|block| !unique.contains(block)).collect();
        let transaction = Transaction {
            blocks: unique
                .iter()
                .filter(|block| self.cache.contains_key(block))
                .map(|block| (*block, self.content(self.cache[block])))
                .collect(),
            revokes: revokes.clone(),
            seconds: u64::from(self.serial),
        };
        if self.builder.blocks_needed(&transaction) as u32 + 2 > self.free_blocks() {
            self.checkpoint();
            // The checkpoint put older versions into the cache; the new ones come back.
            for (block, content) in &transaction.blocks {
                self.memory.simulated_guest_write(self.cache[block], 0, content);
            }
        }
        if !self.open {
            let effect = self.write_superblock(self.builder.position, self.builder.sequence);
            assert_eq!(effect, SuperblockEffect::Opened);
            self.open = true;
        }
        let (sequence, position) = (self.builder.sequence, self.builder.position);
        let mut log_blocks = Vec::new();
        if crash_before_commit {
            self.builder.body(&transaction, &mut |position, block| log_blocks.push((position, block.to_vec())));
        } else {
            self.builder.transaction(&transaction, &mut |position, block| log_blocks.push((position, block.to_vec())));
        }
        let pages: HashMap<Vec<u8>, PageId> =
            transaction.blocks.iter().map(|(block, data)| (data.clone(), self.cache[block])).collect();
        for batch in log_blocks.chunks(split.max(1)) {
            let writes: Vec<LogWrite> = batch
                .iter()
                .map(|(position, block)| {
                    self.complete.insert(*position, block.clone());
                    let content = match pages.get(block) {
                        Some(page) => Content::Page(self.page_slice(*page)),
                        None => Content::Bytes(block.clone()),
                    };
                    LogWrite { position: *position, content }
                })
                .collect();
            let outcome = self.area.log_op_mprotect(self.log, &writes);
            assert!(outcome.no_memory.is_empty());
        }
        if !crash_before_commit {
            let committed = unique.into_iter().filter(|block| self.cache.contains_key(block)).collect();
            self.live.push((sequence, position, committed));
            for (_, _, blocks) in &mut self.live {
                blocks.retain(|block| !revokes.contains(block));
            }
        }
        !crash_before_commit
    }

    /// Begins a home write of `count` blocks from `first` on, as far as the guest has them cached.
    fn begin_home_write(&mut self, first: u64, count: u64) {
        let count = (0..count).take_while(|offset| self.cache.contains_key(&(first + offset))).count() as u64;
        if count == 0 {
            return;
        }
        let payload: Vec<_> = (first..first + count).map(|block| Some(self.page_slice(self.cache[&block]))).collect();
        loop {
            match self.area.home_write_begins(self.log, first..first + count, &payload) {
                HomeWrite::Go { operation, replaced } => {
                    let mut content: Vec<Vec<u8>> =
                        (first..first + count).map(|block| self.content(self.cache[&block])).collect();
                    for (index, source) in &replaced {
                        content[*index] = bytes_of(source);
                    }
                    self.in_flight.push(InFlight { operation, first, content, replaced });
                    return;
                }
                HomeWrite::Wait => panic!("no host write is in flight here"),
                HomeWrite::Restore(blocks) => {
                    for block in blocks {
                        self.area.restore(self.log, block, &self.disk[&block]).expect("room");
                    }
                }
            }
        }
    }

    fn end_home_write(&mut self, index: usize, ok: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        let write = self.in_flight.remove(index % self.in_flight.len());
        for (index, source) in &write.replaced {
            assert!(bytes_of(source) == write.content[*index], "what is taken from elsewhere changed under the write");
        }
        if ok {
            for (offset, content) in write.content.into_iter().enumerate() {
                self.disk.insert(write.first + offset as u64, content);
            }
        }
        self.area.home_write_ended(self.log, write.operation, ok);
    }

    fn host_writes(&mut self, count: usize) {
        for (operation, write) in self.area.host_writes(self.log, count, false) {
            self.disk.insert(write.block, bytes_of(&write.source));
            self.area.home_write_ended(self.log, operation, true);
        }
    }

    /// The guest's checkpoint: writes home what its oldest transactions need and moves the tail.
    fn checkpoint(&mut self) {
        while !self.in_flight.is_empty() {
            self.end_home_write(0, true);
        }
        for (_, _, blocks) in std::mem::take(&mut self.live) {
            for block in blocks {
                // What the guest no longer caches it has written home before it let go of the page.
                if self.cache.contains_key(&block) {
                    self.write_committed_home(block);
                }
            }
        }
        if self.open {
            let effect = self.write_superblock(self.builder.position, self.builder.sequence);
            assert_eq!(effect, SuperblockEffect::GoesOn);
        }
    }

    /// Writes the newest committed version of a block home, as jbd2's checkpoint does.
    fn write_committed_home(&mut self, block: u64) {
        let mut newest = Disk::new();
        replay(&mut CompleteLog(&self.complete), &mut newest);
        if let Some(content) = newest.remove(&block) {
            self.memory.simulated_guest_write(self.cache[&block], 0, &content);
            self.begin_home_write(block, 1);
            while !self.in_flight.is_empty() {
                self.end_home_write(0, true);
            }
        }
    }

    /// Rule 2: the held log and the complete one make the same disk, whether the writes in flight land or not.
    fn compare(&self) {
        self.area.check().expect("the books are right");
        self.compare_on(&self.disk);
        let mut landed = self.disk.clone();
        for write in &self.in_flight {
            landed.extend(
                write.content.iter().enumerate().map(|(at, content)| (write.first + at as u64, content.clone())),
            );
        }
        self.compare_on(&landed);
    }

    /// The same from the files alone, as a process finds them after this one was killed (rule 1).
    fn compare_found(&self) {
        let path = |name: &str| self.directory.path().join(name);
        let ram = vec![(0, HostFile::open(&path("ram")).expect("guest memory"))];
        let found_log = FoundLog::open(&path("log.table"), &path("log.pool"), ram).expect("a good table");
        assert_eq!(found_log.is_open(), self.open);
        let mut expected = self.disk.clone();
        let mut found = self.disk.clone();
        if self.open {
            replay(&mut CompleteLog(&self.complete), &mut expected);
            replay(&mut found_log.log(), &mut found);
        }
        assert!(expected == found, "the files of a dead process make another disk than the complete journal");
    }

    fn compare_on(&self, disk: &Disk) {
        let mut expected = disk.clone();
        if self.open {
            replay(&mut CompleteLog(&self.complete), &mut expected);
        }
        let mut found = disk.clone();
        let owed = self.area.log_op_query(self.log);
        self.area.look(self.log, |held| {
            if self.open {
                let written = replay(held, &mut found);
                assert_eq!(written, owed.blocks, "what is written is what was owed");
            }
        });
        for block in 0..HOME_BLOCKS {
            assert!(
                expected[&block] == found[&block],
                "block {block}: the complete journal has version {}, the held one {}, home {}",
                expected[&block][4],
                found[&block][4],
                disk[&block][4],
            );
        }
    }
}

fn bytes_of(source: &Source) -> Vec<u8> {
    match source {
        Source::Held(slice) => {
            let mut bytes = vec![0; slice.len()];
            slice.copy_out(0, &mut bytes);
            bytes
        }
        Source::Bytes(bytes) => bytes.to_vec(),
        Source::Given => panic!("nothing was given"),
    }
}

#[derive(Clone, Debug)]
enum Step {
    Modify(Vec<u64>, bool, bool),
    Commit(Vec<u64>, Vec<u64>, usize),
    BeginHome(u64, u64),
    EndHome(usize, bool),
    HostWrites(usize),
    Scribble(u32),
    Checkpoint,
    CrashBeforeCommit(Vec<u64>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let blocks = || prop::collection::vec(0..HOME_BLOCKS / 2, 1..6);
    let step = prop_oneof![
        4 => (blocks(), prop::bool::weighted(0.3), prop::bool::weighted(0.1))
            .prop_map(|(blocks, fresh, escaped)| Step::Modify(blocks, fresh, escaped)),
        4 => (blocks(), prop::collection::vec(0..HOME_BLOCKS / 2, 0..3), 1usize..8)
            .prop_map(|(blocks, revokes, split)| Step::Commit(blocks, revokes, split)),
        4 => (0..HOME_BLOCKS / 2, 1u64..4).prop_map(|(first, count)| Step::BeginHome(first, count)),
        4 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(index, ok)| Step::EndHome(index, ok)),
        1 => (1usize..8).prop_map(Step::HostWrites),
        2 => (0..PAGES).prop_map(Step::Scribble),
        1 => Just(Step::Checkpoint),
    ];
    (prop::collection::vec(step, 1..60), prop::option::of(blocks())).prop_map(|(mut steps, crash)| {
        steps.extend(crash.map(Step::CrashBeforeCommit));
        steps
    })
}

fn run(checksum: Checksum, holding: Holding, steps: &[Step]) {
    let mut guest = Guest::new(checksum, holding);
    for step in steps {
        match step {
            Step::Modify(blocks, fresh, escaped) => {
                blocks.iter().for_each(|block| guest.modify(*block, *fresh, *escaped));
            }
            Step::Commit(blocks, revokes, split) => {
                // The guest commits what it has just changed, so no two blocks have the same content.
                blocks.iter().for_each(|block| guest.modify(*block, false, false));
                guest.commit(blocks, revokes, *split, false);
            }
            Step::BeginHome(first, count) => guest.begin_home_write(*first, *count),
            Step::EndHome(index, ok) => guest.end_home_write(*index, *ok),
            Step::HostWrites(count) => guest.host_writes(*count),
            // A wild write: the block that the page caches, if any, is now dirty.
            Step::Scribble(page) => guest.memory.simulated_guest_write(PageId(*page), 100, b"wild"),
            Step::Checkpoint => guest.checkpoint(),
            Step::CrashBeforeCommit(blocks) => {
                blocks.iter().for_each(|block| guest.modify(*block, false, false));
                guest.commit(blocks, &[], 3, true);
                guest.compare();
                guest.compare_found();
                return;
            }
        }
        guest.compare();
    }
    guest.compare_found();
    // A clean stop: everything home, the log closed, nothing held.
    guest.checkpoint();
    if guest.open {
        assert_eq!(guest.write_superblock(0, guest.builder.sequence), SuperblockEffect::Closed);
        guest.open = false;
    }
    guest.compare();
    assert_eq!(guest.area.counters(guest.log).blocks_retained_now, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(96), ..ProptestConfig::default() })]

    #[test]
    fn held_equals_complete_v3(steps in steps()) {
        run(Checksum::V3, Holding::Retain, &steps);
    }

    #[test]
    fn held_equals_complete_without_checksums(steps in steps()) {
        run(Checksum::None, Holding::Retain, &steps);
    }

    #[test]
    fn held_equals_complete_copied(steps in steps()) {
        run(Checksum::V2, Holding::Copy, &steps);
    }
}
