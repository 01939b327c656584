//! Bad input, and missing permissions: a sentence that says what to do, the contract's exit code, and nothing changed.

use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, create_sparse};
use guest_kit::{AtEnd, Guest};
use std::ffi::OsString;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;

/// `amberlog run` with a VMM that ends at once, if it is ever started.
fn run(bench: &Bench, words: &[OsString], vmm: &[&str]) -> (i32, String) {
    let mut all = bench.words(words.to_vec());
    all.push("--".into());
    all.extend(vmm.iter().map(OsString::from));
    let output = Command::new(&all[0]).args(&all[1..]).output().unwrap();
    bench.assert_area_is_empty();
    (output.status.code().expect("it ends by itself"), text(&output.stderr))
}

#[track_caller]
fn assert_refused(outcome: (i32, String), code: i32, words: &[&str]) {
    let (found, stderr) = outcome;
    assert_eq!(found, code, "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "'{word}' is not in: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn unusable_images_and_arguments_are_sentences() {
    let bench = Bench::new();
    let path = |name: &str| bench.path(name);
    let good = path("good");
    ExtRecipe::ext4(16, 4).make(&good).unwrap();

    let missing = path("missing");
    let shown = missing.to_string_lossy().into_owned();
    assert_refused(run(&bench, &disk(&missing), &["true"]), 1, &[&shown, "does not exist"]);
    assert_refused(run(&bench, &disk(bench.area()), &["true"]), 1, &["neither"]);

    let empty = path("empty");
    create_sparse(&empty, 0).unwrap();
    assert_refused(run(&bench, &disk(&empty), &["true"]), 1, &[&empty.to_string_lossy(), "too small"]);
    let tiny = path("tiny");
    create_sparse(&tiny, 100).unwrap();
    assert_refused(run(&bench, &disk(&tiny), &["true"]), 1, &[&tiny.to_string_lossy(), "too small"]);

    assert_refused(run(&bench, &disk_with(&good, ",placement=nowhere"), &["true"]), 2, &["nowhere", "retain"]);
    assert_refused(run(&bench, &disk_with(&good, ",colour=red"), &["true"]), 2, &["colour"]);
    let twice = [disk(&good), disk(&good)].concat();
    assert_refused(run(&bench, &twice, &["true"]), 1, &["in use"]);
    let same_name = [disk_with(&good, ",name=x"), disk_with(&tiny, ",name=x")].concat();
    assert_refused(run(&bench, &same_name, &["true"]), 2, &["two disks have the name x"]);
    let orphan: Vec<OsString> = vec!["--journal-disk".into(), format!("{},for=nobody", good.display()).into()];
    assert_refused(run(&bench, &orphan, &["true"]), 2, &["nobody"]);

    let private = ["qemu-system-x86_64", "-object", "memory-backend-ram,id=m,size=128M"];
    assert_refused(run(&bench, &disk(&good), &private), 2, &["share=on"]);
    assert_refused(run(&bench, &disk(&good), &["qemu-system-x86_64", "-daemonize"]), 2, &["-daemonize"]);
    assert_refused(run(&bench, &disk(&good), &["/nonexistent/qemu"]), 1, &["/nonexistent/qemu", "installed"]);
    // A VMM that ends at once, and fails: its own exit code.
    assert_eq!(run(&bench, &disk(&good), &["false"]).0, 1);
    assert_eq!(run(&bench, &disk(&good), &["sh", "-c", "exit 42"]).0, 42);
    let output = Command::new(amberlog()).args(["run", "--disk"]).arg(&good).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "no VMM is a mistake of usage");
    assert_clean(&FileSystem::whole(&good));
}

/// Damaged superblocks of a file system and of a journal: the disk is served as it is, and the guest is told by its own
/// kernel. The same image, not writable.
#[test]
fn damaged_superblocks_are_served_and_left_to_the_guest() {
    let bench = Bench::new();
    let (broken, headless, locked) = (bench.path("broken"), bench.path("headless"), bench.path("locked"));
    for image in [&broken, &headless, &locked] {
        ExtRecipe::ext4(32, 4).make(image).unwrap();
    }
    let file = std::fs::File::options().read(true).write(true).open(&broken).unwrap();
    // s_log_block_size, s_blocks_per_group, s_inodes_per_group: nonsense.
    file.write_all_at(&[0xff; 4], 1024 + 0x18).unwrap();
    file.write_all_at(&[0xff; 12], 1024 + 0x20).unwrap();
    let bytes = std::fs::read(&headless).unwrap();
    let file_systems = extfs::discover(&bytes).unwrap();
    let extfs::Journal::Internal { extents, .. } = &file_systems[0].journal else { panic!("{file_systems:?}") };
    let journal = std::fs::File::options().write(true).open(&headless).unwrap();
    journal.write_all_at(&[0x5a; 1024], extents[0].physical * 4096).unwrap();
    let before = std::fs::read(&broken).unwrap();

    let script = "
        mount -t ext4 /dev/vda /mnt && fail 'a broken superblock was mounted'
        mount -t ext4 /dev/vdb /mnt && fail 'a headless journal was mounted'
        dd if=/dev/vda of=/dev/null bs=1M iflag=direct || fail 'the broken disk cannot be read'
        dd if=/dev/vdb of=/dev/null bs=1M iflag=direct || fail 'the headless disk cannot be read'
        dd if=/dev/zero of=/dev/vdc bs=4k count=1 oflag=direct && fail 'a read-only disk was written'
        mount -t ext4 -o ro /dev/vdc /mnt || fail 'a read-only disk cannot be mounted'
        umount /mnt
        e2fsck -fy /dev/vdb >/dev/null; mount -t ext4 -o data=journal /dev/vdb /mnt || fail 'repaired, but not mounted'
        echo written >/mnt/file";
    let words = [disk(&broken), disk(&headless), disk_with(&locked, ",readonly")].concat();
    let mut spec = bench.spec("damaged", script, words);
    spec.at_end = AtEnd::PowerOff;
    let mut guest = Guest::start(spec).unwrap();
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0, "{}", guest.console());
    let status = guest.wait_end(LIMIT).unwrap();
    assert_eq!(status.code(), Some(0), "{}", guest.stderr());
    assert!(std::fs::read(&broken).unwrap() == before, "nothing was changed");
    assert_clean(&FileSystem::whole(&headless));
    assert_clean(&FileSystem::whole(&locked));
    assert_eq!(guest_kit::judge::read_file(&FileSystem::whole(&headless), "/file").unwrap().unwrap(), b"written\n");
    bench.assert_area_is_empty();
}

