//! A recording: everything that a real guest sent to its disks, and what it was told, in order.
//!
//! On disk: the eight bytes `AMBCRASH`, then one zstd stream of a 32-bit length, that many bytes of JSON ([`Recording`]
//! without contents), then every distinct content of at most one page: its length (16 bits) and its bytes. Numbers are
//! little-endian.
//!
//! Failure story: a file that is cut off, too large or contradicts itself is refused with a sentence; nothing in it is
//! believed without a bound.

use crate::error::{During, Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"AMBCRASH";
const VERSION: u32 = 1;
/// Bytes of a guest page, and of a block of the base images.
pub const PAGE_BYTES: usize = 4096;
const EXPANDED_BYTES_MAX: u64 = 1 << 30;

/// Which of the recording's contents.
pub type ContentId = u32;

/// What a request asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Read into the segments.
    Read,
    /// Write the segments.
    Write,
    /// Make durable.
    Flush,
    /// Forget the range.
    Discard,
    /// Zero the range; `true` allows it to be given back.
    WriteZeroes(bool),
}

/// A run of bytes inside one guest page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The guest page.
    pub page: u32,
    /// Where in it the bytes begin.
    pub offset: u16,
    /// How many they are.
    pub len: u16,
    /// What they were when the request came (writes).
    pub content: Option<ContentId>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Issue {
    /// Index of the disk.
    pub disk: u8,
    /// Its number: requests count from 0.
    pub id: u32,
    /// What is asked.
    pub kind: Kind,
    /// Where on the disk, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// Segments, each a run of guest memory: (pieces of one segment), cut at page boundaries.
    pub segments: Vec<Vec<Piece>>,
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The guest sent a request.
    Issue(Issue),
    /// All requests that the device found in one look were sent.
    EndOfPass(u8),
    /// The request was done: what comes after it in the recording may depend on it.
    Done(u32),
    /// An acknowledgement of durable work had reached the host: stream and number.
    Acknowledged(u8, u64),
}

/// One disk as it was before the guest started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecordedDisk {
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Blocks of [`PAGE_BYTES`] that are not zero.
    pub base: Vec<(u32, ContentId)>,
}

/// See the module.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recording {
    version: u32,
    /// The scenario that was recorded, by its name in the catalogue.
    pub scenario: String,
    /// Pages of guest memory.
    pub memory_pages: u32,
    /// Pages of rings.
    pub ring_pages: Vec<u32>,
    /// The disks.
    pub disks: Vec<RecordedDisk>,
    /// Names of the streams of acknowledgements.
    pub streams: Vec<String>,
    /// What happened.
    pub events: Vec<Event>,
    #[serde(skip)]
    contents: Vec<Arc<[u8]>>,
}

impl Recording {
    /// An empty recording.
    pub fn new(scenario: &str, memory_pages: u32) -> Self {
        Recording {
            version: VERSION,
            scenario: scenario.to_owned(),
            memory_pages,
            ring_pages: Vec::new(),
            disks: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
            contents: Vec::new(),
        }
    }

    /// A content.
    pub fn content(&self, id: ContentId) -> &Arc<[u8]> {
        &self.contents[id as usize]
    }

    /// Puts the contents in, once, when recording has ended.
    pub fn set_contents(&mut self, contents: Contents) {
        self.contents = contents.list;
    }

