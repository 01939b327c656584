//! Placement `remote`, as its thesis measures it: postmark under each journaling mode, the journal on the disk (`storage`),
//! nowhere (`discard`) and on a server (`remote`), on a model of the thesis' disk. Then, without a guest, what a commit
//! waits for: the server against an external journal on an NBD export, and a hundred clients against the server's own disk.
//!
//! Client and server are on one machine, which ranks, and says nothing of a network.

use crate::figure::{Basis, Figure, Limit, median};
use crate::machine::{Machine, load};
use crate::options::Options;
use crate::paced::{Pace, Paced};
use crate::{Outcome, nbd::Nbd, sentence};
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, GuestSpec, program};
use remote_journal::client::Heard;
use remote_journal::message::{Batch, Block};
use remote_journal::store::{Directory, Medium, SegmentFile, Store};
use remote_journal::{Client, ClientOptions, ClientSecurity, ServerOptions};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(900);
const BLOCK_BYTES: usize = 4096;
/// Blocks of a small commit: a descriptor, what it names, and the commit block.
const COMMIT_BLOCKS: u64 = 8;
const CLIENTS: u64 = 100;
/// The thesis' disk.
const DRIVE: &str = "st336753lw";
/// Seconds that a second of the modelled drive takes where the guest's processor is emulated: it is many times slower than
/// the thesis' Pentium 4, and would hide the drive.
const TIME_SCALE_EMULATED: u32 = 10;

struct Server(Child, String);

impl Server {
    fn start(store: &Path) -> Outcome<Self> {
        let mut child = Command::new(program::workspace_binary("amberlog").map_err(sentence)?)
            .args(["journal-server", "--insecure", "--listen", "127.0.0.1:0", "--store"])
            .arg(store)
            .stdout(Stdio::piped())
            .spawn()
            .map_err(sentence)?;
        let mut line = String::new();
        let stdout = child.stdout.take().ok_or("the journal server has no output")?;
        BufReader::new(stdout).read_line(&mut line).map_err(sentence)?;
        let address = line.trim().strip_prefix("listening on ").map(str::to_owned);
        address.map(|address| Server(child, address)).ok_or_else(|| "the journal server did not start".to_owned())
    }

