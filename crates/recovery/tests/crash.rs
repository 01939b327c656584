//! A crash during recovery loses nothing: at every operation, and for every choice of which unflushed writes had reached
//! the disk, the recovery that follows ends where an undisturbed one does.
//!
//! Two kinds of log are recovered: one on storage, which a recovery that was cut off finds as the disk has it, and one that
//! is held in memory, for which the disk has only the mark (crate `placement`): there, whoever finds the journal empty and
//! without the mark takes it that nothing is left to be done.

mod common;

use common::{Image, LogShape, Shape, open_log, scratch, write_log};
use extfs::ReadAt;
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Checksum, Content, LogRead};
use recovery::{HomeBounds, HomeWriter, JournalPlace, LogBounds, Replay, Status};
use seeded_random::Random;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

const BLOCK: usize = 1024;
/// What amberlog writes into the journal superblock on storage while it holds the log.
const MARK: i32 = -5;
/// Where in the image the file system's superblock is, and in it the record of errors (`s_error_count`) and the state.
const SUPERBLOCK: usize = 1024;
const ERROR_COUNT: usize = 0x194;
const STATE: usize = 0x3a;

/// A disk of blocks. A block is taken to be atomic, as ext4 itself takes it to be: its superblock has one checksum over
/// two sectors and is written in place.
#[derive(Clone)]
struct Blocks {
    base: Arc<Vec<u8>>,
    changed: BTreeMap<usize, Vec<u8>>,
}

impl Blocks {
    fn new(bytes: Vec<u8>) -> Self {
        Blocks { base: Arc::new(bytes), changed: BTreeMap::new() }
    }

    fn block(&self, number: usize) -> &[u8] {
        self.changed.get(&number).map_or(&self.base[number * BLOCK..][..BLOCK], |block| block)
    }

    /// The blocks in which this differs from another state of the same disk.
    fn differing(&self, other: &Blocks) -> Vec<usize> {
        let mut numbers: Vec<usize> = self.changed.keys().chain(other.changed.keys()).copied().collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers.retain(|number| self.block(*number) != other.block(*number));
        numbers
    }
}

impl ReadAt for Blocks {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset as usize + buffer.len();
        if end > self.base.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for (at, byte) in (offset as usize..end).zip(buffer) {
            *byte = self.block(at / BLOCK)[at % BLOCK];
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.base.len() as u64
    }
}

/// A disk that remembers what was written since the last flush, and fails after some number of operations.
struct CrashingDisk {
    durable: Blocks,
    seen: Blocks,
    /// Block by block, in order.
    unflushed: Vec<(usize, Vec<u8>)>,
    operations_left: usize,
}

impl CrashingDisk {
    fn new(blocks: Blocks, operations_left: usize) -> Self {
        CrashingDisk { durable: blocks.clone(), seen: blocks, unflushed: Vec::new(), operations_left }
    }

    fn operation(&mut self) -> io::Result<()> {
        self.operations_left = self.operations_left.checked_sub(1).ok_or_else(|| io::Error::other("crashed"))?;
        Ok(())
    }

    /// What a crash leaves: of the unflushed blocks, those that `chosen` takes.
    fn after_crash(&self, mut chosen: impl FnMut(usize) -> bool) -> Blocks {
        let mut blocks = self.durable.clone();
        for (index, (number, data)) in self.unflushed.iter().enumerate() {
            if chosen(index) {
                blocks.changed.insert(*number, data.clone());
            }
        }
        blocks
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
        assert!((offset as usize).is_multiple_of(BLOCK) && data.len().is_multiple_of(BLOCK), "whole blocks");
        for (number, block) in (offset as usize / BLOCK..).zip(data.chunks(BLOCK)) {
            self.seen.changed.insert(number, block.to_vec());
            self.unflushed.push((number, block.to_vec()));
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.operation()?;
        self.durable.clone_from(&self.seen);
        self.unflushed.clear();
        Ok(())
    }
}

/// The log of an internal journal on a disk, as it was before.
struct Log<'a> {
    image: &'a Image,
    blocks: Blocks,
}

impl LogRead for Log<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        self.blocks.read_at(self.image.log_offset(position), buffer)?;
        Ok(Content::Present)
    }
}

/// A crash that is to be recovered from.
struct Crash {
    image: Image,
    disk: Blocks,
    /// Where the log is, if it is not on the disk.
    held: Option<Blocks>,
}

impl Crash {
    fn superblock_offset(&self) -> u64 {
        self.image.log_offset(0)
    }

