//! `durable-within` as a disk has it (route, keeper, area) under recordings of real guests, out of power at some of their steps: what
//! `make crash` does at length.

use crash_explorer::explore::{Thoroughness, recordings};
use crash_explorer::power::route::run;
use crash_explorer::switches::Switches;
use std::path::Path;

/// Fixed, so that a failure is the same on every machine.
const SEED: u64 = 20_261_124;
const POINTS_MIN: u64 = 2000;
const UNPROMISED_MIN: u64 = 200;

#[test]
fn every_loss_of_power_leaves_a_state_of_the_guest() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
    let seed = std::env::var("AMBERLOG_SEED").map_or(SEED, |text| text.parse().expect("AMBERLOG_SEED is a number"));
    let (mut points, mut judgements, mut endings, mut begins) = (0, 0, 0, 0);
    let (mut promised, mut unpromised) = (0, 0);
    for (number, recording) in recordings(&directory, None).expect("the recordings").iter().enumerate() {
        // A journal on a device of its own is not made durable by age.
        if recording.disks.len() > 1 {
            continue;
        }
        for round in 0..2 {
            let seed = seed + number as u64 + 100 * round;
            let how = Thoroughness { points_each: 3, judgements_each: 60, until: u64::MAX };
            let outcome = run(recording, seed, Switches::of_seed(seed), how).expect("a run");
            println!("{}: {} points, {} judged by e2fsck", recording.scenario, outcome.points, outcome.judgements);
            points += outcome.points;
            judgements += outcome.judgements;
            endings += outcome.endings;
            begins += outcome.begins;
            promised += outcome.promised;
            unpromised += outcome.unpromised;
            if let Some(finding) = outcome.finding {
                panic!("{finding}");
            }
        }
    }
    assert!(points >= POINTS_MIN, "only {points} power cuts were looked at");
    assert!(endings > 0 && begins > 0, "durability ended {endings} times, and began {begins} times");
    assert!(
        promised > POINTS_MIN && unpromised > UNPROMISED_MIN,
        "{promised} power cuts while it was in force, {unpromised} while it was not"
    );
    assert!(judgements > 10, "{judgements} power cuts were judged by e2fsck");
}
