//! A nemesis over a journal server's store and over its network: the real program, the real client library, real files and
//! sockets on loopback. What was acknowledged is fetched whole, or refused with a reason; nobody else is disturbed.
//!
//! `AMBERLOG_NEMESIS_ROUNDS` makes it longer (`make nemesis`), `AMBERLOG_NEMESIS_SEED` begins elsewhere.

mod link;

use link::{Link, Mood};
use remote_journal::client::Heard;
use remote_journal::message::{Batch, Block, JournalStatus};
use remote_journal::{BlockingClient, Client, ClientError, ClientOptions, ClientSecurity};
use rustix::process::{Pid, Signal, kill_process};
pub(crate) use seeded_random::Random;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const BLOCK_BYTES: u32 = 1024;
const LOG_BLOCKS: u32 = 1000;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |text| text.parse().expect("a number"))
}

/// The server, in a process of its own.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    /// Its last words where it does not start.
    fn start(store: &Path, listen: &str) -> Result<Self, String> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let mut process = Command::new(env!("CARGO_BIN_EXE_amberlog-journal-server"))
                .args(["--insecure", "--segment-size", "1", "--space", "48", "--listen", listen, "--store"])
                .arg(store)
                .env("RUST_LOG", "error")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("it can be started");
            let mut line = String::new();
            BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line).expect("read");
            if let Some(address) = line.trim().strip_prefix("listening on ") {
                let address = address.to_owned();
                // Nobody has to read it, but it must not wait for that.
                let mut stderr = process.stderr.take().expect("piped");
                std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
                return Ok(Server { process, address });
            }
            let mut said = String::new();
            process.stderr.take().expect("piped").read_to_string(&mut said).expect("read");
            let code = process.wait().expect("ended").code();
            assert!(code.is_some_and(|code| code != 0 && code != 101), "it ended with {code:?}: {said}");
            // The one before may still have its port.
            if !said.contains("in use") || Instant::now() > deadline {
                return Err(said);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("it is ours");
    }

    fn end(mut self, signal: Signal) {
        self.signal(signal);
        self.process.wait().expect("it ends");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn options(address: &str, timeout_ms: u64) -> ClientOptions {
    ClientOptions {
        address: address.to_owned(),
        security: ClientSecurity { insecure: true, ..ClientSecurity::default() },
        timeout: Duration::from_millis(timeout_ms),
    }
}

/// One log, as its writer knows it.
#[derive(Clone, Debug, Default)]
struct Written {
    epoch: u64,
    nonce: [u8; 16],
    /// Nonces of logs whose beginning was not heard of.
    unheard: HashSet<[u8; 16]>,
    sent: u64,
    acknowledged: u64,
    /// Tails of the batches, from the first on.
    tails: Vec<u64>,
}

fn blocks_of(journal: u64, epoch: u64, sequence: u64) -> Vec<Block> {
    let mut random = Random::new(journal << 40 ^ epoch << 20 ^ sequence);
    (0..=random.below(12))
        .map(|_| {
            let position = random.below(60) as u32;
            let mut content = vec![random.below(256) as u8; BLOCK_BYTES as usize];
            content[..8].copy_from_slice(&(journal << 40 ^ epoch << 20 ^ sequence).to_le_bytes());
            Block::new(position, content.into())
        })
        .collect()
}

/// Begins a log anew and adds to it until enough is acknowledged, or something fails.
async fn write(journal: u64, count: u64, options: &ClientOptions, written: &mut Written) -> Result<(), ClientError> {
    let mut client = Client::connect(options).await?;
    // Tried again under the same name until it is heard of, as a disk does.
    let nonce = written.unheard.iter().next().copied().unwrap_or_else(remote_journal::random);
    written.unheard.insert(nonce);
    let after = [nonce, written.nonce];
    let epoch = client.begin(&name(journal), [journal as u8; 16], nonce, written.epoch, BLOCK_BYTES, &after).await?;
    *written = Written { epoch, nonce, ..Written::default() };
    let (mut sender, mut receiver) = client.into_pipeline();
    let mut random = Random::new(epoch ^ journal << 32);
    while written.acknowledged < count {
        while written.sent < count.min(written.acknowledged + 8) {
            let sequence = written.sent + 1;
            let last_tail = written.tails.last().copied().unwrap_or(1);
            // Journal 0 keeps everything.
            let kept = if journal == 0 { count } else { 5 + random.below(40) };
            let tail = last_tail.max(sequence.saturating_sub(kept)).min(sequence);
            written.tails.push(tail);
            written.sent = sequence;
            sender.send(vec![Batch { epoch, sequence, tail, blocks: blocks_of(journal, epoch, sequence) }]).await?;
        }
        if let Heard::Durable(sequence) = receiver.hear(options.timeout).await? {
            assert!(sequence <= written.sent && sequence >= written.acknowledged);
            written.acknowledged = sequence;
        }
    }
    Ok(())
}

fn name(journal: u64) -> String {
    format!("journal-{journal}")
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(future)
}

/// What a look at one journal gave: it is whole, or why not.
fn look(address: &str, journal: u64, written: &Written) -> Result<(), String> {
    let mut client =
        BlockingClient::connect(&options(address, 20_000)).map_err(|error| format!("not reached: {error}"))?;
    let Some(status) = client.status(&name(journal)).map_err(|error| error.to_string())? else {
        return Err("it is not there".to_owned());
    };
    if status.epoch != written.epoch || status.nonce != written.nonce || !status.is_live {
        let is_unheard = written.unheard.contains(&status.nonce);
        return if is_unheard { Ok(()) } else { Err(format!("another log is there: {status:?}")) };
    }
    let log = client.fetch(&status, LOG_BLOCKS).map_err(|error| error.to_string())?;
    assert_complete(journal, written, &status, &log.blocks);
    Ok(())
}

/// What is fetched is what was sent, and all that was acknowledged.
fn assert_complete(
    journal: u64,
    written: &Written,
    status: &JournalStatus,
    found: &HashMap<u32, std::sync::Arc<[u8]>>,
) {
    let lost = status.last < written.acknowledged;
    assert!(!lost, "journal {journal}: {} were acknowledged and {} are there", written.acknowledged, status.last);
    assert!(status.last <= written.sent);
    let tail = status.last.checked_sub(1).map_or(1, |last| written.tails[last as usize]);
    assert_eq!(status.tail, tail, "journal {journal}: the tail");
    let mut expected = BTreeMap::new();
    for sequence in tail..=status.last {
        for block in blocks_of(journal, written.epoch, sequence) {
            expected.insert(block.position, block.content);
        }
    }
    let found: BTreeMap<_, _> = found.iter().map(|(position, content)| (*position, content.clone())).collect();
    assert!(found == expected, "journal {journal}: other content than was acknowledged");
}

fn files(store: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(store).expect("a directory").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to).expect("made");
    for path in files(from) {
        std::fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("copied");
    }
}

