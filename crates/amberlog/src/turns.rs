//! How long a thread's turns on a processor are, where other threads want one, too.
//!
//! A guest waits for what a worker does in bursts of some microseconds, and its own processors are threads beside it that never sleep. A thread that wakes
//! up beside such a one waits, as the kernel has it by default, until that one's turn is over: three milliseconds. When a worker has died that is waited for
//! again and again, by each thread that ends and by each that is started. A thread whose turns are short comes first when it wakes up (Linux 6.12:
//! the slice of a task is its own to choose); its share of the processors is what it was. An older kernel takes the wish and does nothing.

use std::io;

/// As long as what a worker does for one request, and shorter than any other's turn.
const TURN_NANOSECONDS: u64 = 500_000;

/// Linux's `struct sched_attr`, in its first version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const SIZE: u32 = size_of::<Attributes>() as u32;

/// The calling thread's turns are short from now on, and so are those of all threads and processes that it starts. Where that
/// cannot be, they stay as they are.
pub fn be_short() {
    if let Err(error) = shorten() {
        log::debug!("the kernel does not let a thread choose how long its turns are: {error}");
    }
}

/// The same by system calls alone, as it has to be between fork and exec.
///
/// # Errors
/// When the kernel does not let a thread choose.
pub fn shorten() -> io::Result<()> {
    let now = of_this_thread()?;
    match now.policy as i32 {
        libc::SCHED_OTHER | libc::SCHED_BATCH => set(Attributes { runtime: TURN_NANOSECONDS, ..now }),
        // Somebody has thought about it.
        _ => Ok(()),
    }
}

fn of_this_thread() -> io::Result<Attributes> {
    let mut attributes = Attributes { size: SIZE, ..Attributes::default() };
    // SAFETY: the kernel writes no more than the size that it is told into a structure that lives across the call.
    match unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, SIZE, 0) } {
        0 => Ok(attributes),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set(attributes: Attributes) -> io::Result<()> {
    // SAFETY: the kernel reads a structure of the size that this says of itself, and which lives across the call.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_the_length_of_turns_changes_and_other_threads_keep_theirs() {
        let before = of_this_thread().expect("every kernel says it");
        let (changed, inherited) = std::thread::spawn(|| {
            be_short();
            let inherited = std::thread::spawn(of_this_thread).join().expect("no panic").expect("said");
            (of_this_thread().expect("said"), inherited)
        })
        .join()
        .expect("no panic");
        for now in [changed, inherited] {
            assert_eq!((now.policy, now.nice, now.flags), (before.policy, before.nice, before.flags));
            // A kernel that has no such thing says nothing of it, before or after.
            assert!(before.runtime == 0 || now.runtime == TURN_NANOSECONDS, "{now:?}");
        }
        let after = of_this_thread().expect("said");
        assert_eq!(after.runtime, before.runtime);
    }
}
