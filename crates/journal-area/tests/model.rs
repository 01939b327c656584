//! The area against a complete journal: a simulated guest commits, revokes, writes home, scribbles and moves its tail; at
//! every step, what recovery makes of the held log is compared with what the same replay makes of every block the guest
//! ever wrote into its log; and before every store into the area's files, what the next process would make of them if
//! this one were killed there. Now and then it is killed there, whatever it was about, and another one goes on under the guest. This is
//! rule 2 of ARCHITECTURE.md, and with it its rules 1 and 3.

use guest_memory::{
    HostFile, MemorySlice, MemoryTable, PAGE_BYTES, PageId, RegionDescriptor, VmMemory, simulated_kill, simulated_room,
};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Content as LogContent, Features, LogRead, Plan, Superblock};
use journal_area::{
    Content, FoundLog, Holding, HomeWrite, HostWrite, HotPages, JournalArea, LogId, LogShape, LogWrite, NotHome,
    Outside, Over, Past, Pressure, Source, SuperblockEffect,
};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

const BLOCK: usize = PAGE_BYTES;
/// Blocks that a log runs over, from its first one on.
const LOG_BLOCKS: u32 = 55;
/// Where a log begins whose first blocks are in one piece of the tables, and whose last are in the next, the last one.
const OVER_PIECES: u32 = 2000;
const HOME_BLOCKS: u64 = 64;
const PAGES: u32 = 96;
const ABSORBED_MAX: usize = 4;

type Disk = BTreeMap<u64, Arc<[u8]>>;

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
                disk.insert(planned.home(), block.as_slice().into());
                written += 1;
                break;
            }
        }
    }
    written
}

/// What the next process finds: the disk it would make, if the log is open.
fn found(directory: &Path, memory: &VmMemory, disk: &Disk) -> Option<Disk> {
    let ram = vec![(0, HostFile::open(&directory.join("ram")).expect("guest memory"))];
    let log = FoundLog::open(&directory.join("log.table"), &directory.join("log.pool"), ram).expect("a good table");
    if !log.is_open() {
        return None;
    }
    assert!(log.pages().all(|page| memory.simulated_is_protected(page)), "what the table names is protected");
    let mut disk = disk.clone();
    replay(&mut log.log(), &mut disk);
    Some(disk)
}

/// A write on its way home. Storage may read what it writes as late as its end.
struct InFlight {
    operation: usize,
    first: u64,
    /// What it was when the write began.
    content: Vec<Arc<[u8]>>,
    /// What is taken from elsewhere, by index.
    replaced: Vec<(usize, Source)>,
    /// Pages of the guest's that the others are taken from.
    pages: Vec<PageId>,
    is_host: bool,
    /// It is no write: what is in these blocks is nobody's business any more.
    is_discard: bool,
    /// How often each block had been committed when the write began.
    commits: Vec<u64>,
    /// It was newer than what was committed when it began, and no other one to these blocks has been under way with it.
    is_alone: bool,
}

struct Guest {
    memory: Arc<VmMemory>,
    table: MemoryTable,
    area: Arc<JournalArea>,
    rule: HotPages,
    log: LogId,
    superblock: SuperblockBuilder,
    builder: LogBuilder,
    /// The log as a disk would have it.
    complete: HashMap<u32, Vec<u8>>,
    disk: Disk,
    /// The disk as it would be without the host's own home writes.
    guest_disk: Disk,
    /// Blocks that were revoked and not written since: what they hold is nobody's business.
    free: HashSet<u64>,
    /// Blocks that were discarded and not committed since. No journal knows of it, so a replay may bring anything back.
    discarded: HashSet<u64>,
    /// Blocks whose home the guest has written since they were committed last: with that version, or with something else that
    /// no journal knows of.
    written: HashSet<u64>,
    /// Of them those of which the guest was told so last, whether they were or not, and has done nothing with them since.
    told: HashSet<u64>,
    /// How often each block was committed.
    commits: HashMap<u64, u64>,
    /// How often it had been when the guest last wrote it home, and that has ended well.
    ended: HashMap<u64, u64>,
    /// Page that caches each block.
    cache: HashMap<u64, PageId>,
    next_page: u32,
    /// Live transactions: sequence, first position, blocks.
    live: Vec<(u32, u32, Vec<u64>)>,
    in_flight: Vec<InFlight>,
    serial: u32,
    open: bool,
    /// A commit block came before all that it commits.
    is_partial: bool,
    /// There is no memory for another copied page.
    is_full: bool,
    /// At this moment.
    is_full_now: bool,
    holding: Holding,
    /// Before which of its next stores this process dies.
    dies_before: Option<usize>,
    /// What was asked of a process that is dead is asked again.
    is_asking_again: bool,
    /// The guest opens or closes its log: it may be either.
    is_turning: bool,
    directory: tempfile::TempDir,
}

/// What outlives a process that is killed at some moment: its files, and which pages are protected.
struct Left {
    table: Vec<u8>,
    pool: Vec<u8>,
    protected: Vec<PageId>,
}

impl Left {
    fn take(directory: &Path, memory: &VmMemory) -> Self {
        let file = |name: &str| std::fs::read(directory.join(name)).expect("it is there");
        let protected = (0..PAGES).map(PageId).filter(|page| memory.simulated_is_protected(*page)).collect();
        Left { table: file("log.table"), pool: file("log.pool"), protected }
    }
}

fn shape(first: u32) -> LogShape {
    LogShape { block_bytes: BLOCK as u32, log_blocks: first + LOG_BLOCKS, home_blocks: HOME_BLOCKS }
}

/// The guest's memory as a process maps it.
fn map(directory: &Path) -> (Arc<VmMemory>, MemoryTable) {
    let ram = std::fs::OpenOptions::new().read(true).write(true).open(directory.join("ram")).expect("a file");
    let memory = VmMemory::new();
    let table = memory
        .map(vec![RegionDescriptor {
            gpa: 0,
            size: u64::from(PAGES) * BLOCK as u64,
            user_addr: 0x7000_0000,
            file: ram,
            file_offset: 0,
        }])
        .expect("mapped");
    memory.simulate_protection();
    (memory, table)
}

