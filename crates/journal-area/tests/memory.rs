//! How much memory the tables of a log of 128 MiB take: counted, at several fills and while a guest writes far more than the log is long.
//! Counts are what they are on every machine.

use guest_memory::{HostFile, PAGE_BYTES, PageId, RegionDescriptor, VmMemory, simulated_room};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Superblock};
use journal_area::{
    Content, FoundLog, Holding, HomeWrite, HotPages, JournalArea, Location, LogId, LogShape, LogWrite, Over, Source,
    SuperblockEffect,
};
use std::sync::Arc;

const BLOCK: usize = PAGE_BYTES;
const LOG_BLOCKS: u32 = 32_768;
/// A guest of 160 MiB.
const PAGES: u32 = 40_960;
/// A file system of 2 TiB: its block numbers take four bytes.
const HOME_BLOCKS: u64 = 1 << 29;
/// What is there as soon as a log is open, at most: the table's header and map, the first pieces of its words, one piece of each other
/// table.
const FIXED_BYTES: u64 = 36_200;

/// Where a transaction begins, its number, and what it commits: home blocks in their pages.
struct Live {
    begins: (u32, u32),
    blocks: Vec<(u64, PageId)>,
}

struct Rig {
    memory: Arc<VmMemory>,
    area: Arc<JournalArea>,
    log: LogId,
    superblock: SuperblockBuilder,
    builder: LogBuilder,
    live: Vec<Live>,
    next: u64,
    /// Pages from one block of a transaction to the next.
    page_stride: u64,
    directory: tempfile::TempDir,
}

/// A guest's memory, of zeros.
fn memory() -> Arc<VmMemory> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("ram");
    let ram = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("a file");
    let size = u64::from(PAGES) * BLOCK as u64;
    ram.set_len(size).expect("a length");
    let memory = VmMemory::new();
    let region = RegionDescriptor { gpa: 0, size, user_addr: 0x7000_0000, file: ram, file_offset: 0 };
    memory.map(vec![region]).expect("mapped");
    memory.simulate_protection();
    memory
}

impl Rig {
    fn new() -> Self {
        Self::with_home_blocks(HOME_BLOCKS)
    }

    /// The log of a file system of so many blocks.
    fn with_home_blocks(home_blocks: u64) -> Self {
        Self::with_budget(home_blocks, u64::MAX)
    }

    fn with_budget(home_blocks: u64, budget_bytes: u64) -> Self {
        // Where files have just the memory that they were given.
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let memory = memory();
        let area = JournalArea::new(&memory, budget_bytes);
        // They are all zeros.
        area.set_hot_pages(HotPages::Never);
        let shape = LogShape { block_bytes: BLOCK as u32, log_blocks: LOG_BLOCKS, home_blocks };
        let log = area.make_log(directory.path(), "log", shape, Holding::Retain, Vec::new()).expect("a log");
        let superblock =
            SuperblockBuilder { maxlen: LOG_BLOCKS, start: 1, sequence: 1, ..SuperblockBuilder::default() }
                .checksum(Checksum::None);
        let raw = superblock.build();
        let (_, format) = Superblock::parse(&raw).expect("valid");
        assert_eq!(area.superblock_written(log, &raw).expect("held"), SuperblockEffect::Opened);
        let builder = LogBuilder::new(format, 1, 1);
        Rig { memory, area, log, superblock, builder, live: Vec::new(), next: 0, page_stride: 1, directory }
    }

    /// Commits `count` blocks that were never committed before.
    fn commit(&mut self, count: u32) {
        let writes = self.writes(count);
        self.hold(&writes);
    }

    fn hold(&mut self, writes: &[LogWrite]) {
        let committed: u32 = writes.chunks(512).map(|batch| self.area.hold(self.log, batch).committed).sum();
        assert_eq!(committed, 1);
    }

    /// The log writes of such a commit.
    fn writes(&mut self, count: u32) -> Vec<LogWrite> {
        let blocks: Vec<(u64, PageId)> = (self.next..self.next + u64::from(count))
            // Far apart, as files are, and at the end of the file system.
            .map(|number| {
                (HOME_BLOCKS - 1 - number * 11, PageId((number * self.page_stride % u64::from(PAGES)) as u32))
            })
            .collect();
        self.next += u64::from(count);
        self.writes_of(blocks)
    }

