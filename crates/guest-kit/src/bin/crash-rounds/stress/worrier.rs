//! The process that works against guests' memory, beside the rounds: it changes the host, acts against the guest that it is told of, and brings the host
//! back to what it was when it is told to end, when its line to the rounds ends (however they do), and on a signal.
//!
//! Lines to it, on its standard input: `target VMM STARTED AREA` (two processes and a directory), `calm` (the guest is gone; answered), `keep` (what is in
//! the file system of guests' memory is wanted). Lines from it are JSON: first what is to be had, then an answer to each `calm`.
//!
//! Failure story: killed with SIGKILL it restores nothing; what the host's settings were was said in its first line.

use crate::stress::pressure::{NAMES, Pressure, Target};
use crate::stress::settings::Settings;
use guest_tools::options::Options;
use guest_tools::random::Random;
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Between two acts, at most.
const PAUSE_US_MAX: u64 = 40_000;

/// What it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Target(Target),
    Calm,
    Keep,
    End,
}

impl Said {
    fn parse(line: &str) -> Option<Self> {
        match line.split_once(' ') {
            None if line == "calm" => Some(Self::Calm),
            None if line == "keep" => Some(Self::Keep),
            Some(("target", rest)) => {
                let mut words = rest.splitn(3, ' ');
                let (vmm, started) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                Some(Self::Target(Target { vmm, started, area: PathBuf::from(words.next()?) }))
            }
            _ => None,
        }
    }
}

/// `crash-rounds memory-stress --kinds all|NAME,NAME --seed N [--root DIR]`; with a root, on files that stand for a host's.
///
/// # Errors
/// A sentence when it was asked for nothing that there is, or cannot hear of its end.
pub fn run(words: impl IntoIterator<Item = String>) -> Result<(), String> {
    let mut options = Options::parse(words)?;
    let kinds = options.required("kinds")?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let root = options.text("root").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    options.finish()?;
    // Before anything is changed.
    let (say, said) = channel();
    end_by_signals(say.clone())?;
    listen(say);
    let mut worrier = Worrier::begin(&kinds, &root, seed)?;
    tell(&worrier.first_words());
    worrier.work(&said);
    Ok(())
}

fn end_by_signals(say: Sender<Said>) -> Result<(), String> {
    let told = |error: std::io::Error| format!("signals cannot be watched for: {error}");
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).map_err(told)?;
    let watch = move || {
        for _ in signals.forever() {
            let _ = say.send(Said::End);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map(drop).map_err(told)
}

fn listen(say: Sender<Said>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if let Some(what) = Said::parse(&line) {
                let _ = say.send(what);
            }
        }
        let _ = say.send(Said::End);
    });
}

/// Nobody may be there any more to hear it.
fn tell(what: &Value) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{what}").and_then(|()| out.flush());
}

/// What one kind did since it was asked the last time.
#[derive(Debug, Default)]
struct Done {
    count: u64,
    failures: u64,
    last_failure: String,
}

struct Worrier {
    /// First to go: what is mounted, and swapped to.
    pressures: Vec<Pressure>,
    settings: Settings,
    /// What is not to be had, and why not.
    missing: Vec<(String, String)>,
    random: Random,
    done: BTreeMap<&'static str, Done>,
}

impl Worrier {
    fn begin(kinds: &str, root: &Path, seed: u64) -> Result<Self, String> {
        let names: Vec<&str> = if kinds == "all" { NAMES.to_vec() } else { kinds.split(',').collect() };
        let mut settings = Settings::default();
        let (mut pressures, mut missing) = (Vec::new(), Vec::new());
        for name in names {
            match Pressure::begin(name, root, &mut settings) {
                Ok(pressure) => pressures.push(pressure),
                Err(why) if NAMES.contains(&name) => missing.push((name.to_owned(), why)),
                Err(why) => return Err(format!("'{name}': {why}")),
            }
        }
        if !pressures.iter().any(Pressure::acts) {
            let why: Vec<String> = missing.iter().map(|(name, why)| format!("{name}: {why}")).collect();
            return Err(format!("nothing of it is to be had here: {}", why.join("; ")));
        }
        Ok(Self { pressures, settings, missing, random: Random::new(seed), done: BTreeMap::new() })
    }

    fn first_words(&self) -> Value {
        let path = |path: Option<&Path>| path.map(|path| path.to_string_lossy().into_owned());
        let mounted = self.pressures.iter().find_map(|pressure| match pressure {
            Pressure::HugePages(Some(mounted)) => Some(mounted.path()),
            _ => None,
        });
        let group = self.pressures.iter().find_map(|pressure| match pressure {
            Pressure::Reclaim(group) => Some(group.path()),
            _ => None,
        });
        json!({
            "available": self.pressures.iter().map(Pressure::name).collect::<Vec<_>>(),
            "missing": self.missing.iter().map(|(name, why)| format!("{name}: {why}")).collect::<Vec<_>>(),
            "changed": self.settings.former().collect::<Vec<_>>(),
            "directory": path(mounted),
            "group": path(group),
        })
    }

    fn work(&mut self, said: &Receiver<Said>) {
        let mut target = None;
        loop {
            let pause = Duration::from_micros(self.random.below(PAUSE_US_MAX));
            match said.recv_timeout(pause) {
                Ok(Said::Target(new)) => target = Some(new),
                Ok(Said::Keep) => self.pressures.iter_mut().for_each(Pressure::keep),
                Ok(Said::Calm) => {
                    target = None;
                    self.pressures.iter().for_each(Pressure::calm);
                    tell(&self.answer());
                }
                Ok(Said::End) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => target.iter().for_each(|target| self.act(target)),
            }
        }
    }

    fn act(&mut self, target: &Target) {
        let acting: Vec<&Pressure> = self.pressures.iter().filter(|pressure| pressure.acts()).collect();
        let pressure = acting[self.random.below(acting.len() as u64) as usize];
        let outcome = pressure.act(target, &mut self.random);
        let done = self.done.entry(pressure.name()).or_default();
        match outcome {
            Ok(()) => done.count += 1,
            Err(error) => {
                done.failures += 1;
                done.last_failure = error.to_string();
            }
        }
    }

    /// What was done against the guest that is gone.
    fn answer(&mut self) -> Value {
        let done = std::mem::take(&mut self.done);
        let failed = done.iter().filter(|(_, done)| done.failures > 0);
        json!({
            "done": done.iter().map(|(name, done)| (*name, done.count)).collect::<BTreeMap<_, _>>(),
            "failed": failed
                .map(|(name, done)| format!("{name} failed {} times, at last: {}", done.failures, done.last_failure))
                .collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_is_told_is_understood() {
        let target = Target { vmm: 7, started: 5, area: PathBuf::from("/dev/shm/an area") };
        assert_eq!(Said::parse("target 7 5 /dev/shm/an area"), Some(Said::Target(target)));
        assert_eq!([Said::parse("calm"), Said::parse("keep")], [Some(Said::Calm), Some(Said::Keep)]);
        assert!(["", "target", "target 7 5", "target x 5 /a", "end"].iter().all(|line| Said::parse(line).is_none()));
    }

    #[test]
    fn who_can_do_nothing_says_so() {
        let nothing = tempfile::tempdir().unwrap();
        let begin = |kinds: &str| Worrier::begin(kinds, nothing.path(), 1).err().expect("there is nothing");
        let why = begin("all");
        assert!(NAMES.iter().all(|name| why.contains(&format!("{name}: "))), "{why}");
        assert!(begin("caches,cashes").contains("'cashes': there is no such kind"));
    }
}
