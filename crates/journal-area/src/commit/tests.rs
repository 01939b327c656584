//! A guest that writes to a page of its log while it is read.

use super::*;
use crate::LogShape;
use crate::table::Table;
use guest_memory::VmMemory;
use jbd2::build::{LogBuilder, SuperblockBuilder};
use jbd2::{Features, Superblock};
use std::sync::Mutex;

const BLOCK: usize = 1024;
const LOG_BLOCKS: u32 = 64;
/// Where the log begins.
const FIRST: u32 = 1;

/// A log that is open and empty.
struct Rig {
    pages: Pages,
    jcb: VmJcb,
    _directory: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let shape = LogShape { block_bytes: BLOCK as u32, log_blocks: LOG_BLOCKS, home_blocks: 1000 };
        let table = Table::create(&directory.path().join("table"), shape.block_bytes, LOG_BLOCKS).expect("a table");
        let pool =
            crate::pool::Pool::create(&directory.path().join("pool"), shape.block_bytes, LOG_BLOCKS).expect("a pool");
        let pages = Pages::new(VmMemory::new());
        let mut jcb = VmJcb::new(shape, Holding::Copy, Vec::new(), table, pool);
        let superblock = SuperblockBuilder { start: FIRST, sequence: 1, ..superblock() }.build();
        jcb.superblock_written(&pages, &superblock).expect("opened");
        Rig { pages, jcb, _directory: directory }
    }

    fn hold(&mut self, position: u32, content: Content) -> u32 {
        self.jcb.hold(&self.pages, &[LogWrite { position, content }], 0).committed
    }

    /// The log after this: it reads FIRST as a descriptor of three blocks, of which the second is a descriptor of the same transaction.
    fn with_a_descriptor_among_its_data() -> Self {
        let mut rig = Rig::new();
        rig.hold(FIRST + 2, Content::Bytes(descriptor(FIRST + 2, 2)));
        rig.hold(FIRST, Content::Bytes(descriptor(FIRST, 3)));
        [FIRST + 1, FIRST + 3].into_iter().for_each(|position| assert_eq!(rig.hold(position, data()), 0));
        assert_eq!((rig.jcb.partial.position, rig.jcb.partial.blocks), (FIRST + 4, 4));
        rig
    }
}

fn superblock() -> SuperblockBuilder {
    let features = Features { compat: 0, incompat: Features::REVOKE, ro_compat: 0 };
    SuperblockBuilder { block_size: BLOCK as u32, maxlen: LOG_BLOCKS, features, ..SuperblockBuilder::default() }
        .checksum(Checksum::None)
}

/// The log blocks of transaction 1 if it is one of `blocks` blocks from `position` on.
fn transaction(position: u32, blocks: u64) -> Vec<(u32, Vec<u8>)> {
    let (_, format) = Superblock::parse(&superblock().build()).expect("valid");
    let blocks = (0..blocks).map(|block| (100 + block, vec![7; BLOCK])).collect();
    let transaction = jbd2::build::Transaction { blocks, revokes: Vec::new(), seconds: 1 };
    let mut written = Vec::new();
    let mut take = |position, block: &[u8]| written.push((position, block.to_vec()));
    LogBuilder::new(format, position, 1).transaction(&transaction, &mut take);
    written
}

fn descriptor(position: u32, blocks: u64) -> Vec<u8> {
    transaction(position, blocks).swap_remove(0).1
}

fn commit() -> Content {
    Content::Bytes(transaction(FIRST, 1).pop().expect("a commit block").1)
}

fn data() -> Content {
    Content::Bytes(vec![7; BLOCK])
}

/// Data at the first look, and something else from then on.
fn becomes(block: Vec<u8>) -> Content {
    Content::Changing(Mutex::new([vec![7; BLOCK], block].into()))
}

/// What was looked at is not what is kept: what counts is what is kept.
#[test]
fn a_block_that_becomes_a_descriptor_while_it_is_held_is_read_as_one() {
    let mut rig = Rig::with_a_descriptor_among_its_data();
    // A descriptor of five blocks: what was read of the one before does not count.
    rig.hold(FIRST, becomes(descriptor(FIRST, 5)));
    (1..=5).for_each(|block| assert_eq!(rig.hold(FIRST + block, data()), 0));
    assert_eq!(rig.hold(FIRST + 6, commit()), 1);
    assert!(rig.jcb.contradiction.is_none());
    rig.jcb.check(&rig.pages).expect("the books are right");
}

