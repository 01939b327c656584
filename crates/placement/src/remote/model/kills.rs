//! The worker is killed, and another one goes on under the same guest: it is told of no error, and nothing that it was told is
//! committed is missing, whatever else happens then: the host loses power, the server does, the network is cut, the next worker is
//! killed, too.

use super::guest::Guest;
use super::network::Weather;
use super::{CAUSES, begins, ends};
use crate::remote::lineage::Lineage;
use crate::remote::state::Mode;
use crate::remote::{MarkFound, Phase, RemoteMark};
use crate::stored::Stored;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn set_crashes(guest: &Guest, one_in: u32) {
    guest.world.known.lock().expect("no panic under this lock").crash_one_in = one_in;
}

/// Wherever the log is: on the server, with a transaction on its way.
#[test]
fn a_worker_that_is_killed_on_the_server_is_gone_on_with() {
    for seed in 0..6 {
        let mut guest = Guest::patient(2000 + seed, 6);
        guest.wait_until_remote(true);
        for _ in 0..3 {
            guest.commit();
        }
        guest.write_some_home();
        guest.begin_commit();
        guest.kill_worker();
        assert_eq!(guest.found, [Some(Mode::FallingBack)]);
        guest.world.crash();
        guest.end_commit();
        guest.world.crash();
        guest.read_log();
        guest.commit();
        guest.pass(2);
        guest.wait_until_remote(true);
        guest.commit();
        guest.world.crash();
        guest.kill_worker();
        guest.commit();
        guest.pass(usize::MAX);
        guest.close_and_open();
        guest.kill_worker();
        guest.commit();
        set_crashes(&guest, 0);
        guest.wait_until_remote(true);
        guest.world.crash();
        assert_eq!(guest.workers, 4);
    }
}

/// The server is not there any more when the next worker comes.
#[test]
fn a_worker_goes_on_without_the_server() {
    for (number, cause) in CAUSES.into_iter().enumerate() {
        let mut guest = Guest::new(2100 + number as u64, 4);
        guest.wait_until_remote(true);
        guest.commit();
        guest.begin_commit();
        begins(&guest, cause);
        guest.kill_worker();
        guest.end_commit();
        guest.commit();
        guest.world.crash();
        guest.kill_worker();
        guest.commit();
        guest.world.crash();
        ends(&guest, cause);
        set_crashes(&guest, 0);
        guest.wait_until_remote(true);
        guest.commit();
        guest.world.crash();
    }
}

/// A log whose own place has all of it goes on there: nothing is written before the guest writes.
#[test]
fn a_worker_goes_on_on_storage() {
    let mut guest = Guest::new(2200, 0);
    guest.world.stop_server();
    guest.wait_until_remote(false);
    for _ in 0..3 {
        guest.commit();
    }
    let before = guest.world.image_now();
    guest.kill_worker();
    assert_eq!(guest.found, [Some(Mode::Storage)]);
    assert!(guest.world.image_now() == before);
    guest.read_log();
    guest.commit();
    guest.world.crash();
    guest.world.start_usual_server();
    guest.wait_until_remote(true);
    guest.commit();
    guest.world.crash();
}

/// It is killed at each step on storage of going to the server, of falling back, of closing and of opening, in turn; the next one as
/// well now and then.
#[test]
fn a_worker_is_killed_at_every_step_on_storage() {
    let mut found = Vec::new();
    for step in 1.. {
        let mut guest = Guest::new(2300 + step, 0);
        guest.is_killed_often = step.is_multiple_of(3);
        guest.world.stop_server();
        guest.wait_until_remote(false);
        guest.commit();
        guest.life.kill_after(step);
        guest.world.start_usual_server();
        guest.wait_until_remote(true);
        guest.commit();
        guest.begin_commit();
        guest.world.network.reset();
        guest.end_commit();
        guest.pass(1);
        guest.commit();
        guest.world.crash();
        guest.close_and_open();
        guest.commit();
        guest.world.crash();
        let workers = guest.workers;
        found.extend(guest.found.iter().copied());
        guest.end();
        if workers == 1 {
            assert!(step > 40, "it took {step} steps only");
            break;
        }
    }
    // At which steps the two threads meet is the machine's business; a closed one is followed for certain.
    let mut guest = Guest::new(2299, 0);
    guest.wait_until_remote(true);
    guest.commit();
    guest.close();
    guest.kill_worker();
    assert_eq!(guest.found, [None]);
    for mode in [Mode::Storage, Mode::FallingBack] {
        assert!(found.contains(&Some(mode)), "{mode:?} of {found:?}");
    }
}