/// Does something to one file of a store; says what.
fn harm(store: &Path, early: &Path, random: &mut Random) -> String {
    let all = files(store);
    let segments: Vec<&PathBuf> = all.iter().filter(|path| path.to_string_lossy().contains("segment-")).collect();
    let path = match (segments.last(), random.below(3)) {
        (None, _) | (_, 0) => &all[random.below(all.len() as u64) as usize],
        (Some(last), 1) => last,
        _ => segments[random.below(segments.len() as u64) as usize],
    };
    let file = || std::fs::OpenOptions::new().read(true).write(true).open(path).expect("there");
    let bytes = std::fs::read(path).expect("read");
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(1, |last| last as u64 + 1);
    let at = random.below(used);
    // Of one that was emptied there is not more to harm.
    let what = match if bytes.is_empty() { 0 } else { random.below(7) } {
        0 => {
            std::fs::remove_file(path).expect("removed");
            "removed".to_owned()
        }
        1 => {
            file().set_len(at).expect("cut");
            format!("cut at {at}")
        }
        2 => {
            let before = early.join(path.file_name().expect("a name"));
            if before.exists() {
                std::fs::copy(before, path).expect("put back");
                "put back from an older copy".to_owned()
            } else {
                std::fs::write(path, b"").expect("emptied");
                "emptied".to_owned()
            }
        }
        3 => {
            let flipped = bytes[at as usize] ^ 1 << random.below(8);
            file().write_all_at(&[flipped], at).expect("written");
            format!("a bit of byte {at} flipped")
        }
        4 => {
            let len = (1 + random.below(60_000)).min(used - at);
            file().write_all_at(&vec![0; len as usize], at).expect("written");
            format!("{len} bytes from {at} on wiped")
        }
        5 => {
            let file = file();
            for at in (0..bytes.len()).step_by(64).filter(|at| bytes[*at..].starts_with(b"AMBL")) {
                file.write_all_at(&[7], at as u64 + 5).expect("written");
            }
            "another version in all of it".to_owned()
        }
        _ => {
            let len = 1 + random.below(9000) as usize;
            let noise: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
            file().write_all_at(&noise, bytes.len() as u64).expect("written");
            format!("{len} bytes appended")
        }
    };
    format!("{}: {what}", path.file_name().expect("a name").to_string_lossy())
}

