//! The `amberlog` command: one module per subcommand, each with its arguments and a `run`. Experiments and the journal
//! server are programs of their own, which this one becomes when their commands are given.
//!
//! Exit codes are the contract of `docs/command-line.md`: 0 done, 1 failed, 2 usage, 3 input damaged or refused.
//!
//! # The workspace
//!
//! amberlog serves the disks of virtual machines and does not write their guests' ext3 and ext4 journals: committed blocks stay in
//! the guest's own memory, write-protected from outside, and are written home when the guest dies. The repository's
//! `ARCHITECTURE.md` has the rules that must always hold and what each crate must never do; `docs/README.md` lists all pages.
//!
//! These crates stand alone, and have examples:
//!
//! * [jbd2](../jbd2/index.html): the journal's format. Parse, build, and plan a replay, without I/O.
//! * [extfs](../extfs/index.html): partitions, superblocks, where a journal is, what lies in between.
//! * [recovery](../recovery/index.html): replay a journal onto an image, as e2fsck does, or put it in its own place.
//! * [io-trace](../io_trace/index.html): block traces. Record, read eight formats, convert, summarise.
//! * [ssd-sim](../ssd_sim/index.html): what a trace does to flash under four translation layers.
//! * [seeded-random](../seeded_random/index.html): random numbers from a seed, the same in every release.
//!
//! These are the way of a guest's write, from the device to where it is held:
//!
//! * [block-device](../block_device/index.html): vhost-user, virtio-blk, io_uring.
//! * [block-route](../block_route/index.html): the contract between moving bytes and deciding where they go.
//! * [placement](../placement/index.html): finds journals, and decides.
//! * [journal-area](../journal_area/index.html): what is held of a log in memory; [guest-memory](../guest_memory/index.html) protects pages.
//! * [durability](../durability/index.html): when what is held becomes durable in the journal's own place.
//! * [nvm-journal](../nvm_journal/index.html): what is held of a log on persistent memory.
//! * [remote-journal](../remote_journal/index.html): what is held of a log on a server, and that server.
//!
//! These stand beside it:
//!
//! * [throttle](../throttle/index.html): bounds on a disk's operations and bytes a second, with bursts.
//! * [image-moments](../image_moments/index.html): copies of an image as it was at one moment, made while it is written on.
//! * [write-log](../write_log/index.html): what is sent to an image, written down for tools that replay any prefix of it.
//! * [latency](../latency/index.html): histograms of how long things took.
//!
//! These let a VM outlive what serves it:
//!
//! * [supervision](../supervision/index.html): a supervisor and its workers, and what is kept when one of them dies.
//! * [front-door](../front_door/index.html): the connections of VMMs, kept open while the workers behind them come and go.
//! * [vmm-shim](../amberlog_vmm_shim/index.html): the library in a VMM that makes a userfaultfd and hands it over.
//!
//! These are the other programs:
//!
//! * [journal-server](../amberlog_journal_server/index.html): runs the server of remote journals.
//! * [lab](../lab/index.html): runs the papers' experiments; [charts](../charts/index.html) makes the pages of their results, and
//!   [disk-model](../disk_model/index.html) computes how long a drive of the papers' time takes.
//!
//! These test all of it:
//!
//! * [guest-kit](../guest_kit/index.html): boots real guests; [guest-tools](../guest_tools/index.html) is what runs inside them.
//! * [crash-explorer](../crash_explorer/index.html): simulates a crash at every step of recorded guests.
//! * [test-frontend](../test_frontend/index.html): plays the VMM and the guest's driver.
//! * [test-storage](../test_storage/index.html): is storage that fails on demand.
//!
//! The others are what these need: [own-files](../own_files/index.html), [image-file](../image_file/index.html),
//! [sandbox](../sandbox/index.html), [log-context](../log_context/index.html), [command-line](../command_line/index.html) and
//! [disk-model-client](../disk_model_client/index.html).

// What an option's help says in brackets is optional, and no link.
#![allow(rustdoc::broken_intra_doc_links)]

mod backup;
mod children;
mod client;
mod disk;
mod exit;
mod inspect;
mod last_memory;
mod libvirt;
mod logind;
mod metrics;
mod power;
mod power_button;
mod raw;
mod recover;
mod run;
mod serve;
mod shim;
mod supervisor;
mod takeover;
mod turns;
mod vm;
mod worker;
mod worker_command;

use clap::{CommandFactory, Parser, Subcommand};
use command_line::documents::DocumentsArgs;
use command_line::programs::{OtherArgs, become_program};
use std::ffi::OsString;
use std::process::ExitCode;

const LAB: &str = "amberlog-lab";
const JOURNAL_SERVER: &str = "amberlog-journal-server";
/// Commands that are other programs, and have their pages.
const OTHER_PROGRAMS: [&str; 5] = ["lab", "disk-model", "journal-server", "ssd", "trace"];

