//! The experiments: short texts, embedded, each with keys for the program and sections for the reader.
//!
//! A text is `key: value` lines, a blank line, and sections that begin with `## `. Keys: `title`, `kind`
//! (`load`, `recovery`, `integrity`, `flash`, `protect`, `sizes` or `missing`), `needs` (for what is missing), `workloads`, `modes`, `guests`, `disks`,
//! `parameter` (a name and values), `iterations` (where the paper needs more than the usual few), `part` (of a run's scale, where a paper's
//! sizes are many times the others' and the scale is not declared), `file-system` and `memory-mib` (of the paper's machine), `plot` (the fields to draw), `curves`
//! (what to draw over time), `figure` (which of the paper's it is) and any number of `claim` lines (see [`crate::claim`]), which
//! are judged and stand in docs/papers.md ([`crate::headline`]).

use crate::cell::{Cell, Group, Mode};
use crate::claim::Claim;
use crate::error::{Error, FileContext, Result};
use crate::measured::Parameters;
use crate::only::{self, Only};
use crate::records::{self, CRASHES_A_BOOT};
use crate::workload::Workload;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How an experiment is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A workload to its end, in every mode.
    Load,
    /// A workload cut short by `kill -9` of the VMM; what its recovery takes.
    Recovery,
    /// Record updates cut short by a crash of the guest's kernel; what became of the records.
    Integrity,
    /// Recorded traces on a simulated SSD; no guest. Its disks are flash translation layers.
    Flash,
    /// Protection of pages of this process, without a guest; its parameter is the batch in MiB.
    Protect,
    /// Sizes of our own programs; no guest.
    Sizes,
    /// Of something that is not there yet.
    Missing,
}

impl Kind {
    /// Whether guests are booted for it.
    pub fn has_guests(self) -> bool {
        matches!(self, Self::Load | Self::Recovery | Self::Integrity)
    }
}

/// How often a cell is measured unless it is said otherwise.
pub const ITERATIONS: u32 = 3;

/// One experiment, as its text says.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// Its name on the command line.
    pub id: String,
    /// One line.
    pub title: String,
    /// Which of the paper's figures or tables it is.
    pub figure: String,
    /// How it is run.
    pub kind: Kind,
    /// What is missing.
    pub needs: String,
    /// What runs in the guests.
    pub workloads: Vec<Workload>,
    /// In which modes.
    pub modes: Vec<Mode>,
    /// In how many guests at once.
    pub guests: Vec<u32>,
    /// On which modelled disks.
    pub disks: Vec<String>,
    /// The name of its own parameter, and its values.
    pub parameter: Option<(String, Vec<u64>)>,
    /// How often it is measured if the command does not say.
    pub iterations: Option<u32>,
    /// What part of a run's scale its sizes have.
    pub part: f64,
    /// The file system that its paper had; that of the run, where it does not say.
    pub file_system: Option<String>,
    /// The memory of its paper's machine, in MiB; that of the run, where it does not say.
    pub memory_mib: Option<u32>,
    /// What its paper's kernel let be dirty, where today's lets less: per cent of memory from which on it writes back, and from which on
    /// writers wait.
    pub dirty_percent: Option<(u32, u32)>,
    /// The fields that its plots show.
    pub plot: String,
    /// What is drawn over time.
    pub curves: String,
    /// What the paper found.
    pub claims: Vec<Claim>,
    /// For the reader: heading and text.
    pub sections: Vec<(String, String)>,
    /// The description itself, where it is the user's own.
    pub own_text: Option<String>,
}

/// What a description of the user's own is called beside its results.
pub const OWN_TEXT: &str = "experiment.md";

/// What of an experiment is run.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Small and short: for CI.
    pub quick: bool,
    /// How often each cell is measured; as often as the experiment says, or [`ITERATIONS`] times, if it is not said.
    pub iterations: Option<u32>,
    /// At most so many guests at once.
    pub guests_max: u32,
    /// Which of the cells: the others stay to be measured.
    pub only: Only,
    /// As a paper is repeated: each cell [`ITERATIONS_OF_A_PAPER`] times, [`ITERATIONS_OF_MANY`] with more than four guests.
    pub is_of_paper: bool,
    /// How long loads take here, as a part of what they took where their times were first estimated (emulated guests, a
    /// drive five times slower).
    pub pace: f64,
    /// The same of loads that are the processor's.
    pub processor_pace: f64,
    /// How many recordings there are to be replayed ([`crate::flash::recordings`]).
    pub recordings: u32,
}

