//! Placement `remote` against a model: a simulated guest with a journal, a disk with a volatile cache, a network in the
//! test's hands, and a server on a store that loses what was not made durable. The thread that ships, the client, the wire
//! and the server are the real ones.
//!
//! Before, in and after a sample of the steps on storage that falling back, coming back, opening, closing and the guest's
//! superblocks take (about one in two per cause, one in twelve of random work), the host loses power. What is left is then recovered in a copy, and every block compared with what jbd2's replay
//! of the complete journal leaves there: nothing that the guest was told is committed may be missing, nothing may be there
//! in part.

mod copies;
mod disk;
mod guest;
mod hostile;
mod kills;
mod life;
mod network;
mod refusals;
mod slow_storage;
mod standstill;
mod two_hosts;
mod world;

use guest::Guest;
use network::Weather;
use standstill::unless_it_stood_still;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What ends a time on the server, one after another.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Reset,
    Refusal,
    TimeOut,
    Garbage,
    Stop,
    PowerLoss,
    Full,
}

const CAUSES: [Cause; 7] =
    [Cause::Reset, Cause::Refusal, Cause::TimeOut, Cause::Garbage, Cause::Stop, Cause::PowerLoss, Cause::Full];

fn begins(guest: &Guest, cause: Cause) {
    let world = &guest.world;
    match cause {
        Cause::Reset => world.network.reset(),
        Cause::Refusal => world.weather(Weather::Refuses),
        Cause::TimeOut => world.weather(Weather::Swallows),
        Cause::Garbage => world.weather(Weather::Garbles),
        Cause::Stop => world.stop_server(),
        Cause::PowerLoss => world.kill_server(),
        Cause::Full => {
            world.kill_server();
            world.start_small_server(4 << 10);
        }
    }
}

fn ends(guest: &Guest, cause: Cause) {
    let world = &guest.world;
    match cause {
        Cause::Reset => {}
        Cause::Refusal | Cause::TimeOut | Cause::Garbage => {
            world.weather(Weather::Good);
            // What was swallowed does not come after all.
            world.network.reset();
        }
        Cause::Stop | Cause::PowerLoss => world.start_usual_server(),
        Cause::Full => {
            world.kill_server();
            world.start_usual_server();
        }
    }
}

/// Each cause sends the log to storage without the guest noticing more than a pause; it comes back by itself. The power
/// fails at a sample of the steps of that.
#[test]
fn every_cause_falls_back_and_comes_back() {
    for (number, cause) in CAUSES.into_iter().enumerate() {
        let mut guest = Guest::new(100 + number as u64, 2);
        for _ in 0..4 {
            guest.commit();
        }
        guest.wait_until_remote(true);
        guest.commit();
        guest.begin_commit();
        begins(&guest, cause);
        guest.end_commit();
        guest.commit();
        if !matches!(cause, Cause::Reset) {
            guest.wait_until_remote(false);
        }
        guest.world.crash();
        guest.pass(2);
        guest.commit();
        guest.read_log();
        ends(&guest, cause);
        guest.wait_until_remote(true);
        guest.commit();
        guest.world.crash();
        let report = guest.log.report();
        assert!(report.fall_backs >= 1 && report.returns >= 2, "{cause:?}: {report:?}");
        assert!(guest.world.crashes.load(Ordering::Relaxed) > 20, "{cause:?}");
        guest.pass(usize::MAX);
        guest.close_and_open();
        guest.world.crash();
        // The guest is gone: its log is complete on storage, whatever the network does.
        guest.commit();
        guest.world.weather(Weather::Swallows);
        guest.begin_commit();
        guest.log.settle().expect("settled");
        guest.world.stop_server();
        guest.world.crash();
    }
}

/// A connection breaks while the guest has nothing to say, and so flushes nothing: what is made durable on the way to storage and
/// back is our own doing. The server forgets the old log when it begins the new one.
#[test]
fn an_idle_guest_loses_nothing_when_the_log_goes_and_comes() {
    for round in 0..2u64 {
        let mut guest = Guest::new(900 + round, 0);
        guest.wait_until_remote(true);
        for _ in 0..3 {
            guest.commit();
        }
        let returns = guest.log.report().returns;
        {
            let mut known = guest.world.known.lock().expect("no panic under this lock");
            (known.crash_one_in, known.crashes_each) = (1, 5);
        }
        begins(&guest, Cause::Reset);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while guest.log.report().returns == returns {
            assert!(!guest.world.has_failed.load(Ordering::SeqCst), "the other thread's judgement, above");
            assert!(std::time::Instant::now() < deadline, "the log does not come back");
            std::thread::sleep(std::time::Duration::from_millis(20));
            // Between the steps on storage, too: the server does something of its own there.
            guest.world.crash();
        }
        guest.world.known.lock().expect("no panic under this lock").crash_one_in = 0;
        guest.world.crash();
        guest.commit();
        guest.world.crash();
    }
}

