//! The wire protocol: frames, and what they say.
//!
//! A frame is a header of 12 bytes — payload length (4), kind (1), protocol version (1), zero (2), CRC-32C of those eight
//! bytes and the payload (4) — and the payload; numbers are little-endian. A batch carries one more CRC-32C for every
//! block, which the client computes when it takes the block from the guest and which is stored with it, so that a block is
//! covered from end to end.
//!
//! The server speaks first ([`Message::Challenge`]), the client answers with [`Message::Hello`]; then the client asks and
//! the server answers, in order, but for batches: they are pipelined, and a [`Message::Durable`] answers all up to one.

use crate::bytes::{Reader, put_bytes};
use std::sync::Arc;

/// The version of the protocol.
pub const PROTOCOL_VERSION: u8 = 1;
/// Bytes before the payload.
pub const FRAME_HEADER_BYTES: usize = 12;
/// No payload is longer, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;
/// No payload is longer from a peer that has not said who it is, in bytes.
pub const PAYLOAD_BYTES_MAX_BEFORE_HELLO: usize = 1024;
/// Bytes before a batch's blocks.
pub const BATCH_HEADER_BYTES: usize = 28;
/// Bytes before a block's content.
pub const BLOCK_HEADER_BYTES: usize = 8;
/// No name is longer, in bytes.
pub const NAME_BYTES_MAX: usize = 128;
/// Logs that a begin can name as its own.
pub const AFTER_MAX: usize = 4;

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Too long.
    #[error("a frame of {0} bytes is longer than allowed here")]
    Oversized(usize),
    /// Of another version.
    #[error("the peer speaks version {0} of the protocol, not {PROTOCOL_VERSION}: use the same amberlog on both sides")]
    Version(u8),
    /// Damaged on the way.
    #[error("a frame's checksum does not match")]
    Checksum,
    /// A block damaged on the way.
    #[error("the checksum of journal block {0} does not match")]
    BlockChecksum(u32),
    /// Not understood.
    #[error("a frame of kind {0} is malformed")]
    Malformed(u8),
}

/// What a server refuses with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Who the peer is was not proven.
    Unauthenticated,
    /// A higher epoch was given out.
    Fenced,
    /// No room.
    Full,
    /// Something kept was damaged or lost.
    Damaged,
    /// The server's storage failed.
    Failed,
    /// The server is stopping.
    Stopping,
    /// Anything else.
    Refused,
    /// Somebody writes to it, and is there. Said only to who asks for that ([`Message::TakeFree`]).
    InUse,
}

const REFUSALS: [Refusal; 8] = [
    Refusal::Unauthenticated,
    Refusal::Fenced,
    Refusal::Full,
    Refusal::Damaged,
    Refusal::Failed,
    Refusal::Stopping,
    Refusal::Refused,
    Refusal::InUse,
];

/// One journal, as the server tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalStatus {
    /// Its name.
    pub name: String,
    /// The file system's UUID.
    pub owner: [u8; 16],
    /// Tells this epoch's log from any other of the same number.
    pub nonce: [u8; 16],
    /// The epoch of what is kept.
    pub epoch: u64,
    /// The highest epoch given out.
    pub fence: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Whether a log is kept.
    pub is_live: bool,
    /// Whether it was recovered: it is kept until the next one begins.
    pub is_recovered: bool,
    /// First batch needed.
    pub tail: u64,
    /// Last batch.
    pub last: u64,
    /// Batches kept.
    pub batches: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// One block of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Log block number.
    pub position: u32,
    /// CRC-32C of the content.
    pub crc: u32,
    /// The content.
    pub content: Arc<[u8]>,
}

impl Block {
    /// A block as it comes from the guest.
    pub fn new(position: u32, content: Arc<[u8]>) -> Self {
        Block { position, crc: crc32c::crc32c(&content), content }
    }
}

/// Blocks of one journal, in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Who writes.
    pub epoch: u64,
    /// Its number, from 1 on, without gaps.
    pub sequence: u64,
    /// The first batch that is needed after this one.
    pub tail: u64,
    /// The blocks; a later one replaces an earlier one of the same position.
    pub blocks: Vec<Block>,
}

