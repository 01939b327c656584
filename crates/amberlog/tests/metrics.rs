//! What a daemon says of itself, judged by those who read it: Prometheus' own tool, and a validator of JSON schemas.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, STATUS_OK, TestDisk};

#[path = "common/judges.rs"]
mod judges;
use judges::{assert_is_metrics, assert_is_open_metrics, assert_is_status, is_status, page, said};

/// A daemon that ends with the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A configuration with one VM, and metrics at a Unix socket and at a port that is free.
fn serve(directory: &Path) -> (Daemon, PathBuf) {
    let image = directory.join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let shm = directory.join("shm");
    std::fs::create_dir(&shm).unwrap();
    let config = directory.join("amberlog.toml");
    let text = format!(
        "shm = {shm:?}\nrun = {:?}\n[metrics]\nlisten = [{:?}, \"127.0.0.1:0\"]\n[[vm]]\nname = \"db\"\ndisks = [{image:?}]\ncpus = \"0\"\n\
         [[vm]]\nname = \"gone\"\ndisks = [\"/nonexistent/image\"]\n",
        directory.join("run"),
        directory.join("metrics.sock"),
    );
    std::fs::write(&config, text).unwrap();
    let log = directory.join("log");
    let daemon = Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["serve".as_ref(), "--config".as_ref(), config.as_os_str()])
        .env("AMBERLOG_LOG_FORMAT", "json")
        .stdin(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    (Daemon(daemon), log)
}

/// On which processors the threads of a process may run.
fn processors(pid: &Value) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_u64().unwrap())).unwrap();
    let list = |task: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        Some(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned())
    };
    tasks.filter_map(list).collect()
}

/// How many threads of a process have this name.
fn threads(pid: &Value, name: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_u64().unwrap())).unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|of_thread| of_thread.trim_end() == name).count()
}

/// Lines of the log, each an object.
fn lines(log: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(log).unwrap();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn until<T>(what: &str, log: &Path, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not come:\n{}", std::fs::read_to_string(log).unwrap());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn get(mut stream: impl Read + Write, accept: &str) -> String {
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, document) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    document.to_owned()
}

fn status(directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["status", "--json", "--run"])
        .arg(directory.join("run"))
        .output()
        .unwrap()
}

#[test]
fn a_daemon_says_how_it_is_to_prometheus_and_to_programs() {
    let directory = tempfile::tempdir().unwrap();
    let (_daemon, log) = serve(directory.path());
    let address = until("the address", &log, || {
        let lines = lines(&log);
        let said = |line: &Value| line["message"].as_str()?.strip_prefix("metrics on http://").map(str::to_owned);
        lines.iter().find_map(said)
    });
    let answer = until("a VM that waits, and one that cannot be served", &log, || {
        let output = status(directory.path());
        let answer: Value = serde_json::from_slice(&output.stdout).ok()?;
        let state = |index: usize| answer["vms"][index]["state"].as_str().map(str::to_owned);
        (state(0)? == "waiting" && state(1)? == "failed").then_some(answer)
    });
    assert_is_status(&answer);
    // The threads that work for a guest are bound as configured, and nothing else is.
    let mine = std::fs::read_to_string("/proc/self/status").unwrap();
    if !mine.contains("Cpus_allowed_list:\t0\n") {
        let bound = |pid: &Value| processors(pid).into_iter().filter(|list| list == "0").count();
        let (db, gone) = (&answer["vms"][0], &answer["vms"][1]);
        let all = processors(&db["worker_pid"]).len();
        assert!((2..all).contains(&bound(&db["worker_pid"])), "{:?}", processors(&db["worker_pid"]));
        assert_eq!((bound(&gone["worker_pid"]), bound(&db["supervisor_pid"])), (0, 0));
    }
    let text = get(UnixStream::connect(directory.path().join("metrics.sock")).unwrap(), "*/*");
    assert_is_metrics(&text);
    assert!(text.contains("amberlog_vm_state{vm=\"db\",state=\"waiting\"} 1\n"), "{text}");
    assert!(text.contains("amberlog_vm_state{vm=\"gone\",state=\"failed\"} 1\n"), "{text}");
    assert!(text.contains("amberlog_disk_size_bytes{vm=\"db\",disk=\"disk0\"} 1048576\n"), "{text}");
    let address = address.trim_end_matches("/metrics");
    assert_is_open_metrics(&get(TcpStream::connect(address).unwrap(), "application/openmetrics-text;version=1.0.0"));
    // Log lines are objects that name their VM.
    let lines = lines(&log);
    assert!(lines.iter().any(|line| line["vm"] == "gone" && line["level"] == "error"), "{lines:?}");
}

