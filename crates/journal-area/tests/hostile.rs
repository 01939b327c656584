//! What a hostile guest writes into its log never breaks the books, and never costs what was committed before.

use guest_memory::VmMemory;
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Features, Superblock};
use journal_area::{
    Content, Error, FoundLog, Holding, HomeWrite, JournalArea, LogId, LogShape, LogWrite, Outside, Over,
    SuperblockEffect,
};
use proptest::prelude::*;
use std::sync::Arc;

const BLOCK: usize = 1024;
const LOG_BLOCKS: u32 = 64;

struct Rig {
    directory: tempfile::TempDir,
    area: Arc<JournalArea>,
    log: LogId,
    superblock: SuperblockBuilder,
    builder: LogBuilder,
    serial: u64,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let area = JournalArea::new(&VmMemory::new(), u64::MAX);
        let shape = LogShape { block_bytes: BLOCK as u32, log_blocks: LOG_BLOCKS, home_blocks: 1000 };
        let log = area.make_log(directory.path(), "log", shape, Holding::Copy, Vec::new()).expect("a log");
        let features = Features { compat: 0, incompat: Features::REVOKE, ro_compat: 0 };
        let superblock = SuperblockBuilder {
            block_size: BLOCK as u32,
            maxlen: LOG_BLOCKS,
            features,
            ..SuperblockBuilder::default()
        }
        .checksum(Checksum::None);
        let (_, format) = Superblock::parse(&superblock.build()).expect("valid");
        Rig { directory, area, log, superblock, builder: LogBuilder::new(format, 1, 1), serial: 0 }
    }

    fn superblock(&self, change: impl FnOnce(&mut SuperblockBuilder)) -> Result<SuperblockEffect, Error> {
        let mut superblock = SuperblockBuilder { start: 1, sequence: 1, ..self.superblock.clone() };
        change(&mut superblock);
        self.area.superblock_written(self.log, &superblock.build())
    }

    fn commit(&mut self, blocks: impl Iterator<Item = u64>) -> u32 {
        let writes = self.blocks_of(blocks);
        self.hold(&writes)
    }

    fn hold(&self, writes: &[LogWrite]) -> u32 {
        self.area.hold(self.log, writes).committed
    }

    /// The log blocks of the next transaction.
    fn blocks_of(&mut self, blocks: impl Iterator<Item = u64>) -> Vec<LogWrite> {
        self.serial += 1;
        let serial = self.serial;
        let blocks = blocks.map(|block| (block, vec![serial as u8; BLOCK])).collect();
        let transaction = Transaction { blocks, revokes: Vec::new(), seconds: serial };
        let mut writes = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| {
            writes.push(LogWrite { position, content: Content::Bytes(block.to_vec()) });
        });
        writes
    }

    fn owed(&self) -> u64 {
        self.area.owed(self.log).blocks
    }

    fn write_home(&self, first: u64, count: u64) {
        match self.area.home_write_begins(self.log, first..first + count, &[], &Over::Unknown) {
            HomeWrite::Go { operation, .. } => {
                self.area.home_write_ended(self.log, operation, true);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_log_of_another_layout_is_not_held() {
    for change in [
        |superblock: &mut SuperblockBuilder| superblock.maxlen = 6,
        |superblock: &mut SuperblockBuilder| superblock.features.incompat |= 1 << 20,
        |superblock: &mut SuperblockBuilder| {
            superblock.features.incompat |= Features::FAST_COMMIT;
            superblock.num_fc_blocks = 4;
        },
        |superblock: &mut SuperblockBuilder| superblock.features.incompat |= Features::CSUM_V3,
    ] {
        let mut rig = Rig::new();
        assert_eq!(rig.superblock(|_| {}).expect("held"), SuperblockEffect::Opened);
        assert_eq!(rig.commit(0..8), 1);
        assert_eq!(rig.commit(8..9), 1);
        assert_eq!(rig.superblock(change).expect("judged"), SuperblockEffect::Foreign);
        rig.area.check().expect("the books are right");
        assert_eq!(rig.owed(), 9, "what is held can still be put at its place");
        rig.area.close(rig.log);
        rig.area.check().expect("the books are right");
        assert_eq!(rig.owed(), 0, "nothing of the old log means anything in the new one");
    }
}

/// Only a kernel could replay it then, from its own place, and there blocks would be missing.
#[test]
fn a_log_of_which_blocks_were_let_go_gets_no_features_that_nobody_here_reads() {
    for change in [
        |superblock: &mut SuperblockBuilder| superblock.features.incompat |= 1 << 20,
        |superblock: &mut SuperblockBuilder| {
            superblock.features.incompat |= Features::FAST_COMMIT;
            superblock.num_fc_blocks = 4;
        },
    ] {
        let mut rig = Rig::new();
        assert_eq!(rig.superblock(|_| {}).expect("held"), SuperblockEffect::Opened);
        assert_eq!(rig.commit(0..8), 1);
        for (operation, _) in rig.area.host_writes(rig.log, 2, false) {
            rig.area.home_write_ended(rig.log, operation, true);
        }
        let owed = rig.owed();
        assert_eq!(owed, 6, "some were let go");
        assert!(matches!(rig.superblock(change), Err(Error::Features)));
        rig.area.check().expect("the books are right");
        assert_eq!(rig.owed(), owed, "the log is as it was");
        assert_eq!(rig.commit(8..9), 1);
        assert_eq!(rig.superblock(|_| {}).expect("held"), SuperblockEffect::GoesOn);
        // With none of them in the log any more, there is nothing to be missed.
        let (position, sequence) = (rig.builder.position, rig.builder.sequence);
        let begins = |superblock: &mut SuperblockBuilder| {
            change(superblock);
            (superblock.start, superblock.sequence) = (position, sequence);
        };
        assert_eq!(rig.superblock(begins).expect("judged"), SuperblockEffect::Foreign);
    }
}

/// Of a log in which nothing is committed yet only the UUID tells it.
#[test]
fn another_journal_whose_numbers_are_the_same_is_another_one() {
    for committed in [0, 2] {
        let mut rig = Rig::new();
        assert_eq!(rig.superblock(|_| {}).expect("held"), SuperblockEffect::Opened);
        (0..committed).for_each(|block| assert_eq!(rig.commit(block..block + 1), 1));
        assert_eq!(rig.superblock(|_| {}).expect("held"), SuperblockEffect::GoesOn);
        assert_eq!(rig.superblock(|superblock| superblock.uuid[3] ^= 1).expect("judged"), SuperblockEffect::Foreign);
    }
}

/// A kernel begins a transaction when it was told that the one before is there.
#[test]
fn two_transactions_that_are_complete_at_once_are_no_kernels() {
    let mut rig = Rig::new();
    assert_eq!(rig.superblock(|_| {}).expect("held"), SuperblockEffect::Opened);
    let (first, second) = (rig.blocks_of(0..3), rig.blocks_of(3..5));
    let (begin, rest) = first.split_first().expect("a descriptor");
    assert_eq!(rig.hold(rest), 0);
    assert_eq!(rig.hold(&second), 0);
    assert!(rig.area.contradiction(rig.log).is_none());
    assert_eq!(rig.hold(std::slice::from_ref(begin)), 1);
    let why = rig.area.contradiction(rig.log).expect("somebody else has written them");
    assert!(why.contains("at the same moment"), "{why}");
}

#[test]
fn a_log_that_runs_over_its_own_beginning_is_not_followed() {
    for per_transaction in 1..40 {
        let mut rig = Rig::new();
        rig.superblock(|_| {}).expect("held");
        let mut committed = 0;
        for round in 0..200 {
            committed += rig.commit((0..per_transaction).map(|block| (round * 7 + block * 3) % 1000));
            rig.area.check().expect("the books are right");
            rig.write_home(round * 5, 3);
        }
        assert!(committed * (per_transaction as u32 + 2) < LOG_BLOCKS, "{committed} of {per_transaction} blocks");
        for (operation, _) in rig.area.host_writes(rig.log, 1000, false) {
            rig.area.home_write_ended(rig.log, operation, true);
        }
        rig.area.check().expect("the books are right");
        rig.superblock(|superblock| superblock.start = 0).expect("closed");
        rig.area.check().expect("the books are right");
    }
}

#[test]
fn the_table_of_a_closed_log_is_not_touched() {
    let rig = Rig::new();
    let path = |ending: &str| rig.directory.path().join(format!("log.{ending}"));
    let allocated = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path("table")).expect("there"));
    let before = allocated();
    rig.superblock(|superblock| superblock.start = 0).expect("closed");
    assert!(!FoundLog::open(&path("table"), &path("pool"), Vec::new()).expect("a good table").is_open());
    // A hole that is touched in tmpfs takes memory, and ends the process when there is none.
    assert_eq!(allocated(), before);
}

/// A log that proved to be none of a kernel's keeps the layout in which it was read, whatever the guest says of it afterwards.
#[test]
fn a_log_that_contradicts_itself_keeps_its_layout() {
    let changes: [fn(&mut SuperblockBuilder); 3] = [
        |superblock| superblock.features.incompat |= 1 << 20,
        |superblock| superblock.maxlen = 6,
        |superblock| superblock.features.incompat |= Features::WIDE,
    ];
    for change in changes {
        for is_closed in [false, true] {
            let mut rig = Rig::new();
            assert_eq!(rig.superblock(|_| {}).expect("held"), SuperblockEffect::Opened);
            assert_eq!((rig.commit(0..1), rig.commit(1..2)), (1, 1));
            // Behind the end of the file system.
            rig.commit(5000..5001);
            assert!(rig.area.contradiction(rig.log).is_some());
            _ = rig.superblock(change);
            rig.area.check().expect("the books are right");
            if is_closed {
                rig.superblock(|superblock| superblock.start = 0).expect("closed");
            } else {
                rig.hold(&[LogWrite { position: 2, content: Content::Bytes(vec![9; BLOCK]) }]);
            }
            rig.area.check().expect("the books are right");
        }
    }
}

/// What the area reads of storage: zeros.
struct Zeros;

impl Outside for Zeros {
    fn home(&mut self, _block: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(0);
        Ok(())
    }

    fn stored(&mut self, _position: u32, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(0);
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Transactions that a kernel could write, or with a block behind the end of the file system.
    Commit {
        first: u64,
        count: u64,
    },
    /// All of one but this part.
    Torn {
        first: u64,
        count: u64,
        left_out: usize,
    },
    /// Without memory for what is not a control block: it goes to its own place.
    Short {
        first: u64,
        count: u64,
    },
    /// What was written once is written elsewhere.
    Again {
        which: usize,
        position: u32,
    },
    Noise {
        position: u32,
        byte: u8,
    },
    Superblock {
        maxlen: u32,
        features: u32,
        start: u32,
        sequence: u32,
    },
    /// The writer goes on elsewhere.
    Jump {
        position: u32,
        sequence: u32,
    },
    WriteHome {
        first: u64,
        count: u64,
    },
    HostWrites,
    Show {
        position: u32,
    },
    Discard {
        first: u64,
    },
    Rest,
}

/// Numbers near those that matter.
fn step() -> impl Strategy<Value = Step> {
    let position = || prop_oneof![3 => 0..12u32, 1 => 0..LOG_BLOCKS, 1 => 56..LOG_BLOCKS];
    let home = || prop_oneof![4 => 0..12u64, 1 => 0..990u64];
    let features = prop_oneof![
        6 => Just(0),
        1 => Just(1u32 << 20),
        1 => Just(Features::CSUM_V3),
        1 => Just(Features::WIDE),
        1 => Just(Features::FAST_COMMIT)
    ];
    let maxlen = prop_oneof![4 => Just(LOG_BLOCKS), 1 => Just(6u32), 1 => 5..LOG_BLOCKS];
    prop_oneof![
        8 => (home(), 1..6u64).prop_map(|(first, count)| Step::Commit { first, count }),
        1 => (998..1003u64, 1..3u64).prop_map(|(first, count)| Step::Commit { first, count }),
        1 => (home(), 1..6u64, 0..8usize).prop_map(|(first, count, left_out)| Step::Torn { first, count, left_out }),
        2 => (home(), 1..6u64).prop_map(|(first, count)| Step::Short { first, count }),
        2 => (0..200usize, position()).prop_map(|(which, position)| Step::Again { which, position }),
        2 => (position(), any::<u8>()).prop_map(|(position, byte)| Step::Noise { position, byte }),
        6 => (maxlen, features, position(), 0..4u32)
            .prop_map(|(maxlen, features, start, sequence)| Step::Superblock { maxlen, features, start, sequence }),
        1 => (position(), 0..4u32).prop_map(|(position, sequence)| Step::Jump { position, sequence }),
        4 => (home(), 1..6u64).prop_map(|(first, count)| Step::WriteHome { first, count }),
        1 => Just(Step::HostWrites),
        2 => position().prop_map(|position| Step::Show { position }),
        1 => home().prop_map(|first| Step::Discard { first }),
        1 => Just(Step::Rest),
    ]
}

/// How often versions were on storage, in all cases.
static STORED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    /// Superblocks, log blocks and home writes in any order, of any layout, never break the books: nothing panics, and nothing goes on for ever.
    fn any_order_of_writes(steps in proptest::collection::vec(step(), 1..60)) {
        let mut rig = Rig::new();
        let mut written: Vec<LogWrite> = Vec::new();
        let mut buffer = vec![0; BLOCK];
        let mut stored = 0;
        rig.superblock(|_| {}).expect("held");
        for step in steps {
            match step {
                Step::Commit { first, count } => {
                    let writes = rig.blocks_of(first..first + count);
                    rig.hold(&writes);
                    written.extend(writes);
                }
                Step::Torn { first, count, left_out } => {
                    let mut writes = rig.blocks_of(first..first + count);
                    writes.remove(left_out % writes.len());
                    rig.hold(&writes);
                }
                Step::Short { first, count } => {
                    for write in rig.blocks_of(first..first + count) {
                        let Content::Bytes(bytes) = &write.content else { continue };
                        guest_memory::simulated_room::set_full(jbd2::peek(bytes).is_none());
                        let outcome = rig.area.hold(rig.log, std::slice::from_ref(&write));
                        guest_memory::simulated_room::set_full(false);
                        if !outcome.no_memory.is_empty() {
                            rig.area.stored(rig.log, write.position);
                        }
                        stored += rig.area.owed(rig.log).stored_blocks;
                    }
                }
                Step::Again { which, position } => {
                    if let Some(LogWrite { content: Content::Bytes(bytes), .. }) = written.get(which) {
                        rig.hold(&[LogWrite { position, content: Content::Bytes(bytes.clone()) }]);
                    }
                }
                Step::Noise { position, byte } => {
                    rig.hold(&[LogWrite { position, content: Content::Bytes(vec![byte; BLOCK]) }]);
                }
                Step::Superblock { maxlen, features, start, sequence } => {
                    let (position, next) = (rig.builder.position, rig.builder.sequence);
                    let effect = rig.superblock(|superblock| {
                        superblock.maxlen = maxlen;
                        superblock.features.incompat |= features;
                        superblock.num_fc_blocks = if features == Features::FAST_COMMIT { 4 } else { 0 };
                        // Where the writer is, or anywhere.
                        superblock.start = if sequence < 2 { position } else { start };
                        superblock.sequence = next.wrapping_add(sequence % 2);
                    });
                    if matches!(effect, Ok(SuperblockEffect::Foreign | SuperblockEffect::NotALog)) && sequence == 3 {
                        rig.area.close(rig.log);
                    }
                    if matches!(effect, Ok(SuperblockEffect::GoesOn | SuperblockEffect::Opened)) && sequence == 1 {
                        rig.builder.sequence = next.wrapping_add(1);
                    }
                }
                Step::Jump { position, sequence } => {
                    if rig.builder.format.contains(position) {
                        rig.builder.position = position;
                        rig.builder.sequence = rig.builder.sequence.wrapping_sub(sequence);
                    }
                }
                Step::WriteHome { first, count } => {
                    if let HomeWrite::Go { operation, .. } =
                        rig.area.home_write_begins(rig.log, first..first + count, &[], &Over::Unknown)
                    {
                        rig.area.home_write_ended(rig.log, operation, true);
                    }
                }
                Step::HostWrites => {
                    for (operation, _) in rig.area.host_writes(rig.log, 4, false) {
                        rig.area.home_write_ended(rig.log, operation, true);
                    }
                }
                Step::Show { position } => _ = rig.area.show(rig.log, position, &mut buffer, &mut Zeros),
                Step::Discard { first } => rig.area.discarded(rig.log, first..first + 3),
                Step::Rest => rig.area.rest(rig.log),
            }
            prop_assert_eq!(rig.area.check(), Ok(()));
        }
        STORED.fetch_add(stored as usize, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn no_order_of_writes_breaks_the_books() {
    any_order_of_writes();
    assert!(STORED.load(std::sync::atomic::Ordering::Relaxed) > 1000, "versions are on storage often enough");
}
