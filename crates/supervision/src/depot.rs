//! A store of descriptors in a process of its own (the *depot*), for a daemon without a service manager that has one: it outlives the daemon that has
//! started it, and gives all to the next one.
//!
//! It knows names and words, and looks at one of them: which process is the VMM of a VM. Both ends are here: what that process
//! does ([`keep`]), and the daemon's end ([`InDepot`]). What it has is open in it, not under way in a socket: what is under way counts against all
//! processes of a user (`unix(7)`, `ETOOMANYREFS`).
//!
//! What it must never do: keep anything of a VM that no VMM has while no daemon is there (its images and its directory would be in use for ever, and nobody
//! could bring home what is owed); give anything to a process that serves a guest; wait for anybody. Failure story: a depot that dies or hangs under
//! its daemon is followed by another one, which is given all of it again. Where both die, the next daemon finds nothing, as if there had never been
//! one: it leaves the guest alone until its VMM has ended. Where closing a file waits for storage, a thread does that, and nothing of another VM waits for it.

mod attended;
mod message;

pub use attended::{InDepot, NAME as PROCESS_NAME, Start, Taken};

use crate::channel::Channel;
use crate::vault::NAME;
use message::{FORMAT, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the one end may take to hear what the other one says.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long somebody who has come may say nothing.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a depot waits for the daemon that has started it.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);
/// How often it looks at a process that cannot be watched, and the pause where nobody can be let in.
const LOOK: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(50);
/// How long a daemon that ends waits for what is being closed.
const CLOSING: Duration = Duration::from_secs(2);
/// The item that says which process is the VMM, after the name of the VM.
const VMM: &str = "kept/vmm";
/// The item of what a process has handed over that has not connected yet, before its number; its words say when it began.
const HANDED_OVER: &str = "kept/handed over ";

/// What a depot has to know of the processes around it.
pub trait Host {
    /// Of a process that lives, what is readable when it has ended.
    type Process: AsFd;

    /// The process with this number that was started at this moment; nothing when it has ended.
    ///
    /// # Errors
    /// When it cannot be watched: whether it lives is asked again later.
    fn process(&self, pid: i32, started: u64) -> io::Result<Option<Self::Process>>;

    /// How far process `pid` is fenced in. One that is so further than the daemon that came last may serve a guest, and is not heard: what that guest is to
    /// have of the others' is nothing. Nothing where it cannot be seen.
    fn fence(&self, pid: i32) -> Option<u32>;
}

/// What is kept under a name.
struct Stored {
    item: String,
    words: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// A VM whose VMM lives while there is no daemon.
struct Orphan<P> {
    /// Of its descriptors.
    names: Vec<String>,
    vmm: (i32, u64),
    /// Who else may be it.
    others: Vec<(i32, u64)>,
    /// Nothing where it cannot be watched.
    process: Option<P>,
}

impl<P> Orphan<P> {
    /// Looks at the VMM, or at who else may be it. Whether one may live.
    fn look_at_any(&mut self, host: &impl Host<Process = P>) -> bool {
        loop {
            if self.look(host) {
                return true;
            }
            if self.others.is_empty() {
                return false;
            }
            self.is_another();
        }
    }

    /// The one that was watched has ended.
    fn is_another(&mut self) {
        self.vmm = self.others.remove(0);
        self.process = None;
    }

