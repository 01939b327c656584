//! `durable-within` where something else happens: another one is wished under load, workers die, guests reset, file systems grow and are
//! mounted again. (What a power cut leaves of ordinary work is in `durable.rs`.)

use crate::awake;
use crate::durable::{Storage, length};
use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::image::{ExtRecipe, FileSystem, MIB, copy_image, create_sparse};
use guest_kit::{Acknowledged, Guest, Reported, judge};
use guest_tools::random::Random;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};
use test_storage::TestStorage;
use write_log::{Entry, entries};

/// A write-out of what was due takes no longer, with as much added for a busy machine.
const WRITE_OUT: Duration = Duration::from_secs(4);

const CHURN: &str = "churn() {
        cd $1; i=0
        while :; do
            i=$((i + 1)); mkdir -p w$i; for f in a b c; do dd if=/dev/urandom of=w$i/$f bs=5k count=5 2>/dev/null; done
            mv w$i/a w$i/d; ln w$i/b w$i/e; truncate -s 7k w$i/c; sync w$i/d
            [ $i -gt 3 ] && rm -r w$(($i - 3))
            dd if=/dev/urandom of=direct bs=4k count=6 seek=$(($i % 7)) conv=notrunc oflag=direct 2>/dev/null
            [ $(($i % 6)) = 5 ] && rm -f direct
        done
    }\n";

