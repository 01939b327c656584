//! A log that is held goes to its own place in the end: handed over, left to the guest since its books are wrong, or block for block since only
//! the guest's kernel can replay it. Its blocks lie there before the superblock that makes them count, and what is held is lost with the host:
//! the mark that stays then says a number that none of them has.

use super::*;

/// How it comes to be there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    HandedOver,
    WrongBooks,
    BlockForBlock,
}

/// A log with transactions of which nothing is home, and one that is not committed. Gives its commit block.
fn fill(rig: &mut Rig) -> (u32, Vec<u8>) {
    rig.gives_up();
    rig.open();
    for _ in 0..3 {
        rig.commit();
        rig.settle();
    }
    let log = rig.transaction();
    let (commit, body) = log.split_last().expect("a commit block");
    rig.request_log(body);
    rig.settle();
    commit.clone()
}

#[test]
fn the_mark_is_behind_what_is_put_in_its_place() {
    for way in [Way::HandedOver, Way::WrongBooks, Way::BlockForBlock] {
        for has_compounds in [false, true] {
            if way == Way::BlockForBlock && has_compounds {
                // Such a log is not made durable by age.
                continue;
            }
            let mut rig = Rig::new(has_compounds.then_some(AGE));
            if way == Way::BlockForBlock {
                // Fast commits, which no replay of ours understands.
                rig.superblock[0x28..0x2c].copy_from_slice(&0x20u32.to_be_bytes());
                let (parsed, format) = Superblock::parse(&rig.superblock).expect("a journal");
                rig.builder = LogBuilder::new(format, parsed.first, parsed.sequence + 1);
            }
            let commit = fill(&mut rig);
            if has_compounds {
                rig.pass(1500);
                assert!(is_aged(&rig));
            }
            let written = std::fs::metadata(rig.directory.path().join("log")).expect("the log").len();
            match way {
                Way::HandedOver => {
                    let index = rig.journals.logs()[0].index();
                    let change = rig.journals.change_placement(index, PlacementKind::Storage).expect("possible");
                    assert_eq!(change, Change::HandOver);
                    let is_done = (0..9).any(|_| {
                        let mut plan = Plan::default();
                        let is_done = rig.route.hand_over(index, &mut plan).expect("asked");
                        rig.plan(plan);
                        rig.settle();
                        rig.pass(1);
                        is_done
                    });
                    assert!(is_done, "{way:?}");
                }
                Way::WrongBooks => {
                    // A transaction writes over the log itself.
                    rig.request_log(&[commit]);
                    let log = rig.transaction_with([rig.log_at[9] / BLOCK]);
                    rig.request_log(&log);
                    rig.settle();
                    (0..3).for_each(|_| rig.pass(1500));
                    assert!(rig.journals.disk(0).fault().is_some());
                    rig.journals.recover_all().expect("recovered");
                }
                Way::BlockForBlock => {
                    rig.journals.recover_all().expect("recovered");
                }
            }
            assert!(!said(&rig).is_empty(), "{way:?}: the log is in its place");
            assert!(std::fs::metadata(rig.directory.path().join("log")).expect("the log").len() > written);
            assert!(rig.judge() > 40, "{way:?}");
        }
    }
}

/// Its guest is reset after whoever wished it there has asked so often: it is there before he is told so.
#[test]
fn one_whose_guest_is_reset_on_its_way_is_where_it_was_wished() {
    let mut resets = 0;
    for within in [None, Some(AGE), Some(Duration::ZERO)] {
        for asked in 0..3 {
            let mut rig = Rig::new(within);
            fill(&mut rig);
            rig.pass(1500);
            let index = rig.journals.logs()[0].index();
            let change = rig.journals.change_placement(index, PlacementKind::Storage).expect("possible");
            assert_eq!(change, Change::HandOver);
            let is_there = (0..asked).any(|_| {
                let mut plan = Plan::default();
                let is_done = rig.route.hand_over(index, &mut plan).expect("asked");
                rig.plan(plan);
                rig.pass(1);
                is_done
            });
            assert_eq!(rig.journals.logs()[0].placement == PlacementKind::Storage, is_there, "{within:?}");
            if is_there {
                continue;
            }
            resets += 1;
            rig.journals.recover_disk(0).expect("its device begins anew");
            let log = rig.journals.logs().remove(0);
            assert_eq!((log.placement, log.is_open()), (PlacementKind::Storage, false), "{within:?}, asked {asked}");
            assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
            rig.journals.check_left().expect("nothing of it is here");
            // The last one is not committed.
            let last = content(rig.committed - 1);
            for block in rig.homes {
                let mut home = vec![0; BLOCK as usize];
                rig.file.read_exact_at(&mut home, block * BLOCK).expect("read");
                assert!(home == last, "{within:?}, asked {asked}: block {block}");
            }
        }
    }
    assert!(resets >= 5, "{resets} resets");
}

