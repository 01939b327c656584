//! What is kept of a run: a file for each cell, as measured, and `results.json` with all of them, summarised and judged.

use crate::binding;
use crate::catalogue::{Experiment, Kind};
use crate::cell::Group;
use crate::error::{Error, FileContext, Result};
use crate::fields::is_proportion;
use crate::measured::{CellResult, Curve, Parameters, SummaryRow, emulated};
use crate::only::Guests;
use crate::records::{self, CRASHES_A_BOOT};
use crate::samples::with_marks_of_the_load;
use crate::statistics::Summary;
use crate::verdict::{ONCE, Verdict, judge as judge_claim};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Version of the format.
pub const SCHEMA: u32 = 1;

/// Under which conditions a figure was measured, as its table and its place on the page say it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Declared {
    /// In words: sizes, clocks, constants, drive, guests, machine, program.
    pub words: String,
    /// Whether sizes, clocks and constants are the papers' own.
    pub is_full: bool,
    /// Whether they are a part of those, all of them.
    pub is_declared: bool,
    /// Sizes, as a part of the papers'.
    pub scale: f64,
    /// Clocks, as a part of theirs.
    pub clocks: f64,
    /// Caches, memory and what may be dirty, as a part of theirs.
    pub constants: f64,
}

/// `results.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The experiment.
    pub id: String,
    /// Its title.
    pub title: String,
    /// Of the code: `git describe`, or the version.
    pub commit: String,
    /// What it ran on.
    pub machine: BTreeMap<String, String>,
    /// The command that reruns it.
    pub command: String,
    /// When it ended, in seconds since 1970.
    pub ended: u64,
    /// Shared by all cells.
    pub parameters: Parameters,
    /// What that comes to: for other programs, as the verdicts.
    #[serde(default, skip_deserializing)]
    pub declared: Declared,
    /// Summaries.
    pub rows: Vec<SummaryRow>,
    /// Of each group, what its first iteration's journal held over time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<Curve>,
    /// The paper's claims, judged: for other programs. Who reads this file judges anew.
    #[serde(default, skip_deserializing)]
    pub verdicts: Vec<Verdict>,
    /// The raw results' directory, beside this file.
    pub raw: String,
}

/// What a cell has of a name.
type Named = fn(&Group) -> String;

/// Options that name a part of an experiment's cells, and what of a cell they name.
const PARTS: [(&str, Named); 3] = [
    ("--modes", |group| group.mode.to_string()),
    ("--workloads", |group| group.workload.clone()),
    ("--disks", |group| group.disk.clone()),
];

impl Results {
    /// Under which conditions it was measured; `experiment` says what kind of measurement it is.
    pub fn declared(&self, experiment: Option<&Experiment>) -> Declared {
        let Parameters { scale, clocks, guest_mib, file_system, platform, .. } = &self.parameters;
        let dirty =
            self.parameters.dirty_percent.map(|(from, to)| format!(", {from} and {to} % dirty")).unwrap_or_default();
        let what = match experiment.map(|experiment| experiment.kind) {
            Some(Kind::Sizes) => "sizes of programs: nothing is run".to_owned(),
            Some(Kind::Flash) => "recorded block traces on a simulated SSD: no guest, no clock".to_owned(),
            Some(Kind::Protect) => "pages of a process of the host: no guest, no drive".to_owned(),
            Some(Kind::Integrity) => format!(
                "{}; {}; guests: {platform}, {guest_mib} MiB, {file_system}{dirty}",
                records::sizes_in_words(),
                experiment
                    .map_or_else(|| self.parameters.clone(), |one| one.effective(&self.parameters))
                    .drive_in_words()
            ),
            _ => format!(
                "{}; guests: {platform}, {guest_mib} MiB, {file_system}{dirty}",
                self.parameters.scale_in_words()
            ),
        };
        let quick = if self.parameters.quick { "; quick" } else { "" };
        let machine = self.machine.get("processor").map(|processor| format!("; on {processor}")).unwrap_or_default();
        Declared {
            words: format!("{what}{quick}{machine}; program of {}", self.commit),
            is_full: self.parameters.is_full(),
            is_declared: self.parameters.is_declared(),
            scale: *scale,
            clocks: *clocks,
            constants: self.parameters.constants(),
        }
    }

