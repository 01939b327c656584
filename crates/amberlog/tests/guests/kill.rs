//! `kill -9` of QEMU at random moments, in every journaling mode.

use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::workload::{Mode, STREAMS, Workload};
use guest_kit::{Accelerator, Guest, judge};
use guest_tools::random::Random;
use std::time::Duration;

#[test]
fn whenever_qemu_is_killed_all_that_was_acknowledged_is_there() {
    for (accelerator, rounds) in accelerators().into_iter().zip([rounds(3), rounds(1)]) {
        kill_rounds(accelerator, rounds);
    }
}

fn kill_rounds(accelerator: Accelerator, rounds: u64) {
    for round in 0..rounds {
        let mut random = Random::of(seed(), round);
        let mode = [Mode::Journal, Mode::Ordered, Mode::Writeback][(round % 3) as usize];
        let moment = Duration::from_millis(random.below(4000));
        println!(
            "round {round} under {}: data={}, killed after {moment:?} (AMBERLOG_SEED={})",
            accelerator.name(),
            mode.name(),
            seed()
        );
        let bench = Bench::new();
        let image = bench.path("image");
        let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
        let load = Workload::new(random.below(1 << 32)).mode(mode);
        let is_protected = round % 2 == 0;
        let words = if is_protected { protected_disk(&image) } else { disk(&image) };
        let mut spec = bench.spec("killed", load.script(), words);
        spec.accelerator = Some(accelerator);
        let mut guest = Guest::start(spec).unwrap();
        for stream in STREAMS {
            guest.wait_acknowledged(stream, 1, LIMIT).unwrap();
        }
        std::thread::sleep(moment);
        let reported = kill(&mut guest);
        let verdict = judge::check(&file_system).unwrap();
        // Files that were just being written are what data=writeback does not promise; the file system is.
        assert!(verdict.is_consistent(), "{verdict:?}");
        let evidence = load.check(&file_system, &reported).unwrap();
        assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
        let report = bench.report();
        assert_eq!(report.status(0), "recovered");
        assert!(report.recovered(0, "transactions") > 0 && report.recovered(0, "blocks_written") > 0);
        assert!(!is_protected || report.counter(0, "pages_protected") > 0);
        assert!((1..=8192).contains(&report.counter(0, "journal_bytes_to_storage")));
        assert_eq!(journal_superblock(&image).errno, 0);
        bench.assert_area_is_empty();
    }
}