#[derive(Parser)]
#[command(
    name = "amberlog",
    version,
    about = "VM-aware journaling for unmodified Linux guests",
    after_help = "Log lines go to stderr; AMBERLOG_LOG says which: error, warn, info (the default) or debug."
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay a jbd2 journal (internal or external) onto an image or block device.
    Recover(recover::RecoverArgs),
    /// Run a VM with its disks served here: its journals are held, and finished however the VM ends.
    Run(run::RunArgs),
    /// The daemon: serve the disks of many VMs that others start, as a configuration says.
    Serve(serve::ServeArgs),
    /// Show what a daemon holds for its VMs.
    Status(serve::ask::StatusArgs),
    /// Show that again and again.
    Top(serve::ask::TopArgs),
    /// Write home all that a daemon's VM is owed, before a backup or a snapshot of its images.
    Flush(serve::ask::FlushArgs),
    /// Change where the journals of a daemon's VM live, while its guest runs: to storage before the lights go out.
    Placement(serve::ask::PlacementArgs),
    /// End a daemon and leave its VMs running: their journals are on storage until the next daemon takes them.
    Detach(serve::ask::DetachArgs),
    /// Say whether all is well with a daemon and its VMs: 0, or 1 and what is not.
    Health(serve::ask::HealthArgs),
    /// Have this program, as it is installed now, serve the VMs of a daemon: guests run on, journals stay held.
    Upgrade(serve::ask::UpgradeArgs),
    /// Print the environment and the arguments with which QEMU finds a daemon's disks.
    Arguments(serve::ask::ArgumentsArgs),
    /// Write an image that is exactly what a disk has committed, while its guest runs.
    Snapshot(backup::SnapshotArgs),
    /// Hold a VM's disks still, with everything committed on storage, until thaw or for a time: for a backup.
    Freeze(backup::FreezeArgs),
    /// Let a frozen VM go on; an error if it went on by itself before.
    Thaw(backup::ThawArgs),
    /// The host runs on battery: have every journal of a daemon's VMs go to storage now, and begin there. A UPS calls it.
    OnBattery(power::PowerArgs),
    /// The mains are back: have journals live as configured again, from the next mounts on.
    OnMains(power::PowerArgs),
    /// List, add, remove, enlarge or throttle the disks of a daemon's VM while its guest runs.
    Disk(disk::DiskArgs),
    /// Print or make a libvirt domain's XML that works with a daemon's disks.
    Libvirt(libvirt::LibvirtArgs),
    /// Show a journal: superblock, transactions, tags, revokes, where the log ends and why.
    Inspect(inspect::InspectArgs),
    /// Run the papers' experiments on real guests, and report on them.
    Lab(OtherArgs),
    /// Serve a modelled disk that several VMs share, for experiments.
    DiskModel(OtherArgs),
    /// Run the server of remote journals, or list, inspect and delete what one keeps.
    JournalServer(OtherArgs),
    /// Simulate what block traces do to an SSD under page-mapped, FAST, Superblock or DFTL translation.
    Ssd(OtherArgs),
    /// Summarise and convert block traces.
    Trace(OtherArgs),
    /// Write manual pages and completions into a directory: for packages.
    #[command(hide = true)]
    Documents(DocumentsArgs),
    /// Serve one VM: what the others start.
    #[command(hide = true)]
    Worker(worker_command::WorkerArgs),
    /// Keep descriptors over a daemon's death: what the daemon starts.
    #[command(hide = true)]
    Depot,
}

fn main() -> ExitCode {
    let command = CommandLine::parse().command;
    match &command {
        Command::Worker(_) => command_line::logging::start_with_limit(),
        _ => command_line::logging::start(),
    }
    command_line::output::code_after(match command {
        Command::Recover(args) => recover::run(args),
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Status(args) => serve::ask::status(&args),
        Command::Top(args) => serve::ask::top(&args),
        Command::Flush(args) => serve::ask::flush(&args),
        Command::Placement(args) => serve::ask::placement(&args),
        Command::Detach(args) => serve::ask::detach(&args),
        Command::Health(args) => serve::ask::health(&args),
        Command::Upgrade(args) => serve::ask::upgrade(&args),
        Command::Arguments(args) => serve::ask::arguments(&args),
        Command::Snapshot(args) => backup::snapshot(&args),
        Command::Freeze(args) => backup::freeze(&args),
        Command::Thaw(args) => backup::thaw(&args),
        Command::OnBattery(args) => power::run(&args, true),
        Command::OnMains(args) => power::run(&args, false),
        Command::Disk(args) => disk::run(&args),
        Command::Libvirt(args) => libvirt::run(&args),
        Command::Inspect(args) => inspect::run(args),
        Command::Lab(args) => become_program(LAB, args.arguments),
        Command::DiskModel(args) => become_program(LAB, with("disk-model", args)),
        Command::JournalServer(args) => become_program(JOURNAL_SERVER, args.arguments),
        Command::Ssd(args) => become_program(LAB, with("ssd", args)),
        Command::Trace(args) => become_program(LAB, with("trace", args)),
        Command::Documents(args) => match args.write(CommandLine::command(), &OTHER_PROGRAMS) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => exit::report(&error.into()),
        },
        Command::Worker(args) => worker_command::run(args),
        Command::Depot => serve::depot::run(),
    })
}

/// A command of another program, with its arguments.
fn with(command: &str, args: OtherArgs) -> impl Iterator<Item = OsString> {
    std::iter::once(OsString::from(command)).chain(args.arguments)
}
