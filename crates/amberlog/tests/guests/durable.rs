//! `durable-within`: what storage has at any moment of a guest's work, with any part of what no flush covers, is a file system that
//! e2fsck recovers by itself, with every record that was acknowledged long enough ago.

use crate::awake;
use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::{Cache, Drive, Guest, GuestSpec, judge};
use guest_tools::random::Random;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use write_log::{Entry, EntryKind, entries};

const SECTOR: usize = 512;
/// A write-out of what was due takes no longer, with as much added for a busy machine, in seconds.
const WRITE_OUT: f64 = 4.0;
/// Where ext4's superblock is, which it writes past its journal at times: torn, nothing mounts it under whatever disk.
const SUPERBLOCK_SECTORS: [u64; 2] = [2, 3];

/// How long the log of writes was when, by the clock that stands still with the machine: nothing is written out meanwhile.
struct Growth {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<(f64, u64)>>,
}

impl Growth {
    fn watch(log: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut samples = Vec::new();
            while !seen.load(Ordering::Acquire) {
                // The time first: what is not there when it is looked at was not there before.
                let time = awake::now().as_secs_f64();
                let bytes = std::fs::metadata(&log).map_or(0, |metadata| metadata.len());
                samples.push((time, bytes));
                std::thread::sleep(Duration::from_millis(20));
            }
            samples
        });
        Growth { stop, thread }
    }

    fn end(self) -> Vec<(f64, u64)> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap()
    }
}

/// Bytes of an entry in the log.
pub(super) fn length(entry: &Entry) -> u64 {
    SECTOR as u64
        + match &entry.kind {
            EntryKind::Write(data) => data.len() as u64,
            EntryKind::Mark(_) | EntryKind::Discard(_) | EntryKind::Flush => 0,
        }
}

/// What a power cut at any moment leaves of the disk.
pub(super) struct Storage {
    durable: File,
    path: PathBuf,
    unflushed: BTreeMap<u64, Vec<Arc<[u8]>>>,
}

impl Storage {
    /// As this file is, which takes what becomes durable.
    pub(super) fn new(durable: File, path: PathBuf) -> Self {
        Storage { durable, path, unflushed: BTreeMap::new() }
    }

    pub(super) fn take(&mut self, entry: &Entry) {
        let (bytes, zeros);
        let data: &[u8] = match &entry.kind {
            EntryKind::Write(data) => {
                bytes = data;
                bytes
            }
            EntryKind::Discard(len) => {
                zeros = vec![0; *len as usize];
                &zeros
            }
            EntryKind::Flush => {
                for (sector, all) in std::mem::take(&mut self.unflushed) {
                    self.durable.write_all_at(all.last().unwrap(), sector * SECTOR as u64).unwrap();
                }
                return;
            }
            EntryKind::Mark(_) => return,
        };
        for (index, part) in (0..).zip(data.chunks(SECTOR)) {
            self.unflushed.entry(entry.offset / SECTOR as u64 + index).or_default().push(Arc::from(part));
        }
    }

    pub(super) fn cut(&self, random: &mut Random, to: &Path) {
        copy_image(&self.path, to).unwrap();
        let image = File::options().write(true).open(to).unwrap();
        let keep = [0, 100, 50, 10, 90][random.below(5) as usize];
        let mut superblock = None;
        for (sector, all) in &self.unflushed {
            let drawn = random.below(100) < keep;
            let is_kept = match SUPERBLOCK_SECTORS.iter().position(|of| of == sector) {
                Some(0) => *superblock.insert(drawn),
                Some(_) => superblock.unwrap_or(false),
                None => drawn,
            };
            let which = match random.below(3) {
                0 if superblock.is_none() => random.below(all.len() as u64) as usize,
                _ => all.len() - 1,
            };
            if is_kept {
                image.write_all_at(&all[which], sector * SECTOR as u64).unwrap();
            }
        }
    }
}

/// The numbers of the records on a file system.
fn records(image: &Path) -> Vec<u64> {
    let listed = Command::new("debugfs").args(["-R", "ls -p /records"]).arg(image).output().unwrap();
    String::from_utf8_lossy(&listed.stdout)
        .lines()
        .filter_map(|line| line.split('/').nth(5).and_then(|name| name.strip_prefix('r')?.parse().ok()))
        .collect()
}

