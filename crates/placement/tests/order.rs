//! A route alone, with storage in the test's hands: what is in flight ends when the test says so.

use block_route::{
    Buffer, DiskOperation, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Start, Status,
};
use guest_memory::{MemorySlice, MemoryTable, PAGE_BYTES, PageId, RegionDescriptor, VmMemory, simulated_room};
use jbd2::build::{LogBuilder, Transaction};
use placement::{
    AreaDirectory, Change, DiskOptions, DiskRoute, Finish, FinishError, HotPages, Journals, JournalsOptions, Owed,
    PlacementKind, RemoteOptions, finish_directory, finish_directory_into, owed,
};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use write_log::simulated_flushes;

#[path = "order/hand_over.rs"]
mod hand_over;
#[path = "order/journal_device.rs"]
mod journal_device;
#[path = "order/starved.rs"]
mod starved;
#[path = "order/suspended.rs"]
mod suspended;
#[path = "order/tampered.rs"]
mod tampered;

const BLOCK: u64 = 4096;
const PAGES: u32 = 256;
/// Where the partition begins, in bytes.
const PARTITION: u64 = 1 << 20;
const FILE_SYSTEM_BLOCKS: u64 = 6144;
const DISK_BYTES: u64 = 64 << 20;

fn run(program: &str, arguments: &[&str], path: &Path, rest: &[&str]) {
    let output = Command::new(program).args(arguments).arg(path).args(rest).output().expect("e2fsprogs are installed");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An MBR with one partition of `blocks` blocks.
fn partition_table(blocks: u64) -> Vec<u8> {
    let mut sector = vec![0; 512];
    sector[446 + 4] = 0x83;
    sector[446 + 8..446 + 12].copy_from_slice(&((PARTITION / 512) as u32).to_le_bytes());
    sector[446 + 12..446 + 16].copy_from_slice(&((blocks * BLOCK / 512) as u32).to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

struct Rig {
    directory: tempfile::TempDir,
    image: PathBuf,
    file: std::fs::File,
    memory: Arc<VmMemory>,
    journals: Arc<Journals>,
    route: DiskRoute,
    next_page: u32,
    next_request: u32,
    log_at: Vec<u64>,
    superblock: Vec<u8>,
    builder: LogBuilder,
}

impl Rig {
    /// A disk with one ext4 partition that the file system fills, and room behind it.
    fn new() -> Self {
        Self::with_budget(64 << 20)
    }

    /// The same, with this much memory for tables and copies, in bytes.
    fn with_budget(budget_bytes: u64) -> Self {
        Self::with(budget_bytes, PlacementKind::Retain, None)
    }

    fn with(budget_bytes: u64, placement: PlacementKind, remote: Option<RemoteOptions>) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let image = directory.path().join("image");
        let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(&image).expect("made");
        file.set_len(DISK_BYTES).expect("a length");
        let offset = format!("offset={PARTITION}");
        run(
            "mke2fs",
            &["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4", "-O", "^metadata_csum", "-E", &offset],
            &image,
            &[&FILE_SYSTEM_BLOCKS.to_string()],
        );
        file.write_all_at(&partition_table(FILE_SYSTEM_BLOCKS), 0).expect("a partition table");
        let bytes = std::fs::read(&image).expect("the image");
        let found = extfs::discover(&bytes).expect("readable").remove(0);
        let extents = found.journal.extents(&found.superblock);
        let mut log_at = Vec::new();
        for extent in &extents {
            log_at.extend((0..u64::from(extent.count)).map(|index| PARTITION + (extent.physical + index) * BLOCK));
        }
        Self::of(directory, log_at, budget_bytes, placement, remote)
    }

    /// A disk with a second one like that, which begins at this byte.
    fn with_second(second: u64) -> Self {
        let Rig { directory, image, file, log_at, .. } = Self::new();
        let (first, rest) = (PARTITION as usize, (FILE_SYSTEM_BLOCKS * BLOCK) as usize);
        let bytes = std::fs::read(&image).expect("the image");
        file.write_all_at(&bytes[first..first + rest], second).expect("written");
        let mut table = partition_table(FILE_SYSTEM_BLOCKS);
        let entry = table[446..462].to_vec();
        table[462..478].copy_from_slice(&entry);
        table[462 + 8..462 + 12].copy_from_slice(&((second / 512) as u32).to_le_bytes());
        file.write_all_at(&table, 0).expect("a partition table");
        Self::of(directory, log_at, 64 << 20, PlacementKind::Retain, None)
    }

    /// Where the log is of the second one.
    fn log_at_of(&self, second: u64) -> Vec<u64> {
        self.log_at.iter().map(|at| at - PARTITION + second).collect()
    }

    /// What comes is about the log there.
    fn goes_on_with(&mut self, log_at: Vec<u64>) {
        self.log_at = log_at;
        let (parsed, format) = jbd2::Superblock::parse(&self.superblock).expect("a journal");
        self.builder = LogBuilder::new(format, parsed.first, parsed.sequence + 1);
    }

    /// A guest with the file `image` of the directory, which has its log there.
    fn of(
        directory: tempfile::TempDir,
        log_at: Vec<u64>,
        budget_bytes: u64,
        placement: PlacementKind,
        remote: Option<RemoteOptions>,
    ) -> Self {
        Self::of_disks(directory, &[], log_at, budget_bytes, placement, remote)
    }

    /// The same, with these disks before that one.
    fn of_disks(
        directory: tempfile::TempDir,
        others: &[PathBuf],
        log_at: Vec<u64>,
        budget_bytes: u64,
        placement: PlacementKind,
        remote: Option<RemoteOptions>,
    ) -> Self {
        let image = directory.path().join("image");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&image).expect("an image");
        let mut superblock = vec![0; BLOCK as usize];
        file.read_exact_at(&mut superblock, log_at[0]).expect("read");
        let (parsed, format) = jbd2::Superblock::parse(&superblock).expect("a journal");
        let memory = VmMemory::new();
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"))
            .expect("a directory");
        let options = |path: &PathBuf| DiskOptions {
            name: if *path == image { "disk".to_owned() } else { path.display().to_string() },
            path: path.clone(),
            placement,
            honour_flush: false,
            read_only: false,
            nvm: None,
            remote: remote.clone(),
            durable_within: None,
            write_log: None,
        };
        let disks = others.iter().chain([&image]).map(options).collect();
        let options = JournalsOptions { disks, budget_bytes, tracer: None };
        let journals = Journals::new(&memory, area, options).expect("journals");
        journals.area.set_hot_pages(HotPages::Foreseen);
        memory.simulate_protection();
        let mut rig = Rig {
            image,
            file,
            route: DiskRoute::new(Arc::clone(&journals), others.len()),
            memory,
            journals,
            next_page: 0,
            next_request: 0,
            log_at,
            superblock,
            builder: LogBuilder::new(format, parsed.first, parsed.sequence + 1),
            directory,
        };
        let table = Arc::new(rig.map("ram"));
        rig.route.started(Start::Fresh, &table).expect("started");
        rig
    }

    /// Gives the guest one more memory file.
    fn map(&self, name: &str) -> MemoryTable {
        let path = self.journals.directory().path().join(name);
        let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(path).expect("made");
        file.set_len(u64::from(PAGES) * BLOCK).expect("a length");
        let known = u64::from(self.memory.page_count()) * BLOCK;
        let region = RegionDescriptor {
            gpa: known,
            size: u64::from(PAGES) * BLOCK,
            user_addr: 0x7000_0000 + known,
            file,
            file_offset: 0,
        };
        self.memory.map(vec![region]).expect("mapped")
    }

    fn page(&mut self, content: &[u8]) -> MemorySlice {
        let page = PageId(self.next_page);
        self.next_page += 1;
        self.memory.simulated_guest_write(page, 0, content);
        self.memory.page(page).expect("a page").sub(0, content.len())
    }

    /// Routes a request. Returns what storage has to do.
    fn route(&mut self, kind: RequestKind, offset: u64, segments: &[MemorySlice]) -> Vec<DiskOperation> {
        operations(self.plan(kind, offset, segments))
    }

    fn plan(&mut self, kind: RequestKind, offset: u64, segments: &[MemorySlice]) -> Plan {
        self.next_request += 1;
        let id = RequestId(self.next_request);
        let len = segments.iter().map(|segment| segment.len() as u64).sum();
        let mut plan = Plan::default();
        self.route.route(&Request { id, kind, offset, len, segments }, &mut plan);
        self.route.end_of_pass(&mut plan);
        plan
    }

    fn write(&mut self, offset: u64, content: &[u8]) -> Vec<DiskOperation> {
        let page = self.page(content);
        self.route(RequestKind::Write, offset, &[page])
    }

    /// Storage does what it was told.
    fn carry_out(&mut self, operations: Vec<DiskOperation>) {
        for operation in operations {
            if operation.operation == Operation::Write {
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
            }
            self.end(&operation, Ok(()));
        }
    }

    /// What the host does by itself when it is woken.
    fn woken(&mut self) -> Vec<DiskOperation> {
        let mut plan = Plan::default();
        self.route.woken(&mut plan);
        operations(plan)
    }

    fn end(&mut self, operation: &DiskOperation, result: std::io::Result<()>) {
        let mut plan = Plan::default();
        let is_ok = result.is_ok();
        if let Some(ticket) = operation.ticket {
            self.route.disk_done(ticket, result, &mut plan);
        }
        if !is_ok {
            plan.actions.retain(|action| !matches!(action, PlanAction::Release(_, Status::IoError)));
        }
        let more = operations(plan);
        self.carry_out(more);
    }

    fn open(&mut self) {
        let (start, sequence) = (self.builder.position, self.builder.sequence);
        let mut block = self.superblock.clone();
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        let operations = self.write(self.log_at[0], &block);
        assert!(operations.is_empty(), "only the mark goes to storage");
    }

    fn commit(&mut self, blocks: &[(u64, Vec<u8>)]) {
        let transaction = Transaction { blocks: blocks.to_vec(), ..Transaction::default() };
        let mut log = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        for (position, block) in log {
            let operations = self.write(self.log_at[position as usize], &block);
            assert!(operations.is_empty(), "the log is held");
        }
    }

    fn home_at(block: u64) -> u64 {
        PARTITION + block * BLOCK
    }

    fn home(&self, block: u64) -> Vec<u8> {
        let mut content = vec![0; BLOCK as usize];
        self.file.read_exact_at(&mut content, Self::home_at(block)).expect("read");
        content
    }

    fn owed(&self) -> u64 {
        self.journals.logs().iter().map(|log| self.journals.area.owed(log.id).blocks).sum()
    }

    /// The daemon dies: only its files are left. Gives the image too.
    fn die(self) -> (LeftImage, AreaDirectory) {
        let Rig { directory, image, journals, route, .. } = self;
        let copy = directory.path().join("left");
        std::fs::DirBuilder::new().mode(0o700).create(&copy).expect("a directory");
        for entry in std::fs::read_dir(journals.directory().path()).expect("files").flatten() {
            std::fs::copy(entry.path(), copy.join(entry.file_name())).expect("copied");
        }
        drop((route, journals));
        let left = AreaDirectory::take_over(&copy, &directory.path().join("registry")).expect("free");
        (LeftImage { path: image, _directory: directory }, left)
    }

    /// The daemon dies, and another finishes what it left.
    fn die_and_finish(self) -> (LeftImage, usize) {
        let (image, left) = self.die();
        let finished =
            finish_directory(&left, std::slice::from_ref(&image)).and_then(Finish::into_result).expect("finished");
        let written = finished.iter().map(|log| log.recovery.blocks_written as usize).sum();
        (image, written)
    }
}

/// The image of a daemon that died. The directory that it lies in goes with it: without that, each test left files
/// in tmpfs until it was full.
struct LeftImage {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl std::ops::Deref for LeftImage {
    type Target = PathBuf;

    fn deref(&self) -> &PathBuf {
        &self.path
    }
}

impl AsRef<Path> for LeftImage {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

fn operations(plan: Plan) -> Vec<DiskOperation> {
    plan.actions
        .into_iter()
        .filter_map(|action| match action {
            PlanAction::Disk(operation) => Some(operation),
            PlanAction::Release(_, status) => {
                assert_eq!(status, Status::Ok);
                None
            }
            PlanAction::Hold(_) => None,
        })
        .collect()
}

fn content(seed: u8) -> Vec<u8> {
    (0..PAGE_BYTES).map(|index| (index as u8).wrapping_mul(7).wrapping_add(seed)).collect()
}

#[test]
fn a_flush_covers_what_has_ended_and_nothing_else() {
    let mut rig = Rig::new();
    // Behind the partition: nothing of ours covers it.
    let at = rig.file.metadata().expect("a file").len() - BLOCK;
    let flush = rig.route(RequestKind::Flush, 0, &[]);
    rig.carry_out(flush);
    assert!(rig.route(RequestKind::Flush, 0, &[]).is_empty(), "nothing was written since");
    let write = rig.write(at, &content(1));
    let early = rig.route(RequestKind::Flush, 0, &[]);
    rig.carry_out(early);
    rig.carry_out(write);
    // Another write ends while the flush that covers that one is on its way.
    let flush = rig.route(RequestKind::Flush, 0, &[]);
    assert_eq!(flush.len(), 1, "the write ended after the flush before had begun");
    let write = rig.write(at, &content(2));
    rig.carry_out(write);
    rig.carry_out(flush);
    let first = rig.route(RequestKind::Flush, 0, &[]);
    assert_eq!(first.len(), 1, "the write ended after the flush before had begun");
    let second = rig.route(RequestKind::Flush, 0, &[]);
    assert_eq!(second.len(), 1, "the first flush is still on its way");
    rig.end(&first[0], Err(std::io::Error::other("storage failed")));
    rig.end(&second[0], Err(std::io::Error::other("storage failed")));
    let told = rig.plan(RequestKind::Flush, 0, &[]);
    assert!(
        matches!(told.actions[..], [PlanAction::Hold(_), PlanAction::Release(_, Status::IoError)]),
        "what ended while those were on their way may be lost, too"
    );
    let again = rig.route(RequestKind::Flush, 0, &[]);
    assert_eq!(again.len(), 1, "what failed has to be done");
    rig.carry_out(again);
    assert!(rig.route(RequestKind::Flush, 0, &[]).is_empty());
}

#[test]
fn a_mounted_file_system_grows() {
    let mut rig = Rig::new();
    rig.open();
    let inside = FILE_SYSTEM_BLOCKS - 100;
    rig.commit(&[(inside, content(1))]);
    // The partition grows (growpart); for a moment there is no partition table at all.
    for table in [vec![0; 512], partition_table(FILE_SYSTEM_BLOCKS + 2000)] {
        let operations = rig.write(0, &table);
        rig.carry_out(operations);
        assert_eq!(rig.owed(), 1, "the log stays");
    }
    // The file system grows: what is new is in the log before the superblock says so, and then at home.
    let beyond = FILE_SYSTEM_BLOCKS + 1000;
    rig.commit(&[(beyond, content(2))]);
    assert_eq!(rig.owed(), 2);
    let mut block = rig.home(0);
    block[1024 + 4..1024 + 8].copy_from_slice(&((FILE_SYSTEM_BLOCKS + 2000) as u32).to_le_bytes());
    let operations = rig.write(Rig::home_at(0), &block);
    rig.carry_out(operations);
    // And is given another UUID.
    block[1024 + 0x68..1024 + 0x78].fill(0x5a);
    let operations = rig.write(Rig::home_at(0), &block);
    rig.carry_out(operations);
    assert_eq!(rig.owed(), 2);
    rig.commit(&[(inside + 1, content(3))]);
    rig.journals.area.check().expect("the books are right");
    rig.journals.recover_all().expect("recovered");
    for (block, seed) in [(inside, 1), (beyond, 2), (inside + 1, 3)] {
        assert!(rig.home(block) == content(seed), "block {block}");
    }
}

/// The same in a logical partition, whose table is elsewhere.
#[test]
fn a_mounted_file_system_grows_in_a_logical_partition() {
    let mut rig = Rig::new();
    // The same place: the extended partition begins a table's distance before.
    let (table_at, sectors) = (PARTITION - 2048 * 256, |blocks: u64| blocks * BLOCK / 512);
    let mut extended = partition_table(DISK_BYTES / BLOCK - 1024);
    extended[446 + 4] = 5;
    extended[446 + 8..446 + 12].copy_from_slice(&((table_at / 512) as u32).to_le_bytes());
    let logical = |blocks: u64| {
        let mut table = partition_table(blocks);
        table[446 + 8..446 + 12].copy_from_slice(&(((PARTITION - table_at) / 512) as u32).to_le_bytes());
        table[446 + 12..446 + 16].copy_from_slice(&(sectors(blocks) as u32).to_le_bytes());
        table
    };
    for (at, table) in [(0, extended), (table_at, logical(FILE_SYSTEM_BLOCKS))] {
        let operations = rig.write(at, &table);
        rig.carry_out(operations);
    }
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let operations = rig.write(table_at, &logical(FILE_SYSTEM_BLOCKS + 2000));
    rig.carry_out(operations);
    rig.commit(&[(FILE_SYSTEM_BLOCKS + 1000, content(2))]);
    assert_eq!(rig.owed(), 2);
    let fault = rig.journals.disk(0).fault();
    assert!(fault.is_none(), "{fault:?}");
}

/// A kernel that has given its journal up leaves it open when it unmounts. Another file system is made then, that begins elsewhere, and
/// what is written to it reaches storage, whatever the old log has there.
#[test]
fn a_file_system_that_is_made_beneath_an_open_log_is_whole() {
    const NEXT: u64 = 2 << 20;
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(3000, content(1)), (5000, content(2))]);
    let other = rig.directory.path().join("other");
    std::fs::File::create(&other).and_then(|file| file.set_len(DISK_BYTES)).expect("made");
    let offset = format!("offset={NEXT}");
    let options = ["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4", "-E", "lazy_itable_init=1,nodiscard"];
    run("mke2fs", &[&options[..], &["-E", &offset]].concat(), &other, &[&FILE_SYSTEM_BLOCKS.to_string()]);
    let mut table = partition_table(FILE_SYSTEM_BLOCKS);
    table[446 + 8..446 + 12].copy_from_slice(&((NEXT / 512) as u32).to_le_bytes());
    let operations = rig.write(0, &table);
    rig.carry_out(operations);
    let mut expected = std::fs::read(&other).expect("read");
    expected[..512].copy_from_slice(&table);
    let found = extfs::discover(&expected).expect("readable").remove(0);
    let begin = |at: u64| expected[at as usize..][..BLOCK as usize].to_vec();
    let mut written: Vec<u64> =
        (NEXT..DISK_BYTES).step_by(BLOCK as usize).filter(|at| begin(*at).iter().any(|byte| *byte != 0)).collect();
    // As mke2fs does: the superblock is the last.
    written.rotate_left(1);
    for at in written.clone() {
        let operations = rig.write(at, &begin(at));
        rig.carry_out(operations);
    }
    let operations = rig.woken();
    rig.carry_out(operations);
    assert!(
        rig.journals.logs().iter().all(|log| log.place().home_start != NEXT),
        "both would have what is written there"
    );
    // Its log, as its kernel writes it.
    for extent in found.journal.extents(&found.superblock) {
        for index in (1..u64::from(extent.count)).step_by(16) {
            let at = NEXT + (extent.physical + index) * BLOCK;
            expected[at as usize..][..BLOCK as usize].copy_from_slice(&content(index as u8));
            let operations = rig.write(at, &content(index as u8));
            rig.carry_out(operations);
            written.push(at);
        }
    }
    assert!(rig.log_at.iter().any(|at| written.contains(at)), "the logs lie over each other");
    assert!(rig.journals.disk(0).fault().is_some_and(|fault| fault.contains("another file system in its place")));
    let (image, _) = rig.die_and_finish();
    let stored = std::fs::read(&image).expect("the image");
    for at in written {
        let range = at as usize..(at + BLOCK) as usize;
        assert!(stored[range.clone()] == expected[range], "what was written at byte {at} is not there");
    }
}

/// What may be made of a disk whose file system is not mounted any more, and whose log is open still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    /// A member of an md array with metadata 1.2, which leaves the file system's superblock where it is.
    Array,
    /// The partition begins elsewhere, and has no file system yet that anybody here knows.
    OtherTable,
    /// A physical volume of LVM over the partition, whose signatures were not wiped.
    Volume,
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The daemon dies with it, and another one finds its files.
    Killed,
    VmGone,
    Reset,
}

