//! Lines: values over time, or shares over a value.

use crate::Series;
use crate::bars::at;
use crate::scale::{short, step};
use maud::{Markup, html};
use std::fmt::Write;

const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 50.0;
const DASHES: [&str; 9] = ["", "6 3", "2 2", "8 2 2 2", "1 3", "10 4", "4 1", "2 5", "7 1 1 1"];

/// A plot of lines.
#[derive(Clone, Debug)]
pub struct Lines<'a> {
    /// Above it.
    pub title: &'a str,
    /// Below the x axis.
    pub x_name: &'a str,
    /// Beside the y axis.
    pub y_name: &'a str,
    /// Powers of ten along the x axis.
    pub is_logarithmic: bool,
    /// A name at each line's peak.
    pub names_peaks: bool,
    /// Names, and points in order.
    pub series: &'a [(Series, &'a [(f64, f64)])],
}

/// Draws lines.
pub fn lines(plot: &Lines<'_>) -> Markup {
    let all =
        || plot.series.iter().flat_map(|(_, points)| points.iter()).filter(|(x, y)| x.is_finite() && y.is_finite());
    let scaled = |x: f64| if plot.is_logarithmic { x.max(1.0).log10() } else { x };
    let last = all().map(|point| scaled(point.0)).fold(0.0, f64::max).max(1e-9);
    let first = if plot.is_logarithmic { all().map(|point| scaled(point.0)).fold(last, f64::min).floor() } else { 0.0 };
    let last = if plot.is_logarithmic { last.ceil().max(first + 1.0) } else { last };
    let highest = all().map(|point| point.1).fold(0.0, f64::max).max(1e-9);
    let unit = step(highest);
    let ceiling = (highest / unit).ceil() * unit;
    let x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * ((scaled(value) - first) / (last - first)).clamp(0.0, 1.0);
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - value / ceiling);
    let x_ticks: Vec<f64> = if plot.is_logarithmic {
        (first as i32..=last as i32).map(|power| 10f64.powi(power)).collect()
    } else {
        let unit = step(last);
        (0..=(last / unit) as usize).map(|tick| tick as f64 * unit).collect()
    };
    html! {
        svg.plot viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(plot.title) {
            text.title x=(LEFT) y="16" { (plot.title) }
            @for tick in 0..=(ceiling / unit).round() as usize {
                @let value = tick as f64 * unit;
                line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(at(y(value))) y2=(at(y(value))) {}
                text.tick x=(LEFT - 6.0) y=(at(y(value) + 4.0)) text-anchor="end" { (short(value)) }
            }
            @for value in x_ticks {
                line.grid x1=(at(x(value))) x2=(at(x(value))) y1=(TOP) y2=(HEIGHT - BOTTOM) {}
                text.tick x=(at(x(value))) y=(HEIGHT - BOTTOM + 16.0) text-anchor="middle" { (short(value)) }
            }
            text.name x=(at((LEFT + WIDTH - RIGHT) / 2.0)) y=(HEIGHT - 8.0) text-anchor="middle" { (plot.x_name) }
            text.name transform=(format!("translate(12 {:.1}) rotate(-90)", (TOP + HEIGHT - BOTTOM) / 2.0)) text-anchor="middle" { (plot.y_name) }
            @for (index, (series, points)) in plot.series.iter().enumerate() {
                path class=(format!("curve s{}", series.colour)) stroke-dasharray=(DASHES[index % DASHES.len()]) d=(path(points, &x, &y)) { title { (series.name) } }
                @if plot.names_peaks {
                    @if let Some((px, py)) = points.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)) {
                        text.value x=(at(x(px))) y=(at((y(py) - 3.0).max(TOP + 6.0))) text-anchor=(if x(px) > WIDTH / 2.0 { "end" } else { "start" }) { (series.name) }
                    }
                }
            }
        }
    }
}

fn path(points: &[(f64, f64)], x: &dyn Fn(f64) -> f64, y: &dyn Fn(f64) -> f64) -> String {
    let mut path = String::new();
    for (px, py) in points.iter().filter(|(px, py)| px.is_finite() && py.is_finite()) {
        let _ = write!(path, "{}{:.1},{:.1}", if path.is_empty() { "M" } else { "L" }, x(*px), y(*py));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_inside_and_an_empty_one_is_no_accident() {
        let points = [(0.0, 0.0), (1.0, 5e6), (2.0, f64::NAN), (1000.0, 1e6)];
        let series = [(Series::nth(0, "a & b"), &points[..]), (Series::nth(1, "none"), &[][..])];
        for is_logarithmic in [false, true] {
            let plot =
                Lines { title: "t", x_name: "x", y_name: "y", is_logarithmic, names_peaks: true, series: &series };
            let svg = lines(&plot).into_string();
            assert!(
                svg.contains("a &amp; b") && svg.ends_with("</svg>") && svg.contains(&format!("M{LEFT:.1},")),
                "{svg}"
            );
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