    /// The log writes of a commit of these blocks.
    fn writes_of(&mut self, blocks: Vec<(u64, PageId)>) -> Vec<LogWrite> {
        self.live.push(Live { begins: (self.builder.position, self.builder.sequence), blocks: blocks.clone() });
        let transaction = Transaction {
            blocks: blocks.iter().map(|(block, _)| (*block, vec![0; BLOCK])).collect(),
            ..Transaction::default()
        };
        let mut pages = blocks.iter().map(|(_, page)| *page);
        let mut writes = Vec::new();
        let memory = Arc::clone(&self.memory);
        self.builder.transaction(&transaction, &mut |position, block| {
            let content = if jbd2::peek(block).is_some() {
                Content::Bytes(block.to_vec())
            } else {
                Content::Page(memory.page(pages.next().expect("a page a block")).expect("a page"))
            };
            writes.push(LogWrite { position, content });
        });
        writes
    }

    /// The guest writes a block home.
    fn write_home(&self, (block, page): (u64, PageId)) {
        let payload = [self.memory.page(page)];
        let HomeWrite::Go { operation, replaced, .. } =
            self.area.home_write_begins(self.log, block..block + 1, &payload, &Over::Unknown)
        else {
            panic!("nothing is in the way")
        };
        assert!(!replaced.iter().any(|(_, source)| matches!(source, Source::Given)));
        self.area.home_write_ended(self.log, operation, true);
    }

    /// Everything of the oldest transaction goes home, and the guest's tail passes it.
    fn checkpoint(&mut self) {
        for home in self.live.remove(0).blocks {
            self.write_home(home);
        }
        let next = (self.builder.position, self.builder.sequence);
        let (start, sequence) = self.live.first().map_or(next, |live| live.begins);
        let block = SuperblockBuilder { start, sequence, ..self.superblock.clone() }.build();
        assert_eq!(self.area.superblock_written(self.log, &block).expect("held"), SuperblockEffect::GoesOn);
    }

    /// The log as one finds it who comes after this process.
    fn found(&self) -> FoundLog {
        let name = self.directory.path().join("log");
        let path = self.directory.path().join("ram");
        let ram = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).expect("a file");
        ram.set_len(u64::from(PAGES) * BLOCK as u64).expect("a length");
        let ram = HostFile::from_opened(ram, &path).expect("mapped");
        FoundLog::open(&name.with_extension("table"), &name.with_extension("pool"), vec![(0, ram)])
            .expect("as it was left")
    }

    fn tables_bytes_max(&self) -> u64 {
        self.area.counters(self.log).area_bytes_max
    }

    /// Bytes that the file with the table really has.
    fn table_file_bytes(&self) -> u64 {
        let path = self.directory.path().join("log.table");
        std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).expect("a file")) * 512
    }
}

/// Tables and blocks held when so many percent of the log are filled.
fn at_fill(percent: u32) -> (u64, u64) {
    let mut rig = Rig::new();
    let mut left = LOG_BLOCKS * percent / 100;
    while left > 0 {
        // A transaction takes a quarter of a log at most, and a little more than its blocks.
        let part = left.min(LOG_BLOCKS / 5);
        let count = part - part.div_ceil(200) - 2;
        rig.commit(count);
        left -= part;
    }
    rig.area.check().expect("the books are right");
    let counters = rig.area.counters(rig.log);
    // Control blocks are copied, and nothing else.
    assert!(counters.pages_protected * 100 > counters.blocks_retained_max * 98, "in the guest's own pages");
    (counters.area_bytes_max, counters.blocks_retained_max)
}