#[test]
fn nothing_is_replayed_onto_what_was_made_of_a_disk_since() {
    for placement in [PlacementKind::Retain, PlacementKind::Copy] {
        for made in [Made::Array, Made::OtherTable, Made::Volume] {
            for ended in [Ended::Killed, Ended::VmGone, Ended::Reset] {
                let what = format!("{placement:?}, {made:?}, {ended:?}");
                let mut rig = Rig::with(64 << 20, placement, None);
                rig.open();
                rig.commit(&[(3000, content(1)), (3001, content(2))]);
                let (at, bytes) = match made {
                    Made::Array => {
                        let mut superblock = vec![0; 4096];
                        superblock[..8].copy_from_slice(&[0xfc, 0x4e, 0x2b, 0xa9, 1, 0, 0, 0]);
                        superblock[144] = 8;
                        (PARTITION + 4096, superblock)
                    }
                    Made::OtherTable => {
                        let mut table = partition_table(FILE_SYSTEM_BLOCKS);
                        table[446 + 8..446 + 12].copy_from_slice(&((3 << 20) / 512_u32).to_le_bytes());
                        (0, table)
                    }
                    Made::Volume => {
                        let mut label = vec![0; 512];
                        label[..8].copy_from_slice(b"LABELONE");
                        (PARTITION + 512, label)
                    }
                };
                let operations = rig.write(at, &bytes);
                rig.carry_out(operations);
                // One block of it lies where a block was that is in the log, and one in the log's own place.
                let log_at = rig.log_at[40];
                for (at, seed) in [(Rig::home_at(3000), 8), (log_at, 9)] {
                    let operations = rig.write(at, &content(seed));
                    rig.carry_out(operations);
                }
                let operations = rig.woken();
                rig.carry_out(operations);
                let left;
                let image = match ended {
                    Ended::Killed => {
                        left = rig.die_and_finish().0;
                        left.clone()
                    }
                    Ended::VmGone => {
                        rig.journals.recover_all().expect("finished");
                        rig.image.clone()
                    }
                    Ended::Reset => {
                        let table = Arc::new(rig.map("after"));
                        rig.route.started(Start::Fresh, &table).expect("started");
                        rig.image.clone()
                    }
                };
                let stored = std::fs::read(&image).expect("the image");
                let block = |at: u64| &stored[at as usize..][..BLOCK as usize];
                assert!(block(Rig::home_at(3000)) == content(8), "{what}: an older block is written over it");
                assert!(block(Rig::home_at(3001)) != content(2), "{what}: something is replayed");
                assert!(block(log_at) == content(9), "{what}: what was written there is not there");
            }
        }
    }
}

