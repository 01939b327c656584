//! Counters of amberlog's reports, as fields of a cell.

use serde_json::Value;
use std::collections::BTreeMap;

/// What a held block costs in amberlog's tables, in bytes.
pub(crate) const TUPLE_BYTES: f64 = 18.0;

/// The first disk of amberlog's report and what protection took, as fields.
pub(crate) fn flattened(report: &Value) -> BTreeMap<String, f64> {
    let disk = &report["disks"][0];
    let mut fields = BTreeMap::new();
    for (name, value) in report["protection"].as_object().into_iter().flatten() {
        fields.extend(value.as_f64().map(|value| (format!("protection_{name}"), value)));
    }
    for (name, value) in disk["counters"].as_object().into_iter().flatten() {
        fields.extend(value.as_u64().map(|value| (name.clone(), value as f64)));
    }
    for part in ["recovery", "remote", "nvm"] {
        for (name, value) in disk[part].as_object().into_iter().flatten() {
            fields.extend(value.as_f64().map(|value| (format!("{part}_{name}"), value)));
        }
    }
    fields
}

/// Whether a field grows with what is done; the others are the most that there was, or are of the end.
pub(crate) fn is_sum(name: &str) -> bool {
    let is_level = name.ends_with("_max") || name.ends_with("_now");
    !is_level && !name.starts_with("recovery_") && name != "remote_fall_backs"
}
