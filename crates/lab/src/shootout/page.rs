//! The shoot-out's page and its table: who takes part and on what, latency, speed, bytes to each medium, the host's processor, and what survives.

use super::contender::described;
use super::guest::{GUEST_MIB, IMAGE_MIB, JOURNAL_MIB};
use super::kinds::{Death, Load};
use super::{Cell, PROMISE_KEPT, RATE, goals};
use crate::catalogue::ITERATIONS_OF_A_PAPER as ITERATIONS;
use crate::fields::grouped;
use crate::report::sample;
use crate::statistics::Summary;
use charts::{Bar, Bars, Lines, Series, bars, key, lines};
use maud::{Markup, html};
use std::collections::BTreeSet;
use std::fmt::Write;

const COLUMNS: [(&str, &str); 15] = [
    ("p50_us", "p50, µs"),
    ("p99_us", "p99, µs"),
    ("p999_us", "p99.9, µs"),
    (RATE, "operations per second"),
    ("seconds", "seconds"),
    ("seconds_until_home", "seconds until all is home and unmounted"),
    ("storage_bytes", "MB to storage"),
    ("storage_flushes", "flushes"),
    ("memory_bytes", "MB of host memory"),
    ("copied_percent", "% copied"),
    ("write_faults", "write faults"),
    ("nvm_bytes", "MB to NVM"),
    ("network_bytes", "MB over the network"),
    ("host_cpu_seconds", "host CPU, s"),
    ("host_cpu_seconds_until_home", "host CPU until all is home, s"),
];

/// What the figures do not say by themselves.
const HOW_TO_READ: [&str; 10] = [
    "A figure is the mean of n iterations, in brackets the lowest and the highest of them; bars have intervals of 95 % where n is 2 or more.",
    "Seconds and the host's processor time end when the load has made durable what it makes durable; 'until all is home' ends when the file system is unmounted, and what a journal still owed is in its place. Bytes and flushes are counted until the VM has ended, so they belong to the latter.",
    "The host's page cache takes no part, but for the contenders that end in '-cached': the medium is a file behind FUSE that nothing is cached of, so QEMU's 'unsafe' pays a round trip for each write on it, and 'writeback', which differs from 'none' by the page cache alone, is 'none' by another name. '-cached' is QEMU on the file behind the medium, all of it in the host's page cache: of it nobody counts bytes or flushes, its writes are not on storage when it is 'home', and nobody kills it; a flush of 'writeback' takes there what the file system below takes for it (on tmpfs nothing), and not the time that is said above.",
    "A flush of the medium takes at least the time that is said above, and no other write reaches the medium meanwhile.",
    "A power cut drops exactly what no flush covered, and all that was in the host's memory. 'Lost' is a count of acknowledged records; it says nothing of damage, which stands beside it where e2fsck found any.",
    "Colours of what survives: whether the contender kept its promise, not whether nothing was lost. Where nothing is promised there is no colour. What is promised by age is held to it with one second more, for a write-out.",
    "Load 'fsync' calls fdatasync on blocks that are allocated: a file system that journals no data has no metadata to write for it.",
    "A curve of latencies is of all iterations together; p50, p99 and p99.9 are means of the iterations' own.",
    "'Shorter than three ages': the load was over before three times the age had passed within which this contender's data are durable. What it sent to storage it sent at the load's end or as its log was full, hardly by age; more rounds (--rounds) show a steady state.",
    "Deaths are n = 1: what they show to be lost can be lost; that nothing was is one observation.",
];

/// Lowest, mean and highest of the iterations.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Spread {
    summary: Summary,
    low: f64,
    high: f64,
}

impl Spread {
    fn shown(&self, field: &str) -> String {
        let mean = shown(field, self.summary.mean);
        if self.summary.count < 2 {
            return mean;
        }
        format!("{mean} ({}–{})", shown(field, self.low), shown(field, self.high))
    }
}

fn contenders(cells: &[Cell]) -> Vec<(String, String)> {
    let mut names: Vec<(String, String)> = Vec::new();
    for cell in cells {
        if !names.iter().any(|(name, _)| *name == cell.contender) {
            names.push((cell.contender.clone(), cell.conditions.platform.clone()));
        }
    }
    names
}

fn loads(cells: &[Cell]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let is_death = |name: &str| Death::ALL.iter().any(|death| death.name() == name);
    for cell in cells.iter().filter(|cell| !is_death(&cell.what)) {
        if !names.contains(&cell.what) {
            names.push(cell.what.clone());
        }
    }
    names
}

