//! Replay against logs made by [`crate::build`], each with one thing about it.

use super::*;
use crate::build::{self, LogBuilder, SuperblockBuilder, Transaction};
use crate::{Checksum, Features, Format, MAGIC, Superblock};
use std::collections::BTreeMap;
use std::convert::Infallible;

const BLOCK_SIZE: u32 = 1024;

struct MemoryLog {
    blocks: Vec<Vec<u8>>,
    at_home: Vec<bool>,
    reads: usize,
}

impl LogRead for MemoryLog {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        self.reads += 1;
        assert!(self.reads < 1_000_000, "no end of reading");
        if self.at_home[position as usize] {
            return Ok(Content::AtHome);
        }
        buffer.copy_from_slice(&self.blocks[position as usize]);
        Ok(Content::Present)
    }
}

struct Case {
    superblock: SuperblockBuilder,
    builder: LogBuilder,
    log: MemoryLog,
}

fn data(value: u8) -> Vec<u8> {
    vec![value; BLOCK_SIZE as usize]
}

fn magic_data(value: u8) -> Vec<u8> {
    let mut data = data(value);
    data[..4].copy_from_slice(&MAGIC.to_be_bytes());
    data
}

impl Case {
    fn new(checksum: Checksum, wide: bool) -> Self {
        Self::at(checksum, wide, 1, 1, 64)
    }

    fn at(checksum: Checksum, wide: bool, start: u32, sequence: u32, maxlen: u32) -> Self {
        let incompat = Features::REVOKE | if wide { Features::WIDE } else { 0 };
        let superblock = SuperblockBuilder {
            block_size: BLOCK_SIZE,
            maxlen,
            start,
            sequence,
            uuid: [7; 16],
            features: Features { compat: 0, incompat, ro_compat: 0 },
            ..SuperblockBuilder::default()
        }
        .checksum(checksum);
        let format = Superblock::parse(&superblock.build()).expect("valid").1;
        let blocks = vec![vec![0; BLOCK_SIZE as usize]; maxlen as usize];
        Case {
            superblock,
            builder: LogBuilder::new(format, start, sequence),
            log: MemoryLog { blocks, at_home: vec![false; maxlen as usize], reads: 0 },
        }
    }

    fn format(&self) -> Format {
        self.builder.format
    }

    fn commit(&mut self, blocks: &[(u64, Vec<u8>)], revokes: &[u64]) -> &mut Self {
        let seconds = 1000 + u64::from(self.builder.sequence.wrapping_sub(self.superblock.sequence));
        let transaction = Transaction { blocks: blocks.to_vec(), revokes: revokes.to_vec(), seconds };
        let log = &mut self.log;
        self.builder.transaction(&transaction, &mut |position, block| {
            log.blocks[position as usize].copy_from_slice(block);
        });
        self
    }

    fn half(&mut self, blocks: &[(u64, Vec<u8>)], revokes: &[u64]) -> &mut Self {
        let transaction = Transaction { blocks: blocks.to_vec(), revokes: revokes.to_vec(), seconds: 0 };
        let log = &mut self.log;
        self.builder.body(&transaction, &mut |position, block| {
            log.blocks[position as usize].copy_from_slice(block);
        });
        self
    }

    fn plan(&mut self) -> Result<Plan, ReplayError<Infallible>> {
        let (superblock, format) = Superblock::parse(&self.superblock.build()).expect("valid");
        Plan::new(&mut self.log, &superblock, &format, &|home| home < 1 << 40)
    }

    /// What the replay leaves at home, and how many copies were damaged.
    fn replay(&mut self) -> (BTreeMap<u64, Vec<u8>>, Summary) {
        let plan = self.plan().expect("a plan");
        let mut homes = BTreeMap::new();
        let mut last = None;
        for block in plan.blocks() {
            assert!(last.is_none_or(|last| last < block.home()), "ascending");
            last = Some(block.home());
            for copy in block.copies() {
                let mut buffer = vec![0; BLOCK_SIZE as usize];
                if self.log.read(copy.position, &mut buffer).expect("memory") == Content::AtHome {
                    break;
                }
                if copy.restore(plan.format(), &mut buffer) {
                    homes.insert(block.home(), buffer);
                    break;
                }
            }
        }
        (homes, *plan.summary())
    }
}

fn homes(expected: &[(u64, Vec<u8>)]) -> BTreeMap<u64, Vec<u8>> {
    expected.iter().cloned().collect()
}

const ALL: [Checksum; 4] = [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3];

#[test]
fn the_newest_copy_stays() {
    for checksum in ALL {
        for wide in [false, true] {
            let far = if wide { 0x12_0000_0007 } else { 7 };
            let mut case = Case::new(checksum, wide);
            case.commit(&[(far, data(1)), (3, data(2))], &[]).commit(&[(3, data(3)), (9, magic_data(4))], &[]);
            let (at_home, summary) = case.replay();
            assert_eq!(at_home, homes(&[(far, data(1)), (3, data(3)), (9, magic_data(4))]), "{checksum:?} {wide}");
            assert_eq!((summary.transactions, summary.tags, summary.blocks), (2, 4, 3));
            assert_eq!((summary.walk.end_sequence, summary.walk.next_sequence()), (3, 4));
            assert_eq!(summary.walk.end, End::NotAControlBlock);
            assert!(!summary.is_damaged());
        }
    }
}

