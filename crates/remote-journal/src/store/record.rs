//! What segments are made of: records of a 64-byte header and a payload, each with a CRC-32C, padded to 64 bytes.
//!
//! A header names its segment and its store, so that a record which an earlier file left on the same sectors of a disk is
//! not taken for one of this segment. All numbers are little-endian. Whatever a later version changes, a header of 64 bytes
//! with magic, version, store and checksum where they are now tells this one that it does not understand the store.

use crate::bytes::{Reader, put_bytes};

/// Bytes of a header; records begin at multiples of this.
pub const HEADER_BYTES: usize = 64;
const MAGIC: u32 = 0x4c42_4d41;
/// The version of the format.
pub const VERSION: u8 = 1;
/// No payload is longer: a batch is a frame, a checkpoint names at most [`super::JOURNALS_MAX`] journals.
pub const PAYLOAD_BYTES_MAX: u32 = 4 << 20;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Blocks of a journal.
    Batch,
    /// All journals, as of the beginning of a segment.
    Checkpoint,
    /// One journal as it is from here on: begun, taken, closed.
    Journal,
    /// A journal is gone.
    Delete,
    /// Nothing: fills a group up to where the next may begin.
    Filler,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [Kind::Batch, Kind::Checkpoint, Kind::Journal, Kind::Delete, Kind::Filler]
            .into_iter()
            .find(|kind| *kind as u8 + 1 == byte)
    }
}

/// A header, without its checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the record says.
    pub kind: Kind,
    /// Bytes of payload.
    pub payload_bytes: u32,
    /// The payload's CRC-32C.
    pub payload_crc: u32,
    /// Which journal; 0 for a checkpoint.
    pub journal: u32,
    /// Low half of the segment's number.
    pub segment: u32,
    /// The batch's epoch.
    pub epoch: u64,
    /// The batch's number in its epoch, from 1 on.
    pub sequence: u64,
    /// The first batch that is still needed.
    pub tail: u64,
    /// Records of one group are made durable together, and before any of the next is written.
    pub group: u64,
    /// Which store.
    pub store: u32,
    /// Whether it is the first of its group: what lies before it is then the end of an earlier one, which was durable.
    pub is_first: bool,
}

/// Bytes that a record takes in its segment.
pub fn record_bytes(payload_bytes: usize) -> u64 {
    (HEADER_BYTES + payload_bytes.next_multiple_of(HEADER_BYTES)) as u64
}

impl Header {
    /// The header as it is written before its payload; lengths and the payload's checksum are filled in here.
    pub fn bytes(mut self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        self.payload_bytes = payload.len() as u32;
        self.payload_crc = crc32c::crc32c(payload);
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&[self.kind as u8 + 1, VERSION, u8::from(self.is_first), 0]);
        for word in [self.payload_bytes, self.payload_crc, self.journal, self.segment] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for word in [self.epoch, self.sequence, self.tail, self.group] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.store.to_le_bytes());
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out.try_into().expect("the fields are so many bytes")
    }

    /// Reads a header; nothing when it is none, or none of this store and segment.
    pub fn read(bytes: &[u8], store: Option<u32>, segment: u64) -> Option<Self> {
        let mut reader = Reader::new(bytes.get(..HEADER_BYTES)?);
        let magic = reader.u32()?;
        let [kind, version, flags, _] = reader.array::<4>()?;
        let header = Header {
            kind: Kind::from_byte(kind)?,
            payload_bytes: reader.u32()?,
            payload_crc: reader.u32()?,
            journal: reader.u32()?,
            segment: reader.u32()?,
            epoch: reader.u64()?,
            sequence: reader.u64()?,
            tail: reader.u64()?,
            group: reader.u64()?,
            store: reader.u32()?,
            is_first: flags & 1 != 0,
        };
        let crc = reader.u32()?;
        let is_good = magic == MAGIC
            && version == VERSION
            && header.payload_bytes <= PAYLOAD_BYTES_MAX
            && crc == crc32c::crc32c(&bytes[..HEADER_BYTES - 4])
            && header.segment == segment as u32
            && store.is_none_or(|store| store == header.store);
        is_good.then_some(header)
    }

    /// The version of the program that wrote a header, where it is another one and the header is whole, and of this store:
    /// guests do not know that number.
    pub fn other_version(bytes: &[u8], store: Option<u32>) -> Option<u8> {
        let version = Self::claimed_version(bytes)?;
        let (head, crc) = bytes.get(..HEADER_BYTES)?.split_at(HEADER_BYTES - 4);
        let of_store = &head[HEADER_BYTES - 8..];
        (store.is_none_or(|store| store.to_le_bytes() == of_store)
            && version != VERSION
            && crc32c::crc32c(head).to_le_bytes() == crc)
            .then_some(version)
    }

    /// The version that a header speaks of, whole or not.
    pub fn claimed_version(bytes: &[u8]) -> Option<u8> {
        let mut reader = Reader::new(bytes.get(..HEADER_BYTES)?);
        let magic = reader.u32()?;
        let [_, version, ..] = reader.array::<4>()?;
        (magic == MAGIC).then_some(version)
    }

    /// Whether a payload is the one that was written.
    pub fn matches(&self, payload: &[u8]) -> bool {
        payload.len() == self.payload_bytes as usize && crc32c::crc32c(payload) == self.payload_crc
    }
}

