//! Block traces: record, read, convert, summarise.
//!
//! A trace is a stream of [`Record`]s: when, which VM, which disk, what kind of request, where and how long.
//! [`Writer`] records them in amberlog's own compact format from a data path; every reader is a [`Source`],
//! so that whoever replays a trace does not care where it came from.
//!
//! What this crate must never do: keep a trace in memory (everything streams; a reader's memory is bounded by
//! one line or one frame), guess at a malformed line, or lose records without saying how many.
//!
//! Failure story: an unreadable line or frame is an [`Error`] that names the file, the line or byte offset
//! and what is wrong; with [`Options::lenient`] it is counted in [`Notes`] and skipped. A trace whose writer
//! died ends early, and that is a note ([`amber::Ending`]), not an error: all complete frames are read.
//! A writer's I/O error is sticky: it is returned once, and later records are counted as lost.
//!
//! Recording two requests, and summing them up as if they had come from a file:
//!
//! ```
//! use io_trace::summary::Summariser;
//! use io_trace::{Kind, Names, Options, Record, Source, Writer, WriterOptions, open_reader};
//!
//! let mut writer = Writer::new(Vec::new(), Names::single("disk"), WriterOptions::default())?;
//! let write = Record { time_ns: 0, address: 4096, length: 4096, vm: 0, disk: 0, kind: Kind::Home };
//! writer.record(&write)?;
//! writer.record(&Record { time_ns: 1_000_000, kind: Kind::Flush, address: 0, length: 0, ..write })?;
//! let bytes = writer.finish()?;
//!
//! // The format is recognised; `open` does the same with a path.
//! let mut trace = open_reader(std::io::Cursor::new(bytes), "example", &Options::default())?;
//! let mut summariser = Summariser::new();
//! while let Some(record) = trace.next_record()? {
//!     summariser.add(&record);
//! }
//! let summary = summariser.summary(trace.names());
//! assert_eq!((summary.requests, summary.home.bytes), (2, 4096));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod amber;
mod blkparse;
mod disksim;
mod error;
mod filter;
mod fio;
mod merge;
mod msr;
mod names;
mod open;
mod record;
mod source;
mod spc;
mod split;
pub mod summary;
mod text;
mod text_writer;

pub use amber::{Writer, WriterOptions};
pub use error::{Error, Result};
pub use filter::{Filter, Filtered};
pub use merge::{Layout, Merge, Placer};
pub use names::{Disk, Names, Vm};
pub use open::{BoxedSource, Format, Options, Progress, open, open_reader};
pub use record::{Kind, Record};
pub use source::{Notes, Source};
pub use split::Split;
pub use text_writer::TextWriter;
