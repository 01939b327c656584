//! Axes: steps, and numbers on them.

/// A step of 1, 2 or 5 times a power of ten that divides a span into about five.
pub fn step(span: f64) -> f64 {
    let raw = (span / 5.0).max(1e-12);
    let power = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= raw * 0.999).unwrap_or(raw)
}

/// A number for an axis or a bar.
pub fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e12 => (value / 1e12, "T"),
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = if value.abs() >= 100.0 {
        0
    } else if value.abs() >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{}{unit}", if text == "-0" { "0" } else { text })
}

/// The first characters of a text, as many as there is room for.
pub(crate) fn shortened(text: &str, room: f64) -> String {
    let count = (room / 6.2) as usize;
    let count = count.max(4);
    if text.chars().count() <= count { text.to_owned() } else { text.chars().take(count - 1).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_numbers() {
        assert_eq!((step(10.0), step(9.0), step(1e-20) > 0.0), (2.0, 2.0, true));
        assert_eq!((short(0.0), short(12_345.0), short(2_500_000.0)), ("0".into(), "12.3k".into(), "2.5M".into()));
        assert_eq!((short(-0.001), short(99.96)), ("0".into(), "100".into()));
        assert_eq!(shortened("kernel_compile", 40.0), "kerne…");
    }
}
