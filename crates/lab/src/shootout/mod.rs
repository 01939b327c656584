//! Where a journal can live, held against what else there is: the same guest, the same medium, the same bytes of fast memory; each contender
//! under each load, and killed in three ways, so that what it promises stands beside what it costs. One command, resumable.
//!
//! The medium is a file whose flushes take as long as a drive's ([`test_storage`]), which counts what reaches it and forgets what was
//! not flushed when the host's power is lost.
//!
//! It must never compare what ran on different processors: what needs another kernel of the guest is emulated, says so, and has references beside it.
//!
//! Failure story: a cell that fails is kept with its reason and tried again by the next run, which sets the failed attempt aside and counts it; the
//! others go on. What was measured otherwise is not written over: the run is refused ([`kept`]).

mod contender;
mod goals;
mod guest;
mod kept;
mod kinds;
mod page;
mod survival;

use crate::error::{Error, FileContext, Result};
use crate::machine::place;
use crate::measured::Source;
use crate::results;
use contender::Contender;
use guest_kit::{Programs, scratch};
use kinds::Rounds;
pub use kinds::{Death, Load};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
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
    /// How often each load is run on end, all within one measurement: "20" of all, "sqlite=4" of one; once, if there is none.
    pub rounds: Vec<String>,
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
    /// The directory of the images and its file system; cells of earlier versions do not say.
    #[serde(default)]
    pub images: String,
    /// How often the load was run on end; once in cells of earlier versions.
    #[serde(default = "once")]
    pub rounds: u32,
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
    /// The programs that it was measured with ([`Programs`]); cells of earlier versions do not say.
    #[serde(default)]
    pub programs: String,
    /// All that is known of its machine and its programs, and the load averages before it; cells of earlier versions do not say.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// When it ended, in seconds since 1970; cells of earlier versions do not say.
    #[serde(default)]
    pub ended: u64,
    /// Why there is no result.
    pub failure: Option<String>,
    /// How often it was tried so far; those that failed are in `failed` beside the raw results. Cells of earlier versions do not say.
    #[serde(default = "once")]
    pub attempts: u32,
}

fn once() -> u32 {
    1
}

impl Cell {
    /// What measured it.
    fn source(&self) -> Source {
        Source { commit: self.commit.clone(), machine: self.machine.clone(), programs: self.programs.clone() }
    }

    /// A field, or what follows from some.
    fn figure(&self, field: &str) -> Option<f64> {
        if field != RATE {
            return self.fields.get(field).copied();
        }
        let counted = self.fields.get(OPERATIONS).copied().or_else(|| {
            // Cells of earlier versions do not say; their loads were as large.
            let load = Load::ALL.into_iter().find(|load| load.name() == self.what)?;
            Some(load.operations(self.conditions.quick, self.conditions.rounds)? as f64)
        });
        let seconds = self.fields.get("seconds").copied().filter(|seconds| *seconds > 0.0);
        counted.zip(seconds).map(|(count, seconds)| count / seconds)
    }

    /// Whether a load was over before three times the age had passed within which its contender's data are durable.
    fn is_short(&self) -> bool {
        let age = contender::durable_within(&self.contender).filter(|age| *age > 0);
        let is_load = Load::ALL.iter().any(|load| load.name() == self.what);
        is_load && age.zip(self.fields.get("seconds")).is_some_and(|(age, seconds)| *seconds < 3.0 * age as f64)
    }
}

/// A field of a cell: 1 if what its contender promises for this death was kept, 0 if not; there is none where nothing is promised.
pub(crate) const PROMISE_KEPT: &str = "promise_kept";
/// A field of a cell: how many operations were timed.
const OPERATIONS: &str = "operations";
/// What follows from it and the load's time.
const RATE: &str = "operations_per_second";

