//! The socket on which the library preloaded into the VMM hands over its userfaultfd.
//!
//! The library runs in every program that inherits the preload, so every sender is told apart by its process id; the
//! one that then connects as vhost-user front-end is the VMM.

use crate::error::Error;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::collections::HashMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// The environment variable that tells the preloaded library where to connect.
pub const SHIM_SOCKET_VARIABLE: &str = "AMBERLOG_SHIM_SOCKET";

/// At most this many descriptors are kept for processes that have not connected as a VMM.
const SENDERS_MAX: usize = 64;

/// Receives userfaultfds from VMM processes and keeps them by process id.
#[derive(Debug)]
pub struct HandoverSocket {
    path: PathBuf,
    received: Arc<Mutex<HashMap<i32, OwnedFd>>>,
}

impl HandoverSocket {
    /// Listens at `path` (created, mode 0600 by its directory) and receives in a thread of its own.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn listen(path: &Path) -> Result<Self, Error> {
        let listener = UnixListener::bind(path)
            .map_err(|e| Error::system(format!("listening for the VMM's userfaultfd at {}", path.display()), e))?;
        let received = Arc::new(Mutex::new(HashMap::new()));
        let store = Arc::downgrade(&received);
        std::thread::Builder::new()
            .name("handover".to_owned())
            .spawn(move || {
                for stream in listener.incoming().flatten() {
                    let Some(store) = store.upgrade() else { return };
                    if let Some((pid, descriptor)) = receive(&stream) {
                        let mut store = store.lock().expect("no panic under this lock");
                        if store.len() < SENDERS_MAX || store.contains_key(&pid) {
                            store.insert(pid, descriptor);
                        }
                    }
                    // The library waits for this end of file before it lets the program's main start, so that the
                    // descriptor is here before the program can connect anywhere else.
                }
            })
            .map_err(|e| Error::system("starting the thread that receives the VMM's userfaultfd", e))?;
        Ok(HandoverSocket { path: path.to_owned(), received })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The userfaultfd of process `pid`, once.
    pub fn take(&self, pid: i32) -> Option<OwnedFd> {
        self.received.lock().expect("no panic under this lock").remove(&pid)
    }
}

impl Drop for HandoverSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn receive(stream: &UnixStream) -> Option<(i32, OwnedFd)> {
    let credentials = rustix::net::sockopt::socket_peercred(stream).ok()?;
    stream.set_read_timeout(Some(std::time::Duration::from_secs(2))).ok()?;
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => {
            descriptors.next().map(|descriptor| (credentials.pid.as_raw_nonzero().get(), descriptor))
        }
        _ => None,
    })
}
