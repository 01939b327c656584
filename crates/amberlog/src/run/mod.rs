//! `amberlog run`: a VM with its disks served in this process.
//!
//! The VMM is our child: it dies with us, inherits the lock of the VM's directory, and its exit status is ours.

mod child;

use crate::exit;
use crate::raw::KnownRaw;
use crate::vm::watched::Watched;
use crate::vm::{DiskOption, JournalDiskOption, Serving, Starter, Vm, VmOptions, die_of_panics, qemu};
use anyhow::Context;
use guest_memory::SHIM_SOCKET_VARIABLE;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// What is left of a VM's patience when it is told to end.
const TERMINATION_PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of `amberlog run`.
#[derive(clap::Args, Debug)]
pub struct RunArgs {
    /// A disk: IMAGE[,placement=retain|copy|storage|discard|nvm=PATH|remote=HOST:PORT/NAME]
    /// [,name=NAME][,readonly][,serial=S][,queues=N][,flush=honour|skip][,format=raw][,model=M][,log-writes=FILE]; a comma in a path is written twice.
    /// The first is /dev/vda. M makes the disk as slow as st336753lw (15,000 rpm, 2012), st336753lw-write-through,
    /// hdd-7200, hdd-7200-protected (its write cache outlasts a loss of power), sata-ssd, nvme,
    /// nvme-protected or none: disks that name the same one share it. A path is the socket of one that 'amberlog disk-model' shares among VMs. For experiments:
    /// flushes then do not reach the image's own storage. FILE gets everything that is sent to the image, in the format of Linux's
    /// dm-log-writes (for experiments). Placement nvm=PATH has options of its own: [,nvm-size=MIB]
    /// [,nvm-region=I/N][,nvm-checkpoint=SECONDS], and for experiments nvm-latency, nvm-bandwidth, nvm-append-home,
    /// nvm-early-runs, nvm-byte-level, nvm-delayed-checkpoint and nvm-log-everything (docs/nvm.md).
    #[arg(long = "disk", value_name = "IMAGE[,OPTIONS]")]
    disks: Vec<DiskOption>,
    /// An external journal device: IMAGE[,for=NAME][,name=NAME][,format=raw][,model=M][,log-writes=FILE]; attached after the disks.
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
    /// The directory for guest memory and journal tables: a tmpfs, in which others can write nothing. If none is named, one
    /// of this user's own in /dev/shm (amberlog-UID).
    #[arg(long, value_name = "DIR")]
    shm: Option<PathBuf>,
    /// The VM's name in reports.
    #[arg(long, value_name = "NAME", default_value = "vm")]
    name: String,
    /// Bound on host memory for tables and copied blocks, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    memory_budget: u64,
    /// Seconds for a second of the modelled disks: 2 makes them half as fast as they were.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = ::disk_model::time_scale)]
    time_scale: f64,
    /// Do not fence in the threads that work for the guest. Otherwise they make only the system calls that they need, and open
    /// nothing but what is in the VM's directory (seccomp and landlock).
    #[arg(long)]
    no_sandbox: bool,
    /// As it is anyway: how it was said before it was the default.
    #[arg(long, hide = true, conflicts_with = "no_sandbox")]
    sandbox: bool,
    #[command(flatten)]
    trust: command_line::remote_options::RemoteTrust,
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

impl RunArgs {
    fn vm(&self) -> VmOptions {
        VmOptions {
            name: self.name.clone(),
            disks: self.disks.clone(),
            journal_disks: self.journal_disks.clone(),
            shm: self.shm.clone().unwrap_or_else(placement::own_place),
            memory_budget_mib: self.memory_budget,
            time_scale: self.time_scale,
            trust: self.trust.clone(),
            sandbox: !self.no_sandbox,
            trace: self.trace.clone(),
            samples: self.samples.clone(),
        }
    }
}

/// What is written anew must not be what is served.
fn refuse_images_as_outputs(args: &RunArgs) -> anyhow::Result<()> {
    let vm = args.vm();
    let images: Vec<_> = vm.images().filter_map(|(path, _)| Some((path, identity(path)?))).collect();
    let named = [("--report", &args.report), ("--samples", &args.samples), ("--trace", &args.trace)];
    let named = named.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?)));
    let logs = args.disks.iter().map(|disk| &disk.log_writes);
    let logs = logs.chain(args.journal_disks.iter().map(|disk| &disk.log_writes)).flatten();
    let logs = logs.map(|path| ("log-writes", path));
    for (option, path) in named.chain(logs) {
        let Some(output) = identity(path) else { continue };
        if let Some((image, _)) = images.iter().find(|(_, image)| *image == output) {
            return Err(exit::usage(format!(
                "{option} {} is the image {}: it would be written over; name another file",
                path.display(),
                image.display()
            )));
        }
    }
    Ok(())
}

