//! Storage of every kind, and storage that fails.

mod common;

use block_device::{CacheMode, Error, Image, ImageKind, ImageOptions};
use common::{MIB, Place, Told, disk, open, pattern, rig, start};
use guest_memory::{CopyOnWrite, PageId, VmMemory};
use std::collections::BTreeSet;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, STATUS_IO_ERROR, STATUS_OK, TestDisk, Transfer};
use test_storage::TestStorage;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserHeaderFlag;

/// A mounted file system or attached device, taken down when dropped.
struct Undo(Command);

impl Drop for Undo {
    fn drop(&mut self) {
        let _ = self.0.output();
    }
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// Output of a command; none, with the reason printed, when it fails: such a test is skipped where it may not mount.
fn attempt(words: &[&str]) -> Option<String> {
    match command(words).output() {
        Ok(output) if output.status.success() => Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        Ok(output) => {
            println!("skipped: {} was refused: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
            None
        }
        Err(error) => {
            println!("skipped: {} cannot be run: {error}", words[0]);
            None
        }
    }
}

#[test]
fn a_full_file_system_is_an_io_error_and_then_none() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let Some(_) = attempt(&["mount", "-t", "tmpfs", "-o", "size=2m", "none", path]) else { return };
    let _mounted = Undo(command(&["umount", "-l", path]));
    let image = directory.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(64 * MIB).unwrap();
    let place = Place::new(0);
    let (device, _) = start(&place, open(&image, CacheMode::Auto), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    let mut failed = 0;
    for block in 0..64u64 {
        let bytes = pattern(block * 65536, 65536, 1);
        match disk.write(block * 65536, &bytes).unwrap() {
            STATUS_OK => {
                assert_eq!(failed, 0, "room appeared from nowhere");
                assert_eq!(disk.read(block * 65536, 65536).unwrap(), (STATUS_OK, bytes));
            }
            status => {
                assert_eq!(status, STATUS_IO_ERROR);
                failed += 1;
            }
        }
    }
    assert!(failed > 16, "{failed}");
    assert_eq!(device.handle().counters().failed_requests, failed);
    // The disk goes on: what is there is read, and room that is given back can be written.
    assert_eq!(disk.read(0, 65536).unwrap(), (STATUS_OK, pattern(0, 65536, 1)));
    assert_eq!(disk.request(0, &Transfer::Discard(vec![(0, 1024, 0)])).unwrap(), STATUS_OK);
    assert_eq!(disk.write(32 * MIB, &pattern(0, 65536, 2)).unwrap(), STATUS_OK);
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    drop(disk);
    device.stop().unwrap();
}

/// The tmpfs with the guest's memory is full, and the guest names pages that it has never touched: an access to one would raise
/// SIGBUS. The requests wait, and go on when there is room.
#[test]
fn memory_that_there_is_no_room_for_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let Some(_) = attempt(&["mount", "-t", "tmpfs", "-o", "size=4m", "none", path]) else { return };
    let _mounted = Undo(command(&["umount", "-l", path]));
    let place = Place::new(8 * MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let ram = GuestRam::in_directory(directory.path(), &[(0, 64 * MIB)]).unwrap();
    let mut front_end = FrontEnd::connect(&place.socket(), ram.clone(), FrontEndOptions::default()).unwrap();
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    let bytes = pattern(0, 65536, 8);
    assert_eq!(disk.write(0, &bytes).unwrap(), STATUS_OK);
    // What requests need of their own is there: only the pages with the data will not be.
    let (read_to, write_from) = (ram.take(65536, 4096), ram.take(65536, 4096));
    let filler = directory.path().join("filler");
    let fill = |room: usize| {
        let _ = std::fs::remove_file(&filler);
        let mut file = std::fs::File::create(&filler).unwrap();
        while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
        let len = file.metadata().unwrap().len();
        file.set_len(len - room as u64).unwrap();
    };
    disk.submit(0, 0, &Transfer::Read(vec![(read_to, 65536)])).unwrap();
    disk.submit(0, 4096, &Transfer::Write(vec![(write_from, 65536)])).unwrap();
    fill(0);
    disk.kick(0).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(device.handle().counters().failed_requests, 0, "they wait");
    fill(512 << 10);
    let answers = disk.wait_all(0).unwrap();
    assert_eq!(answers.len(), 2);
    assert!(answers.iter().all(|answer| answer.status == STATUS_OK), "{answers:?}");
    assert!(ram.read(read_to, 65536) == bytes);
    assert_eq!(disk.read(4096 * 512, 65536).unwrap(), (STATUS_OK, vec![0; 65536]), "what was never written is zeros");
    drop(disk);
    device.stop().unwrap();
}

#[test]
fn an_image_cut_beneath_us_is_an_io_error() {
    for cache in [CacheMode::Auto, CacheMode::Buffered] {
        let (place, device, mut disk) = rig(8 * MIB, cache);
        assert_eq!(disk.write(0, &pattern(0, 8192, 3)).unwrap(), STATUS_OK);
        let file = std::fs::OpenOptions::new().write(true).open(place.image()).unwrap();
        file.set_len(MIB + 512).unwrap();
        assert_eq!(disk.read(4 * MIB, 4096).unwrap().0, STATUS_IO_ERROR, "{cache:?}");
        assert_eq!(disk.read(MIB - 4096, 16384).unwrap().0, STATUS_IO_ERROR, "{cache:?}: across the end");
        assert_eq!(disk.read(0, 8192).unwrap(), (STATUS_OK, pattern(0, 8192, 3)));
        // When it is told, the guest cannot even ask.
        assert_eq!(device.handle().resize().unwrap(), MIB + 512);
        assert_eq!(disk.read(MIB, 512).unwrap(), (STATUS_OK, vec![0; 512]));
        assert_eq!(disk.read(MIB + 512, 512).unwrap().0, STATUS_IO_ERROR);
        device.stop().unwrap();
    }
}

/// A disk that breaks: a loop device whose backing file is cut.
#[test]
fn errors_of_a_block_device_reach_the_guest() {
    let backing = Place::new(16 * MIB);
    let backing_path = backing.image();
    let Some(name) = attempt(&["losetup", "--find", "--show", backing_path.to_str().unwrap()]) else { return };
    let _attached = Undo(command(&["losetup", "-d", &name]));
    let place = Place::new(0);
    for cache in [CacheMode::Direct, CacheMode::Buffered] {
        std::fs::OpenOptions::new().write(true).open(&backing_path).unwrap().set_len(16 * MIB).unwrap();
        let (device, _) = start(&place, open(Path::new(&name), cache), |_, _| {});
        let mut disk = disk(&place, FrontEndOptions::default());
        assert_eq!(disk.write(0, &pattern(0, 65536, 4)).unwrap(), STATUS_OK);
        assert_eq!(disk.flush().unwrap(), STATUS_OK);
        // The loop device now fails beyond the cut.
        std::fs::OpenOptions::new().write(true).open(&backing_path).unwrap().set_len(MIB).unwrap();
        let status = disk.read(8 * MIB, 4096).unwrap().0;
        assert_eq!(status, STATUS_IO_ERROR, "{cache:?}");
        assert_eq!(disk.read(0, 65536).unwrap(), (STATUS_OK, pattern(0, 65536, 4)));
        assert!(device.handle().counters().failed_requests > 0);
        drop(disk);
        device.stop().unwrap();
    }
}

#[test]
fn an_error_of_write_back_is_the_answer_to_the_flush() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let Some(_) = attempt(&["mount", "-t", "tmpfs", "-o", "size=1m", "none", path]) else { return };
    let _mounted = Undo(command(&["umount", "-l", path]));
    let backing = directory.path().join("backing.img");
    std::fs::File::create(&backing).unwrap().set_len(16 * MIB).unwrap();
    let Some(name) = attempt(&["losetup", "--find", "--show", backing.to_str().unwrap()]) else { return };
    let _attached = Undo(command(&["losetup", "-d", &name]));
    let place = Place::new(0);
    // Through the page cache a write succeeds at once, and only the flush finds that there is no room behind it.
    let (device, _) = start(&place, open(Path::new(&name), CacheMode::Buffered), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.write(0, &pattern(0, 4096, 9)).unwrap(), STATUS_OK);
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    assert_eq!(disk.write(8 * MIB, &pattern(0, 4 * MIB as usize, 9)).unwrap(), STATUS_OK);
    // All flushes of one moment share the error: none may be told that its data is safe.
    for _ in 0..8 {
        disk.submit(0, 0, &Transfer::Flush).unwrap();
    }
    disk.kick(0).unwrap();
    let answers = disk.wait_all(0).unwrap();
    assert_eq!(answers.len(), 8);
    assert!(answers.iter().all(|answer| answer.status == STATUS_IO_ERROR), "{answers:?}");
    drop(disk);
    device.stop().unwrap();
}

fn loop_device(block_bytes: u32) -> Option<(Place, String, Undo)> {
    let backing = Place::new(16 * MIB);
    let path = backing.image();
    let size = block_bytes.to_string();
    let name =
        attempt(&["losetup", "--find", "--show", "--sector-size", &size, "--direct-io=on", path.to_str().unwrap()])
            .or_else(|| attempt(&["losetup", "--find", "--show", "--sector-size", &size, path.to_str().unwrap()]))?;
    let undo = Undo(command(&["losetup", "-d", &name]));
    Some((backing, name, undo))
}

#[test]
fn a_block_device_is_a_disk() {
    let Some((_backing, name, _undo)) = loop_device(512) else { return };
    let path = PathBuf::from(&name);
    let place = Place::new(0);
    let image = open(&path, CacheMode::Auto);
    assert_eq!((image.kind(), image.size_bytes()), (ImageKind::BlockDevice, 16 * MIB));
    Image::open(&path, ImageOptions::default()).expect_err("O_EXCL: nobody else");
    let (device, _) = start(&place, image, |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    let bytes = pattern(0, MIB as usize, 5);
    assert_eq!(disk.write(0, &bytes).unwrap(), STATUS_OK);
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    assert_eq!(disk.read(0, MIB as usize).unwrap(), (STATUS_OK, bytes));
    for transfer in [
        Transfer::WriteZeroes(vec![(8, 16, 0)]),
        Transfer::WriteZeroes(vec![(64, 16, 1)]),
        Transfer::WriteZeroes(vec![(129, 3, 0)]),
    ] {
        assert_eq!(disk.request(0, &transfer).unwrap(), STATUS_OK, "{transfer:?}");
    }
    let mut expected = pattern(0, MIB as usize, 5);
    for (first, count) in [(8, 16), (64, 16), (129, 3)] {
        expected[first * 512..(first + count) * 512].fill(0);
    }
    assert!(disk.read(0, MIB as usize).unwrap().1 == expected);
    if device.handle().image().discard() {
        assert_eq!(disk.request(0, &Transfer::Discard(vec![(0, 2048, 0)])).unwrap(), STATUS_OK);
    }
    drop(disk);
    device.stop().unwrap();
}

#[test]
fn parts_of_4096_byte_blocks_are_read_and_written() {
    let Some((_backing, name, _undo)) = loop_device(4096) else { return };
    let place = Place::new(0);
    let image = open(Path::new(&name), CacheMode::Direct);
    assert_eq!(image.logical_block_bytes(), 4096);
    let (device, _) = start(&place, image, |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    let block_size = disk.front_end.config(20, 4).unwrap();
    assert_eq!(block_size, 4096u32.to_le_bytes());
    let mut expected = pattern(0, 4 * MIB as usize, 6);
    assert_eq!(disk.write(0, &expected).unwrap(), STATUS_OK);
    // Single sectors and odd runs, many at once: neighbours in one block must not undo each other.
    let data = disk.front_end.ram.take(2 * MIB, 4096);
    for (position, (sector, sectors)) in
        [(1u64, 1u32), (2, 1), (3, 6), (100, 3), (7, 1), (4001, 2055)].into_iter().enumerate()
    {
        let len = sectors * 512;
        let address = data + position as u64 * 16384;
        let bytes = pattern(sector * 512, len as usize, 60 + position as u64);
        disk.front_end.ram.write(address, &bytes);
        disk.submit(0, sector, &Transfer::Write(vec![(address, len)])).unwrap();
        if (sector, sectors) == (7, 1) {
            // Overlaps the third: the order of overlapping requests in flight is the guest's business.
            disk.kick(0).unwrap();
            assert!(disk.wait_all(0).unwrap().iter().all(|answer| answer.status == STATUS_OK));
        }
        expected[sector as usize * 512..][..len as usize].copy_from_slice(&bytes);
    }
    disk.kick(0).unwrap();
    assert!(disk.wait_all(0).unwrap().iter().all(|answer| answer.status == STATUS_OK));
    assert_eq!(disk.request(0, &Transfer::WriteZeroes(vec![(9, 3, 0), (200, 17, 1)])).unwrap(), STATUS_OK);
    expected[9 * 512..12 * 512].fill(0);
    expected[200 * 512..217 * 512].fill(0);
    let (status, bytes) = disk.read(0, 4 * MIB as usize).unwrap();
    assert_eq!(status, STATUS_OK);
    let differs = bytes.iter().zip(&expected).position(|(found, wanted)| found != wanted);
    assert_eq!(differs.map(|at| at / 512), None, "the first wrong sector");
    let (status, part) = disk.read(5 * 512, 3 * 512).unwrap();
    assert_eq!(status, STATUS_OK);
    assert!(part == expected[5 * 512..8 * 512]);
    drop(disk);
    device.stop().unwrap();
}

/// Notes which pages it was asked for, and what they held.
#[derive(Default)]
struct Asked {
    /// There is no memory to copy a page to.
    is_full: AtomicBool,
    refused: Mutex<BTreeSet<u32>>,
    memory: std::sync::Weak<VmMemory>,
    pages: Mutex<Vec<(PageId, Vec<u8>)>>,
}

impl CopyOnWrite for Asked {
    fn copy_out(&self, page: PageId) -> bool {
        if self.is_full.load(Ordering::SeqCst) {
            self.refused.lock().unwrap().insert(page.0);
            return false;
        }
        let memory = self.memory.upgrade().unwrap();
        let mut content = vec![0; 4096];
        memory.page(page).unwrap().copy_out(0, &mut content);
        memory.set_retained(page, false);
        self.pages.lock().unwrap().push((page, content));
        true
    }
}

#[test]
fn retained_pages_are_asked_for_before_they_are_written() {
    for (cache, unaligned) in [(CacheMode::Auto, 0), (CacheMode::Auto, 7), (CacheMode::Buffered, 0)] {
        let place = Place::new(8 * MIB);
        std::fs::write(place.image(), pattern(0, 8 * MIB as usize, 7)).unwrap();
        let memory = VmMemory::new();
        let asked = Arc::new(Asked { memory: Arc::downgrade(&memory), ..Asked::default() });
        memory.set_copy_on_write(Arc::clone(&asked) as Arc<dyn CopyOnWrite>);
        let config = block_device::DeviceConfig::new("asked", place.socket(), open(&place.image(), cache));
        let route = Box::new(block_route::PlainRoute);
        let device = block_device::Device::start(config, route, Arc::clone(&memory), Arc::new(())).unwrap();
        let mut disk = disk(&place, FrontEndOptions::default());
        assert_eq!(disk.flush().unwrap(), STATUS_OK);
        let data = disk.front_end.ram.take(16 * 4096, 4096);
        disk.front_end.ram.write(data, &[0xcc; 16 * 4096]);
        let first = (data / 4096) as u32;
        for page in first..first + 16 {
            memory.set_retained(PageId(page), true);
        }
        // Three pages are read into, and the serial number goes into a fourth.
        let segments = vec![(data + unaligned, 4096), (data + 3 * 4096 + unaligned, 2 * 4096)];
        assert_eq!(disk.request(0, &Transfer::Read(segments)).unwrap(), STATUS_OK);
        assert_eq!(disk.request(0, &Transfer::Identity(vec![(data + 10 * 4096, 20)])).unwrap(), STATUS_OK);
        let mut pages: Vec<u32> = asked.pages.lock().unwrap().iter().map(|(page, _)| page.0 - first).collect();
        pages.sort_unstable();
        let expected: &[u32] = if unaligned == 0 { &[0, 3, 4, 10] } else { &[0, 1, 3, 4, 5, 10] };
        assert_eq!(pages, expected, "{cache:?}");
        assert!(asked.pages.lock().unwrap().iter().all(|(_, content)| content.iter().all(|byte| *byte == 0xcc)));
        let found = disk.front_end.ram.read(data + unaligned, 4096);
        assert!(found == pattern(0, 4096, 7));
        // Writes to the disk ask for nothing but the status byte's page.
        let before = asked.pages.lock().unwrap().len();
        assert_eq!(disk.request(64, &Transfer::Write(vec![(data + 7 * 4096, 4096)])).unwrap(), STATUS_OK);
        assert_eq!(asked.pages.lock().unwrap().len(), before);
        drop(disk);
        device.stop().unwrap();
    }
}

impl Asked {
    /// Waits until the device has asked for all of these pages, in vain.
    fn wait_refused(&self, pages: &[u32]) {
        let deadline = Instant::now() + test_frontend::ANSWER_TIMEOUT;
        while !pages.iter().all(|page| self.refused.lock().unwrap().contains(page)) {
            assert!(Instant::now() < deadline, "asked for {:?} of {pages:?}", self.refused.lock().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// While there is no memory to copy a retained page to, nothing of the device's is written to it: not what was read, not the
/// serial number, not a status byte, not the ring. Whoever wants that waits, others go on, and when there is room all is done.
#[test]
fn what_cannot_be_copied_out_is_not_written_over() {
    for (cache, unaligned) in [(CacheMode::Auto, 0), (CacheMode::Auto, 7), (CacheMode::Buffered, 0)] {
        let place = Place::new(8 * MIB);
        std::fs::write(place.image(), pattern(0, 8 * MIB as usize, 7)).unwrap();
        let memory = VmMemory::new();
        let asked = Arc::new(Asked { memory: Arc::downgrade(&memory), ..Asked::default() });
        memory.set_copy_on_write(Arc::clone(&asked) as Arc<dyn CopyOnWrite>);
        let config = block_device::DeviceConfig::new("full", place.socket(), open(&place.image(), cache));
        let route = Box::new(block_route::PlainRoute);
        let device = block_device::Device::start(config, route, Arc::clone(&memory), Arc::new(())).unwrap();
        let options = FrontEndOptions { queues: 2, ..FrontEndOptions::default() };
        let mut disk = disk(&place, options);
        assert_eq!(disk.flush().unwrap(), STATUS_OK);
        let data = disk.front_end.ram.take(16 * 4096, 4096);
        disk.front_end.ram.write(data, &[0xcc; 16 * 4096]);
        let first = (data / 4096) as u32;
        (first..first + 16).for_each(|page| memory.set_retained(PageId(page), true));
        asked.is_full.store(true, Ordering::SeqCst);

        let reads = vec![(data + unaligned, 4096)];
        disk.submit(0, 0, &Transfer::Read(reads)).unwrap();
        disk.submit(0, 0, &Transfer::Identity(vec![(data + 10 * 4096, 20)])).unwrap();
        disk.kick(0).unwrap();
        asked.wait_refused(&[first, first + 10]);
        // Others are served meanwhile, and those who wait are asked for again.
        asked.refused.lock().unwrap().clear();
        let other = disk.front_end.ram.take(4096, 4096);
        assert_eq!(disk.request_on(1, 64, &Transfer::Read(vec![(other, 4096)])).unwrap().status, STATUS_OK);
        asked.wait_refused(&[first, first + 10]);
        assert!(disk.answers(0).unwrap().is_empty(), "{cache:?}: answered without room");
        assert!(disk.front_end.ram.read(data, 16 * 4096).iter().all(|byte| *byte == 0xcc), "{cache:?}: written over");

        asked.is_full.store(false, Ordering::SeqCst);
        assert!(disk.wait_all(0).unwrap().iter().all(|answer| answer.status == STATUS_OK));
        assert!(asked.pages.lock().unwrap().iter().all(|(_, content)| content.iter().all(|byte| *byte == 0xcc)));
        assert!(disk.front_end.ram.read(data + unaligned, 4096) == pattern(0, 4096, 7), "{cache:?}");

        // The rings themselves: the guest has made them of such pages, and starts the device.
        let bases = disk.front_end.stop().unwrap();
        let layouts: Vec<_> = disk.front_end.queues.iter().map(|queue| queue.layout()).collect();
        let rings: Vec<u32> = layouts.iter().map(|layout| (layout.used / 4096) as u32).collect();
        rings.iter().for_each(|page| memory.set_retained(PageId(*page), true));
        asked.is_full.store(true, Ordering::SeqCst);
        disk.front_end.start_with_bases(&bases).unwrap();
        asked.wait_refused(&rings);
        let before: Vec<_> = rings.iter().map(|page| disk.front_end.ram.read(u64::from(*page) * 4096, 4096)).collect();
        disk.submit(0, 64, &Transfer::Read(vec![(other, 4096)])).unwrap();
        disk.kick(0).unwrap();
        asked.refused.lock().unwrap().clear();
        asked.wait_refused(&rings);
        asked.refused.lock().unwrap().clear();
        asked.wait_refused(&rings);
        assert!(disk.answers(0).unwrap().is_empty(), "{cache:?}: a ring is written without room");
        let used = |page: &u32, layout: &test_frontend::QueueLayout| {
            let bytes = disk.front_end.ram.read(u64::from(*page) * 4096, 4096);
            bytes[(layout.used % 4096) as usize..].to_vec()
        };
        for ((page, before), layout) in rings.iter().zip(&before).zip(&layouts) {
            assert!(
                used(page, layout) == before[(layout.used % 4096) as usize..],
                "{cache:?}: a used ring was written"
            );
        }
        asked.is_full.store(false, Ordering::SeqCst);
        assert!(disk.wait_all(0).unwrap().iter().all(|answer| answer.status == STATUS_OK));
        drop(disk);
        device.stop().unwrap();
    }
}

/// A page that was free when a request was begun, and is not when it ends, is left alone: the request fails, and a status that
/// cannot be written ends the ring.
#[test]
fn a_page_that_is_taken_while_a_request_is_under_way_is_left_alone() {
    let place = Place::new(8 * MIB);
    std::fs::write(place.image(), pattern(0, 8 * MIB as usize, 7)).unwrap();
    let memory = VmMemory::new();
    let asked = Arc::new(Asked { memory: Arc::downgrade(&memory), ..Asked::default() });
    memory.set_copy_on_write(Arc::clone(&asked) as Arc<dyn CopyOnWrite>);
    let config = block_device::DeviceConfig::new("taken", place.socket(), open(&place.image(), CacheMode::Auto));
    // As a guest would that writes a page to its journal while it reads into it.
    let route = Box::new(TakesPages { asked: Arc::clone(&asked), memory: Arc::clone(&memory) });
    let device = block_device::Device::start(config, route, Arc::clone(&memory), Arc::new(())).unwrap();
    let mut disk = disk(&place, FrontEndOptions::default());
    let data = disk.front_end.ram.take(4096, 4096);
    disk.front_end.ram.write(data, &[0xcc; 4096]);
    assert_eq!(disk.request(0, &Transfer::Read(vec![(data, 4096)])).unwrap(), STATUS_IO_ERROR);
    assert!(disk.front_end.ram.read(data, 4096).iter().all(|byte| *byte == 0xcc), "written over");
    drop(disk);
    device.stop().unwrap();
}

/// Has the pages of each read hold something committed once the read is under way, and no room.
struct TakesPages {
    asked: Arc<Asked>,
    memory: Arc<VmMemory>,
}

impl block_route::Route for TakesPages {
    fn started(&mut self, start: block_route::Start, memory: &Arc<guest_memory::MemoryTable>) -> std::io::Result<()> {
        block_route::PlainRoute.started(start, memory)
    }

    fn end_of_pass(&mut self, plan: &mut block_route::Plan) {
        block_route::PlainRoute.end_of_pass(plan);
    }

    fn disk_done(&mut self, ticket: block_route::Ticket, result: std::io::Result<()>, plan: &mut block_route::Plan) {
        block_route::PlainRoute.disk_done(ticket, result, plan);
    }

    fn route(&mut self, request: &block_route::Request<'_>, plan: &mut block_route::Plan) {
        if request.kind == block_route::RequestKind::Read {
            for page in request.segments.iter().flat_map(|segment| segment.pages()) {
                self.memory.set_retained(PageId(page), true);
            }
            self.asked.is_full.store(true, Ordering::SeqCst);
        }
        block_route::PlainRoute.route(request, plan);
    }
}

#[test]
fn images_on_other_file_systems() {
    // What /dev/shm and /tmp are differs from machine to machine; each must work.
    for directory in ["/dev/shm", "/tmp", "/var/tmp"] {
        let Ok(file) = tempfile::NamedTempFile::new_in(directory) else {
            println!("skipped: {directory} cannot be written");
            continue;
        };
        file.as_file().set_len(4 * MIB).unwrap();
        let place = Place::new(0);
        let (device, _) = start(&place, open(file.path(), CacheMode::Auto), |_, _| {});
        let mut disk = disk(&place, FrontEndOptions::default());
        for (offset, len) in [(0, 512), (512, 1536), (1 << 20, 65536)] {
            let bytes = pattern(offset, len, 8);
            assert_eq!(disk.write(offset, &bytes).unwrap(), STATUS_OK, "{directory}");
            let mut found = vec![0; len];
            assert_eq!(disk.flush().unwrap(), STATUS_OK);
            file.as_file().read_exact_at(&mut found, offset).unwrap();
            assert!(found == bytes, "{directory}");
        }
        drop(disk);
        device.stop().unwrap();
    }
}

/// What storage has not answered is under way still, or asked for yet, when the device was stopped in vain: whoever stopped it must know,
/// because nothing may be written beside that.
#[test]
fn storage_that_does_not_answer_is_no_orderly_end() {
    for is_block_device in [false, true] {
        let backing = Place::new(8 * MIB);
        let storage = match TestStorage::new(&backing.image()) {
            Ok(storage) => storage,
            Err(error) => return eprintln!("left out: {error}"),
        };
        let mut path = storage.image();
        let mut undo = None;
        if is_block_device {
            let Some(name) = attempt(&["losetup", "--find", "--show", path.to_str().unwrap()]) else { return };
            undo = Some(Undo(command(&["losetup", "-d", &name])));
            path = PathBuf::from(name);
        }
        let place = Place::new(0);
        let image = open(&path, CacheMode::Direct);
        let (device, _) = start(&place, image, |config, _| config.drain_timeout = Duration::from_millis(300));
        let mut disk = disk(&place, FrontEndOptions::default());
        let data = disk.front_end.ram.take(8 * 4096, 4096);
        storage.hold_writes(1);
        for block in 0..8 {
            disk.submit(0, block * 8, &Transfer::Write(vec![(data + block * 4096, 4096)])).unwrap();
        }
        disk.kick(0).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while storage.held_writes() == 0 {
            assert!(Instant::now() < deadline, "nothing is written");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = device.stop().expect_err("something is under way");
        assert!(matches!(error, Error::Unanswered { operations: 1.., .. }), "{error}");
        Image::open(&path, ImageOptions::default()).expect_err("in use as long as this is so");
        storage.release_writes();
        drop(undo);
    }
}

/// Storage that holds a write back keeps nobody else waiting: not a read, and not the thread that all of the disk's requests come to.
#[test]
fn a_write_that_storage_holds_keeps_no_read_from_its_answer() {
    let backing = Place::new(8 * MIB);
    std::fs::write(backing.image(), pattern(0, 8 * MIB as usize, 7)).unwrap();
    let storage = match TestStorage::new(&backing.image()) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    for cache in [CacheMode::Direct, CacheMode::Buffered] {
        let place = Place::new(0);
        let (device, _) = start(&place, open(&storage.image(), cache), |_, _| {});
        let mut disk = disk(&place, FrontEndOptions::default());
        let data = disk.front_end.ram.take(8 * 4096, 4096);
        storage.hold_writes(1);
        // More than are handed to the kernel at once.
        for block in 0..8 {
            disk.submit(0, block * 8, &Transfer::Write(vec![(data + block * 4096, 4096)])).unwrap();
        }
        disk.kick(0).unwrap();
        await_held(&storage);
        let answer = disk.front_end.ram.take(4096, 4096);
        let read = disk.submit(0, 8000, &Transfer::Read(vec![(answer, 4096)])).unwrap();
        disk.kick(0).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut answered = Vec::new();
        while !answered.contains(&read) {
            assert!(Instant::now() < deadline, "{cache:?}: a read waits for a write: {answered:?} of 9 are answered");
            answered.extend(disk.answers(0).unwrap().iter().map(|answer| answer.token));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(disk.front_end.ram.read(answer, 4096) == pattern(8000 * 512, 4096, 7), "{cache:?}");
        storage.release_writes();
        drop(disk);
        device.stop().unwrap();
    }
}

/// A device that is held is idle when nothing that it took is left, what waits for room included: that goes on whenever there is some.
#[test]
fn a_request_that_waits_for_room_is_not_idle() {
    let place = Place::new(8 * MIB);
    let memory = VmMemory::new();
    let asked = Arc::new(Asked { memory: Arc::downgrade(&memory), ..Asked::default() });
    memory.set_copy_on_write(Arc::clone(&asked) as Arc<dyn CopyOnWrite>);
    let config = block_device::DeviceConfig::new("waits", place.socket(), open(&place.image(), CacheMode::Auto));
    let route = Box::new(block_route::PlainRoute);
    let device = block_device::Device::start(config, route, Arc::clone(&memory), Arc::new(())).unwrap();
    let handle = device.handle();
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    let data = disk.front_end.ram.take(4096, 4096);
    let page = (data / 4096) as u32;
    memory.set_retained(PageId(page), true);
    asked.is_full.store(true, Ordering::SeqCst);
    disk.submit(0, 0, &Transfer::Read(vec![(data, 4096)])).unwrap();
    disk.kick(0).unwrap();
    asked.wait_refused(&[page]);
    handle.hold(Some(Instant::now() + Duration::from_secs(600))).unwrap();
    assert!(!handle.is_idle().unwrap(), "a request that was taken is not answered");
    asked.is_full.store(false, Ordering::SeqCst);
    let deadline = Instant::now() + test_frontend::ANSWER_TIMEOUT;
    while !handle.is_idle().unwrap() {
        assert!(Instant::now() < deadline, "it does not go on");
        std::thread::sleep(Duration::from_millis(1));
    }
    let answers = disk.answers(0).unwrap();
    assert!(matches!(answers[..], [answer] if answer.status == STATUS_OK), "idle before it was answered: {answers:?}");
    drop(disk);
    device.stop().unwrap();
}

/// Storage behind a loop device, so that nobody's thread waits in the kernel where it hangs.
fn hanging_storage() -> Option<(Place, TestStorage, String, Undo)> {
    let backing = Place::new(8 * MIB);
    std::fs::write(backing.image(), pattern(0, 8 * MIB as usize, 11)).unwrap();
    let storage = match TestStorage::new(&backing.image()) {
        Ok(storage) => storage,
        Err(error) => {
            eprintln!("left out: {error}");
            return None;
        }
    };
    let name = attempt(&["losetup", "--find", "--show", storage.image().to_str().unwrap()])?;
    let undo = Undo(command(&["losetup", "-d", &name]));
    Some((backing, storage, name, undo))
}

fn await_held(storage: &TestStorage) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while storage.held_writes() + storage.held_reads() == 0 {
        assert!(Instant::now() < deadline, "storage is not asked");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How a VMM takes its guest's memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakenBack {
    Stop,
    Reset,
    /// It has lost its connection meanwhile, and connects again.
    StopAfterReconnection,
}

/// Storage hangs, and the guest is reset: whoever has its rings back has its memory back, and neither lands anything in it that was read for
/// the guest before, nor is anything written of it that was not that guest's.
#[test]
fn memory_is_not_given_back_while_storage_has_it() {
    for (is_read, way) in [true, false].into_iter().flat_map(|is_read| {
        [TakenBack::Stop, TakenBack::Reset, TakenBack::StopAfterReconnection].map(|way| (is_read, way))
    }) {
        let what = format!("a {} and {way:?}", if is_read { "read" } else { "write" });
        let Some((backing, storage, name, _undo)) = hanging_storage() else { return };
        let place = Place::new(0);
        let (device, journal) = start(&place, open(Path::new(&name), CacheMode::Direct), |config, _| {
            config.drain_timeout = Duration::from_millis(200);
        });
        let mut disk = disk(&place, FrontEndOptions::default());
        let ram = disk.front_end.ram.clone();
        let data = ram.take(4096, 4096);
        ram.write(data, &[0xcc; 4096]);
        if is_read {
            storage.hold_reads(1);
            disk.submit(0, 800, &Transfer::Read(vec![(data, 4096)])).unwrap();
        } else {
            storage.hold_writes(1);
            disk.submit(0, 800, &Transfer::Write(vec![(data, 4096)])).unwrap();
        }
        disk.kick(0).unwrap();
        await_held(&storage);
        if way == TakenBack::StopAfterReconnection {
            disk.front_end.disconnect().unwrap();
            disk.front_end.reconnect().unwrap();
        }
        let (is_back, back) = std::sync::mpsc::channel();
        let stopping = std::thread::spawn(move || {
            match way {
                TakenBack::Reset => {
                    disk.front_end.messages.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
                    disk.front_end.messages.reset_device().unwrap();
                }
                _ => drop(disk.front_end.stop().unwrap()),
            }
            is_back.send(()).unwrap();
            disk
        });
        let stands = || journal.all().iter().filter(|told| matches!(told, Told::StandsStill(_))).count();
        let begun = Instant::now();
        let mut early = false;
        // It may be early as long as nobody was told, and for some time after.
        while !early && stands() == 0 && begun.elapsed() < Duration::from_secs(30) {
            early = back.recv_timeout(Duration::from_millis(10)).is_ok();
        }
        early = early || back.recv_timeout(Duration::from_millis(1500)).is_ok();
        if early {
            // What the guest has there by now.
            ram.write(data, &[0x55; 4096]);
        }
        let stands = stands();
        storage.release_reads();
        storage.release_writes();
        let disk = stopping.join().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while !device.handle().is_idle().unwrap() {
            assert!(Instant::now() < deadline, "{what}: it does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        if early {
            assert!(ram.read(data, 4096) == [0x55; 4096], "{what}: it landed in memory that was given back");
            let mut written = vec![0; 4096];
            let file = std::fs::File::open(backing.image()).unwrap();
            file.read_exact_at(&mut written, 800 * 512).unwrap();
            assert!(is_read || written == [0xcc; 4096], "{what}: what was not that guest's was written");
        }
        assert!(!early, "{what}: the memory is given back while storage has it");
        assert_eq!(stands, 1, "{what}: nobody is told that it stands");
        assert_eq!(
            journal.all().iter().rev().find(|told| matches!(told, Told::StandsStill(_))),
            Some(&Told::StandsStill(false))
        );
        assert!(!is_read || ram.read(data, 4096) == pattern(800 * 512, 4096, 11), "{what}: it was read before");
        drop(disk);
        device.stop().unwrap();
    }
}

/// Who stands still so may be killed: its connection is let go, whatever storage does, and the next VMM is let in when that has answered.
#[test]
fn who_waits_for_storage_may_be_killed() {
    let Some((_backing, storage, name, _undo)) = hanging_storage() else { return };
    let place = Place::new(0);
    let (device, journal) = start(&place, open(Path::new(&name), CacheMode::Direct), |config, _| {
        config.drain_timeout = Duration::from_millis(200);
    });
    let mut disk = disk(&place, FrontEndOptions::default());
    let data = disk.front_end.ram.take(4096, 4096);
    storage.hold_reads(1);
    disk.submit(0, 0, &Transfer::Read(vec![(data, 4096)])).unwrap();
    disk.kick(0).unwrap();
    await_held(&storage);
    // As a VMM does, and is killed before it hears anything.
    let own = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()).unwrap();
    let flags = rustix::process::PidfdGetfdFlags::empty();
    let connection = rustix::process::pidfd_getfd(own, disk.front_end.messages.as_raw_fd(), flags).unwrap();
    let stopping = std::thread::spawn(move || disk.front_end.stop().map(drop).map_err(|error| error.to_string()));
    let deadline = Instant::now() + Duration::from_secs(30);
    while !journal.all().contains(&Told::StandsStill(true)) {
        assert!(Instant::now() < deadline, "it is never said");
        std::thread::sleep(Duration::from_millis(1));
    }
    rustix::net::shutdown(connection, rustix::net::Shutdown::Both).unwrap();
    stopping.join().unwrap().expect_err("nobody has answered");
    while journal.all().last() != Some(&Told::Disconnected) {
        assert!(Instant::now() < deadline, "its connection stays");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut next = self::disk(&place, FrontEndOptions::default());
    let data = next.front_end.ram.take(4096, 4096);
    next.submit(0, 8, &Transfer::Read(vec![(data, 4096)])).unwrap();
    next.kick(0).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(next.answers(0).unwrap().is_empty(), "let in beside what is under way");
    storage.release_reads();
    assert_eq!(next.wait_all(0).unwrap()[0].status, STATUS_OK);
    assert!(next.front_end.ram.read(data, 4096) == pattern(4096, 4096, 11));
    drop(next);
    device.stop().unwrap();
}

/// A file on a file system whose sectors have 4,096 bytes, which ends within one: all of it is the guest's disk.
#[test]
fn the_last_part_of_a_file_on_4096_byte_sectors_is_read_and_written() {
    const SIZE: u64 = MIB + 3 * 512;
    let backing = Place::new(64 * MIB);
    let path = backing.image();
    let words = ["losetup", "--find", "--show", "--sector-size", "4096", path.to_str().unwrap()];
    let Some(name) = attempt(&words) else { return };
    let _attached = Undo(command(&["losetup", "-d", &name]));
    let Some(_) = attempt(&["mkfs.ext4", "-q", "-b", "4096", &name]) else { return };
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().to_str().unwrap();
    let Some(_) = attempt(&["mount", &name, at]) else { return };
    let _mounted = Undo(command(&["umount", "-l", at]));
    let file = directory.path().join("disk.img");
    let mut expected = pattern(0, SIZE as usize, 12);
    std::fs::write(&file, &expected).unwrap();
    let place = Place::new(0);
    let image = open(&file, CacheMode::Direct);
    assert_eq!((image.direct().unwrap().offset_bytes, image.size_bytes()), (4096, SIZE));
    let (device, _) = start(&place, image, |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    let last = SIZE / 512;
    let is = |disk: &mut TestDisk, expected: &[u8]| {
        for first in [0, last - 9, last - 4, last - 3, last - 2, last - 1] {
            let (status, bytes) = disk.read(first * 512, (SIZE - first * 512) as usize).unwrap();
            assert_eq!(status, STATUS_OK, "from sector {first}");
            assert!(bytes == expected[first as usize * 512..], "from sector {first}");
        }
    };
    is(&mut disk, &expected);
    for (turn, (first, count)) in
        [(last - 1, 1), (last - 3, 3), (last - 3, 1), (last - 12, 12), (0, last), (last - 5, 4)].into_iter().enumerate()
    {
        let bytes = pattern(first * 512, count as usize * 512, 100 + turn as u64);
        assert_eq!(disk.write(first * 512, &bytes).unwrap(), STATUS_OK, "{count} from sector {first}");
        expected[first as usize * 512..(first + count) as usize * 512].copy_from_slice(&bytes);
        is(&mut disk, &expected);
    }
    assert_eq!(disk.request(0, &Transfer::WriteZeroes(vec![(last - 6, 5, 0)])).unwrap(), STATUS_OK);
    expected[(last - 6) as usize * 512..(last - 1) as usize * 512].fill(0);
    is(&mut disk, &expected);
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    assert_eq!(disk.read(SIZE, 512).unwrap().0, STATUS_IO_ERROR, "behind its end");
    drop(disk);
    device.stop().unwrap();
    assert!(std::fs::read(&file).unwrap() == expected, "it is as long as it was, and has what was written");
}