#[test]
fn tables_grow_with_what_is_held() {
    for (percent, limit) in [(1, 112.0), (10, 24.0), (50, 16.0), (100, 14.0)] {
        let (bytes, blocks) = at_fill(percent);
        let a_block = bytes as f64 / blocks as f64;
        println!("{percent:3} % of the log: {bytes} bytes of tables, {blocks} blocks held, {a_block:.1} bytes a block");
        assert!(a_block <= limit, "{a_block} bytes a block at {percent} %");
        assert!(bytes <= FIXED_BYTES + 14 * blocks, "{bytes} bytes for {blocks} blocks at {percent} %");
    }
}

#[test]
fn tables_go_with_the_live_part_of_the_log() {
    let mut rig = Rig::new();
    let opened = rig.tables_bytes_max();
    // Six times round the log, never more than a tenth of it live: tables as for a tenth.
    for round in 0..120 {
        rig.commit(1600);
        if rig.live.len() > 1 {
            rig.checkpoint();
        }
        if round % 30 == 0 {
            rig.area.check().expect("the books are right");
        }
        assert!(rig.table_file_bytes() <= 11 * 4096, "{} bytes of the table in round {round}", rig.table_file_bytes());
    }
    let (bytes, held) = (rig.tables_bytes_max(), rig.area.counters(rig.log).blocks_retained_max);
    println!("streaming: {bytes} bytes of tables at most, {held} blocks held at most");
    assert!(bytes <= FIXED_BYTES + 20 * held, "{bytes} bytes for {held} blocks");
    while !rig.live.is_empty() {
        rig.checkpoint();
    }
    rig.area.check().expect("the books are right");
    assert!(rig.table_file_bytes() <= 6 * 4096, "{} bytes of an empty log's table", rig.table_file_bytes());
    rig.area.close(rig.log);
    assert_eq!(rig.table_file_bytes(), 4096, "the header");
    assert!(opened < FIXED_BYTES);
}

/// Pages without neighbours are copied for speed alone, up to a bound over all commits: what is beyond it is retained, until copies have
/// gone home.
#[test]
fn copies_for_speed_alone_are_bounded() {
    const COPIES_MAX: u64 = (32 << 20) / BLOCK as u64;
    let mut rig = Rig::new();
    rig.area.set_hot_pages(HotPages::Lone);
    rig.page_stride = 2;
    for page in (0..PAGES).step_by(2) {
        rig.memory.simulated_guest_write(PageId(page), BLOCK - 8, &[1; 8]);
    }
    let mut committed = 0;
    for _ in 0..5 {
        rig.commit(2000);
        committed += 2000;
        let counters = rig.area.counters(rig.log);
        assert_eq!(counters.pages_copied + counters.pages_protected, committed);
        assert!(counters.pages_copied <= COPIES_MAX, "{} pages are copied", counters.pages_copied);
    }
    let full = rig.area.counters(rig.log);
    assert!(full.pages_copied > COPIES_MAX - 64 && full.pages_protected > 1000, "{full:?}");
    rig.checkpoint();
    rig.commit(1900);
    let counters = rig.area.counters(rig.log);
    assert_eq!(counters.pages_protected, full.pages_protected, "there is room for copies again");
    rig.area.check().expect("the books are right");
}

