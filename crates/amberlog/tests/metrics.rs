//! What a daemon says of itself, judged by those who read it: Prometheus' own tool, and a validator of JSON schemas.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

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
        ("> 300", "> 500"),
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
