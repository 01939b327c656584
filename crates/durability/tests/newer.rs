//! Rule (h), step by step: writes of the guest that were asked before a version that is durable, and land after it.

use durability::{
    AnswerId, Committed, Durability, FoundLog, Freed, Kind, OperationId, Place, Step, Transaction, Version, View,
    WhenAsked, WriteId,
};
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, SuperblockEdit};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::time::Duration;

const BLOCK: u64 = 40;
const OTHER: u64 = 50;
const NOW: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_secs(1000);

/// Every block is free, or none; and what the guest's log has.
#[derive(Default)]
struct Shown {
    is_free: bool,
    logged: BTreeMap<u64, Committed>,
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
    fn wall_clock(&self) -> (u64, u32) {
        (0, 0)
    }
    fn committed_after(&mut self, blocks: Range<u64>, after: u32) -> Vec<Committed> {
        self.logged.range(blocks).map(|(_, newest)| *newest).filter(|newest| newest.transaction > after).collect()
    }
}

fn superblock() -> Vec<u8> {
    SuperblockBuilder { maxlen: 64, start: 1, sequence: 2, ..SuperblockBuilder::default() }
        .checksum(Checksum::V3)
        .build()
}

struct Rig {
    machine: Durability,
    view: Shown,
    under_way: Vec<OperationId>,
    gone: Vec<WriteId>,
    written: Vec<Place>,
    is_closed: bool,
}

impl Rig {
    fn of(machine: Durability) -> Self {
        let (view, under_way, gone, written) = Default::default();
        Rig { machine, view, under_way, gone, written, is_closed: false }
    }

    fn new() -> Self {
        Rig::of(Durability::opened(&superblock(), LONG).expect("a log").on_storage())
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
                    self.is_closed |= answer == AnswerId(2);
                }
                Step::Failed(why) => panic!("{why}"),
            }
        }
        result
    }

    /// The guest's log has it; the machine is not told yet.
    fn logs(&mut self, sequence: u32, block: u64, is_gone_over: bool) -> Transaction {
        let version = Version(u64::from(sequence));
        self.view.logged.insert(block, Committed { block, version, transaction: sequence, is_gone_over });
        Transaction { sequence, blocks: vec![(block, version)], revokes: vec![], freed: Freed::Blocks(vec![]) }
    }

    fn commit(&mut self, sequence: u32, block: u64) {
        let transaction = self.logs(sequence, block, false);
        self.call(|machine, view, steps| machine.committed(NOW, &transaction, AnswerId(1), view, steps));
    }

    fn make(&mut self) {
        self.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(1), view, steps));
        self.come_to_rest();
    }

    fn begin(&mut self, id: u64, block: u64, first: Option<u32>) -> bool {
        self.begin_as(id, block, WhenAsked { first, is_repeated: false })
    }

    fn begin_as(&mut self, id: u64, block: u64, when: WhenAsked) -> bool {
        let blocks = block..block + 1;
        self.call(|machine, view, steps| {
            machine.write_begins(NOW, WriteId(id), Kind::Write, blocks.clone(), blocks, when, view, steps)
        })
    }

    fn end(&mut self, id: u64) {
        self.call(|machine, view, steps| machine.write_ended(NOW, WriteId(id), true, view, steps));
    }

    /// It carries what is newest.
    fn write_home(&mut self, id: u64, block: u64) {
        assert!(self.begin(id, block, None));
        self.machine.write_carries(WriteId(id), [block]);
        self.end(id);
    }

    fn tail(&mut self, tail: u32) {
        self.call(|machine, view, steps| machine.tail_moves(NOW, tail, AnswerId(1), view, steps));
    }

    fn come_to_rest(&mut self) {
        while !self.under_way.is_empty() {
            for operation in std::mem::take(&mut self.under_way) {
                self.call(|machine, view, steps| machine.operation_done(NOW, operation, true, view, steps));
            }
        }
    }

    fn compounds(&self) -> u64 {
        self.machine.status().compounds
    }

    /// The log is emptied; gives whether a copy of the block is brought home for that.
    fn closes_with_copy(mut self) -> bool {
        let mut last = superblock();
        SuperblockEdit::new(&mut last).expect("a superblock").start(0).sequence(9).seal();
        self.written.clear();
        self.call(|machine, view, steps| machine.closes(NOW, &last, AnswerId(2), view, steps));
        self.come_to_rest();
        assert!(self.is_closed);
        self.written.contains(&Place::Home(BLOCK))
    }

    /// The block is of transaction 3, which is durable, and the log on storage has no copy of it any more.
    fn emptied() -> Self {
        let mut rig = Rig::new();
        rig.commit(2, OTHER);
        rig.make();
        rig.write_home(1, OTHER);
        rig.tail(3);
        rig.view.logged.clear();
        rig.commit(3, BLOCK);
        rig.make();
        assert!(!rig.begin(2, OTHER, None), "the guest's log has that copy no more");
        rig.come_to_rest();
        assert_eq!(rig.gone, [WriteId(2)]);
        rig.end(2);
        assert!(rig.written.contains(&Place::Home(BLOCK)));
        rig.written.clear();
        rig
    }
}

#[test]
fn an_older_write_waits_until_the_log_has_a_copy_again() {
    let mut rig = Rig::emptied();
    let compounds = rig.compounds();
    assert!(!rig.begin(3, BLOCK, Some(2)));
    rig.come_to_rest();
    assert_eq!((rig.gone.last(), rig.compounds()), (Some(&WriteId(3)), compounds + 1));
    rig.end(3);
    assert!(rig.closes_with_copy(), "what it has brought is older");
}

