//! Tests of what a supervisor makes of what it finds, and of what a worker says that is not ours any more.

use super::*;
use crate::worker::SERVED;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use supervision::stand_in::StandIn;

struct Bench {
    directory: tempfile::TempDir,
    channel: Arc<Channel>,
    worker: OwnedFd,
}

impl Bench {
    fn new() -> Self {
        let (ours, worker) = Channel::pair().expect("a pair");
        Bench { directory: tempfile::tempdir().expect("a directory"), channel: Arc::new(ours), worker }
    }

    fn hear(&self, charge: &mut Charge, said: &Said, descriptors: Vec<OwnedFd>) {
        charge.hear(said, descriptors, &self.channel);
    }

    fn keep(&self, charge: &mut Charge, key: &str, data: &str) {
        self.hear(charge, &Said::Keep { key: key.to_owned(), data: data.to_owned() }, Vec::new());
    }

    fn door(&self, charge: &mut Charge, disk: usize, name: &str) {
        let path = self.directory.path().join(format!("{disk}.sock"));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(path).expect("bound");
        self.hear(charge, &Said::Door { disk, name: name.to_owned() }, vec![listener.into()]);
    }
}

fn charge(store: &StandIn) -> Charge {
    Charge::on(store.open().split("db"))
}

/// What the next process finds, with the keys of its doors.
fn found(store: &StandIn) -> (Charge, Vec<(String, String)>) {
    let mut charge = charge(&store.copy());
    let (ours, _theirs) = Channel::pair().expect("a pair");
    charge.tell(&ours).expect("told");
    let keys = charge.kept.all(DOOR);
    (charge, keys)
}

fn process_that_lives() -> String {
    let pid = std::process::id() as i32;
    format!("{pid} {}", placement::process_started_at(pid).expect("it lives"))
}

/// Whatever the store has no room for: the next supervisor either has all of it, or lets no worker go on.
#[test]
fn a_store_that_is_full_has_no_worker_go_on() {
    let bench = Bench::new();
    let keys = ["under way", "directory", "handover", SERVED, "vmm", "userfaultfd"];
    let mut doubts = 0;
    for max in 0..=keys.len() + 3 {
        let store = StandIn::default();
        let mut charge = charge(&store);
        store.set_max(max);
        for key in keys {
            bench.keep(&mut charge, key, "");
        }
        bench.keep(&mut charge, "vmm", &process_that_lives());
        if store.is_empty() {
            continue;
        }
        match store.copy().open_as("test") {
            // There was no room even for that.
            supervision::Opened::Foreign { .. } => continue,
            supervision::Opened::Ours(_) => {}
        }
        let (charge, _) = found(&store);
        let has_all = keys.iter().all(|key| charge.kept.data(key).is_some());
        let has_none = keys.iter().all(|key| charge.kept.data(key).is_none());
        assert!(has_all || has_none || charge.doubt().is_some(), "{max}: {:?}", charge.kept);
        doubts += usize::from(charge.doubt().is_some());
        if max == keys.len() + 3 {
            assert!(has_all && charge.doubt().is_none() && charge.is_served() && !charge.vmm_has_ended());
        }
    }
    assert!(doubts > 3, "{doubts}");
}

