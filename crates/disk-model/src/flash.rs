//! A drive without an arm: some commands at once, a bus for each direction, a flush that waits for what was written.

use crate::completion::{Completion, Totals};
use crate::drives::FlashDrive;
use crate::surface::transfer_ns;
use disk_model_client::{Kind, Request};
use seeded_random::Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A flush with nothing to do, in ns.
const IDLE_FLUSH_NS: u64 = 20_000;

#[derive(Clone, Debug)]
pub(crate) struct Flash {
    drive: FlashDrive,
    dice: Random,
    /// When each of the commands served at once ends.
    slots: BinaryHeap<Reverse<u64>>,
    read_bus_free_ns: u64,
    write_bus_free_ns: u64,
    writes_end_ns: u64,
    written_since_flush: bool,
    flush_ends_ns: u64,
    /// Completions to come: time, order of arrival, tag.
    due: BinaryHeap<Reverse<(u64, u64, u64)>>,
    sequence: u64,
}

impl Flash {
    pub(crate) fn new(drive: FlashDrive, seed: u64) -> Self {
        Flash {
            slots: (0..drive.queue_depth.max(1)).map(|_| Reverse(0)).collect(),
            drive,
            dice: Random::new(seed),
            read_bus_free_ns: 0,
            write_bus_free_ns: 0,
            writes_end_ns: 0,
            written_since_flush: false,
            flush_ends_ns: 0,
            due: BinaryHeap::new(),
            sequence: 0,
        }
    }

    /// A latency, strayed.
    fn strayed(&mut self, ns: u64) -> u64 {
        let range = ns * self.drive.jitter_percent / 100;
        ns - range + self.dice.below(2 * range + 1)
    }

    pub(crate) fn submit(&mut self, now_ns: u64, request: Request, totals: &mut Totals) {
        let at = match request.kind {
            Kind::Read | Kind::Write => {
                let Reverse(free) = self.slots.pop().unwrap_or(Reverse(0));
                let start = now_ns.max(free);
                let read = request.kind == Kind::Read;
                let latency = self.strayed(if read { self.drive.read_ns } else { self.drive.write_ns });
                let (bus, speed) = if read {
                    (&mut self.read_bus_free_ns, self.drive.read_bytes_per_second)
                } else {
                    (&mut self.write_bus_free_ns, self.drive.write_bytes_per_second)
                };
                let transfer = transfer_ns(request.len, speed);
                *bus = start.max(*bus) + transfer;
                let end = (start + latency).max(*bus);
                self.slots.push(Reverse(end));
                if !read {
                    self.writes_end_ns = self.writes_end_ns.max(end);
                    self.written_since_flush = true;
                }
                totals.transfers += 1;
                totals.busy_ns += transfer;
                end
            }
            Kind::Flush => {
                let start = now_ns.max(self.writes_end_ns).max(self.flush_ends_ns);
                let takes = if self.written_since_flush { self.strayed(self.drive.flush_ns) } else { IDLE_FLUSH_NS };
                self.written_since_flush = false;
                // What an earlier flush waits for is waited for once.
                totals.flushing_ns += (start + takes).saturating_sub(now_ns.max(self.flush_ends_ns));
                self.flush_ends_ns = start + takes;
                totals.busy_ns += takes;
                self.flush_ends_ns
            }
            Kind::Command => now_ns + IDLE_FLUSH_NS,
        };
        self.sequence += 1;
        self.due.push(Reverse((at, self.sequence, request.tag)));
    }

    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        self.due.peek().map(|Reverse((at, _, _))| *at)
    }

    pub(crate) fn advance(&mut self, now_ns: u64, completed: &mut Vec<Completion>) {
        while let Some(Reverse((at_ns, _, tag))) = self.due.peek().copied()
            && at_ns <= now_ns
        {
            self.due.pop();
            completed.push(Completion { tag, at_ns });
        }
    }
}
