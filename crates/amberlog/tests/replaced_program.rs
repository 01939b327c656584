//! What workers are started of: the program that was judged, whatever comes to lie in its place.

use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that ends with the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ask(run: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_amberlog")).args(words).arg("--run").arg(run).output().unwrap()
}

/// The VM's entry, as soon as another worker than this one serves it.
fn served_by_another(run: &Path, than: Option<u64>, log: &Path) -> u64 {
    let deadline = Instant::now() + LIMIT;
    loop {
        let output = ask(run, &["status", "--json", "db"]);
        let entry: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let worker = entry["worker_pid"].as_u64();
        if let Some(worker) = worker.filter(|_| entry["state"] == "waiting" && worker != than) {
            return worker;
        }
        assert!(Instant::now() < deadline, "{entry}\n{}", std::fs::read_to_string(log).unwrap());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn kill(pid: u64, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// What a supervisor of before asks, which goes on with state 4: this program goes on with that.
#[test]
fn a_program_of_before_may_be_replaced() {
    let output = Command::new(env!("CARGO_BIN_EXE_amberlog")).args(["worker", "--state-format"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said.trim().split_once(' '), Some(("4", env!("CARGO_PKG_VERSION"))), "{said}");
}

#[test]
fn workers_are_of_the_program_that_was_judged() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (program, run, log) = (path("amberlog"), path("run"), path("log"));
    std::fs::copy(env!("CARGO_BIN_EXE_amberlog"), &program).unwrap();
    std::fs::File::create(path("disk.img")).unwrap().set_len(1 << 20).unwrap();
    std::fs::create_dir(path("shm")).unwrap();
    let text =
        format!("shm = {:?}\nrun = {run:?}\n[[vm]]\nname = \"db\"\ndisks = [{:?}]\n", path("shm"), path("disk.img"));
    std::fs::write(path("amberlog.toml"), text).unwrap();
    let daemon = Command::new(&program)
        .args(["serve".as_ref(), "--config".as_ref(), path("amberlog.toml").as_os_str()])
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut daemon = Daemon(daemon);
    let first = served_by_another(&run, None, &log);
    let upgraded = ask(&run, &["upgrade"]);
    assert!(upgraded.status.success(), "{upgraded:?}");
    let second = served_by_another(&run, Some(first), &log);
    // Something else is installed, and nobody has asked for it.
    std::fs::remove_file(&program).unwrap();
    std::fs::write(&program, "no program at all").unwrap();
    kill(second, rustix::process::Signal::KILL);
    let third = served_by_another(&run, Some(second), &log);
    let refused = ask(&run, &["upgrade"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert_eq!(served_by_another(&run, None, &log), third, "it was refused, and something was changed");
    // A program that says that it knows other states only; and one of before, which knows another question, and would take tables
    // for damaged.
    // It is started by a descriptor that it does not inherit, so a script would not find itself: this is a shell, which takes its first argument for a
    // script where it is.
    std::fs::remove_file(&program).unwrap();
    std::fs::copy("/bin/sh", &program).unwrap();
    let before = "[ \"$*\" = --state-format ] || exit 2\necho 4 0.2.0";
    for says in ["echo 1000,15 9.9.9", before] {
        std::fs::write(path("worker"), format!("{says}\necho \"$*\" >>asked\n")).unwrap();
        let refused = ask(&run, &["upgrade"]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains("cannot go on with the guests of this amberlog"), "{said}");
        assert_eq!(served_by_another(&run, None, &log), third, "it was refused, and something was changed");
    }
    assert_eq!(std::fs::read_to_string(path("asked")).unwrap(), "--state-formats\n", "the first one has answered");
    // One that says that it can, and whose workers die: the one of before is back in a moment.
    let formats = Command::new(env!("CARGO_BIN_EXE_amberlog")).args(["worker", "--state-formats"]).output().unwrap();
    let formats = String::from_utf8(formats.stdout).unwrap();
    let says = format!("[ \"$*\" = --state-formats ] || exit 1\necho {}\n", formats.trim());
    std::fs::write(path("worker"), says).unwrap();
    let begun = Instant::now();
    let refused = ask(&run, &["upgrade"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(said.contains("the new worker does not serve"), "{refused:?}");
    let fourth = served_by_another(&run, Some(third), &log);
    assert!(begun.elapsed() < Duration::from_secs(15), "it stood still for {} s", begun.elapsed().as_secs());
    // It is the one that serves from now on.
    kill(fourth, rustix::process::Signal::KILL);
    served_by_another(&run, Some(fourth), &log);
    kill(u64::from(daemon.0.id()), rustix::process::Signal::TERM);
    let deadline = Instant::now() + LIMIT;
    while daemon.0.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "{}", std::fs::read_to_string(&log).unwrap());
        std::thread::sleep(Duration::from_millis(50));
    }
}
