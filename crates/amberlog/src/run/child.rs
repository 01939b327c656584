//! The VMM's process: started so that it dies with us, and keeps our lock and what else it is to have.

use crate::children::OwnChild;
use rustix::fs::Mode;
use rustix::process::Signal;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Starts `arguments` (program first). The process inherits what is named, and the kernel kills it when the calling thread
/// ends: call it from the main thread. What it makes has the modes that `mask` gives.
pub fn start(
    arguments: &[OsString],
    environment: &[(String, OsString)],
    inherited: &[BorrowedFd<'_>],
    mask: Mode,
) -> io::Result<OwnChild> {
    let (program, rest) =
        arguments.split_first().ok_or_else(|| io::Error::other("the VMM's command line is missing after --"))?;
    let mut command = Command::new(program);
    command.args(rest);
    for (name, value) in environment {
        command.env(name, value);
    }
    let inherited: Vec<_> = inherited.iter().map(AsRawFd::as_raw_fd).collect();
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec only system calls that are safe there are made, on plain numbers.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before that call; then nobody will send the signal.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::other("amberlog ended while it started the VMM"));
            }
            rustix::process::umask(mask);
            for descriptor in &inherited {
                rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(*descriptor), rustix::io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
    OwnChild::start(&mut command).map_err(|e| {
        let program = program.to_string_lossy();
        io::Error::new(e.kind(), format!("starting {program}: {e}; is it installed and on the PATH?"))
    })
}
