//! One VM whose disks are served in this process, whoever starts its VMM: `amberlog run` or somebody else.
//!
//! Order of things: finish what an earlier process left for these images; lock the images; make the VM's directory in
//! tmpfs; serve the disks; when the VMM has ended, however it ended: recover, report, remove the directory. Whatever
//! fails, what is still owed stays in the directory, and the next process finds it.

pub mod as_left;
pub mod change;
mod cloud_hypervisor;
mod disk_option;
mod door_socket;
mod earlier;
pub mod in_memory;
mod marks;
pub mod migration;
mod model;
pub mod moments;
mod nvm;
mod observer;
pub mod qemu;
mod remote;
mod samples;
mod trace;
pub mod watched;

use self::as_left::{AsLeft, LeftImages};
use self::moments::Moments;
use crate::raw::KnownRaw;
use crate::worker::Line;
use anyhow::Context;
use block_device::Entrance;
use block_device::{Device, DeviceConfig, DeviceHandle, DeviceParts, Image, ImageKind, ImageOptions};
use block_route::Route;
use change::{Doors, Leftover};
use command_line::remote_options::RemoteTrust;
use disk_model_client::{Client, Profile};
pub use disk_option::{Bounds, DiskOption, JournalDiskOption, durable_within, size};
use door_socket::DoorSocket;
use earlier::{BroughtHome, finish_areas, finish_elsewhere, finish_left_meanwhile, lock_all, refuse_left};
use guest_memory::{BeforeDevice, HandoverSocket, KeepHandedOver, Terms, VmMemory};
use image_file::Seal;
use marks::Marks;
use migration::{Beginning, KeptMigration, Migration, Working};
use model::ModelChoice;
pub use model::socket_of as model_socket;
use observer::DiskObserver;
pub use observer::VmObserver;
use placement::{AreaDirectory, DiskOptions, DiskRoute, Journals, JournalsOptions, PlacementKind};
use samples::Samples;
use sandbox::Sandbox;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use supervision::{Kept, Said};
use throttle::{Limits, Throttle};
use trace::Trace;
use watched::Watched;
use write_log::WriteLog;

/// How long storage may take for what a dead worker has asked for, before that is said.
const SILENCE: Duration = Duration::from_secs(5);

/// How many threads work for a VM's disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Threads {
    /// One for each disk, with all its queues.
    #[default]
    Each,
    /// One for all of them.
    One,
}

/// What a VM is made from.
#[derive(Clone, Debug)]
pub struct VmOptions {
    /// Its name in reports.
    pub name: String,
    /// Its disks; the first is /dev/vda.
    pub disks: Vec<DiskOption>,
    /// Its external journals, attached after the disks.
    pub journal_disks: Vec<JournalDiskOption>,
    /// Where the directory with its memory and tables is made: a tmpfs.
    pub shm: PathBuf,
    /// Bound on host memory for tables and copied blocks, in MiB.
    pub memory_budget_mib: u64,
    /// How many threads work for its disks.
    pub threads: Threads,
    /// What the names of the sockets begin with at which the drives answer that its disks name (`model=NAME`), if somebody has started
    /// them: `amberlog run` has.
    pub model_sockets: Option<PathBuf>,
    /// How its journal servers are trusted.
    pub trust: RemoteTrust,
    /// Whether its guest may be moved to another host while it runs, if nothing of it speaks against that ([`migration::why_not`]).
    pub can_migrate: bool,
    /// Whether its threads may ask the kernel for no more than they need.
    pub sandbox: bool,
    /// Where every request is recorded.
    pub trace: Option<PathBuf>,
    /// Where what is held at each moment is written to.
    pub samples: Option<PathBuf>,
}

/// One disk, data or journal, as it will be attached.
struct Attached {
    options: DiskOptions,
    serial: String,
    queues: u16,
    model: Option<ModelChoice>,
    is_raw: bool,
    limits: Limits,
    throttle_group: Option<String>,
}

/// What bounds each disk: those of one group have one bound together.
fn throttles(attached: &[Attached], now: Instant) -> Vec<Option<Throttle>> {
    let mut groups: HashMap<&str, Throttle> = HashMap::new();
    let mut throttles = Vec::new();
    for disk in attached {
        let new = || Throttle::new(disk.limits, now);
        let shared = disk.throttle_group.as_deref();
        let throttle = shared.map_or_else(new, |group| groups.entry(group).or_insert_with(new).clone());
        throttles.push((!disk.limits.is_empty()).then_some(throttle));
    }
    throttles
}

/// A VM whose images are locked and whose directory is made.
pub struct Vm {
    name: String,
    attached: Vec<Attached>,
    images: Vec<Arc<Image>>,
    clients: Vec<Option<Arc<Client>>>,
    trace: Option<Trace>,
    samples: Option<Samples>,
    has_sandbox: bool,
    threads: Threads,
    marks: Option<Marks>,
    line: Arc<Line>,
    /// Whoever reads the other end sees when this process is gone, and nothing is under way any more on images that do not say so themselves.
    under_way: Arc<OwnedFd>,
    /// Of a guest that an earlier worker has served, what its VMM and it were connected by.
    resumed: Mutex<Option<Resumed>>,
    /// The doors that the supervisor has from an earlier worker, by disk.
    doors: Doors,
    /// What the supervisor has of disks that are not served any more.
    leftover: Mutex<Leftover>,
    /// Snapshots of its disks.
    pub moments: Arc<Moments>,
    /// Who may touch its images, where its guest can be moved to another host.
    pub migration: Option<Arc<Migration>>,
    /// What is to be done when nothing can go wrong any more, and nobody was let in yet.
    at_doors: Mutex<Option<AtDoors>>,
    /// Devices that have been started and have not ended in order.
    living: Arc<AtomicUsize>,
    /// Its guest's memory.
    pub memory: Arc<VmMemory>,
    /// Its journals.
    pub journals: Arc<Journals>,
}

type AtDoors = Box<dyn FnOnce() -> anyhow::Result<()> + Send>;

/// Under which the process is kept that has passed a device through.
const PASSED_THROUGH: &str = "passed through";