/// Runs a command to which both ways to a userfaultfd are closed: the device, and the system call.
const WITHOUT_PERMISSION: &str = "
    if [ -e /dev/userfaultfd ]; then mount --bind /dev/null /dev/userfaultfd || exit 1; fi
    exec setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace -- \"$@\"";

/// Without the shim, and with it but without the permission: everything is copied, nothing is lost, and it is said once.
#[test]
fn without_userfaultfd_everything_is_copied() {
    let no_shim: &[&str] = &[];
    let no_permission = &["unshare", "--mount", "sh", "-c", WITHOUT_PERMISSION, "sh"];
    let probe = Command::new(no_permission[0]).args(&no_permission[1..]).arg("true").output().unwrap();
    for (name, prefix, said) in
        [("no-shim", no_shim, "was not found beside amberlog"), ("no-permission", no_permission, "permission")]
    {
        if !prefix.is_empty() && !probe.status.success() {
            println!("{name} skipped, the permission cannot be taken away: {}", text(&probe.stderr).trim());
            continue;
        }
        let bench = Bench::new();
        let image = bench.path("image");
        let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
        let script = format!(
            "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
             {}",
            record_writer("/mnt/records", "records", &overwritten(1), "--forever")
        );
        let words = prefix.iter().map(OsString::from).chain(bench.words(disk(&image)));
        let mut spec = bench.spec(name, script, disk(&image)).wrapper(words);
        if name == "no-shim" {
            spec.environment.push(("AMBERLOG_SHIM".into(), "/nonexistent".into()));
        }
        let mut guest = Guest::start(spec).unwrap();
        guest.wait_acknowledged("records", 100, LIMIT).unwrap();
        let reported = kill(&mut guest);
        assert_consistent(&file_system);
        assert_records(&file_system, "/records", "records", &overwritten(1), &reported);
        let report = bench.report();
        assert_eq!(report.status(0), "recovered");
        assert_eq!(report.counter(0, "pages_protected") + report.counter(0, "cow_faults"), 0);
        assert!(report.counter(0, "pool_bytes_max") > 0);
        let stderr = guest.stderr();
        assert_eq!(stderr.matches("WARN").count(), 1, "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
        bench.assert_area_is_empty();
    }
}

/// An image that this user cannot write.
#[test]
fn an_unwritable_image_is_a_sentence() {
    let bench = Bench::new();
    let image = bench.path("image");
    ExtRecipe::ext4(16, 4).make(&image).unwrap();
    std::fs::set_permissions(&image, std::fs::Permissions::from_mode(0o444)).unwrap();
    let mut words = bench.words(disk(&image));
    words.extend(["--".into(), "true".into()]);
    let mut command = Command::new(&words[0]);
    if rustix::process::getuid().is_root() {
        // Root may write everything, so somebody else has to try: nobody, who can look at all there is.
        for directory in [image.parent().unwrap(), bench.area()] {
            std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&words[0]);
    }
    let output = command.args(&words[1..]).output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&*image.to_string_lossy()) && stderr.to_lowercase().contains("permission"), "{stderr}");
}
