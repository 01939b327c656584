//! Every load of the lab, one after the other in one real guest under VMA journaling, at a small part of its size: each must
//! run to its end, and those that tell figures must tell them. What they do to a disk's time is the experiments' to find.

use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, GuestSpec, program, toolchain};
use lab::cell::Mode;
use lab::workload::{Sizes, Workload};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::time::Duration;

/// What a load tells at its end, beyond the time that the lab takes by itself.
fn told(workload: Workload) -> &'static [&'static str] {
    match workload {
        Workload::Varmail | Workload::NjsVarmail => &["flows_per_second", "fsync_p50_us", "fsync_p99_us"],
        Workload::Fileserver | Workload::NjsFileserver => &["flows_per_second"],
        Workload::Database | Workload::Sqlite | Workload::SqliteWal => {
            &["transactions_per_second", "transaction_p50_us", "transaction_p95_us", "transaction_p99_us"]
        }
        Workload::FileDelete => &["delete_seconds"],
        Workload::KernelCompile => &["object_bytes"],
        _ => &[],
    }
}

#[test]
fn every_load_runs_in_a_real_guest_and_tells_its_figures() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    ExtRecipe::ext3(512, 16).make(&image).unwrap();
    // Updates crash their guest, and are the integrity experiment's own.
    let loads = || Workload::ALL.into_iter().filter(|load| !matches!(load, Workload::Updates | Workload::None));
    let mut script = format!("set -e\nmount -t ext4 -o {} /dev/vda /mnt\n", Mode::Vma.mount_options());
    for load in loads() {
        let sizes = Sizes { scale: 0.001, seed: 5, parameter: 50 };
        let _ = write!(
            script,
            "(true; {prepare}
             ) >/tmp/prepared || fail '{name}: prepare'
             (true; {work}
             ) >/tmp/result || fail '{name}'
             mark load {name} $(grep phase=run /tmp/result || true)
             rm -rf /mnt/*\n",
            name = load.name(),
            prepare = load.prepare(sizes),
            work = load.load(sizes)
        );
    }
    let amberlog = program::workspace_binary("amberlog").unwrap();
    let mut disk = OsString::from(&image);
    disk.push(format!(",placement={}", Mode::Vma.placement()));
    let mut tools = OsString::from(toolchain::image(directory.path()).unwrap());
    tools.push(",readonly,name=tools");
    let words: [OsString; 6] = [amberlog.into(), "run".into(), "--disk".into(), disk, "--disk".into(), tools];
    let mut spec = GuestSpec::new("every load", script).wrapper(words);
    spec.programs = loads().flat_map(Workload::programs).copied().collect();
    spec.programs.dedup();
    let reported = Guest::run(spec, Duration::from_secs(600)).unwrap();
    for load in loads() {
        let prefix = format!("load {}", load.name());
        let mark = reported.marks.iter().find(|mark| mark.split_whitespace().take(2).eq(prefix.split_whitespace()));
        let mark = mark.unwrap_or_else(|| panic!("{prefix} did not end"));
        let figures: BTreeMap<&str, f64> = mark
            .split_whitespace()
            .filter_map(|word| word.split_once('='))
            .filter_map(|(n, v)| Some((n, v.parse().ok()?)))
            .collect();
        for name in told(load) {
            assert!(figures.get(name).is_some_and(|value| *value > 0.0), "{name} is missing or nothing in '{mark}'");
        }
    }
}
