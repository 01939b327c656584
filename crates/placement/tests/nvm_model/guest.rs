//! The simulated guest: jbd2's rules, storage that works when the test says so, and the judge.

use super::disk::Disk;
use guest_memory::{MemorySlice, MemoryTable, PageId, RegionDescriptor, VmMemory};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Content, Format, LogRead, Plan as Replay, Superblock, SuperblockEdit};
use nvm_journal::Found;
use nvm_journal::medium::SimulatedMedium;
use placement::{
    AreaDirectory, Buffer, DiskOperation, DiskOptions, Journals, JournalsOptions, NvmDisk, NvmOptions, NvmRoute,
    Operation, PlacementKind, Plan, PlanAction, Request, RequestId, RequestKind, Route, Start, Status,
};
use recovery::Access;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

const BLOCK: usize = 1024;
const IMAGE_BLOCKS: u64 = 4096;
const REGION_BYTES: usize = 1 << 20;
const PAGES: u32 = 512;
const BLOCKS_EACH: u64 = 6;
/// Log blocks that are live at most.
const LIVE_MAX: u32 = 500;

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end.max(1)
    }
}

/// An ext4 of one group.
pub fn image() -> Vec<u8> {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let output = std::process::Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "1024", "-J", "size=1", "-O", "^metadata_csum,^resize_inode"])
        .args(["-E", "lazy_itable_init=0"])
        .arg(&path)
        .arg(IMAGE_BLOCKS.to_string())
        .output()
        .expect("e2fsprogs are installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(&path).expect("the image")
}

/// A log as it was written, but for a transaction that may not be committed yet.
struct CompleteLog<'a> {
    blocks: &'a HashMap<u32, Vec<u8>>,
    hidden: u32,
}

impl LogRead for CompleteLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        match self.blocks.get(&position) {
            Some(block) if jbd2::peek(block).is_none_or(|header| header.sequence != self.hidden) => {
                buffer.copy_from_slice(block);
            }
            _ => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    Metadata,
    Data,
}

/// A transaction of the guest's.
struct Logged {
    sequence: u32,
    position: u32,
    blocks: Vec<u64>,
}

struct Committing {
    logged: Logged,
    requests: Vec<u32>,
    becomes: Vec<(u64, Use)>,
}

struct Pending {
    number: u64,
    operation: DiskOperation,
    bytes: Vec<u8>,
    covered: u64,
}

pub struct Guest {
    pub random: Random,
    /// Blocks that are metadata all the time; the block bitmap is the last.
    pub metadata: Vec<u64>,
    /// Blocks that are free at first.
    pub dynamic: Vec<u64>,
    bitmap: u64,
    used_as: HashMap<u64, Use>,
    cache: HashMap<u64, Vec<u8>>,
    /// Blocks whose home, as the guest knows it, is not behind their last committed version.
    clean: HashSet<u64>,
    /// Blocks that a write home is on its way to, and its request.
    busy: HashMap<u64, u32>,
    live: Vec<Logged>,
    committing: Option<Committing>,
    builder: LogBuilder,
    log_at: Vec<u64>,
    log: HashMap<u32, Vec<u8>>,
    superblock: Vec<u8>,
    /// The journal's superblock, as it may be.
    superblocks: Vec<Vec<u8>>,
    committed: u32,
    ideal: Disk,
    ours: Disk,
    pending: Vec<Pending>,
    holds: HashMap<u32, u32>,
    flushes: HashMap<u32, u64>,
    next_request: u32,
    next_page: u32,
    next_operation: u64,
    next_content: u64,
    images: Arc<Mutex<Vec<Vec<u8>>>>,
    nvm: Arc<NvmDisk>,
    route: NvmRoute,
    memory: Arc<VmMemory>,
    file: std::fs::File,
    directory: tempfile::TempDir,
}

