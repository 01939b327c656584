//! Connections that come and go, devices that stop, requests that survive both.

mod common;

use block_device::{CacheMode, Device, DeviceConfig, Error};
use block_route::{RequestKind, Route, Start, Status};
use common::{Journal, MIB, NotingRoute, Place, Told, connect, disk, open, pattern, rig, start};
use guest_memory::VmMemory;
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_frontend::{
    ANSWER_TIMEOUT, FrontEnd, FrontEndOptions, GuestRam, STATUS_IO_ERROR, STATUS_OK, TestDisk, Transfer,
};
use vhost::vhost_user::VhostUserFrontend;

/// Waits until something is so.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "never came: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn the_owner_is_told_everything_in_order() {
    let place = Place::new(MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    let layout = disk.front_end.queues[0].layout();
    // Pause and go on.
    let bases = disk.front_end.stop().unwrap();
    assert_eq!(bases, [1]);
    disk.front_end.start_with_bases(&bases).unwrap();
    assert_eq!(disk.write(512, &[2; 512]).unwrap(), STATUS_OK);
    drop(disk);
    eventually("the end of the connection", || journal.all().last() == Some(&Told::Disconnected));
    device.stop().unwrap();

    assert_eq!(*journal.1.lock().unwrap(), [std::process::id() as i32]);
    let told = journal.all();
    let pages = |told: &Told| if let Told::RingPages(pages) = told { Some(pages.clone()) } else { None };
    // The memory file's pages are numbered from 0, so that guest addresses give the page numbers here.
    let expected: Vec<u32> =
        [layout.descriptors, layout.available, layout.used].iter().map(|address| (address / 4096) as u32).collect();
    let rings: Vec<Vec<u32>> = told
        .iter()
        .filter_map(pages)
        .map(|pages| pages.into_iter().map(|page| page.0).collect())
        .filter(|pages: &Vec<u32>| !pages.is_empty())
        .collect();
    assert!(!rings.is_empty() && rings.iter().all(|pages| *pages == expected), "{rings:?}, not {expected:?}");
    let rest: Vec<Told> = told.into_iter().filter(|told| pages(told).is_none()).collect();
    assert_eq!(
        rest,
        [
            Told::Connected,
            Told::Started(Start::Fresh),
            Told::Stopped,
            Told::Started(Start::Resumed),
            Told::Stopped,
            Told::Disconnected
        ]
    );
}

#[test]
fn devices_begin_beside_each_other_and_one_that_is_given_up_leaves_nothing() {
    let places = [Place::new(MIB), Place::new(MIB)];
    let begun = places.each_ref().map(|place| {
        let config = DeviceConfig::new("test-disk", place.socket(), open(&place.image(), CacheMode::Auto));
        let journal = Journal::default();
        let mut route = NotingRoute::default();
        route.journal = journal.clone();
        (Device::begin(config, Box::new(route), VmMemory::new(), Arc::new(journal.clone())).unwrap(), journal)
    });
    let [(first, _), (given_up, untold)] = begun;
    let device = first.finish().unwrap();
    assert_eq!(disk(&places[0], FrontEndOptions::default()).write(0, &[1; 512]).unwrap(), STATUS_OK);
    device.stop().unwrap();
    let again = || block_device::Image::open(&places[1].image(), block_device::ImageOptions::default());
    again().expect_err("the device has its lock");
    assert!(places[1].socket().exists());
    drop(given_up);
    again().expect("nobody has it any more");
    assert!(!places[1].socket().exists() && untold.all().is_empty());
}

