//! The tables of docs/papers.md: every claim of the papers beside ours, made from results, so that no claim there is older than what
//! it points at, and none is left out because of how it fared.

use crate::catalogue::Experiment;
use crate::paper::{self, Judged, Paper};
use crate::results::Results;
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
    }
    text
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