impl Guest {
    /// A guest that has just mounted the file system.
    pub fn new(image: &[u8], seed: u64) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("image");
        std::fs::write(&path, image).expect("written");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("the image");
        let found = extfs::discover(&image.to_vec()).expect("readable").remove(0);
        let extents = found.journal.extents(&found.superblock);
        let log_at: Vec<u64> = extents
            .iter()
            .flat_map(|extent| (0..u64::from(extent.count)).map(|index| (extent.physical + index) * BLOCK as u64))
            .collect();
        let superblock = image[log_at[0] as usize..][..BLOCK].to_vec();
        let (parsed, format) = Superblock::parse(&superblock).expect("a journal");
        let word = |at: usize| u64::from(u32::from_le_bytes(*image[at..].first_chunk().expect("inside")));
        // The only group descriptor: block bitmap and inode table.
        let (bitmap, inodes) = (word(2 * BLOCK), word(2 * BLOCK + 8));
        let mut metadata: Vec<u64> = (inodes + 40..inodes + 40 + BLOCKS_EACH).collect();
        metadata.push(bitmap);
        let dynamic: Vec<u64> = (IMAGE_BLOCKS - 100..IMAGE_BLOCKS - 100 + BLOCKS_EACH).collect();
        let mut medium = SimulatedMedium::new(REGION_BYTES);
        let images = Arc::new(Mutex::new(Vec::new()));
        let (seen, mut choice) = (Arc::clone(&images), Random::new(seed ^ 0x6c6f));
        medium.observe(Some(Box::new(move |crash| {
            let mut seen = seen.lock().expect("no panic under this lock");
            if seen.len() < 3 && choice.below(20) == 0 {
                let how = choice.below(3);
                seen.push(crash.image(&mut |count| match how {
                    0 => 0,
                    1 => count - 1,
                    _ => choice.below(count as u64) as usize,
                }));
            }
        })));
        let mut random = Random::new(seed);
        let mut options = NvmOptions::new("the simulated region");
        options.byte_level = random.below(5) != 0;
        options.delayed_checkpoint = random.below(6) != 0 || seed < 10;
        options.log_everything = random.below(6) == 0;
        let nvm = Arc::new(NvmDisk::with_medium(options, 0, Box::new(medium)).expect("an empty region"));
        let memory = VmMemory::new();
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
        let options = DiskOptions {
            name: "disk".to_owned(),
            path,
            placement: PlacementKind::Nvm,
            honour_flush: false,
            read_only: false,
            nvm: Some(Arc::clone(&nvm)),
            remote: None,
        };
        let options = JournalsOptions { disks: vec![options], budget_bytes: 64 << 20, tracer: None };
        let journals = Journals::new(&memory, area.expect("a directory"), options).expect("journals");
        memory.simulate_protection();
        let base: Arc<[u8]> = Arc::from(image);
        let of = |block: &u64| (*block, image[*block as usize * BLOCK..][..BLOCK].to_vec());
        let mut guest = Guest {
            random,
            cache: metadata.iter().chain(&dynamic).map(of).collect(),
            clean: metadata.iter().copied().collect(),
            used_as: dynamic
                .iter()
                .map(|block| (*block, Use::Free))
                .chain(metadata.iter().map(|block| (*block, Use::Metadata)))
                .collect(),
            metadata,
            dynamic,
            bitmap,
            busy: HashMap::new(),
            live: Vec::new(),
            committing: None,
            builder: LogBuilder::new(format, parsed.first, parsed.sequence + 1),
            log_at,
            log: HashMap::new(),
            superblock,
            superblocks: Vec::new(),
            committed: parsed.sequence,
            ideal: Disk::new(Arc::clone(&base), BLOCK),
            ours: Disk::new(base, BLOCK),
            pending: Vec::new(),
            holds: HashMap::new(),
            flushes: HashMap::new(),
            next_request: 0,
            next_page: 0,
            next_operation: 0,
            next_content: seed << 20,
            images,
            nvm,
            route: NvmRoute::new(journals, 0),
            memory,
            file,
            directory,
        };
        let table = Arc::new(guest.map());
        guest.route.started(Start::Fresh, &table).expect("started");
        guest.write_superblock(guest.builder.position, guest.builder.sequence);
        guest
    }

    fn map(&self) -> MemoryTable {
        let path = self.directory.path().join("ram");
        let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(path).expect("made");
        file.set_len(u64::from(PAGES) * 4096).expect("a length");
        let size = u64::from(PAGES) * 4096;
        let region = RegionDescriptor { gpa: 0, size, user_addr: 0x7000_0000, file, file_offset: 0 };
        self.memory.map(vec![region]).expect("mapped")
    }

    fn page(&mut self, content: &[u8]) -> MemorySlice {
        let page = PageId(self.next_page);
        self.next_page = (self.next_page + 1) % PAGES;
        self.memory.simulated_guest_write(page, 0, content);
        self.memory.page(page).expect("a page").sub(0, content.len())
    }

    /// Sends a request; what it writes may be on the ideal disk from now on.
    fn send(&mut self, kind: RequestKind, offset: u64, slice: Option<MemorySlice>) -> u32 {
        self.next_request += 1;
        let request = self.next_request;
        self.holds.insert(request, 0);
        if kind == RequestKind::Flush {
            self.flushes.insert(request, self.ideal.now());
        }
        let segments: Vec<MemorySlice> = slice.into_iter().collect();
        let len = segments.iter().map(|slice| slice.len() as u64).sum();
        let mut plan = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        self.route.route(&Request { id: RequestId(request), kind, offset, len, segments: &segments }, &mut plan);
        self.route.end_of_pass(&mut plan);
        self.carry_out(plan);
        self.check();
        request
    }

    /// Sends a write of a home block, or of a part of it.
    fn send_home(&mut self, block: u64, from: usize, bytes: &[u8]) -> u32 {
        let offset = block * BLOCK as u64 + from as u64;
        let slice = self.page(bytes);
        // The name of the request that comes next.
        self.ideal.write(u64::from(self.next_request + 1), offset, bytes);
        self.cache.get_mut(&block).expect("known")[from..from + bytes.len()].copy_from_slice(bytes);
        self.clean.insert(block);
        let request = self.send(RequestKind::Write, offset, Some(slice));
        if self.holds.contains_key(&request) {
            self.busy.insert(block, request);
        }
        request
    }

    fn carry_out(&mut self, plan: Plan) {
        // What the region went through before storage was told anything.
        for region in std::mem::take(&mut *self.images.lock().expect("no panic under this lock")) {
            self.judge(&region);
        }
        for action in plan.actions {
            match action {
                PlanAction::Disk(operation) => {
                    if let Some(request) = operation.request {
                        *self.holds.get_mut(&request.0).expect("a live request") += 1;
                    }
                    self.next_operation += 1;
                    let number = self.next_operation;
                    let bytes = bytes_of(&operation);
                    if operation.operation == Operation::Write {
                        self.ours.write(number, operation.offset, &bytes);
                    }
                    self.pending.push(Pending { number, operation, bytes, covered: self.ours.now() });
                }
                PlanAction::Hold(request) => *self.holds.get_mut(&request.0).expect("a live request") += 1,
                PlanAction::Release(request, status) => {
                    assert_eq!(status, Status::Ok);
                    *self.holds.get_mut(&request.0).expect("a live request") -= 1;
                }
            }
        }
        let done: Vec<u32> = self.holds.iter().filter(|(_, holds)| **holds == 0).map(|(id, _)| *id).collect();
        for request in done {
            self.holds.remove(&request);
            self.ideal.ended(u64::from(request));
            if let Some(covered) = self.flushes.remove(&request) {
                self.ideal.flushed(covered);
            }
            self.busy.retain(|_, by| *by != request);
        }
        let is_committed = self
            .committing
            .as_ref()
            .is_some_and(|committing| committing.requests.iter().all(|request| !self.holds.contains_key(request)));
        if is_committed && let Some(committing) = self.committing.take() {
            self.committed = committing.logged.sequence;
            for (block, becomes) in committing.becomes {
                self.used_as.insert(block, becomes);
            }
            self.live.push(committing.logged);
        }
    }

    /// One operation of storage ends, whichever.
    fn end_one(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let index = self.random.below(self.pending.len() as u64) as usize;
        let Pending { number, operation, bytes, covered } = self.pending.swap_remove(index);
        match operation.operation {
            Operation::Write => {
                self.file.write_all_at(&bytes, operation.offset).expect("written");
                self.ours.ended(number);
            }
            Operation::Flush => self.ours.flushed(covered),
            Operation::Read => {
                let mut at = operation.offset;
                for buffer in &operation.buffers {
                    let Buffer::Slice(slice) = buffer else { panic!("reads fill guest memory") };
                    let mut content = vec![0; slice.len()];
                    self.file.read_exact_at(&mut content, at).expect("read");
                    slice.copy_in(0, &content);
                    at += slice.len() as u64;
                }
            }
            other => panic!("{other:?} was not asked for"),
        }
        let mut plan = Plan::default();
        if let Some(request) = operation.request {
            plan.release(request, Status::Ok);
        }
        let mut more = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        if let Some(ticket) = operation.ticket {
            self.route.disk_done(ticket, Ok(()), &mut more);
        }
        // Holds first: the request must not end between.
        more.actions.append(&mut plan.actions);
        self.carry_out(more);
        self.check();
    }

    fn wait_for(&mut self, request: u32) {
        for _ in 0..10_000 {
            if !self.holds.contains_key(&request) {
                return;
            }
            assert!(!self.pending.is_empty(), "request {request} waits, and storage has nothing to do");
            self.end_one();
        }
        panic!("request {request} does not end");
    }

    /// Some of what is on its way ends.
    pub fn storage_works(&mut self) {
        for _ in 0..self.random.below(6) {
            self.end_one();
        }
    }

    /// All of it.
    pub fn settle(&mut self) {
        while !self.pending.is_empty() {
            self.end_one();
        }
        assert!(self.holds.is_empty(), "requests wait for nothing: {:?}", self.holds);
    }

    pub fn flush(&mut self) {
        let request = self.send(RequestKind::Flush, 0, None);
        self.wait_for(request);
    }

    /// The region's blocks are to go home.
    pub fn checkpoint(&mut self) {
        self.nvm.request_checkpoint();
        let mut plan = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        self.route.woken(&mut plan);
        self.carry_out(plan);
        self.check();
    }

    pub fn any_metadata(&mut self) -> u64 {
        let of: Vec<u64> = self
            .metadata
            .iter()
            .chain(&self.dynamic)
            .copied()
            .filter(|block| self.used_as[block] == Use::Metadata)
            .collect();
        of[self.random.below(of.len() as u64) as usize]
    }

    fn content(&mut self, before: &[u8]) -> Vec<u8> {
        self.next_content += 1;
        let mut content = before.to_vec();
        if self.random.below(2) == 0 {
            let mut random = Random::new(self.next_content);
            content.iter_mut().for_each(|byte| *byte = random.below(256) as u8);
        }
        content[512..520].copy_from_slice(&self.next_content.to_le_bytes());
        match self.random.below(4) {
            0 => content[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes()),
            1 => content[..4].fill(0),
            _ => {}
        }
        content
    }

    fn is_committing(&self, block: u64) -> bool {
        self.committing.as_ref().is_some_and(|committing| {
            committing.logged.blocks.contains(&block) || committing.becomes.iter().any(|(other, _)| *other == block)
        })
    }

    /// The guest writes a block home as it has it, if it may.
    pub fn write_home(&mut self, block: u64) {
        if !self.busy.contains_key(&block) && !self.is_committing(block) && self.used_as[&block] == Use::Metadata {
            let content = self.cache[&block].clone();
            self.send_home(block, 0, &content);
        }
    }

    fn may_overwrite(&self, block: u64) -> bool {
        block != self.bitmap
            && !self.busy.contains_key(&block)
            && !self.is_committing(block)
            && self.used_as[&block] == Use::Metadata
    }

    /// The guest writes something else there, past its journal.
    pub fn overwrite(&mut self, block: u64) {
        if self.may_overwrite(block) {
            let content = self.content(&self.cache[&block].clone());
            self.send_home(block, 0, &content);
        }
    }

    /// The same with a sector of a block whose home is what the guest knows.
    pub fn overwrite_part(&mut self, block: u64) {
        if self.may_overwrite(block) && self.clean.contains(&block) {
            let content = self.content(&self.cache[&block].clone());
            let from = self.random.below(2) as usize * 512;
            self.send_home(block, from, &content[from..from + 512]);
        }
    }

    /// Data is written without the journal.
    pub fn write_data(&mut self) {
        let block = self.dynamic[self.random.below(BLOCKS_EACH) as usize];
        if self.used_as[&block] == Use::Data && !self.busy.contains_key(&block) && !self.is_committing(block) {
            let content = self.content(&self.cache[&block].clone());
            self.send_home(block, 0, &content);
        }
    }

    /// Reads a block whose home is what the guest knows.
    pub fn read(&mut self, block: u64) {
        if !self.clean.contains(&block) || self.busy.contains_key(&block) || self.is_committing(block) {
            return;
        }
        let slice = self.page(&[0x55; BLOCK]);
        let request = self.send(RequestKind::Read, block * BLOCK as u64, Some(slice));
        self.wait_for(request);
        let mut content = vec![0; BLOCK];
        slice.copy_out(0, &mut content);
        assert!(content[..] == self.ideal.last(block)[..], "block {block} reads as what the guest has not written");
    }

    fn set_bit(&mut self, block: u64, is_used: bool) {
        // The first data block is 1.
        let (byte, bit) = ((block - 1) as usize / 8, (block - 1) % 8);
        let bitmap = self.cache.get_mut(&self.bitmap).expect("known");
        bitmap[byte] = bitmap[byte] & !(1 << bit) | u8::from(is_used) << bit;
    }

    /// Waits until a transaction can be begun.
    fn begin(&mut self) {
        while self.committing.is_some() {
            assert!(!self.pending.is_empty(), "a commit waits for nothing");
            self.end_one();
        }
        let tail = self.live.first().map_or(self.builder.position, |logged| logged.position);
        if self.builder.format.distance(tail, self.builder.position) > LIVE_MAX {
            self.pass_everything();
        }
    }

    /// Sends a transaction; it is on its way when this returns.
    fn commit(&mut self, puts: &[u64], revokes: Vec<u64>, becomes: Vec<(u64, Use)>) {
        let blocks: Vec<(u64, Vec<u8>)> = puts.iter().map(|block| (*block, self.cache[block].clone())).collect();
        let (position, sequence) = (self.builder.position, self.builder.sequence);
        let transaction = Transaction { blocks, revokes, ..Transaction::default() };
        let mut log = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        let logged = Logged { sequence, position, blocks: puts.to_vec() };
        // It ends only when the last of these has, which is none of those before.
        self.committing = Some(Committing { logged, requests: vec![u32::MAX], becomes });
        self.holds.insert(u32::MAX, 1);
        for block in puts {
            self.clean.remove(block);
        }
        let last = log.len() - 1;
        for (index, (position, block)) in log.into_iter().enumerate() {
            if index == last {
                self.flush();
            }
            self.log.insert(position, block.clone());
            let slice = self.page(&block);
            let next = self.next_request + 1;
            if index == last && let Some(committing) = &mut self.committing {
                self.holds.remove(&u32::MAX);
                committing.requests = vec![next];
                self.holds.insert(next, 0);
            }
            let request = self.send(RequestKind::Write, self.log_at[position as usize], Some(slice));
            if index != last {
                self.wait_for(request);
            }
        }
    }

    /// Allocates, frees and changes blocks, as it comes.
    pub fn random_commit(&mut self) {
        self.begin();
        let (mut puts, mut revokes, mut becomes) = (Vec::new(), Vec::new(), Vec::new());
        for block in self.metadata.clone().into_iter().chain(self.dynamic.clone()) {
            if self.busy.contains_key(&block) || self.random.below(3) != 0 || block == self.bitmap {
                continue;
            }
            match (self.used_as[&block], self.dynamic.contains(&block), self.random.below(3)) {
                (used, true, 0) if used != Use::Free => {
                    if used == Use::Metadata {
                        revokes.push(block);
                    }
                    self.clean.remove(&block);
                    self.set_bit(block, false);
                    becomes.push((block, Use::Free));
                }
                (Use::Free, _, 0) => {
                    let content = self.content(&[0; BLOCK]);
                    let request = self.send_home(block, 0, &content);
                    self.wait_for(request);
                    self.set_bit(block, true);
                    becomes.push((block, Use::Data));
                }
                (Use::Data, ..) => {}
                (used, ..) => {
                    let content = self.content(&self.cache[&block].clone());
                    self.cache.insert(block, content);
                    if used == Use::Free {
                        self.set_bit(block, true);
                        becomes.push((block, Use::Metadata));
                    }
                    puts.push(block);
                }
            }
        }
        self.finish(puts, revokes, becomes);
    }

    fn finish(&mut self, mut puts: Vec<u64>, revokes: Vec<u64>, becomes: Vec<(u64, Use)>) {
        if let Some(request) = self.busy.get(&self.bitmap).copied() {
            self.wait_for(request);
        }
        if !becomes.is_empty() {
            puts.push(self.bitmap);
        }
        if !puts.is_empty() {
            self.commit(&puts, revokes, becomes);
        }
    }

    /// Commits one block with other content, and waits.
    pub fn commit_one(&mut self, block: u64) {
        let content = self.content(&self.cache[&block].clone());
        self.commit_content(block, content);
    }

    pub fn commit_escaped(&mut self, block: u64) {
        let mut content = vec![0x77; BLOCK];
        content[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        self.commit_content(block, content);
    }

    fn commit_content(&mut self, block: u64, content: Vec<u8>) {
        self.begin();
        self.cache.insert(block, content);
        let mut becomes = Vec::new();
        if self.used_as[&block] == Use::Free {
            self.set_bit(block, true);
            becomes.push((block, Use::Metadata));
        }
        self.finish(vec![block], Vec::new(), becomes);
        self.settle();
    }

    /// Frees a block of metadata, and waits.
    pub fn free(&mut self, block: u64) {
        self.begin();
        self.clean.remove(&block);
        self.set_bit(block, false);
        self.finish(Vec::new(), vec![block], vec![(block, Use::Free)]);
        self.settle();
    }

    /// Makes a free block data, and waits.
    pub fn reuse_as_data(&mut self, block: u64) {
        self.begin();
        let content = self.content(&[0; BLOCK]);
        self.send_home(block, 0, &content);
        self.settle();
        self.set_bit(block, true);
        self.finish(Vec::new(), Vec::new(), vec![(block, Use::Data)]);
        self.settle();
    }

    fn write_superblock(&mut self, start: u32, sequence: u32) {
        let mut block = self.superblock.clone();
        SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        self.superblocks.push(block.clone());
        let slice = self.page(&block);
        let request = self.send(RequestKind::Write, self.log_at[0], Some(slice));
        self.wait_for(request);
        self.superblocks.drain(..self.superblocks.len() - 1);
        self.check();
    }

    /// Everything in the log goes home, and the log begins anew behind it.
    pub fn pass_everything(&mut self) {
        self.pass(usize::MAX);
    }

    /// The log begins later: the guest has written home what was in it.
    pub fn move_tail(&mut self) {
        let count = self.random.below(self.live.len() as u64 + 1) as usize;
        self.pass(count);
    }

    fn pass(&mut self, count: usize) {
        let count = count.min(self.live.len());
        if count == 0 {
            return;
        }
        let passed: HashSet<u64> = self.live[..count].iter().flat_map(|logged| logged.blocks.clone()).collect();
        for block in passed {
            let is_later = self.live[count..].iter().any(|logged| logged.blocks.contains(&block));
            if self.used_as[&block] != Use::Metadata || is_later {
                continue;
            }
            while self.is_committing(block) {
                self.end_one();
            }
            if self.used_as[&block] == Use::Metadata && !self.clean.contains(&block) {
                let last = self.live.iter().rposition(|logged| logged.blocks.contains(&block));
                if last.is_some_and(|last| last < count) {
                    self.write_home(block);
                }
            }
        }
        for request in self.busy.values().copied().collect::<Vec<_>>() {
            self.wait_for(request);
        }
        self.flush();
        let next = self.live.get(count).map(|logged| (logged.position, logged.sequence));
        let committing = || self.committing.as_ref().map(|of| (of.logged.position, of.logged.sequence));
        let (start, sequence) =
            next.or_else(committing).unwrap_or((self.builder.position, self.builder.sequence));
        self.live.drain(..count);
        self.write_superblock(start, sequence);
    }

    /// What recovery would leave now.
    fn check(&mut self) {
        self.nvm.check().expect("the books are right");
        let region = self.nvm.look_at_region(|medium| medium.bytes().to_vec()).expect("it has not failed");
        self.judge(&region);
    }

    fn replayed(&self, superblock: &[u8], last: u32) -> BTreeMap<u64, Vec<u8>> {
        let (superblock, format): (Superblock, Format) = Superblock::parse(superblock).expect("a superblock");
        let mut log = CompleteLog { blocks: &self.log, hidden: last.wrapping_add(1) };
        let plan = Replay::new(&mut log, &superblock, &format, &|_| true).expect("a good log");
        let mut replayed = BTreeMap::new();
        for block in plan.blocks() {
            let copy = block.newest();
            let mut data = vec![0; BLOCK];
            let Ok(_) = log.read(copy.position, &mut data);
            assert!(copy.restore(plan.format(), &mut data));
            replayed.insert(block.home(), data);
        }
        replayed
    }

    /// Whether a block may hold this: in one of the readings, the block being in use.
    fn is_allowed(&self, block: u64, content: &[u8], readings: &[BTreeMap<u64, Vec<u8>>]) -> bool {
        let (byte, bit) = ((block - 1) as usize / 8, (block - 1) % 8);
        readings.iter().any(|replayed| match replayed.get(&block) {
            Some(replayed) => replayed[..] == *content,
            None => self.ideal.possible(block).iter().any(|possible| possible[..] == *content),
        }) || readings.iter().any(|replayed| match replayed.get(&self.bitmap) {
            Some(bitmap) => bitmap[byte] >> bit & 1 == 0,
            None => self.ideal.possible(self.bitmap).iter().any(|bitmap| bitmap[byte] >> bit & 1 == 0),
        })
    }

    fn readings(&self, found: &Found) -> Vec<BTreeMap<u64, Vec<u8>>> {
        assert!(
            !jbd2::sequence::is_after(self.committed, found.sequence),
            "the guest was told that {} is committed, and the region ends with {}",
            self.committed,
            found.sequence
        );
        self.superblocks.iter().map(|superblock| self.replayed(superblock, found.sequence)).collect()
    }

    fn judge(&self, region: &[u8]) {
        let Some(found) = Found::read(region).expect("a region").filter(|found| found.owner.is_some()) else {
            assert!(self.next_request <= 1, "the region has no owner");
            return;
        };
        found.verify(region).expect("a good region");
        let readings = self.readings(&found);
        for block in self.metadata.iter().chain(&self.dynamic).copied() {
            let in_region = found.latest.get(&block).map(|header| found.content(region, header).to_vec());
            let (place, possible) = match in_region {
                Some(content) => ("in the region", vec![Arc::from(content)]),
                None => ("at home", self.ours.possible(block)),
            };
            for content in possible {
                assert!(
                    self.is_allowed(block, &content, &readings),
                    "block {block} {place} is not what a complete journal would leave there (transaction {})",
                    found.sequence
                );
            }
        }
        let known = |block: &u64| self.metadata.contains(block) || self.dynamic.contains(block);
        assert!(found.latest.keys().all(known), "the region holds what the guest never wrote");
    }

    /// The power fails, and what is left is really recovered, in copies.
    pub fn recover(&mut self) {
        let region = self.nvm.look_at_region(|medium| medium.bytes().to_vec()).expect("it has not failed");
        let found = Found::read(&region).expect("a region").expect("a region");
        let path: PathBuf = self.directory.path().join("recovered");
        std::fs::copy(self.directory.path().join("image"), &path).expect("copied");
        let copy = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("the copy");
        for block in self.ours.written().collect::<Vec<_>>() {
            let possible = self.ours.possible(block);
            let content = &possible[self.random.below(possible.len() as u64) as usize];
            copy.write_all_at(content, block * BLOCK as u64).expect("written");
        }
        let medium = SimulatedMedium::from_image(region);
        let nvm = NvmDisk::with_medium(NvmOptions::new("left"), 0, Box::new(medium)).expect("a good region");
        let image = recovery::Disk::open(&path, Access::Write).expect("the copy");
        nvm.finish_earlier(&image).expect("recovered");
        let readings = self.readings(&found);
        for block in self.metadata.iter().chain(&self.dynamic).copied() {
            let mut content = vec![0; BLOCK];
            copy.read_exact_at(&mut content, block * BLOCK as u64).expect("read");
            assert!(self.is_allowed(block, &content, &readings), "block {block} is not as a complete journal has it");
        }
        std::fs::remove_file(&path).expect("removed");
    }
}

fn bytes_of(operation: &DiskOperation) -> Vec<u8> {
    let mut bytes = Vec::new();
    if operation.operation == Operation::Write {
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
    }
    bytes
}