/// What goes on from an earlier worker.
struct Resumed {
    handover: UnixListener,
    /// The VMM that had connected, and when it was started.
    vmm: Option<(i32, u64)>,
    has_userfaultfd: bool,
    /// What processes had handed over that had not connected.
    handed_over: HashMap<i32, OwnedFd>,
    /// What had been done when, for whoever wants to know how long a guest waits.
    steps: Vec<(&'static str, Instant)>,
}

/// A VM's disks at their sockets.
pub struct Serving {
    /// Who has connected.
    pub observer: Arc<VmObserver>,
    /// Before the devices: what it waits for, they do.
    working: Option<Working>,
    devices: Devices,
    /// The VMM ended while there was no worker: nobody comes any more.
    pub vmm_is_gone: bool,
    /// The disks, in order.
    pub attachments: Vec<qemu::Attachment>,
    /// Their doors.
    pub doors: change::Doors,
}

/// The devices of a VM, which whoever drops them has stopped.
struct Devices {
    devices: Vec<Device<dyn Route>>,
    living: Arc<AtomicUsize>,
}

impl Devices {
    fn push(&mut self, device: Device<dyn Route>) {
        self.living.fetch_add(1, Ordering::SeqCst);
        self.devices.push(device);
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        let mut devices = std::mem::take(&mut self.devices).into_iter();
        while let Some(device) = devices.next() {
            match device.stop() {
                Ok(_) => drop(self.living.fetch_sub(1, Ordering::SeqCst)),
                Err(error) => {
                    log::error!("{error}");
                    // This process is at its end ([`Vm::end_beside_devices`]): the others are not waited for.
                    devices.by_ref().for_each(std::mem::forget);
                }
            }
        }
    }
}

/// Who starts the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    /// This process: the VMM inherits the lock of the VM's directory, and its arguments were looked at.
    Ourselves,
    /// Somebody else: the preloaded library is given the lock.
    Strangers,
}

impl VmOptions {
    /// What its disks wish of all its logs; of several that differ, the last one's wish.
    fn choose_hot_pages(&self, journals: &Journals) {
        if let Some(rule) = self.disks.iter().filter_map(|disk| disk.hot_pages).next_back() {
            journals.area.set_hot_pages(rule);
        }
    }

    /// Its images, journal disks last, and whether they are only read.
    pub fn images(&self) -> impl Iterator<Item = (&Path, bool)> {
        let disks = self.disks.iter().map(|disk| (disk.path.as_path(), disk.read_only));
        disks.chain(self.journal_disks.iter().map(|disk| (disk.path.as_path(), false)))
    }

    /// The drives that its disks name as their models, each once.
    pub fn named_models(&self) -> Vec<Profile> {
        let disks = self.disks.iter().map(|disk| &disk.model);
        let models = disks.chain(self.journal_disks.iter().map(|disk| &disk.model));
        let mut drives = Vec::new();
        for model in models.flatten() {
            if let ModelChoice::Own(drive) = model
                && !drives.contains(drive)
            {
                drives.push(*drive);
            }
        }
        drives
    }

    fn attach(&self) -> anyhow::Result<Vec<Attached>> {
        let mut attached: Vec<Attached> = Vec::new();
        if let Some(disk) = self.disks.iter().find(|disk| disk.remote.is_some()) {
            self.trust.check().map_err(|why| anyhow::anyhow!("{}: {why}", disk.path.display()))?;
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let name = disk.name.clone().unwrap_or_else(|| format!("disk{index}"));
            attached.push(Attached {
                serial: disk
                    .serial
                    .clone()
                    .unwrap_or_else(|| name.chars().filter(char::is_ascii_graphic).take(20).collect()),
                queues: disk.queues,
                model: disk.model.clone(),
                is_raw: disk.is_raw,
                limits: disk.limits,
                throttle_group: disk.throttle_group.clone(),
                options: DiskOptions {
                    remote: remote::options(disk, &name, &self.trust),
                    name,
                    path: disk.path.clone(),
                    placement: disk.placement,
                    honour_flush: disk.honour_flush,
                    read_only: disk.read_only,
                    nvm: None,
                    durable_within: disk.durable_within,
                    write_log: None,
                },
            });
        }
        for (index, disk) in self.journal_disks.iter().enumerate() {
            let name = disk.name.clone().unwrap_or_else(|| format!("journal{index}"));
            let of = match &disk.of {
                None => None,
                Some(of) => Some(attached.iter().find(|other| other.options.name == *of).with_context(|| {
                    format!("the journal disk {} is for={of}, and there is no disk with name={of}", disk.path.display())
                })?),
            };
            attached.push(Attached {
                serial: name.chars().filter(char::is_ascii_graphic).take(20).collect(),
                queues: 1,
                model: disk.model.clone(),
                is_raw: disk.is_raw,
                limits: Limits::default(),
                throttle_group: None,
                options: DiskOptions {
                    path: disk.path.clone(),
                    placement: of.map_or(PlacementKind::Retain, |of| {
                        nvm::of_journal_disk(of.options.placement, &of.options.name)
                    }),
                    honour_flush: of.is_some_and(|of| of.options.honour_flush),
                    read_only: false,
                    nvm: None,
                    remote: None,
                    durable_within: None,
                    write_log: None,
                    name,
                },
            });
        }
        let mut groups: HashMap<&str, (&str, Limits)> = HashMap::new();
        for disk in &attached {
            let Some(group) = &disk.throttle_group else { continue };
            let (first, limits) = groups.entry(group).or_insert((&disk.options.name, disk.limits));
            anyhow::ensure!(
                *limits == disk.limits,
                "disks {first} and {} share throttle-group={group}, and have other bounds: say the same for both",
                disk.options.name
            );
        }
        let mut names = HashSet::new();
        for disk in &attached {
            anyhow::ensure!(names.insert(disk.options.name.clone()), "two disks have the name {}", disk.options.name);
        }
        Ok(attached)
    }

    /// What a VMM finds in this directory, in the same order.
    ///
    /// # Errors
    /// When the options contradict each other, whatever the images are.
    pub fn attachments(&self, sockets: &Path) -> anyhow::Result<Vec<qemu::Attachment>> {
        let attachment = |disk: Attached| qemu::Attachment {
            socket: sockets.join(format!("{}.sock", disk.options.name)),
            queues: disk.queues,
            image: (disk.options.path, disk.options.read_only),
        };
        Ok(self.attach()?.into_iter().map(attachment).collect())
    }

    /// The names of the disks, journal disks last, in the order in which they are attached.
    ///
    /// # Errors
    /// When the options contradict each other, whatever the images are.
    pub fn disk_names(&self) -> anyhow::Result<Vec<(String, u16)>> {
        Ok(self.attach()?.into_iter().map(|disk| (disk.options.name, disk.queues)).collect())
    }
}

/// Waits until a worker that has died makes no calls any more, and nothing that it asked of images is under way that do not tell that
/// themselves: then nobody has the other end of this pipe any more.
fn wait_for_end(pipe: &OwnedFd) -> anyhow::Result<()> {
    loop {
        match rustix::io::read(pipe, &mut [0u8; 1]) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.map(drop).context("waiting for what the worker before had under way"),
        }
    }
}

/// Until what is given is dropped, a worker waits for the end of what the one before it has asked of storage: says so, once, if that does
/// not come.
fn say_if_it_takes_long(name: &str) -> Sender<()> {
    let (waits, is_over) = channel();
    let sentence = format!(
        "vm {name}: this worker waits until storage has answered all that the one before it asked for; what its guest is owed is kept \
         until then (or another process has byte 1000 of an image locked for writing: see /proc/locks)"
    );
    let told = log_context::spawn(std::thread::Builder::new().name("waiting".to_owned()), move || {
        if is_over.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
            log::warn!("{sentence}");
        }
    });
    if let Err(error) = told {
        log::debug!("no thread to say that something is waited for: {error}");
    }
    waits
}

