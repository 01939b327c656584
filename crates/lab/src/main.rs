//! `amberlog-lab`: the papers' experiments, and what they measure with: block traces, simulated SSDs, modelled disks.
//! `amberlog lab`, `ssd`, `trace` and `disk-model` start it.

#![forbid(unsafe_code)]

mod commands;

use clap::{CommandFactory, Parser, Subcommand};
use command_line::documents::DocumentsArgs;
use commands::{disk_model, ssd, trace};
use lab::catalogue::{self, Experiment, Extent, Kind};
use lab::cell::Mode;
use lab::clocks;
use lab::measured::Parameters;
use lab::merge::Merged;
use lab::only::{self, Guests, Only};
use lab::paper::Paper;
use lab::run::{RunOptions, duration};
use lab::shootout::ShootOut;
use lab::workload::Workload;
use lab::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(
    name = "amberlog-lab",
    version = env!("AMBERLOG_LAB_VERSION"),
    about = "The papers' experiments on real guests, block traces, simulated SSDs, modelled disks"
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the experiments, what they are, and how long each takes.
    List(Extents),
    /// Print an experiment's description: what the paper did, what we do, what differs; one of your own begins as a copy.
    Show {
        /// Its name.
        id: String,
    },
    /// Run experiments: by name, all whose names begin so (spe2012-*), or one of your own, described in a file (FILE.md).
    Run(RunArgs),
    /// Make one page, DIR/index.html, of the results in DIR.
    Report {
        /// A directory that `run` wrote to.
        directory: PathBuf,
    },
    /// Print the papers' main figures beside those of the results in DIR, as a table in Markdown: the one of docs/papers.md.
    Table {
        /// A directory that `run` wrote to.
        directory: PathBuf,
    },
    /// Make the results.json of each experiment in DIR anew from its raw results.
    Summarise {
        /// A directory that `run` wrote to.
        directory: PathBuf,
    },
    /// Put newer results among kept ones: each experiment's place is its newest results'; earlier ones with cells that were not
    /// measured anew are kept under a name of their own.
    Merge {
        /// A directory that `run` wrote to.
        from: PathBuf,
        /// The directory of what is kept.
        into: PathBuf,
        /// What stands behind the names of earlier results that are kept.
        #[arg(long, default_value = "earlier")]
        keep_as: String,
        /// Join what was measured in the same way by other programs or on other machines, too: what compares two of them is not judged.
        #[arg(long)]
        any_source: bool,
    },
    /// Hold amberlog's placements against file systems, journals and caches of others: latency, bytes to each medium, processor
    /// time, and what survives which death. The same command goes on where it stopped.
    ShootOut(ShootOutArgs),
    /// Serve a modelled disk that several VMs share, for experiments.
    DiskModel(disk_model::DiskModelArgs),
    /// Simulate what block traces do to an SSD under page-mapped, FAST, Superblock or DFTL translation.
    Ssd(Box<ssd::SsdArgs>),
    /// Summarise and convert block traces.
    Trace(trace::TraceArgs),
    /// Write manual pages and completions into a directory: for packages.
    #[command(hide = true)]
    Documents(DocumentsArgs),
}

#[derive(clap::Args)]
struct Extents {
    /// Small and short, for CI: one iteration, one guest; counters mean something, times do not.
    #[arg(long)]
    quick: bool,
    /// Sizes of workloads, as a part of the paper's [default: 0.1; of a paper: 1; quick: 0.02].
    #[arg(long, value_parser = scale)]
    scale: Option<f64>,
    /// How often each cell is measured [default: 3, or what the experiment says; quick: 1; of a paper: 5, with more than four
    /// guests 3, of records 120].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,
    /// All experiments of a paper, or those that are named, at its own sizes and clocks unless --scale says less.
    #[arg(long, value_parser = ["spe2012", "ssd2010", "rj2005", "njs2018"])]
    paper: Option<String>,
    /// Seconds for a second of the modelled disk [default: 1, or as many as the clocks of a smaller scale need; with emulated
    /// guests 5, which keeps their processors as fast beside it as real ones would be].
    #[arg(long)]
    time_scale: Option<f64>,
    /// Clocks (commit interval, expiry, patience) and constants (caches, memory), as a part of what they are; 1 leaves them as
    /// they are [default: as long as a load of this scale on this drive is beside the paper's].
    #[arg(long)]
    clocks: Option<f64>,
    /// At most so many guests at once (8); a list (1,4; of one number '4,') is these numbers alone.
    #[arg(long, default_value = "8")]
    guests: Guests,
    /// Only cells in these modes: the others stay to be measured, by another run into the same directory.
    #[arg(long, value_delimiter = ',', value_parser = only::mode)]
    modes: Vec<Mode>,
    /// Only cells of these workloads.
    #[arg(long, value_delimiter = ',', value_parser = only::workload)]
    workloads: Vec<Workload>,
    /// Only cells on these modelled disks.
    #[arg(long, value_delimiter = ',', value_parser = only::disk)]
    disks: Vec<String>,
}

