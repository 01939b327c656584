use super::*;
use crate::vault::{Opened, Shelf, Store};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

const LIMIT: Duration = Duration::from_secs(30);

/// What nobody can see.
const UNSEEN: u32 = 1000;

/// What another program does at the socket of a depot.
type Strange = Box<dyn FnOnce(&OwnedFd) + Send>;

/// Processes by number, and a place for depots, which are threads here.
#[derive(Clone)]
struct World {
    directory: Arc<tempfile::TempDir>,
    /// Of each its own end of a pipe, and the other one.
    processes: Arc<Mutex<BTreeMap<i32, (OwnedFd, OwnedFd)>>>,
    depots: Arc<Mutex<Vec<JoinHandle<()>>>>,
    /// The next depots do this in the place of what a depot does.
    next: Arc<Mutex<Vec<Strange>>>,
    /// Of whoever comes.
    fence: Arc<AtomicU32>,
    /// Whether a process lives cannot be seen.
    is_blind: Arc<AtomicBool>,
    started: Arc<AtomicUsize>,
    /// Of the daemon that came last.
    last: Arc<Mutex<Weak<InDepot>>>,
}

struct Shared(Arc<InDepot>);

impl Store for Shared {
    fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.0.put(name, descriptor)
    }

    fn remove(&self, name: &str) {
        self.0.remove(name);
    }
}

impl World {
    fn new() -> Self {
        World {
            directory: Arc::new(tempfile::tempdir().expect("a directory")),
            processes: Arc::default(),
            depots: Arc::default(),
            next: Arc::default(),
            fence: Arc::new(AtomicU32::new(3)),
            is_blind: Arc::default(),
            started: Arc::default(),
            last: Arc::default(),
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("store.sock")
    }

    fn begin(&self, pid: i32) {
        let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
        self.processes.lock().expect("no panic").insert(pid, pipe);
    }

    fn end(&self, pid: i32) {
        self.processes.lock().expect("no panic").remove(&pid).expect("it lived");
    }

    fn start(&self) -> Start {
        let world = self.clone();
        Box::new(move |listener| {
            world.started.fetch_add(1, Ordering::SeqCst);
            let strange = world.next.lock().expect("no panic").pop();
            let of_depot = world.clone();
            let depot = std::thread::spawn(move || match strange {
                Some(strange) => strange(&listener),
                None => keep(&listener, &of_depot).expect("it waits"),
            });
            world.depots.lock().expect("no panic").push(depot);
            Ok(())
        })
    }

    /// A daemon comes.
    fn daemon(&self) -> (Shelf, BTreeSet<String>) {
        let taken = InDepot::take(&self.path(), self.start()).expect("a depot");
        let opened = taken.map(|depot| {
            let depot = Arc::new(depot);
            *self.last.lock().expect("no panic") = Arc::downgrade(&depot);
            Box::new(Shared(depot))
        });
        let Opened::Ours(shelf) = opened else { panic!("it is ours") };
        let parts = shelf.parts();
        (shelf, parts)
    }

    /// Whether another depot is there, and was given all.
    fn is_followed(&self) -> bool {
        self.started() > 1 && self.last.lock().expect("no panic").upgrade().is_some_and(|depot| depot.is_attended())
    }

    fn started(&self) -> usize {
        self.started.load(Ordering::SeqCst)
    }

    /// Waits until no depot is there.
    fn await_no_depot(&self) {
        for depot in std::mem::take(&mut *self.depots.lock().expect("no panic")) {
            let deadline = Instant::now() + LIMIT;
            while !depot.is_finished() {
                assert!(Instant::now() < deadline, "a depot does not end");
                std::thread::sleep(Duration::from_millis(1));
            }
            depot.join().expect("no panic");
        }
    }
}

impl Host for World {
    type Process = OwnedFd;

    fn process(&self, pid: i32, started: u64) -> io::Result<Option<OwnedFd>> {
        if self.is_blind.load(Ordering::SeqCst) {
            return Err(io::Error::other("no descriptor is left"));
        }
        let processes = self.processes.lock().expect("no panic");
        Ok(processes.get(&pid).filter(|_| started == 7).map(|(it, _)| it.try_clone().expect("a descriptor")))
    }

    fn fence(&self, pid: i32) -> Option<u32> {
        assert_eq!(pid, std::process::id().cast_signed());
        let fence = self.fence.load(Ordering::SeqCst);
        (fence < UNSEEN).then_some(fence)
    }
}

/// Somebody who has come.
fn accepted(listener: &OwnedFd) -> Channel {
    loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            other => return Channel::from(other.expect("somebody")),
        }
    }
}

