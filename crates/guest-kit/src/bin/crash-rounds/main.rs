//! Rounds of crashes with real guests: each kills someone at a random moment under load, on a
//! random kind of file system, and looks for everything that was acknowledged.
//!
//! `crash-rounds [--rounds N] [--hours N] [--seed N] [--under plain|retain|copy|storage|discard|durable|nvm|remote|any] [--victim NAME] [--worker-kills N] [--quick]
//! [--memory-stress [all|NAME,NAME]] [--log FILE]`:
//! `plain` is QEMU's own disks and e2fsck's replay; the others are placements of `amberlog run`, with
//! plenty of memory or hardly any; `any` is one of retain, copy and storage, drawn; `nvm` has a region of 16 MiB in memory; `remote` has a journal server of its own, which nobody kills; `durable` is one of retain and copy with `durable-within=` 0,
//! 1 or 5. Under `discard` a death costs the file system, so only the guest is judged while it runs. With `--worker-kills` the process that serves the guest
//! is killed so many times in each round, at random moments under load, and the guest is to notice nothing; `--quick` is two rounds of ten. Where amberlog itself was killed, its work is finished by
//! `recover --area` or by the next `run`, which are killed at that as well. While it runs the guest reads back what it wrote. A failure prints the seed
//! that repeats its choices, and keeps image and area. Exit code 1 if any round failed, or if they were interrupted.
//!
//! With `--memory-stress` the host's memory management works against the guests while they run, die and are recovered (`stress/pressure.rs` has the kinds): most of it
//! needs root, what is not to be had is named, and the host is as it was afterwards. With `--hours` there are rounds until so many hours of them are over. With
//! `--log` each round is noted in a file, and the same command goes on where it was, its rounds and hours with it.

#![forbid(unsafe_code)]

mod finish;
mod history;
mod round;
mod stress;
mod victim;
mod workers;

use guest_kit::{Platform, interrupt};
use guest_tools::options::Options;
use history::History;
use round::{Outcome, Round};
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use stress::Stress;
use victim::Victim;

struct Request {
    rounds: u64,
    hours: Option<u64>,
    seed: Option<u64>,
    under: String,
    victim: Option<Victim>,
    worker_kills: u64,
    memory_stress: Option<String>,
    log: Option<PathBuf>,
}

impl Request {
    fn from_command_line() -> Result<Self, String> {
        let mut options = Options::parse(std::env::args().skip(1))?;
        let is_quick = options.flag("quick");
        let hours = Some(options.number("hours", 0, 0..=100_000)?).filter(|hours| *hours > 0);
        let rounds = match hours {
            Some(_) => u64::MAX,
            None if is_quick => 2,
            None => 5,
        };
        let seed = options.number("seed", u64::MAX, 0..=u64::MAX)?;
        let request = Self {
            rounds: options.number("rounds", rounds, 1..=1_000_000)?,
            hours,
            seed: Some(seed).filter(|seed| *seed < u64::MAX),
            under: options.text("under").unwrap_or_else(|| "plain".to_owned()),
            victim: options.text("victim").map(|name| Victim::parse(&name)).transpose()?,
            worker_kills: options.number("worker-kills", if is_quick { 10 } else { 0 }, 0..=1_000_000)?,
            memory_stress: options.text("memory-stress").map(|kinds| match kinds.as_str() {
                "" => "all".to_owned(),
                _ => kinds,
            }),
            log: options.text("log").map(PathBuf::from),
        };
        options.finish()?;
        if request.under == "plain" && request.worker_kills > 0 {
            return Err("--worker-kills needs amberlog: --under any".to_owned());
        }
        if let Some(victim) = request.victim
            && !Victim::possible(request.under == "plain").contains(&victim)
        {
            return Err(format!("--victim {} needs amberlog: --under retain", victim.name()));
        }
        Ok(request)
    }

    /// What rounds that are counted together have in common.
    fn options(&self) -> String {
        let victim = self.victim.map(|victim| format!(" --victim {}", victim.name())).unwrap_or_default();
        let kills = match self.worker_kills {
            0 => String::new(),
            kills => format!(" --worker-kills {kills}"),
        };
        format!("--under {}{victim}{kills}{}", self.under, self.stress_option())
    }

    fn stress_option(&self) -> String {
        self.memory_stress.as_ref().map(|kinds| format!(" --memory-stress {kinds}")).unwrap_or_default()
    }

