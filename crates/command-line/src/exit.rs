//! Exit codes, the same for every program: 0 done, 1 failed, 2 usage, 3 input damaged or refused (nothing was changed).

use std::borrow::Cow;
use std::fmt::Display;
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

/// An error and what it comes from, as one sentence. A cause that is said already is not said again.
pub fn sentence(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if said.is_empty() {
            said = cause;
        } else if !said.ends_with(&cause) {
            said = format!("{said}: {cause}");
        }
    }
    said
}

/// A text whose lines are seen as parts of one, and that says nothing to a terminal: names of files and disks are in it, and they
/// are other people's. Control characters are shown escaped, and further lines begin with spaces.
pub fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.trim_end_matches('\n').chars() {
        match character {
            '\n' => shown.push_str("\n    "),
            '\t' => shown.push(character),
            _ if character.is_control() => shown.extend(character.escape_default()),
            _ => shown.push(character),
        }
    }
    Cow::Owned(shown)
}

/// Prints a sentence of `program` on stderr; it is an error where the journal asks for priorities.
pub fn say(program: &str, sentence: impl Display) {
    let line = format!("{program}: {}", visible(&sentence.to_string()));
    if crate::priority::stderr_is_the_journal() {
        eprintln!("{}", crate::priority::with_priority(3, &line));
    } else {
        eprintln!("{line}");
    }
}

/// Prints an error of `program` as one sentence and exits with `code`.
pub fn report(program: &str, error: &anyhow::Error, code: u8) -> ExitCode {
    say(program, sentence(error));
    ExitCode::from(code)
}

/// Ends the program without a word when whoever reads its standard output has had enough (`amberlog-lab trace | head`): that is no failure.
/// Rust ignores SIGPIPE, so that a pipe without a reader is an error of `println!`, which panics; what is written elsewhere, to sockets above
/// all, still gets its errors. For whatever prints with that: a command that does something prints with [`crate::print_line`], and goes on.
pub fn when_nobody_reads() {
    let earlier = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>();
        if message.is_some_and(|message| message.starts_with("failed printing to stdout: Broken pipe")) {
            std::process::exit(0);
        }
        earlier(panic);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_said_once() {
        let cause = std::io::Error::other("no room");
        let error = anyhow::Error::from(std::io::Error::other(format!("writing x: {cause}"))).context("the report");
        assert_eq!(sentence(&error), "the report: writing x: no room");
        let error = Err::<(), _>(cause).context("opening /dev: no room").expect_err("an error");
        assert_eq!(sentence(&error), "opening /dev: no room");
    }

    #[test]
    fn names_cannot_forge_lines() {
        assert_eq!(visible("plain \u{e9}"), "plain \u{e9}");
        assert_eq!(visible("x\n2026 INFO all is well\u{1b}[2J\r\n"), "x\n    2026 INFO all is well\\u{1b}[2J\\r");
    }

    #[test]
    fn an_error_keeps_its_code_under_context() {
        for (error, code) in [(usage("which?"), USAGE), (refused("damaged"), REFUSED), (anyhow::anyhow!("no"), FAILED)]
        {
            assert_eq!(code_of(&error), code);
            assert_eq!(code_of(&Err::<(), _>(error).context("reading a.img").expect_err("an error")), code);
        }
    }
}
