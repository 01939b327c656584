//! Where a journal can live, held against what else there is: the same guest, the same medium, the same bytes of fast memory; each contender
//! under each load, and killed in three ways, so that what it promises stands beside what it costs. One command, resumable.
//!
//! The medium is a file whose flushes take as long as a drive's ([`test_storage`]), which counts what reaches it and forgets what was
//! not flushed when the host's power is lost.
//!
//! It must never compare what ran on different processors: what needs another kernel of the guest is emulated, says so, and has references beside it.
//!
//! Failure story: a cell that fails is kept with its reason and tried again by the next run; the others go on.

mod contender;
mod guest;
mod kinds;
mod page;
mod survival;

use crate::error::{Error, FileContext, Result};
use crate::results::{self, Source};
use contender::Contender;
pub use kinds::{Death, Load};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use test_storage::TestStorage;

/// What a shoot-out is asked for.
#[derive(Clone, Debug)]
pub struct ShootOut {
    /// Where results go.
    pub out: PathBuf,
    /// Where images are made.
    pub images: Option<PathBuf>,
    /// Small and short, for CI.
    pub quick: bool,
    /// How often each cell is measured.
    pub iterations: u32,
    /// Names of contenders; all, if there is none.
    pub contenders: Vec<String>,
    /// Names of loads; all, if there is none.
    pub loads: Vec<String>,
    /// Whether each contender is killed, too.
    pub has_deaths: bool,
    /// What a flush of the medium takes, in µs.
    pub flush_us: u64,
    /// Whether cells that another program or machine measured are used again.
    pub takes_any_source: bool,
}

/// What makes two cells comparable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Small and short.
    pub quick: bool,
    /// What a flush of the medium takes, in µs.
    pub flush_us: u64,
    /// Accelerator and kernel of the guest.
    pub platform: String,
    /// Whether everything that was there before the load was home when it began, and is in no counter; cells of earlier versions have what a
    /// journal still owed of it in both.
    #[serde(default)]
    pub begins_clean: bool,
}

/// One cell: a load measured, or a death survived.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Who.
    pub contender: String,
    /// Under which load, or how it was killed.
    pub what: String,
    /// Which measurement.
    pub iteration: u32,
    /// Under which conditions.
    pub conditions: Conditions,
    /// What was measured.
    pub fields: BTreeMap<String, f64>,
    /// Operations' latencies, in µs: per cent of them, and what they do not exceed.
    pub distribution: Vec<(f64, f64)>,
    /// What was found, in words.
    pub words: String,
    /// Of the code.
    pub commit: String,
    /// Its machine's processor; cells of earlier versions do not say.
    #[serde(default)]
    pub machine: String,
    /// Why there is no result.
    pub failure: Option<String>,
}

/// Runs what has no result yet, and makes the page; gives how many cells failed.
///
/// # Errors
/// When there is no FUSE here, a name is unknown, or results cannot be kept.
pub fn run(options: &ShootOut) -> Result<usize> {
    TestStorage::probe().map_err(|error| Error::Told(format!("a shoot-out needs a medium that forgets: {error}")))?;
    let (contenders, absent) = contender::chosen(&options.contenders)?;
    let loads = kinds::chosen(&options.loads)?;
    let raw = options.out.join("raw");
    std::fs::create_dir_all(&raw).at("make", &raw)?;
    for reason in &absent {
        eprintln!("left out: {reason}");
    }
    let here = Source::here();
    let mut cells = Vec::new();
    for iteration in 0..options.iterations.max(1) {
        for contender in &contenders {
            for load in &loads {
                cells.push(kept_or(options, &raw, contender, load.name(), iteration, &here, |conditions| {
                    guest::measure(options, contender, *load, conditions)
                })?);
            }
            // A death is judged, not timed: once is enough, and every one is looked at in each run.
            for death in Death::ALL.into_iter().filter(|_| iteration == 0 && options.has_deaths) {
                cells.push(kept_or(options, &raw, contender, death.name(), iteration, &here, |conditions| {
                    survival::kill(options, contender, death, conditions)
                })?);
            }
        }
    }
    let path = options.out.join("index.html");
    std::fs::write(&path, page::page(&cells, &absent)).at("write", &path)?;
    print!("{}", page::table(&cells));
    println!("{}", path.display());
    Ok(cells.iter().filter(|cell| cell.failure.is_some()).count())
}

fn kept_or(
    options: &ShootOut,
    raw: &Path,
    contender: &Contender,
    what: &str,
    iteration: u32,
    here: &Source,
    measure: impl FnOnce(&Conditions) -> Result<Measured>,
) -> Result<Cell> {
    let path = raw.join(format!("{}-{what}-{iteration}.json", contender.name));
    let conditions = Conditions {
        quick: options.quick,
        flush_us: options.flush_us,
        platform: contender.platform.describe(),
        begins_clean: true,
    };
    let is_ours =
        |kept: &Cell| options.takes_any_source || (&kept.commit, &kept.machine) == (&here.commit, &here.machine);
    if let Some(kept) = results::read::<Cell>(&path)?
        && kept.conditions == conditions
        && kept.failure.is_none()
        && is_ours(&kept)
    {
        return Ok(kept);
    }
    if guest_kit::interrupt::is_requested() {
        return Err(Error::Interrupted);
    }
    eprintln!("{}, {what}, {}", contender.name, iteration + 1);
    let mut cell = Cell {
        contender: contender.name.clone(),
        what: what.to_owned(),
        iteration,
        conditions: conditions.clone(),
        fields: BTreeMap::new(),
        distribution: Vec::new(),
        words: String::new(),
        commit: here.commit.clone(),
        machine: here.machine.clone(),
        failure: None,
    };
    match measure(&conditions) {
        Ok(measured) => {
            (cell.fields, cell.distribution, cell.words) = (measured.fields, measured.distribution, measured.words)
        }
        Err(_) if guest_kit::interrupt::is_requested() => return Err(Error::Interrupted),
        Err(error) => {
            let words = error.to_string();
            eprintln!("    FAILED: {}", crate::rig::first_line(&words));
            cell.failure = Some(words.lines().take(12).collect::<Vec<_>>().join("\n"));
        }
    }
    results::write(&path, &cell)?;
    Ok(cell)
}

/// What a cell came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    fields: BTreeMap<String, f64>,
    distribution: Vec<(f64, f64)>,
    words: String,
}
