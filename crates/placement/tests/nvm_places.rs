//! A disk with regions of NVM has the same route as any other: two file systems on it have a region each, and a journal goes from a region
//! to memory, to storage and back while its guest runs.

use block_route::{
    Buffer, DiskOperation, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Start, Status,
};
use guest_memory::{MemoryTable, PAGE_BYTES, PageId, RegionDescriptor, VmMemory};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Content, LogRead, SuperblockEdit};
use nvm_journal::medium::{Durability, Medium, MediumFile, OpenOptions, RegionChoice};
use placement::{
    AreaDirectory, Change, DiskOptions, DiskRoute, Journals, JournalsOptions, KeptLog, ManyAppends, NvmDisk,
    NvmOptions, PlacementKind, recover_image,
};
use recovery::{Access, Disk};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use write_log::{EntryKind, WriteLog, entries};

#[path = "nvm_places/acknowledged.rs"]
mod acknowledged;
#[path = "nvm_places/distrusted.rs"]
mod distrusted;
#[path = "nvm_places/failures.rs"]
mod failures;
#[path = "nvm_places/followed.rs"]
mod followed;
#[path = "nvm_places/leaving.rs"]
mod leaving;
#[path = "nvm_places/together.rs"]
mod together;

const BLOCK: u64 = 4096;
const PAGES: u32 = 512;
const FILE_SYSTEM_BLOCKS: u64 = 4096;
const PARTITIONS: [u64; 2] = [1 << 20, 24 << 20];
const DISK_BYTES: u64 = 48 << 20;

/// A file system as its guest has it.
struct Mounted {
    start: u64,
    log_at: Vec<u64>,
    superblock: Vec<u8>,
    builder: LogBuilder,
}

struct Rig {
    file: std::fs::File,
    memory: Arc<VmMemory>,
    journals: Arc<Journals>,
    route: DiskRoute,
    file_systems: Vec<Mounted>,
    next_page: u32,
    next_request: u32,
    image: PathBuf,
    region: PathBuf,
    hook: Hook,
    each_step: EachStep,
    /// Operations whose ends are awaited, and which those are to be.
    held: Vec<DiskOperation>,
    holds: Box<dyn Fn(&DiskOperation) -> bool>,
    /// What storage does, and says that it failed.
    fails: Box<dyn Fn(&DiskOperation) -> bool>,
    /// What the next worker sends to the image by itself is written down here.
    write_log: Option<Arc<WriteLog>>,
    /// Requests may fail; those that did.
    may_fail: bool,
    /// Requests that were held, and those that were let go again.
    were_held: Vec<RequestId>,
    released: Vec<RequestId>,
    failed: Vec<RequestId>,
    _directory: tempfile::TempDir,
}

fn partition_table() -> Vec<u8> {
    let mut sector = vec![0; 512];
    for (index, start) in PARTITIONS.iter().enumerate() {
        let entry = &mut sector[446 + 16 * index..][..16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
        entry[12..16].copy_from_slice(&((FILE_SYSTEM_BLOCKS * BLOCK / 512) as u32).to_le_bytes());
    }
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

fn mounted(image: &[u8], start: u64) -> Mounted {
    let found = extfs::discover(&image.to_vec()).expect("readable");
    let found = found.iter().find(|found| found.offset == start).expect("a file system");
    let extents = found.journal.extents(&found.superblock);
    let runs = extents.iter().flat_map(|extent| (0..u64::from(extent.count)).map(|index| extent.physical + index));
    let log_at: Vec<u64> = runs.map(|block| start + block * BLOCK).collect();
    let superblock = image[log_at[0] as usize..][..BLOCK as usize].to_vec();
    let (parsed, format) = jbd2::Superblock::parse(&superblock).expect("a journal");
    Mounted { start, log_at, superblock, builder: LogBuilder::new(format, parsed.first, parsed.sequence + 1) }
}

/// What is done, once, when the region is fenced next; that fails where this does.
type Hook = Arc<Mutex<Option<Box<dyn FnOnce() -> std::io::Result<()> + Send>>>>;

/// Has this done at each fence of the region, until it fails.
fn at_each_fence(hook: &Hook, mut fence: impl FnMut() -> std::io::Result<()> + Send + 'static) {
    let again = Arc::clone(hook);
    let once = move || fence().map(|()| at_each_fence(&again, fence));
    *hook.lock().expect("no panic") = Some(Box::new(once));
}

/// What is done each time that something is stored to the region, and when.
type EachStep = Arc<Mutex<Option<(Moment, Box<dyn FnMut() + Send>)>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Before,
    After,
}

/// A region with hooks in it.
struct Hooked {
    medium: Box<dyn Medium>,
    hook: Hook,
    each_step: EachStep,
}

impl Hooked {
    fn stepped(&self, now: Moment) {
        if let Some((moment, each_step)) = &mut *self.each_step.lock().expect("no panic")
            && *moment == now
        {
            each_step();
        }
    }
}

impl Medium for Hooked {
    fn bytes(&self) -> &[u8] {
        self.medium.bytes()
    }

    fn store_word(&mut self, offset: u64, value: u64) {
        self.stepped(Moment::Before);
        self.medium.store_word(offset, value);
        self.stepped(Moment::After);
    }

    fn write_back(&mut self, offset: u64, len: u64) {
        self.medium.write_back(offset, len);
    }

    fn stream(&mut self, offset: u64, bytes: &[u8]) {
        self.medium.stream(offset, bytes);
        self.stepped(Moment::After);
    }

    fn fence(&mut self) -> std::io::Result<()> {
        let hook = self.hook.lock().expect("no panic").take();
        if let Some(hook) = hook {
            hook()?;
        }
        self.medium.fence()
    }

    fn durability(&self) -> Durability {
        self.medium.durability()
    }
}

/// A log in its own place.
struct OwnPlace<'a> {
    file: &'a std::fs::File,
    log_at: &'a [u64],
}

impl LogRead for OwnPlace<'_> {
    type Error = std::io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::io::Result<Content> {
        self.file.read_exact_at(buffer, self.log_at[position as usize])?;
        Ok(Content::Present)
    }
}

/// Opens regions that have hooks in them.
fn hooked(options: NvmOptions, hook: &Hook, each_step: &EachStep) -> NvmDisk {
    let region = |choice| {
        let options =
            OpenOptions { region: choice, create_bytes: Some(options.create_bytes), ..OpenOptions::new(&options.path) };
        let file = MediumFile::open(options).expect("a region");
        let offset = file.offset();
        let medium = Box::new(file.map().expect("mapped"));
        (offset, Box::new(Hooked { medium, hook: Arc::clone(hook), each_step: Arc::clone(each_step) }))
    };
    let (offset, medium) = region(options.region);
    let more: Vec<_> = options.more_regions.iter().map(|choice| region(*choice)).collect();
    let mut disk = NvmDisk::with_medium(options, offset, medium).expect("a region");
    for (offset, medium) in more {
        disk.add_region(offset, medium).expect("a region");
    }
    disk
}