impl Guest {
    fn new(checksum: Checksum, holding: Holding, first: u32, rule: HotPages) -> Self {
        // As another case may have left it that failed.
        simulated_room::set_full(false);
        simulated_kill::set_look(None);
        let directory = tempfile::tempdir().expect("a temporary directory");
        let ram = std::fs::File::create(directory.path().join("ram")).expect("a file");
        ram.set_len(u64::from(PAGES) * BLOCK as u64).expect("a length");
        let (memory, table) = map(directory.path());
        let area = JournalArea::new(&memory, u64::MAX);
        area.set_hot_pages(rule);
        let log = area.make_log(directory.path(), "log", shape(first), holding, Vec::new()).expect("a log");
        let superblock = SuperblockBuilder {
            maxlen: first + LOG_BLOCKS,
            first,
            uuid: [7; 16],
            features: Features { compat: 0, incompat: Features::REVOKE | Features::WIDE, ro_compat: 0 },
            sequence: u32::MAX - 5,
            ..SuperblockBuilder::default()
        }
        .checksum(checksum);
        let (_, format) = Superblock::parse(&superblock.build()).expect("valid");
        let builder = LogBuilder::new(format, first, u32::MAX - 5);
        let disk: Disk = (0..HOME_BLOCKS).map(|block| (block, vec![block as u8; BLOCK].into())).collect();
        Guest {
            memory,
            table,
            area,
            rule,
            log,
            superblock,
            builder,
            complete: HashMap::new(),
            guest_disk: disk.clone(),
            disk,
            free: HashSet::new(),
            discarded: HashSet::new(),
            written: HashSet::new(),
            told: HashSet::new(),
            commits: HashMap::new(),
            ended: HashMap::new(),
            cache: HashMap::new(),
            next_page: 0,
            live: Vec::new(),
            in_flight: Vec::new(),
            serial: 0,
            open: false,
            is_partial: false,
            is_full: false,
            is_full_now: false,
            holding,
            dies_before: None,
            is_asking_again: false,
            is_turning: false,
            directory,
        }
    }

    /// This process is killed, and another one goes on with what is left: as it is, or as it was at an earlier moment.
    fn die(&mut self, left: Option<Left>) {
        let directory = self.directory.path().to_owned();
        let left = left.unwrap_or_else(|| Left::take(&directory, &self.memory));
        // What is under way in the kernel ends first, unseen. The guest's own was not answered, and is asked for again.
        let in_flight = std::mem::take(&mut self.in_flight);
        for write in &in_flight {
            self.lands(write, true);
        }
        std::fs::write(directory.join("log.table"), &left.table).expect("written");
        std::fs::write(directory.join("log.pool"), &left.pool).expect("written");
        (self.memory, self.table) = map(&directory);
        self.memory.protect(&left.protected).expect("simulated");
        self.area = JournalArea::new(&self.memory, u64::MAX);
        self.area.set_hot_pages(self.rule);
        let adopted = self.area.adopt_log(&directory, "log", shape(self.superblock.first), self.holding, Vec::new());
        self.log = adopted.expect("what was left is understood");
        assert!(self.is_turning || self.area.is_open(self.log) == self.open);
        // Where there is no room the device waits with what it was asked for.
        simulated_room::set_full(false);
        // The step that it died in is neither done nor not.
        self.is_asking_again = true;
        for write in in_flight {
            self.ask_again(&write);
        }
        self.is_asking_again = false;
        simulated_room::set_full(self.is_full_now);
    }

    /// A write of the guest's that was under way when its process died.
    fn ask_again(&mut self, write: &InFlight) {
        let (first, count) = (write.first, write.content.len() as u64);
        match (write.is_host, write.is_discard) {
            (true, _) => {}
            (false, true) => self.begin_discard(first, count),
            // One from before a commit is older than that.
            (false, false) => self.begin_home_write_over(first, count, write.commits == self.commits_of(first, count)),
        }
    }

    /// Makes a step, and recovers what is left if this process is killed before any of its stores. It has to be what a
    /// complete journal makes before the step or after it. If this process is to die in it, the next one makes it once more: nobody
    /// was answered.
    fn step<T>(&mut self, mut step: impl FnMut(&mut Self) -> T) -> T {
        loop {
            let complete = self.dies_before.map(|_| self.complete.clone());
            let (result, left) = self.step_once(&mut step);
            if left.is_none() {
                return result;
            }
            self.complete = complete.expect("it was to die");
            self.die(left);
        }
    }

    /// The same once; also what was left, if this process died in it.
    fn step_once<T>(&mut self, step: impl FnOnce(&mut Self) -> T) -> (T, Option<Left>) {
        let taken = Rc::new(RefCell::new(Vec::new()));
        let death = Rc::new(RefCell::new((self.dies_before, None)));
        let (sink, dead, directory) = (Rc::clone(&taken), Rc::clone(&death), self.directory.path().to_owned());
        let (memory, on) = (Arc::clone(&self.memory), self.disk.clone());
        let complete = |guest: &Self| -> Option<Disk> {
            let mut disk = guest.guest_disk.clone();
            let raw = guest.complete.get(&0)?;
            let is_open = Superblock::decode(raw).is_ok_and(|superblock| !superblock.is_empty());
            is_open.then(|| {
                replay(&mut CompleteLog(&guest.complete), &mut disk);
                disk
            })
        };
        let before = complete(self);
        simulated_kill::set_look(Some(Box::new(move || {
            sink.borrow_mut().push(found(&directory, &memory, &on));
            let mut death = dead.borrow_mut();
            match death.0 {
                Some(0) => {
                    death.1 = Some(Left::take(&directory, &memory));
                    death.0 = None;
                }
                Some(stores) => death.0 = Some(stores - 1),
                None => {}
            }
        })));
        let result = step(self);
        simulated_kill::set_look(None);
        let after = complete(self);
        for left in taken.take() {
            let is_one = [&before, &after].into_iter().any(|whole| match (&left, whole) {
                (Some(left), Some(whole)) => self.differing(left, whole).is_none(),
                (left, whole) => left.is_none() && whole.is_none(),
            });
            assert!(is_one, "killed between two stores, neither before nor after the step");
        }
        let (dies_before, left) = death.take();
        self.dies_before = dies_before;
        (result, left)
    }

    /// The first block that matters in which two disks differ.
    fn differing(&self, a: &Disk, b: &Disk) -> Option<u64> {
        let matters = |block: &u64| !self.free.contains(block) && !self.discarded.contains(block);
        (0..HOME_BLOCKS).find(|block| matters(block) && a[block] != b[block])
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
                let page = self.clean_page();
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
        self.scribble(page, 0, &bytes);
    }

    fn set_full_now(&mut self, is_full: bool) {
        self.is_full_now = is_full;
        simulated_room::set_full(is_full);
    }

    fn scribble(&mut self, page: PageId, offset: usize, bytes: &[u8]) {
        self.make_writable(page);
        self.memory.simulated_guest_write(page, offset, bytes);
    }

    /// The guest is about to write to a page.
    fn make_writable(&mut self, page: PageId) {
        self.set_full_now(self.is_full);
        while !self.step(|guest| guest.memory.simulated_guest_tries(page, 0, &[])) {
            // The guest waits for memory to copy the page to, and so does amberlog with what it wants to write there. The
            // content stays, and blocks go home until the page is let go: nobody waits for ever.
            self.compare();
            assert!(self.is_full, "there is room for every page");
            assert_eq!(self.area.under_pressure(), Some((self.log, Pressure::Pages)));
            self.host_writes(3);
            if self.in_flight.is_empty() {
                // What the host must not write home: room has to come from elsewhere.
                self.set_full_now(false);
                let memory = Arc::clone(&self.memory);
                assert_eq!(
                    self.step(|guest| guest.area.under_pressure()),
                    None,
                    "somebody waits although there is room"
                );
                // Of another process the guest asks again.
                let is_let_go = !self.memory.simulated_is_protected(page) || !Arc::ptr_eq(&memory, &self.memory);
                assert!(is_let_go, "there is room, and page {page:?} is not let go");
            }
            self.end_all();
        }
        self.set_full_now(false);
    }

