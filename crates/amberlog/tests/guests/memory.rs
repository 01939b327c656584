//! One budget of memory over all VMs of a daemon: who holds most has blocks written home, and what was acknowledged is there
//! whatever dies meanwhile.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::Guest;
use guest_kit::image::ExtRecipe;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

const BUDGET_MIB: u64 = 12;
const BUDGET: u64 = BUDGET_MIB << 20;

/// Waits until what `status` says is so.
#[track_caller]
fn wait_until(daemon: &Daemon, what: &str, mut is_so: impl FnMut(&Value) -> bool) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = daemon.json(&["status", "--json"]);
        if is_so(&status) {
            return status;
        }
        assert!(Instant::now() < deadline, "{what} did not come:\n{status:#}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A VM's entry.
fn of<'s>(status: &'s Value, vm: &str) -> &'s Value {
    status["vms"].as_array().unwrap().iter().find(|entry| entry["vm"] == vm).unwrap()
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Has the daemon read its configuration again, with this budget or none.
fn reload(daemon: &Daemon, config: &Path, plain: &str, budget_mib: Option<u64>) {
    let budget = budget_mib.map_or(String::new(), |mib| format!("[memory]\nbudget_mib = {mib}\n"));
    std::fs::write(config, plain.replacen("[[vm]]", &format!("{budget}[[vm]]"), 1)).unwrap();
    daemon.signal(guest_kit::Signal::HUP);
}

