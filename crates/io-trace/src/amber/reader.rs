//! Reads amber traces, frame by frame, with at most one frame in memory.
//!
//! It must never trust a length in the file. A torn tail (a frame cut short by the end of the file, or a last
//! frame of zeroes or with a wrong checksum) ends the trace and is reported by [`Reader::ending`]; the same
//! damage with good frames after it is an error, because then records are missing from the middle.

use super::*;
use crate::source::{Notes, Source};
use crate::{Error, Kind, Names, Record, Result};
use std::io::Read;

/// How a trace ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Still being read.
    NotYet,
    /// Its writer closed it.
    Closed,
    /// Its writer died between two frames: all that was written out is here.
    NotClosed,
    /// Its writer died inside a frame, whose records are lost.
    Torn {
        /// Where that frame begins, in the decompressed stream.
        offset: u64,
        /// How many bytes of it there are.
        bytes: u64,
    },
}

/// Attempts to find the next good frame after a bad one.
const FALSE_MARKS_MAX: u32 = 4096;

struct Frame {
    what: u8,
    records: u32,
    plain: Vec<u8>,
    // Whole length in the stream, header included.
    bytes: usize,
}

enum Parsed {
    Good(Frame),
    // Ends beyond the bytes that are there.
    Short,
    Bad(String),
}

/// A streaming reader of amber traces.
pub struct Reader<R: Read> {
    input: R,
    name: String,
    lenient: bool,
    names: Names,
    buffer: Vec<u8>,
    start: usize,
    offset: u64,
    end_of_input: bool,
    plain: Vec<u8>,
    position: usize,
    left: u32,
    last_time_ns: u64,
    last_end: u64,
    last_vm: u16,
    last_disk: u16,
    records: u64,
    frames: u64,
    skipped_frames: u64,
    first_skipped: Option<u64>,
    ending: Ending,
}

impl<R: Read> Reader<R> {
    /// Reads the preamble. `name` is what errors call the trace.
    pub fn new(input: R, name: &str, lenient: bool) -> Result<Reader<R>> {
        let mut reader = Reader {
            input,
            name: name.to_owned(),
            lenient,
            names: Names::new(),
            buffer: Vec::new(),
            start: 0,
            offset: 0,
            end_of_input: false,
            plain: Vec::new(),
            position: 0,
            left: 0,
            last_time_ns: 0,
            last_end: 0,
            last_vm: 0,
            last_disk: 0,
            records: 0,
            frames: 0,
            skipped_frames: 0,
            first_skipped: None,
            ending: Ending::NotYet,
        };
        reader.fill(PREAMBLE_BYTES)?;
        let preamble = reader.bytes();
        if preamble.len() < PREAMBLE_BYTES || preamble[..8] != MAGIC {
            let reason =
                "this is not an amber trace (its first 8 bytes are not AMBTRACE); name its format with --format";
            return Err(Error::Format { name: reader.name, reason: reason.into() });
        }
        let version = u16::from_le_bytes([preamble[8], preamble[9]]);
        if version != VERSION {
            let reason = format!("this amber trace is of version {version}; this program reads version {VERSION} only");
            return Err(Error::Format { name: reader.name, reason });
        }
        reader.consume(PREAMBLE_BYTES);
        Ok(reader)
    }

    /// How the trace ended; [`Ending::NotYet`] until the last record was returned.
    pub fn ending(&self) -> Ending {
        self.ending
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        self.offset += count as u64;
    }

