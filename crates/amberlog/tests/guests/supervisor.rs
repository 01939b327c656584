//! The supervisor itself dies, where a service manager keeps what it had kept, or a process of its own. The manager is a stand-in for systemd: it hears what
//! sd_notify(3) says, keeps descriptors, and gives them to the next daemon as sd_listen_fds(3) says. A real one is in `systemd`.

use crate::awake;
use crate::remote::JournalServer;
use crate::serve::{Daemon, depot_of, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, Signal};
use guest_tools::random::Random;
use rustix::io::FdFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use supervision::{Opened, Shelf, Store};

/// Numbers that are nobody's, for descriptors on their way into a daemon.
const HIGH: i32 = 600;

#[derive(Default)]
struct Kept {
    descriptors: BTreeMap<String, OwnedFd>,
    /// As many as it takes, without a word about the rest (FileDescriptorStoreMax=).
    most: Option<usize>,
    /// The last of its own words that the manager has met.
    met: u64,
}

/// Who keeps what a supervisor had.
pub(super) enum Keeper {
    Manager(Manager),
    Depot,
}

impl Keeper {
    pub(super) fn start_daemon(&self, bench: &Bench, config: &Path) -> Daemon {
        match self {
            Keeper::Manager(manager) => manager.start_daemon(bench, config),
            Keeper::Depot => Daemon::start(bench, config),
        }
    }
}

pub(super) struct Manager {
    socket: std::path::PathBuf,
    store: Arc<Mutex<Kept>>,
}

impl Manager {
    pub(super) fn start(bench: &Bench) -> Self {
        let socket = bench.path("notify");
        let heard = UnixDatagram::bind(&socket).unwrap();
        let store = Arc::new(Mutex::new(Kept::default()));
        let kept = Arc::clone(&store);
        // Ends with the process of the test.
        std::thread::spawn(move || {
            loop {
                hear(&heard, &kept);
            }
        });
        Manager { socket, store }
    }

