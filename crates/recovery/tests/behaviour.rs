//! What recovery does with whole disks: partitions, several file systems, locks, refusals, and live logs in memory.

mod common;

use common::{Copy, Image, LogShape, Shape, e2fsck, open_log, output, scratch, write_log};
use extfs::ReadAt;
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Checksum, Content, LogRead};
use recovery::{
    Access, Disk, DiskHome, HomeBounds, JournalDisk, LogBounds, Options, Status, materialise, recover_disk,
};
use std::collections::HashSet;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

fn shape(block_size: u32) -> Shape {
    Shape { block_size, external: false, ext3: false, wide: false }
}

fn log_shape() -> LogShape {
    LogShape { wide: false, ..LogShape::simple(Checksum::V3) }
}

fn transactions(image: &Image, count: u8) -> Vec<Transaction> {
    let size = image.shape.block_size as usize;
    (0..count)
        .map(|number| Transaction {
            blocks: (0..10).map(|n| (image.homes[n + 3 * usize::from(number)], vec![number + 1; size])).collect(),
            revokes: Vec::new(),
            seconds: 1000 + u64::from(number),
        })
        .collect()
}

/// A copy of `image` with a live log of three transactions.
fn crashed(image: &Image, directory: &Path, name: &str) -> Copy {
    let copy = image.copy_to(directory, name);
    let (_, format) = open_log(image, &copy, &log_shape());
    write_log(image, &copy, LogBuilder::new(format, 5, 7), &transactions(image, 3), false);
    copy
}

fn assert_recovered(image: &Image, bytes: &[u8]) {
    let size = image.shape.block_size as usize;
    for (index, home) in image.homes.iter().enumerate().take(16) {
        let value = (index / 3).min(2) as u8 + 1;
        assert_eq!(bytes[*home as usize * size..][..size], vec![value; size], "home {index}");
    }
    let found = extfs::discover(&bytes.to_vec()).expect("memory").remove(0);
    assert!(!found.superblock.needs_recovery());
    found.superblock.check().expect("a sealed superblock");
}

#[test]
fn whole_disk() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(4096));
    let copy = crashed(&image, directory.path(), "disk");
    let report = copy.recover(false).expect("a recovery");
    assert_eq!((report.status, report.transactions, report.blocks_written), (Status::Recovered, 3, 16));
    assert_eq!((report.first_sequence, report.last_sequence), (Some(7), Some(9)));
    assert_eq!(report.bytes_written, 16 * 4096);
    assert_recovered(&image, &copy.bytes());
}

/// A copy whose checksum does not fit is passed over, as e2fsck does: what the transaction before wrote stays.
#[test]
fn an_older_copy_takes_the_place_of_a_damaged_one() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(4096));
    let copies = ["ours", "theirs"].map(|name| crashed(&image, directory.path(), name));
    // The log begins at 5: a descriptor, ten blocks, a commit block; then the second descriptor and the second copy of
    // home block 3, the first of its transaction.
    let (position, home) = (5 + 12 + 1, image.homes[3]);
    for copy in &copies {
        let file = copy.log_file();
        let mut block = vec![0; 4096];
        file.read_exact_at(&mut block, image.log_offset(position)).expect("a block");
        assert_eq!(block, vec![2; 4096], "this is the second copy");
        block[100] ^= 1;
        file.write_all_at(&block, image.log_offset(position)).expect("room");
    }
    let report = copies[0].recover(false).expect("a recovery");
    assert_eq!((report.status, report.blocks_written), (Status::Damaged, 16));
    e2fsck(&copies[1].path, None);
    for bytes in [copies[0].bytes(), copies[1].bytes()] {
        assert_eq!(bytes[home as usize * 4096..][..4096], [1; 4096], "the first transaction's copy");
    }
}

