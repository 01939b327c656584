//! Prints the simulator's speed: `cargo run --release -p ssd-sim --example speed -- [GB,…] [ftl,…] [shape,…]`.
//!
//! Each line is one FTL on one device size and one shape of writes, in flash page operations (reads and programs) per
//! second of one core; seconds are those the thread was on a processor. So that sizes can be compared, the device is
//! always measured in the same state: filled in order, one and a half times the spare blocks written over in the given
//! shape, and then the next 1/256 of its pages is what counts. On a small device that is short, and is done again and
//! again, each time on a new device, until half a second is full.

use io_trace::Kind;
use ssd_sim::device::{Device, DeviceOptions, PREFETCH_MAX, Precondition, build};
use ssd_sim::ftl::FtlKind;
use ssd_sim::geometry::Geometry;
use ssd_sim::workload::{Shape, Workload};
use std::time::Duration;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let list = |index: usize, default: &str| -> Vec<String> {
        arguments.get(index).map_or(default, |s| s.as_str()).split(',').map(str::to_owned).collect()
    };
    println!(
        "{:<11} {:<10} {:>6} {:>12} {:>12} {:>6} {:>9} {:>8}",
        "FTL", "shape", "GB", "page ops/s", "requests/s", "WA", "fill s", "B/page"
    );
    for gigabytes in list(0, "32") {
        let blocks = (gigabytes.parse::<f64>().expect("a size in GB") * 8192.0) as u32;
        for name in list(1, "page,dftl,fast,superblock") {
            let kind: FtlKind = name.parse().expect("an FTL");
            for shape_name in list(2, "random,zipf,sequential,mixed") {
                run(kind, blocks, &gigabytes, &shape_name);
            }
        }
    }
}

/// The processor time of this thread so far.
fn processor_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec.try_into().unwrap_or(0))
}

/// What one device was measured to do.
#[derive(Default)]
struct Measured {
    time: Duration,
    fill: Duration,
    operations: u64,
    requests: u64,
    host_writes: u64,
    flash_writes: u64,
    bytes_per_page: f64,
}

const MEASURE: Duration = Duration::from_millis(500);

fn run(kind: FtlKind, blocks: u32, gigabytes: &str, shape_name: &str) {
    let mut sum = Measured::default();
    let mut episodes = 0;
    while sum.time < MEASURE {
        let one = episode(kind, blocks, shape_name, 42 + episodes);
        episodes += 1;
        sum.time += one.time;
        sum.fill += one.fill;
        sum.operations += one.operations;
        sum.requests += one.requests;
        sum.host_writes += one.host_writes;
        sum.flash_writes += one.flash_writes;
        sum.bytes_per_page = one.bytes_per_page;
    }
    println!(
        "{:<11} {:<10} {:>6} {:>10.2} M {:>10.2} M {:>6.2} {:>9.1} {:>8.2}",
        kind.name(),
        shape_name,
        gigabytes,
        sum.operations as f64 / sum.time.as_secs_f64() / 1e6,
        sum.requests as f64 / sum.time.as_secs_f64() / 1e6,
        sum.flash_writes as f64 / sum.host_writes.max(1) as f64,
        sum.fill.as_secs_f64() / episodes as f64,
        sum.bytes_per_page,
    );
}

/// Requests that are known ahead, as `run` does it: kinds, first bytes and lengths.
type Batch = [(Kind, u64, u64); PREFETCH_MAX];

fn serve(device: &mut dyn Device, batch: &Batch) {
    device.prefetch(&batch.map(|(_, address, _)| address));
    for &(kind, address, length) in batch {
        device.serve(kind, address, length).expect("a served request");
    }
}

fn episode(kind: FtlKind, blocks: u32, shape_name: &str, seed: u64) -> Measured {
    let mut options = DeviceOptions::new(kind, Geometry::with_blocks(blocks));
    options.precondition = Precondition::Sequential;
    options.check().expect("options that fit");
    let begin = processor_time();
    let mut device = build(&options);
    device.precondition(&|| false).expect("a filled device");
    let fill = processor_time() - begin;
    let shape = match shape_name {
        "sequential" => Shape::Sequential,
        "zipf" => Shape::Zipf { exponent: 0.99 },
        _ => Shape::Random,
    };
    let pages = options.geometry.logical_pages();
    let mut workload = Workload::new(shape, pages, seed);
    // A request is one page, but for "mixed": a third of single-page reads, 8-page writes and single-page writes each.
    let mut turn = 0u32;
    let mut batch = || -> Batch {
        std::array::from_fn(|_| {
            let page = u64::from(workload.next_page());
            turn = turn.wrapping_add(1);
            let (kind, count) = match (shape_name, turn % 3) {
                ("mixed", 0) => (Kind::Read, 1),
                ("mixed", 1) => (Kind::Home, 8),
                _ => (Kind::Home, 1),
            };
            (kind, page.min(u64::from(pages) - count) * 2048, count * 2048)
        })
    };
    let spare = u64::from(options.geometry.extra_blocks) * 64;
    while device.host_counters().pages_written < spare + spare / 2 {
        serve(&mut *device, &batch());
    }
    // Made before the clock runs: drawing from some distributions takes longer than serving a request.
    let mut batches = Vec::new();
    let (mut written, enough) = (0, u64::from(pages) / 256 * 2048);
    while written < enough {
        let batch = batch();
        written += batch.iter().filter(|(kind, ..)| *kind == Kind::Home).map(|(.., length)| length).sum::<u64>();
        batches.push(batch);
    }
    device.reset();
    let begin = processor_time();
    for batch in &batches {
        serve(&mut *device, batch);
    }
    let time = processor_time() - begin;
    let counters = device.flash_counters();
    Measured {
        time,
        fill,
        operations: counters.flash_reads() + counters.flash_writes(),
        requests: (batches.len() * PREFETCH_MAX) as u64,
        host_writes: counters.host_writes,
        flash_writes: counters.flash_writes(),
        bytes_per_page: device.memory_bytes() as f64 / options.geometry.physical_pages() as f64,
    }
}
