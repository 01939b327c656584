//! What a trial counts as acknowledged: nothing of a journal that was given up in the midst of a sync, though ext4 says no error
//! of that sync. If this failed, guests that lose what ext4 never wrote would be held against amberlog.

use guest_kit::image::ExtRecipe;
use guest_kit::{Cache, Drive, Guest, GuestSpec};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// On QEMU's own disk. What the worker says is asked for as well: it must have come to that sync.
#[test]
fn a_sync_point_in_whose_midst_the_journal_is_given_up_is_not_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let file_system = ExtRecipe::ext4(64, 8).make(&directory.path().join("image")).unwrap();
    let script = "mount -t ext4 -o data=ordered,errors=remount-ro,commit=300 /dev/vda /mnt || fail mount
         echo kept >/mnt/kept; sync
         guest-tools mix --directory /mnt/w --seed 5 --count 2000 --sync-all --acknowledged /tmp/acknowledged \
             --abort /sys/fs/ext4/vda/trigger_fs_error 2>/tmp/said && fail it noticed nothing
         mark said $(cat /tmp/said)
         # The sync itself says nothing, and writes nothing.
         umount /mnt && mount -t ext4 -o data=ordered /dev/vda /mnt || fail mount again
         guest-tools verify --directory /mnt/w --seed 5 --acknowledged $(cat /tmp/acknowledged) --untouched 2>/tmp/said ||
             fail $(cat /tmp/said)
         mark verified $(cat /tmp/acknowledged)";
    let spec = GuestSpec::new("aborted", script).drives(vec![Drive::new(&file_system.image, Cache::Writeback)]);
    let reported = Guest::run(spec, LIMIT).unwrap();
    let marks = reported.marks.join("\n");
    assert!(marks.contains("said guest-tools mix: cannot confirm the sync of /mnt/w/ledger"), "{marks}");
    assert!(marks.contains("verified "), "{marks}");
}
