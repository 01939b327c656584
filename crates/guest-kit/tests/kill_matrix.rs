//! A few rounds of the kill matrix, whose long run is `make crash`: who dies, when, on which file system and with how much
//! memory comes from the seed, so that these are the same kinds of death every time, at moments that never are.

use std::process::Command;

/// The first of four seeds in a row under which QEMU, the guest and amberlog each die first, ext3 and ext4 with small and
/// large blocks, with and without memory to copy into, finished by `recover --area` that is itself killed.
const SEED: &str = "1009";

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
    let acknowledged = printed.lines().find_map(|line| line.split_once(" acknowledged; ")?.0.parse::<u64>().ok());
    assert!(acknowledged.is_some_and(|pieces| pieces > 0), "the guests did nothing before they died: {printed}");
}
