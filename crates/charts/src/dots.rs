//! One line a claim: where the paper has it, where it is here, and how wide that is.

use crate::bars::at;
use crate::scale::shortened;
use maud::{Markup, html};

const WIDTH: f64 = 640.0;
const LABEL: f64 = 300.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 24.0;
const LINE: f64 = 15.0;

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
    /// Words that a pointer brings up.
    pub words: String,
}

/// One claim.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// In a few words.
    pub label: String,
    /// Where to read more.
    pub link: String,
    /// The paper's number, or its ends.
    pub paper: Option<(f64, f64)>,
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

/// Draws rows on one axis of changes in per cent, from `low` to `high`; what lies beyond is an arrow at its end.
pub fn dots(title: &str, rows: &[Row], (low, high): (f64, f64)) -> Markup {
    let height = TOP + LINE * rows.len() as f64 + 22.0;
    let x = |value: f64| LABEL + (WIDTH - LABEL - RIGHT) * (value.clamp(low, high) - low) / (high - low);
    let middle = |index: usize| TOP + LINE * (index as f64 + 0.5);
    let ticks = ((high - low) / 50.0).round() as usize;
    html! {
        svg.plot.dots viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            text.title x="0" y="12" { (title) }
            @for tick in 0..=ticks {
                @let value = low + tick as f64 * 50.0;
                line class=(if value == 0.0 { "axis" } else { "grid" }) x1=(at(x(value))) x2=(at(x(value))) y1=(TOP) y2=(at(height - 20.0)) {}
                text.tick x=(at(x(value))) y=(at(height - 6.0)) text-anchor="middle" {
                    (format!("{}{:.0} %", if value > 0.0 { "+" } else if value < 0.0 { "−" } else { "" }, value.abs()))
                }
            }
            @for (index, row) in rows.iter().enumerate() {
                a href=(row.link) {
                    text.name x=(at(LABEL - 8.0)) y=(at(middle(index) + 3.5)) text-anchor="end" { title { (row.label) } (shortened(&row.label, LABEL)) }
                }
                @for dot in row.dots.iter().filter(|dot| dot.value.is_finite()) {
                    @if let Some((a, b)) = dot.interval {
                        line class=(format!("spread {}", dot.tone.class())) x1=(at(x(a.min(b)))) x2=(at(x(a.max(b)))) y1=(at(middle(index))) y2=(at(middle(index))) {}
                    }
                    @if dot.value > high || dot.value < low {
                        @let (tip, back) = if dot.value > high { (x(high), -8.0) } else { (x(low), 8.0) };
                        path class=(format!("dot {}", dot.tone.class())) d=(format!("M{tip:.1},{0:.1} l{back:.1},-4.5 v9 Z", middle(index))) { title { (dot.words) } }
                    } @else {
                        circle class=(format!("dot {}{}", dot.tone.class(), if dot.interval.is_none() { " single" } else { "" })) cx=(at(x(dot.value))) cy=(at(middle(index))) r="4" { title { (dot.words) } }
                    }
                }
                @if let Some((a, b)) = row.paper {
                    @let (from, to, y) = (x(a.min(b)), x(a.max(b)), middle(index));
                    path.paper d=(format!("M{:.1},{y:.1} L{from:.1},{:.1} L{:.1},{y:.1} L{from:.1},{:.1} Z M{from:.1},{y:.1} H{to:.1} M{:.1},{y:.1} L{to:.1},{3:.1} L{:.1},{y:.1}", from - 4.5, y - 4.5, from + 4.5, y + 4.5, to - 4.5, to + 4.5)) { title { "paper" } }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_beyond_the_axis_is_an_arrow() {
        let dot = |value: f64| Dot { value, interval: None, tone: Tone::Bad, words: "<here>".into() };
        let row = Row {
            label: "a".into(),
            link: "#a".into(),
            paper: Some((-50.0, -40.0)),
            dots: vec![dot(-20.0), dot(900.0)],
        };
        let svg = dots("t", &[row], (-100.0, 100.0)).into_string();
        assert_eq!((svg.matches("<circle").count(), svg.matches("class=\"dot bad\" d=").count()), (1, 1), "{svg}");
        assert!(svg.contains("&lt;here&gt;") && svg.contains("class=\"paper\"") && svg.contains("+100 %"));
    }
}
