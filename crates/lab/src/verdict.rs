//! A claim held against what was measured, cell by cell.
//!
//! A cell is judged by its estimate and by the interval of 95 % around it, against the range that the paper's words leave,
//! widened by a fifth of the paper's number (two points at least; five where the paper says "no difference"). One measurement is never judged; nor is what
//! cannot see what it claims ([`crate::sight`]). More of an effect than the paper had is said to be that, not to be better.

use crate::binding::{Binding, Bound, binding};
use crate::catalogue::{RECORDS_ASKED, iterations_asked};
use crate::cell::Group;
use crate::claim::{Claim, Sense, Sides, What};
use crate::fields::{amount, change, goes_by_scale, is_counted, is_most_memory, is_proportion, is_time};
use crate::measured::{Parameters, Source, SummaryRow};
use crate::records::CRASHES_A_BOOT;
use crate::sight;
use crate::statistics::{Interval, Summary, percent_less, percent_less_interval, points_less};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// The part of the paper's number by which another machine, a dozen years later, may miss it and still be said to agree.
const TOLERANCE: f64 = 0.2;
/// At least, in points of a percentage.
const TOLERANCE_POINTS_MIN: f64 = 2.0;
/// What "no difference" leaves, in points.
const SAME_POINTS: f64 = 5.0;

/// Why one measurement is not judged.
pub(crate) const ONCE: &str = "measured once";

/// What never happened may, for all that was seen, happen in this part of all runs; if in more, too little was seen.
const UNSEEN_MAX: f64 = 0.5;

/// How ours and the paper's compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Agreement {
    /// As the paper says.
    Agrees,
    /// The paper's effect, beyond what the paper says.
    Stronger,
    /// The paper's effect, less of it.
    Weaker,
    /// No effect could be told from none.
    Absent,
    /// A cost that the paper has, and more of it.
    CostsMore,
    /// The opposite of what the paper says.
    Reversed,
    /// A value outside the paper's bound or range.
    Beyond,
    /// The interval is too wide to say.
    Unclear,
    /// What was measured agrees, and cells of the claim are not there, or cannot tell.
    Incomplete,
    /// One measurement, or a quick one's time.
    NotJudged,
    /// It cannot see what it claims.
    Void,
    /// There is no measurement.
    Missing,
}

impl Agreement {
    /// All of them, in the order in which they are listed.
    pub const ALL: [Self; 12] = [
        Self::Agrees,
        Self::Stronger,
        Self::Weaker,
        Self::Absent,
        Self::CostsMore,
        Self::Reversed,
        Self::Beyond,
        Self::Unclear,
        Self::Incomplete,
        Self::NotJudged,
        Self::Void,
        Self::Missing,
    ];

    /// In a word or two.
    pub fn words(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::Stronger => "stronger",
            Self::Weaker => "weaker",
            Self::Absent => "absent",
            Self::CostsMore => "costs more",
            Self::Reversed => "reversed",
            Self::Beyond => "outside",
            Self::Unclear => "unclear",
            Self::Incomplete => "incomplete",
            Self::NotJudged => "not judged",
            Self::Void => "void",
            Self::Missing => "not measured",
        }
    }

    /// Whether it says something of the paper's claim.
    pub fn is_judged(self) -> bool {
        !matches!(self, Self::Unclear | Self::Incomplete | Self::NotJudged | Self::Void | Self::Missing)
    }
}

/// One cell of a claim, judged.
#[derive(Clone, Debug, Serialize)]
pub struct CellVerdict {
    /// Which.
    #[serde(flatten)]
    pub group: Group,
    /// Per cent less, or the value.
    pub ours: f64,
    /// What it lies between.
    pub interval: Option<Interval>,
    /// Measurements of the side that has fewer; of records, boots.
    pub count: usize,
    /// How many there are to be: a verdict on fewer is marked.
    pub asked: usize,
    /// How it compares.
    pub agreement: Agreement,
    /// Why it is not judged, or void.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What each side waited for.
    pub bound: Vec<Binding>,
}

/// A claim, judged.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// What is compared, in a few words.
    pub label: String,
    /// The field.
    pub field: String,
    /// The paper's number in words.
    pub paper: String,
    /// The paper's number or range, where it has one: per cent less, or a value.
    pub paper_range: Option<(f64, f64)>,
    /// Whether its numbers are per cent less.
    pub is_comparison: bool,
    /// All cells that it is about.
    pub cells: Vec<CellVerdict>,
    /// How they compare in all: the worst of what was judged.
    pub agreement: Agreement,
    /// All of that as a sentence.
    pub sentence: String,
}

/// What the paper's words leave, in per cent less or as values, widened.
fn range(claim: &Claim) -> (f64, f64) {
    let least = if claim.is_comparison() { TOLERANCE_POINTS_MIN } else { 0.0 };
    let slack = |value: f64| if claim.is_goal { 0.0 } else { (value.abs() * TOLERANCE).max(least) };
    match claim.sense {
        Sense::Same => (-SAME_POINTS, SAME_POINTS),
        Sense::Less => (0.0, f64::INFINITY),
        Sense::About(value) => (value - slack(value), value + slack(value)),
        // A bound is a bound: "at most 200 kB" leaves nothing above.
        Sense::AtMost(value) if !claim.is_comparison() => (f64::NEG_INFINITY, value),
        Sense::AtMost(value) if value < 0.0 => (value - slack(value), 0.0),
        Sense::AtMost(value) => (0.0, value + slack(value)),
        Sense::AtLeast(value) => (value - slack(value), f64::INFINITY),
        Sense::Between(low, high) => (low - slack(low), high + slack(high)),
    }
}

