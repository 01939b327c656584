//! Every kind of disk and journal there is, in one guest, killed under load: internal and external journals, extents and
//! indirect blocks, all block sizes, partitions, and disks that are none of our business; and a root file system that
//! the guest boots from.

use crate::support::*;
use guest_kit::evidence::RecordLayout;
use guest_kit::image::{self, ExtRecipe, FileSystem, Journal, MIB, PartitionTable, journal_device, partitioned};
use guest_kit::{Guest, judge};
use std::ffi::OsString;

/// A file system under test: where the guest finds it, and what is expected of it.
struct Subject {
    name: &'static str,
    mount: String,
    file_system: FileSystem,
    disk: usize,
    /// Whole pages, so that blocks can stay where they are.
    is_protected: bool,
    journal: &'static str,
}

fn layouts() -> [(&'static str, RecordLayout); 2] {
    [("appended", appended(3)), ("overwritten", overwritten(4))]
}

#[test]
fn journals_of_every_kind_are_held_and_finished() {
    let bench = Bench::new();
    let path = |name: &str| bench.path(name);
    let mut subjects = Vec::new();
    let mut words: Vec<OsString> = Vec::new();
    let device = |index: usize| format!("/dev/vd{}", char::from(b'a' + index as u8));
    let mut disks = 0;
    let mut attach = |image: &std::path::Path| {
        words.extend(protected_disk(image));
        disks += 1;
        disks - 1
    };
    let small = |block_bytes, recipe: ExtRecipe| ExtRecipe { block_bytes, ..recipe };
    for (name, recipe) in [
        ("ext4-4k", ExtRecipe::ext4(48, 8)),
        ("ext4-2k", small(2048, ExtRecipe::ext4(48, 8))),
        ("ext4-1k", small(1024, ExtRecipe::ext4(48, 8))),
        ("ext3-4k", ExtRecipe::ext3(48, 8)),
        ("ext3-1k", small(1024, ExtRecipe::ext3(48, 8))),
    ] {
        let file_system = recipe.make(&path(name)).unwrap();
        let disk = attach(&file_system.image);
        let (mount, is_protected) = (device(disk), recipe.block_bytes == 4096);
        subjects.push(Subject { name, mount, file_system, disk, is_protected, journal: "internal" });
    }
    for (name, table) in [("mbr", PartitionTable::Mbr), ("gpt", PartitionTable::Gpt)] {
        let image = path(name);
        let offsets = partitioned(&image, table, &[48, 8, 48]).unwrap();
        let disk = attach(&image);
        for (partition, name) in [(1, if name == "mbr" { "mbr-1" } else { "gpt-1" }), (3, "third")] {
            let file_system = ExtRecipe::ext4(48, 8).make_at(&image, offsets[partition - 1]).unwrap();
            let mount = format!("{}{partition}", device(disk));
            let name = if name == "third" && table == PartitionTable::Mbr { "mbr-3" } else { name };
            let name = if name == "third" { "gpt-3" } else { name };
            subjects.push(Subject { name, mount, file_system, disk, is_protected: true, journal: "internal" });
        }
    }
    let (raw, swap) = (path("raw"), path("swap"));
    image::create_sparse(&raw, 16 * MIB).unwrap();
    image::create_sparse(&swap, 16 * MIB).unwrap();
    let (raw_disk, swap_disk) = (attach(&raw), attach(&swap));
    for (name, block_bytes) in [("external-4k", 4096), ("external-1k", 1024)] {
        let journal = path(&format!("{name}-journal"));
        journal_device(&journal, 16, block_bytes).unwrap();
        let recipe = ExtRecipe { journal: Journal::External(journal), ..small(block_bytes, ExtRecipe::ext4(48, 0)) };
        let file_system = recipe.make(&path(name)).unwrap();
        let disk = attach(&file_system.image);
        let (mount, is_protected) = (device(disk), block_bytes == 4096);
        subjects.push(Subject { name, mount, file_system, disk, is_protected, journal: "external" });
    }
    for subject in subjects.iter_mut().filter(|subject| subject.journal == "external") {
        let journal = subject.file_system.external_journal.clone().unwrap();
        words.extend(["--journal-disk".into(), journal.into()]);
        subject.mount = format!("-o journal_path={} {}", device(disks), subject.mount);
        disks += 1;
    }

    let mut script = format!(
        "mkswap {swap} >/dev/null && swapon {swap} || fail swap
         dd if=/bin/busybox of={raw} bs=64k count=8 conv=fsync 2>/dev/null || fail raw
         mark raw is written\n",
        swap = device(swap_disk),
        raw = device(raw_disk),
    );
    for subject in &subjects {
        let name = subject.name;
        script += &format!(
            "mkdir -p /mnt/{name}; mount -t ext4 -o data=journal {} /mnt/{name} || fail {name}\n",
            subject.mount
        );
        for (order, layout) in layouts() {
            let writer =
                record_writer(&format!("/mnt/{name}/{order}"), &format!("{name}-{order}"), &layout, "--forever");
            script += &format!("{writer} &\n");
        }
    }
    script += "wait; fail 'the writers ended'";
    let mut guest = Guest::start(bench.spec("journals", script, words)).unwrap();
    guest
        .await_report("not every writer has written 30 records", LIMIT, |reported| {
            let count = reported.acknowledged.values().filter(|stream| stream.last >= Some(30)).count();
            (count == 2 * subjects.len() || reported.exit_code.is_some()).then_some(())
        })
        .unwrap();
    let reported = kill(&mut guest);
    assert_eq!(reported.exit_code, None, "{}", guest.console());
    let report = bench.report();
    for subject in &subjects {
        println!("{}", subject.name);
        assert_consistent(&subject.file_system);
        for (order, layout) in layouts() {
            let stream = format!("{}-{order}", subject.name);
            assert_records(&subject.file_system, &format!("/{order}"), &stream, &layout, &reported);
        }
        assert_eq!(report.status(subject.disk), "recovered");
        assert!(report.recovered(subject.disk, "blocks_written") > 0);
        assert_eq!(report.disk(subject.disk)["journal"]["kind"], subject.journal);
        assert!(report.disk(subject.disk)["journal"]["blocks"].as_u64() > Some(1000));
        assert_eq!(report.counter(subject.disk, "pages_protected") > 0, subject.is_protected);
        if !subject.is_protected {
            assert!(report.counter(subject.disk, "pool_bytes_max") > 0);
        }
        // What reached the journal's place is a mark for each of the disk's file systems.
        assert!(report.counter(subject.disk, "journal_bytes_to_storage") <= 2 * 4096);
        assert!(report.counter(subject.disk, "journal_bytes_received") > 1 << 18);
    }
    for disk in [raw_disk, swap_disk] {
        assert_eq!(report.disk(disk)["journal"]["kind"], "none");
        assert_eq!(report.status(disk), "none");
        assert_eq!(report.counter(disk, "journal_bytes_received"), 0);
    }
    let busybox = std::fs::read(guest_kit::program::find_program("busybox").unwrap()).unwrap();
    assert!(std::fs::read(&raw).unwrap()[..512 << 10] == busybox[..512 << 10], "what was written and flushed is there");
    assert_eq!(&std::fs::read(&swap).unwrap()[4086..4096], b"SWAPSPACE2");
    bench.assert_area_is_empty();
}

#[test]
fn a_root_disk_is_killed_booted_from_again_and_shut_down() {
    let bench = Bench::new();
    let disk_image = bench.path("disk");
    let root = image::root_directory().unwrap();
    let offset = partitioned(&disk_image, PartitionTable::Gpt, &[96]).unwrap()[0];
    let recipe = ExtRecipe { content: Some(root.path().to_owned()), ..ExtRecipe::ext4(96, 8) };
    let file_system = recipe.make_at(&disk_image, offset).unwrap();
    let script = format!(
        "grep ' / ext4 .*data=journal' /proc/mounts || fail 'not on the root disk'
         if [ -e /records ]; then
             {NOTHING_TO_REPLAY}
             {}
             exit 0
         fi
         {}",
        record_writer("/again", "again", &appended(6), "--count 20"),
        record_writer("/records", "records", &overwritten(5), "--forever"),
    );
    let spec = || {
        let mut spec = bench.spec("root-disk", script.as_str(), disk(&disk_image));
        spec.root = Some("/dev/vda1".to_owned());
        spec.root_options = "rw,data=journal".to_owned();
        spec
    };
    let mut guest = Guest::start(spec()).unwrap();
    guest.wait_acknowledged("records", 50, LIMIT).unwrap();
    let killed = kill(&mut guest);
    assert_eq!(bench.report().status(0), "recovered");
    assert_consistent(&file_system);

    let mut again = spec();
    again.at_end = guest_kit::AtEnd::PowerOff;
    let reported = Guest::run(again, LIMIT).unwrap();
    let report = bench.report();
    assert_records(&file_system, "/records", "records", &overwritten(5), &killed);
    assert_eq!(assert_records(&file_system, "/again", "again", &appended(6), &reported), 20);
    // The root file system ends read-only, not unmounted: that empties its journal all the same.
    assert_eq!(report.status(0), "clean");
    let verdict = judge::check(&file_system).unwrap();
    assert!(verdict.is_clean(), "{verdict:?}");
    bench.assert_area_is_empty();
}
