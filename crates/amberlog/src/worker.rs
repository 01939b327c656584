//! A worker, as a process: it serves one VM, and its supervisor has started it (`amberlog worker`, which nobody else calls).
//!
//! Its standard input is the line to the supervisor. When that ends, so does the worker, at once and as if it was killed:
//! whoever comes next finds in tmpfs what is owed.

use crate::children::OwnChild;
use anyhow::Context;
use block_device::Entrance;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use supervision::{Channel, Kept, Order, Said};

/// How long a worker may read nothing of what it is told.
const LISTENING_PATIENCE: Duration = Duration::from_secs(8);

/// What a worker leaves for the next one: the keys and words that are kept, the table, the pool, the description, the notes beside a region
/// of NVM and the copy of a shipped log; the words of the line to the supervisor; and how that keeps all of it where it outlives the supervisor itself. Another number where any of that is
/// understood in another way, and where a
/// table may say what builds before refuse as damaged. 5: a table says what was written past the journal (durability by age).
pub const STATE_FORMAT: u32 = 5;

/// What builds leave that leave state 4, and this one goes on with, too.
pub const STATE_FORMAT_BEFORE: u32 = 4;

/// What it says of that to the next supervisor: the number first.
pub fn store_format() -> String {
    format!("{STATE_FORMAT} (amberlog {})", env!("CARGO_PKG_VERSION"))
}

/// The number that an earlier supervisor may have said, and that this one goes on with.
pub fn store_format_before() -> String {
    STATE_FORMAT_BEFORE.to_string()
}

/// Kept when the disks of a VM are served: the next worker goes on with it.
pub const SERVED: &str = "served";

/// Kept while disks came or went and no worker has gone on with that: the configuration before.
pub const CONFIG_BEFORE: &str = "configuration before";

/// The line to the supervisor, from the worker's side.
pub struct Line {
    channel: Channel,
    began: Instant,
    /// What an earlier worker had kept, until somebody takes it.
    kept: Mutex<Option<Kept>>,
    /// What became of doors that were to be shut, until somebody asks.
    shut: Mutex<BTreeMap<usize, bool>>,
    is_told: Condvar,
    /// Where the connections to each disk are given in.
    entrances: Mutex<BTreeMap<usize, Arc<Entrance>>>,
    /// A pair of sockets with what the supervisor says when all was done, one asking at a time.
    settled: Mutex<(OwnedFd, OwnedFd)>,
}

impl Line {
    /// Takes standard input for it, and hears what an earlier worker left.
    ///
    /// # Errors
    /// When standard input is no such line.
    pub fn begin() -> anyhow::Result<Arc<Self>> {
        // A terminal and a service manager send signals to all processes alike: what they are to mean, the supervisor says.
        for signal in [SIGHUP, SIGINT, SIGTERM, SIGUSR2] {
            signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
        }
        let descriptor = io::stdin().as_fd().try_clone_to_owned()?;
        let began = Instant::now();
        let flags = SocketFlags::CLOEXEC;
        let settled = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let settled = settled.context("making a pair of sockets")?;
        let line = Line {
            channel: Channel::from(descriptor),
            began,
            kept: Mutex::default(),
            shut: Mutex::default(),
            is_told: Condvar::new(),
            entrances: Mutex::default(),
            settled: Mutex::new(settled),
        };
        let mut kept = Kept::default();
        loop {
            let heard = line.hear().context("this command is started by 'amberlog run' and 'amberlog serve' alone")?;
            match heard {
                (Order::Begin, _) => break,
                (Order::Kept { key, data }, descriptors) => kept.take_in(key, data, descriptors),
                (other, _) => anyhow::bail!("the supervisor said {other:?} before it said all"),
            }
        }
        if kept.data(SERVED).is_some() {
            *line.kept.lock().expect("no panic under this lock") = Some(kept);
        } else {
            // It had got nowhere: what it left is finished as what any process leaves.
            line.say(&Said::Clear, &[])?;
        }
        Ok(Arc::new(line))
    }

    /// One to a supervisor that says nothing, and whose end is given.
    #[cfg(test)]
    pub fn to_nobody() -> (Arc<Self>, OwnedFd) {
        let pair = || {
            let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
            pair.expect("a pair of sockets")
        };
        let (channel, theirs) = Channel::pair().expect("a pair of sockets");
        let line = Line {
            channel,
            began: Instant::now(),
            kept: Mutex::default(),
            shut: Mutex::default(),
            is_told: Condvar::new(),
            entrances: Mutex::default(),
            settled: Mutex::new(pair()),
        };
        (Arc::new(line), theirs)
    }

    /// What an earlier worker has left that this one is to go on with; once.
    pub fn take_kept(&self) -> Option<Kept> {
        self.kept.lock().expect("no panic under this lock").take()
    }

