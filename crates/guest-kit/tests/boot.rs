//! Guests boot, report, and end in the ways that the other tests rely on.

use guest_kit::image::{self, ExtRecipe, Journal, PartitionTable};
use guest_kit::{AtEnd, Cache, Drive, Guest, GuestSpec, judge};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn a_guest_runs_a_script_and_tells_its_exit_code() {
    let mut spec = GuestSpec::new("exit-code", "mark $(cat /run/host/greeting)\nexit 7");
    spec.files.push(("greeting".to_owned(), b"good morning".to_vec()));
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("good morning", LIMIT).unwrap();
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 7);
    assert!(guest.wait_end(LIMIT).unwrap().success());
    assert_eq!(guest.reported().noise, 0);
}

#[test]
fn images_of_every_kind_are_mounted_by_a_real_kernel() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (old, external, journal, disk) = (path("old"), path("external"), path("journal"), path("disk"));
    let old_fs = ExtRecipe { block_bytes: 1024, ..ExtRecipe::ext3(32, 4) }.make(&old).unwrap();
    image::journal_device(&journal, 8, 4096).unwrap();
    let external_fs =
        ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(32, 0) }.make(&external).unwrap();
    let offsets = image::partitioned(&disk, PartitionTable::Gpt, &[8, 32]).unwrap();
    let partition_fs = ExtRecipe::ext4(32, 4).make_at(&disk, offsets[1]).unwrap();
    let script = "
        set -e
        mkdir -p /mnt/a /mnt/b /mnt/c
        mount -t ext3 -o data=journal /dev/vda /mnt/a
        mount -t ext4 -o data=journal,journal_path=/dev/vdc /dev/vdb /mnt/b
        mount -t ext4 /dev/vdd2 /mnt/c
        for d in a b c; do echo content of $d >/mnt/$d/file; done";
    let drives = [&old, &external, &journal, &disk].map(|path| Drive::new(path, Cache::Writeback));
    Guest::run(GuestSpec::new("images", script).drives(drives.into()), LIMIT).unwrap();
    for (name, file_system) in [("a", &old_fs), ("b", &external_fs), ("c", &partition_fs)] {
        let verdict = judge::check(file_system).unwrap();
        assert!(verdict.is_clean(), "{name}: {verdict:?}");
        let content = judge::read_file(file_system, "/file").unwrap();
        assert_eq!(content, Some(format!("content of {name}\n").into_bytes()));
    }
}

#[test]
fn a_guest_runs_from_a_root_disk_and_survives_a_reset() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    let root = image::root_directory().unwrap();
    let offset = image::partitioned(&disk, PartitionTable::Mbr, &[96]).unwrap()[0];
    let recipe = ExtRecipe { content: Some(root.path().to_owned()), ..ExtRecipe::ext4(96, 8) };
    let file_system = recipe.make_at(&disk, offset).unwrap();
    let script = "
        grep ' / ext4 .*data=journal' /proc/mounts || exit 3
        if [ -e /first ]; then echo second >/second; exit 0; fi
        echo first >/first; sync
        mark waiting
        sleep 1000";
    let mut spec = GuestSpec::new("root-disk", script).drives(vec![Drive::new(&disk, Cache::None)]);
    spec.root = Some("/dev/vda1".to_owned());
    spec.root_options = "rw,data=journal".to_owned();
    spec.reboots = true;
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("waiting", LIMIT).unwrap();
    assert_eq!(guest.qmp().unwrap().status().unwrap(), "running");
    guest.qmp().unwrap().system_reset().unwrap();
    guest.wait_boots(2, LIMIT).unwrap();
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0);
    assert!(guest.wait_end(LIMIT).unwrap().success());
    assert!(judge::check(&file_system).unwrap().is_clean());
    assert_eq!(judge::read_file(&file_system, "/second").unwrap().as_deref(), Some(&b"second\n"[..]));
}

#[test]
fn a_failure_shows_the_console_and_leaves_no_process() {
    let mut spec = GuestSpec::new("too-slow", "echo so far so good; sleep 1000");
    spec.at_end = AtEnd::Stay;
    let mut guest = Guest::start(spec).unwrap();
    let pid = guest.qemu_pid().unwrap();
    assert_eq!(pid, guest.process_id());
    let error = guest.wait_mark("never", Duration::from_secs(2)).unwrap_err().to_string();
    assert!(error.contains("the mark 'never' did not come within 2 s"), "{error}");
    assert!(error.contains("so far so good"), "{error}");
    let kept = guest.directory().to_owned();
    drop(guest);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert!(kept.join("console.log").is_file());
    std::fs::remove_dir_all(kept).unwrap();
}

#[test]
fn a_wrapper_gets_the_command_line_and_its_end_is_noticed() {
    // The wrapper's words, then `--`, then QEMU's: `sh -c SCRIPT` sees the `--` as $0.
    let spec = GuestSpec::new("wrapped", "true").wrapper(["sh", "-c", "exec \"$@\""]);
    Guest::run(spec, LIMIT).unwrap();
    let spec = GuestSpec::new("refused", "true").wrapper(["sh", "-c", "echo no such disk >&2; exit 3"]);
    let mut guest = Guest::launch(spec).unwrap();
    let error = guest.wait_boots(1, LIMIT).unwrap_err().to_string();
    assert!(error.contains("no such disk") && error.contains("exit status: 3"), "{error}");
    let kept = guest.directory().to_owned();
    drop(guest);
    std::fs::remove_dir_all(kept).unwrap();
}

#[test]
fn fio_runs_when_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    image::create_sparse(&image, 16 * image::MIB).unwrap();
    let script = "fio --name=a --filename=/dev/vda --rw=randwrite --bs=4k --size=1M --fsync=1 --minimal >/dev/null";
    let mut spec = GuestSpec::new("fio", script).drives(vec![Drive::new(&image, Cache::Writeback)]);
    spec.programs.push("fio");
    spec.memory_mib = 512;
    Guest::run(spec, LIMIT).unwrap();
    let written =
        std::fs::read(&image).unwrap()[..1 << 20].chunks(4096).filter(|block| block[0] != 0 || block[9] != 0).count();
    assert!(written > 200, "fio wrote {written} of 256 blocks");
}