/// What was copied and has gone home leaves memory for what is copied next; it goes back in time, and at once where the host wants it: nobody
/// writes anything home for it.
#[test]
fn memory_of_copies_is_kept_and_goes_before_anything_has_to_go_home() {
    const MIB: u64 = 1 << 20;
    let mut rig = Rig::with_budget(HOME_BLOCKS, 100 * MIB);
    rig.area.set_hot_pages(HotPages::Lone);
    rig.page_stride = 2;
    for page in (0..PAGES).step_by(2) {
        rig.memory.simulated_guest_write(PageId(page), BLOCK - 8, &[1; 8]);
    }
    let woken = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    rig.area.set_waker(Box::new(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }));
    let pool_bytes = |rig: &Rig| {
        let file = std::fs::metadata(rig.directory.path().join("log.pool")).expect("the pool");
        let allocated = std::os::unix::fs::MetadataExt::blocks(&file) * 512;
        assert_eq!(allocated, rig.area.memory().copied_bytes);
        allocated
    };
    rig.commit(4000);
    let full = pool_bytes(&rig);
    assert!(full > 15 * MIB, "{full} bytes");
    rig.commit(1000);
    rig.checkpoint();
    let kept = pool_bytes(&rig);
    assert!(kept >= full, "{kept} bytes");
    // As much may be copied as if it were not there.
    let protected = rig.area.counters(rig.log).pages_protected;
    rig.commit(4000);
    assert_eq!(rig.area.counters(rig.log).pages_protected, protected);
    assert_eq!(pool_bytes(&rig), kept);
    rig.checkpoint();
    rig.checkpoint();
    rig.commit(100);
    rig.area.rest(rig.log);
    assert!(pool_bytes(&rig) > kept / 2, "not at once");
    // The host wants it.
    rig.area.set_room(Some(4 * MIB));
    assert!(pool_bytes(&rig) < 2 * MIB, "{} bytes", pool_bytes(&rig));
    assert_eq!(woken.load(std::sync::atomic::Ordering::Relaxed), 0, "nothing has to go home");
    rig.area.set_room(None);
    rig.commit(4000);
    rig.checkpoint();
    rig.checkpoint();
    assert!(pool_bytes(&rig) > 15 * MIB);
    (0..60).for_each(|_| rig.area.rest(rig.log));
    assert!(pool_bytes(&rig) < 2 * MIB, "{} bytes", pool_bytes(&rig));
    // And so does what the budget has no room for beside it.
    rig.commit(4000);
    rig.checkpoint();
    assert!(rig.area.memory().held_bytes > 15 * MIB);
    assert!(rig.area.reserve(96 * MIB));
    assert!(pool_bytes(&rig) < 2 * MIB, "{} bytes", pool_bytes(&rig));
    rig.area.check().expect("the books are right");
}

/// Many small files in a file system of 2 GiB, as with postmark: nearly all of the log is live, most of it is superseded, what is old has gone
/// home, and a third is held.
#[test]
fn tables_of_a_log_of_which_a_third_is_held() {
    let mut rig = Rig::with_home_blocks(1 << 19);
    let mut is_home = 0;
    for round in 0..20u64 {
        // What is committed again and again, and files.
        let again = (0..1120).map(|number| (1000 + (round * 1120 + number) % 4000 * 3, number));
        let files = (0..500).map(|number| (100_000 + (round * 500 + number) * 11, 1120 + number));
        let page = |number: u64| PageId((round * 1620 + number) as u32);
        let blocks: Vec<(u64, PageId)> = again.chain(files).map(|(block, number)| (block, page(number))).collect();
        let writes = rig.writes_of(blocks);
        rig.hold(&writes);
        while is_home + 12 <= round as usize {
            for index in 1120..rig.live[is_home].blocks.len() {
                let file = rig.live[is_home].blocks[index];
                rig.write_home(file);
            }
            is_home += 1;
        }
    }
    rig.area.check().expect("the books are right");
    let (counters, bytes) = (rig.area.counters(rig.log), rig.tables_bytes_max());
    println!(
        "as with postmark: {bytes} bytes of tables, {} blocks held, {} superseded",
        counters.blocks_retained_now, counters.released_superseded
    );
    assert!((10_000..11_000).contains(&counters.blocks_retained_now), "a third");
    assert!(counters.released_superseded > u64::from(LOG_BLOCKS / 2), "most");
    assert!(bytes <= 180_000, "{bytes} bytes");
    // Pieces of the table in which little is held are holes: whoever finds it, or goes on with it, knows the same.
    assert!(rig.table_file_bytes() <= 26 * 4096, "{} bytes of the table", rig.table_file_bytes());
    let locations = |area: &JournalArea, log: LogId| -> Vec<Location> {
        (0..LOG_BLOCKS).map(|position| area.look(log, |held| held.location(position)).expect("there")).collect()
    };
    let before = locations(&rig.area, rig.log);
    let found = rig.found();
    assert!((0..LOG_BLOCKS).all(|position| found.log().location(position) == before[position as usize]));
    let memory = memory();
    let next = JournalArea::new(&memory, u64::MAX);
    let shape = LogShape { block_bytes: BLOCK as u32, log_blocks: LOG_BLOCKS, home_blocks: 1 << 19 };
    let log = next.adopt_log(rig.directory.path(), "log", shape, Holding::Retain, Vec::new()).expect("goes on");
    next.check().expect("the books are right");
    assert!(locations(&next, log) == before);
    let owed =
        |area: &JournalArea, log: LogId| (area.owed(log).blocks, area.versions_owed(log), area.versions_at_home(log));
    assert!(owed(&next, log) == owed(&rig.area, rig.log));
}

