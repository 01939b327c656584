//! The worker of an `amberlog serve`: one VM, as its supervisor says; what is asked of it comes over the same line.

use super::asked::{Asked, DiskChange, WantedName};
use super::config::{Config, VmConfig};
use super::promise::DONE;
use super::slot::{Slot, Wanted};
use super::snapshot::Wish;
use crate::exit;
use crate::vm::die_of_panics;
use crate::worker::Line;
use anyhow::Context;
use placement::PlacementKind;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use supervision::Order;

/// Bytes of a question: a configuration, at most.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// How long the supervisor may take to say what it asks.
const PATIENCE: Duration = Duration::from_secs(5);

/// Arguments of the command.
#[derive(clap::Args, Debug)]
pub struct WorkArgs {
    /// The VM.
    #[arg(long)]
    vm: String,
    /// As `amberlog serve --no-sandbox`.
    #[arg(long)]
    no_sandbox: bool,
}

/// The one VM.
struct Served {
    name: String,
    no_sandbox: bool,
    line: Arc<Line>,
    slot: Mutex<Option<Arc<Slot>>>,
}

/// Runs the command.
pub fn work(args: &WorkArgs) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn serve(args: &WorkArgs) -> anyhow::Result<()> {
    let line = Line::begin()?;
    let _entered = log_context::enter(log_context::Context::vm(&args.vm));
    die_of_panics(format!(
        "amberlog: this is a bug in amberlog, and the worker of vm {} ends with it; what was committed is kept",
        args.vm
    ));
    if !args.no_sandbox {
        sandbox::enter_worker();
    }
    let served = Arc::new(Served {
        name: args.vm.clone(),
        no_sandbox: args.no_sandbox,
        line: Arc::clone(&line),
        slot: Mutex::default(),
    });
    loop {
        let (order, descriptors) = line.hear()?;
        let Some(stream) = descriptors.into_iter().next().filter(|_| order == Order::Ask) else {
            log::debug!("the supervisor said {order:?}");
            continue;
        };
        let (stream, served) = (UnixStream::from(stream), Arc::clone(&served));
        let asker = std::thread::Builder::new().name("asker".to_owned());
        let answering = log_context::spawn(asker, move || {
            let answer = served.answer(&stream);
            let answer = answer.unwrap_or_else(|error| json!({"schema": 1, "error": format!("{error:#}")}));
            let _ = writeln!(&stream, "{answer}");
        });
        if let Err(error) = answering {
            log::warn!("no thread for a question: {error}");
        }
    }
}