fn the_larger_shrinks_and_nothing_is_lost(options: &str, is_absorbing: bool) {
    let bench = Bench::new();
    let (large, small) = (bench.path("large.img"), bench.path("small.img"));
    let of_large = ExtRecipe::ext4(200, 64).make(&large).unwrap();
    let of_small = ExtRecipe::ext4(64, 16).make(&small).unwrap();
    let disk = |image: &Path| format!("{},{options}", image.display());
    let config = write_config(&bench, &[("large", disk(&large)), ("small", disk(&small))]);
    let plain = std::fs::read_to_string(&config).unwrap();
    let daemon = Daemon::start(&bench, &config);
    // The guests write nothing home by themselves, and what is written is committed each second: an fsync would write it home. The larger
    // one's log is not to be full before there is a budget, or it would make room itself: its records come after that.
    let mount = "echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         echo 90 >/proc/sys/vm/dirty_ratio; echo 80 >/proc/sys/vm/dirty_background_ratio
         mount -t ext4 -o data=journal,commit=1 /dev/vda /mnt || fail mount
         exec 5</dev/ttyS1";
    let script = format!(
        "{mount}
         for n in 1 2 3 4 5 6 7 8; do
             dd if=/dev/urandom of=/mnt/file-$n bs=1M count=3 2>/dev/null
         done
         mark full
         read -r line <&5
         {} &
         n=0
         while true; do
             n=$(((n + 1) % 8)); dd if=/dev/urandom of=/mnt/file-$n bs=1M count=2 conv=notrunc 2>/dev/null; sleep 0.2
         done",
        record_writer("/mnt/records", "large", &overwritten(1), "--forever")
    );
    let mut larger = Guest::start(daemon.spec("large", script)).unwrap();
    let script = format!(
        "{mount}
         dd if=/dev/urandom of=/mnt/file bs=64k count=16 2>/dev/null
         mark full
         {}",
        record_writer("/mnt/records", "small", &overwritten(2), "--forever")
    );
    let mut smaller = Guest::start(daemon.spec("small", script)).unwrap();
    larger.wait_mark("full", LIMIT).unwrap();
    smaller.wait_mark("full", LIMIT).unwrap();

    // Nobody counts what all hold, and each has a budget of its own in which this has room.
    let is_much = |status: &Value| bytes(&of(status, "large")["memory"]["held_bytes"]) > BUDGET + BUDGET / 4;
    let before = wait_until(&daemon, "more than the budget", is_much);
    assert_eq!(before["memory"]["budget_bytes"], Value::Null);
    crate::judges::assert_is_status(&before);

    reload(&daemon, &config, &plain, Some(BUDGET_MIB));
    let held = |status: &Value| {
        let of_one = |vm: &str| of(status, vm)["memory"]["held_bytes"].as_u64();
        Some(of_one("large")? + of_one("small")?)
    };
    let within = |status: &Value| held(status).is_some_and(|held| held <= BUDGET);
    let status = wait_until(&daemon, "room", |status| status["memory"]["budget_bytes"] == BUDGET && within(status));
    assert!(bytes(&of(&status, "large")["memory"]["shrinks"]) > 0, "{status:#}");
    crate::judges::assert_is_status(&status);
    let said = "the journals of all VMs hold";
    assert!(daemon.log().contains(said) && daemon.log().contains("blocks of vm large go home"), "{}", daemon.log());
    let shown = text(&daemon.ask(&["status"]).stdout);
    assert!(shown.contains("\nmemory: ") && shown.contains(" of 12.6 MB; no VM is to hold more than"), "{shown}");

    // Under load as well, and when another worker goes on, which has to hear of it.
    larger.tell("go").unwrap();
    let so_far = larger.acknowledged("large").last.unwrap_or(0);
    larger.wait_acknowledged("large", so_far + 30, LIMIT).unwrap();
    let status = wait_until(&daemon, "room under load", within);
    let written = bytes(&of(&status, "large")["disks"][0]["counters"]["written_home_by_host"]);
    assert!(written > 0, "{status:#}");
    let worker = bytes(&daemon.wait_state("large", "running")["worker_pid"]);
    kill_nine(worker as u32);
    wait_until(&daemon, "another worker with its room", |status| {
        let entry = of(status, "large");
        entry["worker_pid"].as_u64().is_some_and(|pid| pid != worker) && entry["memory"]["room_bytes"].is_u64()
    });
    let so_far = larger.acknowledged("large").last.unwrap_or(0);
    larger.wait_acknowledged("large", so_far + 30, LIMIT).unwrap();
    let status = wait_until(&daemon, "room under load, with another worker", within);
    let of_the_small = of(&status, "small");
    assert_eq!(of_the_small["memory"]["shrinks"], 0, "it holds less than its share: {status:#}");
    // What is absorbed the host writes home, whatever room there is.
    let written = bytes(&of_the_small["disks"][0]["counters"]["written_home_by_host"]);
    assert!(written == 0 || is_absorbing, "{status:#}");

    // Without a budget nobody is bounded, and with it again somebody is.
    reload(&daemon, &config, &plain, None);
    wait_until(&daemon, "no bound", |status| {
        status["memory"]["level_bytes"].is_null()
            && ["large", "small"].iter().all(|vm| of(status, vm)["memory"]["room_bytes"].is_null())
    });
    reload(&daemon, &config, &plain, Some(BUDGET_MIB));
    wait_until(&daemon, "a bound", |status| of(status, "large")["memory"]["room_bytes"].is_u64());

    daemon.signal(guest_kit::Signal::KILL);
    drop(daemon);
    larger.kill_all().unwrap();
    smaller.kill_all().unwrap();
    let daemon = Daemon::start(&bench, &config);
    daemon.wait_state("large", "waiting");
    daemon.wait_state("small", "waiting");
    for (file_system, guest, stream, seed) in [(&of_large, &larger, "large", 1), (&of_small, &smaller, "small", 2)] {
        assert_consistent(file_system);
        assert_records(file_system, "/records", stream, &overwritten(seed), &guest.final_report());
    }
}

#[test]
fn the_vm_that_holds_most_shrinks_first_and_loses_nothing() {
    the_larger_shrinks_and_nothing_is_lost("placement=copy", false);
}

/// What is to go home has to be durable first.
#[test]
fn with_durability_by_age_what_was_copied_is_made_durable_and_goes_home() {
    the_larger_shrinks_and_nothing_is_lost("placement=copy,durable-within=3600", true);
}
