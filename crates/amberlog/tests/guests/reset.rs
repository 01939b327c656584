//! A guest that resets, however it does it: the same QEMU goes on, and all that was committed is at home before the new
//! kernel reads its first block, so that it finds nothing to replay.

use crate::support::*;
use guest_kit::image::{ExtRecipe, Journal, journal_device};
use guest_kit::{Accelerator, Guest};
use serde_json::json;

/// The ways a guest ends its kernel's life, one a boot; the last boot ends by panic, with QEMU told to end then.
const WAYS: [&str; 5] = [
    "mark reset me",
    "reboot -f",
    "echo b >/proc/sysrq-trigger",
    "echo c >/proc/sysrq-trigger",
    "mark end me; sleep 5; echo c >/proc/sysrq-trigger",
];

fn script(external: &str) -> String {
    let mut script = format!(
        "
        mkdir -p /mnt/a /mnt/b
        mount -t ext4 -o data=journal /dev/vda /mnt/a || fail mount a
        mount -t ext4 -o data=journal{external} /dev/vdb /mnt/b || fail mount b
        {NOTHING_TO_REPLAY}
        dmesg | grep -i 'ext4.*error' && fail 'the kernel found an error mark'
        boot=$(ls -d /mnt/a/boot-* 2>/dev/null | wc -l)
        : >/mnt/a/boot-$boot
        sync
        mark boot $boot
    "
    );
    for disk in ["a", "b"] {
        script += &format!("disk={disk}\n");
        for stream in ["fixed", "endless"] {
            let (layout, more) = match stream {
                "fixed" => (appended(1), "--count 20"),
                _ => (overwritten(2), "--begun /begun-$disk --forever &"),
            };
            let stream = format!("{disk}-{stream}-$boot");
            script += &record_writer(&format!("/mnt/{disk}/{stream}"), &stream, &layout, more);
            script += "\n";
        }
    }
    script += "until [ -e /begun-a -a -e /begun-b ]; do sleep 0.1; done\nsleep 1\ncase $boot in\n";
    for (boot, way) in WAYS.iter().enumerate() {
        script += &format!("{boot}) {way};;\n");
    }
    script + "esac\nsleep 1000"
}

#[test]
fn each_kind_of_reset_loses_nothing_and_leaves_nothing_to_replay() {
    accelerators().into_iter().for_each(|accelerator| resets(accelerator, None, &[]));
}

/// A device with a journal begins anew beside the one with its file system, and no other thread would end the home writes of that.
#[test]
fn nor_where_one_thread_serves_a_journal_and_its_file_system() {
    resets(accelerators()[0], None, &["--threads", "one"]);
}

#[test]
fn nor_where_journals_are_durable_by_age() {
    resets(accelerators()[0], Some([",durable-within=1", ",placement=copy,durable-within=0"]), &[]);
}

fn resets(accelerator: Accelerator, aged: Option<[&str; 2]>, more: &[&str]) {
    let bench = Bench::new();
    let (image, second, journal) = (bench.path("image"), bench.path("second"), bench.path("journal"));
    let internal = ExtRecipe::ext4(64, 8).make(&image).unwrap();
    journal_device(&journal, 16, 4096).unwrap();
    // A journal on a device of its own is not made durable by age.
    let recipe = match aged {
        None => ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(64, 0) },
        Some(_) => ExtRecipe::ext4(64, 8),
    };
    let external = recipe.make(&second).unwrap();
    let (words, script) = match aged {
        None => {
            let journal = ["--journal-disk".into(), journal.into()];
            (
                [&protected_disk(&image)[..], &protected_disk(&second)[..], &journal[..]].concat(),
                script(",journal_path=/dev/vdc"),
            )
        }
        Some([one, other]) => ([disk_with(&image, one), disk_with(&second, other)].concat(), script("")),
    };
    let words = more.iter().map(Into::into).chain(words);
    let mut spec = bench.spec("reset", script, words);
    spec.reboots = true;
    spec.accelerator = Some(accelerator);
    let mut guest = Guest::start(spec).unwrap();
    let pid = guest.qemu_pid().unwrap();
    let alive = |guest: &mut Guest, mark: &str| {
        let mark = mark.to_owned();
        let seen = guest.await_report(&format!("neither '{mark}' nor an end came"), LIMIT, |reported| {
            let failed = reported.exit_code.map(Err);
            failed.or_else(|| reported.marks.contains(&mark).then_some(Ok(())))
        });
        if seen.unwrap().is_err() {
            panic!("{}", guest.failure("its script ended"));
        }
    };
    alive(&mut guest, "reset me");
    guest.qmp().unwrap().system_reset().unwrap();
    for boot in 1..WAYS.len() {
        alive(&mut guest, &format!("boot {boot}"));
    }
    assert_eq!(guest.qemu_pid().unwrap(), pid, "the same QEMU has gone on all the time");
    alive(&mut guest, "end me");
    guest.qmp().unwrap().execute("set-action", json!({"reboot": "shutdown"})).unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_ends_with(&guest, status, 0);
    let reported = guest.final_report();
    assert_eq!(reported.boots as usize, WAYS.len());
    for (disk, file_system) in [("a", &internal), ("b", &external)] {
        assert_consistent(file_system);
        for boot in 0..WAYS.len() {
            let stream = format!("{disk}-fixed-{boot}");
            assert_eq!(assert_records(file_system, &format!("/{stream}"), &stream, &appended(1), &reported), 20);
            let stream = format!("{disk}-endless-{boot}");
            assert_records(file_system, &format!("/{stream}"), &stream, &overwritten(2), &reported);
        }
    }
    let report = bench.report();
    for disk in [0, 1] {
        assert_eq!(report.status(disk), "recovered");
        if aged.is_some() {
            assert!(report.counter(disk, "transactions") > 100);
            continue;
        }
        assert_eq!(report.disk(disk)["placement"], "retain");
        assert!(report.counter(disk, "pages_protected") > 0);
        assert!(report.counter(disk, "transactions") > 100);
        // One mark for each mount that found work to do, and nothing else.
        let marks = report.counter(disk, "journal_bytes_to_storage");
        assert!(marks > 0 && marks <= 8192 * WAYS.len() as u64, "{marks} bytes of journal reached storage");
    }
    assert_eq!(report.disk(0)["journal"]["kind"], "internal");
    assert_eq!(report.disk(1)["journal"]["kind"], if aged.is_none() { "external" } else { "internal" });
    bench.assert_area_is_empty();
}
