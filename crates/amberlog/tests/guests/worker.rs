//! A data path that dies: `kill -9` of the worker that serves a guest's disks, again and again under load. The guest sees a pause,
//! and nothing else.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, Signal, worker_of};
use guest_tools::random::Random;
use rustix::process::{Pid, kill_process};
use std::time::{Duration, Instant};
use test_storage::TestStorage;

pub(super) fn kill_nine(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
}

/// Kills the worker of a guest so many times, with pauses in which it gets on with its work. Gives how long each pause was that
/// followed.
pub(super) fn storm(guest: &mut Guest, streams: &[&str], rounds: u64, random: &mut Random) -> Vec<Duration> {
    let mut pauses = Vec::new();
    let mut last = None;
    for round in 0..rounds {
        std::thread::sleep(Duration::from_millis(random.below(1200)));
        let worker = (0..200).find_map(|_| {
            let found = worker_of(guest.process_id()).filter(|pid| Some(*pid) != last);
            if found.is_none() {
                std::thread::sleep(Duration::from_millis(50));
            }
            found
        });
        let worker = worker.unwrap_or_else(|| panic!("round {round}: there is no worker\n{}", guest.stderr()));
        last = Some(worker);
        kill_nine(worker);
        let killed = Instant::now();
        for stream in streams {
            let before = guest.acknowledged(stream).last.unwrap_or(0);
            if let Err(error) = guest.wait_acknowledged(stream, before + 5, LIMIT) {
                panic!("round {round}: {error}\n--- amberlog's log\n{}", guest.stderr());
            }
        }
        pauses.push(killed.elapsed());
    }
    pauses
}

fn survives(name: &str, options: &str, mode: &str) {
    survives_on(&Bench::new(), name, options, mode);
}

fn survives_on(bench: &Bench, name: &str, options: &str, mode: &str) {
    let mut random = Random::of(seed(), 0x7072);
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
    let (appends, overwrites) = (appended(random.below(1 << 20)), overwritten(random.below(1 << 20)));
    let script = format!(
        "mount -t ext4 -o data={mode} /dev/vda /mnt || fail mount
        mkdir /mnt/a /mnt/b
        {} &
        {}",
        record_writer("/mnt/a", "a", &appends, "--forever"),
        record_writer("/mnt/b", "b", &overwrites, "--forever"),
    );
    // More often than it would be forgiven: three times in ten seconds.
    let often: Vec<std::ffi::OsString> = ["--deaths-max", "1000"].map(Into::into).to_vec();
    let words = [often, disk_with(&image, options).to_vec()].concat();
    let mut guest = Guest::start(bench.spec(name, script, words)).unwrap();
    for stream in ["a", "b"] {
        guest.wait_acknowledged(stream, 10, LIMIT).unwrap();
    }
    let pauses = storm(&mut guest, &["a", "b"], rounds(7), &mut random);
    eprintln!("{name}: until five more were acknowledged of each, after a kill: {pauses:?}");
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    let reported = kill(&mut guest);
    bench.assert_area_is_empty();
    if options.contains("storage") {
        replay_left(&image);
    }
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &appends, &reported);
    assert_records(&file_system, "/b", "b", &overwrites, &reported);
}

#[test]
fn a_guest_whose_journal_is_held_does_not_notice_that_its_worker_dies() {
    survives("worker-retain", "", "journal");
}

