//! A closed loop: a number of requests in flight, each answered one followed by the next.

use crate::front_end::FrontEnd;
use crate::histogram::Histogram;
use crate::queue::{Descriptor, descriptor_flags};
use crate::{ANSWER_TIMEOUT, Result, STATUS_OK};
use seeded_random::Random;
use std::time::{Duration, Instant};

/// What to do and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Reads at random places.
    RandomRead,
    /// Writes at random places.
    RandomWrite,
    /// Reads one after the other.
    SequentialRead,
    /// Writes one after the other.
    SequentialWrite,
}

impl Pattern {
    fn writes(self) -> bool {
        matches!(self, Pattern::RandomWrite | Pattern::SequentialWrite)
    }

    fn random(self) -> bool {
        matches!(self, Pattern::RandomRead | Pattern::RandomWrite)
    }
}

/// How to load a disk.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// What and where.
    pub pattern: Pattern,
    /// Requests in flight.
    pub depth: u16,
    /// Bytes of each; a multiple of 512.
    pub block_bytes: u32,
    /// The part of the disk that is used, from its beginning, in bytes.
    pub span_bytes: u64,
    /// How long to run.
    pub duration: Duration,
    /// Of the random places.
    pub seed: u64,
    /// Which queue.
    pub queue: usize,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct LoadResult {
    /// Requests answered.
    pub requests: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Time from the first submission to the last answer.
    pub elapsed: Duration,
    /// From submission to answer, in nanoseconds.
    pub latency: Histogram,
    /// Requests that did not end well.
    pub failed: u64,
}

impl LoadResult {
    /// Requests per second.
    pub fn requests_per_second(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64()
    }
}

struct Slot {
    header: u64,
    status: u64,
    submitted: Instant,
}

/// Runs a closed loop on a started device. Every request is header, data and status through an indirect table, as
/// Linux sends them; the driver sleeps when there is no answer. The queue's descriptors are overwritten.
///
/// # Errors
/// When the device does not answer in time, or the options do not fit the ring.
pub fn run_load(front_end: &mut FrontEnd, options: LoadOptions) -> Result<LoadResult> {
    let blocks = options.span_bytes / u64::from(options.block_bytes);
    let size = front_end.queues[options.queue].options().size;
    if blocks == 0 || options.depth == 0 || options.depth > size {
        return Err("the load does not fit the disk or the ring".into());
    }
    let mut random = Random::new(options.seed);
    let mut position = 0;
    let mut next_sector = || {
        let block = if options.pattern.random() {
            random.below(blocks)
        } else {
            position += 1;
            (position - 1) % blocks
        };
        block * u64::from(options.block_bytes / 512)
    };

    let ram = front_end.ram.clone();
    let queue = &mut front_end.queues[options.queue];
    let start = Instant::now();
    let mut slots = Vec::new();
    for index in 0..options.depth {
        let data = ram.take(u64::from(options.block_bytes), 4096);
        ram.write(data, &vec![index as u8 ^ 0x5a; options.block_bytes as usize]);
        let header = ram.take(64, 64);
        let (table, status) = (ram.take(64, 64), header + 32);
        let kind: u32 = options.pattern.writes().into();
        ram.put(header, kind.to_le());
        ram.put(header + 4, 0u32);
        let data = if options.pattern.writes() {
            Descriptor::readable(data, options.block_bytes)
        } else {
            Descriptor::writable(data, options.block_bytes)
        };
        queue.put_table(table, &[Descriptor::readable(header, 16), data, Descriptor::writable(status, 1)]);
        queue.put_descriptor(index, Descriptor { address: table, len: 48, flags: descriptor_flags::INDIRECT, next: 0 });
        slots.push(Slot { header, status, submitted: start });
    }

    let mut result =
        LoadResult { requests: 0, bytes: 0, elapsed: Duration::ZERO, latency: Histogram::default(), failed: 0 };
    let start = Instant::now();
    let deadline = start + options.duration;
    let mut in_flight = options.depth;
    for (index, slot) in slots.iter_mut().enumerate() {
        ram.put(slot.header + 8, next_sector().to_le());
        ram.put(slot.status, 0xffu8);
        slot.submitted = start;
        queue.make_available(index as u16);
    }
    queue.publish();
    queue.kick()?;
    while in_flight > 0 {
        let mut now = None;
        let mut more = false;
        while let Some((head, _)) = queue.take_used_keep() {
            let now = *now.get_or_insert_with(Instant::now);
            let slot = slots.get_mut(usize::from(head)).ok_or("the device answered what was not asked")?;
            result.latency.add((now - slot.submitted).as_nanos() as u64);
            result.requests += 1;
            if ram.get::<u8>(slot.status) != STATUS_OK {
                result.failed += 1;
            }
            if now < deadline {
                ram.put(slot.header + 8, next_sector().to_le());
                ram.put(slot.status, 0xffu8);
                slot.submitted = now;
                queue.make_available(head);
                more = true;
            } else {
                in_flight -= 1;
            }
        }
        if more {
            queue.publish();
            queue.kick()?;
        }
        if in_flight > 0 && !queue.enable_interrupts() {
            if !queue.wait(ANSWER_TIMEOUT)? {
                return Err(format!("{in_flight} requests were not answered within {ANSWER_TIMEOUT:?}").into());
            }
            queue.disable_interrupts();
        }
    }
    result.elapsed = start.elapsed();
    result.bytes = result.requests * u64::from(options.block_bytes);
    Ok(result)
}
