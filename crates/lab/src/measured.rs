//! What is measured: the conditions, a cell as it was measured, where and by which program, and what rows and curves are made of it.

use crate::cell::{Cell, Group};
use crate::statistics::Summary;
use guest_kit::Programs;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Parameters that all cells of a run share; a result is used again only where they are equal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    /// Small and short: counters mean something, times do not.
    pub quick: bool,
    /// Sizes, as a part of the paper's.
    pub scale: f64,
    /// Seconds for a second of the modelled disk.
    pub time_scale: f64,
    /// Memory of a guest, in MiB.
    pub guest_mib: u32,
    /// `ext3` or `ext4`.
    pub file_system: String,
    /// From which everything random follows.
    pub seed: u64,
    /// Clocks and what goes by them (commit interval, expiry of dirty pages, a drive's patience), as a part of what they are.
    /// Results of earlier versions have them as they are, whatever their sizes.
    #[serde(default = "unscaled")]
    pub clocks: f64,
    /// The part of what they are that constants have (caches, memory, what may be dirty), where the clocks do not say it: see
    /// [`Self::constants`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constants: Option<f64>,
    /// Memory of the paper's machine, in MiB, where the experiment says so: of that a declared scale is a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// What the paper's kernel let be dirty, in per cent of memory, where the experiment says so. Results of earlier versions are of
    /// today's 10 and 20.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_percent: Option<(u32, u32)>,
    /// Which directory images were in, and its file system: what is written there takes real time besides the model's. Empty where results of earlier
    /// versions do not say, and where there is no image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub images: String,
    /// What guests ran on: accelerator and kernel. Results of earlier versions are of emulated guests.
    #[serde(default = "emulated")]
    pub platform: String,
}

fn unscaled() -> f64 {
    1.0
}

pub(crate) fn emulated() -> String {
    "tcg".to_owned()
}

/// Of the machines of earlier versions.
fn two() -> u32 {
    2
}

impl Parameters {
    /// Of a full-size run with emulated guests: what is not said otherwise.
    pub fn unnamed() -> Self {
        Self::for_tests()
    }

    /// What another run's parameters have that differs from ours, in words.
    pub fn difference(&self, here: &Self) -> String {
        let fields = |parameters: &Self| serde_json::to_value(parameters).unwrap_or_default();
        let (there, here) = (fields(self), fields(here));
        let names: BTreeSet<&String> =
            [&there, &here].into_iter().filter_map(|one| one.as_object()).flat_map(|one| one.keys()).collect();
        let differs = names.into_iter().filter(|name| there.get(name.as_str()) != here.get(name.as_str()));
        let word = |of: &serde_json::Value, name: &str| {
            of.get(name).map_or_else(|| "not said".to_owned(), ToString::to_string)
        };
        differs
            .map(|name| format!("{name}: {} there, {} here", word(&there, name), word(&here, name)))
            .collect::<Vec<_>>()
            .join("; ")
    }

    /// Of a full-size run, for tests.
    #[doc(hidden)]
    pub fn for_tests() -> Self {
        Parameters {
            quick: false,
            scale: 1.0,
            time_scale: 1.0,
            guest_mib: 192,
            file_system: "ext3".to_owned(),
            seed: 1,
            clocks: 1.0,
            constants: None,
            memory_mib: None,
            dirty_percent: None,
            images: String::new(),
            platform: emulated(),
        }
    }
}

