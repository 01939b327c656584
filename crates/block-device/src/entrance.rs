//! Where connections come in that somebody else listens for and keeps.

use crate::error::Error;
use crate::event::event_descriptor;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

/// Where connections come from that somebody else keeps ([`front_door::Door`]).
#[derive(Debug)]
pub struct Entrance {
    waiting: Mutex<VecDeque<(UnixStream, i32)>>,
    pub(crate) signal: OwnedFd,
}

impl Entrance {
    /// Nobody has come yet.
    ///
    /// # Errors
    /// When the kernel has no descriptor left.
    pub fn new() -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Entrance { waiting: Mutex::default(), signal: event_descriptor()? }))
    }

    /// Gives in a connection of process `pid`.
    pub fn admit(&self, connection: UnixStream, pid: i32) {
        self.waiting.lock().expect("no panic under this lock").push_back((connection, pid));
        let _ = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
    }

    /// Whether nobody waits there.
    pub fn is_empty(&self) -> bool {
        self.waiting.lock().expect("no panic under this lock").is_empty()
    }

    pub(crate) fn next(&self) -> Option<(UnixStream, i32)> {
        let _ = rustix::io::read(&self.signal, &mut [0u8; 8]);
        self.waiting.lock().expect("no panic under this lock").pop_front()
    }
}