/// The guest commits while its log is on the way back to storage: it is told when all of it is there.
#[test]
fn a_commit_in_the_midst_of_falling_back_waits_for_it() {
    for round in 0..3u64 {
        let mut guest = Guest::new(950 + round, 0);
        guest.wait_until_remote(true);
        for _ in 0..5 {
            guest.commit();
        }
        // So that it takes its time.
        guest.world.known.lock().expect("no panic under this lock").crash_one_in = 1;
        begins(&guest, Cause::Stop);
        guest.wait_until_falling_back();
        guest.commit();
        guest.world.crash();
        guest.world.known.lock().expect("no panic under this lock").crash_one_in = 0;
        guest.wait_until_remote(false);
        guest.world.crash();
    }
}

/// The power fails while the log is on its way from storage to the server, with a transaction that only the server was sent;
/// then the server takes it, or is gone.
#[test]
fn the_power_fails_between_the_two_places() {
    for round in 0..12u64 {
        let mut guest = Guest::new(800 + round, 0);
        guest.world.weather(Weather::Refuses);
        guest.wait_until_remote(false);
        guest.commit();
        guest.commit();
        guest.hang();
        guest.world.weather(Weather::Good);
        guest.wait_until_switching();
        guest.begin_commit();
        guest.listen();
        guest.world.crash();
        {
            let mut known = guest.world.known.lock().expect("no panic under this lock");
            (known.crash_one_in, known.crashes_each) = (1, 6);
        }
        if round % 2 == 0 {
            // Nothing comes back from there: all of it has to go to storage, which counts all the while.
            begins(&guest, Cause::Stop);
            guest.wait_until_storage_has_it();
        }
        guest.go_on();
        guest.end_commit();
        for _ in 0..3 {
            guest.world.crash();
        }
        assert!(guest.world.crashes.load(Ordering::Relaxed) > 8, "round {round}");
        guest.world.known.lock().expect("no panic under this lock").crash_one_in = 0;
        if round % 2 == 0 {
            ends(&guest, Cause::Stop);
        }
        guest.wait_until_remote(true);
        guest.commit();
        guest.world.crash();
    }
}

/// A commit block that may come before what it commits is on storage, without that, when the power fails while falling back.
/// What is replayed is what the server has.
#[test]
fn what_a_cut_off_fall_back_left_on_storage_is_not_replayed() {
    for round in 0..5 {
        let mut guest = Guest::with_async_commits(500 + round, 0);
        guest.wait_until_remote(true);
        guest.commit();
        begins(&guest, Cause::TimeOut);
        {
            let mut known = guest.world.known.lock().expect("no panic under this lock");
            (known.crash_one_in, known.crashes_each) = (1, 6);
        }
        guest.begin_commit();
        guest.end_commit();
        guest.commit();
        assert!(guest.world.crashes.load(Ordering::Relaxed) > 20, "round {round}");
        // So many would take longer than the server is waited for.
        guest.world.known.lock().expect("no panic under this lock").crash_one_in = 0;
        ends(&guest, Cause::TimeOut);
        guest.wait_until_remote(true);
        guest.world.crash();
    }
}

/// The log goes round and round on the server: what was passed is overwritten, and only the superblock says so.
#[test]
fn a_log_that_goes_round_on_the_server_is_recovered_from_its_newest_tail() {
    let mut guest = Guest::new(600, 0);
    guest.wait_until_remote(true);
    for _ in 0..50 {
        guest.commit();
        guest.write_some_home();
        if guest.live() > 5 {
            guest.pass(3);
        }
        guest.world.crash();
    }
    let report = guest.log.report();
    assert!(report.blocks > 2 * 127, "it did not go round there: {report:?}");
}

/// A mark that cannot be written, or of which that is not known: the log stays on storage, and tries again.
#[test]
fn a_mark_that_cannot_be_written_costs_nothing() {
    // Its name is written first, then the mark; each in two steps, and made durable in two.
    for after in 0..8 {
        let mut guest = Guest::new(200 + u64::from(after), 2);
        guest.world.weather(Weather::Refuses);
        guest.wait_until_remote(false);
        for _ in 0..3 {
            guest.commit();
        }
        {
            let mut known = guest.world.known.lock().expect("no panic under this lock");
            (known.failures, known.failures_after) = (1, after);
            known.crash_one_in = 1;
        }
        guest.world.weather(Weather::Good);
        guest.wait_until_remote(true);
        guest.commit();
        guest.world.crash();
        assert_eq!(guest.world.known.lock().expect("no panic under this lock").failures, 0);
    }
}

