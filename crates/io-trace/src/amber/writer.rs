//! Records a trace from a data path: a record is a few stores into a buffer; a full buffer is one `write`.
//!
//! It must never grow its buffer beyond one frame, and never bring a data path down: an I/O error is returned
//! once, from then on records are counted as lost and `record` is nearly free.

use super::*;
use crate::{Kind, Names, Record};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// How a trace is written.
#[derive(Clone, Debug)]
pub struct WriterOptions {
    /// Compress each frame with zstd at this level (1 is fast and enough); `None` writes plain frames.
    pub zstd_level: Option<i32>,
    /// A frame is written out when it holds this many bytes (before compression).
    pub frame_bytes: usize,
    /// A frame is also written out once it spans this much trace time, so that a killed writer loses little.
    pub frame_span_ns: u64,
}

impl Default for WriterOptions {
    fn default() -> WriterOptions {
        WriterOptions { zstd_level: None, frame_bytes: 64 * 1024, frame_span_ns: 1_000_000_000 }
    }
}

/// Longest encoding of one record: tag, time, VM, disk, address, length.
const RECORD_BYTES_MAX: usize = 1 + 10 + 3 + 3 + 10 + 10;

/// A streaming writer of amber traces. Wrap it in a mutex to share it between threads.
///
/// Dropping it closes the trace as well as it can; [`Writer::finish`] also tells whether that worked.
pub struct Writer<W: Write = File> {
    // `None` once finished.
    output: Option<W>,
    options: WriterOptions,
    names: Names,
    frame: Vec<u8>,
    frame_records: u32,
    frame_base_ns: u64,
    last_time_ns: u64,
    last_end: u64,
    last_vm: u16,
    last_disk: u16,
    records: u64,
    lost: u64,
    failed: bool,
}

impl Writer<File> {
    /// Creates (or empties) the file and writes the preamble and the names.
    pub fn create(path: impl AsRef<Path>, names: Names, options: WriterOptions) -> io::Result<Writer<File>> {
        Writer::new(File::create(path)?, names, options)
    }
}

impl<W: Write> Writer<W> {
    /// Starts a trace on `output`, which need not be buffered: it sees one write per frame.
    pub fn new(output: W, names: Names, options: WriterOptions) -> io::Result<Writer<W>> {
        let options = WriterOptions {
            frame_bytes: options.frame_bytes.clamp(4 * RECORD_BYTES_MAX, PAYLOAD_BYTES_MAX / 2),
            ..options
        };
        let mut writer = Writer {
            output: Some(output),
            frame: Vec::with_capacity(options.frame_bytes),
            options,
            names: Names::new(),
            frame_records: 0,
            frame_base_ns: 0,
            last_time_ns: 0,
            last_end: 0,
            last_vm: 0,
            last_disk: 0,
            records: 0,
            lost: 0,
            failed: false,
        };
        let mut preamble = Vec::with_capacity(PREAMBLE_BYTES);
        preamble.extend_from_slice(&MAGIC);
        preamble.extend_from_slice(&VERSION.to_le_bytes());
        preamble.resize(PREAMBLE_BYTES, 0);
        writer.write_all(&preamble)?;
        for vm in names.vms() {
            writer.names.vm(&vm.name);
        }
        for disk in names.disks() {
            writer.names.disk(disk.vm, &disk.name, disk.capacity_bytes);
        }
        writer.write_names(0, 0)?;
        Ok(writer)
    }

    /// The VMs and disks named so far.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// Names a VM while the trace runs and returns its number.
    pub fn add_vm(&mut self, name: &str) -> io::Result<u16> {
        let (vms, disks) = (self.names.vms().len(), self.names.disks().len());
        let number = self.names.vm(name).ok_or_else(|| io::Error::other("a trace holds at most 65536 VMs"))?;
        if self.names.vms().len() > vms {
            self.flush_frame()?;
            self.write_names(vms, disks)?;
        }
        Ok(number)
    }

    /// Names a disk of a named VM while the trace runs and returns its number.
    pub fn add_disk(&mut self, vm: u16, name: &str, capacity_bytes: u64) -> io::Result<u16> {
        let (vms, disks) = (self.names.vms().len(), self.names.disks().len());
        let number = self.names.disk(vm, name, capacity_bytes);
        let number =
            number.ok_or_else(|| io::Error::other(format!("no VM {vm} in this trace, or 65536 disks already")))?;
        if self.names.disks().len() > disks {
            self.flush_frame()?;
            self.write_names(vms, disks)?;
        }
        Ok(number)
    }

