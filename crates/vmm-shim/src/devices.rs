//! Devices that write to guest memory past the page tables, and come while the guest runs: VFIO, iommufd, vDPA.
//!
//! No page fault tells of what such a device writes, so no page may be protected, and nothing retained, where one is. The library stands in
//! the place of the C library's `ioctl`, sees the first request for one of them, and asks amberlog before the kernel hears of it. The
//! request fails if amberlog does not say that everything is copied out: a VMM then has no such device, and says so.

use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The type of VFIO's and iommufd's requests: `VFIO_TYPE`, `IOMMUFD_TYPE`.
const OF_VFIO: u64 = b';' as u64;
/// The type of vhost's requests, and the first number of those that vDPA alone has: `VHOST_VDPA_GET_DEVICE_ID`.
const OF_VHOST: u64 = 0xAF;
const FIRST_OF_VDPA: u64 = 0x70;
/// What amberlog is asked, and what it answers when nothing is protected any more: `guest-memory/src/handover.rs`.
const PASSES_THROUGH: u8 = 2;
const NOTHING_IS_PROTECTED: u8 = 2;
/// How long amberlog has for that.
const PATIENCE_SECONDS: i64 = 60;

/// Whom to ask, and whether the answer was good already.
struct Amberlog {
    socket: Box<CStr>,
    knows: AtomicBool,
}

/// Nobody, as long as no userfaultfd was handed over.
static AMBERLOG: OnceLock<Amberlog> = OnceLock::new();

/// From now on amberlog, which listens there, protects pages of this process.
pub(crate) fn begin(socket: &CStr) {
    let _ = AMBERLOG.set(Amberlog { socket: socket.into(), knows: AtomicBool::new(false) });
}

/// Whether a request is one for a device that writes past the page tables. Processors run and interrupts are sent by this function, too: it
/// costs two comparisons.
fn passes_through(request: u64) -> bool {
    let (kind, number) = (request >> 8 & 0xff, request & 0xff);
    kind == OF_VFIO || kind == OF_VHOST && number >= FIRST_OF_VDPA
}

impl Amberlog {
    fn allows_it(&self) -> bool {
        if self.knows.load(Ordering::SeqCst) {
            return true;
        }
        let is_allowed = self.ask() == Some(NOTHING_IS_PROTECTED);
        self.knows.fetch_or(is_allowed, Ordering::SeqCst);
        is_allowed
    }

    /// The worker that is asked may die of it, and the next one is asked then.
    fn ask(&self) -> Option<u8> {
        let begun = std::time::Instant::now();
        loop {
            // SAFETY: the path is a string with its end.
            let (is_there, answer) = unsafe { ask_once(&self.socket) };
            if answer.is_some() || !is_there || begun.elapsed() >= crate::PATIENCE.silence {
                return answer;
            }
            std::thread::sleep(crate::PAUSE);
        }
    }
}

/// Whether anybody is there, and what is answered.
///
/// SAFETY: no requirement; system calls.
unsafe fn ask_once(path: &CStr) -> (bool, Option<u8>) {
    // SAFETY: system calls on a descriptor of our own; the path is a string with its end, and the rest lives across the calls.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return (false, None);
        }
        let timeout = libc::timeval { tv_sec: PATIENCE_SECONDS, tv_usec: 0 };
        let (at, len) = ((&raw const timeout).cast(), size_of::<libc::timeval>() as libc::socklen_t);
        libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_RCVTIMEO, at, len);
        let question = [PASSES_THROUGH];
        let mut answer = [0u8];
        let is_there = crate::connect(socket, path.as_ptr());
        let is_answered = is_there
            && libc::send(socket, question.as_ptr().cast(), 1, libc::MSG_NOSIGNAL) == 1
            && received(socket, &mut answer);
        libc::close(socket);
        (is_there, is_answered.then_some(answer[0]))
    }
}

/// A byte, however often a signal comes between.
fn received(socket: i32, byte: &mut [u8; 1]) -> bool {
    loop {
        // SAFETY: the byte lives across the call.
        match unsafe { libc::recv(socket, byte.as_mut_ptr().cast(), 1, 0) } {
            -1 if std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
            count => return count == 1,
        }
    }
}