#[test]
fn a_file_system_is_replaced_while_writes_are_in_flight() {
    let mut rig = Rig::new();
    rig.open();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.commit(&[(first, content(1)), (first + 1, content(2))]);
    let in_flight = rig.write(Rig::home_at(first), &content(1));
    assert_eq!(in_flight.len(), 1);
    let mkfs = rig.write(Rig::home_at(0), &vec![0; BLOCK as usize]);
    rig.carry_out(mkfs);
    assert!(rig.journals.logs().is_empty(), "there is no file system any more");
    rig.carry_out(in_flight);
    assert!(rig.home(first) == content(1), "the guest's own write landed as it was");
    let after = rig.write(rig.log_at[7], &content(9));
    rig.carry_out(after);
    let mut block = vec![0; BLOCK as usize];
    rig.file.read_exact_at(&mut block, rig.log_at[7]).expect("read");
    assert!(block == content(9), "where the log was is a disk like any other");
    assert_eq!(rig.route(RequestKind::Flush, 0, &[]).len(), 1);
}

/// What somebody does with the image of a VM that has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Since {
    Nothing,
    /// It is recovered, by a process that is killed after its last write.
    Recovered,
    /// e2fsck, which finds an empty journal to which an error happened, and clears that.
    Checked,
    /// Mounted, written, and unmounted: transactions have got numbers that held ones have, too.
    Mounted,
}

#[test]
fn a_held_log_never_lands_on_an_image_that_was_used_since() {
    for since in [Since::Nothing, Since::Recovered, Since::Checked, Since::Mounted] {
        let mut rig = Rig::new();
        let first = FILE_SYSTEM_BLOCKS - 100;
        rig.open();
        rig.commit(&[(first, content(1))]);
        let (next, at) = (rig.builder.sequence + 1, rig.log_at[0]);
        let file = rig.file.try_clone().expect("the image");
        let by_others = |sequence: u32| {
            let mut block = vec![0; BLOCK as usize];
            file.read_exact_at(&mut block, at).expect("read");
            jbd2::SuperblockEdit::new(&mut block).expect("a superblock").sequence(sequence).errno(0).seal();
            file.write_all_at(&block, at).expect("written");
        };
        let (image, left) = rig.die();
        let copy = image.with_extension("copy");
        std::fs::DirBuilder::new().mode(0o700).create(&copy).expect("a directory");
        for entry in std::fs::read_dir(left.path()).expect("files").flatten() {
            std::fs::copy(entry.path(), copy.join(entry.file_name())).expect("copied");
        }
        let finish =
            |left: &AreaDirectory| finish_directory(left, std::slice::from_ref(&image)).and_then(Finish::into_result);
        match since {
            Since::Nothing => {}
            Since::Recovered => assert_eq!(finish(&left).expect("finished")[0].recovery.blocks_written, 1),
            Since::Checked => by_others(next - 2),
            Since::Mounted => by_others(next),
        }
        drop(left);
        let registry = image.parent().expect("its directory").join("registry");
        let finished = finish(&AreaDirectory::take_over(&copy, &registry).expect("free"));
        match (since, finished) {
            (Since::Nothing, Ok(logs)) => assert_eq!(logs[0].recovery.blocks_written, 1),
            (Since::Recovered, Ok(logs)) => assert_eq!(logs[0].recovery.blocks_written, 0),
            (Since::Checked | Since::Mounted, Err(FinishError::Refused(_))) => {}
            (since, other) => panic!("{since:?}: {other:?}"),
        }
        let mut block = vec![0; BLOCK as usize];
        file.read_exact_at(&mut block, Rig::home_at(first)).expect("read");
        assert_eq!(block == content(1), matches!(since, Since::Nothing | Since::Recovered), "{since:?}");
    }
}

#[test]
fn a_home_write_waits_for_the_hosts_own() {
    for host_ends_well in [true, false] {
        let mut rig = Rig::with_budget(0);
        let block = FILE_SYSTEM_BLOCKS - 100;
        rig.open();
        rig.commit(&[(block, content(1))]);
        // The guest changes the page, so its content is copied, which takes memory that there is none of.
        let retained = (0..PAGES).map(PageId).find(|page| rig.memory.is_retained(*page)).expect("a retained page");
        rig.memory.simulated_guest_write(retained, 0, &content(2));
        let host = rig.woken();
        assert_eq!(host.len(), 1, "the host writes home what is copied");
        let guest = rig.write(Rig::home_at(block), &content(2));
        assert!(guest.is_empty(), "the guest's write to the same block waits");
        let [host] = host.try_into().expect("one write");
        if host_ends_well {
            rig.carry_out(vec![host]);
        } else {
            rig.end(&host, Err(std::io::Error::other("storage failed")));
        }
        assert!(rig.home(block) == content(2), "the guest's write follows, and lands last");
        rig.journals.area.check().expect("the books are right");
        rig.journals.recover_all().expect("recovered");
        assert!(rig.home(block) == content(1), "the committed version is what a complete journal makes");
    }
}

