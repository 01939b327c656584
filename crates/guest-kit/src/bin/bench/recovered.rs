//! What a guest's other disks see while a journal of one is recovered under it (`beside.rs` says which they are, and how they are timed).
//!
//! A guest goes on and one of its disks begins anew: its driver lets it go and takes it back. What its journal owes goes home then, before
//! the first request of the new start is answered. Where a guest is reset or dies nobody is there to wait, another VM has an area, locks
//! and a process of its own, and a worker that follows a dead one brings nothing home (stage `pause` has that one).
//!
//! The journal is open as its disk goes, since its file system was ended where it was (the ioctl for that writes nothing), and owes some tens
//! of MiB. In turns with that the same disk begins anew after it was unmounted, with nothing to be recovered. The guest's driver and QEMU
//! have the same to do then, so what the one takes beyond the other is the recovery's.

use crate::Outcome;
use crate::beside::{HELD, PLAIN, Rig, spread};
use crate::figure::{Figure, median};
use crate::machine::Machine;
use crate::options::Options;
use serde_json::{Value, json};
use std::path::Path;

const RECOVERY: &str = "recovery";
const RESTART: &str = "restart";
/// What a worker says of a journal that it has recovered.
const SAID: &str = "disk disk0: recovered the file system at byte 0: ";

/// Has a guest's journal recovered again and again, and says how long requests to its other disks took.
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let rounds = if options.quick { 3 } else { 30 };
    let mut rig = Rig::start("recovered", options, machine, directory)?;
    let streams = [HELD, PLAIN];
    let (mut restarts_ms, mut took_ms) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        rig.does("let_go")?;
        restarts_ms.push(rig.window(RESTART, &streams, |rig| rig.does("take_back"))?);
        rig.does("up && fill")?;
        rig.quiet(&streams)?;
        rig.does("give_up")?;
        took_ms.push(rig.window(RECOVERY, &streams, |rig| rig.does("take_back"))?);
    }
    let said = rig.said(SAID)?;
    let recovered: Vec<Recovered> = said.iter().filter_map(|line| Recovered::told(line)).collect();
    if recovered.len() != rounds {
        let all = rig.said("")?;
        return Err(format!(
            "of {rounds} recoveries the worker tells of {}: {said:?}, of all that it says: {all:#?}",
            recovered.len()
        ));
    }
    // Of a journal whose blocks its guest has written home before there is nothing to be measured.
    if recovered.iter().any(|one| one.mib() < f64::from(rig.owed_mib) / 2.0) {
        return Err(format!("a journal that was to owe {} MiB did not: {said:?}", rig.owed_mib));
    }
    let mib: Vec<f64> = recovered.iter().map(Recovered::mib).collect();
    let own_ms: Vec<f64> = recovered.iter().map(|one| one.seconds * 1e3).collect();
    println!(
        "\n{rounds} journals recovered, each with {:.0} MiB (median): {}; until the guest had its disk again {}, \
         and with nothing to be recovered {}",
        median(&mib),
        spread(&own_ms),
        spread(&took_ms),
        spread(&restarts_ms)
    );
    let figures = rig.tell(RECOVERY, "a recovery", &streams, machine);
    rig.tell(RESTART, "the disk begins anew with nothing to be recovered", &streams, machine);
    let mut detail = rig.detail();
    detail["recovered_mib"] = json!(mib);
    detail["recoveries_ms"] = json!(own_ms);
    detail["until_the_disk_is_back_ms"] = json!(took_ms);
    detail["until_the_disk_is_back_with_nothing_to_be_recovered_ms"] = json!(restarts_ms);
    rig.end()?;
    Ok((figures, detail))
}

/// A recovery, as its worker tells of it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Recovered {
    blocks: u64,
    seconds: f64,
}

impl Recovered {
    /// What comes behind [`SAID`]: `3 transactions, 12 blocks written home in 0.041 s`.
    fn told(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once(" transactions, ")?;
        let (blocks, rest) = rest.split_once(" blocks written home in ")?;
        let seconds = rest.split_whitespace().next()?;
        Some(Self { blocks: blocks.parse().ok()?, seconds: seconds.parse().ok()? })
    }

    /// Its blocks have 4 KB.
    fn mib(&self) -> f64 {
        self.blocks as f64 / 256.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_says_of_a_recovery_is_understood() {
        let told = Recovered::told("3 transactions, 12288 blocks written home in 0.250 s");
        assert_eq!(told, Some(Recovered { blocks: 12_288, seconds: 0.25 }));
        assert!(told.is_some_and(|told| (told.mib() - 48.0).abs() < 1e-9));
        assert_eq!(Recovered::told("the journal is left to the guest's own kernel"), None);
    }
}