/// What is started may be a script that gives its VMM more than was said, here what takes pages away. Each worker sees it, not the first alone.
#[test]
fn nor_does_one_protect_pages_that_a_script_has_given_its_vmm_more_to_do_with() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let start = bench.path("start.sh");
    std::fs::write(&start, "#!/bin/sh\nshift\nexec \"$@\" -device virtio-balloon-pci\n").unwrap();
    std::fs::set_permissions(&start, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let layout = overwritten(77);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let often: Vec<std::ffi::OsString> = ["--deaths-max", "1000"].map(Into::into).to_vec();
    let program = ["--".into(), start.into_os_string()].to_vec();
    let words = [often, protected_disk(&image).to_vec(), program].concat();
    let mut guest = Guest::start(bench.spec("worker-script", script, words)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    storm(&mut guest, &["a"], 3, &mut Random::of(seed(), 0x7363));
    let last = guest.acknowledged("a").last.unwrap_or(0);
    guest.wait_acknowledged("a", last + 30, LIMIT).unwrap();
    let reported = kill(&mut guest);
    assert!(guest.stderr().contains("a balloon takes pages away"), "{}", guest.stderr());
    let counters = &bench.report().0["disks"][0]["counters"];
    assert!(counters["pages_copied"].as_u64().unwrap() > 0, "{counters}");
    assert_eq!(counters["pages_protected"], 0, "the last worker did not look: {counters}");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

#[test]
fn nor_one_whose_journal_is_durable_by_age() {
    survives("worker-durable", ",placement=retain,durable-within=1", "journal");
    survives("worker-durable-5", ",placement=copy,durable-within=5", "ordered");
}

#[test]
fn nor_one_that_is_told_of_a_commit_when_it_is_durable() {
    survives("worker-durable-0", ",placement=retain,durable-within=0", "journal");
    survives("worker-durable-0-ordered", ",placement=copy,durable-within=0", "ordered");
}

/// The host loses power, with all that storage had in its cache, some time after the last of several workers has died. What
/// is on storage is all there is: the journal in its own place, replayed by e2fsck.
#[test]
fn with_no_age_nothing_acknowledged_is_lost_to_a_power_cut_after_a_worker_has_died() {
    let _alone = alone_behind_fuse();
    for (round, (mode, ext)) in (0..rounds(4)).zip(
        ["journal", "ordered"]
            .into_iter()
            .flat_map(|mode| [(mode, ExtRecipe::ext4(96, 4)), (mode, ExtRecipe::ext4(96, 16))])
            .cycle(),
    ) {
        let mut random = Random::of(seed(), 0x7073 + round);
        let bench = Bench::new();
        let image = bench.path("image");
        let file_system = ext.make(&image).unwrap();
        let storage = match TestStorage::new(&image) {
            Ok(storage) => storage,
            Err(error) => return eprintln!("left out: {error}"),
        };
        storage.remember_unflushed();
        let (appends, overwrites) = (appended(round), overwritten(round));
        let script = format!(
            "mount -t ext4 -o data={mode} /dev/vda /mnt || fail mount\nmkdir /mnt/a /mnt/b\n{} &\n{}",
            record_writer("/mnt/a", "a", &appends, "--forever"),
            record_writer("/mnt/b", "b", &overwrites, "--forever"),
        );
        let often: Vec<std::ffi::OsString> = ["--deaths-max", "1000"].map(Into::into).to_vec();
        let words = [often, disk_with(&storage.image(), ",placement=retain,durable-within=0").to_vec()].concat();
        let mut guest = Guest::start(bench.spec("worker-power", script, words)).unwrap();
        for stream in ["a", "b"] {
            guest.wait_acknowledged(stream, 20, LIMIT).unwrap();
        }
        storm(&mut guest, &["a", "b"], 3 + random.below(5), &mut random);
        if let Some(worker) = worker_of(guest.process_id()) {
            kill_nine(worker);
        }
        // Also in the midst of what the next one does first.
        std::thread::sleep(Duration::from_micros(random.below(300_000)));
        assert!(!guest.kill_all().unwrap().success());
        let console = guest.console();
        assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
        let reported = guest.final_report();
        storage.lose_power().unwrap();
        drop(storage);
        assert_eq!(journal_superblock(&image).errno, 0, "storage is good by itself");
        replay_left(&image);
        assert_consistent(&file_system);
        assert_records(&file_system, "/a", "a", &appends, &reported);
        assert_records(&file_system, "/b", "b", &overwrites, &reported);
    }
}

/// Storage fails just when a worker has died: what the next one cannot make durable is not acknowledged.
#[test]
fn with_no_age_nothing_is_acknowledged_that_the_next_worker_cannot_make_durable() {
    let _alone = alone_behind_fuse();
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let storage = match TestStorage::new(&image) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    storage.remember_unflushed();
    let layout = overwritten(5);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let often: Vec<std::ffi::OsString> = ["--deaths-max", "1000"].map(Into::into).to_vec();
    let words = [often, disk_with(&storage.image(), ",placement=retain,durable-within=0").to_vec()].concat();
    let mut guest = Guest::start(bench.spec("worker-eio", script, words)).unwrap();
    guest.wait_acknowledged("a", 20, LIMIT).unwrap();
    let worker = worker_of(guest.process_id()).expect("there is one");
    kill_nine(worker);
    storage.set_fail_writes(true);
    let deadline = Instant::now() + LIMIT;
    while !guest.console().contains("Aborting journal") {
        assert!(Instant::now() < deadline, "the guest waits\n{}\n{}", guest.console(), guest.stderr());
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = guest.kill_all();
    let reported = guest.final_report();
    storage.set_fail_writes(false);
    storage.lose_power().unwrap();
    drop(storage);
    replay_left(&image);
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

#[test]
fn nor_one_whose_journal_is_copied() {
    survives("worker-copy", ",placement=copy", "ordered");
}

/// The region, a file in memory, is what outlives the worker beside the VM's directory. It is small: blocks leave it, and it is collected.
#[test]
fn nor_one_whose_journal_is_on_nvm() {
    for (mode, more) in [("journal", "nvm-size=8,nvm-checkpoint=2,nvm-append-home=0"), ("ordered", "nvm-size=16")] {
        let bench = Bench::new();
        let regions = tempfile::tempdir_in("/dev/shm").unwrap();
        let region = regions.path().join("region");
        let options = format!(",placement=nvm={},{more}", region.display());
        survives_on(&bench, &format!("worker-nvm-{mode}"), &options, mode);
    }
}

#[test]
fn nor_one_whose_journal_is_on_storage() {
    survives("worker-storage", ",placement=storage", "ordered");
}

/// Two VMs, one with a guest that commits for ever; a daemon that is about to end it, or to forget it, and its worker dies first.
fn dies_first(how: &str, end: impl FnOnce(&Daemon)) {
    let bench = Bench::new();
    let [one, two] = ["one.img", "two.img"].map(|name| bench.path(name));
    let file_system = ExtRecipe::ext4(96, 8).make(&one).unwrap();
    ExtRecipe::ext4(32, 4).make(&two).unwrap();
    let path = |image: &std::path::Path| image.to_str().unwrap().to_owned();
    let config = write_config(&bench, &[("one", path(&one)), ("two", path(&two))]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(5);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let kill_worker = |daemon: &Daemon| {
        kill_nine(daemon.wait_state("one", "running")["worker_pid"].as_u64().unwrap() as u32);
    };
    if how == "forgotten" {
        write_config(&bench, &[("two", path(&two))]);
        daemon.signal(Signal::HUP);
        std::thread::sleep(Duration::from_millis(500));
    }
    kill_worker(&daemon);
    end(&daemon);
    if how == "forgotten" {
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
            panic!("{error}\n--- the daemon's log\n{}", daemon.log());
        }
        // Twice: the one that followed is no other.
        kill_worker(&daemon);
        let last = guest.acknowledged("a").last.unwrap_or(0);
        guest.wait_acknowledged("a", last + 20, LIMIT).unwrap();
        guest.kill_qemu().unwrap();
        guest.wait_end(LIMIT).unwrap();
    } else {
        guest.wait_end(LIMIT).unwrap();
    }
    let reported = guest.final_report();
    let deadline = Instant::now() + LIMIT;
    // What one VM had in tmpfs goes when all of it is home.
    while std::fs::read_dir(bench.area()).unwrap().flatten().count() > usize::from(how == "forgotten") {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

#[test]
fn a_guest_goes_on_whose_vm_is_not_configured_any_more() {
    dies_first("forgotten", |_| {});
}

#[test]
fn a_guest_is_ended_and_brought_home_though_its_worker_died_as_the_daemon_was_told_to_end() {
    dies_first("stopped", |daemon| daemon.signal(Signal::TERM));
}

/// What its owner wants of a VM whose worker dies: `kill-vmm` ends it and brings all home, `hold` waits for a reload, and the guest goes on.
#[test]
fn an_owner_says_what_becomes_of_a_vm_whose_worker_dies() {
    for policy in ["kill-vmm", "hold"] {
        let bench = Bench::new();
        let image = bench.path("one.img");
        let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
        let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
        let text = std::fs::read_to_string(&config).unwrap() + &format!("on-crash = {policy:?}\n");
        std::fs::write(&config, text).unwrap();
        let mut daemon = Daemon::start(&bench, &config);
        let layout = overwritten(6);
        let writer = record_writer("/mnt/a", "a", &layout, "--forever");
        let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
        let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
        guest.wait_acknowledged("a", 10, LIMIT).unwrap();
        kill_nine(daemon.wait_state("one", "running")["worker_pid"].as_u64().unwrap() as u32);
        if policy == "hold" {
            daemon.wait_state("one", "held");
            std::thread::sleep(Duration::from_secs(1));
            let entry = daemon.wait_state("one", "held");
            assert!(entry["worker_pid"].is_null() && entry["restarts"] == 1, "{entry}");
            // What hangs has a number, and a person is told it.
            let vmm = guest.qemu_pid().unwrap();
            assert_eq!(entry["vmm_pid"], vmm, "{entry}");
            let told = format!("or end its VMM (process {vmm})");
            assert!(entry["state_text"].as_str().unwrap().contains(&told), "{entry}");
            assert!(daemon.log().contains(&told), "{}", daemon.log());
            let ill = daemon.ask(&["health"]);
            assert_eq!(ill.status.code(), Some(1), "{ill:?}");
            assert!(String::from_utf8_lossy(&ill.stdout).contains("one"), "{ill:?}");
            // Nobody has looked because the daemon died and another one was started.
            daemon.signal(Signal::KILL);
            daemon.wait();
            daemon = Daemon::start(&bench, &config);
            daemon.wait_state("one", "held");
            std::thread::sleep(Duration::from_secs(1));
            let entry = daemon.wait_state("one", "held");
            assert!(entry["worker_pid"].is_null() && entry["vmm_pid"] == vmm, "{entry}");
            assert!(entry["state_text"].as_str().unwrap().contains("its worker was ended by signal 9"), "{entry}");
            let last = guest.acknowledged("a").last.unwrap_or(0);
            daemon.signal(Signal::HUP);
            if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
                panic!("{error}\n--- the daemon's log\n{}", daemon.log());
            }
            let well = daemon.ask(&["health"]);
            assert_eq!(well.status.code(), Some(0), "{well:?}");
            daemon.signal(Signal::KILL);
            daemon.wait();
            daemon = Daemon::start(&bench, &config);
            daemon.wait_state("one", "running");
            guest.kill_qemu().unwrap();
        }
        guest.wait_end(LIMIT).unwrap();
        let reported = guest.final_report();
        daemon.wait_state("one", "waiting");
        assert_consistent(&file_system);
        assert_records(&file_system, "/a", "a", &layout, &reported);
    }
}

/// Somebody removes a VM's directory in tmpfs under its guest, as systemd-logind may: it is said, what the guest committed goes home all the
/// same while amberlog lives, and no worker is ended that none could follow.
#[test]
fn a_directory_that_is_removed_under_a_guest_is_said() {
    let bench = Bench::new();
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(6);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let entry = daemon.wait_state("one", "running");
    assert_eq!(entry["directory_is_in_place"], true, "{entry}");
    assert_eq!(daemon.ask(&["health"]).status.code(), Some(0));
    std::fs::remove_dir_all(entry["directory"].as_str().unwrap()).unwrap();
    assert_eq!(daemon.entry("one")["directory_is_in_place"], false);
    let ill = daemon.ask(&["health"]);
    assert_eq!(ill.status.code(), Some(1), "{ill:?}");
    let told = "was removed while it is served";
    assert!(text(&ill.stdout).contains(told) && text(&ill.stdout).contains("amberlog flush one"), "{ill:?}");
    let refused = daemon.ask(&["upgrade", "one"]);
    assert!(!refused.status.success() && text(&refused.stderr).contains(told), "{refused:?}");
    let deadline = std::time::Instant::now() + LIMIT;
    while !daemon.log().contains(told) {
        assert!(std::time::Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    let last = guest.acknowledged("a").last.unwrap_or(0);
    guest.wait_acknowledged("a", last + 20, LIMIT).unwrap();
    let flushed = daemon.ask(&["flush", "one"]);
    assert!(flushed.status.success(), "{flushed:?}");
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    let entry = daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
    // While nobody has it, another one is made.
    std::fs::remove_dir_all(entry["directory"].as_str().unwrap()).unwrap();
    let deadline = std::time::Instant::now() + LIMIT;
    while !(daemon.entry("one")["directory_is_in_place"] == true && daemon.entry("one")["state"] == "waiting") {
        assert!(std::time::Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// However it comes that no worker goes on with a guest: what it is owed goes home when its VMM has ended, though its VM is not
/// configured any more, or the daemon ends.
#[test]
fn what_is_owed_goes_home_though_nobody_wants_the_vm_any_more() {
    for (policy, wanted) in [("kill-vmm", "gone"), ("hold", "gone"), ("hold", "stop")] {
        let bench = Bench::new();
        let image = bench.path("one.img");
        let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
        let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
        let text = std::fs::read_to_string(&config).unwrap() + &format!("on-crash = {policy:?}\n");
        std::fs::write(&config, text).unwrap();
        let daemon = Daemon::start(&bench, &config);
        let layout = overwritten(6);
        let writer = record_writer("/mnt/a", "a", &layout, "--forever");
        let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
        let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
        guest.wait_acknowledged("a", 10, LIMIT).unwrap();
        let worker = daemon.wait_state("one", "running")["worker_pid"].as_u64().unwrap() as u32;
        if wanted == "gone" {
            write_config(&bench, &[]);
            daemon.signal(Signal::HUP);
            let deadline = Instant::now() + LIMIT;
            while daemon.wait_state("one", "running")["pending"] != "removed" {
                assert!(Instant::now() < deadline, "{}", daemon.log());
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        kill_nine(worker);
        if policy == "hold" {
            daemon.wait_state("one", "held");
        }
        match wanted {
            "stop" => daemon.signal(Signal::TERM),
            _ if policy == "hold" => guest.kill_qemu().unwrap(),
            _ => {}
        }
        if let Err(error) = guest.wait_end(LIMIT) {
            panic!("{policy}, {wanted}: {error}\n{}", daemon.log());
        }
        let reported = guest.final_report();
        let deadline = Instant::now() + LIMIT;
        // A daemon that ends tries once more to go on with the guest: such a worker brings all home, too.
        let is_said = |daemon: &Daemon| wanted == "stop" || daemon.log().contains("what its guest was owed is home");
        while std::fs::read_dir(bench.area()).unwrap().flatten().count() > 0 || !is_said(&daemon) {
            assert!(Instant::now() < deadline, "{policy}, {wanted}: {}", daemon.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_consistent(&file_system);
        assert_records(&file_system, "/a", "a", &layout, &reported);
        if wanted == "stop" {
            assert_eq!(daemon.wait().code(), Some(0), "all is home");
        }
    }
}

/// A worker that is there and does nothing: another one goes on after a while; and a daemon that ends is not kept by such a one.
#[test]
fn a_worker_that_hangs_is_followed_by_another_one() {
    let stop = |pid: u32| kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::STOP).unwrap();
    let bench = Bench::new();
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(6);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let worker = |entry: &serde_json::Value| entry["worker_pid"].as_u64().unwrap() as u32;
    let hung = worker(&daemon.wait_state("one", "running"));
    stop(hung);
    let last = guest.acknowledged("a").last.unwrap_or(0);
    // What would be killed has not said whether another one could go on.
    let refused = daemon.ask(&["upgrade", "one"]);
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("does not say how it is"), "{}", text(&refused.stderr));
    if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
        panic!("{error}\n--- the daemon's log\n{}", daemon.log());
    }
    assert!(daemon.log().contains("has not answered for"), "{}", daemon.log());
    let next = worker(&daemon.wait_state("one", "running"));
    assert_ne!(next, hung);
    stop(next);
    daemon.signal(Signal::TERM);
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    assert_eq!(daemon.wait().code(), Some(0));
    bench.assert_area_is_empty();
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

/// A daemon that ends, and may not end a guest's VMM, which is another user's: it is left for the next daemon, with its memory as it was.
#[test]
fn a_guest_whose_vmm_may_not_be_ended_goes_on_under_the_next_daemon() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: another user is played by root only");
        return;
    }
    let bench = Bench::new();
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
    let user = 54_322;
    for path in [bench.path(""), bench.area().to_owned(), image.clone(), config.clone()] {
        std::os::unix::fs::chown(&path, Some(user), Some(user)).unwrap();
    }
    let start = || {
        let mut command = std::process::Command::new("setpriv");
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups", "--"]).arg(amberlog());
        Daemon::start_by(command, &bench, &config)
    };
    let daemon = start();
    let layout = overwritten(6);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec_with("one", script, &["--reconnect"])).unwrap();
    guest.wait_acknowledged("a", 50, LIMIT).unwrap();
    // Root's QEMU has the guest's memory, and another worker of this daemon's user can have it, too. Each that is killed may leave pages
    // protected that are in no table: the guest must not be left with them. (A third death within ten seconds would have it held.)
    for _ in 0..2 {
        let status = daemon.json(&["status", "--json", "one"]);
        let worker = i32::try_from(status["worker_pid"].as_i64().unwrap()).unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
            panic!("{error}\n--- the daemon's log\n{}", daemon.log());
        }
    }
    daemon.signal(Signal::TERM);
    daemon.wait();
    let last = guest.acknowledged("a").last.unwrap_or(0);
    let daemon = start();
    if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
        panic!("{error}\n--- the daemon's log\n{}", daemon.log());
    }
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    // Its journal is on storage since it was left, for its guest's kernel.
    replay_left(&image);
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

/// The same under `amberlog run`: however a VMM ends, what it is owed goes home, and the report is written.
#[test]
fn a_run_without_a_worker_brings_home_what_its_guest_is_owed() {
    for policy in ["kill-vmm", "hold"] {
        let bench = Bench::new();
        let image = bench.path("image");
        let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
        let layout = overwritten(7);
        let writer = record_writer("/mnt/a", "a", &layout, "--forever");
        let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
        let policies: Vec<std::ffi::OsString> = ["--on-crash", policy].map(Into::into).to_vec();
        let words = [policies, disk_with(&image, ",placement=retain").to_vec()].concat();
        let mut guest = Guest::start(bench.spec(&format!("last-worker-{policy}"), script, words)).unwrap();
        guest.wait_acknowledged("a", 10, LIMIT).unwrap();
        kill_nine(worker_of(guest.process_id()).expect("a worker"));
        if policy == "hold" {
            std::thread::sleep(Duration::from_secs(1));
            guest.kill_qemu().unwrap();
        }
        guest.wait_end(LIMIT).unwrap();
        let reported = guest.final_report();
        bench.assert_area_is_empty();
        assert_eq!(bench.report().status(0), "recovered", "{}", guest.stderr());
        assert_consistent(&file_system);
        assert_records(&file_system, "/a", "a", &layout, &reported);
    }
}

/// The daemon: its status says who serves, and goes on saying it; one VM's worker is not another's.
#[test]
fn a_daemon_goes_on_with_the_guests_of_a_worker_that_died() {
    let bench = Bench::new();
    let [one, two] = ["one.img", "two.img"].map(|name| bench.path(name));
    let file_system = ExtRecipe::ext4(96, 8).make(&one).unwrap();
    ExtRecipe::ext4(32, 4).make(&two).unwrap();
    let path = |image: &std::path::Path| image.to_str().unwrap().to_owned();
    let config = write_config(&bench, &[("one", path(&one)), ("two", path(&two))]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(5);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        mkdir /mnt/a
        {}",
        record_writer("/mnt/a", "a", &layout, "--forever")
    );
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let pid = |entry: &serde_json::Value, name: &str| entry[name].as_u64().unwrap_or_else(|| panic!("{entry}")) as u32;
    let other = pid(&daemon.wait_state("two", "waiting"), "worker_pid");
    let before = daemon.wait_state("one", "running");
    assert_eq!((pid(&before, "vmm_pid"), &before["restarts"]), (guest.qemu_pid().unwrap(), &0.into()));
    kill_nine(pid(&before, "worker_pid"));
    let last = guest.acknowledged("a").last.unwrap_or(0);
    if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
        panic!("{error}\n--- the daemon's log\n{}", daemon.log());
    }
    let after = daemon.wait_state("one", "running");
    assert_ne!(after["worker_pid"], before["worker_pid"]);
    assert_eq!((pid(&after, "vmm_pid"), &after["restarts"]), (guest.qemu_pid().unwrap(), &1.into()));
    assert!(after["disks"][0]["counters"]["blocks_retained_now"].as_u64() > Some(0), "{after}");
    assert_eq!(pid(&daemon.wait_state("two", "waiting"), "worker_pid"), other);
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

/// A worker dies at any moment of its VMM's start: when the userfaultfd was handed over, say, and the VMM has not connected yet. The next one has it.
#[test]
fn a_guest_is_protected_whose_worker_dies_while_its_vmm_starts() {
    let bench = Bench::new();
    let mut random = Random::of(seed(), 0x7374);
    let names: Vec<String> = (0..rounds(3)).map(|number| format!("vm{number}")).collect();
    let images: Vec<_> = names.iter().map(|name| bench.path(&format!("{name}.img"))).collect();
    let file_systems: Vec<_> = images.iter().map(|image| ExtRecipe::ext4(32, 4).make(image).unwrap()).collect();
    let vms: Vec<_> = names
        .iter()
        .zip(&images)
        .map(|(name, image)| (name.as_str(), format!("{}{PROTECTED}", image.display())))
        .collect();
    let config = write_config(&bench, &vms);
    let daemon = Daemon::start(&bench, &config);
    for (round, (name, file_system)) in names.iter().zip(&file_systems).enumerate() {
        let layout = overwritten(6);
        let writer = record_writer("/mnt/a", "a", &layout, "--forever");
        let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
        let spec = daemon.spec(name, script);
        let worker = daemon.entry(name)["worker_pid"].as_u64().unwrap();
        let mut guest = Guest::launch(spec).unwrap();
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(random.below(120_000)));
        } else {
            // The few milliseconds of the handshake, which are a small part of the start.
            let connected = format!("vm {name}: disk disk0: process ");
            while !daemon.log().contains(&connected) {
                std::thread::sleep(Duration::from_micros(200));
            }
            std::thread::sleep(Duration::from_micros(random.below(12_000)));
        }
        kill_nine(worker as u32);
        if let Err(error) = guest.wait_acknowledged("a", 20, LIMIT) {
            panic!("{name}: {error}\n--- the daemon's log\n{}", daemon.log());
        }
        let entry = daemon.wait_state(name, "running");
        assert_eq!(entry["restarts"], 1, "{entry}");
        assert!(entry["disks"][0]["counters"]["pages_protected"].as_u64() > Some(0), "{entry}\n{}", daemon.log());
        guest.kill_qemu().unwrap();
        guest.wait_end(LIMIT).unwrap();
        let reported = guest.final_report();
        daemon.wait_state(name, "waiting");
        assert_consistent(file_system);
        assert_records(file_system, "/a", "a", &layout, &reported);
    }
}

/// The next VMM is started while what the last one is owed goes home, as somebody does who looks after it. It waits, and its guest's pages are
/// protected as those of the last one were.
fn is_protected_though_the_last_one_is_recovered(is_worker_killed: bool) {
    let _alone = alone_behind_fuse();
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(32, 4).make(&image).unwrap();
    let storage = match TestStorage::new(&image) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    let config = write_config(&bench, &[("one", format!("{}{PROTECTED}", storage.image().display()))]);
    let daemon = Daemon::start(&bench, &config);
    let layout = overwritten(6);
    let spec = |directory: &str| {
        let writer = record_writer(&format!("/mnt/{directory}"), directory, &layout, "--forever");
        let script =
            format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/{directory}\n{writer}");
        daemon.spec_with("one", script, &["--reconnect"])
    };
    let [specification, next] = ["a", "b"].map(spec);
    let mut first = Guest::start(specification).unwrap();
    first.wait_acknowledged("a", 20, LIMIT).unwrap();
    // Until the test has seen enough of the recovery: no shorter than it takes a busy machine, and storage that takes so long is not given up.
    storage.set_flush_us(15_000_000);
    first.kill_qemu().unwrap();
    first.wait_end(LIMIT).unwrap();
    daemon.wait_state("one", "recovering");
    let mut guest = Guest::launch(next).unwrap();
    if is_worker_killed {
        std::thread::sleep(Duration::from_millis(300));
        kill_nine(daemon.entry("one")["worker_pid"].as_u64().unwrap() as u32);
        // It is dead when the kernel has the answer for it.
        storage.set_flush_us(800_000);
        std::thread::sleep(Duration::from_millis(700));
    } else {
        std::thread::sleep(Duration::from_secs(1));
        let entry = daemon.entry("one");
        assert_eq!(entry["state"], "recovering", "it was no time for another one to come\n{}", daemon.log());
    }
    storage.set_flush_us(0);
    if let Err(error) = guest.wait_acknowledged("b", 20, LIMIT) {
        panic!("{error}\n--- the daemon's log\n{}", daemon.log());
    }
    let entry = daemon.wait_state("one", "running");
    assert_eq!(entry["vmm_pid"], guest.qemu_pid().unwrap());
    assert!(entry["disks"][0]["counters"]["pages_protected"].as_u64() > Some(0), "{entry}\n{}", daemon.log());
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    daemon.wait_state("one", "waiting");
    drop(storage);
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &first.final_report());
    assert_records(&file_system, "/b", "b", &layout, &guest.final_report());
}

#[test]
fn a_guest_is_protected_whose_vmm_starts_while_the_last_one_is_recovered() {
    is_protected_though_the_last_one_is_recovered(false);
}

#[test]
fn and_one_where_the_worker_dies_that_recovers() {
    is_protected_though_the_last_one_is_recovered(true);
}

/// Two builds take turns: each is put in the place of the other one, which is then upgraded to it, while its guest commits.
fn upgraded_again_and_again(options: &str, mode: &str) {
    use std::os::unix::fs::MetadataExt;
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let program = bench.path("amberlog");
    let builds = ["one", "two"].map(|name| bench.path(name));
    std::fs::copy(amberlog(), &builds[0]).unwrap();
    match std::env::var_os("AMBERLOG_OTHER_BUILD") {
        Some(other) => drop(std::fs::copy(other, &builds[1]).unwrap()),
        None => {
            let stripped = std::process::Command::new("strip").arg("-o").arg(&builds[1]).arg(&builds[0]).status();
            assert!(stripped.unwrap().success());
        }
    }
    let install = |build: &std::path::Path| {
        let new = bench.path("new");
        std::fs::hard_link(build, &new).unwrap();
        std::fs::rename(&new, &program).unwrap();
    };
    install(&builds[0]);
    let config = write_config(&bench, &[("one", format!("{}{options}", image.display()))]);
    let mut command = std::process::Command::new(&program);
    command.env("AMBERLOG_SHIM", amberlog().with_file_name("libamberlog_vmm_shim.so"));
    let daemon = Daemon::start_by(command, &bench, &config);
    let layout = overwritten(9);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data={mode} /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let upgrades = rounds(6);
    for round in 0..upgrades {
        if round == upgrades / 2 {
            let age = daemon.ask(&["placement", "one", "disk0", "retain", "--durable-within", "0"]);
            assert!(age.status.success(), "{}", text(&age.stderr));
        }
        let build = &builds[((round + 1) % 2) as usize];
        install(build);
        let upgraded = daemon.ask(&["upgrade"]);
        assert_eq!(upgraded.status.code(), Some(0), "round {round}: {}\n{}", text(&upgraded.stderr), daemon.log());
        let worker = daemon.wait_state("one", "running")["worker_pid"].as_u64().unwrap();
        let runs = std::fs::metadata(format!("/proc/{worker}/exe")).unwrap();
        assert_eq!(runs.ino(), std::fs::metadata(build).unwrap().ino(), "round {round}: it is not what was installed");
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 5, LIMIT) {
            panic!("round {round}: {error}\n{}", daemon.log());
        }
    }
    let entry = daemon.wait_state("one", "running");
    assert_eq!(entry["restarts"], 0, "a worker that is replaced has not died: {entry}\n{}", daemon.log());
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    println!("{upgrades} upgrades back and forth; {:?} acknowledged", guest.acknowledged("a").last);
    guest.kill_qemu().unwrap();
    daemon.wait_state("one", "waiting");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &guest.final_report());
}

/// A loop device, detached when dropped.
struct Loop(String);

impl Loop {
    fn on(image: &std::path::Path) -> Option<Self> {
        let output = std::process::Command::new("losetup").args(["--find", "--show"]).arg(image).output().ok()?;
        output.status.success().then(|| Loop(text(&output.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["-d", &self.0]).status();
    }
}

/// Storage holds back one write for longer than a worker waits at the end of its VM, and others pass it. Nothing is brought home beside
/// that: what is held back lands before what is newer, however late.
fn is_owed_until_storage_answers(name: &str, options: &str, is_beside_it: bool) {
    let _alone = alone_behind_fuse();
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let storage = match TestStorage::new(&image) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    // The disk's thread waits itself for the file; behind a block device other writes go on.
    let device = if is_beside_it { Loop::on(&storage.image()) } else { None };
    let path = device.as_ref().map_or_else(|| storage.image(), |device| device.0.clone().into());
    let layout = overwritten(5);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(bench.spec(name, script, disk_with(&path, options).to_vec())).unwrap();
    guest.wait_acknowledged("a", 40, LIMIT).unwrap();
    let deadline = Instant::now() + LIMIT;
    storage.hold_writes(1);
    while storage.held_writes() == 0 {
        assert!(Instant::now() < deadline, "nothing is written home\n{}", guest.stderr());
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_secs(1));
    guest.kill_qemu().unwrap();
    let written = storage.writes();
    while !guest.stderr().contains("storage does not answer") {
        assert!(Instant::now() < deadline, "it does not end\n{}", guest.stderr());
        assert!(!guest.stderr().contains("recovered"), "beside what is under way\n{}", guest.stderr());
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(storage.writes(), written, "somebody writes beside what is under way\n{}", guest.stderr());
    storage.release_writes();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_eq!(status.code(), Some(KILLED), "{}", guest.stderr());
    let reported = guest.final_report();
    bench.assert_area_is_empty();
    drop((device, storage));
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}

#[test]
fn nothing_is_brought_home_beside_a_write_that_storage_holds() {
    is_owed_until_storage_answers("silent-retain", ",placement=retain", false);
}

#[test]
fn nor_out_of_a_region_that_others_pass() {
    let regions = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = regions.path().join("region");
    let options = format!(",placement=nvm={},nvm-size=8,nvm-checkpoint=2,nvm-append-home=0", region.display());
    is_owed_until_storage_answers("silent-nvm", &options, true);
}

#[test]
fn a_guest_goes_on_over_many_upgrades() {
    upgraded_again_and_again("", "journal");
}

/// What the region and the notes beside it say is enough for another build, too.
#[test]
fn a_guest_with_its_journal_on_nvm_goes_on_over_many_upgrades() {
    for (mode, more) in [("journal", "nvm-size=8,nvm-checkpoint=2,nvm-append-home=0"), ("ordered", "nvm-size=16")] {
        let regions = tempfile::tempdir_in("/dev/shm").unwrap();
        let region = regions.path().join("region");
        upgraded_again_and_again(&format!(",placement=nvm={},{more}", region.display()), mode);
    }
}
