//! `amberlog ssd`: what a block trace does to an SSD, under one flash translation layer or several side by side.
//!
//! Options that the chosen FTL does not use are refused, so that no run is mistaken for another. Several runs
//! (`--compare`) share the processor's cores; each has its own device and reads its own trace. Ctrl-C ends the
//! runs early: what there is so far is printed, marked as interrupted, and the exit code is 1.

mod options;
mod runs;

use super::progress::Progress;
use super::trace::ReadArgs;
use clap::Args;
use io_trace::Layout;
use runs::{Failure, Job};
use ssd_sim::ftl::FtlKind;
use ssd_sim::report::{LabelledReport, figures, html, table};
use std::io::Write;
use std::process::ExitCode;

/// Simulates flash translation layers on block traces.
///
/// Defaults are Table II of the 2010 paper: 262144 blocks of 64 pages of 2 KB, 88 / 263 / 2000 us, and 3 % of extra
/// blocks. docs/ssd.md tells every option's source.
#[derive(Args)]
pub struct SsdArgs {
    /// The FTLs: page, fast, superblock, dftl; several, separated by commas, with --compare
    #[arg(long, value_delimiter = ',', value_name = "FTL", required_unless_present = "compare")]
    pub ftl: Vec<FtlKind>,
    /// A trace, `-` for standard input; repeated with --compare, then as WORKLOAD/MODE=FILE to get Figures 2 to 5
    #[arg(long, required = true, value_name = "[WORKLOAD/MODE=]FILE")]
    pub trace: Vec<String>,
    /// Run every FTL (or those of --ftl) over every trace, side by side
    #[arg(long)]
    pub compare: bool,
    /// Runs at the same time [default: one per core]
    #[arg(long, requires = "compare", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Also write one self-contained page of plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<std::path::PathBuf>,
    #[command(flatten)]
    read: ReadArgs,
    /// Leave out the journal writes of traces labelled with this mode (`all`: of every trace), as if they had been retained
    #[arg(long, value_name = "MODE")]
    pub without_journal: Vec<String>,
    /// Where a trace's disks lie: auto, overlay, stack, stride:BYTES; auto stacks disks of known size
    #[arg(long, default_value = "auto")]
    pub layout: Layout,
    /// Requests that are served before counting begins
    #[arg(long, default_value_t = 0, value_name = "REQUESTS")]
    pub warm_up: u64,
    #[command(flatten)]
    device: options::DeviceArgs,
}