impl Default for Extent {
    fn default() -> Self {
        Extent {
            quick: false,
            iterations: None,
            guests_max: 8,
            only: Only::default(),
            is_of_paper: false,
            pace: 1.0,
            processor_pace: 1.0,
            recordings: 1,
        }
    }
}

/// How often a cell is measured where a paper is repeated, and one of many guests.
pub const ITERATIONS_OF_A_PAPER: u32 = 5;
/// See [`ITERATIONS_OF_A_PAPER`].
pub const ITERATIONS_OF_MANY: u32 = 3;
const MANY_GUESTS: u32 = 5;
/// How many crashes are to tell how often records are damaged, as in the paper.
pub const RECORDS_ASKED: u32 = 120;

/// How often a cell with so many guests is to be measured before what it says is more than a first look.
pub fn iterations_asked(guests: u32) -> u32 {
    if guests >= MANY_GUESTS { ITERATIONS_OF_MANY } else { ITERATIONS_OF_A_PAPER }
}

macro_rules! texts {
    ($($id:literal),* $(,)?) => {
        [$(($id, include_str!(concat!("../experiments/", $id, ".md")))),*]
    };
}

/// All experiments.
///
/// # Errors
/// Never, unless a text is not well formed, which a test looks for.
pub fn all() -> Result<Vec<Experiment>> {
    include!("../experiments/list.in").into_iter().map(|(id, text)| parse(id, text)).collect()
}

/// The description of an experiment, to read or to begin one's own with.
///
/// # Errors
/// When there is none of that name.
pub fn text(id: &str) -> Result<&'static str> {
    let found = include!("../experiments/list.in").into_iter().find(|(name, _)| *name == id);
    found.map(|(_, text)| text).ok_or_else(|| Error::Unknown(id.to_owned()))
}

/// All experiments, and those of the user's own with results in a directory.
///
/// # Errors
/// When a description cannot be read.
pub fn all_in(directory: &Path) -> Result<Vec<Experiment>> {
    let mut experiments = all()?;
    let mut own: Vec<PathBuf> = std::fs::read_dir(directory)
        .at("list", directory)?
        .filter_map(|entry| Some(entry.ok()?.path().join(OWN_TEXT)).filter(|path| path.is_file()))
        .collect();
    own.sort();
    for path in own {
        let id = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        experiments.push(read(&path, &id)?);
    }
    Ok(experiments)
}

/// Reads a description of the user's own.
fn read(path: &Path, id: &str) -> Result<Experiment> {
    let bad = |reason: &str| Error::Description { id: path.display().to_string(), reason: reason.to_owned() };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if id.is_empty() || !id.bytes().all(is_plain) {
        return Err(bad("its name may have letters, digits, - and _"));
    }
    if all()?.iter().any(|experiment| experiment.id == id) {
        return Err(bad("it has the name of an experiment of the papers; give it another"));
    }
    let text = std::fs::read_to_string(path).at("read", path)?;
    let experiment = parse(id, &text)?;
    if experiment.kind == Kind::Missing {
        return Err(bad("it has no kind"));
    }
    Ok(Experiment { own_text: Some(text), ..experiment })
}

/// The experiments with these names; a name that ends with `*` stands for all that begin so, and one that ends with `.md` is a
/// file with a description of the user's own.
///
/// # Errors
/// When there is none of that name, or a description is not well formed.
pub fn select(names: &[String]) -> Result<Vec<Experiment>> {
    let all = all()?;
    let mut chosen: Vec<Experiment> = Vec::new();
    for name in names {
        if let Some(stem) = name.strip_suffix(".md") {
            let id = stem.rsplit('/').next().unwrap_or(stem);
            chosen.push(read(Path::new(name), id)?);
            continue;
        }
        let prefix = name.strip_suffix('*');
        let fits = |id: &str| prefix.map_or(id == name, |prefix| id.starts_with(prefix));
        let before = chosen.len();
        for experiment in all.iter().filter(|experiment| fits(&experiment.id)) {
            if chosen.iter().all(|other| other.id != experiment.id) {
                chosen.push(experiment.clone());
            }
        }
        if chosen.len() == before && !all.iter().any(|experiment| fits(&experiment.id)) {
            return Err(Error::Unknown(name.clone()));
        }
    }
    Ok(chosen)
}

