//! What a cell cannot see. A comparison is void where both sides did the same, or where the run was too short for what
//! would make them differ; it is shown, and never judged.

use crate::cell::Mode;
use crate::claim::{Claim, Sense, Sides};
use crate::clocks;
use crate::fields::{amount, grouped, is_load_time, is_most_memory, is_time};
use crate::measured::{Parameters, SummaryRow};
use crate::rig::{COMMIT_SECONDS, configured_journal_mib};
use crate::samples::sampled;

/// A journal that commits fewer transactions in a run has hardly been used in it.
const TRANSACTIONS_MIN: f64 = 3.0;
/// A run must last so many commit intervals to say something of them.
const INTERVALS_MIN: f64 = 3.0;
/// What whole seconds may make of a commit interval, as a part of it.
const INTERVAL_ROUNDING_MAX: f64 = 0.1;
/// A load shorter than this is its own beginning and end.
const SECONDS_MIN: f64 = 1.0;
/// What must differ differs by so many per cent at least.
const SEEN_PERCENT_MIN: f64 = 5.0;

/// Why a cell cannot see what it claims; `None` if it can.
pub fn blindness(claim: &Claim, sides: &Sides<'_>, parameters: &Parameters, parameter: Option<&str>) -> Option<String> {
    let both = || std::iter::once(sides.ours).chain(sides.other);
    let of = |row: &SummaryRow, field: &str| row.fields.get(field).map(|summary| summary.mean);
    let is_small = parameters.scale < 1.0;
    // More than the bound is more than it at any size.
    let is_over = |bound: f64| of(sides.ours, &claim.field).is_some_and(|ours| ours > bound);
    let is_broken = !claim.is_comparison() && matches!(claim.sense, Sense::AtMost(bound) if is_over(bound));
    if is_most_memory(&claim.field) && is_small && !is_broken {
        return Some(format!("the bound is one of the full size; this is {} of it", parameters.scale));
    }
    // What samples saw breaks a bound, and upholds none.
    let is_at_most = !claim.is_comparison() && matches!(claim.sense, Sense::AtMost(_));
    if is_at_most && !is_broken && of(sides.ours, &sampled(&claim.field)).is_some() {
        return Some("the most that samples saw, ten a second, which may have missed more".to_owned());
    }
    let shortest = both().filter_map(|row| of(row, &claim.field)).reduce(f64::min);
    if is_load_time(&claim.field)
        && !parameters.quick
        && let Some(short) = shortest.filter(|seconds| *seconds < SECONDS_MIN)
    {
        return Some(format!("a run of {short:.2} s is little more than its beginning and end"));
    }
    let is_of_runs = is_load_time(&claim.field) || claim.field == "bytes_to_storage";
    // At the papers' own sizes too: a native guest on a drive as fast as theirs may be done before the timer of its journal has come twice.
    if is_of_runs
        && !parameters.quick
        && let Some(reason) = both().find_map(|row| hardly_commits(row, parameters, parameter))
    {
        return Some(reason);
    }
    if parameter == Some("commit_seconds")
        && let Some(reason) = both().find_map(|row| rounded_interval(row.group.parameter, parameters.clocks))
    {
        return Some(reason);
    }
    if parameter == Some("commit_seconds") && is_time(&claim.field) {
        for row in both() {
            let interval = row.group.parameter as f64 * parameters.clocks;
            let seconds = of(row, &claim.field).unwrap_or(0.0);
            if seconds < INTERVALS_MIN * interval {
                return Some(format!("a run of {seconds:.1} s cannot see a commit interval of {interval:.0} s"));
            }
        }
    }
    if let (Some("transaction_mib" | "journal_mib"), Some(other)) = (parameter, sides.other)
        && other.group.parameter != sides.ours.group.parameter
    {
        let journal = |row: &SummaryRow| configured_journal_mib(&row.group, parameters.scale, parameter);
        if journal(sides.ours) == journal(other) {
            return Some(format!("both have a journal of {} MiB, the smallest", journal(other)));
        }
    }
    if let (Some(field), Some(other)) = (&claim.sees, sides.other) {
        let (ours, other) = (of(sides.ours, field)?, of(other, field)?);
        if (ours - other).abs() * 100.0 <= SEEN_PERCENT_MIN * ours.max(other) {
            return Some(format!("both did the same: {} and {}", amount(field, ours), amount(field, other)));
        }
    }
    if claim.field.starts_with("recovery_") && both().any(|row| of(row, "recovery_bytes") == Some(0.0)) {
        return Some("nothing had been committed when it was killed".to_owned());
    }
    let is_of_processors = matches!(claim.field.as_str(), "cpu_seconds" | "network_percent");
    if is_of_processors && !parameters.platform.starts_with("kvm") {
        return Some("an emulated processor's seconds, beside real ones".to_owned());
    }
    None
}

