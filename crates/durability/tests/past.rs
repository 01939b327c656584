//! Rule (g), step by step: what the guest writes past its journal, in every order with compounds and with its tail.

use durability::{
    AnswerId, Durability, FoundCopy, FoundLog, FoundSaid, Freed, Kind, OperationId, Past, Place, Step, Transaction,
    Version, View, WhenAsked, WriteId,
};
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, SuperblockEdit};
use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

const BLOCK: u64 = 40;
const OTHER: u64 = 50;
const TAIL: AnswerId = AnswerId(900);
const FLUSH: AnswerId = AnswerId(901);
const CLOSE: AnswerId = AnswerId(902);
const NOW: Duration = Duration::ZERO;

/// Blocks are free from `OTHER` on, or none is.
struct Shown {
    is_free: bool,
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
        into.fill(1);
        Ok(())
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

/// Of a log with no age, or one of which nobody lets time pass.
struct Rig {
    machine: Durability,
    view: Shown,
    /// Operations that are not done.
    under_way: Vec<OperationId>,
    answers: Vec<AnswerId>,
    gone: Vec<WriteId>,
    /// Where was written, in order.
    written: Vec<Place>,
}

impl Rig {
    fn of(machine: Durability) -> Self {
        let (under_way, answers, gone, written) = Default::default();
        Rig { machine, view: Shown { is_free: false }, under_way, answers, gone, written }
    }

    fn new(within: Duration) -> Self {
        Rig::of(Durability::opened(&superblock(), within).expect("a log").on_storage())
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut Durability, &mut Shown, &mut Vec<Step>) -> T) -> T {
        let mut steps = Vec::new();
        let result = call(&mut self.machine, &mut self.view, &mut steps);
        for step in steps {
            match step {
                Step::Write { operation, place, .. } => {
                    self.under_way.push(operation);
                    self.written.push(place);
                }
                Step::Flush { operation } => self.under_way.push(operation),
                Step::Go(id) => self.gone.push(id),
                Step::Answer { answer, is_good } => {
                    assert!(is_good);
                    self.answers.push(answer);
                }
                Step::Failed(why) => panic!("{why}"),
            }
        }
        result
    }

    fn commit(&mut self, sequence: u32, block: u64) {
        let blocks = vec![(block, Version(u64::from(sequence)))];
        let transaction = Transaction { sequence, blocks, revokes: vec![], freed: Freed::Blocks(vec![]) };
        self.call(|machine, view, steps| machine.committed(NOW, &transaction, AnswerId(1), view, steps));
    }

    fn begin(&mut self, id: u64, first: Option<u32>) -> bool {
        self.begin_as(id, WhenAsked { first, is_repeated: false })
    }

    fn begin_as(&mut self, id: u64, when: WhenAsked) -> bool {
        let blocks = BLOCK..BLOCK + 1;
        self.call(|machine, view, steps| {
            machine.write_begins(NOW, WriteId(id), Kind::Write, blocks.clone(), blocks, when, view, steps)
        })
    }

    /// Says whether the next flush has to cover it.
    fn end(&mut self, id: u64) -> bool {
        self.call(|machine, view, steps| machine.write_ended(NOW, WriteId(id), true, view, steps))
    }

    fn write_past(&mut self, id: u64) {
        assert!(self.begin(id, None));
        self.end(id);
    }

    fn goes_over(&mut self, id: u64) -> Vec<u64> {
        self.call(|machine, view, _| machine.goes_over(WriteId(id), view))
    }

    fn tail(&mut self, tail: u32) {
        self.call(|machine, view, steps| machine.tail_moves(NOW, tail, TAIL, view, steps));
    }

    /// All that is under way now is done, and what comes of it is not. False where nothing was.
    fn advance(&mut self) -> bool {
        let operations = std::mem::take(&mut self.under_way);
        let is_any = !operations.is_empty();
        for operation in operations {
            self.call(|machine, view, steps| machine.operation_done(NOW, operation, true, view, steps));
        }
        is_any
    }

    fn come_to_rest(&mut self) {
        while self.advance() {}
    }

    fn make(&mut self) {
        self.call(|machine, view, steps| machine.flush_now(NOW, FLUSH, view, steps));
    }

