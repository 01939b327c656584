//! `amberlog run`: a VM with its disks served in this process.
//!
//! Order of things: finish what an earlier run left for these images; lock the images; make the VM's directory in tmpfs;
//! serve the disks; start the VMM; wait for its end, however it ends; recover; report; remove the directory. Whatever
//! fails, what is still owed stays in the directory, and the next run finds it.

mod child;
mod disk_option;
mod model;
mod nvm;
mod remote;
mod samples;
mod trace;
mod vmm;

use crate::exit;
use crate::takeover::{PATIENCE, take_over};
use anyhow::Context;
use block_device::{Device, DeviceConfig, Image, ImageOptions, Observer, Peer};
use child::Watched;
use disk_model::Client;
use disk_option::{DiskOption, JournalDiskOption};
use guest_memory::{HandoverSocket, PageId, SHIM_SOCKET_VARIABLE, VmMemory};
use model::{ModelChoice, Models};
use placement::{
    AreaDirectory, DirectoryError, DiskOptions, JournalRoute, Journals, JournalsOptions, NvmRoute, PlacementKind, Route,
};
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trace::Trace;

/// What is left of a VM's patience when it is told to end.
const TERMINATION_PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of `amberlog run`.
#[derive(clap::Args, Debug)]
pub struct RunArgs {
    /// A disk: IMAGE[,placement=retain|copy|storage|discard|nvm=PATH|remote=HOST:PORT/NAME]
    /// [,name=NAME][,readonly][,serial=S][,queues=N][,flush=honour|skip][,model=M]; a comma in a path is written twice. The first is /dev/vda. M makes the disk as slow
    /// as st336753lw (15,000 rpm, 2012), st336753lw-write-through, hdd-7200, sata-ssd, nvme or none: disks that name the same one
    /// share it. A path is the socket of one that 'amberlog disk-model' shares among VMs. For experiments: flushes then
    /// do not reach the image's own storage.
    #[arg(long = "disk", value_name = "IMAGE[,OPTIONS]")]
    disks: Vec<DiskOption>,
    /// An external journal device: IMAGE[,for=NAME][,name=NAME][,model=M]; attached after the disks.
    #[arg(long = "journal-disk", value_name = "IMAGE[,OPTIONS]")]
    journal_disks: Vec<JournalDiskOption>,
    /// Write what the disks did to this file, as JSON, when the VM has ended.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Append what is held at each moment to this file, ten times a second, a line of JSON each.
    #[arg(long, value_name = "FILE")]
    samples: Option<PathBuf>,
    /// Record every request to this file.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// The directory for guest memory and journal tables: a tmpfs.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm/amberlog")]
    shm: PathBuf,
    /// The VM's name in reports.
    #[arg(long, value_name = "NAME", default_value = "vm")]
    name: String,
    /// Bound on host memory for tables and copied blocks, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    memory_budget: u64,
    /// Seconds for a second of the modelled disks: 2 makes them half as fast as they were.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = crate::disk_model::time_scale)]
    time_scale: f64,
    #[command(flatten)]
    trust: crate::remote_options::RemoteTrust,
    /// The VMM and its arguments.
    #[arg(last = true, required = true, value_name = "VMM ARGS")]
    vmm: Vec<OsString>,
}

