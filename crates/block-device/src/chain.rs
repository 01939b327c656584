//! Descriptor chains of the split ring (virtio 1.2, section 2.7.5), walked without trusting a byte of them.
//!
//! virtio-queue's own iterator cannot say whether a chain has ended or is broken, and cannot walk a chain again from its
//! head after a reconnection; hence this one.
//!
//! A walk ends in one of two ways, because a driver reads the status byte whatever else it is told: with that byte found,
//! whether or not the buffers before it can be reached, or with an error, and then the chain must never be given back. In
//! the byte would still be what was there before, and a driver that had zeros there would read "done".

use guest_memory::{MemorySlice, MemoryTable, RegionSet};

const DESCRIPTOR_BYTES: usize = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Descriptors of one chain, at most: data segments, header and status.
const DESCRIPTORS_MAX: u32 = crate::config_space::SEGMENTS_MAX + 2;

/// Bytes of one chain's buffers, at most: what a request may have, its header and its status. A driver can name the same memory again
/// and again, and each of its pages is looked at before anything is done ([`MemoryTable::prepare_write`]).
const BYTES_MAX: u64 = crate::config_space::REQUEST_BYTES_MAX + (64 << 10);

/// Why a chain is no chain: it has no status byte, or none that can be trusted to be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChainError {
    #[error("a descriptor lies outside its table")]
    Index,
    #[error("its indirect table at guest address {0:#x} lies outside the guest memory that the VMM has handed over")]
    Table(u64),
    #[error("it has more than {DESCRIPTORS_MAX} descriptors, or loops")]
    TooLong,
    #[error("its indirect table is malformed")]
    Indirect,
    #[error("a buffer to read follows one to write")]
    Order,
    #[error("it has no status byte")]
    NoStatus,
    #[error("its status byte at guest address {0:#x} lies outside the guest memory that the VMM has handed over")]
    Status(u64),
}

impl ChainError {
    /// The guest address that nobody was told of, if that is what is wrong.
    pub(crate) fn unknown_address(self) -> Option<u64> {
        match self {
            ChainError::Table(address) | ChainError::Status(address) => Some(address),
            _ => None,
        }
    }
}

/// Where a chain's status goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StatusPlace {
    pub(crate) byte: MemorySlice,
    /// Its guest address.
    pub(crate) address: u64,
}

/// The memory of a chain: what the device may read, then what it may write, without the status byte.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pub(crate) readable: Vec<MemorySlice>,
    pub(crate) writable: Vec<MemorySlice>,
    /// Its buffers have more bytes than any request may have ([`BYTES_MAX`]): nothing of them is here, and the request cannot be done.
    pub(crate) is_too_much: bool,
    /// The guest address of the first buffer that is not, or not all, in known memory: the request cannot be done.
    pub(crate) unreachable: Option<u64>,
    /// The regions of guest memory that it is in.
    pub(crate) regions: RegionSet,
    /// The pieces of an indirect table, more than one where regions meet.
    table: Vec<MemorySlice>,
}

impl Chain {
    /// Walks the chain that starts at `head` of the ring's table in `descriptors`. Gives where its status goes.
    pub(crate) fn walk(
        &mut self,
        table: &MemoryTable,
        descriptors: &MemorySlice,
        head: u16,
        indirect_allowed: bool,
    ) -> Result<StatusPlace, ChainError> {
        self.readable.clear();
        self.writable.clear();
        self.is_too_much = false;
        let mut bytes = 0;
        self.unreachable = None;
        self.regions = RegionSet::default();
        self.table.clear();
        self.table.push(*descriptors);
        let mut index = usize::from(head);
        let mut inside_indirect = false;
        // The last buffer that may be written: its last byte is the status.
        let mut status = None;
        for _ in 0..=DESCRIPTORS_MAX {
            // Copied once and then looked at: the guest may change it at any time.
            let raw = descriptor(&self.table, index).ok_or(ChainError::Index)?;
            let address = u64::from_le_bytes(raw[0..8].try_into().expect("eight bytes"));
            let len = u32::from_le_bytes(raw[8..12].try_into().expect("four bytes")) as usize;
            let flags = u16::from_le_bytes([raw[12], raw[13]]);
            let next = u16::from_le_bytes([raw[14], raw[15]]);

            if flags & INDIRECT != 0 {
                // No table within a table, nothing after one, and a whole number of descriptors in it.
                let whole =
                    len.is_multiple_of(DESCRIPTOR_BYTES) && len > 0 && len / DESCRIPTOR_BYTES <= usize::from(u16::MAX);
                if inside_indirect || !indirect_allowed || flags & NEXT != 0 || !whole {
                    return Err(ChainError::Indirect);
                }
                self.table.clear();
                table
                    .slices_in(address, len, &mut self.table, &mut self.regions)
                    .and_then(|()| self.table.iter().try_for_each(|piece| table.prepare_read(piece)))
                    .map_err(|_| ChainError::Table(address))?;
                index = 0;
                inside_indirect = true;
                continue;
            }
            let slices = if flags & WRITE != 0 {
                if len > 0 {
                    status = Some((address, len));
                }
                &mut self.writable
            } else if status.is_none() {
                &mut self.readable
            } else {
                return Err(ChainError::Order);
            };
            bytes += len as u64;
            self.is_too_much |= bytes > BYTES_MAX;
            if !self.is_too_much && table.slices_in(address, len, slices, &mut self.regions).is_err() {
                // The status byte may be reached all the same, and then the driver can be told.
                self.unreachable.get_or_insert(address);
            }
            if flags & NEXT == 0 {
                return self.take_status(table, status);
            }
            index = usize::from(next);
        }
        Err(ChainError::TooLong)
    }