/// Hears a daemon to its greeting.
fn greeted(listener: &OwnedFd) -> Channel {
    let daemon = accepted(listener);
    Message::receive(&daemon).expect("heard").expect("a daemon");
    Message::Depot { format: FORMAT, pid: i32::MAX }.send(&daemon, &[]).expect("said");
    Message::All.send(&daemon, &[]).expect("said");
    daemon
}

/// Dies after so many words.
fn dies_after(words: usize) -> Strange {
    Box::new(move |listener| {
        let daemon = greeted(listener);
        for _ in 0..words {
            let _ = Message::receive(&daemon);
        }
    })
}

fn file() -> OwnedFd {
    memfd_create("kept", MemfdFlags::CLOEXEC).expect("a file")
}

fn vm(shelf: &mut Shelf, name: &str, vmm: Option<i32>) -> Shelf {
    let mut kept = shelf.split(name).split("kept");
    kept.put("memory", b"ram", &[file().as_fd()]);
    if let Some(pid) = vmm {
        kept.put("vmm", format!("{pid} 7").as_bytes(), &[]);
    }
    kept
}

fn names(parts: &BTreeSet<String>) -> Vec<&str> {
    parts.iter().map(String::as_str).collect()
}

#[test]
fn what_a_living_vmm_has_outlives_daemons_and_nothing_else_does() {
    let world = World::new();
    [1, 2].into_iter().for_each(|pid| world.begin(pid));
    let (mut shelf, found) = world.daemon();
    assert!(found.is_empty());
    let mut kept: Vec<_> = [("a", Some(1)), ("b", Some(2)), ("c", None), ("d", Some(3))]
        .map(|(name, vmm)| vm(&mut shelf, name, vmm))
        .into();
    // Two of its words are in the store for a moment, and the later one counts.
    kept[0].put("vmm", b"2 7", &[]);
    kept[0].put("vmm", b"1 7", &[]);
    drop((shelf, kept));
    let (mut shelf, found) = world.daemon();
    assert_eq!((names(&found), world.started()), (vec!["a", "b"], 1));
    for name in ["a", "b"] {
        let mut kept = shelf.split(name).split("kept");
        assert!(kept.is_whole(), "{name}");
        let found = kept.take_found();
        assert_eq!((found["memory"].words.as_slice(), found["memory"].descriptors.len()), (&b"ram"[..], 1));
    }
    drop(shelf);
    // With one that ends, only its own goes; with the last one the depot does.
    world.end(1);
    let (shelf, found) = world.daemon();
    assert_eq!((names(&found), world.started()), (vec!["b"], 1));
    drop(shelf);
    world.end(2);
    world.await_no_depot();
    let (shelf, found) = world.daemon();
    assert_eq!((names(&found), world.started()), (vec![], 2));
    drop(shelf);
    world.await_no_depot();
}

/// It has the lock of the VM's directory, and waits for its disks: who comes next goes on with the VM, or nobody could begin it anew.
#[test]
fn what_a_vmm_has_handed_over_that_has_not_connected_yet_outlives_daemons() {
    let world = World::new();
    [1, 2].into_iter().for_each(|pid| world.begin(pid));
    let (mut shelf, _) = world.daemon();
    let mut kept: Vec<_> = ["a", "b", "c"].map(|name| vm(&mut shelf, name, None)).into();
    kept[0].put("handed over 1", b"7", &[]);
    // Another one has its number by now; and one of which nothing is known but that.
    kept[1].put("handed over 2", b"6", &[]);
    kept[2].put("handed over 2", b"", &[]);
    // A program that is no VMM was started with the library, too.
    kept[0].put("handed over 2", b"7", &[]);
    drop((shelf, kept));
    for ends in [1, 2] {
        let (shelf, found) = world.daemon();
        assert_eq!((names(&found), world.started()), (vec!["a"], 1));
        drop(shelf);
        world.end(ends);
    }
    world.await_no_depot();
}

/// A daemon that dies between the two leaves both.
#[test]
fn of_two_words_about_a_vmm_the_later_one_counts() {
    let world = World::new();
    world.begin(1);
    let stored = |pid: i32| Stored {
        item: "a/kept/vmm".to_owned(),
        words: format!("{pid} 7").into_bytes(),
        descriptors: Vec::new(),
    };
    for (earlier, later, count) in [(1, 2, 0), (2, 1, 2)] {
        let kept = [("amberlog-9", earlier), ("amberlog-10", later)];
        let kept = kept.map(|(name, pid)| (name.to_owned(), stored(pid))).into();
        let mut depot = Depot { kept, orphans: Vec::new(), closing: Closing::default() };
        depot.find_orphans(&world);
        assert_eq!((depot.orphans.len(), depot.kept.len()), (count / 2, count));
    }
}

