//! The host's memory management works against guests while rounds go on (`--memory-stress`): a process of its own does it, so that the host is as it was
//! again however the rounds end.

mod made;
mod pressure;
mod settings;
mod worrier;

pub use worrier::run;

use guest_kit::{Guest, scratch};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The first word of a `crash-rounds` that does this and nothing else.
pub const COMMAND: &str = "memory-stress";
/// A kernel that compacts much memory takes its time.
const LIMIT: Duration = Duration::from_secs(300);

/// What was done against a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// How often, by kind.
    pub counts: BTreeMap<String, u64>,
    /// What of it failed, in sentences.
    pub failed: Vec<String>,
}

/// The process, and our line to it.
pub struct Stress {
    child: Child,
    /// Nothing once it is to end.
    line: Option<ChildStdin>,
    answers: Receiver<Value>,
    first_words: Value,
}

impl Stress {
    /// Starts it and waits until it has changed the host.
    ///
    /// # Errors
    /// A sentence when it does not start, or nothing that was asked for is to be had.
    pub fn start(kinds: &str, seed: u64) -> Result<Self, String> {
        let own = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
        // In a group of its own: a signal from the keyboard is for the rounds, which end first.
        let mut child = Command::new(own)
            .args([COMMAND, "--kinds", kinds, "--seed", &seed.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("what stresses memory does not start: {error}"))?;
        let (line, out) = (child.stdin.take(), child.stdout.take().expect("it was asked for"));
        let (say, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let Ok(value) = serde_json::from_str::<Value>(&line) else { continue };
                if say.send(value).is_err() {
                    return;
                }
            }
        });
        let mut stress = Self { child, line, answers, first_words: Value::Null };
        stress.first_words = stress.answer().ok_or_else(|| "what stresses memory has ended".to_owned())?;
        Ok(stress)
    }

    /// What is to be had of them, what is not and why, and what was changed, a line each.
    pub fn describe(&self) -> Vec<String> {
        let list = |name: &str| {
            let values = self.first_words[name].as_array().into_iter().flatten();
            values.filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>()
        };
        let had = format!("memory is stressed by: {}", list("available").join(", "));
        let missing = list("missing").into_iter().map(|why| format!("and not by {why}"));
        let changed = list("changed").into_iter().map(|what| format!("changed for now: {what}"));
        std::iter::once(had).chain(missing).chain(changed).collect()
    }

    /// The names of what is to be had.
    pub fn available(&self) -> &Value {
        &self.first_words["available"]
    }

    /// A file system in memory that makes huge pages.
    pub fn directory(&self) -> Option<&Path> {
        self.first_words["directory"].as_str().map(Path::new)
    }

    /// Words before a command that have it run where its memory can be taken from it.
    pub fn words(&self) -> Vec<OsString> {
        let Some(group) = self.first_words["group"].as_str() else { return Vec::new() };
        let enter = r#"echo 0 > "$0/cgroup.procs" && exec "$@""#;
        ["sh", "-c", enter, group].map(OsString::from).to_vec()
    }

    /// From now on it works against this guest.
    pub fn begin(&self, guest: &Guest, area: &Path) {
        if let Ok(vmm) = guest.qemu_pid() {
            self.say(&format!("target {vmm} {} {}", guest.process_id(), area.display()));
        }
    }

    /// It stops, and says what it did.
    ///
    /// # Errors
    /// When it has ended.
    pub fn calm(&self) -> Result<Done, String> {
        self.say("calm");
        let answer = self.answer().ok_or_else(|| "what stresses memory does not answer".to_owned())?;
        let counts = answer["done"].as_object().into_iter().flatten();
        let counts = counts.map(|(name, count)| (name.clone(), count.as_u64().unwrap_or(0))).collect();
        let failed = answer["failed"].as_array().into_iter().flatten();
        Ok(Done { counts, failed: failed.filter_map(Value::as_str).map(str::to_owned).collect() })
    }

    /// What is in [`Self::directory`] stays when it ends.
    pub fn keep(&self) {
        self.say("keep");
    }

    fn say(&self, what: &str) {
        // That it has ended is seen when it does not answer.
        let _ = self.line.as_ref().map(|mut line| writeln!(line, "{what}"));
    }

    fn answer(&self) -> Option<Value> {
        self.answers.recv_timeout(LIMIT).ok()
    }
}

impl Drop for Stress {
    fn drop(&mut self) {
        self.line = None;
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                _ => return,
            }
        }
        let process = self.child.id();
        eprintln!("process {process} does not bring the host back to what it was: above is what it had changed");
    }
}

/// Where guests' memory is, as far as this is asked for: in huge pages, or not.
pub fn directory_of(stress: Option<&Stress>, is_in_huge_pages: bool) -> PathBuf {
    let huge = stress.filter(|_| is_in_huge_pages).and_then(Stress::directory);
    huge.unwrap_or(scratch::memory()).to_owned()
}