    /// Waits until all is heard that was said before.
    fn hear_all(&self) {
        static WORDS: AtomicU64 = AtomicU64::new(0);
        let word = WORDS.fetch_add(1, Ordering::SeqCst) + 1;
        UnixDatagram::unbound().unwrap().send_to(format!("MET={word}").as_bytes(), &self.socket).unwrap();
        let deadline = Instant::now() + LIMIT;
        while self.store.lock().unwrap().met < word {
            assert!(Instant::now() < deadline, "the manager hears nothing any more");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until nothing more is brought. Gives how much is kept.
    fn settle(&self) -> usize {
        let deadline = Instant::now() + LIMIT;
        loop {
            self.hear_all();
            let before = self.len();
            awake::sleep(Duration::from_millis(300));
            self.hear_all();
            if self.len() == before {
                return before;
            }
            assert!(Instant::now() < deadline, "it is brought more and more");
        }
    }

    fn len(&self) -> usize {
        self.store.lock().unwrap().descriptors.len()
    }

    /// What a supervisor leaves that dies while the VMM of a machine's first disk speaks.
    fn begin_word(&self, name: &str) {
        struct Left;
        impl Store for Left {
            fn put(&self, _: &str, _: BorrowedFd<'_>) -> std::io::Result<()> {
                Ok(())
            }
            fn remove(&self, _: &str) {}
        }
        let open = |format: &str| {
            let store = self.store.lock().unwrap();
            let left = store.descriptors.iter().map(|(name, it)| (name.clone(), it.try_clone().unwrap()));
            Shelf::open(Box::new(Left), left.collect(), format, &[])
        };
        let Opened::Foreign { format, .. } = open("none of its formats") else { panic!("it has a format") };
        let Opened::Ours(mut shelf) = open(&format) else { panic!("{format}") };
        let mut door = shelf.split(name).split("doors").split("0");
        assert!(door.is_whole() && !door.is_begun());
        door.begin();
        assert!(door.is_begun());
    }

    /// Has no room for any more.
    fn is_full_now(&self) {
        let mut store = self.store.lock().unwrap();
        store.most = Some(store.descriptors.len());
    }

    /// Starts a daemon with what is in the store.
    fn start_daemon(&self, bench: &Bench, config: &Path) -> Daemon {
        // What a dead one had said last.
        self.hear_all();
        let store = self.store.lock().unwrap();
        let mut script = String::new();
        let mut names = Vec::new();
        let mut passed = Vec::new();
        for (index, (name, descriptor)) in store.descriptors.iter().enumerate() {
            let high = rustix::io::fcntl_dupfd_cloexec(descriptor, HIGH).unwrap();
            rustix::io::fcntl_setfd(&high, FdFlags::empty()).unwrap();
            script += &format!("exec {}<&{high} {high}<&-\n", index + 3, high = high.as_raw_fd());
            names.push(name.clone());
            passed.push(high);
        }
        // As systemd says it from version 254 on.
        script += &store.most.map(|most| format!("export FDSTORE={most}\n")).unwrap_or_default();
        script += &format!(
            "LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES={} NOTIFY_SOCKET={} exec {} \"$@\"",
            names.len(),
            names.join(":"),
            self.socket.display(),
            amberlog().display()
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script, "daemon"]);
        Daemon::start_by(command, bench, config)
    }
}

fn hear(socket: &UnixDatagram, store: &Mutex<Kept>) {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).unwrap();
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let words = String::from_utf8(bytes[..received.bytes].to_vec()).unwrap();
    let said = |key: &str| words.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let name = said("FDNAME").unwrap_or_default().to_owned();
    let mut store = store.lock().unwrap();
    store.met = said("MET").map_or(store.met, |word| word.parse().unwrap());
    if said("FDSTORE") == Some("1") {
        assert_eq!((descriptors.len(), said("FDPOLL")), (1, Some("0")), "{words}");
        if store.most.is_none_or(|most| store.descriptors.len() < most) {
            let other = store.descriptors.insert(name, descriptors.remove(0));
            assert!(other.is_none(), "{words}: that name is taken");
        }
    } else if said("FDSTOREREMOVE") == Some("1") {
        let is_there = store.descriptors.remove(&name).is_some();
        assert!(is_there || store.most.is_some(), "{words}: there is no such name");
    }
}

