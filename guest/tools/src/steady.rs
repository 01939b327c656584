//! A stream of 4 KB requests at a steady rate, whatever becomes of those before, and how long each took from the moment at which it was
//! due. So what waited because one before it was slow counts as well, as it would for somebody who asks at that rate.
//!
//! Which times belong together the host says: a file has the name of a window, `none` between two. When it names another one, the times
//! of the last are told.

use crate::options::Options;
use crate::random::Random;
use crate::report::{CHANNEL, Report};
use crate::{Result, at};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
/// `O_DIRECT` of x86 and RISC-V alike.
const O_DIRECT: i32 = 0o40000;
/// The time between two windows.
const NO_WINDOW: &str = "none";
/// The host takes lines of at most 4 KB.
const TIMES_A_LINE: usize = 200;

/// `guest-tools steady --file F --stream WORD --window FILE [--file-mib N] [--interval-us N] [--seed N] [--durable]`: runs until it is
/// ended. Reads and writes in turns, past the cache; with `--durable` it writes through the cache, each time with a flush. Tells
/// `steady-ready STREAM`, and of each window `steady-times STREAM WINDOW MICROSECONDS,...` and then `steady STREAM WINDOW COUNT`.
pub fn run(mut options: Options) -> Result<()> {
    let path = PathBuf::from(options.required("file")?);
    let stream = options.required("stream")?;
    let window = PathBuf::from(options.required("window")?);
    let blocks = options.number("file-mib", 1, 1..=1 << 20)? * (1 << 20) / BLOCK;
    let interval = Duration::from_micros(options.number("interval-us", 5000, 100..=10_000_000)?);
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let is_durable = options.flag("durable");
    options.finish()?;
    let mut report = Report::open(CHANNEL, "steady")?;
    let file = std::fs::File::create(&path).map_err(at("create", &path))?;
    let mut random = Random::new(seed);
    // Direct requests want memory at a multiple of a block.
    let mut memory = vec![0; 2 * BLOCK as usize];
    let begin = memory.as_ptr().align_offset(BLOCK as usize);
    let block = &mut memory[begin..begin + BLOCK as usize];
    random.fill(block);
    for index in 0..blocks {
        file.write_all_at(block, index * BLOCK).map_err(at("write", &path))?;
    }
    file.sync_all().map_err(at("write", &path))?;
    drop(file);
    let flags = if is_durable { 0 } else { O_DIRECT };
    let file =
        std::fs::File::options().read(true).write(true).custom_flags(flags).open(&path).map_err(at("open", &path))?;
    report.mark(&format!("steady-ready {stream}"))?;
    let mut windows = Windows::default();
    let mut pace = Pace::new(interval, Instant::now());
    let mut is_read = false;
    loop {
        std::thread::sleep(pace.left(Instant::now()));
        // Of no name, nothing has been said yet.
        let name = std::fs::read_to_string(&window).unwrap_or_default();
        if let Some((ended, times_us)) = windows.named(name.trim()) {
            for line in lines(&stream, &ended, &times_us) {
                report.mark(&line)?;
            }
            // Telling is slow, and no disk's fault.
            pace.begin_anew(Instant::now());
            continue;
        }
        let number = random.below(blocks);
        if is_read {
            file.read_exact_at(block, number * BLOCK).map_err(at("read", &path))?;
        } else {
            block[..8].copy_from_slice(&number.to_le_bytes());
            file.write_all_at(block, number * BLOCK).map_err(at("write", &path))?;
        }
        if is_durable {
            file.sync_data().map_err(at("make durable", &path))?;
        }
        is_read = !is_durable && !is_read;
        windows.add(pace.ended(Instant::now()));
    }
}

/// When requests are due.
#[derive(Debug)]
struct Pace {
    interval: Duration,
    due: Instant,
}

impl Pace {
    fn new(interval: Duration, now: Instant) -> Self {
        Self { interval, due: now + interval }
    }

    /// How long until the next one is due; nothing where it is late.
    fn left(&self, now: Instant) -> Duration {
        self.due.saturating_duration_since(now)
    }

