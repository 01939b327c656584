//! `amberlog run`: a VM with its disks served by a worker of ours.
//!
//! The VMM is our child, not the worker's: it dies with us, inherits the lock of the VM's directory, and its exit status is ours.
//! Nothing that its guest says is looked at in this process.

mod child;
mod models;
mod supervise;
pub mod work;

use crate::exit;
use crate::vm::{DiskOption, JournalDiskOption, Threads, VmOptions};
use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `amberlog run`.
#[derive(clap::Args, Debug)]
pub struct RunArgs {
    /// A disk: IMAGE[,placement=retain|copy|storage|discard|nvm=PATH|remote=HOST:PORT/NAME]
    /// [,durable-within=SECONDS|never] [,name=NAME][,readonly][,serial=S][,queues=N] [,flush=honour|skip][,format=raw]
    /// [,iops=N][,iops-burst=N][,bytes-per-second=N][,bytes-burst=N][,throttle-group=NAME]
    /// [,model=M][,log-writes=FILE][,hot-pages=RULE], without blanks; a comma in a path is written twice.
    /// The first is /dev/vda. durable-within (EXPERIMENTAL, for retain and copy; never, if it is not given): what the guest has
    /// committed is durable on storage, as a file system by itself, within so many seconds, 0 to 3600; docs/durability.md says
    /// what of that is proven. iops and bytes-per-second (with K, M, G or T) bound what the guest may ask for, their bursts so many at once, and disks with the
    /// same throttle-group together. M makes the disk as slow as st336753lw (15,000 rpm, 2012), st336753lw-write-through,
    /// hdd-7200, hdd-7200-protected (its write cache outlasts a loss of power), sata-ssd, nvme,
    /// nvme-protected or none: disks that name the same one share it, and amberlog-lab, which has to lie beside this program, is started for
    /// it. A path is the socket of one that 'amberlog disk-model' shares among VMs. For experiments:
    /// flushes then do not reach the image's own storage. FILE gets everything that is sent to the image, in the format of Linux's
    /// dm-log-writes (for experiments). RULE is which blocks retain copies all the same: never, faulted, foreseen or lone (for
    /// experiments; lone, if it is not given). Placement nvm=PATH has options of its own: [,nvm-size=MIB]
    /// [,nvm-region=I/N][,nvm-checkpoint=SECONDS][,nvm-pipelined=on] (a loss of power may cost the last transaction), and for experiments nvm-latency, nvm-bandwidth, nvm-append-home,
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
    /// How many threads work for its disks: one for each with all its queues, or one for all of them.
    #[arg(long, value_name = "each|one", value_enum, default_value_t = Threads::Each, hide_possible_values = true)]
    threads: Threads,
    /// Seconds for a second of the modelled disks: 2 makes them half as fast as they were.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = disk_model_client::time_scale)]
    time_scale: f64,
    /// What the names of the sockets begin with at which the modelled disks of this run answer: said to its worker.
    #[arg(long, hide = true, value_name = "PREFIX")]
    model_sockets: Option<PathBuf>,
    /// Do not fence in the threads that work for the guest. Otherwise they make only the system calls that they need, and open
    /// nothing but what is in the VM's directory (seccomp and landlock).
    #[arg(long)]
    no_sandbox: bool,
    /// As it is anyway: how it was said before it was the default.
    #[arg(long, hide = true, conflicts_with = "no_sandbox")]
    sandbox: bool,
    /// What becomes of the VM when the process that serves its disks dies: another one goes on (restart), unless they die again and
    /// again, then the VMM is ended; the guest waits until it is ended (hold); or the VMM is ended at once (kill-vmm).
    #[arg(long, value_name = "restart|hold|kill-vmm", default_value = "restart")]
    on_crash: supervision::OnCrash,
    /// Asked to end (SIGTERM), press the power button of a guest of QEMU's first, and give it so long to shut down; asked again, it has no
    /// more time. Otherwise, and when the time is up, the VMM gets the signal.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    shutdown_seconds: u64,
    /// So many deaths of the worker in ten seconds are too many: for tests that kill it.
    #[arg(long, hide = true, value_name = "N", default_value_t = supervision::DEATHS_MAX)]
    deaths_max: usize,
    #[command(flatten)]
    trust: command_line::remote_options::RemoteTrust,
    /// The VMM and its arguments.
    #[arg(last = true, required = true, value_name = "VMM ARGS")]
    vmm: Vec<OsString>,
}

/// Runs the command.
pub fn run(args: &RunArgs) -> ExitCode {
    match supervise::supervise(args) {
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
            threads: self.threads,
            model_sockets: self.model_sockets.clone(),
            trust: self.trust.clone(),
            can_migrate: false,
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

/// What the VMM needs besides its own command line, as the worker tells the supervisor.
struct Needed {
    environment: Vec<(String, OsString)>,
    /// The whole command line, program first.
    arguments: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn what_the_vmm_needs_is_read_as_it_was_written() {
        let odd = OsString::from_vec(b"name=\xff \n".to_vec());
        let cases = [
            (Vec::new(), vec!["sh".into(), OsString::new(), odd.clone(), OsString::new()]),
            (vec![("A".to_owned(), odd), ("B".to_owned(), OsString::new())], vec!["true".into()]),
        ];
        for (environment, arguments) in cases {
            let file =
                Needed { environment: environment.clone(), arguments: arguments.clone() }.write().expect("written");
            let read = Needed::read(file).expect("read");
            assert_eq!((read.environment, read.arguments), (environment, arguments));
        }
    }
}
