//! The daemon's control socket: a line of JSON in, a line of JSON out, then the end.
//!
//! Only the daemon's own user can ask (mode 0600); all the same everything is bounded: the line, the time to
//! send it, the number of askers at once.

use super::slot::Slot;
use crate::vm::Bounds;
use anyhow::Context;
use placement::PlacementKind;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes of a question.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// How long an asker may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Askers at once.
const ASKERS_MAX: usize = 32;

/// The VMs by name, as the daemon has them at the moment.
pub type Slots = Arc<Mutex<BTreeMap<String, Arc<Slot>>>>;

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
        patience_seconds: u64,
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
    Detach {
        patience_seconds: u64,
        #[serde(default)]
        with_paused: bool,
    },
}

/// The socket; removed when it is dropped.
pub struct Control {
    path: PathBuf,
}

impl Control {
    /// Listens at `path`.
    ///
    /// # Errors
    /// When another daemon answers there.
    pub fn listen(path: &Path, slots: Slots) -> anyhow::Result<Self> {
        let of = || format!("listening at {}", path.display());
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                anyhow::ensure!(
                    UnixStream::connect(path).is_err(),
                    "another daemon answers at {}: stop it, or give this one another directory (run = ...)",
                    path.display()
                );
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
                let run = Arc::clone(&run);
                let _ = std::thread::Builder::new().name("asker".to_owned()).spawn(move || {
                    let answer = match place {
                        Some(_place) => answer(&stream, &slots, &run),
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

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
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
    let all: Vec<_> = slots.lock().expect("no panic under this lock").values().cloned().collect();
    all.iter().try_for_each(|slot| slot.check_can_be_left(with_paused))?;
    all.iter().try_for_each(|slot| slot.hand_over(deadline.saturating_duration_since(Instant::now())))
}

/// What `status` says of all VMs.
pub fn status_of_all(slots: &Slots) -> Value {
    let all: Vec<_> = slots.lock().expect("no panic under this lock").values().cloned().collect();
    let all: Vec<_> = all.iter().filter(|slot| !slot.is_over()).map(|slot| slot.status()).collect();
    json!({"schema": 1, "vms": all})
}

fn answer(stream: &UnixStream, slots: &Slots, run: &Path) -> anyhow::Result<Value> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line).context("reading the question")?;
    let question: Question = serde_json::from_str(&line).context("understanding the question")?;
    // The lock is not held while anything is done: others ask, too.
    let find = |name: &str| {
        let slots = slots.lock().expect("no panic under this lock");
        slots
            .get(name)
            .filter(|slot| !slot.is_over())
            .cloned()
            .with_context(|| format!("there is no vm {name} in the configuration"))
    };
    match question {
        Question::Status { vm: Some(name) } => Ok(json!({"schema": 1, "vms": [find(&name)?.status()]})),
        Question::Status { vm: None } => Ok(status_of_all(slots)),
        Question::Flush { vm, patience_seconds } => {
            let blocks = find(&vm)?.flush(Duration::from_secs(patience_seconds.min(86_400)))?;
            Ok(json!({"schema": 1, "vm": vm, "blocks": blocks}))
        }
        Question::Placement { vm, disk, placement, patience_seconds } => {
            let to = match placement.as_str() {
                "remote" => PlacementKind::Remote,
                "nvm" => PlacementKind::Nvm,
                other => other.parse().map_err(|sentence: String| anyhow::anyhow!("{sentence}"))?,
            };
            let when = find(&vm)?.change_placement(&disk, to, Duration::from_secs(patience_seconds.min(86_400)))?;
            Ok(json!({"schema": 1, "vm": vm, "disk": disk, "placement": placement, "when": when}))
        }
        Question::Freeze { vm, seconds } => {
            find(&vm)?.freeze(Duration::from_secs(seconds))?;
            Ok(json!({"schema": 1, "vm": vm, "seconds": seconds}))
        }
        Question::Thaw { vm } => {
            find(&vm)?.thaw()?;
            Ok(json!({"schema": 1, "vm": vm}))
        }
        Question::Snapshot { vm, disk, out, patience_seconds, may_wait } => {
            let notes = find(&vm)?.snapshot(&disk, &out, Duration::from_secs(patience_seconds), may_wait)?;
            Ok(json!({"schema": 1, "vm": vm, "disk": disk, "image": out, "notes": notes}))
        }
        Question::Power { on_battery, patience_seconds } => {
            super::power::set(slots, run, on_battery, Duration::from_secs(patience_seconds.min(86_400)))
        }
        Question::Resize { vm, disk, size_bytes } => {
            let is = find(&vm)?.resize(&disk, size_bytes)?;
            Ok(json!({"schema": 1, "vm": vm, "disk": disk, "size_bytes": is}))
        }
        Question::Throttle { vm, disk, bounds } => {
            let limits = bounds.limits().map_err(|sentence| anyhow::anyhow!("{sentence}"))?;
            find(&vm)?.throttle(&disk, limits)?;
            Ok(json!({"schema": 1, "vm": vm, "disk": disk, "limits": super::disks::limits(limits)}))
        }
        Question::Arguments { vm, memory_mib, reconnect } => find(&vm)?.arguments(memory_mib, reconnect),
        Question::Detach { patience_seconds, with_paused } => {
            hand_over_all(slots, Duration::from_secs(patience_seconds.min(86_400)), with_paused)?;
            // The main thread does so once more, which is quick, and leaves.
            signal_hook::low_level::raise(signal_hook::consts::SIGUSR2)?;
            Ok(json!({"schema": 1, "pid": std::process::id()}))
        }
    }
}

#[cfg(test)]
mod tests;
