//! One thread for all disks of a VM (`threads=one`): whoever dies, what was acknowledged on any of them is there, and disks come and go.

use crate::plugged::{add, unplug};
use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::{kill_nine, storm};
use guest_kit::image::{ExtRecipe, Journal, journal_device};
use guest_kit::{Guest, Kernel, worker_of};
use guest_tools::random::Random;

/// The names of those threads of a process that serve disks.
fn disk_threads(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.map(|name| name.trim_end().to_owned()).filter(|name| name.starts_with("disk")).collect()
}

#[test]
fn disks_of_one_thread_keep_what_was_acknowledged_whoever_is_killed() {
    let bench = Bench::new();
    let mut random = Random::of(seed(), 0x746f);
    let (first, second, journal) = (bench.path("first"), bench.path("second"), bench.path("journal"));
    let internal = ExtRecipe::ext4(96, 8).make(&first).unwrap();
    journal_device(&journal, 16, 4096).unwrap();
    let recipe = ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(96, 0) };
    let external = recipe.make(&second).unwrap();
    let (appends, overwrites) = (appended(random.below(1 << 20)), overwritten(random.below(1 << 20)));
    let script = format!(
        "mkdir -p /mnt/a /mnt/b
        mount -t ext4 -o data=journal /dev/vda /mnt/a || fail mount a
        mount -t ext4 -o data=journal,journal_path=/dev/vdc /dev/vdb /mnt/b || fail mount b
        {} &
        {}",
        record_writer("/mnt/a/a", "a", &appends, "--forever"),
        record_writer("/mnt/b/b", "b", &overwrites, "--forever"),
    );
    let of_run: Vec<std::ffi::OsString> = ["--threads", "one", "--deaths-max", "1000"].map(Into::into).to_vec();
    let journal: Vec<std::ffi::OsString> = vec!["--journal-disk".into(), journal.into()];
    let words = [of_run, protected_disk(&first).to_vec(), protected_disk(&second).to_vec(), journal].concat();
    let mut guest = Guest::start(bench.spec("together", script, words)).unwrap();
    for stream in ["a", "b"] {
        guest.wait_acknowledged(stream, 10, LIMIT).unwrap();
    }
    assert_eq!(disk_threads(worker_of(guest.process_id()).unwrap()), ["disks"]);
    let pauses = storm(&mut guest, &["a", "b"], rounds(5), &mut random);
    eprintln!("until five more were acknowledged of each, after a kill: {pauses:?}");
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    let reported = kill(&mut guest);
    for (file_system, stream, layout) in [(&internal, "a", &appends), (&external, "b", &overwrites)] {
        assert_consistent(file_system);
        assert!(assert_records(file_system, &format!("/{stream}"), stream, layout, &reported) > 10);
    }
    let report = bench.report();
    for disk in [0, 1] {
        assert_eq!(report.status(disk), "recovered");
        assert_eq!(report.disk(disk)["placement"], "retain");
    }
    bench.assert_area_is_empty();
}

#[test]
fn disks_come_to_one_thread_and_leave_it_under_their_guest() {
    let bench = Bench::new();
    let (first, second) = (bench.path("first"), bench.path("second"));
    let root = ExtRecipe::ext4(64, 8).make(&first).unwrap();
    let more = ExtRecipe::ext4(48, 8).make(&second).unwrap();
    let config = write_config(&bench, &[("db", first.display().to_string())]);
    let text_of = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text_of + "threads = \"one\"\n").unwrap();
    let daemon = Daemon::start(&bench, &config);
    let (layout, other) = (overwritten(41), overwritten(42));
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {} &
         mark mounted
         tries=0
         until [ -b /dev/vdb ]; do
             tries=$((tries + 1)); [ $tries -lt 1200 ] || fail 'the disk did not come'
             sleep 0.1
         done
         mkdir /tmp/more
         mount -t ext4 -o data=journal,errors=continue /dev/vdb /tmp/more || fail 'mount more'
         {}",
        record_writer("/mnt/root", "root", &layout, "--forever"),
        record_writer("/tmp/more/more", "more", &other, "--forever"),
    );
    let mut spec = daemon.spec_with("db", script, &[]);
    spec.kernel = Some(Kernel::stock().unwrap().clone());
    spec.machine = "pc".to_owned();
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("mounted", LIMIT).unwrap();
    let worker = || daemon.wait_state("db", "running")["worker_pid"].as_u64().unwrap() as u32;
    add(&daemon, &mut guest, &format!("{},name=more", second.display()));
    guest.wait_acknowledged("more", 20, LIMIT).unwrap();
    assert_eq!(disk_threads(worker()), ["disks"]);
    kill_nine(worker());
    for stream in ["root", "more"] {
        guest.wait_acknowledged(stream, guest.acknowledged(stream).count + 20, LIMIT).unwrap();
    }
    // Torn out of a file system that is mounted; the other one goes on.
    unplug(&mut guest, "more");
    let output = daemon.ask(&["disk", "remove", "db", "more"]);
    assert!(output.status.success(), "{}\n{}", text(&output.stderr), daemon.log());
    assert_consistent(&more);
    assert_records(&more, "/more", "more", &other, &guest.reported());
    guest.wait_acknowledged("root", guest.acknowledged("root").count + 20, LIMIT).unwrap();
    guest.kill_qemu().unwrap();
    daemon.wait_state("db", "waiting");
    assert_consistent(&root);
    assert_records(&root, "/root", "root", &layout, &guest.final_report());
}