    fn client(&self) -> ClientOptions {
        let security = ClientSecurity { insecure: true, ..ClientSecurity::default() };
        ClientOptions { address: self.1.clone(), security, timeout: Duration::from_secs(10) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Processor time of children that were waited for, in seconds.
fn children_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().skip(13).take(2);
    ticks.filter_map(|word| word.parse::<f64>().ok()).sum::<f64>() / 100.0
}

struct Run {
    seconds: f64,
    processor_seconds: f64,
    report: Value,
}

/// One guest with postmark.
fn postmark(placement: &str, mode: &str, time_scale: u32, options: &Options, directory: &Path) -> Outcome<Run> {
    let directory = tempfile::tempdir_in(directory).map_err(sentence)?;
    let image = directory.path().join("disk.img");
    ExtRecipe::ext4(options.image_mib().min(1024), 32).make(&image).map_err(sentence)?;
    // The thesis has 150,000 files and 20,000 transactions, and twenty times its journal to write: by its end nearly all is at
    // home. A twentieth of that goes through the journal twice, so that the time ends when the rest of it is home too.
    let (files, transactions) = if options.quick { (200, 30) } else { (7500, 1000) };
    let script = format!(
        "set -e
         mount -t ext4 -o data={mode} /dev/vda /mnt
         mkdir /mnt/postmark
         read begin rest </proc/uptime
         printf 'set location /mnt/postmark\\nset size 500 1000\\nset number {files}\\nset transactions {transactions}\\nrun\\n' |
         postmark >/dev/null
         umount /mnt
         read end rest </proc/uptime
         mark worked $begin $end"
    );
    let mut spec = GuestSpec::new(format!("bench {placement} {mode}"), script);
    spec.memory_mib = 160;
    spec.boot_timeout = Duration::from_secs(300);
    let server = Server::start(&directory.path().join("store"))?;
    let mut disk = OsString::from(&image);
    disk.push(format!(",model={DRIVE},flush=honour,placement="));
    disk.push(if placement == "remote" { format!("remote={}/db", server.1) } else { placement.to_owned() });
    let report = directory.path().join("report.json");
    let words: Vec<OsString> = vec![
        program::workspace_binary("amberlog").map_err(sentence)?.into(),
        "run".into(),
        "--remote-insecure".into(),
        "--time-scale".into(),
        time_scale.to_string().into(),
        "--disk".into(),
        disk,
        "--report".into(),
        report.clone().into(),
    ];
    let before = children_seconds();
    let reported = Guest::run(spec.wrapper(words), LIMIT).map_err(sentence)?;
    let processor_seconds = children_seconds() - before;
    let mark = reported.marks.iter().find_map(|mark| mark.strip_prefix("worked ")).ok_or("the guest told no times")?;
    let times: Vec<f64> = mark.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [begin, end] = times[..] else { return Err(format!("the guest told '{mark}'")) };
    let text = std::fs::read_to_string(&report).map_err(sentence)?;
    let report: Value = serde_json::from_str(&text).map_err(sentence)?;
    let report = report["disks"][0].clone();
    if placement == "remote" && (report["remote"]["returns"] != 1 || report["remote"]["fall_backs"] != 0) {
        return Err(format!("the journal was not on the server all the time: {}", report["remote"]));
    }
    Ok(Run { seconds: end - begin, processor_seconds, report })
}

fn guests(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let time_scale = options.time_scale.unwrap_or(if machine.is_emulated() { TIME_SCALE_EMULATED } else { 1 });
    println!("\nthe drive is modelled: {DRIVE}, a second of which takes {time_scale} s");
    let mut figures = Vec::new();
    let mut details = Vec::new();
    println!("\n{:10} {:10} {:>9} {:>11}", "mode", "journal", "seconds", "processor");
    for (mode, faster) in [("writeback", 1.10), ("ordered", 1.10), ("journal", 1.21)] {
        if !mode.starts_with(&options.load) {
            continue;
        }
        let mut rounds: [Vec<f64>; 3] = Default::default();
        for round in 0..options.rounds.min(3) {
            let mut runs = Vec::new();
            for placement in ["storage", "discard", "remote"] {
                eprintln!("data={mode}, {placement}, round {round} (load {})", load());
                let run = postmark(placement, mode, time_scale, options, directory)?;
                println!("{mode:10} {placement:10} {:>9.2} {:>11.2}", run.seconds, run.processor_seconds);
                details.push(json!({
                    "mode": mode, "placement": placement, "seconds": run.seconds,
                    "processor_seconds": run.processor_seconds, "report": run.report,
                }));
                runs.push(run);
            }
            let [storage, discard, remote] = &runs[..] else { return Err("three runs make a round".to_owned()) };
            rounds[0].push(storage.seconds / remote.seconds);
            rounds[1].push(remote.seconds / discard.seconds);
            rounds[2].push(remote.processor_seconds / storage.processor_seconds);
            if round == 0 {
                let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
                let wire = number(&remote.report["remote"]["wire_bytes"]);
                let journal = number(&remote.report["counters"]["journal_bytes_received"]);
                let name = format!("data={mode}: bytes on the wire / journal bytes");
                figures.push(Figure::new(name, wire / journal, "", Limit::AtMost(1.02), Basis::Count));
            }
        }
        let all = |rounds: &[f64]| rounds.iter().map(|ratio| format!("{ratio:.2}")).collect::<Vec<_>>().join(" ");
        for (name, values, limit) in [
            ("throughput, remote / storage", &rounds[0], Limit::AtLeast(faster)),
            ("time, remote / discard", &rounds[1], Limit::AtMost(1.05)),
            ("processor time of VM and host, remote / storage", &rounds[2], Limit::Below(1.10)),
        ] {
            let figure = Figure::new(format!("data={mode}: {name}"), median(values), "", limit, Basis::Time);
            figures.push(figure.note(format!("rounds {}", all(values))));
        }
    }
    Ok((figures, Value::Array(details)))
}

fn percentile(times: &mut [f64], of_hundred: usize) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get((times.len() * of_hundred / 100).min(times.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn blocks(sequence: u64) -> Vec<Block> {
    let content: std::sync::Arc<[u8]> = vec![sequence as u8; BLOCK_BYTES].into();
    (0..COMMIT_BLOCKS).map(|index| Block::new((sequence * COMMIT_BLOCKS + index) as u32, content.clone())).collect()
}

/// Seconds of one commit after another on the server.
async fn commits(options: &ClientOptions, name: &str, count: u64, times: &mut Vec<f64>) -> Result<(), String> {
    let mut client = Client::connect(options).await.map_err(sentence)?;
    // The same each time: the next one follows this one.
    let nonce = [3; 16];
    let epoch = client.begin(name, [1; 16], nonce, 0, BLOCK_BYTES as u32, &[nonce]).await.map_err(sentence)?;
    let (mut sender, mut receiver) = client.into_pipeline();
    for sequence in 1..=count {
        let tail = sequence.saturating_sub(100).max(1);
        let started = Instant::now();
        let batch = Batch { epoch, sequence, tail, blocks: blocks(sequence) };
        sender.send(vec![batch]).await.map_err(sentence)?;
        while receiver.hear(Duration::from_secs(10)).await.map_err(sentence)? != Heard::Durable(sequence) {}
        times.push(started.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The same through an NBD export, as jbd2 does it on a journal device: all but the commit block, a flush, the commit block, a
/// flush.
fn nbd_commits(nbd: &mut Nbd, count: u64, times: &mut Vec<f64>) -> Outcome<()> {
    let block = vec![7; BLOCK_BYTES];
    for sequence in 0..count {
        let at = sequence * COMMIT_BLOCKS % 8000 * BLOCK_BYTES as u64;
        let started = Instant::now();
        let last = COMMIT_BLOCKS - 1;
        nbd.write_all(&(0..last).map(|index| at + index * BLOCK_BYTES as u64).collect::<Vec<_>>(), &block)?;
        nbd.flush()?;
        nbd.write_all(&[at + last * BLOCK_BYTES as u64], &block)?;
        nbd.flush()?;
        times.push(started.elapsed().as_secs_f64());
    }
    Ok(())
}

fn latencies(options: &Options, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(sentence)?;
    let server = Server::start(&directory.join("latency-store"))?;
    let export = directory.join("export.img");
    // Written once, as a journal that is in use: what is measured is not how blocks are allocated.
    std::fs::write(&export, vec![0x5a; 64 << 20]).map_err(sentence)?;
    let mut nbd = match Nbd::serve(&export) {
        Ok(nbd) => nbd,
        Err(why) => {
            let missing = |name| Figure::missing(name, "", Limit::AtMost(0.7), why.clone());
            let figures = vec![missing("commit, remote / NBD: median"), missing("commit, remote / NBD: p99")];
            return Ok((figures, Value::Null));
        }
    };
    let (count, rounds) = if options.quick { (50, 1) } else { (400, options.rounds.max(3)) };
    let (mut p50, mut p99, mut details) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        // In turns, so that what else the disk does meets both.
        for part in 0..4 {
            runtime.block_on(commits(&server.client(), &format!("latency-{round}-{part}"), count / 4, &mut ours))?;
            nbd_commits(&mut nbd, count / 4, &mut theirs)?;
        }
        let all = [&mut ours, &mut theirs].map(|times| (percentile(times, 50), percentile(times, 99)));
        p50.push(all[0].0 / all[1].0);
        p99.push(all[0].1 / all[1].1);
        details
            .push(json!({"remote_ms": [all[0].0 * 1e3, all[0].1 * 1e3], "nbd_ms": [all[1].0 * 1e3, all[1].1 * 1e3]}));
    }
    println!("\ncommits of {COMMIT_BLOCKS} blocks, ms (median, p99): {}", json!(details));
    let figure = |name, values: &[f64]| {
        let rounds = values.iter().map(|ratio| format!("{ratio:.2}")).collect::<Vec<_>>().join(" ");
        Figure::new(name, median(values), "", Limit::AtMost(0.7), Basis::Time).note(format!("rounds {rounds}"))
    };
    let figures = vec![figure("commit, remote / NBD: median", &p50), figure("commit, remote / NBD: p99", &p99)];
    Ok((figures, Value::Array(details)))
}

/// MiB a second of a file that is written from its beginning to its end, and flushed after every 16 MiB.
fn sequential_rate(mut write: impl FnMut(u64) -> std::io::Result<()>, mib: u64) -> Outcome<f64> {
    let started = Instant::now();
    (0..mib).try_for_each(&mut write).map_err(sentence)?;
    Ok(mib as f64 / started.elapsed().as_secs_f64())
}

/// MiB a second of all clients together.
fn clients_rate(runtime: &tokio::runtime::Runtime, client: &ClientOptions, each: u64) -> Outcome<f64> {
    let started = Instant::now();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..CLIENTS).map(|number| tokio::spawn(stream(client.clone(), number, each))).collect();
        for task in tasks {
            task.await.map_err(sentence)??;
        }
        Ok::<(), String>(())
    })?;
    Ok((each * CLIENTS) as f64 / started.elapsed().as_secs_f64())
}

/// A hundred clients on one server against a sequential write of the same disk: this machine's, and that slowed to a SATA
/// SSD's speed (with the server in this process).
fn many_clients(options: &Options, directory: &Path) -> Outcome<Vec<Figure>> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(sentence)?;
    let each: u64 = if options.quick { 1 } else { 4 };
    let mib = each * CLIENTS;
    let chunk = vec![0x5a_u8; (1 << 20) + BLOCK_BYTES];
    // Where direct I/O can take it from.
    let start = chunk.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
    let chunk = &chunk[start..start + (1 << 20)];
    let mut rounds: [Vec<(f64, f64)>; 2] = Default::default();
    for _ in 0..options.rounds.clamp(1, 3) {
        let path = directory.join("sequential");
        let file = File::create(&path).map_err(sentence)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, mib << 20).map_err(sentence)?;
        file.sync_all().map_err(sentence)?;
        let disk = sequential_rate(
            |index| {
                file.write_all_at(chunk, index << 20)?;
                if index % 16 == 15 || index + 1 == mib { file.sync_data() } else { Ok(()) }
            },
            mib,
        )?;
        std::fs::remove_file(&path).map_err(sentence)?;
        let store = directory.join("many");
        let server = Server::start(&store)?;
        rounds[0].push((clients_rate(&runtime, &server.client(), each)?, disk));
        drop(server);
        std::fs::remove_dir_all(&store).map_err(sentence)?;

        let mut paced = Paced { directory: Directory::open(&store).map_err(sentence)?, pace: Pace::new() };
        let mut file = paced.create(1, mib << 20).map_err(sentence)?;
        let disk = sequential_rate(
            |index| {
                file.write_at(index << 20, chunk)?;
                if index % 16 == 15 || index + 1 == mib { file.sync() } else { Ok(()) }
            },
            mib,
        )?;
        drop(file);
        paced.delete(1).map_err(sentence)?;
        let bounds = remote_journal::store::StoreOptions::default();
        let opened = Store::open(paced, bounds, 1).map_err(sentence)?;
        let serving = ServerOptions { insecure: true, ..ServerOptions::new("127.0.0.1:0", &store) };
        let server = remote_journal::Server::with_store(serving, opened).map_err(sentence)?;
        let security = ClientSecurity { insecure: true, ..ClientSecurity::default() };
        let address = server.address().to_string();
        let client = ClientOptions { address, security, timeout: Duration::from_secs(10) };
        rounds[1].push((clients_rate(&runtime, &client, each)?, disk));
        server.stop();
        std::fs::remove_dir_all(&store).map_err(sentence)?;
    }
    let names = ["this machine's disk", "a disk slowed to 500 MB/s"];
    Ok(names
        .into_iter()
        .zip(rounds)
        .map(|(name, rounds)| {
            let ratios: Vec<f64> = rounds.iter().map(|(ours, disk)| ours / disk).collect();
            let rates: Vec<String> = rounds.iter().map(|(ours, disk)| format!("{ours:.0}/{disk:.0}")).collect();
            let name = format!("{CLIENTS} clients together / sequential write, {name}");
            Figure::new(name, median(&ratios), "", Limit::AtLeast(0.8), Basis::Time)
                .note(format!("MiB a second, rounds {}", rates.join(" ")))
        })
        .collect())
}

/// One of many clients: so many MiB, in pipelined batches.
async fn stream(options: ClientOptions, number: u64, mib: u64) -> Result<(), String> {
    let mut client = Client::connect(&options).await.map_err(sentence)?;
    let name = format!("many-{number}");
    let epoch = client.begin(&name, [1; 16], [2; 16], 0, BLOCK_BYTES as u32, &[[2; 16]]).await.map_err(sentence)?;
    let (mut sender, mut receiver) = client.into_pipeline();
    let content: std::sync::Arc<[u8]> = vec![number as u8; BLOCK_BYTES].into();
    let count = mib * 4;
    for sequence in 1..=count {
        let blocks = (0..64).map(|index| Block::new(sequence as u32 * 64 + index, content.clone())).collect();
        sender.send(vec![Batch { epoch, sequence, tail: 1, blocks }]).await.map_err(sentence)?;
    }
    while receiver.hear(Duration::from_secs(60)).await.map_err(sentence)? != Heard::Durable(count) {}
    Ok(())
}

/// Runs all of it; `--load` chooses of `writeback`, `ordered`, `journal` (guests) and `wire` (without one).
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let (mut figures, guests) = guests(options, machine, directory)?;
    let mut details = json!({ "guests": guests });
    if "wire".starts_with(&options.load) {
        let (of_commits, detail) = latencies(options, directory)?;
        figures.extend(of_commits);
        details["commits"] = detail;
        figures.extend(many_clients(options, directory)?);
    }
    Ok((figures, details))
}