/// The direction of the paper's effect: 1 for less, −1 for more, 0 for none.
fn direction(claim: &Claim) -> f64 {
    match claim.sense {
        Sense::Same => 0.0,
        Sense::Less => 1.0,
        Sense::About(value) | Sense::AtMost(value) => value.signum(),
        // "At most 10 % more" is a bound on what is bad, and no effect.
        Sense::AtLeast(value) => {
            if value < 0.0 {
                0.0
            } else {
                1.0
            }
        }
        Sense::Between(low, high) => (low + high).signum(),
    }
}

fn judged_cell(claim: &Claim, ours: f64, interval: Interval) -> Agreement {
    let (low, high) = range(claim);
    if !claim.is_comparison() {
        return match claim.sense {
            // What was never to happen and happened in one run has happened.
            Sense::AtMost(bound) if is_proportion(&claim.field) && ours > bound => Agreement::Beyond,
            // None in a few boots may still be every second one.
            _ if is_proportion(&claim.field) && interval.high > high + UNSEEN_MAX => Agreement::Unclear,
            _ if is_proportion(&claim.field) => Agreement::Agrees,
            _ if interval.low > high || interval.high < low => Agreement::Beyond,
            _ if (low..=high).contains(&ours) && (low.is_finite() || interval.high <= high) => Agreement::Agrees,
            _ => Agreement::Unclear,
        };
    }
    let direction = direction(claim);
    if direction == 0.0 {
        return if interval.low >= low && interval.high <= high {
            Agreement::Agrees
        } else if interval.low > high || interval.high < low {
            // "No difference" has no direction: either one contradicts it.
            Agreement::Beyond
        } else {
            Agreement::Unclear
        };
    }
    // Turned so that the paper's effect is positive.
    let (ours, least, most) = (ours * direction, interval.low.min(interval.high), interval.low.max(interval.high));
    let (least, most) = if direction > 0.0 { (least, most) } else { (-most, -least) };
    let (low, high) = if direction > 0.0 { (low, high) } else { (-high, -low) };
    if most < 0.0 {
        Agreement::Reversed
    } else if least <= 0.0 {
        // No effect could be told from none: there is none of the paper's size, or, where the interval has that too, there may be.
        if most < low.max(TOLERANCE_POINTS_MIN) { Agreement::Absent } else { Agreement::Unclear }
    } else if least > high {
        if direction < 0.0 { Agreement::CostsMore } else { Agreement::Stronger }
    } else if most < low {
        Agreement::Weaker
    } else if (low..=high).contains(&ours) && (least >= low || !claim.is_goal) {
        Agreement::Agrees
    } else {
        Agreement::Unclear
    }
}

fn measured(claim: &Claim, sides: &Sides<'_>) -> (Option<f64>, Option<Interval>, usize) {
    let of = |row: &SummaryRow| row.fields.get(&claim.field).copied();
    match (of(sides.ours), sides.other.map(of)) {
        (Some(ours), None) => {
            let interval = if is_proportion(&claim.field) { ours.proportion_interval() } else { ours.interval() };
            // Nothing that is measured is less than nothing, however far it strays.
            let interval = interval.map(|one| Interval { low: one.low.max(0.0), ..one });
            (Some(ours.mean), interval, ours.count)
        }
        (Some(ours), Some(Some(other))) => {
            let count = ours.count.min(other.count);
            if is_proportion(&claim.field) {
                let (less, interval) = points_less(&ours, &other);
                return (Some(less), interval, count);
            }
            let interval = percent_less_interval(&ours, &other).or_else(|| all_gone(&ours, &other));
            (percent_less(&ours, &other), interval, count)
        }
        _ => (None, None, 0),
    }
}

/// All that measured both sides.
fn sources(sides: &Sides<'_>) -> BTreeSet<Source> {
    std::iter::once(sides.ours).chain(sides.other).flat_map(|row| row.sources.iter().cloned()).collect()
}

/// Why what several measured is not judged: a difference may be theirs.
fn several(sources: &BTreeSet<Source>) -> String {
    let machines: BTreeSet<&str> = sources.iter().map(|source| source.machine.as_str()).collect();
    let commits: BTreeSet<&str> = sources.iter().map(|source| source.commit.as_str()).collect();
    let (count, of) = match (machines.len(), commits.len()) {
        (count @ 2.., _) => (count, "machines"),
        (_, count @ 2..) => (count, "commits"),
        // Of one commit, and changed since, or built otherwise.
        _ => (sources.len(), "programs"),
    };
    if count == 2 { format!("two {of}") } else { format!("{count} {of}") }
}

/// What is nothing in every run, where the other is not, is 100 % less in every run.
fn all_gone(ours: &Summary, other: &Summary) -> Option<Interval> {
    let is_nothing = ours.mean == 0.0 && ours.deviation == 0.0 && ours.count > 1 && other.count > 1;
    (is_nothing && other.mean > 0.0).then_some(Interval { low: 100.0, high: 100.0 })
}