fn parse(id: &str, text: &str) -> Result<Experiment> {
    let bad = |reason: String| Error::Description { id: id.to_owned(), reason };
    let (keys, body) = text.split_once("\n\n").ok_or_else(|| bad("it has no blank line".to_owned()))?;
    let mut experiment = Experiment {
        id: id.to_owned(),
        title: String::new(),
        figure: String::new(),
        kind: Kind::Missing,
        needs: String::new(),
        workloads: Vec::new(),
        modes: Vec::new(),
        guests: vec![1],
        disks: vec!["st336753lw".to_owned()],
        parameter: None,
        iterations: None,
        part: 1.0,
        file_system: None,
        memory_mib: None,
        dirty_percent: None,
        plot: "seconds".to_owned(),
        curves: String::new(),
        claims: Vec::new(),
        sections: Vec::new(),
        own_text: None,
    };
    for line in keys.lines() {
        let (key, value) = line.split_once(": ").ok_or_else(|| bad(format!("'{line}' is no key and value")))?;
        let words = || value.split_whitespace();
        match key {
            "title" => value.clone_into(&mut experiment.title),
            "figure" => value.clone_into(&mut experiment.figure),
            "needs" => value.clone_into(&mut experiment.needs),
            "plot" => value.clone_into(&mut experiment.plot),
            "curves" => value.clone_into(&mut experiment.curves),
            "file-system" => match value {
                "ext3" | "ext4" => experiment.file_system = Some(value.to_owned()),
                other => return Err(bad(format!("file-system: {other}"))),
            },
            "memory-mib" => {
                experiment.memory_mib = Some(value.parse().map_err(|_| bad(format!("memory-mib: {value}")))?);
            }
            "dirty-percent" => {
                let percents: Vec<u32> = words().map_while(|word| word.parse().ok()).collect();
                experiment.dirty_percent = match percents[..] {
                    [background, dirty] if background < dirty && dirty <= 100 => Some((background, dirty)),
                    _ => return Err(bad(format!("dirty-percent: {value}"))),
                };
            }
            "part" => {
                let part = value.parse().ok().filter(|part| (0.001..=1.0).contains(part));
                experiment.part = part.ok_or_else(|| bad(format!("part: {value}")))?;
            }
            "iterations" => {
                experiment.iterations = Some(value.parse().map_err(|_| bad(format!("iterations: {value}")))?)
            }
            "kind" => {
                experiment.kind = match value {
                    "load" => Kind::Load,
                    "recovery" => Kind::Recovery,
                    "integrity" => Kind::Integrity,
                    "flash" => Kind::Flash,
                    "protect" => Kind::Protect,
                    "sizes" => Kind::Sizes,
                    "missing" => Kind::Missing,
                    other => return Err(bad(format!("there is no kind '{other}'"))),
                }
            }
            "workloads" => {
                experiment.workloads = words()
                    .map(|word| Workload::by_name(word).ok_or_else(|| bad(format!("no workload '{word}'"))))
                    .collect::<Result<_>>()?;
            }
            "modes" => {
                experiment.modes = words()
                    .map(|word| Mode::by_name(word).ok_or_else(|| bad(format!("no mode '{word}'"))))
                    .collect::<Result<_>>()?;
            }
            "guests" => {
                experiment.guests = words()
                    .map(|word| word.parse().map_err(|_| bad(format!("guests: {word}"))))
                    .collect::<Result<_>>()?;
            }
            "disks" => experiment.disks = words().map(str::to_owned).collect(),
            "parameter" => {
                let (name, values) = value.split_once(' ').ok_or_else(|| bad("parameter without values".to_owned()))?;
                let values = values.split_whitespace().map(|word| word.parse().map_err(|_| bad(word.to_owned())));
                experiment.parameter = Some((name.to_owned(), values.collect::<Result<_>>()?));
            }
            "claim" => experiment.claims.push(value.parse().map_err(bad)?),
            other => return Err(bad(format!("there is no key '{other}'"))),
        }
    }
    for section in body.split("\n## ").map(|section| section.trim_start_matches("## ")) {
        let (heading, text) = section.split_once('\n').unwrap_or((section, ""));
        experiment.sections.push((heading.trim().to_owned(), text.trim().to_owned()));
    }
    if experiment.title.is_empty() || (experiment.kind == Kind::Missing) == experiment.needs.is_empty() {
        return Err(bad("it has no title, or 'needs' where nothing is missing".to_owned()));
    }
    Ok(experiment)
}

