//! An age that becomes another one, and faults beside it.

use super::*;

/// Nothing becomes due by itself.
const LONG: Duration = Duration::from_secs(3600);

fn set_age(rig: &mut Rig, within: Duration) {
    rig.journals.set_durable_within(0, Some(within)).expect("possible");
    rig.wake(0);
}

/// What an age had allowed is durable before it is said that no age is in force, and before a flush is answered that comes after it.
#[test]
fn no_age_is_in_force_when_all_that_an_age_allowed_is_durable() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    let compounds = rig.compounds();
    assert_eq!(rig.within_s(), Some(LONG.as_secs()));
    set_age(&mut rig, Duration::ZERO);
    rig.request(RequestKind::Flush, 0, &[]);
    assert!(rig.held > 0, "the flush waits");
    while rig.held > 0 || rig.within_s() != Some(0) {
        assert!(rig.compounds() > compounds || rig.within_s() == Some(LONG.as_secs()), "it is not in force yet");
        rig.settle_one();
    }
    assert!(rig.compounds() > compounds, "the flush was answered before");
    rig.promise(1);
    rig.settle();
    assert!(rig.judge() > 5);
}

/// A journal is held, it is promised nothing, and said why.
#[track_caller]
fn expect_missing(rig: &Rig, why: &str) {
    let durability = rig.journals.report("vm").disks.remove(0).durability.expect("it is asked for");
    assert!(durability.is_held && durability.within_s.is_none(), "{durability:?}");
    assert!(durability.reason.as_ref().is_some_and(|reason| reason.contains(why)), "{durability:?}");
}

/// Somebody takes a log elsewhere: until it is there it is held, and nothing is in force.
#[test]
fn a_journal_on_its_way_is_held_without_its_promise() {
    let mut rig = Rig::new(Some(AGE));
    let is_held = |rig: &Rig| rig.journals.report("vm").disks.remove(0).durability.is_some_and(|all| all.is_held);
    assert!(!is_held(&rig), "nothing is mounted");
    rig.open();
    rig.commit();
    rig.settle();
    assert!(is_held(&rig) && rig.within_s().is_some());
    let index = rig.journals.logs()[0].index();
    let change = rig.journals.change_placement(index, PlacementKind::Storage).expect("possible");
    assert_eq!(change, Change::HandOver);
    let mut plan = Plan::default();
    assert!(!rig.route.hand_over(index, &mut plan).expect("asked"), "durability ends first");
    rig.plan(plan);
    rig.wake(0);
    rig.settle();
    rig.wake(0);
    assert!(!is_aged(&rig), "it has ended");
    expect_missing(&rig, "on its way to storage");
    let is_done = (0..9).any(|_| {
        let mut plan = Plan::default();
        let is_done = rig.route.hand_over(index, &mut plan).expect("asked");
        rig.plan(plan);
        rig.pass(1);
        is_done
    });
    assert!(is_done, "it is handed over");
    assert!(!is_held(&rig), "its guest makes it durable itself");
}

/// It is wished away, and has not ended before storage has the error mark, though nothing is waited for any more.
#[test]
fn what_is_wished_away_is_over_when_storage_says_so() {
    let mut rig = Rig::new(Some(AGE));
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    rig.wake(1500);
    assert!(!rig.waiting.is_empty(), "it is made durable");
    let durability = |rig: &Rig| rig.journals.report("vm").disks.remove(0).durability.expect("it is held");
    assert!(durability(&rig).has_begun);
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.wake(0);
    assert!(is_aged(&rig), "what was sent has not ended");
    while !rig.waiting.is_empty() {
        let said = durability(&rig);
        assert!(said.has_begun && said.within_s.is_none() && said.oldest_undurable_s.is_none(), "{said:?}");
        rig.settle_one();
    }
    rig.wake(0);
    assert!(!is_aged(&rig) && !durability(&rig).has_begun);
}

/// A flush that waits for what no age does not allow waits for nothing when an age is wished again.
#[test]
fn a_flush_does_not_wait_for_an_age_that_comes_later() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    set_age(&mut rig, Duration::ZERO);
    rig.request(RequestKind::Flush, 0, &[]);
    let flush = RequestId(rig.next);
    assert!(rig.held > 0, "it waits");
    set_age(&mut rig, LONG);
    // As a guest that goes on has always something that is not home.
    assert!(rig.told.iter().any(|(request, status)| *request == flush && *status == Status::Ok), "it hangs");
    rig.settle();
    assert_eq!(rig.held, 0);
}

