//! Feeds a trace to a device and reports what it did.
//!
//! One chip serves one request after another. A request's service time is that of its flash operations; its
//! response time also counts waiting: it starts when it arrives by the trace's clock and the device is free.
//! Memory is constant: two histograms and at most [`SERIES_POINTS`] points of the run's course.

use crate::device::{Device, DeviceOptions, PREFETCH_MAX, ServeError, build};
use crate::flash::{Counters, Halt};
use crate::histogram::Histogram;
use crate::report::{Inputs, Point, Report};
use io_trace::{Kind, Layout, Placer, Record, Source};
use std::time::Instant;

/// Most points kept of the run's course.
pub const SERIES_POINTS: usize = 512;

/// How a trace is replayed.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// The device.
    pub device: DeviceOptions,
    /// Where the trace's disks lie on it.
    pub layout: Layout,
    /// Requests at the trace's beginning that are served but not counted.
    pub warm_up_requests: u64,
    /// Journal writes are left out, as if the journal had been retained in memory.
    pub without_journal: bool,
}

/// Who watches a run.
pub trait Watch: Sync {
    /// Whether to stop early and report what there is.
    fn should_stop(&self) -> bool {
        false
    }
    /// Called now and then with the requests served so far.
    fn progress(&self, _requests: u64) {}
}

/// Nobody watches.
pub struct Unwatched;

impl Watch for Unwatched {}

/// Why a run has no report.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] io_trace::Error),
    /// A request cannot be served by this device.
    #[error("request {request} of the trace (line or frame {unit}): {reason}")]
    Refused {
        /// The request, counted from 1.
        request: u64,
        /// How many lines or frames of the trace were read.
        unit: u64,
        /// Why.
        reason: String,
    },
    /// The device stopped: a bug in an FTL, or no space.
    #[error("at request {request} of the trace: {halt}")]
    Halted {
        /// The request, counted from 1; 0 while preconditioning.
        request: u64,
        /// Why.
        halt: Halt,
    },
}

/// How a run goes: keeps a bounded number of evenly spaced points.
struct Course {
    points: Vec<Point>,
    every: u64,
}

impl Course {
    #[inline]
    fn note(&mut self, requests: u64, counters: &Counters, pages: u64) {
        if !requests.is_multiple_of(self.every) {
            return;
        }
        self.points.push(Point {
            requests,
            host_pages_written: pages,
            flash_writes: counters.flash_writes(),
            erases: counters.erases,
        });
        if self.points.len() > SERIES_POINTS {
            // Every other point goes, and half as many are taken from now on.
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                !keep
            });
            self.every *= 2;
        }
    }
}

/// How much of a request stream is looked at between two questions to the watcher.
const WATCH_EVERY: u64 = 4096;

