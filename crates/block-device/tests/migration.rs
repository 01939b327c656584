//! A VMM that moves its guest: every byte of guest memory that the device writes is in a page that it marks, whatever the moment at
//! which the VMM takes the marks away and copies the pages, and whoever dies.

mod common;

use block_device::{Begin, CacheMode, Device, DeviceConfig, Gate};
use block_route::{PlainRoute, Start};
use common::{MIB, Place, open, start};
use guest_memory::VmMemory;
use seeded_random::Random;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, PageLog, TestDisk, Transfer};

const SOCKET: &str = "BLOCK_DEVICE_MIGRATION_SOCKET";
const IMAGE: &str = "BLOCK_DEVICE_MIGRATION_IMAGE";
const RAM_BYTES: u64 = 8 * MIB;
const PAGE: u64 = 4096;

/// Lets everybody in, and notes what it was told.
#[derive(Debug, Default)]
struct Noting {
    stops: Mutex<Vec<Vec<(u16, u16)>>>,
    rings: Mutex<Vec<(u16, u16)>>,
    is_logging: AtomicBool,
    waits: AtomicBool,
    refuses: AtomicBool,
    is_gone: AtomicBool,
}

impl Gate for Noting {
    fn begins(&self, _positions: &[(u16, u16)], start: Start) -> Begin {
        if self.waits.load(Ordering::SeqCst) {
            return Begin::Wait;
        }
        if self.refuses.load(Ordering::SeqCst) { Begin::No("refused for a test".to_owned()) } else { Begin::Yes(start) }
    }

    fn ring_stopped(&self, ring: u16, position: u16) {
        self.rings.lock().unwrap().push((ring, position));
    }

    fn stopped(&self, positions: &[(u16, u16)]) {
        self.stops.lock().unwrap().push(positions.to_vec());
    }

    fn gone(&self) {
        self.is_gone.store(true, Ordering::SeqCst);
    }

    fn logging(&self, is_logging: bool) {
        self.is_logging.store(is_logging, Ordering::SeqCst);
    }
}

/// The other host's memory, which pages are copied to whenever the VMM finds marks.
struct Target {
    ram: GuestRam,
    log: Arc<PageLog>,
    pages: Mutex<Vec<u8>>,
}

impl Target {
    /// Everything is copied once when logging has begun.
    fn new(ram: &GuestRam, log: Arc<PageLog>) -> Arc<Self> {
        let pages = Mutex::new(ram.read(0, RAM_BYTES as usize));
        Arc::new(Target { ram: ram.clone(), log, pages })
    }

    fn sync(&self) -> usize {
        let mut pages = self.pages.lock().unwrap();
        // Under the lock: a mark that is taken off is copied before anybody compares.
        let marked = self.log.take();
        for page in &marked {
            let at = (page * PAGE) as usize;
            pages[at..at + PAGE as usize].copy_from_slice(&self.ram.read(page * PAGE, PAGE as usize));
        }
        marked.len()
    }

    /// Copies as a VMM does, at moments of its own, until told to end. Counts what it has found marked.
    fn follow(self: &Arc<Self>, is_over: &Arc<AtomicBool>, copied: &Arc<AtomicUsize>) -> std::thread::JoinHandle<()> {
        let (target, is_over, copied) = (Arc::clone(self), Arc::clone(is_over), Arc::clone(copied));
        std::thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                copied.fetch_add(target.sync(), Ordering::SeqCst);
                std::thread::yield_now();
            }
        })
    }

    #[track_caller]
    fn assert_same(&self, gpa: u64, len: u64, what: &str) {
        let pages = self.pages.lock().unwrap();
        let there = &pages[gpa as usize..(gpa + len) as usize];
        let here = self.ram.read(gpa, len as usize);
        let first = here.iter().zip(there).position(|(here, there)| here != there);
        assert_eq!(first, None, "{what} at {gpa:#x}: a byte stays behind");
    }
}

