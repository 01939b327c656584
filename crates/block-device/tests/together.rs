//! Several devices that one thread serves.

mod common;

use block_device::{CacheMode, Device, DeviceConfig, DeviceParts};
use block_route::{DiskOperation, Plan, Request, Route, Start, Status, Ticket};
use common::{Journal, MIB, NotingRoute, Place, connect, open, pattern};
use guest_memory::{MemoryTable, VmMemory};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use test_frontend::{ANSWER_TIMEOUT, FrontEndOptions, STATUS_OK, TestDisk, Transfer};
use test_storage::TestStorage;
use throttle::{Bound, Limits, Throttle};

/// Waits until something is so.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "never came: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A disk that nobody holds up has done what it was asked for by then.
const SOON: Duration = Duration::from_secs(2);

struct Rig {
    places: Vec<Place>,
    devices: Vec<Device<NotingRoute>>,
}

/// So many devices in one thread.
fn rig(count: usize) -> Rig {
    rig_with((0..count).map(|_| Place::new(16 * MIB)).collect(), |_, _, _| {})
}

/// A device at each place, all in one thread.
fn rig_with(places: Vec<Place>, change: impl Fn(usize, &mut DeviceConfig, &mut NotingRoute)) -> Rig {
    let beginning = |(index, place): (usize, &Place)| {
        let mut config = DeviceConfig::new("test-disk", place.socket(), open(&place.image(), CacheMode::Auto));
        (config.drain_timeout, config.stop_margin) = (Duration::from_secs(5), common::STOP_MARGIN);
        let mut route = NotingRoute::default();
        change(index, &mut config, &mut route);
        DeviceParts { config, route: Box::new(route), observer: Arc::new(()) }
    };
    let begun = Device::begin_together(places.iter().enumerate().map(beginning).collect(), VmMemory::new()).unwrap();
    let devices = begun.into_iter().map(|device| device.finish().unwrap()).collect();
    Rig { places, devices }
}

/// A disk does some of everything, soon, and often enough that its thread sleeps in between. Who waits for its neighbour does so in every
/// round; storage that takes its time, or a machine that stands still, is met in one.
fn goes_on(disk: &mut TestDisk, beside: &str) {
    let mut late = Vec::new();
    for round in 0..20u64 {
        let begun = Instant::now();
        let bytes = pattern(round * 4096, 4096, round);
        assert_eq!(disk.write(round * 8, &bytes).unwrap(), STATUS_OK, "beside {beside}");
        assert_eq!(disk.flush().unwrap(), STATUS_OK, "beside {beside}");
        assert_eq!(disk.read(round * 8, 4096).unwrap(), (STATUS_OK, bytes), "beside {beside}");
        late.extend(Some(begun.elapsed()).filter(|taken| *taken >= SOON));
        assert!(late.len() <= 2, "beside {beside}: {late:?}");
        std::thread::sleep(Duration::from_millis(round % 3));
    }
}

fn disk(place: &Place, options: FrontEndOptions) -> TestDisk {
    let mut front_end = connect(place, options);
    front_end.start().unwrap();
    TestDisk::new(front_end)
}

/// In which thread a device's route is.
fn thread_of(device: &Device<NotingRoute>) -> std::thread::ThreadId {
    device.handle().with_route(|_, _| std::thread::current().id()).unwrap()
}

