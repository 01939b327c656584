//! What the device threads of a VM tell: which VMM has connected, which pages are rings.
//!
//! One VMM at a time: protection belongs to one process's page tables, so a second process is turned away while the first
//! lives, whichever disk of the VM it asks for.

use super::watched::Watched;
use super::{cloud_hypervisor, qemu};
use crate::worker::Line;
use block_device::{Observer, Peer};
use guest_memory::{HandoverSocket, PageId, VmMemory, Welcome};
use placement::Journals;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use supervision::{Kept, Said};

/// What is left of a VM's patience when it is told to end.
pub const TERMINATION_PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a VMM's arguments.
const ARGUMENTS_BYTES_MAX: u64 = 1 << 20;

/// Under which is kept what a process has handed over, without its number.
const HANDED_OVER: &str = "handed over ";

/// Under which is kept what process `pid` has handed over, until it connects.
pub fn handed_over(pid: i32) -> String {
    format!("{HANDED_OVER}{pid}")
}

/// What processes have handed over to an earlier worker, by their numbers.
pub fn all_handed_over(kept: &mut Kept) -> HashMap<i32, OwnedFd> {
    let numbers = kept.all(HANDED_OVER).into_iter();
    numbers
        .filter_map(|(number, _)| Some((number.parse().ok()?, kept.take(&format!("{HANDED_OVER}{number}"))?.1)))
        .collect()
}

/// How long somebody is expected who has handed over: a VMM connects a moment later, or when it has made its memory.
const EXPECTED_WITHIN: Duration = Duration::from_secs(30);

/// The VMMs that have connected, by their numbers.
pub type Peers = BTreeMap<i32, Arc<Watched>>;

/// Who may hand over: nobody before the VM is served in a way in which the next worker serves it, nor once its VMM has ended. Whoever came then would
/// have the lock and the place for its memory of a directory that is given up.
#[derive(Default)]
pub struct Reception {
    /// What was started ends with us, and its directory with it: no VMM comes after the last one.
    is_for_one: bool,
    entry: Mutex<Entry>,
    peers: Mutex<Peers>,
}

#[derive(Default)]
struct Entry {
    is_open: bool,
    /// Who has handed over, and when.
    expected: BTreeMap<i32, Instant>,
}

impl Reception {
    /// Nobody may, yet.
    pub fn new(is_for_one: bool) -> Self {
        Reception { is_for_one, ..Reception::default() }
    }

    fn entry(&self) -> MutexGuard<'_, Entry> {
        self.entry.lock().expect("no panic under this lock")
    }

    /// Never held while somebody is waited for: who comes waits for it.
    pub fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().expect("no panic under this lock")
    }

    /// From now on, if a VMM can come.
    pub fn open(&self) {
        self.entry().is_open = true;
    }

    /// Who comes from now on tries again.
    pub fn close(&self) {
        self.entry().is_open = false;
    }

    /// An earlier worker has let that one in.
    pub fn expect(&self, pid: i32) {
        self.entry().expected.insert(pid, Instant::now());
    }

    /// Closes it unless somebody has handed over and is about to connect, who has what is here. Whether it is closed.
    pub fn close_if_nobody_comes(&self) -> bool {
        let mut entry = self.entry();
        let lives = |pid: i32| Watched::new(pid).is_some_and(|process| !process.wait(Duration::ZERO));
        entry.expected.retain(|pid, at| at.elapsed() < EXPECTED_WITHIN && lives(*pid));
        entry.is_open &= !entry.expected.is_empty();
        !entry.is_open
    }

    /// What becomes of process `pid`.
    pub fn welcome(&self, pid: i32) -> Welcome {
        let (is_known, others_live, all_gone) = {
            let peers = self.peers();
            let lives = |watched: &Watched| !watched.wait(Duration::ZERO);
            let others_live = peers.iter().any(|(other, watched)| *other != pid && lives(watched));
            (peers.contains_key(&pid), others_live, !peers.is_empty() && !peers.values().any(|watched| lives(watched)))
        };
        if others_live || (all_gone && self.is_for_one) {
            return Welcome::No;
        }
        let mut entry = self.entry();
        if !entry.is_open || (all_gone && !is_known) {
            return Welcome::Later;
        }
        entry.expected.insert(pid, Instant::now());
        Welcome::Yes
    }
}