    /// The guest reads a block into a page that it has no more use for: amberlog writes there, past the protection.
    fn read(&mut self, block: u64) {
        let page = self.clean_page();
        self.cache.retain(|_, used| *used != page);
        self.step(|guest| guest.table.prepare_write(&guest.page_slice(page)).expect("there is room"));
        self.page_slice(page).copy_in(0, &self.disk[&block]);
    }

    /// The next page that a kernel could reclaim: it caches nothing that is not home, and is not on its way there.
    fn clean_page(&mut self) -> PageId {
        loop {
            let page = PageId(self.next_page % PAGES);
            self.next_page += 1;
            let is_needed = |block: &u64| self.live.iter().any(|(_, _, blocks)| blocks.contains(block));
            let is_in_use = self.in_flight.iter().any(|write| write.pages.contains(&page));
            if !is_in_use && !self.cache.iter().any(|(block, used)| *used == page && is_needed(block)) {
                return page;
            }
        }
    }

    fn write_superblock(&mut self, start: u32, sequence: u32) -> SuperblockEffect {
        let block = SuperblockBuilder { start, sequence, ..self.superblock.clone() }.build();
        // What the guest was told is home has to be.
        if start == 0 {
            self.bring_absorbed(&|area, log| area.absorbed(log) > 0, &|_, _| true);
        } else if self.open {
            self.bring_absorbed(&|area, log| area.has_absorbed_before(log, sequence), &|_, transaction| {
                jbd2::sequence::is_after(sequence, transaction)
            });
        }
        self.is_turning = self.open == (start == 0);
        let effect = self.step(|guest| {
            guest.complete.insert(0, block.clone());
            guest.area.superblock_written(guest.log, &block).expect("held")
        });
        // Whoever made the step once more may have found the log open.
        let is_opened_before = self.is_turning && start != 0 && effect == SuperblockEffect::GoesOn;
        self.is_turning = false;
        if is_opened_before { SuperblockEffect::Opened } else { effect }
    }

    fn free_blocks(&self) -> u32 {
        let tail = self.live.first().map_or(self.builder.position, |(_, position, _)| *position);
        let used = self.builder.format.distance(tail, self.builder.position);
        self.builder.format.log_blocks() - used
    }