#[test]
fn disks_of_one_thread_serve_their_guest_each() {
    let mut rig = rig(3);
    let threads: Vec<_> = rig.devices.iter().map(thread_of).collect();
    assert!(threads.iter().all(|thread| *thread == threads[0]), "{threads:?}");
    let workers: Vec<_> = rig
        .places
        .iter()
        .enumerate()
        .map(|(index, place)| {
            let options = FrontEndOptions { queues: 1 + index as u16, ..FrontEndOptions::default() };
            let mut disk = disk(place, options);
            std::thread::spawn(move || {
                for round in 0..200u64 {
                    let (offset, salt) = ((round * 7919 % 2048) * 4096, index as u64 * 1000 + round);
                    let bytes = pattern(offset, 4096, salt);
                    assert_eq!(disk.write(offset / 512, &bytes).unwrap(), STATUS_OK);
                    if round % 8 == 0 {
                        assert_eq!(disk.flush().unwrap(), STATUS_OK);
                    }
                    // Long enough that the thread sleeps now and then.
                    if round % 50 == 0 {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    assert_eq!(disk.read(offset / 512, 4096).unwrap(), (STATUS_OK, bytes));
                }
            })
        })
        .collect();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    // One that ends leaves the others as they are.
    let first = rig.devices.remove(0);
    first.stop().unwrap();
    let mut second = disk(&rig.places[1], FrontEndOptions::default());
    assert_eq!(second.write(0, &[1; 512]).unwrap(), STATUS_OK);
    assert_eq!(second.read(0, 512).unwrap(), (STATUS_OK, vec![1; 512]));
    drop(second);
    for device in rig.devices {
        device.stop().unwrap();
    }
}

/// Counts what it has under way, waits for its companion's, and notes at its start what that has.
struct Counting {
    own: Arc<AtomicUsize>,
    companions: Arc<AtomicUsize>,
    seen: mpsc::Sender<usize>,
}

impl Route for Counting {
    fn waits_for_others(&self, _: Start) -> Option<String> {
        (self.companions.load(Ordering::SeqCst) > 0).then(|| "the companion's writes".to_owned())
    }

    fn started(&mut self, _: Start, _: &Arc<MemoryTable>) -> std::io::Result<()> {
        self.seen.send(self.companions.load(Ordering::SeqCst)).unwrap();
        Ok(())
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.own.fetch_add(1, Ordering::SeqCst);
        plan.disk(DiskOperation { ticket: Some(Ticket(0)), ..block_route::whole(request) });
    }

    fn end_of_pass(&mut self, _: &mut Plan) {}

    fn disk_done(&mut self, _: Ticket, result: std::io::Result<()>, _: &mut Plan) {
        result.unwrap();
        self.own.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What a route waits for before it starts (home writes to another disk) nobody but its thread would bring to its end.
#[test]
fn a_disk_begins_when_what_it_waits_for_of_another_has_ended() {
    const STARTS: usize = 20;
    let places = [Place::new(64 * MIB), Place::new(MIB)];
    let counts = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
    let (seen, looks) = mpsc::channel();
    let beginning = |index: usize| {
        let place = &places[index];
        let config = DeviceConfig::new("test-disk", place.socket(), open(&place.image(), CacheMode::Auto));
        let (own, companions) = (Arc::clone(&counts[index]), Arc::clone(&counts[1 - index]));
        DeviceParts {
            config,
            route: Box::new(Counting { own, companions, seen: seen.clone() }),
            observer: Arc::new(()),
        }
    };
    let begun = Device::begin_together(vec![beginning(0), beginning(1)], VmMemory::new()).unwrap();
    let devices: Vec<_> = begun.into_iter().map(|device| device.finish().unwrap()).collect();
    let mut busy = disk(&places[0], FrontEndOptions::default());
    assert_eq!(busy.read(0, 512).unwrap().0, STATUS_OK);
    assert_eq!(looks.recv_timeout(ANSWER_TIMEOUT), Ok(0));
    let (stop, is_over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let stream = {
        let (stop, written) = (Arc::clone(&stop), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let data = busy.front_end.ram.take(MIB, 4096);
            while !stop.load(Ordering::SeqCst) {
                for part in 0..16 {
                    busy.submit(0, part * 2048, &Transfer::Write(vec![(data, MIB as u32)])).unwrap();
                }
                busy.kick(0).unwrap();
                assert!(busy.wait_all(0).unwrap().iter().all(|done| done.status == STATUS_OK));
                written.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    for _ in 0..STARTS {
        let before = is_over.load(Ordering::SeqCst);
        eventually("more of the stream", || is_over.load(Ordering::SeqCst) > before);
        let mut other = disk(&places[1], FrontEndOptions::default());
        assert_eq!(other.read(0, 512).unwrap().0, STATUS_OK);
        assert_eq!(looks.recv_timeout(ANSWER_TIMEOUT), Ok(0), "under way as another disk began");
    }
    stop.store(true, Ordering::SeqCst);
    stream.join().unwrap();
    devices.into_iter().for_each(|device| drop(device.stop().unwrap()));
}

/// Whatever a disk waits for between two turns, the others do not.
#[test]
fn a_disk_that_waits_has_nobody_wait_with_it() {
    let places = (0..2).map(|_| Place::new(16 * MIB)).collect();
    let rig = rig_with(places, |index, config, route| {
        config.throttle = (index == 0).then(|| throttled(40 * 4096));
        route.hold_writes = index == 0;
    });
    let mut waiting = disk(&rig.places[0], FrontEndOptions::default());
    let mut other = disk(&rig.places[1], FrontEndOptions::default());
    let data = waiting.front_end.ram.take(4096, 4096);
    let write = Transfer::Write(vec![(data, 4096)]);
    let device = rig.devices[0].handle();

    // Its route keeps a write for itself.
    waiting.submit(0, 0, &write).unwrap();
    waiting.kick(0).unwrap();
    let holds = || device.with_route(|route, _| route.held.len()).unwrap();
    eventually("a write that is held", || holds() == 1);
    goes_on(&mut other, "a write that the route holds");
    device
        .with_route(|route, plan| {
            route.hold_writes = false;
            for (id, ..) in route.held.drain(..) {
                plan.release(id, Status::Ok);
            }
        })
        .unwrap();
    assert_eq!(waiting.wait_all(0).unwrap().len(), 1);

    // Nothing is taken from its rings.
    device.hold(Some(Instant::now() + Duration::from_secs(600))).unwrap();
    waiting.submit(0, 0, &write).unwrap();
    waiting.kick(0).unwrap();
    goes_on(&mut other, "rings that are held");
    device.hold(None).unwrap();
    assert_eq!(waiting.wait_all(0).unwrap().len(), 1);

    // It has had more than it may: each of these waits for its time, with nobody to wake the thread but the clock.
    device.set_throttle(Some(throttled(40 * 4096))).unwrap();
    for round in 0..20 {
        waiting.submit(0, round * 8, &write).unwrap();
    }
    waiting.kick(0).unwrap();
    goes_on(&mut other, "a throttle");
    let done = waiting.wait_all(0).unwrap();
    assert!(done.len() == 20 && done.iter().all(|done| done.status == STATUS_OK), "{done:?}");
    drop((waiting, other));
    rig.devices.into_iter().for_each(|device| drop(device.stop().unwrap()));
}

/// Disks that have one bound together have a part of it each, however much one of them asks for.
#[test]
fn disks_that_share_a_throttle_take_of_it_by_turns() {
    for greedy in 0..2 {
        let throttle = throttled(100 * 4096);
        let places = (0..2).map(|_| Place::new(16 * MIB)).collect();
        let rig = rig_with(places, |_, config, _| config.throttle = Some(throttle.clone()));
        let is_over = Arc::new(AtomicBool::new(false));
        let asking = {
            let (is_over, place) = (Arc::clone(&is_over), &rig.places[greedy]);
            let mut disk = disk(place, FrontEndOptions::default());
            std::thread::spawn(move || {
                let data = disk.front_end.ram.take(4096, 4096);
                let mut answered = 0;
                // There is always something in its ring.
                while !is_over.load(Ordering::SeqCst) {
                    while disk.in_flight() < 8 {
                        disk.submit(0, 0, &Transfer::Write(vec![(data, 4096)])).unwrap();
                    }
                    disk.kick(0).unwrap();
                    std::thread::sleep(Duration::from_micros(200));
                    answered += disk.answers(0).unwrap().len();
                }
                answered + disk.wait_all(0).unwrap().len()
            })
        };
        std::thread::sleep(Duration::from_millis(300));
        let mut other = disk(&rig.places[1 - greedy], FrontEndOptions::default());
        let mut late = Vec::new();
        for round in 0..10u64 {
            let begun = Instant::now();
            assert_eq!(other.write(round * 8, &pattern(0, 4096, round)).unwrap(), STATUS_OK);
            // It has a hundred in a second, and half of them are its own. Once the machine may stand still.
            late.extend(Some(begun.elapsed()).filter(|taken| *taken >= SOON));
            assert!(late.len() <= 1, "{late:?} beside disk {greedy}");
        }
        is_over.store(true, Ordering::SeqCst);
        assert!(asking.join().unwrap() > 0);
        drop(other);
        for device in rig.devices {
            device.stop().unwrap();
        }
    }
}

/// Not more than so many bytes a second, and a tenth of that at once.
fn throttled(bytes: u64) -> Throttle {
    let limits = Limits { bytes: Some(Bound { per_second: bytes, burst: bytes / 10 }), ..Limits::default() };
    Throttle::new(limits, Instant::now())
}

/// Storage that does not answer holds up its own disk alone.
#[test]
fn storage_that_hangs_has_no_other_disk_hang() {
    let [first, second] = [Place::new(16 * MIB), Place::new(16 * MIB)];
    let storage = match TestStorage::new(&first.image()) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("LEFT OUT: {error}"),
    };
    let image = storage.image();
    let rig = rig_with(vec![first, second], |index, config, _| {
        if index == 0 {
            config.image = open(&image, CacheMode::Buffered);
        }
        config.drain_timeout = Duration::from_secs(1);
    });
    let mut hanging = disk(&rig.places[0], FrontEndOptions::default());
    let mut other = disk(&rig.places[1], FrontEndOptions::default());
    let data = hanging.front_end.ram.take(4096, 4096);
    assert_eq!(hanging.read(0, 512).unwrap().0, STATUS_OK);
    storage.hold_writes(u64::MAX);
    hanging.submit(0, 0, &Transfer::Write(vec![(data, 4096)])).unwrap();
    hanging.submit(0, 0, &Transfer::Flush).unwrap();
    hanging.kick(0).unwrap();
    eventually("a write that hangs", || storage.held_writes() > 0);
    goes_on(&mut other, "a write that storage does not answer");
    storage.release_writes();
    assert!(hanging.wait_all(0).unwrap().iter().all(|done| done.status == STATUS_OK));
    drop((hanging, other));
    rig.devices.into_iter().for_each(|device| drop(device.stop().unwrap()));
}

/// What is waited for never ends: that disk fails after a time, aloud, and the others know nothing of it.
#[test]
fn a_disk_that_waits_for_another_in_vain_fails_alone() {
    struct Vain(NotingRoute);
    impl Route for Vain {
        fn waits_for_others(&self, _: Start) -> Option<String> {
            self.0.refuse_start.then(|| "writes of another disk".to_owned())
        }

        fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> std::io::Result<()> {
            assert!(!self.0.refuse_start, "started beside what it waits for");
            self.0.started(start, memory)
        }

        fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
            self.0.route(request, plan);
        }

        fn end_of_pass(&mut self, plan: &mut Plan) {
            self.0.end_of_pass(plan);
        }

        fn disk_done(&mut self, ticket: Ticket, result: std::io::Result<()>, plan: &mut Plan) {
            self.0.disk_done(ticket, result, plan);
        }
    }
    let places = [Place::new(16 * MIB), Place::new(16 * MIB)];
    let journal = Journal::default();
    let beginning = |(index, place): (usize, &Place)| {
        let mut config = DeviceConfig::new("test-disk", place.socket(), open(&place.image(), CacheMode::Auto));
        (config.drain_timeout, config.stop_margin) = (Duration::from_millis(1500), common::STOP_MARGIN);
        let mut route = NotingRoute::default();
        route.refuse_start = index == 0;
        DeviceParts { config, route: Box::new(Vain(route)), observer: Arc::new(journal.clone()) }
    };
    let begun = Device::begin_together(places.iter().enumerate().map(beginning).collect(), VmMemory::new()).unwrap();
    let devices: Vec<_> = begun.into_iter().map(|device| device.finish().unwrap()).collect();
    let mut vain = disk(&places[0], FrontEndOptions::default());
    let mut other = disk(&places[1], FrontEndOptions::default());
    let data = vain.front_end.ram.take(4096, 4096);
    vain.submit(0, 0, &Transfer::Write(vec![(data, 4096)])).unwrap();
    vain.kick(0).unwrap();
    goes_on(&mut other, "a start that waits");
    let done = vain.wait_all(0).unwrap();
    assert!(done.iter().all(|done| done.status != STATUS_OK), "{done:?}");
    assert!(journal.faults().iter().any(|fault| fault.contains("writes of another disk have not ended")));
    // Anew, without anything to wait for.
    drop(vain);
    devices[0].handle().with_route(|route, _| route.0.refuse_start = false).unwrap();
    let mut again = disk(&places[0], FrontEndOptions::default());
    goes_on(&mut again, "one that failed before");
    drop((again, other));
    devices.into_iter().for_each(|device| drop(device.stop().unwrap()));
}

#[test]
fn devices_of_one_thread_that_are_given_up_leave_nothing() {
    let places = [Place::new(MIB), Place::new(MIB)];
    let beginning = |place: &Place| {
        let config = DeviceConfig::new("test-disk", place.socket(), open(&place.image(), CacheMode::Auto));
        DeviceParts { config, route: Box::new(NotingRoute::default()), observer: Arc::new(()) }
    };
    let begun = Device::begin_together(places.iter().map(beginning).collect(), VmMemory::new()).unwrap();
    assert!(places.iter().all(|place| place.socket().exists()));
    drop(begun);
    for place in &places {
        assert!(!place.socket().exists());
        block_device::Image::open(&place.image(), block_device::ImageOptions::default()).expect("nobody has it");
    }
}