    /// Recovers as a fresh start would. Says whether it ran to its end, or that there is nothing to do.
    fn recover(&self, disk: &mut CrashingDisk) -> Result<Status, recovery::Error> {
        let found = extfs::discover(&disk.seen).expect("memory").remove(0);
        let blocks = self.held.as_ref().unwrap_or(&disk.seen).clone();
        let mut log = Log { image: &self.image, blocks };
        let replay = Replay::prepare(&mut log, LogBounds::new(&found), &HomeBounds::new(&found))?;
        let is_done = if self.held.is_some() {
            let mut raw = vec![0; BLOCK];
            disk.read_at(self.superblock_offset(), &mut raw).expect("memory");
            let stored = jbd2::Superblock::decode(&raw).expect("a journal superblock");
            stored.is_empty() && stored.errno == 0
        } else {
            !found.superblock.needs_recovery() || replay.journal().is_empty()
        };
        if is_done {
            return Ok(Status::Clean);
        }
        // What a recovery that was cut off before its last step has left is told from a home that knows nothing of it.
        let is_home = replay.is_home(&mut log, &disk.seen).expect("memory");
        assert_eq!(is_home, !found.superblock.needs_recovery(), "by the superblock, which goes home last");
        let place = JournalPlace::Home { offset: self.superblock_offset() };
        Ok(replay.run(&mut log, disk, place)?.status)
    }

    /// Checks what a recovery that was cut off and begun again comes to.
    fn check(&self, after: &Blocks, expected: &Blocks, what: &str) {
        let mut differ = after.differing(expected);
        let superblock = extfs::discover(after).expect("memory").remove(0).superblock;
        if self.held.is_none() && !superblock.needs_recovery() {
            // Everything is home and the file system says so, but the journal was not emptied: the next mount discards
            // it, and finds its error where it is already. Nothing but that may be left.
            differ.retain(|number| *number as u64 * BLOCK as u64 != self.superblock_offset());
        }
        assert!(differ.is_empty(), "{what}: blocks {differ:?} are not as they should be");
    }

    /// Cuts a recovery off after every operation, with what `subsets` choose of the unflushed blocks, and begins again.
    /// Returns how often.
    fn cut_everywhere(&self, subsets: &mut dyn FnMut(usize) -> Vec<u64>) -> usize {
        let mut whole = CrashingDisk::new(self.disk.clone(), usize::MAX);
        assert_eq!(self.recover(&mut whole).expect("a recovery"), Status::Recovered);
        assert!(whole.unflushed.is_empty(), "everything is flushed at the end");
        let operations = usize::MAX - whole.operations_left;
        assert!(operations > 6, "{operations}");
        let mut points = 0;
        for cut in 0..operations {
            let mut disk = CrashingDisk::new(self.disk.clone(), cut);
            assert!(self.recover(&mut disk).is_err(), "the disk crashed");
            for chosen in subsets(disk.unflushed.len()) {
                let what = format!("cut after {cut} of {operations} operations, choice {chosen:#x}");
                let left = disk.after_crash(|index| chosen >> (index % 64) & 1 != 0);
                let mut again = CrashingDisk::new(left, usize::MAX);
                self.recover(&mut again).unwrap_or_else(|error| panic!("{what}: {error}"));
                self.check(&again.durable, &whole.durable, &what);
                points += 1;
            }
        }
        points
    }
}

/// What a crash is made of.
struct Plan {
    /// The error in the journal superblock.
    errno: i32,
    /// The superblock at home has a record of errors that never went through the log.
    has_record: bool,
    /// The log is held in memory.
    is_held: bool,
    /// Blocks in each transaction.
    blocks: usize,
    transactions: u8,
}

