//! What is done to disks while their guest runs: made larger, and bounded.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::Guest;
use guest_kit::evidence::RecordLayout;
use guest_kit::image::ExtRecipe;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Instant;

fn requests(daemon: &Daemon) -> u64 {
    let entry = daemon.wait_state("db", "running");
    let of = |disk: &Value| {
        let count = |key: &str| disk["io"][key].as_u64().unwrap();
        count("read_requests") + count("write_requests") + count("discard_requests") + count("write_zeroes_requests")
    };
    entry["disks"].as_array().unwrap().iter().map(of).sum()
}

#[test]
fn a_disk_grows_and_is_bounded_under_its_guest() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("db", format!("{},name=root", image.to_str().unwrap()))]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(9);
    // In the place that was not there before, the guest writes what the image is looked at for.
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         mark mounted
         tries=0
         until [ $(cat /sys/block/vda/size) = 196608 ]; do
             tries=$((tries + 1)); [ $tries -lt 600 ] || fail 'the disk did not grow'
             sleep 0.1
         done
         # Bitmaps of groups that were not there before are committed before the superblock that says so is home.
         resize2fs /dev/vda || fail resize2fs
         for n in 1 2 3 4; do dd if=/dev/zero of=/mnt/fill-$n bs=1M count=12 conv=fsync 2>/dev/null || fail fill; done
         echo grown-$(cat /sys/block/vda/size) | dd of=/dev/vda bs=512 seek=196607 conv=sync,notrunc 2>/dev/null || fail 'its end cannot be written'
         sync
         mark grown
         {}",
        record_writer("/mnt/records", "records", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("db", script, &[])).unwrap();
    guest.wait_mark("mounted", LIMIT).unwrap();

    // What cannot be is refused, and changes nothing.
    for (words, sentence) in [
        (["resize", "db", "root", "32M"], "a disk of a running guest only grows"),
        (["resize", "db", "root", "67108865"], "no whole sectors"),
        (["resize", "db", "other", "96M"], "vm db has no disk other"),
    ] {
        let output = daemon.ask(&[&["disk"], &words[..]].concat());
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        assert!(text(&output.stderr).contains(sentence), "{words:?}: {}", text(&output.stderr));
    }
    assert_eq!(daemon.ask(&["disk", "resize", "db", "root", "large"]).status.code(), Some(2));
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 64 << 20);

    let output = daemon.ask(&["disk", "resize", "db", "root", "+32M"]);
    assert!(output.status.success() && text(&output.stdout).contains("100663296"), "{}", text(&output.stderr));
    guest.wait_mark("grown", LIMIT).unwrap();
    let entry = daemon.wait_state("db", "running");
    assert_eq!(entry["disks"][0]["fault"], Value::Null, "{entry}");
    let listed = text(&daemon.ask(&["disk", "list", "db"]).stdout);
    assert!(listed.contains("root") && listed.contains("100663296") && listed.contains("/db/root.sock"), "{listed}");

    // Bounded: no more than the rate, the burst and one (what one pass over the rings takes is counted before it waits).
    guest.wait_acknowledged("records", 10, LIMIT).unwrap();
    let output = daemon.ask(&["disk", "throttle", "db", "root", "--iops", "20", "--iops-burst", "2"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("20 operations a second (2 at once), any number of bytes"));
    // So it stays when another worker goes on.
    let entry = daemon.wait_state("db", "running");
    kill_nine(entry["worker_pid"].as_u64().unwrap() as u32);
    while daemon.wait_state("db", "running")["worker_pid"] == entry["worker_pid"] {}
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 2, LIMIT).unwrap();
    // The clock goes first: what passes between the two counts on the side of what is allowed.
    let began = Instant::now();
    let before = requests(&daemon);
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 3, LIMIT).unwrap();
    let passed = requests(&daemon) - before;
    let most = 20.0 * began.elapsed().as_secs_f64() + 3.0;
    assert!(passed as f64 <= most, "{passed} requests passed, and {most} may have");
    assert!(daemon.ask(&["disk", "throttle", "db", "root"]).status.success());
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 100, LIMIT).unwrap();

    let entry = daemon.wait_state("db", "running");
    assert_eq!(entry["disks"][0]["placement_effective"], Value::from("retain"), "{entry}");
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    let reported = guest.final_report();
    assert_records(&file_system, "/records", "records", &layout, &reported);
    let bytes = std::fs::read(&image).unwrap();
    assert!(bytes[196607 * 512..].starts_with(b"grown-196608\n"), "the guest's last sector is the image's");
}

/// Two disks of one group, both of which their guest keeps busy, pass no more together than one of them may.
#[test]
fn disks_of_a_group_keep_to_its_bound_together() {
    let bench = Bench::new();
    let images = ["one", "two"].map(|name| bench.path(name));
    let file_systems = images.each_ref().map(|image| ExtRecipe::ext4(64, 8).make(image).unwrap());
    let config = write_config(&bench, &[]);
    let disk = |image: &PathBuf| format!("{},iops=20,iops-burst=2,throttle-group=both", image.display());
    let text = format!("[[vm]]\nname = \"db\"\ndisks = {:?}\n", images.each_ref().map(disk));
    std::fs::write(&config, std::fs::read_to_string(&config).unwrap() + &text).unwrap();
    let daemon = Daemon::start(&bench, &config);
    let layouts = [overwritten(3), overwritten(4)];
    let writer =
        |disk: &str, layout: &RecordLayout| record_writer(&format!("/{disk}/{disk}"), disk, layout, "--forever");
    let script = format!(
        "mkdir /a /b
         mount -t ext4 -o data=journal /dev/vda /a && mount -t ext4 -o data=journal /dev/vdb /b || fail mount
         mkdir /a/a /b/b
         {} &
         {}",
        writer("a", &layouts[0]),
        writer("b", &layouts[1])
    );
    let mut guest = Guest::start(daemon.spec("db", script)).unwrap();
    let mut more = |records: u64| {
        for stream in ["a", "b"] {
            guest.wait_acknowledged(stream, guest.acknowledged(stream).last.unwrap_or(0) + records, LIMIT).unwrap();
        }
    };
    more(2);
    // The clock goes first: what passes between the two counts on the side of what is allowed.
    let began = Instant::now();
    let before = requests(&daemon);
    more(6);
    let passed = requests(&daemon) - before;
    // The burst, and an operation of each disk that found something left.
    let most = 20.0 * began.elapsed().as_secs_f64() + 4.0;
    assert!(passed as f64 <= most, "{passed} requests passed, and {most} may have");
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    let reported = guest.final_report();
    for ((file_system, stream), layout) in file_systems.iter().zip(["a", "b"]).zip(&layouts) {
        assert_records(file_system, &format!("/{stream}"), stream, layout, &reported);
    }
}
