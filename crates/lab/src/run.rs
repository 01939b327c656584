//! Runs experiments: cell after cell, each kept as soon as it is measured, so that a run that was interrupted goes on where
//! it was; tells what is done and how long the rest will take.

use crate::binding::{Bound, binding};
use crate::catalogue::{self, Experiment, Extent, Kind};
use crate::cell::Cell;
use crate::error::{Error, FileContext, Result};
use crate::measured::{CellResult, Parameters, Source};
use crate::only::{Guests, Only};
use crate::results::{self, Declared, Results, SCHEMA};
use crate::rig::Rig;
use crate::workload::Workload;
use crate::{flash, machine, sizes};
use guest_kit::{Programs, interrupt, scratch};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often `results.json` is made anew while an experiment runs.
const KEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Of earlier runs, so many iterations and guests are looked for.
const ITERATIONS_LOOKED_FOR: u32 = 10;
const GUESTS_LOOKED_FOR: u32 = 8;

/// What a run is asked for.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Where results go: a directory for each experiment.
    pub out: PathBuf,
    /// Where images are made.
    pub images: Option<PathBuf>,
    /// What a cell's load may take at most; many times what is expected, if it is not said.
    pub limit: Option<Duration>,
    /// How much of each experiment.
    pub extent: Extent,
    /// Shared by all cells.
    pub parameters: Parameters,
    /// Whether results that another program or machine measured are used again.
    pub takes_any_source: bool,
    /// The words that make this run again.
    pub command: String,
}

/// Runs the experiments one after the other; gives how many cells failed.
///
/// # Errors
/// When an experiment needs what is not there yet, or has results that another program or machine measured (both before anything is run),
/// results cannot be kept, or the run was told to end ([`interrupt::request`]).
pub fn run(experiments: &[Experiment], options: &RunOptions) -> Result<usize> {
    for experiment in experiments {
        if experiment.kind == Kind::Missing {
            return Err(Error::NotYet { id: experiment.id.clone(), needs: experiment.needs.clone() });
        }
    }
    let experiments = with_cells(experiments, &options.extent)?;
    let all = catalogue::all()?;
    let has_guests = experiments.iter().any(|experiment| experiment.kind.has_guests());
    let programs = has_guests.then(Programs::here).transpose()?;
    for &experiment in &experiments {
        let here = source_of(experiment, programs.as_ref());
        let source = (!options.takes_any_source).then_some(&here);
        let parameters = experiment.parameters(&options.parameters);
        let directory = options.out.join(&experiment.id);
        refuse_others(experiment, &directory, &parameters, source)?;
        refuse_to_write_over(experiment, &directory, &parameters, &options.extent)?;
    }
    let images = options.images.clone().unwrap_or_else(std::env::temp_dir);
    scratch::remove_leftovers(&[&images, scratch::memory()]);
    let mut progress = Progress::new(&experiments, &options.extent, &options.parameters);
    let mut failed = 0;
    for &experiment in &experiments {
        let here = source_of(experiment, programs.as_ref());
        let source = (!options.takes_any_source).then_some(&here);
        let directory = options.out.join(&experiment.id);
        let raw = directory.join("raw");
        std::fs::create_dir_all(&raw).at("make", &raw)?;
        if let Some(text) = &experiment.own_text {
            let path = directory.join(catalogue::OWN_TEXT);
            std::fs::write(&path, text).at("write", &path)?;
        }
        let mut rig = Rig::new(options.images.as_deref(), directory.join("consoles"), options.limit)?;
        let mut cells: Vec<CellResult> = Vec::new();
        let parameters = experiment.parameters(&options.parameters);
        let mut kept_at: Option<Instant> = None;
        know_earlier(experiment, &options.extent, &raw, &parameters, &mut rig)?;
        for cell in experiment.cells(&options.extent) {
            let path = raw.join(format!("{}.json", cell.file_name()));
            let expected = experiment.cell_seconds(&cell, &options.extent, parameters.scale);
            let mut kept = kept_result(experiment, &path, &parameters)?;
            if kept.is_none() {
                kept = measured_elsewhere(experiment, &cell, &all, &options.out, &parameters, source)?;
                kept.iter().try_for_each(|result| results::write(&path, result))?;
            }
            let result = match kept {
                Some(result) => {
                    progress.skip(expected);
                    result
                }
                None => {
                    if let Err(changed) = programs.iter().try_for_each(Programs::refuse_changed) {
                        keep_what_is_there(experiment, options, &parameters, &directory, cells)?;
                        return Err(changed.into());
                    }
                    progress.begin(&experiment.id, &cell);
                    let begun = Instant::now();
                    let ticks = machine::processor_ticks();
                    let result = measure(experiment, &cell, &mut rig, &parameters);
                    if interrupt::is_requested() {
                        keep_what_is_there(experiment, options, &parameters, &directory, cells)?;
                        return Err(Error::Interrupted);
                    }
                    let mut result = result.unwrap_or_else(|error| failure(&cell, &parameters, &error));
                    result.commit.clone_from(&here.commit);
                    result.machine.clone_from(&here.machine);
                    result.programs.clone_from(&here.programs);
                    result.steal_percent = machine::steal_percent_since(ticks);
                    result.attempts += results::set_aside(&directory, &path)?;
                    results::write(&path, &result)?;
                    progress.end(expected, begun.elapsed().as_secs_f64(), &result);
                    result
                }
            };
            failed += usize::from(result.failure.is_some());
            cells.push(result);
            // All of them are looked at each time: not after every short one.
            if kept_at.is_none_or(|at| at.elapsed() > KEEP_INTERVAL) {
                let all = with_earlier(experiment, &options.extent, &raw, &parameters, cells.clone())?;
                keep(experiment, options, &parameters, &directory, &all)?;
                kept_at = Some(Instant::now());
            }
        }
        let all = with_earlier(experiment, &options.extent, &raw, &parameters, cells)?;
        keep(experiment, options, &parameters, &directory, &all)?;
    }
    Ok(failed)
}