#[test]
fn a_held_log_never_lands_on_the_file_system_of_another() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    rig.commit(&[(first, content(1))]);
    // Another image of the same shape has taken its place, and an amberlog has marked its journal.
    let mut block = rig.superblock.clone();
    block[0x30..0x40].fill(0x5a);
    jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(0).errno(-5).seal();
    rig.file.write_all_at(&block, rig.log_at[0]).expect("written");
    let before = rig.home(first);
    let (image, left) = rig.die();
    let named = finish_directory(&left, std::slice::from_ref(&image));
    let error = named.and_then(Finish::into_result).expect_err("refused").to_string();
    assert!(error.contains("the UUIDs differ"), "{error}");
    let mut block = vec![0; BLOCK as usize];
    std::fs::File::open(&image).expect("the image").read_exact_at(&mut block, Rig::home_at(first)).expect("read");
    assert!(block == before, "nothing was written");
}

#[test]
fn an_image_that_was_renamed_is_found() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    rig.commit(&[(first, content(1))]);
    let (image, left) = rig.die();
    let renamed = image.with_file_name("renamed");
    std::fs::rename(&image, &renamed).expect("renamed");
    let other = image.with_file_name("other");
    std::fs::copy(&renamed, &other).expect("copied");
    // Not by itself, and not in a copy: only in the very same file.
    for images in [&[][..], std::slice::from_ref(&other)] {
        let outcome = finish_directory(&left, images).expect("a good directory");
        assert!(outcome.finished.is_empty());
        let error = outcome.failed[0].error.to_string();
        assert!(error.contains("is not there any more") && error.contains("image"), "{error}");
    }
    let outcome = finish_directory(&left, &[other, renamed.clone()]).expect("a good directory");
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    assert_eq!((&outcome.finished[0].image, outcome.finished[0].recovery.blocks_written), (&renamed, 1));
    let mut block = vec![0; BLOCK as usize];
    std::fs::File::open(&renamed).expect("the image").read_exact_at(&mut block, Rig::home_at(first)).expect("read");
    assert!(block == content(1));
}

#[test]
fn what_is_left_for_other_images_keeps_nobody_waiting() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let (image, left) = rig.die();
    let at = |name: &str| image.with_file_name(name);
    let (away, other, copy) = (at("away"), at("other"), at("copy"));
    std::fs::rename(&image, &away).expect("renamed");
    std::fs::copy(&away, &copy).expect("copied");
    std::fs::write(&other, vec![0; 1 << 20]).expect("written");
    let failed = |images: &[PathBuf]| {
        let mut outcome = finish_directory(&left, images).expect("a good directory");
        assert!(outcome.finished.is_empty());
        outcome.take_failure_of_named().map_or(Ok(outcome.failed.len()), |error| Err(error.to_string()))
    };
    assert_eq!(failed(&[]), Ok(1));
    assert_eq!(failed(std::slice::from_ref(&other)), Ok(1));
    // It is where that image was, or is a copy of it: what is owed is owed to this one.
    let error = failed(&[other.clone(), image.clone()]).expect_err("its own");
    assert!(error.contains("is not there any more") && error.contains("--give-up"), "{error}");
    let error = failed(&[copy, other]).expect_err("a copy");
    assert!(error.contains("is another file with the same mark"), "{error}");
    let mut outcome = finish_directory(&left, std::slice::from_ref(&away)).expect("a good directory");
    assert!(outcome.take_failure_of_named().is_none() && outcome.finished.len() == 1);
}

/// Two file systems of one image are brought home, and a flush fails for the first: it was to cover what the guest of the other had written, too, and no
/// later one says so, in the same attempt or another. All of it goes home, and nobody is told that it is whole.
#[test]
fn what_a_failed_flush_may_have_lost_is_not_called_recovered() {
    const SECOND: u64 = 32 << 20;
    for failing in 0..=1 {
        let mut rig = Rig::with_second(SECOND);
        let logs = [(PARTITION, rig.log_at.clone()), (SECOND, rig.log_at_of(SECOND))];
        let block = FILE_SYSTEM_BLOCKS - 100;
        for (seed, (_, log_at)) in logs.iter().enumerate() {
            rig.goes_on_with(log_at.clone());
            rig.open();
            rig.commit(&[(block, content(seed as u8))]);
        }
        let (image, left) = rig.die();
        let finish = || finish_directory(&left, std::slice::from_ref(&image)).expect("a good directory");
        simulated_flushes::fail(failing);
        let mut outcome = finish();
        simulated_flushes::fail(0);
        assert_eq!((outcome.finished.len() as u64, outcome.failed.len() as u64), (2 - failing, failing));
        outcome.finished.extend(finish().into_result().expect("storage is well again"));
        assert_eq!(outcome.finished.len(), 2);
        let bytes = std::fs::read(&image).expect("the image");
        for log in outcome.finished {
            let (seed, (start, log_at)) =
                logs.iter().enumerate().find(|(_, (start, _))| *start == log.offset).expect("one of them");
            let (status, notes) = (log.recovery.status, log.recovery.notes.join("; "));
            let expected = if failing > 0 { recovery::Status::Damaged } else { recovery::Status::Recovered };
            assert_eq!((status, notes.contains("run e2fsck -f")), (expected, failing > 0), "{notes}");
            let home = &bytes[(start + block * BLOCK) as usize..][..BLOCK as usize];
            assert!(home == content(seed as u8), "it is home");
            let journal = &bytes[log_at[0] as usize..][..1024];
            assert!(jbd2::Superblock::decode(journal).is_ok_and(|said| said.is_empty() && said.errno == 0));
            let of_home = extfs::Superblock::parse(&bytes[*start as usize + 1024..][..1024]).expect("a superblock");
            assert_eq!(of_home.state & extfs::state::ERROR != 0, failing > 0, "e2fsck looks by itself");
        }
    }
}

/// Another file has the image's name, and is what it was by its mark: whoever gives up what is held is told that first.
#[test]
fn an_image_to_which_what_is_held_can_be_brought_home_is_told() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let (image, left) = rig.die();
    let at = |name: &str| image.with_file_name(name);
    std::fs::copy(&image, at("copy")).expect("copied");
    std::fs::rename(&image, at("away")).expect("renamed");
    let failed = |images: &[PathBuf]| {
        let mut outcome = placement::finish_directory_into(&left, images).expect("a good directory");
        assert!(outcome.finished.is_empty() && outcome.failed.len() == 1, "{outcome:?}");
        outcome.failed.remove(0)
    };
    assert_eq!(failed(&[]).fits(), None, "nothing is there");
    std::fs::write(&image, vec![0; 1 << 20]).expect("written");
    assert_eq!(failed(&[]).fits(), None, "it is none of its");
    std::fs::rename(at("copy"), &image).expect("renamed");
    assert_eq!(failed(&[]).fits(), Some(image.as_path()));
    assert_eq!(failed(&[at("nowhere")]).fits(), Some(image.as_path()));
    let outcome = placement::finish_directory_into(&left, std::slice::from_ref(&image)).expect("a good directory");
    assert!(outcome.failed.is_empty() && outcome.finished.len() == 1, "{outcome:?}");
}

#[test]
fn what_is_given_up_is_gone_and_nothing_else() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    rig.commit(&[(first, content(1)), (first + 1, content(2))]);
    rig.commit(&[(first, content(3))]);
    let (image, left) = rig.die();
    left.register(&image).expect("registered");
    let registry = image.with_file_name("registry");
    let before = std::fs::read(&image).expect("the image");
    let away = image.with_file_name("away");
    std::fs::rename(&image, &away).expect("renamed");
    let outcome = finish_directory(&left, &[]).expect("a good directory");
    let failed = &outcome.failed[0];
    assert!(failed.is_of(&image) && !failed.is_of(&away));
    let losses = placement::losses(&left, &[failed]).expect("looked");
    assert_eq!(losses.len(), 1);
    assert_eq!((losses[0].transactions, losses[0].blocks), (Some(2), Some(2)), "{losses:?}");
    assert!(finish_directory(&left, &[]).expect("a good directory").failed.len() == 1, "asking gives nothing up");
    // Nothing that was not said.
    placement::give_up(&left, &[]).expect("nothing");
    assert!(finish_directory(&left, &[]).expect("a good directory").failed.len() == 1);
    placement::give_up(&left, &[failed]).expect("given up");
    let outcome = finish_directory(&left, &[]).expect("a good directory");
    assert!(outcome.failed.is_empty() && outcome.finished.is_empty());
    for ending in ["table", "pool"] {
        assert!(!left.path().join(format!("log-0.{ending}")).exists(), "{ending}");
    }
    // The image is not touched, and its mark says still that something is missing.
    std::fs::rename(&away, &image).expect("renamed");
    assert!(std::fs::read(&image).expect("the image") == before);
    assert_eq!(AreaDirectory::find(&registry, &image).expect("looked"), None);
    assert!(matches!(owed(&image, None).expect("looked"), Owed::Lost(_)));
    placement::remove_finished(&left);
    assert!(!left.path().exists());
}

