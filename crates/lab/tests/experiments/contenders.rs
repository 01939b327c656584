//! A quick shoot-out of a few: whoever promises to keep what was acknowledged keeps it, and whoever does not is seen to lose it.

use lab::shootout::{Cell, ShootOut, run};
use std::path::Path;
use std::time::SystemTime;
use test_storage::TestStorage;

const NAMES: [&str; 4] = ["ext4-ordered", "qemu-unsafe", "retain", "nvm-pipelined"];
const WHATS: [&str; 4] = ["fsync", "guest-dies", "vmm-dies", "host-dies"];

fn options(images: &Path, out: &str, contenders: &[&str]) -> ShootOut {
    ShootOut {
        out: images.join(out),
        images: Some(images.to_owned()),
        quick: true,
        iterations: 1,
        contenders: contenders.iter().map(|name| (*name).to_owned()).collect(),
        loads: vec!["fsync".to_owned()],
        rounds: Vec::new(),
        has_deaths: true,
        flush_us: 500,
        takes_any_source: false,
    }
}

/// A referee found preparation's debt (a file of 64 MiB) in the bytes of whoever journals data, and memory for a journal that was as fast as the
/// host's. The load writes one MiB.
#[test]
fn what_a_load_begins_with_is_home_and_is_not_counted() {
    if let Err(error) = TestStorage::probe() {
        eprintln!("not tried: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(directory.path(), "clean", &["ext4-journal", "nvm", "remote"]);
    options.has_deaths = false;
    assert_eq!(run(&options).unwrap(), 0, "no cell fails");
    let fields = |contender: &str| {
        let path = options.out.join("raw").join(format!("{contender}-fsync-0.json"));
        lab::results::read::<Cell>(&path).unwrap().expect("it is kept").fields
    };
    let most = 20e6;
    assert!(fields("ext4-journal")["storage_bytes"] < most, "{:?}", fields("ext4-journal"));
    let nvm = fields("nvm");
    assert!(nvm["nvm_bytes"] > 1e6 && nvm["nvm_bytes"] < most && nvm["storage_bytes"] < most, "{nvm:?}");
    let remote = fields("remote");
    assert!(remote["network_bytes"] > 1e6 && remote["network_bytes"] < most, "{remote:?}");
    assert!(
        remote["server_cpu_seconds"] > 0.0 && remote["host_cpu_seconds"] > remote["server_cpu_seconds"],
        "{remote:?}"
    );
}

/// Before each death a guest acknowledges for eight seconds: the contenders, each with a medium and results of its own, do so side by side. Their
/// cells are then one shoot-out's, which finds all of them done.
#[test]
fn a_few_contenders_are_measured_and_killed_and_a_second_run_finds_everything_done() {
    if let Err(error) = TestStorage::probe() {
        eprintln!("not tried: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for name in NAMES {
            let options = options(directory.path(), name, &[name]);
            scope.spawn(move || run(&options).unwrap());
        }
    });
    let options = options(directory.path(), "all", &NAMES);
    let raw = options.out.join("raw");
    std::fs::create_dir_all(&raw).unwrap();
    let mut kept = Vec::new();
    for name in NAMES {
        for what in WHATS {
            let file = format!("{name}-{what}-0.json");
            std::fs::rename(directory.path().join(name).join("raw").join(&file), raw.join(&file)).unwrap();
            kept.push(raw.join(file));
        }
    }
    let cell = |contender: &str, what: &str| -> Cell {
        let path = raw.join(format!("{contender}-{what}-0.json"));
        lab::results::read(&path).unwrap().expect("the cell is kept")
    };
    for name in NAMES {
        for what in WHATS {
            assert_eq!(cell(name, what).failure, None, "{name}, {what}");
        }
    }
    let times = || -> Vec<SystemTime> {
        kept.iter().map(|path| std::fs::metadata(path).unwrap().modified().unwrap()).collect()
    };
    let before = times();
    assert_eq!(run(&options).unwrap(), 0);
    assert_eq!(times(), before, "a second run measures nothing");

    for name in NAMES {
        let load = cell(name, "fsync");
        assert!(load.fields["p999_us"] >= load.fields["p50_us"] && load.fields["storage_bytes"] > 1e6, "{load:?}");
        assert!(load.distribution.len() > 10, "{load:?}");
        for death in ["guest-dies", "vmm-dies"] {
            assert_eq!(cell(name, death).fields["lost"], 0.0, "{name}: a {death} loses nothing");
        }
    }
    assert_eq!(cell("ext4-ordered", "host-dies").fields["lost"], 0.0, "what was flushed is there");
    let pipelined = cell("nvm-pipelined", "host-dies");
    assert!(pipelined.fields["lost"] <= 1.0 && pipelined.fields["promise_kept"] == 1.0, "{pipelined:?}");
    // What the host's memory alone had is lost with it: that a death can be seen to lose something is what makes the others' zero a result.
    for name in ["qemu-unsafe", "retain"] {
        assert!(cell(name, "host-dies").fields["lost"] > 0.0, "{name}: {:?}", cell(name, "host-dies"));
    }
    assert!(
        cell("retain", "fsync").fields["storage_flushes"] < cell("ext4-ordered", "fsync").fields["storage_flushes"]
    );
    let page = std::fs::read_to_string(options.out.join("index.html")).unwrap();
    assert!(page.contains("What survives") && page.contains("retain"));
}