/// The daemon is killed under a guest that commits, again and again, now and then with its worker: the next one gets back what it had
/// kept, and goes on. Nothing is reconnected, and journals stay held.
fn goes_on_whose_supervisor_is_killed(bench: &Bench, manager: &Keeper) {
    let [one, two] = ["one.img", "two.img"].map(|name| bench.path(name));
    let file_system = ExtRecipe::ext4(96, 8).make(&one).unwrap();
    ExtRecipe::ext4(32, 4).make(&two).unwrap();
    let path = |image: &Path| image.to_str().unwrap().to_owned();
    let config = write_config(bench, &[("one", path(&one)), ("two", path(&two))]);
    let mut daemon = manager.start_daemon(bench, &config);
    let layout = overwritten(8);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let pid = |entry: &serde_json::Value, name: &str| entry[name].as_u64().unwrap_or_else(|| panic!("{entry}")) as u32;
    for round in 0..4 {
        let before = daemon.wait_state("one", "running");
        let retained = before["disks"][0]["counters"]["blocks_retained_now"].as_u64();
        assert!(retained > Some(0), "{before}");
        if round % 2 == 1 {
            kill_nine(pid(&before, "worker_pid"));
        }
        if round == 2 {
            // Its VM is not in the configuration of the next one.
            write_config(bench, &[("two", path(&two))]);
        }
        if round == 3 && matches!(manager, Keeper::Manager(_)) {
            // Nobody has read it since.
            std::fs::write(&config, "this is no configuration").unwrap();
        }
        daemon.signal(Signal::KILL);
        daemon.wait();
        let killed = Instant::now();
        daemon = manager.start_daemon(bench, &config);
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
            panic!("round {round}: {error}\n--- the daemon's log\n{}", daemon.log());
        }
        eprintln!("round {round}: 20 more were acknowledged {:?} after the supervisor's death", killed.elapsed());
        let after = daemon.wait_state("one", "running");
        assert_ne!(pid(&after, "supervisor_pid"), pid(&before, "supervisor_pid"));
        assert_eq!(pid(&after, "vmm_pid"), guest.qemu_pid().unwrap());
    }
    write_config(bench, &[("two", path(&two))]);
    daemon.signal(Signal::HUP);
    let deadline = Instant::now() + LIMIT;
    while daemon.wait_state("one", "running")["pending"] != "removed" {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    daemon.wait_state("two", "waiting");
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    let deadline = Instant::now() + LIMIT;
    while std::fs::read_dir(bench.area()).unwrap().flatten().count() > 1 {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
    let run = bench.path("run");
    match manager {
        Keeper::Manager(manager) => assert!(manager.len() > 0, "the other VM waits"),
        Keeper::Depot => assert!(depot_of(&run).is_some()),
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    match manager {
        Keeper::Manager(manager) => assert_eq!(manager.settle(), 0, "nothing is left of what has ended"),
        Keeper::Depot => {
            let deadline = Instant::now() + LIMIT;
            while depot_of(&run).is_some() {
                assert!(Instant::now() < deadline, "it has nothing to keep, and goes on");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

#[test]
fn a_guest_goes_on_whose_supervisor_is_killed_where_a_manager_keeps_descriptors() {
    let bench = Bench::new();
    let manager = Keeper::Manager(Manager::start(&bench));
    goes_on_whose_supervisor_is_killed(&bench, &manager);
}

#[test]
fn a_guest_goes_on_whose_supervisor_is_killed_where_no_manager_is() {
    goes_on_whose_supervisor_is_killed(&Bench::new(), &Keeper::Depot);
}

/// All of a VM die together but what keeps its descriptors, and somebody starts its VMM again before a daemon is there, without the library: it waits at
/// its door, and is let in when what the first one is owed is home.
#[test]
fn a_vmm_that_came_before_the_daemon_is_let_in_behind_the_recovery_of_the_one_before() {
    let bench = Bench::new();
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("one", format!("{}{PROTECTED}", image.display()))]);
    let manager = Manager::start(&bench);
    let mut daemon = manager.start_daemon(&bench, &config);
    for round in 0..rounds(2) {
        let (first, second) = (overwritten(20 + round), overwritten(30 + round));
        let script = |name: &str, layout: &_| {
            let writer = record_writer(&format!("/mnt/{name}"), name, layout, "--forever");
            format!(
                "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nrm -rf /mnt/{name}\nmkdir /mnt/{name}\n{writer}"
            )
        };
        let mut spec = daemon.spec_with("one", script("b", &second), &["--reconnect"]);
        spec.environment.clear();
        let mut guest = Guest::start(daemon.spec_with("one", script("a", &first), &["--reconnect"])).unwrap();
        guest.wait_acknowledged("a", 30, LIMIT).unwrap();
        daemon.signal(Signal::KILL);
        guest.kill_qemu().unwrap();
        daemon.wait();
        guest.wait_end(LIMIT).unwrap();
        let reported = guest.final_report();
        // It is said to be there when its guest is, which waits for its disk.
        let next = std::thread::spawn(move || Guest::start(spec));
        std::thread::sleep(Duration::from_millis(Random::of(seed(), round).below(1500)));
        daemon = manager.start_daemon(&bench, &config);
        let next = next.join().expect("no panic").and_then(|mut next| {
            next.wait_acknowledged("b", 10, LIMIT)?;
            Ok(next)
        });
        let mut next =
            next.unwrap_or_else(|error| panic!("round {round}: {error}\n--- the daemon's log\n{}", daemon.log()));
        next.kill_qemu().unwrap();
        next.wait_end(LIMIT).unwrap();
        let later = next.final_report();
        daemon.wait_state("one", "waiting");
        assert_consistent(&file_system);
        assert_records(&file_system, "/a", "a", &first, &reported);
        assert_records(&file_system, "/b", "b", &second, &later);
    }
}

/// The process that keeps descriptors is killed, again and again, and then the supervisor: the one that follows it was given all of it.
/// When both are killed with the guest's VMM alone left, the next daemon leaves it alone; when the VMM ends while nobody is there, its directory is free.
#[test]
fn a_guest_goes_on_whose_depot_was_killed_before_its_supervisor() {
    let bench = Bench::new();
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
    let run = bench.path("run");
    let manager = Manager::start(&bench);
    let mut daemon = Daemon::start(&bench, &config);
    let layout = overwritten(8);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    for round in 0..3 {
        let mut killed = 0;
        for _ in 0..2 {
            let deadline = Instant::now() + LIMIT;
            let depot = loop {
                // One that was just started has not taken its name yet.
                match depot_of(&run) {
                    Some(depot) => break depot,
                    None => assert!(Instant::now() < deadline, "{}", daemon.log()),
                }
                std::thread::sleep(Duration::from_millis(20));
            };
            kill_nine(depot);
            while depot_of(&run).is_none_or(|other| other == depot) {
                assert!(Instant::now() < deadline, "{}", daemon.log());
                std::thread::sleep(Duration::from_millis(1));
            }
            killed = depot;
        }
        await_filled(&daemon, &run, killed);
        daemon.signal(Signal::KILL);
        daemon.wait();
        if round == 1 {
            // One that does not answer has what the guest waits for: nobody goes on without that.
            let depot = depot_of(&run).expect("a depot");
            signal(depot, Signal::STOP);
            let refused = amberlog_with(["serve".as_ref(), "--config".as_ref(), config.as_os_str()]);
            assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stderr));
            assert!(
                text(&refused.stderr).contains("or end that process (depot), and the VMMs that wait"),
                "{}",
                text(&refused.stderr)
            );
            signal(depot, Signal::CONT);
        }
        // A service manager has nothing of a daemon that it had not started.
        daemon = if round == 2 { manager.start_daemon(&bench, &config) } else { Daemon::start(&bench, &config) };
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
            panic!("round {round}: {error}\n--- the daemon's log\n{}", daemon.log());
        }
    }
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    // Nobody is there when its VMM ends: whoever brings home what it is owed finds all of it free.
    daemon.signal(Signal::KILL);
    daemon.wait();
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    let recovered = amberlog_with(["recover".as_ref(), "--area".as_ref(), bench.area().as_os_str()]);
    assert_eq!(recovered.status.code(), Some(0), "{}", text(&recovered.stderr));
    let deadline = Instant::now() + LIMIT;
    while depot_of(&run).is_some() {
        assert!(Instant::now() < deadline, "it keeps what nobody has");
        std::thread::sleep(Duration::from_millis(1));
    }
    bench.assert_area_is_empty();
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

/// Workers die under a guest that commits, and every now and then the supervisor, too, at any moment, alone or with the worker: also while the one before it
/// has not begun yet. `AMBERLOG_ROUNDS` is how many supervisors die for each placement.
#[test]
fn a_guest_goes_on_in_a_storm_that_spares_no_supervisor() {
    let mut random = Random::new(seed());
    for placement in ["retain", "copy", "storage", "retain,durable-within=1", "copy,durable-within=0", "nvm", "remote"]
    {
        let (ext3, mode) = (random.below(3) == 0, if random.below(2) == 0 { "journal" } else { "ordered" });
        let what = format!("{placement}, {}, data={mode}", if ext3 { "ext3" } else { "ext4" });
        let bench = Bench::new();
        let image = bench.path("one.img");
        let recipe = if ext3 { ExtRecipe::ext3(96, 8) } else { ExtRecipe::ext4(96, 8) };
        let file_system = recipe.make(&image).unwrap();
        let server = (placement == "remote").then(|| JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]));
        let region = match (placement, &server) {
            ("nvm", _) => format!("={},nvm-size=16", bench.path("region").display()),
            (_, Some(server)) => format!("={}/one", server.address),
            _ => String::new(),
        };
        let disk = format!("{},placement={placement}{region}", image.display());
        let config = write_config(&bench, &[("one", disk)]);
        let has_manager = random.below(2) == 0;
        let manager = if has_manager { Keeper::Manager(Manager::start(&bench)) } else { Keeper::Depot };
        let what = format!("{what}, {}", if has_manager { "a service manager" } else { "a depot" });
        let mut daemon = manager.start_daemon(&bench, &config);
        let layout = overwritten(random.below(1000));
        let writer = record_writer("/mnt/a", "a", &layout, "--forever");
        let kind = if ext3 { "ext3" } else { "ext4" };
        let script = format!("mount -t {kind} -o data={mode} /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
        let mut guest = Guest::start(daemon.spec_with("one", script, &["--reconnect"])).unwrap();
        guest.wait_acknowledged("a", 10, LIMIT).unwrap();
        let (mut workers, mut together, mut depots) = (0, 0, 0);
        let supervisors = rounds(2);
        for _ in 0..supervisors {
            // No more: after the third death within ten seconds it would be held.
            for _ in 0..random.below(3) {
                std::thread::sleep(Duration::from_micros(random.below(400_000)));
                workers += u64::from(guest_kit::worker_of(daemon.pid()).is_some_and(is_killed));
            }
            std::thread::sleep(Duration::from_micros(random.below(400_000)));
            if !has_manager && random.below(2) == 0 {
                // One that was just started has not taken its name yet.
                let run = bench.path("run");
                if let Some(killed) = depot_of(&run).filter(|depot| is_killed(*depot)) {
                    depots += 1;
                    await_filled(&daemon, &run, killed);
                }
            }
            let worker = guest_kit::worker_of(daemon.pid()).filter(|_| random.below(2) == 0);
            daemon.signal(Signal::KILL);
            // It ends with its supervisor, but perhaps not before this.
            together += u64::from(worker.is_some_and(is_killed));
            daemon.wait();
            daemon = manager.start_daemon(&bench, &config);
            if random.below(2) == 0 {
                let last = guest.acknowledged("a").last.unwrap_or(0);
                if let Err(error) = guest.wait_acknowledged("a", last + 3, LIMIT) {
                    panic!("{what}: {error}\n--- the daemon's log\n{}", daemon.log());
                }
            }
        }
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 3, LIMIT) {
            panic!("{what}: {error}\n--- the daemon's log\n{}", daemon.log());
        }
        let console = guest.console();
        assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{what}: {console}");
        guest.kill_qemu().unwrap();
        guest.wait_end(LIMIT).unwrap();
        let reported = guest.final_report();
        daemon.wait_state("one", "waiting");
        daemon.signal(Signal::TERM);
        let log = daemon.log();
        assert_eq!(daemon.wait().code(), Some(0), "{what}: {log}");
        if placement == "storage" {
            // Whoever mounts next replays it.
            guest_kit::judge::replay_with_e2fsck(&file_system).unwrap();
        }
        assert_consistent(&file_system);
        let count = assert_records(&file_system, "/a", "a", &layout, &reported);
        eprintln!(
            "{what}: {supervisors} supervisors killed, {together} with their workers, {workers} workers and {depots} depots alone; {count} acknowledged"
        );
    }
}

