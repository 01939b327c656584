//! fio in the guest: 4 KB at random places of a file, each made durable before the next.
//!
//! The alternatives take turns, and the ratios of a round are made of runs that lie side by side:
//! other work on the machine then weighs on all of them. What is reported is the median of the
//! rounds' ratios. Latency is that of fsync (fio's `sync`), which is what the application waits for.

use crate::Outcome;
use crate::alternative::{Alternative, Run, Setting, run};
use crate::figure::{Basis, Figure, Limit, median};
use crate::machine::{Machine, load};
use crate::options::Options;
use guest_kit::Reported;
use serde_json::{Value, json};
use std::path::Path;
use test_storage::TestStorage;

const FILE_MIB: u32 = 64;
/// What a flush costs where the machine's own storage does not wait for a medium: a disk of 15,000 rpm takes a seek and half
/// a turn, some 4 ms and 2 ms.
const FLUSH_US: u64 = 5000;
const CONTENDERS: [Alternative; 3] = [Alternative::Retain, Alternative::MemoryJournal, Alternative::FullJournal];

/// What fio measured.
#[derive(Clone, Copy, Debug)]
struct Latency {
    writes_per_second: f64,
    p50_us: f64,
    p99_us: f64,
}

/// Runs the rounds.
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let own = Setting {
        image_mib: options.image_mib(),
        journal_mib: options.journal_mib(),
        memory_mib: 768,
        fio: true,
        flush_us: None,
        content: None,
        model: None,
    };
    let (rounds, mut details) = take_turns(options, options.rounds, &own, machine, directory)?;
    let mut figures = figures(&rounds, machine);
    let waiting = Setting { flush_us: Some(FLUSH_US), ..own.clone() };
    let name = format!("fsync, a flush takes {} ms: IOPS, retain / (a)", FLUSH_US / 1000);
    let limit = Limit::AtLeast(3.0);
    match TestStorage::probe() {
        Ok(()) => {
            println!("\nthe same on storage that takes {FLUSH_US} µs for a flush");
            let (rounds, more) = take_turns(options, options.rounds.min(2), &waiting, machine, directory)?;
            details.extend(more);
            figures.push(
                Figure::new(name, over(&rounds, IOPS_OVER_FULL), "", limit, Basis::Time)
                    .note(notes(&rounds, IOPS_OVER_FULL)),
            );
            let name = format!("fsync, a flush takes {} ms: p99, retain / (c)", FLUSH_US / 1000);
            figures.push(Figure::new(name, over(&rounds, P99_OVER_MEMORY), "", Limit::AtMost(1.0), Basis::Time));
        }
        Err(error) => figures.push(Figure::missing(name, "", limit, error.to_string())),
    }
    Ok((figures, Value::Array(details)))
}

fn take_turns(
    options: &Options,
    count: u64,
    setting: &Setting,
    machine: &Machine,
    directory: &Path,
) -> Outcome<(Vec<[Latency; 3]>, Vec<Value>)> {
    let prepare = format!("guest-tools append --file /mnt/file --mib {FILE_MIB} --sync");
    let work = format!(
        "fio --name=fsync --filename=/mnt/file --rw=randwrite --bs=4k --size={FILE_MIB}M --fsync=1 --ioengine=psync \
         --thread --time_based --runtime={} --randrepeat=1 --output-format=json --output=/tmp/fio",
        options.fio_seconds()
    );
    println!("\n{:6} {:20} {:>9} {:>9} {:>9}", "round", "", "IOPS", "p50 µs", "p99 µs");
    let mut rounds: Vec<[Latency; 3]> = Vec::new();
    let mut details = Vec::new();
    for round in 0..count {
        let mut of_round = [None; 3];
        // Each is first, second and last in its turn.
        for turn in 0..CONTENDERS.len() {
            let index = (turn + usize::try_from(round).unwrap_or(0)) % CONTENDERS.len();
            let contender = CONTENDERS[index];
            eprintln!("fio, round {} of {}: {}", round + 1, count, contender.name());
            let tell = "sed 's/^/mark fio /' /tmp/fio >/dev/ttyS1";
            let result = run(contender, setting, machine, directory, &prepare, &work, tell)?;
            let latency = read(&result.reported)?;
            println!(
                "{:6} {:20} {:>9.0} {:>9.0} {:>9.0}{}",
                round + 1,
                contender.name(),
                latency.writes_per_second,
                latency.p50_us,
                latency.p99_us,
                remark(contender, &result)
            );
            details.push(json!({
                "round": round + 1, "flush_us": setting.flush_us, "alternative": contender.name(), "load": load(),
                "iops": latency.writes_per_second, "fsync_p50_us": latency.p50_us, "fsync_p99_us": latency.p99_us,
                "run": result.to_json(),
            }));
            of_round[index] = Some(latency);
        }
        if let [Some(retain), Some(memory), Some(full)] = of_round {
            rounds.push([retain, memory, full]);
        }
    }
    Ok((rounds, details))
}

