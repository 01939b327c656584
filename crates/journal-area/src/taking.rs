//! Bringing a held log elsewhere: home after its guest's death, to its own place on storage while its guest runs.
//!
//! That takes I/O, and nobody may wait for I/O who wants the log: neither its guest nor the thread that answers faults. So
//! it has a begin and an end, each under the log's lock for a moment, and between the two whoever takes the log reads it block by
//! block. Until the end nothing of it changes but where a block's content is: changes of homes wait
//! ([`crate::HomeWrite::Wait`]), and the host begins none of its own. Pages that the guest writes to are copied out as ever.

use crate::area::JournalArea;
use crate::inflight::Writer;
use crate::jcb::VmJcb;
use crate::log::HeldLog;
use crate::logs::{Cell, LogId};
use crate::table::Tail;
use std::sync::Arc;

/// A log that is being brought elsewhere. Dropped before its end, it is held as it was.
#[derive(Debug)]
pub struct Taking<'a> {
    area: &'a JournalArea,
    id: LogId,
    cell: Arc<Cell>,
    cursor: Tail,
    /// Its guest may write home meanwhile.
    beside_guest: bool,
    has_ended: bool,
}

impl<'a> Taking<'a> {
    fn new(area: &'a JournalArea, cell: Arc<Cell>, cursor: Tail) -> Self {
        Taking { area, id: cell.id, cell, cursor, beside_guest: false, has_ended: false }
    }

    /// The log, as recovery reads it.
    pub fn log(&self) -> HeldLog<'a> {
        HeldLog::taken(&self.area.pages, Arc::clone(&self.cell))
    }

    /// Where the transaction begins that its guest is in the midst of.
    pub fn cursor(&self) -> Tail {
        self.cursor
    }

    /// It is elsewhere, and nothing is owed: the log is closed here. `switch` is called at a moment at which nobody can look at the
    /// log, neither before nor after.
    pub fn end(mut self, switch: impl FnOnce()) {
        self.has_ended = true;
        self.area.end_taking(self.id, self.beside_guest, switch);
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.area.give_up_taking(self.id);
        }
    }
}

impl JournalArea {
    /// Begins to take a log away whose books were proven wrong, block for block, to its own place. Nothing while a home write of
    /// the host's is in flight, which must not land after what the guest writes there past us from then on.
    pub fn take_distrusted(&self, id: LogId) -> Option<Taking<'_>> {
        let mut taking = self.begin_taking(id, |jcb| {
            jcb.contradiction.is_some()
                && jcb.absorbed.is_empty()
                && !jcb.in_flight.overlaps(&(0..u64::MAX), Some(Writer::Host))
        })?;
        taking.beside_guest = true;
        Some(taking)
    }

    /// Begins to bring an open log home whose guest is gone (the paper's `LOG_OP_RECOVER`). Nothing while a home write is in
    /// flight, or where it is being taken already.
    pub fn take_for_recovery(&self, id: LogId) -> Option<Taking<'_>> {
        let taking = self.begin_taking(id, |jcb| jcb.in_flight.is_empty())?;
        self.with(id, |jcb| {
            if jcb.is_open() {
                jcb.table.set_recovering(true);
            }
        });
        Some(taking)
    }

    /// Begins to hand an open log over to somebody who keeps it elsewhere from now on: what is owed goes home, and the
    /// transaction that the guest is in the midst of goes on there ([`Taking::cursor`]). Nothing, for now or for good, while a
    /// home write is in flight or one is absorbed, or where the log is not open or is kept block for block.
    pub fn take_for_hand_over(&self, id: LogId) -> Option<Taking<'_>> {
        self.begin_taking(id, |jcb| {
            // What is absorbed the guest's tail may pass there as soon as it likes.
            jcb.is_open() && !jcb.table.is_materialise() && jcb.in_flight.is_empty() && jcb.absorbed.is_empty()
        })
    }

    fn begin_taking(&self, id: LogId, may_begin: impl FnOnce(&VmJcb) -> bool) -> Option<Taking<'_>> {
        let cell = self.logs.cell(id)?;
        let cursor = self.with(id, |jcb| {
            let may_begin = !jcb.is_taken && may_begin(jcb);
            jcb.is_taken |= may_begin;
            may_begin.then_some(jcb.cursor)
        });
        Some(Taking::new(self, cell, cursor.flatten()?))
    }

    fn give_up_taking(&self, id: LogId) {
        self.with_in_flight(id, |jcb| {
            jcb.is_taken = false;
            if jcb.is_open() {
                jcb.table.set_recovering(false);
            }
        });
    }

    fn end_taking(&self, id: LogId, beside_guest: bool, switch: impl FnOnce()) {
        let mut switch = Some(switch);
        let mut switch = || switch.take().map_or((), |switch| switch());
        self.with_in_flight(id, |jcb| {
            // Whoever has the log from now on knows nothing of them, and one that lands later may be older than what he writes home.
            assert!(!jcb.in_flight.has_host_writes(), "rule 3: a log goes elsewhere beside home writes of the host's");
            assert!(
                beside_guest || jcb.in_flight.is_empty(),
                "rule 3: a log goes elsewhere beside home writes of its guest's that had to wait"
            );
            switch();
            jcb.is_taken = false;
            jcb.close_books(&self.pages);
        });
        // A log that was forgotten nobody can look at.
        switch();
        self.pages.let_loose_go();
        self.feed_starved();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inflight::HomeOperation;
    use crate::{Holding, LogShape, SuperblockEffect};
    use guest_memory::VmMemory;
    use jbd2::build::SuperblockBuilder;

    /// The log is open, a write of this writer begins while it is taken, and that ends.
    fn ends_beside(writer: Option<Writer>, is_distrusted: bool) {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let area = JournalArea::new(&VmMemory::new(), u64::MAX);
        let shape = LogShape { block_bytes: 4096, log_blocks: 64, home_blocks: 1000 };
        let log = area.make_log(directory.path(), "log", shape, Holding::Copy, Vec::new()).expect("a log");
        let superblock =
            SuperblockBuilder { maxlen: 64, start: 1, sequence: 1, ..SuperblockBuilder::default() }.build();
        assert_eq!(area.superblock_written(log, &superblock).expect("held"), SuperblockEffect::Opened);
        let taking = if is_distrusted {
            area.contradict(log, "another file system is there".to_owned());
            area.take_distrusted(log)
        } else {
            area.take_for_hand_over(log)
        };
        let taking = taking.expect("nothing is in the way");
        if let Some(writer) = writer {
            area.with(log, |jcb| {
                let (candidates, pinned, past) = (Vec::new(), Vec::new(), Vec::new());
                jcb.in_flight.begin(HomeOperation { blocks: 9..10, writer, tainted: false, candidates, pinned, past });
            });
        }
        let mut is_switched = false;
        taking.end(|| is_switched = true);
        assert!(is_switched);
    }

    #[test]
    fn a_log_goes_elsewhere_when_no_home_write_is_under_way() {
        ends_beside(None, false);
        ends_beside(None, true);
        ends_beside(Some(Writer::Guest), true);
    }

    #[test]
    #[should_panic(expected = "rule 3: a log goes elsewhere beside home writes of its guest's")]
    fn not_beside_its_guests() {
        ends_beside(Some(Writer::Guest), false);
    }

    #[test]
    #[should_panic(expected = "rule 3: a log goes elsewhere beside home writes of the host's")]
    fn nor_beside_the_hosts_even_if_its_guest_goes_on() {
        ends_beside(Some(Writer::Host), true);
    }
}
