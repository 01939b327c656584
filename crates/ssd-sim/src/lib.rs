//! Flash translation layers and what they cost.
//!
//! A [`device::Device`] serves a block trace's requests through one of four FTLs on a simulated flash memory and
//! counts every operation: erases, copies, merges, mapping traffic, and the time they take. The model is that of
//! "Extending Lifetime and Reducing Garbage Collection Overhead of Solid State Disks with Virtual Machine Aware
//! Journaling" (2010): one chip's operations, one after another, with the times of its Table II.
//!
//! What this crate must never do: keep the trace, let an FTL break the flash's rules, or let an option be accepted
//! and ignored. Memory is bounded by the geometry: at most 12 bytes per flash page.
//!
//! Failure story: a broken rule, a full device or a worn-out one is a [`flash::Halt`], an impossible option is a
//! sentence from `check`; nothing panics on a trace's content.
//!
//! What a trace costs under DFTL:
//!
//! ```
//! use io_trace::{Kind, Layout, Names, Options, Record, Writer, WriterOptions, open_reader};
//! use ssd_sim::device::DeviceOptions;
//! use ssd_sim::ftl::FtlKind;
//! use ssd_sim::geometry::Geometry;
//! use ssd_sim::run::{RunOptions, Unwatched, run};
//!
//! // A log that is written over and over, 2 KB at a time.
//! let mut writer = Writer::new(Vec::new(), Names::single("disk"), WriterOptions::default())?;
//! for request in 0..20_000 {
//!     let address = request % 1000 * 2048;
//!     writer.record(&Record { time_ns: request * 1000, address, length: 2048, vm: 0, disk: 0, kind: Kind::Home })?;
//! }
//! let trace = std::io::Cursor::new(writer.finish()?);
//!
//! let options = RunOptions {
//!     device: DeviceOptions::new(FtlKind::Dftl, Geometry::with_blocks(128)),
//!     layout: Layout::Auto,
//!     warm_up_requests: 0,
//!     without_journal: false,
//! };
//! let report = run(&mut open_reader(trace, "example", &Options::default())?, &options, &Unwatched)?;
//! assert_eq!(report.host_pages_written, 20_000);
//! assert!(report.erases > 0 && report.write_amplification >= 1.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

pub mod blocks;
pub mod cache;
pub mod device;
pub mod flash;
pub mod ftl;
pub mod geometry;
pub mod histogram;
mod large_pages;
pub mod random;
pub mod report;
pub mod run;
pub mod workload;
