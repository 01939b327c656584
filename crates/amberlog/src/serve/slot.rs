//! One configured VM: what is wanted of it, how it is, and the thread that goes round: prepare, wait for a VMM, serve it,
//! recover, and prepare again.
//!
//! A change of its configuration takes effect when no VMM is connected: a guest never notices one. Failure story: what cannot
//! be prepared or finished is logged once, shown, and tried again every few seconds; what is owed stays in tmpfs until then.

use super::config::VmConfig;
use crate::vm::{Serving, Starter, Vm};
use anyhow::Context;
use block_device::DeviceHandle;
use placement::{Change, Journals, PlacementKind, Route, VmReport};
use serde_json::{Value, json};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How often the VMMs and the wishes are looked at.
const INTERVAL: Duration = Duration::from_millis(100);
/// The pauses between attempts.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What is wanted.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// It is served as configured.
    Serve(Box<VmConfig>),
    /// It is not in the configuration any more: it ends with its VMM.
    Gone,
    /// The daemon ends: the VMM is ended, too.
    Stop,
}

/// How it is.
#[derive(Clone, Debug)]
enum State {
    Preparing,
    Waiting,
    Running(i32),
    Recovering,
    Failed(String),
}

/// What there is of it while it is served.
#[derive(Clone)]
struct Live {
    journals: Arc<Journals>,
    handles: Vec<DeviceHandle<dyn Route>>,
    attachments: Vec<crate::vm::qemu::Attachment>,
    sockets: std::path::PathBuf,
}

struct Inner {
    wanted: Wanted,
    state: State,
    live: Option<Live>,
    is_over: bool,
}