    fn compounds(&self) -> u64 {
        self.machine.status().compounds
    }

    /// The log is emptied; gives whether a copy of the block is brought home for that.
    fn closes_with_copy(mut self) -> bool {
        let mut last = superblock();
        SuperblockEdit::new(&mut last).expect("a superblock").start(0).sequence(9).seal();
        self.written.clear();
        self.call(|machine, view, steps| machine.closes(NOW, &last, CLOSE, view, steps));
        self.come_to_rest();
        assert!(self.answers.contains(&CLOSE), "{:?}", self.answers);
        self.written.contains(&Place::Home(BLOCK))
    }
}

const LONG: Duration = Duration::from_secs(1000);

/// A block with a durable copy.
fn copied(within: Duration) -> Rig {
    let mut rig = Rig::new(within);
    rig.commit(2, BLOCK);
    rig.make();
    rig.come_to_rest();
    assert_eq!(rig.compounds(), 1);
    rig
}

#[test]
fn a_tail_passes_such_a_copy_when_that_is_revoked() {
    for within in [Duration::ZERO, LONG] {
        let mut rig = copied(within);
        rig.write_past(1);
        rig.tail(3);
        assert!(!rig.answers.contains(&TAIL));
        rig.come_to_rest();
        assert!(rig.answers.contains(&TAIL) && rig.compounds() == 2);
        assert!(!rig.closes_with_copy());
    }
}

#[test]
fn a_tail_passes_what_carries_the_copy_at_once() {
    let mut rig = copied(LONG);
    assert!(rig.begin(1, None));
    rig.machine.write_carries(WriteId(1), [BLOCK]);
    rig.end(1);
    rig.tail(3);
    assert!(rig.answers.contains(&TAIL) && rig.compounds() == 1);
}

/// Another compound is being made, which has no revoke.
#[test]
fn what_is_being_made_when_the_tail_moves_does_not_do() {
    let mut rig = copied(LONG);
    rig.write_past(1);
    rig.commit(3, OTHER);
    rig.make();
    rig.tail(3);
    while rig.compounds() == 1 {
        assert!(!rig.answers.contains(&TAIL) && rig.advance());
    }
    assert!(!rig.answers.contains(&TAIL), "it is not revoked yet");
    rig.come_to_rest();
    assert!(rig.answers.contains(&TAIL) && rig.compounds() == 3);
}

/// What is being made has a newer copy: that is enough.
#[test]
fn what_is_being_made_may_have_a_newer_copy() {
    let mut rig = copied(LONG);
    rig.write_past(1);
    rig.commit(3, BLOCK);
    rig.make();
    rig.tail(3);
    assert!(!rig.answers.contains(&TAIL));
    rig.come_to_rest();
    assert!(rig.answers.contains(&TAIL) && rig.compounds() == 2);
}

/// An append may be written before its compound: if what was written is something else, the compound has the committed version, and it is
/// not written over by us.
#[test]
fn an_append_is_not_written_over_it() {
    for is_under_way in [false, true] {
        let mut rig = Rig::new(LONG);
        rig.view.is_free = true;
        rig.commit(2, BLOCK);
        assert!(rig.begin(1, None));
        if !is_under_way {
            rig.end(1);
        }
        rig.make();
        rig.come_to_rest();
        if is_under_way {
            rig.end(1);
        }
        assert!(!rig.written.contains(&Place::Home(BLOCK)), "{:?}", rig.written);
        rig.come_to_rest();
        assert!(rig.begin(2, None));
        assert!(!rig.end(2), "a replay brings the committed version");
        assert!(!rig.closes_with_copy(), "is under way: {is_under_way}");
    }
}

/// A second write is under way when the copy becomes durable: until it has ended only the log has the block for certain.
#[test]
fn a_copy_stays_while_a_write_is_under_way() {
    let mut rig = Rig::new(LONG);
    rig.view.is_free = true;
    rig.commit(2, BLOCK);
    assert!(rig.begin(1, None));
    rig.end(1);
    assert!(rig.begin(2, None));
    rig.make();
    rig.come_to_rest();
    let mut last = superblock();
    SuperblockEdit::new(&mut last).expect("a superblock").start(0).sequence(9).seal();
    rig.call(|machine, view, steps| machine.closes(NOW, &last, CLOSE, view, steps));
    rig.come_to_rest();
    assert!(!rig.answers.contains(&CLOSE), "a power cut may tear it");
    rig.end(2);
    rig.come_to_rest();
    assert!(rig.answers.contains(&CLOSE) && !rig.written.contains(&Place::Home(BLOCK)));
}

