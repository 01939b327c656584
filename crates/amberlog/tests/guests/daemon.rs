//! amberlog itself dies, is asked to end, or is started twice: the guest never outlives it, and what was acknowledged is
//! brought home by whoever comes next.

use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, Journal, copy_image, journal_device};
use guest_kit::workload::{STREAMS, Workload};
use guest_kit::{Guest, Reported, Signal};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

/// Waits until the load has got going.
fn under_load(guest: &mut Guest) {
    for stream in STREAMS {
        guest.wait_acknowledged(stream, 20, LIMIT).unwrap();
    }
}

#[track_caller]
fn assert_work_is_there(load: &Workload, file_system: &FileSystem, reported: &Reported) {
    assert_consistent(file_system);
    let evidence = load.check(file_system, reported).unwrap();
    assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
    // Of the four streams one does not acknowledge each of its numbers.
    assert!(evidence.acknowledged > 40, "{evidence:?}");
}

/// Waits for the end of a process that is not our child.
#[track_caller]
fn assert_gone(pid: u32) {
    assert!(guest_kit::program::has_ended_within(pid, Duration::from_secs(60)), "process {pid} lives on");
}

/// One guest after the other on the same image: used by two at once, amberlog killed, the next run, asked to end.
#[test]
fn a_killed_amberlog_takes_qemu_along_and_the_next_run_finishes_its_work() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 16).make(&image).unwrap();
    let load = Workload::new(21).without_postmark();
    let mut guest = Guest::start(bench.spec("first", load.script(), disk(&image))).unwrap();
    under_load(&mut guest);

    // Nobody else gets at the image, or at the area, while it is served.
    let second = amberlog_with(["run".as_ref(), "--disk".as_ref(), image.as_os_str(), "--".as_ref(), "true".as_ref()]);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("in use"), "{}", text(&second.stderr));
    let second = amberlog_with(["recover".as_ref(), "--disk".as_ref(), image.as_os_str()]);
    assert!(matches!(second.status.code(), Some(1 | 3)) && text(&second.stderr).contains("in use"), "{second:?}");
    let of_vm = std::fs::read_dir(bench.area()).unwrap().next().unwrap().unwrap().path();
    let second = amberlog_with(["recover".as_ref(), "--json".as_ref(), "--area".as_ref(), of_vm.as_os_str()]);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("in use"), "{}", text(&second.stderr));
    let said: serde_json::Value = serde_json::from_slice(&second.stdout).unwrap();
    assert_eq!(said["status"], "failed", "{said}");
    let all = bench.recover_area();
    assert_eq!(all["logs"].as_array().map(Vec::len), Some(0), "{all}");
    assert!(of_vm.join("area.json").is_file(), "what lives is left alone");
    // A copy has nothing of what is held, and is not told from the image by another name (a loop device).
    let alias = bench.path("alias");
    copy_image(&image, &alias).unwrap();
    let before = std::fs::read(&alias).unwrap();
    let start = |disk: String| amberlog_with(["run", "--disk", &disk, "--", "true"].map(std::ffi::OsStr::new));
    let second = start(alias.display().to_string());
    assert_eq!(second.status.code(), Some(3), "{}", text(&second.stderr));
    assert!(text(&second.stderr).contains("by another name, or a copy"), "{}", text(&second.stderr));
    let second = start(format!("{},readonly", alias.display()));
    assert_eq!(second.status.code(), Some(0), "{}", text(&second.stderr));
    assert!(text(&second.stderr).contains("what is held is not on it"), "{}", text(&second.stderr));
    assert!(std::fs::read(&alias).unwrap() == before, "nothing was changed");

    let qemu = guest.qemu_pid().unwrap();
    guest.signal(Signal::KILL).unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_eq!(status.signal(), Some(9));
    assert_gone(qemu);
    let first = guest.final_report();
    drop(guest);
    let crash = bench.path("crash");
    copy_image(&image, &crash).unwrap();

    // Nobody calls the image clean, nor a copy of it, nor changes anything.
    for (command, image, sentence) in [
        ("recover", &image, "transactions of this image are held in"),
        ("inspect", &image, "transactions of this image are held in"),
        ("recover", &crash, "moved or copied"),
    ] {
        let before = std::fs::read(image).unwrap();
        let output = amberlog_with([command.as_ref(), "--json".as_ref(), "--disk".as_ref(), image.as_os_str()]);
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        if command == "recover" {
            let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(said["status"], "refused", "{said}");
        }
        assert!(text(&output.stderr).contains(sentence), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(&*of_vm.to_string_lossy()), "{}", text(&output.stderr));
        assert!(std::fs::read(image).unwrap() == before, "nothing was changed");
        // Nor is it asked for at a server, or in a region of NVM, neither of which has the journal.
        let region = bench.path("region");
        std::fs::write(&region, vec![0; 1 << 20]).unwrap();
        for place in [&["--remote-insecure", "--remote", "127.0.0.1:1/db"][..], &["--nvm", region.to_str().unwrap()]] {
            let words = ["recover"].iter().chain(place).chain(&["--disk"]).map(std::ffi::OsStr::new);
            let output = amberlog_with(words.chain([image.as_os_str()]));
            assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
            assert!(text(&output.stderr).contains(sentence), "{}", text(&output.stderr));
            assert!(std::fs::read(image).unwrap() == before, "nothing was changed");
        }
    }
    let copied = amberlog_with(["run".as_ref(), "--disk".as_ref(), crash.as_os_str(), "--".as_ref(), "true".as_ref()]);
    assert_eq!(copied.status.code(), Some(3), "{}", text(&copied.stderr));
    assert!(text(&copied.stderr).contains("is a copy of"), "{}", text(&copied.stderr));
    let copied = start(format!("{},readonly", crash.display()));
    assert_eq!(copied.status.code(), Some(3), "{}", text(&copied.stderr));

    // The next run on the image, by another name and with another --shm, finishes it before it serves anything.
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {NOTHING_TO_REPLAY}
         dmesg | grep -i 'ext4.*error' && fail 'the kernel found an error mark'
         mark mounted
         {}",
        record_writer("/mnt/again", "again", &overwritten(7), "--forever")
    );
    let renamed = bench.path("renamed");
    std::os::unix::fs::symlink(&image, &renamed).unwrap();
    let elsewhere = Bench::new();
    let mut guest = Guest::start(elsewhere.spec("second", script, disk(&renamed))).unwrap();
    bench.assert_area_is_empty();
    assert!(guest.stderr().contains("finished an earlier run's recovery"), "{}", guest.stderr());
    guest.wait_acknowledged("again", 50, LIMIT).unwrap();
    guest.signal(Signal::TERM).unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_ends_with(&guest, status, 128 + 15);
    let second = guest.final_report();
    assert_eq!(elsewhere.report().status(0), "recovered");
    elsewhere.assert_area_is_empty();
    assert_work_is_there(&load, &file_system, &first);
    assert_records(&file_system, "/again", "again", &overwritten(7), &second);

    // Without that, the work would have been missing, but not silently.
    let crash = FileSystem::whole(crash);
    let unrecovered = load.check(&crash, &first);
    assert!(unrecovered.is_err() || !unrecovered.unwrap().faults.is_empty());
    assert_eq!(journal_superblock(&crash.image).errno, -5);
}

