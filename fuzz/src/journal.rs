//! A journal as a guest could write it: parse it, follow it, replay it onto a disk in memory, inspect it, materialise it.
//!
//! Input: one byte of switches, then the journal superblock and the log, in blocks of 1024 bytes. What is checked: no panic,
//! no write outside the file system or into the journal, refusals that change nothing, and an empty log after a replay.

use extfs::{FileSystem, Journal, JournalExtent, ReadAt};
use jbd2::{Content, LogRead};
use recovery::{HomeBounds, HomeWriter, JournalDisk, JournalPlace, LogBounds, Replay};
use std::io;

const BLOCK: usize = 1024;
/// Log blocks that are looked at.
const BLOCKS_MAX: usize = 256;
/// Blocks of the file system.
const HOME_BLOCKS: u64 = 2048;
/// Where its journal begins.
const JOURNAL_AT: u64 = 1024;

/// Make the superblock one that can be used, whatever the input says.
const REPAIR: u8 = 1;
/// Seal the checksums of descriptors and revokes, so that damage inside them is met.
const SEAL: u8 = 2;
/// Every third data block is at home.
const AT_HOME: u8 = 4;

struct Log {
    blocks: Vec<u8>,
    at_home: bool,
}

impl LogRead for Log {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        let block = self.blocks.chunks_exact(BLOCK).nth(position as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(block);
        // Whoever holds a log lets go of data blocks only.
        let is_control = jbd2::peek(block).is_some();
        Ok(if self.at_home && position.is_multiple_of(3) && !is_control { Content::AtHome } else { Content::Present })
    }
}

#[derive(Clone)]
struct Disk {
    bytes: Vec<u8>,
    journal: std::ops::Range<u64>,
    /// Whether writes into the journal, beyond its superblock, are expected.
    may_write_log: bool,
}

impl ReadAt for Disk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.bytes.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }
}

