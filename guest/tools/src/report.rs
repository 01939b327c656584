//! The guest's end of the report channel: one line, one `write`, so that lines of several tools
//! never mix.

use crate::{Result, at};
use std::fs::{File, OpenOptions};
use std::io::Write;

/// Where lines go unless told otherwise: the second serial port.
pub const CHANNEL: &str = "/dev/ttyS1";
/// A mark that begins so says what a tool has read that it had not written.
pub const DAMAGED: &str = "damaged:";

/// An open report channel, for one stream of acknowledgements.
pub struct Report {
    channel: File,
    stream: String,
}

impl Report {
    /// Opens the channel (any file); `stream` must be one word.
    pub fn open(path: &str, stream: &str) -> Result<Self> {
        if stream.is_empty() || stream.contains(char::is_whitespace) {
            return Err(format!("'{stream}' cannot name a stream: one word, please"));
        }
        let channel = OpenOptions::new().append(true).open(path).map_err(at("open", path))?;
        Ok(Self { channel, stream: stream.to_owned() })
    }

    /// Tells the host that `number` is durable.
    pub fn acknowledge(&mut self, number: u64) -> Result<()> {
        let line = format!("ack {} {number}\n", self.stream);
        self.send(&line)
    }

    /// Tells the host how far the tool has come.
    pub fn mark(&mut self, text: &str) -> Result<()> {
        self.send(&format!("mark {text}\n"))
    }

    fn send(&mut self, line: &str) -> Result<()> {
        self.channel.write_all(line.as_bytes()).map_err(|error| format!("cannot report to the host: {error}"))
    }
}