/// What is said of a record, if it is whole.
fn content(image: &Path, record: u64) -> String {
    let read = Command::new("debugfs").args(["-R", &format!("cat /records/r{record}")]).arg(image).output().unwrap();
    String::from_utf8_lossy(&read.stdout).into_owned()
}

#[test]
fn storage_is_a_file_system_by_itself_at_every_moment() {
    let rounds: u64 = std::env::var("AMBERLOG_ROUNDS").map_or(24, |text| text.parse().expect("a number"));
    let cuts = std::env::var("AMBERLOG_CUTS").map_or(25, |text| text.parse().expect("a number"));
    let bench = Bench::new();
    let mut words: Vec<OsString> = Vec::new();
    // Of each disk: placement, age, how its file system is made and mounted.
    let kinds = [
        ("retain", 1, ExtRecipe::ext4(64, 8), "data=journal"),
        ("copy", 1, ExtRecipe { block_bytes: 1024, ..ExtRecipe::ext4(64, 8) }, "data=ordered,discard"),
        ("retain", 0, ExtRecipe::ext4(64, 8), "data=ordered"),
        ("retain", 2, ExtRecipe::ext4(64, 8), "data=writeback"),
    ];
    let mut script = "work() {
            mkdir -p /mnt/$1; mount -t ext4 -o $2 /dev/$1 /mnt/$1 || fail mount $1; cd /mnt/$1; mkdir -p records
        }
        round() {
            mkdir -p w$1; for f in a b c d e; do dd if=/dev/urandom of=w$1/$f bs=5k count=7 2>/dev/null; done
            mv w$1/a w$1/f; ln w$1/b w$1/g; truncate -s 9k w$1/c; rm w$1/d
            [ $1 -gt 3 ] && rm -r w$(($1 - 3))
            dd if=/dev/urandom of=big bs=64k count=9 seek=$(($1 % 5)) conv=notrunc 2>/dev/null
            dd if=/dev/urandom of=direct bs=4k count=6 seek=$(($1 % 7)) conv=notrunc oflag=direct 2>/dev/null
            [ $(($1 % 6)) = 5 ] && rm -f big
            echo record $1 > records/r$1; sync records/r$1 records
        }\n"
    .to_owned();
    let disks: Vec<(char, PathBuf, PathBuf, u64)> = ('a'..)
        .zip(&kinds)
        .map(|(letter, (placement, within, recipe, mode))| {
            let image = bench.path(&format!("disk-{letter}"));
            recipe.make(&image).unwrap();
            copy_image(&image, &bench.path(&format!("before-{letter}"))).unwrap();
            let log = bench.path(&format!("log-{letter}"));
            words.push("--disk".into());
            let option = format!(
                "{},placement={placement},durable-within={within},log-writes={}",
                image.display(),
                log.display()
            );
            words.push(option.into());
            script += &format!("work vd{letter} {mode}\n");
            (letter, image, log, *within)
        })
        .collect();
    script += &format!(
        "for i in $(seq {rounds}); do for d in a b c d; do cd /mnt/vd$d; round $i; mark $d$i; done; sleep 0.2; done
         sleep 6; mark quiet; sleep 600"
    );
    let mut guest = Guest::start(bench.spec("durable", script, words)).unwrap();
    let watched: Vec<Growth> = disks.iter().map(|(_, _, log, _)| Growth::watch(log.clone())).collect();
    let mut told: BTreeMap<char, Vec<(f64, u64)>> = BTreeMap::new();
    for round in 1..=rounds {
        for (letter, ..) in &disks {
            guest.wait_mark(&format!("{letter}{round}"), LIMIT).unwrap();
            told.entry(*letter).or_default().push((awake::now().as_secs_f64(), round));
        }
    }
    guest.wait_mark("quiet", LIMIT).unwrap();
    // What storage has while the guest lives, and nobody here helps.
    let grown: Vec<Vec<(f64, u64)>> = watched.into_iter().map(Growth::end).collect();
    let mut random = Random::new(rounds);
    let mut of_cuts = Vec::new();
    for ((letter, _, log, within), grown) in disks.iter().zip(grown) {
        let path = bench.path(&format!("before-{letter}"));
        let durable = File::options().write(true).open(&path).unwrap();
        let mut storage = Storage::new(durable, path);
        let all: Vec<Entry> = entries(&File::open(log).unwrap()).map_while(Result::ok).collect();
        let each = (all.len() as u64 / cuts).max(1);
        let (mut at, mut judged, mut floor_max) = (SECTOR as u64, 0, 0);
        let to = bench.path("cut");
        for (index, entry) in all.iter().enumerate() {
            storage.take(entry);
            at += length(entry);
            if random.below(each) != 0 && index + 1 != all.len() {
                continue;
            }
            // It was not there yet then, so what was told before came before it.
            let now = grown.iter().rev().find(|(_, bytes)| *bytes < at).map_or(0.0, |(time, _)| *time);
            let since = if *within == 0 { 0.0 } else { *within as f64 + WRITE_OUT };
            let floor = told[letter].iter().filter(|(time, _)| time + since < now).map(|(_, round)| *round).max();
            storage.cut(&mut random, &to);
            if let Some(floor) = floor {
                // For the guest's own kernel; e2fsck changes the other.
                copy_image(&to, &bench.path(&format!("cut-{letter}"))).unwrap();
                of_cuts.retain(|(of, _)| of != letter);
                of_cuts.push((*letter, floor));
            }
            let file_system = FileSystem::whole(to.clone());
            let what = format!("disk {letter}, entry {index} of {}, at {now:.2} s", all.len());
            judge::replay_with_e2fsck(&file_system).unwrap_or_else(|error| panic!("{what}: {error}"));
            let verdict = judge::check(&file_system).unwrap();
            assert!(verdict.problems.is_empty(), "{what}: {:?}", verdict.problems);
            judged += 1;
            let Some(floor) = floor else { continue };
            let found = records(&to);
            let lost: Vec<u64> = (1..=floor).filter(|record| !found.contains(record)).collect();
            assert!(lost.is_empty(), "{what}: records {lost:?} of {floor} are lost; there are {found:?}");
            assert_eq!(content(&to, floor), format!("record {floor}\n"), "{what}");
            floor_max = floor;
        }
        println!("disk {letter}: {judged} cuts of {} entries, records until {floor_max}", all.len());
        assert!(judged >= 5 && floor_max > rounds / 4, "disk {letter}: {judged} cuts, records until {floor_max}");
    }
    kill(&mut guest);
    // A guest mounts what the last of these cuts left, and nothing but its kernel replays anything.
    let mut script = String::new();
    for (letter, floor) in &of_cuts {
        script += &format!(
            "mkdir -p /mnt/{letter}; mount -t ext4 /dev/vd{letter} /mnt/{letter} || fail mount {letter}
             for i in $(seq {floor}); do [ -e /mnt/{letter}/records/r$i ] || fail record $i of {letter}; done
             [ \"$(cat /mnt/{letter}/records/r{floor})\" = \"record {floor}\" ] || fail content of {letter}
             if dmesg | grep -i 'ext4-fs error'; then fail error on {letter}; fi\n"
        );
    }
    let drives = of_cuts.iter().map(|(letter, _)| Drive::new(bench.path(&format!("cut-{letter}")), Cache::Writeback));
    assert_eq!(of_cuts.len(), disks.len());
    let mut spec = GuestSpec::new("without amberlog", script).drives(drives.collect());
    spec.kernel_arguments = "no_timer_check".to_owned();
    Guest::run(spec, LIMIT).unwrap();
    // The host lives, so nothing at all is lost.
    for (letter, image, ..) in &disks {
        let file_system = FileSystem::whole(image.clone());
        let verdict = judge::check(&file_system).unwrap();
        assert!(verdict.problems.is_empty(), "disk {letter} after a kill: {:?}", verdict.problems);
        assert_eq!(content(image, rounds), format!("record {rounds}\n"), "disk {letter} after a kill");
    }
}