fn connect_models(
    options: &VmOptions,
    attached: &[Attached],
    images: &[Arc<Image>],
) -> anyhow::Result<Vec<Option<Arc<Client>>>> {
    let mut clients = Vec::new();
    for (disk, image) in attached.iter().zip(images) {
        let client = model::connect(disk.model.as_ref(), options.model_sockets.as_deref(), image.size_bytes());
        clients.push(client.with_context(|| format!("the disk {}", disk.options.path.display()))?);
    }
    Ok(clients)
}

/// Begins the logs of what is sent to images (`log-writes=FILE`). What an earlier process left is finished before.
fn write_down(options: &VmOptions, attached: &mut [Attached]) -> anyhow::Result<()> {
    let disks = options.disks.iter().map(|disk| &disk.log_writes);
    let files = disks.chain(options.journal_disks.iter().map(|disk| &disk.log_writes));
    for (file, disk) in files.zip(attached) {
        if let Some(path) = file {
            let log = WriteLog::begin(own_files::open_output(path)?, path)
                .with_context(|| format!("the log of writes {}", path.display()))?;
            disk.options.write_log = Some(Arc::new(log));
        }
    }
    Ok(())
}

fn require_raw(attached: &mut [Attached], known: &KnownRaw) -> anyhow::Result<()> {
    for disk in attached {
        disk.is_raw |= known.has(&disk.options.path);
        if !disk.is_raw {
            crate::raw::require(&disk.options.path)?;
        }
    }
    Ok(())
}

/// Opens and locks the image of a disk.
fn open_image(disk: &Attached, keep_time: bool) -> anyhow::Result<Image> {
    open_image_by(disk, |path, options| Image::open(path, ImageOptions { keep_time, ..options }))
}

fn open_image_by(
    disk: &Attached,
    open: impl Fn(&Path, ImageOptions) -> Result<Image, block_device::Error>,
) -> anyhow::Result<Image> {
    let image_options =
        ImageOptions { read_only: disk.options.read_only, is_raw: disk.is_raw, ..ImageOptions::default() };
    let image = open(&disk.options.path, image_options)?.with_write_log(disk.options.write_log.clone());
    anyhow::ensure!(
        image.size_bytes() > 0,
        "the image {} is too small: a disk has at least one sector of 512 bytes; make it larger (truncate -s 10G)",
        disk.options.path.display()
    );
    Ok(image)
}

impl Vm {
    /// Finishes what an earlier process left, locks the images, makes the directory. Images that are `known` are not asked
    /// whether they are raw. Where its guest can be moved to another host, the images are locked when a guest begins ([`migration`]),
    /// unless an earlier daemon has left one (`is_left`).
    ///
    /// # Errors
    /// When an image is missing, in use or damaged, or what an earlier process left cannot be brought home. Nothing is
    /// owed by this process then.
    pub fn prepare(options: &VmOptions, known: &KnownRaw, line: &Arc<Line>, is_left: bool) -> anyhow::Result<Self> {
        let mut brought = BroughtHome::default();
        Self::prepare_after(options, known, line, is_left, &mut brought).map_err(|error| brought.but(error))
    }

    fn prepare_after(
        options: &VmOptions,
        known: &KnownRaw,
        line: &Arc<Line>,
        is_left: bool,
        brought: &mut BroughtHome,
    ) -> anyhow::Result<Self> {
        let mut attached = options.attach()?;
        let can_migrate = migration::why_not(options).is_none();
        let is_awaiting = can_migrate && !is_left;
        if !is_left {
            refuse_left(&attached)?;
        }
        // What is owed to a disk is written home whatever its guest has written to the first block.
        let left = finish_areas(&attached, brought)?;
        let registry = placement::own_place();
        placement::sweep(&options.shm, &registry);
        if is_awaiting {
            // Asked when a guest begins.
            attached.iter_mut().for_each(|disk| disk.is_raw |= known.has(&disk.options.path));
        } else {
            require_raw(&mut attached, known)?;
        }
        for (option, disk) in options.disks.iter().zip(&mut attached) {
            nvm::open(option, &mut disk.options)?;
        }
        let journal_disks: Vec<&Path> = options.journal_disks.iter().map(|disk| disk.path.as_path()).collect();
        finish_elsewhere(&attached, &journal_disks, brought)?;
        write_down(options, &mut attached)?;
        // One that was left is looked at once more when it is locked.
        let open =
            |disk| if is_awaiting { open_image_by(disk, Image::open_unlocked) } else { open_image(disk, is_left) };
        let images = attached.iter().map(|disk| Ok(Arc::new(open(disk)?)));
        let images = images.collect::<anyhow::Result<Vec<_>>>()?;
        if !is_awaiting && !is_left {
            let unlock = || images.iter().for_each(|image| image.unlock());
            finish_left_meanwhile(left, &attached, &journal_disks, brought, unlock, || lock_all(&images))?;
        }
        let clients = connect_models(options, &attached, &images)?;
        let trace = match &options.trace {
            Some(path) => {
                let disks: Vec<(String, u64)> = attached
                    .iter()
                    .zip(&images)
                    .map(|(disk, image)| (disk.options.name.clone(), image.size_bytes()))
                    .collect();
                Some(Trace::create(path, &options.name, &disks)?)
            }
            None => None,
        };
        let directory = AreaDirectory::create(&options.shm, &registry)?;
        if let Some(note) = in_memory::not_in_memory(directory.path()) {
            log::warn!("{note}");
        }
        // Images that are only read are owed nothing, and several VMs may have the same.
        let mut owed = attached.iter().filter(|disk| !disk.options.read_only && !is_awaiting);
        if let Err(error) = owed.try_for_each(|disk| directory.register(&disk.options.path)) {
            directory.remove();
            return Err(error.into());
        }
        let path = directory.path().to_string_lossy().into_owned();
        let lock = directory.lock_file().try_clone().context("duplicating the descriptor of the directory's lock")?;
        let memory = VmMemory::new();
        let set_up = if is_awaiting { Journals::awaiting } else { Journals::new };
        let journals = set_up(
            &memory,
            directory,
            JournalsOptions {
                disks: attached.iter().map(|disk| disk.options.clone()).collect(),
                budget_bytes: options.memory_budget_mib << 20,
                tracer: trace.as_ref().map(Trace::tracer),
            },
        )?;
        options.choose_hot_pages(&journals);
        let beginning = if is_awaiting { Beginning::Awaited } else { Beginning::Ours };
        let migration = can_migrate.then(|| Migration::new(line, &journals, &images, options, beginning)).transpose();
        let migration = match migration {
            Ok(migration) => migration,
            Err(error) => {
                journals.directory().remove();
                return Err(error);
            }
        };
        let (is_done, under_way) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        line.keep("under way", "", Some(is_done.as_fd()))?;
        line.keep("directory", &path, Some(lock.as_fd()))?;
        for (disk, image) in attached.iter().zip(&images) {
            change::keep_image(line, &disk.options.name, image)?;
            change::keep_second(line, &disk.options.name, image)?;
        }
        let vm = Vm {
            line: Arc::clone(line),
            under_way: Arc::new(under_way),
            resumed: Mutex::default(),
            doors: Doors::default(),
            leftover: Mutex::default(),
            moments: Arc::default(),
            migration,
            at_doors: Mutex::default(),
            living: Arc::default(),
            name: options.name.clone(),
            attached,
            images,
            clients,
            trace,
            samples: None,
            has_sandbox: options.sandbox,
            threads: options.threads,
            marks: None,
            memory,
            journals,
        };
        if let Err(error) = vm.journals.check_nvm_room() {
            vm.abandon();
            return Err(error.into());
        }
        match vm.start_threads(options) {
            Ok((samples, marks)) => Ok(Vm { samples, marks: Some(marks), ..vm }),
            Err(error) => {
                vm.abandon();
                Err(error)
            }
        }
    }

