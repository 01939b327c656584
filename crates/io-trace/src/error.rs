//! What can be wrong with a trace, said as a sentence.

use std::io;

/// A `Result` whose error is a trace [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a trace could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system said no.
    #[error("{name}: cannot {what}: {source}")]
    Io {
        /// The trace's file name, `-` for standard input.
        name: String,
        /// What was being done.
        what: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A line of a text trace is not what its format asks for.
    #[error("{name}: line {line}: {reason}; `--lenient` counts and skips such lines")]
    Line {
        /// The trace's file name.
        name: String,
        /// The line, counted from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A frame of an amber trace is damaged and more data follows it.
    #[error("{name}: frame at byte {offset}: {reason}; `--lenient` skips to the next good frame")]
    Damaged {
        /// The trace's file name.
        name: String,
        /// The frame's first byte, in the decompressed stream.
        offset: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// The file is of another format than the one asked for.
    #[error("{name}: {reason}")]
    Format {
        /// The trace's file name.
        name: String,
        /// What it is not, and what to say instead.
        reason: String,
    },
    /// Not a single record was found: most likely the wrong format was named.
    #[error("{name}: not one request in {lines} lines or frames read as {format}; is it of another format?")]
    Empty {
        /// The trace's file name.
        name: String,
        /// How many lines or frames were looked at.
        lines: u64,
        /// The format it was read as.
        format: &'static str,
    },
}

impl Error {
    /// Whether the input is at fault (exit code 3) rather than the machine (exit code 1).
    pub fn is_damaged_input(&self) -> bool {
        match self {
            // A decompressor reports damaged data as one of these kinds.
            Error::Io { source, .. } => {
                matches!(
                    source.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput
                )
            }
            _ => true,
        }
    }
}