impl Rig {
    /// A disk with two partitions, an ext4 file system on each, and so many regions.
    fn new(regions: u32) -> Self {
        Self::with(regions, |_| {})
    }

    fn with(regions: u32, change: impl FnOnce(&mut NvmOptions)) -> Self {
        Self::on(regions, change, |image| image.to_owned())
    }

    /// The same with an image that is shown as another file, from when the file systems are on it.
    fn on(regions: u32, change: impl FnOnce(&mut NvmOptions), shown: impl FnOnce(&Path) -> PathBuf) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (image, region) = (directory.path().join("image"), directory.path().join("region"));
        let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(&image).expect("made");
        file.set_len(DISK_BYTES).expect("a length");
        for start in PARTITIONS {
            let offset = format!("offset={start}");
            let arguments =
                ["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4", "-O", "^metadata_csum", "-E", &offset];
            let blocks = FILE_SYSTEM_BLOCKS.to_string();
            let made = Command::new("mke2fs").args(arguments).arg(&image).arg(blocks).status();
            assert!(made.expect("e2fsprogs are installed").success());
        }
        file.write_all_at(&partition_table(), 0).expect("a partition table");
        let bytes = std::fs::read(&image).expect("the image");
        let (hook, each_step) = (Hook::default(), EachStep::default());
        let mut options = NvmOptions::new(&region);
        options.create_bytes = 32 << 20;
        options.many_appends = ManyAppends::Home;
        options.checkpoint_patience = Duration::ZERO;
        change(&mut options);
        options.region = RegionChoice { index: 0, count: 2 };
        options.more_regions = (1..regions).map(|index| RegionChoice { index, count: 2 }).collect();
        let options = DiskOptions {
            name: "disk".to_owned(),
            path: shown(&image),
            placement: PlacementKind::Nvm,
            honour_flush: false,
            read_only: false,
            nvm: Some(Arc::new(hooked(options, &hook, &each_step))),
            durable_within: None,
            remote: None,
            write_log: None,
        };
        let memory = VmMemory::new();
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
        let options = JournalsOptions { disks: vec![options], budget_bytes: 64 << 20, tracer: None };
        let journals = Journals::new(&memory, area.expect("a directory"), options).expect("journals");
        memory.simulate_protection();
        let table = Arc::new(ram(&memory, &directory.path().join("ram")));
        let mut route = DiskRoute::new(Arc::clone(&journals), 0);
        route.started(Start::Fresh, &table).expect("started");
        Rig {
            file,
            memory,
            journals,
            route,
            file_systems: PARTITIONS.iter().map(|start| mounted(&bytes, *start)).collect(),
            next_page: 0,
            next_request: 0,
            image,
            region,
            hook,
            each_step,
            held: Vec::new(),
            holds: Box::new(|_| false),
            fails: Box::new(|_| false),
            write_log: None,
            may_fail: false,
            were_held: Vec::new(),
            released: Vec::new(),
            failed: Vec::new(),
            _directory: directory,
        }
    }

    /// What a crash at this moment leaves, brought home from the first region: the image.
    fn recovered(&self) -> Vec<u8> {
        self.recovered_beside(&std::fs::read(&self.image).expect("read")).expect("they belong together")
    }

    /// The same of this image and the first region as it is.
    fn recovered_beside(&self, image_bytes: &[u8]) -> Result<Vec<u8>, recovery::Error> {
        let (image, region) = (self.image.with_extension("left"), self.region.with_extension("left"));
        std::fs::write(&image, image_bytes).expect("copied");
        std::fs::copy(&self.region, &region).expect("copied");
        let options = OpenOptions { region: RegionChoice { index: 0, count: 2 }, ..OpenOptions::new(&region) };
        let disk = Disk::open(&image, Access::Write).expect("an image");
        recover_image(&disk, options, Access::Write)?;
        Ok(std::fs::read(&image).expect("read"))
    }

    fn recovered_block(&self, block: u64) -> Vec<u8> {
        let at = self.home_at(0, block) as usize;
        self.recovered()[at..][..BLOCK as usize].to_vec()
    }

    fn log(&self, which: usize) -> Arc<KeptLog> {
        let start = self.file_systems[which].start;
        self.journals.logs().into_iter().find(|log| log.place().home_start == start).expect("its log")
    }

    /// Routes a request, and has storage do all that comes of it. Gives the bytes that were written there.
    fn request(&mut self, kind: RequestKind, offset: u64, content: &mut [u8]) -> u64 {
        self.next_request += 1;
        let page = PageId(self.next_page % PAGES);
        self.next_page += 1;
        self.memory.simulated_guest_write(page, 0, content);
        let slice = self.memory.page(page).expect("a page").sub(0, content.len());
        let segments = if content.is_empty() { Vec::new() } else { vec![slice] };
        let id = RequestId(self.next_request);
        let len = content.len() as u64;
        let mut plan = Plan::default();
        self.route.route(&Request { id, kind, offset, len, segments: &segments }, &mut plan);
        self.route.end_of_pass(&mut plan);
        let written = self.carry_out(plan);
        slice.copy_out(0, content);
        written
    }

    /// How many requests wait.
    fn waiting(&self) -> usize {
        self.were_held.iter().collect::<BTreeSet<_>>().into_iter().filter(|held| !self.released.contains(held)).count()
    }

    fn discard(&mut self, offset: u64, len: u64) {
        self.next_request += 1;
        let (id, kind) = (RequestId(self.next_request), RequestKind::Discard);
        let mut plan = Plan::default();
        self.route.route(&Request { id, kind, offset, len, segments: &[] }, &mut plan);
        self.route.end_of_pass(&mut plan);
        self.carry_out(plan);
    }

    fn carry_out(&mut self, plan: Plan) -> u64 {
        let mut written = 0;
        for action in plan.actions {
            match action {
                PlanAction::Disk(operation) if (self.holds)(&operation) => self.held.push(operation),
                PlanAction::Disk(operation) => written += self.end(operation),
                PlanAction::Release(request, status) if status != Status::Ok => {
                    assert!(self.may_fail, "{request:?}: {status:?}");
                    self.released.push(request);
                    self.failed.push(request);
                }
                PlanAction::Release(request, _) => self.released.push(request),
                PlanAction::Hold(request) => self.were_held.push(request),
            }
        }
        written
    }

    /// An operation ends. Gives the bytes that were written by that, and by what came of it.
    fn end(&mut self, operation: DiskOperation) -> u64 {
        let written = self.storage_does(&operation);
        let failed = (self.fails)(&operation).then(|| Err(std::io::Error::other("storage failed")));
        let mut plan = Plan::default();
        if let Some(ticket) = operation.ticket {
            self.route.disk_done(ticket, failed.unwrap_or(Ok(())), &mut plan);
        }
        written + self.carry_out(plan)
    }

    /// What is awaited ends.
    fn end_held(&mut self) {
        self.holds = Box::new(|_| false);
        for operation in std::mem::take(&mut self.held) {
            self.end(operation);
        }
    }

    /// One step of a log towards its own place.
    fn leave(&mut self, which: usize) -> std::io::Result<bool> {
        let mut plan = Plan::default();
        let has_left = self.route.hand_over(self.log(which).index(), &mut plan);
        self.carry_out(plan);
        has_left
    }

    /// The guest is gone, and the next one comes.
    fn start(&mut self, name: &str) -> std::io::Result<()> {
        let table = Arc::new(ram(&self.memory, &self.image.with_extension(name)));
        self.route.started(Start::Fresh, &table)
    }

    fn storage_does(&self, operation: &DiskOperation) -> u64 {
        let mut at = operation.offset;
        if operation.operation == Operation::Discard {
            self.file.write_all_at(&vec![0; operation.len as usize], at).expect("written");
        }
        for buffer in &operation.buffers {
            let mut bytes = vec![0; buffer.len()];
            match (operation.operation, buffer) {
                (Operation::Read, Buffer::Slice(slice)) => {
                    self.file.read_exact_at(&mut bytes, at).expect("read");
                    slice.copy_in(0, &bytes);
                }
                (Operation::Write, Buffer::Slice(slice)) => {
                    slice.copy_out(0, &mut bytes);
                    self.file.write_all_at(&bytes, at).expect("written");
                }
                (Operation::Write, Buffer::Bytes(content)) => self.file.write_all_at(content, at).expect("written"),
                (Operation::Flush, _) => {}
                other => panic!("{other:?}"),
            }
            at += buffer.len() as u64;
        }
        if operation.operation == Operation::Write { operation.len } else { 0 }
    }

    /// The guest mounts a file system, or unmounts it.
    fn superblock(&mut self, which: usize, is_open: bool) -> u64 {
        let of = &self.file_systems[which];
        let (mut block, at) = (of.superblock.clone(), of.log_at[0]);
        let start = if is_open { of.builder.position } else { 0 };
        SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(of.builder.sequence).seal();
        self.request(RequestKind::Write, at, &mut block)
    }

    /// What the guest's next kernel replays from the log's own place.
    fn replayed(&self, which: usize) -> BTreeMap<u64, Vec<u8>> {
        replayed(&self.file, &self.file_systems[which].log_at)
    }

    /// Commits a block. Gives the bytes that went to storage.
    fn commit(&mut self, which: usize, block: u64, content: &[u8]) -> u64 {
        self.commit_all(which, &[(block, content.to_vec())])
    }

    fn commit_all(&mut self, which: usize, blocks: &[(u64, Vec<u8>)]) -> u64 {
        self.commit_transaction(which, &Transaction { blocks: blocks.to_vec(), ..Transaction::default() })
    }

    fn commit_transaction(&mut self, which: usize, transaction: &Transaction) -> u64 {
        let of = &mut self.file_systems[which];
        let mut log = Vec::new();
        of.builder.transaction(transaction, &mut |position, block| {
            log.push((of.log_at[position as usize], block.to_vec()));
        });
        log.into_iter().map(|(at, mut block)| self.request(RequestKind::Write, at, &mut block)).sum()
    }

    fn home_at(&self, which: usize, block: u64) -> u64 {
        self.file_systems[which].start + block * BLOCK
    }

    /// A block as the guest reads it.
    fn read(&mut self, which: usize, block: u64) -> Vec<u8> {
        let mut content = vec![0; BLOCK as usize];
        self.request(RequestKind::Read, self.home_at(which, block), &mut content);
        content
    }

    /// The same as storage has it.
    fn stored(&self, which: usize, block: u64) -> Vec<u8> {
        let mut content = vec![0; BLOCK as usize];
        self.file.read_exact_at(&mut content, self.home_at(which, block)).expect("read");
        content
    }

    /// Has a log live elsewhere, at once or from the next mount on.
    fn change(&mut self, which: usize, to: PlacementKind) -> Change {
        let index = self.log(which).index();
        let change = self.journals.change_placement(index, to).expect("it may");
        if change == Change::HandOver {
            for _ in 0..100 {
                let mut plan = Plan::default();
                let has_left = self.route.hand_over(index, &mut plan).expect("handed over");
                self.carry_out(plan);
                if has_left {
                    return change;
                }
            }
            panic!("it does not leave");
        }
        change
    }
}