/// Roughly how long all experiments take in a run with these parameters, in seconds: what several of them need is measured once.
pub fn estimate_all_seconds<'a>(
    experiments: impl IntoIterator<Item = &'a Experiment>,
    extent: &Extent,
    of_run: &Parameters,
) -> f64 {
    let mut seen = BTreeSet::new();
    let mut seconds = 0.0;
    for experiment in experiments {
        let scale = experiment.parameters(of_run).scale;
        for cell in experiment.cells(extent) {
            if !experiment.is_plain_load() || seen.insert(cell.clone()) {
                seconds += experiment.cell_seconds(&cell, extent, scale);
            }
        }
    }
    seconds
}

impl Experiment {
    /// What people call it: the paper's figure, or its own name.
    pub fn name(&self) -> &str {
        if self.figure.is_empty() { &self.id } else { &self.figure }
    }

    /// The parameters that its cells get in a run with these.
    pub fn parameters(&self, of_run: &Parameters) -> Parameters {
        let scale = if of_run.has_scaled_constants() { of_run.scale } else { self.scale_of(of_run.scale) };
        let file_system = self.file_system.clone().unwrap_or_else(|| of_run.file_system.clone());
        // A guest whose memory is as large as its data, as its paper's, but never smaller than today's kernel needs.
        let memory = self.memory_mib.filter(|_| !of_run.quick).map_or(0, |mib| (f64::from(mib) * scale) as u32);
        // Records are not scaled: what counts is what is written until the crash.
        let (clocks, constants) =
            if self.kind == Kind::Integrity { (1.0, None) } else { (of_run.clocks, of_run.constants) };
        let guest_mib = of_run.guest_mib.max(memory);
        let (memory_mib, dirty_percent) = (self.memory_mib, self.dirty_percent);
        let own = Parameters {
            scale,
            file_system,
            clocks,
            constants,
            guest_mib,
            memory_mib,
            dirty_percent,
            ..of_run.clone()
        };
        self.effective(&own)
    }

    /// What these parameters come to in its cells: those of records are at a pace of their own, which earlier versions did not note.
    pub fn effective(&self, kept: &Parameters) -> Parameters {
        let mut effective = kept.clone();
        if matches!(self.kind, Kind::Flash | Kind::Sizes | Kind::Protect) {
            effective.images.clear();
        }
        if self.kind == Kind::Integrity {
            let parameter = self.parameter.as_ref().map(|(name, _)| name.as_str());
            effective.time_scale = records::time_scale(kept.time_scale, parameter);
        }
        effective
    }

    /// Its own scale in a run at this one: the papers' sizes are the papers', however large.
    fn scale_of(&self, scale: f64) -> f64 {
        if scale >= 1.0 { scale } else { scale * self.part }
    }

    /// Whether its cells are the same as equally named ones of other experiments.
    pub fn is_plain_load(&self) -> bool {
        self.kind == Kind::Load && self.parameter.is_none()
    }

    /// Whether it is computed: the same trace through the same simulator, and the same programs counted, are the same once more.
    pub fn is_computed(&self) -> bool {
        matches!(self.kind, Kind::Flash | Kind::Sizes)
    }

    /// How often a cell of it with so many guests is to be measured.
    pub fn asked(&self, guests: u32) -> u32 {
        match self.kind {
            Kind::Sizes => 1,
            Kind::Integrity => RECORDS_ASKED,
            _ => iterations_asked(guests),
        }
    }