    /// Commits blocks, in batches of `split` log blocks.
    fn commit(&mut self, blocks: &[u64], revokes: &[u64], split: usize, end: End) {
        let mut unique = blocks.to_vec();
        unique.sort_unstable();
        unique.dedup();
        let revokes: Vec<u64> = revokes.iter().copied().filter(|block| !unique.contains(block)).collect();
        unique.iter().for_each(|block| self.end_discards(*block));
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
            self.checkpoint(usize::MAX, false);
            // The checkpoint put older versions into the cache; the new ones come back.
            for (block, content) in &transaction.blocks {
                self.scribble(self.cache[block], 0, content);
            }
        }
        if !self.open {
            let effect = self.write_superblock(self.builder.position, self.builder.sequence);
            assert_eq!(effect, SuperblockEffect::Opened);
            self.open = true;
        }
        let (sequence, position) = (self.builder.sequence, self.builder.position);
        let mut log_blocks = Vec::new();
        if end == End::NoCommit {
            self.builder.body(&transaction, &mut |position, block| log_blocks.push((position, block.to_vec())));
        } else {
            self.builder.transaction(&transaction, &mut |position, block| log_blocks.push((position, block.to_vec())));
        }
        let has_checksums = self.builder.format.has_block_checksums();
        let count = log_blocks.len();
        match end {
            End::Damaged if has_checksums => log_blocks[count - 1].1[0x3b] ^= 1,
            // Only checksums of data tell that it is missing.
            End::CommitFirst if has_checksums && !transaction.blocks.is_empty() => {
                log_blocks.swap(count - 2, count - 1)
            }
            _ => {}
        }
        let pages: HashMap<Vec<u8>, PageId> =
            transaction.blocks.iter().map(|(block, data)| (data.clone(), self.cache[block])).collect();
        let counts = matches!(end, End::Commit | End::CommitFirst) || end == End::Damaged && !has_checksums;
        if counts {
            self.free.extend(&revokes);
        }
        for batch in log_blocks.chunks(split.max(1)) {
            let writes = |guest: &Self| -> Vec<LogWrite> {
                batch
                    .iter()
                    .map(|(position, block)| {
                        let content = match pages.get(block) {
                            Some(page) => Content::Page(guest.page_slice(*page)),
                            None => Content::Bytes(block.clone()),
                        };
                        LogWrite { position: *position, content }
                    })
                    .collect()
            };
            let outcome = self.step(|guest| {
                guest.complete.extend(batch.iter().cloned());
                guest.area.hold(guest.log, &writes(guest))
            });
            assert!(outcome.no_memory.is_empty());
            self.is_partial = end == End::CommitFirst;
            self.compare();
        }
        self.is_partial = false;
        if counts {
            let committed: Vec<u64> = unique.into_iter().filter(|block| self.cache.contains_key(block)).collect();
            for block in &committed {
                self.free.remove(block);
                self.discarded.remove(block);
                self.written.remove(block);
                self.told.remove(block);
                *self.commits.entry(*block).or_default() += 1;
            }
            self.live.push((sequence, position, committed));
            for (_, _, blocks) in &mut self.live {
                blocks.retain(|block| !revokes.contains(block));
            }
        }
    }

    /// Begins a home write of `count` blocks from `first` on, as far as the guest has them cached.
    fn begin_home_write(&mut self, first: u64, count: u64) {
        self.begin_home_write_over(first, count, true);
    }

    fn begin_home_write_over(&mut self, first: u64, count: u64, is_newer: bool) {
        let count = (0..count).take_while(|offset| self.cache.contains_key(&(first + offset))).count() as u64;
        if count == 0 {
            return;
        }
        (first..first + count).for_each(|block| self.end_discards(block));
        self.told.retain(|block| !(first..first + count).contains(block));
        self.written.retain(|block| !(first..first + count).contains(block));
        let pages: Vec<PageId> = (first..first + count).map(|block| self.cache[&block]).collect();
        loop {
            // Anew each time: another process has the pages elsewhere.
            let over: Vec<u64> = if is_newer { (first..first + count).collect() } else { Vec::new() };
            let begins = |guest: &mut Self| {
                let payload: Vec<_> = pages.iter().map(|page| Some(guest.page_slice(*page))).collect();
                guest.area.home_write_begins(
                    guest.log,
                    first..first + count,
                    &payload,
                    &Over::Blocks { blocks: &over, durable: None, has_waited: false },
                )
            };
            let begun = if self.is_asking_again { begins(self) } else { self.step(begins) };
            match begun {
                HomeWrite::Go { operation, replaced, .. } => {
                    let content: Vec<Arc<[u8]>> = pages.iter().map(|page| self.content(*page).into()).collect();
                    for (index, source) in &replaced {
                        assert!(bytes_of(source) == *content[*index], "what goes home is not what the guest gave");
                    }
                    let (commits, is_alone) = (self.commits_of(first, count), self.is_alone(first, count) && is_newer);
                    (first..first + count).for_each(|block| _ = self.ended.remove(&block));
                    self.in_flight.push(InFlight {
                        operation,
                        first,
                        content,
                        replaced,
                        pages,
                        is_host: false,
                        is_discard: false,
                        commits,
                        is_alone,
                    });
                    return;
                }
                HomeWrite::Wait => self.make_way(first..first + count),
                HomeWrite::Restore(blocks) => self.restore(&blocks),
            }
        }
    }

    /// A home write of `count` blocks from `first` on, as far as the guest has them cached, that is answered and not done, if it can be.
    fn absorb(&mut self, first: u64, count: u64) {
        let count = (0..count).take_while(|offset| self.cache.contains_key(&(first + offset))).count() as u64;
        if count == 0 {
            return;
        }
        (first..first + count).for_each(|block| self.end_discards(block));
        let pages: Vec<PageId> = (first..first + count).map(|block| self.cache[&block]).collect();
        let content: Vec<Arc<[u8]>> = pages.iter().map(|page| self.content(*page).into()).collect();
        self.set_full_now(self.is_full);
        let is_absorbed = self.step(|guest| {
            let payload: Vec<_> = pages.iter().map(|page| Some(guest.page_slice(*page))).collect();
            guest.area.absorb(guest.log, &(first..first + count), &payload, None, ABSORBED_MAX)
        });
        self.set_full_now(false);
        if is_absorbed {
            self.written.extend(first..first + count);
            self.told.extend(first..first + count);
            self.guest_disk.extend((first..).zip(content));
            assert!(self.area.absorbed(self.log) <= ABSORBED_MAX);
        }
    }

    /// The host writes what is absorbed home, as far as it is wanted.
    fn absorbed_writes(&mut self, count: usize, is_wanted: &dyn Fn(u64, u32) -> bool) -> usize {
        let writes = self.area.absorbed_writes(self.log, count, is_wanted);
        let begun = writes.len();
        self.by_host(writes);
        begun
    }

    /// Something of the host's is in the way of the guest's write to these blocks.
    fn make_way(&mut self, blocks: Range<u64>) {
        if !self.in_flight.iter().any(|write| write.is_host) {
            let begun = self.absorbed_writes(usize::MAX, &|block, _| blocks.contains(&block));
            assert!(begun > 0, "it waits for nothing");
        }
        self.end_host_write();
    }

    /// All that is absorbed of transactions before this one goes home.
    fn bring_absorbed(
        &mut self,
        is_given_up: &dyn Fn(&JournalArea, LogId) -> bool,
        is_wanted: &dyn Fn(u64, u32) -> bool,
    ) {
        while is_given_up(&self.area, self.log) {
            // What is in flight may be in its way.
            self.end_all();
            self.absorbed_writes(usize::MAX, is_wanted);
            self.end_all();
        }
    }

    fn commits_of(&self, first: u64, count: u64) -> Vec<u64> {
        (first..first + count).map(|block| self.commits.get(&block).copied().unwrap_or_default()).collect()
    }

    /// Whether no other write to these blocks is under way. Those that are have company now.
    fn is_alone(&mut self, first: u64, count: u64) -> bool {
        let is_beside = |write: &InFlight| {
            write.first < first + count && first < write.first + write.content.len() as u64 && !write.is_host
        };
        let mut beside: Vec<&mut InFlight> = self.in_flight.iter_mut().filter(|write| is_beside(write)).collect();
        beside.iter_mut().for_each(|write| write.is_alone = false);
        beside.is_empty()
    }

    fn end_host_write(&mut self) {
        let host = self.in_flight.iter().position(|write| write.is_host);
        self.end_home_write(host.expect("it waits for the host"), true, false);
    }

    fn restore(&mut self, blocks: &[u64]) {
        for block in blocks {
            self.step(|guest| guest.area.restore(guest.log, *block, &guest.disk[block]).expect("room"));
        }
    }

    /// The guest has no use for these blocks any more, and begins to say so. None of its own writes to them is under way.
    fn begin_discard(&mut self, first: u64, count: u64) {
        let blocks = first..first + count;
        for block in blocks.clone() {
            self.discarded.insert(block);
            self.written.remove(&block);
            self.told.remove(&block);
            self.cache.remove(&block);
            self.live.iter_mut().for_each(|(_, _, live)| live.retain(|live| *live != block));
        }
        loop {
            self.step(|guest| guest.area.discarded(guest.log, blocks.clone()));
            match self.area.home_write_begins(self.log, blocks.clone(), &vec![None; count as usize], &Over::Unknown) {
                HomeWrite::Go { operation, replaced, .. } => {
                    assert!(replaced.is_empty(), "nothing is given");
                    let content = vec![Arc::from([0; BLOCK].as_slice()); count as usize];
                    let commits = self.commits_of(first, count);
                    self.in_flight.push(InFlight {
                        operation,
                        first,
                        content,
                        replaced,
                        pages: Vec::new(),
                        is_host: false,
                        is_discard: true,
                        commits,
                        is_alone: false,
                    });
                    return;
                }
                HomeWrite::Wait => self.make_way(blocks.clone()),
                HomeWrite::Restore(blocks) => self.restore(&blocks),
            }
        }
    }

    /// A block is not used again before it was discarded.
    fn end_discards(&mut self, block: u64) {
        let covers = |write: &InFlight| (write.first..write.first + write.content.len() as u64).contains(&block);
        while let Some(index) = self.in_flight.iter().position(|write| write.is_discard && covers(write)) {
            self.end_home_write(index, true, false);
        }
    }

    fn discard(&mut self, first: u64, count: u64) {
        let is_busy = |block: &u64| {
            let covers = |write: &InFlight| (write.first..write.first + write.content.len() as u64).contains(block);
            self.in_flight.iter().any(|write| !write.is_host && covers(write))
        };
        let count = (0..count).take_while(|offset| !is_busy(&(first + offset))).count() as u64;
        if count > 0 {
            self.begin_discard(first, count);
        }
    }

    /// What a write in flight lands, if storage reads it now (`late`) or read it when it began.
    fn landing(&self, write: &InFlight, late: bool) -> Vec<(u64, Arc<[u8]>)> {
        let mut content = write.content.clone();
        if late {
            for (index, page) in write.pages.iter().enumerate() {
                content[index] = self.content(*page).into();
            }
            for (index, source) in &write.replaced {
                content[*index] = bytes_of(source).into();
            }
        }
        (write.first..).zip(content).collect()
    }

    fn end_home_write(&mut self, index: usize, ok: bool, late: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        let write = self.in_flight.remove(index % self.in_flight.len());
        for (index, source) in &write.replaced {
            // A page that the host writes home from may be copied out and change under the write: then nothing is released.
            let is_page = matches!(source, Source::Held(slice) if slice.page() != PageId::NONE);
            let is_same = bytes_of(source) == *write.content[*index];
            assert!(is_same || is_page, "what is taken from elsewhere changed under the write");
        }
        if ok {
            self.lands(&write, late);
        }
        let (_, left) = self.step_once(|guest| guest.area.home_write_ended(guest.log, write.operation, ok));
        if left.is_some() {
            self.in_flight.push(write);
            self.die(left);
        } else if ok && !write.is_host && !write.is_discard {
            // As it was committed last, or past the journal after that. What it has changed meanwhile it writes anew: it cannot know what
            // of that is there.
            let blocks = write.first..write.first + write.content.len() as u64;
            let commits = self.commits_of(write.first, write.content.len() as u64);
            let is_newest = |index: usize| commits[index] == write.commits[index];
            let is_same = |index: usize| self.content(write.pages[index]) == *write.content[index];
            let known = blocks.enumerate().filter(|(index, _)| is_newest(*index) && is_same(*index));
            let known: Vec<u64> = known.map(|(_, block)| block).collect();
            self.written.extend(known);
            let first = write.first;
            let newest = (0..write.content.len()).filter(|index| commits[*index] == write.commits[*index]);
            let newest: Vec<(u64, u64)> = newest.map(|index| (first + index as u64, commits[index])).collect();
            if write.is_alone {
                // Whoever follows knows what is there, of all that it did not carry.
                for (block, past) in self.area.written_past(self.log) {
                    let is_here = newest.iter().any(|(written, _)| *written == block);
                    assert!(!is_here || past == Some(Past::Written), "block {block}: {past:?}");
                }
            }
            self.ended.extend(newest);
        }
    }

    /// Where it is said that the guest has written something newer past its journal, it has, and nothing is under way there.
    fn compare_past(&self) {
        for (block, past) in self.area.written_past(self.log) {
            let covers = |write: &InFlight| (write.first..write.first + write.content.len() as u64).contains(&block);
            let is_there = self.ended.contains_key(&block) && self.ended.get(&block) == self.commits.get(&block);
            let is_written = is_there && !self.in_flight.iter().any(covers);
            assert!(past != Some(Past::Written) || is_written, "block {block} is not there");
        }
    }

    /// A write reaches storage.
    fn lands(&mut self, write: &InFlight, late: bool) {
        let landed = self.landing(write, late);
        if !write.is_host {
            if !write.is_discard {
                self.free.retain(|block| !landed.iter().any(|(written, _)| written == block));
            }
            self.guest_disk.extend(landed.clone());
        }
        self.disk.extend(landed);
    }

    fn host_writes(&mut self, count: usize) {
        let writes = self.area.host_writes(self.log, count, false);
        self.by_host(writes);
    }

    fn by_host(&mut self, writes: Vec<(usize, HostWrite)>) {
        for (operation, write) in writes {
            let content = vec![bytes_of(&write.source).into()];
            let replaced = vec![(0, write.source)];
            self.in_flight.push(InFlight {
                operation,
                first: write.block,
                content,
                replaced,
                pages: Vec::new(),
                is_host: true,
                is_discard: false,
                commits: vec![0],
                is_alone: false,
            });
        }
    }

    fn end_all(&mut self) {
        while !self.in_flight.is_empty() {
            self.end_home_write(0, true, false);
        }
    }

    /// The guest's checkpoint: writes home what its oldest `count` transactions need and moves the tail behind them. With `leaves`
    /// it lets be what it has written home itself since it was committed: that is newer, though no journal knows.
    fn checkpoint(&mut self, count: usize, leaves: bool) {
        self.end_all();
        let oldest: Vec<_> = self.live.drain(..count.min(self.live.len())).collect();
        for (_, _, blocks) in oldest {
            for block in blocks {
                // What the guest no longer caches it has written home before it let go of the page.
                if self.cache.contains_key(&block) && !(leaves && self.written.contains(&block)) {
                    self.write_committed_home(block);
                }
            }
        }
        if self.open {
            let next = (self.builder.sequence, self.builder.position);
            let (sequence, position) = self.live.first().map_or(next, |(sequence, position, _)| (*sequence, *position));
            assert_eq!(self.write_superblock(position, sequence), SuperblockEffect::GoesOn);
        }
    }

    /// The guest's journal has stopped, and it mounts again without a reset: it reads its log, writes all of it home, and begins a new one
    /// behind, leaving out a number. Killed before any of the area's stores, or where it dies by itself.
    fn mount_again(&mut self, dies_when_read: bool, dies_when_home: bool) {
        self.end_all();
        if !self.open {
            return;
        }
        let disk = self.disk.clone();
        let mut superblock = vec![0; BLOCK];
        let is_shown = self.step(|guest| guest.area.show(guest.log, 0, &mut superblock, &mut OnDisk(&disk)));
        assert!(is_shown.expect("shown"));
        if dies_when_read {
            self.die(None);
        }
        // What it has in its cache is what it replays; changes that were not committed are gone.
        let mut replayed = Disk::new();
        replay(&mut CompleteLog(&self.complete), &mut replayed);
        for block in replayed.into_keys().filter(|block| self.cache.contains_key(block)).collect::<Vec<_>>() {
            self.write_committed_home(block);
        }
        if dies_when_home {
            self.die(None);
        }
        let (first, sequence) = (self.superblock.first, self.builder.sequence.wrapping_add(1));
        self.live.clear();
        assert_eq!(self.write_superblock(first, sequence), SuperblockEffect::GoesOn);
        (self.builder.position, self.builder.sequence) = (first, sequence);
        assert_eq!(self.area.owed(self.log).blocks, 0, "it has replayed all");
    }

    /// Writes the newest committed version of a block home, as jbd2's checkpoint does.
    fn write_committed_home(&mut self, block: u64) {
        let mut newest = Disk::new();
        replay(&mut CompleteLog(&self.complete), &mut newest);
        if let Some(content) = newest.remove(&block) {
            self.scribble(self.cache[&block], 0, &content);
            self.begin_home_write(block, 1);
            self.end_all();
        }
    }

    /// Rule 2 of ARCHITECTURE.md: the held log and the complete one make the same disk, whether the writes in flight land or not.
    fn compare(&self) {
        self.area.check().expect("the books are right");
        self.compare_on(&self.disk, &self.guest_disk);
        for late in [false, true] {
            let (mut disk, mut guest_disk) = (self.disk.clone(), self.guest_disk.clone());
            for write in &self.in_flight {
                let landed = self.landing(write, late);
                if !write.is_host {
                    guest_disk.extend(landed.clone());
                }
                disk.extend(landed);
            }
            self.compare_on(&disk, &guest_disk);
        }
    }

    /// The guest is frozen: what it has asked for is answered, and the host writes home all that it may. Then home is what a replay of the
    /// complete journal makes of it, beside what the guest is known to have written past its journal, or the area says why it is not. What
    /// only the guest knows is that, too, once it is put there.
    fn freeze(&mut self) {
        self.end_all();
        loop {
            self.absorbed_writes(usize::MAX, &|_, _| true);
            self.host_writes(usize::MAX);
            if self.in_flight.is_empty() {
                break;
            }
            self.end_all();
        }
        if !self.open || !self.area.is_open(self.log) || self.is_partial {
            return;
        }
        let why = self.area.why_not_home(self.log);
        if !matches!(why, None | Some(NotHome::Unknown(_))) {
            return;
        }
        assert_eq!(self.area.owed(self.log).writable, 0, "the host has nothing left to do");
        let unknown = self.area.versions_unknown(self.log, u64::MAX).expect("there is no bound");
        assert_eq!(why.is_none(), unknown.is_empty(), "{why:?}");
        let mut expected = self.guest_disk.clone();
        replay(&mut CompleteLog(&self.complete), &mut expected);
        for (block, past) in self.area.written_past(self.log) {
            if past == Some(Past::Written) {
                expected.insert(block, self.guest_disk[&block].clone());
            }
        }
        let mut found = self.disk.clone();
        found.extend(unknown.into_iter().map(|(block, content)| (block, content.into())));
        let differing = self.differing(&expected, &found);
        assert_eq!(differing, None, "all that is committed is said to be home, but for {why:?}");
    }

    /// Where the guest was told that a block is home, it reads what it wrote.
    fn compare_read(&self) {
        let mut block = vec![0; BLOCK];
        for at in self.told.iter().filter(|at| !self.free.contains(at)) {
            let is_shown = self.area.read_absorbed(self.log, *at, &mut block);
            let read = if is_shown { &block[..] } else { &self.disk[at] };
            assert!(*read == *self.guest_disk[at], "block {at} is read as it was, shown: {is_shown}");
        }
    }

    /// The same from the files alone, as a process finds them after this one was killed (rule 1 of ARCHITECTURE.md).
    fn compare_found(&self) {
        let path = |name: &str| self.directory.path().join(name);
        let ram = vec![(0, HostFile::open(&path("ram")).expect("guest memory"))];
        let found_log = FoundLog::open(&path("log.table"), &path("log.pool"), ram).expect("a good table");
        assert_eq!(found_log.is_open(), self.open);
        let mut expected = self.guest_disk.clone();
        let mut found = self.disk.clone();
        if self.open {
            replay(&mut CompleteLog(&self.complete), &mut expected);
            replay(&mut found_log.log(), &mut found);
        }
        let differing = self.differing(&expected, &found);
        assert_eq!(differing, None, "the files of a dead process make another disk than the complete journal");
    }

    /// A kernel that mounts without a reset replays the log that it reads here, over what it had in its cache before: blocks
    /// as they were before the host wrote any of them home. Every copy that it comes to is good.
    fn compare_shown(&self, disk: &Disk, cache: &Disk, expected: &Disk) {
        let mut outside = OnDisk(disk);
        let mut shown = HashMap::new();
        let first = self.superblock.first;
        for position in std::iter::once(0).chain(first..first + LOG_BLOCKS) {
            let mut block = vec![0; BLOCK];
            assert!(self.area.show(self.log, position, &mut block, &mut outside).expect("shown"));
            shown.insert(position, block);
        }
        assert_eq!(shown[&0], self.complete[&0], "the guest's own tail and sequence");
        let (superblock, format) = Superblock::parse(&shown[&0]).expect("a good superblock");
        let mut log = CompleteLog(&shown);
        let plan = Plan::new(&mut log, &superblock, &format, &|block| block < HOME_BLOCKS).expect("a replay");
        let complete = Plan::new(&mut CompleteLog(&self.complete), &superblock, &format, &|block| block < HOME_BLOCKS);
        let complete = complete.expect("a replay");
        let counts = |plan: &Plan| (plan.summary().transactions, plan.summary().tags, plan.summary().blocks);
        assert_eq!(counts(&plan), counts(&complete), "transaction by transaction the same");
        for copy in plan.blocks().flat_map(|planned| planned.copies().collect::<Vec<_>>()) {
            let is_good = copy.restore(&format, &mut shown[&copy.position].clone());
            let whole = self.complete.get(&copy.position).cloned();
            let was_good = whole.is_some_and(|mut block| copy.restore(&format, &mut block));
            assert!(is_good || !was_good, "log block {} has a wrong checksum", copy.position);
        }
        let mut found = cache.clone();
        replay(&mut log, &mut found);
        let differing = self.differing(expected, &found);
        assert_eq!(differing, None, "a replay of the log that is shown makes another disk than the complete journal");
    }

    /// `disk` is what is there, `guest_disk` what would be there without the host's own writes.
    fn compare_on(&self, disk: &Disk, guest_disk: &Disk) {
        let mut expected = guest_disk.clone();
        if self.open {
            replay(&mut CompleteLog(&self.complete), &mut expected);
        }
        let mut found = disk.clone();
        let owed = self.area.owed(self.log);
        let looked = self.area.look(self.log, |held| {
            if self.open {
                let written = replay(held, &mut found);
                // Replay takes what it can of a transaction of which some is missing; it is owed when all is there.
                assert!(written == owed.blocks || self.is_partial, "{written} written, {} owed", owed.blocks);
            }
        });
        looked.expect("nobody has forgotten it");
        if self.open {
            self.compare_shown(disk, guest_disk, &expected);
        }
        if let Some(block) = self.differing(&expected, &found) {
            panic!(
                "block {block}: the complete journal has version {}, the held one {}, home {}",
                expected[&block][4], found[&block][4], disk[&block][4],
            );
        }
    }
}

