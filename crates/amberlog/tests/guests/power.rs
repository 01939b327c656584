//! The host runs on battery, and what guests are told is durable then is on storage.

use crate::detach::assert_survives_the_host;
use crate::serve::{Daemon, write_config};
use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::ExtRecipe;
use serde_json::Value;

#[test]
fn on_battery_what_is_acknowledged_is_on_storage() {
    let bench = Bench::new();
    let [first, second] = ["first.img", "second.img"].map(|name| bench.path(name));
    let [_, fs_second] = [&first, &second].map(|image| ExtRecipe::ext4(64, 8).make(image).unwrap());
    let config =
        write_config(&bench, &[("first", first.display().to_string()), ("second", second.display().to_string())]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(31);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/records", "records", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("first", script.clone(), &[])).unwrap();
    guest.wait_acknowledged("records", 20, LIMIT).unwrap();
    let placement = |vm: &str, state: &str| daemon.wait_state(vm, state)["disks"][0]["placement"].clone();
    assert_eq!(placement("first", "running"), "retain");
    assert_eq!(journal_superblock(&first).errno, -5, "held");

    let output = daemon.ask(&["on-battery"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("first, disk0: storage (done)"), "{}", text(&output.stdout));
    assert_eq!(placement("first", "running"), "storage");
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    // The power fails while the guest works: what is on storage at that moment is all there is.
    guest.freeze().unwrap();
    assert_survives_the_host(&bench, &first, "/records", &layout, &guest.reported());
    guest.thaw().unwrap();

    // Said again, nothing has to move; and a VM that begins meanwhile begins there.
    let output = daemon.ask(&["on-battery", "--json"]);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&answer["on_battery"], answer["disks"].as_array().map(Vec::len)),
        (&Value::Bool(true), Some(0)),
        "{answer}"
    );
    let mut other = Guest::start(daemon.spec_with("second", script.clone(), &[])).unwrap();
    other.wait_acknowledged("records", 20, LIMIT).unwrap();
    // It had been prepared before, and waited for its VMM.
    assert_eq!(placement("second", "running"), "storage");
    assert_eq!(journal_superblock(&second).errno, 0, "nothing is held");
    other.kill_qemu().unwrap();
    daemon.wait_state("second", "waiting");
    // Prepared anew on battery, it begins on storage.
    let mut other = Guest::start(daemon.spec_with("second", script.clone(), &[])).unwrap();
    other.wait_acknowledged("records", 20, LIMIT).unwrap();
    assert_eq!(placement("second", "running"), "storage");
    assert_eq!(journal_superblock(&second).errno, 0, "nothing is held");

    let output = daemon.ask(&["on-mains"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("first, disk0: retain (from the next mount on)"), "{}", text(&output.stdout));
    // It fails again before that mount, which is not to be held in memory.
    let output = daemon.ask(&["on-battery"]);
    assert!(text(&output.stdout).contains("first, disk0: storage (done)"), "{}", text(&output.stdout));
    assert_eq!(placement("first", "running"), "storage");
    let output = daemon.ask(&["on-mains"]);
    assert!(text(&output.stdout).contains("first, disk0: retain (from the next mount on)"), "{}", text(&output.stdout));
    for guest in [&mut guest, &mut other] {
        guest.wait_acknowledged("records", guest.acknowledged("records").count + 5, LIMIT).unwrap();
        guest.kill_qemu().unwrap();
    }
    for vm in ["first", "second"] {
        assert_eq!(placement(vm, "waiting"), "retain");
    }
    replay_left(&second);
    assert_consistent(&fs_second);
}

/// A region of NVM in tmpfs is lost with the host's power as its memory is: a journal there goes to storage, and comes back.
#[test]
fn on_battery_a_journal_leaves_a_region_that_is_lost_with_the_power() {
    let bench = Bench::new();
    let (image, region) = (bench.path("n.img"), bench.area().join("region"));
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let disk = format!("{},placement=nvm={},nvm-size=16", image.display(), region.display());
    let config = write_config(&bench, &[("n", disk)]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(32);
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
        record_writer("/mnt/a", "a", &layout, "--forever"),
        record_writer("/mnt/b", "b", &layout, "--forever"),
    );
    let mut guest = Guest::start(daemon.spec("n", script)).unwrap();
    guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    let placement = || daemon.wait_state("n", "running")["disks"][0]["placement_effective"].clone();
    assert_eq!(placement(), "nvm");

    // While nobody has moved it, that is said.
    std::fs::write(bench.path("run/on-battery"), "").unwrap();
    let health = daemon.ask(&["health"]);
    assert!(text(&health.stdout).contains("a region of NVM that is memory of the host"), "{}", text(&health.stdout));
    let output = daemon.ask(&["on-battery"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("n, disk0: storage (done)"), "{}", text(&output.stdout));
    assert_eq!(placement(), "storage");
    assert_eq!(text(&daemon.ask(&["health"]).stdout), "all is well\n");
    guest.wait_acknowledged("a", guest.acknowledged("a").count + 20, LIMIT).unwrap();
    guest.freeze().unwrap();
    assert_survives_the_host(&bench, &image, "/a", &layout, &guest.reported());
    guest.thaw().unwrap();

    let output = daemon.ask(&["on-mains"]);
    assert!(text(&output.stdout).contains("n, disk0: nvm (from the next mount on)"), "{}", text(&output.stdout));
    guest.tell("again").unwrap();
    guest.wait_mark("again", LIMIT).unwrap();
    guest.wait_acknowledged("b", 20, LIMIT).unwrap();
    assert_eq!(placement(), "nvm");
    guest.kill_qemu().unwrap();
    daemon.wait_state("n", "waiting");
    let reported = guest.final_report();
    assert_consistent(&file_system);
    assert_records(&file_system, "/b", "b", &layout, &reported);
}
