//! What a thread may still ask the kernel for, once it works on what a guest or a VMM has said.
//!
//! A [`Sandbox`] is made for one VM, and each of its threads enters it in a [`Role`]: from then on, and for every thread that
//! it starts, a system call that is not on its role's list ends the process with a sentence that names the call (seccomp), and
//! only the VM's own directory can be opened for writing (landlock). Descriptors that are open stay usable: images are opened
//! before.
//!
//! What it must never do: be inherited by a VMM (threads that start programs do not enter it), or keep amberlog from running on a
//! kernel without these: that is said once, and it goes on.
//!
//! Failure story: a filter that is too narrow ends the process as any bug does: what is owed stays in the VM's directory. The
//! sentence says which call it was and in which role.

mod calls;
mod paths;
mod report;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A VM's worker as a whole: it starts no programs, and changes nothing of the system. No bounds on files.
    Worker,
    /// Serves a disk: rings, requests, the journal, the disk engine, which is there already.
    Disk,
    /// Answers a VMM's messages, and faults of its memory; maps what it is given.
    Vmm,
}

/// The bounds of one VM's threads.
#[derive(Clone, Debug)]
pub struct Sandbox {
    directory: PathBuf,
    has_network: bool,
}

/// Why a thread could not enter.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Of seccomp.
    #[error("system calls cannot be filtered: {0}")]
    Calls(String),
    /// Of landlock.
    #[error("files cannot be fenced off: {0}")]
    Paths(String),
}

impl Role {
    /// What sentences call it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Worker => "worker",
            Role::Disk => "disk",
            Role::Vmm => "vmm",
        }
    }
}

impl Sandbox {
    /// Bounds for the threads of the VM whose directory this is. With `has_network`, they may use the Internet's protocols, read
    /// files (names of hosts are looked up in some), and load libraries, which looking them up may need.
    pub fn new(directory: &Path, has_network: bool) -> Self {
        Sandbox { directory: directory.to_owned(), has_network }
    }

    /// Has the calling thread, and all that it starts from now on, do no more than its role needs. What the kernel cannot do
    /// is logged once, and not done.
    pub fn enter(&self, role: Role) {
        static TOLD: OnceLock<()> = OnceLock::new();
        let fenced = paths::fence(&self.directory, self.has_network);
        // The filter last: fencing off takes calls that it does not have.
        let filtered = calls::filter(role, self.has_network);
        for error in [fenced.err(), filtered.err()].into_iter().flatten() {
            TOLD.get_or_init(|| log::warn!("{error}; amberlog goes on without that"));
        }
    }
}

/// Has the whole process do no more than a worker needs: to be called before any other thread is started.
pub fn enter_worker() {
    if let Err(error) = calls::filter(Role::Worker, true) {
        log::warn!("{error}; amberlog goes on without that");
    }
}
