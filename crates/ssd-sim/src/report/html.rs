//! One self-contained page of plots: no scripts, no fonts, nothing fetched. Colours are Okabe and Ito's, which
//! colour-blind readers can tell apart; the page follows the reader's light or dark setting and prints on white.

use super::LabelledReport;
use super::figures::{self, Line};
use super::svg::{bars, escaped, lines};
use super::table::{bytes, grouped, micros};
use crate::ftl::FtlKind;
use std::fmt::Write;

const STYLE: &str = "
:root{--bg:#ffffff;--fg:#1c1c1c;--soft:#5b5b5b;--grid:#dddddd;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#d55e00;--c4:#cc79a7;--c5:#56b4e9;--c6:#7a7a7a;--c7:#b8a900}
@media (prefers-color-scheme:dark){:root{--bg:#16181b;--fg:#e8e8e8;--soft:#a8a8a8;--grid:#3a3d42;--c0:#4aa8e0;--c1:#f0b030;--c2:#2fc79b;--c3:#f0803c;--c4:#e09cc4;--c5:#8fd0f5;--c6:#a0a0a0;--c7:#f0e442}}
@media print{:root{--bg:#ffffff;--fg:#000000;--soft:#444444;--grid:#cccccc;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#d55e00;--c4:#cc79a7;--c5:#56b4e9;--c6:#7a7a7a;--c7:#b8a900}section{break-inside:avoid}}
*{box-sizing:border-box}
body{background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.12em;margin:1.8em 0 .3em}h3{font-size:1em;margin:1em 0 0}p{color:var(--soft);margin:.2em 0 .6em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.84em}
th,td{padding:.25em .45em;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}th:first-child,td:first-child{text-align:left}
th{color:var(--soft);font-weight:600}
svg{width:100%;height:auto;max-width:900px;display:block}svg text{fill:var(--fg);font:11px system-ui,sans-serif}svg .tick{fill:var(--soft)}svg .value{font-size:10px}
.grid{stroke:var(--grid);stroke-width:1}polyline{fill:none;stroke-width:2}
.key{display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:.9em;margin:.2em 0}.key span{display:inline-flex;align-items:center;gap:.4em}.key svg{width:30px;height:12px}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}.f6{fill:var(--c6)}.f7{fill:var(--c7)}
.l0{stroke:var(--c0)}.l1{stroke:var(--c1);stroke-dasharray:7 3}.l2{stroke:var(--c2);stroke-dasharray:2 3}.l3{stroke:var(--c3);stroke-dasharray:9 3 2 3}
.l4{stroke:var(--c4);stroke-dasharray:12 4}.l5{stroke:var(--c5);stroke-dasharray:4 2}.l6{stroke:var(--c6)}.l7{stroke:var(--c7);stroke-dasharray:1 1}
";

/// More series than there are colours are told in the table only.
const SERIES_MAX: usize = 8;

fn key(names: &[String], as_lines: bool) -> String {
    let mut html = String::from("<div class=\"key\">");
    for (s, name) in names.iter().enumerate() {
        let mark = if as_lines {
            format!("<polyline class=\"l{s}\" points=\"0,6 30,6\"/>")
        } else {
            format!("<rect class=\"f{s}\" width=\"30\" height=\"12\"/>")
        };
        let _ = write!(html, "<span><svg viewBox=\"0 0 30 12\">{mark}</svg>{}</span>", escaped(name));
    }
    html + "</div>"
}

fn section(html: &mut String, title: &str, text: &str, body: &str) {
    let _ = write!(html, "<section><h2>{}</h2><p>{}</p>{body}</section>", escaped(title), escaped(text));
}

fn name(report: &LabelledReport) -> String {
    match &report.mode {
        Some(mode) => format!("{} / {mode}", report.workload),
        None => report.workload.clone(),
    }
}

fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let cells = |cells: Vec<String>, tag: &str| {
        cells.iter().map(|c| format!("<{tag}>{}</{tag}>", escaped(c))).collect::<String>()
    };
    let head = cells(header.iter().map(|h| h.to_string()).collect(), "th");
    let body: String = rows.iter().map(|r| format!("<tr>{}</tr>", cells(r.clone(), "td"))).collect();
    format!("<div class=\"wide\"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")
}

/// The page.
pub fn page(reports: &[LabelledReport], figure_lines: &[Line]) -> String {
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>SSD simulation</title><style>{STYLE}</style></head><body><h1>SSD simulation</h1>"
    );
    if let Some(first) = reports.first() {
        let (g, t) = (first.report.options.geometry, first.report.options.timing);
        let text = format!(
            "{} logical and {} extra blocks of {} pages of {} bytes ({}); page read {} µs, page write {} µs, block erase {} µs.",
            grouped(g.blocks.into()),
            grouped(g.extra_blocks.into()),
            g.pages_per_block,
            g.page_bytes,
            bytes(g.logical_bytes() as f64),
            t.read_us,
            t.write_us,
            t.erase_us
        );
        let _ = write!(html, "<p>{}</p>", escaped(&text));
    }
    // The paper's figures have many runs, and the figures say more than the table.
    if figure_lines.is_empty() {
        runs(&mut html, reports);
        comparisons(&mut html, reports);
    } else {
        paper_figures(&mut html, figure_lines);
        runs(&mut html, reports);
    }
    distributions(&mut html, reports);
    html + "</body></html>\n"
}

/// The table of all runs.
fn runs(html: &mut String, reports: &[LabelledReport]) {
    let rows: Vec<Vec<String>> = reports
        .iter()
        .map(|l| {
            let r = &l.report;
            vec![
                name(l),
                r.ftl.name().into(),
                grouped(r.requests),
                bytes(r.traffic.bytes_written as f64),
                grouped(r.erases),
                micros(r.gc.time_us as f64),
                format!("{:.2}", r.write_amplification),
                format!("{} / {} / {}", grouped(r.merges.switch), grouped(r.merges.partial), grouped(r.merges.full)),
                micros(r.service.p99_us as f64),
                format!("{:.3}", r.wear.evenness),
            ]
        })
        .collect();
    let header = [
        "trace",
        "FTL",
        "requests",
        "written",
        "erases",
        "GC overhead",
        "write ampl.",
        "merges s / p / f",
        "p99 service",
        "evenness",
    ];
    section(
        html,
        "Runs",
        "One row per trace and FTL. Evenness is mean over maximum erases per block.",
        &table(&header, &rows),
    );
}

/// Bars over traces, one colour per FTL.
fn comparisons(html: &mut String, reports: &[LabelledReport]) {
    let mut traces: Vec<String> = Vec::new();
    for report in reports {
        if !traces.contains(&name(report)) {
            traces.push(name(report));
        }
    }
    let ftls: Vec<FtlKind> = FtlKind::ALL.into_iter().filter(|&f| reports.iter().any(|r| r.report.ftl == f)).collect();
    let names: Vec<String> = ftls.iter().map(|f| f.name().to_owned()).collect();
    type Value<'a> = &'a dyn Fn(&LabelledReport) -> f64;
    type Show<'a> = &'a dyn Fn(f64) -> String;
    let mut chart = |title: &str, text: &str, value: Value, show: Show| {
        let find =
            |trace: &String, ftl: FtlKind| reports.iter().find(|r| name(r) == *trace && r.report.ftl == ftl).map(value);
        let values: Vec<Vec<Option<f64>>> = traces.iter().map(|t| ftls.iter().map(|&f| find(t, f)).collect()).collect();
        section(html, title, text, &format!("{}{}", key(&names, false), bars(&traces, &names, &values, show)));
    };
    chart("Erases", "Blocks erased; fewer is a longer life.", &|r| r.report.erases as f64, &|v| grouped(v as u64));
    chart(
        "Garbage collection overhead",
        "Copies × (read + write) + erases × erase time, in seconds.",
        &|r| r.report.gc.time_us as f64 / 1e6,
        &|v| format!("{v:.2} s"),
    );
    chart(
        "Write amplification",
        "Flash pages programmed per page the host wrote.",
        &|r| r.report.write_amplification,
        &|v| format!("{v:.2}"),
    );
}

/// Figures 2 to 5: bars over workloads (and FTLs), one colour per mode.
fn paper_figures(html: &mut String, figure_lines: &[Line]) {
    let names: Vec<String> = figures::MODES.iter().map(|m| m.to_string()).collect();
    for chart in figures::CHARTS {
        let (figure, writes_only) = chart;
        let of: Vec<&Line> = figure_lines.iter().filter(|l| (l.figure, l.writes_only) == chart).collect();
        if of.is_empty() {
            continue;
        }
        let rows: Vec<Vec<String>> = of
            .iter()
            .map(|l| {
                let mut row = vec![l.workload.clone()];
                row.extend(l.ftl.map(|f| f.name().to_owned()));
                row.extend(l.values.iter().map(|v| v.map_or("-".into(), |v| figures::shown(figure, v))));
                row.push(l.change_percent.map_or("-".into(), |c| format!("{c:+.1} %")));
                row.push(format!("{:+.1} to {:+.1} %", l.paper_percent.1, l.paper_percent.0));
                row
            })
            .collect();
        let mut body = key(&names, false);
        let (unit, unit_text) = match figure {
            3 => (f64::from(1 << 20), "MiB. "),
            5 => (1e6, "Seconds. "),
            _ => (1.0, ""),
        };
        // A chart per FTL keeps the groups few.
        let mut ftls: Vec<Option<FtlKind>> = Vec::new();
        for line in &of {
            if !ftls.contains(&line.ftl) {
                ftls.push(line.ftl);
            }
        }
        for ftl in ftls {
            let lines: Vec<&&Line> = of.iter().filter(|l| l.ftl == ftl).collect();
            let groups: Vec<String> = lines.iter().map(|l| l.workload.clone()).collect();
            let values: Vec<Vec<Option<f64>>> =
                lines.iter().map(|l| l.values.iter().map(|v| v.map(|v| v / unit)).collect()).collect();
            if let Some(ftl) = ftl {
                let _ = write!(body, "<h3>{}</h3>", ftl.name());
            }
            let show = |v: f64| figures::shown(figure, v * unit);
            body.push_str(&bars(&groups, &names, &values, &show));
        }
        let mut header = vec!["workload", "FTL"];
        if figure <= 3 {
            header.pop();
        }
        header.extend(figures::MODES);
        header.extend(["vma against journal", "paper"]);
        body.push_str(&table(&header, &rows));
        section(
            html,
            figures::title(figure, writes_only),
            &format!("{unit_text}Per journaling mode, as in the 2010 paper."),
            &body,
        );
    }
}

/// Lines: response times, wear, and the run's course.
fn distributions(html: &mut String, reports: &[LabelledReport]) {
    let shown = &reports[..reports.len().min(SERIES_MAX)];
    let names: Vec<String> = shown.iter().map(|r| format!("{} {}", name(r), r.report.ftl.name())).collect();
    let left_out = match reports.len().saturating_sub(SERIES_MAX) {
        0 => String::new(),
        more => format!(" The first {SERIES_MAX} runs; {more} more are in the table."),
    };
    let mut chart = |title: &str, text: &str, x: &str, y: &str, log: bool, series: Vec<Vec<(f64, f64)>>| {
        if series.iter().any(|s| s.len() > 1) {
            section(
                html,
                title,
                &format!("{text}{left_out}"),
                &format!("{}{}", key(&names, true), lines(&series, x, y, log)),
            );
        }
    };
    let of = |f: &dyn Fn(&LabelledReport) -> Vec<(f64, f64)>| shown.iter().map(f).collect::<Vec<_>>();
    chart(
        "Response times",
        "Share of requests answered within a time, waiting included.",
        "µs",
        "share of requests",
        true,
        of(&|r| r.report.response_distribution.iter().map(|&(us, share)| (us as f64, share)).collect()),
    );
    chart(
        "Wear",
        "Share of blocks erased at most so often.",
        "erases of a block",
        "share of blocks",
        false,
        of(&|r| {
            let all =
                r.report.wear.distribution.iter().map(|&(_, blocks)| u64::from(blocks)).sum::<u64>().max(1) as f64;
            let mut seen = 0u64;
            r.report
                .wear
                .distribution
                .iter()
                .map(|&(count, blocks)| {
                    seen += u64::from(blocks);
                    (f64::from(count), seen as f64 / all)
                })
                .collect()
        }),
    );
    chart(
        "Erases over the run",
        "Blocks erased so far.",
        "requests",
        "erases",
        false,
        of(&|r| r.report.course.iter().map(|p| (p.requests as f64, p.erases as f64)).collect()),
    );
    chart(
        "Write amplification over the run",
        "Of all that was written so far.",
        "requests",
        "write amplification",
        false,
        of(&|r| {
            r.report
                .course
                .iter()
                .filter(|p| p.host_pages_written > 0)
                .map(|p| (p.requests as f64, p.flash_writes as f64 / p.host_pages_written as f64))
                .collect()
        }),
    );
}