/// What is said.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are described where they are made")]
pub enum Message {
    /// Server: prove who you are, over these bytes.
    Challenge { nonce: [u8; 32] },
    /// Client: who it is, and the proof (zeros where TLS has proven it).
    Hello { identity: String, proof: [u8; 32] },
    /// Server: known, as this.
    Welcome { identity: String },
    /// Client of an amberlog up to 0.1: begin a log. It says the last epoch that it was given, and nothing else by which to
    /// tell whether what is kept is its own.
    Begin { name: String, owner: [u8; 16], nonce: [u8; 16], epoch_min: u64, block_bytes: u32 },
    /// Server: begun.
    Begun { epoch: u64 },
    /// Client, of the journal begun on this connection; server, as the answer to a fetch.
    Batch(Batch),
    /// Server: durable, up to and with this batch.
    Durable { sequence: u64 },
    /// Client: this log is over.
    Close { name: String, epoch: u64, nonce: [u8; 16] },
    /// Server: done.
    Done,
    /// Client: fence off the writer.
    Take { name: String },
    /// Client: what is kept.
    List,
    /// Server: this.
    Journals(Vec<JournalStatus>),
    /// Client: all batches from this one on. The server answers with batches and a `Done`.
    Fetch { name: String, epoch: u64, from: u64 },
    /// Client: remove a journal.
    Delete { name: String, even_live: bool },
    /// Either: are you there?
    Ping,
    /// Either: yes.
    Pong,
    /// Server: no.
    Refuse { refusal: Refusal, reason: String },
    /// Client: begin a log, in the place of none but one of those that these nonces name.
    BeginAfter {
        name: String,
        owner: [u8; 16],
        nonce: [u8; 16],
        epoch_min: u64,
        block_bytes: u32,
        after: Vec<[u8; 16]>,
    },
    /// Client: fence off the writer of this very log.
    TakeLog { name: String, epoch: u64, nonce: [u8; 16] },
    /// Client: this log, of which the client is the writer, has another nonce from now on.
    Rename { name: String, epoch: u64, nonce: [u8; 16], next: [u8; 16] },
    /// Client: fence off the writer of this very log, if he is not there.
    TakeFree { name: String, epoch: u64, nonce: [u8; 16] },
}

impl Message {
    pub(crate) fn kind(&self) -> u8 {
        match self {
            Message::Challenge { .. } => 1,
            Message::Hello { .. } => 2,
            Message::Welcome { .. } => 3,
            Message::Begin { .. } => 4,
            Message::Begun { .. } => 5,
            Message::Batch(_) => 6,
            Message::Durable { .. } => 7,
            Message::Close { .. } => 8,
            Message::Done => 9,
            Message::Take { .. } => 10,
            Message::List => 11,
            Message::Journals(_) => 12,
            Message::Fetch { .. } => 13,
            Message::Delete { .. } => 14,
            Message::Ping => 15,
            Message::Pong => 16,
            Message::Refuse { .. } => 17,
            Message::BeginAfter { .. } => 18,
            Message::TakeLog { .. } => 19,
            Message::Rename { .. } => 20,
            Message::TakeFree { .. } => 21,
        }
    }

