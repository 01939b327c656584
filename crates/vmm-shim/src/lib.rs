//! A tiny library preloaded into the VMM: makes a userfaultfd and hands it to amberlog.
//!
//! A userfaultfd belongs to the address space of the process that made it, so the VMM has to make it; everything else is
//! done by amberlog with the descriptor it gets. The VMM keeps its own descriptor open for as long as it lives: that
//! is what keeps pages protected, and their writers waiting, when amberlog dies.
//!
//! A VMM that amberlog did not start itself gets the lock of its directory in return, and keeps that open, too: nobody may
//! finish what a killed amberlog left while the guest still lives.
//!
//! From then on it stands before the calls by which the VMM takes memory away without a page fault (`removal.rs`), and before those by which it
//! lets a device write to it past the page tables (`devices.rs`).
//!
//! What it must never do: keep a program from starting. Every failure is silent here; amberlog says that it received
//! nothing and copies journal blocks instead of protecting them.
//!
//! The constructor runs in every program that inherits the preload (`env`, `timeout`, helpers). It does nothing unless
//! `AMBERLOG_SHIM_SOCKET` is set, and amberlog picks the descriptor of the process that turns out to be the VMM.

mod devices;
mod removal;

use std::mem::{size_of, zeroed};

/// `_IO(0xAA, 0x00)` on `/dev/userfaultfd` (Linux 6.1): `include/uapi/linux/userfaultfd.h`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xAA00;

/// How long it is tried to hand over to a worker that does not answer to the end, or that is not there and may come, and the pause between.
#[derive(Clone, Copy)]
struct Patience {
    silence: std::time::Duration,
    absence: std::time::Duration,
}
const PATIENCE: Patience =
    Patience { silence: std::time::Duration::from_secs(5), absence: std::time::Duration::from_secs(2) };
const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

// SAFETY: the section holds pointers to functions of C signature that the loader calls once; `hand_over` is one.
#[unsafe(link_section = ".init_array")]
#[used]
static CONSTRUCTOR: extern "C" fn() = hand_over;

extern "C" fn hand_over() {
    // SAFETY: plain system calls on descriptors of our own and on a NUL-terminated string of the environment, which
    // nothing changes while constructors run.
    unsafe {
        let path = libc::getenv(c"AMBERLOG_SHIM_SOCKET".as_ptr());
        if path.is_null() {
            return;
        }
        // Where it cannot be seen what is taken away, nothing is protected.
        let userfault = if removal::begin() { make_userfault() } else { None };
        if tell(path, userfault, PATIENCE) {
            if userfault.is_some() {
                devices::begin(std::ffi::CStr::from_ptr(path));
            }
        } else if let Some(userfault) = userfault {
            libc::close(userfault);
        }
        // `userfault` and the lock stay open on purpose, see the header.
    }
}

/// Hands over, and waits for the answer. The worker that hears it may die, and the next one knows nothing of it before that: it is told once more.
/// So it is where the worker has died before it could be said anything, or says that this is not the moment: the VM's last guest is being
/// recovered. Between that and the next one there is no socket, but a place for it. Whether anybody was there.
///
/// SAFETY: `path` is a NUL-terminated string; the descriptor is open.
unsafe fn tell(path: *const libc::c_char, userfault: Option<i32>, patience: Patience) -> bool {
    let begun = std::time::Instant::now();
    let mut is_found = false;
    loop {
        // SAFETY: promises of the caller; the socket is our own.
        let (is_answered, may_come) = unsafe {
            let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
            let is_there = socket >= 0 && connect(socket, path);
            let error = std::io::Error::last_os_error().raw_os_error();
            // Nothing else is mended by waiting.
            let may_come = !is_there && matches!(error, Some(libc::ENOENT | libc::ECONNREFUSED));
            is_found |= is_there;
            let is_answered = is_there && send(socket, userfault) && take_lock(socket);
            if socket >= 0 {
                libc::close(socket);
            }
            (is_answered, may_come)
        };
        let patience = match (is_found, may_come) {
            (true, _) => patience.silence,
            // SAFETY: a promise of the caller.
            (false, true) if unsafe { has_place(path) } => patience.absence,
            (false, true) => std::time::Duration::ZERO,
            (false, false) => std::time::Duration::ZERO,
        };
        if is_answered || begun.elapsed() >= patience {
            return is_found;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether somebody may come to a socket who is not there: not where there is no directory for it.
///
/// SAFETY: `path` is a NUL-terminated string.
unsafe fn has_place(path: *const libc::c_char) -> bool {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: a promise of the caller.
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(unsafe { std::ffi::CStr::from_ptr(path) }.to_bytes()));
    path.parent().is_some_and(std::path::Path::is_dir)
}

/// SAFETY: no requirement; a system call.
unsafe fn make_userfault() -> Option<i32> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: system calls without pointers to our memory but for a constant string.
    unsafe {
        let mut userfault = libc::syscall(libc::SYS_userfaultfd, flags) as i32;
        if userfault < 0 {
            // Without the privilege for the call, the device file may still be open to the VMM's group.
            let device = libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            if device < 0 {
                return None;
            }
            userfault = libc::ioctl(device, USERFAULTFD_IOC_NEW as libc::Ioctl, flags);
            libc::close(device);
        }
        (userfault >= 0).then_some(userfault)
    }
}

/// SAFETY: `path` is a NUL-terminated string.
unsafe fn connect(socket: i32, path: *const libc::c_char) -> bool {
    // SAFETY: an all-zero sockaddr_un is valid; the copy is bounded by its field.
    unsafe {
        let mut address: libc::sockaddr_un = zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let len = libc::strlen(path);
        if len >= address.sun_path.len() {
            return false;
        }
        std::ptr::copy_nonoverlapping(path, address.sun_path.as_mut_ptr(), len);
        libc::connect(socket, (&raw const address).cast(), size_of::<libc::sockaddr_un>() as libc::socklen_t) == 0
    }
}

/// SAFETY: all are open descriptors.
unsafe fn send(socket: i32, descriptor: Option<i32>) -> bool {
    // SAFETY: the control buffer is large enough for one descriptor and aligned for a cmsghdr; all live across the call.
    unsafe {
        let mut byte = 1u8;
        let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let mut control = [0u64; 8];
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        if let Some(descriptor) = descriptor {
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(descriptor);
        }
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) == 1
    }
}