/// Why a commit interval is not the one that its row is named after: of a part of a second a kernel makes a whole one.
fn rounded_interval(full: u64, clocks: f64) -> Option<String> {
    let (asked, has) = (full as f64 * clocks, clocks::commit_seconds(full, clocks) as f64);
    ((has - asked).abs() > INTERVAL_ROUNDING_MAX * asked).then(|| {
        format!(
            "a commit interval of {full} s would be {} s by these clocks, and a kernel has whole seconds: it was {has} s, as of {} s",
            grouped(asked),
            grouped(has / clocks)
        )
    })
}

/// Why a row says little of its journal: it was hardly used. What never commits, and what drops what it commits, has none to speak of.
fn hardly_commits(row: &SummaryRow, parameters: &Parameters, parameter: Option<&str>) -> Option<String> {
    let mode = row.group.mode;
    if mode.placement() == "discard" {
        return None;
    }
    let of = |field: &str| row.fields.get(field).map(|summary| summary.mean);
    let transactions = of("transactions")?;
    let commits =
        if transactions < 1.5 { "one commit".to_owned() } else { format!("{} commits", grouped(transactions)) };
    if !commits_metadata_alone(mode) {
        // A mode that journals data commits by what it wrote, not by its timer alone: all of it at once is no journal in use either.
        return (0.5..1.5).contains(&transactions).then(|| format!("{commits} in all of the run under {mode}"));
    }
    // What is compared with ordered and writeback is their commits, and the data that they write before them.
    if transactions < TRANSACTIONS_MIN {
        return Some(format!("{commits} in all of the run under {mode}"));
    }
    let seconds = of("seconds_unmounted").or_else(|| of("seconds"))?;
    let full = if parameter == Some("commit_seconds") { row.group.parameter } else { COMMIT_SECONDS };
    let interval = clocks::commit_seconds(full, parameters.clocks) as f64;
    // More commits than the timer has made are the load's own, which asks for them.
    let is_by_timer = transactions < TRANSACTIONS_MIN + seconds / interval;
    (is_by_timer && seconds < INTERVALS_MIN * interval).then(|| {
        format!("a run of {seconds:.1} s under {mode} has {commits}, and not three intervals of {interval:.0} s")
    })
}

