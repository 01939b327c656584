//! Bars in groups with whiskers, and curves over time, as inline SVG without scripts. Colours come from the page's style sheet; each series also
//! has a pattern of its own, so that a print in grey can be read.

use crate::claim::grouped;
use crate::statistics::Summary;
use std::fmt::Write;

/// Escapes text for HTML and SVG.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Series that can be told apart.
pub const SERIES_MAX: usize = 9;

const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;

/// The lines that are laid over a series' colour. They are drawn one by one: browsers print SVG patterns as large pictures.
#[derive(Clone, Copy)]
enum Line {
    Up,
    Down,
    Across,
    Upright,
}

/// What each series has: nothing, or lines.
const HATCHES: [&[Line]; SERIES_MAX] = [
    &[],
    &[Line::Up],
    &[Line::Down],
    &[Line::Across],
    &[Line::Upright],
    &[Line::Up, Line::Down],
    &[Line::Across, Line::Upright],
    &[Line::Across, Line::Up],
    &[Line::Upright, Line::Down],
];
/// Between two lines.
const HATCH_STEP: f64 = 8.0;

/// A bar with its series' colour and lines, and words that a pointer brings up.
fn filled(series: usize, x: f64, top: f64, width: f64, height: f64, title: &str) -> String {
    let mut lines = String::new();
    for line in HATCHES[series.min(SERIES_MAX - 1)] {
        let length = match line {
            Line::Across => height,
            Line::Upright => width,
            Line::Up | Line::Down => width + height,
        };
        let mut at = HATCH_STEP / 2.0;
        while at < length {
            // A slanted line enters where the distance from the upper left corner, along two sides, is `at`.
            let (x0, y0) = ((at - height).max(0.0), at.min(height));
            let (x1, y1) = (at.min(width), (at - width).max(0.0));
            let (from, to) = match line {
                Line::Across => ((0.0, at), (width, at)),
                Line::Upright => ((at, 0.0), (at, height)),
                Line::Up => ((x0, y0), (x1, y1)),
                Line::Down => ((width - x0, y0), (width - x1, y1)),
            };
            let _ = write!(lines, "M{:.1},{:.1}L{:.1},{:.1}", x + from.0, top + from.1, x + to.0, top + to.1);
            at += HATCH_STEP;
        }
    }
    format!(
        "<g>{title}<rect class=\"bar f{series}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>\
         <path class=\"hatch\" d=\"{lines}\"/></g>"
    )
}

/// A step of 1, 2 or 5 times a power of ten that divides `max` into about five.
fn step(max: f64) -> f64 {
    let raw = (max / 5.0).max(1e-12);
    let power = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&step| step >= raw).unwrap_or(raw)
}

fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 1e9 => format!("{}G", grouped(value / 1e9)),
        v if v >= 1e6 => format!("{}M", grouped(value / 1e6)),
        v if v >= 1e4 => format!("{}k", grouped(value / 1e3)),
        _ => grouped(value),
    }
}

/// The beginning of a plot: its title, and lines with numbers from `floor` to `ceiling`.
fn frame(title: &str, floor: f64, ceiling: f64, step: f64) -> String {
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (ceiling - value) / (ceiling - floor);
    let mut svg =
        format!("<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">", escaped(title));
    let _ = write!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"16\">{}</text>", escaped(title));
    let ticks = ((ceiling - floor) / step).round() as usize;
    for tick in 0..=ticks {
        let value = floor + tick as f64 * step;
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/>\
             <text class=\"tick\" x=\"{2:.1}\" y=\"{3:.1}\" text-anchor=\"end\">{4}</text>",
            WIDTH - RIGHT,
            y(value),
            LEFT - 6.0,
            y(value) + 4.0,
            short(value)
        );
    }
    svg
}

/// Curves over seconds from 0; each series has a colour and a dash of its own.
pub fn curves(title: &str, series: &[(String, &[(f64, f64)])]) -> String {
    const DASHES: [&str; SERIES_MAX] = ["", "6 3", "2 2", "8 2 2 2", "1 3", "10 4", "4 1", "2 5", "7 1 1 1"];
    let all = || series.iter().flat_map(|(_, points)| points.iter());
    let highest = all().map(|(_, value)| *value).fold(0.0, f64::max);
    let last = all().map(|(at, _)| *at).fold(1e-9, f64::max);
    let step_y = step(highest.max(1e-9));
    let ceiling = (highest / step_y).ceil().max(1.0) * step_y;
    let x = |at: f64| LEFT + (WIDTH - LEFT - RIGHT) * at / last;
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (ceiling - value) / ceiling;
    let mut svg = frame(title, 0.0, ceiling, step_y);
    let step_x = step(last);
    for tick in 0..=(last / step_x) as usize {
        let at = tick as f64 * step_x;
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} s</text>",
            x(at),
            HEIGHT - BOTTOM + 16.0,
            short(at)
        );
    }
    for (index, (name, points)) in series.iter().enumerate().take(SERIES_MAX) {
        let mut line = String::new();
        for (at, value) in *points {
            let _ = write!(line, "{}{:.1},{:.1}", if line.is_empty() { "M" } else { " L" }, x(*at), y(*value));
        }
        let _ = write!(
            svg,
            "<path class=\"curve s{index}\" stroke-dasharray=\"{}\" d=\"{line}\"><title>{}</title></path>",
            DASHES[index],
            escaped(name)
        );
        // The name at its peak, where it can be told from the others without a key.
        if let Some((at, value)) = points.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)) {
            let anchor = if at > last / 2.0 { "end" } else { "start" };
            let _ = write!(
                svg,
                "<text class=\"value\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                x(at),
                (y(value) - 3.0).max(TOP + 6.0),
                escaped(name)
            );
        }
    }
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/>",
        WIDTH - RIGHT,
        y(0.0)
    );
    svg + "</svg>"
}

