//! Those who judge what a daemon says: `promtool` and a validator of JSON schemas, run as programs.

#![allow(dead_code, reason = "each test takes what it needs")]

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A file of the project.
pub fn page(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name).canonicalize().unwrap()
}

pub fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A program could not be started.
pub fn is_missing(error: std::io::Error) -> Output {
    panic!("{error}; scripts/install-packages.sh installs promtool and the others")
}

/// The older text format.
pub fn metrics(text: &str) -> Output {
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{error}; scripts/install-packages.sh installs promtool"));
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    promtool.wait_with_output().unwrap()
}

#[track_caller]
pub fn assert_is_metrics(text: &str) {
    let output = metrics(text);
    assert!(output.status.success() && said(&output).is_empty(), "{}\n{text}", said(&output));
}

/// OpenMetrics, read by Prometheus' own parser: a block is made of it, for which every sample needs a time.
pub fn open_metrics(text: &str) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let timed: String = text
        .lines()
        .map(|line| if line.starts_with('#') { format!("{line}\n") } else { format!("{line} 1700000000\n") })
        .collect();
    let file = directory.path().join("metrics");
    std::fs::write(&file, timed).unwrap();
    Command::new("promtool")
        .args(["tsdb", "create-blocks-from", "openmetrics"])
        .args([&file, &directory.path().join("blocks")])
        .output()
        .unwrap_or_else(is_missing)
}

#[track_caller]
pub fn assert_is_open_metrics(text: &str) {
    let output = open_metrics(text);
    assert!(output.status.success(), "{}\n{text}", said(&output));
}

/// The answer of `status --json`, against docs/status.schema.json.
pub fn is_status(answer: &Value) -> Output {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    write!(file, "{answer}").unwrap();
    // Debian's, whichever other Python is first on PATH.
    Command::new("/usr/bin/python3")
        .args(["-m", "jsonschema", "-i"])
        .args([file.path(), &page("docs/status.schema.json")])
        .output()
        .unwrap_or_else(is_missing)
}

#[track_caller]
pub fn assert_is_status(answer: &Value) {
    let output = is_status(answer);
    assert!(output.status.success(), "{}\n{answer:#}", said(&output));
}
