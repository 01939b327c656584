use super::*;
use crate::vault::{Opened, Shelf};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

const LIMIT: Duration = Duration::from_secs(30);

/// Processes by number, and a place for depots, which are threads here.
#[derive(Clone)]
struct Host {
    directory: Arc<tempfile::TempDir>,
    /// Of each its own end of a pipe, and the other one.
    processes: Arc<Mutex<BTreeMap<i32, (OwnedFd, OwnedFd)>>>,
    depots: Arc<Mutex<Vec<JoinHandle<()>>>>,
    /// So many of the next depots die after that many words.
    die_after: Arc<Mutex<Vec<usize>>>,
    started: Arc<AtomicUsize>,
}

impl Host {
    fn new() -> Self {
        Host {
            directory: Arc::new(tempfile::tempdir().expect("a directory")),
            processes: Arc::default(),
            depots: Arc::default(),
            die_after: Arc::default(),
            started: Arc::default(),
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

    /// A daemon comes.
    fn daemon(&self) -> (Shelf, BTreeSet<String>) {
        let host = self.clone();
        let start = move |listener| {
            host.started.fetch_add(1, Ordering::SeqCst);
            let dies_after = host.die_after.lock().expect("no panic").pop();
            let processes = Arc::clone(&host.processes);
            let depot = std::thread::spawn(move || match dies_after {
                Some(words) => die_after(&listener, words),
                None => {
                    let process = |pid, started| {
                        assert_eq!(started, 7);
                        let processes = processes.lock().expect("no panic");
                        processes.get(&pid).map(|(it, _)| it.try_clone().expect("a descriptor"))
                    };
                    keep(&listener, process).expect("it waits");
                }
            });
            host.depots.lock().expect("no panic").push(depot);
            Ok(())
        };
        let (depot, found) = InDepot::take(&self.path(), Box::new(start)).expect("a depot");
        let Opened::Ours(shelf) = Shelf::open(Box::new(depot), found, "1", &[]) else { panic!("it is ours") };
        let parts = shelf.parts();
        (shelf, parts)
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

fn die_after(listener: &OwnedFd, words: usize) {
    let daemon = Channel::from(rustix::net::accept_with(listener, SocketFlags::CLOEXEC).expect("somebody"));
    daemon.send(&Greeting::Format { format: FORMAT }, &[]).expect("said");
    daemon.send(&Greeting::All, &[]).expect("said");
    for _ in 0..words {
        let _ = daemon.receive::<Word>();
    }
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
    let host = Host::new();
    [1, 2].into_iter().for_each(|pid| host.begin(pid));
    let (mut shelf, found) = host.daemon();
    assert!(found.is_empty());
    let mut kept: Vec<_> = [("a", Some(1)), ("b", Some(2)), ("c", None), ("d", Some(3))]
        .map(|(name, vmm)| vm(&mut shelf, name, vmm))
        .into();
    // Two of its words are in the store for a moment, and the later one counts.
    kept[0].put("vmm", b"2 7", &[]);
    kept[0].put("vmm", b"1 7", &[]);
    drop((shelf, kept));
    let (mut shelf, found) = host.daemon();
    assert_eq!((names(&found), host.started()), (vec!["a", "b"], 1));
    for name in ["a", "b"] {
        let mut kept = shelf.split(name).split("kept");
        assert!(kept.is_whole(), "{name}");
        let found = kept.take_found();
        assert_eq!((found["memory"].words.as_slice(), found["memory"].descriptors.len()), (&b"ram"[..], 1));
    }
    drop(shelf);
    // With one that ends, only its own goes; with the last one the depot does.
    host.end(1);
    let (shelf, found) = host.daemon();
    assert_eq!((names(&found), host.started()), (vec!["b"], 1));
    drop(shelf);
    host.end(2);
    host.await_no_depot();
    let (shelf, found) = host.daemon();
    assert_eq!((names(&found), host.started()), (vec![], 2));
    drop(shelf);
    host.await_no_depot();
}

/// A daemon that dies between the two leaves both.
#[test]
fn of_two_words_about_a_vmm_the_later_one_counts() {
    let vmm = |pid: i32| crate::vault::envelope("a/kept/vmm", format!("{pid} 7").as_bytes(), &[]).expect("an envelope");
    let kept = BTreeMap::from([("amberlog-9".to_owned(), vmm(1)), ("amberlog-10".to_owned(), vmm(2))]);
    for lives in [1, 2] {
        let orphans = find_orphans(&kept, |pid, started| (pid == lives && started == 7).then_some(()));
        assert_eq!(orphans.len(), usize::from(lives == 2));
    }
}

/// It ends at the very moment at which the next daemon comes.
#[test]
fn a_daemon_finds_nothing_of_a_vmm_that_has_ended_before_it_came() {
    for _ in 0..20 {
        let host = Host::new();
        host.begin(1);
        let (mut shelf, _) = host.daemon();
        let kept = vm(&mut shelf, "a", Some(1));
        drop((shelf, kept));
        host.end(1);
        let (shelf, found) = host.daemon();
        assert!(found.is_empty(), "{found:?}");
        drop(shelf);
        host.await_no_depot();
    }
}

#[test]
fn what_a_daemon_lets_go_of_is_gone_when_it_has_ended() {
    let host = Host::new();
    host.begin(1);
    let (mut shelf, _) = host.daemon();
    let mut kept = vm(&mut shelf, "a", Some(1));
    let (theirs, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
    kept.put("lock", b"", &[ours.as_fd()]);
    drop(ours);
    kept.clear();
    shelf.clear();
    drop((kept, shelf));
    // Nobody has the other end any more.
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&theirs, PollFlags::IN)], Some(&at_once)), Ok(1));
    host.await_no_depot();
}

/// A depot is killed under its daemon: the next one has what that one had, what was said meanwhile, too.
#[test]
fn a_depot_that_dies_is_followed_by_one_that_has_all() {
    for words in 0..8 {
        let host = Host::new();
        host.begin(1);
        host.die_after.lock().expect("no panic").push(words);
        let (mut shelf, _) = host.daemon();
        let mut kept = vm(&mut shelf, "a", Some(1));
        let deadline = Instant::now() + LIMIT;
        kept.put("more", b"said to the one that dies, or after", &[]);
        while host.started() < 2 {
            assert!(Instant::now() < deadline, "no other one is started");
            kept.put("more", b"said while nobody, or somebody, is there", &[]);
            std::thread::sleep(Duration::from_millis(1));
        }
        kept.put("last", b"said to the other one, or before it was there", &[file().as_fd()]);
        drop((shelf, kept));
        let (mut shelf, found) = host.daemon();
        assert_eq!((names(&found), host.started()), (vec!["a"], 2), "after {words} words");
        let mut kept = shelf.split("a").split("kept");
        assert!(kept.is_whole(), "after {words} words");
        assert_eq!(kept.take_found().into_keys().collect::<Vec<_>>(), ["last", "memory", "more", "vmm"]);
        drop((shelf, kept));
        host.end(1);
        host.await_no_depot();
    }
}

#[test]
fn what_hears_there_and_is_no_depot_of_ours_is_not_taken_for_one() {
    let host = Host::new();
    let never = || -> super::attended::Start { Box::new(|_| panic!("somebody is there")) };
    for greeting in [Greeting::Format { format: FORMAT + 1 }, Greeting::All, Greeting::Has { name: "x".into() }] {
        let socket = rustix::net::socket_with(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.expect("a socket");
        let _ = std::fs::remove_file(host.path());
        let address = rustix::net::SocketAddrUnix::new(host.path()).expect("an address");
        rustix::net::bind(&socket, &address).expect("bound");
        rustix::net::listen(&socket, 1).expect("it hears");
        let answers = std::thread::spawn(move || {
            let daemon = Channel::from(rustix::net::accept_with(&socket, SocketFlags::CLOEXEC).expect("somebody"));
            daemon.send(&greeting, &[]).expect("said");
            let _ = daemon.receive::<Word>();
        });
        let error = InDepot::take(&host.path(), never()).map(drop).expect_err("it is not ours");
        assert!(error.to_string().contains("another program's"), "{error}");
        answers.join().expect("no panic");
    }
}

/// Where put in and taken out again and again, nothing is left over.
#[test]
fn a_store_in_a_depot_does_as_it_is_told() {
    let host = Host::new();
    host.begin(1);
    let (mut shelf, _) = host.daemon();
    let mut kept = vm(&mut shelf, "a", Some(1));
    for number in 0..200_u32 {
        kept.put(&format!("item {}", number % 7), &number.to_le_bytes(), &[file().as_fd()]);
        if number % 5 == 0 {
            kept.remove(&format!("item {}", number % 3));
        }
    }
    drop((shelf, kept));
    let (mut shelf, _) = host.daemon();
    let mut kept = shelf.split("a").split("kept");
    assert!(kept.is_whole());
    let found = kept.take_found();
    let items: Vec<_> = found.keys().filter(|name| name.starts_with("item")).map(String::as_str).collect();
    assert_eq!(items, ["item 0", "item 1", "item 2", "item 3", "item 4", "item 5", "item 6"]);
    drop((kept, shelf));
    host.end(1);
    host.await_no_depot();
}
