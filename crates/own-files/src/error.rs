//! Why something is not trusted, or could not be had.

use std::io;
use std::path::{Path, PathBuf};

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else made it, or can change it: it is not used.
    #[error("{path}: {reason}")]
    NotOurs {
        /// What.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// The system refused.
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

impl Error {
    pub(crate) fn not_ours(path: &Path, reason: impl Into<String>) -> Self {
        Error::NotOurs { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn system<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_owned();
        move |source| Error::System { what, path, source: source.into() }
    }

    /// Whether the thing is simply not there.
    pub fn is_missing(&self) -> bool {
        matches!(self, Error::System { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::NotOurs { .. } => io::Error::new(io::ErrorKind::PermissionDenied, error.to_string()),
            Error::System { ref source, .. } => io::Error::new(source.kind(), error.to_string()),
        }
    }
}