    /// The command that measures these cells, all of them, as often: what is kept is of several runs, and the last one's words are not the others'.
    pub fn command(&self, experiment: Option<&Experiment>) -> String {
        let mut words: Vec<String> = self.command.split_whitespace().map(str::to_owned).collect();
        let named: Vec<&str> =
            PARTS.map(|(name, _)| name).into_iter().filter(|name| words.iter().any(|word| word == name)).collect();
        let is_list = words.windows(2).any(|pair| pair[0] == "--guests" && pair[1].contains(','));
        let mut set = |name: &str, value: String| match words.iter().position(|word| word.as_str() == name) {
            Some(at) if at + 1 < words.len() => words[at + 1] = value,
            _ => words.extend([name.to_owned(), value]),
        };
        let is_computed = experiment.is_some_and(Experiment::is_computed);
        let all = |of: fn(&SummaryRow) -> u32| self.rows.iter().map(of).max();
        if let Some(most) = all(|row| u32::try_from(row.count + row.failed).unwrap_or(u32::MAX))
            .filter(|most| *most > u32::from(is_computed))
        {
            set("--iterations", most.to_string());
        }
        let numbers: BTreeSet<u32> = self.rows.iter().map(|row| row.group.guests).collect();
        if let Some(widest) = numbers.last() {
            let list: Vec<u32> = numbers.iter().copied().collect();
            set("--guests", if is_list { Guests::list(&list) } else { widest.to_string() });
        }
        // The last run may have been of a part of them.
        for (name, of) in PARTS.into_iter().filter(|(name, _)| named.contains(name)) {
            let names: BTreeSet<String> = self.rows.iter().map(|row| of(&row.group)).collect();
            set(name, names.into_iter().collect::<Vec<_>>().join(","));
        }
        // Where it is left out today's program takes what belongs to the scale.
        if !self.parameters.has_scaled_constants() && !self.parameters.quick {
            set("--clocks", self.parameters.clocks.to_string());
        }
        // Where guests would run natively, they were not.
        let emulated = if self.parameters.platform == emulated() && !is_computed { "ACCEL=tcg " } else { "" };
        format!("{emulated}{}", words.join(" "))
    }
}

/// Summarises cells by group.
pub fn summarise(cells: &[CellResult]) -> Vec<SummaryRow> {
    let cells: Vec<CellResult> = cells.iter().map(with_marks_of_the_load).collect();
    let groups: BTreeSet<&Group> = cells.iter().map(|result| &result.cell.group).collect();
    groups
        .into_iter()
        .map(|group| {
            let of: Vec<&CellResult> = cells.iter().filter(|result| result.cell.group == *group).collect();
            let good: Vec<&&CellResult> = of.iter().filter(|result| result.failure.is_none()).collect();
            let names: BTreeSet<&String> =
                good.iter().flat_map(|result| &result.guests).flat_map(|g| g.keys()).collect();
            let mut fields: BTreeMap<String, Summary> = names
                .into_iter()
                .filter_map(|name| {
                    let values = || good.iter().filter_map(|result| Some((*result, result.mean(name)?)));
                    let summary = if is_proportion(name) {
                        Summary::of_shares(&boots(values()))
                    } else {
                        Summary::of(&values().map(|(_, value)| value).collect::<Vec<_>>())
                    };
                    Some((name.clone(), summary?))
                })
                .collect();
            let mut shares: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
            for (name, share) in good.iter().flat_map(|result| binding::shares(result, f64::from(result.processors))) {
                shares.entry(name).or_default().push(share);
            }
            fields.extend(shares.into_iter().filter_map(|(name, of)| Some((name.to_owned(), Summary::of(&of)?))));
            let sources = good.iter().map(|result| result.source()).collect();
            SummaryRow {
                group: group.clone(),
                count: good.len(),
                failed: of.len() - good.len(),
                failed_before: of.iter().map(|result| result.attempts - 1).sum(),
                sources,
                fields,
            }
        })
        .collect()
}

/// The code that measured these cells: all of it, where it is not one. `None` if they do not say.
pub fn commits(cells: &[CellResult]) -> Option<String> {
    distinct(cells, |cell| &cell.commit)
}

/// The machines that measured these cells, as [`commits`].
pub fn machines(cells: &[CellResult]) -> Option<String> {
    distinct(cells, |cell| &cell.machine)
}

