//! One self-contained page: for each experiment our plot beside the paper's numbers, a sentence on each claim, the
//! numbers, what differs, and the command that reruns it. No scripts, no fonts, nothing fetched.

use crate::catalogue::{Experiment, Kind};
use crate::cell::Group;
use crate::claim::{Agreement, field_words, grouped};
use crate::error::{FileContext, Result};
use crate::plot::{bars, curves, escaped, key};
use crate::results::{Results, SummaryRow, read_all};
use crate::statistics::Summary;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Okabe and Ito's colours, which colour-blind readers can tell apart.
const STYLE: &str = "
:root{--bg:#fff;--fg:#1c1c1c;--soft:#555;--grid:#ddd;--hatch:#ffffffb0;--good:#00664d;--bad:#a33c00;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#d55e00;--c4:#cc79a7;--c5:#56b4e9;--c6:#7a7a7a;--c7:#b8a900;--c8:#8a5a2b}
@media (prefers-color-scheme:dark){:root{--bg:#16181b;--fg:#e8e8e8;--soft:#a8a8a8;--grid:#3a3d42;--hatch:#16181bb0;--good:#4fd0a8;--bad:#ff9a60;--c0:#4aa8e0;--c1:#f0b030;--c2:#2fc79b;--c3:#f0803c;--c4:#e09cc4;--c5:#8fd0f5;--c6:#a0a0a0;--c7:#f0e442;--c8:#c89a6a}}
@media print{:root{--bg:#fff;--fg:#000;--soft:#444;--grid:#ccc;--hatch:#ffffffc0;--good:#000;--bad:#000;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#d55e00;--c4:#cc79a7;--c5:#56b4e9;--c6:#7a7a7a;--c7:#b8a900;--c8:#8a5a2b}figure,tr{break-inside:avoid}h2,h3{break-after:avoid}thead{display:table-header-group}details>*{display:block}svg.plot{max-width:520px}body{max-width:none}}
*{box-sizing:border-box}
body{background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif;max-width:1320px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.15em;margin:2em 0 .3em;border-top:1px solid var(--grid);padding-top:.8em}h3{font-size:.95em;margin:.8em 0 .1em}
p{margin:.25em 0 .6em;max-width:78em}.soft{color:var(--soft)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:.5em 1.5em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88em;margin:.4em 0}
th,td{padding:.2em .7em;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}th:first-child,td:first-child{text-align:left}
th{color:var(--soft);font-weight:600}#claims td:nth-child(2),#claims th:nth-child(2){text-align:left}td.text{white-space:normal;text-align:left;min-width:26em}
.agrees{color:var(--good);font-weight:600}.differs{color:var(--bad);font-weight:600}
figure{margin:0 0 .6em}svg.plot{width:100%;height:auto;max-width:720px;display:block}svg text{fill:var(--fg);font:11px system-ui,sans-serif}svg .title{font-size:12px;font-weight:600}svg .tick{fill:var(--soft)}svg .value{font-size:9.5px}
.grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}.whisker{stroke:var(--fg);stroke-width:1.2;fill:none}.bar{stroke:var(--fg);stroke-width:.5}.hatch{stroke:var(--hatch);stroke-width:1.4;fill:none}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}.f6{fill:var(--c6)}.f7{fill:var(--c7)}.f8{fill:var(--c8)}
.curve{fill:none;stroke-width:1.8}.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}.s6{stroke:var(--c6)}.s7{stroke:var(--c7)}.s8{stroke:var(--c8)}
.key{display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:.9em;margin:.2em 0}.key span{display:inline-flex;align-items:center;gap:.4em}.key svg{width:30px;height:12px}
code{background:color-mix(in srgb,var(--grid) 45%,transparent);padding:.1em .35em;border-radius:3px;font-size:.92em;overflow-wrap:anywhere}
.note{border-left:4px solid var(--c1);padding:.2em .8em}details{margin:.4em 0}summary{cursor:pointer;color:var(--soft)}
";

/// Writes `index.html` into a directory of results; gives its path.
///
/// # Errors
/// When the directory holds no results, or cannot be written to.
pub fn write(directory: &Path, catalogue: &[Experiment]) -> Result<PathBuf> {
    let results = read_all(directory)?;
    let path = directory.join("index.html");
    std::fs::write(&path, page(&results, catalogue)).at("write", &path)?;
    Ok(path)
}

/// The page.
pub fn page(all: &[Results], catalogue: &[Experiment]) -> String {
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>amberlog lab</title><style>{STYLE}</style></head><body>\
         <h1>amberlog lab: the papers' experiments, run again</h1>"
    );
    html.push_str(&summary(all));
    for results in all {
        let experiment = catalogue.iter().find(|experiment| experiment.id == results.id);
        html.push_str(&section(results, experiment));
    }
    html.push_str(&not_run(all, catalogue));
    html + "</body></html>\n"
}

fn summary(all: &[Results]) -> String {
    let verdicts = || all.iter().flat_map(|results| &results.verdicts);
    let count = |wanted: &[Agreement]| verdicts().filter(|verdict| wanted.contains(&verdict.agreement)).count();
    let mut html = format!(
        "<p>{} experiments; of {} numbers of the papers' text, ours agree with {} (within 10 points, or within the bound), go \
         beyond {} in the papers' favour, fall short of {}, differ from {}; {} were not measured, or not judged.</p>",
        all.len(),
        verdicts().count(),
        count(&[Agreement::Agrees]),
        count(&[Agreement::More]),
        count(&[Agreement::Less]),
        count(&[Agreement::Differs]),
        count(&[Agreement::Open])
    );
    if all.iter().any(|results| results.parameters.quick) {
        html.push_str(
            "<p class=\"note\">Quick runs are among these: their counters mean something, their times do not.</p>",
        );
    }
    html.push_str("<div class=\"wide\"><table id=\"claims\"><thead><tr><th>experiment</th><th>claim</th><th>paper</th><th>here</th><th></th></tr></thead><tbody>");
    for results in all {
        for verdict in &results.verdicts {
            let ours = verdict.ours.map_or_else(|| "–".to_owned(), grouped);
            let (class, word) = judged(verdict.agreement);
            let _ = write!(
                html,
                "<tr><td><a href=\"#{0}\">{0}</a></td><td>{1}</td><td>{2} {3}</td><td>{ours} {3}</td><td class=\"{class}\">{word}</td></tr>",
                escaped(&results.id),
                escaped(&verdict.label),
                grouped(verdict.paper),
                escaped(&verdict.unit)
            );
        }
    }
    html + "</tbody></table></div>"
}

fn judged(agreement: Agreement) -> (&'static str, &'static str) {
    match agreement {
        Agreement::Agrees => ("agrees", "agrees"),
        Agreement::More => ("agrees", "more"),
        Agreement::Less => ("differs", "less"),
        Agreement::Differs => ("differs", "differs"),
        Agreement::Open => ("soft", "not judged"),
    }
}

fn section(results: &Results, experiment: Option<&Experiment>) -> String {
    let mut html = format!("<section id=\"{0}\"><h2>{0}: {1}</h2>", escaped(&results.id), escaped(&results.title));
    let text = |heading: &str| {
        let sections = experiment.map(|experiment| experiment.sections.as_slice()).unwrap_or_default();
        sections.iter().find(|(name, _)| name == heading).map(|(_, text)| text.as_str())
    };
    if let Some(text) = text("The paper") {
        let _ = write!(html, "<p>{}</p>", escaped(text));
    }
    let plotted = experiment.map_or("seconds", |experiment| experiment.plot.as_str());
    let fields: Vec<&str> = plotted.split_whitespace().collect();
    let parameter = experiment.and_then(|experiment| experiment.parameter.as_ref()).map(|(name, _)| name.as_str());
    html.push_str("<div class=\"pair\"><div>");
    for field in &fields {
        html.push_str(&ours(results, field, parameter));
    }
    html.push_str(&over_time(results));
    html.push_str("</div><div>");
    html.push_str(&beside(results));
    html.push_str("</div></div>");
    for verdict in &results.verdicts {
        let (class, word) = judged(verdict.agreement);
        let _ = write!(html, "<p><span class=\"{class}\">{word}</span>: {}</p>", escaped(&verdict.sentence));
    }
    for heading in ["Here", "What differs", "What we found"] {
        if let Some(text) = text(heading) {
            let _ = write!(html, "<h3>{heading}</h3><p>{}</p>", escaped(text));
        }
    }
    let failed: usize = results.rows.iter().map(|row| row.failed).sum();
    if failed > 0 {
        let _ = write!(
            html,
            "<p class=\"note\">{failed} cells failed and are in no mean; their consoles are beside the raw results.</p>"
        );
    }
    html.push_str(&numbers(results, &fields, parameter));
    let parameters = &results.parameters;
    let machine: Vec<String> = results.machine.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let _ = write!(
        html,
        "<p class=\"soft\">Sizes {} × the paper's, disk time × {}, guests of {} MiB, {}, seed {}{}. Code {}; {}.</p><p>Again: <code>{}</code></p></section>",
        parameters.scale,
        parameters.time_scale,
        parameters.guest_mib,
        escaped(&parameters.file_system),
        parameters.seed,
        if parameters.quick { ", quick" } else { "" },
        escaped(&results.commit),
        escaped(&machine.join(", ")),
        escaped(&results.command)
    );
    html
}

/// What tells groups of bars apart, in words: everything but the mode that is not the same everywhere.
fn place(group: &Group, rows: &[SummaryRow], parameter: Option<&str>) -> String {
    let mut words = Vec::new();
    let varies = |of: fn(&Group) -> String| rows.iter().any(|row| of(&row.group) != of(group));
    if varies(|group| group.workload.clone()) {
        words.push(group.workload.clone());
    }
    if varies(|group| group.disk.clone()) {
        words.push(group.disk.clone());
    }
    if varies(|group| group.parameter.to_string()) {
        words.push(format!("{} {}", parameter.unwrap_or("").replace('_', " "), group.parameter).trim().to_owned());
    }
    if varies(|group| group.guests.to_string()) || words.is_empty() {
        words.push(if group.guests == 1 { "1 guest".to_owned() } else { format!("{} guests", group.guests) });
    }
    words.join(", ")
}

fn ours(results: &Results, field: &str, parameter: Option<&str>) -> String {
    let rows = &results.rows;
    let mut groups: Vec<String> = Vec::new();
    let mut series: Vec<String> = Vec::new();
    for row in rows.iter().filter(|row| row.fields.contains_key(field)) {
        let name = place(&row.group, rows, parameter);
        if !groups.contains(&name) {
            groups.push(name);
        }
        let mode = row.group.mode.name().to_owned();
        if !series.contains(&mode) {
            series.push(mode);
        }
    }
    if groups.is_empty() {
        return format!("<p class=\"soft\">{}: nothing was measured.</p>", escaped(field_words(field).0));
    }
    series.sort_by_key(|name| crate::cell::Mode::by_name(name));
    let mut values: Vec<Vec<Option<Summary>>> = vec![vec![None; series.len()]; groups.len()];
    for row in rows {
        let name = place(&row.group, rows, parameter);
        let at = groups.iter().position(|group| *group == name);
        let in_series = series.iter().position(|mode| mode == row.group.mode.name());
        if let (Some(g), Some(s), Some(value)) = (at, in_series, row.fields.get(field)) {
            values[g][s] = Some(*value);
        }
    }
    let (words, unit) = field_words(field);
    let title = if unit.is_empty() { format!("Here: {words}") } else { format!("Here: {words} ({unit})") };
    figure(&(key(&series) + &bars(&title, &groups, &series, &values)))
}

/// A plot with its key: never on two pages of a print.
fn figure(content: &str) -> String {
    format!("<figure>{content}</figure>")
}

/// What journals held over time, one plot for each field.
fn over_time(results: &Results) -> String {
    let fields: BTreeSet<&str> = results.curves.iter().map(|curve| curve.field.as_str()).collect();
    let mut html = String::new();
    for field in fields {
        let of = results.curves.iter().filter(|curve| curve.field == field);
        let series: Vec<_> =
            of.map(|curve| (place(&curve.group, &results.rows, None), curve.points.as_slice())).collect();
        let (words, unit) = field_words(field);
        html += &figure(&curves(&format!("Here, over time: {words} ({unit})"), &series));
    }
    html
}

/// The paper's numbers beside ours, for what has the same unit.
fn beside(results: &Results) -> String {
    let series = ["paper".to_owned(), "here".to_owned()];
    let units: BTreeSet<&str> = results.verdicts.iter().map(|verdict| verdict.unit.as_str()).collect();
    let one = |value: f64| Summary { mean: value, deviation: 0.0, count: 1 };
    let mut html = String::new();
    for unit in units {
        let of: Vec<_> = results.verdicts.iter().filter(|verdict| verdict.unit == unit).collect();
        let groups: Vec<String> = of.iter().map(|verdict| verdict.label.clone()).collect();
        let values: Vec<_> = of.iter().map(|verdict| vec![Some(one(verdict.paper)), verdict.ours.map(one)]).collect();
        let title = if unit == "%" {
            "The paper's numbers and ours (% less)".to_owned()
        } else {
            format!("The paper's numbers and ours ({unit})")
        };
        html += &figure(&(key(&series) + &bars(&title, &groups, &series, &values)));
    }
    if html.is_empty() { "<p class=\"soft\">The paper's text gives no numbers for this.</p>".to_owned() } else { html }
}

fn numbers(results: &Results, fields: &[&str], parameter: Option<&str>) -> String {
    let mut columns: Vec<&str> = fields.to_vec();
    for field in
        ["seconds", "bytes_to_storage", "journal_bytes_received", "flushes_to_storage", "transactions", "cow_faults"]
    {
        if !columns.contains(&field) && results.rows.iter().any(|row| row.fields.contains_key(field)) {
            columns.push(field);
        }
    }
    let mut html = "<details><summary>All numbers</summary><div class=\"wide\"><table><thead><tr><th>where</th><th>mode</th><th>n</th>".to_owned();
    for column in &columns {
        let _ = write!(html, "<th>{}</th>", escaped(&column.replace('_', " ")));
    }
    html.push_str("</tr></thead><tbody>");
    for row in &results.rows {
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{}</td><td>{}</td>",
            escaped(&place(&row.group, &results.rows, parameter)),
            row.group.mode,
            row.count
        );
        for column in &columns {
            let text = row.fields.get(*column).map_or_else(String::new, |value| {
                let deviation =
                    if value.count > 1 { format!(" ± {}", grouped(value.deviation)) } else { String::new() };
                grouped(value.mean) + &deviation
            });
            let _ = write!(html, "<td>{text}</td>");
        }
        html.push_str("</tr>");
    }
    html + "</tbody></table></div></details>"
}

fn not_run(all: &[Results], catalogue: &[Experiment]) -> String {
    let rows: String = catalogue
        .iter()
        .filter(|experiment| all.iter().all(|results| results.id != experiment.id))
        .map(|experiment| {
            let why = if experiment.kind == Kind::Missing {
                experiment.needs.clone()
            } else {
                format!("not run; amberlog lab run {}", experiment.id)
            };
            format!(
                "<tr><td>{}</td><td class=\"text\">{}</td><td class=\"text\">{}</td></tr>",
                escaped(&experiment.id),
                escaped(&experiment.title),
                escaped(&why)
            )
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "<section><h2>Not on this page</h2><div class=\"wide\"><table><tbody>{rows}</tbody></table></div></section>"
    )
}
