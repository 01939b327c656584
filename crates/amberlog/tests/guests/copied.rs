//! A guest copies its file system, journal device and all, and goes on with the copy.

use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::{ExtRecipe, FileSystem, Journal, MIB, create_sparse, journal_device};
use guest_kit::judge;

/// The copy names the original's journal device, and is mounted with it. What the guest commits then is the copy's: none of it may land on
/// the original, which is not mounted.
#[test]
fn what_a_copy_commits_to_the_same_journal_device_is_the_copys() {
    for placement in ["retain", "copy"] {
        let bench = Bench::new();
        let (original, copy, journal) = (bench.path("original"), bench.path("copy"), bench.path("journal"));
        journal_device(&journal, 16, 4096).unwrap();
        let recipe = ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(64, 0) };
        let file_system = recipe.make(&original).unwrap();
        create_sparse(&copy, 64 * MIB).unwrap();
        let layout = appended(21);
        let script = format!(
            "mount -t ext4 -o data=journal,journal_path=/dev/vdc /dev/vda /mnt || fail mount
             {}
             umount /mnt || fail umount
             dd if=/dev/vda of=/dev/vdb bs=1M 2>/dev/null || fail dd
             sync
             mark copied
             mount -t ext4 -o data=journal,journal_path=/dev/vdc /dev/vdb /mnt || fail mount the copy
             {}",
            record_writer("/mnt/before", "before", &layout, "--count 30"),
            record_writer("/mnt/after", "after", &layout, "--count 200"),
        );
        let option = format!(",placement={placement}");
        let words = [
            &disk_with(&original, &option)[..],
            &["--journal-disk".into(), journal.clone().into()],
            &disk_with(&copy, &option)[..],
        ];
        let mut guest = Guest::start(bench.spec("copies", script, words.concat())).unwrap();
        guest.wait_mark("copied", LIMIT).unwrap();
        let before = std::fs::read(&original).unwrap();
        guest.wait_acknowledged("after", 100, LIMIT).unwrap();
        let reported = kill(&mut guest);
        assert!(before == std::fs::read(&original).unwrap(), "{placement}: the original was written to");
        assert_records(&file_system, "/before", "before", &layout, &reported);
        let copied = FileSystem { image: copy, offset: 0, external_journal: Some(journal) };
        judge::replay_with_e2fsck(&copied).unwrap();
        assert_consistent(&copied);
        assert_records(&copied, "/before", "before", &layout, &reported);
        assert_records(&copied, "/after", "after", &layout, &reported);
        bench.assert_area_is_empty();
    }
}
