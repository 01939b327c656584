//! The metrics of a guest that works, read while it does.

use crate::judges::{assert_is_metrics, assert_is_open_metrics, assert_is_status};
use crate::serve::{Daemon, write_config};
use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::ExtRecipe;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

fn scrape(path: &Path, accept: &str) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

/// The samples of one disk, without its labels' names of VM and disk.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

#[test]
fn what_a_guest_does_is_counted_and_timed() {
    let bench = Bench::new();
    let image = bench.path("image");
    ExtRecipe::ext4(96, 16).make(&image).unwrap();
    let config = write_config(&bench, &[("db", image.to_str().unwrap().to_owned())]);
    let socket = bench.path("metrics.sock");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("[remote]", &format!("[metrics]\nlisten = [{socket:?}]\n[remote]"))).unwrap();
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(5);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/records", "records", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("db", script, &[])).unwrap();
    guest.wait_acknowledged("records", 30, LIMIT).unwrap();

    let entry = daemon.wait_state("db", "running");
    assert_is_status(&json!({"schema": 1, "vms": [entry]}));
    let disk = &entry["disks"][0];
    let count = |name: &str| disk["latency"][name]["count"].as_u64().unwrap();
    let io = |name: &str| disk["io"][name].as_u64().unwrap();
    // What is under way is counted and not timed yet.
    assert!(count("write") <= io("write_requests") && io("write_requests") - count("write") < 256, "{disk}");
    assert!(count("read") > 0 && count("write") > 60, "{disk}");
    assert!(count("commit") >= 30 && count("commit") <= count("write"), "each record was a commit: {disk}");
    assert!(disk["counters"]["transactions"].as_u64().unwrap() >= 30, "{disk}");
    assert!(count("storage_read") > 0, "{disk}");
    for name in ["commit", "read"] {
        let of = |key: &str| disk["latency"][name][key].as_f64().unwrap();
        assert!(of("p50_us") > 0.0 && of("p50_us") <= of("p99_us") && of("sum_ns") > 0.0, "{disk}");
    }

    let plain = scrape(&socket, "*/*");
    assert_is_metrics(&plain);
    assert_is_open_metrics(&scrape(&socket, "application/openmetrics-text"));
    let earlier = samples(&plain);
    let of_disk = |name: &str, more: &str| format!("amberlog_{name}{{vm=\"db\",disk=\"disk0\"{more}}}");
    assert!(earlier[&of_disk("disk_requests_total", ",op=\"write\"")] >= io("write_requests") as f64);
    assert_eq!(earlier["amberlog_vm_state{vm=\"db\",state=\"running\"}"], 1.0);
    let top = daemon.ask(&["top", "--count", "2", "--interval", "0.5"]);
    let top = text_of(&top.stdout);
    let last = top.lines().rfind(|line| line.starts_with("db ")).unwrap().to_owned();
    assert!(top.contains("COMMIT MS") && last.matches('/').count() >= 2, "{top}");

    // Later nothing has become less, and what the guest does has become more.
    let acknowledged = guest.acknowledged("records").count;
    guest.wait_acknowledged("records", acknowledged + 30, LIMIT).unwrap();
    let later = samples(&scrape(&socket, "*/*"));
    for (name, value) in &earlier {
        let is_counter = ["_total{", "_bucket{", "_count{", "_sum{"].iter().any(|part| name.contains(part));
        assert!(!is_counter || later[name] >= *value, "{name}: {} after {value}", later[name]);
    }
    let commits = of_disk("disk_commit_seconds_count", "");
    assert!(later[&commits] >= earlier[&commits] + 30.0, "{} after {}", later[&commits], earlier[&commits]);
    guest.kill_qemu().unwrap();
    daemon.signal(guest_kit::Signal::TERM);
    assert!(daemon.wait().success());
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A VM that is not served has no numbers, and is valid all the same.
#[test]
fn a_vm_that_cannot_be_served_is_valid_too() {
    let entry: Value = json!({"schema": 1, "vm": "x", "state": "failed", "state_text": "failed: why", "pid": null,
        "vmm_pid": null, "worker_pid": null, "supervisor_pid": 1, "restarts": 0, "pending": null, "disks": []});
    assert_is_status(&json!({"schema": 1, "vms": [entry]}));
}
