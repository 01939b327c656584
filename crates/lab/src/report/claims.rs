//! Every claim with its cells, in a table that can be filtered by how they fared.

use super::first::tone;
use crate::paper::{Judged, Paper};
use crate::verdict::{ONCE, Verdict};
use charts::Tone;
use maud::{Markup, html};

pub(super) fn class(tone: Tone) -> &'static str {
    match tone {
        Tone::Good => "good",
        Tone::Middle => "middle",
        Tone::Bad => "bad",
        Tone::Open => "open",
    }
}

pub(super) fn every_claim(papers: &[(Paper, Vec<Judged<'_>>)]) -> Markup {
    let choices = [
        ("only-all", "all"),
        ("only-good", "agrees"),
        ("only-middle", "stronger or weaker"),
        ("only-bad", "absent, costs more, reversed, outside"),
        ("only-open", "not judged, incomplete, unclear, void"),
    ];
    html! {
        h2 id="claims" { "Every claim" }
        div.filter {
            "Show: "
            @for (id, words) in choices {
                label { input type="radio" name="only" id=(id) checked[id == "only-all"]; " " (words) }
            }
        }
        p.soft { "In brackets, of times: what bound the cell, and the other side where that is something else. A pointer on a cell brings up the shares." }
        @for (paper, judged) in papers.iter().filter(|(_, judged)| judged.iter().any(|one| !one.verdicts.is_empty())) {
            details open {
                summary { (paper.title()) }
                (charts::table(&["where", "what", "paper", "here, each cell (95 %)", "n", "verdict"], &rows(judged)))
            }
        }
    }
}

fn rows(judged: &[Judged<'_>]) -> Vec<(String, Vec<Markup>)> {
    let mut rows = Vec::new();
    for one in judged {
        let name = one.experiment.map_or(one.results.id.as_str(), crate::catalogue::Experiment::name);
        for verdict in &one.verdicts {
            let kind = class(tone(verdict.agreement));
            rows.push((
                format!("v is-{kind}"),
                vec![
                    html! { a href=(format!("#{}", one.results.id)) { (name) } },
                    html! { (verdict.label) },
                    html! { (verdict.paper) },
                    cells(verdict),
                    html! { (verdict.counts()) },
                    html! { b class=(kind) { (verdict.tally()) } },
                ],
            ));
        }
    }
    rows
}

/// Each cell on a line of its own, in the colour of how it fared, with what bound it, a number of measurements that is too small, and why
/// it is not judged; and which cells were not measured.
pub(super) fn cells(verdict: &Verdict) -> Markup {
    html! {
        @for cell in verdict.measured() {
            @let place = cell.place(&verdict.cells);
            div class=(class(tone(cell.agreement))) title=(cell.bound.iter().map(crate::binding::Binding::words).collect::<Vec<_>>().join("; other side: ")) {
                @if !place.is_empty() { (place) ": " }
                (cell.ours_in_short(verdict))
                span.soft {
                    @if let Some(bound) = cell.bound_in_short(verdict) { " [" (bound) "]" }
                    @if cell.is_few() && cell.reason.as_deref() != Some(ONCE) { "; " (cell.count_in_short()) }
                }
                @if let Some(reason) = &cell.reason { span.soft { " – " (reason) } }
            }
        }
        @if let Some(missing) = verdict.missing_in_short() { div.open { (missing) } }
    }
}
