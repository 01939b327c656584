//! Plain-text tables: one report in full, or several side by side.

use super::{LabelledReport, Report};

/// Groups a number's digits by thousands.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes in the largest fitting binary unit.
pub fn bytes(value: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB"];
    let mut value = value;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} B") } else { format!("{value:.2} {}", units[unit]) }
}

/// Microseconds in a readable unit.
pub fn micros(value: f64) -> String {
    match value {
        v if v < 1e3 => format!("{v:.0} us"),
        v if v < 1e6 => format!("{:.2} ms", v / 1e3),
        v if v < 3600e6 => format!("{:.2} s", v / 1e6),
        v => format!("{:.2} h", v / 3600e6),
    }
}

/// Lays rows out in columns: the first left, the others right.
pub fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| match column {
            0 => format!("{cell:<0$}", widths[0]),
            _ => format!("{cell:>0$}", widths[column]),
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// One report in full.
pub fn full(r: &Report) -> String {
    let optional = |value: Option<f64>, show: &dyn Fn(f64) -> String| value.map_or("-".into(), show);
    let times = |t: &super::Times| {
        let [mean, p50, p90, p99, p999, max] =
            [t.mean_us, t.p50_us as f64, t.p90_us as f64, t.p99_us as f64, t.p999_us as f64, t.max_us as f64]
                .map(micros);
        format!("mean {mean}, 50% {p50}, 90% {p90}, 99% {p99}, 99.9% {p999}, max {max}")
    };
    let n = grouped;
    let mut lines: Vec<(&str, String)> = vec![
        ("FTL", r.ftl.name().into()),
        ("requests", format!("{} ({} per second simulated)", n(r.requests), n(r.requests_per_second as u64))),
        (
            "host pages",
            format!(
                "{} read ({} never written), {} written",
                n(r.host_pages_read),
                n(r.unwritten_pages_read),
                n(r.host_pages_written)
            ),
        ),
        ("flash pages", format!("{} read, {} programmed", n(r.flash_reads), n(r.flash_writes))),
        ("write amplification", format!("{:.3}", r.write_amplification)),
        ("erases", n(r.erases)),
        (
            "erases per block",
            format!(
                "min {}, mean {:.3}, max {}, deviation {:.3}, evenness {:.3}",
                r.wear.min, r.wear.mean, r.wear.max, r.wear.deviation, r.wear.evenness
            ),
        ),
        (
            "GC overhead",
            format!(
                "{} ({} copies, {} erases, {} runs)",
                micros(r.gc.time_us as f64),
                n(r.gc.valid_page_copies),
                n(r.gc.erases),
                n(r.gc.runs)
            ),
        ),
    ];
    if r.gc.translation.erases > 0 {
        let t = &r.gc.translation;
        lines.push((
            "  translation blocks",
            format!("{} ({} copies, {} erases)", micros(t.time_us as f64), n(t.valid_page_copies), n(t.erases)),
        ));
    }
    let m = &r.merges;
    if m.switch + m.partial + m.full > 0 {
        lines.push((
            "merges",
            format!(
                "{} switch, {} partial, {} full ({} of them of the SW log block)",
                n(m.switch),
                n(m.partial),
                n(m.full),
                n(m.full_sequential)
            ),
        ));
    }
    let m = &r.mapping;
    if m.hits + m.misses > 0 {
        let share = 100.0 * super::ratio(m.hits as f64, (m.hits + m.misses) as f64);
        lines.push((
            "mapping",
            format!(
                "{share:.2} % hits, {} pages read, {} programmed, {} spare areas read",
                n(m.reads),
                n(m.writes),
                n(m.spare_reads)
            ),
        ));
    }
    if r.wear.levelling_moves > 0 {
        lines.push((
            "wear levelling",
            format!(
                "{} blocks moved, {} copies, {} erases",
                n(r.wear.levelling_moves),
                n(r.wear.levelling_copies),
                n(r.wear.levelling_erases)
            ),
        ));
    }
    lines.extend([
        ("flash time", micros(r.time_us as f64)),
        ("service time", times(&r.service)),
        ("response time", times(&r.response)),
        (
            "lifetime",
            match r.erases {
                0 => "no block was erased, so there is nothing to project from".into(),
                _ => format!(
                    "{} written by the host if wear is even ({} years at this pace), first block worn after {} repetitions",
                    optional(r.lifetime.host_bytes_even, &bytes),
                    optional(r.lifetime.years_even, &|y| format!("{y:.1}")),
                    optional(r.lifetime.repetitions_first_block, &|t| n(t as u64)),
                ),
            },
        ),
    ]);
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, text)| format!("{name:<width$}  {text}\n")).collect()
}

/// Several reports side by side, one row each.
pub fn side_by_side(reports: &[LabelledReport]) -> String {
    let header = [
        "workload",
        "mode",
        "FTL",
        "requests",
        "written",
        "erases",
        "GC time",
        "copies",
        "switch/partial/full",
        "mapping read/written",
        "WA",
        "p99 service",
        "evenness",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for LabelledReport { workload, mode, report: r, .. } in reports {
        rows.push(vec![
            workload.clone(),
            mode.clone().unwrap_or_else(|| "-".into()),
            r.ftl.name().into(),
            grouped(r.requests),
            bytes(r.traffic.bytes_written as f64),
            grouped(r.erases),
            micros(r.gc.time_us as f64),
            grouped(r.gc.valid_page_copies),
            format!("{}/{}/{}", r.merges.switch, r.merges.partial, r.merges.full),
            format!("{}/{}", r.mapping.reads, r.mapping.writes),
            format!("{:.2}", r.write_amplification),
            micros(r.service.p99_us as f64),
            format!("{:.3}", r.wear.evenness),
        ]);
    }
    columns(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!([grouped(7), grouped(1234), grouped(12_345_678)], ["7", "1,234", "12,345,678"]);
        assert_eq!([bytes(10.0), bytes(2048.0), bytes(3.5 * 1024.0 * 1024.0)], ["10 B", "2.00 KiB", "3.50 MiB"]);
        assert_eq!([micros(88.0), micros(2500.0), micros(2.5e6)], ["88 us", "2.50 ms", "2.50 s"]);
        assert_eq!(columns(&[vec!["a".into(), "1".into()], vec!["bb".into(), "22".into()]]), "a    1\nbb  22\n");
    }
}