fn ram(memory: &Arc<VmMemory>, path: &Path) -> MemoryTable {
    let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(path).expect("made");
    let size = u64::from(PAGES) * PAGE_BYTES as u64;
    file.set_len(size).expect("a length");
    memory.map(vec![RegionDescriptor { gpa: 0, size, user_addr: 0x7000_0000, file, file_offset: 0 }]).expect("mapped")
}

/// What a kernel replays from a log in its own place.
fn replayed(file: &std::fs::File, log_at: &[u64]) -> BTreeMap<u64, Vec<u8>> {
    let mut log = OwnPlace { file, log_at };
    let mut raw = vec![0; BLOCK as usize];
    log.read(0, &mut raw).expect("read");
    let (superblock, format) = jbd2::Superblock::parse(&raw).expect("a superblock");
    let plan = jbd2::Plan::new(&mut log, &superblock, &format, &|_| true).expect("a log");
    let mut blocks = BTreeMap::new();
    for block in plan.blocks() {
        let mut content = vec![0; BLOCK as usize];
        log.read(block.newest().position, &mut content).expect("read");
        assert!(block.newest().restore(&format, &mut content), "block {}", block.home());
        blocks.insert(block.home(), content);
    }
    blocks
}

fn content(seed: u8) -> Vec<u8> {
    (0..PAGE_BYTES).map(|index| (index as u8).wrapping_mul(5).wrapping_add(seed)).collect()
}

/// A block of the inode table: in use in any file system.
const IN_USE: u64 = 40;

