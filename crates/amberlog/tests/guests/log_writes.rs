//! `log-writes=FILE`: replayed over a copy of the image as it was before, the log gives the image as it is after, whoever wrote
//! to it: the guest, marks, hand-overs and the recovery at the end.

use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::{ExtRecipe, Journal, copy_image, journal_device};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use write_log::{EntryKind, entries};

/// What a log has, counted.
#[derive(Debug, Default)]
struct Seen {
    writes: u64,
    discards: u64,
    flushes: u64,
}

fn replay(log: &Path, image: &Path) -> Seen {
    let image = File::options().write(true).open(image).unwrap();
    let mut seen = Seen::default();
    for entry in entries(&File::open(log).unwrap()) {
        let entry = entry.unwrap();
        match entry.kind {
            EntryKind::Write(data) => {
                image.write_all_at(&data, entry.offset).unwrap();
                seen.writes += 1;
            }
            EntryKind::Discard(bytes) => {
                image.write_all_at(&vec![0; bytes as usize], entry.offset).unwrap();
                seen.discards += 1;
            }
            EntryKind::Flush => seen.flushes += 1,
            EntryKind::Mark(_) => {}
        }
    }
    seen
}

fn first_difference(one: &Path, other: &Path) -> Option<usize> {
    let (one, other) = (std::fs::read(one).unwrap(), std::fs::read(other).unwrap());
    assert_eq!(one.len(), other.len());
    one.iter().zip(&other).position(|(a, b)| a != b)
}

#[test]
fn a_log_of_writes_makes_the_image() {
    let bench = Bench::new();
    let placements = [
        ("retain", "retain"),
        ("copy", "copy"),
        ("storage", "storage"),
        ("discard", "discard"),
        // Compounds, superblocks of ours and what the host writes home are in the log, too.
        ("within-1", "retain,durable-within=1"),
        ("within-0", "copy,durable-within=0"),
    ];
    let mut words: Vec<OsString> = Vec::new();
    let mut script = "mount_it() { mkdir -p /mnt/$1; mount -t ext4 -o data=$2,discard /dev/$1 /mnt/$1 || fail mount $1; }
        work() {
            for i in $(seq 30); do mkdir $1/d$i; dd if=/dev/urandom of=$1/d$i/f bs=7k count=9 2>/dev/null; done; sync $1/d7/f
            for i in $(seq 15); do rm -r $1/d$i; done; sync; fstrim $1
            fallocate -l 3M $1/zeros; dd if=/dev/urandom of=$1/zeros bs=4k count=3 seek=5 conv=notrunc,fsync 2>/dev/null
            dd if=/dev/urandom of=$1/direct bs=8k count=5 oflag=direct 2>/dev/null
        }\n"
    .to_owned();
    let mut images = Vec::new();
    let mut attach = |name: &str, option: &str, placement: &str| {
        copy_image(&bench.path(name), &bench.path(&format!("{name}.before"))).unwrap();
        let log = bench.path(&format!("{name}.log"));
        words.push(OsString::from(option));
        words.push(format!("{}{placement},log-writes={}", bench.path(name).display(), log.display()).into());
        images.push(name.to_owned());
    };
    for (letter, (name, placement)) in ('a'..).zip(placements) {
        let block_bytes = if letter == 'b' { 1024 } else { 4096 };
        ExtRecipe { block_bytes, ..ExtRecipe::ext4(48, 6) }.make(&bench.path(name)).unwrap();
        attach(name, "--disk", &format!(",placement={placement}"));
        let mode = if ['a', 'e'].contains(&letter) { "journal" } else { "ordered" };
        script += &format!(
            "d=vd{letter}; mount_it $d {mode}; work /mnt/$d; umount /mnt/$d; mount_it $d journal; work /mnt/$d/d20\n"
        );
    }
    let journal = bench.path("journal");
    journal_device(&journal, 16, 4096).unwrap();
    ExtRecipe { journal: Journal::External(journal), ..ExtRecipe::ext4(48, 0) }.make(&bench.path("home")).unwrap();
    attach("home", "--disk", "");
    attach("journal", "--journal-disk", "");
    script += "d=vdg; mount_it $d journal,journal_path=/dev/vdh; work /mnt/$d\nsync\nmark done";
    let mut spec = bench.spec("log-writes", script, words);
    spec.programs = vec!["fallocate", "fstrim"];
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("done", LIMIT).unwrap();
    kill(&mut guest);
    for name in &images {
        let (log, before) = (bench.path(&format!("{name}.log")), bench.path(&format!("{name}.before")));
        let seen = replay(&log, &before);
        assert_eq!(first_difference(&before, &bench.path(name)), None, "{name}: {seen:?}");
        assert!(seen.writes > 0 && seen.flushes > 0, "{name}: {seen:?}");
        assert!(seen.discards > 0 || name == "journal", "{name}: {seen:?}");
    }
}
