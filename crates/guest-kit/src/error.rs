//! The one error type of this crate: every variant prints as a sentence.

use std::path::{Path, PathBuf};

/// What can go wrong when a guest is prepared, run or judged.
#[derive(thiserror::Error)]
pub enum Error {
    /// A file or directory of the host could not be used.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried, in the infinitive.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A program of the host is not installed.
    #[error("the program {0} is not installed; run scripts/install-packages.sh")]
    NoProgram(String),
    /// A program of the host failed.
    #[error("{command} failed with {status}: {output}")]
    Program {
        /// The whole command line.
        command: String,
        /// Its exit status, as text.
        status: String,
        /// The end of what it printed.
        output: String,
    },
    /// No guest is started any more: see [`crate::interrupt`].
    #[error("interrupted")]
    Interrupted,
    /// The guest's kernel, modules or binaries cannot be prepared.
    #[error("{0}")]
    Assets(String),
    /// The guest did not do what was awaited; the end of its console is part of the message.
    #[error("guest {name}: {problem}\n--- QEMU's stderr\n{stderr}\n--- end of the console ({})\n{console}", console_path.display())]
    Guest {
        /// The name given in the guest's specification.
        name: String,
        /// What was awaited and did not come.
        problem: String,
        /// The end of what QEMU (or the wrapper) printed to stderr.
        stderr: String,
        /// Where the whole console output is kept.
        console_path: PathBuf,
        /// The end of the console output.
        console: String,
    },
    /// QEMU's machine protocol: a refused command, or no answer.
    #[error("QMP: {0}")]
    Qmp(String),
    /// An image does not hold what it was expected to hold.
    #[error("{}: {problem}", image.display())]
    Image {
        /// The image.
        image: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// As it is displayed: what `unwrap` prints in a failed test shall be readable.
impl std::fmt::Debug for Error {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{self}")
    }
}

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Attaches what was tried, and on which file, to an I/O error.
pub(crate) trait FileContext<T> {
    /// `action` is an infinitive: "read", "create".
    fn at(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T> FileContext<T> for std::io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::File { action, path: path.to_owned(), source })
    }
}
