//! What came of all trials, as a table and as JSON.

use crate::trial::{Kind, Outcome};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;

/// What came of a case under amberlog, in the light of its control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// All that was acknowledged is there, in a file system that is whole.
    Ok,
    /// Something acknowledged is not there.
    Lost,
    /// The file system is not whole.
    Damaged,
    /// Something is wrong, and so it is on QEMU's own disk.
    ControlFailed,
    /// It cannot be tried here.
    Cannot,
    /// The trial itself failed.
    Failed,
}

impl Verdict {
    const ALL: [(Self, &'static str); 6] = [
        (Self::Ok, "ok"),
        (Self::Lost, "lost"),
        (Self::Damaged, "damaged"),
        (Self::ControlFailed, "control failed too"),
        (Self::Cannot, "cannot run here"),
        (Self::Failed, "failed"),
    ];

    /// Judges a trial by its control, if there was one.
    pub fn of(outcome: &Outcome, control: Option<&Outcome>) -> Self {
        let is_good =
            |outcome: &Outcome| outcome.faults.is_empty() && outcome.failure.is_none() && outcome.cannot.is_none();
        match control {
            Some(control) if control.cannot.is_some() => Self::Cannot,
            // Machinery that fails acquits nobody.
            _ if outcome.faults.is_empty() && outcome.failure.is_some() => Self::Failed,
            Some(control) if !is_good(outcome) && !is_good(control) => Self::ControlFailed,
            _ if outcome.faults.iter().any(|(kind, _)| *kind == Kind::Damaged) => Self::Damaged,
            // What can be done on QEMU's disk can be done here.
            _ if outcome.cannot.is_some() => Self::Damaged,
            _ if outcome.faults.iter().any(|(kind, _)| *kind == Kind::Lost) => Self::Lost,
            Some(control) if !is_good(control) => Self::ControlFailed,
            _ => Self::Ok,
        }
    }

    /// In words.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(verdict, _)| *verdict == self).map_or("?", |(_, name)| name)
    }
}

/// A case that was tried.
#[derive(Clone, Debug)]
pub struct Run {
    pub case: String,
    pub seed: u64,
    pub placement: &'static str,
    pub mode: &'static str,
    pub end: &'static str,
    pub verdict: Verdict,
    pub details: Vec<String>,
    pub acknowledged: u64,
    pub worker_kills: u64,
    pub seconds: f64,
}

impl Run {
    /// One line, and how to do it again.
    pub fn line(&self) -> String {
        let Self { case, seed, placement, mode, end, acknowledged, seconds, .. } = self;
        let what = self.verdict.name();
        let kills = match self.worker_kills {
            0 => String::new(),
            kills => format!("{kills} workers killed, "),
        };
        format!(
            "{what}: {case}, seed {seed}, {placement}, data={mode}, {end}: {kills}{acknowledged} acknowledged; {seconds:.0} s"
        )
    }
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub runs: Vec<Run>,
}

impl Table {
    /// Whether nothing was found.
    pub fn is_good(&self) -> bool {
        !self.runs.iter().any(|run| matches!(run.verdict, Verdict::Lost | Verdict::Damaged | Verdict::Failed))
    }

    /// Whether a case was found not to run here.
    pub fn is_impossible(&self, case: &str) -> bool {
        self.runs.iter().any(|run| run.case == case && run.verdict == Verdict::Cannot)
    }

    fn by_case(&self) -> BTreeMap<&str, BTreeMap<Verdict, u64>> {
        let mut by_case: BTreeMap<&str, BTreeMap<Verdict, u64>> = BTreeMap::new();
        for run in &self.runs {
            *by_case.entry(&run.case).or_default().entry(run.verdict).or_default() += 1;
        }
        by_case
    }

    /// For `--json`.
    pub fn to_json(&self, seed: u64) -> String {
        let runs = self.runs.iter().map(|run| {
            json!({
                "case": run.case, "seed": run.seed, "placement": run.placement, "mode": run.mode, "end": run.end,
                "verdict": run.verdict.name(), "details": run.details, "acknowledged": run.acknowledged,
                "worker_kills": run.worker_kills, "seconds": run.seconds,
            })
        });
        let counts = Verdict::ALL.iter().map(|(verdict, name)| {
            ((*name).to_owned(), json!(self.runs.iter().filter(|run| run.verdict == *verdict).count()))
        });
        let all = json!({
            "schema": 1, "seed": seed, "runs": runs.collect::<Vec<_>>(),
            "counts": counts.collect::<serde_json::Map<_, _>>(),
        });
        format!("{all:#}\n")
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| case | runs | {} |", Verdict::ALL.map(|(_, name)| name).join(" | "))?;
        writeln!(f, "|---|---|{}", "---|".repeat(Verdict::ALL.len()))?;
        for (case, counts) in self.by_case() {
            let cell = |verdict: &Verdict| counts.get(verdict).map_or_else(String::new, u64::to_string);
            let cells: Vec<String> = Verdict::ALL.iter().map(|(verdict, _)| cell(verdict)).collect();
            writeln!(f, "| {case} | {} | {} |", counts.values().sum::<u64>(), cells.join(" | "))?;
        }
        let acknowledged: u64 = self.runs.iter().map(|run| run.acknowledged).sum();
        let count = |verdict| self.runs.iter().filter(|run| run.verdict == verdict).count();
        let counts = Verdict::ALL.map(|(verdict, name)| format!("{} {name}", count(verdict)));
        writeln!(f, "\n{} runs: {}; {acknowledged} acknowledged groups", self.runs.len(), counts.join(", "))?;
        let kills: u64 = self.runs.iter().map(|run| run.worker_kills).sum();
        if kills > 0 {
            writeln!(f, "workers killed under their guests: {kills}")?;
        }
        for run in self.runs.iter().filter(|run| !matches!(run.verdict, Verdict::Ok | Verdict::Cannot)) {
            let (case, seed, placement, mode, end) = (&run.case, run.seed, run.placement, run.mode, run.end);
            let case = if case.starts_with("random/") { "random/" } else { case };
            let kills = if run.worker_kills > 0 { " --worker-kills N" } else { "" };
            writeln!(
                f,
                "again: variety --cases {case} --seed {seed} --placement {placement} --mode {mode} --end {end}{kills}"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_that_fails_as_well_acquits_and_one_that_does_not_does_not() {
        let good = Outcome::default();
        let damaged = Outcome { faults: vec![(Kind::Damaged, "x".to_owned())], ..Outcome::default() };
        let lost = Outcome { faults: vec![(Kind::Lost, "x".to_owned())], ..Outcome::default() };
        let cannot = Outcome { cannot: Some("no".to_owned()), ..Outcome::default() };
        assert_eq!(Verdict::of(&good, None), Verdict::Ok);
        assert_eq!(Verdict::of(&lost, Some(&good)), Verdict::Lost);
        assert_eq!(Verdict::of(&damaged, Some(&good)), Verdict::Damaged);
        assert_eq!(Verdict::of(&lost, Some(&damaged)), Verdict::ControlFailed);
        assert_eq!(Verdict::of(&good, Some(&cannot)), Verdict::Cannot);
        // Mounted on QEMU's disk, and not here.
        assert_eq!(Verdict::of(&cannot, Some(&good)), Verdict::Damaged);
    }
}
