//! The machine under random guests that keep jbd2's rules, over a disk whose cache loses any part of what no flush covers, torn
//! at 512 bytes. After every step some power cuts are looked at: the journal's own place is replayed, and what is there then
//! must be one state of the guest, not older than was promised, with the data that belongs to it.

mod disk;
mod guest;
mod judge;
mod world;

use world::{Setting, World};

/// Power cuts for each step, over seeds.
fn explore(seeds: std::ops::Range<u64>, steps: u32) -> u64 {
    let (mut cuts, mut durable, mut unsent, mut deaths, rounds) = (0, 0, [0; 2], 0, seeds.end - seeds.start);
    let mut odd = [0; 3];
    for seed in seeds {
        let setting = Setting::of_seed(seed);
        let mut world = World::new(seed, setting);
        for step in 0..steps {
            if let Err(problem) = world.step() {
                panic!("seed {seed}, step {step}, {setting:?}: {problem}");
            }
        }
        cuts += world.cuts;
        durable += world.durable_transactions();
        for (sum, count) in unsent.iter_mut().zip(world.unsent) {
            *sum += count;
        }
        deaths += world.deaths;
        for (sum, count) in odd.iter_mut().zip(world.odd) {
            *sum += count;
        }
    }
    println!(
        "{unsent:?} writes carried what storage had already, when they came and when they had waited; {deaths} deaths"
    );
    println!("{odd:?} home writes of several blocks, writes of the host, home writes beside others");
    assert!(odd.iter().all(|count| *count > rounds / 2), "{odd:?} are too few to be a test");
    assert!(unsent.iter().all(|count| *count > rounds / 4), "{unsent:?} are too few to be a test");
    assert!(deaths > rounds, "{deaths} deaths in {rounds} rounds are too few to be a test");
    assert!(durable > 10 * rounds, "{durable} compounds in {rounds} rounds are too few to be a test");
    cuts
}

/// `AMBERLOG_SEED` and `AMBERLOG_ROUNDS` choose others, and more.
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn a_power_cut_leaves_a_state_of_the_guest() {
    let first = number("AMBERLOG_SEED", 1);
    let cuts = explore(first..first + number("AMBERLOG_ROUNDS", 120), 900);
    println!("{cuts} power cuts");
}

/// A compound of all that is not durable does not fit beside what is.
#[test]
fn one_machine_follows_another_in_a_small_log() {
    let first = number("AMBERLOG_SEED", 9000);
    for seed in first..first + number("AMBERLOG_ROUNDS", 200) {
        let drawn = Setting::of_seed(seed);
        let setting = Setting {
            log_blocks: 64,
            deaths: 60,
            overlaps: 0,
            in_place: seed % 4 == 0,
            is_quiet: false,
            engages: false,
            ..drawn
        };
        let mut world = World::new(seed, setting);
        for step in 0..900 {
            if let Err(problem) = world.step() {
                panic!("seed {seed}, step {step}, {setting:?}: {problem}");
            }
        }
    }
}

/// A guest commits over what it is writing home, and writes that home again beside it, while the host does so, too; and there is little room.
#[test]
fn a_guest_writes_over_what_is_on_its_way() {
    for seed in 12000..12000 + number("AMBERLOG_ROUNDS", 100) {
        let drawn = Setting { log_blocks: 40, deaths: 0, overlaps: 60, checkpoints: 50, ..Setting::of_seed(seed) };
        let setting = Setting { is_quiet: false, engages: false, ..drawn };
        let mut world = World::new(seed, setting);
        for step in 0..900 {
            if let Err(problem) = world.step() {
                panic!("seed {seed}, step {step}, {setting:?}: {problem}");
            }
        }
    }
}

#[test]
fn with_no_age_nothing_acknowledged_is_lost() {
    for seed in 5000..5000 + number("AMBERLOG_ROUNDS", 40) {
        let setting = Setting { within: 0, ..Setting::of_seed(seed) };
        let mut world = World::new(seed, setting);
        for step in 0..700 {
            if let Err(problem) = world.step() {
                panic!("seed {seed}, step {step}, {setting:?}: {problem}");
            }
        }
    }
}
