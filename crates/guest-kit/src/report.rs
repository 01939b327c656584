//! The report channel: short lines that a guest writes to its second serial port, read by the
//! host as they come. What was written before a kill is still read after it.
//!
//! Lines: `up` (user space runs), `mark TEXT`, `ack STREAM NUMBER` (the record of that number is
//! durable, says fsync), `exit CODE` (the host's script ended). A line that ends with `#` was cut
//! by a reset and is not believed. Anything else is counted as noise.
//!
//! Failure story: a guest may write garbage for ever; lines, marks and streams are bounded, and
//! what is beyond the bound is counted and dropped.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const LINE_BYTES_MAX: u64 = 4096;
const ENTRIES_MAX: usize = 10_000;

/// The acknowledgements of one stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acknowledged {
    /// How many acknowledgements came.
    pub count: u64,
    /// The highest number acknowledged; every lower one of the stream was acknowledged before.
    pub last: Option<u64>,
    /// Acknowledgements that came out of order, which no tool of ours sends.
    pub out_of_order: u64,
}

/// All that a guest has reported so far.
#[derive(Clone, Debug, Default)]
pub struct Reported {
    /// How often user space came up (more than once after a reset).
    pub boots: u32,
    /// The texts of `mark` lines, in order.
    pub marks: Vec<String>,
    /// Acknowledgements by stream.
    pub acknowledged: BTreeMap<String, Acknowledged>,
    /// The exit code of the host's script, once it has ended.
    pub exit_code: Option<i32>,
    /// Lines that were not understood or beyond a bound.
    pub noise: u64,
    /// The channel is at its end: QEMU is gone.
    pub closed: bool,
}

impl Reported {
    fn line(&mut self, line: &str) {
        if line.ends_with('#') {
            return;
        }
        let mut words = line.splitn(2, ' ');
        let (word, rest) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let understood = match word {
            "up" => {
                self.boots = self.boots.saturating_add(1);
                true
            }
            "mark" if self.marks.len() < ENTRIES_MAX => {
                self.marks.push(rest.to_owned());
                true
            }
            "exit" => rest.parse().map(|code| self.exit_code = Some(code)).is_ok(),
            "ack" => self.acknowledgement(rest),
            _ => false,
        };
        if !understood {
            self.noise = self.noise.saturating_add(1);
        }
    }

    fn acknowledgement(&mut self, rest: &str) -> bool {
        let Some((stream, number)) = rest.rsplit_once(' ') else { return false };
        let Ok(number) = number.parse::<u64>() else { return false };
        if !self.acknowledged.contains_key(stream) && self.acknowledged.len() >= ENTRIES_MAX {
            return false;
        }
        let entry = self.acknowledged.entry(stream.to_owned()).or_default();
        entry.count = entry.count.saturating_add(1);
        if entry.last.is_some_and(|last| number <= last) {
            entry.out_of_order = entry.out_of_order.saturating_add(1);
        } else {
            entry.last = Some(number);
        }
        true
    }
}

/// The host's end of a report channel, filled by a thread.
#[derive(Clone, Default)]
pub struct ReportChannel {
    shared: Arc<(Mutex<Reported>, Condvar)>,
    /// The other direction, once somebody is connected.
    writer: Arc<Mutex<Option<UnixStream>>>,
}

impl ReportChannel {
    /// Accepts one connection on `listener` and reads lines from it until its end.
    pub(crate) fn listen(listener: UnixListener) -> Self {
        let channel = Self::default();
        let reader = channel.clone();
        // Ends at EOF, or when the listener's owner connects to wake it: never joined.
        std::thread::Builder::new()
            .name("guest-report".to_owned())
            .spawn(move || {
                if let Ok((stream, _)) = listener.accept() {
                    drop(listener);
                    *reader.writer.lock().expect("nothing panics while holding the writer") = stream.try_clone().ok();
                    reader.read(stream);
                }
                reader.lock().closed = true;
                reader.shared.1.notify_all();
            })
            .expect("a thread can be started");
        channel
    }

    fn read(&self, stream: UnixStream) {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            // A line cut short by a kill is not a line: `ack s 12` may have been `ack s 123`.
            if line.last() == Some(&b'\n') {
                let text = String::from_utf8_lossy(&line);
                self.lock().line(text.trim_end_matches(['\r', '\n']));
                self.shared.1.notify_all();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Reported> {
        self.shared.0.lock().expect("nothing panics while holding the report")
    }

    /// Sends a line to the guest, whose script reads it from the same serial port.
    pub(crate) fn tell(&self, line: &str) -> std::io::Result<()> {
        match &mut *self.writer.lock().expect("nothing panics while holding the writer") {
            Some(stream) => stream.write_all(format!("{line}\n").as_bytes()),
            None => Err(std::io::ErrorKind::NotConnected.into()),
        }
    }

    /// A copy of all that came so far.
    pub fn snapshot(&self) -> Reported {
        self.lock().clone()
    }

    /// Waits until `found` gives something; `None` after `timeout` or at the channel's end.
    pub fn wait<T>(&self, timeout: Duration, mut found: impl FnMut(&Reported) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut reported = self.lock();
        loop {
            if let Some(value) = found(&reported) {
                return Some(value);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if reported.closed || left.is_zero() {
                return None;
            }
            reported = self.shared.1.wait_timeout(reported, left).expect("not poisoned").0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_and_a_torn_one_is_not_believed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report");
        let channel = ReportChannel::listen(UnixListener::bind(&path).unwrap());
        let mut guest = UnixStream::connect(&path).unwrap();
        guest.write_all(b"up\r\nack a 0\nack a 1\nmark half way\nwhat?\nack a 1\nack a 5#\nack a 2").unwrap();
        drop(guest);
        let closed = channel.wait(Duration::from_secs(60), |reported| reported.closed.then_some(()));
        assert_eq!(closed, Some(()));
        let reported = channel.snapshot();
        assert_eq!(reported.boots, 1);
        assert_eq!(reported.marks, ["half way"]);
        assert_eq!(reported.acknowledged["a"], Acknowledged { count: 3, last: Some(1), out_of_order: 1 });
        assert_eq!(reported.noise, 1);
        assert_eq!(reported.exit_code, None);
    }
}