/// A disk with an MBR: one primary partition, one extended with two logical ones.
fn partitioned(parts: &[&[u8]; 3]) -> Vec<u8> {
    let sectors = |bytes: &[u8]| (bytes.len() / 512) as u32;
    let entry = |table: &mut [u8], index: usize, kind: u8, start: u32, count: u32| {
        let entry = &mut table[446 + 16 * index..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&start.to_le_bytes());
        entry[12..16].copy_from_slice(&count.to_le_bytes());
    };
    let first = 2048;
    let extended = first + sectors(parts[0]);
    let second = extended + 2048;
    let link = second + sectors(parts[1]);
    let third = link + 2048;
    let end = third + sectors(parts[2]);
    let mut disk = vec![0; end as usize * 512];
    for table in [0, extended, link] {
        disk[table as usize * 512 + 510..][..2].copy_from_slice(&[0x55, 0xaa]);
    }
    entry(&mut disk, 0, 0x83, first, sectors(parts[0]));
    entry(&mut disk, 1, 0x0f, extended, end - extended);
    let (here, link_here) = (extended as usize * 512, link as usize * 512);
    entry(&mut disk[here..], 0, 0x83, 2048, sectors(parts[1]));
    entry(&mut disk[here..], 1, 0x05, link - extended, end - link);
    entry(&mut disk[link_here..], 0, 0x83, 2048, sectors(parts[2]));
    for (start, part) in [first, second, third].into_iter().zip(parts) {
        disk[start as usize * 512..][..part.len()].copy_from_slice(part);
    }
    disk
}

#[test]
fn every_partition_is_recovered_and_nothing_else_is_written() {
    let directory = scratch();
    let (small, large) = (Image::make(directory.path(), shape(1024)), Image::make(directory.path(), shape(4096)));
    let crashed_small = crashed(&small, directory.path(), "small").bytes();
    let crashed_large = crashed(&large, directory.path(), "large").bytes();
    let noise = vec![0xa5u8; 1 << 20];
    let bytes = partitioned(&[&crashed_small, &noise, &crashed_large]);
    let path = directory.path().join("disk");
    std::fs::write(&path, &bytes).expect("room");
    let disk = Disk::open(&path, Access::Write).expect("the image");
    let reports = recover_disk(&disk, None, Options::default()).expect("file systems");
    drop(disk);
    let seen: Vec<_> =
        reports.iter().map(|one| (one.partition, one.result.as_ref().expect("a recovery").status)).collect();
    assert_eq!(seen, [(Some(1), Status::Recovered), (Some(6), Status::Recovered)]);
    let after = std::fs::read(&path).expect("the image");
    let first = 2048 * 512;
    assert_recovered(&small, &after[first..first + crashed_small.len()]);
    assert_recovered(&large, &after[after.len() - crashed_large.len()..]);
    let between = first + crashed_small.len()..after.len() - crashed_large.len();
    assert_eq!(after[..first], bytes[..first]);
    assert_eq!(after[between.clone()], bytes[between]);
}

#[test]
fn a_refused_file_system_does_not_keep_the_others() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(1024));
    let good = crashed(&image, directory.path(), "good").bytes();
    let mut bad = good.clone();
    bad[image.log_offset(0) as usize + 0x60] ^= 1;
    let path = directory.path().join("disk");
    std::fs::write(&path, partitioned(&[&bad, &good, &bad])).expect("room");
    let disk = Disk::open(&path, Access::Write).expect("the image");
    let reports = recover_disk(&disk, None, Options::default()).expect("file systems");
    assert!(reports[0].result.as_ref().is_err_and(recovery::Error::is_refusal));
    assert_eq!(reports[1].result.as_ref().expect("a recovery").status, Status::Recovered);
    assert!(reports[2].result.as_ref().is_err_and(recovery::Error::is_refusal));
}

/// Recovers, expects a refusal that says `text`, and that nothing was changed.
fn assert_refused(copy: &Copy, text: &str) {
    let before = (copy.bytes(), copy.journal_bytes());
    let error = copy.recover(false).expect_err(text);
    assert!(error.is_refusal(), "{error}");
    assert!(error.to_string().contains(text), "{error}");
    assert_eq!((copy.bytes(), copy.journal_bytes()), before, "nothing is changed");
}

