//! What is done when amberlog was killed: somebody finishes its work, and may be killed at it, more than once.

use guest_kit::{Error, Result, program};
use guest_tools::random::Random;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// Who finishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finisher {
    /// `amberlog recover --area`.
    Recover,
    /// The next `amberlog run` on the image.
    Run,
}

/// How a killed amberlog's work is finished.
#[derive(Clone, Copy, Debug)]
pub struct Finish {
    pub by: Finisher,
    /// How often it is killed first.
    pub kills: u64,
    /// It is killed within this time, in microseconds: a recovery takes a few milliseconds.
    pub within_us: u64,
}

impl Finish {
    /// A choice that follows from `random`.
    pub fn of(random: &mut Random) -> Self {
        let by = if random.below(3) == 0 { Finisher::Run } else { Finisher::Recover };
        Self { by, kills: random.below(5), within_us: 2_000 << random.below(6) }
    }

    /// In words.
    pub fn describe(&self) -> String {
        let by = match self.by {
            Finisher::Recover => "recover --area",
            Finisher::Run => "run",
        };
        format!("finished by {by}, killed {} times within {} ms", self.kills, self.within_us / 1000)
    }

    /// Does it. Gives how many of the kills came before the end, and what is wrong.
    pub fn finish(
        &self,
        amberlog: &Path,
        disk: &std::ffi::OsStr,
        area: &Path,
        random: &mut Random,
    ) -> Result<(u64, Vec<String>)> {
        let command = || {
            let mut command = Command::new(amberlog);
            match self.by {
                Finisher::Recover => command.args(["recover", "--area"]).arg(area),
                // The word says nothing where no journal is on a server.
                Finisher::Run => command
                    .args(["run", "--remote-insecure", "--disk"])
                    .arg(disk)
                    .arg("--shm")
                    .arg(area)
                    .args(["--", "true"]),
            };
            command.stdin(Stdio::null()).stdout(Stdio::null());
            command
        };
        let mut cut_off = 0;
        for _ in 0..self.kills {
            let after = Duration::from_micros(random.below(self.within_us));
            let signal = if random.below(3) == 0 { guest_kit::Signal::ABORT } else { guest_kit::Signal::KILL };
            cut_off += u64::from(kill_after(&mut command(), after, signal)?);
        }
        program::run(&mut command(), &[0])?;
        let mut faults = Vec::new();
        // Whatever was cut off may have left a directory that holds nothing; nothing may be owed any more. A worker whose supervisor was
        // killed may have its directory for a moment still, and leave it: it is looked for again.
        let deadline = Instant::now() + Duration::from_secs(5);
        let left = loop {
            let mut sweep = Command::new(amberlog);
            let swept = program::run(sweep.args(["recover", "--json", "--area"]).arg(area), &[0])?;
            let swept: serde_json::Value = serde_json::from_slice(&swept.stdout)
                .map_err(|error| Error::Assets(format!("recover --json is not understood: {error}")))?;
            if swept["logs"].as_array().is_none_or(|logs| !logs.is_empty()) {
                faults.push(format!("after it was finished there was something left to finish: {swept}"));
            }
            let left = entries_of(area);
            if left.is_empty() || Instant::now() > deadline {
                break left;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        faults.extend(left.into_iter().map(|path| format!("{} is left in the area", path.display())));
        Ok((cut_off, faults))
    }
}

/// What of VMs is left in the area. The worker of a supervisor that was killed may be about to remove its directory still.
pub fn left_in(area: &Path) -> Vec<PathBuf> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let left = entries_of(area);
        if left.is_empty() || Instant::now() > deadline {
            return left;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn entries_of(area: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(area);
    entries.map_or_else(|_| Vec::new(), |entries| entries.flatten().map(|entry| entry.path()).collect())
}

/// Starts a command and kills it. Says whether it still ran.
fn kill_after(command: &mut Command, after: Duration, signal: guest_kit::Signal) -> Result<bool> {
    let failed = |error: std::io::Error| Error::Assets(format!("killing a recovery: {error}"));
    let mut child = command.stderr(Stdio::null()).spawn().map_err(failed)?;
    std::thread::sleep(after);
    if child.try_wait().map_err(failed)?.is_none()
        && let Some(pid) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw)
    {
        let _ = rustix::process::kill_process(pid, signal);
    }
    let deadline = Instant::now() + LIMIT;
    loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => return Ok(status.signal().is_some()),
            None if Instant::now() > deadline => {
                let _ = child.kill();
                return Err(Error::Assets("a recovery that was killed does not end".to_owned()));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
