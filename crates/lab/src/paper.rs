//! The papers: which experiments are of which, and how each fared in one sentence.

use crate::catalogue::Experiment;
use crate::results::{self, Results};
use crate::verdict::{Agreement, Verdict};
use std::collections::BTreeMap;

/// A paper whose experiments are here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Paper {
    /// Huang and Chang, 2012: VM-aware journaling.
    Spe2012,
    /// The same on SSDs, 2010.
    Ssd2010,
    /// Remote journaling, 2005.
    Rj2005,
    /// A journaling scheme for non-volatile memory, 2018.
    Njs2018,
    /// Experiments of no paper.
    Beyond,
}

impl Paper {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 5] = [Self::Spe2012, Self::Ssd2010, Self::Rj2005, Self::Njs2018, Self::Beyond];

    /// What its experiments' names begin with; `None` for those of no paper.
    pub fn prefix(self) -> Option<&'static str> {
        match self {
            Self::Spe2012 => Some("spe2012"),
            Self::Ssd2010 => Some("ssd2010"),
            Self::Rj2005 => Some("rj2005"),
            Self::Njs2018 => Some("njs2018"),
            Self::Beyond => None,
        }
    }

    /// For a heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Spe2012 => "VM aware journaling (SPE 2012)",
            Self::Ssd2010 => "VM aware journaling on SSDs (2010)",
            Self::Rj2005 => "Remote journaling (2005)",
            Self::Njs2018 => "NJS: journaling on non-volatile memory (DATE 2018)",
            Self::Beyond => "Beyond the papers",
        }
    }

    /// The paper of an experiment.
    pub fn of(id: &str) -> Self {
        let is_of = |paper: &Self| {
            paper.prefix().is_some_and(|prefix| id.starts_with(prefix) && id[prefix.len()..].starts_with('-'))
        };
        Self::ALL.into_iter().find(is_of).unwrap_or(Self::Beyond)
    }
}

/// The results of one experiment, judged by its description.
#[derive(Debug)]
pub struct Judged<'a> {
    /// What was measured.
    pub results: &'a Results,
    /// What it is; `None` where it is not known here.
    pub experiment: Option<&'a Experiment>,
    /// The paper's claims, held against it.
    pub verdicts: Vec<Verdict>,
}

/// All results of a paper, judged, in the order of their names, and of the numbers in these: Figure 9 comes before Figure 10.
pub fn judged<'a>(paper: Paper, all: &'a [Results], catalogue: &'a [Experiment]) -> Vec<Judged<'a>> {
    let mut of_it: Vec<&Results> = all.iter().filter(|results| Paper::of(&results.id) == paper).collect();
    of_it.sort_by_cached_key(|results| in_order(&results.id));
    of_it
        .into_iter()
        .map(|results| {
            let experiment = catalogue.iter().find(|experiment| experiment.id == results.id);
            let verdicts = experiment
                .map_or_else(Vec::new, |experiment| results::judge(experiment, &results.rows, &results.parameters));
            Judged { results, experiment, verdicts }
        })
        .collect()
}

/// A name as what it is sorted by: its words and its numbers.
fn in_order(name: &str) -> Vec<(String, u64)> {
    let mut parts: Vec<(String, u64)> = vec![(String::new(), 0)];
    let mut was_digit = false;
    for letter in name.chars() {
        if was_digit && !letter.is_ascii_digit() {
            parts.push((String::new(), 0));
        }
        was_digit = letter.is_ascii_digit();
        if let Some((word, number)) = parts.last_mut() {
            match letter.to_digit(10) {
                Some(digit) => *number = number.saturating_mul(10).saturating_add(digit.into()),
                None => word.push(letter),
            }
        }
    }
    parts
}

/// How a paper fared, in one sentence.
pub fn sentence(judged: &[Judged<'_>]) -> String {
    let verdicts = || judged.iter().flat_map(|one| &one.verdicts);
    let mut counts: BTreeMap<Agreement, usize> = BTreeMap::new();
    for verdict in verdicts() {
        *counts.entry(verdict.agreement).or_default() += 1;
    }
    let of = |wanted: &[Agreement]| -> usize { wanted.iter().filter_map(|one| counts.get(one)).sum() };
    let all = verdicts().count();
    let judged_ones: usize = counts.iter().filter(|(one, _)| one.is_judged()).map(|(_, count)| count).sum();
    if all == 0 {
        return "No claim of it was measured.".to_owned();
    }
    let mut parts = Vec::new();
    for one in Agreement::ALL.into_iter().filter(|one| one.is_judged()) {
        if let Some(count) = counts.get(&one) {
            parts.push(format!("{count} {}", one.words()));
        }
    }
    let open = of(&[Agreement::NotJudged, Agreement::Unclear, Agreement::Incomplete, Agreement::Missing]);
    let void = of(&[Agreement::Void]);
    let found = if parts.is_empty() { "nothing yet".to_owned() } else { parts.join(", ") };
    let few = match verdicts().filter(|verdict| verdict.is_judged_by_few()).count() {
        0 => String::new(),
        few => format!(" ({few} of them by fewer measurements than there should be)"),
    };
    format!(
        "Of {all} claims, {judged_ones} could be judged: {found}{few}; {open} are open (measured once, at no declared scale, unclear, not in all of their cells, or not at all), {void} void."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_come_in_the_order_of_their_numbers() {
        let mut names =
            ["njs2018-fig10", "njs2018-fig9a", "spe2012-fig06-tenth", "njs2018-fig9", "njs2018-fig1", "spe2012-fig06"];
        names.sort_by_cached_key(|name| in_order(name));
        assert_eq!(
            names,
            ["njs2018-fig1", "njs2018-fig9", "njs2018-fig9a", "njs2018-fig10", "spe2012-fig06", "spe2012-fig06-tenth"]
        );
    }

    #[test]
    fn an_experiment_is_of_the_paper_that_its_name_begins_with() {
        assert_eq!(Paper::of("spe2012-fig06"), Paper::Spe2012);
        assert_eq!(Paper::of("njs2018-fig8"), Paper::Njs2018);
        assert_eq!((Paper::of("njs2018x"), Paper::of("today-fsync")), (Paper::Beyond, Paper::Beyond));
    }
}