/// Where the image's journal begins, and its superblock.
fn journal(image: &Path) -> (u64, Vec<u8>) {
    let bytes = std::fs::read(image).unwrap();
    let begin = [0xC0, 0x3B, 0x39, 0x98, 0, 0, 0, 4];
    let found = bytes.chunks(4096).enumerate().find(|(_, block)| block.starts_with(&begin));
    let (index, block) = found.expect("mke2fs has made a journal");
    (index as u64 * 4096, block.to_vec())
}

/// The guest is a front end that opens its journal and commits nothing; it opens it anew with a feature with which it cannot be durable by age.
#[test]
fn whether_durable_within_is_in_force_is_waited_for_and_seen() {
    let directory = tempfile::tempdir().unwrap();
    let shm = tempfile::Builder::new().prefix("amberlog-promise-").tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| directory.path().join(name);
    let image = at("disk.img");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let words = ["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"];
    assert!(
        Command::new("mke2fs")
            .args(words)
            .arg(&image)
            .status()
            .unwrap_or_else(|error| panic!("mke2fs: {error}"))
            .success()
    );
    let config = format!(
        "shm = {:?}\nrun = {:?}\n[metrics]\nlisten = [{:?}]\n[[vm]]\nname = \"db\"\ndisks = [\"{},placement=copy\"]\n",
        shm.path(),
        at("run"),
        at("metrics.sock"),
        image.display()
    );
    std::fs::write(at("amberlog.toml"), config).unwrap();
    let _daemon = Daemon(
        Command::new(env!("CARGO_BIN_EXE_amberlog"))
            .args(["serve".as_ref(), "--config".as_ref(), at("amberlog.toml").as_os_str()])
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(at("log")).unwrap())
            .spawn()
            .unwrap(),
    );
    let status = || serde_json::from_slice::<Value>(&status(directory.path()).stdout).unwrap_or_default();
    let socket = until("a VM that waits", &at("log"), || {
        let vm = &status()["vms"][0];
        (vm["state"] == "waiting").then(|| vm["sockets"][0].as_str().map(PathBuf::from)).flatten()
    });
    let mut front_end =
        FrontEnd::connect(&socket, GuestRam::new(2 << 20).unwrap(), FrontEndOptions::default()).unwrap();
    front_end.start().unwrap();
    let mut disk = TestDisk::new(front_end);
    let (place, empty) = journal(&image);
    // `s_start` and `s_feature_incompat`.
    let mut superblock = |start: u8, features: u8| {
        let mut block = empty.clone();
        (block[0x1F], block[0x2B]) = (start, features);
        assert_eq!(disk.write(place, &block).unwrap(), STATUS_OK);
    };
    let ask = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_amberlog"));
        command.args(words).arg("--run").arg(at("run")).output().unwrap()
    };
    let wish = |within: &str, patience: &str| {
        ask(&["placement", "db", "disk0", "copy", "--durable-within", within, "--patience", patience])
    };
    #[track_caller]
    fn is_done(output: &Output, when: &str) {
        let done = format!("db, disk0: copy ({when})\n");
        assert_eq!(
            (output.status.code(), String::from_utf8_lossy(&output.stdout)),
            (Some(0), done.into()),
            "{}",
            said(output)
        );
    }
    let assert_seen = |cell: &str, is_unmet: &str| {
        let answer = status();
        assert_is_status(&answer);
        let table = said(&ask(&["status"]));
        assert!(table.lines().any(|line| line.contains(&format!(" {cell}  "))), "{cell}: {table}");
        let text = get(UnixStream::connect(at("metrics.sock")).unwrap(), "*/*");
        let of = "amberlog_disk_durable_within_unmet{vm=\"db\",disk=\"disk0\"}";
        assert!(text.contains(&format!("{of} {is_unmet}\n")), "{text}");
        answer["vms"][0]["disks"][0].clone()
    };

    // Nothing is mounted.
    is_done(&wish("5", "60"), "from the next mount on");
    assert_seen("5 s: not in use", "0");
    superblock(1, 0);
    is_done(&wish("0", "60"), "done");
    let disk = assert_seen("0 s", "0");
    assert_eq!(
        (&disk["durability"]["within_s"], &disk["durable_within_unmet_for_s"]),
        (&Value::from(0), &Value::Null),
        "{disk}"
    );

    superblock(0, 0);
    // With fast commits.
    superblock(1, 0x20);
    let late = wish("5", "2");
    let sentence = "disk disk0: durable-within=5 is wished from now on, and is not in force in 2 s: its journal is only held, and not made durable by age";
    assert!(late.status.code() == Some(1) && said(&late).contains(sentence), "{}", said(&late));
    let disk = assert_seen("5 s: not in force", "1");
    let seconds = disk["durable_within_unmet_for_s"].as_u64();
    assert!(seconds.is_some_and(|seconds| (1..60).contains(&seconds)), "it is counted while nobody asks: {disk}");
    // Whoever asked goes, and nobody waits in his place, in the worker nor in the daemon.
    let vm = status()["vms"][0].clone();
    let askers = || ["worker_pid", "supervisor_pid"].map(|pid| threads(&vm[pid], "asker"));
    let until_askers = |expected: [usize; 2]| {
        until("those who ask", &at("log"), || (askers() == expected).then_some(()));
    };
    until_askers([0, 0]);
    let patient = Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["placement", "db", "disk0", "copy", "--durable-within", "5", "--patience", "600", "--run"])
        .arg(at("run"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let patient = Daemon(patient);
    until_askers([1, 1]);
    drop(patient);
    until_askers([0, 0]);
    assert_seen("5 s: not in force", "1");
    is_done(&wish("never", "60"), "done");
    assert!(said(&ask(&["status"])).lines().any(|line| line.contains(" -  ")));
}

#[test]
fn the_judges_can_say_no() {
    let lost = |state: &str| {
        let vm = serde_json::json!({"schema": 1, "vm": "x", "state": state, "state_text": "", "pid": null, "vmm_pid": null,
            "worker_pid": null, "supervisor_pid": 1, "restarts": 0, "pending": null, "disks": []});
        is_status(&serde_json::json!({"schema": 1, "vms": [vm]})).status.success()
    };
    assert!(lost("failed") && !lost("lost"));
    assert!(!judges::metrics("amberlog_x{a=\"b} 1\n").status.success());
    assert!(!judges::open_metrics("# TYPE amberlog_x counter\namberlog_x_total 1\n").status.success(), "it has no end");
}

#[test]
fn the_alert_rules_are_understood_and_say_what_they_should() {
    let place = page("packaging/prometheus");
    let promtool = |words: &[&str], directory: &Path| {
        Command::new("promtool").args(words).current_dir(directory).output().unwrap_or_else(judges::is_missing)
    };
    let output = promtool(&["check", "rules", "amberlog.rules.yml"], &place);
    assert!(output.status.success(), "{}", said(&output));
    let output = promtool(&["test", "rules", "amberlog.test.yml"], &place);
    assert!(output.status.success(), "{}", said(&output));
    // With each alert's threshold or duration gone wrong, the tests say so.
    let rules = std::fs::read_to_string(place.join("amberlog.rules.yml")).unwrap();
    let tests = std::fs::read_to_string(place.join("amberlog.test.yml")).unwrap();
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        let is_raised = format!("alertname: {alert}\n        exp_alerts:\n");
        assert!(tests.contains(&is_raised), "{alert} is raised by no test");
    }
    let restarting = "state=\"restarting\"} == 1\n        for: ";
    for (from, to) in [
        ("== 0", "== 2"),
        ("for: 15m", "for: 5m"),
        ("> 3 *", "> 2 *"),
        ("> 3 *", "> 30 *"),
        ("_seconds + 10", "_seconds + 12"),
        ("_seconds + 10\n        for: 2m", "_seconds + 10\n        for: 0m"),
        ("unmet == 1", "unmet == 2"),
        ("unmet == 1\n        for: 2m", "unmet == 1\n        for: 0m"),
        ("> 0.5", "> 5"),
        ("> 0.05", "> 0.5"),
        ("> 3\n", "> 300\n"),
        ("state=\"held\"} == 1", "state=\"held\"} == 2"),
        ("stuck == 1", "stuck == 2"),
        ("stuck == 1\n        for: 5m", "stuck == 1\n        for: 3m"),
        (&format!("{restarting}1m"), &format!("{restarting}0m")),
    ] {
        assert!(rules.contains(from), "{from}");
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("amberlog.rules.yml"), rules.replace(from, to)).unwrap();
        std::fs::copy(place.join("amberlog.test.yml"), directory.path().join("amberlog.test.yml")).unwrap();
        assert!(!promtool(&["test", "rules", "amberlog.test.yml"], directory.path()).status.success(), "{from}");
    }
}
