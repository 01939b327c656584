//! Line-based traces: reading lines with bounded memory, counting them, and what every format shares.
//!
//! CRLF, blank lines and a missing final newline are tolerated; a line over 64 KiB is an unreadable line.

use crate::{Error, Names, Notes, Record, Result, Source};
use std::io::{BufRead, ErrorKind};

/// One text format: turns a line into a record.
pub(crate) trait LineFormat {
    /// The format's name in messages.
    const NAME: &'static str;

    /// The name of this one of several flavours.
    fn name(&self) -> &'static str {
        Self::NAME
    }

    /// A record, or `None` for a line that is right but no request. `Err` says what is wrong with the line.
    fn line(&mut self, line: &str, names: &mut Names) -> std::result::Result<Option<Record>, String>;
}

const LINE_BYTES_MAX: usize = 64 * 1024;

/// Reads any [`LineFormat`].
pub(crate) struct TextReader<R, F> {
    input: R,
    name: String,
    lenient: bool,
    format: F,
    names: Names,
    line: Vec<u8>,
    lines: u64,
    records: u64,
    ignored: u64,
    skipped: u64,
    first_skipped: Option<String>,
    tail: Option<String>,
    at_end: bool,
}

impl<R: BufRead, F: LineFormat> TextReader<R, F> {
    pub(crate) fn new(input: R, name: &str, lenient: bool, format: F) -> TextReader<R, F> {
        TextReader {
            input,
            name: name.to_owned(),
            lenient,
            format,
            names: Names::new(),
            line: Vec::new(),
            lines: 0,
            records: 0,
            ignored: 0,
            skipped: 0,
            first_skipped: None,
            tail: None,
            at_end: false,
        }
    }

    /// Reads a line into `self.line`, keeping at most [`LINE_BYTES_MAX`] of it. `Ok(None)` at the end, else whether it fitted.
    fn read_line(&mut self) -> Result<Option<bool>> {
        self.line.clear();
        let mut fits = true;
        let mut any = false;
        loop {
            let bytes = match self.input.fill_buf() {
                Ok(bytes) => bytes,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::UnexpectedEof && self.lenient => {
                    self.tail = Some("the compressed trace is cut short; all complete lines were read".into());
                    // What there is of the last line is not a whole line.
                    self.line.clear();
                    return Ok(None);
                }
                Err(source) => {
                    let source = std::io::Error::new(source.kind(), format!("after line {}: {source}", self.lines));
                    return Err(Error::Io { name: self.name.clone(), what: "read the trace", source });
                }
            };
            if bytes.is_empty() {
                return Ok(any.then_some(fits));
            }
            any = true;
            let end = memchr::memchr(b'\n', bytes);
            let part = &bytes[..end.unwrap_or(bytes.len())];
            let room = LINE_BYTES_MAX - self.line.len();
            fits &= part.len() <= room;
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            let used = part.len() + usize::from(end.is_some());
            self.input.consume(used);
            if end.is_some() {
                return Ok(Some(fits));
            }
        }
    }
}

impl<R: BufRead, F: LineFormat> Source for TextReader<R, F> {
    fn next_record(&mut self) -> Result<Option<Record>> {
        while !self.at_end {
            let Some(fits) = self.read_line()? else {
                self.at_end = true;
                if self.records == 0 {
                    return Err(Error::Empty {
                        name: self.name.clone(),
                        lines: self.lines,
                        format: self.format.name(),
                    });
                }
                return Ok(None);
            };
            self.lines += 1;
            let parsed = if !fits {
                Err(format!("the line is longer than {LINE_BYTES_MAX} bytes"))
            } else {
                match std::str::from_utf8(&self.line) {
                    Err(_) => Err("the line is not text".to_owned()),
                    Ok(line) => match line.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\u{feff}') {
                        "" => Ok(None),
                        line => self.format.line(line, &mut self.names),
                    },
                }
            };
            let parsed = parsed.and_then(|record| match record {
                Some(record) if record.end().is_none() => Err("the request ends beyond 64 bits".to_owned()),
                other => Ok(other),
            });
            match parsed {
                Ok(Some(record)) => {
                    self.records += 1;
                    return Ok(Some(record));
                }
                Ok(None) => self.ignored += 1,
                Err(reason) if self.lenient => {
                    self.skipped += 1;
                    self.first_skipped.get_or_insert(format!("line {}: {reason}", self.lines));
                }
                Err(reason) => return Err(Error::Line { name: self.name.clone(), line: self.lines, reason }),
            }
        }
        Ok(None)
    }

    fn names(&self) -> &Names {
        &self.names
    }

    fn notes(&self) -> Notes {
        Notes {
            units: self.lines,
            skipped: self.skipped,
            first_skipped: self.first_skipped.clone(),
            ignored: self.ignored,
            tail: self.tail.clone(),
        }
    }

    fn units(&self) -> u64 {
        self.lines
    }

    fn format(&self) -> &'static str {
        self.format.name()
    }
}

/// A whole number, or what is wrong with it.
pub(crate) fn number(what: &str, text: &str) -> std::result::Result<u64, String> {
    text.parse().map_err(|_| format!("the {what} `{}` is not a whole number from 0 to 2^64-1", shown(text)))
}

/// Bytes of a count of 512-byte sectors.
pub(crate) fn sectors(what: &str, text: &str) -> std::result::Result<u64, String> {
    number(what, text)?.checked_mul(512).ok_or_else(|| format!("the {what} `{text}` is beyond 64 bits of bytes"))
}

/// A decimal number of units of `unit_ns` nanoseconds each, as nanoseconds, exact to the nanosecond.
pub(crate) fn time_ns(text: &str, unit_ns: u64) -> std::result::Result<u64, String> {
    let wrong = || format!("the time `{}` is not a number from 0 on", shown(text));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() && fraction.is_empty() || !digits(whole) || !digits(fraction) {
        // Exponents occur in generated traces: exact enough through a float.
        return match text.parse::<f64>() {
            Ok(value) if value.is_finite() && value >= 0.0 && value * (unit_ns as f64) < 1.8e19 => {
                Ok((value * unit_ns as f64).round() as u64)
            }
            _ => Err(wrong()),
        };
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| wrong())? };
    let mut part = 0u64;
    let mut scale = unit_ns;
    for digit in fraction.bytes() {
        if scale < 10 {
            break;
        }
        scale /= 10;
        part += u64::from(digit - b'0') * scale;
    }
    whole.checked_mul(unit_ns).and_then(|ns| ns.checked_add(part)).ok_or_else(wrong)
}

/// A field as it may be shown in a message: not too long.
pub(crate) fn shown(text: &str) -> &str {
    let mut end = text.len().min(40);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The disk of a name within a VM, or the message that there are too many.
pub(crate) fn disk_of(names: &mut Names, vm: &str, disk: &str) -> std::result::Result<(u16, u16), String> {
    let vm = names.vm(vm).ok_or("there are more than 65536 hosts in this trace")?;
    let disk = names.disk(vm, disk, 0).ok_or("there are more than 65536 disks in this trace")?;
    Ok((vm, disk))
}
