//! Placement `remote`: real guests whose journals go to a journal server, while guests, QEMU, amberlog, the server and the
//! network between them die in several orders.
//!
//! The kernels that these tests run on need not have `tc netem`, so delays and cuts are made by a proxy in the test.
//!
//! `AMBERLOG_ROUNDS=3` and `--include-ignored` (`make crash`) go through all journaling modes and ends.

mod network;
mod two_hosts;
mod worker;

use crate::support::*;
use guest_kit::image::{ExtRecipe, FileSystem, Journal, copy_image, journal_device};
use guest_kit::workload::{Mode, STREAMS, Workload};
use guest_kit::{Accelerator, Guest, Reported, Signal};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use test_storage::TestStorage;

/// A journal server in a process of its own.
pub(super) struct JournalServer {
    process: Child,
    pub address: String,
}

impl JournalServer {
    pub fn start(store: &Path, listen: &str, more: &[&str]) -> Self {
        Self::start_in(None, store, listen, more)
    }

    fn start_in(namespace: Option<&str>, store: &Path, listen: &str, more: &[&str]) -> Self {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let mut command = match namespace {
                None => Command::new(amberlog()),
                Some(namespace) => {
                    let mut command = Command::new("ip");
                    command.args(["netns", "exec", namespace]).arg(amberlog());
                    command
                }
            };
            let mut process = command
                .args(["journal-server", "--insecure", "--segment-size", "4", "--listen", listen, "--store"])
                .arg(store)
                .args(more)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .expect("it can be started");
            let mut line = String::new();
            let stdout = process.stdout.take().expect("piped");
            BufReader::new(stdout).read_line(&mut line).expect("its address can be read");
            if let Some(address) = line.trim().strip_prefix("listening on ") {
                return JournalServer { process, address: address.to_owned() };
            }
            // The one before may still hold its port.
            let _ = process.wait();
            assert!(Instant::now() < deadline, "the journal server did not start");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn kill(mut self) -> String {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it ends");
        self.address.clone()
    }
}

impl Drop for JournalServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Passes connections on, late, or not at all any more.
struct Proxy {
    address: String,
    is_cut: Arc<AtomicBool>,
    delay_ms: Arc<AtomicU64>,
}

impl Proxy {
    fn start(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let (is_cut, delay_ms) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (to, cut, delay) = (to.to_owned(), Arc::clone(&is_cut), Arc::clone(&delay_ms));
        std::thread::spawn(move || {
            for from in listener.incoming().flatten() {
                let Ok(onward) = TcpStream::connect(&to) else { continue };
                for (a, b) in [(&from, &onward), (&onward, &from)] {
                    let (a, b) = (a.try_clone().expect("cloned"), b.try_clone().expect("cloned"));
                    let (cut, delay) = (Arc::clone(&cut), Arc::clone(&delay));
                    std::thread::spawn(move || pass_on(a, b, &cut, &delay));
                }
            }
        });
        Proxy { address, is_cut, delay_ms }
    }
}

/// A cut network swallows everything and says nothing.
fn pass_on(mut from: TcpStream, mut to: TcpStream, cut: &AtomicBool, delay_ms: &AtomicU64) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let got = match from.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(got) => got,
        };
        std::thread::sleep(Duration::from_millis(delay_ms.load(Ordering::Relaxed)));
        if !cut.load(Ordering::Relaxed) && to.write_all(&bytes[..got]).is_err() {
            break;
        }
    }
    // Nor does it say that the other end has hung up.
    while cut.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// A server that nobody cuts off is not given up, however long the machine stands still; one that dies is missed at once.
pub(super) fn remote_disk(image: &Path, address: &str) -> Vec<OsString> {
    remote_disk_within(20_000, image, address)
}

