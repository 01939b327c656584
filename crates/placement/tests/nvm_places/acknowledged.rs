//! A transaction that was acknowledged before the flush of its appends (nvm-pipelined).

use super::*;
use nvm_journal::Found;
use std::sync::atomic::{AtomicBool, Ordering};

/// A block that the bitmap says is free.
const FREE: u64 = FILE_SYSTEM_BLOCKS - 10;

/// What the first region has.
fn found(rig: &Rig) -> Found {
    let region = std::fs::read(&rig.region).expect("read");
    Found::read(&region[..region.len() / 2]).expect("whole").expect("a region")
}

/// The flush behind the last transaction has failed, and storage has lost its append. What is given says that all that the worker itself
/// writes fails, and what the image was before that transaction.
fn with_a_lost_transaction() -> (Rig, Arc<AtomicBool>, Vec<u8>) {
    let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
    let is_broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&is_broken);
    rig.journals.disk(0).simulate_writes(move || !breaks.load(Ordering::Relaxed));
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let before = std::fs::read(&rig.image).expect("read");
    rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
    rig.commit_all(0, &[(IN_USE, content(2)), (FREE, content(3))]);
    rig.fails = Box::new(|_| false);
    assert!(found(&rig).prepared.is_some(), "it was acknowledged, and may be lost");
    rig.file.write_all_at(&[0; BLOCK as usize], rig.home_at(0, FREE)).expect("written");
    rig.may_fail = true;
    (rig, is_broken, before)
}

/// The guest writes to a block of a transaction that it was not told of yet: to an append that is home already, which the transaction is to count on.
#[test]
fn an_append_that_its_guest_writes_over_is_not_counted_on() {
    is_not_acknowledged(&[(FREE, false), (FREE, true)]);
}

/// The same to what goes to the region: the end of that write would be noted behind the transaction.
#[test]
fn what_its_guest_writes_to_is_not_acknowledged_before_it_is_durable() {
    is_not_acknowledged(&[(IN_USE, true)]);
}

/// A transaction of two appends and a block that is in use, one of which its guest writes to before the second append is home: that write has ended
/// then, or not.
fn is_not_acknowledged(cases: &[(u64, bool)]) {
    for (over, is_under_way) in cases.iter().copied() {
        let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        // One of two appends takes its time, and then their flush.
        let (at, over_at) = (rig.home_at(0, FREE + 2), rig.home_at(0, over));
        rig.holds = Box::new(move |operation| operation.offset == at || operation.operation == Operation::Flush);
        rig.commit_all(0, &[(IN_USE, content(2)), (FREE, content(3)), (FREE + 2, content(4))]);
        assert_eq!(rig.held.len(), 1, "an append is on its way");
        let append = rig.held.remove(0);
        rig.holds = Box::new(move |operation| {
            operation.operation == Operation::Flush || is_under_way && operation.offset == over_at
        });
        rig.request(RequestKind::Write, over_at, &mut content(9));
        assert_eq!(rig.held.len(), usize::from(is_under_way));
        rig.end(append);
        assert!(found(&rig).prepared.is_none(), "block {over} is not what it counts on, or is noted behind it");
        let before = found(&rig).sequence;
        rig.end_held();
        assert!(found(&rig).sequence != before, "it is durable, and counts");
        assert!(rig.stored(0, FREE + 2) == content(4));
    }
}

/// A checkpoint has brought a block home that the transaction revokes, and hears of that while it is acknowledged: noted behind it that would mean
/// that the log has the block, and what the guest writes there next would be taken back.
#[test]
fn what_has_gone_home_is_not_noted_behind_a_transaction_that_has_it() {
    let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    rig.journals.region(0).expect("regions").request_checkpoint();
    let mut plan = Plan::default();
    rig.route.woken(&mut plan);
    rig.carry_out(plan);
    assert!(rig.stored(0, IN_USE) == content(1) && rig.held.len() == 1, "it is home, and that is being flushed");
    let transaction = Transaction { blocks: vec![(FREE, content(3))], revokes: vec![IN_USE], ..Transaction::default() };
    rig.commit_transaction(0, &transaction);
    assert!(found(&rig).prepared.is_some() && rig.held.len() == 2, "it is acknowledged");
    let flush = rig.held.remove(0);
    rig.end(flush);
    assert!(found(&rig).latest.is_empty(), "what is home has left the region");
    rig.held.clear();
    rig.holds = Box::new(|_| false);
    rig.die().expect("it goes on");
    let at = rig.home_at(0, IN_USE);
    rig.request(RequestKind::Write, at, &mut content(9));
    let bytes = std::fs::read(&rig.image).expect("read");
    assert!(bytes[at as usize..][..BLOCK as usize] == content(9)[..], "it is data now");
    assert!(rig.journals.report("vm").disks[0].nvm.as_ref().expect("regions").blocks_restored == 0, "and held again");
}