/// Waits until this is in force on the VM's disk. Gives the disk's entry.
fn wait_in_force(daemon: &Daemon, within_s: Option<u64>) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let entry = daemon.wait_state("one", "running")["disks"][0].clone();
        let durability = &entry["durability"];
        // Nothing is in force either while what is wished has not begun.
        let is_so = match within_s {
            Some(within) => durability["within_s"] == within,
            None => durability["within_s"].is_null() && durability["reason"].is_null(),
        };
        if durability.is_object() && is_so {
            return entry;
        }
        assert!(Instant::now() < deadline, "{within_s:?} is not in force: {entry}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns when it is in force.
fn wish(daemon: &Daemon, placement: &str, within: &str) {
    let patience = LIMIT.as_secs().to_string();
    let output =
        daemon.ask(&["placement", "one", "disk0", placement, "--durable-within", within, "--patience", &patience]);
    assert_eq!(output.status.code(), Some(0), "{}\n{}", text(&output.stderr), daemon.log());
}

/// What was acknowledged, and how long the log of writes was some time after.
type Floor = (BTreeMap<String, Acknowledged>, u64);

#[track_caller]
fn more(guest: &mut Guest, daemon: &Daemon, count: u64) {
    for stream in ["a", "b"] {
        let last = guest.acknowledged(stream).last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged(stream, last + count, LIMIT) {
            panic!("{error}\n--- the daemon's log\n{}", daemon.log());
        }
    }
}

/// What the superblock of a file system in the whole of an image says (`s_blocks_count_lo`).
fn blocks_count(image: &Path) -> u32 {
    let mut field = [0; 4];
    File::open(image).unwrap().read_exact_at(&mut field, 1024 + 4).unwrap();
    u32::from_le_bytes(field)
}

/// Looks for what was acknowledged.
type JudgeOfRecords<'j> = &'j dyn Fn(&FileSystem, &Reported);

/// Cuts the log of writes at many places: what has no error mark is a file system with all that was promised until then.
fn judge_cuts(
    bench: &Bench,
    log: &Path,
    before: &Path,
    floors: &[Floor],
    (file_system, records): (&FileSystem, JudgeOfRecords<'_>),
) {
    let all: Vec<Entry> = entries(&File::open(log).unwrap()).map_while(Result::ok).collect();
    let durable = File::options().write(true).open(before).unwrap();
    let mut storage = Storage::new(durable, before.to_owned());
    let mut random = Random::new(all.len() as u64);
    let (mut at, mut judged, mut marked, mut with_records, mut replayed_first) = (512, 0, 0, 0, 0);
    let each = (all.len() as u64 / rounds(80)).max(1);
    // What lies behind the last floor may be little, and has to be judged, too.
    let last = floors.last().map_or(0, |(_, from)| *from);
    let ends = all.iter().scan(512, |at, entry| {
        *at += length(entry);
        Some(*at)
    });
    let each_behind = (ends.filter(|end| *end >= last).count() as u64 / 16).clamp(1, each);
    let to = bench.path("cut");
    for (index, entry) in all.iter().enumerate() {
        storage.take(entry);
        at += length(entry);
        let each = if at >= last { each_behind } else { each };
        if random.below(each) != 0 && index + 1 != all.len() {
            continue;
        }
        storage.cut(&mut random, &to);
        let superblock = journal_superblock(&to);
        if superblock.errno != 0 {
            marked += 1;
            continue;
        }
        let cut = FileSystem { image: to.clone(), ..file_system.clone() };
        let what = format!("entry {index} of {}", all.len());
        let kept = bench.path("cut-kept");
        copy_image(&to, &kept).unwrap();
        let said = judge::replay_with_e2fsck(&cut).unwrap_or_else(|error| panic!("{what}: {error}"));
        if judge::took_a_backup(&said) {
            assert_ne!(blocks_count(&kept), blocks_count(before), "{what}: {said}");
            std::fs::rename(&kept, &to).unwrap();
            judge::replay_with_debugfs(&cut).unwrap_or_else(|error| panic!("{what}: {error}"));
            replayed_first += 1;
        }
        let verdict = judge::check(&cut).unwrap();
        assert!(verdict.problems.is_empty(), "{what}: {:?}", verdict.problems);
        judged += 1;
        if let Some((acknowledged, _)) = floors.iter().rev().find(|(_, from)| *from <= at) {
            with_records += 1;
            records(&cut, &Reported { acknowledged: acknowledged.clone(), ..Reported::default() });
        }
    }
    println!(
        "{judged} cuts judged, {with_records} of them with records, {replayed_first} replayed before e2fsck looked, {marked} with an error \
         mark, of {} entries",
        all.len()
    );
    assert!(judged > 10 && with_records > 5, "{judged} cuts judged, {with_records} with records");
}

/// Never, a few seconds, none and back under load; what is said to be in force holds. Then the VMM dies, and nothing is lost.
#[test]
fn another_age_is_wished_under_load() {
    let bench = Bench::new();
    let (image, log) = (bench.path("one.img"), bench.path("log"));
    let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
    copy_image(&image, &bench.path("before")).unwrap();
    let option = format!("{},placement=retain,log-writes={}", image.display(), log.display());
    let daemon = Daemon::start(&bench, &write_config(&bench, &[("one", option)]));
    let layouts = [appended(3), overwritten(4)];
    let script = format!(
        "{CHURN}
        mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        mkdir /mnt/a /mnt/b /mnt/c
        {} &
        {} &
        churn /mnt/c",
        record_writer("/mnt/a", "a", &layouts[0], "--forever"),
        record_writer("/mnt/b", "b", &layouts[1], "--forever"),
    );
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    more(&mut guest, &daemon, 10);
    wait_in_force(&daemon, None);
    let mut floors: Vec<Floor> = Vec::new();
    let acknowledged = |guest: &Guest| {
        ["a", "b"].map(|stream| (stream.to_owned(), guest.acknowledged(stream))).into_iter().collect::<BTreeMap<_, _>>()
    };
    for within in ["5", "0", "never", "0", "1", "0", "never", "1", "never", "2"] {
        wish(&daemon, "retain", within);
        let age = within.parse().ok();
        let durability = daemon.wait_state("one", "running")["disks"][0]["durability"].clone();
        assert_eq!(durability["within_s"].as_u64(), age, "it is told of too early: {durability}");
        more(&mut guest, &daemon, 10);
        if let Some(age) = age {
            let told = acknowledged(&guest);
            if age > 0 {
                awake::sleep(Duration::from_secs(age) + WRITE_OUT);
            }
            floors.push((told, std::fs::metadata(&log).unwrap().len()));
        }
    }
    more(&mut guest, &daemon, 10);
    // The daemon begins another one for the next guest.
    std::fs::copy(&log, bench.path("log-of-one")).unwrap();
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    let log_text = daemon.log();
    assert!(!log_text.contains("ERROR"), "{log_text}");
    assert_consistent(&file_system);
    let records = |file_system: &FileSystem, reported: &Reported| {
        assert_records(file_system, "/a", "a", &layouts[0], reported);
        assert_records(file_system, "/b", "b", &layouts[1], reported);
    };
    records(&file_system, &reported);
    judge_cuts(&bench, &bench.path("log-of-one"), &bench.path("before"), &floors, (&file_system, &records));
}

/// An fsync writes home what earlier transactions committed of its file. That waits for nothing while it can be absorbed; who has dropped
/// it from his cache reads it all the same, and a death of the VMM brings it home.
#[test]
fn an_fsync_does_not_wait_for_a_compound() {
    const ROUNDS: u64 = 300;
    const BLOCKS: u64 = 64;
    for mode in ["journal", "ordered"] {
        let bench = Bench::new();
        let image = bench.path("one.img");
        let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
        let option = format!("{},placement=retain,durable-within=5", image.display());
        let daemon = Daemon::start(&bench, &write_config(&bench, &[("one", option)]));
        let script = format!(
            "mount -t ext4 -o data={mode} /dev/vda /mnt || fail mount
            cd /mnt; dd if=/dev/zero of=f bs=4k count={BLOCKS} 2>/dev/null; sync; mark begun
            i=0
            while [ $i -lt {ROUNDS} ]; do
                i=$((i + 1)); b=$((i * 7 % {BLOCKS})); c=$(printf '%4095d' $i)
                echo \"$c\" | dd of=f bs=4k count=1 seek=$b iflag=fullblock conv=notrunc,fsync 2>/dev/null || fail write $i
                [ $((i % 20)) = 0 ] || continue
                echo 3 > /proc/sys/vm/drop_caches
                [ \"$(dd if=f bs=4k count=1 skip=$b 2>/dev/null)\" = \"$c\" ] || fail read $i
            done
            mark written; sleep 600"
        );
        let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
        guest.wait_mark("begun", LIMIT).unwrap();
        let compounds = || wait_in_force(&daemon, Some(5))["durability"]["compounds"].as_u64().expect("a number");
        let before = compounds();
        guest.wait_mark("written", LIMIT).unwrap();
        let made = compounds() - before;
        println!("data={mode}: {ROUNDS} fsyncs, {made} compounds");
        let entry = wait_in_force(&daemon, Some(5));
        let timed = entry["latency"]["compound"]["count"].as_u64();
        assert!(timed > Some(0) && timed >= entry["durability"]["compounds"].as_u64(), "each is timed: {entry}");
        assert!(made < ROUNDS / 4, "data={mode}: {made} compounds for {ROUNDS} fsyncs");
        guest.kill_qemu().unwrap();
        guest.wait_end(LIMIT).unwrap();
        daemon.wait_state("one", "waiting");
        assert_consistent(&file_system);
        let read = std::process::Command::new("debugfs").args(["-R", "cat /f"]).arg(&image).output().unwrap();
        assert_eq!(read.stdout.len() as u64, BLOCKS * 4096);
        for round in ROUNDS - BLOCKS + 1..=ROUNDS {
            let at = (round * 7 % BLOCKS * 4096) as usize;
            let found = text(&read.stdout[at..at + 4096]);
            assert_eq!(found.trim(), round.to_string(), "data={mode}: the block of round {round}");
        }
        assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
    }
}

/// What was wished of a running guest is done by the worker that follows. With 0 none follows, and nothing is lost.
#[test]
fn the_next_worker_does_as_was_wished() {
    for (configured, wished) in
        [("", "5"), (",durable-within=0", "2"), (",durable-within=5", "0"), (",durable-within=1", "never")]
    {
        let bench = Bench::new();
        let image = bench.path("one.img");
        let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
        let config = write_config(&bench, &[("one", format!("{},placement=retain{configured}", image.display()))]);
        let daemon = Daemon::start(&bench, &config);
        let layouts = [appended(5), overwritten(6)];
        let script = format!(
            "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
            mkdir /mnt/a /mnt/b
            {} &
            {}",
            record_writer("/mnt/a", "a", &layouts[0], "--forever"),
            record_writer("/mnt/b", "b", &layouts[1], "--forever"),
        );
        let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
        more(&mut guest, &daemon, 10);
        wish(&daemon, "retain", wished);
        let age = wished.parse().ok();
        for round in 0..2 {
            wait_in_force(&daemon, age);
            more(&mut guest, &daemon, 10);
            kill_nine(daemon.wait_state("one", "running")["worker_pid"].as_u64().unwrap() as u32);
            more(&mut guest, &daemon, 20);
            assert!(round == 0 || daemon.log().matches("is held as before").count() >= 2, "{}", daemon.log());
        }
        guest.kill_qemu().unwrap();
        guest.wait_end(LIMIT).unwrap();
        let reported = guest.final_report();
        daemon.wait_state("one", "waiting");
        let what = format!("{configured:?}, then {wished}");
        assert!(std::fs::read_dir(bench.area()).unwrap().count() <= 1, "{what}: {}", daemon.log());
        assert_consistent(&file_system);
        assert_records(&file_system, "/a", "a", &layouts[0], &reported);
        assert_records(&file_system, "/b", "b", &layouts[1], &reported);
    }
}

/// A mounted file system grows under load.
///
/// Beside other guests it failed 2 times in 21: e2fsck looks at group descriptors before it replays, and took backups where they had
/// grown before their superblock; and once the journal that was opened again was taken for one that somebody had brought.
#[test]
#[ignore = "make crash: see above"]
fn a_file_system_that_grows_stays_durable() {
    let bench = Bench::new();
    let (image, log) = (bench.path("one.img"), bench.path("log"));
    create_sparse(&image, 192 * MIB).unwrap();
    let features = vec!["metadata_csum_seed".to_owned()];
    let file_system = ExtRecipe { features, ..ExtRecipe::ext4(64, 8) }.make_at(&image, 0).unwrap();
    copy_image(&image, &bench.path("before")).unwrap();
    let option = format!("{},placement=retain,durable-within=1,log-writes={}", image.display(), log.display());
    let daemon = Daemon::start(&bench, &write_config(&bench, &[("one", option)]));
    let layouts = [appended(7), overwritten(8)];
    let script = format!(
        "{CHURN}
        mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        mkdir /mnt/a /mnt/b /mnt/c
        (churn /mnt/c) &
        {} &
        {} &
        sleep 3
        resize2fs /dev/vda || fail resize2fs
        tune2fs -L changed /dev/vda || fail tune2fs
        mark grown
        wait",
        record_writer("/mnt/a", "a", &layouts[0], "--forever"),
        record_writer("/mnt/b", "b", &layouts[1], "--forever"),
    );
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    more(&mut guest, &daemon, 10);
    wait_in_force(&daemon, Some(1));
    guest.wait_mark("grown", LIMIT).unwrap();
    more(&mut guest, &daemon, 20);
    // Growing closes the log and opens it again.
    wait_in_force(&daemon, Some(1));
    more(&mut guest, &daemon, 20);
    let told = ["a", "b"].map(|stream| (stream.to_owned(), guest.acknowledged(stream)));
    awake::sleep(Duration::from_secs(1) + WRITE_OUT);
    let floors = [(told.into_iter().collect(), std::fs::metadata(&log).unwrap().len())];
    more(&mut guest, &daemon, 40);
    std::fs::copy(&log, bench.path("log-of-one")).unwrap();
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    let records = |file_system: &FileSystem, reported: &Reported| {
        assert_records(file_system, "/a", "a", &layouts[0], reported);
        assert_records(file_system, "/b", "b", &layouts[1], reported);
    };
    records(&file_system, &reported);
    judge_cuts(&bench, &bench.path("log-of-one"), &bench.path("before"), &floors, (&file_system, &records));
}

/// A journal comes from NVM under its guest: with the next mount it is held, and durable by age from its begin on.
#[test]
fn a_journal_that_comes_from_nvm_is_durable_with_the_next_mount() {
    let bench = Bench::new();
    let (image, region, log) = (bench.path("one.img"), bench.area().join("region"), bench.path("log"));
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    copy_image(&image, &bench.path("before")).unwrap();
    let option =
        format!("{},placement=nvm={},nvm-size=16,log-writes={}", image.display(), region.display(), log.display());
    let daemon = Daemon::start(&bench, &write_config(&bench, &[("one", option)]));
    let layouts = [appended(9), overwritten(10), appended(11)];
    let script = format!(
        "exec 5</dev/ttyS1
        mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        mkdir /mnt/n /mnt/a /mnt/b
        {} & writer=$!
        read -r line <&5
        kill $writer; wait $writer
        umount /mnt || fail umount
        mount -t ext4 -o data=journal /dev/vda /mnt || fail 'second mount'
        mark again
        {} &
        {}",
        record_writer("/mnt/n", "n", &layouts[2], "--forever"),
        record_writer("/mnt/a", "a", &layouts[0], "--forever"),
        record_writer("/mnt/b", "b", &layouts[1], "--forever"),
    );
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("n", 20, LIMIT).unwrap();
    // Where it is now nothing is to be made durable so.
    let refused = daemon.ask(&["placement", "one", "disk0", "nvm", "--durable-within", "1"]);
    assert_ne!(refused.status.code(), Some(0), "{}", text(&refused.stdout));
    wish(&daemon, "retain", "1");
    guest.wait_acknowledged("n", guest.acknowledged("n").last.unwrap_or(0) + 10, LIMIT).unwrap();
    guest.tell("again").unwrap();
    guest.wait_mark("again", LIMIT).unwrap();
    more(&mut guest, &daemon, 10);
    let entry = wait_in_force(&daemon, Some(1));
    assert_eq!((&entry["placement"], journal_superblock(&image).errno), (&Value::from("retain"), 0), "{entry}");
    let mut floors: Vec<Floor> = Vec::new();
    for _ in 0..2 {
        let told = ["a", "b"].map(|stream| (stream.to_owned(), guest.acknowledged(stream)));
        awake::sleep(Duration::from_secs(1) + WRITE_OUT);
        floors.push((told.into_iter().collect(), std::fs::metadata(&log).unwrap().len()));
        more(&mut guest, &daemon, 40);
    }
    std::fs::copy(&log, bench.path("log-of-one")).unwrap();
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    let records = |file_system: &FileSystem, reported: &Reported| {
        assert_records(file_system, "/a", "a", &layouts[0], reported);
        assert_records(file_system, "/b", "b", &layouts[1], reported);
    };
    records(&file_system, &reported);
    assert_records(&file_system, "/n", "n", &layouts[2], &reported);
    judge_cuts(&bench, &bench.path("log-of-one"), &bench.path("before"), &floors, (&file_system, &records));
}

/// A disk of the same VM that does not answer any more holds nobody's clock up.
#[test]
fn a_disk_that_hangs_leaves_the_others_durable_in_their_time() {
    const WITHIN: u64 = 2;
    let _alone = alone_behind_fuse();
    let bench = Bench::new();
    let (hanging, other) = (bench.path("hanging"), bench.path("other"));
    ExtRecipe::ext4(64, 8).make(&hanging).unwrap();
    let file_system = ExtRecipe::ext4(64, 8).make(&other).unwrap();
    let storage = match TestStorage::new(&hanging) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    let config = write_config(&bench, &[("one", storage.image().display().to_string())]);
    let with_both = std::fs::read_to_string(&config).unwrap().replacen(
        "\"]",
        &format!("\", {:?}]", format!("{},durable-within={WITHIN}", other.display())),
        1,
    );
    std::fs::write(&config, with_both).unwrap();
    let daemon = Daemon::start(&bench, &config);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         mkdir /tmp/other
         # Nothing is written there by itself.
         echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         mount -t ext4 -o data=journal,commit=300 /dev/vdb /tmp/other || fail 'mount the other'
         {} &
         while :; do
             dd if=/dev/urandom of=/mnt/direct bs=4k count=1 conv=notrunc oflag=direct 2>/dev/null
             sleep 0.02
         done &
         n=0
         while :; do
             n=$((n + 1)); echo $n >/tmp/other/$n; sync /tmp/other/$n; mark written $n
             sleep 12
         done",
        record_writer("/mnt/a", "a", &overwritten(61), "--forever")
    );
    let mut guest = Guest::start(daemon.spec_with("one", script, &[])).unwrap();
    guest.wait_acknowledged("a", 40, LIMIT).unwrap();
    guest.wait_mark("written 1", LIMIT).unwrap();
    let deadline = Instant::now() + LIMIT;
    storage.hold_reads(u64::MAX);
    storage.hold_writes(u64::MAX);
    while storage.held_reads() == 0 || storage.held_writes() == 0 {
        assert!(Instant::now() < deadline, "nothing is asked of it\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    // It is who counts on in the mark of its journal that reads: whoever does that next hangs, too. Something is written meanwhile.
    let begun = Instant::now();
    let mut was_undurable = false;
    // What the machine had stood still for, and when: a standstill makes what it falls upon older.
    let mut stood_still = vec![(Duration::ZERO, awake::stood_still())];
    while begun.elapsed() < Duration::from_secs(18) {
        let asked = begun.elapsed();
        let durability = daemon.wait_state("one", "running")["disks"][1]["durability"].clone();
        assert_eq!(durability["within_s"], WITHIN, "{durability}\n{}", daemon.log());
        let age_s = durability["oldest_undurable_s"].as_f64();
        was_undurable |= age_s.is_some();
        let age = Duration::from_secs_f64(age_s.unwrap_or(0.0));
        let before = stood_still.iter().rev().find(|(when, _)| *when + age < asked).unwrap_or(&stood_still[0]).1;
        stood_still.push((begun.elapsed(), awake::stood_still()));
        let allowed = Duration::from_secs(WITHIN) + WRITE_OUT + (awake::stood_still() - before);
        assert!(age < allowed, "{age:?} of {allowed:?}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    guest.wait_mark("written 2", LIMIT).unwrap();
    assert!(was_undurable, "there was nothing to make durable");
    guest.kill_qemu().unwrap();
    storage.release_writes();
    storage.release_reads();
    daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    drop(daemon);
    drop(storage);
}
