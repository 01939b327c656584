//! The supervisor of an `amberlog run`: starts the worker that serves the disks, then the VMM as its own child, and waits for both.
//!
//! The VMM dies with this process, and has the lock of the VM's directory. A worker that dies is followed by another one, which goes on
//! with the guest. Without one the guest would hang, so the VMM is ended where that is not possible, and a last worker brings home what
//! the guest is owed.

use super::models::Models;
use super::{Needed, RunArgs, child};
use crate::exit;
use crate::power_button::PowerButton;
use crate::supervisor::Charge;
use crate::vm::watched::Watched;
use crate::vm::{die_of_panics, qemu};
use crate::worker::{Program, Worker, how_it_ended};
use anyhow::Context;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use supervision::{Channel, Deaths, Next, OnCrash, Order, Said};

/// What is left of a VM's patience when it is told to end.
const TERMINATION_PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether a VM that is held has ended.
const HOLDING: Duration = Duration::from_millis(100);

/// Runs the VM to its end.
pub fn supervise(args: &RunArgs) -> anyhow::Result<ExitCode> {
    if args.disks.is_empty() && args.journal_disks.is_empty() {
        return Err(exit::usage("there is no disk to serve: give --disk IMAGE"));
    }
    // Before anything is opened: what is wrong with the arguments is wrong whatever the images are.
    if let Some(sentence) = qemu::contradiction(&args.vmm, false) {
        return Err(exit::usage(sentence));
    }
    args.vm().disk_names().map_err(|error| exit::usage(format!("{error:#}")))?;
    super::refuse_images_as_outputs(args)?;
    crate::logind::warn(&args.vm().shm);
    let _entered = log_context::enter(log_context::Context::vm(&args.name));
    die_of_panics(
        "amberlog: this is a bug in amberlog, and the VM ends with it; what was committed is kept".to_owned(),
    );
    let users_mask = own_files::keep_files_private();
    crate::children::take_orphans();
    // They end last: the worker asks them to its own end.
    let models = Models::start(&args.vm().named_models(), args.time_scale)?;
    let mut workers = Workers::start(args, worker_arguments(models.sockets()))?;
    let Some((needed, lock)) = workers.wait_until_ready()? else {
        // It has said why.
        return worker_code(workers.worker.wait()?).map(ExitCode::from);
    };
    // The VMM's number, once it runs, for the threads that pass signals on and watch the worker.
    let vmm_pid = Arc::new(AtomicI32::new(0));
    let mut arguments = needed.arguments;
    let monitor = (args.shutdown_seconds > 0).then(UnixStream::pair).transpose().context("making a pair of sockets")?;
    let (button, theirs) = monitor.map(|(ours, theirs)| (PowerButton::of(ours), OwnedFd::from(theirs))).unzip();
    if let Some(theirs) = &theirs {
        arguments.extend(qemu::monitor_at(theirs.as_raw_fd()).map(OsString::from));
    }
    let received = pass_signals_on(&vmm_pid, button, Duration::from_secs(args.shutdown_seconds))?;
    let inherited: Vec<_> = std::iter::once(lock.as_fd()).chain(theirs.as_ref().map(AsFd::as_fd)).collect();
    let mut vmm = match child::start(&arguments, &needed.environment, &inherited, users_mask) {
        Ok(vmm) => vmm,
        Err(error) => {
            // Nothing is owed: the worker takes its directory away.
            let _ = workers.worker.channel.send(&Order::Ended, &[]);
            workers.charge.hear_to_the_end(&mut workers.worker)?;
            return Err(error.into());
        }
    };
    drop((lock, theirs));
    vmm_pid.store(vmm.id() as i32, Ordering::SeqCst);
    if received.load(Ordering::SeqCst) != 0 {
        // The signal came before there was anybody to pass it to.
        vmm.kill()?;
    }
    let current = Arc::new(Mutex::new(Current { channel: Arc::clone(&workers.worker.channel), has_ended: false }));
    let watching = {
        let (current, vmm_pid) = (Arc::clone(&current), Arc::clone(&vmm_pid));
        let thread = std::thread::Builder::new().name("worker".to_owned());
        log_context::spawn(thread, move || workers.watch(&current, &vmm_pid))?
    };
    let status = vmm.wait().context("waiting for the VMM")?;
    vmm_pid.store(0, Ordering::SeqCst);
    {
        let mut current = current.lock().expect("no panic under this lock");
        current.has_ended = true;
        // It may be gone: then the next one is told.
        let _ = current.channel.send(&Order::Ended, &[]);
    }
    let ended = watching.join().map_err(|_| anyhow::anyhow!("the thread that watches the worker has failed"))?;
    let code = worker_code(ended?)?;
    Ok(if code == 0 { exit_code(status, received.load(Ordering::SeqCst)) } else { ExitCode::from(code) })
}