    /// Appends it to `out` as a frame.
    pub fn write(&self, out: &mut Vec<u8>) {
        let start = begin_frame(out);
        match self {
            Message::Challenge { nonce } => out.extend_from_slice(nonce),
            Message::Hello { identity, proof } => {
                put_bytes(out, identity.as_bytes());
                out.extend_from_slice(proof);
            }
            Message::Welcome { identity } => put_bytes(out, identity.as_bytes()),
            Message::Begin { name, owner, nonce, epoch_min, block_bytes } => {
                put_bytes(out, name.as_bytes());
                out.extend_from_slice(owner);
                out.extend_from_slice(nonce);
                out.extend_from_slice(&epoch_min.to_le_bytes());
                out.extend_from_slice(&block_bytes.to_le_bytes());
            }
            Message::BeginAfter { name, owner, nonce, epoch_min, block_bytes, after } => {
                put_bytes(out, name.as_bytes());
                out.extend_from_slice(owner);
                out.extend_from_slice(nonce);
                out.extend_from_slice(&epoch_min.to_le_bytes());
                out.extend_from_slice(&block_bytes.to_le_bytes());
                debug_assert!(after.len() <= AFTER_MAX);
                out.push(after.len() as u8);
                after.iter().for_each(|nonce| out.extend_from_slice(nonce));
            }
            Message::Begun { epoch } => out.extend_from_slice(&epoch.to_le_bytes()),
            Message::Batch(batch) => batch.write(out),
            Message::Durable { sequence } => out.extend_from_slice(&sequence.to_le_bytes()),
            Message::Close { name, epoch, nonce }
            | Message::TakeLog { name, epoch, nonce }
            | Message::TakeFree { name, epoch, nonce } => {
                put_bytes(out, name.as_bytes());
                out.extend_from_slice(&epoch.to_le_bytes());
                out.extend_from_slice(nonce);
            }
            Message::Rename { name, epoch, nonce, next } => {
                put_bytes(out, name.as_bytes());
                out.extend_from_slice(&epoch.to_le_bytes());
                out.extend_from_slice(nonce);
                out.extend_from_slice(next);
            }
            Message::Take { name } => put_bytes(out, name.as_bytes()),
            Message::Journals(journals) => {
                out.extend_from_slice(&(journals.len() as u32).to_le_bytes());
                journals.iter().for_each(|journal| journal.write(out));
            }
            Message::Fetch { name, epoch, from } => {
                put_bytes(out, name.as_bytes());
                out.extend_from_slice(&epoch.to_le_bytes());
                out.extend_from_slice(&from.to_le_bytes());
            }
            Message::Delete { name, even_live } => {
                put_bytes(out, name.as_bytes());
                out.push(u8::from(*even_live));
            }
            Message::Refuse { refusal, reason } => {
                out.push(*refusal as u8);
                put_bytes(out, reason.as_bytes());
            }
            Message::Done | Message::List | Message::Ping | Message::Pong => {}
        }
        end_frame(out, start, self.kind());
    }

    /// Reads the payload of a frame whose checksum matched.
    ///
    /// # Errors
    /// When it is malformed: every byte has to have a meaning.
    pub fn read(kind: u8, payload: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new(payload);
        if kind == 6 {
            return Batch::read(payload).map(Message::Batch);
        }
        Self::read_fields(kind, &mut reader).filter(|_| reader.is_at_end()).ok_or(MessageError::Malformed(kind))
    }

    fn read_fields(kind: u8, reader: &mut Reader<'_>) -> Option<Self> {
        Some(match kind {
            1 => Message::Challenge { nonce: reader.array()? },
            2 => Message::Hello { identity: name(reader)?, proof: reader.array()? },
            3 => Message::Welcome { identity: name(reader)? },
            4 => Message::Begin {
                name: name(reader)?,
                owner: reader.array()?,
                nonce: reader.array()?,
                epoch_min: reader.u64()?,
                block_bytes: reader.u32()?,
            },
            5 => Message::Begun { epoch: reader.u64()? },
            7 => Message::Durable { sequence: reader.u64()? },
            8 => Message::Close { name: name(reader)?, epoch: reader.u64()?, nonce: reader.array()? },
            9 => Message::Done,
            10 => Message::Take { name: name(reader)? },
            11 => Message::List,
            12 => {
                let count = reader.u32()?;
                let mut journals = Vec::new();
                for _ in 0..count {
                    journals.push(JournalStatus::read(reader)?);
                }
                Message::Journals(journals)
            }
            13 => Message::Fetch { name: name(reader)?, epoch: reader.u64()?, from: reader.u64()? },
            14 => Message::Delete { name: name(reader)?, even_live: reader.u8()? != 0 },
            15 => Message::Ping,
            16 => Message::Pong,
            17 => Message::Refuse {
                refusal: *REFUSALS.get(usize::from(reader.u8()?))?,
                reason: reader.text()?.chars().filter(|c| !c.is_control()).take(400).collect(),
            },
            18 => {
                let (name, owner, nonce) = (name(reader)?, reader.array()?, reader.array()?);
                let (epoch_min, block_bytes, count) = (reader.u64()?, reader.u32()?, reader.u8()?);
                if usize::from(count) > AFTER_MAX {
                    return None;
                }
                let mut after = Vec::new();
                for _ in 0..count {
                    after.push(reader.array()?);
                }
                Message::BeginAfter { name, owner, nonce, epoch_min, block_bytes, after }
            }
            19 => Message::TakeLog { name: name(reader)?, epoch: reader.u64()?, nonce: reader.array()? },
            20 => Message::Rename {
                name: name(reader)?,
                epoch: reader.u64()?,
                nonce: reader.array()?,
                next: reader.array()?,
            },
            21 => Message::TakeFree { name: name(reader)?, epoch: reader.u64()?, nonce: reader.array()? },
            _ => return None,
        })
    }
}

