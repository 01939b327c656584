//! The control thread: listens on the socket, serves one VMM at a time, survives its coming and going.

use crate::device::{DeviceConfig, Observer, Peer, event_descriptor};
use crate::error::Error;
use crate::session::{BackendChannel, Session, stop_rings};
use crate::worker::Mailbox;
use block_route::Route;
use guest_memory::VmMemory;
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use vhost::vhost_user::message::FrontendReq;
use vhost::vhost_user::{BackendListener, BackendReqHandler, Listener};

const HEADER_BYTES: usize = 12;

/// The socket, and the way to end its thread.
#[derive(Debug)]
pub(crate) struct Control {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, so that only our own is removed.
    identity: (u64, u64),
    stop_signal: OwnedFd,
    stopping: AtomicBool,
    /// The thread reads a message of the VMM, which may never be whole.
    is_reading: AtomicBool,
    connection: Mutex<Option<UnixStream>>,
}

impl Control {
    /// Makes the socket. One that nobody listens on any more is replaced.
    pub(crate) fn new(path: &Path) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Socket { path: path.to_owned(), reason };
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if UnixStream::connect(path).is_ok() {
                    return Err(refuse("another process listens there; stop it or choose another path".to_owned()));
                }
                let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| {
                    use std::os::unix::fs::FileTypeExt;
                    metadata.file_type().is_socket()
                });
                if !is_socket {
                    return Err(refuse("something that is no socket is there; remove it".to_owned()));
                }
                std::fs::remove_file(path).map_err(|e| refuse(format!("a stale one cannot be removed: {e}")))?;
                UnixListener::bind(path)
            }
            other => other,
        }
        .map_err(|e| refuse(e.to_string()))?;
        listener.set_nonblocking(true).map_err(|e| Error::system("making a socket non-blocking", e))?;
        // Whatever the mask was: who may connect is decided here.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(|e| refuse(e.to_string()))?;
        let metadata = std::fs::symlink_metadata(path).map_err(|e| refuse(e.to_string()))?;
        Ok(Control {
            listener,
            path: path.to_owned(),
            identity: (metadata.dev(), metadata.ino()),
            stop_signal: event_descriptor()?,
            stopping: AtomicBool::new(false),
            is_reading: AtomicBool::new(false),
            connection: Mutex::new(None),
        })
    }

    /// Has the thread end soon, whatever it waits for on its socket. The connection stays while requests are in flight, if that is
    /// possible: a VMM without an in-flight region goes on from the used ring as it is when the connection ends.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.stop_signal, &1u64.to_ne_bytes());
        if self.is_reading.load(Ordering::SeqCst)
            && let Some(connection) = self.connection.lock().expect("no panic under this lock").as_ref()
        {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Waits until `descriptor` is readable. Returns false when the thread is to end.
    fn wait(&self, descriptor: BorrowedFd<'_>) -> bool {
        loop {
            let mut list = [PollFd::new(&descriptor, PollFlags::IN), PollFd::new(&self.stop_signal, PollFlags::IN)];
            match poll(&mut list, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    log::error!("waiting on the socket {} failed: {error}", self.path.display());
                    return false;
                }
            }
            if self.stopping() {
                return false;
            }
            // Hang-up and errors are seen by the read that follows.
            if !list[0].revents().is_empty() {
                return true;
            }
        }
    }

    /// Waits until the connection of process `pid` is readable, and turns away whoever else comes meanwhile. Returns false when
    /// the thread is to end.
    fn wait_alone(&self, connection: BorrowedFd<'_>, name: &str, pid: i32) -> bool {
        loop {
            let mut list = [
                PollFd::new(&connection, PollFlags::IN),
                PollFd::new(&self.stop_signal, PollFlags::IN),
                PollFd::new(&self.listener, PollFlags::IN),
            ];
            match poll(&mut list, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    log::error!("waiting on the socket {} failed: {error}", self.path.display());
                    return false;
                }
            }
            if self.stopping() {
                return false;
            }
            // The end of this connection comes before the next of the same process.
            if !list[0].revents().is_empty() {
                return true;
            }
            if !list[2].revents().is_empty()
                && let Ok((other, _)) = self.listener.accept()
            {
                let other = rustix::net::sockopt::socket_peercred(&other)
                    .map_or(0, |credentials| credentials.pid.as_raw_nonzero().get());
                log::warn!("disk {name}: process {other} is turned away: process {pid} has this disk");
            }
        }
    }

    /// The thread.
    pub(crate) fn run<R: Route + ?Sized + 'static>(
        &self,
        config: &DeviceConfig,
        mailbox: &Mailbox<R>,
        memory: &Arc<VmMemory>,
        observer: &Arc<dyn Observer>,
        channel: &Arc<Mutex<Option<BackendChannel>>>,
    ) {
        let Ok(listener) = self.listener.try_clone() else {
            log::error!("disk {}: no descriptor left for its socket", config.name);
            return;
        };
        let mut listener = Listener::from(listener);
        while self.wait(self.listener.as_fd()) {
            let session = Session::new(config.clone(), mailbox.clone(), Arc::clone(memory));
            let session = Arc::new(Mutex::new(session));
            let accepted = BackendListener::new(&mut listener, session).and_then(|mut listener| listener.accept());
            let mut handler = match accepted {
                Ok(Some(handler)) => handler,
                Ok(None) => continue,
                Err(error) => {
                    log::error!("disk {}: accepting a connection failed: {error}", config.name);
                    // Out of descriptors, perhaps: not to be tried without a pause.
                    std::thread::sleep(std::time::Duration::from_millis(100));
                    continue;
                }
            };
            self.serve(&mut handler, config, mailbox, observer, channel);
        }
    }

    fn serve<R: Route + ?Sized + 'static>(
        &self,
        handler: &mut BackendReqHandler<Mutex<Session<R>>>,
        config: &DeviceConfig,
        mailbox: &Mailbox<R>,
        observer: &Arc<dyn Observer>,
        channel: &Mutex<Option<BackendChannel>>,
    ) {
        let name = &config.name;
        let connection = match handler.try_clone_connection() {
            Ok(connection) => connection,
            Err(error) => {
                log::error!("disk {name}: no descriptor left for a connection: {error}");
                return;
            }
        };
        let pid = rustix::net::sockopt::socket_peercred(&connection)
            .map_or(0, |credentials| credentials.pid.as_raw_nonzero().get());
        let peer = Peer { pid };
        if let Ok(clone) = connection.try_clone() {
            *self.connection.lock().expect("no panic under this lock") = Some(clone);
        }
        if let Err(reason) = observer.connected(peer) {
            log::warn!("disk {name}: process {pid} is turned away: {reason}");
            *self.connection.lock().expect("no panic under this lock") = None;
            return;
        }
        log::info!("disk {name}: process {pid} has connected");
        let error = loop {
            if !self.wait_alone(connection.as_fd(), name, pid) {
                break None;
            }
            self.is_reading.store(true, Ordering::SeqCst);
            if self.stopping() {
                break None;
            }
            if let Some(socket) = peek_backend_channel(&connection) {
                *channel.lock().expect("no panic under this lock") = Some(BackendChannel::new(socket));
            }
            let handled = handler.handle_request();
            self.is_reading.store(false, Ordering::SeqCst);
            if let Err(error) = handled {
                break Some(error);
            }
        };
        self.is_reading.store(false, Ordering::SeqCst);
        match error {
            None | Some(vhost::vhost_user::Error::Disconnected) => log::info!("disk {name}: process {pid} has gone"),
            Some(error) => log::warn!("disk {name}: the connection of process {pid} is dropped: {error}"),
        }
        *self.connection.lock().expect("no panic under this lock") = None;
        *channel.lock().expect("no panic under this lock") = None;
        stop_rings(mailbox, config.drain_timeout);
        mailbox.ask(|worker| worker.forget_front_end());
        observer.disconnected(peer);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Another process may have made its own socket at this path meanwhile.
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The descriptor of the channel for messages from us to the VMM, if that is what the next message brings.
///
/// The `vhost` crate takes the descriptor into an object that can send anything but the one message a disk needs
/// (CONFIG_CHANGE), so it is taken from the message before the crate reads it: peeking at a message duplicates its
/// descriptors.
fn peek_backend_channel(connection: &UnixStream) -> Option<File> {
    let mut header = [0u8; HEADER_BYTES];
    let (_, seen) = rustix::net::recv(connection, &mut header, rustix::net::RecvFlags::PEEK).ok()?;
    let code = u32::from_le_bytes(header[0..4].try_into().expect("four bytes"));
    if seen < HEADER_BYTES || code != u32::from(FrontendReq::SET_BACKEND_REQ_FD) {
        return None;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(connection, &mut [IoSliceMut::new(&mut header)], &mut control, flags).ok()?;
    control.drain().find_map(|message| match message {
        rustix::net::RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next().map(File::from),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        drop(UnixListener::bind(&path).expect("a socket that nobody listens on any more"));
        let first = Control::new(&path).expect("replaces the stale one");
        let error = Control::new(&path).expect_err("is in use");
        assert!(error.to_string().contains("another process listens there"), "{error}");
        drop(first);
        assert!(!path.exists(), "its own socket is removed");
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("precious");
        std::fs::write(&path, "data").expect("written");
        Control::new(&path).expect_err("is no socket");
        assert_eq!(std::fs::read_to_string(&path).expect("is there"), "data");
    }

    #[test]
    fn a_socket_of_somebody_else_is_not_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let first = Control::new(&path).expect("made");
        std::fs::remove_file(&path).expect("removed");
        let _other = UnixListener::bind(&path).expect("another one's");
        drop(first);
        assert!(path.exists());
    }
}
