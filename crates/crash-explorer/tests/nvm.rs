//! Recordings of real guests over placement `nvm`, out of power at some of their steps: what `make crash` does at length.

use crash_explorer::explore::{Thoroughness, recordings};
use crash_explorer::nvm::run;
use crash_explorer::switches::Switches;
use std::path::Path;

/// Fixed, so that a failure is the same on every machine.
const SEED: u64 = 20_180_319;
const POINTS_MIN: u64 = 2000;

/// The log leaves its region in the midst of each recording.
#[test]
fn every_loss_of_power_while_a_log_leaves_is_recovered() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let mut points = 0;
    for (number, recording) in recordings(&directory, None).expect("the recordings").iter().enumerate() {
        if recording.disks.len() > 1 {
            continue;
        }
        let seed = SEED + 100 + number as u64;
        let switches = Switches::of_seed(seed).with(Switches::HAND_OVER);
        let how = Thoroughness { points_each: 100, judgements_each: 300, until: u64::MAX };
        let outcome = run(recording, seed, switches, how).expect("a run");
        assert_eq!(outcome.left, 1, "{}: the log has not left its region once", recording.scenario);
        points += outcome.points;
        if let Some(finding) = outcome.finding {
            panic!("{finding}");
        }
    }
    assert!(points >= POINTS_MIN / 2, "only {points} crash points were checked");
}

/// Transactions are acknowledged before the flush of their appends: one may be lost, the last that was, and only where its appends are not at home.
#[test]
fn every_loss_of_power_behind_an_acknowledged_transaction_costs_that_one_at_most() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let (mut points, mut prepared) = (0, 0);
    for (number, recording) in recordings(&directory, None).expect("the recordings").iter().enumerate() {
        if recording.disks.len() > 1 {
            continue;
        }
        let seed = SEED + 200 + number as u64;
        let switches = Switches::of_seed(seed).with(Switches::PIPELINED);
        let how = Thoroughness { points_each: 60, judgements_each: 300, until: u64::MAX };
        let outcome = run(recording, seed, switches, how).expect("a run");
        println!(
            "{}: {} points, {} of them with such a transaction",
            recording.scenario, outcome.points, outcome.prepared
        );
        (points, prepared) = (points + outcome.points, prepared + outcome.prepared);
        if let Some(finding) = outcome.finding {
            panic!("{finding}");
        }
    }
    assert!(points >= POINTS_MIN, "only {points} crash points were checked");
    assert!(prepared >= points / 100, "only {prepared} of {points} crash points had such a transaction");
}

#[test]
fn every_loss_of_power_is_recovered_to_what_a_complete_journal_makes() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let seed = std::env::var("AMBERLOG_SEED").map_or(SEED, |text| text.parse().expect("AMBERLOG_SEED is a number"));
    let (mut points, mut judgements) = (0, 0);
    for (number, recording) in recordings(&directory, None).expect("the recordings").iter().enumerate() {
        // A journal on a device of its own does not go to NVM.
        if recording.disks.len() > 1 {
            continue;
        }
        let seed = seed + number as u64;
        let how = Thoroughness { points_each: 60, judgements_each: 300, until: u64::MAX };
        let outcome = run(recording, seed, Switches::of_seed(seed), how).expect("a run");
        println!("{}: {} points, {} judged by e2fsck", recording.scenario, outcome.points, outcome.judgements);
        points += outcome.points;
        judgements += outcome.judgements;
        if let Some(finding) = outcome.finding {
            panic!("{finding}");
        }
    }
    assert!(points >= POINTS_MIN, "only {points} crash points were checked");
    assert!(judgements > 0, "no crash point was judged by e2fsck");
}
