//! The 2010 paper's figures: traces recorded from real guests, eight at once or eight copies of one, laid on one SSD as its virtual disks, replayed
//! under each flash translation layer by `amberlog ssd`. A replay strays nowhere; guests do, so that each iteration of a cell is of another
//! recording. See `docs/ssd.md` for the traces and the simulator.

use crate::cell::Cell;
use crate::error::{Error, Result};
use crate::measured::Parameters;
use guest_kit::program;
use guest_kit::scratch::{Scratch, Use};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// What one request carried in the paper's guests: eleven pages, Xen 2's first block driver.
const SPLIT_BYTES: &str = "45056";
/// Seconds between the guests' beginnings.
const STAGGER_SECONDS: &str = "3";
/// Of guests that were recorded at once.
const RECORDED_AT_ONCE: &str = "0";
/// Every virtual disk's share of the SSD.
const STRIDE: &str = "stride:4294967296";

/// The flash translation layers that a cell's disk may name.
pub const LAYERS: [&str; 4] = ["fast", "superblock", "dftl", "page"];

/// Replays a cell's trace; the cell's disk is the translation layer.
///
/// # Errors
/// When there is no such trace, or amberlog refuses it.
pub fn replay(cell: &Cell, _parameters: &Parameters) -> Result<BTreeMap<String, f64>> {
    let group = &cell.group;
    let (traces, stagger) = recorded(cell)?;
    let directory = Scratch::new_in(&std::env::temp_dir(), Use::Lab)?;
    let merged = directory.path().join("merged.amber");
    let amberlog = program::workspace_binary("amberlog")?;
    let mut command = Command::new(&amberlog);
    command.args(["trace", "convert", "--merge", "--onto-one-disk", STRIDE, "--stagger", stagger]);
    command.args(["--split", SPLIT_BYTES, "-o"]).arg(&merged);
    program::run(command.args(traces), &[0])?;

    let mut command = Command::new(&amberlog);
    command.args(["ssd", "--compare", "--json", "--precondition", "sequential", "--ftl", &group.disk]);
    if group.mode.is_retained() {
        // What was retained never reached the device, however it was recorded.
        command.args(["--without-journal", "vma"]);
    }
    command.arg("--trace").arg(format!("{}/{}={}", group.workload, group.mode, merged.display()));
    let output = program::run(&mut command, &[0])?;
    let value: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::Told(format!("amberlog ssd printed no JSON ({error})")))?;
    let run = &value["runs"][0];
    let mut fields = BTreeMap::new();
    for (name, value) in [
        ("requests", &run["requests"]),
        ("erases", &run["erases"]),
        ("gc_time_us", &run["gc"]["time_us"]),
        ("flash_writes", &run["flash_writes"]),
        ("bytes_to_storage", &run["traffic"]["bytes_written"]),
    ] {
        let number = value.as_f64().ok_or_else(|| Error::Told(format!("amberlog ssd tells no '{name}'")))?;
        fields.insert(name.to_owned(), number);
    }
    Ok(fields)
}

/// Where a machine's own recordings are, in directories `0`, `1` and so on.
fn own_recordings() -> PathBuf {
    program::workspace().join("build/guest/traces")
}

/// How many recordings of the loads there are: those made on this machine, or the one that comes with the checkout.
pub fn recordings() -> u32 {
    let own = own_recordings();
    (0..).take_while(|number: &u32| own.join(number.to_string()).is_dir()).last().map_or(1, |last| last + 1)
}

/// The traces of a cell's guests, and the seconds between their beginnings: of one of the recordings that were made on this machine
/// (`record-traces --recordings N --out build/guest/traces`, with `--guests N` of as many guests at once), or copies of the one that comes with the
/// checkout, where there are no others.
fn recorded(cell: &Cell) -> Result<(Vec<PathBuf>, &'static str)> {
    let group = &cell.group;
    let own = own_recordings().join(cell.iteration.to_string());
    let name = format!("{}-{}", group.workload, group.mode);
    let at_once: Vec<PathBuf> = (0..group.guests).map(|guest| own.join(format!("{name}-{guest}.amber"))).collect();
    if at_once.iter().all(|path| path.is_file()) {
        return Ok((at_once, RECORDED_AT_ONCE));
    }
    let (traces, origin) = if own.is_dir() || cell.iteration > 0 {
        (own, "it is of a recording that is not whole: let record-traces go on with it")
    } else {
        (program::workspace().join("crates/ssd-sim/traces/2010"), "it comes with the checkout")
    };
    let trace = traces.join(format!("{name}.amber"));
    if !trace.is_file() {
        return Err(Error::Told(format!("{} is not there; {origin}", trace.display())));
    }
    Ok(((0..group.guests).map(|_| trace.clone()).collect(), STAGGER_SECONDS))
}
