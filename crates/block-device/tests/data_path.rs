//! What a well-behaved guest sees of a disk.

mod common;

use block_device::{CacheMode, Image, ImageOptions};
use block_route::RequestKind;
use common::{MIB, Place, connect, disk, open, pattern, rig, start};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use test_frontend::{
    FrontEnd, FrontEndOptions, GuestRam, STATUS_IO_ERROR, STATUS_OK, STATUS_UNSUPPORTED, TestDisk, Transfer,
};

const EVENT_INDEX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;
const FLUSH: u64 = 1 << 9;

#[test]
fn what_is_written_is_read_and_is_on_the_image() {
    for cache in [CacheMode::Auto, CacheMode::Buffered] {
        let (place, device, mut disk) = rig(8 * MIB, cache);
        for (offset, len) in [(0, 512), (4096, 4096), (3 * 512, 7 * 512), (MIB, MIB as usize), (8 * MIB - 512, 512)] {
            let bytes = pattern(offset, len, 1);
            assert_eq!(disk.write(offset, &bytes).unwrap(), STATUS_OK);
            assert_eq!(disk.read(offset, len).unwrap(), (STATUS_OK, bytes.clone()), "{cache:?} {offset}+{len}");
            assert_eq!(disk.flush().unwrap(), STATUS_OK);
            let mut on_image = vec![0; len];
            std::fs::File::open(place.image()).unwrap().read_exact_at(&mut on_image, offset).unwrap();
            assert!(on_image == bytes);
        }
        let counters = device.handle().counters();
        assert_eq!((counters.write_requests, counters.read_requests, counters.flush_requests), (5, 5, 5));
        assert_eq!(counters.write_bytes, counters.storage_write_bytes);
        assert_eq!(counters.failed_requests + counters.malformed_chains, 0);
        device.stop().unwrap();
        assert!(!place.socket().exists());
    }
}

#[test]
fn payloads_may_lie_anywhere_and_be_cut_anyhow() {
    for cache in [CacheMode::Auto, CacheMode::Buffered] {
        let (_place, device, mut disk) = rig(8 * MIB, cache);
        let base = disk.front_end.ram.take(4 * MIB, 4096);
        // Odd addresses and lengths: nothing direct I/O could take as it is.
        let cuts = [(base + 1, 511), (base + 5000, 1), (base + 9999, 4096 * 3), (base + MIB + 7, 1536 - 512)];
        let total: u32 = cuts.iter().map(|(_, len)| len).sum();
        assert_eq!(total % 512, 0);
        let bytes = pattern(0, total as usize, 2);
        let mut at = 0;
        for (address, len) in cuts {
            disk.front_end.ram.write(address, &bytes[at..at + len as usize]);
            at += len as usize;
        }
        assert_eq!(disk.request(100, &Transfer::Write(cuts.to_vec())).unwrap(), STATUS_OK);
        assert_eq!(disk.read(100 * 512, total as usize).unwrap(), (STATUS_OK, bytes.clone()));
        for (address, len) in cuts {
            disk.front_end.ram.write(address, &vec![0; len as usize]);
        }
        assert_eq!(disk.request(100, &Transfer::Read(cuts.to_vec())).unwrap(), STATUS_OK);
        let read: Vec<u8> =
            cuts.iter().flat_map(|(address, len)| disk.front_end.ram.read(*address, *len as usize)).collect();
        assert!(read == bytes, "{cache:?}");
        if device.handle().image().direct().is_some() {
            assert!(device.handle().counters().bounced_transfers > 0);
        }
    }
}

#[test]
fn large_unaligned_transfers_go_piece_by_piece() {
    let (_place, _device, mut disk) = rig(16 * MIB, CacheMode::Auto);
    let len = 3 * MIB as u32 + 512;
    let address = disk.front_end.ram.take(8 * MIB, 4096) + 3;
    let bytes = pattern(512, len as usize, 3);
    disk.front_end.ram.write(address, &bytes);
    assert_eq!(disk.request(1, &Transfer::Write(vec![(address, len)])).unwrap(), STATUS_OK);
    disk.front_end.ram.write(address, &vec![0; len as usize]);
    assert_eq!(disk.request(1, &Transfer::Read(vec![(address, len)])).unwrap(), STATUS_OK);
    assert!(disk.front_end.ram.read(address, len as usize) == bytes);
}

