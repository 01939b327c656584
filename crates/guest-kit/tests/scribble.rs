//! Wild writes do reach the guest's metadata in memory, and do not reach its disk before the kill:
//! what a test of amberlog's protection against them builds upon.

use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{AtEnd, Cache, Drive, Guest, GuestSpec, Reported, judge};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// A guest that has committed 200 files to the journal, and then scribbled over the inode table.
fn scribbled(file_system: &FileSystem, then: &str) -> Guest {
    let block = judge::inode_block(file_system, 13).unwrap();
    let script = format!(
        "mount -t ext4 -o data=journal,commit=600 /dev/vda /mnt || fail mount
         for n in $(seq 9); do : >/mnt/empty-$n; done
         for n in $(seq 200); do echo content $n >/mnt/file-$n; done
         sync
         guest-tools scribble --device /dev/vda --blocks {block}-{} &
         {then}
         wait",
        block + 5
    );
    let drives = vec![Drive::new(&file_system.image, Cache::Writeback)];
    let mut spec = GuestSpec::new("scribble", script).drives(drives);
    spec.at_end = AtEnd::Stay;
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("scribbled", LIMIT).unwrap();
    guest
}

#[test]
fn garbage_in_the_page_cache_is_what_the_guest_sees_but_not_what_the_disk_gets() {
    let directory = tempfile::tempdir().unwrap();
    let file_system = ExtRecipe::ext4(64, 8).make(&directory.path().join("image")).unwrap();
    let mut guest = scribbled(&file_system, "");
    guest.kill_all().unwrap();
    judge::replay_with_e2fsck(&file_system).unwrap();
    let verdict = judge::check(&file_system).unwrap();
    assert!(verdict.is_consistent(), "{verdict:?}");
    let content = judge::read_file(&file_system, "/file-200").unwrap();
    assert_eq!(content.as_deref(), Some(&b"content 200\n"[..]));

    let file_system = ExtRecipe::ext4(64, 8).make(&directory.path().join("image")).unwrap();
    // Empty files have no pages to keep their inodes in the inode cache.
    let look = "sleep 1; echo 2 >/proc/sys/vm/drop_caches
                if ls -l /mnt/empty-5; then mark seen whole; else mark seen garbage; fi";
    let mut guest = scribbled(&file_system, look);
    let seen = |reported: &Reported| reported.marks.iter().find(|mark| mark.starts_with("seen")).cloned();
    assert_eq!(guest.await_report("it saw nothing", LIMIT, seen).unwrap(), "seen garbage");
}
