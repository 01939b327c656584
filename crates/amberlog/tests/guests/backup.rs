//! Images of a moment of a disk whose guest works, and a guest that is held meanwhile.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::{ExtRecipe, FileSystem};

#[test]
fn an_image_of_a_moment_has_all_that_was_acknowledged_before_it() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("db", image.display().to_string())]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(17);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/records", "records", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("db", script, &[])).unwrap();
    for (round, placement) in ["retain", "retain", "copy", "storage"].into_iter().enumerate() {
        let output = daemon.ask(&["placement", "db", "disk0", placement]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
        let before = guest.reported();
        let out = bench.path(&format!("snapshot-{round}"));
        let out_text = out.display().to_string();
        let output = daemon.ask(&["snapshot", "db", "disk0", &out_text, "--wait"]);
        assert!(output.status.success(), "{placement}: {}\n{}", text(&output.stderr), daemon.log());
        let of_moment = FileSystem::whole(out.clone());
        assert_eq!(journal_superblock(&out).errno, 0, "{placement}: nothing is elsewhere");
        assert_consistent(&of_moment);
        assert_records(&of_moment, "/records", "records", &layout, &before);
        let inspected = amberlog_with(["recover".as_ref(), "--disk".as_ref(), out.as_os_str()]);
        assert!(text(&inspected.stdout).contains("clean"), "{}{}", text(&inspected.stdout), text(&inspected.stderr));
        // What is there is never written over.
        let bytes = std::fs::read(&out).unwrap();
        let output = daemon.ask(&["snapshot", "db", "disk0", &out_text, "--wait"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("making the image") && std::fs::read(&out).unwrap() == bytes);
        std::fs::remove_file(&out).unwrap();
    }
    // The guest has gone on after each.
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &layout, &guest.final_report());
}

#[test]
fn a_frozen_guest_asks_for_nothing_and_goes_on_by_itself() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("db", image.display().to_string())]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(18);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/records", "records", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("db", script, &[])).unwrap();
    guest.wait_acknowledged("records", 20, LIMIT).unwrap();
    let thaw_says_no = || {
        let output = daemon.ask(&["thaw", "db"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("was not frozen any more"), "{}", text(&output.stderr));
    };
    thaw_says_no();

    let output = daemon.ask(&["freeze", "db", "--seconds", "600"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let state = || {
        let disk = daemon.wait_state("db", "running")["disks"][0].clone();
        (disk["io"]["write_requests"].clone(), disk["counters"]["blocks_retained_now"].as_u64())
    };
    let (before, image_before) = (state(), std::fs::read(&image).unwrap());
    // What is retained now is of a transaction that is not committed yet; the test above judges that the rest is home.
    // It would have written much in this time; on a machine that is too busy for it this proves nothing, and is true.
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(state(), before, "a frozen guest was served");
    // The mark in the journal superblock counts on, in one sector or two.
    let image_now = std::fs::read(&image).unwrap();
    let mut changed = (0..image_now.len()).filter(|at| image_now[*at] != image_before[*at]);
    let first = changed.next();
    let span = changed.next_back().zip(first).map_or(0, |(last, first)| last - first);
    assert!(span < 1024, "{span} bytes of a frozen guest's disk have changed");
    let output = daemon.ask(&["thaw", "db"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();

    // Nobody thaws it.
    let output = daemon.ask(&["freeze", "db", "--seconds", "1"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    thaw_says_no();
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &layout, &guest.final_report());
}
