//! A daemon is killed while it leaves its guests (`detach`, SIGUSR2), with its worker or without, at each of the moments at which something
//! that the guest needs has gone and the rest has not; and the next one as it takes the guest. Somebody keeps descriptors: the guest goes on.

use crate::serve::{Daemon, write_config};
use crate::supervisor::{Keeper, Manager, is_killed};
use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, Signal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// When it is killed, as it is seen from outside. Each is seen at once, and what follows it takes a while: a flush, a file, an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// A time after it was told to leave its guests.
    Told(Duration),
    /// The socket has gone at which the guest's VMM would find its disk again.
    WithoutSocket,
    /// It is noted whom the next daemon finds waiting.
    Noted,
    /// A file of the VM's directory has gone.
    Removing,
    /// The VM's directory has gone.
    Removed,
    /// It has ended, and the next one takes the guest: its new directory is there, and says whose it is.
    Taking,
    /// The next one has begun to serve the guest.
    Taken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Both,
    Supervisor,
    Worker,
}

const MOMENTS: [Moment; 9] = [
    Moment::Told(Duration::from_millis(1)),
    Moment::WithoutSocket,
    Moment::Noted,
    Moment::Removing,
    Moment::Taking,
    Moment::Told(Duration::from_millis(30)),
    Moment::WithoutSocket,
    Moment::Removed,
    Moment::Taken,
];

/// Where a guest with one disk is served.
struct Places {
    socket: PathBuf,
    note: PathBuf,
    area: PathBuf,
}

impl Places {
    fn of(bench: &Bench, vm: &str) -> Self {
        let sockets = bench.path("run").join(vm);
        Places { socket: sockets.join("disk0.sock"), note: sockets.join("left"), area: bench.area().to_owned() }
    }

    fn directories(&self) -> Vec<PathBuf> {
        std::fs::read_dir(&self.area)
            .unwrap()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect()
    }
}

/// Waits for something that may be there for less than a millisecond.
#[track_caller]
fn catch(daemon: &Daemon, what: Moment, is_there: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_there() {
        assert!(Instant::now() < deadline, "{what:?}: {}", daemon.log());
        std::hint::spin_loop();
    }
}

/// Has a daemon leave its guest, and gives the one that is to be killed at that moment, which has come: this one or the next.
fn until(moment: Moment, daemon: Daemon, places: &Places, next: impl Fn() -> Daemon) -> (Daemon, Option<u32>) {
    let [directory] = &places.directories()[..] else { panic!("{:?}", places.directories()) };
    let worker = guest_kit::worker_of(daemon.pid());
    let is_gone = |path: &Path| std::fs::symlink_metadata(path).is_err();
    let names = ["area.json", "vmms", "lock", "ram", "ram-taken"].map(|name| directory.join(name));
    // Before anything of it goes.
    let there: Vec<&PathBuf> = names.iter().filter(|path| !is_gone(path)).collect();
    daemon.signal(Signal::USR2);
    match moment {
        Moment::Told(time) => std::thread::sleep(time),
        Moment::WithoutSocket => catch(&daemon, moment, || is_gone(&places.socket)),
        Moment::Noted => catch(&daemon, moment, || !is_gone(&places.note)),
        Moment::Removing => catch(&daemon, moment, || there.iter().any(|path| is_gone(path))),
        Moment::Removed => catch(&daemon, moment, || is_gone(directory)),
        Moment::Taking | Moment::Taken => {
            assert_eq!(daemon.wait().code(), Some(0));
            let daemon = next();
            if moment == Moment::Taking {
                catch(&daemon, moment, || places.directories().iter().any(|directory| directory.join("vmms").exists()));
            } else {
                catch(&daemon, moment, || !is_gone(&places.socket));
            }
            let worker = guest_kit::worker_of(daemon.pid());
            return (daemon, worker);
        }
    }
    (daemon, worker)
}

/// A guest whose VMM connects again goes on, whoever of those that serve it is killed, and whatever of it was left already.
fn goes_on_whose_daemon_is_killed_amid_detach(bench: &Bench, keeper: &Keeper) {
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(bench, &[("one", image.to_str().unwrap().to_owned())]);
    let places = Places::of(bench, "one");
    let mut daemon = keeper.start_daemon(bench, &config);
    let layout = overwritten(8);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec_with("one", script, &["--reconnect"])).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    for round in 0..rounds(18) as usize {
        let moment = MOMENTS[round % MOMENTS.len()];
        let who = [Who::Both, Who::Supervisor, Who::Worker, Who::Both][round % 4];
        let is_left = !matches!(moment, Moment::Taking | Moment::Taken);
        let (killed, worker) = until(moment, daemon, &places, || keeper.start_daemon(bench, &config));
        if who != Who::Worker {
            killed.signal(Signal::KILL);
        }
        let is_worker_killed = who != Who::Supervisor && worker.is_some_and(is_killed);
        let log = killed.log().len();
        daemon = if who == Who::Worker && !is_left {
            killed
        } else {
            let status = killed.wait();
            assert!(who != Who::Worker || status.code() == Some(0), "{moment:?}: {status}");
            keeper.start_daemon(bench, &config)
        };
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 5, LIMIT) {
            panic!("{moment:?}, {who:?}: {error}\n--- the daemon's log\n{}", daemon.log());
        }
        let goes_on = daemon.log()[log..].contains("what an earlier supervisor kept of it is here");
        eprintln!("{moment:?}, {who:?}, the worker by itself: {is_worker_killed}, what was kept is there: {goes_on}");
        let entry = daemon.wait_state("one", "running");
        assert_eq!(entry["vmm_pid"], guest.qemu_pid().unwrap(), "{entry}");
        assert!(!places.note.exists(), "{moment:?}: it is served, and nobody waits");
        assert_eq!(places.directories().len(), 1, "{moment:?}: {:?}", places.directories());
    }
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    daemon.signal(Signal::TERM);
    let log = daemon.log();
    assert_eq!(daemon.wait().code(), Some(0), "{log}");
    replay_left(&image);
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
    bench.assert_area_is_empty();
}

#[test]
fn a_guest_goes_on_whose_daemon_is_killed_amid_detach_where_a_manager_keeps_descriptors() {
    let bench = Bench::new();
    let manager = Keeper::Manager(Manager::start(&bench));
    goes_on_whose_daemon_is_killed_amid_detach(&bench, &manager);
}

#[test]
fn a_guest_goes_on_whose_daemon_is_killed_amid_detach_where_no_manager_is() {
    goes_on_whose_daemon_is_killed_amid_detach(&Bench::new(), &Keeper::Depot);
}
