//! `amberlog detach`: a daemon ends, its guests stay, and the next daemon takes them.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use guest_kit::evidence::RecordLayout;
use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::{Guest, Reported, judge};
use serde_json::Value;
use std::path::Path;
use test_storage::TestStorage;

#[track_caller]
fn more(guest: &mut Guest, stream: &str) {
    let last = guest.acknowledged(stream).last.unwrap_or(0);
    guest.wait_acknowledged(stream, last + 10, LIMIT).unwrap();
}

#[track_caller]
fn assert_goes_on(daemon: &Daemon, vm: &str, guest: &mut Guest, stream: &str, placement: &str) {
    let entry = daemon.wait_state(vm, "running");
    assert_eq!(entry["pid"], guest.qemu_pid().unwrap(), "{entry}");
    let last = guest.acknowledged(stream).last.unwrap_or(0);
    if let Err(error) = guest.wait_acknowledged(stream, last + 10, LIMIT) {
        panic!("{error}\n--- the daemon's log\n{}", daemon.log());
    }
    let entry = daemon.wait_state(vm, "running");
    assert_eq!(entry["disks"][0]["placement"], placement, "{entry}");
}

fn detach(daemon: Daemon) {
    let output = daemon.ask(&["detach"]);
    assert_eq!(output.status.code(), Some(0), "{}\n{}", text(&output.stderr), daemon.log());
    assert_eq!(daemon.wait().code(), Some(0));
}

/// The host is lost now: what was told is in the image, whose journal is an ordinary one.
#[track_caller]
pub(super) fn assert_survives_the_host(
    bench: &Bench,
    image: &Path,
    directory: &str,
    layout: &RecordLayout,
    reported: &Reported,
) {
    assert_eq!(journal_superblock(image).errno, 0);
    let copy = bench.path("lost");
    copy_image(image, &copy).unwrap();
    let lost = FileSystem::whole(copy);
    judge::replay_with_e2fsck(&lost).unwrap();
    assert_consistent(&lost);
    assert_records(&lost, directory, &directory[1..], layout, reported);
}

/// Its guest waits for a daemon: nobody else may write to the image, and whoever would is told so before.
#[track_caller]
fn assert_is_in_use(image: &Path, pid: u32) {
    let before = std::fs::metadata(image).unwrap().modified().unwrap();
    let sentence = format!("the guest of process {pid} (VM r) goes on with it under the next amberlog");
    let disk = ["--disk".as_ref(), image.as_os_str()];
    let refused = amberlog_with(["recover".as_ref(), disk[0], disk[1]]);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains(&sentence), "{}", text(&refused.stderr));
    let inspected = amberlog_with(["inspect".as_ref(), disk[0], disk[1]]);
    assert_eq!(inspected.status.code(), Some(0), "all of it is there: {}", text(&inspected.stderr));
    assert!(text(&inspected.stderr).contains(&sentence), "{}", text(&inspected.stderr));
    let refused = amberlog_with(["run".as_ref(), disk[0], disk[1], "--".as_ref(), "true".as_ref()]);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains(&sentence), "{}", text(&refused.stderr));
    assert_eq!(std::fs::metadata(image).unwrap().modified().unwrap(), before, "nothing was changed");
}

