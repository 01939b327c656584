//! A daemon as what has started it sees it: a container of which it is the first process, and a service manager that watches it. No guest is
//! connected.

use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that serves one VM, and ends with the test.
struct Daemon {
    /// It, or what has started it in a namespace of its own.
    started: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    /// Starts it as the arguments of `command`.
    fn start(command: &mut Command, directory: tempfile::TempDir) -> Self {
        let path = |name: &str| directory.path().join(name);
        std::fs::File::create(path("disk.img")).unwrap().set_len(1 << 20).unwrap();
        std::fs::create_dir(path("shm")).unwrap();
        let text = format!(
            "shm = {:?}\nrun = {:?}\n[[vm]]\nname = \"db\"\ndisks = [{:?}]\n",
            path("shm"),
            path("run"),
            path("disk.img")
        );
        std::fs::write(path("amberlog.toml"), text).unwrap();
        let log = std::fs::File::create(path("log")).unwrap();
        command.args(["serve", "--config"]).arg(path("amberlog.toml")).stdin(Stdio::null()).stderr(log);
        // It ends its workers, but only if it ends.
        let started = command.process_group(0).spawn().unwrap();
        Daemon { started, directory }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    fn ask(&self, words: &[&str]) -> Option<Value> {
        let run: PathBuf = self.directory.path().join("run");
        let output = Command::new(env!("CARGO_BIN_EXE_amberlog")).args(words).arg("--run").arg(run).output().unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap_or_default())
    }

    /// Its worker, as it numbers processes, as soon as that is another one than this.
    fn worker(&self, than: Option<u64>) -> u64 {
        let mut found = None;
        self.wait_until("another worker serves", || {
            let entry = self.ask(&["status", "--json", "db"]).unwrap_or_default();
            found = entry["worker_pid"].as_u64().filter(|_| entry["state"] == "waiting");
            found.is_some() && found != than
        });
        found.unwrap()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}: not so\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.started.id().cast_signed()).unwrap();
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = self.started.wait();
    }
}

/// What the kernel says of a process.
struct Process {
    pid: u32,
    name: String,
    state: char,
    parent: u32,
}

fn process(pid: u32) -> Option<Process> {
    // "PID (name) STATE PARENT …".
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (before, after) = stat.rsplit_once(") ")?;
    let mut words = after.split(' ');
    let state = words.next()?.chars().next()?;
    let name = before.split_once('(')?.1.to_owned();
    Some(Process { pid, name, state, parent: words.next()?.parse().ok()? })
}

fn children_of(parent: u32) -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(process).filter(|process| process.parent == parent).collect()
}

fn signal(pid: u32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// The process that has this number in its own namespace.
fn outside(of: &[Process], inside: u64) -> u32 {
    let is_it = |process: &&Process| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap_or_default();
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        numbers.split_whitespace().last() == Some(&inside.to_string())
    };
    of.iter().find(is_it).expect("a child").pid
}

#[test]
fn the_first_process_of_a_container_leaves_no_zombies() {
    let namespace = ["--pid", "--fork", "--kill-child", "--mount-proc"];
    let works = Command::new("unshare").args(namespace).arg("true").output();
    if !works.is_ok_and(|output| output.status.success()) {
        println!("skipped: a namespace of processes can only be had by root");
        return;
    }
    let mut command = Command::new("unshare");
    command.args(namespace).arg(env!("CARGO_BIN_EXE_amberlog"));
    let daemon = Daemon::start(&mut command, tempfile::tempdir().unwrap());
    let mut worker = daemon.worker(None);
    let first = children_of(daemon.started.id()).into_iter().next().expect("the first process").pid;
    // No more: after the third death it would be held.
    for _ in 0..2 {
        let killed = outside(&children_of(first), worker);
        let memory = children_of(killed).into_iter().find(|process| process.name == "memory").expect("one").pid;
        signal(killed, Signal::KILL);
        worker = daemon.worker(Some(worker));
        daemon.wait_until("nothing is left of both", || process(killed).is_none() && process(memory).is_none());
    }
    // How the daemon's own children ended is for it to hear.
    let log = daemon.log();
    assert_eq!(log.matches("was ended by signal 9").count(), 2, "{log}");
    daemon.ask(&["upgrade"]).expect("another worker of the same program");
    daemon.worker(Some(worker));
    daemon.wait_until("it has a worker and a depot", || children_of(first).len() == 2);
    assert!(!children_of(first).iter().any(|child| child.state == 'Z'));
}

