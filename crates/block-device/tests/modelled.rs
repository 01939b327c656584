//! A disk that takes a modelled disk's time: same bytes, same answers, and the model hears of every one of them. No time is
//! measured here; the model's own arithmetic is tested where it lives.

mod common;

use block_device::{CacheMode, Device};
use common::{MIB, NotingRoute, Place, disk, open, pattern, start};
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
