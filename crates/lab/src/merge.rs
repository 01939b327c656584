//! Newer results put among those that are kept: an experiment's place is its newest results', and what they do not have (more guests)
//! stays under a name of its own, as what it is: without the paper's claims, which are held against the newer ones.
//!
//! It must never lose a cell that was measured, other than one that was measured anew, nor mix cells of different parameters.
//! Failure story: each directory is whole where it was or where it goes; the same command again goes on.

use crate::catalogue::{self, OWN_TEXT};
use crate::cell::Group;
use crate::error::{FileContext, Result};
use crate::measured::{CellResult, Source, SummaryRow};
use crate::results::{self, Results};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What became of an experiment's earlier results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Merged {
    /// There were none.
    New,
    /// They are measured in the same way, by the same program on the same machine: both are there now.
    Joined,
    /// All of their cells were measured anew, each as often at least, and they are gone.
    Replaced,
    /// They have cells that were not, or were measured more often, and are kept under this name.
    Kept(String),
    /// Nothing was measured anew: they are as they were.
    Nothing,
}

/// Puts every experiment's results in `from` among those in `into`; earlier ones that are kept get `-SUFFIX` behind their names, and a number where
/// that name is taken. Results of one way to measure are joined where one program on one machine measured both; with `takes_any_source`, whatever
/// did. Who calls it summarises `into` then.
///
/// # Errors
/// When a file cannot be read or written.
pub fn merge(from: &Path, into: &Path, suffix: &str, takes_any_source: bool) -> Result<Vec<(String, Merged)>> {
    let mut all = Vec::new();
    for new in results::read_all(from)? {
        let merged = one(&from.join(&new.id), &new, into, suffix, takes_any_source)?;
        all.push((new.id, merged));
    }
    Ok(all)
}

/// Whether one program on one machine measured all of both. Rows that do not say are of one that is not said.
fn is_of_one_source(earlier: &Results, new: &Results) -> bool {
    let rows = earlier.rows.iter().chain(&new.rows).filter(|row| row.count > 0);
    let or_unsaid = |row: &SummaryRow| {
        if row.sources.is_empty() { BTreeSet::from([Source::default()]) } else { row.sources.clone() }
    };
    rows.flat_map(or_unsaid).collect::<BTreeSet<_>>().len() <= 1
}

fn one(from: &Path, new: &Results, into: &Path, suffix: &str, takes_any_source: bool) -> Result<Merged> {
    if new.rows.iter().all(|row| row.count == 0) {
        return Ok(Merged::Nothing);
    }
    let to = into.join(&new.id);
    let earlier: Option<Results> = results::read(&to.join("results.json"))?;
    let merged = match &earlier {
        None => Merged::New,
        Some(earlier)
            if earlier.parameters == new.parameters && (takes_any_source || is_of_one_source(earlier, new)) =>
        {
            Merged::Joined
        }
        Some(earlier) => {
            let counts: BTreeMap<&Group, usize> = new.rows.iter().map(|row| (&row.group, row.count)).collect();
            let is_anew = |row: &SummaryRow| row.count <= counts.get(&row.group).copied().unwrap_or(0);
            if earlier.rows.iter().all(is_anew) {
                std::fs::remove_dir_all(&to).at("remove", &to)?;
                Merged::Replaced
            } else {
                let id = free_name(into, &format!("{}-{suffix}", new.id));
                keep(&to, &into.join(&id), &id, earlier)?;
                Merged::Kept(id)
            }
        }
    };
    let raw = to.join("raw");
    std::fs::create_dir_all(&raw).at("make", &raw)?;
    // A directory in which parameters were changed has cells of the earlier ones yet.
    let experiment = catalogue::all()?.into_iter().find(|experiment| experiment.id == new.id);
    let is_of_these = |cell: &CellResult| {
        let effective = experiment.as_ref().map(|experiment| experiment.effective(&cell.parameters));
        effective.as_ref().unwrap_or(&cell.parameters) == &new.parameters
    };
    for mut cell in results::read_raw(from)?.into_iter().filter(is_of_these) {
        // A failure takes no measurement's place, and a measurement that takes a failure's says so.
        let path = raw.join(format!("{}.json", cell.cell.file_name()));
        if cell.failure.is_none() || results::read::<CellResult>(&path)?.is_none() {
            cell.attempts += results::set_aside(&to, &path)?;
            results::write(&path, &cell)?;
        }
    }
    for name in ["results.json", OWN_TEXT] {
        let (path, target) = (from.join(name), to.join(name));
        if path.is_file() {
            std::fs::copy(&path, &target).at("copy to", &target)?;
        }
    }
    Ok(merged)
}