/// Storage counts, and its own place lacks what only the server was sent: it is killed there, and the next one while it writes that.
#[test]
fn a_worker_that_is_killed_between_the_two_places_is_gone_on_with() {
    let mut found = Vec::new();
    for round in 0..6 {
        let mut guest = Guest::new(2700 + round, 0);
        guest.world.weather(Weather::Refuses);
        guest.wait_until_remote(false);
        guest.commit();
        guest.commit();
        guest.hang();
        guest.world.weather(Weather::Good);
        guest.wait_until_switching();
        guest.begin_commit();
        // So that the next one takes its time.
        set_crashes(&guest, 1);
        guest.kill_worker();
        // Nothing comes back from there.
        guest.world.network.lead_to(None);
        guest.kill_worker();
        set_crashes(&guest, 0);
        found.extend(guest.found.iter().copied());
        guest.go_on();
        guest.end_commit();
        for _ in 0..4 {
            guest.world.crash();
        }
        guest.read_log();
    }
    assert!(found.chunks(2).all(|found| found[0] == Some(Mode::FallingBack)), "{found:?}");
    assert!(found.chunks(2).any(|found| found[1] == Some(Mode::FallingBack)), "{found:?}");
}

/// Somebody has wished the log on storage, or found that it is not what it seemed, and the worker that heard that is killed.
#[test]
fn what_a_worker_was_told_of_a_log_is_remembered() {
    let mut guest = Guest::new(2400, 0);
    guest.wait_until_remote(true);
    guest.commit();
    guest.log.pause(true);
    guest.kill_worker();
    guest.commit();
    guest.wait_until_remote(false);
    guest.commit();
    std::thread::sleep(Duration::from_millis(100));
    assert!(guest.log.is_paused().expect("it can be"), "it went back to the server");
    guest.log.pause(false);
    guest.wait_until_remote(true);
    guest.log.distrust().expect("written");
    guest.world.crash();
    guest.kill_worker();
    assert!(guest.log.is_distrusted());
    guest.commit();
    guest.wait_until_remote(false);
    let stored = guest.world.stored_superblock();
    assert!(Stored::read(&stored).is_distrusted);
    assert_eq!(RemoteMark::read(&stored), MarkFound::None);
}

/// The guest is gone before the next worker serves it: that one brings its log to storage.
#[test]
fn a_worker_that_follows_a_guest_which_is_gone_settles_its_log() {
    let mut guest = Guest::new(2800, 0);
    guest.wait_until_remote(true);
    guest.commit();
    guest.commit();
    guest.life.kill();
    let settled = guest.follow_and(|log| log.settle());
    settled.expect("settled");
    assert_eq!(RemoteMark::read(&guest.world.stored_superblock()), MarkFound::None);
    guest.world.stop_server();
    guest.world.crash();
}

