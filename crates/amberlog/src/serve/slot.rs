//! One configured VM, in its worker: what is wanted of it, how it is, and the thread that goes round: prepare, wait for a VMM, serve it,
//! recover, and prepare again.
//!
//! A change of its configuration takes effect when no VMM is connected: a guest never notices one. Failure story: what cannot
//! be prepared or finished is logged once, shown, and tried again every few seconds; what is owed stays in tmpfs until then.

use super::asked::has_gone;
use super::config::{Config, DiskChanges, VmConfig};
use super::left::{self, Left};
use super::live::Live;
use super::moving::move_log;
use super::power;
use super::promise::{self, DONE, Shortfalls, Watch};
use super::snapshot::Wish;
use crate::raw::KnownRaw;
use crate::vm::change::{self, DURABLE_WITHIN, THROTTLE};
use crate::vm::migration::{self};
use crate::vm::{Bounds, Serving, Starter, Vm};
use crate::worker::{CONFIG_BEFORE, Line};
use anyhow::Context;
use block_device::DeviceHandle;
use block_route::Route;
use placement::{AreaMemory, Journals, KeptLog, PlacementKind, ProtectionReport, VmReport};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use supervision::{Kept, Said};

/// How often the VMMs and the wishes are looked at.
const INTERVAL: Duration = Duration::from_millis(100);
/// How often it is looked whether what `durable-within` asks for is in force: `health` counts in minutes.
const SHORTFALLS_EVERY: Duration = Duration::from_secs(1);
/// The pauses between attempts.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long the journals of a guest whose VMM cannot be ended may take to be handed over to storage.
const STAYING_PATIENCE: Duration = Duration::from_secs(30);

/// How long a VMM that is to be left may take to come back to a worker that follows one that was killed as it left it.
const RETURN_PATIENCE: Duration = Duration::from_secs(30);

/// What is wanted.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// It is served as configured.
    Serve(Box<VmConfig>),
    /// It is not in the configuration any more: it ends with its VMM.
    Gone,
    /// The daemon ends: the VMM is ended, too.
    Stop,
    /// The daemon ends, and the VMM goes on under the next one: nothing of it is held ([`Slot::hand_over`]).
    Leave,
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

/// Why a VM is not served any more.
enum End {
    /// No VMM of it lives.
    Finish,
    /// This one goes on.
    Leave(i32),
    /// This one lives, and cannot be ended or left: nothing of it may be touched.
    Abandon(i32),
}

struct Inner {
    wanted: Wanted,
    state: State,
    /// Since when it has been in a state of that kind.
    since: Instant,
    live: Option<Live>,
    is_over: bool,
    /// A VMM that is known, and when it was started: one that is there before it is served (a daemon before has left it running, or another
    /// worker has served it), and after.
    vmm: Option<(i32, u64)>,
    /// Images that this daemon has served to the VM before.
    served: KnownRaw,
    /// The configuration that it is served with at this moment.
    as_served: Option<VmConfig>,
}

impl Inner {
    fn enter(&mut self, state: State) {
        if std::mem::discriminant(&self.state) != std::mem::discriminant(&state) {
            self.since = Instant::now();
        }
        self.state = state;
    }

    fn pending(&self) -> Option<&'static str> {
        match (&self.wanted, &self.as_served) {
            (Wanted::Serve(wanted), Some(served)) if **wanted != *served => Some("changed"),
            (Wanted::Gone, _) => Some("removed"),
            _ => None,
        }
    }
}

/// One VM.
pub struct Slot {
    name: String,
    /// The first configuration: where an earlier worker's guest is there, the one that it was served with.
    as_begun: VmConfig,
    line: Arc<Line>,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Disks come and go one request after the other; what the next worker has them be, until it goes on.
    changing: Mutex<Option<VmConfig>>,
    /// One disk at a time becomes larger.
    resizing: Mutex<()>,
}