/// Replays the whole trace on a new device.
pub fn run(source: &mut dyn Source, options: &RunOptions, watch: &dyn Watch) -> Result<Report, RunError> {
    let begin = Instant::now();
    let mut device: Box<dyn Device> = build(&options.device);
    device.precondition(&|| watch.should_stop()).map_err(|halt| RunError::Halted { request: 0, halt })?;
    let precondition_seconds = begin.elapsed().as_secs_f64();

    let begin = Instant::now();
    let timing = options.device.timing;
    let mut placer = Placer::new(options.layout);
    let mut inputs = Inputs::default();
    let (mut service, mut response) = (Histogram::default(), Histogram::default());
    let mut course = Course { points: Vec::new(), every: 1 };
    let mut busy_until_us = 0u64;
    let (mut first_us, mut last_us) = (None, 0u64);
    let mut read = 0u64;
    let mut warm_up = options.warm_up_requests;
    // Requests are read a few ahead of being served, so that their cache misses overlap.
    let mut ahead: Vec<(Record, u64)> = Vec::with_capacity(PREFETCH_MAX);
    let mut addresses: Vec<u64> = Vec::with_capacity(PREFETCH_MAX);
    let mut failed_ahead = None;
    let mut queue = 0;
    // A device that was not brought into its state serves nothing.
    inputs.interrupted = watch.should_stop();
    'trace: while !inputs.interrupted {
        if queue == ahead.len() {
            // What came before the error was served; now it counts.
            if let Some(error) = failed_ahead.take() {
                // Whoever stops a run may have cut its trace off, too.
                inputs.interrupted = watch.should_stop();
                if inputs.interrupted {
                    break 'trace;
                }
                return Err(error);
            }
            queue = 0;
            ahead.clear();
            addresses.clear();
            while ahead.len() < PREFETCH_MAX {
                let record = match source.next_record() {
                    Ok(Some(record)) => record,
                    Ok(None) => break,
                    Err(error) => {
                        failed_ahead = Some(RunError::Trace(error));
                        break;
                    }
                };
                let unit = source.units();
                let placed = match record.kind {
                    Kind::Flush => Ok(0),
                    Kind::Journal if options.without_journal => Ok(0),
                    _ => placer.place(&record, source.names()),
                };
                match placed {
                    Ok(address) => {
                        addresses.push(address);
                        ahead.push((Record { address, ..record }, unit));
                    }
                    Err(reason) => {
                        let request = read + ahead.len() as u64 + 1;
                        failed_ahead = Some(RunError::Refused { request, unit, reason });
                        break;
                    }
                }
            }
            if ahead.is_empty() {
                if failed_ahead.is_some() {
                    continue 'trace;
                }
                inputs.interrupted = watch.should_stop();
                break 'trace;
            }
            device.prefetch(&addresses);
        }
        let (record, unit) = ahead[queue];
        queue += 1;
        let address = record.address;
        read += 1;
        if read.is_multiple_of(WATCH_EVERY) {
            watch.progress(read);
            if watch.should_stop() {
                inputs.interrupted = true;
                break;
            }
        }
        if options.without_journal && record.kind == Kind::Journal {
            inputs.journal_requests_left_out += 1;
            continue;
        }
        let refused = |reason| RunError::Refused { request: read, unit, reason };
        let before_us = device.flash_counters().time_us(&timing);
        match device.serve(record.kind, address, record.length) {
            Ok(()) => {}
            Err(ServeError::Halt(Halt::WornOut(_))) => {
                inputs.worn_out = true;
                break;
            }
            Err(ServeError::Halt(halt)) => return Err(RunError::Halted { request: read, halt }),
            Err(error) => return Err(refused(error.to_string())),
        }
        if warm_up > 0 {
            warm_up -= 1;
            if warm_up == 0 {
                device.reset();
            }
            inputs.warm_up_requests += 1;
            continue;
        }
        inputs.count(record.kind, record.length);
        let arrival_us = record.time_ns / 1000;
        first_us = Some(first_us.unwrap_or(arrival_us).min(arrival_us));
        last_us = last_us.max(arrival_us);
        let took_us = device.flash_counters().time_us(&timing).saturating_sub(before_us);
        service.add(took_us);
        let start_us = busy_until_us.max(arrival_us);
        busy_until_us = start_us.saturating_add(took_us);
        response.add(busy_until_us - arrival_us);
        course.note(inputs.requests, device.flash_counters(), device.host_counters().pages_written);
    }
    if warm_up > 0 && options.warm_up_requests > 0 {
        // The trace was shorter than the warm-up: nothing was counted.
        device.reset();
    }
    watch.progress(read);
    inputs.seconds = begin.elapsed().as_secs_f64();
    inputs.precondition_seconds = precondition_seconds;
    inputs.trace_seconds = last_us.saturating_sub(first_us.unwrap_or(0)) as f64 / 1e6;
    inputs.overlaid = placer.overlaid();
    inputs.notes = source.notes();
    Ok(Report::new(&*device, inputs, &service, &response, course.points))
}