/// A name: printable, not empty, without what could be mistaken in a path or a log line.
fn name(reader: &mut Reader<'_>) -> Option<String> {
    let name = reader.text()?;
    is_name(&name).then_some(name)
}

/// Whether this can be the name of a client or a journal.
pub fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.@:+".contains(&byte))
}

impl JournalStatus {
    fn write(&self, out: &mut Vec<u8>) {
        put_bytes(out, self.name.as_bytes());
        out.extend_from_slice(&self.owner);
        out.extend_from_slice(&self.nonce);
        for word in [self.epoch, self.fence, self.tail, self.last, self.batches, self.bytes] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.block_bytes.to_le_bytes());
        // An older client takes any bit for "live".
        out.push(u8::from(self.is_live) | u8::from(self.is_recovered) << 1);
    }

    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let name = name(reader)?;
        let (owner, nonce) = (reader.array()?, reader.array()?);
        let mut words = [0; 6];
        for word in &mut words {
            *word = reader.u64()?;
        }
        let [epoch, fence, tail, last, batches, bytes] = words;
        let (block_bytes, kept) = (reader.u32()?, reader.u8()?);
        let (is_live, is_recovered) = (kept != 0, kept & 2 != 0);
        Some(JournalStatus {
            name,
            owner,
            nonce,
            epoch,
            fence,
            block_bytes,
            is_live,
            is_recovered,
            tail,
            last,
            batches,
            bytes,
        })
    }
}

impl Batch {
    /// Bytes of the frame's payload.
    pub fn payload_bytes(&self) -> usize {
        BATCH_HEADER_BYTES + self.blocks.iter().map(|block| BLOCK_HEADER_BYTES + block.content.len()).sum::<usize>()
    }

    fn write(&self, out: &mut Vec<u8>) {
        let block_bytes = self.blocks.first().map_or(0, |block| block.content.len() as u32);
        for word in [self.epoch, self.sequence, self.tail] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&block_bytes.to_le_bytes());
        for block in &self.blocks {
            debug_assert_eq!(block.content.len() as u32, block_bytes);
            out.extend_from_slice(&block.position.to_le_bytes());
            out.extend_from_slice(&block.crc.to_le_bytes());
            out.extend_from_slice(&block.content);
        }
    }

    /// Reads a batch and compares every block's checksum.
    ///
    /// # Errors
    /// When it is malformed, or a checksum does not match.
    pub fn read(payload: &[u8]) -> Result<Self, MessageError> {
        let header = BatchHeader::read(payload)?;
        let each = BLOCK_HEADER_BYTES + header.block_bytes as usize;
        let mut blocks = Vec::new();
        for bytes in payload[BATCH_HEADER_BYTES..].chunks_exact(each) {
            let mut reader = Reader::new(bytes);
            let (Some(position), Some(crc)) = (reader.u32(), reader.u32()) else {
                return Err(MessageError::Malformed(6));
            };
            blocks.push(Block { position, crc, content: reader.rest().into() });
        }
        Ok(Batch { epoch: header.epoch, sequence: header.sequence, tail: header.tail, blocks })
    }
}

/// What comes before a batch's blocks; the server stores the rest as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "as in a batch")]
pub struct BatchHeader {
    pub epoch: u64,
    pub sequence: u64,
    pub tail: u64,
    pub block_bytes: u32,
}

