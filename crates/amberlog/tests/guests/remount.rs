//! A file system that is mounted again in the same running guest, without a reset of its disk: after an error or a shutdown
//! has stopped its journal, by way of e2fsck, or because another image was copied over it. The mounting
//! kernel replays the journal itself, as on any disk.

use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{Guest, judge};

/// How each disk's file system comes to be mounted again. `$d` is the disk, `$m` where it is mounted.
const WAYS: [(&str, &str); 9] = [
    ("error", "break_it; umount $m"),
    ("shutdown-default", "shut_down 0; umount $m"),
    ("shutdown-logflush", "shut_down 1; umount $m"),
    ("shutdown-nologflush", "shut_down 2; umount $m"),
    ("lazy", "(cd $m && exec sleep 2) & sleep 0.2; umount -l $m; break_it; wait"),
    // What somebody reads meanwhile, past the cache of the mounted file system, changes nothing.
    (
        "read",
        "dd if=/dev/$d of=/dev/null bs=1M iflag=direct 2>/dev/null; break_it; dumpe2fs -h /dev/$d >/dev/null 2>&1; umount $m
         dd if=/dev/$d of=/dev/null bs=64k 2>/dev/null",
    ),
    ("e2fsck", "break_it; umount $m; e2fsck -fy /dev/$d >/tmp/e2fsck; [ $? -le 1 ] || fail \"e2fsck: $(cat /tmp/e2fsck)\""),
    // An image with a live journal is copied over the disk.
    ("copied", "umount $m; dd if=/dev/vda of=/dev/$d bs=1M 2>/dev/null || fail dd; sync"),
    (
        "copied-backwards-over-an-open-journal",
        "break_it; umount $m
         for n in $(seq 383 -1 0); do
             dd if=/dev/vda of=/dev/$d bs=64k count=1 skip=$n seek=$n conv=notrunc,fsync 2>/dev/null || fail dd
         done",
    ),
];