/// Both die at once, with an external journal and a second file system; `recover --area` finishes it; SIGINT to another.
#[test]
fn amberlog_and_qemu_killed_together_are_finished_by_recover_area() {
    let bench = Bench::new();
    let (image, second, journal) = (bench.path("image"), bench.path("second"), bench.path("journal"));
    let file_system = ExtRecipe::ext4(96, 16).make(&image).unwrap();
    journal_device(&journal, 16, 4096).unwrap();
    let external = ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(64, 0) };
    let external = external.make(&second).unwrap();
    let load = Workload::new(22).without_postmark();
    let script = format!(
        "mkdir -p /tmp/second
         mount -t ext4 -o data=journal,journal_path=/dev/vdc /dev/vdb /tmp/second || fail second
         {} &
         {}",
        record_writer("/tmp/second/other", "other", &overwritten(8), "--forever"),
        load.script()
    );
    let words = [&disk(&image)[..], &disk(&second)[..], &["--journal-disk".into(), journal.into()][..]].concat();
    let mut guest = Guest::start(bench.spec("both", script, words.clone())).unwrap();
    under_load(&mut guest);
    guest.wait_acknowledged("other", 20, LIMIT).unwrap();
    assert_eq!(guest.kill_all().unwrap().signal(), Some(9));
    let reported = guest.final_report();
    assert!(!bench.path("report.json").exists());

    // One image is not there: the other's log is finished, and said to be. Then the rest is.
    let away = bench.path("away");
    std::fs::rename(&second, &away).unwrap();
    let partly = amberlog_with(["recover".as_ref(), "--json".as_ref(), "--area".as_ref(), bench.area().as_os_str()]);
    assert_eq!(partly.status.code(), Some(1), "{}", text(&partly.stderr));
    let partly: serde_json::Value = serde_json::from_slice(&partly.stdout).unwrap();
    let error = partly["errors"][0].as_str().unwrap();
    assert!(error.contains("is not there any more") && error.contains("second"), "{partly}");
    let unfinished = &partly["unfinished"][0];
    assert_eq!((unfinished["image"].as_str(), &unfinished["outcome"]), (second.to_str(), &"failed".into()), "{partly}");
    // Nor does it keep the first image from being used, but whoever has a part in what is owed.
    let start = |words: &[std::ffi::OsString]| {
        let run = [&["run".into()][..], words, &["--".into(), "true".into()]].concat();
        amberlog_with(run)
    };
    let served = start(&disk(&image));
    assert_eq!(served.status.code(), Some(0), "{}", text(&served.stderr));
    assert!(text(&served.stderr).contains("which is no disk of this VM"), "{}", text(&served.stderr));
    let refused = start(&disk(&bench.path("journal")));
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("is not there any more"), "{}", text(&refused.stderr));
    std::fs::rename(&away, &second).unwrap();
    let rest = bench.recover_area();
    for (recovery, status) in [(&partly, "failed"), (&rest, "recovered")] {
        assert_eq!((&recovery["schema"], &recovery["status"]), (&1.into(), &status.into()), "{recovery}");
        let logs = recovery["logs"].as_array().unwrap();
        assert_eq!(logs.len(), 1, "{recovery}");
        assert_eq!(logs[0]["status"], "recovered");
        assert!(logs[0]["transactions"].as_u64() > Some(0), "{recovery}");
        assert!(logs[0]["blocks_written"].as_u64() > Some(0), "{recovery}");
        assert!(logs[0]["last_sequence"].as_u64() > logs[0]["first_sequence"].as_u64(), "{recovery}");
    }
    bench.assert_area_is_empty();
    assert_work_is_there(&load, &file_system, &reported);
    assert_consistent(&external);
    assert_records(&external, "/other", "other", &overwritten(8), &reported);
    assert_eq!(journal_superblock(&image).errno, 0);
    let nothing = bench.recover_area();
    assert_eq!(nothing["status"], "none");

    // The images are as good as new; SIGINT brings everything home as well.
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {NOTHING_TO_REPLAY}
         {}",
        record_writer("/mnt/again", "again", &overwritten(9), "--forever")
    );
    let mut guest = Guest::start(bench.spec("interrupted", script, words)).unwrap();
    guest.wait_acknowledged("again", 20, LIMIT).unwrap();
    guest.signal(Signal::INT).unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_ends_with(&guest, status, 128 + 2);
    assert_consistent(&file_system);
    assert_records(&file_system, "/again", "again", &overwritten(9), &guest.final_report());
    bench.assert_area_is_empty();
}

