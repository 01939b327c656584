//! The one error type of this crate: every variant prints as a sentence.

use crate::measured::Source;
use std::path::PathBuf;

/// What can go wrong in the lab.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of results could not be used.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried, in the infinitive.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file holds something else than results of ours.
    #[error("{} is not what amberlog lab writes: {reason}; remove it, or choose another directory", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No such experiment.
    #[error("there is no experiment '{0}'; 'amberlog lab list' shows them")]
    Unknown(String),
    /// No experiment of those that were named has a cell of what was asked for.
    #[error("there is no such cell in {ids}:{options}; 'amberlog lab show ID' says what an experiment has")]
    NoCell {
        /// The experiments.
        ids: String,
        /// What was asked for.
        options: String,
    },
    /// No such contender or load of a shoot-out.
    #[error("a shoot-out has no {0}")]
    NotOfShootOut(String),
    /// An experiment of something that is not there yet.
    #[error("{id} cannot be run yet: {needs}")]
    NotYet {
        /// The experiment.
        id: String,
        /// What it needs.
        needs: String,
    },
    /// An experiment's text is not well formed: one of the user's own, or a bug.
    #[error("the description of {id} is not well formed: {reason}")]
    Description {
        /// The experiment.
        id: String,
        /// What is wrong.
        reason: String,
    },
    /// A guest, an image or a program of the host.
    #[error(transparent)]
    Guest(#[from] guest_kit::Error),
    /// The modelled disk.
    #[error(transparent)]
    Model(#[from] disk_model::Error),
    /// A directory has results that another program or machine measured.
    #[error(
        "{} has {count} results of {of}, and this is {here}: nothing is measured over them, and they are not taken for its own; choose another directory \
         with --out, or say --any-source to take them as they are (what compares two machines or commits is not judged)",
        path.display()
    )]
    OtherSource {
        /// The directory.
        path: PathBuf,
        /// How many.
        count: usize,
        /// What measured the first of them.
        of: Box<Source>,
        /// What would measure now.
        here: Box<Source>,
    },
    /// A directory has results of cells of this run under other parameters.
    #[error(
        "{} has {count} results that were measured otherwise ({differs}): nothing is measured over them; give the words that they were measured \
         with, or choose another directory with --out",
        path.display()
    )]
    OtherParameters {
        /// The directory.
        path: PathBuf,
        /// How many.
        count: usize,
        /// What differs in the first of them: `scale: 1 there, 0.1 here`.
        differs: String,
    },
    /// A shoot-out's directory has cells that were measured otherwise than it would measure them.
    #[error(
        "{} has {count} cells that were measured otherwise than this command would ({cell}: {differences}): they are not written over; choose another \
         directory with --out{or_any_source}",
        path.display()
    )]
    OtherConditions {
        /// The directory.
        path: PathBuf,
        /// How many.
        count: usize,
        /// The first of them.
        cell: String,
        /// In what it differs.
        differences: String,
        /// What else can be done.
        or_any_source: &'static str,
    },
    /// The run was told to end.
    #[error("interrupted; the same command goes on where it was")]
    Interrupted,
    /// A guest told something else than was expected.
    #[error("{0}")]
    Told(String),
}

/// The result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Attaches what was tried, and on which file, to an I/O error.
pub(crate) trait FileContext<T> {
    /// `action` is an infinitive: "read", "create".
    fn at(self, action: &'static str, path: &std::path::Path) -> Result<T>;
}

impl<T> FileContext<T> for std::io::Result<T> {
    fn at(self, action: &'static str, path: &std::path::Path) -> Result<T> {
        self.map_err(|source| Error::File { action, path: path.to_owned(), source })
    }
}