/// A driver, and where the device writes of its memory.
struct Driver {
    disk: TestDisk,
    data: u64,
    random: Random,
}

const DATA_BYTES: u64 = 4 * MIB;

impl Driver {
    fn new(place: &Place, queues: u16, seed: u64) -> Self {
        let ram = GuestRam::new(RAM_BYTES).unwrap();
        // Rings that are larger than what the in-flight region is asked for, as under QEMU 10.0.
        let options = FrontEndOptions { queues, queue_size: 256, ..FrontEndOptions::default() };
        let mut front_end = FrontEnd::connect(&place.socket(), ram, options).unwrap();
        front_end.start().unwrap();
        let disk = TestDisk::new(front_end);
        let data = disk.front_end.ram.take(DATA_BYTES, PAGE);
        Driver { disk, data, random: Random::new(seed) }
    }

    fn submit_some(&mut self, queue: usize) {
        for _ in 0..1 + self.random.below(24) {
            // Anywhere in a page, of any length that is whole sectors together.
            let count = 1 + self.random.below(4);
            let mut segments = Vec::new();
            for _ in 0..count {
                let len = 512 * (1 + self.random.below(24));
                let at = self.data + self.random.below(DATA_BYTES - len);
                segments.push((at, len as u32));
            }
            let sector = self.random.below(2 * MIB / 512);
            let transfer = match self.random.below(8) {
                0 => Transfer::Write(segments),
                1 => Transfer::Identity(vec![(segments[0].0, 20)]),
                2 => Transfer::Flush,
                3 => Transfer::Other(99),
                _ => Transfer::Read(segments),
            };
            // Beyond the end now and then.
            let sector = if self.random.below(16) == 0 { u64::MAX / 1024 } else { sector };
            if self.disk.submit(queue, sector, &transfer).is_err() {
                break;
            }
        }
        self.disk.kick(queue).unwrap();
    }

    /// All that the device writes: data, status bytes (which lie in front of the data), used rings.
    #[track_caller]
    fn assert_same(&self, target: &Target) {
        target.assert_same(self.data, DATA_BYTES, "data");
        for queue in &self.disk.front_end.queues {
            let layout = queue.layout();
            target.assert_same(layout.used, 6 + 8 * u64::from(queue.options().size), "a used ring");
        }
        self.disk.each_status(|at| target.assert_same(at, 1, "a status"));
    }
}

fn filled(place: &Place) {
    let content: Vec<u8> = (0..3 * MIB).map(|at| (at.wrapping_mul(31) >> 3) as u8 | 1).collect();
    std::fs::write(place.image(), content).unwrap();
}

#[test]
fn every_page_that_is_written_is_marked() {
    for seed in 0..3 {
        // A device for each driver: a child that the other test forks has this one's connection until it runs its program, so that the
        // connection does not end when it is dropped here, and the next one at the same device would be turned away.
        let place = Place::new(3 * MIB);
        filled(&place);
        let gate = Arc::new(Noting::default());
        let told = Arc::clone(&gate);
        let (_device, _) =
            start(&place, open(&place.image(), CacheMode::Auto), move |config, _| config.gate = Some(told));
        let mut driver = Driver::new(&place, 2, seed);
        // Some are in flight when it begins.
        driver.submit_some(0);
        let log = driver.disk.front_end.start_logging().unwrap();
        while !gate.is_logging.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let target = Target::new(&driver.disk.front_end.ram, log);
        let is_over = Arc::new(AtomicBool::new(false));
        let copied = Arc::new(AtomicUsize::new(0));
        let following = target.follow(&is_over, &copied);
        driver.disk.wait_all(0).unwrap();
        let begun = Instant::now();
        // For some time, and until the VMM has found enough.
        while begun.elapsed() < Duration::from_millis(600) || copied.load(Ordering::SeqCst) <= 1000 {
            assert!(begun.elapsed() < Duration::from_secs(60), "the VMM found {copied:?} marks");
            for queue in 0..2 {
                driver.submit_some(queue);
            }
            for queue in 0..2 {
                driver.disk.wait_all(queue).unwrap();
            }
        }
        is_over.store(true, Ordering::SeqCst);
        following.join().unwrap();
        let positions = driver.disk.front_end.stop().unwrap();
        target.sync();
        driver.assert_same(&target);
        let stop = gate.stops.lock().unwrap().pop().expect("it was told");
        assert_eq!(stop, [(0, positions[0]), (1, positions[1])]);
        // Nothing is marked when nobody wants it any more.
        driver.disk.front_end.stop_logging().unwrap();
        while gate.is_logging.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }
}

