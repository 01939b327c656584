//! A workload run to its end in all guests of a cell: times by the guests' clocks, bytes by amberlog's counts, processor
//! time by both systems', and what the journals held over time.
//!
//! Failure story: the first guest that fails or hangs fails the cell; its console is kept.

use crate::cell::{Cell, Mode};
use crate::counters::{TUPLE_BYTES, flattened, is_sum};
use crate::error::{Error, FileContext, Result};
use crate::journal_server::JournalServer;
use crate::machine::{VmCpu, vm_cpu_seconds};
use crate::measured::{CellResult, Parameters};
use crate::processors::Sampler;
use crate::rig::{Plan, Rig, Running, first_line, sizes, workload_of};
use crate::samples::{counted_so_far, levels_since, marks_of_the_load};
use disk_model::Totals;
use guest_kit::{Guest, Reported};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Points of a curve that are kept.
const CURVE_POINTS_MAX: usize = 240;
/// A gigabit network, in bytes per second.
const NETWORK_BYTES_PER_SECOND: f64 = 125e6;
/// How long a guest whose script has ended may take to power off, and amberlog to bring its disk home.
const END_LIMIT: Duration = Duration::from_secs(60);

impl Rig {
    /// Runs a workload to its end in all guests of a cell.
    ///
    /// # Errors
    /// When guests cannot be started. One that fails or hangs later fails the cell's result; its console is kept.
    pub fn load(&mut self, cell: &Cell, parameters: &Parameters, parameter: Option<&str>) -> Result<CellResult> {
        let started = Instant::now();
        let workload = workload_of(cell)?;
        let plan = Plan::new(cell, parameters, parameter);
        let mut running = self.start(&plan, |number| {
            format!(
                "{preamble}
                 read -r name user nice system idle iowait irq softirq rest </proc/stat
                 cpu_begin=$((user + nice + system + irq + softirq))
                 {load} >/tmp/result
                 read -r loaded rest </proc/uptime
                 sync
                 read -r synced rest </proc/uptime
                 umount /mnt
                 read -r ended rest </proc/uptime
                 read -r name user nice system idle iowait irq softirq rest </proc/stat
                 mark cpu $((user + nice + system + irq + softirq - cpu_begin))
                 mark times $begin $loaded $synced $ended
                 read -r go <&5
                 grep -e phase= /tmp/result | sed 's/^/mark result /' >/dev/ttyS1 || true",
                preamble = plan.preamble(workload, number),
                load = workload.load(sizes(parameters, cell, number)),
            )
        })?;
        let counted_before = running.counters_so_far(cell.group.mode)?;
        let before = running.server.totals();
        let cpu = |guest: &Guest| vm_cpu_seconds(guest.process_id(), guest.qemu_pid().ok()?);
        let cpu_before: Vec<Option<VmCpu>> = running.guests.iter().map(cpu).collect();
        let server_cpu_before = running.journal_server.as_ref().map(JournalServer::cpu_seconds);
        let begun = Instant::now();
        running.go()?;
        let sampler = Sampler::start(&running);
        let mut result = CellResult::empty(cell, parameters);
        let deadline = begun + self.time_limit(workload, cell, parameters);
        for (index, cpu_before) in cpu_before.into_iter().enumerate() {
            let mut outcome = told_times(&mut running.guests[index], deadline);
            // Until it is unmounted, as the guest's own time is: it waits for a word before it goes on to its end.
            let cpu_now = cpu(&running.guests[index]);
            if outcome.is_ok() {
                // One that has ended without says why below.
                let _ = running.guests[index].tell("go");
                outcome = finish(&mut running.guests[index], deadline);
            }
            let outcome = outcome.and_then(|()| {
                let reported = running.guests[index].final_report();
                let before = &counted_before[index];
                let mut fields = measured(cell.group.mode, parameters, &reported, &running.reports[index], before)?;
                if workload.is_prepared() {
                    let (path, started) = &running.samples[index];
                    marks_of_the_load(&mut fields, before, &levels_since(path, *started, begun));
                }
                Ok(fields)
            });
            match outcome {
                Ok(mut fields) => {
                    let guest_cpu = fields.get("guest_cpu_seconds").copied().unwrap_or(0.0);
                    if let (Some(now), Some(before)) = (cpu_now, cpu_before) {
                        let (all, amberlog_cpu) = now.since(before);
                        fields.insert("vm_cpu_seconds".to_owned(), all);
                        fields.insert("amberlog_cpu_seconds".to_owned(), amberlog_cpu);
                        fields.insert("cpu_seconds".to_owned(), guest_cpu + amberlog_cpu);
                    }
                    fields.extend(self.aged_fields(&plan));
                    result.guests.push(fields);
                }
                Err(error) => {
                    let console = self.keep_console(&mut running.guests[index], cell, index);
                    result.failure = Some(format!("guest {index}: {}{console}", first_line(&error.to_string())));
                    break;
                }
            }
        }
        running.note_phase("run", begun);
        if let (Some(server), Some(before)) = (&running.journal_server, server_cpu_before) {
            let share = (server.cpu_seconds() - before) / f64::from(cell.group.guests.max(1));
            for fields in &mut result.guests {
                fields.insert("server_cpu_seconds".to_owned(), share);
            }
        }
        result.curves = curves(&running, begun);
        result.curves.extend(sampler.end());
        result.model = totals(running.server.totals(), before);
        result.phases = std::mem::take(&mut running.phases);
        let ending = Instant::now();
        drop(running);
        result.phases.insert("end".to_owned(), ending.elapsed().as_secs_f64());
        result.wall_seconds = started.elapsed().as_secs_f64();
        result.load = crate::machine::load();
        Ok(result)
    }
}