/// Files that are synced, then work that is not committed: it must not be there after the replay, nor any of it.
const WORK: &str = "
    work() {
        mkdir -p $m
        mount -t ext4 -o data=journal,errors=remount-ro,commit=300 /dev/$d $m || fail \"mount $d\"
        for i in $(seq 40); do mkdir $m/d$i; echo $i >$m/d$i/f; done
        sync $m/d40/f
        for i in $(seq 20); do mkdir $m/e$i; rm -r $m/d$i; done
    }
    break_it() { echo 1 >/sys/fs/ext4/$d/trigger_fs_error; }
    shut_down() { perl -e 'open(F, \"<\", $ARGV[0]) or die; ioctl(F, 0x8004587d, pack(\"L\", $ARGV[1])) or die $!' $m/d40/f $1 ||
        fail \"shutdown $1\"; }
    check() {
        for i in $(seq $1 40); do [ \"$(cat $m/d$i/f)\" = $i ] || fail \"$2: d$i/f\"; done
    }
";

fn script(ways: &[(&str, &str)]) -> String {
    // The first disk, whose journal is on storage, keeps it live.
    let mut script = WORK.to_owned() + "d=vda; m=/mnt/source; work; break_it; umount $m\n";
    for (letter, (name, way)) in ('b'..).zip(ways) {
        // A shutdown that writes the log first, or all, has committed what was not synced.
        let first = if name.contains("default") || name.contains("logflush") && !name.contains("no") { 21 } else { 1 };
        script += &format!(
            "d=vd{letter}; m=/mnt/{name}; work
             {way}
             mount -t ext4 -o data=journal /dev/$d $m || fail '{name}: cannot be mounted again'
             check {first} {name}
             echo more >$m/more; sync $m/more; rm -r $m/d21; umount $m || fail 'umount {name}'
             mount -t ext4 -o data=journal /dev/$d $m || fail '{name}: cannot be mounted a third time'
             check {} {name}; [ \"$(cat $m/more)\" = more ] || fail '{name}: more'
             mark {name}\n",
            first.max(22)
        );
    }
    script + "dmesg | grep -iE 'checksum invalid|corrupt|recovery failed' && fail 'the kernel complains'\nmark done"
}

/// Ways that leave the guest something of what it knew of the disk.
const OTHER_WAYS: [(&str, &str); 3] = [
    // Somebody has the disk open all the time, so that what the kernel has read of it stays in its cache.
    ("held-open", "exec 9</dev/$d; break_it; umount $m; HELD=1"),
    ("held-open-shutdown", "exec 9</dev/$d; shut_down 2; umount $m; HELD=1"),
    (
        "loop",
        "break_it; umount $m; losetup /dev/loop0 /dev/$d || fail losetup; mount -t ext4 -o data=journal /dev/loop0 $m || \
              fail 'over a loop device'; check 1 loop; umount $m; losetup -d /dev/loop0",
    ),
];

fn remounts(placement: impl Fn(&Bench, &str) -> String, ways: &[(&str, &str)]) {
    let bench = Bench::new();
    let file_systems: Vec<FileSystem> =
        ways.iter().map(|(name, _)| ExtRecipe::ext4(24, 4).make(&bench.path(name)).unwrap()).collect();
    let source = bench.path("source");
    ExtRecipe::ext4(24, 4).make(&source).unwrap();
    let words = disk_with(&source, ",placement=storage").into_iter();
    let words =
        words
            .chain(ways.iter().flat_map(|(name, _)| {
                disk_with(&bench.path(name), &format!(",placement={}", placement(&bench, name)))
            }));
    let mut spec = bench.spec("remount", script(ways), words);
    spec.programs = vec!["e2fsck", "dumpe2fs", "perl"];
    if ways.iter().any(|(name, _)| *name == "loop") {
        spec.modules.push("loop".to_owned());
    }
    let mut guest = Guest::start(spec).unwrap();
    // One after the other, under an emulator.
    guest.wait_mark("done", 3 * LIMIT).unwrap();
    kill(&mut guest);
    for file_system in &file_systems {
        // An error that was triggered stays written down in the superblock, and e2fsck says so, but finds nothing.
        let verdict = judge::check(file_system).unwrap();
        assert!(verdict.is_consistent(), "{}: {verdict:?}", file_system.image.display());
    }
}

#[test]
fn a_file_system_is_mounted_again_without_a_reset() {
    remounts(|_, _| "retain".to_owned(), &WAYS);
}

#[test]
fn the_same_where_its_journal_is_copied() {
    remounts(|_, _| "copy".to_owned(), &[WAYS[0], WAYS[3], WAYS[6], WAYS[8]]);
}

#[test]
fn the_same_where_something_of_the_disk_stays_in_the_guest() {
    remounts(|_, _| "retain".to_owned(), &OTHER_WAYS);
}

/// The guest replays what is held, and not what was made durable beside it.
#[test]
fn the_same_where_its_journal_is_durable_by_age() {
    let placement = |_: &Bench, name: &str| match name.len() % 3 {
        0 => "retain,durable-within=0",
        1 => "copy,durable-within=1",
        _ => "retain,durable-within=1",
    };
    // Of the last of them it is said, as an error, that durability ends: the journal was written over.
    remounts(|bench, name| placement(bench, name).to_owned(), &WAYS[..8]);
}

#[test]
fn the_same_durable_by_age_where_something_of_the_disk_stays_in_the_guest() {
    let placement = |_: &Bench, name: &str| match name {
        "loop" => "copy,durable-within=1",
        "held-open" => "retain,durable-within=0",
        _ => "retain,durable-within=1",
    };
    remounts(|bench, name| placement(bench, name).to_owned(), &OTHER_WAYS);
}

fn region(bench: &Bench, name: &str) -> String {
    format!("nvm={},nvm-size=8", bench.area().join(format!("{name}.region")).display())
}

/// The kernel replays one transaction of the newest committed versions.
#[test]
fn the_same_where_its_journal_is_on_nvm() {
    remounts(region, &WAYS);
}

#[test]
fn the_same_on_nvm_where_something_of_the_disk_stays_in_the_guest() {
    remounts(region, &OTHER_WAYS);
}
