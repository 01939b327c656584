//! What tells groups of bars apart, in words: everything but the mode that is not the same everywhere.

use crate::cell::Group;
use crate::measured::SummaryRow;

/// Of a group among rows; `parameter` is the name of the experiment's own.
pub(super) fn place(group: &Group, rows: &[&SummaryRow], parameter: Option<&str>) -> String {
    let varies = |of: fn(&Group) -> String| rows.iter().any(|row| of(&row.group) != of(group));
    let mut words = Vec::new();
    if varies(|group| group.workload.clone()) {
        words.push(group.workload.clone());
    }
    if varies(|group| group.disk.clone()) {
        words.push(group.disk.clone());
    }
    if varies(|group| group.parameter.to_string()) {
        words.push(value_of(group.parameter, parameter));
    }
    if varies(|group| group.guests.to_string()) || words.is_empty() {
        words.push(guests(group.guests));
    }
    words.join(", ")
}

/// A value of a parameter with its unit: `64 MiB`, `30 s`, `77 %`.
pub(super) fn value_of(value: u64, parameter: Option<&str>) -> String {
    let name = parameter.unwrap_or_default();
    let unit = [("_mib", "MiB"), ("_kib", "KiB"), ("_seconds", "s"), ("_percent", "%")];
    let unit = unit.iter().find(|(suffix, _)| name.contains(suffix)).map_or("", |(_, unit)| unit);
    format!("{value} {unit}").trim_end().to_owned()
}

pub(super) fn guests(count: u32) -> String {
    if count == 1 { "1 guest".to_owned() } else { format!("{count} guests") }
}