/// Not a test of its own: what the child process does.
#[test]
fn serve_and_mark_until_killed() {
    let (Some(socket), Some(image)) = (std::env::var_os(SOCKET), std::env::var_os(IMAGE)) else { return };
    let mut config = DeviceConfig::new("victim", PathBuf::from(socket), open(&PathBuf::from(image), CacheMode::Auto));
    config.gate = Some(Arc::new(Noting::default()));
    let _device = Device::start(config, Box::new(PlainRoute), VmMemory::new(), Arc::new(())).unwrap();
    loop {
        std::thread::park();
    }
}

struct Victim(Child);

impl Victim {
    fn start(place: &Place) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serve_and_mark_until_killed", "--nocapture"])
            .env(SOCKET, place.socket())
            .env(IMAGE, place.image())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Victim(child)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_device_that_is_killed_leaves_no_page_behind() {
    let place = Place::new(3 * MIB);
    filled(&place);
    let mut victim = Victim::start(&place);
    let mut driver = Driver::new(&place, 1, 77);
    let log = driver.disk.front_end.start_logging().unwrap();
    // A question: what was said before is done when it is answered.
    driver.disk.front_end.size_bytes().unwrap();
    let target = Target::new(&driver.disk.front_end.ram, log);
    let is_over = Arc::new(AtomicBool::new(false));
    let following = target.follow(&is_over, &Arc::default());
    let mut cut_short = 0;
    for round in 0..20u64 {
        driver.submit_some(0);
        for _ in 0..round * 1500 {
            std::hint::spin_loop();
        }
        drop(victim);
        driver.disk.answers(0).unwrap();
        cut_short += u64::from(driver.disk.in_flight() > 0);
        victim = Victim::start(&place);
        driver.disk.front_end.reconnect().unwrap();
        driver.disk.wait_all(0).unwrap();
    }
    is_over.store(true, Ordering::SeqCst);
    following.join().unwrap();
    driver.disk.front_end.stop().unwrap();
    target.sync();
    driver.assert_same(&target);
    assert!(cut_short > 0, "no death came with requests in flight");
    drop(victim);
}

#[test]
fn nothing_is_taken_from_a_guest_that_is_not_let_in() {
    let place = Place::new(3 * MIB);
    filled(&place);
    let gate = Arc::new(Noting::default());
    gate.waits.store(true, Ordering::SeqCst);
    let told = Arc::clone(&gate);
    let (_device, journal) =
        start(&place, open(&place.image(), CacheMode::Auto), move |config, _| config.gate = Some(told));
    let mut driver = Driver::new(&place, 1, 5);
    driver.disk.submit(0, 0, &Transfer::Flush).unwrap();
    driver.disk.kick(0).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(driver.disk.answers(0).unwrap().is_empty());
    assert!(journal.starts().is_empty(), "the route knows nothing of it");
    // It is stopped as it is, and comes again.
    assert_eq!(driver.disk.front_end.stop().unwrap(), [0]);
    driver.disk.front_end.start_with_bases(&[0]).unwrap();
    gate.waits.store(false, Ordering::SeqCst);
    let answers = driver.disk.wait_all(0).unwrap();
    assert_eq!(answers[0].status, test_frontend::STATUS_OK);
    driver.disk.front_end.stop().unwrap();
    gate.refuses.store(true, Ordering::SeqCst);
    let base = driver.disk.front_end.queues[0].taken_index();
    driver.disk.front_end.start_with_bases(&[base]).unwrap();
    assert_eq!(driver.disk.flush().unwrap(), test_frontend::STATUS_IO_ERROR);
    assert!(!gate.is_gone.load(Ordering::SeqCst));
    drop(driver);
    while !gate.is_gone.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
}

/// A worker dies with requests in flight at the moment in which the VMM stops the guest: the next one is told to start the ring and to
/// give it back, and on the other host nobody knows what was in flight.
#[test]
fn what_an_earlier_process_had_in_flight_is_done_before_a_ring_is_given_back() {
    for is_let_in in [true, false] {
        let place = Place::new(3 * MIB);
        filled(&place);
        let (first, _) = start(&place, open(&place.image(), CacheMode::Auto), |config, route| {
            config.gate = Some(Arc::new(Noting::default()));
            config.drain_timeout = Duration::from_millis(200);
            route.hold_writes = true;
        });
        let mut driver = Driver::new(&place, 1, 7);
        let address = driver.disk.front_end.ram.take(4096, 4096);
        driver.disk.front_end.ram.write(address, &[7; 4096]);
        for sector in [0, 8, 16] {
            driver.disk.submit(0, sector, &Transfer::Write(vec![(address, 4096)])).unwrap();
        }
        driver.disk.kick(0).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while first.handle().with_route(|route, _| route.held.len()).unwrap() < 3 {
            assert!(Instant::now() < deadline, "they are not taken");
        }
        first.stop().expect("stops though requests are held");
        // What no process has taken.
        for sector in [24, 32] {
            driver.disk.submit(0, sector, &Transfer::Write(vec![(address, 4096)])).unwrap();
        }
        driver.disk.kick(0).unwrap();
        let gate = Arc::new(Noting::default());
        gate.waits.store(!is_let_in, Ordering::SeqCst);
        let told = Arc::clone(&gate);
        let (second, _) =
            start(&place, open(&place.image(), CacheMode::Auto), move |config, _| config.gate = Some(told));
        // Nothing is taken before it is told to stop.
        second.handle().hold(Some(Instant::now() + Duration::from_millis(if is_let_in { 500 } else { 0 }))).unwrap();
        driver.disk.front_end.reconnect().unwrap();
        // Whoever waits for the gate for ever is let in at last, and has done then what it must not.
        let late = Arc::clone(&gate);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(20));
            late.waits.store(false, Ordering::SeqCst);
        });
        assert_eq!(driver.disk.front_end.stop().unwrap(), [3], "what was not taken stays");
        assert_eq!(
            (gate.stops.lock().unwrap().clone(), gate.rings.lock().unwrap().clone()),
            (vec![vec![(0, 3)]], vec![(0, 3)])
        );
        let answers = driver.disk.answers(0).unwrap();
        let done = if is_let_in { 3 } else { 0 };
        assert_eq!(answers.len(), done);
        assert_eq!(second.handle().counters().resubmitted_requests, done as u64);
        let image = std::fs::read(place.image()).unwrap();
        assert_eq!(image[..3 * 4096] == [7; 3 * 4096], is_let_in, "on the image");
        assert_ne!(image[3 * 4096..5 * 4096], [7; 2 * 4096], "nothing new is taken");
        // The guest stays: the rest is done, and what was left is done again.
        gate.waits.store(false, Ordering::SeqCst);
        driver.disk.front_end.start_with_bases(&[3]).unwrap();
        driver.disk.kick(0).unwrap();
        assert_eq!(driver.disk.wait_all(0).unwrap().len(), 5 - done);
        assert_eq!(std::fs::read(place.image()).unwrap()[..5 * 4096], [7; 5 * 4096]);
        driver.disk.front_end.stop().unwrap();
        second.stop().unwrap();
    }
}