/// Where it is doubtful what is kept, the VM's directory knows who has asked for its disks.
#[test]
fn a_vmm_that_lives_is_known_although_it_is_not_kept() {
    let bench = Bench::new();
    let area = bench.directory.path().join("area");
    std::fs::create_dir(&area).expect("made");
    std::fs::set_permissions(&area, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("ours");
    let note = |text: &str| {
        let path = area.join("vmms");
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("ours");
    };
    note(&format!("{}\n", process_that_lives()));
    let store = StandIn::default();
    let mut charge = charge(&store);
    bench.keep(&mut charge, "directory", area.to_str().expect("text"));
    bench.keep(&mut charge, SERVED, "");
    assert!(found(&store).0.doubt().is_none());
    store.set_max(store.len());
    bench.keep(&mut charge, "vmm", &process_that_lives());
    let (mut next, _) = found(&store);
    assert!(next.doubt().is_some() && !next.vmm_has_ended());
    assert_eq!(next.living_vmm(), Some(std::process::id() as i32));
    note("1 1\n");
    assert!(next.vmm_has_ended());
    next.clear();
    assert!(next.doubt().is_none());
}

/// A worker may have been taken over when it says who its VMM is.
#[test]
fn only_who_has_come_to_a_door_is_taken_for_a_vmm() {
    let bench = Bench::new();
    let store = StandIn::default();
    let mut charge = charge(&store);
    bench.door(&mut charge, 0, "a");
    bench.keep(&mut charge, SERVED, "");
    bench.keep(&mut charge, "vmm", &process_that_lives());
    let pid = std::process::id() as i32;
    assert_eq!(charge.living_vmm(), Some(pid));
    assert!(!charge.has_come(pid));
    let (connection, _) = std::os::unix::net::UnixStream::pair().expect("a pair");
    charge.admission(&bench.channel, 0).admit(connection.into(), pid).expect("passed on");
    assert!(charge.has_come(pid) && !charge.has_come(1));
    // Whom an earlier supervisor saw is not known.
    assert!(found(&store).0.has_come(1));
}

#[test]
fn what_is_not_served_is_let_go_of() {
    let bench = Bench::new();
    let store = StandIn::default();
    let mut charge = charge(&store);
    let image = File::open("/dev/null").expect("opened");
    bench.hear(&mut charge, &Said::Keep { key: "image a".into(), data: String::new() }, vec![image.into()]);
    bench.door(&mut charge, 0, "a");
    let next = store.of_a_dead_process();
    let found = self::charge(&next);
    assert!(found.kept.is_empty() && found.doubt().is_none() && !found.is_served());
    assert_eq!(next.len(), 1, "only the format: {:?}", next.names());
}

/// A number that was another disk's before must not give that one's VMM to this one.
#[test]
fn a_door_is_the_disks_whose_number_it_has() {
    let bench = Bench::new();
    let store = StandIn::default();
    let mut charge = charge(&store);
    bench.keep(&mut charge, SERVED, "");
    bench.door(&mut charge, 0, "a");
    bench.door(&mut charge, 1, "b");
    let keys = |keys: &[(&str, &str)]| -> Vec<(String, String)> {
        keys.iter().map(|(name, number)| ((*name).to_owned(), (*number).to_owned())).collect()
    };
    assert_eq!(found(&store).1, keys(&[("a", "0"), ("b", "1")]));
    // The key of a disk that has no door of its own.
    bench.keep(&mut charge, "door c", "1");
    bench.hear(&mut charge, &Said::Forget { key: "door b".into() }, Vec::new());
    let (next, left) = found(&store);
    assert_eq!((left, next.doors.len()), (keys(&[("a", "0")]), 1));
    // A door that has no key.
    bench.hear(&mut charge, &Said::Forget { key: "door a".into() }, Vec::new());
    let (next, left) = found(&store);
    assert!(left.is_empty() && next.doors.is_empty());
}

/// A worker that died as it left its guest has taken the name away at which the door was found. The VMM may be none that connects again.
#[test]
fn a_door_that_is_open_listens_at_another_socket_and_keeps_who_is_inside() {
    let bench = Bench::new();
    let store = StandIn::default();
    let mut charge = charge(&store);
    bench.keep(&mut charge, SERVED, "");
    bench.door(&mut charge, 0, "a");
    let path = bench.directory.path().join("0.sock");
    let mut inside = UnixStream::connect(&path).expect("let in");
    // GET_FEATURES.
    inside.write_all(&[1_u32, 1, 0].map(u32::to_ne_bytes).concat()).expect("said");
    let worker = Channel::from(bench.worker.try_clone().expect("a descriptor"));
    let (order, connection) = worker.receive::<Order>().expect("read").expect("an order");
    assert!(matches!(order, Order::Connection { disk: 0, .. }), "{order:?}");
    bench.door(&mut charge, 0, "a");
    let mut next = UnixStream::connect(&path).expect("somebody listens");
    next.set_read_timeout(Some(Duration::from_secs(60))).expect("a bound");
    assert_eq!(next.read(&mut [0; 1]).expect("the end"), 0, "the disk is somebody's");
    let is_inside = |inside: &mut UnixStream| {
        inside.set_nonblocking(true).expect("not blocking");
        inside.read(&mut [0; 1]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    };
    assert!(is_inside(&mut inside));
    // So it is for the next supervisor.
    let (found, keys) = found(&store);
    assert_eq!(keys, [("a".to_owned(), "0".to_owned())]);
    drop(charge);
    assert!(is_inside(&mut inside));
    UnixStream::connect(&path).expect("somebody listens");
    drop((found, connection));
}

/// A socket may not arrive: a process that has no room for one more descriptor is given none.
#[test]
fn a_door_whose_socket_does_not_arrive_is_made_by_the_next_worker_or_stays_where_it_is() {
    let bench = Bench::new();
    let store = StandIn::default();
    let mut charge = charge(&store);
    bench.keep(&mut charge, SERVED, "");
    let without = Said::Door { disk: 0, name: "a".to_owned() };
    bench.hear(&mut charge, &without, Vec::new());
    assert_eq!((charge.doors.len(), charge.kept.all(DOOR)), (0, Vec::new()), "nobody takes it for one that is open");
    bench.door(&mut charge, 0, "a");
    bench.hear(&mut charge, &without, Vec::new());
    assert_eq!((charge.doors.len(), charge.kept.all(DOOR)), (1, vec![("a".to_owned(), "0".to_owned())]));
    UnixStream::connect(bench.directory.path().join("0.sock")).expect("somebody listens");
}

#[test]
fn what_a_worker_says_ends_nobody_else() {
    let bench = Bench::new();
    let store = StandIn::default();
    let mut charge = charge(&store);
    bench.keep(&mut charge, SERVED, "");
    for name in ["\0", "a\0b", "a\n", &"a".repeat(4096)] {
        bench.door(&mut charge, 0, name);
        assert!(charge.doors.is_empty() && charge.kept.all(DOOR).is_empty(), "{name:?}");
    }
    let before = store.len();
    for number in 0..2000 {
        bench.door(&mut charge, 0, &format!("d{number}"));
    }
    assert_eq!((charge.doors.len(), charge.kept.all(DOOR).len()), (1, 1));
    assert!(store.len() < before + 10, "{}", store.len());
    assert!(found(&store).0.doors.contains_key(&0));
    // Whatever is to be told in whatever way, nobody waits for it.
    let (reads, writes) = rustix::pipe::pipe().expect("a pipe");
    rustix::io::ioctl_fionbio(&writes, true).expect("not blocking");
    while rustix::io::write(&writes, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writes, false).expect("blocking");
    bench.hear(&mut charge, &Said::Settle, vec![writes]);
    drop(reads);
    let (mut reads, writes) = UnixStream::pair().expect("a pair");
    bench.hear(&mut charge, &Said::Settle, vec![writes.try_clone().expect("a socket").into()]);
    reads.set_read_timeout(Some(Duration::from_secs(60))).expect("a bound");
    reads.read_exact(&mut [0; 1]).expect("it is told");
    writes.set_nonblocking(true).expect("not blocking");
    while rustix::io::write(&writes, &[0; 4096]).is_ok() {}
    writes.set_nonblocking(false).expect("blocking");
    bench.hear(&mut charge, &Said::Settle, vec![writes.into()]);
}

#[test]
fn what_another_program_keeps_is_nobodys_to_go_on_with() {
    let charge = Charge::of_another_program("2 (amberlog 0.1)");
    let doubt = charge.doubt().expect("a reason");
    assert!(doubt.contains("2 (amberlog 0.1)") && !charge.vmm_has_ended() && charge.living_vmm().is_none(), "{doubt}");
}

/// Whoever else has the descriptor still.
#[test]
fn an_image_is_free_when_it_is_forgotten() {
    let bench = Bench::new();
    let path = bench.directory.path().join("image");
    std::fs::write(&path, [0; 4096]).expect("written");
    let open = || block_device::Image::open(&path, block_device::ImageOptions { is_raw: true, ..Default::default() });
    let image = open().expect("opened");
    let kept = image.file().try_clone().expect("a descriptor");
    image.leave_locks();
    drop(image);
    let store = StandIn::default();
    let mut charge = charge(&store);
    bench.hear(&mut charge, &Said::Keep { key: "image a".into(), data: String::new() }, vec![kept.into()]);
    open().expect_err("it is in use");
    // The store does not hear of it.
    let _store = store.of_a_dead_process();
    bench.hear(&mut charge, &Said::Forget { key: "image a".into() }, Vec::new());
    open().expect("it is free");
}
