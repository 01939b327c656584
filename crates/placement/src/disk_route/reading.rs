//! Reads: of storage, and of logs and homes that are not as storage has them.

use super::{DiskRoute, Waiting};
use crate::disk::DiskCounters;
use crate::journals::TraceKind;
use crate::keeper::{HomeRead, LogRead};
use crate::kept_log::KeptLog;
use crate::layout::{HomeRange, LogRange, Piece};
use block_route::segments;
use block_route::{Buffer, DiskOperation, Operation, Plan, Request};
use std::ops::Range;
use std::sync::Arc;

impl DiskRoute {
    pub(super) fn route_read(&mut self, request: &Request<'_>, plan: &mut Plan) {
        DiskCounters::add(&self.counters().read_bytes, request.len);
        self.trace(request.kind, TraceKind::Read, request.offset, request.len);
        let (start, end) = (request.offset, request.offset + request.len);
        let first = self.layout.logs.partition_point(|range| range.end <= start);
        let touches_log = self.layout.logs.get(first).is_some_and(|range| range.start < end);
        if !touches_log && !self.shows_homes(start, end) {
            plan.disk(block_route::whole(request));
            return;
        }
        let mut pieces = Vec::new();
        self.layout.cut(start, end, &mut pieces);
        for piece in pieces {
            let range = piece.range();
            let slices = segments::part(request.segments, range.start - start, range.end - range.start);
            let waiting =
                Waiting { request: request.id, kind: request.kind, piece, slices, rescan: false, is_again: false };
            self.read_piece(waiting, plan);
        }
    }

    /// Whether a file system in this range may have homes elsewhere than on storage.
    fn shows_homes(&self, start: u64, end: u64) -> bool {
        let homes = &self.layout.homes;
        let first = homes.partition_point(|home| home.end <= start);
        homes[first..]
            .iter()
            .take_while(|home| home.start < end)
            .any(|home| self.journals.log(home.log).is_some_and(|log| log.keeper.shows_homes(&log)))
    }

    pub(super) fn read_piece(&mut self, waiting: Waiting, plan: &mut Plan) {
        let log = match waiting.piece {
            Piece::Log(range, ..) => self.journals.log(range.log),
            Piece::Home(home, ..) => self.journals.log(home.log),
            Piece::Plain(..) => None,
        };
        match (log, waiting.piece) {
            (Some(log), Piece::Log(range, ..)) if log.keeper.shows_log(&log) => {
                self.log_read(&log, &range, waiting, plan);
            }
            (Some(log), Piece::Home(home, ..)) if log.keeper.shows_homes(&log) => {
                self.home_read(&log, &home, waiting, plan);
            }
            _ => self.storage_read(&waiting, plan),
        }
    }

    /// A read inside a file system some of whose blocks are not as storage has them.
    fn home_read(&mut self, log: &Arc<KeptLog>, home: &HomeRange, waiting: Waiting, plan: &mut Plan) {
        let (start, end) = (waiting.piece.range().start, waiting.piece.range().end);
        let part = |range: Range<u64>| {
            let (from, to) = (home.start + range.start, home.start + range.end);
            let slices = segments::part(&waiting.slices, from - start, to - from);
            Waiting { piece: Piece::Home(*home, from, to), slices, ..waiting.clone() }
        };
        let mut answer = |range: Range<u64>, bytes: &[u8]| self.answer(&part(range), bytes, plan);
        match log.keeper.home_read(log, start - home.start..end - home.start, &mut answer) {
            HomeRead::Stored(ranges) => ranges.into_iter().for_each(|range| self.storage_read(&part(range), plan)),
            HomeRead::Wait => {
                plan.hold(waiting.request);
                self.behind.push(waiting);
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
    fn log_read(&mut self, log: &Arc<KeptLog>, range: &LogRange, waiting: Waiting, plan: &mut Plan) {
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
            let part =
                Waiting { request: waiting.request, kind: waiting.kind, piece, slices, rescan: false, is_again: false };
            let from = std::mem::replace(&mut at, stop);
            match log.keeper.log_read(log, position, &mut block) {
                Ok(LogRead::Copied) => self.answer(&part, &block[into as usize..], plan),
                Ok(LogRead::Stored) => self.storage_read(&part, plan),
                Ok(LogRead::Wait) => {
                    let slices = segments::part(&waiting.slices, from - start, end - from);
                    plan.hold(waiting.request);
                    self.behind.push(Waiting { piece: Piece::Log(*range, from, end), slices, ..waiting });
                    return;
                }
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