#[test]
fn an_empty_log_has_nothing() {
    let mut case = Case::at(Checksum::V3, true, 0, 5, 64);
    let (at_home, summary) = case.replay();
    assert!(at_home.is_empty());
    assert_eq!((summary.walk.end, summary.transactions), (End::Empty, 0));
}

#[test]
fn an_uncommitted_transaction_never_happened() {
    let mut case = Case::new(Checksum::V3, true);
    case.commit(&[(3, data(1)), (4, data(1))], &[]).half(&[(3, data(2))], &[4]);
    assert_eq!(case.replay().0, homes(&[(3, data(1)), (4, data(1))]));
}

#[test]
fn revokes_cover_their_own_transaction_and_older_ones() {
    for wide in [false, true] {
        let mut case = Case::new(Checksum::V3, wide);
        case.commit(&[(3, data(1)), (4, data(1)), (5, data(1))], &[]);
        case.commit(&[(3, data(2)), (6, data(2))], &[3, 4, 99]);
        case.commit(&[(4, data(3))], &[]);
        let (at_home, summary) = case.replay();
        assert_eq!(at_home, homes(&[(4, data(3)), (5, data(1)), (6, data(2))]));
        assert_eq!((summary.revoke_records, summary.revoked), (3, 3));
    }
}

#[test]
fn positions_and_sequence_numbers_wrap() {
    for sequence in [u32::MAX, u32::MAX - 1, u32::MAX - 2, 0] {
        let mut case = Case::at(Checksum::V3, true, 60, sequence, 64);
        case.commit(&[(1, data(1)), (2, data(1)), (3, data(1))], &[]);
        case.commit(&[(2, data(2))], &[1]).commit(&[(3, data(3))], &[]);
        let (at_home, summary) = case.replay();
        assert_eq!(at_home, homes(&[(2, data(2)), (3, data(3))]));
        assert_eq!(summary.walk.end_sequence, sequence.wrapping_add(3));
    }
}

#[test]
fn a_damaged_copy_leaves_the_one_before() {
    for checksum in [Checksum::V2, Checksum::V3] {
        let mut case = Case::new(checksum, false);
        case.commit(&[(3, data(1))], &[]).commit(&[(3, data(2)), (4, data(2))], &[]);
        // Log: 1 descriptor, 2 data, 3 commit, 4 descriptor, 5 data of block 3, 6 data of block 4.
        case.log.blocks[5][100] ^= 1;
        assert_eq!(case.replay().0, homes(&[(3, data(1)), (4, data(2))]));
        case.log.blocks[6][100] ^= 1;
        assert_eq!(case.replay().0, homes(&[(3, data(1))]));
    }
}

#[test]
fn a_damaged_commit_ends_the_log() {
    for checksum in [Checksum::V1, Checksum::V2, Checksum::V3] {
        for asynchronous in [false, true] {
            let mut case = Case::new(checksum, false);
            case.builder.format.async_commit = asynchronous;
            case.superblock.features.incompat |= if asynchronous { Features::ASYNC_COMMIT } else { 0 };
            case.commit(&[(3, data(1))], &[]).commit(&[(3, data(2))], &[]).commit(&[(4, data(3))], &[]);
            // The second commit, log block 6.
            case.log.blocks[6][0x10] ^= 1;
            let (at_home, summary) = case.replay();
            assert_eq!(at_home, homes(&[(3, data(1))]), "{checksum:?} {asynchronous}");
            // With asynchronous commits it may just have been interrupted, unless (kind 1) another commit follows.
            let reported = !asynchronous || checksum == Checksum::V1;
            assert_eq!(summary.walk.failed_commit, reported.then_some(2), "{checksum:?} {asynchronous}");
            assert_eq!(summary.walk.end_sequence, 2);
        }
    }
}

#[test]
fn an_old_damaged_commit_ends_the_log_quietly() {
    let mut case = Case::new(Checksum::V3, false);
    case.commit(&[(3, data(1))], &[]).commit(&[(3, data(2))], &[]);
    case.log.blocks[6][0x31] = 0;
    case.log.blocks[6][0x37] ^= 0x80; // an earlier second, with the checksum left as it was
    let commit = build::commit(&case.format(), 2, 5, 0, None);
    case.log.blocks[6].copy_from_slice(&commit);
    case.log.blocks[6][0x10] ^= 1;
    let (at_home, summary) = case.replay();
    assert_eq!(at_home, homes(&[(3, data(1))]));
    assert_eq!((summary.walk.end, summary.walk.failed_commit), (End::Stale, None));
}

