//! A few rounds of the kill matrix, whose long run is `make crash`: who dies, when, on which file system and with how much
//! memory comes from the seed, so that these are the same kinds of death every time, at moments that never are. And one with the guest's memory under stress.

use std::process::Command;

/// The first of four seeds in a row under which QEMU, the guest and amberlog each die first, ext3 and ext4 with small and
/// large blocks, with and without memory to copy into, finished by `recover --area` that is itself killed.
const SEED: &str = "1009";

/// The number before these words, in a line that has them.
fn number_before(words: &str, printed: &str) -> Option<u64> {
    printed.lines().find_map(|line| line.split_once(words)?.0.parse().ok())
}

#[test]
fn what_was_acknowledged_outlives_whoever_is_killed() {
    let rounds = Command::new(env!("CARGO_BIN_EXE_crash-rounds"))
        .args(["--rounds", "4", "--seed", SEED, "--under", "retain"])
        .output()
        .expect("crash-rounds starts");
    let printed = String::from_utf8_lossy(&rounds.stdout);
    let said = String::from_utf8_lossy(&rounds.stderr);
    assert!(rounds.status.success(), "{printed}\n{said}");
    assert!(printed.contains("4 rounds good, 0 failed"), "{printed}");
    let acknowledged = number_before(" acknowledged; ", &printed);
    assert!(acknowledged.is_some_and(|pieces| pieces > 0), "the guests did nothing before they died: {printed}");
}

/// A short look at `make stress`: with what touches nobody's memory but the guest's own, and of that what this machine has. The same command once more
/// finds that all is done.
#[test]
fn a_guest_reads_what_it_wrote_while_its_memory_is_stressed() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("rounds");
    let run = || {
        let rounds = Command::new(env!("CARGO_BIN_EXE_crash-rounds"))
            .args(["--rounds", "1", "--seed", SEED, "--under", "retain", "--memory-stress", "page-bits,split,reclaim"])
            .arg("--log")
            .arg(&log)
            .output()
            .expect("crash-rounds starts");
        let printed = String::from_utf8_lossy(&rounds.stdout).into_owned();
        assert!(rounds.status.success(), "{printed}\n{}", String::from_utf8_lossy(&rounds.stderr));
        assert!(printed.contains("1 rounds good, 0 failed"), "{printed}");
        assert!(number_before(" records read back while guests ran", &printed) > Some(0), "{printed}");
        printed
    };
    let first = run();
    assert!(first.contains("memory is stressed by: ") && first.contains("against guests' memory: "), "{first}");
    let noted = std::fs::read_to_string(&log).unwrap();
    assert_eq!(noted.lines().count(), 1, "{noted}");
    let second = run();
    assert!(second.starts_with("0 more rounds --under retain"), "{second}");
    assert!(!second.contains("memory is stressed by: "), "{second}");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), noted);
}