#[test]
fn a_reset_is_told_from_a_pause() {
    let place = Place::new(MIB);
    let (_device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    // A reset: the stop messages, then a new in-flight region; the rings begin anew.
    disk.front_end.stop().unwrap();
    let ram = disk.front_end.ram.clone();
    let mut front_end = disk.front_end;
    for queue in &mut front_end.queues {
        let options = queue.options();
        *queue = test_frontend::DriverQueue::new(&ram, options).unwrap();
    }
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    assert_eq!(disk.read(0, 512).unwrap(), (STATUS_OK, vec![1; 512]));
    // RESET_DEVICE, which newer front-ends send.
    disk.front_end.messages.reset_device().unwrap();
    let mut front_end = disk.front_end;
    for queue in &mut front_end.queues {
        let options = queue.options();
        *queue = test_frontend::DriverQueue::new(&ram, options).unwrap();
    }
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    assert_eq!(disk.read(0, 512).unwrap(), (STATUS_OK, vec![1; 512]));
    assert_eq!(journal.starts(), [Start::Fresh; 3]);
}

#[test]
fn one_listener_serves_one_front_end_after_another() {
    let place = Place::new(MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    for round in 0..5u64 {
        let mut disk = disk(&place, FrontEndOptions::default());
        assert_eq!(disk.write(round * 512, &pattern(round * 512, 512, 1)).unwrap(), STATUS_OK);
        let (status, bytes) = disk.read(0, (round as usize + 1) * 512).unwrap();
        assert_eq!(status, STATUS_OK);
        assert!(bytes == pattern(0, (round as usize + 1) * 512, 1));
    }
    assert_eq!(journal.starts(), [Start::Fresh; 5]);
    device.stop().unwrap();
}

/// QEMU starts a ring with a descriptor that it does not look at, and gives the guest's a moment later: what was answered meanwhile has to be
/// told once more, or a guest all of whose requests were answered then waits for ever.
#[test]
fn a_guest_is_told_at_the_descriptor_that_comes_late() {
    let (_place, device, mut disk) = rig(MIB, CacheMode::Auto);
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    disk.front_end.change_call(0).unwrap();
    assert!(disk.front_end.queues[0].wait(ANSWER_TIMEOUT).unwrap(), "nobody is told");
    // Once is enough, and where nothing was answered nobody is told.
    assert!(!disk.front_end.queues[0].wait(Duration::from_millis(50)).unwrap());
    disk.front_end.change_call(0).unwrap();
    assert!(!disk.front_end.queues[0].wait(Duration::from_millis(50)).unwrap());
    drop(disk);
    device.stop().unwrap();
}

/// Who had the ring before may have died between an answer and its interrupt. The VMM that comes back starts the ring with a descriptor of its own,
/// too: the guest is told at the one that comes late.
#[test]
fn a_guest_is_told_at_the_descriptor_that_comes_late_of_what_another_has_answered() {
    let (_place, device, mut disk) = rig(MIB, CacheMode::Auto);
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    disk.front_end.disconnect().unwrap();
    disk.front_end.reconnect().unwrap();
    // At its own, of which it does not look what it was told.
    assert!(disk.front_end.queues[0].wait(ANSWER_TIMEOUT).unwrap());
    disk.front_end.change_call(0).unwrap();
    assert!(disk.front_end.queues[0].wait(ANSWER_TIMEOUT).unwrap(), "nobody is told");
    drop(disk);
    device.stop().unwrap();
}

#[test]
fn a_connection_lost_and_found_loses_no_request() {
    let (_place, device, mut disk) = rig(8 * MIB, CacheMode::Auto);
    let data = disk.front_end.ram.take(64 * 4096, 4096);
    for round in 0..20u64 {
        for slot in 0..32 {
            let address = data + slot * 4096;
            let place = (round * 32 + slot) % 1024;
            disk.front_end.ram.write(address, &pattern(place * 4096, 4096, round));
            disk.submit(0, place * 8, &Transfer::Write(vec![(address, 4096)])).unwrap();
        }
        disk.kick(0).unwrap();
        // Cut with some of them, all or none answered.
        disk.front_end.disconnect().unwrap();
        disk.front_end.reconnect().unwrap();
        let answers = disk.wait_all(0).unwrap();
        assert_eq!(answers.len(), 32);
        assert!(answers.iter().all(|answer| answer.status == STATUS_OK));
        let first = (round * 32) % 1024;
        let (status, bytes) = disk.read(first * 4096, 32 * 4096).unwrap();
        assert_eq!(status, STATUS_OK);
        assert!(bytes == pattern(first * 4096, 32 * 4096, round), "round {round}");
    }
    drop(disk);
    device.stop().unwrap();
}

#[test]
fn a_device_that_died_does_its_requests_again_in_order() {
    let place = Place::new(8 * MIB);
    let image = open(&place.image(), CacheMode::Auto);
    let (first, _) = start(&place, Arc::clone(&image), |config, route| {
        config.drain_timeout = Duration::from_millis(200);
        route.hold_writes = true;
    });
    let mut disk = disk(&place, FrontEndOptions::default());
    let data = disk.front_end.ram.take(16 * 4096, 4096);
    // Sectors out of order, so that the order of submission shows; two answered reads between them.
    for (position, sector) in [40u64, 8, 32, 0, 24, 16].into_iter().enumerate() {
        let address = data + position as u64 * 4096;
        disk.front_end.ram.write(address, &pattern(sector * 512, 4096, 2));
        disk.submit(0, sector, &Transfer::Write(vec![(address, 4096)])).unwrap();
        if position % 3 == 1 {
            disk.submit(0, 100, &Transfer::Read(vec![(data + 8 * 4096, 512)])).unwrap();
        }
    }
    disk.kick(0).unwrap();
    let mut answered = Vec::new();
    eventually("the answers to the reads", || {
        answered.extend(disk.answers(0).unwrap());
        answered.len() == 2
    });
    let begun = Instant::now();
    let route = first.stop().expect("stops though requests are held");
    // It waits for its storage's time, and not for what is never answered.
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(route.held.len(), 6);
    assert_eq!(disk.in_flight(), 6, "what was held is not answered");

    let (second, journal) = start(&place, image, |_, _| {});
    disk.front_end.reconnect().unwrap();
    let answers = disk.wait_all(0).unwrap();
    assert_eq!(answers.len(), 6);
    assert!(answers.iter().all(|answer| answer.status == STATUS_OK));
    assert_eq!(journal.starts(), [Start::Resumed]);
    assert_eq!(second.handle().counters().resubmitted_requests, 6);
    let (order, again) =
        second.handle().with_route(|route, _| (route.routed.clone(), route.routed_again.clone())).unwrap();
    let offsets: Vec<u64> = order.iter().map(|(_, offset, _)| offset / 512).collect();
    assert_eq!(offsets, [40, 8, 32, 0, 24, 16]);
    assert_eq!(again, order.iter().map(|(_, offset, _)| *offset).collect::<Vec<_>>(), "the route is told");
    let (status, bytes) = disk.read(0, 48 * 512).unwrap();
    assert_eq!(status, STATUS_OK);
    assert!(bytes == pattern(0, 48 * 512, 2));
    // And the ring goes on as if nothing had been.
    for sector in 0..300u64 {
        assert_eq!(disk.write(sector * 512, &[3; 512]).unwrap(), STATUS_OK);
    }
    let again = second.handle().with_route(|route, _| route.routed_again.len()).unwrap();
    assert_eq!(again, 6, "what is new is not");
    second.stop().unwrap();
}

/// As under QEMU 10.0, with a region of an amberlog that gave it what it had asked for.
fn beyond_the_region() -> FrontEndOptions {
    FrontEndOptions { queue_size: 256, narrow_inflight: true, ..FrontEndOptions::default() }
}

#[test]
fn a_ring_beyond_its_region_is_gone_on_with_where_all_is_answered() {
    let place = Place::new(8 * MIB);
    let image = open(&place.image(), CacheMode::Auto);
    let (first, _) = start(&place, Arc::clone(&image), |_, _| {});
    let mut disk = disk(&place, beyond_the_region());
    for sector in 0..300u64 {
        assert_eq!(disk.write(sector * 512, &[1; 512]).unwrap(), STATUS_OK);
    }
    first.stop().unwrap();
    let (second, journal) = start(&place, image, |_, _| {});
    disk.front_end.reconnect().unwrap();
    // When it answers this it has started the ring, with nothing in it that is not answered.
    disk.front_end.config(0, 8).unwrap();
    assert_eq!(disk.write(0, &[2; 512]).unwrap(), STATUS_OK);
    assert_eq!(journal.starts(), [Start::Resumed]);
    assert_eq!(second.handle().counters().resubmitted_requests, 0);
    // A pause, with a request that was not taken: this process knows where it has stopped.
    let bases = disk.front_end.stop().unwrap();
    assert_eq!(bases, [301]);
    let address = disk.front_end.ram.take(4096, 4096);
    disk.front_end.ram.write(address, &[3; 512]);
    disk.submit(0, 8, &Transfer::Write(vec![(address, 512)])).unwrap();
    disk.front_end.start_with_bases(&bases).unwrap();
    disk.kick(0).unwrap();
    assert_eq!(disk.wait_all(0).unwrap().len(), 1);
    assert_eq!(disk.read(8 * 512, 512).unwrap(), (STATUS_OK, vec![3; 512]));
    second.stop().unwrap();
}

#[test]
fn a_ring_beyond_its_region_with_requests_in_flight_is_refused() {
    let place = Place::new(8 * MIB);
    let image = open(&place.image(), CacheMode::Auto);
    let (first, _) = start(&place, Arc::clone(&image), |config, route| {
        config.drain_timeout = Duration::from_millis(200);
        route.hold_writes = true;
    });
    let mut disk = disk(&place, beyond_the_region());
    let address = disk.front_end.ram.take(4096, 4096);
    disk.front_end.ram.write(address, &[1; 4096]);
    for sector in [8, 16] {
        disk.submit(0, sector, &Transfer::Write(vec![(address, 4096)])).unwrap();
    }
    // One after them that is answered: neither the first two nor the last two are those in flight.
    disk.submit(0, 0, &Transfer::Read(vec![(address, 512)])).unwrap();
    disk.kick(0).unwrap();
    eventually("the answer to the read", || disk.answers(0).unwrap().len() == 1);
    first.stop().expect("stops though requests are held");
    let before = std::fs::read(place.image()).unwrap();
    let (second, journal) = start(&place, Arc::clone(&image), |_, _| {});
    assert!(disk.front_end.reconnect().is_err() || disk.front_end.config(0, 8).is_err(), "it is let in");
    assert_eq!(journal.starts(), []);
    let counters = second.handle().counters();
    assert_eq!((counters.resubmitted_requests, disk.answers(0).unwrap().len()), (0, 0));
    assert_eq!(std::fs::read(place.image()).unwrap(), before);
    // The guest is reset, and has a region that is large enough.
    drop(disk);
    let mut disk = self::disk(&place, FrontEndOptions { narrow_inflight: false, ..beyond_the_region() });
    assert_eq!(disk.write(0, &[2; 512]).unwrap(), STATUS_OK);
    second.stop().unwrap();
}

/// The head that is in flight is beyond what the VMM asked its region for.
#[test]
fn a_ring_of_any_size_is_gone_on_with_in_a_region_of_this_amberlog() {
    for queue_size in [64, 128, 256, 1024] {
        let place = Place::new(8 * MIB);
        let image = open(&place.image(), CacheMode::Auto);
        let (first, _) = start(&place, Arc::clone(&image), |config, route| {
            config.drain_timeout = Duration::from_millis(200);
            route.hold_writes = true;
        });
        let mut disk = disk(&place, FrontEndOptions { queue_size, ..FrontEndOptions::default() });
        let address = disk.front_end.ram.take(4096, 4096);
        disk.front_end.ram.write(address, &[1; 4096]);
        // Each takes three descriptors.
        let requests = u64::from(queue_size) / 3;
        for sector in 0..requests {
            disk.submit(0, sector * 8, &Transfer::Write(vec![(address, 4096)])).unwrap();
        }
        disk.kick(0).unwrap();
        eventually("all requests", || {
            let taken = first.handle().with_route(|route, _| route.held.len()).unwrap();
            taken as u64 == requests
        });
        first.stop().expect("stops though requests are held");
        let (second, _) = start(&place, image, |_, _| {});
        disk.front_end.reconnect().unwrap();
        assert_eq!(disk.wait_all(0).unwrap().len() as u64, requests);
        assert_eq!(second.handle().counters().resubmitted_requests, requests);
        assert_eq!(disk.write(0, &[2; 512]).unwrap(), STATUS_OK);
        second.stop().unwrap();
    }
}

#[test]
fn a_route_is_asked_things_between_passes() {
    let place = Place::new(MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, route| route.hold_writes = true);
    let mut disk = disk(&place, FrontEndOptions::default());
    let address = disk.front_end.ram.take(4096, 4096);
    for (sector, _) in [(0, ()), (8, ())] {
        disk.submit(0, sector, &Transfer::Write(vec![(address, 512)])).unwrap();
    }
    disk.kick(0).unwrap();
    let handle = device.handle();
    eventually("both writes at the route", || handle.with_route(|route, _| route.held.len()).unwrap() == 2);
    assert!(disk.answers(0).unwrap().is_empty());
    handle
        .with_route(|route, plan| {
            for ((id, ..), status) in route.held.drain(..).zip([Status::Ok, Status::IoError]) {
                plan.release(id, status);
            }
        })
        .unwrap();
    let mut answers = disk.wait_all(0).unwrap();
    answers.sort_by_key(|answer| answer.token);
    assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [STATUS_OK, STATUS_IO_ERROR]);
    device.stop().unwrap();
    assert!(matches!(handle.with_route(|_, _| ()), Err(Error::Stopped { .. })));
    assert!(!handle.post_to_route(|_, _| ()));
}

#[test]
fn a_route_that_refuses_to_start_fails_every_request_until_it_does() {
    let place = Place::new(MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, route| route.refuse_start = true);
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_IO_ERROR);
    assert_eq!(disk.read(0, 512).unwrap().0, STATUS_IO_ERROR);
    device.handle().with_route(|route, _| route.refuse_start = false).unwrap();
    let bases = disk.front_end.stop().unwrap();
    disk.front_end.start_with_bases(&bases).unwrap();
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    assert_eq!(journal.starts().len(), 2);
}

