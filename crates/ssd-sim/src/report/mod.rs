//! What a run did: the numbers, as JSON (the keys of the project's interface contract, and more) and as tables.

pub mod figures;
pub mod html;
mod svg;
pub mod table;

use crate::device::{Device, DeviceOptions, SLC_ERASE_LIMIT};
use crate::flash::Counters;
use crate::ftl::FtlKind;
use crate::histogram::Histogram;
use io_trace::{Kind, Notes};
use serde::Serialize;

/// What a run knows beside the device.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// Requests counted.
    pub requests: u64,
    /// Reads and writes among them.
    pub io_requests: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written, journal included.
    pub bytes_written: u64,
    /// Bytes written to a journal.
    pub journal_bytes_written: u64,
    /// Bytes discarded.
    pub bytes_discarded: u64,
    /// Flushes.
    pub flushes: u64,
    /// Journal writes left out on demand.
    pub journal_requests_left_out: u64,
    /// Requests served before counting began.
    pub warm_up_requests: u64,
    /// Whether the run was stopped early.
    pub interrupted: bool,
    /// Whether the device wore out before the trace ended.
    pub worn_out: bool,
    /// Whether disks of unknown size were laid over one another.
    pub overlaid: bool,
    /// Wall-clock time of the replay.
    pub seconds: f64,
    /// Wall-clock time of preconditioning.
    pub precondition_seconds: f64,
    /// The trace's own duration.
    pub trace_seconds: f64,
    /// What the reader has to tell.
    pub notes: Notes,
}

impl Inputs {
    /// Counts a request.
    #[inline]
    pub fn count(&mut self, kind: Kind, bytes: u64) {
        self.requests += 1;
        match kind {
            Kind::Read => self.bytes_read = self.bytes_read.saturating_add(bytes),
            Kind::Home | Kind::Journal | Kind::WriteZeroes => {
                self.bytes_written = self.bytes_written.saturating_add(bytes);
                if kind == Kind::Journal {
                    self.journal_bytes_written = self.journal_bytes_written.saturating_add(bytes);
                }
            }
            Kind::Discard => self.bytes_discarded = self.bytes_discarded.saturating_add(bytes),
            Kind::Flush => self.flushes += 1,
        }
        self.io_requests += u64::from(kind == Kind::Read || kind.is_write());
    }
}

/// Garbage collection of one kind of blocks.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GcPart {
    /// Live pages copied.
    pub valid_page_copies: u64,
    /// Blocks erased.
    pub erases: u64,
    /// Copies × (read + write) + erases × erase time.
    pub time_us: u64,
}

/// Garbage collection, in the 2010 paper's terms.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Gc {
    /// Victims reclaimed, or merges.
    pub runs: u64,
    /// Live pages copied.
    pub valid_page_copies: u64,
    /// Blocks erased.
    pub erases: u64,
    /// Copies × (read + write) + erases × erase time.
    pub time_us: u64,
    /// Blocks of data.
    pub data: GcPart,
    /// Blocks of translation pages (DFTL).
    pub translation: GcPart,
    /// Mapping pages read for pages that moved; not part of `time_us` (DFTL).
    pub mapping_reads: u64,
    /// Mapping pages written for them.
    pub mapping_writes: u64,
}

/// Merges (FAST); `full` includes `full_sequential`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Merges {
    /// The SW log block became the data block.
    pub switch: u64,
    /// The SW log block was completed and became the data block.
    pub partial: u64,
    /// A logical block was gathered in a new block.
    pub full: u64,
    /// Those of them that merged the SW log block.
    pub full_sequential: u64,
    /// RW log blocks erased after their merges.
    pub log_block_erases: u64,
}

/// Mapping traffic.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Mapping {
    /// Mapping pages read from flash.
    pub reads: u64,
    /// Mapping pages programmed.
    pub writes: u64,
    /// Lookups answered by the cache.
    pub hits: u64,
    /// Lookups that were not.
    pub misses: u64,
    /// Spare areas read (Superblock FTL).
    pub spare_reads: u64,
}

