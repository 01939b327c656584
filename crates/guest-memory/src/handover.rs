//! The socket on which the library preloaded into the VMM hands over its userfaultfd.
//!
//! The same library asks there later on before its program gets at a device that writes to guest memory past the page tables.
//!
//! The library runs in every program that inherits the preload, so every sender is told apart by its process id; the
//! one that then connects as vhost-user front-end is the VMM.
//!
//! What a process has handed over is kept for the next worker before that process goes on. Failure story: a sender that gets no answer says it once
//! more, to whoever is there by then.

use crate::error::Error;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The environment variable that tells the preloaded library where to connect.
pub const SHIM_SOCKET_VARIABLE: &str = "AMBERLOG_SHIM_SOCKET";

/// What the library says first: here is a userfaultfd (or none), or a device is about to be passed through to the guest.
const HANDS_OVER: u8 = 1;
const PASSES_THROUGH: u8 = 2;
/// The answer to the latter: nothing of the guest's memory is protected any more. Without it the device is not to be touched.
const NOTHING_IS_PROTECTED: u8 = 2;
/// Or that it cannot be done.
const REFUSED: u8 = 3;

/// What is to be done before process N passes a device through to the guest; whether it may.
pub type BeforeDevice = Arc<dyn Fn(i32) -> bool + Send + Sync>;

/// Has what process N handed over kept for the next worker, or (nothing) not any more. When it returns, that was done.
pub type KeepHandedOver = Arc<dyn Fn(i32, Option<BorrowedFd<'_>>) + Send + Sync>;

/// What becomes of somebody who comes to hand over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Welcome {
    /// It may be the VMM: what it hands over is kept, and it gets the lock.
    Yes,
    /// Not at this moment: it gets no answer, and tries again. What is here is the last VMM's, and is about to be given up: who had its lock, or
    /// memory in its place, would keep it from being finished, and would be without memory itself.
    Later,
    /// It is none, for the VMM is there: a program that the VMM has started, say. It goes on at once, without anything.
    No,
}

/// What is given to and expected of those that hand over.
pub struct Terms {
    /// Whether process N may, at this moment.
    pub welcome: Arc<dyn Fn(i32) -> Welcome + Send + Sync>,
    /// Every process gets it in return, and keeps it open while it lives: a lock of that file is free only when all of them are gone.
    pub lock: Option<OwnedFd>,
    /// See there.
    pub before_device: BeforeDevice,
    /// See there.
    pub keep: KeepHandedOver,
    /// What an earlier worker has received.
    pub received: HashMap<i32, OwnedFd>,
}

/// At most this many descriptors are kept for processes that have not connected as a VMM.
const SENDERS_MAX: usize = 64;
/// Processes that are heard at once.
const CALLERS_MAX: usize = 16;
/// How long one may be silent: the library sends as soon as it has connected, and waits no longer than this for the answer.
/// In tests, longer than a loaded machine takes to answer somebody else.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });

/// After a process that could not be let in.
const PAUSE: Duration = Duration::from_millis(100);

/// Receives userfaultfds from VMM processes and keeps them by process id.
#[derive(Debug)]
pub struct HandoverSocket {
    path: PathBuf,
    received: Arc<Mutex<HashMap<i32, OwnedFd>>>,
    is_over: Arc<AtomicBool>,
}

