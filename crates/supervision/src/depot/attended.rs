//! The daemon's end of a depot.

use super::message::{FORMAT, Message};
use super::{PATIENCE, Stored};
use crate::channel::Channel;
use crate::vault::{Opened, Shelf, Store, read};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What `ps` calls a depot.
pub const NAME: &str = "depot";
/// How often a depot is started that ends at once.
const TRIES: u32 = 3;
/// The pause between two depots, and before another one is tried that could not be had.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause until a depot is asked again that has another daemon, which ends perhaps.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// Those that wait to be let in.
const BACKLOG: i32 = 16;

/// Starts a depot that hears who comes to this socket ([`super::keep`]).
pub type Start = Box<dyn Fn(OwnedFd) -> io::Result<()> + Send + Sync>;

/// A store of descriptors in a depot, which is followed by another one when it dies or hangs.
pub struct InDepot {
    inner: Arc<Inner>,
    /// Ends when nobody looks after the depot any more.
    is_over: Mutex<Receiver<()>>,
}

/// A depot, and what it has of an earlier daemon.
pub struct Taken {
    depot: InDepot,
    left: Vec<(String, String, crate::Found)>,
}

impl Taken {
    /// See [`Shelf::open`].
    pub fn open(self, format: &str, before: &[&str]) -> Opened {
        Shelf::open_items(Box::new(self.depot), self.left, Default::default(), format, before)
    }

    #[cfg(test)]
    pub(super) fn map(self, store: impl FnOnce(InDepot) -> Box<dyn Store>) -> Opened {
        Shelf::open_items(store(self.depot), self.left, Default::default(), "1", &[])
    }
}

struct Inner {
    path: PathBuf,
    start: Start,
    link: Mutex<Link>,
}

struct Link {
    /// None while another depot is started.
    depot: Option<Arc<Depot>>,
    /// All that it has, for the next depot.
    has: BTreeMap<String, Stored>,
    is_over: bool,
}

/// What a depot has: items, each under its name.
type Found = Vec<(String, Stored)>;

/// One that has been met.
struct Depot {
    channel: Channel,
    /// As it says.
    pid: i32,
    /// Where it can be had.
    process: Option<OwnedFd>,
}

impl InDepot {
    /// The depot that hears at `path`, and what it has of an earlier daemon, which is dead. Where there is none, one is started.
    ///
    /// # Errors
    /// When one can neither be found nor started ([`io::ErrorKind::NotFound`]), or one is there and does not answer.
    pub fn take(path: &Path, start: Start) -> io::Result<Taken> {
        if let Some((depot, found)) = meet(path)? {
            return Self::attend(path, start, depot, found);
        }
        let mut last = None;
        for _ in 0..TRIES {
            match begin(path, &start) {
                Ok(depot) => return Self::attend(path, start, depot, Vec::new()),
                Err(error) => last = Some(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, last.map(|error| error.to_string()).unwrap_or_default()))
    }

    /// The same where there is one, and nothing otherwise. As long as this daemon lives another one can be started.
    ///
    /// # Errors
    /// When one is there and does not answer.
    pub fn find(path: &Path, start: Start) -> io::Result<Option<Taken>> {
        meet(path)?.map(|(depot, found)| Self::attend(path, start, depot, found)).transpose()
    }

    fn attend(path: &Path, start: Start, depot: Depot, found: Found) -> io::Result<Taken> {
        let copy = |(name, stored): &(String, Stored)| {
            let descriptors = stored.descriptors.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
            Ok((name.clone(), stored.item.clone(), crate::Found { words: stored.words.clone(), descriptors }))
        };
        let left = found.iter().map(copy).collect::<io::Result<_>>()?;
        let depot = Arc::new(depot);
        let link = Link { depot: Some(Arc::clone(&depot)), has: found.into_iter().collect(), is_over: false };
        let inner = Arc::new(Inner { path: path.to_owned(), start, link: Mutex::new(link) });
        let (looks, is_over) = mpsc::channel::<()>();
        let looking = Arc::clone(&inner);
        std::thread::Builder::new().name("depot".to_owned()).spawn(move || {
            looking.look_after(depot);
            drop(looks);
        })?;
        Ok(Taken { depot: InDepot { inner, is_over: Mutex::new(is_over) }, left })
    }
}

#[cfg(test)]
impl InDepot {
    /// Whether it has a depot at this moment, which was given all.
    pub(super) fn is_attended(&self) -> bool {
        self.inner.lock().depot.is_some()
    }
}

impl Store for InDepot {
    fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        // What is in an envelope is under way: it is taken out.
        let (item, found) = read(&descriptor.try_clone_to_owned()?)?;
        let stored = Stored { item, words: found.words, descriptors: found.descriptors };
        let mut link = self.inner.lock();
        link.tell(|depot| stored.send(name, &depot.channel));
        link.has.insert(name.to_owned(), stored);
        Ok(())
    }