#[test]
fn a_damaged_descriptor_in_a_committed_transaction_fails_everything() {
    let mut case = Case::new(Checksum::V3, false);
    case.commit(&[(3, data(1))], &[]).commit(&[(3, data(2))], &[]);
    case.log.blocks[4][500] ^= 1;
    assert!(matches!(case.plan(), Err(ReplayError::Checksum { sequence: 2, position: 6 })));
    let mut case = Case::new(Checksum::V3, false);
    case.commit(&[(3, data(1))], &[]).commit(&[], &[3]);
    case.log.blocks[4][500] ^= 1;
    assert!(matches!(case.plan(), Err(ReplayError::Checksum { sequence: 2, position: 5 })));
}

#[test]
fn a_damaged_revoke_count_fails_everything_only_when_committed() {
    for committed in [true, false] {
        let mut case = Case::new(Checksum::None, false);
        case.commit(&[(3, data(1))], &[]);
        if committed {
            case.commit(&[], &[3]);
        } else {
            case.half(&[], &[3]);
        }
        case.log.blocks[4][12..16].copy_from_slice(&5000u32.to_be_bytes());
        if committed {
            assert!(matches!(case.plan(), Err(ReplayError::RevokeCount { position: 4, sequence: 2, .. })));
        } else {
            assert_eq!(case.replay().0, homes(&[(3, data(1))]));
        }
    }
}

#[test]
fn a_log_without_end_is_refused() {
    // Every block of the log is a revoke block of the same transaction.
    let mut case = Case::new(Checksum::None, false);
    let block = build::revoke(&case.format(), 1, &[5]);
    case.log.blocks.iter_mut().for_each(|place| place.copy_from_slice(&block));
    assert!(matches!(case.plan(), Err(ReplayError::Endless { sequence: 1 })));
}

#[test]
fn a_start_outside_the_journal_is_refused() {
    for start in [64, 4000] {
        let mut case = Case::new(Checksum::None, false);
        case.superblock.start = start;
        assert!(matches!(case.plan(), Err(ReplayError::OutsideLog { .. })));
    }
}

#[test]
fn blocks_out_of_bounds_are_counted_and_left_out() {
    let mut case = Case::new(Checksum::V3, true);
    case.commit(&[(3, data(1)), (1 << 40, data(2)), (u64::MAX, data(3))], &[]);
    let (at_home, summary) = case.replay();
    assert_eq!(at_home, homes(&[(3, data(1))]));
    assert_eq!(summary.out_of_bounds, 2);
    assert!(summary.is_damaged());
}

#[test]
fn a_copy_that_is_at_home_is_not_written_and_not_verified() {
    for checksum in ALL {
        let mut case = Case::new(checksum, false);
        case.commit(&[(3, data(1)), (4, data(1))], &[]).commit(&[(3, data(2))], &[]);
        // The newest copy of block 3 is home: the older one must not be written over it.
        case.log.at_home[6] = true;
        assert_eq!(case.replay().0, homes(&[(4, data(1))]), "{checksum:?}");
    }
    let mut case = Case::new(Checksum::V3, false);
    case.commit(&[(3, data(1))], &[]);
    case.log.at_home[1] = true;
    assert!(matches!(case.plan(), Err(ReplayError::NotHeld { position: 1 })));
}

#[test]
fn fast_commits_are_seen() {
    for (transaction, live) in [(2u8, true), (9, false)] {
        let mut case = Case::new(Checksum::V3, false);
        case.commit(&[(3, data(1))], &[]);
        case.superblock.features.incompat |= Features::FAST_COMMIT;
        case.superblock.num_fc_blocks = 10;
        let head = [9, 0, 8, 0, 0, 0, 0, 0, transaction, 0, 0, 0];
        case.log.blocks[55][..12].copy_from_slice(&head);
        assert_eq!(case.plan().expect("a plan").summary().fast_commits, live);
    }
}

#[test]
fn inspect_shows_every_transaction() {
    let mut case = Case::new(Checksum::V3, false);
    case.commit(&[(3, data(1)), (4, magic_data(1))], &[8]).half(&[(5, data(2))], &[]);
    case.log.blocks[3][9] ^= 1;
    let (superblock, format) = Superblock::parse(&case.superblock.build()).expect("valid");
    let mut seen = Vec::new();
    let walk = crate::inspect::inspect(&mut case.log, &superblock, &format, true, &mut |transaction| {
        seen.push(transaction.clone());
    })
    .expect("a walk");
    assert_eq!(walk.end_sequence, 2);
    assert_eq!(seen.len(), 2);
    assert_eq!((seen[0].sequence, seen[0].position), (1, 1));
    assert_eq!(seen[0].revokes, [8]);
    let tags: Vec<_> = seen[0].tags.iter().map(|tag| (tag.position, tag.tag.block, tag.checksum_ok)).collect();
    assert_eq!(tags, [(3, 3, Some(false)), (4, 4, Some(true))]);
    assert!(seen[0].tags[1].tag.escaped);
    assert_eq!(seen[0].commit.expect("committed").verdict, Verdict::Committed);
    assert_eq!(seen[1].commit, None);
}
