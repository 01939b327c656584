//! The VMM moves its guest elsewhere: each page that is written here is marked in its log.
//!
//! What keeps a page from staying behind:
//!
//! * a mark follows what it is for, since the VMM takes it away and copies the page at any moment;
//! * what a request has written is marked before the used ring says that it is done: a worker that dies before has the request in
//!   flight still, and the next one does it again and marks it; a worker that dies after has marked it;
//! * the used ring is marked after it was written. A worker may die between the two, so the next one begins with that mark;
//! * a request's buffers are marked whole, whatever came of it. Those that were taken before logging began are, too: they are
//!   remembered wherever a VMM may ask.

use super::Worker;
use crate::config_space::LOG_ALL;
use block_route::Route;
use guest_memory::{DirtyLog, MemorySlice};

impl<R: Route + ?Sized> Worker<R> {
    /// From now on marks go to this log.
    pub(crate) fn set_log(&mut self, log: DirtyLog) {
        self.log = Some(log);
        self.mark_all_used();
    }

    fn marks(&self) -> Option<&DirtyLog> {
        self.log.as_ref().filter(|_| self.features & LOG_ALL != 0)
    }

    /// Whoever served these rings before may have died between a used ring and its mark.
    pub(super) fn mark_all_used(&mut self) {
        for position in 0..self.running.len() {
            self.mark_used(self.running[position]);
        }
    }

    /// Something may have been written to the used ring.
    pub(super) fn mark_used(&mut self, index: u16) {
        let Some(log) = self.marks() else { return };
        let ring = &self.rings[usize::from(index)];
        let is_marked = ring.running.as_ref().is_none_or(|running| running.mark_used(log, ring.addresses.used_log));
        self.complain_unless(is_marked);
    }

    /// A request of this ring has written this, and perhaps these buffers.
    pub(super) fn mark_written(&mut self, index: u16, status_byte: &MemorySlice, buffers: &[MemorySlice]) {
        let Some(log) = self.marks() else { return };
        let Some(table) = &self.table else { return };
        debug_assert!(usize::from(index) < self.rings.len());
        let is_marked =
            buffers.iter().chain([status_byte]).fold(true, |all, slice| all & table.mark_written(slice, log));
        self.complain_unless(is_marked);
    }

    fn complain_unless(&mut self, is_marked: bool) {
        if is_marked {
            return;
        }
        if let Some(count) = self.log_limit.next() {
            log::error!(
                "disk {}: the VMM's log has no place for a page that was written: cancel the migration ({count} such messages so far)",
                self.name
            );
        }
        self.observer.fault(
            "the VMM's log has no place for a page that was written, so that page would be missing where its guest is moved to: cancel the \
             migration",
        );
    }
}