#[derive(clap::Args)]
struct RunArgs {
    /// Names of experiments, or files with descriptions.
    #[arg(required_unless_present = "paper")]
    ids: Vec<String>,
    #[command(flatten)]
    extents: Extents,
    /// Where results go; a run goes on where an earlier one into the same directory was interrupted.
    #[arg(long, default_value = "lab-results")]
    out: PathBuf,
    /// Where images are made [default: where temporary files go].
    #[arg(long)]
    images: Option<PathBuf>,
    /// Seconds that a cell's load may take before its guests are killed [default: many times what is expected].
    #[arg(long)]
    limit: Option<u64>,
    /// Memory of each guest, in MiB: the paper's 128, and what today's kernel and our initramfs take more.
    #[arg(long, default_value_t = 192)]
    guest_mib: u32,
    /// ext3 (as the paper) or ext4; today's kernel mounts both as ext4.
    #[arg(long, default_value = "ext3", value_parser = ["ext3", "ext4"])]
    file_system: String,
    /// From which everything random follows.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use results again that another program or machine measured, too: what compares two of them is not judged.
    #[arg(long)]
    any_source: bool,
}

#[derive(clap::Args)]
struct ShootOutArgs {
    /// Small and short, for CI: that everything works, and what survives; times say nothing.
    #[arg(long)]
    quick: bool,
    /// Where results and the page go.
    #[arg(long, default_value = "shoot-out")]
    out: PathBuf,
    /// Where images are made: on the storage that is to be measured [default: where temporary files go].
    #[arg(long)]
    images: Option<PathBuf>,
    /// How often each cell is measured [default: 5; quick: 1].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,
    /// Only these contenders, by name.
    #[arg(long, value_delimiter = ',')]
    contenders: Vec<String>,
    /// Only these loads: fsync, sqlite, sqlite_wal, postgresql, rocksdb, varmail, append, overwrite, untar, postmark.
    #[arg(long, value_delimiter = ',')]
    loads: Vec<String>,
    /// How often each load is run on end, within one measurement: a number for all, LOAD=NUMBER for one [default: 1]. Who is durable by age shows
    /// what that costs in loads of three ages and more.
    #[arg(long, value_delimiter = ',')]
    rounds: Vec<String>,
    /// Measure loads only: kill nobody.
    #[arg(long)]
    no_deaths: bool,
    /// What a flush of the medium takes at least, in µs: a SATA SSD's by default; 0 leaves it to the storage below.
    #[arg(long, default_value_t = 2000)]
    flush_us: u64,
    /// Use cells again that another program or machine measured, too.
    #[arg(long)]
    any_source: bool,
}

fn main() -> ExitCode {
    command_line::logging::start();
    let outcome = match CommandLine::parse().command {
        Command::List(extents) => list(&extents),
        Command::Show { id } => catalogue::text(&id).map(|text| {
            print!("{text}");
            ExitCode::SUCCESS
        }),
        Command::Run(args) => run(args),
        Command::Report { directory } => report(&directory),
        Command::Table { directory } => table(&directory),
        Command::Summarise { directory } => lab::run::summarise(&directory).map(|()| ExitCode::SUCCESS),
        Command::Merge { from, into, keep_as, any_source } => merge(&from, &into, &keep_as, any_source),
        Command::ShootOut(args) => shoot_out(args),
        Command::DiskModel(args) => return disk_model::run(args),
        Command::Ssd(args) => return ssd::run(*args),
        Command::Trace(args) => return trace::run(args),
        Command::Documents(args) => match args.write(CommandLine::command(), &[]) {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) => {
                eprintln!("amberlog lab: writing manual pages: {error}");
                return ExitCode::FAILURE;
            }
        },
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("amberlog lab: {error}");
            ExitCode::from(match error {
                Error::Unknown(_) | Error::NoCell { .. } | Error::NotOfShootOut(_) | Error::Description { .. } => 2,
                Error::NotYet { .. }
                | Error::Damaged { .. }
                | Error::OtherSource { .. }
                | Error::OtherParameters { .. }
                | Error::OtherConditions { .. } => 3,
                _ => 1,
            })
        }
    }
}

