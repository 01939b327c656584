//! What commands print on standard output. Whoever reads it may have had enough (`amberlog status | head -1`): that is no fault, and no
//! reason to leave undone what else the command does, nor to exit with anything but what came of that.
//!
//! Failure story: what cannot be printed for another reason (a full disk) is said once on stderr, and the command fails
//! ([`code_after`]).

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// Prints a line on standard output, in place of `println!`, which panics when nobody reads it.
#[macro_export]
macro_rules! print_line {
    ($($words:tt)*) => {
        $crate::output::line(::std::format_args!($($words)*))
    };
}

/// See [`print_line`].
pub fn line(words: Arguments<'_>) {
    if let Err(error) = text(&format!("{words}\n"))
        && !HAS_FAILED.swap(true, Ordering::SeqCst)
    {
        eprintln!("printing on standard output failed: {error}");
    }
}

/// What somebody else has said, as a part of a line that people read: what would steer their terminal, or begin a line of its own, is
/// written out. Not for JSON, which has its own way of saying it.
pub fn in_a_line(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let shown = |character: char| {
        if character.is_control() { character.escape_default().to_string() } else { character.to_string() }
    };
    Cow::Owned(text.chars().map(shown).collect())
}

/// Prints a text. Where nobody reads it any more it is done.
///
/// # Errors
/// When it cannot be written for another reason.
pub fn text(text: &str) -> io::Result<()> {
    is_read(text).map(drop)
}

/// The same, and says whether somebody reads it: for who prints again and again.
///
/// # Errors
/// When it cannot be written for another reason.
pub fn is_read(text: &str) -> io::Result<bool> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// The exit code of a command that has printed lines.
pub fn code_after(code: ExitCode) -> ExitCode {
    let has_failed = HAS_FAILED.load(Ordering::SeqCst);
    if has_failed && code == ExitCode::SUCCESS { ExitCode::from(crate::exit::FAILED) } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_else_has_said_stays_in_its_line() {
        assert_eq!(in_a_line("the disk \u{fc}ber all"), "the disk \u{fc}ber all");
        assert_eq!(in_a_line("\x1b]0;x\x07a\nb\t\u{9b}2J"), "\\u{1b}]0;x\\u{7}a\\nb\\t\\u{9b}2J");
    }
}
