//! What a cell's guests waited for, from its raw results: the drive, a processor, or their journal.
//!
//! Time on a drive that is always busy is the drive's; on a processor that is, the processor's. Where the drive is busy and is being asked to flush
//! for most of the time, it is the journal's commits that are waited for, and so they are where neither is busy and flushes are many.

use crate::measured::{CellResult, SummaryRow};
use serde::Serialize;

/// A part of the time from which on something decides.
const DECIDES_PERCENT: f64 = 80.0;
/// Flushes for a part of the time from which on they are what the drive is busy with.
const FLUSHING_PERCENT: f64 = 50.0;

/// What decides how long a cell takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// The drive's arm, or its bus.
    Drive,
    /// The guest's processor, or all of the host's.
    Processor,
    /// Commits: their flushes, or waiting for them.
    Journal,
    /// None of these alone.
    Mixed,
    /// It was not measured.
    Unknown,
}

/// What a row is bound by, and by how much.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Binding {
    /// By what.
    pub bound: Bound,
    /// The drive's share of the time, in per cent.
    pub drive_percent: Option<f64>,
    /// The guest's or the host's processors' share, whichever is larger, in per cent.
    pub processor_percent: Option<f64>,
    /// The share of the time in which the drive was asked to flush, in per cent.
    pub flushing_percent: Option<f64>,
}

impl Bound {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Drive => "drive",
            Self::Processor => "processor",
            Self::Journal => "journal",
            Self::Mixed => "mixed",
            Self::Unknown => "unknown",
        }
    }
}

impl Binding {
    /// `drive 98 %, processor 12 %`.
    pub fn words(&self) -> String {
        let part = |name: &str, percent: Option<f64>| percent.map(|percent| format!("{name} {percent:.0} %"));
        let parts = [
            part("drive", self.drive_percent),
            part("processor", self.processor_percent),
            part("flushing", self.flushing_percent),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// What binds a row.
pub fn binding(row: &SummaryRow) -> Binding {
    let of = |field: &str| row.fields.get(field).map(|summary| summary.mean);
    let drive_percent = of("drive_busy_percent");
    let processor_percent = of("guest_cpu_percent").into_iter().chain(of("host_cpu_percent")).reduce(f64::max);
    let flushing_percent = of("flushing_percent");
    let decides = |percent: Option<f64>| percent.is_some_and(|percent| percent >= DECIDES_PERCENT);
    let is_flushing = flushing_percent.is_some_and(|percent| percent >= FLUSHING_PERCENT);
    let bound = match (decides(drive_percent), decides(processor_percent)) {
        _ if drive_percent.is_none() && processor_percent.is_none() => Bound::Unknown,
        (_, true) => Bound::Processor,
        _ if is_flushing => Bound::Journal,
        (true, false) => Bound::Drive,
        (false, false) => Bound::Mixed,
    };
    Binding { bound, drive_percent, processor_percent, flushing_percent }
}

/// The shares of one measured cell, as fields of its guests; the host had so many processors.
pub fn shares(result: &CellResult, processors: f64) -> Vec<(&'static str, f64)> {
    let Some(seconds) = result.longest("seconds_unmounted").filter(|seconds| *seconds > 0.0) else { return Vec::new() };
    let percent = |part: f64| (100.0 * part / seconds).min(100.0);
    let of_model = |name: &str| {
        let stretched = result.parameters.time_scale.max(f64::MIN_POSITIVE);
        result.model.get(name).map(|ms| percent(ms / 1000.0 * stretched))
    };
    let all = |field: &str| -> f64 { result.guests.iter().filter_map(|guest| guest.get(field)).sum() };
    // All processes of the VMs, or of results that do not have them what the guests know of: a guest's processor is one of the
    // host's, emulated or not, and its own seconds are the host's as well.
    let known = all("guest_cpu_seconds") + all("amberlog_cpu_seconds");
    let host = all("vm_cpu_seconds").max(known) + all("server_cpu_seconds");
    let mut shares = Vec::new();
    shares.extend(of_model("busy_ms").map(|share| ("drive_busy_percent", share)));
    // The guest's own clock counts both, whatever the drive's is.
    shares.extend(result.mean("protection_calls_us").map(|us| ("protection_percent", percent(us / 1e6))));
    shares.extend(result.mean("protection_faults_us").map(|us| ("fault_wait_percent", percent(us / 1e6))));
    shares.extend(of_model("flushing_ms").map(|share| ("flushing_percent", share)));
    if let Some(own) = result.mean("guest_cpu_seconds") {
        shares.push(("guest_cpu_percent", percent(own)));
        shares.push(("host_cpu_percent", percent(host / processors.max(1.0))));
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Cell, Group, Mode};
    use crate::measured::Parameters;
    use crate::results::summarise;
    use std::collections::BTreeMap;

    fn cell(busy_ms: f64, flushing_ms: f64, cpu: f64) -> CellResult {
        let group =
            Group { disk: "none".into(), parameter: 0, guests: 1, workload: "untar".into(), mode: Mode::Journal };
        let mut result = CellResult::empty(&Cell { group, iteration: 0 }, &Parameters::for_tests());
        result
            .guests
            .push(BTreeMap::from([("seconds_unmounted".to_owned(), 10.0), ("guest_cpu_seconds".to_owned(), cpu)]));
        result.model = BTreeMap::from([("busy_ms".to_owned(), busy_ms), ("flushing_ms".to_owned(), flushing_ms)]);
        result
    }

    #[test]
    fn what_is_always_busy_decides() {
        let of = |result: CellResult| binding(&summarise(&[result])[0]);
        assert_eq!(of(cell(9500.0, 100.0, 1.0)).bound, Bound::Drive);
        assert_eq!(of(cell(9500.0, 9000.0, 1.0)).bound, Bound::Journal);
        assert_eq!(of(cell(2000.0, 0.0, 9.9)).bound, Bound::Processor);
        assert_eq!(of(cell(2000.0, 0.0, 1.0)).bound, Bound::Mixed);
        assert_eq!(of(cell(3000.0, 6000.0, 1.0)).bound, Bound::Journal);
        assert_eq!(of(cell(9500.0, 100.0, 1.0)).words(), "drive 95 %, processor 10 %, flushing 1 %");
        // What serves the disks and the VMM are the host's too, whatever the guest knows of.
        let mut served = cell(2000.0, 0.0, 1.0);
        served.processors = 2;
        served.guests[0].insert("vm_cpu_seconds".to_owned(), 18.0);
        assert_eq!(of(served).words(), "drive 20 %, processor 90 %, flushing 0 %");
        let mut protecting = cell(2000.0, 0.0, 1.0);
        protecting.parameters.time_scale = 2.0;
        protecting.guests[0].insert("protection_calls_us".to_owned(), 2_000_000.0);
        protecting.guests[0].insert("protection_faults_us".to_owned(), 500_000.0);
        let fields = &summarise(&[protecting])[0].fields;
        assert_eq!(fields["protection_percent"].mean, 20.0, "the guest's clock is no drive's");
        assert_eq!(fields["fault_wait_percent"].mean, 5.0, "writers that wait for a page to be let go are apart");
        let none = SummaryRow { fields: BTreeMap::new(), ..summarise(&[cell(0.0, 0.0, 0.0)]).remove(0) };
        assert_eq!(binding(&none).bound, Bound::Unknown);
    }
}
