//! A whole disk without a VM: a front-end plays jbd2 streams against a real device, a real userfaultfd protects its
//! memory, a real ext4 image made by mke2fs is judged after recovery.
//!
//! The front-end scribbles over its own memory at every chance: what was committed must come home all the same.

use block_device::{Device, DeviceConfig, Image, ImageOptions, Observer, Peer};
use block_route::{Plan, PlanAction, Request, RequestId, RequestKind, Route, Start};
use guest_memory::{PAGE_BYTES, PageId, Protection, VmMemory};
use jbd2::build::{LogBuilder, Transaction};
use placement::{
    AreaDirectory, Change, DiskOptions, DiskRoute, Finish, Journals, JournalsOptions, PlacementKind, VmReport,
    finish_directory,
};
use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, STATUS_OK, TestDisk, Transfer};

#[path = "held_log/contradictions.rs"]
mod contradictions;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const RAM_BYTES: u64 = 16 * MIB;

fn userfault() -> Option<OwnedFd> {
    // SAFETY: a system call without pointers; the result is checked and owned by nobody else.
    unsafe {
        let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        (descriptor >= 0).then(|| OwnedFd::from_raw_fd(descriptor as i32))
    }
}

struct Protecting(Arc<VmMemory>, Arc<Journals>, bool);

impl Observer for Protecting {
    fn connected(&self, _peer: Peer) -> Result<(), String> {
        if self.2
            && self.0.protection() != Protection::Available
            && let Some(descriptor) = userfault()
        {
            self.0.take_userfaultfd(descriptor).expect("write protection of shared memory");
        }
        Ok(())
    }

    fn ring_pages(&self, pages: &[PageId]) {
        self.1.area.set_excluded_pages(pages.iter().copied().collect());
    }
}

fn make_image(path: &Path, options: &[&str]) {
    let status = Command::new("mke2fs")
        .stdout(std::process::Stdio::null())
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"])
        .args(options)
        .arg(path)
        .arg("32M")
        .status()
        .expect("mke2fs is installed");
    assert!(status.success());
}

/// As a kernel that has it mounted leaves it.
fn mark_as_mounted(path: &Path) {
    let status = Command::new("debugfs")
        .args(["-w", "-R", "feature needs_recovery"])
        .arg(path)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .expect("debugfs is installed");
    assert!(status.success());
}

/// e2fsck finds nothing wrong.
fn assert_consistent(path: &Path) {
    let output = Command::new("e2fsck").args(["-fn"]).arg(path).output().expect("e2fsck is installed");
    assert!(output.status.success(), "e2fsck: {}", String::from_utf8_lossy(&output.stdout));
}

struct Rig {
    directory: tempfile::TempDir,
    image: PathBuf,
    journals: Arc<Journals>,
    device: Option<Device<DiskRoute>>,
    disk: TestDisk,
    /// Where log blocks are in the image, in bytes, by position.
    log_at: Vec<u64>,
    superblock: Vec<u8>,
    builder: LogBuilder,
    /// Blocks of the file system that the test may write: free data blocks.
    free_block: u64,
}

