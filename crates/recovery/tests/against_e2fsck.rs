//! Random journals with random damage, recovered by us on one copy and by `e2fsck -E journal_only -y` on another, compared
//! block for block.
//!
//! Known differences, masked here one by one:
//!
//! * **The judge refuses and so do we.** When jbd2 fails the whole recovery, e2fsck writes no block but empties the log; we
//!   change nothing (exit 3). Compared: all blocks but the superblock's and the journal's.
//! * **`s_wtime`, `s_kbytes_written`, the checksum over them**: e2fsck counts its own writes and notes the time.
//! * **`s_state` and `s_sequence` after bad data blocks**: e2fsck clears the valid bit and leaves `s_sequence`; we clear it,
//!   set the error bit as well, and advance `s_sequence` past all that is in the log.
//! * **Copies whose checksum is bad but that a good newer copy supersedes**: e2fsck notices, we do not read them. The blocks
//!   are the same; the state bits are not compared when the judge reports such damage.
//! * **Tags outside the file system, or inside the journal**: e2fsck writes there (beyond the end it makes the image
//!   longer); we do not. Where its byte counts past 2^64, that is a block of the image again: e2fsck writes a copy there that
//!   belongs elsewhere. Compared: the file system's own blocks, without the journal's and those.

mod common;

use common::{Copy, Image, LogShape, Shape, cases, differing_blocks, e2fsck, open_log, scratch, write_log};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Checksum, Content, Descriptor, LogRead, MAGIC, Place, ReplayError, Visitor, walk};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use recovery::Status;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[derive(Clone, Debug)]
struct Change {
    /// Which of the free blocks.
    home: prop::sample::Index,
    value: u8,
    /// Begins with the journal's magic number, so that it must be escaped.
    is_magic: bool,
}

#[derive(Clone, Debug)]
struct Step {
    changes: Vec<Change>,
    revokes: Vec<prop::sample::Index>,
    /// Commit time, counted from the one before.
    seconds: i8,
}

#[derive(Clone, Debug)]
enum Damage {
    Bit(prop::sample::Index, prop::sample::Index),
    HeadBit(prop::sample::Index, u16),
    Zero(prop::sample::Index),
    Copy(prop::sample::Index, prop::sample::Index),
    Sequence(prop::sample::Index, i8),
    Kind(prop::sample::Index, u8),
    CutOff(prop::sample::Index, prop::sample::Index),
}

#[derive(Clone, Debug)]
struct Case {
    image: usize,
    checksum: Checksum,
    wide: bool,
    async_commit: bool,
    version_1: bool,
    start: prop::sample::Index,
    near_end: bool,
    sequence: u32,
    errno: bool,
    tags_max: usize,
    omit_transaction_checksum: bool,
    steps: Vec<Step>,
    last_uncommitted: bool,
    /// Write an old lap of the log first, so that stale blocks follow the end.
    stale_lap: bool,
    damage: Vec<Damage>,
    /// Also journal the superblock.
    with_superblock: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let change = (any::<prop::sample::Index>(), any::<u8>(), prop::bool::weighted(0.2))
        .prop_map(|(home, value, is_magic)| Change { home, value, is_magic });
    (
        prop::collection::vec(change, 0..24),
        prop_oneof![3 => Just(Vec::new()), 2 => prop::collection::vec(any::<prop::sample::Index>(), 1..40)],
        prop_oneof![8 => 0i8..3, 1 => -3i8..0],
    )
        .prop_map(|(changes, revokes, seconds)| Step { changes, revokes, seconds })
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        (index(), index()).prop_map(|(block, bit)| Damage::Bit(block, bit)),
        (index(), 0u16..1024).prop_map(|(block, bit)| Damage::HeadBit(block, bit)),
        index().prop_map(Damage::Zero),
        (index(), index()).prop_map(|(from, to)| Damage::Copy(from, to)),
        (index(), -2i8..3).prop_map(|(block, by)| Damage::Sequence(block, by)),
        (index(), 0u8..7).prop_map(|(block, kind)| Damage::Kind(block, kind)),
        (index(), index()).prop_map(|(block, at)| Damage::CutOff(block, at)),
    ]
}

