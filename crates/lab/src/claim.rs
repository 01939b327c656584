//! What a paper found, in a form that can be held against what we found.
//!
//! | line | the paper says |
//! |---|---|
//! | `about FIELD A B P` | A has about P % less of FIELD than B |
//! | `at-most FIELD A B P` | A has up to P % less ("by up to") |
//! | `at-least FIELD A B P` | A has P % less, or still less |
//! | `goal FIELD A B P` | no paper's: A is to have at least P % less, without any slack |
//! | `between FIELD A B P Q` | A has P to Q % less |
//! | `same FIELD A B` | there is no difference |
//! | `less FIELD A B` | A has less, no number is said |
//! | `value-at-most FIELD A V`, `value-about FIELD A V`, `value-between FIELD A V W` | FIELD in mode A is so much |
//!
//! A negative percentage is more instead of less. A and B are modes, or a mode at a value of the experiment's parameter
//! (`journal@1024`). A line may end with conditions: ` @ untar|postmark`, ` @ dftl` (a workload, a disk), ` @ guests=8`, ` @ guests>2`,
//! ` @ guests<5`, ` @ parameter=25`; and with ` sees FIELD`: what must differ between A and B, or the two did the same and
//! the comparison can see nothing.

use crate::cell::{Group, Mode};
use crate::fields::{amount, change, field_words};
use crate::measured::SummaryRow;
use std::fmt::Write;
use std::str::FromStr;

/// A mode, perhaps at one value of the experiment's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The mode.
    pub mode: Mode,
    /// The value of the parameter, where it is what is compared.
    pub parameter: Option<u64>,
}

impl Operand {
    fn name(self) -> String {
        self.parameter.map_or_else(|| self.mode.to_string(), |parameter| format!("{} at {parameter}", self.mode))
    }
}

/// How the paper's number is meant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sense {
    /// There is no difference.
    Same,
    /// About so much.
    About(f64),
    /// Up to so much.
    AtMost(f64),
    /// So much or more.
    AtLeast(f64),
    /// From so much to so much.
    Between(f64, f64),
    /// Less, whatever by.
    Less,
}

/// What is held against what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Two modes, in per cent less.
    Comparison(Operand, Operand),
    /// One mode's value.
    Value(Operand),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Condition {
    /// A workload or a disk, one of these.
    Named(Vec<String>),
    Guests(std::cmp::Ordering, u32),
    Parameter(u64),
}

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// What is measured.
    pub field: String,
    /// Of what.
    pub what: What,
    /// How the number is meant.
    pub sense: Sense,
    /// Whether it is a goal of ours, which leaves no slack, and no finding on another machine.
    pub is_goal: bool,
    /// A field in which the two sides must differ.
    pub sees: Option<String>,
    conditions: Vec<Condition>,
}

impl FromStr for Claim {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("claim: '{text}' is none; crates/lab/src/claim.rs says how one is written");
        let (rest, sees) = text.split_once(" sees ").map_or((text, None), |(rest, field)| (rest, Some(field.trim())));
        let mut parts = rest.split(" @ ");
        let words: Vec<&str> = parts.next().unwrap_or_default().split_whitespace().collect();
        let conditions = parts.map(|part| part.trim().parse()).collect::<Result<_, _>>()?;
        let number = |word: &str| word.parse::<f64>().map_err(|_| format!("claim: '{word}' is no number"));
        let pair = |p: &str, q: &str| {
            let (p, q) = (number(p)?, number(q)?);
            Ok::<_, String>(Sense::Between(p.min(q), p.max(q)))
        };
        let (kind, field) = match words.as_slice() {
            [kind, field, ..] => (*kind, (*field).to_owned()),
            _ => return Err(bad()),
        };
        let of = |a: &str, b: &str| Ok::<_, String>(What::Comparison(a.parse()?, b.parse()?));
        let (what, sense) = match (kind, &words[2..]) {
            ("same", [a, b]) => (of(a, b)?, Sense::Same),
            ("less", [a, b]) => (of(a, b)?, Sense::Less),
            ("about", [a, b, p]) => (of(a, b)?, Sense::About(number(p)?)),
            ("at-most", [a, b, p]) => (of(a, b)?, Sense::AtMost(number(p)?)),
            ("at-least" | "goal", [a, b, p]) => (of(a, b)?, Sense::AtLeast(number(p)?)),
            ("between", [a, b, p, q]) => (of(a, b)?, pair(p, q)?),
            ("value-at-most", [a, v]) => (What::Value(a.parse()?), Sense::AtMost(number(v)?)),
            ("value-about", [a, v]) => (What::Value(a.parse()?), Sense::About(number(v)?)),
            ("value-between", [a, v, w]) => (What::Value(a.parse()?), pair(v, w)?),
            _ => return Err(bad()),
        };
        Ok(Claim { field, what, sense, is_goal: kind == "goal", sees: sees.map(str::to_owned), conditions })
    }
}