    fn start_threads(&self, options: &VmOptions) -> anyhow::Result<(Option<Samples>, Marks)> {
        let samples = options.samples.as_deref().map(|path| Samples::start(path, &self.journals)).transpose()?;
        Ok((samples, Marks::start(&self.journals)?))
    }

    /// Goes on with a VM whose worker has died, and whose guest runs: `kept` is what that one had kept.
    ///
    /// # Errors
    /// When what it left cannot be taken up. Nothing of it was changed, on storage neither (that comes last, in [`Vm::serve`]).
    pub fn resume(options: &VmOptions, mut kept: Kept, line: &Arc<Line>) -> anyhow::Result<Self> {
        let wished = kept.all(change::DURABLE_WITHIN);
        let can_migrate = migration::why_not(options).is_none();
        let kept_migration = KeptMigration::of(&kept)?;
        let (are_not_ours, are_awaited) = (kept_migration.are_not_ours(), kept_migration.are_awaited());
        let mut taken = |key: &str| kept.take(key).with_context(|| format!("the supervisor does not have its {key}"));
        let (_, is_done) = taken("under way")?;
        let mut steps = vec![("to hear what was kept", Instant::now())];
        let waiting = say_if_it_takes_long(&options.name);
        wait_for_end(&is_done)?;
        steps.push(("until its process was gone", Instant::now()));
        let mut attached = options.attach()?;
        for (name, text) in wished {
            let within = durable_within(&text).map_err(|sentence| anyhow::anyhow!("{sentence}"))?;
            let disk = attached.iter_mut().find(|disk| disk.options.name == name);
            disk.into_iter().for_each(|disk| disk.options.durable_within = within);
        }
        for (option, disk) in options.disks.iter().zip(&mut attached) {
            nvm::open(option, &mut disk.options)?;
        }
        let mut files = Vec::new();
        for disk in &attached {
            let second = taken(&change::second_key(&disk.options.name)).ok();
            let (words, file) = taken(&change::image_key(&disk.options.name))?;
            let file = File::from(file);
            change::await_idle(&words, &file, &disk.options.path)?;
            files.push((words, file, second));
        }
        drop(waiting);
        steps.push(("until nothing was under way", Instant::now()));
        let mut images = Vec::new();
        for (disk, (words, file, second)) in attached.iter().zip(files) {
            let image_options =
                ImageOptions { read_only: disk.options.read_only, keep_time: can_migrate, ..ImageOptions::default() };
            let adopt = if are_not_ours { Image::adopt_unlocked } else { Image::adopt };
            let image = adopt(file, &disk.options.path, image_options)?;
            change::check_image(&image)?;
            change::keep_image_anew(line, &disk.options.name, &image, &words)?;
            match second {
                Some((_, second)) => image.set_second(second.into(), true),
                None => change::keep_second(line, &disk.options.name, &image)?,
            }
            images.push(Arc::new(image));
        }
        let clients = connect_models(options, &attached, &images)?;
        if options.trace.is_some() {
            log::warn!("vm {}: its trace ends here: the worker that wrote it has died", options.name);
        }
        if options.disks.iter().any(|disk| disk.log_writes.is_some()) {
            log::warn!("vm {}: its log of writes ends here: the worker that wrote it has died", options.name);
        }
        let (path, lock) = taken("directory")?;
        let (directory, description) = AreaDirectory::adopt(Path::new(&path), &placement::own_place(), lock.into())?;
        let (_, handover) = taken("handover")?;
        let memory = VmMemory::new();
        memory.keep_to_directory(directory.path());
        let resume = if are_awaited { Journals::resume_awaiting } else { Journals::resume };
        let journals = resume(
            &memory,
            directory,
            &description,
            JournalsOptions {
                disks: attached.iter().map(|disk| disk.options.clone()).collect(),
                budget_bytes: options.memory_budget_mib << 20,
                tracer: None,
            },
        )?;
        options.choose_hot_pages(&journals);
        let beginning = Beginning::GoesOn(kept_migration);
        let migration =
            can_migrate.then(|| Migration::new(line, &journals, &images, options, beginning)).transpose()?;
        let moments = Arc::new(Moments::resume(&mut kept, &images, &journals, line));
        steps.push(("for tables and logs", Instant::now()));
        let doors = Doors::kept(&kept);
        let leftover = Mutex::new(Leftover::of(&kept, &doors, &attached));
        let vmm = vmm_of(&kept);
        // From here on faults are answered: the logs that retain pages are known.
        let mut handed_over = observer::all_handed_over(&mut kept);
        let before = kept.take("userfaultfd").map(|(_, descriptor)| descriptor);
        // The one before may have got no further than to know who its VMM is.
        let own = vmm.and_then(|(pid, _)| handed_over.remove(&pid));
        let userfaultfd = choose_userfaultfd((before, own), vmm, journals.area.retains_pages(), line)?;
        if let Some((pid, _)) = vmm.filter(|(pid, _)| kept.data(PASSED_THROUGH) == Some(pid.to_string().as_str())) {
            memory.refuse_protection(observer::passes_through(pid));
        }
        let has_userfaultfd = userfaultfd.is_some();
        if !has_userfaultfd && journals.area.retains_pages() && vmm.is_some_and(lives) {
            anyhow::bail!(
                "what the guest committed is in its own pages, and the userfaultfd that protects these is not there: end its VMM, \
                 and what it is owed is brought home"
            );
        }
        if let Some(words) = kept.data("windows") {
            // A fault may wait already, and no disk may come for long: the guest's may have been unplugged.
            memory.adopt_windows(words);
        }
        if let Some(descriptor) = userfaultfd {
            let sandbox = options.sandbox.then(|| Sandbox::new(journals.directory().path(), false));
            let memory = Arc::clone(&memory);
            // What answers faults is started by a thread that is fenced in as the one is that hears a VMM.
            let adopting = log_context::spawn(std::thread::Builder::new(), move || {
                if let Some(sandbox) = sandbox {
                    sandbox.enter(sandbox::Role::Vmm);
                }
                memory.adopt_userfaultfd(descriptor)
            })?;
            adopting.join().map_err(|_| anyhow::anyhow!("the thread that takes the userfaultfd up has failed"))??;
        }
        let (is_done, under_way) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        line.keep("under way", "", Some(is_done.as_fd()))?;
        // Before this one writes anything: if the supervisor dies as well, the next worker waits for this one's end, not for an earlier one's.
        line.settle();
        let vm = Vm {
            name: options.name.clone(),
            attached,
            images,
            clients,
            trace: None,
            samples: None,
            has_sandbox: options.sandbox,
            threads: options.threads,
            marks: None,
            line: Arc::clone(line),
            under_way: Arc::new(under_way),
            doors,
            leftover,
            moments,
            migration,
            at_doors: Mutex::default(),
            living: Arc::default(),
            resumed: Mutex::new(Some(Resumed { handover: handover.into(), vmm, has_userfaultfd, handed_over, steps })),
            memory,
            journals,
        };
        let (samples, marks) = vm.start_threads(options)?;
        Ok(Vm { samples, marks: Some(marks), ..vm })
    }

