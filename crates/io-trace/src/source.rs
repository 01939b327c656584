//! What every trace reader looks like to whoever replays a trace.

use crate::{Names, Record, Result};

/// What a reader has to tell besides the records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// Lines or frames looked at.
    pub units: u64,
    /// Unreadable lines or frames, counted and skipped (`--lenient`).
    pub skipped: u64,
    /// Where the first of them was and what was wrong.
    pub first_skipped: Option<String>,
    /// Lines that are right but no request: comments, other actions, opens and closes.
    pub ignored: u64,
    /// Set when the trace's end is missing.
    pub tail: Option<String>,
}

/// A stream of records.
pub trait Source {
    /// The next record; `None` at the end.
    fn next_record(&mut self) -> Result<Option<Record>>;

    /// The VMs and disks met so far.
    fn names(&self) -> &Names;

    /// What was skipped, ignored or missing so far.
    fn notes(&self) -> Notes;

    /// Lines or frames looked at so far: [`Notes::units`] without the rest, cheap enough for every record.
    fn units(&self) -> u64 {
        self.notes().units
    }

    /// The format's name.
    fn format(&self) -> &'static str;
}

impl<S: Source + ?Sized> Source for Box<S> {
    fn next_record(&mut self) -> Result<Option<Record>> {
        (**self).next_record()
    }
    fn names(&self) -> &Names {
        (**self).names()
    }
    fn notes(&self) -> Notes {
        (**self).notes()
    }
    fn units(&self) -> u64 {
        (**self).units()
    }
    fn format(&self) -> &'static str {
        (**self).format()
    }
}
