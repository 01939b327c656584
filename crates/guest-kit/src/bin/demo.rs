//! `make demo`: the main job, on this machine, with a real guest.
//!
//! An unmodified Debian kernel under unmodified QEMU runs postmark and record writers on an ext4
//! file system with data=journal, served by `amberlog run`. QEMU is killed in the middle; amberlog
//! recovers; e2fsck and the records judge the result. Once with placement `retain`, once with
//! `storage`, the journal as it always was. Ends with a table, and with what it proved.
//!
//! Failure story: anything that is not as promised is a sentence and exit code 1; the images are
//! then kept.

#![forbid(unsafe_code)]

use guest_kit::evidence::{self, Order, RecordLayout};
use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{AtEnd, Guest, GuestSpec, Platform, Reported, judge, program};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(600);
const RECORDS: u64 = 600;
const SECOND_RECORDS: u64 = 200;
const SIZE_MIB: u32 = 512;
const JOURNAL_MIB: u32 = 32;

type Outcome<T> = Result<T, String>;

/// The record streams: where they are in the file system, and how they are written.
fn streams() -> [(&'static str, RecordLayout); 3] {
    let appended = |seed| RecordLayout { seed, ..RecordLayout::default() };
    [
        ("appended", appended(1)),
        ("overwritten", RecordLayout { order: Order::Overwrite { slots: 50 }, ..appended(2) }),
        ("last", appended(3)),
    ]
}

/// First a fixed amount of work, equal for both placements; then the same without end, to be
/// killed in the middle of.
fn script() -> String {
    let [appended, overwritten, last] = streams().map(|(stream, layout)| {
        format!("guest-tools records --directory /mnt/{stream} --stream {stream} {}", layout.to_options())
    });
    let postmark = |directory: &str, files: u32, transactions: u32| {
        format!(
            "mkdir /mnt/{directory}
             printf 'set location /mnt/{directory}\\nset number {files}\\nset transactions {transactions}\\nrun\\n' |
             postmark"
        )
    };
    format!(
        "set -e
         mount -t ext4 -o data=journal /dev/vda /mnt
         {appended} --count {RECORDS} &
         {overwritten} --count {RECORDS} --sync fdatasync &
         {first} >/tmp/postmark || fail postmark
         grep 'seconds of transactions' /tmp/postmark
         mark postmark is through its first run
         wait
         mark the fixed work is done
         {{ {second} >/dev/null; }} &
         {last} --forever",
        first = postmark("postmark", 500, 8000),
        second = postmark("postmark-again", 500, 1_000_000),
    )
}

/// What one placement came to.
struct Run {
    placement: &'static str,
    report: Value,
    work_seconds: f64,
    back_seconds: f64,
    acknowledged: u64,
    stale_totals: usize,
    orphans: usize,
    problems: Vec<String>,
}

impl Run {
    fn counter(&self, name: &str) -> u64 {
        self.report["disks"][0]["counters"][name].as_u64().unwrap_or(0)
    }

    fn recovery(&self) -> &Value {
        &self.report["disks"][0]["recovery"]
    }

    fn bytes_to_storage(&self) -> u64 {
        self.counter("journal_bytes_to_storage") + self.counter("home_bytes_to_storage") + self.recovered_bytes()
    }

    /// A figure that only a held journal has: one that goes straight to storage is not looked into.
    fn held(&self, figure: &str) -> String {
        if self.placement == "storage" { "-".to_owned() } else { figure.to_owned() }
    }

    fn recovered_bytes(&self) -> u64 {
        self.recovery()["bytes_written"].as_u64().unwrap_or(0)
    }
}

fn main() -> ExitCode {
    match demo() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Outcome<bool> {
    let started = Instant::now();
    guest_kit::assets::Assets::get().map_err(sentence)?;
    let platform = Platform::native().map_err(sentence)?;
    println!("amberlog demo: a real guest under QEMU ({})", platform.describe());
    let directory = tempfile::Builder::new()
        .prefix("amberlog-demo-")
        .tempdir()
        .map_err(|error| format!("cannot create a directory for the images: {error}"))?;
    let mut runs = Vec::new();
    for placement in ["retain", "storage"] {
        match run(directory.path(), placement) {
            Ok(run) => runs.push(run),
            Err(error) => {
                let kept = directory.keep();
                return Err(format!("{error}\nThe images are kept in {}.", kept.display()));
            }
        }
    }
    print_table(&runs);
    let good = conclude(&runs);
    if !good {
        println!("The images are kept in {}.", directory.keep().display());
    }
    println!("The demo took {:.0} s.", started.elapsed().as_secs_f64());
    Ok(good)
}

fn run(directory: &Path, placement: &'static str) -> Outcome<Run> {
    println!("\n--- placement {placement}");
    let image = directory.join(format!("{placement}.img"));
    let report_path = directory.join(format!("{placement}.json"));
    let file_system = ExtRecipe::ext4(SIZE_MIB, JOURNAL_MIB).make(&image).map_err(sentence)?;
    println!("an ext4 image of {SIZE_MIB} MiB with an internal journal of {JOURNAL_MIB} MiB");

    let mut disk: OsString = image.clone().into();
    disk.push(format!(",placement={placement}"));
    let amberlog = program::workspace_binary("amberlog").map_err(sentence)?;
    let words: [OsString; 6] =
        [amberlog.clone().into(), "run".into(), "--disk".into(), disk, "--report".into(), report_path.clone().into()];
    let mut spec = GuestSpec::new(format!("demo-{placement}"), script()).wrapper(words);
    spec.at_end = AtEnd::Stay;
    let booting = Instant::now();
    let mut guest = Guest::start(spec).map_err(sentence)?;
    println!("the guest is up after {:.1} s; it mounts with data=journal", booting.elapsed().as_secs_f64());

    let working = Instant::now();
    watch(&mut guest, working, "postmark, and 2 record writers that fsync", |reported| {
        reported.marks.iter().any(|mark| mark == "the fixed work is done")
    })?;
    let work_seconds = working.elapsed().as_secs_f64();
    watch(&mut guest, working, "postmark again, and a third record writer", |reported| {
        reported.acknowledged.get("last").is_some_and(|last| last.count >= SECOND_RECORDS)
    })?;

    guest.kill_qemu().map_err(sentence)?;
    let killed = Instant::now();
    println!("kill -9 of QEMU, in the middle of that");
    let status = guest.wait_end(Duration::from_secs(120)).map_err(sentence)?;
    let back_seconds = killed.elapsed().as_secs_f64();
    let reported = guest.final_report();
    println!("amberlog has ended ({status}) after {back_seconds:.2} s");
    let mut problems = Vec::new();
    // The contract: the VMM's own status, 128+N after signal N.
    if status.code() != Some(128 + 9) {
        problems.push(format!("amberlog run ended with {status}; after a kill -9 of QEMU it must be exit status 137"));
    }
    let text = std::fs::read_to_string(&report_path)
        .map_err(|error| guest.failure(&format!("amberlog wrote no report: {error}")).to_string())?;
    let mut report: Value = serde_json::from_str(&text)
        .map_err(|error| format!("{}, written by amberlog, is not JSON: {error}", report_path.display()))?;

    if placement == "storage" {
        recover_from_storage(&amberlog, &image, &mut report)?;
    }
    let (stale_totals, orphans) = examine(&file_system, &mut problems)?;
    let acknowledged = count_records(&file_system, &reported, &mut problems)?;
    let run = Run { placement, report, work_seconds, back_seconds, acknowledged, stale_totals, orphans, problems };
    Ok(run)
}

/// A journal on storage is left to whoever mounts next, as it always was: replays it now, so that
/// the two placements can be judged and compared, and puts the outcome into the report.
fn recover_from_storage(amberlog: &Path, image: &Path, report: &mut Value) -> Outcome<()> {
    let mut command = Command::new(amberlog);
    command.args(["recover", "--json", "--disk"]).arg(image);
    let output = program::run(&mut command, &[0]).map_err(sentence)?;
    let recovery: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("amberlog recover --json did not print JSON: {error}"))?;
    println!("amberlog recover has replayed the journal on storage");
    if recovery["status"] != "clean" {
        report["disks"][0]["recovery"] = recovery;
    }
    Ok(())
}

/// Waits for `done` and shows how far the guest is.
fn watch(guest: &mut Guest, since: Instant, what: &str, done: impl Fn(&Reported) -> bool) -> Outcome<()> {
    let terminal = std::io::stdout().is_terminal();
    let step = Duration::from_secs(if terminal { 1 } else { 10 });
    println!("working: {what}");
    let deadline = Instant::now() + LIMIT;
    let mut next = Instant::now() + step;
    loop {
        let reported = guest.reported();
        if done(&reported) || Instant::now() >= next {
            let count: u64 = reported.acknowledged.values().map(|stream| stream.count).sum();
            let end = if terminal { '\r' } else { '\n' };
            print!("  {:4.0} s: {count} records acknowledged{end}", since.elapsed().as_secs_f64());
            let _ = std::io::stdout().flush();
            next = Instant::now() + step;
        }
        if done(&reported) {
            if terminal {
                println!();
            }
            return Ok(());
        }
        if let Some(code) = reported.exit_code {
            return Err(guest.failure(&format!("its script ended early, with {code}")).to_string());
        }
        if reported.closed || Instant::now() >= deadline {
            return Err(guest.failure(&format!("{what}: this did not come to its end")).to_string());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// e2fsck's verdict; gives how many stale totals and orphans it named.
fn examine(file_system: &FileSystem, problems: &mut Vec<String>) -> Outcome<(usize, usize)> {
    let verdict = judge::check(file_system).map_err(sentence)?;
    if verdict.needs_recovery {
        problems.push("e2fsck: the journal still has to be replayed".to_owned());
    }
    problems.extend(verdict.problems.iter().take(10).map(|line| format!("e2fsck: {line}")));
    if verdict.is_consistent() {
        println!("e2fsck -fn finds nothing but free totals in the superblock ({})", verdict.stale_totals.len());
    }
    Ok((verdict.stale_totals.len(), verdict.orphans.len()))
}

/// How many records were acknowledged; those that are not there and whole are problems.
fn count_records(file_system: &FileSystem, reported: &Reported, problems: &mut Vec<String>) -> Outcome<u64> {
    let mut total = 0;
    for (stream, layout) in streams() {
        let acknowledged = reported.acknowledged.get(stream).copied().unwrap_or_default();
        let verdict = evidence::records(file_system, &format!("/{stream}"), &layout, acknowledged).map_err(sentence)?;
        total += acknowledged.count;
        for fault in verdict.faults.iter().take(5) {
            problems.push(format!("{stream}: record {} was acknowledged, but {}", fault.record, fault.found));
        }
        if verdict.is_good() {
            println!(
                "{stream}: {} records acknowledged before the kill, all there and whole{}",
                acknowledged.count,
                if verdict.expected < acknowledged.count { " (or overwritten by newer ones)" } else { "" },
            );
        }
    }
    Ok(total)
}

fn print_table(runs: &[Run]) {
    let bytes = |bytes: u64| {
        let mib = bytes as f64 / (1 << 20) as f64;
        format!("{mib:.2} MiB")
    };
    println!("\n{:36}{}", "", runs.iter().map(|run| format!("{:>16}", run.placement)).collect::<String>());
    let row = |name: &str, value: &dyn Fn(&Run) -> String| {
        println!("{name:36}{}", runs.iter().map(|run| format!("{:>16}", value(run))).collect::<String>());
    };
    row("journal received from the guest", &|run| bytes(run.counter("journal_bytes_received")));
    row("journal written to storage", &|run| bytes(run.counter("journal_bytes_to_storage")));
    row("home blocks written to storage", &|run| bytes(run.counter("home_bytes_to_storage")));
    row("written by the recovery", &|run| bytes(run.recovered_bytes()));
    row("all written to storage", &|run| bytes(run.bytes_to_storage()));
    row("commits", &|run| run.held(&run.counter("transactions").to_string()));
    row("blocks committed", &|run| run.held(&run.counter("blocks_committed").to_string()));
    row("pages protected", &|run| run.held(&run.counter("pages_protected").to_string()));
    row("faults (copy on write)", &|run| run.held(&run.counter("cow_faults").to_string()));
    row("pages copied", &|run| run.held(&run.counter("pages_copied").to_string()));
    row("blocks retained, at most", &|run| run.held(&run.counter("blocks_retained_max").to_string()));
    row("area's tables, at most", &|run| run.held(&bytes(run.counter("area_bytes_max"))));
    row("copy pool, at most", &|run| run.held(&bytes(run.counter("pool_bytes_max"))));
    row("the fixed work took", &|run| format!("{:.1} s", run.work_seconds));
    row("records acknowledged", &|run| run.acknowledged.to_string());
    row("recovery", &|run| run.recovery()["status"].as_str().unwrap_or("?").to_owned());
    row("recovery: blocks written", &|run| run.recovery()["blocks_written"].as_u64().unwrap_or(0).to_string());
    row("recovery took", &|run| format!("{:.3} s", run.recovery()["seconds"].as_f64().unwrap_or(f64::NAN)));
    row("kill to amberlog's end", &|run| format!("{:.2} s", run.back_seconds));
    row("e2fsck: stale free totals", &|run| run.stale_totals.to_string());
    row("e2fsck: orphans for the mount", &|run| run.orphans.to_string());
    row("e2fsck and records: problems", &|run| run.problems.len().to_string());
}

/// Says what was proved, and what was not.
fn conclude(runs: &[Run]) -> bool {
    let mut good = true;
    let mut check = |held: bool, text: String| {
        println!("  {} {text}", if held { "yes " } else { "NO  " });
        good &= held;
    };
    println!("\nWhat this run proved:");
    for run in runs {
        let placement = run.placement;
        check(
            run.problems.is_empty(),
            format!(
                "{placement}: after kill -9 of QEMU the file system is consistent and all {} acknowledged records \
                 are there and whole",
                run.acknowledged
            ),
        );
        for problem in &run.problems {
            println!("         {problem}");
        }
        let status = run.recovery()["status"].as_str().unwrap_or("none");
        check(
            status == "recovered" || status == "materialised",
            format!("{placement}: amberlog recovered the disk, without a guest or e2fsck (status: {status})"),
        );
    }
    if let [retain, storage] = runs {
        let received = retain.counter("journal_bytes_received");
        let to_storage = retain.counter("journal_bytes_to_storage");
        check(
            received > 0 && to_storage <= received / 100,
            format!("retain: of {received} journal bytes, {to_storage} were written to storage (error marks)"),
        );
        check(
            storage.counter("journal_bytes_to_storage") > 0,
            format!(
                "storage, the same work: {} of {} journal bytes were written to storage",
                storage.counter("journal_bytes_to_storage"),
                storage.counter("journal_bytes_received"),
            ),
        );
        let ratio = retain.bytes_to_storage() as f64 / storage.bytes_to_storage().max(1) as f64;
        check(
            retain.bytes_to_storage() < storage.bytes_to_storage(),
            format!("retain wrote {ratio:.2} times the bytes that storage wrote"),
        );
    }
    good
}

fn sentence(error: impl std::fmt::Display) -> String {
    error.to_string()
}
