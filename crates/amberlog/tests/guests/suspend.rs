//! Guests that suspend and go on: their devices are started anew, and their kernels go on where they were.

use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::{ExtRecipe, FileSystem};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Wakes a guest as soon as it sleeps. An alarm of its own clock could go off before that, and nobody would wake it then.
fn wake(guest: &mut Guest) {
    let deadline = Instant::now() + LIMIT;
    while guest.qmp().unwrap().status().unwrap() != "suspended" {
        let has_failed = guest.reported().exit_code.is_some();
        assert!(!has_failed && Instant::now() < deadline, "it does not sleep: {}", guest.console());
        std::thread::sleep(Duration::from_millis(100));
    }
    guest.qmp().unwrap().execute("system_wakeup", Value::Null).unwrap();
}

/// What a guest commits after a suspend is there when it dies right after, before it has said anything of its log.
#[test]
fn what_is_committed_after_a_suspend_outlives_its_guest() {
    for placement in ["retain", "copy", "storage"] {
        let bench = Bench::new();
        let image = bench.path("image");
        let file_system = ExtRecipe::ext4(128, 32).make(&image).unwrap();
        let layout = appended(11);
        let script = format!(
            "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
             {}
             mark before
             echo mem > /sys/power/state || fail suspend
             dmesg | grep -q 'suspend exit' || fail 'it was not suspended'
             mark after
             {}",
            record_writer("/mnt/before", "before", &layout, "--count 30"),
            record_writer("/mnt/after", "after", &layout, "--count 12"),
        );
        let mut spec = bench.spec("suspends", script, disk_with(&image, &format!(",placement={placement}")));
        // A kernel that has modules is the distribution's, which can be suspended.
        spec.modules.push("rtc-cmos".to_owned());
        spec.machine = "pc".to_owned();
        let mut guest = Guest::start(spec).unwrap();
        wake(&mut guest);
        guest.wait_mark("after", LIMIT).unwrap();
        guest.wait_acknowledged("after", 10, LIMIT).unwrap();
        let reported = kill(&mut guest);
        // It died with a log on storage, as with a disk of QEMU's own.
        replay_left(&image);
        assert_consistent(&FileSystem::whole(&image));
        assert_records(&file_system, "/before", "before", &layout, &reported);
        assert_records(&file_system, "/after", "after", &layout, &reported);
        if placement != "storage" {
            assert!(guest.stderr().contains("as after a suspend"), "{placement}: {}", guest.stderr());
        }
        bench.assert_area_is_empty();
    }
}
