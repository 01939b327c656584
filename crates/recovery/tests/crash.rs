//! A crash during recovery loses nothing: at every write, and for several choices of which unflushed writes had reached the
//! disk, the recovery that follows ends where an undisturbed one does.

mod common;

use common::{Image, LogShape, MemoryDisk, Shape, open_log, scratch, write_log};
use extfs::ReadAt;
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Checksum, Content, LogRead};
use recovery::{HomeBounds, HomeWriter, JournalPlace, LogBounds, Replay, Status};
use std::io;

/// A disk that remembers what was written since the last flush, and fails after some number of operations.
struct CrashingDisk {
    durable: Vec<u8>,
    seen: MemoryDisk,
    unflushed: Vec<(usize, Vec<u8>)>,
    operations_left: usize,
}

impl CrashingDisk {
    fn new(bytes: Vec<u8>, operations_left: usize) -> Self {
        CrashingDisk { durable: bytes.clone(), seen: MemoryDisk { bytes }, unflushed: Vec::new(), operations_left }
    }

    fn operation(&mut self) -> io::Result<()> {
        self.operations_left = self.operations_left.checked_sub(1).ok_or_else(|| io::Error::other("crashed"))?;
        Ok(())
    }

    /// What a crash leaves: of the unflushed writes, those that `chosen` says, some of them only in part.
    /// A file system block is taken to be atomic, as ext4 itself takes it to be: its superblock has one checksum over two
    /// sectors and is written in place.
    fn after_crash(&self, chosen: u64) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        for (index, (offset, data)) in self.unflushed.iter().enumerate() {
            match chosen >> (2 * index % 64) & 3 {
                0 => {}
                1 => {
                    for (block, part) in data.chunks(1024).enumerate().step_by(2) {
                        bytes[offset + block * 1024..][..part.len()].copy_from_slice(part);
                    }
                }
                _ => bytes[*offset..offset + data.len()].copy_from_slice(data),
            }
        }
        bytes
    }
}

impl ReadAt for CrashingDisk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.seen.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.seen.size()
    }
}

impl HomeWriter for CrashingDisk {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.operation()?;
        let from = offset as usize;
        self.seen.bytes[from..from + data.len()].copy_from_slice(data);
        self.unflushed.push((from, data.to_vec()));
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.operation()?;
        self.durable.clone_from(&self.seen.bytes);
        self.unflushed.clear();
        Ok(())
    }
}

/// The log of an internal journal on a disk in memory, as it was before.
struct Log<'a> {
    image: &'a Image,
    bytes: Vec<u8>,
}

impl LogRead for Log<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        self.bytes.read_at(self.image.log_offset(position), buffer)?;
        Ok(Content::Present)
    }
}

/// Recovers as a fresh start would. Returns whether it ran to its end, or what it says is clean.
fn recover(image: &Image, disk: &mut CrashingDisk) -> Result<Status, recovery::Error> {
    let bytes = disk.seen.bytes.clone();
    let found = extfs::discover(&bytes).expect("memory").remove(0);
    let mut log = Log { image, bytes };
    let replay = Replay::prepare(&mut log, LogBounds::new(&found), &HomeBounds::new(&found))?;
    if !found.superblock.needs_recovery() || replay.journal().is_empty() {
        return Ok(Status::Clean);
    }
    let place = JournalPlace::Home { offset: image.log_offset(0) };
    Ok(replay.run(&mut log, disk, place)?.status)
}

fn crashed_image(directory: &std::path::Path) -> (Image, Vec<u8>) {
    let image = Image::make(directory, Shape { block_size: 1024, external: false, ext3: false, wide: false });
    let copy = image.copy_to(directory, "crashed");
    let (_, format) = open_log(&image, &copy, &LogShape { wide: false, ..LogShape::simple(Checksum::V3) });
    let transactions: Vec<Transaction> = (0..6u8)
        .map(|number| Transaction {
            blocks: (0..12).map(|n| (image.homes[n * (1 + number as usize)], vec![number + 1; 1024])).collect(),
            revokes: if number == 3 { vec![image.homes[0], image.homes[4]] } else { Vec::new() },
            seconds: 1000 + u64::from(number),
        })
        .collect();
    write_log(&image, &copy, LogBuilder::new(format, 5, 7), &transactions, true);
    let bytes = copy.bytes();
    (image, bytes)
}

#[test]
fn a_crash_during_recovery_loses_nothing() {
    let directory = scratch();
    let (image, crashed) = crashed_image(directory.path());
    let mut whole = CrashingDisk::new(crashed.clone(), usize::MAX);
    assert_eq!(recover(&image, &mut whole).expect("a recovery"), Status::Recovered);
    assert!(whole.unflushed.is_empty(), "everything is flushed at the end");
    let expected = whole.durable;
    let operations = usize::MAX - whole.operations_left;
    assert!(operations > 8, "{operations}");
    let mut points = 0;
    for crash_after in 0..operations {
        let mut disk = CrashingDisk::new(crashed.clone(), crash_after);
        assert!(recover(&image, &mut disk).is_err(), "the disk crashed");
        let mut choice = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(crash_after as u64 + 1);
        for chosen in [0, u64::MAX, 0x5555_5555_5555_5555].into_iter().chain(
            std::iter::repeat_with(|| {
                choice = choice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                choice
            })
            .take(11),
        ) {
            let mut after = CrashingDisk::new(disk.after_crash(chosen), usize::MAX);
            recover(&image, &mut after).unwrap_or_else(|error| panic!("{crash_after} {chosen:#x}: {error}"));
            let differ = common::differing_blocks(&after.durable, &expected, 1024, 4096);
            // A crash between the last two writes may leave the needs_recovery bit for the mount to clear, as the kernel
            // itself does; nothing else may differ.
            let harmless = differ.iter().all(|block| *block == 1 || image.journal_blocks().contains(block));
            assert!(harmless, "crash after {crash_after} operations, choice {chosen:#x}: blocks {differ:?}");
            points += 1;
        }
    }
    assert!(points > 200, "{points}");
}

#[test]
fn a_failing_write_is_an_error_and_leaves_the_log() {
    let directory = scratch();
    let (image, crashed) = crashed_image(directory.path());
    let mut disk = CrashingDisk::new(crashed.clone(), 3);
    let error = recover(&image, &mut disk).expect_err("the disk failed");
    assert!(!error.is_refusal() && error.to_string().contains("writing"), "{error}");
    let start = image.log_offset(0) as usize;
    assert_eq!(disk.seen.bytes[start..start + 1024], crashed[start..start + 1024], "the log is not marked empty");
}
