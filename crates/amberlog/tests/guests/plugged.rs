//! Disks that are plugged into a running guest, and unplugged: they come and go with a new worker, and the guest's other disks do not
//! notice.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, Kernel, Signal};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// What `disk add` prints for QMP is what is done.
#[track_caller]
pub(super) fn add(daemon: &Daemon, guest: &mut Guest, disk: &str) -> Vec<Value> {
    let output = daemon.ask(&["disk", "add", "db", disk]);
    assert!(output.status.success(), "{}\n{}", text(&output.stderr), daemon.log());
    let said = text(&output.stdout);
    let commands: Vec<Value> = said.lines().filter_map(|line| serde_json::from_str(line.trim()).ok()).collect();
    assert_eq!(commands.len(), 2, "{said}");
    plug(guest, &commands);
    commands
}

fn plug(guest: &mut Guest, commands: &[Value]) {
    for command in commands {
        guest.qmp().unwrap().execute(command["execute"].as_str().unwrap(), command["arguments"].clone()).unwrap();
    }
}

#[track_caller]
pub(super) fn unplug(guest: &mut Guest, name: &str) {
    let id = format!("amberlog-{name}");
    let device = format!("{id}-device");
    guest.qmp().unwrap().execute("device_del", json!({"id": device})).unwrap();
    // It is gone when the guest has let go of it.
    let deadline = Instant::now() + LIMIT;
    let list = json!({"path": "/machine/peripheral"});
    loop {
        let devices = guest.qmp().unwrap().execute("qom-list", list.clone()).unwrap();
        if !devices.as_array().unwrap().iter().any(|entry| entry["name"] == device.as_str()) {
            break;
        }
        assert!(Instant::now() < deadline, "the guest does not let go of {device}");
        std::thread::sleep(Duration::from_millis(50));
    }
    forget(guest, &id);
}