#[test]
fn what_is_refused_is_left_alone() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(1024));
    let at = image.log_offset(0);
    let edit = |name: &str, offset: u64, bytes: &[u8]| {
        let copy = crashed(&image, directory.path(), name);
        copy.log_file().write_all_at(bytes, offset).expect("room");
        copy
    };
    assert_refused(&edit("checksum", at + 0x60, &[1]), "checksum");
    assert_refused(&edit("magic", at, &[0]), "magic number");
    // The file system's own superblock.
    assert_refused(&edit("superblock", 1024 + 0x78, b"x"), "superblock's checksum");
    let copy = crashed(&image, directory.path(), "cut");
    copy.log_file().set_len(3 << 20).expect("a shorter image");
    assert_refused(&copy, "cut off");
    let copy = crashed(&image, directory.path(), "empty");
    copy.log_file().set_len(512).expect("a shorter image");
    assert_refused(&copy, "no ext2, ext3 or ext4");
    // Unknown features, and a log as long as the whole disk.
    for (name, offset, value, text) in
        [("features", 0x28, 0x113u32, "features that are not known"), ("length", 0x10, 4000, "room for")]
    {
        let copy = crashed(&image, directory.path(), name);
        let mut raw = [0; 1024];
        copy.log_file().read_exact_at(&mut raw, at).expect("a superblock");
        raw[offset..offset + 4].copy_from_slice(&value.to_be_bytes());
        jbd2::SuperblockEdit::new(&mut raw).expect("a superblock").seal();
        copy.log_file().write_all_at(&raw, at).expect("room");
        assert_refused(&copy, text);
    }
}

#[test]
fn live_fast_commits_are_left_for_the_guest() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(1024));
    for (transaction, refused) in [(10u8, true), (9, false)] {
        let copy = image.copy_to(directory.path(), "fast");
        let (mut raw, _) = open_log(&image, &copy, &log_shape());
        raw[0x28..0x2c].copy_from_slice(&0x31u32.to_be_bytes());
        raw[0x54..0x58].copy_from_slice(&20u32.to_be_bytes());
        jbd2::SuperblockEdit::new(&mut raw).expect("a superblock").seal();
        let format = jbd2::Superblock::parse(&raw).expect("good").1;
        let file = copy.log_file();
        file.write_all_at(&raw, image.log_offset(0)).expect("room");
        write_log(&image, &copy, LogBuilder::new(format, 5, 7), &transactions(&image, 3), false);
        let head = [9, 0, 8, 0, 0, 0, 0, 0, transaction, 0, 0, 0];
        file.write_all_at(&head, image.log_offset(format.last + 1)).expect("room");
        if refused {
            assert_refused(&copy, "fast commits");
        } else {
            assert_eq!(copy.recover(false).expect("a recovery").status, Status::Recovered);
            assert_recovered(&image, &copy.bytes());
        }
    }
}

#[test]
fn a_log_that_is_not_asked_for_is_left_alone() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(1024));
    let copy = crashed(&image, directory.path(), "disk");
    common::debugfs(&copy.path, &["feature ^needs_recovery"]);
    let before = copy.bytes();
    let report = copy.recover(false).expect("clean");
    assert_eq!(report.status, Status::Clean);
    assert!(report.notes[0].contains("does not ask for recovery"));
    assert_eq!(copy.bytes(), before);
}

#[test]
fn an_external_journal_must_be_the_right_one() {
    let directory = scratch();
    let image = Image::make(directory.path(), Shape { external: true, ..shape(4096) });
    let copy = crashed(&image, directory.path(), "disk");
    let journal = copy.journal_path.clone().expect("external");
    let disk = Disk::open(&copy.path, Access::Write).expect("the image");
    let result = recover_disk(&disk, None, Options::default()).expect("a file system").remove(0).result;
    assert!(result.expect_err("no journal").to_string().contains("give that one with --journal"));
    drop(disk);
    // Another journal device.
    let other = Copy { path: copy.path.clone(), journal_path: Some(directory.path().join("other")) };
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-b", "4096", "-O", "journal_dev"]).arg(directory.path().join("other")).arg("1030");
    assert!(output(&mut mke2fs).status.success());
    assert_refused(&other, "has UUID");
    // No journal device at all.
    assert_refused(&Copy { path: copy.path.clone(), journal_path: Some(image.path.clone()) }, "no external journal");
    // The right one, shared by two file systems: not supported.
    let shared = crashed(&image, directory.path(), "shared");
    let mut raw = vec![0; 4096];
    shared.log_file().read_exact_at(&mut raw, 4096).expect("a superblock");
    raw[0x43] = 2;
    jbd2::SuperblockEdit::new(&mut raw).expect("a superblock").seal();
    shared.log_file().write_all_at(&raw, 4096).expect("room");
    assert_refused(&shared, "shared by 2");
    // In a partition of its own, and recovered.
    let device = std::fs::read(&journal).expect("the journal");
    let padded = [device.as_slice(), &vec![0; 1 << 20]].concat();
    std::fs::write(&journal, partitioned(&[&[0u8; 4096], &padded, &[0u8; 4096]])).expect("room");
    let report = copy.recover(false).expect("a recovery");
    assert_eq!(report.status, Status::Recovered);
    assert_recovered(&image, &copy.bytes());
    assert_eq!(copy.recover(false).expect("clean").status, Status::Clean);
}

