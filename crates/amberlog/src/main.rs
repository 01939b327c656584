//! The `amberlog` command: one module per subcommand, each with its arguments and a `run`.
//!
//! Exit codes are the contract of `docs/`: 0 done, 1 failed, 2 usage, 3 input damaged or refused.

mod disk_model;
mod exit;
mod inspect;
mod journal_server;
mod lab;
mod progress;
mod recover;
mod remote_options;
mod run;
mod serve;
mod shim;
mod ssd;
mod takeover;
mod trace;
mod vm;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "amberlog", version, about = "VM-aware journaling for unmodified Linux guests")]
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
    /// Print the environment and the arguments with which QEMU finds a daemon's disks.
    Arguments(serve::ask::ArgumentsArgs),
    /// Show a journal: superblock, transactions, tags, revokes, where the log ends and why.
    Inspect(inspect::InspectArgs),
    /// Run the papers' experiments on real guests, and report on them.
    Lab(lab::LabArgs),
    /// Serve a modelled disk that several VMs share, for experiments.
    DiskModel(disk_model::DiskModelArgs),
    /// Run the server of remote journals, or list, inspect and delete what one keeps.
    JournalServer(Box<journal_server::JournalServerArgs>),
    /// Simulate what block traces do to an SSD under page-mapped, FAST, Superblock or DFTL translation.
    Ssd(Box<ssd::SsdArgs>),
    /// Summarise and convert block traces.
    Trace(trace::TraceArgs),
}

fn main() -> ExitCode {
    let command_line = CommandLine::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("AMBERLOG_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_target(false)
        .init();
    match command_line.command {
        Command::Recover(args) => recover::run(args),
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::run(&args),
        Command::Status(args) => serve::ask::status(&args),
        Command::Top(args) => serve::ask::top(&args),
        Command::Flush(args) => serve::ask::flush(&args),
        Command::Placement(args) => serve::ask::placement(&args),
        Command::Detach(args) => serve::ask::detach(&args),
        Command::Arguments(args) => serve::ask::arguments(&args),
        Command::Inspect(args) => inspect::run(args),
        Command::Lab(args) => lab::run(args),
        Command::DiskModel(args) => disk_model::run(args),
        Command::JournalServer(args) => journal_server::run(*args),
        Command::Ssd(args) => ssd::run(*args),
        Command::Trace(args) => trace::run(args),
    }
}