fn block_of(image: &Path, block: u64) -> Vec<u8> {
    let mut content = vec![0; BLOCK as usize];
    std::fs::File::open(image).expect("the image").read_exact_at(&mut content, Rig::home_at(block)).expect("read");
    content
}

/// The very same file, with what another one has in it.
fn restore(from: &Path, to: &Path) {
    std::fs::write(to, std::fs::read(from).expect("a copy")).expect("restored");
}

#[test]
fn an_older_copy_of_an_image_is_told_from_it() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    let path = |rig: &Rig, name: &str| rig.directory.path().join(name);
    let before = path(&rig, "before");
    std::fs::copy(&rig.image, &before).expect("copied");
    rig.open();
    rig.commit(&[(first, content(1))]);
    rig.journals.tick(0);
    let while_it_ran = path(&rig, "while-it-ran");
    std::fs::copy(&rig.image, &while_it_ran).expect("copied");
    // Something goes home, and is not held from then on.
    rig.journals.disk(0).counters.home_bytes_to_storage.fetch_add(BLOCK, std::sync::atomic::Ordering::SeqCst);
    rig.journals.tick(0);
    rig.journals.tick(0);
    let (image, left) = rig.die();
    let as_left = image.with_file_name("as-left");
    std::fs::copy(&image, &as_left).expect("copied");
    let named = std::slice::from_ref(&*image);
    for (copy, expected) in [(&while_it_ran, "an older copy"), (&before, "used since")] {
        restore(copy, &image);
        let bytes = std::fs::read(&image).expect("read");
        let outcome = finish_directory(&left, named).expect("a good directory");
        let error = &outcome.failed[0].error;
        assert!(matches!(error, FinishError::Refused(_)) && error.to_string().contains(expected), "{error}");
        assert!(std::fs::read(&image).expect("read") == bytes, "nothing was written");
    }
    restore(&as_left, &image);
    let outcome = finish_directory(&left, named).expect("a good directory");
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    assert!(block_of(&image, first) == content(1));
}

/// The mark of a file system that was idle since an image was copied is the same on both, and so is one that cannot be written anew: it says nothing
/// against the copy.
#[test]
fn an_image_that_is_older_by_one_of_its_marks_gets_nothing_that_is_held() {
    const SECOND: u64 = 32 << 20;
    let mut rig = Rig::with_second(SECOND);
    let logs = [(PARTITION, rig.log_at.clone()), (SECOND, rig.log_at_of(SECOND))];
    let block = FILE_SYSTEM_BLOCKS - 100;
    for (seed, (_, log_at)) in logs.iter().enumerate() {
        rig.goes_on_with(log_at.clone());
        rig.open();
        rig.commit(&[(block, content(seed as u8))]);
    }
    rig.journals.tick(0);
    let older = std::fs::read(&rig.image).expect("the image");
    // Something goes home, and is not held from then on.
    rig.journals.disk(0).counters.home_bytes_to_storage.fetch_add(BLOCK, std::sync::atomic::Ordering::SeqCst);
    rig.journals.tick(0);
    rig.journals.tick(0);
    let (image, left) = rig.die();
    let newer = std::fs::read(&image).expect("the image");
    for (start, log_at) in &logs {
        let mark_at = log_at[0] as usize;
        assert!(older[mark_at..][..BLOCK as usize] != newer[mark_at..][..BLOCK as usize], "its mark goes on");
        let mut bytes = newer.clone();
        let part = *start as usize..(start + FILE_SYSTEM_BLOCKS * BLOCK) as usize;
        bytes[part.clone()].copy_from_slice(&older[part]);
        std::fs::write(&image, &bytes).expect("restored");
        let outcome = finish_directory(&left, std::slice::from_ref(&image)).expect("a good directory");
        assert!(outcome.finished.is_empty(), "{:?}", outcome.finished);
        assert_eq!(outcome.failed.len(), 2);
        for failed in &outcome.failed {
            let (error, sentence) = (&failed.error, failed.error.to_string());
            assert!(matches!(error, FinishError::Refused(_)) && sentence.contains("an older copy"), "{sentence}");
        }
        assert!(std::fs::read(&image).expect("the image") == bytes, "something was changed");
    }
    std::fs::write(&image, &newer).expect("restored");
    let outcome = finish_directory(&left, std::slice::from_ref(&image)).expect("a good directory");
    assert!(outcome.failed.is_empty() && outcome.finished.len() == 2, "{outcome:?}");
    let bytes = std::fs::read(&image).expect("the image");
    for (seed, (start, _)) in logs.iter().enumerate() {
        let home = &bytes[(start + block * BLOCK) as usize..][..BLOCK as usize];
        assert!(home == content(seed as u8), "it is home");
    }
}

#[test]
fn an_image_that_was_opened_again_is_not_the_one_that_is_held() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let (image, left) = rig.die();
    // Another VM was given it, and was killed, too: its mark says another number.
    let mut other = Rig::new();
    other.open();
    let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
    other.file.read_exact_at(&mut raw, other.log_at[0]).expect("read");
    let log_at = other.log_at[0];
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&image).expect("the image");
    let mut ours = vec![0; jbd2::SUPERBLOCK_BYTES];
    file.read_exact_at(&mut ours, log_at).expect("read");
    assert!(matches!(placement::HeldMark::read(&ours), placement::HeldMark::Ours(..)));
    // Clones of one image have the same UUIDs.
    raw[0x30..0x40].copy_from_slice(&ours[0x30..0x40]);
    jbd2::SuperblockEdit::new(&mut raw).expect("a superblock").seal();
    file.write_all_at(&raw, log_at).expect("written");
    let outcome = finish_directory(&left, std::slice::from_ref(&image)).expect("a good directory");
    let error = outcome.failed[0].error.to_string();
    assert!(error.contains("opened another time"), "{error}");
}

#[test]
fn an_image_that_was_moved_to_another_file_is_finished_where_the_caller_says() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    rig.commit(&[(first, content(1))]);
    let (image, left) = rig.die();
    let copy = image.with_file_name("copy");
    std::fs::copy(&image, &copy).expect("copied");
    let named = std::slice::from_ref(&copy);
    // While the image is there, what is held is the image's.
    let outcome = finish_directory_into(&left, named).expect("a good directory");
    let error = outcome.failed[0].error.to_string();
    assert!(error.contains("is a copy of"), "{error}");
    std::fs::remove_file(&image).expect("moved");
    let outcome = finish_directory(&left, named).expect("a good directory");
    let error = outcome.failed[0].error.to_string();
    assert!(error.contains("--image") && error.contains("is not there any more"), "{error}");
    // Another file has its name by now.
    let other = Rig::new();
    std::fs::copy(&other.image, &image).expect("another one");
    let outcome = finish_directory(&left, &[]).expect("a good directory");
    let error = outcome.failed[0].error.to_string();
    assert!(error.contains("another file is there by now"), "{error}");
    let outcome = finish_directory_into(&left, named).expect("a good directory");
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    assert!(block_of(&copy, first) == content(1));
    assert!(std::fs::read(&image).expect("read") == std::fs::read(&other.image).expect("read"), "it was left alone");
}

#[test]
fn the_same_image_by_another_name_is_the_same_image() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    rig.commit(&[(first, content(1))]);
    let (image, left) = rig.die();
    // Through a loop device it is another one as far as its number goes: nothing is written twice, or to the wrong one.
    let attached = Command::new("losetup").args(["--find", "--show"]).arg(image.as_path()).output();
    match attached.ok().filter(|output| output.status.success()) {
        Some(output) => {
            let device = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
            let named = std::slice::from_ref(&device);
            for finish in [finish_directory, finish_directory_into] {
                let outcome = finish(&left, named).expect("a good directory");
                let error = &outcome.failed[0].error;
                let is_refused = matches!(error, FinishError::Refused(_));
                assert!(is_refused && error.to_string().contains("the same by another name"), "{error}");
            }
            assert!(Command::new("losetup").arg("--detach").arg(&device).status().expect("losetup").success());
        }
        None => println!("left out: no loop device can be had here"),
    }
    let (second, link) = (image.with_file_name("second"), image.with_file_name("link"));
    std::fs::hard_link(&image, &second).expect("a second name");
    std::os::unix::fs::symlink(&second, &link).expect("a link");
    // Its own name is another file's by now.
    std::fs::remove_file(&image).expect("removed");
    std::fs::write(&image, "something else").expect("written");
    let outcome = finish_directory(&left, std::slice::from_ref(&link)).expect("a good directory");
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    assert!(block_of(&second, first) == content(1));
    assert_eq!(std::fs::read_to_string(&image).expect("there"), "something else");
}

#[test]
fn an_image_counts_that_is_named_or_in_the_list_and_no_other() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    rig.commit(&[(first, content(1))]);
    let (image, left) = rig.die();
    let outcome = finish_directory(&left, &[]).expect("a good directory");
    let error = outcome.failed[0].error.to_string();
    assert!(error.contains("nobody has named") && error.contains("--image"), "{error}");
    left.register(&image).expect("registered");
    let outcome = finish_directory(&left, &[]).expect("a good directory");
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
}

