//! The control thread: listens on the socket, serves one VMM at a time, survives its coming and going. Who has connected and
//! says nothing is no VMM ([`Callers`]). Where a supervisor keeps the connections, it listens, and gives them in ([`Entrance`]).

use crate::config::{DeviceConfig, Observer, Peer};
use crate::entrance::Entrance;
use crate::error::Error;
use crate::event::event_descriptor;
use crate::session::{BackendChannel, Session, await_memory, stop_rings};
use crate::worker::Mailbox;
use block_route::Route;
use front_door::{Callers, HEADER_BYTES, process_of, say_goodbye};
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
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use vhost::vhost_user::BackendReqHandler;
use vhost::vhost_user::message::FrontendReq;

/// Where VMMs come from.
#[derive(Debug)]
enum Source {
    Socket {
        listener: UnixListener,
        /// Device and inode of the socket file, so that only our own is removed.
        identity: (u64, u64),
    },
    Entrance(Arc<Entrance>),
}

impl Source {
    /// What becomes readable when somebody comes.
    fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Source::Socket { listener, .. } => listener.as_fd(),
            Source::Entrance(entrance) => entrance.signal.as_fd(),
        }
    }
}

/// Makes the socket at which VMMs find a disk, for its owner alone. One that nobody listens on any more is replaced.
///
/// # Errors
/// When it is in use, or something else is there.
pub fn listen(path: &Path) -> Result<UnixListener, Error> {
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
    Ok(listener)
}

/// The way in, and the way to end its thread.
#[derive(Debug)]
pub(crate) struct Control {
    source: Source,
    path: PathBuf,
    stop_signal: OwnedFd,
    /// Since when the thread is to end.
    stopping: Arc<OnceLock<Instant>>,
    /// The thread reads a message of the VMM, which may never be whole.
    is_reading: AtomicBool,
    connection: Mutex<Option<UnixStream>>,
}

impl Control {
    /// Makes the socket, if nobody else listens. One that nobody listens on any more is replaced.
    pub(crate) fn new(path: &Path, entrance: Option<&Arc<Entrance>>) -> Result<Self, Error> {
        let source = match entrance {
            Some(entrance) => Source::Entrance(Arc::clone(entrance)),
            None => {
                let listener = listen(path)?;
                let metadata = std::fs::symlink_metadata(path)
                    .map_err(|e| Error::Socket { path: path.to_owned(), reason: e.to_string() })?;
                Source::Socket { listener, identity: (metadata.dev(), metadata.ino()) }
            }
        };
        Ok(Control {
            source,
            path: path.to_owned(),
            stop_signal: event_descriptor()?,
            stopping: Arc::default(),
            is_reading: AtomicBool::new(false),
            connection: Mutex::new(None),
        })
    }