/// A transaction is acknowledged, and its flush takes its time.
fn with_one_ahead_of_its_flush() -> Rig {
    let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    rig.commit_all(0, &[(IN_USE, content(2)), (FREE, content(3))]);
    assert!(found(&rig).prepared.is_some() && rig.waiting() == 0, "it is acknowledged");
    rig
}

/// An `fsync` under `data=journal` writes home what it has just committed, before it returns.
#[test]
fn what_is_written_home_as_it_was_acknowledged_does_not_wait() {
    for dies in [false, true] {
        let mut rig = with_one_ahead_of_its_flush();
        for (block, byte) in [(IN_USE, 2), (FREE, 3), (IN_USE, 2)] {
            let at = rig.home_at(0, block);
            assert_eq!(rig.request(RequestKind::Write, at, &mut content(byte)), 0, "it is written");
            assert!(rig.waiting() == 0, "block {block} waits");
        }
        // All of the transaction is home, as far as the guest knows.
        rig.superblock(0, true);
        assert_eq!(rig.waiting(), 1, "a tail that passes it waits until it counts");
        let (at, free_at) = (rig.home_at(0, IN_USE) as usize, rig.home_at(0, FREE));
        rig.file.write_all_at(&[0; BLOCK as usize], free_at).expect("written");
        let of = |image: &[u8]| image[at..][..BLOCK as usize].to_vec();
        assert!(of(&rig.recovered()) == content(1), "where the power fails, all before it is there");
        rig.file.write_all_at(&content(3), free_at).expect("written");
        if dies {
            rig.held.clear();
            rig.holds = Box::new(|_| false);
            rig.die().expect("it goes on");
            rig.superblock(0, true);
        } else {
            rig.end_held();
            assert!(rig.waiting() == 0, "it counts");
        }
        assert!(of(&rig.recovered()) == content(2), "what the guest wrote home has left with the tail");
    }
}

/// What is written there otherwise would be a part of what may be lost.
#[test]
fn what_is_written_home_otherwise_than_it_was_acknowledged_waits() {
    for (block, byte) in [(IN_USE, 9), (FREE, 9), (IN_USE, 1)] {
        let mut rig = with_one_ahead_of_its_flush();
        let at = rig.home_at(0, block);
        rig.request(RequestKind::Write, at, &mut content(byte));
        assert_eq!(rig.waiting(), 1, "block {block}");
        rig.end_held();
        assert!(rig.waiting() == 0 && rig.read(0, block) == content(byte));
    }
}

/// The superblock of another journal.
fn another_journal(rig: &Rig) -> (u64, Vec<u8>) {
    let mut other = rig.file_systems[0].superblock.clone();
    other[0x30..0x40].fill(7);
    SuperblockEdit::new(&mut other).expect("a superblock").start(1).sequence(1).seal();
    (rig.file_systems[0].log_at[0], other)
}

/// The guest has written all of a transaction home, whose flush fails then. Storage has lost its append. Before that it may have written home what it
/// committed there earlier.
fn with_one_written_home_that_is_lost(earlier: bool) -> (Rig, Arc<AtomicBool>) {
    let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
    let is_broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&is_broken);
    rig.journals.disk(0).simulate_writes(move || !breaks.load(Ordering::Relaxed));
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let (at, free_at) = (rig.home_at(0, IN_USE), rig.home_at(0, FREE));
    if earlier {
        assert_eq!(rig.request(RequestKind::Write, at, &mut content(1)), 0, "absorbed");
    }
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    rig.commit_all(0, &[(IN_USE, content(2)), (FREE, content(3))]);
    rig.request(RequestKind::Write, at, &mut content(2));
    rig.request(RequestKind::Write, free_at, &mut content(3));
    assert_eq!(rig.waiting(), 0);
    rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
    rig.end_held();
    rig.fails = Box::new(|_| false);
    rig.file.write_all_at(&[0; BLOCK as usize], free_at).expect("written");
    rig.may_fail = true;
    (rig, is_broken)
}

