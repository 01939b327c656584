//! Which error of ours has which exit code ([`command_line::exit`]).

pub use command_line::exit::{FAILED, REFUSED, usage};
use std::process::ExitCode;

/// Prints an error as one sentence and says which exit code it has.
pub fn report(error: &anyhow::Error) -> ExitCode {
    let is_refused = error.downcast_ref::<recovery::Error>().is_some_and(recovery::Error::is_refusal)
        || error.downcast_ref::<image_file::OtherFormat>().is_some()
        || matches!(error.downcast_ref::<block_device::Error>(), Some(block_device::Error::OtherFormat(_)))
        || matches!(error.downcast_ref::<placement::FinishError>(), Some(placement::FinishError::Refused(_)));
    let code = if is_refused { REFUSED } else { command_line::exit::code_of(error) };
    command_line::exit::report("amberlog", error, code)
}