/// Where what is not held is read.
struct OnDisk<'a>(&'a Disk);

impl Outside for OnDisk<'_> {
    fn home(&mut self, block: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.copy_from_slice(&self.0[&block]);
        Ok(())
    }

    fn stored(&mut self, position: u32, _buffer: &mut [u8]) -> std::io::Result<()> {
        panic!("log block {position} is not on storage")
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

/// How a transaction's log blocks end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Commit,
    /// The commit block comes before the last data block, as it may with `async_commit`.
    CommitFirst,
    /// The guest dies before its commit block.
    NoCommit,
    /// The commit block is damaged.
    Damaged,
}

#[derive(Clone, Debug)]
enum Step {
    Modify(Vec<u64>, bool, bool),
    Commit {
        blocks: Vec<u64>,
        revokes: Vec<u64>,
        split: usize,
        escaped: bool,
        end: End,
    },
    BeginHome(u64, u64),
    EndHome {
        index: usize,
        ok: bool,
        late: bool,
    },
    HostWrites(usize),
    Absorb(u64, u64),
    /// The host writes so many absorbed blocks home.
    AbsorbedWrites(usize),
    /// Its disks are held for a moment, and all that is committed is brought home.
    Freeze,
    /// The process is killed, and another one goes on.
    Die,
    /// The same before so many more of its stores, whatever it is about then.
    DieBefore(usize),
    /// The guest commits what it has in its cache without having changed it.
    CommitAgain(Vec<u64>, usize),
    Discard(u64, u64),
    /// It reads a block into a page that it has no more use for.
    Read(u64),
    Scribble(u32),
    /// From now on there is no memory for another copied page, or there is again.
    Full(bool),
    /// Of the oldest so many transactions; whether what the guest has written home itself stays as it is there.
    Checkpoint(usize, bool),
    /// The guest mounts again without a reset; whether the process dies when it has read the log, and when all is home.
    MountAgain(bool, bool),
    Crash(Vec<u64>, End),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Few blocks, so that much happens to the same one, and some more.
    let block = || prop_oneof![4 => 0..5u64, 1 => 0..HOME_BLOCKS / 2];
    let blocks = move || prop::collection::vec(block(), 1..6);
    let ends = prop_oneof![3 => Just(End::Commit), 1 => Just(End::CommitFirst)];
    let commit = (blocks(), prop::collection::vec(block(), 0..2), 1usize..8, prop::bool::weighted(0.2), ends);
    let step = prop_oneof![
        3 => (blocks(), prop::bool::weighted(0.3), prop::bool::weighted(0.1))
            .prop_map(|(blocks, fresh, escaped)| Step::Modify(blocks, fresh, escaped)),
        5 => commit.prop_map(|(blocks, revokes, split, escaped, end)| Step::Commit {
            blocks, revokes, split, escaped, end,
        }),
        5 => (block(), 1u64..4).prop_map(|(first, count)| Step::BeginHome(first, count)),
        4 => (any::<usize>(), prop::bool::weighted(0.9), any::<bool>())
            .prop_map(|(index, ok, late)| Step::EndHome { index, ok, late }),
        2 => (1usize..4).prop_map(Step::HostWrites),
        4 => (block(), 1u64..4).prop_map(|(first, count)| Step::Absorb(first, count)),
        1 => (1usize..4).prop_map(Step::AbsorbedWrites),
        1 => Just(Step::Freeze),
        1 => Just(Step::Die),
        1 => (0usize..24).prop_map(Step::DieBefore),
        1 => (blocks(), 1usize..8).prop_map(|(blocks, split)| Step::CommitAgain(blocks, split)),
        1 => (block(), 1u64..4).prop_map(|(first, count)| Step::Discard(first, count)),
        1 => block().prop_map(Step::Read),
        2 => (0..PAGES / 4).prop_map(Step::Scribble),
        1 => any::<bool>().prop_map(Step::Full),
        2 => (prop_oneof![1 => 1..4usize, 1 => Just(usize::MAX)], any::<bool>())
            .prop_map(|(count, leaves)| Step::Checkpoint(count, leaves)),
        1 => (prop::bool::weighted(0.3), prop::bool::weighted(0.3))
            .prop_map(|(when_read, when_home)| Step::MountAgain(when_read, when_home)),
    ];
    let crash = prop_oneof![Just(End::NoCommit), Just(End::Damaged)];
    (prop::collection::vec(step, 1..60), prop::option::of((blocks(), crash))).prop_map(|(mut steps, crash)| {
        steps.extend(crash.map(|(blocks, end)| Step::Crash(blocks, end)));
        steps
    })
}

