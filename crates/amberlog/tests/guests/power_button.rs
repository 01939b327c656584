//! Guests that are asked to shut down before their VMMs are ended.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::{AtEnd, Guest, GuestSpec};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// A guest that shuts down in good order when its power button is pressed, as one with systemd-logind does.
fn heeding(spec: &mut GuestSpec) {
    spec.modules.extend(["button", "evdev"].map(str::to_owned));
    spec.at_end = AtEnd::PowerOff;
    // What is pressed is on the machine's board.
    spec.machine = "pc".to_owned();
}

const HEED: &str = "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
    for event in /dev/input/event*; do
        [ -c $event ] || fail 'there is no button'
        (head -c 1 $event > /dev/null; touch /tmp/pressed) &
    done
    # A button that is pressed before somebody listens is not heard.
    sleep 2
    mark ready
    while [ ! -e /tmp/pressed ]; do sleep 0.1; done
    echo in good order > /mnt/ended
    umount /mnt || fail umount";

#[test]
fn a_guest_is_asked_to_shut_down_before_its_vmm_is_ended() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let words = [&["--shutdown-seconds".into(), "100".into()][..], &disk(&image)[..]].concat();
    let mut spec = bench.spec("asked", HEED, words);
    heeding(&mut spec);
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("ready", LIMIT).unwrap();
    guest.signal(Signal::TERM).unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_ends_with(&guest, status, 128 + 15);
    assert!(!guest.stderr().contains("has not shut down"), "{}", guest.stderr());
    // Nobody replays anything: it has unmounted.
    assert_clean(&file_system);
    assert_eq!(journal_superblock(&image).start, 0);
    bench.assert_area_is_empty();
}

#[test]
fn a_guest_that_does_not_listen_has_no_more_time_when_it_is_asked_again() {
    let bench = Bench::new();
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    let words = [&["--shutdown-seconds".into(), "3600".into()][..], &disk(&image)[..]].concat();
    let layout = appended(5);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\n{}",
        record_writer("/mnt/records", "records", &layout, "--forever")
    );
    let mut guest = Guest::start(bench.spec("deaf", script, words)).unwrap();
    guest.wait_acknowledged("records", 20, LIMIT).unwrap();
    guest.signal(Signal::TERM).unwrap();
    let deadline = Instant::now() + LIMIT;
    while !guest.stderr().contains("asked to shut down") {
        assert!(Instant::now() < deadline, "{}", guest.stderr());
        std::thread::sleep(Duration::from_millis(50));
    }
    // It has all the time that it needs, and goes on.
    guest.wait_acknowledged("records", guest.acknowledged("records").count + 20, LIMIT).unwrap();
    guest.signal(Signal::TERM).unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_ends_with(&guest, status, 128 + 15);
    assert!(guest.stderr().contains("the guest has not shut down; its VMM is ended"), "{}", guest.stderr());
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &layout, &guest.final_report());
}

#[test]
fn a_daemon_that_ends_asks_the_guests_whose_monitors_it_knows() {
    let bench = Bench::new();
    let images = ["a", "b"].map(|name| bench.path(name));
    let file_systems = images.each_ref().map(|image| ExtRecipe::ext4(64, 8).make(image).unwrap());
    let config =
        write_config(&bench, &[("a", images[0].display().to_string()), ("b", images[1].display().to_string())]);
    let monitor = bench.path("b.qmp");
    let text_of = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text_of}monitor = {monitor:?}\nshutdown_seconds = 100\n")).unwrap();
    let daemon = Daemon::start(&bench, &config);
    let mut spec = daemon.spec_with("b", HEED.to_owned(), &[]);
    heeding(&mut spec);
    spec.qemu_arguments.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", monitor.display()).into()]);
    let mut asked = Guest::start(spec).unwrap();
    let mut not_asked =
        Guest::start(daemon.spec_with("a", "mount /dev/vda /mnt || fail mount\nmark ready".to_owned(), &[])).unwrap();
    asked.wait_mark("ready", LIMIT).unwrap();
    not_asked.wait_mark("ready", LIMIT).unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    // It has unmounted.
    assert_clean(&file_systems[1]);
    assert_eq!(journal_superblock(&images[1]).start, 0);
    // The other one has lost its VMM, and nothing else.
    assert_consistent(&file_systems[0]);
    bench.assert_area_is_empty();
}
