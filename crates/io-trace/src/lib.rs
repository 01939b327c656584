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
