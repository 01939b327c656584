//! Bars in groups, with intervals, and a paper's numbers as marks on them.

use crate::scale::{short, shortened, step};
use crate::{PATTERNS, Sample, Series};
use maud::{Markup, html};
use std::fmt::Write;

const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 42.0;
/// Between two lines of a pattern.
const STEP: f64 = 8.0;

/// A bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// Its height.
    pub value: f64,
    /// What it lies between.
    pub interval: Option<(f64, f64)>,
    /// How often it was measured.
    pub sample: Sample,
    /// Words that a pointer brings up.
    pub words: String,
}

/// What a paper says, drawn on a bar: a diamond, or a line from one value to the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// The group.
    pub group: usize,
    /// The series.
    pub series: usize,
    /// From.
    pub low: f64,
    /// To.
    pub high: f64,
    /// Words that a pointer brings up.
    pub words: String,
}

/// A plot of bars.
#[derive(Clone)]
pub struct Bars<'a> {
    /// Above it.
    pub title: &'a str,
    /// Along the x axis.
    pub groups: &'a [String],
    /// Bars of a group.
    pub series: &'a [Series],
    /// `values[group][series]`.
    pub values: &'a [Vec<Option<Bar>>],
    /// A paper's numbers.
    pub marks: &'a [Mark],
    /// Where the axis ends, where that is known: 1 for a proportion.
    pub ceiling: Option<f64>,
    /// A value beside its bar.
    pub label: &'a dyn Fn(f64) -> String,
}

#[derive(Clone, Copy)]
enum Stroke {
    Up,
    Down,
    Across,
    Upright,
}

/// Lines over a colour. They are drawn one by one: browsers print SVG patterns as large pictures.
const HATCHES: [&[Stroke]; PATTERNS] = [
    &[],
    &[Stroke::Up],
    &[Stroke::Down],
    &[Stroke::Across],
    &[Stroke::Upright],
    &[Stroke::Up, Stroke::Down],
    &[Stroke::Across, Stroke::Upright],
    &[Stroke::Across, Stroke::Up],
    &[Stroke::Upright, Stroke::Down],
];

/// The lines of a pattern over a rectangle, as a path.
fn hatch(pattern: usize, x: f64, top: f64, width: f64, height: f64) -> String {
    let mut lines = String::new();
    for stroke in HATCHES[pattern % PATTERNS] {
        let length = match stroke {
            Stroke::Across => height,
            Stroke::Upright => width,
            Stroke::Up | Stroke::Down => width + height,
        };
        let mut at = STEP / 2.0;
        while at < length {
            // A slanted line enters where the distance from the upper left corner, along two sides, is `at`.
            let (x0, y0) = ((at - height).max(0.0), at.min(height));
            let (x1, y1) = (at.min(width), (at - width).max(0.0));
            let (from, to) = match stroke {
                Stroke::Across => ((0.0, at), (width, at)),
                Stroke::Upright => ((at, 0.0), (at, height)),
                Stroke::Up => ((x0, y0), (x1, y1)),
                Stroke::Down => ((width - x0, y0), (width - x1, y1)),
            };
            let _ = write!(lines, "M{:.1},{:.1}L{:.1},{:.1}", x + from.0, top + from.1, x + to.0, top + to.1);
            at += STEP;
        }
    }
    lines
}

fn filled(series: &Series, (x, top, width, height): (f64, f64, f64, f64), sample: Sample, words: &str) -> Markup {
    let lines = hatch(series.pattern, x, top, width, height);
    let class = format!("bar{} f{} s{}", sample.class(), series.colour, series.colour);
    html! {
        g {
            @if !words.is_empty() { title { (words) } }
            rect class=(class) x=(at(x)) y=(at(top)) width=(at(width)) height=(at(height)) {}
            @if !lines.is_empty() { path.hatch d=(lines) {} }
        }
    }
}

/// A coordinate, as short as a picture needs.
pub(crate) fn at(value: f64) -> String {
    format!("{value:.1}")
}

