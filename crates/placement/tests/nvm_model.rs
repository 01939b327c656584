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
use std::ops::Range;

/// The seeds of each random test: 90, or those of AMBERLOG_NVM_MODEL_SEEDS (FIRST..END); AMBERLOG_NVM_MODEL_TRACE tells what
/// they do.
fn seeds() -> Range<u64> {
    let wished = std::env::var("AMBERLOG_NVM_MODEL_SEEDS").ok();
    let bounds = wished.as_deref().and_then(|text| text.split_once(".."));
    bounds.and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?)).unwrap_or(0..90)
}

/// How many they are.
fn seed_count() -> u64 {
    seeds().end - seeds().start
}

/// A seed's run: random work, then a loss of power and a real recovery; with a third of the seeds the log leaves the region
/// in the midst of it. Returns what the route did with the region.
fn run(image: &[u8], seed: u64) -> (NvmReport, [u64; 2]) {
    let mut guest = Guest::new(image, seed);
    let leaves_from = if seed % 3 == 2 { guest.random.below(80) } else { u64::MAX };
    for step in 0..guest.random.below(160) {
        if step >= leaves_from && guest.random.below(4) == 0 {
            guest.leave();
        }
        let block = guest.any_metadata();
        match guest.random.below(20) {
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
            15 if guest.random.below(4) == 0 => guest.look_mounted(),
            19 if guest.random.below(8) == 0 => guest.empty(),
            _ => guest.storage_works(),
        }
        if guest.random.below(24) == 0 {
            guest.recover();
        }
    }
    guest.recover();
    guest.settle();
    guest.recover();
    (guest.report(), guest.recovered)
}

