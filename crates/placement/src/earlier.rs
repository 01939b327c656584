//! What an earlier process left for an image is brought home before the image is used again, where a VM is about to start, by `run` or
//! by `serve`. The command `recover` names one place, and what finishes that is the same: which function that is, and what differs on
//! purpose between the two who ask, is in ARCHITECTURE.md ("One way to finish after a death").
//!
//! It may be in three places: an area in tmpfs ([`crate::finish_directory`], found by registry or mark), a region of NVM, a journal
//! server. Each is judged before anything is written, each can be cut off and run again, and each needs all images for itself that it
//! writes to.

use crate::attached::DiskOptions;
use crate::nvm::NvmFinished;
use crate::remote::{RemoteRecovered, recover_remote_image};
use recovery::{Access, Disk as Image, Error, Report};
use std::path::Path;
use std::time::Duration;

/// How long whoever had the images may take to end: the lock of what he left was free, so his processes are dead, but the
/// kernel closes what was in an io_uring of theirs later than that, and on a busy host much later.
const DYING: Duration = Duration::from_secs(10);

/// What was brought home from elsewhere than an area.
#[derive(Clone, Debug)]
pub enum Brought {
    /// From a region of NVM.
    Region(NvmFinished),
    /// From a journal server.
    Server(RemoteRecovered),
}

impl Brought {
    /// What was done.
    pub fn report(&self) -> &Report {
        match self {
            Brought::Region(finished) => &finished.recovery,
            Brought::Server(recovered) => &recovered.report,
        }
    }
}

/// What it was, without the notes of its report.
impl std::fmt::Display for Brought {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Brought::Region(finished) => {
                write!(f, "brought home what an earlier run left on NVM: {} blocks", finished.recovery.blocks_written)
            }
            Brought::Server(recovered) => write!(
                f,
                "brought home what an earlier run left on the journal server as {}: {} transactions, {} blocks",
                recovered.name, recovered.report.transactions, recovered.report.blocks_written
            ),
        }
    }
}

/// Opens an image for whoever finishes what was left for it, once its dying owner has let go of it.
pub(crate) fn open_left(path: &Path) -> Result<Image, Error> {
    Image::open_within(path, Access::Write, DYING)
}

/// Brings home what a disk's region and its journal server hold for its image, whose external journal may be one of `journals`. What was done
/// is in `brought`, also where something failed after it.
///
/// # Errors
/// A refusal when one of them is damaged or holds another file system's blocks, or when storage says that the live log is on the
/// server and it cannot be had, or is not whole.
pub fn finish_earlier(disk: &DiskOptions, journals: &[&Path], brought: &mut Vec<Brought>) -> Result<(), Error> {
    if disk.nvm.is_none() && disk.remote.is_none() {
        return Ok(());
    }
    let image = open_left(&disk.path)?;
    if let Some(nvm) = &disk.nvm {
        let mut of_regions = Vec::new();
        let finished = nvm.finish_earlier(&image, &mut of_regions);
        brought.extend(of_regions.into_iter().map(Brought::Region));
        finished?;
    }
    if let Some(options) = &disk.remote {
        // An external journal is one of the VM's journal disks; which, its file system says.
        for journal in std::iter::once(None).chain(journals.iter().map(|path| Some(*path))) {
            let journal = journal.map(open_left).transpose()?;
            let recovered = recover_remote_image(&image, journal.as_ref(), options, false, true)?;
            brought.extend(recovered.into_iter().map(Brought::Server));
        }
    }
    Ok(())
}