/// The names of series beside their colours and patterns.
pub fn key(series: &[Series]) -> Markup {
    html! {
        div.key {
            @for one in series {
                span { svg viewBox="0 0 30 12" { (filled(one, (0.0, 0.0, 30.0, 12.0), Sample::Enough, "")) } (one.name) }
            }
        }
    }
}

/// Draws bars. Negative values hang below the axis.
pub fn bars(plot: &Bars<'_>) -> Markup {
    let all = || plot.values.iter().flatten().flatten().filter(|bar| bar.value.is_finite());
    let ends = |bar: &Bar| {
        bar.interval.filter(|(low, high)| low.is_finite() && high.is_finite()).unwrap_or((bar.value, bar.value))
    };
    let tallest = all().map(|bar| bar.value).fold(0.0, f64::max);
    // A whisker that leaves the plot is cut, so that the bars can be read.
    let reach = |value: f64| value.min(tallest.max(1e-12) * 1.6);
    let highest = all()
        .map(|bar| reach(ends(bar).1))
        .chain(plot.marks.iter().map(|mark| reach(mark.high)))
        .fold(tallest, f64::max);
    let lowest = all().map(|bar| bar.value.min(ends(bar).0)).fold(0.0, f64::min);
    // What cannot be less than nothing has no whisker below it.
    let lowest = if all().all(|bar| bar.value >= 0.0) { 0.0 } else { lowest };
    let unit = step(plot.ceiling.map_or((highest - lowest).max(1e-9), |ceiling| ceiling));
    let floor = (lowest / unit).floor() * unit;
    let ceiling = plot.ceiling.unwrap_or_else(|| (highest / unit).ceil().max(1.0) * unit);
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (ceiling - value.clamp(floor, ceiling)) / (ceiling - floor);
    let ticks = ((ceiling - floor) / unit).round() as usize;
    let room = (WIDTH - LEFT - RIGHT) / plot.groups.len().max(1) as f64;
    let width = (room * 0.84 / plot.series.len().max(1) as f64).min(56.0);
    let x = |group: usize, series: usize| {
        LEFT + room * (group as f64 + 0.5) - width * plot.series.len() as f64 / 2.0 + width * series as f64
    };
    html! {
        svg.plot viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(plot.title) {
            text.title x=(LEFT) y="16" { (plot.title) }
            @for tick in 0..=ticks {
                @let value = floor + tick as f64 * unit;
                line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(at(y(value))) y2=(at(y(value))) {}
                text.tick x=(LEFT - 6.0) y=(at(y(value) + 4.0)) text-anchor="end" { ((plot.label)(value)) }
            }
            @for (g, group) in plot.groups.iter().enumerate() {
                @for (s, series) in plot.series.iter().enumerate() {
                    @if let Some(bar) = plot.values.get(g).and_then(|row| row.get(s)).and_then(Option::as_ref).filter(|bar| bar.value.is_finite()) {
                        @let (top, base) = (y(bar.value.max(0.0)), y(bar.value.min(0.0)));
                        @let words = format!("{group}, {}: {}", series.name, bar.words);
                        (filled(series, (x(g, s) + 1.0, top, (width - 2.0).max(1.0), (base - top).max(0.8)), bar.sample, &words))
                        @if let Some((low, high)) = bar.interval.filter(|(low, high)| high > low) {
                            @let centre = x(g, s) + width / 2.0;
                            path.whisker d=(whisker(centre, y(low), y(high))) {}
                        }
                        @if width > 24.0 {
                            @let tip = bar.interval.map_or(top, |(_, high)| y(high).min(top));
                            text.value x=(at(x(g, s) + width / 2.0)) y=(at((tip - 4.0).max(TOP - 2.0))) text-anchor="middle" { (short_label(plot, bar.value)) }
                        }
                    }
                }
                text.name x=(at(LEFT + room * (g as f64 + 0.5))) y=(at(HEIGHT - BOTTOM + 18.0)) text-anchor="middle" {
                    title { (group) } (shortened(group, room))
                }
            }
            @for mark in plot.marks.iter().filter(|mark| mark.low.is_finite() && mark.high >= floor) {
                @let centre = x(mark.group, mark.series) + width / 2.0;
                @if mark.low <= ceiling { (diamond(mark, centre, width, &y)) } @else { (beyond(mark, centre)) }
            }
            line.axis x1=(LEFT) x2=(WIDTH - RIGHT) y1=(at(y(0.0))) y2=(at(y(0.0))) {}
        }
    }
}

