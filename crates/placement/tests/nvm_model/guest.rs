//! The simulated guest, by jbd2's rules.

mod death;
mod judge;
mod storage;

use super::disk::Disk;
use block_route::{Plan, RequestKind, Route, Start};
use death::{Death, Sent, journals_options, observed};
use guest_memory::{MemorySlice, MemoryTable, PageId, RegionDescriptor, VmMemory};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Superblock, SuperblockEdit};
use nvm_journal::medium::SimulatedMedium;
use placement::{
    AreaDirectory, Change, DiskRoute, Journals, ManyAppends, NvmDisk, NvmOptions, NvmReport, PlacementKind,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use storage::{Pending, Turn};
use write_log::WriteLog;

const BLOCK: usize = 1024;
const IMAGE_BLOCKS: u64 = 4096;
const REGION_BYTES: usize = 1 << 20;
const PAGES: u32 = 512;
const BLOCKS_EACH: u64 = 6;
/// Log blocks that are live at most.
const LIVE_MAX: u32 = 500;

/// A generator of its own, and it stays: the seeded faults (crates/crash-explorer/mutants.list) were tried with the
/// sequences that this model's seeds have here.
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
    /// Its commit block is in the log, and a flush for it is on its way.
    is_flushing: bool,
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
    /// What the ideal disk may have held when it was told so, what the log had of each block without that transaction, and what was written
    /// home since.
    ideal_then: Disk,
    before_last: BTreeMap<u64, Vec<u8>>,
    sent_before_last: HashMap<u64, Vec<Vec<u8>>>,
    /// How often a power cut was recovered from with a transaction whose appends might not be there: they were not, and they were.
    pub recovered: [u64; 2],
    ideal: Disk,
    ours: Disk,
    pending: Vec<Pending>,
    holds: HashMap<u32, u32>,
    flushes: HashMap<u32, u64>,
    /// What was written home of each block since it was committed last.
    sent_home: HashMap<u64, Vec<Vec<u8>>>,
    /// The log is to leave the region, or has left it.
    is_leaving: bool,
    /// The guest unmounts, and mounts again: its log may be empty on storage, and no region's.
    may_be_closed: bool,
    /// See [`Guest::tell`].
    is_told: bool,
    journals: Arc<Journals>,
    /// Requests that ended with an error.
    failed: HashSet<u32>,
    has_broken: bool,
    /// See [`Guest::leave_and_fail`].
    fails_after: Option<u32>,
    /// That has come to pass.
    pub(super) has_failed_one: bool,
    /// What happens before the next transaction's commit block is sent.
    midway: Option<fn(&mut Self)>,
    are_flushes_broken: bool,
    /// Flushes of another file system's kernel, which fail.
    strangers: HashSet<u32>,
    next_request: u32,
    next_page: u32,
    next_operation: u64,
    next_content: u64,
    images: Arc<Mutex<Vec<Vec<u8>>>>,
    death: Arc<Mutex<Death>>,
    deaths: u64,
    /// Requests that are not answered.
    sent: HashMap<u32, Sent>,
    table: Option<Arc<MemoryTable>>,
    nvm: Arc<NvmDisk>,
    route: DiskRoute,
    memory: Arc<VmMemory>,
    file: std::fs::File,
    /// What the worker writes and flushes by itself, past its route; and how long that was, in bytes, and how many flushes, when it was
    /// looked at last.
    write_log: Arc<WriteLog>,
    own_flushes: (u64, usize),
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
        let images = Arc::new(Mutex::new(Vec::new()));
        let death = Arc::new(Mutex::new(Death::default()));
        let medium = observed(SimulatedMedium::new(REGION_BYTES), seed, &images, &death);
        let mut random = Random::new(seed);
        let mut options = NvmOptions::new("the simulated region");
        options.byte_level = random.below(5) != 0;
        options.delayed_checkpoint = random.below(6) != 0 || seed < 10;
        options.log_everything = random.below(6) == 0;
        options.append_home_bytes_min = if random.below(3) == 0 { 3 * BLOCK as u64 } else { 0 };
        options.early_batch_bytes = random.below(3) * BLOCK as u64;
        options.early_run_bytes = random.below(3) * BLOCK as u64;
        options.early_fill_percent = 1;
        options.mark_age = Duration::from_secs(random.below(2));
        options.checkpoint_slices = [4, u32::MAX][random.below(2) as usize];
        options.checkpoint_slice_bytes_min = [BLOCK as u64, 4 * BLOCK as u64, 1 << 20][random.below(3) as usize];
        // Of its own sequence, so that the work of each seed is what it was.
        let mut of_flushes = Random::new(seed ^ 0x666c_7573_6865);
        options.many_appends = [ManyAppends::Home, ManyAppends::Logged][of_flushes.below(2) as usize];
        options.checkpoint_patience = Duration::from_secs(of_flushes.below(2));
        options.pipelined = Random::new(seed ^ 0x7069_7065).below(2) == 0;
        let nvm = Arc::new(NvmDisk::with_medium(options, 0, Box::new(medium)).expect("an empty region"));
        let memory = VmMemory::new();
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
        let area = area.expect("a directory");
        death.lock().expect("no panic under this lock").knows(&path, area.path());
        let write_log = Arc::new(WriteLog::create(&directory.path().join("log")).expect("a log"));
        let options = journals_options(path, &nvm, &write_log);
        let journals = Journals::new(&memory, area, options).expect("journals");
        memory.simulate_protection();
        let base: Arc<[u8]> = Arc::from(image);
        let of = |block: &u64| (*block, image[*block as usize * BLOCK..][..BLOCK].to_vec());
        let mut guest = Guest {
            write_log,
            own_flushes: (0, 0),
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
            ideal_then: Disk::new(Arc::clone(&base), BLOCK),
            before_last: BTreeMap::new(),
            sent_before_last: HashMap::new(),
            recovered: [0; 2],
            ideal: Disk::new(Arc::clone(&base), BLOCK),
            ours: Disk::new(base, BLOCK),
            pending: Vec::new(),
            holds: HashMap::new(),
            flushes: HashMap::new(),
            sent_home: HashMap::new(),
            is_leaving: false,
            may_be_closed: false,
            is_told: std::env::var_os("AMBERLOG_NVM_MODEL_TRACE").is_some(),
            journals: Arc::clone(&journals),
            failed: HashSet::new(),
            has_broken: false,
            fails_after: None,
            has_failed_one: false,
            midway: None,
            are_flushes_broken: false,
            strangers: HashSet::new(),
            next_request: 0,
            next_page: 0,
            next_operation: 0,
            next_content: seed << 20,
            images,
            death,
            deaths: 0,
            sent: HashMap::new(),
            table: None,
            nvm,
            route: DiskRoute::new(journals, 0),
            memory,
            file,
            directory,
        };
        let table = Arc::new(guest.map());
        guest.table = Some(Arc::clone(&table));
        guest.route.started(Start::Fresh, &table).expect("started");
        guest.write_superblock(guest.builder.position, guest.builder.sequence);
        guest
    }

    /// Says what is going on, where AMBERLOG_NVM_MODEL_TRACE is set.
    fn tell(&self, what: impl FnOnce() -> String) {
        if self.is_told {
            eprintln!("{}", what());
        }
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

    /// What was done with the region.
    pub fn report(&self) -> NvmReport {
        self.nvm.report()
    }

    /// Whether appends go to the region wherever that has room.
    pub fn logs_appends(&self) -> bool {
        self.nvm.options.many_appends == ManyAppends::Logged
    }

    /// Whether a transaction is acknowledged before the flush of its appends.
    pub fn is_pipelined(&self) -> bool {
        self.nvm.options.pipelined
    }

    pub fn flush(&mut self) {
        let request = self.send(RequestKind::Flush, 0, None);
        self.wait_for(request);
    }

    /// A flush of a disk that may be broken.
    pub fn flush_in_vain(&mut self) {
        self.send(RequestKind::Flush, 0, None);
    }

    /// The kernel of another file system on the disk flushes it. That will fail, and only that kernel hears of it.
    pub fn stranger_flushes(&mut self) {
        self.strangers.insert(self.next_request + 1);
        self.send(RequestKind::Flush, 0, None);
    }

    /// Requests that ended with an error.
    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    /// The region's blocks are to go home.
    pub fn checkpoint(&mut self) {
        self.tell(|| "a checkpoint is wanted".to_owned());
        self.nvm.request_checkpoint();
        let mut plan = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        self.route.woken(&mut plan);
        self.carry_out(plan);
        self.check();
    }

    /// The log is to be on storage from now on: one step towards that. True when it is.
    pub fn leave(&mut self) -> bool {
        let has_left = self.try_leave();
        assert!(has_left.is_ok() || self.has_broken, "{has_left:?}");
        has_left.unwrap_or(false)
    }

    /// The log leaves, or cannot, while flushes of others fail.
    pub fn leave_beside_strangers(&mut self) {
        for _ in 0..200 {
            // Who cannot leave now has not left.
            if self.try_leave().unwrap_or(true) {
                return;
            }
            if self.random.below(6) == 0 {
                self.stranger_flushes();
            }
            self.end_one();
        }
    }

    fn try_leave(&mut self) -> std::io::Result<bool> {
        self.tell(|| "the log is to leave".to_owned());
        let log = self.journals.logs()[0].index();
        if !self.is_leaving {
            self.is_leaving = true;
            let change = self.journals.change_placement(log, PlacementKind::Storage).expect("possible");
            assert_eq!(change, Change::HandOver);
        }
        let mut plan = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        let has_left = self.route.hand_over(log, &mut plan);
        self.carry_out(plan);
        self.check();
        has_left
    }

    /// The same, of which the disk fails one of the route's own operations, the one after so many; the guest goes on committing
    /// a block. True when it came to that.
    pub fn leave_and_fail(&mut self, after: u32, block: u64) -> bool {
        self.fails_after = Some(after);
        for _ in 0..1000 {
            match self.try_leave() {
                Ok(true) => break,
                Err(_) => {
                    if let [superblock] = &self.superblocks_on_storage()[..] {
                        self.ours.is_now(self.log_at[0] / BLOCK as u64, superblock);
                    }
                    return true;
                }
                Ok(false) if self.committing.is_none() && !self.busy.contains_key(&block) => {
                    let content = self.content(&self.cache[&block].clone());
                    self.cache.insert(block, content);
                    self.begin();
                    self.finish(vec![block], Vec::new(), Vec::new());
                }
                Ok(false) => self.end_one(),
            }
        }
        assert!(self.fails_after.is_some(), "an operation failed, and the log has left");
        self.fails_after = None;
        false
    }

    /// Commits a block that was free, of which the disk fails one of the route's own operations, the one after so many. True
    /// when it came to that.
    pub fn commit_and_fail(&mut self, after: u32, block: u64) -> bool {
        self.fails_after = Some(after);
        self.commit_one(block);
        self.fails_after = None;
        self.has_failed_one
    }

    /// Who wished the log elsewhere does not wait any longer.
    pub fn stay(&mut self) {
        let log = self.journals.logs()[0].index();
        let mut plan = Plan::default();
        self.images.lock().expect("no panic under this lock").clear();
        self.route.give_up_hand_over(log, &mut plan);
        self.carry_out(plan);
        self.check();
    }

    /// All that is committed is to be home.
    pub fn empty(&mut self) {
        let last = self.committed;
        let journals = Arc::clone(&self.journals);
        let waiting = std::thread::spawn(move || journals.write_home(Duration::from_secs(60)));
        while !waiting.is_finished() {
            let mut plan = Plan::default();
            self.images.lock().expect("no panic under this lock").clear();
            self.route.woken(&mut plan);
            self.carry_out(plan);
            self.check();
            self.end_one();
        }
        waiting.join().expect("no panic").expect("written home");
        if self.is_leaving {
            return;
        }
        for (block, content) in self.replayed(&self.superblocks[0], self.committed) {
            let is_later = |logged: &Logged| logged.blocks.contains(&block) && logged.sequence > last;
            let is_overwritten =
                self.sent_home.get(&block).is_some_and(|sent| sent.iter().any(|sent| *sent != content));
            if self.used_as[&block] != Use::Metadata
                || self.is_committing(block)
                || self.live.iter().any(is_later)
                || is_overwritten
            {
                continue;
            }
            let is_home = self.ours.possible(block).iter().all(|possible| possible[..] == content[..]);
            assert!(is_home, "block {block} is not home");
        }
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

    /// The guest writes something else there, past its journal, and then what was there before, while storage does this and that.
    pub fn overwrite_and_back(&mut self, block: u64) {
        if !self.may_overwrite(block) {
            return;
        }
        let before = self.cache[&block].clone();
        self.overwrite(block);
        while self.busy.contains_key(&block) {
            self.end_one();
        }
        if self.may_overwrite(block) {
            self.send_home(block, 0, &before);
        }
    }

    /// The guest writes what the block is committed as, after something else.
    pub fn overwrite_before(&mut self, block: u64, then: impl FnOnce(&mut Self)) {
        let before = self.cache[&block].clone();
        self.overwrite(block);
        self.settle();
        then(self);
        self.send_home(block, 0, &before);
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

    fn read_at(&mut self, offset: u64) -> Vec<u8> {
        let slice = self.page(&[0x55; BLOCK]);
        let request = self.send(RequestKind::Read, offset, Some(slice));
        self.wait_for(request);
        let mut content = vec![0; BLOCK];
        slice.copy_out(0, &mut content);
        content
    }

    /// A kernel that mounts without a reset: it has blocks in its cache before it reads the log, and replays that over them.
    /// Whether it mounts or only reads, nothing changes for the guest.
    pub fn look_mounted(&mut self) {
        self.settle();
        if self.committing.is_some() || self.is_leaving {
            return;
        }
        let blocks: Vec<u64> =
            self.metadata.iter().chain(&self.dynamic).copied().filter(|b| self.used_as[b] == Use::Metadata).collect();
        let seen: Vec<Vec<u8>> = blocks.iter().map(|block| self.read_at(block * BLOCK as u64)).collect();
        let log: HashMap<u32, Vec<u8>> = (0..).zip(self.log_at.clone()).map(|(p, at)| (p, self.read_at(at))).collect();
        let (replayed, last) = judge::replay_shown(&log);
        assert_eq!(last, self.committed, "the kernel goes on behind the last transaction");
        let expected = self.replayed(&self.superblocks[0], self.committed);
        for (block, seen) in blocks.iter().zip(&seen) {
            let found = replayed.get(block).unwrap_or(seen);
            let should = expected.get(block).cloned().unwrap_or_else(|| self.ideal.last(*block).to_vec());
            assert!(*found == should, "block {block} of a file system that is mounted again");
            assert!(self.read_at(block * BLOCK as u64) == *seen, "block {block} is another once its log was read");
        }
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
        self.committing = Some(Committing { logged, requests: vec![u32::MAX], becomes, is_flushing: false });
        self.holds.insert(u32::MAX, 1);
        for block in puts {
            self.clean.remove(block);
        }
        let last = log.len() - 1;
        for (index, (position, block)) in log.into_iter().enumerate() {
            if index == last {
                if let Some(midway) = self.midway.take() {
                    midway(self);
                }
                self.flush();
            }
            self.log.insert(position, block.clone());
            let slice = self.page(&block);
            let next = self.next_request + 1;
            if index == last
                && let Some(committing) = &mut self.committing
            {
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

    /// The same, with something that happens when all of the transaction but its commit block is in the log.
    pub fn commit_around(&mut self, block: u64, midway: fn(&mut Self)) {
        self.midway = Some(midway);
        self.commit_one(block);
    }

    /// Its VMM goes on over another connection, and had not heard that the last transaction is in the log: all of it is sent again.
    pub fn last_commit_again(&mut self) {
        let logged = self.live.last().expect("it has committed");
        let (mut position, end) = (logged.position, self.builder.position);
        let table = Arc::clone(self.table.as_ref().expect("it has memory"));
        self.route.started(Start::Resumed, &table).expect("started");
        while position != end {
            let block = self.log[&position].clone();
            let slice = self.page(&block);
            let request = self.send_for(Turn::Again, RequestKind::Write, self.log_at[position as usize], Some(slice));
            self.wait_for(request);
            position = self.builder.format.next(position);
        }
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

    /// One transaction frees a block of data, makes another one, that was free, metadata, and changes two of metadata; it is on its way when this
    /// returns.
    pub fn free_and_append(&mut self, freed: u64, append: u64) {
        self.begin();
        self.clean.remove(&freed);
        self.set_bit(freed, false);
        let content = self.content(&[0; BLOCK]);
        self.cache.insert(append, content);
        self.set_bit(append, true);
        let changed = [self.metadata[0], self.metadata[1]];
        for block in changed {
            let content = self.content(&self.cache[&block].clone());
            self.cache.insert(block, content);
        }
        let becomes = vec![(freed, Use::Free), (append, Use::Metadata)];
        self.finish(vec![append, changed[0], changed[1]], Vec::new(), becomes);
    }

    /// Whether a transaction is on its way that the guest was not told of.
    pub fn is_told_too_late(&self) -> bool {
        self.committing.is_some()
    }

    /// Whoever reads the block bitmap gets it as it was committed last, at home or not.
    pub fn reads_what_it_committed(&mut self) {
        let bitmap = self.bitmap;
        assert!(self.read_at(bitmap * BLOCK as u64) == self.cache[&bitmap], "the bitmap is not what was committed");
    }

    /// Whether the last transaction may be lost still.
    pub fn has_prepared(&self) -> bool {
        let found = self.nvm.look_at_region(|medium| nvm_journal::Found::read(medium.bytes()).expect("a region"));
        found.flatten().is_some_and(|found| found.prepared.is_some())
    }

    /// Whether a discard waits: nothing of it goes to storage. Nobody goes on with this guest.
    pub fn discard_waits(mut self, block: u64) -> bool {
        let (id, offset) = (block_route::RequestId(self.next_request + 1), block * BLOCK as u64);
        let request = block_route::Request { id, kind: RequestKind::Discard, offset, len: BLOCK as u64, segments: &[] };
        let mut plan = Plan::default();
        self.route.route(&request, &mut plan);
        self.route.end_of_pass(&mut plan);
        !plan.actions.iter().any(|action| matches!(action, block_route::PlanAction::Disk(_)))
    }

    /// The guest unmounts, and is told that it cannot.
    pub fn close_in_vain(&mut self) {
        let sequence = self.builder.sequence;
        self.write_superblock(0, sequence);
        self.settle();
    }

    /// The guest writes a block home, and does not wait for that.
    pub fn write_home_soon(&mut self, block: u64) {
        let content = self.cache[&block].clone();
        self.send_home(block, 0, &content);
    }

    /// The guest writes a block home while its last transaction may be lost still. True when that was absorbed: it is answered, and storage was told
    /// of nothing.
    pub fn write_home_ahead(&mut self, block: u64) -> bool {
        let operations = self.next_operation;
        let is_ahead = self.has_prepared();
        self.write_home_soon(block);
        is_ahead && !self.busy.contains_key(&block) && self.next_operation == operations
    }

    /// The disk fails the next of the route's own operations.
    pub fn fail_next(&mut self) {
        self.fails_after = Some(0);
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

    /// False when it failed: the log begins where it did.
    fn write_superblock(&mut self, start: u32, sequence: u32) -> bool {
        let mut block = self.superblock.clone();
        SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        self.superblocks.push(block.clone());
        let slice = self.page(&block);
        let request = self.send(RequestKind::Write, self.log_at[0], Some(slice));
        self.wait_for(request);
        if self.is_leaving {
            // As jbd2 does it (REQ_FUA).
            self.flush();
        }
        let is_done = !self.failed.contains(&request);
        if is_done {
            self.superblocks.drain(..self.superblocks.len() - 1);
        } else {
            self.superblocks.pop();
        }
        self.check();
        is_done
    }

    /// The guest unmounts, with home writes on their way or not, and mounts again.
    pub fn remount(&mut self) {
        if self.is_leaving {
            return;
        }
        self.begin();
        self.pass_everything();
        self.may_be_closed = true;
        let sequence = self.builder.sequence;
        assert!(self.write_superblock(0, sequence), "it cannot unmount");
        self.builder.position = self.builder.format.first;
        assert!(self.write_superblock(self.builder.position, sequence), "it cannot mount");
        self.may_be_closed = false;
        self.check();
    }

    /// Everything in the log goes home, and the log begins anew behind it.
    pub fn pass_everything(&mut self) {
        self.pass(usize::MAX);
    }

    /// The log begins with its last transaction, which has all that was in it before once more.
    pub fn pass_all_but_the_last(&mut self) {
        self.pass(self.live.len() - 1);
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
        let (start, sequence) = next.or_else(committing).unwrap_or((self.builder.position, self.builder.sequence));
        let passed: Vec<_> = self.live.drain(..count).collect();
        if !self.write_superblock(start, sequence) {
            // A flush has failed since, and what was written home may be lost: all of that goes there once more.
            self.live.splice(..0, passed);
            self.clean.clear();
            self.pass(count);
        }
    }
}