/// What an age had allowed is durable before another worker answers a flush, or says that no age is in force: the first one knew.
#[test]
fn who_follows_a_change_to_no_age_owes_what_the_age_allowed() {
    for is_asked_before in [false, true] {
        let mut rig = Rig::new(Some(LONG));
        rig.open();
        rig.commit();
        rig.settle();
        set_age(&mut rig, Duration::ZERO);
        if is_asked_before {
            rig.request(RequestKind::Flush, 0, &[]);
            assert!(rig.held > 0, "the flush waits");
        }
        // Nothing of what it had sent was done.
        (rig.waiting, rig.held) = (Vec::new(), 0);
        rig.follow(Some(Duration::ZERO)).expect("it goes on");
        assert_ne!(rig.within_s(), Some(0), "it is not in force yet");
        expect_missing(&rig, "not yet");
        rig.request(RequestKind::Flush, 0, &[]);
        let flush = RequestId(rig.next);
        let is_told = |rig: &Rig| rig.told.iter().any(|(request, _)| *request == flush);
        rig.wake(0);
        // As long as storage takes for the first compound.
        expect_missing(&rig, "not yet");
        while !(is_told(&rig) && rig.within_s() == Some(0)) {
            assert!(rig.compounds() > 0 || !is_told(&rig) && rig.within_s() != Some(0), "nothing is durable yet");
            assert!(!rig.waiting.is_empty(), "it hangs");
            rig.settle_one();
        }
        rig.promise(1);
        rig.settle();
        assert!(rig.judge() > 5);
    }
}

/// A flush that waits for what an age had allowed leaves when storage says that the journal is only held, if durability ends meanwhile.
#[test]
fn a_flush_does_not_leave_before_storage_says_that_it_is_only_held() {
    for is_asked_before in [true, false] {
        for settled in 0..4 {
            let mut rig = Rig::new(Some(LONG));
            rig.open();
            rig.commit();
            rig.settle();
            set_age(&mut rig, Duration::ZERO);
            if is_asked_before {
                rig.request(RequestKind::Flush, 0, &[]);
                assert!(rig.held > 0, "the flush waits");
            }
            for _ in 0..settled {
                rig.settle_one();
            }
            rig.gives_up();
            rig.journals.set_durable_within(0, None).expect("possible");
            rig.wake(0);
            if !is_asked_before {
                rig.request(RequestKind::Flush, 0, &[]);
            }
            while !rig.waiting.is_empty() {
                assert!(rig.held > 0 || !is_aged(&rig) || rig.compounds() > 0, "it left before ({settled} steps)");
                rig.settle_one();
            }
            rig.wake(0);
            rig.settle();
            assert_eq!((is_aged(&rig), rig.held), (false, 0), "after {settled} steps");
        }
    }
}

/// A recovery that fails at a reset leaves all that it may have to bring home once more, and nothing goes home beside it that the compounds
/// on storage would be replayed over.
#[test]
fn nothing_goes_home_beside_a_recovery_that_failed() {
    let mut has_failed = 0;
    for writes in 0.. {
        let mut rig = Rig::new(Some(AGE));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(2 * AGE.as_millis() as u64);
        assert!(rig.compounds() > 0);
        rig.commit();
        rig.settle();
        // Taken in and answered: it goes home when it is durable.
        rig.write_homes();
        rig.settle();
        let last = rig.committed;
        let left = Arc::new(AtomicU64::new(writes));
        let counted = Arc::clone(&left);
        let goes_well =
            move || counted.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok();
        rig.journals.disk(0).simulate_writes(goes_well);
        if rig.journals.recover_disk(0).is_ok() {
            break;
        }
        has_failed += 1;
        left.store(u64::MAX, Ordering::Release);
        rig.pass(10_000);
        rig.wake(10_000);
        rig.settle();
        rig.journals.recover_disk(0).unwrap_or_else(|error| panic!("after {writes} writes: {error}"));
        let bytes = std::fs::read(&rig.image).expect("the image");
        let is_there = state(&Image::of(&bytes), (&rig.log_at, &rig.homes), last, false);
        assert_eq!(is_there, Ok(last), "after {writes} writes");
    }
    assert!(has_failed > 4, "{has_failed} failures");
}

