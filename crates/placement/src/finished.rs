//! What came of the logs that a directory in tmpfs had, when somebody finished what a killed amberlog left: those that are home, those
//! that are not, and why. It is the same for held logs (`crate::found`) and for copies of journals that were on a server
//! (`crate::copies`).

use crate::description::LogDescription;
use crate::directory_error::DirectoryError;
use recovery::{Report, Unfinished};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Why a recovery could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum FinishError {
    /// The directory cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The files contradict each other or the image; nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// The files or the log are damaged; nothing was changed.
    #[error("{0}")]
    Damaged(String),
    /// Somebody uses the image; everything is as it was and can be tried again.
    #[error("{0}")]
    InUse(String),
    /// Reading or writing failed; everything is as it was and can be tried again.
    #[error("{0}")]
    Failed(String),
}

impl FinishError {
    /// Whether nothing was changed, and trying again would not change that.
    pub fn is_refusal(&self) -> bool {
        matches!(self, FinishError::Refused(_) | FinishError::Damaged(_))
    }

    /// How it ended, in a word.
    pub fn outcome(&self) -> Unfinished {
        match self {
            FinishError::Directory(directory) if directory.is_not_ours() => Unfinished::Refused,
            FinishError::Refused(_) => Unfinished::Refused,
            FinishError::Damaged(_) => Unfinished::Damaged,
            FinishError::Directory(_) | FinishError::InUse(_) | FinishError::Failed(_) => Unfinished::Failed,
        }
    }

    /// The same, where a person was asked what to do, and has not said so. What failed has failed still: it may have changed something.
    #[must_use]
    pub fn followed_by(self, sentence: &str) -> Self {
        let both = format!("{self}; {sentence}");
        match self {
            FinishError::InUse(_) => FinishError::InUse(both),
            FinishError::Damaged(_) => FinishError::Damaged(both),
            FinishError::Refused(_) => FinishError::Refused(both),
            FinishError::Directory(_) | FinishError::Failed(_) => FinishError::Failed(both),
        }
    }

    /// The same, where something had been written before or not: a refusal promises that nothing was changed.
    #[must_use]
    pub(crate) fn after(self, has_written: bool) -> Self {
        if has_written && self.is_refusal() {
            return FinishError::Failed(format!("the recovery had begun to write, and then this stopped it: {self}"));
        }
        self
    }
}

impl From<recovery::Error> for FinishError {
    fn from(error: recovery::Error) -> Self {
        let sentence = error.to_string();
        match error.outcome() {
            Unfinished::Refused => FinishError::Refused(sentence),
            Unfinished::Damaged => FinishError::Damaged(sentence),
            Unfinished::Failed if error.is_in_use() => FinishError::InUse(sentence),
            Unfinished::Failed => FinishError::Failed(sentence),
        }
    }
}

/// One log that was finished.
#[derive(Clone, Debug, Serialize)]
pub struct FinishedLog {
    /// The image with the file system.
    pub image: PathBuf,
    /// Where the file system begins on it, in bytes.
    pub offset: u64,
    /// What was done.
    pub recovery: Report,
}

/// One log that could not be finished: what is held of it is as it was.
#[derive(Debug)]
pub struct FailedLog {
    /// The image with the file system.
    pub image: PathBuf,
    /// The image with the log, where that is another one.
    pub journal: Option<PathBuf>,
    /// Where the file system begins on it, in bytes.
    pub offset: u64,
    /// Why.
    pub error: FinishError,
    /// Whether one of the images that the caller has named has a part in it: that one is not to be used.
    pub is_of_named: bool,
    /// The image that carries the mark of what is held, where it was or is said to be, and that nobody has named: what is held can be
    /// brought home to that one, perhaps.
    pub(crate) fits: Option<PathBuf>,
    /// What its files are called, without the ending.
    pub(crate) name: String,
}

impl FailedLog {
    /// One whose copy could not be brought home.
    pub(crate) fn of_copy(journal: &Path, offset: u64, name: &str, error: FinishError) -> Self {
        let (image, name) = (journal.to_owned(), name.to_owned());
        FailedLog { image, journal: None, offset, error, is_of_named: true, fits: None, name }
    }

    pub(crate) fn new(log: &LogDescription, is_of_named: bool, error: FinishError) -> Self {
        FailedLog {
            image: log.home_image.clone(),
            journal: log.place.is_external.then(|| log.journal_image.clone()),
            offset: log.place.home_start,
            error,
            is_of_named,
            fits: None,
            name: log.name.clone(),
        }
    }
}

/// What came of the logs of a directory.
#[derive(Debug, Default)]
pub struct Finish {
    /// Those that are finished.
    pub finished: Vec<FinishedLog>,
    /// Those that are not.
    pub failed: Vec<FailedLog>,
}

impl Finish {
    /// Takes out why the first failed that an image has a part in which the caller has named: that image is not to be used. Each log is brought
    /// home by itself: what concerns other images keeps nobody from these, and what is finished stays so.
    pub fn take_failure_of_named(&mut self) -> Option<FinishError> {
        let index = self.failed.iter().position(|failed| failed.is_of_named)?;
        Some(self.failed.swap_remove(index).error)
    }

    /// All of them, or why the first that failed did.
    ///
    /// # Errors
    /// When any failed.
    pub fn into_result(self) -> Result<Vec<FinishedLog>, FinishError> {
        match self.failed.into_iter().next() {
            Some(failed) => Err(failed.error),
            None => Ok(self.finished),
        }
    }
}