/// What a file is, whatever it is called; nothing if there is none.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some(if metadata.file_type().is_block_device() { (0, metadata.rdev()) } else { (metadata.dev(), metadata.ino()) })
}

fn supervise(args: RunArgs) -> anyhow::Result<ExitCode> {
    if args.disks.is_empty() && args.journal_disks.is_empty() {
        return Err(exit::usage("there is no disk to serve: give --disk IMAGE"));
    }
    // Before anything is opened: what is wrong with the arguments is wrong whatever the images are.
    if let Some(sentence) = qemu::contradiction(&args.vmm) {
        return Err(exit::usage(sentence));
    }
    refuse_images_as_outputs(&args)?;
    let _entered = log_context::enter(log_context::Context::vm(&args.name));
    let users_mask = own_files::keep_files_private();
    let vm = Vm::prepare(&args.vm(), &KnownRaw::default())?;
    vm.memory.keep_to_directory(vm.directory());
    if let Err(error) = qemu::check_room(&args.vmm, vm.directory()) {
        vm.abandon();
        return Err(error);
    }
    let directory = vm.directory().display();
    die_of_panics(format!(
        "amberlog: this is a bug in amberlog, and the VM ends with it; what was committed is kept in {directory}: run \
         'amberlog recover --area {directory}', or amberlog run on the same images"
    ));
    if let Some(reason) = qemu::bypasses_protection(&args.vmm, None) {
        vm.memory.refuse_protection(reason);
    }
    let ended = serve_and_wait(&args, &vm, users_mask);
    let finished = vm.finish(args.report.as_deref());
    match (ended, finished) {
        // What is still owed is the worse news; a trace or report that is not whole comes after the VMM's own end.
        (Err(error), Ok(())) => Err(error),
        (_, Err(error)) => Err(error),
        (Ok(code), Ok(())) => Ok(code),
    }
}

/// Serves the disks, runs the VMM and waits for its end. On return nothing of the VM runs any more.
fn serve_and_wait(args: &RunArgs, vm: &Vm, users_mask: rustix::fs::Mode) -> anyhow::Result<ExitCode> {
    let directory = vm.directory();
    // The VMM, which has the user's mask, would let others read it.
    vm.journals.directory().make_memory()?;
    let serving = vm.serve(directory, Starter::Ourselves, None, |index, _| format!("disk{index}"))?;
    let arguments =
        qemu::arguments(&args.vmm, &directory.join(placement::MEMORY), &serving.attachments).map_err(exit::usage)?;
    let environment = preload(&serving);
    // The VMM's number, once it runs, for the thread that passes signals on.
    let vmm_pid = Arc::new(AtomicI32::new(0));
    let received = pass_signals_on(&vmm_pid)?;
    let lock = vm.journals.directory().lock_file().as_fd();
    let mut vmm = child::start(&arguments, &environment, lock, users_mask)?;
    vmm_pid.store(vmm.id() as i32, Ordering::SeqCst);
    if received.load(Ordering::SeqCst) != 0 {
        // The signal came before there was anybody to pass it to.
        vmm.kill()?;
    }
    let status = vmm.wait().context("waiting for the VMM")?;
    vmm_pid.store(0, Ordering::SeqCst);
    serving.observer.end_stragglers();
    serving.stop();
    Ok(exit_code(status, received.load(Ordering::SeqCst)))
}

/// The environment that makes the VMM hand over its userfaultfd.
fn preload(serving: &Serving) -> Vec<(&'static str, OsString)> {
    let Some(shim) = crate::shim::find() else {
        serving.observer.memory.refuse_protection(format!(
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
    vec![(SHIM_SOCKET_VARIABLE, serving.observer.handover.path().as_os_str().to_owned()), ("LD_PRELOAD", preload)]
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