    /// Has the thread end soon, whatever it waits for on its socket. The connection stays while requests are in flight, if that is
    /// possible: a VMM without an in-flight region goes on from the used ring as it is when the connection ends.
    pub(crate) fn stop(&self) {
        let _ = self.stopping.set(Instant::now());
        let _ = rustix::io::write(&self.stop_signal, &1u64.to_ne_bytes());
        if self.is_reading.load(Ordering::SeqCst)
            && let Some(connection) = self.connection.lock().expect("no panic under this lock").as_ref()
        {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    fn stopping(&self) -> bool {
        self.stopping.get().is_some()
    }

    /// Whether nobody is to be waited for on this connection any more: the VMM has gone, or this device has been ending for longer than its
    /// requests are waited for.
    fn is_over(
        &self,
        connection: &UnixStream,
        drain_timeout: Duration,
    ) -> io::Result<impl Fn() -> bool + Send + use<>> {
        let (stopping, connection) = (Arc::clone(&self.stopping), connection.try_clone()?);
        Ok(move || stopping.get().is_some_and(|since| since.elapsed() >= drain_timeout) || has_gone(&connection))
    }

    /// Waits until somebody who has connected speaks. Returns `None` when the thread is to end.
    fn next_front_end(&self, callers: &mut Callers) -> Option<(UnixStream, i32)> {
        loop {
            if let Source::Entrance(entrance) = &self.source
                && let Some(given) = entrance.next()
            {
                return Some(given);
            }
            if let Some(connection) = callers.hear() {
                let pid = process_of(&connection);
                return Some((connection, pid));
            }
            let patience = callers.patience().and_then(|patience| patience.try_into().ok());
            let mut list = vec![
                PollFd::new(&self.stop_signal, PollFlags::IN),
                PollFd::from_borrowed_fd(self.source.descriptor(), PollFlags::IN),
            ];
            list.extend(callers.descriptors().map(|caller| PollFd::from_borrowed_fd(caller, PollFlags::IN)));
            match poll(&mut list, patience.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    log::error!("waiting on the socket {} failed: {error}", self.path.display());
                    return None;
                }
            }
            if self.stopping() {
                return None;
            }
            if list[1].revents().is_empty() {
                continue;
            }
            drop(list);
            let Source::Socket { listener, .. } = &self.source else { continue };
            match listener.accept() {
                Ok((connection, _)) => callers.add(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    log::error!("accepting a connection at {} failed: {error}", self.path.display());
                    // Out of descriptors, perhaps: not to be tried without a pause.
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    /// Waits until the connection of process `pid` is readable, and turns away whoever else comes meanwhile. Returns false when
    /// the thread is to end.
    fn wait_alone(&self, connection: BorrowedFd<'_>, name: &str, pid: i32) -> bool {
        loop {
            let mut list = vec![PollFd::new(&connection, PollFlags::IN), PollFd::new(&self.stop_signal, PollFlags::IN)];
            // Who is given in waits.
            if let Source::Socket { listener, .. } = &self.source {
                list.push(PollFd::new(listener, PollFlags::IN));
            }
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
            if let Source::Socket { listener, .. } = &self.source
                && !list[2].revents().is_empty()
                && let Ok((other, _)) = listener.accept()
            {
                let other = process_of(&other);
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
        let mut callers = Callers::new(&config.name);
        while let Some((connection, pid)) = self.next_front_end(&mut callers) {
            callers.turn_away(pid);
            let goodbye = match &self.source {
                Source::Socket { .. } => None,
                Source::Entrance(_) => connection.try_clone().ok(),
            };
            // It may have become larger while nobody had it.
            if let Err(error) = config.image.measure() {
                log::warn!("disk {}: {error}", config.name);
            }
            let is_over = match self.is_over(&connection, config.drain_timeout) {
                Ok(is_over) => Box::new(is_over),
                Err(error) => {
                    log::error!("disk {}: no descriptor left for a connection: {error}", config.name);
                    continue;
                }
            };
            let session = Session::new(config.clone(), mailbox.clone(), Arc::clone(memory), is_over);
            let mut handler = BackendReqHandler::from_stream(connection, Arc::new(Mutex::new(session)));
            self.serve(&mut handler, pid, config, mailbox, observer, channel);
            if let Some(connection) = goodbye {
                // Whoever keeps the connection of the VMM is to drop it, too.
                say_goodbye(&connection);
            }
        }
    }

    fn serve<R: Route + ?Sized + 'static>(
        &self,
        handler: &mut BackendReqHandler<Mutex<Session<R>>>,
        pid: i32,
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
        let ended_for = self.stopping.get().map_or(Duration::ZERO, Instant::elapsed);
        stop_rings(mailbox, config.drain_timeout.saturating_sub(ended_for));
        // A guest that is reset while there is no connection does not ask for its memory.
        await_memory(mailbox, || self.stopping() || has_gone(&connection));
        mailbox.ask(|worker| worker.forget_front_end());
        if let Some(gate) = &config.gate {
            gate.gone();
        }
        observer.disconnected(peer);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let Source::Socket { identity, .. } = &self.source else { return };
        // Another process may have made its own socket at this path meanwhile.
        let ours =
            std::fs::symlink_metadata(&self.path).is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == *identity);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether whoever was at the other end has closed it. What it had still said may be there.
fn has_gone(connection: &UnixStream) -> bool {
    let mut list = [PollFd::new(connection, PollFlags::RDHUP)];
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    poll(&mut list, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok()
        && list[0].revents().intersects(gone)
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
        let first = Control::new(&path, None).expect("replaces the stale one");
        let error = Control::new(&path, None).expect_err("is in use");
        assert!(error.to_string().contains("another process listens there"), "{error}");
        drop(first);
        assert!(!path.exists(), "its own socket is removed");
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("precious");
        std::fs::write(&path, "data").expect("written");
        Control::new(&path, None).expect_err("is no socket");
        assert_eq!(std::fs::read_to_string(&path).expect("is there"), "data");
    }

    #[test]
    fn a_socket_of_somebody_else_is_not_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let first = Control::new(&path, None).expect("made");
        std::fs::remove_file(&path).expect("removed");
        let _other = UnixListener::bind(&path).expect("another one's");
        drop(first);
        assert!(path.exists());
    }
}
