//! A guest is moved from one daemon to another while it writes, back again, saved to a file and restored; where it must not go on it
//! does not.
//!
//! Two hosts are two daemons, each in a mount namespace with a /dev/shm of its own. The guests are emulated: the paravirtual KVM of the
//! machines on which this is tested does not carry a guest over by itself. QEMU 7.2 (Debian 12) does not either: it damages guests that it
//! moves, with disks of its own, too. So guests are moved under QEMU 10.0 and newer, and where there is an older one they are stopped, sealed
//! and given up as if they were moved, and go on where they are.

use crate::serve::Daemon;
use crate::support::*;
use guest_kit::evidence::RecordLayout;
use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{Accelerator, Guest, GuestSpec, Reported, judge};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(super) const DIRECTORY: &str = "/mnt/a";
pub(super) const STREAM: &str = "a";

/// A daemon, and the namespace that it is in.
struct Host {
    daemon: Daemon,
    namespace: Child,
    /// Of each disk; the guest has as many processors, so that it uses them all.
    queues: u32,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.namespace.kill();
        let _ = self.namespace.wait();
    }
}

impl Host {
    fn new(bench: &Bench, name: &str, images: &[PathBuf], placement: &str, queues: u32) -> Self {
        let mut namespace = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c"])
            .arg("mount -t tmpfs tmpfs /dev/shm && mkdir -m 700 /dev/shm/area && echo ready && exec sleep 10000")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(namespace.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let run = bench.path(&format!("run-{name}"));
        let config = bench.path(&format!("{name}.toml"));
        let disks: Vec<String> =
            images.iter().map(|image| format!("{},placement={placement},queues={queues}", image.display())).collect();
        let text = format!(
            "shm = \"/dev/shm/area\"\nrun = {run:?}\n[migration]\nexperimental = true\n[[vm]]\nname = \"v\"\n\
             disks = {disks:?}\n"
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new("nsenter");
        command.args(Self::inside(&namespace)).arg(amberlog());
        let daemon = Daemon::start_at(command, &run, &bench.path(&format!("{name}.log")), &config);
        daemon.wait_state("v", "waiting");
        Host { daemon, namespace, queues }
    }

    fn inside(namespace: &Child) -> [String; 3] {
        ["-t".to_owned(), namespace.id().to_string(), "-m".to_owned()]
    }

    fn spec(&self, script: &str, incoming: Option<&str>) -> GuestSpec {
        let mut spec = self.daemon.spec_with("v", script, &["--reconnect"]);
        spec.accelerator = Some(Accelerator::Tcg);
        spec.cpus = self.queues;
        if let Some(uri) = incoming {
            spec.qemu_arguments.extend(["-incoming".into(), uri.into()]);
        }
        let inside = Self::inside(&self.namespace);
        spec.wrapper(std::iter::once("nsenter".to_owned()).chain(inside))
    }

    fn migration(&self) -> Value {
        self.daemon.entry("v")["migration"].clone()
    }
}

fn migrate(guest: &mut Guest, uri: &str) {
    migrate_at(guest, uri, 1 << 31);
}

fn migrate_at(guest: &mut Guest, uri: &str, bytes_a_second: u64) {
    let qmp = guest.qmp().unwrap();
    qmp.execute("migrate-set-parameters", json!({"max-bandwidth": bytes_a_second, "downtime-limit": 300})).unwrap();
    qmp.execute("migrate", json!({"uri": uri})).unwrap();
}

#[track_caller]
fn await_migration(guest: &mut Guest, wanted: &str) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let told = guest.qmp().unwrap().execute("query-migrate", Value::Null).unwrap();
        let status = told["status"].as_str().unwrap_or_default().to_owned();
        if status == wanted {
            return;
        }
        assert!(!["completed", "failed", "cancelled"].contains(&status.as_str()), "{told}");
        assert!(Instant::now() < deadline, "{told}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[track_caller]
fn goes_on(guest: &mut Guest, host: &Host) {
    // What one that was moved says first may have been on its way when it was stopped.
    let begun = guest.wait_acknowledged(STREAM, 1, LIMIT);
    let last = guest.acknowledged(STREAM).last.unwrap_or(0);
    if let Err(error) = begun.and_then(|_| guest.wait_acknowledged(STREAM, last + 20, LIMIT)) {
        panic!("{error}\n{}", host.daemon.log());
    }
    assert!(!guest.console().contains("FAILED"), "{}", guest.console());
    if host.queues > 1 {
        all_queues_go_on(guest);
    }
}

/// What the guest says of how often its disks' second queues were answered grows.
#[track_caller]
fn all_queues_go_on(guest: &Guest) {
    let answered = || {
        let console = guest.console();
        assert!(!console.contains("FAILED"), "{console}");
        // Its last line may not be whole yet.
        let whole = console.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let last = whole.lines().rfind(|line| line.starts_with(ANSWERED))?;
        last[ANSWERED.len()..].split_whitespace().map(|count| count.parse::<u64>().ok()).collect::<Option<Vec<_>>>()
    };
    let deadline = Instant::now() + LIMIT;
    let mut before: Option<Vec<u64>> = None;
    loop {
        let now = answered().filter(|now| now.len() == 2);
        match (&before, &now) {
            (None, Some(_)) => before.clone_from(&now),
            (Some(before), Some(now)) if before.iter().zip(now).all(|(before, now)| before < now) => return,
            _ => {}
        }
        assert!(Instant::now() < deadline, "before {before:?}, now {now:?}\n{}", guest.console());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn end(guest: &mut Guest) -> Reported {
    let _ = guest.qmp().map(|qmp| qmp.quit());
    let _ = guest.wait_end(LIMIT);
    guest.forgive();
    guest.final_report()
}

pub(super) fn layout_of(placement: &str) -> RecordLayout {
    overwritten(if placement == "copy" { 92 } else { 91 })
}

/// Only root can make mount namespaces.
fn can_be_tried() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can make mount namespaces");
    }
    is_root
}

/// Before how often the first disk's queues were answered.
const ANSWERED: &str = "answered: ";

/// Has each of two queues read into the guest's memory, and read it right, and has what writes the journals submit to one after the other: a
/// processor of the guest's is a queue.
const BESIDE: &str = "[ $(ls /sys/block/vda/mq | wc -l) = 2 ] || fail queues
dd if=/dev/urandom of=/mnt/known bs=64k count=16 conv=fsync 2>/dev/null || fail dd
sum=$(md5sum < /mnt/known)
(while :; do
    for mask in 1 2; do
        for journal in $(pidof jbd2/vda-8 jbd2/vdb-8); do taskset -p $mask $journal > /dev/null || fail taskset; done
        echo 1 > /proc/sys/vm/drop_caches
        [ \"$(taskset $mask md5sum < /mnt/known)\" = \"$sum\" ] || fail what was read
    done
    [ $(pidof jbd2/vda-8 jbd2/vdb-8 | wc -w) = 2 ] || fail journals
    echo answered: $(awk '/-req[.][01]$/ && seen < 2 { seen++; print $2 + $3 }' /proc/interrupts)
    sleep 0.2
done) &
";

/// Two disks: records are written to the first one, and something is written to the other one without end.
pub(super) fn images(bench: &Bench) -> (FileSystem, Vec<PathBuf>) {
    let images = vec![bench.path("d.img"), bench.path("e.img")];
    ExtRecipe::ext4(32, 4).make(&images[1]).unwrap();
    (ExtRecipe::ext4(96, 8).make(&images[0]).unwrap(), images)
}

pub(super) fn script_of(layout: &RecordLayout, queues: u32) -> String {
    let beside = if queues > 1 { BESIDE } else { "" };
    format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir {DIRECTORY} /tmp/e\n\
         mount -t ext4 -o data=journal /dev/vdb /tmp/e || fail mount of the other\n\
         (while :; do date > /tmp/e/date; sync /tmp/e/date; done) &\n{beside}{}",
        record_writer(DIRECTORY, STREAM, layout, "--forever")
    )
}

/// A guest that is stopped to be moved, and is not moved: whatever the version of QEMU, its memory stays where it is.
fn a_guest_is_not_moved_after_all(queues: u32) {
    if !can_be_tried() {
        return;
    }
    let bench = Bench::new();
    let (file_system, images) = images(&bench);
    let host = Host::new(&bench, "one", &images, "retain", queues);
    let layout = layout_of("retain");
    let mut guest = Guest::start(host.spec(&script_of(&layout, queues), None)).unwrap();
    goes_on(&mut guest, &host);
    let held = images.iter().map(|image| journal_superblock(image).errno).collect::<Vec<_>>();
    assert_eq!(held, [-5, -5], "held");
    // The other end takes all of it, and nobody begins there.
    for round in 0..3 {
        migrate(&mut guest, "exec:cat > /dev/null");
        await_migration(&mut guest, "completed");
        await_images(&host, "given-up", false);
        let on_storage = images.iter().map(|image| journal_superblock(image).errno).collect::<Vec<_>>();
        assert_eq!(on_storage, [0, 0], "on storage");
        if round == 1 {
            // Another worker: it has given them up, too.
            let pid = host.daemon.entry("v")["worker_pid"].as_i64().unwrap();
            let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        guest.qmp().unwrap().cont().unwrap();
        goes_on(&mut guest, &host);
        assert_eq!(host.migration()["images"], "ours");
    }
    // It takes so long that it is cancelled.
    migrate_at(&mut guest, "exec:cat > /dev/null", 1 << 16);
    let deadline = Instant::now() + LIMIT;
    while host.migration()["under_way"] != true {
        assert!(Instant::now() < deadline, "{}", host.daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    guest.qmp().unwrap().execute("migrate_cancel", Value::Null).unwrap();
    await_migration(&mut guest, "cancelled");
    goes_on(&mut guest, &host);
    let migration = host.migration();
    assert_eq!((&migration["images"], &migration["under_way"]), (&json!("ours"), &json!(false)));
    // Somebody writes to an image that was given up: its guest is not let in again.
    migrate(&mut guest, "exec:cat > /dev/null");
    await_migration(&mut guest, "completed");
    let before: Vec<Vec<u8>> = images.iter().map(|image| std::fs::read(image).unwrap()).collect();
    let writer = std::fs::File::options().write(true).open(&images[1]).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&writer, &before[1][..1], 0).unwrap();
    drop(writer);
    guest.qmp().unwrap().cont().unwrap();
    let deadline = Instant::now() + LIMIT;
    while !host.daemon.log().contains("was changed since its guest was stopped") {
        assert!(Instant::now() < deadline, "{}", host.daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(host.migration()["images"], "lost");
    for (image, before) in images.iter().zip(&before) {
        assert!(std::fs::read(image).unwrap() == *before, "it has written");
    }
    guest.kill_qemu().unwrap();
    guest.forgive();
    let reported = guest.final_report();
    host.daemon.wait_state("v", "waiting");
    drop(host);
    judge::replay_with_e2fsck(&file_system).unwrap();
    judge::replay_with_e2fsck(&FileSystem::whole(&images[1])).unwrap();
    assert_consistent(&FileSystem::whole(&images[1]));
    let file_system = FileSystem::whole(&images[0]);
    assert_consistent(&file_system);
    assert_records(&file_system, &DIRECTORY[4..], STREAM, &layout, &reported);
}

/// Nobody may set the time of an image's change, and so nobody can seal it, for as long as this is there.
struct Unsealable(PathBuf);

impl Unsealable {
    /// Nothing where the file system does not know that.
    fn new(image: &Path) -> Option<Self> {
        let changed = Command::new("chattr").arg("+a").arg(image).status();
        changed.is_ok_and(|status| status.success()).then(|| Unsealable(image.to_owned()))
    }
}

impl Drop for Unsealable {
    fn drop(&mut self) {
        let _ = Command::new("chattr").arg("-a").arg(&self.0).status();
    }
}

#[track_caller]
fn await_images(host: &Host, wanted: &str, has_trouble: bool) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let migration = host.migration();
        if migration["images"] == wanted && migration["trouble"].is_string() == has_trouble {
            return;
        }
        assert!(Instant::now() < deadline, "{migration}\n{}", host.daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What could not be given up when the guest was stopped is given up as soon as it can be, and until then that is said: the guest has left,
/// and waits at the other end. Unless it goes on here.
#[test]
fn images_that_could_not_be_given_up_are_given_up_later() {
    if !can_be_tried() {
        return;
    }
    let bench = Bench::new();
    let (file_system, images) = images(&bench);
    match Unsealable::new(&images[1]) {
        Some(unsealable) => drop(unsealable),
        None => return println!("skipped: the file system has no files that only grow"),
    }
    let host = Host::new(&bench, "one", &images, "retain", 1);
    let layout = layout_of("retain");
    let mut guest = Guest::start(host.spec(&script_of(&layout, 1), None)).unwrap();
    goes_on(&mut guest, &host);
    let is_moved_in_vain = |guest: &mut Guest| {
        let unsealable = Unsealable::new(&images[1]).unwrap();
        migrate(guest, "exec:cat > /dev/null");
        await_migration(guest, "completed");
        // Not only at that moment: QEMU has no more pages marked by now.
        for _ in 0..10 {
            await_images(&host, "ours", true);
            std::thread::sleep(Duration::from_millis(150));
        }
        assert!(!host.daemon.ask(&["health"]).status.success());
        unsealable
    };
    // It is mended, and the guest that waits gets them.
    drop(is_moved_in_vain(&mut guest));
    await_images(&host, "given-up", false);
    guest.qmp().unwrap().cont().unwrap();
    goes_on(&mut guest, &host);
    await_images(&host, "ours", false);
    // It goes on here, whatever could not be mended, and nothing is owed to anybody any more.
    let unsealable = is_moved_in_vain(&mut guest);
    guest.qmp().unwrap().cont().unwrap();
    goes_on(&mut guest, &host);
    await_images(&host, "ours", false);
    drop(unsealable);
    goes_on(&mut guest, &host);
    assert_eq!(host.migration()["images"], "ours");
    // Another worker knows it, too.
    let unsealable = is_moved_in_vain(&mut guest);
    let pid = host.daemon.entry("v")["worker_pid"].as_i64().unwrap();
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    // A worker opens them anew, which nobody could as they are.
    drop(unsealable);
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    await_images(&host, "given-up", false);
    guest.qmp().unwrap().cont().unwrap();
    goes_on(&mut guest, &host);
    // Its VMM ends before it could be tried again: what can be given up by then is.
    let unsealable = is_moved_in_vain(&mut guest);
    guest.kill_qemu().unwrap();
    guest.forgive();
    let reported = guest.final_report();
    drop(unsealable);
    host.daemon.wait_state("v", "waiting");
    drop(host);
    judge::replay_with_e2fsck(&file_system).unwrap();
    judge::replay_with_e2fsck(&FileSystem::whole(&images[1])).unwrap();
    assert_consistent(&FileSystem::whole(&images[1]));
    let file_system = FileSystem::whole(&images[0]);
    assert_consistent(&file_system);
    assert_records(&file_system, &DIRECTORY[4..], STREAM, &layout, &reported);
}

fn a_guest_is_moved_and_moved_back(placement: &str, queues: u32) {
    if !can_be_tried() {
        return;
    }
    let version = guest_kit::program::qemu_version().unwrap();
    if version.is_none_or(|version| version < (10, 0)) {
        println!("skipped: QEMU {version:?} damages guests that it moves; 10.0 and newer do not");
        return;
    }
    let bench = Bench::new();
    let (file_system, images) = images(&bench);
    let image = images[0].clone();
    let hosts = ["one", "two"].map(|name| Host::new(&bench, name, &images, placement, queues));
    let layout = layout_of(placement);
    let script = script_of(&layout, queues);
    assert_eq!(hosts[0].migration()["images"], "awaited");
    let mut guest = Guest::start(hosts[0].spec(&script, None)).unwrap();
    goes_on(&mut guest, &hosts[0]);
    assert_eq!(journal_superblock(&image).errno, -5, "held");
    assert_eq!(hosts[0].migration()["possible"], true);
    for hop in 0..2 {
        let [from, to] = [&hosts[hop % 2], &hosts[(hop + 1) % 2]];
        let path = bench.path(&format!("move-{hop}"));
        let uri = format!("unix:{}", path.display());
        let mut next = Guest::launch(to.spec(&script, Some(&uri))).unwrap();
        // It answers when it listens.
        next.qmp().unwrap();
        assert!(path.exists());
        assert_eq!(to.migration()["images"], "awaited");
        migrate(&mut guest, &uri);
        await_migration(&mut guest, "completed");
        await_images(from, "given-up", false);
        goes_on(&mut next, to);
        assert_eq!(to.migration()["images"], "ours");
        assert_eq!(journal_superblock(&image).errno, 0, "on storage");
        if hop == 0 {
            // By mistake: the copy that was left does not go on beside the other one.
            guest.qmp().unwrap().cont().unwrap();
            let before = guest.reported().acknowledged[STREAM].last;
            goes_on(&mut next, to);
            assert_eq!(guest.reported().acknowledged[STREAM].last, before, "two writers");
        }
        end(&mut guest);
        from.daemon.wait_state("v", "waiting");
        guest = next;
    }
    // Saved and restored where it is.
    let saved = bench.path("saved");
    migrate(&mut guest, &format!("exec:cat > {}", saved.display()));
    await_migration(&mut guest, "completed");
    end(&mut guest);
    hosts[0].daemon.wait_state("v", "waiting");
    let restore = format!("exec:cat {}", saved.display());
    let mut guest = Guest::launch(hosts[0].spec(&script, Some(&restore))).unwrap();
    goes_on(&mut guest, &hosts[0]);
    // The image has gone on since it was saved: that guest does not.
    guest.kill_qemu().unwrap();
    guest.forgive();
    let reported = guest.final_report();
    hosts[0].daemon.wait_state("v", "waiting");
    let before = std::fs::read(&image).unwrap();
    let mut stale = Guest::launch(hosts[0].spec(&script, Some(&restore))).unwrap();
    let deadline = Instant::now() + LIMIT;
    while hosts[0].migration()["images"] != "ours"
        || !hosts[0].daemon.log().contains("was changed since its guest was stopped")
    {
        assert!(Instant::now() < deadline, "{}", hosts[0].daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert!(std::fs::read(&image).unwrap() == before, "a stale guest has written");
    stale.kill_qemu().unwrap();
    stale.forgive();
    drop(stale);
    hosts[0].daemon.wait_state("v", "waiting");
    drop(hosts);
    judge::replay_with_e2fsck(&file_system).unwrap();
    let file_system = FileSystem::whole(&image);
    assert_consistent(&file_system);
    let mut reported = reported;
    // Of a stream that began elsewhere, what was told last counts.
    if let Some(told) = reported.acknowledged.get_mut(STREAM) {
        told.out_of_order = 0;
    }
    assert_records(&file_system, &DIRECTORY[4..], STREAM, &layout, &reported);
}

#[test]
fn a_guest_with_retained_journals_is_moved() {
    a_guest_is_moved_and_moved_back("retain", 1);
}

#[test]
fn a_guest_with_several_queues_is_moved() {
    a_guest_is_moved_and_moved_back("retain", 2);
}

#[test]
fn a_guest_that_is_not_moved_after_all_goes_on_where_it_is() {
    a_guest_is_not_moved_after_all(1);
}

#[test]
fn a_guest_with_several_queues_that_is_not_moved_after_all_goes_on() {
    a_guest_is_not_moved_after_all(2);
}