fn value(cells: &[Cell], contender: &str, what: &str, field: &str) -> Option<Spread> {
    let of = cells.iter().filter(|cell| cell.contender == contender && cell.what == what && cell.failure.is_none());
    let values: Vec<f64> = of.filter_map(|cell| cell.figure(field)).collect();
    let [low, high] = [f64::min, f64::max].map(|one| values.iter().copied().reduce(one));
    Some(Spread { summary: Summary::of(&values)?, low: low?, high: high? })
}

/// Behind the number of iterations of who is durable by age, and had no time to be.
const SHORT: &str = ", shorter than three ages";

fn is_short(cells: &[Cell], contender: &str, what: &str) -> bool {
    cells
        .iter()
        .any(|cell| cell.contender == contender && cell.what == what && cell.failure.is_none() && cell.is_short())
}

/// One curve of all iterations' latencies, each of which counts the same: µs, and the per cent of operations that were done within.
fn merged(cells: &[Cell], contender: &str, what: &str) -> Vec<(f64, f64)> {
    let of = cells.iter().filter(|cell| cell.contender == contender && cell.what == what && cell.failure.is_none());
    let curves: Vec<&[(f64, f64)]> =
        of.map(|cell| cell.distribution.as_slice()).filter(|curve| !curve.is_empty()).collect();
    let mut times: Vec<f64> = curves.iter().flat_map(|curve| curve.iter().map(|(_, us)| *us)).collect();
    times.sort_by(f64::total_cmp);
    times.dedup();
    let share = |us: f64| curves.iter().map(|curve| share_within(curve, us)).sum::<f64>() / curves.len() as f64;
    times.into_iter().map(|us| (us, share(us))).collect()
}

/// The per cent of operations that took at most so many µs, by a curve of per cent and µs; between two points on the line that joins them.
fn share_within(curve: &[(f64, f64)], us: f64) -> f64 {
    let below = curve.iter().rev().find(|(_, at)| *at <= us);
    let above = curve.iter().find(|(_, at)| *at > us);
    match (below, above) {
        (Some((low, from)), Some((high, to))) => low + (high - low) * (us - from) / (to - from),
        (Some((share, _)), None) => *share,
        (None, _) => 0.0,
    }
}

