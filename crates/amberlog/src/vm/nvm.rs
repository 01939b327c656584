//! Regions of NVM of a VM's disks: opened and locked before anything is served, and emptied of what an earlier run left.

use super::disk_option::DiskOption;
use placement::{DiskOptions, NvmDisk, PlacementKind};
use recovery::{Access, Disk};
use std::sync::Arc;
use std::time::Duration;

/// How long whoever had the image may take to end: its region's lock was free, so its process is dead, but the kernel
/// closes what was in an io_uring of its later than that.
const DYING: Duration = Duration::from_secs(10);

/// Opens the region of a disk, and brings home what an earlier run left in it.
///
/// # Errors
/// A refusal when the region is in use, damaged, or holds another file system's blocks.
pub fn open(option: &DiskOption, disk: &mut DiskOptions) -> anyhow::Result<()> {
    let Some(options) = &option.nvm else { return Ok(()) };
    let nvm = NvmDisk::open(options.clone())?;
    let image = Disk::open_within(&option.path, Access::Write, DYING)?;
    if let Some(finished) = nvm.finish_earlier(&image)? {
        log::info!(
            "{}: brought home what an earlier run left on NVM: {} blocks",
            option.path.display(),
            finished.recovery.blocks_written
        );
        for note in &finished.recovery.notes {
            log::info!("{}: {note}", option.path.display());
        }
    }
    disk.nvm = Some(Arc::new(nvm));
    Ok(())
}

/// Where the log on a journal device lives that belongs to a disk with this placement: one on NVM has to be internal.
pub fn of_journal_disk(placement: PlacementKind, name: &str) -> PlacementKind {
    if placement != PlacementKind::Nvm {
        return placement;
    }
    log::warn!(
        "{name}: a journal on a device of its own does not go to NVM; it is written to its own place on storage"
    );
    PlacementKind::Storage
}