fn distinct(cells: &[CellResult], of: impl Fn(&CellResult) -> &String) -> Option<String> {
    let good = || cells.iter().filter(|cell| cell.failure.is_none());
    let said: BTreeSet<&str> = good().map(|cell| of(cell).as_str()).filter(|text| !text.is_empty()).collect();
    let unsaid = good().filter(|cell| of(cell).is_empty()).count();
    let mut words: Vec<String> = said.iter().map(|text| (*text).to_owned()).collect();
    if unsaid > 0 {
        words.push(format!("{unsaid} cells do not say"));
    }
    (!said.is_empty()).then(|| words.join("; "))
}

/// How often it happened, and of how many: of each boot, which serves many crashes.
fn boots<'a>(values: impl Iterator<Item = (&'a &'a CellResult, f64)>) -> Vec<(f64, f64)> {
    let mut boots: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    for (result, value) in values {
        let of_a_boot = if result.parameters.quick { 1 } else { CRASHES_A_BOOT };
        let boot = boots.entry(result.cell.iteration / of_a_boot).or_default();
        *boot = (boot.0 + value, boot.1 + 1.0);
    }
    boots.into_values().collect()
}

/// The curves of an experiment's fields, of each group's first iteration that has them.
pub fn curves(experiment: &Experiment, cells: &[CellResult]) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for result in cells.iter().filter(|result| result.failure.is_none()) {
        for field in experiment.curves.split_whitespace() {
            let group = &result.cell.group;
            let Some(points) = result.curves.get(field) else { continue };
            if !curves.iter().any(|curve| curve.group == *group && curve.field == field) {
                curves.push(Curve { group: group.clone(), field: field.to_owned(), points: points.clone() });
            }
        }
    }
    curves
}

/// The verdicts on an experiment's claims.
pub fn judge(experiment: &Experiment, rows: &[SummaryRow], parameters: &Parameters) -> Vec<Verdict> {
    let parameter = experiment.parameter.as_ref().map(|(name, _)| name.as_str());
    let groups = experiment.groups();
    let judged = experiment.claims.iter().map(|claim| judge_claim(claim, rows, &groups, parameters, parameter));
    let mut verdicts: Vec<Verdict> = judged.collect();
    if experiment.kind == Kind::Flash {
        // More replays of a recording tell nothing new; more recordings do.
        for verdict in &mut verdicts {
            verdict.give_reason(ONCE, "each load was recorded once");
        }
    }
    verdicts
}

/// Where an experiment's failed attempts are kept, in its directory.
const FAILED: &str = "failed";

/// Keeps a failed result of a cell, before another one is written to its path, beside the raw ones; gives how often the cell was tried so far. A
/// failure that is written over is one that nobody counts.
///
/// # Errors
/// When it cannot be read or moved.
pub fn set_aside(directory: &Path, path: &Path) -> Result<u32> {
    let Some(earlier) = read::<CellResult>(path)?.filter(|earlier| earlier.failure.is_some()) else { return Ok(0) };
    let failed = directory.join(FAILED);
    std::fs::create_dir_all(&failed).at("make", &failed)?;
    let to = failed.join(format!("{}-{}.json", earlier.cell.file_name(), earlier.attempts));
    std::fs::rename(path, &to).at("move to", &to)?;
    Ok(earlier.attempts)
}

/// Every raw result of an experiment's directory, in the order of their names.
///
/// # Errors
/// When there are none, or one is something else.
pub fn read_raw(directory: &Path) -> Result<Vec<CellResult>> {
    let raw = directory.join("raw");
    let entries = std::fs::read_dir(&raw).at("list", &raw)?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    paths.iter().filter_map(|path| read(path).transpose()).collect()
}

/// Writes a value as JSON, whole or not at all.
///
/// # Errors
/// When the directory cannot be written to.
pub fn write<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_vec_pretty(value)
        .map_err(|error| Error::Damaged { path: path.to_owned(), reason: error.to_string() })?;
    let partial = path.with_extension("partial");
    // What a loss of power leaves under the name is whole: a run goes on with it.
    let written = std::fs::File::create(&partial).and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()
    });
    written.at("write", &partial)?;
    std::fs::rename(&partial, path).at("rename to", path)
}