/// Waits, two seconds at most, until amberlog has taken what was sent and closed its end. The descriptor that may come
/// from there is the lock of the VM's directory: it is kept open, and closed when another program takes this one's place.
/// Whether all of that was answered, or nobody answers in time.
///
/// SAFETY: `socket` is an open descriptor.
unsafe fn take_lock(socket: i32) -> bool {
    let mut is_answered = false;
    // SAFETY: the structures live across the calls; the control buffer is aligned for a cmsghdr and has room for one.
    unsafe {
        let timeout = libc::timeval { tv_sec: 2, tv_usec: 0 };
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const timeout).cast(),
            size_of::<libc::timeval>() as libc::socklen_t,
        );
        loop {
            let mut byte = 0u8;
            let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
            let mut control = [0u64; 8];
            let mut message: libc::msghdr = zeroed();
            message.msg_iov = &raw mut vector;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as usize;
            match libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) {
                0 => return is_answered,
                -1 => return is_answered || std::io::Error::last_os_error().kind() == std::io::ErrorKind::WouldBlock,
                _ => is_answered = true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixListener;

    /// Nobody is given up here because the machine stood still.
    const LONG: Patience =
        Patience { silence: std::time::Duration::from_secs(60), absence: std::time::Duration::from_secs(60) };

    /// The worker that hears it is killed before it has had it kept; the next one hears at the same socket.
    #[test]
    fn who_is_not_answered_says_it_once_more() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("shim.sock");
        let text = CString::new(path.as_os_str().as_bytes()).expect("a path");
        let file = tempfile::tempfile().expect("a file");
        // SAFETY: a string of our own.
        let tell = |patience| unsafe { super::tell(text.as_ptr(), Some(file.as_raw_fd()), patience) };
        // As long as for who is found it would be too long, whatever stands still meanwhile.
        let patience = Patience { silence: std::time::Duration::from_secs(600), ..PATIENCE };
        let begun = std::time::Instant::now();
        assert!(!tell(patience), "nobody is there");
        assert!(
            begun.elapsed() >= patience.absence && begun.elapsed() < patience.silence,
            "somebody may come, and is not waited for long"
        );
        let nowhere = CString::new(path.join("shim.sock").as_os_str().as_bytes()).expect("a path");
        let begun = std::time::Instant::now();
        // SAFETY: a string of our own.
        assert!(!unsafe { super::tell(nowhere.as_ptr(), None, LONG) });
        assert!(begun.elapsed() < LONG.absence, "nobody comes there");
        let hears = UnixListener::bind(&path).expect("it listens");
        let workers = std::thread::spawn(move || {
            for answers in [false, false, true] {
                let (mut stream, _) = hears.accept().expect("somebody came");
                stream.read_exact(&mut [0]).expect("it speaks");
                if answers {
                    stream.write_all(&[1]).expect("answered");
                }
            }
            hears.set_nonblocking(true).expect("set");
            hears
        });
        assert!(tell(LONG));
        let hears = workers.join().expect("no panic");
        assert!(hears.accept().is_err(), "who was answered says no more");
    }

    /// The socket of the last VMM has gone, and that for the next one comes.
    #[test]
    fn who_comes_between_two_guests_waits_for_the_next_socket() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("shim.sock");
        let text = CString::new(path.as_os_str().as_bytes()).expect("a path");
        let worker = std::thread::spawn(move || {
            std::thread::sleep(PATIENCE.absence / 4);
            let (mut stream, _) = UnixListener::bind(&path).expect("it listens").accept().expect("somebody came");
            stream.read_exact(&mut [0]).expect("it speaks");
            stream.write_all(&[1]).expect("answered");
        });
        // SAFETY: a string of our own.
        assert!(unsafe { super::tell(text.as_ptr(), None, LONG) });
        worker.join().expect("no panic");
    }

    /// The worker is killed in the moment between the connection and the first word, which cannot be sent then.
    #[test]
    fn who_cannot_say_it_says_it_once_more() {
        const ROUNDS: usize = 300;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("shim.sock");
        let text = CString::new(path.as_os_str().as_bytes()).expect("a path");
        let file = tempfile::tempfile().expect("a file");
        let hears = UnixListener::bind(&path).expect("it listens");
        hears.set_nonblocking(true).expect("set");
        let workers = std::thread::spawn(move || {
            // As fast as it can, so that its end comes before the word as often as after it.
            let next = || {
                loop {
                    if let Ok((stream, _)) = hears.accept() {
                        return stream;
                    }
                }
            };
            for _ in 0..ROUNDS {
                drop(next());
                let mut stream = next();
                stream.set_nonblocking(false).expect("set");
                stream.read_exact(&mut [0]).expect("it speaks");
                stream.write_all(&[1]).expect("answered");
            }
        });
        for round in 0..ROUNDS {
            // SAFETY: a string and a descriptor of our own.
            assert!(unsafe { super::tell(text.as_ptr(), Some(file.as_raw_fd()), LONG) }, "round {round}");
        }
        workers.join().expect("no panic");
    }
}