    /// Has something done when nothing can go wrong any more, and before anybody is let in ([`Vm::serve`]).
    pub fn before_doors(&self, what: impl FnOnce() -> anyhow::Result<()> + Send + 'static) {
        *self.at_doors.lock().expect("no panic under this lock") = Some(Box::new(what));
    }

    /// Notes its images as raw: a guest was served them.
    pub fn note_raw(&self, known: &mut KnownRaw) {
        self.images.iter().for_each(|image| known.note(image.path()));
    }

    /// Where its memory and tables are.
    pub fn directory(&self) -> &Path {
        self.journals.directory().path()
    }

    /// Ends this process as if it had been killed, if a device has not ended in order. What that device was asked for may be under way
    /// still, or be asked for yet by a thread that hangs: what is written beside it could be overwritten by what is older (rule 3 of
    /// ARCHITECTURE.md), and guest pages that are given back would be written to the image as zeros. The supervisor has what it had:
    /// the next worker waits until nothing of this one is under way, sees that the VMM is gone, and does what this one was to do.
    fn end_beside_devices(&self) {
        let living = self.living.load(Ordering::SeqCst);
        if living > 0 {
            log::error!(
                "vm {}: storage does not answer ({living} disks are not done), and nothing is brought home beside what is under way: \
                 this worker ends, and the next one waits for storage; what is owed is kept in {}",
                self.name,
                self.directory().display()
            );
            std::process::exit(i32::from(crate::exit::FAILED));
        }
    }

    /// Gives up before any VMM could connect: nothing is owed.
    pub fn abandon(self) {
        self.end_beside_devices();
        self.journals.directory().remove();
        self.clear();
    }

    /// Nothing of it is to be kept any more. If the supervisor is gone this process ends in the next moment.
    fn clear(&self) {
        let _ = self.line.say(&Said::Clear, &[]);
        self.line.settle();
    }

    /// Takes a guest that an earlier daemon left alone: before [`Vm::serve`].
    ///
    /// # Errors
    /// When its journals are not where that daemon would have left them, or its images not what they were.
    pub fn adopt(&self, pid: i32, before: Option<&LeftImages>) -> anyhow::Result<()> {
        if let Some(before) = before {
            // Nobody else may write to them by now who asks for locks.
            before.check(self.images.iter().map(|image| image.file()))?;
        }
        self.journals.adopt()?;
        for (disk, untold) in before.into_iter().flat_map(LeftImages::untold) {
            log::error!("vm {}: {untold}; its guest's next flush fails", self.name);
            self.journals.owes_failure(disk, untold);
        }
        for (disk, home_starts) in before.into_iter().flat_map(LeftImages::going_on) {
            self.journals.awaits_unannounced(disk, home_starts);
        }
        if let Some(migration) = &self.migration {
            migration.was_left(&before.map_or_else(|| vec![true; self.images.len()], LeftImages::used));
        }
        // It has the lock of another directory: nobody may take this one over while it lives, from when the next worker goes on with it.
        let journals = Arc::clone(&self.journals);
        self.before_doors(move || Ok(journals.directory().note_vmm(pid)?));
        let started = placement::process_started_at(pid).unwrap_or_default();
        self.line.keep("vmm", &format!("{pid} {started}"), None)?;
        self.memory.refuse_protection(format!(
            "the VMM (process {pid}) began under an earlier daemon; its pages are protected again from its next start on"
        ));
        Ok(())
    }

