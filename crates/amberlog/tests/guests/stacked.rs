//! A file system on a device-mapper table over the disk, whose beginning looks as if it were on the disk itself.

use crate::support::*;
use guest_kit::image::FileSystem;
use guest_kit::{Guest, judge};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// Sectors: where on the device, how many, where on the disk.
const TABLE: [(u64, u64, u64); 3] = [(0, 20_480, 0), (20_480, 100_000, 200_000), (120_480, 100_000, 40_000)];
const SECTOR: u64 = 512;

/// Copies all blocks between the disk's image and the device as its guest has it.
fn copy(image: &Path, flat: &Path, to_image: bool) {
    let open = |path| File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    let (image, flat) = (open(image), open(flat));
    for (at, count, on_disk) in TABLE {
        let mut bytes = vec![0; (count * SECTOR) as usize];
        let (from, from_at, to, to_at) =
            if to_image { (&flat, at, &image, on_disk) } else { (&image, on_disk, &flat, at) };
        from.read_exact_at(&mut bytes, from_at * SECTOR).unwrap();
        to.write_all_at(&bytes, to_at * SECTOR).unwrap();
    }
}

fn run(name: &str, mke2fs: &[&str], placement: &str) {
    let bench = Bench::new();
    let is_remote = placement == "remote";
    let server = is_remote.then(|| crate::remote::JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]));
    let (image, flat) = (bench.path("image"), bench.path("flat"));
    File::create(&image).unwrap().set_len(200 << 20).unwrap();
    let (at, count, _) = TABLE[2];
    File::create(&flat).unwrap().set_len((at + count) * SECTOR).unwrap();
    let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).args(mke2fs).arg(&flat).status().unwrap();
    assert!(made.success());
    copy(&image, &flat, true);
    let table: Vec<String> =
        TABLE.iter().map(|(at, count, on_disk)| format!("{at} {count} linear /dev/vda {on_disk}")).collect();
    // Checkpoints come soon, and the log is short: its tail moves often.
    let script = format!(
        "printf '{}\\n' | dmsetup create stacked --noudevsync || fail dmsetup
         echo 50 >/proc/sys/vm/dirty_writeback_centisecs
         echo 50 >/proc/sys/vm/dirty_expire_centisecs
         mount -t ext4 -o data=journal,commit=1 /dev/dm-0 /mnt || fail mount
         for round in $(seq 12); do
             mkdir /mnt/$round
             for n in $(seq 40); do dd if=/dev/urandom of=/mnt/$round/$n bs=4k count=5 2>/dev/null; done
             sync
             sleep 1
         done
         mark worked
         for n in $(seq 200); do echo content $n >/mnt/file-$n; done
         sync /mnt/file-200 /mnt
         mark committed",
        table.join("\\n")
    );
    let served = match &server {
        Some(server) => crate::remote::remote_disk(&image, &server.address),
        None if placement == "nvm" => {
            let region = bench.area().join("region");
            disk_with(&image, &format!(",placement=nvm={},nvm-size=32", region.display())).to_vec()
        }
        None => disk_with(&image, &format!(",placement={placement}")).to_vec(),
    };
    let mut spec = bench.spec(name, script, served);
    spec.modules = vec!["dm-mod".to_owned()];
    spec.programs = vec!["dmsetup"];
    let mut guest = Guest::start(spec).unwrap();
    let ended = guest.await_report("neither done nor failed", LIMIT, |reported| {
        let is_done = reported.marks.iter().any(|mark| mark == "committed");
        if is_done { Some(0) } else { reported.exit_code }
    });
    assert_eq!(ended.unwrap(), 0, "the script failed");
    guest.kill_qemu().unwrap();
    assert_eq!(guest.wait_end(LIMIT).unwrap().code(), Some(KILLED));
    let report = bench.report();
    copy(&image, &flat, false);
    let flat = FileSystem::whole(flat);
    judge::replay_with_e2fsck(&flat).unwrap();
    assert_consistent(&flat);
    for n in [1, 100, 200] {
        let content = judge::read_file(&flat, &format!("/file-{n}")).unwrap();
        assert_eq!(content, Some(format!("content {n}\n").into_bytes()), "file-{n}");
    }
    assert_eq!(report.status(0), "materialised");
    if placement == "storage" {
        return;
    }
    let fault = report.disk(0)["fault"].as_str().unwrap_or_default();
    assert!(fault.contains("is not what it seemed"), "{fault}\n{}", guest.stderr());
    if !is_remote {
        assert_eq!(report.disk(0)["placement"], "storage");
    }
}

#[test]
fn a_log_whose_homes_are_elsewhere_is_left_to_the_guest() {
    run("stacked", &["-b", "4096", "-J", "size=4", "-E", "packed_meta_blocks=1"], "retain");
}

#[test]
fn a_small_one_too() {
    run("stacked-small", &["-b", "1024", "-J", "size=4", "-E", "packed_meta_blocks=1"], "retain");
}

#[test]
fn one_that_goes_to_a_journal_server_too() {
    run("stacked-remote", &["-b", "4096", "-J", "size=4", "-E", "packed_meta_blocks=1"], "remote");
}

#[test]
fn one_in_a_region_of_nvm_too() {
    run("stacked-nvm", &["-b", "4096", "-J", "size=4", "-E", "packed_meta_blocks=1"], "nvm");
}

/// Nobody looks for signs there: what is on storage is left to the guest in any case.
#[test]
fn one_on_storage_too() {
    run("stacked-storage", &["-b", "4096", "-J", "size=4", "-E", "packed_meta_blocks=1"], "storage");
}
