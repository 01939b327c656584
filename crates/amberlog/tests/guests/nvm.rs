//! Placement `nvm` below real guests: killed, out of power (the region's file and the image as they are at a random
//! moment), refused.

use crate::remote::wait_for_log;
use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, PartitionTable, copy_image, partitioned};
use guest_kit::workload::{STREAMS, Workload};
use guest_kit::{Guest, Signal};
use guest_tools::random::Random;
use serde_json::Value;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

/// `--disk` with its journal in this region.
pub(super) fn on_nvm(image: &Path, region: &Path, more: &str) -> [OsString; 2] {
    disk_with(image, &format!(",placement=nvm={}{more}", region.display()))
}

/// What is logged of a garbage collection.
const COLLECTED: &str = "garbage collection of the NVM region";

pub(super) fn recover(image: &Path, region: &Path, more: &[&str]) -> (i32, Value, String) {
    let words = ["recover", "--json", "--disk"].map(OsString::from).into_iter();
    let words = words.chain([image.into(), "--nvm".into(), region.into()]).chain(more.iter().map(OsString::from));
    let output = amberlog_with(words);
    let json = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("no JSON: {}", text(&output.stderr)));
    (output.status.code().unwrap(), json, text(&output.stderr))
}

pub(super) fn inspect(region: &Path) -> Value {
    let output = amberlog_with(["inspect".as_ref(), "--json".as_ref(), "--nvm".as_ref(), region.as_os_str()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it prints JSON")
}

fn nvm(report: &Report, name: &str) -> u64 {
    report.disk(0)["nvm"][name].as_u64().unwrap_or_else(|| panic!("there is no {name}: {}", report.disk(0)["nvm"]))
}

/// QEMU is killed: everything is home, and the counters say how.
#[test]
fn what_was_acknowledged_survives_a_killed_qemu() {
    let mut random = Random::of(seed(), 0x6e76);
    let bench = Bench::new();
    let (image, region) = (bench.path("image"), bench.area().join("region"));
    let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
    let load = Workload::new(random.below(1 << 32));
    let options = ",nvm-size=8,nvm-latency=300,nvm-bandwidth=1000,nvm-checkpoint=2,nvm-append-home=0";
    let mut spec = bench.spec("nvm", load.script(), on_nvm(&image, &region, options));
    spec.environment.push(("AMBERLOG_LOG".into(), "info,placement=debug".into()));
    let mut guest = Guest::start(spec).unwrap();
    for stream in STREAMS {
        guest.wait_acknowledged(stream, 20, LIMIT).unwrap();
    }
    // However fast the guest is: a checkpoint has ended, and what it took out of the region is collected.
    wait_for_log(&guest, COLLECTED, 1);
    assert_eq!(journal_superblock(&image).errno, -5, "storage says that the journal is elsewhere");
    std::thread::sleep(Duration::from_millis(random.below(3000)));
    let reported = kill(&mut guest);
    assert_consistent(&file_system);
    let evidence = load.check(&file_system, &reported).unwrap();
    assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
    let report = bench.report();
    assert_eq!((report.status(0), report.disk(0)["placement"].as_str()), ("recovered", Some("nvm")));
    assert_eq!(report.disk(0)["nvm"]["durability"], "emulated");
    for name in [
        "bytes_to_nvm",
        "delta_bytes",
        "blocks_first",
        "blocks_second",
        "blocks_updated",
        "appends_written_home",
        "writes_absorbed",
        "checkpoints",
        "garbage_collections",
    ] {
        assert!(nvm(&report, name) > 0, "{name}: {}", report.disk(0)["nvm"]);
    }
    assert!(nvm(&report, "bytes_to_nvm") < nvm(&report, "bytes_committed"), "differences are smaller than blocks");
    // The mark: at most with each transaction, each slice of a checkpoint and each second.
    let marks = report.counter(0, "journal_bytes_to_storage");
    let marks_max = (nvm(&report, "transactions") + 128) * 1024;
    assert!((1..=marks_max).contains(&marks), "{marks}: {}", report.disk(0)["nvm"]);
    assert_eq!(journal_superblock(&image).errno, 0);
    assert_eq!(inspect(&region)["owner"], Value::Null, "the region is free");
}

/// amberlog stands still while image and region are copied, as a power failure would leave them; then it is killed, and
/// the next run finishes what is in the real ones.
#[test]
fn what_was_acknowledged_survives_a_loss_of_power() {
    let mut random = Random::of(seed(), 0x706f);
    let bench = Bench::new();
    let (image, region) = (bench.path("image"), bench.area().join("region"));
    let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
    let load = Workload::new(random.below(1 << 32)).without_postmark();
    let mut guest = Guest::start(bench.spec("power", load.script(), on_nvm(&image, &region, ",nvm-size=8"))).unwrap();
    for stream in STREAMS {
        guest.wait_acknowledged(stream, 10, LIMIT).unwrap();
    }
    let mut losses = Vec::new();
    for number in 0..rounds(3) {
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        guest.signal(Signal::STOP).unwrap();
        // What is acknowledged from here on was written before.
        let (copy, of_region) = (bench.path(&format!("copy{number}")), bench.area().join(format!("copy{number}")));
        copy_image(&image, &copy).unwrap();
        std::fs::copy(&region, &of_region).unwrap();
        let reported = guest.reported();
        guest.signal(Signal::CONT).unwrap();
        losses.push((copy, of_region, reported));
    }
    // Nobody else gets at the region while it is in use.
    let second = amberlog_with([
        "run".into(),
        "--disk".into(),
        format!("{},placement=nvm={}", bench.path("copy0").display(), region.display()),
        "--".into(),
        "true".to_owned(),
    ]);
    assert_eq!(second.status.code(), Some(3), "{}", text(&second.stderr));
    assert!(text(&second.stderr).contains("in use"), "{}", text(&second.stderr));
    guest.signal(Signal::KILL).unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    drop(guest);

    for (copy, of_region, reported) in &losses {
        let shown = inspect(of_region);
        assert!(shown["versions"]["latest"].as_u64() > Some(0), "{shown}");
        let before = std::fs::read(copy).unwrap();
        let (code, dry, stderr) = recover(copy, of_region, &["--dry-run"]);
        assert_eq!((code, dry["status"].as_str()), (0, Some("recovered")), "{stderr}");
        assert!(std::fs::read(copy).unwrap() == before, "a dry run changes nothing");
        let (code, json, stderr) = recover(copy, of_region, &[]);
        assert_eq!((code, json["status"].as_str()), (0, Some("recovered")), "{stderr}");
        assert_eq!(json["blocks_written"], shown["versions"]["latest"]);
        let recovered = FileSystem::whole(copy.clone());
        assert_consistent(&recovered);
        let evidence = load.check(&recovered, reported).unwrap();
        assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
        let (code, json, _) = recover(copy, of_region, &[]);
        assert_eq!((code, json["status"].as_str()), (0, Some("none")), "nothing is left");
    }

    // The region is of another moment than this image, which was recovered since: refused, and nothing is changed.
    let stale = &losses[0].0;
    let before = std::fs::read(stale).unwrap();
    let (code, _, stderr) = recover(stale, &region, &[]);
    assert_eq!(code, 3, "{stderr}");
    assert!(stderr.contains("another epoch"), "{stderr}");
    assert!(std::fs::read(stale).unwrap() == before);
    // So is another file system's image, and a region that was damaged.
    let other = bench.path("other");
    ExtRecipe::ext4(128, 8).make(&other).unwrap();
    let (code, _, stderr) = recover(&other, &region, &[]);
    assert!(code == 3 && stderr.contains("another file system"), "{stderr}");
    let damaged = bench.area().join("damaged");
    let mut bytes = std::fs::read(&region).unwrap();
    bytes[0x42] ^= 4;
    std::fs::write(&damaged, bytes).unwrap();
    let (code, _, stderr) = recover(&image, &damaged, &[]);
    assert!(code == 3 && stderr.contains("damaged"), "{stderr}");
    let cut = bench.area().join("cut");
    std::fs::write(&cut, &std::fs::read(&region).unwrap()[..4 << 20]).unwrap();
    let (code, _, stderr) = recover(&image, &cut, &[]);
    assert!(code == 3 && stderr.contains("give it its size back"), "{stderr}");
    // Nor does a run take them, before it has started anything.
    for (disk, of, words) in [
        (&other, &region, "another file system"),
        (stale, &region, "another epoch"),
        (&image, &damaged, "damaged"),
        (&image, &cut, "give it its size back"),
    ] {
        let before = [disk, of].map(|path| std::fs::read(path).unwrap());
        let words_of_run = [&on_nvm(disk, of, "")[..], &["--".into(), "true".into()][..]].concat();
        let refused = amberlog_with([OsString::from("run")].into_iter().chain(words_of_run));
        assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
        assert!(text(&refused.stderr).contains(words), "{}", text(&refused.stderr));
        assert!([disk, of].map(|path| std::fs::read(path).unwrap()) == before, "nothing is changed");
    }

    // The next run brings home what the killed one left, before it serves anything.
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {NOTHING_TO_REPLAY}
         dmesg | grep -i 'ext4.*error' && fail 'the kernel found an error mark'
         umount /mnt || fail umount"
    );
    let words = bench.words(on_nvm(&image, &region, ",nvm-size=8"));
    let mut spec = guest_kit::GuestSpec::new("next", script).wrapper(words);
    spec.kernel_arguments = "no_timer_check".to_owned();
    Guest::run(spec, LIMIT).unwrap();
    assert_clean(&file_system);
    let evidence = load.check(&file_system, &reported).unwrap();
    assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
    assert_eq!(inspect(&region)["owner"], Value::Null);
}

/// A guest that resets while blocks are on NVM only, some of them on their way home: all that was committed is at home
/// before the next kernel reads its first block; and amberlog and QEMU die together in the end.
#[test]
fn a_reset_guest_finds_everything_at_home() {
    let bench = Bench::new();
    let (image, region) = (bench.path("image"), bench.area().join("region"));
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {NOTHING_TO_REPLAY}
         dmesg | grep -i 'ext4.*error' && fail 'the kernel found an error mark'
         boot=$(ls -d /mnt/boot-* 2>/dev/null | wc -l)
         : >/mnt/boot-$boot
         sync
         {}
         {}
         sleep 2
         case $boot in
         0) mark reset me;;
         1) echo b >/proc/sysrq-trigger;;
         *) mark end me;;
         esac
         sleep 1000",
        record_writer("/mnt/fixed-$boot", "fixed-$boot", &appended(1), "--count 20"),
        record_writer("/mnt/endless-$boot", "endless-$boot", &overwritten(2), "--forever &"),
    );
    let mut spec = bench.spec("nvm reset", script, on_nvm(&image, &region, ",nvm-size=8,nvm-checkpoint=1"));
    spec.reboots = true;
    let mut guest = Guest::start(spec).unwrap();
    let alive = |guest: &mut Guest, mark: &str| {
        let mark = mark.to_owned();
        let seen = guest.await_report(&format!("neither '{mark}' nor an end came"), LIMIT, |reported| {
            let failed = reported.exit_code.map(Err);
            failed.or_else(|| reported.marks.contains(&mark).then_some(Ok(())))
        });
        if seen.unwrap().is_err() {
            panic!("{}", guest.failure("its script ended"));
        }
    };
    alive(&mut guest, "reset me");
    guest.qmp().unwrap().system_reset().unwrap();
    alive(&mut guest, "end me");
    guest.signal(Signal::KILL).unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    drop(guest);
    assert_eq!(reported.boots, 3);
    // The kernel closes what was in a dead process's io_uring after the process has ended.
    let given_up = std::time::Instant::now() + Duration::from_secs(60);
    let (code, json, stderr) = loop {
        let outcome = recover(&image, &region, &[]);
        if !outcome.2.contains("in use") || std::time::Instant::now() > given_up {
            break outcome;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert_eq!((code, json["status"].as_str()), (0, Some("recovered")), "{stderr}");
    assert_consistent(&file_system);
    for boot in 0..3 {
        let stream = format!("fixed-{boot}");
        assert_eq!(assert_records(&file_system, &format!("/{stream}"), &stream, &appended(1), &reported), 20);
        let stream = format!("endless-{boot}");
        assert_records(&file_system, &format!("/{stream}"), &stream, &overwritten(2), &reported);
    }
}

/// Two disks in two regions of one file, unmounted: everything is home and clean; and a region too small is refused.
#[test]
fn disks_share_a_file_and_a_small_region_is_refused() {
    let bench = Bench::new();
    let (first, second, region) = (bench.path("first"), bench.path("second"), bench.area().join("region"));
    let file_systems = [&first, &second].map(|image| ExtRecipe::ext4(64, 8).make(image).unwrap());
    let small = amberlog_with([
        "run".into(),
        "--disk".into(),
        format!("{},placement=nvm={},nvm-size=1", first.display(), bench.area().join("small").display()),
        "--".into(),
        "true".to_owned(),
    ]);
    assert_eq!(small.status.code(), Some(3));
    assert!(text(&small.stderr).contains("too small"), "{}", text(&small.stderr));
    let script = format!(
        "mkdir -p /tmp/second
         mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         mount -t ext4 -o data=ordered,discard /dev/vdb /tmp/second || fail mount
         {}
         {}
         rm -r /tmp/second/b; sync
         umount /mnt /tmp/second || fail umount",
        record_writer("/mnt/a", "a", &overwritten(1), "--count 100"),
        record_writer("/tmp/second/b", "b", &overwritten(2), "--count 100"),
    );
    let words = [
        &on_nvm(&first, &region, ",nvm-size=16,nvm-region=0/2")[..],
        &on_nvm(&second, &region, ",nvm-size=16,nvm-region=1/2")[..],
    ]
    .concat();
    let mut spec = guest_kit::GuestSpec::new("shared", script).wrapper(bench.words(words));
    spec.kernel_arguments = "no_timer_check".to_owned();
    let reported = Guest::run(spec, LIMIT).unwrap();
    for file_system in &file_systems {
        assert_clean(file_system);
        assert_eq!(journal_superblock(&file_system.image).errno, 0);
    }
    assert_eq!(assert_records(&file_systems[0], "/a", "a", &overwritten(1), &reported), 100);
    let report = bench.report();
    for disk in 0..2 {
        assert!(report.disk(disk)["nvm"]["transactions"].as_u64() > Some(20), "{}", report.disk(disk));
    }
}

/// Two file systems on a disk with two regions: everybody dies, and each is brought home from its own region.
#[test]
fn two_file_systems_of_a_disk_have_a_region_each() {
    let bench = Bench::new();
    let (image, region) = (bench.path("image"), bench.area().join("region"));
    let offsets = partitioned(&image, PartitionTable::Gpt, &[64, 64]).unwrap();
    let file_systems: Vec<FileSystem> =
        offsets.iter().map(|offset| ExtRecipe::ext4(64, 8).make_at(&image, *offset).unwrap()).collect();
    let script = format!(
        "mkdir -p /tmp/second
         mount -t ext4 -o data=journal /dev/vda1 /mnt || fail mount
         mount -t ext4 -o data=ordered /dev/vda2 /tmp/second || fail mount
         {} &
         {}",
        record_writer("/mnt/a", "a", &overwritten(1), "--forever"),
        record_writer("/tmp/second/b", "b", &overwritten(2), "--forever"),
    );
    let mut guest =
        Guest::start(bench.spec("both", script, on_nvm(&image, &region, ",nvm-size=16,nvm-region=0+1/2"))).unwrap();
    for stream in ["a", "b"] {
        guest.wait_acknowledged(stream, 20, LIMIT).unwrap();
    }
    assert_eq!(guest.kill_all().unwrap().code(), None);
    let reported = guest.final_report();
    drop(guest);
    // The directory in tmpfs has nothing of them, which is no reason to call them finished.
    let area = bench.recover_area();
    let named: Vec<_> = area["elsewhere"].as_array().into_iter().flatten().collect();
    assert_eq!(named.len(), 2, "{area}");
    for (named, offset) in named.iter().zip(&offsets) {
        assert_eq!(named["image"].as_str(), image.to_str());
        let sentence = named["sentence"].as_str().unwrap();
        assert!(sentence.contains(&format!("at byte {offset} is in a region of NVM")), "{sentence}");
    }
    for part in ["0/2", "1/2"] {
        let (code, json, stderr) = recover(&image, &region, &["--nvm-region", part]);
        assert_eq!((code, json["status"].as_str()), (0, Some("recovered")), "{part}: {stderr}");
    }
    for (file_system, (stream, layout)) in file_systems.iter().zip([("a", overwritten(1)), ("b", overwritten(2))]) {
        assert_consistent(file_system);
        assert_records(file_system, &format!("/{stream}"), stream, &layout, &reported);
    }
}

/// An image and a region that are of two moments: one of them was copied while the guest ran, and is used with the other as it was
/// left at the end. Each is refused, nothing is changed, and the two that belong together are still recovered.
#[test]
fn an_image_and_a_region_of_two_moments_are_refused() {
    let bench = Bench::new();
    let (image, region) = (bench.path("image"), bench.area().join("region"));
    let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
    let load = Workload::new(91).without_postmark();
    let options = ",nvm-size=8,nvm-checkpoint=2";
    let mut guest = Guest::start(bench.spec("moments", load.script(), on_nvm(&image, &region, options))).unwrap();
    for stream in STREAMS {
        guest.wait_acknowledged(stream, 10, LIMIT).unwrap();
    }
    guest.signal(Signal::STOP).unwrap();
    let (older, older_region) = (bench.path("older"), bench.area().join("older"));
    copy_image(&image, &older).unwrap();
    std::fs::copy(&region, &older_region).unwrap();
    guest.signal(Signal::CONT).unwrap();
    // Until something has left the region twice: then neither is the other's any more.
    let mark = |path: &Path| journal_superblock_bytes(path);
    let deadline = std::time::Instant::now() + LIMIT;
    let mut last = mark(&older);
    for _ in 0..2 {
        while mark(&image) == last {
            assert!(std::time::Instant::now() < deadline, "nothing leaves the region");
            std::thread::sleep(Duration::from_millis(50));
        }
        last = mark(&image);
    }
    assert_eq!(guest.kill_all().unwrap().code(), None);
    let reported = guest.final_report();
    drop(guest);
    for (disk, of, words) in
        [(&older, &region, "this image is an older copy"), (&image, &older_region, "the region is an older copy")]
    {
        let before = [disk, of].map(|path| std::fs::read(path).unwrap());
        for more in [&["--dry-run"][..], &[]] {
            let (code, _, stderr) = recover(disk, of, more);
            assert!(code == 3 && stderr.contains(words) && stderr.contains("nothing was changed"), "{code}: {stderr}");
        }
        let words_of_run = [&on_nvm(disk, of, "")[..], &["--".into(), "true".into()][..]].concat();
        let refused = amberlog_with([OsString::from("run")].into_iter().chain(words_of_run));
        assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
        assert!(text(&refused.stderr).contains(words), "{}", text(&refused.stderr));
        assert!([disk, of].map(|path| std::fs::read(path).unwrap()) == before, "nothing is changed");
    }
    // Nor does a disk begin anew whose region is gone, is empty, or is another one.
    let before = std::fs::read(&image).unwrap();
    for (name, bytes) in [("gone", None), ("empty", Some(vec![0; 8 << 20])), ("short", Some(before[..4096].to_vec()))] {
        let other = bench.area().join(name);
        if let Some(bytes) = &bytes {
            std::fs::write(&other, bytes).unwrap();
        }
        let words_of_run = [&on_nvm(&image, &other, ",nvm-size=8")[..], &["--".into(), "true".into()][..]].concat();
        let refused = amberlog_with([OsString::from("run")].into_iter().chain(words_of_run));
        assert_eq!(refused.status.code(), Some(3), "{name}: {}", text(&refused.stderr));
        assert!(std::fs::read(&image).unwrap() == before, "{name}: the image was changed");
    }
    let (code, _, stderr) = recover(&image, &region, &[]);
    assert_eq!(code, 0, "{stderr}");
    assert_consistent(&file_system);
    let evidence = load.check(&file_system, &reported).unwrap();
    assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
}