/// With a tmpfs that somebody else fills, a log goes on: what cannot be named goes to its own place on storage, and is known to be there.
#[test]
fn what_the_table_has_no_room_for_goes_to_storage() {
    let mut rig = Rig::new();
    rig.commit(500);
    simulated_room::fail_reservations(0..u64::MAX);
    let writes = rig.writes(2500);
    let mut elsewhere = Vec::new();
    for batch in writes.chunks(512) {
        let outcome = rig.area.hold(rig.log, batch);
        assert_eq!((outcome.committed, &outcome.no_room[..]), (0, &[][..]));
        elsewhere.extend(outcome.no_memory.iter().map(|index| batch[*index].position));
    }
    assert_eq!(elsewhere.len(), writes.iter().filter(|write| write.position >= 2048).count(), "{elsewhere:?}");
    assert!(elsewhere.iter().all(|position| *position >= 2048), "there is room for two pieces");
    for position in &elsewhere {
        assert_eq!(rig.area.counters(rig.log).transactions, 1, "it is not complete");
        rig.area.stored(rig.log, *position);
    }
    rig.area.check().expect("the books are right");
    let found = rig.found();
    for write in &writes {
        let location = found.log().location(write.position);
        assert_eq!(location == Location::Storage, elsewhere.contains(&write.position), "{location:?}");
    }
    simulated_room::fail_reservations(0..0);
    // Its commit block may be in its place, too, and nobody here reads there: whoever recovers does. With room the log begins anew.
    rig.area.close(rig.log);
    rig.area.check().expect("the books are right");
    assert_eq!(rig.table_file_bytes(), 4096, "the header");
}

/// The guest can write its superblock as often as it likes.
#[test]
fn a_superblock_finds_its_room_while_there_is_none() {
    let mut rig = Rig::new();
    for _ in 0..5 {
        rig.commit(100);
    }
    simulated_room::fail_reservations(0..u64::MAX);
    for errno in 1..5 {
        // Other blocks, for which the table has room, take all that the pool has, and what the tail has given back since.
        let writes: Vec<LogWrite> = (600..800)
            .map(|position| LogWrite {
                position: position + 200 * errno as u32,
                content: Content::Bytes(vec![1; BLOCK]),
            })
            .collect();
        assert!(!rig.area.hold(rig.log, &writes).no_memory.is_empty(), "the pool is full");
        rig.superblock.errno = errno;
        rig.checkpoint();
        let held = rig.area.look(rig.log, |held| {
            let mut block = vec![0; BLOCK];
            held.read_held(0, &mut block).then_some(block)
        });
        let held = held.expect("it is there").expect("it is held");
        assert_eq!(Superblock::decode(&held).expect("valid").errno, errno);
    }
    simulated_room::fail_reservations(0..0);
    rig.area.check().expect("the books are right");
}

/// A guest has the thread of another disk look for its journals when it likes.
#[test]
fn a_log_that_is_forgotten_while_it_is_read_holds_nothing_from_then_on() {
    let mut rig = Rig::new();
    rig.commit(100);
    let held = rig.area.log_now(rig.log).expect("it is there");
    let is_held = |position| held.read_held(position, &mut [0; BLOCK]);
    assert!((1..LOG_BLOCKS).any(is_held) && held.tail().is_some());
    rig.area.forget_log(rig.log);
    assert!(!(0..LOG_BLOCKS).any(is_held) && held.tail().is_none());
    assert!(rig.area.log_now(rig.log).is_none() && rig.area.look(rig.log, |_| ()).is_none());
}