/// Ends the connection of a disk whose device has gone, which lets go of it a moment later.
#[track_caller]
fn forget(guest: &mut Guest, connection: &str) {
    let deadline = Instant::now() + LIMIT;
    while let Err(error) = guest.qmp().unwrap().execute("chardev-remove", json!({"id": connection})) {
        assert!(error.to_string().contains("busy") && Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Another one can have it.
fn is_free(image: &Path) -> bool {
    block_device::Image::open(image, block_device::ImageOptions::default()).is_ok()
}

#[track_caller]
fn refused(daemon: &Daemon, words: &[&str], sentence: &str) {
    let output = daemon.ask(&[&["disk"], words].concat());
    assert_eq!(output.status.code(), Some(1), "{words:?}: {}", text(&output.stdout));
    assert!(text(&output.stderr).contains(sentence), "{words:?}: {}", text(&output.stderr));
}

#[test]
fn disks_are_plugged_in_and_unplugged_under_a_guest() {
    let bench = Bench::new();
    let (first, second, third) = (bench.path("first"), bench.path("second"), bench.path("third"));
    let root = ExtRecipe::ext4(64, 8).make(&first).unwrap();
    let more = ExtRecipe::ext4(48, 8).make(&second).unwrap();
    ExtRecipe::ext4(48, 8).make(&third).unwrap();
    let config = write_config(&bench, &[("db", first.to_str().unwrap().to_owned())]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(31);
    let wait_for_vdb = |what: &str, test: &str| {
        format!(
            "tries=0
             until [ {test} /dev/vdb ]; do
                 tries=$((tries + 1)); [ $tries -lt 1200 ] || fail 'the disk {what}'
                 sleep 0.1
             done"
        )
    };
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {root} &
         mark mounted
         {comes}
         mkdir /tmp/more
         mount -t ext4 -o data=journal /dev/vdb /tmp/more || fail 'mount more'
         {clean} || fail 'the records'
         umount /tmp/more || fail umount
         mark unmounted
         {goes}
         mark gone
         {comes_again}
         mount -t ext4 -o data=journal,errors=continue /dev/vdb /tmp/more || fail 'mount more again'
         {torn}",
        root = record_writer("/mnt/root", "root", &layout, "--forever"),
        comes = wait_for_vdb("did not come", "-b"),
        clean = record_writer("/tmp/more/clean", "clean", &overwritten(32), "--count 40"),
        goes = wait_for_vdb("did not go", "! -b"),
        comes_again = wait_for_vdb("did not come again", "-b"),
        torn = record_writer("/tmp/more/torn", "torn", &overwritten(33), "--forever"),
    );
    let mut spec = daemon.spec_with("db", script, &[]);
    spec.kernel = Some(Kernel::stock().unwrap().clone());
    spec.machine = "pc".to_owned();
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("mounted", LIMIT).unwrap();
    guest.wait_acknowledged("root", 5, LIMIT).unwrap();

    let other = second.to_str().unwrap();
    refused(&daemon, &["add", "db", &format!("{other},name=disk0")], "give this one another name");
    refused(&daemon, &["add", "db", &bench.path("none").to_string_lossy()], "does not exist");
    refused(&daemon, &["add", "db", first.to_str().unwrap()], "an image has one user");
    refused(&daemon, &["remove", "db", "disk0"], "is the only one");
    refused(&daemon, &["remove", "db", "more"], "no disk more");
    assert!(is_free(&second), "{}", daemon.log());
    assert_eq!(daemon.wait_state("db", "running")["restarts"], 0, "nothing was changed");
    // Another worker goes on with it, too, where a commit is told of when it is durable.
    let output = daemon.ask(&["placement", "db", "disk0", "retain", "--durable-within", "0"]);
    assert!(output.status.success(), "{}", text(&output.stderr));

    let commands = add(&daemon, &mut guest, &format!("{other},name=more"));
    assert!(!is_free(&second));
    // At once after another worker has begun, and of a disk that is mounted.
    refused(&daemon, &["remove", "db", "disk0"], "is in use: unplug it first");
    refused(&daemon, &["remove", "db", "more"], "is in use: unplug it first");
    guest.wait_mark("unmounted", LIMIT).unwrap();
    unplug(&mut guest, "more");
    guest.wait_mark("gone", LIMIT).unwrap();
    let output = daemon.ask(&["disk", "remove", "db", "more"]);
    assert!(output.status.success(), "{}\n{}", text(&output.stderr), daemon.log());
    assert!(is_free(&second), "{}", daemon.log());
    assert_consistent(&more);
    assert_records(&more, "/clean", "clean", &overwritten(32), &guest.reported());

    // Once more, and torn out of a file system that is mounted; and a worker dies between.
    add(&daemon, &mut guest, &format!("{other},name=more"));
    guest.wait_acknowledged("torn", 30, LIMIT).unwrap();
    let entry = daemon.wait_state("db", "running");
    assert_eq!(entry["disks"][1]["placement_effective"], Value::from("retain"), "{entry}");
    kill_nine(entry["worker_pid"].as_u64().unwrap() as u32);
    guest.wait_acknowledged("torn", guest.acknowledged("torn").count + 20, LIMIT).unwrap();
    unplug(&mut guest, "more");
    let output = daemon.ask(&["disk", "remove", "db", "more"]);
    assert!(output.status.success(), "{}\n{}", text(&output.stderr), daemon.log());
    assert!(is_free(&second), "{}", daemon.log());
    assert_consistent(&more);
    assert_records(&more, "/torn", "torn", &overwritten(33), &guest.reported());

    // A worker dies in the midst of it, somewhere. Three deaths in ten seconds would have the VM held.
    for pause in [0, 5, 20, 60, 150] {
        for words in [["disk", "add", "db", &format!("{other},name=more")], ["disk", "remove", "db", "more"]] {
            std::thread::sleep(Duration::from_millis(5200));
            let pid = daemon.wait_state("db", "running")["worker_pid"].as_u64().unwrap() as u32;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(pause));
                    // Another worker may have taken its place by now.
                    if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
                        let _ = rustix::process::kill_process(pid, Signal::KILL);
                    }
                });
                daemon.ask(&words);
            });
            let is_wanted = words[1] == "add";
            let deadline = Instant::now() + LIMIT;
            loop {
                let entry = daemon.wait_state("db", "running");
                let disks = entry["disks"].as_array().unwrap();
                if disks.iter().any(|disk| disk["name"] == "more") == is_wanted && is_free(&second) != is_wanted {
                    break;
                }
                assert!(Instant::now() < deadline, "{words:?} after {pause} ms: {entry}\n{}", daemon.log());
                daemon.ask(&words);
            }
        }
    }

    // The same by the configuration, which is read again.
    let before = std::fs::read_to_string(&config).unwrap();
    let line = format!("disks = [{:?}, {:?}]", first.to_str().unwrap(), format!("{},name=third", third.display()));
    let one = format!("disks = [{:?}]", first.to_str().unwrap());
    std::fs::write(&config, before.replace(&one, &line)).unwrap();
    daemon.signal(Signal::HUP);
    let served = |count: usize| {
        let deadline = Instant::now() + LIMIT;
        while daemon.wait_state("db", "running")["disks"].as_array().unwrap().len() != count {
            assert!(Instant::now() < deadline, "{}", daemon.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    served(2);
    assert!(!is_free(&third));
    assert_eq!(daemon.wait_state("db", "running")["pending"], Value::Null);
    std::fs::write(&config, before).unwrap();
    daemon.signal(Signal::HUP);
    served(1);
    assert!(is_free(&third));

    // One of two that are to go is in use: the other one had been let go of, and can be plugged in as before.
    let before = std::fs::read_to_string(&config).unwrap();
    let disks = [first.display().to_string(), format!("{other},name=more"), format!("{},name=third", third.display())];
    std::fs::write(&config, before.replace(&one, &format!("disks = {disks:?}"))).unwrap();
    daemon.signal(Signal::HUP);
    served(3);
    let as_third = serde_json::to_string(&commands).unwrap().replace("more", "third");
    plug(&mut guest, &serde_json::from_str::<Vec<Value>>(&as_third).unwrap());
    std::fs::write(&config, &before).unwrap();
    daemon.signal(Signal::HUP);
    let deadline = Instant::now() + LIMIT;
    while !daemon.log().contains("disk more was let go of before, and can be plugged in again") {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    served(3);
    plug(&mut guest, &commands);
    while daemon.wait_state("db", "running")["disks"][1]["rings_started"] != true {
        assert!(Instant::now() < deadline, "its driver does not begin: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    unplug(&mut guest, "more");
    unplug(&mut guest, "third");
    for name in ["more", "third"] {
        let output = daemon.ask(&["disk", "remove", "db", name]);
        assert!(output.status.success(), "{}\n{}", text(&output.stderr), daemon.log());
    }
    assert!(is_free(&second) && is_free(&third), "{}", daemon.log());

    let count = guest.acknowledged("root").count;
    guest.wait_acknowledged("root", count + 10, LIMIT).unwrap();
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    assert_consistent(&root);
    assert_records(&root, "/root", "root", &layout, &guest.final_report());
}

/// The only disk is torn out of a mounted file system, and then the worker dies: pages that it protected are written to by whoever has them next,
/// and no disk tells the next worker where they are.
#[test]
fn a_guest_goes_on_whose_worker_dies_when_it_has_no_disk_any_more() {
    // A guest that has written to none of these pages, which is its kernel's affair, has shown nothing.
    assert!((0..6).any(|_| goes_on_without_a_disk()), "no guest wrote to a page that was protected");
}

/// Whether the guest has written to a page that was protected.
fn goes_on_without_a_disk() -> bool {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("db", format!("{}{PROTECTED}", image.display()))]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(34);
    let script = format!(
        "exec 5</dev/ttyS1
         mount -t ext4 -o data=journal,errors=continue /dev/vda /mnt || fail mount
         {writer} &
         mark mounted
         tries=0
         while [ -b /dev/vda ]; do
             tries=$((tries + 1)); [ $tries -lt 1200 ] || fail 'the disk did not go'
             sleep 0.1
         done
         umount -l /mnt
         mark gone
         read -r line <&5
         round=0
         while true; do
             free=$(sed -n 's/^MemAvailable: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo)
             dd if=/dev/zero of=/fill bs=1M count=$((free / 1024 - 8)) 2> /dev/null
             rm /fill
             echo 3 > /proc/sys/vm/drop_caches
             round=$((round + 1))
             mark round-$round
         done",
        writer = record_writer("/mnt/a", "a", &layout, "--forever"),
    );
    let mut spec = daemon.spec_with("db", script, &[]);
    spec.kernel = Some(Kernel::stock().unwrap().clone());
    spec.machine = "pc".to_owned();
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("mounted", LIMIT).unwrap();
    guest.wait_acknowledged("a", 200, LIMIT).unwrap();
    guest.qmp().unwrap().execute("device_del", json!({"id": "amberlog0"})).unwrap();
    guest.wait_mark("gone", LIMIT).unwrap();
    forget(&mut guest, "amberlog-disk0");
    let before = daemon.wait_state("db", "running");
    let count = |entry: &Value, name: &str| entry["disks"][0]["counters"][name].as_u64().unwrap();
    assert!(count(&before, "blocks_retained_now") > 0, "{before}");
    kill_nine(before["worker_pid"].as_u64().unwrap() as u32);
    let deadline = Instant::now() + LIMIT;
    while daemon.wait_state("db", "running")["worker_pid"] == before["worker_pid"] {
        assert!(Instant::now() < deadline, "{}", daemon.log());
    }
    // Nobody has written to anything that was protected before there is a worker that does not know of it.
    guest.tell("go on").unwrap();
    if let Err(error) = guest.wait_mark("round-4", LIMIT) {
        panic!("{error}\n{}", daemon.log());
    }
    let entry = daemon.wait_state("db", "running");
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &guest.final_report());
    entry["latency"]["fault"]["count"].as_u64() > Some(0)
}
