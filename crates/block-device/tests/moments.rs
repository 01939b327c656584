//! Images of a moment of a disk that is written on: whatever a front-end, or a route of its own, changes after the moment is not in them.

mod common;

use block_device::CacheMode;
use common::{MIB, Place, disk, open, pattern, start};
use image_moments::{BLOCK_BYTES, BlockSet, Changes, Moment, Record, Target};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_frontend::{FrontEndOptions, STATUS_OK, TestDisk, Transfer};
use test_storage::TestStorage;
use write_log::LoggedFile;

const SIZE: u64 = 4 * MIB;

/// One of each kind of request that changes a disk, each in a block of its own, and one over two blocks. Gives those blocks.
fn change(disk: &mut TestDisk) -> BlockSet {
    let at = |block: u64| block * BLOCK_BYTES;
    let zeroes = |block: u64, flags| Transfer::WriteZeroes(vec![(at(block) / 512, 8, flags)]);
    let requests = [
        Transfer::Discard(vec![(at(30) / 512, 128, 0)]),
        zeroes(32, 0),
        // The guest lets it be unmapped.
        zeroes(34, 1),
    ];
    let mut changed = BlockSet::new(SIZE / BLOCK_BYTES);
    // Whole blocks of the storage, a sector of one, a run over an end of ours, the last ones of the disk.
    for (offset, len) in [(at(3), 65536), (at(5) + 512, 512), (at(8) - 4096, 12288), (SIZE - 1024, 1024)] {
        assert_eq!(disk.write(offset, &pattern(offset, len, 2)).unwrap(), STATUS_OK);
        (offset / BLOCK_BYTES..=(offset + len as u64 - 1) / BLOCK_BYTES).for_each(|block| _ = changed.insert(block));
    }
    for request in &requests {
        assert_eq!(disk.request(0, request).unwrap(), STATUS_OK, "{request:?}");
    }
    [30, 32, 34].into_iter().for_each(|block| _ = changed.insert(block));
    assert_eq!(disk.flush().unwrap(), STATUS_OK);
    changed
}

#[test]
fn what_is_changed_after_a_moment_is_not_in_its_image() {
    for (cache, is_own) in
        [(CacheMode::Auto, false), (CacheMode::Buffered, false), (CacheMode::Auto, true), (CacheMode::Buffered, true)]
    {
        let place = Place::new(SIZE);
        let before = pattern(0, SIZE as usize, 1);
        std::fs::write(place.image(), &before).unwrap();
        let image = open(&place.image(), cache);
        let changes = Arc::clone(image.tell(Arc::new(Changes::new(Record::new().unwrap()))));
        let (device, _) = start(&place, Arc::clone(&image), |_, route| route.writes_itself = is_own);
        let mut disk = disk(&place, FrontEndOptions::default());
        let out = place.directory.path().join("out");
        let target = File::create_new(&out).unwrap();
        target.set_len(SIZE).unwrap();
        let epoch = changes.record().next_epoch().unwrap();
        let moment = Arc::new(Moment::new(image.reopen_buffered().unwrap(), SIZE, None, Target::Whole(target)));
        // Everything is changed before the copy begins: what it has of that, it was given by those who changed it.
        let (changed, copied) = changes.keep_while(&moment, || (change(&mut disk), moment.copy())).unwrap();
        copied.unwrap();
        drop(disk);
        device.stop().unwrap();
        let what = format!("{cache:?}, a route's own writes: {is_own}");
        let (after, copy) = (std::fs::read(place.image()).unwrap(), std::fs::read(&out).unwrap());
        let differs = |a: &[u8], b: &[u8]| {
            let pieces = a.chunks(BLOCK_BYTES as usize).zip(b.chunks(BLOCK_BYTES as usize)).enumerate();
            pieces.filter(|(_, (a, b))| a != b).map(|(block, _)| block as u64).collect::<Vec<_>>()
        };
        assert!(differs(&copy, &before).is_empty(), "{what}: blocks {:?} are of later", differs(&copy, &before));
        // A discard is a hint, which is not taken while a copy is made.
        let truly = differs(&after, &before);
        assert_eq!(truly, [3, 5, 7, 8, 32, 34, 63], "{what}: the test changes what it says");
        let noted = changes.record().since(epoch, SIZE).unwrap();
        for block in 0..SIZE / BLOCK_BYTES {
            assert!(
                noted.contains(block) || !truly.contains(&block),
                "{what}: block {block} was changed, and not noted"
            );
            assert!(
                changed.contains(block) || !noted.contains(block),
                "{what}: block {block} was noted, and not changed"
            );
        }
    }
}

/// It may be in the first moment's image, or not: the second one's has to look.
#[test]
fn a_write_that_a_moment_meets_under_way_is_noted_after_it() {
    let backing = Place::new(SIZE);
    let storage = match TestStorage::new(&backing.image()) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    let place = Place::new(0);
    let image = open(&storage.image(), CacheMode::Direct);
    let changes = Arc::clone(image.tell(Arc::new(Changes::new(Record::new().unwrap()))));
    let file = LoggedFile::unlogged(image.file()).unwrap();
    file.tell(&changes);
    let (device, _) = start(&place, Arc::clone(&image), |_, _| {});
    let mut disk = disk(&place, FrontEndOptions::default());
    let meets = |block: u64| {
        let until = Instant::now() + Duration::from_secs(30);
        while storage.held_writes() == 0 {
            assert!(Instant::now() < until, "the write of block {block} has not come");
            std::thread::yield_now();
        }
        let epoch = changes.record().next_epoch().unwrap();
        storage.release_writes();
        (block, epoch)
    };
    storage.hold_writes(1);
    let engine = std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(disk.write(3 * BLOCK_BYTES, &pattern(0, 4096, 2)).unwrap(), STATUS_OK));
        meets(3)
    });
    storage.hold_writes(1);
    let others = std::thread::scope(|scope| {
        // As direct I/O wants it.
        let content = vec![7; 3 * 4096];
        let start = content.as_ptr().align_offset(4096);
        scope.spawn(move || file.write_all_at(&content[start..][..4096], 5 * BLOCK_BYTES).unwrap());
        meets(5)
    });
    for (block, epoch) in [engine, others] {
        assert!(changes.record().since(epoch, SIZE).unwrap().contains(block), "block {block}");
    }
    drop(disk);
    device.stop().unwrap();
}