    /// Its measurements, in an order that spreads each mode's iterations over the run (but for records: there, a boot serves
    /// many iterations).
    pub fn cells(&self, extent: &Extent) -> Vec<Cell> {
        let parameters = self.parameter.as_ref().map_or(vec![0], |(_, values)| values.clone());
        let fits = |guests: &&u32| **guests <= extent.guests_max;
        let mut guests: Vec<u32> = self.guests.iter().filter(fits).copied().collect();
        let (mut parameters, mut workloads, mut disks) = (parameters, self.workloads.clone(), self.disks.clone());
        if guests.is_empty() && extent.only.guests.is_empty() {
            guests.push(extent.guests_max.max(1));
        }
        if workloads.is_empty() {
            workloads.push(Workload::None);
        }
        let Only { modes: _, workloads: of_workloads, disks: of_disks, guests: of_guests } = &extent.only;
        guests.retain(|number| only::has(of_guests, number));
        workloads.retain(|workload| only::has(of_workloads, workload));
        disks.retain(|disk| only::has(of_disks, disk));
        if extent.quick {
            guests.truncate(1);
            workloads.truncate(1);
            disks.truncate(1);
            parameters.truncate(1);
        }
        let mut cells = Vec::new();
        let usual = if extent.quick { 1 } else { self.iterations.unwrap_or(ITERATIONS) };
        let of_group = |guests: u32| match extent.iterations {
            _ if self.kind == Kind::Sizes => 1,
            // One more replay of a recording tells nothing new; one more recording does.
            _ if self.kind == Kind::Flash && extent.quick => 1,
            iterations if self.kind == Kind::Flash => iterations.unwrap_or(u32::MAX).min(extent.recordings),
            // A few crashes of many say nothing of how often: fewer than it asks for are for a quick look.
            Some(iterations) if extent.is_of_paper && !extent.quick && self.kind == Kind::Integrity => {
                iterations.max(usual)
            }
            Some(iterations) => iterations,
            None if !extent.is_of_paper || extent.quick => usual,
            None if self.kind == Kind::Load => iterations_asked(guests),
            None => ITERATIONS_OF_A_PAPER.max(if self.kind == Kind::Integrity { usual } else { 0 }),
        };
        let most = guests.iter().map(|guests| of_group(*guests)).max().unwrap_or(1);
        for iteration in 0..most {
            for disk in &disks {
                for workload in &workloads {
                    for &parameter in &parameters {
                        for &guests in guests.iter().filter(|guests| iteration < of_group(**guests)) {
                            for &mode in self.modes.iter().filter(|mode| only::has(&extent.only.modes, mode)) {
                                let workload = workload.name().to_owned();
                                let group = Group { disk: disk.clone(), parameter, guests, workload, mode };
                                cells.push(Cell { group, iteration });
                            }
                        }
                    }
                }
            }
        }
        if self.kind == Kind::Integrity {
            // A boot serves so many iterations of one group.
            let boot = |cell: &Cell| cell.iteration / CRASHES_A_BOOT;
            cells.sort_by(|a, b| boot(a).cmp(&boot(b)).then_with(|| a.cmp(b)));
        }
        cells
    }

    /// All groups that it is to have, whatever a run was asked for: what its claims are about.
    pub fn groups(&self) -> Vec<Group> {
        let all = Extent { iterations: Some(1), guests_max: u32::MAX, ..Extent::default() };
        self.cells(&all).into_iter().map(|cell| cell.group).collect()
    }

    /// Roughly how long all cells take in a run with these parameters, in seconds, on two processors.
    pub fn estimate_seconds(&self, extent: &Extent, of_run: &Parameters) -> f64 {
        // What its cells are run at, and not what the run was asked for.
        let scale = self.parameters(of_run).scale;
        self.cells(extent).iter().map(|cell| self.cell_seconds(cell, extent, scale)).sum()
    }

