//! Directories that are to be in memory.

use std::path::Path;

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of statfs(2).
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// What follows when a directory for guest memory is not in memory.
pub fn not_in_memory(shm: &Path) -> Option<String> {
    let existing = shm.ancestors().find(|ancestor| ancestor.is_dir())?;
    let kind = rustix::fs::statfs(existing).ok()?.f_type;
    (!IN_MEMORY.contains(&kind)).then(|| {
        format!(
            "{} is on no tmpfs: the guests' memory is written to that storage, which costs what amberlog saves; name a tmpfs (shm)",
            shm.display()
        )
    })
}