#[test]
fn one_that_is_no_older_does_not_wait() {
    let mut rig = Rig::emptied();
    assert!(rig.begin(3, BLOCK, None));
    let over = rig.call(|machine, view, _| machine.goes_over(WriteId(3), view));
    assert_eq!(over, [BLOCK], "the guest's log has it, and who follows is told that this is newer");
    rig.end(3);
    assert!(!rig.closes_with_copy());
}

/// What the guest's log would not bring back, ours need not.
#[test]
fn nor_one_over_what_the_tail_has_passed() {
    let mut rig = Rig::emptied();
    rig.tail(4);
    assert!(rig.begin(3, BLOCK, Some(2)), "and the guest's log has not been cleared yet");
}

/// It is asked for again until then, and its log has nothing to give any more.
#[test]
fn a_tail_that_passes_it_while_it_waits_lets_it_go() {
    let mut rig = Rig::emptied();
    // Something else is made durable meanwhile.
    rig.commit(4, OTHER);
    rig.call(|machine, view, steps| machine.flush_now(NOW, AnswerId(1), view, steps));
    assert!(!rig.begin(3, BLOCK, Some(2)));
    rig.tail(4);
    rig.view.logged.remove(&BLOCK);
    rig.come_to_rest();
    assert!(rig.gone.contains(&WriteId(3)));
    assert!(!rig.written.contains(&Place::Home(BLOCK)), "nobody can say what it was");
    assert!(!rig.closes_with_copy());
}

#[test]
fn what_the_machine_is_not_told_of_comes_by_itself() {
    let mut rig = Rig::emptied();
    let transaction = rig.logs(4, BLOCK, false);
    let compounds = rig.compounds();
    assert!(!rig.begin(3, BLOCK, Some(2)));
    rig.come_to_rest();
    assert_eq!((rig.gone.len(), rig.compounds()), (1, compounds), "that is not the whole transaction");
    rig.call(|machine, view, steps| machine.committed(NOW, &transaction, AnswerId(1), view, steps));
    rig.come_to_rest();
    assert_eq!((rig.gone.last(), rig.compounds()), (Some(&WriteId(3)), compounds + 1));
}

#[test]
fn what_is_asked_again_and_was_over_it_does_not_wait_for_it() {
    for is_gone_over in [true, false] {
        let (found, none) = (FoundLog { tail: (1, 2), ..FoundLog::default() }, BTreeMap::new());
        let machine = Durability::followed(&superblock(), LONG, &found, (&[], 2, 3), &none, NOW).expect("a log");
        let mut rig = Rig::of(machine);
        rig.logs(3, BLOCK, is_gone_over);
        assert!(!rig.begin_as(1, BLOCK, WhenAsked { first: None, is_repeated: true }), "nothing sets out yet");
        rig.come_to_rest();
        assert_eq!((rig.gone.as_slice(), rig.compounds()), (&[WriteId(1)][..], u64::from(!is_gone_over)));
    }
}

/// Of two that are on their way at a time either may land last.
#[test]
fn what_lands_beside_an_older_one_is_not_known_to_be_there() {
    for (first_asked, is_brought) in [([None, None], false), ([Some(2), None], true), ([None, Some(2)], true)] {
        for order in [[0, 1], [1, 0]] {
            let mut rig = Rig::new();
            rig.commit(3, BLOCK);
            rig.make();
            for (id, first_asked) in (0..).zip(first_asked) {
                assert!(rig.begin(id, BLOCK, first_asked));
                rig.machine.write_carries(WriteId(id), first_asked.is_none().then_some(BLOCK));
            }
            order.into_iter().for_each(|id| rig.end(id));
            assert_eq!(rig.closes_with_copy(), is_brought, "{first_asked:?}, ended as {order:?}");
        }
    }
}

/// One of them has ended, and a power cut may tear the other.
#[test]
fn a_copy_stays_while_another_write_is_on_its_way() {
    let mut rig = Rig::new();
    rig.commit(2, BLOCK);
    rig.make();
    assert!(rig.begin(1, BLOCK, None) && rig.begin(2, BLOCK, None));
    rig.end(1);
    let mut last = superblock();
    SuperblockEdit::new(&mut last).expect("a superblock").start(0).sequence(9).seal();
    rig.call(|machine, view, steps| machine.closes(NOW, &last, AnswerId(2), view, steps));
    rig.come_to_rest();
    assert!(!rig.is_closed);
    rig.end(2);
    rig.come_to_rest();
    assert!(rig.is_closed);
}

/// An append that its guest has written home, and written over with something older.
#[test]
fn what_is_not_durable_is_not_at_home_when_it_was_written_over() {
    for is_over in [true, false] {
        let mut rig = Rig::new();
        rig.view.is_free = true;
        rig.commit(2, BLOCK);
        rig.write_home(1, BLOCK);
        if is_over {
            assert!(rig.begin(2, BLOCK, Some(1)));
            rig.end(2);
        }
        rig.make();
        assert_eq!(rig.written.contains(&Place::Home(BLOCK)), is_over);
    }
}

#[test]
fn a_part_of_a_block_that_is_discarded_is_not_at_home() {
    for is_discarded in [true, false] {
        let mut rig = Rig::new();
        rig.commit(2, BLOCK);
        rig.make();
        rig.write_home(1, BLOCK);
        rig.make();
        if is_discarded {
            let (touched, whole) = (BLOCK..BLOCK + 1, BLOCK..BLOCK);
            assert!(rig.call(|machine, view, steps| {
                machine.write_begins(NOW, WriteId(2), Kind::Discard, touched, whole, WhenAsked::default(), view, steps)
            }));
            rig.end(2);
        }
        assert_eq!(rig.closes_with_copy(), is_discarded);
    }
}
