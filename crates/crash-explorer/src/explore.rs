//! Many runs, and what they found.

use crate::check;
use crate::error::{Error, Result};
use crate::finding::{Step, Stop};
use crate::judgement;
use crate::recording::Recording;
use crate::scenario::Scenario;
use crate::simulation::Simulation;
use crate::switches::Switches;
use guest_tools::random::Random;
use std::path::{Path, PathBuf};

/// Where a broken promise showed, and how to see it again.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The recording.
    pub scenario: String,
    /// The seed of the run.
    pub seed: u64,
    /// What the adversary needs for it.
    pub switches: Switches,
    /// The first crash point at which it shows.
    pub point: u64,
    /// The recorded event that was happening.
    pub event: usize,
    /// One in this many points was judged with e2fsprogs.
    pub judgements_each: u64,
    /// What is wrong.
    pub what: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}: {}", self.scenario, self.what)?;
        writeln!(
            f,
            "    seed {}, crash point {}, at recorded event {}; the adversary needs: {}",
            self.seed,
            self.point,
            self.event,
            self.switches.names()
        )?;
        write!(
            f,
            "    again: crash-explorer explore --recording {} --seed {} --switches {} --until {} --judgements-each {}",
            self.scenario,
            self.seed,
            self.switches.names(),
            self.point,
            self.judgements_each
        )
    }
}

/// How a run is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Thoroughness {
    /// One in this many crash points is checked.
    pub points_each: u64,
    /// One in this many checked points is judged with e2fsprogs; 0 for none.
    pub judgements_each: u64,
    /// The last crash point of interest.
    pub until: u64,
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Crash points that were checked, kills in the middle of a step among them.
    pub points: u64,
    /// Crash points that were judged with e2fsprogs.
    pub judgements: u64,
    /// How often durability by age ended under a running guest, in the explorer of that.
    pub endings: u64,
    /// How often it began there.
    pub begins: u64,
    /// Crash points there while it was in force.
    pub promised: u64,
    /// Crash points there while it was not, with the log held: what storage says then was checked.
    pub unpromised: u64,
    /// Crash points at which a region's last transaction was acknowledged and may not have been durable.
    pub prepared: u64,
    /// Logs that have left their region for storage.
    pub left: usize,
    /// Workers that went on after another one had been killed.
    pub followed: u64,
    /// Guests that were reset as a log was to be handed over.
    pub resets: u64,
    /// What is wrong.
    pub finding: Option<Finding>,
}

/// Reads the recordings of a directory, all of them or one.
///
/// # Errors
/// When there are none, or one is damaged.
pub fn recordings(directory: &Path, only: Option<&str>) -> Result<Vec<Recording>> {
    let mut found = Vec::new();
    for scenario in crate::scenario::Scenario::ALL {
        if only.is_none_or(|only| only == scenario.name) {
            found.push(Recording::load(&path(directory, scenario.name))?);
        }
    }
    if found.is_empty() {
        return Err(Error::Other(format!("there is no recording '{}'", only.unwrap_or_default())));
    }
    Ok(found)
}

/// Where a recording lies.
pub fn path(directory: &Path, scenario: &str) -> PathBuf {
    directory.join(format!("{scenario}.rec"))
}

/// One run.
///
/// # Errors
/// When it could not be made; a broken promise is in the outcome.
pub fn run(recording: &Recording, seed: u64, switches: Switches, how: Thoroughness) -> Result<Outcome> {
    let mut simulation = Simulation::new(recording, seed, switches)?;
    let mut outcome = Outcome::default();
    let scenario = Scenario::named(&recording.scenario)?;
    let mut visited = 0u64;
    // Which points are looked at does not depend on what the adversary may do.
    let mut random = Random::of(seed, 2);
    let ended = simulation.run(&mut |simulation| -> Step {
        let point = visited;
        visited += 1;
        if point > how.until {
            return Err(Stop::Error(Error::Other(String::new())));
        }
        if random.below(how.points_each) != 0 {
            return Ok(());
        }
        outcome.points += 1;
        check::check(simulation)?;
        // The choice is the point's own, so that it does not depend on which points were judged before.
        let mut choice = Random::of(seed ^ 0x6a75_6467_6500, point);
        if how.judgements_each != 0 && choice.below(how.judgements_each) == 0 {
            outcome.judgements += 1;
            judgement::judge(simulation, &scenario, &mut choice)?;
        }
        Ok(())
    });
    outcome.points += simulation.looks;
    (outcome.followed, outcome.resets) = (simulation.deaths.followed, simulation.resets);
    match ended {
        Ok(()) => {}
        Err(Stop::Error(Error::Other(text))) if text.is_empty() => {}
        Err(Stop::Error(error)) => return Err(error),
        Err(Stop::Finding(what)) => {
            outcome.finding = Some(Finding {
                scenario: recording.scenario.clone(),
                seed,
                switches,
                point: visited.saturating_sub(1),
                event: simulation.clock(),
                judgements_each: how.judgements_each,
                what,
            });
        }
    }
    Ok(outcome)
}

/// Takes liberties from the adversary for as long as the run still fails, and finds the first crash point of what is left.
///
/// # Errors
/// When a run could not be made.
pub fn minimise(recording: &Recording, finding: Finding) -> Result<Finding> {
    let how = Thoroughness { points_each: 1, judgements_each: finding.judgements_each, until: u64::MAX };
    let mut smallest = run(recording, finding.seed, finding.switches, how)?.finding.unwrap_or(finding);
    for switch in smallest.switches.each() {
        let fewer = smallest.switches.without(switch);
        if let Some(found) = run(recording, smallest.seed, fewer, how)?.finding {
            smallest = found;
        }
    }
    Ok(smallest)
}
