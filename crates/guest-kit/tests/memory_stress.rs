//! What stresses the host's memory (`crash-rounds --memory-stress`) leaves the host as it was, whatever ends it, and acts while there is a guest and no
//! longer: tried on files that stand for a host's, beside which no guest runs.

use guest_kit::Signal;
use rustix::process::{Pid, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// Settings of a host, what they say, and the word of it that counts.
const SETTINGS: [(&str, &str, &str); 6] = [
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n", "madvise"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always never [deny] force\n", "deny"),
    ("sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs", "10000\n", "10000"),
    ("sys/kernel/mm/transparent_hugepage/khugepaged/alloc_sleep_millisecs", "60000\n", "60000"),
    ("sys/kernel/mm/transparent_hugepage/khugepaged/pages_to_scan", "4096\n", "4096"),
    ("proc/sys/vm/compaction_proactiveness", "20\n", "20"),
];
/// What is written to whenever something is to be done.
const ACTS: [&str; 2] = ["proc/sys/vm/compact_memory", "proc/sys/vm/drop_caches"];

struct Stressed {
    root: TempDir,
    child: Child,
    line: Option<ChildStdin>,
    out: BufReader<ChildStdout>,
}

impl Stressed {
    /// A host that it has changed, and its first words.
    fn new() -> (Self, Value) {
        let root = tempfile::tempdir().unwrap();
        let files = SETTINGS.iter().map(|(name, text, _)| (*name, *text)).chain(ACTS.map(|name| (name, "")));
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let mut child = Command::new(env!("CARGO_BIN_EXE_crash-rounds"))
            .args(["memory-stress", "--kinds", "all", "--root"])
            .arg(root.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (line, out) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut stressed = Self { root, child, line, out };
        let first_words = stressed.answer();
        (stressed, first_words)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    fn say(&mut self, what: &str) {
        writeln!(self.line.as_mut().unwrap(), "{what}").unwrap();
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("'{line}': {error}"))
    }

    /// It has ended, and all is as it was.
    fn expect_restored(mut self, how: &str) {
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                None => {
                    self.child.kill().unwrap();
                    panic!("it goes on after {how}");
                }
            }
        };
        assert!(status.success(), "{how}: {status}");
        for (name, _, word) in SETTINGS {
            assert_eq!(self.read(name).trim(), word, "{name}, after {how}");
        }
    }
}

#[test]
fn the_host_is_as_it_was_whatever_ends_it() {
    let (mut stressed, first_words) = Stressed::new();
    assert_eq!(first_words["available"], serde_json::json!(["huge-pages", "compaction", "caches"]));
    let missing = first_words["missing"].to_string();
    assert!(["split: ", "swap: ", "reclaim: ", "page-bits: ", "nodes: "].iter().all(|kind| missing.contains(kind)));
    let changed = first_words["changed"].to_string();
    for (name, _, word) in SETTINGS {
        assert!(changed.contains(&format!("{name} was {word}")), "{name}: {changed}");
        assert_ne!(stressed.read(name).trim(), word, "{name} is to be another one");
    }
    // Whoever started it has died.
    stressed.line = None;
    stressed.expect_restored("the end of its line");
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let (stressed, _) = Stressed::new();
        kill_process(Pid::from_child(&stressed.child), signal).unwrap();
        stressed.expect_restored(&format!("{signal:?}"));
    }
}

#[test]
fn it_acts_while_there_is_a_guest() {
    let (mut stressed, _) = Stressed::new();
    stressed.say("calm");
    assert_eq!(stressed.answer()["done"], serde_json::json!({}), "there was no guest yet");
    stressed.say(&format!("target {0} {0} /nowhere", u32::MAX));
    let deadline = Instant::now() + LIMIT;
    while ACTS.iter().any(|name| stressed.read(name).is_empty()) {
        assert!(Instant::now() < deadline, "it does nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    stressed.say("calm");
    let answer = stressed.answer();
    assert_eq!(answer["failed"], serde_json::json!([]));
    assert!(["compaction", "caches"].iter().all(|kind| answer["done"][kind].as_u64() > Some(0)), "{answer}");
    // It had time for it.
    std::thread::sleep(Duration::from_millis(500));
    stressed.say("calm");
    assert_eq!(stressed.answer()["done"], serde_json::json!({}), "the guest is gone");
    stressed.line = None;
    stressed.expect_restored("a guest");
}
