//! Cutting a request's guest memory along the blocks it is written to.

use guest_memory::MemorySlice;

/// The slices that make up bytes `from..from + len` of `slices` taken together.
pub fn part(slices: &[MemorySlice], from: u64, len: u64) -> Vec<MemorySlice> {
    let mut skip = from as usize;
    let mut left = len as usize;
    let mut parts = Vec::new();
    for slice in slices {
        if left == 0 {
            break;
        }
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let count = left.min(slice.len() - skip);
        parts.push(slice.sub(skip, count));
        left -= count;
        skip = 0;
    }
    debug_assert_eq!(left, 0, "a request's segments add up to its length");
    parts
}

/// Copies all of `slices` out.
pub fn gather(slices: &[MemorySlice]) -> Vec<u8> {
    let mut bytes = vec![0; slices.iter().map(MemorySlice::len).sum()];
    let mut at = 0;
    for slice in slices {
        slice.copy_out(0, &mut bytes[at..at + slice.len()]);
        at += slice.len();
    }
    bytes
}

/// For each of the blocks of `block_bytes` that `slices`, beginning `lead` bytes into a block, touch: its content, if it
/// is covered whole and lies together.
pub fn blocks(slices: &[MemorySlice], lead: u64, block_bytes: u32) -> Vec<Option<MemorySlice>> {
    let block_bytes = block_bytes as usize;
    let total: usize = slices.iter().map(MemorySlice::len).sum();
    let count = (lead as usize + total).div_ceil(block_bytes);
    let mut blocks = vec![None; count];
    let mut at = lead as usize;
    for slice in slices {
        let mut offset = at.next_multiple_of(block_bytes) - at;
        while offset + block_bytes <= slice.len() {
            blocks[(at + offset) / block_bytes] = Some(slice.sub(offset, block_bytes));
            offset += block_bytes;
        }
        at += slice.len();
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::HostFile;

    #[test]
    fn cut_along_blocks() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = HostFile::create(&directory.path().join("memory"), 1 << 16).expect("a file");
        file.reserve(0, 1 << 16).expect("room");
        // 512 bytes, then 4096 + 512, then 3584: as a request that begins 3584 bytes into a block of 4096.
        let slices = [file.slice(0, 512), file.slice(4096, 4608), file.slice(16384, 3584)];
        let found = blocks(&slices, 3584, 4096);
        assert_eq!(found.len(), 3);
        assert!(found[0].is_none(), "the first block is covered in part");
        assert_eq!(found[1].map(|slice| slice.len()), Some(4096));
        assert!(found[2].is_none(), "the last block lies in two pieces");
        let parts = part(&slices, 256, 1024);
        assert_eq!(parts.iter().map(|slice| slice.len()).collect::<Vec<_>>(), [256, 768]);
        assert_eq!(gather(&parts).len(), 1024);
    }
}