/// Those experiments that have a cell of what is asked for.
///
/// # Errors
/// When none has.
fn with_cells<'a>(experiments: &'a [Experiment], extent: &Extent) -> Result<Vec<&'a Experiment>> {
    let (some, none): (Vec<_>, Vec<_>) = experiments.iter().partition(|one| !one.cells(extent).is_empty());
    if some.is_empty() && !none.is_empty() {
        let names: Vec<&str> = none.iter().map(|one| one.id.as_str()).collect();
        let guests = Some(Guests::list(&extent.only.guests)).filter(|list| !list.is_empty());
        return Err(Error::NoCell {
            ids: names.join(", "),
            options: format!(
                "{}{}",
                extent.only.options(),
                guests.map(|list| format!(" --guests {list}")).unwrap_or_default()
            ),
        });
    }
    for one in none {
        eprintln!("{}: it has no such cell", one.id);
    }
    Ok(some)
}

/// Shows a rig all that earlier runs measured, before anything is: the cell that comes first may be one that is measured again.
fn know_earlier(
    experiment: &Experiment,
    extent: &Extent,
    raw: &Path,
    parameters: &Parameters,
    rig: &mut Rig,
) -> Result<()> {
    for cell in experiment.cells(extent) {
        let kept = kept_result(experiment, &raw.join(format!("{}.json", cell.file_name())), parameters)?;
        kept.iter().for_each(|kept| rig.know(kept));
    }
    Ok(())
}

/// Makes `results.json` of a run that ends early, with what earlier runs have of the cells that this one did not come to.
fn keep_what_is_there(
    experiment: &Experiment,
    options: &RunOptions,
    parameters: &Parameters,
    directory: &Path,
    cells: Vec<CellResult>,
) -> Result<()> {
    let all = with_earlier(experiment, &options.extent, &directory.join("raw"), parameters, cells)?;
    if all.is_empty() { Ok(()) } else { keep(experiment, options, parameters, directory, &all) }
}

/// What measures an experiment here.
fn source_of(experiment: &Experiment, programs: Option<&Programs>) -> Source {
    Source::here(programs.filter(|_| experiment.kind.has_guests()))
}