/// A claim held against rows that were measured under these parameters, of an experiment that has these groups; `parameter` is the name of its own
/// parameter. A group that was not measured is a cell of the claim all the same.
pub fn judge(
    claim: &Claim,
    rows: &[SummaryRow],
    groups: &[Group],
    parameters: &Parameters,
    parameter: Option<&str>,
) -> Verdict {
    let mut cells = Vec::new();
    for sides in claim.cells(rows) {
        let (ours, mut interval, mut count) = measured(claim, &sides);
        let mut reason = sight::blindness(claim, &sides, parameters, parameter);
        let agreement = match (ours, interval) {
            _ if reason.is_some() => Agreement::Void,
            (None, _) => {
                reason = Some("there is nothing of it to compare with".to_owned());
                Agreement::Void
            }
            _ if sources(&sides).len() > 1 => {
                reason = Some(several(&sources(&sides)));
                Agreement::NotJudged
            }
            (Some(ours), _) if is_counted(&claim.field) => {
                (interval, count) = (None, 1);
                judged_cell(claim, ours, Interval { low: ours, high: ours })
            }
            _ if count < 2 => {
                reason = Some(ONCE.to_owned());
                Agreement::NotJudged
            }
            _ if parameters.quick && is_time(&claim.field) => {
                reason = Some("a quick run's times say nothing".to_owned());
                Agreement::NotJudged
            }
            _ if is_undeclared(claim, parameters) => {
                reason = Some("neither the paper's size nor a declared scale".to_owned());
                Agreement::NotJudged
            }
            (Some(ours), Some(interval)) => judged_cell(claim, ours, interval),
            (Some(_), None) => Agreement::Unclear,
        };
        let bound = std::iter::once(sides.ours).chain(sides.other).map(binding).collect();
        let group = sides.ours.group.clone();
        let asked = asked(&claim.field, &group);
        cells.push(CellVerdict { group, ours: ours.unwrap_or(0.0), interval, count, asked, agreement, reason, bound });
    }
    for group in claim.expected(groups) {
        if cells.iter().all(|cell| cell.group != group) {
            cells.push(CellVerdict::missing(&claim.field, group));
        }
    }
    let agreement = in_all(claim, &cells);
    if agreement == Agreement::Weaker && matches!(claim.sense, Sense::AtMost(_)) {
        // "Up to" leaves each cell room below, but none came near it.
        for cell in cells.iter_mut().filter(|cell| cell.agreement == Agreement::Agrees) {
            cell.agreement = Agreement::Weaker;
        }
    }
    let mut verdict = Verdict {
        label: claim.label(),
        field: claim.field.clone(),
        paper: claim.paper_in_short(),
        paper_range: claim.paper_range(),
        is_comparison: claim.is_comparison(),
        cells,
        agreement,
        sentence: String::new(),
    };
    verdict.sentence = sentence(&verdict);
    verdict
}

/// How many measurements a cell is to have: of records, so many boots as their crashes take.
fn asked(field: &str, group: &Group) -> usize {
    let asked = if is_counted(field) {
        1
    } else if is_proportion(field) {
        RECORDS_ASKED / CRASHES_A_BOOT
    } else {
        iterations_asked(group.guests)
    };
    usize::try_from(asked).unwrap_or(usize::MAX)
}

/// Whether a claim is about what goes by sizes and clocks, and only the sizes were smaller. Memory is held against bounds of the full
/// size ([`sight`]), which clocks are nothing to.
fn is_undeclared(claim: &Claim, parameters: &Parameters) -> bool {
    let goes_by_scale = goes_by_scale(&claim.field) && !is_most_memory(&claim.field);
    goes_by_scale && !parameters.is_full() && !parameters.is_declared()
}

/// The worst of what was judged. That it agrees is said where every cell of the claim does, and was measured. "Up to" is also a claim about the
/// strongest cell: where all fall short of it, ours is weaker.
fn in_all(claim: &Claim, cells: &[CellVerdict]) -> Agreement {
    let Some(worst) = cells.iter().map(|cell| cell.agreement).filter(|one| one.is_judged()).max() else {
        let others = cells.iter().map(|cell| cell.agreement);
        return others.min().unwrap_or(Agreement::Missing);
    };
    if worst == Agreement::Agrees {
        let open = cells.iter().map(|cell| cell.agreement).filter(|one| !one.is_judged()).min();
        match open {
            Some(Agreement::Unclear) => return Agreement::Unclear,
            Some(_) => return Agreement::Incomplete,
            None => {}
        }
    }
    if let (What::Comparison(..), Sense::AtMost(value), Agreement::Agrees) = (claim.what, claim.sense, worst) {
        // By what was measured, not by the end of its interval: noise reaches nothing.
        let size = |cell: &CellVerdict| if value < 0.0 { -cell.ours } else { cell.ours };
        let reached = cells.iter().filter(|cell| cell.agreement.is_judged()).map(size).fold(f64::MIN, f64::max);
        if reached < value.abs() - (value.abs() * TOLERANCE).max(TOLERANCE_POINTS_MIN) {
            return Agreement::Weaker;
        }
    }
    worst
}