impl HandoverSocket {
    /// Makes the socket at `path` (mode 0600; what an earlier process left there is replaced).
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn bind(path: &Path) -> Result<UnixListener, Error> {
        if std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
            // Its owner is gone, or has lost the directory to us.
            let _ = std::fs::remove_file(path);
        }
        UnixListener::bind(path)
            .and_then(|listener| {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map(|()| listener)
            })
            .map_err(|e| Error::system(format!("listening for the VMM's userfaultfd at {}", path.display()), e))
    }

    /// Listens at `path` ([`HandoverSocket::bind`], [`HandoverSocket::serve`]).
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn listen(path: &Path, terms: Terms) -> Result<Self, Error> {
        Self::serve(Self::bind(path)?, path, terms)
    }

    /// Receives at a socket that is at `path`, in a thread of its own.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn serve(listener: UnixListener, path: &Path, terms: Terms) -> Result<Self, Error> {
        let Terms { welcome, lock, before_device, keep, received } = terms;
        let received = Arc::new(Mutex::new(received));
        let store = Arc::clone(&received);
        let is_over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&is_over);
        log_context::spawn(std::thread::Builder::new().name("handover".to_owned()), move || {
            let lock = lock.map(Arc::new);
            let callers = Arc::new(());
            for came in listener.incoming() {
                if ended.load(Ordering::Acquire) {
                    return;
                }
                let Some(stream) = accepted(came, || std::thread::sleep(PAUSE)) else { continue };
                if Arc::strong_count(&callers) > CALLERS_MAX {
                    log::warn!("more than {CALLERS_MAX} processes hand over a userfaultfd at once: one is turned away");
                    continue;
                }
                // One that says nothing must not cost the VMM its time.
                let (store, lock, caller) = (Arc::clone(&store), lock.clone(), Arc::clone(&callers));
                let (before_device, keep) = (Arc::clone(&before_device), Arc::clone(&keep));
                let welcome = Arc::clone(&welcome);
                let heard = log_context::spawn(std::thread::Builder::new().name("handover".to_owned()), move || {
                    hear(&stream, &store, lock.as_deref(), &*welcome, &*before_device, &*keep);
                    drop(caller);
                });
                if let Err(error) = heard {
                    log::warn!("no thread for a process that hands over its userfaultfd: {error}");
                }
            }
        })
        .map_err(|e| Error::system("starting the thread that receives the VMM's userfaultfd", e))?;
        Ok(HandoverSocket { path: path.to_owned(), received, is_over })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The userfaultfd of process `pid`, once. Who takes it has it kept.
    pub fn take(&self, pid: i32) -> Option<OwnedFd> {
        self.received.lock().expect("no panic under this lock").remove(&pid)
    }
}