/// Runs what has no result yet, and makes the page, of what there is also when it ends early; gives how many cells failed.
///
/// # Errors
/// When there is no FUSE here, a name is unknown, what is kept was measured otherwise, results cannot be kept, a placement of amberlog broke its promise, or somebody asked for the end.
pub fn run(options: &ShootOut) -> Result<usize> {
    TestStorage::probe().map_err(|error| Error::Told(format!("a shoot-out needs a medium that forgets: {error}")))?;
    let (contenders, mut absent) = contender::chosen(&options.contenders)?;
    let (loads, absent_loads) = kinds::chosen(&options.loads)?;
    absent.extend(absent_loads);
    let rounds = Rounds::parse(&options.rounds)?;
    let images = options.images.clone().unwrap_or_else(std::env::temp_dir);
    scratch::remove_leftovers(&[&images, scratch::memory()]);
    let raw = options.out.join("raw");
    std::fs::create_dir_all(&raw).at("make", &raw)?;
    for reason in &absent {
        eprintln!("left out: {reason}");
    }
    let programs = Programs::here()?;
    let run = Run {
        options,
        raw,
        here: Source::here(Some(&programs)),
        programs,
        environment: crate::machine::describe(),
        images: place(&images),
        rounds,
    };
    run.refuse_others(&contenders, &loads)?;
    let mut cells = Vec::new();
    let outcome = run.cells(&contenders, &loads, &mut cells);
    let shown = page::Shown { cells: &cells, set_aside: &kept::failed(&options.out)?, absent: &absent };
    let table = shown.table();
    for (name, text) in [("index.html", shown.page()), ("table.md", table.clone())] {
        let path = options.out.join(name);
        std::fs::write(&path, text).at("write", &path)?;
    }
    print!("{table}");
    println!("{}", options.out.join("index.html").display());
    outcome?;
    if guest_kit::interrupt::is_requested() {
        return Err(Error::Interrupted);
    }
    let broken: Vec<String> = cells
        .iter()
        .filter(|cell| cell.failure.is_none() && cell.fields.get(PROMISE_KEPT) == Some(&0.0))
        .filter(|cell| contenders.iter().any(|one| one.name == cell.contender && one.served.is_placement()))
        .map(|cell| format!("{}, {}: {}", cell.contender, cell.what, cell.words))
        .collect();
    if !broken.is_empty() {
        return Err(Error::Told(format!("amberlog did not keep what it promises ({})", broken.join("); ("))));
    }
    Ok(cells.iter().filter(|cell| cell.failure.is_some()).count())
}

/// What all cells of a run have in common.
struct Run<'a> {
    options: &'a ShootOut,
    raw: PathBuf,
    here: Source,
    programs: Programs,
    environment: BTreeMap<String, String>,
    images: String,
    rounds: Rounds,
}

