//! The tables of docs/papers.md: every claim of the papers beside ours, made from results, so that no claim there is older than what
//! it points at, and none is left out because of how it fared.

use crate::catalogue::{Experiment, Kind};
use crate::fields::grouped;
use crate::measured::{Parameters, SummaryRow};
use crate::paper::{self, Judged, Paper};
use crate::results::Results;
use crate::rig::configured_journal_mib;
use crate::statistics::Summary;
use crate::verdict::{ONCE, Verdict};
use std::fmt::Write;

/// Markdown: for each paper a sentence, a row for each claim whose experiment has been run, and what each figure was measured with.
pub fn table(all: &[Results], catalogue: &[Experiment]) -> String {
    let mut text = String::new();
    for paper in Paper::ALL {
        let judged = paper::judged(paper, all, catalogue);
        if judged.iter().all(|one| one.verdicts.is_empty()) {
            continue;
        }
        let _ = writeln!(text, "### {}\n\n{}\n", paper.title(), paper::sentence(&judged));
        text.push_str("| | what | paper | here, each cell (95 %) | n | verdict |\n|---|---|---|---|---|---|\n");
        for one in &judged {
            let name = one.experiment.map_or(one.results.id.as_str(), Experiment::name);
            for verdict in &one.verdicts {
                let _ = writeln!(
                    text,
                    "| {name} | {} | {} | {} | {} | {} |",
                    verdict.label,
                    verdict.paper,
                    here(verdict),
                    verdict.counts(),
                    word(verdict)
                );
            }
        }
        text.push('\n');
        text.push_str(&conditions(&judged));
        text.push_str(&repeated(&judged));
    }
    text
}

/// One cell as several figures measured it: what and under which parameters, and by whom and how long.
struct Repeated<'a> {
    words: String,
    parameters: &'a Parameters,
    measured: Vec<(Vec<&'a str>, &'a str, Summary)>,
}

