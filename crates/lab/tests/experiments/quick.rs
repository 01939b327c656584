//! Quick runs with real guests: structure and counters, never times. Two guests share one modelled drive, and two one compiler; one that hangs is
//! killed and its console kept; a run that is told to end leaves nothing behind.

use lab::catalogue::{self, Experiment, Extent};
use lab::cell::Mode;
use lab::measured::{CellResult, Parameters};
use lab::results::{self, Results};
use lab::run::{RunOptions, run};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn options(directory: &Path) -> RunOptions {
    RunOptions {
        out: directory.join("out"),
        images: Some(directory.to_owned()),
        limit: None,
        extent: Extent { quick: true, iterations: Some(1), guests_max: 2, ..Extent::default() },
        parameters: Parameters { quick: true, scale: 0.02, time_scale: 0.1, ..Parameters::for_tests() },
        takes_any_source: false,
        command: "--quick".into(),
    }
}

fn experiment(id: &str, modes: &[Mode], guests: u32) -> Vec<Experiment> {
    let mut experiments = catalogue::select(&[id.to_owned()]).unwrap();
    experiments[0].modes = modes.to_vec();
    experiments[0].guests = vec![guests];
    experiments
}

/// Processes with these words in their command line.
fn processes_with(words: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let line =
        |path: &Path| String::from_utf8_lossy(&std::fs::read(path.join("cmdline")).unwrap_or_default()).into_owned();
    let lines =
        entries.filter(|entry| entry.file_name() != *std::process::id().to_string()).map(|entry| line(&entry.path()));
    lines.filter(|line| line.contains(words)).collect()
}

/// Whether a test is to go on here. Samples and crashes fall into a load only while it runs, and these are made for guests that are
/// emulated; where guests would run natively, the test, which is named as the test program does, is run by a process of its own that is
/// told to emulate them.
fn is_emulated(test: &str) -> bool {
    if std::env::var_os("ACCEL").is_some_and(|accelerator| !accelerator.is_empty()) {
        return true;
    }
    let own = std::env::current_exe().unwrap();
    let output = Command::new(own).args(["--exact", test, "--nocapture"]).env("ACCEL", "tcg").output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    eprintln!("{told}{}", String::from_utf8_lossy(&output.stderr));
    // A name that is no test's runs none, and that none fails says nothing.
    assert!(output.status.success() && told.contains("test result: ok. 1 passed"), "{test}, on emulated guests");
    false
}

#[test]
fn two_guests_share_a_drive_and_a_second_run_finds_everything_done() {
    if !is_emulated("quick::two_guests_share_a_drive_and_a_second_run_finds_everything_done") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path());
    let experiments = experiment("spe2012-fig06", &[Mode::Journal, Mode::Vma], 2);
    assert_eq!(run(&experiments, &options).unwrap(), 0, "no cell fails");
    let path = options.out.join("spe2012-fig06/results.json");
    let first: Results = results::read(&path).unwrap().unwrap();
    assert_eq!(first.rows.len(), 2);
    let of = |mode: Mode, field: &str| first.rows.iter().find(|row| row.group.mode == mode).unwrap().fields[field].mean;
    let written = 12.0 * f64::from(1 << 20);
    for mode in [Mode::Journal, Mode::Vma] {
        assert!(of(mode, "journal_bytes_received") > written, "{mode}: all data goes through the journal");
        assert!(of(mode, "home_bytes_to_storage") > written, "{mode}: and reaches its home");
    }
    assert!(
        of(Mode::Journal, "bytes_to_storage") > 1.8 * of(Mode::Vma, "bytes_to_storage"),
        "the journal is not written"
    );
    assert!(of(Mode::Vma, "pages_protected") > 1000.0);
    assert!(
        of(Mode::Journal, "flushes_to_storage") > 3.0 * of(Mode::Vma, "flushes_to_storage"),
        "a commit that is held needs no flush"
    );
    let verdicts = results::judge(&experiments[0], &first.rows, &first.parameters);
    let judged = verdicts.iter().flat_map(|verdict| &verdict.cells).map(|cell| cell.agreement);
    assert!(
        judged.clone().count() > 0 && judged.clone().all(|one| one == lab::verdict::Agreement::NotJudged),
        "once is not judged"
    );

    let raw = |name: &str| options.out.join("spe2012-fig06/raw").join(name);
    let name = |mode: Mode| format!("seq_write-{mode}-2-st336753lw-0-0.json");
    let mut served = 0.0;
    for mode in [Mode::Journal, Mode::Vma] {
        let cell: CellResult = results::read(&raw(&name(mode))).unwrap().unwrap();
        assert_eq!(cell.guests.len(), 2, "{mode}: both are measured");
        let homes = cell.guests.iter().map(|guest| guest["home_bytes_to_storage"]).sum::<f64>();
        let drive = cell.model["write_bytes"];
        assert!(
            drive > 0.9 * homes && drive > 1.9 * written,
            "{mode}: one drive sees what both write: {drive} of {homes}"
        );
        for phase in ["images", "boot", "prepare", "run", "end"] {
            assert!(cell.phases.contains_key(phase), "{mode}: {phase}");
        }
        for guest in &cell.guests {
            let (all, own) = (guest["vm_cpu_seconds"], guest["amberlog_cpu_seconds"]);
            assert!(all > own, "{mode}: the VMM took time as well: {own} of {all} s");
            served += own;
        }
    }
    assert!(served > 0.0, "what serves the disks is a process beside the one that was started, which only waits");
    let held: CellResult = results::read(&raw(&name(Mode::Vma))).unwrap().unwrap();
    let highest = held.curves["tuple_bytes"].iter().map(|(_, value)| *value).fold(0.0, f64::max);
    assert!(highest > 18.0 * 1000.0 && highest <= held.guests[0]["tuple_bytes_max"], "{highest}");

    // Raw results are there and are used again: a second run measures nothing.
    let kept = raw(&name(Mode::Vma));
    let before = std::fs::metadata(&kept).unwrap().modified().unwrap();
    assert_eq!(run(&experiments, &options).unwrap(), 0);
    assert_eq!(std::fs::metadata(&kept).unwrap().modified().unwrap(), before);
}

