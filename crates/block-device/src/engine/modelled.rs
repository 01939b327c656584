//! Completions that wait for a disk model: the bytes have moved, and the guest hears of it when the modelled disk would
//! have been done.

use super::Event;
use block_route::{DiskOperation, Operation, RequestId, Ticket};
use disk_model_client::{Client, Inbox, Kind, Request};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

/// Who hears of an operation.
type Waiter = (Option<RequestId>, Option<Ticket>);

/// See the module.
pub(super) struct Modelled {
    client: Arc<Client>,
    inbox: Inbox,
    delayed: HashMap<u64, Waiter>,
    next_tag: u64,
    tags: Vec<u64>,
}

impl Modelled {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Modelled { client, inbox: Inbox::default(), delayed: HashMap::new(), next_tag: 0, tags: Vec::new() }
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.client.as_fd().as_raw_fd()
    }

    pub(super) fn under_way(&self) -> usize {
        self.delayed.len()
    }

    /// Begins an operation whose bytes have moved; gives it back if the model does not take it.
    pub(super) fn delay(&mut self, operation: DiskOperation) -> Result<(), (DiskOperation, io::Error)> {
        let kind = match operation.operation {
            Operation::Read => Kind::Read,
            Operation::Write => Kind::Write,
            Operation::Flush => Kind::Flush,
            Operation::Discard | Operation::WriteZeroes { .. } => Kind::Command,
        };
        let (offset, len) = if kind == Kind::Flush { (0, 0) } else { (operation.offset, operation.len) };
        self.next_tag += 1;
        let request = Request { tag: self.next_tag, kind, offset, len };
        if let Err(error) = self.client.submit(request) {
            return Err((operation, error));
        }
        self.delayed.insert(self.next_tag, (operation.request, operation.ticket));
        Ok(())
    }

    /// Appends what the model has completed.
    pub(super) fn take_completed(&mut self, ready: &mut impl Extend<Event>) -> io::Result<()> {
        let result = self.client.completed(&mut self.inbox, &mut self.tags);
        let delayed = &mut self.delayed;
        ready.extend(self.tags.drain(..).filter_map(|tag| delayed.remove(&tag)).map(done));
        result
    }

    /// Everything, now, in the order in which it began.
    pub(super) fn release_all(&mut self) -> Vec<Event> {
        let mut all: Vec<(u64, Waiter)> = self.delayed.drain().collect();
        all.sort_unstable_by_key(|(tag, _)| *tag);
        all.into_iter().map(|(_, waiter)| done(waiter)).collect()
    }
}

fn done((request, ticket): Waiter) -> Event {
    Event::Done { request, ticket, result: Ok(()) }
}
