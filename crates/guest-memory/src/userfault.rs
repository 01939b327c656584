//! The few userfaultfd calls that are needed, on a descriptor made in another process.
//!
//! Written by hand because the descriptor is received, not made, and because the write protection of shared memory
//! (Linux 5.19) is what it is for. Numbers and layouts: `include/uapi/linux/userfaultfd.h`, ioctl_userfaultfd(2).

use crate::error::Error;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

const UFFD_API: u64 = 0xAA;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFDIO_API: u64 = 0xC018_AA3F;
const UFFDIO_REGISTER: u64 = 0xC020_AA00;
const UFFDIO_UNREGISTER: u64 = 0x8010_AA01;
const UFFDIO_WAKE: u64 = 0x8010_AA02;
const UFFDIO_WRITEPROTECT: u64 = 0xC018_AA06;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
const MESSAGE_BYTES: usize = 32;

#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArgument {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct RangeArgument {
    start: u64,
    len: u64,
}

#[repr(C)]
struct WriteProtectArgument {
    start: u64,
    len: u64,
    mode: u64,
}

/// A userfaultfd of another process's address space, after its handshake.
#[derive(Debug)]
pub(crate) struct UserFault {
    file: File,
}

impl UserFault {
    /// Asks for write protection of shared memory. The descriptor must be fresh.
    pub(crate) fn handshake(descriptor: OwnedFd) -> Result<Self, Error> {
        let userfault = UserFault { file: File::from(descriptor) };
        userfault.shake_hands().map_err(|e| {
            Error::system(
                "this kernel does not write-protect shared memory through userfaultfd (Linux 5.19 or newer is needed)",
                e,
            )
        })?;
        Ok(userfault)
    }

    fn shake_hands(&self) -> io::Result<()> {
        let wanted = UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
        let mut argument = ApiArgument { api: UFFD_API, features: wanted, ioctls: 0 };
        // SAFETY: the argument has the layout of struct uffdio_api and lives across the call.
        unsafe { self.ioctl(UFFDIO_API, (&raw mut argument).cast()) }
    }

    /// Goes on with one whose handshake another process has made, or was about to make: where it was made, the kernel refuses another one.
    pub(crate) fn adopt(descriptor: OwnedFd) -> Self {
        let userfault = UserFault { file: File::from(descriptor) };
        if let Err(error) = userfault.shake_hands() {
            log::debug!("the userfaultfd of a dead worker is ready: {error}");
        }
        userfault
    }

    /// SAFETY: `argument` must point to the structure that `request` expects.
    unsafe fn ioctl(&self, request: u64, argument: *mut libc::c_void) -> io::Result<()> {
        // SAFETY: promise of the caller.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), request as libc::Ioctl, argument) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Registers a range of the VMM's address space for write protection.
    pub(crate) fn register(&self, start: u64, len: u64) -> io::Result<()> {
        let mut argument = RegisterArgument { start, len, mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: the argument has the layout of struct uffdio_register and lives across the call.
        unsafe { self.ioctl(UFFDIO_REGISTER, (&raw mut argument).cast()) }
    }

    /// The opposite: nothing in the range is protected any more, and nobody waits there. Memory that is not registered is no error.
    pub(crate) fn unregister(&self, start: u64, len: u64) {
        let mut argument = RangeArgument { start, len };
        // SAFETY: the argument has the layout of struct uffdio_range and lives across the call.
        let _ = unsafe { self.ioctl(UFFDIO_UNREGISTER, (&raw mut argument).cast()) };
    }

    /// Protects (or unprotects and wakes the writers of) a range. A VMM that is gone is no error: nobody can write.
    pub(crate) fn write_protect(&self, start: u64, len: u64, protect: bool) -> io::Result<()> {
        loop {
            let mode = if protect { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
            let mut argument = WriteProtectArgument { start, len, mode };
            // SAFETY: the argument has the layout of struct uffdio_writeprotect and lives across the call.
            match unsafe { self.ioctl(UFFDIO_WRITEPROTECT, (&raw mut argument).cast()) } {
                Ok(()) => return Ok(()),
                // The address space is changing (fork, mremap): the kernel asks to try again.
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether the VMM is gone, and with it everybody who could write.
    pub(crate) fn is_over(&self) -> bool {
        // A page where nobody has memory: the kernel looks for the process first.
        let mut argument = WriteProtectArgument { start: 0x10000, len: 0x10000, mode: 0 };
        // SAFETY: the argument has the layout of struct uffdio_writeprotect and lives across the call.
        unsafe { self.ioctl(UFFDIO_WRITEPROTECT, (&raw mut argument).cast()) }
            .is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Wakes every writer waiting in a range; those still protected fault again and are told again.
    pub(crate) fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        let mut argument = RangeArgument { start, len };
        // SAFETY: the argument has the layout of struct uffdio_range and lives across the call.
        unsafe { self.ioctl(UFFDIO_WAKE, (&raw mut argument).cast()) }
    }

    /// Appends the addresses of the faults that wait now; none when there are none.
    pub(crate) fn read_faults(&self, addresses: &mut Vec<u64>) -> io::Result<()> {
        let mut buffer = [0u8; MESSAGE_BYTES * 64];
        match (&self.file).read(&mut buffer) {
            Ok(count) => {
                for message in buffer[..count].chunks_exact(MESSAGE_BYTES) {
                    if message[0] == UFFD_EVENT_PAGEFAULT {
                        let address: [u8; 8] = message[16..24].try_into().expect("eight bytes");
                        addresses.push(u64::from_ne_bytes(address));
                    }
                }
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for UserFault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