/// The same with a server that is given up after so many milliseconds without a word, also where it is the machine that stood still.
pub(super) fn remote_disk_within(timeout_ms: u32, image: &Path, address: &str) -> Vec<OsString> {
    let mut words = vec!["--remote-insecure".into(), "--remote-timeout".into(), timeout_ms.to_string().into()];
    words.extend(disk_with(image, &format!(",placement=remote={address}/db")));
    words
}

fn recover(image: &Path, address: &str, more: &[&str]) -> std::process::Output {
    let mut words: Vec<OsString> = vec!["recover".into(), "--json".into(), "--remote-insecure".into(), "--disk".into()];
    words.extend([image.into(), "--remote".into(), format!("{address}/db").into()]);
    words.extend(more.iter().map(Into::into));
    amberlog_with(words)
}

#[track_caller]
pub(super) fn recovered(image: &Path, address: &str, more: &[&str]) -> serde_json::Value {
    let deadline = Instant::now() + Duration::from_secs(90);
    let output = loop {
        let output = recover(image, address, more);
        // A worker whose supervisor was killed as it began ends when it has heard from the server, or has not.
        let waits = text(&output.stdout).contains("which another amberlog or a VM it started uses");
        if !waits || Instant::now() >= deadline {
            break output;
        }
    };
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it prints JSON")
}

#[track_caller]
pub(super) fn assert_work_is_there(load: &Workload, file_system: &FileSystem, reported: &Reported) {
    assert_consistent(file_system);
    let evidence = load.check(file_system, reported).unwrap();
    assert!(evidence.faults.is_empty(), "{:?}", evidence.faults);
    assert!(evidence.acknowledged > 20);
}

/// Waits until something is acknowledged that was not when this was called, on every stream.
#[track_caller]
pub(super) fn more_is_acknowledged(guest: &mut Guest, more: u64) {
    for stream in STREAMS {
        let last = guest.acknowledged(stream).last.unwrap_or(0);
        guest.wait_acknowledged(stream, last + more, LIMIT).unwrap();
    }
}

