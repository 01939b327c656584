//! The process that keeps descriptors over a daemon's death where no service manager does (`amberlog depot`, which the daemon starts; [`supervision::depot`]
//! has what it does).
//!
//! What it must never do: have anything of its daemon's but the socket that it hears at, or end with it; hear a process that serves a guest. Failure story: where it cannot be started that is
//! said, and this daemon's death is as one without a store.

use crate::children::OwnChild;
use crate::worker::Program;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use supervision::depot::{Host, InDepot, PROCESS_NAME, Taken, keep};

/// Where it hears, in the daemon's directory.
const SOCKET: &str = "store.sock";

/// Runs the command: the socket that it hears at is its standard input.
pub fn run() -> ExitCode {
    // Who started it may have been given files that others wait to see closed.
    crate::last_memory::close_from(3);
    // A terminal's signals are the daemon's, and so is the end of its session; a service manager's are for all alike, and it ends when nothing is left.
    let _ = rustix::process::setsid();
    for signal in [SIGHUP, SIGINT, SIGTERM, SIGUSR2] {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let _ = std::ffi::CString::new(PROCESS_NAME).map(|name| rustix::thread::set_name(&name));
    allow_files();
    let kept = io::stdin().as_fd().try_clone_to_owned().and_then(|listener| keep(&listener, &ThisHost));
    if kept.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(crate::exit::FAILED) }
}

struct ThisHost;

impl Host for ThisHost {
    type Process = OwnedFd;

    fn process(&self, pid: i32, started: u64) -> io::Result<Option<OwnedFd>> {
        // What a worker says may be anything.
        let Some(number) = Pid::from_raw(pid.max(0)) else { return Ok(None) };
        match pidfd_open(number, PidfdFlags::empty()) {
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(error.into()),
            Err(_) => Ok(None),
            Ok(process) => Ok(placement::process_lives(pid, started).then_some(process)),
        }
    }

    /// By its filters of system calls: a worker has more than its daemon, and cannot take one off. (One that is not fenced in can do what its user can.)
    fn fence(&self, pid: i32) -> Option<u32> {
        filters_of(&pid.to_string())
    }
}

/// How many filters of system calls a process has.
fn filters_of(process: &str) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    // Linux before 5.9 says only whether there are any.
    field("Seccomp_filters:").or_else(|| field("Seccomp:"))
}

/// From now on this process, and what it starts, may have as many files open as it is allowed: some for each VM, which add up.
pub fn allow_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        log::debug!("the bound on open files stays as it is: {error}");
    }
}

/// The depot of the daemon whose directory is `run`, and what it has of an earlier one.
///
/// # Errors
/// When none can be had ([`io::ErrorKind::NotFound`]), or one is there that does not answer.
pub fn take(run: &Path) -> io::Result<Taken> {
    InDepot::take(&run.join(SOCKET), Box::new(start))
}

/// The one that an earlier daemon has left there, if there is one.
///
/// # Errors
/// When it does not answer.
pub fn find(run: &Path) -> io::Result<Option<Taken>> {
    InDepot::find(&run.join(SOCKET), Box::new(start))
}

fn start(listener: OwnedFd) -> io::Result<()> {
    let mut command = Program::own().command();
    // Whoever waits for the end of this daemon's output is not to wait for the depot.
    command.arg("depot").current_dir("/").stdin(Stdio::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut depot = OwnChild::start(&mut command)?;
    std::thread::Builder::new().name("depot end".to_owned()).spawn(move || depot.wait())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    #[test]
    fn a_process_is_watched_if_it_is_the_one_that_was_started_then() {
        let living = |pid, started| ThisHost.process(pid, started).expect("there is a descriptor");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let pid = child.id().cast_signed();
        let started = placement::process_started_at(pid).expect("it lives");
        assert!(living(pid, started + 1).is_none() && living(-1, started).is_none());
        let process = living(pid, started).expect("it lives");
        let has_ended = |patience| poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience)) == Ok(1);
        assert!(!has_ended(Timespec { tv_sec: 0, tv_nsec: 0 }));
        child.kill().expect("killed");
        // Nobody has asked how yet.
        assert!(has_ended(Timespec { tv_sec: 60, tv_nsec: 0 }));
        assert!(living(pid, started).is_none());
        child.wait().expect("ended");
    }

    #[test]
    fn how_far_a_process_is_fenced_in_is_seen() {
        let own = ThisHost.fence(std::process::id().cast_signed());
        assert!(own.is_some());
        // No process has such a number.
        assert_eq!(ThisHost.fence(i32::MAX), None);
        let (seen, sees) = std::sync::mpsc::channel();
        let (go, goes) = std::sync::mpsc::channel::<()>();
        let fenced = std::thread::spawn(move || {
            sandbox::Sandbox::new(Path::new("/"), false).enter(sandbox::Role::Vmm);
            seen.send(rustix::thread::gettid().as_raw_nonzero().get()).expect("heard");
            let _ = goes.recv();
        });
        let thread = sees.recv().expect("it says its number");
        assert!(ThisHost.fence(thread) > own);
        drop(go);
        fenced.join().expect("no panic");
    }
}
