//! A drive with one arm: a queue from which the request with the shortest positioning time comes next, a cache for
//! writes that is emptied in the same way, and reading ahead.
//!
//! * A write is done when it is in the cache; with no room, or no cache, when the medium has it.
//! * What is in the cache goes to the medium whenever no read waits, and before reads when it is nearly full or a flush
//!   waits. Neighbours go in one transfer.
//! * A flush is done when all that was written before it is on the medium, or in a cache that outlasts a loss of power.
//!   While one waits, nothing younger is written, as where a drive empties its cache for it; or, as SCSI allows, what is
//!   younger goes on in the order of its place until the flush has waited for as long as a request may
//!   ([`SpinningDrive::is_flush_barrier`]).
//! * A read of what is in the cache, or has been read ahead, costs the bus alone. No read waits longer than
//!   [`SpinningDrive::patience_ns`] because others lie closer.

use crate::completion::{Completion, Totals};
use crate::drives::SpinningDrive;
use crate::surface::{Surface, transfer_ns};
use disk_model_client::{Kind, Request};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

/// Neighbours in the cache that go to the medium at once, in bytes.
const TRANSFER_BYTES_MAX: u64 = 1 << 20;

/// Written and not on the medium.
#[derive(Clone, Copy, Debug)]
struct Dirty {
    len: u64,
    sequence: u64,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    request: Request,
    sequence: u64,
    arrived_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Serving {
    /// The request to complete; none for what comes from the cache.
    tag: Option<u64>,
    /// The oldest write that it carries.
    sequence: u64,
    kind: Kind,
    offset: u64,
    len: u64,
    ends_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Flush {
    tag: u64,
    sequence: u64,
    arrived_ns: u64,
}

/// What was read beyond what was asked for.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    from: u64,
    since_ns: u64,
    /// Where it stops by itself.
    limit: u64,
    /// How far it came when the arm was needed elsewhere.
    frozen: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Spinning {
    drive: SpinningDrive,
    surface: Surface,
    waiting: Vec<Waiting>,
    /// Writes that wait for room in the cache, in order of arrival.
    for_room: VecDeque<Waiting>,
    dirty: BTreeMap<u64, Dirty>,
    dirty_bytes: u64,
    flushes: VecDeque<Flush>,
    /// Since when there has been a flush that waits.
    flushing_since_ns: Option<u64>,
    serving: Option<Serving>,
    ahead: Option<Ahead>,
    bus_free_ns: u64,
    /// Completions to come: time, order, tag.
    due: BinaryHeap<Reverse<(u64, u64, u64)>>,
    sequence: u64,
}

impl Spinning {
    pub(crate) fn new(drive: SpinningDrive, seed: u64) -> Self {
        let phase = seeded_random::Random::new(seed).below(drive.revolution_ns);
        Spinning {
            surface: Surface::new(drive, phase),
            drive,
            waiting: Vec::new(),
            for_room: VecDeque::new(),
            dirty: BTreeMap::new(),
            dirty_bytes: 0,
            flushes: VecDeque::new(),
            flushing_since_ns: None,
            serving: None,
            ahead: None,
            bus_free_ns: 0,
            due: BinaryHeap::new(),
            sequence: 0,
        }
    }

    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        let serving = self.serving.map(|serving| serving.ends_ns);
        let due = self.due.peek().map(|Reverse((at, _, _))| *at);
        serving.into_iter().chain(due).min()
    }

    pub(crate) fn advance(&mut self, now_ns: u64, completed: &mut Vec<Completion>, totals: &mut Totals) {
        self.work_until(now_ns, totals);
        while let Some(Reverse((at_ns, _, tag))) = self.due.peek().copied()
            && at_ns <= now_ns
        {
            self.due.pop();
            completed.push(Completion { tag, at_ns });
        }
    }

    pub(crate) fn submit(&mut self, now_ns: u64, request: Request, totals: &mut Totals) {
        self.work_until(now_ns, totals);
        self.sequence += 1;
        let waiting = Waiting { request, sequence: self.sequence, arrived_ns: now_ns };
        match request.kind {
            Kind::Command => self.over_the_bus(now_ns, request.tag, 0),
            Kind::Flush => {
                self.flushes.push_back(Flush { tag: request.tag, sequence: self.sequence, arrived_ns: now_ns });
                self.flushing_since_ns.get_or_insert(now_ns);
                self.finish_flushes(now_ns, totals);
            }
            Kind::Read if self.is_cached(now_ns, request.offset, request.len) => {
                self.over_the_bus(now_ns, request.tag, request.len);
            }
            Kind::Write if self.drive.write_cache_bytes > 0 => {
                self.for_room.push_back(waiting);
                self.take_into_cache(now_ns);
            }
            Kind::Read | Kind::Write => self.waiting.push(waiting),
        }
        self.dispatch(now_ns, totals);
    }

    /// Ends what ends until `now_ns`, and begins what can begin then.
    fn work_until(&mut self, now_ns: u64, totals: &mut Totals) {
        while let Some(serving) = self.serving
            && serving.ends_ns <= now_ns
        {
            let at = serving.ends_ns;
            self.serving = None;
            let end = serving.offset + serving.len;
            self.surface.arrive(end, at);
            if serving.kind == Kind::Read {
                let limit = end.saturating_add(self.drive.read_ahead_bytes).min(self.drive.capacity_bytes).max(end);
                self.ahead = Some(Ahead { from: end, since_ns: at, limit, frozen: None });
            }
            match serving.tag {
                Some(tag) => self.complete(at + self.drive.command_ns, tag),
                None => self.dirty_bytes -= serving.len,
            }
            self.take_into_cache(at);
            self.finish_flushes(at, totals);
            self.dispatch(at, totals);
        }
    }

    fn complete(&mut self, at_ns: u64, tag: u64) {
        self.sequence += 1;
        self.due.push(Reverse((at_ns, self.sequence, tag)));
    }

    fn over_the_bus(&mut self, now_ns: u64, tag: u64, bytes: u64) {
        let takes = self.drive.command_ns + transfer_ns(bytes, self.drive.bus_bytes_per_second);
        self.bus_free_ns = self.bus_free_ns.max(now_ns) + takes;
        self.complete(self.bus_free_ns, tag);
    }

    fn is_cached(&mut self, now_ns: u64, offset: u64, len: u64) -> bool {
        let end = offset + len;
        if let Some(ahead) = &mut self.ahead {
            let read = transfer_bytes(now_ns.saturating_sub(ahead.since_ns), self.drive.media_bytes_per_second);
            let reached = ahead.frozen.unwrap_or_else(|| (ahead.from + read).min(ahead.limit));
            if offset >= ahead.from && end <= reached {
                // A reader that follows keeps it going.
                if ahead.frozen.is_none() {
                    ahead.limit = ahead.limit.max((end + self.drive.read_ahead_bytes).min(self.drive.capacity_bytes));
                }
                return true;
            }
        }
        let mut covered = offset;
        let first = self.dirty.range(..=offset).next_back().map_or(offset, |(&start, _)| start);
        for (&start, dirty) in self.dirty.range(first..end) {
            if start > covered {
                return false;
            }
            covered = covered.max(start + dirty.len);
        }
        covered >= end
    }

    fn take_into_cache(&mut self, now_ns: u64) {
        while let Some(front) = self.for_room.front().copied() {
            let Request { tag, offset, len, .. } = front.request;
            // One that is larger than the cache goes in when it is alone.
            if self.dirty_bytes > 0 && self.dirty_bytes + len > self.drive.write_cache_bytes {
                return;
            }
            self.for_room.pop_front();
            self.dirty_insert(offset, len, front.sequence);
            self.over_the_bus(now_ns, tag, len);
        }
    }

    /// Joins what overlaps, under the age of its oldest part.
    fn dirty_insert(&mut self, offset: u64, len: u64, sequence: u64) {
        let (mut start, mut end, mut oldest) = (offset, offset + len, sequence);
        while let Some((&at, &dirty)) = self.dirty.range(..end).next_back()
            && at + dirty.len > start
        {
            self.dirty.remove(&at);
            self.dirty_bytes -= dirty.len;
            (start, end, oldest) = (start.min(at), end.max(at + dirty.len), oldest.min(dirty.sequence));
        }
        self.dirty_bytes += end - start;
        self.dirty.insert(start, Dirty { len: end - start, sequence: oldest });
    }

    fn finish_flushes(&mut self, now_ns: u64, totals: &mut Totals) {
        while let Some(&Flush { tag, sequence, .. }) = self.flushes.front() {
            let older = |other: u64| other < sequence;
            let in_cache = self.serving.is_some_and(|serving| serving.kind == Kind::Write && older(serving.sequence))
                || self.dirty.values().any(|dirty| older(dirty.sequence));
            let owed = (in_cache && !self.drive.is_cache_durable)
                || self.for_room.iter().any(|waiting| older(waiting.sequence))
                || self.waiting.iter().any(|w| w.request.kind == Kind::Write && older(w.sequence));
            if owed {
                return;
            }
            self.flushes.pop_front();
            if self.drive.is_cache_durable {
                // Behind what is on its way into the cache.
                self.over_the_bus(now_ns, tag, 0);
            } else {
                self.complete(now_ns + self.drive.command_ns, tag);
            }
        }
        if let Some(since) = self.flushing_since_ns.take() {
            totals.flushing_ns += now_ns.saturating_sub(since);
        }
    }

    fn dispatch(&mut self, now_ns: u64, totals: &mut Totals) {
        if self.serving.is_some() {
            return;
        }
        let pressed = !self.flushes.is_empty()
            || !self.for_room.is_empty()
            || self.dirty_bytes * 4 > self.drive.write_cache_bytes * 3;
        let positioning = |offset: u64| self.surface.positioning_ns(now_ns, offset);
        let queued = self
            .waiting
            .iter()
            .enumerate()
            .map(|(index, waiting)| {
                let late = now_ns.saturating_sub(waiting.arrived_ns) > self.drive.patience_ns;
                let order = if late { 0 } else { positioning(waiting.request.offset) };
                ((order, waiting.sequence), index)
            })
            .min();
        let is_barrier = |flush: &&Flush| {
            self.drive.is_flush_barrier || now_ns.saturating_sub(flush.arrived_ns) > self.drive.patience_ns
        };
        let before = self.flushes.front().filter(is_barrier).map_or(u64::MAX, |flush| flush.sequence);
        // Of a run of neighbours, its first.
        let mut run_end = None;
        let firsts = self.dirty.iter().filter(|(_, dirty)| dirty.sequence < before).filter_map(|(&offset, dirty)| {
            let first = run_end != Some(offset);
            run_end = Some(offset + dirty.len);
            first.then_some((offset, dirty.sequence))
        });
        let cached = if queued.is_none() || pressed {
            firsts.map(|(offset, sequence)| ((positioning(offset), sequence), offset)).min()
        } else {
            None
        };
        match (queued, cached) {
            (None, None) => {}
            (Some((order, index)), other) if other.is_none_or(|(cached, _)| order <= cached) => {
                let waiting = self.waiting.swap_remove(index);
                let Request { tag, kind, offset, len } = waiting.request;
                self.serve(now_ns, Some(tag), waiting.sequence, (kind, offset, len), totals);
            }
            (_, Some((_, offset))) => {
                let (mut end, mut oldest) = (offset, u64::MAX);
                while let Some(dirty) = self.dirty.get(&end).copied()
                    && (end == offset || end - offset + dirty.len <= TRANSFER_BYTES_MAX)
                {
                    self.dirty.remove(&end);
                    end += dirty.len;
                    oldest = oldest.min(dirty.sequence);
                }
                self.serve(now_ns, None, oldest, (Kind::Write, offset, end - offset), totals);
            }
            (Some(_), None) => unreachable!("a queued request without a rival is served above"),
        }
    }

    fn serve(
        &mut self,
        now_ns: u64,
        tag: Option<u64>,
        sequence: u64,
        (kind, offset, len): (Kind, u64, u64),
        totals: &mut Totals,
    ) {
        if let Some(ahead) = &mut self.ahead
            && ahead.frozen.is_none()
        {
            let read = transfer_bytes(now_ns.saturating_sub(ahead.since_ns), self.drive.media_bytes_per_second);
            let reached = (ahead.from + read).min(ahead.limit);
            ahead.frozen = Some(reached);
            // That is where the head is.
            self.surface.arrive(reached, now_ns.min(ahead.since_ns + self.surface.transfer_ns(reached - ahead.from)));
        }
        if kind == Kind::Write
            && let Some(ahead) = &self.ahead
            && offset < ahead.limit
            && offset + len > ahead.from
        {
            self.ahead = None;
        }
        let positioning = self.surface.positioning_ns(now_ns, offset);
        let transfer = self.surface.transfer_ns(len);
        totals.transfers += 1;
        totals.positioning_ns += positioning;
        totals.busy_ns += positioning + transfer;
        self.serving = Some(Serving { tag, sequence, kind, offset, len, ends_ns: now_ns + positioning + transfer });
    }
}

fn transfer_bytes(ns: u64, bytes_per_second: u64) -> u64 {
    u64::try_from(u128::from(ns) * u128::from(bytes_per_second) / 1_000_000_000).unwrap_or(u64::MAX)
}