/// It was asked before the copy was committed, and may carry less: then the copy is still needed, but not when the tail has passed it.
#[test]
fn what_may_be_older_than_the_copy_is_passed_as_well() {
    let mut rig = copied(LONG);
    assert!(rig.begin(1, Some(1)));
    rig.end(1);
    rig.tail(3);
    assert!(!rig.answers.contains(&TAIL));
    rig.come_to_rest();
    assert!(rig.answers.contains(&TAIL) && !rig.closes_with_copy());
}

/// What a replay writes over needs no flush, but what it will not write over soon does.
#[test]
fn a_flush_covers_what_is_about_to_be_revoked() {
    let mut rig = copied(Duration::ZERO);
    assert!(rig.begin(1, None));
    assert!(!rig.end(1), "a replay writes over it");
    assert!(rig.begin(2, None));
    rig.tail(3);
    assert!(rig.end(2), "no replay will");
    rig.come_to_rest();
    assert!(rig.answers.contains(&TAIL));
}

/// Durability begins under a running guest that has written past its journal before.
#[test]
fn what_was_written_before_is_not_written_over() {
    for (past, is_brought) in [(Some(Past::Written), false), (Some(Past::Perhaps), true), (None, true)] {
        let blocks = vec![(BLOCK, Version(2))];
        let owed = [Transaction { sequence: 2, blocks, revokes: vec![], freed: Freed::Unknown }];
        let past: BTreeMap<u64, Past> = past.map(|past| (BLOCK, past)).into_iter().collect();
        let engaged = || Durability::engaged(&superblock(), LONG, (&owed, 2, 2), &past, NOW).expect("a log");
        let mut rig = Rig::of(engaged());
        rig.call(|machine, view, steps| machine.timer(NOW, view, steps));
        rig.come_to_rest();
        assert_eq!(rig.closes_with_copy(), is_brought, "{past:?}");
        let mut rig = Rig::of(engaged());
        rig.call(|machine, view, steps| machine.timer(NOW, view, steps));
        rig.come_to_rest();
        rig.tail(3);
        assert_eq!(rig.answers.contains(&TAIL), past.is_empty(), "{past:?}");
    }
}

#[test]
fn who_follows_does_not_know_what_was_written_past_the_journal() {
    let revoked = |said, tail| {
        let copy = FoundCopy { block: BLOCK, compound: 2, position: 2, escaped: false, said };
        let found = FoundLog { tail: (1, 2), lengths: vec![3], copies: vec![copy], last_clock: (0, 0) };
        let blocks = vec![(BLOCK, Version(2))];
        let owed = Transaction { sequence: 2, blocks, revokes: vec![], freed: Freed::Unknown };
        let owed = if matches!(said, FoundSaid::Same(_)) { vec![owed] } else { vec![] };
        let owed = (&owed[..], tail, 2);
        let past = BTreeMap::new();
        let mut rig = Rig::of(Durability::followed(&superblock(), LONG, &found, owed, &past, NOW).expect("a log"));
        rig.call(|machine, view, steps| machine.timer(NOW, view, steps));
        rig.come_to_rest();
        let before = rig.compounds();
        rig.tail(3);
        rig.come_to_rest();
        assert!(rig.answers.contains(&TAIL));
        (before, rig.compounds())
    };
    assert_eq!(revoked(FoundSaid::Same(2), 2), (0, 1), "it is not seen to be at home");
    assert_eq!(revoked(FoundSaid::AtHome(2), 2), (0, 0), "what is at home is the copy");
    assert_eq!(revoked(FoundSaid::AtHome(2), 3), (1, 1), "the tail has passed it: whatever is at home stays");
}