impl CellVerdict {
    /// One that was not measured.
    fn missing(field: &str, group: Group) -> Self {
        let asked = asked(field, &group);
        CellVerdict {
            group,
            ours: 0.0,
            interval: None,
            count: 0,
            asked,
            agreement: Agreement::Missing,
            reason: None,
            bound: Vec::new(),
        }
    }

    /// Whether it was measured less often than it is to be.
    pub fn is_few(&self) -> bool {
        self.count < self.asked
    }

    /// `n = 5`, or `n = 3, too small`.
    pub fn count_in_short(&self) -> String {
        format!("n = {}{}", self.count, if self.is_few() { ", too small" } else { "" })
    }

    /// What it waited for, in a word, and the other side where that waited for something else: `drive`, `drive against journal`. Nothing for what is no
    /// time, or where it was not measured.
    pub fn bound_in_short(&self, verdict: &Verdict) -> Option<String> {
        if !is_time(&verdict.field) || self.bound.iter().all(|one| one.bound == Bound::Unknown) {
            return None;
        }
        let mut names: Vec<&str> = self.bound.iter().map(|one| one.bound.name()).collect();
        names.dedup();
        Some(names.join(" against "))
    }

    /// Ours in short, with its interval: `−55 % (−58 to −52)`.
    pub fn ours_in_short(&self, verdict: &Verdict) -> String {
        let number = |value: f64| {
            if verdict.is_comparison { change(value, 0) } else { amount(&verdict.field, value) }
        };
        let bare = |value: f64| number(value).trim_end_matches(" %").to_owned();
        let mut text = if verdict.is_comparison && is_proportion(&verdict.field) {
            format!("{} points", bare(self.ours))
        } else {
            number(self.ours)
        };
        if let Some(Interval { low, high }) = self.interval {
            // Less is negative: the ends change places.
            let (first, last) = if verdict.is_comparison { (high, low) } else { (low, high) };
            if low.is_finite() && high.is_finite() {
                let _ = write!(text, " ({} to {})", bare(first), bare(last));
            }
        }
        text
    }

    /// Which cell it is, in words: what is not the same in all of them.
    pub fn place(&self, all: &[CellVerdict]) -> String {
        let varies = |of: fn(&Group) -> String| all.iter().any(|cell| of(&cell.group) != of(&self.group));
        let mut words = Vec::new();
        if varies(|group| group.workload.clone()) {
            words.push(self.group.workload.clone());
        }
        if varies(|group| group.disk.clone()) {
            words.push(self.group.disk.clone());
        }
        if varies(|group| group.parameter.to_string()) {
            words.push(format!("at {}", self.group.parameter));
        }
        if varies(|group| group.guests.to_string()) {
            words.push(if self.group.guests == 1 {
                "1 guest".to_owned()
            } else {
                format!("{} guests", self.group.guests)
            });
        }
        words.join(", ")
    }
}

impl Verdict {
    /// Its cells that were measured.
    pub fn measured(&self) -> impl Iterator<Item = &CellVerdict> {
        self.cells.iter().filter(|cell| cell.agreement != Agreement::Missing)
    }

    /// Which of its cells were not measured, in words, where others were.
    pub fn missing_in_short(&self) -> Option<String> {
        let is_missing = |cell: &&CellVerdict| cell.agreement == Agreement::Missing;
        let places: Vec<String> = self.cells.iter().filter(is_missing).map(|cell| cell.place(&self.cells)).collect();
        (!places.is_empty() && places.len() < self.cells.len()).then(|| format!("not measured: {}", places.join("; ")))
    }

    /// How often its cells were measured, and how many of them were, if not all: `5`, `1 to 5, too small in 3`, `5; 1 of 4 cells`.
    pub fn counts(&self) -> String {
        let all = || self.measured().map(|cell| cell.count);
        let (Some(fewest), Some(most)) = (all().min(), all().max()) else { return "0".to_owned() };
        let measured = all().count();
        let mut counts = if fewest == most { fewest.to_string() } else { format!("{fewest} to {most}") };
        match self.measured().filter(|cell| cell.is_few()).count() {
            0 => {}
            few if few == measured => counts.push_str(", too small"),
            few => {
                let _ = write!(counts, ", too small in {few}");
            }
        }
        if measured < self.cells.len() {
            let _ = write!(counts, "; {measured} of {} cells", self.cells.len());
        }
        counts
    }

    /// Says in other words why cells are not judged.
    pub(crate) fn give_reason(&mut self, instead_of: &str, reason: &str) {
        for cell in self.cells.iter_mut().filter(|cell| cell.reason.as_deref() == Some(instead_of)) {
            cell.reason = Some(reason.to_owned());
        }
        self.sentence = sentence(self);
    }

    /// Whether something of it was judged by fewer measurements than there are to be.
    pub fn is_judged_by_few(&self) -> bool {
        self.cells.iter().any(|cell| cell.agreement.is_judged() && cell.is_few())
    }