impl Served {
    fn answer(&self, stream: &UnixStream) -> anyhow::Result<Value> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line).context("reading the question")?;
        let asked: Asked = serde_json::from_str(&line).context("understanding the question")?;
        let seconds = |seconds: u64| Duration::from_secs(seconds.min(86_400));
        let vm = &self.name;
        match asked {
            Asked::Want { wanted, config } => {
                self.want(wanted, config.as_deref())?;
                Ok(json!({"schema": 1, "vm": vm}))
            }
            Asked::Alive => Ok(json!({"schema": 1, "vm": vm})),
            Asked::Status => Ok(json!({"schema": 1, "vms": [self.slot()?.status()]})),
            Asked::Room { room_bytes } => {
                let memory = self.slot()?.set_room(room_bytes)?;
                Ok(json!({"schema": 1, "vm": vm, "held_bytes": memory.held_bytes, "copied_bytes": memory.copied_bytes}))
            }
            Asked::Flush { patience_seconds } => {
                let blocks = self.slot()?.flush(seconds(patience_seconds))?;
                Ok(json!({"schema": 1, "vm": vm, "blocks": blocks}))
            }
            Asked::Placement { disk, placement, durable_within, patience_seconds } => {
                let to = match placement.as_str() {
                    "remote" => PlacementKind::Remote,
                    "nvm" => PlacementKind::Nvm,
                    other => other.parse().map_err(|sentence: String| anyhow::anyhow!("{sentence}"))?,
                };
                let within = durable_within.as_deref().map(crate::vm::durable_within).transpose();
                let within = within.map_err(|sentence| anyhow::anyhow!("{sentence}"))?;
                let slot = self.slot()?;
                if let Some(Some(_)) = within {
                    // Before anything is changed.
                    slot.check_can_age(&disk, to)?;
                }
                let patience = seconds(patience_seconds);
                let deadline = Instant::now() + patience;
                let mut when = slot.change_placement(&disk, to, patience)?;
                if let Some(within) = within {
                    slot.set_durable_within(&disk, within)?;
                    let in_force = slot.wait_durable_within(&disk, within, (patience, deadline), stream)?;
                    if when == DONE {
                        when = in_force;
                    }
                }
                Ok(json!({"schema": 1, "vm": vm, "disk": disk, "placement": placement, "when": when}))
            }
            Asked::IsServed => {
                self.slot()?.live_anyhow()?;
                Ok(json!({"schema": 1, "vm": vm}))
            }
            Asked::Freeze { seconds } => {
                self.slot()?.freeze(Duration::from_secs(seconds))?;
                Ok(json!({"schema": 1, "vm": vm, "seconds": seconds}))
            }
            Asked::Thaw => {
                self.slot()?.thaw()?;
                Ok(json!({"schema": 1, "vm": vm}))
            }
            Asked::Snapshot { disk, out, patience_seconds, may_wait, since } => {
                let time = Duration::from_secs(patience_seconds);
                let wish = Wish { out: &out, time, may_wait, since: since.as_deref() };
                let (id, notes) = self.slot()?.snapshot(&disk, &wish)?;
                Ok(json!({"schema": 1, "vm": vm, "disk": disk, "image": out, "id": id, "notes": notes}))
            }
            Asked::FollowPower { on_battery, patience_seconds } => {
                let deadline = std::time::Instant::now() + seconds(patience_seconds);
                Ok(json!({"schema": 1, "disks": self.slot()?.follow_power(on_battery, deadline)}))
            }
            Asked::ChangeDisks { change } => self.change_disks(change),
            Asked::Resize { disk, size_bytes } => {
                let is = self.slot()?.resize(&disk, size_bytes)?;
                Ok(json!({"schema": 1, "vm": vm, "disk": disk, "size_bytes": is}))
            }
            Asked::Throttle { disk, bounds } => {
                let limits = self.slot()?.throttle(&disk, bounds)?;
                Ok(json!({"schema": 1, "vm": vm, "disk": disk, "limits": super::disks::limits(limits)}))
            }
            Asked::CheckLeft { with_paused } => {
                self.slot()?.check_can_be_left(with_paused)?;
                Ok(json!({"schema": 1, "vm": vm}))
            }
            Asked::HandOver { patience_seconds } => {
                let slot = self.slot()?;
                slot.hand_over(seconds(patience_seconds))?;
                slot.flush_before_leaving()?;
                Ok(json!({"schema": 1, "vm": vm}))
            }
        }
    }

    fn change_disks(&self, change: DiskChange) -> anyhow::Result<Value> {
        let slot = self.slot()?;
        let source = match change {
            DiskChange::Config(text) => text,
            DiskChange::Add(text) => {
                let disk = text.parse().map_err(|error: String| anyhow::anyhow!("'{text}': {error}"))?;
                slot.as_served()?.source_with(&disk, &text)?
            }
            DiskChange::Remove(name) => slot.as_served()?.source_without(&name)?,
        };
        let changes = slot.change_disks(&self.parse(&source)?).with_context(|| format!("vm {}", self.name))?;
        Ok(json!({"schema": 1, "vm": self.name, "added": changes.added, "removed": changes.removed}))
    }

    /// This VM, as a configuration says.
    fn parse(&self, config: &str) -> anyhow::Result<VmConfig> {
        let mut config = Config::parse(config)?;
        let mut vm = config.vms.remove(&self.name).context("the VM is not in the configuration")?;
        vm.options.sandbox = !self.no_sandbox;
        Ok(vm)
    }

    fn slot(&self) -> anyhow::Result<Arc<Slot>> {
        let slot = self.slot.lock().expect("no panic under this lock");
        slot.clone().with_context(|| format!("vm {} is not served at this moment; ask again", self.name))
    }

    fn want(&self, wanted: WantedName, config: Option<&str>) -> anyhow::Result<()> {
        let wanted = match wanted {
            WantedName::Gone => Some(Wanted::Gone),
            WantedName::Stop => Some(Wanted::Stop),
            WantedName::Leave => Some(Wanted::Leave),
            WantedName::Serve => {
                config.map(|config| self.parse(config)).transpose()?.map(|vm| Wanted::Serve(Box::new(vm)))
            }
        };
        let mut slot = self.slot.lock().expect("no panic under this lock");
        if let Some(slot) = &*slot {
            wanted.into_iter().for_each(|wanted| slot.want(wanted));
            return Ok(());
        }
        let new = match super::slot::served_before(&self.line, &self.name)? {
            // A guest is there, whatever is wanted now: it is gone on with as it was served.
            Some(mut vm) => {
                vm.options.sandbox = !self.no_sandbox;
                Slot::new(vm, &self.line)
            }
            None => match wanted {
                Some(Wanted::Serve(vm)) => return self.run(Slot::new(*vm, &self.line), &mut slot),
                // Nothing was begun.
                _ => std::process::exit(0),
            },
        };
        wanted.into_iter().for_each(|wanted| new.want(wanted));
        self.run(new, &mut slot)
    }

    fn run(&self, new: Arc<Slot>, slot: &mut Option<Arc<Slot>>) -> anyhow::Result<()> {
        let own = Arc::clone(&new);
        std::thread::Builder::new().name(format!("vm {}", self.name)).spawn(move || {
            own.run();
            // Nothing is wanted of this process any more.
            std::process::exit(0);
        })?;
        *slot = Some(new);
        Ok(())
    }
}