/// What a run measured, and what earlier ones into the same directory measured under the same parameters: more iterations, or
/// more guests.
fn with_earlier(
    experiment: &Experiment,
    extent: &Extent,
    raw: &Path,
    parameters: &Parameters,
    cells: Vec<CellResult>,
) -> Result<Vec<CellResult>> {
    let most = extent.iterations.or(experiment.iterations).unwrap_or(0).max(ITERATIONS_LOOKED_FOR);
    // A run of a part of the cells finds the other parts, too.
    let widest = Extent {
        iterations: Some(most),
        guests_max: GUESTS_LOOKED_FOR,
        only: Only::default(),
        recordings: u32::MAX,
        ..extent.clone()
    };
    let mut of_now: Vec<Option<CellResult>> = cells.into_iter().map(Some).collect();
    let mut found = Vec::new();
    for cell in experiment.cells(&widest) {
        let now = of_now.iter_mut().find(|result| result.as_ref().is_some_and(|result| result.cell == cell));
        match now.and_then(Option::take) {
            Some(result) => found.push(result),
            None => found.extend(kept_result(experiment, &raw.join(format!("{}.json", cell.file_name())), parameters)?),
        }
    }
    found.extend(of_now.into_iter().flatten());
    Ok(found)
}

/// A cell that was measured before under the same parameters and in the same way, and did not fail.
fn kept_result(experiment: &Experiment, path: &Path, parameters: &Parameters) -> Result<Option<CellResult>> {
    let is_prepared = |cell: &Cell| Workload::by_name(&cell.group.workload).is_some_and(Workload::is_prepared);
    let kept = results::read::<CellResult>(path)?;
    Ok(kept.filter(|result| {
        let is_the_same_way = result.begins_clean || !is_prepared(&result.cell);
        is_the_same_way && experiment.effective(&result.parameters) == *parameters && result.failure.is_none()
    }))
}

/// What an experiment's directory has of these parameters must be of this source, if there is one that it must be of: a comparison of two of
/// them would be of machines or programs.
fn refuse_others(
    experiment: &Experiment,
    directory: &Path,
    parameters: &Parameters,
    source: Option<&Source>,
) -> Result<()> {
    let Some(source) = source.filter(|_| directory.join("raw").is_dir()) else { return Ok(()) };
    let is_of_another = |result: &CellResult| {
        let is_of_these = experiment.effective(&result.parameters) == *parameters;
        result.failure.is_none() && is_of_these && result.source() != *source
    };
    let of_others: Vec<CellResult> = results::read_raw(directory)?.into_iter().filter(is_of_another).collect();
    match of_others.first() {
        None => Ok(()),
        Some(first) => Err(Error::OtherSource {
            path: directory.to_owned(),
            count: of_others.len(),
            of: Box::new(first.source()),
            here: Box::new(source.clone()),
        }),
    }
}

/// The same cell, if another experiment has measured it: a load whose only parameters are those of every cell. Of another source than the one
/// that it must be of, it is not the same.
fn measured_elsewhere(
    experiment: &Experiment,
    cell: &Cell,
    all: &[Experiment],
    out: &Path,
    parameters: &Parameters,
    source: Option<&Source>,
) -> Result<Option<CellResult>> {
    if !experiment.is_plain_load() {
        return Ok(None);
    }
    for other in all.iter().filter(|other| other.id != experiment.id && other.is_plain_load()) {
        let path = out.join(&other.id).join("raw").join(format!("{}.json", cell.file_name()));
        let kept = kept_result(other, &path, parameters)?;
        if let Some(mut result) = kept.filter(|kept| source.is_none_or(|source| kept.source() == *source)) {
            result.measured_for.get_or_insert_with(|| other.id.clone());
            return Ok(Some(result));
        }
    }
    Ok(None)
}

/// A cell's file has its name and no parameters: what was measured under others is not written over by what this run measures.
fn refuse_to_write_over(
    experiment: &Experiment,
    directory: &Path,
    parameters: &Parameters,
    extent: &Extent,
) -> Result<()> {
    if !directory.join("raw").is_dir() {
        return Ok(());
    }
    let cells = experiment.cells(extent);
    let is_another = |result: &CellResult| {
        let is_of_this_run = cells.contains(&result.cell) && result.failure.is_none();
        is_of_this_run && experiment.effective(&result.parameters) != *parameters
    };
    let others: Vec<CellResult> = results::read_raw(directory)?.into_iter().filter(is_another).collect();
    match others.first() {
        None => Ok(()),
        Some(first) => Err(Error::OtherParameters {
            path: directory.to_owned(),
            count: others.len(),
            differs: experiment.effective(&first.parameters).difference(parameters),
        }),
    }
}

