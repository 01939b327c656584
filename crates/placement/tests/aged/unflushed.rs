//! A worker dies between the error mark that gives compounds up and its flush: whoever comes next sees a mark on storage that a power cut may
//! take back.

use super::*;
use write_log::simulated_flushes;

/// With what is durable and what is only held beside it, its worker ends durability, as wished.
fn about_to_end() -> Rig {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    rig.commit();
    rig.settle();
    rig.pass(1500);
    rig.promise(rig.committed);
    rig.commit();
    rig.settle();
    rig.journals.set_durable_within(0, None).expect("possible");
    rig
}

/// How many writes to homes there are that a power cut could keep without the last mark.
fn homes_beside_an_unflushed_mark(rig: &Rig) -> usize {
    let log = File::open(rig.directory.path().join("log")).expect("the log");
    let (mut is_unflushed, mut homes) = (false, 0);
    for entry in entries(&log) {
        let entry = entry.expect("an entry");
        match entry.kind {
            EntryKind::Write(data) if entry.offset == rig.log_at[0] => {
                is_unflushed = Superblock::decode(&data).expect("a superblock").errno != 0;
            }
            EntryKind::Write(_) if is_unflushed && rig.homes.contains(&(entry.offset / BLOCK)) => homes += 1,
            EntryKind::Flush => is_unflushed = false,
            _ => {}
        }
    }
    homes
}

/// What goes home then is not durable in any log: it waits until the mark is, which says so.
#[test]
fn whoever_goes_on_makes_a_mark_that_is_seen_durable_first() {
    for recovers in [false, true] {
        let mut rig = about_to_end();
        rig.gives_up();
        // The first flush is of what its guest has written home.
        simulated_flushes::die_before(2);
        let wake = std::panic::AssertUnwindSafe(|| rig.wake(0));
        assert!(std::panic::catch_unwind(wake).is_err(), "it has died");
        assert!(!is_aged(&rig) && rig.waiting.is_empty(), "the mark is seen");
        rig.follow(None).expect("another worker goes on");
        if !recovers {
            rig.write_homes();
            rig.settle();
        }
        expect_recovered(&rig);
        assert_eq!(homes_beside_an_unflushed_mark(&rig), 0, "recovers: {recovers}");
        let judged = rig.judge();
        assert!(judged > 40, "{judged}");
    }
}

/// A recovery writes it once more: of a flush that fails the kernel takes what it could not write for written, and another one says nothing
/// of it.
#[test]
fn a_recovery_writes_anew_a_mark_that_is_seen() {
    let mut rig = about_to_end();
    rig.pass(0);
    assert!(!is_aged(&rig));
    rig.log.mark("recovery");
    expect_recovered(&rig);
    let log = File::open(rig.directory.path().join("log")).expect("the log");
    let kinds = entries(&log).map(|entry| entry.expect("an entry"));
    let of_recovery = kinds.skip_while(|entry| !matches!(&entry.kind, EntryKind::Mark(name) if name == "recovery"));
    let mut of_recovery = of_recovery.skip(1).map(|entry| (entry.offset, entry.kind));
    let (offset, mark) = of_recovery.next().expect("something is written");
    let EntryKind::Write(mark) = mark else { panic!("first of all, the mark is written") };
    assert!(offset == rig.log_at[0] && Superblock::decode(&mark).expect("a superblock").errno != 0);
    assert!(matches!(of_recovery.next(), Some((_, EntryKind::Flush))), "then it is made durable");
    assert!(of_recovery.any(|(offset, _)| rig.homes.contains(&(offset / BLOCK))), "then homes are written");
}
