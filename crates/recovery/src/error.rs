//! What can go wrong, as sentences.

use jbd2::ReplayError;
use std::io;

/// Why a recovery did not happen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Damaged or not understood; nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// Reading or writing failed. The journal is as it was: recovery can be run again.
    #[error("{what} failed: {source}")]
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

    /// Whether this is a refusal: the input is damaged or not understood, and nothing was changed.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Error::Refused(_))
    }

    /// Whether somebody else uses the image or device.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Error::Failed { source, .. } if source.kind() == io::ErrorKind::ResourceBusy)
    }

    pub(crate) fn from_log<E: std::error::Error + 'static>(error: ReplayError<E>) -> Self {
        match error {
            ReplayError::Read { position, source } => Error::Failed {
                what: format!("reading log block {position}"),
                source: io::Error::other(source.to_string()),
            },
            other => Error::Refused(format!(
                "the journal is damaged: {other}; nothing was changed, and e2fsck can repair the file system without it"
            )),
        }
    }
}
