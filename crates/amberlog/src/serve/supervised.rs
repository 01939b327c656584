//! One configured VM, as the supervisor has it: its worker, what is wanted of it, and the thread that starts one worker after
//! the other until the VM is not wanted any more.
//!
//! Nothing that a guest says is looked at here: what the worker answers is passed on, but for what a VMM is started with (`words`). Failure story: a worker that dies is
//! followed by another one at once; when it dies again and again none follows until somebody wants it (a reload), and that is
//! said. What a guest is owed whose VMM has ended while no worker could go on with it goes home from its files, whatever is wanted of
//! the VM by then; where that fails it stays, and that is said.

use super::asked::{Asked, DiskChange, WantedName, has_gone};
use super::config::VmConfig;
use super::words;
use crate::supervisor::Charge;
use crate::supervisor::place::{self, Place};
use crate::vm::watched::Watched;
use crate::worker::{Program, Worker, how_it_ended};
use anyhow::Context;
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use supervision::{Channel, Deaths, Next, OnCrash, Order};

/// How long a worker may take beyond what was asked for.
const PATIENCE: Duration = Duration::from_secs(8);
/// Bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// The same where a word is all that there is to say.
const SHORT_ANSWER_BYTES_MAX: u64 = 64 << 10;
/// How long another program's worker may take until it serves.
const REPLACED_WITHIN: Duration = Duration::from_secs(30);
/// How long a disk that comes may take: what an earlier process left of it is brought home.
const CHANGED_WITHIN: Duration = Duration::from_secs(120);
/// How long a VMM that is killed may take to end.
const ENDING_PATIENCE: Duration = Duration::from_secs(10);
/// How often a worker is started in vain before a daemon that ends does so without it.
const TRIES_AT_THE_END: u32 = 3;
/// A worker that has not said for so long that it is there is taken for hung. It waits for nothing to say so, storage least of all.
const HUNG_AFTER: Duration = Duration::from_secs(30);
/// The pause after a worker that could not even be started, and how often it is looked whether somebody waits for an answer.
const PAUSE: Duration = Duration::from_secs(1);

/// What is wanted of a VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Wish {
    /// It is served, as this configuration says.
    Serve(Arc<str>, OnCrash),
    /// It is served as it was, while nobody knows the configuration.
    AsServed,
    /// It is not in the configuration any more.
    Gone,
    /// The daemon ends, and its VMM with it.
    Stop,
    /// The daemon ends, and its VMM stays.
    Leave,
}

/// Who says what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A daemon that starts: nobody has looked at anything.
    Start,
    /// Somebody who wants it otherwise, or wants it tried again.
    Person,
}

impl Wish {
    fn question(&self) -> Asked {
        let (wanted, config) = match self {
            Wish::Serve(config, _) => (WantedName::Serve, Some(config.to_string())),
            Wish::AsServed => (WantedName::Serve, None),
            Wish::Gone => (WantedName::Gone, None),
            Wish::Stop => (WantedName::Stop, None),
            Wish::Leave => (WantedName::Leave, None),
        };
        Asked::Want { wanted, config }
    }
}

/// Why no other worker could go on with a VM, if none could: `status` is its entry there.
pub fn cannot_go_on(status: &Value) -> Option<String> {
    let disks = status["disks"].as_array()?;
    let name = |disk: &Value| disk["name"].as_str().unwrap_or_default().to_owned();
    if let Some(disk) = disks.iter().find(|disk| disk["rings_can_be_followed"] == false) {
        return Some(format!(
            "its VMM has no place for what is in flight on disk {} (its in-flight region is of an earlier amberlog, or there is none), so that \
             another worker may not know how far the guest's rings have got: reset the guest, which gives it one, or end its VMM",
            name(disk)
        ));
    }
    if let Some(disk) = disks.iter().find(|disk| disk["image_is_in_place"] == false) {
        return Some(format!(
            "the image of disk {} is not in its place any more, or another file is, and another worker opens it by its name: put it back",
            name(disk)
        ));
    }
    disks.iter().find(|disk| disk["nvm"]["can_be_followed"] == false).map(|disk| {
        format!(
            "what another worker has to know of the journal on NVM of disk {} is not noted (the log says why): unmount its file system, or end \
             its VMM",
            name(disk)
        )
    })
}

/// What of a VM would end with its worker, and not go on under the next one, if anything would: `status` is its entry there.
fn would_end(status: &Value) -> Option<&'static str> {
    if status["is_copied"] == true {
        return Some("a snapshot of it is being copied, and would not come about");
    }
    (status["is_frozen"] == true).then_some("it is frozen, and would go on in the midst of what is copied")
}

/// A VM's entry in what its worker answers, which may be anything: nothing here may panic of it.
fn entry_of(mut answer: Value) -> anyhow::Result<Value> {
    let entry = answer.pointer_mut("/vms/0").filter(|entry| entry.is_object()).map(Value::take);
    entry.context("what its worker answers is no status of a VM")
}

/// A worker of another program was there, and did not serve: with that program no further VM is tried.
#[derive(Debug)]
pub struct DoesNotServe(pub String);

impl std::fmt::Display for DoesNotServe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DoesNotServe {}