/// What a machine finds of a block whose committed version is of transaction 2: with a copy of just that in the log, or with none.
fn followed(is_copied: bool, past: Option<Past>) -> Rig {
    let copy = FoundCopy { block: BLOCK, compound: 2, position: 2, escaped: false, said: FoundSaid::Same(2) };
    let (lengths, copies) = if is_copied { (vec![3], vec![copy]) } else { (vec![], vec![]) };
    let found = FoundLog { tail: (1, 2), lengths, copies, last_clock: (0, 0) };
    let owed = [Transaction { sequence: 2, blocks: vec![(BLOCK, Version(2))], revokes: vec![], freed: Freed::Unknown }];
    let past: BTreeMap<u64, Past> = past.map(|past| (BLOCK, past)).into_iter().collect();
    Rig::of(Durability::followed(&superblock(), LONG, &found, (&owed, 2, 2), &past, NOW).expect("a log"))
}

/// It has ended under the machine before, and that was written down.
#[test]
fn who_follows_writes_no_copy_over_what_was_written_past_the_journal() {
    for is_copied in [true, false] {
        for (past, is_brought) in [(Some(Past::Written), false), (Some(Past::Begun), true), (None, true)] {
            let mut rig = followed(is_copied, past);
            rig.call(|machine, view, steps| machine.timer(NOW, view, steps));
            rig.come_to_rest();
            assert_eq!(rig.closes_with_copy(), is_brought, "copied: {is_copied}, {past:?}");
        }
    }
}

/// It was under way, or waited, when the machine before died: the guest asks again.
#[test]
fn what_is_asked_again_goes_over_what_it_went_over_before() {
    for is_copied in [true, false] {
        for (past, is_brought) in [(Some(Past::Written), false), (Some(Past::Begun), false), (None, true)] {
            let mut rig = followed(is_copied, past);
            assert!(!rig.begin_as(1, WhenAsked { first: None, is_repeated: true }));
            let is_known = past.is_some();
            assert_eq!(rig.goes_over(1).contains(&BLOCK), is_known);
            rig.come_to_rest();
            assert_eq!(rig.gone, [WriteId(1)]);
            assert_eq!(rig.goes_over(1), if is_known { vec![BLOCK] } else { vec![] });
            rig.end(1);
            assert_eq!(rig.closes_with_copy(), is_brought, "copied: {is_copied}, {past:?}");
        }
    }
}

/// What the machine before was not asked goes over what this one found, whether that is durable already or not.
#[test]
fn what_is_asked_of_who_follows_goes_over_what_it_found() {
    for is_copied in [true, false] {
        let mut rig = followed(is_copied, None);
        assert!(!rig.begin(1, None));
        assert_eq!(rig.goes_over(1), [BLOCK]);
        rig.come_to_rest();
        assert_eq!((rig.goes_over(1), &rig.gone[..]), (vec![BLOCK], &[WriteId(1)][..]));
        rig.end(1);
        assert!(!rig.closes_with_copy(), "copied: {is_copied}");
    }
}

/// Not over what is committed only then.
#[test]
fn what_is_asked_again_does_not_go_over_what_is_newer() {
    let mut rig = followed(true, Some(Past::Begun));
    assert!(!rig.begin_as(1, WhenAsked { first: None, is_repeated: true }));
    rig.commit(3, BLOCK);
    assert!(rig.goes_over(1).is_empty());
    rig.make();
    rig.come_to_rest();
    assert_eq!(rig.gone, [WriteId(1)]);
    rig.end(1);
    assert!(rig.closes_with_copy());
}

/// One that waits goes over what is newest when it was asked, in the log or on its way there, and not over what comes after that.
#[test]
fn a_write_that_waits_goes_over_what_it_was_asked_over() {
    let mut rig = copied(LONG);
    rig.commit(3, BLOCK);
    assert!(!rig.begin(1, None) && !rig.begin(2, Some(2)));
    assert_eq!((rig.goes_over(1), rig.goes_over(2)), (vec![BLOCK], vec![]));
    rig.make();
    assert_eq!(rig.goes_over(1), [BLOCK], "it is being made durable");
    rig.commit(4, BLOCK);
    assert!(rig.goes_over(1).is_empty());
    assert!(rig.goes_over(3).is_empty(), "nobody asked for it");
}