impl BatchHeader {
    /// Reads the header of a batch, having compared every block's checksum.
    ///
    /// # Errors
    /// When it is malformed, or a checksum does not match.
    pub fn read(payload: &[u8]) -> Result<Self, MessageError> {
        let malformed = MessageError::Malformed(6);
        let mut reader = Reader::new(payload);
        let read = |reader: &mut Reader<'_>| {
            Some(BatchHeader {
                epoch: reader.u64()?,
                sequence: reader.u64()?,
                tail: reader.u64()?,
                block_bytes: reader.u32()?,
            })
        };
        let header = read(&mut reader).ok_or_else(|| malformed.clone())?;
        let rest = reader.rest();
        let each = BLOCK_HEADER_BYTES + header.block_bytes as usize;
        if !(512..=65536).contains(&header.block_bytes) || rest.is_empty() || !rest.len().is_multiple_of(each) {
            return Err(malformed);
        }
        for bytes in rest.chunks_exact(each) {
            let mut reader = Reader::new(bytes);
            let (Some(position), Some(crc)) = (reader.u32(), reader.u32()) else { return Err(malformed) };
            if crc32c::crc32c(reader.rest()) != crc {
                return Err(MessageError::BlockChecksum(position));
            }
        }
        Ok(header)
    }
}

/// Appends a batch that is stored as it came, as a frame.
///
/// # Errors
/// When it is none, or a block's checksum does not match.
pub(crate) fn write_stored_batch(out: &mut Vec<u8>, payload: &[u8]) -> Result<(), MessageError> {
    BatchHeader::read(payload)?;
    let start = begin_frame(out);
    out.extend_from_slice(payload);
    end_frame(out, start, 6);
    Ok(())
}

fn begin_frame(out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.resize(start + FRAME_HEADER_BYTES, 0);
    start
}

fn end_frame(out: &mut [u8], start: usize, kind: u8) {
    let payload_bytes = (out.len() - start - FRAME_HEADER_BYTES) as u32;
    out[start..start + 4].copy_from_slice(&payload_bytes.to_le_bytes());
    out[start + 4] = kind;
    out[start + 5] = PROTOCOL_VERSION;
    let crc = frame_crc(&out[start..start + 8], &out[start + FRAME_HEADER_BYTES..]);
    out[start + 8..start + FRAME_HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
}

fn frame_crc(head: &[u8], payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(head), payload)
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes that follow.
    pub payload_bytes: usize,
    /// What the payload is.
    pub kind: u8,
    head: [u8; 8],
    crc: u32,
}

impl FrameHeader {
    /// Reads a header; says whether its payload would be too long, before a byte of it is read.
    ///
    /// # Errors
    /// When the frame is too long or of another version.
    pub fn read(bytes: &[u8; FRAME_HEADER_BYTES], payload_bytes_max: usize) -> Result<Self, MessageError> {
        let [a, b, c, d, kind, version, _, _, e, f, g, h] = *bytes;
        if version != PROTOCOL_VERSION {
            return Err(MessageError::Version(version));
        }
        let payload_bytes = u32::from_le_bytes([a, b, c, d]) as usize;
        if payload_bytes > payload_bytes_max {
            return Err(MessageError::Oversized(payload_bytes));
        }
        let mut head = [0; 8];
        head.copy_from_slice(&bytes[..8]);
        Ok(FrameHeader { payload_bytes, kind, head, crc: u32::from_le_bytes([e, f, g, h]) })
    }

    /// Compares the checksum.
    ///
    /// # Errors
    /// When it does not match.
    pub fn check(&self, payload: &[u8]) -> Result<(), MessageError> {
        if frame_crc(&self.head, payload) == self.crc { Ok(()) } else { Err(MessageError::Checksum) }
    }
}

/// Reads all frames of a byte string: for fuzzing and tests.
///
/// # Errors
/// At the first that is malformed.
pub fn read_all(mut bytes: &[u8], payload_bytes_max: usize) -> Result<Vec<Message>, MessageError> {
    let mut messages = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() {
        let header = FrameHeader::read(head, payload_bytes_max)?;
        let Some((payload, rest)) = rest.split_at_checked(header.payload_bytes) else { break };
        header.check(payload)?;
        messages.push(Message::read(header.kind, payload)?);
        bytes = rest;
    }
    Ok(messages)
}