type Ratio = fn(&[Latency; 3]) -> f64;
const IOPS_OVER_MEMORY: Ratio = |[retain, memory, _]| retain.writes_per_second / memory.writes_per_second;
const IOPS_OVER_FULL: Ratio = |[retain, _, full]| retain.writes_per_second / full.writes_per_second;
const P99_OVER_MEMORY: Ratio = |[retain, memory, _]| retain.p99_us / memory.p99_us;

fn over(rounds: &[[Latency; 3]], ratio: Ratio) -> f64 {
    median(&rounds.iter().map(ratio).collect::<Vec<_>>())
}

fn notes(rounds: &[[Latency; 3]], ratio: Ratio) -> String {
    let list: Vec<String> = rounds.iter().map(|round| format!("{:.2}", ratio(round))).collect();
    format!("rounds {}", list.join(" "))
}

fn figures(rounds: &[[Latency; 3]], machine: &Machine) -> Vec<Figure> {
    let figure = |name: &str, ratio, limit| {
        Figure::new(name, over(rounds, ratio), "", limit, Basis::Time).note(notes(rounds, ratio))
    };
    let over_full = figure("fsync: IOPS, retain / (a)", IOPS_OVER_FULL, Limit::AtLeast(3.0));
    let over_full = if machine.honours_flush() {
        over_full
    } else {
        let note = format!("{}; the limit is for storage that waits for a medium", notes(rounds, IOPS_OVER_FULL));
        over_full.note(note).not_judged()
    };
    vec![
        figure("fsync: IOPS, retain / (c)", IOPS_OVER_MEMORY, Limit::AtLeast(1.0)),
        figure("fsync: p99, retain / (c)", P99_OVER_MEMORY, Limit::AtMost(1.0)),
        over_full,
    ]
}

/// What amberlog did for it.
fn remark(contender: Alternative, run: &Run) -> String {
    if contender != Alternative::Retain {
        return String::new();
    }
    format!(
        "   {} commits, {} blocks, {} protected, {} faults, {} copied",
        run.counter("transactions"),
        run.counter("blocks_committed"),
        run.counter("pages_protected"),
        run.counter("cow_faults"),
        run.counter("pages_copied"),
    )
}

/// Reads fio's JSON, which came line by line.
fn read(reported: &Reported) -> Outcome<Latency> {
    let text: String =
        reported.marks.iter().filter_map(|mark| mark.strip_prefix("fio ")).flat_map(|line| [line, "\n"]).collect();
    // fio may say something before its JSON.
    let text = text.find('{').map_or("", |start| &text[start..]);
    let fio: Value = serde_json::from_str(text).map_err(|error| format!("fio's output is not JSON: {error}"))?;
    let job = &fio["jobs"][0];
    let number = |value: &Value, name: &str| {
        value.as_f64().filter(|value| *value > 0.0).ok_or_else(|| format!("fio's output has no {name}"))
    };
    let percentile = |name: &str| {
        let value = &job["sync"]["lat_ns"]["percentile"][name];
        number(value, &format!("fsync latency percentile {name}")).map(|ns| ns / 1000.0)
    };
    Ok(Latency {
        writes_per_second: number(&job["write"]["iops"], "writes per second")?,
        p50_us: percentile("50.000000")?,
        p99_us: percentile("99.000000")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_is_read_line_by_line() {
        let lines = [
            "worked 1 2",
            "fio note: something",
            "fio {\"jobs\": [{\"write\": {\"iops\": 120.5},",
            "fio \"sync\": {\"lat_ns\": {\"percentile\": {\"50.000000\": 1000, \"99.000000\": 9000}}}}]}",
        ];
        let mut reported = Reported { marks: lines.map(str::to_owned).to_vec(), ..Reported::default() };
        let latency = read(&reported).unwrap();
        assert!((latency.writes_per_second - 120.5).abs() < 1e-9);
        assert!((latency.p99_us - 9.0).abs() < 1e-9);
        reported.marks.pop();
        assert!(read(&reported).is_err());
    }
}
