//! A small client of QEMU's machine protocol (QMP), in the session that QEMU opened to us.
//!
//! Failure story: a refused command is an error with QEMU's own words; no answer within half a
//! minute is an error too. Events are skipped.

use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

const ANSWER: Duration = Duration::from_secs(30);
const LINE_BYTES_MAX: u64 = 1 << 20;

/// A QMP session past its greeting.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Qmp {
    /// Accepts QEMU's connection and leaves the capabilities negotiation.
    pub(crate) fn accept(listener: &UnixListener, timeout: Duration) -> Result<Self> {
        let lost = |error: std::io::Error| Error::Qmp(format!("no session: {error}"));
        listener.set_nonblocking(true).map_err(lost)?;
        let deadline = Instant::now() + timeout;
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(Error::Qmp("QEMU did not open a session".to_owned()));
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(lost(error)),
            }
        };
        stream.set_nonblocking(false).map_err(lost)?;
        stream.set_read_timeout(Some(ANSWER)).map_err(lost)?;
        let writer = stream.try_clone().map_err(lost)?;
        let mut session = Self { reader: BufReader::new(stream), writer };
        session.line()?; // the greeting
        session.execute("qmp_capabilities", Value::Null)?;
        Ok(session)
    }

    /// Sends a command and gives its `return` value; `arguments` is an object or null.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut message = json!({ "execute": command });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let mut text = message.to_string();
        text.push('\n');
        self.writer
            .write_all(text.as_bytes())
            .map_err(|error| Error::Qmp(format!("cannot send {command}: {error}")))?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                let words = error["desc"].as_str().unwrap_or("no reason given");
                return Err(Error::Qmp(format!("{command} was refused: {words}")));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        match self.reader.by_ref().take(LINE_BYTES_MAX).read_line(&mut line) {
            Ok(0) => Err(Error::Qmp("QEMU closed the session".to_owned())),
            Err(error) => Err(Error::Qmp(format!("no answer: {error}"))),
            Ok(_) => {
                serde_json::from_str(&line).map_err(|error| Error::Qmp(format!("not understood: {error}: {line}")))
            }
        }
    }

    /// Resets the machine, as its reset button would.
    pub fn system_reset(&mut self) -> Result<()> {
        self.execute("system_reset", Value::Null).map(drop)
    }

    /// Stops all virtual processors.
    pub fn stop(&mut self) -> Result<()> {
        self.execute("stop", Value::Null).map(drop)
    }

    /// Lets the virtual processors go on.
    pub fn cont(&mut self) -> Result<()> {
        self.execute("cont", Value::Null).map(drop)
    }

    /// Ends QEMU in its own good order (the guest is not asked).
    pub fn quit(&mut self) -> Result<()> {
        self.execute("quit", Value::Null).map(drop)
    }

    /// The machine's state: "running", "paused", "shutdown", …
    pub fn status(&mut self) -> Result<String> {
        let answer = self.execute("query-status", Value::Null)?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Changes the size of a plain QEMU drive (not of one served over vhost-user).
    pub fn block_resize(&mut self, node_name: &str, size_bytes: u64) -> Result<()> {
        self.execute("block_resize", json!({ "node-name": node_name, "size": size_bytes })).map(drop)
    }

    /// Runs a command of the human monitor and gives what it prints.
    pub fn human(&mut self, command_line: &str) -> Result<String> {
        let answer = self.execute("human-monitor-command", json!({ "command-line": command_line }))?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }
}
