//! The log that a VMM keeps while it moves its guest elsewhere: a bit for each page of guest memory, set by whoever writes to that
//! page. A page that is written and not marked would stay behind, so the mark comes after what was written, and before anybody can
//! rely on it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU8, Ordering};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// Bytes of guest memory that a bit stands for, as vhost has it, whatever pages guest or host have.
const LOG_PAGE_BYTES: u64 = 4096;

/// See the module.
#[derive(Debug)]
pub struct DirtyLog {
    memory: MmapRegion<()>,
    bytes: usize,
}

impl DirtyLog {
    /// Maps the log that a VMM has handed over.
    ///
    /// # Errors
    /// When it is no memory file that cannot be cut, or smaller than the VMM says.
    pub fn open(file: File, bytes: u64, offset: u64) -> io::Result<Self> {
        let refuse = |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, reason.to_owned()));
        let end = offset.checked_add(bytes);
        if bytes == 0 || end.is_none_or(|end| end > file.metadata().map_or(0, |metadata| metadata.size())) {
            return refuse("the log of written pages is smaller than the VMM says");
        }
        if !rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK)) {
            return refuse("the log of written pages is not a memory file sealed against shrinking");
        }
        let Ok(bytes) = usize::try_from(bytes) else { return refuse("the log of written pages is too large") };
        let memory = MmapRegion::from_file(FileOffset::new(file, offset), bytes)
            .map_err(|error| io::Error::other(format!("mapping the log of written pages failed: {error}")))?;
        Ok(DirtyLog { memory, bytes })
    }

    /// Marks the pages of `len` bytes of guest memory from `gpa` on. False when the log has no bit for one of them.
    #[must_use]
    pub fn mark(&self, gpa: u64, len: u64) -> bool {
        if len == 0 {
            return true;
        }
        let Some(last) = gpa.checked_add(len - 1) else { return false };
        for page in gpa / LOG_PAGE_BYTES..=last / LOG_PAGE_BYTES {
            let at = usize::try_from(page / 8).unwrap_or(usize::MAX);
            if at >= self.bytes {
                return false;
            }
            let byte: &AtomicU8 = self.memory.get_atomic_ref(at).expect("inside the log");
            // The VMM takes bits away at any moment. Ordered against what was written before, which must not be seen later than this.
            byte.fetch_or(1 << (page % 8), Ordering::SeqCst);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};
    use std::os::unix::fs::FileExt;

    fn sealed(bytes: u64) -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("log", flags).expect("made"));
        file.set_len(bytes).expect("its length");
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
        file
    }

    #[test]
    fn each_page_has_its_bit_and_no_other() {
        let file = sealed(4096);
        let log = DirtyLog::open(file.try_clone().expect("a descriptor"), 16, 0).expect("opened");
        let content = || {
            let mut bytes = [0; 32];
            file.read_exact_at(&mut bytes, 0).expect("read");
            bytes.to_vec()
        };
        assert!(log.mark(0, 0));
        assert_eq!(content(), [0; 32]);
        assert!(log.mark(4095, 2));
        assert!(log.mark(9 * 4096 + 100, 1));
        assert_eq!(content()[..3], [0b11, 0b10, 0]);
        assert!(log.mark(127 * 4096, 4096));
        assert_eq!(content()[15], 0x80);
        assert!(!log.mark(127 * 4096, 4097), "beyond the log");
        assert!(!log.mark(u64::MAX - 1, 4), "beyond everything");
        assert_eq!(content()[16..], [0; 16]);
    }

    #[test]
    fn a_log_that_could_be_cut_under_us_is_refused() {
        let unsealed = tempfile::tempfile().expect("a file");
        unsealed.set_len(4096).expect("its length");
        DirtyLog::open(unsealed, 4096, 0).expect_err("unsealed");
        DirtyLog::open(sealed(4096), 4097, 0).expect_err("too small");
        DirtyLog::open(sealed(8192), 4096, u64::MAX - 10).expect_err("wraps");
        DirtyLog::open(sealed(8192), 0, 0).expect_err("nothing");
        DirtyLog::open(sealed(8192), 4096, 4096).expect("its second half");
    }
}
