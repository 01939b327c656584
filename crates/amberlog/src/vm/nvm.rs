//! Regions of NVM of a VM's disks: opened and locked before anything is served.

use super::disk_option::DiskOption;
use placement::{DiskOptions, NvmDisk, PlacementKind};
use std::sync::Arc;

/// Opens the region of a disk.
///
/// # Errors
/// A refusal when the region is in use or damaged.
pub fn open(option: &DiskOption, disk: &mut DiskOptions) -> anyhow::Result<()> {
    if let Some(options) = &option.nvm {
        disk.nvm = Some(Arc::new(NvmDisk::open(options.clone())?));
    }
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