/// Two guests, one with its journal in its memory, one on NVM, go on from one daemon to the next, again and again; a third,
/// whose journal is dropped, cannot, and then nobody is left.
#[test]
fn guests_go_on_under_the_next_daemon() {
    let bench = Bench::new();
    let [r, n, d] = ["r.img", "n.img", "d.img"].map(|name| bench.path(name));
    let [fs_r, fs_n, _] = [&r, &n, &d].map(|image| ExtRecipe::ext4(96, 8).make(image).unwrap());
    let region = bench.path("region");
    let config = write_config(
        &bench,
        &[
            ("r", r.to_str().unwrap().to_owned()),
            ("n", format!("{},placement=nvm={},nvm-size=16", n.display(), region.display())),
            ("d", format!("{},placement=discard", d.display())),
        ],
    );
    let daemon = Daemon::start(&bench, &config);
    let [of_r, of_n, after] = [81, 82, 83].map(overwritten);
    let mount = "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a /mnt/b";
    let writer = |name: &str, layout: &RecordLayout| record_writer(&format!("/mnt/{name}"), name, layout, "--forever");
    let script_r = format!("{mount}\n{}", writer("a", &of_r));
    let script_n = format!(
        "exec 5</dev/ttyS1
        {mount}
        {} & writer=$!
        read -r line <&5
        kill $writer; wait $writer
        umount /mnt || fail umount
        mount -t ext4 -o data=journal /dev/vda /mnt || fail 'second mount'
        mark again
        {}",
        writer("a", &of_n),
        writer("b", &after),
    );
    let start = |vm: &str, script: &str| Guest::start(daemon.spec_with(vm, script, &["--reconnect"])).unwrap();
    let mut guest_r = start("r", &script_r);
    let mut guest_n = start("n", &script_n);
    let mut guest_d = start("d", &format!("{mount}\necho x >/mnt/x; sync; mark dropped; sleep 1000"));
    guest_d.wait_mark("dropped", LIMIT).unwrap();
    for guest in [&mut guest_r, &mut guest_n] {
        guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    }
    assert_eq!([&r, &n].map(|image| journal_superblock(image).errno), [-5, -5], "held");

    let refused = daemon.ask(&["detach"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("vm d: the journal of disk disk0 has placement discard"),
        "{}",
        text(&refused.stderr)
    );
    more(&mut guest_r, "a");
    assert_eq!(journal_superblock(&r).errno, -5, "and nothing was changed");
    guest_d.forgive();
    guest_d.kill_qemu().unwrap();
    daemon.wait_state("d", "waiting");

    detach(daemon);
    bench.assert_area_is_empty();
    let inspected = amberlog_with(["inspect".as_ref(), "--json".as_ref(), "--nvm".as_ref(), region.as_os_str()]);
    let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
    assert_eq!(inspected["owner"], Value::Null, "the region is free");
    assert_is_in_use(&r, guest_r.qemu_pid().unwrap());
    assert_survives_the_host(&bench, &r, "/a", &of_r, &guest_r.reported());
    assert_survives_the_host(&bench, &n, "/a", &of_n, &guest_n.reported());

    // On storage until the next mount.
    let daemon = Daemon::start(&bench, &config);
    assert_goes_on(&daemon, "r", &mut guest_r, "a", "storage");
    assert_goes_on(&daemon, "n", &mut guest_n, "a", "storage");
    assert_survives_the_host(&bench, &r, "/a", &of_r, &guest_r.reported());
    guest_n.tell("again").unwrap();
    guest_n.wait_mark("again", LIMIT).unwrap();
    guest_n.wait_acknowledged("b", 20, LIMIT).unwrap();
    assert_goes_on(&daemon, "n", &mut guest_n, "b", "nvm");
    assert_eq!(journal_superblock(&n).errno, -5, "held again");

    // A VMM that ends while there is no daemon is finished by the next one.
    detach(daemon);
    guest_r.kill_qemu().unwrap();
    guest_r.wait_end(LIMIT).unwrap();
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("r", "waiting");
    assert!(daemon.log().contains("vm r: the VMM that was left running has ended"), "{}", daemon.log());
    replay_left(&r);
    assert_consistent(&fs_r);
    assert_records(&fs_r, "/a", "a", &of_r, &guest_r.final_report());
    assert_goes_on(&daemon, "n", &mut guest_n, "b", "storage");

    // A daemon that is killed with what outlives it leaves nothing that another could go on with, whoever began.
    daemon.kill_with_depot();
    let daemon = Daemon::start(&bench, &config);
    let waits = daemon.wait_state("n", "failed");
    assert!(waits["state_text"].as_str().unwrap().contains("in use"), "{waits}");
    guest_n.kill_qemu().unwrap();
    daemon.wait_state("n", "waiting");
    replay_left(&n);
    assert_consistent(&fs_n);
    let reported = guest_n.final_report();
    assert_records(&fs_n, "/a", "a", &of_n, &reported);
    assert_records(&fs_n, "/b", "b", &after, &reported);
}

/// A VM that is paused would hang if it went on without a daemon: it is named, and nobody is left, unless that is said.
#[test]
fn a_paused_vm_is_named_and_not_left() {
    let bench = Bench::new();
    let image = bench.path("image");
    ExtRecipe::ext4(48, 4).make(&image).unwrap();
    let config = write_config(&bench, &[("p", image.to_str().unwrap().to_owned())]);
    let daemon = Daemon::start(&bench, &config);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/a", "a", &overwritten(91), "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("p", script, &["--reconnect"])).unwrap();
    guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    let entry = daemon.wait_state("p", "running");
    assert_eq!((&entry["state"], &entry["disks"][0]["rings_started"]), (&"running".into(), &true.into()), "{entry}");
    assert_eq!((&entry["vmm_pid"], &entry["pending"]), (&guest.qemu_pid().unwrap().into(), &Value::Null), "{entry}");
    let effective = entry["disks"][0]["placement_effective"].as_str().unwrap();
    assert_eq!(effective == "retain", entry["disks"][0]["placement_reason"].is_null(), "{entry}");

    guest.qmp().unwrap().stop().unwrap();
    let refused = daemon.ask(&["detach"]);
    assert_eq!(refused.status.code(), Some(1));
    let stderr = text(&refused.stderr);
    assert!(stderr.contains("vm p: it is paused") && stderr.contains("--with-paused"), "{stderr}");
    assert_eq!(daemon.wait_state("p", "running")["disks"][0]["rings_started"], false);
    assert_eq!(journal_superblock(&image).errno, -5, "nothing was changed");
    guest.qmp().unwrap().cont().unwrap();
    more(&mut guest, "a");

    guest.qmp().unwrap().stop().unwrap();
    let output = daemon.ask(&["detach", "--with-paused"]);
    assert_eq!(output.status.code(), Some(0), "{}\n{}", text(&output.stderr), daemon.log());
    assert!(daemon.log().contains("vm p: it is paused; it must not go on"), "{}", daemon.log());
    assert_eq!(daemon.wait().code(), Some(0));
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("p", "running");
    guest.kill_qemu().unwrap();
    daemon.wait_state("p", "waiting");
    let lines = daemon.log();
    assert!(lines.lines().any(|line| line.contains("vm p: disk disk0: ")), "{lines}");
    assert!(!lines.contains('\x1b'), "no colours in a file: {lines}");
}