/// What the device threads tell of a VM.
pub struct VmObserver {
    pub memory: Arc<VmMemory>,
    pub line: Arc<Line>,
    pub handover: HandoverSocket,
    /// Who may hand over, and who has connected.
    pub reception: Arc<Reception>,
    pub journals: Arc<Journals>,
    /// Its guest may come from elsewhere ([`super::migration`]).
    pub may_come: bool,
    /// The VMM is started by somebody else, who finds the sockets in this directory: what is wrong with its arguments is
    /// seen when it connects.
    pub strangers_at: Option<PathBuf>,
    pub ring_pages: Mutex<Vec<Vec<PageId>>>,
    /// Of each disk, what is known of its rings.
    pub rings: Mutex<Vec<Rings>>,
}

/// What is known of a disk's rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// A VMM has this disk.
    pub is_connected: bool,
    /// A driver uses them at this moment.
    pub are_started: bool,
    /// A driver has used them since the VMM connected.
    pub were_started: bool,
    /// Another worker could not go on with them, were this one to end.
    pub are_placeless: bool,
    /// Since when the VMM stands still, which wants them back, because storage has not answered.
    pub awaited_since: Option<Instant>,
}

impl Rings {
    /// The VMM has stopped what its guest's driver had started: it is paused, or its guest is being reset or has been shut down.
    pub fn are_paused(self) -> bool {
        self.were_started && !self.are_started
    }
}

impl VmObserver {
    fn connected(&self, peer: Peer) -> Result<(), String> {
        let mut peers = self.reception.peers();
        if peers.contains_key(&peer.pid) {
            return Ok(());
        }
        if self.strangers_at.is_some()
            && let Some(other) = peers.keys().next()
        {
            return Err(format!(
                "this VM is process {other}: while that lives, or what it was owed is brought home, process {} has to wait",
                peer.pid
            ));
        }
        if let Some((other, _)) = peers.iter().find(|(_, watched)| !watched.wait(Duration::ZERO)) {
            return Err(format!(
                "process {other} has disks of this VM, and process {} wants one: a VM is one process; end one of them",
                peer.pid
            ));
        }
        // Also of a VMM that we started: what we started may be a script that gives it more.
        let arguments = arguments_of(peer.pid);
        if let Some(reason) = arguments.as_ref().ok().and_then(|known| contradiction(known, self.may_come)) {
            return Err(reason);
        }
        // A backup that was put back, say: what was opened has no name any more, and all that a guest writes there would be gone with it.
        if let Some(disk) = self.journals.disks().iter().find(|disk| disk.is_replaced()) {
            return Err(format!(
                "{} is another file than the one that was opened for this VM; it is opened anew",
                disk.options.path.display()
            ));
        }
        if self.strangers_at.is_some() {
            let noted = self.journals.directory().note_vmm(peer.pid);
            noted.map_err(|error| format!("process {} cannot be noted: {error}", peer.pid))?;
        }
        // What it is owed goes home when it has ended.
        let watched = Watched::new(peer.pid).ok_or_else(|| {
            format!(
                "its process ({}) has ended, or cannot be watched from here: a VMM and amberlog have to see each other's processes (one \
                 namespace of process numbers)",
                peer.pid
            )
        })?;
        peers.insert(peer.pid, Arc::new(watched));
        let sockets = self.strangers_at.as_deref().unwrap_or_else(|| self.journals.directory().path());
        if let Some(reason) = bypasses_protection(arguments, sockets) {
            self.memory.refuse_protection(reason);
        }
        let started = placement::process_started_at(peer.pid).unwrap_or_default();
        self.keep("vmm", &format!("{} {started}", peer.pid), None);
        // Whoever comes next must not take it for a VM without a VMM.
        self.line.settle();
        match self.handover.take(peer.pid) {
            Some(descriptor) => {
                self.keep("userfaultfd", "", Some(descriptor.as_fd()));
                // Before any page is protected through it: without it, what is retained would be the guest's to write over.
                self.line.settle();
                self.forget(handed_over(peer.pid));
                if let Err(error) = self.memory.take_userfaultfd(descriptor) {
                    log::warn!("{error}");
                    self.forget("userfaultfd".to_owned());
                }
            }
            // The area says so when it matters, once.
            None if crate::shim::find().is_some() => self.memory.refuse_protection(format!(
                "the VMM (process {}) handed over no userfaultfd; it was started without the preloaded library, or lacks \
                 the permission (root, CAP_SYS_PTRACE, or sysctl vm.unprivileged_userfaultfd=1; and /proc/self/pagemap)",
                peer.pid
            )),
            None => {}
        }
        Ok(())
    }

