//! Descriptor chains of the split ring (virtio 1.2, section 2.7.5), walked without trusting a byte of them.
//!
//! virtio-queue's own iterator cannot say whether a chain has ended or is broken, and cannot walk a chain again from its
//! head after a reconnection; hence this one.

use guest_memory::{MemorySlice, MemoryTable};

const DESCRIPTOR_BYTES: usize = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Descriptors of one chain, at most: data segments, header and status.
const DESCRIPTORS_MAX: u32 = crate::config_space::SEGMENTS_MAX + 2;

/// Why a chain is no chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChainError {
    #[error("a descriptor lies outside its table")]
    Index,
    #[error("a descriptor table or buffer lies outside guest memory")]
    Address,
    #[error("it has more than {DESCRIPTORS_MAX} descriptors, or loops")]
    TooLong,
    #[error("its indirect table is malformed")]
    Indirect,
    #[error("a buffer to read follows one to write")]
    Order,
}

/// The memory of a chain: what the device may read, then what it may write.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pub(crate) readable: Vec<MemorySlice>,
    pub(crate) writable: Vec<MemorySlice>,
}

impl Chain {
    /// Walks the chain that starts at `head` of the table of `queue_size` descriptors in `descriptors`.
    pub(crate) fn walk(
        &mut self,
        table: &MemoryTable,
        descriptors: &MemorySlice,
        head: u16,
        indirect_allowed: bool,
    ) -> Result<(), ChainError> {
        self.readable.clear();
        self.writable.clear();
        let mut current = *descriptors;
        let mut index = usize::from(head);
        let mut inside_indirect = false;
        for _ in 0..=DESCRIPTORS_MAX {
            let at = index * DESCRIPTOR_BYTES;
            if at + DESCRIPTOR_BYTES > current.len() {
                return Err(ChainError::Index);
            }
            // Copied once and then looked at: the guest may change it at any time.
            let mut raw = [0u8; DESCRIPTOR_BYTES];
            current.copy_out(at, &mut raw);
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
                current = one_slice(table, address, len).ok_or(ChainError::Address)?;
                index = 0;
                inside_indirect = true;
                continue;
            }
            let slices = if flags & WRITE != 0 {
                &mut self.writable
            } else if self.writable.is_empty() {
                &mut self.readable
            } else {
                return Err(ChainError::Order);
            };
            table.slices(address, len, slices).map_err(|_| ChainError::Address)?;
            if flags & NEXT == 0 {
                return Ok(());
            }
            index = usize::from(next);
        }
        Err(ChainError::TooLong)
    }
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
