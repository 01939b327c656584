//! What can be wrong with a directory of a VM or of the registry, and who may have made it.

use std::io;
use std::path::{Path, PathBuf};

/// Why a directory cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Its owner, or the owner's VM, is still alive.
    #[error("{path} is in use by another amberlog or by a VM it started{}; end that first", named(vmms))]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The processes of VMMs that are known to live.
        vmms: Vec<i32>,
    },
    /// It, or what lies in it, is somebody else's or cannot be had.
    #[error(transparent)]
    Own(#[from] own_files::Error),
    /// The VMM has a second file of memory by the name of the first one, which was renamed.
    #[error(
        "{path}: the VMM has two files of its guest's memory by that name, and the next one that is started for this VM could write over the second"
    )]
    SecondMemory {
        /// The second one.
        path: PathBuf,
    },
    /// Something failed.
    #[error("{what} {path}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl DirectoryError {
    pub(crate) fn system(what: &'static str, path: &Path, source: io::Error) -> Self {
        DirectoryError::System { what, path: path.to_owned(), source }
    }

    /// Whether something is not used because others can have made or changed it.
    pub fn is_not_ours(&self) -> bool {
        matches!(self, DirectoryError::Own(own_files::Error::NotOurs { .. }))
    }

    /// Whether the directory is not there (any more).
    pub fn is_missing(&self) -> bool {
        matches!(self, DirectoryError::Own(error) if error.is_missing())
    }
}

/// Others may pass through a VM's directory, if the VMM is to be another user: they can neither list nor change it.
pub const THROUGH: u32 = 0o011;

/// Processes, for a sentence.
fn named(vmms: &[i32]) -> String {
    let numbers: Vec<String> = vmms.iter().map(|pid| format!("process {pid}")).collect();
    if numbers.is_empty() { String::new() } else { format!(" ({})", numbers.join(", ")) }
}
