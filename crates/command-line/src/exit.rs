//! Exit codes, the same for every program: 0 done, 1 failed, 2 usage, 3 input damaged or refused (nothing was changed).

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

/// Input that is damaged or refused.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RefusedError(String);

/// Makes an error that exits with [`USAGE`].
pub fn usage(sentence: impl Into<String>) -> anyhow::Error {
    UsageError(sentence.into()).into()
}

/// Makes an error that exits with [`REFUSED`].
pub fn refused(sentence: impl Into<String>) -> anyhow::Error {
    RefusedError(sentence.into()).into()
}

/// The exit code of an error that no crate's own type says more about.
pub fn code_of(error: &anyhow::Error) -> u8 {
    if error.downcast_ref::<UsageError>().is_some() {
        USAGE
    } else if error.downcast_ref::<RefusedError>().is_some() {
        REFUSED
    } else {
        FAILED
    }
}

/// Prints an error of `program` as one sentence and exits with `code`.
pub fn report(program: &str, error: &anyhow::Error, code: u8) -> ExitCode {
    eprintln!("{program}: {error:#}");
    ExitCode::from(code)
}

/// What a shell shows for a program that SIGPIPE ended.
const READER_GONE: i32 = 128 + 13;

/// Ends the program without a word when whoever reads its standard output has had enough (`amberlog inspect | head`). Rust
/// ignores SIGPIPE, so that a pipe without a reader is an error of `println!`, which panics; every command that prints is
/// covered here, and what is written elsewhere, to sockets above all, still gets its errors.
pub fn when_nobody_reads() {
    let earlier = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>();
        if message.is_some_and(|message| message.starts_with("failed printing to stdout: Broken pipe")) {
            std::process::exit(READER_GONE);
        }
        earlier(panic);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn an_error_keeps_its_code_under_context() {
        for (error, code) in [(usage("which?"), USAGE), (refused("damaged"), REFUSED), (anyhow::anyhow!("no"), FAILED)]
        {
            assert_eq!(code_of(&error), code);
            assert_eq!(code_of(&Err::<(), _>(error).context("reading a.img").expect_err("an error")), code);
        }
    }
}