    /// When this worker began to listen.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Whether an earlier worker has left a guest that this one is to go on with.
    pub fn has_kept(&self) -> bool {
        self.kept.lock().expect("no panic under this lock").is_some()
    }

    /// A descriptor that an earlier worker has left, for who has to look at it before all is taken.
    ///
    /// # Errors
    /// When no descriptor is left in this process.
    pub fn look_at_kept(&self, key: &str) -> io::Result<Option<OwnedFd>> {
        let kept = self.kept.lock().expect("no panic under this lock");
        kept.as_ref()
            .and_then(|kept| kept.descriptor(key))
            .map(|descriptor| descriptor.try_clone_to_owned())
            .transpose()
    }

    /// Waits for what the supervisor says, connections aside. When it is gone, this process ends.
    ///
    /// # Errors
    /// When it says something that is not understood.
    pub fn hear(&self) -> io::Result<(Order, Vec<OwnedFd>)> {
        loop {
            match self.channel.receive()? {
                Some((Order::Connection { disk, pid }, descriptors)) => {
                    let entrances = self.entrances.lock().expect("no panic under this lock");
                    let connection = descriptors.into_iter().next();
                    if let (Some(entrance), Some(connection)) = (entrances.get(&disk), connection) {
                        entrance.admit(UnixStream::from(connection), pid);
                    }
                }
                Some((Order::Shut { disk, is_shut }, _)) => {
                    self.shut.lock().expect("no panic under this lock").insert(disk, is_shut);
                    self.is_told.notify_all();
                }
                Some(heard) => return Ok(heard),
                None => {
                    log::debug!("the supervisor is gone");
                    std::process::exit(i32::from(crate::exit::FAILED));
                }
            }
        }
    }

    /// Where connections to a disk are given in from now on.
    pub fn set_entrance(&self, disk: usize, entrance: Arc<Entrance>) {
        self.entrances.lock().expect("no panic under this lock").insert(disk, entrance);
    }

    /// Has the door of a disk shut, if nobody is inside. Says whether it is; not before it is known.
    ///
    /// # Errors
    /// When the supervisor is gone, or does not know within `patience`.
    pub fn shut_door(&self, disk: usize, patience: Duration) -> io::Result<bool> {
        let mut shut = self.shut.lock().expect("no panic under this lock");
        shut.remove(&disk);
        self.say(&Said::Shut { disk }, &[])?;
        let deadline = Instant::now() + patience;
        loop {
            if let Some(is_shut) = shut.remove(&disk) {
                return Ok(is_shut);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::other("who keeps its socket has not answered; ask again"));
            }
            shut = self.is_told.wait_timeout(shut, left).expect("no panic under this lock").0;
        }
    }

    /// Whether no connection to a disk waits to be taken.
    pub fn has_nobody(&self, disk: usize) -> bool {
        self.entrances.lock().expect("no panic under this lock").get(&disk).is_none_or(|entrance| entrance.is_empty())
    }

    /// Says something to the supervisor.
    ///
    /// # Errors
    /// When it is gone.
    pub fn say(&self, said: &Said, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.channel.send(said, descriptors)
    }

    /// Waits until the supervisor has done all that it was told, so that it is kept whoever dies next. If the supervisor is gone this
    /// does not return: this process is at its end.
    pub fn settle(&self) {
        let settled = self.settled.lock().expect("no panic under this lock");
        let is_done = self.say(&Said::Settle, &[settled.1.as_fd()]).is_ok() && self.is_answered(&settled.0);
        if !is_done {
            std::process::exit(i32::from(crate::exit::FAILED));
        }
    }

    /// Waits for the supervisor's answer. False where it is gone: what it was asked with is here as well, so nothing else would end the wait.
    fn is_answered(&self, answer: &OwnedFd) -> bool {
        loop {
            let mut list = [PollFd::new(answer, PollFlags::IN), PollFd::new(&self.channel, PollFlags::empty())];
            match rustix::event::poll(&mut list, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return false,
                Ok(_) => {}
            }
            if !list[0].revents().is_empty() {
                return rustix::io::read(answer, &mut [0; 1]).is_ok();
            }
            if !list[1].revents().is_empty() {
                return false;
            }
        }
    }

    /// Has the supervisor keep a descriptor for the next worker, or none, only words.
    ///
    /// # Errors
    /// When it is gone.
    pub fn keep(&self, key: &str, data: &str, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let said = Said::Keep { key: key.to_owned(), data: data.to_owned() };
        self.say(&said, descriptor.as_slice())
    }
}

/// A worker, from the supervisor's side.
pub struct Worker {
    /// The line to it.
    pub channel: Arc<Channel>,
    process: OwnChild,
}

