//! `amberlog worker`, which a supervisor starts and nobody else.

use crate::exit;
use crate::run::RunArgs;
use crate::serve::work::WorkArgs;
use crate::worker::{STATE_FORMAT, STATE_FORMAT_BEFORE};
use clap::Subcommand;
use command_line::print_line;
use std::process::ExitCode;

/// Arguments of `amberlog worker`.
#[derive(clap::Args, Debug)]
pub struct WorkerArgs {
    /// The user's own file mode creation mask, as a decimal number.
    #[arg(long, default_value_t = 0o077)]
    users_mask: u32,
    /// Say which states of other workers this one can go on with, and end.
    #[arg(long)]
    state_formats: bool,
    /// The same, as builds asked that leave state 4.
    #[arg(long)]
    state_format: bool,
    #[command(subcommand)]
    command: Option<WorkerCommand>,
}

/// What the worker is for.
#[derive(Subcommand, Debug)]
pub enum WorkerCommand {
    /// The VM of an `amberlog run`.
    Run(Box<RunArgs>),
    /// A VM of an `amberlog serve`.
    Serve(WorkArgs),
}

/// Runs the command.
pub fn run(args: WorkerArgs) -> ExitCode {
    own_files::keep_files_private_for(rustix::fs::Mode::from_raw_mode(args.users_mask));
    if args.state_formats {
        print_line!("{STATE_FORMAT},{STATE_FORMAT_BEFORE} {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    if args.state_format {
        // Who asks so goes by whether it is its own.
        print_line!("{STATE_FORMAT_BEFORE} {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    // What follows starts threads, each of which its guest may wait for.
    crate::turns::be_short();
    if args.command.is_some() {
        crate::last_memory::outlive_files();
    }
    match args.command {
        Some(WorkerCommand::Run(args)) => crate::run::work::work(&args),
        Some(WorkerCommand::Serve(args)) => crate::serve::work::work(&args),
        None => exit::report(&exit::usage("this command is started by 'amberlog run' and 'amberlog serve' alone")),
    }
}