    /// The one that was due has ended: how long that is after it was due, in µs.
    fn ended(&mut self, now: Instant) -> u64 {
        let took = now.saturating_duration_since(self.due);
        self.due += self.interval;
        u64::try_from(took.as_micros()).unwrap_or(u64::MAX)
    }

    /// Nothing is late any more.
    fn begin_anew(&mut self, now: Instant) {
        self.due = now + self.interval;
    }
}

/// The times of the window that is open.
#[derive(Debug, Default)]
struct Windows {
    name: String,
    times_us: Vec<u64>,
}

impl Windows {
    /// The host says which window this is. Gives the one before, if it was one, with its times.
    fn named(&mut self, name: &str) -> Option<(String, Vec<u64>)> {
        if name == self.name {
            return None;
        }
        let ended = std::mem::replace(&mut self.name, name.to_owned());
        let times_us = std::mem::take(&mut self.times_us);
        (!ended.is_empty() && ended != NO_WINDOW).then_some((ended, times_us))
    }

    fn add(&mut self, time_us: u64) {
        if !self.name.is_empty() && self.name != NO_WINDOW {
            self.times_us.push(time_us);
        }
    }
}

/// What is told of a window. The count comes last: who has heard it has heard all.
fn lines(stream: &str, window: &str, times_us: &[u64]) -> Vec<String> {
    let line = |part: &[u64]| {
        let times: Vec<String> = part.iter().map(u64::to_string).collect();
        format!("steady-times {stream} {window} {}", times.join(","))
    };
    let mut lines: Vec<String> = times_us.chunks(TIMES_A_LINE).map(line).collect();
    lines.push(format!("steady {stream} {window} {}", times_us.len()));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that stands still for four intervals has four late after it, each less than the one before.
    #[test]
    fn what_waits_for_a_slow_request_is_late_as_well() {
        let begin = Instant::now();
        let after = |ms| begin + Duration::from_millis(ms);
        let mut pace = Pace::new(Duration::from_millis(5), begin);
        assert_eq!(pace.left(after(2)), Duration::from_millis(3));
        assert_eq!(pace.ended(after(6)), 1000);
        // Due at 10.
        assert_eq!(pace.ended(after(31)), 21_000);
        for (now, late_us) in [(32, 17_000), (33, 13_000), (34, 9000), (35, 5000)] {
            assert_eq!(pace.left(after(now - 1)), Duration::ZERO);
            assert_eq!(pace.ended(after(now)), late_us);
        }
        pace.begin_anew(after(100));
        assert_eq!(pace.left(after(100)), Duration::from_millis(5));
        assert_eq!(pace.ended(after(107)), 2000);
    }

    #[test]
    fn times_are_of_the_window_in_which_they_came() {
        let mut windows = Windows::default();
        windows.add(1);
        assert_eq!(windows.named(NO_WINDOW), None);
        windows.add(2);
        assert_eq!(windows.named("quiet-1"), None);
        windows.add(3);
        windows.add(4);
        assert_eq!(windows.named("quiet-1"), None);
        assert_eq!(windows.named("recovery-2"), Some(("quiet-1".to_owned(), vec![3, 4])));
        windows.add(5);
        assert_eq!(windows.named(NO_WINDOW), Some(("recovery-2".to_owned(), vec![5])));
    }

    #[test]
    fn a_window_is_told_in_lines_that_the_host_takes_and_its_count_is_the_last() {
        let times: Vec<u64> = (0..450).map(|number| 9_999_000 + number).collect();
        let lines = lines("held", "recovery-12", &times);
        assert_eq!(lines.len(), 4);
        assert!(lines.iter().all(|line| line.len() < 4000), "{lines:?}");
        assert!(lines[0].starts_with("steady-times held recovery-12 9999000,9999001,"), "{}", lines[0]);
        assert_eq!(lines[3], "steady held recovery-12 450");
        assert_eq!(super::lines("held", "quiet-1", &[]), ["steady held quiet-1 0"]);
    }
}