    fn take_status(&mut self, table: &MemoryTable, last: Option<(u64, usize)>) -> Result<StatusPlace, ChainError> {
        let (start, len) = last.ok_or(ChainError::NoStatus)?;
        let address = start.checked_add(len as u64 - 1).ok_or(ChainError::Status(start))?;
        if self.is_too_much {
            self.readable.clear();
            self.writable.clear();
        }
        let is_whole = self.unreachable.is_none() && !self.is_too_much;
        let byte = if is_whole { take_last_byte(&mut self.writable) } else { table.byte(address) };
        Ok(StatusPlace { byte: byte.ok_or(ChainError::Status(address))?, address })
    }
}

/// The descriptor with this index of a table, which may lie across pieces.
fn descriptor(table: &[MemorySlice], index: usize) -> Option<[u8; DESCRIPTOR_BYTES]> {
    let mut raw = [0u8; DESCRIPTOR_BYTES];
    let mut at = index * DESCRIPTOR_BYTES;
    let mut done = 0;
    for piece in table {
        if at >= piece.len() {
            at -= piece.len();
            continue;
        }
        let count = (piece.len() - at).min(DESCRIPTOR_BYTES - done);
        piece.copy_out(at, &mut raw[done..done + count]);
        done += count;
        at = 0;
        if done == DESCRIPTOR_BYTES {
            return Some(raw);
        }
    }
    None
}

/// The guest memory of a table, which must lie in one region.
pub(crate) fn one_slice(table: &MemoryTable, address: u64, len: usize) -> Option<MemorySlice> {
    let mut slices = Vec::with_capacity(1);
    table.slices(address, len, &mut slices).ok()?;
    match slices[..] {
        [slice] => Some(slice),
        _ => None,
    }
}

/// Total length of slices in bytes.
pub(crate) fn total_len(slices: &[MemorySlice]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

/// Copies the first `buffer.len()` bytes out; the caller has checked that they are there.
pub(crate) fn copy_out(slices: &[MemorySlice], buffer: &mut [u8]) {
    let mut done = 0;
    for slice in slices {
        let count = slice.len().min(buffer.len() - done);
        slice.copy_out(0, &mut buffer[done..done + count]);
        done += count;
        if done == buffer.len() {
            return;
        }
    }
    debug_assert!(false, "the slices are shorter than what is asked of them");
}

/// Takes `bytes` bytes off the front.
pub(crate) fn skip_front(slices: &mut Vec<MemorySlice>, bytes: usize) {
    let mut left = bytes;
    let mut whole = 0;
    while whole < slices.len() && slices[whole].len() <= left {
        left -= slices[whole].len();
        whole += 1;
    }
    if left > 0 && whole < slices.len() {
        let first = slices[whole];
        slices[whole] = first.sub(left, first.len() - left);
    }
    slices.drain(..whole);
}

/// Takes the last byte off; none if there is none.
pub(crate) fn take_last_byte(slices: &mut Vec<MemorySlice>) -> Option<MemorySlice> {
    let last = slices.pop()?;
    let byte = last.sub(last.len() - 1, 1);
    if last.len() > 1 {
        slices.push(last.sub(0, last.len() - 1));
    }
    Some(byte)
}
