//! A quick shoot-out of a few: whoever promises to keep what was acknowledged keeps it, and whoever does not is seen to lose it.

use lab::shootout::{Cell, ShootOut, run};
use test_storage::TestStorage;

#[test]
fn a_few_contenders_are_measured_and_killed_and_a_second_run_finds_everything_done() {
    if let Err(error) = TestStorage::probe() {
        eprintln!("not tried: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let names = ["ext4-ordered", "qemu-unsafe", "retain"];
    let options = ShootOut {
        out: directory.path().join("out"),
        images: Some(directory.path().to_owned()),
        quick: true,
        iterations: 1,
        contenders: names.map(str::to_owned).to_vec(),
        loads: vec!["fsync".to_owned()],
        has_deaths: true,
        flush_us: 500,
    };
    let cell = |contender: &str, what: &str| -> Cell {
        let path = options.out.join(format!("raw/{contender}-{what}-0.json"));
        lab::results::read(&path).unwrap().expect("the cell is kept")
    };
    let failed = run(&options).unwrap();
    for name in names {
        for what in ["fsync", "guest-dies", "vmm-dies", "host-dies"] {
            let cell = cell(name, what);
            assert_eq!(cell.failure, None, "{name}, {what}");
        }
        let load = cell(name, "fsync");
        assert!(load.fields["p999_us"] >= load.fields["p50_us"] && load.fields["storage_bytes"] > 1e6, "{load:?}");
        assert!(load.distribution.len() > 10, "{load:?}");
        for death in ["guest-dies", "vmm-dies"] {
            assert_eq!(cell(name, death).fields["lost"], 0.0, "{name}: a {death} loses nothing");
        }
    }
    assert_eq!(failed, 0);
    assert_eq!(cell("ext4-ordered", "host-dies").fields["lost"], 0.0, "what was flushed is there");
    // What the host's memory alone had is lost with it: that a death can be seen to lose something is what makes the others' zero a result.
    for name in ["qemu-unsafe", "retain"] {
        assert!(cell(name, "host-dies").fields["lost"] > 0.0, "{name}: {:?}", cell(name, "host-dies"));
    }
    assert!(
        cell("retain", "fsync").fields["storage_flushes"] < cell("ext4-ordered", "fsync").fields["storage_flushes"]
    );
    let page = std::fs::read_to_string(options.out.join("index.html")).unwrap();
    assert!(page.contains("What survives") && page.contains("retain"));
    let kept = options.out.join("raw/retain-fsync-0.json");
    let before = std::fs::metadata(&kept).unwrap().modified().unwrap();
    run(&options).unwrap();
    assert_eq!(std::fs::metadata(&kept).unwrap().modified().unwrap(), before, "a second run measures nothing");
}
