//! Opens a trace: plain, zstd or gzip, a file or standard input, of a named or recognised format.
//!
//! A format is recognised only where the file says so itself (amber's magic, fio's first line); everything
//! else must be named, because misread columns and time units are the classic silent error.

use crate::text::TextReader;
use crate::{Error, Result, Source, amber, blkparse, disksim, fio, msr, spc};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A trace format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Amber or fio, by the file's first bytes.
    Auto,
    /// amberlog's own.
    Amber,
    /// MSR-Cambridge CSV.
    Msr,
    /// SPC / UMass (Financial, WebSearch).
    Spc,
    /// DiskSim ASCII: milliseconds, flag bit 0 set is a read.
    DiskSim,
    /// The same columns as SSDsim and MQSim use them: integer nanoseconds, 0 write, 1 read.
    SsdSim,
    /// blkparse's default text output.
    Blkparse,
    /// fio iolog version 2 or 3.
    Fio,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Format, String> {
        Ok(match text {
            "auto" => Format::Auto,
            "amber" => Format::Amber,
            "msr" => Format::Msr,
            "spc" => Format::Spc,
            "disksim" => Format::DiskSim,
            "ssdsim" | "mqsim" => Format::SsdSim,
            "blkparse" => Format::Blkparse,
            "fio" => Format::Fio,
            other => {
                return Err(format!(
                    "no format is called {other}; there are amber, msr, spc, disksim, ssdsim, mqsim, blkparse and fio"
                ));
            }
        })
    }
}

/// How to read a trace.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its format.
    pub format: Format,
    /// Count and skip unreadable lines and frames instead of stopping.
    pub lenient: bool,
    /// blkparse: the one action that is taken as the request (`Q`, `D`, `C`, …); `None` takes Q or D, whichever comes first.
    pub blkparse_action: Option<u8>,
}

impl Default for Options {
    fn default() -> Options {
        Options { format: Format::Auto, lenient: false, blkparse_action: None }
    }
}

/// How much of the file (as stored) was read; for progress bars.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    read: Arc<AtomicU64>,
    /// The file's size in bytes; 0 where unknown.
    pub total_bytes: u64,
}

impl Progress {
    /// Bytes read so far.
    pub fn bytes(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }
}

struct Counted<R> {
    input: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// A source that may be sent to another thread.
pub type BoxedSource = Box<dyn Source + Send>;

/// Opens the trace at `path`, `-` being standard input.
pub fn open(path: &str, options: &Options) -> Result<(BoxedSource, Progress)> {
    let mut progress = Progress::default();
    let failed = |what, source| Error::Io { name: path.to_owned(), what, source };
    let file: Box<dyn Read + Send> = if path == "-" {
        Box::new(io::stdin())
    } else {
        let file = File::open(path).map_err(|e| failed("open the trace", e))?;
        let metadata = file.metadata().map_err(|e| failed("open the trace", e))?;
        if metadata.is_dir() {
            return Err(failed("open the trace", io::Error::other("it is a directory")));
        }
        progress.total_bytes = if metadata.is_file() { metadata.len() } else { 0 };
        Box::new(file)
    };
    let counted = Counted { input: file, read: progress.read.clone() };
    Ok((open_reader(counted, path, options)?, progress))
}

/// Reads a trace from any reader; `name` is what errors call it.
///
/// # Examples
/// A line of an MSR-Cambridge trace, a format that has to be named:
/// ```
/// use io_trace::{Format, Kind, Options, Source, open_reader};
///
/// let text = "128166372003061629,web,0,Write,4096,8192,1331\n";
/// let options = Options { format: Format::Msr, ..Options::default() };
/// let mut trace = open_reader(text.as_bytes(), "example", &options)?;
/// let record = trace.next_record()?.expect("one request");
/// assert_eq!((record.kind, record.address, record.length), (Kind::Home, 4096, 8192));
/// assert_eq!(trace.names().vm_name(record.vm), "web");
/// assert!(trace.next_record()?.is_none());
/// # Ok::<(), io_trace::Error>(())
/// ```
pub fn open_reader(input: impl Read + Send + 'static, name: &str, options: &Options) -> Result<BoxedSource> {
    let failed = |source| Error::Io { name: name.to_owned(), what: "read the trace", source };
    let mut stored = BufReader::with_capacity(256 * 1024, input);
    let mut plain: Box<dyn BufRead + Send> = match peek(&mut stored).map_err(failed)? {
        Some([0x28, 0xb5, 0x2f, 0xfd]) => {
            let unpacked = zstd::stream::read::Decoder::with_buffer(stored).map_err(failed)?;
            Box::new(BufReader::with_capacity(256 * 1024, unpacked))
        }
        Some([0x1f, 0x8b, _, _]) => {
            Box::new(BufReader::with_capacity(256 * 1024, flate2::bufread::MultiGzDecoder::new(stored)))
        }
        _ => Box::new(stored),
    };
    let format = match options.format {
        Format::Auto => match peek(&mut plain).map_err(failed)? {
            Some(head) if amber::MAGIC.starts_with(&head) => Format::Amber,
            Some(head) if head == *b"fio " => Format::Fio,
            _ => {
                let reason = "this is neither an amber trace nor a fio iolog; name its format with --format \
                              (msr, spc, disksim, ssdsim, mqsim, blkparse)";
                return Err(Error::Format { name: name.to_owned(), reason: reason.into() });
            }
        },
        named => named,
    };
    let lenient = options.lenient;
    Ok(match format {
        Format::Auto | Format::Amber => Box::new(amber::Reader::new(plain, name, lenient)?),
        Format::Msr => Box::new(TextReader::new(plain, name, lenient, msr::Msr::default())),
        Format::Spc => Box::new(TextReader::new(plain, name, lenient, spc::Spc)),
        Format::DiskSim => Box::new(TextReader::new(plain, name, lenient, disksim::DiskSim::milliseconds())),
        Format::SsdSim => Box::new(TextReader::new(plain, name, lenient, disksim::DiskSim::nanoseconds())),
        Format::Blkparse => {
            Box::new(TextReader::new(plain, name, lenient, blkparse::Blkparse::new(options.blkparse_action)))
        }
        Format::Fio => Box::new(TextReader::new(plain, name, lenient, fio::Fio::default())),
    })
}

/// The first four bytes without taking them; `None` where there are fewer.
fn peek(input: &mut impl BufRead) -> io::Result<Option<[u8; 4]>> {
    loop {
        match input.fill_buf() {
            Ok(bytes) => return Ok(bytes.first_chunk::<4>().copied()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
