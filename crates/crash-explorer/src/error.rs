//! What can go wrong beside a finding.

use std::path::PathBuf;

/// Why the explorer could not do its work. A broken promise of amberlog's is not an error but a
/// [`Finding`](crate::explore::Finding).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading, writing or mapping failed.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A recording is damaged or of another version.
    #[error("{path}: {reason}; record it again with `crash-explorer record`")]
    Recording {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A guest, or a tool that judges images.
    #[error(transparent)]
    Guest(#[from] guest_kit::Error),
    /// A sentence.
    #[error("{0}")]
    Other(String),
}

/// What everything here returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what was being done when an I/O error came.
pub(crate) trait During<T> {
    fn during(self, what: &str) -> Result<T>;
}

impl<T> During<T> for std::io::Result<T> {
    fn during(self, what: &str) -> Result<T> {
        self.map_err(|source| Error::System { what: what.to_owned(), source })
    }
}
