//! Where a journal lives: what each placement promises, what its counters say, what is on storage meanwhile and after
//! the host's power is lost.

use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::{Guest, judge, program};
use serde_json::Value;
use std::path::Path;

const PLACEMENTS: [&str; 4] = ["retain", "copy", "storage", "discard"];

/// What a mount after a power loss would do: e2fsck without -f, on a copy.
fn after_power_loss(image: &Path, copy: &Path) -> String {
    copy_image(image, copy).unwrap();
    let mut tool = program::command("e2fsck").unwrap();
    let output = program::run(tool.arg("-y").arg(copy), &[0, 1]).unwrap();
    text(&output.stdout)
}

#[test]
fn each_placement_does_what_it_promises() {
    let bench = Bench::new();
    let file_systems: Vec<FileSystem> =
        PLACEMENTS.iter().map(|name| ExtRecipe::ext4(64, 8).make(&bench.path(name)).unwrap()).collect();
    let mut words: Vec<_> = PLACEMENTS
        .iter()
        .flat_map(|name| disk_with(&bench.path(name), &format!(",placement={name},name={name}{PROTECTED}")))
        .collect();
    let trace = bench.path("trace");
    words.extend(["--trace".into(), trace.clone().into()]);
    let mut script = "echo 0 >/proc/sys/vm/dirty_writeback_centisecs\n".to_owned();
    for (disk, name) in ["a", "b", "c", "d"].iter().zip(PLACEMENTS) {
        script += &format!(
            "mkdir -p /mnt/{name}; mount -t ext4 -o data=journal,commit=600 /dev/vd{disk} /mnt/{name} || fail {name}
             {}\n",
            record_writer(&format!("/mnt/{name}/records"), name, &overwritten(1), "--count 150")
        );
    }
    script += "mark caches $(cat /sys/block/vd[abcd]/queue/write_cache | tr -d ' \n')\nmark done";
    let mut guest = Guest::start(bench.spec("placements", script, words)).unwrap();
    guest.wait_mark("done", LIMIT).unwrap();

    // While blocks are held, storage says that something is amiss: an empty log may not be trusted.
    for name in ["retain", "copy", "discard"] {
        let superblock = journal_superblock(&bench.path(name));
        assert_eq!((superblock.start, superblock.errno), (0, -5), "{name}");
        let check = after_power_loss(&bench.path(name), &bench.path("after"));
        assert!(check.contains("Pass 1"), "{name}: e2fsck trusted an empty log: {check}");
    }
    let superblock = journal_superblock(&bench.path("storage"));
    assert!(superblock.start != 0 && superblock.errno == 0);
    let check = after_power_loss(&bench.path("storage"), &bench.path("after"));
    assert!(check.contains("recovering journal") && !check.contains("Pass 1"), "{check}");

    let reported = kill(&mut guest);
    let caches = reported.marks.iter().find_map(|mark| mark.strip_prefix("caches "));
    assert_eq!(caches, Some("writethroughwritethroughwritebackwriteback"));
    let report = bench.report();
    let counter = |disk, name| report.counter(disk, name);
    for (disk, name) in PLACEMENTS.iter().enumerate() {
        assert_eq!(report.disk(disk)["placement"], *name);
        assert_eq!(report.disk(disk)["name"], *name);
        assert!(counter(disk, "journal_bytes_received") > 150 * 3 * 4096, "{name}");
        assert!(counter(disk, "transactions") >= 150, "{name}");
        // Where everything is held, the guest is told of no write cache and does not even ask.
        assert_eq!(counter(disk, "flushes") > 0, !matches!(*name, "retain" | "copy"), "{name}");
        assert_eq!(counter(disk, "blocks_retained_now"), 0, "{name}: nothing is held any more");
        if *name != "storage" {
            let marks = counter(disk, "journal_bytes_to_storage");
            assert!((1..=4096).contains(&marks), "{name}: {marks} bytes of its journal reached storage");
        }
        let is_held = matches!(*name, "retain" | "copy");
        assert_eq!(counter(disk, "area_bytes_max") > 0, is_held, "{name}");
        assert_eq!(counter(disk, "blocks_committed") > 0, is_held, "{name}");
        assert_eq!(counter(disk, "blocks_retained_max") > 0, is_held, "{name}");
        assert_eq!(counter(disk, "pages_protected") > 0, *name == "retain", "{name}");
        if *name == "discard" {
            continue;
        }
        assert!(report.recovered(disk, "transactions") > 0, "{name}");
        if *name == "storage" {
            // It is whole, and its guest's kernel knows best where its blocks belong.
            assert_eq!(report.status(disk), "materialised", "{name}");
            assert_eq!(report.recovered(disk, "blocks_written"), 0, "{name}");
            let image = bench.path(name);
            assert_ne!(journal_superblock(&image).start, 0, "the journal was not left");
            let output = amberlog_with(["recover".as_ref(), "--json".as_ref(), "--disk".as_ref(), image.as_os_str()]);
            assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
            let recovered: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(recovered["transactions"], report.recovered(disk, "transactions"), "{recovered}");
        } else {
            assert_eq!(report.status(disk), "recovered", "{name}");
            assert!(report.recovered(disk, "blocks_written") > 0, "{name}");
        }
        assert_consistent(&file_systems[disk]);
        assert_eq!(assert_records(&file_systems[disk], "/records", name, &overwritten(1), &reported), 150);
        assert_eq!(journal_superblock(&bench.path(name)).errno, 0, "{name}: the recovery has cleared the mark");
    }
    assert_eq!(counter(1, "pages_protected") + counter(1, "cow_faults"), 0);
    assert!(counter(1, "pool_bytes_max") > 0);
    assert_eq!(counter(2, "journal_bytes_to_storage"), counter(2, "journal_bytes_received"));
    assert!(counter(2, "flushes_to_storage") >= 150, "a journal on storage honours every flush");
    assert!(counter(0, "flushes_to_storage") < 50, "no flush of a held journal's disk needs to reach storage");

    // What was dropped is lost, and nothing says otherwise.
    assert_eq!(report.status(3), "damaged", "{}", report.0);
    let superblock = journal_superblock(&bench.path("discard"));
    assert_eq!((superblock.start, superblock.errno), (0, -5));
    let verdict = judge::check(&file_systems[3]).unwrap();
    assert!(!verdict.is_clean(), "{verdict:?}");
    bench.assert_area_is_empty();

    let output = amberlog_with(["trace".as_ref(), "summary".as_ref(), "--json".as_ref(), trace.as_os_str()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let summary = &summary["traces"][0];
    let total = |name| (0..4).map(|disk| counter(disk, name)).sum::<u64>();
    assert_eq!(summary["journal"]["bytes"], total("journal_bytes_received"), "{summary}");
    assert_eq!(summary["read"]["bytes"], total("read_bytes"), "{summary}");
    assert_eq!(summary["flush"]["requests"], total("flushes"), "{summary}");
    let names: Vec<_> = summary["disks"].as_array().unwrap().iter().map(|disk| disk["disk"].clone()).collect();
    assert_eq!(names, PLACEMENTS);
}
