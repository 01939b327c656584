//! Figures 2 to 5 of the 2010 paper as tables: what full data journaling costs beside the other modes, and what VMA
//! journaling saves of it.
//!
//! Runs are labelled with a workload and a journaling mode. Modes are named `writeback`, `ordered`, `journal` and
//! `vma` (`retain`, amberlog's word for it, is taken too). Differences are in percent of `journal`.

use super::LabelledReport;
use super::table::{bytes, columns, grouped, micros};
use crate::ftl::FtlKind;
use serde::Serialize;

/// The modes, in the paper's order.
pub const MODES: [&str; 4] = ["writeback", "ordered", "journal", "vma"];

/// A range of the paper, in percent of change against `journal`.
pub type Range = (f64, f64);

/// Figure 2: numbers of I/O requests.
pub const PAPER_REQUESTS: Range = (-48.9, -9.4);
/// Figure 3: amount of I/O traffic.
pub const PAPER_TRAFFIC: Range = (-56.7, -42.4);
/// Figure 4: erase counts, micro-benchmarks.
pub const PAPER_ERASES_MICRO: Range = (-56.0, -34.6);
/// Figure 4: erase counts, macro-benchmarks.
pub const PAPER_ERASES_MACRO: Range = (-86.5, -48.4);
/// Figure 5: GC overhead, micro-benchmarks.
pub const PAPER_GC_MICRO: Range = (-63.2, -13.1);
/// Figure 5: GC overhead, macro-benchmarks.
pub const PAPER_GC_MACRO: Range = (-80.6, -27.0);

/// What there is to see, in this order: a figure, and whether it is of writes only.
pub const CHARTS: [(u8, bool); 5] = [(2, false), (3, false), (3, true), (4, false), (5, false)];

/// One line of a figure: a workload (and FTL) over the modes.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// The figure, 2 to 5.
    pub figure: u8,
    /// Figure 3 a second time, without reads: the paper's text speaks of write traffic, its figure of I/O traffic.
    pub writes_only: bool,
    /// The workload.
    pub workload: String,
    /// The FTL; none for Figures 2 and 3.
    pub ftl: Option<FtlKind>,
    /// The value of each of [`MODES`], where that mode was run.
    pub values: [Option<f64>; 4],
    /// Change from `journal` to `vma` in percent, where both were run and `journal` is not 0.
    pub change_percent: Option<f64>,
    /// The paper's range of that change.
    pub paper_percent: Range,
}

impl Line {
    /// Whether the change lies in the paper's range.
    pub fn within_paper(&self) -> Option<bool> {
        self.change_percent.map(|c| (self.paper_percent.0..=self.paper_percent.1).contains(&c))
    }
}

/// Which of [`MODES`] a label means.
pub fn mode_index(mode: &str) -> Option<usize> {
    let mode = if mode == "retain" { "vma" } else { mode };
    MODES.iter().position(|&m| m == mode)
}

fn is_micro(workload: &str) -> bool {
    matches!(workload, "seq_write" | "rnd_write" | "seq-write" | "rnd-write")
}

/// The lines of all four figures, as far as the reports hold them.
pub fn lines(reports: &[LabelledReport]) -> Vec<Line> {
    let mut workloads: Vec<&str> = Vec::new();
    for report in reports.iter().filter(|r| r.mode.as_deref().and_then(mode_index).is_some()) {
        if !workloads.contains(&report.workload.as_str()) {
            workloads.push(&report.workload);
        }
    }
    let mut lines = Vec::new();
    for (figure, writes_only) in CHARTS {
        for &workload in &workloads {
            let ftls: Vec<Option<FtlKind>> =
                if figure <= 3 { vec![None] } else { FtlKind::ALL.into_iter().map(Some).collect() };
            for ftl in ftls {
                let mut values = [None; 4];
                for r in reports.iter().filter(|r| r.workload == workload && ftl.is_none_or(|f| f == r.report.ftl)) {
                    let Some(index) = r.mode.as_deref().and_then(mode_index) else { continue };
                    values[index] = Some(match figure {
                        2 => r.report.traffic.requests as f64,
                        3 if writes_only => r.report.traffic.bytes_written as f64,
                        3 => r.report.traffic.bytes as f64,
                        4 => r.report.erases as f64,
                        _ => r.report.gc.time_us as f64,
                    });
                }
                if values.iter().all(Option::is_none) {
                    continue;
                }
                let change_percent = match (values[2], values[3]) {
                    (Some(journal), Some(vma)) if journal > 0.0 => Some((vma / journal - 1.0) * 100.0),
                    _ => None,
                };
                let paper_percent = match (figure, is_micro(workload)) {
                    (2, _) => PAPER_REQUESTS,
                    (3, _) => PAPER_TRAFFIC,
                    (4, true) => PAPER_ERASES_MICRO,
                    (4, false) => PAPER_ERASES_MACRO,
                    (_, true) => PAPER_GC_MICRO,
                    (_, false) => PAPER_GC_MACRO,
                };
                let workload = workload.to_owned();
                lines.push(Line { figure, writes_only, workload, ftl, values, change_percent, paper_percent });
            }
        }
    }
    lines
}

/// A figure's title.
pub fn title(figure: u8, writes_only: bool) -> &'static str {
    match figure {
        3 if writes_only => "Figure 3, writes alone",
        2 => "Figure 2: number of I/O requests",
        3 => "Figure 3: amount of I/O traffic",
        4 => "Figure 4: erase counts",
        _ => "Figure 5: garbage collection overhead",
    }
}

/// A value as a figure shows it.
pub fn shown(figure: u8, value: f64) -> String {
    match figure {
        3 => bytes(value),
        5 => micros(value),
        _ => grouped(value as u64),
    }
}

/// The figures as text; empty when no run was labelled with a mode.
pub fn table(lines: &[Line]) -> String {
    let mut text = String::new();
    for chart in CHARTS {
        let (figure, writes_only) = chart;
        let mut rows = Vec::new();
        for line in lines.iter().filter(|l| (l.figure, l.writes_only) == chart) {
            let mut row = vec![line.workload.clone(), line.ftl.map_or("", FtlKind::name).to_owned()];
            row.extend(line.values.iter().map(|v| v.map_or("-".to_owned(), |v| shown(figure, v))));
            row.push(line.change_percent.map_or("-".to_owned(), |c| format!("{c:+.1} %")));
            row.push(format!("{:+.1} .. {:+.1} %", line.paper_percent.1, line.paper_percent.0));
            row.push(
                match line.within_paper() {
                    None => "",
                    Some(true) => "within",
                    Some(false) => "outside",
                }
                .to_owned(),
            );
            rows.push(row);
        }
        if rows.is_empty() {
            continue;
        }
        let header = ["workload", "FTL", MODES[0], MODES[1], MODES[2], MODES[3], "vma against journal", "paper", ""];
        rows.insert(0, header.map(str::to_owned).to_vec());
        text.push_str(&format!("{}\n{}\n", title(figure, writes_only), columns(&rows)));
    }
    text
}
