//! Placements `retain`, `copy` and `nvm` against a model: a simulated guest that commits, writes home, stops its journal, copies
//! images over its disk, is suspended, and mounts again and again without a reset of the device; and whose disk becomes something else.
//!
//! Beside the route there is an ideal disk, which takes every request as it is, log and all. A mounting kernel reads blocks
//! of the file system into its cache, then the log, replays it into the cache, and writes that back. It has to see, in every
//! block, what it would see on the ideal disk, however early it read it and whatever the host wrote home meanwhile. Blocks
//! that were revoked and not written since are nobody's business.

#[path = "remount_model/guest.rs"]
mod guest;

use guest::{Guest, Kind};
use placement::PlacementKind;
use std::ops::Range;

/// Seeds that have found something which no others of these do.
const MORE_SEEDS: [u64; 2] = [50, 190];

/// The seeds: 40 and a few more, or those of AMBERLOG_REMOUNT_MODEL_SEEDS (FIRST..END).
fn seeds() -> Vec<u64> {
    let wished = std::env::var("AMBERLOG_REMOUNT_MODEL_SEEDS").ok();
    let bounds = wished.as_deref().and_then(|text| text.split_once(".."));
    let wished: Option<Range<u64>> = bounds.and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
    wished.map_or_else(|| (0..40).chain(MORE_SEEDS).collect(), Iterator::collect)
}

/// How often images are copied over the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copies {
    Seldom,
    /// And they are of earlier moments of this guest, too; and some copies are cut off.
    Often,
}

fn run(kind: Kind, images: &[Vec<u8>], placement: PlacementKind, copies: Copies, seed: u64) {
    let mut guest = Guest::new(kind, &images[0], placement, seed);
    let mut images = images.to_vec();
    for _ in 0..guest.random.below(60) {
        if copies == Copies::Often && guest.random.below(8) == 0 {
            let other = guest.random.below(images.len() as u64) as usize;
            match guest.random.below(5) {
                0 => images.push(guest.image()),
                1 => guest.cut_copy(&images[other]),
                2 => guest.copy_image_and_die(&images[other]),
                _ => guest.copy_image(&images[other]),
            }
            continue;
        }
        match guest.random.below(24) {
            0..8 => guest.commit(),
            8..12 => guest.write_home(),
            12 => guest.overwrite(),
            13 => guest.move_tail(),
            14..17 => guest.host_works(),
            17 => guest.read_all(),
            18 => guest.begin_transaction(),
            19..21 => guest.mount_again(),
            21 => guest.unmount(),
            22 if guest.random.below(2) == 0 => guest.suspend(),
            22 => guest.die(),
            _ if guest.random.below(3) == 0 => {
                let other = guest.random.below(images.len() as u64) as usize;
                guest.copy_image(&images[other]);
            }
            _ => guest.read_all(),
        }
    }
    if guest.random.below(3) == 0 {
        guest.make_something_else();
        return;
    }
    guest.mount_again();
    guest.die();
}

fn held(seed: u64) -> PlacementKind {
    if seed % 4 == 3 { PlacementKind::Copy } else { PlacementKind::Retain }
}

fn nvm(_seed: u64) -> PlacementKind {
    PlacementKind::Nvm
}

fn run_all(kind: Kind, placement: fn(u64) -> PlacementKind, copies: Copies) {
    let images = guest::images(kind);
    for seed in seeds() {
        let outcome = std::panic::catch_unwind(|| run(kind, &images, placement(seed), copies, seed));
        if let Err(problem) = outcome {
            eprintln!("{kind:?}, {:?}, {copies:?}, seed {seed}", placement(seed));
            std::panic::resume_unwind(problem);
        }
    }
}

#[test]
fn whoever_mounts_again_sees_a_disk_like_any_other() {
    run_all(Kind::Checksums, held, Copies::Seldom);
}

#[test]
fn the_same_with_small_blocks_and_without_checksums() {
    run_all(Kind::SmallBlocks, held, Copies::Seldom);
}

#[test]
fn whoever_mounts_again_sees_a_disk_like_any_other_where_the_journal_is_on_nvm() {
    run_all(Kind::Checksums, nvm, Copies::Seldom);
}

#[test]
fn the_same_on_nvm_with_small_blocks_and_without_checksums() {
    run_all(Kind::SmallBlocks, nvm, Copies::Seldom);
}

#[test]
fn images_are_copied_over_the_disk_again_and_again() {
    run_all(Kind::Checksums, held, Copies::Often);
    run_all(Kind::SmallBlocks, held, Copies::Often);
}

#[test]
fn images_are_copied_over_the_disk_again_and_again_where_the_journal_is_on_nvm() {
    run_all(Kind::Checksums, nvm, Copies::Often);
    run_all(Kind::SmallBlocks, nvm, Copies::Often);
}