/// One cell, measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CellResult {
    /// Which.
    pub cell: Cell,
    /// Under which parameters.
    pub parameters: Parameters,
    /// What each guest came to: field and value.
    pub guests: Vec<BTreeMap<String, f64>>,
    /// What the modelled disk did.
    pub model: BTreeMap<String, f64>,
    /// How long the cell took, boots and all, in seconds of this machine.
    pub wall_seconds: f64,
    /// Of that: making images, booting, preparing, running, ending.
    #[serde(default)]
    pub phases: BTreeMap<String, f64>,
    /// What the first guest's journal held over time: seconds since the beginning, and a value.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub curves: BTreeMap<String, Vec<(f64, f64)>>,
    /// The machine's load averages at its end.
    pub load: String,
    /// The part of the machine's processor time that its own host had for others meanwhile ("steal"), in per cent; results of earlier versions do not
    /// say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steal_percent: Option<f64>,
    /// The machine's processors.
    #[serde(default = "two")]
    pub processors: u32,
    /// Of the code that measured it: `git describe`, or the version; results of earlier versions do not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub commit: String,
    /// The machine that measured it: its processor; results of earlier versions do not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub machine: String,
    /// The programs that it was measured with ([`guest_kit::Programs`]), where it had guests; results of earlier versions do not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub programs: String,
    /// The experiment that measured it, if it was another one: the same cell is measured once for all that need it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_for: Option<String>,
    /// Whether everything that was there before the load was home when it began, and is in no counter; results of
    /// earlier versions have what a journal still owed of it in both.
    #[serde(default)]
    pub begins_clean: bool,
    /// Whether its high-water marks are those of the load alone; results of earlier versions have those of what was prepared before it in them.
    #[serde(default)]
    pub has_marks_of_load: bool,
    /// Of a recovery: after how many seconds all were killed, half of what a whole run takes. It is measured once for all iterations of a group, so a
    /// run that goes on has it from here; results of earlier versions do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half_seconds: Option<f64>,
    /// What was found to be broken after a crash, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub found: Vec<String>,
    /// How often it was tried: earlier attempts failed, and are kept ([`crate::results::set_aside`]).
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub attempts: u32,
    /// Why there is no result.
    pub failure: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_none(attempts: &u32) -> bool {
    *attempts == 0
}

fn once() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_once(attempts: &u32) -> bool {
    *attempts == 1
}

/// What measured a cell. All are empty where results of earlier versions do not say.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Source {
    /// The code: `git describe`, or the version.
    pub commit: String,
    /// The machine: its processor.
    pub machine: String,
    /// The programs that were really used ([`guest_kit::Programs`]); empty where there were no guests.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub programs: String,
}

impl Source {
    /// This program on this machine, with what its guests and their VMs are made with, where there are any.
    pub fn here(programs: Option<&Programs>) -> Self {
        Source {
            commit: crate::machine::commit(),
            machine: crate::machine::processor(),
            programs: programs.map_or_else(String::new, |programs| programs.digest().to_owned()),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_unsaid = |text: &str| if text.is_empty() { "one that is not said".to_owned() } else { text.to_owned() };
        write!(f, "program {} on {}", or_unsaid(&self.commit), or_unsaid(&self.machine))?;
        if self.programs.is_empty() { Ok(()) } else { write!(f, " with programs {}", self.programs) }
    }
}

impl CellResult {
    /// What measured it.
    pub fn source(&self) -> Source {
        Source { commit: self.commit.clone(), machine: self.machine.clone(), programs: self.programs.clone() }
    }

    /// One that nothing was measured of yet.
    pub fn empty(cell: &Cell, parameters: &Parameters) -> Self {
        CellResult {
            cell: cell.clone(),
            parameters: parameters.clone(),
            guests: Vec::new(),
            model: BTreeMap::new(),
            wall_seconds: 0.0,
            phases: BTreeMap::new(),
            curves: BTreeMap::new(),
            load: String::new(),
            steal_percent: None,
            processors: crate::machine::processors(),
            commit: String::new(),
            machine: String::new(),
            programs: String::new(),
            measured_for: None,
            begins_clean: true,
            has_marks_of_load: true,
            half_seconds: None,
            found: Vec::new(),
            attempts: 1,
            failure: None,
        }
    }

    /// The mean of a field over the guests.
    pub fn mean(&self, field: &str) -> Option<f64> {
        let values: Vec<f64> = self.guests.iter().filter_map(|guest| guest.get(field).copied()).collect();
        Summary::of(&values).map(|summary| summary.mean)
    }

    /// The largest of a field over the guests.
    pub fn longest(&self, field: &str) -> Option<f64> {
        self.guests.iter().filter_map(|guest| guest.get(field).copied()).reduce(f64::max)
    }
}

/// All iterations of a group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SummaryRow {
    /// Which.
    #[serde(flatten)]
    pub group: Group,
    /// Iterations that were measured.
    pub count: usize,
    /// Iterations that failed.
    pub failed: usize,
    /// How often they were tried beyond once each: attempts that failed, and were made again.
    #[serde(default, skip_serializing_if = "is_none")]
    pub failed_before: u32,
    /// What measured them: more than one where they were put together in spite of that. Results of earlier versions do not say.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub sources: BTreeSet<Source>,
    /// Mean over the guests, then mean and deviation over the iterations.
    pub fields: BTreeMap<String, Summary>,
}

/// A value over time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Curve {
    /// Of what.
    #[serde(flatten)]
    pub group: Group,
    /// Its name.
    pub field: String,
    /// Seconds since the beginning, and values.
    pub points: Vec<(f64, f64)>,
}