/// The configuration has been changed since: the guest has the disks that it had.
#[test]
fn a_guest_that_was_left_gets_no_other_disks() {
    let bench = Bench::new();
    let [a, b] = ["a.img", "b.img"].map(|name| bench.path(name));
    let [file_system, other] = [&a, &b].map(|image| ExtRecipe::ext4(96, 8).make(image).unwrap());
    let path = |image: &Path| image.to_str().unwrap().to_owned();
    let config = write_config(&bench, &[("one", path(&a))]);
    let text = std::fs::read_to_string(&config).unwrap();
    let write = |disks: &[&Path]| {
        let disks: Vec<String> = disks.iter().map(|disk| path(disk)).collect();
        let (head, _) = text.split_once("disks = ").unwrap();
        std::fs::write(&config, format!("{head}disks = {disks:?}\n")).unwrap();
    };
    write(&[&a, &b]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(84);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{}",
        record_writer("/mnt/a", "a", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("one", script, &["--reconnect"])).unwrap();
    guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    detach(daemon);
    write(&[&b]);
    let daemon = Daemon::start(&bench, &config);
    more(&mut guest, "a");
    assert_eq!(daemon.wait_state("one", "running")["pending"], "changed");
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    // From here on it is as the configuration says.
    let entry = daemon.wait_state("one", "waiting");
    assert_eq!(entry["disks"].as_array().unwrap().len(), 1, "{entry}");
    replay_left(&a);
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
    assert_clean(&other);
}

/// A backup is put back while nobody has the image locked: the guest that was left would write what it has in memory over it.
#[test]
fn an_image_that_was_restored_meanwhile_is_none_of_the_guests() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let backup = bench.path("backup");
    copy_image(&image, &backup).unwrap();
    let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
    let daemon = Daemon::start(&bench, &config);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{}",
        record_writer("/mnt/a", "a", &overwritten(85), "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("one", script, &["--reconnect"])).unwrap();
    guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    detach(daemon);
    // In place: device, inode and size stay.
    std::fs::copy(&backup, &image).unwrap();
    let daemon = Daemon::start(&bench, &config);
    let refused = daemon.wait_state("one", "failed");
    let why = refused["state_text"].as_str().unwrap();
    assert!(why.contains("was written to since by somebody else"), "{why}");
    let pid = guest.qemu_pid().unwrap();
    assert!(why.contains(&format!("the guest of process {pid}")), "{why}");
    assert_eq!(refused["vmm_pid"], pid, "{refused}");
    let health = daemon.ask(&["health"]);
    assert_eq!((health.status.code(), text(&health.stdout).contains("was written to since")), (Some(1), true));
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    // It is another disk by now, and served as it is.
    let entry = daemon.wait_state("one", "waiting");
    assert_eq!(entry["disks"][0]["fault"], Value::Null, "{entry}");
    assert!(std::fs::read(&image).unwrap() == std::fs::read(&backup).unwrap(), "nobody has changed the backup");
    assert_clean(&file_system);
    let mut next = Guest::start(daemon.spec_with(
        "one",
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n[ -e /mnt/a ] && fail restored\necho new >/mnt/new; sync; mark new; sleep 1000",
        &["--reconnect"],
    ))
    .unwrap();
    next.wait_mark("new", LIMIT).unwrap();
    // And once more, untouched: nothing keeps it from going on.
    detach(daemon);
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("one", "running");
    next.kill_qemu().unwrap();
    daemon.wait_state("one", "waiting");
    replay_left(&image);
    assert_consistent(&file_system);
}

/// Storage says once that a flush has failed, to who has the image open then. The guest hears of it whoever serves it by then.
#[test]
fn a_flush_that_fails_when_a_guest_is_left_is_told() {
    let bench = Bench::new();
    let plain = bench.path("plain");
    std::fs::write(&plain, vec![0; 8 << 20]).unwrap();
    let storage = match TestStorage::new(&plain) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    let config = write_config(&bench, &[("one", storage.image().to_str().unwrap().to_owned())]);
    let daemon = Daemon::start(&bench, &config);
    let script = "exec 5</dev/ttyS1
        dd if=/dev/zero of=/dev/vda bs=4k count=1 seek=5 oflag=direct || fail write
        mark written
        read -r line <&5
        dd if=/dev/zero of=/dev/vda bs=4k count=1 seek=6 conv=fsync && fail 'not told'
        dd if=/dev/zero of=/dev/vda bs=4k count=1 seek=7 conv=fsync || fail 'told twice'
        mark told
        sleep 1000";
    let mut guest = Guest::start(daemon.spec_with("one", script, &["--reconnect"])).unwrap();
    guest.wait_mark("written", LIMIT).unwrap();
    storage.set_fail_flushes(true);
    let refused = daemon.ask(&["detach"]);
    let stderr = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("disk disk0: flushing the image") && stderr.contains("may be lost"), "{stderr}");
    daemon.wait_state("one", "running");
    // From here on it says that all is well.
    storage.set_fail_flushes(false);
    let left = daemon.ask(&["detach"]);
    let stderr = text(&left.stderr);
    assert_eq!(left.status.code(), Some(1), "{stderr}\n{}", daemon.log());
    assert!(stderr.contains("has the next flush of these disks fail: vm one, disk disk0"), "{stderr}");
    assert_eq!(daemon.wait().code(), Some(0));

    let daemon = Daemon::start(&bench, &config);
    let entry = daemon.wait_state("one", "running");
    assert!(entry["disks"][0]["fault"].as_str().unwrap().contains("a flush of its image had failed"), "{entry}");
    guest.tell("go on").unwrap();
    guest.wait_mark("told", LIMIT).unwrap();
    guest.kill_qemu().unwrap();
    daemon.wait_state("one", "waiting");
}

/// One that could be migrated, too: its next daemon's worker dies, and the one after that knows that the guest has begun there.
#[test]
fn a_guest_that_was_left_goes_on_whose_next_worker_dies() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("v", image.to_str().unwrap().to_owned())]);
    let text_of = std::fs::read_to_string(&config).unwrap();
    let with_migration = text_of.replacen("[[vm]]", "[migration]\nexperimental = true\n[[vm]]", 1);
    assert_ne!(with_migration, text_of);
    std::fs::write(&config, with_migration).unwrap();
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(84);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec_with("v", &script, &["--reconnect"])).unwrap();
    guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    detach(daemon);
    let daemon = Daemon::start(&bench, &config);
    more(&mut guest, "a");
    crate::worker::kill_nine(daemon.wait_state("v", "running")["worker_pid"].as_u64().unwrap() as u32);
    more(&mut guest, "a");
    assert!(!guest.console().contains("I/O error"), "{}", guest.console());
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("v", "waiting");
    replay_left(&image);
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}