fn measure(experiment: &Experiment, cell: &Cell, rig: &mut Rig, parameters: &Parameters) -> Result<CellResult> {
    let parameter = experiment.parameter.as_ref().map(|(name, _)| name.as_str());
    match experiment.kind {
        Kind::Load => rig.load(cell, parameters, parameter),
        Kind::Recovery => rig.recovery(cell, parameters),
        Kind::Integrity => rig.integrity(cell, parameters, parameter),
        Kind::Flash => {
            let begun = Instant::now();
            let mut result = empty(cell, parameters);
            result.guests.push(flash::replay(cell, parameters)?);
            result.wall_seconds = begun.elapsed().as_secs_f64();
            Ok(result)
        }
        Kind::Protect => {
            let mut result = empty(cell, parameters);
            result.guests.push(sizes::protect(cell.group.parameter)?);
            Ok(result)
        }
        Kind::Sizes => {
            let mut result = empty(cell, parameters);
            result.guests.push(sizes::measure()?);
            Ok(result)
        }
        Kind::Missing => Err(Error::NotYet { id: experiment.id.clone(), needs: experiment.needs.clone() }),
    }
}

fn empty(cell: &Cell, parameters: &Parameters) -> CellResult {
    CellResult { load: machine::load(), ..CellResult::empty(cell, parameters) }
}

fn failure(cell: &Cell, parameters: &Parameters, error: &Error) -> CellResult {
    CellResult { failure: Some(crate::rig::first_line(&error.to_string()).to_owned()), ..empty(cell, parameters) }
}

fn keep(
    experiment: &Experiment,
    options: &RunOptions,
    parameters: &Parameters,
    directory: &Path,
    cells: &[CellResult],
) -> Result<()> {
    let rows = results::summarise(cells);
    let mut results = Results {
        schema: SCHEMA,
        id: experiment.id.clone(),
        title: experiment.title.clone(),
        commit: results::commits(cells).unwrap_or_else(machine::commit),
        machine: described_machine(cells),
        command: format!("amberlog lab run {} {}", experiment.id, options.command).trim_end().to_owned(),
        ended: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        parameters: parameters.clone(),
        declared: Declared::default(),
        verdicts: results::judge(experiment, &rows, parameters),
        curves: results::curves(experiment, cells),
        rows,
        raw: "raw".to_owned(),
    };
    results.declared = results.declared(Some(experiment));
    results::write(&directory.join("results.json"), &results)
}

/// What the cells were measured on: this machine, or, where they name others, these.
fn described_machine(cells: &[CellResult]) -> BTreeMap<String, String> {
    let mut machine = machine::describe();
    if let Some(processors) = results::machines(cells) {
        machine.insert("processor".to_owned(), processors);
    }
    machine
}

/// Makes the `results.json` of each experiment in a directory anew from its raw results, those of its cells that were measured under
/// its parameters.
///
/// # Errors
/// When a directory has a `results.json` and no raw results, or a file is something else.
pub fn summarise(directory: &Path) -> Result<()> {
    let experiments = catalogue::all_in(directory)?;
    for mut summary in results::read_all(directory)? {
        let own = directory.join(&summary.id);
        let experiment = experiments.iter().find(|experiment| experiment.id == summary.id);
        let effective = |parameters: &Parameters| {
            experiment.map_or_else(|| parameters.clone(), |experiment| experiment.effective(parameters))
        };
        summary.parameters = effective(&summary.parameters);
        let mut cells = results::read_raw(&own)?;
        cells.retain(|cell| effective(&cell.parameters) == summary.parameters);
        summary.rows = results::summarise(&cells);
        if let Some(commits) = results::commits(&cells) {
            summary.commit = commits;
        }
        if let Some(processors) = results::machines(&cells) {
            summary.machine.insert("processor".to_owned(), processors);
        }
        summary.declared = summary.declared(experiment);
        if let Some(experiment) = experiment {
            summary.verdicts = results::judge(experiment, &summary.rows, &summary.parameters);
            summary.curves = results::curves(experiment, &cells);
        }
        results::write(&own.join("results.json"), &summary)?;
    }
    Ok(())
}

