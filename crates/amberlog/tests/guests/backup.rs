//! Images of a moment of a disk whose guest works, and a guest that is held meanwhile.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use guest_kit::Guest;
use guest_kit::evidence::RecordLayout;
use guest_kit::image::{ExtRecipe, FileSystem};
use std::time::{Duration, Instant};

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
        // The guest waits, or goes on meanwhile.
        let output = if round == 1 {
            daemon.ask(&["snapshot", "db", "disk0", &out_text, "--wait"])
        } else {
            daemon.ask(&["snapshot", "db", "disk0", &out_text])
        };
        assert!(output.status.success(), "{placement}: {}\n{}", text(&output.stderr), daemon.log());
        let of_moment = FileSystem::whole(out.clone());
        assert_eq!(journal_superblock(&out).errno, 0, "{placement}: nothing is elsewhere");
        if placement != "storage" {
            let (there, here) = (journal_superblock(&out).sequence, journal_superblock(&image).sequence);
            assert!(
                there.wrapping_sub(here) > 1 << 20,
                "its kernel goes on with {there}, and compounds may lie there from {here} on"
            );
        }
        assert_consistent(&of_moment);
        assert_records(&of_moment, "/records", "records", &layout, &before);
        let inspected = amberlog_with(["recover".as_ref(), "--disk".as_ref(), out.as_os_str()]);
        assert!(text(&inspected.stdout).contains("clean"), "{}{}", text(&inspected.stdout), text(&inspected.stderr));
        // What is there is never written over.
        let bytes = std::fs::read(&out).unwrap();
        let output = daemon.ask(&["snapshot", "db", "disk0", &out_text]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("making the image") && std::fs::read(&out).unwrap() == bytes);
        std::fs::remove_file(&out).unwrap();
    }
    // The guest has gone on after each.
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    // It was put on storage last.
    replay_left(&image);
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &layout, &guest.final_report());
}

/// What the answer to `snapshot` names it.
fn id_of(output: &std::process::Output) -> String {
    let said = text(&output.stdout);
    said.trim().rsplit_once("id ").unwrap_or_else(|| panic!("{said}")).1.to_owned()
}

