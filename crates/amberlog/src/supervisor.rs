//! What a supervisor keeps for the worker of one VM: descriptors, and the doors at which its VMM finds its disks.

pub mod place;

use crate::vm::change::IMAGE;
use crate::vm::watched::Watched;
use crate::worker::Worker;
use front_door::{Admission, Door, is_disk_name};
use place::Place;
use rustix::net::SendFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use supervision::{Channel, DOOR, Kept, Order, Said, Shelf};

/// Doors of one VM: as many as a VMM has disks at most.
const DOORS_MAX: usize = 256;
/// Messages of a worker that is dying already.
const MISUNDERSTOOD_MAX: u32 = 1000;
/// How long a worker may take to end after its last word.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Where on a VM's shelf is what its workers have had kept.
const KEPT: &str = "kept";
/// And where its doors are, each by its disk's number.
const DOORS: &str = "doors";

/// Under which is kept that no worker is to go on, with how the last one ended.
const HELD: &str = "held";

/// See the module.
#[derive(Default)]
pub struct Charge {
    kept: Kept,
    doors: BTreeMap<usize, Door>,
    doors_shelf: Shelf,
    /// In what way it is kept, where that is not this program's.
    foreign: Option<String>,
    /// Processes that have come to its doors, as the kernel says: a worker may say anything.
    came: Arc<Mutex<BTreeSet<i32>>>,
    /// There was a supervisor before this one, which saw others.
    is_inherited: bool,
    /// For whoever looks whether the VM's directory is still there.
    place: Arc<Place>,
}

/// Under which a worker has its VM's directory kept, with its lock.
const DIRECTORY: &str = "directory";

impl Charge {
    /// What a supervisor before this one had on this shelf, and what this one will.
    pub fn on(mut shelf: Shelf) -> Self {
        let mut kept = Kept::on(shelf.split(KEPT));
        if kept.data(crate::worker::SERVED).is_none() && !kept.is_doubtful() {
            // It had got nowhere: what it left is finished as what any process leaves.
            kept.clear();
        }
        let mut charge = Charge { kept, doors_shelf: shelf.split(DOORS), ..Charge::default() };
        charge.is_inherited = charge.is_served() || charge.kept.is_doubtful();
        for disk in charge.doors_shelf.parts() {
            let mut shelf = charge.doors_shelf.split(&disk);
            let Some(number) = disk.parse().ok().filter(|_| charge.is_served()) else {
                shelf.clear();
                continue;
            };
            let kept = &charge.kept;
            match Door::found(shelf, |name| kept.data(&format!("{DOOR}{name}")) == Some(disk.as_str())) {
                Ok(door) => charge.doors.extend(door.map(|door| (number, door))),
                Err(error) => log::error!("the door of disk {disk} cannot be opened again: {error}"),
            }
        }
        // What is not understood is nobody's.
        charge.doors_shelf.clear();
        shelf.clear();
        charge.note_place();
        charge
    }

    /// Where the VM's directory is.
    pub fn place(&self) -> Arc<Place> {
        Arc::clone(&self.place)
    }

    fn note_place(&self) {
        let path = self.kept.data(DIRECTORY).map(Path::new);
        self.place.set(path.zip(self.kept.descriptor(DIRECTORY)));
    }

    /// Of a VM of which there is what a program with another `format` had kept.
    pub fn of_another_program(format: &str) -> Self {
        Charge { foreign: Some(format.to_owned()), ..Charge::default() }
    }

    /// Why no worker may go on with it, if none may.
    pub fn doubt(&self) -> Option<String> {
        if let Some(format) = &self.foreign {
            let format = if format.is_empty() { "an earlier amberlog" } else { format };
            return Some(format!(
                "what an earlier daemon had kept of it is kept as {format} does it, and not as this one ({}): install that one again and start \
                 it, or end the VMM and stop the daemon",
                crate::worker::store_format()
            ));
        }
        self.kept.is_doubtful().then(|| {
            "what an earlier daemon had kept of it is not all that it had given, or not what it had given last (is \
             FileDescriptorStoreMax= too low?): end its VMM, and what it is owed is brought home"
                .to_owned()
        })
    }

    /// Tells a worker what the one before it had kept, and that it may begin.
    ///
    /// # Errors
    /// When it is gone.
    pub fn tell(&mut self, worker: &Channel) -> io::Result<()> {
        self.kept.forget(HELD);
        self.doors.retain(|_, door| !door.is_shut());
        // A number is worth nothing without the door of that very disk.
        let door = |number: &str| self.doors.get(&number.parse().ok()?);
        self.kept.retain(DOOR, |disk, number| door(number).is_some_and(|door| door.name() == disk));
        self.kept.tell(worker)
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty() && self.doors.is_empty() && self.doubt().is_none()
    }

