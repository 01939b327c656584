//! What `amberlog top` shows of disks that are busy: requests a second, and how long they took, since the last look.

use super::snapshot;
use crate::client::text;
use serde_json::Value;

/// What is shown: the head of the column and where the histogram stands in the disk's entry.
const LATENCIES: &[(&str, &str)] = &[
    ("READ MS", "/latency/read"),
    ("WRITE MS", "/latency/write"),
    ("COMMIT MS", "/latency/commit"),
    ("FLUSH MS", "/latency/flush"),
    ("STORAGE MS", "/latency/storage_write"),
];

/// A line for each disk, with what came since `earlier`, `seconds` ago; since the beginning where there is no earlier look. Times
/// are the median and the 99th percentile.
pub fn table(earlier: Option<(&Value, f64)>, now: &Value) -> String {
    let mut lines = vec![format!("{:<16} {:<12} {:>9} {:>9} {:>9}", "VM", "DISK", "READ/S", "WRITE/S", "FLUSH/S")];
    for (head, _) in LATENCIES {
        lines[0] += &format!(" {head:>13}");
    }
    for vm in now.as_array().into_iter().flatten() {
        for disk in vm["disks"].as_array().into_iter().flatten().filter(|disk| disk["io"].is_object()) {
            let before = earlier.and_then(|(vms, _)| find(vms, &vm["vm"], &disk["name"]));
            let mut line = format!("{:<16} {:<12}", text(&vm["vm"]), text(&disk["name"]));
            for key in ["read_requests", "write_requests", "flush_requests"] {
                let count = |disk: &Value| disk["io"][key].as_u64().unwrap_or_default();
                let cell = match (before, earlier) {
                    (Some(before), Some((_, seconds))) if seconds > 0.0 => {
                        format!("{:.0}", count(disk).saturating_sub(count(before)) as f64 / seconds)
                    }
                    _ => "-".to_owned(),
                };
                line += &format!(" {cell:>9}");
            }
            for (_, pointer) in LATENCIES {
                let of = |disk: &Value| disk.pointer(pointer).and_then(snapshot).unwrap_or_default();
                let since = before.map_or_else(|| of(disk), |before| of(disk).since(&of(before)));
                let cell = match (since.quantile_seconds(0.5), since.quantile_seconds(0.99)) {
                    (Some(half), Some(most)) => format!("{}/{}", milliseconds(half), milliseconds(most)),
                    _ => "-".to_owned(),
                };
                line += &format!(" {cell:>13}");
            }
            lines.push(line);
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

fn find<'v>(vms: &'v Value, vm: &Value, disk: &Value) -> Option<&'v Value> {
    let vm = vms.as_array()?.iter().find(|entry| entry["vm"] == *vm)?;
    vm["disks"].as_array()?.iter().find(|entry| entry["name"] == *disk)
}

/// Three digits that count.
fn milliseconds(seconds: f64) -> String {
    let ms = seconds * 1e3;
    match ms {
        ms if ms < 1.0 => format!("{ms:.3}"),
        ms if ms < 10.0 => format!("{ms:.2}"),
        ms if ms < 100.0 => format!("{ms:.1}"),
        ms => format!("{ms:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_came_since_the_last_look_is_shown() {
        let vms = |reads: u64, buckets: Value| {
            json!([
                {"vm": "db", "disks": [{"name": "disk0", "io": {"read_requests": reads},
                    "latency": {"read": {"buckets": buckets, "sum_ns": 0}}}]},
                {"vm": "web", "disks": [{"name": "disk0"}]},
            ])
        };
        let (earlier, now) = (vms(10, json!([10])), vms(30, json!([10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 20])));
        let first = table(None, &earlier);
        assert_eq!(first.lines().count(), 2, "a VM that is not served has no line: {first}");
        assert!(first.lines().nth(1).is_some_and(|line| line.contains(" - ") && line.contains("0.00")), "{first}");
        let second = table(Some((&earlier, 2.0)), &now);
        let line = second.lines().nth(1).expect("a line");
        assert!(line.contains(" 10 "), "20 requests in 2 s: {line}");
        assert!(line.contains("0.768/1.02"), "the ten of before are not counted again: {line}");
    }
}