    fn remove(&self, name: &str) {
        let mut link = self.inner.lock();
        link.has.remove(name);
        link.tell(|depot| Message::Remove { name: name.to_owned() }.send(&depot.channel, &[]));
    }
}

impl Drop for InDepot {
    /// When this returns, the depot has let go of what it was told to let go of, or it hangs: then it is killed where nothing is left to be kept.
    fn drop(&mut self) {
        let (depot, is_empty) = {
            let mut link = self.inner.lock();
            link.is_over = true;
            let has = std::mem::take(&mut link.has);
            (link.depot.take(), !has.values().any(|stored| stored.item.contains('/')))
        };
        let Some(depot) = depot else { return };
        depot.channel.end();
        let is_over = self.is_over.get_mut().expect("no panic under this lock");
        if is_over.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) && is_empty {
            log::error!("the process that keeps descriptors over this daemon's death does not answer, and is killed");
            depot.kill();
            // Where it cannot die, nobody is to wait for it.
            let _ = std::fs::remove_file(&self.inner.path);
        }
    }
}

impl Depot {
    fn kill(&self) {
        if let Some(process) = &self.process {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        self.channel.end_both_ways();
    }
}

impl Link {
    /// One that does not hear it is followed by one that is given all.
    fn tell(&mut self, say: impl FnOnce(&Depot) -> io::Result<()>) {
        if let Some(depot) = &self.depot
            && let Err(error) = say(depot)
        {
            log::debug!("telling the depot: {error}");
            depot.kill();
            self.depot = None;
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Link> {
        self.link.lock().expect("no panic under this lock")
    }

    /// Has another depot whenever one has ended, until none is wanted.
    fn look_after(&self, mut depot: Arc<Depot>) {
        let mut begun: Option<Instant> = None;
        loop {
            // It says nothing more.
            while let Ok(Some(_)) = Message::receive(&depot.channel) {}
            let Some(next) = self.follow(begun, &depot) else { return };
            (depot, begun) = (next, Some(Instant::now()));
        }
    }

    /// Starts the one that follows, and gives it all; nothing when none is wanted any more.
    fn follow(&self, begun: Option<Instant>, ended: &Depot) -> Option<Arc<Depot>> {
        let mut is_said = false;
        {
            let mut link = self.lock();
            link.depot = None;
            if link.is_over {
                // It may have what guests wait for.
                return None;
            }
        }
        // One that hung up by itself would keep what it has.
        ended.kill();
        log::error!(
            "the process that keeps descriptors over this daemon's death has ended or hangs, and is started anew"
        );
        if let Some(begun) = begun {
            std::thread::sleep(PAUSE.saturating_sub(begun.elapsed()));
        }
        loop {
            // Nobody waits meanwhile.
            let started = begin(&self.path, &self.start);
            let mut link = self.lock();
            if link.is_over {
                return None;
            }
            let given = |depot: Depot| link.give_all(&depot).inspect_err(|_| depot.kill()).map(|()| depot);
            match started.and_then(given) {
                Ok(depot) => {
                    log::info!("process {} keeps descriptors over this daemon's death from now on", depot.pid);
                    let depot = Arc::new(depot);
                    link.depot = Some(Arc::clone(&depot));
                    return Some(depot);
                }
                Err(error) if !is_said => {
                    log::error!(
                        "no process keeps descriptors over this daemon's death: {error}; tried again until it works"
                    );
                    is_said = true;
                }
                Err(_) => {}
            }
            drop(link);
            std::thread::sleep(PAUSE);
        }
    }
}

impl Link {
    fn give_all(&self, depot: &Depot) -> io::Result<()> {
        // In which way it is kept comes first: whoever finds a part knows that it is one.
        let (first, rest): (Vec<_>, Vec<_>) = self.has.iter().partition(|(_, stored)| !stored.item.contains('/'));
        first.into_iter().chain(rest).try_for_each(|(name, stored)| stored.send(name, &depot.channel))
    }
}

/// Starts a depot, in the place of whatever hears at `path`, and meets it.
fn begin(path: &Path, start: &Start) -> io::Result<Depot> {
    start(listen(path)?)?;
    let (depot, _) = meet(path)?.ok_or_else(|| io::Error::other("it has ended at once"))?;
    Ok(depot)
}

/// Goes to the depot at `path`, and gives what it has; nothing if nobody is there.
fn meet(path: &Path) -> io::Result<Option<(Depot, Found)>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let met = connect(path).and_then(|channel| greeted(&channel, path).map(|met| (channel, met)));
        match met {
            Ok((channel, Some((pid, found)))) => {
                return Ok(Some((Depot { channel, pid, process: process_of(pid) }, found)));
            }
            // A daemon that was killed may take a moment to be gone.
            Ok((_, None)) if Instant::now() < deadline => std::thread::sleep(BUSY_PAUSE),
            Ok((_, None)) => {
                return Err(io::Error::other(format!(
                    "the process that hears at {} has another daemon",
                    path.display()
                )));
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            // It ends at this very moment: then there is nothing, or nothing any more, that it has.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(BUSY_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

/// The process that a depot says it is, if it is one here: it may have begun where numbers mean other processes.
fn process_of(pid: i32) -> Option<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid.max(0))?, PidfdFlags::empty()).ok()?;
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == NAME).then_some(process)
}

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)?)
}

