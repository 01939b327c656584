//! The simulated guest, and the ideal disk beside ours.

use block_route::{
    Buffer, DiskOperation, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Start, Status,
};
use guest_memory::{MemorySlice, MemoryTable, PAGE_BYTES, PageId, RegionDescriptor, VmMemory};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Content, LogRead, Superblock, SuperblockEdit};
use nvm_journal::medium::SimulatedMedium;
use placement::{
    AreaDirectory, DiskOptions, DiskRoute, HotPages, Journals, JournalsOptions, ManyAppends, NvmDisk, NvmOptions,
    PlacementKind,
};
use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const DISK_BYTES: usize = 16 << 20;
const PAGES: u32 = 512;
/// A region that every log here fits into.
const REGION_BYTES: usize = 4 << 20;
/// Blocks of the file system that the guest journals, the first of them its superblock's.
const HOMES: u64 = 24;
/// Which of them refers to data, which is in the block behind it.
const REFERENCE: usize = 5;
/// Log blocks that are live at most.
const LIVE_MAX: u32 = 300;

/// Tells what happens, with AMBERLOG_REMOUNT_MODEL_TRACE.
fn tell(what: impl Fn() -> String) {
    if std::env::var_os("AMBERLOG_REMOUNT_MODEL_TRACE").is_some() {
        eprintln!("{}", what());
    }
}

/// What the file systems are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Blocks of a page, checksums of kind 3.
    Checksums,
    /// Blocks of 1024 bytes, no checksums.
    SmallBlocks,
}

/// A generator of its own, and it stays: the seeded faults (crates/crash-explorer/mutants.list) were tried with the
/// sequences that this model's seeds have here.
pub struct Random(u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end.max(1)
    }
}

/// Where things are in an image; the same in all of a kind.
struct Layout {
    block_bytes: usize,
    log_at: Vec<usize>,
    homes: Vec<u64>,
}

fn layout(image: &[u8]) -> Layout {
    let image = image.to_vec();
    let found = extfs::discover(&image).expect("readable").remove(0);
    let block_bytes = found.superblock.block_size as usize;
    let mut log_at = Vec::new();
    for extent in &found.journal.extents(&found.superblock) {
        log_at.extend((0..u64::from(extent.count)).map(|index| (extent.physical + index) as usize * block_bytes));
    }
    let last = found.superblock.blocks_count - 200;
    let homes = (0..HOMES).map(|index| if index == 0 { 1024 / block_bytes as u64 } else { last + index * 3 }).collect();
    Layout { block_bytes, log_at, homes }
}

fn mke2fs(kind: Kind, uuid: &str) -> Vec<u8> {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let (block, journal, features) = match kind {
        Kind::Checksums => ("4096", "size=4", "metadata_csum,64bit"),
        Kind::SmallBlocks => ("1024", "size=1", "^metadata_csum,^64bit"),
    };
    let output = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", block, "-J", journal, "-O", features, "-U", uuid])
        .arg(&path)
        .arg(format!("{}k", DISK_BYTES >> 10))
        .output()
        .expect("e2fsprogs are installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut image = std::fs::read(&path).expect("the image");
    image.resize(DISK_BYTES, 0);
    if kind == Kind::Checksums {
        // The kernel turns checksums on with the first mount.
        let at = layout(&image).log_at[0];
        let raw = &mut image[at..at + jbd2::SUPERBLOCK_BYTES];
        raw[0x28..0x2c].copy_from_slice(&(jbd2::Features::CSUM_V3 | jbd2::Features::REVOKE).to_be_bytes());
        raw[0x50] = 4;
        SuperblockEdit::new(raw).expect("a superblock").seal();
    }
    image
}

/// A file system, closed; and copies of it and of another, some with a live log.
pub fn images(kind: Kind) -> Vec<Vec<u8>> {
    let first = mke2fs(kind, "11111111-2222-3333-4444-555555555555");
    let other = mke2fs(kind, "99999999-8888-7777-6666-555555555555");
    let mut images = vec![first.clone()];
    for (base, sequence, count, seed, earlier) in [
        (&first, 2, 9, 3, 6),
        (&first, 40, 20, 4, 6),
        (&other, 2, 12, 5, 6),
        (&other, 90, 0, 6, 6),
        // As a new file system's first log, and anybody's: only its UUID tells it from another.
        (&other, 2, 7, 7, 0),
    ] {
        images.push(lived(base, sequence, count, seed, earlier));
    }
    images
}

/// An image with a live log of `count` transactions from `sequence` on; closed if there are none. So many before them in the log
/// are left from earlier.
fn lived(base: &[u8], sequence: u32, count: u64, seed: u64, earlier: u32) -> Vec<u8> {
    let mut image = base.to_vec();
    let layout = layout(&image);
    let block_bytes = layout.block_bytes;
    let raw = image[layout.log_at[0]..][..block_bytes].to_vec();
    let (parsed, format) = Superblock::parse(&raw).expect("a journal");
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    for home in &layout.homes[1..] {
        image[*home as usize * block_bytes..][..block_bytes].fill(seed as u8);
    }
    let mut builder = LogBuilder::new(format, parsed.first, sequence.wrapping_sub(earlier));
    let (mut start, mut first) = (builder.position, builder.sequence);
    for number in 0..u64::from(earlier) + count {
        if number == u64::from(earlier) {
            (start, first) = (builder.position, builder.sequence);
        }
        let blocks = (0..=random.below(5))
            .map(|_| {
                let home = layout.homes[1 + random.below(HOMES - 1) as usize];
                (home, vec![random.below(256) as u8; block_bytes])
            })
            .collect::<BTreeMap<_, _>>();
        let transaction =
            Transaction { blocks: blocks.into_iter().collect(), seconds: number, ..Transaction::default() };
        builder.transaction(&transaction, &mut |position, block| {
            image[layout.log_at[position as usize]..][..block_bytes].copy_from_slice(block);
        });
    }
    let raw = &mut image[layout.log_at[0]..][..block_bytes];
    // Something in its second sector that only it has.
    raw[0x300..0x310].fill(seed as u8);
    let (start, first) = if count == 0 { (0, builder.sequence) } else { (start, first) };
    SuperblockEdit::new(raw).expect("a superblock").start(start).sequence(first).seal();
    image
}

/// A log as it was read.
struct ReadLog(Vec<Vec<u8>>);

impl LogRead for ReadLog {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        buffer.copy_from_slice(&self.0[position as usize]);
        Ok(Content::Present)
    }
}

