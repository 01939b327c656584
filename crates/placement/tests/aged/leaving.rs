//! A log leaves for storage under a guest that always has a home write under way: the next ones wait until it has left, or until whoever wished
//! that gives up. What is durable by age is so until then.

use super::*;
use block_route::LogIndex;

fn index(rig: &Rig) -> LogIndex {
    rig.journals.logs()[0].index()
}

fn wish(rig: &Rig) {
    let change = rig.journals.change_placement(index(rig), PlacementKind::Storage).expect("possible");
    assert_eq!(change, Change::HandOver);
}

/// Asks for it once, and lets the disk do what it is woken for.
fn ask(rig: &mut Rig) -> bool {
    let (index, mut plan) = (index(rig), Plan::default());
    let is_done = rig.route.hand_over(index, &mut plan).expect("asked");
    rig.plan(plan);
    rig.wake(1);
    is_done
}

/// Whether a write of this block is on its way.
fn is_on_its_way(rig: &Rig, block: u64) -> bool {
    rig.waiting.iter().any(|operation| operation.offset == rig.start + block * BLOCK)
}

/// Everything is answered, and the log is on storage, with the last transaction at home.
fn expect_there(mut rig: Rig) {
    rig.wake(1);
    rig.settle();
    assert_eq!(rig.held, 0, "something waits still");
    assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok), "{:?}", rig.told);
    assert_eq!(rig.journals.logs()[0].placement, PlacementKind::Storage);
    let (image, last) = (std::fs::read(&rig.image).expect("the image"), rig.committed);
    assert_eq!(state(&Image::of(&image), (&rig.log_at, &rig.homes), last, false), Ok(last));
    rig.promise(last);
    assert!(rig.judge() > 10);
}

#[test]
fn it_leaves_under_a_guest_that_always_has_a_home_write_under_way() {
    for within in [None, Some(AGE), Some(Duration::ZERO)] {
        let mut rig = Rig::new(within);
        rig.gives_up();
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        wish(&rig);
        let mut writes = 1;
        rig.write_home(BLOCKS - writes, DIRECT);
        while !ask(&mut rig) {
            assert!(writes < 50, "{within:?}: it never does");
            // The next one is there before the first has ended.
            writes += 1;
            rig.write_home(BLOCKS - writes, DIRECT);
            if !rig.waiting.is_empty() {
                rig.settle_one();
            }
        }
        expect_there(rig);
    }
}

/// What is under way does not end in time: durability by age was in force all along.
#[test]
fn an_age_is_in_force_for_as_long_as_a_home_write_is_under_way() {
    for within in [AGE, Duration::ZERO] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        rig.promise(rig.committed);
        wish(&rig);
        let (first, second) = (BLOCKS - 1, BLOCKS - 2);
        rig.write_home(first, DIRECT);
        assert!(is_on_its_way(&rig, first));
        let hangs = rig.waiting.remove(0);
        for _ in 0..5 {
            assert!(!ask(&mut rig), "{within:?}: beside a home write that is under way");
            rig.settle();
        }
        assert_eq!(rig.within_s(), Some(within.as_secs()), "{within:?}: it has ended");
        rig.write_home(second, DIRECT);
        assert!(!is_on_its_way(&rig, second), "{within:?}: it waits");
        let compounds = rig.compounds();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        assert!(rig.compounds() > compounds, "{within:?}: commits become durable");
        rig.promise(rig.committed);

        let mut plan = Plan::default();
        rig.route.give_up_hand_over(index(&rig), &mut plan);
        rig.plan(plan);
        rig.wake(1);
        assert!(is_on_its_way(&rig, second), "{within:?}: nobody asks any more, and it waits still");
        rig.waiting.push(hangs);
        rig.settle();
        assert_eq!((rig.held, rig.within_s()), (0, Some(within.as_secs())), "{within:?}");
        assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok), "{within:?}: {:?}", rig.told);
        assert!(rig.judge() > 20, "there was no error mark at any time");
    }
}

/// While it waits, a newer version of its block is committed, which the hand-over brings home: what waits comes before that.
#[test]
fn what_waits_is_home_before_a_newer_version() {
    for within in [None, Some(AGE), Some(Duration::ZERO)] {
        let mut rig = Rig::new(within);
        rig.gives_up();
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        wish(&rig);
        rig.write_home(BLOCKS - 1, DIRECT);
        assert!(!ask(&mut rig), "{within:?}");
        let (home, older) = (rig.homes[0], rig.committed);
        rig.write_home(home, older);
        assert!(!is_on_its_way(&rig, home), "{within:?}: it waits");
        rig.commit();
        let is_done = (0..30).any(|_| {
            rig.settle();
            ask(&mut rig)
        });
        assert!(is_done, "{within:?}: it never leaves");
        expect_there(rig);
    }
}

/// What the host writes home, for want of memory or since somebody waits until nothing is owed, would keep it busy as well. A hand-over brings it home.
#[test]
fn the_host_writes_nothing_home_meanwhile() {
    let mut rig = Rig::new(None);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    wish(&rig);
    rig.write_home(BLOCKS - 1, DIRECT);
    assert!(!ask(&mut rig));
    rig.journals.logs()[0].begin_emptying();
    rig.wake(1);
    assert_eq!(rig.waiting.len(), 1, "the guest's alone: {:?}", rig.waiting);
    rig.settle();
    assert!(ask(&mut rig));
    expect_there(rig);
}
