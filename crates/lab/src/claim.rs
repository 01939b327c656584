//! What a paper found, in a form that can be held against what we found.
//!
//! `less FIELD A B PERCENT`: mode A has up to so much less of FIELD than mode B. `most FIELD A VALUE`: FIELD in mode A is
//! VALUE at most. An optional ` @ NAME` restricts it to a workload or a disk.

use crate::cell::{Group, Mode};
use crate::results::SummaryRow;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Points of a percentage that two machines, 14 years and a scale apart, may differ and still be said to agree.
const AGREEMENT_POINTS: f64 = 10.0;

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    field: String,
    what: What,
    only: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
enum What {
    Less { mode: Mode, than: Mode, percent: f64 },
    Most { mode: Mode, value: f64 },
}

/// How ours and the paper's compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Agreement {
    /// Within the bounds.
    Agrees,
    /// In the paper's direction, by more.
    More,
    /// In the paper's direction, by less.
    Less,
    /// Not in the paper's direction, or beyond its bound.
    Differs,
    /// Not measured.
    Open,
}

/// A claim, judged.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Verdict {
    /// What is compared, in a few words.
    pub label: String,
    /// The paper's number.
    pub paper: f64,
    /// Ours.
    pub ours: Option<f64>,
    /// Its unit.
    pub unit: String,
    /// How they compare.
    pub agreement: Agreement,
    /// All of that as a sentence.
    pub sentence: String,
}

impl FromStr for Claim {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (text, only) = text.split_once(" @ ").map_or((text, None), |(text, only)| (text, Some(only.to_owned())));
        let words: Vec<&str> = text.split_whitespace().collect();
        let mode = |name: &str| Mode::by_name(name).ok_or_else(|| format!("claim: there is no mode '{name}'"));
        let number = |word: &str| word.parse::<f64>().map_err(|_| format!("claim: '{word}' is no number"));
        match words.as_slice() {
            ["less", field, a, b, percent] => Ok(Claim {
                field: (*field).to_owned(),
                what: What::Less { mode: mode(a)?, than: mode(b)?, percent: number(percent)? },
                only,
            }),
            ["most", field, a, value] => Ok(Claim {
                field: (*field).to_owned(),
                what: What::Most { mode: mode(a)?, value: number(value)? },
                only,
            }),
            _ => Err(format!("claim: '{text}' is neither 'less FIELD A B PERCENT' nor 'most FIELD A VALUE'")),
        }
    }
}

/// A field in words, and its unit.
pub fn field_words(field: &str) -> (&'static str, &'static str) {
    match field {
        "seconds" => ("time", "s"),
        "bytes_to_storage" => ("bytes to storage", "bytes"),
        "recovery_model_seconds" => ("recovery time on the modelled disk", "s"),
        "recovery_bytes" => ("bytes moved by recovery", "bytes"),
        "area_bytes_max" => ("the journal area's tables", "bytes"),
        "pool_bytes_max" => ("copied blocks (copy-on-write)", "bytes"),
        "tuple_bytes_max" | "tuple_bytes" => ("tuples in use, 18 bytes a held block", "bytes"),
        "pool_bytes" => ("copied blocks (copy-on-write)", "bytes"),
        "seconds_unmounted" => ("time until everything is home and unmounted", "s"),
        "cpu_seconds" => ("processor time of guest and amberlog", "s"),
        "guest_cpu_seconds" => ("processor time in the guest", "s"),
        "amberlog_cpu_seconds" => ("processor time of amberlog", "s"),
        "server_cpu_seconds" => ("processor time of the journal server", "s"),
        "network_percent" => ("share of a gigabit network", "%"),
        "remote_wire_bytes" => ("bytes over the network", "bytes"),
        "flushes_to_storage" => ("flushes that reach storage", ""),
        "protect_us" => ("protection of a page", "µs"),
        "erases" => ("blocks erased", ""),
        "gc_time_us" => ("garbage collection", "µs"),
        "requests" => ("requests", ""),
        "delete_seconds" => ("time of the deletion itself", "s"),
        "protect_calls" => ("calls that protect pages", ""),
        "cow_faults" => ("copy-on-write faults", ""),
        "amberlog_code_kb" => ("code of the amberlog command", "KB"),
        "vmm_shim_code_kb" => ("code of the library in the VMM", "KB"),
        "lines" => ("lines of code that hold and recover journals", ""),
        "corrupted_runs_not_by_commit" => ("runs with other corrupted records than one that a commit cut in two", ""),
        "corrupted_runs" => ("runs with corrupted records", ""),
        "fsync_p50_us" => ("fsync, median", "µs"),
        "fsync_p99_us" => ("fsync, 99th percentile", "µs"),
        "journal_write_bytes" => ("bytes written to the journal, wherever it is", "bytes"),
        "nvm_bytes_absorbed" => ("bytes of the guest's checkpoints that were absorbed", "bytes"),
        "transaction_p50_us" => ("transaction, median", "µs"),
        "transaction_p99_us" => ("transaction, 99th percentile", "µs"),
        "transactions_per_second" => ("transactions a second", "1/s"),
        "flows_per_second" => ("flows a second", "1/s"),
        _ => ("another field", ""),
    }
}