/// The worker of the moment, for the thread that waits for the VMM.
struct Current {
    channel: Arc<Channel>,
    has_ended: bool,
}

/// One worker after the other.
struct Workers {
    worker: Worker,
    /// What each of them is told.
    arguments: Vec<OsString>,
    charge: Charge,
    deaths: Deaths,
    on_crash: OnCrash,
}

impl Workers {
    fn start(args: &RunArgs, arguments: Vec<OsString>) -> anyhow::Result<Self> {
        let mut charge = Charge::default();
        let worker = start_worker(&mut charge, &arguments)?;
        let deaths = Deaths::at_most(args.deaths_max);
        Ok(Workers { worker, arguments, charge, deaths, on_crash: args.on_crash })
    }

    /// What the VMM needs, and the lock that it inherits. Nothing if the worker has ended.
    fn wait_until_ready(&mut self) -> anyhow::Result<Option<(Needed, OwnedFd)>> {
        loop {
            match self.worker.channel.receive::<Said>().context("listening to the worker")? {
                None => return Ok(None),
                Some((Said::Ready, descriptors)) => {
                    let [needed, lock] = <[OwnedFd; 2]>::try_from(descriptors)
                        .map_err(|_| anyhow::anyhow!("the worker did not say what the VMM needs"))?;
                    return Ok(Some((Needed::read(File::from(needed))?, lock)));
                }
                Some((said, descriptors)) => self.charge.hear(&said, descriptors, &self.worker.channel),
            }
        }
    }

    /// Has another worker go on where one has died, until one ends as it was to. Gives how the last one ended. Without a
    /// worker the guest would hang: if they die again and again, the VMM is ended.
    fn watch(mut self, current: &Mutex<Current>, vmm_pid: &AtomicI32) -> anyhow::Result<ExitStatus> {
        // The next worker inherits that before it can ask for it.
        crate::turns::be_short();
        loop {
            let status = self.charge.hear_to_the_end(&mut self.worker).context("waiting for the worker")?;
            let has_ended = current.lock().expect("no panic under this lock").has_ended;
            // One that could not bring home what is owed has said so. One whose guest still runs has not done what it was to do, nor has
            // one that got nowhere while its VMM ended.
            let is_served = self.charge.is_served();
            let is_done = status.success() && (has_ended || !is_served);
            if is_done || has_ended && status.code().is_some() && !is_served {
                return Ok(status);
            }
            let next = self.deaths.died(Instant::now(), self.on_crash);
            if self.on_crash == OnCrash::Hold && self.charge.is_served() {
                log::error!(
                    "the worker that serves the disks {}; the guest waits until its VMM is ended",
                    how_it_ended(status)
                );
                return self.bring_home(current, status);
            }
            if next != Next::Restart || !self.charge.is_served() {
                log::error!("the worker that serves the disks {}; the VMM is ended", how_it_ended(status));
                end(vmm_pid);
                return if self.charge.is_served() { self.bring_home(current, status) } else { Ok(status) };
            }
            log::warn!("the worker that serves the disks {}; another one goes on", how_it_ended(status));
            match start_worker(&mut self.charge, &self.arguments) {
                Ok(worker) => self.worker = worker,
                Err(error) => {
                    log::error!("no other worker can be started, so the VMM is ended: {error:#}");
                    end(vmm_pid);
                    return Ok(status);
                }
            }
            let mut current = current.lock().expect("no panic under this lock");
            current.channel = Arc::clone(&self.worker.channel);
            if current.has_ended {
                let _ = current.channel.send(&Order::Ended, &[]);
            }
        }
    }

    /// No worker goes on with the guest. When its VMM has ended, a last one brings home what is owed, and writes the report. Gives how
    /// that one ended, or the one before if there can be none.
    fn bring_home(&mut self, current: &Mutex<Current>, status: ExitStatus) -> anyhow::Result<ExitStatus> {
        while !current.lock().expect("no panic under this lock").has_ended {
            std::thread::sleep(HOLDING);
        }
        match start_worker(&mut self.charge, &self.arguments) {
            Ok(worker) => self.worker = worker,
            Err(error) => {
                log::error!("no other worker can be started: {error:#}");
                return Ok(status);
            }
        }
        let _ = self.worker.channel.send(&Order::Ended, &[]);
        self.charge.hear_to_the_end(&mut self.worker).context("waiting for the worker")
    }
}

/// What a worker is told: what this program was, and where its modelled disks answer.
fn worker_arguments(model_sockets: Option<&Path>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(sockets) = model_sockets {
        // Behind the name of the command: at the end it would be the VMM's.
        arguments.splice(1..1, ["--model-sockets".into(), sockets.into()]);
    }
    arguments
}