/// What is run, at what pace and by which clocks.
struct Chosen {
    extent: Extent,
    /// Sizes of workloads, as a part of the papers'.
    scale: f64,
    time_scale: f64,
    clocks: f64,
    /// Caches, memory and what may be dirty, as a part of what they are.
    constants: f64,
    platform: String,
}

/// The same of loads that are the processor's: a native one is a dozen times as fast.
const NATIVE_PROCESSOR_PACE: f64 = 0.08;
/// Of the time that loads take where guests are emulated and the drive is five times slower: what native guests take of their own, and
/// what each second of the drive adds.
const NATIVE_PACE: f64 = 0.15;
const PACE_OF_A_SECOND: f64 = 0.2;

/// A part of the papers' sizes.
fn scale(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|scale| (0.001..=100.0).contains(scale));
    number.ok_or_else(|| format!("a scale is a number from 0.001 to 100, not '{text}'"))
}

fn chosen(extents: &Extents, platform: String) -> Result<Chosen> {
    let is_native = platform.starts_with("kvm");
    let usual = match (extents.quick, extents.paper.is_some()) {
        (true, _) => 0.02,
        (false, true) => 1.0,
        (false, false) => 0.1,
    };
    let scale = extents.scale.unwrap_or(usual);
    let slow = if is_native && !extents.quick { 1.0 } else { 5.0 };
    let time_scale = extents
        .time_scale
        .unwrap_or_else(|| if extents.quick { slow } else { slow.max(clocks::time_scale_for(scale)) });
    // Who says what part clocks have says so of constants too: those of the sizes, or, with 1, none. What is not said is declared.
    let (clocks, constants) = match extents.clocks.map(|clocks| clocks.clamp(0.01, 1.0)) {
        _ if scale >= 1.0 => (extents.clocks.unwrap_or(1.0).clamp(0.01, 1.0), 1.0),
        Some(clocks) => (clocks, if clocks == 1.0 { 1.0 } else { scale }),
        None if extents.quick => (1.0, 1.0),
        None => (clocks::declared(scale, time_scale)?, scale),
    };
    let extent = Extent {
        processor_pace: if is_native { NATIVE_PROCESSOR_PACE } else { 1.0 },
        quick: extents.quick,
        iterations: extents.iterations.map(|iterations| iterations.max(1)),
        guests_max: extents.guests.max(),
        only: Only {
            modes: extents.modes.clone(),
            workloads: extents.workloads.clone(),
            disks: extents.disks.clone(),
            guests: extents.guests.only().to_vec(),
        },
        is_of_paper: extents.paper.is_some() || scale >= 1.0,
        pace: (if is_native { NATIVE_PACE } else { 0.8 })
            + PACE_OF_A_SECOND * time_scale * if is_native { 1.0 } else { 0.2 },
        recordings: lab::flash::recordings(),
    };
    Ok(Chosen { extent, scale, time_scale, clocks, constants, platform })
}

/// The experiments of a paper, or all.
fn of_paper(paper: Option<&str>) -> Result<Vec<Experiment>> {
    let mut experiments = catalogue::all()?;
    if let Some(paper) = paper {
        experiments.retain(|experiment| Paper::of(&experiment.id).prefix() == Some(paper));
    }
    Ok(experiments)
}

fn list(extents: &Extents) -> Result<ExitCode> {
    // What there is can be seen where no guest can be run.
    let platform = lab::machine::platform()
        .unwrap_or_else(|why| format!("as if guests were emulated: there is no way to run them here: {why}"));
    let Chosen { extent, scale, time_scale, clocks, constants, platform } = chosen(extents, platform)?;
    let parameters = Parameters { quick: extent.quick, scale, time_scale, clocks, platform, ..Parameters::unnamed() }
        .with_constants(constants);
    let experiments = of_paper(extents.paper.as_deref())?;
    for experiment in &experiments {
        let Experiment { id, title, kind, .. } = experiment;
        if *kind == Kind::Missing {
            println!("{id:16} {:>8}  {title}; {}", "-", experiment.needs);
        } else if !experiment.cells(&extent).is_empty() {
            println!("{id:16} {:>8}  {title}", duration(experiment.estimate_seconds(&extent, &parameters)));
        }
    }
    let all = duration(catalogue::estimate_all_seconds(&experiments, &extent, &parameters));
    println!(
        "{:16} {all:>8}  roughly, on two processors ({}); what several need is measured once",
        "all", parameters.platform
    );
    println!("{:16} {:>8}  {}", "", "", parameters.scale_in_words());
    Ok(ExitCode::SUCCESS)
}

