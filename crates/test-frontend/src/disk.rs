//! An ordinary disk for tests: reads, writes and the like, one or many at a time.

use crate::Result;
use crate::front_end::{ANSWER_TIMEOUT, FrontEnd};
use crate::queue::Descriptor;
use std::collections::HashMap;
use std::time::Instant;

/// VIRTIO_BLK_S_OK.
pub const STATUS_OK: u8 = 0;
/// VIRTIO_BLK_S_IOERR.
pub const STATUS_IO_ERROR: u8 = 1;
/// VIRTIO_BLK_S_UNSUPP.
pub const STATUS_UNSUPPORTED: u8 = 2;
/// What the status byte holds before the device answers.
pub const STATUS_UNANSWERED: u8 = 0xee;

const HEADER_BYTES: u64 = 16;
/// Header, status and room for ranges, per request in flight.
const SLOT_BYTES: u64 = 1024;
const STATUS_AT: u64 = 1023;

/// What a request carries.
#[derive(Clone, Debug)]
pub enum Transfer {
    /// Read into guest memory: (address, length in bytes) each.
    Read(Vec<(u64, u32)>),
    /// Write from guest memory: (address, length in bytes) each.
    Write(Vec<(u64, u32)>),
    /// Flush.
    Flush,
    /// Discard ranges: (sector, sectors, flags) each.
    Discard(Vec<(u64, u32, u32)>),
    /// Zero ranges: (sector, sectors, flags) each.
    WriteZeroes(Vec<(u64, u32, u32)>),
    /// The serial number into guest memory: (address, length in bytes) each.
    Identity(Vec<(u64, u32)>),
    /// Any type with no data.
    Other(u32),
}

/// An answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Which one, as [`TestDisk::submit`] named it.
    pub token: u64,
    /// Its status byte.
    pub status: u8,
    /// Bytes the device says it wrote.
    pub written: u32,
}

/// A started device and its driver.
pub struct TestDisk {
    /// The connection, for tests that do something unusual.
    pub front_end: FrontEnd,
    slots: Vec<Vec<u64>>,
    in_flight: HashMap<(usize, u16), (u64, u64)>,
    next_token: u64,
    indirect: bool,
    buffer: (u64, u64),
}

impl TestDisk {
    /// A driver on a connection whose device has been started.
    pub fn new(front_end: FrontEnd) -> Self {
        let slots = front_end
            .queues
            .iter()
            .map(|queue| queue.options().size)
            .collect::<Vec<_>>()
            .into_iter()
            .map(|size| (0..size).map(|_| front_end.ram.take(SLOT_BYTES, SLOT_BYTES)).collect())
            .collect();
        TestDisk { front_end, slots, in_flight: HashMap::new(), next_token: 0, indirect: false, buffer: (0, 0) }
    }

    /// Whether requests go through indirect tables.
    pub fn set_indirect(&mut self, indirect: bool) {
        self.indirect = indirect;
    }

    /// Where the status bytes of requests are that are not in flight.
    pub fn each_status(&self, look: impl Fn(u64)) {
        self.slots.iter().flatten().for_each(|slot| look(slot + STATUS_AT));
    }

