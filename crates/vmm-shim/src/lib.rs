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
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 || !(connect(socket, path) && send(socket, userfault)) {
            if let Some(userfault) = userfault {
                libc::close(userfault);
            }
        } else {
            if userfault.is_some() {
                devices::begin(std::ffi::CStr::from_ptr(path));
            }
            take_lock(socket);
        }
        if socket >= 0 {
            libc::close(socket);
        }
        // `userfault` and the lock stay open on purpose, see the header.
    }
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
///
/// SAFETY: `socket` is an open descriptor.
unsafe fn take_lock(socket: i32) {
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
            if libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) <= 0 {
                return;
            }
        }
    }
}
