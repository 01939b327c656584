//! A disk that takes a modelled disk's time: same bytes, same answers, and the model hears of every one of them. No time is
//! measured here; the model's own arithmetic is tested where it lives.

mod common;

use block_device::{CacheMode, Device};
use common::{MIB, NotingRoute, Place, Told, disk, open, pattern, start};
use disk_model::{Profile, Server, ServerOptions};
use std::sync::Arc;
use test_frontend::{FrontEndOptions, STATUS_OK, TestDisk};

fn server() -> Server {
    let options = ServerOptions { profile: Profile::St336753lw, seed: 1, time_scale: 0.01, socket: None };
    Server::start(options).unwrap()
}

/// A disk that takes the server's time.
fn modelled(place: &Place, server: &Server) -> (Device<NotingRoute>, TestDisk) {
    let client = Arc::new(server.connect(8 * MIB).unwrap());
    let image = open(&place.image(), CacheMode::Buffered);
    let (device, _) = start(place, image, |config, _| config.model = Some(client));
    (device, disk(place, FrontEndOptions::default()))
}

#[test]
fn a_modelled_disk_answers_with_the_same_bytes_and_its_model_sees_all_of_them() {
    let (place, server) = (Place::new(8 * MIB), server());
    let (device, mut disk) = modelled(&place, &server);
    let mut written = 0;
    for (offset, len) in [(0, 512), (4096, 4096), (MIB, MIB as usize), (8 * MIB - 512, 512)] {
        let bytes = pattern(offset, len, 1);
        assert_eq!(disk.write(offset, &bytes).unwrap(), STATUS_OK);
        assert_eq!(disk.read(offset, len).unwrap(), (STATUS_OK, bytes));
        assert_eq!(disk.flush().unwrap(), STATUS_OK);
        written += len as u64;
    }
    // The server tells its totals once a round, and it has answered all of these.
    while server.totals().flushes < 4 {
        std::thread::yield_now();
    }
    let totals = server.totals();
    assert_eq!((totals.writes, totals.reads, totals.write_bytes, totals.read_bytes), (4, 4, written, written));
    assert_eq!(device.handle().counters().storage_flushes, 0, "the host's own disk has no say");
    device.stop().unwrap();
}

#[test]
fn a_disk_whose_model_is_gone_goes_on() {
    let (place, server) = (Place::new(8 * MIB), server());
    let (device, mut disk) = modelled(&place, &server);
    let bytes = pattern(0, 4096, 2);
    assert_eq!(disk.write(0, &bytes).unwrap(), STATUS_OK);
    drop(server);
    for offset in [4096, 8192, 12288] {
        assert_eq!(disk.write(offset, &bytes).unwrap(), STATUS_OK);
        assert_eq!(disk.flush().unwrap(), STATUS_OK);
    }
    assert_eq!(disk.read(8192, 4096).unwrap(), (STATUS_OK, bytes));
    assert!(device.handle().counters().storage_flushes > 0, "flushes reach storage again");
    device.stop().unwrap();
}

/// The route's own writes are nobody's request, so no request that is answered late keeps the next start back: a route that
/// recovers at a start would see them land on what it has just written.
#[test]
fn a_write_of_the_routes_own_ends_before_the_next_start() {
    let place = Place::new(8 * MIB);
    // Without a cache, and slow enough that the reset is there first.
    let options = ServerOptions { profile: Profile::St336753lwWriteThrough, seed: 1, time_scale: 20.0, socket: None };
    let server = Server::start(options).unwrap();
    let client = Arc::new(server.connect(8 * MIB).unwrap());
    let (_device, journal) = start(&place, open(&place.image(), CacheMode::Buffered), |config, route| {
        config.model = Some(client);
        route.writes_itself = true;
    });
    let mut disk = disk(&place, FrontEndOptions::default());
    for offset in [0, 4 * MIB, MIB] {
        assert_eq!(disk.write(offset, &[1; 4096]).unwrap(), STATUS_OK);
    }
    disk.front_end.stop().unwrap();
    let done = journal.all().iter().filter(|told| **told == Told::OwnWriteDone).count();
    let ram = disk.front_end.ram.clone();
    let mut front_end = disk.front_end;
    for queue in &mut front_end.queues {
        let options = queue.options();
        *queue = test_frontend::DriverQueue::new(&ram, options).unwrap();
    }
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    assert_eq!(disk.read(4 * MIB, 4096).unwrap(), (STATUS_OK, vec![0xee; 4096]));
    let told: Vec<Told> =
        journal.all().into_iter().filter(|told| matches!(told, Told::Started(_) | Told::OwnWriteDone)).collect();
    let fresh = Told::Started(block_route::Start::Fresh);
    assert!(done < 3, "the drive was too fast for this test to see anything");
    assert_eq!(told, [fresh.clone(), Told::OwnWriteDone, Told::OwnWriteDone, Told::OwnWriteDone, fresh]);
}
