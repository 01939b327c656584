//! What a service manager is told (sd_notify(3)): that the daemon serves, that it still does, that it ends; and what it is given to
//! keep for the next daemon (FDSTORE=1).
//!
//! Failure story: a manager that does not listen is not missed; one that does starts the daemon again when it is not told in time. One
//! that keeps nothing, or less than it was given, has the next daemon find a part, or nothing.

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

/// How long a manager may take nothing of what it is told.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where to tell it.
#[derive(Debug)]
pub struct Manager {
    socket: UnixDatagram,
    /// It wants to hear from us this often.
    pub interval: Option<Duration>,
}

impl Manager {
    /// The one that has started this process; nothing if that is none which listens.
    pub fn of_this_process() -> Option<Self> {
        let address = std::env::var("NOTIFY_SOCKET").ok()?;
        let is_for_us = std::env::var("WATCHDOG_PID").map_or(true, |pid| pid == std::process::id().to_string());
        let interval = std::env::var("WATCHDOG_USEC").ok().filter(|_| is_for_us);
        let interval = interval.and_then(|text| text.parse().ok()).map(Duration::from_micros);
        Self::at(&address, interval)
            .map_err(|error| log::warn!("the service manager cannot be told anything: {error}"))
            .ok()
    }

    fn at(address: &str, interval: Option<Duration>) -> std::io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(PATIENCE))?;
        match address.strip_prefix('@') {
            Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
            None => socket.connect(address)?,
        }
        Ok(Manager { socket, interval })
    }

    /// Tells it something: READY=1, WATCHDOG=1, STOPPING=1.
    pub fn tell(&self, what: &str) {
        if let Err(error) = self.socket.send(what.as_bytes()) {
            log::debug!("telling the service manager {what}: {error}");
        }
    }
}

impl Manager {
    /// Tells it, as often as it wants to hear it, that `answers` returns.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn watch(self: &Arc<Self>, answers: impl Fn() + Send + 'static) -> io::Result<()> {
        let Some(interval) = self.interval else { return Ok(()) };
        let manager = Arc::clone(self);
        std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            loop {
                answers();
                manager.tell("WATCHDOG=1");
                std::thread::sleep(interval / 3);
            }
        })?;
        Ok(())
    }
}

/// Its store of descriptors.
pub struct InStore(pub Arc<Manager>);

impl supervision::Store for InStore {
    fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        // Not to be thrown away because the other end of it is gone: that is for the next daemon to see.
        let words = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
        let descriptors = [descriptor];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::Error::other("there is no room for the descriptor"));
        }
        let words = [IoSlice::new(words.as_bytes())];
        Ok(rustix::net::sendmsg(&self.0.socket, &words, &mut control, SendFlags::NOSIGNAL).map(drop)?)
    }

    fn remove(&self, name: &str) {
        self.0.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_hears_what_it_is_told() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let listens = UnixDatagram::bind(&path).expect("bound");
        let manager = Manager::at(path.to_str().expect("text"), None).expect("connected");
        manager.tell("READY=1");
        let mut buffer = [0; 64];
        let count = listens.recv(&mut buffer).expect("received");
        assert_eq!(&buffer[..count], b"READY=1");
        drop(listens);
        manager.tell("STOPPING=1");
        Manager::at("/nowhere/notify", None).expect_err("nobody is there");
    }

    #[test]
    fn it_hears_nothing_while_no_question_can_be_answered() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let listens = UnixDatagram::bind(&path).expect("bound");
        let manager = Manager::at(path.to_str().expect("text"), Some(Duration::from_millis(3))).expect("connected");
        let (ask, asked) = std::sync::mpsc::sync_channel(0);
        let (answer, answered) = std::sync::mpsc::sync_channel(0);
        let question = move || {
            let _ = ask.send(());
            let _ = answered.recv();
        };
        Arc::new(manager).watch(question).expect("a thread");
        let mut buffer = [0; 64];
        for _ in 0..3 {
            asked.recv().expect("a question");
            listens.set_nonblocking(true).expect("set");
            listens.recv(&mut buffer).expect_err("nothing was answered");
            listens.set_nonblocking(false).expect("set");
            answer.send(()).expect("it waits");
            let count = listens.recv(&mut buffer).expect("received");
            assert_eq!(&buffer[..count], b"WATCHDOG=1");
        }
        // It waits for an answer until the process ends.
        std::mem::forget((asked, answer));
    }
}
