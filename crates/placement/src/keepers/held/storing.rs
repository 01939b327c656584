//! Blocks of the guest's log that go to their own places on storage after all: there is no memory for them, or their page is wanted.

use super::holder::Held;
use crate::disk::DiskCounters;
use crate::keeper::{Side, Step, Steps, Task};
use crate::log::Log;
use crate::opening::mark_ahead;
use block_route::{Buffer, RequestId};
use std::io;

impl Held {
    /// A log block for which there is no memory goes to its own place on storage.
    pub(super) fn store(&self, log: &Log, position: u32, request: RequestId, buffer: Buffer, steps: &mut Steps) {
        let Some(offset) = log.offset_of(position) else { return steps.fail(request) };
        if let Err(error) = self.mark_ahead(log, &buffer) {
            log::error!("disk {}: {error}", log.home.options.name);
            return steps.fail(request);
        }
        self.inner().stored_in_flight += 1;
        let (request, task) = (Some(request), Task::Stored(position));
        steps.push(Side::Journal, Step::Write { request, offset, content: vec![buffer], task });
    }

    /// A block of the guest's log is about to lie in its own place. Nobody may have read the log so far: its descriptors may lie there, too.
    fn mark_ahead(&self, log: &Log, buffer: &Buffer) -> io::Result<()> {
        let mut head = [0; jbd2::HEADER_BYTES];
        match buffer {
            Buffer::Slice(slice) => slice.copy_out(0, &mut head),
            Buffer::Bytes(bytes) => head.copy_from_slice(&bytes[..jbd2::HEADER_BYTES]),
        }
        self.mark_ahead_of(log, &head)
    }

    /// The same of one that begins so.
    fn mark_ahead_of(&self, log: &Log, head: &[u8]) -> io::Result<()> {
        // What is no control block counts nowhere by itself.
        let Some(header) = jbd2::peek(head) else { return Ok(()) };
        mark_ahead(log, &self.area, header.sequence).map_err(|error| {
            io::Error::new(error.kind(), format!("marking the journal on storage anew failed: {error}"))
        })
    }

    /// A block of the guest's log goes to its own place now, written by us.
    pub(super) fn store_now(&self, log: &Log, position: u32, content: &[u8]) -> io::Result<()> {
        let offset = log.place_of(position)?;
        self.mark_ahead_of(log, content)?;
        log.journal.file.write_all_at(content, offset)?;
        log.journal.set_dirty();
        DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, content.len() as u64);
        Ok(())
    }
}
