//! A few kinds of plots as inline SVG: bars in groups, and lines. Colours come from the page's style sheet
//! (classes `f0` to `f7` fill, `l0` to `l7` draw lines), so that one picture serves light, dark and paper; lines also differ by dashes.

use std::fmt::Write;

/// Escapes text for HTML and SVG.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const WIDTH: f64 = 720.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 14.0;

/// A step of 1, 2 or 5 times a power of ten that divides `max` into about five.
fn step(max: f64) -> f64 {
    let raw = (max / 5.0).max(1e-12);
    let power = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|f| f * power).find(|&s| s >= raw).unwrap_or(raw)
}

/// A number for an axis.
pub fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e12 => (value / 1e12, "T"),
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{value:.2}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

/// Bars: groups along the x axis, one bar per series in each. `label` shows a value at its bar.
pub fn bars(
    groups: &[String],
    series: &[String],
    values: &[Vec<Option<f64>>],
    label: &dyn Fn(f64) -> String,
) -> String {
    let (height, bottom) = (300.0, 40.0);
    let max = values.iter().flatten().flatten().fold(0.0f64, |a, &b| a.max(b)).max(1e-9);
    let step = step(max);
    let top_value = (max / step).ceil() * step;
    let plot = height - TOP - bottom - 16.0;
    let y = |value: f64| TOP + 16.0 + plot * (1.0 - value / top_value);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">");
    let mut tick = 0.0;
    while tick <= top_value * 1.0001 {
        let at = y(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            short(tick)
        );
        tick += step;
    }
    let room = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    let bar = (room * 0.82 / series.len().max(1) as f64).min(64.0);
    for (g, group) in groups.iter().enumerate() {
        let middle = LEFT + room * (g as f64 + 0.5);
        let first = middle - bar * series.len() as f64 / 2.0;
        for (s, series_name) in series.iter().enumerate() {
            let Some(value) = values.get(g).and_then(|v| v.get(s)).copied().flatten() else { continue };
            let (x, top) = (first + bar * s as f64, y(value));
            let _ = write!(
                svg,
                "<rect class=\"f{s}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{} {}: {}</title></rect>",
                x + 1.0,
                bar - 2.0,
                (y(0.0) - top).max(0.5),
                escaped(group),
                escaped(series_name),
                escaped(&label(value))
            );
            if bar > 26.0 {
                let _ = write!(
                    svg,
                    "<text class=\"value\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    x + bar / 2.0,
                    top - 4.0,
                    escaped(&short_label(value, label))
                );
            }
        }
        let mut name: String = group.chars().take(((room / 6.5) as usize).max(4)).collect();
        if name.len() < group.len() {
            name.pop();
            name.push('…');
        }
        let _ = write!(
            svg,
            "<text class=\"name\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\"><title>{}</title>{}</text>",
            height - bottom + 18.0,
            escaped(group),
            escaped(&name)
        );
    }
    svg.push_str("</svg>");
    svg
}

/// A bar's own label must be short: long ones are left to the tooltip.
fn short_label(value: f64, label: &dyn Fn(f64) -> String) -> String {
    let text = label(value);
    if text.len() <= 9 { text } else { short(value) }
}

/// Lines; `log_x` puts the x axis on a logarithmic scale.
pub fn lines(series: &[Vec<(f64, f64)>], x_name: &str, y_name: &str, log_x: bool) -> String {
    let (height, bottom) = (300.0, 52.0);
    let points = || series.iter().flatten();
    let scale = |x: f64| if log_x { x.max(1.0).log10() } else { x };
    let x_max = points().map(|p| scale(p.0)).fold(0.0f64, f64::max).max(1e-9);
    let x_min = if log_x { points().map(|p| scale(p.0)).fold(x_max, f64::min).floor() } else { 0.0 };
    let x_max = if log_x { x_max.ceil().max(x_min + 1.0) } else { x_max };
    let y_max = points().map(|p| p.1).fold(0.0f64, f64::max).max(1e-9);
    let y_step = step(y_max);
    let y_top = (y_max / y_step).ceil() * y_step;
    let x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * ((scale(value) - x_min) / (x_max - x_min)).clamp(0.0, 1.0);
    let y = |value: f64| TOP + (height - TOP - bottom) * (1.0 - value / y_top);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">");
    let mut tick = 0.0;
    while tick <= y_top * 1.0001 {
        let at = y(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            short(tick)
        );
        tick += y_step;
    }
    let mut ticks = Vec::new();
    if log_x {
        let mut power = x_min;
        while power <= x_max + 0.001 {
            ticks.push(10f64.powf(power));
            power += 1.0;
        }
    } else {
        let x_step = step(x_max);
        let mut at = 0.0;
        while at <= x_max * 1.0001 {
            ticks.push(at);
            at += x_step;
        }
    }
    for tick in ticks {
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{TOP}\" y2=\"{1:.1}\"/><text class=\"tick\" x=\"{0:.1}\" y=\"{2:.1}\" text-anchor=\"middle\">{3}</text>",
            x(tick),
            height - bottom,
            height - bottom + 16.0,
            short(tick)
        );
    }
    let _ = write!(
        svg,
        "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text><text class=\"name\" transform=\"translate(13 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        height - 10.0,
        escaped(x_name),
        (TOP + height - bottom) / 2.0,
        escaped(y_name)
    );
    for (s, points) in series.iter().enumerate() {
        let path: Vec<String> = points.iter().map(|&(px, py)| format!("{:.1},{:.1}", x(px), y(py))).collect();
        let _ = write!(svg, "<polyline class=\"l{s}\" points=\"{}\"/>", path.join(" "));
    }
    svg.push_str("</svg>");
    svg
}