    /// Whether a guest may be in the midst of it: the next worker goes on with it.
    pub fn is_served(&self) -> bool {
        self.kept.data(crate::worker::SERVED).is_some()
    }

    /// The VMM that has connected, and when it was started.
    fn vmm(&self) -> Option<(i32, u64)> {
        let (pid, started) = self.kept.data("vmm")?.split_once(' ')?;
        Some((pid.parse().ok()?, started.parse().ok()?))
    }

    /// No worker goes on with it until somebody has looked, whoever is the supervisor then.
    pub fn hold(&mut self, how: &str) {
        if self.is_served()
            && let Err(error) = self.kept.put(HELD.to_owned(), how.to_owned())
        {
            log::warn!("that no worker goes on is not kept over the death of this process: {error}");
        }
    }

    /// How the last worker ended, where none is to go on.
    pub fn held(&self) -> Option<&str> {
        self.kept.data(HELD)
    }

    /// Whether disks came or went, and no worker has gone on with them yet.
    pub fn is_changing(&self) -> bool {
        self.kept.data(crate::worker::CONFIG_BEFORE).is_some()
    }

    /// Whether the VMM that had connected is gone.
    pub fn vmm_has_ended(&self) -> bool {
        let is_known = self.vmm().is_some() || self.kept.is_doubtful();
        is_known && self.foreign.is_none() && self.living_vmm().is_none()
    }

    /// The process of the VMM that has connected, if it lives. Where it is doubtful what is kept, one that has asked for disks.
    pub fn living_vmm(&self) -> Option<i32> {
        let lives = |(pid, started): &(i32, u64)| placement::process_lives(*pid, *started);
        if let Some((pid, _)) = self.vmm().filter(lives) {
            return Some(pid);
        }
        let directory = self.kept.data(DIRECTORY).filter(|_| self.kept.is_doubtful())?;
        match placement::living_vmms(Path::new(directory)) {
            Ok(vmms) => vmms.first().copied(),
            Err(error) => {
                // Nobody takes the directory over while a VMM has it.
                log::error!("whether a VMM lives cannot be seen: {error}");
                None
            }
        }
    }

    /// Whether a process has come to one of its doors, so that it is one of this VM's.
    pub fn has_come(&self, pid: i32) -> bool {
        self.is_inherited || self.came.lock().expect("no panic under this lock").contains(&pid)
    }

    fn admission(&self, channel: &Arc<Channel>, disk: usize) -> Way {
        Way { channel: Arc::clone(channel), disk, came: Arc::clone(&self.came) }
    }

    /// The VM's directory in tmpfs, where a guest was served from it.
    pub fn directory(&self) -> Option<PathBuf> {
        self.kept.data(DIRECTORY).filter(|_| self.is_served() || self.kept.is_doubtful()).map(PathBuf::from)
    }

