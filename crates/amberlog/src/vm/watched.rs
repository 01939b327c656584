//! A process that is watched: its number cannot come to mean another one.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug)]
pub struct Watched {
    descriptor: OwnedFd,
}

impl Watched {
    /// Watches process `pid`. Nothing if it is gone.
    pub fn new(pid: i32) -> Option<Self> {
        let descriptor = pidfd_open(Pid::from_raw(pid.max(0))?, PidfdFlags::empty()).ok()?;
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

    /// Sends it a signal. Says whether it may be sent one: another user's may not.
    pub fn signal(&self, signal: Signal) -> bool {
        // It may have ended meanwhile, which is what the signal is for.
        pidfd_send_signal(&self.descriptor, signal) != Err(rustix::io::Errno::PERM)
    }
}