fn case(images: usize) -> impl Strategy<Value = Case> {
    let checksum = prop_oneof![Just(Checksum::None), Just(Checksum::V1), Just(Checksum::V2), Just(Checksum::V3)];
    let sequence = prop_oneof![2 => any::<u32>(), 1 => (0u32..12).prop_map(|n| 0u32.wrapping_sub(n))];
    (
        (0..images, checksum, any::<bool>(), prop::bool::weighted(0.25), prop::bool::weighted(0.1)),
        (any::<prop::sample::Index>(), prop::bool::weighted(0.3), sequence, prop::bool::weighted(0.1)),
        (prop_oneof![2 => Just(0usize), 1 => 1usize..9], prop::bool::weighted(0.2), prop::bool::weighted(0.3)),
        prop::collection::vec(step(), 0..10),
        (any::<bool>(), prop::bool::weighted(0.3)),
        prop_oneof![1 => Just(Vec::new()), 2 => prop::collection::vec(damage(), 1..4)],
    )
        .prop_map(|(what, place, how, steps, (last_uncommitted, with_superblock), damage)| {
            let (image, mut checksum, mut wide, mut async_commit, version_1) = what;
            let (start, near_end, sequence, errno) = place;
            let (tags_max, omit_transaction_checksum, stale_lap) = how;
            if version_1 {
                (checksum, wide, async_commit) = (Checksum::None, false, false);
            }
            Case {
                image,
                checksum,
                wide,
                async_commit,
                version_1,
                start,
                near_end,
                sequence,
                errno,
                tags_max,
                omit_transaction_checksum,
                steps,
                last_uncommitted,
                stale_lap,
                damage,
                with_superblock,
            }
        })
}

fn content(image: &Image, change: &Change) -> Vec<u8> {
    let mut data = vec![change.value; image.shape.block_size as usize];
    if change.is_magic {
        data[..4].copy_from_slice(&MAGIC.to_be_bytes());
    }
    data
}

/// The block with the superblock as a guest would journal it: with another label.
fn superblock_block(image: &Image, copy: &Copy) -> (u64, Vec<u8>) {
    let size = image.shape.block_size as usize;
    let block = 1024 / size;
    let mut data = copy.bytes()[block * size..][..size].to_vec();
    let inside = 1024 % size;
    data[inside + 0x78..inside + 0x80].copy_from_slice(b"relabel!");
    extfs::SuperblockEdit::new(&mut data[inside..inside + 1024]).expect("a superblock").seal();
    (block as u64, data)
}

fn transactions(image: &Image, copy: &Copy, case: &Case) -> Vec<Transaction> {
    let mut seconds = 1_000_000i64;
    let mut transactions: Vec<Transaction> = case
        .steps
        .iter()
        .map(|step| {
            seconds += i64::from(step.seconds);
            let mut blocks: Vec<(u64, Vec<u8>)> =
                step.changes.iter().map(|change| (*change.home.get(&image.homes), content(image, change))).collect();
            // jbd2 has a block only once in a transaction; of two, the builder must keep one.
            blocks.sort_by_key(|(block, _)| *block);
            blocks.dedup_by_key(|(block, _)| *block);
            Transaction {
                blocks,
                revokes: step.revokes.iter().map(|home| *home.get(&image.homes)).collect(),
                seconds: seconds as u64,
            }
        })
        .collect();
    if case.with_superblock
        && let Some(first) = transactions.first_mut()
    {
        first.blocks.push(superblock_block(image, copy));
    }
    transactions
}

