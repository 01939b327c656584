//! What can go wrong, as sentences.

use std::io;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The region is damaged, too small, in use, or somebody else's; nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// The operating system or the medium failed. After a failed fence nothing is known of what was stored since the last
    /// one, so the medium then fails for good.
    #[error("{what}: {source}")]
    Failed {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn refused(reason: impl Into<String>) -> Self {
        Error::Refused(reason.into())
    }

    /// To be used with `map_err`.
    pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Error::Failed { what, source }
    }

    /// Whether this is a refusal: nothing was changed.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Error::Refused(_))
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Refused(_) => io::Error::new(io::ErrorKind::InvalidData, error),
            Error::Failed { .. } => io::Error::other(error),
        }
    }
}