pub(super) fn connect(path: &Path) -> io::Result<Channel> {
    let channel = Channel::from(socket(SocketFlags::empty())?);
    // Also of a place in the queue.
    channel.set_patience(PATIENCE)?;
    channel.set_hearing_patience(Some(PATIENCE))?;
    loop {
        match rustix::net::connect(&channel, &SocketAddrUnix::new(path)?) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(does_not_answer(path)),
            Err(error) => return Err(error.into()),
            Ok(()) => break,
        }
    }
    // The directory is this user's alone; all the same nobody else is given what a guest has.
    let peer = rustix::net::sockopt::socket_peercred(&channel)?;
    if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
        return Err(io::Error::other(format!("another user's process hears at {}", path.display())));
    }
    Ok(channel)
}

fn does_not_answer(path: &Path) -> io::Error {
    io::Error::other(format!("the process that hears at {} does not answer", path.display()))
}

/// A socket for the next depot, in the place of the one that is there.
pub(super) fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = socket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody can come before that.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// The depot's number, and what it says that it has; nothing if it has another daemon.
fn greeted(channel: &Channel, path: &Path) -> io::Result<Option<(i32, Found)>> {
    if let Err(error) = (Message::Daemon { format: FORMAT }).send(channel, &[]) {
        // It has said before that it is busy, perhaps.
        log::debug!("speaking to the depot: {error}");
    }
    let mut found = Vec::new();
    let mut who = None;
    loop {
        match Message::receive(channel) {
            Ok(Some((Message::Busy, _))) => return Ok(None),
            Ok(Some((Message::Refused, _))) => {
                return Err(io::Error::other(format!(
                    "the process that hears at {} has what an earlier daemon kept, and does not hear this one, which is fenced in further \
                     (a service manager's filter of system calls, or a container's): start it as that one was started",
                    path.display()
                )));
            }
            Ok(Some((Message::Depot { format, pid }, _))) if format == FORMAT => who = Some(pid),
            Ok(Some((Message::Item { name, item, words }, descriptors))) if who.is_some() => {
                found.push((name, Stored { item, words, descriptors }));
            }
            Ok(Some((Message::All, _))) if who.is_some() => break,
            Ok(Some((other, _))) => {
                return Err(io::Error::other(format!(
                    "what hears at {} is another program's: {other:?}",
                    path.display()
                )));
            }
            Ok(None) => return Err(io::ErrorKind::ConnectionReset.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(does_not_answer(path)),
            Err(error) => return Err(error),
        }
    }
    channel.set_hearing_patience(None)?;
    Ok(who.map(|who| (who, found)))
}
