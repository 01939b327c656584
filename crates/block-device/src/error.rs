//! What can go wrong with a device, as sentences.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image cannot be opened or used.
    #[error("the disk image {path} cannot be used: {reason}")]
    Image {
        /// The image.
        path: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// The image is no raw disk.
    #[error(transparent)]
    OtherFormat(#[from] image_file::OtherFormat),
    /// Somebody else has the image.
    #[error(
        "the disk image {path} is in use by another process; stop that one first (two writers would destroy the file system)"
    )]
    ImageInUse {
        /// The image.
        path: PathBuf,
    },
    /// The socket cannot be made.
    #[error("the vhost-user socket {path} cannot be made: {reason}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// The device was configured with something it cannot do.
    #[error("the device {name} cannot be configured: {reason}")]
    Config {
        /// The device.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The device has been stopped.
    #[error("the device {name} has been stopped")]
    Stopped {
        /// The device.
        name: String,
    },
    /// The device does not stop: its route or its storage hangs. Its threads are left behind.
    #[error("the device {name} did not stop within {waited:?}; its route or its storage hangs")]
    StopTimedOut {
        /// The device.
        name: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The device has stopped, and storage has not answered all that it was asked for: that is under way still, on the image and in
    /// guest memory.
    #[error("the device {name} is stopped, and storage has not answered {operations} operations for {waited:?}")]
    Unanswered {
        /// The device.
        name: String,
        /// How many.
        operations: usize,
        /// How long they were waited for.
        waited: Duration,
    },
}

impl Error {
    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Error::System { what: what.into(), source: source.into() }
    }
}
