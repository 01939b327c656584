//! Exit codes, and which error has which.

use std::process::ExitCode;

/// Failed.
pub const FAILED: u8 = 1;
/// Wrong usage.
pub const USAGE: u8 = 2;
/// Input damaged or refused; nothing was changed.
pub const REFUSED: u8 = 3;

/// A mistake in the arguments.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

/// Makes an error that exits with [`USAGE`].
pub fn usage(sentence: impl Into<String>) -> anyhow::Error {
    UsageError(sentence.into()).into()
}

/// Prints an error as one sentence and says which exit code it has.
pub fn report(error: &anyhow::Error) -> ExitCode {
    eprintln!("amberlog: {error:#}");
    let refused = error.downcast_ref::<recovery::Error>().is_some_and(recovery::Error::is_refusal)
        || matches!(error.downcast_ref::<placement::FinishError>(), Some(placement::FinishError::Refused(_)));
    if error.downcast_ref::<UsageError>().is_some() {
        ExitCode::from(USAGE)
    } else if refused {
        ExitCode::from(REFUSED)
    } else {
        ExitCode::from(FAILED)
    }
}