#[test]
fn an_area_that_is_not_there_is_a_sentence() {
    let output = amberlog_with(["recover", "--area", "/nonexistent/area"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/nonexistent/area"), "{}", text(&output.stderr));
    assert_eq!(amberlog_with(["recover"]).status.code(), Some(2));
    let both = amberlog_with(["recover", "--area", "/tmp", "--disk", "/tmp/image"]);
    assert_eq!(both.status.code(), Some(2));
    assert!(Path::new("/tmp").is_dir());
}

/// The guest's memory is a memfd, which nobody finds once all are dead: nothing is kept in it.
#[test]
fn memory_without_a_name_is_not_where_anything_is_kept() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 16).make(&image).unwrap();
    let load = Workload::new(24).without_postmark();
    let mut spec = bench.spec("nameless", load.script(), disk(&image));
    let memory =
        ["-object", "memory-backend-memfd,id=nameless,size=256M,share=on", "-machine", "memory-backend=nameless"];
    spec.qemu_arguments.extend(memory.map(Into::into));
    let mut guest = Guest::start(spec).unwrap();
    under_load(&mut guest);
    guest.kill_all().unwrap();
    let reported = guest.final_report();
    let all = bench.recover_area();
    assert_eq!(all["logs"][0]["status"], "recovered", "{all}");
    assert_work_is_there(&load, &file_system, &reported);
    bench.assert_area_is_empty();
}