/// Erase counts over the blocks.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Wear {
    /// Least erased block.
    pub min: u32,
    /// Mean.
    pub mean: f64,
    /// Most erased block.
    pub max: u32,
    /// Standard deviation.
    pub deviation: f64,
    /// Mean over maximum: 1 is perfectly even, 0 is one block taking all.
    pub evenness: f64,
    /// Blocks per erase count: (count, blocks), at most 64 classes; a class holds the counts up to its own.
    pub distribution: Vec<(u32, u32)>,
    /// Blocks moved by static wear levelling.
    pub levelling_moves: u64,
    /// Copies it made.
    pub levelling_copies: u64,
    /// Erases it made.
    pub levelling_erases: u64,
}

/// When the device is worn out, projected from this run.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Lifetime {
    /// Erases a block survives (SLC, 100,000, unless given).
    pub erase_limit: u32,
    /// Whether it happened during the run.
    pub worn_out: bool,
    /// Blocks that went bad during the run.
    pub bad_blocks: u32,
    /// How often this trace can be repeated if wear is spread evenly; `null` without erases.
    pub repetitions_even: Option<f64>,
    /// How often until the first block is worn out, wear as uneven as in this run.
    pub repetitions_first_block: Option<f64>,
    /// Bytes the host can write if wear is spread evenly.
    pub host_bytes_even: Option<f64>,
    /// Years at the trace's own pace if wear is spread evenly; `null` where the trace has no times.
    pub years_even: Option<f64>,
}

/// A distribution of times.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Times {
    /// Mean.
    pub mean_us: f64,
    /// Half are not longer.
    pub p50_us: u64,
    /// 90 % are not longer.
    pub p90_us: u64,
    /// 99 % are not longer.
    pub p99_us: u64,
    /// 99.9 % are not longer.
    pub p999_us: u64,
    /// The longest.
    pub max_us: u64,
}

impl Times {
    fn of(histogram: &Histogram) -> Times {
        Times {
            mean_us: histogram.mean(),
            p50_us: histogram.quantile(0.5),
            p90_us: histogram.quantile(0.9),
            p99_us: histogram.quantile(0.99),
            p999_us: histogram.quantile(0.999),
            max_us: histogram.max(),
        }
    }
}

/// The host's traffic, as in the 2010 paper's Figures 2 and 3.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Traffic {
    /// Reads and writes.
    pub requests: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes written to a journal.
    pub journal_bytes_written: u64,
    /// Bytes discarded.
    pub bytes_discarded: u64,
    /// Flushes.
    pub flushes: u64,
}

/// What the simulation itself cost.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Simulation {
    /// Wall-clock seconds of the replay.
    pub seconds: f64,
    /// Wall-clock seconds of preconditioning.
    pub precondition_seconds: f64,
    /// Flash pages read or programmed per wall-clock second of the replay.
    pub page_operations_per_second: f64,
    /// Bytes of memory of the device.
    pub memory_bytes: u64,
}

/// One point of a run's course.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Point {
    /// Requests served.
    pub requests: u64,
    /// Pages the host wrote.
    pub host_pages_written: u64,
    /// Pages programmed.
    pub flash_writes: u64,
    /// Blocks erased.
    pub erases: u64,
}