#[test]
fn any_route_fits_in_a_box() {
    let place = Place::new(MIB);
    let config = DeviceConfig::new("boxed", place.socket(), open(&place.image(), CacheMode::Auto));
    let route: Box<dyn Route> = Box::new(NotingRoute::default());
    let device: Device<dyn Route> = Device::start(config, route, VmMemory::new(), Arc::new(())).unwrap();
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    drop(disk);
    let _route: Box<dyn Route> = device.stop().unwrap();
}

#[test]
fn stopping_waits_for_what_is_in_flight() {
    let (place, device, mut disk) = rig(8 * MIB, CacheMode::Auto);
    let data = disk.front_end.ram.take(64 * 4096, 4096);
    for slot in 0..32 {
        disk.front_end.ram.write(data + slot * 4096, &pattern(slot * 4096, 4096, 5));
        disk.submit(0, slot * 8, &Transfer::Write(vec![(data + slot * 4096, 4096)])).unwrap();
    }
    disk.kick(0).unwrap();
    let handle = device.handle();
    eventually("all writes taken", || handle.counters().write_requests == 32);
    let route = device.stop().unwrap();
    assert_eq!(route.routed.len(), 32);
    // Every one of them has been done and answered.
    assert_eq!(disk.answers(0).unwrap().iter().filter(|answer| answer.status == STATUS_OK).count(), 32);
    assert!(std::fs::read(place.image()).unwrap()[..32 * 4096] == pattern(0, 32 * 4096, 5));
}