/// One VM.
pub struct Slot {
    name: String,
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Slot {
    /// A VM that is to be served so.
    pub fn new(config: VmConfig) -> Arc<Self> {
        Arc::new(Slot {
            name: config.options.name.clone(),
            inner: Mutex::new(Inner {
                wanted: Wanted::Serve(Box::new(config)),
                state: State::Preparing,
                live: None,
                is_over: false,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Says what is wanted from now on.
    pub fn want(&self, wanted: Wanted) {
        let mut inner = self.lock();
        if inner.wanted != Wanted::Stop {
            inner.wanted = wanted;
        }
        self.changed.notify_all();
    }

    /// Whether its thread has ended, or is about to.
    pub fn is_over(&self) -> bool {
        self.lock().is_over
    }

    fn set_state(&self, state: State) {
        self.lock().state = state;
    }

    /// The thread of a VM; ends when it is not wanted any more.
    pub fn run(&self) {
        let mut pause = PAUSE_MIN;
        let mut told = String::new();
        loop {
            let config = {
                let mut inner = self.lock();
                let Wanted::Serve(config) = &inner.wanted else {
                    inner.is_over = true;
                    return;
                };
                config.clone()
            };
            match self.serve_one(&config) {
                Ok(()) => {
                    pause = PAUSE_MIN;
                    told.clear();
                }
                Err(error) => {
                    let sentence = format!("{error:#}");
                    if told != sentence {
                        log::error!("vm {}: {sentence}; tried again until it works", self.name);
                        told.clone_from(&sentence);
                    }
                    self.set_state(State::Failed(sentence));
                    self.sleep_unless_changed(&config, pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    fn sleep_unless_changed(&self, config: &VmConfig, pause: Duration) {
        let deadline = Instant::now() + pause;
        let mut inner = self.lock();
        while matches!(&inner.wanted, Wanted::Serve(wanted) if **wanted == *config) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            inner = self.changed.wait_timeout(inner, left).expect("no panic under this lock").0;
        }
    }

    /// From the preparation to the recovery after one VMM.
    fn serve_one(&self, config: &VmConfig) -> anyhow::Result<()> {
        self.set_state(State::Preparing);
        let vm = Vm::prepare(&config.options)?;
        let served = prepare_sockets(&config.sockets, vm.directory()).and_then(|()| {
            vm.memory.keep_to_directory(vm.directory());
            vm.serve(&config.sockets, Starter::Strangers, |_, name| name.to_owned())
        });
        let ended = served.map(|serving| {
            self.wait_for_end(config, &vm, &serving);
            let mut inner = self.lock();
            inner.state = State::Recovering;
            inner.live = None;
            drop(inner);
            serving.stop();
        });
        // Whatever happened: somebody may have been connected.
        vm.finish(config.report.as_deref()).and(ended)
    }

    /// Waits until the VMM has ended, or the VM is not wanted so any more and has none.
    fn wait_for_end(&self, config: &VmConfig, vm: &Vm, serving: &Serving) {
        let live = Live {
            journals: Arc::clone(&vm.journals),
            handles: serving.handles(),
            attachments: serving.attachments.clone(),
            sockets: config.sockets.clone(),
        };
        let mut inner = self.lock();
        inner.live = Some(live);
        inner.state = State::Waiting;
        log::info!("vm {}: waits for its VMM at {}", self.name, config.sockets.display());
        loop {
            let vmms = serving.observer.vmms();
            match vmms.iter().find(|(_, has_ended)| !has_ended) {
                Some((pid, _)) => inner.state = State::Running(*pid),
                None if !vmms.is_empty() => {
                    log::info!("vm {}: its VMM has ended", self.name);
                    return;
                }
                None => {}
            }
            match &inner.wanted {
                Wanted::Stop => {
                    drop(inner);
                    serving.observer.end_vmms();
                    return;
                }
                Wanted::Gone if vmms.is_empty() => return,
                Wanted::Serve(wanted) if vmms.is_empty() && **wanted != *config => return,
                _ => {}
            }
            inner = self.changed.wait_timeout(inner, INTERVAL).expect("no panic under this lock").0;
        }
    }

    /// Its entry in `status`.
    pub fn status(&self) -> Value {
        let (state, pid, live) = {
            let inner = self.lock();
            let (state, pid) = match &inner.state {
                State::Preparing => ("preparing".to_owned(), None),
                State::Waiting => ("waiting for its VMM".to_owned(), None),
                State::Running(pid) => (format!("running (process {pid})"), Some(*pid)),
                State::Recovering => ("recovering".to_owned(), None),
                State::Failed(sentence) => (format!("failed: {sentence}"), None),
            };
            (state, pid, inner.live.clone())
        };
        let report = match &live {
            Some(live) => live.journals.report(&self.name),
            None => VmReport { schema: 1, vm: self.name.clone(), disks: Vec::new() },
        };
        let mut entry = serde_json::to_value(report).unwrap_or_else(|_| json!({"schema": 1, "vm": self.name}));
        entry["state"] = json!(state);
        entry["pid"] = json!(pid);
        if let Some(live) = live {
            entry["sockets"] = live.attachments.iter().map(|disk| json!(disk.socket)).collect();
        }
        entry
    }

    fn live(&self) -> anyhow::Result<Live> {
        let inner = self.lock();
        inner.live.clone().with_context(|| match &inner.state {
            State::Failed(sentence) => format!("vm {} is not served: {sentence}", self.name),
            _ => format!("vm {} is not served at this moment; ask again", self.name),
        })
    }

    /// Writes home what the VM is owed. Gives the number of blocks.
    ///
    /// # Errors
    /// When storage fails, or it takes longer than `patience`.
    pub fn flush(&self, patience: Duration) -> anyhow::Result<u64> {
        Ok(self.live()?.journals.write_home(patience)?)
    }

    /// Has the journals of a disk live elsewhere while the guest runs. Gives a sentence about when that is so.
    ///
    /// # Errors
    /// When that cannot be, or takes longer than `patience`.
    pub fn change_placement(&self, disk: &str, to: PlacementKind, patience: Duration) -> anyhow::Result<&'static str> {
        let live = self.live()?;
        let journals = &live.journals;
        let index = (0..journals.disks().len())
            .find(|index| journals.disk(*index).options.name == disk)
            .with_context(|| format!("vm {} has no disk {disk}", self.name))?;
        let logs: Vec<_> = journals.logs().into_iter().filter(|log| log.home_disk() == index).collect();
        anyhow::ensure!(!logs.is_empty(), "there is no journal of a file system on disk {disk}");
        let deadline = Instant::now() + patience;
        let mut answer = "done";
        for log in logs {
            match journals.change_placement(log.index(), to)? {
                Change::Done => {}
                Change::AtNextMount => answer = "from the next mount on",
                Change::HandOver => {
                    let number = log.index();
                    let handle = &live.handles[log.journal_disk()];
                    while !handle.with_route(move |route, plan| route.hand_over(number, plan))?? {
                        if Instant::now() > deadline {
                            handle.with_route(move |route, plan| route.give_up_hand_over(number, plan))?;
                            anyhow::bail!(
                                "disk {disk} has not been quiet for a moment in {} s; try again",
                                patience.as_secs()
                            );
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            }
        }
        Ok(answer)
    }

    /// Environment and arguments that a VMM needs.
    ///
    /// # Errors
    /// When it is not served.
    pub fn arguments(&self, memory_mib: u64) -> anyhow::Result<Value> {
        let live = self.live()?;
        let memory = live.sockets.join(AREA).join("ram");
        let words = crate::vm::qemu::arguments_for_strangers(memory_mib, &memory, &live.attachments)
            .map_err(|sentence| anyhow::anyhow!("{sentence}"))?;
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        let mut environment = serde_json::Map::new();
        if let Some(shim) = crate::shim::find() {
            let socket = live.sockets.join("shim.sock");
            environment.insert("LD_PRELOAD".to_owned(), json!(shim));
            environment.insert(guest_memory::SHIM_SOCKET_VARIABLE.to_owned(), json!(socket));
        }
        Ok(json!({"schema": 1, "environment": environment, "arguments": words}))
    }
}

/// Where the VM's directory in tmpfs is found from beside its sockets, whatever it is called this time.
const AREA: &str = "area";

/// Makes the directory of a VM's sockets, and puts a link to its directory in tmpfs there.
fn prepare_sockets(sockets: &Path, directory: &Path) -> anyhow::Result<()> {
    let of = || format!("preparing {}", sockets.display());
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(sockets).with_context(of)?;
    let link = sockets.join(AREA);
    match std::fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).with_context(of),
        _ => {}
    }
    std::os::unix::fs::symlink(directory, &link).with_context(of)
}