impl Rig {
    fn new(placement: PlacementKind, protect: bool) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let image = directory.path().join("image");
        make_image(&image, &[]);
        Self::attach(directory, image, placement, protect)
    }

    fn attach(directory: tempfile::TempDir, image: PathBuf, placement: PlacementKind, protect: bool) -> Self {
        let bytes = std::fs::read(&image).expect("the image");
        let file_system = extfs::discover(&bytes).expect("readable").remove(0);
        let extents = file_system.journal.extents(&file_system.superblock);
        let mut log_at = Vec::new();
        for extent in &extents {
            log_at.extend((0..u64::from(extent.count)).map(|index| (extent.physical + index) * BLOCK));
        }
        let superblock = bytes[log_at[0] as usize..][..BLOCK as usize].to_vec();
        let (parsed, format) = jbd2::Superblock::parse(&superblock).expect("a journal");
        let memory = VmMemory::new();
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"))
            .expect("a directory");
        area.register(&image).expect("registered");
        let options = DiskOptions {
            name: "disk".to_owned(),
            path: image.clone(),
            placement,
            honour_flush: false,
            read_only: false,
            nvm: None,
            remote: None,
            durable_within: None,
            write_log: None,
        };
        let journals = Journals::new(
            &memory,
            area,
            JournalsOptions { disks: vec![options], budget_bytes: 64 * MIB, tracer: None },
        )
        .expect("journals");
        let socket = directory.path().join("disk.sock");
        let config = DeviceConfig::new(
            "disk",
            &socket,
            Arc::new(Image::open(&image, ImageOptions::default()).expect("an image")),
        );
        let observer = Arc::new(Protecting(Arc::clone(&memory), Arc::clone(&journals), protect));
        let route = Box::new(DiskRoute::new(Arc::clone(&journals), 0));
        let device = Device::start(config, route, Arc::clone(&memory), observer).expect("a device");
        let ram = GuestRam::new(RAM_BYTES).expect("guest memory");
        let mut front_end = FrontEnd::connect(&socket, ram, FrontEndOptions::default()).expect("connected");
        front_end.start().expect("started");
        let builder = LogBuilder::new(format, parsed.first, parsed.sequence + 1);
        Rig {
            directory,
            image,
            journals,
            device: Some(device),
            disk: TestDisk::new(front_end),
            log_at,
            superblock,
            builder,
            free_block: file_system.superblock.blocks_count - 2000,
        }
    }

    fn ram(&self) -> GuestRam {
        self.disk.front_end.ram.clone()
    }

    /// A fresh guest page with this content.
    fn page(&self, content: &[u8]) -> u64 {
        let ram = self.ram();
        let page = ram.take(PAGE_BYTES as u64, PAGE_BYTES as u64);
        ram.write(page, content);
        page
    }

    fn write_pages(&mut self, offset: u64, pages: &[u64]) -> u8 {
        let segments = pages.iter().map(|page| (*page, BLOCK as u32)).collect();
        self.disk.request(offset / 512, &Transfer::Write(segments)).expect("answered")
    }

    fn write_superblock(&mut self, start: u32, sequence: u32) -> u8 {
        let mut block = self.superblock.clone();
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        let page = self.page(&block);
        self.write_pages(self.log_at[0], &[page])
    }

    fn open(&mut self) {
        assert_eq!(self.write_superblock(self.builder.position, self.builder.sequence), STATUS_OK);
    }

    /// Commits blocks, each from a page of its own. Returns the pages.
    fn commit(&mut self, blocks: &[(u64, Vec<u8>)]) -> Vec<u64> {
        let transaction = Transaction { blocks: blocks.to_vec(), ..Transaction::default() };
        let mut log = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        let mut pages = Vec::new();
        for (position, block) in log {
            let page = self.page(&block);
            assert_eq!(self.write_pages(self.log_at[position as usize], &[page]), STATUS_OK);
            if jbd2::peek(&block).is_none() {
                pages.push(page);
            }
        }
        pages
    }

    fn home(&self, block: u64) -> Vec<u8> {
        let mut content = vec![0; BLOCK as usize];
        std::fs::File::open(&self.image).expect("the image").read_exact_at(&mut content, block * BLOCK).expect("read");
        content
    }

    fn stored_superblock(&self) -> jbd2::Superblock {
        let mut raw = vec![0; BLOCK as usize];
        std::fs::File::open(&self.image).expect("the image").read_exact_at(&mut raw, self.log_at[0]).expect("read");
        jbd2::Superblock::decode(&raw).expect("a journal superblock")
    }

    fn report(&self) -> VmReport {
        self.journals.report("test")
    }

    /// The machine is reset: the stop messages, then a new in-flight region and rings that begin anew.
    fn reset(self) -> Self {
        let ram = self.ram();
        let mut front_end = self.disk.front_end;
        front_end.stop().expect("stopped");
        for queue in &mut front_end.queues {
            let options = queue.options();
            *queue = test_frontend::DriverQueue::new(&ram, options).expect("a queue");
        }
        front_end.start().expect("started anew");
        Rig { disk: TestDisk::new(front_end), ..self }
    }

    /// The daemon dies: its directory stays as it is. The guest's memory file stands for the VMM's.
    fn left_behind(&mut self) -> AreaDirectory {
        self.disk.front_end.disconnect().expect("disconnected");
        self.device.take().expect("a device").stop().expect("stopped");
        let left = self.journals.directory().path().to_owned();
        let copy = self.directory.path().join("left");
        std::fs::DirBuilder::new().mode(0o700).create(&copy).expect("a directory");
        for entry in std::fs::read_dir(&left).expect("files").flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_file()) {
                std::fs::copy(entry.path(), copy.join(entry.file_name())).expect("copied");
            }
        }
        // Memory files of the front-end have no name in tmpfs: give the copy one.
        let description = std::fs::read_to_string(copy.join("area.json")).expect("described");
        let mut description: serde_json::Value = serde_json::from_str(&description).expect("JSON");
        let mut ram = vec![0; RAM_BYTES as usize];
        let first = self.ram().regions().expect("regions")[0].guest_phys_addr;
        for (index, bytes) in ram.chunks_mut(1 << 16).enumerate() {
            bytes.copy_from_slice(&self.ram().read(first + ((index as u64) << 16), 1 << 16));
        }
        std::fs::write(copy.join("ram"), ram).expect("written");
        description["ram"][0]["path"] = serde_json::Value::String(copy.join("ram").display().to_string());
        std::fs::write(copy.join("area.json"), description.to_string()).expect("written");
        AreaDirectory::take_over(&copy, &self.directory.path().join("registry")).expect("free")
    }

    /// The VMM dies: the connection ends, what is owed goes home.
    fn die_and_recover(&mut self) {
        self.disk.front_end.disconnect().expect("disconnected");
        self.device.take().expect("a device").stop().expect("stopped");
        self.journals.recover_all().expect("recovered");
    }
}