    /// How many cells came to what, in words: `agrees in 3, weaker in 1`.
    pub fn tally(&self) -> String {
        let mut counts: BTreeMap<Agreement, usize> = BTreeMap::new();
        for cell in &self.cells {
            *counts.entry(cell.agreement).or_default() += 1;
        }
        if counts.len() == 1 && self.cells.iter().all(|cell| cell.agreement == self.agreement) {
            return self.agreement.words().to_owned();
        }
        let parts: Vec<String> = counts.iter().map(|(one, count)| format!("{} in {count}", one.words())).collect();
        let all = parts.join(", ");
        if counts.contains_key(&self.agreement) || all.is_empty() {
            if all.is_empty() { self.agreement.words().to_owned() } else { all }
        } else {
            format!("{} ({all})", self.agreement.words())
        }
    }
}

fn sentence(verdict: &Verdict) -> String {
    let mut text = format!("Paper: {}: {}. Here: ", verdict.label, verdict.paper);
    if verdict.measured().next().is_none() {
        return text + "not measured.";
    }
    let cells: Vec<String> = verdict
        .measured()
        .map(|cell| {
            let place = cell.place(&verdict.cells);
            let place = if place.is_empty() { place } else { format!("{place}: ") };
            let reason = cell.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            let bound = cell.bound_in_short(verdict).map(|bound| format!(", bound by {bound}")).unwrap_or_default();
            let (ours, count) = (cell.ours_in_short(verdict), cell.count_in_short());
            format!("{place}{ours}, {count}{bound}, {}{reason}", cell.agreement.words())
        })
        .chain(verdict.missing_in_short())
        .collect();
    let _ = write!(text, "{}.", cells.join("; "));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Mode;

    /// Of an experiment that has what was measured, and no more.
    fn judge(claim: &Claim, rows: &[SummaryRow], parameters: &Parameters, parameter: Option<&str>) -> Verdict {
        super::judge(claim, rows, &[], parameters, parameter)
    }

    fn row(mode: Mode, guests: u32, field: &str, values: &[f64]) -> SummaryRow {
        let group = Group { disk: "none".into(), parameter: 0, guests, workload: "untar".into(), mode };
        let fields = BTreeMap::from([(field.to_owned(), Summary::of(values).unwrap())]);
        SummaryRow { group, count: values.len(), failed: 0, failed_before: 0, sources: Default::default(), fields }
    }

    fn full() -> Parameters {
        Parameters { scale: 1.0, time_scale: 1.0, platform: "kvm, Linux 6.12".into(), ..Parameters::for_tests() }
    }

    /// Ours against 100 of the other, with a spread of about one.
    fn judged(text: &str, ours: f64) -> Agreement {
        let rows = [
            row(Mode::Vma, 1, "seconds", &[ours - 0.5, ours, ours + 0.5]),
            row(Mode::Journal, 1, "seconds", &[99.5, 100.0, 100.5]),
        ];
        judge(&text.parse().unwrap(), &rows, &full(), None).agreement
    }

    /// What a paper found elsewhere may be missed by a fifth; what we want may not, nor by chance.
    #[test]
    fn a_goal_has_no_slack() {
        let of = |sense: &str, percent: &str, ours| judged(&format!("{sense} seconds vma journal {percent}"), ours);
        assert_eq!((of("at-least", "40", 63.0), of("goal", "40", 63.0)), (Agreement::Agrees, Agreement::Weaker));
        assert_eq!((of("goal", "40", 57.0), of("goal", "40", 60.0)), (Agreement::Agrees, Agreement::Unclear));
        assert_eq!(of("goal", "40", 59.8), Agreement::Unclear, "no more than by chance");
        assert_eq!(of("goal", "-5.26", 103.0), Agreement::Agrees);
        assert_eq!(of("goal", "-5.26", 90.0), Agreement::Agrees, "it may be faster");
        assert_eq!((of("goal", "-5.26", 105.2), of("goal", "-5.26", 108.0)), (Agreement::Unclear, Agreement::Beyond));
    }

    #[test]
    fn more_of_an_effect_is_not_better_and_less_is_told_from_none_and_from_its_opposite() {
        let about = "about seconds vma journal 40";
        assert_eq!(judged(about, 60.0), Agreement::Agrees);
        assert_eq!(judged(about, 30.0), Agreement::Stronger);
        assert_eq!(judged(about, 85.0), Agreement::Weaker);
        assert_eq!(judged(about, 100.0), Agreement::Absent);
        assert_eq!(judged(about, 130.0), Agreement::Reversed);
        // A claim of 9.1 % leaves two points, not ten.
        assert_eq!(judged("about seconds vma journal 9.1", 90.0), Agreement::Agrees);
        assert_eq!(judged("about seconds vma journal 9.1", 80.0), Agreement::Stronger);
        assert_eq!(judged("about seconds vma journal 9.1", 97.0), Agreement::Weaker);
    }

    #[test]
    fn a_cost_is_judged_the_other_way_round() {
        let cost = "between seconds vma journal -9.8 -3.3";
        assert_eq!(judged(cost, 106.0), Agreement::Agrees);
        assert_eq!(judged(cost, 126.0), Agreement::CostsMore);
        assert_eq!(judged(cost, 80.0), Agreement::Reversed);
        assert_eq!(judged("at-least seconds vma journal -10", 70.0), Agreement::Agrees);
        assert_eq!(judged("at-least seconds vma journal -10", 130.0), Agreement::Beyond);
    }

    #[test]
    fn no_difference_must_be_shown_and_a_small_one_found() {
        assert_eq!(judged("same seconds vma journal", 101.0), Agreement::Agrees);
        assert_eq!(judged("same seconds vma journal", 90.0), Agreement::Beyond);
        assert_eq!(judged("same seconds vma journal", 112.0), Agreement::Beyond);
        assert_eq!(judged("less seconds vma journal", 90.0), Agreement::Agrees);
        assert_eq!(judged("less seconds vma journal", 100.0), Agreement::Absent);
    }

    #[test]
    fn each_cell_is_judged_and_the_worst_counts() {
        let rows = [
            row(Mode::Vma, 1, "seconds", &[60.0, 61.0]),
            row(Mode::Journal, 1, "seconds", &[100.0, 101.0]),
            row(Mode::Vma, 8, "seconds", &[130.0, 131.0]),
            row(Mode::Journal, 8, "seconds", &[100.0, 101.0]),
            row(Mode::Vma, 4, "seconds", &[1.0]),
            row(Mode::Journal, 4, "seconds", &[100.0]),
        ];
        let verdict = judge(&"at-most seconds vma journal 41.1".parse().unwrap(), &rows, &full(), None);
        assert_eq!(verdict.agreement, Agreement::Reversed);
        assert_eq!(verdict.tally(), "agrees in 1, reversed in 1, not judged in 1");
        assert_eq!(verdict.cells[2].agreement, Agreement::NotJudged, "once is not judged: {verdict:?}");
        assert!(
            verdict.sentence.contains("4 guests: −99 %, n = 1, too small, not judged: measured once"),
            "{}",
            verdict.sentence
        );
        let nothing = judge(&"at-most seconds vma ordered 4".parse().unwrap(), &rows, &full(), None);
        assert_eq!((nothing.agreement, nothing.tally().as_str()), (Agreement::Missing, "not measured"));
    }

    #[test]
    fn up_to_so_much_must_be_reached_somewhere() {
        assert_eq!(judged("at-most seconds vma journal 41", 90.0), Agreement::Weaker);
        let rows = [row(Mode::Vma, 1, "seconds", &[89.5, 90.5]), row(Mode::Journal, 1, "seconds", &[99.5, 100.5])];
        let verdict = judge(&"at-most seconds vma journal 41".parse().unwrap(), &rows, &full(), None);
        assert_eq!(verdict.tally(), "weaker", "no cell of it agrees");
        assert_eq!(judged("at-most seconds vma journal 41", 62.0), Agreement::Agrees);
        assert_eq!(judged("at-most seconds vma journal 41", 20.0), Agreement::Stronger);
    }

    /// A referee found "up to" judged from one cell of four, and an unclear cell swallowed by one that agrees.
    #[test]
    fn cells_that_are_not_there_and_unclear_ones_are_not_taken_to_agree() {
        let pair = |guests: u32, ours: &[f64]| {
            [row(Mode::Vma, guests, "seconds", ours), row(Mode::Journal, guests, "seconds", &[99.5, 100.0, 100.5])]
        };
        let groups: Vec<Group> =
            [1, 2, 4, 8].into_iter().flat_map(|guests| pair(guests, &[1.0])).map(|row| row.group).collect();
        let of = |text: &str, rows: &[SummaryRow]| super::judge(&text.parse().unwrap(), rows, &groups, &full(), None);
        let up_to = "at-most seconds vma journal 41";
        let one = of(up_to, &pair(1, &[59.5, 60.0, 60.5]));
        assert_eq!((one.agreement, one.cells.len()), (Agreement::Incomplete, 4));
        assert_eq!(one.counts(), "3, too small; 1 of 4 cells");
        assert_eq!(one.tally(), "incomplete (agrees in 1, not measured in 3)");
        assert!(one.sentence.ends_with("agrees; not measured: 2 guests; 4 guests; 8 guests."), "{}", one.sentence);
        assert_eq!(of(up_to, &pair(1, &[89.5, 90.0, 90.5])).agreement, Agreement::Incomplete, "weaker is as open");
        assert_eq!(of("about seconds vma journal 40", &pair(1, &[59.5, 60.0, 60.5])).agreement, Agreement::Incomplete);
        assert_eq!(
            of(up_to, &pair(1, &[129.5, 130.0, 130.5])).agreement,
            Agreement::Reversed,
            "one is enough for that"
        );
        let eight = of(&format!("{up_to} @ guests=8"), &pair(8, &[59.5, 60.0, 60.5]));
        assert_eq!((eight.agreement, eight.counts().as_str()), (Agreement::Agrees, "3"), "{eight:?}");
        assert_eq!(of(up_to, &[]).counts(), "0");
        assert_eq!(of(up_to, &[]).agreement, Agreement::Missing);
        let wide = [pair(1, &[59.5, 60.0, 60.5]), pair(8, &[20.0, 60.0, 100.0])].concat();
        let verdict = judge(&up_to.parse().unwrap(), &wide, &full(), None);
        assert_eq!((verdict.cells[0].agreement, verdict.cells[1].agreement), (Agreement::Agrees, Agreement::Unclear));
        assert_eq!((verdict.agreement, verdict.tally().as_str()), (Agreement::Unclear, "agrees in 1, unclear in 1"));
    }

    /// A referee found results of other machines and commits used again without a word.
    #[test]
    fn what_two_machines_or_commits_measured_is_not_compared() {
        let of = |row: SummaryRow, commit: &str, machine: &str| {
            let source = Source { commit: commit.into(), machine: machine.into(), programs: String::new() };
            SummaryRow { sources: BTreeSet::from([source]), ..row }
        };
        let judged = |commit: &str, machine: &str| {
            let rows = [
                of(row(Mode::Vma, 1, "seconds", &[59.5, 60.0, 60.5]), "a", "x"),
                of(row(Mode::Journal, 1, "seconds", &[99.5, 100.0, 100.5]), commit, machine),
            ];
            let cell = judge(&"about seconds vma journal 40".parse().unwrap(), &rows, &full(), None).cells.remove(0);
            (cell.agreement, cell.reason.unwrap_or_default())
        };
        assert_eq!(judged("a", "x"), (Agreement::Agrees, String::new()));
        assert_eq!(judged("b", "x"), (Agreement::NotJudged, "two commits".to_owned()));
        assert_eq!(judged("a", "y"), (Agreement::NotJudged, "two machines".to_owned()));
        let mut both = of(row(Mode::Vma, 1, "area_bytes_max", &[1.0, 1.0]), "a", "x");
        both.sources.insert(Source { commit: "a".into(), machine: "y".into(), programs: String::new() });
        let tools = |digest: &str| Source { commit: "a".into(), machine: "x".into(), programs: digest.into() };
        assert_eq!(several(&BTreeSet::from([tools("1"), tools("2")])), "two programs");
        let verdict = judge(&"value-at-most area_bytes_max vma 2".parse().unwrap(), &[both], &full(), None);
        assert_eq!(verdict.agreement, Agreement::NotJudged, "of one side, too");
    }

    #[test]
    fn a_wide_interval_is_unclear_and_a_quick_time_is_not_judged() {
        let rows = [row(Mode::Vma, 1, "seconds", &[30.0, 90.0]), row(Mode::Journal, 1, "seconds", &[100.0, 101.0])];
        let claim: Claim = "about seconds vma journal 40".parse().unwrap();
        assert_eq!(judge(&claim, &rows, &full(), None).agreement, Agreement::Unclear);
        // None, the paper's, or the opposite: it may be any.
        let rows = [
            row(Mode::Vma, 1, "seconds", &[61.0, 90.0, 119.0]),
            row(Mode::Journal, 1, "seconds", &[99.0, 100.0, 101.0]),
        ];
        let around: Claim = "about seconds vma journal 30.3".parse().unwrap();
        assert_eq!(judge(&around, &rows, &full(), None).agreement, Agreement::Unclear);
        let quick = Parameters { quick: true, ..full() };
        assert_eq!(judge(&claim, &rows, &quick, None).agreement, Agreement::NotJudged);
    }

    #[test]
    fn sizes_without_their_clocks_are_not_judged() {
        let rows = [
            row(Mode::Vma, 1, "seconds", &[59.5, 60.0, 60.5]),
            row(Mode::Journal, 1, "seconds", &[99.5, 100.0, 100.5]),
        ];
        let claim: Claim = "about seconds vma journal 40".parse().unwrap();
        let of = |scale: f64, clocks: f64| {
            judge(&claim, &rows, &Parameters { scale, clocks, time_scale: 2.0, ..full() }, None).agreement
        };
        assert_eq!((of(0.1, 1.0), of(0.1, 0.4)), (Agreement::NotJudged, Agreement::NotJudged));
        assert_eq!((of(0.1, 0.2), of(1.0, 1.0)), (Agreement::Agrees, Agreement::Agrees));
        assert_eq!(of(1.0, 0.4), Agreement::NotJudged, "other clocks than the paper's");
        let bound = |value: f64| {
            let rows = [row(Mode::Vma, 1, "pool_bytes_max", &[value, value + 1.0])];
            let claim: Claim = "value-at-most pool_bytes_max vma 100000".parse().unwrap();
            judge(&claim, &rows, &Parameters { scale: 0.1, ..full() }, None).agreement
        };
        assert_eq!((bound(50_000.0), bound(3_200_000.0)), (Agreement::Void, Agreement::Beyond));
        let pages = [row(Mode::Vma, 1, "protect_us", &[14.0, 14.2, 14.4])];
        let claim: Claim = "value-about protect_us vma 14.2".parse().unwrap();
        assert_eq!(judge(&claim, &pages, &Parameters { scale: 0.1, ..full() }, None).agreement, Agreement::Agrees);
    }

    /// Five measurements, three with more than four guests, 120 crashes; fewer are judged and marked.
    #[test]
    fn fewer_measurements_than_asked_for_are_marked() {
        let of = |guests: u32, count: usize| {
            let values = |value: f64| (0..count).map(|index| value + 0.1 * index as f64).collect::<Vec<_>>();
            let rows = [
                row(Mode::Vma, guests, "seconds", &values(60.0)),
                row(Mode::Journal, guests, "seconds", &values(100.0)),
            ];
            judge(&"about seconds vma journal 40".parse().unwrap(), &rows, &full(), None)
        };
        for (guests, count, counts) in
            [(1, 4, "4, too small"), (1, 5, "5"), (4, 3, "3, too small"), (8, 3, "3"), (8, 2, "2, too small")]
        {
            let verdict = of(guests, count);
            assert_eq!((verdict.counts().as_str(), verdict.agreement), (counts, Agreement::Agrees), "{guests} guests");
            assert_eq!(verdict.is_judged_by_few(), counts.contains("too small"));
        }
        assert!(of(1, 4).sentence.contains("n = 4, too small, agrees"), "{}", of(1, 4).sentence);
        assert!(!of(1, 1).is_judged_by_few() && of(1, 1).counts() == "1, too small", "once is not judged at all");
        let boots = |count: usize| {
            let rows = [row(Mode::Vma, 1, "corrupted_runs", &vec![1.0; count])];
            judge(&"value-at-most corrupted_runs vma 0".parse().unwrap(), &rows, &full(), None).counts()
        };
        assert_eq!((boots(2).as_str(), boots(6).as_str()), ("2, too small", "6"), "120 crashes are six boots");
    }

    #[test]
    fn what_bounds_a_cell_is_said_with_it() {
        let busy = |mut row: SummaryRow, drive: f64, flushing: f64| {
            for (name, value) in [("drive_busy_percent", drive), ("flushing_percent", flushing)] {
                row.fields.insert(name.to_owned(), Summary::of(&[value, value]).unwrap());
            }
            row
        };
        let rows = [
            busy(row(Mode::Vma, 1, "seconds", &[60.0, 61.0]), 95.0, 2.0),
            busy(row(Mode::Journal, 1, "seconds", &[100.0, 101.0]), 95.0, 70.0),
            busy(row(Mode::Ordered, 1, "seconds", &[90.0, 91.0]), 95.0, 3.0),
        ];
        let of = |text: &str| judge(&text.parse().unwrap(), &rows, &full(), None);
        assert!(of("about seconds vma journal 40").sentence.contains("bound by drive against journal, agrees"));
        assert!(of("about seconds vma ordered 33").sentence.contains("bound by drive, agrees"));
    }

    #[test]
    fn what_is_counted_needs_no_second_count() {
        let rows = [row(Mode::Vma, 1, "lines", &[15_148.0, 15_148.0, 15_148.0])];
        let verdict = judge(&"value-at-most lines vma 600".parse().unwrap(), &rows, &full(), None);
        let cell = &verdict.cells[0];
        assert_eq!((cell.agreement, cell.count, cell.interval), (Agreement::Beyond, 1, None));
    }

    #[test]
    fn bounds_are_bounds_and_runs_are_proportions() {
        let bound = |text: &str, field: &str, values: &[f64]| {
            judge(&text.parse().unwrap(), &[row(Mode::Vma, 1, field, values)], &full(), None).agreement
        };
        let most = "value-at-most area_bytes_max vma 200000";
        assert_eq!(bound(most, "area_bytes_max", &[77_000.0, 77_000.0]), Agreement::Agrees);
        assert_eq!(bound(most, "area_bytes_max", &[721_000.0, 722_000.0]), Agreement::Beyond);
        let never = "value-at-most corrupted_runs vma 0";
        assert_eq!(bound(never, "corrupted_runs", &[0.0; 120]), Agreement::Agrees);
        assert_eq!(bound(never, "corrupted_runs", &[0.0; 2]), Agreement::Unclear, "it may be two in three");
        let mut once = [0.0; 120];
        once[7] = 1.0;
        assert_eq!(bound(never, "corrupted_runs", &once), Agreement::Beyond);
        let rows =
            [row(Mode::Vma, 1, "corrupted_runs", &[0.0; 120]), row(Mode::Ordered, 1, "corrupted_runs", &[1.0; 120])];
        assert_eq!(
            judge(&"less corrupted_runs vma ordered".parse().unwrap(), &rows, &full(), None).agreement,
            Agreement::Agrees
        );
        // A referee found these two void: 100 of 120 against none.
        let mut many = [1.0; 120];
        many[..20].fill(0.0);
        let rows = [row(Mode::Vma, 1, "corrupted_runs", &many), row(Mode::Ordered, 1, "corrupted_runs", &[0.0; 120])];
        let verdict = judge(&"less corrupted_runs vma ordered".parse().unwrap(), &rows, &full(), None);
        assert_eq!(verdict.agreement, Agreement::Reversed);
        assert!(verdict.sentence.contains("+83 points (+75 to +89), n = 120"), "{}", verdict.sentence);
        let none = [0.0; 120];
        let rows = [row(Mode::Vma, 1, "corrupted_runs", &none), row(Mode::Ordered, 1, "corrupted_runs", &none)];
        let verdict = judge(&"less corrupted_runs vma ordered".parse().unwrap(), &rows, &full(), None);
        assert_eq!(verdict.agreement, Agreement::Unclear, "three in a hundred may be missed by both");
        let rows = [row(Mode::Vma, 1, "corrupted_runs", &[1.0; 120]), row(Mode::Ordered, 1, "corrupted_runs", &once)];
        assert_eq!(
            judge(&"less corrupted_runs vma ordered".parse().unwrap(), &rows, &full(), None).agreement,
            Agreement::Reversed
        );
    }
}
