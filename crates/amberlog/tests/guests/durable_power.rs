//! The host's power goes under a guest whose journal is made durable by age, with all that storage had in its cache: what its operator has
//! flushed is there, and what is older than the age. (`durable.rs` cuts the log of what was sent to storage; here storage itself forgets.)

use crate::awake;
use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::evidence::RecordLayout;
use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{Cache, Drive, Guest, GuestSpec, Reported};
use rustix::process::Signal;
use std::path::Path;
use std::time::Duration;
use test_storage::TestStorage;

/// A write-out of what was due takes no longer, with as much added for a busy machine.
const WRITE_OUT: Duration = Duration::from_secs(4);

/// What has to be there.
enum Floor {
    /// What was acknowledged when its operator asked for a flush, with an age that does not come.
    Flushed,
    /// What was acknowledged an age, and a write-out, before.
    Aged,
}

/// Nothing of the host goes on: not the guest, not the VMM, not amberlog. Storage has what was flushed.
fn lose_power(daemon: Daemon, guest: &mut Guest, storage: TestStorage) {
    let worker = daemon.wait_state("one", "running")["worker_pid"].as_u64().expect("a worker");
    // Otherwise it sees to what has died.
    daemon.signal(Signal::STOP);
    kill_nine(worker as u32);
    guest.kill_qemu().unwrap();
    daemon.kill_with_depot();
    storage.lose_power().unwrap();
}

fn is_there_after_a_power_cut(mode: &str, within_s: u64, floor: &Floor, round: u64) {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let storage = match TestStorage::new(&image) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    storage.remember_unflushed();
    let disk = format!("{},placement=retain,durable-within={within_s}", storage.image().display());
    let daemon = Daemon::start(&bench, &write_config(&bench, &[("one", disk)]));
    let (appends, overwrites) = (appended(round), overwritten(round));
    let script = format!(
        "mount -t ext4 -o data={mode} /dev/vda /mnt || fail mount\nmkdir /mnt/a /mnt/b\n{} &\n{}",
        record_writer("/mnt/a", "a", &appends, "--forever"),
        record_writer("/mnt/b", "b", &overwrites, "--forever"),
    );
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    let mut reported = Reported::default();
    let note = |guest: &Guest, reported: &mut Reported| {
        for stream in ["a", "b"] {
            reported.acknowledged.insert(stream.to_owned(), guest.acknowledged(stream));
        }
    };
    for stream in ["a", "b"] {
        guest.wait_acknowledged(stream, 60, LIMIT).unwrap();
    }
    note(&guest, &mut reported);
    match floor {
        Floor::Flushed => {
            let output = daemon.ask(&["flush", "one"]);
            assert_eq!(output.status.code(), Some(0), "{}\n{}", text(&output.stderr), daemon.log());
            let more = reported.acknowledged["a"].last.unwrap_or(0) + 20;
            guest.wait_acknowledged("a", more, LIMIT).unwrap();
        }
        Floor::Aged => awake::sleep(Duration::from_secs(within_s) + WRITE_OUT),
    }
    lose_power(daemon, &mut guest, storage);
    judge(&image, &file_system, &reported, [&appends, &overwrites]);
}

/// The journal in its own place is all there is to replay: by e2fsck, and by the kernel of a guest that knows of no amberlog.
fn judge(image: &Path, file_system: &FileSystem, reported: &Reported, [appends, overwrites]: [&RecordLayout; 2]) {
    assert_eq!(journal_superblock(image).errno, 0, "storage is good by itself");
    let copy = image.with_extension("copy");
    std::fs::copy(image, &copy).unwrap();
    replay_left(image);
    let script = "mount -t ext4 /dev/vda /mnt || fail mount\numount /mnt\nif dmesg | grep -i 'ext4-fs error'; then fail error; fi";
    let mut spec = GuestSpec::new("without amberlog", script).drives(vec![Drive::new(&copy, Cache::Writeback)]);
    spec.kernel_arguments = "no_timer_check".to_owned();
    Guest::run(spec, LIMIT).unwrap();
    for file_system in [file_system, &FileSystem::whole(&copy)] {
        assert_consistent(file_system);
        assert_records(file_system, "/a", "a", appends, reported);
        assert_records(file_system, "/b", "b", overwrites, reported);
    }
}

#[test]
fn what_its_operator_flushes_outlives_a_power_cut() {
    let _alone = alone_behind_fuse();
    for (round, mode) in ["journal", "ordered"].into_iter().enumerate() {
        is_there_after_a_power_cut(mode, 3600, &Floor::Flushed, 80 + round as u64);
    }
}

#[test]
fn what_is_older_than_the_age_outlives_a_power_cut() {
    let _alone = alone_behind_fuse();
    for (round, mode) in ["ordered", "journal"].into_iter().enumerate() {
        is_there_after_a_power_cut(mode, 2, &Floor::Aged, 90 + round as u64);
    }
}