impl Run<'_> {
    /// All cells, those that are kept and those that have to be measured; once somebody has asked for the end, those that are kept alone.
    fn cells(&self, contenders: &[Contender], loads: &[Load], cells: &mut Vec<Cell>) -> Result<()> {
        let options = self.options;
        for iteration in 0..options.iterations.max(1) {
            // What drifts with the hour must not always meet the same one.
            let (before, from) = contenders.split_at(iteration as usize % contenders.len().max(1));
            for contender in from.iter().chain(before) {
                for load in loads {
                    let measure = || guest::measure(options, contender, *load, self.rounds.of(*load));
                    cells.extend(self.kept_or(contender, load.name(), iteration, measure)?);
                }
                for death in self.deaths(contender, iteration) {
                    cells.extend(
                        self.kept_or(contender, death.name(), iteration, || survival::kill(options, contender, death))?,
                    );
                }
            }
        }
        Ok(())
    }

    /// A death is judged, not timed: once is enough, and every one is looked at in each run.
    fn deaths(&self, contender: &Contender, iteration: u32) -> impl Iterator<Item = Death> + use<> {
        let is_killed = iteration == 0 && self.options.has_deaths && contender.served.is_on_medium();
        Death::ALL.into_iter().filter(move |_| is_killed)
    }

    /// An error where a cell that this run comes to is kept, and was measured otherwise.
    fn refuse_others(&self, contenders: &[Contender], loads: &[Load]) -> Result<()> {
        let mut others = kept::Others::default();
        for iteration in 0..self.options.iterations.max(1) {
            for contender in contenders {
                let names = loads.iter().map(|load| load.name());
                for what in names.chain(self.deaths(contender, iteration).map(Death::name)) {
                    let name = file_name(contender, what, iteration);
                    let here = self.conditions(contender, what);
                    if let Some(kept) = results::read::<Cell>(&self.raw.join(&name))? {
                        others.look_at(&name, &kept, &here, &self.here, self.options.takes_any_source);
                    }
                }
            }
        }
        others.refuse(&self.raw)
    }

    fn conditions(&self, contender: &Contender, what: &str) -> Conditions {
        let load = Load::ALL.into_iter().find(|load| load.name() == what);
        Conditions {
            quick: self.options.quick,
            flush_us: self.options.flush_us,
            platform: contender.platform.describe(),
            begins_clean: true,
            images: self.images.clone(),
            rounds: load.map_or(1, |load| self.rounds.of(load)),
        }
    }

    fn kept_or(
        &self,
        contender: &Contender,
        what: &str,
        iteration: u32,
        measure: impl FnOnce() -> Result<Measured>,
    ) -> Result<Option<Cell>> {
        let path = self.raw.join(file_name(contender, what, iteration));
        let (conditions, here) = (self.conditions(contender, what), &self.here);
        // What has figures is of these conditions and this source, or it would have been refused.
        let kept = results::read::<Cell>(&path)?;
        if kept.as_ref().is_some_and(|kept| kept.failure.is_none()) || guest_kit::interrupt::is_requested() {
            return Ok(kept);
        }
        eprintln!("{}, {what}, {}", contender.name, iteration + 1);
        let mut environment = self.environment.clone();
        environment.insert("load".to_owned(), crate::machine::load());
        self.programs.refuse_changed()?;
        let outcome = measure();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let mut cell = Cell {
            contender: contender.name.clone(),
            what: what.to_owned(),
            iteration,
            conditions,
            fields: BTreeMap::new(),
            distribution: Vec::new(),
            words: String::new(),
            commit: here.commit.clone(),
            machine: here.machine.clone(),
            programs: here.programs.clone(),
            environment,
            ended: now.map_or(0, |now| now.as_secs()),
            failure: None,
            attempts: 1,
        };
        match outcome {
            Ok(measured) => {
                (cell.fields, cell.distribution, cell.words) = (measured.fields, measured.distribution, measured.words)
            }
            Err(_) if guest_kit::interrupt::is_requested() => return Ok(kept),
            Err(error) => {
                let words = error.to_string();
                eprintln!("    FAILED: {}", crate::rig::first_line(&words));
                cell.failure = Some(words.lines().take(12).collect::<Vec<_>>().join("\n"));
            }
        }
        cell.attempts += kept::set_aside(&self.options.out, &path)?;
        results::write(&path, &cell)?;
        Ok(Some(cell))
    }
}

fn file_name(contender: &Contender, what: &str, iteration: u32) -> String {
    format!("{}-{what}-{iteration}.json", contender.name)
}

/// What a cell came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    fields: BTreeMap<String, f64>,
    distribution: Vec<(f64, f64)>,
    words: String,
}

/// A quick cell without figures.
#[cfg(test)]
pub(crate) fn cell_for_tests(contender: &str, what: &str, failure: Option<&str>) -> Cell {
    Cell {
        contender: contender.to_owned(),
        what: what.to_owned(),
        iteration: 0,
        conditions: Conditions {
            quick: true,
            flush_us: 2000,
            platform: "tcg".to_owned(),
            begins_clean: true,
            images: "/dev/shm (tmpfs)".to_owned(),
            rounds: 1,
        },
        fields: BTreeMap::new(),
        distribution: Vec::new(),
        words: String::new(),
        commit: "a".to_owned(),
        machine: "2 × a processor".to_owned(),
        programs: "0123".to_owned(),
        environment: BTreeMap::from([("qemu".to_owned(), "QEMU 7.2".to_owned())]),
        ended: 1_795_876_200,
        failure: failure.map(str::to_owned),
        attempts: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_place_is_named_with_its_file_system() {
        assert_eq!(place(Path::new("/proc/self/..")), "/proc (proc)");
        assert!(place(Path::new("/nowhere/at/all")).starts_with("/nowhere/at/all ("));
    }
}