fn content(seed: u8) -> Vec<u8> {
    (0..BLOCK).map(|index| (index as u8).wrapping_mul(7).wrapping_add(seed)).collect()
}

#[test]
fn committed_pages_survive_every_scribble() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    // Single pages are retained, too.
    rig.journals.area.set_hot_pages(journal_area::HotPages::Foreseen);
    let first = rig.free_block;
    rig.open();
    assert_ne!(rig.stored_superblock().errno, 0, "the journal on storage carries the mark");
    assert!(rig.stored_superblock().is_empty());
    let blocks: Vec<(u64, Vec<u8>)> = (0..40).map(|index| (first + index, content(index as u8))).collect();
    let pages = rig.commit(&blocks);
    // Wild writes: into every page, from its beginning, middle and end.
    for page in &pages {
        rig.ram().write(*page, b"wild");
        rig.ram().write(*page + 2000, b"wild");
        rig.ram().write(*page + 4090, b"wild");
    }
    // Reads from the disk into committed pages overwrite them past the protection.
    let more: Vec<(u64, Vec<u8>)> = (100..120).map(|index| (first + index, content(index as u8))).collect();
    let read_into = rig.commit(&more);
    let segments = read_into.iter().map(|page| (*page, BLOCK as u32)).collect();
    assert_eq!(rig.disk.request((first + 500) * BLOCK / 512, &Transfer::Read(segments)).expect("answered"), STATUS_OK);
    rig.journals.area.check().expect("the books are right");
    let counters = rig.report().disks[0].counters.clone();
    if counters.pages_protected > 0 {
        assert!(counters.pages_protected >= 40);
        assert!(counters.cow_faults >= 40 + 20, "{counters:?}");
    } else {
        println!("userfaultfd is not permitted here: everything was copied");
    }
    assert_eq!(counters.transactions, 2);
    assert!(counters.journal_bytes_to_storage <= 1024, "only the mark goes to storage");
    rig.die_and_recover();
    for (block, expected) in blocks.iter().chain(&more) {
        assert!(rig.home(*block) == *expected, "block {block}");
    }
    assert_eq!(rig.stored_superblock().errno, 0, "the mark is gone");
    assert_consistent(&rig.image);
    assert_eq!(rig.report().disks[0].recovery.blocks_written, 60);
}

