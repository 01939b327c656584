//! Several logs side by side over one guest memory, each with a thread of its own, as disks have; with a real userfaultfd, and writers that
//! scribble on the pages through the VMM's mapping the whole time. All of the guest's pages go through all journals, the same ones at the
//! same moment too, as only a hostile guest has them. Now and then there is no memory at all.
//!
//! What each log holds is byte for byte what it held when the commit was answered; what is at home is just that; and whoever
//! waits for a page gets it in the end.

use guest_memory::{MemoryTable, PAGE_BYTES, PageId, RegionDescriptor, VmMemory, simulated_delay, simulated_room};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Superblock};
use journal_area::{
    Content, Holding, HomeWrite, HotPages, JournalArea, Location, LogId, LogShape, LogWrite, Over, Pressure, Source,
    SuperblockEffect,
};
use seeded_random::Random;
use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A guest's memory: few pages, so that logs meet on them.
const PAGES: u64 = 48;
const LOG_BLOCKS: u32 = 256;
const LOGS: u64 = 3;
const WRITERS: u64 = 2;
/// A page's home is the block of its number: the same content is never written to another block.
const SHAPE: LogShape = LogShape { block_bytes: PAGE_BYTES as u32, log_blocks: LOG_BLOCKS, home_blocks: PAGES + 1 };
/// All that the logs may take: some of what they hold has to go home again and again.
const BUDGET_BYTES: u64 = 600 << 10;
/// For so long all choose their pages among the same few.
const TURN: Duration = Duration::from_millis(2);
/// At least; and until enough was seen, on a machine that is busy with something else.
const PHASE: Duration = Duration::from_millis(1500);
const PHASE_MAX: Duration = Duration::from_secs(60);
/// Nobody waits for a page longer than this.
const PATIENCE: Duration = Duration::from_secs(20);

fn userfault() -> OwnedFd {
    // SAFETY: a system call without pointers; the result is checked and owned by nobody else.
    unsafe {
        let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        assert!(descriptor >= 0, "userfaultfd is not permitted: {}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(descriptor as i32)
    }
}

/// A guest's memory with all that is common to the threads.
struct Bench {
    memory: Arc<VmMemory>,
    table: MemoryTable,
    area: Arc<JournalArea>,
    /// The VMM's mapping.
    vmm: usize,
    began: Instant,
    /// What all logs have seen by now.
    seen: Mutex<Seen>,
    /// The logs' threads are to end, and the writers.
    logs_end: AtomicBool,
    writers_end: AtomicBool,
    directory: tempfile::TempDir,
}

impl Bench {
    fn new(rule: HotPages) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("ram");
        let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("a file");
        let size = PAGES * PAGE_BYTES as u64;
        file.set_len(size).expect("a length");
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh shared mapping; it is never unmapped.
        let vmm =
            unsafe { libc::mmap(std::ptr::null_mut(), size as usize, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(vmm, libc::MAP_FAILED);
        // SAFETY: inside the mapping just made.
        unsafe { std::ptr::write_bytes(vmm.cast::<u8>(), 0x5a, size as usize) };
        let memory = VmMemory::new();
        let vmm = vmm.expose_provenance();
        let region = RegionDescriptor { gpa: 0, size, user_addr: vmm as u64, file, file_offset: 0 };
        let table = memory.map(vec![region]).expect("mapped");
        memory.take_userfaultfd(userfault()).expect("protection");
        let area = JournalArea::new(&memory, BUDGET_BYTES);
        area.set_hot_pages(rule);
        let (logs_end, writers_end) = (AtomicBool::new(false), AtomicBool::new(false));
        Bench {
            memory,
            table,
            area,
            vmm,
            began: Instant::now(),
            seen: Mutex::default(),
            logs_end,
            writers_end,
            directory,
        }
    }

    /// Writes to pages as the guest does, and waits where one is protected.
    fn scribble(&self, mut random: Random, written: &AtomicU64) {
        while !self.writers_end.load(Ordering::Relaxed) {
            let at = random.below(PAGES) as usize * PAGE_BYTES + random.below(PAGE_BYTES as u64 / 8) as usize * 8;
            // Not what a log's block begins with.
            let word = random.bits() & !0xff;
            let place = std::ptr::with_exposed_provenance_mut::<u64>(self.vmm + at);
            // SAFETY: inside the VMM's mapping, aligned; everybody else only copies from there.
            unsafe { place.write_volatile(word) };
            written.fetch_add(1, Ordering::Relaxed);
            if random.below(64) == 0 {
                std::thread::yield_now();
            }
        }
    }
}

/// What happened, so that it is known that it did.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    transactions: u64,
    /// Blocks that were in the guest's own pages when they were committed.
    retained: u64,
    /// Blocks that went home as they were committed.
    released: u64,
    /// Blocks were wanted home, since there was too much, or somebody waited for a page.
    pressed: u64,
    waited_for: u64,
    /// Logs began anew for want of memory.
    anew: u64,
}

impl Seen {
    fn is_enough(&self, is_full_at_times: bool) -> bool {
        let is_usual = self.transactions > 100 && self.retained > 100 && self.released > 20 && self.pressed > 0;
        is_usual && (self.anew > 0 || !is_full_at_times)
    }
}

impl std::ops::AddAssign for Seen {
    fn add_assign(&mut self, more: Seen) {
        self.transactions += more.transactions;
        self.retained += more.retained;
        self.released += more.released;
        self.pressed += more.pressed;
        self.waited_for += more.waited_for;
        self.anew += more.anew;
    }
}

/// A block that was committed.
struct Entry {
    position: u32,
    content: Vec<u8>,
}

/// A log, its guest's side.
struct Log<'b> {
    bench: &'b Bench,
    id: LogId,
    random: Random,
    superblock: SuperblockBuilder,
    builder: LogBuilder,
    /// Where each live transaction begins, and its number.
    live: Vec<(u32, u32)>,
    /// The newest versions.
    newest: BTreeMap<u64, Entry>,
    home: BTreeMap<u64, Vec<u8>>,
    begun_anew: u64,
    /// In this step.
    seen: Seen,
}

