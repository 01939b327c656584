//! A machine that follows one that had made all of it durable: nothing has to be written, and nobody is forgotten who waits for that.

use durability::{
    AnswerId, Durability, FoundCopy, FoundLog, FoundSaid, Kind, OperationId, Place, Step, Version, View, WhenAsked,
    WriteId,
};
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, SuperblockEdit};
use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

/// Nothing is asked for.
struct Shown;

impl View for Shown {
    fn made_durable(&mut self, _: u32, blocks: &[(u64, Version)]) {
        assert!(blocks.is_empty());
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

fn superblock() -> Vec<u8> {
    SuperblockBuilder { maxlen: 64, start: 1, sequence: 2, ..SuperblockBuilder::default() }
        .checksum(Checksum::V3)
        .build()
}

fn followed() -> Durability {
    let found = FoundLog { tail: (1, 2), ..FoundLog::default() };
    let (owed, past) = ((&[][..], 2, 1), BTreeMap::new());
    Durability::followed(&superblock(), Duration::from_secs(1), &found, owed, &past, Duration::ZERO).expect("a log")
}

fn operations(steps: &[Step]) -> Vec<OperationId> {
    let of = |step: &Step| match step {
        Step::Write { operation, .. } | Step::Flush { operation } => Some(*operation),
        _ => None,
    };
    steps.iter().filter_map(of).collect()
}

#[test]
fn a_write_that_waited_goes_when_what_was_found_is_flushed() {
    let (mut machine, mut steps) = (followed(), Vec::new());
    let may_go = machine.write_begins(
        Duration::ZERO,
        WriteId(1),
        Kind::Write,
        40..41,
        40..41,
        WhenAsked::default(),
        &mut Shown,
        &mut steps,
    );
    assert!(!may_go && matches!(steps[..], [Step::Flush { .. }]), "{steps:?}");
    let flush = operations(&steps)[0];
    steps.clear();
    machine.operation_done(Duration::ZERO, flush, true, &mut Shown, &mut steps);
    assert_eq!(steps, [Step::Go(WriteId(1))]);
}

#[test]
fn a_log_that_is_closed_meanwhile_is_closed() {
    let (mut machine, mut steps) = (followed(), Vec::new());
    let mut last = superblock();
    SuperblockEdit::new(&mut last).expect("a superblock").start(0).sequence(2).seal();
    machine.closes(Duration::ZERO, &last, AnswerId(7), &mut Shown, &mut steps);
    let mut written = Vec::new();
    loop {
        let now = std::mem::take(&mut steps);
        if now.contains(&Step::Answer { answer: AnswerId(7), is_good: true }) {
            break;
        }
        assert!(!now.is_empty(), "it waits for nothing");
        for operation in operations(&now) {
            machine.operation_done(Duration::ZERO, operation, true, &mut Shown, &mut steps);
        }
        written.extend(now.into_iter().filter(|step| matches!(step, Step::Write { .. })));
    }
    assert!(matches!(written[..], [Step::Write { place: Place::Superblock, .. }]), "{written:?}");
}

/// The guest's log has nothing of a block, and so has the log on storage soon: what the guest writes there is not brought home
/// over, and does not wait for that.
#[test]
fn a_copy_that_the_log_has_nothing_of_is_revoked() {
    let copy = FoundCopy { block: 40, compound: 2, position: 2, escaped: false, said: FoundSaid::Nothing };
    let found = FoundLog { tail: (1, 2), lengths: vec![3], copies: vec![copy], last_clock: (0, 0) };
    let owed = (&[][..], 3, 2);
    let past = BTreeMap::new();
    let mut machine = Durability::followed(&superblock(), Duration::from_secs(1), &found, owed, &past, Duration::ZERO)
        .expect("a log");
    let (mut steps, now, id) = (Vec::new(), Duration::ZERO, WriteId(1));
    assert!(!machine.write_begins(now, id, Kind::Write, 40..41, 40..41, WhenAsked::default(), &mut Shown, &mut steps));
    let mut written = Vec::new();
    while !steps.contains(&Step::Go(id)) {
        let now_done = std::mem::take(&mut steps);
        assert!(!now_done.is_empty(), "it waits for nothing");
        for operation in operations(&now_done) {
            machine.operation_done(now, operation, true, &mut Shown, &mut steps);
        }
        written.extend(now_done.into_iter().filter_map(|step| match step {
            Step::Write { place, .. } => Some(place),
            _ => None,
        }));
    }
    // A revoke, with room for its commit block, and that.
    assert_eq!(written, [Place::Log(4), Place::Log(5)]);
}
