//! An experiment's plots: small ones beside each other, by field and by drive (or, where a parameter varies, by load), with the paper's
//! numbers as marks on the bars that they are about.

use super::place::place;
use super::sample;
use super::series::{order, series};
use crate::cell::{Group, Mode};
use crate::claim::{Claim, Sense, What};
use crate::fields::{amount, field_words, grouped, is_proportion};
use crate::measured::SummaryRow;
use crate::paper::Judged;
use crate::statistics::Summary;
use charts::{Bar, Bars, Lines, Mark, Sample, Series, bars, key, lines};
use maud::{Markup, html};
use std::collections::BTreeSet;

/// All of them.
pub(super) fn plots(one: &Judged<'_>) -> Markup {
    let plotted = one.experiment.map_or("seconds_unmounted", |experiment| experiment.plot.as_str());
    let rows = &one.results.rows;
    let mut modes: Vec<Mode> = rows.iter().map(|row| row.group.mode).collect();
    modes.sort_by_key(|mode| order(*mode));
    modes.dedup();
    let looks: Vec<Series> = modes.iter().map(|mode| series(*mode)).collect();
    html! {
        @if modes.len() > 1 { (key(&looks)) }
        div.pair {
            @for field in plotted.split_whitespace() {
                @let parts = parts(rows, field);
                @if parts.is_empty() { p.soft { (field_words(field).0) ": nothing was measured." } }
                @for (name, part) in &parts { figure { (plot(one, field, name, part, &modes)) } }
            }
            (over_time(one, parameter_of(one)))
        }
    }
}

fn parameter_of<'a>(one: &Judged<'a>) -> Option<&'a str> {
    one.experiment.and_then(|experiment| experiment.parameter.as_ref()).map(|(name, _)| name.as_str())
}

/// Rows with a field, apart by drive, and by load where a parameter varies within one; a part's name says what it has alone.
fn parts<'a>(rows: &'a [SummaryRow], field: &str) -> Vec<(String, Vec<&'a SummaryRow>)> {
    let rows: Vec<&SummaryRow> = rows.iter().filter(|row| row.fields.contains_key(field)).collect();
    let count = |of: &dyn Fn(&Group) -> String| rows.iter().map(|row| of(&row.group)).collect::<BTreeSet<_>>().len();
    let (disks, workloads) = (count(&|group| group.disk.clone()), count(&|group| group.workload.clone()));
    let by_workload = workloads > 1 && count(&|group| format!("{} {}", group.parameter, group.guests)) > 1;
    let name = |group: &Group| {
        let parts = [(disks > 1, &group.disk), (by_workload, &group.workload)];
        parts.into_iter().filter(|(is_apart, _)| *is_apart).map(|(_, name)| name.clone()).collect::<Vec<_>>().join(", ")
    };
    let mut parts: Vec<(String, Vec<&SummaryRow>)> = Vec::new();
    for row in rows {
        let name = name(&row.group);
        match parts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, part)) => part.push(row),
            None => parts.push((name, vec![row])),
        }
    }
    parts
}

