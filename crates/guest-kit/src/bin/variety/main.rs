//! A variety of guests, each of which works, is killed, and is judged: kinds of file systems, journals, partitions and machines,
//! what can be done to a file system while it is mounted, mounts without a reset between, kernels.
//!
//! `variety [--cases PATTERN,…] [--rounds N] [--seed N] [--minutes N] [--placement P] [--end qemu|both|reset] [--worker-kills N]
//! [--mode journal|ordered|writeback] [--control first|failed|always] [--json FILE] [--keep DIR] [--quick] [--list]`
//!
//! `--placement` is `retain`, `copy`, `storage`, `nvm` (a region in host memory), `durable` (`retain` with `durable-within=1`), `durable-0` or `remote` (a journal server of its own, which nobody kills); unsaid, it is drawn.
//! `--mode` asks for a journaling mode; cases that are not tried in it are left out. Unsaid, it is drawn of those of the case.
//! With `--worker-kills` the process that serves the guest is killed up to so many times, at random moments, while the guest goes through its steps.
//! A case is tried under amberlog and, in its first round and whenever something is found, on QEMU's own disk: what fails there
//! too is not amberlog's, and what cannot be mounted there cannot be tried here. A pattern is a part of a name, or its beginning
//! if it ends with `*`; `random` draws file system, place and steps from the seed. `--quick` is a few cases, without controls
//! unless something is found. Exit code 1 if something was lost or damaged, or a trial failed.

#![forbid(unsafe_code)]

mod case;
mod disk;
mod killer;
mod table;
mod trial;

use case::Case;
use guest_kit::Platform;
use guest_kit::workload::Mode;
use guest_tools::options::Options;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use table::{Run, Table, Verdict};
use trial::{End, Outcome, Server, Trial};

const PLACEMENTS: [&str; 7] = ["retain", "copy", "storage", "nvm", "durable", "durable-0", "remote"];

const MODES: [Mode; 3] = [Mode::Journal, Mode::Ordered, Mode::Writeback];

/// When a case is tried on QEMU's own disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    First,
    Failed,
    Always,
}

struct Request {
    patterns: Vec<String>,
    rounds: u64,
    seed: u64,
    limit: Option<Duration>,
    placement: Option<&'static str>,
    end: Option<End>,
    mode: Option<Mode>,
    worker_kills: u64,
    control: Control,
    json: Option<PathBuf>,
    keep: Option<PathBuf>,
    is_quick: bool,
    is_list: bool,
}

impl Request {
    fn from_command_line() -> Result<Self, String> {
        let mut options = Options::parse(std::env::args().skip(1))?;
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let is_quick = options.flag("quick");
        let one_of = |name: &str, text: Option<String>, words: &[&'static str]| match text {
            None => Ok(None),
            Some(text) => match words.iter().find(|word| **word == text) {
                Some(word) => Ok(Some(*word)),
                None => Err(format!("--{name} is '{text}'; it must be one of {}", words.join(", "))),
            },
        };
        let minutes = options.number("minutes", 0, 0..=100_000)?;
        let request = Self {
            patterns: options.text("cases").unwrap_or_default().split(',').map(str::to_owned).collect(),
            rounds: options.number("rounds", 1, 1..=1_000_000)?,
            seed: options.number("seed", clock.as_secs(), 0..=u64::MAX >> 1)?,
            limit: (minutes > 0).then(|| Duration::from_secs(minutes * 60)),
            placement: one_of("placement", options.text("placement"), &PLACEMENTS)?,
            end: one_of("end", options.text("end"), &["qemu", "both", "reset"])?
                .and_then(|name| [End::Qemu, End::Both, End::Reset].into_iter().find(|end| end.name() == name)),
            mode: one_of("mode", options.text("mode"), &MODES.map(Mode::name))?
                .and_then(|name| MODES.into_iter().find(|mode| mode.name() == name)),
            worker_kills: options.number("worker-kills", 0, 0..=1_000_000)?,
            control: match one_of("control", options.text("control"), &["first", "failed", "always"])? {
                Some("always") => Control::Always,
                Some("failed") => Control::Failed,
                None if is_quick => Control::Failed,
                _ => Control::First,
            },
            json: options.text("json").map(PathBuf::from),
            keep: options.text("keep").map(PathBuf::from),
            is_quick,
            is_list: options.flag("list"),
        };
        options.finish()?;
        Ok(request)
    }

