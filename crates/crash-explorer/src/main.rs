//! `crash-explorer explore` and `crash-explorer record`.
//!
//! Exit codes: 0 nothing found, 1 a broken promise or a failure, 2 usage.

#![forbid(unsafe_code)]

use crash_explorer::explore::{self, Thoroughness};
use crash_explorer::scenario::Scenario;
use crash_explorer::switches::Switches;
use crash_explorer::{Error, Result, nvm, power, session};
use guest_tools::options::Options;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "crash-explorer explore [--points N] [--seed N] [--recording NAME] [--switches A,B|none] [--until POINT] \
                     [--points-each N] [--judgements-each N] [--directory D] [--nvm | --power | --aged] [--quick]\n\
                     crash-explorer record [--recording NAME] [--directory D]";

/// With one seed of so many the guest is reset as its logs are handed over, with which a run ends.
const RESETS_EACH: u64 = 8;

struct Request {
    only: Option<String>,
    directory: PathBuf,
    points: u64,
    seed: u64,
    switches: Option<Switches>,
    /// Placement `nvm`, with losses of power, instead of held logs.
    nvm: bool,
    /// Durability by age, with losses of power.
    power: bool,
    /// The same as a disk has it, with route, keeper and area.
    aged: bool,
    how: Thoroughness,
}

impl Request {
    fn parse(words: impl Iterator<Item = String>) -> std::result::Result<Self, String> {
        let mut options = Options::parse(words)?;
        let nvm = options.flag("nvm");
        let power = options.flag("power");
        let aged = options.flag("aged");
        let is_quick = options.flag("quick");
        let own = concat!(env!("CARGO_MANIFEST_DIR"), "/recordings");
        let request = Request {
            only: options.text("recording"),
            directory: options.text("directory").unwrap_or_else(|| own.to_owned()).into(),
            points: options.number("points", if is_quick { 2_000 } else { 20_000 }, 1..=u64::MAX)?,
            seed: options.number("seed", 1, 0..=u64::MAX)?,
            switches: options.text("switches").map(|names| Switches::parse(&names)).transpose()?,
            nvm,
            power,
            aged,
            how: Thoroughness {
                // Steps of a region are many, and each looks at all of the disk.
                points_each: options.number(
                    "points-each",
                    if nvm {
                        40
                    } else if power || aged {
                        4
                    } else {
                        1
                    },
                    1..=1_000_000,
                )?,
                judgements_each: options.number("judgements-each", if nvm { 600 } else { 150 }, 0..=u64::MAX)?,
                until: options.number("until", u64::MAX, 0..=u64::MAX)?,
            },
        };
        options.finish()?;
        Ok(request)
    }
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let command = words.next().unwrap_or_default();
    let request = match Request::parse(words) {
        Ok(request) if command == "explore" || command == "record" => request,
        Ok(_) => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
        Err(error) => {
            eprintln!("crash-explorer: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let result = if command == "record" { record(&request) } else { explore(&request) };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("crash-explorer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn record(request: &Request) -> Result<ExitCode> {
    for scenario in Scenario::ALL {
        if request.only.as_ref().is_some_and(|only| only != scenario.name) {
            continue;
        }
        let recording = session::record(&scenario)?;
        let path = explore::path(&request.directory, scenario.name);
        recording.save(&path)?;
        let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        println!("{}: {} events in {} KB", scenario.name, recording.events.len(), bytes >> 10);
    }
    Ok(ExitCode::SUCCESS)
}

fn explore(request: &Request) -> Result<ExitCode> {
    let mut recordings = explore::recordings(&request.directory, request.only.as_deref())?;
    if request.nvm || request.power || request.aged {
        // A journal on a device of its own goes neither to NVM nor into compounds.
        recordings.retain(|recording| recording.disks.len() == 1);
    }
    if recordings.is_empty() {
        return Err(Error::Other("no recording has its journal on the disk of its file system".to_owned()));
    }
    let started = Instant::now();
    let (mut points, mut judgements, mut followed, mut promised, mut seed) = (0, 0, 0, 0, request.seed);
    loop {
        for (number, recording) in recordings.iter().enumerate() {
            let drawn = Switches::of_seed(seed ^ (number as u64) << 32);
            let is_reset = seed.is_multiple_of(RESETS_EACH) && !(request.nvm || request.power || request.aged);
            let drawn = if is_reset { drawn.with(Switches::HAND_OVER).with(Switches::RESET) } else { drawn };
            let switches = request.switches.unwrap_or(drawn);
            let run = match (request.nvm, request.power) {
                (true, _) => nvm::run,
                (_, true) => power::run,
                _ if request.aged => power::route::run,
                _ => explore::run,
            };
            let outcome = run(recording, seed, switches, request.how)?;
            points += outcome.points;
            judgements += outcome.judgements;
            followed += outcome.followed;
            promised += outcome.promised;
            let rate = points as f64 / started.elapsed().as_secs_f64();
            println!(
                "{points} crash points, {judgements} judged by e2fsprogs, {followed} workers followed, {rate:.0} points/s ({} from seed \
                 {seed}: {})",
                recording.scenario,
                switches.names()
            );
            if let Some(finding) = outcome.finding {
                println!("FOUND {}", finding.what);
                if request.nvm || request.power || request.aged {
                    println!(
                        "FOUND {}: {}\n    again: crash-explorer explore {} --recording {} --seed {} --switches {} \
                         --points-each {} --judgements-each {} --points 1",
                        finding.scenario,
                        finding.what,
                        match (request.nvm, request.power) {
                            (true, _) => "--nvm",
                            (_, true) => "--power",
                            _ => "--aged",
                        },
                        finding.scenario,
                        finding.seed,
                        finding.switches.names(),
                        request.how.points_each,
                        request.how.judgements_each
                    );
                } else {
                    println!("FOUND {}", explore::minimise(recording, finding)?);
                }
                return Ok(ExitCode::FAILURE);
            }
            if points >= request.points || request.how.until != u64::MAX {
                if request.aged && promised == 0 {
                    return Err(Error::Other(
                        "durability by age was in force at no crash point, so no promise was tested".to_owned(),
                    ));
                }
                return Ok(ExitCode::SUCCESS);
            }
        }
        seed += 1;
    }
}
