//! Every recording, crashed at some of its steps: what `make crash` does at length.

use crash_explorer::explore::{Thoroughness, minimise, recordings, run};
use crash_explorer::switches::Switches;
use std::path::Path;

/// Fixed, so that a failure is the same on every machine.
const SEED: u64 = 20_120_403;
const POINTS_MIN: u64 = 500;

#[test]
fn every_crash_is_recovered_to_what_a_complete_journal_makes() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let (mut points, mut judgements) = (0, 0);
    for (number, recording) in recordings(&directory, None).expect("the recordings").iter().enumerate() {
        let seed = SEED + number as u64;
        let how = Thoroughness { points_each: 10, judgements_each: 30, until: u64::MAX };
        let outcome = run(recording, seed, Switches::of_seed(seed), how).expect("a run");
        points += outcome.points;
        judgements += outcome.judgements;
        if let Some(finding) = outcome.finding {
            panic!("{}", minimise(recording, finding).expect("a run"));
        }
    }
    assert!(points >= POINTS_MIN, "only {points} crash points were checked");
    assert!(judgements > 0, "no crash point was judged by e2fsck");
    println!("{points} crash points, {judgements} judged by e2fsck");
}

/// In each recording, logs are handed over to storage at some moments; killed in the midst of that, and crashed after it.
#[test]
fn a_log_that_is_handed_over_is_recovered_from_storage() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let mut points = 0;
    for (number, recording) in recordings(&directory, None).expect("the recordings").iter().enumerate() {
        for round in 0..3 {
            let seed = SEED + 1000 + 10 * number as u64 + round;
            let switches = Switches::of_seed(seed).with(Switches::HAND_OVER);
            let how = Thoroughness { points_each: 5, judgements_each: 60, until: u64::MAX };
            let outcome = run(recording, seed, switches, how).expect("a run");
            points += outcome.points;
            if let Some(finding) = outcome.finding {
                panic!("{}", minimise(recording, finding).expect("a run"));
            }
        }
    }
    assert!(points >= POINTS_MIN, "only {points} crash points were checked");
}

/// In each recording, the guest is reset at some moments as its logs are to be handed over: whoever has wished that goes on asking, and is told
/// that a log is on storage when it is.
#[test]
fn a_log_that_was_wished_on_storage_is_there_after_a_reset() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let recordings = recordings(&directory, None).expect("the recordings");
    let mut resets = 0;
    for (number, recording) in recordings.iter().enumerate() {
        for round in 0..4 {
            let seed = SEED + 3000 + 10 * number as u64 + round;
            let switches = Switches::of_seed(seed).with(Switches::HAND_OVER).with(Switches::RESET);
            let how = Thoroughness { points_each: 100, judgements_each: 0, until: u64::MAX };
            let outcome = run(recording, seed, switches, how).expect("a run");
            resets += outcome.resets;
            if let Some(finding) = outcome.finding {
                panic!("{}", minimise(recording, finding).expect("a run"));
            }
        }
    }
    assert!(resets >= recordings.len() as u64, "only {resets} resets");
}

/// In each recording, the worker is killed a few times, between two steps or between two stores, and another one goes on: what that holds
/// from then on is what a complete journal has.
#[test]
fn a_worker_that_goes_on_holds_what_a_complete_journal_has() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let (mut points, mut followed) = (0, 0);
    for (number, recording) in recordings(&directory, None).expect("the recordings").iter().enumerate() {
        for round in 0..2 {
            let seed = SEED + 2000 + 10 * number as u64 + round;
            let switches = Switches::of_seed(seed).with(Switches::FOLLOW);
            let how = Thoroughness { points_each: 8, judgements_each: 60, until: u64::MAX };
            let outcome = run(recording, seed, switches, how).expect("a run");
            points += outcome.points;
            followed += outcome.followed;
            if let Some(finding) = outcome.finding {
                panic!("{}", minimise(recording, finding).expect("a run"));
            }
        }
    }
    assert!(points >= POINTS_MIN && followed >= 10, "only {points} crash points and {followed} workers");
    println!("{points} crash points, {followed} workers that went on");
}
