//! Orderly life: mount, unmount, remount; file systems and journals that are made, changed, grown and removed inside the
//! guest while the disk is attached; clean stops.

use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, Journal, MIB, create_sparse};
use guest_kit::{AtEnd, Guest};

/// Mounted over and over, and shut down: nothing is owed and no error mark is left.
#[test]
fn a_clean_stop_leaves_a_clean_disk_without_a_mark() {
    let bench = Bench::new();
    let (image, other) = (bench.path("image"), bench.path("other"));
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let other_file_system = ExtRecipe::ext3(64, 8).make(&other).unwrap();
    let write = |round: &str| record_writer(&format!("/mnt/{round}"), round, &overwritten(1), "--count 40");
    let script = format!(
        "set -e
         mkdir -p /tmp/other
         mount -t ext3 -o data=journal /dev/vdb /tmp/other
         mount -t ext4 -o data=journal /dev/vda /mnt
         {first}
         umount /mnt
         mark unmounted
         sleep 2
         mount -t ext4 -o data=journal /dev/vda /mnt
         {second}
         mount -o remount,ro /mnt
         mount -o remount,rw /mnt
         {third}
         umount /mnt
         mount -t ext4 /dev/vda /mnt
         {fourth}
         {of_other}
         dmesg | grep -i 'ext4.*error' && exit 9
         exit 0",
        first = write("first"),
        second = write("second"),
        third = write("third"),
        fourth = write("fourth"),
        of_other = record_writer("/tmp/other/fifth", "fifth", &overwritten(1), "--count 40"),
    );
    let mut spec = bench.spec("clean", script, [protected_disk(&image), protected_disk(&other)].concat());
    spec.at_end = AtEnd::PowerOff;
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("unmounted", LIMIT).unwrap();
    // What the guest unmounted is clean on storage at once, whatever becomes of amberlog then.
    let superblock = journal_superblock(&image);
    assert_eq!((superblock.start, superblock.errno), (0, 0));
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0, "{}", guest.console());
    let status = guest.wait_end(LIMIT).unwrap();
    assert_ends_with(&guest, status, 0);
    let reported = guest.final_report();
    for round in ["first", "second", "third", "fourth"] {
        assert_eq!(assert_records(&file_system, &format!("/{round}"), round, &overwritten(1), &reported), 40);
    }
    assert_eq!(assert_records(&other_file_system, "/fifth", "fifth", &overwritten(1), &reported), 40);
    let report = bench.report();
    for (disk, file_system) in [(0, &file_system), (1, &other_file_system)] {
        assert_clean(file_system);
        assert_eq!(report.status(disk), "clean");
        assert_eq!(report.recovered(disk, "blocks_written"), 0);
        assert_eq!(report.counter(disk, "blocks_retained_now"), 0);
        assert!(report.counter(disk, "pages_protected") > 0);
        let superblock = journal_superblock(&file_system.image);
        assert_eq!((superblock.start, superblock.errno), (0, 0));
    }
    bench.assert_area_is_empty();
}