/// The guest writes over its log behind a transaction that is lost, of which it has written something home.
#[test]
fn what_was_written_home_is_there_where_its_log_is_written_over() {
    for earlier in [false, true] {
        let (mut rig, _) = with_one_written_home_that_is_lost(earlier);
        let (log_at, mut other) = another_journal(&rig);
        rig.request(RequestKind::Write, log_at, &mut other);
        assert_eq!(rig.failed, [], "the guest cannot write over its log");
        assert!(rig.stored(0, IN_USE) == content(2) && rig.stored(0, FREE) == content(3), "{earlier}");
    }
}

/// The same, and storage fails still: what is nowhere else is not let go.
#[test]
fn a_log_is_not_written_over_while_what_was_written_home_is_in_it_alone() {
    let (mut rig, is_broken) = with_one_written_home_that_is_lost(false);
    let (log_at, mut other) = another_journal(&rig);
    is_broken.store(true, Ordering::Relaxed);
    rig.request(RequestKind::Write, log_at, &mut other);
    assert_eq!(rig.failed.len(), 1, "it is told that all is well");
    assert!(found(&rig).prepared.is_some());
}

/// Who reads what storage has lost gets what was committed.
#[test]
fn what_may_be_lost_is_read_as_it_was_acknowledged() {
    let (mut rig, _) = with_one_written_home_that_is_lost(false);
    assert!(rig.read(0, IN_USE) == content(2) && rig.read(0, FREE) == content(3));
}

/// Another file system is made over this one: the superblock's write was on its way before the transaction was acknowledged (one that came later would
/// wait). What the guest has written home of that is in the commit alone.
#[test]
fn what_was_written_home_is_there_where_its_file_system_is_gone() {
    for (earlier, is_lost) in [(false, false), (true, false), (false, true)] {
        let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let (start, at, free_at) = (rig.file_systems[0].start, rig.home_at(0, IN_USE), rig.home_at(0, FREE));
        if earlier {
            assert_eq!(rig.request(RequestKind::Write, at, &mut content(1)), 0, "absorbed");
        }
        rig.holds = Box::new(move |operation| operation.operation == Operation::Flush || operation.offset == start);
        rig.request(RequestKind::Write, start, &mut vec![0; BLOCK as usize]);
        assert_eq!(rig.held.len(), 1, "its superblock is being written over");
        rig.commit_all(0, &[(IN_USE, content(2)), (FREE, content(3))]);
        assert!(found(&rig).prepared.is_some() && rig.held.len() == 2, "it is acknowledged");
        assert_eq!(rig.request(RequestKind::Write, at, &mut content(2)), 0, "absorbed");
        assert_eq!(rig.request(RequestKind::Write, free_at, &mut content(3)), 0, "absorbed");
        rig.may_fail = true;
        let (superblock, flush) = (rig.held.remove(0), rig.held.remove(0));
        if is_lost {
            rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
            rig.end(flush);
            rig.fails = Box::new(|_| false);
            rig.file.write_all_at(&[0; BLOCK as usize], free_at).expect("written");
        }
        rig.holds = Box::new(|_| false);
        rig.end(superblock);
        let logs = rig.journals.logs();
        assert!(!logs.iter().any(|log| log.place().home_start == start), "its journal is known still");
        assert!(found(&rig).owner.is_none(), "the region is nobody's");
        assert!(rig.stored(0, IN_USE) == content(2) && rig.stored(0, FREE) == content(3), "{earlier}, {is_lost}");
    }
}

/// A tail that lets nothing of the transaction go need not wait for it.
#[test]
fn a_tail_before_what_was_absorbed_does_not_wait() {
    let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
    rig.superblock(0, true);
    rig.commit(0, IN_USE + 1, &content(1));
    let other_at = rig.home_at(0, IN_USE + 1);
    rig.request(RequestKind::Write, other_at, &mut content(1));
    let of = &rig.file_systems[0];
    let (log_at, start, sequence, mut block) =
        (of.log_at[0], of.builder.position, of.builder.sequence, of.superblock.clone());
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    rig.commit_all(0, &[(IN_USE, content(2)), (FREE, content(3))]);
    let at = rig.home_at(0, IN_USE);
    rig.request(RequestKind::Write, at, &mut content(2));
    SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
    rig.request(RequestKind::Write, log_at, &mut block);
    assert_eq!(rig.waiting(), 0);
    rig.superblock(0, true);
    assert_eq!(rig.waiting(), 1, "one that passes it does");
    rig.end_held();
}

