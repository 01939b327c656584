//! Writes of a guest that overlap one that waited: what its blocks had at home before is not what they have then.

use durability::{
    AnswerId, Durability, Freed, Kind, OperationId, Step, Transaction, Version, View, WhenAsked, WriteId,
};
use jbd2::Checksum;
use jbd2::build::SuperblockBuilder;
use std::io;
use std::time::Duration;

const BLOCK: u64 = 40;
const VERSION: Version = Version(7);

/// Every block is free, or none, and every version the same.
struct Shown {
    is_free: bool,
}

fn free() -> Shown {
    Shown { is_free: true }
}

impl View for Shown {
    fn made_durable(&mut self, _: u32, _: &[(u64, Version)]) {}
    fn at_home(&mut self, _: &[u64]) {}
    fn is_free(&mut self, _: u64) -> bool {
        self.is_free
    }
    fn content(&mut self, _: Version, into: &mut [u8]) -> io::Result<()> {
        into.fill(1);
        Ok(())
    }
    fn logged(&mut self, _: u32, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        Ok(())
    }
    fn committed_after(&mut self, _: std::ops::Range<u64>, _: u32) -> Vec<durability::Committed> {
        Vec::new()
    }
    fn wall_clock(&self) -> (u64, u32) {
        (0, 0)
    }
}

struct Rig {
    machine: Durability,
    now: Duration,
    steps: Vec<Step>,
}

impl Rig {
    fn operations(&mut self) -> Vec<OperationId> {
        let of = |step: &Step| match step {
            Step::Write { operation, .. } | Step::Flush { operation } => Some(*operation),
            _ => None,
        };
        let found = self.steps.iter().filter_map(of).collect();
        self.steps.retain(|step| of(step).is_none());
        found
    }

    fn write(&mut self, id: u64, blocks: std::ops::Range<u64>) -> bool {
        let (id, whole) = (WriteId(id), blocks.clone());
        self.machine.write_begins(
            self.now,
            id,
            Kind::Write,
            blocks,
            whole,
            WhenAsked::default(),
            &mut free(),
            &mut self.steps,
        )
    }

    /// All that is under way is done.
    fn come_to_rest(&mut self, view: &mut Shown) {
        loop {
            let operations = self.operations();
            if operations.is_empty() {
                break;
            }
            for operation in operations {
                self.machine.operation_done(self.now, operation, true, view, &mut self.steps);
            }
        }
    }

    /// A block is committed, its home write waits for the compound, and that is durable: it went home as an append.
    fn waited() -> Self {
        let superblock = SuperblockBuilder { maxlen: 64, start: 1, sequence: 2, ..SuperblockBuilder::default() }
            .checksum(Checksum::V3);
        let machine = Durability::opened(&superblock.build(), Duration::from_secs(1)).expect("a log");
        let mut rig = Rig { machine, now: Duration::ZERO, steps: Vec::new() };
        // The first compound makes storage a truth; what comes then may be an append.
        for (sequence, version) in [(2, Version(6)), (3, VERSION)] {
            let transaction = Transaction {
                sequence,
                blocks: vec![(BLOCK + u64::from(sequence == 2), version)],
                revokes: vec![],
                freed: Freed::Blocks(vec![]),
            };
            rig.machine.committed(rig.now, &transaction, AnswerId(1), &mut free(), &mut rig.steps);
            rig.now += Duration::from_secs(2);
            rig.machine.timer(rig.now, &mut free(), &mut rig.steps);
            if sequence == 3 {
                assert!(!rig.write(1, BLOCK..BLOCK + 1), "its compound is being made");
                assert!(rig.machine.settled_but_for(WriteId(1)).is_none(), "it may not go");
            }
            rig.come_to_rest(&mut free());
        }
        assert!(rig.steps.iter().any(|step| matches!(step, Step::Go(WriteId(1)))), "{:?}", rig.steps);
        rig
    }
}

#[test]
fn what_went_home_while_a_write_waited_is_known_when_it_may_go() {
    let mut rig = Rig::waited();
    assert_eq!(rig.machine.settled_but_for(WriteId(1)), Some(vec![VERSION]));
    assert_eq!(rig.machine.settled(BLOCK), None, "while it may be sent");
    rig.machine.write_unneeded(rig.now, WriteId(1), &mut free(), &mut rig.steps);
    assert_eq!(rig.machine.settled(BLOCK), Some(VERSION));
}

#[test]
fn another_write_to_its_place_ends_that() {
    for is_over in [false, true] {
        let mut rig = Rig::waited();
        assert!(rig.write(2, BLOCK - 1..BLOCK + 1));
        if is_over {
            rig.machine.write_ended(rig.now, WriteId(2), true, &mut free(), &mut rig.steps);
        }
        assert_eq!(rig.machine.settled_but_for(WriteId(1)), None);
        rig.machine.write_ended(rig.now, WriteId(1), true, &mut free(), &mut rig.steps);
        assert_eq!(rig.machine.settled(BLOCK), None);
    }
}

#[test]
fn a_newer_version_ends_that() {
    let mut rig = Rig::waited();
    let blocks = vec![(BLOCK, Version(8))];
    let transaction = Transaction { sequence: 4, blocks, revokes: vec![], freed: Freed::Blocks(vec![]) };
    rig.machine.committed(rig.now, &transaction, AnswerId(2), &mut free(), &mut rig.steps);
    assert_eq!(rig.machine.settled_but_for(WriteId(1)), None);
}

/// Whether the guest's next flush has to cover a write of these blocks.
fn has_to_be_covered(rig: &mut Rig, blocks: std::ops::Range<u64>) -> bool {
    assert!(rig.write(9, blocks));
    rig.machine.write_ended(rig.now, WriteId(9), true, &mut free(), &mut rig.steps)
}

#[test]
fn no_flush_has_to_cover_what_a_replay_writes_over() {
    let mut rig = Rig::waited();
    let logged = BLOCK + 2;
    // One that is written over: not free, so it is in the log.
    let blocks = vec![(logged, Version(9))];
    let transaction = Transaction { sequence: 4, blocks, revokes: vec![], freed: Freed::Blocks(vec![]) };
    let mut used = Shown { is_free: false };
    rig.machine.committed(rig.now, &transaction, AnswerId(2), &mut used, &mut rig.steps);
    rig.now += Duration::from_secs(2);
    rig.machine.timer(rig.now, &mut used, &mut rig.steps);
    rig.come_to_rest(&mut used);
    assert!(!has_to_be_covered(&mut rig, logged..logged + 1), "the log brings it back");
    assert!(has_to_be_covered(&mut rig, logged..logged + 2), "not all of it");
    assert!(has_to_be_covered(&mut rig, logged + 1..logged + 2), "none of it");
}
