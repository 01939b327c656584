//! `durable-within`, and a kernel whose ext4 has its superblock written past its journal, over a copy that is durable there: tune2fs on a
//! mounted file system writes into the kernel's cache of the disk, and flushes. Until the kernel's journal has passed that copy a power
//! cut may bring it back, as with any disk; from then on what was set is there.

use super::durable::{Storage, length};
use crate::awake;
use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::{Guest, judge};
use guest_tools::random::Random;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use write_log::{Entry, SECTOR_BYTES, entries};

/// What an age allows, and as much for the writing out.
const PATIENCE: Duration = Duration::from_secs(2);

/// With blocks of 1 KB one write of 1,280 of them is two transactions. The second one finds the first at home, and that is enough for the
/// kernel to move its tail behind what was there before; the log of compounds is not emptied for as little.
const SCRIPT: &str = r#"tail_of() { dumpe2fs -h /dev/$1 2>/dev/null | sed -n 's/^Journal sequence: *//p'; }
    tune() {
        first=$(($(tail_of $1))); mkdir -p /mnt/$1
        mount -t ext4 -o data=journal /dev/$1 /mnt/$1 || fail mount $1; cd /mnt/$1
        dd if=/dev/urandom of=big bs=64k count=20 2>/dev/null; sync
        for f in a b c; do dd if=/dev/urandom of=$f bs=64k count=3 2>/dev/null; done; sync
        # On the superblock's list of orphans, and off again: the journal gets the superblock.
        truncate -s 5k a; sync; sleep 2.5
        tune2fs -c 77 /dev/$1 >/tmp/out 2>&1 || fail tune2fs: $(cat /tmp/out)
        last=$((first + $(sed -n 's/ transactions.*//p' /proc/fs/jbd2/$1-*/info)))
        for again in 1 2 3 4; do
            [ $(($(tail_of $1))) -gt $last ] && break
            dd if=/dev/urandom of=big bs=64k count=20 conv=notrunc,fsync 2>/dev/null
        done
        [ $(($(tail_of $1))) -gt $last ] || fail the tail of $1 is at $(tail_of $1), not behind $last
        mark passed-$1
    }
"#;

/// How often the file system may be mounted before it is to be checked, as its superblock says it.
fn mounts_max(image: &Path) -> String {
    let said = Command::new("dumpe2fs").arg("-h").arg(image).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let line = said.lines().find_map(|line| line.strip_prefix("Maximum mount count:"));
    line.unwrap_or_else(|| panic!("no superblock: {said}")).trim().to_owned()
}

#[test]
fn what_is_tuned_on_a_mounted_file_system_stays_when_its_journal_has_passed_it() {
    let bench = Bench::new();
    let (mut words, mut script): (Vec<OsString>, String) = (Vec::new(), SCRIPT.to_owned());
    let disks: Vec<(char, PathBuf)> = ('a'..)
        .zip([("retain", 1), ("copy", 0)])
        .map(|(letter, (placement, within))| {
            let image = bench.path(&format!("disk-{letter}"));
            // Orphans in a file of their own would leave the superblock alone.
            let features = vec!["^orphan_file".to_owned()];
            ExtRecipe { block_bytes: 1024, features, ..ExtRecipe::ext4(48, 4) }.make(&image).unwrap();
            copy_image(&image, &bench.path(&format!("before-{letter}"))).unwrap();
            let log = bench.path(&format!("log-{letter}"));
            let option = format!("{},placement={placement},durable-within={within}", image.display());
            words.extend(["--disk".into(), format!("{option},log-writes={}", log.display()).into()]);
            script += &format!("tune vd{letter}\n");
            (letter, log)
        })
        .collect();
    script += "sleep 600";
    let mut guest = Guest::start(bench.spec("tuned", script, words)).unwrap();
    let mut passed = Vec::new();
    for (letter, log) in &disks {
        guest.wait_mark(&format!("passed-vd{letter}"), LIMIT).unwrap();
        passed.push(std::fs::metadata(log).unwrap().len());
    }
    // Something has to come behind that.
    let deadline = Instant::now() + LIMIT;
    let has_grown = |((_, log), passed): (&(char, PathBuf), &u64)| std::fs::metadata(log).unwrap().len() > *passed;
    while !disks.iter().zip(&passed).all(has_grown) {
        assert!(Instant::now() < deadline, "nothing is written any more");
        std::thread::sleep(Duration::from_millis(20));
    }
    awake::sleep(PATIENCE);
    let mut random = Random::new(1);
    for ((letter, log), passed) in disks.iter().zip(passed) {
        let path = bench.path(&format!("before-{letter}"));
        let mut storage = Storage::new(File::options().write(true).open(&path).unwrap(), path);
        let all: Vec<Entry> = entries(&File::open(log).unwrap()).map_while(Result::ok).collect();
        let (to, mut at, mut judged) = (bench.path("cut"), SECTOR_BYTES, 0);
        for (index, entry) in all.iter().enumerate() {
            storage.take(entry);
            at += length(entry);
            // Until then not all had been written that there was when the tail had passed.
            if at < passed {
                continue;
            }
            let what = format!("disk {letter}, entry {index} of {}", all.len());
            storage.cut(&mut random, &to);
            let file_system = FileSystem::whole(to.clone());
            judge::replay_with_e2fsck(&file_system).unwrap_or_else(|error| panic!("{what}: {error}"));
            let verdict = judge::check(&file_system).unwrap();
            assert!(verdict.problems.is_empty(), "{what}: {:?}", verdict.problems);
            assert_eq!(mounts_max(&to), "77", "{what}");
            judged += 1;
        }
        assert!(judged > 0, "disk {letter}");
        println!("disk {letter}: {judged} cuts of {} entries", all.len());
    }
    kill(&mut guest);
}
