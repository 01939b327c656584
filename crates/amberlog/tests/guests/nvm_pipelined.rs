//! Placement `nvm` with `nvm-pipelined=on` below real guests: a transaction is acknowledged before the flush of its appends. Who dies beside a host that
//! lives loses nothing by that; a loss of the host's power costs the last one at most.
//!
//! The image is on storage whose flushes take their time, so that whoever dies does so while the last one is on its way. Each record is made durable
//! before its stream's next one is begun, so no transaction has two of a stream.

use crate::nvm::{inspect, on_nvm, recover};
use crate::support::*;
use guest_kit::evidence::{self, RecordLayout};
use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{Acknowledged, Guest, Reported, program, worker_of};
use guest_tools::random::Random;
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use test_storage::TestStorage;

/// A record's appends are few: by default they go to the region, where nothing is flushed.
const PIPELINED: &str = ",nvm-size=8,nvm-append-home=0,nvm-pipelined=on";
/// What a flush takes; by far the most of a transaction's time.
const FLUSH_US: u64 = 150_000;
/// What a recovery says that finds the last transaction's appends not at home.
const LAST_IS_LOST: &str = "the last transaction was acknowledged before the flush of its appends";
const STREAMS: [&str; 2] = ["a", "b"];

/// A guest that writes records, and what it stands on.
struct Stand {
    bench: Bench,
    image: PathBuf,
    region: PathBuf,
    file_system: FileSystem,
    storage: TestStorage,
    layouts: [RecordLayout; 2],
}

impl Stand {
    /// `None` where there is no storage that forgets.
    fn new(round: u64) -> Option<Self> {
        let bench = Bench::new();
        let (image, region) = (bench.path("image"), bench.area().join("region"));
        let file_system = ExtRecipe::ext4(128, 8).make(&image).unwrap();
        let storage = TestStorage::new(&image).inspect_err(|error| eprintln!("left out: {error}")).ok()?;
        storage.set_flush_us(FLUSH_US);
        storage.remember_unflushed();
        Some(Stand { bench, image, region, file_system, storage, layouts: [appended(round), overwritten(round)] })
    }

    /// Both streams have come some way, and `before` something dies amberlog and its VMM do.
    fn kill_in_the_midst(&self, random: &mut Random, before: impl FnOnce()) -> Reported {
        let [appends, overwrites] = &self.layouts;
        let script = format!(
            "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a /mnt/b\n{} &\n{}",
            record_writer("/mnt/a", "a", appends, "--forever"),
            record_writer("/mnt/b", "b", overwrites, "--forever"),
        );
        let words = on_nvm(&self.storage.image(), &self.region, PIPELINED);
        let mut guest = Guest::start(self.bench.spec("pipelined", script, words)).unwrap();
        for stream in STREAMS {
            guest.wait_acknowledged(stream, 15, LIMIT).unwrap();
        }
        let worker = worker_of(guest.process_id()).expect("a worker");
        std::thread::sleep(Duration::from_micros(random.below(2 * FLUSH_US)));
        // Of this one the flush has just begun.
        let more = guest.acknowledged("a").last.unwrap_or(0) + 2;
        guest.wait_acknowledged("a", more, LIMIT).unwrap();
        std::thread::sleep(Duration::from_micros(random.below(FLUSH_US / 3)));
        before();
        guest.kill_all().unwrap();
        let stderr = guest.stderr();
        assert!(!stderr.contains("ERROR") && !stderr.contains("panicked"), "{stderr}");
        // A flush that is on its way keeps a process that was killed.
        assert!(program::has_ended_within(worker, LIMIT), "its worker lives on");
        guest.final_report()
    }

    fn recover(&self, more: &[&str]) -> Value {
        let (code, json, stderr) = recover(&self.image, &self.region, more);
        assert_eq!((code, json["status"].as_str()), (0, Some("recovered")), "{stderr}");
        json
    }

    /// How many of the streams have lost their last acknowledged record. All before it are there, and nothing that came after it.
    fn assert_all_but_the_last(&self, reported: &Reported) -> usize {
        assert_consistent(&self.file_system);
        let has_lost = |(stream, layout): &(&str, &RecordLayout)| {
            let acknowledged = reported.acknowledged[*stream];
            let last = acknowledged.last.expect("something was acknowledged");
            let faults = |last: u64| {
                let of = Acknowledged { last: Some(last), ..acknowledged };
                evidence::records(&self.file_system, &format!("/{stream}"), layout, of).unwrap()
            };
            let before = faults(last - 1);
            assert!(before.is_good(), "{stream}: not all before record {last}, the last one: {before:?}");
            let lost = faults(last).faults_count > 0;
            if lost && *stream == "a" {
                let behind = faults(last + 1);
                assert_eq!(
                    behind.faults_count, 2,
                    "{stream}: record {last} is gone, and one behind it is there: {behind:?}"
                );
            }
            lost
        };
        STREAMS.into_iter().zip(&self.layouts).filter(has_lost).count()
    }
}

