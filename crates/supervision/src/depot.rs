//! A store of descriptors in a process of its own (the *depot*), for a daemon without a service manager that has one: it outlives the daemon that has
//! started it, and gives all to the next one.
//!
//! It knows names and numbers, and of what it keeps it looks at one thing: which process is the VMM of a VM. Both ends are here: what that process
//! does ([`keep`]), and the daemon's end ([`InDepot`]).
//!
//! What it must never do: keep anything of a VM that no VMM has while no daemon is there. Its images and its directory would be in use for ever, and nobody
//! could bring home what is owed. Failure story: a depot that dies under its daemon is followed by another one, which is given all of it again. Where
//! both die, the next daemon finds nothing, as if there had never been one: it leaves the guest alone until its VMM has ended.

mod attended;

pub use attended::InDepot;

use crate::channel::Channel;
use crate::vault::{NAME, read};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Another number where the two ends say other things to each other.
const FORMAT: u32 = 1;
/// How long the one end may take to hear what the other one says.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a depot waits for the daemon that has started it.
const FIRST_PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// The item that says which process is the VMM, after the name of the VM.
const VMM: &str = "kept/vmm";

/// What a daemon says to its depot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "kebab-case")]
enum Word {
    /// Keep the descriptor that comes along.
    Put { name: String },
    /// Let go of it.
    Remove { name: String },
}

/// What a depot says to a daemon that comes, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "greeting", rename_all = "kebab-case")]
enum Greeting {
    /// In which way it speaks.
    Format { format: u32 },
    /// A descriptor that is kept comes along.
    Has { name: String },
    /// That was all.
    All,
}

/// A VM whose VMM lives while there is no daemon.
struct Orphan<P> {
    /// Of its descriptors.
    names: Vec<String>,
    /// Readable when the VMM has ended.
    process: P,
}

/// Keeps what the daemons give that come to `listener`, one after the other, until there is neither a daemon nor a VMM of one of their VMs. `process`
/// gives a descriptor of the process with this number that was started at this moment, if that lives, which is readable when it has ended.
///
/// # Errors
/// When nobody can be waited for.
pub fn keep<P: AsFd>(listener: &OwnedFd, process: impl Fn(i32, u64) -> Option<P>) -> io::Result<()> {
    let mut kept: BTreeMap<String, OwnedFd> = BTreeMap::new();
    let mut orphans: Vec<Orphan<P>> = Vec::new();
    let mut patience = Some(FIRST_PATIENCE);
    loop {
        let Some(daemon) = wait(listener, &mut kept, &mut orphans, patience.as_ref())? else { return Ok(()) };
        patience = None;
        // Whatever it says that is not understood: the next one is heard.
        let _ = attend(&daemon, &mut kept);
        drop(daemon);
        orphans = find_orphans(&kept, &process);
        let names: Vec<_> = orphans.iter().flat_map(|orphan| &orphan.names).collect();
        if names.is_empty() {
            return Ok(());
        }
        // The format, and where questions were asked, stay as long as anything does.
        kept.retain(|name, item| names.contains(&name) || vm_of(item).is_none());
    }
}

/// Waits for a daemon. Lets go of VMs whose VMMs end meanwhile. Nobody when there is none left, or nobody came in time.
fn wait<P: AsFd>(
    listener: &OwnedFd,
    kept: &mut BTreeMap<String, OwnedFd>,
    orphans: &mut Vec<Orphan<P>>,
    patience: Option<&Timespec>,
) -> io::Result<Option<Channel>> {
    loop {
        let (is_awaited, has_ended) = {
            let mut watched = vec![PollFd::new(listener, PollFlags::IN)];
            watched.extend(orphans.iter().map(|orphan| PollFd::new(&orphan.process, PollFlags::IN)));
            match poll(&mut watched, patience) {
                Ok(0) => return Ok(None),
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let ready: Vec<bool> = watched.iter().map(|one| !one.revents().is_empty()).collect();
            (ready[0], ready[1..].to_vec())
        };
        // First: a daemon finds nothing of a VM whose VMM had ended when it came.
        for orphan in std::mem::take(orphans).into_iter().zip(has_ended) {
            match orphan {
                (orphan, true) => orphan.names.iter().for_each(|name| drop(kept.remove(name))),
                (orphan, false) => orphans.push(orphan),
            }
        }
        if orphans.is_empty() && patience.is_none() {
            kept.clear();
            if !is_awaited {
                return Ok(None);
            }
        }
        if is_awaited {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(socket) => return Ok(Some(Channel::from(socket))),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Gives a daemon all that there is, and does what it says until it is gone.
fn attend(daemon: &Channel, kept: &mut BTreeMap<String, OwnedFd>) -> io::Result<()> {
    daemon.set_patience(PATIENCE)?;
    daemon.send(&Greeting::Format { format: FORMAT }, &[])?;
    for (name, descriptor) in &*kept {
        daemon.send(&Greeting::Has { name: name.clone() }, &[descriptor.as_fd()])?;
    }
    daemon.send(&Greeting::All, &[])?;
    while let Some((word, descriptors)) = daemon.receive::<Word>()? {
        match word {
            Word::Put { name } => {
                let descriptor = descriptors.into_iter().next();
                kept.extend(descriptor.map(|descriptor| (name, descriptor)));
            }
            Word::Remove { name } => drop(kept.remove(&name)),
        }
    }
    Ok(())
}

/// Of which VM an item is.
fn vm_of(item: &OwnedFd) -> Option<String> {
    let (item, _) = read(item).ok()?;
    Some(item.split_once('/')?.0.to_owned())
}

/// The VMs whose VMMs live.
fn find_orphans<P>(kept: &BTreeMap<String, OwnedFd>, process: impl Fn(i32, u64) -> Option<P>) -> Vec<Orphan<P>> {
    #[derive(Default)]
    struct Vm {
        names: Vec<String>,
        /// As the item says that was put in last.
        vmm: Option<(u64, String)>,
    }
    let mut vms: BTreeMap<String, Vm> = BTreeMap::new();
    for (name, descriptor) in kept {
        let Ok((item, found)) = read(descriptor) else { continue };
        let Some((vm, of)) = item.split_once('/') else { continue };
        let vm = vms.entry(vm.to_owned()).or_default();
        vm.names.push(name.clone());
        let number = name.strip_prefix(NAME).and_then(|number| number.parse().ok()).unwrap_or_default();
        if of == VMM && vm.vmm.as_ref().is_none_or(|(other, _)| *other < number) {
            vm.vmm = Some((number, String::from_utf8_lossy(&found.words).into_owned()));
        }
    }
    let orphan = |vm: Vm| {
        let (_, words) = vm.vmm?;
        let (pid, started) = words.split_once(' ')?;
        Some(Orphan { names: vm.names, process: process(pid.parse().ok()?, started.parse().ok()?)? })
    };
    vms.into_values().filter_map(orphan).collect()
}

#[cfg(test)]
mod tests;
