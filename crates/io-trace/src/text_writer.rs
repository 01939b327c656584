//! Writes a trace in another format's text, for other tools.
//!
//! What a format cannot say is never lost silently: [`TextWriter::widened`] counts requests rounded out to
//! whole sectors, [`TextWriter::dropped`] those of a kind the format has no word for.

use crate::{Format, Kind, Names, Record};
use std::io::{self, Write};

/// A streaming writer of text traces.
pub struct TextWriter<W: Write> {
    output: W,
    format: Format,
    widened: u64,
    dropped: u64,
    opened: Vec<bool>,
}

impl<W: Write> TextWriter<W> {
    /// A writer of `format`: msr, spc, disksim, ssdsim or fio (version 3). `Err` for those only read.
    pub fn new(mut output: W, format: Format) -> io::Result<TextWriter<W>> {
        match format {
            Format::Msr | Format::Spc | Format::DiskSim | Format::SsdSim => {}
            Format::Fio => output.write_all(b"fio version 3 iolog\n")?,
            Format::Auto | Format::Amber | Format::Blkparse => {
                return Err(io::Error::other("only msr, spc, disksim, ssdsim, mqsim and fio are written as text"));
            }
        }
        Ok(TextWriter { output, format, widened: 0, dropped: 0, opened: Vec::new() })
    }

    /// Requests that were rounded out to whole sectors so far.
    pub fn widened(&self) -> u64 {
        self.widened
    }

    /// Requests left out because the format has no word for their kind so far.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Writes one record.
    pub fn record(&mut self, record: &Record, names: &Names) -> io::Result<()> {
        let is_read = record.kind == Kind::Read;
        if !is_read && !record.kind.is_write() && self.format != Format::Fio {
            self.dropped += 1;
            return Ok(());
        }
        let first = record.address / 512;
        let sectors = record.address.saturating_add(record.length).div_ceil(512) - first;
        let in_sectors = matches!(self.format, Format::Spc | Format::DiskSim | Format::SsdSim);
        if in_sectors && !(record.address | record.length).is_multiple_of(512) {
            self.widened += 1;
        }
        let out = &mut self.output;
        match self.format {
            Format::Msr => {
                let ticks = record.time_ns / 100;
                let vm = names.vm_name(record.vm).replace([',', '\n'], "_");
                let kind = if is_read { "Read" } else { "Write" };
                writeln!(out, "{ticks},{vm},{},{kind},{},{},0", record.disk, record.address, record.length)
            }
            Format::Spc => {
                let opcode = if is_read { 'R' } else { 'W' };
                let (whole, part) = (record.time_ns / 1_000_000_000, record.time_ns % 1_000_000_000);
                writeln!(out, "{},{first},{},{opcode},{whole}.{part:09}", record.disk, sectors * 512)
            }
            Format::DiskSim => {
                let (whole, part) = (record.time_ns / 1_000_000, record.time_ns % 1_000_000);
                writeln!(out, "{whole}.{part:06} {} {first} {sectors} {}", record.disk, u8::from(is_read))
            }
            Format::SsdSim => {
                writeln!(out, "{} {} {first} {sectors} {}", record.time_ns, record.disk, u8::from(is_read))
            }
            _ => {
                let name: String = names.disk_name(record.disk).split_ascii_whitespace().collect();
                let file = format!("{}-{name}", record.disk);
                let time = record.time_ns / 1000;
                let disk = usize::from(record.disk);
                if disk >= self.opened.len() {
                    self.opened.resize(disk + 1, false);
                }
                if !std::mem::replace(&mut self.opened[disk], true) {
                    writeln!(out, "{time} {file} add\n{time} {file} open")?;
                }
                let (address, length) = (record.address, record.length);
                match record.kind {
                    Kind::Read => writeln!(out, "{time} {file} read {address} {length}"),
                    Kind::Discard => writeln!(out, "{time} {file} trim {address} {length}"),
                    Kind::Flush => writeln!(out, "{time} {file} sync 0 0"),
                    Kind::Home | Kind::Journal | Kind::WriteZeroes => {
                        writeln!(out, "{time} {file} write {address} {length}")
                    }
                }
            }
        }
    }

    /// Hands everything to the operating system and returns the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.output.flush()?;
        Ok(self.output)
    }
}
