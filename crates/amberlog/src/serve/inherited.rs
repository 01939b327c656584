//! Descriptors that a service manager gives to a process that it starts (sd_listen_fds(3)): those that an earlier one had put into its
//! store.
//!
//! What it must never do: take what was not given to this very process. Failure story: what is not there is left out.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of the first one.
const FIRST: i32 = 3;

/// They were taken: a descriptor has one owner.
static ARE_TAKEN: AtomicBool = AtomicBool::new(false);

/// All of them, each with its name; the first time that this is asked.
pub fn descriptors() -> Vec<(String, OwnedFd)> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) || ARE_TAKEN.swap(true, Ordering::SeqCst) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").and_then(|count| i32::try_from(count).ok()).unwrap_or_default();
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').map(str::to_owned).chain(std::iter::repeat(String::new()));
    (FIRST..FIRST.saturating_add(count)).zip(names).filter_map(|(number, name)| Some((name, take(number)?))).collect()
}

fn take(number: i32) -> Option<OwnedFd> {
    // Nobody but this process has given it a number since, so that it is there if it was given.
    std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).ok()?;
    // SAFETY: it was open when this program began, by the word of whoever started it (LISTEN_PID is this process), so nothing in this
    // program has opened it, and it is taken once.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    // It is no worker's, and no VMM's.
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC).ok()?;
    Some(descriptor)
}