    /// Requests without an answer.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Makes a request available without telling the device; [`TestDisk::kick`] does. Returns its name.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn submit(&mut self, queue_index: usize, sector: u64, transfer: &Transfer) -> Result<u64> {
        let slot = self.slots[queue_index].pop().ok_or("as many requests are in flight as there are descriptors")?;
        let ram = self.front_end.ram.clone();
        let kind = match transfer {
            Transfer::Read(_) => 0,
            Transfer::Write(_) => 1,
            Transfer::Flush => 4,
            Transfer::Identity(_) => 8,
            Transfer::Discard(_) => 11,
            Transfer::WriteZeroes(_) => 13,
            Transfer::Other(kind) => *kind,
        };
        ram.put(slot, u32::to_le(kind));
        ram.put(slot + 4, 0u32);
        ram.put(slot + 8, sector.to_le());
        ram.put(slot + STATUS_AT, STATUS_UNANSWERED);
        let mut chain = vec![Descriptor::readable(slot, HEADER_BYTES as u32)];
        match transfer {
            Transfer::Read(segments) | Transfer::Identity(segments) => {
                chain.extend(segments.iter().map(|(address, len)| Descriptor::writable(*address, *len)));
            }
            Transfer::Write(segments) => {
                chain.extend(segments.iter().map(|(address, len)| Descriptor::readable(*address, *len)));
            }
            Transfer::Discard(ranges) | Transfer::WriteZeroes(ranges) => {
                let at = slot + HEADER_BYTES;
                for (position, (sector, sectors, flags)) in ranges.iter().enumerate() {
                    let range = at + 16 * position as u64;
                    ram.put(range, sector.to_le());
                    ram.put(range + 8, sectors.to_le());
                    ram.put(range + 12, flags.to_le());
                }
                chain.push(Descriptor::readable(at, 16 * ranges.len() as u32));
            }
            Transfer::Flush | Transfer::Other(_) => {}
        }
        chain.push(Descriptor::writable(slot + STATUS_AT, 1));
        let table = if self.indirect { Some(self.front_end.ram.take(16 * chain.len() as u64, 16)) } else { None };
        let queue = &mut self.front_end.queues[queue_index];
        let head = match table {
            Some(table) => queue.add_indirect(table, &chain),
            None => queue.add(&chain),
        };
        let Some(head) = head else {
            self.slots[queue_index].push(slot);
            return Err("the descriptor table is full".into());
        };
        let token = self.next_token;
        self.next_token += 1;
        self.in_flight.insert((queue_index, head), (token, slot));
        Ok(token)
    }

    /// Shows the device everything submitted to a queue, in one kick.
    ///
    /// # Errors
    /// When the kick cannot be written.
    pub fn kick(&mut self, queue_index: usize) -> Result<()> {
        let queue = &mut self.front_end.queues[queue_index];
        queue.publish();
        queue.kick()?;
        Ok(())
    }

    /// Takes the answers that are there.
    ///
    /// # Errors
    /// When the device answers what was not asked.
    pub fn answers(&mut self, queue_index: usize) -> Result<Vec<Answer>> {
        let mut answers = Vec::new();
        while let Some((head, written)) = self.front_end.queues[queue_index].take_used() {
            let (token, slot) = self.in_flight.remove(&(queue_index, head)).ok_or_else(|| {
                format!("the device answered descriptor {head} of queue {queue_index}, not in flight")
            })?;
            self.slots[queue_index].push(slot);
            answers.push(Answer { token, status: self.front_end.ram.get(slot + STATUS_AT), written });
        }
        Ok(answers)
    }

    /// Waits, by interrupt, until nothing of a queue is in flight.
    ///
    /// # Errors
    /// When the device does not answer everything in time.
    pub fn wait_all(&mut self, queue_index: usize) -> Result<Vec<Answer>> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut all = Vec::new();
        loop {
            all.extend(self.answers(queue_index)?);
            if !self.in_flight.keys().any(|(queue, _)| *queue == queue_index) {
                return Ok(all);
            }
            if self.front_end.queues[queue_index].enable_interrupts() {
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.front_end.queues[queue_index].wait(left)? {
                return Err(format!(
                    "{} requests of queue {queue_index} were not answered within {ANSWER_TIMEOUT:?}",
                    self.in_flight.len()
                )
                .into());
            }
        }
    }

    /// One request on queue 0, to its end. Returns its status.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn request(&mut self, sector: u64, transfer: &Transfer) -> Result<u8> {
        Ok(self.request_on(0, sector, transfer)?.status)
    }

    /// One request on any queue, to its end.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn request_on(&mut self, queue_index: usize, sector: u64, transfer: &Transfer) -> Result<Answer> {
        let token = self.submit(queue_index, sector, transfer)?;
        self.kick(queue_index)?;
        let answers = self.wait_all(queue_index)?;
        Ok(*answers.iter().find(|answer| answer.token == token).ok_or("the request was not answered")?)
    }

    /// A buffer of at least `len` bytes, page-aligned, reused by the next call.
    fn buffer(&mut self, len: u64) -> u64 {
        if self.buffer.1 < len {
            self.buffer = (self.front_end.ram.take(len, 4096), len);
        }
        self.buffer.0
    }

    /// Writes bytes at an offset of the disk (both multiples of 512). Returns the status.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<u8> {
        let address = self.buffer(bytes.len() as u64);
        self.front_end.ram.write(address, bytes);
        self.request(offset / 512, &Transfer::Write(vec![(address, bytes.len() as u32)]))
    }

    /// Reads bytes at an offset of the disk (both multiples of 512). Returns the status with them.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<(u8, Vec<u8>)> {
        let address = self.buffer(len as u64);
        self.front_end.ram.write(address, &vec![0xa5; len]);
        let status = self.request(offset / 512, &Transfer::Read(vec![(address, len as u32)]))?;
        Ok((status, self.front_end.ram.read(address, len)))
    }

    /// Flushes. Returns the status.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn flush(&mut self) -> Result<u8> {
        self.request(0, &Transfer::Flush)
    }

    /// The serial number, without the zeros behind it.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn identity(&mut self) -> Result<String> {
        let address = self.buffer(20);
        self.front_end.ram.write(address, &[0xa5; 20]);
        let status = self.request(0, &Transfer::Identity(vec![(address, 20)]))?;
        if status != STATUS_OK {
            return Err(format!("the serial number was refused with status {status}").into());
        }
        let bytes = self.front_end.ram.read(address, 20);
        let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8(bytes[..len].to_vec())?)
    }
}