/// A journal as checkpoints and records of kind [`Kind::Journal`] carry it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalRecord {
    /// Its number in this store; never used again.
    pub id: u32,
    /// Whose it is and what it is called.
    pub name: String,
    /// Which file system's journal it is.
    pub owner: [u8; 16],
    /// Tells this epoch's log from any other of the same number.
    pub nonce: [u8; 16],
    /// The epoch of what is kept.
    pub epoch: u64,
    /// The highest epoch that was given out; only who has it may write.
    pub fence: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Whether a log is kept: begun and not closed.
    pub is_live: bool,
    /// Whether what is kept was recovered: nobody needs it, but for who recovered the wrong disk with it.
    pub is_recovered: bool,
    /// The first batch that is still needed.
    pub tail: u64,
    /// The last batch.
    pub last: u64,
    /// Something was lost of which it is not known whether it was of this journal, after its last batch that is known.
    pub is_end_in_doubt: bool,
}

/// Bits of a journal's state; the first version knew one, took any other for it, and keeps what it does not understand.
const LIVE: u8 = 1;
const RECOVERED: u8 = 2;
const IN_DOUBT: u8 = 4;

impl JournalRecord {
    /// Appends it to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.to_le_bytes());
        put_bytes(out, self.name.as_bytes());
        out.extend_from_slice(&self.owner);
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.fence.to_le_bytes());
        out.extend_from_slice(&self.block_bytes.to_le_bytes());
        let bit = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        out.push(
            bit(self.is_live, LIVE)
                | bit(self.is_live && self.is_recovered, RECOVERED)
                | bit(self.is_live && self.is_end_in_doubt, IN_DOUBT),
        );
        out.extend_from_slice(&self.tail.to_le_bytes());
        out.extend_from_slice(&self.last.to_le_bytes());
    }

    /// Reads one.
    pub fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let mut record = JournalRecord {
            id: reader.u32()?,
            name: String::from_utf8(reader.bytes()?.to_vec()).ok()?,
            owner: reader.array()?,
            nonce: reader.array()?,
            epoch: reader.u64()?,
            fence: reader.u64()?,
            block_bytes: reader.u32()?,
            is_live: false,
            is_recovered: false,
            is_end_in_doubt: false,
            tail: 0,
            last: 0,
        };
        let state = reader.u8()?;
        record.is_live = state != 0;
        record.is_recovered = state & RECOVERED != 0;
        record.is_end_in_doubt = state & IN_DOUBT != 0;
        (record.tail, record.last) = (reader.u64()?, reader.u64()?);
        Some(record)
    }
}