#[test]
fn every_mix_of_ring_features_works() {
    for refused in [0, EVENT_INDEX, INDIRECT, EVENT_INDEX | INDIRECT] {
        let place = Place::new(8 * MIB);
        let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
        let mut disk = disk(&place, FrontEndOptions { features_refused: refused, ..FrontEndOptions::default() });
        disk.set_indirect(refused & INDIRECT == 0);
        // More than the ring holds, many in one kick, so that all indices wrap.
        for round in 0..300u64 {
            let data = disk.front_end.ram.take(8 * 4096, 4096);
            for slot in 0..8 {
                let address = data + slot * 4096;
                let place = round * 8 + slot;
                disk.front_end.ram.write(address, &pattern(place * 512, 512, 4));
                disk.submit(0, place, &Transfer::Write(vec![(address, 512)])).unwrap();
            }
            disk.kick(0).unwrap();
            let answers = disk.wait_all(0).unwrap();
            assert_eq!(answers.len(), 8);
            assert!(answers.iter().all(|answer| answer.status == STATUS_OK && answer.written == 1), "{refused:#x}");
        }
        let (status, bytes) = disk.read(0, 300 * 8 * 512).unwrap();
        assert_eq!(status, STATUS_OK);
        assert!(bytes == pattern(0, 300 * 8 * 512, 4));
    }
}

#[test]
fn an_indirect_table_may_be_longer_than_the_ring() {
    let place = Place::new(8 * MIB);
    let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions { queue_size: 16, ..FrontEndOptions::default() });
    disk.set_indirect(true);
    // Pages in reverse, so that no two are neighbours.
    let data = disk.front_end.ram.take(1000 * 4096, 4096);
    let segments: Vec<(u64, u32)> = (0..1000).rev().map(|page| (data + page * 4096, 4096)).collect();
    for (position, (address, len)) in segments.iter().enumerate() {
        disk.front_end.ram.write(*address, &pattern(position as u64 * 4096, *len as usize, 5));
    }
    assert_eq!(disk.request(0, &Transfer::Write(segments)).unwrap(), STATUS_OK);
    let (status, bytes) = disk.read(0, 1000 * 4096).unwrap();
    assert_eq!(status, STATUS_OK);
    assert!(bytes == pattern(0, 1000 * 4096, 5));
}

#[test]
fn queues_work_side_by_side() {
    let place = Place::new(64 * MIB);
    let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let options = FrontEndOptions { queues: 4, queue_size: 64, ..FrontEndOptions::default() };
    let mut disk = disk(&place, options);
    let data = disk.front_end.ram.take(4 * 16 * 4096, 4096);
    for queue in 0..4 {
        for slot in 0..16u64 {
            let address = data + (queue as u64 * 16 + slot) * 4096;
            let sector = (queue as u64 * 16 + slot) * 8;
            disk.front_end.ram.write(address, &pattern(sector * 512, 4096, 6));
            disk.submit(queue, sector, &Transfer::Write(vec![(address, 4096)])).unwrap();
        }
    }
    for queue in 0..4 {
        disk.kick(queue).unwrap();
    }
    for queue in 0..4 {
        assert!(disk.wait_all(queue).unwrap().iter().all(|answer| answer.status == STATUS_OK));
    }
    let (status, bytes) = disk.read(0, 4 * 16 * 4096).unwrap();
    assert_eq!(status, STATUS_OK);
    assert!(bytes == pattern(0, 4 * 16 * 4096, 6));
}