    /// Serves the disks at sockets in `sockets`, where the disk with a number is called what `name` says; to nobody but the
    /// process that an earlier daemon `left` alone, if there is one ([`Vm::adopt`]).
    ///
    /// # Errors
    /// When a socket or an io_uring cannot be made.
    pub fn serve(
        &self,
        sockets: &Path,
        starter: Starter,
        left: Option<(i32, Watched)>,
        name: impl Fn(usize, &str) -> String,
    ) -> anyhow::Result<Serving> {
        let strangers = starter == Starter::Strangers;
        // A thread that finds a journal whose place is a server starts the one that speaks to that.
        let has_network = self.attached.iter().any(|disk| disk.options.remote.is_some());
        let sandbox = self.has_sandbox.then(|| Sandbox::new(self.directory(), has_network));
        let lock = strangers.then(|| self.journals.directory().lock_file().try_clone()).transpose();
        let lock = lock.context("duplicating the descriptor of the directory's lock")?;
        let at = sockets.join("shim.sock");
        let mut resumed = self.resumed.lock().expect("no panic under this lock").take();
        let steps = resumed.as_mut().map(|resumed| std::mem::take(&mut resumed.steps));
        let mut peers: observer::Peers = left.into_iter().map(|(pid, watched)| (pid, Arc::new(watched))).collect();
        let mut vmm_is_gone = false;
        let line = Arc::clone(&self.line);
        self.memory.keep_windows(Box::new(move |words| {
            if let Err(error) = line.keep("windows", words, None) {
                log::debug!("having it kept where the VMM has memory: {error}");
            }
        }));
        let reception = Arc::new(observer::Reception::new(!strangers));
        let asked = Arc::clone(&reception);
        let mut terms = Terms {
            welcome: Arc::new(move |pid| asked.welcome(pid)),
            lock: lock.map(Into::into),
            before_device: self.before_device(),
            keep: self.keep_handed_over(),
            received: HashMap::new(),
        };
        let handover = match resumed {
            Some(mut resumed) => {
                terms.received = std::mem::take(&mut resumed.handed_over);
                vmm_is_gone = !self.go_on_with(&resumed, starter, sockets, &mut peers)?;
                resumed.handover
            }
            None => HandoverSocket::bind(&at)?,
        };
        self.line.keep("handover", "", Some(handover.as_fd()))?;
        *reception.peers() = peers;
        terms.received.keys().for_each(|pid| reception.expect(*pid));
        let observer = Arc::new(VmObserver {
            memory: Arc::clone(&self.memory),
            line: Arc::clone(&self.line),
            handover: HandoverSocket::serve(handover, &at, terms)?,
            journals: Arc::clone(&self.journals),
            may_come: self.migration.is_some(),
            strangers_at: strangers.then(|| sockets.to_owned()),
            reception,
            ring_pages: Mutex::new(vec![Vec::new(); self.attached.len()]),
            rings: Mutex::new(vec![observer::Rings::default(); self.attached.len()]),
        });
        let mut serving = Serving {
            observer,
            working: None,
            devices: Devices { devices: Vec::new(), living: Arc::clone(&self.living) },
            vmm_is_gone,
            attachments: Vec::new(),
            doors: Doors::default(),
        };
        let throttles = throttles(&self.attached, Instant::now());
        let mut doors = self.doors.clone();
        // All at once: a guest may wait, and a thread that is started waits for a processor.
        let mut parts = Vec::new();
        for (index, (disk, image)) in self.attached.iter().zip(&self.images).enumerate() {
            let socket = sockets.join(format!("{}.sock", name(index, &disk.options.name)));
            let mut config = DeviceConfig::new(disk.options.name.clone(), &socket, Arc::clone(image));
            config.identity.serial.clone_from(&disk.serial);
            // As many as the VMM asks for, whatever we would ask for: more than it uses cost nothing.
            config.sandbox.clone_from(&sandbox);
            config.model.clone_from(&self.clients[index]);
            config.throttle.clone_from(&throttles[index]);
            share_with_engine(self.journals.disk(index), image);
            config.write_cache = self.journals.needs_flushes(index, image.size_bytes());
            config.under_way = Some(Arc::clone(&self.under_way));
            if let Some(migration) = &self.migration {
                config.gate = Some(migration.gate(index));
                // What is offered here and on the host that it comes from has to be the same.
                config.write_cache = true;
            }
            let entrance = Entrance::new()?;
            let door = doors.of(&disk.options.name).0;
            self.line.set_entrance(door, Arc::clone(&entrance));
            config.entrance = Some(entrance);
            let route: Box<dyn Route> = Box::new(DiskRoute::new(Arc::clone(&self.journals), index));
            let observer = Arc::new(DiskObserver { vm: Arc::clone(&serving.observer), disk: index, door });
            parts.push(DeviceParts { config, route, observer });
            let image = (disk.options.path.clone(), disk.options.read_only);
            serving.attachments.push(qemu::Attachment { socket, queues: disk.queues, image });
        }
        let groups: Vec<Vec<_>> = match self.threads {
            Threads::Each => parts.into_iter().map(|parts| vec![parts]).collect(),
            Threads::One => vec![parts],
        };
        let mut starting = Vec::new();
        for group in groups {
            starting.extend(Device::begin_together(group, Arc::clone(&self.memory))?);
        }
        for device in starting {
            serving.devices.push(device.finish()?);
        }
        if let Some(migration) = &self.migration {
            serving.working = Some(migration.start(serving.handles())?);
        }
        let mut sockets = Vec::new();
        // Where the VMM has ended, what it is owed goes home before anybody else is let in; of one command, which may start another one, at its end.
        let is_closed = serving.vmm_is_gone && strangers;
        let to_be_open = if is_closed { &[] } else { serving.attachments.as_slice() };
        for (disk, attachment) in self.attached.iter().zip(to_be_open) {
            let name = &disk.options.name;
            sockets.push(DoorSocket::prepare(name, doors.of(name).0, self.doors.has(name), &attachment.socket)?);
        }
        // Nothing else can fail that another worker would not fail at, too.
        self.journals.go_on()?;
        // From here on this is how the VM is served, whoever dies: before a guest is noted as being in its directory, which would be nobody's
        // until that guest's end. Doors that are not there yet are made by the next worker.
        self.line.keep(crate::worker::SERVED, "", None)?;
        self.line.settle();
        if !serving.vmm_is_gone {
            serving.observer.reception.open();
        }
        if let Some(at_doors) = self.at_doors.lock().expect("no panic under this lock").take() {
            at_doors()?;
        }
        std::mem::take(&mut *self.leftover.lock().expect("no panic under this lock")).clean_up(&self.line)?;
        sockets.iter().try_for_each(|socket| socket.open(&self.line))?;
        serving.doors = doors;
        self.line.settle();
        // What has a name from now on is what the door listens at, whoever dies.
        sockets.into_iter().for_each(DoorSocket::show);
        if let Some(mut steps) = steps {
            steps.push(("for memory and disks", Instant::now()));
            self.say_how_long(&steps);
        }
        Ok(serving)
    }

    /// A VMM of ours is about to pass a device through to its guest, which writes to memory past the page tables.
    fn before_device(&self) -> BeforeDevice {
        let (line, memory, name) = (Arc::clone(&self.line), Arc::clone(&self.memory), self.name.clone());
        Arc::new(move |pid| {
            // The next worker has to know it, too, and before anything is done that counts on it.
            let is_kept = line.keep(PASSED_THROUGH, &pid.to_string(), None);
            line.settle();
            let reason = observer::passes_through(pid);
            let is_done = is_kept.is_ok() && memory.end_protection(reason);
            if !is_done {
                log::error!(
                    "vm {name}: there is no memory to copy everything to that is protected: process {pid} gets no access to a \
                     passed-through device"
                );
            }
            is_done
        })
    }

    /// The next worker has what processes have handed over that have not connected yet.
    fn keep_handed_over(&self) -> KeepHandedOver {
        let line = Arc::clone(&self.line);
        Arc::new(move |pid, descriptor| {
            let key = observer::handed_over(pid);
            let is_said = match descriptor {
                // Who keeps it while no daemon is there has to know the process again.
                Some(_) => {
                    let started = placement::process_started_at(pid).unwrap_or_default();
                    line.keep(&key, &started.to_string(), descriptor)
                }
                None => line.say(&Said::Forget { key }, &[]),
            };
            if let Err(error) = is_said {
                log::debug!("having what process {pid} handed over kept: {error}");
            }
            // If the supervisor is gone this process ends here, and the other one says it once more.
            line.settle();
        })
    }