impl Drop for HandoverSocket {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        // The thread waits for somebody to come.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Who came. If nobody could be let in (out of descriptors, perhaps) it is not to be tried again without a pause: whoever waits is still there.
fn accepted(came: std::io::Result<UnixStream>, pause: impl FnOnce()) -> Option<UnixStream> {
    came.inspect_err(|error| {
        log::warn!("a process that hands over its userfaultfd could not be let in: {error}");
        pause();
    })
    .ok()
}

/// Takes what one process hands over, and says so, with the lock.
///
/// The library waits for that, and for the end of file that follows, before it lets the program's main start, so that the descriptor is
/// here, and is kept, before the program can connect anywhere else.
fn hear(
    stream: &UnixStream,
    store: &Mutex<HashMap<i32, OwnedFd>>,
    lock: Option<&OwnedFd>,
    welcome: &dyn Fn(i32) -> Welcome,
    before_device: &dyn Fn(i32) -> bool,
    keep: &dyn Fn(i32, Option<BorrowedFd<'_>>),
) {
    let received = receive(stream);
    if let Some((pid, said, _)) = &received
        && *said != PASSES_THROUGH
    {
        match welcome(*pid) {
            Welcome::Yes => {}
            Welcome::Later => return,
            Welcome::No => return send_answer(stream, None),
        }
    }
    match received {
        Some((pid, PASSES_THROUGH, _)) => {
            // Whoever does not hear the word does not go on; and whoever hears none asks once more.
            let word = if before_device(pid) { NOTHING_IS_PROTECTED } else { REFUSED };
            let _ = rustix::net::send(stream, &[word], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            return;
        }
        Some((pid, HANDS_OVER, Some(descriptor))) => {
            let mut store = store.lock().expect("no panic under this lock");
            if store.len() >= SENDERS_MAX {
                // Programs that were no VMM, and have ended: they are never asked for.
                store.retain(|pid, _| {
                    let lives = Path::new(&format!("/proc/{pid}")).exists();
                    if !lives {
                        keep(*pid, None);
                    }
                    lives
                });
            }
            if store.len() < SENDERS_MAX || store.contains_key(&pid) {
                keep(pid, Some(descriptor.as_fd()));
                store.insert(pid, descriptor);
            }
        }
        Some((pid, ..)) => {
            // What an earlier program of this process has handed over is not this one's.
            if store.lock().expect("no panic under this lock").remove(&pid).is_some() {
                keep(pid, None);
            }
        }
        None => return,
    }
    send_answer(stream, lock);
}

/// Who sent a byte, which one, and the descriptor that came with it, if the process could make one.
fn receive(stream: &UnixStream) -> Option<(i32, u8, Option<OwnedFd>)> {
    let credentials = rustix::net::sockopt::socket_peercred(stream).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, flags).ok()?;
    if received.bytes == 0 {
        return None;
    }
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Some((credentials.pid.as_raw_nonzero().get(), byte[0], descriptor))
}

/// A byte, with the lock. A process that does not take it is one that has ended, or is no VMM.
fn send_answer(stream: &UnixStream, lock: Option<&OwnedFd>) {
    let descriptors: Vec<BorrowedFd<'_>> = lock.iter().map(|lock| lock.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendmsg(stream, &[IoSlice::new(&[1])], &mut control, flags);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn nobody_is_tried_again_without_a_pause() {
        let mut pauses = 0;
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        assert!(accepted(Ok(ours), || pauses += 1).is_some() && pauses == 0);
        assert!(accepted(Err(rustix::io::Errno::MFILE.into()), || pauses += 1).is_none() && pauses == 1);
    }

    #[test]
    fn what_another_program_of_the_process_handed_over_is_not_the_vmms() {
        let me = std::process::id() as i32;
        let store = Mutex::new(HashMap::from([(me, OwnedFd::from(tempfile::tempfile().expect("a file")))]));
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        theirs.write_all(&[PASSES_THROUGH]).expect("sent");
        hear(&ours, &store, None, &|_| Welcome::Yes, &|_| true, &|_, _| ());
        assert_eq!(store.lock().expect("no panic").len(), 1, "a question is none");
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        theirs.write_all(&[HANDS_OVER]).expect("sent");
        hear(&ours, &store, None, &|_| Welcome::Yes, &|_| true, &|_, _| ());
        assert!(store.lock().expect("no panic").is_empty());
    }

    /// Who comes while the last VMM's guest is recovered gets nothing of that, and no answer; who is no VMM goes on at once.
    #[test]
    fn what_is_here_is_given_to_nobody_who_comes_too_early() {
        let descriptor = || OwnedFd::from(tempfile::tempfile().expect("a file"));
        let me = std::process::id() as i32;
        for (welcome, answer, is_taken) in
            [(Welcome::Later, 0, false), (Welcome::No, 1, false), (Welcome::Yes, 1, true)]
        {
            let store = Mutex::new(HashMap::new());
            let (ours, theirs) = UnixStream::pair().expect("a pair");
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let handed_over = [descriptor()];
            let descriptors = [handed_over[0].as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            let byte = [IoSlice::new(&[HANDS_OVER])];
            rustix::net::sendmsg(&theirs, &byte, &mut control, SendFlags::empty()).expect("sent");
            let (asked, lock) = (Mutex::new(Vec::new()), descriptor());
            let asks = |pid| {
                asked.lock().expect("no panic").push(pid);
                welcome
            };
            hear(&ours, &store, Some(&lock), &asks, &|_| true, &|_, _| ());
            drop(ours);
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let mut vector = [IoSliceMut::new(&mut byte)];
            let count = rustix::net::recvmsg(&theirs, &mut vector, &mut control, RecvFlags::CMSG_CLOEXEC);
            assert_eq!(count.expect("heard").bytes, answer, "{welcome:?}");
            assert_eq!(control.drain().count(), usize::from(is_taken), "{welcome:?}: the lock");
            assert_eq!(store.lock().expect("no panic").contains_key(&me), is_taken, "{welcome:?}");
            assert_eq!(*asked.lock().expect("no panic"), [me]);
        }
    }

    /// The worker may be killed as soon as the process that has handed over goes on.
    #[test]
    fn what_is_handed_over_is_kept_before_its_process_hears_of_it() {
        let me = std::process::id() as i32;
        let descriptor = || OwnedFd::from(tempfile::tempfile().expect("a file"));
        let store = Mutex::new(HashMap::new());
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        theirs.set_nonblocking(true).expect("set");
        let heard = || (&theirs).read(&mut [0; 1]).ok();
        let kept = Mutex::new(Vec::new());
        let keep = |pid: i32, descriptor: Option<BorrowedFd<'_>>| {
            assert_eq!(heard(), None, "it goes on");
            kept.lock().expect("no panic").push((pid, descriptor.is_some()));
        };
        send_answer(&theirs, Some(&descriptor()));
        hear(&ours, &store, None, &|_| Welcome::Yes, &|_| true, &keep);
        assert_eq!(heard(), Some(1), "without a lock, too");
        // It becomes another program, which cannot make one.
        (&theirs).write_all(&[HANDS_OVER]).expect("sent");
        hear(&ours, &store, Some(&descriptor()), &|_| Welcome::Yes, &|_| true, &keep);
        assert_eq!(*kept.lock().expect("no panic"), [(me, true), (me, false)]);
        assert_eq!(heard(), Some(1));
        // Who says nothing hears nothing.
        drop(theirs.shutdown(std::net::Shutdown::Write));
        hear(&ours, &store, None, &|_| Welcome::Yes, &|_| true, &|_, _| panic!("there is nothing"));
        drop(ours);
        // A program that another test has just started may hold the other end until it becomes itself.
        theirs.set_nonblocking(false).expect("set");
        assert_eq!((&theirs).read(&mut [0; 1]).ok(), Some(0));
    }

    #[test]
    fn programs_that_have_ended_take_nobodys_place() {
        let descriptor = || OwnedFd::from(tempfile::tempfile().expect("a file"));
        // No process has such a number.
        let ended = (0..SENDERS_MAX as i32).map(|number| (i32::MAX - number, descriptor()));
        let store = Mutex::new(ended.collect::<HashMap<_, _>>());
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        send_answer(&theirs, Some(&descriptor()));
        let gone = Mutex::new(0);
        hear(&ours, &store, None, &|_| Welcome::Yes, &|_| true, &|_, descriptor| {
            *gone.lock().expect("no panic") += u32::from(descriptor.is_none());
        });
        assert_eq!(*gone.lock().expect("no panic") as usize, SENDERS_MAX);
        let left: Vec<i32> = store.lock().expect("no panic").keys().copied().collect();
        assert_eq!(left, [std::process::id() as i32]);
    }

    #[test]
    fn silent_processes_do_not_make_the_vmm_wait() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("shim.sock");
        let lock = std::fs::File::create(directory.path().join("lock")).expect("made");
        let terms = Terms {
            welcome: Arc::new(|_| Welcome::Yes),
            lock: Some(lock.into()),
            before_device: Arc::new(|_| true),
            keep: Arc::new(|_, _| ()),
            received: HashMap::new(),
        };
        let socket = HandoverSocket::listen(&path, terms).expect("listens");
        let connect = || UnixStream::connect(&path).expect("connected");
        // Were they heard one after the other, all of them would have been given up before the last one.
        let silent: Vec<UnixStream> = (0..CALLERS_MAX - 1).map(|_| connect()).collect();
        let mut speaks = connect();
        speaks.write_all(&[1]).expect("sent");
        let mut answer = Vec::new();
        speaks.read_to_end(&mut answer).expect("the lock's byte, and the end");
        assert_eq!(answer, [1]);
        for other in &silent {
            other.set_nonblocking(true).expect("set");
            let heard = (&*other).read(&mut [0; 1]);
            assert!(heard.is_err(), "its time is not over: {heard:?}");
        }
        drop(socket);
    }
}
