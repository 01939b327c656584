//! Doing the runs: on several threads, under a progress bar, until the end or Ctrl-C.

use crate::commands::progress::{Part, Progress};
use io_trace::{Filter, Filtered, Options};
use ssd_sim::report::LabelledReport;
use ssd_sim::run::{RunError, RunOptions, Watch, run};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

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

struct JobWatch<'a> {
    progress: &'a Progress,
    part: Part<'a>,
    failed: &'a AtomicBool,
}

impl Watch for JobWatch<'_> {
    fn should_stop(&self) -> bool {
        self.progress.should_stop() || self.failed.load(Ordering::Relaxed)
    }

    fn progress(&self, requests: u64) {
        self.part.note(requests);
    }
}

/// What became of a job: no report if it was interrupted before it began.
type Outcome = Result<Option<LabelledReport>, Failure>;

fn run_one(job: &Job, progress: &Progress, failed: &AtomicBool) -> Outcome {
    let from_trace = |error: io_trace::Error| {
        if error.is_damaged_input() { Failure::Input(error.to_string()) } else { Failure::Other(error.to_string()) }
    };
    progress.say(format!("{} {}", job.workload, job.run.device.ftl.kind().name()));
    let (source, part) = match progress.open(&job.file, &job.read) {
        Ok(opened) => opened,
        // Interrupted before the trace began: there is nothing to report.
        Err(_) if progress.should_stop() => return Ok(None),
        Err(error) => return Err(from_trace(error)),
    };
    let mut source = Filtered::new(source, job.filter.clone());
    let watch = JobWatch { progress, part, failed };
    let report = run(&mut source, &job.run, &watch).map_err(|error| match error {
        RunError::Trace(error) => from_trace(error),
        RunError::Refused { .. } => Failure::Input(format!("{}: {error}", job.file)),
        RunError::Halted { .. } => Failure::Other(format!("{}: {error}", job.file)),
    })?;
    watch.part.done();
    let (workload, mode, trace) = (job.workload.clone(), job.mode.clone(), job.file.clone());
    Ok(Some(LabelledReport { workload, mode, trace, report }))
}

/// Does all jobs on this many threads; the reports come in the order of the jobs. The first failure ends all; Ctrl-C
/// ends those that were begun and begins no more.
pub fn run_all(jobs: &[Job], threads: usize, progress: &Progress) -> Result<Vec<LabelledReport>, Failure> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let results: Mutex<Vec<Option<Outcome>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) && !progress.should_stop() {
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
        reports.extend(result?);
    }
    Ok(reports)
}
