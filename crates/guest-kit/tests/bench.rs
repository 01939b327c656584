//! The bench's parts that kill workers and move journals, in their small form: they measure what they say, and a figure that cannot be
//! had is an error. Their times are not judged.

use std::process::Command;

#[test]
fn what_guests_wait_for_is_measured() {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("bench.json");
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["--quick", "--only", "pause,moved", "--json"])
        .arg(&json)
        .arg("--dir")
        .arg(directory.path())
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let results: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).expect("results")).expect("JSON");
    let figures = results["figures"].as_array().expect("figures");
    assert_eq!(figures.len(), 6, "{said}");
    assert!(figures.iter().all(|figure| figure["measured"].as_f64() > Some(0.0)), "{figures:?}");
    for to in ["storage", "retain"] {
        let of = results["details"]["moved"]["pauses_us"].as_array().expect("pauses");
        let longests: Vec<_> = of.iter().filter(|entry| entry[0] == to).collect();
        assert_eq!(longests.len(), 2, "of both disks: {of:?}");
        assert!(longests.iter().all(|entry| entry[2].as_array().is_some_and(|all| all.len() == 3)), "{of:?}");
    }
}