    /// Has it kept for the next worker. If the supervisor is gone this one ends in the next moment.
    fn keep(&self, key: &str, data: &str, descriptor: Option<BorrowedFd<'_>>) {
        if let Err(error) = self.line.keep(key, data, descriptor) {
            log::debug!("having its {key} kept: {error}");
        }
    }

    fn forget(&self, key: String) {
        if let Err(error) = self.line.say(&Said::Forget { key }, &[]) {
            log::debug!("having something forgotten: {error}");
        }
    }

    fn ring_pages(&self, disk: usize, pages: &[PageId]) {
        {
            let rings = &mut self.rings.lock().expect("no panic under this lock")[disk];
            rings.are_started = !pages.is_empty();
            rings.were_started |= rings.are_started;
        }
        if self.strangers_at.is_some() && !pages.is_empty() {
            self.take_memory_away();
        }
        let mut all = self.ring_pages.lock().expect("no panic under this lock");
        all[disk] = pages.to_vec();
        let excluded: HashSet<PageId> = all.iter().flatten().copied().collect();
        self.journals.area.set_excluded_pages(excluded);
    }

    /// The VMM that connected has the file of its memory open: whoever opens that name from now on gets another file. A
    /// VMM that is started the moment this one has died would otherwise write over the pages that are retained in it.
    fn take_memory_away(&self) {
        if let Err(error) = self.journals.directory().take_memory_away(&self.memory) {
            self.memory.refuse_protection(error.to_string());
        }
    }

    /// What is known of the rings of each disk.
    pub fn rings(&self) -> Vec<Rings> {
        self.rings.lock().expect("no panic under this lock").clone()
    }

    /// The processes that have connected, and whether each has ended.
    pub fn vmms(&self) -> Vec<(i32, bool)> {
        let peers = self.reception.peers();
        peers.iter().map(|(pid, watched)| (*pid, watched.wait(Duration::ZERO))).collect()
    }

    /// Asks every VMM to end, and kills those that do not. Another user's may be out of reach: whoever calls looks whether one lives
    /// ([`Self::living`]) before anything of its memory or disks is taken.
    pub fn end_vmms(&self) {
        let peers = self.reception.peers().clone();
        let reached: Vec<i32> = peers
            .iter()
            .filter(|(_, watched)| watched.signal(rustix::process::Signal::TERM))
            .map(|(pid, _)| *pid)
            .collect();
        for (pid, watched) in &peers {
            if !reached.contains(pid) {
                log::error!("the VMM (process {pid}) is another user's, and may not be ended");
                continue;
            }
            if !watched.wait(TERMINATION_PATIENCE) {
                log::warn!("the VMM (process {pid}) did not end in {} s; it is killed", TERMINATION_PATIENCE.as_secs());
                watched.signal(rustix::process::Signal::KILL);
                if !watched.wait(TERMINATION_PATIENCE) {
                    log::error!("the VMM (process {pid}) cannot be ended");
                }
            }
        }
    }

    /// A VMM that lives.
    pub fn living(&self) -> Option<i32> {
        self.vmms().into_iter().find(|(_, has_ended)| !has_ended).map(|(pid, _)| pid)
    }