/// The day and the minute, in UTC, of seconds since 1970: "2026-11-28 14:30".
fn date(seconds: u64) -> String {
    let (days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    // Years from March on, in eras of 400, of which every one has as many days (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (of_month, month) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year}-{month:02}-{of_month:02} {:02}:{:02}", minutes / 60, minutes % 60)
}

/// What the cells were measured on, by which program and when: a line for each that there is, since cells of several can be on one page.
fn surroundings(cells: &[Cell]) -> Vec<String> {
    let mut all: Vec<(String, u64, u64)> = Vec::new();
    for cell in cells {
        let of = |name: &str| cell.environment.get(name).map_or("not said", String::as_str);
        let words = format!(
            "{}, {}; host: Linux {}; guest: Linux {}; {}; accelerator: {}; program: {}, {}; images in {}",
            if cell.machine.is_empty() { of("processor") } else { &cell.machine },
            of("memory"),
            of("kernel"),
            of("guest_kernel"),
            of("qemu"),
            of("accelerator"),
            if cell.commit.is_empty() { "of no known commit" } else { &cell.commit },
            of("build"),
            if cell.conditions.images.is_empty() { "a place that is not said" } else { &cell.conditions.images },
        );
        match all.iter_mut().find(|(known, ..)| *known == words) {
            Some((_, from, to)) => (*from, *to) = ((*from).min(cell.ended), (*to).max(cell.ended)),
            None => all.push((words, cell.ended, cell.ended)),
        }
    }
    all.into_iter().map(|(words, from, to)| format!("{words}; measured {} to {} UTC", date(from), date(to))).collect()
}

/// What is the same for all.
fn common(cells: &[Cell]) -> String {
    let flush = cells.first().map_or(0, |cell| cell.conditions.flush_us);
    format!(
        "A guest of one processor and {GUEST_MIB} MiB of memory; an image of {IMAGE_MIB} MiB with a journal of {JOURNAL_MIB} MiB (ext4; others have what their mkfs gives them), on a file whose flush takes {flush} µs at least; as much of fast memory as the journal for who takes some."
    )
}

fn is_quick(cells: &[Cell]) -> bool {
    cells.iter().any(|cell| cell.conditions.quick)
}

fn loads_in_words(cells: &[Cell]) -> Vec<String> {
    let quick = is_quick(cells);
    let all = Load::ALL.into_iter().filter(|load| loads(cells).iter().any(|name| name == load.name()));
    let mut lines = Vec::new();
    for load in all {
        let of = cells.iter().filter(|cell| cell.what == load.name());
        let rounds: BTreeSet<u32> = of.map(|cell| cell.conditions.rounds).collect();
        lines.extend(rounds.into_iter().map(|rounds| format!("{}: {}", load.name(), load.in_words(quick, rounds))));
    }
    lines
}

fn shown(field: &str, value: f64) -> String {
    if field.ends_with("_bytes") { grouped((value / 1e5).round() / 10.0) } else { grouped(value) }
}

fn survival(cells: &[Cell], contender: &str, death: Death) -> (String, &'static str) {
    let cell = cells.iter().find(|cell| cell.contender == contender && cell.what == death.name());
    match cell {
        Some(Cell { failure: Some(failure), .. }) => {
            (format!("failed: {}", failure.lines().next().unwrap_or_default()), "bad")
        }
        Some(cell) => {
            let class = match cell.fields.get(PROMISE_KEPT) {
                Some(kept) if *kept > 0.0 => "good",
                Some(_) => "bad",
                None => "open",
            };
            (cell.words.clone(), class)
        }
        None => ("not tried".to_owned(), "open"),
    }
}

const PARTAKERS: [&str; 4] = ["contender", "file system and mount options", "served by", "promised"];

/// All that is shown.
#[derive(Clone, Copy)]
pub(super) struct Shown<'a> {
    pub(super) cells: &'a [Cell],
    /// Attempts that failed, and were tried again.
    pub(super) set_aside: &'a [Cell],
    /// Who and what was left out, and why.
    pub(super) absent: &'a [String],
}

impl Shown<'_> {
    /// The attempts at a load, or a death, that failed: a smaller n has a reason.
    fn failures(self, what: &str) -> Vec<String> {
        let is_shown = |cell: &&Cell| {
            let of = |other: &Cell| (&other.contender, &other.what) == (&cell.contender, &cell.what);
            self.cells.iter().any(|other| of(other) && other.conditions == cell.conditions)
        };
        let failed = self.set_aside.iter().filter(is_shown).chain(self.cells);
        failed
            .filter(|cell| cell.what == what)
            .filter_map(|cell| {
                let reason = cell.failure.as_ref()?.lines().next().unwrap_or_default();
                let Cell { contender, iteration, attempts, .. } = cell;
                Some(format!("{contender}, iteration {}, attempt {attempts}: {reason}", iteration + 1))
            })
            .collect()
    }

    fn failures_of_deaths(self) -> Vec<String> {
        let of = |death: Death| {
            let failures = self.failures(death.name()).into_iter();
            failures.map(move |failure| format!("{}, {failure}", death.name()))
        };
        Death::ALL.into_iter().flat_map(of).collect()
    }

    /// Markdown: who takes part, on what, what survives, a table for each load, and how to read them.
    pub(super) fn table(self) -> String {
        table(self)
    }

    /// The page.
    pub(super) fn page(self) -> String {
        page(self)
    }
}

/// Lines of a list in Markdown, where there are any.
fn listed_failures(failures: &[String]) -> String {
    if failures.is_empty() {
        return String::new();
    }
    failures.iter().fold("\nAttempts that failed:\n\n".to_owned(), |text, line| text + &format!("* {line}\n"))
}

fn failures_as_markup(failures: &[String]) -> Markup {
    html! {
        @if !failures.is_empty() {
            p { "Attempts that failed:" }
            ul { @for line in failures { li { (line) } } }
        }
    }
}

