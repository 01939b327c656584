//! Leaves what commit 0e81c47, version 0.1, leaves of a guest whose journal is in a region of NVM, and of one whose journal is on a server.
//! `scripts/left-by-0.1.sh` puts this among the tests with guests of a tree of that commit, and runs it there: what it calls is of that tree,
//! and no build of this one has it.

use crate::remote::{JournalServer, TO_SERVER, recovered, remote_disk, wait_for_log};
use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::{ExtRecipe, copy_image};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The directory that the script makes an archive of.
fn kept(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/left").join(name);
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// A guest that writes records for ever, as those did of which the other archives are.
fn writer(bench: &Bench, words: impl IntoIterator<Item = OsString>) -> Guest {
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {}",
        record_writer("/mnt/a", "a", &overwritten(3), "--forever")
    );
    let mut spec = bench.spec("left", script, words);
    spec.memory_mib = 128;
    Guest::start(spec).unwrap()
}

/// The kernel closes what was in a dead process's io_uring after the process has ended: nothing is under way any more when its lock is free.
fn wait_until_free(image: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let looked =
            amberlog_with(["recover".as_ref(), "--dry-run".as_ref(), "--disk".as_ref(), image.as_os_str()]);
        if !text(&looked.stderr).contains("in use") {
            return;
        }
        assert!(Instant::now() < deadline, "{} is in use still", image.display());
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn copy_all(from: &Path, to: &Path) {
    let copied = Command::new("cp").args(["-a", "--sparse=always", "-T"]).arg(from).arg(to).status();
    assert!(copied.unwrap().success(), "{} cannot be copied", from.display());
}

/// amberlog and QEMU are killed together. Image and directory in tmpfs are kept as they are then, without the guest's memory, of which no table
/// of a journal names a page; and how much the guest had been told.
fn kill_and_keep(bench: &Bench, mut guest: Guest, kept: &Path) {
    assert_eq!(guest.kill_all().unwrap().signal(), Some(9));
    let acknowledged = guest.final_report().acknowledged["a"];
    assert_eq!((acknowledged.last, acknowledged.out_of_order), (Some(acknowledged.count - 1), 0));
    drop(guest);
    wait_until_free(&bench.path("image"));
    copy_image(&bench.path("image"), &kept.join("image")).unwrap();
    std::fs::write(kept.join("acknowledged"), acknowledged.count.to_string()).unwrap();
    let is_vms = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vm-"));
    let vms: Vec<PathBuf> =
        std::fs::read_dir(bench.area()).unwrap().map(|entry| entry.unwrap().path()).filter(is_vms).collect();
    assert_eq!(vms.len(), 1, "{vms:?}");
    copy_all(&vms[0], &kept.join("vm"));
    let ram = OpenOptions::new().write(true).open(kept.join("vm/ram")).unwrap();
    let bytes = ram.metadata().unwrap().len();
    ram.set_len(0).and_then(|()| ram.set_len(bytes)).unwrap();
}

#[test]
#[ignore = "makes an archive"]
fn nvm_journal_4096() {
    let (bench, kept) = (Bench::new(), kept("nvm-journal-4096"));
    let (image, region) = (bench.path("image"), bench.area().join("region"));
    ExtRecipe::ext4(24, 4).make(&image).unwrap();
    let words = disk_with(&image, &format!(",placement=nvm={},nvm-size=8", region.display()));
    let mut guest = writer(&bench, words);
    guest.wait_acknowledged("a", 30, LIMIT).unwrap();
    kill_and_keep(&bench, guest, &kept);
    copy_all(&region, &kept.join("region"));
    let (recovered, copy) = (kept.join("recovered"), bench.area().join("copy"));
    copy_image(&kept.join("image"), &recovered).unwrap();
    copy_all(&region, &copy);
    let words = ["recover", "--json", "--disk"].map(OsString::from).into_iter();
    let output = amberlog_with(words.chain([recovered.into(), "--nvm".into(), copy.into()]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["status"], "recovered", "the region has something that is not at home: {said}");
}

#[test]
#[ignore = "makes an archive"]
fn remote_journal_4096() {
    let (bench, kept) = (Bench::new(), kept("remote-journal-4096"));
    let (image, store) = (bench.path("image"), bench.path("store"));
    ExtRecipe::ext4(24, 4).make(&image).unwrap();
    let server = JournalServer::start(&store, "127.0.0.1:0", &[]);
    let mut guest = writer(&bench, remote_disk(&image, &server.address));
    wait_for_log(&guest, TO_SERVER, 1);
    // What is told from here on is on the server.
    let last = guest.acknowledged("a").last.unwrap_or(0);
    guest.wait_acknowledged("a", last + 30, LIMIT).unwrap();
    kill_and_keep(&bench, guest, &kept);
    server.kill();
    assert_eq!(journal_superblock(&image).errno, -5, "storage says that the journal is elsewhere");
    copy_all(&store, &kept.join("store"));
    let copy = bench.path("copy");
    copy_all(&store, &copy);
    copy_image(&kept.join("image"), &kept.join("recovered")).unwrap();
    let server = JournalServer::start(&copy, "127.0.0.1:0", &[]);
    let said = recovered(&kept.join("recovered"), &server.address, &[]);
    assert_eq!(said["status"], "recovered", "the server has something that is not at home: {said}");
}
