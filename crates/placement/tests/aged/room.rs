//! A tmpfs that somebody else fills, at any moment of a log's life: of all that the area asks memory for, one thing is refused, or a few, or
//! everything from then on. The guest is told of no error, and what it was told is committed is there.

use super::*;
use journal_area::NotHome;
use std::ops::Range;

const LOG_MIB: u64 = 16;
/// Blocks that one transaction writes beside the homes: free ones, behind the log.
const MORE: Range<u64> = BLOCKS + (LOG_MIB - 4) * 512 - 100..BLOCKS + (LOG_MIB - 4) * 512;

/// Those of the last one, which writes nothing else.
const LAST: Range<u64> = MORE.start - 100..MORE.start;
const LAST_IN: u8 = 77;
/// The transaction that does: those before it are four rounds', and one more of the third.
const MORE_IN: u8 = 6;

/// What is refused: so many, from one on.
const REFUSED: [u64; 3] = [1, 4, u64::MAX];

/// What a life has seen that it should.
#[derive(Debug, Default)]
struct Seen {
    lives: u64,
    /// Times at which blocks of a log were in their own places.
    stored: u64,
    /// Logs that were not held at all.
    brought: u64,
}

/// Opens a log near the end of a piece of its table, so that another piece is needed soon, goes through all that asks for memory, and lets the
/// log be recovered, by this worker or another one.
/// Where storage lags, it has not ended a compound when memory is refused and the guest commits again.
fn live(rig: &mut Rig, within: Option<Duration>, is_followed: bool, lags: bool) -> Seen {
    let mut seen = Seen::default();
    rig.open();
    for round in 0..6 {
        // The fifth has more than one piece of the pool takes.
        let more = if round == 4 { MORE } else { 0..0 };
        let log = rig.transaction_with(more);
        rig.request_log(&log);
        rig.settle();
        rig.pass(600);
        if round % 3 == 2 {
            // All of it goes home, the tail follows, and something is written over it past the journal.
            rig.write_homes();
            (if round == 5 { MORE } else { 0..0 }).for_each(|block| rig.write_home(block, MORE_IN));
            rig.settle();
            let tail = (rig.builder.position, rig.builder.sequence);
            rig.commit();
            rig.settle();
            rig.write_homes();
            rig.settle();
            if lags && round == 5 {
                let log = rig.transaction();
                rig.request_log(&log);
                rig.clock.fetch_add(1500, Ordering::AcqRel);
                let mut plan = Plan::default();
                rig.route.woken(&mut plan);
                rig.plan(plan);
                // More than one piece of the pool takes has to be held again.
                MORE.for_each(|block| rig.write_home(block, DIRECT));
                let log = rig.transaction();
                rig.request_log(&log);
                rig.settle();
            }
            rig.write_home(rig.homes[0], DIRECT);
            rig.settle();
            rig.pass(1500);
            rig.superblock(tail.0, tail.1);
            rig.flushes();
        }
        if is_followed && round == 3 {
            rig.follow(within).expect("another worker goes on");
        }
        let area = &rig.journals.area;
        area.check().expect("the books are right");
        let stored = rig.journals.logs().into_iter().filter_map(|log| area.why_not_home(log.id));
        seen.stored += stored.filter(|why| matches!(why, NotHome::Stored(_))).count() as u64;
    }
    seen.brought += u64::from(!rig.journals.logs().iter().any(|log| log.is_open()));
    // A version at home is held again, or stored, and there are more than one piece of the pool takes.
    rig.write_homes();
    rig.settle();
    let blocks = LAST.map(|block| (block, content(LAST_IN))).collect();
    let mut log = Vec::new();
    let transaction = Transaction { blocks, ..Transaction::default() };
    rig.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
    rig.request_log(&log);
    rig.settle();
    rig.write_home(rig.homes[1], DIRECT);
    rig.settle();
    rig.pass(1500);
    rig.journals.area.check().expect("the books are right");
    seen
}

/// Whatever is refused when, with this age.
fn refused_anywhere(within: Option<Duration>) -> Seen {
    let mut all = Seen::default();
    for (is_followed, lags) in [(false, false), (true, false), (false, true)] {
        for count in REFUSED {
            for first in 0.. {
                let mut rig = Rig::with_log(0, within, LOG_MIB);
                rig.begin_at(1010);
                simulated_room::fail_reservations(first..first.saturating_add(count));
                let seen = live(&mut rig, within, is_followed, lags);
                let asked = simulated_room::reservations();
                let what = format!(
                    "{within:?}, {count} refused from {first} on, followed: {is_followed}, lags: {lags}: {seen:?}"
                );
                let failed = rig.told.iter().filter(|(_, status)| *status != Status::Ok).count();
                assert_eq!((failed, rig.held), (0, 0), "requests failed, and waiting: {what}");
                // Recovered while there is no room, too. A log that is in its own place is left to the guest's kernel.
                rig.journals.recover_all().expect("recovered");
                let image = std::fs::read(&rig.image).expect("the image");
                if seen.brought == 0 {
                    // Where storage lags, these were written past the journal, whose tail has passed them.
                    let more = if lags { MORE.end..MORE.end } else { MORE };
                    for (block, version) in more.map(|block| (block, MORE_IN)).chain(LAST.map(|block| (block, LAST_IN)))
                    {
                        let found = &image[(block * BLOCK) as usize..][..BLOCK as usize];
                        assert!(found == content(version), "block {block}: {what}");
                    }
                }
                let state = state(&Image::of(&image), (&rig.log_at, &rig.homes), rig.committed, false);
                assert_eq!(state, Ok(rig.committed), "{what}");
                simulated_room::fail_reservations(0..0);
                (all.lives, all.stored, all.brought) =
                    (all.lives + 1, all.stored + seen.stored, all.brought + seen.brought);
                if first >= asked {
                    break;
                }
            }
        }
    }
    all
}

#[test]
fn a_guest_is_told_of_no_error_whatever_memory_is_refused() {
    let seen = refused_anywhere(None);
    println!("{seen:?}");
    assert!(seen.lives > 30 && seen.stored > 0 && seen.brought > 0, "{seen:?}");
}

#[test]
fn nor_where_it_is_made_durable_by_age() {
    let seen = refused_anywhere(Some(AGE));
    println!("{seen:?}");
    assert!(seen.lives > 30 && seen.stored > 0 && seen.brought > 0, "{seen:?}");
}