/// It ends at the very moment at which the next daemon comes.
#[test]
fn a_daemon_finds_nothing_of_a_vmm_that_has_ended_before_it_came() {
    for _ in 0..20 {
        let world = World::new();
        world.begin(1);
        let (mut shelf, _) = world.daemon();
        let kept = vm(&mut shelf, "a", Some(1));
        drop((shelf, kept));
        world.end(1);
        let (shelf, found) = world.daemon();
        assert!(found.is_empty(), "{found:?}");
        drop(shelf);
        world.await_no_depot();
    }
}

#[test]
fn what_a_daemon_lets_go_of_is_gone_when_it_has_ended() {
    let world = World::new();
    world.begin(1);
    let (mut shelf, _) = world.daemon();
    let mut kept = vm(&mut shelf, "a", Some(1));
    // On a disk, where closing has its own thread.
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    let lock = |number: usize| {
        let file = std::fs::File::create(directory.path().join(number.to_string())).expect("a file");
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map(|()| file)
    };
    for number in 0..300 {
        kept.put(&format!("lock {number}"), b"", &[lock(number).expect("nobody's").as_fd()]);
    }
    assert!(lock(0).is_err() && lock(299).is_err());
    kept.clear();
    shelf.clear();
    drop((kept, shelf));
    (0..300).for_each(|number| drop(lock(number).expect("nobody has it any more")));
    world.await_no_depot();
}

/// A depot is killed under its daemon: the next one has what that one had, what was said meanwhile, too.
#[test]
fn a_depot_that_dies_is_followed_by_one_that_has_all() {
    for words in [0, 1, 2, 3, 5, 8] {
        let world = World::new();
        world.begin(1);
        world.next.lock().expect("no panic").push(dies_after(words));
        let (mut shelf, _) = world.daemon();
        let mut kept = vm(&mut shelf, "a", Some(1));
        let deadline = Instant::now() + LIMIT;
        kept.put("more", b"said to the one that dies, or after", &[]);
        while !world.is_followed() {
            assert!(Instant::now() < deadline, "no other one is started");
            kept.put("more", b"said while nobody, or somebody, is there", &[]);
            std::thread::sleep(Duration::from_millis(1));
        }
        kept.put("last", b"said to the other one, or before it was there", &[file().as_fd()]);
        drop((shelf, kept));
        let (mut shelf, found) = world.daemon();
        assert_eq!((names(&found), world.started()), (vec!["a"], 2), "after {words} words");
        let mut kept = shelf.split("a").split("kept");
        assert!(kept.is_whole(), "after {words} words");
        assert_eq!(kept.take_found().into_keys().collect::<Vec<_>>(), ["last", "memory", "more", "vmm"]);
        drop((shelf, kept));
        world.end(1);
        world.await_no_depot();
    }
}

#[test]
fn what_hears_there_and_is_no_depot_of_ours_is_not_taken_for_one() {
    let item = Message::Item { name: "x".into(), item: "y".into(), words: Vec::new() };
    for greeting in [Message::Depot { format: FORMAT + 1, pid: 1 }, Message::All, item] {
        let world = World::new();
        let socket = attended::listen(&world.path()).expect("it hears");
        let answers = std::thread::spawn(move || {
            let daemon = accepted(&socket);
            greeting.send(&daemon, &[]).expect("said");
            while Message::receive(&daemon).is_ok_and(|said| said.is_some()) {}
        });
        let never = || -> Start { Box::new(|_| panic!("somebody is there")) };
        let error = InDepot::take(&world.path(), never()).map(drop).expect_err("it is not ours");
        assert!(error.to_string().contains("another program's"), "{error}");
        answers.join().expect("no panic");
    }
}

/// A depot that another daemon has, and one that hears nobody: a daemon does not wait for ever, and does not start another one in its place.
#[test]
fn a_depot_that_does_not_answer_is_said() {
    let world = World::new();
    let (shelf, _) = world.daemon();
    let never = || -> Start { Box::new(|_| panic!("somebody is there")) };
    let error = InDepot::take(&world.path(), never()).map(drop).expect_err("it has another one");
    assert!(error.to_string().contains("has another daemon"), "{error}");
    drop(shelf);
    world.await_no_depot();
    let silent = attended::listen(&world.path()).expect("it hears");
    let error = InDepot::find(&world.path(), never()).map(drop).expect_err("nobody answers");
    assert!(error.to_string().contains("does not answer"), "{error}");
    drop(silent);
    assert!(InDepot::find(&world.path(), never()).expect("nobody").is_none());
}

