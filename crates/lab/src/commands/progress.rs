//! How far a command that reads traces is: a bar on a terminal, and Ctrl-C that ends it early but in order.
//!
//! The first Ctrl-C (or SIGTERM) asks the command to stop and print what there is; the second one ends the program at
//! once. Reading standard input is given up too, even while nothing comes. This module must never print anything but
//! the bar, and that only to a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use io_trace::{BoxedSource, Options};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{IsTerminal, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The bar of a command, and whether it shall stop.
pub struct Progress {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
}

/// The bar's steps for each trace that is read.
const STEPS: u64 = 1000;

impl Progress {
    /// A bar for reading the traces of these names, one after another or at the same time. Ctrl-C is caught from here on.
    pub fn new<'a>(files: impl Iterator<Item = &'a str>) -> Result<Progress, String> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register_conditional_default(signal, stop.clone())
                .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
                .map_err(|e| format!("cannot catch signals: {e}"))?;
        }
        let mut steps = Some(0);
        for file in files {
            // Only a regular file tells how much there is to read.
            let known = std::fs::metadata(file).is_ok_and(|m| m.is_file());
            steps = steps.filter(|_| known).map(|steps| steps + STEPS);
        }
        let target =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(steps, target);
        let template = match steps {
            Some(_) => "{msg} {wide_bar} {percent} % {elapsed} ({eta} left)",
            None => "{spinner} {msg}: {human_pos} requests {elapsed}",
        };
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(250));
        Ok(Progress { bar, stop })
    }

    /// Whether Ctrl-C was pressed.
    pub fn should_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Opens a trace to be read under this bar.
    pub fn open(&self, file: &str, options: &Options) -> io_trace::Result<(BoxedSource, Part<'_>)> {
        let (source, trace) = if file == "-" {
            let input = StoppableInput { input: std::io::stdin(), stop: self.stop.clone() };
            (io_trace::open_reader(input, file, options)?, io_trace::Progress::default())
        } else {
            io_trace::open(file, options)?
        };
        Ok((source, Part { progress: self, trace, shown: AtomicU64::new(0) }))
    }

    /// What the bar says is being done.
    pub fn say(&self, what: String) {
        self.bar.set_message(what);
    }

    /// Does something that prints, with the bar out of the way.
    pub fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// One trace that is read.
pub struct Part<'a> {
    progress: &'a Progress,
    trace: io_trace::Progress,
    // Steps of the bar that were taken for this trace.
    shown: AtomicU64,
}

impl Part<'_> {
    /// So many requests of the trace were read.
    pub fn note(&self, requests: u64) {
        if self.progress.bar.length().is_none() {
            self.advance_to(requests);
        } else if let Some(steps) = self.trace.bytes().saturating_mul(STEPS).checked_div(self.trace.total_bytes) {
            self.advance_to(steps.min(STEPS));
        }
    }

    /// The trace is at its end.
    pub fn done(&self) {
        if self.progress.bar.length().is_some() {
            self.advance_to(STEPS);
        }
    }

    fn advance_to(&self, steps: u64) {
        let before = self.shown.fetch_max(steps, Ordering::Relaxed);
        self.progress.bar.inc(steps.saturating_sub(before));
    }
}

/// Standard input whose reader can be told to stop while it waits.
struct StoppableInput {
    input: std::io::Stdin,
    stop: Arc<AtomicBool>,
}

impl Read for StoppableInput {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let patience = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(std::io::Error::other("it was interrupted"));
            }
            match poll(&mut [PollFd::new(&self.input, PollFlags::IN)], Some(&patience)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return rustix::io::read(&self.input, buffer).map_err(Into::into),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
