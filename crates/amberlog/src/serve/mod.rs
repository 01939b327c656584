//! `amberlog serve`: the daemon. Many VMs, whose VMMs somebody else starts; each finds its disks at Unix sockets.
//!
//! What it must never do: take a disk from a guest that runs because a configuration changed. Failure story: killed at any
//! moment, it leaves in tmpfs what the VMs are owed, locked for as long as their VMMs live; the next daemon finishes it
//! once they are gone. A guest does not go on under another daemon unless it was left (SIGUSR2, `amberlog detach`): then all
//! that was held is on storage, and the next daemon takes it as it is.
//!
//! SIGHUP reads the configuration again. SIGTERM and SIGINT end the VMMs, as `amberlog run` does, and everything goes home.

mod access;
pub mod ask;
pub mod check;
mod config;
mod control;
mod disks;
mod freeze;
mod left;
mod power;
mod slot;

use crate::exit;
use crate::metrics::endpoint::{Endpoint, Source};
use crate::vm::die_of_panics;
use anyhow::Context;
use config::Config;
use control::{Control, Slots};
use own_files::OwnDirectory;
use slot::{Slot, Wanted};
use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the VMs may take to be on storage before the daemon leaves them.
const LEAVING_PATIENCE: Duration = Duration::from_secs(60);

/// Arguments of `amberlog serve`.
#[derive(clap::Args, Debug)]
pub struct ServeArgs {
    /// The configuration.
    #[arg(long, value_name = "FILE", default_value = "/etc/amberlog/amberlog.toml")]
    config: PathBuf,
    /// Only say whether the configuration is good, and what would keep its VMs from being served: images, directories, sockets.
    #[arg(long)]
    check: bool,
    /// Do not fence the daemon in. Otherwise it can start nothing, and its threads that work for a guest make only the system
    /// calls that they need, and open nothing but what is in that VM's directory (seccomp and landlock).
    #[arg(long)]
    no_sandbox: bool,
    /// As it is anyway: how it was said before it was the default.
    #[arg(long, hide = true, conflicts_with = "no_sandbox")]
    sandbox: bool,
}

