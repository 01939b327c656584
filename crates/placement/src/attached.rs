//! How a disk of a VM is attached, as whoever serves the VM says it.

use crate::disk::{DiskSettings, PlacementKind};
use crate::nvm::NvmDisk;
use crate::remote::RemoteOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use write_log::WriteLog;

/// How a disk is attached.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Its name in reports and in `for=`.
    pub name: String,
    /// The image or block device.
    pub path: PathBuf,
    /// Where the journals of its file systems live.
    pub placement: PlacementKind,
    /// Flushes reach storage even where nothing that survives depends on them.
    pub honour_flush: bool,
    /// The guest must not write to it.
    pub read_only: bool,
    /// Its region, for placement `nvm`.
    pub nvm: Option<Arc<NvmDisk>>,
    /// Its journal server, for placement `remote`.
    pub remote: Option<RemoteOptions>,
    /// How old what its guests committed may be before it is durable on storage, for placements that hold it; nothing: however old.
    pub durable_within: Option<Duration>,
    /// Where everything that is sent to the image is written down.
    pub write_log: Option<Arc<WriteLog>>,
}

/// Where journals of a disk can live that are neither on it nor in memory.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    pub nvm: Option<Arc<NvmDisk>>,
    pub remote: Option<RemoteOptions>,
}

impl DiskOptions {
    pub(crate) fn parts(self) -> (DiskSettings, Places) {
        let DiskOptions { name, path, placement, honour_flush, read_only, nvm, remote, durable_within, write_log } =
            self;
        let settings = DiskSettings { name, path, placement, honour_flush, read_only, durable_within, write_log };
        (settings, Places { nvm, remote })
    }
}

impl From<DiskSettings> for DiskOptions {
    /// Its journals are on it, or in memory.
    fn from(settings: DiskSettings) -> Self {
        let DiskSettings { name, path, placement, honour_flush, read_only, durable_within, write_log } = settings;
        DiskOptions {
            name,
            path,
            placement,
            honour_flush,
            read_only,
            nvm: None,
            remote: None,
            durable_within,
            write_log,
        }
    }
}