/// The report of one run. Keys are the interface contract's; whatever is beyond it may grow.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// 1.
    pub schema: u32,
    /// The FTL.
    pub ftl: FtlKind,
    /// Requests served and counted.
    pub requests: u64,
    /// Pages of read requests, unwritten ones included.
    pub host_pages_read: u64,
    /// Pages of write requests.
    pub host_pages_written: u64,
    /// Pages read from flash, for any reason.
    pub flash_reads: u64,
    /// Pages programmed, for any reason.
    pub flash_writes: u64,
    /// Blocks erased.
    pub erases: u64,
    /// Garbage collection.
    pub gc: Gc,
    /// Merges.
    pub merges: Merges,
    /// Mapping traffic.
    pub mapping: Mapping,
    /// Pages programmed per page the host wrote; 0 when it wrote none.
    pub write_amplification: f64,
    /// Time of all flash operations one after another.
    pub time_us: u64,
    /// Requests simulated per wall-clock second.
    pub requests_per_second: f64,
    /// The host's traffic.
    pub traffic: Traffic,
    /// Time of a request's own flash operations.
    pub service: Times,
    /// The same with the time it waited for the device, arrivals by the trace's clock.
    pub response: Times,
    /// Erase counts.
    pub wear: Wear,
    /// Projected lifetime.
    pub lifetime: Lifetime,
    /// Pages read that were never written.
    pub unwritten_pages_read: u64,
    /// Pages written only partly.
    pub partial_pages_written: u64,
    /// Pages read to complete them.
    pub read_modify_write_reads: u64,
    /// Pages trimmed.
    pub pages_trimmed: u64,
    /// Unreadable lines or frames that were skipped.
    pub trace_units_skipped: u64,
    /// The first of them, and what is wrong with it.
    pub trace_first_skipped: Option<String>,
    /// What the trace's end lacks.
    pub trace_tail: Option<String>,
    /// Journal writes left out on demand.
    pub journal_requests_left_out: u64,
    /// Requests served before counting began.
    pub warm_up_requests: u64,
    /// Whether the run was stopped before the trace's end.
    pub interrupted: bool,
    /// Whether disks of unknown size were laid over one another.
    pub disks_overlaid: bool,
    /// The trace's own duration.
    pub trace_seconds: f64,
    /// All options in force.
    pub options: DeviceOptions,
    /// What the simulation cost.
    pub simulation: Simulation,
    /// The run's course, for plots.
    #[serde(skip)]
    pub course: Vec<Point>,
    /// Cumulative distribution of response times, for plots.
    #[serde(skip)]
    pub response_distribution: Vec<(u64, f64)>,
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

fn wear(device: &dyn Device, counters: &Counters) -> Wear {
    let counts = device.erase_counts();
    let blocks = counts.len().max(1) as f64;
    let mean = counts.iter().map(|&c| f64::from(c)).sum::<f64>() / blocks;
    let variance = counts.iter().map(|&c| (f64::from(c) - mean).powi(2)).sum::<f64>() / blocks;
    let max = counts.iter().copied().max().unwrap_or(0);
    let class = max / 64 + 1;
    let mut distribution: Vec<(u32, u32)> = (0..=max / class).map(|c| ((c * class + class - 1).min(max), 0)).collect();
    for &count in &counts {
        distribution[(count / class) as usize].1 += 1;
    }
    Wear {
        min: counts.iter().copied().min().unwrap_or(0),
        mean,
        max,
        deviation: variance.sqrt(),
        evenness: if max == 0 { 1.0 } else { mean / f64::from(max) },
        distribution,
        levelling_moves: counters.wear_moves,
        levelling_copies: counters.wear_copies,
        levelling_erases: counters.wear_erases,
    }
}