    /// Roughly how long one cell takes at its own scale ([`Self::parameters`]), in seconds, on two processors: guests boot two at a time, and
    /// then share the drive.
    pub fn cell_seconds(&self, cell: &Cell, extent: &Extent, scale: f64) -> f64 {
        let workload = Workload::by_name(&cell.group.workload);
        // Where the processor decides, a native one is many times faster whatever the drive is.
        let pace = if workload == Some(Workload::KernelCompile) {
            extent.pace.min(extent.processor_pace)
        } else {
            extent.pace
        };
        let work = workload.map_or(0.0, Workload::seconds) * scale * pace;
        let guests = cell.group.guests;
        let boot = 2.0 + 1.5 * f64::from(guests);
        match self.kind {
            Kind::Missing => 0.0,
            Kind::Sizes => 1.0,
            Kind::Integrity => 2.0,
            Kind::Flash => 4.0,
            Kind::Protect => 1.0,
            Kind::Load => boot + work * f64::from(guests).max(1.5),
            // Half of a run, and now and then a whole one, to know what half of it is.
            Kind::Recovery => 1.3 * boot + work * f64::from(guests).max(1.5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_is_well_formed_and_says_what_differs() {
        let all = all().unwrap();
        assert!(all.len() > 20, "{} experiments", all.len());
        for experiment in &all {
            let has =
                |heading: &str| experiment.sections.iter().any(|(name, text)| name == heading && !text.is_empty());
            assert!(has("The paper"), "{}", experiment.id);
            if experiment.kind != Kind::Missing {
                assert!(has("Here") && has("What differs"), "{}", experiment.id);
            }
            for disk in &experiment.disks {
                let known = match experiment.kind {
                    Kind::Flash => crate::flash::LAYERS.contains(&disk.as_str()),
                    _ => disk.parse::<disk_model::Profile>().is_ok(),
                };
                assert!(known, "{}: {disk}", experiment.id);
            }
        }
    }

    /// A referee found all of them judged by our clock alone.
    #[test]
    fn the_2012_papers_times_are_judged_by_its_own_clock_first() {
        let mut seen = 0;
        for experiment in all().unwrap().iter().filter(|one| one.id.starts_with("spe2012-fig")) {
            let is_deletion = experiment.workloads == [Workload::FileDelete];
            let clock = if is_deletion { "delete_seconds" } else { "seconds_unsynced" };
            for pair in experiment.claims.windows(2).filter(|pair| pair[1].field == "seconds_unmounted") {
                let mut theirs = pair[1].clone();
                theirs.field = clock.to_owned();
                assert_eq!(pair[0], theirs, "{}: {}", experiment.id, pair[1].label());
                seen += 1;
            }
        }
        assert_eq!(seen, 37, "every comparison of time in Figures 6 to 16");
    }

    #[test]
    fn names_are_found_and_unknown_ones_refused() {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(select(&names(&["spe2012-fig06", "spe2012-fig06"])).unwrap().len(), 1);
        assert!(select(&names(&["spe2012-*"])).unwrap().len() > 10);
        assert!(matches!(select(&names(&["spe2012-fig99"])), Err(Error::Unknown(_))));
    }

    #[test]
    fn parts_of_an_experiment_are_all_of_it() {
        for experiment in all().unwrap() {
            let of = |only: Only| -> Vec<_> { experiment.cells(&Extent { only, ..Extent::default() }) };
            let whole = of(Only::default());
            let mut parts = Vec::new();
            let disks: BTreeSet<&String> = experiment.disks.iter().collect();
            for disk in disks {
                for &mode in &experiment.modes {
                    for &number in &experiment.guests {
                        let only = Only {
                            modes: vec![mode],
                            disks: vec![disk.clone()],
                            guests: vec![number],
                            ..Only::default()
                        };
                        parts.extend(of(only));
                    }
                }
            }
            assert_eq!(parts.len(), whole.len(), "{}", experiment.id);
            assert!(whole.iter().all(|cell| parts.contains(cell)), "{}", experiment.id);
            let of_workloads: usize = experiment
                .workloads
                .iter()
                .map(|&one| of(Only { workloads: vec![one], ..Only::default() }).len())
                .sum();
            assert!(of_workloads == whole.len() || experiment.workloads.is_empty(), "{}", experiment.id);
        }
    }

    #[test]
    fn a_quick_extent_is_one_cell_a_mode() {
        let experiment = select(&["spe2012-fig06".to_owned()]).unwrap().remove(0);
        let extent = Extent { quick: true, iterations: None, guests_max: 8, ..Extent::default() };
        assert_eq!(experiment.cells(&extent).len(), experiment.modes.len());
        let full = Extent { quick: false, iterations: Some(10), guests_max: 8, ..Extent::default() };
        assert_eq!(experiment.cells(&full).len(), experiment.modes.len() * 4 * 10);
        // Of a paper: five times, and three times with eight guests.
        let paper = Extent { is_of_paper: true, ..Extent::default() };
        assert_eq!(experiment.cells(&paper).len(), experiment.modes.len() * (3 * 5 + 3));
        let iterations = |id: &str, extent: &Extent| {
            let computed = select(&[id.to_owned()]).unwrap().remove(0);
            computed.cells(extent).iter().map(|cell| cell.iteration + 1).max()
        };
        let recorded = Extent { recordings: 4, ..paper.clone() };
        assert_eq!(iterations("spe2012-tab4", &recorded), Some(1), "it strays nowhere");
        assert_eq!(iterations("ssd2010-fig2-5", &paper), Some(1), "a replay strays nowhere");
        assert_eq!(iterations("ssd2010-fig2-5", &recorded), Some(4), "recordings do");
        assert_eq!(iterations("ssd2010-fig2-5", &Extent { iterations: Some(3), ..recorded.clone() }), Some(3));
        assert_eq!(iterations("ssd2010-fig2-5", &Extent { quick: true, ..recorded }), Some(1));
        let records = select(&["spe2012-fig19".to_owned()]).unwrap().remove(0);
        assert_eq!(records.cells(&paper).len(), records.modes.len() * 5 * 120);
        let ten = Extent { iterations: Some(10), ..paper };
        assert_eq!(records.cells(&ten).len(), records.modes.len() * 5 * 120, "ten of a paper's loads, and its crashes");
        assert_eq!(experiment.cells(&ten).len(), experiment.modes.len() * 4 * 10);
    }

    #[test]
    fn the_papers_sizes_are_the_papers_and_so_are_their_machines() {
        let experiment = select(&["njs2018-fig8".to_owned()]).unwrap().remove(0);
        let full = experiment.parameters(&Parameters::for_tests());
        assert_eq!((full.scale, full.file_system.as_str(), full.guest_mib), (1.0, "ext4", 8192));
        let tenth = Parameters { scale: 0.1, time_scale: 2.0, clocks: 0.2, ..Parameters::for_tests() };
        assert_eq!(experiment.parameters(&tenth).scale, 0.1, "a declared scale is the scale");
        let look = Parameters { clocks: 1.0, ..tenth };
        assert!((experiment.parameters(&look).scale - 0.025).abs() < 1e-9);
    }

    /// An auditor found NJS's figures told four times too short, and the compile twice, at a declared scale, which is every experiment's own.
    #[test]
    fn an_estimate_is_of_the_scale_that_is_run() {
        let tenth = Parameters { scale: 0.1, time_scale: 2.0, clocks: 0.2, ..Parameters::for_tests() };
        let look = Parameters { clocks: 1.0, ..tenth.clone() };
        let quick = Parameters { quick: true, ..look.clone() };
        assert!(tenth.is_declared() && !look.is_declared());
        let extent = Extent::default();
        let boots_alone = Extent { pace: 0.0, processor_pace: 0.0, ..extent.clone() };
        let mut are_of_a_part = 0;
        for experiment in all().unwrap().iter().filter(|one| matches!(one.kind, Kind::Load | Kind::Recovery)) {
            let work = |of_run: &Parameters| {
                let all = experiment.estimate_seconds(&extent, of_run);
                let together = estimate_all_seconds([experiment], &extent, of_run);
                assert!((all - together).abs() < 1e-6 * all, "{}: {all} and {together} s", experiment.id);
                all - experiment.estimate_seconds(&boots_alone, of_run)
            };
            let full = work(&Parameters::for_tests());
            for of_run in [&tenth, &look, &quick] {
                let expected = full * experiment.parameters(of_run).scale;
                let told = work(of_run);
                assert!((told - expected).abs() < 1e-6 * full, "{}: {told} of {expected} s", experiment.id);
            }
            are_of_a_part += u32::from(work(&tenth) > 1.5 * work(&look));
        }
        assert_eq!(are_of_a_part, 6, "NJS's four figures and its goal, and the compile");
    }

    /// An auditor found that what NJS was taken up for is judged nowhere.
    #[test]
    fn the_goal_of_nvm_is_held_against_the_cells_of_figure_8() {
        let found = select(&["njs-goal".to_owned(), "njs2018-fig8".to_owned()]).unwrap();
        let [goal, figure] = &found[..] else { panic!("there are both") };
        let extent = Extent { iterations: Some(5), ..Extent::default() };
        let cells = figure.cells(&extent);
        assert!(goal.cells(&extent).iter().all(|cell| cells.contains(cell)), "what is measured for one is the other's");
        let tenth = Parameters { scale: 0.1, time_scale: 2.0, clocks: 0.2, ..Parameters::for_tests() };
        let look = Parameters { clocks: 1.0, ..tenth.clone() };
        for of_run in [Parameters::for_tests(), tenth, look] {
            assert_eq!(goal.parameters(&of_run), figure.parameters(&of_run));
        }
        // The paper's own gains, of each load and each way to serve.
        let (goals, papers) = (text("njs-goal").unwrap(), text("njs2018-fig8").unwrap());
        let of_paper =
            papers.lines().filter_map(|line| line.strip_prefix("claim: about seconds_unmounted njs tmpfs-slowed "));
        let mut count = 0;
        for gain in of_paper {
            for mode in ["nvm-auto", "nvm-pipelined"] {
                let goal = format!("claim: goal seconds_unmounted {mode} tmpfs-slowed {gain}\n");
                assert!(goals.contains(&goal), "{goal}");
                count += 1;
            }
        }
        let expected = goal.claims.iter().map(|claim| claim.expected(&goal.groups()).len());
        assert_eq!((count, expected.sum::<usize>()), (12, 12 + 2 * 6), "and all six loads beside vma's");
        assert!(goal.claims.iter().all(|claim| claim.is_goal && claim.field == "seconds_unmounted"));
    }

    /// An auditor found these claims void with one guest, at any size.
    #[test]
    fn metadata_that_is_retained_is_judged_where_its_journal_is_used() {
        let all = all().unwrap();
        let ours = [Mode::VmaOrdered, Mode::VmaWriteback];
        let mut count = 0;
        for experiment in &all {
            for claim in experiment.claims.iter().filter(|claim| ours.contains(&claim.subject().mode)) {
                let expected = claim.expected(&experiment.groups());
                assert!(expected.iter().all(|group| group.guests >= 4), "{}: {}", experiment.id, claim.label());
                count += expected.len();
            }
        }
        assert_eq!(count, 8, "two loads, with 4 and 8 guests, against ordered and writeback");
    }

    #[test]
    fn what_users_get_is_beside_the_cells_of_the_figures() {
        let of = |id: &str| select(&[id.to_owned()]).unwrap().remove(0);
        let (default, extent) = (of("retain-default"), Extent { iterations: Some(3), ..Extent::default() });
        assert!(default.claims.is_empty(), "no paper has it");
        let figures = ["spe2012-fig06", "spe2012-fig07", "spe2012-fig09", "spe2012-fig10"].map(of);
        let of_figures: Vec<Cell> = figures.iter().flat_map(|one| one.cells(&extent)).collect();
        let is_of_figures = |cell: &&Cell| matches!(cell.group.mode, Mode::Journal | Mode::Vma);
        for cell in default.cells(&extent).iter().filter(is_of_figures) {
            assert!(of_figures.contains(cell), "{cell}");
        }
        assert!(of_figures.iter().all(|cell| cell.group.mode != Mode::VmaLone), "they need no more than they did");
        let run = Parameters::for_tests();
        assert!(figures.iter().all(|one| one.parameters(&run) == default.parameters(&run)));
    }

    /// The page of today's question was of the layout of twenty years ago.
    #[test]
    fn what_asks_for_today_has_todays_file_system() {
        let experiment = select(&["today-fsync".to_owned()]).unwrap().remove(0);
        assert_eq!(Parameters::for_tests().file_system, "ext3", "what a run has that does not say");
        assert_eq!(experiment.parameters(&Parameters::for_tests()).file_system, "ext4");
    }

    /// A referee found "a drive 5 times slower" printed of crashes on one that was four times faster.
    #[test]
    fn records_say_the_pace_that_their_drive_has() {
        let of = |id: &str, time_scale| {
            let experiment = select(&[id.to_owned()]).unwrap().remove(0);
            experiment.parameters(&Parameters { scale: 0.1, time_scale, ..Parameters::for_tests() })
        };
        assert!((of("spe2012-fig19", 5.0).time_scale - 0.25).abs() < 1e-9);
        assert!((of("spe2012-fig19", 0.1).time_scale - 0.1).abs() < 1e-9, "what is faster yet stays so");
        assert!((of("spe2012-fig19a", 5.0).time_scale - 5.0).abs() < 1e-9);
        assert!((of("spe2012-fig06", 5.0).time_scale - 5.0).abs() < 1e-9);
        assert_eq!(of("spe2012-fig19", 5.0).drive_in_words(), "a drive 4 times faster");
        assert_eq!(of("spe2012-fig19a", 5.0).drive_in_words(), "a drive 5 times slower");
    }

    #[test]
    fn an_experiment_of_ones_own_begins_as_a_copy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("larger.md");
        let written = |text: &str| {
            std::fs::write(&path, text).unwrap();
            select(&[path.to_str().unwrap().to_owned()])
        };
        let copy = text("njs2018-fig8").unwrap().replace("part: 0.25", "part: 1");
        let own = written(&copy).unwrap();
        assert_eq!((own[0].id.as_str(), own[0].part, own[0].own_text.as_deref()), ("larger", 1.0, Some(&*copy)));
        assert!(matches!(written("title: x\nkind: load\nworkloads: nothing\n\n"), Err(Error::Description { .. })));
        assert!(matches!(written("title: x\n\n"), Err(Error::Description { .. })), "it has no kind");
        let taken = directory.path().join("njs2018-fig8.md");
        std::fs::write(&taken, &copy).unwrap();
        assert!(matches!(select(&[taken.to_str().unwrap().to_owned()]), Err(Error::Description { .. })));
        assert!(matches!(text("spe2012-fig99"), Err(Error::Unknown(_))));

        // Its results are found again with its description.
        let results = directory.path().join("results/larger");
        std::fs::create_dir_all(&results).unwrap();
        std::fs::write(results.join(OWN_TEXT), &copy).unwrap();
        let all_there = all_in(&directory.path().join("results")).unwrap();
        assert_eq!((all_there.len(), all_there.last().unwrap().id.as_str()), (all().unwrap().len() + 1, "larger"));
    }
}