fn commits_metadata_alone(mode: Mode) -> bool {
    mode.mount_options().starts_with("data=ordered") || mode.mount_options().starts_with("data=writeback")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Group;
    use crate::statistics::Summary;
    use std::collections::BTreeMap;

    fn row(mode: Mode, parameter: u64, fields: &[(&str, f64)]) -> SummaryRow {
        let group = Group { disk: "none".into(), parameter, guests: 1, workload: "postmark".into(), mode };
        let summary = |value: f64| Summary { mean: value, deviation: 0.0, count: 3 };
        let fields: BTreeMap<_, _> = fields.iter().map(|(name, value)| ((*name).to_owned(), summary(*value))).collect();
        SummaryRow { group, count: 3, failed: 0, failed_before: 0, sources: Default::default(), fields }
    }

    fn seen(text: &str, parameter: Option<&str>, scale: f64, rows: &[SummaryRow]) -> Option<String> {
        let claim: Claim = text.parse().unwrap();
        let parameters = Parameters { scale, clocks: 1.0, platform: "tcg".into(), ..Parameters::for_tests() };
        blindness(&claim, &claim.cells(rows)[0], &parameters, parameter)
    }

    #[test]
    fn a_metadata_mode_that_commits_once_is_no_comparison() {
        let rows = |count: f64| {
            [
                row(Mode::Vma, 0, &[("seconds", 50.0), ("transactions", 9.0)]),
                row(Mode::Ordered, 0, &[("seconds", 40.0), ("transactions", count)]),
            ]
        };
        let text = "at-most seconds vma ordered 24.5";
        // A referee found the rule off at the papers' own sizes, where the data show one commit as well.
        for scale in [0.1, 1.0] {
            assert_eq!(seen(text, None, scale, &rows(1.0)).unwrap(), "one commit in all of the run under ordered");
            assert_eq!(seen(text, None, scale, &rows(2.5)).unwrap(), "2.5 commits in all of the run under ordered");
            assert_eq!(seen(text, None, scale, &rows(18.0)), None);
        }
    }

    #[test]
    fn a_run_shorter_than_three_commit_intervals_says_nothing_of_commits() {
        let rows = |seconds: f64, count: f64| {
            [
                row(Mode::Vma, 0, &[("seconds", 9.0), ("transactions", 9.0)]),
                row(Mode::Ordered, 0, &[("seconds", seconds), ("transactions", count)]),
            ]
        };
        let text = "less seconds vma ordered";
        assert!(seen(text, None, 1.0, &rows(14.0, 4.0)).unwrap().ends_with("not three intervals of 5 s"));
        assert_eq!(seen(text, None, 1.0, &rows(16.0, 4.0)), None);
        assert_eq!(seen(text, None, 1.0, &rows(2.0, 100.0)), None, "the load asks for its commits");
        let deletion = |count: f64| {
            [Mode::Vma, Mode::Journal].map(|mode| row(mode, 0, &[("delete_seconds", 3.0), ("transactions", count)]))
        };
        let text = "between delete_seconds vma journal 10.8 24.6";
        assert_eq!(seen(text, None, 1.0, &deletion(1.0)).unwrap(), "one commit in all of the run under vma");
        assert_eq!((seen(text, None, 1.0, &deletion(4.0)), seen(text, None, 1.0, &deletion(0.0))), (None, None));
    }

    #[test]
    fn intervals_lengths_and_bounds_need_their_sizes() {
        let run = |mode, at, seconds| row(mode, at, &[("seconds", seconds), ("area_bytes_max", 77_000.0)]);
        let short = [run(Mode::Ordered, 30, 1.2), run(Mode::Ordered, 1, 1.2)];
        let long = [run(Mode::Ordered, 30, 95.0), run(Mode::Ordered, 1, 99.0)];
        let text = "less seconds ordered@30 ordered@1";
        assert!(seen(text, Some("commit_seconds"), 0.1, &short).unwrap().contains("cannot see"));
        assert_eq!(seen(text, Some("commit_seconds"), 0.1, &long), None);
        assert!(seen(text, Some("commit_seconds"), 1.0, &short).unwrap().contains("cannot see"));
        let lengths = [run(Mode::Vma, 8, 9.0), run(Mode::Vma, 4, 9.0)];
        let text = "less seconds vma@8 vma@4";
        assert!(seen(text, Some("transaction_mib"), 0.1, &lengths).unwrap().contains("8 MiB"));
        assert_eq!(seen(text, Some("transaction_mib"), 1.0, &lengths), None);
        let text = "value-at-most area_bytes_max vma 204800";
        assert!(seen(text, None, 0.1, &lengths).is_some() && seen(text, None, 1.0, &lengths).is_none());
        let text = "value-at-most area_bytes_max vma 20480";
        assert_eq!(seen(text, None, 0.1, &lengths), None, "a bound of the full size that a tenth breaks is broken");
    }

    /// An auditor found that intervals of 1 and 5 s are both one of 1 s at a declared scale of a tenth, and judged.
    #[test]
    fn an_interval_that_clocks_cannot_make_as_short_is_none() {
        let run = |at| row(Mode::Ordered, at, &[("seconds", 95.0), ("transactions", 40.0)]);
        let rows = [run(1), run(5), run(15), run(30)];
        let of = |text: &str, scale, time_scale, clocks| {
            let claim: Claim = text.parse().unwrap();
            let parameters = Parameters { scale, time_scale, clocks, ..Parameters::for_tests() };
            assert!(parameters.is_declared() || parameters.is_full());
            blindness(&claim, &claim.cells(&rows)[0], &parameters, Some("commit_seconds"))
        };
        for text in [
            "less seconds ordered@30 ordered@1",
            "same seconds ordered@1 ordered@5",
            "less transactions ordered@30 ordered@1",
        ] {
            let told = of(text, 0.1, 2.0, 0.2).unwrap();
            assert!(told.starts_with("a commit interval of 1 s would be 0.2 s by these clocks"), "{told}");
            assert!(told.ends_with("it was 1 s, as of 5 s"), "{told}");
            assert!(of(text, 0.1, 6.0, 0.6).is_some(), "0.6 s");
            assert_eq!(of(text, 1.0, 1.0, 1.0), None, "the papers' own");
        }
        assert_eq!(of("less seconds ordered@30 ordered@5", 0.1, 2.0, 0.2), None, "6 s and 1");
        assert_eq!(of("less seconds ordered@30 ordered@15", 0.1, 2.0, 0.2), None, "6 s and 3");
    }

    #[test]
    fn what_samples_saw_upholds_no_bound() {
        let rows = [row(Mode::Vma, 0, &[("pool_bytes_max", 5000.0), ("pool_bytes_max_sampled", 1.0)])];
        assert!(seen("value-at-most pool_bytes_max vma 20480", None, 1.0, &rows).unwrap().contains("samples"));
        assert_eq!(seen("value-at-most pool_bytes_max vma 4096", None, 1.0, &rows), None, "it breaks one");
        let rows = [row(Mode::Vma, 0, &[("pool_bytes_max", 5000.0)])];
        assert_eq!(seen("value-at-most pool_bytes_max vma 20480", None, 1.0, &rows), None);
    }

    #[test]
    fn two_that_did_the_same_show_nothing() {
        let rows = |bytes: f64| {
            [
                row(Mode::NvmLogEverything, 0, &[("seconds", 50.0), ("journal_write_bytes", 39.03e6)]),
                row(Mode::Nvm, 0, &[("seconds", 51.0), ("journal_write_bytes", bytes)]),
            ]
        };
        let text = "about seconds nvm-all-journal nvm 6.5 sees journal_write_bytes";
        assert!(seen(text, None, 1.0, &rows(39.01e6)).unwrap().starts_with("both did the same: 39.0 MB"));
        assert_eq!(seen(text, None, 1.0, &rows(3.0e6)), None);
        let rows = [row(Mode::Vma, 0, &[("cpu_seconds", 5.0)])];
        assert!(seen("value-at-most cpu_seconds vma 5", None, 1.0, &rows).is_some(), "emulated");
    }
}
