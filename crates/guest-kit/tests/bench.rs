//! The bench's parts that kill workers, hand journals over and have them recovered, in their small form: they measure what they say, and a
//! figure that cannot be had is an error. Their times are not judged.

use std::process::Command;

#[test]
fn what_guests_wait_for_is_measured() {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("bench.json");
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["--quick", "--only", "pause,moved,recovered", "--json"])
        .arg(&json)
        .arg("--dir")
        .arg(directory.path())
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let results: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).expect("results")).expect("JSON");
    let figures = results["figures"].as_array().expect("figures");
    assert_eq!(figures.len(), 2 + 3 + 2, "{said}");
    assert!(figures.iter().all(|figure| figure["measured"].as_f64() > Some(0.0)), "{figures:?}");
    for (stage, kinds, streams) in [
        ("moved", ["quiet", "question", "hand-over"], ["own", "held", "plain"].as_slice()),
        ("recovered", ["restart", "quiet", "recovery"], ["held", "plain"].as_slice()),
    ] {
        let all = results["details"][stage]["streams"].as_array().expect("streams");
        assert_eq!(all.len(), kinds.len() * streams.len(), "{all:?}");
        for (kind, stream) in kinds.iter().flat_map(|kind| streams.iter().map(move |stream| (kind, stream))) {
            let entry = all.iter().find(|entry| entry["kind"] == *kind && entry["stream"] == *stream);
            let entry = entry.unwrap_or_else(|| panic!("no {kind} of {stream}: {all:?}"));
            assert!(entry["longest_of_windows_us"].as_array().is_some_and(|windows| windows.len() == 3), "{entry}");
            assert!(entry["p99_ms"].as_f64() >= entry["p50_ms"].as_f64(), "{entry}");
        }
    }
    // Each of them was one, and had something to bring home.
    for (stage, what) in [("moved", "home_mib"), ("recovered", "recovered_mib")] {
        let mib = results["details"][stage][what].as_array().expect("a list");
        assert!(mib.len() == 3 && mib.iter().all(|mib| mib.as_f64() > Some(1.0)), "{stage}: {mib:?}");
    }
}
