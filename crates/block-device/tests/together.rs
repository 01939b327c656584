//! Several devices that one thread serves.

mod common;

use block_device::{CacheMode, Device, DeviceConfig, DeviceParts};
use block_route::{DiskOperation, Plan, Request, Route, Start, Ticket};
use common::{MIB, NotingRoute, Place, connect, open, pattern};
use guest_memory::{MemoryTable, VmMemory};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use test_frontend::{ANSWER_TIMEOUT, FrontEndOptions, STATUS_OK, TestDisk, Transfer};

/// Waits until something is so.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "never came: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

struct Rig {
    places: Vec<Place>,
    devices: Vec<Device<NotingRoute>>,
}

/// So many devices in one thread.
fn rig(count: usize) -> Rig {
    let places: Vec<Place> = (0..count).map(|_| Place::new(16 * MIB)).collect();
    let beginning = |place: &Place| {
        let mut config = DeviceConfig::new("test-disk", place.socket(), open(&place.image(), CacheMode::Auto));
        config.drain_timeout = Duration::from_secs(5);
        DeviceParts { config, route: Box::new(NotingRoute::default()), observer: Arc::new(()) }
    };
    let begun = Device::begin_together(places.iter().map(beginning).collect(), VmMemory::new()).unwrap();
    let devices = begun.into_iter().map(|device| device.finish().unwrap()).collect();
    Rig { places, devices }
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

/// Counts what it has under way, and notes at its start what its companion has.
struct Counting {
    own: Arc<AtomicUsize>,
    companions: Arc<AtomicUsize>,
    seen: mpsc::Sender<usize>,
}

impl Route for Counting {
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

/// What a route waits for as it starts (home writes to another disk) nobody but its thread would do.
#[test]
fn a_disk_begins_when_nothing_of_the_others_is_under_way_and_they_go_on() {
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
