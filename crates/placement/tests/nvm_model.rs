//! Placement `nvm` against a model: a simulated guest with a journal, a disk with a volatile cache in the test's hands, and
//! a region that loses what no fence covers.
//!
//! Beside the route there is an ideal disk, which takes every request as it is, log and all. At every step, and inside the
//! region's own steps, recovery from the region has to leave in each block what jbd2's replay of the ideal disk's complete
//! journal leaves there, whatever either disk has lost. Blocks that are free in the committed bitmap are nobody's business.

#[path = "nvm_model/disk.rs"]
mod disk;
#[path = "nvm_model/guest.rs"]
mod guest;

use guest::Guest;
use placement::NvmReport;

const SEEDS: u64 = 90;

/// A seed's run: random work, then a loss of power and a real recovery. Returns what the route did with the region.
fn run(image: &[u8], seed: u64) -> NvmReport {
    let mut guest = Guest::new(image, seed);
    for _ in 0..guest.random.below(160) {
        let block = guest.any_metadata();
        match guest.random.below(19) {
            0..5 => guest.random_commit(),
            5..8 => guest.write_home(block),
            8 => guest.overwrite(block),
            9 => guest.overwrite_part(block),
            10 | 16 | 17 => guest.read(block),
            11 => guest.write_data(),
            12 => guest.flush(),
            13 => guest.move_tail(),
            14 => guest.checkpoint(),
            18 => guest.overwrite_and_back(block),
            _ => guest.storage_works(),
        }
        if guest.random.below(24) == 0 {
            guest.recover();
        }
    }
    guest.recover();
    guest.settle();
    guest.recover();
    guest.report()
}

#[test]
fn recovery_leaves_what_a_complete_journal_would() {
    let image = guest::image();
    let mut reached = [0; 9];
    for seed in 0..SEEDS {
        let outcome = std::panic::catch_unwind(|| run(&image, seed));
        let report = outcome.unwrap_or_else(|problem| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(problem)
        });
        let counts = [
            report.writes_absorbed,
            report.reads_answered,
            report.appends_written_home,
            report.appends_sent_early,
            report.checkpoints,
            report.checkpoints_of_runs,
            report.blocks_dropped,
            report.blocks_restored,
            report.blocks_updated,
        ];
        reached.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    assert!(reached.iter().all(|count| *count >= SEEDS / 4), "some path was hardly taken: {reached:?}");
}

/// A disk that fails in the midst of anything takes no transaction with it that was acknowledged, and acknowledges none that
/// it has not taken.
#[test]
fn a_disk_that_breaks_loses_nothing_committed() {
    let image = guest::image();
    let mut failed = 0;
    for seed in 0..SEEDS {
        let mut guest = Guest::new(&image, 1000 + seed);
        for _ in 0..guest.random.below(60) {
            let block = guest.any_metadata();
            match guest.random.below(9) {
                0..4 => guest.random_commit(),
                8 => guest.overwrite_and_back(block),
                4 => guest.write_home(block),
                5 => guest.overwrite(block),
                6 => guest.checkpoint(),
                _ => guest.storage_works(),
            }
        }
        guest.storage_breaks();
        for _ in 0..8 {
            let block = guest.any_metadata();
            match guest.random.below(4) {
                0 => guest.write_home(block),
                1 => guest.checkpoint(),
                2 => guest.flush_in_vain(),
                _ => guest.storage_works(),
            }
        }
        guest.recover();
        guest.settle();
        failed += guest.failures();
        guest.recover();
    }
    assert!(failed > SEEDS as usize, "hardly anything was under way when the disk broke: {failed}");
}

/// A version is on its way home when the guest writes something else there and then that version again, which may be absorbed:
/// what is at home is the other thing.
#[test]
fn a_version_that_came_back_stays_until_it_is_written_again() {
    let image = guest::image();
    for seed in 0..60 {
        let mut guest = Guest::new(&image, 2000 + seed);
        let block = guest.metadata[0];
        guest.commit_one(block);
        if seed % 2 == 0 {
            guest.write_home(block);
            guest.storage_works();
        }
        guest.checkpoint();
        guest.storage_works();
        guest.overwrite_and_back(block);
        guest.storage_works();
        guest.recover();
        guest.flush();
        guest.settle();
        guest.recover();
        guest.read(block);
    }
}

#[test]
fn what_the_guest_wrote_past_its_journal_stays_when_its_log_is_gone() {
    let image = guest::image();
    for is_checkpointed in [false, true] {
        let mut guest = Guest::new(&image, 1);
        let block = guest.metadata[0];
        guest.commit_one(block);
        guest.overwrite(block);
        guest.settle();
        guest.read(block);
        if is_checkpointed {
            guest.checkpoint();
            guest.settle();
            guest.read(block);
        }
        guest.recover();
        guest.pass_everything();
        guest.read(block);
        guest.recover();
    }
}

#[test]
fn a_part_that_is_overwritten_keeps_the_rest() {
    let image = guest::image();
    for is_at_home in [false, true] {
        let mut guest = Guest::new(&image, 2);
        let block = guest.metadata[0];
        guest.commit_one(block);
        guest.write_home(block);
        guest.settle();
        if is_at_home {
            guest.checkpoint();
            guest.settle();
        }
        guest.overwrite_part(block);
        guest.settle();
        guest.read(block);
        guest.recover();
        guest.pass_everything();
        guest.read(block);
        guest.recover();
    }
}

#[test]
fn a_revoked_block_that_is_data_now_stays_as_it_is() {
    let image = guest::image();
    for times in 1..3 {
        let mut guest = Guest::new(&image, 3);
        let block = guest.dynamic[0];
        for _ in 0..times {
            guest.commit_one(block);
        }
        guest.free(block);
        guest.recover();
        guest.reuse_as_data(block);
        guest.recover();
        guest.pass_everything();
        guest.recover();
    }
}

#[test]
fn a_block_that_looks_like_the_journals_own_comes_back() {
    let image = guest::image();
    let mut guest = Guest::new(&image, 4);
    let block = guest.metadata[0];
    guest.commit_escaped(block);
    guest.recover();
    guest.write_home(block);
    guest.settle();
    guest.read(block);
    guest.pass_everything();
    guest.recover();
}