/// Waits until a guest has told its times (it may still be unmounted, and alive), or has ended without.
fn told_times(guest: &mut Guest, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    guest.await_report("its load did not end", left, |reported| {
        let told = reported.marks.iter().any(|mark| mark.starts_with("times "));
        (told || reported.exit_code.is_some()).then_some(())
    })?;
    Ok(())
}

fn finish(guest: &mut Guest, deadline: Instant) -> Result<()> {
    let left = || deadline.saturating_duration_since(Instant::now()).max(END_LIMIT);
    let code = guest.wait_exit_code(left())?;
    if code != 0 {
        return Err(guest.failure(&format!("its script ended with {code}")).into());
    }
    let status = guest.wait_end(left())?;
    if !status.success() {
        return Err(guest.failure(&format!("QEMU or amberlog ended with {status}")).into());
    }
    Ok(())
}

/// What a guest told and what amberlog counted, as fields.
fn measured(
    mode: Mode,
    parameters: &Parameters,
    reported: &Reported,
    report: &Path,
    before: &BTreeMap<String, f64>,
) -> Result<BTreeMap<String, f64>> {
    let mut fields = counters(mode, report, before)?;
    if mode.has_journal_in_tmpfs() {
        // amberlog writes that journal to storage as it sees it, which is the host's memory.
        let home = fields.get("home_bytes_to_storage").copied().unwrap_or(0.0);
        fields.insert("bytes_to_storage".to_owned(), home);
    }
    let told = |name: &str| {
        let mark = reported.marks.iter().find_map(|mark| mark.strip_prefix(name));
        mark.map(str::to_owned).ok_or_else(|| Error::Told(format!("a guest did not tell '{name}'")))
    };
    let times: Vec<f64> = told("times ")?.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [begin, loaded, synced, ended] = times[..] else {
        return Err(Error::Told("a guest's times are not four numbers".to_owned()));
    };
    fields.insert("seconds".to_owned(), synced - begin);
    fields.insert("seconds_unsynced".to_owned(), loaded - begin);
    fields.insert("seconds_unmounted".to_owned(), ended - begin);
    if let Some(ticks) = told("cpu ")?.parse::<f64>().ok().filter(|ticks| *ticks >= 0.0) {
        fields.insert("guest_cpu_seconds".to_owned(), ticks / 100.0);
    }
    if let Some(bytes) = fields.get("remote_wire_bytes").copied() {
        // Of the time that it would take on a drive that is not slowed.
        let seconds = ((synced - begin) / parameters.time_scale).max(1e-3);
        fields.insert("network_percent".to_owned(), 100.0 * bytes / seconds / NETWORK_BYTES_PER_SECOND);
    }
    if let Ok(result) = told("result phase=run ") {
        fields.extend(result.split_whitespace().filter_map(|word| {
            let (name, value) = word.split_once('=')?;
            Some((if name == "seconds" { "run_seconds".to_owned() } else { name.to_owned() }, value.parse().ok()?))
        }));
    }
    Ok(fields)
}