/// How often the manager wants to hear of it.
const INTERVAL: Duration = Duration::from_secs(6);
/// The test looks so often whether it has heard, and no look counts for more than twice that: where all of the machine stands still,
/// the daemon does so, too, and has not had the time that went by.
const LOOK: Duration = Duration::from_millis(50);

struct Manager(UnixDatagram);

impl Manager {
    fn at(path: &Path) -> Self {
        Manager(UnixDatagram::bind(path).unwrap())
    }

    /// Whether it is told this before the time is over: that in which this process was let run.
    fn hears(&self, what: &str, within: Duration) -> bool {
        let mut left = within;
        let mut bytes = [0; 4096];
        while !left.is_zero() {
            let begun = Instant::now();
            self.0.set_read_timeout(Some(left.min(LOOK))).unwrap();
            if let Ok(count) = self.0.recv(&mut bytes)
                && &bytes[..count] == what.as_bytes()
            {
                return true;
            }
            left = left.saturating_sub(begun.elapsed().min(2 * LOOK));
        }
        false
    }

    fn hears_often_enough(&self) -> bool {
        (0..5).all(|_| self.hears("WATCHDOG=1", INTERVAL))
    }
}

#[test]
fn a_service_manager_hears_of_a_daemon_as_long_as_that_does_not_hang() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("notify");
    let manager = Manager::at(&socket);
    let mut command = Command::new(env!("CARGO_BIN_EXE_amberlog"));
    command.env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", INTERVAL.as_micros().to_string());
    let daemon = Daemon::start(&mut command, directory);
    assert!(manager.hears("READY=1", LIMIT), "{}", daemon.log());
    assert!(manager.hears_often_enough(), "{}", daemon.log());
    // One that hangs is looked after by the daemon itself.
    let worker = u32::try_from(daemon.worker(None)).unwrap();
    signal(worker, Signal::STOP);
    daemon.wait_until("the worker stands still", || process(worker).is_some_and(|process| process.state == 'T'));
    assert!(manager.hears_often_enough(), "{}", daemon.log());
    let pid = daemon.started.id();
    signal(pid, Signal::STOP);
    daemon.wait_until("the daemon stands still", || process(pid).is_some_and(|process| process.state == 'T'));
    // What was said before is heard first.
    while manager.hears("WATCHDOG=1", Duration::from_millis(1)) {}
    assert!(!manager.hears("WATCHDOG=1", INTERVAL));
    signal(pid, Signal::CONT);
    assert!(manager.hears_often_enough(), "{}", daemon.log());
}

/// What is owed may be GiBs, and a daemon that is killed amid that leaves its guests' files in tmpfs, which a host that shuts down loses.
#[test]
fn a_service_manager_is_asked_to_wait_for_a_daemon_that_ends() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("notify");
    let manager = Manager::at(&socket);
    let mut command = Command::new(env!("CARGO_BIN_EXE_amberlog"));
    command.env("NOTIFY_SOCKET", &socket);
    let daemon = Daemon::start(&mut command, directory);
    assert!(manager.hears("READY=1", LIMIT), "{}", daemon.log());
    // No VM has a monitor, so that no guest is asked to shut down.
    signal(daemon.started.id(), Signal::TERM);
    assert!(manager.hears("STOPPING=1", LIMIT), "{}", daemon.log());
    assert!(manager.hears("EXTEND_TIMEOUT_USEC=120000000", LIMIT), "{}", daemon.log());
}
