//! The process that serves the guest dies again and again while the guest works; it is to notice nothing.

use guest_kit::{Error, Guest, Result, Signal, worker_of};
use guest_tools::random::Random;
use rustix::process::{Pid, kill_process};
use std::time::{Duration, Instant};

/// Between two kills, at most: now and then the next worker has not begun yet.
const PAUSE_US_MAX: u64 = 400_000;
/// How long until there is another worker.
const SUCCESSOR: Duration = Duration::from_secs(60);
/// How long until the guest gets on with its work.
const LIMIT: Duration = Duration::from_secs(180);
/// After so many kills the guest has to have got on with its work.
const UNTIL_PROGRESS: u64 = 10;

fn next_worker(guest: &Guest, last: Option<u32>) -> Result<u32> {
    let deadline = Instant::now() + SUCCESSOR;
    loop {
        match worker_of(guest.process_id()).filter(|pid| Some(*pid) != last) {
            Some(pid) => return Ok(pid),
            None if Instant::now() > deadline => {
                return Err(Error::Assets(format!("no other worker has followed; amberlog says: {}", guest.stderr())));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Kills the worker so many times, and sees now and then that the guest gets on with its work.
///
/// # Errors
/// When no other one goes on, or the guest does not.
pub fn storm(guest: &mut Guest, kills: u64, stream: &str, random: &mut Random) -> Result<()> {
    let mut last = None;
    for kill in 1..=kills {
        std::thread::sleep(Duration::from_micros(random.below(PAUSE_US_MAX)));
        let worker = next_worker(guest, last)?;
        last = Some(worker);
        if let Some(pid) = i32::try_from(worker).ok().and_then(Pid::from_raw) {
            // It may have been killed by something else, which is as good.
            let _ = kill_process(pid, Signal::KILL);
        }
        if kill % UNTIL_PROGRESS == 0 || kill == kills {
            let before = guest.acknowledged(stream).last.unwrap_or(0);
            guest.wait_acknowledged(stream, before + 3, LIMIT)?;
        }
    }
    Ok(())
}

/// What the guest's kernel says of its disks, if anything.
pub fn complaints(guest: &Guest) -> Vec<String> {
    const SIGNS: [&str; 4] = ["I/O error", "Aborting journal", "EXT4-fs error", "EXT3-fs error"];
    let console = guest.console();
    let lines = console.lines().filter(|line| SIGNS.iter().any(|sign| line.contains(sign)));
    lines.map(|line| format!("the guest noticed: {line}")).collect()
}
