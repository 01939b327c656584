//! Rounds of crashes with real guests: each kills someone at a random moment under load, on a
//! random kind of file system, and looks for everything that was acknowledged.
//!
//! `crash-rounds [--rounds N] [--seed N] [--under plain|retain|copy|storage|discard|durable|nvm|remote|any] [--victim NAME] [--worker-kills N] [--quick]`:
//! `plain` is QEMU's own disks and e2fsck's replay; the others are placements of `amberlog run`, with
//! plenty of memory or hardly any; `any` is one of retain, copy and storage, drawn; `nvm` has a region of 16 MiB in memory; `remote` has a journal server of its own, which nobody kills; `durable` is one of retain and copy with `durable-within=` 0,
//! 1 or 5. Under `discard` a death costs the file system, so only the guest is judged while it runs. With `--worker-kills` the process that serves the guest
//! is killed so many times in each round, at random moments under load, and the guest is to notice nothing; `--quick` is two rounds of ten. Where amberlog itself was killed, its work is finished by
//! `recover --area` or by the next `run`, which are killed at that as well. A failure prints the seed
//! that repeats its choices, and keeps image and area. Exit code 1 if any round failed.

#![forbid(unsafe_code)]

mod finish;
mod round;
mod victim;
mod workers;

use guest_tools::options::Options;
use round::Round;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;
use victim::Victim;

struct Request {
    rounds: u64,
    seed: u64,
    under: String,
    victim: Option<Victim>,
    worker_kills: u64,
}

impl Request {
    fn from_command_line() -> Result<Self, String> {
        let mut options = Options::parse(std::env::args().skip(1))?;
        let is_quick = options.flag("quick");
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let request = Self {
            rounds: options.number("rounds", if is_quick { 2 } else { 5 }, 1..=1_000_000)?,
            seed: options.number("seed", clock.as_secs(), 0..=u64::MAX)?,
            under: options.text("under").unwrap_or_else(|| "plain".to_owned()),
            victim: options.text("victim").map(|name| Victim::parse(&name)).transpose()?,
            worker_kills: options.number("worker-kills", if is_quick { 10 } else { 0 }, 0..=1_000_000)?,
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
}

fn main() -> ExitCode {
    let request = match Request::from_command_line() {
        Ok(request) => request,
        Err(error) => {
            eprintln!("crash-rounds: {error}");
            return ExitCode::from(2);
        }
    };
    let (rounds, under) = (request.rounds, request.under.as_str());
    println!("{rounds} rounds under {under}, from seed {}", request.seed);
    let mut failed = Vec::new();
    let mut by_victim: BTreeMap<Victim, u64> = BTreeMap::new();
    let (mut acknowledged, mut finished_by_another, mut cut_off, mut worker_kills) = (0, 0, 0, 0);
    for number in 0..rounds {
        let round = Round::new(request.seed.wrapping_add(number), under, request.victim, request.worker_kills);
        let started = Instant::now();
        let outcome = round.run();
        println!(
            "{}/{rounds} {}: {}: {} acknowledged, {} recoveries cut off; {:.0} s",
            number + 1,
            if outcome.faults.is_empty() { "good" } else { "FAILED" },
            round.describe(),
            outcome.acknowledged,
            outcome.recoveries_cut_off,
            started.elapsed().as_secs_f64(),
        );
        for fault in &outcome.faults {
            println!("    {fault}");
        }
        *by_victim.entry(round.victim).or_default() += 1;
        acknowledged += outcome.acknowledged;
        finished_by_another += u64::from(outcome.is_finished_by_another);
        cut_off += outcome.recoveries_cut_off;
        worker_kills += outcome.worker_kills;
        if !outcome.faults.is_empty() {
            failed.push(round);
        }
    }
    let by_victim: Vec<String> = by_victim.iter().map(|(victim, count)| format!("{} {count}", victim.name())).collect();
    println!("killed: {}", by_victim.join(", "));
    println!(
        "{acknowledged} acknowledged; {finished_by_another} rounds finished by another process, {cut_off} of whose \
         recoveries were cut off"
    );
    if worker_kills > 0 {
        println!("workers killed under their guests: {worker_kills}");
    }
    println!("{} rounds good, {} failed", rounds - failed.len() as u64, failed.len());
    for round in &failed {
        println!("again: crash-rounds --rounds 1 {}", round.options());
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