/// By which pages are copied: some that others follow are retained with any.
fn rule() -> impl Strategy<Value = HotPages> {
    prop_oneof![2 => Just(HotPages::Foreseen), 1 => Just(HotPages::Lone)]
}

fn run(checksum: Checksum, holding: Holding, first: u32, steps: &[Step]) {
    run_by(HotPages::Foreseen, checksum, holding, first, steps);
}

fn run_by(rule: HotPages, checksum: Checksum, holding: Holding, first: u32, steps: &[Step]) {
    let mut guest = Guest::new(checksum, holding, first, rule);
    for step in steps {
        match step {
            Step::Modify(blocks, fresh, escaped) => {
                blocks.iter().for_each(|block| guest.modify(*block, *fresh, *escaped));
            }
            Step::Commit { blocks, revokes, split, escaped, end } => {
                // The guest commits what it has just changed, so no two blocks have the same content.
                blocks.iter().for_each(|block| guest.modify(*block, false, *escaped));
                guest.commit(blocks, revokes, *split, *end);
            }
            Step::BeginHome(first, count) => guest.begin_home_write(*first, *count),
            Step::EndHome { index, ok, late } => guest.end_home_write(*index, *ok, *late),
            Step::HostWrites(count) => guest.host_writes(*count),
            Step::Absorb(first, count) => guest.absorb(*first, *count),
            Step::AbsorbedWrites(count) => {
                guest.absorbed_writes(*count, &|_, _| true);
            }
            Step::Freeze => guest.freeze(),
            Step::Die => guest.die(None),
            Step::CommitAgain(blocks, split) => guest.commit(blocks, &[], *split, End::Commit),
            Step::Discard(first, count) => guest.discard(*first, *count),
            Step::Read(block) => guest.read(*block),
            Step::DieBefore(store) => guest.dies_before = Some(*store),
            // A wild write: the block that the page caches, if any, is now dirty.
            Step::Scribble(page) => guest.scribble(PageId(*page), 100, b"wild"),
            Step::Full(is_full) => guest.is_full = *is_full,
            Step::Checkpoint(count, leaves) => guest.checkpoint(*count, *leaves),
            Step::MountAgain(when_read, when_home) => guest.mount_again(*when_read, *when_home),
            Step::Crash(blocks, end) => {
                blocks.iter().for_each(|block| guest.modify(*block, false, false));
                guest.commit(blocks, &[], 3, *end);
                guest.compare();
                guest.compare_found();
                return;
            }
        }
        guest.compare();
        guest.compare_read();
        guest.compare_past();
    }
    guest.compare_found();
    // A clean stop: everything home, the log closed, nothing held.
    guest.checkpoint(usize::MAX, true);
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
    fn held_equals_complete_v3(rule in rule(), steps in steps()) {
        run_by(rule, Checksum::V3, Holding::Retain, 1, &steps);
    }

    #[test]
    fn held_equals_complete_without_checksums(rule in rule(), steps in steps()) {
        run_by(rule, Checksum::None, Holding::Retain, OVER_PIECES, &steps);
    }

    #[test]
    fn held_equals_complete_copied(steps in steps()) {
        run(Checksum::V2, Holding::Copy, OVER_PIECES, &steps);
    }
}