/// Whether a process ends in this moment, and nobody has asked how yet.
fn ends_soon(pid: u32) -> bool {
    (0..100).any(|_| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let has_ended = stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']));
        if !has_ended {
            std::thread::sleep(Duration::from_millis(5));
        }
        has_ended
    })
}

/// A stream that is read until some moment, however often something comes, and no longer than somebody waits for it.
struct Until<'a> {
    stream: UnixStream,
    deadline: Instant,
    /// Who waits, if that is to be looked at.
    asker: Option<&'a UnixStream>,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(if self.asker.is_some() { left.min(PAUSE) } else { left }))?;
            match (self.stream.read(buffer), self.asker) {
                (Err(error), Some(asker)) if error.kind() == io::ErrorKind::WouldBlock => {
                    if has_gone(asker) {
                        return Err(io::Error::other("whoever asked has gone"));
                    }
                }
                (result, _) => return result,
            }
        }
    }
}

struct Running {
    channel: Arc<Channel>,
    pid: u32,
    /// Its number may be another one's as soon as its end was seen.
    process: Option<Arc<Watched>>,
}

struct Inner {
    wish: Wish,
    /// As it was wished last.
    on_crash: OnCrash,
    /// As it was wished last: nothing of a VM that no configuration has, or that was not understood.
    config: Option<Arc<VmConfig>>,
    worker: Option<Running>,
    deaths: Deaths,
    /// Why no worker is there, and none is started.
    is_held: bool,
    /// How the last worker that should not have ended did.
    last_death: Option<String>,
    /// What workers are started of.
    program: Program,
    /// The last one that was put in the place of another one and has served: what it has written down, an older one may not be able to read.
    proven: Option<Program>,
    /// This worker's end is wanted, so that one of another program goes on.
    is_replaced: bool,
    /// Whoever has wanted that waits to see whether it serves: one that does not costs its guest nothing.
    is_on_trial: bool,
    /// Why no worker may go on with what there is of it.
    doubt: Option<String>,
    /// The VMM, as its worker said it last, or as what is kept of it says while there is none.
    vmm: Option<i32>,
    /// Directories of guests that were served and are no more, and that no worker has brought home.
    owed: Vec<PathBuf>,
    is_over: bool,
}

impl Inner {
    /// After so many starts in vain (the first is 1) the next one is of this program. One that was just put in the place of another one is judged
    /// by who did that. One that has served before may be the only one that can read what is there; or its file has gone.
    fn try_program(&mut self, failed: u32) {
        let proven = self.proven.clone().filter(|_| failed % 2 == 1);
        self.program = proven.unwrap_or_else(Program::own);
    }

    /// What else can be done of a VM that is held.
    fn or_end_vmm(&self) -> String {
        self.vmm.map_or_else(String::new, |pid| format!(", or end its VMM (process {pid})"))
    }
}

/// See the module.
pub struct Supervised {
    name: String,
    no_sandbox: bool,
    /// Until its thread begins.
    charge: Mutex<Option<Charge>>,
    /// Where its directory is.
    place: Arc<Place>,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Disks come and go one request after the other.
    changing: Mutex<()>,
}

