//! Guests whose blocks are where their tags say, and one whose blocks are not.

use super::*;
use crate::layout::LogRun;
use guest_memory::{MemoryTable, RegionDescriptor, VmMemory};
use jbd2::SuperblockEdit;
use jbd2::build::{LogBuilder, Transaction};
use std::ops::Range;

const BLOCK: usize = 1024;
const LOG_BLOCKS: u32 = 200;
const HOME_BLOCKS: u64 = 5000;
/// Where the log is.
const OWN: Range<u64> = 1000..1200;

struct Rig {
    watch: Watch,
    place: FoundLogPlace,
    builder: LogBuilder,
    raw: Vec<u8>,
    memory: Arc<VmMemory>,
    _table: MemoryTable,
    /// What is said to be wrong.
    why: Option<String>,
}

fn content(seed: u64) -> Vec<u8> {
    (0..BLOCK as u64).map(|at| ((seed * 1000 + at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

impl Rig {
    fn new() -> Self {
        let mut raw = vec![0; BLOCK];
        for (offset, value) in
            [(0, 0xc03b_3998), (4, 4), (0x0c, BLOCK as u32), (0x10, LOG_BLOCKS), (0x14, 1), (0x18, 7), (0x1c, 1)]
        {
            raw[offset..offset + 4].copy_from_slice(&u32::to_be_bytes(value));
        }
        let (superblock, format) = Superblock::parse(&raw).expect("a superblock");
        let place = FoundLogPlace {
            home_disk: 0,
            journal_disk: 0,
            home_start: 0,
            block_bytes: BLOCK as u32,
            log_blocks: LOG_BLOCKS,
            home_blocks: HOME_BLOCKS,
            runs: vec![LogRun { first_position: 0, count: LOG_BLOCKS, offset: OWN.start * BLOCK as u64 }],
            own_blocks: vec![OWN],
            is_external: false,
            file_system_uuid: [1; 16],
        };
        let file = tempfile::tempfile_in("/dev/shm").expect("tmpfs");
        file.set_len(4096).expect("a length");
        let memory = VmMemory::new();
        let region = RegionDescriptor { gpa: 0, size: 4096, user_addr: 0x7000_0000, file, file_offset: 0 };
        memory.simulate_protection();
        let table = memory.map(vec![region]).expect("mapped");
        let mut watch = Watch::default();
        watch.opened(&place, &superblock);
        let builder = LogBuilder::new(format, superblock.start, superblock.sequence);
        Rig { watch, place, builder, raw, memory, _table: table, why: None }
    }

    fn commit(&mut self, blocks: &[(u64, Vec<u8>)], revokes: &[u64]) {
        let transaction = Transaction { blocks: blocks.to_vec(), revokes: revokes.to_vec(), ..Transaction::default() };
        let mut log = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, Arc::<[u8]>::from(block))));
        for (position, block) in log {
            self.watch.log_write(position, &block);
        }
        self.settle();
    }

    /// A pass ends.
    fn settle(&mut self) {
        let why = self.watch.settle(&self.place);
        self.why = self.why.take().or(why);
    }

    fn write(&mut self, block: u64, content: &[u8]) {
        self.asks(0, (block, content), false, &mut |watch, change| watch.home_change(change));
    }

    /// The same of a write that an earlier process was asked for.
    fn write_again(&mut self, block: u64, content: &[u8]) {
        self.asks(0, (block, content), true, &mut |watch, change| watch.home_change(change));
    }

    /// Asks for the `number`th write of a block, which waits or goes.
    fn ask(&mut self, number: u32, block: u64, content: &[u8], waits: bool) {
        self.asks(number, (block, content), false, &mut |watch, change| {
            watch.home_asked(change);
            watch.home_answered(change, waits);
        });
    }

    fn discard(&mut self, blocks: Range<u64>) {
        let change = HomeChange {
            kind: block_route::RequestKind::Discard,
            request: RequestId(0),
            range: blocks.start * BLOCK as u64..blocks.end * BLOCK as u64,
            blocks: blocks.clone(),
            whole: blocks,
            payload: &[],
            slices: &[],
            is_watched: false,
            is_again: false,
        };
        self.watch.home_change(&change);
    }

    fn asks(
        &mut self,
        number: u32,
        (block, content): (u64, &[u8]),
        is_again: bool,
        ask: &mut dyn FnMut(&mut Watch, &HomeChange<'_>),
    ) {
        let slice = self.memory.page(guest_memory::PageId(0)).expect("a page").sub(0, BLOCK);
        self.memory.simulated_guest_write(guest_memory::PageId(0), 0, content);
        let change = HomeChange {
            kind: block_route::RequestKind::Write,
            request: RequestId(number),
            range: block * BLOCK as u64..(block + 1) * BLOCK as u64,
            blocks: block..block + 1,
            whole: block..block + 1,
            payload: &[Some(slice)],
            slices: &[slice],
            is_watched: false,
            is_again,
        };
        ask(&mut self.watch, &change);
    }

    /// The tail moves to where the next transaction will begin; or the log ends.
    fn all_is_home(&mut self, ends: bool) {
        let (start, sequence) = (if ends { 0 } else { self.builder.position }, self.builder.sequence);
        SuperblockEdit::new(&mut self.raw).expect("a superblock").start(start).sequence(sequence).seal();
        let superblock = Superblock::decode(&self.raw).expect("a superblock");
        let why = self.watch.tail_moves(&superblock);
        self.why = self.why.take().or(why);
    }
}

fn blocks(from: u64) -> Vec<(u64, Vec<u8>)> {
    (from..from + 6).map(|block| (block, content(block))).collect()
}

#[test]
fn a_guest_whose_blocks_are_elsewhere_is_found_when_its_tail_moves_or_its_log_ends() {
    for ends in [false, true] {
        let mut rig = Rig::new();
        rig.commit(&blocks(2000), &[]);
        rig.commit(&blocks(2100), &[]);
        for (block, content) in blocks(2000).into_iter().chain(blocks(2100)) {
            rig.write(block + 900, &content);
        }
        assert_eq!(rig.why, None, "nothing is proven before");
        rig.all_is_home(ends);
        let why = rig.why.expect("it is proven");
        // Contents that fall into one place of the memory of them count once; its key is drawn by lot.
        let is_told =
            (9..=12).any(|count| why.contains(&format!("{count} committed blocks that were never written home")));
        assert!(is_told, "{why}");
        assert!(!rig.watch.is_on(), "it is said once");
    }
}

/// A postmark whose appends are logged: its files have all the same text, and a write of one that is deleted meanwhile waits for room in the region.
#[test]
fn a_write_that_waits_counts_as_of_when_it_was_asked_first() {
    let mut rig = Rig::new();
    rig.commit(&blocks(2000), &[]);
    let ask = |rig: &mut Rig, waits: bool| {
        for (block, content) in blocks(2000) {
            rig.ask(block as u32, block, &content, waits);
        }
    };
    ask(&mut rig, true);
    // Deleted without a word; another file that begins with the same text is written.
    let again: Vec<(u64, Vec<u8>)> = blocks(2000).into_iter().map(|(block, text)| (block + 500, text)).collect();
    rig.commit(&again, &[]);
    rig.all_is_home(false);
    rig.commit(&[(2900, content(1))], &[]);
    ask(&mut rig, true);
    ask(&mut rig, false);
    let third: Vec<(u64, Vec<u8>)> = again.into_iter().map(|(block, text)| (block + 100, text)).collect();
    rig.commit(&third, &[]);
    rig.all_is_home(false);
    assert_eq!(rig.why, None);
    // With the number of a write that has gone, another one is another one.
    rig.commit(&third, &[]);
    ask(&mut rig, false);
    rig.all_is_home(false);
    assert!(rig.why.is_some_and(|why| why.contains("but to other blocks")), "homes that are elsewhere are still found");
}

/// Another process was asked for it before, and may have judged it when there was a reason for it: a file that is deleted while a write of
/// it is under way. Files that all have one text are deleted without a word later.
#[test]
fn a_write_that_another_process_was_asked_for_says_nothing_of_where_homes_are() {
    for is_again in [true, false] {
        let mut rig = Rig::new();
        rig.commit(&[(2900, content(1))], &[]);
        for (block, text) in blocks(2000) {
            if is_again {
                rig.write_again(block, &text);
            } else {
                rig.write(block, &text);
            }
        }
        let other: Vec<(u64, Vec<u8>)> = blocks(2000).into_iter().map(|(block, text)| (block + 500, text)).collect();
        rig.commit(&other, &[]);
        rig.all_is_home(false);
        assert_eq!(rig.why.is_none(), is_again, "{:?}", rig.why);
    }
}

#[test]
fn legal_guests_prove_nothing() {
    let mut rig = Rig::new();
    for round in 0..30u64 {
        let mut all = blocks(2000 + round % 3);
        all.iter_mut().for_each(|(block, of_block)| *of_block = content(*block * 100 + round));
        rig.commit(&all, &[]);
        match round % 5 {
            // Written home.
            0 => all.iter().for_each(|(block, content)| rig.write(*block, content)),
            // Written over, as ext4 does with its superblock; and the contents are a file's that was copied.
            1 => all.iter().for_each(|(block, of_block)| {
                rig.write(*block + 700, of_block);
                rig.write(*block, &content(9_000_000 + round));
            }),
            // Revoked, and the contents are a file's that was copied.
            2 => {
                let homes: Vec<u64> = all.iter().map(|(block, _)| *block).collect();
                all.iter().for_each(|(block, content)| rig.write(*block + 700, content));
                rig.commit(&[(3000, content(round))], &homes);
                rig.write(3000, &content(round));
            }
            // Given up: no content.
            3 => rig.discard(2000..2010),
            // Freed without a word (data=journal), and nothing of it goes anywhere.
            _ => {}
        }
        rig.all_is_home(false);
        assert_eq!(rig.why, None, "round {round}");
        assert!(rig.watch.is_on());
    }
    // Few contents in two places are a coincidence.
    rig.commit(&blocks(2000), &[]);
    for (block, content) in &blocks(2000)[..2] {
        rig.write(*block + 900, content);
    }
    rig.commit(&[(2500, vec![0; BLOCK]), (2501, vec![0; BLOCK]), (2502, vec![0; BLOCK])], &[]);
    for block in 2600..2604 {
        rig.write(block, &[0; BLOCK]);
    }
    rig.all_is_home(true);
    assert_eq!(rig.why, None);
}

#[test]
fn a_tag_that_cannot_be_is_found_at_its_commit() {
    for (block, says) in [(OWN.start + 3, "the journal's own"), (HOME_BLOCKS, "beyond the end")] {
        let mut rig = Rig::new();
        rig.commit(&[(2000, content(1))], &[]);
        assert_eq!(rig.why, None);
        rig.commit(&[(block, content(2))], &[]);
        let why = rig.why.expect("it is proven");
        assert!(why.contains(says), "{why}");
    }
}

#[test]
fn a_log_that_is_mounted_again_or_brought_proves_nothing() {
    let mut rig = Rig::new();
    rig.commit(&blocks(2000), &[]);
    for (block, content) in blocks(2000) {
        rig.write(block + 900, &content);
    }
    rig.builder.position += 50;
    rig.builder.sequence += 1;
    rig.all_is_home(false);
    assert_eq!(rig.why, None);
    rig.commit(&blocks(2000), &[]);
    for (block, content) in blocks(2000) {
        rig.write(block + 800, &content);
    }
    rig.all_is_home(false);
    assert!(rig.why.is_some(), "it goes on watching");
}

#[test]
fn a_guest_that_writes_one_block_again_and_again_costs_each_of_its_writes_once() {
    let mut rig = Rig::new();
    let mut log = Vec::new();
    let blocks: Vec<(u64, Vec<u8>)> = (2000..2100).map(|block| (block, content(block))).collect();
    let transaction = Transaction { blocks, ..Transaction::default() };
    rig.builder.transaction(&transaction, &mut |position, block| log.push((position, Arc::<[u8]>::from(block))));
    log.pop();
    // One pass in which all but the commit block comes, and its first block once more before each of the others.
    for (position, block) in &log {
        rig.watch.log_write(log[0].0, &log[0].1);
        rig.watch.log_write(*position, block);
    }
    rig.settle();
    let looked_at = rig.watch.stream.as_ref().expect("it is watched").looked_at.get();
    assert_eq!(looked_at, log.len() as u64);
    assert_eq!(rig.why, None);
}