#[test]
fn two_file_systems_of_a_disk_have_a_region_each() {
    let mut rig = Rig::new(2);
    for which in 0..2 {
        rig.superblock(which, true);
        assert_eq!(rig.commit(which, IN_USE, &content(which as u8)), 0, "a region has it");
    }
    for which in 0..2 {
        assert!(rig.read(which, IN_USE) == content(which as u8) && rig.stored(which, IN_USE) != content(which as u8));
        // Absorbed, of the region that has it.
        let at = rig.home_at(which, IN_USE);
        assert_eq!(rig.request(RequestKind::Write, at, &mut content(which as u8)), 0);
    }
    // A checkpoint is of both.
    rig.journals.region(0).expect("regions").request_checkpoint();
    let mut plan = Plan::default();
    rig.route.woken(&mut plan);
    rig.carry_out(plan);
    for which in 0..2 {
        assert!(rig.stored(which, IN_USE) == content(which as u8));
        assert_eq!(rig.commit(which, IN_USE + 1, &content(10 + which as u8)), 0, "a region has it");
    }
    // Killed: each is brought home from its own region.
    let image = rig.image.with_extension("left");
    let region = rig.region.with_extension("left");
    std::fs::copy(&rig.image, &image).expect("copied");
    std::fs::copy(&rig.region, &region).expect("copied");
    for (which, start) in PARTITIONS.into_iter().enumerate() {
        let options =
            OpenOptions { region: RegionChoice { index: which as u32, count: 2 }, ..OpenOptions::new(&region) };
        let disk = Disk::open(&image, Access::Write).expect("an image");
        let finished = recover_image(&disk, options, Access::Write).expect("they belong together").expect("owed");
        assert_eq!((finished.offset, finished.recovery.blocks_written), (start, 1));
        let bytes = std::fs::read(&image).expect("read");
        let at = rig.home_at(which, IN_USE + 1) as usize;
        assert!(bytes[at..][..BLOCK as usize] == content(10 + which as u8)[..]);
    }
    // Unmounted, each is whole, and the regions are free.
    for which in 0..2 {
        let at = rig.home_at(which, IN_USE + 1);
        rig.request(RequestKind::Write, at, &mut content(10 + which as u8));
        rig.superblock(which, false);
        assert!(!rig.log(which).is_open() && rig.stored(which, IN_USE + 1) == content(10 + which as u8));
        rig.superblock(which, true);
        assert_eq!(rig.commit(which, IN_USE, &content(20)), 0, "a region has it again");
    }
}

#[test]
fn a_guest_that_is_gone_leaves_both_file_systems_whole() {
    let mut rig = Rig::new(2);
    for which in 0..2 {
        rig.superblock(which, true);
        rig.commit(which, IN_USE, &content(which as u8));
    }
    let table = Arc::new(ram(&rig.memory, &rig.image.with_extension("ram")));
    rig.route.started(Start::Fresh, &table).expect("started");
    for which in 0..2 {
        assert!(!rig.log(which).is_open() && rig.stored(which, IN_USE) == content(which as u8));
    }
    // The next kernel goes on from what it finds.
    let bytes = std::fs::read(&rig.image).expect("the image");
    rig.file_systems = PARTITIONS.iter().map(|start| mounted(&bytes, *start)).collect();
    for which in 0..2 {
        rig.superblock(which, true);
        assert_eq!(rig.commit(which, IN_USE, &content(7)), 0, "a region has it");
    }
}

#[test]
fn a_second_file_system_without_a_region_of_its_own_is_on_storage() {
    let mut rig = Rig::new(1);
    for which in 0..2 {
        rig.superblock(which, true);
    }
    assert_eq!(rig.commit(0, IN_USE, &content(1)), 0, "the region has it");
    assert!(rig.commit(1, IN_USE, &content(2)) > 2 * BLOCK, "its own place has it");
    // When the first one is unmounted, the second has the region from its next mount on.
    rig.superblock(0, false);
    rig.superblock(1, false);
    rig.superblock(1, true);
    assert_eq!(rig.commit(1, IN_USE, &content(3)), 0, "the region has it");
    assert!(rig.read(1, IN_USE) == content(3));
}

#[test]
fn a_journal_that_has_no_region_is_said_to_be_on_storage() {
    let said = |rig: &Rig| {
        let disk = rig.journals.report("vm").disks.remove(0);
        assert_eq!(disk.placement, "nvm");
        (disk.placement_effective, disk.placement_reason)
    };
    let mut rig = Rig::new(1);
    assert_eq!(said(&rig), ("nvm", None));
    for which in 0..2 {
        rig.superblock(which, true);
    }
    // The other one has the region.
    let (effective, reason) = said(&rig);
    assert_eq!(effective, "nvm");
    let reason = reason.expect("a reason");
    assert!(reason.contains(&PARTITIONS[1].to_string()) && reason.contains("another file system's"), "{reason}");
    rig.superblock(0, false);
    let (effective, reason) = said(&rig);
    assert_eq!(effective, "storage");
    assert!(reason.expect("a reason").contains("another file system's"));
    // And it has it from its next mount on.
    rig.superblock(1, false);
    assert_eq!(said(&rig), ("nvm", None));
    rig.superblock(1, true);
    assert_eq!(said(&rig), ("nvm", None));
}

#[test]
fn a_journal_goes_from_a_region_to_memory_and_to_storage_and_back() {
    use PlacementKind::{Copy, Nvm, Retain, Storage};
    let mut rig = Rig::new(2);
    rig.superblock(0, true);
    rig.superblock(1, true);
    let mut seed = 0;
    let mut now = Nvm;
    for to in [Retain, Nvm, Copy, Nvm, Storage, Nvm, Storage, Retain, Storage, Nvm, Retain, Copy, Storage] {
        seed += 1;
        let bytes = rig.commit(0, IN_USE, &content(seed));
        assert_eq!(bytes > 0, now == Storage, "{now:?}: {bytes} bytes to storage");
        rig.commit(1, IN_USE, &content(seed));
        let is_at_once = to == Storage || (now.is_held() && to.is_held());
        let change = rig.change(0, to);
        let expected = match (is_at_once, to) {
            (true, Storage) => Change::HandOver,
            (true, _) => Change::Done,
            (false, _) => Change::AtNextMount,
        };
        assert_eq!(change, expected, "{now:?} to {to:?}");
        assert_eq!(rig.log(0).placement, if is_at_once { to } else { now });
        seed += 1;
        // The guest goes on, wherever its journal is now.
        rig.commit(0, IN_USE + 1, &content(seed));
        let mut home = content(seed);
        let at = rig.home_at(0, IN_USE + 1);
        rig.request(RequestKind::Write, at, &mut home);
        let at = rig.home_at(0, IN_USE);
        rig.request(RequestKind::Write, at, &mut content(seed - 1));
        rig.superblock(0, false);
        assert_eq!(rig.log(0).placement, to, "from {now:?}");
        assert!(rig.stored(0, IN_USE) == content(seed - 1) && rig.stored(0, IN_USE + 1) == content(seed));
        rig.superblock(0, true);
        now = to;
        // The other file system's goes on where it is.
        assert_eq!(rig.log(1).placement, Nvm);
        assert!(rig.read(1, IN_USE) == content(seed - 1));
    }
    for refused in [PlacementKind::Remote, PlacementKind::Discard] {
        let error = rig.journals.change_placement(rig.log(1).index(), refused).expect_err("it may not");
        assert!(error.to_string().contains("cannot go from nvm"), "{error}");
    }
}