fn signal(pid: u32, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// Waits until a depot that follows `killed` was given all that it had. That one may be there for a moment yet, and was filled, too.
fn await_filled(daemon: &Daemon, run: &Path, killed: u32) {
    let deadline = Instant::now() + LIMIT;
    let is_filled =
        |depot: u32| depot != killed && daemon.log().contains(&format!("process {depot} keeps descriptors over"));
    while !depot_of(run).is_some_and(is_filled) {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Kills a process that may have ended. Says whether it had not.
pub(super) fn is_killed(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).is_ok()
}

/// The supervisor died while a VMM was saying something: nobody knows what, so its connection ends, QEMU connects again, and the guest goes
/// on, again and again.
#[test]
fn a_guest_goes_on_whose_supervisor_died_in_the_midst_of_a_word() {
    let bench = Bench::new();
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
    let manager = Manager::start(&bench);
    let mut daemon = manager.start_daemon(&bench, &config);
    let layout = overwritten(8);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec_with("one", script, &["--reconnect"])).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    for round in 0..3 {
        daemon.wait_state("one", "running");
        daemon.signal(Signal::KILL);
        daemon.wait();
        manager.hear_all();
        manager.begin_word("one");
        daemon = manager.start_daemon(&bench, &config);
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
            panic!("round {round}: {error}\n--- the daemon's log\n{}", daemon.log());
        }
        assert!(daemon.log().contains("in the midst of a word"), "{}", daemon.log());
    }
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

/// Nobody has to find that out when the daemon has died.
#[test]
fn a_manager_that_keeps_less_than_there_is_is_said_at_once() {
    let bench = Bench::new();
    let path = |name: &str| {
        let image = bench.path(name);
        ExtRecipe::ext4(32, 4).make(&image).unwrap();
        image.to_str().unwrap().to_owned()
    };
    let config = write_config(&bench, &[("one", path("one.img"))]);
    let manager = Manager::start(&bench);
    let daemon = manager.start_daemon(&bench, &config);
    daemon.wait_state("one", "waiting");
    let needed = manager.settle();
    drop(daemon);
    const SENTENCE: &str = "descriptors over this daemon's death, and there are";
    for (most, is_said) in [(needed, false), (needed - 1, true)] {
        manager.store.lock().unwrap().descriptors.clear();
        manager.store.lock().unwrap().most = Some(most);
        let daemon = manager.start_daemon(&bench, &config);
        daemon.wait_state("one", "waiting");
        let deadline = Instant::now() + if is_said { LIMIT } else { Duration::from_secs(1) };
        while !daemon.log().contains(SENTENCE) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        let log = daemon.log();
        assert_eq!(log.contains(SENTENCE), is_said, "{most}: {log}");
        assert!(!is_said || log.contains(&format!("keeps {most} descriptors")), "{log}");
    }
}

/// The manager's store was full when the VMM came, and the manager has not said so: the next daemon finds a VM without a VMM. Nothing of
/// the guest that runs is touched, and what it was owed is brought home when its VMM has ended.
#[test]
fn a_guest_of_which_a_part_was_kept_is_held_and_keeps_its_memory() {
    let bench = Bench::new();
    let image = bench.path("one.img");
    let other = bench.path("two.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    ExtRecipe::ext4(32, 4).make(&other).unwrap();
    let path = |image: &Path| image.to_str().unwrap().to_owned();
    let config = write_config(&bench, &[("one", path(&image))]);
    let manager = Manager::start(&bench);
    let mut daemon = manager.start_daemon(&bench, &config);
    daemon.wait_state("one", "waiting");
    manager.settle();
    manager.is_full_now();
    let layout = overwritten(9);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let before = daemon.wait_state("one", "running");
    assert!(before["disks"][0]["counters"]["blocks_retained_now"].as_u64() > Some(0), "{before}");
    // It is not wanted any more, so that it would be finished if nobody had it.
    write_config(&bench, &[("two", path(&other))]);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let memory_blocks = memory_blocks(bench.area());
    daemon = manager.start_daemon(&bench, &config);
    let held = daemon.wait_state("one", "held");
    assert!(held["state_text"].as_str().unwrap().contains("FileDescriptorStoreMax"), "{held}");
    // Longer than it takes a worker to find that there is nobody.
    std::thread::sleep(Duration::from_secs(1));
    daemon.signal(Signal::HUP);
    std::thread::sleep(Duration::from_secs(1));
    daemon.wait_state("one", "held");
    assert!(self::memory_blocks(bench.area()) >= memory_blocks, "its memory was taken from it");
    write_config(&bench, &[("one", path(&image)), ("two", path(&other))]);
    daemon.signal(Signal::HUP);
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

/// What the guests' memory takes.
fn memory_blocks(area: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files =
        std::fs::read_dir(area).unwrap().flatten().flat_map(|vm| std::fs::read_dir(vm.path()).unwrap().flatten());
    let memory = files.filter(|file| file.file_name().to_string_lossy().starts_with("ram"));
    memory.map(|file| file.metadata().unwrap().blocks()).sum()
}