/// Their own disks aside, the guests of a compile have one in common, with the compiler.
#[test]
fn two_guests_compile_with_one_compiler() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path());
    let experiments = experiment("spe2012-fig11", &[Mode::Vma], 2);
    assert_eq!(run(&experiments, &options).unwrap(), 0, "no cell fails");
    let cell = options.out.join("spe2012-fig11/raw/kernel_compile-vma-2-st336753lw-0-0.json");
    let cell: CellResult = results::read(&cell).unwrap().unwrap();
    assert_eq!(cell.guests.len(), 2);
    for guest in &cell.guests {
        assert!(guest["object_bytes"] > 1000.0, "{guest:?}");
    }
}

/// A RAM disk in the guest's memory holds the journal, whatever kernel the guest has: the drive sees the data once. A referee found that this mode could
/// not be run where guests run natively on a kernel without modules.
#[test]
fn a_journal_in_the_guests_memory_needs_no_module() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path());
    let experiments = experiment("spe2012-fig16", &[Mode::Ramdisk, Mode::Journal], 1);
    assert_eq!(run(&experiments, &options).unwrap(), 0, "no cell fails");
    let results: Results = results::read(&options.out.join("spe2012-fig16/results.json")).unwrap().unwrap();
    let written =
        |mode: Mode| results.rows.iter().find(|row| row.group.mode == mode).unwrap().fields["bytes_to_storage"].mean;
    let data = 12.0 * f64::from(1 << 20);
    assert!(written(Mode::Ramdisk) > data && written(Mode::Ramdisk) < 1.5 * data, "{}", written(Mode::Ramdisk));
    assert!(written(Mode::Journal) > 1.8 * data, "{}", written(Mode::Journal));
}

/// rnd_write overwrites a part of a file that is there: 2.6 of 10 MiB at this scale. Under `journal` and `vma` alike, what the
/// file took is at home, and in no counter, when the clock starts.
#[test]
fn what_is_prepared_is_home_and_is_not_counted() {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path());
    let experiments = experiment("spe2012-fig07", &[Mode::Journal, Mode::Vma], 1);
    assert_eq!(run(&experiments, &options).unwrap(), 0, "no cell fails");
    let results: Results = results::read(&options.out.join("spe2012-fig07/results.json")).unwrap().unwrap();
    assert_eq!(results.rows.len(), 2);
    let mib = f64::from(1 << 20);
    for row in &results.rows {
        let of = |field: &str| row.fields[field].mean;
        let (home, received) = (of("home_bytes_to_storage"), of("journal_bytes_received"));
        assert!(home + of("recovery_bytes_written") > 2.0 * mib && home < 5.0 * mib, "{}: {home}", row.group.mode);
        assert!(received > 2.0 * mib && received < 5.0 * mib, "{}: {received}", row.group.mode);
    }
    // A result of a time when it was counted is not used again.
    let raw = options.out.join("spe2012-fig07/raw/rnd_write-vma-1-st336753lw-0-0.json");
    let mut cell: CellResult = results::read(&raw).unwrap().unwrap();
    cell.begins_clean = false;
    results::write(&raw, &cell).unwrap();
    assert_eq!(run(&experiments, &options).unwrap(), 0);
    let cell: CellResult = results::read(&raw).unwrap().unwrap();
    assert!(cell.begins_clean, "it was measured anew");
}