#[track_caller]
pub(super) fn wait_for_log(guest: &Guest, what: &str, times: usize) {
    let deadline = Instant::now() + LIMIT;
    while guest.stderr().matches(what).count() < times {
        assert!(Instant::now() < deadline, "'{what}' was not logged {times} times:\n{}", guest.stderr());
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(super) const TO_SERVER: &str = "the journal goes to";
pub(super) const TO_STORAGE: &str = "the journal is complete in its own place";

/// Waits until the log is on its server, or on storage, however often it went from one to the other before.
#[track_caller]
fn wait_until_on_server(guest: &Guest, wanted: bool) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let said = guest.stderr();
        if (said.rfind(TO_SERVER) > said.rfind(TO_STORAGE)) == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "the log is not there, {wanted}:\n{said}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until so much more was acknowledged while the log was on its server all the time.
#[track_caller]
pub(super) fn more_is_acknowledged_on_server(guest: &mut Guest, more: u64) {
    let fall_backs = |guest: &Guest| guest.stderr().matches(TO_STORAGE).count();
    loop {
        let before = fall_backs(guest);
        wait_until_on_server(guest, true);
        more_is_acknowledged(guest, more);
        if fall_backs(guest) == before {
            return;
        }
    }
}

/// Two clients of one server, each with a secret: nothing of `db` is the other's to read, to end or to take.
fn assert_others_cannot_touch(image: &Path, address: &str, other: &str) {
    let before = std::fs::read(image).unwrap();
    let refused = recover(image, address, &["--remote-secret", other]);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("no journal db for this client"), "{}", text(&refused.stderr));
    let name = format!("{address}/db");
    for words in [&["list"][..], &["inspect"], &["delete", "--force"]] {
        let more = ["--remote-insecure", "--remote-secret", other, "--remote", &name];
        let output = amberlog_with([&["journal-server"], words, &more].concat());
        let said = text(&output.stdout) + &text(&output.stderr);
        let expected = if words == ["list"] { "no journals" } else { "there is no journal" };
        assert!(said.contains(expected), "{words:?}: {said}");
    }
    let run = ["run", "--remote-insecure", "--remote-secret", other, "--disk"].map(OsString::from).into_iter();
    let mut disk = OsString::from(image);
    disk.push(format!(",placement=remote={name}"));
    let output = amberlog_with(run.chain([disk, "--".into(), "true".into()]));
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let unknown = recover(image, address, &[]);
    assert!(unknown.status.code() != Some(0) && text(&unknown.stderr).contains("not proven"), "{unknown:?}");
    assert!(std::fs::read(image).unwrap() == before, "the image was changed");
}

/// QEMU dies; then both die, and the log comes from the server: onto the image, by `recover` and by the next run.
#[test]
fn the_log_comes_from_the_server_when_amberlog_is_killed() {
    accelerators().into_iter().for_each(comes_from_the_server);
}

fn comes_from_the_server(accelerator: Accelerator) {
    let bench = Bench::new();
    let (ann, bob) = ("ann 0123456789abcdef0", "bob abcdefghijklmnop1");
    for (name, content) in [("ann", ann.to_owned()), ("bob", bob.to_owned()), ("all", format!("{ann}\n{bob}\n"))] {
        std::fs::write(bench.path(name), content).unwrap();
    }
    let [ann, bob, all] = ["ann", "bob", "all"].map(|name| bench.path(name).to_str().unwrap().to_owned());
    let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &["--secrets", &all]);
    let remote_disk = |image: &Path, address: &str| {
        let mut words = vec!["--remote-secret".into(), OsString::from(&ann)];
        words.extend(remote_disk(image, address));
        words
    };
    let as_ann = ["--remote-secret", &ann];
    let image = bench.path("image");
    let modes = [Mode::Journal, Mode::Ordered, Mode::Writeback];
    for (round, mode) in modes.into_iter().enumerate().take(rounds(1) as usize) {
        let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
        let load = Workload::new(31 + round as u64).without_postmark().mode(mode);
        let mut spec = bench.spec("remote", load.script(), remote_disk(&image, &server.address));
        spec.accelerator = Some(accelerator);
        let mut guest = Guest::start(spec).unwrap();
        more_is_acknowledged(&mut guest, 5);
        wait_for_log(&guest, TO_SERVER, 1);
        if round == 1 {
            let reported = kill(&mut guest);
            let report = bench.report();
            assert_eq!(report.status(0), "recovered");
            let remote = &report.disk(0)["remote"];
            assert_eq!((&remote["returns"], &remote["fall_backs"]), (&1.into(), &0.into()), "{remote}");
            let (wire, blocks) = (remote["wire_bytes"].as_u64().unwrap(), remote["block_bytes"].as_u64().unwrap());
            assert!(blocks > 0 && wire * 100 <= blocks * 102, "{remote}");
            assert_work_is_there(&load, &file_system, &reported);
            continue;
        }
        assert_eq!(guest.kill_all().unwrap().signal_number(), Some(9));
        let reported = guest.final_report();
        // Storage says where the log is, and that it is not lost. So does who finishes what is in tmpfs.
        assert_eq!(journal_superblock(&image).errno, -5);
        let area = bench.recover_area();
        let sentence = area["elsewhere"][0]["sentence"].as_str().unwrap_or_default();
        assert!(sentence.contains("is on a journal server, and not finished by this"), "{area}");
        let copy = bench.path("copy");
        copy_image(&image, &copy).unwrap();
        let unrecovered = load.check(&FileSystem::whole(copy.clone()), &reported);
        assert!(unrecovered.is_err() || !unrecovered.unwrap().faults.is_empty(), "it would have been there anyway");
        copy_image(&image, &copy).unwrap();
        let without =
            Guest::launch(bench.spec("unaware", "true", disk(&copy))).and_then(|mut g| g.wait_end(LIMIT)).unwrap();
        assert_eq!(without.code(), Some(1), "an amberlog that does not know of the server must not serve the image");
        let without = amberlog_with(["recover".as_ref(), "--disk".as_ref(), copy.as_os_str()]);
        assert_eq!(without.status.code(), Some(3), "{}", text(&without.stderr));
        if round == 0 {
            assert_others_cannot_touch(&image, &server.address, &bob);
            let dry = recovered(&image, &server.address, &[&as_ann[..], &["--dry-run"]].concat());
            let real = recovered(&image, &server.address, &as_ann);
            assert_eq!((&real["status"], &real["transactions"]), (&"recovered".into(), &dry["transactions"]));
            assert!(real["transactions"].as_u64() > Some(0), "{real}");
            // What was recovered is kept until the next log begins: a copy of the same moment still can be.
            let kept = recovered(&copy, &server.address, &as_ann);
            assert_eq!(kept["transactions"], real["transactions"], "{kept}");
        } else {
            let script = format!(
                "mount -t ext4 /dev/vda /mnt || fail mount
                {NOTHING_TO_REPLAY}
                umount /mnt"
            );
            let mut spec = bench.spec("next", script, remote_disk(&image, &server.address));
            spec.at_end = guest_kit::AtEnd::PowerOff;
            let mut guest = Guest::start(spec).unwrap();
            assert!(guest.stderr().contains("brought home what an earlier run left"), "{}", guest.stderr());
            assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0);
            guest.wait_end(LIMIT).unwrap();
        }
        assert_eq!(journal_superblock(&image).errno, 0);
        assert_work_is_there(&load, &file_system, &reported);
    }
}