#[test]
fn what_an_earlier_amberlog_left_is_found_and_finished() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    rig.commit(&[(first, content(1))]);
    let registry = rig.directory.path().join("registry");
    let (image, left) = rig.die();
    let area = left.path().to_owned();
    drop(left);
    // As it was written then: no list of images, no numbers of openings, and a link for an entry.
    let text = std::fs::read_to_string(area.join("area.json")).expect("described");
    let mut description: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    description.as_object_mut().expect("an object").remove("images");
    std::fs::write(area.join("area.json"), description.to_string()).expect("written");
    let table = std::fs::OpenOptions::new().write(true).open(area.join("log-0.table")).expect("a table");
    table.write_all_at(&[0; 32], 40).expect("written");
    let by_image = registry.join("by-image");
    let key =
        std::fs::metadata(&image).map(|image| format!("file-{:x}-{:x}", image.dev(), image.ino())).expect("a key");
    let _ = std::fs::remove_file(by_image.join(&key));
    std::os::unix::fs::symlink(&area, by_image.join(&key)).expect("a link");
    let found = AreaDirectory::find(&registry, &image).expect("looked").expect("found");
    assert_eq!(found, area);
    let left = AreaDirectory::take_over(&found, &registry).expect("free");
    let outcome = finish_directory(&left, &[]).expect("a good directory");
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    assert!(block_of(&image, first) == content(1));
    left.remove();
    assert!(!area.exists() && by_image.join(&key).symlink_metadata().is_err());
}

/// A start that was killed at once, and a VM that waits for its guest, are named in front of what holds it.
#[test]
fn what_is_held_behind_an_area_that_holds_nothing_is_owed() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let (image, left) = rig.die();
    let (at, own) = (left.path().to_owned(), placement::own_place());
    drop(left);
    let text = std::fs::read(at.join("area.json")).expect("described");
    let mut description: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    // It may be about any image.
    description.as_object_mut().expect("an object").remove("images");
    std::fs::write(at.join("area.json"), description.to_string()).expect("written");
    let left = AreaDirectory::take_over(&at, &own).expect("free");
    left.register(&image).expect("registered");
    drop(left);
    let held = Owed::Held(at.clone(), Some(1));
    assert_eq!(owed(&image, None).expect("looked"), held);
    let in_front = || {
        let area = AreaDirectory::create(&at.with_file_name("others"), &own).expect("made");
        area.register(&image).expect("registered");
        area
    };
    let killed = in_front().path().to_owned();
    assert_eq!(owed(&image, None).expect("looked"), held, "one that was killed is in front");
    let waiting = in_front();
    assert_eq!(owed(&image, None).expect("looked"), held, "one that waits is in front");
    // What is not known counts where nothing is.
    let left = AreaDirectory::take_over(&at, &own).expect("free");
    finish_directory(&left, std::slice::from_ref(&image)).and_then(Finish::into_result).expect("finished");
    left.remove();
    assert_eq!(owed(&image, None).expect("looked"), Owed::InUse(waiting.path().to_owned()));
    waiting.remove();
    AreaDirectory::take_over(&killed, &own).expect("free").remove();
    assert_eq!(owed(&image, None).expect("looked"), Owed::Nothing);
}

#[test]
fn an_image_whose_log_is_lost_is_not_called_clean() {
    let mut rig = Rig::new();
    assert_eq!(owed(&rig.image, None).expect("looked"), Owed::Nothing);
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    // The list of this test is none that anybody looks into: as after the host was started anew.
    let found = owed(&rig.image, None).expect("looked");
    let sentence = found.sentence(&rig.image).expect("it is owed something");
    assert!(matches!(&found, Owed::Lost(logs) if logs.len() == 1), "{found:?}");
    assert!(sentence.contains("carries amberlog's mark") && sentence.contains("e2fsck -f"), "{sentence}");
    let (image, written) = rig.die_and_finish();
    assert_eq!((written, owed(&image, None).expect("looked")), (1, Owed::Nothing));
}

/// A VMM of another user passes through the VM's directory: it is as much ours as any other, and what is held in it as much owed.
#[test]
fn what_others_pass_through_is_found_and_finished_and_swept() {
    for is_noted in [true, false] {
        let mut rig = Rig::new();
        let first = FILE_SYSTEM_BLOCKS - 100;
        rig.open();
        rig.commit(&[(first, content(1))]);
        let registry = rig.directory.path().join("registry");
        let (image, left) = rig.die();
        // Where directories are made unless somebody says otherwise.
        let area = registry.join("vm-7-0");
        std::fs::rename(left.path(), &area).expect("renamed");
        drop(left);
        let idle = AreaDirectory::create(&registry, &registry).expect("made").path().to_owned();
        for directory in [&area, &idle] {
            std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o711)).expect("its mode");
        }
        let by_image = registry.join("by-image");
        for entry in std::fs::read_dir(&by_image).expect("a registry").flatten() {
            std::fs::remove_file(entry.path()).expect("removed");
        }
        if is_noted {
            AreaDirectory::take_over(&area, &registry).expect("free").register(&image).expect("noted");
            let text = std::fs::read(area.join("area.json")).expect("described");
            let mut description: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
            description.as_object_mut().expect("an object").remove("images");
            std::fs::write(area.join("area.json"), description.to_string()).expect("written");
            assert_eq!(AreaDirectory::find(&registry, &image).expect("looked").as_ref(), Some(&area));
        }
        assert_eq!(placement::area_of_marked(&registry, &image).expect("looked").as_ref(), Some(&area));
        placement::sweep(&registry, &registry);
        assert!(!idle.exists() && area.exists());
        let left = AreaDirectory::take_over(&area, &registry).expect("free");
        let outcome = finish_directory(&left, std::slice::from_ref(&image)).expect("a good directory");
        assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
        assert!(block_of(&image, first) == content(1));
    }
}

/// Another user's word that he holds an image's log keeps nobody from it; that he has the log does.
#[test]
fn another_user_who_has_the_log_keeps_an_image_from_being_used() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: a second user can only be played by root");
        return;
    }
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let (image, left) = rig.die();
    let theirs = tempfile::Builder::new().prefix("amberlog-").tempdir_in("/dev/shm").expect("tmpfs");
    let (by_image, area) = (theirs.path().join("by-image"), theirs.path().join("vm-1-0"));
    std::fs::create_dir(&by_image).expect("made");
    let key =
        std::fs::metadata(&image).map(|image| format!("file-{:x}-{:x}", image.dev(), image.ino())).expect("a key");
    let entry = serde_json::json!({"schema": 1, "area": area}).to_string();
    let give = |path: &Path| std::os::unix::fs::chown(path, Some(65534), Some(65534)).expect("given");
    for (text, has_area, is_held) in [("x", false, false), (&entry, false, false), (&entry, true, true)] {
        std::fs::write(by_image.join(&key), text).expect("written");
        if has_area {
            std::fs::create_dir(&area).expect("made");
            std::fs::copy(left.path().join("log-0.table"), area.join("log-0.table")).expect("copied");
            give(&area);
        }
        give(theirs.path());
        let sentence = placement::held_by_another(&image).expect("looked");
        assert_eq!(sentence.as_ref().is_some_and(|sentence| sentence.contains("User 65534")), is_held, "{sentence:?}");
    }
}

/// What is held for an image that was made anew is refused, with a way out that is one.
#[test]
fn what_is_of_no_use_any_more_can_be_given_up() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let registry = rig.directory.path().join("registry");
    let (image, left) = rig.die();
    left.register(&image).expect("noted");
    run("mke2fs", &["-q", "-F", "-t", "ext4", "-b", "4096", "-E", "offset=1048576"], &image, &["6144"]);
    let outcome = finish_directory(&left, std::slice::from_ref(&image)).expect("a good directory");
    let sentence = outcome.failed[0].error.to_string();
    let way_out = format!("'amberlog recover --area {} --give-up {}'", left.path().display(), image.display());
    assert!(sentence.contains(&way_out) && outcome.failed[0].is_of(&image), "{sentence}");
    let anew = std::fs::read(&image).expect("the image");
    placement::give_up(&left, &[&outcome.failed[0]]).expect("given up");
    placement::remove_finished(&left);
    assert!(!left.path().exists() && std::fs::read(&image).expect("the image") == anew);
    assert_eq!(AreaDirectory::find(&registry, &image).expect("looked"), None);
}

#[test]
fn what_is_owed_to_nobody_is_swept_away_and_nothing_else() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(FILE_SYSTEM_BLOCKS - 100, content(1))]);
    let directory = rig.directory.path().to_owned();
    let (base, registry) = (directory.join("swept"), directory.join("registry"));
    let make = |name: &str| {
        let area = AreaDirectory::create(&base, &registry).expect("made");
        let path = base.join(name);
        std::fs::rename(area.path(), &path).expect("renamed");
        path
    };
    // A VM with read-only disks: its guest's memory and no log.
    let idle = make("vm-idle");
    std::fs::write(idle.join("ram"), [1; 4096]).expect("memory");
    let alive = AreaDirectory::create(&base, &registry).expect("made");
    let damaged = make("vm-damaged");
    std::fs::write(damaged.join("area.json"), "{").expect("written");
    let being_made = base.join("vm-being-made");
    std::fs::create_dir(&being_made).expect("made");
    let others = base.join("others");
    std::fs::create_dir(&others).expect("made");
    let (_image, left) = rig.die();
    let owed = base.join("vm-owed");
    std::fs::rename(left.path(), &owed).expect("renamed");
    drop(left);
    placement::sweep(&base, &registry);
    assert!(!idle.exists());
    for path in [alive.path(), &damaged, &being_made, &others, &owed] {
        assert!(path.exists(), "{}", path.display());
    }
}

