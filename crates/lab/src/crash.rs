//! Guests that die in the middle: what their recovery takes, and what became of their records.

use crate::cell::{Cell, Mode};
use crate::error::{Error, Result};
use crate::results::{CellResult, Parameters};
use crate::rig::{BLOCK_BYTES, Rig, Running, guest_seed, sizes, time_limit, workload_of};
use disk_model::{Kind, Model, Profile, Request};
use guest_kit::image::{FileSystem, copy_image};
use guest_kit::{judge, program};
use guest_tools::updates;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// The size of the file of records, in MiB (not scaled: what counts is what is written until the crash).
const RECORDS_MIB: u64 = 32;
/// What a guest has sent to its disk when it crashes, as in the paper, in KiB.
const CRASH_KIB: u64 = 4096;
/// Blocks that one transfer of a recovery carries at most.
const RUN_BLOCKS_MAX: u64 = 256;

impl Rig {
    /// Kills amberlog and its VMM with `kill -9` when a workload has run for half of its time, and recovers. Time is that
    /// of the modelled disk for the blocks that recovery read and wrote, worked out without a clock.
    ///
    /// # Errors
    /// When a guest fails, or recovery does.
    pub fn recovery(&mut self, cell: &Cell, parameters: &Parameters) -> Result<CellResult> {
        let whole = self.load(cell, parameters, None)?;
        if whole.failure.is_some() {
            return Ok(whole);
        }
        let half = whole.mean("seconds_unsynced").unwrap_or(0.0) / 2.0;
        let started = Instant::now();
        let workload = workload_of(cell)?;
        let mut running = self.start(cell, parameters, None, |number| {
            format!(
                "{}\n{} >/tmp/result\nwhile :; do sleep 1; done",
                Self::preamble(cell, workload, parameters, number),
                workload.load(sizes(parameters, cell, number))
            )
        })?;
        running.guests.iter().try_for_each(|guest| guest.tell("go"))?;
        std::thread::sleep(std::time::Duration::from_secs_f64(half));
        for guest in &mut running.guests {
            guest.kill_all()?;
        }
        let mut result = CellResult { guests: Vec::new(), model: BTreeMap::new(), ..whole };
        for index in 0..running.guests.len() {
            result.guests.push(recovered(cell, &running, index)?);
        }
        result.wall_seconds += started.elapsed().as_secs_f64();
        Ok(result)
    }