fn whisker(centre: f64, low: f64, high: f64) -> String {
    let (left, right) = (centre - 3.0, centre + 3.0);
    format!("M{centre:.1},{low:.1} V{high:.1} M{left:.1},{high:.1} H{right:.1} M{left:.1},{low:.1} H{right:.1}")
}

fn short_label(plot: &Bars<'_>, value: f64) -> String {
    let text = (plot.label)(value);
    if text.chars().count() <= 8 { text } else { short(value) }
}

fn diamond(mark: &Mark, centre: f64, width: f64, y: &dyn Fn(f64) -> f64) -> Markup {
    let half = (width / 2.0 - 1.0).clamp(3.0, 6.0);
    let shape = |at: f64| {
        format!(
            "M{:.1},{at:.1} L{centre:.1},{:.1} L{:.1},{at:.1} L{centre:.1},{:.1} Z",
            centre - half,
            at - half,
            centre + half,
            at + half
        )
    };
    let mut path = String::new();
    if mark.high > mark.low {
        let _ = write!(path, "M{:.1},{:.1} V{:.1} ", centre, y(mark.low), y(mark.high));
        path.push_str(&shape(y(mark.low)));
    }
    path.push_str(&shape(y(mark.high)));
    html! { path.paper d=(path) { title { (mark.words) } } }
}

/// A paper's number above the plot: an arrow, so that it is not missing.
fn beyond(mark: &Mark, centre: f64) -> Markup {
    let (tip, back, left, right) = (TOP - 6.0, TOP + 3.0, centre - 5.0, centre + 5.0);
    html! {
        path.paper d=(format!("M{left:.1},{back:.1} L{centre:.1},{tip:.1} L{right:.1},{back:.1} Z")) { title { (mark.words) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_inside_their_bar() {
        for pattern in 0..PATTERNS {
            let path = hatch(pattern, 10.0, 20.0, 30.0, 50.0);
            assert_eq!(path.is_empty(), pattern == 0);
            for point in path.split(['M', 'L']).filter(|point| !point.is_empty()) {
                let (x, y) = point.split_once(',').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!((10.0..=40.0).contains(&x) && (20.0..=70.0).contains(&y), "pattern {pattern}: {point}");
            }
        }
    }

    #[test]
    fn a_plot_has_its_bars_and_marks_and_no_more_and_no_number_that_is_none() {
        let bar = |value: f64, sample: Sample| {
            Some(Bar { value, interval: Some((value - 1.0, value + 90.0)), sample, words: "a & b".into() })
        };
        let values =
            vec![vec![bar(5.0, Sample::Once), None], vec![bar(f64::NAN, Sample::Enough), bar(0.5, Sample::Few)]];
        let plot = Bars {
            title: "t",
            groups: &["one".to_owned(), "two".to_owned()],
            series: &[Series::nth(0, "x"), Series::nth(1, "y")],
            values: &values,
            marks: &[
                Mark { group: 0, series: 0, low: 2.0, high: 2.0, words: "paper".into() },
                Mark { group: 1, series: 1, low: 900.0, high: 950.0, words: "far above".into() },
            ],
            ceiling: None,
            label: &short,
        };
        let svg = bars(&plot).into_string();
        assert_eq!((svg.matches("<rect").count(), svg.matches("class=\"paper\"").count()), (2, 2), "{svg}");
        assert!(
            svg.contains("far above")
                && svg.contains("bar single f0")
                && svg.contains("bar few f1")
                && svg.contains("a &amp; b")
                && !svg.contains("NaN")
                && !svg.contains("inf"),
            "{svg}"
        );
    }
}
