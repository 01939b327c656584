//! Which error of ours has which exit code ([`command_line::exit`]).

pub use command_line::exit::{FAILED, REFUSED, USAGE, refused, say, usage};
use std::process::ExitCode;

/// Whether a directory or file that was named is not used because others can have made or changed it.
fn is_not_ours(error: &anyhow::Error) -> bool {
    let directory = match error.downcast_ref::<placement::FinishError>() {
        Some(placement::FinishError::Directory(directory)) => Some(directory),
        _ => error.downcast_ref::<placement::DirectoryError>(),
    };
    directory.is_some_and(placement::DirectoryError::is_not_ours)
        || matches!(error.downcast_ref::<own_files::Error>(), Some(own_files::Error::NotOurs { .. }))
}

/// Prints an error as one sentence and says which exit code it has.
pub fn report(error: &anyhow::Error) -> ExitCode {
    let is_refused = error.downcast_ref::<recovery::Error>().is_some_and(recovery::Error::is_refusal)
        || error.downcast_ref::<image_file::OtherFormat>().is_some()
        || matches!(error.downcast_ref::<block_device::Error>(), Some(block_device::Error::OtherFormat(_)))
        || error.downcast_ref::<placement::FinishError>().is_some_and(placement::FinishError::is_refusal);
    let code = match (is_refused, is_not_ours(error)) {
        (true, _) => REFUSED,
        (false, true) => USAGE,
        (false, false) => command_line::exit::code_of(error),
    };
    command_line::exit::report("amberlog", error, code)
}