/// Groups along the x axis, one bar per series in each; `values[group][series]`. Negative values hang below the axis.
pub fn bars(title: &str, groups: &[String], series: &[String], values: &[Vec<Option<Summary>>]) -> String {
    let all = || values.iter().flatten().flatten();
    let highest = all().map(|value| value.mean + value.deviation).fold(0.0, f64::max);
    let lowest = all().map(|value| value.mean - value.deviation).fold(0.0, f64::min);
    let step = step((highest - lowest).max(1e-9));
    let (floor, ceiling) = ((lowest / step).floor() * step, (highest / step).ceil().max(1.0) * step);
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (ceiling - value) / (ceiling - floor);
    let mut svg = frame(title, floor, ceiling, step);
    let room = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    let bar = (room * 0.84 / series.len().max(1) as f64).min(56.0);
    for (g, group) in groups.iter().enumerate() {
        let middle = LEFT + room * (g as f64 + 0.5);
        let first = middle - bar * series.len() as f64 / 2.0;
        for (s, name) in series.iter().enumerate().take(SERIES_MAX) {
            let Some(value) = values.get(g).and_then(|row| row.get(s)).copied().flatten() else { continue };
            let x = first + bar * s as f64;
            let (top, base) = (y(value.mean.max(0.0)), y(value.mean.min(0.0)));
            let words = format!(
                "<title>{}, {}: {} ± {} (n = {})</title>",
                escaped(group),
                escaped(name),
                grouped(value.mean),
                grouped(value.deviation),
                value.count
            );
            svg += &filled(s, x + 1.0, top, (bar - 2.0).max(1.0), (base - top).max(0.8), &words);
            let centre = x + bar / 2.0;
            let tip = y(value.mean.max(0.0) + if value.mean < 0.0 { 0.0 } else { value.deviation });
            if value.deviation > 0.0 {
                let (low, high) = (y(value.mean - value.deviation), y(value.mean + value.deviation));
                let _ = write!(
                    svg,
                    "<path class=\"whisker\" d=\"M{centre:.1},{low:.1} V{high:.1} M{0:.1},{high:.1} H{1:.1} M{0:.1},{low:.1} H{1:.1}\"/>",
                    centre - 3.0,
                    centre + 3.0
                );
            }
            if bar > 22.0 {
                let _ = write!(
                    svg,
                    "<text class=\"value\" x=\"{centre:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    tip - 4.0,
                    short(value.mean)
                );
            }
        }
        let _ = write!(
            svg,
            "<text class=\"name\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM + 18.0,
            escaped(&shortened(group, room / 6.3))
        );
    }
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/>",
        WIDTH - RIGHT,
        y(0.0)
    );
    svg + "</svg>"
}

fn shortened(text: &str, characters: f64) -> String {
    let room = (characters as usize).max(5);
    if text.chars().count() <= room { text.to_owned() } else { text.chars().take(room - 1).chain(['…']).collect() }
}

/// The series' names beside their colours and patterns.
pub fn key(series: &[String]) -> String {
    let mut html = "<div class=\"key\">".to_owned();
    for (index, name) in series.iter().enumerate().take(SERIES_MAX) {
        let _ = write!(
            html,
            "<span><svg viewBox=\"0 0 30 12\">{}</svg>{}</span>",
            filled(index, 0.0, 0.0, 30.0, 12.0, ""),
            escaped(name)
        );
    }
    html + "</div>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_inside_their_bar() {
        for series in 0..SERIES_MAX {
            let svg = filled(series, 10.0, 20.0, 30.0, 50.0, "");
            let path = svg.split("d=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default();
            assert_eq!(path.is_empty(), series == 0);
            for point in path.split(['M', 'L']).filter(|point| !point.is_empty()) {
                let (x, y) = point.split_once(',').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!((10.0..=40.0).contains(&x) && (20.0..=70.0).contains(&y), "series {series}: {point}");
            }
        }
    }

    #[test]
    fn curves_stay_inside_and_an_empty_one_is_no_accident() {
        let points = [(0.0, 0.0), (1.0, 5e6), (2.0, 1e6)];
        let svg = curves("memory", &[("a & b".to_owned(), &points), ("none".to_owned(), &[])]);
        assert!(svg.contains("a &amp; b") && svg.ends_with("</svg>"));
        assert!(svg.contains(&format!("M{LEFT:.1},")) && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
