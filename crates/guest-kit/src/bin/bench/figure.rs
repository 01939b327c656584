//! One measured figure beside its limit, and the table of all.

use serde_json::{Value, json};
use std::fmt::Write;

/// What a figure depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// What was counted; the same on every machine, but for what a guest happens to do.
    Count,
    /// Time; only a ratio of runs made in turns says anything.
    Time,
}

/// A limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// At most this.
    AtMost(f64),
    /// Less than this.
    Below(f64),
    /// At least this.
    AtLeast(f64),
}

/// Whether a figure keeps its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Met,
    Missed,
    /// It was not measured, or the run was too small for it.
    NotJudged,
}

/// A measured figure.
#[derive(Clone, Debug)]
pub struct Figure {
    name: String,
    /// Nothing when it could not be measured here.
    measured: Option<f64>,
    unit: &'static str,
    limit: Limit,
    basis: Basis,
    /// What the reader has to know beside the number.
    note: String,
    is_judged: bool,
}

impl Figure {
    /// A figure that was measured.
    pub fn new(name: impl Into<String>, measured: f64, unit: &'static str, limit: Limit, basis: Basis) -> Self {
        let measured = measured.is_finite().then_some(measured);
        Self { name: name.into(), measured, unit, limit, basis, note: String::new(), is_judged: true }
    }

    /// A figure that could not be measured here, and why.
    pub fn missing(name: impl Into<String>, unit: &'static str, limit: Limit, why: impl Into<String>) -> Self {
        Self { name: name.into(), measured: None, unit, limit, basis: Basis::Time, note: why.into(), is_judged: false }
    }

    /// With a remark.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    /// Measured, but its limit is for other circumstances.
    #[must_use]
    pub fn not_judged(mut self) -> Self {
        self.is_judged = false;
        self
    }

    /// Whether it keeps its limit; times of a quick run are not judged.
    pub fn verdict(&self, quick: bool) -> Verdict {
        let Some(measured) = self.measured else { return Verdict::NotJudged };
        if !self.is_judged || (quick && self.basis == Basis::Time) {
            return Verdict::NotJudged;
        }
        let holds = match self.limit {
            Limit::AtMost(limit) => measured <= limit,
            Limit::Below(limit) => measured < limit,
            Limit::AtLeast(limit) => measured >= limit,
        };
        if holds { Verdict::Met } else { Verdict::Missed }
    }

    fn measured_text(&self) -> String {
        let Some(measured) = self.measured else { return "-".to_owned() };
        let mut text = number(measured);
        if !self.unit.is_empty() {
            let _ = write!(text, " {}", self.unit);
        }
        text
    }

    fn limit_text(&self) -> String {
        let (sign, limit) = match self.limit {
            Limit::AtMost(limit) => ("≤", limit),
            Limit::Below(limit) => ("<", limit),
            Limit::AtLeast(limit) => ("≥", limit),
        };
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        format!("{sign} {limit}{unit}")
    }

    /// For `--json`.
    pub fn to_json(&self, quick: bool) -> Value {
        json!({
            "figure": self.name,
            "measured": self.measured,
            "unit": self.unit,
            "limit": self.limit_text(),
            "met": match self.verdict(quick) {
                Verdict::Met => Value::Bool(true),
                Verdict::Missed => Value::Bool(false),
                Verdict::NotJudged => Value::Null,
            },
            "note": self.note,
        })
    }
}

fn number(value: f64) -> String {
    if value == value.trunc() && value.abs() < 1e9 { format!("{value:.0}") } else { format!("{value:.3}") }
}

/// The table of all figures, as Markdown that also reads well on a terminal.
pub fn table(figures: &[Figure], quick: bool) -> String {
    let mut rows = vec![["figure", "measured", "limit", "met", "remark"].map(str::to_owned)];
    for figure in figures {
        let met = match figure.verdict(quick) {
            Verdict::Met => "yes",
            Verdict::Missed => "NO",
            Verdict::NotJudged => "-",
        };
        rows.push([
            figure.name.clone(),
            figure.measured_text(),
            figure.limit_text(),
            met.to_owned(),
            figure.note.clone(),
        ]);
    }
    let mut widths = [0; 5];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (width, cell) in widths.iter().zip(row) {
            let padding = " ".repeat(width - cell.chars().count());
            let _ = write!(text, "| {cell}{padding} ");
        }
        text.push_str("|\n");
        if index == 0 {
            for width in widths {
                let _ = write!(text, "|{}", "-".repeat(width + 2));
            }
            text.push_str("|\n");
        }
    }
    text
}

/// The middle value; of an even number of values, the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[length / 2],
        length => f64::midpoint(sorted[length / 2 - 1], sorted[length / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_judged_and_times_of_a_quick_run_are_not() {
        let figure = |value, limit, basis| Figure::new("f", value, "", limit, basis);
        assert_eq!(figure(0.55, Limit::AtMost(0.55), Basis::Count).verdict(true), Verdict::Met);
        assert_eq!(figure(4.0, Limit::Below(4.0), Basis::Count).verdict(false), Verdict::Missed);
        assert_eq!(figure(0.9, Limit::AtLeast(1.0), Basis::Time).verdict(false), Verdict::Missed);
        assert_eq!(figure(0.9, Limit::AtLeast(1.0), Basis::Time).verdict(true), Verdict::NotJudged);
        assert_eq!(figure(f64::NAN, Limit::AtLeast(1.0), Basis::Count).verdict(false), Verdict::NotJudged);
        assert_eq!(Figure::missing("f", "", Limit::AtLeast(1.0), "").verdict(false), Verdict::NotJudged);
    }

    #[test]
    fn medians() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_table_lines_up() {
        let figures = [
            Figure::new("bytes", 0.51, "", Limit::AtMost(0.55), Basis::Count),
            Figure::missing("IOPS", "", Limit::AtLeast(1.0), "no fio"),
        ];
        let text = table(&figures, false);
        let widths: Vec<usize> = text.lines().map(|line| line.chars().count()).collect();
        assert!(widths.windows(2).all(|pair| pair[0] == pair[1]), "{text}");
        assert!(text.contains("| yes |") && text.contains("no fio"), "{text}");
    }
}