/// One store: written to, its server killed or stopped, its files harmed, and looked at through three more starts.
fn files_round(seed: u64) -> &'static str {
    let mut random = Random::new(seed);
    let directory = tempfile::tempdir().expect("a directory");
    let (store, early) = (directory.path().join("store"), directory.path().join("early"));
    let journals = 1 + random.below(4);
    let mut written: Vec<Written> = vec![Written::default(); journals as usize];
    let starts = 1 + random.below(3);
    for start in 0..starts {
        let server = Server::start(&store, "127.0.0.1:0").expect("it starts");
        let options = options(&server.address, 20_000);
        run(async {
            let writers: Vec<_> = (0..journals)
                .map(|journal| {
                    let (mut of, options) = (written[journal as usize].clone(), options.clone());
                    let count = 1 + random.below(250);
                    tokio::spawn(async move {
                        let result = write(journal, count, &options, &mut of).await;
                        (of, result)
                    })
                })
                .collect();
            for (journal, writer) in writers.into_iter().enumerate() {
                let (of, result) = writer.await.expect("no panic");
                result.expect("written");
                written[journal] = of;
            }
        });
        server.end(if random.below(2) == 0 { Signal::KILL } else { Signal::TERM });
        if start == 0 {
            copy(&store, &early);
        }
    }
    let harms: Vec<String> = (0..random.below(3)).map(|_| harm(&store, &early, &mut random)).collect();
    let mut before: Option<Vec<bool>> = None;
    for start in 0..3 {
        let server = match Server::start(&store, "127.0.0.1:0") {
            Ok(server) => server,
            Err(said) => {
                assert!(!harms.is_empty() && start == 0, "seed {seed}, start {start}, {harms:?}: {said}");
                return "not started";
            }
        };
        let whole: Vec<bool> = (0..journals)
            .map(|journal| {
                let looked = look(&server.address, journal, &written[journal as usize]);
                assert!(looked.is_ok() || !harms.is_empty(), "seed {seed}: journal {journal}: {looked:?}");
                looked.is_ok()
            })
            .collect();
        assert!(before.is_none_or(|before| before == whole), "seed {seed}, {harms:?}: it changed with start {start}");
        before = Some(whole);
        let mut other = Written::default();
        run(write(100 + start, 30, &options(&server.address, 20_000), &mut other)).expect("others are served");
        look(&server.address, 100 + start, &other).expect("others are served");
        server.end(if random.below(2) == 0 { Signal::KILL } else { Signal::TERM });
    }
    match (harms.is_empty(), before.is_some_and(|whole| whole.iter().all(|whole| *whole))) {
        (true, _) => "unharmed",
        (false, true) => "harmed and whole",
        (false, false) => "refused",
    }
}

