//! Has a process's files be closed before its memory is given back, when it dies.
//!
//! The kernel takes down a process's mappings first and its files then, and whoever follows a worker waits for the files: their end says that nothing of the dead
//! one is under way (`docs/inside/pause.md`). A worker maps its guest's memory, and each
//! page that it has touched takes its time: some 200 ms for each GiB. So a second process has the same memory (`CLONE_VM`), does
//! nothing, and has no file but the end of a pipe. When the worker dies nothing has to be unmapped for that, its files are closed, the pipe
//! comes to its end, the second process ends, and the memory goes while the next worker begins.
//!
//! What it must never do: keep a file of the worker's open (they would be taken for in use), or run any code of the worker's. Failure story: where it cannot be
//! made, or has been killed, the files are closed after the memory is given back, as the kernel does it by itself.

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use rustix::pipe::{PipeFlags, pipe_with};
use std::ffi::{c_int, c_uint, c_void};
use std::io;

/// Of the second process. It makes four system calls.
const STACK_BYTES: usize = 32 << 10;
/// What `ps` calls it.
const NAME: &std::ffi::CStr = c"memory";

/// From now on this process's files are closed before its memory is given back, when it ends. To be called before it has a file that
/// somebody waits for.
pub fn outlive_files() {
    match hold() {
        // The end of this process closes it.
        Ok((life, _)) => drop(life.into_raw_fd()),
        Err(error) => log::debug!("files are closed after memory when this process dies: {error}"),
    }
}

/// A process that has this one's memory until the pipe that is given comes to its end, and its number.
fn hold() -> io::Result<(OwnedFd, c_int)> {
    // Asked here: the other process cannot say that it failed.
    if close_from(c_uint::MAX) != 0 {
        return Err(io::Error::last_os_error());
    }
    let (end, life) = pipe_with(PipeFlags::CLOEXEC)?;
    let stack: &'static mut [u8] = Box::leak(vec![0; STACK_BYTES].into_boxed_slice());
    // The stack grows downwards from an address that calls may rely on.
    let top = stack.as_mut_ptr_range().end.map_addr(|address| address & !15);
    let argument = end.as_raw_fd() as usize as *mut c_void;
    // SAFETY: the stack is the other process's alone, for ever. What that runs touches nothing of this process's memory beside: system calls on numbers,
    // made without the C library's variables of a thread, which it shares with the calling one. It has its own table of files.
    let pid = unsafe { libc::clone(wait_for_the_end, top.cast(), libc::CLONE_VM, argument) };
    if pid < 0 { Err(io::Error::last_os_error()) } else { Ok((life, pid)) }
}

/// Closes all files from this number on.
pub fn close_from(first: c_uint) -> i64 {
    // SAFETY: who calls it relies on none of them.
    unsafe { libc::syscall(libc::SYS_close_range, first, c_uint::MAX, 0) }
}

extern "C" fn wait_for_the_end(argument: *mut c_void) -> c_int {
    let end = argument as usize as c_int;
    // SAFETY: both are numbers of this process's own table of files, and nobody else closes them.
    let (mut input, end) = unsafe { (OwnedFd::from_raw_fd(0), BorrowedFd::borrow_raw(end)) };
    // Its standard input was the line to the supervisor.
    let is_moved = rustix::io::dup2(end, &mut input).is_ok();
    close_from(1);
    let _ = rustix::thread::set_name(NAME);
    while is_moved && rustix::io::read(&input, &mut [0u8; 1]) == Err(rustix::io::Errno::INTR) {}
    std::mem::forget(input);
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn wait(pid: c_int, flags: c_int) -> (c_int, c_int) {
        let mut status = 0;
        // SAFETY: the kernel writes one number that lives across the call.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, flags | libc::__WALL) };
        (waited, status)
    }

    /// One that does not end as it should would keep this test's files open, and whoever reads from it waiting.
    struct EndOfAll(c_int);

    impl Drop for EndOfAll {
        fn drop(&mut self) {
            let pid = rustix::process::Pid::from_raw(self.0).expect("a number");
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    #[test]
    fn it_has_no_file_of_ours_and_ends_with_the_pipe() {
        let (life, pid) = hold().expect("a process");
        let ended = EndOfAll(pid);
        let of = format!("/proc/{pid}");
        let name = || std::fs::read_to_string(Path::new(&of).join("comm")).expect("it lives");
        while name().trim() != "memory" {
            std::thread::yield_now();
        }
        let files = std::fs::read_dir(Path::new(&of).join("fd")).expect("its files");
        let files: Vec<_> = files.map(|file| file.expect("one").file_name()).collect();
        assert_eq!(files, ["0"]);
        assert_eq!(wait(pid, libc::WNOHANG), (0, 0), "it waits");
        // Others of this process's threads may be starting programs, which have this descriptor for a moment.
        drop(life);
        assert_eq!(wait(pid, 0), (pid, 0));
        // Its number may be another one's by now.
        std::mem::forget(ended);
    }
}