/// Whoever starts the device with the journal anew has to know: the device with the file system may be another one, and still work.
#[test]
fn a_start_anew_waits_for_home_writes_that_are_under_way() {
    let mut rig = Rig::new(PlacementKind::Copy, false);
    let block = rig.free_block;
    rig.open();
    rig.commit(&[(block, content(1))]);
    let memory = guest_memory::HostFile::create(&rig.directory.path().join("memory"), 1 << 20).expect("a file");
    memory.reserve(0, 1 << 20).expect("room");
    // A second thread's route: what it plans is not carried out.
    let mut route = DiskRoute::new(Arc::clone(&rig.journals), 0);
    assert_eq!(route.waits_for_others(Start::Fresh), None);
    let segments = [memory.slice(0, BLOCK as usize)];
    let (offset, len) = (block * BLOCK, BLOCK);
    let mut plan = Plan::default();
    let request = Request { id: RequestId(1), kind: RequestKind::Write, offset, len, segments: &segments };
    route.route(&request, &mut plan);
    route.end_of_pass(&mut plan);
    let ticket = plan.actions.iter().find_map(|action| match action {
        PlanAction::Disk(operation) => operation.ticket,
        _ => None,
    });
    assert!(route.waits_for_others(Start::Fresh).is_some());
    route.disk_done(ticket.expect("a home write"), Ok(()), &mut plan);
    assert_eq!(route.waits_for_others(Start::Fresh), None);
}

#[test]
fn home_writes_release_and_newer_versions_win() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    let pages = rig.commit(&[(first, content(1)), (first + 1, content(2)), (first + 2, content(3))]);
    // The first two go home from the very pages that are protected, in one request.
    assert_eq!(rig.write_pages(first * BLOCK, &pages[..2]), STATUS_OK);
    let query = || rig.journals.area.owed(rig.journals.logs()[0].id);
    assert_eq!(query().blocks, 1);
    // A home write of something else releases nothing.
    let other = rig.page(&content(9));
    assert_eq!(rig.write_pages((first + 2) * BLOCK, &[other]), STATUS_OK);
    let query = || rig.journals.area.owed(rig.journals.logs()[0].id);
    assert_eq!(query().blocks, 1);
    // A block that is home is overwritten there without a commit: a complete journal would bring it back, so do we.
    let other = rig.page(&content(10));
    assert_eq!(rig.write_pages(first * BLOCK, &[other]), STATUS_OK);
    rig.commit(&[(first + 1, content(22))]);
    rig.die_and_recover();
    assert!(rig.home(first) == content(1));
    assert!(rig.home(first + 1) == content(22));
    assert!(rig.home(first + 2) == content(3));
    assert_consistent(&rig.image);
}

#[test]
fn a_reset_recovers_before_the_first_read() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    rig.commit(&[(first, content(1))]);
    assert!(rig.home(first) != content(1), "held, not home");
    let mut rig = rig.reset();
    let (status, read) = rig.disk.read(first * BLOCK, BLOCK as usize).expect("read");
    assert_eq!(status, STATUS_OK);
    assert!(read == content(1), "the first read finds what was committed");
    let (_, superblock) = rig.disk.read(rig.log_at[0], BLOCK as usize).expect("read");
    let superblock = jbd2::Superblock::decode(&superblock).expect("a superblock");
    assert!(superblock.is_empty() && superblock.errno == 0, "the next mount finds an empty log");
}