    /// Rounds until there are enough of them, or the end is asked for.
    fn run(&self) -> Result<ExitCode, String> {
        let options = self.options();
        let mut history = self.log.as_ref().map(|path| History::open(path, &options)).transpose()?.unwrap_or_default();
        let unsaid = unix_seconds();
        let first = history.next_seed(self.seed, unsaid)?;
        end_by_signals()?;
        let of = if self.rounds == u64::MAX { String::new() } else { format!("/{}", self.rounds) };
        let left = self.rounds.saturating_sub(history.rounds);
        match (self.hours, history.rounds) {
            (Some(hours), done) => println!("{hours} hours of rounds {options}, {done} were before, from seed {first}"),
            (None, 0) => println!("{left} rounds under {}, from seed {first}", self.under),
            (None, done) => println!("{left} more rounds {options}, {done} were before, from seed {first}"),
        }
        // Nothing is changed for rounds that have been.
        let is_over = !history.goes_on(self.rounds, self.hours);
        if !is_over {
            let platform = Platform::native().map_err(|error| error.to_string())?;
            println!("guests run on {}", platform.describe());
        }
        let kinds = self.memory_stress.as_ref().filter(|_| !is_over);
        let stress = kinds.map(|kinds| Stress::start(kinds, first)).transpose()?;
        stress.iter().flat_map(Stress::describe).for_each(|line| println!("{line}"));
        while history.goes_on(self.rounds, self.hours) && !interrupt::is_requested() {
            let seed = history.next_seed(self.seed, unsaid)?;
            let round = Round::new(seed, &self.under, self.victim, self.worker_kills);
            let (started, began) = (Instant::now(), unix_seconds());
            let outcome = round.run(stress.as_ref());
            if interrupt::is_requested() {
                // What it came to says nothing.
                break;
            }
            let seconds = started.elapsed().as_secs_f64();
            println!(
                "{}{of} {}: {}: {} acknowledged, {} read back, {} recoveries cut off; {seconds:.0} s",
                history.rounds + 1,
                if outcome.faults.is_empty() { "good" } else { "FAILED" },
                round.describe(),
                outcome.acknowledged,
                outcome.read_back,
                outcome.recoveries_cut_off,
            );
            for line in outcome.faults.iter().chain(&outcome.stress.failed) {
                println!("    {line}");
            }
            let mut line = noted(&round, &outcome);
            line["options"] = options.as_str().into();
            line["again"] = format!("{}{}", round.options(), self.stress_option()).into();
            line["seconds"] = seconds.into();
            line["began"] = began.into();
            if let Some(stress) = &stress {
                line["available"] = stress.available().clone();
                line["huge_pages"] = (stress.directory().is_some() && round.is_in_huge_pages()).into();
            }
            history.add(&line)?;
        }
        // The host is as it was before it is said how it went.
        drop(stress);
        history.summary().iter().for_each(|line| println!("{line}"));
        if interrupt::is_requested() {
            let how = if self.log.is_some() { "the same command goes on" } else { "with --log FILE it could go on" };
            println!("interrupted; {how}");
            return Ok(ExitCode::FAILURE);
        }
        Ok(if history.good == history.rounds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// What a round came to, for the file of all.
fn noted(round: &Round, outcome: &Outcome) -> Value {
    json!({
        "seed": round.seed,
        "round": round.describe(),
        "victim": round.victim.name(),
        "on": Platform::native().map(Platform::describe).unwrap_or_default(),
        "acknowledged": outcome.acknowledged,
        "read_back": outcome.read_back,
        "finished_by_another": u64::from(outcome.is_finished_by_another),
        "recoveries_cut_off": outcome.recoveries_cut_off,
        "worker_kills": outcome.worker_kills,
        "stress": outcome.stress.counts,
        "stress_failed": outcome.stress.failed,
        "faults": outcome.faults,
    })
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The first SIGTERM or SIGINT kills the guest, and the rounds end in order; a second one ends them at once.
fn end_by_signals() -> Result<(), String> {
    let told = |error: std::io::Error| format!("signals cannot be watched for: {error}");
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(told)?;
    let watch = move || {
        for signal in signals.forever() {
            if interrupt::is_requested() {
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
            eprintln!("crash-rounds: ending");
            interrupt::request();
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map(drop).map_err(told)
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    if words.next().is_some_and(|word| word == stress::COMMAND) {
        return match stress::run(words) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("crash-rounds {}: {error}", stress::COMMAND);
                ExitCode::FAILURE
            }
        };
    }
    match Request::from_command_line().and_then(|request| request.run()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("crash-rounds: {error}");
            ExitCode::from(2)
        }
    }
}