/// The server dies and comes back, the network is slow, is cut and comes back, the server is full; then all die.
#[test]
fn a_guest_does_not_notice_that_its_server_goes_and_comes() {
    let bench = Bench::new();
    let store = bench.path("store");
    let server = JournalServer::start(&store, "127.0.0.1:0", &[]);
    let proxy = Proxy::start(&server.address);
    let (image, journal) = (bench.path("image"), bench.path("journal"));
    journal_device(&journal, 16, 4096).unwrap();
    let recipe = ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(96, 0) };
    let file_system = recipe.make(&image).unwrap();
    let load = Workload::new(41).without_postmark().device("-o journal_path=/dev/vdb /dev/vda");
    let mut words = remote_disk_within(1500, &image, &proxy.address);
    words.extend(["--journal-disk".into(), journal.clone().into()]);
    let mut guest = Guest::start(bench.spec("comes-and-goes", load.script(), words)).unwrap();
    more_is_acknowledged(&mut guest, 5);
    wait_until_on_server(&guest, true);

    let address = server.kill();
    wait_until_on_server(&guest, false);
    more_is_acknowledged(&mut guest, 3);
    let server = JournalServer::start(&store, &address, &[]);
    more_is_acknowledged_on_server(&mut guest, 3);

    proxy.delay_ms.store(60, Ordering::Relaxed);
    more_is_acknowledged(&mut guest, 2);
    proxy.is_cut.store(true, Ordering::Relaxed);
    wait_until_on_server(&guest, false);
    more_is_acknowledged(&mut guest, 3);
    proxy.is_cut.store(false, Ordering::Relaxed);
    proxy.delay_ms.store(0, Ordering::Relaxed);
    more_is_acknowledged_on_server(&mut guest, 3);

    // First the server, then amberlog and QEMU in the middle of falling back.
    let address = server.kill();
    assert_eq!(guest.kill_all().unwrap().signal_number(), Some(9));
    let reported = guest.final_report();
    let server = JournalServer::start(&store, &address, &[]);
    let journal = journal.to_str().unwrap();
    let first = recovered(&image, &server.address, &["--journal", journal]);
    assert_eq!(first["status"], "recovered", "{first}");
    assert_work_is_there(&load, &file_system, &reported);
    let again = recovered(&image, &server.address, &["--journal", journal]);
    assert_eq!(again["status"], "clean", "{again}");
}

