//! What is measured of the VMs that are served, for `status --json`, `amberlog top` and Prometheus.
//!
//! There is one source: a VM's entry in `status`. Whoever serves the VM puts its devices' counters and latencies there ([`add`]), and
//! everything else is made from that JSON, in whichever process: metrics ([`text`], [`endpoint`]) and what `top` shows ([`top`]).
//!
//! Must never: wait for a guest, a disk or a VMM. Failure story: what is not in the JSON is not in the metrics.

pub mod endpoint;
pub mod text;
pub mod top;

use block_device::DeviceHandle;
use block_route::Route;
use guest_memory::VmMemory;
use placement::Journals;
use serde_json::{Map, Value, json};

/// Adds to a VM's entry what its devices have counted and how long things took: `io` and `latency` of each disk, `latency` of the VM.
pub fn add(entry: &mut Value, handles: &[DeviceHandle<dyn Route>], journals: &Journals, memory: &VmMemory) {
    for (index, handle) in handles.iter().enumerate() {
        let counted = handle.counters();
        entry["disks"][index]["io"] = json!({
            "read_requests": counted.read_requests,
            "read_bytes": counted.read_bytes,
            "write_requests": counted.write_requests,
            "write_bytes": counted.write_bytes,
            "flush_requests": counted.flush_requests,
            "discard_requests": counted.discard_requests,
            "write_zeroes_requests": counted.write_zeroes_requests,
            "failed_requests": counted.failed_requests,
            "unsupported_requests": counted.unsupported_requests,
            "malformed_chains": counted.malformed_chains,
            "storage_read_bytes": counted.storage_read_bytes,
            "storage_write_bytes": counted.storage_write_bytes,
            "storage_flushes": counted.storage_flushes,
            "size_bytes": handle.image().size_bytes(),
        });
        entry["disks"][index]["image"] = json!(handle.image().path());
        entry["disks"][index]["readonly"] = json!(handle.image().read_only());
        let mut latency: Map<_, _> =
            handle.latencies().iter().map(|(name, snapshot)| ((*name).to_owned(), histogram(snapshot))).collect();
        let compounds = journals.disk(index).compound_times();
        if compounds.count() > 0 {
            latency.insert("compound".to_owned(), histogram(&compounds));
        }
        entry["disks"][index]["latency"] = Value::Object(latency);
    }
    entry["latency"] = json!({"fault": histogram(&memory.fault_latency())});
    let area = journals.area.memory();
    entry["memory"] = json!({
        "held_bytes": area.held_bytes,
        "copied_bytes": area.copied_bytes,
        "room_bytes": journals.area.room_bytes(),
    });
}

/// A histogram as `status --json` has it.
fn histogram(snapshot: &latency::Snapshot) -> Value {
    let us = |share| snapshot.quantile_seconds(share).map(|seconds| (seconds * 1e7).round() / 10.0);
    json!({
        "count": snapshot.count(), "sum_ns": snapshot.sum_ns, "p50_us": us(0.5), "p99_us": us(0.99),
        "buckets": snapshot.buckets,
    })
}

/// The same, read back.
fn snapshot(histogram: &Value) -> Option<latency::Snapshot> {
    let buckets = histogram["buckets"].as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<_>>>()?;
    (buckets.len() <= latency::BUCKETS)
        .then_some(latency::Snapshot { buckets, sum_ns: histogram["sum_ns"].as_u64().unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_histogram_survives_its_json() {
        let histogram = latency::Histogram::default();
        [1, 5, 900, 40_000].iter().for_each(|us| histogram.record(Duration::from_micros(*us)));
        let json = super::histogram(&histogram.snapshot());
        assert_eq!(snapshot(&json), Some(histogram.snapshot()));
        assert_eq!(json["count"], 4);
        assert!(json["p50_us"].as_f64().is_some_and(|us| us > 4.0 && us <= 8.0), "{json}");
        assert_eq!(snapshot(&json!({"buckets": [1, "x"]})), None);
        assert_eq!(snapshot(&Value::Null), None);
        assert_eq!(snapshot(&json!({"buckets": vec![1; latency::BUCKETS + 1]})), None);
    }
}