fn make(directory: &std::path::Path, plan: &Plan) -> Crash {
    let image = Image::make(directory, Shape { block_size: BLOCK as u32, external: false, ext3: false, wide: false });
    let copy = image.copy_to(directory, "crashed");
    let shape = LogShape { wide: false, errno: plan.errno, ..LogShape::simple(Checksum::V3) };
    let (raw, format) = open_log(&image, &copy, &shape);
    let mut bytes = copy.bytes();
    // The superblock in the log has another count of free blocks than the one at home.
    let mut logged = bytes[SUPERBLOCK..SUPERBLOCK + BLOCK].to_vec();
    logged[0x0c] ^= 0xff;
    extfs::SuperblockEdit::new(&mut logged).expect("a superblock").seal();
    // Its neighbours are written with it: the boot block, and the group descriptors with a byte changed that is none's.
    let mut descriptors = bytes[SUPERBLOCK + BLOCK..SUPERBLOCK + 2 * BLOCK].to_vec();
    descriptors[BLOCK - 1] = 0x77;
    let metadata = [(0, vec![0x77; BLOCK]), (1, logged), (2, descriptors)];
    let transactions: Vec<Transaction> = (0..plan.transactions)
        .map(|number| Transaction {
            blocks: (0..plan.blocks)
                .map(|n| (image.homes[n * (1 + number as usize)], vec![number + 1; BLOCK]))
                .chain(metadata.clone())
                .collect(),
            revokes: if number == 3 { vec![image.homes[0], image.homes[4]] } else { Vec::new() },
            seconds: 1000 + u64::from(number),
        })
        .collect();
    write_log(&image, &copy, LogBuilder::new(format, 5, 7), &transactions, true);
    bytes = copy.bytes();
    if plan.has_record {
        let home = &mut bytes[SUPERBLOCK..SUPERBLOCK + BLOCK];
        home[ERROR_COUNT] = 3;
        home[STATE] |= 2;
        extfs::SuperblockEdit::new(home).expect("a superblock").seal();
    }
    let held = plan.is_held.then(|| Blocks::new(bytes.clone()));
    if plan.is_held {
        let mut mark = raw;
        let errno = if plan.errno == 0 { MARK } else { plan.errno };
        jbd2::SuperblockEdit::new(&mut mark).expect("a superblock").start(0).errno(errno).seal();
        let offset = image.log_offset(0) as usize;
        bytes[offset..offset + BLOCK].copy_from_slice(&mark);
    }
    Crash { image, disk: Blocks::new(bytes), held }
}

#[test]
fn every_subset_of_what_was_not_flushed() {
    let directory = scratch();
    for (is_held, errno, has_record) in
        [(false, 0, false), (false, 0, true), (false, -5, false), (true, 0, false), (true, 0, true), (true, -28, false)]
    {
        let crash = make(directory.path(), &Plan { errno, has_record, is_held, blocks: 5, transactions: 3 });
        let mut unflushed_max = 0;
        let points = crash.cut_everywhere(&mut |unflushed| {
            unflushed_max = unflushed_max.max(unflushed);
            assert!(unflushed <= 12, "{unflushed} blocks have too many subsets");
            (0..1 << unflushed).collect()
        });
        assert!(unflushed_max >= 6 && points > 200, "held {is_held}, errno {errno}: {unflushed_max}, {points}");
    }
}

#[test]
fn many_blocks() {
    let directory = scratch();
    for (is_held, errno) in [(false, -5), (true, -28)] {
        let has_record = !is_held;
        let crash = make(directory.path(), &Plan { errno, has_record, is_held, blocks: 12, transactions: 7 });
        let mut random = Random::new(1);
        let points = crash.cut_everywhere(&mut |_| {
            let choices = std::iter::repeat_with(|| random.bits()).take(11);
            [0, u64::MAX, 0x5555_5555_5555_5555].into_iter().chain(choices).collect()
        });
        assert!(points > 200, "{points}");
    }
}

/// What the other tests compare with is itself right.
#[test]
fn errors_are_told_when_it_is_done() {
    let directory = scratch();
    for (errno, has_record, is_held) in
        [(0, false, false), (0, true, false), (-5, false, false), (0, true, true), (-28, false, true)]
    {
        let what = format!("errno {errno}, record {has_record}, held {is_held}");
        let crash = make(directory.path(), &Plan { errno, has_record, is_held, blocks: 5, transactions: 3 });
        let mut disk = CrashingDisk::new(crash.disk.clone(), usize::MAX);
        crash.recover(&mut disk).expect("a recovery");
        let home = disk.durable.block(SUPERBLOCK / BLOCK);
        let superblock = extfs::Superblock::parse(home).expect("a superblock");
        superblock.check().expect("a sealed superblock");
        let has_error = superblock.state & extfs::state::ERROR != 0;
        assert_eq!(has_error, errno != 0 || has_record, "{what}");
        assert_eq!(home[ERROR_COUNT], if has_record { 3 } else { 0 }, "{what}: the record at home is kept");
        assert!(!superblock.needs_recovery());
        let before = crash.disk.block(SUPERBLOCK / BLOCK);
        assert_eq!(home[0x0c], before[0x0c] ^ 0xff, "{what}: the log's copy went home");
        let neighbours = [0, 2].map(|number| disk.durable.block(number)[BLOCK - 1]);
        assert_eq!(neighbours, [0x77, 0x77], "{what}: its neighbours went home");
        let raw = disk.durable.block(crash.superblock_offset() as usize / BLOCK);
        let journal = jbd2::Superblock::decode(raw).expect("a journal superblock");
        assert!(journal.is_empty() && journal.errno == 0, "{what}");
    }
}