/// A transaction that writes over the log itself: it is not where the books say.
fn contradict(rig: &mut Rig) {
    let log = rig.transaction_with([rig.log_at[9] / BLOCK]);
    rig.request_log(&log);
}

/// What durability by age has written home itself may be in wrong places, and whoever is told that the books are wrong is told of it.
#[test]
fn who_is_told_of_wrong_books_is_told_what_was_written_home() {
    for has_ended in [false, true] {
        let mut rig = Rig::new(Some(AGE));
        rig.gives_up();
        rig.open();
        let image = std::fs::read(&rig.image).expect("the image");
        let mut allocation = extfs::Allocation::default();
        let free = (0..BLOCKS).rev().find(|block| allocation.is_free(&image, *block).expect("bitmaps")).expect("one");
        let log = rig.transaction_with([free]);
        rig.request_log(&log);
        rig.settle();
        rig.pass(1500);
        assert_eq!(rig.compounds(), 1);
        if has_ended {
            // That was before, and it counts all the same.
            rig.journals.set_durable_within(0, None).expect("a wish");
            rig.pass(1);
            assert!(!is_aged(&rig));
        }
        contradict(&mut rig);
        rig.settle();
        (0..3).for_each(|_| rig.pass(1500));
        let fault = rig.journals.disk(0).fault().expect("it is said");
        let says = "1 blocks were written home by amberlog before, perhaps to wrong places: run e2fsck";
        assert!(fault.contains(says), "ended before: {has_ended}: {fault}");
    }
}

/// Nor does a superblock go unanswered that waits for home writes, since what is to be cleared away behind it shares pages with homes.
#[test]
fn a_superblock_that_waits_is_answered_where_the_books_are_wrong() {
    let mut rig = Rig::at(63 * 512, None);
    let next = outrun(&mut rig, false);
    rig.write_home(rig.homes[0], rig.committed);
    rig.superblock_begins(0, next);
    assert_eq!((rig.waiting.len(), rig.held), (1, 1), "it waits for a home write");
    let log = rig.journals.logs()[0].id;
    rig.journals.area.contradict(log, "it is open, and the disk has another file system in its place".to_owned());
    rig.wake(0);
    rig.settle();
    (0..3).for_each(|_| rig.pass(1500));
    assert_eq!(rig.held, 0, "it is answered");
}

/// And it does not begin beside such books: they name no version, as if all were home, and storage would be called good by itself.
#[test]
fn it_does_not_begin_where_the_books_are_wrong() {
    let mut rig = Rig::new(None);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    // It is to begin when this has ended.
    rig.write_home(rig.homes[0], rig.committed);
    rig.journals.set_durable_within(0, Some(AGE)).expect("possible");
    rig.wake(0);
    assert_eq!(rig.waiting.len(), 1);
    // What ends beside it has shown another file system there: that is looked at when the pass is over.
    let log = rig.journals.logs()[0].id;
    rig.journals.area.contradict(log, "it is open, and the disk has another file system in its place".to_owned());
    rig.settle_one();
    assert!(rig.waiting.is_empty(), "something begins: {:?}", rig.waiting);
    let reason = rig.journals.report("vm").disks[0].durability.as_ref().and_then(|report| report.reason.clone());
    assert!(reason.expect("a reason").contains("its books are wrong"));
    (0..3).for_each(|_| rig.pass(1500));
    assert!(rig.journals.disk(0).fault().expect("it is said").contains("is not what it seemed"));
    assert_eq!(rig.compounds(), 0);
    assert!(!said(&rig).is_empty(), "the log is in its place");
    assert!(rig.judge() > 20);
}

/// Nor does the host send what it had chosen to write home before.
#[test]
fn what_waits_to_go_home_does_not_where_the_books_are_wrong() {
    let mut rig = Rig::new(Some(Duration::from_secs(3600)));
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    rig.journals.logs()[0].begin_emptying();
    rig.wake(0);
    assert!(!rig.waiting.is_empty(), "a compound is under way, for which the host's writes wait");
    contradict(&mut rig);
    // It ends before that compound is durable.
    (0..3).for_each(|_| rig.wake(1));
    rig.settle();
    (0..3).for_each(|_| rig.pass(1500));
    assert!(rig.journals.disk(0).fault().expect("it is said").contains("is not what it seemed"));
    assert!(!said(&rig).is_empty(), "the log is in its place");
    for block in rig.homes {
        let mut stored = vec![1; BLOCK as usize];
        rig.file.read_exact_at(&mut stored, block * BLOCK).expect("read");
        assert!(stored.iter().all(|byte| *byte == 0), "block {block} was written");
    }
    rig.journals.recover_all().expect("nothing keeps it waiting");
}