impl Report {
    /// The report of a device after a run.
    pub fn new(
        device: &dyn Device,
        inputs: Inputs,
        service: &Histogram,
        response: &Histogram,
        course: Vec<Point>,
    ) -> Report {
        let options = *device.options();
        let (c, host) = (*device.flash_counters(), *device.host_counters());
        let timing = options.timing;
        let part = |copies, erases| GcPart {
            valid_page_copies: copies,
            erases,
            time_us: copies * (timing.read_us + timing.write_us) + erases * timing.erase_us,
        };
        let (gc_copies, gc_erases) = (c.copies - c.wear_copies, c.erases - c.wear_erases);
        // Wear levelling may have moved translation blocks: their share is then counted as data.
        let mapping_copies = c.mapping_copies.min(gc_copies);
        let mapping_erases = c.mapping_erases.min(gc_erases);
        let wear = wear(device, &c);
        let limit = if options.wear.erase_limit == 0 { SLC_ERASE_LIMIT } else { options.wear.erase_limit };
        let even =
            (c.erases > 0).then(|| f64::from(options.geometry.physical_blocks()) * f64::from(limit) / c.erases as f64);
        let lifetime = Lifetime {
            erase_limit: limit,
            worn_out: inputs.worn_out,
            bad_blocks: device.bad_blocks(),
            repetitions_even: even,
            repetitions_first_block: (wear.max > 0).then(|| f64::from(limit) / f64::from(wear.max)),
            host_bytes_even: even.map(|times| times * inputs.bytes_written as f64),
            years_even: even
                .filter(|_| inputs.trace_seconds > 0.0)
                .map(|times| times * inputs.trace_seconds / (365.25 * 86_400.0)),
        };
        let operations = (c.flash_reads() + c.flash_writes()) as f64;
        Report {
            schema: 1,
            ftl: options.ftl.kind(),
            requests: inputs.requests,
            host_pages_read: host.pages_read,
            host_pages_written: host.pages_written,
            flash_reads: c.flash_reads(),
            flash_writes: c.flash_writes(),
            erases: c.erases,
            gc: Gc {
                runs: c.gc_runs,
                valid_page_copies: gc_copies,
                erases: gc_erases,
                time_us: c.gc_time_us(&timing),
                data: part(gc_copies - mapping_copies, gc_erases - mapping_erases),
                translation: part(mapping_copies, mapping_erases),
                mapping_reads: c.gc_mapping_reads,
                mapping_writes: c.gc_mapping_writes,
            },
            merges: Merges {
                switch: c.switch_merges,
                partial: c.partial_merges,
                full: c.full_merges + c.sequential_full_merges,
                full_sequential: c.sequential_full_merges,
                log_block_erases: c.log_block_erases,
            },
            mapping: Mapping {
                reads: c.mapping_reads,
                writes: c.mapping_writes,
                hits: c.mapping_hits,
                misses: c.mapping_misses,
                spare_reads: c.spare_reads,
            },
            write_amplification: ratio(c.flash_writes() as f64, host.pages_written as f64),
            time_us: c.time_us(&timing),
            requests_per_second: ratio(inputs.requests as f64, inputs.seconds),
            traffic: Traffic {
                requests: inputs.io_requests,
                bytes: inputs.bytes_read.saturating_add(inputs.bytes_written),
                bytes_read: inputs.bytes_read,
                bytes_written: inputs.bytes_written,
                journal_bytes_written: inputs.journal_bytes_written,
                bytes_discarded: inputs.bytes_discarded,
                flushes: inputs.flushes,
            },
            service: Times::of(service),
            response: Times::of(response),
            wear,
            lifetime,
            unwritten_pages_read: host.unwritten_pages_read,
            partial_pages_written: host.partial_pages_written,
            read_modify_write_reads: host.read_modify_write_reads,
            pages_trimmed: host.pages_trimmed,
            trace_units_skipped: inputs.notes.skipped,
            trace_first_skipped: inputs.notes.first_skipped,
            trace_tail: inputs.notes.tail,
            journal_requests_left_out: inputs.journal_requests_left_out,
            warm_up_requests: inputs.warm_up_requests,
            interrupted: inputs.interrupted,
            disks_overlaid: inputs.overlaid,
            trace_seconds: inputs.trace_seconds,
            options,
            simulation: Simulation {
                seconds: inputs.seconds,
                precondition_seconds: inputs.precondition_seconds,
                page_operations_per_second: ratio(operations, inputs.seconds),
                memory_bytes: device.memory_bytes(),
            },
            course,
            response_distribution: response.cumulative(),
        }
    }
}

/// A report with the names that tell it from others in a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct LabelledReport {
    /// The workload, or the trace's file name.
    pub workload: String,
    /// The journaling mode, where the trace was labelled with one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// The trace.
    pub trace: String,
    /// What happened.
    #[serde(flatten)]
    pub report: Report,
}