    fn say_how_long(&self, steps: &[(&'static str, Instant)]) {
        let mut last = self.line.began();
        let mut words = Vec::new();
        for (what, at) in steps {
            words.push(format!("{:.1} ms {what}", at.duration_since(last).as_secs_f64() * 1e3));
            last = *at;
        }
        let all = last.duration_since(self.line.began()).as_secs_f64() * 1e3;
        log::info!("vm {}: the guest of a dead worker goes on: {all:.1} ms ({})", self.name, words.join(", "));
    }

    /// The VMM of an earlier worker is this one's, too. False if it had connected, and has ended.
    ///
    /// # Errors
    /// When it lives, and cannot be watched.
    fn go_on_with(
        &self,
        resumed: &Resumed,
        starter: Starter,
        sockets: &Path,
        peers: &mut observer::Peers,
    ) -> anyhow::Result<bool> {
        let Some((pid, started)) = resumed.vmm else { return Ok(true) };
        let watched = Watched::new(pid);
        // Only now: the one that is watched is the one that was started then.
        if !placement::process_lives(pid, started) {
            log::info!("vm {}: its VMM (process {pid}) has ended while it had no worker", self.name);
            return Ok(false);
        }
        let watched = watched.with_context(|| format!("its VMM (process {pid}) lives, and cannot be watched"))?;
        peers.insert(pid, Arc::new(watched));
        let is_unnoted = || placement::living_vmms(self.directory()).is_ok_and(|noted| !noted.contains(&pid));
        if starter == Starter::Strangers && is_unnoted() {
            // The worker before was killed in that very moment.
            self.journals.directory().note_vmm(pid)?;
        }
        // Also of a VMM that we started: what we started may be a script that gives it more.
        if let Some(reason) = observer::bypasses_protection(observer::arguments_of(pid), sockets) {
            self.memory.refuse_protection(reason);
        }
        if !resumed.has_userfaultfd {
            self.memory.refuse_protection("the VMM had handed over no userfaultfd to the worker before".to_owned());
        }
        Ok(true)
    }

    /// Flushes the images of a guest that is to be left, after [`Serving::stop`], and gives what they look like then; who comes next has to
    /// find them so. What storage has failed at is in there. Where something is under way this does not return.
    ///
    /// # Errors
    /// When an image cannot be read, or something of the guest is held here.
    pub fn as_left(&self) -> anyhow::Result<Vec<(&Path, &File, AsLeft)>> {
        self.end_beside_devices();
        self.journals.check_left()?;
        if self.memory.is_untold() {
            log::error!(
                "vm {}: its VMM has not come back before it was left, and a page that a killed worker protected keeps its guest for ever: if \
                 the guest hangs, end that process",
                self.name
            );
        }
        // Nobody answers its faults under the next daemon, and its own userfaultfd keeps protected what is.
        self.memory.let_all_go();
        let mut all = Vec::new();
        for (index, image) in self.images.iter().enumerate() {
            let flushed = self.journals.flush_image(index);
            Self::seal_left(image);
            let name = &self.attached[index].options.name;
            let earlier = || format!("disk {name}: a flush of its image had failed, and its guest was not told yet");
            let has_failed = self.journals.has_untold_failure(index);
            let untold = flushed.err().map(|error| error.to_string()).or_else(|| has_failed.then(earlier));
            if let Some(untold) = &untold {
                log::error!("vm {}: {untold}; the next daemon has its guest's next flush fail", self.name);
            }
            // Through the page cache: superblocks are at no boundary.
            let opened =
                image.reopen_buffered().with_context(|| format!("opening {} again", image.path().display()))?;
            let is_unused = self.migration.as_ref().is_some_and(|migration| !migration.has_begun(index));
            let as_left = AsLeft::look(&opened, &self.journals.superblock_places(index), untold)?
                .unused(is_unused)
                .going_on(self.journals.may_go_on_unannounced(index));
            all.push((image.path(), image.file(), as_left));
        }
        Ok(all)
    }

    /// Gives an image that was flushed a time of its last change that no clock gives, so that a write in the same moment is seen, too.
    /// Where that is not possible, it keeps the time that it has.
    fn seal_left(image: &Image) {
        if image.read_only() || image.kind() == ImageKind::BlockDevice {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // No ring has this number: it is not taken for the seal of a guest that was moved.
        let seal = Seal::of(now.as_secs(), &[(u16::MAX, std::process::id() as u16)]);
        let time = UNIX_EPOCH + Duration::new(seal.seconds, seal.nanoseconds);
        if let Err(error) = image.file().set_modified(time) {
            log::debug!("the time of the last change of {} cannot be set: {error}", image.path().display());
        }
    }

    /// Leaves a guest that goes on under the next process, after that was noted ([`Vm::as_left`]).
    ///
    /// # Errors
    /// When the trace cannot be written; the VM is left all the same.
    pub fn leave(mut self, pid: i32) -> anyhow::Result<()> {
        debug_assert!(self.journals.check_left().is_ok());
        let started = placement::process_started_at(pid).unwrap_or_default();
        let guest = placement::LeftGuest { vm: self.name.clone(), pid, started };
        for image in self.images.iter().filter(|image| !image.read_only()) {
            // Whoever uses it meanwhile is not warned; the next daemon sees it all the same.
            if let Err(error) = placement::note_left_guest(image.path(), &guest) {
                log::warn!("{}: that a guest waits to go on with it is not noted: {error}", image.path().display());
            }
        }
        drop((self.samples.take(), self.marks.take()));
        let written = self.trace.take().map_or(Ok(()), |trace| trace.finish());
        // From here on nobody goes on with what is kept: a part of it has gone in a moment.
        let _ = self.line.keep(LEFT, "", None);
        self.line.settle();
        self.journals.directory().remove();
        self.clear();
        written
    }

    /// Recovers; nothing of the VM runs any more, or this does not return (`end_beside_devices`). Writes the report, and removes the directory if nothing is owed.
    ///
    /// # Errors
    /// When what is owed cannot be written: it stays, and the sentence says where.
    pub fn finish(mut self, report: Option<&Path>) -> anyhow::Result<()> {
        self.end_beside_devices();
        drop((self.samples.take(), self.marks.take()));
        // Its guest is no more: nobody goes on with its images.
        self.images.iter().for_each(|image| image.own_locks());
        self.journals.give_back_memory();
        if let Some(migration) = &self.migration {
            migration.give_up_at_last();
        }
        // What was given up, or was never taken, is not to be touched.
        let may_recover = self.migration.as_ref().is_none_or(|migration| migration.may_recover());
        let recovered = if may_recover { self.journals.recover_all() } else { Ok(()) };
        let mut written = self.trace.take().map_or(Ok(()), |trace| trace.finish());
        if let Some(path) = report {
            let text = serde_json::to_vec_pretty(&self.journals.last_report(&self.name))?;
            let report = own_files::create_output(path).map_err(anyhow::Error::from).and_then(|mut file| {
                file.write_all(&text).with_context(|| format!("writing the report {}", path.display()))
            });
            written = written.and(report);
        }
        // Whatever is owed still is found by its files: nobody goes on with it.
        self.clear();
        recovered.with_context(|| {
            let path = self.directory().display().to_string();
            format!("what is still owed stays in {path}; mend the cause and run amberlog again")
        })?;
        self.journals.directory().remove();
        written
    }
}

impl Serving {
    /// For asking the devices things.
    pub fn handles(&self) -> Vec<DeviceHandle<dyn Route>> {
        self.devices.devices.iter().map(Device::handle).collect()
    }

    /// Drops the connections, and lets what is in flight end. Where that does not, the VM knows it, and neither recovers nor is left.
    pub fn stop(self) {
        // Who comes to hand over tries again, and is the next VMM then.
        self.observer.reception.close();
        for attachment in &self.attachments {
            // Nobody finds the door any more.
            let _ = std::fs::remove_file(&attachment.socket);
        }
        drop(self.working);
        drop(self.devices);
    }
}

/// Kept when a guest was left to the next daemon: nothing of it is held here, and what is kept of it is of no use to anybody.
const LEFT: &str = "left";

/// Whether the worker that had this kept has left its guest ([`Vm::leave`]).
pub fn is_left(kept: &Kept) -> bool {
    kept.data(LEFT).is_some()
}

/// Does what is left to do of [`Vm::leave`], whose worker was killed.
///
/// # Errors
/// When the supervisor is gone.
pub fn leave_at_last(mut kept: Kept, line: &Line) -> anyhow::Result<()> {
    // Where its supervisor died, it may be there for a moment.
    if let Some((_, is_done)) = kept.take("under way") {
        wait_for_end(&is_done)?;
    }
    if let Some((path, lock)) = kept.take("directory") {
        AreaDirectory::remove_for_another(Path::new(&path), &placement::own_place(), lock.into());
    }
    for (disk, _) in kept.all(change::IMAGE) {
        if let Some((_, image)) = kept.take(&change::image_key(&disk)) {
            // Whoever else has it still: the next daemon locks it anew.
            block_device::unlock_image(&image.into());
        }
    }
    line.say(&Said::Clear, &[])?;
    line.settle();
    Ok(())
}

/// The VMM that has connected, and when it was started, as an earlier worker of the VM has had it kept.
pub fn vmm_of(kept: &Kept) -> Option<(i32, u64)> {
    let (pid, started) = kept.data("vmm")?.split_once(' ')?;
    Some((pid.parse().ok()?, started.parse().ok()?))
}

/// Whether the process with this number is still the one that was started then.
pub fn lives((pid, started): (i32, u64)) -> bool {
    placement::process_lives(pid, started)
}

/// Makes a panic in any thread the end of the whole process. A thread that panicked may have changed half of something in
/// memory, and whoever went on with that could acknowledge what is not held; the files in tmpfs are made to be found
/// as a process that was killed at any instant leaves them. `message` says what to do then.
pub fn die_of_panics(message: String) {
    let earlier = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        earlier(panic);
        eprintln!("{message}");
        std::process::abort();
    }));
}