/// Random work under random weather, on a server that comes and goes.
fn run(seed: u64) -> Guest {
    let mut guest = Guest::new(seed, 12);
    let mut trouble: Option<Cause> = None;
    for _ in 0..guest.random.below(70) {
        match guest.random.below(14) {
            0..5 => guest.commit(),
            5..7 => guest.write_some_home(),
            7 => {
                let count = guest.random.below(guest.live() as u32 + 1) as usize;
                guest.pass(count);
            }
            8 => guest.read_log(),
            9 => guest.world.crash(),
            10 if guest.random.below(4) == 0 => guest.close_and_open(),
            11 => {
                guest.begin_commit();
                if trouble.is_none() {
                    trouble = Some(CAUSES[guest.random.below(CAUSES.len() as u32) as usize]);
                    trouble.into_iter().for_each(|cause| begins(&guest, cause));
                }
                guest.world.crash();
                guest.end_commit();
            }
            12 => {
                if let Some(cause) = trouble.take() {
                    ends(&guest, cause);
                }
            }
            13 if trouble.is_none() => {
                let ms = u64::from(guest.random.below(10));
                guest.world.weather(if ms > 5 { Weather::Good } else { Weather::Slow(ms) });
            }
            _ => guest.end_one(),
        }
    }
    if let Some(cause) = trouble {
        ends(&guest, cause);
    }
    guest.world.weather(Weather::Good);
    guest.wait_until_remote(true);
    guest.world.crash();
    guest
}

#[test]
fn recovery_leaves_what_a_complete_journal_would() {
    let seeds = std::env::var("AMBERLOG_REMOTE_SEEDS").ok().map_or(12, |text| text.parse().expect("a number"));
    let (mut fall_backs, mut returns, mut crashes) = (0, 0, 0);
    for seed in 0..seeds {
        let outcome = std::panic::catch_unwind(|| run(seed));
        let guest = outcome.unwrap_or_else(|problem| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(problem)
        });
        fall_backs += guest.log.report().fall_backs;
        returns += guest.log.report().returns;
        crashes += guest.world.crashes.load(Ordering::Relaxed);
    }
    assert!(fall_backs >= seeds / 3 && returns >= seeds, "{fall_backs} fall-backs, {returns} returns");
    assert!(crashes > seeds * 10, "{crashes} crashes");
    println!("{seeds} seeds: {fall_backs} fall-backs, {returns} returns, {crashes} losses of power");
}

/// A guest that goes on committing while its log returns does not keep it from the server.
#[test]
fn a_busy_guest_comes_back() {
    let mut guest = Guest::new(501, 4);
    guest.world.weather(Weather::Refuses);
    guest.wait_until_remote(false);
    guest.commit();
    guest.world.weather(Weather::Narrow(200_000));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !guest.log.report().is_remote_now {
        assert!(std::time::Instant::now() < deadline, "it stays on storage");
        guest.commit();
        guest.pass(1);
    }
    guest.commit();
    guest.world.crash();
}

/// A link that takes longer for the whole log than anybody waits for a sign of life brings it to the server all the same, at the
/// first attempt: something of it arrives all the time.
#[test]
fn a_slow_link_comes_back() {
    // A third of what these clients wait for a sign.
    unless_it_stood_still(Duration::from_millis(150), comes_back_over_a_slow_link);
}

fn comes_back_over_a_slow_link() -> Result<(), String> {
    let mut guest = Guest::new(500, 0);
    guest.world.weather(Weather::Refuses);
    guest.wait_until_remote(false);
    while guest.live() < 10 {
        guest.commit();
    }
    let connects = guest.log.report().connects;
    guest.world.weather(Weather::Narrow(50_000));
    guest.wait_until_remote(true);
    let attempts = guest.log.report().connects - connects;
    guest.world.weather(Weather::Good);
    guest.commit();
    guest.world.crash();
    if attempts == 1 { Ok(()) } else { Err(format!("it took {attempts} attempts")) }
}

/// A feature that nobody here knows appears in the superblock of a log that is on the server.
#[test]
fn a_log_with_a_feature_that_appears_goes_to_storage_and_stays_there() {
    let mut guest = Guest::new(700, 0);
    guest.wait_until_remote(true);
    for _ in 0..3 {
        guest.commit();
    }
    let block = guest.superblock_with(0x40);
    guest.give_superblock(&block);
    guest.wait_until_remote(false);
    guest.wait_until_storage_has_it();
    let stored = guest.world.stored_superblock();
    let stored = jbd2::Superblock::decode(&stored).expect("a superblock");
    assert!(!stored.is_empty() && stored.features.has(0x40), "it is its guest's kernel's to replay");
    let report = guest.log.report();
    assert!(!report.is_remote_now && report.connects > 0, "{report:?}");
    guest.commit();
    assert!(guest.log.shared.lock().is_local_only, "it does not come back");
}
