//! `amberlog serve`: the daemon. Many VMs, whose VMMs somebody else starts; each finds its disks at Unix sockets.
//!
//! This process is their supervisor: it looks at nothing that a guest says. Each VM is served by a worker, a process of its own
//! (`work`, `slot`), so that what one guest breaks is one VM's.
//!
//! What it must never do: take a disk from a guest that runs because a configuration changed. Failure story: killed at any
//! moment, it takes its workers along and leaves in tmpfs what the VMs are owed, locked for as long as their VMMs live; the
//! next daemon finishes it once they are gone. A guest goes on under another daemon if a service manager has kept what this one kept
//! (`notify`, `inherited`), or a process of its own that outlives it (`depot`), or if it was left (SIGUSR2, `amberlog detach`): then all that was held is on storage, and the next daemon
//! takes it as it is.
//!
//! SIGHUP reads the configuration again. SIGTERM and SIGINT end the VMMs, as `amberlog run` does, and everything goes home.

mod access;
pub mod ask;
mod asked;
pub mod check;
mod config;
mod control;
mod cpus;
pub mod depot;
mod disks;
mod freeze;
mod inherited;
pub mod left;
mod live;
mod memory;
mod moving;
mod notify;
mod power;
mod promise;
mod shutdown;
mod slot;
mod slots;
pub mod snapshot;
mod supervised;
mod words;
pub mod work;

use crate::client;
use crate::exit;
use crate::metrics::endpoint::{Endpoint, Source};
use crate::supervisor::Charge;
use crate::vm::die_of_panics;
use anyhow::Context;
use asked::DiskChange;
use command_line::print_line;
use config::Config;
use control::Control;
use memory::HostMemory;
use notify::{InStore, Manager};
use own_files::OwnDirectory;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use slots::Slots;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use supervised::{By, Supervised, Wish};
use supervision::depot::Taken;
use supervision::{Opened, Shelf, Store};

/// How long the VMs may take to be on storage before the daemon leaves them.
const LEAVING_PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked whether workers answer.
const PULSE: Duration = Duration::from_secs(10);

/// Arguments of `amberlog serve`.
#[derive(clap::Args, Debug)]
pub struct ServeArgs {
    /// The configuration.
    #[arg(long, value_name = "FILE", default_value = "/etc/amberlog/amberlog.toml")]
    config: PathBuf,
    /// Only say whether the configuration is good, and what would keep its VMs from being served: images, directories, sockets.
    #[arg(long)]
    check: bool,
    /// Do not fence the workers in. Otherwise they can start nothing, and their threads that work for a guest make only the system
    /// calls that they need, and open nothing but what is in that VM's directory (seccomp and landlock).
    #[arg(long)]
    no_sandbox: bool,
    /// As it is anyway: how it was said before it was the default.
    #[arg(long, hide = true, conflicts_with = "no_sandbox")]
    sandbox: bool,
}

