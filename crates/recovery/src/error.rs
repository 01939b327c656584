//! What can go wrong, as sentences.

use jbd2::ReplayError;
use serde::Serialize;
use std::io;

/// Why a recovery did not happen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not understood, or not to be touched: it may be whole. Nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// Damaged; nothing was changed.
    #[error("{0}")]
    Damaged(String),
    /// Reading or writing failed. The journal is as it was: recovery can be run again.
    #[error("{what} failed: {source}")]
    Failed {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

/// How a recovery ended that did not happen, the worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unfinished {
    /// It was not to be: nothing was changed, and what was to be recovered may be whole.
    Refused,
    /// It could not be: reading, writing or fetching failed, or somebody uses it. It can be tried again.
    Failed,
    /// What was to be recovered is damaged.
    Damaged,
}

impl Error {
    pub(crate) fn refused(reason: impl Into<String>) -> Self {
        Error::Refused(reason.into())
    }

    pub(crate) fn damaged(reason: impl Into<String>) -> Self {
        Error::Damaged(reason.into())
    }

    /// To be used with `map_err`.
    pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Error::Failed { what, source }
    }

    /// Whether this is a refusal: the input is damaged, not understood or somebody's, and nothing was changed.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Error::Refused(_) | Error::Damaged(_))
    }

    /// The same, where something had been written before or not: a refusal promises that nothing was changed.
    #[must_use]
    pub fn after(self, has_written: bool) -> Self {
        if has_written && self.is_refusal() {
            return Error::failed("the recovery had begun to write, and what came then")(io::Error::other(
                self.to_string(),
            ));
        }
        self
    }

    /// How it ended, in a word beside those of [`Status`](crate::Status).
    pub fn outcome(&self) -> Unfinished {
        match self {
            Error::Refused(_) => Unfinished::Refused,
            Error::Damaged(_) => Unfinished::Damaged,
            Error::Failed { .. } => Unfinished::Failed,
        }
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
            other => Error::Damaged(format!(
                "the journal is damaged: {other}; nothing was changed, and e2fsck can repair the file system without it"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_after_a_write_has_failed() {
        for error in [|| Error::refused("it does not fit"), || Error::damaged("it is torn")] {
            assert!(error().is_refusal() && error().after(false).is_refusal());
            let after = error().after(true);
            assert!(!after.is_refusal() && after.outcome() == Unfinished::Failed);
            assert!(after.to_string().ends_with(&error().to_string()), "{after}");
        }
        let failed = Error::failed("flushing")(io::ErrorKind::ResourceBusy.into()).after(true);
        assert!(failed.is_in_use(), "what has failed says why as before");
    }
}
