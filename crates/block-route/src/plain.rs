//! A disk without a journal of ours: every request goes to storage as it is.

use crate::contract::{Buffer, DiskOperation, Operation, Plan, Request, RequestKind, Route, Start, Ticket};
use guest_memory::MemoryTable;
use std::io;
use std::sync::Arc;

/// Sends everything to storage and honours every flush.
#[derive(Debug, Default)]
pub struct PlainRoute;

/// The operation that carries out a request as it is.
pub fn whole(request: &Request<'_>) -> DiskOperation {
    let operation = match request.kind {
        RequestKind::Read => Operation::Read,
        RequestKind::Write => Operation::Write,
        RequestKind::Flush => Operation::Flush,
        RequestKind::Discard => Operation::Discard,
        RequestKind::WriteZeroes { unmap } => Operation::WriteZeroes { unmap },
    };
    DiskOperation {
        request: Some(request.id),
        ticket: None,
        operation,
        offset: request.offset,
        len: request.len,
        buffers: request.segments.iter().copied().map(Buffer::Slice).collect(),
    }
}

impl Route for PlainRoute {
    fn started(&mut self, _start: Start, _memory: &Arc<MemoryTable>) -> io::Result<()> {
        Ok(())
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        plan.disk(whole(request));
    }

    fn end_of_pass(&mut self, _plan: &mut Plan) {}

    fn disk_done(&mut self, _ticket: Ticket, _result: io::Result<()>, _plan: &mut Plan) {}
}
