//! One experiment: what the paper says, what differs, plots, verdicts, what bound its cells, all numbers, and how to run it again.

use super::claims::{cells, class};
use super::first::tone;
use super::heading;
use super::place::place;
use super::plots::plots;
use crate::binding::binding;
use crate::catalogue::iterations_asked;
use crate::fields::grouped;
use crate::measured::SummaryRow;
use crate::paper::Judged;
use crate::results::Results;
use maud::{Markup, html};

pub(super) fn section(one: &Judged<'_>) -> Markup {
    let results = one.results;
    let text = |heading: &str| {
        let sections = one.experiment.map(|experiment| experiment.sections.as_slice()).unwrap_or_default();
        sections.iter().find(|(name, _)| name == heading).map_or("", |(_, text)| text.as_str())
    };
    let failed: usize = results.rows.iter().map(|row| row.failed).sum();
    let failed_before: u32 = results.rows.iter().map(|row| row.failed_before).sum();
    html! {
        section id=(results.id) {
            h3 { (heading(one)) " " a.soft href=(format!("#{}", results.id)) { "#" } }
            p.soft { b { "Measured with: " } (results.declared(one.experiment).words) "; " (counts(one)) "." }
            @if !text("What differs").is_empty() { p { b { "What differs: " } (text("What differs")) } }
            (plots(one))
            @if !one.verdicts.is_empty() {
                @let rows: Vec<(String, Vec<Markup>)> = one.verdicts.iter().map(|verdict| {
                    let kind = class(tone(verdict.agreement));
                    (String::new(), vec![
                        html! { (verdict.label) },
                        html! { (verdict.paper) },
                        cells(verdict),
                        html! { b class=(kind) { (verdict.tally()) } },
                    ])
                }).collect();
                (charts::table(&["claim", "paper", "here, each cell (95 %)", "verdict"], &rows))
            }
            @for part in ["What we found", "The paper", "Here"] {
                @if !text(part).is_empty() { p { b { (part) ": " } (text(part)) } }
            }
            @if failed > 0 {
                p.note { (failed) " cells failed and are in no mean; their consoles are beside the raw results." }
            }
            @if failed_before > 0 {
                p.note { (failed_before) " attempts failed, are kept in " code { "failed" } " beside the raw results, and were made again." }
            }
            (numbers(one))
            p.soft { "Seed " (results.parameters.seed) "; " (machine(results)) "." }
            // Today's texts may have other cells.
            p { "Again, with the program of " code { (results.commit.get(..12).unwrap_or(&results.commit)) } ": " code { (results.command(one.experiment)) } }
        }
    }
}

fn counts(one: &Judged<'_>) -> String {
    let rows = || one.results.rows.iter().map(|row| row.count);
    let counts = match (rows().min(), rows().max()) {
        (Some(fewest), Some(most)) if fewest == most => format!("n = {fewest}"),
        (Some(fewest), Some(most)) => format!("n = {fewest} to {most}"),
        _ => return "nothing was measured".to_owned(),
    };
    match one.results.rows.iter().filter(|row| is_few(one, row)).count() {
        0 => counts,
        few => format!("{counts}, too small in {few} of {} groups", one.results.rows.len()),
    }
}

/// Whether a group was measured less often than it is to be.
fn is_few(one: &Judged<'_>, row: &SummaryRow) -> bool {
    let guests = row.group.guests;
    let asked = one.experiment.map_or_else(|| iterations_asked(guests), |experiment| experiment.asked(guests));
    row.count < usize::try_from(asked).unwrap_or(usize::MAX)
}

fn machine(results: &Results) -> String {
    results.machine.iter().map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
}

/// Each cell: what it was bound by, and its numbers with their intervals.
fn numbers(one: &Judged<'_>) -> Markup {
    let results = one.results;
    let plotted = one.experiment.map_or("seconds_unmounted", |experiment| experiment.plot.as_str());
    let parameter = one.experiment.and_then(|experiment| experiment.parameter.as_ref()).map(|(name, _)| name.as_str());
    let mut columns: Vec<&str> = plotted.split_whitespace().collect();
    let usual = [
        "seconds_unmounted",
        "seconds",
        "seconds_unsynced",
        "bytes_to_storage",
        "journal_bytes_received",
        "flushes_to_storage",
        "transactions",
        "pages_copied",
        "pages_protected",
        "cow_faults",
        "protection_percent",
        "fault_wait_percent",
    ];
    for column in usual {
        if !columns.contains(&column) && results.rows.iter().any(|row| row.fields.contains_key(column)) {
            columns.push(column);
        }
    }
    let names: Vec<String> = columns.iter().map(|column| column.replace('_', " ")).collect();
    let mut header = vec!["where", "mode", "n", "bound by"];
    header.extend(names.iter().map(String::as_str));
    let all: Vec<&SummaryRow> = results.rows.iter().collect();
    let rows: Vec<(String, Vec<Markup>)> = results
        .rows
        .iter()
        .map(|row| {
            let binding = binding(row);
            let mut cells = vec![
                html! { (place(&row.group, &all, parameter)) },
                html! { (row.group.mode) },
                html! { (row.count) @if is_few(one, row) { ", too small" } },
                html! { (binding.bound.name()) span.soft { " " (binding.words()) } },
            ];
            cells.extend(columns.iter().map(|column| value(row, column)));
            (String::new(), cells)
        })
        .collect();
    html! { details { summary { "All numbers, and what each cell was bound by" } (charts::table(&header, &rows)) } }
}

fn value(row: &SummaryRow, column: &str) -> Markup {
    html! {
        @if let Some(value) = row.fields.get(column) {
            (grouped(value.mean))
            @if let Some(interval) = value.interval().filter(|_| value.deviation > 0.0) {
                span.soft { " ± " (grouped((interval.high - interval.low) / 2.0)) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Group, Mode};
    use crate::measured::Parameters;
    use crate::results::{Declared, SCHEMA};
    use crate::statistics::Summary;
    use std::collections::BTreeMap;

    /// An auditor found a figure's "vma" that had copied every page, and no word of it in the figure's table.
    #[test]
    fn a_table_says_what_was_copied_and_what_was_retained() {
        let group =
            Group { disk: "none".into(), parameter: 0, guests: 1, workload: "rnd_write".into(), mode: Mode::Vma };
        let of = |name: &str, value: f64| (name.to_owned(), Summary { mean: value, deviation: 0.0, count: 5 });
        let fields = BTreeMap::from([of("seconds", 4.5), of("pages_copied", 31_450.0), of("pages_protected", 0.0)]);
        let row = SummaryRow { group, count: 5, failed: 0, failed_before: 0, sources: Default::default(), fields };
        let results = Results {
            schema: SCHEMA,
            id: "spe2012-fig07".into(),
            title: "rnd_write".into(),
            commit: "0123456789ab".into(),
            machine: BTreeMap::new(),
            command: String::new(),
            ended: 0,
            parameters: Parameters::for_tests(),
            declared: Declared::default(),
            rows: vec![row],
            curves: Vec::new(),
            verdicts: Vec::new(),
            raw: "raw".into(),
        };
        let experiment = crate::catalogue::select(&["spe2012-fig07".to_owned()]).unwrap().remove(0);
        let one = Judged { results: &results, experiment: Some(&experiment), verdicts: Vec::new() };
        let table = numbers(&one).into_string();
        assert!(table.contains("pages copied") && table.contains("pages protected"), "{table}");
        assert!(table.contains("31,450"), "{table}");
    }
}
