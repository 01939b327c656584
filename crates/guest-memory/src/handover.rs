//! The socket on which the library preloaded into the VMM hands over its userfaultfd.
//!
//! The library runs in every program that inherits the preload, so every sender is told apart by its process id; the
//! one that then connects as vhost-user front-end is the VMM.

use crate::error::Error;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
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
    is_over: Arc<AtomicBool>,
}

impl HandoverSocket {
    /// Listens at `path` (created, mode 0600; what an earlier process left there is replaced) and
    /// receives in a thread of its own. Every process gets `lock` in return, and keeps it open while it lives: a lock of
    /// that file is free only when all of them are gone.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn listen(path: &Path, lock: Option<OwnedFd>) -> Result<Self, Error> {
        if std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
            // Its owner is gone, or has lost the directory to us.
            let _ = std::fs::remove_file(path);
        }
        let listener = UnixListener::bind(path)
            .and_then(|listener| {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map(|()| listener)
            })
            .map_err(|e| Error::system(format!("listening for the VMM's userfaultfd at {}", path.display()), e))?;
        let received = Arc::new(Mutex::new(HashMap::new()));
        let store = Arc::clone(&received);
        let is_over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&is_over);
        std::thread::Builder::new()
            .name("handover".to_owned())
            .spawn(move || {
                for stream in listener.incoming().flatten() {
                    if ended.load(Ordering::Acquire) {
                        return;
                    }
                    if let Some((pid, descriptor)) = receive(&stream)
                        && let Some(descriptor) = descriptor
                    {
                        let mut store = store.lock().expect("no panic under this lock");
                        if store.len() < SENDERS_MAX || store.contains_key(&pid) {
                            store.insert(pid, descriptor);
                        }
                    }
                    if let Some(lock) = &lock {
                        send_lock(&stream, lock);
                    }
                    // The library waits for this end of file before it lets the program's main start, so that the
                    // descriptor is here before the program can connect anywhere else.
                }
            })
            .map_err(|e| Error::system("starting the thread that receives the VMM's userfaultfd", e))?;
        Ok(HandoverSocket { path: path.to_owned(), received, is_over })
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
        self.is_over.store(true, Ordering::Release);
        // The thread waits for somebody to come.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Who sent a byte, and the descriptor that came with it, if the process could make one.
fn receive(stream: &UnixStream) -> Option<(i32, Option<OwnedFd>)> {
    let credentials = rustix::net::sockopt::socket_peercred(stream).ok()?;
    stream.set_read_timeout(Some(std::time::Duration::from_secs(2))).ok()?;
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Some((credentials.pid.as_raw_nonzero().get(), descriptor))
}

/// A process that does not take it is one that has ended, or is no VMM.
fn send_lock(stream: &UnixStream, lock: &OwnedFd) {
    let descriptors = [lock.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendmsg(stream, &[IoSlice::new(&[1])], &mut control, flags);
    }
}