/// This name, or the first of it with a number that nothing has: parameters may change more than once.
fn free_name(directory: &Path, name: &str) -> String {
    let numbered = (2..).map(|number: u32| format!("{name}-{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    names.find(|name| !directory.join(name).exists()).unwrap_or_else(|| name.to_owned())
}

/// Moves earlier results to a name of their own, with a description of their own.
fn keep(directory: &Path, to: &Path, id: &str, earlier: &Results) -> Result<()> {
    let text = match std::fs::read_to_string(directory.join(OWN_TEXT)) {
        Ok(own) => own,
        Err(_) => catalogue::text(&earlier.id)?.to_owned(),
    };
    let path = directory.join(OWN_TEXT);
    let described = described(&text, earlier);
    std::fs::write(&path, described).at("write", &path)?;
    let kept = Results { id: id.to_owned(), title: format!("{}, earlier", earlier.title), ..earlier.clone() };
    results::write(&directory.join("results.json"), &kept)?;
    std::fs::rename(directory, to).at("rename to", to)
}

/// The description of results that newer ones have taken the place of.
fn described(text: &str, earlier: &Results) -> String {
    let (keys, body) = text.split_once("\n\n").unwrap_or((text, ""));
    let is_left = |line: &&str| !line.starts_with("claim: ") && !line.starts_with("figure: ");
    let keys: Vec<String> = keys
        .lines()
        .filter(is_left)
        .map(|line| if line.starts_with("title: ") { format!("{line}, earlier") } else { line.to_owned() })
        .collect();
    let what = format!(
        "## What differs\nEarlier results of {}: {}; guests: {}; program of {}{}. They are kept for what the newer ones do not have, and the \
         paper's claims are held against those.",
        earlier.id,
        earlier.parameters.scale_in_words(),
        earlier.parameters.platform,
        earlier.commit,
        earlier.machine.get("processor").map(|processor| format!(", on {processor}")).unwrap_or_default()
    );
    // Its other words on what was found are of whatever was found last.
    let sections = body.split("\n## ").map(|section| section.trim_start_matches("## "));
    let kept: Vec<String> = sections
        .filter(|section| section.starts_with("The paper") || section.starts_with("Here"))
        .map(|section| format!("## {}", section.trim()))
        .collect();
    format!("{}\n\n{}\n\n{what}\n", keys.join("\n"), kept.join("\n\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Cell, Mode};
    use crate::measured::Parameters;
    use crate::results::SCHEMA;

    fn kept(directory: &Path, id: &str, scale: f64, cells: &[(u32, u32)], failure: Option<&str>) {
        let parameters = Parameters { scale, ..Parameters::for_tests() };
        let cells: Vec<CellResult> = cells
            .iter()
            .map(|&(guests, iteration)| {
                let group =
                    Group { disk: "none".into(), parameter: 0, guests, workload: "postmark".into(), mode: Mode::Vma };
                let mut result = CellResult::empty(&Cell { group, iteration }, &parameters);
                result.guests.push(BTreeMap::from([("seconds".to_owned(), scale)]));
                result.failure = failure.map(str::to_owned);
                result
            })
            .collect();
        let own = directory.join(id);
        std::fs::create_dir_all(own.join("raw")).unwrap();
        for cell in &cells {
            results::write(&own.join("raw").join(format!("{}.json", cell.cell.file_name())), cell).unwrap();
        }
        let results = Results {
            schema: SCHEMA,
            id: id.to_owned(),
            title: "postmark".into(),
            commit: "0000".into(),
            machine: BTreeMap::new(),
            command: format!("amberlog lab run {id} --scale {scale}"),
            ended: 0,
            parameters,
            rows: results::summarise(&cells),
            curves: Vec::new(),
            declared: results::Declared::default(),
            verdicts: Vec::new(),
            raw: "raw".into(),
        };
        results::write(&own.join("results.json"), &results).unwrap();
    }

    /// As if another program had measured them.
    fn by_another(directory: &Path, id: &str) {
        let own = directory.join(id);
        for mut cell in results::read_raw(&own).unwrap() {
            cell.commit = "another".into();
            results::write(&own.join("raw").join(format!("{}.json", cell.cell.file_name())), &cell).unwrap();
        }
        crate::run::summarise(directory).unwrap();
    }

    fn read(directory: &Path, id: &str) -> Results {
        results::read(&directory.join(id).join("results.json")).unwrap().unwrap()
    }

    #[test]
    fn what_was_not_measured_anew_is_kept_apart() {
        let both = tempfile::tempdir().unwrap();
        let (from, into) = (both.path().join("from"), both.path().join("into"));
        kept(&into, "spe2012-fig09", 0.1, &[(1, 0), (8, 0)], None);
        kept(&into, "spe2012-fig17", 0.1, &[(1, 0)], None);
        kept(&into, "spe2012-fig10", 0.1, &[(1, 0)], None);
        kept(&from, "spe2012-fig09", 1.0, &[(1, 0), (1, 1)], None);
        kept(&from, "spe2012-fig17", 1.0, &[(1, 0)], None);
        // Cut off before a cell of it was good.
        kept(&from, "spe2012-fig10", 1.0, &[(1, 0)], Some("it hung"));
        let merged = merge(&from, &into, "tenth", false).unwrap();
        let of = |id: &str| &merged.iter().find(|(name, _)| name == id).unwrap().1;
        assert_eq!(*of("spe2012-fig09"), Merged::Kept("spe2012-fig09-tenth".into()));
        assert_eq!((of("spe2012-fig17"), of("spe2012-fig10")), (&Merged::Replaced, &Merged::Nothing));
        crate::run::summarise(&into).unwrap();
        let new = read(&into, "spe2012-fig09");
        assert_eq!((new.parameters.scale, new.rows.len(), new.rows[0].count), (1.0, 1, 2));
        let old = read(&into, "spe2012-fig09-tenth");
        assert_eq!((old.parameters.scale, old.rows.len()), (0.1, 2));
        let catalogue = catalogue::all_in(&into).unwrap();
        let told = |id: &str| catalogue.iter().find(|experiment| experiment.id == id).unwrap().claims.len();
        assert!(told("spe2012-fig09") > 0 && told("spe2012-fig09-tenth") == 0, "no claim is told twice");
        let page = crate::report::page(&results::read_all(&into).unwrap(), &catalogue::all_in(&into).unwrap());
        assert!(page.contains("Earlier results of spe2012-fig09: 0.1 of the papers"), "it says what it is");
        assert_eq!(read(&into, "spe2012-fig17").parameters.scale, 1.0);
        assert_eq!(read(&into, "spe2012-fig10").parameters.scale, 0.1);
    }

    #[test]
    fn a_second_time_and_more_of_the_same_join_what_is_there() {
        let both = tempfile::tempdir().unwrap();
        let (from, into) = (both.path().join("from"), both.path().join("into"));
        kept(&into, "spe2012-fig09", 0.1, &[(8, 0)], None);
        kept(&from, "spe2012-fig09", 1.0, &[(1, 0)], None);
        merge(&from, &into, "tenth", false).unwrap();
        kept(&from, "spe2012-fig09", 1.0, &[(1, 1)], None);
        assert_eq!(merge(&from, &into, "tenth", false).unwrap()[0].1, Merged::Joined);
        crate::run::summarise(&into).unwrap();
        assert_eq!(read(&into, "spe2012-fig09").rows[0].count, 2);
        // A failure takes no measurement's place.
        kept(&from, "spe2012-fig09", 1.0, &[(1, 0)], Some("it hung"));
        let results = read(&from, "spe2012-fig09");
        assert_eq!(results.rows[0].count, 0);
        assert_eq!(merge(&from, &into, "tenth", false).unwrap()[0].1, Merged::Nothing);
        assert_eq!(read(&into, "spe2012-fig09").rows[0].count, 2);
    }

    /// A referee found them joined without a word.
    #[test]
    fn what_another_program_measured_is_not_joined_unless_it_is_asked_for() {
        let both = tempfile::tempdir().unwrap();
        let (from, into) = (both.path().join("from"), both.path().join("into"));
        kept(&into, "spe2012-fig09", 1.0, &[(8, 0)], None);
        kept(&into, "spe2012-fig17", 1.0, &[(8, 0)], None);
        kept(&from, "spe2012-fig09", 1.0, &[(1, 0)], None);
        by_another(&from, "spe2012-fig09");
        assert_eq!(merge(&from, &into, "old", false).unwrap()[0].1, Merged::Kept("spe2012-fig09-old".into()));
        crate::run::summarise(&into).unwrap();
        assert_eq!(read(&into, "spe2012-fig09").commit, "another");
        kept(&from, "spe2012-fig17", 1.0, &[(1, 0)], None);
        by_another(&from, "spe2012-fig17");
        let merged = merge(&from, &into, "old", true).unwrap();
        assert!(merged.contains(&("spe2012-fig17".to_owned(), Merged::Joined)), "{merged:?}");
        crate::run::summarise(&into).unwrap();
        let sources = |guests: u32| {
            let rows = read(&into, "spe2012-fig17").rows;
            rows.into_iter().find(|row| row.group.guests == guests).unwrap().sources
        };
        assert_ne!(sources(1), sources(8), "each row says what measured it");
    }

    #[test]
    fn fewer_measurements_replace_none_and_a_second_change_of_parameters_is_kept_too() {
        let both = tempfile::tempdir().unwrap();
        let (from, into) = (both.path().join("from"), both.path().join("into"));
        kept(&into, "spe2012-fig09", 0.1, &[(1, 0), (1, 1), (1, 2)], None);
        kept(&from, "spe2012-fig09", 0.5, &[(1, 0), (1, 1)], None);
        let id = |name: &str| Merged::Kept(name.to_owned());
        assert_eq!(merge(&from, &into, "old", false).unwrap()[0].1, id("spe2012-fig09-old"), "three are more than two");
        // Of the same directory with other parameters: the second cell is still of the earlier ones.
        kept(&from, "spe2012-fig09", 1.0, &[(1, 0)], None);
        crate::run::summarise(&into).unwrap();
        assert_eq!(merge(&from, &into, "old", false).unwrap()[0].1, id("spe2012-fig09-old-2"));
        crate::run::summarise(&into).unwrap();
        let counts = |id: &str| (read(&into, id).parameters.scale, read(&into, id).rows[0].count);
        assert_eq!(counts("spe2012-fig09"), (1.0, 1), "no cell of other parameters came along");
        assert_eq!((counts("spe2012-fig09-old"), counts("spe2012-fig09-old-2")), ((0.1, 3), (0.5, 2)));
    }
}