#[test]
fn memory_in_regions_and_slots() {
    let place = Place::new(8 * MIB);
    let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    // Two regions that meet: a payload may lie across the seam.
    let ram = GuestRam::with_regions(&[(0, 16 * MIB), (16 * MIB, 16 * MIB), (1 << 32, 8 * MIB)]).unwrap();
    let options = FrontEndOptions { memory_slots: true, ..FrontEndOptions::default() };
    let mut front_end = FrontEnd::connect(&place.socket(), ram, options).unwrap();
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    let bytes = pattern(0, 16384, 7);
    for address in [16 * MIB - 5000, (1 << 32) + 4096] {
        disk.front_end.ram.write(address, &bytes);
        assert_eq!(disk.request(0, &Transfer::Write(vec![(address, 16384)])).unwrap(), STATUS_OK);
        disk.front_end.ram.write(address, &[0; 16384]);
        assert_eq!(disk.request(0, &Transfer::Read(vec![(address, 16384)])).unwrap(), STATUS_OK);
        assert!(disk.front_end.ram.read(address, 16384) == bytes);
    }
    // A region that goes while the device runs, and with it what pointed there.
    let region = disk.front_end.ram.regions().unwrap()[2];
    use vhost::vhost_user::VhostUserFrontend;
    disk.front_end.messages.remove_mem_region(&region).unwrap();
    assert_eq!(disk.write(0, &bytes).unwrap(), STATUS_OK);
}

/// The front door tells it again to a worker that follows, also of a ring that has been stopped since, and whose memory was unplugged then.
#[test]
fn addresses_of_a_stopped_ring_are_taken_wherever_they_are_and_looked_at_when_it_starts() {
    use vhost::{VhostBackend, VringConfigData};
    let place = Place::new(MIB);
    let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions { need_reply: true, ..FrontEndOptions::default() });
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    let bases = disk.front_end.stop().unwrap();
    let (nowhere, size) = (0x7fff_0000_0000, disk.front_end.queues[0].options().size);
    let config = VringConfigData {
        queue_max_size: size,
        queue_size: size,
        flags: 0,
        desc_table_addr: nowhere,
        used_ring_addr: nowhere,
        avail_ring_addr: nowhere,
        log_addr: None,
    };
    disk.front_end.messages.set_vring_addr(0, &config).expect("it is stopped");
    // With those of its own it goes on; without any of its memory it does not start.
    disk.front_end.start_with_bases(&bases).unwrap();
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    disk.front_end.stop().unwrap();
    disk.front_end.messages.set_vring_addr(0, &config).expect("it is stopped");
    let kick = disk.front_end.queues[0].kick.try_clone().unwrap();
    disk.front_end.messages.set_vring_kick(0, &kick).expect_err("a ring that is nowhere");
}

#[test]
fn the_configuration_space_says_what_there_is() {
    let place = Place::new(8 * MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |config, _| {
        config.identity.serial = "0123456789abcdefghij".to_owned();
    });
    let mut disk = disk(&place, FrontEndOptions::default());
    // QEMU 7.2 asks for 57 bytes, newer ones for more.
    for size in [8, 57, 60, 72, 96] {
        assert_eq!(disk.front_end.config(0, size).unwrap().len(), size as usize);
    }
    let config = disk.front_end.config(0, 60).unwrap();
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!(u64::from_le_bytes(config[0..8].try_into().unwrap()), 8 * MIB / 512);
    assert_eq!(word(12), 126, "seg_max");
    assert_eq!(word(20), 512, "blk_size");
    assert!(word(36) > 0 && word(40) == 32, "discard limits");
    assert_eq!(disk.identity().unwrap(), "0123456789abcdefghij");
    drop(device);
}

#[test]
fn a_short_place_for_the_serial_number_gets_what_fits() {
    let place = Place::new(MIB);
    let (_device, _) = start(&place, open(&place.image(), CacheMode::Auto), |config, _| {
        config.identity.serial = "serial".to_owned();
    });
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_eq!(disk.identity().unwrap(), "serial");
    let address = disk.front_end.ram.take(64, 64);
    disk.front_end.ram.write(address, &[0xaa; 64]);
    let cut = Transfer::Identity(vec![(address, 2), (address + 10, 3)]);
    let answer = disk.request_on(0, 0, &cut).unwrap();
    assert_eq!((answer.status, answer.written), (STATUS_OK, 6));
    assert_eq!(disk.front_end.ram.read(address, 3), b"se\xaa");
    assert_eq!(disk.front_end.ram.read(address + 10, 4), b"ria\xaa");
}

