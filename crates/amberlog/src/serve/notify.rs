//! What a service manager is told (sd_notify(3)): that the daemon serves, that it still does, that it ends; and what it is given to
//! keep for the next daemon (FDSTORE=1).
//!
//! Failure story: a manager that does not listen is not missed; one that does starts the daemon again when it is not told in time. One
//! that keeps nothing, or less than it was given, has the next daemon find a part, or nothing.

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a manager may take nothing of what it is told.
const PATIENCE: Duration = Duration::from_secs(5);

/// How much time it is asked for at once while the daemon ends, and how often it is asked. It kills who is not done in time, unless it hears
/// that he still works.
const MORE_TIME: Duration = Duration::from_secs(120);
const ASKED_EVERY: Duration = Duration::from_secs(20);

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

/// While this is there, the manager is asked for more time.
pub struct Ending {
    is_over: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.is_over.take();
        // It says its last word before that of this process.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Manager {
    /// Asks it for more time to end, at once and again and again, however much is owed: storage decides how long that takes.
    ///
    /// # Errors
    /// When no thread can be had: then it was asked once.
    pub fn extend_end(self: &Arc<Self>) -> io::Result<Ending> {
        self.extend_end_every(ASKED_EVERY)
    }

    fn extend_end_every(self: &Arc<Self>, pause: Duration) -> io::Result<Ending> {
        let ask = |manager: &Self| manager.tell(&format!("EXTEND_TIMEOUT_USEC={}", MORE_TIME.as_micros()));
        ask(self);
        let manager = Arc::clone(self);
        let (is_over, hears) = channel::<()>();
        let thread = std::thread::Builder::new().name("ending".to_owned()).spawn(move || {
            while hears.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                ask(&manager);
            }
        })?;
        Ok(Ending { is_over: Some(is_over), thread: Some(thread) })
    }
}

/// Its store of descriptors. It refuses without a word what it has no room for, so what it has is counted.
pub struct InStore {
    manager: Arc<Manager>,
    count: Arc<Mutex<Count>>,
}

/// What it was given and is not told to let go of, and how much it takes.
#[derive(Debug, Default)]
struct Count {
    names: BTreeSet<String>,
    most: Option<usize>,
    was_said: bool,
}

impl InStore {
    /// The store of a manager, which has these already.
    pub fn of(manager: &Arc<Manager>, left: &[(String, OwnedFd)]) -> Self {
        let names = left.iter().map(|(name, _)| name.clone()).collect();
        let count = Arc::new(Mutex::new(Count { names, ..Count::default() }));
        let learns = Arc::clone(&count);
        // A manager that starts may take a while to answer, and guests wait for nobody.
        let thread = std::thread::Builder::new().name("store".to_owned()).spawn(move || {
            let most = room();
            let mut count = learns.lock().expect("no panic under this lock");
            count.most = most;
            count.say_when_short();
        });
        if let Err(error) = thread {
            log::debug!("how much the service manager keeps is not asked: {error}");
        }
        InStore { manager: Arc::clone(manager), count }
    }
}

impl Count {
    fn say_when_short(&mut self) {
        let Some(most) = self.most.filter(|most| self.names.len() > *most && !self.was_said) else { return };
        self.was_said = true;
        log::error!(
            "the service manager keeps {most} descriptors over this daemon's death, and there are {} to keep: guests whose daemon is killed wait until \
             their VMMs are ended; set FileDescriptorStoreMax= in its unit (32768 in the packaged one), and restart the daemon when no guest runs",
            self.names.len()
        );
    }
}

/// How many descriptors the manager keeps for this process, as far as that can be learned: of systemd 254 and later from the environment, of
/// earlier ones from `systemctl`.
fn room() -> Option<usize> {
    if let Ok(said) = std::env::var("FDSTORE") {
        return said.parse().ok();
    }
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let (unit, is_users) = unit_of(&groups)?;
    let mut command = Command::new("systemctl");
    command
        .args(is_users.then_some("--user"))
        .args(["show", "--property=FileDescriptorStoreMax", "--value", "--"])
        .arg(unit);
    let (status, said) = crate::children::output(&mut command).ok()?;
    let said = String::from_utf8_lossy(&said);
    said.trim().parse().ok().filter(|_| status.success())
}

/// The service that a process is of, by its control groups (`/proc/PID/cgroup`, cgroups(7)), and whether it is one of a user's own manager.
fn unit_of(groups: &str) -> Option<(&str, bool)> {
    // The second one is what systemd has beside other hierarchies.
    let path = groups.lines().find_map(|line| {
        line.strip_prefix("0::").or_else(|| line.split_once(":name=systemd:").map(|(_, path)| path))
    })?;
    let unit = path.rsplit('/').find(|name| name.ends_with(".service"))?;
    let is_users = path.split('/').any(|name| name.starts_with("user@") && name != unit);
    Some((unit, is_users))
}

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
        rustix::net::sendmsg(&self.manager.socket, &words, &mut control, SendFlags::NOSIGNAL)?;
        let mut count = self.count.lock().expect("no panic under this lock");
        count.names.insert(name.to_owned());
        count.say_when_short();
        Ok(())
    }

    fn remove(&self, name: &str) {
        self.manager.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
        self.count.lock().expect("no panic under this lock").names.remove(name);
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
    fn a_service_is_found_by_its_control_group() {
        assert_eq!(unit_of("0::/system.slice/amberlog.service\n"), Some(("amberlog.service", false)));
        assert_eq!(unit_of("0::/system.slice/amberlog.service/workers\n"), Some(("amberlog.service", false)));
        let users = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vms.service\n";
        assert_eq!(unit_of(users), Some(("vms.service", true)));
        // Not a service of that manager, but the manager.
        assert_eq!(unit_of("0::/user.slice/user-1.slice/user@1.service\n"), Some(("user@1.service", false)));
        let beside = "4:memory:/other.service\n1:name=systemd:/system.slice/amberlog.service\n";
        assert_eq!(unit_of(beside), Some(("amberlog.service", false)));
        for none in ["", "0::/\n", "0::/user.slice/user-0.slice/session-3.scope\n", "4:memory:/other.service\n"] {
            assert_eq!(unit_of(none), None, "{none}");
        }
    }

    #[test]
    fn it_is_asked_for_more_time_until_the_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let listens = UnixDatagram::bind(&path).expect("bound");
        let manager = Arc::new(Manager::at(path.to_str().expect("text"), None).expect("connected"));
        let ending = manager.extend_end_every(Duration::from_millis(1)).expect("a thread");
        let mut buffer = [0; 64];
        for _ in 0..5 {
            let count = listens.recv(&mut buffer).expect("received");
            assert_eq!(&buffer[..count], b"EXTEND_TIMEOUT_USEC=120000000");
        }
        // It may wait for room to say it once more.
        listens.set_nonblocking(true).expect("set");
        std::thread::scope(|scope| {
            let over = scope.spawn(|| drop(ending));
            while !over.is_finished() {
                while listens.recv(&mut buffer).is_ok() {}
                std::thread::yield_now();
            }
        });
        while listens.recv(&mut buffer).is_ok() {}
        assert_eq!(Arc::strong_count(&manager), 1, "nobody is there who would say anything");
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