/// The host is lost with all that storage had in its cache: what the guest was told is on the server, and what the server
/// let go of was flushed.
#[test]
#[ignore = "long: make crash"]
fn a_host_that_is_lost_takes_nothing_along_that_was_acknowledged() {
    let _alone = alone_behind_fuse();
    for (round, mode) in [Mode::Journal, Mode::Ordered].into_iter().enumerate().take(rounds(1) as usize) {
        let bench = Bench::new();
        let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]);
        let image = bench.path("image");
        // A small journal: its tail moves while this lasts.
        let file_system = ExtRecipe::ext4(96, 4).make(&image).unwrap();
        let storage = match TestStorage::new(&image) {
            Ok(storage) => storage,
            Err(error) => return eprintln!("left out: {error}"),
        };
        storage.remember_unflushed();
        let load = Workload::new(61 + round as u64).mode(mode);
        let words = remote_disk(&storage.image(), &server.address);
        let mut guest = Guest::start(bench.spec("lost", load.script(), words)).unwrap();
        wait_for_log(&guest, TO_SERVER, 1);
        more_is_acknowledged(&mut guest, 20);
        assert_eq!(guest.kill_all().unwrap().signal_number(), Some(9));
        let reported = guest.final_report();
        storage.lose_power().unwrap();
        drop(storage);
        assert_eq!(journal_superblock(&image).errno, -5);
        let done = recovered(&image, &server.address, &[]);
        assert_eq!(done["status"], "recovered", "{done}");
        assert_work_is_there(&load, &file_system, &reported);
    }
}

/// Storage is a small tmpfs: the server says that it is full, and the guest goes on.
#[test]
#[ignore = "long: make crash"]
fn a_full_server_sends_the_journal_back_to_storage() {
    let bench = Bench::new();
    let store = tempfile::Builder::new().prefix("amberlog-store-").tempdir_in("/dev/shm").unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=6m", "none"])
        .arg(store.path())
        .status()
        .is_ok_and(|status| status.success());
    let more: &[&str] = if mounted { &[] } else { &["--space", "6"] };
    let server = JournalServer::start(&store.path().join("s"), "127.0.0.1:0", more);
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 16).make(&image).unwrap();
    let load = Workload::new(51);
    let mut guest = Guest::start(bench.spec("full", load.script(), remote_disk(&image, &server.address))).unwrap();
    wait_for_log(&guest, "full", 1);
    wait_for_log(&guest, TO_STORAGE, 1);
    more_is_acknowledged(&mut guest, 3);
    guest.signal(Signal::KILL).unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    drop(guest);
    let done = recovered(&image, &server.address, &[]);
    assert_eq!(done["status"], "recovered", "{done}");
    assert_work_is_there(&load, &file_system, &reported);
    drop(server);
    if mounted {
        let unmounted = Command::new("umount").arg("-l").arg(store.path()).status().unwrap();
        assert!(unmounted.success());
    }
}

