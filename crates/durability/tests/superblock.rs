//! What a guest's superblock says beside where its log begins (an error of its own, say) reaches storage, and not when the next compound
//! happens to write a superblock.

use durability::{AnswerId, Durability, OperationId, Place, Step, Version, View};
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, Superblock, SuperblockEdit};
use std::io;
use std::time::Duration;

/// Nothing is asked for.
struct Shown;

impl View for Shown {
    fn made_durable(&mut self, _: u32, _: &[(u64, Version)]) {
        unreachable!()
    }
    fn at_home(&mut self, _: &[u64]) {}
    fn is_free(&mut self, _: u64) -> bool {
        unreachable!()
    }
    fn content(&mut self, _: Version, _: &mut [u8]) -> io::Result<()> {
        unreachable!()
    }
    fn logged(&mut self, _: u32, _: &mut [u8]) -> io::Result<()> {
        unreachable!()
    }
    fn committed_after(&mut self, _: std::ops::Range<u64>, _: u32) -> Vec<durability::Committed> {
        Vec::new()
    }
    fn wall_clock(&self) -> (u64, u32) {
        (0, 0)
    }
}

const NOW: Duration = Duration::ZERO;
const FIRST: u32 = 7;
const ANSWER: AnswerId = AnswerId(1);

fn superblock() -> Vec<u8> {
    let superblock = SuperblockBuilder { maxlen: 64, start: 1, sequence: FIRST, ..SuperblockBuilder::default() };
    superblock.checksum(Checksum::V3).build()
}

fn with_error(errno: i32) -> Vec<u8> {
    let mut raw = superblock();
    SuperblockEdit::new(&mut raw).expect("a superblock").start(9).sequence(FIRST).errno(errno).seal();
    raw
}

/// The guest writes this superblock, whose tail is where it was. Gives the machine, and what it wants done.
fn writes(within: Duration, superblock_of_guest: &[u8]) -> (Durability, Vec<Step>) {
    let mut machine = Durability::opened(&superblock(), within).expect("a log").on_storage();
    let mut steps = Vec::new();
    machine.set_superblock(superblock_of_guest);
    machine.tail_moves(NOW, FIRST, ANSWER, &mut Shown, &mut steps);
    (machine, steps)
}

/// The error number of each superblock that is to be written.
fn errors(steps: &[Step]) -> Vec<i32> {
    let of = |step: &Step| match step {
        Step::Write { place: Place::Superblock, bytes, .. } => {
            let said = Superblock::decode(bytes).expect("a superblock");
            assert_eq!((said.start, said.sequence), (1, FIRST), "where the log begins is not the guest's to say");
            Some(said.errno)
        }
        _ => None,
    };
    steps.iter().filter_map(of).collect()
}

fn is_answered(steps: &[Step]) -> bool {
    steps.contains(&Step::Answer { answer: ANSWER, is_good: true })
}

fn carry_out(machine: &mut Durability, steps: &mut Vec<Step>) {
    for step in std::mem::take(steps) {
        if let Step::Write { operation, .. } | Step::Flush { operation } = step {
            let operation: OperationId = operation;
            machine.operation_done(NOW, operation, true, &mut Shown, steps);
        }
    }
}

#[test]
fn an_error_of_the_guests_own_is_written_at_once() {
    let (mut machine, mut steps) = writes(Duration::from_secs(3600), &with_error(-5));
    assert!(is_answered(&steps), "it may be as old as that");
    assert_eq!(errors(&steps), [-5]);
    carry_out(&mut machine, &mut steps);
    carry_out(&mut machine, &mut steps);
    // Once.
    assert!(steps.is_empty(), "{steps:?}");
    machine.touch(NOW, &mut Shown, &mut steps);
    assert_eq!(errors(&steps), [-5], "and it stays");
}

#[test]
fn with_no_age_its_guest_is_told_when_it_is_durable() {
    let (mut machine, mut steps) = writes(Duration::ZERO, &with_error(-5));
    assert!(!is_answered(&steps));
    assert_eq!(errors(&steps), [-5]);
    carry_out(&mut machine, &mut steps);
    assert!(!is_answered(&steps) && matches!(steps[..], [Step::Flush { .. }]), "{steps:?}");
    // The guest says something else while that is on its way.
    machine.set_superblock(&with_error(-117));
    carry_out(&mut machine, &mut steps);
    assert!(!is_answered(&steps));
    assert_eq!(errors(&steps), [-117]);
    carry_out(&mut machine, &mut steps);
    carry_out(&mut machine, &mut steps);
    assert_eq!(steps, [Step::Answer { answer: ANSWER, is_good: true }]);
}

/// The guest says the same once more while that is on its way: it is durable then, and not when it was said.
#[test]
fn with_no_age_what_is_on_its_way_is_not_durable_yet() {
    let (mut machine, mut steps) = writes(Duration::ZERO, &with_error(-5));
    for done in 0..2 {
        machine.set_superblock(&with_error(-5));
        let mut more = Vec::new();
        machine.tail_moves(NOW, FIRST, AnswerId(2 + done), &mut Shown, &mut more);
        assert!(more.is_empty(), "after {done} steps: {more:?}");
        carry_out(&mut machine, &mut steps);
    }
    let answers = [ANSWER, AnswerId(2), AnswerId(3)].map(|answer| Step::Answer { answer, is_good: true });
    assert_eq!(steps, answers);
    steps.clear();
    machine.tail_moves(NOW, FIRST, AnswerId(4), &mut Shown, &mut steps);
    assert_eq!(steps, [Step::Answer { answer: AnswerId(4), is_good: true }]);
}

#[test]
fn who_waits_for_that_is_answered_when_it_is_given_up() {
    let (mut machine, mut steps) = writes(Duration::ZERO, &with_error(-5));
    steps.clear();
    machine.give_up(&mut steps);
    assert!(is_answered(&steps), "{steps:?}");
}

#[test]
fn a_superblock_that_says_nothing_new_is_not_written() {
    for within in [Duration::ZERO, Duration::from_secs(3600)] {
        let (_, steps) = writes(within, &with_error(0));
        assert_eq!(steps, [Step::Answer { answer: ANSWER, is_good: true }]);
    }
}

/// Who runs the machine has something to add to the superblock while the guest closes its log, or after that: nothing is written behind the one
/// that says that no log is needed.
#[test]
fn nothing_is_written_behind_the_superblock_that_closes_the_log() {
    for touched_after in 0..5 {
        let mut machine = Durability::opened(&superblock(), Duration::from_secs(3600)).expect("a log").on_storage();
        let mut closing = superblock();
        SuperblockEdit::new(&mut closing).expect("a superblock").start(0).sequence(FIRST).seal();
        let (mut steps, mut written) = (Vec::new(), Vec::new());
        machine.closes(NOW, &closing, ANSWER, &mut Shown, &mut steps);
        for done in 0..8 {
            if done == touched_after {
                machine.set_superblock(&with_error(-5));
                machine.touch(NOW, &mut Shown, &mut steps);
            }
            for step in &steps {
                if let Step::Write { place: Place::Superblock, bytes, .. } = step {
                    written.push(Superblock::decode(bytes).expect("a superblock").start);
                }
            }
            carry_out(&mut machine, &mut steps);
        }
        assert_eq!(written.last(), Some(&0), "touched after {touched_after} steps: {written:?}");
        assert_eq!(written.iter().filter(|start| **start == 0).count(), 1);
    }
}
