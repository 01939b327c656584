//! A journal server for the guests of one cell, without TLS, on this machine.
//!
//! Failure story: a server that does not say where it listens is killed, and the cell fails.

use crate::error::{Error, FileContext, Result};
use crate::machine::process_tree_cpu_seconds;
use guest_kit::program;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// `amberlog journal-server`; ends when it is dropped.
pub(crate) struct JournalServer {
    child: Child,
    address: String,
}

impl JournalServer {
    /// Starts a server with a new store in `store`.
    pub(crate) fn start(store: &Path) -> Result<Self> {
        let mut command = Command::new(program::find_program("setpriv")?);
        command.args(["--pdeathsig", "KILL", "--"]).arg(program::workspace_binary("amberlog")?);
        command.args(["journal-server", "--insecure", "--listen", "127.0.0.1:0", "--store"]).arg(store);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).env("AMBERLOG_LOG", "error");
        let child = program::spawn(command).at("start a journal server with its store in", store)?;
        let mut server = JournalServer { child, address: String::new() };
        let mut line = String::new();
        if let Some(stdout) = server.child.stdout.take() {
            // It ends its output when it fails.
            BufReader::new(stdout).read_line(&mut line).at("read what a journal server says of", store)?;
        }
        match line.trim().strip_prefix("listening on ") {
            Some(address) => address.clone_into(&mut server.address),
            None => {
                return Err(Error::Told(format!("the journal server said '{}', not where it listens", line.trim())));
            }
        }
        Ok(server)
    }

    /// HOST:PORT.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Its number.
    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Processor time that it took so far.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        process_tree_cpu_seconds(self.child.id())
    }
}

impl Drop for JournalServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