/// A block is revoked and used anew while the host still writes its old version home: what the guest puts there is in no
/// journal, so that nothing would mend it if the host's write landed last.
#[test]
fn a_block_that_the_host_writes_is_not_written_by_the_guest_meanwhile() {
    let commit = |blocks: Vec<u64>, revokes: Vec<u64>| Step::Commit {
        blocks,
        revokes,
        split: 8,
        escaped: false,
        end: End::Commit,
    };
    for guest_ends_first in [true, false] {
        let ends = if guest_ends_first { [1, 0] } else { [0, 0] };
        let mut steps = vec![
            commit(vec![1, 2], vec![]),
            Step::HostWrites(1),
            commit(vec![3], vec![1]),
            Step::Modify(vec![1], false, false),
            Step::BeginHome(1, 1),
        ];
        steps.extend(ends.map(|index| Step::EndHome { index, ok: true, late: false }));
        run(Checksum::V3, Holding::Retain, 1, &steps);
    }
}

/// A guest that has two writes of one block on their way finds one or the other there. Which, the host does not change any more, not
/// even where it needs the memory and one of them was what is committed.
#[test]
fn of_two_writes_of_one_block_the_last_one_stays() {
    let commit = Step::Commit { blocks: vec![2, 0], revokes: vec![], split: 1, escaped: false, end: End::Commit };
    let end = |index| Step::EndHome { index, ok: true, late: false };
    for holding in [Holding::Retain, Holding::Copy] {
        for ends in [[0, 0], [1, 0]] {
            for leaves in [false, true] {
                let begun =
                    [Step::Modify(vec![2], false, false), Step::BeginHome(2, 1), commit.clone(), Step::BeginHome(2, 1)];
                let ended = [end(ends[0]), end(ends[1]), Step::Full(true), Step::HostWrites(4)];
                let after = [Step::Checkpoint(usize::MAX, leaves), Step::Full(false)];
                run(Checksum::V3, holding, 1, &[&begun[..], &ended, &after].concat());
            }
        }
    }
}