impl Slot {
    /// A VM that is to be served so.
    pub fn new(config: VmConfig, line: &Arc<Line>) -> Arc<Self> {
        Arc::new(Slot {
            name: config.options.name.clone(),
            as_begun: config.clone(),
            line: Arc::clone(line),
            inner: Mutex::new(Inner {
                wanted: Wanted::Serve(Box::new(config)),
                state: State::Preparing,
                since: Instant::now(),
                live: None,
                is_over: false,
                vmm: None,
                served: KnownRaw::default(),
                as_served: None,
            }),
            changed: Condvar::new(),
            changing: Mutex::default(),
            resizing: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Says what is wanted from now on.
    pub fn want(&self, wanted: Wanted) {
        let mut inner = self.lock();
        if !matches!(inner.wanted, Wanted::Stop | Wanted::Leave) {
            inner.wanted = wanted;
        }
        self.changed.notify_all();
    }

    /// Log lines of this thread are about this VM.
    fn enter(&self) -> log_context::Entered {
        log_context::enter(log_context::Context::vm(&self.name))
    }

    fn set_state(&self, state: State) {
        self.lock().enter(state);
    }

    /// The thread of a VM; ends when it is not wanted any more.
    pub fn run(&self) {
        let _entered = self.enter();
        let mut pause = PAUSE_MIN;
        let mut told = String::new();
        if let Some(kept) = self.line.take_kept()
            && let Err(error) = self.go_on(kept)
        {
            // Its guest waits. Whether another worker is tried, the supervisor knows.
            log::error!("vm {}: a worker cannot go on with the guest of the one before: {error:#}", self.name);
            std::process::exit(i32::from(crate::exit::FAILED));
        }
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
                    let sentence = self.explain(&config, &error);
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

    /// Why the VM is not served: where more than one thing is wrong, all of them.
    fn explain(&self, config: &VmConfig, error: &anyhow::Error) -> String {
        let sentence = format!("{error:#}");
        let problems = super::check::vm(config, &self.lock().served);
        if problems.len() < 2 {
            return sentence;
        }
        let all: Vec<_> = problems.into_iter().map(|problem| problem.sentence).collect();
        format!("{sentence}; all that is wrong: {}", all.join("; "))
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

    /// Goes on with the guest of a worker that has died, to the recovery after its VMM.
    fn go_on(&self, kept: Kept) -> anyhow::Result<()> {
        let config = self.as_begun.clone();
        self.bind_anyhow(&config);
        {
            let mut inner = self.lock();
            inner.as_served = Some(config.clone());
            inner.vmm = crate::vm::vmm_of(&kept);
        }
        if crate::vm::is_left(&kept) {
            // Its guest waits for whoever finds the note.
            return crate::vm::leave_at_last(kept, &self.line);
        }
        let bounds = kept.all(THROTTLE);
        let before = kept.descriptor(CONFIG_BEFORE).map(|before| before.try_clone_to_owned()).transpose()?;
        if let Some(before) = &before {
            // Its disks were changed. If this worker does not get as far as to serve these, the next one has those of before.
            self.line.keep(CONFIG, "", Some(before.as_fd()))?;
        }
        let vm = Vm::resume(&config.options, kept, &self.line)?;
        vm.journals.doubt_memory(power::is_on_battery(&config.run));
        // Before the note is taken back.
        let vmm = self.lock().vmm;
        for (disk, untold) in vmm.map_or_else(Vec::new, |vmm| left::untold_to(&config, vmm)) {
            log::error!("vm {}: {untold}; its guest's next flush fails", self.name);
            vm.journals.owes_failure(disk, &untold);
        }
        let (line, of_doors) = (Arc::clone(&self.line), config.clone());
        vm.before_doors(move || {
            // The worker before was about to leave it, perhaps.
            is_left_no_more(&of_doors);
            if before.is_some() {
                keep_source(&line, CONFIG, &of_doors)?;
                line.say(&Said::Forget { key: CONFIG_BEFORE.to_owned() }, &[])?;
            }
            Ok(())
        });
        vm.note_raw(&mut self.lock().served);
        let serving = vm.serve(&config.sockets, Starter::Strangers, None, |_, name| name.to_owned())?;
        // Of a VMM that has ended, what it is owed goes home first: its disks' doors are shut, and nobody finds them.
        let doors = if serving.vmm_is_gone { &[] } else { serving.attachments.as_slice() };
        let sockets = doors.iter().map(|disk| disk.socket.as_path());
        for socket in sockets.chain([serving.observer.handover.path()]) {
            // Whoever made it may have died before it did that.
            if let Err(error) = config.access.open_socket(socket) {
                log::error!("vm {}: {error:#}", self.name);
            }
        }
        for (index, handle) in serving.handles().iter().enumerate() {
            let disk = &vm.journals.disk(index).options.name;
            let said = bounds.iter().find(|(name, _)| name == disk);
            let bounds = said.and_then(|(_, text)| serde_json::from_str::<Bounds>(text).ok()?.limits().ok());
            if let Some(limits) = bounds {
                super::disks::throttle(disk, handle, limits)?;
            }
        }
        self.serve_to_the_end(&config, vm, serving)
    }

    /// A guest that runs is served, whatever becomes of that.
    fn bind_anyhow(&self, config: &VmConfig) {
        if let Err(error) = super::cpus::bind(config.cpus.as_ref()) {
            log::error!("vm {}: its guest is served on any processor: {error:#}", self.name);
        }
    }

    /// From the preparation to the recovery after one VMM.
    fn serve_one(&self, config: &VmConfig) -> anyhow::Result<()> {
        let left = left::find(config).inspect_err(|_| self.lock().vmm = left::waiting(config).map(as_started))?;
        // A guest that runs gets the disks that it had; what the configuration says by now is for the next one.
        let mut config = config.clone();
        if let Left::Waits(_, _, Some(before)) = &left {
            let sandbox = config.options.sandbox;
            config = before.config.clone();
            config.options.sandbox = sandbox;
        }
        let config = &config;
        {
            let mut inner = self.lock();
            inner.as_served = Some(config.clone());
            inner.vmm = if let Left::Waits(pid, ..) = &left { Some(as_started(*pid)) } else { None };
            // What has failed is shown until it works.
            if !matches!(inner.state, State::Failed(_)) {
                inner.enter(State::Preparing);
            }
        }
        match &left {
            Left::Nobody => super::cpus::bind(config.cpus.as_ref())?,
            _ => self.bind_anyhow(config),
        }
        let mut known = self.lock().served.clone();
        if !matches!(left, Left::Nobody) {
            // The daemon before served them: a guest that runs is not refused for what it has written.
            config.options.images().for_each(|(image, _)| known.note(image));
        }
        let vm = Vm::prepare(
            &power::as_of_now(&config.run, &config.options),
            &known,
            &self.line,
            !matches!(left, Left::Nobody),
        )?;
        vm.journals.doubt_memory(power::is_on_battery(&config.run));
        self.keep_config(config)?;
        vm.note_raw(&mut self.lock().served);
        let left = match left {
            Left::Nobody => None,
            Left::Waits(pid, watched, before) => {
                // It lives: whatever fails, nothing of its disks may be touched.
                if let Err(error) = vm.adopt(pid, before.as_ref().map(|before| &before.images)) {
                    vm.abandon();
                    return Err(error);
                }
                Some((pid, watched))
            }
            Left::Gone => {
                log::info!("vm {}: the VMM that was left running has ended", self.name);
                self.set_state(State::Recovering);
                if let Err(error) = vm.journals.adopt() {
                    log::warn!("vm {}: {error:#}", self.name);
                }
                vm.finish(config.report.as_deref())?;
                return left::forget(&config.sockets);
            }
        };
        let lives = left.as_ref().map(|(pid, _)| *pid);
        let served = prepare_directories(config, &self.name, vm.directory()).and_then(|()| {
            vm.memory.keep_to_directory(vm.directory());
            let serving = vm.serve(&config.sockets, Starter::Strangers, left, |_, name| name.to_owned())?;
            config.access.open_socket(serving.observer.handover.path())?;
            serving.attachments.iter().try_for_each(|disk| config.access.open_socket(&disk.socket))?;
            Ok(serving)
        });
        let serving = match served {
            Ok(serving) => {
                if lives.is_some() {
                    is_left_no_more(config);
                }
                serving
            }
            Err(error) if lives.is_some() => {
                vm.abandon();
                return Err(error);
            }
            // Somebody may have been connected.
            Err(error) => return vm.finish(config.report.as_deref()).and(Err(error)),
        };
        self.serve_to_the_end(config, vm, serving)
    }

    fn serve_to_the_end(&self, config: &VmConfig, vm: Vm, serving: Serving) -> anyhow::Result<()> {
        let end = if serving.vmm_is_gone { End::Finish } else { self.wait_for_end(config, &vm, &serving) };
        vm.moments.end();
        {
            // Nobody has disks come or go while the VM is recovered; the next VMM is served as configured.
            let mut changing = self.changing.lock().expect("no panic under this lock");
            *changing = None;
            let mut inner = self.lock();
            inner.enter(State::Recovering);
            inner.live = None;
            inner.vmm = serving.observer.living().map(as_started);
        }
        let observer = Arc::clone(&serving.observer);
        serving.stop();
        if let End::Abandon(pid) = end {
            self.die_beside(pid);
        }
        if let End::Leave(pid) = end {
            // What the note says of the images is so only when nobody writes to them any more.
            match vm.as_left().and_then(|images| left::write(config, pid, images)) {
                Ok(()) => {
                    log::info!("vm {}: process {pid} waits for the next daemon", self.name);
                    return vm.leave(pid);
                }
                Err(error) => {
                    // Its guest has mounted something in the last moment.
                    log::error!("vm {}: {error:#}; its VMM is ended", self.name);
                    observer.end_vmms();
                }
            }
        }
        if let Some(pid) = observer.living() {
            self.die_beside(pid);
        }
        vm.finish(config.report.as_deref())?;
        left::forget(&config.sockets)
    }

    /// Ends this process as if it had been killed: a guest whose VMM cannot be ended keeps its memory and what it is owed.
    fn die_beside(&self, pid: i32) -> ! {
        log::error!(
            "vm {}: its VMM (process {pid}) cannot be ended from here, so its memory, and what it is owed, stay as they are: end it",
            self.name
        );
        std::process::exit(i32::from(crate::exit::FAILED));
    }

    /// The daemon ends, and a VMM could not be ended: another user's, perhaps. It is left for the next daemon if it can be.
    fn leave_or_abandon(&self, journals: &Journals, pid: i32) -> End {
        let left = self.hand_over(STAYING_PATIENCE).and_then(|()| Ok(journals.check_left()?));
        match left {
            Ok(()) => {
                log::error!(
                    "vm {}: its VMM (process {pid}) cannot be ended from here: it is left for the next daemon",
                    self.name
                );
                End::Leave(pid)
            }
            Err(error) => {
                log::error!(
                    "vm {}: its VMM (process {pid}) cannot be ended from here, nor left for the next daemon: {error:#}",
                    self.name
                );
                End::Abandon(pid)
            }
        }
    }

    /// Prepares that disks come or go, as `wanted` says, and gives which: the next worker has them so, and this one is to be replaced.
    ///
    /// # Errors
    /// When more is changed than disks, a disk that is to go is in use, or one that is to come cannot be had: nothing was changed,
    /// unless the sentence says so.
    pub fn change_disks(&self, wanted: &VmConfig) -> anyhow::Result<DiskChanges> {
        let _entered = self.enter();
        let mut changing = self.changing.lock().expect("no panic under this lock");
        let live = self.live()?;
        let (served, mut known) = self.check_running()?;
        let changes = served.disk_changes(wanted)?;
        if let Some(next) = &*changing {
            anyhow::ensure!(next == wanted, "its disks have just been changed; ask again");
            return Ok(changes);
        }
        if changes.added.is_empty() && changes.removed.is_empty() {
            return Ok(changes);
        }
        anyhow::ensure!(
            migration::why_not(&served.options).is_none() == migration::why_not(&wanted.options).is_none(),
            "with that its guest could not be moved to another host any more (or could from now on), which its VMM was told when it \
             connected: this takes effect when its VMM has ended"
        );
        if let Some(why) = change::cannot_change(&served.options).or_else(|| change::cannot_change(&wanted.options)) {
            anyhow::bail!("{why}");
        }
        // The supervisor asks the same, when disks have been shut off already.
        if let Some(why) = super::supervised::cannot_go_on(&self.status()) {
            anyhow::bail!("disks cannot come or go while the guest runs: {why}; nothing was changed");
        }
        for handle in &live.handles {
            anyhow::ensure!(!handle.is_held()?, "it is frozen, and would go on: thaw it first");
        }
        anyhow::ensure!(
            !live.moments.are_copied(),
            "a snapshot of it is being copied, and would not come about: wait for that; nothing was changed"
        );
        // Nor is anything of it given up to another host meanwhile, which would be sealed without what comes.
        let _stays = live.migration.as_ref().map(|migration| migration.using()).transpose()?;
        change::check_images(live.handles.iter().map(|handle| &**handle.image()))?;
        // What this guest was served is its own, whatever it has written to it.
        served.options.images().for_each(|(image, _)| known.note(image));
        let number = |name: &String| live.journals.disks().iter().position(|disk| disk.options.name == *name);
        let leaving: Vec<usize> = changes.removed.iter().filter_map(number).collect();
        let prepared = change::prepare(&wanted.options, &changes.added, &known)?;
        let mut shut = Vec::new();
        let changed = self.let_go(&live, leaving, &mut shut).and_then(|()| {
            // Its VMM may have ended meanwhile: then the next one is served as the configuration says.
            self.check_running()?;
            prepared.into_iter().try_for_each(|disk| disk.keep(&live.journals, &self.line))?;
            keep_source(&self.line, CONFIG_BEFORE, &served)?;
            keep_source(&self.line, CONFIG, wanted)
        });
        if let Err(error) = changed {
            // Nobody is to find an image in use that nobody serves.
            for name in &changes.added {
                for key in [change::image_key(name), change::second_key(name)] {
                    if let Err(error) = self.line.say(&Said::Forget { key }, &[]) {
                        log::debug!("having disk {name} forgotten: {error}");
                    }
                }
            }
            if let Err(error) = live.journals.expect_no_more() {
                log::debug!("vm {}: that no disk comes is not noted: {error}", self.name);
            }
            self.line.settle();
            return Err(self.reopen(&served, &live, &shut, error));
        }
        *changing = Some(wanted.clone());
        Ok(changes)
    }

    /// Has these disks be nobody's. Notes whose doors it has shut.
    fn let_go(&self, live: &Live, leaving: Vec<usize>, shut: &mut Vec<(usize, usize)>) -> anyhow::Result<()> {
        let mut doors = live.doors.clone();
        for index in leaving {
            let name = &live.journals.disk(index).options.name;
            let door = doors.of(name).0;
            change::shut(name, door, &live.attachments[index].socket, &self.line)?;
            shut.push((index, door));
            // A device that has stopped has waited for storage.
            let is_idle = || live.handles[index].is_idle().unwrap_or(true);
            // In the disk's own thread, in which nothing of it begins meanwhile.
            let leaves = || {
                let journals = Arc::clone(&live.journals);
                let left = live.handles[index].with_route(move |_, _| journals.leave_disk(index));
                left.unwrap_or_else(|_| live.journals.leave_disk(index))
            };
            change::leave(index, door, &live.observer, &self.line, (is_idle, leaves))?;
        }
        Ok(())
    }

    /// Opens doors again that were shut for what has failed as `error` says: their disks are served as before.
    fn reopen(&self, served: &VmConfig, live: &Live, shut: &[(usize, usize)], error: anyhow::Error) -> anyhow::Error {
        let mut error = error;
        for (index, door) in shut {
            let (name, socket) = (&live.journals.disk(*index).options.name, &live.attachments[*index].socket);
            let open_socket = |socket: &Path| served.access.open_socket(socket);
            error = match change::reopen(name, *door, socket, open_socket, &self.line) {
                Ok(()) => error.context(format!("disk {name} was let go of before, and can be plugged in again")),
                Err(why) => error.context(format!(
                    "disk {name} was let go of before, and nobody can have it until another worker goes on ({why:#})"
                )),
            };
        }
        error
    }

    /// How it is served, and what images it was served before, if a guest runs.
    fn check_running(&self) -> anyhow::Result<(VmConfig, KnownRaw)> {
        let inner = self.lock();
        anyhow::ensure!(
            matches!(inner.state, State::Running(_)) && inner.live.is_some(),
            "no VMM of it runs: change the configuration, and reload it"
        );
        let served = inner.as_served.clone().context("it is not served at this moment; ask again")?;
        Ok((served, inner.served.clone()))
    }

    /// The configuration that it is served with.
    ///
    /// # Errors
    /// When it is not served.
    pub fn as_served(&self) -> anyhow::Result<VmConfig> {
        self.live_anyhow()?;
        self.lock()
            .as_served
            .clone()
            .with_context(|| format!("vm {} is not served at this moment; ask again", self.name))
    }

    /// Has the configuration kept, so that the next worker serves what this one does.
    fn keep_config(&self, config: &VmConfig) -> anyhow::Result<()> {
        keep_source(&self.line, CONFIG, config)
    }

    /// Waits until the VMM has ended, or the VM is not wanted so any more and has none, or is to be left.
    fn wait_for_end(&self, config: &VmConfig, vm: &Vm, serving: &Serving) -> End {
        let live = Live {
            journals: Arc::clone(&vm.journals),
            handles: serving.handles(),
            moments: Arc::clone(&vm.moments),
            attachments: serving.attachments.clone(),
            observer: Arc::clone(&serving.observer),
            doors: serving.doors.clone(),
            migration: vm.migration.clone(),
            shortfalls: Arc::new(Shortfalls::default()),
        };
        let begun = Instant::now();
        let _watch = self.watch_promises(&live);
        let mut inner = self.lock();
        inner.live = Some(live);
        inner.enter(State::Waiting);
        match serving.observer.vmms().first() {
            Some((pid, _)) => log::info!("vm {}: process {pid} goes on here", self.name),
            None => log::info!("vm {}: waits for its VMM at {}", self.name, config.sockets.display()),
        }
        loop {
            let vmms = serving.observer.vmms();
            match vmms.iter().find(|(_, has_ended)| !has_ended) {
                Some((pid, _)) => inner.enter(State::Running(*pid)),
                None if !vmms.is_empty() => {
                    log::info!("vm {}: its VMM has ended", self.name);
                    return End::Finish;
                }
                None => {}
            }
            // One that was noted and has not been told to this worker yet has its memory all the same; and one that has handed over has the lock.
            let is_nobodys = || {
                vmms.is_empty()
                    && placement::living_vmms(vm.directory()).is_ok_and(|noted| noted.is_empty())
                    && serving.observer.reception.close_if_nobody_comes()
            };
            match &inner.wanted {
                Wanted::Stop => {
                    drop(inner);
                    serving.observer.end_vmms();
                    return match serving.observer.living() {
                        Some(pid) => self.leave_or_abandon(&vm.journals, pid),
                        None => End::Finish,
                    };
                }
                // Pages may be protected of which only it can say where they are.
                Wanted::Leave
                    if vm.memory.is_untold()
                        && begun.elapsed() < RETURN_PATIENCE
                        && vmms.iter().any(|(_, has_ended)| !has_ended) => {}
                Wanted::Leave => {
                    let Some(pid) = vmms.iter().find(|(_, has_ended)| !has_ended).map(|(pid, _)| *pid) else {
                        return End::Finish;
                    };
                    drop(inner);
                    match vm.journals.check_left() {
                        Ok(()) => return End::Leave(pid),
                        Err(error) => {
                            // It began after all had been handed over.
                            log::error!("vm {}: {error}; its VMM is ended", self.name);
                            serving.observer.end_vmms();
                            return End::Finish;
                        }
                    }
                }
                Wanted::Gone if is_nobodys() => return End::Finish,
                Wanted::Serve(_)
                    if vmms.is_empty() && vm.journals.disks().iter().any(|disk| disk.is_replaced()) && is_nobodys() =>
                {
                    log::info!("vm {}: an image is another file now, which is opened instead", self.name);
                    return End::Finish;
                }
                // Whoever starts a VMM finds no place for its memory.
                Wanted::Serve(_) if vmms.is_empty() && !vm.journals.directory().is_in_place() => {
                    log::warn!(
                        "vm {}: its directory in tmpfs was removed while it waited; another one is made",
                        self.name
                    );
                    return End::Finish;
                }
                Wanted::Serve(wanted) if **wanted != *config && is_nobodys() => return End::Finish,
                _ => {}
            }
            inner = self.changed.wait_timeout(inner, INTERVAL).expect("no panic under this lock").0;
        }
    }

    /// Has it be seen, while nobody asks, whether what `durable-within` asks for is in force.
    fn watch_promises(&self, live: &Live) -> Option<Watch> {
        let (name, journals) = (self.name.clone(), Arc::downgrade(&live.journals));
        let shortfalls = Arc::clone(&live.shortfalls);
        let watch = Watch::begin(SHORTFALLS_EVERY, move || {
            if let Some(journals) = journals.upgrade() {
                shortfalls.look(&journals, &journals.report(&name));
            }
        });
        watch.inspect_err(|error| log::warn!("no thread that looks whether durable-within is in force: {error}")).ok()
    }

    /// Its entry in `status`.
    pub fn status(&self) -> Value {
        let (state, text, pid, live, pending, served, since) = {
            let inner = self.lock();
            // It is named in every state in which it lives: a guest that hangs is its process.
            let known = inner.vmm.filter(|vmm| crate::vm::lives(*vmm)).map(|(pid, _)| pid);
            let (state, text, pid) = match &inner.state {
                State::Preparing => ("preparing", "preparing".to_owned(), known),
                State::Waiting => ("waiting", "waiting for its VMM".to_owned(), known),
                State::Running(pid) => ("running", format!("running (process {pid})"), Some(*pid)),
                State::Recovering => ("recovering", "recovering".to_owned(), known),
                State::Failed(sentence) => ("failed", format!("failed: {sentence}"), known),
            };
            (state, text, pid, inner.live.clone(), inner.pending(), inner.as_served.clone(), inner.since)
        };
        let report = match &live {
            Some(live) => live.journals.report(&self.name),
            None => VmReport {
                schema: 1,
                vm: self.name.clone(),
                disks: Vec::new(),
                protection: ProtectionReport::default(),
            },
        };
        let shortfalls = live.as_ref().map(|live| live.shortfalls.look(&live.journals, &report)).unwrap_or_default();
        let mut entry = serde_json::to_value(report).unwrap_or_else(|_| json!({"schema": 1, "vm": self.name}));
        entry["state"] = json!(state);
        entry["state_text"] = json!(text);
        entry["state_for_s"] = json!(since.elapsed().as_secs());
        entry["pid"] = json!(pid);
        entry["vmm_pid"] = json!(pid);
        // It is seen a moment later, and then the VM recovers.
        let has_ended = state == "running" && live.as_ref().is_some_and(|live| live.observer.living().is_none());
        entry["vmm_has_ended"] = json!(has_ended);
        entry["pending"] = json!(pending);
        let cannot = served.as_ref().and_then(|served| migration::why_not(&served.options));
        entry["migration"] = match live.as_ref().and_then(|live| live.migration.as_ref()) {
            Some(migration) => migration.status(),
            None => json!({"possible": false, "why_not": cannot}),
        };
        if let Some(live) = live {
            entry["is_copied"] = json!(live.moments.are_copied());
            entry["is_frozen"] = json!(live.moments.is_frozen());
            for (index, rings) in live.observer.rings().into_iter().enumerate() {
                entry["disks"][index]["rings_started"] = json!(rings.are_started);
                entry["disks"][index]["rings_can_be_followed"] = json!(!rings.are_placeless);
                entry["disks"][index]["waits_for_storage_s"] =
                    json!(rings.awaited_since.map(|since| since.elapsed().as_secs()));
                let is_in_place =
                    live.handles.get(index).is_none_or(|handle| change::check_image(handle.image()).is_ok());
                entry["disks"][index]["image_is_in_place"] = json!(is_in_place);
                let wished = live.journals.disk(index).durable_within();
                entry["disks"][index]["durable_within_wished_s"] = json!(wished.map(|within| within.as_secs()));
                let shortfall = shortfalls.get(index).copied().flatten();
                entry["disks"][index]["durable_within_unmet_for_s"] = json!(shortfall.map(|time| time.as_secs()));
            }
            crate::metrics::add(&mut entry, &live.handles, &live.journals, &live.observer.memory);
            entry["sockets"] = live.attachments.iter().map(|disk| json!(disk.socket)).collect();
        }
        entry
    }

    /// What there is of it, where its images may be worked on.
    fn live(&self) -> anyhow::Result<Live> {
        let live = self.live_anyhow()?;
        live.migration.as_ref().map_or(Ok(()), |migration| migration.check_ours())?;
        Ok(live)
    }

    pub(super) fn live_anyhow(&self) -> anyhow::Result<Live> {
        let inner = self.lock();
        inner.live.clone().with_context(|| match &inner.state {
            State::Failed(sentence) => format!("vm {} is not served: {sentence}", self.name),
            _ => format!("vm {} is not served at this moment; ask again", self.name),
        })
    }

    /// Holds its disks still for a time ([`super::freeze`]).
    ///
    /// # Errors
    /// When it is not quiet; it goes on then.
    pub fn freeze(&self, time: Duration) -> anyhow::Result<()> {
        let _entered = self.enter();
        let live = self.live()?;
        let mut freezing = live.moments.freezing();
        let begun = Instant::now();
        super::freeze::freeze(&live, time)?;
        *freezing = Some(begun + time.min(super::freeze::HOLD_MAX));
        log::info!("vm {}: is frozen for {} s at most", self.name, time.as_secs());
        Ok(())
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// When it has gone on before.
    pub fn thaw(&self) -> anyhow::Result<()> {
        let _entered = self.enter();
        let live = self.live()?;
        let mut freezing = live.moments.freezing();
        let was_held = super::freeze::thaw(&live)? && freezing.is_some();
        *freezing = None;
        anyhow::ensure!(
            was_held,
            "vm {} was not frozen any more (or never was): what was copied meanwhile is of no one moment",
            self.name
        );
        log::info!("vm {}: goes on", self.name);
        Ok(())
    }

    /// Makes an image of what a disk has committed ([`super::snapshot::snapshot`]). Gives its name, and what was done to its journal.
    ///
    /// # Errors
    /// When that cannot be; there is no image then.
    pub fn snapshot(&self, disk: &str, wish: &Wish<'_>) -> anyhow::Result<(String, Vec<String>)> {
        let _entered = self.enter();
        let live = self.live()?;
        let index = (0..live.journals.disks().len())
            .find(|index| live.journals.disk(*index).options.name == disk)
            .with_context(|| format!("vm {} has no disk {disk}", self.name))?;
        let made = super::snapshot::snapshot(&live, index, wish, &self.line)?;
        if let Err(error) = self.live() {
            // Whoever has the image by now writes to it without keeping what the snapshot had still to copy.
            let _ = std::fs::remove_file(wish.out);
            return Err(error);
        }
        log::info!("disk {disk}: an image of it is {}", wish.out.display());
        Ok(made)
    }

    /// Has the journals be where the host's power wants them ([`power`]): on storage, or as configured. Gives what became of each
    /// disk whose journals had to move. A VM that is not served now is prepared so.
    pub fn follow_power(&self, on_battery: bool, deadline: Instant) -> Vec<Value> {
        let _entered = self.enter();
        // What it is prepared from may have been asked before the host's power changed.
        let live = loop {
            let inner = self.lock();
            let why = match (&inner.state, &inner.live) {
                (_, Some(live)) => break live.clone(),
                _ if inner.is_over => return Vec::new(),
                (State::Failed(why), None) if on_battery => {
                    format!("it is not served, and what it is owed may be held still: {why}")
                }
                (State::Failed(_), None) => return Vec::new(),
                _ if Instant::now() > deadline => {
                    "it is being prepared or recovered at this moment; ask again".to_owned()
                }
                _ => String::new(),
            };
            drop(inner);
            if !why.is_empty() {
                return vec![power::not_moved(&self.name, &why)];
            }
            std::thread::sleep(INTERVAL);
        };
        let Some(config) = self.lock().as_served.clone() else { return Vec::new() };
        // Of guests that come from elsewhere nothing is known yet.
        live.journals.doubt_memory(on_battery);
        let mut moves = Vec::new();
        for (index, option) in config.options.disks.iter().enumerate() {
            let to = if on_battery { PlacementKind::Storage } else { option.placement };
            let logs = live.journals.logs();
            let logs = logs.iter().filter(|log| log.home_disk() == index);
            let region = live.journals.region(index);
            let is_lost = |placement: PlacementKind| match placement {
                PlacementKind::Nvm => region.is_some_and(|region| !region.survives_the_host()),
                _ => placement.is_held() || placement == PlacementKind::Discard,
            };
            let mut places = logs.map(|log| (log.placement, log.wanted()));
            if places.any(|place| power::has_to_move(on_battery, to, place, is_lost)) {
                moves.push((live.journals.disk(index).options.name.clone(), to));
            } else if on_battery && let Some(migration) = &live.migration {
                // They are there because the guest is being moved, perhaps, and stay.
                migration.wish(index, || ());
            }
        }
        // At once: one whose storage is slow leaves the others their time.
        std::thread::scope(|scope| {
            let change = |(name, to): (String, PlacementKind)| {
                let left = deadline.saturating_duration_since(Instant::now());
                let result = self.change_placement(&name, to, left);
                power::entry(&self.name, &name, to, result)
            };
            let begun: Vec<_> = moves
                .into_iter()
                .map(|one| (one.clone(), std::thread::Builder::new().spawn_scoped(scope, move || change(one))))
                .collect();
            // Without a thread it is done here.
            begun
                .into_iter()
                .map(|(one, thread)| thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(|| change(one)))
                .collect()
        })
    }

    /// The device of a disk.
    fn device(&self, disk: &str) -> anyhow::Result<DeviceHandle<dyn Route>> {
        let live = self.live_anyhow()?;
        let journals = &live.journals;
        let index = (0..journals.disks().len())
            .find(|index| journals.disk(*index).options.name == disk)
            .with_context(|| format!("vm {} has no disk {disk}", self.name))?;
        Ok(live.handles[index].clone())
    }

    /// Makes a disk larger while its guest runs ([`super::disks::resize`]).
    ///
    /// # Errors
    /// When that cannot be.
    pub fn resize(&self, disk: &str, size_bytes: u64) -> anyhow::Result<u64> {
        let _entered = self.enter();
        let live = self.live()?;
        let index = self.disk_index(&live.journals, disk)?;
        // What was sealed for a guest that is moved would not be as it left it.
        let _stays = live.migration.as_ref().map(|migration| migration.using()).transpose()?;
        // Who comes second measures what the first has made of it.
        let _one_at_a_time = self.resizing.lock().expect("no panic under this lock");
        // Where its file systems end is known before the guest can make one of them larger.
        super::disks::resize(disk, &live.handles[index], size_bytes, || Ok(live.journals.scan(index)?))
    }

    /// Bounds a disk while its guest runs ([`super::disks::throttle`]).
    ///
    /// # Errors
    /// When the VM is not served, or has no such disk.
    pub fn throttle(&self, disk: &str, bounds: Bounds) -> anyhow::Result<throttle::Limits> {
        let _entered = self.enter();
        let limits = bounds.limits().map_err(|sentence| anyhow::anyhow!("{sentence}"))?;
        super::disks::throttle(disk, &self.device(disk)?, limits)?;
        // The next worker of this guest bounds it so, too.
        self.line.keep(&format!("{THROTTLE}{disk}"), &serde_json::to_string(&bounds)?, None)?;
        Ok(limits)
    }

    /// From now on the host leaves this VM so much memory for tables and copied blocks. Gives what it holds of it.
    ///
    /// # Errors
    /// When it is not served at this moment.
    pub fn set_room(&self, room_bytes: Option<u64>) -> anyhow::Result<AreaMemory> {
        let area = Arc::clone(&self.live_anyhow()?.journals.area);
        area.set_room(room_bytes);
        Ok(area.memory())
    }

    /// Writes home what the VM is owed. Gives the number of blocks.
    ///
    /// # Errors
    /// When storage fails, or it takes longer than `patience`.
    pub fn flush(&self, patience: Duration) -> anyhow::Result<u64> {
        let _entered = self.enter();
        Ok(self.live()?.journals.write_all_home(patience)?)
    }

    /// Has the journals of a disk live elsewhere while the guest runs. Gives a sentence about when that is so.
    ///
    /// # Errors
    /// When that cannot be, or takes longer than `patience`.
    pub fn change_placement(&self, disk: &str, to: PlacementKind, patience: Duration) -> anyhow::Result<&'static str> {
        let _entered = self.enter();
        let live = self.live()?;
        let journals = &live.journals;
        let index = self.disk_index(journals, disk)?;
        let logs: Vec<_> = journals.logs().into_iter().filter(|log| log.home_disk() == index).collect();
        anyhow::ensure!(!logs.is_empty(), "there is no journal of a file system on disk {disk}");
        let deadline = Instant::now() + patience;
        // One that cannot go keeps no other one where it is; and each begins at once.
        let moved: Vec<anyhow::Result<&'static str>> = std::thread::scope(|scope| {
            let change = |log: &Arc<KeptLog>| {
                let _entered = self.enter();
                move_log(&live, (log, index, disk), to, (patience, deadline))
            };
            let begun: Vec<_> = logs
                .iter()
                .map(|log| (log, std::thread::Builder::new().spawn_scoped(scope, move || change(log))))
                .collect();
            begun
                .into_iter()
                .map(|(log, thread)| thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(|| change(log)))
                .collect()
        });
        let answers = moved.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        Ok(answers.into_iter().find(|answer| *answer != DONE).unwrap_or(DONE))
    }

    /// Whether what the guest commits on a disk can be made durable by age, with this placement.
    ///
    /// # Errors
    /// When that cannot be.
    pub fn check_can_age(&self, disk: &str, to: PlacementKind) -> anyhow::Result<()> {
        let _entered = self.enter();
        let live = self.live()?;
        Ok(live.journals.check_can_age(self.disk_index(&live.journals, disk)?, Some(to))?)
    }

    fn disk_index(&self, journals: &Journals, disk: &str) -> anyhow::Result<usize> {
        (0..journals.disks().len())
            .find(|index| journals.disk(*index).options.name == disk)
            .with_context(|| format!("vm {} has no disk {disk}", self.name))
    }

    /// From now on what the guest commits on a disk is durable on storage within this time; nothing: never.
    ///
    /// # Errors
    /// When that cannot be.
    pub fn set_durable_within(&self, disk: &str, within: Option<Duration>) -> anyhow::Result<()> {
        let _entered = self.enter();
        let live = self.live()?;
        let index = self.disk_index(&live.journals, disk)?;
        if within.is_some() {
            live.journals.check_can_age(index, None)?;
        }
        // The next worker of this guest does so, too. (Of this guest: what is kept goes with it, and that begins with the slot having
        // none any more.)
        let keep = |within: Option<Duration>| -> anyhow::Result<()> {
            let text = within.map_or_else(|| "never".to_owned(), |within| within.as_secs().to_string());
            let inner = self.lock();
            self.check_still_served(&inner, &live.journals)?;
            Ok(self.line.keep(&format!("{DURABLE_WITHIN}{disk}"), &text, None)?)
        };
        let before = live.journals.disk(index).durable_within();
        keep(within)?;
        live.journals.set_durable_within(index, within).or_else(|error| {
            // Another placement may have been wished meanwhile: what is in force stays so under the next worker.
            keep(before)?;
            Err(error.into())
        })
    }

    /// Waits until what was asked for with [`Slot::set_durable_within`] is in force. Gives a sentence about when that is so. `patience` ends at
    /// `deadline`.
    ///
    /// # Errors
    /// When it takes longer, another one is asked for meanwhile, the VMM ends, or the `asker` has gone.
    pub fn wait_durable_within(
        &self,
        disk: &str,
        within: Option<Duration>,
        (patience, deadline): (Duration, Instant),
        asker: &UnixStream,
    ) -> anyhow::Result<&'static str> {
        let _entered = self.enter();
        let live = self.live()?;
        let index = self.disk_index(&live.journals, disk)?;
        promise::wait(disk, within, (patience, deadline), || {
            anyhow::ensure!(!has_gone(asker), "disk {disk}: nobody waits for its durable-within any more");
            self.check_still_served(&self.lock(), &live.journals)?;
            anyhow::ensure!(
                live.journals.disk(index).durable_within() == within,
                "disk {disk}: another durable-within has been asked for meanwhile"
            );
            let report = live.journals.report(&self.name);
            Ok(promise::InForce::from(&report.disks[index]))
        })
    }

    fn check_still_served(&self, inner: &Inner, journals: &Arc<Journals>) -> anyhow::Result<()> {
        let is_there = inner.live.as_ref().is_some_and(|now| Arc::ptr_eq(&now.journals, journals));
        anyhow::ensure!(is_there, "vm {}: its VMM has ended meanwhile", self.name);
        Ok(())
    }

    /// Whether its guest, if one runs, could be left at all.
    ///
    /// # Errors
    /// When a journal of it lives where it cannot be handed over from; when it is paused, unless that is `with_paused`.
    pub fn check_can_be_left(&self, with_paused: bool) -> anyhow::Result<()> {
        let Some(live) = self.lock().live.clone() else { return Ok(()) };
        if live.observer.living().is_some() {
            live.migration.as_ref().map_or(Ok(()), |migration| migration.check_ours())?;
            let stays = live.migration.as_ref().map_or(Ok(()), |migration| migration.check_stays());
            stays.with_context(|| format!("vm {} cannot be left to another daemon", self.name))?;
        }
        let paused = live.observer.rings().iter().position(|rings| rings.are_paused());
        if paused.is_some() && with_paused {
            log::warn!("vm {}: it is paused; it must not go on (cont) before the next daemon serves it", self.name);
        }
        let paused = paused.filter(|_| !with_paused);
        anyhow::ensure!(
            paused.is_none(),
            "vm {}: it is paused, or its guest is being reset or has been shut down (no ring of disk {} is started); a VMM that goes \
             on while there is no daemon hangs. Have it go on first (cont), or say --with-paused and let it go on only when the \
             next daemon serves it",
            self.name,
            live.journals.disk(paused.unwrap_or_default()).options.name
        );
        for log in live.journals.logs().iter().filter(|log| log.is_open()) {
            anyhow::ensure!(
                !matches!(log.placement, PlacementKind::Remote | PlacementKind::Discard),
                "vm {}: the journal of disk {} has placement {}, and cannot be left: end that VM first",
                self.name,
                live.journals.disk(log.home_disk()).options.name,
                log.placement.name()
            );
            anyhow::ensure!(
                !log.is_distrusted(),
                "vm {}: the journal of disk {} is not what it seemed, and must not be replayed by amberlog, which the next daemon \
                 would not know: end that VM first",
                self.name,
                live.journals.disk(log.home_disk()).options.name
            );
        }
        Ok(())
    }

    /// Has everything of a guest that runs be on storage, so that it can be left. A VM without a VMM has nothing to hand over.
    ///
    /// # Errors
    /// When a journal cannot be handed over, the VM is being prepared or recovered, or takes longer than `patience`.
    pub fn hand_over(&self, patience: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        let live = loop {
            let inner = self.lock();
            match (&inner.state, &inner.live) {
                (State::Running(_), Some(live)) => break live.clone(),
                (State::Waiting | State::Failed(_), _) => return Ok(()),
                _ if inner.is_over => return Ok(()),
                _ if Instant::now() > deadline => {
                    anyhow::bail!("vm {} is not served at this moment; ask again", self.name)
                }
                _ => drop(inner),
            }
            std::thread::sleep(INTERVAL);
        };
        for index in 0..live.journals.disks().len() {
            if live.journals.logs().iter().any(|log| log.home_disk() == index) {
                let disk = live.journals.disk(index).options.name.clone();
                let left = deadline.saturating_duration_since(Instant::now());
                self.change_placement(&disk, PlacementKind::Storage, left)
                    .with_context(|| format!("vm {}", self.name))?;
            }
        }
        live.journals.check_left().with_context(|| format!("vm {}", self.name))
    }

    /// Flushes the images of a guest that runs, before it is left: storage says once that it has failed, and the daemon that comes next
    /// opens the images anew. So it is asked while somebody hears it.
    ///
    /// # Errors
    /// When storage fails. The guest hears of it at its next flush.
    pub fn flush_before_leaving(&self) -> anyhow::Result<()> {
        let live = {
            let inner = self.lock();
            inner.live.clone().filter(|_| matches!(inner.state, State::Running(_)))
        };
        // Of a VM without a VMM nobody is left.
        let Some(live) = live else { return Ok(()) };
        live.journals.flush_images().with_context(|| format!("vm {}", self.name))
    }
}

/// The guest of a VM is served, and writes to its images: nobody is to find it waiting. Whoever finds this process dead goes on with what was
/// kept, or with nothing.
fn is_left_no_more(config: &VmConfig) {
    config.options.images().for_each(|(image, _)| placement::forget_left_guest(image));
    if let Err(error) = left::forget(&config.sockets) {
        log::error!("vm {}: that it was left stays noted: {error:#}", config.options.name);
    }
}

/// A process, and when it was started, where that is seen.
fn as_started(pid: i32) -> (i32, u64) {
    (pid, placement::process_started_at(pid).unwrap_or_default())
}

/// What an earlier worker has served, whose guest is there. Nothing if there is none.
///
/// # Errors
/// When its configuration is not there any more, or not understood.
pub fn served_before(line: &Line, name: &str) -> anyhow::Result<Option<VmConfig>> {
    if !line.has_kept() {
        return Ok(None);
    }
    let file = line.look_at_kept(CONFIG)?.context("the supervisor does not have the configuration that was served")?;
    let mut file = File::from(file);
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).context("reading the configuration that was kept")?;
    let mut served = Config::parse(&text).context("the configuration that the worker before served")?;
    let vm = served.vms.remove(name).context("the VM is not in the configuration that it was served with")?;
    Ok(Some(vm))
}

/// The key of a configuration that is kept.
const CONFIG: &str = "configuration";

fn keep_source(line: &Line, key: &str, config: &VmConfig) -> anyhow::Result<()> {
    let mut file: File = rustix::fs::memfd_create("amberlog-config", rustix::fs::MemfdFlags::CLOEXEC)?.into();
    file.write_all(config.source.as_bytes())?;
    Ok(line.keep(key, "", Some(file.as_fd()))?)
}

/// Makes the directory of a VM's sockets, puts a link to its directory in tmpfs there, and lets those in who may start its
/// VMM.
fn prepare_directories(config: &VmConfig, name: &str, directory: &Path) -> anyhow::Result<()> {
    let sockets = super::open_run(&config.run)?.directory_or_make(name, super::SOCKETS_OTHERS)?;
    sockets.set_link(super::words::AREA, directory)?;
    config.access.open_directory(sockets.path())?;
    if config.access.is_shared() {
        super::access::open_above(&config.options.shm, config.access.way(true))?;
        config.access.open_directory(directory)?;
    }
    // Not left to the VMM: what root's makes is root's, and the next worker of a daemon that is another user could not write to it.
    config.access.make_memory(&directory.join("ram"))
}