/// A flush of another part of the image fails just before a write of a recovery, and storage says so to whoever asked for that one: what the
/// recovery wrote before may be lost, so none of its own flushes says that it is durable.
#[test]
fn a_recovery_counts_on_no_flush_behind_one_that_failed() {
    let mut has_failed = 0;
    for writes in 1.. {
        let mut rig = Rig::new(Some(AGE));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(2 * AGE.as_millis() as u64);
        assert!(rig.compounds() > 0);
        rig.commit();
        rig.settle();
        let (written, journals) = (Arc::new(AtomicU64::new(0)), Arc::clone(&rig.journals));
        let counted = Arc::clone(&written);
        rig.journals.disk(0).simulate_writes(move || {
            if counted.fetch_add(1, Ordering::AcqRel) + 1 == writes {
                journals.disk(0).note_failed_flush();
            }
            true
        });
        let recovered = rig.journals.recover_disk(0);
        if written.load(Ordering::Acquire) < writes {
            recovered.expect("nothing has failed");
            break;
        }
        let error = recovered.expect_err("what was written may be lost").to_string();
        assert!(error.contains("flush"), "{error}");
        has_failed += 1;
        rig.journals.recover_disk(0).unwrap_or_else(|error| panic!("after {writes} writes: {error}"));
        let bytes = std::fs::read(&rig.image).expect("the image");
        let is_there = state(&Image::of(&bytes), (&rig.log_at, &rig.homes), rig.committed, false);
        assert_eq!(is_there, Ok(rig.committed), "after {writes} writes");
        expect_in_doubt(&rig);
    }
    assert!(has_failed > 4, "{has_failed} failures");
}

/// Nobody is told that all is there, and whoever mounts it or checks it knows.
fn expect_in_doubt(rig: &Rig) {
    let reports = rig.journals.recoveries(0);
    let report = reports.last().expect("it was recovered");
    assert_eq!(report.status, recovery::Status::Damaged, "{report:?}");
    assert!(report.notes.iter().any(|note| note.contains("may be lost: run e2fsck -f")), "{report:?}");
    let mut raw = vec![0; 1024];
    rig.file.read_exact_at(&mut raw, rig.start + 1024).expect("read");
    let said = extfs::Superblock::parse(&raw).expect("a superblock");
    assert_eq!(said.state & (extfs::state::ERROR | extfs::state::VALID), extfs::state::ERROR);
}

/// A flush of the disk failed while the log was only held, or beside compounds, whoever asked for it, under this worker or an earlier one: what the guest
/// wrote home before that, and its log has let go of, may be lost. What is held goes home. That is over when the log is opened anew.
#[test]
fn what_a_failed_flush_may_have_lost_is_not_called_recovered() {
    for (within, is_followed, is_over) in [
        (None, false, false),
        (Some(AGE), false, false),
        (None, true, false),
        (Some(AGE), true, false),
        (None, false, true),
        (Some(AGE), true, true),
    ] {
        let mut rig = Rig::new(within);
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        rig.journals.disk(0).note_failed_flush();
        rig.settle();
        if is_followed {
            rig.wake(0);
            rig.settle();
            rig.follow(within).expect("it goes on");
        }
        if is_over {
            rig.write_homes();
            rig.settle();
            rig.superblock(0, rig.builder.sequence);
            rig.wake(0);
            rig.settle();
            rig.open();
        }
        rig.commit();
        rig.settle();
        expect_recovered(&rig);
        if is_over {
            assert_eq!(rig.journals.recoveries(0).last().expect("one").status, recovery::Status::Recovered);
        } else {
            expect_in_doubt(&rig);
        }
    }
}

/// With an age nobody was promised more than that it is held, also while durability ends for a fault.
#[test]
fn a_commit_beside_a_fault_is_held() {
    let mut rig = Rig::new(Some(AGE));
    rig.open();
    let free = BLOCKS - 8;
    let log = rig.transaction_with([free]);
    rig.write_log(&log, |_| true);
    rig.settle();
    rig.wake(AGE.as_millis() as u64);
    assert!(rig.waiting.len() > 1, "a compound is under way, in pieces: {:?}", rig.waiting);
    rig.fails = true;
    rig.settle_one();
    rig.fails = false;
    rig.gives_up();
    assert!(is_aged(&rig), "nothing has ended yet");
    let told = rig.told.len();
    rig.commit();
    rig.settle();
    let later = &rig.told[told..];
    assert!(!later.is_empty() && later.iter().all(|(_, status)| *status == Status::Ok), "{later:?}");
    assert_eq!((is_aged(&rig), rig.held), (false, 0), "storage says that it is only held");
}

