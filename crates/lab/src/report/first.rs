//! The first screen: what this is, how each paper fared in a sentence, and a dot plot of the papers' numbers against ours.

use super::{heading, sample};
use crate::binding::{Bound, binding};
use crate::catalogue::{Experiment, Kind};
use crate::fields::is_proportion;
use crate::paper::{self, Judged, Paper};
use crate::results::Results;
use crate::verdict::{Agreement, CellVerdict, Verdict};
use charts::{Dot, Row, Sample, Tone, dots};
use maud::{Markup, html};
use std::collections::BTreeSet;

/// Where the axis of changes ends; what is beyond is an arrow.
const AXIS: (f64, f64) = (-100.0, 150.0);

pub(super) fn first_screen(papers: &[(Paper, Vec<Judged<'_>>)]) -> Markup {
    let plots = papers.iter().map(|(paper, judged)| (paper.title(), rows(judged, true)));
    let values: Vec<Row> = papers.iter().flat_map(|(_, judged)| rows(judged, false)).collect();
    let plots: Vec<(&str, Vec<Row>)> = plots.chain([("Values, as a change from the paper's", values)]).collect();
    html! {
        div.first {
            div {
                div.what { (what_this_is(papers)) }
                ul {
                    @for (paper, judged) in papers {
                        li { b { a href=(format!("#{}", super::anchor(*paper))) { (paper.title()) } } ". " (paper::sentence(judged)) }
                    }
                }
                p.soft {
                    "A line is a claim. A diamond is the paper's number (an arrow: less, by no number), a dot ours with its interval of 95 %, a triangle a number beyond the axis. Left is less. "
                    b.good { "As the paper says" } "; " b.middle { "in its direction, by another amount" } "; " b.bad { "absent, at a higher cost, reversed, outside" } "; "
                    b.open { "not judged or void" } ". Hollow: measured once; pale: fewer than five times (three with more than four guests, 120 crashes). No dot: not measured."
                }
            }
            div.pair {
                @for (title, rows) in plots.iter().filter(|(_, rows)| !rows.is_empty()) {
                    figure { (dots(title, rows, AXIS)) }
                }
            }
        }
    }
}

/// Scale, guests, drive, number of measurements: of all results, in words.
fn what_this_is(papers: &[(Paper, Vec<Judged<'_>>)]) -> Markup {
    let all = || papers.iter().flat_map(|(_, judged)| judged);
    let set = |of: &dyn Fn(&Results) -> String| all().map(|one| of(one.results)).collect::<BTreeSet<_>>();
    // Records after a crash have sizes and a pace of their own, whatever the scale of a run.
    let has_scale = |one: &Experiment| !one.is_computed() && one.kind != Kind::Integrity;
    let is_run = |one: &&Judged<'_>| one.experiment.is_none_or(has_scale);
    let runs = all().filter(is_run).count();
    let full = all().filter(is_run).filter(|one| one.results.parameters.is_full()).count();
    let declared = all().filter(is_run).filter(|one| one.results.parameters.is_declared()).count();
    let native = all().filter(is_run).filter(|one| one.results.parameters.platform.starts_with("kvm")).count();
    let rows = || all().flat_map(|one| one.results.rows.iter().map(move |row| (one, row)));
    let samples: Vec<Sample> = rows()
        .map(|(one, row)| sample(row.count, one.experiment.map_or(1, |experiment| experiment.asked(row.group.guests))))
        .collect();
    let of = |wanted: Sample| samples.iter().filter(|sample| **sample == wanted).count();
    let bounds: Vec<Bound> =
        rows().map(|(_, row)| binding(row).bound).filter(|bound| *bound != Bound::Unknown).collect();
    let by = |wanted: Bound| bounds.iter().filter(|bound| **bound == wanted).count();
    let (machines, commits) = (
        set(&|results| results.machine.get("processor").cloned().unwrap_or_default()),
        set(&|results| results.commit.clone()),
    );
    html! {
        p {
            b { "What this is. " }
            (full) " of " (runs) " experiments are at the papers' own sizes and clocks, " (declared) " at a declared scale with its clocks, "
            (runs - full - declared) " at a smaller size whose clocks were not scaled: their times and bytes are shown and not judged. (Records after crashes have sizes of their own, and are none of these.)"
        }
        p {
            "Guests ran natively (KVM) in " (native) " of them, emulated in " (runs - native) ". Drives are modelled (" code { "docs/lab.md" } "). Of " (bounds.len()) " groups that could tell, "
            (by(Bound::Drive)) " were bound by the drive, " (by(Bound::Journal)) " by the journal's flushes, " (by(Bound::Processor)) " by a processor, "
            (by(Bound::Mixed)) " by none alone; each says by what."
        }
        p {
            "Of " (samples.len()) " groups " (of(Sample::Enough)) " were measured five times (three with more than four guests, 120 crashes) or more, " (of(Sample::Few))
            " less often, " (of(Sample::Once)) " once. Programs of " (commits.len()) " commits, on " (machines.len()) " kinds of machine: each figure names its own."
        }
        @if all().any(|one| one.results.parameters.quick) { p.note { "Quick runs are among these: their counters mean something, their times do not." } }
    }
}

pub(super) fn tone(agreement: Agreement) -> Tone {
    match agreement {
        Agreement::Agrees => Tone::Good,
        Agreement::Stronger | Agreement::Weaker => Tone::Middle,
        Agreement::Absent | Agreement::CostsMore | Agreement::Reversed | Agreement::Beyond => Tone::Bad,
        Agreement::Unclear | Agreement::Incomplete | Agreement::NotJudged | Agreement::Void | Agreement::Missing => {
            Tone::Open
        }
    }
}

/// A row for each claim, its cells on it: comparisons in per cent, or values, as a change from the paper's in per cent (of what was never to happen,
/// how often it did).
fn rows(judged: &[Judged<'_>], comparisons: bool) -> Vec<Row> {
    let mut rows = Vec::new();
    for one in judged {
        let name = one.experiment.map_or(one.results.id.as_str(), crate::catalogue::Experiment::name);
        for verdict in one.verdicts.iter().filter(|verdict| verdict.is_comparison == comparisons) {
            let axis = Axis::of(verdict);
            rows.push(Row {
                label: format!("{name}, {}", in_short(&verdict.label)),
                words: format!("{}: {}; paper: {}", heading(one), verdict.label, verdict.paper),
                link: format!("#{}", one.results.id),
                paper: verdict.paper_range.map(|(low, high)| (axis.place(low), axis.place(high))),
                is_less: verdict.paper_range.is_none(),
                dots: verdict.measured().map(|cell| dot(cell, verdict, &axis, &heading(one))).collect(),
            });
        }
    }
    rows
}

/// Where a number of a claim is on the axis of changes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Axis {
    /// Per cent less is a change to the left.
    Less,
    /// A share of runs, in per cent.
    Share,
    /// A value beside the paper's, or the middle of its range.
    Beside(f64),
}

impl Axis {
    fn of(verdict: &Verdict) -> Self {
        let middle = verdict.paper_range.map_or(0.0, |(low, high)| f64::midpoint(low, high));
        match verdict.is_comparison {
            true => Axis::Less,
            false if is_proportion(&verdict.field) || middle == 0.0 => Axis::Share,
            false => Axis::Beside(middle),
        }
    }

    fn place(self, number: f64) -> f64 {
        match self {
            Axis::Less => -number,
            Axis::Share => 100.0 * number,
            Axis::Beside(paper) => 100.0 * (number / paper - 1.0),
        }
    }
}

fn dot(cell: &CellVerdict, verdict: &Verdict, axis: &Axis, heading: &str) -> Dot {
    let place = cell.place(&verdict.cells);
    let bound = cell.bound_in_short(verdict).map(|bound| format!(", bound by {bound}")).unwrap_or_default();
    Dot {
        value: axis.place(cell.ours),
        interval: cell
            .interval
            .map(|interval| (axis.place(interval.high), axis.place(interval.low)))
            .filter(|(a, b)| a.is_finite() && b.is_finite()),
        tone: tone(cell.agreement),
        sample: sample(cell.count, u32::try_from(cell.asked).unwrap_or(u32::MAX)),
        words: format!(
            "{heading}; {}{}{}: here {}, paper {}; {}{bound}, {}",
            verdict.label,
            if place.is_empty() { "" } else { ", " },
            place,
            cell.ours_in_short(verdict),
            verdict.paper,
            cell.count_in_short(),
            cell.agreement.words()
        ),
    }
}

/// A claim's words, short enough for a line.
fn in_short(label: &str) -> String {
    let shorter = [
        ("time by the load's own clock: ", "load's clock: "),
        ("time of the deletion itself: ", "deletion: "),
        ("time until everything is home: ", "until home: "),
        (" against ", " / "),
        ("runs with other corrupted records than one that a commit cut in two", "corrupted otherwise"),
        ("runs with corrupted records", "corrupted"),
        ("share of the time in protection and unprotection", "time in protection"),
        ("bytes written to the journal, wherever it is", "journal bytes"),
        ("bytes to storage", "bytes"),
        ("recovery time on the modelled disk", "recovery time"),
        ("processor time of guest and amberlog", "processor time"),
        ("copied blocks (copy-on-write)", "copied blocks"),
        ("lines of code that hold and recover journals", "lines of code"),
        ("code of the library in the VMM", "code in the VMM"),
        ("share of a gigabit network", "network"),
    ];
    shorter.into_iter().fold(label.to_owned(), |text, (long, short)| text.replace(long, short))
}
