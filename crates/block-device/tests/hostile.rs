//! What a hostile guest can do: to itself.

mod common;

use block_device::{CacheMode, Device, DeviceConfig};
use block_route::PlainRoute;
use common::{MIB, NotingRoute, Place, disk, open, pattern, rig, start};
use guest_memory::{CopyOnWrite, PageId, VmMemory};
use seeded_random::Random;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use test_frontend::{
    ANSWER_TIMEOUT, Descriptor, FrontEndOptions, STATUS_IO_ERROR, STATUS_OK, STATUS_UNSUPPORTED, TestDisk, Transfer,
};

/// The device still does what it should, on queue `queue`.
fn still_works(disk: &mut TestDisk, queue: usize) {
    let data = disk.front_end.ram.take(4096, 4096);
    let bytes = pattern(4096, 4096, 77);
    disk.front_end.ram.write(data, &bytes);
    assert_eq!(disk.request_on(queue, 8, &Transfer::Write(vec![(data, 4096)])).unwrap().status, STATUS_OK);
    disk.front_end.ram.write(data, &[0; 4096]);
    assert_eq!(disk.request_on(queue, 8, &Transfer::Read(vec![(data, 4096)])).unwrap().status, STATUS_OK);
    assert!(disk.front_end.ram.read(data, 4096) == bytes);
}

fn malformed(device: &Device<NotingRoute>) -> u64 {
    device.handle().counters().malformed_chains
}

#[test]
fn requests_that_are_wrong_fail_alone() {
    let (_place, device, mut disk) = rig(MIB, CacheMode::Auto);
    let data = disk.front_end.ram.take(MIB, 4096);
    let end = MIB / 512;
    for (what, sector, transfer, status) in [
        ("beyond the end", end, Transfer::Read(vec![(data, 512)]), STATUS_IO_ERROR),
        ("across the end", end - 1, Transfer::Write(vec![(data, 1024)]), STATUS_IO_ERROR),
        ("wrapping around", u64::MAX, Transfer::Read(vec![(data, 512)]), STATUS_IO_ERROR),
        ("wrapping around in bytes", u64::MAX / 512, Transfer::Write(vec![(data, 512)]), STATUS_IO_ERROR),
        ("no whole sector", 0, Transfer::Write(vec![(data, 511)]), STATUS_IO_ERROR),
        ("an unknown type", 0, Transfer::Other(77), STATUS_UNSUPPORTED),
        ("a legacy SCSI command", 0, Transfer::Other(2), STATUS_UNSUPPORTED),
        ("nothing to read", 0, Transfer::Read(vec![]), STATUS_OK),
        ("a serial number to nowhere", 0, Transfer::Identity(vec![]), STATUS_IO_ERROR),
        ("a discard of too much", 0, Transfer::Discard(vec![(0, u32::MAX, 0)]), STATUS_IO_ERROR),
        ("a discard beyond the end", 0, Transfer::Discard(vec![(0, 8, 0), (end, 1, 0)]), STATUS_IO_ERROR),
        ("too many ranges", 0, Transfer::Discard(vec![(0, 1, 0); 33]), STATUS_IO_ERROR),
        ("no range", 0, Transfer::WriteZeroes(vec![]), STATUS_IO_ERROR),
    ] {
        assert_eq!(disk.request(sector, &transfer).unwrap(), status, "{what}");
    }
    still_works(&mut disk, 0);
    assert_eq!(malformed(&device), 0);
}

#[test]
fn requests_of_more_bytes_than_can_be_fail() {
    let place = Place::new(256 * MIB);
    let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    // The same memory again and again: 65 MiB in one request.
    let data = disk.front_end.ram.take(MIB, 4096);
    assert_eq!(disk.request(0, &Transfer::Read(vec![(data, MIB as u32); 65])).unwrap(), STATUS_IO_ERROR);
    assert_eq!(disk.request(0, &Transfer::Read(vec![(data, MIB as u32); 64])).unwrap(), STATUS_OK);
}