/// A chain: a whole image, and then only what changed, over another worker, and each is the state of its own moment.
#[test]
fn what_was_written_since_is_an_image_with_the_one_before() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(256, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("db", image.display().to_string())]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(19);
    // Much is there before the first snapshot, which no later one has.
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\ndd if=/dev/urandom of=/mnt/bulk bs=1M count=40 || fail bulk\nsync\n{}",
        record_writer("/mnt/records", "records", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("db", script, &[])).unwrap();
    let refuse = |since: &str, out: &str, sentence: &str| {
        let output = daemon.ask(&["snapshot", "db", "disk0", out, "--incremental-since", since]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        assert!(text(&output.stderr).contains(sentence), "{}", text(&output.stderr));
        assert!(!std::path::Path::new(out).exists());
    };
    let path = |name: &str| bench.path(name).display().to_string();
    let mut since: Option<String> = None;
    for (round, placement) in ["retain", "retain", "copy", "copy"].into_iter().enumerate() {
        let output = daemon.ask(&["placement", "db", "disk0", placement]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
        let before = guest.reported();
        let out = path(&format!("part-{round}"));
        let words = ["snapshot", "db", "disk0", &out];
        let output = match &since {
            None => {
                refuse("0123456789abcdef", &out, "is not known");
                daemon.ask(&words)
            }
            Some(since) => daemon.ask(&[words.as_slice(), &["--incremental-since", since]].concat()),
        };
        assert!(output.status.success(), "{placement}: {}\n{}", text(&output.stderr), daemon.log());
        since = Some(id_of(&output));
        let whole = bench.path(&format!("whole-{round}"));
        if round > 0 {
            assert!(std::fs::metadata(&out).unwrap().len() < 40 << 20, "the bulk is not in it again");
            run("qemu-img", &["check", &out]);
        }
        run("qemu-img", &["convert", "-O", "raw", &out, &whole.display().to_string()]);
        let of_moment = FileSystem::whole(whole.clone());
        assert_eq!(journal_superblock(&whole).errno, 0, "{placement}: nothing is elsewhere");
        assert_consistent(&of_moment);
        assert_records(&of_moment, "/records", "records", &layout, &before);
        std::fs::remove_file(&whole).unwrap();
        // What another worker has to know.
        let pid = daemon.wait_state("db", "running")["worker_pid"].as_u64().unwrap() as u32;
        if round == 1 {
            crate::worker::kill_nine(pid);
        } else if round == 2 {
            let output = daemon.ask(&["upgrade", "db"]);
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    }
    // A journal with something in it on storage is left to a whole one.
    let output = daemon.ask(&["placement", "db", "disk0", "storage"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    let since = since.unwrap();
    refuse(&since, &path("of-storage"), "which only a whole snapshot replays");
    // Neither is an image that is another one by now taken for the one below: written to by somebody, or replaced.
    let mut below = std::fs::OpenOptions::new().write(true).open(bench.path("part-3")).unwrap();
    std::io::Write::write_all(&mut below, b"Q").unwrap();
    refuse(&since, &path("of-written"), "or was written to since");
    std::fs::write(bench.path("part-3"), "another").unwrap();
    refuse(&since, &path("of-another"), "is another file than the image that was made then");
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    replay_left(&image);
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &layout, &guest.final_report());
}

/// What a worker left owed when it was killed only the guest knows to be home or not: an image that is made before the guest has written it
/// has it all the same, and nobody says that the disk's own has.
#[test]
fn what_was_committed_under_a_worker_that_was_killed_is_in_an_image_too() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("db", image.display().to_string())]);
    let daemon = Daemon::start(&bench, &config);
    // Each record is a file's own, and none is written again; the guest has no reason to write anything home for a while.
    let layout = RecordLayout { files: 8, ..appended(23) };
    let script = format!(
        "mount -t ext4 -o data=journal,commit=1 /dev/vda /mnt || fail mount
for file in /proc/sys/vm/dirty_writeback_centisecs /proc/sys/vm/dirty_expire_centisecs; do echo 100000 > $file; done
{}
sleep 1000",
        record_writer("/mnt/records", "records", &layout, "--count 40")
    );
    let mut guest = Guest::start(daemon.spec_with("db", script, &[])).unwrap();
    guest.wait_acknowledged("records", 39, LIMIT).unwrap();
    let before = guest.reported();
    let pid = daemon.wait_state("db", "running")["worker_pid"].as_u64().unwrap() as u32;
    let whole_before = bench.path("whole-before").display().to_string();
    crate::worker::kill_nine(pid);
    let deadline = Instant::now() + LIMIT;
    while daemon.wait_state("db", "running")["worker_pid"].as_u64().is_none_or(|now| now == u64::from(pid)) {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = daemon.ask(&["flush", "db", "--patience", "1"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("only the guest knows"), "{}", text(&output.stderr));
    let output = daemon.ask(&["freeze", "db"]);
    assert!(text(&output.stderr).contains("only the guest knows"), "{}", text(&output.stderr));
    let output = daemon.ask(&["snapshot", "db", "disk0", &whole_before]);
    assert!(output.status.success(), "{}\n{}", text(&output.stderr), daemon.log());
    let of_moment = FileSystem::whole(bench.path("whole-before"));
    assert_consistent(&of_moment);
    assert_records(&of_moment, "/records", "records", &layout, &before);
    // The next one of a chain has it, too.
    let part = bench.path("part").display().to_string();
    let output = daemon.ask(&["snapshot", "db", "disk0", &part, "--incremental-since", &id_of(&output)]);
    assert!(output.status.success(), "{}\n{}", text(&output.stderr), daemon.log());
    let whole = bench.path("whole").display().to_string();
    run("qemu-img", &["check", &part]);
    run("qemu-img", &["convert", "-O", "raw", &part, &whole]);
    let of_moment = FileSystem::whole(bench.path("whole"));
    assert_consistent(&of_moment);
    assert_records(&of_moment, "/records", "records", &layout, &before);
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &layout, &guest.final_report());
}

fn run(program: &str, arguments: &[&str]) {
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
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
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(state(), before, "a frozen guest was served");
    // The mark in the journal superblock counts on, in one sector or two.
    let image_now = std::fs::read(&image).unwrap();
    let mut changed = (0..image_now.len()).filter(|at| image_now[*at] != image_before[*at]);
    let first = changed.next();
    let span = changed.next_back().zip(first).map_or(0, |(last, first)| last - first);
    assert!(span < 1024, "{span} bytes of a frozen guest's disk have changed");
    let output = daemon.ask(&["snapshot", "db", "disk0", &bench.path("frozen").display().to_string()]);
    assert!(text(&output.stderr).contains("its VM is frozen"), "{}", text(&output.stderr));
    // What ends with a worker keeps it from being replaced.
    let worker = daemon.wait_state("db", "running")["worker_pid"].clone();
    let output = daemon.ask(&["upgrade", "db"]);
    assert!(text(&output.stderr).contains("it is frozen, and would go on"), "{}", text(&output.stderr));
    let entry = daemon.wait_state("db", "running");
    assert_eq!((&entry["worker_pid"], &entry["is_frozen"]), (&worker, &true.into()), "{entry}");
    let output = daemon.ask(&["thaw", "db"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();

    // Nobody thaws it. Half of that is for what is under way, which takes its time on a noisy disk.
    let output = daemon.ask(&["freeze", "db", "--seconds", "10"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    thaw_says_no();

    // Whoever says so goes on all the same, and whoever thaws it is told.
    let output = daemon.ask(&["freeze", "db", "--seconds", "600"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = daemon.ask(&["upgrade", "db", "--anyway"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_ne!(daemon.wait_state("db", "running")["worker_pid"], worker);
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    thaw_says_no();
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &layout, &guest.final_report());
}

/// The host has lost its memory with what a journal was held in, and somebody copies the disk before it is repaired: a copy that passed for whole would
/// hide that.
#[test]
fn no_image_is_made_of_a_disk_whose_journal_was_lost() {
    let bench = Bench::new();
    let image = bench.path("image");
    ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/records", "records", &overwritten(17), "--forever")
    );
    let mut guest = Guest::start(bench.spec("lost", script, disk(&image))).unwrap();
    guest.wait_acknowledged("records", 20, LIMIT).unwrap();
    guest.kill_all().unwrap();
    for entry in std::fs::read_dir(bench.area()).unwrap() {
        std::fs::remove_dir_all(entry.unwrap().path()).unwrap();
    }
    let config = write_config(&bench, &[("db", image.display().to_string())]);
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("db", "waiting");
    let out = bench.path("out");
    for words in [&["--wait"][..], &[]] {
        let output = daemon.ask(&[&["snapshot", "db", "disk0", out.to_str().unwrap()][..], words].concat());
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        assert!(text(&output.stderr).contains("what was committed may be missing"), "{}", text(&output.stderr));
        assert!(!out.exists());
    }
    assert_ne!(journal_superblock(&image).errno, 0, "it keeps saying so");
}