/// Whether a flush of the guest fails.
fn is_flush_told(rig: &mut Rig) -> bool {
    rig.request(RequestKind::Flush, 0, &[]);
    rig.settle();
    let flush = RequestId(rig.next);
    rig.told.iter().any(|(request, status)| *request == flush && *status == Status::IoError)
}

/// Storage fails a write of amberlog's own while no commit waits. With no age what was answered as durable is not any more when that ends: the guest's next
/// flush says so, once, whichever worker answers it. Behind an age no flush says anything of commits.
#[test]
fn a_fault_with_no_age_is_told_to_the_next_flush() {
    for (within, is_followed) in [(Duration::ZERO, false), (Duration::ZERO, true), (AGE, false), (AGE, true)] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        rig.write_homes();
        rig.settle();
        rig.gives_up();
        // The tail moves, which storage is to say.
        rig.superblock_begins(rig.builder.position, rig.builder.sequence);
        rig.wake(1500);
        assert!(!rig.waiting.is_empty() && is_aged(&rig), "{within:?}");
        rig.fails = true;
        rig.settle();
        rig.fails = false;
        rig.pass(1);
        assert!(!is_aged(&rig), "{within:?}: it is only held");
        if is_followed {
            rig.follow(Some(within)).expect("another one goes on");
        }
        let told = [is_flush_told(&mut rig), is_flush_told(&mut rig)];
        assert_eq!(told, [within.is_zero(), false], "{within:?}, followed: {is_followed}");
    }
}

/// A guest that writes something else over a journal that it has open, as who makes another file system there, has no use for what was promised before.
#[test]
fn nor_does_a_flush_fail_where_the_guest_has_ended_its_log_itself() {
    let mut rig = Rig::new(Some(Duration::ZERO));
    rig.open();
    rig.commit();
    rig.settle();
    rig.request(RequestKind::Write, rig.log_at[0], &content(9));
    rig.settle();
    rig.pass(1);
    assert!(rig.journals.logs().iter().all(|log| !log.is_open()), "it has no journal any more");
    assert!(!is_flush_told(&mut rig));
}

/// What an age has allowed is not durable at once when no age is wished, though every commit since a bitmap could not be read is.
#[test]
fn what_an_age_allowed_is_not_durable_since_bitmaps_are_not_understood() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    let image = std::fs::read(&rig.image).expect("the image");
    let superblock = extfs::discover(&image).expect("readable").remove(0).superblock;
    let bitmap = extfs::group(&image, &superblock, 0).expect("readable").expect("a group").block_bitmap;
    let log = rig.transaction_with([bitmap]);
    rig.file.set_len(0).expect("cut short");
    rig.write_log(&log, |_| true);
    rig.file.write_all_at(&image, 0).expect("it is there again");
    let compounds = rig.compounds();
    set_age(&mut rig, Duration::ZERO);
    while rig.within_s() != Some(0) {
        assert!(!rig.waiting.is_empty(), "it hangs");
        rig.settle_one();
    }
    assert!(rig.compounds() > compounds, "it is said before it is so");
    rig.settle();
}

/// A bitmap that cannot be read once: what the transaction has changed in it is not known from then on.
#[test]
fn a_bitmap_that_could_not_be_read_is_not_known_any_more() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.flushes();
    rig.write_home(BLOCKS - 1, DIRECT);
    rig.settle();
    assert_eq!(rig.flushes(), 0, "an age is in force");
    let image = std::fs::read(&rig.image).expect("the image");
    let log = rig.transaction();
    rig.file.set_len(0).expect("cut short");
    rig.write_log(&log, |_| true);
    rig.file.write_all_at(&image, 0).expect("it is there again");
    // None is any more: what ended until now is the flush's to cover.
    rig.request(RequestKind::Flush, 0, &[]);
    let flush = RequestId(rig.next);
    let is_its =
        |operation: &DiskOperation| operation.operation == Operation::Flush && operation.request == Some(flush);
    assert!(rig.waiting.iter().any(is_its), "it is answered at once");
    rig.settle();
    rig.write_home(BLOCKS - 1, DIRECT);
    rig.settle();
    assert_eq!(rig.flushes(), 1, "it is nowhere else");
    for _ in 0..2 {
        let report = rig.journals.report("vm");
        let durability = report.disks[0].durability.as_ref().expect("it is aged");
        assert_eq!(durability.within_s, Some(0));
        assert!(durability.reason.as_ref().is_some_and(|why| why.contains("bitmaps are not understood")));
        let compounds = rig.compounds();
        rig.commit();
        rig.settle();
        assert!(rig.compounds() > compounds, "a commit is durable at once");
    }
}
