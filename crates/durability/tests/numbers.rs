//! Numbers of compounds are used once, also those of compounds that came to nothing: what of them is on storage has the number.

use durability::{AnswerId, Durability, Freed, OperationId, Place, Step, Transaction, Version, View};
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, Superblock};
use std::io;
use std::time::Duration;

/// Every version is all zeros, and nothing is free.
struct Shown;

impl View for Shown {
    fn made_durable(&mut self, _: u32, _: &[(u64, Version)]) {}
    fn at_home(&mut self, _: &[u64]) {}
    fn is_free(&mut self, _: u64) -> bool {
        false
    }
    fn content(&mut self, _: Version, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
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

const FIRST: u32 = 7;

/// A machine with a compound under way, and what it wants done for that.
fn making() -> (Durability, Vec<Step>) {
    let superblock = SuperblockBuilder { maxlen: 64, start: 1, sequence: FIRST, ..SuperblockBuilder::default() };
    let superblock = superblock.checksum(Checksum::V3).build();
    let mut machine = Durability::opened(&superblock, Duration::ZERO).expect("a log").on_storage();
    assert_eq!(machine.next_number(), FIRST);
    let (blocks, freed) = (vec![(40, Version(1))], Freed::Blocks(Vec::new()));
    let transaction = Transaction { sequence: FIRST, blocks, revokes: Vec::new(), freed };
    let mut steps = Vec::new();
    machine.committed(Duration::ZERO, &transaction, AnswerId(1), &mut Shown, &mut steps);
    assert!(machine.is_making());
    (machine, steps)
}

fn operations(steps: &[Step]) -> Vec<OperationId> {
    let of = |step: &Step| match step {
        Step::Write { operation, .. } | Step::Flush { operation } => Some(*operation),
        _ => None,
    };
    steps.iter().filter_map(of).collect()
}

/// After any number of its operations, one of which may have failed.
#[test]
fn a_compound_that_was_given_up_has_had_its_number() {
    for done in 0..4 {
        for fails in [false, true] {
            let (mut machine, mut steps) = making();
            for _ in 0..done {
                for operation in operations(&std::mem::take(&mut steps)) {
                    machine.operation_done(Duration::ZERO, operation, true, &mut Shown, &mut steps);
                }
            }
            assert_eq!((machine.is_making(), machine.next_number()), (done < 4, FIRST + 1), "{done} phases are over");
            match operations(&steps).first() {
                Some(first) if fails => {
                    machine.operation_done(Duration::ZERO, *first, false, &mut Shown, &mut Vec::new());
                }
                _ => machine.give_up(&mut Vec::new()),
            }
            assert!(!machine.is_making());
            assert_eq!(machine.next_number(), FIRST + 1, "{done} phases are over, and one operation fails: {fails}");
        }
    }
}

/// And one that is durable has not had the next.
#[test]
fn who_gives_up_between_two_compounds_has_used_up_no_number() {
    let (mut machine, mut steps) = making();
    while !steps.is_empty() {
        for operation in operations(&std::mem::take(&mut steps)) {
            machine.operation_done(Duration::ZERO, operation, true, &mut Shown, &mut steps);
        }
    }
    assert_eq!((machine.status().compounds, machine.next_number()), (1, FIRST + 1));
    machine.give_up(&mut Vec::new());
    assert_eq!(machine.next_number(), FIRST + 1);
}

/// Where the last compound gets the very number with which the guest closes its log, storage says the next one, and so does the machine:
/// who only has the guest's superblock has to know that.
#[test]
fn a_log_that_is_closed_has_a_number_behind_its_last_compound() {
    for closed_with in [FIRST, FIRST + 1, FIRST + 5] {
        let (mut machine, mut steps) = making();
        let superblock =
            SuperblockBuilder { maxlen: 64, start: 0, sequence: closed_with, ..SuperblockBuilder::default() };
        let superblock = superblock.checksum(Checksum::V3).build();
        machine.closes(Duration::ZERO, &superblock, AnswerId(2), &mut Shown, &mut steps);
        let (mut told, mut last) = (false, Vec::new());
        while !steps.is_empty() {
            let done = std::mem::take(&mut steps);
            for step in &done {
                match step {
                    Step::Write { place: Place::Superblock, bytes, .. } => last = bytes.to_vec(),
                    Step::Answer { answer: AnswerId(2), is_good } => told = *is_good,
                    Step::Failed(why) => panic!("{why}"),
                    _ => {}
                }
            }
            for operation in operations(&done) {
                machine.operation_done(Duration::ZERO, operation, true, &mut Shown, &mut steps);
            }
        }
        let said = Superblock::decode(&last).expect("a superblock");
        assert!(told && said.is_empty(), "{closed_with}: {said:?}");
        assert_eq!((machine.next_number(), said.sequence), (FIRST + 1, closed_with.max(FIRST + 1)), "{closed_with}");
    }
}