/// Runs the command.
pub fn run(args: RunArgs) -> ExitCode {
    match supervise(args) {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

/// What the device threads tell of a VM.
struct VmObserver {
    memory: Arc<VmMemory>,
    handover: HandoverSocket,
    journals: Arc<Journals>,
    peers: Mutex<BTreeMap<i32, Watched>>,
    ring_pages: Mutex<Vec<Vec<PageId>>>,
}

impl VmObserver {
    fn connected(&self, peer: Peer) {
        let mut peers = self.peers.lock().expect("no panic under this lock");
        if peers.contains_key(&peer.pid) {
            return;
        }
        if let Some(watched) = Watched::new(peer.pid) {
            peers.insert(peer.pid, watched);
        }
        match self.handover.take(peer.pid) {
            Some(descriptor) => {
                if let Err(error) = self.memory.take_userfaultfd(descriptor) {
                    log::warn!("{error}");
                }
            }
            // The area says so when it matters, once.
            None if crate::shim::find().is_some() => self.memory.refuse_protection(format!(
                "the VMM (process {}) handed over no userfaultfd; it may lack the permission (root, CAP_SYS_PTRACE, or \
                 sysctl vm.unprivileged_userfaultfd=1)",
                peer.pid
            )),
            None => {}
        }
    }

    fn ring_pages(&self, disk: usize, pages: &[PageId]) {
        let mut all = self.ring_pages.lock().expect("no panic under this lock");
        all[disk] = pages.to_vec();
        let excluded: HashSet<PageId> = all.iter().flatten().copied().collect();
        self.journals.area.set_excluded_pages(excluded);
    }
}

/// The observer of one disk.
struct DiskObserver {
    vm: Arc<VmObserver>,
    disk: usize,
}

impl Observer for DiskObserver {
    fn connected(&self, peer: Peer) {
        self.vm.connected(peer);
    }

    fn ring_pages(&self, pages: &[PageId]) {
        self.vm.ring_pages(self.disk, pages);
    }
}

/// One disk, data or journal, as it will be attached.
struct Attached {
    options: DiskOptions,
    serial: String,
    queues: u16,
    model: Option<ModelChoice>,
}

fn attach(args: &RunArgs) -> anyhow::Result<Vec<Attached>> {
    let mut attached: Vec<Attached> = Vec::new();
    for (index, disk) in args.disks.iter().enumerate() {
        let name = disk.name.clone().unwrap_or_else(|| format!("disk{index}"));
        attached.push(Attached {
            serial: disk
                .serial
                .clone()
                .unwrap_or_else(|| name.chars().filter(char::is_ascii_graphic).take(20).collect()),
            queues: disk.queues,
            model: disk.model.clone(),
            options: DiskOptions {
                remote: remote::options(disk, &name, &args.trust),
                name,
                path: disk.path.clone(),
                placement: disk.placement,
                honour_flush: disk.honour_flush,
                read_only: disk.read_only,
                nvm: None,
            },
        });
    }
    for (index, disk) in args.journal_disks.iter().enumerate() {
        let name = disk.name.clone().unwrap_or_else(|| format!("journal{index}"));
        let of = match &disk.of {
            None => None,
            Some(of) => Some(attached.iter().find(|other| other.options.name == *of).with_context(|| {
                format!("--journal-disk {}: there is no --disk with name={of}", disk.path.display())
            })?),
        };
        attached.push(Attached {
            serial: name.chars().filter(char::is_ascii_graphic).take(20).collect(),
            queues: 1,
            model: disk.model.clone(),
            options: DiskOptions {
                path: disk.path.clone(),
                placement: of
                    .map_or(PlacementKind::Retain, |of| nvm::of_journal_disk(of.options.placement, &of.options.name)),
                honour_flush: of.is_some_and(|of| of.options.honour_flush),
                read_only: false,
                nvm: None,
                remote: None,
                name,
            },
        });
    }
    let mut names = HashSet::new();
    for disk in &attached {
        anyhow::ensure!(names.insert(disk.options.name.clone()), "two disks have the name {}", disk.options.name);
    }
    Ok(attached)
}

/// Finishes what an earlier run left for these images.
fn finish_earlier(registry: &Path, disks: &[Attached]) -> anyhow::Result<()> {
    for disk in disks {
        let path = &disk.options.path;
        let Some(left) = AreaDirectory::find(registry, path).map_err(|error| missing(path, error))? else { continue };
        let directory = take_over(&left, registry, Instant::now() + PATIENCE)?;
        let images: Vec<PathBuf> = disks.iter().map(|disk| disk.options.path.clone()).collect();
        let finished = placement::finish_directory(&directory, &images)?.into_result()?;
        for log in &finished {
            log::info!(
                "{}: finished an earlier run's recovery: {} transactions, {} blocks written home",
                log.image.display(),
                log.recovery.transactions,
                log.recovery.blocks_written
            );
        }
        directory.remove();
    }
    Ok(())
}

fn missing(path: &Path, error: DirectoryError) -> anyhow::Error {
    if path.exists() {
        error.into()
    } else {
        anyhow::anyhow!("the image {} does not exist; make it, or correct the path", path.display())
    }
}

fn supervise(args: RunArgs) -> anyhow::Result<ExitCode> {
    let mut attached = attach(&args)?;
    let registry = placement::registry();
    finish_earlier(&registry, &attached)?;
    for (option, disk) in args.disks.iter().zip(&mut attached) {
        nvm::open(option, &mut disk.options)?;
    }
    let journal_disks: Vec<&Path> = args.journal_disks.iter().map(|disk| disk.path.as_path()).collect();
    for disk in attached.iter().take(args.disks.len()) {
        remote::finish_earlier(&disk.options, &journal_disks)?;
    }
    let mut images = Vec::new();
    for disk in &attached {
        let options = ImageOptions { read_only: disk.options.read_only, ..ImageOptions::default() };
        let image = Image::open(&disk.options.path, options)?;
        anyhow::ensure!(
            image.size_bytes() > 0,
            "the image {} is too small: a disk has at least one sector of 512 bytes; make it larger (truncate -s 10G)",
            disk.options.path.display()
        );
        images.push(Arc::new(image));
    }
    let mut models = Models::new(args.time_scale);
    let mut clients = Vec::new();
    for (disk, image) in attached.iter().zip(&images) {
        let client = models.connect(disk.model.as_ref(), image.size_bytes());
        clients.push(client.with_context(|| format!("--disk {}", disk.options.path.display()))?);
    }
    let trace = match &args.trace {
        Some(path) => {
            let disks: Vec<(String, u64)> = attached
                .iter()
                .zip(&images)
                .map(|(disk, image)| (disk.options.name.clone(), image.size_bytes()))
                .collect();
            Some(Trace::create(path, &args.name, &disks)?)
        }
        None => None,
    };
    let directory = AreaDirectory::create(&args.shm, &registry)?;
    let prepared = vmm::check_room(&args.vmm, directory.path())
        .and_then(|()| attached.iter().try_for_each(|disk| Ok(directory.register(&disk.options.path)?)));
    if let Err(error) = prepared {
        directory.remove();
        return Err(error);
    }
    die_of_panics(directory.path());
    let memory = VmMemory::new();
    if let Some(reason) = vmm::bypasses_protection(&args.vmm) {
        memory.refuse_protection(reason);
    }
    let journals = Journals::new(
        &memory,
        directory,
        JournalsOptions {
            disks: attached.iter().map(|disk| disk.options.clone()).collect(),
            budget_bytes: args.memory_budget << 20,
            tracer: trace.as_ref().map(Trace::tracer),
        },
    )?;
    if let Err(error) = journals.check_nvm_room() {
        journals.directory().remove();
        return Err(error.into());
    }
    let samples = args.samples.as_deref().map(|path| samples::Samples::start(path, &journals)).transpose();
    let ended = samples.and_then(|samples| {
        let ended = serve_and_wait(&args, &attached, &images, &clients, &memory, &journals);
        drop(samples);
        ended
    });
    journals.give_back_memory();
    let recovered = journals.recover_all();
    let mut written = trace.map_or(Ok(()), |trace| trace.finish());
    if let Some(path) = &args.report {
        let text = serde_json::to_vec_pretty(&journals.report(&args.name))?;
        let report = std::fs::write(path, text).with_context(|| format!("writing the report {}", path.display()));
        written = written.and(report);
    }
    recovered.with_context(|| {
        let path = journals.directory().path().display().to_string();
        format!("what is still owed stays in {path}; mend the cause and run amberlog again")
    })?;
    journals.directory().remove();
    let code = ended?;
    written?;
    Ok(code)
}

/// Makes a panic in any thread the end of the whole process. A thread that panicked may have changed half of something in
/// memory, and whoever went on with that could acknowledge what is not held; the files in tmpfs are made to be found
/// as a process that was killed at any instant leaves them. The VMM dies with us.
fn die_of_panics(directory: &Path) {
    let message = format!(
        "amberlog: this is a bug in amberlog, and the VM ends with it; what was committed is kept in {}: run 'amberlog \
         recover --area {}', or amberlog run on the same images",
        directory.display(),
        directory.display()
    );
    let earlier = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        earlier(panic);
        eprintln!("{message}");
        std::process::abort();
    }));
}

