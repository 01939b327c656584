//! What a descriptor chain asks for (virtio 1.2, section 5.2.6), checked.

use crate::chain::{Chain, copy_out, skip_front, total_len};
use crate::config_space::{RANGE_SECTORS_MAX, RANGES_MAX, REQUEST_BYTES_MAX, SEGMENTS_MAX};
use crate::image::SECTOR_BYTES;
use block_route::{RequestKind, Status};
use guest_memory::MemorySlice;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;
const UNMAP: u32 = 1;
/// Bytes of the answer to GET_ID.
pub(crate) const ID_BYTES: usize = 20;

/// What a disk allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) size_bytes: u64,
    pub(crate) read_only: bool,
    pub(crate) discard: bool,
    pub(crate) write_zeroes: bool,
}

/// A range of the disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) kind: RequestKind,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// What a chain asks for. The data segments are left in the chain.
#[derive(Debug, PartialEq, Eq)]
pub enum Ask {
    /// A read into the chain's writable segments.
    Read {
        /// Where on the disk, in bytes.
        offset: u64,
        /// How much, in bytes.
        len: u64,
    },
    /// A write of the chain's readable segments.
    Write {
        /// Where on the disk, in bytes.
        offset: u64,
        /// How much, in bytes.
        len: u64,
    },
    /// A flush.
    Flush,
    /// The ranges are in the caller's list.
    Ranges,
    /// The serial number into the chain's writable segments.
    Identity,
    /// Nothing to be done: it ends so.
    Finish(Status),
}

/// Reads the request out of a chain that was walked. Ranges of a discard or write-zeroes request are put into `ranges`.
pub(crate) fn parse(chain: &mut Chain, limits: Limits, ranges: &mut Vec<Range>) -> Ask {
    ranges.clear();
    let readable_len = total_len(&chain.readable);
    if chain.is_too_much || chain.unreachable.is_some() || readable_len < HEADER_BYTES as u64 {
        return Ask::Finish(Status::IoError);
    }
    let mut header = [0u8; HEADER_BYTES];
    copy_out(&chain.readable, &mut header);
    skip_front(&mut chain.readable, HEADER_BYTES);
    let kind = u32::from_le_bytes(header[0..4].try_into().expect("four bytes"));
    let sector = u64::from_le_bytes(header[8..16].try_into().expect("eight bytes"));
    let written_len = readable_len - HEADER_BYTES as u64;
    match kind {
        VIRTIO_BLK_T_IN => match transfer(sector, &chain.writable, limits) {
            Ok((_, 0)) => Ask::Finish(Status::Ok),
            Ok((offset, len)) => Ask::Read { offset, len },
            Err(status) => Ask::Finish(status),
        },
        VIRTIO_BLK_T_OUT if limits.read_only => Ask::Finish(Status::IoError),
        VIRTIO_BLK_T_OUT => match transfer(sector, &chain.readable, limits) {
            Ok((_, 0)) => Ask::Finish(Status::Ok),
            Ok((offset, len)) => Ask::Write { offset, len },
            Err(status) => Ask::Finish(status),
        },
        VIRTIO_BLK_T_FLUSH => Ask::Flush,
        VIRTIO_BLK_T_GET_ID if chain.writable.is_empty() => Ask::Finish(Status::IoError),
        VIRTIO_BLK_T_GET_ID => Ask::Identity,
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
            let zeroes = kind == VIRTIO_BLK_T_WRITE_ZEROES;
            match parse_ranges(zeroes, &chain.readable, written_len, limits, ranges) {
                Ok(()) if ranges.is_empty() => Ask::Finish(Status::Ok),
                Ok(()) => Ask::Ranges,
                Err(status) => Ask::Finish(status),
            }
        }
        _ => Ask::Finish(Status::Unsupported),
    }
}

/// Offset and length in bytes of a transfer, if it is inside the disk.
fn transfer(sector: u64, segments: &[MemorySlice], limits: Limits) -> Result<(u64, u64), Status> {
    let len = total_len(segments);
    if !len.is_multiple_of(SECTOR_BYTES) || len > REQUEST_BYTES_MAX || segments.len() > SEGMENTS_MAX as usize {
        return Err(Status::IoError);
    }
    let offset = inside(sector, len, limits).ok_or(Status::IoError)?;
    Ok((offset, len))
}

/// The byte offset of `len` bytes from `sector` on, if they are inside the disk.
fn inside(sector: u64, len: u64, limits: Limits) -> Option<u64> {
    let offset = sector.checked_mul(SECTOR_BYTES)?;
    let end = offset.checked_add(len)?;
    (end <= limits.size_bytes).then_some(offset)
}

