//! Tables of a whole device, in the processor's large pages where the kernel gives them.
//!
//! Such a table is looked at in random places; with pages of 4 KB nearly every look also misses the TLB, which costs a
//! large device half its speed. This module must never change what a table holds: where large pages are
//! refused, unknown or not worth it, it is an ordinary `Vec`.

#![allow(unsafe_code)] // One system call that only gives advice.

use std::mem::MaybeUninit;

/// Smaller tables stay as they are: caches and TLB hold them anyway.
const ADVISE_BYTES_MIN: usize = 4 << 20;
/// Addresses that the kernel is given are multiples of this.
const PAGE_BYTES: usize = 4096;

/// A table of `count` entries of this value.
pub fn filled<T: Copy>(count: usize, value: T) -> Vec<T> {
    let mut table = Vec::with_capacity(count);
    advise(table.spare_capacity_mut());
    table.resize(count, value);
    table
}

/// Asks for large pages for memory that nothing was written to yet.
fn advise<T>(memory: &mut [MaybeUninit<T>]) {
    let bytes = size_of_val(memory);
    if bytes < ADVISE_BYTES_MIN {
        return;
    }
    let begin = memory.as_mut_ptr().cast::<u8>();
    let skip = begin.align_offset(PAGE_BYTES);
    let Some(length) = bytes.checked_sub(skip) else { return };
    // SAFETY: MADV_HUGEPAGE leaves the content of memory alone, and the range lies within the slice, which is
    // borrowed exclusively here. A refusal is as good as consent.
    let _ = unsafe {
        rustix::mm::madvise(begin.add(skip).cast(), length & !(PAGE_BYTES - 1), rustix::mm::Advice::LinuxHugepage)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_holds_what_it_is_filled_with() {
        for count in [0, 1, 1000, (ADVISE_BYTES_MIN / 4) + 3] {
            let table = filled(count, 7u32);
            assert_eq!((table.len(), table.iter().filter(|&&v| v == 7).count()), (count, count));
        }
    }
}