/// Serves the disks, runs the VMM and waits for its end. On return nothing of the VM runs any more.
fn serve_and_wait(
    args: &RunArgs,
    attached: &[Attached],
    images: &[Arc<Image>],
    models: &[Option<Arc<Client>>],
    memory: &Arc<VmMemory>,
    journals: &Arc<Journals>,
) -> anyhow::Result<ExitCode> {
    let directory = journals.directory().path();
    let observer = Arc::new(VmObserver {
        memory: Arc::clone(memory),
        handover: HandoverSocket::listen(&directory.join("shim.sock"))?,
        journals: Arc::clone(journals),
        peers: Mutex::default(),
        ring_pages: Mutex::new(vec![Vec::new(); attached.len()]),
    });
    let mut devices = Vec::new();
    let mut sockets = Vec::new();
    for (index, (disk, image)) in attached.iter().zip(images).enumerate() {
        let socket = directory.join(format!("disk{index}.sock"));
        let mut config = DeviceConfig::new(disk.options.name.clone(), &socket, Arc::clone(image));
        config.identity.serial.clone_from(&disk.serial);
        config.queues = disk.queues;
        config.model.clone_from(&models[index]);
        config.write_cache = journals.needs_flushes(index, image.size_bytes());
        let route: Box<dyn Route> = if disk.options.nvm.is_some() {
            let route = NvmRoute::new(Arc::clone(journals), index);
            route.start_timer()?;
            Box::new(route)
        } else {
            Box::new(JournalRoute::new(Arc::clone(journals), index))
        };
        let observer = Arc::new(DiskObserver { vm: Arc::clone(&observer), disk: index });
        devices.push(Device::start(config, route, Arc::clone(memory), observer)?);
        sockets.push(vmm::Attachment { socket, queues: disk.queues });
    }
    let arguments = vmm::arguments(&args.vmm, &directory.join("ram"), &sockets).map_err(exit::usage)?;
    let environment = preload(&observer);
    // The VMM's number, once it runs, for the thread that passes signals on.
    let vmm_pid = Arc::new(AtomicI32::new(0));
    let received = pass_signals_on(&vmm_pid)?;
    let mut vmm = child::start(&arguments, &environment, journals.directory().lock_file().as_fd())?;
    vmm_pid.store(vmm.id() as i32, Ordering::SeqCst);
    if received.load(Ordering::SeqCst) != 0 {
        // The signal came before there was anybody to pass it to.
        vmm.kill()?;
    }
    let status = vmm.wait().context("waiting for the VMM")?;
    vmm_pid.store(0, Ordering::SeqCst);
    end_stragglers(&observer);
    for device in devices {
        if let Err(error) = device.stop() {
            log::error!("{error}");
        }
    }
    Ok(exit_code(status, received.load(Ordering::SeqCst)))
}