/// Each attempt may have another reason to ask for a check; a block that is not as planned is another matter.
#[test]
fn what_is_home_already_is_told() {
    let directory = scratch();
    let crash =
        make(directory.path(), &Plan { errno: 0, has_record: false, is_held: true, blocks: 5, transactions: 3 });
    let held = crash.held.as_ref().expect("a log");
    let found = extfs::discover(&crash.disk).expect("memory").remove(0);
    let mut log = Log { image: &crash.image, blocks: held.clone() };
    let mut replay = || Replay::prepare(&mut log, LogBounds::new(&found), &HomeBounds::new(&found)).expect("a plan");
    let (first, again) = (replay(), replay());
    assert!(!again.is_home(&mut log, &crash.disk).expect("memory"));
    let mut disk = CrashingDisk::new(crash.disk.clone(), usize::MAX);
    let place = JournalPlace::Home { offset: crash.superblock_offset() };
    let check = || Some("a flush has failed".to_owned());
    let killed = first.run_before_emptying(&mut log, &mut disk, place, check, || Err(io::Error::other("killed")));
    assert!(killed.is_err());
    assert!(again.is_home(&mut log, &disk.seen).expect("memory"));
    let restored = |block: usize| {
        let mut blocks = disk.seen.clone();
        blocks.changed.insert(block, crash.disk.block(block).to_vec());
        blocks
    };
    let home = crash.image.homes[0] as usize;
    for block in [0, SUPERBLOCK / BLOCK, 2, home] {
        assert!(!again.is_home(&mut log, &restored(block)).expect("memory"), "block {block} is as it was");
    }
    // Nothing but the superblock is another one: of another mount, or written earlier; or it asks for a recovery.
    let seen = disk.seen.block(SUPERBLOCK / BLOCK).to_vec();
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut block = seen.clone();
        edit(&mut block);
        extfs::SuperblockEdit::new(&mut block).expect("a superblock").seal();
        let mut blocks = disk.seen.clone();
        blocks.changed.insert(SUPERBLOCK / BLOCK, block);
        blocks
    };
    let asks = edited(&|block| {
        extfs::SuperblockEdit::new(block).expect("a superblock").set_needs_recovery();
    });
    let [mounted, mounts] = [0x2c, 0x34].map(|at| edited(&|block| block[at] ^= 1));
    let earlier = edited(&|block| {
        let written = u32::from_le_bytes(block[0x30..0x34].try_into().expect("four bytes")) - 1;
        block[0x30..0x34].copy_from_slice(&written.to_le_bytes());
    });
    // As a recovery leaves it, of a moment before the log's: only its content differs.
    let as_recovered = edited(&|block| block[0x0c] ^= 1);
    for (index, other) in [asks, mounted, mounts, earlier, as_recovered].into_iter().enumerate() {
        assert!(!again.is_home(&mut log, &other).expect("memory"), "{index}");
    }
    // Its journal could not be closed, and its kernel has unmounted it all the same: it has its counts in the superblock, and they stay.
    let unmounted = edited(&|block| {
        block[0x0c] ^= 1;
        block[0x274] += 1;
    });
    assert!(again.is_home(&mut log, &unmounted).expect("memory"));
    let mut disk = CrashingDisk::new(unmounted.clone(), usize::MAX);
    again.run(&mut log, &mut disk, JournalPlace::Home { offset: crash.superblock_offset() }).expect("recovered");
    assert_eq!(disk.durable.block(SUPERBLOCK / BLOCK), unmounted.block(SUPERBLOCK / BLOCK));
}

#[test]
fn a_failing_write_is_an_error_and_leaves_the_log() {
    let directory = scratch();
    let crash =
        make(directory.path(), &Plan { errno: 0, has_record: false, is_held: false, blocks: 12, transactions: 6 });
    let mut disk = CrashingDisk::new(crash.disk.clone(), 3);
    let error = crash.recover(&mut disk).expect_err("the disk failed");
    assert!(!error.is_refusal() && error.to_string().contains("writing"), "{error}");
    let superblock = crash.superblock_offset() as usize / BLOCK;
    assert_eq!(disk.seen.block(superblock), crash.disk.block(superblock), "the log is not marked empty");
}