/// The guest resets itself: its log is completed on storage, where its next kernel replays it; and goes to the server anew.
#[test]
#[ignore = "long: make crash"]
fn a_reset_leaves_the_log_to_the_next_kernel() {
    let bench = Bench::new();
    let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]);
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let layout = appended(3);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         boot=$(ls -d /mnt/boot-* 2>/dev/null | wc -l)
         : >/mnt/boot-$boot
         sync
         {}
         mark boot $boot
         [ $boot = 2 ] || echo b >/proc/sysrq-trigger
         sleep 1000",
        record_writer("/mnt/stream-$boot", "stream-$boot", &layout, "--count 20")
    );
    let mut spec = bench.spec("reset", script, remote_disk(&image, &server.address));
    spec.reboots = true;
    let mut guest = Guest::start(spec).unwrap();
    let seen = guest.await_report("no third boot", LIMIT, |reported| {
        let failed = reported.exit_code.map(Err);
        failed.or_else(|| reported.marks.contains(&"boot 2".to_owned()).then_some(Ok(())))
    });
    assert_eq!(seen.unwrap(), Ok(()), "{}", guest.stderr());
    wait_for_log(&guest, TO_SERVER, 3);
    assert_eq!(guest.kill_all().unwrap().signal_number(), Some(9));
    let reported = guest.final_report();
    let done = recovered(&image, &server.address, &[]);
    assert!(["recovered", "clean"].contains(&done["status"].as_str().unwrap()), "{done}");
    assert_consistent(&file_system);
    for boot in 0..3 {
        let stream = format!("stream-{boot}");
        assert_records(&file_system, &format!("/{stream}"), &stream, &layout, &reported);
    }
}

/// `journal-server list`, `inspect` and `delete`, by hand.
#[test]
fn a_servers_journals_are_listed_inspected_and_deleted() {
    let bench = Bench::new();
    let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]);
    let ask = |words: &[&str]| {
        let words = [&["journal-server"], words, &["--remote-insecure"]].concat();
        let output = amberlog_with(words);
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    };
    let (all, one) = (server.address.clone(), format!("{}/db", server.address));
    assert_eq!(ask(&["list", "--remote", &all]), (0, "no journals\n".to_owned(), String::new()));
    let options = remote_journal::ClientOptions {
        address: all.clone(),
        security: remote_journal::ClientSecurity { insecure: true, ..Default::default() },
        timeout: Duration::from_secs(5),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = remote_journal::Client::connect(&options).await.unwrap();
        let epoch = client.begin("db", [0x11; 16], [2; 16], 0, 1024, &[]).await.unwrap();
        let (mut sender, mut receiver) = client.into_pipeline();
        let block = remote_journal::message::Block::new(1, vec![9; 1024].into());
        let batch = remote_journal::message::Batch { epoch, sequence: 1, tail: 1, blocks: vec![block] };
        sender.send(vec![batch]).await.unwrap();
        receiver.hear(Duration::from_secs(5)).await.unwrap();
    });
    let (code, stdout, _) = ask(&["list", "--remote", &all]);
    assert!(code == 0 && stdout.starts_with("db: epoch 1, live, 1 batches"), "{stdout}");
    let (code, stdout, _) = ask(&["inspect", "--json", "--remote", &one]);
    let shown: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &shown["schema"], &shown["live"], &shown["damage"]), (0, &1.into(), &true.into(), &().into()));
    assert_eq!((&shown["owner"], &shown["last"]), (&"11111111-1111-1111-1111-111111111111".into(), &1.into()));
    let (code, _, stderr) = ask(&["delete", "--remote", &one]);
    assert!(code != 0 && stderr.contains("--force"), "{stderr}");
    let (code, stdout, stderr) = ask(&["delete", "--force", "--remote", &one]);
    assert_eq!((code, stdout.as_str()), (0, "db is deleted\n"), "{stderr}");
    let (code, _, stderr) = ask(&["inspect", "--remote", &one]);
    assert!(code == 1 && stderr.contains("there is no journal db"), "{stderr}");
    assert_eq!(ask(&["inspect", "--remote", &all]).0, 2, "which one?");
    assert_eq!(ask(&["list", "--remote", "nowhere"]).0, 2);
    let without = amberlog_with(["journal-server", "list", "--remote", &all]);
    assert!(!without.status.success() && text(&without.stderr).contains("--remote-ca"), "{}", text(&without.stderr));
}

pub(super) trait SignalNumber {
    fn signal_number(&self) -> Option<i32>;
}

impl SignalNumber for std::process::ExitStatus {
    fn signal_number(&self) -> Option<i32> {
        std::os::unix::process::ExitStatusExt::signal(self)
    }
}
