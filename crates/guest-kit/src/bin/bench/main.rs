//! `make bench`: what the figures of docs/results/benchmarks.md are measured with.
//!
//! Real guests, one at a time, each on a fresh image: amberlog with placement `retain` and, in the
//! same run, the alternatives that a user has today. Only ratios between runs that were made in
//! turns count; absolute numbers say as much about the machine as about the program. Ends with a
//! table: figure, measured, limit, met.
//!
//! `bench [--quick] [--strict] [--json FILE] [--dir DIR] [--only space,fsync,commit,data-path,nvm,remote,pause,moved,recovered,migration]
//! [--rounds N] [--load NAME]`: `--load` chooses of the loads of stages `nvm` and `remote`. `--quick` makes everything small, and then judges counters only, never time.
//! `--strict` makes a missed figure exit code 1; otherwise a missed figure is a result like any
//! other. `AMBERLOG_BINARY_DIR` names the directory of another build, whose programs then serve the guests: so two builds are measured
//! by one bench.
//!
//! Must never: leave a guest, an image or a tmpfs file behind; print a figure that was not measured.
//!
//! Failure story: a guest or a tool that fails ends its stage with a sentence, the others are measured, and the exit code is 1. What
//! cannot be measured here (a tool that is not installed, a permission) is a row that says so.

#![forbid(unsafe_code)]

mod alternative;
mod beside;
mod figure;
mod fsync;
mod machine;
mod migration;
mod moved;
mod nbd;
mod nvm;
mod options;
mod paced;
mod pause;
mod programs;
mod recovered;
mod remote;
mod space;

use figure::{Figure, Verdict};
use options::{Options, Stage};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Instant;

type Outcome<T> = Result<T, String>;

fn main() -> ExitCode {
    let options = match Options::from_command_line() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("bench: {error}");
            return ExitCode::from(2);
        }
    };
    match bench(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> Outcome<bool> {
    let started = Instant::now();
    eprintln!("preparing what guests boot from");
    guest_kit::assets::Assets::get().map_err(sentence)?;
    let platform = guest_kit::Platform::native().map_err(sentence)?;
    std::fs::create_dir_all(&options.directory)
        .map_err(|error| format!("cannot make {}: {error}", options.directory.display()))?;
    let directory = tempfile::Builder::new()
        .prefix("bench-")
        .tempdir_in(&options.directory)
        .map_err(|error| format!("cannot make a directory in {}: {error}", options.directory.display()))?;
    let machine = machine::Machine::look(directory.path(), platform)?;
    println!("{machine}");

    let mut figures: Vec<Figure> = Vec::new();
    let mut details = serde_json::Map::new();
    let mut failed: Vec<&str> = Vec::new();
    for stage in Stage::ALL {
        if !options.stages.contains(&stage) {
            continue;
        }
        eprintln!("--- {} (load {})", stage.name(), machine::load());
        let measured = match stage {
            Stage::Space => space::measure(options, &machine, directory.path()),
            Stage::Fsync => fsync::measure(options, &machine, directory.path()),
            Stage::Commit => programs::commit_cost(),
            Stage::DataPath => programs::data_path(options, directory.path()),
            Stage::Nvm => nvm::measure(options, &machine, directory.path()),
            Stage::Remote => remote::measure(options, &machine, directory.path()),
            Stage::Pause => pause::measure(options, &machine, directory.path()),
            Stage::Moved => moved::measure(options, &machine, directory.path()),
            Stage::Recovered => recovered::measure(options, &machine, directory.path()),
            Stage::Migration => migration::measure(options, directory.path()),
        };
        match measured {
            Ok((of_stage, detail)) => {
                figures.extend(of_stage);
                details.insert(stage.name().to_owned(), detail);
            }
            // What the other stages measured took hours, and is not lost for one.
            Err(error) => {
                eprintln!("bench: stage {} was not measured: {error}", stage.name());
                failed.push(stage.name());
            }
        }
    }

    println!();
    print!("{}", figure::table(&figures, options.quick));
    let seconds = started.elapsed().as_secs_f64();
    println!("\nThe bench took {seconds:.0} s; load average at its end: {}.", machine::load());
    if options.quick {
        println!("Sizes were small (--quick): times are not judged.");
    }
    if let Some(path) = &options.json {
        let text = json!({
            "schema": 1,
            "quick": options.quick,
            "machine": machine.to_json(),
            "load_at_end": machine::load(),
            "seconds": seconds,
            "failed": failed,
            "figures": figures.iter().map(|figure| figure.to_json(options.quick)).collect::<Vec<_>>(),
            "details": Value::Object(details),
        });
        let bytes = serde_json::to_vec_pretty(&text).map_err(sentence)?;
        std::fs::write(path, bytes).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    if !failed.is_empty() {
        return Err(format!("not measured: {}", failed.join(", ")));
    }
    let missed = figures.iter().any(|figure| figure.verdict(options.quick) == Verdict::Missed);
    Ok(!(options.strict && missed))
}

fn sentence(error: impl std::fmt::Display) -> String {
    error.to_string()
}
