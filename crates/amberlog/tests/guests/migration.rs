//! A guest is moved from one daemon to another while it writes, back again, saved to a file and restored; where it must not go on it
//! does not.
//!
//! Two hosts are two daemons, each in a mount namespace with a /dev/shm of its own. The guests are emulated: the paravirtual KVM of the
//! machines on which this is tested does not carry a guest over by itself.

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

const DIRECTORY: &str = "/mnt/a";
const STREAM: &str = "a";

/// A daemon, and the namespace that it is in.
struct Host {
    daemon: Daemon,
    namespace: Child,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.namespace.kill();
        let _ = self.namespace.wait();
    }
}

impl Host {
    fn new(bench: &Bench, name: &str, image: &Path, placement: &str) -> Self {
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
        let text = format!(
            "shm = \"/dev/shm/area\"\nrun = {run:?}\n[migration]\nexperimental = true\n[[vm]]\nname = \"v\"\n\
             disks = [\"{},placement={placement}\"]\n",
            image.display()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new("nsenter");
        command.args(Self::inside(&namespace)).arg(amberlog());
        let daemon = Daemon::start_at(command, &run, &bench.path(&format!("{name}.log")), &config);
        Host { daemon, namespace }
    }

    fn inside(namespace: &Child) -> [String; 3] {
        ["-t".to_owned(), namespace.id().to_string(), "-m".to_owned()]
    }

    fn spec(&self, script: &str, incoming: Option<&str>) -> GuestSpec {
        let mut spec = self.daemon.spec_with("v", script, &["--reconnect"]);
        spec.accelerator = Some(Accelerator::Tcg);
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
    let qmp = guest.qmp().unwrap();
    qmp.execute("migrate-set-parameters", json!({"max-bandwidth": 1u64 << 31, "downtime-limit": 300})).unwrap();
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
    let last = guest.acknowledged(STREAM).last.unwrap_or(0);
    if let Err(error) = guest.wait_acknowledged(STREAM, last + 20, LIMIT) {
        panic!("{error}\n{}", host.daemon.log());
    }
}

fn end(guest: &mut Guest) -> Reported {
    let _ = guest.qmp().map(|qmp| qmp.quit());
    let _ = guest.wait_end(LIMIT);
    guest.forgive();
    guest.final_report()
}

fn layout_of(placement: &str) -> RecordLayout {
    overwritten(if placement == "copy" { 92 } else { 91 })
}

fn a_guest_is_moved_and_moved_back(placement: &str) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tried: only root can make mount namespaces");
        return;
    }
    let bench = Bench::new();
    let image: PathBuf = bench.path("d.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let hosts = [Host::new(&bench, "one", &image, placement), Host::new(&bench, "two", &image, placement)];
    let layout = layout_of(placement);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir {DIRECTORY}\n{}",
        record_writer(DIRECTORY, STREAM, &layout, "--forever")
    );
    assert_eq!(hosts[0].migration()["images"], "awaited");
    let mut guest = Guest::start(hosts[0].spec(&script, None)).unwrap();
    goes_on(&mut guest, &hosts[0]);
    assert_eq!(journal_superblock(&image).errno, -5, "held");
    assert_eq!(hosts[0].migration()["possible"], true);
    let uri = format!("unix:{}", bench.path("move").display());
    for hop in 0..2 {
        let [from, to] = [&hosts[hop % 2], &hosts[(hop + 1) % 2]];
        let mut next = Guest::launch(to.spec(&script, Some(&uri))).unwrap();
        assert_eq!(to.migration()["images"], "awaited");
        migrate(&mut guest, &uri);
        await_migration(&mut guest, "completed");
        assert_eq!(from.migration()["images"], "given-up", "{}", from.daemon.log());
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
    // A migration that is cancelled, or over before that.
    let nowhere = format!("unix:{}", bench.path("nowhere").display());
    let sink = Command::new("socat").args(["-u", &format!("UNIX-LISTEN:{}", &nowhere[5..]), "/dev/null"]).spawn();
    if let Ok(mut sink) = sink {
        std::thread::sleep(Duration::from_millis(300));
        migrate(&mut guest, &nowhere);
        let _ = guest.qmp().unwrap().execute("migrate_cancel", Value::Null);
        std::thread::sleep(Duration::from_secs(1));
        let _ = guest.qmp().unwrap().cont();
        goes_on(&mut guest, &hosts[0]);
        let _ = sink.kill();
        let _ = sink.wait();
    }
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
    a_guest_is_moved_and_moved_back("retain");
}
