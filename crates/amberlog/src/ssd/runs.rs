//! Doing the runs: on several threads, under a progress bar, until the end or Ctrl-C.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use io_trace::{Filter, Filtered, Options};
use ssd_sim::report::LabelledReport;
use ssd_sim::run::{RunError, RunOptions, Watch, run};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Why there is no report, and the exit code that goes with it.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The arguments do not fit together.
    #[error("{0}")]
    Usage(String),
    /// The trace is damaged, or asks for what the device does not have.
    #[error("{0}")]
    Input(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Other(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Input(_) => 3,
        }
    }
}

/// One trace on one device.
#[derive(Debug)]
pub struct Job {
    /// The workload, or the file's name.
    pub workload: String,
    /// The journaling mode, where labelled.
    pub mode: Option<String>,
    /// The trace.
    pub file: String,
    /// How it is read.
    pub read: Options,
    /// What of it.
    pub filter: Filter,
    /// On what.
    pub run: RunOptions,
}

/// Shows how far the runs are, on a terminal only, and knows whether Ctrl-C was pressed.
pub struct Progress {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
}

impl Progress {
    /// A bar for this many runs; Ctrl-C is caught from here on.
    pub fn new(runs: usize) -> Result<Progress, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // The second one ends the program at once.
            signal_hook::flag::register_conditional_default(signal, stop.clone())
                .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
                .map_err(|e| Failure::Other(format!("cannot catch signals: {e}")))?;
        }
        let target =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(runs as u64 * 1000), target);
        let style = ProgressStyle::with_template("{msg} {wide_bar} {percent} % {elapsed} ({eta} left)");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(250));
        Ok(Progress { bar, stop })
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

struct JobWatch<'a> {
    progress: &'a Progress,
    trace: io_trace::Progress,
    // Thousandths of this run that the bar has seen.
    shown: AtomicUsize,
    failed: &'a AtomicBool,
}

impl JobWatch<'_> {
    fn advance_to(&self, thousandths: usize) {
        let before = self.shown.fetch_max(thousandths, Ordering::Relaxed);
        self.progress.bar.inc(thousandths.saturating_sub(before) as u64);
    }
}

impl Watch for JobWatch<'_> {
    fn should_stop(&self) -> bool {
        self.progress.stop.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }

    fn progress(&self, _requests: u64) {
        if let Some(thousandths) = (self.trace.bytes() * 1000).checked_div(self.trace.total_bytes) {
            self.advance_to(thousandths.min(1000) as usize);
        }
    }
}

fn run_one(job: &Job, progress: &Progress, failed: &AtomicBool) -> Result<LabelledReport, Failure> {
    let from_trace = |error: io_trace::Error| {
        if error.is_damaged_input() { Failure::Input(error.to_string()) } else { Failure::Other(error.to_string()) }
    };
    progress.bar.set_message(format!("{} {}", job.workload, job.run.device.ftl.kind().name()));
    let (source, trace) = io_trace::open(&job.file, &job.read).map_err(from_trace)?;
    let mut source = Filtered::new(source, job.filter.clone());
    let watch = JobWatch { progress, trace, shown: AtomicUsize::new(0), failed };
    let report = run(&mut source, &job.run, &watch).map_err(|error| match error {
        RunError::Trace(error) => from_trace(error),
        RunError::Refused { .. } => Failure::Input(format!("{}: {error}", job.file)),
        RunError::Halted { .. } => Failure::Other(format!("{}: {error}", job.file)),
    })?;
    watch.advance_to(1000);
    Ok(LabelledReport { workload: job.workload.clone(), mode: job.mode.clone(), trace: job.file.clone(), report })
}

/// Does all jobs on this many threads; the reports come in the order of the jobs. The first failure ends all.
pub fn run_all(jobs: &[Job], threads: usize, progress: &Progress) -> Result<Vec<LabelledReport>, Failure> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let results: Mutex<Vec<Option<Result<LabelledReport, Failure>>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { break };
                    let result = run_one(job, progress, &failed);
                    if result.is_err() {
                        failed.store(true, Ordering::Relaxed);
                    }
                    if let Ok(mut results) = results.lock() {
                        results[index] = Some(result);
                    }
                }
            });
        }
    });
    let results = results.into_inner().map_err(|_| Failure::Other("a run panicked, which is a bug".into()))?;
    // A failure, wherever it is; then the reports.
    let mut reports = Vec::new();
    for result in results.into_iter().flatten() {
        reports.push(result?);
    }
    Ok(reports)
}
