//! Guests that die in the middle: what their recovery takes.

use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::measured::{CellResult, Parameters};
use crate::rig::{BLOCK_BYTES, Plan, Rig, Running, sizes, workload_of};
use disk_model::{Kind, Model, Profile, Request};
use guest_kit::{interrupt, program};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use test_storage::{Asked, TestStorage};

const POLL: Duration = Duration::from_millis(20);
/// Blocks that one transfer of a recovery carries at most.
const RUN_BLOCKS_MAX: u64 = 256;

impl Rig {
    /// Kills amberlog and its VMM with `kill -9` when a workload has run for half of its time, and recovers. Time is that
    /// of the modelled disk for the blocks that recovery read and wrote, worked out without a clock.
    ///
    /// # Errors
    /// When a guest fails, or recovery does.
    pub fn recovery(&mut self, cell: &Cell, parameters: &Parameters) -> Result<CellResult> {
        let started = Instant::now();
        // How long a whole run takes is measured once, also where a run goes on another day.
        let half = match self.halves.get(&cell.group) {
            Some(half) => *half,
            None => {
                let whole = self.load(cell, parameters, None)?;
                let half = match whole.mean("seconds_unsynced") {
                    Some(seconds) if whole.failure.is_none() => seconds / 2.0,
                    _ => return Ok(whole),
                };
                self.halves.insert(cell.group.clone(), half);
                half
            }
        };
        let workload = workload_of(cell)?;
        let plan = Plan::new(cell, parameters, None);
        let mut running = self.start(&plan, |number| {
            format!(
                "{}\n{} >/tmp/result\nwhile :; do sleep 1; done",
                plan.preamble(workload, number),
                workload.load(sizes(parameters, cell, number))
            )
        })?;
        running.go()?;
        let begun = Instant::now();
        while begun.elapsed().as_secs_f64() < half && !interrupt::is_requested() {
            std::thread::sleep(POLL);
        }
        for guest in &mut running.guests {
            guest.kill_all()?;
        }
        let mut result = CellResult { half_seconds: Some(half), ..CellResult::empty(cell, parameters) };
        for index in 0..running.guests.len() {
            result.guests.push(recovered(cell, &running, index)?);
        }
        result.phases = std::mem::take(&mut running.phases);
        result.wall_seconds = started.elapsed().as_secs_f64();
        result.load = crate::machine::load();
        Ok(result)
    }
}

/// Recovers one dead guest's disk, and works out what the modelled disk would have taken.
fn recovered(cell: &Cell, running: &Running, index: usize) -> Result<BTreeMap<String, f64>> {
    let image = &running.images[index];
    // Only a journal on storage has to be read; one in memory is there.
    let log = if cell.group.mode.is_retained() { Vec::new() } else { live_log(image)? };
    // What differs afterwards is less than what was written: much of it had come home before.
    let storage = TestStorage::new(image).map_err(|error| {
        Error::Told(format!("what a recovery writes cannot be seen: {error}; run it as root, with /dev/fuse"))
    })?;
    storage.note_requests();
    let seen = storage.image();
    let mut fields =
        if cell.group.mode.is_retained() { recover_area(&running.areas[index], &seen)? } else { recover_disk(&seen)? };
    let asked = storage.requests();
    drop(storage);
    let profile: Profile = cell.group.disk.parse().map_err(Error::Told)?;
    let mut model = Model::new(profile, 1);
    let mut completed = Vec::new();
    let (mut now, mut tag, mut read_blocks) = (0, 0, 0);
    for (start, count) in log {
        // The log is read in order, each piece before the next.
        for offset in (0..count).step_by(usize::try_from(RUN_BLOCKS_MAX).unwrap_or(256)) {
            let blocks = (count - offset).min(RUN_BLOCKS_MAX);
            model.submit(now, request(tag, Kind::Read, start + offset, blocks));
            now = model.drain(&mut completed);
            tag += 1;
            read_blocks += blocks;
        }
    }
    for asked in asked {
        let (kind, offset, len) = match asked {
            Asked::Write { offset, bytes } => (Kind::Write, offset, bytes),
            Asked::Flush => (Kind::Flush, 0, 0),
        };
        model.submit(now, Request { tag, kind, offset, len });
        tag += 1;
        if kind == Kind::Flush {
            // Whoever flushes waits for it.
            now = model.drain(&mut completed);
        }
    }
    model.submit(now, Request { tag, kind: Kind::Flush, offset: 0, len: 0 });
    now = model.drain(&mut completed);
    let written = fields.get("recovery_bytes_written").copied().unwrap_or(0.0);
    fields.insert("recovery_bytes".to_owned(), written + (read_blocks * BLOCK_BYTES) as f64);
    fields.insert("recovery_read_bytes".to_owned(), (read_blocks * BLOCK_BYTES) as f64);
    fields.insert("recovery_model_seconds".to_owned(), now as f64 / 1e9);
    Ok(fields)
}

