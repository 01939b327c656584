//! The goals of durability by age, and what `retain` is held to, judged by what was measured: a ratio of two means, between what it lies, and whether
//! all of that is on one side of the goal.
//!
//! It must never judge what is not comparable: a quick cell, one iteration, or what two programs or machines measured. Nor hide a goal whose
//! cells have failed: that has its row, too.

use super::kinds::Load;
use super::{Cell, RATE};
use crate::statistics::{Interval, Summary, ratio_interval};

/// How a figure is to stand to the other's.
#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// One goal.
struct Goal {
    contender: &'static str,
    /// A figure of a cell, and what it is called.
    figure: (&'static str, &'static str),
    bound: Bound,
    reference: &'static str,
    /// None: all of them.
    loads: &'static [Load],
    /// Whether it is a goal only where a flush takes time.
    needs_flush: bool,
}

const SPEED: (&str, &str) = (RATE, "operations per second");
const BYTES: (&str, &str) = ("storage_bytes", "bytes to storage");
const TIME: (&str, &str) = ("seconds", "seconds");
const ALL: &[Load] = &Load::ALL;
const WRITTEN_ONCE: &[Load] = &[Load::Append, Load::Untar];
const OF_FSYNCS: &[Load] = &[Load::Fsync, Load::Sqlite, Load::SqliteWal, Load::Varmail];

const fn goal(
    contender: &'static str,
    figure: (&'static str, &'static str),
    bound: Bound,
    reference: &'static str,
    loads: &'static [Load],
) -> Goal {
    Goal { contender, figure, bound, reference, loads, needs_flush: false }
}

const fn with_flush(goal: Goal) -> Goal {
    Goal { needs_flush: true, ..goal }
}

const GOALS: [Goal; 9] = [
    goal("retain-5", SPEED, Bound::AtLeast(0.9), "qemu-unsafe-journal", &[Load::Fsync]),
    goal("retain-5", BYTES, Bound::AtMost(1.1), "retain", WRITTEN_ONCE),
    goal("retain-5", BYTES, Bound::AtMost(1.1), "qemu-none", WRITTEN_ONCE),
    goal("retain-5", BYTES, Bound::AtMost(0.6), "qemu-none-journal", ALL),
    with_flush(goal("retain-0", SPEED, Bound::AtLeast(1.2), "qemu-none-journal", &[Load::Fsync])),
    with_flush(goal("retain-0", BYTES, Bound::AtMost(0.6), "qemu-none-journal", WRITTEN_ONCE)),
    with_flush(goal("retain-0", SPEED, Bound::AtLeast(1.0), "qemu-none", OF_FSYNCS)),
    goal("retain", TIME, Bound::AtMost(1.0), "qemu-none-journal", ALL),
    goal("retain-5", TIME, Bound::AtMost(1.0), "qemu-none-journal", ALL),
];

/// The columns of a row.
pub(super) const COLUMNS: [&str; 5] =
    ["goal", "load", "ratio of means, and between what it lies (95 %)", "n", "verdict"];

/// What the figures do not say by themselves.
pub(super) const HOW_TO_READ: &str = "A goal is met or missed where all that the ratio lies between (Welch's, of its logarithm) is on one side of it, and unclear elsewhere. Who is durable by age and took less than three of them has shown a beginning and an end, and no steady state.";

/// A goal under a load.
#[derive(Debug, PartialEq)]
pub(super) struct Judged {
    /// As [`COLUMNS`].
    pub(super) row: [String; 5],
    /// Of the verdict, as a page colours it.
    pub(super) class: &'static str,
}

/// Every goal under every load for which both sides were measured, or both take part and one has no good cell.
pub(super) fn judged(cells: &[Cell]) -> Vec<Judged> {
    let flush = cells.iter().any(|cell| cell.conditions.flush_us > 0);
    let goals = GOALS.iter().filter(|goal| flush || !goal.needs_flush);
    goals.flat_map(|goal| goal.loads.iter().filter_map(|load| goal.under(*load, cells))).collect()
}