/// What a kernel's replay of a log leaves in the blocks that it writes, and the number of the transaction that follows.
fn replay(log: Vec<Vec<u8>>, homes: &[u64]) -> (BTreeMap<u64, Vec<u8>>, u32, Superblock) {
    let mut log = ReadLog(log);
    let raw = log.0[0].clone();
    let (superblock, format) = Superblock::parse(&raw).expect("the kernel would mount it");
    let mut written = BTreeMap::new();
    if superblock.is_empty() {
        return (written, superblock.sequence.wrapping_add(1), superblock);
    }
    let plan = jbd2::Plan::new(&mut log, &superblock, &format, &|_| true).expect("the kernel would replay it");
    for planned in plan.blocks() {
        assert!(homes.contains(&planned.home()), "block {} was never journaled", planned.home());
        for copy in planned.copies().collect::<Vec<_>>().into_iter().rev() {
            let mut block = log.0[copy.position as usize].clone();
            assert!(copy.restore(&format, &mut block), "the kernel finds a wrong checksum, and mounts nothing");
            written.insert(planned.home(), block);
        }
    }
    (written, plan.summary().walk.next_sequence(), superblock)
}

pub struct Guest {
    pub random: Random,
    ideal: Vec<u8>,
    layout: Layout,
    file: std::fs::File,
    memory: Arc<VmMemory>,
    table: Arc<MemoryTable>,
    journals: Arc<Journals>,
    route: DiskRoute,
    nvm: Option<Arc<NvmDisk>>,
    next_page: u32,
    next_request: u32,
    /// Of the request that was sent last.
    holds: u32,
    /// Host writes that storage has not done yet.
    late: Vec<DiskOperation>,
    builder: LogBuilder,
    is_open: bool,
    /// Sequence, position, blocks of each live transaction.
    live: Vec<(u32, u32, Vec<u64>)>,
    /// Newest committed content of the blocks of the live log.
    committed: BTreeMap<u64, Vec<u8>>,
    /// All of them: which transaction, which block.
    versions: Vec<(u32, u64, Vec<u8>)>,
    /// Blocks that were revoked, and not written since.
    free: HashSet<u64>,
    /// Blocks that were committed, and not written home since: their guest has no need to read them.
    dirty: HashSet<u64>,
    /// It was suspended since it mounted last: storage has its log from there on, and its homes.
    was_suspended: bool,
    was_ever_suspended: bool,
    /// What was at home then: of a block that is free afterwards nobody says any more what it is.
    suspended_with: Vec<(u64, Vec<u8>)>,
    _directory: tempfile::TempDir,
}

impl Guest {
    pub fn new(_kind: Kind, image: &[u8], placement: PlacementKind, seed: u64) -> Self {
        Self::with_region(image, placement, None, seed)
    }

    /// The same with a region in a file, which takes whatever is committed.
    #[allow(dead_code, reason = "not every test that has this guest has a region")]
    pub fn on_region(image: &[u8], region: &Path, seed: u64) -> Self {
        Self::with_region(image, PlacementKind::Nvm, Some((region, NvmOptions::new(region).mark_age)), seed)
    }

    /// The same whose marks are written anew with every flush.
    #[allow(dead_code, reason = "not every test that has this guest has a region")]
    pub fn on_marked_region(image: &[u8], region: &Path, seed: u64) -> Self {
        Self::with_region(image, PlacementKind::Nvm, Some((region, Duration::ZERO)), seed)
    }

