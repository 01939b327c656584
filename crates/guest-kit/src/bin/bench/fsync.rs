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

const FILE_MIB: u32 = 64;
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
    let setting =
        Setting { image_mib: options.image_mib(), journal_mib: options.journal_mib(), memory_mib: 768, fio: true };
    let prepare = format!("guest-tools append --file /mnt/file --mib {FILE_MIB} --sync");
    let work = format!(
        "fio --name=fsync --filename=/mnt/file --rw=randwrite --bs=4k --size={FILE_MIB}M --fsync=1 --ioengine=psync \
         --thread --time_based --runtime={} --randrepeat=1 --output-format=json --output=/tmp/fio",
        options.fio_seconds()
    );
    println!("\n{:6} {:20} {:>9} {:>9} {:>9}", "round", "", "IOPS", "p50 µs", "p99 µs");
    let mut rounds: Vec<[Latency; 3]> = Vec::new();
    let mut details = Vec::new();
    for round in 0..options.rounds {
        let mut of_round = [None; 3];
        // Each is first, second and last in its turn.
        for turn in 0..CONTENDERS.len() {
            let index = (turn + usize::try_from(round).unwrap_or(0)) % CONTENDERS.len();
            let contender = CONTENDERS[index];
            eprintln!("fio, round {} of {}: {}", round + 1, options.rounds, contender.name());
            let tell = "sed 's/^/mark fio /' /tmp/fio >/dev/ttyS1";
            let result = run(contender, &setting, machine, directory, &prepare, &work, tell)?;
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
                "round": round + 1, "alternative": contender.name(), "load": load(),
                "iops": latency.writes_per_second, "fsync_p50_us": latency.p50_us, "fsync_p99_us": latency.p99_us,
                "run": result.to_json(),
            }));
            of_round[index] = Some(latency);
        }
        if let [Some(retain), Some(memory), Some(full)] = of_round {
            rounds.push([retain, memory, full]);
        }
    }
    Ok((figures(&rounds, machine), Value::Array(details)))
}

fn figures(rounds: &[[Latency; 3]], machine: &Machine) -> Vec<Figure> {
    let over = |ratio: &dyn Fn(&[Latency; 3]) -> f64| median(&rounds.iter().map(ratio).collect::<Vec<_>>());
    let rounds_note = |index: usize| {
        let list: Vec<String> = rounds
            .iter()
            .map(|round| format!("{:.2}", round[0].writes_per_second / round[index].writes_per_second))
            .collect();
        format!("rounds {}", list.join(" "))
    };
    let over_full = Figure::new(
        "fsync: IOPS, retain / (a)",
        over(&|[retain, _, full]| retain.writes_per_second / full.writes_per_second),
        "",
        Limit::AtLeast(3.0),
        Basis::Time,
    );
    let over_full = if machine.honours_flush() {
        over_full.note(rounds_note(2))
    } else {
        over_full.note(format!("{}; the limit is for storage that waits for a medium", rounds_note(2))).not_judged()
    };
    vec![
        Figure::new(
            "fsync: IOPS, retain / (c)",
            over(&|[retain, memory, _]| retain.writes_per_second / memory.writes_per_second),
            "",
            Limit::AtLeast(1.0),
            Basis::Time,
        )
        .note(rounds_note(1)),
        Figure::new(
            "fsync: p99, retain / (c)",
            over(&|[retain, memory, _]| retain.p99_us / memory.p99_us),
            "",
            Limit::AtMost(1.0),
            Basis::Time,
        )
        .note(format!(
            "rounds {}",
            rounds
                .iter()
                .map(|[retain, memory, _]| format!("{:.2}", retain.p99_us / memory.p99_us))
                .collect::<Vec<_>>()
                .join(" ")
        )),
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