/// The other way round, what was looked at as a descriptor is held as what it has become.
#[test]
fn a_descriptor_that_becomes_data_while_it_is_held_is_none() {
    let mut rig = Rig::with_a_descriptor_among_its_data();
    let contents = Mutex::new([descriptor(FIRST, 3), vec![7; BLOCK]].into());
    rig.hold(FIRST, Content::Changing(contents));
    assert_eq!(rig.hold(FIRST + 4, commit()), 0);
    rig.jcb.check(&rig.pages).expect("the books are right");
}

/// Two descriptors that are read over each other's ends are no transaction, and no reason to end.
#[test]
fn a_transaction_whose_descriptors_do_not_end_where_they_did_is_none() {
    for blocks in [1, 2, 4, 9] {
        let mut rig = Rig::with_a_descriptor_among_its_data();
        rig.hold(FIRST, becomes(descriptor(FIRST, blocks)));
        assert_eq!(rig.hold(FIRST + 4, commit()), 0, "{blocks}");
        rig.jcb.check(&rig.pages).expect("the books are right");
    }
    // As if it had become one between the last look and the moment when nobody can change it any more.
    let mut rig = Rig::with_a_descriptor_among_its_data();
    let slot = rig.jcb.pool.insert_block(&descriptor(FIRST, 1)).expect("memory");
    rig.jcb.set_location(&rig.pages, FIRST, Location::Block(slot));
    assert_eq!(rig.hold(FIRST + 4, commit()), 0);
    rig.jcb.check(&rig.pages).expect("the books are right");
}

/// What is revoked is in as many blocks as the log has room for, and counts all the same: after what the transaction itself writes.
#[test]
fn all_of_what_a_transaction_revokes_counts() {
    let mut rig = Rig::new();
    let (_, format) = Superblock::parse(&superblock().build()).expect("valid");
    let mut builder = LogBuilder::new(format, FIRST, 1);
    let mut commit = |rig: &mut Rig, blocks: std::ops::Range<u64>, revokes: Vec<u64>| {
        let blocks = blocks.map(|block| (block, vec![7; BLOCK])).collect();
        let transaction = jbd2::build::Transaction { blocks, revokes, seconds: 1 };
        let mut writes = Vec::new();
        builder.transaction(&transaction, &mut |position, block| {
            writes.push(LogWrite { position, content: Content::Bytes(block.to_vec()) });
        });
        let revoke_blocks = writes.iter().filter(|write| {
            matches!(&write.content, Content::Bytes(block) if jbd2::peek(block).is_some_and(|header| header.kind == Kind::Revoke))
        });
        let revoke_blocks = revoke_blocks.count();
        rig.jcb.tells_accepted = true;
        let outcome = rig.jcb.hold(&rig.pages, &writes, 0);
        assert_eq!(outcome.committed, 1);
        rig.jcb.check(&rig.pages).expect("the books are right");
        (revoke_blocks, outcome.accepted[0].revokes.len())
    };
    assert_eq!(commit(&mut rig, 100..108, Vec::new()), (0, 0));
    // Most of it again and again, as no kernel writes it; the two that are there are in the last block.
    let mut revokes = vec![999; 8000];
    revokes.extend([103, 200]);
    let (blocks, told) = commit(&mut rig, 200..202, revokes);
    assert!(blocks > 30, "{blocks} blocks of revokes");
    assert_eq!(told, 8002);
    assert_eq!(rig.jcb.counters.released_revoked, 2);
    let newest = |block| rig.jcb.newest(block).is_some();
    assert!(newest(102) && !newest(103) && !newest(200) && newest(201));
}

/// No budget counts it, and a guest can leave it uncommitted for as long as it likes.
#[test]
fn what_is_kept_of_a_transaction_before_it_is_committed_does_not_grow() {
    fn owns_nothing<T: Copy>(_: T) {}
    owns_nothing(crate::jcb::Partial::default());
}