/// Cells that several figures measured in the same way and on different machines, so that who holds one figure against another sees by how much
/// machines alone take them apart.
fn repeated(judged: &[Judged<'_>]) -> String {
    let mut all: Vec<Repeated<'_>> = Vec::new();
    for one in judged.iter().filter(|one| !one.verdicts.is_empty()) {
        let Some(experiment) = one.experiment.filter(|experiment| experiment.kind == Kind::Load) else { continue };
        let parameters = &one.results.parameters;
        let machine = one.results.machine.get("processor").map_or("", String::as_str);
        for row in &one.results.rows {
            let Some(seconds) = row.fields.get("seconds_unmounted") else { continue };
            let words = same_cell(row, experiment, parameters);
            let of = all.iter_mut().find(|other| other.words == words && other.parameters == parameters);
            let of = match of {
                Some(of) => of,
                None => {
                    all.push(Repeated { words, parameters, measured: Vec::new() });
                    all.last_mut().expect("it was pushed")
                }
            };
            // What was taken from another experiment is the same measurement.
            match of.measured.iter_mut().find(|(_, on, other)| *on == machine && other == seconds) {
                Some((names, ..)) => names.push(experiment.name()),
                None => of.measured.push((vec![experiment.name()], machine, *seconds)),
            }
        }
    }
    all.retain(|one| one.measured.iter().any(|(_, machine, _)| *machine != one.measured[0].1));
    if all.is_empty() {
        return String::new();
    }
    let mut text = "The same cell on more than one machine (time until everything is home):\n\n".to_owned();
    for one in all {
        let of = |(names, machine, seconds): &(Vec<&str>, &str, Summary)| {
            let interval = seconds.interval().filter(|_| seconds.deviation > 0.0);
            let interval =
                interval.map(|one| format!(" ({} to {})", grouped(one.low), grouped(one.high))).unwrap_or_default();
            format!("{} s{interval}, {machine} ({})", grouped(seconds.mean), names.join(", "))
        };
        let _ = writeln!(text, "* {}: {}", one.words, one.measured.iter().map(of).collect::<Vec<_>>().join("; "));
    }
    text.push('\n');
    text
}

/// A cell in words that are the same in every experiment that has it: a length of the journal may be a parameter there, or the usual one.
fn same_cell(row: &SummaryRow, experiment: &Experiment, parameters: &Parameters) -> String {
    let group = &row.group;
    let parameter = experiment.parameter.as_ref().map(|(name, _)| name.as_str());
    let journal = configured_journal_mib(group, parameters.scale, parameter);
    let guests = if group.guests == 1 { "1 guest".to_owned() } else { format!("{} guests", group.guests) };
    let other = match parameter {
        None | Some("transaction_mib" | "journal_mib") => String::new(),
        Some(name) => format!(", {name} {}", group.parameter),
    };
    format!("{}, {}, {guests}, {}, a journal of {journal} MiB{other}", group.workload, group.mode, group.disk)
}

/// Under which conditions the figures were measured: sizes, clocks, constants, machine and program of each, those that have all in common together.
fn conditions(judged: &[Judged<'_>]) -> String {
    let mut all: Vec<(String, Vec<&str>)> = Vec::new();
    for one in judged.iter().filter(|one| !one.verdicts.is_empty()) {
        let name = one.experiment.map_or(one.results.id.as_str(), Experiment::name);
        let words = one.results.declared(one.experiment).words;
        match all.iter_mut().find(|(other, _)| *other == words) {
            Some((_, names)) => names.push(name),
            None => all.push((words, vec![name])),
        }
    }
    let mut text = "Measured with:\n\n".to_owned();
    for (words, names) in all {
        let _ = writeln!(text, "* {}: {words}", names.join(", "));
    }
    text.push('\n');
    text
}

/// Each cell, with what tells it from the others and, of times, what it was bound by.
fn here(verdict: &Verdict) -> String {
    if verdict.measured().next().is_none() {
        return "–".to_owned();
    }
    let cells = verdict.measured().map(|cell| {
        let place = cell.place(&verdict.cells);
        let place = if place.is_empty() { place } else { format!("{place}: ") };
        let bound = cell.bound_in_short(verdict).map(|bound| format!(" [{bound}]")).unwrap_or_default();
        format!("{place}{}{bound}", cell.ours_in_short(verdict))
    });
    cells.collect::<Vec<_>>().join("; ")
}

/// The verdict, and why what is void is.
fn word(verdict: &Verdict) -> String {
    let mut reasons: Vec<&str> = Vec::new();
    for reason in verdict.cells.iter().filter_map(|cell| cell.reason.as_deref()) {
        if !reasons.contains(&reason) && reason != ONCE {
            reasons.push(reason);
        }
    }
    let reason = reasons.first().map(|reason| format!(" ({reason})")).unwrap_or_default();
    format!("{}{reason}", verdict.tally())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue;
    use crate::results::read_all;
    use std::path::Path;

    /// Where the page says that its tables begin and end.
    const BEGIN: &str = "<!-- amberlog lab table docs/results -->\n";
    const END: &str = "<!-- end -->";

    #[test]
    fn the_page_has_the_tables_of_the_kept_results() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let page = std::fs::read_to_string(root.join("docs/papers.md")).unwrap();
        let (_, rest) = page.split_once(BEGIN).expect("the page has the place");
        let (found, _) = rest.split_once(END).expect("and its end");
        let results = read_all(&root.join("docs/results")).unwrap();
        let made = table(&results, &catalogue::all_in(&root.join("docs/results")).unwrap());
        assert!(made.lines().count() > 60, "{made}");
        assert_eq!(found, made, "run 'amberlog lab table docs/results' and put its output there");
    }

    /// A referee found a scale that was told once, for figures of several.
    #[test]
    fn each_figure_says_its_scale_clocks_machine_and_program() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let results = read_all(&root.join("docs/results")).unwrap();
        let catalogue = catalogue::all_in(&root.join("docs/results")).unwrap();
        let made = table(&results, &catalogue);
        for one in &results {
            let experiment = catalogue.iter().find(|experiment| experiment.id == one.id).unwrap();
            if experiment.claims.is_empty() {
                continue;
            }
            let name = experiment.name();
            let declared = one.declared(Some(experiment));
            let is_said = |line: &str| line.starts_with("* ") && line.contains(name) && line.ends_with(&declared.words);
            assert!(made.lines().any(is_said), "{}: {}", one.id, declared.words);
            assert!(declared.words.contains(&one.commit) && declared.words.contains(&one.machine["processor"]));
        }
        assert!(made.contains(" [drive]"), "what bounds a cell is said with it");
        // A referee found the same cell at 9.29 s in one figure and at 14.87 and 15.80 s in two others, and no word of it.
        let (_, same) = made.split_once("The same cell on more than one machine").expect("it is said");
        let line =
            same.lines().find(|line| line.starts_with("* postmark, vma, 1 guest, st336753lw, a journal of 128 MiB: "));
        let figures = ["9.24 s", "AMD EPYC (Figure 9)", "14.87 s", "(Figure 12)", "15.8 s", "(Figure 17, Figure 18)"];
        assert!(figures.iter().all(|part| line.unwrap_or_default().contains(part)), "{line:?}");
    }

    /// A referee found the first table without what had failed.
    #[test]
    fn nothing_is_left_out_because_of_how_it_fared() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let catalogue = catalogue::all().unwrap();
        let made = table(&read_all(&root.join("docs/results")).unwrap(), &catalogue);
        let six =
            ["iozone_write", "iozone_rewrite", "iozone_random_write", "njs_postmark", "njs_fileserver", "njs_varmail"];
        for load in six {
            assert!(made.contains(&format!("nvm against tmpfs, {load}")), "NJS, Figure 8: {load}");
        }
        for claim in [
            "vma against ordered",
            "vma against writeback",
            "remote-journal against bound",
            "runs with corrupted records: vma",
        ] {
            assert!(made.contains(claim), "{claim}");
        }
        let figure_19 = made.split("Figure 19").nth(1).unwrap_or_default();
        assert!(
            figure_19.contains("runs with corrupted records: journal | none"),
            "the paper's own metric comes first: {figure_19}"
        );
    }
}