impl FromStr for Operand {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, parameter) = text.split_once('@').map_or((text, None), |(name, value)| (name, Some(value)));
        let mode = Mode::by_name(name).ok_or_else(|| format!("claim: there is no mode '{name}'"))?;
        let parameter = parameter
            .map(|value| value.parse().map_err(|_| format!("claim: '{value}' is no value of a parameter")))
            .transpose()?;
        Ok(Operand { mode, parameter })
    }
}

impl FromStr for Condition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let number = |word: &str| word.parse().map_err(|_| format!("claim: '{text}' has no number"));
        if let Some(value) = text.strip_prefix("parameter=") {
            return value.parse().map(Condition::Parameter).map_err(|_| format!("claim: '{text}' has no number"));
        }
        for (sign, order) in [("guests=", Equal), ("guests>", Greater), ("guests<", Less)] {
            if let Some(value) = text.strip_prefix(sign) {
                return Ok(Condition::Guests(order, number(value)?));
            }
        }
        Ok(Condition::Named(text.split('|').map(str::to_owned).collect()))
    }
}

impl Condition {
    fn fits(&self, group: &Group) -> bool {
        match self {
            Condition::Named(names) => names.iter().any(|name| group.workload == *name || group.disk == *name),
            Condition::Guests(order, guests) => group.guests.cmp(guests) == *order,
            Condition::Parameter(value) => group.parameter == *value,
        }
    }

    fn words(&self) -> String {
        use std::cmp::Ordering::{Equal, Greater, Less};
        match self {
            Condition::Named(names) => names.join(", "),
            Condition::Guests(Equal, 1) => "1 guest".to_owned(),
            Condition::Guests(Equal, guests) => format!("{guests} guests"),
            Condition::Guests(Greater, guests) => format!("more than {guests} guests"),
            Condition::Guests(Less, guests) => format!("fewer than {guests} guests"),
            Condition::Parameter(value) => format!("at {value}"),
        }
    }
}

/// The rows that one cell of a claim is judged by.
#[derive(Clone, Copy, Debug)]
pub struct Sides<'a> {
    /// Of the mode that the claim is about.
    pub ours: &'a SummaryRow,
    /// Of the mode that it is compared with.
    pub other: Option<&'a SummaryRow>,
}

impl Claim {
    /// The mode that it is about.
    pub fn subject(&self) -> Operand {
        match self.what {
            What::Comparison(subject, _) | What::Value(subject) => subject,
        }
    }

    /// Whether it compares two modes.
    pub fn is_comparison(&self) -> bool {
        matches!(self.what, What::Comparison(..))
    }

    /// Whether a group is of its mode and meets its conditions.
    fn is_about(&self, group: &Group) -> bool {
        let subject = self.subject();
        group.mode == subject.mode
            && subject.parameter.is_none_or(|value| group.parameter == value)
            && self.conditions.iter().all(|condition| condition.fits(group))
    }

    /// The group that one is compared with; `None` where nothing is compared.
    fn other(&self, ours: &Group) -> Option<Group> {
        let What::Comparison(_, than) = self.what else { return None };
        Some(Group { mode: than.mode, parameter: than.parameter.unwrap_or(ours.parameter), ..ours.clone() })
    }

    /// The groups of an experiment that are cells of it, measured or not: those that it is about, and that have another side there.
    pub fn expected(&self, groups: &[Group]) -> Vec<Group> {
        let has_other = |group: &Group| self.other(group).is_none_or(|other| groups.contains(&other));
        groups.iter().filter(|group| self.is_about(group) && has_other(group)).cloned().collect()
    }