impl<'b> Log<'b> {
    fn new(bench: &'b Bench, number: u64) -> Self {
        let id = made(bench, &format!("log-{number}"));
        let superblock =
            SuperblockBuilder { maxlen: LOG_BLOCKS, start: 1, sequence: 1, ..SuperblockBuilder::default() }
                .checksum(Checksum::None);
        let (_, format) = Superblock::parse(&superblock.build()).expect("valid");
        let mut log = Log {
            bench,
            id,
            random: Random::of(7, number),
            superblock,
            builder: LogBuilder::new(format, 1, 1),
            live: Vec::new(),
            newest: BTreeMap::new(),
            home: BTreeMap::new(),
            begun_anew: 0,
            seen: Seen::default(),
        };
        log.open();
        log
    }

    fn area(&self) -> &JournalArea {
        &self.bench.area
    }

    /// Opens it, as soon as there is memory.
    fn open(&mut self) {
        self.builder.position = 1;
        (self.live, self.newest) = (Vec::new(), BTreeMap::new());
        let block = SuperblockBuilder { sequence: self.builder.sequence, ..self.superblock.clone() }.build();
        loop {
            match self.area().superblock_written(self.id, &block) {
                Ok(effect) => return assert_eq!(effect, SuperblockEffect::Opened),
                Err(_) => self.area().close(self.id),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// There was no memory for all of a transaction: such a log goes on at its own place, which is not looked at here.
    fn begin_anew(&mut self) {
        if self.random.below(2) == 0 {
            self.area().close(self.id);
        } else {
            self.area().forget_log(self.id);
            self.begun_anew += 1;
            self.id = made(self.bench, &format!("log-{}-{}", self.id.0, self.begun_anew));
        }
        self.builder.sequence += 10;
        self.seen.anew += 1;
        self.open();
    }

    fn run(mut self) -> LogId {
        while !self.bench.logs_end.load(Ordering::Relaxed) {
            match self.random.below(8) {
                0..4 => self.commit(),
                4 => self.write_home(),
                5 => self.guest_writes_as_host(),
                _ => self.relieve(),
            }
            self.compare();
            *self.bench.seen.lock().expect("no panic under this lock") += std::mem::take(&mut self.seen);
        }
        self.id
    }

    /// Commits some of the pages of this turn, which others may be committing at this moment.
    fn commit(&mut self) {
        let turn = self.bench.began.elapsed().as_micros() as u64 / TURN.as_micros() as u64;
        let mut turns = Random::of(turn, 0);
        let (first, count) = (turns.below(PAGES), 1 + turns.below(16));
        let mut pages: Vec<u64> = (first..first + count).map(|page| page % PAGES).collect();
        pages.rotate_left(self.random.below(count) as usize);
        if self.free_blocks() < pages.len() as u32 + 8 {
            self.move_tail();
        }
        let blocks = pages.iter().map(|page| (*page + 1, vec![1; PAGE_BYTES])).collect();
        let begins = (self.builder.position, self.builder.sequence);
        let (mut writes, mut positions) = (Vec::new(), Vec::new());
        let mut next = pages.iter();
        self.builder.transaction(&Transaction { blocks, ..Transaction::default() }, &mut |position, block| {
            let content = if jbd2::peek(block).is_some() {
                Content::Bytes(block.to_vec())
            } else {
                let page = *next.next().expect("a page a block");
                positions.push((position, page));
                Content::Page(self.bench.memory.page(PageId(page as u32)).expect("a page"))
            };
            writes.push(LogWrite { position, content });
        });
        let outcome = self.area().hold(self.id, &writes);
        if outcome.committed != 1 {
            assert!(!outcome.no_memory.is_empty(), "a whole transaction was not accepted: {outcome:?}");
            return self.begin_anew();
        }
        // From here on it does not change.
        self.seen.transactions += 1;
        self.live.push(begins);
        for (position, page) in positions {
            let (location, content) = self.held(position);
            assert!(location.is_held(), "log block {position} was committed a moment ago, and is {location:?}");
            self.seen.retained += u64::from(matches!(location, Location::Guest(_)));
            self.newest.insert(page + 1, Entry { position, content });
        }
    }

    fn held(&self, position: u32) -> (Location, Vec<u8>) {
        let mut content = vec![0; PAGE_BYTES];
        let location = self.area().look(self.id, |held| {
            held.read_held(position, &mut content);
            held.location(position)
        });
        (location.expect("there"), content)
    }

    fn is_home(&self, block: u64) -> bool {
        self.held(self.newest[&block].position).0 == Location::Home
    }

    /// All of what counts is as it was when it was committed.
    fn compare(&self) {
        for (block, entry) in &self.newest {
            let (location, content) = self.held(entry.position);
            let is_same = match location {
                Location::Home => self.home[block] == entry.content,
                _ => location.is_held() && content == entry.content,
            };
            assert!(is_same, "{:?}: log block {}: {location:?} is not what was committed", self.id, entry.position);
        }
    }

    fn some_block(&mut self) -> Option<u64> {
        let count = self.newest.len() as u64;
        let which = self.random.below(count.max(1)) as usize;
        self.newest.keys().nth(which).copied()
    }

    /// The guest writes a page home as it is now.
    fn write_home(&mut self) {
        let Some(block) = self.some_block() else { return };
        let page = self.bench.memory.page(PageId(block as u32 - 1)).expect("a page");
        let over = Over::Blocks { blocks: &[block], durable: None, has_waited: false };
        match self.area().home_write_begins(self.id, block..block + 1, &[Some(page)], &over) {
            HomeWrite::Go { operation, replaced, .. } => {
                let source = replaced.into_iter().next().map_or(Source::Given, |(_, source)| source);
                let written = match source {
                    Source::Given => read(&page),
                    Source::Held(slice) => read(&slice),
                    Source::Bytes(bytes) => bytes.to_vec(),
                };
                std::thread::yield_now();
                let was_home = self.is_home(block);
                self.area().home_write_ended(self.id, operation, true);
                self.home.insert(block, written);
                self.seen.released += u64::from(!was_home && self.is_home(block));
            }
            HomeWrite::Restore(blocks) => {
                for block in blocks {
                    // Where there is no memory it would go to the log's own place.
                    let _ = self.area().restore(self.id, block, &self.home[&block]);
                }
            }
            HomeWrite::Wait => panic!("nobody else writes home"),
        }
    }

    /// A device is about to write to a page, past the protection, and gives up.
    fn guest_writes_as_host(&mut self) {
        let page = PageId(self.random.below(PAGES) as u32);
        let _ = self.bench.table.prepare_write(&self.bench.memory.page(page).expect("a page"));
    }

    /// Gives memory back, if that is wanted of this log.
    fn relieve(&mut self) {
        if let Some(pressure) = self.area().pressure_on(self.id) {
            self.seen.pressed += u64::from(pressure == Pressure::Copies);
            self.seen.waited_for += u64::from(pressure == Pressure::Pages);
            self.host_writes(16, pressure == Pressure::Copies);
        }
        if self.random.below(16) == 0 {
            self.host_writes(4, false);
        }
    }

    fn host_writes(&mut self, count: usize, copied_only: bool) {
        for (operation, write) in self.area().host_writes(self.id, count, copied_only) {
            let written = match &write.source {
                Source::Held(slice) => read(slice),
                Source::Bytes(bytes) => bytes.to_vec(),
                Source::Given => panic!("the host has what it writes"),
            };
            self.area().home_write_ended(self.id, operation, true);
            self.home.insert(write.block, written);
            self.seen.released += u64::from(self.is_home(write.block));
        }
    }

    fn free_blocks(&self) -> u32 {
        let tail = self.live.first().map_or(self.builder.position, |(position, _)| *position);
        self.builder.format.log_blocks() - self.builder.format.distance(tail, self.builder.position)
    }

    /// The guest's log begins with one of its later transactions, or where it ends.
    fn move_tail(&mut self) {
        let count = self.live.len() - self.random.below(self.live.len() as u64 / 2 + 1) as usize;
        let end = (self.builder.position, self.builder.sequence);
        let (start, sequence) = self.live.get(count).copied().unwrap_or(end);
        let block = SuperblockBuilder { start, sequence, ..self.superblock.clone() }.build();
        let effect = self.area().superblock_written(self.id, &block);
        assert!(matches!(effect, Ok(SuperblockEffect::GoesOn)), "{effect:?}");
        let format = self.builder.format;
        let tail = self.live[0].0;
        let passed = format.distance(tail, start);
        let is_all = count == self.live.len();
        self.newest.retain(|_, entry| !is_all && format.distance(tail, entry.position) >= passed);
        self.live.drain(..count);
    }
}

/// A log, as soon as there is memory.
fn made(bench: &Bench, name: &str) -> LogId {
    loop {
        match bench.area.make_log(bench.directory.path(), name, SHAPE, Holding::Retain, Vec::new()) {
            Ok(id) => return id,
            // What there was room for.
            Err(_) => drop(std::fs::remove_file(bench.directory.path().join(format!("{name}.table")))),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn read(slice: &guest_memory::MemorySlice) -> Vec<u8> {
    let mut content = vec![0; PAGE_BYTES];
    slice.copy_out(0, &mut content);
    content
}

/// All at once for a while: with memory, with protecting that takes long, with none now and then. Gives what was seen.
fn run(rule: HotPages, delay: Duration, is_full_at_times: bool) -> Seen {
    let bench = Bench::new(rule);
    let written: Vec<AtomicU64> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    simulated_delay::set(delay);
    let ids = std::thread::scope(|scope| {
        for (writer, written) in written.iter().enumerate() {
            let bench = &bench;
            scope.spawn(move || bench.scribble(Random::of(3, writer as u64), written));
        }
        let logs: Vec<_> =
            (0..LOGS).map(|number| Log::new(&bench, number)).map(|log| scope.spawn(move || log.run())).collect();
        let seen = || *bench.seen.lock().expect("no panic under this lock");
        let is_to_go_on = || !seen().is_enough(is_full_at_times) && bench.began.elapsed() < PHASE_MAX;
        while bench.began.elapsed() < PHASE || is_to_go_on() {
            simulated_room::set_full_for_all(is_full_at_times);
            std::thread::sleep(Duration::from_millis(3));
            simulated_room::set_full_for_all(false);
            std::thread::sleep(Duration::from_millis(20));
        }
        bench.logs_end.store(true, Ordering::Relaxed);
        let ids: Vec<LogId> = logs.into_iter().map(|log| log.join().expect("no panic")).collect();
        // There is memory, and nothing else happens: whoever waits for a page gets it.
        let before: Vec<u64> = written.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let since = Instant::now();
        for (count, before) in written.iter().zip(before) {
            while count.load(Ordering::Relaxed) < before + 1000 {
                assert!(since.elapsed() < PATIENCE, "a writer waits for ever");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        bench.writers_end.store(true, Ordering::Relaxed);
        ids
    });
    let seen = *bench.seen.lock().expect("no panic under this lock");
    bench.area.check().expect("the books are right");
    let mut retained = HashSet::new();
    assert_eq!(bench.area.log_count(), ids.len());
    for id in ids {
        let looked = bench.area.look(id, |held| {
            for position in 0..LOG_BLOCKS {
                if let Location::Guest(page) = held.location(position) {
                    assert!(retained.insert(page), "page {page:?} is in two logs");
                }
            }
        });
        looked.expect("there");
    }
    for page in (0..PAGES).map(|page| PageId(page as u32)) {
        assert_eq!(bench.memory.is_retained(page), retained.contains(&page), "page {page:?} is in a log that has it");
    }
    simulated_delay::set(Duration::ZERO);
    println!("{rule:?}, delay {delay:?}, full at times {is_full_at_times}: {seen:?}");
    seen
}

#[test]
fn logs_side_by_side_hold_what_was_committed() {
    // Whoever waits for a page would wait for ever if a thread ended that is to answer.
    std::panic::set_hook(Box::new(|panic| {
        // What is printed in a test is only shown when that has ended.
        let _ = writeln!(std::io::stderr(), "{panic}");
        std::process::exit(101);
    }));
    let mut waited_for = 0;
    // By one rule as many as can be are retained; by the other longer runs only, and with one that is written to others are copied.
    let phases = [(0, false), (100, false), (0, true), (100, true)].map(|(delay, full)| (HotPages::Never, delay, full));
    let more = [(0, false), (100, true)].map(|(delay, full)| (HotPages::Lone, delay, full));
    for (rule, delay, is_full_at_times) in phases.into_iter().chain(more) {
        let seen = run(rule, Duration::from_micros(delay), is_full_at_times);
        assert!(seen.is_enough(is_full_at_times), "{seen:?}");
        assert_eq!(seen.anew > 0, is_full_at_times, "{seen:?}");
        waited_for += seen.waited_for;
    }
    assert!(waited_for > 0, "somebody waited for a page");
}
