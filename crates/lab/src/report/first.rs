//! The first screen: what this is, how each paper fared in a sentence, and a dot plot of the papers' numbers against ours.

use super::heading;
use crate::paper::{self, Judged, Paper};
use crate::verdict::{Agreement, CellVerdict, Verdict};
use charts::{Dot, Row, Tone, dots};
use maud::{Markup, html};
use std::collections::BTreeSet;

/// Where the axis of changes ends; what is beyond is an arrow.
const AXIS: (f64, f64) = (-100.0, 150.0);

pub(super) fn first_screen(papers: &[(Paper, Vec<Judged<'_>>)]) -> Markup {
    let plots: Vec<(Paper, Vec<Row>)> = papers.iter().map(|(paper, judged)| (*paper, rows(judged))).collect();
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
                    "A diamond is the paper's number, a dot ours with its interval of 95 %, an arrow a number beyond the axis. Left is less. "
                    b.good { "As the paper says" } "; " b.middle { "in its direction, by another amount" } "; " b.bad { "absent, at a higher cost, reversed, outside" } "; "
                    b.open { "not judged or void" } " (hollow: measured once)."
                }
            }
            div.pair {
                @for (paper, rows) in plots.iter().filter(|(_, rows)| !rows.is_empty()) {
                    figure { (dots(paper.title(), rows, AXIS)) }
                }
            }
        }
    }
}

/// Scale, guests, drive, number of measurements: of all results, in words.
fn what_this_is(papers: &[(Paper, Vec<Judged<'_>>)]) -> Markup {
    let all = || papers.iter().flat_map(|(_, judged)| judged).map(|one| one.results);
    let set = |of: &dyn Fn(&crate::results::Results) -> String| {
        all().map(of).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let mut scales: Vec<(usize, String)> = set(&|results| results.parameters.scale_in_words())
        .into_iter()
        .map(|words| (all().filter(|results| results.parameters.scale_in_words() == words).count(), words))
        .collect();
    scales.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let others: usize = scales.iter().skip(1).map(|(count, _)| count).sum();
    let platforms = set(&|results| results.parameters.platform.clone());
    let commits = set(&|results| results.commit.clone());
    let counts = || all().flat_map(|results| &results.rows).map(|row| row.count);
    let once = counts().filter(|count| *count < 2).count();
    html! {
        p {
            b { "What this is. " }
            @if let Some((_, words)) = scales.first() { (words) }
            @if others > 0 { "; " (others) " experiments otherwise, as each says" } "."
        }
        p { "Guests: " (platforms.join(", ")) ". Drives are modelled (" code { "docs/lab.md" } "), and their time is what most cells wait for." }
        p { "Measured once: " (once) " of " (counts().count()) " groups, which are shown and not judged. Code of " (commits.len()) " commits." }
        @if all().any(|results| results.parameters.quick) { p.note { "Quick runs are among these: their counters mean something, their times do not." } }
    }
}

pub(super) fn tone(agreement: Agreement) -> Tone {
    match agreement {
        Agreement::Agrees => Tone::Good,
        Agreement::Stronger | Agreement::Weaker => Tone::Middle,
        Agreement::Absent | Agreement::CostsMore | Agreement::Reversed | Agreement::Beyond => Tone::Bad,
        Agreement::Unclear | Agreement::NotJudged | Agreement::Void | Agreement::Missing => Tone::Open,
    }
}

/// A row for each claim with a number in per cent, its cells on it.
fn rows(judged: &[Judged<'_>]) -> Vec<Row> {
    let mut rows = Vec::new();
    for one in judged {
        let name = one.experiment.map_or(one.results.id.as_str(), crate::catalogue::Experiment::name);
        for verdict in one.verdicts.iter().filter(|verdict| verdict.is_comparison && !verdict.cells.is_empty()) {
            let Some((low, high)) = verdict.paper_range else { continue };
            rows.push(Row {
                label: format!("{name}, {}", without_clock(&verdict.label)),
                link: format!("#{}", one.results.id),
                // Per cent less is a change to the left.
                paper: Some((-high, -low)),
                dots: verdict.cells.iter().map(|cell| dot(cell, verdict, &heading(one))).collect(),
            });
        }
    }
    rows
}

fn dot(cell: &CellVerdict, verdict: &Verdict, heading: &str) -> Dot {
    let place = cell.place(&verdict.cells);
    Dot {
        value: -cell.ours,
        interval: cell
            .interval
            .map(|interval| (-interval.high, -interval.low))
            .filter(|(a, b)| a.is_finite() && b.is_finite()),
        tone: tone(cell.agreement),
        words: format!(
            "{heading}; {}{}{}: here {}, paper {}; n = {}, {}",
            verdict.label,
            if place.is_empty() { "" } else { ", " },
            place,
            cell.ours_in_short(verdict),
            verdict.paper,
            cell.count,
            cell.agreement.words()
        ),
    }
}

/// All times are of one clock, which need not be said a hundred times.
fn without_clock(label: &str) -> &str {
    label.strip_prefix("time until everything is home: ").unwrap_or(label)
}