/// Behind a reset a guest mounts anew: what was wished from its next mount on, or was on its way, is so then.
#[test]
fn a_journal_goes_where_it_was_wished_when_its_guest_is_reset() {
    use PlacementKind::{Copy, Nvm, Retain, Storage};
    let mut rig = Rig::new(2);
    for (round, to) in [Retain, Nvm, Copy, Nvm, Storage].into_iter().enumerate() {
        rig.superblock(0, true);
        let written = content(round as u8 + 1);
        assert_eq!(rig.commit(0, IN_USE, &written), 0, "before {to:?}: storage has none of it");
        let change = rig.journals.change_placement(rig.log(0).index(), to).expect("it may");
        assert_eq!(change, if to == Storage { Change::HandOver } else { Change::AtNextMount });
        rig.start(&format!("ram{round}")).expect("started");
        assert!(rig.stored(0, IN_USE) == written, "before {to:?}: what was committed is home");
        assert_eq!((rig.log(0).placement, rig.log(0).is_open()), (to, false));
        // The next kernel goes on from what it finds.
        let bytes = std::fs::read(&rig.image).expect("the image");
        rig.file_systems = PARTITIONS.iter().map(|start| mounted(&bytes, *start)).collect();
    }
    assert!(rig.leave(0).expect("asked"), "it is there");
    rig.superblock(0, true);
    assert!(rig.commit(0, IN_USE, &content(9)) > 2 * BLOCK, "its own place has it");
}

#[test]
fn a_journal_that_is_being_opened_does_not_go_elsewhere_meanwhile() {
    for to in [PlacementKind::Storage, PlacementKind::Retain] {
        let mut rig = Rig::new(1);
        let (journals, index) = (Arc::clone(&rig.journals), rig.log(0).index());
        let (answer, answered) = mpsc::channel();
        let hook = move || {
            let (done, is_done) = mpsc::channel();
            std::thread::spawn(move || {
                let _ = answer.send(journals.change_placement(index, to).expect("it may"));
                let _ = done.send(());
            });
            // Whoever waits until it is open is not waited for.
            let _ = is_done.recv_timeout(Duration::from_millis(200));
            Ok(())
        };
        *rig.hook.lock().expect("no panic") = Some(Box::new(hook));
        rig.superblock(0, true);
        let change = answered.recv().expect("an answer");
        assert_eq!(change, if to == PlacementKind::Storage { Change::HandOver } else { Change::AtNextMount });
        assert_eq!(rig.commit(0, IN_USE, &content(1)), 0, "the region has it");
        let at = rig.home_at(0, IN_USE) as usize;
        assert!(rig.recovered()[at..][..BLOCK as usize] == content(1)[..], "{to:?}: what was committed is lost");
        rig.superblock(0, false);
        assert_eq!(rig.log(0).placement, to);
    }
}

#[test]
fn a_journal_that_is_copied_over_one_that_shall_live_elsewhere_stays_on_storage() {
    for to in [PlacementKind::Retain, PlacementKind::Copy, PlacementKind::Storage] {
        let mut rig = Rig::new(1);
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let index = rig.log(0).index();
        rig.journals.change_placement(index, to).expect("it may");
        // Another file system's journal, with a transaction that it wants replayed.
        let of = &mut rig.file_systems[0];
        let log_at = of.log_at.clone();
        let (position, sequence) = (of.builder.position, of.builder.sequence);
        SuperblockEdit::new(&mut of.superblock)
            .expect("a superblock")
            .start(position + 7)
            .sequence(sequence + 1000)
            .seal();
        let mut brought = of.superblock.clone();
        rig.request(RequestKind::Write, log_at[0], &mut brought);
        let blocks: Vec<(u64, Vec<u8>)> =
            (7..17).map(|at| (log_at[position as usize + at], content(at as u8))).collect();
        for (at, block) in &blocks {
            rig.request(RequestKind::Write, *at, &mut block.clone());
        }
        // Written once more with its tail elsewhere, as the copy of a disk in use may have it.
        SuperblockEdit::new(&mut brought).expect("a superblock").start(position + 8).sequence(sequence + 1001).seal();
        rig.request(RequestKind::Write, log_at[0], &mut brought);
        rig.request(RequestKind::Flush, 0, &mut []);
        let is_as_brought = |rig: &Rig| {
            let image = std::fs::read(&rig.image).expect("read");
            let at = |at: u64| &image[at as usize..][..BLOCK as usize];
            at(log_at[0]) == &brought[..] && blocks.iter().all(|(offset, block)| at(*offset) == &block[..])
        };
        assert!(is_as_brought(&rig), "{to:?}: a brought journal is not on storage");
        let table = Arc::new(ram(&rig.memory, &rig.image.with_extension("ram")));
        rig.route.started(Start::Fresh, &table).expect("started");
        assert!(is_as_brought(&rig), "{to:?}: a brought journal is not on storage after a reset");
        // Where it was wished it lives from the next mount on that is one.
        rig.superblock(0, false);
        assert_eq!(rig.log(0).placement, to);
    }
}

#[test]
fn a_flush_of_an_earlier_opening_says_nothing_of_the_next() {
    let mut rig = Rig::with(2, |options| options.delayed_checkpoint = false);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    rig.request(RequestKind::Write, at, &mut content(1));
    // The other file system's kernel flushes the disk, which takes its time.
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    rig.request(RequestKind::Flush, 0, &mut []);
    assert_eq!(rig.held.len(), 1);
    rig.holds = Box::new(|_| false);
    rig.superblock(0, false);
    rig.superblock(0, true);
    assert_eq!(rig.commit(0, IN_USE, &content(2)), 0, "the region has it");
    rig.end_held();
    assert!(rig.recovered()[at as usize..][..BLOCK as usize] == content(2)[..], "what was committed is lost");
}

#[test]
fn a_closing_superblock_that_fails_leaves_the_journal_where_it_was() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let superblock_at = rig.file_systems[0].log_at[0];
    // It may have landed, as it has here.
    rig.fails = Box::new(move |operation| operation.offset == superblock_at && operation.len > 0);
    rig.superblock(0, false);
    rig.fails = Box::new(|_| false);
    assert!(rig.log(0).is_open());
    assert_eq!(rig.commit(0, IN_USE, &content(2)), 0, "the region has it");
    let at = rig.home_at(0, IN_USE) as usize;
    assert!(rig.recovered()[at..][..BLOCK as usize] == content(2)[..], "what was committed is lost");
    rig.request(RequestKind::Write, at as u64, &mut content(2));
    rig.superblock(0, false);
    assert!(!rig.log(0).is_open() && rig.stored(0, IN_USE) == content(2));
}

