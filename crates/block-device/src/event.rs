//! Event descriptors, by which threads that wait at `poll` are woken.

use crate::error::Error;
use std::os::fd::OwnedFd;

/// An event descriptor.
pub(crate) fn event_descriptor() -> Result<OwnedFd, Error> {
    use rustix::event::EventfdFlags;
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| Error::system("making an event descriptor", e))
}
