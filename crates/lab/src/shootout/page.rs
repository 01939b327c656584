//! The shoot-out's page and its table: latency, speed, bytes to each medium, the host's processor, and what survives.

use super::Cell;
use super::kinds::{Death, Load};
use crate::catalogue::ITERATIONS_OF_A_PAPER as ITERATIONS;
use crate::fields::grouped;
use crate::report::sample;
use crate::statistics::Summary;
use charts::{Bar, Bars, Lines, Series, bars, key, lines};
use maud::{Markup, html};
use std::fmt::Write;

const COLUMNS: [(&str, &str); 12] = [
    ("p50_us", "p50, µs"),
    ("p99_us", "p99, µs"),
    ("p999_us", "p99.9, µs"),
    ("seconds", "seconds"),
    ("storage_bytes", "MB to storage"),
    ("storage_flushes", "flushes"),
    ("memory_bytes", "MB of host memory"),
    ("copied_percent", "% copied"),
    ("write_faults", "write faults"),
    ("nvm_bytes", "MB to NVM"),
    ("network_bytes", "MB over the network"),
    ("host_cpu_seconds", "host CPU, s"),
];

fn contenders(cells: &[Cell]) -> Vec<(String, String)> {
    let mut names: Vec<(String, String)> = Vec::new();
    for cell in cells {
        if !names.iter().any(|(name, _)| *name == cell.contender) {
            names.push((cell.contender.clone(), cell.conditions.platform.clone()));
        }
    }
    names
}

fn loads(cells: &[Cell]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let is_death = |name: &str| Death::ALL.iter().any(|death| death.name() == name);
    for cell in cells.iter().filter(|cell| !is_death(&cell.what)) {
        if !names.contains(&cell.what) {
            names.push(cell.what.clone());
        }
    }
    names
}

fn value(cells: &[Cell], contender: &str, what: &str, field: &str) -> Option<Summary> {
    let of = cells.iter().filter(|cell| cell.contender == contender && cell.what == what && cell.failure.is_none());
    Summary::of(&of.filter_map(|cell| cell.fields.get(field).copied()).collect::<Vec<_>>())
}

fn shown(field: &str, value: f64) -> String {
    if field.ends_with("_bytes") { grouped((value / 1e5).round() / 10.0) } else { grouped(value) }
}

fn survival(cells: &[Cell], contender: &str, death: Death) -> String {
    let cell = cells.iter().find(|cell| cell.contender == contender && cell.what == death.name());
    match cell {
        Some(Cell { failure: Some(failure), .. }) => format!("failed: {}", failure.lines().next().unwrap_or_default()),
        Some(cell) => cell.words.clone(),
        None => "not tried".to_owned(),
    }
}

/// Markdown: what survives, and a table for each load.
pub(super) fn table(cells: &[Cell]) -> String {
    let mut text = "| contender | guest dies | VMM dies | host dies | platform |\n|---|---|---|---|---|\n".to_owned();
    for (name, platform) in contenders(cells) {
        let deaths = Death::ALL.map(|death| survival(cells, &name, death)).join(" | ");
        let _ = writeln!(text, "| {name} | {deaths} | {platform} |");
    }
    for load in loads(cells) {
        let header: Vec<&str> = COLUMNS.iter().map(|(_, words)| *words).collect();
        let _ = writeln!(text, "\n| {load} | n | {} |\n|---|---|{}", header.join(" | "), "---|".repeat(COLUMNS.len()));
        for (name, _) in contenders(cells) {
            let count = value(cells, &name, &load, "seconds").map_or(0, |summary| summary.count);
            let row = COLUMNS.map(|(field, _)| {
                value(cells, &name, &load, field).map_or_else(String::new, |one| shown(field, one.mean))
            });
            let _ = writeln!(text, "| {name} | {count} | {} |", row.join(" | "));
        }
    }
    text
}

/// The page.
pub(super) fn page(cells: &[Cell], absent: &[String]) -> String {
    let names = contenders(cells);
    let looks: Vec<Series> =
        names.iter().enumerate().map(|(index, (name, _))| Series::nth(index, name.clone())).collect();
    let survivors: Vec<(String, Vec<Markup>)> = names
        .iter()
        .map(|(name, platform)| {
            let mut row = vec![html! { (name) }];
            row.extend(Death::ALL.map(|death| {
                let words = survival(cells, name, death);
                let class = if words.starts_with("everything") { "good" } else { "bad" };
                html! { span class=(class) { (words) } }
            }));
            row.push(html! { (platform) });
            (String::new(), row)
        })
        .collect();
    let quick = cells.iter().any(|cell| cell.conditions.quick);
    let flush = cells.first().map_or(0, |cell| cell.conditions.flush_us);
    let body = html! {
        h1 { "Where a journal can live: a shoot-out" }
        p { "The same guest and the same medium, a file whose flush takes " (flush) " µs; as much of fast memory for each that takes some. Each contender runs each load, and is killed in three ways while it acknowledges records one by one." }
        @if quick { p.note { "Quick cells: that they work is what is seen; times say nothing." } }
        @if !absent.is_empty() { p { "Left out: " (absent.join("; ")) "." } }
        h2 { "What survives" }
        (charts::table(&["contender", "guest dies", "VMM dies", "host dies", "platform"], &survivors))
        (key(&looks))
        @for load in loads(cells) { (of_load(cells, &load, &names, &looks)) }
    };
    charts::page("amberlog shoot-out", &body)
}