    /// The cases asked for, and whether random ones are.
    fn cases(&self) -> Result<(Vec<Case>, bool), String> {
        let matches = |name: &str, pattern: &str| match pattern.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name.contains(pattern),
        };
        let is_wanted = |name: &str| self.patterns.iter().any(|pattern| matches(name, pattern));
        let cases: Vec<Case> = case::all()
            .into_iter()
            .filter(|case| is_wanted(&case.name) && (!self.is_quick || case.is_quick) && self.has_mode(case))
            .collect();
        let is_random = !self.is_quick && is_wanted("random/");
        if cases.is_empty() && !is_random {
            return Err(format!(
                "--cases {}: there are none of that name in the mode that was asked for; --list names them",
                self.patterns.join(",")
            ));
        }
        Ok((cases, is_random))
    }

    /// Whether a case is tried in the mode that was asked for, if one was.
    fn has_mode(&self, case: &Case) -> bool {
        self.mode.is_none_or(|mode| case.modes.contains(&mode))
    }
}

fn main() -> ExitCode {
    let request = match Request::from_command_line() {
        Ok(request) => request,
        Err(error) => return usage(&error),
    };
    let (cases, is_random) = match request.cases() {
        Ok(cases) => cases,
        Err(error) => return usage(&error),
    };
    if request.is_list {
        cases.iter().for_each(|case| println!("{}", case.name));
        if is_random {
            println!("random/*");
        }
        return ExitCode::SUCCESS;
    }
    match Platform::native() {
        Ok(platform) => println!("guests run on {}; from seed {}", platform.describe(), request.seed),
        Err(error) => {
            eprintln!("variety: {error}");
            return ExitCode::FAILURE;
        }
    }
    let table = run(&request, &cases, is_random);
    println!("\n{table}");
    if let Some(path) = &request.json
        && let Err(error) = std::fs::write(path, table.to_json(request.seed))
    {
        eprintln!("variety: cannot write {}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    if table.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage(error: &str) -> ExitCode {
    eprintln!("variety: {error}");
    ExitCode::from(2)
}

fn run(request: &Request, cases: &[Case], is_random: bool) -> Table {
    let started = Instant::now();
    let everything = case::all();
    let mut table = Table::default();
    for round in 0..request.rounds {
        let seed = request.seed + round;
        let drawn = is_random.then(|| Case::drawn(seed, &everything)).filter(|case| request.has_mode(case));
        for case in cases.iter().chain(&drawn) {
            if request.limit.is_some_and(|limit| started.elapsed() > limit) {
                return table;
            }
            // One that cannot be tried cannot be in the next round either.
            if round > 0 && table.is_impossible(&case.name) {
                continue;
            }
            let run = run_case(request, case, seed, round == 0);
            println!("{}", run.line());
            for detail in &run.details {
                println!("    {detail}");
            }
            table.runs.push(run);
        }
    }
    table
}

fn run_case(request: &Request, case: &Case, seed: u64, is_first: bool) -> Run {
    let started = Instant::now();
    let placement = request.placement.unwrap_or_else(|| {
        // What is held is what this is about.
        let drawn = guest_tools::random::Random::of(seed, case.name.len() as u64).below(11);
        PLACEMENTS[usize::try_from(drawn.saturating_sub(4)).unwrap_or(0)]
    });
    let placement = case.placement_for(placement);
    let keep = request.keep.as_deref();
    let of = |server| Trial::new(case, seed, server, request.end).in_mode(request.mode);
    let trial = of(Server::Amberlog(placement)).killing_workers(request.worker_kills);
    let control = || of(Server::Qemu).run(keep);
    let wants_control = request.control == Control::Always || (request.control == Control::First && is_first);
    let first = wants_control.then(control);
    let impossible = first.as_ref().and_then(|outcome| outcome.cannot.clone());
    let outcome = if impossible.is_some() { Outcome::default() } else { trial.run(keep) };
    let is_good = outcome.faults.is_empty() && outcome.failure.is_none() && outcome.cannot.is_none();
    let first = if is_good || impossible.is_some() { first } else { first.or_else(|| Some(control())) };
    let verdict = Verdict::of(&outcome, first.as_ref());
    let mut details: Vec<String> = outcome.faults.iter().map(|(kind, text)| format!("{kind:?}: {text}")).collect();
    details.extend(outcome.notes);
    details.extend(outcome.failure);
    details.extend(outcome.cannot.clone());
    // What is found on QEMU's own disk is told whatever is found here: who compares the two has to count both.
    if let Some(first) = first {
        let of_control = first.faults.iter().map(|(kind, text)| format!("the control, {kind:?}: {text}"));
        details.extend(of_control.chain(first.failure).chain(first.cannot));
        details.extend(first.notes.iter().map(|note| format!("the control, {note}")));
    }
    Run {
        case: case.name.clone(),
        seed,
        placement,
        mode: trial.mode.name(),
        end: trial.end.name(),
        verdict,
        details,
        acknowledged: outcome.acknowledged,
        worker_kills: outcome.worker_kills,
        seconds: started.elapsed().as_secs_f64(),
    }
}