fn start_worker(charge: &mut Charge, arguments: &[OsString]) -> anyhow::Result<Worker> {
    // A report or a trace may be wanted at /dev/stdout.
    let worker = Worker::start(&Program::own(), arguments.iter().cloned(), Stdio::inherit())?;
    if let Err(error) = charge.tell(&worker.channel) {
        // It has died, which is seen where it is listened to.
        log::debug!("telling a worker to begin: {error}");
    }
    Ok(worker)
}

/// Without a worker a guest would hang.
fn end(vmm_pid: &AtomicI32) {
    if let Some(vmm) = Watched::new(vmm_pid.load(Ordering::SeqCst)) {
        vmm.signal(rustix::process::Signal::KILL);
    }
}

/// The code that a worker ended with.
fn worker_code(status: ExitStatus) -> anyhow::Result<u8> {
    match status.code() {
        Some(code) => Ok(code as u8),
        None => Err(anyhow::anyhow!(
            "the worker that served the disks {}; what was committed is kept: run amberlog on the same images again, or \
             'amberlog recover --area' on its directory",
            how_it_ended(status)
        )),
    }
}

/// What ends a program that a terminal or a service manager has started: the VMM ends, and what it is owed goes home.
const ENDING: [i32; 4] = [
    signal_hook::consts::SIGTERM,
    signal_hook::consts::SIGINT,
    signal_hook::consts::SIGHUP,
    signal_hook::consts::SIGQUIT,
];

/// Whether whoever started this program wants it to outlive a signal (nohup).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).map(str::trim);
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    ignored & (1 << (signal - 1)) != 0
}

/// These signals end the VMM; everything goes home afterwards. Where it has a power button, the first one presses that. Returns where the
/// first signal's number is put.
fn pass_signals_on(
    vmm_pid: &Arc<AtomicI32>,
    mut button: Option<PowerButton>,
    patience: Duration,
) -> anyhow::Result<Arc<AtomicI32>> {
    let received = Arc::new(AtomicI32::new(0));
    // Shells have what they start in the background ignore SIGINT and SIGQUIT; whoever sends one means it.
    let is_meant = |signal: &i32| *signal != signal_hook::consts::SIGHUP || !is_ignored(*signal);
    let mut signals = signal_hook::iterator::Signals::new(ENDING.into_iter().filter(is_meant))?;
    let (pid, first) = (Arc::clone(vmm_pid), Arc::clone(&received));
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let handle = signals.handle();
        let mut waiting: VecDeque<i32> = VecDeque::new();
        while !handle.is_closed() {
            let Some(signal) = waiting.pop_front() else {
                waiting.extend(signals.wait());
                continue;
            };
            let _ = first.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
            let Some(watched) = Watched::new(pid.load(Ordering::SeqCst)) else { continue };
            if let Some(mut button) = button.take() {
                log::info!("the guest is asked to shut down, and has {} s", patience.as_secs());
                let more = RefCell::new((&mut signals, &mut waiting));
                let is_wanted = || {
                    let (signals, waiting) = &mut *more.borrow_mut();
                    waiting.extend(signals.pending());
                    waiting.is_empty()
                };
                match button.press() {
                    Ok(()) if button.wait(patience, is_wanted) => continue,
                    Ok(()) => log::warn!("the guest has not shut down; its VMM is ended"),
                    Err(error) => log::warn!("the guest cannot be asked to shut down ({error}); its VMM is ended"),
                }
            }
            watched.signal(rustix::process::Signal::TERM);
            if !watched.wait(TERMINATION_PATIENCE) {
                log::warn!("the VMM did not end in {} s; it is killed", TERMINATION_PATIENCE.as_secs());
                watched.signal(rustix::process::Signal::KILL);
            }
        }
    })?;
    Ok(received)
}

fn exit_code(status: ExitStatus, received: i32) -> ExitCode {
    let signal = if received == 0 { status.signal().unwrap_or(0) } else { received };
    match (signal, status.code()) {
        (0, Some(code)) => ExitCode::from(code as u8),
        (signal, _) => ExitCode::from(128 + signal as u8),
    }
}

impl Needed {
    /// As the worker has written it.
    pub(super) fn read(mut file: File) -> anyhow::Result<Self> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).context("reading what the VMM needs")?;
        bytes.pop_if(|last| *last == 0);
        let mut words = bytes.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
        let mut text = || words.next().and_then(|word| word.into_string().ok()).unwrap_or_default();
        let count: usize = text().parse().context("reading what the VMM needs")?;
        let mut environment = Vec::new();
        for _ in 0..count {
            let name = words.next().and_then(|word| word.into_string().ok()).unwrap_or_default();
            environment.push((name, words.next().unwrap_or_default()));
        }
        Ok(Needed { environment, arguments: words.collect() })
    }
}
