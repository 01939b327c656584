//! The VMM's process: started so that it dies with us and keeps our lock, watched through its pidfd.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Starts `arguments` (program first). The process inherits `lock`, and the kernel kills it when the calling thread
/// ends: call it from the main thread.
pub fn start(arguments: &[OsString], environment: &[(&str, OsString)], lock: BorrowedFd<'_>) -> io::Result<Child> {
    let (program, rest) =
        arguments.split_first().ok_or_else(|| io::Error::other("the VMM's command line is missing after --"))?;
    let mut command = Command::new(program);
    command.args(rest);
    for (name, value) in environment {
        command.env(name, value);
    }
    let lock = lock.as_raw_fd();
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec only system calls that are safe there are made, on plain numbers.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before that call; then nobody will send the signal.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::other("amberlog ended while it started the VMM"));
            }
            rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(lock), rustix::io::FdFlags::empty())?;
            Ok(())
        });
    }
    command.spawn().map_err(|e| {
        let program = program.to_string_lossy();
        io::Error::new(e.kind(), format!("starting {program}: {e}; is it installed and on the PATH?"))
    })
}

/// A process that is watched: its number cannot come to mean another one.
#[derive(Debug)]
pub struct Watched {
    descriptor: OwnedFd,
}

impl Watched {
    /// Watches process `pid`. Nothing if it is gone.
    pub fn new(pid: i32) -> Option<Self> {
        let descriptor = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Watched { descriptor })
    }

    /// Waits until it has ended. False when it has not within `patience`.
    pub fn wait(&self, patience: Duration) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match poll(&mut [PollFd::new(&self.descriptor, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        // It may have ended meanwhile, which is what the signal is for.
        let _ = pidfd_send_signal(&self.descriptor, signal);
    }
}
