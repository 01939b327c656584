//! Bringing a held log elsewhere: home after its guest's death, to its own place on storage while its guest runs.
//!
//! That takes I/O, and nobody may wait for I/O who wants the log: neither its guest nor the thread that answers faults. So
//! it has a begin and an end, each under the log's lock for a moment, and between the two whoever takes the log reads it block by
//! block. Until the end nothing of it changes but where a block's content is: changes of homes wait
//! ([`crate::HomeWrite::Wait`]), and the host begins none of its own. Pages that the guest writes to are copied out as ever.

use crate::area::{JournalArea, LogId};
use crate::log::HeldLog;
use crate::logs::Cell;
use crate::table::Tail;
use std::sync::Arc;

/// A log that is being brought elsewhere. Dropped before its end, it is held as it was.
#[derive(Debug)]
pub struct Taking<'a> {
    area: &'a JournalArea,
    id: LogId,
    cell: Arc<Cell>,
    cursor: Tail,
    has_ended: bool,
}

impl<'a> Taking<'a> {
    pub(crate) fn new(area: &'a JournalArea, cell: Arc<Cell>, cursor: Tail) -> Self {
        Taking { area, id: cell.id, cell, cursor, has_ended: false }
    }

    /// The log, as recovery reads it.
    pub fn log(&self) -> HeldLog<'a> {
        HeldLog::taken(self.area, Arc::clone(&self.cell))
    }

    /// Where the transaction begins that its guest is in the midst of.
    pub fn cursor(&self) -> Tail {
        self.cursor
    }

    /// It is elsewhere, and nothing is owed: the log is closed here. `switch` is called at a moment at which nobody can look at the
    /// log, neither before nor after.
    pub fn end(mut self, switch: impl FnOnce()) {
        self.has_ended = true;
        self.area.end_taking(self.id, switch);
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.area.give_up_taking(self.id);
        }
    }
}