/// A guest writes over an append that is home, before its transaction counts, and then what the transaction has.
#[test]
fn an_append_that_was_written_over_is_not_known_to_be_at_home() {
    for pipelined in [false, true] {
        let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (pipelined, 0));
        rig.superblock(0, true);
        let (at, other_at) = (rig.home_at(0, FREE), rig.home_at(0, FREE + 2));
        rig.holds = Box::new(move |operation| operation.offset == other_at);
        rig.commit_all(0, &[(FREE, content(3)), (FREE + 2, content(4))]);
        assert_eq!(rig.held.len(), 1, "an append is on its way");
        rig.request(RequestKind::Write, at, &mut content(9));
        rig.end_held();
        rig.request(RequestKind::Write, at, &mut content(3));
        assert!(rig.read(0, FREE) == content(3) && rig.stored(0, FREE) == content(3));
    }
}

/// A reader that is no mount, as one that looks at what the disk has, costs the guest nothing; nor does a mount.
#[test]
fn who_reads_where_a_log_begins_has_what_was_acknowledged_made_durable() {
    let (mut rig, is_broken, before) = with_a_lost_transaction();
    let at = rig.file_systems[0].log_at[0];
    is_broken.store(true, Ordering::Relaxed);
    rig.request(RequestKind::Read, at, &mut content(0));
    assert_eq!(rig.failed, [RequestId(rig.next_request)], "nobody reads of a log without it");
    assert!(found(&rig).prepared.is_some(), "it may be lost still");
    is_broken.store(false, Ordering::Relaxed);
    rig.request(RequestKind::Read, at, &mut content(0));
    assert_eq!(rig.failed.len(), 1);
    let found = found(&rig);
    assert_eq!((found.prepared, found.sequence), (None, rig.file_systems[0].builder.sequence.wrapping_sub(1)));
    assert!(rig.recovered_block(FREE) == content(3) && rig.recovered_block(IN_USE) == content(2));
    assert!(rig.recovered_beside(&before).is_err(), "an image of before does not have its append");
    // The kernel mounts again, and has replayed its log: it leaves a number out.
    rig.file_systems[0].builder.sequence += 1;
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(4));
    assert_eq!(rig.failed.len(), 1, "its log goes on");
    assert!(rig.recovered_block(FREE) == content(3) && rig.recovered_block(IN_USE) == content(4));
}

/// It is lost once, however often somebody tries to make it durable.
#[test]
fn a_transaction_that_is_lost_is_counted_once() {
    // The fence of the region that fails as that is tried: of the mark, or of the transaction's own, which is the last.
    for failing in 0.. {
        let (mut rig, ..) = with_a_lost_transaction();
        let at = rig.file_systems[0].log_at[0];
        let mut left = failing;
        at_each_fence(&rig.hook, move || {
            left -= 1;
            if left < 0 { Err(std::io::Error::other("the region has failed")) } else { Ok(()) }
        });
        for _ in 0..3 {
            rig.request(RequestKind::Read, at, &mut content(0));
        }
        if rig.failed.is_empty() {
            assert!(failing > 0);
            break;
        }
        let report = rig.journals.report("vm");
        let said = report.disks[0].nvm.as_ref().expect("regions").commits_in_doubt;
        assert_eq!((said, rig.failed.len()), (1, 3), "fence {failing}");
    }
}

/// The log is not what it seems: it goes to its own place with what was acknowledged, or stays.
#[test]
fn a_log_does_not_go_to_its_own_place_without_what_was_acknowledged() {
    for breaks in [false, true] {
        let (mut rig, is_broken, _) = with_a_lost_transaction();
        is_broken.store(breaks, Ordering::Relaxed);
        rig.commit(0, FILE_SYSTEM_BLOCKS + 1, &content(5));
        assert!(rig.journals.disk(0).fault().unwrap_or_default().contains("beyond the end"));
        if breaks {
            assert_eq!(rig.log(0).placement, PlacementKind::Nvm);
            assert!(found(&rig).prepared.is_some(), "it may be lost still");
            is_broken.store(false, Ordering::Relaxed);
            // The guest is gone, and storage works.
            rig.start("next").expect("started");
        } else {
            assert_eq!(rig.log(0).placement, PlacementKind::Storage);
        }
        assert!(rig.replayed(0) == [(IN_USE, content(2)), (FREE, content(3))].into(), "{:?}", rig.replayed(0).keys());
        assert!(rig.stored(0, FREE) == content(3));
    }
}