/// mkfs over a file system that was in use; a journal added by tune2fs, removed, and added again; a file system on a disk
/// that had none; a partition table made in the guest. Then the kill.
#[test]
fn what_mkfs_and_tune2fs_make_in_the_guest_is_held() {
    let bench = Bench::new();
    let paths = ["remade", "tuned", "fresh", "parted"].map(|name| bench.path(name));
    ExtRecipe::ext4(64, 8).make(&paths[0]).unwrap();
    ExtRecipe { journal: Journal::None, ..ExtRecipe::ext4(64, 0) }.make(&paths[1]).unwrap();
    create_sparse(&paths[2], 64 * MIB).unwrap();
    create_sparse(&paths[3], 64 * MIB).unwrap();
    let write = |name: &str| record_writer(&format!("/tmp/{name}/records"), name, &overwritten(2), "--forever");
    let script = format!(
        "set -e
         cd /tmp; mkdir remade tuned fresh parted
         mount -t ext4 -o data=journal /dev/vda remade
         dd if=/bin/busybox of=remade/file bs=64k conv=fsync 2>/dev/null
         umount remade
         mkfs.ext4 -q -F -b 4096 -J size=4 /dev/vda
         mount -t ext4 -o data=journal /dev/vda remade
         tune2fs -J size=8 /dev/vdb >/dev/null
         mount -t ext4 -o data=journal /dev/vdb tuned
         echo x >tuned/file; sync; umount tuned
         tune2fs -O ^has_journal /dev/vdb >/dev/null
         mount -t ext4 /dev/vdb tuned; echo y >tuned/other; umount tuned
         tune2fs -J size=6 /dev/vdb >/dev/null
         mount -t ext4 -o data=journal /dev/vdb tuned
         tune2fs -L named -c 77 /dev/vdb >/dev/null
         mkfs.ext3 -q -F -b 4096 -J size=8 /dev/vdc
         mount -t ext3 -o data=journal /dev/vdc fresh
         printf 'o\\nn\\np\\n1\\n2048\\n\\nw\\n' | fdisk /dev/vdd >/dev/null 2>&1 || true
         until [ -b /dev/vdd1 ]; do sleep 0.2; done
         mkfs.ext4 -q -F -b 4096 -J size=8 /dev/vdd1
         mount -t ext4 -o data=journal /dev/vdd1 parted
         {} & {} & {} & {} &
         wait",
        write("remade"),
        write("tuned"),
        write("fresh"),
        write("parted")
    );
    let words = paths.each_ref().map(|path| protected_disk(path)).concat();
    let mut guest = Guest::start(bench.spec("made-inside", script, words)).unwrap();
    for name in ["remade", "tuned", "fresh", "parted"] {
        guest.wait_acknowledged(name, 50, LIMIT).unwrap();
    }
    let reported = kill(&mut guest);
    let report = bench.report();
    for (disk, name, offset) in [(0, "remade", 0), (1, "tuned", 0), (2, "fresh", 0), (3, "parted", 2048 * 512)] {
        let file_system = FileSystem { offset, ..FileSystem::whole(&paths[disk]) };
        assert_consistent(&file_system);
        assert_records(&file_system, "/records", name, &overwritten(2), &reported);
        assert_eq!(report.status(disk), "recovered", "{name}");
        assert_eq!(report.disk(disk)["journal"]["kind"], "internal", "{name}");
        assert!(report.counter(disk, "pages_protected") > 50, "{name}");
    }
    assert_eq!(report.disk(0)["journal"]["blocks"], 1024, "the journal of the new file system");
    assert_eq!(report.disk(1)["journal"]["blocks"], 1536, "the journal that was added last");
    bench.assert_area_is_empty();
}

/// A mounted file system grows, and gets another label and UUID; what it committed before and after survives the kill.
#[test]
fn a_file_system_that_changes_while_it_is_mounted_stays_held() {
    let bench = Bench::new();
    let image = bench.path("image");
    create_sparse(&image, 192 * MIB).unwrap();
    let features = vec!["metadata_csum_seed".to_owned()];
    let file_system = ExtRecipe { features, ..ExtRecipe::ext4(64, 8) }.make_at(&image, 0).unwrap();
    let script = format!(
        "set -e
         mount -t ext4 -o data=journal,commit=600 /dev/vda /mnt
         echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         {}
         resize2fs /dev/vda || fail 'resize2fs'
         mark grown
         {}
         tune2fs -L changed -U 12345678-1234-1234-1234-123456789abc /dev/vda || fail 'tune2fs'
         mark changed
         {}",
        record_writer("/mnt/before", "before", &overwritten(1), "--count 60"),
        record_writer("/mnt/between", "between", &overwritten(2), "--count 60"),
        record_writer("/mnt/after", "after", &overwritten(3), "--forever"),
    );
    let mut guest = Guest::start(bench.spec("grows", script, disk(&image))).unwrap();
    guest.wait_acknowledged("after", 40, LIMIT).unwrap();
    let reported = kill(&mut guest);
    assert_consistent(&file_system);
    assert_records(&file_system, "/before", "before", &overwritten(1), &reported);
    assert_records(&file_system, "/between", "between", &overwritten(2), &reported);
    assert_records(&file_system, "/after", "after", &overwritten(3), &reported);
    let report = bench.report();
    assert_eq!(report.status(0), "recovered");
    // A mark when it was mounted; growing empties the log once: its superblock, and a new mark.
    let marks = report.counter(0, "journal_bytes_to_storage");
    assert!(marks <= 1024 + 4096 + 1024, "the journal was not held all along: {marks} bytes reached storage");
    let superblock = std::fs::read(&image).unwrap()[1024..2048].to_vec();
    assert_eq!(u32::from_le_bytes(superblock[4..8].try_into().unwrap()), 192 * 256, "it has grown");
    assert_eq!(&superblock[0x78..0x7f], b"changed");
    bench.assert_area_is_empty();
}
