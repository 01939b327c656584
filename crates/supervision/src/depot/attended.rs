//! The daemon's end of a depot.

use super::{FORMAT, Greeting, PATIENCE, Word};
use crate::channel::Channel;
use crate::vault::Store;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How often a depot is started that ends at once.
const TRIES: u32 = 5;
/// The pause after that.
const PAUSE: Duration = Duration::from_secs(1);
/// Daemons that wait to be heard.
const BACKLOG: i32 = 4;

/// Starts a depot that hears who comes to this socket ([`super::keep`]).
pub type Start = Box<dyn Fn(OwnedFd) -> io::Result<()> + Send + Sync>;

/// A store of descriptors in a depot, which is started when there is none.
pub struct InDepot {
    inner: Arc<Inner>,
    /// Ends when nobody looks after the depot any more.
    is_over: Mutex<Receiver<()>>,
}

struct Inner {
    path: PathBuf,
    start: Start,
    link: Mutex<Link>,
}

struct Link {
    /// None while another depot is started.
    channel: Option<Arc<Channel>>,
    /// All that it has, for the next depot.
    has: BTreeMap<String, OwnedFd>,
    is_over: bool,
}

impl InDepot {
    /// The depot that hears at `path`, and what it has of an earlier daemon, which is dead. Where there is none, one is started.
    ///
    /// # Errors
    /// When one can neither be found nor started, or it does not answer.
    pub fn take(path: &Path, start: Start) -> io::Result<(Self, Vec<(String, OwnedFd)>)> {
        let (channel, found) = meet(path, &start)?;
        let channel = Arc::new(channel);
        let has = found.iter().map(|(name, it)| Ok((name.clone(), it.try_clone()?))).collect::<io::Result<_>>()?;
        let link = Mutex::new(Link { channel: Some(Arc::clone(&channel)), has, is_over: false });
        let inner = Arc::new(Inner { path: path.to_owned(), start, link });
        let (looks, is_over) = mpsc::channel::<()>();
        let looking = Arc::clone(&inner);
        std::thread::Builder::new().name("depot".to_owned()).spawn(move || {
            looking.look_after(channel);
            drop(looks);
        })?;
        Ok((InDepot { inner, is_over: Mutex::new(is_over) }, found))
    }
}

impl Store for InDepot {
    fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let mut link = self.inner.lock();
        link.has.insert(name.to_owned(), descriptor.try_clone_to_owned()?);
        link.tell(&Word::Put { name: name.to_owned() }, &[descriptor]);
        Ok(())
    }

    fn remove(&self, name: &str) {
        let mut link = self.inner.lock();
        link.has.remove(name);
        link.tell(&Word::Remove { name: name.to_owned() }, &[]);
    }
}

impl Drop for InDepot {
    /// When this returns, the depot has let go of what it was told to let go of, unless it hangs.
    fn drop(&mut self) {
        {
            let mut link = self.inner.lock();
            link.is_over = true;
            link.has.clear();
            if let Some(channel) = link.channel.take() {
                channel.end();
            }
        }
        let _ = self.is_over.get_mut().expect("no panic under this lock").recv_timeout(PATIENCE);
    }
}

impl Link {
    /// One that does not hear it is followed by one that is given all.
    fn tell(&self, word: &Word, descriptors: &[BorrowedFd<'_>]) {
        if let Some(channel) = &self.channel
            && let Err(error) = channel.send(word, descriptors)
        {
            log::debug!("telling the depot: {error}");
            channel.end();
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Link> {
        self.link.lock().expect("no panic under this lock")
    }

    /// Has another depot whenever one has ended, until none is wanted.
    fn look_after(&self, mut channel: Arc<Channel>) {
        let mut is_said = false;
        loop {
            // It says nothing more.
            while let Ok(Some(_)) = channel.receive::<Greeting>() {}
            drop(channel);
            channel = loop {
                let mut link = self.lock();
                if link.is_over {
                    return;
                }
                link.channel = None;
                if !is_said {
                    log::error!(
                        "the process that keeps descriptors over this daemon's death has ended, and is started anew"
                    );
                }
                match self.give_all(&link) {
                    Ok(channel) => {
                        is_said = false;
                        let channel = Arc::new(channel);
                        link.channel = Some(Arc::clone(&channel));
                        break channel;
                    }
                    Err(error) => {
                        if !is_said {
                            log::error!(
                                "no process keeps descriptors over this daemon's death: {error}; tried again until it works"
                            );
                        }
                        is_said = true;
                        drop(link);
                        std::thread::sleep(PAUSE);
                    }
                }
            };
        }
    }

    fn give_all(&self, link: &Link) -> io::Result<Channel> {
        let (channel, found) = meet(&self.path, &self.start)?;
        for (name, _) in found.iter().filter(|(name, _)| !link.has.contains_key(name)) {
            channel.send(&Word::Remove { name: name.clone() }, &[])?;
        }
        for (name, descriptor) in &link.has {
            channel.send(&Word::Put { name: name.clone() }, &[descriptor.as_fd()])?;
        }
        Ok(channel)
    }
}

/// Goes to the depot at `path`, and starts one if nobody is there. Gives what it has.
fn meet(path: &Path, start: &Start) -> io::Result<(Channel, Vec<(String, OwnedFd)>)> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for _ in 0..TRIES {
        match connect(path) {
            // It may end at this very moment: then there is nothing, or nothing any more, that it has.
            Ok(channel) => match greeted(&channel) {
                Ok(found) => return Ok((channel, found)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => last = error,
                Err(error) => return Err(error),
            },
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                start(listen(path)?)?;
            }
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn connect(path: &Path) -> io::Result<Channel> {
    let socket = socket()?;
    loop {
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(()) => break,
        }
    }
    // The directory is this user's alone; all the same nobody else is given what a guest has.
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    if peer.uid != rustix::process::geteuid() {
        return Err(io::Error::other(format!("another user's process hears at {}", path.display())));
    }
    let channel = Channel::from(socket);
    channel.set_patience(PATIENCE)?;
    Ok(channel)
}

/// A socket for the next depot: nobody hears at the one that is there.
fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody can come before that.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// What a depot says that it has.
fn greeted(channel: &Channel) -> io::Result<Vec<(String, OwnedFd)>> {
    channel.set_hearing_patience(Some(PATIENCE))?;
    let mut found = Vec::new();
    let mut is_of_ours = false;
    loop {
        match channel.receive::<Greeting>()? {
            Some((Greeting::Format { format }, _)) if format == FORMAT => is_of_ours = true,
            Some((Greeting::Has { name }, descriptors)) if is_of_ours => {
                found.extend(descriptors.into_iter().next().map(|descriptor| (name, descriptor)));
            }
            Some((Greeting::All, _)) if is_of_ours => break,
            Some((other, _)) => return Err(io::Error::other(format!("it is another program's, and says {other:?}"))),
            None => return Err(io::ErrorKind::ConnectionReset.into()),
        }
    }
    channel.set_hearing_patience(None)?;
    Ok(found)
}