    /// The VMM may have been started by what was started: it has to be gone before anything is recovered.
    pub fn end_stragglers(&self) {
        let peers = self.reception.peers().clone();
        for (pid, watched) in &peers {
            if !watched.wait(Duration::from_millis(500)) {
                log::warn!("the VMM (process {pid}) outlived the command that started it; it is ended now");
                watched.signal(rustix::process::Signal::KILL);
                if !watched.wait(TERMINATION_PATIENCE) {
                    log::error!("the VMM (process {pid}) cannot be ended");
                }
            }
        }
    }
}

/// Why nothing is protected in the memory of a guest that was given a device.
pub fn passes_through(pid: i32) -> String {
    format!("the VMM (process {pid}) has a passed-through device now, which writes to guest memory without a fault")
}

/// A process's command line.
///
/// # Errors
/// Why it is not known: a VMM can say of itself that its arguments are all of its memory, or none.
pub fn arguments_of(pid: i32) -> Result<Vec<OsString>, String> {
    let unknown = |why: &str| format!("the arguments of the VMM (process {pid}) are not known: {why}");
    let mut bytes = Vec::new();
    std::fs::File::open(format!("/proc/{pid}/cmdline"))
        .and_then(|file| file.take(ARGUMENTS_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(|error| unknown(&error.to_string()))?;
    if bytes.is_empty() {
        return Err(unknown("they are empty"));
    }
    if bytes.len() as u64 > ARGUMENTS_BYTES_MAX {
        return Err(unknown("they are more than 1 MiB"));
    }
    Ok(bytes.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect())
}

/// What in a VMM's arguments contradicts what amberlog promises; a guest may come from elsewhere where that is asked for.
fn contradiction(arguments: &[OsString], may_come: bool) -> Option<String> {
    match arguments.first() {
        Some(program) if cloud_hypervisor::is_it(program) => cloud_hypervisor::contradiction(arguments),
        _ => qemu::contradiction(arguments, may_come),
    }
}

/// What keeps guest pages from being protected, in what is known of a VMM's arguments. Of arguments that are not known nothing can be said.
pub fn bypasses_protection(arguments: Result<Vec<OsString>, String>, sockets: &Path) -> Option<String> {
    match arguments {
        Ok(arguments) if arguments.first().is_some_and(|program| cloud_hypervisor::is_it(program)) => {
            cloud_hypervisor::bypasses_protection(&arguments, sockets)
        }
        Ok(arguments) if !qemu::is_known(&arguments) => {
            let program = arguments.first().map(|program| program.to_string_lossy().into_owned()).unwrap_or_default();
            Some(format!("the VMM ('{program}') is none that amberlog knows, so what it may take away is not seen"))
        }
        Ok(arguments) => qemu::bypasses_protection(&arguments, Some(sockets)),
        Err(reason) => Some(reason),
    }
}

/// The observer of one disk.
pub struct DiskObserver {
    pub vm: Arc<VmObserver>,
    pub disk: usize,
    /// The supervisor's number of it.
    pub door: usize,
}

impl Observer for DiskObserver {
    fn connected(&self, peer: Peer) -> Result<(), String> {
        self.vm.connected(peer)?;
        self.vm.rings.lock().expect("no panic under this lock")[self.disk].is_connected = true;
        Ok(())
    }

    fn ring_pages(&self, pages: &[PageId]) {
        self.vm.ring_pages(self.disk, pages);
    }

    fn can_be_followed(&self, can: bool) {
        self.vm.rings.lock().expect("no panic under this lock")[self.disk].are_placeless = !can;
    }

    fn began(&self) {
        let _ = self.vm.line.say(&Said::Began { disk: self.door }, &[]);
        // Whoever comes next must not take its driver for one that starts anew.
        self.vm.line.settle();
    }

    fn stands_still(&self, since: Option<Instant>) {
        self.vm.rings.lock().expect("no panic under this lock")[self.disk].awaited_since = since;
    }

    fn disconnected(&self, _peer: Peer) {
        self.vm.rings.lock().expect("no panic under this lock")[self.disk] = Rings::default();
    }

    fn fault(&self, sentence: &str) {
        self.vm.journals.disk(self.disk).note_fault(sentence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn who_hands_over_is_let_in_where_no_other_guest_is() {
        let mut reception = Reception::default();
        let me = std::process::id() as i32;
        assert_eq!(reception.welcome(me), Welcome::Later, "it is not served yet");
        reception.open();
        assert_eq!(reception.welcome(me), Welcome::Yes);
        assert!(!reception.close_if_nobody_comes(), "it is about to connect");
        let mut vmm = Command::new("sleep").arg("60").spawn().expect("started");
        let pid = vmm.id() as i32;
        reception.peers().insert(pid, Arc::new(Watched::new(pid).expect("it lives")));
        // A program that the VMM starts; the VMM itself, become another program.
        assert_eq!([reception.welcome(me), reception.welcome(pid)], [Welcome::No, Welcome::Yes]);
        reception.close();
        assert_eq!(reception.welcome(me), Welcome::No, "while another worker takes the VMM up, too");
        reception.open();
        vmm.kill().expect("killed");
        assert!(reception.peers()[&pid].wait(TERMINATION_PATIENCE));
        assert_eq!(reception.welcome(me), Welcome::Later, "what it is owed goes home first");
        reception.is_for_one = true;
        assert_eq!(reception.welcome(me), Welcome::No, "nothing comes after it");
        reception.is_for_one = false;
        vmm.wait().expect("waited for");
        reception.peers().clear();
        reception.entry().expected.remove(&me);
        assert!(reception.close_if_nobody_comes(), "who was let in has ended");
        assert_eq!(reception.welcome(me), Welcome::Later);
        reception.open();
        reception.expect(me);
        assert!(!reception.close_if_nobody_comes(), "an earlier worker has let it in");
    }

    #[test]
    fn arguments_that_are_not_known_keep_pages_from_being_protected() {
        let own = arguments_of(std::process::id().cast_signed());
        assert!(own.as_ref().is_ok_and(|words| words[0] == std::env::args_os().next().unwrap_or_default()), "{own:?}");
        let reason = bypasses_protection(own, Path::new("/"));
        assert!(reason.is_some_and(|reason| reason.contains("none that amberlog knows")));
        let qemu = Ok(["/usr/bin/qemu-system-x86_64", "-m", "1G", ""].map(OsString::from).to_vec());
        assert_eq!(bypasses_protection(qemu, Path::new("/")), None);
        // As many as Linux takes, at least.
        let word = "x".repeat(120_000);
        let mut child = Command::new("sh")
            .args(["-c", "echo; read line"])
            .args(std::iter::repeat_n(&word, 10))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        // Before that it may be nobody yet.
        child.stdout.take().expect("a pipe").read_exact(&mut [0; 1]).expect("it runs");
        let pid = child.id().cast_signed();
        let many = arguments_of(pid);
        drop(child.stdin.take());
        assert!(
            many.as_ref().is_err_and(|reason| reason.contains("more than 1 MiB")),
            "{:?}",
            many.map(|all| all.len())
        );
        assert!(bypasses_protection(many, Path::new("/")).is_some());
        // It has ended, and nobody has asked how: there are no arguments.
        let is_over = || std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|bytes| bytes.is_empty());
        while !is_over() {
            std::thread::yield_now();
        }
        assert!(arguments_of(pid).is_err_and(|reason| reason.contains("empty")));
        child.wait().expect("it has ended");
        assert!(arguments_of(pid).is_err_and(|reason| reason.contains("not known")));
    }

    #[test]
    fn rings_that_a_driver_has_left_are_paused() {
        let rings = |are_started, were_started| {
            Rings { is_connected: true, are_started, were_started, ..Rings::default() }.are_paused()
        };
        assert!(rings(false, true));
        assert!(!rings(true, true), "the guest runs");
        assert!(!rings(false, false), "no driver has used them yet");
    }
}
