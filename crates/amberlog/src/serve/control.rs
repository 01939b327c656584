//! The daemon's control socket: a line of JSON in, a line of JSON out, then the end.
//!
//! Only the daemon's own user can ask (mode 0600); all the same everything is bounded: the line, the time to
//! send it, the number of askers at once.

use super::asked::{Asked, DiskChange};
use super::check::Found;
use super::config::Config;
use super::memory::HostMemory;
use super::slots::{Slots, find, living};
use super::supervised::{DoesNotServe, Supervised};
use crate::vm::Bounds;
use anyhow::Context;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a question.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// How long an asker may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Askers at once.
const ASKERS_MAX: usize = 32;
/// Of these, whoever may have to wait for hours: somebody else may have to say that the power has failed.
const LONG_MAX: usize = 24;

#[derive(Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
enum Question {
    Status {
        vm: Option<String>,
    },
    Flush {
        vm: String,
        patience_seconds: u64,
    },
    Placement {
        vm: String,
        disk: String,
        placement: String,
        #[serde(default)]
        durable_within: Option<String>,
        patience_seconds: u64,
    },
    DiskAdd {
        vm: String,
        disk: String,
    },
    DiskRemove {
        vm: String,
        disk: String,
    },
    Resize {
        vm: String,
        disk: String,
        size_bytes: u64,
    },
    Throttle {
        vm: String,
        disk: String,
        bounds: Bounds,
    },
    Freeze {
        vm: String,
        seconds: u64,
    },
    Thaw {
        vm: String,
    },
    Snapshot {
        vm: String,
        disk: String,
        out: PathBuf,
        patience_seconds: u64,
        may_wait: bool,
        #[serde(default)]
        since: Option<String>,
    },
    Power {
        on_battery: bool,
        patience_seconds: u64,
    },
    Arguments {
        vm: String,
        memory_mib: u64,
        #[serde(default)]
        reconnect: bool,
    },
    Upgrade {
        vm: Option<String>,
        #[serde(default)]
        anyway: bool,
    },
    Check {
        configuration: String,
    },
    Detach {
        patience_seconds: u64,
        #[serde(default)]
        with_paused: bool,
    },
}

/// All of a disk may be copied, beside its guest: a week.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(7 * 86_400);

/// The socket; removed when it is dropped.
pub struct Control {
    path: PathBuf,
}

impl Control {
    /// Listens at `path`.
    ///
    /// # Errors
    /// When another daemon answers there.
    pub fn listen(path: &Path, slots: Slots, memory: Arc<HostMemory>) -> anyhow::Result<Self> {
        let of = || format!("listening at {}", path.display());
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                check_nobody_answers(path)?;
                std::fs::remove_file(path).with_context(of)?;
                UnixListener::bind(path)
            }
            other => other,
        }
        .with_context(of)?;
        // Whatever the mask was: who may ask is decided here.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).with_context(of)?;
        let askers = Arc::new(AtomicUsize::new(0));
        let run: Arc<Path> = path.parent().unwrap_or(Path::new("/")).into();
        std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    // Out of descriptors, perhaps: not to be tried without a pause.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                };
                let place = Place::take(&askers);
                let slots = Arc::clone(&slots);
                let (run, memory) = (Arc::clone(&run), Arc::clone(&memory));
                let _ = std::thread::Builder::new().name("asker".to_owned()).spawn(move || {
                    let answer = match place {
                        Some(_place) => answer(&stream, &slots, &memory, &run),
                        None => Err(anyhow::anyhow!("too many ask at once; ask again")),
                    };
                    let answer = answer.unwrap_or_else(|error| json!({"schema": 1, "error": format!("{error:#}")}));
                    let _ = stream.set_write_timeout(Some(PATIENCE));
                    let _ = writeln!(&stream, "{answer}");
                });
            }
        })?;
        Ok(Control { path: path.to_owned() })
    }
}