/// In place of the C library's: see the module.
///
/// # Safety
/// Those of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(
    descriptor: libc::c_int,
    request: libc::c_ulong,
    argument: *mut libc::c_void,
) -> libc::c_int {
    // A caller may have made the number's upper half of its sign.
    let request = request & 0xffff_ffff;
    if passes_through(request)
        && let Some(amberlog) = AMBERLOG.get()
        && !amberlog.allows_it()
    {
        // SAFETY: the C library gives a pointer to this thread's own `errno`.
        unsafe { *libc::__errno_location() = libc::EPERM };
        return -1;
    }
    // SAFETY: the system call of this name, with its arguments.
    unsafe { libc::syscall(libc::SYS_ioctl, libc::c_long::from(descriptor), request, argument) as libc::c_int }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::HandoverSocket;
    use std::ffi::CString;
    use std::io::{Read, Write};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    const VFIO_GET_API_VERSION: u64 = 0x3b64;

    #[test]
    fn requests_for_devices_are_told_from_others() {
        // VFIO_IOMMU_MAP_DMA, IOMMU_IOAS_MAP, VHOST_VDPA_GET_DEVICE_ID.
        for request in [0x3b71, 0x3b85, 0x8004_af70] {
            assert!(passes_through(request), "{request:#x}");
        }
        // KVM_RUN, TCGETS, VHOST_SET_OWNER, UFFDIO_API, FIONREAD.
        for request in [0xae80, 0x5401, 0xaf01, 0xc018_aa3f, 0x541b] {
            assert!(!passes_through(request), "{request:#x}");
        }
    }

    /// The real daemon's end, and the function that a VMM calls.
    #[test]
    fn a_request_for_a_device_waits_for_amberlog_and_fails_without_its_word() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("shim.sock");
        let errno = |request: u64| {
            // SAFETY: a descriptor that is none.
            let result = unsafe { libc::ioctl(-1, request as libc::Ioctl) };
            assert_eq!(result, -1);
            std::io::Error::last_os_error().raw_os_error().expect("it failed")
        };
        assert_eq!(errno(VFIO_GET_API_VERSION), libc::EBADF, "nothing was handed over");
        begin(&CString::new(path.as_os_str().as_bytes()).expect("a path"));
        assert_eq!(errno(VFIO_GET_API_VERSION), libc::EPERM, "nobody listens");
        let older = UnixListener::bind(&path).expect("it listens");
        let answers = std::thread::spawn(move || {
            let (mut stream, _) = older.accept().expect("somebody came");
            stream.write_all(&[1]).expect("answered");
            // Until the other end has read it.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        assert_eq!(errno(VFIO_GET_API_VERSION), libc::EPERM, "an older amberlog, which gives its lock to everybody");
        answers.join().expect("no panic");
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let me = std::process::id() as i32;
        let before_device = Arc::new(move |pid| {
            assert_eq!(pid, me);
            // There is no room at first.
            counted.fetch_add(1, Ordering::SeqCst) > 0
        });
        // Who hands over gets the lock in return, and that is no such word.
        let lock = std::fs::File::create(directory.path().join("lock")).expect("made");
        let terms = guest_memory::Terms {
            welcome: Arc::new(|_| guest_memory::Welcome::Yes),
            lock: Some(lock.into()),
            before_device,
            keep: Arc::new(|_, _| ()),
            received: std::collections::HashMap::new(),
        };
        let _socket = HandoverSocket::listen(&path, terms).expect("it listens");
        assert_eq!((errno(VFIO_GET_API_VERSION), asked.load(Ordering::SeqCst)), (libc::EPERM, 1));
        assert_eq!((errno(0xae80), asked.load(Ordering::SeqCst)), (libc::EBADF, 1), "another request");
        assert_eq!((errno(VFIO_GET_API_VERSION), asked.load(Ordering::SeqCst)), (libc::EBADF, 2));
        assert_eq!((errno(VFIO_GET_API_VERSION), asked.load(Ordering::SeqCst)), (libc::EBADF, 2), "it knows");
    }
}