    fn with_region(image: &[u8], placement: PlacementKind, region_file: Option<(&Path, Duration)>, seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d);
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("image");
        std::fs::write(&path, image).expect("written");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("the image");
        let memory = VmMemory::new();
        let ram = directory.path().join("ram");
        let ram = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(ram).expect("made");
        ram.set_len(u64::from(PAGES) * PAGE_BYTES as u64).expect("a length");
        let size = u64::from(PAGES) * PAGE_BYTES as u64;
        let region = RegionDescriptor { gpa: 0, size, user_addr: 0x7000_0000, file: ram, file_offset: 0 };
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"))
            .expect("a directory");
        let nvm = (placement == PlacementKind::Nvm).then(|| {
            if let Some((region, mark_age)) = region_file {
                let mut options = NvmOptions::new(region);
                options.create_bytes = REGION_BYTES as u64;
                options.mark_age = mark_age;
                // What is home leaves the region at once.
                options.checkpoint_patience = Duration::ZERO;
                return Arc::new(NvmDisk::open(options).expect("a region can be made"));
            }
            let mut options = NvmOptions::new("the simulated region");
            options.append_home_bytes_min = if random.below(3) == 0 { 3 * 4096 } else { 0 };
            options.delayed_checkpoint = random.below(6) != 0;
            options.checkpoint_slice_bytes_min = [1024, 1 << 20][random.below(2) as usize];
            options.mark_age = Duration::from_secs(seed % 2);
            options.many_appends = [ManyAppends::Home, ManyAppends::Logged][(seed / 2 % 2) as usize];
            options.pipelined = seed / 4 % 2 == 1;
            let medium = Box::new(SimulatedMedium::new(REGION_BYTES));
            Arc::new(NvmDisk::with_medium(options, 0, medium).expect("an empty region"))
        });
        let options = DiskOptions {
            name: "disk".to_owned(),
            path,
            placement,
            honour_flush: false,
            read_only: false,
            nvm: nvm.clone(),
            remote: None,
            durable_within: None,
            write_log: None,
        };
        let budget_bytes = [0, 100 << 10, 64 << 20][random.below(3) as usize];
        let options = JournalsOptions { disks: vec![options], budget_bytes, tracer: None };
        let journals = Journals::new(&memory, area, options).expect("journals");
        journals.area.set_hot_pages([HotPages::Foreseen, HotPages::Lone][random.below(2) as usize]);
        memory.simulate_protection();
        let table = Arc::new(memory.map(vec![region]).expect("mapped"));
        let mut route = DiskRoute::new(Arc::clone(&journals), 0);
        route.started(Start::Fresh, &table).expect("started");
        let layout = layout(image);
        let raw = &image[layout.log_at[0]..][..layout.block_bytes];
        let (parsed, format) = Superblock::parse(raw).expect("a journal");
        Guest {
            random,
            ideal: image.to_vec(),
            layout,
            file,
            memory,
            table,
            journals,
            route,
            nvm,
            next_page: 0,
            next_request: 0,
            holds: 0,
            late: Vec::new(),
            builder: LogBuilder::new(format, parsed.first, parsed.sequence.wrapping_add(1)),
            is_open: false,
            live: Vec::new(),
            committed: BTreeMap::new(),
            versions: Vec::new(),
            free: HashSet::new(),
            dirty: HashSet::new(),
            was_suspended: false,
            was_ever_suspended: false,
            suspended_with: Vec::new(),
            _directory: directory,
        }
    }

    /// Guest memory for so many bytes. Pages come round, and what is retained in them is copied out when they are written.
    fn buffer(&mut self, len: usize) -> Vec<MemorySlice> {
        let mut slices = Vec::new();
        let mut left = len;
        while left > 0 {
            let page = PageId(self.next_page % PAGES);
            self.next_page += 1;
            let part = left.min(PAGE_BYTES);
            slices.push(self.memory.page(page).expect("a page").sub(0, part));
            left -= part;
        }
        slices
    }

    fn request(&mut self, kind: RequestKind, offset: usize, segments: &[MemorySlice], len: usize) {
        self.begin_request(kind, offset, segments, len);
        // A request that waits for the host's own writes goes on when those have ended.
        while self.holds > 0 {
            self.storage_works();
        }
    }

    fn begin_request(&mut self, kind: RequestKind, offset: usize, segments: &[MemorySlice], len: usize) {
        self.next_request += 1;
        let id = RequestId(self.next_request);
        let mut plan = Plan::default();
        self.route.route(&Request { id, kind, offset: offset as u64, len: len as u64, segments }, &mut plan);
        self.route.end_of_pass(&mut plan);
        self.carry_out(plan);
    }

    fn write(&mut self, offset: usize, content: &[u8]) {
        self.begin_write(offset, content);
        while self.holds > 0 {
            self.storage_works();
        }
    }

    fn begin_write(&mut self, offset: usize, content: &[u8]) {
        let slices = self.buffer(content.len());
        let mut at = 0;
        for slice in &slices {
            let page = slice.page();
            self.memory.simulated_guest_write(page, 0, &content[at..at + slice.len()]);
            at += slice.len();
        }
        self.begin_request(RequestKind::Write, offset, &slices, content.len());
        self.ideal[offset..offset + content.len()].copy_from_slice(content);
    }

    fn read(&mut self, offset: usize, len: usize) -> Vec<u8> {
        let slices = self.buffer(len);
        self.request(RequestKind::Read, offset, &slices, len);
        let mut bytes = vec![0; len];
        let mut at = 0;
        for slice in &slices {
            slice.copy_out(0, &mut bytes[at..at + slice.len()]);
            at += slice.len();
        }
        bytes
    }

    /// The guest's requests are done at once; what the host does by itself takes its time.
    fn carry_out(&mut self, plan: Plan) {
        for action in plan.actions {
            match action {
                PlanAction::Disk(operation) if operation.request.is_none() => self.late.push(operation),
                PlanAction::Disk(operation) => self.execute(&operation),
                PlanAction::Release(_, status) => {
                    assert_eq!(status, Status::Ok);
                    self.holds -= 1;
                }
                PlanAction::Hold(_) => self.holds += 1,
            }
        }
    }

    fn execute(&mut self, operation: &DiskOperation) {
        let mut at = operation.offset;
        for buffer in &operation.buffers {
            let len = match buffer {
                Buffer::Slice(slice) => slice.len(),
                Buffer::Bytes(bytes) => bytes.len(),
            };
            let mut bytes = vec![0; len];
            match (operation.operation, buffer) {
                (Operation::Read, Buffer::Slice(slice)) => {
                    self.file.read_exact_at(&mut bytes, at).expect("read");
                    self.memory.simulated_guest_write(slice.page(), 0, &bytes);
                }
                (Operation::Write, Buffer::Slice(slice)) => {
                    slice.copy_out(0, &mut bytes);
                    self.file.write_all_at(&bytes, at).expect("written");
                }
                (Operation::Write, Buffer::Bytes(bytes)) => self.file.write_all_at(bytes, at).expect("written"),
                other => panic!("{other:?}"),
            }
            at += len as u64;
        }
        if let Some(ticket) = operation.ticket {
            let mut plan = Plan::default();
            self.route.disk_done(ticket, Ok(()), &mut plan);
            self.carry_out(plan);
        }
    }

    fn storage_works(&mut self) {
        if self.late.is_empty() {
            let mut plan = Plan::default();
            self.route.woken(&mut plan);
            self.carry_out(plan);
            if self.holds == 0 {
                return;
            }
        }
        let Some(last) = self.late.len().checked_sub(1) else { panic!("nothing is on its way") };
        let operation = self.late.swap_remove(self.random.below(last as u64 + 1) as usize);
        self.execute(&operation);
    }

    /// The host writes home what it wants to, and some of that arrives.
    pub fn host_works(&mut self) {
        if let Some(nvm) = &self.nvm
            && self.random.below(2) == 0
        {
            nvm.request_checkpoint();
        }
        if self.random.below(3) == 0 {
            // Somebody wants to have everything home.
            self.journals.logs().iter().for_each(|log| {
                log.begin_emptying();
            });
        }
        let mut plan = Plan::default();
        self.route.woken(&mut plan);
        self.carry_out(plan);
        while !self.late.is_empty() && self.random.below(4) != 0 {
            self.storage_works();
        }
    }

    /// Everything in the region goes home, and leaves it.
    #[allow(dead_code, reason = "not every test that has this guest has a region")]
    pub fn empty_region(&mut self) {
        self.nvm.iter().for_each(|nvm| nvm.request_checkpoint());
        let mut plan = Plan::default();
        self.route.woken(&mut plan);
        self.carry_out(plan);
        while !self.late.is_empty() {
            self.storage_works();
        }
    }

    /// The image as it is on storage.
    #[allow(dead_code, reason = "not every test that has this guest has a region")]
    pub fn stored_image(&self) -> Vec<u8> {
        let mut image = vec![0; DISK_BYTES];
        self.file.read_exact_at(&mut image, 0).expect("the image");
        image
    }

    /// The image as it is on storage, and what a replay of the complete log leaves in each block that the guest journals.
    #[allow(dead_code, reason = "not every test that has this guest has a region")]
    pub fn stored(&self) -> (Vec<u8>, BTreeMap<u64, Vec<u8>>) {
        let image = self.stored_image();
        let (replayed, ..) = self.ideal_replay();
        let block_bytes = self.layout.block_bytes;
        let ideal = |home: &u64| self.ideal[*home as usize * block_bytes..][..block_bytes].to_vec();
        let homes = self.layout.homes[1..].iter().filter(|home| !self.free.contains(home));
        let expected = homes.map(|home| (*home, replayed.get(home).cloned().unwrap_or_else(|| ideal(home)))).collect();
        (image, expected)
    }

    fn content(&mut self) -> Vec<u8> {
        let mut content = vec![self.random.below(256) as u8; self.layout.block_bytes];
        content[8..16].copy_from_slice(&u64::from(self.next_request).to_le_bytes());
        if self.random.below(12) == 0 {
            content[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        }
        content
    }

    /// What the file system's superblock may become: something that nobody looks at changes in it.
    fn content_of(&mut self, home: u64) -> Vec<u8> {
        if home != self.layout.homes[0] {
            return self.content();
        }
        let block_bytes = self.layout.block_bytes;
        let mut content = self.ideal[home as usize * block_bytes..][..block_bytes].to_vec();
        let at = 1024 - home as usize * block_bytes;
        content[at + 0x30..at + 0x34].copy_from_slice(&self.next_request.to_le_bytes());
        extfs::SuperblockEdit::new(&mut content[at..at + extfs::SUPERBLOCK_BYTES]).expect("a superblock").seal();
        content
    }

    fn any_home(&mut self) -> u64 {
        self.layout.homes[self.random.below(HOMES) as usize]
    }

    fn write_block(&mut self, home: u64, content: &[u8]) {
        self.free.remove(&home);
        self.dirty.remove(&home);
        tell(|| format!("home {home}"));
        self.write(home as usize * self.layout.block_bytes, content);
    }

    fn write_superblock(&mut self, start: u32, sequence: u32) {
        let mut block = self.ideal[self.layout.log_at[0]..][..self.layout.block_bytes].to_vec();
        SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        tell(|| format!("superblock: {sequence} at {start}"));
        self.write(self.layout.log_at[0], &block);
    }

    fn log_blocks(&mut self, transaction: &Transaction, is_whole: bool) {
        if !self.is_open {
            self.write_superblock(self.builder.position, self.builder.sequence);
            self.is_open = true;
        }
        let mut log = Vec::new();
        let mut sink = |position: u32, block: &[u8]| log.push((position, block.to_vec()));
        if is_whole {
            self.builder.transaction(transaction, &mut sink);
        } else {
            let mut builder = self.builder.clone();
            let _ = builder.body(transaction, &mut sink);
        }
        for (position, block) in log {
            self.write(self.layout.log_at[position as usize], &block);
        }
    }

    fn any_transaction(&mut self) -> Transaction {
        let mut blocks = BTreeMap::new();
        for _ in 0..=self.random.below(6) {
            let home = self.any_home();
            let content = self.content_of(home);
            blocks.insert(home, content);
        }
        let mut revokes = Vec::new();
        if self.random.below(4) == 0 {
            let home = self.any_home();
            if !blocks.contains_key(&home) && home != self.layout.homes[0] {
                revokes.push(home);
            }
        }
        let seconds = u64::from(self.next_request);
        Transaction { blocks: blocks.into_iter().collect(), revokes, seconds }
    }

    pub fn commit(&mut self) {
        let first = self.live.first().map_or(self.builder.position, |(_, position, _)| *position);
        if self.builder.format.distance(first, self.builder.position) > LIVE_MAX {
            self.move_tail();
            return;
        }
        let transaction = self.any_transaction();
        self.commit_this(transaction);
    }

    fn commit_this(&mut self, transaction: Transaction) {
        let (sequence, position) = (self.builder.sequence, self.builder.position);
        tell(|| {
            let blocks: Vec<u64> = transaction.blocks.iter().map(|(home, _)| *home).collect();
            format!("commit {sequence} at {position}: {blocks:?}, revokes {:?}", transaction.revokes)
        });
        self.log_blocks(&transaction, true);
        self.live.push((sequence, position, transaction.blocks.iter().map(|(home, _)| *home).collect()));
        for (home, content) in transaction.blocks {
            self.free.remove(&home);
            self.dirty.insert(home);
            self.versions.push((sequence, home, content.clone()));
            self.committed.insert(home, content);
        }
        for home in transaction.revokes {
            self.committed.remove(&home);
            self.free.insert(home);
        }
    }

    /// A transaction that is never committed, because the journal stops.
    pub fn begin_transaction(&mut self) {
        if self.was_suspended {
            // Its kernel goes on: it writes none twice.
            return;
        }
        let transaction = self.any_transaction();
        tell(|| format!("begin {} at {}: {:?}", self.builder.sequence, self.builder.position, transaction.revokes));
        self.log_blocks(&transaction, false);
    }

    /// Commits a block that refers to data, which is at home by then: as ext4 does with `data=ordered`.
    #[allow(dead_code, reason = "not every test that has this guest writes data")]
    pub fn commit_reference(&mut self, generation: u8) {
        let content = vec![generation; self.layout.block_bytes];
        let blocks = vec![(self.layout.homes[REFERENCE], content)];
        let seconds = u64::from(self.next_request);
        self.commit_this(Transaction { blocks, seconds, ..Transaction::default() });
    }

    /// Writes data home that no transaction has.
    #[allow(dead_code, reason = "not every test that has this guest writes data")]
    pub fn write_data(&mut self, generation: u8) {
        let content = vec![generation; self.layout.block_bytes];
        self.write((self.layout.homes[REFERENCE] as usize + 1) * self.layout.block_bytes, &content);
    }

    #[allow(dead_code, reason = "not every test that has this guest writes data")]
    pub fn flush(&mut self) {
        self.request(RequestKind::Flush, 0, &[], 0);
    }

    /// The generations of the block that refers to data, and of the data.
    #[allow(dead_code, reason = "not every test that has this guest writes data")]
    pub fn generations(&self, image: &[u8]) -> (u8, u8) {
        let at = self.layout.homes[REFERENCE] as usize * self.layout.block_bytes;
        (image[at], image[at + self.layout.block_bytes])
    }

    pub fn write_home(&mut self) {
        let home = self.any_home();
        if let Some(content) = self.committed.get(&home).cloned() {
            self.write_block(home, &content);
        }
    }

    /// Past the journal.
    pub fn overwrite(&mut self) {
        let home = self.any_home();
        let content = self.content_of(home);
        self.write_block(home, &content);
    }

    /// Checkpoints what the oldest transactions hold.
    pub fn move_tail(&mut self) {
        let count = self.random.below(self.live.len() as u64 + 1) as usize;
        if count == 0 {
            return;
        }
        let passed: Vec<_> = self.live.drain(..count).collect();
        for home in passed.into_iter().flat_map(|(_, _, blocks)| blocks).collect::<HashSet<_>>() {
            if let Some(content) = self.committed.get(&home).cloned() {
                self.write_block(home, &content);
                if !self.live.iter().any(|(_, _, blocks)| blocks.contains(&home)) {
                    self.committed.remove(&home);
                }
            }
        }
        let (sequence, start) =
            self.live.first().map_or((self.builder.sequence, self.builder.position), |(s, p, _)| (*s, *p));
        self.write_superblock(start, sequence);
    }

    pub fn unmount(&mut self) {
        for (home, content) in std::mem::take(&mut self.committed) {
            self.write_block(home, &content);
        }
        self.closed();
    }

    fn closed(&mut self) {
        self.write_superblock(0, self.builder.sequence);
        self.is_open = false;
        self.live.clear();
        self.committed.clear();
        self.dirty.clear();
    }

    fn ideal_log(&self) -> Vec<Vec<u8>> {
        self.layout.log_at.iter().map(|at| self.ideal[*at..][..self.layout.block_bytes].to_vec()).collect()
    }

    fn ideal_replay(&self) -> (BTreeMap<u64, Vec<u8>>, u32, Superblock) {
        replay(self.ideal_log(), &self.layout.homes)
    }

    /// The log, in pieces of any size.
    fn read_log(&mut self) -> Vec<Vec<u8>> {
        let block_bytes = self.layout.block_bytes;
        let mut log = Vec::new();
        while log.len() < self.layout.log_at.len() {
            let at = self.layout.log_at[log.len()];
            let run = self.layout.log_at[log.len()..]
                .iter()
                .zip(0..)
                .take_while(|(log_at, n)| **log_at == at + n * block_bytes);
            let count = run.count().min(1 + self.random.below(64) as usize);
            let bytes = self.read(at, count * block_bytes);
            log.extend(bytes.chunks_exact(block_bytes).map(<[u8]>::to_vec));
        }
        log
    }

    fn compare(&self, home: u64, found: &[u8], expected: &[u8], what: &str) {
        if self.free.contains(&home) || found == expected {
            return;
        }
        // What it has written past its journal since, no log brings an older version of any more.
        let at = home as usize * self.layout.block_bytes;
        let is_written = *found == self.ideal[at..at + self.layout.block_bytes];
        // Recovery may mark the file system's superblock, and so may whoever says that a log goes on.
        if self.was_suspended && is_written || self.was_ever_suspended && home == self.layout.homes[0] {
            return;
        }
        // An image may have a live log, and a superblock that does not say so: that is mended where the log is seen to be live.
        let without_flag = |block: &[u8]| {
            let (mut block, at) = (block.to_vec(), 1024 - at.min(1024));
            let raw = &mut block[at..at + extfs::SUPERBLOCK_BYTES];
            raw[0x60] &= !4;
            extfs::SuperblockEdit::new(raw).expect("a superblock").seal();
            block
        };
        if home == self.layout.homes[0] && without_flag(found) == without_flag(expected) {
            return;
        }
        let show = |block: &[u8]| format!("{:?}", &block[..16]);
        panic!("{what}: block {home} is {}, and should be {}", show(found), show(expected));
    }

    /// Somebody reads everything while the guest goes on.
    pub fn read_all(&mut self) {
        let found = replay(self.read_log(), &self.layout.homes);
        let expected = self.ideal_replay();
        assert!(self.was_suspended || found.1 == expected.1, "the log ends with {}, not {}", found.1, expected.1);
        for (home, content) in &expected.0 {
            // A log on NVM has no need of what is at home, as far as the guest sees.
            let at = *home as usize * self.layout.block_bytes;
            let found = found.0.get(home).cloned().unwrap_or_else(|| self.read(at, self.layout.block_bytes));
            self.compare(*home, &found, content, "the log that is read");
        }
    }

    /// The journal has stopped, or an image was copied: a kernel mounts what is there.
    pub fn mount_again(&mut self) {
        let block_bytes = self.layout.block_bytes;
        tell(|| "mount".to_owned());
        let mut cache = BTreeMap::new();
        for home in self.layout.homes.clone() {
            if self.random.below(2) == 0 {
                let block = self.read(home as usize * block_bytes, block_bytes);
                cache.insert(home, block);
            }
        }
        if self.random.below(2) == 0 {
            self.host_works();
        }
        let log = self.read_log();
        if self.random.below(3) == 0 {
            self.host_works();
        }
        // No kernel changes what is in its second sector.
        let at = self.layout.log_at[0];
        assert!(log[0][512..1024] == self.ideal[at + 512..at + 1024], "half of the superblock is another's");
        let (written, next, superblock) = replay(log, &self.layout.homes);
        let (expected, expected_next, _) = self.ideal_replay();
        assert!(self.was_suspended || next == expected_next, "the kernel goes on with {next}, not {expected_next}");
        let mut whole: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for home in self.layout.homes.clone() {
            let seen = written.get(&home).or_else(|| cache.get(&home)).cloned();
            let seen = match seen {
                Some(seen) => seen,
                None => self.read(home as usize * block_bytes, block_bytes),
            };
            let ideal = &self.ideal[home as usize * block_bytes..][..block_bytes];
            let should = expected.get(&home).map_or(ideal, Vec::as_slice).to_vec();
            self.compare(home, &seen, &should, "mounted");
            whole.insert(home, seen);
        }
        self.free.retain(|home| !written.contains_key(home));
        if self.nvm.is_some() || self.was_suspended {
            // Appends are at home already, and so is what was committed before a suspend: its log has no need of them.
            for home in expected.keys().filter(|home| !written.contains_key(home)) {
                self.ideal[*home as usize * block_bytes..][..block_bytes].copy_from_slice(&whole[home]);
            }
        }
        for (home, content) in &written {
            self.write_block(*home, content);
            if self.random.below(8) == 0 {
                self.host_works();
            }
        }
        let (parsed, format) =
            Superblock::parse(&self.ideal[self.layout.log_at[0]..][..block_bytes]).expect("a journal");
        if !superblock.is_empty() {
            self.write_superblock(parsed.first, next);
        }
        // What was in its cache before is written back when something in it changes.
        for (home, content) in whole {
            if self.random.below(3) == 0 {
                self.write_block(home, &content);
            }
        }
        self.builder = LogBuilder::new(format, parsed.first, next);
        self.is_open = !superblock.is_empty();
        self.live.clear();
        self.committed.clear();
        self.dirty.clear();
        self.forget_log();
        if self.random.below(2) == 0 {
            self.closed();
        }
        self.journals.area.check().expect("the books are right");
        self.nvm.iter().for_each(|nvm| nvm.check().expect("the region is as it should be"));
    }

    /// The guest dies: before the next one's first request, everything is home.
    pub fn die(&mut self) {
        while !self.late.is_empty() {
            self.storage_works();
        }
        let (expected, next, superblock) = self.ideal_replay();
        tell(|| "die".to_owned());
        self.route.started(Start::Fresh, &Arc::clone(&self.table)).expect("started");
        let block_bytes = self.layout.block_bytes;
        let log = self.read_log();
        // A log that is on storage is left to the next kernel.
        let (left, ..) = replay(log, &self.layout.homes);
        for home in self.layout.homes.clone() {
            let at = home as usize * block_bytes;
            let found = left.get(&home).cloned().unwrap_or_else(|| self.read(at, block_bytes));
            let should = expected.get(&home).cloned().unwrap_or_else(|| self.ideal[at..at + block_bytes].to_vec());
            if home != self.layout.homes[0] {
                self.compare(home, &found, &should, "recovered");
            }
            self.free.remove(&home);
            // Recovery may mark the file system's superblock, and blocks that are nobody's business may differ.
            let found = if left.contains_key(&home) { found } else { self.read(at, block_bytes) };
            self.ideal[at..at + block_bytes].copy_from_slice(&found);
        }
        for (position, at) in self.layout.log_at.clone().into_iter().enumerate() {
            let block = self.read(at, block_bytes);
            assert!(position > 0 || Superblock::decode(&block).is_ok());
            self.ideal[at..at + block_bytes].copy_from_slice(&block);
        }
        let raw = &self.ideal[self.layout.log_at[0]..][..block_bytes];
        let (parsed, format) = Superblock::parse(raw).expect("a journal");
        let next = if superblock.is_empty() { next } else { parsed.sequence.wrapping_add(1) };
        self.builder = LogBuilder::new(format, parsed.first, next);
        self.is_open = false;
        self.live.clear();
        self.committed.clear();
        self.dirty.clear();
        self.was_suspended = false;
        if !parsed.is_empty() {
            self.mount_again();
        }
    }

    /// The guest is suspended, which starts its device anew, and goes on: what it takes for written home is there.
    pub fn suspend(&mut self) {
        while !self.late.is_empty() {
            self.storage_works();
        }
        tell(|| "suspend".to_owned());
        self.route.started(Start::Fresh, &Arc::clone(&self.table)).expect("started");
        (self.was_suspended, self.was_ever_suspended) = (true, true);
        self.look_at_homes("after a suspend");
        for home in self.layout.homes.clone() {
            let block = self.read(home as usize * self.layout.block_bytes, self.layout.block_bytes);
            self.suspended_with.push((home, block));
        }
        // Recovery may mark the file system's superblock.
        let (at, block_bytes) = (self.layout.homes[0] as usize * self.layout.block_bytes, self.layout.block_bytes);
        let found = self.read(at, block_bytes);
        self.ideal[at..at + block_bytes].copy_from_slice(&found);
    }

    /// What was in the log before a suspend is nobody's business any more.
    fn forget_log(&mut self) {
        if std::mem::take(&mut self.was_suspended) {
            // Whoever marks its log as live again marks the file system's superblock, too.
            let superblock = self.layout.homes[0] as usize * self.layout.block_bytes;
            for at in self.layout.log_at.iter().copied().chain([superblock]).collect::<Vec<_>>() {
                let block = self.read(at, self.layout.block_bytes);
                self.ideal[at..at + block.len()].copy_from_slice(&block);
            }
        }
    }

    /// The superblock of an older copy of the same file system is not told from that of a kernel that has not heard of a hand-over.
    fn end_suspended(&mut self) {
        if self.was_suspended {
            self.mount_again();
        }
    }

    fn look_at_homes(&mut self, what: &str) {
        let block_bytes = self.layout.block_bytes;
        for home in self.layout.homes.clone() {
            let at = home as usize * block_bytes;
            // Recovery may mark the file system's superblock.
            if self.dirty.contains(&home) || self.free.contains(&home) || home == self.layout.homes[0] {
                continue;
            }
            let found = self.read(at, block_bytes);
            assert!(found == self.ideal[at..at + block_bytes], "{what}: block {home} is {:?}", &found[..16]);
        }
    }

    /// Its kernel has given the journal up, and left it open; something else is made of the disk, and used. Then its VM is gone, or it begins anew.
    #[allow(dead_code, reason = "not every test that has this guest does that")]
    pub fn make_something_else(&mut self) {
        let (at, beginning) = match self.random.below(4) {
            // A member of an md array with metadata 1.2.
            0 => {
                let mut superblock = vec![0; 4096];
                superblock[..8].copy_from_slice(&[0xfc, 0x4e, 0x2b, 0xa9, 1, 0, 0, 0]);
                superblock[144] = 8;
                (4096, superblock)
            }
            // A physical volume of LVM.
            1 => (512, [&b"LABELONE"[..], &[0; 504]].concat()),
            // A partition table, with nothing in its partition.
            2 => {
                let mut sector = vec![0; 512];
                sector[446 + 4] = 0x83;
                sector[446 + 8..446 + 16].copy_from_slice(&[0, 24, 0, 0, 0, 16, 0, 0]);
                sector[510..].copy_from_slice(&[0x55, 0xaa]);
                (0, sector)
            }
            _ => (0, vec![0; 4096]),
        };
        tell(|| format!("something else, with {} bytes at {at}", beginning.len()));
        self.write(at, &beginning);
        let block_bytes = self.layout.block_bytes;
        let mut written: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        for _ in 0..self.random.below(40) {
            let position = 1 + self.random.below(self.layout.log_at.len() as u64 - 1) as usize;
            let home = self.layout.homes[1 + self.random.below(HOMES - 1) as usize] as usize * block_bytes;
            let at = if self.random.below(2) == 0 { home } else { self.layout.log_at[position] };
            let content = self.content();
            self.write(at, &content);
            written.insert(at, content);
            if self.random.below(4) == 0 {
                self.host_works();
            }
        }
        while !self.late.is_empty() {
            self.storage_works();
        }
        if self.random.below(2) == 0 {
            self.journals.recover_all().expect("finished");
        } else {
            self.route.started(Start::Fresh, &Arc::clone(&self.table)).expect("started");
        }
        for (at, content) in written {
            let mut found = vec![0; content.len()];
            self.file.read_exact_at(&mut found, at as u64).expect("read");
            assert!(found == content, "what was written at {at} is {:?}, not {:?}", &found[..16], &content[..16]);
        }
    }

    /// The disk as the guest sees it, for a copy of this moment.
    #[allow(dead_code, reason = "not every test that has this guest copies images")]
    pub fn image(&self) -> Vec<u8> {
        self.ideal.clone()
    }

    /// Copies what an image has, in any order, in pieces of any size; and mounts it.
    pub fn copy_image(&mut self, image: &[u8]) {
        self.end_suspended();
        let pieces = self.pieces(image);
        self.copy(image, &pieces);
        self.free.clear();
        self.mount_again();
    }

    /// Copies what an image has; the guest dies before it mounts it.
    #[allow(dead_code, reason = "not every test that has this guest copies images")]
    pub fn copy_image_and_die(&mut self, image: &[u8]) {
        self.end_suspended();
        let pieces = self.pieces(image);
        self.copy(image, &pieces);
        self.free.clear();
        self.die();
    }

    /// Something else is written over a block of a live transaction, and then a whole transaction that would be the next: both at
    /// once, while what the host writes is on its way: `in_the_midst` looks at it then. Gives the blocks of that transaction with
    /// their contents.
    #[allow(dead_code, reason = "not every test that has this guest copies images")]
    pub fn write_over_live(&mut self, is_hurried: bool, in_the_midst: &mut dyn FnMut(&Self)) -> Vec<(u64, Vec<u8>)> {
        let (_, position, _) = self.live[0];
        let transaction = self.any_transaction();
        let mut writes = vec![(self.builder.format.next(position), self.content())];
        self.builder.transaction(&transaction, &mut |position, block| writes.push((position, block.to_vec())));
        if is_hurried {
            self.nvm.iter().for_each(|nvm| nvm.request_checkpoint());
            let mut plan = Plan::default();
            self.route.woken(&mut plan);
            self.carry_out(plan);
        }
        for (position, block) in writes {
            let offset = self.layout.log_at[position as usize];
            if is_hurried {
                self.begin_write(offset, &block);
            } else {
                self.write(offset, &block);
            }
        }
        in_the_midst(self);
        while self.holds > 0 || !self.late.is_empty() {
            self.storage_works();
        }
        transaction.blocks
    }

    /// A copy that is cut off: the guest dies in its midst, and the next one begins it anew. Until then every sector is what was
    /// written last, or what one of the two logs would make of it.
    #[allow(dead_code, reason = "not every test that has this guest copies images")]
    pub fn cut_copy(&mut self, image: &[u8]) {
        self.end_suspended();
        let block_bytes = self.layout.block_bytes;
        let mut pieces = self.pieces(image);
        pieces.truncate(self.random.below(pieces.len() as u64 + 1) as usize);
        // What is written over a transaction ends the log there.
        let first = self.live.first().map_or(self.builder.sequence, |(sequence, ..)| *sequence);
        self.versions.retain(|(sequence, ..)| !jbd2::sequence::is_after(first, *sequence));
        let log = self.layout.log_at.iter().map(|at| image[*at..][..block_bytes].to_vec()).collect();
        let (brought, ..) = replay(log, &self.layout.homes);
        self.copy(image, &pieces);
        tell(|| "die amid the copy".to_owned());
        while !self.late.is_empty() {
            self.storage_works();
        }
        self.route.started(Start::Fresh, &Arc::clone(&self.table)).expect("started");
        for home in self.layout.homes.clone() {
            let at = home as usize * block_bytes;
            let found = self.read(at, block_bytes);
            // A block may have been written in part.
            for (sector, found) in found.chunks_exact(512).enumerate() {
                let range = sector * 512..(sector + 1) * 512;
                let is_written = *found == self.ideal[at + range.start..at + range.end];
                let is_of_ours =
                    self.versions.iter().any(|(_, block, content)| *block == home && content[range.clone()] == *found);
                let is_of_brought = brought.get(&home).is_some_and(|block| block[range.clone()] == *found)
                    // The log that was copied may end sooner as yet.
                    || self.layout.log_at.iter().any(|log| image[log + range.start..log + range.end] == *found);
                // Without checksums nobody can tell what was written over a block of the log from that block.
                // (It may be escaped there.)
                let from = if found.starts_with(&jbd2::MAGIC.to_be_bytes()) { 4 } else { 0 };
                let is_in_log = |log: &usize| self.ideal[log + range.start + from..log + range.end] == found[from..];
                let is_of_log = block_bytes < PAGE_BYTES && self.layout.log_at.iter().any(is_in_log);
                // Recovery may mark the file system's superblock.
                let was_there = |(of, block): &(u64, Vec<u8>)| *of == home && block[range.clone()] == *found;
                let is_nobodys = home == self.layout.homes[0]
                    || self.free.contains(&home)
                    || self.suspended_with.iter().any(was_there);
                assert!(
                    is_written || is_of_ours || is_of_brought || is_of_log || is_nobodys,
                    "block {home}, sector {sector} is {:?}",
                    &found[..16]
                );
            }
            self.ideal[at..at + block_bytes].copy_from_slice(&found);
        }
        for at in self.layout.log_at.clone() {
            let block = self.read(at, block_bytes);
            self.ideal[at..at + block_bytes].copy_from_slice(&block);
        }
        self.copy_image(image);
    }

    fn copy(&mut self, image: &[u8], pieces: &[Range<usize>]) {
        for range in pieces {
            self.write(range.start, &image[range.clone()]);
            if self.random.below(16) == 0 {
                self.host_works();
            }
        }
    }

    /// In which order what an image has is written.
    fn pieces(&mut self, image: &[u8]) -> Vec<Range<usize>> {
        let block_bytes = self.layout.block_bytes;
        let piece = [512, 1024, 4096, 64 << 10, 512 << 10][self.random.below(5) as usize];
        let order = self.random.below(3);
        let wanted: HashSet<usize> = self
            .layout
            .log_at
            .iter()
            .copied()
            .chain(self.layout.homes.iter().map(|home| *home as usize * block_bytes))
            // The inode of the journal, whose checksum has the UUID in it.
            .chain((0..image.len()).step_by(block_bytes).filter(|at| {
                let range = *at..*at + block_bytes;
                self.ideal[range.clone()] != image[range]
            }))
            .flat_map(|at| (at / piece..(at + block_bytes).div_ceil(piece)).collect::<Vec<_>>())
            .collect();
        let mut pieces: Vec<usize> = wanted.into_iter().collect();
        pieces.sort_unstable();
        match order {
            0 => {}
            1 => pieces.reverse(),
            _ => {
                for index in (1..pieces.len()).rev() {
                    let other = self.random.below(index as u64 + 1) as usize;
                    pieces.swap(index, other);
                }
            }
        }
        tell(|| format!("copy an image in pieces of {piece}, order {order}"));
        pieces.into_iter().map(|index| index * piece..((index + 1) * piece).min(image.len())).collect()
    }
}