#[test]
fn a_disk_in_use_is_not_touched() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(1024));
    let _held = Disk::open(&image.path, Access::Read).expect("the image");
    let error = Disk::open(&image.path, Access::Write).expect_err("in use");
    assert!(error.to_string().contains("in use"), "{error}");
    assert!(Disk::open(&image.path, Access::Look).is_ok());
    assert!(Disk::open(directory.path(), Access::Look).is_err_and(|error| error.is_refusal()));
    assert!(Disk::open(&directory.path().join("none"), Access::Look).is_err());
}

/// A live log that has let go of some data blocks.
struct LiveLog<'a> {
    image: &'a Image,
    bytes: Vec<u8>,
    at_home: HashSet<u32>,
}

impl LogRead for LiveLog<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        if self.at_home.contains(&position) {
            return Ok(Content::AtHome);
        }
        self.bytes.read_at(self.image.log_offset(position), buffer)?;
        Ok(Content::Present)
    }
}

/// What was let go of must not matter: whether it is written to the journal's place (and replayed from there by e2fsck), or
/// replayed directly.
#[test]
fn a_materialised_log_replays_to_the_same_disk() {
    let directory = scratch();
    let image = Image::make(directory.path(), shape(1024));
    for checksum in [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3] {
        // The complete journal, as it never was on storage.
        let complete = image.copy_to(directory.path(), "complete");
        let (_, format) = open_log(&image, &complete, &LogShape { checksum, start: 1020, ..log_shape() });
        let mut transactions = transactions(&image, 3);
        transactions[1].blocks[1].1[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        let builder = LogBuilder::new(format, 1020, 7);
        let (_, positions) = write_log(&image, &complete, builder, &transactions, false);
        let live_bytes = complete.bytes();
        // On storage: an empty journal, and some blocks that are home already. Of the first transaction, its third block
        // (which only it has) and its fifth (which the second has newer).
        let storage = image.copy_to(directory.path(), "storage");
        let file = storage.log_file();
        let at_home: HashSet<u32> = [positions[1], positions[5]].into();
        file.write_all_at(&transactions[0].blocks[0].1, transactions[0].blocks[0].0 * 1024).expect("room");
        // The other's home holds what its newer copy says.
        file.write_all_at(&transactions[1].blocks[1].1, transactions[0].blocks[4].0 * 1024).expect("room");
        assert_eq!(transactions[0].blocks[4].0, transactions[1].blocks[1].0);
        let mut log = LiveLog { image: &image, bytes: live_bytes, at_home };
        let bounds = HomeBounds::new(&image.file_system);
        let extents = image.file_system.journal.extents(&image.file_system.superblock);
        let journal = LogBounds::new(&image.file_system);
        {
            let disk = Disk::open(&storage.path, Access::Write).expect("the image");
            let mut home = DiskHome::new(&disk, 0, disk.size());
            let report = materialise(&mut log, journal, &extents, &bounds, &mut home, JournalDisk::Home, &[])
                .expect("a journal on storage");
            assert_eq!((report.status, report.transactions), (Status::Materialised, 3));
        }
        let (_, said) = common::e2fsck(&complete.path, None);
        assert!(!said.contains("rror"), "{said}");
        let (_, said) = common::e2fsck(&storage.path, None);
        assert!(!said.contains("rror"), "{checksum:?}: {said}");
        let excluded = image.journal_blocks();
        let differ = |a: &[u8], b: &[u8]| -> Vec<u64> {
            common::differing_blocks(a, b, 1024, 4096)
                .into_iter()
                .filter(|block| !excluded.contains(block) && *block != 1)
                .collect()
        };
        assert_eq!(differ(&complete.bytes(), &storage.bytes()), [0u64; 0], "{checksum:?}");
        assert!(image.homes.iter().take(16).all(|home| storage.bytes()[*home as usize * 1024 + 9] != 0));
    }
}