fn plot(one: &Judged<'_>, field: &str, name: &str, rows: &[&SummaryRow], modes: &[Mode]) -> Markup {
    let parameter = parameter_of(one);
    let claims = one.experiment.map(|experiment| experiment.claims.as_slice()).unwrap_or_default();
    let mut groups: Vec<String> = Vec::new();
    for row in rows {
        let group = place(&row.group, rows, parameter);
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let present: Vec<Mode> =
        modes.iter().copied().filter(|mode| rows.iter().any(|row| row.group.mode == *mode)).collect();
    let looks: Vec<Series> = present.iter().map(|mode| series(*mode)).collect();
    let mut values: Vec<Vec<Option<Bar>>> = vec![vec![None; present.len()]; groups.len()];
    let position = |row: &SummaryRow| {
        let group = place(&row.group, rows, parameter);
        Some((groups.iter().position(|one| *one == group)?, present.iter().position(|mode| *mode == row.group.mode)?))
    };
    for row in rows {
        if let (Some((group, mode)), Some(value)) = (position(row), row.fields.get(field)) {
            values[group][mode] = Some(bar(one, field, value, row));
        }
    }
    let marks: Vec<Mark> = claims.iter().flat_map(|claim| marks(claim, field, rows, &position)).collect();
    let (words, unit) = field_words(field);
    let title = [words, if unit == "bytes" { "" } else { unit }, name];
    let title = title.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ");
    let label = |value: f64| {
        if is_proportion(field) || unit == "bytes" {
            amount(field, value).replace(".0 ", " ")
        } else {
            charts::short(value)
        }
    };
    bars(&Bars {
        title: &title,
        groups: &groups,
        series: &looks,
        values: &values,
        marks: &marks,
        ceiling: is_proportion(field).then_some(1.0),
        label: &label,
    })
}

fn bar(one: &Judged<'_>, field: &str, value: &Summary, row: &SummaryRow) -> Bar {
    let interval = if is_proportion(field) { value.proportion_interval() } else { value.interval() };
    let spread = interval.map(|one| format!(" ({} to {})", grouped(one.low), grouped(one.high))).unwrap_or_default();
    let binding = crate::binding::binding(row);
    let asked = one.experiment.map_or(1, |experiment| experiment.asked(row.group.guests));
    let sample = sample(row.count, asked);
    let few = if sample == Sample::Enough { "" } else { ", too small" };
    Bar {
        value: value.mean,
        interval: interval.map(|one| (one.low, one.high)),
        sample,
        words: format!("{}{spread}, n = {}{few}; {}", grouped(value.mean), row.count, binding.words()),
    }
}

/// What a claim says of bars that are here: of its subject's, at what the other side has less the paper's number.
fn marks(
    claim: &Claim,
    field: &str,
    rows: &[&SummaryRow],
    position: &dyn Fn(&SummaryRow) -> Option<(usize, usize)>,
) -> Vec<Mark> {
    if claim.field != field {
        return Vec::new();
    }
    let owned: Vec<SummaryRow> = rows.iter().map(|row| (*row).clone()).collect();
    let mut marks = Vec::new();
    for sides in claim.cells(&owned) {
        let Some((group, series)) = position(sides.ours) else { continue };
        let Some((low, high)) = claim.paper_range().filter(|_| claim.sense != Sense::Same) else { continue };
        let (low, high) = match (claim.what, sides.other) {
            (What::Value(_), _) => (low, high),
            (What::Comparison(..), Some(other)) => {
                let base = other.fields.get(field).map_or(0.0, |summary| summary.mean);
                (base * (1.0 - high / 100.0), base * (1.0 - low / 100.0))
            }
            _ => continue,
        };
        let words = format!("paper: {}: {}", claim.label(), claim.paper_in_short());
        marks.push(Mark { group, series, low, high, words });
    }
    marks
}

/// What was seen over time, one plot for each field and, where there are several, for each load and drive.
fn over_time(one: &Judged<'_>, parameter: Option<&str>) -> Markup {
    let rows: Vec<&SummaryRow> = one.results.rows.iter().collect();
    let fields: BTreeSet<&str> = one.results.curves.iter().map(|curve| curve.field.as_str()).collect();
    let several = rows.iter().map(|row| row.group.mode).collect::<BTreeSet<_>>().len() > 1;
    html! {
        @for field in fields {
            @let of: Vec<_> = one.results.curves.iter().filter(|curve| curve.field == field).collect();
            @let named: Vec<(Series, &[(f64, f64)])> = of.iter().enumerate().map(|(index, curve)| {
                let place = place(&curve.group, &rows, parameter);
                let look = if several {
                    Series { name: format!("{}, {place}", curve.group.mode), ..series(curve.group.mode) }
                } else {
                    Series::nth(index, place)
                };
                (look, curve.points.as_slice())
            }).collect();
            @let (words, unit) = field_words(field);
            @let title = format!("Over time: {words}");
            figure { (lines(&Lines { title: &title, x_name: "seconds", y_name: unit, is_logarithmic: false, names_peaks: true, series: &named })) }
        }
    }
}
