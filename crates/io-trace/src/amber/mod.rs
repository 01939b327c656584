//! amberlog's own trace format, version 1: compact, streamed, and readable up to the byte where its writer died.
//!
//! All numbers are little-endian. A file is a preamble and frames:
//!
//! ```text
//! preamble  8 bytes "AMBTRACE", u16 version (1), u16 0, u32 0
//! frame     u32 mark "ARFM", u8 what (1 names, 2 records, 3 end), u8 compression (0 none, 1 zstd), u16 0,
//!           u32 stored bytes, u32 plain bytes, u32 records in it, u32 CRC-32C of the 20 bytes before it and the stored bytes
//!           payload (stored bytes)
//! names     entries: u8 1 (VM), u16 length, name  |  u8 2 (disk), u16 VM, u64 capacity in bytes, u16 length, name
//!           (numbers follow from the order; a names frame may come anywhere before the first use)
//! records   u64 time base in ns, then per record:
//!           u8 tag: bits 0-2 kind, bit 3 VM and disk as before, bit 4 units are bytes (else 512), bit 5 starts where the last ended
//!           varint (zigzag) ns since the record before; unless bit 3: varint VM, varint disk;
//!           unless bit 5: varint (zigzag) distance from the last end in units; varint length in units
//! end       u64 records in the whole trace
//! ```
//!
//! A frame is decoded without any other, so a damaged one costs its own records only. A frame's payload is at
//! most 1 MiB, stored and plain, whatever a hostile file claims. A trace without an end frame was not closed.

mod reader;
mod varint;
mod writer;

pub use reader::{Ending, Reader};
pub use writer::{Writer, WriterOptions};

/// The first 8 bytes of an amber trace.
pub const MAGIC: [u8; 8] = *b"AMBTRACE";
/// The version written, and the only one read.
pub const VERSION: u16 = 1;

const PREAMBLE_BYTES: usize = 16;
const FRAME_MARK: [u8; 4] = *b"ARFM";
const FRAME_HEADER_BYTES: usize = 24;
/// Bound on a frame's payload, stored and plain.
const PAYLOAD_BYTES_MAX: usize = 1 << 20;
const FRAME_NAMES: u8 = 1;
const FRAME_RECORDS: u8 = 2;
const FRAME_END: u8 = 3;
const PLAIN: u8 = 0;
const ZSTD: u8 = 1;
const NAME_VM: u8 = 1;
const NAME_DISK: u8 = 2;
const TAG_KIND: u8 = 0x07;
const TAG_SAME_DISK: u8 = 0x08;
const TAG_BYTES: u8 = 0x10;
const TAG_SEQUENTIAL: u8 = 0x20;
const UNIT: u64 = 512;

#[cfg(test)]
mod tests;