impl Supervised {
    /// A VM of which that is wanted, with what there is of it already.
    pub fn new(name: &str, wish: Wish, no_sandbox: bool, charge: Charge) -> Arc<Self> {
        let (on_crash, config) = match &wish {
            Wish::Serve(source, on_crash) => (*on_crash, words::configured(source, name).ok().map(Arc::new)),
            _ => (OnCrash::default(), None),
        };
        let doubt = charge.doubt();
        let vmm = charge.living_vmm();
        let held = charge.held().map(str::to_owned);
        Arc::new(Supervised {
            name: name.to_owned(),
            no_sandbox,
            place: charge.place(),
            charge: Mutex::new(Some(charge)),
            inner: Mutex::new(Inner {
                wish,
                on_crash,
                config,
                worker: None,
                deaths: Deaths::default(),
                is_held: held.is_some(),
                last_death: held,
                program: Program::own(),
                proven: None,
                is_replaced: false,
                is_on_trial: false,
                doubt,
                vmm,
                owed: Vec::new(),
                is_over: false,
            }),
            changed: Condvar::new(),
            changing: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Says what is wanted from now on. Where somebody says it who may have looked at why its workers died, they are tried again.
    pub fn want(&self, wish: Wish, by: By) {
        {
            let mut inner = self.lock();
            if let Wish::Serve(source, on_crash) = &wish {
                inner.on_crash = *on_crash;
                inner.config = words::configured(source, &self.name).ok().map(Arc::new);
            }
            if !matches!(inner.wish, Wish::Stop | Wish::Leave) {
                inner.wish = wish;
            }
            if by == By::Person {
                inner.is_held = false;
                inner.deaths.forgive();
            }
            self.changed.notify_all();
        }
        if let Err(error) = self.tell() {
            log::warn!("vm {}: telling its worker what is wanted: {error:#}", self.name);
        }
    }

    /// Tells the worker, if there is one; otherwise the next one is told.
    ///
    /// # Errors
    /// When it does not understand that, or does not answer though it lives.
    fn tell(&self) -> anyhow::Result<()> {
        let (question, pid) = {
            let inner = self.lock();
            (inner.wish.question(), inner.worker.as_ref().map(|worker| worker.pid))
        };
        let Some(pid) = pid else { return Ok(()) };
        match self.ask(&question, PATIENCE) {
            Ok(_) => Ok(()),
            // It may end before it has answered.
            Err(error) if ends_soon(pid) => {
                log::debug!("telling the worker what is wanted: {error:#}");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Whether its thread has ended, or is about to.
    pub fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// As while a thread of it is busy under its lock.
    #[cfg(test)]
    pub(super) fn while_it_is_busy<T>(&self, then: impl FnOnce() -> T) -> T {
        let _busy = self.lock();
        then()
    }

    /// Log lines of this thread are about this VM.
    fn enter(&self) -> log_context::Entered {
        log_context::enter(log_context::Context::vm(&self.name))
    }

    /// The thread of a VM; ends when it is not wanted any more. Says whether nothing of it is kept.
    pub fn run(&self) -> bool {
        let _entered = self.enter();
        // A worker inherits that before it can ask for it.
        crate::turns::be_short();
        let mut charge = self.charge.lock().expect("no panic under this lock").take().unwrap_or_default();
        if let Some(doubt) = charge.doubt().filter(|_| !charge.vmm_has_ended()) {
            log::error!("vm {}: no worker goes on with its guest: {doubt}", self.name);
            if charge.living_vmm().is_some() && self.lock().on_crash == OnCrash::KillVmm {
                self.end_vmm(&mut charge);
            }
        }
        let mut failed = 0;
        loop {
            if !self.is_wanted(&mut charge) {
                if self.finish(&mut charge) {
                    return charge.is_empty();
                }
                continue;
            }
            match self.run_worker(&mut charge) {
                Ok(()) => failed = 0,
                Err(error) => {
                    failed += 1;
                    let wish = {
                        let mut inner = self.lock();
                        inner.try_program(failed);
                        inner.wish.clone()
                    };
                    if failed >= TRIES_AT_THE_END && matches!(wish, Wish::Stop | Wish::Leave) {
                        log::error!("vm {}: {error:#}", self.name);
                        self.finish(&mut charge);
                        return charge.is_empty();
                    }
                    log::error!("vm {}: {error:#}; tried again until it works", self.name);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// No worker follows. Ends the VMM of a guest that nobody goes on with where the daemon ends, and brings home what guests are owed
    /// that are no more. Says whether it is over: it may have been wanted again meanwhile.
    fn finish(&self, charge: &mut Charge) -> bool {
        let is_stopped = self.lock().wish == Wish::Stop;
        if is_stopped && !charge.is_empty() {
            self.end_vmm(charge);
        }
        for directory in std::mem::take(&mut self.lock().owed) {
            self.bring_home(&directory);
        }
        let mut inner = self.lock();
        if matches!(inner.wish, Wish::Serve(..)) && !inner.is_held && inner.doubt.is_none() {
            return false;
        }
        if !charge.is_empty() && inner.wish != Wish::Leave {
            log::error!(
                "vm {}: what its guest is owed is kept for the next daemon: end its VMM, and start amberlog serve again{}",
                self.name,
                charge.directory().map_or_else(String::new, |directory| {
                    format!(", or run 'amberlog recover --area {}'", directory.display())
                })
            );
        }
        inner.is_over = true;
        true
    }

    /// What a guest is owed goes home from its files, by a process of its own.
    fn bring_home(&self, directory: &Path) {
        let mut command = Program::own().command();
        let finished = crate::children::errors(command.args(["recover", "--area"]).arg(directory));
        let (is_well, said) = match finished {
            Ok((status, said)) => (status.success(), String::from_utf8_lossy(&said).trim().replace('\n', "; ")),
            Err(error) => (false, error.to_string()),
        };
        let (level, sentence) = came_home(directory, is_well, &said);
        log::log!(level, "vm {}: {sentence}", self.name);
    }

    /// Its VMM has ended, and no worker goes on with it: what it was owed is in its files from here on.
    fn let_go(&self, charge: &mut Charge) -> MutexGuard<'_, Inner> {
        let directory = charge.directory();
        // Not under the lock: the threads of its doors are waited for, and somebody may ask how the VM is meanwhile.
        charge.clear();
        let mut inner = self.lock();
        inner.owed.extend(directory);
        inner.is_held = false;
        inner.doubt = None;
        inner
    }

    /// Waits while its workers die again and again. False when it is not wanted: then it is over. A guest that was served is not
    /// left without a worker because its VM is not wanted any more.
    fn is_wanted(&self, charge: &mut Charge) -> bool {
        let mut inner = self.lock();
        while inner.is_held || inner.doubt.is_some() {
            inner.vmm = charge.living_vmm();
            if charge.vmm_has_ended() {
                // Nothing hangs any more.
                drop(inner);
                inner = self.let_go(charge);
                inner.deaths.forgive();
            } else if matches!(inner.wish, Wish::Stop | Wish::Leave) {
                break;
            } else {
                inner = self.changed.wait_timeout(inner, PAUSE).expect("no panic under this lock").0;
            }
        }
        let is_held = inner.is_held || inner.doubt.is_some();
        // What is owed goes home before anybody else is served.
        !is_held && inner.owed.is_empty() && (matches!(inner.wish, Wish::Serve(..)) || charge.is_served())
    }

    /// From the start of a worker to its end.
    fn run_worker(&self, charge: &mut Charge) -> anyhow::Result<()> {
        let mut arguments = vec!["serve".into(), "--vm".into(), (&self.name).into()];
        if self.no_sandbox {
            arguments.push("--no-sandbox".into());
        }
        let program = self.lock().program.clone();
        let mut worker = Worker::start(&program, arguments, Stdio::null())?;
        let process = Watched::new(worker.pid() as i32).map(Arc::new);
        if let Err(error) = charge.tell(&worker.channel) {
            // It has died, which is seen where it is listened to.
            log::debug!("telling a worker to begin: {error}");
        }
        self.lock().worker = Some(Running { channel: Arc::clone(&worker.channel), pid: worker.pid(), process });
        if let Err(error) = self.tell() {
            // It would idle for ever, and its guest with it.
            log::error!(
                "vm {}: its worker (process {}) is ended: it was told what is wanted, and says: {error:#}",
                self.name,
                worker.pid()
            );
            worker.kill();
        }
        let status = charge.hear_to_the_end(&mut worker).context("waiting for the worker");
        let mut inner = self.lock();
        inner.worker = None;
        inner.vmm = charge.living_vmm();
        self.changed.notify_all();
        let status = status?;
        if std::mem::take(&mut inner.is_replaced) {
            log::info!("vm {}: a worker of {} goes on", self.name, inner.program.display());
            return Ok(());
        }
        // Where its guest may still be there, it has not done what it was to do.
        if status.success() && !charge.is_served() {
            drop(inner);
            charge.clear();
            return Ok(());
        }
        let how = how_it_ended(status);
        if inner.wish == Wish::Stop && status.code().is_some() && charge.living_vmm().is_some() {
            // It was told to end the guest's VMM, and could not.
            inner.is_held = true;
            log::error!("vm {}: its worker {how} while the daemon ends, and its VMM lives", self.name);
            inner.last_death = Some(how);
            return Ok(());
        }
        // A worker that cannot go on with other disks is followed by one that has those of before, and one of another program by one of this.
        let is_to_be_followed = charge.is_changing() || !charge.is_served() || inner.is_on_trial;
        let wanted = if is_to_be_followed { OnCrash::Restart } else { inner.on_crash };
        let next = inner.deaths.died(Instant::now(), wanted);
        match next {
            Next::Hold => {
                inner.is_held = true;
                charge.hold(&how);
                log::error!(
                    "vm {}: its worker {how} ({} times so far), and none is started any more. What was committed is kept; see the \
                     log for why, mend that, and reload the configuration (SIGHUP){}",
                    self.name,
                    inner.deaths.total(),
                    inner.or_end_vmm()
                );
            }
            Next::Restart => log::error!("vm {}: its worker {how}; another one is started", self.name),
            Next::EndVmm => {
                log::error!("vm {}: its worker {how}; its VMM is ended, as configured (on-crash)", self.name)
            }
        }
        inner.last_death = Some(how);
        drop(inner);
        if next == Next::EndVmm {
            self.end_vmm(charge);
        }
        Ok(())
    }

    /// Ends the VMM, which has no worker. What it was owed is brought home from its files.
    fn end_vmm(&self, charge: &mut Charge) {
        // Its worker may have been the guest's when it said who that is.
        if let Some(watched) = charge.living_vmm().filter(|pid| charge.has_come(*pid)).and_then(Watched::new)
            && watched.signal(rustix::process::Signal::KILL)
        {
            watched.wait(ENDING_PATIENCE);
        }
        match charge.living_vmm() {
            None => drop(self.let_go(charge)),
            Some(pid) => {
                // Another user's, perhaps: as if nothing else had been wanted.
                let mut inner = self.lock();
                inner.is_held = true;
                charge.hold(inner.last_death.as_deref().unwrap_or("ended"));
                drop(inner);
                log::error!("vm {}: its VMM (process {pid}) cannot be ended from here: end it", self.name);
            }
        }
    }

    /// Has a worker of another program go on, and waits until it serves. Disks that come or go do so before or after that. `anyway`, whatever
    /// ends with the worker that is there.
    ///
    /// # Errors
    /// When there is no worker, or it cannot go on with its guest.
    pub fn upgrade(&self, program: &Program, anyway: bool) -> anyhow::Result<()> {
        let _one_after_the_other = self.changing.lock().expect("no panic under this lock");
        self.replace(program, anyway)
    }

    fn check_place(&self) -> anyhow::Result<()> {
        match self.place.look() {
            Some((directory, false)) => {
                anyhow::bail!("{}; nothing was changed", place::sentence(&self.name, &directory.display().to_string()))
            }
            _ => Ok(()),
        }
    }

    fn replace(&self, program: &Program, anyway: bool) -> anyhow::Result<()> {
        let answer = self.ask(&Asked::Status, Duration::ZERO);
        let answer = answer
            .with_context(|| format!("vm {}: its worker does not say how it is; nothing was changed", self.name))?;
        if let Some(why) = cannot_go_on(&answer["vms"][0]) {
            anyhow::bail!("vm {}: {why}; nothing was changed", self.name);
        }
        if let Some(what) = would_end(&answer["vms"][0]).filter(|_| !anyway) {
            anyhow::bail!("vm {}: {what}: wait for that, or say --anyway; nothing was changed", self.name);
        }
        self.check_place()?;
        let old = {
            let mut inner = self.lock();
            let worker = inner.worker.as_ref().and_then(|worker| Some((worker.pid, worker.process.clone()?)));
            let worker = worker.with_context(|| format!("vm {} has no worker at this moment; ask again", self.name));
            let (old, process) = worker?;
            inner.program = program.clone();
            (inner.is_replaced, inner.is_on_trial) = (true, true);
            process.signal(rustix::process::Signal::KILL);
            old
        };
        let deadline = Instant::now() + REPLACED_WITHIN;
        while Instant::now() < deadline {
            let status = self.status();
            let is_new = status["worker_pid"].as_u64().is_some_and(|pid| pid != u64::from(old));
            let mut inner = self.lock();
            // It died again and again, and nobody follows it; or it could not be started at all, and one that did serve is in its place.
            if inner.is_held || !inner.program.is(program) {
                break;
            }
            if is_new && !matches!(status["state"].as_str(), Some("restarting" | "held" | "preparing")) {
                (inner.proven, inner.is_on_trial) = (Some(program.clone()), false);
                return Ok(());
            }
            drop(inner);
            std::thread::sleep(Duration::from_millis(20));
        }
        {
            let mut inner = self.lock();
            let is_put_back = !inner.program.is(program);
            if is_put_back {
                (inner.is_held, inner.is_on_trial, inner.is_replaced) = (false, false, false);
                self.changed.notify_all();
                return Err(self.does_not_serve());
            }
            inner.try_program(1);
            (inner.is_held, inner.is_on_trial) = (false, false);
            inner.deaths.forgive();
            self.changed.notify_all();
            let new = inner.worker.as_ref().and_then(|worker| worker.process.clone());
            // Only the end of one that is ended here is none that counts.
            inner.is_replaced = new.is_some();
            if let Some(new) = new {
                new.signal(rustix::process::Signal::KILL);
            }
        }
        Err(self.does_not_serve())
    }

    fn does_not_serve(&self) -> anyhow::Error {
        let why = "the new worker does not serve (the log says why); one of this program is started";
        DoesNotServe(format!("vm {}: {why}", self.name)).into()
    }

    /// What a VMM is started with to find its disks, which it does by now.
    ///
    /// # Errors
    /// When it is not served, or not in the configuration.
    pub fn arguments(&self, memory_mib: u64, reconnect: bool) -> anyhow::Result<Value> {
        self.ask(&Asked::IsServed, Duration::ZERO)?;
        let config = self.lock().config.clone();
        let config = config.with_context(|| format!("vm {} is not in the configuration", self.name))?;
        words::arguments(&config, memory_mib, reconnect)
    }

    /// Has disks come or go while the guest runs. Gives which.
    ///
    /// # Errors
    /// When that cannot be: nothing was changed, unless the sentence says so.
    pub fn change_disks(&self, change: DiskChange) -> anyhow::Result<Value> {
        let _one_after_the_other = self.changing.lock().expect("no panic under this lock");
        // Before its worker lets go of anything: no other one could go on.
        self.check_place()?;
        let answer = self.ask(&Asked::ChangeDisks { change }, CHANGED_WITHIN)?;
        let names = |of: &Value| -> Vec<String> {
            of.as_array().into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect()
        };
        let (added, removed) = (names(&answer["added"]), names(&answer["removed"]));
        if added.is_empty() && removed.is_empty() {
            return Ok(answer);
        }
        let program = self.lock().program.clone();
        // The worker has looked what would end, before it let go of anything.
        self.replace(&program, true)?;
        let status = self.status();
        let served: Vec<&str> =
            status["disks"].as_array().into_iter().flatten().filter_map(|disk| disk["name"].as_str()).collect();
        let is_served = |name: &String| served.contains(&name.as_str());
        anyhow::ensure!(
            added.iter().all(is_served) && !removed.iter().any(is_served),
            "vm {}: another worker does not go on with these disks (the log says why); the guest has those that it had",
            self.name
        );
        Ok(answer)
    }

    /// Asks the worker.
    ///
    /// # Errors
    /// What it answers as an error; that there is none, or that it does not answer.
    pub fn ask(&self, question: &Asked, patience: Duration) -> anyhow::Result<Value> {
        self.ask_while(question, patience, None)
    }

    /// The same for an `asker`, who may go: then nobody waits for the answer, the worker neither.
    ///
    /// # Errors
    /// Those of [`Supervised::ask`].
    pub fn ask_for(&self, question: &Asked, patience: Duration, asker: &UnixStream) -> anyhow::Result<Value> {
        self.ask_while(question, patience, Some(asker))
    }

    fn ask_while(&self, question: &Asked, patience: Duration, asker: Option<&UnixStream>) -> anyhow::Result<Value> {
        let not_served = || format!("vm {} is not served at this moment; ask again", self.name);
        // What was wished is kept, perhaps, whatever becomes of the worker.
        let unanswered = || match asker {
            Some(_) => format!(
                "vm {}: its worker has not answered (if it has ended, another one goes on): 'amberlog status' says what is wished now, and in force",
                self.name
            ),
            None => not_served(),
        };
        let channel = self.lock().worker.as_ref().map(|worker| Arc::clone(&worker.channel));
        let channel = channel.with_context(|| self.why_not_served().unwrap_or_else(not_served))?;
        let deadline = Instant::now() + patience + PATIENCE;
        let (mut ours, theirs) = UnixStream::pair().context("making a pair of sockets")?;
        channel.send(&Order::Ask, &[theirs.as_fd()]).with_context(not_served)?;
        drop(theirs);
        ours.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        writeln!(ours, "{}", serde_json::to_string(question)?).with_context(not_served)?;
        let is_short = matches!(question, Asked::Alive | Asked::Want { .. } | Asked::Room { .. });
        let bytes_max = if is_short { SHORT_ANSWER_BYTES_MAX } else { ANSWER_BYTES_MAX };
        BufReader::new(Until { stream: ours, deadline, asker }.take(bytes_max))
            .read_line(&mut line)
            .with_context(unanswered)?;
        let answer: Value = serde_json::from_str(&line).with_context(unanswered)?;
        match answer["error"].as_str() {
            Some(error) => Err(anyhow::anyhow!("{error}")),
            None => Ok(answer),
        }
    }

    /// Asks the worker, and the next one where it dies meanwhile, until one that serves has answered or it is too late. `question` is told how much
    /// time there is.
    ///
    /// # Errors
    /// Those of [`Supervised::ask`].
    pub fn ask_until(
        &self,
        deadline: Instant,
        question: impl Fn(Duration) -> (Asked, Duration),
    ) -> anyhow::Result<Value> {
        let pid = || self.lock().worker.as_ref().map(|worker| worker.pid);
        let first = pid();
        loop {
            let asked = pid();
            let (question, patience) = question(deadline.saturating_duration_since(Instant::now()));
            let error = match self.ask(&question, patience) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let status = self.status();
            let now = status["worker_pid"].as_u64();
            let is_between = match status["state"].as_str() {
                Some("restarting") => true,
                // One that prepares for another reason says so.
                Some("preparing") => now != first.map(u64::from),
                _ => now != asked.map(u64::from),
            };
            if !is_between || self.lock().is_held || Instant::now() >= deadline {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Looks whether the VM's directory is still there, and says so if it is not.
    pub fn look_at_directory(&self) {
        if let Some(directory) = self.place.seen_gone() {
            let _entered = self.enter();
            log::error!("{}", place::sentence(&self.name, &directory.display().to_string()));
        }
    }

    /// Ends a worker that does not answer any more; another one goes on.
    pub fn feel_pulse(&self) {
        let worker = self.lock().worker.as_ref().and_then(|worker| Some((worker.pid, worker.process.clone()?)));
        let Some((pid, process)) = worker else { return };
        let began = Instant::now();
        if self.ask(&Asked::Alive, HUNG_AFTER.saturating_sub(PATIENCE)).is_ok() || began.elapsed() < HUNG_AFTER {
            return;
        }
        let _entered = self.enter();
        let inner = self.lock();
        if inner.worker.as_ref().is_some_and(|worker| worker.pid == pid) {
            log::error!(
                "vm {}: its worker (process {pid}) has not answered for {} s, and is ended",
                self.name,
                HUNG_AFTER.as_secs()
            );
            process.signal(rustix::process::Signal::KILL);
        }
    }

    /// Has its journals be where the host's power wants them. Gives what became of each disk whose journals had to move; nothing of
    /// a VM that is not served.
    pub fn follow_power(&self, on_battery: bool, deadline: Instant) -> Vec<Value> {
        let left = deadline.saturating_duration_since(Instant::now());
        let asked = Asked::FollowPower { on_battery, patience_seconds: left.as_secs() };
        match self.ask(&asked, left) {
            // What a worker answers may be anything.
            Ok(mut answer) => {
                answer.get_mut("disks").and_then(Value::as_array_mut).map(std::mem::take).unwrap_or_default()
            }
            Err(error) => vec![json!({"vm": self.name, "disk": null, "placement": null, "when": null,
                "error": format!("{error:#}")})],
        }
    }

    fn why_not_served(&self) -> Option<String> {
        let inner = self.lock();
        if let Some(doubt) = &inner.doubt {
            let vmm = inner.vmm.map_or_else(String::new, |pid| format!(" (its VMM is process {pid})"));
            return Some(format!("vm {} is held: {doubt}{vmm}", self.name));
        }
        let how = inner.last_death.as_deref().unwrap_or("ended");
        inner.is_held.then(|| {
            format!(
                "vm {} is held: its worker {how}, {} times in all; see the log for why, mend that, and reload the \
                 configuration (SIGHUP){}",
                self.name,
                inner.deaths.total(),
                inner.or_end_vmm()
            )
        })
    }

    /// Its entry in `status`.
    pub fn status(&self) -> Value {
        let answer = self.ask(&Asked::Status, Duration::ZERO).and_then(entry_of);
        if let Ok(entry) = &answer {
            let mut inner = self.lock();
            // Where it has ended since, what is kept of the VM is newer.
            let said = entry["vmm_pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
            // One that is about to go on with a guest does not know it yet.
            if inner.worker.is_some() && (said.is_some() || entry["state"] != "preparing") {
                inner.vmm = said;
            }
        }
        let mut entry = answer.unwrap_or_else(|error| {
            let held = self.why_not_served();
            let state = if held.is_some() { "held" } else { "restarting" };
            let text = held.unwrap_or_else(|| format!("restarting: {error:#}"));
            let vmm = self.lock().vmm;
            json!({"schema": 1, "vm": self.name, "disks": [], "state": state, "state_text": text, "pid": vmm,
                "vmm_pid": vmm, "pending": null})
        });
        // A worker may say anything, and this is known here: what one says must not be read as another VM's.
        entry["vm"] = json!(self.name);
        let inner = self.lock();
        if let Some(config) = &inner.config {
            words::name_sockets(&mut entry, &config.sockets);
        }
        let directory = self.place.look();
        entry["directory"] = json!(directory.as_ref().map(|(path, _)| path));
        // One that recovers may be removing it.
        let is_settled = !matches!(entry["state"].as_str(), Some("preparing" | "recovering"));
        entry["directory_is_in_place"] = json!(directory.filter(|_| is_settled).map(|(_, is_there)| is_there));
        if entry["state"] == "preparing" && entry["vmm_pid"].is_null() {
            (entry["pid"], entry["vmm_pid"]) = (json!(inner.vmm), json!(inner.vmm));
        }
        entry["supervisor_pid"] = json!(std::process::id());
        entry["worker_pid"] = json!(inner.worker.as_ref().map(|worker| worker.pid));
        entry["restarts"] = json!(inner.deaths.total());
        entry["deaths_last_hour"] = json!(inner.deaths.counted(Instant::now()));
        entry["last_death"] = json!(inner.last_death);
        entry
    }

    /// What the configuration says of it that is not so yet: `changed` or `removed`.
    pub fn pending(&self) -> Option<String> {
        self.status()["pending"].as_str().map(str::to_owned)
    }
}

/// What is said when what a guest is owed was to go home from a directory, and how loud. All that the recovery has noted is in it: what of that was
/// found damaged is lost, which is no success, though the directory has gone, and nobody has anything to mend there; and what is in no directory
/// stays where it is.
fn came_home(directory: &Path, is_well: bool, said: &str) -> (log::Level, String) {
    let noted = if said.is_empty() { String::new() } else { format!(": {said}") };
    if is_well {
        return (log::Level::Info, format!("what its guest was owed is home{noted}"));
    }
    if !directory.exists() {
        return (log::Level::Warn, format!("what its guest was owed is home as far as it was whole{noted}"));
    }
    let at = directory.display();
    let sentence =
        format!("what its guest is owed stays in {at}{noted}; mend that, and run 'amberlog recover --area' on it");
    (log::Level::Error, sentence)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is lost has gone with the directory: whoever is told that it stays there looks for it in vain, and who is told nothing relies on it.
    #[test]
    fn what_a_recovery_has_noted_is_said_and_nothing_is_said_to_stay_that_does_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let gone = directory.path().join("gone");
        let (there, gone) = (directory.path(), gone.as_path());
        for (at, is_well, level, begins) in [
            (there, true, log::Level::Info, "what its guest was owed is home: "),
            (gone, true, log::Level::Info, "what its guest was owed is home: "),
            (gone, false, log::Level::Warn, "what its guest was owed is home as far as it was whole: "),
            (there, false, log::Level::Error, "what its guest is owed stays in "),
        ] {
            let (said_at, sentence) = came_home(at, is_well, "3 blocks are damaged; run e2fsck -f");
            assert!(said_at == level && sentence.starts_with(begins), "{said_at}: {sentence}");
            assert!(sentence.contains("3 blocks are damaged; run e2fsck -f"), "{sentence}");
        }
        assert_eq!(came_home(gone, true, "").1, "what its guest was owed is home");
    }

    #[test]
    fn whatever_a_worker_answers_nothing_panics() {
        for answer in [json!(1), json!({}), json!([]), json!({"vms": []}), json!({"vms": [1]})] {
            assert!(entry_of(answer.clone()).is_err(), "{answer}");
        }
        assert_eq!(entry_of(json!({"vms": [{"vm": "a"}]})).expect("an entry"), json!({"vm": "a"}));
    }

    /// One that somebody else has in his hands.
    #[test]
    fn a_worker_speaks_for_its_own_vm_alone() {
        let source = "run = \"/run/amberlog\"\n[[vm]]\nname = \"own\"\ndisks = [\"/images/own.img,name=root\"]\n";
        let supervised = |wish| {
            let supervised = Supervised::new("own", wish, true, Charge::default());
            let (ours, theirs) = Channel::pair().expect("a pair");
            supervised.lock().worker =
                Some(Running { channel: Arc::new(ours), pid: std::process::id(), process: None });
            let answering = std::thread::spawn(move || {
                let channel = Channel::from(theirs);
                while let Ok(Some((_, mut descriptors))) = channel.receive::<Order>() {
                    let stream = UnixStream::from(descriptors.remove(0));
                    BufReader::new(&stream).read_line(&mut String::new()).expect("the question");
                    let disk = json!({"name": "root", "image": "/images/others.img"});
                    let entry = json!({"vm": "other", "state": "running", "state_text": "running", "disks": [disk],
                        "sockets": ["/run/amberlog/other/root.sock"]});
                    let answer = json!({"vms": [entry], "arguments": ["-object", "/evil.so"],
                        "environment": {"LD_PRELOAD": "/evil.so"}, "disks": [disk]});
                    writeln!(&stream, "{answer}").expect("answered");
                }
            });
            (supervised, answering)
        };
        let (own, answering) = supervised(Wish::Serve(source.into(), OnCrash::default()));
        let status = own.status();
        assert_eq!((&status["vm"], &status["state"]), (&json!("own"), &json!("running")), "{status}");
        assert_eq!(status["sockets"], json!(["/run/amberlog/own/root.sock"]));
        let said = own.arguments(1024, true).expect("it is served");
        let disk = json!({"image": "/images/own.img", "socket": "/run/amberlog/own/root.sock", "readonly": false});
        assert_eq!(said["disks"], json!([disk]));
        assert!(!said.to_string().contains("evil") && said.to_string().contains("own/root.sock"), "{said}");
        drop(own);
        answering.join().expect("no panic");
        // Nobody but its worker knows what it is.
        let (own, answering) = supervised(Wish::AsServed);
        let error = own.arguments(1024, true).expect_err("it is not in the configuration");
        assert!(error.to_string().contains("not in the configuration"), "{error}");
        drop(own);
        answering.join().expect("no panic");
    }

    #[test]
    fn nobody_waits_for_an_answer_when_whoever_asked_has_gone() {
        let own = Supervised::new("own", Wish::Gone, true, Charge::default());
        let (ours, theirs) = Channel::pair().expect("a pair");
        own.lock().worker = Some(Running { channel: Arc::new(ours), pid: std::process::id(), process: None });
        let worker = std::thread::spawn(move || {
            let (_, mut descriptors) = Channel::from(theirs).receive::<Order>().expect("heard").expect("a question");
            let stream = UnixStream::from(descriptors.remove(0));
            BufReader::new(&stream).read_line(&mut String::new()).expect("the question");
            let begun = Instant::now();
            while !has_gone(&stream) {
                assert!(begun.elapsed() < Duration::from_secs(60), "somebody waits");
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let (asker, waits) = UnixStream::pair().expect("a pair");
        drop(waits);
        let (begun, patience) = (Instant::now(), Duration::from_secs(20));
        assert!(own.ask_for(&Asked::Flush { patience_seconds: 20 }, patience, &asker).is_err());
        assert!(begun.elapsed() < patience, "it waits for nobody");
        worker.join().expect("no panic");
    }

    /// Its worker dies while it waits for what it was asked.
    #[test]
    fn who_is_not_answered_hears_where_to_look() {
        let own = Supervised::new("own", Wish::Gone, true, Charge::default());
        let (ours, theirs) = Channel::pair().expect("a pair");
        own.lock().worker = Some(Running { channel: Arc::new(ours), pid: std::process::id(), process: None });
        let worker = std::thread::spawn(move || {
            let channel = Channel::from(theirs);
            for _ in 0..2 {
                let (_, mut descriptors) = channel.receive::<Order>().expect("heard").expect("a question");
                let stream = UnixStream::from(descriptors.remove(0));
                BufReader::new(&stream).read_line(&mut String::new()).expect("the question");
            }
        });
        let (asker, _waits) = UnixStream::pair().expect("a pair");
        let asked = Asked::Flush { patience_seconds: 20 };
        let said = own.ask_for(&asked, Duration::from_secs(20), &asker).expect_err("no answer").to_string();
        assert!(
            said.contains("vm own: its worker has not answered") && said.contains("'amberlog status' says"),
            "{said}"
        );
        let said = own.ask(&asked, Duration::from_secs(20)).expect_err("no answer").to_string();
        assert!(said.contains("vm own is not served at this moment; ask again"), "{said}");
        worker.join().expect("no panic");
    }

    #[test]
    fn what_would_end_with_a_worker_is_said() {
        let status = |is_copied: Value, is_frozen: Value| json!({"is_copied": is_copied, "is_frozen": is_frozen});
        assert_eq!(would_end(&status(json!(false), json!(false))), None);
        assert_eq!(would_end(&json!({"of": "an older worker"})), None);
        assert!(would_end(&status(json!(true), json!(true))).is_some_and(|what| what.contains("snapshot")));
        assert!(would_end(&status(json!(false), json!(true))).is_some_and(|what| what.contains("frozen")));
    }

    #[test]
    fn a_worker_that_none_could_follow_is_not_ended() {
        let with = |nvm: Value| {
            let disk = json!({"name": "db", "placement": "nvm", "nvm": nvm});
            cannot_go_on(&json!({"disks": [{"name": "a", "placement": "retain"}, disk]}))
        };
        assert_eq!(with(json!({"can_be_followed": true})), None);
        let why = with(json!({"can_be_followed": false})).expect("a reason");
        assert!(why.contains("of disk db is not noted"), "{why}");
        let rings = |can: bool| {
            let disk = json!({"name": "db", "rings_started": true, "rings_can_be_followed": can});
            cannot_go_on(&json!({"disks": [{"name": "a", "rings_can_be_followed": true}, disk]}))
        };
        assert_eq!(rings(true), None);
        let why = rings(false).expect("a reason");
        assert!(why.contains("no place for what is in flight on disk db"), "{why}");
        let why = cannot_go_on(&json!({"disks": [{"name": "db", "image_is_in_place": false}]})).expect("a reason");
        assert!(why.contains("the image of disk db is not in its place"), "{why}");
    }
}
