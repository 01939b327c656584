//! Prints the simulator's speed: `cargo run --release -p ssd-sim --example speed -- [GB,…] [ftl,…] [shape,…]`.
//!
//! Each line is one FTL on one device size and one shape of writes, measured after the device was filled and
//! garbage collection has set in, in flash page operations (reads and programs) per second of one core: seconds are
//! those the thread was on a processor, so that a busy machine does not change the figures much.

use io_trace::Kind;
use ssd_sim::device::{DeviceOptions, PREFETCH_MAX, Precondition, build};
use ssd_sim::ftl::FtlKind;
use ssd_sim::geometry::Geometry;
use ssd_sim::workload::{Shape, Workload};
use std::time::Instant;

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

/// Seconds this thread was on a processor so far (wall clock where the kernel does not tell).
fn processor_seconds(start: Instant) -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
    nanoseconds.map_or_else(|| start.elapsed().as_secs_f64(), |n| n as f64 / 1e9)
}

fn run(kind: FtlKind, blocks: u32, gigabytes: &str, shape_name: &str) {
    let mut options = DeviceOptions::new(kind, Geometry::with_blocks(blocks));
    options.precondition = Precondition::Sequential;
    options.check().expect("options that fit");
    let mut device = build(&options);
    let start = Instant::now();
    let begin = processor_seconds(start);
    device.precondition(&|| false).expect("a filled device");
    let fill = processor_seconds(start) - begin;
    let shape = match shape_name {
        "sequential" => Shape::Sequential,
        "zipf" => Shape::Zipf { exponent: 0.99 },
        _ => Shape::Random,
    };
    let pages = options.geometry.logical_pages();
    let mut workload = Workload::new(shape, pages, 42);
    // A request is one page, but for "mixed": a third of single-page reads, 8-page writes and single-page writes each.
    let mut turn = 0u32;
    let mut batch: Vec<(Kind, u64, u64)> = Vec::new();
    // As `run` does: a few requests are known ahead.
    let mut step = |device: &mut Box<dyn ssd_sim::device::Device>| {
        batch.clear();
        let mut addresses = [0u64; PREFETCH_MAX];
        for address in &mut addresses {
            let page = u64::from(workload.next_page());
            turn = turn.wrapping_add(1);
            let (kind, count) = match (shape_name, turn % 3) {
                ("mixed", 0) => (Kind::Read, 1),
                ("mixed", 1) => (Kind::Home, 8),
                _ => (Kind::Home, 1),
            };
            *address = page.min(u64::from(pages) - count) * 2048;
            batch.push((kind, *address, count * 2048));
        }
        device.prefetch(&addresses);
        for &(kind, address, length) in &batch {
            device.serve(kind, address, length).expect("a served request");
        }
    };
    let spare = u64::from(options.geometry.extra_blocks) * 64;
    let collecting = |device: &dyn ssd_sim::device::Device| match kind {
        // Merges of the sequential log block come early: FAST is in its stride when random log blocks are reclaimed.
        FtlKind::Fast => device.flash_counters().log_block_erases > 200,
        // Translation blocks are collected long before data blocks are.
        _ => device.flash_counters().erases - device.flash_counters().mapping_erases > 20_000,
    };
    while device.host_counters().pages_written < spare + spare / 4 && !collecting(&*device) {
        step(&mut device);
    }
    device.reset();
    let begin = processor_seconds(start);
    let mut requests = 0u64;
    while processor_seconds(start) - begin < 3.0 {
        for _ in 0..64 {
            step(&mut device);
        }
        requests += 64 * PREFETCH_MAX as u64;
    }
    let seconds = processor_seconds(start) - begin;
    let counters = device.flash_counters();
    let operations = counters.flash_reads() + counters.flash_writes();
    println!(
        "{:<11} {:<10} {:>6} {:>10.2} M {:>10.2} M {:>6.2} {:>9.1} {:>8.2}",
        kind.name(),
        shape_name,
        gigabytes,
        operations as f64 / seconds / 1e6,
        requests as f64 / seconds / 1e6,
        counters.flash_writes() as f64 / counters.host_writes.max(1) as f64,
        fill,
        device.memory_bytes() as f64 / options.geometry.physical_pages() as f64,
    );
}
