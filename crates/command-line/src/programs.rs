//! One program of amberlog becomes another: `amberlog ssd` is a command of `amberlog-lab`, which lies beside it, so that
//! what runs VMs in earnest carries no experiments and no servers.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The arguments of a command of another program: all of them, `--help` too.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub struct OtherArgs {
    /// --help lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    pub arguments: Vec<OsString>,
}

/// Becomes the program of this name in the directory of this one, with these arguments. Returns only when that fails.
pub fn become_program(name: &str, arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let error = match std::env::current_exe().map(|own| own.with_file_name(name)) {
        Ok(program) => {
            let error = Command::new(&program).args(arguments).exec();
            format!("cannot start {}: {error}; install {name}, or build it with 'cargo build'", program.display())
        }
        Err(error) => format!("cannot find out where this program is: {error}"),
    };
    eprintln!("amberlog: {error}");
    ExitCode::FAILURE
}