/// What a guest changes while it is on its way home may be there as it was, as it is, or torn; it writes that anew.
#[test]
fn what_changes_on_its_way_home_is_written_anew() {
    let commit = Step::Commit { blocks: vec![0], revokes: vec![], split: 1, escaped: false, end: End::Commit };
    let modify = Step::Modify(vec![0], false, false);
    let end = Step::EndHome { index: 0, ok: true, late: true };
    for holding in [Holding::Retain, Holding::Copy] {
        let begun = [commit.clone(), Step::BeginHome(0, 1), modify.clone(), end.clone(), Step::HostWrites(1)];
        run(Checksum::V3, holding, 1, &[&begun[..], &[Step::BeginHome(1, 1)]].concat());
    }
}

/// What another process has to know that only the one before knew: what was discarded, what the guest has written home past its own
/// journal, which pages are retained.
#[test]
fn a_process_that_goes_on_knows_what_the_one_before_knew() {
    let commit =
        |blocks: Vec<u64>| Step::Commit { blocks, revokes: vec![], split: 8, escaped: false, end: End::Commit };
    let end = || Step::EndHome { index: 0, ok: true, late: false };
    for holding in [Holding::Retain, Holding::Copy] {
        run(Checksum::V3, holding, 1, &[commit(vec![1, 2]), Step::Discard(1, 1), end(), Step::Die, commit(vec![3])]);
        let past = [Step::Modify(vec![1], false, false), Step::BeginHome(1, 1), end()];
        let by_the_host = [Step::Die, Step::HostWrites(4), end(), end(), Step::Checkpoint(usize::MAX, true)];
        run(Checksum::V3, holding, 1, &[&[commit(vec![1, 2])][..], &past, &by_the_host].concat());
        run(Checksum::V3, holding, 1, &[commit(vec![1, 2]), Step::Die, Step::CommitAgain(vec![1, 2], 1)]);
    }
}

/// A kernel that replays its log, and is served by another process when it begins the next one, is not taken for somebody who writes another
/// journal over its own.
#[test]
fn a_log_that_is_replayed_under_two_processes_goes_on() {
    let commit =
        |blocks: Vec<u64>| Step::Commit { blocks, revokes: vec![], split: 8, escaped: false, end: End::Commit };
    for holding in [Holding::Retain, Holding::Copy] {
        for (when_read, when_home) in [(false, false), (true, false), (false, true), (true, true)] {
            let again = Step::MountAgain(when_read, when_home);
            run(Checksum::V3, holding, 1, &[commit(vec![1, 2]), again.clone(), commit(vec![2])]);
            run(Checksum::V3, holding, 1, &[commit(vec![1, 2]), again.clone(), again.clone(), commit(vec![2]), again]);
        }
        for store in 0..12 {
            let steps = [commit(vec![1, 2]), Step::DieBefore(store), Step::MountAgain(false, false), commit(vec![2])];
            run(Checksum::V3, holding, 1, &steps);
        }
        // A log that has gone round: where the next one begins lie blocks that were let go.
        for blocks in 2..6 {
            let mut steps = vec![commit((0..blocks).collect()); LOG_BLOCKS as usize / (blocks as usize + 2) + 2];
            steps.extend([Step::MountAgain(false, false), commit(vec![2])]);
            run(Checksum::V3, holding, 1, &steps);
        }
    }
}

/// What was absorbed is known to the process that goes on, whatever the one before was about, and is home before the log forgets it.
#[test]
fn what_was_absorbed_is_not_forgotten() {
    let commit =
        |blocks: Vec<u64>| Step::Commit { blocks, revokes: vec![], split: 8, escaped: false, end: End::Commit };
    let end = || Step::EndHome { index: 0, ok: true, late: false };
    for holding in [Holding::Retain, Holding::Copy] {
        for dies in [Step::Die, Step::DieBefore(0), Step::DieBefore(1), Step::DieBefore(2)] {
            let absorbed = [commit(vec![1, 2]), dies, Step::Absorb(1, 2)];
            run(Checksum::V3, holding, 1, &[&absorbed[..], &[Step::Die, commit(vec![3])]].concat());
            run(Checksum::V3, holding, 1, &[&absorbed[..], &[Step::Checkpoint(1, true), commit(vec![3])]].concat());
            run(Checksum::V3, holding, 1, &[&absorbed[..], &[Step::AbsorbedWrites(1), Step::Die, end()]].concat());
            // Something past the journal, and something newer.
            let past = [Step::Modify(vec![1], false, false), Step::BeginHome(1, 1), end(), Step::Die];
            run(Checksum::V3, holding, 1, &[&absorbed[..], &past].concat());
            let newer = [Step::AbsorbedWrites(2), commit(vec![2]), end(), end(), Step::Absorb(2, 1)];
            run(Checksum::V3, holding, 1, &[&absorbed[..], &newer].concat());
        }
    }
}

/// A process is killed when the tail has passed a log, and before all of that is forgotten: what is left over is not taken for a part of
/// what the guest writes there next, whose commit block comes first.
#[test]
fn what_was_passed_is_forgotten_whoever_dies_over_it() {
    let commit =
        |blocks: Vec<u64>, revokes: Vec<u64>, split, end| Step::Commit { blocks, revokes, split, escaped: false, end };
    for dies_before in 0..60 {
        let first = commit(vec![2, 3, 0], vec![1], 3, End::Commit);
        let second = commit(vec![2, 0], vec![], 3, End::CommitFirst);
        let begins_anew = [
            Step::DieBefore(dies_before),
            first.clone(),
            Step::MountAgain(false, false),
            commit(vec![0], vec![], 1, End::Commit),
            second.clone(),
            Step::Die,
        ];
        run(Checksum::V2, Holding::Copy, OVER_PIECES, &begins_anew);
        // The same where the log goes round.
        let mut goes_round = vec![first.clone(), first, Step::DieBefore(dies_before), Step::Checkpoint(1, false)];
        (0..40).for_each(|_| goes_round.extend([second.clone(), Step::Checkpoint(1, false)]));
        goes_round.push(Step::Die);
        run(Checksum::V2, Holding::Copy, 1, &goes_round);
    }
}
