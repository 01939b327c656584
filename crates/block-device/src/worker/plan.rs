//! Carrying out a route's plan, and completing requests.

use super::Worker;
use crate::tracker::{ChainKind, ChainState, Settled};
use block_route::{PlanAction, RequestId, Route, Status, Ticket};
use std::io;
use std::time::Instant;

impl<R: Route + ?Sized> Worker<R> {
    /// An operation of the disk engine is done.
    pub(super) fn operation_done(
        &mut self,
        request: Option<RequestId>,
        ticket: Option<Ticket>,
        result: io::Result<()>,
    ) {
        if let Err(error) = &result
            && let Some(count) = self.log_limit.next()
        {
            log::error!("disk {}: I/O on {} failed: {error} ({count} so far)", self.name, self.image.path().display());
        }
        if let Some(request) = request {
            let status = if result.is_ok() { Status::Ok } else { Status::IoError };
            self.tracker.release(request, status);
        }
        if let Some(ticket) = ticket {
            self.route.disk_done(ticket, result, &mut self.plan);
        }
    }

    fn record_latency(&self, state: &ChainState, now: Instant) {
        let latencies = &self.counters.latencies;
        let time = now.saturating_duration_since(state.taken);
        match state.kind {
            ChainKind::Read => &latencies.read,
            ChainKind::Write => &latencies.write,
            ChainKind::Flush => &latencies.flush,
            ChainKind::Discard => &latencies.discard,
        }
        .record(time);
        if state.is_commit {
            latencies.commit.record(time);
        }
    }

    /// Carries out what the route has planned and completes what waits for nothing any more, until there is neither.
    pub(super) fn carry_out(&mut self) {
        // One look at the clock for all that is answered here, and none where nothing is.
        let mut now = None;
        loop {
            while let Some(request) = self.plan.commits.pop() {
                self.tracker.note_commit(request);
            }
            // Taken out and put back, to keep its memory.
            let mut actions = std::mem::take(&mut self.plan.actions);
            for action in actions.drain(..) {
                match action {
                    PlanAction::Disk(operation) => {
                        if let Some(request) = operation.request {
                            self.tracker.hold(request);
                        }
                        self.engine.submit(operation);
                    }
                    PlanAction::Hold(request) => self.tracker.hold(request),
                    PlanAction::Release(request, status) => self.tracker.release(request, status),
                }
            }
            if self.plan.actions.is_empty() {
                self.plan.actions = actions;
            }
            while let Some(settled) = self.tracker.settle_one() {
                if let Settled::Chain(chain) = settled {
                    if self.tracker.take_flush_after(chain) {
                        self.flush_after.push_back(chain);
                    } else {
                        let (state, status) = self.tracker.finish(chain);
                        self.record_latency(&state, *now.get_or_insert_with(Instant::now));
                        self.answer_chain(&state, status);
                    }
                }
            }
            if self.flush_after.is_empty() && self.plan.actions.is_empty() {
                return;
            }
            while let Some(chain) = self.flush_after.pop_front() {
                self.route_flush_after(chain);
            }
            self.route.end_of_pass(&mut self.plan);
        }
    }
}