    /// All bytes of a write, in order.
    pub fn bytes_of(&self, issue: &Issue) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(issue.len as usize);
        for piece in issue.segments.iter().flatten() {
            if let Some(content) = piece.content {
                bytes.extend_from_slice(self.content(content));
            }
        }
        bytes
    }

    /// Writes a disk as it was before the guest started.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_base(&self, disk: usize, path: &Path) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path).during("making a disk image")?;
        file.set_len(self.disks[disk].size_bytes).during("giving a disk image its size")?;
        for (block, content) in &self.disks[disk].base {
            file.write_all_at(self.content(*content), u64::from(*block) * PAGE_BYTES as u64)
                .during("writing a disk image")?;
        }
        Ok(())
    }

    /// Writes the recording to a file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|e| Error::Other(e.to_string()))?;
        let mut plain = (json.len() as u32).to_le_bytes().to_vec();
        plain.extend_from_slice(&json);
        for content in &self.contents {
            plain.extend_from_slice(&(content.len() as u16).to_le_bytes());
            plain.extend_from_slice(content);
        }
        let mut encoder = zstd::Encoder::new(Vec::from(&MAGIC[..]), 19).during("compressing")?;
        encoder.long_distance_matching(true).during("compressing")?;
        encoder.window_log(27).during("compressing")?;
        encoder.write_all(&plain).during("compressing")?;
        std::fs::write(path, encoder.finish().during("compressing")?).during("writing the recording")
    }

    /// Reads a recording and checks it.
    ///
    /// # Errors
    /// When the file cannot be read, or is not such a recording.
    pub fn load(path: &Path) -> Result<Self> {
        let refuse = |reason: &str| Error::Recording { path: path.to_owned(), reason: reason.to_owned() };
        let raw = std::fs::read(path).during(&format!("reading {}", path.display()))?;
        let compressed = raw.strip_prefix(MAGIC).ok_or_else(|| refuse("it is no recording"))?;
        let mut decoder = zstd::Decoder::new(compressed).during("decompressing")?;
        decoder.window_log_max(27).during("decompressing")?;
        let mut plain = Vec::new();
        decoder
            .take(EXPANDED_BYTES_MAX)
            .read_to_end(&mut plain)
            .map_err(|e| refuse(&format!("it cannot be decompressed ({e})")))?;
        let short = || refuse("it is cut off");
        let (len, rest) = plain.split_first_chunk::<4>().ok_or_else(short)?;
        let len = u32::from_le_bytes(*len) as usize;
        let json = rest.get(..len).ok_or_else(short)?;
        let mut recording: Recording =
            serde_json::from_slice(json).map_err(|e| refuse(&format!("it is not understood ({e})")))?;
        let mut rest = &rest[len..];
        while let Some((len, tail)) = rest.split_first_chunk::<2>() {
            let len = usize::from(u16::from_le_bytes(*len));
            recording.contents.push(Arc::from(tail.get(..len).ok_or_else(short)?));
            rest = &tail[len..];
        }
        recording.check().map_err(|reason| refuse(&reason))?;
        Ok(recording)
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.version != VERSION {
            return Err(format!("it has version {}, not {VERSION}", self.version));
        }
        let content = |id: ContentId| self.contents.get(id as usize).map_or(usize::MAX, |content| content.len());
        for disk in &self.disks {
            for (block, id) in &disk.base {
                if content(*id) != PAGE_BYTES || u64::from(*block) * PAGE_BYTES as u64 >= disk.size_bytes {
                    return Err("a disk's base block is impossible".to_owned());
                }
            }
        }
        let mut requests = 0;
        for event in &self.events {
            match event {
                Event::Issue(issue) => {
                    let disk = self.disks.get(usize::from(issue.disk)).ok_or("a request is for no disk")?;
                    let end = issue.offset.checked_add(issue.len).ok_or("a request wraps around")?;
                    let pieces: u64 = issue.segments.iter().flatten().map(|piece| u64::from(piece.len)).sum();
                    let is_good = issue.segments.iter().flatten().all(|piece| {
                        piece.page < self.memory_pages
                            && usize::from(piece.offset) + usize::from(piece.len) <= PAGE_BYTES
                            && piece.content.is_some() == (issue.kind == Kind::Write)
                            && piece.content.is_none_or(|id| content(id) == usize::from(piece.len))
                    });
                    let carries = matches!(issue.kind, Kind::Read | Kind::Write);
                    if issue.id != requests || end > disk.size_bytes || !is_good || (carries && pieces != issue.len) {
                        return Err(format!("request {} is impossible", issue.id));
                    }
                    requests += 1;
                }
                Event::Done(id) if *id >= requests => return Err(format!("request {id} is done before it came")),
                Event::EndOfPass(disk) if usize::from(*disk) >= self.disks.len() => {
                    return Err("a pass is of no disk".to_owned());
                }
                Event::Acknowledged(stream, _) if usize::from(*stream) >= self.streams.len() => {
                    return Err("an acknowledgement is on no stream".to_owned());
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Distinct contents, numbered as they come.
#[derive(Debug, Default)]
pub struct Contents {
    list: Vec<Arc<[u8]>>,
    known: HashMap<Arc<[u8]>, ContentId>,
}

impl Contents {
    /// The number of a content of at most a page.
    pub fn intern(&mut self, bytes: &[u8]) -> ContentId {
        if let Some(id) = self.known.get(bytes) {
            return *id;
        }
        let content: Arc<[u8]> = Arc::from(bytes);
        let id = self.list.len() as ContentId;
        self.list.push(Arc::clone(&content));
        self.known.insert(content, id);
        id
    }
}
