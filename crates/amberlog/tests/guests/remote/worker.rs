//! `kill -9` of the worker of a guest whose journal is on a server, again and again under load: the guest sees a pause, and nothing
//! else.

use super::{JournalServer, SignalNumber, TO_SERVER, recovered, remote_disk, wait_for_log};
use crate::support::*;
use crate::worker::storm;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, judge};
use guest_tools::random::Random;
use std::ffi::OsString;

const GOES_ON: &str = "goes on, by way of storage";

/// On the server, on the way there, and without the server; then all die.
#[test]
fn a_guest_does_not_notice_that_its_worker_dies() {
    let mut random = Random::of(seed(), 0x7265);
    let bench = Bench::new();
    let store = bench.path("store");
    let server = JournalServer::start(&store, "127.0.0.1:0", &[]);
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
    let (appends, overwrites) = (appended(random.below(1 << 20)), overwritten(random.below(1 << 20)));
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        mkdir /mnt/a /mnt/b
        {} &
        {}",
        record_writer("/mnt/a", "a", &appends, "--forever"),
        record_writer("/mnt/b", "b", &overwrites, "--forever"),
    );
    // More often than it would be forgiven: three times in ten seconds.
    let often: Vec<OsString> = ["--deaths-max", "1000"].map(Into::into).to_vec();
    let words = [often, remote_disk(&image, &server.address)].concat();
    let mut guest = Guest::start(bench.spec("remote-worker", script, words)).unwrap();
    let streams = ["a", "b"];
    streams.iter().for_each(|stream| guest.wait_acknowledged(stream, 10, LIMIT).unwrap());
    let mut pauses = Vec::new();
    for round in 0..rounds(3) {
        // Every worker brings it there once.
        wait_for_log(&guest, TO_SERVER, round as usize + 1);
        pauses.extend(storm(&mut guest, &streams, 1, &mut random));
    }
    let address = server.kill();
    pauses.extend(storm(&mut guest, &streams, rounds(2), &mut random));
    let returns = guest.stderr().matches(TO_SERVER).count();
    let server = JournalServer::start(&store, &address, &[]);
    wait_for_log(&guest, TO_SERVER, returns + 1);
    pauses.extend(storm(&mut guest, &streams, rounds(2), &mut random));
    let kills = pauses.len();
    eprintln!("until five more were acknowledged of each, after a kill: {pauses:?}");
    assert_eq!(guest.stderr().matches(GOES_ON).count(), kills, "{}", guest.stderr());
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    // In the midst of whatever the last one is at.
    assert_eq!(guest.kill_all().unwrap().signal_number(), Some(9));
    let reported = guest.final_report();
    drop(guest);
    let done = recovered(&image, &server.address, &[]);
    assert_eq!(done["status"], "recovered", "{done}");
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &appends, &reported);
    assert_records(&file_system, "/b", "b", &overwrites, &reported);
}

/// The guest unmounts and mounts while its worker dies, and reads everything back at the end.
#[test]
fn a_guest_mounts_and_unmounts_while_its_workers_die() {
    let mut random = Random::of(seed(), 0x7266);
    let bench = Bench::new();
    let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]);
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 4).make(&image).unwrap();
    let layout = appended(7);
    let script = format!(
        "round=0
        while :; do
            round=$((round + 1))
            mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
            mkdir -p /mnt/$round
            {}
            umount /mnt || fail umount
            mark round $round
        done",
        record_writer("/mnt/$round", "a$round", &layout, "--count 4"),
    );
    let often: Vec<OsString> = ["--deaths-max", "1000"].map(Into::into).to_vec();
    let words = [often, remote_disk(&image, &server.address)].concat();
    let mut guest = Guest::start(bench.spec("remote-mounts", script, words)).unwrap();
    let mut last = None;
    for round in 0..rounds(8) {
        let mark = format!("round {}", round + 1);
        guest
            .await_report("it does not get on", LIMIT, |reported| {
                let failed = reported.exit_code.map(Err);
                failed.or_else(|| reported.marks.contains(&mark).then_some(Ok(())))
            })
            .unwrap()
            .unwrap_or_else(|code| panic!("the guest failed ({code}): {}\n{}", guest.console(), guest.stderr()));
        std::thread::sleep(std::time::Duration::from_millis(random.below(150)));
        let worker = (0..400).find_map(|_| {
            let found = guest_kit::worker_of(guest.process_id()).filter(|pid| Some(*pid) != last);
            if found.is_none() {
                std::thread::sleep(std::time::Duration::from_millis(25));
            }
            found
        });
        last = Some(worker.unwrap_or_else(|| panic!("there is no worker\n{}", guest.stderr())));
        last.into_iter().for_each(crate::worker::kill_nine);
    }
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    assert_eq!(guest.kill_all().unwrap().signal_number(), Some(9));
    let reported = guest.final_report();
    drop(guest);
    recovered(&image, &server.address, &[]);
    if judge::has_empty_journal(&file_system).unwrap() {
        // Mounted, and died before its first commit: nothing is there to be replayed, and the file system asks for it.
        judge::replay_with_e2fsck(&file_system).unwrap();
    }
    assert_consistent(&file_system);
    for round in 1..=rounds(8) {
        assert_records(&file_system, &format!("/{round}"), &format!("a{round}"), &layout, &reported);
    }
}