/// Postmark's files all have the same text, and with all of them logged the writes home of those that are deleted wait for room in the region: its
/// journal is what it seems all the same, and a cell in which it was not would fail.
#[test]
fn a_postmark_whose_appends_are_logged_is_trusted() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(directory.path());
    options.parameters.time_scale = 5.0;
    let experiments = experiment("njs2018-fig11", &[Mode::NvmLogEverything], 1);
    assert_eq!(run(&experiments, &options).unwrap(), 0, "no cell fails");
}

#[test]
fn a_guest_that_hangs_is_killed_and_its_console_kept() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(directory.path());
    // A drive on which a second lasts 500: a mount takes a second or two, the load many more than it may.
    options.parameters.time_scale = 500.0;
    options.limit = Some(Duration::from_secs(1));
    let mut experiments = experiment("spe2012-fig06", &[Mode::Ordered], 1);
    experiments[0].disks = vec!["nvme".to_owned()];
    let begun = Instant::now();
    assert_eq!(run(&experiments, &options).unwrap(), 1, "the cell fails");
    assert!(begun.elapsed() < Duration::from_secs(400));
    let raw = options.out.join("spe2012-fig06/raw/seq_write-ordered-1-nvme-0-0.json");
    let cell: CellResult = results::read(&raw).unwrap().unwrap();
    assert!(
        cell.guests.is_empty() && cell.failure.as_ref().unwrap().contains("its console is in"),
        "{:?}",
        cell.failure
    );
    let console = options.out.join("spe2012-fig06/consoles/seq_write-ordered-1-nvme-0-0-guest0.log");
    let console = std::fs::read_to_string(console).unwrap();
    assert!(console.contains("lab: the load begins") && console.contains("--- stderr"), "{console}");
    assert_eq!(processes_with(&directory.path().to_string_lossy()), Vec::<String>::new());
    let rest: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(rest, ["out"], "images are gone");
}

#[test]
fn one_boot_serves_several_crashes_and_what_a_kill_leaves_is_recovered() {
    if !is_emulated("quick::one_boot_serves_several_crashes_and_what_a_kill_leaves_is_recovered") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(directory.path());
    // Not quick: a quick one crashes the guest's kernel at once.
    (options.extent.quick, options.parameters.quick) = (false, false);
    options.extent.iterations = Some(2);
    let mut experiments = experiment("spe2012-fig19", &[Mode::Vma], 1);
    experiments[0].parameter = Some(("record_kib".to_owned(), vec![16]));
    assert_eq!(run(&experiments, &options).unwrap(), 0, "no cell fails");
    let raw = options.out.join("spe2012-fig19/raw");
    let cell = |number: u32| -> CellResult {
        results::read(&raw.join(format!("updates-vma-1-st336753lw-16-{number}.json"))).unwrap().unwrap()
    };
    for number in 0..2 {
        let fields = &cell(number).guests[0];
        assert_eq!((fields["records"], fields["corrupted_runs_not_by_commit"]), (2048.0, 0.0), "{fields:?}");
        assert!(!fields.contains_key("kernel_crashes"));
    }
    // What the first crash interrupted went on and was synchronised before the second.
    let second = &cell(1).guests[0];
    assert!(second["updated_records"] > 100.0 && second["recovery_blocks_written"] > 0.0, "{second:?}");
}

#[test]
fn a_run_that_is_told_to_end_leaves_no_process_and_no_directory() {
    let directory = tempfile::tempdir().unwrap();
    let temporary = directory.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    let program = guest_kit::program::workspace_binary("amberlog-lab").unwrap();
    let mut lab = Command::new(program)
        .args(["run", "spe2012-fig06", "--quick", "--time-scale", "1000", "--out"])
        .arg(directory.path().join("out"))
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let words = temporary.to_string_lossy().into_owned();
    let deadline = Instant::now() + Duration::from_secs(120);
    let is_up = || processes_with(&words).iter().any(|line| line.contains("qemu-system") && line.contains("initramfs"));
    while !is_up() {
        assert!(Instant::now() < deadline && lab.try_wait().unwrap().is_none(), "no guest is started");
        std::thread::sleep(Duration::from_millis(50));
    }
    let pid = rustix::process::Pid::from_raw(i32::try_from(lab.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, guest_kit::Signal::TERM).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let status = loop {
        if let Some(status) = lab.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "it ends in time");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(1));
    while !processes_with(&words).is_empty() {
        assert!(Instant::now() < deadline, "{:?}", processes_with(&words));
        std::thread::sleep(Duration::from_millis(20));
    }
    let rest: Vec<_> = std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(rest.is_empty(), "{rest:?}");
    assert!(!directory.path().join("out/spe2012-fig06/results.json").exists(), "no result of a cell that was cut off");
}