impl Worker {
    /// Starts one of this program, whose standard output is `output`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(
        program: &Program,
        arguments: impl IntoIterator<Item = OsString>,
        output: Stdio,
    ) -> anyhow::Result<Self> {
        let (ours, theirs) = Channel::pair().context("making the line to a worker")?;
        ours.set_patience(LISTENING_PATIENCE).context("bounding the line to a worker")?;
        let mut command = program.command();
        command
            .args(["worker", "--users-mask", &own_files::keep_files_private().as_raw_mode().to_string()])
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .stdout(output);
        let process = OwnChild::start(&mut command).context("starting the worker of a VM (is /proc mounted?)")?;
        Ok(Worker { channel: Arc::new(ours), process })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Ends it at once. What it had kept is there for the next one.
    pub fn kill(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
    }

    /// Waits for its end, which is near: its line has ended, or it was told to end. Says how it ended.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn wait(&mut self) -> io::Result<std::process::ExitStatus> {
        self.process.wait()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Nobody hears it any more. After its end was seen this does nothing.
        self.kill();
        let _ = self.wait();
    }
}

/// What workers are started of.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    /// Where it was found, for people.
    name: PathBuf,
    /// Whatever comes to lie in its place, workers are of the program that was judged.
    _file: Option<Arc<File>>,
}

impl Program {
    /// This very one, whatever is installed in its place by now.
    pub fn own() -> Self {
        Program { path: PathBuf::from("/proc/self/exe"), name: PathBuf::from("this program"), _file: None }
    }

    /// Whether it is that very one.
    pub fn is(&self, other: &Program) -> bool {
        self.path == other.path
    }

    /// The one that is installed by now where this one was. Gives its version, too.
    ///
    /// # Errors
    /// When there is none, or it cannot go on with what this one's workers leave.
    pub fn installed() -> anyhow::Result<(Self, String)> {
        let own = std::fs::read_link("/proc/self/exe").context("finding out where this program is")?;
        let text = own.to_string_lossy();
        Self::at(text.strip_suffix(" (deleted)").map_or_else(|| own.clone(), PathBuf::from))
    }

    fn at(name: PathBuf) -> anyhow::Result<(Self, String)> {
        let starting = || format!("starting {}", name.display());
        let file = Arc::new(File::open(&name).with_context(starting)?);
        // The child finds it there before it is closed.
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let output = crate::children::output(Command::new(&path).args(["worker", "--state-formats"]));
        let (status, said) = output.with_context(starting)?;
        let said = String::from_utf8_lossy(&said).into_owned();
        let (formats, version) = said.trim().split_once(' ').unwrap_or_default();
        // An older one does not know the question, and would take what is left for damaged.
        anyhow::ensure!(
            status.success() && formats.split(',').any(|format| format == STATE_FORMAT.to_string()),
            "{} cannot go on with the guests of this amberlog ({}, which leaves state {STATE_FORMAT}), and nothing was changed: use \
             'amberlog detach', and start it",
            name.display(),
            env!("CARGO_PKG_VERSION")
        );
        Ok((Program { path, name, _file: Some(file) }, version.to_owned()))
    }

    /// A process of it.
    pub fn command(&self) -> Command {
        Command::new(&self.path)
    }

    /// What people call it.
    pub fn display(&self) -> std::path::Display<'_> {
        self.name.display()
    }
}

/// How a worker ended that should not have, for people.
pub fn how_it_ended(status: std::process::ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, Some(code)) => format!("ended with code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A supervisor that is killed with a question of its worker's unread: the worker has the other end of the answer as well.
    #[test]
    fn nobody_waits_for_the_answer_of_a_supervisor_that_is_gone() {
        let pair =
            |kind| rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a pair");
        let ((ours, theirs), settled) = (pair(SocketType::SEQPACKET), pair(SocketType::STREAM));
        let line = Line {
            channel: Channel::from(ours),
            began: Instant::now(),
            kept: Mutex::default(),
            shut: Mutex::default(),
            is_told: Condvar::new(),
            entrances: Mutex::default(),
            settled: Mutex::new(settled),
        };
        let settled = line.settled.lock().expect("no panic");
        line.say(&Said::Settle, &[settled.1.as_fd()]).expect("sent");
        // What it says otherwise is no answer.
        let supervisor = Channel::from(theirs);
        supervisor.send(&Order::Shut { disk: 0, is_shut: true }, &[]).expect("sent");
        let (answered, answers) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| answered.send(line.is_answered(&settled.0)).expect("somebody waits"));
            assert!(answers.recv_timeout(Duration::from_millis(100)).is_err(), "it is not answered yet");
            drop(supervisor);
            assert_eq!(answers.recv_timeout(Duration::from_secs(20)), Ok(false));
        });
        // One that has answered before it went has answered.
        rustix::io::write(&settled.1, &[1]).expect("written");
        assert!(line.is_answered(&settled.0));
    }
}