#[test]
fn what_cannot_be_configured_is_a_sentence() {
    let place = Place::new(MIB);
    let image = open(&place.image(), CacheMode::Auto);
    let refused = |change: fn(&mut DeviceConfig)| {
        let mut config = DeviceConfig::new("odd", place.socket(), Arc::clone(&image));
        change(&mut config);
        let started = Device::start(config, Box::new(NotingRoute::default()), VmMemory::new(), Arc::new(()));
        started.err().expect("is refused").to_string()
    };
    assert!(refused(|config| config.queues = 0).contains("queues"));
    assert!(refused(|config| config.segments_max = 5000).contains("segments"));
    assert!(refused(|config| config.identity.serial = "x".repeat(21)).contains("serial number"));
    assert!(refused(|config| config.identity.read_only = true).contains("read-only"));
    let (_device, _) = start(&place, Arc::clone(&image), |_, _| {});
    assert!(refused(|_| ()).contains("another process listens there"));
}

#[test]
fn nonsense_on_the_socket_ends_the_connection_and_nothing_else() {
    use std::io::{Read, Write};
    let place = Place::new(MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    for nonsense in [vec![0xff; 12], vec![0; 4096], b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![1, 0, 0]] {
        let mut stream = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
        let _ = stream.write_all(&nonsense);
        let ended = stream.read(&mut [0; 1]);
        let is_reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(ended.as_ref().is_ok_and(|n| *n == 0) || ended.as_ref().is_err_and(is_reset), "{ended:?}");
    }
    assert_eq!(journal.all(), [], "none of them was a VMM");
    // Requests whose payload is missing, or is not theirs.
    for (count, request) in [5u32, 8, 24, 31].into_iter().enumerate() {
        let mut stream = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
        let mut message: Vec<u8> = [request, 1, 3].iter().flat_map(|word| word.to_ne_bytes()).collect();
        message.extend([0xff; 3]);
        stream.write_all(&message).unwrap();
        drop(stream);
        // Whoever comes while it is still there is turned away.
        eventually("its connection is gone", || {
            journal.all().iter().filter(|told| **told == Told::Disconnected).count() == count + 1
        });
    }
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    drop(disk);
    device.stop().unwrap();
}

#[test]
fn who_connects_and_says_nothing_is_no_vmm_and_is_in_nobodys_way() {
    use std::io::Read;
    let place = Place::new(MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut silent = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
    silent.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(silent.read(&mut [0; 1]).is_err(), "it may be silent for a while");
    assert_eq!(journal.all(), [], "nobody was told of it");
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    assert_eq!(silent.read(&mut [0; 1]).unwrap(), 0, "the disk has its VMM: the other is turned away");
    assert_eq!(disk.read(0, 512).unwrap(), (STATUS_OK, vec![1; 512]));
    // One that is there when the device stops does not hold that up.
    drop(disk);
    let _silent = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
    device.stop().unwrap();
}

#[test]
fn messages_that_make_no_sense_are_refused() {
    use vhost::VhostBackend;
    let place = Place::new(MIB);
    let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |config, _| config.queues = 2);
    // With NEED_REPLY every refusal comes back as an error; a refused connection is over.
    let fresh = || {
        let front_end = connect(&place, FrontEndOptions::default());
        front_end.messages.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        front_end.messages.set_features(front_end.features).unwrap();
        front_end
    };
    fresh().messages.set_vring_num(0, 100).expect_err("not a power of two");
    fresh().messages.set_vring_num(0, 2048).expect_err("larger than any");
    fresh().messages.set_features(1 << 40).expect_err("never offered");
    let front_end = fresh();
    front_end.messages.set_vring_kick(0, &front_end.queues[0].kick).expect_err("no memory, no ring");
    let front_end = fresh();
    let mut regions = front_end.ram.regions().unwrap();
    regions[0].memory_size *= 2;
    front_end.messages.set_mem_table(&regions).expect_err("beyond its file");
    let mut front_end =
        FrontEnd::connect(&place.socket(), GuestRam::new(MIB).unwrap(), FrontEndOptions::default()).unwrap();
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
}

#[test]
fn requests_reach_the_route_with_the_pages_they_lie_in() {
    let place = Place::new(MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, route| route.hold_writes = true);
    let mut disk = disk(&place, FrontEndOptions::default());
    let data = disk.front_end.ram.take(8 * 4096, 4096);
    let segments = vec![(data + 3 * 4096, 4096), (data, 4096), (data + 5 * 4096 + 512, 1024)];
    disk.submit(0, 0, &Transfer::Write(segments.clone())).unwrap();
    disk.kick(0).unwrap();
    let handle = device.handle();
    eventually("the write at the route", || handle.with_route(|route, _| route.held.len()).unwrap() == 1);
    let (pages, kinds) = handle
        .with_route(|route, plan| {
            let (id, _, slices) = route.held.pop().unwrap();
            plan.release(id, Status::Ok);
            let pages: Vec<_> = slices.iter().map(|slice| (slice.page().0, slice.page_offset(), slice.len())).collect();
            (pages, route.routed.clone())
        })
        .unwrap();
    let expected: Vec<_> = segments
        .iter()
        .map(|(address, len)| ((address / 4096) as u32, (address % 4096) as usize, *len as usize))
        .collect();
    assert_eq!(pages, expected);
    assert_eq!(kinds, [(RequestKind::Write, 0, 4096 * 2 + 1024)]);
    assert_eq!(disk.wait_all(0).unwrap()[0].status, STATUS_OK);
    let _: Journal = Journal::default();
}

/// A route whose recovery never ends, until told to.
struct Stuck(std::sync::mpsc::Receiver<()>, std::sync::mpsc::Sender<()>);

impl Route for Stuck {
    fn started(&mut self, _: Start, _: &Arc<guest_memory::MemoryTable>) -> std::io::Result<()> {
        self.1.send(()).unwrap();
        let _ = self.0.recv();
        Ok(())
    }

    fn route(&mut self, request: &block_route::Request<'_>, plan: &mut block_route::Plan) {
        plan.fail(request.id);
    }

    fn end_of_pass(&mut self, _: &mut block_route::Plan) {}

    fn disk_done(&mut self, _: block_route::Ticket, _: std::io::Result<()>, _: &mut block_route::Plan) {}
}

#[test]
fn a_route_that_hangs_does_not_hang_who_stops_the_device() {
    let place = Place::new(MIB);
    let mut config = DeviceConfig::new("stuck", place.socket(), open(&place.image(), CacheMode::Auto));
    config.drain_timeout = Duration::from_millis(100);
    let (release, stuck) = std::sync::mpsc::channel();
    let (enters, entered) = std::sync::mpsc::channel();
    let image = Arc::downgrade(&config.image);
    let device = Device::start(config, Box::new(Stuck(stuck, enters)), VmMemory::new(), Arc::new(())).unwrap();
    let mut front_end = connect(&place, FrontEndOptions::default());
    front_end.start().unwrap();
    entered.recv_timeout(ANSWER_TIMEOUT).unwrap();
    let error = device.stop().err().expect("the route hangs");
    assert!(matches!(error, Error::StopTimedOut { .. }), "{error}");
    assert!(image.upgrade().is_some(), "its thread has the image");
    drop(release);
    eventually("the end of its thread, which goes on no further than it has to", || image.upgrade().is_none());
}

/// What a route does when a guest begins (it recovers, and scans) changes disks: not while they are held.
#[test]
fn a_device_that_is_held_does_not_begin() {
    let place = Place::new(MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let handle = device.handle();
    handle.hold(Some(Instant::now() + Duration::from_secs(600))).unwrap();
    let mut disk = disk(&place, FrontEndOptions::default());
    disk.submit(0, 0, &Transfer::Flush).unwrap();
    disk.kick(0).unwrap();
    // Each answer comes between two passes.
    for _ in 0..20 {
        assert!(handle.is_held().unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(journal.starts(), [], "its route has begun");
    handle.hold(None).unwrap();
    assert_eq!(disk.wait_all(0).unwrap().len(), 1);
    assert_eq!(journal.starts(), [Start::Fresh]);
    drop(disk);
    device.stop().unwrap();
}