/// Where a file system was when its guest ended, there is none to be seen: nothing is brought home to what may be something else by now. All of the log is in its
/// own place, for whoever sees it again.
#[test]
fn what_is_owed_to_a_file_system_that_is_not_to_be_seen_is_in_its_log() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let magic_at = rig.file_systems[0].start + extfs::SUPERBLOCK_OFFSET + 56;
    let mut magic = [0; 2];
    rig.file.read_exact_at(&mut magic, magic_at).expect("read");
    rig.file.write_all_at(&[0; 2], magic_at).expect("written");
    let image = rig.image.with_extension("left");
    std::fs::copy(&rig.image, &image).expect("copied");
    let region = rig.region.with_extension("left");
    std::fs::copy(&rig.region, &region).expect("copied");
    let options = OpenOptions { region: RegionChoice { index: 0, count: 1 }, ..OpenOptions::new(&region) };
    let disk = Disk::open(&image, Access::Write).expect("an image");
    assert!(recover_image(&disk, options, Access::Write).expect_err("it is not there").is_refusal());
    rig.start("first").expect("started");
    assert!(rig.stored(0, IN_USE) != content(1));
    rig.superblock(1, true);
    rig.commit(1, IN_USE, &content(2));
    rig.file.write_all_at(&magic, magic_at).expect("written");
    assert!(rig.replayed(0) == [(IN_USE, content(1))].into(), "{:?}", rig.replayed(0).keys());
}

/// Its guest, if it was suspended, has to find what it has written; a new kernel has to find what it would find on any disk.
#[test]
fn what_was_written_past_the_journal_is_there_for_who_goes_on_and_replayed_for_who_begins() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    rig.commit(0, IN_USE + 1, &content(2));
    let at = rig.home_at(0, IN_USE);
    rig.request(RequestKind::Write, at, &mut content(9));
    rig.start("after").expect("started");
    assert!(rig.stored(0, IN_USE) == content(9));
    assert!(rig.replayed(0) == [(IN_USE, content(1)), (IN_USE + 1, content(2))].into());
    // It goes on, and unmounts.
    rig.commit(0, IN_USE + 2, &content(3));
    assert!(rig.replayed(0).get(&(IN_USE + 2)) == Some(&content(3)) && rig.stored(0, IN_USE) == content(9));
    rig.superblock(0, false);
    rig.superblock(0, true);
    assert_eq!(rig.commit(0, IN_USE, &content(4)), 0, "the region has it");
}

/// An image of an earlier moment of this very guest, with a log that begins where this one does, is copied over an open journal: all of its log is there.
#[test]
fn an_image_of_its_own_is_copied_over_an_open_journal() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    let of = &rig.file_systems[0];
    let (mut copied, mut block, log_at) = (of.builder.clone(), of.superblock.clone(), of.log_at.clone());
    rig.commit(0, IN_USE, &content(1));
    rig.commit(0, IN_USE + 1, &content(2));
    SuperblockEdit::new(&mut block).expect("a superblock").start(copied.position).sequence(copied.sequence).seal();
    rig.request(RequestKind::Write, log_at[0], &mut block);
    let mut writes = Vec::new();
    for (home, seed) in [(IN_USE, 9), (IN_USE + 2, 8)] {
        let transaction = Transaction { blocks: vec![(home, content(seed))], ..Transaction::default() };
        copied.transaction(&transaction, &mut |position, block| writes.push((position, block.to_vec())));
    }
    for (position, mut block) in writes {
        rig.request(RequestKind::Write, log_at[position as usize], &mut block);
    }
    assert!(!rig.log(0).is_open(), "what is there is none of the guest's");
    let found = rig.replayed(0);
    assert!(found == [(IN_USE, content(9)), (IN_USE + 2, content(8))].into(), "{:?}", found.keys());
}

#[test]
fn why_a_log_could_not_leave_is_not_told_to_who_asks_next() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let index = rig.log(0).index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    let superblock_at = rig.file_systems[0].log_at[0];
    rig.fails = Box::new(move |operation| operation.offset == superblock_at && operation.len > 0);
    assert!(!rig.leave(0).expect("it is on its way"));
    rig.fails = Box::new(|_| false);
    let mut plan = Plan::default();
    rig.route.give_up_hand_over(index, &mut plan);
    rig.carry_out(plan);
    for _ in 0..100 {
        if rig.leave(0).expect("nothing is wrong now") {
            assert_eq!(rig.log(0).placement, PlacementKind::Storage);
            return;
        }
    }
    panic!("it does not leave");
}

#[test]
fn what_a_leaving_log_writes_does_not_land_on_the_next_file_system() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    // A transaction that is not complete.
    let of = &rig.file_systems[0];
    let (start, at) = (of.start, of.log_at[of.builder.position as usize]);
    rig.request(RequestKind::Write, at, &mut content(2));
    let index = rig.log(0).index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    rig.holds = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
    for _ in 0..10 {
        if rig.held.is_empty() {
            assert!(!rig.leave(0).expect("it is on its way"));
        }
    }
    assert_eq!(rig.held.len(), 1);
    // Another file system comes, without a journal, whose block that is.
    rig.holds = Box::new(|_| false);
    rig.request(RequestKind::Write, start, &mut vec![0; BLOCK as usize]);
    rig.request(RequestKind::Write, at, &mut content(3));
    rig.end_held();
    rig.request(RequestKind::Write, start + BLOCK, &mut vec![0; BLOCK as usize]);
    let image = std::fs::read(&rig.image).expect("read");
    assert!(image[at as usize..][..BLOCK as usize] == content(3)[..], "an old block landed on a new one");
    assert!(!rig.journals.logs().iter().any(|log| log.place().home_start == start), "its journal is known still");
}

/// The guest's flush fails, and storage loses what was written to a block.
fn lose(rig: &mut Rig, block: u64) {
    let (before, failed) = (rig.home_at(0, block), rig.failed.len());
    rig.file.write_all_at(&[0; BLOCK as usize], before).expect("written");
    rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
    rig.request(RequestKind::Flush, 0, &mut []);
    rig.fails = Box::new(|_| false);
    // What ended while that one was under way may be lost, too, so the next one is told as well.
    rig.request(RequestKind::Flush, 0, &mut []);
    assert_eq!(rig.failed.len(), failed + 2);
    rig.failed.truncate(failed);
}

#[test]
fn a_write_that_ends_late_is_not_done_where_a_flush_has_failed_since() {
    let mut rig = Rig::new(1);
    rig.may_fail = true;
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    // Something else, past the journal; it takes its time.
    rig.holds = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
    rig.request(RequestKind::Write, at, &mut content(2));
    let late = RequestId(rig.next_request);
    assert_eq!(rig.held.len(), 1);
    rig.holds = Box::new(|_| false);
    rig.superblock(0, true);
    // It ends, and is made durable; another flush fails meanwhile.
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    let write = rig.held.pop().expect("the write");
    rig.end(write);
    assert_eq!(rig.held.len(), 1, "a flush for it");
    rig.holds = Box::new(|_| false);
    lose(&mut rig, IN_USE);
    rig.end_held();
    assert_eq!(rig.failed, [late], "the region would bring back what was there before");
    assert!(rig.recovered()[at as usize..][..BLOCK as usize] == content(1)[..], "what was committed is lost");
    // Written again, it is done, and stays.
    rig.request(RequestKind::Write, at, &mut content(3));
    assert_eq!(rig.failed.len(), 1);
    assert!(rig.recovered()[at as usize..][..BLOCK as usize] == content(3)[..], "what was written is taken back");
}