    /// Looks at the VMM, unless it is watched. Whether it may live.
    fn look(&mut self, host: &impl Host<Process = P>) -> bool {
        if self.process.is_none() {
            match host.process(self.vmm.0, self.vmm.1) {
                Ok(None) => return false,
                Ok(process) => self.process = process,
                // What is taken for dead loses what it has.
                Err(_) => {}
            }
        }
        true
    }
}

/// Keeps what the daemons give that come to `listener`, one after the other, until there is neither a daemon nor a VMM of one of their VMs.
///
/// # Errors
/// When nobody can be waited for.
pub fn keep<H: Host>(listener: &OwnedFd, host: &H) -> io::Result<()> {
    let kept = keep_to_the_end(listener, host);
    // Something may be closed still: nobody is to come to a process that does nothing else any more.
    let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
    kept
}

fn keep_to_the_end<H: Host>(listener: &OwnedFd, host: &H) -> io::Result<()> {
    let mut depot = Depot { kept: BTreeMap::new(), orphans: Vec::new(), closing: Closing::default() };
    // As its first daemon is, which it is a child of.
    let mut fence = host.fence(rustix::process::getpid().as_raw_nonzero().get()).unwrap_or_default();
    let begun = Instant::now();
    let mut has_come = false;
    let mut daemon: Option<Channel> = None;
    loop {
        let patience = match &daemon {
            Some(_) => None,
            None if !has_come => Some(FIRST_PATIENCE.saturating_sub(begun.elapsed())),
            // Somebody may have come already.
            None if depot.orphans.is_empty() => Some(Duration::ZERO),
            None => depot.orphans.iter().any(|orphan| orphan.process.is_none()).then_some(LOOK),
        };
        let (is_awaited, is_said, ended) = depot.wait(listener, daemon.as_ref(), patience)?;
        if daemon.is_none() {
            // First: a daemon finds nothing of a VM whose VMM had ended when it came.
            depot.let_go_of(&ended, host);
            if depot.orphans.is_empty() && has_come {
                depot.clear();
                if !is_awaited {
                    return Ok(());
                }
            }
            if !has_come && begun.elapsed() >= FIRST_PATIENCE && !is_awaited {
                return Ok(());
            }
        } else if is_said && daemon.as_ref().is_some_and(|daemon| !depot.hear(daemon)) {
            // It hears that before the next one can come.
            depot.find_orphans(host);
            depot.closing.settle();
            daemon = None;
            continue;
        }
        if is_awaited {
            let Some((came, its_fence)) = accept(listener, host) else { continue };
            if its_fence.is_none_or(|its| its > fence) {
                let _ = Message::Refused.send(&came, &[]);
            } else if daemon.is_some() {
                let _ = Message::Busy.send(&came, &[]);
            } else if depot.greet(&came).is_ok() {
                has_come = true;
                // Its workers have more than that.
                fence = its_fence.unwrap_or_default();
                depot.orphans.clear();
                daemon = Some(came);
            }
        }
    }
}

/// Lets in who has come, and gives how far it is fenced in.
fn accept(listener: &OwnedFd, host: &impl Host) -> Option<(Channel, Option<u32>)> {
    let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(socket) => socket,
        Err(error) => {
            if !matches!(error, Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) {
                // Out of descriptors, perhaps: what there is stays.
                std::thread::sleep(PAUSE);
            }
            return None;
        }
    };
    let peer = rustix::net::sockopt::socket_peercred(&socket).ok()?;
    let is_ours = peer.uid == rustix::process::geteuid() || peer.uid.is_root();
    let channel = Channel::from(socket);
    let fence = host.fence(peer.pid.as_raw_nonzero().get());
    (is_ours && channel.set_patience(SILENCE).is_ok()).then_some((channel, fence))
}

struct Depot<P> {
    kept: BTreeMap<String, Stored>,
    orphans: Vec<Orphan<P>>,
    closing: Closing,
}