/// How far a run is, told on stderr.
struct Progress {
    cells: usize,
    done: usize,
    expected_left: f64,
    expected_done: f64,
    took: f64,
}

impl Progress {
    fn new(experiments: &[&Experiment], extent: &Extent, of_run: &Parameters) -> Self {
        let cells = experiments.iter().map(|experiment| experiment.cells(extent).len()).sum();
        let expected_left = catalogue::estimate_all_seconds(experiments.iter().copied(), extent, of_run);
        Progress { cells, done: 0, expected_left, expected_done: 0.0, took: 0.0 }
    }

    fn skip(&mut self, expected: f64) {
        self.done += 1;
        self.expected_left -= expected;
    }

    fn begin(&self, id: &str, cell: &Cell) {
        // Expectations are rough; what was measured so far corrects them.
        let pace = if self.expected_done > 0.0 { self.took / self.expected_done } else { 1.0 };
        let left = duration(self.expected_left * pace);
        eprintln!("[{}/{}, {left} left] {id}: {cell}", self.done + 1, self.cells);
    }

    fn end(&mut self, expected: f64, took: f64, result: &CellResult) {
        self.skip(expected);
        self.expected_done += expected;
        self.took += took;
        match &result.failure {
            Some(failure) => eprintln!("    FAILED after {took:.0} s: {failure}"),
            None => {
                let seconds = result.mean("seconds").map(|value| format!("{value:.2} s, ")).unwrap_or_default();
                let bytes = result.mean("bytes_to_storage").map_or(0.0, |bytes| bytes / 1e6);
                let bound = results::summarise(std::slice::from_ref(result)).first().map(binding);
                let bound = bound
                    .filter(|bound| bound.bound != Bound::Unknown)
                    .map_or_else(String::new, |bound| format!("; bound by {} ({})", bound.bound.name(), bound.words()));
                eprintln!("    {seconds}{bytes:.1} MB to storage; the cell took {took:.0} s{bound}");
            }
        }
    }
}