#[test]
fn who_reads_an_open_log_finds_what_the_guest_wrote() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    let (position, sequence) = (rig.builder.position, rig.builder.sequence);
    rig.commit(&[(first, content(1)), (first + 7, content(2))]);
    let (status, block) = rig.disk.read(rig.log_at[0], BLOCK as usize).expect("read");
    assert_eq!(status, STATUS_OK);
    let superblock = jbd2::Superblock::decode(&block).expect("a superblock");
    assert_eq!((superblock.start, superblock.sequence, superblock.errno), (position, sequence, 0));
    assert!(rig.home(first) != content(1), "nothing goes home for it");
    let mut data = Vec::new();
    for number in 1..3 {
        let at = rig.log_at[(position + number) as usize];
        data.push(rig.disk.read(at, BLOCK as usize).expect("read").1);
    }
    assert!(data == [content(1), content(2)], "the transaction is there to be replayed");
    // The guest that still has it mounted goes on where it was.
    rig.commit(&[(first, content(3))]);
    rig.die_and_recover();
    assert!(rig.home(first) == content(3));
}

#[test]
fn the_files_of_a_dead_daemon_are_enough() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    let blocks: Vec<(u64, Vec<u8>)> = (0..30).map(|index| (first + index, content(index as u8))).collect();
    let pages = rig.commit(&blocks);
    rig.ram().write(pages[3], b"wild");
    assert_eq!(rig.write_pages(first * BLOCK, &pages[..1]), STATUS_OK);
    let directory = rig.left_behind();
    let images = [rig.image.clone()];
    let finished = finish_directory(&directory, &images).and_then(Finish::into_result).expect("finished");
    assert_eq!(finished.len(), 1);
    assert_eq!(finished[0].recovery.blocks_written, 29);
    for (block, expected) in &blocks {
        assert!(rig.home(*block) == *expected, "block {block}");
    }
    assert_consistent(&rig.image);
    assert!(finish_directory(&directory, &images).expect("nothing left").finished.is_empty(), "once is enough");
}

#[test]
fn the_placements_write_what_they_say() {
    for (placement, protect) in [
        (PlacementKind::Retain, false),
        (PlacementKind::Copy, true),
        (PlacementKind::Storage, true),
        (PlacementKind::Discard, true),
    ] {
        let mut rig = Rig::new(placement, protect);
        let first = rig.free_block;
        rig.open();
        let blocks: BTreeMap<u64, Vec<u8>> = (0..10).map(|index| (first + index, content(index as u8))).collect();
        rig.commit(&blocks.clone().into_iter().collect::<Vec<_>>());
        let counters = rig.report().disks[0].counters.clone();
        let name = placement.name();
        assert_eq!(counters.transactions, 1, "{name}");
        assert_eq!(counters.pages_protected, 0, "{name}");
        match placement {
            PlacementKind::Storage => assert_eq!(counters.journal_bytes_to_storage, counters.journal_bytes_received),
            _ => assert!(counters.journal_bytes_to_storage <= 1024, "{name}"),
        }
        rig.die_and_recover();
        let recovered = blocks.iter().all(|(block, expected)| rig.home(*block) == *expected);
        assert_eq!(recovered, matches!(placement, PlacementKind::Retain | PlacementKind::Copy), "{name}");
        // A journal that was dropped is never silent.
        assert_eq!(rig.stored_superblock().errno != 0, placement == PlacementKind::Discard, "{name}");
    }
}

