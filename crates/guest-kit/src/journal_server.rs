//! A journal server of a test's own, which outlives whoever is killed in it.

use crate::{Error, Result};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// What the journal is called there.
const NAME: &str = "db";

/// One that runs until this is dropped, without TLS, for this host alone.
#[derive(Debug)]
pub struct JournalServer {
    process: Child,
    address: String,
}

impl JournalServer {
    /// Starts one.
    ///
    /// # Errors
    /// When it does not say where it listens.
    pub fn start(amberlog: &Path, store: &Path) -> Result<Self> {
        let failed = |error: std::io::Error| Error::Assets(format!("starting a journal server: {error}"));
        let mut command = Command::new(amberlog);
        command.args(["journal-server", "--insecure", "--listen", "127.0.0.1:0", "--store"]).arg(store);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let mut line = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(failed)?;
        }
        // Ended with this, whatever it said.
        let address = line.trim().strip_prefix("listening on ").map(str::to_owned);
        let server = JournalServer { process, address: address.clone().unwrap_or_default() };
        address
            .map(|_| server)
            .ok_or_else(|| Error::Assets("a journal server does not say where it listens".to_owned()))
    }

    /// The journal there, as options name it.
    pub fn journal(&self) -> String {
        format!("{}/{NAME}", self.address)
    }
}

impl Drop for JournalServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