#[test]
fn memory_that_came_later_is_found_again() {
    let mut rig = Rig::new();
    let first = FILE_SYSTEM_BLOCKS - 100;
    rig.open();
    let _table = rig.map("more");
    rig.next_page = PAGES;
    rig.commit(&[(first, content(1))]);
    assert!(rig.memory.is_retained(PageId(PAGES + 1)), "the block is held in the new memory");
    let (image, written) = rig.die_and_finish();
    assert_eq!(written, 1);
    let mut block = vec![0; BLOCK as usize];
    std::fs::File::open(&image).expect("the image").read_exact_at(&mut block, Rig::home_at(first)).expect("read");
    assert!(block == content(1));
}

#[test]
fn a_guest_that_began_elsewhere_does_not_go_on_with_a_held_journal() {
    let mut rig = Rig::new();
    let table = Arc::new(rig.map("more"));
    // A pause: what its journal holds is here.
    rig.route.started(Start::Resumed, &table).expect("goes on");
    let mut other = DiskRoute::new(Arc::clone(&rig.journals), 0);
    other.started(Start::Resumed, &table).expect("the same journals");
    // The same disk under journals that never saw it begin.
    let options = DiskOptions {
        name: "disk".to_owned(),
        path: rig.image.clone(),
        placement: PlacementKind::Retain,
        honour_flush: false,
        read_only: false,
        nvm: None,
        remote: None,
        durable_within: None,
        write_log: None,
    };
    for (placement, is_refused) in
        [(PlacementKind::Retain, true), (PlacementKind::Copy, true), (PlacementKind::Storage, false)]
    {
        let directory = rig.directory.path();
        let area = AreaDirectory::create(&directory.join("others"), &directory.join("registry")).expect("a directory");
        let disks = vec![DiskOptions { placement, ..options.clone() }];
        let memory = VmMemory::new();
        let options = JournalsOptions { disks, budget_bytes: u64::MAX, tracer: None };
        let journals = Journals::new(&memory, area, options).expect("journals");
        journals.area.set_hot_pages(HotPages::Foreseen);
        let outcome = DiskRoute::new(journals, 0).started(Start::Resumed, &table);
        assert_eq!(outcome.is_err(), is_refused, "{placement:?}: {outcome:?}");
    }
}

/// A backup is copied over an image while its VM waits for its VMM: what was read of it before counts no more.
#[test]
fn an_image_that_was_written_to_before_its_guest_begins_is_looked_at_anew() {
    let rig = Rig::new();
    let table = Arc::new(rig.map("more"));
    let prepared = |name: &str| {
        let directory = rig.directory.path();
        let area = AreaDirectory::create(&directory.join(name), &directory.join("registry")).expect("a directory");
        let disks = vec![DiskOptions {
            name: "disk".to_owned(),
            path: rig.image.clone(),
            placement: PlacementKind::Copy,
            honour_flush: false,
            read_only: false,
            nvm: None,
            remote: None,
            durable_within: None,
            write_log: None,
        }];
        let options = JournalsOptions { disks, budget_bytes: u64::MAX, tracer: None };
        Journals::new(&VmMemory::new(), area, options).expect("journals")
    };
    let ids = |journals: &Journals| journals.logs().iter().map(|log| log.id).collect::<Vec<_>>();
    let begins = |journals: &Arc<Journals>| DiskRoute::new(Arc::clone(journals), 0).started(Start::Fresh, &table);
    let untouched = prepared("untouched");
    let known = ids(&untouched);
    begins(&untouched).expect("as it was");
    assert_eq!(ids(&untouched), known);
    // The same file system, and nothing wrong with it: whatever was known of its log is of the one before.
    let restored = prepared("restored");
    let known = ids(&restored);
    rig.file.write_all_at(&rig.superblock, rig.log_at[0]).expect("written");
    begins(&restored).expect("it can be served");
    assert_eq!((known.len(), ids(&restored).len()), (1, 1));
    assert_ne!(ids(&restored), known);
    // From here on it is the guest who writes.
    let known = ids(&restored);
    rig.file.write_all_at(&rig.superblock, rig.log_at[0]).expect("written");
    begins(&restored).expect("it was reset");
    assert_eq!(ids(&restored), known);
    // And one that cannot be served as it is.
    let marked = prepared("marked");
    let mut superblock = rig.superblock.clone();
    superblock[0x20..0x24].copy_from_slice(&(-5i32).to_be_bytes());
    superblock[0xc0..0xe8].fill(0x5a);
    rig.file.write_all_at(&superblock, rig.log_at[0]).expect("written");
    let why = begins(&marked).expect_err("refused").to_string();
    assert!(why.contains("has a damaged mark of a journal server"), "{why}");
}

#[test]
fn a_log_is_not_handed_over_while_a_home_write_is_under_way() {
    let mut rig = Rig::new();
    rig.open();
    let block = 300;
    rig.commit(&[(block, content(1))]);
    let write = rig.write(Rig::home_at(block), &content(1));
    rig.commit(&[(block, content(2))]);
    let index = rig.journals.logs()[0].index();
    let change = rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    assert_eq!(change, Change::HandOver);
    assert!(
        !rig.route.hand_over(index, &mut Plan::default()).expect("asked"),
        "an older version is on its way to block {block}"
    );
    rig.carry_out(write);
    assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    assert_eq!(rig.journals.logs()[0].placement, PlacementKind::Storage);
    assert_eq!(rig.home(block), content(2));
}

/// A kernel that has written past its journal (ext4 its superblock, when it is tuned) has nothing left to write there: what it wrote is not
/// written over by what the journal has, under a guest that goes on.
#[test]
fn a_hand_over_leaves_what_the_guest_wrote_past_its_journal() {
    let mut rig = Rig::new();
    rig.open();
    let (block, other) = (300, 301);
    rig.commit(&[(block, content(1)), (other, content(1))]);
    let write = rig.write(Rig::home_at(block), &content(9));
    rig.carry_out(write);
    let index = rig.journals.logs()[0].index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    assert_eq!(rig.journals.logs()[0].placement, PlacementKind::Storage);
    assert_eq!((rig.home(block), rig.home(other)), (content(9), content(1)));
}

/// What is wished and is not so yet is shown.
#[test]
fn a_report_says_where_a_journal_is_wished_and_is_not() {
    let mut rig = Rig::new();
    let shown = |rig: &Rig| {
        let disk = rig.journals.report("vm").disks.remove(0);
        (disk.placement, disk.placement_wished)
    };
    rig.open();
    rig.commit(&[(3000, content(1))]);
    assert_eq!(shown(&rig), ("retain", None));
    let index = rig.journals.logs()[0].index();
    let wish = |rig: &Rig, to| rig.journals.change_placement(index, to).expect("it may");
    assert_eq!(wish(&rig, PlacementKind::Storage), Change::HandOver);
    assert_eq!(shown(&rig), ("retain", Some("storage")));
    assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    assert_eq!(shown(&rig), ("storage", None));
    assert_eq!(wish(&rig, PlacementKind::Copy), Change::AtNextMount);
    assert_eq!(shown(&rig), ("storage", Some("copy")));
    let mut closed = rig.superblock.clone();
    jbd2::SuperblockEdit::new(&mut closed).expect("a superblock").start(0).sequence(rig.builder.sequence).seal();
    let operations = rig.write(rig.log_at[0], &closed);
    rig.carry_out(operations);
    assert_eq!(shown(&rig), ("copy", None));
}

/// What the host writes home of a journal that its guest closes lands before what the guest writes there next, wherever the journal goes then.
#[test]
fn a_closed_journal_does_not_go_elsewhere_beside_home_writes_of_the_hosts() {
    for is_wished_before in [true, false] {
        let mut rig = Rig::new();
        rig.open();
        rig.commit(&[(3000, content(1))]);
        let log = rig.journals.logs().remove(0);
        let index = log.index();
        let wish = |rig: &Rig| rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
        log.begin_emptying();
        let host = rig.woken();
        assert_eq!(host.len(), 1, "the host writes it home");
        if is_wished_before {
            assert_eq!(wish(&rig), Change::HandOver);
        }
        let mut closed = rig.superblock.clone();
        jbd2::SuperblockEdit::new(&mut closed).expect("a superblock").start(0).sequence(rig.builder.sequence).seal();
        let operations = rig.write(rig.log_at[0], &closed);
        rig.carry_out(operations);
        assert!(!log.is_open());
        if !is_wished_before {
            assert_eq!(wish(&rig), Change::HandOver, "it is not there at once");
        }
        assert!(!rig.route.hand_over(index, &mut Plan::default()).expect("asked"), "not beside what is on its way");
        let write = rig.write(Rig::home_at(3000), &content(2));
        assert!(write.is_empty(), "it waits: {write:?}");
        rig.carry_out(host);
        assert_eq!(rig.home(3000), content(2), "the guest's write came last");
        assert_eq!(rig.journals.logs()[0].placement, PlacementKind::Storage);
        assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    }
}