impl Goal {
    fn under(&self, load: Load, cells: &[Cell]) -> Option<Judged> {
        let of = |name: &str| -> Vec<&Cell> {
            let is_of = |cell: &&Cell| cell.contender == name && cell.what == load.name() && cell.failure.is_none();
            cells.iter().filter(is_of).collect()
        };
        let (ours, others) = (of(self.contender), of(self.reference));
        let summary = |cells: &[&Cell]| {
            Summary::of(&cells.iter().filter_map(|cell| cell.figure(self.figure.0)).collect::<Vec<_>>())
        };
        let (own, other) = match (summary(&ours), summary(&others)) {
            (Some(own), Some(other)) => (own, other),
            (own, other) => return self.unmeasured(load, cells, (own, other)),
        };
        if other.mean <= 0.0 {
            return None;
        }
        let ratio = own.mean / other.mean;
        let interval = ratio_interval(&own, &other);
        let all = || ours.iter().chain(&others);
        let (mut verdict, class) = if all().any(|cell| cell.conditions.quick) {
            ("not judged: quick".to_owned(), "open")
        } else if all().any(|cell| cell.source() != ours[0].source()) {
            ("not judged: of two programs or machines".to_owned(), "open")
        } else {
            match interval {
                Some(interval) => self.bound.verdict(interval),
                None => ("unclear: one iteration".to_owned(), "middle"),
            }
        };
        if ours.iter().any(|cell| cell.is_short()) {
            verdict += ", shorter than three ages";
        }
        let between = interval.map_or_else(String::new, |one| format!(" ({:.3}–{:.3})", one.low, one.high));
        let row = [
            self.in_words(),
            load.name().to_owned(),
            format!("{ratio:.3}{between}"),
            format!("{}, {}", own.count, other.count),
            verdict,
        ];
        Some(Judged { row, class })
    }

    /// Where both sides take part and somebody has tried the load, but one of them has no good cell of it.
    fn unmeasured(&self, load: Load, cells: &[Cell], sides: (Option<Summary>, Option<Summary>)) -> Option<Judged> {
        let takes_part = |name: &str| cells.iter().any(|cell| cell.contender == name);
        let is_tried = cells.iter().any(|cell| cell.what == load.name());
        if !is_tried || !takes_part(self.contender) || !takes_part(self.reference) {
            return None;
        }
        let who = match sides {
            (None, None) => format!("{} and {} have", self.contender, self.reference),
            (None, Some(_)) => format!("{} has", self.contender),
            (Some(_), _) => format!("{} has", self.reference),
        };
        let count = |side: Option<Summary>| side.map_or(0, |side| side.count);
        let row = [
            self.in_words(),
            load.name().to_owned(),
            String::new(),
            format!("{}, {}", count(sides.0), count(sides.1)),
            format!("not judged: {who} no good cell"),
        ];
        Some(Judged { row, class: "open" })
    }

    fn in_words(&self) -> String {
        let (side, limit) = match self.bound {
            Bound::AtLeast(limit) => ("at least", limit),
            Bound::AtMost(limit) => ("at most", limit),
        };
        format!("{}, {}: {side} {limit} × {}", self.contender, self.figure.1, self.reference)
    }
}

