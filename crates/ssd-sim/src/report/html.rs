//! One self-contained page of plots, of the same style as the lab's: no scripts, no fonts, nothing fetched.

use super::LabelledReport;
use super::figures::{self, Line};
use super::table::{bytes, grouped, micros};
use crate::ftl::FtlKind;
use charts::{Bar, Bars, Lines, Sample, Series, bars, key, lines};
use maud::{Markup, html};

/// More series than can be told apart are told in the table only.
const SERIES_MAX: usize = 8;

fn looks(names: &[String]) -> Vec<Series> {
    names.iter().enumerate().map(|(index, name)| Series::nth(index, name.clone())).collect()
}

fn section(title: &str, text: &str, body: &Markup) -> Markup {
    html! { section { h2 { (title) } p.soft { (text) } (body) } }
}

fn name(report: &LabelledReport) -> String {
    match &report.mode {
        Some(mode) => format!("{} / {mode}", report.workload),
        None => report.workload.clone(),
    }
}

fn table(header: &[&str], rows: &[Vec<String>]) -> Markup {
    let rows: Vec<(String, Vec<Markup>)> =
        rows.iter().map(|row| (String::new(), row.iter().map(|cell| html! { (cell) }).collect())).collect();
    charts::table(header, &rows)
}

/// The page.
pub fn page(reports: &[LabelledReport], figure_lines: &[Line]) -> String {
    let body = html! {
        h1 { "SSD simulation" }
        @if let Some(first) = reports.first() {
            @let (g, t) = (first.report.options.geometry, first.report.options.timing);
            p {
                (format!(
                    "{} logical and {} extra blocks of {} pages of {} bytes ({}); page read {} µs, page write {} µs, block erase {} µs.",
                    grouped(g.blocks.into()),
                    grouped(g.extra_blocks.into()),
                    g.pages_per_block,
                    g.page_bytes,
                    bytes(g.logical_bytes() as f64),
                    t.read_us,
                    t.write_us,
                    t.erase_us
                ))
            }
        }
        // The paper's figures have many runs, and the figures say more than the table.
        @if figure_lines.is_empty() {
            (runs(reports))
            (comparisons(reports))
        } @else {
            (paper_figures(figure_lines))
            (runs(reports))
        }
        (distributions(reports))
    };
    charts::page("SSD simulation", &body)
}

fn runs(reports: &[LabelledReport]) -> Markup {
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
        "Runs",
        "One row per trace and FTL. Evenness is mean over maximum erases per block.",
        &table(&header, &rows),
    )
}

/// A simulation has no spread: a bar is what it came to.
fn exact(value: f64, label: &dyn Fn(f64) -> String) -> Bar {
    Bar { value, interval: None, sample: Sample::Enough, words: label(value) }
}

fn plot(
    title: &str,
    groups: &[String],
    series: &[Series],
    values: &[Vec<Option<f64>>],
    label: &dyn Fn(f64) -> String,
) -> Markup {
    let values: Vec<Vec<Option<Bar>>> =
        values.iter().map(|row| row.iter().map(|value| value.map(|value| exact(value, label))).collect()).collect();
    bars(&Bars { title, groups, series, values: &values, marks: &[], ceiling: None, label })
}

/// Bars over traces, one colour per FTL.
fn comparisons(reports: &[LabelledReport]) -> Markup {
    let mut traces: Vec<String> = Vec::new();
    for report in reports {
        if !traces.contains(&name(report)) {
            traces.push(name(report));
        }
    }
    let ftls: Vec<FtlKind> = FtlKind::ALL.into_iter().filter(|&f| reports.iter().any(|r| r.report.ftl == f)).collect();
    let series = looks(&ftls.iter().map(|f| f.name().to_owned()).collect::<Vec<_>>());
    type Value<'a> = &'a dyn Fn(&LabelledReport) -> f64;
    type Show<'a> = &'a dyn Fn(f64) -> String;
    let chart = |title: &str, text: &str, value: Value, show: Show| {
        let find =
            |trace: &String, ftl: FtlKind| reports.iter().find(|r| name(r) == *trace && r.report.ftl == ftl).map(value);
        let values: Vec<Vec<Option<f64>>> = traces.iter().map(|t| ftls.iter().map(|&f| find(t, f)).collect()).collect();
        section(title, text, &html! { (key(&series)) (plot(title, &traces, &series, &values, show)) })
    };
    html! {
        (chart("Erases", "Blocks erased; fewer is a longer life.", &|r| r.report.erases as f64, &|v| grouped(v as u64)))
        (chart(
            "Garbage collection overhead",
            "Copies × (read + write) + erases × erase time, in seconds.",
            &|r| r.report.gc.time_us as f64 / 1e6,
            &|v| format!("{v:.2} s"),
        ))
        (chart(
            "Write amplification",
            "Flash pages programmed per page the host wrote.",
            &|r| r.report.write_amplification,
            &|v| format!("{v:.2}"),
        ))
    }
}