/// Seconds as people read them.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds.div_ceil(60)),
        _ => format!("{:.1} h", seconds as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Mode;
    use crate::verdict::Agreement;

    #[test]
    fn what_earlier_runs_measured_counts_too() {
        let directory = tempfile::tempdir().expect("a directory");
        let experiments = catalogue::all().expect("descriptions");
        let experiment =
            experiments.iter().find(|experiment| experiment.guests.len() > 1).expect("one with more guests");
        let of = |scale| Parameters { quick: false, scale, time_scale: 5.0, ..Parameters::for_tests() };
        let extent = Extent { quick: false, iterations: Some(1), guests_max: 1, ..Extent::default() };
        let keep = |cell: &Cell, parameters: &Parameters| {
            let path = directory.path().join(format!("{}.json", cell.file_name()));
            results::write(&path, &CellResult::empty(cell, parameters)).expect("written");
        };
        let wider = experiment.cells(&Extent { iterations: Some(3), guests_max: 2, ..extent.clone() });
        let cells = experiment.cells(&extent);
        let more: Vec<&Cell> = wider.iter().filter(|cell| !cells.contains(cell)).collect();
        keep(more[0], &of(0.1));
        keep(more[1], &of(0.2));
        keep(more[2], &of(0.1));
        let now: Vec<CellResult> = cells.iter().map(|cell| CellResult::empty(cell, &of(0.1))).collect();
        let all = with_earlier(experiment, &extent, directory.path(), &of(0.1), now).expect("read");
        let found: Vec<&Cell> = all.iter().map(|result| &result.cell).collect();
        assert_eq!(found.len(), cells.len() + 2, "what was measured otherwise does not count");
        assert!(cells.iter().all(|cell| found.contains(&cell)));
        assert!(found.contains(&more[0]) && found.contains(&more[2]));
    }

    #[test]
    fn a_part_that_no_experiment_has_is_refused() {
        let experiments =
            catalogue::select(&["spe2012-fig06".to_owned(), "njs2018-fig8".to_owned()]).expect("there are both");
        let of = |only: Only| {
            let extent = Extent { only, ..Extent::default() };
            let ids = |some: Vec<&Experiment>| some.iter().map(|one| one.id.clone()).collect::<Vec<_>>().join(" ");
            with_cells(&experiments, &extent).map(ids).map_err(|error| error.to_string())
        };
        assert_eq!(of(Only::default()).unwrap(), "spe2012-fig06 njs2018-fig8");
        assert_eq!(of(Only { modes: vec![Mode::Njs], ..Only::default() }).unwrap(), "njs2018-fig8");
        assert_eq!(of(Only { guests: vec![4, 8], ..Only::default() }).unwrap(), "spe2012-fig06");
        let told = of(Only { modes: vec![Mode::Copy], guests: vec![16], ..Only::default() }).unwrap_err();
        assert!(told.contains("spe2012-fig06, njs2018-fig8") && told.contains("--modes copy --guests 16,"), "{told}");
        // Not as without a list, where an experiment of many guests is tried with as many as there may be.
        let few = Extent { guests_max: 2, only: Only { guests: vec![2], ..Only::default() }, ..Extent::default() };
        let of_many = Experiment { guests: vec![4, 8], ..experiments[0].clone() };
        assert!(of_many.cells(&few).is_empty());
        let quick = Extent { quick: true, only: Only { guests: vec![8], ..Only::default() }, ..Extent::default() };
        assert!(experiments[0].cells(&quick).iter().all(|cell| cell.group.guests == 8));
    }

    /// What is long is measured in parts: one in this session, the rest in another, into the same directory.
    #[test]
    fn a_part_of_an_experiment_finds_the_others_and_forbids_none() {
        let directory = tempfile::tempdir().expect("a directory");
        let experiment = catalogue::select(&["spe2012-fig06".to_owned()]).expect("there is one").remove(0);
        let parameters = experiment.parameters(&Parameters::for_tests());
        let own = directory.path().join(&experiment.id);
        let raw = own.join("raw");
        std::fs::create_dir_all(&raw).expect("made");
        let extent = |modes: &[Mode], guests: &[u32]| Extent {
            iterations: Some(2),
            only: Only { modes: modes.to_vec(), guests: guests.to_vec(), ..Only::default() },
            ..Extent::default()
        };
        let measure = |extent: &Extent| {
            refuse_to_write_over(&experiment, &own, &parameters, extent).expect("nothing forbids it");
            let measured = |cell: &Cell| {
                let seconds = if cell.group.mode == Mode::Vma { 5.0 } else { 10.0 } + f64::from(cell.iteration) / 100.0;
                let fields = [("seconds_unmounted".to_owned(), seconds), ("transactions".to_owned(), 9.0)];
                CellResult { guests: vec![fields.into()], ..CellResult::empty(cell, &parameters) }
            };
            let now: Vec<CellResult> = experiment.cells(extent).iter().map(measured).collect();
            for result in &now {
                results::write(&raw.join(format!("{}.json", result.cell.file_name())), result).expect("written");
            }
            let all = with_earlier(&experiment, extent, &raw, &parameters, now).expect("read");
            let rows = results::summarise(&all);
            let verdicts = results::judge(&experiment, &rows, &parameters);
            let claim = verdicts.iter().find(|one| one.field == "seconds_unmounted").expect("against journal");
            let of = |wanted| claim.cells.iter().filter(|cell| cell.agreement == wanted).count();
            (rows.len(), of(Agreement::Missing), of(Agreement::Agrees))
        };
        assert_eq!(measure(&extent(&[Mode::Journal], &[1, 8])), (2, 4, 0));
        assert_eq!(measure(&extent(&[Mode::Vma], &[8])), (3, 3, 1), "the other part is there");
        assert_eq!(measure(&extent(&[Mode::Vma], &[1])), (4, 2, 2), "and a part of the rest");
        assert_eq!(measure(&extent(&[], &[])), (20, 0, 4), "all of it");
    }

    /// A run that went on measured anew after which time guests are killed, and iterations of one group were killed at two.
    #[test]
    fn a_run_that_goes_on_kills_at_the_time_of_the_earlier_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let experiment = catalogue::select(&["spe2012-tab3".to_owned()]).expect("there is one").remove(0);
        let parameters = experiment.parameters(&Parameters::for_tests());
        let extent = Extent { iterations: Some(2), ..Extent::default() };
        let cells = experiment.cells(&extent);
        let second = cells.iter().find(|cell| cell.iteration == 1).expect("a second iteration");
        let keep = |half_seconds| {
            let kept = CellResult { half_seconds, ..CellResult::empty(second, &parameters) };
            results::write(&directory.path().join(format!("{}.json", second.file_name())), &kept).expect("written");
            let mut rig = Rig::new(Some(directory.path()), directory.path().join("consoles"), None).expect("a rig");
            know_earlier(&experiment, &extent, directory.path(), &parameters, &mut rig).expect("read");
            rig.halves.get(&second.group).copied()
        };
        assert_eq!(keep(Some(3.5)), Some(3.5));
        assert_eq!(keep(None), None, "it is of an earlier version");
    }

    /// A referee found results of other machines and commits used again without a word.
    #[test]
    fn results_of_another_program_or_machine_are_refused_and_not_taken_along() {
        let directory = tempfile::tempdir().expect("a directory");
        let experiments = catalogue::select(&["spe2012-fig17".to_owned(), "spe2012-fig18".to_owned()]).expect("both");
        let parameters = experiments[0].parameters(&Parameters::for_tests());
        let cell = experiments[0].cells(&Extent { iterations: Some(1), ..Extent::default() }).remove(0);
        let source = |commit: &str, machine: &str| Source {
            commit: commit.into(),
            machine: machine.into(),
            programs: "t".into(),
        };
        let edited = Source { programs: "u".into(), ..source("a", "x") };
        let kept = CellResult {
            commit: "a".into(),
            machine: "x".into(),
            programs: "t".into(),
            ..CellResult::empty(&cell, &parameters)
        };
        let raw = directory.path().join("spe2012-fig17/raw");
        std::fs::create_dir_all(&raw).expect("made");
        results::write(&raw.join(format!("{}.json", cell.file_name())), &kept).expect("written");
        let own = directory.path().join("spe2012-fig17");
        let refused =
            |parameters: &Parameters, source: Option<&Source>| refuse_others(&experiments[0], &own, parameters, source);
        assert!(refused(&parameters, Some(&source("a", "x"))).is_ok() && refused(&parameters, None).is_ok());
        for other in [source("b", "x"), source("a", "y"), edited.clone()] {
            let told = refused(&parameters, Some(&other)).expect_err("it is another's").to_string();
            assert!(told.contains("has 1 results of program a on x") && told.contains("--any-source"), "{told}");
            let changed = Parameters { seed: 2, ..parameters.clone() };
            assert!(refused(&changed, Some(&other)).is_ok(), "it is of other parameters");
        }
        // What a run with other words would measure is not measured over it.
        let once = Extent { iterations: Some(1), ..Extent::default() };
        let over = |parameters: &Parameters, extent: &Extent| {
            refuse_to_write_over(&experiments[0], &own, parameters, extent).map_err(|error| error.to_string())
        };
        assert_eq!(over(&parameters, &once), Ok(()));
        let images = Parameters { images: "/dev/shm (tmpfs)".into(), ..parameters.clone() };
        for (other, words) in [
            (Parameters { seed: 2, ..parameters.clone() }, "seed: 1 there, 2 here"),
            (Parameters { scale: 0.1, ..parameters.clone() }, "scale: 1.0 there, 0.1 here"),
            (images, "images: not said there, \"/dev/shm (tmpfs)\" here"),
        ] {
            let told = over(&other, &once).expect_err("it is of other parameters");
            assert!(told.contains("has 1 results") && told.contains(words) && told.contains("--out"), "{told}");
        }
        let failed = CellResult { failure: Some("it failed".into()), ..kept.clone() };
        results::write(&raw.join(format!("{}.json", cell.file_name())), &failed).expect("written");
        assert_eq!(over(&Parameters { seed: 2, ..parameters.clone() }, &once), Ok(()), "nothing good is lost");
        results::write(&raw.join(format!("{}.json", cell.file_name())), &kept).expect("written");
        let elsewhere = |source: Option<&Source>| {
            measured_elsewhere(&experiments[1], &cell, &experiments, directory.path(), &parameters, source)
                .expect("read")
        };
        assert!(elsewhere(Some(&source("a", "x"))).is_some() && elsewhere(None).is_some());
        assert!(elsewhere(Some(&source("b", "x"))).is_none() && elsewhere(Some(&source("a", "y"))).is_none());
        assert!(elsewhere(Some(&edited)).is_none(), "its guests have other tools");
    }
}