impl Claim {
    /// The claim held against what was measured; a quick run's times are shown and not judged.
    pub fn judge(&self, rows: &[SummaryRow], quick: bool) -> Verdict {
        let mut verdict = self.compare(rows);
        if quick && is_time(&self.field) && verdict.ours.is_some() {
            verdict.agreement = Agreement::Open;
            verdict.sentence.push_str(" A quick run's times are not judged.");
        }
        verdict
    }

    /// What was measured, in each group that the claim is about: by how many per cent less, or the value.
    pub fn measured<'a>(&self, rows: &'a [SummaryRow]) -> Vec<(f64, &'a SummaryRow)> {
        let value = |group: &Group| {
            let row = rows.iter().find(|row| row.group == *group)?;
            row.fields.get(&self.field).map(|summary| summary.mean)
        };
        let (What::Less { mode, .. } | What::Most { mode, .. }) = self.what;
        let fits = |row: &&SummaryRow| {
            let is_of = |only: &String| row.group.workload == *only || row.group.disk == *only;
            row.group.mode == mode && self.only.as_ref().is_none_or(is_of)
        };
        let of = |row: &SummaryRow| {
            let ours = value(&row.group)?;
            let What::Less { than, .. } = self.what else { return Some(ours) };
            let other = value(&Group { mode: than, ..row.group.clone() })?;
            (other > 0.0).then(|| 100.0 * (1.0 - ours / other))
        };
        rows.iter().filter(fits).filter_map(|row| Some((of(row)?, row))).collect()
    }

    fn compare(&self, rows: &[SummaryRow]) -> Verdict {
        let (name, unit) = field_words(&self.field);
        let place = |group: &Group| {
            let guests = if group.guests == 1 { "1 guest".to_owned() } else { format!("{} guests", group.guests) };
            format!("{}, {guests}", group.workload)
        };
        let suffix = self.only.as_ref().map(|only| format!(", {only}")).unwrap_or_default();
        let highest = self.measured(rows).into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        match self.what {
            What::Less { mode, than, percent } => {
                let label = format!("{name}: {mode} below {than}{suffix}");
                let Some((ours, row)) = highest else { return open(label, percent, "%") };
                let agreement = if (ours - percent).abs() <= AGREEMENT_POINTS {
                    Agreement::Agrees
                } else if ours > percent {
                    Agreement::More
                } else if percent > 0.0 && ours < -AGREEMENT_POINTS / 2.0 {
                    Agreement::Differs
                } else {
                    Agreement::Less
                };
                let verdict = match agreement {
                    Agreement::Agrees => "They agree",
                    Agreement::More => "Ours is better",
                    Agreement::Less => "Ours is worse",
                    Agreement::Differs | Agreement::Open => "They differ",
                };
                let sentence = format!(
                    "Paper: {mode} takes {} {name} than {than}; here {} ({}, n = {}). {verdict} ({:+.1} points).",
                    less_or_more(percent),
                    less_or_more(ours),
                    place(&row.group),
                    row.count,
                    ours - percent
                );
                Verdict { label, paper: percent, ours: Some(ours), unit: "%".to_owned(), agreement, sentence }
            }
            What::Most { mode, value: limit } => {
                let label = format!("{name}, {mode}{suffix}");
                let Some((ours, row)) = highest else { return open(label, limit, unit) };
                let agreement = if ours <= limit { Agreement::Agrees } else { Agreement::Differs };
                let verdict = if ours <= limit { "Within it" } else { "Beyond it" };
                let sentence = format!(
                    "Paper: {name} at most {}; here at most {} ({}, n = {}). {verdict}.",
                    format!("{} {unit}", grouped(limit)).trim_end(),
                    format!("{} {unit}", grouped(ours)).trim_end(),
                    place(&row.group),
                    row.count
                );
                Verdict { label, paper: limit, ours: Some(ours), unit: unit.to_owned(), agreement, sentence }
            }
        }
    }

    /// The paper's number, short: `up to −50.9 %`, `at most 205 kB`.
    pub fn paper_in_short(&self) -> String {
        match self.what {
            What::Less { percent: 0.0, .. } => "no difference".to_owned(),
            What::Less { percent, .. } => format!("up to {}", change(percent, 1)),
            What::Most { value, .. } => self.bound(value),
        }
    }

    /// Ours, short, one number for each group of a comparison, and the largest for a bound.
    pub fn ours_in_short(&self, measured: &[(f64, &SummaryRow)]) -> String {
        match self.what {
            What::Less { .. } => {
                let numbers: Vec<String> =
                    measured.iter().map(|(value, _)| change(*value, 0).trim_end_matches(" %").to_owned()).collect();
                format!("{} %", numbers.join(" / "))
            }
            What::Most { .. } => {
                let largest = measured.iter().map(|(value, _)| *value).fold(f64::MIN, f64::max);
                self.bound(largest)
            }
        }
    }

    fn bound(&self, value: f64) -> String {
        if value == 0.0 { "none".to_owned() } else { format!("at most {}", self.amount(value)) }
    }

    /// Whether each group is a number of its own, as in a comparison.
    pub fn is_comparison(&self) -> bool {
        matches!(self.what, What::Less { .. })
    }

    fn amount(&self, value: f64) -> String {
        match field_words(&self.field).1 {
            "bytes" if value >= 1e6 => format!("{:.1} MB", value / 1e6),
            "bytes" if value >= 1e3 => format!("{:.0} kB", value / 1e3),
            unit => format!("{} {unit}", grouped(value)).trim_end().to_owned(),
        }
    }
}