/// How long a VMM may take to end that gives its memory back already.
const VMM_ENDS_WITHIN: Duration = Duration::from_secs(10);

/// The userfaultfd that is the VMM's, of the one that a worker before has used and of what the process has handed over, and has it kept as that.
/// None of a program that has ended: it would protect nothing, and say nothing of that. Where the guest's pages are retained, so that nobody can go
/// on without one, a VMM that is about to end is waited for.
fn choose_userfaultfd(
    (before, own): (Option<OwnedFd>, Option<OwnedFd>),
    vmm: Option<(i32, u64)>,
    is_needed: bool,
    line: &Line,
) -> anyhow::Result<Option<OwnedFd>> {
    let (mut chosen, mut over) = (None, None);
    for (descriptor, is_kept) in [(before, true), (own, false)] {
        let Some(descriptor) = descriptor.filter(|_| chosen.is_none()) else { continue };
        if VmMemory::is_of_ended_program(descriptor.as_fd()).context("looking at the userfaultfd")? {
            over.get_or_insert(descriptor);
            continue;
        }
        if !is_kept {
            line.keep("userfaultfd", "", Some(descriptor.as_fd()))?;
        }
        chosen = Some(descriptor);
    }
    if chosen.is_none() && over.is_some() {
        // A VMM that ends gives its memory back first, which may take a while.
        let deadline = Instant::now() + VMM_ENDS_WITHIN;
        let is_awaited = || is_needed && vmm.is_some_and(lives);
        while is_awaited() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        if is_awaited() {
            // The next worker finds it as this one did.
            return Ok(None);
        }
        if !vmm.is_some_and(lives) {
            // The VMM's own: nobody can write any more, and what is let go of is let go of.
            return Ok(over);
        }
        line.say(&Said::Forget { key: "userfaultfd".to_owned() }, &[])?;
    }
    if let Some((pid, _)) = vmm {
        line.say(&Said::Forget { key: observer::handed_over(pid) }, &[])?;
    }
    Ok(chosen)
}

/// What the journals write goes past the page cache where the disk engine does, as far as it shares pages with what that writes.
fn share_with_engine(disk: &placement::Disk, image: &Image) {
    if image.read_only() {
        return;
    }
    match image.reopen_direct() {
        Ok(None) => {}
        Ok(Some((direct, alignment))) => disk.share_with_engine(direct, alignment.offset_bytes),
        Err(error) => log::warn!(
            "{} cannot be opened once more, past the page cache ({error}): where a journal's superblock shares a page with blocks of \
             files, as with blocks of 1 KiB, a write to it may take back what is written to those at that moment",
            image.path().display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl VmOptions {
        pub(super) fn for_test(disks: &[&str]) -> Self {
            VmOptions {
                name: "db".to_owned(),
                disks: disks.iter().map(|disk| disk.parse().expect("a disk")).collect(),
                journal_disks: Vec::new(),
                shm: PathBuf::from("/dev/shm"),
                memory_budget_mib: 256,
                threads: Threads::Each,
                model_sockets: None,
                trust: RemoteTrust::default(),
                can_migrate: false,
                sandbox: true,
                trace: None,
                samples: None,
            }
        }
    }

    fn attached(disks: &[&str]) -> anyhow::Result<Vec<Attached>> {
        VmOptions::for_test(disks).attach()
    }

    /// From the words of the configuration to the buckets: what one disk of a group has taken, the other one waits for.
    #[test]
    fn disks_of_a_group_have_one_bound_together_and_others_their_own() {
        let start = Instant::now();
        let bound = "iops=10,iops-burst=1";
        let disks = ["throttle-group=slow", "throttle-group=slow", "name=c", "throttle-group=other", "name=e"];
        let mut disks: Vec<String> =
            disks.iter().enumerate().map(|(at, more)| format!("{at}.img,{bound},{more}")).collect();
        disks.push("free.img".to_owned());
        let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
        let throttles = throttles(&attached(&disks).expect("disks"), start);
        let waits = || throttles.iter().map(|throttle| throttle.as_ref()?.wait(start)).collect::<Vec<_>>();
        assert_eq!(waits(), [None; 6]);
        let take = |disk: usize, operations: u64| {
            let throttle = throttles[disk].as_ref().expect("it is bounded");
            (0..operations).for_each(|_| throttle.take(0));
        };
        take(0, 2);
        take(1, 4);
        let both = Some(Duration::from_millis(500));
        assert_eq!(waits(), [both, both, None, None, None, None], "6 of 1 together, at 10 a second");
        take(3, 2);
        let own = Some(Duration::from_millis(100));
        assert_eq!(waits(), [both, both, None, own, None, None]);
        assert!(throttles[5].is_none(), "nothing bounds it");
        let error = attached(&["a,iops=10,throttle-group=x", "b,iops=11,throttle-group=x"]).err().expect("two bounds");
        assert!(error.to_string().contains("share throttle-group=x, and have other bounds"), "{error}");
    }
}
