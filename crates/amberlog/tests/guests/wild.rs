//! Wild writes: a guest whose kernel scribbles over its own page cache, where committed blocks are retained.

use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, judge};

#[test]
fn garbage_over_retained_pages_does_not_reach_the_recovered_disk() {
    let bench = Bench::new();
    let file_system = ExtRecipe::ext4(64, 8).make(&bench.path("image")).unwrap();
    let block = judge::inode_block(&file_system, 13).unwrap();
    let script = format!(
        "echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         mount -t ext4 -o data=journal,commit=600 /dev/vda /mnt || fail mount
         for n in $(seq 200); do echo content $n >/mnt/file-$n; done
         sync
         mark committed
         sleep 1
         guest-tools scribble --device /dev/vda --blocks {block}-{} &
         wait",
        block + 5
    );
    // Every block is protected where it is: none of them is taken for hot.
    let mut guest =
        Guest::start(bench.spec("wild", script, disk_with(&bench.path("image"), ",hot-pages=never"))).unwrap();
    guest.wait_mark("scribbled", LIMIT).unwrap();
    kill(&mut guest);
    assert_consistent(&file_system);
    for n in [1, 100, 200] {
        let content = judge::read_file(&file_system, &format!("/file-{n}")).unwrap();
        assert_eq!(content, Some(format!("content {n}\n").into_bytes()));
    }
    let report = bench.report();
    assert_eq!(report.status(0), "recovered");
    assert!(report.counter(0, "cow_faults") > 0, "the garbage was written to protected pages: {}", report.0);
}
