//! What a step of a run gives back: nothing, a broken promise, or that the explorer itself could not go on.

use crate::error::Error;

/// Why a run stopped.
#[derive(Debug)]
pub enum Stop {
    /// A promise is broken.
    Finding(String),
    /// The explorer itself could not go on.
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Error(error)
    }
}

/// Says that a promise is broken.
pub fn finding<T>(text: impl Into<String>) -> std::result::Result<T, Stop> {
    Err(Stop::Finding(text.into()))
}

/// What a run gives back after every step.
pub type Step = std::result::Result<(), Stop>;
