//! `amberlog lab`: starts `amberlog-lab`, a program of its own, so that what runs VMs in earnest carries no experiments.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Arguments of `amberlog lab`.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub struct LabArgs {
    /// list, run ID..., report DIR; each has --help.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    arguments: Vec<OsString>,
}

/// Becomes that program.
pub fn run(args: LabArgs) -> ExitCode {
    let program = std::env::current_exe().map(|own| own.with_file_name("amberlog-lab"));
    let error = match program {
        Ok(program) => {
            let error = Command::new(&program).args(args.arguments).exec();
            format!("cannot start {}: {error}; it is built from a checkout by 'cargo build -p lab'", program.display())
        }
        Err(error) => format!("cannot find out where amberlog itself is: {error}"),
    };
    eprintln!("amberlog lab: {error}");
    ExitCode::FAILURE
}
