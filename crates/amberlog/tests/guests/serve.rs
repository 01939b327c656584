//! `amberlog serve`: VMs that others start, several at once, while guests, QEMUs and the daemon die.

use crate::remote::{JournalServer, TO_SERVER, more_is_acknowledged};
use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::workload::Workload;
use guest_kit::{AtEnd, Guest, GuestSpec, Signal, judge};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// A daemon in a process of its own.
pub(super) struct Daemon {
    process: Child,
    run: PathBuf,
    log: PathBuf,
}

impl Daemon {
    /// Starts one on `config`, whose sockets are in `run`; its log goes to the end of the one before.
    pub(super) fn start(bench: &Bench, config: &Path) -> Self {
        Self::start_by(Command::new(amberlog()), bench, config)
    }

    /// The same with a command that becomes amberlog.
    pub(super) fn start_by(command: Command, bench: &Bench, config: &Path) -> Self {
        Self::start_at(command, &bench.path("run"), &bench.path("daemon.log"), config)
    }

    /// The same with sockets in `run`, and a log of its own.
    pub(super) fn start_at(mut command: Command, run: &Path, log: &Path, config: &Path) -> Self {
        let (run, log) = (run.to_owned(), log.to_owned());
        let file = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let process = command
            .args(["serve".as_ref(), "--config".as_ref(), config.as_os_str()])
            .stdin(Stdio::null())
            .stdout(File::create("/dev/null").unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        Self { process, run, log }
    }

    pub(super) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    pub(super) fn ask(&self, words: &[&str]) -> Output {
        amberlog_with(words.iter().map(OsString::from).chain(["--run".into(), self.run.clone().into()]))
    }

    pub(super) fn json(&self, words: &[&str]) -> Value {
        let output = self.ask(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}\n{}", text(&output.stderr), self.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Its entry in `status`, as it is now.
    pub(super) fn entry(&self, vm: &str) -> Value {
        self.json(&["status", "--json", vm])
    }

    /// Waits until a VM's state begins so; gives its entry.
    #[track_caller]
    pub(super) fn wait_state(&self, vm: &str, state: &str) -> Value {
        let deadline = Instant::now() + LIMIT;
        loop {
            let output = self.ask(&["status", "--json", vm]);
            if let Ok(entry) = serde_json::from_slice::<Value>(&output.stdout)
                && entry["state"].as_str().is_some_and(|now| now.starts_with(state))
            {
                return entry;
            }
            assert!(
                Instant::now() < deadline,
                "vm {vm} is not {state}: {}{}\n{}",
                text(&output.stdout),
                text(&output.stderr),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A guest on a VM's disks, started as `amberlog arguments` says.
    pub(super) fn spec(&self, vm: &str, script: impl Into<String>) -> GuestSpec {
        self.spec_with(vm, script, &[])
    }

    /// The same with more words for `amberlog arguments`.
    pub(super) fn spec_with(&self, vm: &str, script: impl Into<String>, more: &[&str]) -> GuestSpec {
        self.wait_state(vm, "waiting");
        let needed = self.json(&[&["arguments", vm, "--memory", "256", "--json"], more].concat());
        let word = |value: &Value| OsString::from(value.as_str().expect("a word"));
        let mut spec = GuestSpec::new(vm, script);
        spec.qemu_arguments = needed["arguments"].as_array().unwrap().iter().map(word).collect();
        let environment = needed["environment"].as_object().unwrap();
        spec.environment = environment.iter().map(|(name, value)| (name.into(), word(value))).collect();
        spec.at_end = AtEnd::Stay;
        spec.kernel_arguments = "no_timer_check".to_owned();
        spec
    }

    pub(super) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), signal).unwrap();
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills it together with the process that keeps descriptors over its death: nobody has anything that it had.
    pub(super) fn kill_with_depot(mut self) {
        self.signal(Signal::KILL);
        self.process.wait().unwrap();
        let depot = depot_of(&self.run).expect("a depot");
        crate::worker::kill_nine(depot);
        let deadline = Instant::now() + LIMIT;
        while depot_of(&self.run).is_some() {
            assert!(Instant::now() < deadline, "process {depot} does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn wait(mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The process that keeps descriptors over the death of a daemon whose sockets are in `run`.
pub(super) fn depot_of(run: &Path) -> Option<u32> {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let path = run.join("store.sock");
    // "Num RefCount Protocol Flags Type St Inode Path".
    let hears = sockets.lines().find(|line| line.ends_with(path.to_str().unwrap()) && line.contains(" 00010000 "))?;
    let inode = format!("socket:[{}]", hears.split_whitespace().nth(6)?);
    let mut numbers =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(|pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "depot\n")
            && std::fs::read_link(format!("/proc/{pid}/fd/0")).is_ok_and(|input| input == Path::new(&inode))
    })
}

pub(super) fn write_config(bench: &Bench, vms: &[(&str, String)]) -> PathBuf {
    let path = bench.path("amberlog.toml");
    let mut text = format!(
        "shm = {:?}\nrun = {:?}\nreports = {:?}\n[remote]\ninsecure = true\ntimeout_ms = 20000\n",
        bench.area(),
        bench.path("run"),
        bench.path("")
    );
    for (name, disk) in vms {
        text += &format!("[[vm]]\nname = {name:?}\ndisks = [{disk:?}]\n");
    }
    std::fs::write(&path, text).unwrap();
    path
}

fn report_of(bench: &Bench, vm: &str) -> Report {
    Report(serde_json::from_slice(&std::fs::read(bench.path(&format!("{vm}.json"))).unwrap()).unwrap())
}

#[track_caller]
fn assert_work_is_there(load: &Workload, file_system: &FileSystem, guest: &Guest) {
    assert_consistent(file_system);
    let evidence = load.check(file_system, &guest.final_report()).unwrap();
    assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
    assert!(evidence.acknowledged > 20);
}

/// Waits until the daemon has logged something so often.
#[track_caller]
fn wait_for(daemon: &Daemon, what: &str, times: usize) {
    let deadline = Instant::now() + LIMIT;
    while daemon.log().matches(what).count() < times {
        assert!(Instant::now() < deadline, "'{what}' was not logged {times} times:\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Two VMs, one with its journal on a server: flushed, killed, started again, taken out and added; then the daemon is killed
/// under the second, and the next one brings home what was on the server as soon as the QEMU that waits for it is gone.
#[test]
fn a_daemon_serves_vms_that_others_start_and_the_next_one_finishes_its_work() {
    let bench = Bench::new();
    let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]);
    let [a, b, c] = ["a.img", "b.img", "c.img"].map(|name| bench.path(name));
    let [fs_a, fs_b, fs_c] = [&a, &b, &c].map(|image| ExtRecipe::ext4(96, 8).make(image).unwrap());
    let disk = |image: &Path| image.to_str().unwrap().to_owned();
    let of_b = format!("{},placement=remote={}/b", disk(&b), server.address);
    let config = write_config(&bench, &[("a", disk(&a)), ("b", of_b.clone())]);
    let daemon = Daemon::start(&bench, &config);
    let (load_a, load_b) = (Workload::new(71).without_postmark(), Workload::new(72).without_postmark());
    let mut guest_a = Guest::start(daemon.spec("a", load_a.script())).unwrap();
    let mut guest_b = Guest::start(daemon.spec("b", load_b.script())).unwrap();
    more_is_acknowledged(&mut guest_a, 5);

    // What it shows, and to whom it says no.
    let entry = daemon.wait_state("a", "running");
    let counter = |entry: &Value, name: &str| entry["disks"][0]["counters"][name].as_u64().unwrap();
    assert_eq!(entry["pid"].as_u64(), Some(guest_a.qemu_pid().unwrap().into()));
    assert!(counter(&entry, "transactions") > 0 && counter(&entry, "blocks_retained_now") > 0, "{entry}");
    assert!(counter(&entry, "pages_protected") > 0, "nothing was protected: {entry}\n{}", daemon.log());
    let top = daemon.ask(&["top", "--count", "2", "--interval", "0.1"]);
    assert_eq!(text(&top.stdout).matches("running").count(), 4, "{}", text(&top.stdout));
    let again = amberlog_with(["serve".as_ref(), "--config".as_ref(), config.as_os_str()]);
    assert!(text(&again.stderr).contains("another daemon answers"), "{}", text(&again.stderr));
    let run = amberlog_with(["run".as_ref(), "--disk".as_ref(), a.as_os_str(), "--".as_ref(), "true".as_ref()]);
    assert!(run.status.code() == Some(1) && text(&run.stderr).contains("in use"), "{}", text(&run.stderr));

    // All that was acknowledged is on the image itself once it was flushed.
    guest_a.freeze().unwrap();
    let flushed = daemon.ask(&["flush", "a"]);
    assert_eq!(flushed.status.code(), Some(0), "{}", text(&flushed.stderr));
    let copy = bench.path("copy");
    copy_image(&a, &copy).unwrap();
    let evidence = load_a.check(&FileSystem::whole(copy.clone()), &guest_a.reported()).unwrap();
    assert!(evidence.faults.is_empty() && evidence.acknowledged > 20, "{evidence:?}");
    guest_a.thaw().unwrap();
    more_is_acknowledged(&mut guest_a, 3);

    // The lights are about to go out: from now on the journal is on storage, and what is acknowledged survives the host.
    let placement = |vm: &str, to: &str| {
        let output = daemon.ask(&["placement", vm, "disk0", to]);
        assert_eq!(output.status.code(), Some(0), "{}\n{}", text(&output.stderr), daemon.log());
        text(&output.stdout)
    };
    assert!(placement("a", "storage").contains("done"));
    let entry = daemon.wait_state("a", "running");
    assert_eq!(entry["disks"][0]["placement"], "storage", "{entry}");
    assert_eq!(counter(&entry, "blocks_retained_now"), 0);
    assert_eq!(journal_superblock(&a).errno, 0);
    more_is_acknowledged(&mut guest_a, 5);
    guest_a.freeze().unwrap();
    copy_image(&a, &copy).unwrap();
    let lost_host = FileSystem::whole(copy.clone());
    judge::replay_with_e2fsck(&lost_host).unwrap();
    assert_consistent(&lost_host);
    let evidence = load_a.check(&lost_host, &guest_a.reported()).unwrap();
    assert!(evidence.faults.is_empty(), "{evidence:?}");
    guest_a.thaw().unwrap();
    assert!(placement("a", "retain").contains("next mount"));
    more_is_acknowledged(&mut guest_a, 3);

    // The journal server is to be mended: the journal stays away from it until it is wished back.
    more_is_acknowledged(&mut guest_b, 3);
    let before = guest_b.reported();
    placement("b", "storage");
    assert_eq!(journal_superblock(&b).errno, 0, "storage says that all of it is there when that is said to be done");
    wait_for(&daemon, "as wished", 2);
    let of_moment = bench.path("of-b");
    let made = daemon.ask(&["snapshot", "b", "disk0", &of_moment.display().to_string()]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let evidence = load_b.check(&FileSystem::whole(of_moment), &before).unwrap();
    assert!(evidence.faults.is_empty() && evidence.acknowledged > 0, "{evidence:?}");
    more_is_acknowledged(&mut guest_b, 3);
    placement("b", "remote");
    wait_for(&daemon, TO_SERVER, 2);

    // QEMU dies: its work is in the journal on storage, and its disks wait for the next one.
    guest_a.kill_qemu().unwrap();
    daemon.wait_state("a", "waiting");
    assert_eq!(report_of(&bench, "a").status(0), "materialised");
    replay_left(&a);
    assert_work_is_there(&load_a, &fs_a, &guest_a);
    drop(guest_a);
    let script = format!(
        "mount -t ext4 /dev/vda /mnt || fail mount
        {NOTHING_TO_REPLAY}
        umount /mnt"
    );
    let mut next = daemon.spec("a", script);
    next.at_end = AtEnd::PowerOff;
    Guest::run(next, LIMIT).unwrap();
    daemon.wait_state("a", "waiting");

    // Another configuration: one VM less, one more; the one that runs does not notice.
    write_config(&bench, &[("b", of_b), ("c", disk(&c))]);
    daemon.signal(Signal::HUP);
    daemon.wait_state("c", "waiting");
    let gone = daemon.ask(&["status", "a"]);
    assert!(text(&gone.stderr).contains("there is no vm a"), "{}", text(&gone.stderr));
    more_is_acknowledged(&mut guest_b, 3);
    assert!(daemon.log().contains(TO_SERVER), "{}", daemon.log());

    // The daemon is killed, with what outlives it. The next one leaves the VM alone while its QEMU lives, whose guest waits for its disk.
    daemon.kill_with_depot();
    assert_eq!(journal_superblock(&b).errno, -5);
    let daemon = Daemon::start(&bench, &config);
    let waits = daemon.wait_state("b", "failed");
    assert!(waits["state_text"].as_str().unwrap().contains("in use"), "{waits}");
    guest_b.kill_qemu().unwrap();
    daemon.wait_state("b", "waiting");
    assert!(daemon.log().contains("brought home what an earlier run left on the journal server"), "{}", daemon.log());
    assert_work_is_there(&load_b, &fs_b, &guest_b);

    // Asked to end, it ends the VM and brings all home.
    let layout = appended(9);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/c", "c", &layout, "--forever")
    );
    let mut guest_c = Guest::start(daemon.spec("c", script)).unwrap();
    guest_c.wait_acknowledged("c", 20, LIMIT).unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    let reported = guest_c.final_report();
    assert_consistent(&fs_c);
    assert_records(&fs_c, "/c", "c", &layout, &reported);
    bench.assert_area_is_empty();
}

/// A journal leaves NVM under a working guest: from then on what is acknowledged survives the host. With the guest's next mount
/// it is back, and survives QEMU and the daemon, killed together.
#[test]
fn a_journal_leaves_nvm_under_a_guest_and_comes_back_with_the_next_mount() {
    leaves_nvm_and_is_elsewhere_with_the_next_mount("nvm");
}

/// The same, and it is held in memory then: a disk with a region is like any other.
#[test]
fn a_journal_leaves_nvm_under_a_guest_and_is_retained_with_the_next_mount() {
    leaves_nvm_and_is_elsewhere_with_the_next_mount("retain");
}

fn leaves_nvm_and_is_elsewhere_with_the_next_mount(at_last: &str) {
    let bench = Bench::new();
    let (image, region) = (bench.path("n.img"), bench.area().join("region"));
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let disk = format!("{},placement=nvm={},nvm-size=16", image.display(), region.display());
    let config = write_config(&bench, &[("n", disk)]);
    let daemon = Daemon::start(&bench, &config);
    let (first, second) = (overwritten(75), overwritten(76));
    let script = format!(
        "exec 5</dev/ttyS1
        mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        mkdir /mnt/a /mnt/b
        {} & writer=$!
        read -r line <&5
        kill $writer; wait $writer
        umount /mnt || fail umount
        mount -t ext4 -o data=journal /dev/vda /mnt || fail 'second mount'
        mark again
        {}",
        record_writer("/mnt/a", "a", &first, "--forever"),
        record_writer("/mnt/b", "b", &second, "--forever"),
    );
    let mut guest = Guest::start(daemon.spec("n", script)).unwrap();
    guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    let entry = daemon.wait_state("n", "running");
    assert_eq!((&entry["disks"][0]["placement"], journal_superblock(&image).errno), (&"nvm".into(), -5), "{entry}");

    // Flushed, all of it is on the image itself.
    guest.freeze().unwrap();
    let reported = guest.reported();
    let flushed = daemon.ask(&["flush", "n"]);
    assert_eq!(flushed.status.code(), Some(0), "{}", text(&flushed.stderr));
    let copy = bench.path("copy");
    copy_image(&image, &copy).unwrap();
    assert_records(&FileSystem::whole(copy.clone()), "/a", "a", &first, &reported);
    guest.thaw().unwrap();

    let placement = |to: &str| {
        let output = daemon.ask(&["placement", "n", "disk0", to]);
        assert_eq!(output.status.code(), Some(0), "{}\n{}", text(&output.stderr), daemon.log());
        text(&output.stdout)
    };
    for wished in ["retain", "copy"] {
        assert!(placement(wished).contains("next mount"));
    }
    let refused = daemon.ask(&["placement", "n", "disk0", "remote"]);
    assert!(text(&refused.stderr).contains("cannot go from nvm"), "{}", text(&refused.stderr));
    let more = |guest: &mut Guest| {
        let last = guest.acknowledged("a").last.unwrap_or(0);
        guest.wait_acknowledged("a", last + 10, LIMIT).unwrap();
    };
    assert!(placement("storage").contains("done"));
    let entry = daemon.wait_state("n", "running");
    assert_eq!((&entry["disks"][0]["placement"], journal_superblock(&image).errno), (&"storage".into(), 0), "{entry}");
    let inspected = amberlog_with(["inspect".as_ref(), "--json".as_ref(), "--nvm".as_ref(), region.as_os_str()]);
    let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
    assert_eq!(inspected["owner"], Value::Null, "the region is free");
    more(&mut guest);
    guest.freeze().unwrap();
    let reported = guest.reported();
    copy_image(&image, &copy).unwrap();
    let lost_host = FileSystem::whole(copy.clone());
    judge::replay_with_e2fsck(&lost_host).unwrap();
    assert_consistent(&lost_host);
    assert_records(&lost_host, "/a", "a", &first, &reported);
    guest.thaw().unwrap();
    more(&mut guest);

    for wished in ["retain", "nvm", at_last] {
        assert!(placement(wished).contains("next mount"));
    }
    more(&mut guest);
    guest.tell("again").unwrap();
    guest.wait_mark("again", LIMIT).unwrap();
    guest.wait_acknowledged("b", 20, LIMIT).unwrap();
    let entry = daemon.wait_state("n", "running");
    assert_eq!((&entry["disks"][0]["placement"], journal_superblock(&image).errno), (&at_last.into(), -5), "{entry}");
    daemon.signal(Signal::KILL);
    drop(daemon);
    guest.kill_all().unwrap();
    let reported = guest.final_report();
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("n", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &first, &reported);
    assert_records(&file_system, "/b", "b", &second, &reported);
}

/// A connection that says nothing is no VMM, whatever it is for; and the sockets are there for whom the configuration names.
/// A backup is put in the place of an image whose VM is not running: it is what the next guest has.
#[test]
fn an_image_that_was_put_in_the_place_of_another_one_is_the_one_that_is_served() {
    let bench = Bench::new();
    let (image, backup) = (bench.path("image"), bench.path("backup"));
    ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("db", image.display().to_string())]);
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("db", "waiting");
    let write = |name: &str| {
        format!("mount /dev/vda /mnt || fail mount\ntouch /mnt/{name} || fail {name}\numount /mnt || fail umount")
    };
    let mut guest = Guest::start(daemon.spec_with("db", write("of-before"), &[])).unwrap();
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0);
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    let restored = ExtRecipe::ext4(64, 8).make(&backup).unwrap();
    std::fs::rename(&backup, &image).unwrap();
    wait_for(&daemon, "an image is another file now", 1);
    daemon.wait_state("db", "waiting");
    let mut guest = Guest::start(daemon.spec_with("db", write("of-after"), &[])).unwrap();
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0);
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    let file_system = FileSystem { image: image.clone(), ..restored };
    assert_clean(&file_system);
    let listed = Command::new("debugfs").args(["-R", "ls -p /"]).arg(&image).output().unwrap();
    let listed = text(&listed.stdout);
    assert!(listed.contains("of-after") && !listed.contains("of-before"), "{listed}");
}

#[test]
fn a_silent_connection_is_no_vmm_and_sockets_belong_to_whom_they_shall() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let bench = Bench::new();
    let images = [bench.path("a.img"), bench.path("b.img")];
    images.iter().for_each(|image| File::create(image).unwrap().set_len(1 << 20).unwrap());
    let disk = |image: &Path| image.to_str().unwrap().to_owned();
    let config = write_config(&bench, &[("a", disk(&images[0])), ("b", disk(&images[1]))]);
    std::fs::set_permissions(bench.path(""), std::fs::Permissions::from_mode(0o711)).unwrap();
    // A group that this process may give things to, and that is not its own if it is root.
    let group = if rustix::process::geteuid().is_root() { 54_321 } else { rustix::process::getegid().as_raw() };
    let mut text = std::fs::read_to_string(&config).unwrap();
    text += &format!("[vm.sockets]\ngroup = \"{group}\"\n");
    std::fs::write(&config, text).unwrap();
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("a", "waiting");
    daemon.wait_state("b", "waiting");
    let socket = |vm: &str| bench.path("run").join(vm).join("disk0.sock");
    let mut silent = std::os::unix::net::UnixStream::connect(socket("a")).unwrap();
    silent.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert!(std::io::Read::read(&mut silent, &mut [0]).is_err(), "it is let be");
    let entry = daemon.json(&["status", "--json", "a"]);
    assert!(entry["state"].as_str().unwrap().starts_with("waiting"), "{entry}");

    let seen = |path: &Path| {
        let metadata = std::fs::metadata(path).unwrap();
        (metadata.permissions().mode() & 0o7777, metadata.gid())
    };
    let own = rustix::process::getegid().as_raw();
    let run = bench.path("run");
    assert_eq!((seen(&run).0, seen(&run.join("control.sock"))), (0o711, (0o600, own)));
    assert_eq!((seen(&run.join("a")).0, seen(&socket("a"))), (0o700, (0o600, own)));
    let memory = run.join("b/area/ram");
    for (path, mode) in
        [(&run.join("b"), 0o710), (&run.join("b/area/"), 0o710), (&socket("b"), 0o660), (&memory, 0o660)]
    {
        assert_eq!(seen(path), (mode, group), "{}", path.display());
    }
    assert_eq!(seen(&run.join("b/shim.sock")), (0o660, group));
    assert_eq!(seen(&run.join("b/area/lock")).0 & 0o077, 0);
    if own == 0 {
        let may = |uid: &str, gid: u32, path: &Path| {
            let ids = [format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".to_owned()];
            let test = Command::new("setpriv").args(ids).arg("test").arg("-w").arg(path).status().unwrap();
            test.success()
        };
        assert!(may("65534", group, &socket("b")) && may("65534", group, &memory), "who is named comes in");
        assert!(!may("65534", 65534, &socket("b")) && !may("65534", 65534, &memory), "and nobody else");
        assert!(!may("65534", group, &socket("a")) && !may("65534", group, &run.join("control.sock")));
        assert!(!may("65534", group, &run.join("b/area/lock")) && !may("65534", group, &run.join("b")));
    }
}

/// A second process that asks for a disk of a VM is turned away, and so is a QEMU that went on without its daemon; with all
/// killed at once, the next daemon brings home what was retained. All of it in directories that a VMM of another user can
/// pass through.
#[test]
fn a_daemon_turns_strangers_away_and_recovers_when_all_are_killed() {
    let bench = Bench::new();
    let image = bench.path("a.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("a", image.to_str().unwrap().to_owned())]);
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replacen("[[vm]]", "[sockets]\ngroup = \"0\"\n[[vm]]", 1)).unwrap();
    let daemon = Daemon::start(&bench, &config);
    let load = Workload::new(73).without_postmark();
    let spec = daemon.spec("a", load.script());
    let mut guest = Guest::start(spec.clone()).unwrap();
    more_is_acknowledged(&mut guest, 5);

    // The same memory file and the same disk, for another process: it gets neither.
    let mut second = Guest::launch(spec).unwrap();
    second.forgive();
    wait_for(&daemon, "is turned away", 1);
    drop(second);
    more_is_acknowledged(&mut guest, 5);

    daemon.signal(Signal::KILL);
    drop(daemon);
    guest.kill_all().unwrap();
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("a", "waiting");
    assert!(daemon.log().contains("finished an earlier run's recovery"), "{}", daemon.log());
    assert_work_is_there(&load, &file_system, &guest);
}

/// A QEMU without the library has no lock, and would come back to the next daemon by itself. That one leaves the guest's
/// memory alone all the same, and finishes the work when QEMU is gone.
#[test]
fn a_guest_without_the_library_is_left_alone_while_it_lives() {
    let bench = Bench::new();
    let image = bench.path("a.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("a", image.to_str().unwrap().to_owned())]);
    let daemon = Daemon::start(&bench, &config);
    let load = Workload::new(74).without_postmark();
    let mut spec = daemon.spec("a", load.script());
    spec.environment.clear();
    for word in &mut spec.qemu_arguments {
        if word.to_string_lossy().starts_with("socket,") {
            word.push(format!(",{}", guest_kit::program::reconnect_property().unwrap()));
        }
    }
    let mut guest = Guest::start(spec).unwrap();
    more_is_acknowledged(&mut guest, 5);
    daemon.kill_with_depot();
    let daemon = Daemon::start(&bench, &config);
    let waits = daemon.wait_state("a", "failed");
    assert!(waits["state_text"].as_str().unwrap().contains("in use"), "{waits}");
    assert!(guest.wait_end(Duration::from_secs(3)).is_err(), "the guest's memory was taken away: it has reset itself");
    guest.kill_qemu().unwrap();
    daemon.wait_state("a", "waiting");
    assert_work_is_there(&load, &file_system, &guest);
}

/// A VM that is prepared again and again costs the daemon nothing that adds up.
#[test]
fn a_daemon_that_is_reloaded_often_does_not_grow() {
    let bench = Bench::new();
    let image = bench.path("a.img");
    ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let store = bench.path("store");
    let server = JournalServer::start(&store, "127.0.0.1:0", &[]);
    let disk = |number: u32| format!("{},placement=remote={}/a,serial={number}", image.display(), server.address);
    let config = write_config(&bench, &[("a", disk(0))]);
    let daemon = Daemon::start(&bench, &config);
    let used = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", daemon.process.id())).unwrap().count();
    let mut first = None;
    daemon.wait_state("a", "waiting");
    for round in 1..=8 {
        write_config(&bench, &[("a", disk(round))]);
        daemon.signal(Signal::HUP);
        wait_for(&daemon, "waits for its VMM", round as usize + 1);
        // Threads of the round before see within their next wait that they are over.
        let deadline = Instant::now() + Duration::from_secs(60);
        let now = || (used("task"), used("fd"));
        let allowed = *first.get_or_insert_with(|| {
            std::thread::sleep(Duration::from_secs(1));
            now()
        });
        while now().0 > allowed.0 || now().1 > allowed.1 {
            assert!(
                Instant::now() < deadline,
                "round {round}: {:?} threads and descriptors, {allowed:?} at first",
                now()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// What is wrong is all said, by `--check` and of a VM that cannot be served; what a daemon makes itself is made.
#[test]
fn everything_that_is_wrong_is_said() {
    let bench = Bench::new();
    let good = bench.path("good");
    ExtRecipe::ext4(16, 4).make(&good).unwrap();
    let (zeros, qcow2) = (bench.path("zeros"), bench.path("q.img"));
    std::fs::write(&zeros, vec![0; 1 << 20]).unwrap();
    std::fs::write(&qcow2, b"QFI\xfb\0\0\0\x03".repeat(1000)).unwrap();
    let config = bench.path("amberlog.toml");
    let write = |vms: &str| {
        let (run, reports) = (bench.path("run"), bench.path("some/reports"));
        let head = format!("shm = {:?}\nrun = {run:?}\nreports = {reports:?}\n", bench.area());
        std::fs::write(&config, head + vms).unwrap();
    };
    let check = || {
        let output = amberlog_with(["serve".as_ref(), "--check".as_ref(), "--config".as_ref(), config.as_os_str()]);
        (output.status.code(), text(&output.stderr))
    };
    let vm =
        |name: &str, disks: &[String]| format!("[[vm]]\nname = {name:?}\nmemory_budget_mib = 1\ndisks = {disks:?}\n");
    let shown = |path: &Path| path.display().to_string();

    write(&(vm("a", &[shown(&good)]) + &vm("b", &[shown(&qcow2), shown(&bench.path("none")), "/etc".into()])));
    let (code, said) = check();
    assert_eq!(code, Some(1), "{said}");
    for words in ["q.img is a qcow2 image", "none does not exist", "/etc is neither"] {
        assert!(said.contains(&format!("vm b: {}", if words.starts_with("q.") { "" } else { "the image " })), "{said}");
        assert!(said.contains(words), "{words}: {said}");
    }
    write(&vm("b", &[shown(&qcow2)]));
    assert_eq!(check().0, Some(3), "only a refused image");
    write(&(vm("a", &["relative".into()]) + &vm("b", &[format!("{},placement=moon", shown(&good))])));
    let (code, said) = check();
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("vm a: ") && said.contains("vm b: "), "{said}");
    assert!(!bench.path("some").exists() && !bench.path("run").exists(), "a check makes nothing");

    // Two VMs read one image; one disk has nothing on it.
    let base = format!("{},name=base,readonly", shown(&good));
    let disks = [base.clone(), shown(&zeros)];
    write(&(vm("a", &disks) + &vm("b", &[base]) + &vm("c", &[shown(&qcow2), shown(&bench.path("none"))])));
    assert_eq!(check().0, Some(1));
    let daemon = Daemon::start(&bench, &config);
    let entry = daemon.wait_state("a", "waiting");
    assert_eq!(entry["disks"][0]["placement_effective"], "storage", "{entry}");
    let reason = |index: usize| entry["disks"][index]["placement_reason"].as_str().unwrap_or_default().to_owned();
    assert!(reason(0).contains("only read it") && reason(1).contains("zeros"), "{entry}");
    assert!(daemon.log().contains("vm a: disk disk1: nothing of it is held"), "{}", daemon.log());
    daemon.wait_state("b", "waiting");
    let failed = daemon.wait_state("c", "failed");
    let said = failed["state_text"].as_str().unwrap().to_owned();
    assert!(said.contains("qcow2") && said.contains("none does not exist"), "{said}");
    assert!(bench.path("some/reports").is_dir(), "made at the start");
    // It stays so between attempts, and a change is told.
    for _ in 0..40 {
        let output = daemon.ask(&["status", "--json", "c"]);
        let entry: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(entry["state"], "failed", "{entry}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let (code, said) = check();
    assert!(code == Some(1) && said.contains("a daemon answers"), "{said}");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    bench.assert_area_is_empty();
}