#[test]
fn a_tail_does_not_pass_what_a_failed_flush_may_have_lost() {
    for is_open in [true, false] {
        let mut rig = Rig::new(1);
        rig.may_fail = true;
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let at = rig.home_at(0, IN_USE);
        rig.request(RequestKind::Write, at, &mut content(2));
        lose(&mut rig, IN_USE);
        // Whether the guest was told so or somebody else: the next flush says nothing of it.
        rig.request(RequestKind::Flush, 0, &mut []);
        rig.failed.clear();
        rig.superblock(0, is_open);
        assert_eq!(rig.failed, [RequestId(rig.next_request)], "the log begins later, or has ended");
        assert!(rig.log(0).is_open());
        assert!(rig.recovered()[at as usize..][..BLOCK as usize] == content(1)[..], "what was committed is lost");
        // Who mounts is given it to replay.
        rig.request(RequestKind::Write, at, &mut content(1));
        rig.failed.clear();
        rig.superblock(0, is_open);
        assert!(rig.failed.is_empty());
        rig.request(RequestKind::Write, at, &mut content(3));
        rig.superblock(0, false);
        assert!(rig.failed.is_empty() && !rig.log(0).is_open() && rig.stored(0, IN_USE) == content(3));
    }
}

#[test]
fn a_failed_flush_says_nothing_of_what_was_durable_before() {
    for is_lost_before in [false, true] {
        let mut rig = Rig::new(1);
        rig.may_fail = true;
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let at = rig.home_at(0, IN_USE);
        rig.request(RequestKind::Write, at, &mut content(2));
        if is_lost_before {
            lose(&mut rig, IN_USE);
        }
        rig.request(RequestKind::Flush, 0, &mut []);
        // Somebody else's, perhaps.
        rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
        rig.request(RequestKind::Flush, 0, &mut []);
        rig.fails = Box::new(|_| false);
        rig.failed.clear();
        rig.superblock(0, true);
        assert_eq!(rig.failed.is_empty(), !is_lost_before, "a later flush does not bring back what one has lost");
    }
}

/// The guest has flushed what it wrote home as the region has it, and then writes something else there.
#[test]
fn a_tail_passes_nothing_before_a_flush_of_what_was_written_past_the_journal() {
    for ends_beside in [false, true] {
        let mut rig = Rig::new(1);
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let at = rig.home_at(0, IN_USE);
        assert_eq!(rig.request(RequestKind::Write, at, &mut content(1)), 0, "absorbed");
        rig.request(RequestKind::Flush, 0, &mut []);
        if ends_beside {
            // One ended before, and makes a flush necessary; the other is on its way.
            rig.commit(0, IN_USE + 1, &content(5));
            let other = rig.home_at(0, IN_USE + 1);
            rig.request(RequestKind::Write, other, &mut content(6));
            rig.holds = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
        }
        rig.request(RequestKind::Write, at, &mut content(2));
        let write = rig.held.pop();
        rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
        rig.superblock(0, true);
        assert_eq!(rig.held.len(), 1, "the tail waits for a flush");
        if let Some(write) = write {
            rig.end(write);
            // What came of that waits for a flush of its own.
            let of_tail = rig.held.remove(0);
            rig.end(of_tail);
        }
        assert!(!rig.held.is_empty());
        // The power fails.
        rig.file.write_all_at(&[0; BLOCK as usize], at).expect("written");
        assert!(rig.recovered()[at as usize..][..BLOCK as usize] == content(1)[..], "what was committed is lost");
        rig.file.write_all_at(&content(2), at).expect("written");
        rig.end_held();
        assert!(rig.recovered()[at as usize..][..BLOCK as usize] == content(2)[..], "what was written is taken back");
    }
}

#[test]
fn a_tail_does_not_wait_for_a_write_that_has_failed() {
    let mut rig = Rig::new(1);
    rig.may_fail = true;
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    rig.fails = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
    rig.request(RequestKind::Write, at, &mut content(2));
    rig.fails = Box::new(|_| false);
    let flushed = Arc::new(Mutex::new(0));
    let count = Arc::clone(&flushed);
    rig.fails = Box::new(move |operation| {
        let mut count = count.lock().expect("no panic");
        *count += u32::from(operation.operation == Operation::Flush);
        assert!(*count < 10, "flushes without an end");
        false
    });
    rig.failed.clear();
    rig.superblock(0, true);
    assert!(rig.failed.is_empty());
    assert_eq!(*flushed.lock().expect("no panic"), 1);
}

/// A journal's own way to make something durable, for the other file system of the disk, say.
#[test]
fn a_flush_that_nobody_asked_storage_for_is_no_better_when_it_fails() {
    for is_before in [false, true] {
        let mut rig = Rig::new(1);
        rig.may_fail = true;
        rig.superblock(0, true);
        if is_before {
            rig.journals.disk(0).note_failed_flush();
        }
        rig.commit(0, IN_USE, &content(1));
        let at = rig.home_at(0, IN_USE);
        rig.request(RequestKind::Write, at, &mut content(2));
        if !is_before {
            rig.file.write_all_at(&[0; BLOCK as usize], at).expect("written");
            rig.journals.disk(0).note_failed_flush();
        }
        rig.superblock(0, true);
        assert_eq!(rig.failed.is_empty(), is_before);
        let kept = if is_before { content(2) } else { content(1) };
        assert!(rig.recovered()[at as usize..][..BLOCK as usize] == kept[..]);
    }
}

#[test]
fn a_write_that_ends_beside_a_flush_is_not_durable_by_it() {
    for is_before in [false, true] {
        let mut rig = Rig::new(1);
        rig.may_fail = true;
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let at = rig.home_at(0, IN_USE);
        rig.holds = Box::new(|operation| operation.operation != Operation::Read);
        rig.request(RequestKind::Write, at, &mut content(2));
        let write = rig.held.pop().expect("a write");
        if is_before {
            rig.end(write);
            rig.request(RequestKind::Flush, 0, &mut []);
        } else {
            rig.request(RequestKind::Flush, 0, &mut []);
            rig.end(write);
        }
        rig.end_held();
        rig.journals.disk(0).note_failed_flush();
        rig.superblock(0, true);
        assert_eq!(rig.failed.is_empty(), is_before);
    }
}