fn apply(damage: &Damage, image: &Image, copy: &Copy, positions: &[u32]) {
    let file = copy.log_file();
    let size = image.shape.block_size as usize;
    let read = |position: u32| {
        let mut block = vec![0; size];
        file.read_exact_at(&mut block, image.log_offset(position)).expect("a block");
        block
    };
    let (position, block) = match damage {
        Damage::Bit(at, bit) => {
            let (position, bit) = (*at.get(positions), bit.index(size * 8));
            let mut block = read(position);
            block[bit / 8] ^= 1 << (bit % 8);
            (position, block)
        }
        Damage::HeadBit(at, bit) => {
            let position = *at.get(positions);
            let mut block = read(position);
            block[usize::from(bit / 8)] ^= 1 << (bit % 8);
            (position, block)
        }
        Damage::Zero(at) => (*at.get(positions), vec![0; size]),
        Damage::Copy(from, to) => (*to.get(positions), read(*from.get(positions))),
        Damage::Sequence(at, by) => {
            let position = *at.get(positions);
            let mut block = read(position);
            let sequence = u32::from_be_bytes([block[8], block[9], block[10], block[11]]);
            block[8..12].copy_from_slice(&sequence.wrapping_add(*by as u32).to_be_bytes());
            (position, block)
        }
        Damage::Kind(at, kind) => {
            let position = *at.get(positions);
            let mut block = read(position);
            block[7] = *kind;
            (position, block)
        }
        Damage::CutOff(at, from) => {
            let position = *at.get(positions);
            let mut block = read(position);
            let sector = 512 * from.index(size / 512);
            block[sector..].fill(0);
            (position, block)
        }
    };
    file.write_all_at(&block, image.log_offset(position)).expect("room");
}

fn prepare(image: &Image, copy: &Copy, case: &Case) {
    // Read before the log is opened: what a guest journals does not depend on it.
    let transactions = transactions(image, copy, case);
    let mut shape = LogShape {
        checksum: case.checksum,
        wide: case.wide,
        async_commit: case.async_commit,
        version_1: case.version_1,
        start: 1,
        sequence: case.sequence,
        errno: if case.errno { -5 } else { 0 },
    };
    let (_, format) = open_log(image, copy, &shape);
    let log_blocks = format.log_blocks();
    shape.start = if case.near_end {
        format.last - 1 - case.start.index(20) as u32
    } else {
        format.first + case.start.index(log_blocks as usize) as u32
    };
    open_log(image, copy, &shape);
    let mut builder = LogBuilder::new(format, shape.start, case.sequence);
    builder.tags_max = case.tags_max;
    builder.omit_transaction_checksum = case.omit_transaction_checksum;
    if case.stale_lap {
        let mut stale = builder.clone();
        stale.sequence = case.sequence.wrapping_sub(1);
        let filler: Vec<Transaction> = transactions.iter().rev().cloned().collect();
        write_log(image, copy, stale, &filler, false);
    }
    let (builder, mut positions) = write_log(image, copy, builder, &transactions, case.last_uncommitted);
    positions.push(builder.position);
    for damage in &case.damage {
        apply(damage, image, copy, &positions);
    }
}

const STATE: std::ops::Range<usize> = 0x3a..0x3c;

/// Superblock fields that e2fsck alone touches: `s_wtime`, `s_kbytes_written`, the checksum.
const MASKED: [std::ops::Range<usize>; 3] = [0x30..0x34, 0x178..0x180, 0x3fc..0x400];

fn masked_superblock(bytes: &[u8], with_state: bool) -> Vec<u8> {
    let mut raw = bytes[1024..2048].to_vec();
    for range in MASKED {
        raw[range].fill(0);
    }
    if !with_state {
        raw[STATE].fill(0);
    }
    raw
}

fn journal_superblock(image: &Image, copy: &Copy) -> jbd2::Superblock {
    let mut raw = vec![0; image.shape.block_size as usize];
    let offset = image.log_offset(image.superblock_position());
    copy.log_file().read_exact_at(&mut raw, offset).expect("a journal superblock");
    let superblock = jbd2::Superblock::decode(&raw).expect("a journal superblock");
    superblock.format().expect("a good journal superblock");
    superblock
}

