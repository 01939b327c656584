//! Reads: of storage, and of logs that are not as storage has them.

use super::{DiskRoute, Waiting};
use crate::disk::DiskCounters;
use crate::journals::TraceKind;
use crate::layout::{LogRange, Piece};
use crate::log::Log;
use block_route::segments;
use block_route::{Buffer, DiskOperation, Operation, Plan, Request};
use std::sync::Arc;

impl DiskRoute {
    pub(super) fn route_read(&mut self, request: &Request<'_>, plan: &mut Plan) {
        DiskCounters::add(&self.counters().read_bytes, request.len);
        self.trace(request.kind, TraceKind::Read, request.offset, request.len);
        let (start, end) = (request.offset, request.offset + request.len);
        let first = self.layout.logs.partition_point(|range| range.end <= start);
        let touches_log = self.layout.logs.get(first).is_some_and(|range| range.start < end);
        if !touches_log {
            plan.disk(block_route::whole(request));
            return;
        }
        let mut pieces = Vec::new();
        self.layout.cut(start, end, &mut pieces);
        for piece in pieces {
            let range = piece.range();
            let slices = segments::part(request.segments, range.start - start, range.end - range.start);
            let waiting = Waiting { request: request.id, kind: request.kind, piece, slices, rescan: false };
            match piece {
                Piece::Log(log_range, ..) => match self.journals.log(log_range.log) {
                    Some(log) if log.keeper.shows_log(&log) => self.log_read(&log, &log_range, waiting, plan),
                    _ => self.storage_read(&waiting, plan),
                },
                _ => self.storage_read(&waiting, plan),
            }
        }
    }

    fn storage_read(&self, waiting: &Waiting, plan: &mut Plan) {
        let range = waiting.piece.range();
        plan.disk(DiskOperation {
            request: Some(waiting.request),
            ticket: None,
            operation: Operation::Read,
            offset: range.start,
            len: range.end - range.start,
            buffers: waiting.slices.iter().copied().map(Buffer::Slice).collect(),
        });
    }

    /// A read inside a log that is not as storage has it, block by block.
    fn log_read(&mut self, log: &Arc<Log>, range: &LogRange, waiting: Waiting, plan: &mut Plan) {
        let block_bytes = u64::from(range.block_bytes);
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let mut block = vec![0; block_bytes as usize];
        let mut at = start;
        while at < end {
            let index = (at - range.start) / block_bytes;
            let position = range.first_position + index as u32;
            let into = (at - range.start) % block_bytes;
            let stop = end.min(range.start + (index + 1) * block_bytes);
            let slices = segments::part(&waiting.slices, at - start, stop - at);
            let piece = Piece::Log(*range, at, stop);
            let part = Waiting { request: waiting.request, kind: waiting.kind, piece, slices, rescan: false };
            at = stop;
            match log.keeper.log_read(log, position, &mut block) {
                Ok(true) => self.answer(&part, &block[into as usize..], plan),
                Ok(false) => self.storage_read(&part, plan),
                Err(error) => {
                    log::error!(
                        "disk {}: reading log block {position} failed: {error}",
                        self.journals.disk(self.disk).options.name
                    );
                    plan.fail(part.request);
                }
            }
        }
    }

    /// Copies bytes of ours into a read's guest memory.
    fn answer(&self, waiting: &Waiting, bytes: &[u8], plan: &mut Plan) {
        let mut at = 0;
        for slice in &waiting.slices {
            if let Some(memory) = &self.memory
                && let Err(error) = memory.prepare_write(slice)
            {
                log::error!("disk {}: a read fails: {error}", self.journals.disk(self.disk).options.name);
                return plan.fail(waiting.request);
            }
            slice.copy_in(0, &bytes[at..at + slice.len()]);
            at += slice.len();
        }
    }
}
