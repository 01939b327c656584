//! What is in a trace: counts, bytes, sequentiality, footprint, the journal's share.
//!
//! Memory grows with the number of disks and with the footprint up to a bound, never with the trace's length.

use crate::{Kind, Names, Record};
use serde::Serialize;
use std::collections::HashMap;

/// The footprint's unit: a 4 KiB block counts as touched as a whole.
pub const FOOTPRINT_UNIT_BYTES: u64 = 4096;

// A chunk covers 4096 units (16 MiB) in 512 bytes.
const CHUNK_WORDS: usize = 64;
// 256 Ki chunks: 4 TiB of dense footprint, 128 MiB of memory.
const CHUNKS_MAX: usize = 256 * 1024;

/// Requests and bytes of one kind.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq, Eq)]
pub struct Count {
    /// Requests.
    pub requests: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The summary of one VM's disk.
#[derive(Clone, Debug, Serialize)]
pub struct DiskSummary {
    /// The VM's name.
    pub vm: String,
    /// The disk's name.
    pub disk: String,
    /// Its size where the trace knows it, else 0.
    pub capacity_bytes: u64,
    /// Reads.
    pub read: Count,
    /// All writes: home, journal and zeroes.
    pub write: Count,
}

/// The summary of a trace.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// All requests.
    pub requests: u64,
    /// From the first request to the last, in seconds.
    pub seconds: f64,
    /// Per kind.
    pub read: Count,
    /// Writes to their home.
    pub home: Count,
    /// Writes to the journal.
    pub journal: Count,
    /// Flushes.
    pub flush: Count,
    /// Discards.
    pub discard: Count,
    /// Writes of zeroes.
    pub write_zeroes: Count,
    /// Share of the written bytes that went to a journal.
    pub journal_share: f64,
    /// Share of the reads and writes that are writes.
    pub write_ratio: f64,
    /// Share of the reads that begin where the last request of the disk ended.
    pub sequential_reads: f64,
    /// The same of the writes.
    pub sequential_writes: f64,
    /// Bytes touched at least once by reads or writes, in units of 4 KiB.
    pub footprint_bytes: u64,
    /// Bytes written at least once, in units of 4 KiB.
    pub written_footprint_bytes: u64,
    /// Whether the footprint went over what is tracked exactly and is a lower bound.
    pub footprint_is_lower_bound: bool,
    /// Last byte touched plus one, over all disks.
    pub end_of_addresses: u64,
    /// Records earlier than the one before them.
    pub steps_back_in_time: u64,
    /// Per disk.
    pub disks: Vec<DiskSummary>,
}

#[derive(Default)]
struct Footprint {
    chunks: HashMap<(u16, u64), Box<[u64; CHUNK_WORDS]>>,
    units: u64,
    overflowed: bool,
}

impl Footprint {
    fn touch(&mut self, disk: u16, address: u64, length: u64) {
        if length == 0 || self.overflowed {
            return;
        }
        let mut unit = address / FOOTPRINT_UNIT_BYTES;
        let last = address.saturating_add(length - 1) / FOOTPRINT_UNIT_BYTES;
        let per_chunk = CHUNK_WORDS as u64 * 64;
        while unit <= last {
            let chunk = unit / per_chunk;
            if self.chunks.len() >= CHUNKS_MAX && !self.chunks.contains_key(&(disk, chunk)) {
                self.overflowed = true;
                return;
            }
            let bits = self.chunks.entry((disk, chunk)).or_insert_with(|| Box::new([0; CHUNK_WORDS]));
            let end = last.min(chunk * per_chunk + (per_chunk - 1));
            // Word by word, so that a request of a terabyte is not a loop over its blocks.
            while unit <= end {
                let within = unit % per_chunk;
                let (word, bit) = ((within / 64) as usize, within % 64);
                let count = (64 - bit).min(end - unit + 1);
                let mask = if count == 64 { u64::MAX } else { ((1u64 << count) - 1) << bit };
                self.units += u64::from((mask & !bits[word]).count_ones());
                bits[word] |= mask;
                unit += count;
            }
        }
    }
}

#[derive(Clone, Copy, Default)]
struct PerDisk {
    end: u64,
    read: Count,
    write: Count,
}

/// Adds records up.
#[derive(Default)]
pub struct Summariser {
    first_ns: Option<u64>,
    last_ns: u64,
    previous_ns: u64,
    back: u64,
    counts: [Count; 6],
    sequential: [u64; 2],
    touched: Footprint,
    written: Footprint,
    end: u64,
    disks: Vec<PerDisk>,
}

impl Summariser {
    /// Nothing seen yet.
    pub fn new() -> Summariser {
        Summariser::default()
    }

    /// Adds a record.
    pub fn add(&mut self, record: &Record) {
        let first = *self.first_ns.get_or_insert(record.time_ns);
        self.first_ns = Some(first.min(record.time_ns));
        self.last_ns = self.last_ns.max(record.time_ns);
        self.back += u64::from(record.time_ns < self.previous_ns);
        self.previous_ns = record.time_ns;
        self.counts[record.kind as usize].add(record.length);
        let is_write = record.kind.is_write();
        if !is_write && record.kind != Kind::Read {
            return;
        }
        let disk = usize::from(record.disk);
        if disk >= self.disks.len() {
            self.disks.resize(disk + 1, PerDisk::default());
        }
        let state = &mut self.disks[disk];
        let end = record.address.saturating_add(record.length);
        self.sequential[usize::from(is_write)] += u64::from(state.end == record.address && state.end != 0);
        state.end = end;
        self.end = self.end.max(end);
        if is_write { &mut state.write } else { &mut state.read }.add(record.length);
        self.touched.touch(record.disk, record.address, record.length);
        if is_write {
            self.written.touch(record.disk, record.address, record.length);
        }
    }

    /// The summary so far.
    pub fn summary(&self, names: &Names) -> Summary {
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let count = |kind: Kind| self.counts[kind as usize];
        let (home, journal, zeroes) = (count(Kind::Home), count(Kind::Journal), count(Kind::WriteZeroes));
        let writes = home.requests + journal.requests + zeroes.requests;
        let reads = count(Kind::Read).requests;
        let written = home.bytes.saturating_add(journal.bytes).saturating_add(zeroes.bytes);
        let disk = |(number, state): (usize, &PerDisk)| {
            let named = names.disks().get(number);
            DiskSummary {
                vm: named.map_or_else(String::new, |d| names.vm_name(d.vm)),
                disk: names.disk_name(number as u16),
                capacity_bytes: named.map_or(0, |d| d.capacity_bytes),
                read: state.read,
                write: state.write,
            }
        };
        Summary {
            requests: self.counts.iter().map(|c| c.requests).sum(),
            seconds: self.last_ns.saturating_sub(self.first_ns.unwrap_or(0)) as f64 / 1e9,
            read: count(Kind::Read),
            home,
            journal,
            flush: count(Kind::Flush),
            discard: count(Kind::Discard),
            write_zeroes: zeroes,
            journal_share: share(journal.bytes, written),
            write_ratio: share(writes, writes + reads),
            sequential_reads: share(self.sequential[0], reads),
            sequential_writes: share(self.sequential[1], writes),
            footprint_bytes: self.touched.units * FOOTPRINT_UNIT_BYTES,
            written_footprint_bytes: self.written.units * FOOTPRINT_UNIT_BYTES,
            footprint_is_lower_bound: self.touched.overflowed || self.written.overflowed,
            end_of_addresses: self.end,
            steps_back_in_time: self.back,
            disks: self.disks.iter().enumerate().map(disk).collect(),
        }
    }
}