impl ServeArgs {
    /// The configuration as it is now.
    fn read(&self) -> anyhow::Result<Config> {
        let mut config = Config::read(&self.config)?;
        config.vms.values_mut().for_each(|vm| vm.options.sandbox = !self.no_sandbox);
        Ok(config)
    }
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> ExitCode {
    match serve(args) {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

/// What others may do in the daemon's directory: look and pass through, if it was made so.
const RUN_OTHERS: u32 = 0o055;
/// And in the directories of the VMs' sockets in it: nothing, unless VMMs of another user or group are to pass through.
const SOCKETS_OTHERS: u32 = 0o051;

/// Opens the daemon's directory, and makes it if there is none. Sockets in it have modes of their own.
fn open_run(run: &Path) -> anyhow::Result<OwnDirectory> {
    Ok(OwnDirectory::open_or_make_allowing(run, RUN_OTHERS)?)
}

/// Says all that is wrong with what a configuration names.
fn check(args: &ServeArgs, config: &Config) -> ExitCode {
    for note in check::notes(config) {
        eprintln!("amberlog: note: {note}");
    }
    let problems = check::all(config);
    for problem in &problems {
        eprintln!("amberlog: {}", problem.sentence);
    }
    if problems.is_empty() {
        println!("{}: good, {} VMs", args.config.display(), config.vms.len());
        return ExitCode::SUCCESS;
    }
    let is_only_refused = problems.iter().all(|problem| problem.is_refusal);
    ExitCode::from(if is_only_refused { exit::REFUSED } else { exit::FAILED })
}

/// Makes the directory for reports, so that none is lost when its VM has ended.
fn prepare_reports(config: &Config) -> anyhow::Result<()> {
    let Some(reports) = &config.reports else { return Ok(()) };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(reports)
        .with_context(|| format!("making the directory {} for reports", reports.display()))?;
    rustix::fs::access(reports, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
        .with_context(|| format!("nothing can be written to the directory {} for reports", reports.display()))
}

/// The VMs, and their threads.
struct Vms {
    slots: Slots,
    threads: BTreeMap<String, JoinHandle<()>>,
}

fn serve(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let config = args.read().map_err(|error| exit::usage(format!("{error:#}")))?;
    if args.check {
        return Ok(check(args, &config));
    }
    prepare_reports(&config)?;
    // Before the sandbox: what is made here is ours alone until it is given to somebody.
    own_files::keep_files_private();
    open_run(&config.run)?;
    if !args.no_sandbox {
        sandbox::enter_daemon();
    }
    let mut signals = signal_hook::iterator::Signals::new([
        signal_hook::consts::SIGHUP,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGUSR2,
    ])?;
    let mut vms = Vms { slots: Slots::default(), threads: BTreeMap::new() };
    let control = Control::listen(&config.run.join(ask::CONTROL), Arc::clone(&vms.slots))?;
    let source: Source = {
        let slots = Arc::clone(&vms.slots);
        Arc::new(move || control::status_of_all(&slots))
    };
    let metrics = config.metrics.clone();
    let endpoint = Endpoint::start(&metrics.addresses, |path| metrics.access.open_socket(path), &source)?;
    for address in endpoint.addresses() {
        log::info!("metrics on http://{address}/metrics");
    }
    let shm = config.shm.display().to_string();
    die_of_panics(format!(
        "amberlog: this is a bug in amberlog; what was committed is kept in {shm}: end the VMs and start amberlog serve \
         again, or run 'amberlog recover --area {shm}'"
    ));
    let run = config.run.clone();
    access::open_above(&run, config.way())?;
    vms.apply(config)?;
    log::info!("serving {} VMs", vms.threads.len());
    let mut end = Wanted::Stop;
    for signal in signals.forever() {
        if signal == signal_hook::consts::SIGUSR2 {
            match control::hand_over_all(&vms.slots, LEAVING_PATIENCE, true) {
                Ok(()) => {
                    log::info!("ending: the VMMs are left running, and wait for the next daemon");
                    end = Wanted::Leave;
                    break;
                }
                Err(error) => {
                    log::error!("not ending: {error:#}");
                    continue;
                }
            }
        }
        if signal != signal_hook::consts::SIGHUP {
            log::info!("ending: the VMMs are ended, and what is owed goes home");
            break;
        }
        match args.read() {
            Ok(config) if config.run != run => {
                log::error!(
                    "the configuration names another directory for sockets; that needs a new start: nothing was changed"
                );
            }
            Ok(config) => {
                if config.metrics != metrics {
                    log::warn!("the configuration has other metrics; that needs a new start: they stay where they are");
                }
                let prepared = prepare_reports(&config).and_then(|()| access::open_above(&run, config.way()));
                match prepared.and_then(|()| vms.apply(config)) {
                    Ok(()) => log::info!("read the configuration again: {}", vms.pending()),
                    Err(error) => log::error!("{error:#}"),
                }
            }
            Err(error) => log::error!("{error:#}: nothing was changed"),
        }
    }
    vms.stop(&end);
    drop((control, endpoint));
    Ok(ExitCode::SUCCESS)
}

impl Vms {
    /// Has the VMs be those of a configuration.
    fn apply(&mut self, config: Config) -> anyhow::Result<()> {
        let mut slots = self.slots.lock().expect("no panic under this lock");
        // Those that have ended since they were taken out.
        let ended: Vec<_> = slots.iter().filter(|(_, slot)| slot.is_over()).map(|(name, _)| name.clone()).collect();
        for name in ended {
            slots.remove(&name);
            if let Some(thread) = self.threads.remove(&name) {
                let _ = thread.join();
            }
        }
        for (name, slot) in slots.iter() {
            match config.vms.get(name) {
                Some(vm) => slot.want(Wanted::Serve(Box::new(vm.clone()))),
                None => slot.want(Wanted::Gone),
            }
        }
        for (name, vm) in config.vms {
            if slots.contains_key(&name) {
                continue;
            }
            let slot = Slot::new(vm);
            let thread = Arc::clone(&slot);
            let handle = std::thread::Builder::new()
                .name(format!("vm {name}"))
                .spawn(move || thread.run())
                .with_context(|| format!("starting the thread of vm {name}"))?;
            slots.insert(name.clone(), slot);
            self.threads.insert(name, handle);
        }
        Ok(())
    }

    /// What of the configuration takes effect only when a VMM has ended, for people.
    fn pending(&self) -> String {
        let slots = self.slots.lock().expect("no panic under this lock");
        let later: Vec<String> = slots
            .iter()
            .filter_map(|(name, slot)| slot.pending().map(|pending| format!("vm {name} is {pending}")))
            .collect();
        if later.is_empty() {
            return "it is in effect".to_owned();
        }
        format!("{}, which takes effect when its VMM has ended", later.join(", "))
    }

    /// Ends everything, or leaves it, and waits for that.
    fn stop(self, end: &Wanted) {
        for slot in self.slots.lock().expect("no panic under this lock").values() {
            slot.want(end.clone());
        }
        for (name, thread) in self.threads {
            if thread.join().is_err() {
                log::error!("vm {name}: its thread has failed");
            }
        }
    }
}