    /// Crashes the guest's kernel in the midst of record updates, recovers, and looks at every record.
    ///
    /// # Errors
    /// When the guest does not crash, or recovery or e2fsck fails.
    pub fn integrity(&mut self, cell: &Cell, parameters: &Parameters) -> Result<CellResult> {
        let started = Instant::now();
        let workload = workload_of(cell)?;
        let record_kib = cell.group.parameter.max(1);
        let seed = guest_seed(parameters, cell, 0);
        let words = format!("--file /mnt/records --record-kib {record_kib} --file-mib {RECORDS_MIB} --seed {seed}");
        let mut running = self.start(cell, parameters, None, |number| {
            format!(
                "mount -t ext4 -o {} /dev/vda /mnt || fail mount
                 guest-tools updates {words} --phase create
                 umount /mnt
                 {}
                 echo 1048576 >/proc/sys/vm/dirty_background_bytes
                 guest-tools updates {words} --phase run --crash-kib {CRASH_KIB}
                 fail 'the crash did not come'",
                cell.group.mode.mount_options(),
                Self::preamble(cell, workload, parameters, number),
            )
        })?;
        running.guests.iter().try_for_each(|guest| guest.tell("go"))?;
        let limit = time_limit(workload, cell, parameters);
        let mut result = CellResult {
            cell: cell.clone(),
            parameters: parameters.clone(),
            guests: Vec::new(),
            model: BTreeMap::new(),
            wall_seconds: 0.0,
            load: crate::machine::load(),
            failure: None,
        };
        let guest = &mut running.guests[0];
        if let Err(error) = guest.wait_end(limit) {
            let console = self.keep_console(&running.guests[0], cell, 0);
            result.failure = Some(format!("{}{console}", crate::rig::first_line(&error.to_string())));
            return Ok(result);
        }
        if guest.final_report().exit_code.is_some() {
            let console = self.keep_console(&running.guests[0], cell, 0);
            result.failure = Some(format!("the guest ended without a crash{console}"));
            return Ok(result);
        }
        let mut fields = crate::rig::counters(cell.group.mode, &running.reports[0])?;
        let image = &running.images[0];
        if cell.group.mode != Mode::Vma {
            fields.extend(recover_disk(image)?);
        }
        let file_system = FileSystem::whole(image);
        let verdict = judge::check(&file_system)?;
        if !verdict.problems.is_empty() || verdict.needs_recovery {
            result.failure = Some(format!("e2fsck found: {}", verdict.problems.join("; ")));
            return Ok(result);
        }
        let content = judge::read_file(&file_system, "/records")?
            .ok_or_else(|| Error::Told("the file of records is gone".to_owned()))?;
        let layout = updates::layout(record_kib, RECORDS_MIB, seed);
        let updates::Verdict { records, corrupted, cut_by_commit } = updates::judge(&layout, &content);
        #[allow(clippy::cast_precision_loss)]
        fields.extend([
            ("corrupted_records".to_owned(), corrupted as f64),
            ("records".to_owned(), records as f64),
            ("corrupted_runs".to_owned(), f64::from(u8::from(corrupted > 0))),
            ("corrupted_runs_not_by_commit".to_owned(), f64::from(u8::from(corrupted > cut_by_commit))),
        ]);
        result.guests.push(fields);
        result.wall_seconds = started.elapsed().as_secs_f64();
        Ok(result)
    }
}

/// Recovers one dead guest's disk, and works out what the modelled disk would have taken.
#[allow(clippy::cast_precision_loss)]
fn recovered(cell: &Cell, running: &Running, index: usize) -> Result<BTreeMap<String, f64>> {
    let image = &running.images[index];
    let crash = image.with_extension("crash");
    copy_image(image, &crash)?;
    // Only a journal on storage has to be read; one in memory is there.
    let log = if cell.group.mode == Mode::Vma { Vec::new() } else { live_log(image)? };
    let mut fields =
        if cell.group.mode == Mode::Vma { recover_area(&running.areas[index])? } else { recover_disk(image)? };
    let changed = judge::differing_blocks(&crash, image, BLOCK_BYTES)?;
    let _ = std::fs::remove_file(&crash);
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
    let mut written_blocks = 0;
    for range in &changed {
        model.submit(now, request(tag, Kind::Write, range.start, range.end - range.start));
        tag += 1;
        written_blocks += range.end - range.start;
    }
    model.submit(now, Request { tag, kind: Kind::Flush, offset: 0, len: 0 });
    now = model.drain(&mut completed);
    let written = fields.get("recovery_bytes_written").copied().unwrap_or(0.0);
    fields.insert("recovery_bytes".to_owned(), written + (read_blocks * BLOCK_BYTES) as f64);
    fields.insert("recovery_read_bytes".to_owned(), (read_blocks * BLOCK_BYTES) as f64);
    fields.insert("recovery_changed_bytes".to_owned(), (written_blocks * BLOCK_BYTES) as f64);
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

fn recover_disk(image: &Path) -> Result<BTreeMap<String, f64>> {
    amberlog_json(&["recover".as_ref(), "--json".as_ref(), "--disk".as_ref(), image.as_os_str()])
        .map(|value| recovery_fields(&value))
}

fn recover_area(area: &Path) -> Result<BTreeMap<String, f64>> {
    amberlog_json(&["recover".as_ref(), "--json".as_ref(), "--area".as_ref(), area.as_os_str()])
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