/// Another host has taken the log while no worker was there, or the one before had found that: nothing is written.
#[test]
fn a_worker_does_not_go_on_with_what_is_not_its_guests() {
    for round in 0..4 {
        let mut guest = Guest::new(2500 + round, 0);
        guest.wait_until_remote(true);
        guest.commit();
        guest.life.kill();
        if round == 0 {
            let mut block = guest.world.stored_superblock();
            let lineage = Lineage::read(&block).expect("it has one");
            Lineage { claim: [7; 16], ..lineage }.write_into(&mut block);
            guest.world.write_superblock(&block);
        }
        let before = guest.world.image_now();
        let outcome = guest.try_to_follow(|copy| {
            copy.say(|said| match round {
                1 => said.phase = Phase::Failed,
                2 => said.phase = Phase::Lost,
                3 => said.may_be.clear(),
                _ => {}
            });
        });
        let sentence = outcome.expect_err("it goes on").to_string();
        let expected = [
            "somebody else has the disk",
            "taken by somebody else",
            "only in the memory",
            "somebody else has the disk",
        ];
        assert!(sentence.contains(expected[round as usize]), "{sentence}");
        assert!(guest.world.image_now() == before, "round {round}");
        guest.end_with_worker();
    }
}

/// A worker closes the log and is killed before its guest has heard of it: the guest's own superblock, which it asks for once more, knows
/// less of the logs on the server than storage does.
#[test]
fn a_log_that_is_closed_twice_can_be_begun_again() {
    let mut guest = Guest::new(2600, 0);
    guest.wait_until_remote(true);
    guest.commit();
    let block = guest.close();
    let lineage = Lineage::read(&guest.world.stored_superblock());
    assert!(lineage.is_some());
    guest.kill_worker();
    assert_eq!(guest.found, [None], "nobody has it open");
    assert_ne!(Lineage::read(&block), lineage);
    guest.give_superblock(&block);
    assert_eq!(Lineage::read(&guest.world.stored_superblock()), lineage);
    guest.open_again();
    guest.commit();
    guest.wait_until_remote(true);
    guest.world.crash();
}

/// Random work, kills and trouble.
fn run(seed: u64) -> Guest {
    let mut guest = Guest::new(seed, 12);
    guest.is_killed_often = seed.is_multiple_of(2);
    let mut trouble = None;
    for _ in 0..20 + guest.random.below(50) {
        match guest.random.below(14) {
            0..4 => guest.commit(),
            4 => guest.write_some_home(),
            5 => {
                let count = guest.random.below(guest.live() as u32 + 1) as usize;
                guest.pass(count);
            }
            6 => guest.read_log(),
            7 => guest.world.crash(),
            8 if guest.random.below(3) == 0 => guest.close_and_open(),
            9 => {
                guest.begin_commit();
                if trouble.is_none() {
                    trouble = Some(CAUSES[guest.random.below(CAUSES.len() as u32) as usize]);
                    trouble.into_iter().for_each(|cause| begins(&guest, cause));
                }
                if guest.random.below(2) == 0 {
                    guest.kill_worker();
                }
                guest.world.crash();
                guest.end_commit();
            }
            10 => {
                if let Some(cause) = trouble.take() {
                    ends(&guest, cause);
                }
            }
            11 => guest.kill_worker(),
            12 => {
                let steps = 1 + u64::from(guest.random.below(60));
                guest.life.kill_after(steps);
            }
            _ => guest.end_one(),
        }
    }
    if let Some(cause) = trouble {
        ends(&guest, cause);
    }
    guest.wait_until_remote(true);
    guest.world.crash();
    guest.stop_kills();
    guest
}

#[test]
fn kills_at_any_moment_lose_nothing() {
    let seeds = std::env::var("AMBERLOG_REMOTE_KILL_SEEDS").ok().map_or(12, |text| text.parse().expect("a number"));
    let (mut kills, mut crashes) = (0, 0);
    for seed in 0..seeds {
        let outcome = std::panic::catch_unwind(|| run(seed));
        let guest = outcome.unwrap_or_else(|problem| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(problem)
        });
        kills += guest.workers - 1;
        crashes += guest.world.crashes.load(Ordering::Relaxed);
        guest.end();
    }
    assert!(u64::from(kills) > seeds * 3, "{kills} kills");
    println!("{seeds} seeds: {kills} workers killed, {crashes} losses of power");
}