/// Where the blocks of a file system are, its guest's kernel knows for sure: a journal that is whole in its own place is left to that one,
/// however it came there.
#[test]
fn what_is_on_storage_when_a_vm_ends_is_left_there() {
    use PlacementKind::{Copy, Retain, Storage};
    for placement in [Storage, Retain, Copy] {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let image = directory.path().join("image");
        make_image(&image, &[]);
        mark_as_mounted(&image);
        let mut rig = Rig::attach(directory, image, placement, true);
        let first = rig.free_block;
        rig.open();
        rig.commit(&[(first, content(1))]);
        if placement != Storage {
            let index = rig.journals.logs()[0].index();
            rig.journals.change_placement(index, Storage).expect("it may");
            let handle = rig.device.as_ref().expect("a device").handle();
            let is_done = handle.with_route(move |route, plan| route.hand_over(index, plan)).expect("asked");
            assert!(is_done.expect("handed over"), "nothing is on its way");
            assert!(rig.home(first) == content(1), "what was committed before is home");
        }
        rig.commit(&[(first + 1, content(2)), (first + 2, content(3))]);
        rig.disk.front_end.disconnect().expect("disconnected");
        rig.device.take().expect("a device").stop().expect("stopped");
        let before = std::fs::read(&rig.image).expect("the image");
        rig.journals.recover_all().expect("left");
        assert!(std::fs::read(&rig.image).expect("the image") == before, "{placement:?}: the image was written to");
        let report = rig.report().disks[0].recovery.clone();
        assert_eq!(report.status, recovery::Status::Materialised, "{placement:?}: {report:?}");
        let transactions = if placement == Storage { 2 } else { 1 };
        assert_eq!((report.transactions, report.blocks_written, report.bytes_written), (transactions, 0, 0));
        assert!(!rig.stored_superblock().is_empty(), "the log is live");
        // Whoever knows better replays it.
        let disk = recovery::Disk::open(&rig.image, recovery::Access::Write).expect("the image");
        recovery::recover_disk(&disk, None, recovery::Options::default()).expect("replayed");
        for index in 0..3 {
            assert!(rig.home(first + index) == content(index as u8 + 1), "{placement:?}: block {index}");
        }
        assert_consistent(&rig.image);
    }
}

/// Whoever has wished a journal elsewhere does not see that its guest is reset.
#[test]
fn a_reset_does_not_forget_where_a_journal_was_wished() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    rig.commit(&[(first, content(1))]);
    let index = rig.journals.logs()[0].index();
    let change = rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    assert_eq!(change, Change::HandOver);
    let mut rig = rig.reset();
    // It is answered when the device has begun anew.
    rig.disk.read(first * BLOCK, BLOCK as usize).expect("read");
    let log = rig.journals.logs().remove(0);
    assert_eq!((log.placement, log.is_open()), (PlacementKind::Storage, false));
    let handle = rig.device.as_ref().expect("a device").handle();
    let is_done = handle.with_route(move |route, plan| route.hand_over(index, plan)).expect("asked");
    assert!(is_done.expect("nothing fails") && rig.home(first) == content(1));
}

#[test]
fn a_hostile_journal_hurts_nobody() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    rig.commit(&[(first, content(1))]);
    // Part of a log block is no journal write, but the journal is a part of the disk.
    let page = rig.page(&content(5));
    let status = rig.disk.request(rig.log_at[9] / 512 + 1, &Transfer::Write(vec![(page, 512)])).expect("answered");
    assert_eq!(status, STATUS_OK);
    let (_, whole) = rig.disk.read(rig.log_at[9], BLOCK as usize).expect("read");
    assert!(whole[512..1024] == content(5)[..512]);
    // Tags far outside the file system and into the journal itself.
    rig.commit(&[(u64::from(u32::MAX) - 1, content(2)), (rig.log_at[5] / BLOCK, content(3)), (first + 1, content(4))]);
    // A superblock of nonsense closes the log and passes through.
    let page = rig.page(&content(77));
    assert_eq!(rig.write_pages(rig.log_at[0], &[page]), STATUS_OK);
    // The disk goes on.
    let page = rig.page(&content(6));
    assert_eq!(rig.write_pages((first + 5) * BLOCK, &[page]), STATUS_OK);
    assert!(rig.home(first + 5) == content(6));
}

#[test]
fn a_mount_without_a_commit_leaves_no_flag() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let image = directory.path().join("image");
    make_image(&image, &[]);
    mark_as_mounted(&image);
    let needs_recovery = |image: &Path| {
        let bytes = std::fs::read(image).expect("the image");
        extfs::discover(&bytes).expect("readable")[0].superblock.needs_recovery()
    };
    assert!(needs_recovery(&image));
    let mut rig = Rig::attach(directory, image, PlacementKind::Retain, true);
    rig.die_and_recover();
    assert!(!needs_recovery(&rig.image));
    assert_consistent(&rig.image);
}