#[test]
fn recovery_leaves_what_a_complete_journal_would() {
    let image = guest::image();
    let mut reached = [0; 12];
    for seed in seeds() {
        let outcome = std::panic::catch_unwind(|| run(&image, seed));
        let (report, recovered) = outcome.unwrap_or_else(|problem| {
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
            report.commits_before_flush,
            // Not every seed has it.
            recovered[0] * 4,
            recovered[1] * 4,
        ];
        reached.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    assert!(reached.iter().all(|count| *count >= seed_count() / 4), "some path was hardly taken: {reached:?}");
}

/// A worker is killed between any two of its stores, again and again, and another one goes on: the guest hears of no error, and what it was
/// told is committed is, ever after.
#[test]
fn a_worker_that_dies_is_followed_by_one_that_goes_on() {
    let image = guest::image();
    let mut deaths = 0;
    // Each is followed by what a new process does: a third of the seeds takes as long as all do elsewhere.
    for seed in seeds().step_by(3) {
        let run = || {
            let mut guest = Guest::new(&image, 9_000_000 + seed);
            let leaves_from = if seed % 4 == 2 { guest.random.below(120) } else { u64::MAX };
            for step in 0..40 + guest.random.below(160) {
                if guest.random.below(5) == 0 {
                    guest.die_soon();
                }
                if step >= leaves_from && guest.random.below(4) == 0 {
                    guest.leave();
                }
                let block = guest.any_metadata();
                match guest.random.below(20) {
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
                    15 if guest.random.below(4) == 0 => guest.look_mounted(),
                    19 if guest.random.below(4) == 0 => guest.remount(),
                    _ => guest.storage_works(),
                }
                if guest.random.below(24) == 0 {
                    guest.recover();
                }
            }
            guest.recover();
            guest.settle();
            guest.recover();
            assert_eq!(guest.failures(), 0, "the guest sees an error");
            guest.deaths()
        };
        let outcome = std::panic::catch_unwind(run);
        deaths += outcome.unwrap_or_else(|problem| {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(problem)
        });
    }
    assert!(deaths > seed_count(), "hardly any worker has died: {deaths}");
}

/// The rest of the block is in the region only: storage has none of the two when the worker dies.
#[test]
fn a_part_that_is_overwritten_as_the_worker_dies_keeps_the_rest() {
    let image = guest::image();
    let mut guest = Guest::new(&image, 2);
    let block = guest.metadata[0];
    guest.commit_one(block);
    guest.write_home(block);
    guest.settle();
    guest.die_next();
    guest.overwrite_part(block);
    guest.settle();
    guest.read(block);
    guest.recover();
    guest.pass_everything();
    guest.read(block);
    guest.recover();
    assert_eq!(guest.deaths(), 1);
}

/// A disk that fails in the midst of anything takes no transaction with it that was acknowledged, and acknowledges none that
/// it has not taken.
#[test]
fn a_disk_that_breaks_loses_nothing_committed() {
    let image = guest::image();
    let mut failed = 0;
    for seed in seeds() {
        let mut guest = Guest::new(&image, 1_000_000 + seed);
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
        if seed % 3 == 0 {
            guest.leave();
            guest.storage_works();
        }
        guest.storage_breaks();
        for _ in 0..8 {
            if seed % 3 != 1 {
                guest.leave();
            }
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
    assert!(failed > seed_count() as usize, "hardly anything was under way when the disk broke: {failed}");
}

/// A flush fails that this file system's kernel hears nothing of: another's on the same disk. What that took with it no later
/// flush brings back, and what is told to be committed, is.
#[test]
fn a_flush_of_somebody_else_that_fails_loses_nothing_committed() {
    let image = guest::image();
    let mut failed = 0;
    for seed in seeds() {
        let mut guest = Guest::new(&image, 8_000_000 + seed);
        for _ in 0..40 + guest.random.below(60) {
            let block = guest.any_metadata();
            match guest.random.below(12) {
                0..5 => guest.random_commit(),
                5 => guest.write_home(block),
                6 => guest.checkpoint(),
                7 => guest.read(block),
                8 | 9 => guest.stranger_flushes(),
                _ => guest.storage_works(),
            }
        }
        if seed % 3 == 0 {
            guest.leave_beside_strangers();
        }
        guest.settle();
        failed += guest.failures();
        guest.recover();
    }
    assert!(failed > seed_count() as usize / 2, "hardly any flush failed: {failed}");
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

/// What a checkpoint has written leaves the region with somebody else's flush, and with one of its own where nobody else asks for one
/// in time.
#[test]
fn what_a_checkpoint_wrote_is_flushed_by_it_when_nobody_else_does() {
    let image = guest::image();
    let mut alone = 0;
    for seed in 0..40 {
        let mut guest = Guest::new(&image, 10_000_000 + seed);
        let block = guest.metadata[0];
        guest.commit_one(block);
        guest.checkpoint();
        guest.settle();
        guest.recover();
        let own = guest.report().flushes_of_checkpoints;
        alone += own;
        guest.empty();
        assert!(
            guest.report().flushes_of_checkpoints > 0,
            "seed {seed}: it was at home, and that was flushed by nobody"
        );
    }
    assert!((10..40).contains(&alone), "half of the seeds have patience, and half have none: {alone}");
}

/// The log leaves the region whatever the guest is in the midst of, once and for all, or stays after all; what is committed is
/// committed, wherever.
#[test]
fn a_log_that_leaves_the_region_is_on_storage() {
    let image = guest::image();
    let mut waited = 0;
    for seed in seeds() {
        let mut guest = Guest::new(&image, 3_000_000 + seed);
        for _ in 0..guest.random.below(12) {
            guest.random_commit();
            let block = guest.any_metadata();
            match guest.random.below(4) {
                0 => guest.write_home(block),
                1 => guest.overwrite(block),
                2 => guest.overwrite_and_back(block),
                _ => guest.storage_works(),
            }
        }
        if guest.random.below(2) == 0 {
            guest.random_commit();
        }
        let mut has_left = guest.leave();
        for _ in 0..1000 {
            if has_left {
                break;
            }
            waited += 1;
            let block = guest.any_metadata();
            match guest.random.below(12) {
                0 => guest.random_commit(),
                1 => guest.overwrite(block),
                2 => guest.write_home(block),
                3 => guest.recover(),
                4 => guest.move_tail(),
                5 if guest.random.below(4) == 0 => guest.stay(),
                _ => guest.storage_works(),
            }
            has_left = guest.leave();
        }
        assert!(has_left, "seed {seed}: the log does not get away");
        guest.recover();
        for _ in 0..guest.random.below(12) {
            let block = guest.any_metadata();
            match guest.random.below(5) {
                0..2 => guest.random_commit(),
                2 => guest.overwrite(block),
                3 => guest.move_tail(),
                _ => guest.recover(),
            }
        }
        guest.settle();
        guest.recover();
    }
    assert!(waited > seed_count(), "no log had anything to wait for: {waited}");
}

/// What the guest writes past its journal is durable at home before the region forgets what was committed there.
#[test]
fn a_log_that_leaves_waits_for_what_is_on_its_way_past_it() {
    let image = guest::image();
    let mut guest = Guest::new(&image, 5);
    let block = guest.metadata[0];
    guest.commit_one(block);
    guest.overwrite(block);
    assert!(!guest.leave(), "the block is on its way");
    guest.recover();
    guest.settle();
    assert!(guest.leave());
    guest.recover();
}

/// What the guest wrote past its journal is what its kernel reads first, when it mounts again, and its log brings back the rest.
#[test]
fn whoever_mounts_again_replays_what_was_overwritten() {
    let image = guest::image();
    for seed in 0..20 {
        let mut guest = Guest::new(&image, 7_000_000 + seed);
        let (first, second) = (guest.metadata[0], guest.metadata[1]);
        guest.commit_one(first);
        guest.commit_one(second);
        guest.settle();
        guest.overwrite(first);
        guest.look_mounted();
        guest.recover();
    }
}

/// What the log has of a transaction that is not committed is on storage with it when its commit block comes.
#[test]
fn a_log_that_leaves_takes_along_the_transaction_in_its_midst() {
    let image = guest::image();
    for seed in 0..20 {
        let mut guest = Guest::new(&image, 5_000_000 + seed);
        let (before, block) = (guest.metadata[0], guest.metadata[1]);
        guest.commit_one(before);
        guest.commit_around(block, |guest| {
            for _ in 0..1000 {
                if guest.leave() {
                    return;
                }
                guest.storage_works();
            }
            panic!("the log does not get away");
        });
        guest.recover();
    }
}

/// What is absorbed while the last flush of a log that leaves is under way is nowhere but in the region.
#[test]
fn a_log_that_leaves_takes_along_what_the_guest_puts_back_meanwhile() {
    let image = guest::image();
    let mut guest = Guest::new(&image, 6);
    let block = guest.metadata[0];
    guest.commit_one(block);
    guest.overwrite_before(block, |guest| assert!(!guest.leave()));
    guest.settle();
    assert!(guest.leave());
    guest.read(block);
    guest.recover();
}

/// A transaction that was acknowledged before the flush of its appends frees a block, and what the guest puts there next, over it or in its
/// place, does not get there before that flush has ended: without that transaction the block is what it was.
#[test]
fn what_an_acknowledged_transaction_has_freed_is_not_overwritten_before_it_is_durable() {
    let image = guest::image();
    let (mut recovered, mut waited) = ([0; 2], 0);
    for seed in 0..200 {
        let mut guest = Guest::new(&image, 15_000_000 + seed);
        let [freed, append] = [guest.dynamic[0], guest.dynamic[1]];
        guest.commit_one(guest.metadata[1]);
        guest.reuse_as_data(freed);
        guest.free_and_append(freed, append);
        while guest.is_told_too_late() {
            guest.end_one();
        }
        guest.recover();
        guest.reads_what_it_committed();
        match seed % 5 {
            0 => guest.reuse_as_data(freed),
            1 => guest.empty(),
            4 => guest.pass_all_but_the_last(),
            2 => guest.write_home_soon(guest.metadata[0]),
            _ => {
                let may_be_lost = guest.has_prepared();
                waited += u32::from(may_be_lost);
                assert_eq!(guest.discard_waits(freed), may_be_lost, "seed {seed}: what was freed is discarded");
                continue;
            }
        }
        for _ in 0..3 {
            guest.recover();
            guest.recover();
            guest.end_one();
        }
        guest.settle();
        guest.recover();
        recovered.iter_mut().zip(guest.recovered).for_each(|(sum, count)| *sum += count);
    }
    assert!(waited > 2, "hardly any discard met such a transaction: {waited}");
    assert!(recovered.iter().all(|count| *count > 4), "hardly any power cut met such a transaction: {recovered:?}");
}

/// The worker dies behind a transaction that was acknowledged before the flush of its appends: whoever follows has it.
#[test]
fn a_worker_that_dies_behind_an_acknowledged_transaction_is_followed_by_one_that_has_it() {
    let image = guest::image();
    let mut deaths = 0;
    for seed in 0..120 {
        let mut guest = Guest::new(&image, 17_000_000 + seed);
        let (changed, append) = (guest.metadata[1], guest.dynamic[1]);
        guest.commit_one(changed);
        guest.free_and_append(guest.dynamic[0], append);
        while guest.is_told_too_late() {
            guest.end_one();
        }
        if !guest.has_prepared() {
            continue;
        }
        guest.die_next();
        guest.write_home_soon(changed);
        guest.settle();
        guest.recover();
        guest.commit_one(guest.metadata[0]);
        guest.read(changed);
        guest.recover();
        assert_eq!(guest.failures(), 0, "seed {seed}: the guest sees an error");
        deaths += guest.deaths();
    }
    assert!(deaths > 4, "hardly any worker died: {deaths}");
}

/// The guest is answered that it has written home what its last transaction has, which may be lost still, and nothing was written. Whatever comes next,
/// that is there if the transaction is, and what was before if it is not.
#[test]
fn what_was_absorbed_of_an_acknowledged_transaction_is_there_with_it_whatever_comes_next() {
    let image = guest::image();
    let (mut absorbed, mut recovered) = ([0; 7], [0; 2]);
    for seed in 0..840 {
        let mut guest = Guest::new(&image, 18_000_000 + seed);
        let (changed, append) = (guest.metadata[1], guest.dynamic[1]);
        guest.commit_one(changed);
        if seed % 2 == 0 {
            // What was committed there before is absorbed as well.
            guest.write_home_soon(changed);
            guest.settle();
        }
        guest.free_and_append(guest.dynamic[0], append);
        while guest.is_told_too_late() {
            guest.end_one();
        }
        if ![changed, append].iter().any(|block| guest.write_home_ahead(*block)) {
            continue;
        }
        let next = (seed % 7) as usize;
        absorbed[next] += 1;
        guest.recover();
        match next {
            // The power fails, at one moment or another.
            0 => (0..4).for_each(|_| {
                guest.recover();
                guest.end_one();
            }),
            // The worker dies behind the answer: at once, or in the midst of what follows it.
            1 => guest.die_next(),
            2 => guest.die_soon(),
            // The flush fails.
            3 => {
                guest.fail_next();
                guest.settle();
                assert_eq!(guest.report().commits_in_doubt, 1, "seed {seed}: it has not failed");
                guest.read(changed);
                guest.read(append);
                guest.recover();
                guest.close_in_vain();
                assert_eq!(guest.failures(), 1, "seed {seed}: its log is closed without it");
                guest.recover();
                recovered.iter_mut().zip(guest.recovered).for_each(|(sum, count)| *sum += count);
                continue;
            }
            // The log passes it, is closed and given back, or leaves.
            4 => guest.pass_everything(),
            5 => guest.remount(),
            _ => {
                while !guest.leave() {
                    guest.end_one();
                }
            }
        }
        guest.recover();
        guest.write_home(guest.metadata[0]);
        guest.settle();
        guest.recover();
        guest.read(changed);
        guest.read(append);
        guest.pass_everything();
        guest.recover();
        guest.read(changed);
        guest.read(append);
        assert_eq!(guest.failures(), 0, "seed {seed}: the guest sees an error");
        recovered.iter_mut().zip(guest.recovered).for_each(|(sum, count)| *sum += count);
    }
    assert!(absorbed.iter().all(|count| *count > 4), "hardly anything was absorbed: {absorbed:?}");
    assert!(recovered.iter().all(|count| *count > 4), "hardly any power cut met such a transaction: {recovered:?}");
}

/// The flush fails behind an acknowledged transaction: no later one is, what is there is that transaction or all before it, and the report
/// says so.
#[test]
fn nothing_is_committed_behind_a_transaction_whose_flush_failed() {
    let image = guest::image();
    let (mut failed, mut recovered) = (0, [0; 2]);
    for seed in 0..60 {
        let mut guest = Guest::new(&image, 16_000_000 + seed);
        if guest.logs_appends() || !guest.is_pipelined() {
            continue;
        }
        let [first, second, third] = [guest.dynamic[0], guest.dynamic[1], guest.metadata[0]];
        guest.commit_one(first);
        // The append, and its flush.
        if !guest.commit_and_fail(1, second) || guest.report().commits_before_flush < 2 {
            continue;
        }
        failed += 1;
        assert_eq!(guest.report().commits_in_doubt, 1, "seed {seed}: the report says nothing");
        assert_eq!(guest.failures(), 0, "seed {seed}: it was acknowledged");
        guest.recover();
        guest.write_home_soon(second);
        guest.settle();
        assert_eq!(guest.failures(), 1, "seed {seed}: a part of it goes home, and the rest may be lost");
        guest.recover();
        guest.commit_one(third);
        let failures = guest.failures();
        assert!(failures > 1, "seed {seed}: a transaction is committed behind one that may be lost");
        guest.recover();
        guest.close_in_vain();
        assert!(guest.failures() > failures, "seed {seed}: the log is closed, and its last transaction may be lost");
        guest.recover();
        recovered.iter_mut().zip(guest.recovered).for_each(|(sum, count)| *sum += count);
    }
    assert!(failed > 4 && recovered.iter().all(|count| *count > 0), "{failed} flushes failed: {recovered:?}");
}

/// Whichever operation of a commit with appends fails, nothing of it counts, and the guest is told so.
#[test]
fn a_commit_whose_appends_are_not_durable_does_not_count() {
    let image = guest::image();
    let mut failed = [0; 2];
    for seed in 0..120 {
        let after = seed % 2;
        let mut guest = Guest::new(&image, 4_000_000 + u64::from(seed));
        if guest.logs_appends() || guest.is_pipelined() {
            // No commit waits for one, or for its flush.
            continue;
        }
        let [first, second] = [guest.dynamic[0], guest.dynamic[1]];
        guest.commit_one(first);
        if guest.commit_and_fail(after, second) {
            failed[after as usize] += 1;
            assert_eq!(guest.failures(), 1, "seed {seed}: the guest was not told");
        }
        guest.recover();
    }
    assert!(failed.iter().all(|count| *count > 4), "too few operations failed: {failed:?}");
}

/// Whichever operation fails, the log stays where it was, and goes on there; later it can leave.
#[test]
fn a_log_that_cannot_leave_goes_on_in_the_region() {
    let image = guest::image();
    let mut failed = 0;
    for after in 0..24 {
        let mut guest = Guest::new(&image, 50 + u64::from(after));
        for block in guest.metadata.clone() {
            guest.commit_one(block);
        }
        if !guest.leave_and_fail(after, guest.metadata[2]) {
            continue;
        }
        failed += 1;
        guest.recover();
        guest.settle();
        guest.commit_one(guest.metadata[0]);
        guest.recover();
        while !guest.leave() {
            guest.end_one();
        }
        guest.commit_one(guest.metadata[1]);
        guest.settle();
        guest.recover();
    }
    assert!(failed > 4, "too few operations failed: {failed}");
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

/// Its last write past the journal ends while the guest unmounts: the version that it has replaced leaves the region only when that is
/// durable, by a flush that the worker asks for itself.
#[test]
fn a_log_is_closed_beside_a_write_past_the_journal() {
    let image = guest::image();
    for seed in seeds() {
        let mut guest = Guest::new(&image, 14_000_000 + seed);
        let block = guest.any_metadata();
        guest.commit_one(block);
        guest.pass_everything();
        guest.overwrite(block);
        guest.remount();
        guest.recover();
        guest.settle();
        guest.recover();
    }
}

/// Storage answered so late that the connection was gone: the requests of a commit that has succeeded since come again over the next
/// one. Nobody has written over the log.
#[test]
fn a_commit_that_was_not_heard_of_is_sent_again_over_another_connection() {
    let image = guest::image();
    for seed in 0..60 {
        let mut guest = Guest::new(&image, 3000 + seed);
        let block = guest.metadata[0];
        for _ in 0..=seed % 3 {
            guest.random_commit();
        }
        guest.commit_one(block);
        guest.settle();
        let before = guest.report();
        guest.last_commit_again();
        guest.settle();
        assert_eq!(guest.report().bytes_committed, before.bytes_committed, "nothing is committed twice");
        guest.recover();
        guest.read(block);
        guest.commit_one(block);
        guest.settle();
        assert_ne!(guest.report().bytes_committed, before.bytes_committed, "its log is in the region as before");
        guest.recover();
        assert_eq!(guest.failures(), 0, "the guest sees an error");
    }
}