    /// Has at least `want` bytes at hand unless the input ends before. `want` is bounded by a frame's size.
    fn fill(&mut self, want: usize) -> Result<()> {
        if self.start > 0 && self.bytes().len() < want {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        while !self.end_of_input && self.bytes().len() < want {
            let old = self.buffer.len();
            self.buffer.resize(old + (want - (old - self.start)).max(64 * 1024), 0);
            let read = loop {
                match self.input.read(&mut self.buffer[old..]) {
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    other => break other,
                }
            };
            let read = match read {
                Ok(read) => read,
                // A compressed file that was cut short is a torn tail, too.
                Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => 0,
                Err(source) => {
                    self.buffer.truncate(old);
                    return Err(Error::Io { name: self.name.clone(), what: "read the trace", source });
                }
            };
            self.buffer.truncate(old + read);
            self.end_of_input = read == 0;
        }
        Ok(())
    }

    fn parse(&mut self) -> Result<Parsed> {
        self.fill(FRAME_HEADER_BYTES)?;
        let bytes = self.bytes();
        if bytes.len() < FRAME_HEADER_BYTES {
            return Ok(if FRAME_MARK.starts_with(&bytes[..bytes.len().min(4)]) || bytes.iter().all(|&b| b == 0) {
                Parsed::Short
            } else {
                Parsed::Bad("it does not begin with the frame mark".into())
            });
        }
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[..4] != FRAME_MARK {
            return Ok(Parsed::Bad("it does not begin with the frame mark".into()));
        }
        let (what, compression) = (bytes[4], bytes[5]);
        let (stored, plain, records, crc) = (u32_at(8) as usize, u32_at(12) as usize, u32_at(16), u32_at(20));
        if stored > PAYLOAD_BYTES_MAX || plain > PAYLOAD_BYTES_MAX {
            return Ok(Parsed::Bad(format!(
                "it claims {stored} stored and {plain} plain bytes; at most {PAYLOAD_BYTES_MAX} are allowed"
            )));
        }
        let whole = FRAME_HEADER_BYTES + stored;
        self.fill(whole)?;
        let bytes = self.bytes();
        if bytes.len() < whole {
            return Ok(Parsed::Short);
        }
        let payload = &bytes[FRAME_HEADER_BYTES..whole];
        if crc32c::crc32c_append(crc32c::crc32c(&bytes[..20]), payload) != crc {
            return Ok(Parsed::Bad("its checksum does not match".into()));
        }
        let unpacked = match compression {
            PLAIN => payload.to_vec(),
            ZSTD => match zstd::bulk::decompress(payload, plain) {
                Ok(unpacked) => unpacked,
                Err(error) => return Ok(Parsed::Bad(format!("it does not decompress: {error}"))),
            },
            other => return Ok(Parsed::Bad(format!("its compression {other} is unknown"))),
        };
        if unpacked.len() != plain {
            return Ok(Parsed::Bad(format!("it holds {} bytes and claims {plain}", unpacked.len())));
        }
        Ok(Parsed::Good(Frame { what, records, plain: unpacked, bytes: whole }))
    }

    /// Moves to the next records frame. `false` at the trace's end.
    fn next_frame(&mut self) -> Result<bool> {
        loop {
            self.fill(1)?;
            if self.bytes().is_empty() {
                self.ending = Ending::NotClosed;
                return Ok(false);
            }
            let frame_offset = self.offset;
            let reason = match self.parse()? {
                Parsed::Good(frame) => {
                    self.frames += 1;
                    self.consume(frame.bytes);
                    if self.take_frame(frame, frame_offset)? {
                        return Ok(self.ending == Ending::NotYet);
                    }
                    continue;
                }
                // A damaged length can make a frame in the middle look as if it were cut short: look on as well.
                Parsed::Short => "it claims more bytes than there are".to_string(),
                Parsed::Bad(reason) => reason,
            };
            if !self.resynchronise(frame_offset)? {
                self.ending = Ending::Torn { offset: frame_offset, bytes: self.offset - frame_offset };
                return Ok(false);
            }
            self.skip_or_fail(frame_offset, reason)?;
        }
    }

    /// Takes in a good frame. `true` when it holds records or ends the trace.
    fn take_frame(&mut self, frame: Frame, frame_offset: u64) -> Result<bool> {
        match frame.what {
            FRAME_NAMES => {
                if let Err(reason) = self.take_names(&frame.plain) {
                    self.skip_or_fail(frame_offset, reason)?;
                }
            }
            FRAME_RECORDS => {
                let Some(base) = frame.plain.first_chunk::<8>() else {
                    self.skip_or_fail(frame_offset, "its time base is missing".into())?;
                    return Ok(false);
                };
                self.last_time_ns = u64::from_le_bytes(*base);
                (self.last_end, self.last_vm, self.last_disk) = (0, 0, 0);
                self.plain = frame.plain;
                self.position = 8;
                self.left = frame.records;
                return Ok(self.left > 0);
            }
            FRAME_END => {
                let claimed = frame.plain.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
                if claimed != self.records && !self.lenient {
                    let reason = format!(
                        "the trace's end claims {claimed} records and {} were read: a part is missing",
                        self.records
                    );
                    return Err(Error::Damaged { name: self.name.clone(), offset: frame_offset, reason });
                }
                self.ending = Ending::Closed;
                return Ok(true);
            }
            other => self.skip_or_fail(frame_offset, format!("it is of the unknown kind {other}"))?,
        }
        Ok(false)
    }

    /// Skips from a bad frame to the next good one. `false` when there is none: the tail was torn.
    fn resynchronise(&mut self, bad_offset: u64) -> Result<bool> {
        // Each false mark may cost a checksum over 1 MiB: a hostile file gets a bounded number of them.
        for _ in 0..FALSE_MARKS_MAX {
            self.consume(1.min(self.bytes().len()));
            self.fill(FRAME_HEADER_BYTES)?;
            if self.bytes().is_empty() {
                return Ok(false);
            }
            match self.bytes().windows(4).position(|window| window == FRAME_MARK) {
                Some(at) => {
                    self.consume(at);
                    if let Parsed::Good(_) = self.parse()? {
                        return Ok(true);
                    }
                }
                // A mark may straddle the end of what is at hand: keep 3 bytes.
                None => self.consume(self.bytes().len().saturating_sub(4)),
            }
        }
        let reason = format!("no good frame after {FALSE_MARKS_MAX} attempts to find the next one");
        Err(Error::Damaged { name: self.name.clone(), offset: bad_offset, reason })
    }

    fn skip_or_fail(&mut self, offset: u64, reason: String) -> Result<()> {
        if !self.lenient {
            return Err(Error::Damaged { name: self.name.clone(), offset, reason });
        }
        self.skipped_frames += 1;
        self.first_skipped.get_or_insert(offset);
        Ok(())
    }

    fn take_names(&mut self, mut bytes: &[u8]) -> std::result::Result<(), String> {
        fn text(bytes: &mut &[u8]) -> Option<String> {
            let length = u16::from_le_bytes(*bytes.first_chunk::<2>()?) as usize;
            let text = String::from_utf8_lossy(bytes.get(2..2 + length)?).into_owned();
            *bytes = &bytes[2 + length..];
            Some(text)
        }
        while let Some((&what, rest)) = bytes.split_first() {
            bytes = rest;
            let added = match what {
                NAME_VM => text(&mut bytes).and_then(|name| self.names.vm(&name)),
                NAME_DISK => (|| {
                    let vm = u16::from_le_bytes(*bytes.first_chunk::<2>()?);
                    let capacity = u64::from_le_bytes(*bytes.get(2..)?.first_chunk::<8>()?);
                    bytes = bytes.get(10..)?;
                    let name = text(&mut bytes)?;
                    self.names.disk(vm, &name, capacity)
                })(),
                _ => None,
            };
            if added.is_none() {
                return Err("a name of a VM or disk in it is cut short, of an unknown kind or one too many".into());
            }
        }
        Ok(())
    }

    #[inline]
    fn decode(&mut self) -> Option<Record> {
        let mut bytes = self.plain.get(self.position..)?;
        let before = bytes.len();
        let (&tag, rest) = bytes.split_first()?;
        bytes = rest;
        let kind = Kind::from_number(tag & TAG_KIND)?;
        let time_ns = self.last_time_ns.wrapping_add(varint::unzigzag(varint::take(&mut bytes)?) as u64);
        if tag & TAG_SAME_DISK == 0 {
            self.last_vm = u16::try_from(varint::take(&mut bytes)?).ok()?;
            self.last_disk = u16::try_from(varint::take(&mut bytes)?).ok()?;
        }
        let unit = if tag & TAG_BYTES == 0 { UNIT } else { 1 };
        let mut address = self.last_end;
        if tag & TAG_SEQUENTIAL == 0 {
            let distance = varint::unzigzag(varint::take(&mut bytes)?);
            address = address.wrapping_add((distance as u64).wrapping_mul(unit));
        }
        let length = varint::take(&mut bytes)?.checked_mul(unit)?;
        self.last_time_ns = time_ns;
        self.last_end = address.wrapping_add(length);
        self.position += before - bytes.len();
        let address = if kind == Kind::Flush { 0 } else { address };
        Some(Record { time_ns, address, length, vm: self.last_vm, disk: self.last_disk, kind })
    }
}

impl<R: Read> Source for Reader<R> {
    fn next_record(&mut self) -> Result<Option<Record>> {
        loop {
            if self.left == 0 && (self.ending != Ending::NotYet || !self.next_frame()?) {
                return Ok(None);
            }
            self.left -= 1;
            match self.decode() {
                Some(record) => {
                    self.records += 1;
                    return Ok(Some(record));
                }
                None => {
                    self.left = 0;
                    // The checksum was right: a writer's bug, or made by hand.
                    let reason = "a record in it cannot be decoded".to_string();
                    self.skip_or_fail(self.offset, reason)?;
                }
            }
        }
    }

    fn names(&self) -> &Names {
        &self.names
    }

    fn notes(&self) -> Notes {
        let tail = match self.ending {
            Ending::NotYet | Ending::Closed => None,
            Ending::NotClosed => {
                Some("the trace was not closed by its writer; all complete frames were read".to_string())
            }
            Ending::Torn { offset, bytes } => Some(format!(
                "the trace's tail is torn: the {bytes} bytes from byte {offset} on are no whole frame and were left out"
            )),
        };
        Notes {
            units: self.frames,
            skipped: self.skipped_frames,
            first_skipped: self.first_skipped.map(|offset| format!("frame at byte {offset}")),
            ignored: 0,
            tail,
        }
    }

    fn units(&self) -> u64 {
        self.frames
    }

    fn format(&self) -> &'static str {
        "amber"
    }
}