/// A log as it lies in an image or on a device of its own.
struct LogIn<'a>(&'a Image, File);

impl LogRead for LogIn<'_> {
    type Error = std::io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::io::Result<Content> {
        self.1.read_exact_at(buffer, self.0.log_offset(position))?;
        Ok(Content::Present)
    }
}

/// The blocks of the image that e2fsck takes for others, far beyond its end: the byte where those begin does not fit into 64 bits.
fn counted_around(image: &Image, copy: &Copy) -> Vec<u64> {
    struct Around(u64, Vec<u64>);
    impl Visitor<LogIn<'_>> for Around {
        fn descriptor(
            &mut self,
            _log: &mut LogIn<'_>,
            _place: Place,
            descriptor: &Descriptor<'_>,
            _checksum_ok: bool,
        ) -> Result<(), ReplayError<std::io::Error>> {
            let beyond = descriptor.tags().map(|tag| tag.block).filter(|block| block.checked_mul(self.0).is_none());
            self.1.extend(beyond.map(|block| block.wrapping_mul(self.0) / self.0));
            Ok(())
        }
    }
    let superblock = journal_superblock(image, copy);
    let format = superblock.format().expect("a good journal superblock");
    let mut around = Around(image.shape.block_size.into(), Vec::new());
    // Of a log that is refused nothing is written.
    let _ = walk(&mut LogIn(image, copy.log_file()), &format, superblock.start, superblock.sequence, &mut around);
    around.1
}

fn check(image: &Image, case: &Case, directory: &Path) -> Result<(), TestCaseError> {
    let theirs = image.copy_to(directory, "theirs");
    prepare(image, &theirs, case);
    let ours = Copy {
        path: directory.join("ours"),
        journal_path: theirs.journal_path.as_ref().map(|_| directory.join("ours.journal")),
    };
    std::fs::copy(&theirs.path, &ours.path).expect("room");
    if let (Some(from), Some(to)) = (&theirs.journal_path, &ours.journal_path) {
        std::fs::copy(from, to).expect("room");
    }
    let before = (ours.bytes(), ours.journal_bytes());
    let around = counted_around(image, &ours);
    let (code, said) = e2fsck(&theirs.path, theirs.journal_path.as_deref());
    // A tag may name a block terabytes beyond the end: e2fsck writes there, and an image file grows. A disk would not.
    let file = std::fs::File::options().write(true).open(&theirs.path).expect("an image");
    file.set_len(before.0.len() as u64).expect("it was as long before");
    let dry = ours.recover(true);
    prop_assert_eq!(&(ours.bytes(), ours.journal_bytes()), &before, "a dry run writes nothing");
    let result = ours.recover(false);
    prop_assert_eq!(dry.is_ok(), result.is_ok());
    prop_assert_eq!(ours.length(), before.0.len() as u64, "nothing is written beyond the end");
    let after = ours.bytes();
    let judged = theirs.bytes();
    let size = image.shape.block_size;
    let excluded = image.journal_blocks();
    let superblock_block = u64::from(1024 / size);
    let differ: Vec<u64> = differing_blocks(&judged, &after, size, image.file_system.superblock.blocks_count)
        .into_iter()
        .filter(|block| !excluded.contains(block) && !around.contains(block) && *block != superblock_block)
        .collect();
    prop_assert!(differ.is_empty(), "{:?} differ; e2fsck {:?}: {}; ours: {:?}", differ, code, said, result);
    let complaints = ["while recovering journal", "Journal checksum error", "Journal corrupted"];
    let complains = complaints.iter().any(|text| said.contains(text));
    match result {
        Err(error) => {
            prop_assert!(error.is_refusal(), "{}", error);
            prop_assert!(complains, "we refuse ({}), e2fsck does not: {}", error, said);
            prop_assert_eq!((after, ours.journal_bytes()), before, "a refusal changes nothing");
        }
        Ok(report) => {
            // Damage that we found, or that we need not have found.
            let is_damaged = report.status == Status::Damaged;
            prop_assert!(!complains || is_damaged || report.transactions > 0, "{:?}: {}", report, said);
            let with_state = !complains && !is_damaged;
            // In a log without checksums, damage can put anything where the superblock belongs: both do.
            let is_file_system =
                report.notes.iter().all(|note| !note.contains("superblock")) && !around.contains(&superblock_block);
            if is_file_system {
                prop_assert_eq!(
                    masked_superblock(&judged, with_state),
                    masked_superblock(&after, with_state),
                    "superblock; e2fsck: {}",
                    said
                );
            }
            let superblock = journal_superblock(image, &ours);
            let judge = journal_superblock(image, &theirs);
            prop_assert_eq!((superblock.start, superblock.errno), (0, 0), "{:?} e2fsck: {}", report, said);
            prop_assert_eq!(judge.start, 0, "{:?} e2fsck {:?}: {}", report, code, said);
            if !complains {
                prop_assert_eq!(superblock.sequence, judge.sequence, "{:?} e2fsck: {}", report, said);
            }
            if !is_file_system {
                return Ok(());
            }
            let again = ours.recover(false).expect("clean");
            prop_assert_eq!(again.status, Status::Clean);
            prop_assert_eq!(ours.bytes(), after, "recovering twice is recovering once");
        }
    }
    Ok(())
}