fn run(args: RunArgs) -> Result<ExitCode> {
    let Chosen { extent, scale, time_scale, clocks, constants, platform } =
        chosen(&args.extents, lab::machine::platform()?)?;
    let mut experiments = catalogue::select(&args.ids)?;
    // Who names some of a paper wants those.
    if let Some(paper) = args.extents.paper.as_ref().filter(|_| args.ids.is_empty()) {
        experiments.extend(of_paper(Some(paper))?.into_iter().filter(|experiment| experiment.kind != Kind::Missing));
    }
    let parameters = Parameters {
        quick: extent.quick,
        scale,
        time_scale,
        guest_mib: args.guest_mib,
        file_system: args.file_system,
        seed: args.seed,
        clocks,
        constants: None,
        memory_mib: None,
        dirty_percent: None,
        images: lab::machine::place(&args.images.clone().unwrap_or_else(std::env::temp_dir)),
        platform,
    }
    .with_constants(constants);
    eprintln!("{}; guests: {}", parameters.scale_in_words(), parameters.platform);
    let command = format!(
        "{}--scale {}{} --guests {} --time-scale {}{}{} --guest-mib {} --file-system {} --seed {}{}",
        if extent.quick { "--quick " } else { "" },
        scale,
        extent.iterations.map(|iterations| format!(" --iterations {iterations}")).unwrap_or_default(),
        args.extents.guests,
        parameters.time_scale,
        args.extents.clocks.map(|clocks| format!(" --clocks {clocks}")).unwrap_or_default(),
        extent.only.options(),
        parameters.guest_mib,
        parameters.file_system,
        parameters.seed,
        args.images.as_ref().map(|images| format!(" --images {}", images.display())).unwrap_or_default()
    );
    let limit = args.limit.map(Duration::from_secs);
    let options = RunOptions {
        out: args.out,
        images: args.images,
        limit,
        extent,
        parameters,
        takes_any_source: args.any_source,
        command,
    };
    end_by_signals()?;
    let failed = lab::run::run(&experiments, &options)?;
    println!("results are in {}; 'amberlog lab report {0}' makes a page of them", options.out.display());
    if failed > 0 {
        eprintln!("amberlog lab: {failed} cells failed; the same command runs them again");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// The first SIGTERM or SIGINT kills all guests and lets the run end in order, without anything left of it but its results; a
/// second one ends it at once.
fn end_by_signals() -> Result<()> {
    let told = |error: std::io::Error| Error::Told(format!("signals cannot be watched for: {error}"));
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(told)?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for signal in signals.forever() {
                if guest_kit::interrupt::is_requested() {
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
                eprintln!("amberlog lab: ending");
                guest_kit::interrupt::request();
            }
        })
        .map(drop)
        .map_err(told)
}

fn shoot_out(args: ShootOutArgs) -> Result<ExitCode> {
    end_by_signals()?;
    let failed = lab::shootout::run(&ShootOut {
        out: args.out,
        images: args.images,
        quick: args.quick,
        iterations: args.iterations.unwrap_or(if args.quick { 1 } else { 5 }),
        contenders: args.contenders,
        loads: args.loads,
        rounds: args.rounds,
        has_deaths: !args.no_deaths,
        flush_us: args.flush_us,
        takes_any_source: args.any_source,
    })?;
    if failed > 0 {
        eprintln!("amberlog lab: {failed} cells failed; the same command runs them again");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn report(directory: &std::path::Path) -> Result<ExitCode> {
    let path = lab::report::write(directory, &catalogue::all_in(directory)?)?;
    println!("{}", path.display());
    Ok(ExitCode::SUCCESS)
}

fn merge(from: &std::path::Path, into: &std::path::Path, keep_as: &str, any_source: bool) -> Result<ExitCode> {
    for (id, merged) in lab::merge::merge(from, into, keep_as, any_source)? {
        match merged {
            Merged::New => println!("{id}: new"),
            Merged::Joined => println!("{id}: joined with what was measured in the same way"),
            Merged::Replaced => println!("{id}: replaced"),
            Merged::Kept(name) => println!("{id}: replaced; what was there is {name}"),
            Merged::Nothing => println!("{id}: as it was, since nothing of it was measured"),
        }
    }
    println!("'amberlog lab summarise {}' judges them", into.display());
    Ok(ExitCode::SUCCESS)
}

fn table(directory: &std::path::Path) -> Result<ExitCode> {
    let results = lab::results::read_all(directory)?;
    print!("{}", lab::headline::table(&results, &catalogue::all_in(directory)?));
    Ok(ExitCode::SUCCESS)
}
