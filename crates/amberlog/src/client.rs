//! A running daemon, asked over its control socket.
//!
//! One line of JSON each way. The daemon answers `{"schema":1,...}`, or `{"schema":1,"error":SENTENCE}`.

use anyhow::Context;
use clap::Args;
use command_line::output::in_a_line;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// Where the daemon's sockets are unless its configuration says otherwise: where the service manager has made a directory
/// for it, or where nobody but root, or this user, can make one.
pub fn default_run() -> PathBuf {
    let of_service = std::env::var_os("RUNTIME_DIRECTORY");
    if let Some(first) = of_service.as_ref().and_then(|all| all.to_str()).and_then(|all| all.split(':').next())
        && first.starts_with('/')
    {
        return PathBuf::from(first);
    }
    let system = PathBuf::from("/run/amberlog");
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(own) if own.is_absolute() && !rustix::process::geteuid().is_root() && !system.join(CONTROL).exists() => {
            own.join("amberlog")
        }
        _ => system,
    }
}

/// The control socket's name there.
pub const CONTROL: &str = "control.sock";

/// How long an answer may take beyond what was asked for.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes of an answer: some kilobytes for each VM.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Which daemon.
#[derive(Args, Debug)]
pub struct Daemon {
    /// The directory of the daemon's sockets (`run` in its configuration).
    #[arg(long, value_name = "DIR", default_value_os_t = default_run())]
    pub run: PathBuf,
}

impl Daemon {
    /// Asks what is answered at once.
    ///
    /// # Errors
    /// When no daemon answers, or it says no.
    pub fn ask_quickly(&self, question: &Value) -> anyhow::Result<Value> {
        self.ask(question, PATIENCE)
    }

    /// Asks what may take so many seconds.
    ///
    /// # Errors
    /// When no daemon answers, or it says no.
    pub fn ask_patiently(&self, question: &Value, seconds: u64) -> anyhow::Result<Value> {
        self.ask(question, Duration::from_secs(seconds) + PATIENCE)
    }

    pub fn ask(&self, question: &Value, patience: Duration) -> anyhow::Result<Value> {
        let path = self.run.join(CONTROL);
        let of = || format!("asking the daemon at {}", path.display());
        let mut stream = UnixStream::connect(&path).with_context(|| {
            format!("no daemon answers at {}: start 'amberlog serve', or name its directory with --run", path.display())
        })?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        writeln!(stream, "{question}").with_context(of)?;
        let mut line = String::new();
        let mut reader = BufReader::new(std::io::Read::take(stream, ANSWER_BYTES_MAX));
        reader.read_line(&mut line).with_context(of)?;
        let answer: Value = serde_json::from_str(&line).with_context(of)?;
        match answer["error"].as_str() {
            Some(error) => Err(anyhow::anyhow!("{error}")),
            None => Ok(answer),
        }
    }
}

/// What a worker says, for people: it may say anything.
pub fn text(value: &Value) -> String {
    in_a_line(value.as_str().unwrap_or_default()).into_owned()
}