fn of_load(cells: &[Cell], load: &str, names: &[(String, String)], looks: &[Series]) -> Markup {
    let distributions: Vec<(Series, Vec<(f64, f64)>)> = names
        .iter()
        .zip(looks)
        .filter_map(|((name, _), look)| {
            let cell = cells
                .iter()
                .find(|cell| cell.contender == *name && cell.what == load && !cell.distribution.is_empty())?;
            Some((look.clone(), cell.distribution.iter().map(|(share, us)| (*us, *share)).collect()))
        })
        .collect();
    let series: Vec<(Series, &[(f64, f64)])> =
        distributions.iter().map(|(look, points)| (look.clone(), points.as_slice())).collect();
    let plot = |field: &str, words: &str| {
        let values = vec![
            names
                .iter()
                .map(|(name, _)| value(cells, name, load, field).map(|one| bar(field, &one)))
                .collect::<Vec<_>>(),
        ];
        let title = format!("{load}: {words}");
        let label =
            |value: f64| if field.ends_with("_bytes") { charts::short(value / 1e6) } else { charts::short(value) };
        bars(&Bars {
            title: &title,
            groups: &[load.to_owned()],
            series: looks,
            values: &values,
            marks: &[],
            ceiling: None,
            label: &label,
        })
    };
    let operation = Load::ALL.into_iter().find(|one| one.name() == load).map_or("operation", Load::operation);
    let header: Vec<&str> = ["contender", "n"].into_iter().chain(COLUMNS.iter().map(|(_, words)| *words)).collect();
    let rows: Vec<(String, Vec<Markup>)> = names
        .iter()
        .map(|(name, _)| {
            let count = value(cells, name, load, "seconds").map_or(0, |one| one.count);
            let is_few = sample(count, ITERATIONS) != charts::Sample::Enough;
            let mut row = vec![html! { (name) }, html! { (count) @if is_few { ", too small" } }];
            row.extend(COLUMNS.iter().map(
                |(field, _)| html! { @if let Some(one) = value(cells, name, load, field) { (shown(field, one.mean)) } },
            ));
            (String::new(), row)
        })
        .collect();
    html! {
        h2 { (load) }
        div.pair {
            @if !series.is_empty() {
                figure { (lines(&Lines { title: &format!("{load}: {operation}, share done within a time"), x_name: "µs", y_name: "per cent", is_logarithmic: true, names_peaks: false, series: &series })) }
            }
            @for (field, words) in [("p999_us", "p99.9, µs"), ("seconds", "seconds"), ("storage_bytes", "MB to storage"), ("host_cpu_seconds", "host CPU, s")] {
                figure { (plot(field, words)) }
            }
        }
        (charts::table(&header, &rows))
    }
}

fn bar(field: &str, value: &Summary) -> Bar {
    let interval = value.interval();
    Bar {
        value: value.mean,
        interval: interval.map(|one| (one.low, one.high)),
        sample: sample(value.count, ITERATIONS),
        words: format!("{}, n = {}", shown(field, value.mean), value.count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shootout::Conditions;
    use std::collections::BTreeMap;

    #[test]
    fn the_page_has_what_survives_and_every_load() {
        let cell = |contender: &str, what: &str, words: &str, failure: Option<&str>| Cell {
            contender: contender.into(),
            what: what.into(),
            iteration: 0,
            conditions: Conditions { quick: true, flush_us: 2000, platform: "tcg".into(), begins_clean: true },
            fields: BTreeMap::from([
                ("seconds".to_owned(), 1.5),
                ("storage_bytes".to_owned(), 2.0e6),
                ("p999_us".to_owned(), 9.0),
            ]),
            distribution: vec![(50.0, 100.0), (99.9, 4000.0)],
            words: words.into(),
            commit: String::new(),
            machine: String::new(),
            failure: failure.map(str::to_owned),
        };
        let cells = [
            cell("retain", "fsync", "", None),
            cell("retain", "host-dies", "12 of 40 lost", None),
            cell("retain", "vmm-dies", "everything", None),
            cell("xfs", "fsync", "", Some("it hung\nmore")),
        ];
        let html = page(&cells, &["f2fs: the guest's kernel has no f2fs".to_owned()]);
        for expected in
            ["12 of 40 lost", "class=\"good\">everything", "Left out: f2fs", "not tried", "<svg", "Quick cells"]
        {
            assert!(html.contains(expected), "{expected}: {html}");
        }
        let table = table(&cells);
        assert!(table.contains("| retain | not tried | everything | 12 of 40 lost | tcg |"), "{table}");
        assert!(table.contains("| xfs | 0 |"), "what failed has no numbers: {table}");
    }
}