#[test]
fn a_guest_that_was_left_goes_on_from_storage() {
    let mut rig = Rig::new();
    let another = |rig: &Rig, name: &str| {
        let (directory, options) = (rig.directory.path(), rig.journals.disk(0).options.clone());
        let area = AreaDirectory::create(&directory.join(name), &directory.join("registry")).expect("a directory");
        let options = JournalsOptions { disks: vec![options.into()], budget_bytes: 64 << 20, tracer: None };
        Journals::new(&VmMemory::new(), area, options).expect("journals")
    };
    another(&rig, "before").adopt().expect("an empty log without a mark");
    rig.open();
    let earlier = superblock_of(&rig);
    rig.commit(&[(300, content(1))]);
    assert!(rig.journals.check_left().is_err(), "it is held");
    // Whoever began with this log is not the one who asks.
    let before = std::fs::read(&rig.image).expect("the image");
    let error = another(&rig, "too-early").adopt().expect_err("it is marked").to_string();
    assert!(error.contains("marked"), "{error}");
    assert!(std::fs::read(&rig.image).expect("the image") == before, "nothing was changed");

    let index = rig.journals.logs()[0].index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    rig.journals.check_left().expect("nothing is held");
    rig.journals.flush_images().expect("flushed");

    rig.journals = another(&rig, "next");
    rig.journals.adopt().expect("it was left");
    rig.route = DiskRoute::new(Arc::clone(&rig.journals), 0);
    let table = Arc::new(rig.map("the same"));
    rig.route.started(Start::Resumed, &table).expect("it goes on");
    let log = rig.journals.logs().remove(0);
    assert!(log.is_open() && log.placement == PlacementKind::Storage, "{log:?}");
    // What the earlier process wrote may be in the drive's cache.
    assert_eq!(rig.route(RequestKind::Flush, 0, &[]).len(), 1, "the guest's first flush reaches the disk");
    // The guest believes that its log begins where it did; on storage it begins later.
    let write = rig.write(rig.log_at[0], &earlier);
    assert!(write.is_empty(), "{write:?}");
    let transaction = Transaction { blocks: vec![(301, content(2))], ..Transaction::default() };
    let mut log_blocks = Vec::new();
    rig.builder.transaction(&transaction, &mut |position, block| log_blocks.push((position, block.to_vec())));
    for (position, block) in log_blocks {
        let write = rig.write(rig.log_at[position as usize], &block);
        assert_eq!(write.len(), 1, "the log is on storage");
        rig.carry_out(write);
    }
    let now = superblock_of(&rig);
    assert_eq!(rig.write(rig.log_at[0], &now).len(), 1, "from where it begins on, the guest says");
    // With the next mount it lives where it was meant to.
    let empty = rig.superblock.clone();
    let write = rig.write(rig.log_at[0], &empty);
    rig.carry_out(write);
    assert_eq!(rig.journals.logs()[0].placement, PlacementKind::Retain);
}

/// A log on storage that did not come through here may go on anywhere: what a kernel begins beside it stays on storage, until that says
/// that the log is empty.
#[test]
fn a_log_that_is_begun_beside_a_live_one_stays_on_storage() {
    let mut rig = Rig::new();
    let live = superblock_of(&rig);
    rig.file.write_all_at(&live, rig.log_at[0]).expect("written");
    // The kernel has replayed it, and begins further on, where nothing is.
    rig.builder.position += 30;
    rig.builder.sequence += 4;
    let begun = superblock_of(&rig);
    let write = rig.write(rig.log_at[0], &begun);
    assert_eq!(write.len(), 1, "it goes to storage");
    rig.carry_out(write);
    let position = rig.builder.position as usize;
    let write = rig.write(rig.log_at[position], &content(1));
    assert_eq!(write.len(), 1, "and so does its log");
    rig.carry_out(write);
    assert_eq!(rig.owed(), 0);
    // Unmounted and mounted again, it is held.
    let mut empty = rig.superblock.clone();
    jbd2::SuperblockEdit::new(&mut empty).expect("a superblock").start(0).sequence(rig.builder.sequence).seal();
    let write = rig.write(rig.log_at[0], &empty);
    rig.carry_out(write);
    rig.open();
    rig.commit(&[(300, content(2))]);
    assert_eq!(rig.owed(), 1);
}

/// The superblock of a guest whose log begins at its first transaction.
fn superblock_of(rig: &Rig) -> Vec<u8> {
    let mut block = rig.superblock.clone();
    let (start, sequence) = (rig.builder.position, rig.builder.sequence);
    jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
    block
}

/// There is no memory for the copy of a log that a server would need: its blocks are nobody's but storage's.
#[test]
fn a_log_that_is_not_shipped_for_want_of_memory_is_on_storage() {
    stays_on_storage(1 << 20, "disk");
}

/// With `@` and where the file system begins it is longer than a server understands.
#[test]
fn a_log_whose_name_is_too_long_stays_on_storage() {
    stays_on_storage(64 << 20, &"x".repeat(125));
}

/// An image is copied over the disk inside the VM: what is in the journal's own place already would be missing on the server.
#[test]
fn a_log_that_is_brought_is_not_shipped_until_it_is_empty() {
    let client = remote_journal::ClientOptions {
        address: "127.0.0.1:9".to_owned(),
        security: remote_journal::ClientSecurity::default(),
        timeout: std::time::Duration::from_secs(1),
    };
    for is_first in [true, false] {
        let remote = RemoteOptions { client: client.clone(), name: "disk".to_owned() };
        let mut rig = Rig::with(64 << 20, PlacementKind::Remote, Some(remote));
        let (start, sequence) = (rig.builder.position, rig.builder.sequence);
        let block = |rig: &Rig, start, sequence| {
            let mut block = rig.superblock.clone();
            jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
            block
        };
        let transaction = Transaction { blocks: vec![(5000, content(1))], ..Transaction::default() };
        let mut log = Vec::new();
        rig.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        // In whatever order it comes.
        let (position, bytes) = if is_first { &log[0] } else { &log[2] };
        let operations = rig.write(rig.log_at[*position as usize], bytes);
        rig.carry_out(operations);
        for (start, sequence) in [(start, sequence), (rig.builder.position, rig.builder.sequence)] {
            let opening = block(&rig, start, sequence);
            let operations = rig.write(rig.log_at[0], &opening);
            assert_eq!(operations.len(), 1, "it is shipped from transaction {sequence} on");
            rig.carry_out(operations);
        }
        let emptied = block(&rig, 0, rig.builder.sequence + 1);
        let operations = rig.write(rig.log_at[0], &emptied);
        rig.carry_out(operations);
        let opening = block(&rig, rig.builder.position, rig.builder.sequence + 1);
        assert!(rig.write(rig.log_at[0], &opening).is_empty(), "it is a kernel's own");
    }
}

fn stays_on_storage(budget_bytes: u64, name: &str) {
    let client = remote_journal::ClientOptions {
        address: "127.0.0.1:9".to_owned(),
        security: remote_journal::ClientSecurity::default(),
        timeout: std::time::Duration::from_secs(1),
    };
    let remote = RemoteOptions { client, name: name.to_owned() };
    let mut rig = Rig::with(budget_bytes, PlacementKind::Remote, Some(remote));
    let mut superblock = rig.superblock.clone();
    let (start, sequence) = (rig.builder.position, rig.builder.sequence);
    jbd2::SuperblockEdit::new(&mut superblock).expect("a superblock").start(start).sequence(sequence).seal();
    let operations = rig.write(rig.log_at[0], &superblock);
    assert_eq!(operations.len(), 1, "{operations:?}");
    rig.carry_out(operations);
    let content = vec![0x5a; BLOCK as usize];
    let transaction = Transaction { blocks: vec![(5000, content.clone())], ..Transaction::default() };
    let mut log = Vec::new();
    rig.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
    for (position, block) in log {
        let at = rig.log_at[position as usize];
        let operations = rig.write(at, &block);
        assert_eq!(operations.len(), 1, "log block {position} is acknowledged, and goes nowhere");
        assert_eq!((operations[0].offset, operations[0].operation), (at, Operation::Write));
        rig.carry_out(operations);
    }
    let flush = rig.route(RequestKind::Flush, 0, &[]);
    assert_eq!(flush.len(), 1, "what is on storage has to be flushed");
    rig.carry_out(flush);
    // Whoever wants it there for a backup, or to leave its guest, is told that it is; and it is wished back after that.
    for to in [PlacementKind::Storage, PlacementKind::Remote] {
        let log = rig.journals.logs().remove(0);
        assert_eq!(rig.journals.change_placement(log.index(), to).expect("it is there"), Change::Done);
        assert!(rig.journals.logs()[0].is_on_storage().expect("it can be"));
    }
    rig.journals.check_left().expect("nothing of it is here");
    // The host's power fails; nothing but storage is left, for the guest's next kernel.
    rig.journals.recover_all().expect("left where it is");
    assert_ne!(rig.home(5000), content);
    // A kernel that has it mounted says so in the file system.
    let at = Rig::home_at(0) + extfs::SUPERBLOCK_OFFSET;
    let mut raw = [0; extfs::SUPERBLOCK_BYTES];
    rig.file.read_exact_at(&mut raw, at).expect("read");
    raw[0x60] |= 4;
    extfs::SuperblockEdit::new(&mut raw).expect("a superblock").seal();
    rig.file.write_all_at(&raw, at).expect("written");
    let disk = recovery::Disk::open(&rig.image, recovery::Access::Write).expect("the image");
    recovery::recover_disk(&disk, None, recovery::Options::default()).expect("replayed");
    assert_eq!(rig.home(5000), content);
}
