//! The process that keeps descriptors over a daemon's death where no service manager does (`amberlog depot`, which the daemon starts; [`supervision::depot`]
//! has what it does).
//!
//! What it must never do: have anything of its daemon's but the socket that it hears at, or end with it. Failure story: where it cannot be started that is
//! said, and this daemon's death is as one without a store.

use crate::children::OwnChild;
use crate::worker::Program;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use supervision::depot::{InDepot, keep};

/// Where it hears, in the daemon's directory.
const SOCKET: &str = "store.sock";
/// What `ps` calls it.
const NAME: &std::ffi::CStr = c"depot";

/// Runs the command: the socket that it hears at is its standard input.
pub fn run() -> ExitCode {
    // Who started it may have been given files that others wait to see closed.
    crate::last_memory::close_from(3);
    // A terminal's signals are the daemon's, and so is the end of its session.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(NAME);
    allow_files();
    let kept = io::stdin().as_fd().try_clone_to_owned().and_then(|listener| keep(&listener, living));
    if kept.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(crate::exit::FAILED) }
}

/// A process that was started at that moment, if it lives.
fn living(pid: i32, started: u64) -> Option<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    placement::process_lives(pid, started).then_some(process)
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
/// When none can be had.
pub fn take(run: &Path) -> io::Result<(InDepot, Vec<(String, OwnedFd)>)> {
    InDepot::take(&run.join(SOCKET), Box::new(start))
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
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let pid = child.id().cast_signed();
        let started = placement::process_started_at(pid).expect("it lives");
        assert!(living(pid, started + 1).is_none());
        let process = living(pid, started).expect("it lives");
        let has_ended = |patience| poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience)) == Ok(1);
        assert!(!has_ended(Timespec { tv_sec: 0, tv_nsec: 0 }));
        child.kill().expect("killed");
        // Nobody has asked how yet.
        assert!(has_ended(Timespec { tv_sec: 60, tv_nsec: 0 }));
        assert!(living(pid, started).is_none());
        child.wait().expect("ended");
    }
}