/// amberlog's report of the data disk, flattened, without what had been counted `before`.
pub(crate) fn counters(mode: Mode, report: &Path, before: &BTreeMap<String, f64>) -> Result<BTreeMap<String, f64>> {
    let text = std::fs::read(report).at("read", report)?;
    let damaged = |reason: String| Error::Damaged { path: report.to_owned(), reason };
    let value: Value = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let disk = &value["disks"][0];
    if disk["journal"]["kind"] == "none" && mode.has_journal_on_image() {
        return Err(damaged("amberlog found no journal on the data disk".to_owned()));
    }
    // What was measured is not what the mode's name says.
    let placement = Some(&disk["placement_reason"]).filter(|_| disk["placement"] != "storage");
    let said = [Some(&disk["fault"]), placement, Some(&disk["durability"]["reason"])];
    if let Some(reason) = said.into_iter().flatten().filter_map(Value::as_str).find(|reason| !is_idle(disk, reason)) {
        return Err(Error::Told(format!("amberlog's report of the disk says: {reason}")));
    }
    let mut fields = flattened(&value);
    for (name, value) in &mut fields {
        if is_sum(name) {
            *value -= before.get(name).copied().unwrap_or(0.0);
        }
    }
    let of = |name: &str| fields.get(name).copied().unwrap_or(0.0);
    // Where the journal is, be it storage, a RAM disk or persistent memory.
    let journal = if mode.nvm_options().is_some() { of("nvm_bytes_to_nvm") } else { of("journal_bytes_to_storage") };
    let bytes = of("journal_bytes_to_storage") + of("home_bytes_to_storage") + of("recovery_bytes_written");
    let tuples = TUPLE_BYTES * of("blocks_retained_max");
    if of("remote_fall_backs") > 0.0 {
        return Err(Error::Told("the journal server was lost in the midst of the run".to_owned()));
    }
    fields.insert("bytes_to_storage".to_owned(), bytes);
    fields.insert("journal_write_bytes".to_owned(), journal);
    fields.insert("tuple_bytes_max".to_owned(), tuples);
    Ok(fields)
}

/// How amberlog's reason begins for a journal that has nothing on its server.
const IDLE: &str = "nothing of the journal is on its server";

/// Whether a reason tells only of a journal that is closed, or that nothing was committed to since the mount: it has nothing on the server that it has
/// reached and never lost.
pub(crate) fn is_idle(disk: &Value, reason: &str) -> bool {
    disk["remote"]["connects"].as_u64().unwrap_or(0) > 0 && reason.starts_with(IDLE)
}

impl Running {
    /// What amberlog has counted of each guest's data disk by now, the guests being idle: preparation.
    fn counters_so_far(&self, mode: Mode) -> Result<Vec<BTreeMap<String, f64>>> {
        self.samples.iter().map(|(path, _)| counted_so_far(path, mode.name())).collect()
    }
}

/// What the first guest's journal held, over the seconds since the common beginning.
fn curves(running: &Running, begun: Instant) -> BTreeMap<String, Vec<(f64, f64)>> {
    let mut curves: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let Some((path, started)) = running.samples.first() else { return curves };
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lead = begun.saturating_duration_since(*started).as_secs_f64();
    for line in text.lines() {
        let Ok(sample) = serde_json::from_str::<Value>(line) else { continue };
        let number = |name: &str| sample[name].as_f64().unwrap_or(0.0);
        let at = number("seconds") - lead;
        if at >= 0.0 {
            curves.entry("tuple_bytes".to_owned()).or_default().push((at, number("blocks_retained") * TUPLE_BYTES));
            curves.entry("pool_bytes".to_owned()).or_default().push((at, number("pool_bytes")));
        }
    }
    curves.retain(|_, points| points.iter().any(|(_, value)| *value > 0.0));
    for points in curves.values_mut() {
        *points = thinned(points);
    }
    curves
}

/// Neighbouring points joined to their highest, so that peaks stay.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let size = points.len().div_ceil(CURVE_POINTS_MAX).max(1);
    let highest = |part: &[(f64, f64)]| part.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    points.chunks(size).filter_map(highest).map(|(at, value)| (rounded(at), value)).collect()
}

fn totals(now: Totals, before: Totals) -> BTreeMap<String, f64> {
    let fields = [
        ("reads", now.reads - before.reads),
        ("read_bytes", now.read_bytes - before.read_bytes),
        ("writes", now.writes - before.writes),
        ("write_bytes", now.write_bytes - before.write_bytes),
        ("flushes", now.flushes - before.flushes),
        ("transfers", now.transfers - before.transfers),
        ("positioning_ms", (now.positioning_ns - before.positioning_ns) / 1_000_000),
        ("flushing_ms", (now.flushing_ns - before.flushing_ns) / 1_000_000),
        ("busy_ms", (now.busy_ns - before.busy_ns) / 1_000_000),
        ("queue_max", now.queue_max),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value as f64)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_peaks() {
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|at| (f64::from(at), 1.0)).collect();
        points[7777].1 = 99.0;
        let thin = thinned(&points);
        assert!(thin.len() <= CURVE_POINTS_MAX && thin.contains(&(7777.0, 99.0)), "{}", thin.len());
        assert_eq!(thinned(&points[..3]).len(), 3);
        assert!(thinned(&[]).is_empty());
    }
}