fn parse_ranges(
    zeroes: bool,
    readable: &[MemorySlice],
    len: u64,
    limits: Limits,
    ranges: &mut Vec<Range>,
) -> Result<(), Status> {
    if limits.read_only {
        return Err(Status::IoError);
    }
    if !(if zeroes { limits.write_zeroes } else { limits.discard }) {
        return Err(Status::Unsupported);
    }
    if len == 0 || !len.is_multiple_of(RANGE_BYTES as u64) || len > u64::from(RANGES_MAX) * RANGE_BYTES as u64 {
        return Err(Status::IoError);
    }
    // Copied as a whole, because one range may be split over descriptors and the guest may change it.
    let mut raw = [0u8; RANGES_MAX as usize * RANGE_BYTES];
    let raw = &mut raw[..len as usize];
    copy_out(readable, raw);
    for entry in raw.chunks_exact(RANGE_BYTES) {
        let sector = u64::from_le_bytes(entry[0..8].try_into().expect("eight bytes"));
        let sectors = u32::from_le_bytes(entry[8..12].try_into().expect("four bytes"));
        let flags = u32::from_le_bytes(entry[12..16].try_into().expect("four bytes"));
        // Section 5.2.6.2: an unknown flag, or `unmap` on a discard, is answered with "unsupported".
        if flags & !UNMAP != 0 || (!zeroes && flags != 0) {
            return Err(Status::Unsupported);
        }
        if sectors > RANGE_SECTORS_MAX {
            return Err(Status::IoError);
        }
        let len = u64::from(sectors) * SECTOR_BYTES;
        let offset = inside(sector, len, limits).ok_or(Status::IoError)?;
        let kind = if zeroes { RequestKind::WriteZeroes { unmap: flags & UNMAP != 0 } } else { RequestKind::Discard };
        if len > 0 {
            ranges.push(Range { kind, offset, len });
        }
    }
    Ok(())
}