fn says_lost(recovered: &Value) -> bool {
    recovered["notes"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|note| note.as_str().unwrap_or_default().contains(LAST_IS_LOST))
}

/// The host's kernel has what was written, flushed or not.
#[test]
fn what_was_acknowledged_before_its_flush_survives_the_death_of_amberlog_and_vmm() {
    let _alone = alone_behind_fuse();
    let mut prepared = 0;
    for round in 0..rounds(2) {
        let mut random = Random::of(seed(), 0x7069_706b + round);
        let Some(stand) = Stand::new(round) else { return };
        let reported = stand.kill_in_the_midst(&mut random, || {});
        prepared += usize::from(inspect(&stand.region)["prepared"] == true);
        let recovered = stand.recover(&[]);
        assert!(!says_lost(&recovered), "{recovered}");
        assert_consistent(&stand.file_system);
        for (stream, layout) in STREAMS.into_iter().zip(&stand.layouts) {
            assert_records(&stand.file_system, &format!("/{stream}"), stream, layout, &reported);
        }
        assert_eq!(inspect(&stand.region)["owner"], Value::Null);
    }
    assert!(prepared > 0, "no last transaction was ahead of its flush: nothing was seen of it");
}

/// Nothing of the host goes on, in the midst of a flush that makes nothing durable then.
#[test]
fn a_loss_of_power_costs_the_last_transaction_at_most() {
    let _alone = alone_behind_fuse();
    let mut rounds_seen = Vec::new();
    for round in 0..rounds(3) {
        let mut random = Random::of(seed(), 0x7069_7070 + round);
        let Some(stand) = Stand::new(10 + round) else { return };
        let reported = stand.kill_in_the_midst(&mut random, || stand.storage.cut_power());
        stand.storage.lose_power().unwrap();
        let prepared = inspect(&stand.region)["prepared"] == true;
        let before = std::fs::read(&stand.image).unwrap();
        let dry = stand.recover(&["--dry-run"]);
        assert!(std::fs::read(&stand.image).unwrap() == before, "a dry run changes nothing");
        let recovered = stand.recover(&[]);
        assert_eq!(says_lost(&dry), says_lost(&recovered), "{dry}\n{recovered}");
        let lost = stand.assert_all_but_the_last(&reported);
        assert!(lost == 0 || says_lost(&recovered), "{lost} streams lost a record, and nobody says so: {recovered}");
        rounds_seen.push((prepared, says_lost(&recovered), lost));
    }
    // Its guest need not have had the time to acknowledge what was in it.
    let has_lost = rounds_seen.iter().any(|(_, is_said, _)| *is_said);
    assert!(has_lost, "the power never went in the midst of a flush (prepared, said, lost): {rounds_seen:?}");
}

/// The guest is dead, its host lives, and loses its power while what is owed is brought home: the next recovery ends it, whatever the first one came to.
#[test]
fn a_recovery_may_be_cut_off_by_a_loss_of_power() {
    let _alone = alone_behind_fuse();
    for round in 0..rounds(3) {
        let mut random = Random::of(seed(), 0x7069_7072 + round);
        let Some(stand) = Stand::new(20 + round) else { return };
        let reported = stand.kill_in_the_midst(&mut random, || {});
        let mut first = Command::new(amberlog())
            .args(["recover", "--json", "--disk"])
            .arg(stand.storage.image())
            .arg("--nvm")
            .arg(&stand.region)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(random.below(4 * FLUSH_US)));
        stand.storage.cut_power();
        first.kill().unwrap();
        first.wait().unwrap();
        stand.storage.lose_power().unwrap();
        let (code, recovered, stderr) = recover(&stand.image, &stand.region, &[]);
        assert!(code == 0 && matches!(recovered["status"].as_str(), Some("recovered" | "none")), "{stderr}");
        let lost = stand.assert_all_but_the_last(&reported);
        // Its flush had ended, or the first recovery had begun with it: either way it is there for good.
        assert!(lost == 0 || says_lost(&recovered), "{lost} streams lost a record, and nobody says so: {recovered}");
        assert_eq!(inspect(&stand.region)["owner"], Value::Null);
    }
}