/// Waits until queue 0 is given up, seen by its error descriptor's effect: the count of malformed chains.
fn until_broken(device: &Device<NotingRoute>, before: u64) {
    let deadline = std::time::Instant::now() + ANSWER_TIMEOUT;
    while malformed(device) == before {
        assert!(std::time::Instant::now() < deadline, "the ring is not given up");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_ring_that_lies_is_stopped_and_the_others_go_on() {
    let place = Place::new(MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let options = FrontEndOptions { queues: 2, queue_size: 16, ..FrontEndOptions::default() };
    for lie in 0..3 {
        let mut disk = disk(&place, options.clone());
        still_works(&mut disk, 0);
        still_works(&mut disk, 1);
        let before = malformed(&device);
        let queue = &mut disk.front_end.queues[0];
        match lie {
            // More entries than the ring has.
            0 => queue.set_available_index(queue.available_index().wrapping_add(1000)),
            // A head beyond the table.
            1 => {
                queue.make_available(16);
                queue.publish();
            }
            // The same head twice at once; the device must not have answered the first in between.
            _ => {
                device.handle().with_route(|route, _| route.hold_writes = true).unwrap();
                let data = disk.front_end.ram.take(4096, 4096);
                disk.submit(0, 0, &Transfer::Write(vec![(data, 512)])).unwrap();
                disk.kick(0).unwrap();
                let handle = device.handle();
                while handle.with_route(|route, _| route.held.is_empty()).unwrap() {
                    std::thread::yield_now();
                }
                for head in 0..16 {
                    disk.front_end.queues[0].make_available(head);
                }
                disk.front_end.queues[0].publish();
            }
        }
        disk.front_end.queues[0].kick.write(1).unwrap();
        until_broken(&device, before);
        device
            .handle()
            .with_route(|route, plan| {
                route.hold_writes = false;
                for (id, ..) in route.held.drain(..) {
                    plan.release(id, block_route::Status::Ok);
                }
            })
            .unwrap();
        still_works(&mut disk, 1);
        // Stopping the broken ring is answered like any other.
        disk.front_end.stop().unwrap();
    }
    // A new start makes the ring whole again.
    let mut disk = disk(&place, options);
    still_works(&mut disk, 0);
    drop(disk);
    device.stop().unwrap();
}

#[test]
fn random_rings_do_no_harm() {
    let place = Place::new(MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut random = Random::new(1);
    let mut next = move || random.bits();
    for round in 0..30 {
        let options = FrontEndOptions { queue_size: 64, ..FrontEndOptions::default() };
        let mut disk = disk(&place, options);
        let data = disk.front_end.ram.take(64 * 4096, 4096);
        let queue = &mut disk.front_end.queues[0];
        for _ in 0..40 {
            for index in 0..64 {
                // Mostly plausible, so that it gets past the first check.
                let address = match next() % 8 {
                    0 => next(),
                    1 => queue.layout().used + next() % 600,
                    2 => queue.layout().descriptors + next() % 1024,
                    _ => data + next() % (60 * 4096),
                };
                let len =
                    if next() % 8 == 0 { next() as u32 } else { (next() % 3) as u32 * 512 + (next() % 2) as u32 * 16 };
                let flags = (next() % 8) as u16 & if next() % 4 == 0 { 7 } else { 3 };
                queue.put_descriptor(index, Descriptor { address, len, flags, next: (next() % 66) as u16 });
            }
            for _ in 0..next() % 16 {
                queue.make_available((next() % if next() % 50 == 0 { 70 } else { 64 }) as u16);
            }
            let header = next();
            disk.front_end.ram.put(data, (header % 16) as u32);
            queue.publish();
            queue.kick.write(1).unwrap();
            while queue.take_used_keep().is_some() {}
        }
        if round % 2 == 0 {
            disk.front_end.stop().unwrap();
        }
    }
    let mut disk = disk(&place, FrontEndOptions::default());
    still_works(&mut disk, 0);
    drop(disk);
    device.stop().unwrap();
}

#[test]
fn nonsense_in_the_inflight_region_does_no_harm() {
    use std::os::unix::fs::FileExt;
    let (_place, device, mut disk) = rig(MIB, CacheMode::Auto);
    still_works(&mut disk, 0);
    for round in 0..20u8 {
        let bases = disk.front_end.stop().unwrap();
        let inflight = disk.front_end.inflight().unwrap();
        let size = inflight.description.mmap_size as usize;
        let nonsense: Vec<u8> = (0..size).map(|at| (at as u8).wrapping_mul(31).wrapping_add(round) % 3).collect();
        inflight.file.write_all_at(&nonsense, 0).unwrap();
        disk.front_end.start_with_bases(&bases).unwrap();
        // What it did again of that is anybody's guess; the rest must go on.
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(disk);
    let place = Place::new(MIB);
    let (_other, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut other = common::disk(&place, FrontEndOptions::default());
    still_works(&mut other, 0);
    device.stop().unwrap();
}

/// Counts how often a page is looked at before it is written to.
#[derive(Default)]
struct Looks(AtomicU64);

impl CopyOnWrite for Looks {
    fn copy_out(&self, _: PageId) -> bool {
        self.0.fetch_add(1, Ordering::SeqCst);
        true
    }
}

/// A driver can name the same memory again and again. What is done for a request is bounded by the largest one that may be, however much it
/// names, and whoever asks the device something waits for a bounded part of what there is.
#[test]
fn what_is_done_for_a_request_is_bounded() {
    const BYTES_MAX: u64 = 64 * MIB;
    let place = Place::new(256 * MIB);
    let memory = VmMemory::new();
    let looks = Arc::new(Looks::default());
    memory.set_copy_on_write(Arc::clone(&looks) as Arc<dyn CopyOnWrite>);
    let config = DeviceConfig::new("bounded", place.socket(), open(&place.image(), CacheMode::Auto));
    let device = Device::start(config, Box::new(PlainRoute), Arc::clone(&memory), Arc::new(())).unwrap();
    let mut disk = disk(&place, FrontEndOptions::default());
    disk.set_indirect(true);
    // Its memory is known from here on.
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    let part = 8 * MIB;
    let data = disk.front_end.ram.take(part, 4096);
    (data / 4096..(data + part) / 4096).for_each(|page| memory.set_retained(PageId(page as u32), true));
    for parts in [1, 8, 9, 100, 1024] {
        let before = looks.0.load(Ordering::SeqCst);
        let status = disk.request(0, &Transfer::Read(vec![(data, part as u32); parts])).unwrap();
        let is_legal = parts as u64 * part <= BYTES_MAX;
        assert_eq!(status, if is_legal { STATUS_OK } else { STATUS_IO_ERROR }, "{parts} parts");
        let pages = looks.0.load(Ordering::SeqCst) - before;
        assert!(!is_legal || pages >= parts as u64 * part / 4096, "{parts} parts: only {pages} pages were looked at");
        // Before the transfer, and when it is answered.
        assert!(pages <= 2 * BYTES_MAX / 4096 + 16, "{parts} parts: {pages} pages were looked at");
    }
    // As much as can be at once: nobody waits for all of it.
    let handle = device.handle();
    handle.hold(Some(Instant::now() + Duration::from_secs(600))).unwrap();
    for _ in 0..16 {
        disk.submit(0, 0, &Transfer::Read(vec![(data, part as u32); 8])).unwrap();
    }
    disk.kick(0).unwrap();
    let before = handle.counters().passes;
    handle.hold(None).unwrap();
    assert!(disk.wait_all(0).unwrap().iter().all(|answer| answer.status == STATUS_OK));
    let passes = handle.counters().passes - before;
    assert!(passes >= 4, "a GiB of them in {passes} passes");
    device.stop().unwrap();
}

/// Storage may have to write the zeros: they count as what is written, and the guest is told of no zeroing that is larger than a write.
#[test]
fn zeroing_is_bounded_as_writing_is() {
    for (transfer, counts) in [
        (Transfer::WriteZeroes(vec![(0, 8192, 0)]), true),
        (Transfer::WriteZeroes(vec![(0, 4096, 1), (8192, 4096, 1)]), true),
        (Transfer::Discard(vec![(0, 8192, 0)]), false),
    ] {
        let place = Place::new(8 * MIB);
        // Nothing comes back during the test.
        let bytes = throttle::Bound { per_second: 1024, burst: 65536 };
        let bound = throttle::Limits { bytes: Some(bytes), ..throttle::Limits::default() };
        let throttle = throttle::Throttle::new(bound, Instant::now());
        let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |config, _| {
            config.throttle = Some(throttle.clone());
        });
        let mut disk = disk(&place, FrontEndOptions::default());
        let number = |bytes: Vec<u8>| u32::from_le_bytes(bytes.try_into().unwrap());
        assert_eq!(number(disk.front_end.config(48, 4).unwrap()), (64 * MIB / 512) as u32);
        assert_eq!(number(disk.front_end.config(52, 4).unwrap()), 1);
        assert_eq!(disk.request(0, &transfer).unwrap(), STATUS_OK, "{transfer:?}");
        let debt = throttle.wait(Instant::now()).unwrap_or_default();
        assert_eq!(debt > Duration::from_secs(2000), counts, "{transfer:?}: {debt:?}");
        drop(disk);
        device.stop().unwrap();
    }
}