/// Without checksums, a damaged tag can name any block.
#[test]
fn a_tag_that_names_a_block_far_beyond_the_disk() {
    let directory = scratch();
    let shape = Shape { block_size: 1024, external: false, ext3: false, wide: false };
    let image = Image::make(directory.path(), shape);
    let change = |is_first| Change { home: index(is_first), value: 0x5a, is_magic: false };
    // The high halves of the two tags' block numbers are bytes 20 to 24 of the descriptor block, and 48 to 52.
    for bit in [20 * 8 + 7, 22 * 8, 23 * 8, 23 * 8 + 3, 51 * 8, 51 * 8 + 1, 51 * 8 + 4] {
        let case = Case {
            image: 0,
            checksum: Checksum::None,
            wide: true,
            async_commit: false,
            version_1: false,
            start: index(true),
            near_end: false,
            sequence: 0,
            errno: false,
            tags_max: 0,
            omit_transaction_checksum: false,
            steps: vec![Step { changes: vec![change(true), change(false)], revokes: Vec::new(), seconds: 0 }],
            last_uncommitted: false,
            stale_lap: false,
            damage: vec![Damage::HeadBit(index(true), bit)],
            with_superblock: false,
        };
        check(&image, &case, directory.path()).unwrap_or_else(|error| panic!("bit {bit}: {error}"));
    }
}

/// The first of anything, or another one.
fn index(is_first: bool) -> prop::sample::Index {
    let mut tree = any::<prop::sample::Index>().new_tree(&mut TestRunner::deterministic()).expect("an index");
    while is_first && tree.simplify() {}
    tree.current()
}

#[test]
fn random_journals_with_random_damage() {
    let directory = scratch();
    let mut images = Vec::new();
    for (block_size, external, ext3, wide) in [
        (1024, false, false, false),
        (1024, true, false, true),
        (1024, false, true, false),
        (2048, false, false, true),
        (4096, false, false, true),
        (4096, true, true, false),
    ] {
        images.push(Image::make(directory.path(), Shape { block_size, external, ext3, wide }));
    }
    let config = Config { cases: cases(96), failure_persistence: None, max_shrink_iters: 300, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let outcome = runner.run(&case(images.len()), |case| check(&images[case.image], &case, directory.path()));
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
