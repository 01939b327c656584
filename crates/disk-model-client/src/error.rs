//! The one error type of both ends: every variant prints as a sentence.

use std::path::PathBuf;

/// What can go wrong between a virtual disk and the modelled one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket of a shared model cannot be used.
    #[error("cannot reach the disk model at {}: {source}; start 'amberlog disk-model --socket' there first", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A model cannot listen there.
    #[error("cannot listen at {}: {source}; remove what is there, or choose another place", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The connection failed.
    #[error("the disk model does not answer: {0}")]
    Gone(#[from] std::io::Error),
    /// The modelled disk has no room.
    #[error("the modelled disk has no room left for another {size_bytes} bytes; use smaller images, or fewer")]
    Full {
        /// The size of the virtual disk that asked.
        size_bytes: u64,
    },
}
