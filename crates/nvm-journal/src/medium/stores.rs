//! The processor's ways to write memory back: non-temporal stores, `clwb`, `clflushopt`, `clflush`; found by CPUID.
//!
//! Facts: Intel SDM vol. 2 (CLWB, CLFLUSHOPT, MOVNTI, SFENCE) and vol. 3 section 11.4 (write combining); `_mm_clwb` is not
//! in `core::arch`, so it is written as assembly.

use super::LINE_BYTES;

/// Which instruction writes a line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// `clwb`: writes a line back and may keep it in the cache.
    WriteBack,
    /// `clflushopt`: writes a line back and drops it, unordered among themselves.
    FlushOptimised,
    /// `clflush`: writes a line back and drops it, one after the other.
    Flush,
    /// No such instruction is known: durability is only what the operating system makes of a mapped file.
    Portable,
}

impl StoreKind {
    /// The best that this processor has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__cpuid, __cpuid_count};
            if __cpuid(0).eax >= 7 {
                let leaf = __cpuid_count(7, 0).ebx;
                if leaf & 1 << 24 != 0 {
                    return StoreKind::WriteBack;
                }
                if leaf & 1 << 23 != 0 {
                    return StoreKind::FlushOptimised;
                }
            }
            // SSE2, and with it clflush, is part of x86-64.
            StoreKind::Flush
        }
        #[cfg(not(target_arch = "x86_64"))]
        StoreKind::Portable
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            StoreKind::WriteBack => "clwb",
            StoreKind::FlushOptimised => "clflushopt",
            StoreKind::Flush => "clflush",
            StoreKind::Portable => "portable",
        }
    }

    /// Begins to write back the line at `line`.
    ///
    /// # Safety
    /// `line` must be mapped.
    #[inline]
    pub(super) unsafe fn write_back(self, line: *const u8) {
        #[cfg(target_arch = "x86_64")]
        match self {
            // SAFETY: the instruction was found by CPUID; the address is mapped, as the caller promises; it changes no
            // register, flag or memory content.
            StoreKind::WriteBack => unsafe {
                std::arch::asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags));
            },
            // SAFETY: as above.
            StoreKind::FlushOptimised => unsafe {
                std::arch::asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
            },
            // SAFETY: as above; part of x86-64.
            StoreKind::Flush => unsafe { std::arch::x86_64::_mm_clflush(line) },
            StoreKind::Portable => {}
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }

    /// Copies whole lines to `to` past the cache where the processor can.
    ///
    /// # Safety
    /// `to` must be aligned to a line, mapped and writable for all of `bytes`, and apart from it; `bytes` must be whole
    /// lines.
    #[inline]
    pub(super) unsafe fn stream(self, to: *mut u8, bytes: &[u8]) {
        debug_assert!((bytes.len() as u64).is_multiple_of(LINE_BYTES));
        #[cfg(target_arch = "x86_64")]
        if self != StoreKind::Portable {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            let count = bytes.len() / 16;
            #[expect(
                clippy::cast_ptr_alignment,
                reason = "the source is read unaligned, the target is aligned to a line"
            )]
            let (from, to) = (bytes.as_ptr().cast::<__m128i>(), to.cast::<__m128i>());
            for index in 0..count {
                // SAFETY: inside `bytes`, and inside the target, which is aligned and writable as the caller promises;
                // SSE2 is part of x86-64.
                unsafe { _mm_stream_si128(to.add(index), _mm_loadu_si128(from.add(index))) };
            }
            return;
        }
        // SAFETY: the caller promises that the target is writable for all of `bytes`, and apart from it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Waits until everything written back or streamed before is on its way past the caches.
    #[inline]
    pub(super) fn fence(self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: part of SSE, which is part of x86-64; it touches nothing.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_that_the_processor_has_stores_what_it_is_given() {
        #[repr(align(64))]
        struct Lines([u8; 4096]);
        let best = StoreKind::detect();
        let kinds = [StoreKind::Portable, StoreKind::Flush, StoreKind::FlushOptimised, StoreKind::WriteBack];
        // A processor with a later kind has the earlier ones; the SDM says so of none, but no processor differs.
        let known = kinds.iter().position(|kind| *kind == best).expect("one of them");
        for kind in &kinds[..=known] {
            let mut lines = Lines([0; 4096]);
            let source: Vec<u8> = (0..4097u32).map(|value| value as u8).collect();
            let to = lines.0.as_mut_ptr();
            // SAFETY: the target is aligned and as long as the source's part.
            unsafe { kind.stream(to, &source[1..]) };
            for line in (0..4096).step_by(64) {
                // SAFETY: inside the array.
                unsafe { kind.write_back(to.add(line)) };
            }
            kind.fence();
            assert_eq!(lines.0[..], source[1..], "{}", kind.name());
        }
    }
}