impl Bound {
    fn verdict(self, interval: Interval) -> (String, &'static str) {
        let (is_met, is_missed) = match self {
            Self::AtLeast(limit) => (interval.low >= limit, interval.high < limit),
            Self::AtMost(limit) => (interval.high <= limit, interval.low > limit),
        };
        match (is_met, is_missed) {
            (true, _) => ("met".to_owned(), "good"),
            (_, true) => ("missed".to_owned(), "bad"),
            _ => ("unclear".to_owned(), "middle"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shootout::{Conditions, cell_for_tests, contender};

    fn cells(contender: &str, load: &str, field: &str, values: &[f64]) -> Vec<Cell> {
        let cell = |value: &f64| {
            let mut cell = cell_for_tests(contender, load, None);
            cell.conditions.quick = false;
            cell.fields.extend([("seconds".to_owned(), 20.0), (field.to_owned(), *value)]);
            cell
        };
        values.iter().map(cell).collect()
    }

    fn verdicts(cells: &[Cell]) -> Vec<(String, String)> {
        judged(cells).into_iter().map(|one| (one.row[0].clone(), one.row[4].clone())).collect()
    }

    #[test]
    fn a_goal_is_met_missed_or_unclear_by_all_that_the_ratio_lies_between() {
        let of = |ours: &[f64]| {
            let all = [
                cells("retain-5", "untar", "storage_bytes", ours),
                cells("retain", "untar", "storage_bytes", &[100.0, 101.0, 99.0]),
            ];
            let all = all.concat();
            let judged = judged(&all);
            assert_eq!(judged.len(), 1, "{judged:?}");
            assert_eq!(judged[0].row[0], "retain-5, bytes to storage: at most 1.1 × retain");
            (judged[0].row[2].clone(), judged[0].row[4].clone(), judged[0].class)
        };
        let (ratio, verdict, class) = of(&[100.0, 101.0, 102.0]);
        assert!(ratio.starts_with("1.010 (0.9") && ratio.ends_with(')'), "{ratio}");
        assert_eq!((verdict.as_str(), class), ("met", "good"));
        assert_eq!(of(&[130.0, 131.0, 132.0]).1, "missed");
        assert_eq!(of(&[100.0, 110.0, 120.0]).1, "unclear");
        assert_eq!(of(&[100.0]).1, "unclear: one iteration");
    }

    #[test]
    fn speed_is_of_the_operations_that_were_counted_and_of_a_medium_whose_flush_takes_time() {
        let mut all = [
            cells("retain-0", "fsync", "seconds", &[10.0, 10.1, 9.9]),
            cells("qemu-none-journal", "fsync", "seconds", &[20.0, 20.1, 19.9]),
            cells("qemu-none", "fsync", "seconds", &[8.0, 8.1, 7.9]),
        ]
        .concat();
        let all_are = |verdicts: Vec<(String, String)>, expected: &[(&str, &str)]| {
            let verdicts: Vec<(&str, &str)> =
                verdicts.iter().map(|(goal, verdict)| (goal.as_str(), verdict.as_str())).collect();
            assert_eq!(verdicts, expected);
        };
        all_are(
            verdicts(&all),
            &[
                ("retain-0, operations per second: at least 1.2 × qemu-none-journal", "met"),
                ("retain-0, operations per second: at least 1 × qemu-none", "missed"),
            ],
        );
        assert_eq!(all[0].figure(RATE), Some(409.6), "16 MiB in 4 KiB each, in 10 s");
        for cell in &mut all {
            cell.conditions.flush_us = 0;
        }
        all_are(verdicts(&all), &[]);
    }

    #[test]
    fn what_is_not_comparable_is_not_judged_and_what_was_short_says_so() {
        let all = [
            cells("retain-5", "append", "storage_bytes", &[50.0, 50.0]),
            cells("qemu-none-journal", "append", "storage_bytes", &[100.0, 100.0]),
        ]
        .concat();
        let words = |all: &[Cell]| judged(all)[0].row.join(" | ");
        assert!(words(&all).ends_with("| 0.500 (0.500–0.500) | 2, 2 | met"), "{}", words(&all));
        let mut short = all.clone();
        short[0].fields.insert("seconds".to_owned(), 14.9);
        assert!(words(&short).ends_with("met, shorter than three ages"), "{}", words(&short));
        let mut two = all.clone();
        two[3].commit = "b".to_owned();
        assert!(words(&two).ends_with("not judged: of two programs or machines"), "{}", words(&two));
        let mut quick = all;
        for cell in &mut quick {
            cell.conditions = Conditions { quick: true, ..cell.conditions.clone() };
        }
        assert!(words(&quick).ends_with("not judged: quick"), "{}", words(&quick));
    }

    #[test]
    fn a_goal_whose_cells_have_failed_has_its_row() {
        let failed = |contender: &str| cell_for_tests(contender, "untar", Some("it hung"));
        let mut all = [
            cells("retain-5", "append", "storage_bytes", &[50.0, 50.0]),
            cells("retain", "append", "storage_bytes", &[50.0, 50.0]),
            cells("retain", "untar", "storage_bytes", &[70.0, 70.0]),
            vec![failed("retain-5")],
        ]
        .concat();
        let rows = |all: &[Cell]| judged(all).iter().map(|one| one.row.join(" | ")).collect::<Vec<_>>();
        let goal = "retain-5, bytes to storage: at most 1.1 × retain";
        let on_append = format!("{goal} | append | 1.000 (1.000–1.000) | 2, 2 | met");
        let on_untar = format!("{goal} | untar |  | 0, 2 | not judged: retain-5 has no good cell");
        assert_eq!(rows(&all), [on_append.clone(), on_untar]);
        all.retain(|cell| cell.what == "append" || cell.failure.is_some());
        all.push(failed("retain"));
        let neither = format!("{goal} | untar |  | 0, 0 | not judged: retain-5 and retain have no good cell");
        assert_eq!(rows(&all), [on_append.clone(), neither]);
        all.retain(|cell| cell.what == "append");
        assert_eq!(rows(&all), [on_append], "nobody has tried to unpack, and others take no part");
    }

    #[test]
    fn goals_are_of_contenders_that_there_are() {
        for goal in &GOALS {
            for name in [goal.contender, goal.reference] {
                assert!(contender::described(name).is_some(), "{name}");
            }
            assert!(
                !goal.loads.is_empty()
                    && (goal.figure.0 != RATE || goal.loads.iter().all(|load| load.operations(false, 1).is_some()))
            );
        }
    }
}