/// Tests use the daemon's own memory in place of a guest's.
#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::PageId;
    use proptest::prelude::*;

    fn slice(memory: &mut [u8]) -> MemorySlice {
        // SAFETY: every test keeps the memory alive and unmoved while it uses the slice.
        unsafe { MemorySlice::new(memory.as_mut_ptr(), memory.len(), PageId::NONE, 0) }
    }

    const LIMITS: Limits = Limits { size_bytes: 1 << 30, read_only: false, discard: true, write_zeroes: true };

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(&sector.to_le_bytes());
        bytes
    }

    /// Cuts `readable` and `writable` at the given places and parses them.
    fn parse_cut(readable: &mut [u8], writable: &mut [u8], cut: usize, limits: Limits) -> (bool, Ask, Vec<Range>) {
        let mut chain = Chain::default();
        for part in readable.chunks_mut(cut.max(1)) {
            chain.readable.push(slice(part));
        }
        for part in writable.chunks_mut(cut.max(1)) {
            chain.writable.push(slice(part));
        }
        let mut ranges = Vec::new();
        let status = crate::chain::take_last_byte(&mut chain.writable);
        let ask = parse(&mut chain, limits, &mut ranges);
        (status.is_some(), ask, ranges)
    }

    #[test]
    fn a_read_is_found_however_it_is_cut() {
        for cut in 1..40 {
            // At most SEGMENTS_MAX segments are taken, so that tiny cuts of much data are not.
            let mut writable = vec![0u8; 513];
            let (status, ask, _) = parse_cut(&mut header(VIRTIO_BLK_T_IN, 8), &mut writable, cut, LIMITS);
            assert!(status);
            assert_eq!(ask, Ask::Read { offset: 4096, len: 512 }, "cut {cut}");
        }
    }

    #[test]
    fn the_end_of_the_disk_is_the_end() {
        let last = LIMITS.size_bytes / 512 - 1;
        for (sector, fine) in [(last, true), (last + 1, false), (u64::MAX, false), (u64::MAX / 512, false)] {
            let mut readable = header(VIRTIO_BLK_T_OUT, sector);
            readable.extend_from_slice(&[1; 512]);
            let (_, ask, _) = parse_cut(&mut readable, &mut [0], 4096, LIMITS);
            assert_eq!(ask != Ask::Finish(Status::IoError), fine, "sector {sector}");
        }
    }

    #[test]
    fn what_is_no_whole_sector_fails() {
        let mut readable = header(VIRTIO_BLK_T_OUT, 0);
        readable.extend_from_slice(&[1; 513]);
        assert_eq!(parse_cut(&mut readable, &mut [0], 4096, LIMITS).1, Ask::Finish(Status::IoError));
        let mut writable = vec![0; 512];
        let (_, ask, _) = parse_cut(&mut header(VIRTIO_BLK_T_IN, 0), &mut writable, 4096, LIMITS);
        assert_eq!(ask, Ask::Finish(Status::IoError), "511 bytes and a status");
    }

    #[test]
    fn a_read_only_disk_is_not_written() {
        let limits = Limits { read_only: true, discard: false, write_zeroes: false, ..LIMITS };
        for kind in [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            let mut readable = header(kind, 0);
            readable.extend_from_slice(&[0; 512]);
            assert_eq!(parse_cut(&mut readable, &mut [0], 4096, limits).1, Ask::Finish(Status::IoError));
        }
    }

    #[test]
    fn unknown_types_are_unsupported() {
        for kind in [2, 3, 5, 10, 14, 0x8000_0001, u32::MAX] {
            let (_, ask, _) = parse_cut(&mut header(kind, 0), &mut [0], 4096, LIMITS);
            assert_eq!(ask, Ask::Finish(Status::Unsupported), "type {kind}");
        }
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend_from_slice(&sectors.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes
    }

    #[test]
    fn ranges_are_checked_one_by_one() {
        let ask = |kind: u32, parts: &[Vec<u8>]| {
            let mut readable = header(kind, 0);
            readable.extend(parts.iter().flatten());
            let (_, ask, ranges) = parse_cut(&mut readable, &mut [0], 7, LIMITS);
            (ask, ranges)
        };
        let (answer, ranges) = ask(VIRTIO_BLK_T_DISCARD, &[range(8, 8, 0), range(0, 0, 0), range(100, 1, 0)]);
        assert_eq!(answer, Ask::Ranges);
        assert_eq!(
            ranges,
            [(4096, 4096), (51200, 512)].map(|(offset, len)| Range { kind: RequestKind::Discard, offset, len })
        );
        let (answer, ranges) = ask(VIRTIO_BLK_T_WRITE_ZEROES, &[range(0, 1, 1), range(1, 1, 0)]);
        assert_eq!(answer, Ask::Ranges);
        assert_eq!(ranges[0].kind, RequestKind::WriteZeroes { unmap: true });
        assert_eq!(ranges[1].kind, RequestKind::WriteZeroes { unmap: false });

        let fails = |kind, parts: &[Vec<u8>]| ask(kind, parts).0;
        let io_error = Ask::Finish(Status::IoError);
        let unsupported = Ask::Finish(Status::Unsupported);
        assert_eq!(fails(VIRTIO_BLK_T_DISCARD, &[range(0, 1, 1)]), unsupported);
        assert_eq!(fails(VIRTIO_BLK_T_WRITE_ZEROES, &[range(0, 1, 2)]), unsupported);
        assert_eq!(fails(VIRTIO_BLK_T_DISCARD, &[range(0, RANGE_SECTORS_MAX + 1, 0)]), io_error);
        assert_eq!(fails(VIRTIO_BLK_T_DISCARD, &[range(LIMITS.size_bytes / 512, 1, 0)]), io_error);
        assert_eq!(fails(VIRTIO_BLK_T_DISCARD, &[]), io_error);
        assert_eq!(fails(VIRTIO_BLK_T_DISCARD, &[vec![0; 15]]), io_error);
        assert_eq!(fails(VIRTIO_BLK_T_DISCARD, &vec![range(0, 1, 0); 33]), io_error);
        let without = Limits { discard: false, ..LIMITS };
        let mut readable = header(VIRTIO_BLK_T_DISCARD, 0);
        readable.extend(range(0, 1, 0));
        assert_eq!(parse_cut(&mut readable, &mut [0], 99, without).1, unsupported);
    }

    #[test]
    fn half_a_header_is_no_request() {
        let mut readable = header(VIRTIO_BLK_T_FLUSH, 0);
        assert_eq!(parse_cut(&mut readable, &mut [0], 99, LIMITS).1, Ask::Flush);
        assert_eq!(parse_cut(&mut readable[..15], &mut [0], 99, LIMITS).1, Ask::Finish(Status::IoError));
    }

    #[test]
    fn what_cannot_be_reached_is_not_done() {
        let mut readable = header(VIRTIO_BLK_T_OUT, 0);
        readable.extend_from_slice(&[1; 512]);
        let mut chain = Chain::default();
        chain.readable.push(slice(&mut readable));
        chain.unreachable = Some(1 << 40);
        assert_eq!(parse(&mut chain, LIMITS, &mut Vec::new()), Ask::Finish(Status::IoError));
    }

    proptest! {
        #[test]
        fn anything_is_answered_within_the_disk(
            mut readable in proptest::collection::vec(any::<u8>(), 0..700),
            writable_len in 0usize..1200,
            cut in 1usize..600,
            kind in proptest::sample::select(vec![0u32, 1, 4, 8, 11, 13]),
            size in 0u64..5000,
        ) {
            if readable.len() >= 4 {
                readable[..4].copy_from_slice(&kind.to_le_bytes());
            }
            if readable.len() >= 16 {
                // Keep the sector small, so that some are inside.
                readable[10..16].fill(0);
            }
            let mut writable = vec![0u8; writable_len];
            let limits = Limits { size_bytes: size * 512, ..LIMITS };
            let (_, ask, ranges) = parse_cut(&mut readable, &mut writable, cut, limits);
            match ask {
                Ask::Read { offset, len } | Ask::Write { offset, len } => {
                    prop_assert!(len > 0 && len % 512 == 0 && offset % 512 == 0 && offset + len <= limits.size_bytes);
                }
                Ask::Ranges => {
                    prop_assert!(!ranges.is_empty());
                    for range in ranges {
                        prop_assert!(range.len > 0 && range.offset + range.len <= limits.size_bytes);
                    }
                }
                Ask::Flush | Ask::Identity | Ask::Finish(_) => {}
            }
        }
    }
}