/// The environment that makes the VMM hand over its userfaultfd.
fn preload(observer: &VmObserver) -> Vec<(&'static str, OsString)> {
    let Some(shim) = crate::shim::find() else {
        observer.memory.refuse_protection(format!(
            "{} was not found beside amberlog; install it there, or name it in AMBERLOG_SHIM",
            crate::shim::FILE_NAME
        ));
        return Vec::new();
    };
    let mut preload = shim.into_os_string();
    if let Some(other) = std::env::var_os("LD_PRELOAD") {
        preload.push(":");
        preload.push(other);
    }
    vec![(SHIM_SOCKET_VARIABLE, observer.handover.path().as_os_str().to_owned()), ("LD_PRELOAD", preload)]
}

/// The VMM may have been started by what was started: it has to be gone before anything is recovered.
fn end_stragglers(observer: &VmObserver) {
    for (pid, watched) in &*observer.peers.lock().expect("no panic under this lock") {
        if !watched.wait(Duration::from_millis(500)) {
            log::warn!("the VMM (process {pid}) outlived the command that started it; it is ended now");
            watched.signal(rustix::process::Signal::KILL);
            if !watched.wait(TERMINATION_PATIENCE) {
                log::error!("the VMM (process {pid}) cannot be ended");
            }
        }
    }
}

/// SIGTERM and SIGINT end the VMM; everything goes home afterwards. Returns where the first signal's number is put.
fn pass_signals_on(vmm_pid: &Arc<AtomicI32>) -> anyhow::Result<Arc<AtomicI32>> {
    let received = Arc::new(AtomicI32::new(0));
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])?;
    let (pid, first) = (Arc::clone(vmm_pid), Arc::clone(&received));
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let _ = first.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
            let Some(watched) = Watched::new(pid.load(Ordering::SeqCst)) else { continue };
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