fn request(tag: u64, kind: Kind, block: u64, blocks: u64) -> Request {
    Request { tag, kind, offset: block * BLOCK_BYTES, len: blocks * BLOCK_BYTES }
}

fn amberlog_json(words: &[&std::ffi::OsStr]) -> Result<Value> {
    let mut command = std::process::Command::new(program::workspace_binary("amberlog")?);
    command.args(words).env("AMBERLOG_LOG", "error");
    let output = program::run(&mut command, &[0])?;
    serde_json::from_slice(&output.stdout).map_err(|error| Error::Told(format!("amberlog printed no JSON ({error})")))
}

fn recovery_fields(value: &Value) -> BTreeMap<String, f64> {
    let numbers = value.as_object().into_iter().flatten();
    numbers.filter_map(|(name, value)| Some((format!("recovery_{name}"), value.as_f64()?))).collect()
}

pub(crate) fn recover_disk(image: &Path) -> Result<BTreeMap<String, f64>> {
    amberlog_json(&["recover".as_ref(), "--json".as_ref(), "--disk".as_ref(), image.as_os_str()])
        .map(|value| recovery_fields(&value))
}

/// What is held in `area` goes to `image`, which may be a copy.
pub(crate) fn recover_area(area: &Path, image: &Path) -> Result<BTreeMap<String, f64>> {
    let (area, image) = (area.as_os_str(), image.as_os_str());
    amberlog_json(&["recover".as_ref(), "--json".as_ref(), "--area".as_ref(), area, "--image".as_ref(), image])
        .map(|value| recovery_fields(&value))
}

/// The part of an internal journal that a replay reads, as runs of blocks of the disk: from the log's start to behind its
/// last transaction.
fn live_log(image: &Path) -> Result<Vec<(u64, u64)>> {
    let value = amberlog_json(&["inspect".as_ref(), "--json".as_ref(), "--disk".as_ref(), image.as_os_str()])?;
    let journal = &value["journals"][0];
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let blocks = number(&journal["superblock"]["blocks"]);
    let first = number(&journal["superblock"]["first"]).max(1);
    let start = number(&journal["superblock"]["start"]);
    let end = number(&journal["end"]["position"]);
    let length = if end >= start { end - start } else { end + blocks.saturating_sub(first) - start };
    let extents: Vec<(u64, u64, u64)> = journal["journal"]["extents"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|extent| (number(&extent["log"]), number(&extent["physical"]), number(&extent["count"])))
        .collect();
    let mut runs = Vec::new();
    let (mut at, mut left) = (start, if start == 0 { 0 } else { length });
    while left > 0 {
        if at >= blocks {
            at = first;
        }
        let Some(&(log, physical, count)) = extents.iter().find(|(log, _, count)| (*log..log + count).contains(&at))
        else {
            return Err(Error::Told(format!("amberlog inspect names no place for log block {at}")));
        };
        let run = (log + count - at).min(left).min(blocks - at);
        runs.push((physical + at - log, run));
        at += run;
        left -= run;
    }
    Ok(runs)
}