fn table(shown: Shown<'_>) -> String {
    let Shown { cells, absent, .. } = shown;
    let mut text = String::new();
    if is_quick(cells) {
        text += "Quick cells: that they work is what is seen; times say nothing.\n\n";
    }
    let _ = writeln!(text, "{}\n", common(cells));
    let lines = surroundings(cells).into_iter().chain(loads_in_words(cells));
    let lines = lines.chain(absent.iter().map(|reason| format!("left out: {reason}")));
    lines.for_each(|line| text += &format!("* {line}\n"));
    let _ = writeln!(text, "\n| {} |\n|---|---|---|---|", PARTAKERS.join(" | "));
    for (name, _) in contenders(cells) {
        let _ = writeln!(text, "| {name} | {} |", described(&name).unwrap_or_default().join(" | "));
    }
    text += "\n| contender | guest dies | VMM dies | host dies | platform |\n|---|---|---|---|---|\n";
    for (name, platform) in contenders(cells) {
        let deaths = Death::ALL.map(|death| survival(cells, &name, death).0).join(" | ");
        let _ = writeln!(text, "| {name} | {deaths} | {platform} |");
    }
    text += &listed_failures(&shown.failures_of_deaths());
    let judged = goals::judged(cells);
    if !judged.is_empty() {
        let columns = goals::COLUMNS;
        let _ = writeln!(text, "\n| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
        judged.iter().for_each(|goal| text += &format!("| {} |\n", goal.row.join(" | ")));
        let _ = writeln!(text, "\n{}", goals::HOW_TO_READ);
    }
    for load in loads(cells) {
        let header: Vec<&str> = COLUMNS.iter().map(|(_, words)| *words).collect();
        let _ = writeln!(text, "\n| {load} | n | {} |\n|---|---|{}", header.join(" | "), "---|".repeat(COLUMNS.len()));
        for (name, _) in contenders(cells) {
            let count = value(cells, &name, &load, "seconds").map_or(0, |spread| spread.summary.count);
            let short = if is_short(cells, &name, &load) { SHORT } else { "" };
            let row = COLUMNS.map(|(field, _)| {
                value(cells, &name, &load, field).map_or_else(String::new, |spread| spread.shown(field))
            });
            let _ = writeln!(text, "| {name} | {count}{short} | {} |", row.join(" | "));
        }
        text += &listed_failures(&shown.failures(&load));
    }
    text += "\nHow to read it:\n\n";
    HOW_TO_READ.iter().for_each(|line| text += &format!("* {line}\n"));
    text
}

fn page(shown: Shown<'_>) -> String {
    let Shown { cells, absent, .. } = shown;
    let names = contenders(cells);
    let looks: Vec<Series> =
        names.iter().enumerate().map(|(index, (name, _))| Series::nth(index, name.clone())).collect();
    let partakers: Vec<(String, Vec<Markup>)> = names
        .iter()
        .map(|(name, _)| {
            let words = described(name).unwrap_or_default();
            let row = std::iter::once(name.clone()).chain(words).map(|words| html! { (words) });
            (String::new(), row.collect())
        })
        .collect();
    let survivors: Vec<(String, Vec<Markup>)> = names
        .iter()
        .map(|(name, platform)| {
            let mut row = vec![html! { (name) }];
            row.extend(Death::ALL.map(|death| {
                let (words, class) = survival(cells, name, death);
                html! { span class=(class) { (words) } }
            }));
            row.push(html! { (platform) });
            (String::new(), row)
        })
        .collect();
    let judged: Vec<(String, Vec<Markup>)> = goals::judged(cells)
        .into_iter()
        .map(|goals::Judged { row: [goal, load, ratio, count, verdict], class }| {
            let plain = [goal, load, ratio, count].map(|words| html! { (words) });
            (String::new(), plain.into_iter().chain([html! { span class=(class) { (verdict) } }]).collect())
        })
        .collect();
    let body = html! {
        h1 { "Where a journal can live: a shoot-out" }
        p { "The same guest and the same medium. Each contender runs each load, and is killed in three ways while it acknowledges records one by one. " (common(cells)) }
        @for line in surroundings(cells) { p.note { (line) "." } }
        @if is_quick(cells) { p.note { "Quick cells: that they work is what is seen; times say nothing." } }
        @if !absent.is_empty() { p { "Left out: " (absent.join("; ")) "." } }
        h2 { "Who takes part" }
        (charts::table(&PARTAKERS, &partakers))
        ul { @for line in loads_in_words(cells) { li { (line) } } }
        h2 { "How to read it" }
        ul { @for line in HOW_TO_READ { li { (line) } } }
        h2 { "What survives" }
        (charts::table(&["contender", "guest dies", "VMM dies", "host dies", "platform"], &survivors))
        (failures_as_markup(&shown.failures_of_deaths()))
        @if !judged.is_empty() {
            h2 { "Goals" }
            p { (goals::HOW_TO_READ) }
            (charts::table(&goals::COLUMNS, &judged))
        }
        (key(&looks))
        @for load in loads(cells) { (of_load(shown, &load, &names, &looks)) }
    };
    charts::page("amberlog shoot-out", &body)
}

fn of_load(shown: Shown<'_>, load: &str, names: &[(String, String)], looks: &[Series]) -> Markup {
    let cells = shown.cells;
    let distributions: Vec<(Series, Vec<(f64, f64)>)> = names
        .iter()
        .zip(looks)
        .filter_map(|((name, _), look)| {
            let curve = merged(cells, name, load);
            (!curve.is_empty()).then(|| (look.clone(), curve))
        })
        .collect();
    let series: Vec<(Series, &[(f64, f64)])> =
        distributions.iter().map(|(look, points)| (look.clone(), points.as_slice())).collect();
    let plot = |field: &str, words: &str| {
        let values = vec![
            names
                .iter()
                .map(|(name, _)| value(cells, name, load, field).map(|one| bar(field, &one.summary)))
                .collect::<Vec<_>>(),
        ];
        let title = format!("{load}: {words}");
        let label =
            |value: f64| if field.ends_with("_bytes") { charts::short(value / 1e6) } else { charts::short(value) };
        bars(&Bars {
            title: &title,
            groups: &[load.to_owned()],
            series: looks,
            values: &values,
            marks: &[],
            ceiling: None,
            label: &label,
        })
    };
    let operation = Load::ALL.into_iter().find(|one| one.name() == load).map_or("operation", Load::operation);
    let header: Vec<&str> = ["contender", "n"].into_iter().chain(COLUMNS.iter().map(|(_, words)| *words)).collect();
    let rows: Vec<(String, Vec<Markup>)> = names
        .iter()
        .map(|(name, _)| {
            let count = value(cells, name, load, "seconds").map_or(0, |one| one.summary.count);
            let is_few = sample(count, ITERATIONS) != charts::Sample::Enough;
            let mut row = vec![
                html! { (name) },
                html! { (count) @if is_few { ", too small" } @if is_short(cells, name, load) { (SHORT) } },
            ];
            row.extend(COLUMNS.iter().map(
                |(field, _)| html! { @if let Some(one) = value(cells, name, load, field) { (one.shown(field)) } },
            ));
            (String::new(), row)
        })
        .collect();
    html! {
        h2 { (load) }
        div.pair {
            @if !series.is_empty() {
                figure { (lines(&Lines { title: &format!("{load}: {operation}, share done within a time"), x_name: "µs", y_name: "per cent", is_logarithmic: true, names_peaks: false, series: &series })) }
            }
            @for (field, words) in [("p999_us", "p99.9, µs"), ("seconds", "seconds"), ("seconds_until_home", "seconds until all is home and unmounted"), ("storage_bytes", "MB to storage"), ("host_cpu_seconds", "host CPU, s"), ("host_cpu_seconds_until_home", "host CPU until all is home, s")] {
                figure { (plot(field, words)) }
            }
        }
        (charts::table(&header, &rows))
        (failures_as_markup(&shown.failures(load)))
    }
}

fn bar(field: &str, value: &Summary) -> Bar {
    let interval = value.interval();
    Bar {
        value: value.mean,
        interval: interval.map(|one| (one.low, one.high)),
        sample: sample(value.count, ITERATIONS),
        words: format!("{}, n = {}", shown(field, value.mean), value.count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shootout::cell_for_tests;
    use std::collections::BTreeMap;

    #[test]
    fn the_page_has_what_survives_and_every_load() {
        let cell = |contender: &str, what: &str, words: &str, failure: Option<&str>| Cell {
            fields: BTreeMap::from([
                ("seconds".to_owned(), 1.5),
                ("storage_bytes".to_owned(), 2.0e6),
                ("p999_us".to_owned(), 9.0),
            ]),
            distribution: vec![(50.0, 100.0), (99.9, 4000.0)],
            words: words.into(),
            ..cell_for_tests(contender, what, failure)
        };
        let judged = |mut cell: Cell, kept: f64| {
            cell.fields.insert(PROMISE_KEPT.to_owned(), kept);
            cell
        };
        let mut again = cell("retain", "fsync", "", None);
        again.fields.insert("seconds".to_owned(), 2.5);
        let cells = [
            cell("retain", "fsync", "", None),
            again,
            cell("retain", "host-dies", "12 of 40 lost", None),
            judged(cell("retain", "vmm-dies", "everything", None), 1.0),
            judged(cell("retain-5", "host-dies", "PROMISE BROKEN: 1 lost", None), 0.0),
            cell("xfs", "fsync", "", Some("it hung\nmore")),
        ];
        let set_aside = [
            cell("retain", "fsync", "", Some("its disk was not served as asked")),
            cell("nvm", "fsync", "", Some("?")),
        ];
        let absent = ["f2fs: the guest's kernel has no f2fs".to_owned()];
        let shown = Shown { cells: &cells, set_aside: &set_aside, absent: &absent };
        let html = shown.page();
        for expected in [
            "class=\"open\">12 of 40 lost",
            "class=\"good\">everything",
            "class=\"bad\">PROMISE BROKEN",
            "Left out: f2fs",
            "not tried",
            "<svg",
            "Quick cells",
            "2 × a processor",
            "QEMU 7.2",
            "images in /dev/shm (tmpfs)",
            "amberlog, placement=retain,durable-within=5",
            "2 (1.5–2.5)",
            "<li>retain, iteration 1, attempt 1: its disk was not served as asked</li><li>xfs, iteration 1, attempt 1: it hung</li>",
        ] {
            assert!(html.contains(expected), "{expected}: {html}");
        }
        assert!(!html.contains("<h2>Goals"), "there is nothing to judge");
        let table = shown.table();
        assert!(table.contains("| retain | not tried | everything | 12 of 40 lost | tcg |"), "{table}");
        assert!(table.contains("| retain | 2 | ") && table.contains("2 (1.5–2.5)"), "{table}");
        assert!(table.contains("fdatasync on blocks that are allocated"), "{table}");
        assert!(table.contains("| xfs | 0 |"), "what failed has no numbers: {table}");
        assert!(table.contains("* xfs, iteration 1, attempt 1: it hung\n"), "and says why: {table}");
        assert!(!table.contains("* nvm"), "nothing of it is shown: {table}");
    }

    #[test]
    fn goals_rates_rounds_and_short_loads_are_on_the_page() {
        let cells: Vec<Cell> =
            [("retain-5", 2.0), ("retain-5", 2.1), ("qemu-none-journal", 64.0), ("qemu-none-journal", 66.0)]
                .into_iter()
                .map(|(contender, seconds)| {
                    let mut cell = cell_for_tests(contender, "fsync", None);
                    (cell.conditions.quick, cell.conditions.rounds) = (false, 2);
                    cell.fields.extend([("seconds".to_owned(), seconds), ("storage_bytes".to_owned(), 1e6 * seconds)]);
                    cell
                })
                .collect();
        let shown = Shown { cells: &cells, set_aside: &[], absent: &[] };
        let table = shown.table();
        for expected in [
            "fsync: 32 MiB, 4 KiB at random places of a file of 64 MiB, fdatasync after each; these are 2 rounds on end",
            "| retain-5, seconds: at most 1 × qemu-none-journal | fsync | 0.032 (0.0",
            "| 2, 2 | met, shorter than three ages |",
            "| retain-5 | 2, shorter than three ages |",
            "| 3,998 (3,901–4,096) | 2.05 (2–2.1) |",
            "operations per second",
        ] {
            assert!(table.contains(expected), "{expected}: {table}");
        }
        let html = shown.page();
        for expected in
            ["<h2>Goals", "class=\"good\">met, shorter than three ages", "2, too small, shorter than three ages"]
        {
            assert!(html.contains(expected), "{expected}: {html}");
        }
    }

    #[test]
    fn iterations_latencies_are_one_curve() {
        let curve = [(50.0, 100.0), (99.0, 200.0)];
        assert_eq!([50.0, 100.0, 150.0, 900.0].map(|us| share_within(&curve, us)), [0.0, 50.0, 74.5, 99.0]);
    }

    #[test]
    fn seconds_since_1970_are_a_date() {
        assert_eq!(date(0), "1970-01-01 00:00");
        assert_eq!(date(951_782_399), "2000-02-28 23:59");
        assert_eq!(date(951_868_800), "2000-03-01 00:00");
        assert_eq!(date(1_795_876_200), "2026-11-28 14:30");
    }
}