/// Whether another daemon has this directory.
///
/// # Errors
/// When one answers at `path`.
pub fn check_nobody_answers(path: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(
        UnixStream::connect(path).is_err(),
        "another daemon answers at {}: stop it, or give this one another directory (run = ...)",
        path.display()
    );
    Ok(())
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// How many wait for something that may take hours.
static LONG: AtomicUsize = AtomicUsize::new(0);

/// One of these.
struct Long;

impl Long {
    fn begin() -> anyhow::Result<Self> {
        let long = Long;
        let others = LONG.fetch_add(1, Ordering::AcqRel);
        anyhow::ensure!(
            others < LONG_MAX,
            "{others} others wait for a snapshot, a flush or durable-within: ask again when one of them is done"
        );
        Ok(long)
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        LONG.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One asker's place among those at once.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(askers: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Place(Arc::clone(askers));
        (askers.fetch_add(1, Ordering::AcqRel) < ASKERS_MAX).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Has everything of every guest that runs be on storage.
///
/// # Errors
/// The first VM for which that is not possible. Nothing was changed if its placement is why, or that it is paused; otherwise those before it have
/// their journals on storage now.
pub fn hand_over_all(slots: &Slots, patience: Duration, with_paused: bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + patience;
    // Those that were taken out and are over stay there until the next reload.
    let all = living(slots);
    all.iter().try_for_each(|(_, slot)| {
        slot.ask_until(deadline, |_| (Asked::CheckLeft { with_paused }, Duration::ZERO)).map(drop)
    })?;
    all.iter().try_for_each(|(_, slot)| {
        let asked = |left: Duration| (Asked::HandOver { patience_seconds: left.as_secs().max(1) }, left);
        slot.ask_until(deadline, asked).map(drop)
    })
}

/// Upgrades one VM after the other, and gives an entry for each. One that is refused keeps no other one from it; a program whose worker
/// did not serve is tried on no further guest.
fn upgrade_each<S>(
    of: impl IntoIterator<Item = (String, S)>,
    version: &str,
    upgrade: impl Fn(&S) -> anyhow::Result<()>,
) -> Vec<Value> {
    let mut failed_with: Option<String> = None;
    let one = |(name, slot): (String, S)| {
        let error = match &failed_with {
            Some(other) => {
                Some(format!("vm {name}: nothing was changed, for with vm {other} the new worker did not serve"))
            }
            None => upgrade(&slot).err().map(|error| {
                if error.is::<DoesNotServe>() {
                    failed_with = Some(name.clone());
                }
                format!("{error:#}")
            }),
        };
        let version = error.is_none().then_some(version);
        json!({"vm": name, "version": version, "error": error})
    };
    of.into_iter().map(one).collect()
}

/// What `status` says of all VMs.
pub fn status_of_all(slots: &Slots, memory: &HostMemory) -> Value {
    let all = living(slots);
    // At once: one whose worker does not answer keeps no other one waiting.
    let mut all: Vec<Value> = std::thread::scope(|scope| {
        let asked: Vec<_> = all
            .iter()
            .map(|(_, slot)| (slot, std::thread::Builder::new().spawn_scoped(scope, || slot.status())))
            .collect();
        let answer = |(slot, thread): (&Arc<Supervised>, std::io::Result<std::thread::ScopedJoinHandle<'_, Value>>)| {
            // Without a thread it is asked here.
            thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(|| slot.status())
        };
        asked.into_iter().map(answer).collect()
    });
    all.iter_mut().for_each(|entry| memory.add(entry));
    json!({"schema": 1, "memory": memory.status(), "vms": all})
}

fn answer(stream: &UnixStream, slots: &Slots, memory: &HostMemory, run: &Path) -> anyhow::Result<Value> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line).context("reading the question")?;
    let question: Question = serde_json::from_str(&line).context("understanding the question")?;
    let find = |name: &str| find(slots, name);
    let seconds = |seconds: u64| Duration::from_secs(seconds.min(86_400));
    match question {
        Question::Status { vm: Some(name) } => {
            let mut entry = find(&name)?.status();
            memory.add(&mut entry);
            Ok(json!({"schema": 1, "memory": memory.status(), "vms": [entry]}))
        }
        Question::Status { vm: None } => Ok(status_of_all(slots, memory)),
        Question::Flush { vm, patience_seconds } => {
            let _long = Long::begin()?;
            find(&vm)?.ask(&Asked::Flush { patience_seconds }, seconds(patience_seconds))
        }
        Question::Placement { vm, disk, placement, durable_within, patience_seconds } => {
            // Until an age is in force it may take hours. Whose journal is only to move, perhaps since its place is not safe any more, is heard.
            let _long = durable_within.as_ref().map(|_| Long::begin()).transpose()?;
            let asked = Asked::Placement { disk, placement, durable_within, patience_seconds };
            find(&vm)?.ask_for(&asked, seconds(patience_seconds), stream)
        }
        Question::Arguments { vm, memory_mib, reconnect } => find(&vm)?.arguments(memory_mib, reconnect),
        Question::Upgrade { vm, anyway } => {
            let of: Vec<_> = match vm {
                Some(name) => vec![(name.clone(), find(&name)?)],
                None => living(slots),
            };
            let (program, version) = crate::worker::Program::installed()?;
            Ok(json!({"schema": 1, "vms": upgrade_each(of, &version, |slot| slot.upgrade(&program, anyway))}))
        }
        Question::Freeze { vm, seconds } => find(&vm)?.ask(&Asked::Freeze { seconds }, Duration::from_secs(seconds)),
        Question::Thaw { vm } => find(&vm)?.ask(&Asked::Thaw, Duration::ZERO),
        Question::Snapshot { vm, disk, out, patience_seconds, may_wait, since } => {
            let _long = Long::begin()?;
            let asked = Asked::Snapshot { disk, out, patience_seconds, may_wait, since };
            find(&vm)?.ask(&asked, SNAPSHOT_PATIENCE)
        }
        Question::Power { on_battery, patience_seconds } => {
            super::power::set(slots, run, on_battery, seconds(patience_seconds))
        }
        Question::DiskAdd { vm, disk } => {
            let slot = find(&vm)?;
            super::power::change_disks(&slot, run, DiskChange::Add(disk))
        }
        Question::DiskRemove { vm, disk } => {
            let slot = find(&vm)?;
            super::power::change_disks(&slot, run, DiskChange::Remove(disk))
        }
        Question::Resize { vm, disk, size_bytes } => {
            find(&vm)?.ask(&Asked::Resize { disk, size_bytes }, crate::disk::RESIZE_PATIENCE)
        }
        Question::Throttle { vm, disk, bounds } => find(&vm)?.ask(&Asked::Throttle { disk, bounds }, Duration::ZERO),
        Question::Check { configuration } => {
            let config = Config::parse(&configuration).context("the daemon does not take this configuration")?;
            Ok(json!({"schema": 1, "found": Found::here(&config)}))
        }
        Question::Detach { patience_seconds, with_paused } => {
            hand_over_all(slots, seconds(patience_seconds), with_paused)?;
            // The main thread does so once more, which is quick, and leaves.
            signal_hook::low_level::raise(signal_hook::consts::SIGUSR2)?;
            Ok(json!({"schema": 1, "pid": std::process::id()}))
        }
    }
}

#[cfg(test)]
mod tests;