/// A percentage less as a change with its sign: less is negative.
fn change(percent_less: f64, digits: usize) -> String {
    let text = format!("{:.digits$}", percent_less.abs());
    let is_zero = text.bytes().all(|byte| byte == b'0' || byte == b'.');
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let sign = if is_zero {
        ""
    } else if percent_less > 0.0 {
        "−"
    } else {
        "+"
    };
    format!("{sign}{text} %")
}

/// A percentage less, as it reads.
fn less_or_more(percent: f64) -> String {
    if percent >= 0.0 { format!("up to {percent:.1} % less") } else { format!("at best {:.1} % more", -percent) }
}

/// Whether a field is a time, which a quick run is too short to say anything of.
fn is_time(field: &str) -> bool {
    // Garbage collection is a simulator's sum, whatever the machine.
    field.contains("seconds") || field.ends_with("_per_second") || (field.ends_with("_us") && field != "gc_time_us")
}

fn open(label: String, paper: f64, unit: &str) -> Verdict {
    let sentence = format!("Paper: {label}: {} {unit}. Not measured here.", grouped(paper));
    Verdict { label, paper, ours: None, unit: unit.to_owned(), agreement: Agreement::Open, sentence }
}

/// A number as people read it.
pub fn grouped(value: f64) -> String {
    if value.abs() < 1000.0 {
        let text = format!("{value:.2}");
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0.0 { format!("-{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Summary;
    use std::collections::BTreeMap;

    fn row(mode: Mode, guests: u32, seconds: f64) -> SummaryRow {
        let group = Group { disk: "none".into(), parameter: 0, guests, workload: "untar".into(), mode };
        let fields = BTreeMap::from([("seconds".to_owned(), Summary::of(&[seconds]).unwrap())]);
        SummaryRow { group, count: 1, failed: 0, fields }
    }

    #[test]
    fn the_best_group_counts_and_the_sentence_says_which() {
        let rows =
            [row(Mode::Vma, 1, 9.0), row(Mode::Journal, 1, 10.0), row(Mode::Vma, 8, 6.0), row(Mode::Journal, 8, 10.0)];
        let verdict = "less seconds vma journal 41.1".parse::<Claim>().unwrap().judge(&rows, false);
        assert_eq!(verdict.agreement, Agreement::Agrees);
        assert!((verdict.ours.unwrap() - 40.0).abs() < 1e-9);
        assert!(verdict.sentence.contains("untar, 8 guests"), "{}", verdict.sentence);
        let quick = "less seconds vma journal 41.1".parse::<Claim>().unwrap().judge(&rows, true);
        assert_eq!((quick.agreement, quick.ours), (Agreement::Open, verdict.ours));
        let verdict = "less seconds vma journal 80".parse::<Claim>().unwrap().judge(&rows, false);
        assert_eq!(verdict.agreement, Agreement::Less);
        let verdict = "less seconds journal vma 40".parse::<Claim>().unwrap().judge(&rows, false);
        assert_eq!(verdict.agreement, Agreement::Differs);
        let verdict = "less seconds vma ordered 5".parse::<Claim>().unwrap().judge(&rows, false);
        assert_eq!((verdict.agreement, verdict.ours), (Agreement::Open, None));
    }

    #[test]
    fn bounds_are_bounds() {
        let rows = [row(Mode::Vma, 1, 9.0), row(Mode::Vma, 2, 12.0)];
        let judge = |text: &str| text.parse::<Claim>().unwrap().judge(&rows, false).agreement;
        assert_eq!(judge("most seconds vma 12"), Agreement::Agrees);
        assert_eq!(judge("most seconds vma 11"), Agreement::Differs);
        assert_eq!(judge("most seconds vma 11 @ postmark"), Agreement::Open);
        assert!("most seconds".parse::<Claim>().is_err());
        assert_eq!(grouped(1_234_567.0), "1,234,567");
        assert_eq!(grouped(50.90), "50.9");
        let bound: Claim = "most area_bytes_max vma 204800".parse().unwrap();
        assert_eq!((bound.paper_in_short(), bound.amount(10_800_332.0)), ("at most 205 kB".into(), "10.8 MB".into()));
        assert_eq!(
            (change(50.9, 1), change(-7.0, 1), change(0.04, 1)),
            ("−50.9 %".into(), "+7 %".into(), "0 %".into())
        );
    }
}