#[test]
fn a_tail_whose_flush_failed_passes_nothing_when_it_is_said_again() {
    for is_beside in [false, true] {
        let mut rig = Rig::with(1, |options| options.mark_age = Duration::ZERO);
        rig.may_fail = true;
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let at = rig.home_at(0, IN_USE);
        rig.request(RequestKind::Write, at, &mut content(2));
        if is_beside {
            // The tail waits for a flush, and another one fails meanwhile.
            rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
            rig.superblock(0, true);
            assert_eq!(rig.held.len(), 1, "the tail waits for a flush");
            rig.holds = Box::new(|_| false);
            lose(&mut rig, IN_USE);
            rig.end_held();
        } else {
            rig.file.write_all_at(&[0; BLOCK as usize], at).expect("written");
            rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
            rig.superblock(0, true);
            rig.fails = Box::new(|_| false);
        }
        assert!(!rig.failed.is_empty());
        // The kernel gives its journal up, and says so with the same tail.
        rig.failed.clear();
        rig.superblock(0, true);
        assert_eq!(rig.failed, [RequestId(rig.next_request)]);
        assert!(rig.recovered()[at as usize..][..BLOCK as usize] == content(1)[..], "what was committed is lost");
    }
}

#[test]
fn a_flush_of_an_attempt_to_leave_says_nothing_of_the_next() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    // The guest writes past its journal: that leaves the region with the log.
    rig.request(RequestKind::Write, at, &mut content(2));
    let index = rig.log(0).index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    assert!(!rig.leave(0).expect("it is on its way"));
    assert_eq!(rig.held.len(), 1, "what is written is made durable");
    let mut plan = Plan::default();
    rig.route.give_up_hand_over(index, &mut plan);
    rig.carry_out(plan);
    let first = rig.held.pop().expect("a flush");
    rig.commit(0, IN_USE + 1, &content(3));
    let next_at = rig.home_at(0, IN_USE + 1);
    rig.request(RequestKind::Write, next_at, &mut content(4));
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    assert!(!rig.leave(0).expect("it is on its way"));
    assert_eq!(rig.held.len(), 1, "what was written since is made durable");
    // The first flush covers nothing of that.
    rig.end(first);
    assert_eq!(rig.held.len(), 1, "the second flush is waited for");
    let left = rig.recovered();
    assert!(left[next_at as usize..][..BLOCK as usize] == content(3)[..], "what was committed may be lost");
    rig.end_held();
    while !rig.leave(0).expect("it leaves") {}
    assert!(rig.stored(0, IN_USE + 1) == content(4));
}

#[test]
fn what_an_attempt_to_leave_writes_does_not_land_on_what_comes_after_it() {
    for closes in [false, true] {
        let mut rig = Rig::new(1);
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        // A transaction that is not complete.
        let of = &rig.file_systems[0];
        let at = of.log_at[of.builder.position as usize];
        rig.request(RequestKind::Write, at, &mut content(2));
        let index = rig.log(0).index();
        rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
        rig.holds = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
        for _ in 0..10 {
            if rig.held.is_empty() {
                assert!(!rig.leave(0).expect("it is on its way"));
            }
        }
        assert_eq!(rig.held.len(), 1);
        rig.holds = Box::new(|_| false);
        let mut plan = Plan::default();
        rig.route.give_up_hand_over(index, &mut plan);
        rig.carry_out(plan);
        if closes {
            // The guest closes its log, which is in its own place from the next mount on.
            rig.superblock(0, false);
            rig.superblock(0, true);
        } else {
            rig.request(RequestKind::Write, at, &mut content(3));
            for _ in 0..10 {
                rig.leave(0).expect("it is on its way");
            }
        }
        if closes {
            rig.request(RequestKind::Write, at, &mut content(3));
        }
        rig.end_held();
        for _ in 0..10 {
            rig.leave(0).expect("it leaves");
        }
        let mut stored = content(0);
        rig.file.read_exact_at(&mut stored, at).expect("read");
        // Where the log is in the region still, the block is there.
        let is_there = rig.log(0).placement == PlacementKind::Storage;
        assert!(is_there && stored == content(3), "closes: {closes}: an old block landed on a new one");
    }
}

#[test]
fn a_flush_that_began_before_mkfs_says_nothing_of_the_next_file_system() {
    let mut rig = Rig::with(1, |options| options.append_home_bytes_min = 0);
    rig.superblock(0, true);
    // A block that the bitmap says is free goes home by itself, which takes its time.
    let free = FILE_SYSTEM_BLOCKS - 10;
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    rig.commit(0, free, &content(1));
    assert_eq!(rig.held.len(), 1, "an append is made durable");
    let flush = rig.held.pop().expect("a flush");
    rig.holds = Box::new(|_| false);
    // The file system is made anew.
    let start = rig.file_systems[0].start;
    let before = {
        let mut bytes = vec![0; BLOCK as usize];
        rig.file.read_exact_at(&mut bytes, start).expect("read");
        bytes
    };
    rig.may_fail = true;
    rig.request(RequestKind::Write, start, &mut vec![0; BLOCK as usize]);
    rig.may_fail = false;
    assert!(!rig.journals.logs().iter().any(|log| log.place().home_start == start), "its journal is known still");
    rig.request(RequestKind::Write, start, &mut before.clone());
    rig.superblock(0, false);
    rig.superblock(0, true);
    // Its first transaction has an append that is on its way.
    let append_at = rig.home_at(0, free + 1);
    rig.holds = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == append_at);
    rig.commit(0, free + 1, &content(2));
    assert_eq!(rig.held.len(), 1, "an append is on its way");
    rig.holds = Box::new(|_| false);
    rig.end(flush);
    let sequence = rig.file_systems[0].builder.sequence;
    let region = std::fs::read(&rig.region).expect("read");
    let found = nvm_journal::Found::read(&region[..region.len() / 2]).expect("whole").expect("a region");
    assert!(found.sequence != sequence.wrapping_sub(1), "a transaction counts whose append is not home");
    rig.end_held();
    assert!(rig.recovered()[append_at as usize..][..BLOCK as usize] == content(2)[..]);
}

/// Nothing is written where the guest brings home what is there already. A part of that which was discarded would not be.
#[test]
fn what_is_discarded_in_part_is_not_taken_for_what_is_at_home() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    let committed: Vec<(u64, Vec<u8>)> = (0..3).map(|index| (IN_USE + index, content(1 + index as u8))).collect();
    rig.commit_all(0, &committed);
    rig.journals.region(0).expect("regions").request_checkpoint();
    let mut plan = Plan::default();
    rig.route.woken(&mut plan);
    rig.carry_out(plan);
    assert!(committed.iter().all(|(block, content)| rig.stored(0, *block) == *content), "they are at home");
    // From the middle of the first to that of the last.
    let from = rig.home_at(0, IN_USE) + BLOCK / 2;
    rig.discard(from, 2 * BLOCK);
    rig.discard(from + 512, 512);
    assert!(rig.stored(0, IN_USE + 1) == [0; BLOCK as usize], "the one between is discarded");
    for (block, content) in &committed {
        rig.request(RequestKind::Write, rig.home_at(0, *block), &mut content.clone());
        assert!(rig.read(0, *block) == *content && rig.recovered_block(*block) == *content, "block {block}");
    }
}