impl<P: AsFd> Depot<P> {
    /// Waits for somebody to come, for what the daemon says, and for the end of VMMs: of each whether it is so.
    fn wait(
        &self,
        listener: &OwnedFd,
        daemon: Option<&Channel>,
        patience: Option<Duration>,
    ) -> io::Result<(bool, bool, Vec<bool>)> {
        let watched = self.orphans.iter().filter_map(|orphan| orphan.process.as_ref());
        let of_orphans: Vec<BorrowedFd<'_>> = watched.map(AsFd::as_fd).collect();
        let mut all = vec![PollFd::new(listener, PollFlags::IN)];
        all.extend(daemon.map(|daemon| PollFd::new(daemon, PollFlags::IN)));
        all.extend(of_orphans.iter().map(|process| PollFd::new(process, PollFlags::IN)));
        let timeout = patience.map(|patience| Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: i64::from(patience.subsec_nanos()),
        });
        match poll(&mut all, timeout.as_ref()) {
            // As if nothing had come.
            Err(Errno::INTR) => return Ok((false, false, vec![false; self.orphans.len()])),
            other => other?,
        };
        let mut ready = all.iter().map(|one| !one.revents().is_empty());
        let is_awaited = ready.next().unwrap_or_default();
        let is_said = daemon.is_some() && ready.next().unwrap_or_default();
        let ended = self.orphans.iter().map(|orphan| orphan.process.is_some() && ready.next().unwrap_or_default());
        let ended = ended.collect();
        Ok((is_awaited, is_said, ended))
    }

    /// Gives a daemon all that there is.
    fn greet(&self, daemon: &Channel) -> io::Result<()> {
        daemon.set_hearing_patience(Some(SILENCE))?;
        match Message::receive(daemon)? {
            Some((Message::Daemon { .. }, _)) => {}
            _ => return Err(io::Error::other("it is no daemon")),
        }
        daemon.set_patience(PATIENCE)?;
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Message::Depot { format: FORMAT, pid }.send(daemon, &[])?;
        for (name, stored) in &self.kept {
            stored.send(name, daemon)?;
        }
        Message::All.send(daemon, &[])
    }

    /// Does what the daemon says, until it says nothing more at the moment. False when it is gone.
    fn hear(&mut self, daemon: &Channel) -> bool {
        loop {
            match Message::receive_at_once(daemon) {
                Ok(Some((Message::Item { name, item, words }, descriptors))) => {
                    let other = self.kept.insert(name, Stored { item, words, descriptors });
                    self.closing.close(other);
                }
                Ok(Some((Message::Remove { name }, _))) => self.closing.close(self.kept.remove(&name)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                // Whatever it says that is not understood: the next one is heard.
                Ok(_) | Err(_) => return false,
            }
        }
    }

    /// No daemon is there: lets go of all that is of no VM whose VMM lives.
    fn find_orphans(&mut self, host: &impl Host<Process = P>) {
        #[derive(Default)]
        struct Vm {
            names: Vec<String>,
            /// As the item says that was put in last.
            vmm: Option<(u64, String)>,
            /// Those that have handed over: the VM is about to be one of them, which has the lock of its directory.
            is_about_to_connect: Vec<String>,
        }
        let mut vms: BTreeMap<&str, Vm> = BTreeMap::new();
        let mut others = Vec::new();
        for (name, stored) in &self.kept {
            let Some((vm, of)) = stored.item.split_once('/') else {
                others.push(name.clone());
                continue;
            };
            let vm = vms.entry(vm).or_default();
            vm.names.push(name.clone());
            let number = name.strip_prefix(NAME).and_then(|number| number.parse().ok()).unwrap_or_default();
            let words = String::from_utf8_lossy(&stored.words);
            if of == VMM && vm.vmm.as_ref().is_none_or(|(other, _)| *other < number) {
                vm.vmm = Some((number, words.into_owned()));
            } else if let Some(pid) = of.strip_prefix(HANDED_OVER) {
                vm.is_about_to_connect.push(format!("{pid} {words}"));
            }
        }
        let orphan = |vm: Vm| {
            let who = vm.vmm.map(|(_, words)| words).into_iter().chain(vm.is_about_to_connect);
            let processes = who.filter_map(|words| {
                let (pid, started) = words.split_once(' ')?;
                Some((pid.parse().ok()?, started.parse().ok()?))
            });
            let mut others: Vec<(i32, u64)> = processes.collect();
            if others.is_empty() {
                return None;
            }
            let vmm = others.remove(0);
            let mut orphan = Orphan { names: vm.names, vmm, others, process: None };
            orphan.look_at_any(host).then_some(orphan)
        };
        self.orphans = vms.into_values().filter_map(orphan).collect();
        // The format, and where questions were asked, stay as long as anything does.
        let stay: BTreeSet<&String> = self.orphans.iter().flat_map(|orphan| &orphan.names).chain(&others).collect();
        let stays = |(name, _): &(String, Stored)| stay.contains(name);
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.kept).into_iter().partition(stays);
        self.kept = kept;
        self.closing.close(gone.into_values());
    }

    /// Lets go of what is of VMMs that have ended.
    fn let_go_of(&mut self, ended: &[bool], host: &impl Host<Process = P>) {
        let orphans = std::mem::take(&mut self.orphans);
        for (mut orphan, has_ended) in orphans.into_iter().zip(ended) {
            let is_another = *has_ended && !orphan.others.is_empty();
            if is_another {
                orphan.is_another();
            }
            if (*has_ended && !is_another) || !orphan.look_at_any(host) {
                let gone: Vec<_> = orphan.names.iter().filter_map(|name| self.kept.remove(name)).collect();
                self.closing.close(gone);
            } else {
                self.orphans.push(orphan);
            }
        }
    }

    fn clear(&mut self) {
        self.closing.close(std::mem::take(&mut self.kept).into_values());
        self.closing.settle();
    }
}

impl Stored {
    fn send(&self, name: &str, to: &Channel) -> io::Result<()> {
        let message = Message::Item { name: name.to_owned(), item: self.item.clone(), words: self.words.clone() };
        let descriptors: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        message.send(to, &descriptors)
    }
}

/// What is being closed, each that was let go of at once by a thread of its own: the last descriptor of an image may wait for storage.
#[derive(Default)]
struct Closing(Vec<JoinHandle<()>>);

impl Closing {
    fn close(&mut self, stored: impl IntoIterator<Item = Stored>) {
        let descriptors = stored.into_iter().flat_map(|stored| stored.descriptors);
        let (slow, quick): (Vec<OwnedFd>, Vec<OwnedFd>) = descriptors.partition(may_wait);
        drop(quick);
        self.0.retain(|closing| !closing.is_finished());
        if !slow.is_empty() {
            // Without a thread it is done here.
            let thread = std::thread::Builder::new().name("closer".to_owned()).spawn(move || drop(slow));
            self.0.extend(thread);
        }
    }

    /// Waits until what was to be closed is, if that does not take long.
    fn settle(&mut self) {
        let deadline = Instant::now() + CLOSING;
        while self.0.iter().any(|closing| !closing.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether closing it may take its time: storage may have a say, or much memory goes. Only what the kernel knows without asking anybody does not.
fn may_wait(descriptor: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_type(descriptor).is_err() && rustix::pipe::fcntl_getpipe_size(descriptor).is_err()
}

#[cfg(test)]
mod tests;