impl HomeWriter for Disk {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let blocks = offset / BLOCK as u64..(offset + data.len() as u64).div_ceil(BLOCK as u64);
        assert!(blocks.end <= HOME_BLOCKS, "a write outside the file system: blocks {blocks:?}");
        let is_superblock = blocks == (self.journal.start..self.journal.start + 1);
        let is_apart = blocks.end <= self.journal.start || blocks.start >= self.journal.end;
        assert!(is_superblock || is_apart || self.may_write_log, "a write into the journal: blocks {blocks:?}");
        self.bytes[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn file_system(blocks: u32) -> (Disk, FileSystem) {
    let mut bytes = vec![0u8; HOME_BLOCKS as usize * BLOCK];
    let raw = &mut bytes[1024..2048];
    let mut put = |offset: usize, value: u32| raw[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    put(0x00, 128);
    put(0x04, HOME_BLOCKS as u32);
    put(0x14, 1);
    put(0x20, 8192);
    put(0x28, 128);
    put(0x38, 0xef53);
    put(0x4c, 1);
    put(0x58, 256);
    put(0x5c, 4);
    put(0x60, 0x46);
    put(0xe0, 8);
    let superblock = extfs::Superblock::parse(raw).expect("a superblock");
    let extents = vec![JournalExtent { log: 0, physical: JOURNAL_AT, count: blocks }];
    let journal = Journal::Internal { inode: 8, blocks, extents, map_blocks: vec![JOURNAL_AT - 1] };
    let disk = Disk { bytes, journal: JOURNAL_AT..JOURNAL_AT + u64::from(blocks), may_write_log: false };
    let length = HOME_BLOCKS * BLOCK as u64;
    (disk, FileSystem { partition: None, offset: 0, length, superblock, journal })
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((switches, log)) = data.split_first() else { return };
    let count = log.len().div_ceil(BLOCK).clamp(1, BLOCKS_MAX);
    let mut blocks = log[..log.len().min(count * BLOCK)].to_vec();
    blocks.resize(count * BLOCK, 0);
    if switches & REPAIR != 0 {
        repair(&mut blocks, count as u32);
    }
    if switches & SEAL != 0 {
        seal(&mut blocks);
    }
    let (disk, file_system) = file_system(count as u32);
    let mut log = Log { blocks, at_home: switches & AT_HOME != 0 };
    inspect(&mut log);
    replay(&mut log, &disk, &file_system);
    materialise(&mut log, &disk, &file_system, count as u32);
}

fn repair(blocks: &mut [u8], count: u32) {
    let raw = &mut blocks[..BLOCK];
    raw[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
    let kind = if raw[7] == 3 { 3 } else { 4 };
    raw[4..8].copy_from_slice(&[0, 0, 0, kind]);
    let mut put = |offset: usize, value: u32| raw[offset..offset + 4].copy_from_slice(&value.to_be_bytes());
    put(0x0c, BLOCK as u32);
    put(0x10, count);
    raw[0x28..0x2b].fill(0);
    raw[0x2b] &= 0x3f;
    raw[0x2c..0x30].fill(0);
    raw[0x50] = 4;
    jbd2::SuperblockEdit::new(raw).expect("a superblock").seal();
}

fn seal(blocks: &mut [u8]) {
    let Ok((_, format)) = jbd2::Superblock::parse(&blocks[..BLOCK]) else { return };
    if format.block_size as usize != BLOCK {
        return;
    }
    for block in blocks.chunks_exact_mut(BLOCK).skip(1) {
        if matches!(jbd2::peek(block), Some(jbd2::Header { kind: jbd2::Kind::Descriptor | jbd2::Kind::Revoke, .. })) {
            jbd2::DescriptorEdit::new(&format, block).seal();
        }
    }
}

fn inspect(log: &mut Log) {
    let Ok((superblock, format)) = jbd2::Superblock::parse(&log.blocks[..BLOCK]) else { return };
    if format.block_size as usize != BLOCK {
        return;
    }
    let mut tags = 0;
    let _ = jbd2::inspect::inspect(log, &superblock, &format, true, &mut |transaction| {
        assert!(transaction.revokes.len() <= jbd2::inspect::REVOKES_KEPT);
        tags += transaction.tags.len();
        for tag in &transaction.tags {
            assert!(tag.position < format.length.max(1), "a data block outside the journal");
        }
    });
}

fn replay(log: &mut Log, disk: &Disk, file_system: &FileSystem) {
    let bounds = HomeBounds::new(file_system);
    let Ok(replay) = Replay::prepare(log, LogBounds::new(file_system), &bounds) else { return };
    let summary = *replay.plan().summary();
    assert!(summary.tags <= BLOCKS_MAX as u64, "more data blocks than the log has blocks");
    assert!(summary.blocks + summary.revoked + summary.out_of_bounds <= summary.tags);
    let mut last = None;
    for block in replay.plan().blocks() {
        assert!(last.is_none_or(|last| last < block.home()), "home blocks ascend");
        assert!(bounds.contains(block.home()));
        last = Some(block.home());
    }
    let dry = replay.dry_run(log);
    let mut disk = disk.clone();
    let place = JournalPlace::Home { offset: JOURNAL_AT * BLOCK as u64 };
    let report = replay.run(log, &mut disk, place);
    // A log in memory can be read, so neither fails, and both say the same.
    let (Ok(dry), Ok(report)) = (dry, report) else { panic!("a log in memory cannot be read") };
    assert_eq!(dry.blocks_written, report.blocks_written);
    let raw = &disk.bytes[JOURNAL_AT as usize * BLOCK..][..BLOCK];
    let (superblock, _) = jbd2::Superblock::parse(raw).expect("a good superblock");
    assert_eq!((superblock.start, superblock.errno), (0, 0));
}

fn materialise(log: &mut Log, disk: &Disk, file_system: &FileSystem, count: u32) {
    let mut disk = disk.clone();
    disk.may_write_log = true;
    let extents = file_system.journal.extents(&file_system.superblock);
    let bounds = HomeBounds::new(file_system);
    let also: Vec<u32> = (1..count).filter(|position| position % 7 == 0).collect();
    let journal = LogBounds::new(file_system);
    let _ = recovery::materialise(log, journal, &extents, &bounds, &mut disk, JournalDisk::Home, &also);
}
