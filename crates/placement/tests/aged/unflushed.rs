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

/// Its guest was told nothing, and has committed nothing: whoever finishes what is left finds nothing to do, wherever its worker has died.
#[test]
fn a_log_whose_worker_dies_while_it_is_opened_owes_nothing() {
    for within in [None, Some(AGE)] {
        for flush in 1.. {
            let mut rig = Rig::new(within);
            simulated_flushes::die_before(flush);
            let open = std::panic::AssertUnwindSafe(|| rig.open());
            let has_died = std::panic::catch_unwind(open).is_err();
            simulated_flushes::die_before(0);
            if !has_died {
                assert!(flush > 1, "something is flushed");
                break;
            }
            let area = rig.journals.directory().path().to_owned();
            let Rig { directory, image, journals, route, log_at, .. } = rig;
            let lock = journals.directory().lock_file();
            rustix::fs::flock(lock, rustix::fs::FlockOperation::Unlock).expect("it is let go");
            // Nothing of a process that was killed is dropped in good order.
            std::mem::forget((journals, route));
            let found = AreaDirectory::take_over(&area, &directory.path().join("registry"));
            let what = format!("{within:?}, before flush {flush}");
            let found = found.unwrap_or_else(|error| panic!("{what}: {error}"));
            let finished = placement::finish_directory(&found, std::slice::from_ref(&image))
                .and_then(placement::Finish::into_result)
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(finished.len(), 1, "{what}");
            assert_eq!(finished[0].recovery.blocks_written, 0, "{what}");
            let bytes = std::fs::read(&image).expect("the image");
            let said = Superblock::decode(&bytes[log_at[0] as usize..][..SUPERBLOCK_BYTES]).expect("a superblock");
            assert!(said.is_empty() && said.errno == 0, "{what}: {said:?}");
        }
    }
}