    /// Does what the worker at the other end of `channel` has said.
    pub fn hear(&mut self, said: &Said, descriptors: Vec<OwnedFd>, channel: &Arc<Channel>) {
        match said {
            Said::Door { disk, name } => {
                let listener = descriptors.into_iter().next();
                if !is_disk_name(name) {
                    log::error!("disk {disk}: its door is not opened: no disk is called {name:?}");
                    return;
                }
                if self.has_open(*disk, name) {
                    self.move_door(*disk, listener, channel);
                    return;
                }
                // The one before, if there was one, has gone before its place is taken.
                self.doors.remove(disk);
                self.kept.retain(DOOR, |_, number| number.parse() != Ok(*disk));
                if self.doors.len() >= DOORS_MAX {
                    log::error!("disk {name}: its door is not opened: there are {DOORS_MAX} for this VM");
                    return;
                }
                // Without its door the number counts for nothing; a door without its number would be nobody's.
                if let Err(error) = self.kept.put(format!("{DOOR}{name}"), disk.to_string()) {
                    log::error!("disk {name}: its door is not opened: {error}");
                    return;
                }
                let shelf = self.doors_shelf.split(&disk.to_string());
                let opened = listener
                    .ok_or_else(|| io::Error::other("its socket did not come along"))
                    .and_then(|listener| Door::open(UnixListener::from(listener), name, shelf));
                match opened {
                    Ok(door) => {
                        door.worker(self.admission(channel, *disk));
                        self.doors.insert(*disk, door);
                    }
                    Err(error) => {
                        log::error!("disk {name}: its door cannot be opened: {error}");
                        // The next worker makes it anew, and does not take it for one that is open.
                        self.kept.forget(&format!("{DOOR}{name}"));
                    }
                }
            }
            Said::Open { disk } => match self.doors.get(disk) {
                Some(door) => door.worker(self.admission(channel, *disk)),
                None => log::error!("disk {disk} has no door any more: no VMM finds it; end the VM's VMM"),
            },
            Said::Began { disk } => {
                if let Some(door) = self.doors.get(disk) {
                    door.began();
                }
            }
            Said::Shut { disk } => match self.doors.get(disk).filter(|door| !door.is_shut()) {
                Some(door) => door.shut(),
                None => self.admission(channel, *disk).shut(true),
            },
            Said::Settle => {
                // Whatever came along: it is not waited for.
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                if let Some(told) = descriptors.first()
                    && let Err(error) = rustix::net::send(told, &[1], flags)
                {
                    log::debug!("telling a worker that all was done: {error}");
                }
            }
            Said::Forget { key } => {
                if key.starts_with(IMAGE)
                    && let Some((_, image)) = self.kept.take(key)
                {
                    // Whoever else has it still, as a service manager for a moment: it is nobody's from now on.
                    block_device::unlock_image(&image.into());
                }
                self.kept.forget(key);
            }
            Said::Clear => self.clear(),
            Said::Keep { .. } | Said::Ready => match self.kept.heard(said, descriptors) {
                Ok(_) => {}
                Err(error) => log::error!("what the worker wants kept cannot be: {error}"),
            },
        }
        if matches!(said, Said::Keep { key, .. } | Said::Forget { key } if key == DIRECTORY) {
            self.note_place();
        }
    }

    fn has_open(&self, disk: usize, name: &str) -> bool {
        self.doors.get(&disk).is_some_and(|door| door.name() == name && door.is_open())
    }

    /// Has the door of a disk listen at another socket. The VMM that is inside stays there: it may be none that connects again.
    fn move_door(&self, disk: usize, listener: Option<OwnedFd>, channel: &Arc<Channel>) {
        let Some(door) = self.doors.get(&disk) else { return };
        let listener = listener.ok_or_else(|| io::Error::other("its socket did not come along"));
        if let Err(error) = listener.and_then(|listener| door.listen_at(listener.into())) {
            log::error!("disk {}: its door cannot be opened: {error}", door.name());
        }
        door.worker(self.admission(channel, disk));
    }

    /// Does what a worker says until it is gone. Says how it ended; what it had said last was heard before.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn hear_to_the_end(&mut self, worker: &mut Worker) -> io::Result<ExitStatus> {
        let channel = Arc::clone(&worker.channel);
        let mut misunderstood = 0;
        loop {
            match channel.receive::<Said>() {
                Ok(Some((said, descriptors))) => self.hear(&said, descriptors, &channel),
                Ok(None) => break,
                Err(error) => {
                    // Nobody can rely on what it says any more. What it says while it dies may still be understood.
                    if misunderstood == 0 {
                        log::error!("what a worker says is not understood, so it is ended: {error}");
                        worker.kill();
                    }
                    misunderstood += 1;
                    if misunderstood > MISUNDERSTOOD_MAX {
                        break;
                    }
                }
            }
        }
        // The doors stay.
        self.doors.values().for_each(Door::worker_gone);
        // It is about to end, or has only said that it has nothing more to say: an empty message reads like the end.
        if Watched::new(worker.pid() as i32).is_some_and(|process| !process.wait(ENDS_WITHIN)) {
            log::error!("a worker says nothing any more and does not end: it is ended");
            worker.kill();
        }
        worker.wait()
    }

    /// Lets go of everything.
    pub fn clear(&mut self) {
        // First: without this nothing of the rest counts.
        self.kept.clear();
        self.doors.clear();
        self.note_place();
    }
}

/// How a door gives its connections to the worker.
struct Way {
    channel: Arc<Channel>,
    disk: usize,
    came: Arc<Mutex<BTreeSet<i32>>>,
}

impl Admission for Way {
    fn admit(&self, connection: OwnedFd, pid: i32) -> io::Result<()> {
        // Before the worker can say that it is the VMM.
        self.came.lock().expect("no panic under this lock").insert(pid);
        self.channel.send(&Order::Connection { disk: self.disk, pid }, &[connection.as_fd()])
    }

    fn give_up(&self) {
        self.channel.end();
    }

    fn shut(&self, is_shut: bool) {
        // Who asked may be gone.
        let _ = self.channel.send(&Order::Shut { disk: self.disk, is_shut }, &[]);
    }
}

#[cfg(test)]
mod tests;