#[test]
fn a_read_only_disk_is_read() {
    let place = Place::new(MIB);
    std::fs::write(place.image(), pattern(0, MIB as usize, 8)).unwrap();
    let options = ImageOptions { read_only: true, ..ImageOptions::default() };
    let image = Arc::new(Image::open(&place.image(), options).unwrap());
    let (_device, _) = start(&place, image, |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    assert_ne!(disk.front_end.features & (1 << 5), 0, "VIRTIO_BLK_F_RO");
    assert_eq!(disk.read(4096, 4096).unwrap(), (STATUS_OK, pattern(4096, 4096, 8)));
    assert_eq!(disk.write(0, &[0; 512]).unwrap(), STATUS_IO_ERROR);
    assert_eq!(disk.request(0, &Transfer::Discard(vec![(0, 8, 0)])).unwrap(), STATUS_IO_ERROR);
    assert_eq!(disk.request(0, &Transfer::WriteZeroes(vec![(0, 8, 0)])).unwrap(), STATUS_IO_ERROR);
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    assert_eq!(std::fs::read(place.image()).unwrap(), pattern(0, MIB as usize, 8));
}

#[test]
fn discard_gives_space_back_and_zeroes_read_as_zeros() {
    for cache in [CacheMode::Auto, CacheMode::Buffered] {
        let (place, device, mut disk) = rig(8 * MIB, cache);
        assert_eq!(disk.write(0, &pattern(0, 4 * MIB as usize, 9)).unwrap(), STATUS_OK);
        assert_eq!(disk.flush().unwrap(), STATUS_OK);
        let before = std::fs::metadata(place.image()).unwrap().blocks();
        // Several ranges in one request: one answer when all are done.
        let ranges = vec![(0, 2048, 0), (4096, 1024, 0), (8000, 0, 0)];
        assert_eq!(disk.request(0, &Transfer::Discard(ranges)).unwrap(), STATUS_OK);
        assert_eq!(disk.flush().unwrap(), STATUS_OK);
        let after = std::fs::metadata(place.image()).unwrap().blocks();
        assert!(after + 3072 <= before + 64, "{cache:?}: {before} blocks before, {after} after");
        assert_eq!(disk.read(0, MIB as usize).unwrap(), (STATUS_OK, vec![0; MIB as usize]));

        // Ranges that are not whole file system blocks.
        for (sector, unmap) in [(2049, 0), (2060, 1)] {
            assert_eq!(disk.request(0, &Transfer::WriteZeroes(vec![(sector, 3, unmap)])).unwrap(), STATUS_OK);
            let mut expected = pattern(2048 * 512, 64 * 512, 9);
            let zeroed = |bytes: &mut Vec<u8>, first: usize| {
                bytes[(first - 2048) * 512..(first - 2048 + 3) * 512].fill(0);
            };
            zeroed(&mut expected, 2049);
            if sector == 2060 {
                zeroed(&mut expected, 2060);
            }
            assert_eq!(disk.read(2048 * 512, 64 * 512).unwrap(), (STATUS_OK, expected));
        }
        assert_eq!(disk.request(0, &Transfer::Discard(vec![(0, 8, 1)])).unwrap(), STATUS_UNSUPPORTED);
        assert_eq!(disk.request(0, &Transfer::WriteZeroes(vec![(0, 8, 2)])).unwrap(), STATUS_UNSUPPORTED);
        assert_eq!(disk.request(0, &Transfer::Discard(vec![(16384, 1, 0)])).unwrap(), STATUS_IO_ERROR);
        assert_eq!(std::fs::metadata(place.image()).unwrap().len(), 8 * MIB, "the image keeps its size");
        let counters = device.handle().counters();
        assert_eq!(counters.discard_requests, 1, "refused ones are not counted");
        device.stop().unwrap();
    }
}

#[test]
fn zeros_are_written_where_the_file_system_cannot_zero() {
    // tmpfs has no FALLOC_FL_ZERO_RANGE.
    let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
        println!("skipped: /dev/shm cannot be written");
        return;
    };
    file.as_file().set_len(8 * MIB).unwrap();
    file.as_file().write_all_at(&pattern(0, 8 * MIB as usize, 10), 0).unwrap();
    let place = Place::new(0);
    let (device, _) = start(&place, open(file.path(), CacheMode::Auto), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    // More than is written at once.
    assert_eq!(disk.request(0, &Transfer::WriteZeroes(vec![(3, 12_000, 0)])).unwrap(), STATUS_OK);
    let mut expected = pattern(0, 8 * MIB as usize, 10);
    expected[3 * 512..12_003 * 512].fill(0);
    let mut found = vec![1; 8 * MIB as usize];
    file.as_file().read_exact_at(&mut found, 0).unwrap();
    assert!(found == expected);
    device.stop().unwrap();
}

#[test]
fn without_a_negotiated_flush_writes_are_durable_when_answered() {
    let place = Place::new(MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let options = FrontEndOptions { features_refused: FLUSH, ..FrontEndOptions::default() };
    let mut disk = disk(&place, options);
    assert_eq!(disk.write(0, &[1; 512]).unwrap(), STATUS_OK);
    assert_eq!(disk.request(0, &Transfer::WriteZeroes(vec![(8, 8, 0), (32, 8, 0)])).unwrap(), STATUS_OK);
    assert_eq!(disk.read(0, 512).unwrap(), (STATUS_OK, vec![1; 512]));
    assert_eq!(device.handle().counters().storage_flushes, 2);
    let route = device.stop().unwrap();
    let kinds: Vec<_> = route.routed.iter().map(|(kind, ..)| *kind).collect();
    let zeroes = RequestKind::WriteZeroes { unmap: false };
    assert_eq!(kinds, [RequestKind::Write, RequestKind::Flush, zeroes, zeroes, RequestKind::Flush, RequestKind::Read]);
}

#[test]
fn a_resize_reaches_the_guest() {
    let (place, device, mut disk) = rig(MIB, CacheMode::Auto);
    assert_eq!(disk.front_end.size_bytes().unwrap(), MIB);
    assert_eq!(disk.write(MIB, &[1; 512]).unwrap(), STATUS_IO_ERROR);
    std::fs::OpenOptions::new().write(true).open(place.image()).unwrap().set_len(2 * MIB).unwrap();
    assert_eq!(device.handle().resize().unwrap(), 2 * MIB);
    assert_eq!(disk.front_end.wait_for_message().unwrap(), 2, "CONFIG_CHANGE");
    assert_eq!(disk.front_end.size_bytes().unwrap(), 2 * MIB);
    assert_eq!(disk.write(MIB, &[1; 512]).unwrap(), STATUS_OK);
    drop(disk);
    device.stop().unwrap();
}

/// An image that is made larger while its VM waits for a VMM, or between two of them: nobody has to be told.
#[test]
fn whoever_connects_gets_the_size_that_the_image_has_then() {
    let place = Place::new(MIB);
    let (device, _) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    for size in [2 * MIB, 3 * MIB] {
        std::fs::OpenOptions::new().write(true).open(place.image()).unwrap().set_len(size).unwrap();
        let mut disk = disk(&place, FrontEndOptions::default());
        assert_eq!(disk.front_end.size_bytes().unwrap(), size);
        assert_eq!(disk.write(size - 512, &[1; 512]).unwrap(), STATUS_OK);
        assert_eq!(disk.write(size, &[1; 512]).unwrap(), STATUS_IO_ERROR);
    }
    device.stop().unwrap();
}

#[test]
fn flushes_share_what_storage_does() {
    let (_place, device, mut disk) = rig(MIB, CacheMode::Auto);
    for _ in 0..50 {
        disk.submit(0, 0, &Transfer::Flush).unwrap();
    }
    disk.kick(0).unwrap();
    assert!(disk.wait_all(0).unwrap().iter().all(|answer| answer.status == STATUS_OK));
    let counters = device.handle().counters();
    assert_eq!(counters.flush_requests, 50);
    assert!(counters.storage_flushes >= 1 && counters.storage_flushes < 50, "{}", counters.storage_flushes);
}

#[test]
fn a_front_end_without_the_extras_is_served() {
    let place = Place::new(MIB);
    let (_device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let mut front_end = connect(&place, FrontEndOptions { inflight: false, ..FrontEndOptions::default() });
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    assert_eq!(disk.write(0, &pattern(0, 512, 11)).unwrap(), STATUS_OK);
    let bases = disk.front_end.stop().unwrap();
    assert_eq!(bases, [1]);
    disk.front_end.start_with_bases(&bases).unwrap();
    assert_eq!(disk.read(0, 512).unwrap(), (STATUS_OK, pattern(0, 512, 11)));
    // The position tells a pause from a first start.
    assert_eq!(journal.starts(), [block_route::Start::Fresh, block_route::Start::Resumed]);
}