    /// Appends a record. Records should come in the order of time; small steps back are kept as they are.
    #[inline]
    pub fn record(&mut self, record: &Record) -> io::Result<()> {
        if self.failed {
            self.lost += 1;
            return Ok(());
        }
        if self.frame_records == 0 {
            self.frame.extend_from_slice(&record.time_ns.to_le_bytes());
            self.frame_base_ns = record.time_ns;
            self.last_time_ns = record.time_ns;
            (self.last_end, self.last_vm, self.last_disk) = (0, 0, 0);
        }
        let (address, length) =
            if record.kind == Kind::Flush { (self.last_end, 0) } else { (record.address, record.length) };
        let mut tag = record.kind as u8;
        let same_disk = record.vm == self.last_vm && record.disk == self.last_disk;
        let sequential = address == self.last_end;
        let in_bytes = !(address | length | self.last_end).is_multiple_of(UNIT);
        tag |= if same_disk { TAG_SAME_DISK } else { 0 };
        tag |= if in_bytes { TAG_BYTES } else { 0 };
        tag |= if sequential { TAG_SEQUENTIAL } else { 0 };
        let out = &mut self.frame;
        out.push(tag);
        varint::put(out, varint::zigzag(record.time_ns.wrapping_sub(self.last_time_ns) as i64));
        if !same_disk {
            varint::put(out, u64::from(record.vm));
            varint::put(out, u64::from(record.disk));
        }
        let distance = address.wrapping_sub(self.last_end) as i64;
        if in_bytes {
            if !sequential {
                varint::put(out, varint::zigzag(distance));
            }
            varint::put(out, length);
        } else {
            if !sequential {
                varint::put(out, varint::zigzag(distance / UNIT as i64));
            }
            varint::put(out, length / UNIT);
        }
        self.last_time_ns = record.time_ns;
        self.last_end = address.wrapping_add(length);
        (self.last_vm, self.last_disk) = (record.vm, record.disk);
        self.frame_records += 1;
        self.records += 1;
        if self.frame.len() + RECORD_BYTES_MAX > self.options.frame_bytes
            || record.time_ns.saturating_sub(self.frame_base_ns) >= self.options.frame_span_ns
        {
            return self.flush_frame();
        }
        Ok(())
    }

    /// Records accepted so far, lost ones not counted.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Records dropped since an I/O error.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Hands everything recorded so far to the operating system, as a frame of its own.
    pub fn flush(&mut self) -> io::Result<()> {
        self.flush_frame()?;
        match self.output.as_mut() {
            Some(output) if !self.failed => output.flush(),
            _ => Ok(()),
        }
    }

    /// Closes the trace and returns the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.close()?;
        self.output.take().ok_or_else(|| io::Error::other("the trace is closed already"))
    }

    fn close(&mut self) -> io::Result<()> {
        if self.failed {
            return Err(io::Error::other(format!("an earlier write failed; {} records were lost", self.lost)));
        }
        self.flush_frame()?;
        let records = self.records.to_le_bytes();
        self.write_frame(FRAME_END, 0, &records)?;
        self.output.as_mut().map_or(Ok(()), Write::flush)
    }

    fn write_names(&mut self, first_vm: usize, first_disk: usize) -> io::Result<()> {
        let mut frames: Vec<Vec<u8>> = vec![Vec::new()];
        let mut add = |entry: &[u8]| {
            if frames.last().is_none_or(|f| f.len() + entry.len() > PAYLOAD_BYTES_MAX) {
                frames.push(Vec::new());
            }
            if let Some(frame) = frames.last_mut() {
                frame.extend_from_slice(entry);
            }
        };
        for vm in &self.names.vms()[first_vm..] {
            let mut entry = vec![NAME_VM];
            entry.extend_from_slice(&(vm.name.len() as u16).to_le_bytes());
            entry.extend_from_slice(vm.name.as_bytes());
            add(&entry);
        }
        for disk in &self.names.disks()[first_disk..] {
            let mut entry = vec![NAME_DISK];
            entry.extend_from_slice(&disk.vm.to_le_bytes());
            entry.extend_from_slice(&disk.capacity_bytes.to_le_bytes());
            entry.extend_from_slice(&(disk.name.len() as u16).to_le_bytes());
            entry.extend_from_slice(disk.name.as_bytes());
            add(&entry);
        }
        for frame in frames {
            self.write_frame(FRAME_NAMES, 0, &frame)?;
        }
        Ok(())
    }

    #[cold]
    fn flush_frame(&mut self) -> io::Result<()> {
        if self.frame_records == 0 {
            return Ok(());
        }
        let frame = std::mem::take(&mut self.frame);
        let records = std::mem::take(&mut self.frame_records);
        let result = self.write_frame(FRAME_RECORDS, records, &frame);
        if result.is_err() {
            self.lost += u64::from(records);
            self.records -= u64::from(records);
        }
        self.frame = frame;
        self.frame.clear();
        result
    }

    fn write_frame(&mut self, what: u8, records: u32, plain: &[u8]) -> io::Result<()> {
        let packed = match self.options.zstd_level {
            Some(level) => Some(zstd::bulk::compress(plain, level)?),
            None => None,
        };
        // A frame that compression would make longer is stored plain.
        let (compression, stored) = match &packed {
            Some(packed) if packed.len() < plain.len() => (ZSTD, packed.as_slice()),
            _ => (PLAIN, plain),
        };
        let mut frame = Vec::with_capacity(FRAME_HEADER_BYTES + stored.len());
        frame.extend_from_slice(&FRAME_MARK);
        frame.extend_from_slice(&[what, compression, 0, 0]);
        frame.extend_from_slice(&(stored.len() as u32).to_le_bytes());
        frame.extend_from_slice(&(plain.len() as u32).to_le_bytes());
        frame.extend_from_slice(&records.to_le_bytes());
        let crc = crc32c::crc32c_append(crc32c::crc32c(&frame), stored);
        frame.extend_from_slice(&crc.to_le_bytes());
        frame.extend_from_slice(stored);
        self.write_all(&frame)
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let result = match self.output.as_mut() {
            Some(output) if !self.failed => output.write_all(bytes),
            _ => Ok(()),
        };
        self.failed |= result.is_err();
        result
    }
}

impl<W: Write> Drop for Writer<W> {
    fn drop(&mut self) {
        if self.output.is_some() && !self.failed {
            // Best effort: a caller who wants to know calls `finish`.
            let _ = self.close();
        }
    }
}