    /// Each cell of it that was measured, with both sides: as many as there are rows of its mode that meet its conditions.
    pub fn cells<'a>(&self, rows: &'a [SummaryRow]) -> Vec<Sides<'a>> {
        let has = |row: &&SummaryRow| row.fields.contains_key(&self.field);
        let sides = |ours: &'a SummaryRow| {
            let Some(group) = self.other(&ours.group) else { return Some(Sides { ours, other: None }) };
            let other = rows.iter().find(|row| row.group == group && has(row))?;
            Some(Sides { ours, other: Some(other) })
        };
        rows.iter().filter(|row| self.is_about(&row.group) && has(row)).filter_map(sides).collect()
    }

    /// What is compared, in a few words.
    pub fn label(&self) -> String {
        let name = field_words(&self.field).0;
        let mut text = match self.what {
            What::Comparison(a, b) => format!("{name}: {} against {}", a.name(), b.name()),
            What::Value(a) => format!("{name}: {}", a.name()),
        };
        for condition in &self.conditions {
            let _ = write!(text, ", {}", condition.words());
        }
        text
    }

    /// The paper's number, short: `up to −50.9 %`, `at most 205 kB`, `no difference`.
    pub fn paper_in_short(&self) -> String {
        let is_change = self.is_comparison();
        let number = |value: f64| if is_change { change(value, 1) } else { amount(&self.field, value) };
        match self.sense {
            Sense::Same => "no difference".to_owned(),
            Sense::Less => "less".to_owned(),
            Sense::About(value) => number(value),
            Sense::AtMost(0.0) if !is_change => "none".to_owned(),
            Sense::AtMost(value) if is_change => format!("up to {}", number(value)),
            Sense::AtMost(value) => format!("at most {}", number(value)),
            Sense::AtLeast(value) if value < 0.0 => format!("at most {}", number(value)),
            Sense::AtLeast(value) => format!("at least {}", number(value)),
            Sense::Between(low, high) if high < 0.0 => format!("{} to {}", number(high), number(low)),
            Sense::Between(low, high) => format!("{} to {}", number(low), number(high)),
        }
    }

    /// Where the paper's number is on an axis of changes: its ends, in per cent less. A claim without numbers has none.
    pub fn paper_range(&self) -> Option<(f64, f64)> {
        match self.sense {
            Sense::Same => Some((0.0, 0.0)),
            Sense::About(value) | Sense::AtMost(value) | Sense::AtLeast(value) => Some((value, value)),
            Sense::Between(low, high) => Some((low, high)),
            Sense::Less => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Summary;
    use std::collections::BTreeMap;

    fn row(mode: Mode, guests: u32, parameter: u64) -> SummaryRow {
        let group = Group { disk: "none".into(), parameter, guests, workload: "untar".into(), mode };
        let fields = BTreeMap::from([("seconds".to_owned(), Summary::of(&[1.0, 2.0]).unwrap())]);
        SummaryRow { group, count: 2, failed: 0, failed_before: 0, sources: Default::default(), fields }
    }

    #[test]
    fn a_claim_finds_its_cells_and_no_others() {
        let rows = [
            row(Mode::Vma, 1, 4),
            row(Mode::Journal, 1, 4),
            row(Mode::Vma, 8, 4),
            row(Mode::Journal, 8, 4),
            row(Mode::Journal, 8, 64),
            row(Mode::Vma, 2, 4),
        ];
        let count = |text: &str| text.parse::<Claim>().unwrap().cells(&rows).len();
        assert_eq!(count("at-most seconds vma journal 41"), 2, "where one side is missing there is no cell");
        assert_eq!(count("about seconds vma journal -5 @ guests=8"), 1);
        assert_eq!(count("less seconds vma journal @ guests>2 @ untar|postmark"), 1);
        assert_eq!(count("less seconds vma journal @ postmark"), 0);
        assert_eq!(count("between seconds journal@64 journal@4 1 6.2"), 1);
        assert_eq!(count("value-at-most seconds vma 3"), 3);
        for wrong in [
            "most seconds vma 3",
            "about seconds vma journal",
            "about seconds vma floppy 3",
            "about seconds vma journal x",
        ] {
            assert!(wrong.parse::<Claim>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn it_reads_as_the_paper_says_it() {
        let short = |text: &str| text.parse::<Claim>().unwrap().paper_in_short();
        assert_eq!(short("at-most seconds vma journal 50.9"), "up to −50.9 %");
        assert_eq!(short("between seconds vma ordered -9.8 -3.3"), "+3.3 % to +9.8 %");
        assert_eq!(short("at-least cpu_seconds remote-journal journal -10"), "at most +10 %");
        assert_eq!(short("value-at-most area_bytes_max vma 204800"), "at most 205 kB");
        assert_eq!(short("value-at-most corrupted_runs vma 0"), "none");
        assert_eq!(short("same seconds vma journal"), "no difference");
        let claim: Claim = "at-most seconds vma ordered 16.4 @ guests>2".parse().unwrap();
        assert!(claim.label().ends_with("vma against ordered, more than 2 guests"), "{}", claim.label());
    }
}