/// Runs `amberlog ssd`.
pub fn run(args: SsdArgs) -> ExitCode {
    match simulate(&args) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => {
            eprintln!("amberlog ssd: interrupted; these are the figures so far");
            ExitCode::from(1)
        }
        Err(failure) => {
            eprintln!("amberlog ssd: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

/// What a `--trace` argument names: workload and mode, where it is labelled, and the file.
fn parse_label(argument: &str) -> (Option<(String, String)>, &str) {
    let is_word =
        |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    // A file whose whole name looks like a label is a file.
    if let Some((label, file)) = argument.split_once('=')
        && !std::path::Path::new(argument).exists()
        && let Some((workload, mode)) = label.split_once('/')
        && is_word(workload)
        && is_word(mode)
    {
        return (Some((workload.to_owned(), mode.to_owned())), file);
    }
    (None, argument)
}

/// A trace's file name; its whole path where two traces have the same name.
fn short_name(file: &str, all: &[String]) -> String {
    let name = |path: &str| std::path::Path::new(path).file_name().map(|n| n.to_string_lossy().into_owned());
    let own = name(file).unwrap_or_else(|| file.to_owned());
    let alike = all.iter().filter(|other| name(other).as_ref() == Some(&own)).count();
    if alike > 1 { file.to_owned() } else { own }
}

/// The runs that the arguments ask for.
fn jobs(args: &SsdArgs) -> Result<Vec<Job>, Failure> {
    let usage = |message: String| Err(Failure::Usage(message));
    let mut ftls = args.ftl.clone();
    if ftls.is_empty() {
        ftls = FtlKind::ALL.to_vec();
    }
    if let Some(twice) = ftls.iter().enumerate().find(|(i, f)| ftls[..*i].contains(f)) {
        return usage(format!("--ftl names {} twice", twice.1.name()));
    }
    if !args.compare && (ftls.len() > 1 || args.trace.len() > 1) {
        return usage("several FTLs or traces need --compare".into());
    }
    if args.trace.len() * ftls.len() > 1 && args.trace.iter().any(|t| parse_label(t).1 == "-") {
        return usage("standard input can be read once only: name one FTL and no other trace with it".into());
    }
    args.device.refuse_unused(&ftls).map_err(Failure::Usage)?;
    let read = args.read.options().map_err(Failure::Usage)?;
    let filter = io_trace::Filter::parse(&args.read.filter).map_err(Failure::Usage)?;
    let mut jobs = Vec::new();
    for argument in &args.trace {
        let (label, file) = parse_label(argument);
        let (workload, mode) = match label {
            Some((workload, mode)) => (workload, Some(mode)),
            None => (short_name(file, &args.trace), None),
        };
        if let Some(mode) = &mode
            && figures::mode_index(mode).is_none()
        {
            let modes = figures::MODES.join(", ");
            return usage(format!(
                "--trace {argument}: {mode} is no journaling mode; there are {modes} (retain is vma)"
            ));
        }
        let without_journal =
            args.without_journal.iter().any(|m| m == "all" || mode.as_ref().is_some_and(|mode| mode == m));
        for &ftl in &ftls {
            let device = args.device.options(ftl).map_err(Failure::Usage)?;
            jobs.push(Job {
                workload: workload.clone(),
                mode: mode.clone(),
                file: file.to_owned(),
                read: read.clone(),
                filter: filter.clone(),
                run: ssd_sim::run::RunOptions {
                    device,
                    layout: args.layout,
                    warm_up_requests: args.warm_up,
                    without_journal,
                },
            });
        }
    }
    if let Some(unknown) =
        args.without_journal.iter().find(|m| *m != "all" && !jobs.iter().any(|j| j.mode.as_ref() == Some(m)))
    {
        return usage(format!("--without-journal {unknown}: no trace is labelled with that mode"));
    }
    Ok(jobs)
}

/// Says on standard error what a reader of the figures should know of the runs: of each trace once, whatever the FTLs.
fn tell(reports: &[LabelledReport]) {
    let mut told: Vec<String> = Vec::new();
    for LabelledReport { trace, report, .. } in reports {
        told.extend(report.trace_tail.as_ref().map(|tail| format!("{trace}: {tail}")));
        if let Some(first) = &report.trace_first_skipped {
            let count = report.trace_units_skipped;
            told.push(format!("{trace}: {count} unreadable lines or frames were skipped, the first: {first}"));
        }
        if report.disks_overlaid {
            told.push(format!(
                "{trace}: it has several disks of unknown size, and they were laid over one another; \
                 say --layout stride:BYTES to keep them apart"
            ));
        }
        if report.lifetime.worn_out {
            let ftl = report.ftl.name();
            told.push(format!("{trace}, {ftl}: the device wore out after {} requests", report.requests));
        }
    }
    for (index, message) in told.iter().enumerate() {
        if !told[..index].contains(message) {
            eprintln!("{message}");
        }
    }
}

/// Does all runs and prints them. `true` when they were interrupted.
fn simulate(args: &SsdArgs) -> Result<bool, Failure> {
    let jobs = jobs(args)?;
    let progress = Progress::new(jobs.iter().map(|job| job.file.as_str())).map_err(Failure::Other)?;
    let threads = match args.threads {
        Some(threads) => usize::from(threads),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let reports = runs::run_all(&jobs, threads.min(jobs.len()), &progress)?;
    progress.finish();
    if reports.len() < jobs.len() {
        eprintln!("amberlog ssd: {} of {} runs were not begun", jobs.len() - reports.len(), jobs.len());
    }
    tell(&reports);
    let lines = figures::lines(&reports);
    if let Some(path) = &args.html {
        std::fs::write(path, html::page(&reports, &lines))
            .map_err(|e| Failure::Other(format!("cannot write {}: {e}", path.display())))?;
    }
    let text = if args.json {
        let text = match (&reports[..], args.compare) {
            ([one], false) => serde_json::to_string_pretty(&one.report),
            _ => serde_json::to_string_pretty(&serde_json::json!({ "schema": 1, "runs": reports, "figures": lines })),
        };
        text.map_err(|e| Failure::Other(e.to_string()))? + "\n"
    } else if let ([one], false) = (&reports[..], args.compare) {
        table::full(&one.report)
    } else {
        format!("{}\n{}", table::side_by_side(&reports), figures::table(&lines))
    };
    if let Err(error) = std::io::stdout().write_all(text.as_bytes())
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        return Err(Failure::Other(format!("cannot print: {error}")));
    }
    Ok(reports.len() < jobs.len() || reports.iter().any(|r| r.report.interrupted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        ssd: SsdArgs,
    }

    fn jobs_of(line: &str) -> Result<Vec<Job>, String> {
        let parsed =
            Line::try_parse_from(std::iter::once("ssd").chain(line.split_whitespace())).map_err(|e| e.to_string())?;
        jobs(&parsed.ssd).map_err(|e| format!("{} {e}", e.exit_code()))
    }

    #[test]
    fn every_option_of_another_ftl_is_a_usage_error() {
        let own = [
            ("page", "--gc-free-blocks 4 --victim cost-benefit"),
            ("fast", "--rw-log-blocks 4 --sw-gap merge-then-append --program-order any"),
            (
                "superblock",
                "--superblock-blocks 4 --update-blocks 2 --gc-free-blocks 4 --pt-cache-entries 9 --hot-cold off --victim greedy --spare-read-us 25",
            ),
            ("dftl", "--cmt-entries 100 --cmt-protected 50 --batch-update off --gc-free-blocks 4 --victim greedy"),
        ];
        for (ftl, options) in own {
            let all = jobs_of(&format!("--ftl {ftl} --trace x {options}"));
            assert!(all.is_ok(), "{ftl}: {:?}", all.err());
            for (other, others) in own {
                for pair in others.split_whitespace().collect::<Vec<_>>().chunks(2) {
                    let line = format!("--ftl {ftl} --trace x {} {}", pair[0], pair[1]);
                    let accepted = options.contains(&format!("{} ", pair[0]));
                    let result = jobs_of(&line);
                    assert_eq!(result.is_ok(), accepted, "{line} ({other}'s): {:?}", result.err());
                    if let Err(message) = result {
                        assert!(message.starts_with("2 ") && message.contains(pair[0]), "{message}");
                    }
                }
            }
        }
        // In a comparison an option of any of the FTLs is used.
        assert_eq!(jobs_of("--compare --trace x --rw-log-blocks 4 --cmt-entries 9").unwrap().len(), 4);
        assert!(jobs_of("--compare --ftl page,dftl --trace x --rw-log-blocks 4").is_err());
    }

    #[test]
    fn contract_options_are_taken() {
        let line = "--trace x --blocks 1000 --pages-per-block 32 --page-size 4096 --read-us 1 --write-us 2 --erase-us 3 \
                    --extra-blocks 50 --precondition random:70 --seed 9 --ftl fast --rw-log-blocks 7 --sw-gap merge-in-flight --json";
        let job = jobs_of(line).unwrap().remove(0);
        let g = job.run.device.geometry;
        assert_eq!((g.blocks, g.pages_per_block, g.page_bytes, g.extra_blocks), (1000, 32, 4096, 50));
        assert_eq!((job.run.device.timing.read_us, job.run.device.timing.erase_us, job.run.device.seed), (1, 3, 9));
    }

    #[test]
    fn impossible_values_are_usage_errors() {
        for line in [
            "--ftl page --trace x --extra-blocks 2",
            "--ftl page --trace x --page-size 1000",
            "--ftl page --trace x --precondition random:101",
            "--ftl page --trace x --precondition half",
            "--ftl page --trace x --blocks 0",
            "--ftl page --trace x --blocks 4294967295",
            "--ftl pages --trace x",
            "--ftl page,page --compare --trace x",
            "--ftl page --trace x --trace y",
            "--ftl page,dftl --trace x",
            "--compare --trace -",
            "--compare --trace w/unjournalled=x",
            "--compare --trace w/vma=x --without-journal journal",
            "--ftl fast --trace x --rw-log-blocks 0",
            "--ftl page --trace x --frob 1",
            "--ftl page",
        ] {
            assert!(jobs_of(line).is_err(), "{line}");
        }
    }

    #[test]
    fn traces_are_labelled() {
        assert_eq!(parse_label("untar/vma=a/b.amber"), (Some(("untar".into(), "vma".into())), "a/b.amber"));
        assert_eq!(parse_label("/tmp/a=b"), (None, "/tmp/a=b"));
        assert_eq!(parse_label("plain"), (None, "plain"));
        let jobs = jobs_of("--compare --ftl page --trace u/journal=a --trace u/vma=a --without-journal vma").unwrap();
        assert_eq!([jobs[0].run.without_journal, jobs[1].run.without_journal], [false, true]);
    }
}