impl ServeArgs {
    /// The configuration as it is now.
    fn read(&self) -> anyhow::Result<(Config, Arc<str>)> {
        let (config, text) = Config::read(&self.config)?;
        Ok((config, text.into()))
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

/// How long a daemon that was killed may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(3);

/// Has the daemon's directory be this process's until it ends; nothing where the file system cannot say so.
///
/// # Errors
/// When it cannot be made, is not its user's alone, or is another daemon's.
fn own_directory(run: &Path) -> anyhow::Result<Option<File>> {
    open_run(run)?;
    let directory = File::open(run).with_context(|| format!("opening {}", run.display()))?;
    let deadline = Instant::now() + GONE_WITHIN;
    let control = run.join(client::CONTROL);
    loop {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            Err(Errno::AGAIN) => {
                control::check_nobody_answers(&control)?;
                anyhow::bail!(
                    "another daemon has the directory {}: stop it, or give this one another directory (run = ...)",
                    run.display()
                );
            }
            Err(error) => {
                log::debug!("{} cannot be locked: {error}", run.display());
                control::check_nobody_answers(&control)?;
                return Ok(None);
            }
        }
    }
    // One of an earlier amberlog has no such lock.
    control::check_nobody_answers(&control)?;
    Ok(Some(directory))
}

/// Says all that is wrong with what a configuration names.
fn check(args: &ServeArgs, config: &Config, text: &str) -> ExitCode {
    let check::Found { problems, notes } = check::Found::by_whoever_serves(config, text);
    for note in notes {
        crate::exit::say("amberlog", format_args!("note: {note}"));
    }
    for problem in &problems {
        crate::exit::say("amberlog", format_args!("{}", problem.sentence));
    }
    if problems.is_empty() {
        print_line!("{}: good, {} VMs", args.config.display(), config.vms.len());
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

/// The item that says where questions are asked.
const RUN: &str = "run";

/// The VMs, and their threads.
struct Vms {
    slots: Slots,
    threads: BTreeMap<String, JoinHandle<bool>>,
    no_sandbox: bool,
    /// What is kept of them over the death of this process.
    shelf: Shelf,
    /// Those of which another program's daemon had something kept, and how it keeps that.
    foreign: BTreeMap<String, String>,
    /// Something stays in the store.
    is_left: bool,
    /// The daemon's directory is taken when its guests go on.
    has_no_directory_yet: bool,
}

/// What others find of the daemon. Each part is missing until it could be made.
#[derive(Default)]
struct Front {
    control: Option<Control>,
    /// Where that is, and stays.
    is_at: Option<PathBuf>,
    endpoint: Option<Endpoint>,
    memory: Arc<HostMemory>,
}

impl Front {
    /// Makes what is missing. Says what cannot be.
    fn open(&mut self, config: &Config, slots: &Slots) -> Vec<anyhow::Error> {
        let mut failed: Vec<_> = prepare_reports(config).err().into_iter().collect();
        // What is made here is ours alone until it is given to somebody.
        own_files::keep_files_private();
        failed.extend(open_run(&config.run).err());
        failed.extend(access::open_above(&config.run, config.way()).err());
        failed.extend(self.listen(&config.run, slots).err());
        if self.endpoint.is_none() {
            let (metrics, slots, memory) = (&config.metrics, Arc::clone(slots), Arc::clone(&self.memory));
            let source: Source = Arc::new(move || control::status_of_all(&slots, &memory));
            match Endpoint::start(&metrics.addresses, |path| metrics.access.open_socket(path), &source) {
                Ok(endpoint) => {
                    for address in endpoint.addresses() {
                        log::info!("metrics on http://{address}/metrics");
                    }
                    self.endpoint = Some(endpoint);
                }
                // No guest is to wait for that, and no other change of the configuration.
                Err(error) => log::error!("there are no metrics: {error:#}; mend that, and reload (SIGHUP)"),
            }
        }
        failed
    }

    /// Has questions be heard that are asked in `run`.
    fn listen(&mut self, run: &Path, slots: &Slots) -> anyhow::Result<()> {
        if self.control.is_none() {
            self.control =
                Some(Control::listen(&run.join(client::CONTROL), Arc::clone(slots), Arc::clone(&self.memory))?);
            self.is_at = Some(run.to_owned());
        }
        Ok(())
    }
}

fn serve(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let read = args.read();
    if args.check {
        let (config, text) = read.map_err(|error| exit::usage(format!("{error:#}")))?;
        return Ok(check(args, &config, &text));
    }
    let mut signals = signal_hook::iterator::Signals::new([
        signal_hook::consts::SIGHUP,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGUSR2,
    ])?;
    crate::children::take_orphans();
    depot::allow_files();
    let manager = Manager::of_this_process().map(Arc::new);
    let mut vms = Vms::new(args.no_sandbox);
    // Until the end.
    let mut directory = match &read {
        Ok((config, _)) => vms.find(config, manager.as_ref())?,
        // Where else something would be nobody knows.
        Err(_) => {
            if let Some(manager) = &manager {
                let left = inherited::descriptors();
                vms.open(Box::new(InStore::of(manager, &left)), left);
            }
            None
        }
    };
    let parts = vms.parts();
    let (mut served, read_error) = match read {
        Ok(read) => (Some(read), None),
        Err(error) => (None, Some(error)),
    };
    let mut front = Front::default();
    if parts.is_empty() {
        // Nobody waits for anything yet: whatever is wrong ends this process.
        if let Some(error) = read_error {
            return Err(exit::usage(format!("{error:#}")));
        }
        let failed = served.as_ref().map(|(config, _)| front.open(config, &vms.slots)).unwrap_or_default();
        if let Some(error) = failed.into_iter().next() {
            return Err(error);
        }
    } else if let Some(error) = read_error {
        log::error!(
            "{error:#}: the guests that run are served as they were; mend that, and reload the configuration (SIGHUP)"
        );
    }
    own_files::keep_files_private();
    let shm = served
        .as_ref()
        .map_or_else(|| "the tmpfs that it was configured with".into(), |(config, _)| config.shm.display().to_string());
    die_of_panics(format!(
        "amberlog: this is a bug in amberlog; what was committed is kept in {shm}: end the VMs and start amberlog serve \
         again, or run 'amberlog recover --area {shm}'"
    ));
    // Guests that run wait for nothing that can fail: what is wrong with the rest is said, and tried again when that was mended.
    vms.go_on(parts.iter(), served.as_ref());
    if let Some((config, _)) = served.as_ref().filter(|_| vms.has_no_directory_yet) {
        match Vms::take_directory(config) {
            Ok(taken) => directory = taken,
            Err(error) => log::error!("{error:#}: mend that"),
        }
    }
    if let Some(run) = vms.kept_run().filter(|_| served.is_none())
        && let Err(error) = front.listen(&run, &vms.slots)
    {
        log::error!("{error:#}");
    }
    if let Some((config, text)) = served.as_ref() {
        vms.keep_run(&config.run);
        if !parts.is_empty() {
            front
                .open(config, &vms.slots)
                .iter()
                .for_each(|error| log::error!("{error:#}: mend that, and reload (SIGHUP)"));
        }
        match vms.apply(config, text, By::Start) {
            Err(error) if parts.is_empty() => return Err(error),
            other => drop(other.map_err(|error| log::error!("{error:#}"))),
        }
        front.memory.set_budget(config.memory_budget_bytes);
    }
    if let Some((config, _)) = &served {
        crate::logind::warn(&config.shm);
    }
    log::info!("serving {} VMs", vms.threads.len());
    if let Err(error) = feel_pulses(&vms.slots) {
        log::error!("no thread that looks after workers that hang: {error:#}");
    }
    if let Err(error) = memory::look_after(&front.memory, &vms.slots) {
        log::error!("no thread that looks after the memory of all VMs: {error:#}");
    }
    if let Some(manager) = &manager {
        manager.tell("READY=1");
        if let Err(error) = watch(manager, &vms.slots) {
            // A manager that misses it starts another daemon, which goes on.
            log::error!("no thread for the service manager's watchdog: {error:#}");
        }
    }
    let mut end = Wish::Stop;
    for signal in signals.forever() {
        if signal == signal_hook::consts::SIGUSR2 {
            match control::hand_over_all(&vms.slots, LEAVING_PATIENCE, true) {
                Ok(()) => {
                    log::info!("ending: the VMMs are left running, and wait for the next daemon");
                    end = Wish::Leave;
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
            Ok((config, _)) if front.is_at.as_ref().is_some_and(|run| config.run != *run) => {
                log::error!(
                    "the configuration names another directory for sockets; that needs a new start: nothing was changed"
                );
            }
            Ok((config, text)) => {
                if served.as_ref().is_some_and(|(before, _)| config.metrics != before.metrics) {
                    log::warn!("the configuration has other metrics; that needs a new start: they stay where they are");
                }
                let mut failed = front.open(&config, &vms.slots).into_iter();
                match failed.next().map_or_else(|| vms.apply(&config, &text, By::Person), Err) {
                    Ok(()) => {
                        let metrics = served.as_ref().map(|(before, _)| before.metrics.clone());
                        if let Some((before, _)) = &served {
                            vms.change_disks(before, &config, &text, &config.run);
                        }
                        vms.keep_run(&config.run);
                        front.memory.set_budget(config.memory_budget_bytes);
                        log::info!("read the configuration again: {}", vms.pending());
                        let config = Config { metrics: metrics.unwrap_or_else(|| config.metrics.clone()), ..config };
                        served = Some((config, text));
                    }
                    Err(error) => log::error!("{error:#}"),
                }
            }
            Err(error) => log::error!("{error:#}: nothing was changed"),
        }
    }
    if let Some(manager) = &manager {
        manager.tell("STOPPING=1");
    }
    if end == Wish::Stop
        && let Some((config, _)) = &served
    {
        shutdown::shut_down(config, manager.as_deref(), &mut signals);
    }
    let is_home = vms.stop(&end, manager.as_ref());
    drop((front, directory));
    // Each has said what is kept of it, and where.
    Ok(if is_home || end == Wish::Leave { ExitCode::SUCCESS } else { ExitCode::from(exit::FAILED) })
}

/// Tells each what is wanted of it. One whose worker does not answer keeps no other one waiting.
fn want_at_once<'a>(by: By, wishes: impl Iterator<Item = (&'a Arc<Supervised>, Wish)>) {
    std::thread::scope(|all| {
        for (slot, wish) in wishes {
            let wanted = wish.clone();
            if std::thread::Builder::new().spawn_scoped(all, move || slot.want(wanted, by)).is_err() {
                slot.want(wish, by);
            }
        }
    });
}

/// Looks after workers that hang.
fn feel_pulses(slots: &Slots) -> anyhow::Result<()> {
    let slots = Arc::clone(slots);
    std::thread::Builder::new().name("pulse".to_owned()).spawn(move || {
        loop {
            std::thread::sleep(PULSE);
            let all: Vec<_> = slots.lock().expect("no panic under this lock").values().cloned().collect();
            all.iter().filter(|slot| !slot.is_over()).for_each(|slot| slot.look_at_directory());
            std::thread::scope(|scope| {
                for slot in all.iter().filter(|slot| !slot.is_over()) {
                    // One that cannot be asked now is asked the next time.
                    let _ = std::thread::Builder::new().spawn_scoped(scope, || slot.feel_pulse());
                }
            });
        }
    })?;
    Ok(())
}

/// Tells the service manager, as often as it wants to hear it, that questions are answered.
fn watch(manager: &Arc<Manager>, slots: &Slots) -> anyhow::Result<()> {
    let slots = Arc::clone(slots);
    // Whoever answers a question takes this lock.
    Ok(manager.watch(move || drop(slots.lock().expect("no panic under this lock")))?)
}

impl Vms {
    fn new(no_sandbox: bool) -> Self {
        Vms {
            slots: Slots::default(),
            threads: BTreeMap::new(),
            no_sandbox,
            shelf: Shelf::default(),
            foreign: BTreeMap::new(),
            is_left: false,
            has_no_directory_yet: false,
        }
    }

    /// Takes what an earlier supervisor had, if there was one, and has what this one has kept. Gives what keeps others from this directory.
    fn find(&mut self, config: &Config, manager: Option<&Arc<Manager>>) -> anyhow::Result<Option<File>> {
        let run = &config.run;
        let left = inherited::descriptors();
        if let Some(manager) = manager.filter(|_| Shelf::has_parts(&left)) {
            // Guests wait: for nothing that can fail or hang. The directory is taken after they go on.
            self.open(Box::new(InStore::of(manager, &left)), left);
            self.has_no_directory_yet = true;
            return Ok(None);
        }
        let directory = Self::take_directory(config)?;
        // Where nobody had started the daemon before, its guests are left with its depot.
        let of_depot = if manager.is_some() { depot::find(run) } else { depot::take(run).map(Some) };
        match (of_depot, manager) {
            (Ok(Some(taken)), _) => self.open_depot(taken)?,
            (Ok(None), Some(manager)) => self.open(Box::new(InStore::of(manager, &left)), left),
            (Ok(None), None) => {}
            (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => log::error!(
                "no process keeps descriptors over this daemon's death ({error}): a guest whose daemon is killed waits until it is ended"
            ),
            // It has what guests wait for, perhaps.
            (Err(error), _) => anyhow::bail!("{error}; or end that process (depot), and the VMMs that wait"),
        }
        Ok(directory)
    }

    fn take_directory(config: &Config) -> anyhow::Result<Option<File>> {
        // With the modes of its own ones; what is wrong with it is said later.
        let _ = prepare_reports(config);
        own_files::keep_files_private();
        own_directory(&config.run)
    }

    fn open(&mut self, store: Box<dyn Store>, left: Vec<(String, OwnedFd)>) {
        let (format, before) = (crate::worker::store_format(), crate::worker::store_format_before());
        match Shelf::open(store, left, &format, &[before.as_str()]) {
            Opened::Ours(shelf) => self.shelf = shelf,
            Opened::Foreign { format, parts } => {
                log::error!(
                    "what an earlier daemon had kept is kept in another way than this program's, and is not touched; nor is anything \
                     kept over this daemon's death"
                );
                self.foreign = parts.into_iter().map(|name| (name, format.clone())).collect();
                self.is_left = true;
            }
        }
    }

    /// The same of a depot's. It lets go of what is not understood as soon as nobody needs it, and then this program may begin.
    fn open_depot(&mut self, taken: Taken) -> anyhow::Result<()> {
        let (format, before) = (crate::worker::store_format(), crate::worker::store_format_before());
        match taken.open(&format, &[before.as_str()]) {
            Opened::Ours(shelf) => self.shelf = shelf,
            Opened::Foreign { format, parts } => {
                let format = if format.is_empty() { "an earlier amberlog" } else { &format };
                let vms = parts.into_iter().collect::<Vec<_>>().join(", ");
                anyhow::bail!(
                    "the guests of an earlier daemon ({vms}) wait for one that keeps what it has as {format} does it, and not as this one ({}): \
                     start that program, or end their VMMs, and then this one",
                    crate::worker::store_format()
                );
            }
        }
        Ok(())
    }

    /// Where questions were asked to the daemon before.
    fn kept_run(&self) -> Option<PathBuf> {
        use std::os::unix::ffi::OsStrExt;
        Some(std::ffi::OsStr::from_bytes(self.shelf.words(RUN)?).into())
    }

    fn keep_run(&mut self, run: &Path) {
        if self.kept_run().as_deref() != Some(run) {
            self.shelf.put(RUN, run.as_os_str().as_encoded_bytes(), &[]);
        }
    }

    /// The VMs of which an earlier supervisor had something.
    fn parts(&self) -> BTreeSet<String> {
        self.shelf.parts().into_iter().chain(self.foreign.keys().cloned()).collect()
    }

    /// Goes on with what an earlier supervisor had, which has died; also with VMs that are not in the configuration any more.
    fn go_on<'n>(&mut self, names: impl Iterator<Item = &'n String>, served: Option<&(Config, Arc<str>)>) {
        for name in names {
            let wish = served.map_or(Wish::AsServed, |(config, text)| {
                config.vms.get(name).map_or(Wish::Gone, |vm| Wish::Serve(Arc::clone(text), vm.on_crash))
            });
            log::info!("vm {name}: what an earlier supervisor kept of it is here");
            if let Err(error) = self.start(name, wish) {
                // The others' guests go on.
                log::error!("{error:#}");
            }
        }
    }

    fn start(&mut self, name: &str, wish: Wish) -> anyhow::Result<()> {
        let charge = match self.foreign.get(name) {
            Some(format) => Charge::of_another_program(format),
            None => Charge::on(self.shelf.split(name)),
        };
        let slot = Supervised::new(name, wish, self.no_sandbox, charge);
        let thread = Arc::clone(&slot);
        let handle = std::thread::Builder::new()
            .name(format!("vm {name}"))
            .spawn(move || thread.run())
            .with_context(|| format!("starting the thread of vm {name}"))?;
        self.slots.lock().expect("no panic under this lock").insert(name.to_owned(), slot);
        self.threads.insert(name.to_owned(), handle);
        Ok(())
    }

    /// Has the VMs be those of a configuration.
    fn apply(&mut self, config: &Config, text: &Arc<str>, by: By) -> anyhow::Result<()> {
        // Nobody waits for this lock while a worker is told something.
        let known = self.slots.lock().expect("no panic under this lock").clone();
        let wish = |name: &String| config.vms.get(name).map(|vm| Wish::Serve(Arc::clone(text), vm.on_crash));
        let living = known.iter().filter(|(_, slot)| !slot.is_over());
        want_at_once(by, living.map(|(name, slot)| (slot, wish(name).unwrap_or(Wish::Gone))));
        // Those that have ended since they were taken out. Nobody waits for the lock on all while one of them ends.
        for name in known.iter().filter(|(_, slot)| slot.is_over()).map(|(name, _)| name) {
            self.slots.lock().expect("no panic under this lock").remove(name);
            if let Some(thread) = self.threads.remove(name) {
                self.is_left |= !thread.join().unwrap_or_default();
            }
        }
        for (name, vm) in &config.vms {
            if self.threads.contains_key(name) {
                continue;
            }
            self.start(name, Wish::Serve(Arc::clone(text), vm.on_crash))?;
        }
        Ok(())
    }

    /// Has disks that came or went in the configuration since it was read last come or go, where a guest runs. That takes its time.
    fn change_disks(&self, before: &Config, config: &Config, text: &Arc<str>, run: &Path) {
        let slots = self.slots.lock().expect("no panic under this lock").clone();
        for (name, slot) in slots {
            let (Some(was), Some(is)) = (before.vms.get(&name), config.vms.get(&name)) else { continue };
            if was == is || slot.pending().as_deref() != Some("changed") {
                continue;
            }
            let (text, run) = (text.to_string(), run.to_owned());
            let changing = std::thread::Builder::new().name(format!("disks {name}"));
            let changing = changing.spawn(move || match power::change_disks(&slot, &run, DiskChange::Config(text)) {
                Ok(changes) => {
                    log::info!("vm {name}: disks that came: {}; that went: {}", changes["added"], changes["removed"]);
                }
                Err(error) => log::warn!("{error:#}"),
            });
            if let Err(error) = changing {
                log::error!("no thread for disks that come or go: {error}");
            }
        }
    }

    /// What of the configuration takes effect only when a VMM has ended, for people.
    fn pending(&self) -> String {
        let slots = self.slots.lock().expect("no panic under this lock").clone();
        let later: Vec<String> = slots
            .iter()
            .filter_map(|(name, slot)| slot.pending().map(|pending| format!("vm {name} is {pending}")))
            .collect();
        if later.is_empty() {
            return "it is in effect".to_owned();
        }
        format!("{}, which takes effect when its VMM has ended", later.join(", "))
    }

    /// Ends everything, or leaves it, and waits for that, for which the service manager is asked to wait as well. Says whether nothing is
    /// kept of any VM.
    fn stop(mut self, end: &Wish, manager: Option<&Arc<Manager>>) -> bool {
        let ending = manager.map(|manager| manager.extend_end());
        if let Some(Err(error)) = &ending {
            log::warn!("no thread that asks the service manager for time: {error}");
        }
        let slots = self.slots.lock().expect("no panic under this lock").clone();
        want_at_once(By::Person, slots.values().map(|slot| (slot, end.clone())));
        for (name, thread) in self.threads {
            match thread.join() {
                Ok(is_let_go) => self.is_left |= !is_let_go,
                Err(_) => {
                    self.is_left = true;
                    log::error!("vm {name}: its thread has failed");
                }
            }
        }
        if !self.is_left {
            self.shelf.clear();
        }
        !self.is_left
    }
}
