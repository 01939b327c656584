//! One program of amberlog becomes another: `amberlog ssd` is a command of `amberlog-lab`, which lies beside it, so that
//! what runs VMs in earnest carries no experiments and no servers.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The arguments of a command of another program: all of them, `--help` too.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub struct OtherArgs {
    /// --help lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    pub arguments: Vec<OsString>,
}

/// Where the program of this name is: in the directory of this one.
///
/// # Errors
/// A sentence when nobody knows where that is.
pub fn beside(name: &str) -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| format!("cannot find out where this program is: {error}"))?;
    Ok(own.with_file_name(name))
}

/// That such a program cannot be started, and what to do about it.
pub fn not_started(program: &Path, error: &io::Error) -> String {
    let name = program.file_name().unwrap_or(program.as_os_str()).display();
    format!("cannot start {}: {error}; install {name}, or build it with 'cargo build'", program.display())
}

/// Becomes the program of this name in the directory of this one, with these arguments. Returns only when that fails.
pub fn become_program(name: &str, arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let error = match beside(name) {
        Ok(program) => {
            let error = Command::new(&program).args(arguments).exec();
            not_started(&program, &error)
        }
        Err(error) => error,
    };
    eprintln!("amberlog: {error}");
    ExitCode::FAILURE
}