/// Whoever comes and says nothing, or is not let in, keeps no daemon waiting, and gets nothing.
#[test]
fn who_is_no_daemon_gets_nothing() {
    let world = World::new();
    world.begin(1);
    let (mut shelf, _) = world.daemon();
    let kept = vm(&mut shelf, "a", Some(1));
    drop((shelf, kept));
    let silent: Vec<_> = (0..2).map(|_| attended::connect(&world.path()).expect("it hears")).collect();
    let is_refused = |fence: u32| {
        world.fence.store(fence, Ordering::SeqCst);
        let fenced = attended::connect(&world.path()).expect("it hears");
        let _ = Message::Daemon { format: FORMAT }.send(&fenced, &[]);
        fenced.set_hearing_patience(Some(LIMIT)).expect("set");
        assert_eq!(Message::receive(&fenced).expect("heard").map(|(said, _)| said), Some(Message::Refused));
    };
    is_refused(4);
    is_refused(UNSEEN);
    let never: Start = Box::new(|_| panic!("somebody is there"));
    let error = InDepot::take(&world.path(), never).map(drop).expect_err("it is not heard");
    assert!(error.to_string().contains("is fenced in further"), "{error}");
    // One that is less so is, and from then on counts what it has.
    world.fence.store(1, Ordering::SeqCst);
    let _silent = attended::connect(&world.path()).expect("it hears");
    let (shelf, found) = world.daemon();
    assert_eq!(names(&found), ["a"]);
    for silent in silent {
        silent.set_hearing_patience(Some(LIMIT)).expect("set");
        let said = Message::receive(&silent).ok().flatten().map(|(said, _)| said);
        assert!(matches!(said, None | Some(Message::Refused)), "it is given {said:?}");
    }
    drop(shelf);
    is_refused(2);
    world.end(1);
    world.await_no_depot();
}

/// What it is told stays unread: another one is in its place, with all of it, and nobody has waited for longer than a moment's patience.
#[test]
fn a_depot_that_hangs_is_replaced() {
    let world = World::new();
    world.begin(1);
    let (let_go, waits) = std::sync::mpsc::channel::<()>();
    world.next.lock().expect("no panic").push(Box::new(move |listener| {
        let _daemon = greeted(listener);
        let _ = waits.recv_timeout(LIMIT);
    }));
    let (mut shelf, _) = world.daemon();
    let mut kept = vm(&mut shelf, "a", Some(1));
    let begun = Instant::now();
    while !world.is_followed() {
        assert!(begun.elapsed() < LIMIT, "it is not replaced");
        kept.put("more", &[0; 16 << 10], &[]);
    }
    drop((shelf, kept));
    drop(let_go);
    let (mut shelf, found) = world.daemon();
    assert_eq!((names(&found), world.started()), (vec!["a"], 2));
    let kept = shelf.split("a").split("kept");
    assert!(kept.is_whole());
    drop((shelf, kept));
    world.end(1);
    world.await_no_depot();
}

/// What cannot be seen to have ended has not.
#[test]
fn a_vmm_that_cannot_be_seen_keeps_what_it_has() {
    let world = World::new();
    world.begin(1);
    world.is_blind.store(true, Ordering::SeqCst);
    let (mut shelf, _) = world.daemon();
    let kept = vm(&mut shelf, "a", Some(1));
    drop((shelf, kept));
    std::thread::sleep(LOOK * 2);
    let (shelf, found) = world.daemon();
    assert_eq!((names(&found), world.started()), (vec!["a"], 1));
    drop(shelf);
    world.end(1);
    std::thread::sleep(LOOK);
    world.is_blind.store(false, Ordering::SeqCst);
    world.await_no_depot();
}

/// Where put in and taken out again and again, nothing is left over.
#[test]
fn a_store_in_a_depot_does_as_it_is_told() {
    let world = World::new();
    world.begin(1);
    let (mut shelf, _) = world.daemon();
    let mut kept = vm(&mut shelf, "a", Some(1));
    for number in 0..200_u32 {
        kept.put(&format!("item {}", number % 7), &number.to_le_bytes(), &[file().as_fd()]);
        if number % 5 == 0 {
            kept.remove(&format!("item {}", number % 3));
        }
    }
    drop((shelf, kept));
    let (mut shelf, _) = world.daemon();
    let mut kept = shelf.split("a").split("kept");
    assert!(kept.is_whole());
    let found = kept.take_found();
    let items: Vec<_> = found.keys().filter(|name| name.starts_with("item")).map(String::as_str).collect();
    assert_eq!(items, ["item 0", "item 1", "item 2", "item 3", "item 4", "item 5", "item 6"]);
    drop((kept, shelf));
    world.end(1);
    world.await_no_depot();
}
