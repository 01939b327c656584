//! The yardstick itself: guests on QEMU's own disks are killed while postmark and our tools run,
//! e2fsck replays the journal, and everything that was acknowledged is there. If this failed, no
//! verdict on amberlog would be worth anything.

use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::workload::{Mode, STREAMS, Workload};
use guest_kit::{AtEnd, Cache, Drive, Guest, GuestSpec, Reported, judge};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
const ENOUGH: u64 = 60;

fn crashed(recipe: &ExtRecipe, cache: Cache, load: &Workload) -> (tempfile::TempDir, FileSystem, Reported) {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let file_system = recipe.make(&image).unwrap();
    let mut spec = GuestSpec::new("plain-crash", load.script()).drives(vec![Drive::new(&image, cache)]);
    spec.at_end = AtEnd::Stay;
    let mut guest = Guest::start(spec).unwrap();
    for stream in STREAMS {
        guest.wait_acknowledged(stream, ENOUGH, LIMIT).unwrap();
    }
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    (directory, file_system, reported)
}

fn assert_all_there(load: &Workload, file_system: &FileSystem, reported: &Reported) {
    let verdict = judge::check(file_system).unwrap();
    assert!(verdict.is_consistent(), "{verdict:?}");
    let evidence = load.check(file_system, reported).unwrap();
    assert!(evidence.faults.is_empty(), "{evidence:?}");
    assert!(evidence.acknowledged > 3 * ENOUGH);
}

#[test]
fn what_was_acknowledged_survives_a_kill_with_ext4() {
    let load = Workload::new(5);
    let (_directory, file_system, reported) = crashed(&ExtRecipe::ext4(96, 8), Cache::Writeback, &load);
    let before = judge::check(&file_system).unwrap();
    assert!(before.needs_recovery, "the guest was killed: {before:?}");
    // Without the journal, work is missing: the check can fail.
    let unreplayed = load.check(&file_system, &reported);
    assert!(unreplayed.is_err() || !unreplayed.unwrap().faults.is_empty());
    judge::replay_with_e2fsck(&file_system).unwrap();
    assert_all_there(&load, &file_system, &reported);
}

#[test]
fn what_was_acknowledged_survives_a_kill_with_ext3_and_small_blocks() {
    let recipe = ExtRecipe { block_bytes: 1024, ..ExtRecipe::ext3(96, 8) };
    let load = Workload::new(6).mode(Mode::Ordered);
    let (_directory, file_system, reported) = crashed(&recipe, Cache::None, &load);
    judge::replay_with_e2fsck(&file_system).unwrap();
    assert_all_there(&load, &file_system, &reported);
}