/// Figures 2 to 5: bars over workloads (and FTLs), one colour per mode.
fn paper_figures(figure_lines: &[Line]) -> Markup {
    html! {
        @for chart in figures::CHARTS {
            @let of: Vec<&Line> = figure_lines.iter().filter(|l| (l.figure, l.writes_only) == chart).collect();
            @if !of.is_empty() { (paper_figure(chart, &of)) }
        }
    }
}

fn paper_figure((figure, writes_only): (u8, bool), of: &[&Line]) -> Markup {
    let series = looks(&figures::MODES.iter().map(|m| m.to_string()).collect::<Vec<_>>());
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
    let (unit, unit_text) = match figure {
        3 => (f64::from(1 << 20), "MiB. "),
        5 => (1e6, "Seconds. "),
        _ => (1.0, ""),
    };
    // A chart per FTL keeps the groups few.
    let mut ftls: Vec<Option<FtlKind>> = Vec::new();
    for line in of {
        if !ftls.contains(&line.ftl) {
            ftls.push(line.ftl);
        }
    }
    let show = |v: f64| figures::shown(figure, v * unit);
    let of_ftl = |ftl: Option<FtlKind>| {
        let lines: Vec<&&Line> = of.iter().filter(|l| l.ftl == ftl).collect();
        let groups: Vec<String> = lines.iter().map(|l| l.workload.clone()).collect();
        let values: Vec<Vec<Option<f64>>> =
            lines.iter().map(|l| l.values.iter().map(|v| v.map(|v| v / unit)).collect()).collect();
        let title = ftl.map_or_else(|| figures::title(figure, writes_only).to_owned(), |ftl| ftl.name().to_owned());
        plot(&title, &groups, &series, &values, &show)
    };
    let mut header = vec!["workload", "FTL"];
    if figure <= 3 {
        header.pop();
    }
    header.extend(figures::MODES);
    header.extend(["vma against journal", "paper"]);
    section(
        figures::title(figure, writes_only),
        &format!("{unit_text}Per journaling mode, as in the 2010 paper."),
        &html! {
            (key(&series))
            div.pair { @for ftl in ftls { figure { (of_ftl(ftl)) } } }
            (table(&header, &rows))
        },
    )
}

/// Lines: response times, wear, and the run's course.
fn distributions(reports: &[LabelledReport]) -> Markup {
    let shown = &reports[..reports.len().min(SERIES_MAX)];
    let series = looks(&shown.iter().map(|r| format!("{} {}", name(r), r.report.ftl.name())).collect::<Vec<_>>());
    let left_out = match reports.len().saturating_sub(SERIES_MAX) {
        0 => String::new(),
        more => format!(" The first {SERIES_MAX} runs; {more} more are in the table."),
    };
    let chart =
        |title: &str, text: &str, x_name: &str, y_name: &str, is_logarithmic: bool, points: Vec<Vec<(f64, f64)>>| {
            let named: Vec<(Series, &[(f64, f64)])> =
                series.iter().cloned().zip(points.iter().map(Vec::as_slice)).collect();
            html! {
                @if points.iter().any(|s| s.len() > 1) {
                    (section(title, &format!("{text}{left_out}"), &html! {
                        (key(&series))
                        (lines(&Lines { title, x_name, y_name, is_logarithmic, names_peaks: false, series: &named }))
                    }))
                }
            }
        };
    let of = |f: &dyn Fn(&LabelledReport) -> Vec<(f64, f64)>| shown.iter().map(f).collect::<Vec<_>>();
    html! {
        (chart(
            "Response times",
            "Share of requests answered within a time, waiting included.",
            "µs",
            "share of requests",
            true,
            of(&|r| r.report.response_distribution.iter().map(|&(us, share)| (us as f64, share)).collect()),
        ))
        (chart(
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
        ))
        (chart(
            "Erases over the run",
            "Blocks erased so far.",
            "requests",
            "erases",
            false,
            of(&|r| r.report.course.iter().map(|p| (p.requests as f64, p.erases as f64)).collect()),
        ))
        (chart(
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
        ))
    }
}