#[test]
fn no_harm_to_a_store_s_files_loses_anything_silently() {
    let seed = number("AMBERLOG_NEMESIS_SEED", 1);
    let mut outcomes: BTreeMap<&str, u64> = BTreeMap::new();
    for round in 0..number("AMBERLOG_NEMESIS_ROUNDS", 12) {
        *outcomes.entry(files_round(seed + round)).or_default() += 1;
        if round % 100 == 99 {
            println!("store files, {} rounds: {outcomes:?}", round + 1);
        }
    }
    println!("store files: {outcomes:?}");
}

/// Writers behind a bad network, a server that is stopped, killed and started again.
fn network_round(seed: u64) -> (u64, u64) {
    let mut random = Random::new(seed);
    let directory = tempfile::tempdir().expect("a directory");
    let store = directory.path().join("store");
    let mut server = Server::start(&store, "127.0.0.1:0").expect("it starts");
    let address = server.address.clone();
    let journals = 3;
    let links: Vec<Link> = (0..journals).map(|_| Link::start(&address)).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writers: Vec<_> = (0..journals)
        .map(|journal| {
            let options = options(&links[journal as usize].address, 700);
            let stop = std::sync::Arc::clone(&stop);
            runtime.spawn(async move {
                let mut written = Written::default();
                let (mut acknowledged, mut connections) = (0, 0);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let before = written.acknowledged;
                    let epoch = written.epoch;
                    let _ = write(journal, 400, &options, &mut written).await;
                    acknowledged += written.acknowledged - if epoch == written.epoch { before } else { 0 };
                    connections += 1;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                (written, acknowledged, connections)
            })
        })
        .collect();
    for _ in 0..8 {
        let link = &links[random.below(journals) as usize];
        match random.below(9) {
            0 => link.cut(),
            1 => link.set(Mood::BlackHole),
            2 => link.set(Mood::HalfOpen),
            3 => link.set(Mood::Delay(10 + random.below(300))),
            4 => link.set(Mood::Throttle(20_000 + random.below(300_000))),
            5 => {
                server.signal(Signal::STOP);
                std::thread::sleep(Duration::from_millis(random.below(1500)));
                server.signal(Signal::CONT);
            }
            6 | 7 => {
                for _ in 0..=random.below(3) {
                    server.end(if random.below(2) == 0 { Signal::KILL } else { Signal::TERM });
                    server = Server::start(&store, &address).expect("it starts again");
                }
            }
            _ => links.iter().for_each(|link| link.set(Mood::Good)),
        }
        std::thread::sleep(Duration::from_millis(100 + random.below(700)));
    }
    // The last is cut off in the middle of it.
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    server.end(if random.below(2) == 0 { Signal::KILL } else { Signal::TERM });
    let server = Server::start(&store, "127.0.0.1:0").expect("it starts again");
    let mut total = (0, 0);
    for (journal, writer) in writers.into_iter().enumerate() {
        let (written, acknowledged, connections) = runtime.block_on(writer).expect("no panic");
        total = (total.0 + acknowledged, total.1 + connections);
        if written.epoch > 0 {
            look(&server.address, journal as u64, &written).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
    }
    total
}

#[test]
fn no_network_loses_what_was_acknowledged() {
    let seed = number("AMBERLOG_NEMESIS_SEED", 1);
    let (mut acknowledged, mut connections) = (0, 0);
    for round in 0..number("AMBERLOG_NEMESIS_ROUNDS", 12).div_ceil(6) {
        let of_round = network_round(seed + round);
        (acknowledged, connections) = (acknowledged + of_round.0, connections + of_round.1);
    }
    println!("network: {acknowledged} acknowledgements on {connections} connections");
    assert!(acknowledged > 0);
}
