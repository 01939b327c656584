//! One line a claim: where the paper has it, where it is here, and how wide that is.

use crate::Sample;
use crate::bars::at;
use maud::{Markup, html};

/// Of the strip that a claim's numbers are on, beside or below its words.
const WIDTH: f64 = 320.0;
const HEIGHT: f64 = 16.0;
const MARGIN: f64 = 26.0;
/// Between two lines of the grid, in per cent.
const STEP: f64 = 50.0;

/// How a dot is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As the paper says.
    Good,
    /// In its direction, by another amount.
    Middle,
    /// Not as the paper says.
    Bad,
    /// Not judged, or void.
    Open,
}

/// Ours, of one cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Dot {
    /// Where.
    pub value: f64,
    /// What it lies between.
    pub interval: Option<(f64, f64)>,
    /// How it fared.
    pub tone: Tone,
    /// How often it was measured.
    pub sample: Sample,
    /// Words that a pointer brings up.
    pub words: String,
}

/// One claim.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// In a few words.
    pub label: String,
    /// In all words, which a pointer brings up.
    pub words: String,
    /// Where to read more.
    pub link: String,
    /// The paper's number, or its ends.
    pub paper: Option<(f64, f64)>,
    /// Where the paper has no number, but says less than nothing on the axis: an open arrow to the left.
    pub is_less: bool,
    /// Ours.
    pub dots: Vec<Dot>,
}

impl Tone {
    fn class(self) -> &'static str {
        match self {
            Tone::Good => "good",
            Tone::Middle => "middle",
            Tone::Bad => "bad",
            Tone::Open => "open",
        }
    }
}

/// Draws rows on one axis of changes in per cent, from `low` to `high`; what lies beyond is an arrow at its end. On a narrow screen a claim's
/// words are above its numbers.
pub fn dots(title: &str, rows: &[Row], (low, high): (f64, f64)) -> Markup {
    let x = |value: f64| MARGIN + (WIDTH - 2.0 * MARGIN) * (value.clamp(low, high) - low) / (high - low);
    let ticks: Vec<f64> = (0..=((high - low) / STEP).round() as usize).map(|tick| low + tick as f64 * STEP).collect();
    let grid: String =
        ticks.iter().filter(|tick| **tick != 0.0).map(|tick| format!("M{:.1},0V{HEIGHT}", x(*tick))).collect();
    let size = format!("0 0 {WIDTH} {HEIGHT}");
    let axis = html! {
        svg viewBox=(size) {
            @for tick in &ticks {
                text.tick x=(at(x(*tick))) y="12" text-anchor="middle" {
                    (format!("{}{:.0} %", if *tick > 0.0 { "+" } else if *tick < 0.0 { "−" } else { "" }, tick.abs()))
                }
            }
        }
    };
    html! {
        div.dots {
            b { (title) }
            div.line { span.label {} (axis) }
            @for row in rows {
                a.line href=(row.link) {
                    span.label title=(row.words) { (row.label) }
                    svg viewBox=(size) role="img" aria-label=(row.words) {
                        path.grid d=(grid) {}
                        path.axis d=(format!("M{:.1},0V{HEIGHT}", x(0.0))) {}
                        (numbers(row, &x, (low, high)))
                    }
                }
            }
            div.line { span.label {} (axis) }
        }
    }
}

fn numbers(row: &Row, x: &dyn Fn(f64) -> f64, (low, high): (f64, f64)) -> Markup {
    let y = HEIGHT / 2.0;
    html! {
        @for dot in row.dots.iter().filter(|dot| dot.value.is_finite()) {
            @if let Some((a, b)) = dot.interval {
                line class=(format!("spread {}", dot.tone.class())) x1=(at(x(a.min(b)))) x2=(at(x(a.max(b)))) y1=(y) y2=(y) {}
            }
            @if dot.value > high || dot.value < low {
                @let (tip, back) = if dot.value > high { (x(high) + 8.0, -8.0) } else { (x(low) - 8.0, 8.0) };
                path class=(format!("dot {}", dot.tone.class())) d=(format!("M{tip:.1},{y:.1} l{back:.1},-4.5 v9 Z")) { title { (dot.words) } }
            } @else {
                circle class=(format!("dot {}{}", dot.tone.class(), dot.sample.class())) cx=(at(x(dot.value))) cy=(y) r="4" { title { (dot.words) } }
            }
        }
        @if row.is_less {
            @let tip = x(0.0) - 9.0;
            path.less d=(format!("M{:.1},{:.1} L{tip:.1},{y:.1} L{0:.1},{:.1}", tip + 6.0, y - 4.5, y + 4.5)) { title { "paper: less" } }
        }
        @if let Some((a, b)) = row.paper {
            @let (from, to) = (x(a.min(b)), x(a.max(b)));
            path.paper d=(format!("{}M{from:.1},{y:.1} H{to:.1}{}", diamond(from, y), if to > from { diamond(to, y) } else { String::new() })) { title { "paper" } }
        }
    }
}

fn diamond(x: f64, y: f64) -> String {
    format!("M{:.1},{y:.1} L{x:.1},{:.1} L{:.1},{y:.1} L{x:.1},{:.1} Z ", x - 4.5, y - 4.5, x + 4.5, y + 4.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_beyond_the_axis_is_an_arrow() {
        let dot =
            |value: f64| Dot { value, interval: None, tone: Tone::Bad, sample: Sample::Once, words: "<here>".into() };
        let row = Row {
            label: "a".into(),
            words: "all of a".into(),
            link: "#a".into(),
            paper: Some((-50.0, -40.0)),
            is_less: false,
            dots: vec![dot(-20.0), dot(900.0)],
        };
        let less = Row { paper: None, is_less: true, dots: Vec::new(), ..row.clone() };
        let svg = dots("t", &[row, less], (-100.0, 100.0)).into_string();
        assert_eq!((svg.matches("<circle").count(), svg.matches("class=\"dot bad\" d=").count()), (1, 1), "{svg}");
        assert_eq!((svg.matches("class=\"paper\"").count(), svg.matches("class=\"less\"").count()), (1, 1), "{svg}");
        assert!(svg.contains("&lt;here&gt;") && svg.contains("dot bad single") && svg.contains("+100 %"));
    }
}