/// Reads what [`write()`] wrote; `None` if there is no such file.
///
/// # Errors
/// When the file is there and is something else.
pub fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.at("read", path)?,
    };
    let damaged = |error: serde_json::Error| Error::Damaged { path: path.to_owned(), reason: error.to_string() };
    serde_json::from_slice(&bytes).map(Some).map_err(damaged)
}

/// All `results.json` in or below a directory's experiments, sorted by name.
///
/// # Errors
/// When the directory cannot be read, or a file in it is something else.
pub fn read_all(directory: &Path) -> Result<Vec<Results>> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory)
        .at("read", directory)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path().join("results.json")))
        .filter(|path| path.is_file())
        .collect();
    // The main system first, then what stands around it.
    let is_around =
        |path: &Path| path.parent().and_then(Path::file_name).is_some_and(|id| !is_main(&id.to_string_lossy()));
    paths.sort_by_key(|path| (is_around(path), path.clone()));
    paths.iter().map(|path| read(path).map(|results| results.expect("it is a file"))).collect()
}

/// Whether an experiment is of VM-aware journaling itself.
pub fn is_main(id: &str) -> bool {
    id.starts_with("spe2012")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Cell, Mode};

    fn cell(iteration: u32, seconds: &[f64], failure: Option<&str>) -> CellResult {
        let group = Group { disk: "none".into(), parameter: 0, guests: 2, workload: "untar".into(), mode: Mode::Vma };
        let parameters = Parameters { quick: true, scale: 0.1, ..Parameters::for_tests() };
        CellResult {
            guests: seconds.iter().map(|value| BTreeMap::from([("seconds".to_owned(), *value)])).collect(),
            wall_seconds: 1.0,
            failure: failure.map(str::to_owned),
            ..CellResult::empty(&Cell { group, iteration }, &parameters)
        }
    }

    #[test]
    fn failed_cells_are_counted_and_not_averaged() {
        let cells = [cell(0, &[1.0, 3.0], None), cell(1, &[4.0], None), cell(2, &[100.0], Some("it hung"))];
        let rows = summarise(&cells);
        assert_eq!((rows.len(), rows[0].count, rows[0].failed), (1, 2, 1));
        assert!((rows[0].fields["seconds"].mean - 3.0).abs() < 1e-12);
    }

    #[test]
    fn results_are_of_the_code_and_the_machines_that_their_cells_name() {
        let of = |commit: &str| CellResult { commit: commit.into(), ..cell(0, &[1.0], None) };
        assert_eq!(commits(&[of("b"), of("a"), of("b")]).unwrap(), "a; b");
        assert_eq!(commits(&[of("a"), of("")]).unwrap(), "a; 1 cells do not say");
        assert_eq!((commits(&[of("")]), machines(&[of("a")])), (None, None));
    }

    #[test]
    fn a_row_keeps_all_that_measured_it() {
        let of = |commit: &str, machine: &str, failure| CellResult {
            commit: commit.into(),
            machine: machine.into(),
            ..cell(0, &[1.0], failure)
        };
        let rows =
            summarise(&[of("a", "x", None), of("a", "x", None), of("b", "x", None), of("c", "x", Some("it hung"))]);
        let said: Vec<&str> = rows[0].sources.iter().map(|source| source.commit.as_str()).collect();
        assert_eq!(said, ["a", "b"]);
    }

    /// A referee ran a printed command and got other cells than those that were shown.
    #[test]
    fn the_command_makes_all_cells_and_by_the_same_clocks_and_processors() {
        let cells: Vec<CellResult> = (0..3)
            .map(|iteration| cell(iteration, &[1.0], None))
            .chain([cell(3, &[1.0], Some("it hung"))])
            .map(|mut result| {
                result.cell.group.guests = if result.cell.iteration == 0 { 8 } else { 1 };
                result
            })
            .collect();
        let results = |parameters: Parameters, command: &str| Results {
            schema: SCHEMA,
            id: "spe2012-fig06".into(),
            title: "untar".into(),
            commit: "0123456789ab".into(),
            machine: BTreeMap::from([("processor".to_owned(), "2 × Z80".to_owned())]),
            command: command.to_owned(),
            ended: 0,
            parameters,
            declared: Declared::default(),
            rows: summarise(&cells),
            curves: Vec::new(),
            verdicts: Vec::new(),
            raw: "raw".into(),
        };
        let tenth = Parameters { scale: 0.1, time_scale: 5.0, ..Parameters::for_tests() };
        let old = results(tenth.clone(), "amberlog lab run spe2012-fig06 --scale 0.1 --iterations 1 --guests 1");
        assert_eq!(
            old.command(None),
            "ACCEL=tcg amberlog lab run spe2012-fig06 --scale 0.1 --iterations 3 --guests 8 --clocks 1"
        );
        let declared = old.declared(None);
        assert!((declared.constants - 1.0).abs() < 1e-9 && !declared.is_full && !declared.is_declared, "{declared:?}");
        for part in
            ["0.1 of the papers' sizes, clocks not scaled", "tcg, 192 MiB", "2 × Z80", "program of 0123456789ab"]
        {
            assert!(declared.words.contains(part), "{part}: {}", declared.words);
        }
        let native = Parameters { clocks: 0.4, time_scale: 4.0, platform: "kvm, Linux 6.12".into(), ..tenth };
        let new = results(native, "amberlog lab run spe2012-fig06 --scale 0.1 --time-scale 4");
        assert_eq!(
            new.command(None),
            "amberlog lab run spe2012-fig06 --scale 0.1 --time-scale 4 --iterations 3 --guests 8",
            "the clocks that belong to the scale are taken"
        );
        let of_a_part = results(
            new.parameters.clone(),
            "amberlog lab run spe2012-fig06 --scale 0.1 --iterations 4 --guests 8, --time-scale 4 --modes journal,vma",
        );
        assert_eq!(
            of_a_part.command(None),
            "amberlog lab run spe2012-fig06 --scale 0.1 --iterations 3 --guests 1,8 --time-scale 4 --modes vma",
            "the cells that there are, and not those of the last run"
        );
        assert!(new.declared(None).is_declared && (new.declared(None).constants - 0.1).abs() < 1e-9);
        let written = serde_json::to_value(Results { declared: new.declared(None), ..new }).unwrap();
        assert_eq!((&written["declared"]["clocks"], &written["declared"]["is_declared"]), (&0.4.into(), &true.into()));
    }

    #[test]
    fn crashes_of_a_boot_are_one_measurement() {
        let crash = |iteration: u32| CellResult {
            guests: vec![BTreeMap::from([("corrupted_runs".to_owned(), f64::from(u8::from(iteration >= 20)))])],
            parameters: Parameters::for_tests(),
            ..cell(iteration, &[], None)
        };
        let rows = summarise(&(0..24).map(crash).collect::<Vec<_>>());
        let of = rows[0].fields["corrupted_runs"];
        assert!(rows[0].count == 24 && of.count == 2, "a boot of 20 and one of 4: {of:?}");
        assert!((of.mean - 4.0 / 24.0).abs() < 1e-9);
    }

    /// A referee found crashes measured again until they went well.
    #[test]
    fn a_failed_attempt_is_kept_and_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cell.json");
        assert_eq!(set_aside(directory.path(), &path).unwrap(), 0, "there is none yet");
        write(&path, &cell(0, &[], Some("it hung"))).unwrap();
        assert_eq!(set_aside(directory.path(), &path).unwrap(), 1);
        write(&path, &CellResult { attempts: 2, ..cell(0, &[], Some("it hung again")) }).unwrap();
        assert_eq!(set_aside(directory.path(), &path).unwrap(), 2);
        write(&path, &CellResult { attempts: 3, ..cell(0, &[1.0], None) }).unwrap();
        assert_eq!(set_aside(directory.path(), &path).unwrap(), 0, "a good one stays where it is");
        let last: CellResult = read(&path).unwrap().unwrap();
        assert_eq!((last.attempts, summarise(&[last])[0].failed_before), (3, 2));
        let kept: Vec<_> = std::fs::read_dir(directory.path().join(FAILED)).unwrap().collect();
        assert_eq!(kept.len(), 2);
    }

    #[test]
    fn files_round_trip_and_others_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cell.json");
        assert!(read::<CellResult>(&path).unwrap().is_none());
        write(&path, &cell(0, &[1.5], None)).unwrap();
        let back: CellResult = read(&path).unwrap().unwrap();
        assert_eq!(back.mean("seconds"), Some(1.5));
        std::fs::write(&path, "{").unwrap();
        assert!(matches!(read::<CellResult>(&path), Err(Error::Damaged { .. })));
    }
}
